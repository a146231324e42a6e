"""All groups as a log holds them: what stands in its entries, and which of them have to be written anew. Pure.

An entry is the newest word on one thing: a group as it was made, that it is gone, or where it stands in one partition. To
read the entries in their order is to know all groups; to read them from `floor` on comes to the same, so what lies
before that may be trimmed. Entries under one lock of the log (`lock_of`) exclude each other: the owner of a partition
writes under the lock of the group in that partition, with its own last mark, so what an owner that was replaced still
writes is refused where everything is.

What is no entry of ours (`_envelope`) is passed over and counted: somebody else has appended it. What is one, and cannot be
understood, stops the reader, because what comes after it could mean something else; until an operator says, by an entry
further on, that this one is to be passed over.

A group is known by its name and by the id of the entry that made it: a group that was deleted and made again under its name
is another one, and what is left of the first says nothing about it.
"""

from __future__ import annotations

import enum
import struct
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from waltzd.cluster.groups import GroupMeta
from waltzd.errors import GroupStateDamaged
from waltzd.protocol.address import is_name
from waltzd.protocol.document import decode, encode
from waltzd.protocol.locks import Lock, write_lock
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST
from waltzd.server.groups.delivery_tracker import GroupSettings
from waltzd.server.groups.state import GroupState

PREFIX = "waltz-group"
"""Of the names of the locks."""
GARBAGE = 4
"""The log is at most so many times as large as what it says."""
SLACK_BYTES = 64 << 10
"""And so much more: below that, nothing is worth writing anew."""
WHOLE_GROUP = -1
"""In the place of a partition: an entry that is about the group itself."""
ITSELF = -1
"""In the place of the id of the entry that made a group: this entry does."""
_HEAD = struct.Struct(">BBHqq")
"""Kind, version, length of the name, partition, and the id of the entry that made the group."""
_VERSION = 1
_ENVELOPE_MAX = 32
"""Kinds and versions up to here are those of a later version of Waltz: entries of ours that are not known here."""


class Key(NamedTuple):
    """What an entry is about."""

    name: str
    made_at: int
    """Of the entry that made the group: its id."""
    partition: int


class _Kind(enum.IntEnum):
    MADE = 1
    GONE = 2
    STATE = 3
    PASSED = 4
    """An operator's word: the entry whose id stands in the place of that which made a group is to be passed over."""


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
    """Under which an entry about it is written."""
    return write_lock(PREFIX, f"{name}/{partition}")


def made(meta: GroupMeta, made_at: int = ITSELF) -> bytes:
    """A new group; or, with the id of the entry that made it, the same one with other settings, or written anew."""
    return _entry(_Kind.MADE, meta.name, WHOLE_GROUP, made_at, encode(meta))


def gone(name: str, made_at: int) -> bytes:
    return _entry(_Kind.GONE, name, WHOLE_GROUP, made_at, b"")


def stands(name: str, partition: int, made_at: int, state: bytes) -> bytes:
    """`state`: a snapshot or a delta."""
    assert partition >= 0
    return _entry(_Kind.STATE, name, partition, made_at, state)


def _entry(kind: _Kind, name: str, partition: int, made_at: int, rest: bytes) -> bytes:
    raw = name.encode()
    return _HEAD.pack(kind, _VERSION, len(raw), partition, made_at) + raw + rest


def pass_over(id: int) -> bytes:
    """Not to be read: the entry with this id."""
    return _entry(_Kind.PASSED, PREFIX, WHOLE_GROUP, id, b"")


def passed_over(data: bytes) -> int | None:
    """The id of the entry that is not to be read, if this one says so."""
    found = _envelope(data)
    return found[2].made_at if found is not None and found[:2] == (_Kind.PASSED, _VERSION) else None


def _envelope(data: bytes) -> tuple[int, int, Key, bytes] | None:
    """Kind, version, what it is about, and the rest; None if this is no entry of a server, of whatever version."""
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
        raise GroupStateDamaged(f"an entry about a group has kind {kind} and version {version}, which are not known here")
    if (key.partition == WHOLE_GROUP) is (kind == _Kind.STATE):
        raise GroupStateDamaged(f"an entry about a group speaks of partition {key.partition} of {key.name!r}")
    return _Kind(kind), key, rest


class GroupStateLog:
    def __init__(self, passed: frozenset[int] = frozenset()) -> None:
        """`passed`: ids of entries that an operator has said are to be passed over."""
        self._passed = passed
        self.foreign = 0
        """Entries that were read and are none of ours."""
        self.groups: dict[str, tuple[GroupMeta, int]] = {}
        """Each with the id of the entry that made it."""
        self._states: dict[Key, GroupState] = {}
        """Also of groups whose own entry was written anew, and so comes later."""
        self._newest: dict[Key, int] = {}
        """The id of the last entry about each."""
        self._live: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        """Of each thing that is said: the oldest entry that is needed for it, and its size. The oldest comes first."""
        self._live_bytes = 0
        self._sizes: OrderedDict[int, int] = OrderedDict()
        """Of all entries from the floor on."""
        self.bytes = 0
        """Of all entries from the floor on."""
        self.reach = -1
        """The last id that was read."""
        self.timeline = FIRST
        """Identity of the timeline of the group log that was read."""

    @property
    def position(self) -> Position:
        """The last id that was read, with its timeline."""
        return Position(self.reach, self.timeline)

    def state(self, name: str, partition: int) -> GroupState | None:
        """Where a group stands in a partition; None where nobody has begun yet."""
        return self._states.get(Key(name, self.groups[name][1], partition))

    def newest(self, key: Key) -> int:
        """The id of the last entry about where it stands there; -1 before the first."""
        return self._newest.get(key, -1)

    def states(self) -> Iterator[tuple[Key, GroupState]]:
        """Where groups stand, in each partition in which they have begun."""
        return iter(self._states.items())

    # -- reading -------------------------------------------------------------------------------------------------------

    def pass_to(self, id: int) -> None:
        """Up to it no more entries stand in the log than were read: where it begins, or what is none."""
        self.reach = max(self.reach, id)

    def read(self, id: int, data: bytes) -> Key | None:
        """The next entry, and what it is about; None for one that says nothing. `GroupStateDamaged` for one of ours that
        cannot be: nothing after it can be believed."""
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
            raise GroupStateDamaged(f"the group {key.name} calls itself {meta.name}")
        made_at = id if key.made_at == ITSELF else key.made_at
        if self.groups.get(key.name, (meta, made_at))[1] != made_at:
            raise GroupStateDamaged(f"the group {key.name} was made twice, which its lock should have refused")
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
        # else a delta to what was trimmed: the snapshot that took its place comes later

    def _drop(self, key: Key) -> None:
        _, size = self._live.pop(key, (0, 0))
        self._live_bytes -= size

    # -- what is to be written anew ------------------------------------------------------------------------------------

    @property
    def floor(self) -> int:
        """The lowest id that is needed: what is read from there on says the same."""
        return next(iter(self._live.values()))[0] if self._live else self.reach + 1

    @property
    def overdue(self) -> Key | None:
        """What has to be written anew next, so that the log becomes shorter: where a group stands in a partition, or the
        group itself."""
        return next(iter(self._live), None) if self.bytes > GARBAGE * self._live_bytes + SLACK_BYTES else None
