"""`./dev bench formats`: format 1 beside format 0 under the same loads.

Each round measures a load in one format and at once in the other, in turns of who begins, because a shared machine
drifts; what is shown is the median of the rounds' ratios. Where other work keeps the machine busy, rates say little, and
processor time still compares.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.curves import PRODUCERS, bench, cluster_of, many, series_of
from tests.bench.machine import use_of
from waltzctl.local_cluster.local import LocalCluster

LOADS = {
    "one at a time, 512 bytes": ("--producers", "1", "--size", "512"),
    "64 producers, 512 bytes": ("--producers", "64", "--size", "512"),
    **{f"{PRODUCERS} producers with many in flight, {size} bytes": many(size) for size in (128, 512, 4096)},
}
FORMATS = (0, 1)


@dataclass(frozen=True)
class Pair:
    """One load in both formats, one after the other."""

    rates: tuple[float, float]
    p50s: tuple[float, float]
    cpus: tuple[float, float]
    """Processor time of all daemons for a transaction, in µs."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench formats", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--loads", default="", help="only those whose name contains this")
    parser.add_argument("--directory", type=Path, help="where clusters are made; the temporary directory by default")
    options = parser.parse_args(arguments)
    print(
        f"{'':54}{'format 0/s':>12}{'format 1/s':>12}{'ratio':>8}{'of rounds':>14}{'p50 ms':>14}{'CPU µs':>16}{'ratio':>8}"
    )
    for name in (name for name in LOADS if options.loads in name):
        print(line(name, list(_pairs(LOADS[name], options))), flush=True)
    return 0


def _pairs(load: tuple[str, ...], options: argparse.Namespace) -> Iterator[Pair]:
    for turn in range(options.rounds):
        found = [(0.0, 0.0, 0.0) for _ in FORMATS]
        for format in FORMATS if turn % 2 == 0 else reversed(FORMATS):
            with cluster_of(options.directory, partitions=1, format=format) as cluster:
                found[format] = _run(cluster, *load, "--seconds", str(options.seconds))
        (rate0, p50_0, cpu0), (rate1, p50_1, cpu1) = found
        yield Pair((rate0, rate1), (p50_0, p50_1), (cpu0, cpu1))


def _run(cluster: LocalCluster, *words: str) -> tuple[float, float, float]:
    """Return transactions a second, the median latency, and the processor time of the daemons for a transaction."""
    before = cpu_seconds(cluster)
    there = ("--at", ",".join(cluster.server_addresses), "--yes", "--warm-up", "0")  # all that costs is counted
    series = series_of(bench("append", *there, *words), "committed")
    cpu = cpu_seconds(cluster) - before
    return series["per_second"], series["latency_ms"]["p50"], 1e6 * cpu / series["count"]


def cpu_seconds(cluster: LocalCluster) -> float:
    lives = [daemon.life for name, daemon in cluster.daemons.items() if name.startswith(("server", "storage"))]
    uses = [use_of(life.pid) for life in lives if life is not None]
    return sum(use.cpu_seconds for use in uses if use is not None)


def line(name: str, pairs: list[Pair]) -> str:
    rates, p50s, cpus = ([statistics.median(values) for values in zip(*columns, strict=True)] for columns in (
        [pair.rates for pair in pairs], [pair.p50s for pair in pairs], [pair.cpus for pair in pairs]
    ))  # fmt: skip
    ratios = sorted(pair.rates[1] / pair.rates[0] for pair in pairs)
    costs = statistics.median(pair.cpus[1] / pair.cpus[0] for pair in pairs)
    return (
        f"{name:54}{rates[0]:12,.0f}{rates[1]:12,.0f}{statistics.median(ratios):8.2f}"
        f"{f'{ratios[0]:.2f} to {ratios[-1]:.2f}':>14}{f'{p50s[0]:.2f}, {p50s[1]:.2f}':>14}"
        f"{f'{cpus[0]:.1f}, {cpus[1]:.1f}':>16}{costs:8.2f}"
    )
