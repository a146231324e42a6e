"""How long partitions are silent while all of them get other replicas: a load on a cluster of this machine, two storages
that are added, and then five replicas of everything, beside the same load while nothing moves.

A gap is how long one transaction took; each partition has one in flight. All processes share this machine, so the gaps
beside moves are to be compared with those of the base, and with how much of the processors the daemons took.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.machine import use_of
from tests.spare_storages import members
from waltzctl.local_cluster.local import LocalCluster
from waltzd.client.client import Client
from waltzd.client.loop import run
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Committed, Rejected

BINS = (0.1, 0.3, 0.5, 1.0)


@dataclass
class Phase:
    gaps: dict[int, float] = field(default_factory=dict)
    """The longest one of each partition."""
    outcomes: Counter[str] = field(default_factory=Counter)
    over: Counter[float] = field(default_factory=Counter)
    seconds: float = 0.0
    cores: float = 0.0
    """How many the daemons took."""

    def line(self, name: str) -> str:
        longest = sorted(self.gaps.values()) or [0.0]
        more = "".join(f"{self.over[limit]:8}" for limit in BINS) + f"{self.cores:7.2f}"
        told = ", ".join(f"{count} {what}" for what, count in sorted(self.outcomes.items()))
        return f"{name:22} {self.seconds:6.1f} {longest[len(longest) // 2]:8.2f} {longest[-1]:8.2f}{more}   {told}"


class Load:
    def __init__(self, client: Client, partitions: int, rate: float) -> None:
        self.phase = Phase()
        self._client = client
        self._pause = partitions / rate
        self._partitions = partitions

    async def run(self) -> None:
        await asyncio.gather(*(self._write(partition) for partition in range(self._partitions)))

    async def _write(self, partition: int) -> None:
        """One transaction after the other, so the time of each is how long the partition was silent for its writer."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._pause * partition / self._partitions)
        due = loop.time()
        while True:
            begun = loop.time()
            outcomes = await self._client.append_many([b"x" * 512], partition=partition, position=-1)
            took, phase = loop.time() - begun, self.phase
            outcome = outcomes[0]
            what = outcome.reason.name if isinstance(outcome, Rejected) else type(outcome).__name__.lower()
            phase.outcomes[what] += 1
            if isinstance(outcome, Committed):
                phase.gaps[partition] = max(phase.gaps.get(partition, 0.0), took)
                phase.over.update(limit for limit in BINS if took > limit)
            due = max(due + self._pause, loop.time())
            await asyncio.sleep(due - loop.time())


async def tool(directory: Path, *words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "waltzctl", *words, "--yes", "--directory", str(directory),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"waltzctl {' '.join(words)} ended with {process.returncode}:\n{said.decode()}")


async def measure(cluster: LocalCluster, partitions: int, rate: float, seconds: float, fill: int) -> None:
    new = [f"{name}={','.join(cluster.blueprint.addresses(name))}" for name in ("storage-4", "storage-5")]
    async with Client(",".join(cluster.server_addresses), feed=FeedMode.NONE) as client:
        for partition in range(partitions):
            await client.append_many([b"x" * 4096] * (fill // 4096), partition=partition, position=-1)
        load = Load(client, partitions, rate)
        working = asyncio.create_task(load.run())
        loop = asyncio.get_running_loop()
        print(
            f"{'':22} {'s':>6} {'median':>8} {'longest':>8}"
            + "".join(f"{f'> {limit:g} s':>8}" for limit in BINS)
            + f"{'cores':>7}"
        )

        async def phase(name: str, *commands: tuple[str, ...]) -> None:
            load.phase, begun, used = Phase(), loop.time(), cpu_seconds(cluster)
            for words in commands:
                await tool(cluster.directory, *words)
            await asyncio.sleep(max(0.0, seconds - (loop.time() - begun)))
            load.phase.seconds = loop.time() - begun
            load.phase.cores = (cpu_seconds(cluster) - used) / load.phase.seconds
            print(load.phase.line(name), flush=True)

        try:
            await phase("nothing moves")
            await phase("two storages added", *(("storage", "add", one, "--auto-assign") for one in new))
            await phase("five replicas", ("cluster", "set", "--replicas", "5"))
            await phase("nothing moves again")
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


def cpu_seconds(cluster: LocalCluster) -> float:
    uses = [use_of(daemon.life.pid) for daemon in cluster.daemons.values() if daemon.life is not None]
    return sum(use.cpu_seconds for use in uses if use is not None)


def renewals(cluster: LocalCluster) -> str:
    logs = [path.read_text(errors="replace") for path in (cluster.directory / "log").glob("server-*")]
    return f"planned new sessions: {sum(len(re.findall('a new session:', text)) for text in logs)}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench moves", description=__doc__)
    parser.add_argument("--partitions", type=int, default=32)
    parser.add_argument("--rate", type=float, default=200.0, help="transactions a second, over all partitions")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase, at least")
    parser.add_argument("--fill", type=int, default=1 << 19, help="bytes in each partition before it begins")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        cluster = LocalCluster.make(Path(directory) / "c", partitions=options.partitions, storages=5)
        try:
            with members(3):
                cluster.start()
            run(measure(cluster, options.partitions, options.rate, options.seconds, options.fill))
            print(renewals(cluster))
        finally:
            cluster.kill()
    return 0
