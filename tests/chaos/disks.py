"""A disk for each storage: an ext4 file system in a file, which can be full, and which forgets what was never flushed when
its power is cut."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

from tests.chaos import sandbox

DISK_BYTES = 2 << 30
"""Sparse: it takes what is written."""
LEFT_BYTES = 256 << 10
"""What a full disk still has; less than storages want to keep free."""
EXT4_SHUTDOWN, WITHOUT_A_FLUSH = 0x8004587D, 2
"""The file system ends at once, as it is on the disk; not even its journal is written."""
OPTIONS = "loop,commit=300"
"""It writes by itself only every five minutes, so that a power cut takes all that was not flushed."""
UNMOUNT_SECONDS = 10


@functools.cache
def refusal() -> str | None:
    if (why := sandbox.refusal()) is not None:
        return why
    for program in ("mkfs.ext4", "umount", "losetup"):
        if shutil.which(program) is None:
            return f"needs {program}"
    done = subprocess.run(["losetup", "--find"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"there is no loop device: {done.stderr.strip()[:200]}"


class Disk:
    def __init__(self, image: Path, where: Path) -> None:
        self._image = image
        self._where = where

    @property
    def _ballast(self) -> Path:
        return self._where / "ballast"

    def make(self) -> None:
        with self._image.open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(self._image)], check=True)
        self._where.mkdir()
        self._mount()

    def fill(self) -> None:
        """Nearly all of it. The space is only set aside, so filling costs nothing."""
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self._where).free - LEFT_BYTES)

    def free(self) -> None:
        """Remove the ballast for good: flush the directory, or a power cut would bring the ballast back."""
        self._ballast.unlink(missing_ok=True)
        directory = os.open(self._where, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def cut_power(self) -> None:
        """Its storage must not run: a flush that races with the end of the file system may report success falsely."""
        directory = os.open(self._where, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(directory, EXT4_SHUTDOWN, struct.pack("I", WITHOUT_A_FLUSH))
        finally:
            os.close(directory)

    def restore_power(self) -> None:
        self.unmount()
        self._mount()

    def _mount(self) -> None:
        subprocess.run(["mount", "-o", OPTIONS, str(self._image), str(self._where)], check=True)

    def unmount(self) -> None:
        """A process that was just killed may hold it for a moment longer."""
        deadline = time.monotonic() + UNMOUNT_SECONDS
        while subprocess.run(["umount", str(self._where)], capture_output=True, check=False).returncode != 0:
            assert time.monotonic() < deadline, f"{self._where} is still in use"
            time.sleep(0.05)
