"""Whether a session still holds: who is asked, whose answer counts, and for whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from tests.simulation.cell import SETTINGS, cell, story
from tests.unit.timeless import run
from waltzd.errors import CannotConnect, NotReady
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.server.core.progress import Marks, Progress
from waltzd.server.session.confirming import Confirming
from waltzd.server.session.replica import Log
from waltzd.server.session.wake import Bell

SESSION = 5


class FakeLog:
    """Session 5 with the members A, B and C, which have joined; each answers `promised` when it may."""

    def __init__(self) -> None:
        self.partition, self.session = 0, SESSION
        self.marks: Marks | None = Marks({name: Progress() for name in "ABC"}, tuple("ABC"), 4)
        self.sending_up_to: int | None = None
        self.decided = Bell()
        self.promised = dict.fromkeys("ABC", SESSION)
        self.incarnations = dict.fromkeys("ABC", UUID(int=1))
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


def confirming(log: FakeLog) -> Confirming:
    return Confirming(cast(Log, log))


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
        log.decided.ring()
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


@story
async def test_real_storages_confirm_an_open_session_and_the_next_one_of_its_owner() -> None:
    async with cell() as c:
        _, pipeline = await c.holding(100, settings=SETTINGS)
        asked, log = Confirming(pipeline.session), pipeline.session
        await asked.confirm()
        c.storages["s2"].kill()
        await asked.confirm()
        c.storages["s1"].kill()
        with pytest.raises(NotReady, match="s1"):
            await asked.confirm()
        await c.storages["s1"].start()
        await c.until(lambda: log.links["s1"].is_readable)
        await asked.confirm()


@story
async def test_storages_that_have_opened_for_another_owner_confirm_nothing() -> None:
    async with cell() as c:
        _, first = await c.holding(100)
        asked = Confirming(first.session)
        for link in first.session.links.values():  # it hears nothing any more, and still asks
            link.cancel()
        second = await c.opened(await c.own(2))
        await second.committed(second.append(50))
        assert first.session.ended is None
        assert first.session.committed < second.session.committed, "its own mark is an old one"
        with pytest.raises(NotReady, match="has promised itself to session 2"):
            await asked.confirm()
        await Confirming(second.session).confirm()
