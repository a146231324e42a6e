"""The clients of a run: they race for a few locks as in `tests/process/race.py`, and are watched.

What a client may meet in a time of faults is an error that says `try again`; everything else is a finding, and so is a
partition that nobody can commit to when nothing is wrong any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tests.process.race import Race
from waltzd.errors import Retry, WaltzError
from waltzd.protocol.locks import Committed, Outcome, Unknown

RATE = 500
"""Transactions in a second, of all clients together."""
CLIENTS, CALLERS = 3, 5


class Load(Race):
    def __init__(
        self, folder: Path, servers: Sequence[str], *, tag: str, partitions: Sequence[int], seed: int, rate: int = RATE
    ) -> None:
        super().__init__(
            folder,
            servers,
            tag=tag,
            partitions=partitions,
            clients=CLIENTS,
            callers=CALLERS,
            seed=seed,
            rate=rate,
            has_groups=True,
            are_clocks_right=False,
        )
        self.counts = dict.fromkeys(partitions, 0)
        """Committed, by partition."""
        self._last = dict.fromkeys(partitions, time.monotonic())
        self._silence = 0.0
        self.unknown = 0
        self.is_lost = False
        """Whether something is so wrong that the run is over."""
        self.unavailable: Counter[str] = Counter()
        """Errors that say `try again`, by code."""
        self.broken: list[str] = []
        """Errors that no fault excuses."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """What clients raise comes out here. Where the cluster is lost, requests that are under way are given up."""
        tasks = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        try:
            yield self
        finally:
            self._stop.set()
            if self.is_lost:
                for task in tasks:
                    task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException) and not (self.is_lost and isinstance(end, asyncio.CancelledError)):
                raise end

    def take_silence(self) -> float:
        """The longest time without a commit in some partition, since the last call."""
        now = time.monotonic()
        longest = max([self._silence, *(now - last for last in self._last.values())])
        self._silence = 0.0
        return longest

    async def progress(self, seconds: float) -> bool:
        """Whether something new is committed in every partition in that time."""
        before = dict(self.counts)
        try:
            async with asyncio.timeout(seconds):
                while any(self.counts[partition] == before[partition] for partition in before):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return False
        return True

    def _failed(self, where: str, error: WaltzError) -> None:
        if error.retry in (Retry.LATER, Retry.ELSEWHERE):
            self.unavailable[error.code] += 1
        else:
            self.broken.append(f"{where}: {error!r}")

    def _note(self, partition: int, outcome: Outcome) -> None:
        super()._note(partition, outcome)
        self.unknown += isinstance(outcome, Unknown)
        if isinstance(outcome, Committed):
            now = time.monotonic()
            self.counts[partition] += 1
            self._silence = max(self._silence, now - self._last[partition])
            self._last[partition] = now
