"""What the coordinator holds: frozen values, and the JSON documents that they are written as and read from. Pure.

The heart is `PartitionMeta`: which session is the newest, who its members are, and what was decided about the one before.
Everything that recovery may rely on is in there. How documents are written and read is `waltzd.protocol.document`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias
from uuid import UUID

from waltzd.errors import BadArgument, BadMetadata, MetadataUnfinished
from waltzd.format.layout import PARTITIONS_MAX
from waltzd.protocol.address import is_name
from waltzd.protocol.channels import CHANNELS_MAX, Ranges, is_channel
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
    whole,
    with_defaults,
)
from waltzd.protocol.policy import Grant, Quotas
from waltzd.protocol.retention import is_keep_local
from waltzd.protocol.timelines import FIRST, Lineage, Timeline, lineage_mistake

FORMAT = 1
"""What new clusters write where nobody says otherwise."""
LEASE_MS_MAX = 250
"""A fail-over may take twice as long on top."""
GENERATION_MAX = (1 << 31) - 1
Generation: TypeAlias = Annotated[int, whole(0, GENERATION_MAX)]
KeepLocal: TypeAlias = Annotated[
    str, Rule("all, a time as in 7d, or a size as in 500GB", lambda value: isinstance(value, str) and is_keep_local(value))
]


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClusterMeta(Document):
    """<root>"""

    name: Name
    key: UUID
    partitions: Annotated[int, whole(1, PARTITIONS_MAX)]
    created: str
    format: Annotated[int, whole(0, 1)] = 0
    """Of the segments that the next session of each partition writes. It only rises, and a partition that has gone over
    stays there."""
    keep_local: KeepLocal = field(default="all", metadata={ADDED: True})
    """What of the archived log storages keep all the same."""


@dataclass(frozen=True, kw_only=True)
class Unfinished(Document):
    """<root>, in the place of `ClusterMeta` while a tool puts the documents of a cluster back: no daemon and no other tool
    takes what is there for a cluster before all of it is."""

    key: UUID
    unfinished: str
    """The command that began it."""
    began: str


@dataclass(frozen=True, kw_only=True)
class ServerMeta(Document):
    """<root>/servers/<name>, ephemeral"""

    name: Name
    listen: str
    admin_listen: str
    instance: UUID
    """New with every start of the process."""
    version: str
    preferred: tuple[int, ...] = ()
    is_draining: bool = False
    """It gives its partitions away and takes no new ones."""
    streams: str | None = None
    """Where applications may mount without gRPC."""


@dataclass(frozen=True)
class Ownership:
    server: Name | None
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class Assignment(Document):
    """<root>/assignment: who owns each partition, in the order of their numbers."""

    owners: tuple[Ownership, ...] = field(metadata={NUMBERED: "partitions"})


@dataclass(frozen=True, kw_only=True)
class StorageMeta(Document):
    """<root>/storages/<name>"""

    name: Name
    listen: str
    admin_listen: str
    group: str
    """Its failure domain."""


@dataclass(frozen=True)
class Leader(Document):
    """<root>/election/leader, ephemeral: the server that assigns partitions to servers."""

    name: Name


NO_SECRET = UUID(int=0)


@dataclass(frozen=True)
class Counter(Document):
    """<root>/ids/client"""

    next: int
    secret: UUID
    """What servers prove client ids with. Without certificates, a process that can read it can be any client. `NO_SECRET`
    in documents that were saved into an archive, which others may read; it proves nothing."""
    written: int = field(default=0, metadata={ADDED: True})
    """Version that the node got when a server wrote this value. A node with another version was put back by somebody."""


@dataclass(frozen=True, kw_only=True)
class ClientMeta(Document):
    """<root>/clients/<name>: an application, by the name in its certificates. Written rarely: not for each mount."""

    name: Name
    first_seen: int
    """Seconds since 1970; within some minutes."""
    last_seen: int
    epoch: int = 0
    """Of the newest instance that is to be the only one of this name that lives. 0: there never was one."""


@dataclass(frozen=True, kw_only=True)
class Preferences(Document):
    """<root>/preferred: which server an operator wants to own a partition, as far as an even distribution permits. It goes
    before what servers prefer by themselves."""

    partitions: Mapping[int, Name]


@dataclass(frozen=True, kw_only=True)
class Moves(Document):
    """<root>/moves: where the replicas of a partition shall be in the end, while they are on their way. A command
    that moves them writes this first, so that any other one can go on from it."""

    partitions: Mapping[int, tuple[Name, ...]]


@dataclass(frozen=True, kw_only=True)
class CopyRate(Document):
    """<root>/copy-rate: the bound that an operator's command sets. For moves it lasts until they have ended; otherwise it
    is ephemeral, and goes away with the command."""

    bytes_per_second: Annotated[int, whole(1)]
    """Of each replica that copies."""
    who: str


@dataclass(frozen=True, kw_only=True)
class ArchiveMeta(Document):
    """<root>/archives/<number>: how far the archive of the partition reaches. It only goes forward."""

    archive: UUID
    """Which one: the label in the store says the same."""
    number: Annotated[int, whole(1)]
    """Of the newest manifest."""
    sha256: Sha256
    """Of the newest manifest."""
    last: int
    """The last id that is archived."""
    floor: int = field(default=0, metadata={ADDED: True})
    """The first id that replicas have to keep: below it storages may remove what is archived. It only rises."""
    timeline: UUID = field(default=FIRST, metadata={ADDED: True})
    """Identity of the timeline whose log the manifest names; that of another timeline does not count for this log."""

    def mistake(self) -> tuple[str, str] | None:
        if self.floor > self.last + 1:
            return "floor", f"must be a whole number from 0 to {self.last + 1}, not {self.floor}"
        return None


@dataclass(frozen=True, kw_only=True)
class HistoryEntry(Document):
    """<root>/history/<number>: who changed what, and why. For people: nothing is decided by it."""

    began: str
    ended: str | None
    """None while it goes on, and after the command was killed: until another one has finished or cancelled its moves."""
    who: str
    verb: str
    subject: str
    reason: str | None
    steps: tuple[AnyText, ...]
    """What was planned."""
    outcome: str
    """"begun", "done", what went wrong, or which command went on with it after it was killed."""
    moves: tuple[int, ...] = field(default=(), metadata={ADDED: True})
    """Partitions whose replicas the command moves: another command may finish that."""


@dataclass(frozen=True, kw_only=True)
class PolicyDocument(Document):
    """<root>/policy: who may do what. Where it is missing, every application may do everything."""

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
    """<root>/channels: names for sets of partitions."""

    channels: Mapping[Name, Ranges]

    def mistake(self) -> tuple[str, str] | None:
        if len(self.channels) > CHANNELS_MAX:
            return "channels", f"must have at most {CHANNELS_MAX} names, not {len(self.channels)}"
        for name in self.channels:
            if not is_channel(name):
                return f"channels.{name}", "must begin with a letter, and not be all"
        return None


class Membership(enum.StrEnum):
    MEMBER = "member"
    LEARNER = "learner"
    """Copies first; becomes a member when a session starts and it is level."""


@dataclass(frozen=True)
class ReplicaSet(Document):
    """<root>/replicas/<number>: which storages hold the partition. A document for each, so that no owner waits for that of
    another partition."""

    replicas: Mapping[Name, Membership]


@dataclass(frozen=True, kw_only=True)
class ReplicaSets(Document):
    """All of them."""

    partitions: Mapping[int, Mapping[Name, Membership]]


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """What is recorded of one replica. It took part in `session` until `closing`; without a closing mark it still may, and
    votes when that session is closed. One that has only copied so far may have begun none: -1."""

    session: Mark
    closing: Mark | None
    incarnation: UUID
    acknowledged: Mark = -1
    """How far it was known to have everything on its disk when this was written. Who holds less has forgotten it."""
    is_lost: bool = False
    """It was seen to have forgotten what it had acknowledged in this session; `acknowledged` says exactly how much that is.
    It does not count before it holds all of it again."""
    is_diverged: bool = False
    """It holds another history than the log. Nothing of it counts, is copied or is cut, until another directory stands in
    its place."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The closing mark of the session `PartitionMeta.opened`: saved before it is acted upon, and never undone."""

    mark: Mark
    session: int
    """The session that decided."""


@dataclass(frozen=True, kw_only=True)
class PartitionMeta(Document):
    """<root>/partitions/<number>"""

    generation: Generation
    session: int
    """The newest session id that was given out, opened or not."""
    opened: int = 0
    """The newest session that was admitted: it may have written. 0: none ever was."""
    low_mark: Mark = -1
    """The mark at which it began."""
    members: tuple[Name, ...] = ()
    """Its members: a majority of them made its transactions committed."""
    replicas: Mapping[Name, ReplicaState] = field(default_factory=dict)
    decision: Decision | None = None
    lease_ms: int = 0
    """For so long after a question the owner of `opened` trusts what its storages answered; a new owner waits until that is
    over. 0: it asks each time, or has closed its session."""
    given_up: Mapping[int, Mark] = field(default_factory=dict)
    """What operators gave up (`waltzctl partition rescue`): session → mark. A replica that has begun no session above that
    one may know of committed transactions above the mark that this log does not have."""
    timelines: tuple[Timeline, ...] = field(default=(), metadata={ADDED: True})
    """Timelines of the log behind the first one; the last one is the current timeline. Written together with the decision
    that ends the log of the one before."""

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

    @property
    def joined(self) -> tuple[str, ...]:
        """The members whose acknowledgements counted in the opened session."""
        return tuple(
            name
            for name in self.members
            if (state := self.replicas.get(name)) is not None and state.session == self.opened and state.closing is None
        )

    def gave_up(self, session: int, certain: int) -> int | None:
        """Whether an operator gave up what a replica knows to be committed, which has begun no later session than this one:
        the mark above which that was done. It would never cut it, and other transactions have the same ids now."""
        return min((mark for rescue, mark in self.given_up.items() if session < rescue and certain > mark), default=None)


# -- reading -----------------------------------------------------------------------------------------------------------


def whole_grant(found: Any) -> Any:
    whole = with_defaults(Grant, found)
    if isinstance(whole, dict):
        whole["quotas"] = with_defaults(Quotas, whole["quotas"])
        if type(whole["partitions"]) is int:  # as YAML reads `partitions: 7`
            whole["partitions"] = str(whole["partitions"])
    return whole


def decode_root(data: bytes, path: str = "/") -> ClusterMeta:
    """The cluster at a root; `MetadataUnfinished` where a tool is putting one back, or was killed at that."""
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


def unfinished(data: bytes) -> Unfinished | None:
    try:
        return decode(Unfinished, data, "/")
    except BadMetadata:
        return None


def check_sets(meta: ClusterMeta, storages: Collection[StorageMeta], replicas: ReplicaSets) -> None:
    """Raise `BadArgument` for what a person may have mistyped. The group log has the number after the partitions."""
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
