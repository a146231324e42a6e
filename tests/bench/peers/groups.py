"""`./dev bench groups-nats`: a consumer group in queue mode beside a pull consumer of JetStream, under the same members.

The same processes work for both, one system after the other: some refuse, some forget, some are killed. What is promised is
counted from what the members wrote down: nothing skipped, how much came again, and how much came again although its
acknowledgement was answered. Rates and latencies stand beside it. Both have three copies of the messages, flushed before
they are acknowledged."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.bench.peers.command import machine_facts
from tests.bench.peers.group_member import ACKNOWLEDGED, DELIVERED, SUBJECT, Task
from tests.bench.peers.jetstream import CALL_SECONDS, SERVERS, STREAM, FlushingJetStream, JetStreamSession
from tests.bench.peers.process import undisturbed
from tests.bench.peers.system import System, until_it_works
from tests.bench.peers.waltz import Waltz
from waltzctl.shell.blueprint import free_ports

ROOT = Path(__file__).parents[3]
ACK_WAIT_SECONDS = 3
TRIES = 100
IN_FLIGHT = 1000
PUBLISH_MAX = 500
SIZE = 128
POLL_SECONDS = 0.1
PATIENCE_SECONDS = 120.0
SYSTEMS = ("waltz", "jetstream", "jetstream-confirmed")


class Side(Protocol):
    """The log of one system, and its groups."""

    async def make(self, group: str) -> None:
        """A group that begins behind everything that is there."""
        ...

    async def publish(self, numbers: Sequence[int]) -> None:
        """Returns when all of them are acknowledged."""
        ...

    async def close(self) -> None: ...


class WaltzSide:
    def __init__(self, system: Waltz) -> None:
        from waltzd.client.client import Client

        self._system = system
        self._client = Client(system.cluster.servers)

    async def open(self) -> None:
        await self._client.open()

    async def make(self, group: str) -> None:
        words = ["group", "create", group, "--start", "last", "--ack-wait", f"{ACK_WAIT_SECONDS}s", "--tries", str(TRIES)]
        words += [
            "--back-off",
            "none",
            "--max-in-flight",
            str(IN_FLIGHT),
            "--directory",
            str(self._system.home / "cluster"),
        ]
        command = [sys.executable, "-m", "waltzctl", *words, "--yes"]
        done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the group was not made: {done.stdout}{done.stderr}")

    async def publish(self, numbers: Sequence[int]) -> None:
        await self._client.append_many([_payload(number) for number in numbers], partition=0)

    async def close(self) -> None:
        await self._client.close()


class JetStreamSide:
    def __init__(self, system: FlushingJetStream) -> None:
        self._session = JetStreamSession(system.address)

    async def open(self) -> None:
        await self._session.open()

    async def make(self, group: str) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
        from nats.js.errors import Error

        async def make() -> None:
            await self._session._js.add_consumer(
                STREAM,
                ConsumerConfig(
                    durable_name=group,
                    deliver_policy=DeliverPolicy.NEW,
                    ack_policy=AckPolicy.EXPLICIT,
                    ack_wait=ACK_WAIT_SECONDS,
                    max_deliver=TRIES,
                    max_ack_pending=8 * IN_FLIGHT,
                    num_replicas=SERVERS,
                ),
            )

        await until_it_works("a consumer with three replicas", make, Error)

    async def publish(self, numbers: Sequence[int]) -> None:
        js = self._session._js
        async with asyncio.timeout(CALL_SECONDS):
            await asyncio.gather(*[await js.publish_async(SUBJECT, _payload(number)) for number in numbers])

    async def close(self) -> None:
        await self._session.close()


def _payload(number: int) -> bytes:
    return b"%020d" % number + bytes(SIZE - 20)


# -- members -----------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What members wrote down, of one phase."""

    first: dict[int, float] = field(default_factory=dict)
    """When a number was delivered first."""
    acknowledged: dict[int, float] = field(default_factory=dict)
    """When the first acknowledgement of it was answered."""
    deliveries: int = 0
    again: int = 0
    """Deliveries of what was delivered before."""
    duplicates: int = 0
    """And of what was acknowledged before, with an answer."""

    def read(self, lines: list[tuple[float, str, int]]) -> None:
        """In the order of time."""
        for moment, kind, number in sorted(lines):
            if kind == ACKNOWLEDGED:
                self.acknowledged.setdefault(number, moment)
            elif kind == DELIVERED:
                self.deliveries += 1
                self.again += number in self.first
                self.duplicates += number in self.acknowledged
                self.first.setdefault(number, moment)


class Members:
    """Processes that work for one group."""

    def __init__(self, task: Task, home: Path) -> None:
        self._task = task
        self._home = home
        self._running: list[subprocess.Popen[bytes]] = []
        self._files: list[Path] = []
        self._read: dict[Path, int] = {}
        self.killed = 0

    def begin(self) -> None:
        path = self._home / f"{self._task.group}-{len(self._files)}.txt"
        command = [sys.executable, "-m", "tests.bench.peers.group_member", self._task.to_json()]
        with path.open("wb") as file, path.with_suffix(".err").open("wb") as errors, undisturbed():
            self._running.append(subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=errors, start_new_session=True))
        self._files.append(path)

    async def until_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(path.stat().st_size for path in self._files):
            self._check(deadline)
            await asyncio.sleep(POLL_SECONDS)

    def _check(self, deadline: float) -> None:
        for process, path in zip(self._running, self._files[-len(self._running) :], strict=False):
            if process.poll() is not None:
                said = path.with_suffix(".err").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"a member of {self._task.group} ended by itself: {said}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"members of {self._task.group} were not ready")

    def kill_one(self) -> None:
        """The oldest, and another takes its place."""
        process = self._running.pop(0)
        process.kill()
        process.wait()
        self.killed += 1
        self.begin()

    def lines(self) -> list[tuple[float, str, int]]:
        """Whole lines that were not read yet."""
        found = []
        for path in self._files:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.decode().splitlines():
                kind, number, _, moment = line.split()
                if kind != "r":
                    found.append((float(moment), kind, int(number)))
        return found

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Result:
    system: str
    phase: str
    count: int
    rate: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    skipped: int = 0
    again: int = 0
    duplicates: int = 0
    killed: int = 0
    seconds: float = 0.0
    """Until everything was acknowledged, from the first publication on."""


class Trial:
    """One system, phase after phase."""

    def __init__(self, system: System, side: Side, name: str, options: argparse.Namespace) -> None:
        self._system = system
        self._side = side
        self._name = name
        self._options = options
        self._number = 0

    async def run(self) -> list[Result]:
        options = self._options
        return [
            await self._drain(options.count),
            await self._pace(options.rate, options.seconds),
            await self._trouble(options.rate, options.seconds),
        ]

    @asynccontextmanager
    async def _members(self, group: str, count: int, *, refused: int = 0, forgotten: int = 0) -> AsyncIterator[Members]:
        await self._side.make(group)
        task = Task(self._name, self._system.address, group, refused, forgotten)
        members = Members(task, self._system.home)
        try:
            for _ in range(count):
                members.begin()
            await members.until_ready()
            yield members
        finally:
            members.end()

    def _numbers(self, count: int) -> range:
        begin, self._number = self._number, self._number + count
        return range(begin, self._number)

    async def _drain(self, count: int) -> Result:
        """As fast as it goes: published while the members work."""
        async with self._members("drain", self._options.members) as members:
            numbers = self._numbers(count)
            begun = time.monotonic()
            for at in range(0, count, PUBLISH_MAX):
                await self._side.publish(numbers[at : at + PUBLISH_MAX])
            seen = await self._all(members, numbers)
        times = sorted(seen.acknowledged.values())
        low, high = len(times) // 10, len(times) * 9 // 10
        rate = (high - low) / max(times[high] - times[low], 1e-6) if len(times) > 100 else None
        return self._result("as fast as it goes", numbers, seen, members, begun, rate=rate)

    async def _pace(self, rate: int, seconds: float) -> Result:
        """At a rate that is no load: how long after its commit a message is in the hands of a member."""
        async with self._members("paced", self._options.members) as members:
            numbers, begun = self._numbers(int(rate * seconds)), time.monotonic()
            committed = await self._publish_at(rate, numbers)
            seen = await self._all(members, numbers)
        waits = sorted(max(0.0, seen.first[one] - committed[one]) for one in numbers if one in seen.first)
        p50, p99 = statistics.median(waits) * 1e3, waits[len(waits) * 99 // 100] * 1e3
        return self._result(f"{rate}/s", numbers, seen, members, begun, p50_ms=p50, p99_ms=p99)

    async def _trouble(self, rate: int, seconds: float) -> Result:
        """Members refuse, forget, and are killed: a fifth of them, at least."""
        options = self._options
        kills = max(1, -(-options.troubled // 5))
        async with self._members("troubled", options.troubled, refused=30, forgotten=10) as members:
            numbers, begun = self._numbers(int(rate * seconds)), time.monotonic()
            publishing = asyncio.create_task(self._publish_at(rate, numbers))
            for _ in range(kills):
                await asyncio.sleep(seconds / (kills + 1))
                members.kill_one()
            await publishing
            seen = await self._all(members, numbers)
            await asyncio.sleep(2 * ACK_WAIT_SECONDS)  # what would come once more
            seen.read(members.lines())
        return self._result("refused, forgotten, killed", numbers, seen, members, begun)

    async def _publish_at(self, rate: int, numbers: range) -> dict[int, float]:
        committed: dict[int, float] = {}
        running: list[asyncio.Task[None]] = []

        async def one(number: int) -> None:
            await self._side.publish([number])
            committed[number] = time.monotonic()

        begun = time.monotonic()
        for at, number in enumerate(numbers):
            await asyncio.sleep(max(0.0, begun + at / rate - time.monotonic()))
            running.append(asyncio.create_task(one(number)))
        await asyncio.gather(*running)
        return committed

    async def _all(self, members: Members, numbers: range) -> Seen:
        """Until everything is acknowledged, or nothing more comes."""
        seen, lines = Seen(), list[tuple[float, str, int]]()
        deadline, count = time.monotonic() + PATIENCE_SECONDS, 0
        acknowledged: set[int] = set()
        while len(acknowledged) < len(numbers) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            more = members.lines()
            acknowledged |= {number for _, kind, number in more if kind == ACKNOWLEDGED}
            lines += more
            if len(acknowledged) > count:
                deadline, count = time.monotonic() + PATIENCE_SECONDS, len(acknowledged)
        seen.read(lines)
        return seen

    def _result(
        self, phase: str, numbers: range, seen: Seen, members: Members, begun: float, **figures: float | None
    ) -> Result:
        return Result(
            self._name,
            phase,
            len(numbers),
            skipped=sum(1 for one in numbers if one not in seen.first),
            again=seen.again,
            duplicates=seen.duplicates,
            killed=members.killed,
            seconds=max(seen.acknowledged.values(), default=begun) - begun,
            **figures,
        )


# -- the command -------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench groups-nats", description=__doc__)
    parser.add_argument("--systems", type=lambda words: words.split(","), default=list(SYSTEMS), help=",".join(SYSTEMS))
    parser.add_argument("--count", type=int, default=20_000, help="of messages, as fast as they go")
    parser.add_argument("--rate", type=int, default=300, help="of messages a second, otherwise")
    parser.add_argument("--seconds", type=float, default=10.0, help="for so long")
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--troubled", type=int, default=5, help="members of which a fifth are killed")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.systems if name not in SYSTEMS]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    home = Path(tempfile.mkdtemp(prefix="waltz-groups-"))
    ports, results = free_ports(os.getpid()), list[Result]()
    print(machine_facts(home))
    try:
        for name in options.systems:
            kind: type[System] = Waltz if name == "waltz" else FlushingJetStream
            if missing := kind.missing():
                print(f"{name} is skipped: {missing} is not here. To have it: {kind.package}", file=sys.stderr)
                continue
            results += carry_out(kind(_folder(home, name), ports), name, options)
    finally:
        with undisturbed():
            shutil.rmtree(home)
    print("\n".join(text_of(results)))
    return 1 if any(one.skipped for one in results) else 0


def _folder(home: Path, name: str) -> Path:
    folder = home / name
    folder.mkdir()
    return folder


def carry_out(system: System, name: str, options: argparse.Namespace) -> list[Result]:
    async def story() -> list[Result]:
        side: Any = WaltzSide(system) if isinstance(system, Waltz) else JetStreamSide(system)  # type: ignore[arg-type]
        await side.open()
        try:
            return await Trial(system, side, name, options).run()
        finally:
            await side.close()

    try:
        system.start()
        print(f"{name} {system.facts.version}: {system.facts.durability}", flush=True)
        return asyncio.run(story())
    finally:
        with undisturbed():
            system.stop()


def text_of(results: Sequence[Result]) -> Iterator[str]:
    head = ["system", "load", "messages", "done/s", "p50 ms", "p99 ms", "skipped", "again", "after ack", "killed", "s"]
    rows = [head, *[_cells(one) for one in results]]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    for row in rows:
        cells = [cell.ljust(widths[at]) if at < 2 else cell.rjust(widths[at]) for at, cell in enumerate(row)]
        yield "  ".join(cells)


def _cells(one: Result) -> list[str]:
    def spelled(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        one.system,
        one.phase,
        f"{one.count:,}",
        spelled(one.rate, ",.0f"),
        spelled(one.p50_ms, ".1f"),
        spelled(one.p99_ms, ".1f"),
        str(one.skipped),
        str(one.again),
        str(one.duplicates),
        str(one.killed),
        f"{one.seconds:.1f}",
    ]
