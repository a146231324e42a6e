"""The table: medians of the rounds, and Waltz beside each peer. Pure.

The ratio is the median of each round's own ratio: what drifts on a shared machine meets both sides of it. Where a system
did not keep what it acknowledged, there is no figure but the difference.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.bench.peers.load import MANY, Measurement
from tests.bench.peers.system import Facts

WALTZ = "waltz"
NOTHING = "-"


@dataclass(frozen=True)
class Row:
    workload: str
    size: int
    system: str
    rounds: int
    rate: float | None = None
    """Transactions a second; None, like all that follows, when there is no figure to show."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    server_us: float | None = None
    client_us: float | None = None
    """CPU for each transaction."""
    ratio: float | None = None
    """Waltz ÷ this system."""
    difference: str = ""
    """Why there is no figure."""


Rounds = Sequence[Mapping[str, Sequence[Measurement]]]
"""For each round what each system made of it; a system whose round failed is not there."""


def rows_of(rounds: Rounds) -> list[Row]:
    found: dict[tuple[int, str], list[str]] = {}
    for one in rounds:
        for system, measurements in one.items():
            for measurement in measurements:
                systems = found.setdefault((measurement.size, measurement.workload), [])
                if system not in systems:
                    systems.append(system)
    return [row_of(rounds, workload, size, system) for (size, workload), systems in found.items() for system in systems]


def row_of(rounds: Rounds, workload: str, size: int, system: str) -> Row:
    mine = [found for one in rounds if (found := _find(one, system, workload, size))]
    if wrong := [one for one in mine if one.missing]:
        return Row(workload, size, system, len(mine), difference=difference(wrong[0]))
    if not all(one.count for one in mine):
        return Row(workload, size, system, len(mine), difference="nothing was acknowledged inside the window")

    def middle(figure: Callable[[Measurement], float]) -> float:
        return statistics.median(figure(one) for one in mine)

    return Row(
        workload,
        size,
        system,
        len(mine),
        rate=middle(lambda one: one.rate),
        p50_ms=None if workload == MANY else middle(lambda one: one.p50 * 1e3),
        p99_ms=None if workload == MANY else middle(lambda one: one.p99 * 1e3),
        server_us=middle(lambda one: one.server_cpu / one.count * 1e6),
        client_us=middle(lambda one: one.client_cpu / one.count * 1e6),
        ratio=None if system == WALTZ else _ratio(rounds, workload, size, system),
    )


def difference(measurement: Measurement) -> str:
    return f"acknowledged {measurement.acknowledged}, kept {measurement.kept}: {abs(measurement.missing)} " + (
        "are missing" if measurement.missing > 0 else "too many"
    )


def _find(one: Mapping[str, Sequence[Measurement]], system: str, workload: str, size: int) -> Measurement | None:
    here = one.get(system, ())
    return next((found for found in here if (found.workload, found.size) == (workload, size)), None)


def _ratio(rounds: Rounds, workload: str, size: int, system: str) -> float | None:
    """Of the rounds in which both have a figure."""
    pairs = [(_find(one, WALTZ, workload, size), _find(one, system, workload, size)) for one in rounds]
    ratios = [
        ours.rate / theirs.rate
        for ours, theirs in pairs
        if ours and theirs and ours.count and theirs.count and not ours.missing
    ]
    return statistics.median(ratios) if ratios else None


# -- as text


def text_of(rows: Sequence[Row]) -> str:
    head = ["workload", "bytes", "system", "tx/s", "p50 ms", "p99 ms", "servers µs/tx", "client µs/tx", "Waltz ÷ it"]
    table = [_cells(row) for row in rows]
    plain = [cells for cells, row in zip(table, rows, strict=True) if not row.difference]
    widths = [max(len(line[at]) for line in [head, *plain]) for at in range(len(head))]
    lines = [_line(head, widths)]
    for row, cells in zip(rows, table, strict=True):
        lines.append(_line(cells, widths) if not row.difference else _line(cells[:3], widths[:3]) + f"  {row.difference}")
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    def spell(value: float | None, form: str) -> str:
        return NOTHING if value is None else format(value, form)

    return [
        row.workload,
        str(row.size),
        row.system,
        spell(row.rate, ",.0f"),
        spell(row.p50_ms, ".2f"),
        spell(row.p99_ms, ".2f"),
        spell(row.server_us, ".1f"),
        spell(row.client_us, ".1f"),
        spell(row.ratio, ".2f"),
    ]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    words = [
        cell.ljust(width) if at in (0, 2) else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(words).rstrip()


def facts_of(systems: Mapping[str, Facts]) -> str:
    return "\n".join(
        f"{name} {facts.version}: {facts.durability}.\n  Beside it: {facts.caveat}." for name, facts in systems.items()
    )
