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
from waltzctl.health.rates import Rates, rates
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget
from waltzctl.show import activity
from waltzctl.show.forms import AnyForm, put
from waltzctl.show.terminal import Screen
from waltzd.client import loop
from waltzd.errors import WaltzError
from waltzd.errors.exit_codes import EXIT_OK

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
        put(activity.top(found, report, sort=sort, rows_max=rows_max), output)
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
                rows = activity.rows_for(screen.out.height, len(found.storages))
            screen.put(activity.top(found, now, sort=sort, rows_max=rows).draw, every)
