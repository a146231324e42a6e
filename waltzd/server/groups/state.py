"""What is kept of a group in one partition: where it stands, through any change of owner. Pure.

Everything up to `reach` is known to the group. Of that, `open` is what is neither acknowledged nor parked, each id with the
number of times that it failed; so everything below the lowest open id is done, and that is the *floor*. What a member has
in its hands is not kept: a new owner gives it out again.

All of its ids are ids of one timeline of the log (`waltzd.protocol.timelines`). Where an operator ended that one, a state
goes over to the current timeline when nothing above the fork is acknowledged; else it stays as it is, and the group stops.

A state is written as a snapshot, which is all of it, and as deltas, each what changed since the one before. Reading a
snapshot and the deltas behind it gives the state again. A delta names states and not steps, so one that holds many changes
of an id says only the last.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from waltzd.errors import GroupStateDamaged
from waltzd.protocol.timelines import FIRST, Lineage
from waltzd.server.groups.intervals import Interval, Intervals

SETTLED = 0xFFFF
"""In a delta, of ids that are not open any more."""
FAILURES_MAX = SETTLED - 1
PARKED_MAX = 10_000
TEXT_BYTES_MAX = 1024
VERSION, FORKED = 1, 2
"""Of bytes of the first timeline, and of those that name another one behind the head."""
_SNAPSHOT, _DELTA = 1, 2
_HEAD = struct.Struct(">BBqqIIIH")
"""Kind, version, epoch, reach, how many intervals, parked and released ids there are, and the length of `stopped`."""
_INTERVAL = struct.Struct(">qqH")
"""First id, last id, failures."""
_PARKED = struct.Struct(">qHHH")
"""Id, failures, and the lengths of two texts."""
_ID = struct.Struct(">q")


class Parked(NamedTuple):
    """A transaction that was put aside: it counts as done, and waits for an operator."""

    failures: int
    member: str
    """Which had it last."""
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
    """What a state forgot when it went over to another timeline."""

    fork: int
    reach: int
    """Up to where it knew ids before."""
    parked: int
    """Parked transactions above the fork."""


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
        """A group that begins behind an id."""
        assert after >= -1
        assert epoch >= 1
        self.epoch = epoch
        """It rises with each owner and each reset: an acknowledgement of an older one counts for nothing."""
        self.timeline = timeline
        """Identity of the timeline in which all ids are ids."""
        self.reach = after
        self.open = Intervals()
        self.parked: dict[int, Parked] = {}
        self.stopped = ""
        """Why nothing is given out; empty while the group goes on."""
        self._touched = Intervals()
        self._touched_parked: dict[int, None] = {}
        self._released: dict[int, None] = {}
        self._is_changed = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupState) and self.snapshot() == other.snapshot()

    __hash__ = None  # type: ignore[assignment]

    @property
    def floor(self) -> int:
        """Everything up to it is acknowledged or parked."""
        first = self.open.first
        return self.reach if first is None else first - 1

    def check(self) -> None:
        assert self.open.last is None or self.open.last <= self.reach
        assert all(id <= self.reach and self.open.get(id) is None for id in self.parked)
        assert self.epoch >= 1

    def acknowledged_above(self, id: int) -> int:
        """How many ids above this one are done, and not by being parked: acknowledged, skipped, or not wanted."""
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
        """Go over to the current timeline of the log; it is written as a snapshot. Returns what was dropped, None where the
        state is of the current timeline already. Nothing above the fork may be acknowledged."""
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
        """The group knows one id more; of one that it does not want, it knows that there is nothing to do."""
        assert id == self.reach + 1
        self.reach = id
        self._put(id, id, 0 if is_open else None)

    def jump_to(self, id: int) -> None:
        """Nothing up to this id is to be done, also where the group knew nothing of it."""
        assert id > self.reach
        first, self.reach = self.reach + 1, id
        self._put(first, id, None)

    def settle(self, first: int, last: int) -> None:
        assert last <= self.reach
        self._put(first, last, None)

    def fail(self, id: int) -> int:
        """How often it failed by now."""
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
        """A parked one is to be done again, from its first try on, or is left for good."""
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
        """All of it. It puts itself in the place of everything before."""
        return self._encode(_SNAPSHOT, self.open, self.parked, ())

    def delta(self) -> bytes | None:
        """What changed since the last delta; None: nothing did."""
        if not self._is_changed:
            return None
        parked = {id: self.parked[id] for id in self._touched_parked}
        data = self._encode(_DELTA, self._changes(), parked, self._released)
        self.forget_changes()
        return data

    def forget_changes(self) -> None:
        """They are in a snapshot that was just written."""
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
        for id, one in sorted(parked.items()):
            member, reason = one.member.encode(), one.reason.encode()
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
        """Raises `GroupStateDamaged` for what is no snapshot."""
        found = _read(snapshot)
        if found.kind != _SNAPSHOT:
            raise GroupStateDamaged("what is kept of a group begins with a delta: the snapshot before it is missing")
        state = cls(after=found.reach, epoch=found.epoch, timeline=found.timeline)
        for first, last, failures in found.intervals:
            if failures == SETTLED:
                raise GroupStateDamaged("a snapshot of a group has ids that are said to be done")
            state.open.put(first, last, failures)
        state.parked, state.stopped = found.parked, found.stopped
        state._check_read()
        return state

    def apply(self, data: bytes) -> GroupState:
        """The state behind the next delta, or the next snapshot: another one, or this one, changed."""
        found = _read(data)
        if found.epoch < self.epoch:
            raise GroupStateDamaged(
                f"what is kept of a group goes back from epoch {self.epoch} to {found.epoch}: an owner that was replaced "
                "has written, which its lock should have refused"
            )
        if found.kind == _SNAPSHOT:
            return GroupState.of(data)
        if found.timeline != self.timeline:
            raise GroupStateDamaged(
                f"a delta of a group is of timeline {found.timeline}, and the group stands on {self.timeline}"
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
            raise GroupStateDamaged(f"a group has open ids up to {self.open.last}, and knows none above {self.reach}")
        for id in self.parked:
            if not 0 <= id <= self.reach or self.open.get(id) is not None:
                raise GroupStateDamaged(f"id {id} of a group is parked, and open or unknown")


def _cut(text: str) -> str:
    """What is kept of a text that a member gave, or of its name."""
    return text.encode("utf-8", "replace")[:TEXT_BYTES_MAX].decode("utf-8", "ignore")


class _Reader:
    """Goes through bytes, and never beyond their end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise GroupStateDamaged("what is kept of a group ends in the middle")
        self._at += size
        return self._data[self._at - size : self._at]

    def rows(self, row: struct.Struct, count: int) -> Iterator[tuple[int, ...]]:
        return row.iter_unpack(self.take(row.size * count))

    def text(self, size: int) -> str:
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as error:
            raise GroupStateDamaged("what is kept of a group has a text that is none") from error

    @property
    def is_over(self) -> bool:
        return self._at == len(self._data)


def _read(data: bytes) -> _Read:
    reader = _Reader(data)
    kind, version, epoch, reach, intervals, parked, released, stopped = _HEAD.unpack(reader.take(_HEAD.size))
    if version not in (VERSION, FORKED) or kind not in (_SNAPSHOT, _DELTA):
        raise GroupStateDamaged(f"what is kept of a group has kind {kind} and version {version}, which are not known here")
    if epoch < 1 or reach < -1:
        raise GroupStateDamaged(f"what is kept of a group says epoch {epoch} and id {reach}")
    timeline = UUID(bytes=reader.take(16)) if version == FORKED else FIRST
    said = reader.text(stopped)
    rows, before = list[Interval](), -1
    for first, last, failures in reader.rows(_INTERVAL, intervals):
        if not before < first <= last:
            raise GroupStateDamaged("the ids that are kept of a group do not rise")
        before = last
        rows.append(Interval(first, last, failures))
    aside = dict[int, Parked]()
    for _ in range(parked):
        id, failures, member, reason = _PARKED.unpack(reader.take(_PARKED.size))
        aside[id] = Parked(failures, reader.text(member), reader.text(reason))
    gone = tuple(id for (id,) in reader.rows(_ID, released))
    if not reader.is_over:
        raise GroupStateDamaged("what is kept of a group goes on behind its end")
    return _Read(kind, epoch, reach, tuple(rows), aside, gone, said, timeline)
