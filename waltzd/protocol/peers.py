"""The calls between processes as asynchronous interfaces that do not depend on the transport.

Daemons and clients are written against these protocols. They are implemented over gRPC and plain frames
(`waltzd.wire.storages`, `waltzd.wire.servers`, the services of the daemons), and by direct calls within one process in
tests and in the simulator. A call that fails raises an error of `waltzd.errors`; `CannotConnect` means that its outcome is
unknown.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias
from uuid import UUID

import numpy as np

from waltzd.disk.seam import Buffer
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.batch import Batch, Piece
from waltzd.format.layout import ID_MAX
from waltzd.format.record import LockColumns, Run, bounds_of
from waltzd.protocol.batches import (
    INTRODUCTION,
    ClientFrame,
    Introduction,
    Registration,
    ServerFrame,
    SingleAppend,
    Topology,
)
from waltzd.protocol.locks import HistoryPart, MarkedPage, MarkedQuery
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import NEVER_FORKED, Lineage

if TYPE_CHECKING:  # nothing of this is loaded with a client
    from waltzd.format.key_index import LockMarks, LockQuery
    from waltzd.protocol.descriptions import ArchiveCheck, Archived, BackedUp, ReplicaStatus
    from waltzd.protocol.groups import DeliveryFrame, MemberFrame

Content: TypeAlias = Run | tuple[Batch, ...]
"""Records to append: one run of format 0, or whole batches of format 1."""


def runs_of(content: Content) -> list[Run]:
    return [content] if isinstance(content, Run) else [batch.run for batch in content]


def last_id_of(content: Content) -> int:
    """Return the last id of `content`, which is not empty."""
    return content.last_id if isinstance(content, Run) else content[-1].last_id


@dataclass(frozen=True)
class RecordsFrame:
    """Records for a replica, with the committed mark. A frame without records only carries the mark, and is not
    acknowledged."""

    content: Content
    committed: int
    """Highest id that is known to be committed."""

    @property
    def pieces(self) -> Sequence[Piece]:
        return (self.content,) if isinstance(self.content, Run) else self.content

    @property
    def runs(self) -> list[Run]:
        return runs_of(self.content)

    @property
    def bytes(self) -> int:
        return len(self.content.data) if isinstance(self.content, Run) else sum(batch.size for batch in self.content)

    @property
    def records(self) -> int:
        return sum(map(len, self.pieces))


@dataclass(frozen=True, eq=False)
class LockHistory:
    """The locks of consecutive transactions, starting with `first_id`."""

    first_id: int
    locks: LockColumns


class PostPort(Protocol):
    """An end of a stream that can send without waiting."""

    @property
    def may_post(self) -> bool:
        """True if `send` would not wait; `post` can then be called in its place."""
        ...


class CallerPort(Protocol):
    """The server's end of a stream, with the caller's address and identity."""

    @property
    def peer(self) -> str: ...
    @property
    def identity(self) -> str:
        """Identity in the caller's certificate; empty without one."""
        ...


class Link(PostPort, Protocol):
    """The storage's end of an append stream: it receives frames and sends marks."""

    async def receive(self) -> RecordsFrame | None:
        """Return the next frame; None at the end of the stream."""
        ...

    def hear(self, taker: Callable[[RecordsFrame], bool]) -> None:
        """Pass frames to `taker` as they arrive. A frame for which it returns False waits for `receive`."""
        ...

    async def send(self, durable_id: int) -> None:
        """Send a mark: all records of this stream up to this id are on disk."""
        ...

    def post(self, durable_id: int) -> None: ...
    async def refuse(self, error: WaltzError) -> None:
        """End the stream with an error, as its last message."""
        ...


def run_of(first_id: int, lengths: Buffer, records: Buffer) -> Run:
    """Return the run that a frame contains; raise `BadFrame` if its lengths are wrong. Checksums are not checked."""
    if len(lengths) % 4:
        raise BadFrame(f"the lengths of a frame have {len(lengths)} bytes, which is no multiple of 4")
    if first_id < 0:
        raise BadFrame(f"a frame starts at the id {first_id}; ids start at 0")
    bounds = bounds_of(np.frombuffer(lengths, ">u4").astype(np.int64))
    if bounds[-1] != len(records):
        raise BadFrame(
            f"a frame has {len(records)} bytes of records; {len(bounds) - 1} records of the lengths that it gives have "
            f"{bounds[-1]}"
        )
    if first_id + len(bounds) - 2 > ID_MAX:
        raise BadFrame(f"a frame of {len(bounds) - 1} records starts at the id {first_id}; {ID_MAX} is the highest id")
    return Run(first_id, memoryview(records), bounds)


# -- a storage, as the owner of a partition sees it --------------------------------------------------------------------

SECRET_BYTES = 32


def secret_of(key: bytes, partition: int, session: int) -> bytes:
    """Return the secret of a session, which only its owner has. `key` is a random value of the owner's process."""
    return hmac.digest(key, f"session {session} of partition {partition}".encode(), "sha256")


@dataclass(frozen=True)
class Contact:
    """The proof in a call with a session: the number of the opening of the replica, and the secret of the session."""

    number: int = 0
    """Number from the reply to `Open`; 0 for the current opening."""
    secret: bytes = field(default=b"", repr=False)


NOBODY = Contact()


class AppendPort(PostPort, Protocol):
    """The server's end of an append stream. A mark means that all records of the stream up to this id are on disk."""

    async def start(self) -> None: ...
    async def send(self, content: Content, committed: int) -> None: ...
    def post(self, content: Content, committed: int) -> None: ...
    async def receive(self) -> int | None:
        """Return the next mark; None at the end of the stream."""
        ...

    def hear(self, taker: Callable[[int], None]) -> None:
        """Pass marks to `taker` as they arrive, in place of `receive`, which then raises the errors of `taker`."""
        ...

    def cancel(self) -> None: ...


class ReplicaPort(Protocol):
    """The calls of a storage about its replicas."""

    async def status(self, partition: int) -> ReplicaStatus:
        """Return the state of a replica. The call binds the replica to no session and proves nothing."""
        ...

    async def quiet(self, partitions: Sequence[int]) -> Sequence[int]:
        """Return the given partitions that are on the storage and have no append stream now."""
        ...

    async def open(
        self, partition: int, session: int, *, partitions: int, create: bool = False, seconds: float | None = None
    ) -> ReplicaStatus:
        """Open a replica with a session; with `create`, make an empty one if the storage has none."""
        ...

    async def set_low_mark(self, partition: int, session: int, mark: int) -> ReplicaStatus: ...
    async def truncate(self, partition: int, session: int, mark: int) -> ReplicaStatus: ...
    async def fork(self, partition: int, session: int, lineage: Lineage) -> ReplicaStatus:
        """Move the replica to the newest timeline; its records above the fork are set aside."""
        ...

    def append(self, partition: int, session: int) -> AppendPort: ...
    def read(
        self,
        partition: int,
        first_id: int,
        last_id: int | None = None,
        *,
        session: int | None = None,
        frame_bytes: int = 0,
        with_locks: bool = False,
    ) -> AsyncIterator[Run]:
        """Yield records with their times and groups, and with their locks on request."""
        ...

    def read_whole(
        self, partition: int, first_id: int, last_id: int, *, session: int, frame_bytes: int = 0
    ) -> AsyncIterator[Piece]:
        """Yield the log for another replica: whole batches in format 1, the first of which begins at `first_id`."""
        ...

    async def read_locks(self, partition: int, last_id: int, *, session: int, bytes_max: int) -> LockHistory | None:
        """Return the locks of the last batches up to `last_id`, as many as fit into `bytes_max`, at least one batch.

        `last_id` is the end of a batch. Return None if the log has no batch there."""
        ...

    async def find_marks(self, partition: int, query: LockQuery, *, session: int) -> LockMarks:
        """Return transactions that marked a lock: an answer to the start of the query, for at least one id.

        The replica holds `query.last_id`. Raise `Trimmed` or `NeedsBatches` about the first id that has to be covered."""
        ...

    async def find_time(self, partition: int, time: int, *, session: int) -> int:
        """Return the highest id before the first transaction with this time or a later one."""
        ...

    async def segments(self, partition: int, *, session: int | None = None) -> list[tuple[int, int, int]]:
        """Return first id, last id and size of each sealed segment."""
        ...

    def fetch_segment(self, partition: int, first_id: int, *, session: int) -> AsyncIterator[Buffer]:
        """Yield the bytes of a sealed segment file."""
        ...

    async def install_segment(
        self, partition: int, session: int, first_id: int, file_bytes: int, pieces: AsyncIterator[Buffer]
    ) -> ReplicaStatus:
        """Install a whole segment file, after the last id or in place of a damaged segment."""
        ...

    async def archive(
        self,
        partition: int,
        known: Archived,
        *,
        session: int,
        lineage: Lineage = NEVER_FORKED,
        with_keys: bool = False,
    ) -> Archived:
        """Upload the sealed segment after `known`, and the manifest that names it; return the new end of the archive, or
        `known` if there is no such segment yet. `with_keys`: upload the key index of the segment, too."""
        ...

    async def trim(
        self, partition: int, session: int, floor: int, archived: Archived | None = None, *, needs_none: bool = False
    ) -> ReplicaStatus:
        """Permit the replica to remove records below this floor, which are in `archived`, or need no archive.

        The replica removes only what is proven to be in the archive."""
        ...

    async def back_up(
        self,
        partition: int,
        known: Archived,
        *,
        session: int,
        committed: int,
        moment: int,
        lineage: Lineage = NEVER_FORKED,
    ) -> BackedUp:
        """Upload the committed records that are in no archived segment.

        `known` is the end of the archive. Everything that was committed at `moment` has an id up to `committed`."""
        ...

    async def save_metadata(self, text: bytes, archive: UUID | None) -> int:
        """Save the documents of the cluster in the archive; return the number of the object."""
        ...

    async def check_archive(self, partition: int, known: Archived, first_id: int, *, session: int) -> ArchiveCheck:
        """Check that the store still has some of the objects of `known`, starting at an id."""
        ...

    async def close(self) -> None: ...


# -- a client and the owner of a partition -----------------------------------------------------------------------------


class MountLink(CallerPort, PostPort, Protocol):
    """The server's end of a mount.

    Frames of one call travel in one message: at most one of each kind, in the order of `ClientFrame` and `ServerFrame`."""

    @property
    def quiet_seconds(self) -> float | None:
        """Seconds since the connection last received anything, including heartbeats; None if unknown."""
        ...

    @property
    def takes_singles(self) -> bool:
        """Return whether the client may send frames of the kind SINGLE."""
        ...

    async def receive(self) -> Sequence[ClientFrame] | None:
        """Return the next frames; None at the end of the stream."""
        ...

    def hear_singles(self, taker: Callable[[SingleAppend], bool]) -> None:
        """Offer each transaction that arrives in a frame of its own to `taker`, unless other frames wait to be received.
        If `taker` returns False, it waits to be received."""
        ...

    async def send(self, frames: Sequence[ServerFrame]) -> None: ...
    def post(self, frames: Sequence[ServerFrame]) -> None: ...


class MountPort(PostPort, Protocol):
    """The client's end of a mount."""

    async def send(self, frames: Sequence[ClientFrame]) -> None: ...
    def post(self, frames: Sequence[ClientFrame]) -> None: ...
    async def receive(self) -> Sequence[ServerFrame] | None:
        """Return the next frames; None if the server ended the stream without an error."""
        ...

    def hear(self, taker: Callable[[Sequence[ServerFrame]], None]) -> None:
        """Pass frames to `taker` as they arrive, in place of `receive`, which then raises the errors of `taker`."""
        ...

    def cancel(self) -> None: ...


class AttendLink(CallerPort, Protocol):
    """The server's end of the stream of a member of a consumer group. Frames that stand together travel together."""

    async def receive(self) -> Sequence[MemberFrame] | None:
        """Return the next frames; None at the end of the stream."""
        ...

    async def send(self, frames: Sequence[DeliveryFrame]) -> None: ...


class AttendPort(Protocol):
    """The member's end of the stream of a member of a consumer group."""

    async def send(self, frames: Sequence[MemberFrame]) -> None: ...
    async def receive(self) -> Sequence[DeliveryFrame] | None:
        """Return the next frames; None if the server ended the stream without an error."""
        ...

    def cancel(self) -> None: ...


class ServerPort(Protocol):
    """The calls of a server to its clients."""

    def expect(self, name: str | None, streams: str = "") -> None:
        """Set the name that the server's certificate must have from now on; None for any name.

        `streams` is the address for mounts over plain frames; empty if unknown."""
        ...

    async def locate(self) -> Topology: ...
    async def register(self, introduction: Introduction = INTRODUCTION) -> Registration:
        """Return a new client id with its token."""
        ...

    def mount(self) -> MountPort: ...
    async def high_water_mark(self, partition: int, *, confirmed: bool = False, since: Position | None = None) -> Position:
        """Return the high-water mark of a partition.

        With `confirmed`, it is not below any id that was acknowledged before this call, by any owner. Raise
        `OtherTimeline` if `since` is not on this log."""
        ...

    async def find_time(self, partition: int, time: int) -> Position:
        """Return the highest id before the first committed transaction with this time or a later one."""
        ...

    async def history(
        self,
        partition: int,
        lock: int,
        *,
        after: int,
        before: int | None,
        limit: int,
        newest_first: bool,
        confirmed: bool,
    ) -> HistoryPart:
        """Return committed transactions between `after` and `before` that marked a lock: an answer for at least one id."""
        ...

    async def fetch_marked(
        self, partition: int, query: MarkedQuery, *, confirmed: bool, reach: int = EMPTY, since: Position | None = None
    ) -> MarkedPage:
        """Return committed transactions that marked all locks of a group, with their records: an answer for at least one
        id. `reach`: an id to wait for a moment until it is committed. Raise `OtherTimeline` if `since` is not on this
        log."""
        ...

    def fetch(
        self,
        partition: int,
        first_id: int,
        last_id: int | None = None,
        *,
        with_locks: bool = False,
        timeline: UUID | None = None,
    ) -> AsyncGenerator[Run, None]:
        """Yield committed records; raise `OtherTimeline` if the ids of `timeline` up to `last_id` are not on this log."""
        ...

    async def close(self) -> None: ...
