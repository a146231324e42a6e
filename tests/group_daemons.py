"""Members of consumer groups, each a process that works through the library, race on real daemons; then a verdict.

    ./dev groups --real [--seconds 600] [--members 16] [--seed N]

Three groups, one of each mode, want most of the same log. A fifth of the members are killed with -9 and come back, and so
are servers, the owner of the group log among them, and storages, one at a time. Each member writes down all that passes on
its streams, what it says before that leaves it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from tests.checker.group_history import GroupHistory, GroupWriter, Standing, Written
from tests.checker.group_verdict import judge_group
from tests.checker.recorder import payload_key
from tests.checker.verdict import Verdict
from tests.group_members import WINDOW, Clock, WitnessedStream, is_calm
from tests.process.cluster import Cluster
from waltzctl.placement.creation import make_group_log
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.client.delivery import Delivery
from waltzd.client.settings import ClientSettings
from waltzd.client.subscription import Subscription
from waltzd.cluster.cluster import Cluster as Documents
from waltzd.errors import CannotConnect, DeliveryLate, Displaced, WaltzError
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.groups import Mode
from waltzd.protocol.peers import AttendPort
from waltzd.wire.servers import ServerAdminClient, ServerClient

PARTITIONS, HEADERS, RATE = 2, 4, 40
"""Transactions in a second: what members and daemons do fits on two processors."""
ACK_WAIT, ROOM, DELIVER_MAX, BACK_OFF = 2.0, 20, 4, (0.02, 0.2)
WANTED = tuple(range(HEADERS - 1))
PATIENCE_SECONDS = 180.0

# -- a member, in a process of its own


class _Server(ServerClient):
    def __init__(self, address: str, key: UUID | None, witness: Callable[[AttendPort], AttendPort]) -> None:
        super().__init__(address, key)
        self._witness = witness

    def attend(self) -> AttendPort:
        return self._witness(super().attend())


class _Process:
    """What one life of a member does in all groups."""

    def __init__(self, folder: Path, name: str, life: int) -> None:
        self.name, self.life = name, f"{name}.{life}"
        self.chance = random.Random(f"{folder} {self.life}")
        self.is_settling = False
        self._notes = {mode.value: GroupWriter(folder / f"{mode}-{self.life}.jsonl") for mode in Mode}
        self._clock = Clock(time.monotonic)
        self._streams = itertools.count(1)

    def connect(self, address: str, key: UUID | None) -> _Server:
        return _Server(address, key, self._witness)

    def _witness(self, stream: AttendPort) -> WitnessedStream:
        return WitnessedStream(
            stream,
            self._notes.__getitem__,
            self._clock,
            lambda group, partition: f"{self.life}/{partition}#{next(self._streams)}",
        )

    async def run(self, servers: str) -> None:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._hear)
        settings = ClientSettings(submit_seconds=20.0, instance=self.life)
        async with Client(servers, partitions=[], connect=self.connect, settings=settings) as client:
            await asyncio.gather(*[self._work(client, mode) for mode in Mode])

    def _hear(self) -> None:
        """A word: from now on it settles what comes. The end: who started it is gone."""
        if not os.read(sys.stdin.fileno(), 100):
            os._exit(1)
        self.is_settling = True

    async def _work(self, client: Client[bytes], mode: Mode) -> None:
        while True:
            try:
                async with client.subscribe(mode.value, member=self.name) as subscription:
                    async for deliveries in subscription.batches(most=4):
                        if not self.is_settling and self.chance.random() < 0.01:
                            break  # it leaves, and what it has goes to others
                        with suppress(DeliveryLate, CannotConnect):
                            await self._treat(subscription, deliveries, mode)
            except Displaced:
                await asyncio.sleep(2.0)
            except WaltzError as error:
                print(f"{mode}: {error.code} {error.message}", file=sys.stderr, flush=True)
                await asyncio.sleep(0.2)

    async def _treat(self, subscription: Subscription[bytes], deliveries: Sequence[Delivery[bytes]], mode: Mode) -> None:
        chance = self.chance
        if self.is_settling:
            await subscription.ack(deliveries, durable=chance.random() < 0.1)
            return
        await asyncio.sleep(0.05 * chance.random())
        if is_calm(time.monotonic()):  # of all members at once: there is one clock
            await subscription.ack(deliveries)
            return
        if chance.random() < 0.4:
            await subscription.ack(deliveries, durable=chance.random() < 0.25)
            return
        for delivery in deliveries:
            dice = chance.randrange(100)
            if dice < 6:
                await delivery.nack(reason="it did not work")
            elif dice < 8:
                await delivery.reject("it will never work")
            elif dice < 10 and mode is not Mode.ORDERED:
                await asyncio.sleep(2 * ACK_WAIT * chance.random())  # and nothing is said of it
            elif dice < 11:
                pass
            else:
                await delivery.ack(durable=dice < 30)


# -- the race


@dataclass
class Report:
    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    appended: int = 0
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        return len(self.verdicts) == len(Mode) and all(verdict.is_sound for verdict in self.verdicts.values())

    def __str__(self) -> str:
        kills = ", ".join(f"{count} × {what}" for what, count in sorted(self.kills.items()))
        lines = [f"seed {self.seed}: {self.appended} appended; killed with -9: {kills}"]
        return "\n".join([*lines, *(f"{mode}: {verdict}" for mode, verdict in self.verdicts.items())])


class DaemonRace:
    def __init__(self, folder: Path, *, seed: int, seconds: float, members: int) -> None:
        self.folder, self.seconds = folder, seconds
        self.chance = random.Random(seed)
        self.report = Report(seed)
        self.cluster = Cluster.make(folder / "cluster", partitions=PARTITIONS, servers=2)
        self.names = [f"m{number}" for number in range(members)]
        self._histories = folder / "history"
        self._members: dict[str, asyncio.subprocess.Process] = {}
        self._lives = itertools.count(1)
        self._killed: set[int] = set()
        self._outages: list[tuple[int, int]] = []
        self._clock = Clock(time.monotonic)
        self._is_racing = True

    async def run(self) -> Report:
        self._histories.mkdir()
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._make_groups()
            await asyncio.gather(*[self._start(name) for name in self.names])
            tasks = [asyncio.create_task(work) for work in (self._load(), self._crash(), self._strike())]
            done, _ = await asyncio.wait(tasks, timeout=self.seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            self._is_racing = False
            await asyncio.gather(*tasks)
            await self.cluster.heal()
            await self._judge()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for process in self._members.values():
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        return self.report

    async def _make_groups(self) -> None:
        async with self.cluster.local._coordinator() as coordinator:
            await make_group_log(Documents(coordinator))
        await self.cluster.until("the group log is open", _keeper)
        async with Client(self.cluster.servers, partitions=[]) as client:
            for mode in Mode:
                await client.create_group(
                    mode.value,
                    mode=mode.value,
                    kinds=WANTED,
                    ack_wait=ACK_WAIT,
                    max_in_flight=ROOM,
                    tries=DELIVER_MAX,
                    back_off=BACK_OFF,
                )

    async def _start(self, name: str) -> None:
        words = [str(self._histories), self.cluster.servers, name, str(next(self._lives))]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._members[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.group_daemons", *words, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log
            )

    async def _load(self) -> None:
        numbers = itertools.count()
        async with Client(self.cluster.servers, feed=FeedMode.NONE, partitions=range(PARTITIONS)) as client:

            async def load(partition: int) -> None:
                while self._is_racing:
                    more = secrets.token_bytes(self.chance.choice((0, 8, 300)))
                    payload = f"{partition} {next(numbers)} ".encode() + more
                    await client.append(payload, partition=partition, kind=self.chance.randrange(HEADERS))
                    self.report.appended += 1
                    await asyncio.sleep(2 * PARTITIONS * self.chance.random() / RATE)

            await asyncio.gather(*map(load, range(PARTITIONS)))

    async def _crash(self) -> None:
        """A fifth of the members, again and again."""

        async def crash(name: str) -> None:
            while self._is_racing:
                await asyncio.sleep(3 + 5 * self.chance.random())
                process = self._members[name]
                assert process.returncode is None, f"{name} has ended: {(self.folder / f'{name}.log').read_text()[-2000:]}"
                process.kill()
                await process.wait()
                self.report.kills["member"] += 1
                await asyncio.sleep(0.5 * self.chance.random())
                await self._start(name)

        await asyncio.gather(*map(crash, self.names[: len(self.names) // 5]))

    async def _strike(self) -> None:
        """One daemon at a time; the next one when the cluster is whole again."""
        cluster, chance = self.cluster, self.chance
        while self._is_racing:
            await asyncio.sleep(1 + 3 * chance.random())
            keeper = await cluster.until("the group log is open", _keeper)
            kind = chance.choice(("owner of the group log", "owner of a partition", "owner of a partition", "storage"))
            if kind == "owner of a partition":
                name = await cluster.owner(chance.randrange(PARTITIONS))
            else:
                name = chance.choice(cluster.storage_names) if kind == "storage" else keeper
            began = self._clock()
            cluster.kill(name)
            self.report.kills[kind] += 1
            await asyncio.sleep(1.5 * chance.random())
            cluster.spawn(name)
            await cluster.settled()
            if name == keeper:
                self._outages.append((began, self._clock()))

    # -- the end

    async def _judge(self) -> None:
        async with Client(self.cluster.servers, partitions=[]) as client:
            log = {partition: await _read(client, partition) for partition in range(PARTITIONS)}
        for name in self.names:
            stdin = self._members[name].stdin
            assert stdin is not None
            stdin.write(b"settle\n")
        ends = {partition: max(records, default=-1) for partition, records in log.items()}
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            standings = {mode: await self._standings(mode.value) for mode in Mode}
            is_over = all(
                partition in found and found[partition].floor >= ends[partition]
                for found in standings.values()
                for partition in ends
            )
            if is_over or time.monotonic() > end:
                break
            await asyncio.sleep(0.5)
        for mode in Mode:
            history = GroupHistory(mode, room=ROOM, deliver_max=DELIVER_MAX, headers=WANTED, window=WINDOW)
            history.log.update(log)
            history.outages = list(self._outages)
            history.load(self._histories.glob(f"{mode}-*.jsonl"))
            history.standings = standings[mode]
            self.report.verdicts[mode.value] = judge_group(history)

    async def _standings(self, group: str) -> dict[int, Standing]:
        """By the word of owners."""
        found: dict[int, Standing] = {}
        for name in self.cluster.server_names:
            address = self.cluster.local.blueprint.addresses(name)[1]
            async with ServerAdminClient(address, self.cluster.key) as admin:
                for place in (await admin.groups(group)).groups[0].places:
                    if place.is_at_work:
                        parked = {one.id: one.failures for one in (await admin.parked(group, place.partition)).parked}
                        found[place.partition] = Standing(place.floor, place.stopped, parked)
        return found


def _keeper(found: ClusterSnapshot) -> str | None:
    return None if found.group_log is None or not found.group_log.is_open else found.group_log.owner


async def _read(client: Client[bytes], partition: int) -> dict[int, Written]:
    found: dict[int, Written] = {}
    end = await client.end_position(partition)
    while len(found) <= end:
        for one in await client.read_some(partition, after=len(found) - 1, through=end):
            found[one.id] = Written(payload_key(one.payload), one.kind, str(one.kind))
    return found


def race_on_daemons(folder: Path, *, seed: int, seconds: float, members: int) -> Report:
    race = DaemonRace(folder, seed=seed, seconds=seconds, members=members)
    race.cluster.start()
    try:
        return loop.run(race.run())
    finally:
        race.cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("servers")
    parser.add_argument("name")
    parser.add_argument("life", type=int)
    given = parser.parse_args()
    loop.run(_Process(given.folder, given.name, given.life).run(given.servers))


if __name__ == "__main__":
    main()
