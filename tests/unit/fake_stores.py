"""Stores without a log: they open at once, tell what was done with them, and close when they are allowed to."""

from __future__ import annotations

import asyncio
from typing import Any

from waltzd.errors import NotReady
from waltzd.protocol.descriptions import OwnedPartition


class FakeStore:
    """A store that is open at once, and closes when it is allowed to."""

    def __init__(self, stores: Stores, partition: int, generation: int, previous_owner_alive: bool) -> None:
        self.stores = stores
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
        same = [store for store in self.stores.running if store.partition == self.partition]
        assert not same, "two stores of one partition at a time"
        self.stores.running.append(self)
        self.stores.told.append(f"start {self.name}")

    async def close(self, *, hand_over: bool) -> None:
        if hand_over and self.partition in self.stores.stuck:
            await asyncio.Event().wait()
        self.stores.told.append(f"{'hand over' if hand_over else 'close'} {self.name}")
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.stores.running.remove(self)

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


class Stores:
    def __init__(self) -> None:
        self.running: list[FakeStore] = []
        self.told: list[str] = []
        self.stuck: set[int] = set()
        """These do not close in order."""

    def __call__(self, partition: int, generation: int, *, previous_owner_alive: bool) -> FakeStore:
        return FakeStore(self, partition, generation, previous_owner_alive)

    def find(self, partition: int) -> FakeStore:
        return next(store for store in self.running if store.partition == partition)

    def take(self) -> list[str]:
        told, self.told = self.told, []
        return sorted(told)
