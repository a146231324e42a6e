"""What a load is made of: sizes, producers, locks, rate. Values, and the arithmetic of them. Pure.

Payloads are random bytes, because real ones seldom compress; a few of them are used again and again, so that making them is
not measured. Locks are drawn in bulk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from waltzd.errors import BadArgument
from waltzd.protocol.locks import Lock, Mode

LOCK_NAME = "bench"
PAYLOADS_BYTES = 4 << 20
"""About so much is made beforehand."""
FILLING = 500
"""Transactions that each producer hands over at once while a log is only filled."""


@dataclass(frozen=True, kw_only=True)
class Load:
    size: int = 512
    """Bytes of a payload."""
    partitions: int = 0
    """Spread over so many of the cluster's, in turn; 0 for all of them."""
    producers: int = 64
    batch: int = 1
    """How many transactions a producer hands over at once, and waits for."""
    locks: int = 1
    """For each transaction."""
    keys: int = 100_000
    """How many different locks there are."""
    skew: float | None = None
    """None: each transaction has locks of its own, as far as there are so many. 0: drawn evenly. Above: Zipf's law, the
    larger the more often the same ones."""
    mode: Mode = Mode.WRITE
    rate: float | None = None
    """Transactions a second, whether or not earlier ones are answered. None: each producer goes on when it is answered."""
    seconds: float | None = 10.0
    count: int | None = None
    """So many transactions instead of so many seconds."""
    warm_up: float = 1.0
    """So long it runs before anything is counted; not with `count`."""

    def on(self, partitions: int) -> Load:
        """The same for a cluster of so many partitions; raises when it makes no sense there."""
        if self.partitions > partitions:
            raise BadArgument(f"the load wants {self.partitions} partitions; the cluster has {partitions}")
        if self.locks > self.keys:
            raise BadArgument(f"a transaction cannot have {self.locks} different locks out of {self.keys}")
        if (self.seconds is None) == (self.count is None):
            raise BadArgument("say either for how many seconds or how many transactions")
        return replace(self, partitions=self.partitions or partitions)


class Payloads:
    """The same few random payloads, in turn."""

    def __init__(self, size: int, *, seed: int = 1) -> None:
        self.size = size
        count = max(1, min(1024, PAYLOADS_BYTES // max(1, size)))
        raw = np.random.default_rng(seed).bytes(count * size)
        self._all = [raw[at * size : (at + 1) * size] for at in range(count)]
        self._next = 0

    def take(self, count: int) -> list[bytes]:
        out: list[bytes] = []
        while len(out) < count:
            part = self._all[self._next : self._next + count - len(out)]
            self._next = (self._next + len(part)) % len(self._all)
            out += part
        return out


class Locks:
    """The locks of transaction after transaction."""

    def __init__(self, load: Load, *, seed: int = 1) -> None:
        self._each = load.locks
        self._pool = [Lock(LOCK_NAME, key, load.mode) for key in range(load.keys if load.locks else 0)]
        self._random = np.random.default_rng(seed)
        self._weights = None if load.skew is None else _zipf(load.keys, load.skew)
        self._next = 0

    def take(self, count: int) -> Sequence[tuple[Lock, ...]]:
        if self._each == 0:
            return [()] * count
        keys = self._draw(count * self._each).tolist()
        pool, each = self._pool, self._each
        if each == 1:
            return [(pool[key],) for key in keys]
        rows = [keys[at : at + each] for at in range(0, len(keys), each)]
        return [tuple([pool[key] for key in dict.fromkeys(row)]) for row in rows]

    def _draw(self, count: int) -> NDArray[np.int64]:
        if self._weights is None:
            start, self._next = self._next, (self._next + count) % len(self._pool)
            return np.arange(start, start + count) % len(self._pool)
        drawn = self._random.random(count)
        return np.minimum(np.searchsorted(self._weights, drawn), len(self._pool) - 1)


def _zipf(keys: int, skew: float) -> NDArray[np.float64]:
    """Up to which random number each key is meant."""
    weights: NDArray[np.float64] = np.arange(1, keys + 1, dtype=np.float64) ** -skew
    ends: NDArray[np.float64] = np.cumsum(weights)
    ends /= ends[-1]
    return ends


def due_at(number: int, rate: float) -> float:
    """When, in seconds from the beginning, the transaction of this number is due."""
    return number / rate
