"""A planned new session: the log goes on for its users, and nothing is given up before its replacement is saved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.simulation.cell import SETTINGS, Appender, Cell, cell, story
from waltzd.cluster.coordinator import Set
from waltzd.cluster.documents import Membership, Moves
from waltzd.errors import CannotConnect
from waltzd.server.session.owned import OwnedLog
from waltzd.server.session.settings import RenewalTurns

FULL = "session_bytes_max is reached"
LEARNER = "a learner is level"
FORGETFUL = "a replica that had forgotten is level"
LEAVING = "a member left"


async def with_a_reason(c: Cell, what: str) -> tuple[OwnedLog[Appender], Appender]:
    """A log that is about to have a reason for a new session, with 20 records in the log."""
    owned = await c.own(1, settings=replace(SETTINGS, session_bytes_max=20_000 if what == FULL else 1 << 30))
    pipeline = await c.opened(owned)
    await pipeline.committed(pipeline.append(20))
    roles, version = await c.cluster.replica_set(0)
    if what == LEARNER:
        await c.cluster.save_replica_set(0, {**roles, "s3": Membership.LEARNER}, version)
        await c.until(lambda: c.last_id("s3") == 19)
    if what == FORGETFUL:
        await c.restart("s2", empty_disk=77)
        await c.until(lambda: any("has forgotten" in line for line in c.log))
        await c.until(lambda: c.last_id("s2") == 19)
    return owned, pipeline


@pytest.mark.parametrize("what", [FULL, LEARNER, FORGETFUL, "nothing"])
@story
async def test_writing_goes_on_while_the_coordinator_is_away(what: str) -> None:
    async with cell(4, members=3) as c:
        owned, _ = await with_a_reason(c, what)
        coordinator: Any = owned._cluster.coordinator
        clock = asyncio.get_running_loop().time
        coordinator.disconnect()
        silent, began = 0, clock()
        while clock() - began < 300:
            current = owned._pipeline
            if current is None or current.ended is not None:
                silent += 1
            else:
                await current.committed(current.append(5 if what == FULL else 1))
            await asyncio.sleep(1)
        assert silent < 5, f"{silent} of 300 seconds without a session, while every storage was well"
        assert len([line for line in c.log if "a new session" in line]) == 0
        coordinator.reconnect()
        if what != "nothing":
            assert owned._pipeline is not None
            owned._pipeline.append(1)
            await c.until(lambda: any("a new session" in line for line in c.log))


@story
async def test_a_replica_that_takes_long_to_begin_a_session_counts_in_the_end() -> None:
    """Transactions wait for it a little longer each time, and less often."""
    async with cell() as c:
        first = await c.own(1)
        await c.opened(first)
        await first.close(hand_over=True)
        c.storages["s2"].kill()
        owned = await c.own(2)
        await c.opened(owned)
        await c.storages["s2"].start()
        calls: Any = c.storages["s2"].calls
        begin = calls.set_low_mark

        async def slow(*arguments: Any, **named: Any) -> Any:
            await asyncio.sleep(0.35)
            return await begin(*arguments, **named)

        calls.set_low_mark = slow
        await c.until(lambda: all(replica.counts for replica in owned.describe().replicas), seconds=30)
        tries = [line for line in c.log if "s2 is level and takes part" in line]
        assert len(tries) == 3, "with a patience of 0.1, 0.2 and 0.4 seconds"


@pytest.mark.parametrize("what", [FULL, LEARNER, FORGETFUL, LEAVING])
@story
async def test_the_log_goes_on_from_one_session_to_the_next(what: str) -> None:
    """Writers and readers notice a moment's pause at most."""
    async with cell(4, members=3) as c:
        owned, pipeline = await with_a_reason(c, what)
        c.tree.pause = lambda: asyncio.sleep(0.005)  # the way to the coordinator, or back
        clock = asyncio.get_running_loop().time
        longest, last, read = 0.0, clock(), 0
        for n in range(300):
            if what == LEAVING and n == 50:
                roles, version = await c.cluster.replica_set(0)
                left = {name: role for name, role in roles.items() if name != "s0"}
                await c.cluster.save_replica_set(0, left, version)
            mark = pipeline.append(1, size=200)
            await pipeline.committed(mark)
            longest, last = max(longest, clock() - last), clock()
            if n % 10 == 0:
                async for got in pipeline.session.read(0, mark, 4096):
                    read += len(got)
            await asyncio.sleep(0.01)
        assert owned._pipeline is pipeline
        assert pipeline.ended is None
        assert pipeline.session.session > 1
        assert longest < 0.3, f"{longest} seconds without a commit"
        assert read == sum(range(21, 321, 10))
        meta = await c.meta()
        await c.until(lambda: all(c.last_id(name) == 319 for name in meta.members))
        assert len(c.check_equal(*meta.members)) == 320


@story
async def test_nothing_is_appended_behind_the_mark_at_which_a_session_is_closed() -> None:
    """What comes while the closing is saved waits for the next session; the storages never see it in the old one."""
    async with cell() as c:
        owned = await c.own(1, settings=replace(SETTINGS, session_bytes_max=5_000))
        pipeline = await c.opened(owned)
        coordinator: Any = owned._cluster.coordinator
        commit, closed = coordinator.commit, list[tuple[int, int]]()

        async def slow(changes: Sequence[Any]) -> None:
            if any(isinstance(change, Set) and b'"mark"' in change.data for change in changes):
                held = max(c.last_id(name) for name in c.storages)
                await pipeline_appends()
                await asyncio.sleep(0.1)
                closed.append((held, max(c.last_id(name) for name in c.storages)))
            await commit(changes)

        async def pipeline_appends() -> None:
            pipeline.append(5)

        coordinator.commit = slow
        last = pipeline.append(80)
        await c.until(lambda: closed)
        await pipeline.committed(last + 5)
        assert closed[0] == (last, last)
        assert pipeline.session.session == 2
        assert len(c.check_equal()) == last + 6


@story
async def test_a_closing_whose_answer_is_lost_is_found() -> None:
    async with cell() as c:
        owned = await c.own(1, settings=replace(SETTINGS, session_bytes_max=5_000))
        pipeline = await c.opened(owned)
        coordinator: Any = owned._cluster.coordinator
        commit, lost = coordinator.commit, list[int]()

        async def lose(changes: Sequence[Any]) -> None:
            await commit(changes)
            if len(lost) < 3:
                lost.append(1)
                raise CannotConnect("the answer was lost")

        coordinator.commit = lose
        await pipeline.committed(pipeline.append(80))
        await c.until(lambda: pipeline.session.session == 2)
        await pipeline.committed(pipeline.append(1))
        assert pipeline.ended is None


@story
async def test_nothing_is_sent_behind_a_closing_whose_answer_is_lost_while_the_session_ends() -> None:
    """In that moment a storage comes that is promised to a session which nobody knows (W2021)."""
    async with cell(4, members=3) as c:
        c.tree.pause = lambda: asyncio.sleep(0.005)  # the way to the coordinator, or back
        owned = await c.own(1, settings=replace(SETTINGS, session_bytes_max=5_000))
        pipeline = await c.opened(owned)
        coordinator: Any = owned._cluster.coordinator
        commit, lost = coordinator.commit, list[int]()

        async def lose(changes: Sequence[Any]) -> None:
            await commit(changes)
            if not lost and (await c.meta()).session == 2:
                lost.append(pipeline.append(5))
                c.replica("s3").open_session(50)
                await c.add_learner("s3")
                await c.until(lambda: owned._session is not None and owned._session.log.core.refusal)
                raise CannotConnect("the answer was lost")

        coordinator.commit = lose
        last = pipeline.append(80)
        await c.until(lambda: pipeline.ended)
        assert lost == [last + 5]
        assert pipeline.session.committed == last, "an application would have been told that more is committed"
        assert max(c.last_id(name) for name in c.members) == last
        _, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, dict.fromkeys(c.members, Membership.MEMBER), version)
        assert (await c.opened(owned)).session.low_mark == last


@story
async def test_what_is_in_flight_is_never_given_up_for_a_planned_session() -> None:
    """Without a majority nothing is committed, so nothing can be closed: it stays as it is until there is one."""
    async with cell(4, members=3) as c:
        owned = await c.own(1, settings=replace(SETTINGS, session_bytes_max=5_000))
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(20))
        c.storages["s1"].kill()
        c.storages["s2"].kill()
        last = pipeline.append(100)
        await asyncio.sleep(30)
        assert pipeline.ended is None
        assert pipeline.session.session == 1
        await c.storages["s1"].start()
        await pipeline.committed(last)
        await c.until(lambda: pipeline.session.session == 2)
        await pipeline.committed(pipeline.append(1))


@pytest.mark.parametrize("is_at_once", [False, True])
@story
async def test_a_planned_session_that_waits_for_storages_notices_another_owner(is_at_once: bool) -> None:
    """As an operator's rescue takes a session and fences the storages that are left. `is_at_once`: before the owner knows
    that its own session was saved."""
    async with cell() as c:
        owned = await c.own(1, settings=replace(SETTINGS, session_bytes_max=5_000))
        pipeline = await c.opened(owned)
        coordinator: Any = owned._cluster.coordinator
        commit, saved = coordinator.commit, list[int]()

        async def take() -> None:
            meta, version = await c.cluster.partition(0)
            assert meta is not None
            await c.cluster.save_partition(0, replace(meta, session=meta.session + 1), version)

        async def lose_storages(changes: Sequence[Any]) -> None:
            await commit(changes)
            if not saved and (await c.meta()).session == 2:
                saved.append(2)
                for name in ("s0", "s1"):
                    c.storages[name].kill()
                if is_at_once:
                    await take()
                    await asyncio.sleep(1)

        coordinator.commit = lose_storages
        pipeline.append(80)
        await c.until(lambda: saved)
        await asyncio.sleep(30)
        if not is_at_once:
            await take()
        await c.until(lambda: any("another owner took session 3" in line for line in c.log))


def test_so_many_sessions_begin_at_a_time_and_who_waits_is_told() -> None:
    turns, rings = RenewalTurns(2), list[str]()
    tellers = {name: partial(rings.append, name) for name in "abcd"}
    assert [turns.take(tellers[name]) for name in "abcdc"] == [True, True, False, False, False]
    turns.give_back()
    assert rings == ["c"], "who waits for longest, and once"
    assert turns.take(tellers["c"])
    turns.give_back()
    turns.give_back()
    assert rings == ["c", "d"]
    assert turns.take(tellers["d"])
    assert turns.take(tellers["a"])
    turns.give_back()
    assert rings == ["c", "d"], "nobody waits"


@story
async def test_a_session_that_waits_for_its_turn_can_be_handed_over() -> None:
    async with cell() as c:
        settings = replace(SETTINGS, session_bytes_max=5_000, turns=RenewalTurns(0))
        owned = await c.own(1, settings=settings)
        pipeline = await c.opened(owned)
        last = pipeline.append(100)
        await pipeline.committed(last)
        await asyncio.sleep(1)
        assert pipeline.session.session == 1
        await owned.close(hand_over=True)
        meta = await c.meta()
        assert meta.decision is not None
        assert meta.decision.mark == last


@story
async def test_a_session_is_handed_over_in_order_when_a_replica_that_came_later_completes_the_majority() -> None:
    """It was not its turn yet to begin a planned session for that replica."""
    async with cell() as c:
        first = await c.own(1)
        await c.opened(first)
        await first.close(hand_over=True)
        c.storages["s2"].kill()
        owned = await c.own(2, settings=replace(SETTINGS, turns=RenewalTurns(0)))
        pipeline = await c.opened(owned)
        await c.storages["s2"].start()
        await c.until(lambda: all(replica.state == "LIVE" for replica in owned.describe().replicas))
        c.storages["s1"].hang()
        last = pipeline.append(5)
        await owned.close(hand_over=True)
        meta = await c.meta()
        assert meta.decision is not None
        assert (meta.decision.mark, meta.replicas["s2"].closing) == (last, last)


# -- replicas that stand for others


async def aimed(c: Cell, *goal: str) -> None:
    """Do what a command does that moves the replicas there: write down where, and add the new ones as learners."""
    roles, version = await c.cluster.replica_set(0)
    _, moves_version = await c.cluster.moves()
    await c.cluster.save_moves(Moves(partitions={0: goal}), moves_version)
    new = dict.fromkeys((name for name in goal if name not in roles), Membership.LEARNER)
    await c.cluster.save_replica_set(0, {**roles, **new}, version)


async def until_members(c: Cell, pipeline: Appender, *names: str) -> None:
    """Until these are the members, while the log is written."""
    for _ in range(600):
        await pipeline.committed(pipeline.append(1))
        if (await c.meta()).members == names:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"members are {(await c.meta()).members}, not {names}\n" + "\n".join(c.log))


@pytest.mark.parametrize("goal", [("s1", "s2", "s3"), ("s3", "s4", "s5"), ("s0", "s1", "s2", "s3")])
@story
async def test_replicas_stand_for_others_in_one_session(goal: tuple[str, ...]) -> None:
    async with cell(6, members=3) as c:
        _, pipeline = await c.holding(20)
        await aimed(c, *goal)
        await until_members(c, pipeline, *goal)
        assert pipeline.session.session == 2
        roles, _ = await c.cluster.replica_set(0)
        assert roles == dict.fromkeys(goal, Membership.MEMBER)
        last = pipeline.append(5)
        await pipeline.committed(last)
        await c.until(lambda: all(c.last_id(name) == last for name in goal))
        c.check_equal(*goal)
        await asyncio.sleep(10)
        assert pipeline.session.session == 2, "nothing is left to do"


@story
async def test_all_that_leave_go_with_the_session_that_the_first_begins() -> None:
    async with cell(5) as c:
        _, pipeline = await c.holding(20)
        await aimed(c, "s2", "s3", "s4")
        roles, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, {name: role for name, role in roles.items() if name != "s0"}, version)
        await until_members(c, pipeline, "s2", "s3", "s4")
        assert pipeline.session.session == 2
        assert (await c.cluster.replica_set(0))[0].keys() == {"s2", "s3", "s4"}


@story
async def test_nobody_leaves_while_one_that_stays_is_not_level() -> None:
    async with cell(4, members=3) as c:
        _, pipeline = await c.holding(20)
        c.storages["s2"].kill()
        await aimed(c, "s1", "s2", "s3")
        await until_members(c, pipeline, "s0", "s1", "s2", "s3")
        roles, _ = await c.cluster.replica_set(0)
        assert roles["s0"] is Membership.MEMBER


@story
async def test_a_learner_that_falls_silent_in_that_moment_keeps_the_others_in_place() -> None:
    """Without the check the session would begin with fewer members than the one before."""
    async with cell(6, members=3) as c:
        owned, pipeline = await c.holding(20)
        coordinator: Any = owned._cluster.coordinator
        commit = coordinator.commit

        async def kill_first(changes: Sequence[Any]) -> None:
            closes = any(
                isinstance(one, Set) and b'"decision": null' not in one.data and b'"mark"' in one.data for one in changes
            )
            await commit(changes)
            if closes:
                for name in ("s4", "s5"):
                    c.storages[name].kill()

        coordinator.commit = kill_first
        await aimed(c, "s3", "s4", "s5")
        await until_members(c, pipeline, "s0", "s1", "s2", "s3")


@story
async def test_an_operator_who_changes_the_list_in_that_moment_is_not_overruled() -> None:
    async with cell(5, members=3) as c:
        owned, pipeline = await c.holding(20)
        coordinator: Any = owned._cluster.coordinator
        commit, seen = coordinator.commit, list[int]()

        async def change_first(changes: Sequence[Any]) -> None:
            if not seen and any(isinstance(one, Set) and one.path.endswith("/replicas/0") for one in changes):
                seen.append(1)
                await c.add_learner("s4")
            await commit(changes)

        coordinator.commit = change_first
        await aimed(c, "s1", "s2", "s3")
        await until_members(c, pipeline, "s0", "s1", "s2", "s3")
        assert seen
        roles, _ = await c.cluster.replica_set(0)
        assert roles.keys() == {"s0", "s1", "s2", "s3", "s4"}


@story
async def test_an_operator_who_takes_the_move_back_while_the_session_ends_is_not_overruled() -> None:
    """Who leaves was read before; with the new list it would leave two replicas of three."""
    async with cell(4, members=3) as c:
        owned, pipeline = await c.holding(20)
        session: Any = owned._session
        drain, before = session.drain, (await c.cluster.replica_set(0))[0]

        async def take_back(seconds: float) -> bool:
            session.drain = drain
            assert session.log.core.roles.keys() == {*before, "s3"}
            await c.cluster.save_moves(Moves(partitions={}), (await c.cluster.moves())[1])
            await c.cluster.save_replica_set(0, before, (await c.cluster.replica_set(0))[1])
            await c.until(lambda: session.log.core.roles.keys() == before.keys())
            return bool(await drain(seconds))

        session.drain = take_back
        await aimed(c, "s1", "s2", "s3")
        await c.until(lambda: pipeline.session.session == 2)
        await until_members(c, pipeline, *before)
        assert (await c.cluster.replica_set(0))[0] == before
