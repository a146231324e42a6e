"""Quotas as arithmetic: how long a name waits for what it wants beyond its grant, and who may take a mount. Pure.

A bucket holds what may be used at once, and fills at the granted rate. What is larger than its content is taken all the
same, on credit: whoever took it waits until the debt is paid, and all who come meanwhile wait behind it. So nothing is
refused, nothing is cut into pieces, and over any time no more passes than the rate, one bucket and one thing.

Times are seconds of any clock that does not go back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

BURST_SECONDS = 1.0
"""A bucket holds as much as comes in so long: who was quiet may be quick for a moment."""
LOCKS_MAX = 4096
"""So many locks of a name are counted apart. One whose bucket is full again is forgotten first; when there is none, further
locks share as many buckets more, by their ids: no lock gets a new bucket while it has a debt."""
LOOKS = 8
"""So many locks are looked at for one that may be forgotten, those first that were marked longest ago."""
SHARE = 4
"""A name may hold this many mounts for each one that is free: alone it leaves a fifth of them to others."""


class Bucket:
    def __init__(self, rate: float, now: float, *, burst_seconds: float = BURST_SECONDS) -> None:
        """`rate`: so much a second."""
        assert rate > 0
        self.rate = rate
        self._burst_seconds = burst_seconds
        self._paid_at = now - burst_seconds
        """When all that was taken is paid for. As far as that is in the past, the bucket has something in it."""

    def take(self, amount: float, now: float) -> float:
        """How long whoever takes this has to wait."""
        paid_at = max(self._paid_at, now - self._burst_seconds) + amount / self.rate
        self._paid_at = paid_at
        return max(0.0, paid_at - now)

    def wait(self, now: float) -> float:
        """How long until the next taking begins without a debt."""
        return max(0.0, self._paid_at - now)

    def is_full(self, now: float) -> bool:
        """It is as good as a new one."""
        return self._paid_at <= now - self._burst_seconds


class LockBuckets:
    """How often a name marks each lock."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._buckets: OrderedDict[int, Bucket] = OrderedDict()
        self._shared: dict[int, Bucket] = {}
        """Of locks for which there is no room."""

    def take(self, locks: Iterable[tuple[int, int]], now: float) -> float:
        """Locks, and how often each is marked; the longest of the waits."""
        longest = 0.0
        for lock, count in locks:
            bucket = self._buckets.get(lock)
            if bucket is None:
                bucket = self._another(lock, now)
            else:
                self._buckets.move_to_end(lock)
            longest = max(longest, bucket.take(count, now))
        return longest

    def _another(self, lock: int, now: float) -> Bucket:
        place = lock % LOCKS_MAX
        shared = self._shared.get(place)
        if shared is not None and shared.is_full(now):
            del self._shared[place]
            shared = None
        if shared is None and self._has_room(now):
            bucket = self._buckets[lock] = Bucket(self.rate, now)
            return bucket
        if shared is None:
            shared = self._shared[place] = Bucket(self.rate, now)
        return shared

    def _has_room(self, now: float) -> bool:
        if len(self._buckets) < LOCKS_MAX:
            return True
        for _ in range(LOOKS):
            lock, bucket = self._buckets.popitem(last=False)
            if bucket.is_full(now):
                return True
            self._buckets[lock] = bucket
        return False

    def __len__(self) -> int:
        return len(self._buckets) + len(self._shared)


def may_enter(held: int, total: int, total_max: int, *, most: int | None = None, is_shared: bool = True) -> bool:
    """Whether a name that holds so many mounts may have another one, where all names together hold `total`. `most`: of its
    quota. `is_shared`: there may be other names, and some mounts stay free for them: the last ones go only to names that
    hold fewer than `SHARE`."""
    if total >= total_max or (most is not None and held >= most):
        return False
    return not is_shared or held == 0 or held < SHARE * (total_max - total)
