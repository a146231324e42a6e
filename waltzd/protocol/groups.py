"""What members of a consumer group and the owner of a partition say to each other. Pure.

A delivery is known by the epoch and the tag of the frame that brought it, so what a member says of it later is told from
what it would say of the same transaction in other hands. Frames hold columns: nothing is made for each transaction.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from waltzd.disk.seam import Buffer
from waltzd.errors import WaltzError
from waltzd.format.checksum import I64
from waltzd.protocol.timelines import Timeline

I32: TypeAlias = NDArray[np.int32]
U32: TypeAlias = NDArray[np.uint32]


class Mode(enum.StrEnum):
    ORDERED = "ordered"
    """One member has the partition, and everything is done in the order of the log."""
    QUEUE = "queue"
    """Members share the partition, and acknowledge one by one."""
    KEYED = "keyed"
    """As a queue, but the transactions of one key are done one after the other, in the order of the log."""


class KeyedBy(enum.StrEnum):
    """What the key of a transaction is, in a keyed group."""

    HEADER = "header"
    LOCK = "lock"
    """The first of its locks. What has none has no key, and waits for nothing."""


class Exhausted(enum.StrEnum):
    """What happens to a transaction whose tries are used up."""

    PARK = "park"
    """It is put aside, and the group goes on."""
    STOP = "stop"
    """The group gives nothing more out in this partition, until an operator says so."""


# -- a member to the owner ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JoinRequest:
    """The first frame of a stream: one member in one partition."""

    cluster_key: UUID
    partition: int
    generation: int
    group: str
    member: str
    """No two members of a group have the same name: a newer stream with it displaces the older."""
    room: int | None = None
    """How many deliveries it takes at a time; None: as many as the group permits."""
    tells_begun: bool = False
    """Whether the member reports what it hands to the application. Otherwise all that it was given counts as begun."""


class AckKind(enum.IntEnum):
    ACKNOWLEDGE = 1
    REFUSE = 2
    """It failed, and may be tried again."""
    REJECT = 3
    """It will never be done: it is put aside at once."""
    EXTEND = 4
    """It takes longer."""
    BEGIN = 5
    """It is handed to the application now. It is not answered. Only a begun delivery fails by a member that goes away, or
    by time; one that was only prefetched goes to another member, and no try is used up."""


@dataclass(frozen=True, eq=False)
class Ack:
    """What a member says of deliveries."""

    number: int
    """Rises with each on a stream, from 1 on; the answer names it."""
    verb: AckKind
    epoch: int
    tag: int
    """The highest of the deliveries that it speaks of."""
    firsts: I64
    lasts: I64
    """Ids, as stretches from first to last."""
    delay_ms: int | None = None
    """Before the next try; None: the pause of the group."""
    reason: str = ""


@dataclass(frozen=True)
class Leave:
    """It goes, and has failed in nothing: what it has is given to others."""


MemberFrame: TypeAlias = JoinRequest | Ack | Leave


# -- the owner to a member ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    made_at: int
    """Which group of this name."""
    epoch: int
    mode: Mode
    ack_wait_ms: int
    room: int
    """So many deliveries it has at a time."""
    hears_begun: bool = False
    """Whether the owner knows `AckKind.BEGIN`."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of the log behind the first one."""


@dataclass(frozen=True, eq=False)
class Deliveries:
    epoch: int
    tag: int
    ids: I64
    attempts: I32
    """From 1 on."""
    headers: I32
    times: I64
    """Microseconds since 1970; -1: none."""
    lengths: U32
    data_crcs: U32
    """CRC-32 of each payload."""
    payloads: Buffer
    """Back to back."""


class AckResult(NamedTuple):
    """How many of the ids that a member spoke of were what."""

    number: int = 0
    taken: int = 0
    done: int = 0
    """They were settled before: to say it twice is no mistake."""
    late: int = 0
    """They are not in these hands any more, or never were."""
    unknown: int = 0
    """The group has never known them."""
    is_old: bool = False
    """All of it was said of another epoch, and so nothing of it counts."""


@dataclass(frozen=True)
class AcksDurable:
    """What was said up to this number is on the disks of a majority."""

    number: int


@dataclass(frozen=True)
class Paused:
    """Nothing is given out for a reason that is not the member's; empty: it goes on."""

    reason: str


@dataclass(frozen=True, eq=False)
class Dismissed:
    """The last frame of a stream that the owner ends."""

    error: WaltzError


DeliveryFrame: TypeAlias = Joined | Deliveries | AckResult | AcksDurable | Paused | Dismissed


# -- operators ---------------------------------------------------------------------------------------------------------


class Change(enum.IntEnum):
    """What an operator does to a group in one partition."""

    REPLAY = 1
    """Parked transactions are to be done again, once."""
    DISCARD = 2
    """Parked transactions are left for good."""
    SKIP = 3
    """Ids up to one are not to be done."""
    RESET = 4
    """The group begins behind another id."""
    GO_ON = 5
    """After it has stopped."""


@dataclass(frozen=True)
class Changed:
    """What came of it, on the disks of a majority."""

    count: int
    """Transactions that it was done to."""
    epoch: int
    floor: int


@dataclass(frozen=True)
class GroupMember:
    """One that is connected."""

    name: str
    who: str
    """In its certificate; without one, anonymous."""
    peer: str
    in_flight: int
    room: int
    delivered: int
    acknowledged: int
    failed: int
    age_ms: int


@dataclass(frozen=True)
class GroupPartitionStatus:
    """Where a group stands in one partition: as the group log says, or as its owner has it at work."""

    partition: int
    epoch: int
    """0: it has not begun there."""
    reach: int
    """It knows nothing above."""
    floor: int
    """Everything up to it is acknowledged or parked."""
    open: int
    """Ids up to `reach` that are not done."""
    parked: int
    stopped: str
    """Why it gives nothing out until an operator says so; empty: it goes on."""
    is_at_work: bool = False
    """The owner of the partition says so; what follows is known only there."""
    paused: str = ""
    in_flight: int = 0
    unwritten: int = 0
    """Changes that are not on disks yet."""
    oldest_ms: int = 0
    """Of the delivery that is longest in somebody's hands."""
    delivered: int = 0
    acknowledged: int = 0
    failed: int = 0
    members: tuple[GroupMember, ...] = ()


@dataclass(frozen=True)
class ParkedTransaction:
    partition: int
    id: int
    failures: int
    member: str
    """Which had it last."""
    reason: str


@dataclass(frozen=True)
class ParkedList:
    parked: tuple[ParkedTransaction, ...]
    """By partition and id."""
    is_more: bool = False
    """There are more behind them."""


@dataclass(frozen=True)
class GroupTrouble:
    """A group that does not go on in a partition, or has put something aside there."""

    name: str
    partition: int
    stopped: str
    """Why it gives nothing out until an operator says so."""
    paused: str
    """Why it gives nothing out for a while."""
    members: int
    lag: int
    """Transactions that are committed and not done."""
    parked: int

    @property
    def is_unattended(self) -> bool:
        """There is something to do, and no member."""
        return self.lag > 0 and self.members == 0 and not self.stopped


@dataclass(frozen=True)
class GroupTotals:
    """All groups as one server sees them: where they have begun in the partitions that it owns."""

    groups: int
    """Of the whole cluster."""
    members: int = 0
    """One that works in many partitions counts in each."""
    in_flight: int = 0
    lag: int = 0
    parked: int = 0
    stopped: int = 0
    """Groups and partitions; so are those that follow."""
    paused: int = 0
    unattended: int = 0
    troubles: tuple[GroupTrouble, ...] = ()
    """The worst of them."""
    trouble: str = ""
    """Why this server knows nothing newer of groups; empty: it knows all."""
    foreign: int = 0
    """Entries of the group log that no server wrote: they are passed over."""
