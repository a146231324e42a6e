"""Clients that race for a few locks while a test breaks things, everything written down, and the checker's verdict.

Each client keeps a view of its own. A transaction reads one lock and writes another, or appends under a third; its payload
is unique. What the log is in the end comes from a client that has seen nothing yet, and from every storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from uuid import UUID

from tests.checker.history import Writer, load
from tests.checker.recorder import Recorder, log_records
from tests.checker.verdict import Verdict, judge
from tests.workload import Attempt, GroupView, View
from waltzd.client.client import Client
from waltzd.client.settings import ClientSettings
from waltzd.errors import CannotConnect, NeedsBatches, NotReady, WaltzError
from waltzd.errors.operations import NotOwner, SessionEnded
from waltzd.format.record import Run
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Committed, Outcome, Reason, Rejected
from waltzd.wire.servers import ServerClient
from waltzd.wire.storages import ReplicaClient

RATE = 250
"""Transactions in a second, of all clients together: what they do keeps no processor from the daemons, and a history stays
small enough to be judged."""
GROUPS_SHARE = 0.15


class Race:
    def __init__(
        self,
        folder: Path,
        servers: Sequence[str],
        *,
        tag: str,
        partitions: Sequence[int],
        clients: int = 3,
        callers: int = 4,
        seed: int = 0,
        rate: int = RATE,
        has_groups: bool = False,
        are_clocks_right: bool = True,
    ) -> None:
        """All races on one cluster share the folder: the history must know everything that is in the log. With
        `has_groups` some transactions come in groups, where the log is of format 1."""
        self._folder = folder
        self._tag = tag
        self._servers = list(servers)
        self._partitions = list(partitions)
        self._clients = clients
        self._callers = callers
        self._seed = seed
        self._has_groups = has_groups
        self._are_clocks_right = are_clocks_right
        self._pause = clients * callers / rate
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.pending: dict[str, float] = {}
        """Which callers wait for an outcome, and since when."""
        self.committed = 0
        self.lost = 0
        self.failures: list[WaltzError] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Race]:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]
        try:
            yield self
        finally:
            self._stop.set()
            ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def more(self, count: int, seconds: float = 60) -> None:
        """Until so many more transactions are committed."""
        wanted = self.committed + count
        try:
            async with asyncio.timeout(seconds):
                while self.committed < wanted:
                    for task in self._tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{self.committed} committed, {wanted} were expected; {self.failures[-3:]}") from None

    async def _client(self, number: int) -> None:
        with Writer(self._folder / f"{self._tag}-{number}.jsonl") as writer:
            recorder = Recorder(writer, f"{self._tag}-{number}", are_clocks_right=self._are_clocks_right)
            client = Client(
                servers=",".join(self._servers),
                view=recorder.view(GroupView() if number % 2 else View()),
                partitions=self._partitions,
                settings=ClientSettings(close_seconds=1),  # each caller has its outcome by then, or is given up
            )
            async with client:
                callers = [self._caller(client, recorder, number, caller) for caller in range(self._callers)]
                await asyncio.gather(*callers)

    async def _caller(self, client: Client, recorder: Recorder, number: int, caller: int) -> None:
        name = f"{self._tag}.{number}.{caller}"
        pick = random.Random(f"{self._seed}:{name}")
        count = 0
        while not self._stop.is_set():
            count += 1
            partition = pick.choice(self._partitions)
            waiting = f"{name} in partition {partition}"
            self.pending[waiting] = time.monotonic()
            size = pick.randrange(2, 6) if self._has_groups and pick.random() < GROUPS_SHARE else 0
            try:
                if size:
                    members = [Attempt(f"{name}:{number}", count, pick, partition) for number in range(size)]
                    outcome = await client.submit_atomic(recorder.group(members))
                else:
                    outcome = await client.submit(recorder.command(Attempt(name, count, pick, partition)))
            except NeedsBatches:
                pass
            except WaltzError as error:
                self._failed(f"client {number}, partition {partition}", error)
            else:
                self._note(partition, outcome)
            finally:
                del self.pending[waiting]
            await asyncio.sleep(pick.uniform(0, 2 * self._pause))

    def _failed(self, where: str, error: WaltzError) -> None:
        self.failures.append(error)

    def _note(self, partition: int, outcome: Outcome) -> None:
        self.lost += isinstance(outcome, Rejected) and outcome.reason is Reason.NOT_IN_LOG
        self.committed += isinstance(outcome, Committed)

    async def verdict(self, storages: Sequence[str], key: UUID) -> Verdict:
        """The history against the log as its owners give it, and against what each storage gives to readers."""
        await self._commit_one_more()
        history = load(self._folder.glob("*.jsonl"))
        for partition in self._partitions:
            for run in await self._fetch(partition, key):
                history.log(partition, log_records(run), first=run.first_id)
            for storage in storages:
                async with ReplicaClient(storage, key) as replica:
                    async for run in replica.read(partition, 0):
                        history.log(partition, log_records(run), first=run.first_id, source=storage)
        return judge(history)

    async def _fetch(self, partition: int, key: UUID) -> list[Run]:
        """From the owner of the moment."""
        async with asyncio.timeout(60), Client(servers=",".join(self._servers), partitions=[]) as client:
            while True:
                address = client.topology.places[partition].address or self._servers[0]
                async with ServerClient(address, key) as owner:
                    try:
                        return [run async for run in owner.fetch(partition, 0, with_locks=True)]
                    except (CannotConnect, NotOwner, NotReady, SessionEnded):
                        await asyncio.sleep(0.2)

    async def _commit_one_more(self) -> None:
        """What is read afterwards is the log of an owner that could still commit."""
        with Writer(self._folder / f"{self._tag}-end.jsonl") as writer:
            recorder = Recorder(writer, f"{self._tag}-end")
            async with Client(servers=",".join(self._servers), feed=FeedMode.NONE, partitions=self._partitions) as client:
                for partition in self._partitions:
                    last = f"the end of {self._tag} in {partition}"
                    outcome = await recorder.append(client, last.encode(), partition=partition)
                    attempts = 1
                    # another owner came meanwhile
                    while isinstance(outcome, Rejected) and outcome.reason is Reason.NOT_IN_LOG:
                        attempts += 1
                        outcome = await recorder.append(client, f"{last}:{attempts}".encode(), partition=partition)
                    assert isinstance(outcome, Committed), outcome
