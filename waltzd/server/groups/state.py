"""The durable state of a group in one partition: it survives any change of owner. Pure.

The group has seen all ids up to `reach`. `open` holds those that are neither acknowledged nor parked, each with its
number of failures. Everything below the lowest open id is done; the id before it is the *floor*. In-flight deliveries
are not part of the state: a new owner delivers their transactions again.

All ids belong to one timeline of the log (`waltzd.protocol.timelines`). When an operator ended that timeline, the state
moves to the current one if nothing above the fork is acknowledged; otherwise it stays as it is, and the group stops.

A state is written as a snapshot and as deltas, each with the changes since the delta before. A snapshot and the deltas
that follow it give the state again. A delta holds resulting values and not steps, so several changes of one id take one
row.

`Intervals` are a sparse map from ids to small numbers, stored as intervals of consecutive ids with an equal number.

An id without a number takes no memory. Adjacent intervals never have equal numbers, so the representation is minimal,
and maps with equal contents compare equal.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from waltzd.errors.operations import GroupStateDamaged
from waltzd.protocol.timelines import FIRST, Lineage


class Interval(NamedTuple):
    first: int
    last: int
    value: int


class Intervals:
    __slots__ = ("_firsts", "_lasts", "_values")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._values: list[int] = []

    def __len__(self) -> int:
        """Return the number of intervals."""
        return len(self._firsts)

    def __iter__(self) -> Iterator[Interval]:
        return map(Interval, self._firsts, self._lasts, self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def first(self) -> int | None:
        """Return the lowest id that has a number; None if there is none."""
        return self._firsts[0] if self._firsts else None

    @property
    def last(self) -> int | None:
        return self._lasts[-1] if self._lasts else None

    @property
    def ids(self) -> int:
        """Return how many ids have a number."""
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def get(self, id: int) -> int | None:
        at = bisect_right(self._firsts, id) - 1
        return self._values[at] if at >= 0 and id <= self._lasts[at] else None

    def within(self, first: int, last: int) -> Iterator[Interval]:
        """Yield the intervals between two ids, clipped at both ends."""
        at = bisect_left(self._lasts, first)
        while at < len(self._firsts) and self._firsts[at] <= last:
            yield Interval(max(first, self._firsts[at]), min(last, self._lasts[at]), self._values[at])
            at += 1

    def put(self, first: int, last: int, value: int | None) -> None:
        """Set the number of all ids from `first` to `last`; None removes it."""
        assert 0 <= first <= last
        if not self._lasts or first > self._lasts[-1]:  # most ids come in their order
            self._append(first, last, value)
            return
        at = bisect_right(self._firsts, first) - 1
        if at >= 0 and last <= self._lasts[at] and value == self._values[at]:
            return
        begin, end = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        new: list[tuple[int, int, int]] = []
        if begin < end and self._firsts[begin] < first:
            new.append((self._firsts[begin], first - 1, self._values[begin]))
        if value is not None:
            new.append((first, last, value))
        if begin < end and self._lasts[end - 1] > last:
            new.append((last + 1, self._lasts[end - 1], self._values[end - 1]))
        if begin > 0 and self._lasts[begin - 1] == first - 1:  # a neighbour may have the same number
            begin -= 1
            new.insert(0, (self._firsts[begin], self._lasts[begin], self._values[begin]))
        if end < len(self._firsts) and self._firsts[end] == last + 1:
            new.append((self._firsts[end], self._lasts[end], self._values[end]))
            end += 1
        joined: list[tuple[int, int, int]] = []
        for one in new:
            if joined and joined[-1][1] == one[0] - 1 and joined[-1][2] == one[2]:
                joined[-1] = joined[-1][0], one[1], one[2]
            else:
                joined.append(one)
        self._firsts[begin:end] = [one[0] for one in joined]
        self._lasts[begin:end] = [one[1] for one in joined]
        self._values[begin:end] = [one[2] for one in joined]

    def _append(self, first: int, last: int, value: int | None) -> None:
        if value is None:
            return
        if self._lasts and self._lasts[-1] == first - 1 and self._values[-1] == value:
            self._lasts[-1] = last
            return
        self._firsts.append(first)
        self._lasts.append(last)
        self._values.append(value)

    def clear(self) -> None:
        self._firsts.clear()
        self._lasts.clear()
        self._values.clear()


SETTLED = 0xFFFF
"""Number of failures that marks ids in a delta as not open any more."""
FAILURES_MAX = SETTLED - 1
PARKED_MAX = 10_000
TEXT_BYTES_MAX = 1024
TEXTS_BYTES_MAX = 256 << 10
"""Largest total size of the texts in one entry; longer ones are cut. With all intervals and parked ids an entry then fits
into a transaction of 1 MiB, the default limit. An entry that does not fit could never be written."""
DELTA_BYTES_MAX = TEXTS_BYTES_MAX
"""Size above which a delta is compared with a snapshot: the ids that were released or settled since the last entry are not
bounded by what a state may hold."""
VERSION, FORKED = 1, 2
"""Versions of the encoding: without a timeline, which stands for the first one, and with one behind the head."""
_SNAPSHOT, _DELTA = 1, 2
_HEAD = struct.Struct(">BBqqIIIH")
"""Kind, version, epoch, reach, the numbers of intervals, parked ids and released ids, and the length of `stopped`."""
_INTERVAL = struct.Struct(">qqH")
"""First id, last id and number of failures."""
_PARKED = struct.Struct(">qHHH")
"""Id, number of failures, and the lengths of two texts."""
_ID = struct.Struct(">q")


class Parked(NamedTuple):
    """A dead letter: a transaction that was put aside. It counts as done until an operator replays or discards it."""

    failures: int
    member: str
    """Name of the member that had the last delivery."""
    reason: str


@dataclass(frozen=True)
class _Read:
    kind: int
    epoch: int
    reach: int
    intervals: tuple[Interval, ...]
    parked: dict[int, Parked]
    released: tuple[int, ...]
    stopped: str
    timeline: UUID


class Dropped(NamedTuple):
    """Parts of a state that were dropped when it moved to another timeline."""

    fork: int
    reach: int
    """Reach of the state before the move."""
    parked: int
    """Number of parked transactions above the fork."""


class GroupState:
    __slots__ = (
        "_is_changed",
        "_released",
        "_touched",
        "_touched_parked",
        "epoch",
        "open",
        "parked",
        "reach",
        "stopped",
        "timeline",
    )

    def __init__(self, *, after: int = -1, epoch: int = 1, timeline: UUID = FIRST) -> None:
        """Start a group behind the id `after`."""
        assert after >= -1
        assert epoch >= 1
        self.epoch = epoch
        """Number that rises with each owner and each reset. Acknowledgements of an older epoch do not count."""
        self.timeline = timeline
        """Timeline to which all ids of the state belong."""
        self.reach = after
        self.open = Intervals()
        self.parked: dict[int, Parked] = {}
        self.stopped = ""
        """Why nothing is delivered; empty unless the group has stopped."""
        self._touched = Intervals()
        self._touched_parked: dict[int, None] = {}
        self._released: dict[int, None] = {}
        self._is_changed = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupState) and self.snapshot() == other.snapshot()

    __hash__ = None  # type: ignore[assignment]

    @property
    def floor(self) -> int:
        """Return the highest id up to which every id is acknowledged or parked."""
        first = self.open.first
        return self.reach if first is None else first - 1

    def check(self) -> None:
        assert self.open.last is None or self.open.last <= self.reach
        assert all(id <= self.reach and self.open.get(id) is None for id in self.parked)
        assert self.epoch >= 1

    def acknowledged_above(self, id: int) -> int:
        """Return how many ids above `id` are done without being parked: acknowledged, skipped or filtered out."""
        if self.reach <= id:
            return 0
        first = max(0, id + 1)
        is_open = sum(one.last - one.first + 1 for one in self.open.within(first, self.reach))
        return self.reach - first + 1 - is_open - sum(one > id for one in self.parked)

    # -- changes -------------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        self.epoch += 1
        self._is_changed = True

    def follow(self, lineage: Lineage) -> Dropped | None:
        """Move to the current timeline of the log; the next entry must be a snapshot. Return what was dropped, or None
        if the state is of the current timeline already. Nothing above the fork may be acknowledged."""
        shared = lineage.shared_to(self.timeline)
        if shared is None:
            return None
        assert self.acknowledged_above(shared) == 0
        dropped = Dropped(shared, self.reach, sum(id > shared for id in self.parked))
        if self.reach > shared:
            self.open.put(shared + 1, self.reach, None)
            self.reach = shared
        self.parked = {id: one for id, one in self.parked.items() if id <= shared}
        self.timeline = lineage.current
        self.forget_changes()
        return dropped

    def reach_to(self, id: int, *, is_open: bool) -> None:
        """Extend `reach` by one id. It is done at once if the filter of the group excludes it."""
        assert id == self.reach + 1
        self.reach = id
        self._put(id, id, 0 if is_open else None)

    def jump_to(self, id: int) -> None:
        """Extend `reach` to an id, and mark everything between as done."""
        assert id > self.reach
        first, self.reach = self.reach + 1, id
        self._put(first, id, None)

    def settle(self, first: int, last: int) -> None:
        assert last <= self.reach
        self._put(first, last, None)

    def fail(self, id: int) -> int:
        """Count one more failure of an open id and return its number of failures."""
        failures = self.open.get(id)
        assert failures is not None
        failures = min(failures + 1, FAILURES_MAX)
        self._put(id, id, failures)
        return failures

    def park(self, id: int, member: str, reason: str) -> None:
        failures = self.open.get(id)
        assert failures is not None
        assert len(self.parked) < PARKED_MAX
        self._put(id, id, None)
        self.parked[id] = Parked(failures, _cut(member), _cut(reason))
        self._touched_parked[id] = None
        self._released.pop(id, None)

    def release(self, id: int, *, is_open: bool) -> None:
        """Remove a parked id: open it again with no failure, or leave it as done for good."""
        del self.parked[id]
        self._touched_parked.pop(id, None)
        self._released[id] = None
        self._is_changed = True
        if is_open:
            self._put(id, id, 0)

    def stop(self, reason: str) -> None:
        self.stopped = _cut(reason)
        self._is_changed = True

    def resume(self) -> None:
        self.stopped = ""
        self._is_changed = True

    def _put(self, first: int, last: int, failures: int | None) -> None:
        self.open.put(first, last, failures)
        self._touched.put(first, last, 0)
        self._is_changed = True

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Encode the whole state. A snapshot replaces all earlier entries about it."""
        return self._encode(_SNAPSHOT, self.open, self.parked, ())

    def delta(self) -> bytes | None:
        """Encode the changes since the last delta, or the whole state if that is shorter than many changes; return None if
        there are none."""
        if not self._is_changed:
            return None
        parked = {id: self.parked[id] for id in self._touched_parked}
        data = self._encode(_DELTA, self._changes(), parked, self._released)
        if len(data) > DELTA_BYTES_MAX:
            data = min(data, self.snapshot(), key=len)
        self.forget_changes()
        return data

    def forget_changes(self) -> None:
        """Discard the recorded changes after they were written in a snapshot."""
        self._touched.clear()
        self._touched_parked.clear()
        self._released.clear()
        self._is_changed = False

    def _changes(self) -> Iterator[Interval]:
        for first, last, _ in self._touched:
            at = first
            for interval in self.open.within(first, last):
                if at < interval.first:
                    yield Interval(at, interval.first - 1, SETTLED)
                yield interval
                at = interval.last + 1
            if at <= last:
                yield Interval(at, last, SETTLED)

    def _encode(
        self, kind: int, intervals: Iterable[Interval], parked: dict[int, Parked], released: Iterable[int]
    ) -> bytes:
        rows = [_INTERVAL.pack(*interval) for interval in intervals]
        aside = []
        limit = _text_limit(parked.values())
        for id, one in sorted(parked.items()):
            member, reason = _cut(one.member, limit).encode(), _cut(one.reason, limit).encode()
            aside += [_PARKED.pack(id, one.failures, len(member), len(reason)), member, reason]
        gone, stopped = [_ID.pack(id) for id in sorted(released)], self.stopped.encode()
        version, named = (VERSION, b"") if self.timeline == FIRST else (FORKED, self.timeline.bytes)
        head = _HEAD.pack(kind, version, self.epoch, self.reach, len(rows), len(parked), len(gone), len(stopped))
        return b"".join([head, named, stopped, *rows, *aside, *gone])

    @staticmethod
    def is_snapshot(data: bytes) -> bool:
        return data[:1] == bytes([_SNAPSHOT])

    @classmethod
    def of(cls, snapshot: bytes) -> GroupState:
        """Decode a snapshot. Raise `GroupStateDamaged` if it is malformed."""
        found = _read(snapshot)
        if found.kind != _SNAPSHOT:
            raise GroupStateDamaged("the state of a group begins with a delta, and the snapshot before it is missing")
        state = cls(after=found.reach, epoch=found.epoch, timeline=found.timeline)
        for first, last, failures in found.intervals:
            if failures == SETTLED:
                raise GroupStateDamaged("a snapshot of a group lists ids that are done")
            state.open.put(first, last, failures)
        state.parked, state.stopped = found.parked, found.stopped
        state._check_read()
        return state

    def apply(self, data: bytes) -> GroupState:
        """Return the state after the next delta or snapshot. A delta changes this state in place."""
        found = _read(data)
        if found.epoch < self.epoch:
            raise GroupStateDamaged(
                f"the state of a group goes back from epoch {self.epoch} to {found.epoch}: an owner that was replaced "
                "has written, which its lock should have prevented"
            )
        if found.kind == _SNAPSHOT:
            return GroupState.of(data)
        if found.timeline != self.timeline:
            raise GroupStateDamaged(
                f"a delta of a group is of timeline {found.timeline}, and its state is of {self.timeline}"
            )
        if found.reach < self.reach:
            raise GroupStateDamaged(f"a delta of a group goes back from id {self.reach} to {found.reach}")
        self.epoch, self.reach, self.stopped = found.epoch, found.reach, found.stopped
        for id in found.released:
            self.parked.pop(id, None)
        for first, last, failures in found.intervals:
            self.open.put(first, last, None if failures == SETTLED else failures)
        self.parked |= found.parked
        self._check_read()
        return self

    def _check_read(self) -> None:
        if self.open.last is not None and self.open.last > self.reach:
            raise GroupStateDamaged(f"a group has open ids up to {self.open.last}, above its reach {self.reach}")
        for id in self.parked:
            if not 0 <= id <= self.reach or self.open.get(id) is not None:
                raise GroupStateDamaged(f"id {id} of a group is parked, and also open or above its reach {self.reach}")


def _cut(text: str, limit: int = TEXT_BYTES_MAX) -> str:
    """Cut a text of a member to the longest that is kept."""
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def _text_limit(parked: Iterable[Parked]) -> int:
    """Return the number of bytes to which each text is cut, so that all texts together fit into one entry."""
    sizes = [len(text.encode()) for one in parked for text in (one.member, one.reason)]
    limit = TEXT_BYTES_MAX
    while sum(sizes) > TEXTS_BYTES_MAX:
        limit //= 2
        sizes = [min(size, limit) for size in sizes]
    return limit


class _Reader:
    """Reader that never reads beyond the end of its bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise GroupStateDamaged(f"the state of a group is cut off after {len(self._data)} bytes")
        self._at += size
        return self._data[self._at - size : self._at]

    def rows(self, row: struct.Struct, count: int) -> Iterator[tuple[int, ...]]:
        return row.iter_unpack(self.take(row.size * count))

    def text(self, size: int) -> str:
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as error:
            raise GroupStateDamaged("the state of a group has a text that is not UTF-8") from error

    @property
    def is_over(self) -> bool:
        return self._at == len(self._data)


def _read(data: bytes) -> _Read:
    reader = _Reader(data)
    kind, version, epoch, reach, intervals, parked, released, stopped = _HEAD.unpack(reader.take(_HEAD.size))
    if version not in (VERSION, FORKED) or kind not in (_SNAPSHOT, _DELTA):
        raise GroupStateDamaged(f"unknown kind {kind} or version {version} of the state of a group")
    if epoch < 1 or reach < -1:
        raise GroupStateDamaged(f"the state of a group has epoch {epoch} and reach {reach}; the lowest are 1 and -1")
    timeline = UUID(bytes=reader.take(16)) if version == FORKED else FIRST
    stop_reason = reader.text(stopped)
    rows, before = list[Interval](), -1
    for first, last, failures in reader.rows(_INTERVAL, intervals):
        if not before < first <= last:
            raise GroupStateDamaged(f"the ids of a group are not increasing ({first} to {last} after {before})")
        before = last
        rows.append(Interval(first, last, failures))
    aside = dict[int, Parked]()
    for _ in range(parked):
        id, failures, member, reason = _PARKED.unpack(reader.take(_PARKED.size))
        aside[id] = Parked(failures, reader.text(member), reader.text(reason))
    gone = tuple(id for (id,) in reader.rows(_ID, released))
    if not reader.is_over:
        raise GroupStateDamaged("the state of a group has bytes behind its end")
    return _Read(kind, epoch, reach, tuple(rows), aside, gone, stop_reason, timeline)
