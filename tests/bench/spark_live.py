"""What is measured beside a cluster that runs: what its appends feel of an export, and what it costs to read in bulk.

The exports are the command as users call it, over and over, so that the start of each Spark counts, too.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.peers.process import cpu_seconds
from waltzctl.local_cluster.local import ROOT, LocalCluster
from waltzd.format.record import OVERHEAD_BYTES
from waltzd.wire.storages import ReplicaClient

APPEND_RATE, APPEND_BYTES = 300, 175
"""Transactions a second, and the bytes of each."""
POLL_SECONDS = 0.1
BULK_BYTES = 1 << 20
SINGLE_RECORDS = 20_000


@contextmanager
def cluster_at(home: Path, records: int) -> Iterator[LocalCluster]:
    """A cluster with so many records."""
    cluster = LocalCluster.make(home / "cluster", servers=1)
    cluster.start()
    try:
        _bench(cluster, "--producers", 8, "--batch", 500, "--count", records)
        yield cluster
    finally:
        cluster.kill()


# -- B12 ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Beside:
    p99: dict[str, list[float]]
    """In ms, of transactions that were appended alone, beside exports at full speed, and beside some with a rate."""
    full_rates: list[float]
    """Bytes a second of the log that exports at full speed read meanwhile."""
    rate: float
    """What the others were told."""
    kept_rates: list[float]


def beside_appends(cluster: LocalCluster, home: Path, seconds: float, rate: float | None, rounds: int) -> Beside:
    warm = _export(cluster, home / "export", None)
    rate = rate or float(round(warm["data_bytes"] / (seconds + 2)))
    p99: dict[str, list[float]] = {"alone": [], "full": [], "rate": []}
    full_rates, kept_rates = [], []
    for _ in range(rounds):
        p99["alone"].append(_p99(cluster, seconds))
        with _exporting(cluster, home, None) as done:
            p99["full"].append(_p99(cluster, seconds))
        full_rates.append(_rate(done))
        with _exporting(cluster, home, rate) as done:
            p99["rate"].append(_p99(cluster, seconds))
        kept_rates.append(_rate(done))
    return Beside(p99=p99, full_rates=full_rates, rate=rate, kept_rates=kept_rates)


@contextmanager
def _exporting(cluster: LocalCluster, home: Path, rate: float | None) -> Iterator[list[dict[str, Any]]]:
    """One export after the other, until the block is over and the last one is done. One with a rate lasts long: there, the
    block begins when its tasks do."""
    done: list[dict[str, Any]] = []
    has_enough = threading.Event()

    def work() -> None:
        while not has_enough.is_set():
            done.append(_export(cluster, home / "export", rate))

    with ThreadPoolExecutor(1) as pool:
        exports = pool.submit(work)
        try:
            while rate is not None and not exports.done() and not list((home / "export").glob("_waltz/tmp/*/*")):
                time.sleep(POLL_SECONDS)
            yield done
        finally:
            has_enough.set()
        exports.result()


def _export(cluster: LocalCluster, output: Path, rate: float | None) -> dict[str, Any]:
    """What it says that it did."""
    if output.exists():
        shutil.rmtree(output)
    where = ["--coordinator", cluster.coordinator_hosts, "--root", ROOT]
    found = _told("spark-export", output, *where, *([] if rate is None else ["--rate", int(rate)]))
    exported: dict[str, Any] = found["exported"]
    return exported


def _rate(done: list[dict[str, Any]]) -> float:
    """While tasks ran: what Spark takes to start is not the log's."""
    return float(sum(each["data_bytes"] for each in done) / sum(each["task_seconds"] for each in done))


def _p99(cluster: LocalCluster, seconds: float) -> float:
    found = _bench(cluster, "--rate", APPEND_RATE, "--producers", 8, "--seconds", seconds)
    return float(found["series"][0]["latency_ms"]["p99"])


def _bench(cluster: LocalCluster, *options: object) -> dict[str, Any]:
    return _told("bench", "append", "--at", ",".join(cluster.server_addresses), "--yes", "--size", APPEND_BYTES, *options)


def _told(*words: object) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("waltzctl")), *map(str, words), "-o", "json"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# -- B13 ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reading:
    records: int
    seconds: float
    storage_cpu: float

    @property
    def rate(self) -> float:
        return self.records / self.seconds


def read_in_bulk(cluster: LocalCluster) -> Reading:
    """What a storage has of one partition, as the source reads it."""
    return asyncio.run(_read(cluster, BULK_BYTES, None))


def read_one_by_one(cluster: LocalCluster) -> Reading:
    """The same call with a message for each record."""
    return asyncio.run(_read(cluster, APPEND_BYTES + OVERHEAD_BYTES, SINGLE_RECORDS - 1))


async def _read(cluster: LocalCluster, frame_bytes: int, last_id: int | None) -> Reading:
    name = cluster.blueprint.storage_names[0]
    address, life = cluster.blueprint.addresses(name)[0], cluster.daemons[name].life
    assert life is not None
    pid = life.pid
    records = messages = 0
    async with ReplicaClient(address, cluster.blueprint.key) as replica:
        cpu, started = cpu_seconds([pid]), time.perf_counter()
        async for run in replica.read(0, 0, last_id, frame_bytes=frame_bytes):
            records += len(run)
            messages += 1
        seconds, cpu = time.perf_counter() - started, cpu_seconds([pid]) - cpu
    assert last_id is None or messages == records, "a message for each record was wanted"
    return Reading(records=records, seconds=seconds, storage_cpu=cpu)
