"""Access of a server to the group log: append an entry under a lock, and read entries in order.

A server is an ordinary client of the group log, whichever server owns it. So its entries survive fail-overs like those
of any application, and the outcome of an append is known or reported as unknown.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, TypeAlias

from waltzd.client.client import Client
from waltzd.client.routes import Partitions
from waltzd.client.view import E
from waltzd.errors import BadArgument, GroupLogAway, NoGroupLog, NotSent, Trimmed, WaltzError
from waltzd.protocol.locks import AppendOutcome, Lock
from waltzd.protocol.positions import Position


class GroupLogClient(Client[E]):
    """Client of the group log alone: how servers read and write the state of consumer groups.

    Applications never see the group log, so `Client` refuses its number. A server opens this client instead, which has no
    other partition and is otherwise like `Client`: a view is fed from its position on, and `submit` and `append` name
    `number`. Until the cluster has a group log, the client waits for it as for a partition without an owner.
    """

    @property
    def number(self) -> int:
        """Number of the group log, once the client is open: the number after the last partition."""
        return self.partition_count

    async def _set_partitions(self, partitions: Partitions, seconds: float) -> None:
        await super()._set_partitions((self.number,), seconds)

    async def first_id(self) -> int:
        """Return the first id that the group log still has. Everything that is needed to know the state of the groups
        follows it."""
        try:
            await self.read_some(self.number)
        except Trimmed as error:
            return error.number("floor") or 0
        return 0

    def _check_number(self, partition: int) -> None:
        if partition != self.number:
            raise BadArgument(f"this client is for the group log, {self.number}, and not for partition {partition!r}")


Entry: TypeAlias = tuple[int, bytes]
"""Id and content of an entry. The id carries its timeline if the log has forked."""
APPEND_SECONDS = 10.0
"""Seconds until the outcome of an append counts as unknown; longer than a fail-over takes."""
READ_SECONDS = 10.0


class GroupLog(Protocol):
    async def append(self, data: bytes, lock: Lock, position: int) -> AppendOutcome:
        """Append an entry. An error means that nothing was written and nothing will be."""
        ...

    async def end(self) -> Position:
        """Return the end of the log, at or above everything acknowledged before this call; -1 if it is empty."""
        ...

    def read(self, after: Position, to: int) -> AsyncGenerator[Sequence[Entry], None]:
        """Yield the entries after a position, up to an id, in order. Ids of probes are missing."""
        ...

    def follow(self, after: Position) -> AsyncGenerator[Sequence[Entry], None]:
        """Yield the entries after a position in order, and new ones as they are appended, without end."""
        ...

    async def close(self) -> None: ...


class ClientLog:
    """The group log, through a client that is opened on first use."""

    def __init__(self, make_client: Callable[[], GroupLogClient[bytes]], number: Callable[[], int | None]) -> None:
        """Take a factory of the client. `number` returns the partition number of the group log, None if there is none
        yet."""
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
        except WaltzError:  # this client cannot append any more
            await self._give_up(client)
            raise

    async def end(self) -> Position:
        client, number = await self._open()
        try:
            return await client.end_position(number, timeout=READ_SECONDS)
        except WaltzError as error:
            raise GroupLogAway(f"the end of the group log could not be read: {error.message}") from error

    async def read(self, after: Position, to: int) -> AsyncGenerator[Sequence[Entry], None]:
        client, number = await self._open()
        async with aclosing(client.scan(number, after=after, through=to)) as found:
            async for transaction in found:
                yield ((transaction.position, transaction.payload),)

    async def follow(self, after: Position) -> AsyncGenerator[Sequence[Entry], None]:
        client, number = await self._open()
        async with aclosing(client.feed_batches(number, after=after)) as batches:
            async for batch in batches:
                yield [(transaction.position, transaction.payload) for transaction in batch]

    async def _give_up(self, client: GroupLogClient[bytes]) -> None:
        """Close a client; the next call opens another one."""
        if self._client is client:
            self._client = None
            await client.close()

    async def close(self) -> None:
        if self._client is not None:
            await self._give_up(self._client)
