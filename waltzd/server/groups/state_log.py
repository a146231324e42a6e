"""The group log: the entries of all groups, their replay, and which of them must be rewritten so that the log can be
trimmed. Pure.

An entry creates a group, deletes a group, or updates the state of a group in one partition. Replaying the entries in
order gives all groups. Replaying from `floor` on gives the same result, so everything below `floor` may be trimmed.
Entries under one lock (`lock_of`) exclude each other: the owner of a partition writes under the lock of the group in
that partition, with its own last entry as the mark. So entries of an owner that was replaced are rejected by the log.

A record that is not an entry (`_envelope`) was appended by another program: it is skipped and counted. An entry that
cannot be decoded stops the replay, because later entries may depend on it. An operator lets the replay continue by a
later entry that says to skip the bad one.

A group is identified by its name and the id of the entry that created it. A group that was deleted and created again
under its name is another group, and states of the first do not apply to it.
"""

from __future__ import annotations

import enum
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import nsmallest
from typing import NamedTuple

from waltzd.cluster.groups import GroupMeta
from waltzd.errors.operations import GroupStateDamaged
from waltzd.protocol.address import is_name
from waltzd.protocol.document import decode, encode
from waltzd.protocol.groups import GroupPartitionStatus, GroupTotals, GroupTrouble
from waltzd.protocol.locks import Lock, write_lock
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST
from waltzd.server.groups.delivery_tracker import GroupSettings
from waltzd.server.groups.state import GroupState

PREFIX = "waltz-group"
"""Prefix of the names of all locks in the group log."""
GARBAGE = 4
"""Largest ratio of the size of the log to the size of its live entries, before entries are rewritten."""
SLACK_BYTES = 64 << 10
"""Bytes that the log may exceed that ratio by: a smaller log is never rewritten."""
WHOLE_GROUP = -1
"""Partition number in an entry about the group itself."""
ITSELF = -1
"""Creation id in the entry that creates a group."""
_HEAD = struct.Struct(">BBHqq")
"""Kind, version, length of the name, partition, and id of the entry that created the group."""
_VERSION = 1
_ENVELOPE_MAX = 32
"""Highest kind and highest version that a later version of Waltz may use. An entry within these bounds is not skipped
as foreign."""


class Key(NamedTuple):
    """Subject of an entry."""

    name: str
    made_at: int
    """Id of the entry that created the group."""
    partition: int


class _Kind(enum.IntEnum):
    MADE = 1
    GONE = 2
    STATE = 3
    PASSED = 4
    """An operator's order to skip one entry. Its id is stored in place of the creation id."""


def settings_of(meta: GroupMeta) -> GroupSettings:
    return GroupSettings(
        mode=meta.mode,
        ack_wait=meta.ack_wait_ms / 1000,
        max_in_flight=meta.max_in_flight,
        deliver_max=meta.deliver_max,
        back_off=tuple(pause / 1000 for pause in meta.back_off_ms),
        exhausted=meta.exhausted,
    )


def lock_of(name: str, partition: int = WHOLE_GROUP) -> Lock:
    """Return the lock under which an entry about the group, or its state in a partition, is written."""
    return write_lock(PREFIX, f"{name}/{partition}")


def group_entry(meta: GroupMeta, made_at: int = ITSELF) -> bytes:
    """Encode an entry that creates a group. With the id of its creation, encode one that changes or rewrites its
    settings."""
    return _entry(_Kind.MADE, meta.name, WHOLE_GROUP, made_at, encode(meta))


def deletion_entry(name: str, made_at: int) -> bytes:
    return _entry(_Kind.GONE, name, WHOLE_GROUP, made_at, b"")


def state_entry(name: str, partition: int, made_at: int, state: bytes) -> bytes:
    """Encode an entry with the state of a group in a partition. `state` is a snapshot or a delta."""
    assert partition >= 0
    return _entry(_Kind.STATE, name, partition, made_at, state)


def _entry(kind: _Kind, name: str, partition: int, made_at: int, rest: bytes) -> bytes:
    raw = name.encode()
    return _HEAD.pack(kind, _VERSION, len(raw), partition, made_at) + raw + rest


def skip_entry(id: int) -> bytes:
    """Encode an operator's order to skip the entry with this id."""
    return _entry(_Kind.PASSED, PREFIX, WHOLE_GROUP, id, b"")


def skipped_by(data: bytes) -> int | None:
    """Return the id of the entry to skip if `data` is an operator's order to skip one; else None."""
    found = _envelope(data)
    return found[2].made_at if found is not None and found[:2] == (_Kind.PASSED, _VERSION) else None


def _envelope(data: bytes) -> tuple[int, int, Key, bytes] | None:
    """Split an entry of any version into kind, version, subject and content; return None if it is not an entry of a
    server."""
    if len(data) < _HEAD.size:
        return None
    kind, version, size, partition, made_at = _HEAD.unpack_from(data)
    if not (0 < kind <= _ENVELOPE_MAX and 0 < version <= _ENVELOPE_MAX and partition >= WHOLE_GROUP and made_at >= ITSELF):
        return None
    name, rest = data[_HEAD.size : _HEAD.size + size].decode("ascii", "replace"), data[_HEAD.size + size :]
    return (kind, version, Key(name, made_at, partition), rest) if is_name(name) else None


def _parsed(data: bytes) -> tuple[_Kind, Key, bytes] | None:
    found = _envelope(data)
    if found is None:
        return None
    kind, version, key, rest = found
    if version != _VERSION or kind not in tuple(_Kind):
        raise GroupStateDamaged(f"an entry has the unknown kind {kind} or version {version}")
    if (key.partition == WHOLE_GROUP) is (kind == _Kind.STATE):
        raise GroupStateDamaged(f"an entry of kind {kind} about group {key.name!r} has the partition {key.partition}")
    return _Kind(kind), key, rest


class GroupStateLog:
    def __init__(self, passed: frozenset[int] = frozenset()) -> None:
        """Start with an empty log. `passed` holds the ids of entries that are skipped by an operator's order."""
        self._passed = passed
        self.foreign = 0
        """Number of records read that are not entries of a server."""
        self.groups: dict[str, tuple[GroupMeta, int]] = {}
        """Settings and creation id of each group, by name."""
        self._states: dict[Key, GroupState] = {}
        """State of each group in each partition. Holds states of groups whose own entry was rewritten and follows later
        in the log."""
        self._newest: dict[Key, int] = {}
        """Id of the newest entry about each subject."""
        self._live: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        """Id and size of the oldest entry that is needed for each subject, in the order of the log."""
        self._live_bytes = 0
        self._sizes: OrderedDict[int, int] = OrderedDict()
        """Size of each entry from the floor on, by id."""
        self.bytes = 0
        """Total size of the entries from the floor on."""
        self.reach = -1
        """Id of the last entry read; -1 before the first."""
        self.timeline = FIRST
        """Timeline of the group log that was read."""

    @property
    def position(self) -> Position:
        """Return the id of the last entry read, with its timeline."""
        return Position(self.reach, self.timeline)

    def state(self, name: str, partition: int) -> GroupState | None:
        """Return the state of a group in a partition; None if it has not begun there."""
        return self._states.get(Key(name, self.groups[name][1], partition))

    def newest(self, key: Key) -> int:
        """Return the id of the newest entry about a subject; -1 if there is none."""
        return self._newest.get(key, -1)

    def states(self) -> Iterator[tuple[Key, GroupState]]:
        """Yield all states of groups, by subject."""
        return iter(self._states.items())

    # -- reading -------------------------------------------------------------------------------------------------------

    def pass_to(self, id: int) -> None:
        """Record that the log has no more entries up to an id: it was trimmed there, or holds none."""
        self.reach = max(self.reach, id)

    def read(self, id: int, data: bytes) -> Key | None:
        """Replay the next entry and return its subject; None if it has none. Raise `GroupStateDamaged` if an entry
        cannot be decoded or contradicts the log."""
        assert id > self.reach
        try:
            key = None if id in self._passed else self._understand(id, data)
        except GroupStateDamaged as error:
            raise GroupStateDamaged(f"entry {id} of the group log: {error.message}", entry=id) from error
        self.reach = id
        self._sizes[id] = len(data)
        self.bytes += len(data)
        while self._sizes and next(iter(self._sizes)) < self.floor:
            self.bytes -= self._sizes.popitem(last=False)[1]
        return key

    def _understand(self, id: int, data: bytes) -> Key | None:
        found = _parsed(data)
        if found is None:
            self.foreign += 1
            return None
        kind, key, rest = found
        match kind:
            case _Kind.MADE:
                key = self._make(id, key, rest)
            case _Kind.GONE:
                self._end(key)
            case _Kind.STATE:
                self._stand(id, key, rest)
            case _Kind.PASSED:
                return None
        if kind is _Kind.MADE or (kind is _Kind.STATE and GroupState.is_snapshot(rest)):
            self._drop(key)
            self._live[key] = id, len(data)
            self._live_bytes += len(data)
        return key

    def _make(self, id: int, key: Key, rest: bytes) -> Key:
        meta = decode(GroupMeta, rest, f"the group {key.name}", GroupStateDamaged)
        if meta.name != key.name:
            raise GroupStateDamaged(f"the settings of group {key.name} have the name {meta.name}")
        made_at = id if key.made_at == ITSELF else key.made_at
        if self.groups.get(key.name, (meta, made_at))[1] != made_at:
            raise GroupStateDamaged(f"the group {key.name} was created twice, which its lock should have prevented")
        self.groups[key.name] = meta, made_at
        return key._replace(made_at=made_at)

    def _end(self, key: Key) -> None:
        if self.groups.get(key.name, (None, None))[1] == key.made_at:
            del self.groups[key.name]
        for other in [other for other in self._live if other[:2] == key[:2]]:
            self._drop(other)
            self._states.pop(other, None)
            self._newest.pop(other, None)

    def _stand(self, id: int, key: Key, rest: bytes) -> None:
        self._newest[key] = id
        known = self._states.get(key)
        if known is not None:
            self._states[key] = known.apply(rest)
        elif GroupState.is_snapshot(rest):
            self._states[key] = GroupState.of(rest)
        # Else the snapshot before this delta was trimmed; a newer snapshot follows later in the log.

    def _drop(self, key: Key) -> None:
        _, size = self._live.pop(key, (0, 0))
        self._live_bytes -= size

    # -- what is to be written anew ------------------------------------------------------------------------------------

    @property
    def floor(self) -> int:
        """Return the lowest id that is needed: replay from here on gives the same result."""
        return next(iter(self._live.values()))[0] if self._live else self.reach + 1

    @property
    def overdue(self) -> Key | None:
        """Return the subject whose entry must be rewritten next so that the log can be trimmed; None if the log is
        short enough."""
        return next(iter(self._live), None) if self.bytes > GARBAGE * self._live_bytes + SLACK_BYTES else None


TROUBLES_MAX = 20


def totals_of(
    state_log: GroupStateLog,
    at_work: Mapping[Key, GroupPartitionStatus],
    partitions_of: Callable[[GroupMeta], Iterable[int]],
    committed_of: Callable[[int], int | None],
    trouble: str,
    stopped_by: Callable[[Key, GroupState], str] = lambda key, state: state.stopped,
) -> GroupTotals:
    """Count all groups. `partitions_of` returns the partitions of a group at this moment. `committed_of` returns the
    committed mark of a partition, None if another server owns it. `trouble` is why the group log may be outdated here.
    `stopped_by` returns why an inactive group would deliver nothing."""
    members = in_flight = lags = parked_ones = stopped_ones = paused_ones = unattended = 0
    troubles: list[GroupTrouble] = []
    for key, state, end in _owned(state_log, partitions_of, committed_of):
        place = at_work.get(key)
        if place is None:
            here, paused, stopped, parked = 0, "", stopped_by(key, state), len(state.parked)
            lag = max(0, end - state.reach) + state.open.ids
        else:
            here, paused, stopped, parked = len(place.members), place.paused, place.stopped, place.parked
            lag = max(0, end - place.reach) + place.open
            in_flight += place.in_flight
        members, lags, parked_ones = members + here, lags + lag, parked_ones + parked
        if stopped or paused or parked or (lag and not here):
            found = GroupTrouble(key.name, key.partition, stopped, paused, here, lag, parked)
            stopped_ones, paused_ones = stopped_ones + bool(stopped), paused_ones + bool(paused and not stopped)
            unattended += found.is_unattended
            troubles.append(found)
    return GroupTotals(
        groups=len(state_log.groups),
        members=members,
        in_flight=in_flight,
        lag=lags,
        parked=parked_ones,
        stopped=stopped_ones,
        paused=paused_ones,
        unattended=unattended,
        troubles=tuple(nsmallest(TROUBLES_MAX, troubles, key=_worst_first)),
        trouble=trouble,
        foreign=state_log.foreign,
    )


def _owned(
    state_log: GroupStateLog,
    partitions_of: Callable[[GroupMeta], Iterable[int]],
    committed_of: Callable[[int], int | None],
) -> Iterator[tuple[Key, GroupState, int]]:
    """Yield the state of each group in each of its partitions that this server owns, with the committed mark there. Where
    a group has not begun, it is at its start."""
    committed: dict[int, int | None] = {}
    begun = dict(state_log.states())
    for meta, made_at in state_log.groups.values():
        starts = {start.partition: start.position for start in meta.starts}
        for partition in partitions_of(meta):
            if partition not in committed:
                committed[partition] = committed_of(partition)
            end, key = committed[partition], Key(meta.name, made_at, partition)
            if end is not None:
                start = starts.get(partition, Position(-1))
                yield key, begun.get(key) or GroupState(after=int(start), timeline=start.timeline), end


def _worst_first(one: GroupTrouble) -> tuple[bool, bool, int, int, str, int]:
    return not one.stopped, not one.paused, -one.parked, -one.lag, one.name, one.partition
