"""Looking for all viewers at once: how often, what is kept, and what a look that fails leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.snapshots import well
from waltzctl.console import watch as watching
from waltzctl.console.watch import Watch
from waltzctl.health.facts import Check, Facts, Grade, HealthReport
from waltzctl.health.rules import judge
from waltzctl.shell.cluster_target import ClusterTarget
from waltzd.errors import CannotConnect, WaltzError

REACH = ClusterTarget(hosts="zk:1", root="/waltz", tls=None, name="trial", is_protected=False, origins={})
SOON = 0.001
CHECK = Check(name="a check", grade=Grade.PASS, finding="all is well")


@dataclass
class Poll:
    """What each look sees; the last one is seen again and again."""

    sights: list[HealthReport | WaltzError]
    looks: int = 0
    waits: Callable[[], Awaitable[Any]] = field(default=lambda: asyncio.sleep(0))

    async def __aenter__(self) -> Poll:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def report(self) -> HealthReport:
        self.looks += 1
        await self.waits()
        found = self.sights.pop(0) if len(self.sights) > 1 else self.sights[0]
        if isinstance(found, WaltzError):
            raise found
        return found


def sight(at: str = "2026-11-24T12:00:00Z") -> HealthReport:
    facts = Facts(snapshot=well())
    return HealthReport(facts=facts, verdict=judge(facts), at=at, milliseconds=1.0)


@pytest.fixture(autouse=True)
def no_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object, **__: object) -> list[Any]:
        return []

    monkeypatch.setattr(watching, "examination", nothing)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def watch_of(*sights: HealthReport | WaltzError, every: float = SOON) -> tuple[Watch, Poll]:
    found, poll = Watch(REACH, every=every), Poll(list(sights))
    found.poll = poll  # type: ignore[assignment]
    return found, poll


def test_what_the_first_look_says_is_raised() -> None:
    async def work() -> None:
        found, _ = watch_of(CannotConnect("away"))
        with pytest.raises(CannotConnect):
            async with found.running():
                raise AssertionError("it must not begin")

    run(work())


def test_viewers_share_the_looks_and_rates_come_with_the_second() -> None:
    async def work() -> None:
        found, poll = watch_of(sight())
        async with found.running():
            assert found.seen.rates is None
            async with found.viewing(), found.viewing():
                first, second = await asyncio.gather(*(found.next(found.seen.number, 60) for _ in range(2)))
            assert first is second
            assert first.rates is not None
            assert len(first.trail) == 1
            assert found.name == "trial"
            assert poll.looks >= 2

    run(work())


def test_a_look_that_fails_keeps_what_was_seen() -> None:
    async def work() -> None:
        good = sight()
        found, _ = watch_of(good, good, CannotConnect("away"), sight("later"))
        async with found.running(), found.viewing():
            numbers = []
            while found.seen.error is None:
                numbers.append((await found.next(found.seen.number, 60)).number)
            assert found.seen.report is good
            assert found.seen.rates is None, "of what it was a minute ago nobody wants to know now"
            assert len(found.seen.trail) == 1
            seen = await found.next(found.seen.number, 60)
            assert (seen.error, seen.report and seen.report.at) == (None, "later")
            assert seen.rates is None, "there is nothing to compare it with"

    run(work())


def test_a_page_never_waits_long_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        found, poll = watch_of(sight())
        async with found.running():
            poll.waits = asyncio.Event().wait
            monkeypatch.setattr(watching, "MOMENT_SECONDS", SOON)
            await asyncio.sleep(2 * SOON)  # now a look is due
            assert (await found.now()).number == 1

    run(work())


def test_the_end_lets_all_go_that_follow() -> None:
    async def work() -> None:
        found, _ = watch_of(sight(), every=3600)
        async with found.running():
            waiting = asyncio.create_task(found.next(found.seen.number, 3600))
            await asyncio.sleep(0)
            found.end()
            assert (await waiting).number == 1
            assert found.is_over

    run(work())


def test_what_the_doctor_says_stays_with_the_next_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async def said(*_: object, **__: object) -> list[Check]:
            return [CHECK]

        monkeypatch.setattr(watching, "examination", said)
        found, _ = watch_of(sight())
        async with found.running(), found.viewing():
            while not (await found.next(found.seen.number, 60)).checks:
                pass
            assert (await found.next(found.seen.number, 60)).checks == (CHECK,)

    run(work())
