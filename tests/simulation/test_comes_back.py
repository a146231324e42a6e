"""What becomes of a storage that was away, is another one now, forgot something, rotted, or went back to what it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.simulation.cell import SETTINGS, Appender, Cell, SimPort, SimStorage, cell, story
from tests.simulation.storage_machine import is_told
from waltzd.cluster.coordinator import Set
from waltzd.cluster.documents import Decision, PartitionMeta, ReplicaState
from waltzd.disk.simulated import Loss
from waltzd.errors import CannotConnect
from waltzd.format.finding import Code, Finding
from waltzd.format.record import encode_payloads
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.document import encode
from waltzd.server.session.owned import OwnedLog
from waltzd.server.session.settings import ACKNOWLEDGED_SECONDS, SessionSettings


def visible(c: Cell, name: str) -> int:
    """How far a reader without a session sees there."""
    calls = c.storages[name].calls
    assert calls is not None
    return calls.directory.partition(0).visible_mark


async def restart(c: Cell, name: str) -> None:
    c.storages[name].kill()
    await c.storages[name].start()


async def move_address(c: Cell, name: str) -> None:
    document = f"/storages/{name}"
    node = await c.cluster.coordinator.get(document)
    assert node is not None
    moved = encode(replace(c.storages[name].meta, listen="elsewhere:1"))
    await c.cluster.coordinator.commit([Set(document, moved, node.version)])


def do_while_opening(owned: OwnedLog[Appender], session: int, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Before the owner knows that the opening of this session was saved."""
    coordinator: Any = owned._cluster.coordinator
    commit = coordinator.commit

    async def save(changes: Sequence[Any]) -> None:
        await commit(changes)
        if any(isinstance(one, Set) and f'"opened": {session}'.encode() in one.data for one in changes):
            coordinator.commit = commit
            await act()

    coordinator.commit = save


async def are_all_told(c: Cell, mark: int, *names: str) -> None:
    await c.until(lambda: all(c.last_id(name) == mark == visible(c, name) for name in names or c.members), seconds=30)


@story
async def test_a_storage_that_comes_back_to_a_quiet_partition_is_told_what_is_committed() -> None:
    async with cell() as c:
        owned, _ = await c.holding(50)
        await are_all_told(c, 49)
        await restart(c, "s2")
        await are_all_told(c, 49)
        await owned.close(hand_over=True)  # and after a new session and with another owner, whose tail is empty
        await c.opened(await c.own(2))
        await restart(c, "s1")
        await are_all_told(c, 49)


@pytest.mark.parametrize("how", ["at another address", "to the list of replicas"])
@story
async def test_a_replica_that_comes_back_to_an_open_session_is_not_taken_for_that_of_another_owner(how: str) -> None:
    """It has begun the open session, and is contacted anew: what it reports is no sign of an older document."""
    async with cell(4, members=3) as c:
        owned, pipeline = await c.holding(20)
        if how == "at another address":
            await move_address(c, "s2")
        else:
            before, version = await c.cluster.replica_set(0)
            await c.add_learner("s3")
            await c.until(lambda: c.last_id("s3") == 19)
            await c.cluster.save_replica_set(0, before, version + 1)
            await c.until(lambda: "s3" not in pipeline.session.replicators)
            await c.add_learner("s3")
        for _ in range(10):
            await asyncio.sleep(0.1)
            assert pipeline.ended is None, f"the session was ended by: {pipeline.ended}"
            await pipeline.committed(pipeline.append(1))
        await c.until(lambda: {one.state for one in owned.describe().replicas} == {"LIVE"})
        assert not any("W2021" in line for line in c.log)


@pytest.mark.parametrize("begins_late", [False, True])
@story
async def test_a_replica_that_is_lost_while_its_session_opens_does_not_count_in_it(begins_late: bool) -> None:
    """What it acknowledges would count, and the next owner would not ask the replica that took its place."""
    async with cell() as c:
        first, _ = await c.holding(20)
        await first.close(hand_over=True)
        owned = await c.own(2)

        async def lose() -> None:
            await c.restart("s2", empty_disk=77)
            await move_address(c, "s2")
            calls: Any = c.storages["s2"].calls
            begin = calls.set_low_mark

            async def slow(*arguments: Any, **named: Any) -> Any:
                calls.set_low_mark = begin
                await asyncio.sleep(1)
                return await begin(*arguments, **named)

            calls.set_low_mark = slow if begins_late else begin
            core = owned._session.log.core if owned._session is not None else None
            await c.until(lambda: core is not None and (status := core.status("s2")) is not None and status.last_id < 0)

        do_while_opening(owned, 2, lose)
        pipeline = await c.opened(owned)
        owned.check()
        await pipeline.committed(pipeline.append(1))
        assert {one.storage for one in owned.describe().replicas if one.counts} == {"s0", "s1"}
        assert pipeline.session.session == 2
        await c.until(lambda: pipeline.session.session == 3 and all(one.counts for one in owned.describe().replicas))


@story
async def test_a_session_whose_replicas_all_fall_silent_while_it_opens_is_followed_by_another() -> None:
    async with cell() as c:
        first, _ = await c.holding(20)
        await first.close(hand_over=True)
        owned = await c.own(2)

        async def silence() -> None:
            for name, storage in c.storages.items():
                storage.kill()
                await move_address(c, name)
            await c.until(lambda: owned._session is not None and not owned._session.log.core.statuses)

        do_while_opening(owned, 2, silence)
        await c.until(lambda: any("that takes part in session 2 answers" in line for line in c.log))
        for storage in c.storages.values():
            await storage.start()
        assert (await c.opened(owned)).session.low_mark == 19


@story
async def test_a_storage_that_forgot_in_a_power_cut_what_it_was_told_is_told_again() -> None:
    """What is committed is written with the records, and not flushed."""
    async with cell() as c:
        await c.holding(50)
        await are_all_told(c, 49)
        c.storages["s2"].kill()
        c.storages["s2"].disk.power_cut(Loss.ORDERED)
        await c.storages["s2"].start()
        assert visible(c, "s2") < 49
        await are_all_told(c, 49)


@story
async def test_a_storage_that_comes_back_is_told_what_is_committed_though_the_tail_has_no_room_for_it() -> None:
    async with cell() as c:
        settings = SessionSettings(**{**vars(SETTINGS), "tail_bytes_max": 1000})
        await c.holding(50, settings=settings)
        await are_all_told(c, 49)
        await restart(c, "s2")
        await are_all_told(c, 49)


@story
async def test_a_learner_that_copies_is_told_what_is_committed() -> None:
    async with cell(4, members=3) as c:
        await c.holding(2000)
        await are_all_told(c, 1999)
        await c.add_learner("s3")
        await c.until(lambda: c.last_id("s3") == 1999)
        await asyncio.sleep(0)
        await are_all_told(c, 1999, "s3")


@pytest.mark.parametrize(("at", "in_record"), [(700, True), (156, True), (20, False)], ids=["data", "length", "header"])
@story
async def test_a_file_that_rots_at_its_source_is_noticed_by_whoever_copies_it(at: int, in_record: bool) -> None:
    async with cell(4, members=3) as c:
        settings = SessionSettings(**{**vars(SETTINGS), "tail_bytes_max": 1000})
        pipeline = await c.opened(await c.own(1, settings=settings))
        for _ in range(10):
            await pipeline.committed(pipeline.append(50))
        await are_all_told(c, 499)
        source = c.storages["s0"]
        rotten = next(name for name in source.disk.names("storage/0") if name.endswith(".seg"))
        source.disk.corrupt(f"storage/0/{rotten}", at, b"\x7f")
        await c.add_learner("s3")
        await are_all_told(c, 499, "s3")
        assert any("damaged" in line for line in source.log) or not in_record
        await c.until(lambda: c.is_sound("s0"))
        c.check_equal("s0", "s1", "s2", "s3")


@pytest.mark.parametrize("way", ["as other files", "in place", "below the file system"])
@story
async def test_an_old_copy_does_not_vote(way: str) -> None:
    """A directory tells that it was put back when its files are others, or when its storage was started since the copy was
    made. Of a snapshot of the volume nothing tells; but the coordinator knows what it lacks."""
    async with cell() as c:
        owned, pipeline = await c.holding(20)
        await c.all_hold(19)
        storage = c.storages["s2"]
        copy = storage.disk.clone(5)
        if way == "in place":
            await c.restart("s2")
            await c.until(lambda: all(replica.state == "LIVE" for replica in owned.describe().replicas))
        c.storages["s1"].kill()  # it lags
        await pipeline.committed(pipeline.append(30))  # acknowledged by s0 and s2
        if way == "below the file system":
            await asyncio.sleep(ACKNOWLEDGED_SECONDS + 2)
        await owned.close(hand_over=False)
        storage.kill()
        c.storages["s0"].kill()  # away, with everything
        if way == "below the file system":
            copy.kill()
            storage.disk = copy
        else:
            storage.disk = copy.restored(6, over=storage.disk if way == "in place" else None)
        await c.storages["s1"].start()
        await storage.start()
        second = await c.own(2)
        await c.until(lambda: "undecided" in second.waiting)
        await asyncio.sleep(30)
        assert second._pipeline is None, "it waits for s0, which alone has what was acknowledged"
        await c.storages["s0"].start()
        assert (await c.opened(second)).session.low_mark == 49


@story
async def test_the_coordinator_is_told_what_is_acknowledged_while_that_moves_and_not_otherwise() -> None:
    async with cell() as c:
        _, pipeline = await c.holding(20)

        async def acknowledged() -> tuple[list[int], int]:
            meta, version = await c.cluster.partition(0)
            assert meta is not None
            return [meta.replicas[name].acknowledged for name in c.members], version

        await asyncio.sleep(ACKNOWLEDGED_SECONDS + 2)
        marks, version = await acknowledged()
        assert marks == [19, 19, 19]
        await c.until(lambda: not c.timer._listeners)
        await asyncio.sleep(100)
        assert (await acknowledged())[1] == version, "nothing moved: nothing is written"
        for _ in range(300):
            await pipeline.committed(pipeline.append(1))
            await asyncio.sleep(0.1)
        assert version + 2 <= (await acknowledged())[1] <= version + 4


@pytest.mark.parametrize("lost", ["the attempt", "the answer"])
@story
async def test_a_coordinator_that_is_away_costs_the_session_nothing(lost: str) -> None:
    async with cell() as c:
        owned, pipeline = await c.holding(20)
        coordinator: Any = owned._cluster.coordinator
        commit, is_away = coordinator.commit, True

        async def commit_in_vain(changes: Sequence[Any]) -> None:
            if is_away:
                if lost == "the answer":
                    await commit(changes)
                await asyncio.sleep(5)
                raise CannotConnect("the coordinator does not answer")
            await commit(changes)

        coordinator.commit = commit_in_vain
        for _ in range(60):
            await pipeline.committed(pipeline.append(1))
            await asyncio.sleep(0.5)
        is_away = False
        await pipeline.committed(pipeline.append(1))
        await asyncio.sleep(2 * ACKNOWLEDGED_SECONDS)
        meta = await c.meta()
        assert [meta.replicas[name].acknowledged for name in c.members] == [80, 80, 80]
        assert pipeline.ended is None
        await c.restart("s1", empty_disk=3)
        await c.until(lambda: c.last_id("s1") == 80, seconds=30)
        assert pipeline.ended is None


@story
async def test_directories_that_are_swapped_and_swapped_back_count_again_although_nobody_is_started_anew() -> None:
    """Two of three storages, under load: what is in flight can be committed only when they are back where they belong."""
    async with cell() as c:
        owned, pipeline = await c.holding(20)
        c.storages["s1"].kill()
        c.storages["s2"].kill()
        last_id = pipeline.append(10)

        async def swap() -> None:
            one, other = c.storages["s1"], c.storages["s2"]
            one.disk, other.disk = other.disk, one.disk
            await one.start()
            await other.start()

        await swap()
        await asyncio.sleep(20)
        c.storages["s1"].kill()
        c.storages["s2"].kill()
        await swap()
        await c.until(lambda: owned._pipeline is not None and owned._pipeline.session.committed >= last_id, seconds=30)


@story
async def test_two_of_three_disks_that_are_replaced_under_load_count_again_when_they_hold_everything() -> None:
    async with cell() as c:
        owned, pipeline = await c.holding(20)
        await c.all_hold(19)
        for name in ("s1", "s2"):
            c.storages[name].kill()
            c.storages[name].lose_disk(ord(name[1]))
        last_id = pipeline.append(10)
        for name in ("s1", "s2"):
            await c.storages[name].start()
        await c.until(lambda: owned._pipeline is not None and owned._pipeline.session.committed >= last_id, seconds=30)
        assert len(c.check_equal()) == 30


@story
async def test_a_storage_that_holds_more_than_its_session_wrote_ends_the_session() -> None:
    """And not the server: another owner had a session of this number."""
    async with cell() as c:
        owned, _ = await c.holding(20)
        await c.all_hold(19)
        calls = c.storages["s2"].calls
        assert calls is not None
        calls.directory.partition(0).append(1, [encode_payloads(20, [b"x"] * 5)], 19)
        await c.restart("s2")
        await c.until(lambda: any("W2021" in line and "up to 24" in line for line in c.log))
        assert not owned.task.done()


# -- members that have forgotten something in an open session ------------------------------------------------------------


async def is_committed(pipeline: Any, mark: int) -> bool:
    try:
        async with asyncio.timeout(3):
            await pipeline.committed(mark)
    except TimeoutError:
        return False
    return True


@story
async def test_a_replica_that_holds_less_than_it_acknowledged_has_forgotten() -> None:
    """Its volume is put back to a moment in this very session: the files are the same ones, with less in them."""
    async with cell() as c:
        _, pipeline = await c.holding(10)
        await c.all_hold(9)
        before = c.storages["s2"].disk.clone(5)
        await pipeline.committed(pipeline.append(10))
        await c.all_hold(19)
        c.storages["s2"].kill()
        before.kill()
        c.storages["s2"].disk = before
        await c.storages["s2"].start()
        await c.until(lambda: any("s2 has forgotten" in line for line in c.log))


@story
async def test_a_replica_whose_directory_is_another_one_has_forgotten_although_it_holds_everything() -> None:
    async with cell() as c:
        await c.holding(20)
        await c.all_hold(19)
        c.storages["s2"].kill()
        c.storages["s2"].disk = c.storages["s2"].disk.restored(5)
        await c.storages["s2"].start()
        await c.until(lambda: any("s2 has forgotten" in line for line in c.log))


@story
async def test_a_replica_that_comes_later_counts_from_the_next_session_on_and_takes_the_place_of_a_lost_one() -> None:
    async with cell() as c:
        c.storages["s2"].kill()
        owned = await c.own(1)
        await c.until(lambda: c.last_id("s0") >= -1)
        await c.storages["s2"].start()
        first = await c.opened(owned)  # the first session needs all of them
        await first.committed(first.append(5))
        await owned.close(hand_over=True)
        c.storages["s2"].kill()
        second = await c.own(2)
        pipeline = await c.opened(second)
        await pipeline.committed(pipeline.append(5))
        coordinator: Any = second._cluster.coordinator
        coordinator.disconnect()
        await c.storages["s2"].start()
        await c.until(lambda: c.last_id("s2") == 9)
        c.storages["s1"].kill()
        mark = pipeline.append(1)
        await c.until(lambda: c.last_id("s2") == mark)
        assert not await is_committed(pipeline, mark), "s2 has it, and no document says that it counts"
        before = pipeline.session.session
        coordinator.reconnect()
        assert await is_committed(pipeline, mark)
        assert pipeline.session.session == before + 1
        assert pipeline.session.low_mark == mark, "closed where s0 and s2 hold all, although one of them did not count"


@story
async def test_an_empty_disk_and_a_silent_storage_of_four_leave_nothing_undecided() -> None:
    async with cell(4) as c:
        owned, pipeline = await c.holding(50)
        await c.all_hold(49)
        c.storages["s1"].kill()
        await pipeline.committed(pipeline.append(10))
        await owned.close(hand_over=False)
        for name in ("s2", "s3"):
            c.storages[name].kill()
        c.storages["s2"].lose_disk(7)
        await c.storages["s1"].start()
        await c.storages["s2"].start()
        assert (await c.opened(await c.own(2))).session.low_mark == 59
        c.check_equal("s0", "s1", "s2")


# -- bytes of the newest record rot: that is damage, never a write that was torn -----------------------------------------


def flip_last_record(storage: SimStorage, count: int) -> None:
    disk = storage.disk
    path = f"storage/0/{max(name for name in disk.names('storage/0') if name.endswith('.seg'))}"
    for at in range(disk.size(path) - 10, disk.size(path) - 10 + count):
        disk.corrupt(path, at, bytes([disk.content(path)[at] ^ 1]))


@pytest.mark.parametrize(
    ("is_power_cut", "count"), [(False, 1), (False, 5), (True, 1)], ids=["killed", "killed, five bytes", "without power"]
)
@pytest.mark.parametrize("who_is_back", [("s0", "s1"), ("s0", "s1", "s2")], ids=["one is away", "everybody is up"])
@story
async def test_rot_in_the_newest_record_gives_nothing_up(
    who_is_back: tuple[str, ...], is_power_cut: bool, count: int
) -> None:
    async with cell() as c:
        owned, pipeline = await c.holding(20)
        await c.all_hold(19)
        c.storages["s1"].kill()  # it lags from now on
        await pipeline.committed(pipeline.append(1))  # on s0 and s2
        await owned.close(hand_over=False)
        for name in ("s0", "s2"):
            c.storages[name].kill()
            if is_power_cut:
                c.storages[name].disk.power_cut()
        flip_last_record(c.storages["s0"], count)
        for name in who_is_back:
            await c.storages[name].start()
        second = await c.own(2)
        if "s2" in who_is_back:
            later = await c.opened(second)
            await c.all_hold(later.session.low_mark)
            assert later.session.low_mark >= 20
        else:
            await asyncio.sleep(30)
            assert second._pipeline is None, "it waits for s2, which alone has what was acknowledged"


# -- a segment file that comes late --------------------------------------------------------------------------------------


class _ImpatientPort(SimPort):
    """The caller waits for a second; what the storage does with the file is its own task."""

    def __init__(self, storage: Any, tasks: list[asyncio.Task[Any]]) -> None:
        super().__init__(storage)
        self._tasks = tasks

    async def install_segment(self, partition: int, session: int, first_id: int, size: int, pieces: Any) -> Any:
        calls = self._storage.calls
        if calls is None:
            raise CannotConnect("down")
        contact = self._contact(partition, session)
        work = asyncio.ensure_future(calls.install_segment(partition, session, first_id, size, pieces, contact=contact))
        self._tasks.append(work)
        done, _ = await asyncio.wait((work,), timeout=1.0)
        if not done:
            raise CannotConnect(f"{self._storage.name} did not go on with a segment file for a second")
        return work.result()


def slow_to_prove(storage: Any, first_id: int) -> asyncio.Event:
    """Its disk is slow for one file: it is proven when the event is set."""
    gate = asyncio.Event()
    right = storage.calls._run_writing

    async def run_writing(function: Any, *arguments: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if getattr(function, "__name__", "") == "prove" and owner is not None and owner.first_id == first_id:
            await gate.wait()
        return await right(function, *arguments)

    storage.calls._run_writing = run_writing
    return gate


@story
async def test_a_file_that_comes_late_does_not_get_its_place_after_the_session_has_begun() -> None:
    async with cell() as c:
        tasks: list[asyncio.Task[Any]] = []
        c.connect = lambda meta: _ImpatientPort(c.storages[meta.name], tasks)  # type: ignore[method-assign]
        owned, pipeline = await c.holding(20)
        await c.all_hold(19)
        c.storages["s2"].kill()
        await pipeline.committed(pipeline.append(100))  # up to 119, on s0 and s1
        c.storages["s1"].kill()
        pipeline.append(100)  # up to 219, on s0 alone: nobody is told anything, and s1 and s2 will not have them
        await c.until(lambda: c.last_id("s0") == 219)
        calls = c.storages["s0"].calls
        assert calls is not None
        spanning = max(first for first, _ in calls.directory.partition(0).sealed_segments() if first <= 119)
        await owned.close(hand_over=False)

        await c.storages["s2"].start()
        gate = slow_to_prove(c.storages["s2"], spanning)
        assert c.storages["s2"].calls is not None
        replica: Any = c.storages["s2"].calls.directory.partition(0)
        right = replica.set_low_mark

        def set_low_mark(session: int, mark: int, contact: int) -> Any:
            gate.set()  # the file is proven while the marks are being flushed
            return right(session, mark, contact)

        replica.set_low_mark = set_low_mark
        second = await c.own(2)
        await c.until(lambda: any("segment file" in line for line in c.log))  # s1 is silent: s2 copies from s0, slowly
        await c.storages["s1"].start()
        later = await c.opened(second)
        assert later.session.low_mark == 119
        await c.until(lambda: any(r.storage == "s2" and r.state in ("LIVE", "DOWN") for r in second.describe().replicas))
        wanted = later.append(5)
        await later.committed(wanted)
        await c.all_hold(wanted)
        for task in tasks:
            await asyncio.gather(task, return_exceptions=True)
        assert gate.is_set()
        assert c.storages["s2"].records() == c.storages["s0"].records()
        c.storages["s1"].kill()
        await later.committed(later.append(1))  # s2 counts, and holds what the owner has committed
        await c.until(lambda: c.storages["s2"].records() == c.storages["s0"].records())


# -- which snapshots of a volume the simulator puts back ----------------------------------------------------------------

JOINED, OTHER = UUID(int=1), UUID(int=2)
THEN = ReplicaStatus(
    partition=0,
    incarnation=JOINED,
    promised_session=5,
    session=5,
    low_mark=6,
    local_low_mark=6,
    committed=6,
    last_id=8,
    is_available=True,
    is_full=False,
    segments=1,
    findings=(),
)
NOW = replace(THEN, last_id=9)
META = PartitionMeta(
    generation=1,
    session=5,
    opened=5,
    low_mark=6,
    members=("a", "b", "c"),
    replicas={"a": ReplicaState(session=5, closing=None, incarnation=JOINED, acknowledged=7)},
)
CLOSED = replace(META, decision=Decision(mark=9, session=5))
DAMAGED = replace(NOW, last_id=8, findings=(Finding(code=Code.DAMAGED_RECORD, path="0.seg", detail="it is rotten"),))


@pytest.mark.parametrize("now", [NOW, replace(THEN, incarnation=OTHER), replace(THEN, session=4), DAMAGED, None])
def test_a_snapshot_of_the_one_that_joined_is_told_by_nothing_but_the_document(now: ReplicaStatus | None) -> None:
    """Whether another copy was put back before it, or an empty disk: it is the one that joined, and holds less."""
    assert not is_told(META, "a", THEN, now)


@pytest.mark.parametrize(
    ("meta", "name", "then", "now"),
    [
        (META, "a", THEN, replace(NOW, last_id=8)),
        (META, "a", replace(THEN, last_id=6), NOW),
        (META, "a", replace(THEN, session=4), NOW),
        (META, "a", replace(THEN, incarnation=OTHER), NOW),
        (META, "b", THEN, NOW),
        (CLOSED, "a", THEN, NOW),
    ],
    ids=["as it is", "less than acknowledged", "an older session", "another one", "never joined", "decided"],
)
def test_a_snapshot_is_told(meta: PartitionMeta, name: str, then: ReplicaStatus, now: ReplicaStatus) -> None:
    assert is_told(meta, name, then, now)
