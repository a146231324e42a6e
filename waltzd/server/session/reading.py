"""Committed records of one partition for readers behind the tail: from any replica that can give them.

A replica that fails, or is too slow, is
asked last from then on, until it has answered again: a storage that hangs costs one deadline, not one for each read. What a
storage says when it cannot give is about that storage: it never goes to a reader as if it were about the partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from waltzd.errors import BadFrame, NeedsBatches, NotReady, Trimmed, WaltzError
from waltzd.format.record import Run
from waltzd.protocol.peers import LockHistory, ReplicaPort
from waltzd.protocol.quorum import EMPTY
from waltzd.server.core.progress import Marks
from waltzd.server.core.recovery import Recovery
from waltzd.server.core.tail import Tail
from waltzd.server.session.copying import timely
from waltzd.server.session.settings import SETTLED_SECONDS, SessionSettings

T = TypeVar("T")
READ_AGAIN_SECONDS = 0.05


class Source(Protocol):
    """A replica as a reader needs it."""

    @property
    def port(self) -> ReplicaPort: ...
    @property
    def is_readable(self) -> bool: ...


class Reading:
    """What readers use of the log of a partition; the rest of it is `waltzd.server.session.replica.Log`."""

    partition: int
    settings: SessionSettings
    core: Recovery
    marks: Marks | None
    open_tail: Tail | None
    links: Mapping[str, Source]
    ended: BaseException | None
    opened_at: float

    def __init__(self) -> None:
        self._unwell: dict[str, None] = {}
        """Replicas that failed a reader, in the order in which they did."""

    @property
    def session(self) -> int:
        """Rises when a session gives way to the next one of the same owner; no other has written in between."""
        return self.core.session

    @property
    def committed(self) -> int:
        return self.open_tail.committed if self.open_tail is not None else EMPTY

    async def read(
        self, first_id: int, last_id: int, chunk_bytes: int, *, with_locks: bool = False
    ) -> AsyncGenerator[Run, None]:
        """Committed records from any replica that can give them."""
        assert last_id <= self.committed
        failed: dict[str, WaltzError] = {}
        while first_id <= last_id:
            name = await self._source(first_id, failed)
            until, port = min(last_id, self.core.held(name)), self.links[name].port
            runs = port.read(
                self.partition, first_id, until, session=self.session, frame_bytes=chunk_bytes, with_locks=with_locks
            )
            try:
                async for run in timely(runs, self.settings.storage_seconds, name):
                    yield run
                    first_id = run.last_id + 1
                self._unwell.pop(name, None)
            except WaltzError as error:
                self._has_failed(name, error, failed)

    async def read_locks(self, last_id: int, bytes_max: int) -> LockHistory | None:
        """The locks of transactions up to `last_id`, where a batch ends. None: the log has no batch there."""

        async def ask(port: ReplicaPort) -> LockHistory | None:
            found = await port.read_locks(self.partition, last_id, session=self.session, bytes_max=bytes_max)
            if found is not None and not 0 <= found.first_id == last_id - len(found.locks) + 1:
                raise BadFrame(f"the locks of ids up to {last_id} were asked for, and others came")
            return found

        return await self._ask(last_id, ask)

    async def find_time(self, time: int, last_id: int) -> int:
        """The highest id in front of the first transaction whose time is `time` or later, among those up to `last_id`."""
        return await self._ask(last_id, lambda port: port.find_time(self.partition, time, session=self.session))

    async def _ask(self, id_: int, ask: Callable[[ReplicaPort], Awaitable[T]]) -> T:
        """The answer of any replica that holds this id."""
        failed: dict[str, WaltzError] = {}
        while True:
            name = await self._source(id_, failed)
            try:
                found = await ask(self.links[name].port)
                self._unwell.pop(name, None)
                return found
            except NeedsBatches:
                raise  # it is about the log
            except WaltzError as error:
                self._has_failed(name, error, failed)

    async def _source(self, id_: int, failed: dict[str, WaltzError]) -> str:
        """A replica that holds this id and has not failed; waits for one while the session begins."""
        while True:
            name = self._choose(id_, failed)
            if name is not None:
                return name
            for error in failed.values():
                if isinstance(error, Trimmed):
                    raise error
            if not self._is_beginning:
                why = "; ".join(f"{name}: {error.code} {error.message}" for name, error in failed.items())
                raise NotReady(f"no replica gives ids from {id_} on: {why or 'none that holds them can be read'}")
            failed.clear()
            await asyncio.sleep(READ_AGAIN_SECONDS)

    def _has_failed(self, name: str, error: WaltzError, failed: dict[str, WaltzError]) -> None:
        failed[name] = error
        if isinstance(error, Trimmed):
            return
        self._unwell[name] = self._unwell.pop(name, None)

    def _choose(self, first_id: int, failed: Mapping[str, WaltzError]) -> str | None:
        able = [
            name
            for name, link in sorted(self.links.items())
            if link.is_readable and name not in failed and self.core.held(name) >= first_id
        ]
        well = [name for name in able if name not in self._unwell]
        if well:
            return well[self.partition % len(well)]  # partitions spread over the storages
        return next((name for name in self._unwell if name in able), None)

    @property
    def _is_beginning(self) -> bool:
        """The session is not open yet, or only just. Storages refuse the one before from the first contact on, while links
        of the new one are not ready: that is no failure."""
        is_settled = self.marks is not None and asyncio.get_running_loop().time() - self.opened_at > SETTLED_SECONDS
        return self.ended is None and not is_settled
