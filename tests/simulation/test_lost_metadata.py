"""Every document of the coordinator is lost, and put back from a file or from what storages hold: nothing acknowledged is
missing afterwards, whatever happened before, whoever is silent, and wherever the command is killed. What is not proven is
refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.simulation.cell import Appender, Cell, cell, story
from tests.simulation.lost_metadata import Hands, carry_out, load, next_generation, rebuild, ruin, saved_of, wipe
from tests.tiers import in_turns
from tests.unit.timeless import run
from waltzctl.placement.metadata import GENERATIONS_AHEAD
from waltzd.cluster.cluster import CLIENT_IDS, CLIENT_IDS_AHEAD, Cluster, partition_path
from waltzd.cluster.coordinator import Change, Set
from waltzd.cluster.documents import Counter, Membership, ServerMeta, decode_root
from waltzd.cluster.memory import MemoryCoordinator
from waltzd.errors import CannotConnect
from waltzd.errors.operations import MetadataUnfinished, NameInUse, NodeMissing, Unsafe
from waltzd.protocol.document import decode, encode
from waltzd.server.session.owned import OwnedLog

SEEDS = 48


@pytest.mark.parametrize("first", in_turns(range(0, SEEDS, 12), of=2))
def test_nothing_acknowledged_is_missing_after_any_loss(first: int) -> None:
    outcomes = [run(ruin(seed)) for seed in range(first, first + 12)]
    assert {"load", "rebuild"} <= set(outcomes)
    assert not any(one.startswith("waits") for one in outcomes), "what was put back can be opened"


async def opened(c: Cell) -> tuple[OwnedLog[Appender], Appender]:
    owned = await c.own(await next_generation(c))
    return owned, await c.opened(owned)


@story
async def test_a_fresh_file_goes_back_as_it_was_and_no_storage_is_fenced() -> None:
    async with cell() as c:
        owned, _ = await c.holding(20)
        saved = await saved_of(c)
        wipe(c)
        hands = Hands(c)
        await carry_out(c, await load(c, saved, hands))
        assert hands.fenced == 0
        assert (await c.meta()) == saved.partition(0)
        await owned.close(hand_over=False)
        _, pipeline = await opened(c)
        assert pipeline.session.low_mark == 19


@story
async def test_an_old_file_is_completed_by_what_storages_hold_above_every_session_that_they_promised() -> None:
    async with cell() as c:
        owned, _ = await c.holding(20)
        saved = await saved_of(c)
        await owned.close(hand_over=False)
        later = await c.own(2)
        pipeline = await c.opened(later)
        await pipeline.committed(pipeline.append(30))
        wipe(c)
        change = await load(c, saved)
        assert any("decided by the replicas" in step for step in change.plan.steps)
        await carry_out(c, change)
        meta = await c.meta()
        assert meta.session > pipeline.session.session
        assert all(c.replica(name).promised_session == meta.session for name in c.storages)
        await c.until(lambda: pipeline.ended is not None, seconds=60)
        await later.close(hand_over=False)
        _, pipeline = await opened(c)
        assert pipeline.session.low_mark == 49


@story
async def test_what_an_owner_acknowledges_until_its_storages_are_fenced_stays() -> None:
    async with cell() as c:
        owned, _ = await c.holding(20)
        saved = await saved_of(c)
        await owned.close(hand_over=False)
        later = await c.own(2)
        pipeline = await c.opened(later)
        wipe(c)
        hands = Hands(c)
        fence, turn = hands.fence, asyncio.Lock()

        async def fence_late(*arguments: Any) -> Any:
            async with turn:
                if hands.fenced == 0:
                    await pipeline.committed(pipeline.append(30))
                return await fence(*arguments)

        hands.fence = fence_late  # type: ignore[method-assign, assignment]
        await carry_out(c, await load(c, saved, hands))
        await later.close(hand_over=False)
        _, pipeline = await opened(c)
        assert pipeline.session.low_mark == 49


@story
async def test_an_owner_goes_on_while_every_document_is_gone() -> None:
    async with cell() as c:
        owned, pipeline = await c.holding(20)
        saved = await saved_of(c)
        wipe(c)
        await asyncio.sleep(60)
        await pipeline.committed(pipeline.append(10))
        assert pipeline.ended is None
        await carry_out(c, await load(c, saved))
        await pipeline.committed(pipeline.append(10))
        await owned.close(hand_over=False)
        _, pipeline = await opened(c)
        assert pipeline.session.low_mark == 39


@pytest.mark.parametrize("sees_it_go", [True, False])
@story
async def test_a_document_that_has_the_version_of_the_lost_one_is_not_taken_for_it(sees_it_go: bool) -> None:
    """Versions begin again when documents are put back: the next owner's may have the very one that the old owner knows."""
    async with cell() as c:
        owned, _ = await c.holding(20)
        await asyncio.sleep(15)
        _, version = await c.cluster.partition(0)
        saved, coordinator = await saved_of(c), owned._cluster.coordinator
        assert isinstance(coordinator, MemoryCoordinator)
        if not sees_it_go:
            coordinator.disconnect()
        wipe(c)
        await asyncio.sleep(5)
        await carry_out(c, await load(c, saved))
        later = replace(await c.meta(), session=7)
        now = (await c.cluster.partition(0))[1]
        assert now < version, "its versions begin again"
        while now < version:
            now = await c.cluster.save_partition(0, replace(later, session=7 + now), now)
        there = await c.meta()
        if not sees_it_go:
            coordinator.lapse()
            coordinator.reconnect()
        await owned.close(hand_over=True)
        assert await c.meta() == there


@story
async def test_generations_and_client_ids_go_on_above_all_that_were_given() -> None:
    async with cell() as c:
        await c.holding(5)
        for _ in range(7):
            await next_generation(c)
        given = [await c.cluster.new_client_id() for _ in range(3)]
        saved = await saved_of(c)
        secret = c.cluster.client_secret
        wipe(c)
        await carry_out(c, await load(c, saved))
        assignment, _ = await c.cluster.assignment()
        assert saved.assignment is not None
        assert assignment.owners[0].generation >= saved.assignment.owners[0].generation + GENERATIONS_AHEAD
        assert assignment.owners[0].server is None
        again, counted = Cluster(c.tree.connect()), saved.documents[CLIENT_IDS]
        drawn = await again.new_client_id()
        assert isinstance(counted, Counter)
        assert drawn not in given
        found = await again.coordinator.get(CLIENT_IDS)
        assert found is not None
        assert decode(Counter, found.data, CLIENT_IDS).next > counted.next + CLIENT_IDS_AHEAD
        assert again.client_secret == secret, "clients that live keep their tokens"


@story
async def test_to_load_once_more_changes_nothing_and_never_goes_back_behind_an_owner() -> None:
    async with cell() as c:
        owned, _ = await c.holding(20)
        old = await saved_of(c)
        await owned.close(hand_over=False)
        later = await c.own(2)
        await (await c.opened(later)).committed((await c.opened(later)).append(5))
        await later.close(hand_over=False)
        new = await saved_of(c)
        for saved in (new, old):
            wipe(c)
            await carry_out(c, await load(c, saved))
            assert (await load(c, saved)).plan.steps == (), "there is nothing left to do"
        owned, _ = await opened(c)
        with pytest.raises(Unsafe, match=r"what the coordinator has is newer than the file: partition 0"):
            await load(c, new)
        await owned.close(hand_over=False)


@story
async def test_a_coordinator_that_went_back_is_brought_forward_by_a_newer_file() -> None:
    async with cell() as c:
        owned, _ = await c.holding(20)
        old = dict(c.tree._entries)
        await owned.close(hand_over=False)
        later = await c.own(2)
        await (await c.opened(later)).committed((await c.opened(later)).append(30))
        saved = await saved_of(c)
        await later.close(hand_over=False)
        c.tree._entries = old
        change = await load(c, saved)
        assert any("are missing or differ" in step for step in change.plan.steps)
        await carry_out(c, change)
        _, pipeline = await opened(c)
        assert pipeline.session.low_mark == 49


# -- what is not proven ------------------------------------------------------------------------------------------------


async def behind(c: Cell) -> Any:
    """A file, and a session after it."""
    owned, _ = await c.holding(20)
    saved = await saved_of(c)
    await owned.close(hand_over=False)
    later = await c.own(2)
    await (await c.opened(later)).committed((await c.opened(later)).append(30))
    await c.all_hold(49)
    await later.close(hand_over=False)
    wipe(c)
    return saved


@story
async def test_who_is_silent_may_hold_a_later_session() -> None:
    async with cell() as c:
        saved = await behind(c)
        hands = Hands(c)
        hands.silent = {"s2"}
        for change in (await load(c, saved, hands), await rebuild(c, hands)):
            assert any("s2 does not report its replica" in refusal for refusal in change.plan.refusals)
        assert c.tree.find("/") is None, "nothing was written"


@story
async def test_a_minority_is_not_believed() -> None:
    """Two disks are lost as well: what they alone had acknowledged would be given up without a word."""
    async with cell() as c:
        saved = await behind(c)
        for seed, name in enumerate(("s0", "s1"), 70):
            await c.restart(name, empty_disk=seed)
        for change in (await load(c, saved), await rebuild(c)):
            assert any("has begun on s2 only, and 2 of 3 replicas would prove" in why for why in change.plan.refusals)


@story
async def test_a_partition_that_is_left_out_waits_for_a_rescue() -> None:
    async with cell() as c:
        saved = await behind(c)
        hands = Hands(c)
        hands.silent = {"s2"}
        change = await load(c, saved, hands)
        await change.do(Cluster(c.tree.connect()), lambda *_: None)  # overridden
        assert await c.cluster.partition(0) == (None, -1)
        assert (await c.cluster.replica_set(0))[0] == dict.fromkeys(c.members, Membership.MEMBER)
        owned = await c.own(await next_generation(c))
        await c.until(lambda: "was never opened" in owned.waiting)
        assert c.last_id("s0") == 49


@story
async def test_a_storage_that_two_names_lead_to_is_no_majority() -> None:
    async with cell() as c:
        await behind(c)
        twin = c.storages["s0"]
        for seed, name in enumerate(("s1", "s2"), 70):
            await c.restart(name, empty_disk=seed)
        c.storages["s1"].calls, kept = twin.calls, c.storages["s1"].calls
        change = await rebuild(c)
        assert any("two storages report the same replica" in refusal for refusal in change.plan.refusals)
        c.storages["s1"].calls = kept


@story
async def test_a_cluster_that_is_there_is_not_rebuilt_and_one_in_use_is_not_loaded() -> None:
    async with cell() as c:
        await c.holding(5)
        saved = await saved_of(c)
        with pytest.raises(NameInUse, match="holds the documents of test"):
            await rebuild(c)
        meta = ServerMeta(name="a", listen="a:1", admin_listen="a:2", instance=saved.meta.key, version="1")
        await c.cluster.register_server(meta)
        with pytest.raises(Unsafe, match="is in use: a run"):
            await load(c, saved)


@story
async def test_documents_of_another_cluster_stay_as_they_are() -> None:
    async with cell() as c, cell() as other:
        await c.holding(5)
        saved = await saved_of(c)
        foreign = replace(await other.cluster.meta(), key=UUID(int=7), name="other")
        node = await other.cluster.coordinator.get("/")
        assert node is not None
        await other.cluster.coordinator.commit([Set("/", encode(foreign), node.version)])
        with pytest.raises(NameInUse, match="another cluster, other at this root"):
            await load(other, saved)


# -- killed at any moment ----------------------------------------------------------------------------------------------


class Dying:
    """A coordinator whose caller is killed at one of its commits: before it has effect, or after."""

    def __init__(self, c: Cell, commits: int, *, is_late: bool) -> None:
        self._inner = c.tree.connect()
        self._left, self._is_late = commits, is_late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(self, changes: Sequence[Change]) -> None:
        self._left -= 1
        if self._left < 0 and self._is_late:
            await self._inner.commit(changes)
        if self._left < 0:
            raise CannotConnect("killed")
        await self._inner.commit(changes)


@pytest.mark.parametrize("how", ["a fresh file", "an old file", "no file"])
def test_a_command_that_is_killed_leaves_nothing_that_is_taken_for_a_cluster(how: str) -> None:
    async def test(commits: int, *, is_late: bool) -> bool:
        async with cell() as c:
            saved = await behind(c) if how != "a fresh file" else None
            if saved is None:
                owned, _ = await c.holding(50)
                saved = await saved_of(c)
                await owned.close(hand_over=False)
                wipe(c)

            async def change() -> Any:
                return await (rebuild(c) if how == "no file" else load(c, saved))

            try:
                await (await change()).do(Cluster(Dying(c, commits, is_late=is_late)), lambda *_: None)
                was_killed = False
            except CannotConnect:
                was_killed = True
            root = c.tree.find("/")
            is_whole = root is not None and not _is_refused(root.data)
            assert is_whole or (c.tree.find("/servers"), c.tree.find("/assignment")) == (None, None)
            if not is_whole:
                with pytest.raises((MetadataUnfinished, NodeMissing)):
                    await c.cluster.meta()
                await carry_out(c, await change())
            _, pipeline = await opened(c)
            assert pipeline.session.low_mark == 49
            return was_killed

    for is_late in (False, True):
        commits = 0
        while run(test(commits, is_late=is_late)):
            commits += 1
        assert commits >= 4


def _is_refused(data: bytes) -> bool:
    try:
        decode_root(data)
    except MetadataUnfinished:
        return True
    return False


@story
async def test_a_storage_that_dies_while_it_is_fenced_ends_the_command_and_the_next_one_goes_on() -> None:
    async with cell() as c:
        saved = await behind(c)
        hands = Hands(c)
        change = await load(c, saved, hands)
        original = hands.fence

        async def fence(*arguments: Any) -> Any:
            if hands.fenced == 1:
                raise CannotConnect("s1 is down")
            return await original(*arguments)

        hands.fence = fence  # type: ignore[method-assign, assignment]
        with pytest.raises(CannotConnect, match="partition 0: s1 is down"):
            await carry_out(c, change)
        with pytest.raises(MetadataUnfinished):
            await c.cluster.meta()
        await carry_out(c, await load(c, saved))
        _, pipeline = await opened(c)
        assert pipeline.session.low_mark == 49
        assert await c.cluster.coordinator.get(partition_path(0)) is not None
