"""Quotas as arithmetic: how long a name waits when it exceeds its grant, and whether it may have another mount. Pure.

A token bucket holds what may be used at once, and fills at the granted rate. An amount that exceeds its content is taken
on credit: its taker waits until the debt is paid, and later takers wait behind it. So nothing is refused and nothing is
cut into pieces. In any period at most the rate, one bucket and one amount pass.

Times are seconds of any clock that never goes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

BURST_SECONDS = 1.0
"""Seconds of the granted rate that a bucket holds, so that a name that was quiet may send a burst."""
LOCKS_MAX = 4096
"""Number of locks of a name that have a bucket each. When there are more, a lock whose bucket is full is forgotten. If
there is none, further locks share as many buckets, chosen by their ids. So no lock gets a new bucket while it has a
debt."""
LOOKS = 8
"""Number of locks that are checked for one that may be forgotten, the least recently marked first."""
SHARE = 4
"""Mounts that a name may hold for each free one. A single name leaves a fifth of all mounts to other names."""


class Bucket:
    def __init__(self, rate: float, now: float, *, burst_seconds: float = BURST_SECONDS) -> None:
        """`rate`: units per second."""
        assert rate > 0
        self.rate = rate
        self._burst_seconds = burst_seconds
        self._paid_at = now - burst_seconds
        """Time at which all that was taken is paid for. While that time is in the past, the bucket is not empty."""

    def take(self, amount: float, now: float) -> float:
        """Take an amount, on credit if need be; return the seconds that its taker has to wait."""
        paid_at = max(self._paid_at, now - self._burst_seconds) + amount / self.rate
        self._paid_at = paid_at
        return max(0.0, paid_at - now)

    def wait(self, now: float) -> float:
        """Return the seconds until the debt is paid."""
        return max(0.0, self._paid_at - now)

    def is_full(self, now: float) -> bool:
        """Return whether the bucket equals a new one."""
        return self._paid_at <= now - self._burst_seconds


class LockBuckets:
    """Limit of how often a name marks each lock."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._buckets: OrderedDict[int, Bucket] = OrderedDict()
        self._shared: dict[int, Bucket] = {}
        """Buckets of locks that share, by lock id modulo `LOCKS_MAX`."""

    def take(self, locks: Iterable[tuple[int, int]], now: float) -> float:
        """Take the marks of these locks, given with a count each; return the longest wait."""
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
    """Return whether a name with `held` mounts may have another one, where all names together hold `total`. `most`: the
    limit of its quota. `is_shared`: whether other names may exist. Then the last free mounts go only to names that hold
    fewer than `SHARE` for each free one."""
    if total >= total_max or (most is not None and held >= most):
        return False
    return not is_shared or held == 0 or held < SHARE * (total_max - total)
