"""In which order the transactions of a partition are given out, for each mode of a group. Pure.

What is to be done waits here until it is taken; what was taken comes back, after a pause, or is done. Ids come in rising
order, but for those that were parked and are to be done again: of their key, these are the last.
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
        """How many are not taken."""
        ...

    def add(self, id: int, key: Hashable | None) -> None: ...
    def take(self, now: float) -> int | None:
        """The next one, if one may be given out now."""
        ...

    def back(self, id: int, at: float) -> list[int]:
        """One that was taken is to be done again, not before this time; which others have to come back with it."""
        ...

    def done(self, id: int) -> None:
        """Of one that was taken, or that waits."""
        ...

    def wake(self) -> float | None:
        """When one that has to wait may be given out; None: none has to."""
        ...


class QueueOrder:
    """The lowest id goes first."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, int]] = []
        """Ids, each with its entry."""
        self._later: list[tuple[float, int, int]] = []
        self._entries: dict[int, int] = {}
        """Of each id that waits: which entry in the two lists is its own. Others are what it has left there."""
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
    """Only the first of each key may be taken: the others stand behind it until it is done."""

    def __init__(self) -> None:
        self._heads = QueueOrder()
        self._keys: dict[int, Hashable] = {}
        self._lines: dict[Hashable, deque[int]] = {}
        """Of each key, what is not done; the first may be taken, or has been."""
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
    """All in one line. When one comes back, everything behind it comes back, too, and waits behind it."""

    def __init__(self) -> None:
        self._line: list[int] = []
        """What is not done: `_taken` of them are taken, and they are the first ones; the others rise."""
        self._taken = 0
        self._pauses: dict[int, float] = {}
        """Before which time one must not be taken."""

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
