"""How rates look: all together first, then the busiest partitions, then the storages; nothing wider than 80 columns."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from waltzctl.render import console, put_json, size, table
from waltzctl.watching.rates import PartitionRates, Rates, by

if TYPE_CHECKING:
    from rich.console import Console

    from waltzctl.watching.poll import Sighting

HEAD_LINES, TABLE_LINES = 4, 4
"""Of a screen: what stands beside the rows of the two tables."""
ROWS_LEAST = 3


def top(found: Rates, sighting: Sighting, output: str, *, sort: str, rows_max: int | None) -> None:
    if output == "json":
        put_json(top_json(found, sighting, sort=sort))
        return
    show(console(), found, sighting, sort=sort, rows_max=rows_max)


def rows_for(height: int, storages: int) -> int:
    """So many partitions fit on a screen of this height, with their table, the storages and what stands around them."""
    return max(ROWS_LEAST, height - HEAD_LINES - TABLE_LINES - (storages + TABLE_LINES))


def show(out: Console, found: Rates, sighting: Sighting, *, sort: str, rows_max: int | None) -> None:
    from waltzctl.watching.render_status import STYLES

    verdict, total = sighting.verdict, found.total
    worst = f"; {verdict.reasons[0].sentence}" if verdict.reasons else ""
    out.print(
        f"{verdict.health}: {verdict.sentence}{worst}", style=STYLES[verdict.health], no_wrap=True, overflow="ellipsis"
    )
    out.print(
        f"{_rate(total.tx)} tx/s, {_megabytes(total.bytes)} MB/s, commit p50 {_ms(total.p50_ms)} ms, p99 "
        f"{_ms(total.p99_ms)} ms, refused {_share(total.refused)}, fed {_rate(total.fed)}/s",
        style="bold",
        soft_wrap=True,
    )
    shown = by(sort, found.partitions)
    hidden = 0 if rows_max is None else max(0, len(shown) - rows_max)
    rows = [_row(one) for one in (shown if rows_max is None else shown[:rows_max])]
    names = ("partition", "owner", "tx/s", "MB/s", "p50 ms", "p99 ms", "refused", "lag", "mounts", "state")
    table(out, names, rows, right=("partition", *names[2:9]))
    if hidden:
        out.print(f"{hidden} more partitions; -n shows more, --sort chooses which")
    storages = [
        (one.name, _rate(one.flushes), _ms(one.flush_ms), _ms(one.flush_p99_ms), _megabytes(one.bytes),
         "-" if one.queued_bytes is None else size(one.queued_bytes),
         "-" if one.free_bytes is None else size(one.free_bytes))
        for one in found.storages
    ]  # fmt: skip
    heads = ("storage", "flushes/s", "flush ms", "p99 ms", "MB/s", "queued", "free")
    table(out, heads, storages, right=heads[1:])


def _row(one: PartitionRates) -> tuple[str, ...]:
    return (
        str(one.partition), one.owner or "nobody", _rate(one.tx), _megabytes(one.bytes), _ms(one.p50_ms), _ms(one.p99_ms),
        _share(one.refused), "-" if one.lag is None else f"{one.lag:,}", "-" if one.mounts is None else f"{one.mounts:,}",
        one.state,
    )  # fmt: skip


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.1f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def top_json(found: Rates, sighting: Sighting, *, sort: str) -> dict[str, Any]:
    return {
        "at": sighting.at,
        "seconds": round(found.seconds, 3),
        "verdict": str(sighting.verdict.health),
        "total": _rounded({**asdict(found.total), "partition": None}),
        "partitions": [_rounded(asdict(one)) for one in by(sort, found.partitions)],
        "storages": [_rounded(asdict(one)) for one in found.storages],
    }


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    """With what the numbers are in their names."""
    names = {"tx": "tx_per_second", "bytes": "bytes_per_second", "fed": "fed_per_second", "flushes": "flushes_per_second",
             "records": "records_per_second", "refused": "refused_share"}  # fmt: skip
    return {names.get(name, name): round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}
