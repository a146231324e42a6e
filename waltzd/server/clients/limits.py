"""What all partitions of one server share: how many callers it serves, and how many of them read from storages at once."""

from __future__ import annotations

import asyncio

from waltzd.errors import TooManyCallers


class Capacity:
    def __init__(self, callers_max: int, *, cold_reads_max: int = 8) -> None:
        self.callers = 0
        """Mounts, and reads by id that are under way."""
        self.cold_turns = asyncio.Semaphore(cold_reads_max)
        """One turn is one chunk from a storage, so many readers share few reads."""
        self._callers_max = callers_max

    def enter(self) -> None:
        if self.callers >= self._callers_max:
            raise TooManyCallers(f"this server has {self.callers} mounts and readers; no more are allowed")
        self.callers += 1

    def leave(self) -> None:
        assert self.callers > 0
        self.callers -= 1
