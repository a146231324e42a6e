"""The documents in ZooKeeper, as frozen values that are written and read as JSON. Pure.

The most important one is `PartitionMeta`: the newest session of a partition, its members, and the decision that closed the
session before. Recovery relies on nothing else. `waltzd.protocol.document` writes and reads the JSON.

`Keep` says how much of the archived log storages keep on their own disks.

The setting is a short text: `all`, a time as in `7d` or `12h`, or a size as in `500GB` or `2TiB`, which applies to each
replica of a partition. Only archived segments may be removed; the others are kept regardless of their size.

**Checks of a partition's document.** It may have been restored from a copy, lost or forged.

An owner saves each session in the document before any storage receives it, and nothing is committed that no storage holds.
So the sessions and ids that a storage reports, also a storage that the document does not name, are evidence about the
document. Owners make these checks before they decide anything, and tools before they restore older documents.

**Changes of a partition's document** say which replicas take part in its session, which have forgotten, which diverged.

Each change is a new document, saved before anything relies on it (`waltzd.server.core.recovery` says when).
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias
from uuid import UUID

from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import BadMetadata, MetadataBehind, MetadataMissing, MetadataUnfinished
from waltzd.format.layout import PARTITIONS_MAX
from waltzd.protocol.address import is_name
from waltzd.protocol.channels import CHANNELS_MAX, KeyHash, Ranges, is_channel
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.document import (
    ADDED,
    NUMBERED,
    AnyText,
    Document,
    Mark,
    Name,
    Rule,
    Sha256,
    decode,
    parse,
    whole,
    with_defaults,
)
from waltzd.protocol.level import LEVEL_MAX, THIS, Program
from waltzd.protocol.policy import Grant, Quotas
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST, Lineage, Timeline, lineage_mistake

KEEP_ALL = "all"
_UNITS_OF_TIME = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_UNITS_OF_SIZE = {
    name: base ** (power + 1)
    for base, ending in ((1000, "B"), (1024, "iB"))
    for power, name in enumerate(letter + ending for letter in "KMGTP")
}
_KEEP = re.compile(rf"([1-9][0-9]{{0,5}})({'|'.join([*_UNITS_OF_TIME, *_UNITS_OF_SIZE])})")


@dataclass(frozen=True)
class Keep:
    """A parsed setting: at most one of the two limits is set; without a limit, everything is kept."""

    seconds: int | None = None
    """Age up to which records are kept; None for no limit of age."""
    size: int | None = None
    """Bytes of the newest segments of a replica that are kept; None for no limit of size."""


def keep_of(text: str) -> Keep | None:
    """Parse a setting; return None if it is invalid."""
    if text == KEEP_ALL:
        return Keep()
    found = _KEEP.fullmatch(text)
    if found is None:
        return None
    number, unit = int(found[1]), found[2]
    if unit in _UNITS_OF_TIME:
        return Keep(seconds=number * _UNITS_OF_TIME[unit])
    return Keep(size=number * _UNITS_OF_SIZE[unit])


FORMAT = 1
"""Format of segments that a new cluster writes by default."""
LEASE_MS_MAX = 250
"""Longest lease of an owner, in milliseconds. A fail-over may wait for up to twice the lease."""
GENERATION_MAX = (1 << 31) - 1
Generation: TypeAlias = Annotated[int, whole(0, GENERATION_MAX)]
KeepLocal: TypeAlias = Annotated[
    str,
    Rule(
        "all, a time as in 7d, or a size as in 500GB", lambda value: isinstance(value, str) and keep_of(value) is not None
    ),
]


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClusterMeta(Document):
    """The document <root>: name, key and size of the cluster."""

    name: Name
    key: UUID
    partitions: Annotated[int, whole(1, PARTITIONS_MAX)]
    created: str
    format: Annotated[int, whole(0, 1)] = 0
    """Format of the segments that the next session of each partition writes. It only rises."""
    keep_local: KeepLocal = field(default="all", metadata={ADDED: True})
    """How much of the archived log storages keep: all, a time as in 7d, or a size as in 500GB."""
    level: Annotated[int, whole(0, LEVEL_MAX)] = field(default=0, metadata={ADDED: True})
    """Level of the cluster (`waltzd.protocol.level`): processes that support only lower levels are refused. It only
    rises."""


@dataclass(frozen=True, kw_only=True)
class Unfinished(Document):
    """The document <root> in place of `ClusterMeta` while a tool restores the documents of a cluster.

    Daemons and other tools refuse the cluster until all documents are restored."""

    key: UUID
    unfinished: str
    """Command that began the restore."""
    began: str


@dataclass(frozen=True, kw_only=True)
class ServerMeta(Document):
    """The ephemeral document <root>/servers/<name>: a server that is up."""

    name: Name
    listen: str
    admin_listen: str
    instance: UUID
    """Identity of the process: every start has a new one."""
    version: str
    preferred: tuple[int, ...] = ()
    is_draining: bool = False
    """Whether the server hands its partitions over and takes no new ones."""
    streams: str | None = None
    """Address for applications that mount over plain frames in place of gRPC; None if there is no such port."""


@dataclass(frozen=True)
class Ownership:
    server: Name | None
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class Assignment(Document):
    """The document <root>/assignment: the owner of each partition, in the order of their numbers."""

    owners: tuple[Ownership, ...] = field(metadata={NUMBERED: "partitions"})


@dataclass(frozen=True, kw_only=True)
class StorageMeta(Document):
    """The document <root>/storages/<name>: a storage of the cluster."""

    name: Name
    listen: str
    admin_listen: str
    group: str
    """Failure domain of the storage."""


@dataclass(frozen=True)
class Leader(Document):
    """The ephemeral document <root>/election/leader: the server that assigns partitions to servers."""

    name: Name


NO_SECRET = UUID(int=0)


@dataclass(frozen=True)
class Counter(Document):
    """The document <root>/ids/client: the counter of client ids."""

    next: int
    secret: UUID
    """Key with which servers make the tokens of client ids. Without certificates, a process that can read the key can
    impersonate any client. `NO_SECRET` in documents that were saved into an archive: no token can be made with it."""
    written: int = field(default=0, metadata={ADDED: True})
    """Version that the node got when a server wrote this value. A node with another version was restored by an operator."""


@dataclass(frozen=True, kw_only=True)
class ClientMeta(Document):
    """The document <root>/clients/<name>: an application, by the name in its certificates. It is not written per mount."""

    name: Name
    first_seen: int
    """Time of the first connection, in seconds since 1970, with a precision of some minutes."""
    last_seen: int
    """Time of the last connection, in seconds since 1970, with a precision of some minutes."""
    epoch: int = 0
    """Epoch of the newest exclusive instance of this name; 0 if there never was one."""


@dataclass(frozen=True, kw_only=True)
class Preferences(Document):
    """The document <root>/preferred: the server that an operator wants to own a partition, as far as an even distribution
    permits. It overrides the preferences in server configurations."""

    partitions: Mapping[int, Name]


@dataclass(frozen=True, kw_only=True)
class Moves(Document):
    """The document <root>/moves: for each partition whose replicas are being moved, the storages that will hold them.

    A command writes this document before it moves anything, so that any later command can continue the moves."""

    partitions: Mapping[int, tuple[Name, ...]]


@dataclass(frozen=True, kw_only=True)
class CopyRate(Document):
    """The document <root>/copy-rate: the limit for copying that an operator's command sets.

    For moves it exists until they have ended; otherwise it is ephemeral and is deleted when the command ends."""

    bytes_per_second: Annotated[int, whole(1)]
    """Limit for each replica that copies."""
    who: str


@dataclass(frozen=True, kw_only=True)
class ArchiveMeta(Document):
    """The document <root>/archives/<number>: how far the archive of a partition reaches. It only goes forward."""

    archive: UUID
    """Identity of the archive, which is also in its label in the store."""
    number: Annotated[int, whole(1)]
    """Number of the newest manifest."""
    sha256: Sha256
    """SHA-256 of the newest manifest."""
    last: int
    """Last id that is archived."""
    floor: int = field(default=0, metadata={ADDED: True})
    """First id that replicas have to keep; storages may remove archived segments below it. It only rises."""
    timeline: UUID = field(default=FIRST, metadata={ADDED: True})
    """Identity of the timeline whose log the manifest names. An archive of another timeline does not count for this log."""

    def mistake(self) -> tuple[str, str] | None:
        if self.floor > self.last + 1:
            return "floor", f"must be a whole number from 0 to {self.last + 1}, not {self.floor}"
        return None


@dataclass(frozen=True, kw_only=True)
class HistoryEntry(Document):
    """The document <root>/history/<number>: one command that changed the cluster. Nothing is decided by it."""

    began: str
    ended: str | None
    """Time at which the command ended. None while it runs, and after it was killed until its moves have ended."""
    who: str
    verb: str
    subject: str
    reason: str | None
    steps: tuple[AnyText, ...]
    """Planned changes, one sentence each."""
    outcome: str
    """"begun", "done", an error message, or the command that continued it after it was killed."""
    moves: tuple[int, ...] = field(default=(), metadata={ADDED: True})
    """Partitions whose replicas the command moves; another command may finish the moves."""


@dataclass(frozen=True, kw_only=True)
class PolicyDocument(Document):
    """The document <root>/policy: the grants. Without it, every application may do everything."""

    grants: tuple[Grant, ...]

    def mistake(self) -> tuple[str, str] | None:
        for at, grant in enumerate(self.grants):
            for name, found in (("names", grant.names), ("may", grant.may)):
                if not found:
                    return f"grants[{at}].{name}", "must not be empty: the grant would allow nothing"
                if len(set(found)) != len(found):
                    return f"grants[{at}].{name}", "has an entry twice"
        return None


@dataclass(frozen=True, kw_only=True)
class ChannelsDocument(Document):
    """The document <root>/channels: names for sets of partitions."""

    channels: Mapping[Name, Ranges]
    keys: Mapping[Name, KeyHash] = field(default_factory=dict, metadata={ADDED: True})
    """Hash of the keys of a channel. A client of a channel without one hashes over all partitions of the cluster."""

    def mistake(self) -> tuple[str, str] | None:
        if len(self.channels) > CHANNELS_MAX:
            return "channels", f"must have at most {CHANNELS_MAX} names, not {len(self.channels)}"
        for name in self.channels:
            if not is_channel(name):
                return f"channels.{name}", "must begin with a letter, and not be all"
        for name in self.keys:
            if name not in self.channels:
                return f"keys.{name}", "must be the name of a channel"
        return None


class Membership(enum.StrEnum):
    MEMBER = "member"
    LEARNER = "learner"
    """Replica that copies the log. It becomes a member when a session starts and it is level."""


@dataclass(frozen=True)
class ReplicaSet(Document):
    """The document <root>/replicas/<number>: the storages that hold a partition. Each partition has its own document, so
    that owners do not wait for each other."""

    replicas: Mapping[Name, Membership]


@dataclass(frozen=True, kw_only=True)
class ReplicaSets(Document):
    """The replica sets of all partitions. It is not a document in ZooKeeper."""

    partitions: Mapping[int, Mapping[Name, Membership]]


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """The record of one replica of a partition."""

    session: Mark
    """Last session in which the replica took part; -1 if it has only copied."""
    closing: Mark | None
    """Mark up to which it took part in `session`; None if it may still take part, and votes when that session is closed."""
    incarnation: UUID
    """Identity of the replica's files: a replica that was made again has another one."""
    acknowledged: Mark = -1
    """Highest id that the replica was known to have on its disk when this was written. If it now holds less, it has lost
    data."""
    is_lost: bool = False
    """Whether the replica was seen to have lost ids that it had acknowledged in this session, which are those up to
    `acknowledged`. It does not count before it holds all of them again."""
    is_diverged: bool = False
    """Whether the replica holds another history than the log. It does not count, and is neither copied nor cut, until an
    operator replaces its directory."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The closing mark of the session `PartitionMeta.opened`. It is saved before it has any effect, and never changed."""

    mark: Mark
    session: int
    """Session of the owner that decided."""


@dataclass(frozen=True, kw_only=True)
class PartitionMeta(Document):
    """The document <root>/partitions/<number>: sessions, members and timelines of a partition."""

    generation: Generation
    session: int
    """Newest session id that an owner has taken, opened or not."""
    opened: int = 0
    """Newest session that was opened, and so may have written; 0 if none was."""
    low_mark: Mark = -1
    """Mark at which the session `opened` began."""
    members: tuple[Name, ...] = ()
    """Members of the session `opened`: a transaction is committed when a majority of them has it on disk."""
    replicas: Mapping[Name, ReplicaState] = field(default_factory=dict)
    decision: Decision | None = None
    lease_ms: int = 0
    """Milliseconds for which the owner of `opened` relies on an answer of its storages; a new owner waits for their end.
    0 if it asks for each read, or has closed its session."""
    given_up: Mapping[int, Mark] = field(default_factory=dict)
    """Transactions that operators gave up (`waltzctl partition rescue`), as session → mark. A replica that has begun no
    session above it may hold committed transactions above the mark that this log does not have."""
    timelines: tuple[Timeline, ...] = field(default=(), metadata={ADDED: True})
    """Timelines of the log after the first one; the last one is the current timeline. A timeline is written together with
    the decision that ends the one before."""

    def mistake(self) -> tuple[str, str] | None:
        sessions = {"opened": self.opened, "decision.session": 0 if self.decision is None else self.decision.session}
        for place, session in sessions.items():
            if session > self.session:
                return place, f"must be a whole number from 0 to {self.session}, not {session}"
        if self.lease_ms > LEASE_MS_MAX:
            return "lease_ms", f"must be a whole number from 0 to {LEASE_MS_MAX}, not {self.lease_ms}"
        if (mistake := lineage_mistake(self.timelines)) is not None:
            return "timelines", mistake
        if self.timelines and self.timelines[-1].session > self.session:
            return "timelines", f"has session {self.timelines[-1].session}, above the newest one, {self.session}"
        return None

    @functools.cached_property
    def lineage(self) -> Lineage:
        return Lineage(self.timelines)

    @functools.cached_property
    def joined(self) -> tuple[str, ...]:
        """Members whose acknowledgements counted in the opened session."""
        return tuple(
            name
            for name in self.members
            if (state := self.replicas.get(name)) is not None and state.session == self.opened and state.closing is None
        )

    def gave_up(self, session: int, certain: int) -> int | None:
        """Return the mark above which an operator gave up ids that a replica knows to be committed; None if none were.

        `session` is the last session that the replica has begun, `certain` the last id that it never cuts. Other
        transactions have these ids now."""
        return min((mark for rescue, mark in self.given_up.items() if session < rescue and certain > mark), default=None)


# -- reading -----------------------------------------------------------------------------------------------------------


def whole_grant(found: Any) -> Any:
    """Add the defaults of omitted fields to a grant as a person wrote it."""
    whole = with_defaults(Grant, found)
    if isinstance(whole, dict):
        whole["quotas"] = with_defaults(Quotas, whole["quotas"])
        if type(whole["partitions"]) is int:  # YAML reads `partitions: 7` as a number
            whole["partitions"] = str(whole["partitions"])
    return whole


def decode_root(data: bytes, path: str = "/", program: Program = THIS) -> ClusterMeta:
    """Return the cluster at a root; raise `LevelUnknown` if it was finalized for a newer version than `program`,
    `MetadataUnfinished` if a tool is restoring it, or was killed while it did."""
    check_root_level(data, path, program)  # first: a newer version may also have added fields
    try:
        return decode(ClusterMeta, data, path)
    except BadMetadata:
        found = unfinished(data)
        if found is None:
            raise
    raise MetadataUnfinished(
        f"{path}: the documents of the cluster {found.key} are not whole: {found.unfinished} began at {found.began} "
        "and did not end",
        path=path,
    )


def check_root_level(data: bytes, path: str = "/", program: Program = THIS) -> None:
    """Raise `LevelUnknown` if a root document, which may be of a newer version, has a level that is too high."""
    try:
        found = parse(data)
    except ValueError:
        return
    level = found.get("level") if isinstance(found, dict) else None
    program.check_level(level if type(level) is int else 0, path)


def unfinished(data: bytes) -> Unfinished | None:
    """Return the document of a restore that has not ended; None if `data` is another document."""
    try:
        return decode(Unfinished, data, "/")
    except BadMetadata:
        return None


def check_sets(meta: ClusterMeta, storages: Collection[StorageMeta], replicas: ReplicaSets) -> None:
    """Raise `BadArgument` if a name or a replica set is invalid. The group log has the number after the partitions."""
    names = [storage.name for storage in storages]
    for name in [meta.name, *names]:
        if not is_name(name):
            raise BadArgument(f"{name!r} is not a name: letters, digits, dots, dashes and underscores, at most 64")
    if len(set(names)) != len(names):
        raise BadArgument("two storages have the same name")
    for partition, members in replicas.partitions.items():
        if not 0 <= partition <= meta.partitions:
            raise BadArgument(f"there is no partition {partition}: the cluster has {meta.partitions}")
        for name in members:
            if name not in names:
                raise BadArgument(f"partition {partition} cannot have a replica on {name}: there is no such storage")


SESSIONS_AHEAD_MAX = 1000
"""Sessions by which a document may be ahead of the promises of its storages.

Each of them was saved by an owner that had asked the storages just before, and ended before it opened a replica."""


def contradiction(
    meta: PartitionMeta, name: str, status: ReplicaStatus, *, begun_max: int, is_before: bool
) -> WaltzError | None:
    """Return an error if the status of a storage contradicts the document of its partition; None if the two agree.

    Args:
        meta: The document, with the session of this owner as the newest.
        name: The storage.
        status: The status that the storage reported.
        begun_max: The newest session before this owner's that the storage may have begun, according to the document.
        is_before: Whether the storage reported before it received the session of this owner. Only then its promised
            session is that of an earlier owner. It can have begun this owner's session only after a closing mark was saved.
    """
    number, decision = status.partition, meta.decision
    if meta.opened > 0 and status.timeline != meta.lineage.current:
        return _of_another_timeline(meta, name, status, is_before=is_before)
    may_have_begun_ours = not is_before and (decision is not None or meta.opened == meta.session)
    begun = EMPTY if may_have_begun_ours and status.session == meta.session else status.session
    promised = status.promised_session if is_before else EMPTY
    given_up = meta.gave_up(status.session, status.certain)
    if meta.opened == 0:
        has_nothing = max(status.last_id, status.low_mark, status.certain) == EMPTY
        if has_nothing and (begun <= 0 or decision is not None) and promised < meta.session:
            return None
        return MetadataMissing(
            f"partition {number} was never opened, says the coordinator; but storage {name} holds ids up to "
            f"{status.last_id}, has begun session {status.session} and promised itself to session "
            f"{status.promised_session}",
            storage=name,
        )
    if begun > begun_max:
        what, known = f"has begun session {begun}", begun_max
    elif promised >= meta.session:
        what, known = f"has promised itself to session {promised}", meta.session - 1
    elif is_before and decision is not None and status.certain > decision.mark and given_up is None:
        what, known = f"knows that ids up to {status.certain} are committed", decision.mark
    elif begun > meta.opened and status.last_id > status.low_mark and given_up is None:
        # The session began with its low-water mark, and nothing is written before a session is open.
        what, known = f"has written in session {begun}", meta.opened
    else:
        return None
    return MetadataBehind(
        f"storage {name} {what} of partition {number}; the coordinator knows of none above {known}", storage=name
    )


def _of_another_timeline(meta: PartitionMeta, name: str, status: ReplicaStatus, *, is_before: bool) -> WaltzError | None:
    """Check a replica of another timeline; return an error if it contradicts the document.

    Sessions and ids of another timeline say nothing about this log, so the replica is brought to the current timeline, or
    set aside. Two findings show that the document is an older one that was restored: it records this replica and does not
    have the replica's timeline, or the replica promised itself to a session that the document does not have."""
    state = meta.replicas.get(name)
    is_recorded = state is not None and state.incarnation == status.incarnation and not state.is_diverged
    if status.timeline not in meta.lineage and is_recorded:
        what, known = f"holds the log of timeline {status.timeline}", f"timeline {meta.lineage.number}"
    elif status.timeline in meta.lineage and is_before and status.promised_session >= meta.session:
        what, known = f"has promised itself to session {status.promised_session}", str(meta.session - 1)
    else:
        return None
    return MetadataBehind(
        f"storage {name} {what} of partition {status.partition}; the coordinator knows of none above {known}", storage=name
    )


def unfounded(meta: PartitionMeta, asked: Collection[ReplicaStatus]) -> WaltzError | None:
    """Return an error if the newest session of the document is too far above the sessions of the storages that were asked.

    A storage that is fenced with a forged session would refuse the right owner, so check this before fencing."""
    newest = max((status.promised_session for status in asked), default=EMPTY)
    if not asked or meta.session <= newest + SESSIONS_AHEAD_MAX:
        return None
    number = next(iter(asked)).partition
    return MetadataBehind(
        f"the coordinator says that partition {number} has had session {meta.session - 1}; the newest that its "
        f"storages know "
        f"of is {newest}"
    )


def written_by_another(storage: str, mark: int, *, partition: int, session: int, last_id: int) -> MetadataBehind:
    """Return the error for a storage that holds ids of this owner's session that this owner never wrote."""
    return MetadataBehind(
        f"storage {storage} holds ids up to {mark} of partition {partition} in session {session}, which has written up to "
        f"{last_id}: another owner had a session of this number",
        storage=storage,
    )


def admitting(
    meta: PartitionMeta,
    mark: int,
    members: tuple[str, ...],
    roles: Iterable[str],
    level: Mapping[str, ReplicaStatus],
    diverged: Mapping[str, UUID] | None = None,
) -> PartitionMeta:
    """Return the document that opens the session. Level replicas have joined it. For each other replica the document says
    up to which id it can be trusted; what is cut above that id does not count as forgotten. `diverged`: directories that
    hold another history."""
    outside = diverged or {}
    states: dict[str, ReplicaState] = {}
    for name in roles:
        status, state = level.get(name), meta.replicas.get(name)
        if status is not None:
            states[name] = ReplicaState(
                session=meta.session, closing=None, incarnation=status.incarnation, acknowledged=mark
            )
        elif name in outside:
            states[name] = ReplicaState(session=EMPTY, closing=EMPTY, incarnation=outside[name], is_diverged=True)
        elif state is not None and state.closing is None and state.session == meta.opened:
            states[name] = replace(state, closing=mark, acknowledged=min(mark, state.acknowledged), is_lost=False)
        elif state is not None:
            states[name] = state
    return replace(meta, opened=meta.session, low_mark=mark, members=members, replicas=states, decision=None)


def losing(meta: PartitionMeta, name: str, mark: int) -> PartitionMeta | None:
    """Return the document that takes the vote from a member that has forgotten what it acknowledged in this session, up
    to `mark`; None if that is not needed."""
    state = meta.replicas.get(name)
    if name not in meta.joined or state is None or state.is_lost:
        return None
    lost = replace(state, is_lost=True, acknowledged=max(mark, state.acknowledged))
    return replace(meta, replicas={**meta.replicas, name: lost})


def diverging(meta: PartitionMeta, name: str, incarnation: UUID, mark: int) -> PartitionMeta | None:
    """Return the document that excludes a replica whose directory holds another history; None if it is excluded already.
    The replica may have acknowledged up to `mark`: its successor has to hold all of that."""
    state = meta.replicas.get(name)
    if state is not None and state.is_diverged and state.incarnation == incarnation:
        return None
    if state is not None and name in meta.joined:
        mark = max(mark, state.acknowledged)
        out = replace(state, incarnation=incarnation, is_lost=True, is_diverged=True, acknowledged=mark)
    else:
        out = ReplicaState(session=EMPTY, closing=EMPTY, incarnation=incarnation, is_diverged=True)
    return replace(meta, replicas={**meta.replicas, name: out})


def acknowledging(meta: PartitionMeta, marks: Mapping[str, int]) -> PartitionMeta:
    """Return the document that records how far the joined members have acknowledged; `meta` itself if nothing has risen."""
    risen = {
        name: replace(state, acknowledged=marks[name])
        for name, state in meta.replicas.items()
        if name in meta.joined and marks.get(name, -1) > state.acknowledged
    }
    return replace(meta, replicas={**meta.replicas, **risen}) if risen else meta


def closing(meta: PartitionMeta, mark: int, copies: Mapping[str, UUID]) -> PartitionMeta:
    """Return the document that closes its session at `mark`, which a majority holds: nothing more will be written.
    `copies`: directories that hold all of that and whose acknowledgements did not count. The decision rests on them, so
    the next session trusts them up to the mark."""
    assert meta.opened == meta.session
    states = {
        name: ReplicaState(session=meta.session, closing=mark, incarnation=incarnation)
        for name, incarnation in copies.items()
    }
    return replace(meta, decision=Decision(mark=mark, session=meta.session), replicas={**meta.replicas, **states})


def released(meta: PartitionMeta) -> PartitionMeta:
    """Return the document without a lease: its owner answers no more reads, so no server has to wait for the lease to
    end."""
    return replace(meta, lease_ms=0)


def following(closed: PartitionMeta) -> PartitionMeta:
    """Return the document that closes a session and takes the next one in one write, so that no other owner comes
    between."""
    return replace(closed, session=closed.session + 1)
