"""The group log as servers use it: entries that are appended under a lock, and read in their order.

A server is an ordinary client of it, whoever owns it: so entries go through fail-overs as those of any application do, and
what became of each is known or said to be unknown.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, TypeAlias

from waltzd.client.group_log import GroupLogClient
from waltzd.errors import GroupLogAway, NoGroupLog, NotSent, WaltzError
from waltzd.protocol.locks import AppendOutcome, Lock
from waltzd.protocol.positions import Position

Entry: TypeAlias = tuple[int, bytes]
"""Its id, which is a position where the log has forked, and what it says."""
APPEND_SECONDS = 10.0
"""How long an entry is tried to be appended before its outcome counts as unknown: longer than a fail-over."""
READ_SECONDS = 10.0


class GroupLog(Protocol):
    async def append(self, data: bytes, lock: Lock, position: int) -> AppendOutcome:
        """An error means that nothing was written, and that nothing will be."""
        ...

    async def end(self) -> Position:
        """Nothing that was acknowledged to anybody before this call stands above it; -1 for an empty log."""
        ...

    def read(self, after: Position, to: int) -> AsyncGenerator[Sequence[Entry], None]:
        """What stands there, in order. Ids may be missing: probes of operators."""
        ...

    def follow(self, after: Position) -> AsyncGenerator[Sequence[Entry], None]:
        """What stands there and what comes, in order, for ever."""
        ...

    async def close(self) -> None: ...


class ClientLog:
    """The group log through a client of this server's own, which is opened when the log is there and is first used."""

    def __init__(self, make_client: Callable[[], GroupLogClient[bytes]], number: Callable[[], int | None]) -> None:
        """`number`: of the group log; None while there is none."""
        self._make_client = make_client
        self._number = number
        self._client: GroupLogClient[bytes] | None = None

    async def _open(self) -> tuple[GroupLogClient[bytes], int]:
        number = self._number()
        if number is None:
            raise NoGroupLog("the cluster has no group log yet")
        if self._client is None:
            client = self._make_client()
            await client.open(timeout=READ_SECONDS)
            if self._client is None:
                self._client = client
            else:
                await client.close()
        return self._client, number

    async def append(self, data: bytes, lock: Lock, position: int) -> AppendOutcome:
        client, number = await self._open()
        try:
            return await client.append(data, partition=number, locks=(lock,), position=position, timeout=APPEND_SECONDS)
        except NotSent:
            raise
        except WaltzError:  # it takes nothing more, for a reason that lasts for this client
            await self._give_up(client)
            raise

    async def end(self) -> Position:
        client, number = await self._open()
        try:
            return await client.end_position(number, timeout=READ_SECONDS)
        except WaltzError as error:
            raise GroupLogAway(f"the group log does not say how far it reaches: {error.message}") from error

    async def read(self, after: Position, to: int) -> AsyncGenerator[Sequence[Entry], None]:
        client, number = await self._open()
        async with aclosing(client.scan(number, after=after, to=to)) as found:
            async for transaction in found:
                yield ((transaction.position, transaction.payload),)

    async def follow(self, after: Position) -> AsyncGenerator[Sequence[Entry], None]:
        client, number = await self._open()
        async with aclosing(client.feed_batches(number, after=after)) as batches:
            async for batch in batches:
                yield [(transaction.position, transaction.payload) for transaction in batch]

    async def _give_up(self, client: GroupLogClient[bytes]) -> None:
        """The next call opens another one."""
        if self._client is client:
            self._client = None
            await client.close()

    async def close(self) -> None:
        if self._client is not None:
            await self._give_up(self._client)
