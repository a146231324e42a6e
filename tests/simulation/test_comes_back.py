"""What becomes of a storage that was away, is another one now, or went back to what it was."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.simulation.test_store import SETTINGS, Cell, cell, story
from tests.unit.timeless import run
from waltzd.cluster.documents import Role
from waltzd.disk.simulated import Loss
from waltzd.errors import CannotConnect
from waltzd.format.record import encode_payloads
from waltzd.server.session.settings import ACKNOWLEDGED_SECONDS, SessionSettings


def visible(c: Cell, name: str) -> int:
    """How far somebody who reads there, without being the owner, sees."""
    calls = c.storages[name].calls
    assert calls is not None
    return calls.directory.partition(0).visible_mark


async def restart(c: Cell, name: str) -> None:
    c.storages[name].kill()
    await c.storages[name].start()


async def are_all_told(c: Cell, mark: int, *names: str) -> None:
    await c.until(lambda: all(c.last_id(name) == mark == visible(c, name) for name in names or c.members), seconds=30)


@story
async def test_a_storage_that_comes_back_to_a_quiet_partition_is_told_what_is_committed() -> None:
    async with cell() as c:
        owned = await c.own(1)
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(50))
        await are_all_told(c, 49)
        await restart(c, "s2")
        await are_all_told(c, 49)
        await owned.close(hand_over=True)  # and after a new session and with another owner, whose tail is empty
        await c.opened(await c.own(2))
        await restart(c, "s1")
        await are_all_told(c, 49)


@story
async def test_a_storage_that_forgot_in_a_power_cut_what_it_was_told_is_told_again() -> None:
    """What is committed is written with the records, and not flushed."""
    async with cell() as c:
        pipeline = await c.opened(await c.own(1))
        await pipeline.committed(pipeline.append(50))
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
        pipeline = await c.opened(await c.own(1, settings=settings))
        await pipeline.committed(pipeline.append(50))
        await are_all_told(c, 49)
        await restart(c, "s2")
        await are_all_told(c, 49)


@story
async def test_a_learner_that_copies_is_told_what_is_committed() -> None:
    async with cell(4, members=3) as c:
        owned = await c.own(1)
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(2000))
        await are_all_told(c, 1999)
        roles, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, {**roles, "s3": Role.LEARNER}, version)
        await c.until(lambda: c.last_id("s3") == 1999)
        await asyncio.sleep(0)
        await are_all_told(c, 1999, "s3")


@pytest.mark.parametrize(("at", "in_record"), [(700, True), (156, True), (20, False)], ids=["data", "length", "header"])
def test_a_file_that_rots_at_its_source_is_noticed_by_whoever_copies_it(at: int, in_record: bool) -> None:
    async def test() -> None:
        async with cell(4, members=3) as c:
            settings = SessionSettings(**{**vars(SETTINGS), "tail_bytes_max": 1000})
            pipeline = await c.opened(await c.own(1, settings=settings))
            for _ in range(10):
                await pipeline.committed(pipeline.append(50))
            await are_all_told(c, 499)
            source = c.storages["s0"]
            rotten = next(name for name in source.disk.names("storage/0") if name.endswith(".seg"))
            source.disk.corrupt(f"storage/0/{rotten}", at, b"\x7f")
            roles, version = await c.cluster.replica_set(0)
            await c.cluster.save_replica_set(0, {**roles, "s3": Role.LEARNER}, version)
            await are_all_told(c, 499, "s3")
            assert any("damaged" in line for line in source.log) or not in_record
            await c.until(lambda: c.is_sound("s0"))
            c.check_equal("s0", "s1", "s2", "s3")

    run(test())


@pytest.mark.parametrize("in_place", [False, True], ids=["as another file", "in place"])
def test_an_old_copy_does_not_vote(in_place: bool) -> None:
    """Put back below the file system nothing of the copy says that it is one; but the coordinator knows what it lacks."""

    async def test() -> None:
        async with cell() as c:
            owned = await c.own(1)
            pipeline = await c.opened(owned)
            await pipeline.committed(pipeline.append(20))
            await c.until(lambda: all(c.last_id(name) == 19 for name in c.storages))
            copy = c.storages["s2"].disk.clone(5)
            c.storages["s1"].kill()  # it lags
            await pipeline.committed(pipeline.append(30))  # acknowledged by s0 and s2
            await asyncio.sleep(ACKNOWLEDGED_SECONDS + 2)
            await owned.close(hand_over=False)
            c.storages["s2"].kill()
            c.storages["s0"].kill()  # offline, with everything
            copy.kill()
            c.storages["s2"].disk = copy if in_place else copy.restored(6)
            await c.storages["s1"].start()
            await c.storages["s2"].start()
            second = await c.own(2)
            await c.until(lambda: "undecided" in second.waiting)
            await asyncio.sleep(3)
            assert second._pipeline is None
            await c.storages["s0"].start()
            assert (await c.opened(second)).session.low_mark == 49

    run(test())


@story
async def test_the_coordinator_is_told_what_is_acknowledged_while_that_moves_and_not_otherwise() -> None:
    async with cell() as c:
        pipeline = await c.opened(await c.own(1))
        await pipeline.committed(pipeline.append(20))

        async def acknowledged() -> tuple[list[int], int]:
            meta, version = await c.cluster.partition(0)
            assert meta is not None
            return [meta.replicas[name].acknowledged for name in c.members], version

        await asyncio.sleep(ACKNOWLEDGED_SECONDS + 2)
        marks, version = await acknowledged()
        assert marks == [19, 19, 19]
        await c.until(lambda: not c.ticker._listeners)
        await asyncio.sleep(100)
        assert (await acknowledged())[1] == version, "nothing moved: nothing is written"
        for _ in range(300):
            await pipeline.committed(pipeline.append(1))
            await asyncio.sleep(0.1)
        assert version + 2 <= (await acknowledged())[1] <= version + 4


@pytest.mark.parametrize("lost", ["the attempt", "the answer"])
def test_a_coordinator_that_is_away_costs_the_session_nothing(lost: str) -> None:
    async def test() -> None:
        async with cell() as c:
            owned = await c.own(1)
            pipeline = await c.opened(owned)
            await pipeline.committed(pipeline.append(20))
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
            meta, _ = await c.cluster.partition(0)
            assert meta is not None
            assert [meta.replicas[name].acknowledged for name in c.members] == [80, 80, 80]
            assert pipeline.ended is None
            c.storages["s1"].kill()
            c.storages["s1"].lose_disk(3)
            await c.storages["s1"].start()
            await c.until(lambda: c.last_id("s1") == 80, seconds=30)
            assert pipeline.ended is None

    run(test())


@story
async def test_directories_that_are_swapped_and_swapped_back_count_again_although_nobody_is_started_anew() -> None:
    """Two of three storages, under load: what is in flight can be committed only when they are back where they belong."""
    async with cell() as c:
        owned = await c.own(1)
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(20))
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
        owned = await c.own(1)
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(20))
        await c.until(lambda: all(c.last_id(name) == 19 for name in c.storages))
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
    """And not the server: somebody else had a session of this number."""
    async with cell() as c:
        owned = await c.own(1)
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(20))
        await c.until(lambda: all(c.last_id(name) == 19 for name in c.storages))
        calls = c.storages["s2"].calls
        assert calls is not None
        calls.directory.partition(0).append(1, [encode_payloads(20, [b"x"] * 5)], 19)
        c.storages["s2"].kill()
        await c.storages["s2"].start()
        await c.until(lambda: any("W2021" in line and "up to 24" in line for line in c.log))
        assert not owned.task.done()
