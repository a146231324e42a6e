"""What a client and the owner of a partition say to each other, as columns: never one object per transaction. Pure.

One two-way stream per client and partition, begun by a `MountRequest`. `docs/protocol.md` has the order of things.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from waltzd.disk.seam import Buffer
from waltzd.errors import BadFrame, TooLarge, WaltzError
from waltzd.format.checksum import I64, U32
from waltzd.format.record import OVERHEAD_BYTES, HeadArray, Run
from waltzd.protocol.channels import Channel
from waltzd.protocol.locks import Mode
from waltzd.protocol.timelines import Timeline

U8: TypeAlias = NDArray[np.uint8]
U64: TypeAlias = NDArray[np.uint64]
I32: TypeAlias = NDArray[np.int32]
PROBE_HEADER = 0x57414C5A
"""Of a transaction that an operator's tool writes to see whether the log takes one. No application writes it, and no
application is fed what carries it."""
SEQUENCE_MAX = 0x7FFFFFFF
LOCK_BYTES = 9
"""Of one lock in a batch: its id and its mode."""
FEW_ROWS = 32
"""Below this, Python's own functions over a list are cheaper than a call of numpy (1.5 µs)."""


class FeedMode(enum.IntEnum):
    """What a client is fed of each committed transaction: the argument `feed` of a client."""

    RECORDS = 1
    """Whole records."""
    HEADS = 2
    """Heads only: the payload of a transaction is read by its id when it is wanted."""
    NONE = 3
    """No feed: for writers that keep no view."""


@dataclass(frozen=True)
class Registration:
    """A client id, and the token that proves that it was given to this client: a server refuses the id without it."""

    client: int
    token: bytes
    epoch: int = 0
    """Of an instance that is to be the only one of its name that lives: it rises with each. 0: any number may live."""


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """Who asks for a client id."""

    instance: str = ""
    """The process of the application, as people tell it from others of the same name."""
    version: str = ""
    """Of the library."""
    is_exclusive: bool = False
    """It shall be the only instance of its name that lives: older ones end."""
    before: Registration | None = None
    """What it has already: it goes on with that epoch, under another client id."""


INTRODUCTION = Introduction()
"""Of a tool that says nothing of itself."""


# -- from the client ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MountRequest:
    """The first frame of a stream."""

    cluster_key: UUID
    partition: int
    generation: int
    client: int
    token: bytes
    """Of the registration."""
    number: int
    """Rises with every mount of this client on this partition: the higher one displaces the lower."""
    mark: int
    """The highest id that the client has applied; the feed starts behind it."""
    feed: FeedMode
    credit: int
    """How many bytes of feed the server may send before it is given more credit."""
    epoch: int = 0
    """Of the registration: what this mount sends is taken while no newer instance has mounted the partition."""
    instance: str = ""
    version: str = ""
    asks: bool = False
    """What became of its transactions: with HEADS, up to the barrier, and of those of other clients only their ids."""
    timeline: UUID | None = None
    """Identity of the timeline in which the client saw `mark`; None for the first one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AppendBatch:
    """Transactions with the sequence numbers `first_sequence`, `first_sequence + 1`, …; all columns have one row for
    each, except the lock columns, which have one for each lock."""

    first_sequence: int
    marks: I64
    """What the client had seen when it built the transaction."""
    headers: I32
    lengths: I64
    data_crcs: U32
    lock_counts: I64
    lock_ids: U64
    lock_modes: U8
    payloads: Buffer
    follows: NDArray[np.bool_] | None = None
    """Whether each goes on with the group of the one before; None: each stands by itself. A group is in the log as a whole
    or not at all."""
    seen_time: int = 0
    """The highest time of a transaction that the client has seen, in any partition."""

    def __len__(self) -> int:
        return len(self.marks)

    @property
    def bytes(self) -> int:
        return len(self.payloads) + OVERHEAD_BYTES * len(self) + LOCK_BYTES * len(self.lock_ids)

    def check(self, limits: Limits) -> None:
        """The columns fit each other and the limits; a frame that does not is refused whole."""
        count = len(self)
        columns = (self.headers, self.lengths, self.data_crcs, self.lock_counts)
        if count == 0 or any(len(column) != count for column in columns):
            raise BadFrame(
                f"the columns of a batch have {', '.join(str(len(column)) for column in columns)} rows, not {count}"
            )
        if not 0 <= self.first_sequence <= SEQUENCE_MAX - count:
            raise BadFrame(f"a batch of {count} cannot start at sequence {self.first_sequence}")
        least_length, most_length, length = _extent(self.lengths)
        least_locks, most_locks, locks = _extent(self.lock_counts)
        if _extent(self.marks)[0] < -1 or least_length < 0 or least_locks < 0:
            raise BadFrame("a batch has a mark below -1, or a negative length or number of locks")
        if length != len(self.payloads):
            raise BadFrame(f"a batch has {len(self.payloads)} bytes of payload; its lengths add up to {length}")
        if self.follows is not None and (len(self.follows) != count or self.follows[0]):
            raise BadFrame(f"a batch says of {len(self.follows)} transactions, of {count}, which group they go on with")
        if len(self.lock_ids) != locks or len(self.lock_modes) != locks:
            raise BadFrame(f"a batch has {len(self.lock_ids)} lock ids and {len(self.lock_modes)} modes for {locks} locks")
        if locks:
            least_mode, most_mode, _ = _extent(self.lock_modes)
            if least_mode < _MODES[0] or most_mode > _MODES[1]:
                raise BadFrame("a lock mode is none of READ, WRITE, APPEND")
        if most_locks > limits.locks_max:
            raise TooLarge(f"a transaction has {most_locks} locks; {limits.locks_max} are allowed")
        if most_length > limits.payload_bytes_max:
            raise TooLarge(
                f"a transaction has {most_length} bytes; {limits.payload_bytes_max} are allowed",
                payload_bytes_max=limits.payload_bytes_max,
            )
        if count > 1 and self.bytes > limits.frame_bytes_max:
            raise TooLarge(f"a batch has {self.bytes} bytes; {limits.frame_bytes_max} are allowed")


_MODES = int(min(Mode)), int(max(Mode))


def _extent(column: NDArray[np.integer[Any]]) -> tuple[int, int, int]:
    """The least and the most of a column that has rows, and their sum."""
    if len(column) < FEW_ROWS:
        few: list[int] = column.tolist()
        return min(few), max(few), sum(few)
    return int(column.min()), int(column.max()), int(column.sum())


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server takes; it tells each client at its mount."""

    payload_bytes_max: int
    locks_max: int
    frame_bytes_max: int


@dataclass(frozen=True)
class Credit:
    """The client has taken this many bytes of feed; the server may send as many more."""

    bytes: int


ClientFrame: TypeAlias = MountRequest | AppendBatch | Credit

# -- from the server ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mounted:
    """The first frame back. When the feed has reached `barrier`, each transaction that an earlier mount of this client sent
    has been in the feed, or will never be in the log."""

    session: int
    barrier: int
    limits: Limits
    format: int = 0
    """What the session writes; groups need format 1."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of the log behind the first one."""


@dataclass(frozen=True, eq=False)
class Committals:
    """These sequence numbers of this mount are committed under these ids."""

    sequences: I64
    ids: I64
    time: int = 0
    """The highest of their times, which the client passes on; 0 where they have none."""


@dataclass(frozen=True, eq=False)
class Refusals:
    """These sequence numbers are not in the log: `outcome.Reason`, the id to have seen before trying again, the lock."""

    sequences: I64
    reasons: U8
    conflict_ids: I64
    locks: U64


@dataclass(frozen=True)
class Feed:
    """Committed records, in order, without a gap."""

    run: Run


@dataclass(frozen=True, eq=False)
class HeadFeed:
    """The heads of committed records: `record.HEAD` rows; times and groups as in `Run`."""

    heads: HeadArray
    times: I64 | None = None
    follows: NDArray[np.bool_] | None = None
    goes_on: bool = False


@dataclass(frozen=True)
class Refused:
    """The last frame: why the stream ends."""

    error: WaltzError
    untaken: int | None = None
    """What this mount sent from this sequence number on was not taken, and never gets an id; None: that is not known."""


ServerFrame: TypeAlias = Mounted | Committals | Refusals | Feed | HeadFeed | Refused


# -- where things are --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who owns a partition, as far as the server that was asked knows."""

    generation: int
    server: str | None
    address: str | None
    is_hidden: bool = False
    """The policy grants the caller nothing there, and it is not told where that is."""


class ServerAddress(NamedTuple):
    name: str
    address: str
    streams: str = ""
    """Where it takes mounts without gRPC; empty: nowhere."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    cluster: str
    cluster_key: UUID
    places: tuple[Place, ...]
    """One for each partition. The group log is not among them."""
    servers: tuple[ServerAddress, ...]
    """All servers that are up."""
    channels: tuple[Channel, ...] = ()
    groups: Place | None = None
    """Of the group log, which holds the state of all groups. None: the cluster has none yet, or it is not told."""

    @property
    def group_log(self) -> int:
        """The number that the group log has, where there is one: the one behind those of the partitions."""
        return len(self.places)

    def place(self, number: int) -> Place:
        """Of a partition, or of the group log where there is one."""
        if number != self.group_log:
            return self.places[number]
        assert self.groups is not None
        return self.groups
