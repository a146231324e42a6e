"""A rate limit in bytes a second, shared by all readers, so that an export leaves the disks and the network to appends.

A reader sleeps before or after each batch for as long as that batch takes at the agreed rate; the sender feels
backpressure. What was not used within the last quarter of a second may be caught up with: a task that begins, or one slow
answer, costs no rate.

All tasks of one machine can draw from one bucket: a number in a file, the moment from which the next bytes may be read. So
the rate is kept however many tasks there are and whenever they begin. Tasks on several machines cannot share a file: each
of them gets an equal part instead.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import time
from pathlib import Path

from waltz_spark.log.origin import BATCH_BYTES

CREDIT_SECONDS = 0.25
_BATCH_SECONDS, _LEAST_BYTES = 0.05, 64 << 10
_MOMENT = struct.Struct("=d")


class Throttle:
    def __init__(self, bytes_per_second: float | None, bucket: str = "") -> None:
        """None: no bound. `bucket`: the file, on this machine; empty for a rate that is kept alone."""
        assert bytes_per_second is None or bytes_per_second > 0
        self._rate = bytes_per_second
        self._bucket = bucket
        self._free_at: float | None = None

    def __reduce__(self) -> tuple[type[Throttle], tuple[float | None, str]]:
        """Elsewhere it begins anew: another process has another clock, unless both are on one machine and share a file."""
        return Throttle, (self._rate, self._bucket)

    def shared(self, tasks: int, bucket: Path | None) -> Throttle:
        """The share of each task. `bucket`: a file for all of them, on this machine."""
        if self._rate is None:
            return self
        return Throttle(self._rate / tasks) if bucket is None else Throttle(self._rate, str(bucket))

    @property
    def is_on(self) -> bool:
        return self._rate is not None

    @property
    def batch_bytes(self) -> int:
        """To read at once: little at a time, and often, is felt less than the same in gulps."""
        return BATCH_BYTES if self._rate is None else int(min(BATCH_BYTES, max(_LEAST_BYTES, self._rate * _BATCH_SECONDS)))

    def delay(self, size: int, now: float) -> float:
        """Seconds to wait after so many bytes."""
        if self._rate is None:
            return 0.0
        if self._bucket:
            return max(0.0, _drawn(self._bucket, now, size / self._rate) - now)
        self._free_at = _next(self._free_at, now, size / self._rate)
        return max(0.0, self._free_at - now)

    async def wait(self, size: int) -> None:
        seconds = self.delay(size, asyncio.get_running_loop().time())
        if seconds:
            await asyncio.sleep(seconds)

    def sleep(self, size: int) -> None:
        seconds = self.delay(size, time.monotonic())
        if seconds:
            time.sleep(seconds)


NO_THROTTLE = Throttle(None)


def _next(before: float | None, now: float, seconds: float) -> float:
    return (now if before is None else max(before, now - CREDIT_SECONDS)) + seconds


def _drawn(path: str, now: float, seconds: float) -> float:
    """Monotonic clocks are the same for all processes of a machine."""
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        raw = os.pread(number, _MOMENT.size, 0)
        moment = _next(_MOMENT.unpack(raw)[0] if len(raw) == _MOMENT.size else None, now, seconds)
        os.pwrite(number, _MOMENT.pack(moment), 0)
    finally:
        os.close(number)
    return moment
