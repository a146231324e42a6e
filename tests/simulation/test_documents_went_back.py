"""Documents that are put back, deleted or spoiled: an owner that finds them older than what storages know touches nothing,
says W2021 and waits for an operator. An open session goes on with what it knows, and writes its own documents anew, unless
another owner may have taken a session since."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.cell import SETTINGS, Appender, Cell, cell, story
from tests.simulation.plan import make_plan
from tests.simulation.world import simulate
from tests.unit.timeless import run
from waltzd.cluster.cluster import partition_path, replicas_path
from waltzd.cluster.coordinator import Delete, Set
from waltzd.cluster.documents import Assignment, Membership, Ownership, acknowledging
from waltzd.server.session.owned import OwnedLog
from waltzd.server.session.settings import RenewalTurns

DOCUMENT = partition_path(0)


async def keep(c: Cell, *paths: str) -> dict[str, bytes]:
    kept = {}
    for path in paths:
        node = await c.cluster.coordinator.get(path)
        assert node is not None
        kept[path] = node.data
    return kept


async def put_back(c: Cell, kept: Mapping[str, bytes]) -> None:
    for path, data in kept.items():
        node = await c.cluster.coordinator.get(path)
        assert node is not None
        await c.cluster.coordinator.commit([Set(path, data, node.version)])


async def refuses(c: Cell, owned: OwnedLog[Appender]) -> None:
    """And goes on to refuse, however often it tries again."""
    c.log.clear()
    await c.until(lambda: any("W2021" in line for line in c.log), seconds=60)
    version = (await c.cluster.partition(0))[1]
    await asyncio.sleep(60)
    assert not owned.task.done()
    assert owned._pipeline is None
    assert "the coordinator knows of none above" in owned.describe().waiting
    assert (await c.cluster.partition(0))[1] == version, "no session id is taken meanwhile"


@story
async def test_documents_that_went_back_behind_a_move_are_noticed() -> None:
    async with cell(6, members=3) as c:
        owned, pipeline = await c.holding(20)
        kept = await keep(c, DOCUMENT, replicas_path(0))
        _, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, dict.fromkeys(("s3", "s4", "s5"), Membership.MEMBER), version)
        later = await c.opened(owned, above=pipeline.session.session)
        await later.committed(later.append(30))  # acknowledged, on s3 to s5
        await owned.close(hand_over=False)
        newest = await keep(c, DOCUMENT, replicas_path(0))
        await put_back(c, kept)
        second = await c.own(2)
        await refuses(c, second)
        await put_back(c, newest)
        assert (await c.opened(second)).session.low_mark == 49, "with the newest documents it goes on by itself"


@pytest.mark.parametrize("storages", ["as they were", "started anew"])
@pytest.mark.parametrize("backup_of", ["a closed session", "an open session"])
@story
async def test_a_document_that_went_back_is_noticed(backup_of: str, storages: str) -> None:
    async with cell() as c:
        owned, _ = await c.holding(20)
        if backup_of == "a closed session":
            await owned.close(hand_over=True)
        kept = await keep(c, DOCUMENT)
        if backup_of != "a closed session":
            await owned.close(hand_over=False)
        between = await c.own(2)
        await (await c.opened(between)).committed((await c.opened(between)).append(10))
        await between.close(hand_over=False)
        second = await c.own(3)
        later = await c.opened(second)
        await later.committed(later.append(20))  # acknowledged, on all three
        await c.all_hold(49)
        await second.close(hand_over=False)
        if storages == "started anew":
            for one in c.storages.values():
                one.kill()
                await one.start()
        await put_back(c, kept)
        await refuses(c, await c.own(4))
        assert all(c.last_id(name) == 49 for name in c.storages)


@pytest.mark.parametrize("sessions_later", [1, 2, 5])
@story
async def test_documents_that_went_back_by_so_many_sessions_are_noticed_whoever_answers_first(sessions_later: int) -> None:
    """One session later is the narrowest: the next owner takes the very number that was used before."""
    async with cell() as c:
        owned, pipeline = await c.holding(20)
        await owned.close(hand_over=False)
        kept = await keep(c, DOCUMENT)
        for generation in range(2, 2 + sessions_later):
            owned = await c.own(generation)
            pipeline = await c.opened(owned)
            await pipeline.committed(pipeline.append(10))
            await owned.close(hand_over=False)
        await put_back(c, kept)
        c.storages["s0"].kill()
        c.storages["s1"].kill()
        second = await c.own(9)
        await asyncio.sleep(30)
        assert (await keep(c, DOCUMENT)) == kept, "no majority was asked: no session is taken"
        await c.storages["s1"].start()
        await refuses(c, second)
        assert c.last_id("s1") == 19 + 10 * sessions_later


@story
async def test_an_owner_whose_documents_go_back_under_it_ends_and_then_refuses() -> None:
    async with cell() as c:
        owned, pipeline = await c.holding(20)
        await owned.close(hand_over=False)
        kept = await keep(c, DOCUMENT)
        second = await c.own(2)
        pipeline = await c.opened(second)
        await pipeline.committed(pipeline.append(20))
        await put_back(c, kept)
        await pipeline.committed(pipeline.append(10))
        assert second._session is not None
        await c.restart("s2", empty_disk=9)  # something has to be saved
        await refuses(c, second)
        assert c.last_id("s0") == 49


@story
async def test_a_session_that_is_in_no_document_is_never_stepped_over() -> None:
    async with cell() as c:
        owned, _ = await c.holding(20)
        calls = c.storages["s1"].calls
        assert calls is not None
        await calls.open_session(0, 77, 1)
        await refuses(c, owned)
        assert any("s1 has promised itself to session 77" in line for line in c.log)


@pytest.mark.parametrize("contacts", range(0, 30, 3))
@story
async def test_an_owner_that_dies_after_it_has_opened_some_is_no_reason_to_refuse(contacts: int) -> None:
    async with cell() as c:
        owned, pipeline = await c.holding(20)
        await owned.close(hand_over=False)
        for generation in range(2, 6):
            dying = await c.own(generation)
            for _ in range(contacts + generation):
                await asyncio.sleep(0)
            dying.task.cancel()
            await asyncio.gather(dying.task, return_exceptions=True)
        pipeline = await c.opened(await c.own(9))
        assert pipeline.session.low_mark == 19
        assert not any("W2021" in line or "W2020" in line for line in c.log)


def test_a_newer_owner_is_no_reason_to_refuse() -> None:
    """It takes its session and opens storages just when another one has read the document and asks them."""

    async def test(steps: int) -> None:
        async with cell() as c:
            owned, _ = await c.holding(20)
            await owned.close(hand_over=False)
            c.storages["s1"].hang()
            c.storages["s2"].hang()
            first = await c.own(2)
            for _ in range(steps):
                await asyncio.sleep(0)
            second = await c.own(2)
            c.storages["s1"].go_on()
            for _ in range(steps):
                await asyncio.sleep(0)
            c.storages["s2"].go_on()
            await c.until(lambda: first._pipeline is not None or second._pipeline is not None)
            await asyncio.sleep(0.1)  # fifty more turns of the two
            assert not any("W2021" in line for line in c.log), "\n".join(c.log)

    for steps in range(30):
        run(test(steps))


# -- documents that an operator deletes or spoils while a session is open ------------------------------------------------


async def assign(c: Any, generation: int) -> None:
    _, version = await c.cluster.assignment()
    await c.cluster.save_assignment(Assignment(owners=(Ownership("server", generation),)), version)


async def damage(c: Any, verb: str, path: str) -> None:
    node = await c.cluster.coordinator.get(path)
    change = Delete(path, node.version) if verb == "delete" else Set(path, b"{oops", node.version)
    await c.cluster.coordinator.commit([change])


@pytest.mark.parametrize("verb", ["delete", "spoil"])
@pytest.mark.parametrize("path", ["/partitions/0", "/replicas/0", "/storages/s2"])
@story
async def test_a_session_that_is_open_goes_on(verb: str, path: str) -> None:
    async with cell() as c:
        await assign(c, 1)
        owned, pipeline = await c.holding(20)
        meta, roles = (await c.cluster.partition(0))[0], (await c.cluster.replica_set(0))[0]
        assert meta is not None
        known = acknowledging(meta, dict.fromkeys(c.members, 19)), roles
        await damage(c, verb, path)
        await asyncio.sleep(2)
        assert any(path in line and "going on" in line for line in c.log)
        if path == "/storages/s2":
            assert path in owned.describe().trouble
            c.storages["s2"].kill()  # known still, and tried again
            await c.storages["s2"].start()
        else:
            after = await c.cluster.partition(0), await c.cluster.replica_set(0)
            assert tuple(found for found, _ in after) == known, "written anew"
            assert owned.describe().trouble == ""
        last = pipeline.append(5)
        await pipeline.committed(last)
        assert pipeline.ended is None, f"the session was ended by: {pipeline.ended}"
        await c.all_hold(last)
        await owned.close(hand_over=True)
        if path != "/storages/s2":
            await assign(c, 2)
            assert (await c.opened(await c.own(2))).session.low_mark == last


@story
async def test_a_document_that_went_back_to_before_a_replica_took_part_is_noticed() -> None:
    """The older document names s0 and s1 only, and what was committed since is on s0 and s2. Were it of the same session,
    an owner that hears s0 and s1 would take for certain that s2 acknowledged nothing, and cut that."""
    async with cell() as c:
        first, _ = await c.holding(20)
        await first.close(hand_over=True)
        c.storages["s2"].kill()
        second = await c.own(2)
        pipeline = await c.opened(second)
        older = await keep(c, DOCUMENT)
        await c.storages["s2"].start()
        later = await c.opened(second, above=pipeline.session.session)
        assert later.session.core.meta.joined == ("s0", "s1", "s2")
        c.storages["s1"].kill()
        await later.committed(later.append(5))
        await second.close(hand_over=False)
        c.storages["s2"].kill()
        newest = await keep(c, DOCUMENT)
        await put_back(c, older)
        await c.storages["s1"].start()
        third = await c.own(3)
        await refuses(c, third)
        assert c.last_id("s0") == 24
        await put_back(c, newest)
        assert (await c.opened(third)).session.low_mark == 24


@story
async def test_a_document_is_not_written_over_a_session_that_somebody_may_have_taken() -> None:
    async with cell() as c:
        await assign(c, 2)
        _, pipeline = await c.holding(20)
        await damage(c, "delete", "/partitions/0")
        await c.until(lambda: pipeline.ended is not None)
        assert await c.cluster.partition(0) == (None, -1)
        assert any("not ours to write" in line for line in c.log)


@story
async def test_a_document_is_not_written_by_an_assignment_that_went_back() -> None:
    """Nobody knows what else the coordinator has forgotten: the session goes on, and an operator decides."""
    async with cell() as c:
        owned = await c.own(1)  # under a generation that was never given out
        pipeline = await c.opened(owned)
        await damage(c, "delete", "/partitions/0")
        await asyncio.sleep(30)
        await pipeline.committed(pipeline.append(20))
        assert await c.cluster.partition(0) == (None, -1)
        assert "/partitions/0" in owned.describe().trouble


@story
async def test_a_document_is_not_written_when_the_partition_is_given_away_in_that_moment() -> None:
    """Between the owner's look at the assignment and what it writes."""
    async with cell() as c:
        await assign(c, 1)
        owned = await c.own(1)
        pipeline = await c.opened(owned)
        look = owned._cluster.assignment

        async def look_and_wait() -> Any:
            found = await look()
            await assign(c, 2)
            return found

        owned._cluster.assignment = look_and_wait  # type: ignore[method-assign]
        await damage(c, "delete", "/partitions/0")
        await c.until(lambda: pipeline.ended is not None)
        assert await c.cluster.partition(0) == (None, -1)


def test_no_client_id_has_two_holders_when_its_counter_went_back() -> None:
    """All servers were started again since, and none remembers what it had given out."""
    plan = make_plan(5, faults=("regress", "rewind", "archive", "instances", "crash", "reset"), seconds=6.0)
    outcome = simulate(plan)
    assert outcome.kind == "", outcome.story


@story
async def test_an_owner_that_cannot_save_does_not_keep_the_others_from_their_planned_sessions() -> None:
    """It waits for an operator: its document is gone, and the assignment is an older one."""
    async with cell() as c:
        await assign(c, 2)
        turns = RenewalTurns()
        owned = await c.own(2, settings=replace(SETTINGS, session_bytes_max=5_000, turns=turns))
        pipeline = await c.opened(owned)
        coordinator: Any = owned._cluster.coordinator
        commit = coordinator.commit

        async def lose_first(changes: Sequence[Any]) -> None:
            coordinator.commit = commit
            await assign(c, 1)
            await damage(c, "delete", DOCUMENT)
            await commit(changes)

        coordinator.commit = lose_first
        pipeline.append(80)
        await asyncio.sleep(5)
        assert (pipeline.session.session, (await c.cluster.partition(0))[0]) == (1, None)
        assert turns.take(lambda: None)
        await assign(c, 2)
        await c.until(lambda: pipeline.session.session == 2)
