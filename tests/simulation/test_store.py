"""One owned partition over real keepers on simulated disks: sessions come and go, what was committed stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.storages import KEY, SimPort, SimStorage
from tests.unit.timeless import run
from waltzd.cluster import Cluster
from waltzd.coordinator import Set
from waltzd.coordinator_memory import MemoryTree
from waltzd.errors import CannotConnect, MetadataMissing, SessionEnded, WaltzError
from waltzd.finding import Finding
from waltzd.meta import ClusterMeta, ReplicaSets, Role, StorageMeta
from waltzd.operator_documents import replicas_path
from waltzd.record import encode_payloads
from waltzd.server.copying import SourceFailed
from waltzd.server.store import OpenSession, Store
from waltzd.server.store_settings import StoreSettings
from waltzd.server.ticker import Ticker

SETTINGS = StoreSettings(
    partitions=1, key=KEY, tail_bytes_max=20_000, retry_seconds=0.01, storage_seconds=1.0, hand_over_seconds=0.5
)


class Appender:
    """In the place of a pipeline: appends what it is told, and remembers what was committed."""

    def __init__(self, session: OpenSession) -> None:
        self.session = session
        self.ended: WaltzError | None = None
        self.mounts = 0
        self.is_held = False
        self.changed = asyncio.Event()
        session.on_commit(lambda mark: self.changed.set())

    def append(self, count: int, *, size: int = 50) -> int:
        """The last id."""
        assert not self.is_held
        first_id = self.session.tail.next_id
        payloads = [f"{self.session.session}:{first_id + n}".encode().ljust(size, b".") for n in range(count)]
        self.session.append(encode_payloads(first_id, payloads))
        return first_id + count - 1

    async def committed(self, mark: int) -> None:
        async with asyncio.timeout(10):
            while self.session.committed < mark:
                self.changed.clear()
                await self.changed.wait()

    def hold(self) -> None:
        self.is_held = True

    def close(self, error: WaltzError) -> None:
        self.ended = error


class Cell:
    """Storages, a coordinator, and as many owners as a test wants."""

    def __init__(self, names: int = 3, members: int | None = None) -> None:
        self.storages = {f"s{n}": SimStorage(f"s{n}", seed=n) for n in range(names)}
        self.tree = MemoryTree()
        self.cluster = Cluster(self.tree.connect())
        self.members = list(self.storages)[: members or names]
        self.ticker = Ticker(0.2)
        self.stores: list[Store[Appender]] = []
        self.log: list[str] = []

    async def start(self) -> None:
        for storage in self.storages.values():
            await storage.start(create=True)
        await Cluster.create(
            self.cluster.coordinator,
            ClusterMeta(name="test", key=KEY, partitions=1, created="2026-01-01T00:00:00Z"),
            storages=[storage.meta for storage in self.storages.values()],
            replicas=ReplicaSets(partitions={0: dict.fromkeys(self.members, Role.MEMBER)}),
        )

    def connect(self, meta: StorageMeta) -> Any:
        return SimPort(self.storages[meta.name])

    async def own(
        self, generation: int = 1, *, settings: StoreSettings = SETTINGS, previous: bool = False
    ) -> Store[Appender]:
        store: Store[Appender] = Store(
            0,
            generation,
            cluster=Cluster(self.tree.connect()),
            connect=self.connect,
            settings=settings,
            ticker=self.ticker,
            make_pipeline=Appender,
            say=self.log.append,
            previous_owner_alive=previous,
        )
        self.stores.append(store)
        await store.start()
        return store

    async def until(self, true: Callable[[], Any], seconds: float = 10) -> Any:
        try:
            async with asyncio.timeout(seconds):
                while not (found := true()):
                    for store in self.stores:
                        if store.task.done() and not store.task.cancelled():
                            store.task.result()
                    await asyncio.sleep(0.005)
                return found
        except TimeoutError:
            raise AssertionError(
                "\n".join(["it did not happen", *self.log, *(repr(s.describe()) for s in self.stores)])
            ) from None

    async def opened(self, store: Store[Appender], above: int = 0) -> Appender:
        def found() -> Appender | None:
            pipeline = store._pipeline
            return pipeline if pipeline is not None and pipeline.session.session > above else None

        pipeline: Appender = await self.until(found)
        return pipeline

    async def close(self) -> None:
        for store in self.stores:
            store.task.cancel()
            await asyncio.gather(store.task, return_exceptions=True)
        for storage in self.storages.values():
            if storage.keeper is not None:
                await storage.stop()

    def last_id(self, name: str) -> int:
        keeper = self.storages[name].keeper
        if keeper is None or 0 not in [replica.number for replica in keeper.directory.partitions()]:
            return -2
        return keeper.directory.partition(0).last_id

    def is_sound(self, name: str) -> bool:
        keeper = self.storages[name].keeper
        return keeper is not None and not keeper.directory.partition(0).findings

    def check_equal(self, *names: str) -> list[bytes]:
        logs = [self.storages[name].records() for name in names or self.members]
        assert all(log == logs[0] for log in logs)
        return logs[0]


@asynccontextmanager
async def cell(names: int = 3, members: int | None = None) -> AsyncIterator[Cell]:
    made = Cell(names, members)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def story(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """On a clock that stands still while anybody has something to do: how fast this process runs changes nothing."""

    def run_it() -> None:
        run(test())

    run_it.__name__ = test.__name__
    return run_it


@story
async def test_a_first_session_opens_and_commits() -> None:
    async with cell() as c:
        pipeline = await c.opened(await c.own())
        assert (pipeline.session.session, pipeline.session.low_mark, pipeline.session.committed) == (1, -1, -1)
        last_id = pipeline.append(500)
        await pipeline.committed(last_id)
        await c.until(lambda: all(c.last_id(name) == last_id for name in c.storages))
        assert len(c.check_equal()) == 500


@story
async def test_the_log_goes_on_while_one_storage_is_down_and_it_catches_up_by_itself() -> None:
    async with cell() as c:
        store = await c.own()
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(100))
        c.storages["s1"].kill()
        for _ in range(50):
            await pipeline.committed(pipeline.append(40))
        assert pipeline.session.tail.first_id > 100, "what it missed is no longer in the tail"
        await c.storages["s1"].start()
        last_id = pipeline.session.tail.next_id - 1
        await c.until(lambda: c.last_id("s1") == last_id)
        assert pipeline.ended is None, "no new session was needed"
        c.check_equal()
        c.storages["s0"].kill()  # now s1 counts
        await pipeline.committed(pipeline.append(10))


@story
async def test_without_a_majority_nothing_is_committed_and_nothing_is_lost() -> None:
    async with cell() as c:
        store = await c.own()
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(10))
        c.storages["s0"].kill()
        c.storages["s1"].kill()
        last_id = pipeline.append(10)
        await c.until(lambda: "s0, s1 of s0, s1, s2" in store.waiting)
        assert pipeline.session.committed == 9
        await asyncio.sleep(0.3)
        assert sum("s1 failed" in line for line in c.log) == 1, "one line for one outage, however often it is tried again"
        await c.storages["s1"].start()
        await pipeline.committed(last_id)
        await c.until(lambda: store.waiting == "")


@story
async def test_a_new_owner_finds_everything_and_the_old_one_is_fenced() -> None:
    """The old session closes at once, where the original tried for ever (waltz-original 5.5-4)."""
    async with cell() as c:
        old = await c.own(1)
        first = await c.opened(old)
        await first.committed(first.append(100))
        new = await c.own(2)
        second = await c.opened(new)
        assert second.session.low_mark >= 99
        first.append(5)
        await c.until(lambda: first.ended is not None)
        await second.committed(second.append(7))
        log = c.check_equal("s0", "s1")
        assert not any(b"1:100" in record for record in log[second.session.low_mark + 1 :])


@story
async def test_a_planned_hand_over_leaves_nothing_to_find_out() -> None:
    async with cell() as c:
        old = await c.own(1)
        first = await c.opened(old)
        last_id = first.append(1000)
        new = await c.own(2, previous=True)
        await old.close(hand_over=True)
        assert isinstance(first.ended, SessionEnded)
        assert first.is_held
        second = await c.opened(new)
        assert second.session.low_mark == last_id
        assert not any("did not close" in line for line in c.log)


@story
async def test_a_source_that_leaves_while_another_copies_from_it_is_one_that_failed() -> None:
    """Whoever copies goes on with the next source, or tries again; the server does not end."""
    async with cell(4, members=3) as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        last_id = pipeline.append(200)
        await pipeline.committed(last_id)
        session = store._session
        assert session is not None
        copier = session.copier("s1")
        roles, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, {name: role for name, role in roles.items() if name != "s2"}, version)
        await c.until(lambda: "s2" not in session.links)
        with pytest.raises(SourceFailed, match="s2 has left partition 0"):
            await copier.copy(0, last_id, "s2")
        assert not session.doubt("s2", CannotConnect("it failed"))


@story
async def test_empty_metadata_above_full_storages_is_left_to_an_operator() -> None:
    """The original erased every replica after one znode was deleted (waltz-original 5.5-3)."""
    async with cell() as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(50))
        await store.close(hand_over=False)
        node = await c.cluster.coordinator.get("/partitions/0")
        assert node is not None
        from waltzd.coordinator import Delete

        await c.cluster.coordinator.commit([Delete("/partitions/0", node.version)])
        again = await c.own(2)
        await c.until(lambda: any(MetadataMissing.code in line for line in c.log))
        await asyncio.sleep(0.3)
        assert again._pipeline is None
        assert len(c.check_equal()) == 50


@story
async def test_a_dirty_tail_is_cut() -> None:
    async with cell() as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(20))
        await c.until(lambda: all(c.last_id(name) == 19 for name in c.storages))
        c.storages["s1"].kill()
        c.storages["s2"].kill()
        pipeline.append(5)
        await c.until(lambda: c.last_id("s0") == 24)
        await store.close(hand_over=False)
        c.storages["s0"].kill()
        await c.storages["s1"].start()
        await c.storages["s2"].start()
        second = await c.opened(await c.own(2))
        assert second.session.low_mark == 19, "a majority never had more"
        await second.committed(second.append(3))
        await c.storages["s0"].start()
        await c.until(lambda: c.last_id("s0") == 22)
        assert all(b"1:2" not in record for record in c.check_equal()[20:])


@story
async def test_an_empty_storage_is_filled_and_does_not_vote() -> None:
    async with cell() as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(300))
        await c.storages["s2"].stop()
        c.storages["s2"].lose_disk(77)
        await c.storages["s2"].start()  # it knows the cluster and holds nothing, not even an empty partition
        await c.until(lambda: c.last_id("s2") == 299)
        await c.until(lambda: all(replica.counts for replica in store.describe().replicas))
        assert any("forgotten" in line for line in c.log)
        assert pipeline.ended is None
        c.storages["s0"].kill()
        await pipeline.committed(pipeline.append(1))
        assert len(c.check_equal("s1", "s2")) == 301


@story
async def test_a_replica_that_comes_back_empty_counts_again_although_nobody_writes() -> None:
    """It is level again at once, and nothing else happens."""
    async with cell() as c:
        first = await c.own()
        pipeline = await c.opened(first)
        await pipeline.committed(pipeline.append(5))
        await first.close(hand_over=True)
        store = await c.own(2, previous=True)
        await c.opened(store)

        def counting() -> list[str]:
            return [replica.storage for replica in store.describe().replicas if replica.counts]

        await c.until(lambda: len(counting()) == 3 and not c.ticker._listeners)
        c.storages["s2"].kill()
        c.storages["s2"].lose_disk(77)
        await c.storages["s2"].start()
        await c.until(lambda: any("has forgotten" in line for line in c.log))
        await c.until(lambda: len(counting()) == 3)


@story
async def test_an_old_copy_of_a_directory_is_brought_level_and_does_not_vote() -> None:
    async with cell() as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(100))
        await c.until(lambda: c.last_id("s2") == 99)
        copy = c.storages["s2"].disk.clone(5)
        await pipeline.committed(pipeline.append(400))
        await c.until(lambda: c.last_id("s2") == 499)
        c.storages["s2"].kill()
        c.storages["s2"].disk = copy.restored(6)
        await store.close(hand_over=False)
        c.storages["s1"].kill()
        await c.storages["s2"].start()
        second = await c.own(2)
        await c.until(lambda: "undecided" in second.waiting)
        await asyncio.sleep(0.2)
        assert second._pipeline is None, "the copy holds 99 and may have acknowledged anything"
        await c.storages["s1"].start()
        pipeline = await c.opened(second)
        assert pipeline.session.low_mark == 499
        await c.until(lambda: c.last_id("s2") == 499)
        c.check_equal()


@story
async def test_damage_is_healed_from_the_others() -> None:
    async with cell() as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        for _ in range(10):
            await pipeline.committed(pipeline.append(50))
        await c.until(lambda: c.last_id("s1") == 499)
        await c.storages["s1"].stop()
        disk = c.storages["s1"].disk
        damaged = [name for name in disk.names("storage/0") if name.endswith(".seg")][1]
        disk.corrupt(f"storage/0/{damaged}", 700, b"????")
        await c.storages["s1"].start()
        await pipeline.committed(pipeline.append(10))
        await c.until(lambda: c.is_sound("s1") and c.last_id("s1") == 509)
        assert any("damaged" in line for line in c.storages["s1"].log)
        assert len(c.check_equal()) == 510


@story
async def test_damage_that_is_found_in_the_newest_segment_of_a_live_replica_is_healed_though_nobody_writes() -> None:
    async with cell() as c:
        pipeline = await c.opened(await c.own(1))
        await pipeline.committed(pipeline.append(50, size=30))
        await c.until(lambda: all(c.last_id(name) == 49 for name in c.storages))
        storage = c.storages["s0"]
        assert storage.keeper is not None
        partition = storage.keeper.directory.partition(0)
        newest = partition._shelf.path_of(partition._shelf.first_ids[-1])
        storage.disk.corrupt(newest, storage.disk.size(newest) - 20, b"\xa5")
        assert [result for result in [found async for found in storage.keeper.verify(0)] if isinstance(result, Finding)]
        assert not c.is_sound("s0")
        await c.until(lambda: c.is_sound("s0"))
        c.check_equal(*c.storages)
        assert pipeline.ended is None, "the session went on"
        await pipeline.committed(pipeline.append(5))
        await c.until(lambda: all(c.last_id(name) == 54 for name in c.storages))


@story
async def test_one_replica_that_refuses_everything_does_not_keep_the_others_from_opening() -> None:
    """In the original it aborted everybody's recovery (waltz-original 5.6)."""
    async with cell() as c:
        keeper = c.storages["s1"].keeper
        assert keeper is not None
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(10))
        await keeper.set_available(0, False)
        await store.close(hand_over=False)
        pipeline = await c.opened(await c.own(2))
        await pipeline.committed(pipeline.append(10))
        await keeper.set_available(0, True)
        await c.until(lambda: c.last_id("s1") == 19)


@story
async def test_two_of_three_are_replaced_at_once() -> None:
    """The original could never recover from that (waltz-original 5.6)."""
    async with cell(5, members=3) as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(700))
        _, version = await c.cluster.replica_set(0)
        wanted = {"s0": Role.MEMBER, "s3": Role.LEARNER, "s4": Role.LEARNER}
        await c.cluster.save_replica_set(0, wanted, version)

        async def members() -> tuple[str, ...]:
            meta, _ = await c.cluster.partition(0)
            assert meta is not None
            return meta.members

        async with asyncio.timeout(20):
            while await members() != ("s0", "s3", "s4"):
                await asyncio.sleep(0.05)
        assert pipeline.ended is None
        c.storages["s0"].kill()
        last_id = pipeline.append(1)
        await pipeline.committed(last_id)
        assert len(c.check_equal("s3", "s4")) == last_id + 1


@story
async def test_a_learner_copies_and_becomes_a_member() -> None:
    async with cell(4, members=3) as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(2000))
        before, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, {**before, "s3": Role.LEARNER}, version)
        await c.opened(store, above=1)
        await c.until(lambda: store.describe().step == "OPEN")
        roles, version = await c.cluster.replica_set(0)
        assert roles["s3"] is Role.MEMBER
        meta, _ = await c.cluster.partition(0)
        assert meta is not None
        assert meta.members == ("s0", "s1", "s2", "s3")
        left = {name: role for name, role in roles.items() if name != "s0"}
        await c.cluster.save_replica_set(0, left, version)
        last = await c.opened(store, above=2)
        assert last is pipeline, "whoever uses the log notices nothing"
        await c.until(lambda: store.describe().step == "OPEN")
        await last.committed(last.append(1))
        meta, _ = await c.cluster.partition(0)
        assert meta is not None
        assert meta.members == ("s1", "s2", "s3")


@story
async def test_reading_below_the_tail_survives_a_storage_that_hangs() -> None:
    async with cell() as c:
        pipeline = await c.opened(await c.own())
        for _ in range(20):
            await pipeline.committed(pipeline.append(50))
        c.storages["s0"].hang()
        seen = 0
        async for run in pipeline.session.read(0, 499, 4096):
            seen += len(run)
        assert seen == 500
        c.storages["s0"].go_on()


@pytest.mark.parametrize("crash_after", range(0, 12))
def test_an_owner_that_dies_in_the_middle_of_its_recovery_changes_nothing(crash_after: int) -> None:
    async def test() -> None:
        async with cell() as c:
            store = await c.own(1)
            pipeline = await c.opened(store)
            await pipeline.committed(pipeline.append(30))
            await store.close(hand_over=False)
            dying = await c.own(2)
            for _ in range(crash_after * 3):
                await asyncio.sleep(0)
            dying.task.cancel()
            await asyncio.gather(dying.task, return_exceptions=True)
            third = await c.opened(await c.own(3))
            assert third.session.low_mark == 29
            await third.committed(third.append(1))

    run(test())


@story
async def test_a_store_that_is_cancelled_twice_leaves_nothing_behind() -> None:
    async with cell() as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(10))
        store.task.cancel()
        await asyncio.sleep(0)
        store.task.cancel()
        await asyncio.gather(store.task, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert [name for task in asyncio.all_tasks() if "partition 0 on" in (name := task.get_name())] == []


@story
async def test_whoever_is_level_waits_for_the_others_without_a_stir() -> None:
    """Two of five are level, and the rest are away: nobody wakes anybody for nothing."""
    async with cell(5) as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(10))
        await store.close(hand_over=True)
        for name in ("s2", "s3", "s4"):
            keeper = c.storages[name].keeper
            assert keeper is not None
            await keeper.set_available(0, False)
        again = await c.own(2)
        await c.until(lambda: "level: s0, s1 of" in again.waiting)
        session = again._session
        assert session is not None
        before = session.decided.rings
        for _ in range(2000):
            await asyncio.sleep(0)
        assert session.decided.rings - before < 100
        assert keeper is not None
        await keeper.set_available(0, True)
        pipeline = await c.opened(again)
        await pipeline.committed(pipeline.append(1))


@story
async def test_a_mistake_in_one_link_is_not_silent() -> None:
    """A replica that nobody serves any more must not look like one that is level."""
    async with cell() as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(10))
        await c.until(lambda: all(c.last_id(name) == 9 for name in c.storages))

        def mistake(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        assert store._session is not None
        link = store._session.links["s1"]
        link._port = type("Port", (), {"open": mistake})()
        c.storages["s1"].kill()  # the link begins again, and meets the mistake
        await asyncio.wait((store.task,), timeout=10)
        with pytest.raises(ZeroDivisionError):
            store.task.result()
        c.stores.remove(store)


@story
async def test_a_full_disk_stops_one_replica_and_nobody_else() -> None:
    async with cell() as c:
        pipeline = await c.opened(await c.own())
        await pipeline.committed(pipeline.append(100))
        disk = c.storages["s1"].disk
        disk.capacity_bytes -= disk.room() - 2000
        for _ in range(10):
            await pipeline.committed(pipeline.append(100))
        assert c.last_id("s1") < 1099
        disk.capacity_bytes = 1 << 40
        await c.until(lambda: c.last_id("s1") == 1099)
        assert len(c.check_equal()) == 1100


@story
async def test_a_promotion_that_is_tried_again_does_not_undo_what_an_operator_did_meanwhile() -> None:
    async with cell(5, members=3) as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(20))
        coordinator: Any = store._cluster.coordinator
        commit = coordinator.commit
        was_refused = False

        async def refuse_once(changes: Sequence[Any]) -> None:
            nonlocal was_refused
            if not was_refused and any(isinstance(change, Set) and change.path == replicas_path(0) for change in changes):
                was_refused = True
                roles, version = await c.cluster.replica_set(0)
                await c.cluster.save_replica_set(0, {**roles, "s4": Role.LEARNER}, version)
                raise CannotConnect("the coordinator does not answer")
            await commit(changes)

        coordinator.commit = refuse_once
        roles, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, {**roles, "s3": Role.LEARNER}, version)
        await c.opened(store, above=1)
        await c.until(lambda: was_refused and store.describe().step == "OPEN")
        roles, version = await c.cluster.replica_set(0)
        assert "s4" in roles
        assert pipeline.ended is None, "nothing was tried again with the partition closed"


def test_a_bound_on_copying_is_kept_and_is_no_failure() -> None:
    run(_copying_within_a_bound())


async def _copying_within_a_bound() -> None:
    c = Cell()
    c.storages = {name: SimStorage(name, seed=n, segment_bytes=64 << 20) for n, name in enumerate(c.storages)}
    await c.start()
    try:
        clock = asyncio.get_running_loop().time
        store = await c.own(1, settings=replace(SETTINGS, catch_up_bytes_per_second=lambda: 500_000, storage_seconds=1.0))
        pipeline = await c.opened(store)
        c.storages["s2"].kill()
        for _ in range(20):
            await pipeline.committed(pipeline.append(500, size=400))
        await c.storages["s2"].start()
        began, said = clock(), len(c.log)
        await c.until(lambda: c.last_id("s2") == 9999, seconds=60)
        assert clock() - began > 20 * 500 * 400 / 500_000
        assert [line for line in c.log[said:] if "failed" in line] == []
    finally:
        await c.close()


@story
async def test_two_names_for_one_storage_count_once() -> None:
    """An operator wrote the address of one storage down for another one, too."""

    def connect(meta: StorageMeta) -> Any:
        return SimPort(c.storages["s1" if meta.name == "s2" else meta.name])

    async with cell() as c:
        first = await c.opened(await c.own(1))
        await first.committed(first.append(10))
        c.connect = connect  # type: ignore[method-assign]
        store = await c.own(2)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(10))

        def refused() -> list[str]:
            return [replica.story for replica in store.describe().replicas if "are one storage" in replica.story]

        await c.until(lambda: len(refused()) == 1)
        c.storages["s0"].kill()
        last_id = pipeline.append(10)
        await c.until(lambda: c.last_id("s1") == last_id and "no majority" in store.describe().waiting)
        assert pipeline.session.committed == last_id - 10, "it is on one disk"
        await c.storages["s0"].start()
        await pipeline.committed(last_id)


@story
async def test_a_storage_whose_address_for_operators_changes_goes_on_in_its_session() -> None:
    async with cell() as c:
        store = await c.own()
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(10))
        links = dict(store._session._links.items())  # type: ignore[union-attr]
        before = await c.cluster.storages()
        for meta in before.values():
            await c.cluster.update_storage(replace(meta, admin_listen="elsewhere:1"), before=meta)
        await c.until(lambda: store._session.documents.storages["s2"].admin_listen == "elsewhere:1")  # type: ignore[union-attr]
        await pipeline.committed(pipeline.append(10))
        assert dict(store._session._links.items()) == links  # type: ignore[union-attr]
