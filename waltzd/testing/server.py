"""One server with everything that the process of the same name has, except the process and the network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from importlib.metadata import version
from typing import Any
from uuid import UUID

from waltzd.cluster import Cluster
from waltzd.coordinator import Coordinator
from waltzd.frame import Limits
from waltzd.meta import ClusterMeta, ServerMeta, StorageMeta
from waltzd.port import ReplicaPort
from waltzd.server.capacity import Capacity
from waltzd.server.desk import Desk
from waltzd.server.election import Election
from waltzd.server.host import Host
from waltzd.server.pipeline import Pipeline, PipelineSettings
from waltzd.server.registration import Registration
from waltzd.server.store import OpenSession, Store
from waltzd.server.store_settings import TICK_SECONDS, StoreSettings
from waltzd.server.ticker import Ticker

LIMITS = Limits(payload_bytes_max=1 << 20, locks_max=1000, frame_bytes_max=4 << 20)
MOUNTS_MAX = 10_000


async def _nobody(server: ServerMeta) -> bool:
    """Names are given out by whoever starts servers: what is left of one is of a server that was killed."""
    return False


class LocalServer:
    def __init__(
        self,
        name: str,
        meta: ClusterMeta,
        coordinator: Coordinator,
        *,
        address: str,
        instance: UUID,
        connect: Callable[[StorageMeta], ReplicaPort],
        settings: StoreSettings,
        on_fatal: Callable[[BaseException], None],
        pipeline: PipelineSettings | None = None,
        is_alive: Callable[[ServerMeta], Awaitable[bool]] = _nobody,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.name = name
        self.meta = ServerMeta(
            name=name, listen=address, admin_listen=f"{name} admin", instance=instance, version=version("waltz")
        )
        self._on_fatal = on_fatal
        self._connect = connect
        self._settings = settings
        self._pipeline = pipeline or PipelineSettings(limits=LIMITS)
        self._say = say
        self._cluster = Cluster(coordinator, clock=lambda: 0.0)  # ids count from 1: a run can be repeated
        self._capacity = Capacity(MOUNTS_MAX)
        self._ticker = Ticker(TICK_SECONDS)
        self._stores: list[Store[Pipeline]] = []
        self._registration = Registration(self._cluster, self.meta, is_alive=is_alive)
        self._election = Election(self._cluster, name, meta.partitions)
        self.host: Host[Pipeline] = Host(self._cluster, meta, self._registration, make_store=self._make_store)
        self.desk = Desk(self.host)
        self._tasks: list[asyncio.Task[None]] = []
        self._hosting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.host.read()
        await self._registration.announce()
        self._tasks = [
            self._task(self._registration.watch.run(), "registration"),
            self._task(self._election.watch.run(), "election"),
        ]
        self._hosting = self._task(self.host.run(), "host")

    def _task(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{what} of {self.name}")
        task.add_done_callback(self._look_at_the_end)
        return task

    def _look_at_the_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_fatal(error)

    async def drain(self, seconds: float) -> None:
        """Give the partitions away, if there is anybody to take them."""
        await self.host.drain(seconds)

    async def stop(self) -> None:
        """Close in order what is left."""
        await self.host.close()
        await self.end()

    @property
    def callers(self) -> int:
        return self._capacity.callers

    async def kill(self) -> None:
        """Close nothing in order. Its connections have to be cut before."""
        await asyncio.gather(*[store.close(hand_over=False) for store in self._stores])
        if self._hosting is not None:
            self._hosting.cancel()
        await self.end()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        tasks = [*self._tasks, self._hosting] if self._hosting is not None else self._tasks
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what the parts are given

    def _make_store(self, partition: int, generation: int, *, previous_owner_alive: bool) -> Store[Pipeline]:
        store: Store[Pipeline] = Store(
            partition,
            generation,
            cluster=self._cluster,
            connect=self._connect,
            settings=self._settings,
            ticker=self._ticker,
            make_pipeline=self._make_pipeline,
            say=lambda sentence: self._say(f"partition {partition}: {sentence}"),
            previous_owner_alive=previous_owner_alive,
        )
        self._stores.append(store)
        return store

    def _make_pipeline(self, session: OpenSession) -> Pipeline:
        return Pipeline(session, self._pipeline, self._capacity, on_fatal=self._on_fatal)
