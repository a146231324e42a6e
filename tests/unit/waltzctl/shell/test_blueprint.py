"""Files that a command writes whole."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waltzctl.shell.blueprint import write_new, write_whole
from waltzd.errors import WaltzError
from waltzd.errors.operations import DiskFull


def test_a_directory_is_no_place_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root has no name, which was a ValueError; beside any other directory a file was left."""
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there"
    there.mkdir()
    for path in (there, Path("/"), Path(), Path("..")):
        with pytest.raises(WaltzError, match=f"writing {path}"):
            write_whole(path, b"x")
    assert [*tmp_path.iterdir()] == [there]
    write_whole(there / "file", b"x")
    assert (there / "file").read_bytes() == b"x"


def test_a_file_is_replaced_and_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_bytes(b"before")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # so that a writer does not wait for one
    try:
        for path in (file, pipe):
            write_whole(path, b"after", 0o600)
        assert file.read_bytes() == os.read(reader, 10) == b"after"
        assert pipe.is_fifo()
    finally:
        os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


def test_one_that_fails_takes_nothing_from_another_that_writes_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents are saved by hand and by a timer at once, and the disk is full for one of them."""
    file, opens, fsync = tmp_path / "file", os.fdopen, os.fsync
    file.write_bytes(b"before")
    has_opened, may_fail, errors = threading.Event(), threading.Event(), list[WaltzError]()

    def open_second(*given: Any, **more: Any) -> Any:
        if threading.current_thread() is not second:
            return opens(*given, **more)
        has_opened.set()
        may_fail.wait()
        raise OSError(errno.ENOSPC, "full")

    def write_second() -> None:
        try:
            write_whole(file, b"second")
        except WaltzError as error:
            errors.append(error)

    def flush(fd: int) -> None:
        if second.ident is None:
            second.start()
            has_opened.wait(0.3)
        fsync(fd)

    second = threading.Thread(target=write_second)
    monkeypatch.setattr(os, "fdopen", open_second)
    monkeypatch.setattr(os, "fsync", flush)
    write_whole(file, b"first")
    may_fail.set()
    second.join()
    assert file.read_bytes() == b"first"
    assert [type(error) for error in errors] == [DiskFull]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_secret_is_not_written_into_a_file_that_others_may_read(tmp_path: Path) -> None:
    (tmp_path / "file.new").write_bytes(b"of a killed command")
    (tmp_path / "file.new").chmod(0o644)
    write_whole(tmp_path / "file", b"secret", 0o600)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


WRITES: list[Callable[[Path, bytes], None]] = [write_whole, write_new]


@pytest.mark.parametrize("write", WRITES)
def test_a_name_is_flushed_behind_its_content(
    write: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents are deleted when the file that has them is written: its name must survive a power cut as well."""
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(_what(fd, tmp_path / "file")))
    write(tmp_path / "file", b"x")
    assert flushed == ["content", "directory of the file"]


def _what(fd: int, path: Path) -> str:
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        return "content"
    return "directory of the file" if path.exists() else "directory without the file"


@pytest.mark.parametrize("write", WRITES)
def test_a_full_disk_is_told_in_the_words_of_the_operator_and_leaves_nothing(
    write: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(DiskFull) as caught:
        write(tmp_path / "file", b"x")
    assert (caught.value.detail_not_done, "name a file in another directory" in caught.value.detail_next_step) == (
        "nothing was written", True,
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
