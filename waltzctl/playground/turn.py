"""Whose turn it is to start, stop or remove something in the directory of a cluster on this machine: one at a time.

It is a lock of the operating system on a file there, so it goes with the process that has it, and a file that is left over
holds nobody up. Who has the turn is written into the file, only to be told to whoever is refused.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from waltzctl.playground.daemon import birth
from waltzd.disk.real import translate
from waltzd.errors import DirectoryHeld, NoLocalCluster

LOCK = "lock"
_STORY_BYTES = 200


@contextmanager
def taking_turn(directory: Path) -> Iterator[None]:
    """While this lasts nobody else starts or stops anything there."""
    lock = _locked(directory)
    try:
        yield
    finally:
        os.close(lock)


def wait_for_turn(directory: Path) -> None:
    """Until nobody starts or stops anything there. Nobody does where there is nothing any more."""
    try:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise translate(error, f"looking whose turn it is in {directory}") from error
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
            holder = _holder(lock)
            os.close(lock)
            raise DirectoryHeld(
                f"another waltzctl{holder} starts or stops the cluster in {directory} at this moment",
                next_step="wait until it has finished, then try again",
            ) from error
        if _is_the_one(lock, path):
            _tell_who(lock)
            return lock
        os.close(lock)  # whoever had the turn has removed the cluster, and this file with it


def _is_the_one(lock: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(lock), there)


def _tell_who(lock: int) -> None:
    with suppress(OSError):  # on a full disk nobody is told, and nothing else changes
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)


def _holder(lock: int) -> str:
    story = os.pread(lock, _STORY_BYTES, 0).decode("ascii", "replace").strip()
    return f" (process {story})" if story.isdigit() and birth(int(story)) is not None else ""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C waits until this is over. It reaches the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)
