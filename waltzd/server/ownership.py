"""The partitions of this server: from the assignment to logs that run, and to the pipelines that callers ask for.

Each partition has a task of its own, which follows the assignment. It opens the log under the generation that this server
was given, closes it when the assignment changes, and never runs two logs at a time. So a partition that is slow to close
delays no other partition. Without the coordinator nothing new is begun; logs that run go on as long as their storages
accept them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import NoReturn

from waltzd.cluster.assignment import UNOWNED, format_numbers
from waltzd.cluster.clients import ClientNames
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Assignment, ClusterMeta, ServerMeta
from waltzd.errors import CannotConnect, NoSuchPartition, NotReady, WaltzError
from waltzd.errors.operations import NotOwner
from waltzd.protocol.batches import PartitionLocation, ServerAddress, Topology
from waltzd.protocol.descriptions import OwnedPartition
from waltzd.server.clients.pipeline import Pipeline
from waltzd.server.election import check_length
from waltzd.server.reconcile import Reconciler
from waltzd.server.registration import Registration
from waltzd.server.session.change_signal import ChangeSignal
from waltzd.server.session.owned import OwnedLog

log = logging.getLogger("waltz.server")
CLOSE_SECONDS = 10.0
"""Time for a log to be handed over. Each of its waits has a shorter deadline."""


class _AssignedPartition:
    """One partition that is assigned to this server, or still running here."""

    def __init__(self) -> None:
        self.wanted: int | None = None
        """Generation under which it is assigned to this server; None if it is not."""
        self.previous_owner_alive: Callable[[], bool] = lambda: False
        self.owned: OwnedLog[Pipeline] | None = None
        self.generation: int | None = None
        """Generation of `owned`; None while there is no log."""
        self.signal = ChangeSignal()
        """Notified when the assignment changes, or the log has ended."""

    def want(self, generation: int | None, *, previous_owner_alive: Callable[[], bool] = lambda: False) -> None:
        self.wanted, self.previous_owner_alive = generation, previous_owner_alive
        self.signal.notify()


class PartitionOwner:
    def __init__(
        self,
        cluster: Cluster,
        meta: ClusterMeta,
        registration: Registration,
        *,
        make_owned_log: Callable[[int, int, Callable[[], bool]], OwnedLog[Pipeline]],
        is_gone: Callable[[ServerMeta], bool] = lambda server: False,
        close_seconds: float = CLOSE_SECONDS,
        names: ClientNames | None = None,
    ) -> None:
        """`make_owned_log` gets a partition, its generation, and whether its former owner is alive. `is_gone`: whether
        nothing listens at the address of a listed server. `names`: known names of applications."""
        self._is_gone = is_gone
        self.meta = meta
        self.name = registration.server.name
        self.reconciler = Reconciler("ownership", wait=cluster.wait_for_assignment, act=self._look_at_assignment)
        """Follows the list of servers, in a task of its own because a hand-over must not wait until all servers were
        read."""
        self.servers_reconciler = Reconciler("topology", wait=cluster.wait_for_servers, act=self._look_at_servers)
        self.ids_reconciler = Reconciler("client ids", wait=cluster.wait_for_counter, act=self._look_at_counter)
        """Follows the counter of client ids, for the caller that runs it. A server creates a lost counter anew at once,
        because a server that starts later could not know its value."""
        self._cluster = cluster
        self._names = names or ClientNames(cluster.coordinator)
        self._registration = registration
        self._make_owned_log = make_owned_log
        self._close_seconds = close_seconds
        self.needed_from: Callable[[], int] = lambda: 0
        """Return the first id of the group log that its readers here need. Before there is a reader, all of it."""
        self._assignment: Assignment | None = None
        self._servers: dict[str, ServerMeta] = {}
        self._topology: Topology | None = None
        self._assigned: dict[int, _AssignedPartition] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._is_closing = False
        self._changed = ChangeSignal()
        """Notified when documents were read, and when a partition is no longer here."""

    # -- lifecycle ------------------------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read the documents once before this server announces itself, so that it knows the former owners of its
        partitions."""
        await self._cluster.read_counter()
        await self._read_servers()
        await self._read_assignment()

    async def run(self) -> None:
        """Run until `close`. An internal error in any log ends it with that error."""
        async with asyncio.TaskGroup() as self._tasks:
            watching = [
                self._tasks.create_task(one.run(), name=one.name) for one in (self.reconciler, self.servers_reconciler)
            ]
            while not self._is_closing or self._assigned:
                seen = self._changed.version
                await self._changed.wait(seen)
            for task in watching:
                task.cancel()

    async def drain(self, seconds: float) -> bool:
        """Give all partitions to other servers, as far as there are any; return whether none is left here."""
        await self._registration.change(is_draining=True)
        try:
            async with asyncio.timeout(seconds):
                while self._assigned and self._has_successor():
                    seen = self._changed.version
                    await self._changed.wait(seen)
        except TimeoutError:
            log.warning("no server took over partitions %s within %g seconds", format_numbers(self.owned), seconds)
        return not self._assigned

    async def close(self) -> None:
        """Close all remaining partitions in order."""
        self._is_closing = True
        for assigned in self._assigned.values():
            assigned.want(None)
        self._changed.notify()
        while self._assigned:
            seen = self._changed.version
            await self._changed.wait(seen)

    def _has_successor(self) -> bool:
        return any(name != self.name and not server.is_draining for name, server in self._servers.items())

    def check_storages(self, check: Callable[[str, str], None]) -> None:
        """Cut off each replica whose storage `check` refuses, by its name and version: the level of the cluster rose."""
        for assigned in self._assigned.values():
            if assigned.owned is not None:
                assigned.owned.check_storages(check)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def is_degraded(self) -> bool:
        """Return whether the coordinator does not answer: documents may be out of date, and nothing new is begun."""
        return not self._cluster.coordinator.is_connected

    @property
    def owned(self) -> list[int]:
        """Partitions that are here, including those that are being opened or handed over."""
        return sorted(self._assigned)

    @property
    def logs(self) -> int:
        """Number of logs in the cluster: the partitions, and the group log if there is one."""
        return self.meta.partitions if self._assignment is None else len(self._assignment.owners)

    def describe(self) -> tuple[OwnedPartition, ...]:
        """Return the state of all partitions that are here. With hundreds of them it takes tens of milliseconds."""
        return tuple(owned.describe() for owned in self._owned_logs())

    def describe_troubled(self) -> tuple[OwnedPartition, ...]:
        """Return the state of the partitions of which a person has to know."""
        return tuple(owned.describe() for owned in self._owned_logs() if owned.is_troubled)

    @property
    def is_backing_up(self) -> bool:
        """Return whether a partition of this server is backed up."""
        return any(owned.is_backed_up for owned in self._owned_logs())

    def _owned_logs(self) -> Iterator[OwnedLog[Pipeline]]:
        for partition in self.owned:
            if (owned := self._assigned[partition].owned) is not None:
                yield owned

    def topology(self) -> Topology:
        if self._topology is None:
            raise NotReady(f"server {self.name} has just started and does not know yet who owns what")
        return self._topology

    @property
    def group_log(self) -> int | None:
        """Number of the group log; None while there is none."""
        return None if self._topology is None or self._topology.groups is None else self._topology.group_log

    @property
    def client_secret(self) -> bytes:
        return self._cluster.client_secret

    @property
    def newest_client(self) -> int:
        return self._cluster.newest_client

    async def register(self) -> int:
        """Return a new client number."""
        if self.is_degraded:
            raise CannotConnect(
                "client ids come from the coordinator, which does not answer",
                not_done="no client id was given out",
                next_step="try again; clients that have an id go on meanwhile",
            )
        return await self._cluster.new_client_number()

    async def raise_epoch(self, name: str) -> int:
        return await self._names.raise_epoch(name)

    async def newest_epoch(self, name: str) -> int:
        return await self._names.newest_epoch(name)

    def pipeline(self, partition: int, generation: int | None) -> Pipeline:
        """Return the pipeline of a partition that this server owns, under this generation if one is given."""
        topology = self.topology()
        is_group_log = partition == self.meta.partitions and topology.groups is not None
        if not 0 <= partition < self.meta.partitions and not is_group_log:
            raise NoSuchPartition(
                f"there is no partition {partition}: the cluster has {self.meta.partitions}", partition=partition
            )
        place = topology.place(partition)
        assigned = self._assigned.get(partition)
        if assigned is None or assigned.wanted is None:
            self._refuse(partition, place)
        if generation is not None and generation != assigned.wanted:
            self._refuse_generation(partition, generation, place)
        if assigned.owned is None or assigned.generation != assigned.wanted:
            raise NotReady(f"partition {partition} is being taken over by server {self.name}", partition=partition)
        return assigned.owned.pipeline

    def _refuse(self, partition: int, place: PartitionLocation) -> NoReturn:
        if place.server is None:
            raise NotOwner(
                f"no server owns partition {partition} at the moment", partition=partition, generation=place.generation
            )
        if place.server == self.name and self._is_closing:
            raise NotOwner(f"server {self.name} is closing partition {partition}", partition=partition)
        if place.server == self.name:
            raise NotReady(f"partition {partition} is being taken over by server {self.name}", partition=partition)
        raise NotOwner(
            f"partition {partition} belongs to server {place.server}",
            partition=partition,
            generation=place.generation,
            owner=place.server,
            **({} if place.address is None else {"address": place.address}),
        )

    def _refuse_generation(self, partition: int, generation: int, place: PartitionLocation) -> NoReturn:
        if generation > place.generation:  # the caller is newer than we are, and our answer would not help
            raise NotOwner(
                f"server {self.name} does not know of generation {generation} of partition {partition} yet",
                partition=partition,
            )
        raise NotOwner(
            f"partition {partition} has generation {place.generation}, not {generation}",
            partition=partition,
            generation=place.generation,
            owner=self.name,
            address=self._registration.server.listen,
        )

    # -- following the assignment --------------------------------------------------------------------------------------

    async def _look_at_assignment(self) -> None:
        before = self._assignment
        after = await self._read_assignment()
        if not self._is_closing:
            self._follow(before, after)
        self._changed.notify()

    async def _look_at_servers(self) -> None:
        await self._read_servers()
        self._changed.notify()

    async def _look_at_counter(self) -> None:
        await self._cluster.read_counter()

    async def _read_assignment(self) -> Assignment:
        assignment, _ = await self._cluster.assignment()
        check_length(assignment, self.meta.partitions)
        self._assignment = assignment
        self._place()
        return assignment

    async def _read_servers(self) -> None:
        servers = await self._cluster.servers()
        if not servers:
            await self._cluster.meta()  # raises if all documents are lost: then known owners stay in the topology
        self._servers = servers
        self._place()

    def _place(self) -> None:
        if self._assignment is None:
            return
        servers, number = self._servers, self.meta.partitions
        places = tuple(
            PartitionLocation(
                generation=ownership.generation,
                server=ownership.server,
                address=servers[ownership.server].listen if ownership.server in servers else None,
            )
            for ownership in self._assignment.owners
        )
        self._topology = Topology(
            cluster=self.meta.name,
            cluster_key=self.meta.key,
            places=places[:number],
            groups=next(iter(places[number:]), None),
            servers=tuple(ServerAddress(name, server.listen, server.streams or "") for name, server in servers.items()),
        )

    def _follow(self, before: Assignment | None, after: Assignment) -> None:
        assert self._tasks is not None, "`run` follows"
        known = () if before is None else before.owners
        for partition, (was, now) in enumerate(zip_longest(known, after.owners, fillvalue=UNOWNED)):
            wanted = now.generation if now.server == self.name else None
            assigned = self._assigned.get(partition)
            if wanted is None and assigned is None:
                continue
            if assigned is None:
                assigned = self._assigned[partition] = _AssignedPartition()
                self._tasks.create_task(self._hold(partition, assigned), name=f"partition {partition}")
            if assigned.wanted != wanted:
                previous = None if was.server is None or was.server == self.name else self._servers.get(was.server)
                assigned.want(wanted, previous_owner_alive=partial(self._is_alive, previous))

    def _is_alive(self, server: ServerMeta | None) -> bool:
        return server is not None and not self._is_gone(server)

    async def _hold(self, partition: int, assigned: _AssignedPartition) -> None:
        try:
            while assigned.wanted is not None:
                await self._hold_one_generation(partition, assigned, assigned.wanted)
        finally:
            del self._assigned[partition]
            self._changed.notify()

    async def _hold_one_generation(self, partition: int, assigned: _AssignedPartition, generation: int) -> None:
        owned = self._make_owned_log(partition, generation, assigned.previous_owner_alive)
        log.info("partition %d: taken over in generation %d", partition, generation)
        await owned.start()
        assigned.owned, assigned.generation = owned, generation
        owned.task.add_done_callback(lambda _: assigned.signal.notify())
        try:
            while assigned.wanted == generation:
                seen = assigned.signal.version
                if owned.task.done():
                    owned.task.result()
                    raise AssertionError(f"the log of partition {partition} ended by itself")
                await assigned.signal.wait(seen)
            await self._close(partition, owned)
        finally:
            assigned.owned = assigned.generation = None
            owned.task.cancel()  # has an effect only after a cancellation or an internal error
        log.info("partition %d: generation %d is closed here", partition, generation)

    async def _close(self, partition: int, owned: OwnedLog[Pipeline]) -> None:
        try:
            async with asyncio.timeout(self._close_seconds):
                await owned.close(hand_over=True)
                return
        except (TimeoutError, WaltzError) as error:
            log.warning(
                "partition %d: not handed over in order (%s); closing it at once", partition, error or "it took too long"
            )
        # A log that cannot even be closed at once is an internal error that ends the process: it would compete with the
        # next owner for the partition.
        async with asyncio.timeout(self._close_seconds):
            await owned.close(hand_over=False)
