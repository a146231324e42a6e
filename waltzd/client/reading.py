"""Reading committed transactions by id or by time, from their owner. Needs no mount."""

from __future__ import annotations

from contextlib import aclosing
from datetime import datetime

from waltzd.client.mount import Seen
from waltzd.client.routes import Routes
from waltzd.client.view import Serializer, Transaction, checked_id, checked_time, transactions_of
from waltzd.errors import BadArgument, BadFrame
from waltzd.format.record import Run
from waltzd.protocol.peers import ServerPort

READ_IDS_MAX, READ_BYTES = 10_000, 4 << 20
"""How much is read at once."""


class Reader:
    def __init__(self, routes: Routes, serializer: Serializer | None, seen: Seen, *, seconds: float) -> None:
        """`seconds`: how long an owner is asked, through a fail-over."""
        self._routes = routes
        self._serializer = serializer
        self._seen = seen
        self._seconds = seconds

    async def end_position(self, partition: int, *, confirmed: bool = True) -> int:
        return await self._routes.ask(
            partition, "HighWaterMark", lambda port: port.high_water_mark(partition, confirmed=confirmed), self._seconds
        )

    async def position_at(self, partition: int, time: datetime | int) -> int:
        us = checked_time(time)
        return await self._routes.ask(partition, "FindTime", lambda port: port.find_time(partition, us), self._seconds)

    async def some(
        self,
        partition: int,
        first_id: int | None,
        last_id: int | None,
        *,
        from_time: datetime | int | None,
        until_time: datetime | int | None,
        with_locks: bool,
    ) -> list[Transaction]:
        if (first_id is None) == (from_time is None) or (last_id is not None and until_time is not None):
            raise BadArgument(
                "reading begins with a `first_id` or a `from_time`, and ends with a `last_id` or an `until_time`"
            )
        if from_time is not None:
            first_id = await self.position_at(partition, from_time) + 1
        assert first_id is not None
        first_id = checked_id(first_id)
        is_bounded = last_id is not None and from_time is None
        if until_time is not None:
            last_id = await self.position_at(partition, until_time)
        elif last_id is None:
            last_id = await self.end_position(partition)
        else:
            last_id = checked_id(last_id)
        if last_id < first_id:
            if is_bounded:
                raise BadArgument(f"there are no ids from {first_id} to {last_id}")
            return []
        runs = await self._runs(partition, first_id, min(last_id, first_id + READ_IDS_MAX - 1), with_locks)
        for run in runs:
            self._seen.note(run.times)
        return [found for run in runs for found in transactions_of(run, partition, self._serializer)]

    async def _runs(self, partition: int, first_id: int, last_id: int, with_locks: bool) -> list[Run]:
        async def ask(port: ServerPort) -> list[Run]:
            runs: list[Run] = []
            next_id = first_id
            async with aclosing(port.fetch(partition, first_id, last_id, with_locks=with_locks)) as found:
                async for run in found:
                    if run.first_id != next_id or run.last_id > last_id:
                        break
                    runs.append(run)
                    next_id = run.last_id + 1
                    if sum(len(run.data) for run in runs) >= READ_BYTES:
                        return runs
            if next_id <= last_id:
                raise BadFrame(f"the owner of partition {partition} answered something else than transaction {next_id}")
            return runs

        return await self._routes.ask(partition, "Fetch", ask, self._seconds)
