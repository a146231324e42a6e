"""Whether a session still holds: who is asked, whose answer counts, and for whom."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import nextafter
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from tests.simulation.cell import SETTINGS, SimPort, cell, story
from tests.unit.timeless import run
from waltzd.errors import CannotConnect, NotReady
from waltzd.errors.operations import SessionEnded
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.server.core.progress import OUTLASTS, Lease, Marks, Progress
from waltzd.server.session.change_signal import ChangeSignal
from waltzd.server.session.confirmation import SessionConfirmation
from waltzd.server.session.replicated_log import ReplicatedLog
from waltzd.server.session.settings import WAIT_SECONDS_MIN, SessionSettings

SESSION = 5


def leasing(seconds: float) -> SessionSettings:
    """On the clock of the test."""
    return replace(SETTINGS, lease_seconds=seconds, clock=lambda: asyncio.get_running_loop().time())


class FakeLog:
    """Session 5 with the members A, B and C, which have joined; each answers `promised` when it may."""

    def __init__(self, *, lease_seconds: float = 0.0) -> None:
        self.settings = leasing(lease_seconds)
        self.partition, self.session = 0, SESSION
        self.marks: Marks | None = Marks({name: Progress() for name in "ABC"}, tuple("ABC"), 4)
        if lease_seconds > 0 and self.marks is not None:
            self.marks.lease = Lease(3, lease_seconds)
        self.sending_up_to: int | None = None
        self.decided = ChangeSignal()
        self.promised = dict.fromkeys("ABC", SESSION)
        self.incarnations = dict.fromkeys("ABC", UUID(int=1))
        self.replicators: dict[str, Any] = {}
        self.core = SimpleNamespace(
            meta=SimpleNamespace(replicas={n: SimpleNamespace(incarnation=UUID(int=1)) for n in "ABC"})
        )
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.ended: BaseException | None = None

    def port(self, name: str) -> Any:
        async def status(_partition: int) -> ReplicaStatus:
            self.asked += 1
            promised = self.promised[name]  # at the storage; the answer may take long
            await self.may_answer.wait()
            if promised < 0:
                raise CannotConnect(f"{name} is away")
            found = SimpleNamespace(promised_session=promised, session=SESSION, incarnation=self.incarnations[name])
            return cast(ReplicaStatus, found)

        return SimpleNamespace(status=status)


def confirming(log: FakeLog) -> SessionConfirmation:
    return SessionConfirmation(cast(ReplicatedLog, log))


def test_a_majority_is_enough() -> None:
    async def test() -> None:
        log = FakeLog()
        log.promised["B"] = -1
        await confirming(log).confirm()

    run(test())


@pytest.mark.parametrize("how", ["promised", "away", "another disk"])
def test_a_replaced_owner_confirms_nothing(how: str) -> None:
    async def test() -> None:
        log = FakeLog()
        for name in "AC":
            if how == "another disk":
                log.incarnations[name] = UUID(int=2)
            else:
                log.promised[name] = SESSION + 1 if how == "promised" else -1
        with pytest.raises(NotReady, match=r"A.*C"):
            await confirming(log).confirm()

    run(test())


def test_who_comes_during_a_round_waits_for_the_next() -> None:
    async def test() -> None:
        log = FakeLog()
        log.may_answer.clear()
        asked = confirming(log)
        first = [asyncio.create_task(asked.confirm()) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert log.asked == 3, "they share one"
        log.promised.update(A=SESSION + 1, B=SESSION + 1)
        second = [asyncio.create_task(asked.confirm()) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert log.asked == 3, "one is in flight"
        log.may_answer.set()
        assert await asyncio.gather(*first) == [None] * 3
        found = await asyncio.gather(*second, return_exceptions=True)
        assert [type(one) for one in found] == [NotReady] * 3
        assert log.asked == 6

    run(test())


def test_no_round_begins_while_the_session_gives_way() -> None:
    async def test() -> None:
        log = FakeLog()
        log.sending_up_to = 9
        waiting = asyncio.create_task(confirming(log).confirm())
        await asyncio.sleep(0.1)
        assert log.asked == 0
        log.sending_up_to = None
        log.decided.notify()
        await waiting

    run(test())


def test_who_stops_waiting_takes_nothing_from_the_others() -> None:
    async def test() -> None:
        log = FakeLog()
        log.may_answer.clear()
        asked = confirming(log)
        gone, stays = (asyncio.create_task(asked.confirm()) for _ in range(2))
        await asyncio.sleep(0.1)
        gone.cancel()
        log.may_answer.set()
        await stays

    run(test())


def test_a_round_is_a_lease_from_before_its_question_on() -> None:
    async def test() -> None:
        log = FakeLog(lease_seconds=0.2)
        log.may_answer.clear()
        asked = confirming(log)
        first = asyncio.create_task(asked.confirm())
        await asyncio.sleep(0.15)  # the answers are on their way
        log.may_answer.set()
        await first
        assert log.asked == 3
        await asked.confirm()
        assert log.asked == 3, "no round"
        await asyncio.sleep(0.04)
        log.promised.update(A=SESSION + 1, B=SESSION + 1)
        await asked.confirm()
        assert log.asked == 3, "a new owner has to wait until this is over"
        await asyncio.sleep(0.01)
        with pytest.raises(NotReady, match="promised itself"):
            await asked.confirm()

    run(test())


def test_a_lease_ends_with_its_session() -> None:
    async def test() -> None:
        log = FakeLog(lease_seconds=0.2)
        asked = confirming(log)
        await asked.confirm()
        assert asked.is_leased
        log.ended = NotReady("replaced", partition=0)
        assert not asked.is_leased
        with pytest.raises(SessionEnded):
            await asked.confirm()

    run(test())


def test_who_loses_its_vote_takes_its_part_of_the_lease_away() -> None:
    async def test() -> None:
        log = FakeLog(lease_seconds=0.2)
        log.promised["C"] = -1
        asked = confirming(log)
        await asked.confirm()
        assert asked.is_leased
        assert log.marks is not None
        log.marks.lose("B")
        assert not asked.is_leased

    run(test())


@story
async def test_real_storages_confirm_an_open_session_and_the_next_one_of_its_owner() -> None:
    async with cell() as c:
        _, pipeline = await c.holding(100, settings=SETTINGS)
        asked, log = SessionConfirmation(pipeline.session), pipeline.session
        await asked.confirm()
        c.storages["s2"].kill()
        await asked.confirm()
        c.storages["s1"].kill()
        with pytest.raises(NotReady, match="s1"):
            await asked.confirm()
        await c.storages["s1"].start()
        await c.until(lambda: log.replicators["s1"].is_readable)
        await asked.confirm()


@story
async def test_storages_that_have_opened_for_another_owner_confirm_nothing() -> None:
    async with cell() as c:
        _, first = await c.holding(100)
        asked = SessionConfirmation(first.session)
        for link in first.session.replicators.values():  # it hears nothing any more, and still asks
            link.cancel()
        second = await c.opened(await c.own(2))
        await second.committed(second.append(50))
        assert first.session.ended is None
        assert first.session.committed < second.session.committed, "its own mark is an old one"
        with pytest.raises(NotReady, match="has promised itself to session 2"):
            await asked.confirm()
        await SessionConfirmation(second.session).confirm()


@story
async def test_acknowledged_appends_are_a_lease() -> None:
    async with cell() as c:
        _, pipeline = await c.holding(100, settings=leasing(0.2))
        log = SessionConfirmation(pipeline.session)
        assert (await c.meta()).lease_ms == 200
        assert log.is_leased
        await asyncio.sleep(0.3)
        assert not log.is_leased, "nothing was acknowledged for a while"
        await pipeline.committed(pipeline.append(1))
        assert log.is_leased
        c.storages["s1"].kill()
        c.storages["s2"].kill()
        pipeline.append(1)
        await asyncio.sleep(0.3)
        assert not log.is_leased, "one of three has it"


@story
async def test_nobody_opens_while_a_lease_may_hold() -> None:
    """The owner hears nothing of those who replace it; the first of these dies on the way, and has another setting."""
    async with cell() as c:
        clock = asyncio.get_running_loop().time
        _, first = await c.holding(100, settings=leasing(0.2))
        for link in first.session.replicators.values():
            link.cancel()
        old = SessionConfirmation(first.session)
        await old.confirm()
        began = clock()
        dies = await c.own(2, settings=leasing(0.0))
        await c.until(lambda: dies._session is not None and dies._session.log.core.meta.decision is not None)
        dies.task.cancel()
        await asyncio.gather(dies.task, return_exceptions=True)
        assert old.is_leased
        assert clock() - began < 0.1
        second = await c.opened(await c.own(3, settings=leasing(0.0)))
        assert not old.is_leased
        assert OUTLASTS * 0.2 <= clock() - began < OUTLASTS * 0.2 + 0.2
        assert (await c.meta()).lease_ms == 0
        await second.committed(second.append(50))


@story
async def test_a_rest_of_a_lease_that_is_too_short_for_a_timer_is_waited_for_all_the_same() -> None:
    """What is left is more than nothing, and adds nothing to the time of the loop."""
    async with cell() as c:
        loop, asked = asyncio.get_running_loop(), list[float]()

        def clock() -> float:
            asked.append(loop.time())
            if len(asked) == 1:
                return 0.0
            return OUTLASTS * 0.2 if asked[-1] > asked[1] else nextafter(OUTLASTS * 0.2, 0)

        first, _ = await c.holding(100, settings=leasing(0.2))
        await asyncio.sleep(2)
        await first.close(hand_over=False)
        await c.opened(await c.own(2, settings=replace(leasing(0.0), clock=clock)))
        assert asked[2] - asked[1] >= WAIT_SECONDS_MIN, "what is left would be waited for again and again"


class SlowToPromise(SimPort):
    async def open(self, *what: Any, **more: Any) -> Any:
        await asyncio.sleep(0.5)
        return await super().__getattr__("open")(*what, **more)


@story
async def test_a_lease_is_outlasted_from_when_the_promises_are_known() -> None:
    """The new owner asks for promises, and the old one renews its lease before the storages give them."""
    async with cell() as c:
        clock = asyncio.get_running_loop().time
        _, first = await c.holding(100, settings=leasing(0.2))
        for link in first.session.replicators.values():
            link.cancel()
        old, began = SessionConfirmation(first.session), clock()
        c.connect = lambda meta: SlowToPromise(c.storages[meta.name])  # type: ignore[method-assign]
        owned = await c.own(2, settings=leasing(0.0))
        await asyncio.sleep(0.45)
        await old.confirm()
        await c.opened(owned)
        assert not old.is_leased
        assert clock() - began >= 0.5 + OUTLASTS * 0.2


@pytest.mark.parametrize("how", ["handed over", "goes on", "gives way", "none was set"])
def test_nobody_waits_for_a_lease_that_is_over(how: str) -> None:
    async def test() -> None:
        async with cell() as c:
            clock = asyncio.get_running_loop().time
            settings = replace(leasing(0.0 if how == "none was set" else 0.2), session_bytes_max=20_000)
            owned, pipeline = await c.holding(100, settings=settings)
            began, session = clock(), pipeline.session.session
            if how == "goes on":
                pipeline.session.end(SessionEnded("a trial"))
                await c.opened(owned, above=session)
            elif how == "gives way":
                await pipeline.committed(pipeline.append(500))
                await c.until(lambda: pipeline.session.session > session and pipeline.session.marks is not None)
            else:
                await owned.close(hand_over=how == "handed over")
                assert (await c.meta()).lease_ms == 0
                await c.opened(await c.own(2, settings=settings))
            assert clock() - began < 0.2

    run(test())
