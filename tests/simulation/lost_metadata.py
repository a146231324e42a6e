"""A cluster whose coordinator loses every document, and an operator who puts them back: over real storages and real owners.

`Hands` is what `waltzctl` asks daemons for, without a network. `ruin` draws from a seed what happens before, what is saved
and when, and what is done about the loss; it fails when anything acknowledged is missing afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from tests.simulation.cell import KEY, Appender, Cell, cell
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.metadata import loading, rebuilding
from waltzctl.shell.change import Change
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView, StorageView
from waltzd.archive.store import Store
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.coordinator import Delete
from waltzd.cluster.documents import ClusterMeta, Membership, Ownership, ServerMeta, StorageMeta
from waltzd.cluster.metadata import SavedDocuments, read, read_documents, write
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import ChangedMeanwhile, Unsafe
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.server.session.owned import OwnedLog


class Hands(Daemons):
    def __init__(self, c: Cell, store: Store | None = None) -> None:
        super().__init__(None)
        self.cell = c
        self.store = store
        """What replicas are made out of, whatever place an order names."""
        self.silent: set[str] = set()
        """Storages that the tool cannot reach; owners can."""
        self.fenced = 0

    async def ask(
        self, meta: ClusterMeta, storages: Collection[StorageMeta], servers: Collection[ServerMeta]
    ) -> ClusterSnapshot:
        return ClusterSnapshot(
            meta=meta, leader=None, servers=(), storages=tuple([await self._view(one.name) for one in storages]),
            partitions=(PartitionView(partition=0, owner=None, generation=0, replicas={}, reported=None),),
        )  # fmt: skip

    async def _view(self, name: str) -> StorageView:
        storage = self.cell.storages[name]
        if storage.calls is None or name in self.silent:
            return StorageView(meta=storage.meta, reported=None, error=CannotConnect(f"{name} is down"))
        return StorageView(meta=storage.meta, reported=await storage.calls.describe(), error=None)

    async def fence(self, key: UUID, storage: StorageMeta, partition: int, session: int) -> ReplicaStatus:
        self.fenced += 1
        await asyncio.sleep(0)
        return await super().fence(key, storage, partition, session)

    @asynccontextmanager
    async def admin(self, _key: UUID, storage: StorageMeta) -> AsyncIterator[Any]:
        calls = self.cell.storages[storage.name].calls
        if calls is None:
            raise CannotConnect(f"{storage.name} is down")
        if (store := self.store) is not None:
            calls.restorer._open_store = lambda place: store
        yield SimpleNamespace(fence=calls.fence, restore=calls.restorer.restore)


async def saved_of(c: Cell) -> SavedDocuments:
    """By way of a file."""
    return read(write(await read_documents(Cluster(c.tree.connect()), moment="then")), "file")


def wipe(c: Cell) -> None:
    """The data of the coordinator is gone; who is connected to it notices nothing but that."""
    for path in sorted(c.tree._entries, key=lambda path: path.count("/") if path != "/" else -1, reverse=True):
        found = c.tree.find(path)
        assert found is not None
        c.tree.commit([Delete(path, found.version)], 0)


async def load(c: Cell, saved: SavedDocuments, hands: Hands | None = None) -> Change:
    cluster = Cluster(c.tree.connect())
    change = await loading(cluster, hands or Hands(c), saved, file="file", where="", who="test")
    return change


async def rebuild(c: Cell, hands: Hands | None = None, replicas: int = 3) -> Change:
    meta = ClusterMeta(name="test", key=KEY, partitions=1, created="now")
    storages = {name: one.meta for name, one in c.storages.items()}
    return await rebuilding(
        Cluster(c.tree.connect()), hands or Hands(c), meta, storages, replicas=replicas, where="", who="test"
    )


async def carry_out(c: Cell, change: Change) -> None:
    if change.plan.refusals:
        raise Unsafe("; ".join(change.plan.refusals))
    await change.do(Cluster(c.tree.connect()), lambda *_: None)


async def next_generation(c: Cell) -> int:
    """As the leader gives the partition to a server."""
    assignment, version = await c.cluster.assignment()
    generation = assignment.owners[0].generation + 1
    await c.cluster.save_assignment(type(assignment)(owners=(Ownership("server", generation),)), version)
    return generation


@dataclass
class Course:
    """What happened before the loss, and what has to be there after it."""

    c: Cell
    pick: random.Random
    acknowledged: dict[int, bytes] = field(default_factory=dict)
    owned: OwnedLog[Appender] | None = None
    generation: int = 0
    saved: SavedDocuments | None = None
    told: list[str] = field(default_factory=list)

    async def own(self) -> Appender:
        self.generation += 1
        self.owned = await self.c.own(self.generation)
        return await self.c.opened(self.owned)

    async def append(self, count: int) -> None:
        """What is acknowledged has to stay; the rest may."""
        assert self.owned is not None
        pipeline = self.owned._pipeline
        if pipeline is None:
            return
        session = pipeline.session.session
        first = pipeline.session.cache.next_id
        last = pipeline.append(count)
        try:
            async with asyncio.timeout(0.2):
                await pipeline.committed(last)
        except TimeoutError:
            last = pipeline.session.committed
        for number in range(first, last + 1):
            self.acknowledged[number] = f"{session}:{number}".encode()

    async def leave(self) -> None:
        if self.owned is not None:
            await self.owned.close(hand_over=self.pick.random() < 0.4)
            self.owned = None

    async def step(self) -> None:
        c, pick = self.c, self.pick
        down = [name for name, one in c.storages.items() if one.calls is None]
        what = pick.choice(["append", "append", "own", "kill", "start", "move", "save", "rest"])
        self.told.append(what)
        if what == "append" and self.owned is not None:
            await self.append(pick.randrange(1, 12))
        elif what == "own" and not down:
            await self.leave()
            await self.own()
        elif what == "kill" and not down:
            c.storages[pick.choice(sorted(c.storages))].kill()
        elif what == "start" and down:
            await c.storages[down[0]].start()
            await asyncio.sleep(pick.choice((0.05, 2.0)))
        elif what == "move" and not down and self.owned is not None:
            names = pick.sample(sorted(c.storages), 3)
            roles, version = await c.cluster.replica_set(0)
            if all(role is Membership.MEMBER for role in roles.values()):
                wanted = {**{name: roles.get(name, Membership.LEARNER) for name in names}, **dict.fromkeys(
                    [name for name, role in roles.items() if role is Membership.MEMBER][: pick.randrange(2)],
                    Membership.MEMBER)}  # fmt: skip
                if sum(role is Membership.MEMBER for role in wanted.values()) >= 1:
                    await c.cluster.save_replica_set(0, wanted, version)
                    await asyncio.sleep(pick.choice((0.05, 1.0, 8.0)))
        elif what == "save":
            self.saved = await saved_of(c)
        else:
            await asyncio.sleep(pick.choice((0.01, 0.5, 12.0)))


async def ruin(seed: int) -> str:
    """What came of it: "load", "rebuild", or why it was refused."""
    pick = random.Random(seed)
    async with cell(4, members=3) as c:
        course = Course(c, pick)
        await course.own()
        await course.append(20)
        course.saved = await saved_of(c)
        for _ in range(pick.randrange(3, 25)):
            await course.step()
        is_running = course.owned is not None and pick.random() < 0.5
        if not is_running:
            await course.leave()
        wipe(c)
        for one in c.storages.values():
            if one.calls is None:
                await one.start()
            elif pick.random() < 0.3:
                one.kill()
                await one.start()
        if is_running:
            await course.append(5)
        hands = Hands(c)
        how = pick.choice(["load", "load", "rebuild"])
        if how == "load" and pick.random() < 0.4:
            hands.silent = set(pick.sample(sorted(c.storages), pick.randrange(1, 3)))
        try:
            await _restored(course, how, hands, is_running=is_running)
        except Unsafe as error:
            return f"refused: {error.message}"
        if course.owned is not None:
            await course.owned.close(hand_over=False)
        owned = await c.own(await next_generation(c))
        try:
            async with asyncio.timeout(120):
                while owned._pipeline is None:
                    await asyncio.sleep(0.5)
        except TimeoutError:
            return f"waits: {owned.describe().waiting}"
        check(course, owned)
        return how


async def _restored(course: Course, how: str, hands: Hands, *, is_running: bool) -> None:
    c, saved = course.c, course.saved
    assert saved is not None
    for _ in range(3):
        change = await (load(c, saved, hands) if how == "load" else rebuild(c, hands))
        if is_running and course.pick.random() < 0.7:
            await course.append(3)  # after it was looked at
        try:
            await carry_out(c, change)
        except ChangedMeanwhile:
            continue
        except WaltzError as error:
            if not isinstance(error, Unsafe) and is_running:
                continue
            raise
        if is_running:
            await course.append(4)  # by an owner that does not know it yet
        return
    raise Unsafe("it changed again and again")


def check(course: Course, owned: OwnedLog[Appender]) -> None:
    pipeline = owned._pipeline
    assert pipeline is not None
    mark = pipeline.session.low_mark
    records = max((one.records() for one in course.c.storages.values() if one.calls is not None and
                   0 in [replica.number for replica in one.calls.directory.partitions()]), key=len)  # fmt: skip
    for number, payload in course.acknowledged.items():
        assert number <= mark, f"id {number} was acknowledged, and the log goes on behind {mark}: {course.told}"
        assert payload in records[number], f"id {number} is {records[number]!r}, not {payload!r}: {course.told}"
