"""One owned partition over real storages on simulated disks: sessions come and go, what was committed stays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.cell import SETTINGS, Cell, SimPort, SimStorage, cell, story
from tests.unit.timeless import run
from waltzd.cluster.cluster import replicas_path
from waltzd.cluster.coordinator import Delete, Set
from waltzd.cluster.documents import Membership, StorageMeta
from waltzd.errors import CannotConnect
from waltzd.errors.operations import MetadataMissing, SessionEnded, StaleSession
from waltzd.format.finding import Finding
from waltzd.server.session.copier import SourceFailed


@story
async def test_the_log_goes_on_while_one_storage_is_down_and_it_catches_up_by_itself() -> None:
    async with cell() as c:
        _, pipeline = await c.holding(100)
        c.storages["s1"].kill()
        for _ in range(50):
            await pipeline.committed(pipeline.append(40))
        assert pipeline.session.cache.first_id > 100, "what it missed is no longer in the tail"
        await c.storages["s1"].start()
        last_id = pipeline.session.cache.next_id - 1
        await c.until(lambda: c.last_id("s1") == last_id)
        assert pipeline.ended is None, "no new session was needed"
        c.check_equal()
        c.storages["s0"].kill()  # now s1 counts
        await pipeline.committed(pipeline.append(10))


@story
async def test_without_a_majority_nothing_is_committed_and_nothing_is_lost() -> None:
    async with cell() as c:
        owned, pipeline = await c.holding(10)
        c.storages["s0"].kill()
        c.storages["s1"].kill()
        last_id = pipeline.append(10)
        await c.until(lambda: "takes appends: not s0, s1" in owned.waiting)
        assert pipeline.session.committed == 9
        await asyncio.sleep(0.3)
        assert sum("s1 failed" in line for line in c.log) == 1, "one line for one outage, however often it is tried again"
        await c.storages["s1"].start()
        await pipeline.committed(last_id)
        await c.until(lambda: owned.waiting == "")


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
        assert isinstance(first.session.ended, StaleSession), "the storage said it, before the document was looked at again"
        await second.committed(second.append(7))
        log = c.check_equal("s0", "s1")
        assert not any(b"1:100" in record for record in log[second.session.low_mark + 1 :])


@story
async def test_a_planned_hand_over_leaves_nothing_to_find_out() -> None:
    async with cell() as c:
        old = await c.own(1)
        first = await c.opened(old)
        last_id = first.append(1000)
        new = await c.own(2, previous=lambda: True)
        await old.close(hand_over=True)
        assert isinstance(first.ended, SessionEnded)
        assert first.is_held
        second = await c.opened(new)
        assert second.session.low_mark == last_id
        assert not any("did not close" in line for line in c.log)


@story
async def test_who_is_to_close_and_dies_is_not_waited_for() -> None:
    async with cell() as c:
        clock = asyncio.get_running_loop().time
        _, first = await c.holding(100)
        for link in first.session.replicators.values():
            link.cancel()
        began = clock()
        second = await c.opened(await c.own(2, previous=lambda: clock() - began < 0.02))
        assert second.session.low_mark == 99
        assert clock() - began < SETTINGS.hand_over_seconds / 2


@story
async def test_a_source_that_leaves_while_another_copies_from_it_is_one_that_failed() -> None:
    """The copying replica goes on with the next source, or tries again; the server does not end."""
    async with cell(4, members=3) as c:
        owned = await c.own(1)
        pipeline = await c.opened(owned)
        last_id = pipeline.append(200)
        await pipeline.committed(last_id)
        session = owned._session
        assert session is not None
        copier = session.log.replicators["s1"].copier()
        roles, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, {name: role for name, role in roles.items() if name != "s2"}, version)
        await c.until(lambda: "s2" not in session.log.replicators)
        with pytest.raises(SourceFailed, match="s2 has left partition 0"):
            await copier.copy(0, last_id, "s2")
        assert not session.log.doubt("s2", CannotConnect("it failed"))


@story
async def test_empty_metadata_above_full_storages_is_left_to_an_operator() -> None:
    """The original erased every replica after one znode was deleted (waltz-original 5.5-3)."""
    async with cell() as c:
        owned, _ = await c.holding(50)
        await owned.close(hand_over=False)
        node = await c.cluster.coordinator.get("/partitions/0")
        assert node is not None
        await c.cluster.coordinator.commit([Delete("/partitions/0", node.version)])
        again = await c.own(2)
        await c.until(lambda: any(MetadataMissing.code in line for line in c.log))
        await asyncio.sleep(0.3)
        assert again._pipeline is None
        assert len(c.check_equal()) == 50


@story
async def test_an_empty_storage_is_filled_and_does_not_vote() -> None:
    async with cell() as c:
        owned, pipeline = await c.holding(300)
        await c.storages["s2"].stop()
        c.storages["s2"].lose_disk(77)
        await c.storages["s2"].start()  # it knows the cluster and holds nothing, not even an empty partition
        await c.until(lambda: c.last_id("s2") == 299)
        await c.until(lambda: all(replica.counts for replica in owned.describe().replicas))
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
        owned = await c.own(2, previous=lambda: True)
        await c.opened(owned)

        def counting() -> list[str]:
            return [replica.storage for replica in owned.describe().replicas if replica.counts]

        await c.until(lambda: len(counting()) == 3 and not c.timer._listeners)
        await c.restart("s2", empty_disk=77)
        await c.until(lambda: any("has forgotten" in line for line in c.log))
        await c.until(lambda: len(counting()) == 3)


@story
async def test_damage_that_is_found_in_the_newest_segment_of_a_live_replica_is_healed_though_nobody_writes() -> None:
    async with cell() as c:
        pipeline = await c.opened(await c.own(1))
        await pipeline.committed(pipeline.append(50, size=30))
        await c.all_hold(49)
        storage = c.storages["s0"]
        assert storage.calls is not None
        partition = storage.calls.directory.partition(0)
        newest = partition._context.path(partition._segments.first_ids[-1])
        storage.disk.corrupt(newest, storage.disk.size(newest) - 20, b"\xa5")
        assert [result for result in [found async for found in storage.calls.verify(0)] if isinstance(result, Finding)]
        assert not c.is_sound("s0")
        await c.until(lambda: c.is_sound("s0"))
        c.check_equal(*c.storages)
        assert pipeline.ended is None, "the session went on"
        await pipeline.committed(pipeline.append(5))
        await c.all_hold(54)


class NeverHealed(SimPort):
    """A storage that takes each file of a segment, and is as damaged as before."""

    files = 0

    async def install_segment(self, partition: int, *what: Any, **more: Any) -> Any:
        type(self).files += 1
        return await self.status(partition)


@story
async def test_a_replica_that_no_file_heals_is_sent_few() -> None:
    """Each of them may be as large as a segment."""
    async with cell() as c:
        await c.holding(50)
        await c.all_hold(49)
        storage = c.storages["s0"]
        assert storage.calls is not None
        partition = storage.calls.directory.partition(0)
        newest = partition._context.path(partition._segments.first_ids[-1])
        storage.disk.corrupt(newest, storage.disk.size(newest) - 20, b"\xa5")
        c.connect = lambda meta: NeverHealed(c.storages[meta.name])  # type: ignore[method-assign]
        second = await c.opened(await c.own(2))
        assert [result for result in [found async for found in storage.calls.verify(0)] if isinstance(result, Finding)]
        await c.until(lambda: NeverHealed.files > 0)
        await asyncio.sleep(10 * SETTINGS.retry_seconds)
        assert NeverHealed.files <= 10
        await second.committed(second.append(5))


@story
async def test_a_replica_on_a_full_disk_stays_out_until_its_storage_takes_writes_and_that_is_said_once() -> None:
    """Owners logged "level again" and "failed" once a second, for each partition."""
    async with cell() as c:
        _, pipeline = await c.holding(10)
        await c.all_hold(9)
        disk = c.storages["s1"].disk
        disk.capacity_bytes -= disk.room() - 20
        for _ in range(100):
            await pipeline.committed(pipeline.append(1))
            await asyncio.sleep(0.1)
        about = [line for line in c.log if " s1 " in line]
        assert [("W3005" in line, "level again" in line) for line in about] == [(True, False)], about
        assert next(one for one in c.owned_logs[0].describe().replicas if one.storage == "s1").story.startswith("its disk")
        disk.capacity_bytes = 1 << 40
        await c.until(lambda: c.last_id("s1") == 109)
        about = [line for line in c.log if " s1 " in line]
        assert len(about) == 2
        assert "level again" in about[1]
        c.check_equal()


@story
async def test_one_replica_that_refuses_everything_does_not_keep_the_others_from_opening() -> None:
    """In the original it aborted the recovery of all replicas (waltz-original 5.6)."""
    async with cell() as c:
        calls = c.storages["s1"].calls
        assert calls is not None
        owned, pipeline = await c.holding(10)
        await calls.set_available(0, False)
        await owned.close(hand_over=False)
        pipeline = await c.opened(await c.own(2))
        await pipeline.committed(pipeline.append(10))
        await calls.set_available(0, True)
        await c.until(lambda: c.last_id("s1") == 19)


@story
async def test_two_of_three_are_replaced_at_once() -> None:
    """The original could never recover from that (waltz-original 5.6)."""
    async with cell(5, members=3) as c:
        _, pipeline = await c.holding(700)
        _, version = await c.cluster.replica_set(0)
        wanted = {"s0": Membership.MEMBER, "s3": Membership.LEARNER, "s4": Membership.LEARNER}
        await c.cluster.save_replica_set(0, wanted, version)

        async def members() -> tuple[str, ...]:
            meta = await c.meta()
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
        owned, pipeline = await c.holding(2000)
        before, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, {**before, "s3": Membership.LEARNER}, version)
        await c.opened(owned, above=1)
        await c.until(lambda: owned.describe().step == "OPEN")
        roles, version = await c.cluster.replica_set(0)
        assert roles["s3"] is Membership.MEMBER
        meta = await c.meta()
        assert meta.members == ("s0", "s1", "s2", "s3")
        left = {name: role for name, role in roles.items() if name != "s0"}
        await c.cluster.save_replica_set(0, left, version)
        last = await c.opened(owned, above=2)
        assert last is pipeline, "whoever uses the log notices nothing"
        await c.until(lambda: owned.describe().step == "OPEN")
        await last.committed(last.append(1))
        meta = await c.meta()
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


@story
async def test_a_store_that_is_cancelled_twice_leaves_nothing_behind() -> None:
    async with cell() as c:
        owned, _ = await c.holding(10)
        owned.task.cancel()
        await asyncio.sleep(0)
        owned.task.cancel()
        await asyncio.gather(owned.task, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert [name for task in asyncio.all_tasks() if "partition 0 on" in (name := task.get_name())] == []


@story
async def test_whoever_is_level_waits_for_the_others_without_a_stir() -> None:
    """Two of five are level, and the rest are away: no task is woken for nothing."""
    async with cell(5) as c:
        owned, pipeline = await c.holding(10)
        await owned.close(hand_over=True)
        for name in ("s2", "s3", "s4"):
            calls = c.storages[name].calls
            assert calls is not None
            await calls.set_available(0, False)
        again = await c.own(2)
        await c.until(lambda: "level: s0, s1 of" in again.waiting)
        session = again._session
        assert session is not None
        before = session.log.decided.version
        for _ in range(2000):
            await asyncio.sleep(0)
        assert session.log.decided.version - before < 100
        assert calls is not None
        await calls.set_available(0, True)
        pipeline = await c.opened(again)
        await pipeline.committed(pipeline.append(1))


@story
async def test_a_mistake_in_one_link_is_not_silent() -> None:
    """A replica that nobody serves any more must not look like one that is level."""
    async with cell() as c:
        owned, _ = await c.holding(10)
        await c.all_hold(9)

        def mistake(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        assert owned._session is not None
        link = owned._session.log.replicators["s1"]
        link.port = type("Port", (), {"open": mistake})()
        c.storages["s1"].kill()  # the link begins again, and meets the mistake
        await asyncio.wait((owned.task,), timeout=10)
        with pytest.raises(ZeroDivisionError):
            owned.task.result()
        c.owned_logs.remove(owned)


@story
async def test_a_promotion_that_is_tried_again_does_not_undo_what_an_operator_did_meanwhile() -> None:
    async with cell(5, members=3) as c:
        owned, pipeline = await c.holding(20)
        coordinator: Any = owned._cluster.coordinator
        commit = coordinator.commit
        was_refused = False

        async def refuse_once(changes: Sequence[Any]) -> None:
            nonlocal was_refused
            if not was_refused and any(isinstance(change, Set) and change.path == replicas_path(0) for change in changes):
                was_refused = True
                await c.add_learner("s4")
                raise CannotConnect("the coordinator does not answer")
            await commit(changes)

        coordinator.commit = refuse_once
        await c.add_learner("s3")
        await c.opened(owned, above=1)
        await c.until(lambda: was_refused and owned.describe().step == "OPEN")
        roles, _version = await c.cluster.replica_set(0)
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
        owned = await c.own(1, settings=replace(SETTINGS, catch_up_bytes_per_second=lambda: 500_000, storage_seconds=1.0))
        pipeline = await c.opened(owned)
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
        owned = await c.own(2)
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(10))

        def refused() -> list[str]:
            return [replica.story for replica in owned.describe().replicas if "are one storage" in replica.story]

        await c.until(lambda: len(refused()) == 1)
        c.storages["s0"].kill()
        last_id = pipeline.append(10)
        await c.until(lambda: c.last_id("s1") == last_id and "no majority" in owned.describe().waiting)
        assert pipeline.session.committed == last_id - 10, "it is on one disk"
        await c.storages["s0"].start()
        await pipeline.committed(last_id)


@story
async def test_a_storage_whose_address_for_operators_changes_goes_on_in_its_session() -> None:
    async with cell() as c:
        owned, pipeline = await c.holding(10)
        links = dict(owned._session.log.replicators.items())  # type: ignore[union-attr]
        before = await c.cluster.storages()
        for meta in before.values():
            await c.cluster.update_storage(replace(meta, admin_listen="elsewhere:1"), before=meta)
        await c.until(lambda: owned._session.documents.storages["s2"].admin_listen == "elsewhere:1")  # type: ignore[union-attr]
        await pipeline.committed(pipeline.append(10))
        assert dict(owned._session.log.replicators.items()) == links  # type: ignore[union-attr]
