"""A rescue over real storages and a real owner on simulated disks: what is lost, what is kept, who is in the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tests.simulation.cell import KEY, Cell, cell, story
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.proof import Scene
from waltzctl.placement.rescue import carry_out, read_scene, with_archive
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView, StorageView
from waltzd.cluster.cluster import Cluster, partition_path
from waltzd.cluster.coordinator import Delete, Set
from waltzd.cluster.documents import ClusterMeta, Membership, StorageMeta
from waltzd.errors import CannotConnect
from waltzd.errors.operations import ChangedMeanwhile, StaleSession
from waltzd.protocol.descriptions import ReplicaStatus

ABSURD = (1 << 63) - 1


class Killed(Exception):
    """The end of a command by kill -9."""


class Hands(Daemons):
    """What `waltzctl` asks storages for, without a network."""

    def __init__(self, c: Cell) -> None:
        super().__init__(None)
        self.cell = c
        self.between: Any = None
        """Called once, when the first replica is fenced."""
        self.meanwhile: Any = None
        """Called once, when all daemons have answered."""
        self.after_fencing: Any = None
        """Called when a replica was fenced."""
        self.sees_owner = False

    async def take_snapshot(self, _cluster: Cluster) -> ClusterSnapshot:
        found = await self._taken()
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return found

    async def _taken(self) -> ClusterSnapshot:
        sets, _ = await self.cell.cluster.replicas()
        return ClusterSnapshot(
            meta=ClusterMeta(name="test", key=KEY, partitions=1, created=""), leader=None, servers=(),
            storages=tuple([await self._view(name) for name in self.cell.storages]),
            partitions=(
                PartitionView(
                    partition=0, owner="a", generation=1, replicas=sets.partitions[0],
                    reported=self.cell.owned_logs[-1].describe() if self.sees_owner else None,
                ),
            ),
        )  # fmt: skip

    async def _view(self, name: str) -> StorageView:
        storage = self.cell.storages[name]
        if storage.calls is None:
            return StorageView(meta=storage.meta, reported=None, error=CannotConnect(f"{name} is down"))
        return StorageView(meta=storage.meta, reported=await storage.calls.describe(), error=None)

    async def fence(self, key: UUID, storage: StorageMeta, partition: int, session: int) -> ReplicaStatus:
        between, self.between = self.between, None
        if between is not None:
            await between()
        fenced = await super().fence(key, storage, partition, session)
        if self.after_fencing is not None:
            await self.after_fencing()
        return fenced

    @asynccontextmanager
    async def admin(self, _key: UUID, storage: StorageMeta) -> AsyncIterator[Any]:
        calls = self.cell.storages[storage.name].calls
        assert calls is not None
        yield SimpleNamespace(fence=calls.fence, restore=calls.restorer.restore)

    async def scene(self, *, without_archive: bool = True) -> Scene:
        snapshot = await self.take_snapshot(self.cell.cluster)
        found, _ = await read_scene(self.cell.cluster, snapshot, 0)
        return found if without_archive else await with_archive(self, found, snapshot)

    async def rescue(self, *, without_archive: bool = True) -> Scene:
        scene = await self.scene(without_archive=without_archive)
        assert not scene.by_itself, scene.by_itself
        return await self.carry_out(scene)

    async def carry_out(self, scene: Scene) -> Scene:
        return await carry_out(self.cell.cluster, self, scene)


async def undecided(c: Cell, kept: str = "s0") -> int:
    """Committed on all three; then everything is killed, and two disks are lost. The last id."""
    owned = await c.own()
    pipeline = await c.opened(owned)
    last_id = pipeline.append(100)
    await pipeline.committed(last_id)
    await c.until(lambda: c.last_id(kept) == last_id)
    for name, storage in c.storages.items():
        if name != kept:
            storage.kill()
    c.storages[kept].kill()
    await c.until(lambda: pipeline.session.committed == last_id and "no majority" in owned.waiting)
    await c.storages[kept].start()
    return last_id


@story
async def test_an_owner_that_waits_for_two_lost_disks_goes_on_with_the_third() -> None:
    async with cell() as c:
        last_id = await undecided(c)
        done = await Hands(c).rescue()
        assert done.mark == last_id
        pipeline = await c.opened(c.owned_logs[0], above=done.session)
        await pipeline.committed(pipeline.append(10))
        assert len(c.storages["s0"].records()) == last_id + 11
        sets, _ = await c.cluster.replicas()
        assert sets.partitions[0] == {"s0": Membership.MEMBER, "s1": Membership.LEARNER, "s2": Membership.LEARNER}


@story
async def test_new_disks_become_members_again_and_an_old_one_sets_aside_what_was_given_up() -> None:
    async with cell() as c:
        owned, pipeline = await c.holding(50)
        await c.until(lambda: c.last_id("s0") == 49)
        c.storages["s0"].kill()
        await pipeline.committed(pipeline.append(50))
        await pipeline.committed(pipeline.append(1))  # which tells the others that the hundred are
        await c.until(lambda: c.last_id("s1") == c.last_id("s2") == 100)
        for name in ("s1", "s2"):
            await c.storages[name].stop()
        await c.storages["s0"].start()
        hands = Hands(c)
        done = await hands.rescue()
        assert done.mark == 49, "that is what the only copy at hand holds"
        later = await c.opened(owned, above=done.session)
        await later.committed(later.append(200))
        c.storages["s1"].lose_disk(seed=9)
        await c.storages["s1"].start()
        await c.storages["s2"].start()
        await c.until(lambda: c.last_id("s1") == c.last_id("s2") == 249)
        assert c.check_equal()
        assert [one.fork for one in c.replica("s2").status().timelines] == [49]
        calls = c.storages["s2"].calls
        assert calls is not None
        assert [one.name for one in (await calls.describe()).set_aside] == ["0.set-aside-1"]
        await c.until(lambda: all(one.counts for one in owned.describe().replicas))


@story
async def test_a_replica_that_was_moved_away_gives_what_it_holds_to_new_disks() -> None:
    """All disks of the partition are lost, and a storage that it has left still has its files."""
    async with cell(4, members=3) as c:
        owned, _ = await c.holding(50)
        await c.until(lambda: c.last_id("s0") == 49)
        await c.add_learner("s3")
        await c.until(lambda: all(one.counts for one in owned.describe().replicas) and c.last_id("s3") == 49)
        roles, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, {name: roles[name] for name in ("s1", "s2", "s3")}, version)
        await c.until(lambda: [one.storage for one in owned.describe().replicas] == ["s1", "s2", "s3"])
        for number, name in enumerate(("s1", "s2", "s3")):
            await c.restart(name, empty_disk=90 + number)
        await c.until(lambda: "no majority" in owned.waiting)
        done = await Hands(c).rescue()
        assert done.mark == 49
        later = await c.opened(owned, above=done.session)
        await later.committed(later.append(5))
        await c.until(lambda: all(c.last_id(name) == 54 for name in ("s1", "s2", "s3")))
        assert c.check_equal("s1", "s2", "s3")[:50] == c.storages["s0"].records()[:50]


@story
async def test_a_document_that_is_gone_is_made_again_from_what_storages_say() -> None:
    async with cell() as c:
        owned = await c.own()
        pipeline = await c.opened(owned)
        last_id = pipeline.append(100)
        await pipeline.committed(last_id)
        await c.all_hold(last_id)
        owned.task.cancel()
        _, version = await c.cluster.partition(0)
        await c.cluster.coordinator.commit([Delete(partition_path(0), version)])
        other = await c.own(2)
        await c.until(lambda: "was never opened" in other.waiting)
        hands = Hands(c)
        scene = await hands.scene()
        assert scene.given_up.startswith(f"all ids committed above {last_id} that only removed storages")
        done = await hands.rescue()
        assert done.mark >= last_id
        later = await c.opened(other, above=done.session)
        await later.committed(later.append(5))
        assert len(c.check_equal()[: last_id + 1]) == last_id + 1


@story
async def test_a_session_number_that_nobody_can_follow_is_taken_back() -> None:
    async with cell() as c:
        owned = await c.own()
        pipeline = await c.opened(owned)
        last_id = pipeline.append(100)
        await pipeline.committed(last_id)
        owned.task.cancel()
        for name in ("s0", "s1"):
            replica = c.storages[name].calls.directory.partition(0)  # type: ignore[union-attr]
            replica._hard_state.promise(session=ABSURD, committed=replica.committed)  # as an older storage did when asked
        other = await c.own(2)
        await c.until(lambda: str(ABSURD) in other.waiting)
        done = await Hands(c).rescue()
        assert done.session < 1_000_000
        later = await c.opened(other, above=done.session)
        await later.committed(later.append(5))
        assert c.last_id("s0") >= last_id


@story
async def test_a_promise_is_never_taken_back_below_a_session_that_has_begun() -> None:
    async with cell() as c:
        owned = await c.own()
        await c.opened(owned)
        calls = c.storages["s0"].calls
        assert calls is not None
        session = calls.directory.partition(0).status().session
        with pytest.raises(StaleSession):
            await calls.fence(0, session - 1)


@story
async def test_an_owner_that_is_faster_is_noticed_and_everything_looked_at_again() -> None:
    async with cell() as c:
        last_id = await undecided(c)
        hands = Hands(c)

        async def take_a_session() -> None:
            meta, version = await c.cluster.partition(0)
            assert meta is not None
            await c.cluster.save_partition(0, replace(meta, session=meta.session + 1), version)

        hands.between = take_a_session
        done = await hands.rescue()
        assert done.mark == last_id
        await c.opened(c.owned_logs[0], above=done.session)


@story
async def test_a_partition_that_opens_while_the_daemons_are_asked_is_left_alone() -> None:
    """Its majority comes back when it has been asked, and acknowledges what the only copy at hand does not hold."""
    async with cell() as c:
        owned, pipeline = await c.holding(50)
        await c.until(lambda: c.last_id("s0") == 49)
        for name in ("s1", "s2"):
            c.storages[name].kill()
        await c.until(lambda: "no majority" in owned.waiting)
        hands = Hands(c)
        hands.sees_owner = True
        scene = await hands.scene()

        async def comes_back() -> None:
            c.storages["s0"].kill()
            for name in ("s1", "s2"):
                await c.storages[name].start()
            owned.task.cancel()
            later = await c.opened(await c.own(2), above=pipeline.session.session)
            await later.committed(later.append(10))
            await c.storages["s0"].start()

        hands.meanwhile = comes_back
        with pytest.raises(ChangedMeanwhile, match="the partition is open now"):
            await hands.carry_out(scene)
        assert not (await c.meta()).timelines


@story
async def test_a_learner_that_leaves_while_the_daemons_are_asked_does_not_come_back() -> None:
    """Its storage has left the cluster, so no owner could save a list with it."""
    async with cell(4, members=3) as c:
        await undecided(c)
        for number, name in enumerate(("s1", "s2")):
            c.storages[name].lose_disk(70 + number)
        await c.add_learner("s3")
        hands = Hands(c)
        scene = await hands.scene()

        async def leaves() -> None:
            roles, version = await c.cluster.replica_set(0)
            await c.cluster.save_replica_set(0, {name: role for name, role in roles.items() if name != "s3"}, version)
            _, moves = await c.cluster.moves()
            await c.cluster.remove_storage("s3", moves=moves)

        hands.meanwhile = leaves
        done = await hands.carry_out(scene)
        await c.opened(c.owned_logs[0], above=done.session)
        for name in ("s1", "s2"):
            await c.storages[name].start()
        await c.until(lambda: c.last_id("s1") == c.last_id("s2") == done.mark)
        await c.until(lambda: all(one.counts for one in c.owned_logs[0].describe().replicas), seconds=60)
        assert (await c.cluster.replica_set(0))[0] == dict.fromkeys(("s0", "s1", "s2"), Membership.MEMBER)


@story
async def test_a_copy_that_went_away_since_it_was_agreed_to_ends_it() -> None:
    async with cell() as c:
        await undecided(c)
        hands = Hands(c)
        scene = await hands.scene()
        before = await c.cluster.coordinator.get(partition_path(0))
        await c.storages["s0"].stop()
        with pytest.raises(ChangedMeanwhile, match="s0 does not answer any more"):
            await carry_out(c.cluster, hands, scene)
        assert await c.cluster.coordinator.get(partition_path(0)) == before


@pytest.mark.parametrize("sees_owner", [True, False])
@pytest.mark.parametrize("is_rescued", [True, False])
@story
async def test_a_partition_that_was_opened_since_it_was_agreed_to_is_left_alone(is_rescued: bool, sees_owner: bool) -> None:
    """By another operator, or by its majority that came back: its owner would be ended, and its log forked, for nothing.
    The owner may not answer the tool in time."""
    async with cell() as c:
        await undecided(c)
        hands, owned = Hands(c), c.owned_logs[0]
        scene, session = await hands.scene(), 0
        hands.sees_owner = sees_owner
        if is_rescued:
            session = (await hands.carry_out(scene)).session
        else:
            for name in ("s1", "s2"):
                await c.storages[name].start()
        pipeline = await c.opened(owned, above=session)
        await pipeline.committed(pipeline.append(10))
        before = await c.cluster.partition(0)
        why = "the partition is open now" if sees_owner else "its owner can open it now"
        with pytest.raises(ChangedMeanwhile, match=why):
            await hands.carry_out(scene)
        await pipeline.committed(pipeline.append(10))
        assert await c.cluster.partition(0) == before


@story
async def test_of_two_operators_one_rescues_a_partition() -> None:
    """The second one decides before an owner has opened it again: its log would be forked twice."""
    async with cell() as c:
        await undecided(c)
        c.owned_logs[0].task.cancel()
        one, other = Hands(c), Hands(c)
        agreed = await one.scene(), await other.scene()
        await one.carry_out(agreed[0])
        with pytest.raises(ChangedMeanwhile, match="its owner can open it now: the closing mark of session"):
            await other.carry_out(agreed[1])
        assert [one.number for one in (await c.meta()).timelines] == [2]


@story
async def test_after_a_rescue_that_ended_half_way_an_owner_still_opens_the_log_by_itself() -> None:
    """The storages have promised its session, and its decision is not saved. Then the lost majority comes back."""
    async with cell() as c:
        last_id = await undecided(c)
        hands, owned = Hands(c), c.owned_logs[0]
        scene = await hands.scene()

        async def is_killed() -> None:
            raise Killed

        hands.after_fencing = is_killed
        with pytest.raises(Killed):
            await hands.carry_out(scene)
        for name in ("s1", "s2"):
            await c.storages[name].start()
        pipeline = await c.opened(owned, above=scene.session)
        await pipeline.committed(pipeline.append(10))
        assert len(c.storages["s0"].records()) == last_id + 11
        assert not (await c.meta()).timelines


@story
async def test_a_document_that_cannot_be_read_is_replaced() -> None:
    async with cell() as c:
        owned, _ = await c.holding(20)
        owned.task.cancel()
        _, version = await c.cluster.partition(0)
        await c.cluster.coordinator.commit([Set(partition_path(0), b"{", version)])
        done = await Hands(c).rescue()
        other = await c.own(2)
        later = await c.opened(other, above=done.session)
        assert later.session.committed >= 19
