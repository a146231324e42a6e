"""Segment files that arrive: a piece at a time to a file beside the log, then one turn in the lane to give it its place.

Receiving and proving take nobody's turn. One file at a time for each replica: a newer one ends the one before, whose sender
has gone or will ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from waltzd.buffer import Buffer
from waltzd.errors import CannotConnect, Displaced, FlushFailed
from waltzd.replica import ReplicaStatus
from waltzd.storage.installation import Installation
from waltzd.storage.lane import Lane, RunBlocking

T = TypeVar("T")
PIECE_SECONDS = 60.0
"""How long a sender may take for its next piece."""


class Arrivals:
    def __init__(
        self, *, run_writing: RunBlocking, on_fatal: Callable[[BaseException], None], check_open: Callable[[], None]
    ) -> None:
        """`check_open` raises when the daemon takes no more work."""
        self._run_writing = run_writing
        self._on_fatal = on_fatal
        self._check_open = check_open
        self._turns: dict[int, object] = {}

    async def take(
        self, lane: Lane, session: int, contact: int, first_id: int, file_bytes: int, pieces: AsyncIterator[Buffer]
    ) -> ReplicaStatus:
        partition = lane.partition
        turn = self._turns[partition.number] = object()
        begun: list[Installation] = []

        def begin() -> None:
            begun.append(partition.begin_installation(session, first_id, file_bytes, contact))

        try:
            await self._whole(lane.call(begin))
            installation = begun[0]
            async for piece in _timely(pieces):
                self._check_open()
                partition.check_installation(session, installation)
                if self._turns.get(partition.number) is not turn:
                    raise Displaced(
                        f"another segment file for partition {partition.number} was begun",
                        not_done="nothing of this file was kept",
                        next_step="send one file at a time to each replica",
                    )
                await self._whole(self._run_writing(installation.write, piece))
            await self._whole(self._run_writing(installation.prove))
            return await self._whole(lane.call(lambda: partition.install(session, installation)))
        finally:
            if self._turns.get(partition.number) is turn:
                del self._turns[partition.number]
            for installation in begun:  # once it has its place this does nothing
                await self._whole(self._run_writing(installation.abandon))

    async def _whole(self, work: Awaitable[T]) -> T:
        """To its end, also when the caller has gone: no two threads may have a hand in the same files."""
        step = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(step)
        except FlushFailed as error:
            self._on_fatal(error)
            raise
        except asyncio.CancelledError:
            await asyncio.wait((step,))
            if not step.cancelled() and isinstance(failure := step.exception(), FlushFailed):
                self._on_fatal(failure)
            raise


async def _timely(pieces: AsyncIterator[Buffer]) -> AsyncIterator[Buffer]:
    iterator = aiter(pieces)
    while True:
        try:
            async with asyncio.timeout(PIECE_SECONDS):
                piece = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise CannotConnect(
                f"the sender of a segment file was silent for {PIECE_SECONDS:.0f} seconds",
                not_done="nothing of the file was kept",
            ) from None
        yield piece
