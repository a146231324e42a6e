"""`waltzctl events`: the newest lines of every daemon's log, and what operators did, in one order."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

from typer import Option

from waltzctl.merged_log import Line
from waltzctl.options import Misused
from waltzctl.reach import Meant, Reach, unknown
from waltzctl.show import watching
from waltzctl.show.forms import AnyForm, put
from waltzctl.watching.listen import OPERATOR, Level, Listening, history_of, told_lines
from waltzctl.watching.poll import CALL_SECONDS, Poll
from waltzctl.watching.verdict import Sighting
from waltzd.client import loop
from waltzd.cluster.documents import HistoryEntry
from waltzd.errors import EXIT_OK, EXIT_PARTIAL, BadArgument, CannotConnect, WaltzError

FOLLOW_SECONDS = 1.0
LOOK_EVERY = 10
"""So many rounds pass until daemons that came meanwhile are found."""
_DURATION = re.compile(r"([0-9]{1,6})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> int:
    """`90s`, `10m`, `2h`, `1d`, in seconds."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise BadArgument(
            f"{text!r} is no length of time",
            not_done="nobody was asked anything",
            next_step="write it as 90s, 10m, 2h or 1d",
        )
    return int(found[1]) * _UNITS[found[2]]


def events(
    *,
    since: Annotated[str, Option("--since", metavar="TIME", help="How far back: 90s, 10m, 2h, 1d.")] = "1h",
    follow: Annotated[bool, Option("--follow", help="Go on with what comes, until Ctrl-C.")] = False,
    names: Annotated[
        tuple[str, ...], Option("--daemon", metavar="NAME", help="Only of this server or storage. Once for each.")
    ] = (),
    level: Annotated[Level, Option("--level", help="This one and what is worse.")] = "info",
    output: AnyForm = "table",
    reach: Meant,
) -> int:
    """What the daemons of a cluster logged lately, and what operators changed, in the order of time, each line with who
    said it. A daemon keeps its last 500 lines, also over restarts where it has a place for them; its log on its machine has
    everything. The end is 7 when a daemon did not answer.

    \b
    Examples:
      waltzctl events
      waltzctl events --since 10m --level warning -o json
    """
    if follow and output not in ("table", "json"):
        raise Misused("--follow shows lines as -o table or as -o json, an object a line.")
    since_ms = int((time.time() - duration(since)) * 1000)
    if not follow:
        found, silent = loop.run(_once(reach, since_ms, names, level))
        put(watching.events(found), output)
        watching.silent(silent)
        return EXIT_PARTIAL if silent else EXIT_OK
    with suppress(KeyboardInterrupt):
        loop.run(_follow(reach, since_ms, names, level, output))
    return EXIT_OK


async def _once(reach: Reach, since_ms: int, names: Sequence[str], level: str) -> tuple[list[Line], dict[str, WaltzError]]:
    async with Poll(reach) as poll:
        sighting = await poll.look()
        _check(sighting, names)
        async with Listening(sighting.picture.meta.key, reach.tls, seconds=CALL_SECONDS) as listening:
            told = await listening.listen(sighting.picture, names)
            history = await _history(poll, sighting)
        silent = dict(listening.silent)
        if sighting.lost is not None:
            silent["ZooKeeper"] = sighting.lost.cause
        return told_lines(told, history, since_ms=since_ms, level=level, names=names), silent


async def _follow(reach: Reach, since_ms: int, names: Sequence[str], level: str, output: str) -> None:
    async with Poll(reach) as poll:
        sighting = await poll.look()
        _check(sighting, names)
        told_before: set[Line] = set()
        told_silent: set[str] = set()
        async with Listening(sighting.picture.meta.key, reach.tls, seconds=CALL_SECONDS) as listening:
            rounds = 0
            while True:
                if rounds and rounds % LOOK_EVERY == 0:
                    sighting = await poll.look()
                told = await listening.listen(sighting.picture, names)
                history = await _history(poll, sighting)
                lines = told_lines(told, history, since_ms=since_ms, level=level, names=names)
                watching.followed([line for line in lines if line not in told_before], output)
                told_before |= {line for line in lines if line.kind == OPERATOR}
                silent = {name: error for name, error in listening.silent.items() if name not in told_silent}
                watching.silent(silent)
                told_silent = set(listening.silent)
                rounds += 1
                await asyncio.sleep(FOLLOW_SECONDS)


async def _history(poll: Poll, sighting: Sighting) -> list[HistoryEntry]:
    if sighting.lost is not None:
        return []
    try:
        return await history_of(await poll.cluster())
    except CannotConnect:  # it went away just now; the next look says so
        return []


def _check(sighting: Sighting, names: Sequence[str]) -> None:
    there = [view.meta.name for view in sighting.picture.nodes]
    for name in names:
        if name not in there:
            raise unknown("daemon", name, there, not_done="nobody was asked for events")
