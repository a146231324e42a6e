"""How fast a task may read, so that an export harms nobody.

All tasks of one machine draw from one bucket: a number in a file, the moment from which the next bytes may be read. Whoever
reads moves it on by what that takes at the rate, and waits until then. So the rate is kept however many tasks there are and
whenever they begin. Tasks on several machines cannot share a file: each of them gets an equal part instead.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from dataclasses import dataclass

from waltz_spark.log.origin import BATCH_BYTES

_BATCH_SECONDS, _LEAST_BYTES = 0.05, 64 << 10
_MOMENT = struct.Struct("=d")
_BURST_SECONDS = 0.25
"""What was not used for so long may be caught up with: a task that begins, or one slow answer, costs no rate."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    bytes_per_second: float
    path: str | None
    """Of the bucket, on this machine; None where a task keeps its rate alone."""

    @property
    def batch_bytes(self) -> int:
        """To read at once: little at a time, and often, is felt less than the same in gulps."""
        return int(min(BATCH_BYTES, max(_LEAST_BYTES, self.bytes_per_second * _BATCH_SECONDS)))


def batch_bytes_of(pace: Pace | None) -> int:
    return BATCH_BYTES if pace is None else pace.batch_bytes


class Walk:
    """One task's way."""

    def __init__(self, pace: Pace | None) -> None:
        self._pace = pace
        self._alone = 0.0

    def wait(self, bytes_: int) -> None:
        """Before so many bytes are read, or right after."""
        if self._pace is None:
            return
        seconds = bytes_ / self._pace.bytes_per_second
        now = time.monotonic()
        if self._pace.path is None:
            self._alone = moment = next_moment(self._alone, now, seconds)
        else:
            moment = _shared(self._pace.path, now, seconds)
        if moment > now:
            time.sleep(moment - now)


def next_moment(before: float, now: float, seconds: float) -> float:
    return max(before, now - _BURST_SECONDS) + seconds


def _shared(path: str, now: float, seconds: float) -> float:
    """Monotonic clocks are the same for all processes of a machine."""
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        raw = os.pread(number, _MOMENT.size, 0)
        before = _MOMENT.unpack(raw)[0] if len(raw) == _MOMENT.size else now
        moment = next_moment(before, now, seconds)
        os.pwrite(number, _MOMENT.pack(moment), 0)
    finally:
        os.close(number)
    return moment
