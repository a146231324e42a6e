"""`waltzctl top`: what a cluster is doing. Two looks, and what came between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

from typer import Option

from waltzctl.reach import Meant, Reach
from waltzctl.show import watching
from waltzctl.show.forms import AnyForm, put
from waltzctl.show.terminal import Screen, paragraph
from waltzctl.watching.poll import Poll
from waltzctl.watching.rates import Rates, rates
from waltzctl.watching.verdict import Sighting
from waltzd.client import loop
from waltzd.errors import EXIT_OK, WaltzError

EVERY_SECONDS = 2.0


def top(
    *,
    sort: Annotated[
        Literal["partition", "tx", "bytes", "p99", "refused", "lag", "mounts"], Option("--sort", help="What comes first.")
    ] = "tx",
    rows_max: Annotated[
        int | None, Option("-n", min=1, max=100_000, metavar="ROWS", help="So many partitions; else what fits.")
    ] = None,
    every: Annotated[
        float, Option("--every", min=0.2, max=3600, metavar="SECONDS", help="Between two looks.")
    ] = EVERY_SECONDS,
    once: Annotated[bool, Option("--once", help="Look twice, show one table, and end.")] = False,
    output: AnyForm = "table",
    reach: Meant,
) -> int:
    """What a cluster is doing, live until Ctrl-C: for each partition transactions and megabytes a second, how long commits
    take, how many are refused, how far the last replica is behind, and mounts; for each storage flushes a second, how long
    they take, and free space.

    The lag is in ids, of the replicas that count. A dash is a value that nobody knows, or nothing to take it of.

    \b
    Examples:
      waltzctl top --once
      waltzctl top --once --every 0.5 --sort p99 -n 5 -o json
    """
    if once or output != "table":
        found, sighting = loop.run(_twice(reach, every))
        put(watching.top(found, sighting, sort=sort, rows_max=rows_max), output)
        return EXIT_OK
    with Screen() as screen, suppress(KeyboardInterrupt):
        loop.run(_live(reach, every, lambda found, last: _draw(screen, found, last, sort, rows_max, every), screen))
    return EXIT_OK


async def _twice(reach: Reach, every: float) -> tuple[Rates, Sighting]:
    async with Poll(reach) as poll:
        before, at = await poll.look(), time.monotonic()
        await asyncio.sleep(every)
        now, then = await poll.look(), time.monotonic()
        return rates(before.picture, now.picture, then - at), now


async def _live(reach: Reach, every: float, draw: Callable[[Rates, Sighting], None], screen: Screen) -> int:
    async with Poll(reach) as poll:
        before: tuple[Sighting, float] | None = None
        while True:
            started = time.monotonic()
            try:
                now, at = await poll.look(), time.monotonic()
            except WaltzError as error:  # it may be another one the next time
                before = None
                screen.put(partial(paragraph, text=" ".join(error.lines()), style="bold red"), _foot(every))
            else:
                if before is None:  # nothing to compare it with yet
                    draw(rates(replace(now.picture, partitions=(), storages=()), now.picture, every), now)
                else:
                    draw(rates(before[0].picture, now.picture, at - before[1]), now)
                before = now, at
            await asyncio.sleep(max(0.0, every - (time.monotonic() - started)))


def _draw(screen: Screen, found: Rates, sighting: Sighting, sort: str, rows_max: int | None, every: float) -> None:
    rows = rows_max
    if rows is None and screen.out.is_terminal:
        rows = watching.rows_for(screen.out.height, len(found.storages))
    screen.put(lambda out: watching.draw_top(out, found, sighting, sort=sort, rows_max=rows), _foot(every))


def _foot(every: float) -> str:
    return f"Every {every:g} s; Ctrl-C ends."
