"""The other side of each conversation as an awaitable face, without saying how it is reached.

The logic of daemons and clients is written against these protocols. Behind them is gRPC (`waltzd.wire.storages`,
`waltzd.wire.servers`, the services of the daemons), or plain calls within one process, in tests and in the simulator. Every
call that fails raises an error of `waltzd.errors`; `CannotConnect` means that its outcome is unknown.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias
from uuid import UUID

import numpy as np

from waltzd.disk.seam import Buffer
from waltzd.errors import BadFrame, WaltzError
from waltzd.format.batch import Batch, Piece
from waltzd.format.layout import ID_MAX
from waltzd.format.record import LockColumns, Run, bounds_of
from waltzd.protocol.batches import INTRODUCTION, ClientFrame, Introduction, Registration, ServerFrame, Topology
from waltzd.protocol.descriptions import ArchiveCheck, Archived, BackedUp, ReplicaStatus
from waltzd.protocol.groups import DeliveryFrame, MemberFrame
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import NEVER_FORKED, Lineage

Content: TypeAlias = Run | tuple[Batch, ...]
"""One run of format 0, or whole batches."""


def runs_of(content: Content) -> list[Run]:
    return [content] if isinstance(content, Run) else [batch.run for batch in content]


@dataclass(frozen=True)
class RecordsFrame:
    """What goes to a replica at once, and what is known to be committed. Without records it tells only that, and is not
    acknowledged."""

    content: Content
    committed: int

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
    """The locks of consecutive transactions from `first_id` on."""

    first_id: int
    locks: LockColumns


class Link(Protocol):
    """An append stream at its storage: frames come in, marks go out."""

    async def receive(self) -> RecordsFrame | None:
        """The next frame, or None when the other side has no more."""
        ...

    async def send(self, durable_id: int) -> None: ...
    @property
    def may_post(self) -> bool:
        """Whether `send` would not wait: then `post` does the same."""
        ...

    def post(self, durable_id: int) -> None: ...

    async def refuse(self, error: WaltzError) -> None:
        """The last message: why the stream ends."""
        ...


def run_of(first_id: int, lengths: Buffer, records: Buffer) -> Run:
    """The run that a frame says it carries; its user checks the checksums."""
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
    """What an owner shows in one session, and nobody else knows. `key` is drawn once for each process."""
    return hmac.digest(key, f"session {session} of partition {partition}".encode(), "sha256")


@dataclass(frozen=True)
class Contact:
    """What a call with a session shows: of which opening of the replica it is, and that it comes from who opened it."""

    number: int = 0
    """Of the answer to `Open`; 0: the present one, whichever it is."""
    secret: bytes = field(default=b"", repr=False)


NOBODY = Contact()


class AppendPort(Protocol):
    """An append stream at its server. A mark says: what came in this stream up to this id is on the disk."""

    async def start(self) -> None: ...
    async def send(self, content: Content, committed: int) -> None: ...
    @property
    def may_post(self) -> bool:
        """Whether `send` would not wait: then `post` does the same."""
        ...

    def post(self, content: Content, committed: int) -> None: ...
    async def receive(self) -> int | None: ...
    def hear(self, taker: Callable[[int], None]) -> None:
        """Marks may go to `taker` when they come, in place of being received; `receive` raises what `taker` raises."""
        ...

    def cancel(self) -> None: ...


class ReplicaPort(Protocol):
    """The replicas on one storage."""

    async def status(self, partition: int) -> ReplicaStatus:
        """Where the replica stands. It is bound to nothing by that, and proves nothing."""
        ...

    async def quiet(self, partitions: Sequence[int]) -> Sequence[int]:
        """Those of these partitions that are here and have no append stream at the moment."""
        ...

    async def open(
        self, partition: int, session: int, *, partitions: int, create: bool = False, seconds: float | None = None
    ) -> ReplicaStatus:
        """`create`: an empty replica where the storage holds nothing of the partition."""
        ...

    async def set_low_mark(self, partition: int, session: int, mark: int) -> ReplicaStatus: ...
    async def truncate(self, partition: int, session: int, mark: int) -> ReplicaStatus: ...
    async def fork(self, partition: int, session: int, lineage: Lineage) -> ReplicaStatus:
        """Have the replica go over to the newest timeline: what it holds above the fork is set aside."""
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
        """Records, with their times and groups, and their locks where these are asked for."""
        ...

    def read_whole(
        self, partition: int, first_id: int, last_id: int, *, session: int, frame_bytes: int = 0
    ) -> AsyncIterator[Piece]:
        """For another replica: batches where the log has them, from `first_id` on, where one begins."""
        ...

    async def read_locks(self, partition: int, last_id: int, *, session: int, bytes_max: int) -> LockHistory | None:
        """The locks of transactions up to `last_id`, where a batch ends: as many of the last batches as fit, at least one.
        None where the log has no batch there."""
        ...

    async def find_time(self, partition: int, time: int, *, session: int) -> int:
        """The highest id in front of the first transaction whose time is `time` or later."""
        ...

    async def segments(self, partition: int, *, session: int | None = None) -> list[tuple[int, int, int]]:
        """First id, last id and size of each sealed segment."""
        ...

    def fetch_segment(self, partition: int, first_id: int, *, session: int) -> AsyncIterator[Buffer]:
        """A sealed segment file as it is."""
        ...

    async def install_segment(
        self, partition: int, session: int, first_id: int, file_bytes: int, pieces: AsyncIterator[Buffer]
    ) -> ReplicaStatus:
        """A whole segment file, to stand behind the last id or in the place of a damaged segment."""
        ...

    async def archive(self, partition: int, known: Archived, *, session: int, lineage: Lineage = NEVER_FORKED) -> Archived:
        """Have the sealed segment behind `known` uploaded, and the manifest that names it. What comes back is `known`
        again where there is none yet."""
        ...

    async def trim(
        self, partition: int, session: int, floor: int, archived: Archived | None = None, *, needs_none: bool = False
    ) -> ReplicaStatus:
        """The log may begin at this floor: what is below is in this archive, or needs none. The replica begins no higher
        than that is proven."""
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
        """Have what is committed and in no archived segment uploaded. `known`: how far the archive reaches. `moment`: all
        that was committed then is not behind `committed`."""
        ...

    async def save_metadata(self, text: bytes, archive: UUID | None) -> int:
        """Have the documents of the cluster put into the archive; the number of the object."""
        ...

    async def check_archive(self, partition: int, known: Archived, first_id: int, *, session: int) -> ArchiveCheck:
        """Have it looked whether the store still has some of the objects of `known`, from an id on."""
        ...

    async def close(self) -> None: ...


# -- a client and the owner of a partition -----------------------------------------------------------------------------


class MountLink(Protocol):
    """The server's end of a mount. Frames that stand together travel together, at most one of each kind, in the order of
    `frame.ClientFrame` and `frame.ServerFrame`."""

    @property
    def peer(self) -> str: ...
    @property
    def identity(self) -> str:
        """What the client's certificate says that it is; empty without one."""
        ...

    @property
    def quiet_seconds(self) -> float | None:
        """How long nothing was heard on its connection, heartbeats included; None where that is not known."""
        ...

    async def receive(self) -> Sequence[ClientFrame] | None:
        """None when the client has no more to say."""
        ...

    async def send(self, frames: Sequence[ServerFrame]) -> None: ...
    @property
    def may_post(self) -> bool:
        """Whether `send` would not wait: then `post` does the same."""
        ...

    def post(self, frames: Sequence[ServerFrame]) -> None: ...


class MountPort(Protocol):
    """The client's end of a mount."""

    async def send(self, frames: Sequence[ClientFrame]) -> None: ...
    @property
    def may_post(self) -> bool:
        """Whether `send` would not wait: then `post` does the same."""
        ...

    def post(self, frames: Sequence[ClientFrame]) -> None: ...
    async def receive(self) -> Sequence[ServerFrame] | None:
        """None when the server ended the stream without a word."""
        ...

    def hear(self, taker: Callable[[Sequence[ServerFrame]], None]) -> None:
        """Frames may go to `taker` when they come, in place of being received; `receive` raises what `taker` raises."""
        ...

    def cancel(self) -> None: ...


class AttendLink(Protocol):
    """The server's end of the stream of a member of a consumer group. Frames that stand together travel together."""

    @property
    def peer(self) -> str: ...
    @property
    def identity(self) -> str:
        """What the member's certificate says that it is; empty without one."""
        ...

    async def receive(self) -> Sequence[MemberFrame] | None:
        """None when the member has no more to say."""
        ...

    async def send(self, frames: Sequence[DeliveryFrame]) -> None: ...


class AttendPort(Protocol):
    """The member's end of it."""

    async def send(self, frames: Sequence[MemberFrame]) -> None: ...
    async def receive(self) -> Sequence[DeliveryFrame] | None:
        """None when the server ended the stream without a word."""
        ...

    def cancel(self) -> None: ...


class ServerPort(Protocol):
    """One server, as a client sees it."""

    def expect(self, name: str | None, streams: str = "") -> None:
        """Where there are certificates: only the server of this name may answer from now on; None stands for any.
        `streams`: where it takes mounts without gRPC, as far as that is known."""
        ...

    async def locate(self) -> Topology: ...
    async def register(self, introduction: Introduction = INTRODUCTION) -> Registration:
        """A client id that no other client ever has."""
        ...

    def mount(self) -> MountPort: ...
    async def high_water_mark(self, partition: int, *, confirmed: bool = False, since: Position | None = None) -> Position:
        """`confirmed`: not below any id that was acknowledged to anybody before this call. Raises `OtherTimeline` where
        `since` is not on this log."""
        ...

    async def find_time(self, partition: int, time: int) -> Position:
        """The highest id in front of the first committed transaction whose time is `time` or later."""
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
        """Raises `OtherTimeline` where the ids of `timeline` up to `last_id` are not those of this log."""
        ...

    async def close(self) -> None: ...
