"""`./dev bench curves`: throughput, latency and memory against one thing at a time, as tables and pictures.

Every point is a run of `waltzctl bench append`, or of `mixed` where there are readers, on a cluster of its own. The points
of the log's length share one cluster. The points of one curve are measured one after the other in each round, and what is
shown is the median of the rounds, because a shared machine drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

from tests.bench.machine import use_of
from waltzctl.local_cluster.local import LocalCluster
from waltzd.client.client import Client
from waltzd.client.loop import run
from waltzd.cluster.documents import FORMAT
from waltzd.protocol.batches import FeedMode

IN_FLIGHT_BYTES = 2 << 20
IN_FLIGHT_MAX = 8000
PRODUCERS = 8
SHOWN = ("server-1", "storage-1")
TOLD_CHARACTERS = 2000
DRIFT = 0.2


@dataclass(frozen=True)
class Point:
    at: float
    """Where on the axis."""
    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Curve:
    name: str
    axis: str
    load: str
    """What is the same at all points."""
    points: tuple[Point, ...]
    has_readers: bool = False


@dataclass
class Measured:
    rates: list[float] = field(default_factory=list)
    p50s: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)
    memories: dict[str, list[float]] = field(default_factory=dict)
    """The most that each process had, in MB."""
    openings: list[float] = field(default_factory=list)
    """Seconds from the start of all processes until partitions are open."""

    def add(self, series: dict[str, Any], memories: dict[str, float]) -> None:
        self.rates.append(series["per_second"])
        if series["latency_ms"]:
            self.p50s.append(series["latency_ms"]["p50"])
            self.p99s.append(series["latency_ms"]["p99"])
        for name, value in memories.items():
            self.memories.setdefault(name, []).append(value)


def batch_of(size: int) -> int:
    """So many that every size has as many bytes in flight, within reason."""
    return max(1, min(IN_FLIGHT_MAX, IN_FLIGHT_BYTES // size) // PRODUCERS)


def many(size: int) -> tuple[str, ...]:
    return ("--size", str(size), "--producers", str(PRODUCERS), "--batch", str(batch_of(size)))


WIDE = ("--producers", "64", "--batch", "64")
CLUSTER = ("partitions", "storages", "replicas")
"""Options of a point that are for the cluster and not for the load."""
CURVES = {
    "producers": Curve(
        "producers",
        "producers",
        "one transaction of 512 bytes in flight each, one partition",
        tuple(Point(n, str(n), ("--producers", str(n), "--partitions", "1")) for n in (1, 4, 16, 64, 256, 1024)),
    ),
    "partitions": Curve(
        "partitions",
        "partitions",
        "64 producers with 64 transactions of 512 bytes in flight each",
        tuple(Point(n, str(n), (*WIDE, "--partitions", str(n))) for n in (1, 4, 16, 64, 256)),
    ),
    "payload": Curve(
        "payload",
        "bytes of a payload",
        "2 MiB in flight, four partitions",
        tuple(Point(n, str(n), many(n)) for n in (128, 512, 4096, 32768, 262144)),
    ),
    "replicas": Curve(
        "replicas",
        "replicas",
        "8 producers with 500 transactions of 512 bytes in flight each",
        tuple(
            Point(n, str(n), (*many(512), "--storages", str(max(3, n)), "--replicas", str(n))) for n in (1, 3, 5)
        ),
    ),
    "readers": Curve(
        "readers",
        "clients that apply everything",
        "8 producers with 100 transactions of 512 bytes in flight each",
        tuple(Point(n, str(n), ("--producers", "8", "--batch", "100", "--readers", str(n))) for n in (1, 2, 4, 8)),
        has_readers=True,
    ),
    "lag": Curve(
        "lag",
        "transactions that a reader is behind when it begins",
        "8 producers with 100 transactions of 512 bytes in flight each, one reader",
        tuple(
            Point(max(n, 1000), f"{n:,}", ("--producers", "8", "--batch", "100", "--readers", "1", "--behind", str(n)))
            for n in (0, 10_000, 100_000, 1_000_000)
        ),
        has_readers=True,
    ),
}  # fmt: skip
LENGTHS = (10_000, 1_000_000, 10_000_000)
LENGTH_SECONDS = 2.0
"""Of a measurement at one length: it makes the log longer itself."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench curves", description=__doc__)
    parser.add_argument("--curves", default=",".join((*CURVES, "length")), help="which of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="of the log, in transactions")
    parser.add_argument("--directory", type=Path, help="where clusters are made; the temporary directory by default")
    parser.add_argument("--pictures", type=Path, help="where to put one picture for each curve")
    options = parser.parse_args(arguments)
    names = options.curves.split(",")
    if unknown := [name for name in names if name not in (*CURVES, "length")]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join((*CURVES, 'length'))}")
    for name in names:
        if name == "length":
            curve, found = against_length(options)
        else:
            curve, found = CURVES[name], against(CURVES[name], options)
        show(curve, found)
        if options.pictures is not None:
            draw(curve, found, options.pictures / f"{curve.name}.svg")
    return 0


def bench(verb: str, *arguments: str) -> dict[str, Any]:
    return output_of("waltzctl", "bench", verb, *arguments, "-o", "json")[0]


def output_of(module: str, *arguments: str) -> tuple[dict[str, Any], int]:
    """Run a module and return the JSON that it printed, and its peak memory in bytes."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            words = err.read()[-TOLD_CHARACTERS:]
            raise SystemExit(f"{' '.join(command[2:])} ended with {process.returncode}:\n{words}")
        found: dict[str, Any] = json.load(out)
    return found, used.ru_maxrss << 10


def series_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["series"] if one["name"] == name)


def against(curve: Curve, options: argparse.Namespace) -> list[Measured]:
    all_found = [Measured() for _ in curve.points]
    for _ in range(options.rounds):
        for point, measured in zip(curve.points, all_found, strict=True):
            pairs = dict(zip(point.arguments[::2], point.arguments[1::2], strict=True))
            sizes = {name: int(pairs.pop(f"--{name}")) for name in CLUSTER if f"--{name}" in pairs}
            load = [word for pair in pairs.items() for word in pair]
            with cluster_of(options.directory, **sizes) as cluster:
                there = ("--at", ",".join(cluster.server_addresses), "--seconds", str(options.seconds))
                if curve.has_readers:
                    found, memory = output_of("tests.bench.mixed", *there, *load)
                else:
                    found, memory = output_of("waltzctl", "bench", "append", *there, "--yes", *load, "-o", "json")
                measured.add(series_of(found, "committed"), memories_now(cluster) | {"client": memory / 1e6})
    return all_found


@contextmanager
def cluster_of(
    parent: Path | None, *, partitions: int = 4, storages: int = 3, replicas: int = 3, format: int = FORMAT
) -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        cluster = LocalCluster.make(
            Path(directory) / "cluster",
            partitions=partitions,
            storages=storages,
            servers=1,
            replication=replicas,
            format=format,
        )
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.kill()


def against_length(options: argparse.Namespace) -> tuple[Curve, list[Measured]]:
    """One log on one partition: at each length (and a little above) the rate of appends, the memory of who holds it, and
    how long it takes to commit again when all processes are killed and started."""
    lengths = [length for length in LENGTHS if length <= options.longest]
    curve = Curve(
        "length",
        "transactions of 128 bytes in the log",
        "one partition, 64 producers with one more in flight each",
        tuple(Point(length, f"{length:,}", ()) for length in lengths),
    )
    all_found = [Measured() for _ in lengths]
    with cluster_of(options.directory, partitions=1) as cluster:
        there = ("--at", ",".join(cluster.server_addresses), "--yes", "--size", "128")
        for length, measured in zip(lengths, all_found, strict=True):
            more = length - run(length_of(cluster))
            if more > 0:
                bench("append", *there, "--producers", str(PRODUCERS), "--batch", "1000", "--count", str(more))
            for _ in range(options.rounds):
                cluster.kill()
                begun = time.perf_counter()
                cluster.start()
                measured.openings.append(time.perf_counter() - begun)
                found = bench("append", *there, "--producers", "64", "--seconds", str(LENGTH_SECONDS))
                measured.add(series_of(found, "committed"), memories_now(cluster))
    return curve, all_found


async def length_of(cluster: LocalCluster) -> int:
    async with Client(cluster.server_addresses, feed=FeedMode.NONE, partitions=()) as client:
        return await client.end_position(0) + 1


def memories_now(cluster: LocalCluster) -> dict[str, float]:
    lives = {name: daemon.life for name, daemon in cluster.daemons.items() if name in SHOWN}
    uses = {name: use_of(life.pid) for name, life in lives.items() if life is not None}
    return {name: use.memory_bytes / 1e6 for name, use in uses.items() if use is not None}


# -- what came of it ---------------------------------------------------------------------------------------------------


def show(curve: Curve, all_found: Sequence[Measured]) -> None:
    print(f"\nagainst {curve.axis}; {curve.load}")
    names = list(all_found[0].memories)
    heads = ["", "a second", "p50 ms", "p99 ms", *[f"{name} MB" for name in names]]
    heads += ["start s", ""] if all_found[0].openings else [""]
    print(" ".join(f"{head:>12}" for head in heads))
    for point, found in zip(curve.points, all_found, strict=True):
        cells = [point.name, f"{middle(found.rates):,.0f}", f"{middle(found.p50s):.1f}", f"{middle(found.p99s):.1f}"]
        cells += [f"{middle(found.memories[name]):.0f}" for name in names]
        cells += [f"{middle(found.openings):.1f}"] if found.openings else []
        drifted = max(found.rates) - min(found.rates) > DRIFT * middle(found.rates)
        cells.append(f"({min(found.rates):,.0f} to {max(found.rates):,.0f})" if drifted else "")
        print(" ".join(f"{cell:>12}" for cell in cells), flush=True)


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def draw(curve: Curve, all_found: Sequence[Measured], path: Path) -> None:
    mpl.rcParams |= {"svg.hashsalt": "waltz", "svg.fonttype": "none"}  # the same figures give the same file
    figure = pyplot.figure(figsize=(7.0, 7.0), layout="constrained")
    rates, delays, memories = figure.subplots(3, 1, sharex=True)
    at = [point.at for point in curve.points]

    def line(axes: Any, measured: Iterable[Sequence[float]], label: str | None = None, style: str = "o-") -> None:
        axes.plot(at, [middle(values) for values in measured], style, label=label)

    line(rates, (found.rates for found in all_found))
    rates.set_ylabel("transactions a second")
    line(delays, (found.p50s for found in all_found), "p50")
    line(delays, (found.p99s for found in all_found), "p99", "o--")
    delays.set_ylabel("latency, ms")
    for name in all_found[0].memories:
        line(memories, [found.memories[name] for found in all_found], name)
    memories.set_ylabel("memory, MB")
    memories.set_xlabel(curve.axis)
    figure.suptitle(curve.load, fontsize=10)
    if at[-1] > 10 * at[0]:
        memories.set_xscale("log")
    memories.set_xticks(at, [point.name for point in curve.points])
    memories.minorticks_off()
    for axes in (rates, delays, memories):
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
    for axes in (delays, memories):
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
