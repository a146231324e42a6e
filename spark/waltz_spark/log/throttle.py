"""A rate limit in bytes a second, shared by all readers, so that an export leaves disks and network to appends.

A reader sleeps after each batch for the time that the batch takes at the agreed rate; the sender feels backpressure. Unused
rate of the last quarter of a second may be caught up: the start of a task, or one slow response, does not lower the rate.

All tasks of one machine can share one bucket: a number in a file, the time from which the next bytes may be read. The rate
then holds for any number of tasks. Tasks on several machines cannot share a file: each of them gets an equal part.
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
        """`bytes_per_second`: None for no limit. `bucket`: file that tasks of this machine share; empty for none."""
        assert bytes_per_second is None or bytes_per_second > 0
        self._rate = bytes_per_second
        self._bucket = bucket
        self._free_at: float | None = None

    def __reduce__(self) -> tuple[type[Throttle], tuple[float | None, str]]:
        """Pickle without state: clocks differ between processes, except for a file that is shared on one machine."""
        return Throttle, (self._rate, self._bucket)

    def shared(self, tasks: int, bucket: Path | None) -> Throttle:
        """Return the limit for each task: its share, or the whole rate with a file for all tasks on this machine."""
        if self._rate is None:
            return self
        return Throttle(self._rate / tasks) if bucket is None else Throttle(self._rate, str(bucket))

    @property
    def is_on(self) -> bool:
        return self._rate is not None

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch: small batches disturb other work less."""
        return BATCH_BYTES if self._rate is None else int(min(BATCH_BYTES, max(_LEAST_BYTES, self._rate * _BATCH_SECONDS)))

    def delay(self, size: int, now: float) -> float:
        """Return the seconds to wait after reading `size` bytes."""
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
    """Reserve time in the shared bucket; return its end. All processes of a machine share the monotonic clock."""
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        raw = os.pread(number, _MOMENT.size, 0)
        moment = _next(_MOMENT.unpack(raw)[0] if len(raw) == _MOMENT.size else None, now, seconds)
        os.pwrite(number, _MOMENT.pack(moment), 0)
    finally:
        os.close(number)
    return moment
