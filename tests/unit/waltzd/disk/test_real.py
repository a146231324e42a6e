"""What only a real file system has: links, devices, other processes, limits, errors of the system."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from waltzd.disk.real import GuestDisk, RealDisk, RealFile, translate
from waltzd.errors import EXIT_DISK_FAULT, WaltzError
from waltzd.errors.operations import (
    DirectoryHeld,
    DiskFull,
    FlushFailed,
    NoPermission,
    NotRegularFile,
    PathMissing,
    ReadFailed,
    TooManyFiles,
)

DISK = RealDisk()


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    attempts: list[Callable[[], object]] = [
        lambda: DISK.open(str(link)),
        lambda: DISK.open(str(link), write=True),
        lambda: DISK.create(str(link)),
    ]
    for attempt in attempts:
        with pytest.raises(NotRegularFile):
            attempt()
    assert (tmp_path / "target").read_bytes() == b"precious"
    [entry] = [entry for entry in DISK.list(str(tmp_path)) if entry.name == "link"]
    assert not entry.is_directory


def test_a_link_to_nowhere_is_there(tmp_path: Path) -> None:
    """`exists` must not say no to a name that is taken."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert DISK.exists(str(tmp_path / "link"))


def test_what_is_renamed_while_a_directory_is_listed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool looks at the directory of a daemon that works."""
    for name in ("0.seg", "1.seg.new"):
        (tmp_path / name).write_bytes(b"12345")
    scan = os.scandir

    @contextmanager
    def then_renamed(path: str) -> Iterator[list[os.DirEntry[str]]]:
        with scan(path) as found:
            entries = list(found)
        (tmp_path / "1.seg.new").rename(tmp_path / "1.seg")
        yield entries

    monkeypatch.setattr(os, "scandir", then_renamed)
    assert [(entry.name, entry.size) for entry in DISK.list(str(tmp_path))] == [("0.seg", 5)]


def test_a_link_to_a_directory_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").symlink_to(tmp_path / "0")
    assert [(entry.name, entry.is_directory) for entry in DISK.list(str(tmp_path))] == [("0", True), ("1", False)]


def test_a_pipe_is_refused_without_waiting_for_its_other_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotRegularFile):
        DISK.open(str(tmp_path / "pipe"))


def test_a_device_is_refused() -> None:
    with pytest.raises(NotRegularFile):
        DISK.open("/dev/null", write=True)


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX | fcntl.LOCK_NB, *map(int, sys.argv[3:]))
print("held", flush=True)
sys.stdin.read()
"""


HOLD_AS_OURS = """
import sys
from waltzd.disk.real import RealDisk
file = RealDisk().open(sys.argv[1], write=True)
file.lock()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [[HOLD, "lockf", "128", "0"], [HOLD_AS_OURS]], ids=["as the original does", "as ours does"])
def test_a_directory_that_another_process_holds(tmp_path: Path, how: list[str]) -> None:
    path = tmp_path / "waltz-storage.ctl"
    path.write_bytes(bytes(128))
    file = DISK.open(str(path), write=True)
    with subprocess.Popen(
        [sys.executable, "-c", how[0], str(path), *how[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        assert file.is_locked_elsewhere()
        with pytest.raises(DirectoryHeld, match="is held by another process"):
            file.lock()
        holder.stdin.close()
    assert not file.is_locked_elsewhere()
    file.lock()


def test_the_original_cannot_take_what_ours_holds(tmp_path: Path) -> None:
    path = tmp_path / "waltz-storage.ctl"
    path.write_bytes(bytes(128))
    file = DISK.open(str(path), write=True)
    file.lock()
    attempt = subprocess.run(
        [sys.executable, "-c", HOLD, str(path), "lockf", "128", "0"], input=b"", capture_output=True, check=False
    )
    assert attempt.returncode != 0
    assert b"BlockingIOError" in attempt.stderr


def test_a_file_that_may_grow_no_further_is_a_full_disk(tmp_path: Path) -> None:
    file = DISK.create(str(tmp_path / "a"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(DiskFull, match="EFBIG"):
            file.write_many(0, [bytes(600), bytes(600)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.truncate(0)
    file.write(0, b"goes on")
    assert file.read(0, 99) == b"goes on"


def test_a_flush_that_fails_is_fatal_and_names_device_and_cause() -> None:
    """A pipe cannot be flushed; the system says so with an error, as a broken disk does."""
    reading, writing = os.pipe()
    file = RealFile("a", writing)
    with pytest.raises(FlushFailed, match=r"flushing a: .*\(EINVAL\) on device \d+:\d+") as caught:
        file.flush()
    assert caught.value.exit_code == EXIT_DISK_FAULT
    assert caught.value.facts["errno"] == "EINVAL"
    file.close()
    os.close(reading)


def test_a_write_that_fails_for_another_reason_than_space_is_fatal(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    file = DISK.open(str(tmp_path / "a"))
    with pytest.raises(FlushFailed, match="EBADF"):
        file.write(0, b"X")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EPERM, errno.EIO])
def test_a_file_system_that_becomes_read_only_is_fatal(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel remounts it so after an error of the device. The write was taken for a refused one, of which nothing is
    left, and the next append met what was left of it."""

    def fail(*_: object) -> int:
        raise OSError(number, "x")

    with closing(DISK.create(str(tmp_path / "a"))) as file:
        monkeypatch.setattr(os, "pwritev", fail)
        monkeypatch.setattr(os, "ftruncate", fail)
        changes: list[Callable[[], None]] = [lambda: file.write(0, b"X"), lambda: file.truncate(0)]
        for change in changes:
            with pytest.raises(FlushFailed, match=errno.errorcode[number]):
                change()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EACCES, NoPermission),
        (errno.EROFS, NoPermission),
        (errno.ENOENT, PathMissing),
        (errno.ENOTDIR, PathMissing),
        (errno.ELOOP, NotRegularFile),
        (errno.EAGAIN, DirectoryHeld),
        (errno.EIO, ReadFailed),
        (errno.ESTALE, ReadFailed),
        (errno.EMFILE, TooManyFiles),
        (errno.ENOMEM, TooManyFiles),
    ],
)
def test_errors_of_the_system_become_ours(number: int, expected: type[WaltzError]) -> None:
    error = translate(OSError(number, "x"), "reading it")
    assert type(error) is expected
    assert error.message.startswith("reading it: ")
    assert errno.errorcode[number] in error.message


def test_a_directory_that_exists_is_not_made_again(tmp_path: Path) -> None:
    attempts: list[Callable[[], None]] = [
        lambda: DISK.make_directory(str(tmp_path)),
        lambda: DISK.remove_directory(str(tmp_path)),
    ]
    (tmp_path / "a").touch()
    for attempt in attempts:
        with pytest.raises(WaltzError):
            attempt()
    assert (tmp_path / "a").exists()


# -- what root makes in the directory of a daemon ----------------------------------------------------------------------

SOMEBODY = 65_534
ONLY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to somebody else, which only root can")


def owners(*paths: Path) -> set[tuple[int, int]]:
    return {(found.st_uid, found.st_gid) for found in map(os.lstat, paths)}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A directory of somebody else."""
    home = tmp_path / "theirs"
    home.mkdir()
    os.chown(home, SOMEBODY, SOMEBODY)
    return home


@ONLY_ROOT
def test_what_root_makes_belongs_to_the_owner_of_its_directory(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = GuestDisk()
    disk.make_directory(str(theirs / "0"))
    (theirs / "0" / "left").touch()  # by a tool of root that knew nothing of this
    for name in ("new", "left"):
        disk.create(str(theirs / "0" / name)).close()
    assert owners(theirs / "0", theirs / "0" / "new", theirs / "0" / "left") == {(SOMEBODY, SOMEBODY)}
    monkeypatch.chdir(theirs)
    disk.create("here").close()
    assert owners(theirs / "here") == {(SOMEBODY, SOMEBODY)}
    DISK.create(str(theirs / "of a daemon")).close()
    assert owners(theirs / "of a daemon") == {(0, 0)}


@ONLY_ROOT
def test_a_file_that_also_has_a_name_elsewhere_is_given_to_nobody(theirs: Path) -> None:
    precious = theirs.parent / "precious"
    precious.touch()
    os.link(precious, theirs / "new")
    GuestDisk().create(str(theirs / "new")).close()
    assert owners(precious) == {(0, 0)}


def test_who_is_not_root_gives_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "fchown", lambda *_: pytest.fail("only root may"))
    monkeypatch.setattr(os, "fstat", _with_owner(os.fstat, SOMEBODY))
    GuestDisk().create(str(tmp_path / "a")).close()
    GuestDisk().make_directory(str(tmp_path / "b"))
    assert (tmp_path / "b").is_dir()


def test_a_system_that_does_not_let_root_give_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root of a container, or on a file system of another machine."""

    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", refuse)
    monkeypatch.setattr(os, "fstat", _with_owner(os.fstat, SOMEBODY))
    for attempt in (GuestDisk().create, GuestDisk().make_directory):
        with pytest.raises(NoPermission, match=r"giving .* to the owner of its directory"):
            attempt(str(tmp_path / attempt.__name__))


def _with_owner(look: Callable[[int], os.stat_result], owner: int) -> Callable[[int], os.stat_result]:
    """As if what is open belonged to somebody else."""

    def seen(fd: int) -> os.stat_result:
        found = list(look(fd))
        found[stat.ST_UID] = owner
        return os.stat_result(found)

    return seen
