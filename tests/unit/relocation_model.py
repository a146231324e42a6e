"""A cluster in memory in which replicas move: the real tool over owners and storages that are a few numbers each.

Everything happens in one thread and one call at a time: a tool stops before and after each call to the coordinator or a
daemon, and what happens there is drawn from a seed. Logs are prefixes of one history, so a replica is how far it goes; a
session opens as `waltzd.server.core.recovery` lets it, and its owner does what `waltzd.server.session.session` does. After
every step it must still be possible to get back all that was committed, once everybody is up.
"""

from __future__ import annotations

import types
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, TypeVar
from uuid import UUID

from waltzctl.placement.daemons import Daemons
from waltzctl.shell.change import ConfirmOptions, recorded
from waltzctl.shell.safety import Plan, margin
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView, StorageView
from waltzd.cluster.cluster import MOVES, NO_VERSION, STORAGES, Cluster, partition_path, replicas_path
from waltzd.cluster.coordinator import Change, Create, Set
from waltzd.cluster.documents import (
    ClusterMeta,
    Decision,
    Membership,
    Moves,
    PartitionMeta,
    ReplicaSet,
    ReplicaSets,
    ReplicaState,
    StorageMeta,
)
from waltzd.cluster.memory import MemoryTree
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import ChangedMeanwhile
from waltzd.protocol.descriptions import OwnedPartition, OwnedReplica, PartitionDescription, StorageDescription
from waltzd.protocol.document import decode, encode
from waltzd.protocol.quorum import EMPTY, majority, reached

KEY = UUID(int=7)
SERVER = "server"
DOCUMENTS_MAX = 20_000
SETTLED_STEPS = 12
"""How old a session is before it gives way to another one for the sake of a new member. Longer than a call of a tool."""
NEAR = 3
ASKED = ConfirmOptions(is_dry=False, yes=True, confirm=None, reason=None, override=None)
K = TypeVar("K")
R = TypeVar("R")
D = TypeVar("D", PartitionMeta, ReplicaSet, Moves)


class Violation(AssertionError):
    pass


class Killed(BaseException):
    """By kill -9: nothing more is done, not even in a `finally`."""


@types.coroutine
def _turn() -> Generator[None, None, None]:
    yield


_READ: dict[tuple[str, bytes], Any] = {}


def _read(kind: type[D], data: bytes) -> D:
    """What a document means. To take the same one apart again and again would be most of the time."""
    key = kind.__name__, data
    if key not in _READ:
        if len(_READ) > DOCUMENTS_MAX:
            _READ.clear()
        _READ[key] = decode(kind, data, "/")
    found: D = _READ[key]
    return found


class QuickCluster(Cluster):
    async def replica_set(self, partition: int) -> tuple[Mapping[str, Membership], int]:
        node = await self.coordinator.get(replicas_path(partition))
        assert node is not None
        return _read(ReplicaSet, node.data).replicas, node.version

    async def each(self, keys: Iterable[K], ask: Callable[[K], Awaitable[R]]) -> list[R]:
        """One after the other: there is no loop here."""
        return [await ask(key) for key in keys]

    async def moves(self) -> tuple[Moves, int]:
        node = await self.coordinator.get(MOVES)
        return (Moves(partitions={}), NO_VERSION) if node is None else (_read(Moves, node.data), node.version)

    async def partition(self, partition: int) -> tuple[PartitionMeta | None, int]:
        node = await self.coordinator.get(partition_path(partition))
        return (None, NO_VERSION) if node is None else (_read(PartitionMeta, node.data), node.version)


@dataclass
class Disk:
    """One replica on one storage: it holds the log up to `held`, and was level with session `session` before that."""

    incarnation: UUID
    held: int = EMPTY
    session: int = 0


class Tool(Daemons):
    """One run of `waltzctl`."""

    def __init__(self, world: World, name: str, act: Callable[[Tool], Coroutine[Any, Any, Plan | None]]) -> None:
        super().__init__(None)
        self.world, self.name = world, name
        self.act = act
        self.cluster = QuickCluster(world.tree.connect())
        self.saw: dict[int, frozenset[str]] = {}
        """Who was level when it looked last, of partitions that were opened before."""
        self.is_killed = False
        self.result: Plan | None = None
        self.error: WaltzError | None = None
        self._run: Coroutine[Any, Any, Plan | None] | None = act(self)

    @property
    def is_over(self) -> bool:
        return self._run is None

    def step(self) -> None:
        """Up to the next call of something else."""
        assert self._run is not None
        before = self.world.sets
        self.world.current = self
        try:
            self._run.send(None)
        except StopIteration as end:
            self.result, self._run = end.value, None
        except WaltzError as error:
            self.error, self._run = error, None
        finally:
            self.world.current = None
        self.world.check_replicas(before, self)

    def kill(self) -> None:
        assert self._run is not None
        self.is_killed, self.world.current = True, self
        try:
            self._run.throw(Killed())
        except Killed:
            self._run = None
        finally:
            self.world.current = None
        assert self._run is None, "it went on after it was killed"

    @property
    def outcome(self) -> str:
        if self.is_killed:
            return "killed"
        return "done" if self.error is None else f"{self.error.code} {self.error.message}"

    # -- what it does to its cluster

    def recorded(self, plan: Plan) -> Any:
        return recorded(self.cluster, plan, ASKED)

    # -- `waltzctl.placement.daemons.Daemons`

    async def take_snapshot(self, _cluster: Cluster) -> ClusterSnapshot:
        world = self.world
        storages = world.storages
        sets, moves = world.sets, world.moves
        await world.pause()
        self.saw = {
            owner.partition: frozenset(owner.counts) if owner.is_open else frozenset()
            for owner in world.owners
            if owner.meta.opened > 0
        }
        views = tuple(world.storage_view(storages[name]) for name in sorted(storages))
        partitions = tuple(owner.view(sets) for owner in world.owners)
        await world.pause()
        return ClusterSnapshot(
            meta=world.meta, leader=SERVER, servers=(), storages=views, partitions=partitions, moves=moves.partitions
        )

    @asynccontextmanager
    async def admin(self, _key: UUID, storage: StorageMeta) -> AsyncIterator[Any]:
        yield types.SimpleNamespace(remove_partitions=partial(self._remove_partitions, storage))

    async def _remove_partitions(
        self, storage: StorageMeta, numbers: Sequence[int], *, delete_files: bool
    ) -> dict[int, WaltzError | None]:
        world = self.world
        await world.pause()
        if storage.name not in world.up:
            raise CannotConnect(f"{storage.name} does not answer")
        for number in numbers:
            world.disks.pop((storage.name, number), None)
        world.say(f"{self.name} clears {numbers} off {storage.name}")
        world.check()
        await world.pause()
        return dict.fromkeys(numbers)

    async def pause(self) -> None:
        await self.world.pause()


class Owner:
    """Of one partition. It acts on the list of replicas that it has seen, which may be an old one."""

    def __init__(self, world: World, partition: int) -> None:
        self.world, self.partition = world, partition
        self.is_up, self.haste = True, 1.0
        self.is_taken = False
        """It has a session of its own."""
        self.is_open = False
        self.roles, self.roles_version = world.roles(partition)
        self.meta = PartitionMeta(generation=1, session=0)
        self.version = NO_VERSION
        self.committed = self.last_id = EMPTY
        self.opened_at = 0

    @property
    def names(self) -> list[str]:
        return sorted({*self.roles, *self.meta.members})

    def notice(self) -> None:
        self.roles, self.roles_version = self.world.roles(self.partition)

    def disk(self, name: str) -> Disk | None:
        """Of a replica that answers. An assigned storage that has nothing gets an empty replica."""
        world, place = self.world, (name, self.partition)
        if name not in world.storages or name not in world.up or place in world.offline:
            return None
        if place not in world.disks and name in self.roles:
            world.disks[place] = Disk(world.new_incarnation())
        return world.disks.get(place)

    @property
    def joined(self) -> dict[str, Disk]:
        """Whose acknowledgements count, as far as they are what they were."""
        found = {}
        for name in self.meta.joined:
            disk = self.world.disks.get((name, self.partition))
            if disk is not None and self.meta.replicas[name].incarnation == disk.incarnation:
                found[name] = disk
        return found

    @property
    def counts(self) -> set[str]:
        return {
            name
            for name, disk in self.joined.items()
            if self.disk(name) is disk and disk.session == self.meta.session and disk.held + NEAR >= self.last_id
        }

    def crash(self) -> None:
        """Its server is gone; another one takes over soon, or much later."""
        self.is_up = self.is_taken = self.is_open = False
        self.haste = self.world.random.choice((0.3, 0.01))

    def save(self, meta: PartitionMeta, roles: Mapping[str, Membership] | None = None) -> bool:
        path, data = partition_path(self.partition), encode(meta)
        changes: list[Change] = [Create(path, data) if self.version == NO_VERSION else Set(path, data, self.version)]
        if roles is not None:
            changes.append(Set(replicas_path(self.partition), encode(ReplicaSet(roles)), self.roles_version))
        try:
            self.world.tree.commit(changes, 0)
        except ChangedMeanwhile:
            self.is_taken = self.is_open = False
            return False
        self.meta, self.version = meta, self.version + 1
        if roles is not None:
            self.notice()
        return True

    # -- one event

    def act(self) -> None:
        if not self.is_up:
            self.is_up = self.world.random.random() < self.haste
            return
        if self.world.random.random() < 0.7:
            self.notice()
        if not self.is_taken:
            self.is_taken = self.save(replace(self.meta, session=self.meta.session + 1))
        elif self.is_open:
            self._serve()
        elif self.meta.decision is None:
            mark = self.decide()
            if mark is not None:
                self._close(mark)
        else:
            self._settle(self.meta.decision.mark)

    def decide(self) -> int | None:
        """The closing mark of the session that was opened last, from who answers now."""
        meta = self.meta
        answering = {name: disk for name in self.names if (disk := self.disk(name)) is not None}
        if meta.opened == 0:
            return EMPTY if self.roles and all(name in answering for name in self.roles) else None
        return self.world.vote(self.partition, meta, answering)

    def _close(self, mark: int) -> None:
        meta, world = self.meta, self.world
        if mark < world.committed[self.partition]:
            raise Violation(f"partition {self.partition} closes at {mark}, {world.committed[self.partition]} is committed")
        if self.save(replace(meta, decision=Decision(mark=mark, session=meta.session))):
            world.closings[self.partition, meta.opened] = mark

    def _settle(self, mark: int) -> None:
        """Some more is copied; the session opens when a majority of its members holds exactly the log."""
        world, session = self.world, self.meta.session
        disks = {name: disk for name in self.names if (disk := self.disk(name)) is not None}
        for disk in disks.values():
            world.begin(self.partition, disk, session)
        most = max((disk.held for disk in disks.values()), default=EMPTY)
        mine = {name: disk for name, disk in disks.items() if name in self.roles}
        for disk in mine.values():
            disk.held = min(mark, most, disk.held + world.random.randint(1, 6))
        level = [name for name, disk in sorted(mine.items()) if disk.held == mark]
        members = tuple(name for name in sorted(self.roles) if self.roles[name] is Membership.MEMBER or name in level)
        if not members or len(level) < majority(len(members)) or world.random.random() < 0.3:
            return
        roles = {name: Membership.MEMBER if name in members else role for name, role in self.roles.items()}
        states = {name: ReplicaState(session=session, closing=None, incarnation=mine[name].incarnation) for name in level}
        opened = PartitionMeta(
            generation=1, session=session, opened=session, low_mark=mark, members=members, replicas=states
        )
        if self.save(opened, roles if roles != self.roles else None):
            self.is_open, self.committed, self.last_id, self.opened_at = True, mark, mark, world.steps
            world.say(f"partition {self.partition}: session {session} with {','.join(level)} of {','.join(members)}")

    def _serve(self) -> None:
        world, meta = self.world, self.meta
        disks = {name: disk for name in self.names if (disk := self.disk(name)) is not None}
        for disk in disks.values():
            world.begin(self.partition, disk, meta.session)
        near = [name for name, disk in sorted(disks.items()) if disk.held + NEAR >= self.last_id]
        left = [name for name in meta.members if name not in self.roles]
        is_settled = world.steps - self.opened_at > SETTLED_STEPS
        if left or (is_settled and any(name in self.roles and name not in meta.members for name in near)):
            self._end()
            return
        for name in near:
            state = meta.replicas.get(name)
            if name in meta.members and name not in meta.joined and (state is None or state.session != meta.session):
                states = {
                    **meta.replicas,
                    name: ReplicaState(session=meta.session, closing=None, incarnation=disks[name].incarnation),
                }
                self.save(replace(meta, replicas=states))
                return
        self._write(disks)

    def _write(self, disks: Mapping[str, Disk]) -> None:
        world = self.world
        before = self.last_id
        if world.random.random() < 0.6:
            self.last_id += world.random.randint(1, 2)
        for _, disk in sorted(disks.items()):
            more = self.last_id if disk.held == before and world.random.random() < 0.9 else disk.held + 4
            disk.held = min(self.last_id, more)
        marks = [disk.held for disk in self.joined.values()]
        self.committed = max(self.committed, reached(marks, len(self.meta.members)))
        world.committed[self.partition] = max(self.committed, world.committed[self.partition])

    def _end(self) -> None:
        """In order, where nothing is in flight; otherwise the next session has to find out."""
        self.is_taken = self.is_open = False
        if self.committed == self.last_id and self.world.random.random() < 0.8:
            self._close(self.committed)
            self.is_taken = False

    # -- what it says

    def view(self, sets: ReplicaSets) -> PartitionView:
        roles = sets.partitions.get(self.partition, {})
        reported = None
        if self.is_up:
            counts = self.counts if self.is_open else set()
            is_writable = len(counts) >= majority(max(1, len(self.meta.members)))
            reported = OwnedPartition(
                partition=self.partition, generation=1, session=self.meta.session,
                step="OPEN" if self.is_open else "VOTING",
                waiting="" if is_writable else "a majority is missing",
                committed=self.committed, last_id=self.last_id, low_mark=self.meta.low_mark, mounts=0, tail_bytes=0,
                replicas=tuple(self._replica(name, counts) for name in self.names),
            )  # fmt: skip
        return PartitionView(partition=self.partition, owner=SERVER, generation=1, replicas=roles, reported=reported)

    def _replica(self, name: str, counts: Collection[str]) -> OwnedReplica:
        disk = self.disk(name)
        return OwnedReplica(
            storage=name,
            role=str(self.roles.get(name, "leaving")),
            state="LIVE" if disk is not None else "DOWN",
            durable_id=disk.held if disk is not None else EMPTY,
            counts=name in counts,
            story="",
        )


@dataclass
class World:
    seed: int
    random: Random = field(init=False)
    trace: list[str] = field(default_factory=list)
    steps: int = 0
    current: Tool | None = None

    def __post_init__(self) -> None:
        self.random = random = Random(self.seed)
        self.tree = MemoryTree(self.pause)
        self.disks: dict[tuple[str, int], Disk] = {}
        self.offline: set[tuple[str, int]] = set()
        self.closings: dict[tuple[int, int], int] = {}
        self._incarnations = 0
        self._storages: tuple[tuple[str, ...], dict[str, StorageMeta]] = ((), {})
        self.count = random.choice((1, 1, 2))
        self.names = [f"s{number}" for number in range(1, random.randint(4, 6) + 1)]
        first = self.names[: random.randint(2, len(self.names) - 1)]
        self.up = set(self.names)
        self.committed = dict.fromkeys(range(self.count), EMPTY)
        self.meta = ClusterMeta(name="model", key=KEY, partitions=self.count, created="2026-01-01")
        replicas = random.choice((1, 1, 2, 3, 3, 4, 5))
        sets = {
            number: dict.fromkeys(sorted(random.sample(first, min(replicas, len(first)))), Membership.MEMBER)
            for number in range(self.count)
        }
        run_alone(
            Cluster.create(
                self.tree.connect(),
                self.meta,
                storages=[self.storage(name) for name in first],
                replicas=ReplicaSets(partitions=sets),
            )
        )
        self.owners = [Owner(self, number) for number in range(self.count)]
        for name in first:
            for number in range(self.count):
                if name in sets[number]:
                    self.disks[name, number] = Disk(self.new_incarnation())
        for _ in range(random.choice((0, 20, 40))):  # some partitions were never opened before an operator comes
            self.owners[random.randrange(self.count)].act()

    def storage(self, name: str) -> StorageMeta:
        number = self.names.index(name)
        group = f"g{(number + self.seed) % 3}" if self.seed % 2 else name
        return StorageMeta(name=name, listen=f"h:{2 * number + 1}", admin_listen=f"h:{2 * number + 2}", group=group)

    def say(self, sentence: str) -> None:
        self.trace.append(f"{self.steps}: {sentence}")

    def new_incarnation(self) -> UUID:
        self._incarnations += 1
        return UUID(int=self._incarnations)

    async def pause(self) -> None:
        tool = self.current
        if tool is None:
            return
        if tool.is_killed:
            raise Killed
        await _turn()
        if tool.is_killed:
            raise Killed

    # -- what is written down

    def _document(self, kind: type[D], path: str) -> D | None:
        entry = self.tree.find(path)
        return None if entry is None else _read(kind, entry.data)

    @property
    def sets(self) -> ReplicaSets:
        return ReplicaSets(partitions={number: self.roles(number)[0] for number in range(self.count)})

    def roles(self, partition: int) -> tuple[Mapping[str, Membership], int]:
        entry = self.tree.find(replicas_path(partition))
        assert entry is not None
        return _read(ReplicaSet, entry.data).replicas, entry.version

    @property
    def moves(self) -> Moves:
        return self._document(Moves, MOVES) or Moves(partitions={})

    @property
    def storages(self) -> dict[str, StorageMeta]:
        names = tuple(name for name in self.names if self.tree.find(f"{STORAGES}/{name}") is not None)
        if names != self._storages[0]:
            self._storages = names, {name: self.storage(name) for name in names}
        return self._storages[1]

    # -- what daemons do

    def begin(self, partition: int, disk: Disk, session: int) -> None:
        """It takes part in this session: what no session closed with is cut first."""
        if disk.session != session:
            disk.held, disk.session = self.sound(partition, disk), session

    def sound(self, partition: int, disk: Disk) -> int:
        """How far what it holds is the log. Of a session that was not closed yet, all of it may be."""
        return min(disk.held, self.closings.get((partition, disk.session), disk.held))

    @staticmethod
    def vote(_partition: int, meta: PartitionMeta, answering: Mapping[str, Disk]) -> int | None:
        """What a majority of the members can have acknowledged at most, when those who answer are sure of it."""
        needed = majority(len(meta.members))
        faithful = [
            disk.held
            for name in meta.joined
            if (disk := answering.get(name)) is not None and meta.replicas[name].incarnation == disk.incarnation
        ]
        if sum(name in answering for name in meta.members) < needed or len(meta.joined) - len(faithful) >= needed:
            return None
        return max([meta.low_mark, *faithful])

    def storage_view(self, meta: StorageMeta) -> StorageView:
        if meta.name not in self.up:
            return StorageView(meta=meta, reported=None, error=CannotConnect(f"{meta.name} does not answer"))
        held = sorted(number for name, number in self.disks if name == meta.name)
        reported = StorageDescription(
            cluster_key=KEY, partitions=self.count, directory="", version="", free_bytes=0, uptime_ms=0,
            is_draining=False, statistics=None,  # type: ignore[arg-type]
            assigned=tuple(
                PartitionDescription(partition=number, status=None, refused=None, story="", queued_bytes=0, disk_bytes=0)
                for number in held
            ),
        )  # fmt: skip
        return StorageView(meta=meta, reported=reported, error=None)

    # -- what must hold

    def check_replicas(self, before: ReplicaSets, tool: Tool) -> None:
        """A tool has changed the list: where a majority was level when it looked, one is, and of those who vote on the last
        session no more than one has left. Who fell silent since it looked is no mistake of the tool."""
        after = self.sets
        if after == before:
            return
        for owner in self.owners:
            number = owner.partition
            old, new = before.partitions.get(number, {}), after.partitions.get(number, {})
            if old == new:
                continue
            self.say(f"partition {number} on {' '.join(f'{name}:{role[0]}' for name, role in sorted(new.items()))}")
            level = {*tool.saw.get(number, ()), *(owner.counts if owner.is_open else ())}
            was, now = margin(number, old, level), margin(number, new, level)
            if was.spare >= 0 and now.spare < 0:
                raise Violation(
                    f"partition {number} had a majority of {old}, and has none of {new}; level: {sorted(level)}"
                )
            left = sorted(set(owner.meta.members) - set(new))
            if len(left) > 1 and number in tool.saw:
                raise Violation(
                    f"partition {number}: {' and '.join(left)} vote on session {owner.meta.opened}, and have left"
                )

    def check(self) -> None:
        """If everybody came back now, every partition would open with all that was committed, and what is on its way could
        arrive."""
        listed = self.storages
        for number, goal in self.moves.partitions.items():
            if gone := [name for name in goal if name not in listed]:
                raise Violation(f"partition {number} is to get a replica on {gone}, which nobody has")
        for owner in self.owners:
            number, meta = owner.partition, owner.meta
            if meta.opened == 0 and meta.decision is None:
                continue
            roles = self.sets.partitions.get(number, {})
            there = {
                name: disk
                for name in sorted({*roles, *meta.members})
                if name in listed and (disk := self.disks.get((name, number))) is not None
            }
            if meta.decision is None:
                mark = self.vote(number, meta, there)
                if mark is None:
                    raise Violation(f"partition {number}: those who vote on session {meta.opened} are gone: {meta.members}")
            else:
                mark = meta.decision.mark
                if max((self.sound(number, disk) for disk in there.values()), default=EMPTY) < mark:
                    raise Violation(f"partition {number}: nobody holds the log up to {mark} any more")
            if mark < self.committed[number]:
                raise Violation(f"partition {number}: {self.committed[number]} was committed, {mark} would be left")
            if not roles:
                raise Violation(f"partition {number} has no replica")


def run_alone(work: Coroutine[Any, Any, Any]) -> Any:
    """With nothing in between."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for somebody")
