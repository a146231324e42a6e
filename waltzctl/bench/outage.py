"""`recovery`: how long writing stands still when an owner goes, and how fast a storage that was away gets level again.

Only on a cluster of our own: processes are killed. One writer for each partition appends a transaction at a time; the
longest gap between two answers, over all partitions, is the stall.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from waltzctl.bench.appending import Bench, Meter
from waltzctl.bench.drive import Drive, open_client
from waltzctl.bench.figures import Latencies
from waltzctl.bench.load import Load
from waltzctl.bench.result import Result, Series
from waltzctl.bench.tally import Tally
from waltzctl.picture.picture import Picture
from waltzctl.playground.local import LocalCluster, is_even
from waltzd.client.client import Client
from waltzd.errors import DaemonSilent, WaltzError
from waltzd.format.record import OVERHEAD_BYTES

PATIENCE_SECONDS = 120.0
POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0


class _Writers:
    """One for each partition."""

    def __init__(self, client: Client, partitions: int, payload: bytes) -> None:
        self._client = client
        self._payload = payload
        self._last = dict.fromkeys(range(partitions), 0.0)
        self._begun = dict.fromkeys(range(partitions), 0.0)
        """When the transaction was handed over that was answered last."""
        self._worst = dict.fromkeys(range(partitions), 0.0)
        self._tasks = [asyncio.create_task(self._write(partition)) for partition in range(partitions)]

    async def _write(self, partition: int) -> None:
        while True:
            begun = time.perf_counter()
            await self._client.append(self._payload, partition=partition)
            now = time.perf_counter()
            gap = now - (self._last[partition] or now)
            self._worst[partition] = max(self._worst[partition], gap)
            self._last[partition], self._begun[partition] = now, begun

    def begin(self) -> None:
        self._worst = dict.fromkeys(self._worst, 0.0)

    async def stall(self) -> float:
        """When everybody has gone on: an answer may still have been on its way when the owner ended."""
        seen = time.perf_counter()
        while any(begun <= seen for begun in self._begun.values()):
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
        return max(self._worst.values())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def recovery(bench: Bench, load: Load, rounds: int) -> Result:
    cluster = bench.site.local
    assert cluster is not None
    tally, meter = Tally(), Meter(bench.site)
    async with open_client(bench.site, load) as client:
        load = load.on(client.partition_count)
        await meter.begin()
        stalls = [
            await _stalls(cluster, client, load, rounds, "owner stopped", signal.SIGTERM),
            await _stalls(cluster, client, load, rounds, "owner killed", signal.SIGKILL),
        ]
        caught_up = await _catch_up(bench, cluster, client, load, tally)
        await meter.end()
        return meter.result(bench, "recovery", client, tally, [*stalls, *caught_up])


async def _stalls(
    cluster: LocalCluster, client: Client, load: Load, rounds: int, name: str, number: signal.Signals
) -> Series:
    writers = _Writers(client, load.partitions, b"x" * load.size)
    stalls = Latencies()
    begun = time.perf_counter()
    try:
        for _ in range(rounds):
            await asyncio.sleep(SETTLE_SECONDS)
            writers.begin()
            owner = await _owner(cluster)
            cluster.daemons[owner].send(number)
            await _until("the owner ends", partial(_is_gone, cluster, owner))
            stalls.add(await writers.stall())
            await asyncio.to_thread(cluster.start_one, owner)
            await _settled(cluster)
    finally:
        await writers.close()
    return Series.of(name, stalls, time.perf_counter() - begun, 0)


async def _catch_up(bench: Bench, cluster: LocalCluster, client: Client, load: Load, tally: Tally) -> list[Series]:
    """From the moment in which the storage says that it is ready."""
    assert load.count is not None
    name = cluster.blueprint.storage_names[0]
    await asyncio.to_thread(cluster.daemons[name].kill)
    await Drive(client, load, tally, watch=bench.watch).run()
    size = tally.committed * (load.size + OVERHEAD_BYTES)
    await asyncio.to_thread(cluster.start_one, name)
    begun = time.perf_counter()
    await _settled(cluster)
    took = time.perf_counter() - begun
    plain = await asyncio.to_thread(_copy_seconds, cluster.directory, size)
    return [
        Series(name="catch-up", count=tally.committed, seconds=took, bytes=size),
        Series(name="plain copy", count=0, seconds=plain, bytes=size),
    ]


def _copy_seconds(directory: Path, size: int) -> float:
    path, piece = directory / "plain-copy", os.urandom(1 << 20)
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        left = size
        while left > 0:
            left -= file.write(piece[:left])
        os.fdatasync(file.fileno())
    took = time.perf_counter() - begun
    path.unlink()
    return took


async def _owner(cluster: LocalCluster) -> str:
    found = await cluster.picture()
    owner = found.partitions[0].owner
    assert owner is not None
    return owner


async def _is_gone(cluster: LocalCluster, name: str) -> bool:
    return not cluster.daemons[name].is_running


async def _settled(cluster: LocalCluster) -> None:
    """Every partition is open, with all its replicas level, and every server is back and has got its share: handing over is
    over, which would cost answers that are on their way."""

    async def is_settled() -> bool:
        try:
            found = await cluster.picture()
        except WaltzError:
            return False
        are_back = len(found.servers) == cluster.blueprint.servers
        return found.is_healthy and are_back and _is_level(found) and is_even(found)

    await _until("the cluster settles", is_settled)


def _is_level(found: Picture) -> bool:
    return all(
        replica.state == "LIVE" for view in found.partitions if view.said is not None for replica in view.said.replicas
    )


async def _until(what: str, true: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await true():
        if time.monotonic() > deadline:
            raise DaemonSilent(f"{what}: not within {PATIENCE_SECONDS:g} seconds")
        await asyncio.sleep(POLL_SECONDS)
