"""Directory of a local cluster: its lock, which files in it belong to the cluster, and their removal.

One process at a time starts, stops or removes something there. It holds a file lock, which the system releases when the
process ends; a lock file that is left over blocks no other process.

`waltzctl reset` removes what the cluster made, and nothing else. Files of the cluster are recognized by place and name.
Other files stay, with the directories that hold them; links are never followed or removed. A note that the removal has
begun is written first and removed last, so a half-removed cluster is never started, and the same command finishes the
removal.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from waltzctl.local_cluster.daemon import birth
from waltzctl.shell.blueprint import ARCHIVE_KEY, BLUEPRINT, CREDENTIALS, STATE
from waltzd.daemon.audit import AUDIT_NAME, TRAFFIC_NAME
from waltzd.daemon.logs import EVENTS_NAME
from waltzd.disk.real import translate
from waltzd.errors.operations import AlreadyThere, DirectoryHeld, NoLocalCluster
from waltzd.format.layout import CONTROL_NAME, GROUPS_NAME, HARD_STATE_NAME, IDENTITY_NAME, RESERVE_NAME, SCRUB_NAME

LOCK = "lock"
_PID_BYTES = 200
NOTE = "removal-has-begun"
_LAST = (STATE, BLUEPRINT, NOTE, LOCK)
"""Files removed last, in this order: until then the next command finds what it needs."""
_NEW = r"(\.\d+)?(\.new)?"
_DIRECTORIES = re.compile(
    r"""
    log | certificates | server-\d+ | zookeeper(/data(/version-2)?)?
    | storage-\d+(/data(/\d+(\.set-aside-\d+|\.new)?)?)?
    """,
    re.VERBOSE,
)
_AUDITS = AUDIT_NAME, TRAFFIC_NAME
_AUDIT = "|".join(map(re.escape, _AUDITS))
_OF_A_STORAGE = (CONTROL_NAME, GROUPS_NAME, IDENTITY_NAME, RESERVE_NAME, SCRUB_NAME, EVENTS_NAME, *_AUDITS)
_FILES = re.compile(
    rf"""
    ({re.escape(BLUEPRINT)}|{re.escape(STATE)}|{re.escape(ARCHIVE_KEY)}){_NEW} | {NOTE} | {LOCK}
    | log/(zookeeper|(storage|server)-\d+)\.log(\.old)?
    | server-\d+/(server\.yml | {re.escape(EVENTS_NAME)}(\.new)? | ({_AUDIT})(\.\d+)?)
    | certificates/((zookeeper-)?ca|(storage-storage|server-server)-\d+|(zookeeper|operator|client)-[\w.]+
      |zookeeper-client-[\w-]+)\.(pem|key)
    | certificates/{re.escape(CREDENTIALS)}{_NEW}
    | zookeeper/(keystore|authorities)\.pem
    | zookeeper/(lock|zoo\.cfg|log4j2\.properties|zookeeper\.log(\.\d+)?|hs_err_pid\d+\.log)
    | zookeeper/data/version-2/((log|snapshot)\.[0-9a-f]+(\.\w+)?|(accepted|current)Epoch(\.\w+)?)
    | storage-\d+/storage\.yml
    | storage-\d+/data/({"|".join(map(re.escape, _OF_A_STORAGE))}){_NEW}
    | storage-\d+/data/\d+(\.set-aside-\d+|\.new)?/({HARD_STATE_NAME}|\d{{19}}\.(seg|idx)){_NEW}
    """,
    re.VERBOSE,
)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold the lock: no other waltzctl starts, stops or removes anything in the directory."""
    lock = _locked(directory)
    try:
        yield
    finally:
        os.close(lock)


def wait_unlocked(directory: Path) -> None:
    """Wait until no other waltzctl works on the directory, or it is gone."""
    try:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise translate(error, f"looking who has locked {directory}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _locked(directory: Path) -> int:
    path = directory / LOCK
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError as error:
            raise NoLocalCluster(f"{directory} does not exist") from error
        except OSError as error:
            raise translate(error, f"locking {directory}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, _PID_BYTES, 0).decode("ascii", "replace").strip()
            os.close(lock)
            who = f" (process {holder})" if holder.isdigit() and birth(int(holder)) is not None else ""
            raise DirectoryHeld(
                f"another waltzctl{who} starts or stops the cluster in {directory} at this moment",
                next_step="wait until it has finished, then try again",
            ) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                with suppress(OSError):  # on a full disk the lock has no process number; nothing else changes
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
        os.close(lock)  # the process that held the lock has removed the cluster, with this file


# -- what is ours, and its removal -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Belongings:
    files: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    """Directories, each after those that it holds."""
    foreign: tuple[str, ...] = ()
    """Paths that do not belong to the cluster; a foreign directory is one path, without its content."""
    bytes: int = 0
    """Total size of the cluster's files."""


def is_ours(path: str, *, is_directory: bool) -> bool:
    """Return whether a path, relative to the directory of the cluster, belongs to the cluster."""
    return (_DIRECTORIES if is_directory else _FILES).fullmatch(path) is not None


def is_cluster(directory: Path) -> bool:
    """Return whether `waltzctl up` made a cluster here, even if it is half removed."""
    return (directory / BLUEPRINT).exists() or (directory / NOTE).exists()


def is_whole(directory: Path) -> bool:
    """Return whether there is a cluster here of which nothing was removed."""
    return (directory / BLUEPRINT).exists() and not (directory / NOTE).exists()


def check_whole(directory: Path) -> None:
    if (directory / NOTE).exists():
        raise AlreadyThere(
            f"a removal of the cluster in {directory} was begun and not finished",
            not_done="nothing was started",
            next_step=f"finish it with `waltzctl reset {directory}`",
        )


def survey(directory: Path) -> Belongings:
    """List the files of the cluster and the foreign ones; change nothing."""
    files: list[str] = []
    directories: list[str] = []
    foreign: list[str] = []
    size = 0

    def walk(below: str) -> None:
        nonlocal size
        for entry in sorted(os.scandir(directory / below), key=lambda entry: entry.name):
            path = f"{below}{entry.name}"
            is_directory = entry.is_dir(follow_symlinks=False)
            is_plain = is_directory or entry.is_file(follow_symlinks=False)
            if not (is_plain and is_ours(path, is_directory=is_directory)):
                foreign.append(path)
            elif is_directory:
                walk(f"{path}/")
                directories.append(path)
            else:
                files.append(path)
                size += entry.stat(follow_symlinks=False).st_size

    try:
        walk("")
    except OSError as error:
        raise translate(error, f"looking through {directory}") from error
    return Belongings(files=tuple(files), directories=tuple(directories), foreign=tuple(foreign), bytes=size)


def remove(directory: Path) -> Belongings:
    """Remove the cluster; return what was removed and what stays. The caller holds the lock, and no daemon runs."""
    try:
        (directory / NOTE).touch(mode=0o600)
        _flush(directory)
        found = survey(directory)
        for path in (path for path in found.files if path not in _LAST):
            (directory / path).unlink(missing_ok=True)
        for path in found.directories:
            _remove_empty(directory / path)
        _flush(directory)
        for name in _LAST:
            (directory / name).unlink(missing_ok=True)
        _remove_empty(directory)
    except OSError as error:
        raise translate(error, f"removing the cluster in {directory}") from error
    return found


def _remove_empty(directory: Path) -> None:
    with suppress(OSError):  # it holds a foreign file, is a mount point, or a working directory
        directory.absolute().rmdir()


def _flush(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
