"""Who talks to whom, without saying how: the other side of each conversation as an awaitable face.

The logic of server and client is written against these protocols. Behind them is gRPC (`waltzd.storages`,
`waltzd.servers`, the services of the daemons), or plain calls within one process, in tests and in the simulator. Every
call that fails raises an error of `waltzd.errors`; `CannotConnect` means that its outcome is unknown.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

from waltzd.buffer import Buffer
from waltzd.frame import ClientFrame, Registration, ServerFrame, Topology
from waltzd.record import Run
from waltzd.replica import ReplicaStatus

# -- a storage, as the owner of a partition sees it --------------------------------------------------------------------


class AppendPort(Protocol):
    """One append stream. Marks say: what came in this stream up to this id is on the disk."""

    async def start(self) -> None: ...
    async def send(self, run: Run, committed: int) -> None: ...
    async def receive(self) -> int | None: ...
    async def finish(self) -> None: ...
    def cancel(self) -> None: ...


class ReplicaPort(Protocol):
    """The replicas on one storage."""

    async def status(self, partition: int) -> ReplicaStatus:
        """Where the replica stands. It is bound to nothing by that, and proves nothing."""
        ...

    async def open(
        self, partition: int, session: int, *, partitions: int, create: bool = False, seconds: float | None = None
    ) -> ReplicaStatus:
        """`create`: an empty replica where the storage holds nothing of the partition."""
        ...

    async def set_low_mark(self, partition: int, session: int, mark: int) -> ReplicaStatus: ...
    async def truncate(self, partition: int, session: int, mark: int) -> ReplicaStatus: ...
    def append(self, partition: int, session: int) -> AppendPort: ...
    def read(
        self, partition: int, first_id: int, last_id: int | None = None, *, session: int | None = None, frame_bytes: int = 0
    ) -> AsyncIterator[Run]: ...
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

    async def receive(self) -> Sequence[ClientFrame] | None:
        """None when the client has no more to say."""
        ...

    async def send(self, frames: Sequence[ServerFrame]) -> None: ...


class MountPort(Protocol):
    """The client's end of a mount."""

    async def send(self, frames: Sequence[ClientFrame]) -> None: ...
    async def receive(self) -> Sequence[ServerFrame] | None:
        """None when the server ended the stream without a word."""
        ...

    def cancel(self) -> None: ...


class ServerPort(Protocol):
    """One server, as a client sees it."""

    def expect(self, name: str | None) -> None:
        """Where certificates say who answers: only the server of this name may, from now on; None stands for any."""
        ...

    async def locate(self) -> Topology: ...
    async def register(self) -> Registration:
        """A client id that nobody else ever had or will have."""
        ...

    def mount(self) -> MountPort: ...
    async def high_water_mark(self, partition: int) -> int: ...
    def fetch(self, partition: int, first_id: int, last_id: int | None = None) -> AsyncGenerator[Run, None]: ...
    async def close(self) -> None: ...
