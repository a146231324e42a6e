"""`./dev bench formats`: format 1 beside format 0 under the same loads.

Each round measures every load in one format and at once in the other, in turns of who begins, because a shared machine
drifts; what is shown is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.curves import PRODUCERS, bench, many, series_of

LOADS = {
    "one at a time, 512 bytes": ("--producers", "1", "--size", "512"),
    "64 producers, 512 bytes": ("--producers", "64", "--size", "512"),
    **{f"{PRODUCERS} producers with many in flight, {size} bytes": many(size) for size in (128, 512, 4096)},
}


@dataclass(frozen=True)
class Pair:
    """One load in both formats, one after the other."""

    rates: tuple[float, float]
    p50s: tuple[float, float]

    @property
    def ratio(self) -> float:
        return self.rates[1] / self.rates[0]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench formats", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--loads", default="", help="only those whose name contains this")
    parser.add_argument("--directory", type=Path, help="where clusters are made; the temporary directory by default")
    options = parser.parse_args(arguments)
    found: dict[str, list[Pair]] = {name: [] for name in LOADS if options.loads in name}
    for turn in range(options.rounds):
        for name in found:
            found[name].append(_pair(LOADS[name], turn, options))
    print("\n".join(lines(found)))
    return 0


def _pair(load: tuple[str, ...], turn: int, options: argparse.Namespace) -> Pair:
    place = () if options.directory is None else ("--directory", str(options.directory))
    rates, p50s = [0.0, 0.0], [0.0, 0.0]
    for format in (0, 1) if turn % 2 == 0 else (1, 0):
        words = (*load, "--partitions", "1", "--format", str(format), "--seconds", str(options.seconds))
        series = series_of(bench("append", *words, *place), "committed")
        rates[format], p50s[format] = series["per_second"], series["latency_ms"]["p50"]
    return Pair((rates[0], rates[1]), (p50s[0], p50s[1]))


def lines(found: dict[str, list[Pair]]) -> Iterator[str]:
    yield f"{'':54}{'format 0/s':>12}{'format 1/s':>12}{'ratio':>8}{'of rounds':>14}{'p50 ms':>14}"
    for name, pairs in found.items():
        rates = [statistics.median(pair.rates[format] for pair in pairs) for format in (0, 1)]
        p50s = [statistics.median(pair.p50s[format] for pair in pairs) for format in (0, 1)]
        ratios = sorted(pair.ratio for pair in pairs)
        yield (
            f"{name:54}{rates[0]:12,.0f}{rates[1]:12,.0f}{statistics.median(ratios):8.2f}"
            f"{f'{ratios[0]:.2f} to {ratios[-1]:.2f}':>14}{f'{p50s[0]:.2f}, {p50s[1]:.2f}':>14}"
        )
