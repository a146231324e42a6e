"""Drawn lives of a log that operators end: rescues, old storages that come back, documents put back, restores out of the
archive that are killed on the way, with archive, backup, retention, and readers whose positions are judged.

A seed decides what happens to one partition over three real storages. The judge knows only what was acknowledged and what
a rescue or a restore gave up. Rules, asked after each of them and at the end:

1. Each acknowledged transaction of the current timeline is in the log, under its id, on every replica or in the archive.
2. No transaction that was given up is anywhere in the log, or in what the current timeline names of the archive.
3. A reader's position is let in exactly where the transaction that it saw is still the log's.
4. What a storage held above a fork and leaves the log is on its disk, set aside.

`python -m tests.simulation.timeline_lives FIRST COUNT` runs seeds by hand.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import dataclass, field, replace
from uuid import UUID

from tests.simulation import lost_metadata
from tests.simulation.cell import Appender, Cell, story
from tests.simulation.faulty_store import Faults, FaultyStore
from tests.simulation.test_archive import archiving
from tests.simulation.test_archive_timelines import stored
from tests.simulation.test_rescue import Hands
from tests.simulation.test_retention import SMALL, keeping
from waltzctl.placement.backup import Source
from waltzctl.placement.restore import VERB, RestoreSpec, carry_out
from waltzctl.shell.safety import Plan
from waltzd.archive.cut_point import cut_at_marks, logs_in
from waltzd.archive.listing import label_of, newest_manifests
from waltzd.cluster.cluster import NO_VERSION, Cluster, partition_path, put
from waltzd.cluster.documents import PartitionMeta
from waltzd.cluster.metadata import SavedDocuments
from waltzd.errors import WaltzError
from waltzd.errors.operations import TargetNotEmpty
from waltzd.format.layout import aside_partition
from waltzd.protocol.document import encode
from waltzd.protocol.timelines import Lineage
from waltzd.server.session.owned import OwnedLog

PAYLOAD = 36
"""Where the payload begins in a record."""
SECONDS = 600.0
"""Virtual seconds that a log may take until it is open or level again."""


@dataclass
class Life:
    c: Cell
    store: FaultyStore
    random: random.Random
    owned: OwnedLog[Appender]
    generation: int = 1
    acknowledged: list[bytes] = field(default_factory=list)
    """Acknowledged transactions of the current timeline, by id."""
    given_up: set[bytes] = field(default_factory=set)
    readers: list[tuple[UUID, int, bytes]] = field(default_factory=list)
    """Timeline, id and transaction at which readers have stopped."""
    documents: list[PartitionMeta] = field(default_factory=list)
    """Documents of the partition as an operator saved them."""
    saved: SavedDocuments | None = None
    """All documents of the cluster as they were saved last."""
    rescues: int = 0
    story: list[str] = field(default_factory=list)
    """What has happened, for whoever reads a failure."""
    seeds: int = 1000

    # -- what happens

    async def pipeline(self) -> Appender:
        found: Appender = await self.c.until(
            lambda: pipeline if (pipeline := self.owned._pipeline) is not None and not pipeline.is_held else None,
            seconds=SECONDS,
        )
        return found

    async def append(self) -> None:
        for _ in range(self.random.randrange(1, 12)):
            pipeline = await self.pipeline()
            first_id, count = pipeline.session.cache.next_id, self.random.choice((1, 5, 20))
            session = pipeline.session.session
            await pipeline.committed(pipeline.append(count))
            assert first_id == len(self.acknowledged), "ids go on behind what was acknowledged"
            self.acknowledged += [f"{session}:{first_id + n}".encode() for n in range(count)]
            await asyncio.sleep(self.random.choice((0.0, 0.2, 3.0)))

    async def read(self) -> None:
        if self.acknowledged:
            id_ = self.random.randrange(len(self.acknowledged))
            self.readers.append(((await self.c.meta()).lineage.current, id_, self.acknowledged[id_]))

    async def rest(self) -> None:
        await asyncio.sleep(self.random.choice((1.0, 15.0, 60.0)))

    async def save_document(self) -> None:
        self.documents.append(await self.c.meta())
        self.saved = await lost_metadata.saved_of(self.c)

    async def crash_owner(self) -> None:
        self.owned.task.cancel()
        await asyncio.gather(self.owned.task, return_exceptions=True)
        self.generation += 1
        self.owned = await self.c.own(self.generation, settings=SETTINGS)

    async def restart_one(self) -> None:
        name = self.random.choice(list(self.c.storages))
        await self.c.restart(name)

    async def replace_one(self) -> None:
        """One disk is lost while the others are level: what a majority has stays."""
        await self.level()
        name = self.random.choice(list(self.c.storages))
        self.seeds += 1
        await self.c.restart(name, empty_disk=self.seeds)
        await self.level()

    async def disaster(self) -> None:
        """One storage is left, which may be behind; the others come back later, empty or as they were."""
        await self.level()
        names = list(self.c.storages)
        kept = self.random.choice(names)
        others = [name for name in names if name != kept]
        if self.random.random() < 0.7:
            self.c.storages[kept].kill()
            await self.append()
            if self.random.random() < 0.5:
                await self.rest()  # until what is given up then is archived
            for name in others:
                self.c.storages[name].kill()
            await self.c.storages[kept].start()
        else:
            for name in others:
                self.c.storages[name].kill()
        lost = [name for name in others if self.random.random() < 0.5]
        for name in lost:
            self.seeds += 1
            self.c.storages[name].lose_disk(seed=self.seeds)
        if self.random.random() < 0.3:
            await self.crash_owner()
        self.store.faults = Faults(refused=100 if self.random.random() < 0.4 else 0)  # the archive is away meanwhile
        await self.rescue()
        if self.random.random() < 0.3:
            await self.restore()
            return
        self.store.faults = Faults()
        if self.random.random() < 0.6:
            await self.append()
        for name in self.random.sample(others, len(others)):
            await self.c.storages[name].start()
            if self.random.random() < 0.4:
                await self.append()

    async def put_back(self) -> None:
        """An operator puts an older document of the partition back, over the newest; a rescue mends it."""
        if not self.documents:
            return
        await self.level()
        self.owned.task.cancel()
        await asyncio.gather(self.owned.task, return_exceptions=True)
        old = self.random.choice(self.documents)
        node = await self.c.cluster.coordinator.get(partition_path(0))
        version = NO_VERSION if node is None else node.version
        await self.c.cluster.coordinator.commit([put(partition_path(0), encode(old), version)])
        self.generation += 1
        self.owned = await self.c.own(self.generation, settings=SETTINGS)
        await asyncio.sleep(30)
        if self.owned.describe().step != "OPEN":
            await self.rescue(may_give_up=False)

    async def rescue(self, *, may_give_up: bool = True) -> None:
        hands = Hands(self.c)
        scene = await hands.scene()
        if scene.by_itself:
            return
        held = {name: self.on_disk(name) for name, storage in self.c.storages.items() if storage.calls is not None}
        done = await hands.carry_out(scene)
        assert may_give_up or done.mark + 1 >= len(self.acknowledged), "all storages answered: nothing had to be given up"
        self.given_up |= set(self.acknowledged[done.mark + 1 :])
        del self.acknowledged[done.mark + 1 :]
        self.rescues += 1
        pipeline = await self.c.until(
            lambda: one if (one := self.owned._pipeline) is not None and one.session.session > done.session else None,
            seconds=SECONDS,
        )
        # What was written and never acknowledged may have become part of the log.
        low_mark = (await self.c.meta()).low_mark
        log = self.on_disk(next(iter(held)))
        self.acknowledged += [log[id_] for id_ in range(len(self.acknowledged), low_mark + 1)]
        self.given_up -= set(self.acknowledged)
        assert pipeline.session.low_mark == low_mark
        self.judge()

    async def restore(self) -> None:
        """All disks and the coordinator are lost. The archive has what it had; an operator ends it there or before."""
        self.owned.task.cancel()
        await asyncio.gather(self.owned.task, return_exceptions=True)
        for storage in self.c.storages.values():
            if storage.calls is not None:
                storage.kill()
            self.seeds += 1
            storage.lose_disk(seed=self.seeds)
            await storage.start()
        self.store.faults = Faults()
        spec = await self.restore_spec()
        self.c.lose_coordinator()
        done = await self.restored(spec)
        mark = done.cut.points[0].mark
        self.given_up |= set(self.acknowledged[mark + 1 :])
        del self.acknowledged[mark + 1 :]
        assignment, _ = await self.c.cluster.assignment()
        self.generation = assignment.owners[0].generation + 1
        self.owned = await self.c.own(self.generation, settings=SETTINGS)
        await self.pipeline()
        await self.level()
        self.judge()

    async def restore_spec(self) -> RestoreSpec:
        """As `waltzctl cluster restore` makes it: the newest moment, an older one, or an older timeline that ended."""
        label = label_of(self.store, not_done="")
        log, older = logs_in(self.store, label, 1)[0], self.random.random() < 0.4
        now, lineage = await lost_metadata.saved_of(self.c), (await self.c.meta()).lineage
        is_told = log.tree.current == lineage.current  # else only documents of today tell that a timeline has ended
        newest = self.random.choice((now, self.saved, None)) if is_told else now
        source = Source(place="there", label=label, logs={0: log}, newest=newest, store=self.store)
        marks = {0: self.random.randrange(-1, log.last + 1)} if older else {0: log.last}
        cut = source.within_newest(cut_at_marks(source.logs, marks))
        return RestoreSpec(
            source=source, cut=cut, saved=newest, meta=await self.c.cluster.meta(),
            storages={name: storage.meta for name, storage in self.c.storages.items()},
            planned={0: tuple(self.c.storages)}, began="the first run", who="an operator",
        )  # fmt: skip

    async def restored(self, spec: RestoreSpec) -> RestoreSpec:
        """The command may be killed, and storages with it; the same command then goes on."""
        while self.random.random() < 0.5:
            command = asyncio.create_task(self.run_restore(spec))
            for _ in range(self.random.randrange(1, 120)):
                await asyncio.sleep(0)
            command.cancel()
            (found,) = await asyncio.gather(command, return_exceptions=True)
            if isinstance(found, RestoreSpec):
                return found
            assert isinstance(found, asyncio.CancelledError), found
            if self.random.random() < 0.5:
                await self.c.restart(self.random.choice(list(self.c.storages)))
        return await self.run_restore(spec)

    async def run_restore(self, spec: RestoreSpec) -> RestoreSpec:
        hands, plan = lost_metadata.Hands(self.c, self.store), Plan(verb=VERB, subject=spec.meta.name, steps=())
        try:
            return await carry_out(Cluster(self.c.tree.connect()), hands, spec, plan, lambda *_: None)
        except TargetNotEmpty:  # the command before was killed behind its last change: the cluster is complete
            return spec

    # -- what must hold

    def on_disk(self, name: str) -> dict[int, bytes]:
        """Transactions of a replica, from its floor on."""
        storage = self.c.storages[name]
        replica, out = self.c.replica(name), dict[int, bytes]()
        at = replica.first_id
        while at <= replica.last_id:
            run = replica.read(at, replica.last_id, 1 << 20, session=replica.promised_session)
            for id_ in range(run.first_id, run.last_id + 1):
                start, end = run.bounds[id_ - run.first_id], run.bounds[id_ - run.first_id + 1]
                out[id_] = transaction_in(bytes(run.data[start:end]))
            at = run.last_id + 1
        assert storage.calls is not None
        return out

    async def level(self) -> None:
        def all_level() -> bool:
            held = {self.c.last_id(name) for name in self.c.storages}
            return held == {len(self.acknowledged) - 1} and all(one.counts for one in self.owned.describe().replicas)

        await self.c.until(all_level, seconds=SECONDS)

    def judge(self) -> None:
        lineage = [self.c.replica(name).lineage for name in self.c.storages if self.c.last_id(name) > -2]
        newest = max(lineage, key=lambda one: one.number)
        for name in self.c.storages:
            if self.c.last_id(name) < 0 or self.c.replica(name).lineage != newest:
                continue
            for id_, found in self.on_disk(name).items():
                assert found not in self.given_up, f"{name}: {found!r} at id {id_} was given up"
                assert id_ >= len(self.acknowledged) or found == self.acknowledged[id_], f"{name}: id {id_}"
        for id_, found in self.archived(newest).items():
            if id_ < len(self.acknowledged):
                assert found == self.acknowledged[id_], f"the archive has {found!r} at id {id_}"
        for timeline, id_, seen in self.readers:
            is_there = id_ < len(self.acknowledged) and self.acknowledged[id_] == seen
            assert newest.covers(timeline, id_) == is_there, f"a reader at id {id_} of {timeline}"

    def archived(self, lineage: Lineage) -> dict[int, bytes]:
        """What this timeline has in the archive; nothing before its first upload."""
        faults, self.store.faults = self.store.faults, Faults()
        label = label_of(self.store, not_done="")
        manifest = newest_manifests(self.store, label, [0]).get(0)
        is_there = manifest is None or manifest.timeline == lineage.current
        found = {id_: transaction_in(record) for id_, record in stored(self.store).items()} if is_there else {}
        self.store.faults = faults
        return found

    async def end(self) -> None:
        for storage in self.c.storages.values():
            if storage.calls is None:
                await storage.start()
        await self.append()
        await self.level()
        await asyncio.sleep(300)  # until archive and backup have caught up
        await self.level()
        self.judge()
        archive = self.archived((await self.c.meta()).lineage)
        for name in self.c.storages:
            held = self.on_disk(name)
            missing = [id_ for id_, seen in enumerate(self.acknowledged) if held.get(id_, archive.get(id_)) != seen]
            assert not missing, f"{name} and the archive lack ids {missing[0]} to {missing[-1]}"
        self.check_set_aside()

    def check_set_aside(self) -> None:
        """What is set aside holds nothing but what stands nowhere else."""
        for name, storage in self.c.storages.items():
            folders = [entry.name for entry in storage.disk.list("storage") if aside_partition(entry.name) == 0]
            assert all(storage.disk.names(f"storage/{folder}") for folder in folders), f"{name}: an empty set-aside folder"


def transaction_in(record: bytes) -> bytes:
    """The text that an `Appender` wrote, without what fills it up."""
    return record[PAYLOAD:].partition(b".")[0]


SETTINGS = replace(SMALL, backup_seconds=10.0)
ACTIONS = {
    Life.append: 6, Life.read: 4, Life.rest: 3, Life.save_document: 2, Life.crash_owner: 1, Life.restart_one: 1,
    Life.replace_one: 1, Life.disaster: 2, Life.put_back: 1, Life.restore: 1,
}  # fmt: skip


@story
async def live(seed: int) -> None:
    pick = random.Random(f"timelines {seed}")
    store = FaultyStore()
    async with archiving(store) as c:
        await keeping(c, pick.choice(("all", "all", "5KB", "20KB")))
        life = Life(c, store, pick, await c.own(settings=SETTINGS))
        try:
            await _lived(life, pick)
        except BaseException as error:
            error.add_note(f"seed {seed}: {', '.join(life.story)}")
            raise


async def _lived(life: Life, pick: random.Random) -> None:
    await life.append()
    for _ in range(pick.randrange(4, 12)):
        (action,) = pick.choices(list(ACTIONS), list(ACTIONS.values()))
        life.story.append(action.__name__)
        await action(life)
    await life.end()


def main() -> int:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    failed = []
    for seed in range(first, first + count):
        try:
            live(seed)
        except (AssertionError, WaltzError, TimeoutError) as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error)[-600:]}", flush=True)
    print(f"{count} lives from seed {first} on, {len(failed)} not sound: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
