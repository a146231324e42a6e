"""Files that a command writes whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from waltzctl.shell.blueprint import write_whole
from waltzd.errors import WaltzError


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
