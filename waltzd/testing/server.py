"""Server with all parts of the daemon, except process and network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from importlib.metadata import version
from typing import Any
from uuid import UUID

from waltzd.client.routes import Connect
from waltzd.client.settings import ClientSettings
from waltzd.cluster.clients import ClientNames
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.coordinator import Coordinator
from waltzd.cluster.documents import ClusterMeta, ServerMeta, StorageMeta
from waltzd.protocol.batches import Limits
from waltzd.protocol.level import THIS, Program
from waltzd.protocol.peers import ReplicaPort
from waltzd.server.clients.authorizer import Authorizer
from waltzd.server.clients.calls import ServerCalls
from waltzd.server.clients.pipeline import Capacity, Pipeline, PipelineSettings
from waltzd.server.clients.registry import ClientRegistry
from waltzd.server.election import Election
from waltzd.server.failure_detector import FailureDetector, OpenProbe
from waltzd.server.ownership import PartitionOwner
from waltzd.server.reconcile import PolicyFollower, VersionCheck
from waltzd.server.registration import Registration
from waltzd.server.session.change_signal import PeriodicTimer
from waltzd.server.session.owned import OwnedLog
from waltzd.server.session.settings import TICK_SECONDS, SessionSettings
from waltzd.server.subscriptions.group_coordinator import GroupCoordinator
from waltzd.server.subscriptions.group_log import ClientLog, GroupLogClient
from waltzd.wire.tasks import tell_failure

LIMITS = Limits(payload_bytes_max=1 << 20, locks_max=1000, frame_bytes_max=4 << 20)
MOUNTS_MAX = 10_000
LOG_CLOSE_SECONDS = 0.5
"""Seconds that a server that ends waits for its last entries in the group log."""


async def _never_alive(server: ServerMeta) -> bool:
    """Return False: names are unique here, so a registration that is left is that of a killed server."""
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
        settings: SessionSettings,
        on_fatal: Callable[[BaseException], None],
        pipeline: PipelineSettings | None = None,
        is_alive: Callable[[ServerMeta], Awaitable[bool]] = _never_alive,
        open_probe: OpenProbe | None = None,
        say: Callable[[str], None] = lambda sentence: None,
        reach: Connect | None = None,
        authorizer: Authorizer | None = None,
        program: Program | None = None,
    ) -> None:
        """Create a server. Without `open_probe` it does not detect dead servers. `reach` connects it as a client of the
        group log; without it there are no groups. `authorizer` follows the policy of the cluster; without it everything
        is allowed. `program` is the version that the server says it is; without it no versions are checked."""
        self.name = name
        self.meta = ServerMeta(
            name=name,
            listen=address,
            admin_listen=f"{name} admin",
            instance=instance,
            version=version("waltzd") if program is None else program.version,
        )
        self._on_fatal = on_fatal
        self._connect = connect
        self._settings = settings
        self._pipeline = pipeline or PipelineSettings(limits=LIMITS)
        self._say = say
        # Ids count from 1: a run can be repeated.
        self._cluster = Cluster(coordinator, clock=lambda: 0.0, program=program or THIS)
        self._capacity = Capacity(MOUNTS_MAX)
        self._timer = PeriodicTimer(TICK_SECONDS)
        self.owned_logs: list[OwnedLog[Pipeline]] = []
        self.versions = None if program is None else VersionCheck(self._cluster, name, 0, program)
        self._registration = (
            Registration(self._cluster, self.meta, is_alive=is_alive)
            if self.versions is None
            else Registration(self._cluster, self.meta, is_alive=is_alive, check_servers=self.versions.check_servers)
        )
        self._detector = (
            None
            if open_probe is None
            else FailureDetector(
                self._cluster, name, open_probe=open_probe, ask_storage=self._ask_storage, is_alive=is_alive
            )
        )
        self._election = Election(self._cluster, name, meta.partitions, self._detector)
        self.owner: PartitionOwner = PartitionOwner(
            self._cluster,
            meta,
            self._registration,
            make_owned_log=self._make_owned_log,
            is_gone=(lambda server: False) if self._detector is None else self._detector.is_gone,
            names=ClientNames(coordinator, clock=lambda: 0.0),
        )
        if self.versions is not None:
            self.versions.on_rise = self.owner.check_storages
        self.authorizer = authorizer or Authorizer.free()
        self._policy = None if authorizer is None else PolicyFollower(self._cluster, authorizer)
        self.clients = ClientRegistry()
        self.groups: GroupCoordinator | None = None if reach is None else self._make_group_coordinator(reach)
        if self.groups is not None:
            self.owner.needed_from = self.groups.needed_from
        self.calls = ServerCalls(self.owner, self.authorizer, self.clients, self.groups)
        self._tasks: list[asyncio.Task[None]] = []
        self._hosting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self.versions is not None:
            await self.versions.read()
            await self.versions.check_servers()
        await self.owner.read()
        await self._registration.announce()
        self._tasks = [
            self._task(self._registration.reconciler.run(), "registration"),
            self._task(self._election.reconciler.run(), "election"),
        ]
        if self.versions is not None:
            self._tasks.append(self._task(self.versions.reconciler.run(), "level"))
        if self.groups is not None:
            self._tasks.append(self._task(self.groups.run(), "groups"))
        if self._detector is not None:
            self._tasks.append(self._task(self._detector.run(), "failure detector"))
        if self._policy is not None:
            self._tasks.append(self._task(self._policy.reconciler.run(), "policy"))
        self._hosting = self._task(self.owner.run(), "ownership")

    def _make_group_coordinator(self, reach: Connect) -> GroupCoordinator:
        settings = ClientSettings(instance=f"server {self.name}", close_seconds=LOG_CLOSE_SECONDS)
        return GroupCoordinator(
            ClientLog(
                lambda: GroupLogClient([self.meta.listen], connect=reach, settings=settings),
                lambda: self.owner.group_log,
            ),
            partitions=self.owner.meta.partitions,
            find_pipeline=self.owner.pipeline,
            channels=lambda: self.authorizer.all_channels,
            owns_group_log=lambda: self.owner.group_log in self.owner.owned,
            on_fatal=self._on_fatal,
            say=self._say,
        )

    def _task(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{what} of {self.name}")
        tell_failure(task, self._on_fatal)
        return task

    async def drain(self, seconds: float) -> None:
        """Hand the partitions over, if another server can take them."""
        await self.owner.drain(seconds)

    async def stop(self) -> None:
        """Close in order what is left."""
        await self.owner.close()
        await self.end()

    @property
    def callers(self) -> int:
        return self._capacity.callers

    async def kill(self) -> None:
        """Stop without closing anything in order. Break the connections before."""
        await asyncio.gather(*[owned.close(hand_over=False) for owned in self.owned_logs])
        if self._hosting is not None:
            self._hosting.cancel()
        await self.end()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        tasks = [*self._tasks, self._hosting] if self._hosting is not None else self._tasks
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what the parts are given

    def _make_owned_log(
        self, partition: int, generation: int, previous_owner_alive: Callable[[], bool]
    ) -> OwnedLog[Pipeline]:
        settings, limits = self._settings, self._pipeline
        if partition == self.owner.meta.partitions:
            settings, limits = settings.of_group_log(lambda: self.owner.needed_from()), limits.of_group_log()
        owned: OwnedLog[Pipeline] = OwnedLog(
            partition,
            generation,
            cluster=self._cluster,
            connect=self._connect,
            settings=settings,
            timer=self._timer,
            make_pipeline=lambda session: Pipeline(session, limits, self._capacity, on_fatal=self._on_fatal),
            say=lambda sentence: self._say(f"partition {partition}: {sentence}"),
            previous_owner_alive=previous_owner_alive,
        )
        self.owned_logs = [one for one in self.owned_logs if not one.task.done()] + [owned]
        return owned

    async def _ask_storage(self, storage: StorageMeta, numbers: Sequence[int]) -> Sequence[int]:
        return await self._connect(storage).quiet(numbers)
