"""The order in which transactions of a partition are delivered, for each mode of a group. Pure.

An open transaction waits here until it is taken. A taken one is put back after a failure, or is done. Ids are added in
rising order, except parked transactions that are replayed: those come last of their key.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Protocol

from waltzd.protocol.groups import Mode


class DispatchOrder(Protocol):
    @property
    def waiting(self) -> int:
        """Return how many transactions are not taken."""
        ...

    def add(self, id: int, key: Hashable | None) -> None: ...
    def take(self, now: float) -> int | None:
        """Take the next transaction; return None if none may be delivered now."""
        ...

    def back(self, id: int, at: float) -> list[int]:
        """Put back a transaction that was taken, not to be taken before the time `at`. Return the others that must be
        put back with it."""
        ...

    def done(self, id: int) -> None:
        """Remove a transaction, whether it was taken or waits."""
        ...

    def wake(self) -> float | None:
        """Return when the next pause ends; None if nothing is paused."""
        ...


class QueueOrder:
    """Order of a queue: the lowest id first."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, int]] = []
        """Heap of ids that may be taken, each with its entry number."""
        self._later: list[tuple[float, int, int]] = []
        self._entries: dict[int, int] = {}
        """Entry number of each waiting id. Entries of the two heaps with another number are stale."""
        self._number = 0

    @property
    def waiting(self) -> int:
        return len(self._entries)

    def _entry(self, id: int) -> int:
        self._number += 1
        self._entries[id] = self._number
        return self._number

    def add(self, id: int, key: Hashable | None) -> None:
        heappush(self._ready, (id, self._entry(id)))

    def take(self, now: float) -> int | None:
        while self._later and self._later[0][0] <= now:
            heappush(self._ready, heappop(self._later)[1:])
        while self._ready:
            id, entry = heappop(self._ready)
            if self._entries.get(id) == entry:
                del self._entries[id]
                return id
        return None

    def back(self, id: int, at: float) -> list[int]:
        heappush(self._later, (at, id, self._entry(id)))
        return []

    def done(self, id: int) -> None:
        self._entries.pop(id, None)

    def wake(self) -> float | None:
        while self._later and self._entries.get(self._later[0][1]) != self._later[0][2]:
            heappop(self._later)
        return self._later[0][0] if self._later else None


class KeyedOrder:
    """Order of a keyed group: of each key only the first transaction may be taken, the rest waits until it is done."""

    def __init__(self) -> None:
        self._heads = QueueOrder()
        self._keys: dict[int, Hashable] = {}
        self._lines: dict[Hashable, deque[int]] = {}
        """Ids of each key that are not done. The first one may be taken or is taken."""
        self._behind = 0

    @property
    def waiting(self) -> int:
        return self._heads.waiting + self._behind

    def add(self, id: int, key: Hashable | None) -> None:
        if key is None:
            self._heads.add(id, None)
            return
        self._keys[id] = key
        line = self._lines.setdefault(key, deque())
        line.append(id)
        if len(line) == 1:
            self._heads.add(id, None)
        else:
            self._behind += 1

    def take(self, now: float) -> int | None:
        return self._heads.take(now)

    def back(self, id: int, at: float) -> list[int]:
        return self._heads.back(id, at)

    def done(self, id: int) -> None:
        self._heads.done(id)
        key = self._keys.pop(id, None)
        if key is None:
            return
        line = self._lines[key]
        if line[0] != id:
            line.remove(id)
            self._behind -= 1
            return
        line.popleft()
        if line:
            self._behind -= 1
            self._heads.add(line[0], None)
        else:
            del self._lines[key]

    def wake(self) -> float | None:
        return self._heads.wake()


class LogOrder:
    """Order of the log. If a transaction is put back, all that were taken after it are put back, too, and wait for it."""

    def __init__(self) -> None:
        self._line: list[int] = []
        """Ids that are not done. The first `_taken` are taken; the rest is sorted."""
        self._taken = 0
        self._pauses: dict[int, float] = {}
        """Time before which an id must not be taken."""

    @property
    def waiting(self) -> int:
        return len(self._line) - self._taken

    def add(self, id: int, key: Hashable | None) -> None:
        insort(self._line, id, self._taken)

    def take(self, now: float) -> int | None:
        at = self.wake()
        if not self.waiting or (at is not None and now < at):
            return None
        id = self._line[self._taken]
        self._pauses.pop(id, None)
        self._taken += 1
        return id

    def back(self, id: int, at: float) -> list[int]:
        place = self._line.index(id, 0, self._taken)
        others = self._line[place + 1 : self._taken]
        self._line[place:] = sorted(self._line[place:])
        self._taken, self._pauses[id] = place, at
        return others

    def done(self, id: int) -> None:
        place = self._line.index(id)
        if place < self._taken:
            self._taken -= 1
        self._pauses.pop(id, None)
        del self._line[place]

    def wake(self) -> float | None:
        return self._pauses.get(self._line[self._taken]) if self.waiting else None


def dispatch_order_for(mode: Mode) -> DispatchOrder:
    kinds: dict[Mode, type[DispatchOrder]] = {Mode.ORDERED: LogOrder, Mode.QUEUE: QueueOrder, Mode.KEYED: KeyedOrder}
    return kinds[mode]()
