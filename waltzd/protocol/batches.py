"""The frames between a client and the owner of a partition, as columns: no object is made for each transaction. Pure.

There is one two-way stream per client and partition, which begins with a `MountRequest`. `docs/protocol.md` has the order
of the frames.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from waltzd.disk.seam import Buffer
from waltzd.errors import TooLarge, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.checksum import I64, U32
from waltzd.format.record import OVERHEAD_BYTES, HeadArray, Run
from waltzd.protocol.channels import Channel
from waltzd.protocol.locks import Mode
from waltzd.protocol.timelines import Timeline

U8: TypeAlias = NDArray[np.uint8]
U64: TypeAlias = NDArray[np.uint64]
I32: TypeAlias = NDArray[np.int32]
PROBE_KIND = 0x57414C5A
"""Kind of a probe, with which an operator's tool checks that a log accepts transactions. Probes are not fed to
applications, and applications cannot write them."""
SEQUENCE_MAX = 0x7FFFFFFF
LOCK_BYTES = 9
"""Size of one lock in a batch: its id and its mode."""
FEW_ROWS = 32
"""Rows below which Python's functions over a list are faster than a call of numpy (1.5 µs)."""


class FeedMode(enum.IntEnum):
    """The part of each committed transaction that a client is fed: the argument `feed` of a client."""

    RECORDS = 1
    """Whole records."""
    HEADS = 2
    """Heads only; the payload of a transaction can be read by its id."""
    NONE = 3
    """Feed turned off, for writers without a view."""


@dataclass(frozen=True)
class Registration:
    """A client id, and the token that proves its ownership: servers refuse the id without it."""

    client: int
    token: bytes
    epoch: int = 0
    """Epoch of an exclusive instance, which rises with each; 0 if several instances of the name may run."""


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """The description of a process that asks for a client id."""

    instance: str = ""
    """Name of the process, which tells it from others of the same application."""
    version: str = ""
    """Version of the client library."""
    is_exclusive: bool = False
    """Whether this is to be the only instance of its name; older ones are ended."""
    before: Registration | None = None
    """Earlier registration of the instance, whose epoch it keeps under the new client id."""


INTRODUCTION = Introduction()
"""Introduction of a tool without a name."""


# -- from the client ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MountRequest:
    """The first frame of a stream."""

    cluster_key: UUID
    partition: int
    generation: int
    client: int
    token: bytes
    """Token of the registration."""
    number: int
    """Number of the mount; it rises with each mount of this client on this partition, and the highest one wins."""
    mark: int
    """Highest id that the client has applied; the feed starts after it."""
    feed: FeedMode
    credit: int
    """Bytes of feed that the server may send before it gets more credit."""
    epoch: int = 0
    """Epoch of the registration; the mount ends when a newer instance mounts the partition."""
    instance: str = ""
    version: str = ""
    asks: bool = False
    """Whether the client only looks up the outcomes of its earlier transactions: it is fed heads up to the barrier, and of
    other clients' transactions only the ids."""
    timeline: UUID | None = None
    """Identity of the timeline that `mark` belongs to; None for the first timeline."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AppendBatch:
    """Transactions with the sequence numbers `first_sequence`, `first_sequence + 1`, ….

    A column has one row for each transaction; a lock column has one row for each lock."""

    first_sequence: int
    marks: I64
    """Highest id that the client had applied when it built the transaction."""
    headers: I32
    lengths: I64
    data_crcs: U32
    lock_counts: I64
    lock_ids: U64
    lock_modes: U8
    payloads: Buffer
    follows: NDArray[np.bool_] | None = None
    """Whether a transaction continues the group of the one before; None if there are no groups. A group is appended as a
    whole or not at all."""
    seen_time: int = 0
    """Highest time of a transaction that the client has seen in any partition."""

    def __len__(self) -> int:
        return len(self.marks)

    @property
    def bytes(self) -> int:
        return len(self.payloads) + OVERHEAD_BYTES * len(self) + LOCK_BYTES * len(self.lock_ids)

    @property
    def highest_mark(self) -> int:
        return int(self.marks.max())

    @property
    def lowest_mark(self) -> int:
        return int(self.marks.min())

    @property
    def lock_lists(self) -> tuple[Sequence[int], Sequence[int]]:
        """The ids and the modes of all locks, as plain numbers."""
        return self.lock_ids.tolist(), self.lock_modes.tolist()

    def check(self, limits: Limits) -> None:
        """Raise `BadFrame` or `TooLarge` if the columns do not fit each other or exceed the limits."""
        count = len(self)
        columns = (self.headers, self.lengths, self.data_crcs, self.lock_counts)
        if count == 0 or any(len(column) != count for column in columns):
            raise BadFrame(
                f"the columns of a batch have {', '.join(str(len(column)) for column in columns)} rows, not {count}"
            )
        if self.follows is not None and (len(self.follows) != count or self.follows[0]):
            raise BadFrame(
                f"a batch has {len(self.follows)} group flags for {count} transactions, or the first one continues a group"
            )
        lock_counts, locks = _extent(self.lock_counts), len(self.lock_ids)
        if locks != lock_counts[2] or len(self.lock_modes) != locks:
            raise BadFrame(f"a batch has {locks} lock ids and {len(self.lock_modes)} modes for {lock_counts[2]} locks")
        modes = _extent(self.lock_modes) if locks else None
        self._check(limits, _extent(self.marks), _extent(self.lengths), lock_counts, modes)

    def _check(
        self, limits: Limits, marks: Extent, lengths: Extent, lock_counts: Extent, lock_modes: Extent | None
    ) -> None:
        """Do the checks of `check` that need only the extents of columns. `lock_modes`: None if there are no locks."""
        count = len(self)
        if not 0 <= self.first_sequence <= SEQUENCE_MAX - count:
            raise BadFrame(f"a batch of {count} cannot start at sequence {self.first_sequence}")
        least_length, most_length, length = lengths
        least_locks, most_locks, _ = lock_counts
        if marks[0] < -1 or least_length < 0 or least_locks < 0:
            raise BadFrame("a batch has a mark below -1, or a negative length or number of locks")
        if length != len(self.payloads):
            raise BadFrame(f"a batch has {len(self.payloads)} bytes of payload; its lengths add up to {length}")
        if lock_modes is not None and (lock_modes[0] < _MODES[0] or lock_modes[1] > _MODES[1]):
            raise BadFrame("a lock mode is none of READ, WRITE, APPEND")
        if most_locks > limits.locks_max:
            raise TooLarge(f"a transaction has {most_locks} locks; {limits.locks_max} are allowed (`locks_max`)")
        if most_length > limits.payload_bytes_max:
            raise TooLarge(
                f"a transaction has {most_length} bytes; {limits.payload_bytes_max} are allowed (`payload_bytes_max`)",
                payload_bytes_max=limits.payload_bytes_max,
            )
        if count > 1 and self.bytes > limits.frame_bytes_max:
            raise TooLarge(f"a batch has {self.bytes} bytes; {limits.frame_bytes_max} are allowed (`frame_bytes_max`)")


_MODES = int(min(Mode)), int(max(Mode))
Extent: TypeAlias = tuple[int, int, int]
"""The minimum, the maximum and the sum of a column that has rows."""


def _extent(column: NDArray[np.integer[Any]]) -> Extent:
    if len(column) < FEW_ROWS:
        few: list[int] = column.tolist()
        return min(few), max(few), sum(few)
    return int(column.min()), int(column.max()), int(column.sum())


class SingleAppend(AppendBatch):
    """A batch of one transaction, as plain numbers. Columns are made on first use: on the usual way to the log and back no
    function needs one, and each would cost as much as the decision about the transaction."""

    mark: int
    header: int
    data_crc: int
    locks: Sequence[int]
    modes: Sequence[int]

    def __init__(
        self,
        sequence: int,
        mark: int,
        header: int,
        data_crc: int,
        locks: Sequence[int],
        modes: Sequence[int],
        payload: Buffer,
        seen_time: int,
    ) -> None:
        vars(self).update(
            first_sequence=sequence, mark=mark, header=header, data_crc=data_crc, locks=locks, modes=modes,
            payloads=payload, follows=None, seen_time=seen_time,
        )  # fmt: skip

    marks = cached_property(lambda self: np.array((self.mark,), np.int64))
    headers = cached_property(lambda self: np.array((self.header,), np.int32))
    lengths = cached_property(lambda self: np.array((len(self.payloads),), np.int64))
    data_crcs = cached_property(lambda self: np.array((self.data_crc,), np.uint32))
    lock_counts = cached_property(lambda self: np.array((len(self.locks),), np.int64))
    lock_ids = cached_property(lambda self: np.array(self.locks, np.uint64))
    lock_modes = cached_property(lambda self: np.array(list(self.modes), np.uint8))

    def __len__(self) -> int:
        return 1

    @property
    def bytes(self) -> int:
        return len(self.payloads) + OVERHEAD_BYTES + LOCK_BYTES * len(self.locks)

    @property
    def highest_mark(self) -> int:
        return self.mark

    @property
    def lowest_mark(self) -> int:
        return self.mark

    @property
    def lock_lists(self) -> tuple[Sequence[int], Sequence[int]]:
        return self.locks, self.modes

    def check(self, limits: Limits) -> None:
        size, locks = len(self.payloads), len(self.locks)
        if len(self.modes) != locks:
            raise BadFrame(f"a transaction has {locks} lock ids and {len(self.modes)} modes")
        modes = (min(self.modes), max(self.modes), 0) if locks else None
        self._check(limits, (self.mark,) * 3, (size,) * 3, (locks,) * 3, modes)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server, which each client gets when it mounts."""

    payload_bytes_max: int
    locks_max: int
    frame_bytes_max: int


@dataclass(frozen=True)
class Credit:
    """The client has consumed this many bytes of feed; the server may send as many more."""

    bytes: int


ClientFrame: TypeAlias = MountRequest | AppendBatch | Credit

# -- from the server ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mounted:
    """The first frame from the server.

    When the feed has reached `barrier`, each transaction of an earlier mount of this client was in the feed, or will never
    be in the log."""

    session: int
    barrier: int
    limits: Limits
    format: int = 0
    """Format that the session writes; groups need format 1."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of the log after the first one."""
    takes_singles: bool = False
    """Whether the server takes frames of the kind SINGLE on this connection."""


@dataclass(frozen=True, eq=False)
class Committals:
    """Sequence numbers of this mount that are committed, with their ids."""

    sequences: I64
    ids: I64
    time: int = 0
    """Highest time of the transactions, which the client sends with later batches; 0 if they have no times."""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def highest_id(self) -> int:
        return int(self.ids.max())

    @property
    def lists(self) -> tuple[Sequence[int], Sequence[int]]:
        """The sequence numbers and the ids, as plain numbers."""
        return self.sequences.tolist(), self.ids.tolist()

    def check(self) -> None:
        """Raise `BadFrame` if the columns are empty or do not fit each other."""
        if len(self.sequences) == 0 or len(self.ids) != len(self.sequences):
            raise BadFrame("the columns of the committed transactions have different lengths")


class SingleCommittal(Committals):
    """One committed sequence number with its id, as plain numbers. Columns are made on first use."""

    sequence: int
    id: int

    def __init__(self, sequence: int, id: int, time: int) -> None:
        vars(self).update(sequence=sequence, id=id, time=time)

    sequences = cached_property(lambda self: np.array((self.sequence,), np.int64))
    ids = cached_property(lambda self: np.array((self.id,), np.int64))

    def __len__(self) -> int:
        return 1

    @property
    def highest_id(self) -> int:
        return self.id

    @property
    def lists(self) -> tuple[Sequence[int], Sequence[int]]:
        return (self.sequence,), (self.id,)

    def check(self) -> None:
        """One row always fits."""


@dataclass(frozen=True, eq=False)
class Refusals:
    """Sequence numbers of this mount that are rejected: the `Reason`, the id to apply before a retry, the lock."""

    sequences: I64
    reasons: U8
    conflict_ids: I64
    locks: U64


@dataclass(frozen=True)
class Feed:
    """Committed records, in order and without a gap."""

    run: Run


@dataclass(frozen=True, eq=False)
class HeadFeed:
    """The heads of committed records as rows of `record.HEAD`, with times and groups as in `Run`."""

    heads: HeadArray
    times: I64 | None = None
    follows: NDArray[np.bool_] | None = None
    goes_on: bool = False


@dataclass(frozen=True)
class Refused:
    """The last frame of a stream: the error that ends it."""

    error: WaltzError
    untaken: int | None = None
    """First sequence number of this mount that was not accepted and never gets an id; None if unknown."""


ServerFrame: TypeAlias = Mounted | Committals | Refusals | Feed | HeadFeed | Refused


# -- topology -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PartitionLocation:
    """The owner of a partition, as known by the server that was asked."""

    generation: int
    server: str | None
    address: str | None
    is_hidden: bool = False
    """Whether the address is withheld because the policy grants the caller nothing there."""


class ServerAddress(NamedTuple):
    name: str
    address: str
    streams: str = ""
    """Address for mounts over plain frames in place of gRPC; empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    cluster: str
    cluster_key: UUID
    places: tuple[PartitionLocation, ...]
    """Owner of each partition, without the group log."""
    servers: tuple[ServerAddress, ...]
    """Servers that are up."""
    channels: tuple[Channel, ...] = ()
    groups: PartitionLocation | None = None
    """Owner of the group log; None if the cluster has none, or the server does not report it."""

    @property
    def group_log(self) -> int:
        """Number of the group log: the one after those of the partitions."""
        return len(self.places)

    def place(self, number: int) -> PartitionLocation:
        """Return the owner of a partition, or of the group log, which must exist."""
        if number != self.group_log:
            return self.places[number]
        assert self.groups is not None
        return self.groups
