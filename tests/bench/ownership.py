"""How long appends stand still when a partition gets another owner, how much one transaction costs, and what idling costs.

A real cluster on this machine. One writer for each partition appends one transaction at a time; the longest gap between two
acknowledgements is the stall.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.process.cluster import Cluster
from waltzd.client import Client
from waltzd.frame import FeedMode
from waltzd.storages import run

PARTITIONS = 4
SESSION_SECONDS = 2


class Writers:
    """One for each partition; `stall` is the longest gap of any since `reset`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.latencies: list[float] = []
        self._last: dict[int, float] = {}
        self._worst: dict[int, float] = {}
        self._tasks = [asyncio.create_task(self._write(partition)) for partition in range(PARTITIONS)]

    async def _write(self, partition: int) -> None:
        while True:
            begun = time.perf_counter()
            await self._client.append(b"x" * 128, partition=partition)
            now = time.perf_counter()
            self.latencies.append(now - begun)
            gap = now - self._last.get(partition, now)
            self._worst[partition] = max(self._worst.get(partition, 0.0), gap)
            self._last[partition] = now

    def reset(self) -> None:
        self._worst = dict.fromkeys(range(PARTITIONS), 0.0)

    async def stall(self) -> float:
        """After everybody has gone on."""
        seen = time.perf_counter()
        while any(self._last.get(partition, 0.0) <= seen for partition in range(PARTITIONS)):
            await asyncio.sleep(0.01)
        return max(self._worst.values())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def spell(name: str, figures: list[float], unit: str = "ms", scale: float = 1000) -> None:
    middle, least, most = statistics.median(figures), min(figures), max(figures)
    print(
        f"{name:44} median {middle * scale:8.0f} {unit}   {least * scale:.0f} to {most * scale:.0f}, {len(figures)} times"
    )


async def measure(cluster: Cluster, what: str, rounds: int, disturb: Callable[[], Awaitable[None]]) -> None:
    async with Client(servers=cluster.servers, feed=FeedMode.NONE) as client:
        writers = Writers(client)
        stalls = []
        await asyncio.sleep(1)
        for _ in range(rounds):
            writers.reset()
            await disturb()
            stalls.append(await writers.stall())
            await cluster.heal()
            await asyncio.sleep(0.5)
        await writers.close()
    spell(what, stalls)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(seconds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster.make(Path(directory) / "c", partitions=64, session_seconds=6)
        cluster.start()
        try:
            lives = {name: daemon.life.pid for name, daemon in cluster.local.daemons.items() if daemon.life is not None}
            time.sleep(10)  # what a start leaves behind is not idling
            before = {name: cpu_seconds(pid) for name, pid in lives.items()}
            time.sleep(seconds)
            used = {name: (cpu_seconds(pid) - before[name]) / seconds for name, pid in lives.items()}
        finally:
            cluster.close()
    shares = ", ".join(f"{name} {100 * share:.2f}" for name, share in used.items())
    print(f"{'idle, 64 partitions, % of a core':44} total {100 * sum(used.values()):.2f} ({shares})")


async def rounds_of(cluster: Cluster, rounds: int) -> None:
    async def hand_over() -> None:
        name = await cluster.owner(0)
        cluster.send(name, signal.SIGTERM)
        await cluster.gone(name)

    async def kill() -> None:
        cluster.kill(await cluster.owner(0))

    await measure(cluster, "planned hand-over, stall", rounds, hand_over)
    await measure(cluster, f"owner killed, stall ({SESSION_SECONDS} s session)", rounds, kill)
    await one_at_a_time(cluster)


async def one_at_a_time(cluster: Cluster) -> None:
    async with Client(servers=cluster.servers, feed=FeedMode.NONE) as client:
        for name, writers in (("one writer", 1), ("64 writers on one partition", 64)):
            latencies: list[float] = []
            until = time.perf_counter() + 5

            async def write(until: float = until, latencies: list[float] = latencies) -> None:
                while time.perf_counter() < until:
                    begun = time.perf_counter()
                    await client.append(b"x" * 512, partition=0)
                    latencies.append(time.perf_counter() - begun)

            await asyncio.gather(*[write() for _ in range(writers)])
            latencies.sort()
            print(
                f"{name + ', 512 bytes':44} {len(latencies) / 5:.0f}/s, "
                f"p50 {1000 * latencies[len(latencies) // 2]:.2f} ms, "
                f"p99 {1000 * latencies[len(latencies) * 99 // 100]:.2f} ms"
            )
        payloads = [b"x" * 512] * 500
        count, begun = 0, time.perf_counter()

        async def many() -> None:
            nonlocal count
            while time.perf_counter() < begun + 5:
                outcomes = await client.append_many(payloads, partition=0)
                count += outcomes.committed

        await asyncio.gather(*[many() for _ in range(8)])
        print(f"{'8 x 500 in flight, 512 bytes':44} {count / (time.perf_counter() - begun):.0f}/s")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench ownership", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle-seconds", type=int, default=20)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster.make(Path(directory) / "c", partitions=PARTITIONS, session_seconds=SESSION_SECONDS)
        cluster.start()
        try:
            run(rounds_of(cluster, options.rounds))
        finally:
            cluster.close()
    idle(options.idle_seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
