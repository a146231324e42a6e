"""`waltzctl top`: live rates of a cluster, from two snapshots."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Literal

from typer import Option

from waltzctl.health.facts import HealthReport
from waltzctl.health.poll import Poll
from waltzctl.health.rates import PartitionRates, Rates, StorageRates, by, rates
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget
from waltzctl.show import cluster
from waltzctl.show.cluster import STYLES
from waltzctl.show.forms import AnyForm, Column, Columns, Line, Listing, Part, Table, capped, measured, objects, put, tenths
from waltzctl.show.terminal import Screen, size
from waltzd.client import loop
from waltzd.errors import EXIT_OK, WaltzError

EVERY_SECONDS = 2.0


def top(
    *,
    sort: Annotated[
        Literal["partition", "tx", "bytes", "p99", "refused", "lag", "mounts"], Option("--sort", help="Column to sort by.")
    ] = "tx",
    rows_max: Annotated[
        int | None,
        Option("-n", min=1, max=100_000, metavar="ROWS", help="Number of partitions to show; by default as many as fit."),
    ] = None,
    every: Annotated[
        float, Option("--every", min=0.2, max=3600, metavar="SECONDS", help="Seconds between two updates.")
    ] = EVERY_SECONDS,
    once: Annotated[bool, Option("--once", help="Show one table and exit.")] = False,
    output: AnyForm = "table",
    target: CommandTarget,
) -> int:
    """Show what a cluster is doing, live until Ctrl-C. For each partition: transactions and megabytes per second,
    commit latency, share refused, lag of the slowest replica, and mounts. For each storage: flushes per second, their
    latency, and free space.

    The lag is in ids, over the replicas that count towards commits. A dash is an unknown value, or a share of nothing.

    \b
    Examples:
      waltzctl top --once
      waltzctl top --once --every 0.5 --sort p99 -n 5 -o json
    """
    if once or output != "table":
        found, report = loop.run(_twice(target, every))
        put(busiest(found, report, sort=sort, rows_max=rows_max), output)
        return EXIT_OK
    with Screen() as screen, suppress(KeyboardInterrupt):
        loop.run(_live(target, every, screen, sort, rows_max))
    return EXIT_OK


async def _twice(target: ClusterTarget, every: float) -> tuple[Rates, HealthReport]:
    async with Poll(target) as poll:
        before, at = await poll.report(), time.monotonic()
        await asyncio.sleep(every)
        now, then = await poll.report(), time.monotonic()
        return rates(before.snapshot, now.snapshot, then - at), now


async def _live(target: ClusterTarget, every: float, screen: Screen, sort: str, rows_max: int | None) -> None:
    before: tuple[HealthReport, float] | None = None
    async with Poll(target) as poll:
        async for now in poll.reports(every):
            if isinstance(now, WaltzError):
                before = None
                screen.put(now, every)
                continue
            at = time.monotonic()
            if before is None:  # no earlier report to compare with
                found = rates(replace(now.snapshot, partitions=(), storages=()), now.snapshot, every)
            else:
                found = rates(before[0].snapshot, now.snapshot, at - before[1])
            before = now, at
            rows = rows_max
            if rows is None and screen.out.is_terminal:
                rows = rows_for(screen.out.height, len(found.storages))
            screen.put(busiest(found, now, sort=sort, rows_max=rows).draw, every)


def _per_second(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f}"


# -- the page: all together first, then the busiest partitions, then the storages; nothing wider than 80 columns --------


HEAD_LINES, TABLE_LINES = 5, 4
"""Lines of a screen that are not rows of the two tables."""
ROWS_LEAST = 3
PARTITION_RATES: Columns[PartitionRates] = (
    Column("partition"),
    Column("owner", none="nobody"),
    measured("tx/s", "tx", _per_second, json="tx_per_second"),
    measured("MB/s", "bytes", _megabytes, json="bytes_per_second"),
    measured("", "fed", _per_second, json="fed_per_second"),
    measured("p50 ms", "p50_ms", tenths),
    measured("p99 ms", "p99_ms", tenths),
    measured("refused", "refused", "{:.1%}".format, json="refused_share"),
    Column("lag", none="-", is_right=True),
    Column("mounts", none="-", is_right=True),
    Column("state"),
)
STORAGE_RATES: Columns[StorageRates] = (
    Column("storage", "name", json="name"),
    measured("flushes/s", "flushes", _per_second, json="flushes_per_second"),
    measured("flush ms", "flush_ms", tenths),
    measured("p99 ms", "flush_p99_ms", tenths, json="flush_p99_ms"),
    measured("", "records", _per_second, json="records_per_second"),
    measured("MB/s", "bytes", _megabytes, json="bytes_per_second"),
    Column("queued", "queued_bytes", cell=size, none="-", json="queued_bytes", is_right=True),
    Column("free", "free_bytes", cell=size, none="-", json="free_bytes", is_right=True),
)


def busiest(found: Rates, report: HealthReport, *, sort: str, rows_max: int | None) -> Listing[PartitionRates]:
    partitions, slowed = by(sort, found.partitions), _slowed(report)
    health, total, reasons = report.verdict.health, found.total, report.verdict.reasons
    worst = f"; {reasons[0].sentence}" if reasons else ""
    shown = {column.name: column.shown(total) for column in PARTITION_RATES}
    fed = next(column.shown(total) for column in PARTITION_RATES if column.json == "fed_per_second")
    groups = cluster.group_totals(report.snapshot.groups)
    page: list[Part] = [
        Line(f"{health}: {report.verdict.sentence}{worst}", STYLES[health], "cut"),
        Line(
            f"{shown['tx/s']} tx/s, {shown['MB/s']} MB/s, commit p50 {shown['p50 ms']} ms, p99 {shown['p99 ms']} ms, "
            f"refused {shown['refused']}, fed {fed}/s",
            "bold",
        ),
        *([Line(f"slowed by their quotas: {', '.join(slowed)}", "yellow", "cut")] if slowed else []),
        *([Line(groups, fit="cut")] if groups else []),
        *capped(PARTITION_RATES, partitions[:rows_max], len(partitions), "partition", "-n shows more, --sort says which"),
        Table(STORAGE_RATES, found.storages),
    ]
    content = {
        "at": report.at,
        "seconds": round(found.seconds, 3),
        "verdict": str(health),
        "total": objects(PARTITION_RATES, [total])[0],
        "partitions": objects(PARTITION_RATES, partitions),
        "storages": objects(STORAGE_RATES, found.storages),
        "slowed": slowed,
    }
    return Listing(kind="partitions", columns=PARTITION_RATES, rows=partitions, page=page, content=content)


def _slowed(report: HealthReport) -> list[str]:
    """Return the names that a quota slowed at any server in the last seconds."""
    servers = report.facts.snapshot.server_reports.values()
    return sorted({name for server in servers for name in server.clients.slowed})


def rows_for(height: int, storages: int) -> int:
    """Return the number of partitions that fit on a screen of this height, beside the storages and fixed lines."""
    return max(ROWS_LEAST, height - HEAD_LINES - TABLE_LINES - (storages + TABLE_LINES))
