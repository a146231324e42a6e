"""Polls of a cluster, shared by all pages and all viewers.

The number of open browsers does not change the number of polls. Without a browser the cluster is polled seldom, so that
the charts of the last minutes have no gap. A poll takes seconds if a daemon does not answer: a page waits for it for
`MOMENT_SECONDS` at most, then shows the result of the last poll, with its time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from uuid import UUID

from waltzctl.health.doctor import examination
from waltzctl.health.facts import Check, HealthReport
from waltzctl.health.poll import CALL_SECONDS, Poll
from waltzctl.health.rates import PartitionRates, Rates, rates
from waltzctl.shell.cluster_target import ClusterTarget
from waltzd.errors import WaltzError

EVERY_SECONDS = 2.0
IDLE_SECONDS = 10.0
"""Seconds between two polls while no browser is open."""
DOCTOR_SECONDS = 30.0
MOMENT_SECONDS = 0.15
"""Seconds that a page waits for a poll that is due."""
TRAIL_SECONDS = 600.0
TRAIL_MAX = 600


@dataclass(frozen=True, kw_only=True)
class Point:
    """Totals of all partitions at one time."""

    at: float
    """Time in seconds since 1970, by the clock of this machine."""
    total: PartitionRates


@dataclass(frozen=True, kw_only=True)
class Seen:
    """State of the cluster at one time."""

    number: int = 0
    """Number of the poll; it rises with each."""
    report: HealthReport | None = None
    """Report of the newest poll that succeeded; None before the first."""
    error: WaltzError | None = None
    """Error of the newest poll; None if it succeeded."""
    rates: Rates | None = None
    trail: tuple[Point, ...] = ()
    checks: tuple[Check, ...] = ()
    """Last checks of the doctor, which run less often than polls."""
    examined: str = ""
    """Time of the last checks of the doctor."""


class Watch:
    """Repeated polls of a cluster, for the pages of the console. Read it only inside `running`."""

    def __init__(self, target: ClusterTarget, *, every: float = EVERY_SECONDS) -> None:
        self.target, self.every = target, every
        self.poll = Poll(target)
        self.seen = Seen()
        self.is_over = False
        self._viewers = 0
        self._polled = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._trail: deque[Point] = deque(maxlen=TRAIL_MAX)
        self._at = 0.0
        self._examined = -DOCTOR_SECONDS
        self._ills: tuple[str, ...] = ()
        self._examining: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Poll the cluster while the body runs. Raise the error of the first poll: there may be no cluster."""
        async with self.poll:
            await self._poll_once()
            if self.seen.error is not None:
                raise self.seen.error
            task = asyncio.create_task(self._go_on())
            try:
                yield
            finally:
                tasks = [one for one in (task, self._examining) if one is not None]
                for one in tasks:
                    one.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def name(self) -> str:
        """Name of the cluster."""
        assert self.seen.report is not None
        return self.seen.report.snapshot.meta.name

    @property
    def key(self) -> UUID:
        """Key of the cluster."""
        assert self.seen.report is not None
        return self.seen.report.snapshot.meta.key

    def end(self) -> None:
        """End the streams of all viewers."""
        self.is_over = True
        self._ending = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        async with self._polled:
            self._polled.notify_all()

    async def now(self) -> Seen:
        """Return the current state; wait briefly for a poll that is due."""
        if time.monotonic() - self._at > 1.5 * self.every:
            before = self.seen.number
            self._wanted.set()
            await self._next(before, MOMENT_SECONDS)
        return self.seen

    @asynccontextmanager
    async def viewing(self) -> AsyncIterator[None]:
        """Poll the cluster while this viewer is connected."""
        self._viewers += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._viewers -= 1

    async def next(self, before: int, seconds: float) -> Seen:
        """Return the first state newer than poll `before`, or the current one after `seconds`."""
        await self._next(before, seconds)
        return self.seen

    async def _next(self, before: int, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._polled:
                await self._polled.wait_for(lambda: self.seen.number > before or self.is_over)

    async def _go_on(self) -> None:
        while True:
            self._wanted.clear()
            with suppress(TimeoutError):
                if self._viewers:
                    await asyncio.sleep(max(0.0, self._at + self.every - time.monotonic()))
                else:
                    async with asyncio.timeout(max(0.0, self._at + IDLE_SECONDS - time.monotonic())):
                        await self._wanted.wait()
            await self._poll_once()

    async def _poll_once(self) -> None:
        before, then = self.seen, self._at
        try:
            report = await self.poll.report()
        except WaltzError as error:
            found = replace(before, error=error, rates=None)
        else:
            found = self._rated(before, report, time.monotonic() - then)
            self._examine(report)
        self._at = time.monotonic()
        doctor = self.seen  # it may have come meanwhile
        await self.publish(replace(found, number=before.number + 1, checks=doctor.checks, examined=doctor.examined))

    async def publish(self, seen: Seen) -> None:
        """To all that follow."""
        async with self._polled:
            self.seen = seen
            self._polled.notify_all()

    def _examine(self, report: HealthReport) -> None:
        """Start the checks of the doctor in a task, so that a daemon that does not answer delays no poll. New problems
        start them before their time."""
        ills = tuple(reason.key for reason in report.verdict.reasons)
        is_due = ills != self._ills or time.monotonic() - self._examined >= DOCTOR_SECONDS
        if is_due and (self._examining is None or self._examining.done()):
            self._examined, self._ills = time.monotonic(), ills
            self._examining = asyncio.create_task(self._examination(report))

    async def _examination(self, report: HealthReport) -> None:
        with suppress(WaltzError):  # the next poll reports the error
            checks = tuple(await examination(self.poll, report, seconds=CALL_SECONDS))
            self.seen = replace(self.seen, checks=checks, examined=report.at)

    def _rated(self, before: Seen, report: HealthReport, seconds: float) -> Seen:
        if before.error is not None or before.report is None:
            return replace(before, report=report, error=None, rates=None)
        found = rates(before.report.snapshot, report.snapshot, seconds)
        now = time.time()
        self._trail.append(Point(at=now, total=found.total))
        while self._trail[0].at < now - TRAIL_SECONDS:
            self._trail.popleft()
        return Seen(report=report, rates=found, trail=tuple(self._trail))
