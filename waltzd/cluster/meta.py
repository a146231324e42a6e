"""What the coordinator holds, as frozen values. Pure.

`waltzd.cluster.document` writes them as JSON and reads them again. The heart is `PartitionMeta`: which session is the
newest, who its members are, and what was decided about the one before. Everything that recovery may rely on is in there.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID


@dataclass(frozen=True, kw_only=True)
class ClusterMeta:
    """<root>"""

    name: str
    key: UUID
    partitions: int
    created: str


@dataclass(frozen=True, kw_only=True)
class ServerMeta:
    """<root>/servers/<name>, ephemeral"""

    name: str
    listen: str
    admin_listen: str
    instance: UUID
    """New with every start of the process."""
    version: str
    preferred: tuple[int, ...] = ()
    is_draining: bool = False
    """It gives its partitions away and takes no new ones."""


@dataclass(frozen=True)
class Ownership:
    server: str | None
    generation: int


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """<root>/assignment: who owns each partition, in the order of their numbers."""

    owners: tuple[Ownership, ...]


@dataclass(frozen=True, kw_only=True)
class StorageMeta:
    """<root>/storages/<name>"""

    name: str
    listen: str
    admin_listen: str
    group: str
    """Its failure domain."""


@dataclass(frozen=True)
class Leader:
    """<root>/election/leader, ephemeral: the server that assigns partitions to servers."""

    name: str


@dataclass(frozen=True)
class Counter:
    """<root>/ids/client"""

    next: int
    secret: UUID
    """What servers prove client ids with. Where no certificates are asked for, whoever can read it can be any client."""


@dataclass(frozen=True, kw_only=True)
class Preferences:
    """<root>/preferred: which server an operator wants to own a partition, as far as an even distribution permits. It goes
    before what servers prefer by themselves."""

    partitions: Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class Moves:
    """<root>/moves: where the replicas of a partition shall be in the end, while they are on their way. Whoever moves them
    writes this first, so that anybody can go on from it."""

    partitions: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class CopyRate:
    """<root>/copy-rate: the bound that an operator's command sets. For moves it lasts until they have ended; otherwise it
    is ephemeral, and goes away with the command."""

    bytes_per_second: int
    """Of each replica that copies."""
    who: str


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """<root>/history/<number>: who changed what, and why. For people: nothing is decided by it."""

    began: str
    ended: str | None
    """None while it goes on, and for good when whoever did it was killed."""
    who: str
    verb: str
    subject: str
    reason: str | None
    steps: tuple[str, ...]
    """What was planned."""
    outcome: str
    """"begun", "done", or what went wrong."""


class Role(enum.StrEnum):
    MEMBER = "member"
    LEARNER = "learner"
    """Copies first; becomes a member when a session starts and it is level."""


@dataclass(frozen=True)
class ReplicaSet:
    """<root>/replicas/<number>: which storages hold the partition. A document for each, so that nobody waits for another
    partition's owner."""

    roles: Mapping[str, Role]


@dataclass(frozen=True, kw_only=True)
class ReplicaSets:
    """All of them."""

    partitions: Mapping[int, Mapping[str, Role]]


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """What is recorded of one replica. It took part in `session` until `closing`; without a closing mark it still may, and
    votes when that session is closed. One that has only copied so far may have begun none: -1."""

    session: int
    closing: int | None
    incarnation: UUID
    acknowledged: int = -1
    """How far it was known to have everything on its disk when this was written. Who holds less has forgotten it."""
    is_lost: bool = False
    """It was seen to have forgotten what it had acknowledged in this session; `acknowledged` says exactly how much that is.
    It does not count before it holds all of it again."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The closing mark of the session `PartitionMeta.opened`: saved before anybody acts on it, and never undone."""

    mark: int
    session: int
    """The session that decided."""


@dataclass(frozen=True, kw_only=True)
class PartitionMeta:
    """<root>/partitions/<number>"""

    generation: int
    session: int
    """The newest session id that was given out, opened or not."""
    opened: int = 0
    """The newest session that was admitted: it may have written. 0: none ever was."""
    low_mark: int = -1
    """The mark at which it began."""
    members: tuple[str, ...] = ()
    """Its members: a majority of them made its transactions committed."""
    replicas: Mapping[str, ReplicaState] = field(default_factory=dict)
    decision: Decision | None = None
    given_up: Mapping[int, int] = field(default_factory=dict)
    """What operators gave up (`waltzctl partition rescue`): session → mark. A replica that has begun no session above that
    one may know of committed transactions above the mark that this log does not have."""

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
