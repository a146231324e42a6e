"""`waltzctl status`: one screen that says whether a cluster is well, and if not, why, and what to do."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Annotated

import typer
from typer import Option

from waltzctl.options import Bare, Timeout
from waltzctl.playground import render_local
from waltzctl.playground.local import LocalCluster
from waltzctl.reach import Meant, Reach
from waltzctl.show import cluster
from waltzctl.show.forms import AnyForm, put
from waltzctl.show.terminal import Screen, paragraph, printable
from waltzctl.watching.poll import CALL_SECONDS, Poll
from waltzctl.watching.verdict import Sighting
from waltzd.client import loop
from waltzd.errors import EXIT_OK, EXIT_UNHEALTHY, WaltzError

WATCH_SECONDS = 2.0


def status(
    *,
    watch: Annotated[
        float | None,
        Option(
            "--watch",
            min=0.2,
            max=3600,
            metavar="[SECONDS]",
            help=f"Look again so often ({WATCH_SECONDS:g} by default), until Ctrl-C.",
        ),
        Bare(f"{WATCH_SECONDS:g}"),
    ] = None,
    seconds: Timeout = CALL_SECONDS,
    output: AnyForm = "table",
    reach: Meant,
) -> int:
    """Whether a cluster is well: HEALTHY, DEGRADED, or DOWN where no partition takes transactions; then each thing that is
    wrong, with its cause and what to do; then servers, storages and partitions. The end is 0 when all is well, else 10.

    When ZooKeeper does not answer, servers and storages are asked directly, at the addresses that were seen last.

    \b
    Examples:
      waltzctl status
      waltzctl status --timeout 10 -o json
    """
    if watch is None:
        found = loop.run(_look(reach, seconds))
        put(cluster.status(found, _processes(reach)), output)
        return EXIT_OK if found.verdict.is_healthy else EXIT_UNHEALTHY
    return _watch(reach, watch, seconds, output)


async def _look(reach: Reach, seconds: float) -> Sighting:
    async with Poll(reach, seconds=seconds, aloud=True) as poll:
        return await poll.look()


def _processes(reach: Reach) -> cluster.Local | None:
    """Of a cluster on this machine."""
    found = None if reach.directory is None else LocalCluster.find(reach.directory)
    if found is None:
        return None
    told = {"directory": str(found.directory), "daemons": render_local.processes_json(found)}
    return lambda out: render_local.processes(out, found), told


def _watch(reach: Reach, every: float, seconds: float, output: str) -> int:
    """The exit code is that of the last look."""
    last: Sighting | None = None

    async def go_on(screen: Screen | None) -> None:
        nonlocal last
        async with Poll(reach, seconds=seconds) as poll:
            while True:
                started = time.monotonic()
                try:
                    last = await poll.look()
                except WaltzError as error:  # it may be another one the next time
                    last = None
                    _put_error(screen, error, every)
                else:
                    _put(screen, last, reach, every, output)
                await asyncio.sleep(max(0.0, every - (time.monotonic() - started)))

    with suppress(KeyboardInterrupt):
        if output != "table":
            loop.run(go_on(None))
        else:
            with Screen() as screen:
                loop.run(go_on(screen))
    return EXIT_OK if last is not None and last.verdict.is_healthy else EXIT_UNHEALTHY


def _put(screen: Screen | None, found: Sighting, reach: Reach, every: float, output: str) -> None:
    page = cluster.status(found, _processes(reach))
    if screen is None:
        put(page, output)
    else:
        screen.put(page.draw, _foot(every))


def _put_error(screen: Screen | None, error: WaltzError, every: float) -> None:
    if screen is None:
        for line in error.lines():
            typer.echo(printable(line), err=True)
        return
    screen.put(lambda out: paragraph(out, " ".join(error.lines()), "bold red"), _foot(every))


def _foot(every: float) -> str:
    return f"Every {every:g} s; Ctrl-C ends."
