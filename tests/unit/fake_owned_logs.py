"""OwnedLogs without a log: they open at once, tell what was done with them, and close when they are allowed to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from waltzd.errors import NotReady
from waltzd.protocol.descriptions import OwnedPartition


class FakeOwnedLog:
    """A owned that is open at once, and closes when it is allowed to."""

    def __init__(
        self, owned_logs: OwnedLogs, partition: int, generation: int, previous_owner_alive: Callable[[], bool]
    ) -> None:
        self.owned_logs = owned_logs
        self.partition, self.generation = partition, generation
        self.previous_owner_alive = previous_owner_alive
        self.is_open = True
        self.fault: Exception | None = None
        self.task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(self._live())
        self._ended = asyncio.Event()

    @property
    def name(self) -> str:
        return f"{self.partition} in {self.generation}"

    @property
    def pipeline(self) -> str:
        if not self.is_open:
            raise NotReady("recovering")
        return f"pipeline {self.name}"

    async def _live(self) -> None:
        await self._ended.wait()
        if self.fault is not None:
            raise self.fault

    def fail(self, fault: Exception | None) -> None:
        self.fault = fault
        self._ended.set()

    async def start(self) -> None:
        same = [owned for owned in self.owned_logs.running if owned.partition == self.partition]
        assert not same, "two owned_logs of one partition at a time"
        self.owned_logs.running.append(self)
        self.owned_logs.told.append(f"start {self.name}")

    async def close(self, *, hand_over: bool) -> None:
        if hand_over and self.partition in self.owned_logs.stuck:
            await asyncio.Event().wait()
        self.owned_logs.told.append(f"{'hand over' if hand_over else 'close'} {self.name}")
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.owned_logs.running.remove(self)

    def describe(self) -> OwnedPartition:
        return OwnedPartition(
            partition=self.partition,
            generation=self.generation,
            session=1,
            step="OPEN",
            waiting="",
            committed=-1,
            last_id=-1,
            low_mark=-1,
            mounts=0,
            tail_bytes=0,
            replicas=(),
        )


class OwnedLogs:
    def __init__(self) -> None:
        self.running: list[FakeOwnedLog] = []
        self.told: list[str] = []
        self.stuck: set[int] = set()
        """These do not close in order."""

    def __call__(self, partition: int, generation: int, previous_owner_alive: Callable[[], bool]) -> FakeOwnedLog:
        return FakeOwnedLog(self, partition, generation, previous_owner_alive)

    def find(self, partition: int) -> FakeOwnedLog:
        return next(owned for owned in self.running if owned.partition == partition)

    def take(self) -> list[str]:
        told, self.told = self.told, []
        return sorted(told)
