"""Whether there is room on the disk for an append: stop before it is full, go on when there is clearly more."""

from __future__ import annotations

from waltzd.disk import Disk
from waltzd.errors import DiskFull


class Room:
    def __init__(self, disk: Disk, directory: str, free_bytes_min: int) -> None:
        self._disk = disk
        self._directory = directory
        self._least = free_bytes_min
        self.is_full = False

    def check(self, size: int) -> None:
        """Refused when less than the least would stay free. After that an eighth more is asked for, so as not to flap."""
        if self._least == 0:
            return
        free = self._disk.free_bytes(self._directory)
        least = self._least + self._least // 8 if self.is_full else self._least
        if free - size < least:
            self.is_full = True
            raise DiskFull(f"{self._directory}: {free} bytes are free, {size} are to be written and {least} must stay free")
