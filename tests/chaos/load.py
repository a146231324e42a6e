"""The clients of a run: they race for a few locks as in `tests/process/race.py`, at a bounded rate, and are watched.

A bounded rate keeps histories small enough to be judged. What a client may meet in a time of faults is an error that says
`try again`; everything else is a finding, and so is a partition that nobody can commit to when nothing is wrong any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tests.checker.recorder import Recorder
from tests.process.race import Race
from tests.workload import Attempt
from waltzd.client.client import Client
from waltzd.errors import Retry, WaltzError
from waltzd.protocol.locks import Committed, Unknown

RATE = 500
"""Transactions in a second, of all clients together."""
CLIENTS, CALLERS = 3, 5


class Load(Race):
    def __init__(
        self, folder: Path, servers: Sequence[str], *, tag: str, partitions: Sequence[int], seed: int, rate: int = RATE
    ) -> None:
        super().__init__(
            folder, servers, tag=tag, partitions=partitions, clients=CLIENTS, callers=CALLERS, seed=seed
        )  # fmt: skip
        self._pause = CLIENTS * CALLERS / rate
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
        self.pending: dict[str, float] = {}
        """Who waits for an outcome, and since when."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """What clients raise comes out here. Where the cluster is lost, nobody waits for what is under way."""
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

    async def _caller(self, client: Client, recorder: Recorder, number: int, caller: int) -> None:
        name = f"{self._tag}.{number}.{caller}"
        pick = random.Random(f"{self._seed}:{name}")
        count = 0
        while not self._stop.is_set():
            count += 1
            partition = pick.choice(self._partitions)
            self.pending[f"{name} in partition {partition}"] = time.monotonic()
            try:
                outcome = await client.submit(recorder.context(Attempt(name, count, pick, partition)))
            except WaltzError as error:
                if error.retry in (Retry.LATER, Retry.ELSEWHERE):
                    self.unavailable[error.code] += 1
                else:
                    self.broken.append(f"client {number}, partition {partition}: {error!r}")
            else:
                if isinstance(outcome, Committed):
                    self._note(partition)
                self.unknown += isinstance(outcome, Unknown)
            finally:
                del self.pending[f"{name} in partition {partition}"]
            await asyncio.sleep(pick.uniform(0, 2 * self._pause))

    def _note(self, partition: int) -> None:
        now = time.monotonic()
        self.committed += 1
        self.counts[partition] += 1
        self._silence = max(self._silence, now - self._last[partition])
        self._last[partition] = now
