"""One contract for both destinations: a directory of this machine, and a file system of PyArrow."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from pyarrow import fs
from waltz_spark.export import destination as destinations
from waltz_spark.export.destination import (
    Destination,
    Hold,
    LocalDestination,
    destination_of,
    encode_writer,
)
from waltz_spark.export.manifest import LOCK

from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import DiskFull, ExportHeld, NoPermission, StoreFailed


@pytest.fixture(params=["local", "remote"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> Destination:
    place = str(tmp_path / "out")
    return LocalDestination(place) if request.param == "local" else Destination(place, fs.LocalFileSystem())


def put(destination: Destination, path: str, content: bytes) -> None:
    with destination.create(path) as file:
        file.write(content)


def test_nothing_is_there_at_first(destination: Destination) -> None:
    assert destination.names() == destination.names("a/b") == []
    assert destination.read("x") is None
    assert destination.size("x") is None
    destination.remove("x")
    destination.remove_tree("a")


def test_files_come_back_as_they_were_written(destination: Destination) -> None:
    put(destination, "a/one", b"12345")
    assert destination.read("a/one") == b"12345"
    assert destination.size("a/one") == 5
    assert (destination.names(), destination.names("a")) == (["a"], ["one"])
    with destination.open("a/one") as file:
        assert file.read(2) == b"12"
    destination.remove_tree("a")
    assert destination.names() == []


def test_small_steps_make_the_same_file(destination: Destination) -> None:
    content = bytes(range(256)) * 1000
    with destination.create("x", in_small_steps=True) as file:
        file.write(content[:70_000])
        file.write(memoryview(content)[70_000:70_010])
        file.write(content[70_010:])
    assert destination.read("x") == content


def test_a_small_file_never_takes_the_place_of_another(destination: Destination) -> None:
    assert destination.put_new("m/1", b"first")
    assert not destination.put_new("m/1", b"second")
    assert destination.read("m/1") == b"first"
    assert destination.names("m") == ["1"]
    assert destination.names("_waltz/tmp") == []


def test_a_move_never_takes_the_place_of_another(destination: Destination) -> None:
    put(destination, "new", b"new")
    put(destination, "there", b"old")
    assert not destination.move_new("new", "there")
    assert (destination.read("there"), destination.read("new")) == (b"old", b"new")
    assert destination.move_new("new", "name")
    assert (destination.read("name"), destination.read("new")) == (b"new", None)


def test_one_at_a_time(destination: Destination) -> None:
    with destination.hold(encode_writer("one")) as hold:
        hold.check()
        with (
            pytest.raises(ExportHeld, match=f"process {os.getpid()} on {socket.gethostname()}"),
            destination.hold(encode_writer("two")),
        ):
            raise AssertionError("two at the same time")
    with destination.hold(encode_writer("two")):
        pass


def test_a_lock_ends_with_its_process(destination: Destination) -> None:
    """Killed in the middle: the next one need not wait for a lease."""
    kind = (
        "LocalDestination(place)"
        if isinstance(destination, LocalDestination)
        else "Destination(place, fs.LocalFileSystem())"
    )
    code = f"""
import os, sys
from pyarrow import fs
from waltz_spark.export.destination import LocalDestination, encode_writer
from waltz_spark.export.destination import Destination
place = sys.argv[1]
with {kind}.hold(encode_writer("killed")):
    os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code, destination.place], check=False, timeout=60)
    assert done.returncode == -9
    assert json.loads(destination.read(LOCK) or b"")["run"] == "killed"
    with destination.hold(encode_writer("next")):
        pass


def test_a_lease_of_another_machine_counts_until_its_end(tmp_path: Path) -> None:
    destination = Destination(str(tmp_path), fs.LocalFileSystem())
    lease = {"run": "a", "host": "elsewhere", "pid": 1, "until": time.time() + 100}
    put(destination, LOCK, json.dumps(lease).encode())
    with pytest.raises(ExportHeld, match="process 1 on elsewhere"), destination.hold(encode_writer("b")):
        raise AssertionError("two at the same time")
    put(destination, LOCK, json.dumps({**lease, "until": time.time() - 1}).encode())
    with destination.hold(encode_writer("b")):
        pass
    assert destination.read(LOCK) is None


def overtake(destination: Destination, hold: Hold) -> None:
    """Another one's lease, whole, and once more where a renewal that was under way has just written over it."""
    path = Path(destination.place, LOCK)
    other = path.with_name("other")
    while True:
        other.write_text(json.dumps({"run": "b", "host": "elsewhere", "pid": 1, "until": 1e12}))
        other.replace(path)
        hold.check()


def test_whoever_lost_the_lease_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "RENEWAL_SECONDS", 0.01)
    destination = Destination(str(tmp_path), fs.LocalFileSystem())
    with (
        destination.hold(encode_writer("a")) as hold,
        pytest.raises(ExportHeld, match="another exporter has taken it over"),
    ):
        overtake(destination, hold)
    assert b'"b"' in (destination.read(LOCK) or b"")


def test_which_place_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert destination_of("out/") == LocalDestination(str(tmp_path / "out"))
    assert destination_of("file:///data/an%20export/") == LocalDestination("/data/an export")
    assert destination_of("s3a://bucket/x/") == Destination("s3://bucket/x")
    with pytest.raises(BadArgument, match="on another machine"):
        destination_of("file://elsewhere/data")
    with pytest.raises(BadArgument, match="cannot be written to"):
        destination_of("gopher://host/x").names()


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(WaltzError, match="file/out"):
        LocalDestination(str(tmp_path / "file" / "out")).create("x")
    with pytest.raises(WaltzError, match="Not a directory"):
        LocalDestination(str(tmp_path / "file")).names()


def test_a_name_that_is_not_utf_8_is_listed(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).touch()
    assert destination_of(str(tmp_path)).names() == ["a.parquet", os.fsdecode(b"\xff")]
    assert destination_of(str(tmp_path)).names("none") == []


def test_a_store_that_refuses_is_told_in_its_own_words() -> None:
    """There is no number of an operating system in it, and so no advice about disks."""

    class Refusing:
        def get_file_info(self, _: object) -> None:
            raise OSError("When listing objects in bucket 'gone': AWS Error NO_SUCH_BUCKET")

        def open_input_stream(self, _: object) -> None:
            raise PermissionError(13, "no way")

    destination = Destination("gone/export", Refusing())
    with pytest.raises(StoreFailed, match="reading the directory gone/export"):
        destination.names()
    with pytest.raises(NoPermission):
        destination.read("x")


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_full_disk_is_said_once_and_as_what_it_is(tmp_path: Path, is_whole: bool) -> None:
    """What could not be written is still in the file's buffer, and closing it fails once more."""
    output = LocalDestination(str(tmp_path)).create("file")
    cast(Any, output)._file.close()
    cast(Any, output)._file = open("/dev/full", "wb")  # noqa: SIM115 - the output closes it

    def put() -> None:
        with output as file:
            file.write(b"x" * 100)
            if not is_whole:
                raise DiskFull("somewhere else")

    with pytest.raises(DiskFull) as told:
        put()
    assert ("writing" in told.value.message) == is_whole
    assert not is_whole or "free space there" in told.value.detail_next_step


def test_a_lock_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFull, match="_waltz/lock"), LocalDestination(str(tmp_path)).hold("me"):
        pytest.fail("held")
