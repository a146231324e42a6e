"""What a run that was killed leaves on this machine, and how the next one knows that it may go.

What a run needs only while it lives is in a directory of its own, and the run holds a lock on that directory. The system
takes the lock away with the process, however that ended, and gives it to nobody else, as it does with the numbers of
processes. So a directory whose lock can be had belongs to nobody. A log is locked by all who can still write to it (Java
and its workers); of those that nobody writes to, the newest stay, for whoever wants to know why a run failed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from waltzd.disk.real import translate

PREFIX = "waltz-run-"
LOGS_KEPT = 10


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """A directory that is gone when this is over, or when the next run clears up. By default among temporary files."""
    try:
        path, lock = _made(parent)
    except OSError as error:
        raise translate(error, f"making a directory in {parent or tempfile.gettempdir()}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _made(parent: Path | None) -> tuple[Path, int]:
    while True:  # whoever clears up just now may find it before it is locked, and takes it away
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = _locked(path)
        if lock is not None:
            return path, lock


def clear_up(parents: Sequence[Path] = ()) -> None:
    """Directories of runs that are over, among temporary files and in these. What cannot be removed harms nobody."""
    for parent in (Path(tempfile.gettempdir()), *parents):
        for path in parent.glob(f"{PREFIX}*"):
            lock = _locked(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def clear_logs(folder: Path, kept: int = LOGS_KEPT) -> None:
    """Their names begin with the time."""
    free = [path for path in sorted(folder.glob("*.log"), reverse=True) if _is_free(path)]
    for path in free[kept:]:
        with suppress(OSError):
            path.unlink()


def lock_log(number: int) -> None:
    """For as long as anybody has this open file, by whatever number."""
    fcntl.flock(number, fcntl.LOCK_SH)


def _locked(path: Path) -> int | None:
    """Ours alone from here on; None where it is somebody's, or gone."""
    number = _opened(path, os.O_DIRECTORY)
    if number is None:
        return None
    with suppress(OSError):
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there, ours = os.lstat(path), os.fstat(number)
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) and ours.st_uid == os.geteuid():
            return number
    os.close(number)
    return None


def _is_free(path: Path) -> bool:
    number = _opened(path, 0)
    if number is None:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(number)
    return True


def _opened(path: Path, flags: int) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags)
    except OSError:
        return None
