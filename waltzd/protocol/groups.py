"""The frames between members of a consumer group and the owner of a partition, and the status of groups. Pure.

A delivery is identified by the epoch and the tag of the frame that brought it, so a late acknowledgement is not confused
with one of another delivery of the same transaction. Frames hold columns: no object is made for each transaction.
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
    """One member has the partition and processes it in the order of the log."""
    QUEUE = "queue"
    """Members share the partition and acknowledge transactions individually."""
    KEYED = "keyed"
    """Members share the partition, but transactions with the same key are processed in the order of the log."""


class KeyedBy(enum.StrEnum):
    """The source of a transaction's key in a keyed group."""

    KIND = "header"
    """The kind of the transaction. It is stored and sent under the name that version 0.0 had for it."""
    LOCK = "lock"
    """The first of its locks; a transaction without locks has no key and is not ordered."""

    @classmethod
    def _missing_(cls, value: object) -> KeyedBy | None:
        return cls.KIND if value == "kind" else None

    @property
    def word(self) -> str:
        """Return the name for people."""
        return self.name.lower()


class Exhausted(enum.StrEnum):
    """The action for a transaction after its last try has failed."""

    PARK = "park"
    """Park the transaction and continue."""
    STOP = "stop"
    """Stop all deliveries in this partition until an operator resumes the group."""


# -- from a member to the owner ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JoinRequest:
    """The first frame of the stream of one member in one partition."""

    cluster_key: UUID
    partition: int
    generation: int
    group: str
    member: str
    """Name of the member, unique in the group: a newer stream with the same name displaces the older."""
    room: int | None = None
    """Limit of its deliveries in flight; None for the limit of the group."""
    tells_begun: bool = False
    """Whether the member reports deliveries that it passes to the application. Otherwise all count as begun."""


class AckKind(enum.IntEnum):
    ACKNOWLEDGE = 1
    REFUSE = 2
    """Processing failed and may be retried. A delivery that was not begun is handed back, and no try is counted."""
    REJECT = 3
    """Processing can never succeed: the transaction is parked at once."""
    EXTEND = 4
    """Processing takes longer: the deadline is extended."""
    BEGIN = 5
    """The delivery is passed to the application now. The owner sends no reply. Only a begun delivery counts as a failed
    try if the member disconnects or the deadline passes; a prefetched one is delivered to another member."""


@dataclass(frozen=True, eq=False)
class Ack:
    """An acknowledgement, positive or negative, of deliveries."""

    number: int
    """Number of the acknowledgement on its stream, from 1; the reply contains it."""
    verb: AckKind
    epoch: int
    tag: int
    """Highest tag of the acknowledged deliveries."""
    firsts: I64
    lasts: I64
    """Acknowledged ids, as ranges from `firsts` to `lasts`."""
    delay_ms: int | None = None
    """Milliseconds until the next try; None for the back-off of the group."""
    reason: str = ""


@dataclass(frozen=True)
class Leave:
    """The member leaves in order: its deliveries go to other members and do not count as failed."""


MemberFrame: TypeAlias = JoinRequest | Ack | Leave


# -- from the owner to a member ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    made_at: int
    """Id of the entry that created the group in the group log."""
    epoch: int
    mode: Mode
    ack_wait_ms: int
    room: int
    """Limit of its deliveries in flight."""
    hears_begun: bool = False
    """Whether the owner knows `AckKind.BEGIN`."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of the log after the first one."""


@dataclass(frozen=True, eq=False)
class Deliveries:
    epoch: int
    tag: int
    ids: I64
    attempts: I32
    """Number of the try of each delivery, from 1."""
    headers: I32
    times: I64
    """Time of each transaction, in microseconds since 1970; -1 for none."""
    lengths: U32
    data_crcs: U32
    """CRC-32 of each payload."""
    payloads: Buffer
    """Payloads, concatenated."""


class AckResult(NamedTuple):
    """The result of an acknowledgement: the number of its ids in each state."""

    number: int = 0
    taken: int = 0
    done: int = 0
    """Ids that were acknowledged before; a repeated acknowledgement is no error."""
    late: int = 0
    """Ids that are not in flight at this member."""
    unknown: int = 0
    """Ids that the group has never delivered."""
    is_old: bool = False
    """Whether the acknowledgement was of another epoch and was ignored as a whole."""


@dataclass(frozen=True)
class AcksDurable:
    """All acknowledgements up to this number are on the disks of a majority."""

    number: int


@dataclass(frozen=True)
class Paused:
    """Deliveries are paused for a reason outside of the member; an empty reason ends the pause."""

    reason: str


@dataclass(frozen=True, eq=False)
class Dismissed:
    """The last frame of a stream that the owner ends: the error."""

    error: WaltzError


DeliveryFrame: TypeAlias = Joined | Deliveries | AckResult | AcksDurable | Paused | Dismissed


# -- operators ---------------------------------------------------------------------------------------------------------


class Change(enum.IntEnum):
    """A change that an operator makes to a group in one partition."""

    REPLAY = 1
    """Deliver parked transactions once more."""
    DISCARD = 2
    """Drop parked transactions."""
    SKIP = 3
    """Skip all ids up to a given id."""
    RESET = 4
    """Move the position of the group."""
    GO_ON = 5
    """Resume a stopped group."""


EPOCHS_OF_A_RESET = 1 << 16
"""Number of epochs from that of a reset on that owners may begin until an answer is repeated."""
RESET_DRAWS = 1 << 20
"""Number of epochs of which a reset draws one. Two resets at the same time seldom draw the same one."""


def reset_epoch(seen: int, drawn: int) -> int:
    """Return the epoch that a reset begins. `seen` is the epoch of the state that the reset was decided upon; `drawn` is a
    random number below `RESET_DRAWS`. Epochs only rise, so a reset that names its epoch is done at most once."""
    assert 0 <= drawn < RESET_DRAWS
    return (seen // EPOCHS_OF_A_RESET + 2 + drawn) * EPOCHS_OF_A_RESET


@dataclass(frozen=True)
class Changed:
    """The result of a change, which is on the disks of a majority."""

    count: int
    """Number of transactions that were changed; 0 if the change was found done."""
    epoch: int
    floor: int


@dataclass(frozen=True)
class GroupMember:
    """A member that is connected."""

    name: str
    who: str
    """Name in its certificate; `anonymous` without one."""
    peer: str
    in_flight: int
    room: int
    delivered: int
    acknowledged: int
    failed: int
    age_ms: int


@dataclass(frozen=True)
class GroupPartitionStatus:
    """The state of a group in one partition, from the group log, or from the owner if the group is active there."""

    partition: int
    epoch: int
    """Epoch of the state; 0 if the group has not begun there."""
    reach: int
    """Highest id that the group has seen."""
    floor: int
    """Id up to which every transaction is acknowledged or parked."""
    open: int
    """Number of ids up to `reach` that are neither acknowledged nor parked."""
    parked: int
    stopped: str
    """Reason why the group has stopped until an operator resumes it; empty if it has not."""
    is_at_work: bool = False
    """Whether the group is active on the partition's owner; only then the following fields are set."""
    paused: str = ""
    in_flight: int = 0
    unwritten: int = 0
    """Number of changes that are not yet durable."""
    oldest_ms: int = 0
    """Age of the oldest delivery in flight, in milliseconds."""
    delivered: int = 0
    acknowledged: int = 0
    failed: int = 0
    members: tuple[GroupMember, ...] = ()


@dataclass(frozen=True)
class GroupStatus:
    """State of a consumer group in one partition: the result of `Client.group_status`."""

    partition: int
    """Number of the partition."""
    position: int
    """Id up to which every transaction is acknowledged or parked; -1 for none."""
    lag: int
    """Committed transactions that are neither acknowledged nor parked. Those that the group's filter skips count until the
    group has read them."""
    parked: int
    """Number of parked transactions."""
    in_flight: int
    """Number of deliveries that members have not settled."""
    members: int
    """Number of members in the partition."""
    stopped: str
    """Reason why the group has stopped until an operator resumes it; empty if it has not."""
    paused: str
    """Reason why nothing is delivered at the moment; empty if there is none."""


@dataclass(frozen=True)
class ParkedTransaction:
    """Transaction that a consumer group has set aside: one of the results of `Client.parked`."""

    partition: int
    """Number of its partition."""
    id: int
    """Id in its partition."""
    failures: int
    """Number of tries that failed."""
    member: str
    """Member of the last try."""
    reason: str
    """Reason of the last failure."""


@dataclass(frozen=True)
class ParkedList:
    parked: tuple[ParkedTransaction, ...]
    """Parked transactions, ordered by partition and id."""
    is_more: bool = False
    """Whether there are more parked transactions after the last one."""


@dataclass(frozen=True)
class GroupTrouble:
    """A group that makes no progress in a partition, or has parked transactions there."""

    name: str
    partition: int
    stopped: str
    """Reason why the group has stopped until an operator resumes it."""
    paused: str
    """Reason why deliveries are paused."""
    members: int
    lag: int
    """Committed transactions that are neither acknowledged nor parked."""
    parked: int

    @property
    def is_unattended(self) -> bool:
        """True if the group has a lag and no member."""
        return self.lag > 0 and self.members == 0 and not self.stopped


@dataclass(frozen=True)
class GroupTotals:
    """The totals of all groups in the partitions that a server owns."""

    groups: int
    """Number of groups of the whole cluster."""
    members: int = 0
    """Number of members; a member counts once for each of its partitions."""
    in_flight: int = 0
    lag: int = 0
    parked: int = 0
    stopped: int = 0
    """Number of stopped groups, counted for each partition. `paused` and `unattended` are counted alike."""
    paused: int = 0
    unattended: int = 0
    troubles: tuple[GroupTrouble, ...] = ()
    """Most severe of the troubles."""
    trouble: str = ""
    """Reason why this server is missing newer entries of the group log; empty if it is not."""
    foreign: int = 0
    """Entries of the group log that no server wrote; they are ignored."""
