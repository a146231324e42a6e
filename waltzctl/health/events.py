"""`waltzctl events`: the newest lines of every daemon's log and the changes of operators, merged by time.

Each daemon keeps its newest lines in memory (`waltzd.daemon.logs`) and returns them on request. Changes of operators come
from the history in ZooKeeper. No file is read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Literal, get_args

import typer
from typer import Option

from waltzctl.health.facts import HealthReport
from waltzctl.health.poll import CALL_SECONDS, Poll
from waltzctl.shell import moment
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, first_contact, unknown
from waltzctl.shell.merged_log import EVENTS, LogLine, merged
from waltzctl.show.forms import AnyForm, Line, Listing, put
from waltzctl.show.terminal import printable
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, silence
from waltzd.client import loop
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import HistoryEntry, ServerMeta, StorageMeta
from waltzd.errors import EXIT_OK, EXIT_PARTIAL, BadArgument, CannotConnect, TlsMismatch, WaltzError
from waltzd.protocol.descriptions import Events
from waltzd.wire.servers import ServerAdminClient
from waltzd.wire.storages import AdminClient
from waltzd.wire.tls import Tls

Level = Literal["debug", "info", "warning", "error", "critical"]
LEVELS = get_args(Level)
OPERATOR = "operator"
CALLS_MAX = 32
HISTORY_MAX = 100
"""Newest entries of the history that are read."""


def duration(text: str) -> int:
    """Parse a duration like `90s`, `10m`, `2h` or `1d`; return it in seconds."""
    found = moment.seconds(text)
    if found is None:
        raise BadArgument(
            f"{text!r} is not a duration",
            not_done="no daemon was asked",
            next_step="write it as 90s, 10m, 2h or 1d",
        )
    return found


def events(
    *,
    since: Annotated[str, Option("--since", metavar="TIME", help="How far back: 90s, 10m, 2h, 1d.")] = "1h",
    names: Annotated[
        tuple[str, ...], Option("--daemon", metavar="NAME", help="Only this server or storage. Repeatable.")
    ] = (),
    level: Annotated[Level, Option("--level", help="Lowest level to show.")] = "info",
    output: AnyForm = "table",
    target: CommandTarget,
) -> int:
    """Show the newest log lines of the daemons and the changes of operators, in the order of time, each with its source. A
    daemon keeps its last 500 lines, also over restarts if it has a directory for them; the log on its machine has
    everything. Exit code 7 if a daemon did not answer.

    \b
    Examples:
      waltzctl events
      waltzctl events --since 10m --level warning -o json
    """
    since_ms = int((time.time() - duration(since)) * 1000)
    found, silent = loop.run(_once(target, since_ms, names, level))
    put(newest_lines(found), output)
    print_silent(silent)
    return EXIT_PARTIAL if silent else EXIT_OK


async def _once(
    target: ClusterTarget, since_ms: int, names: Sequence[str], level: str
) -> tuple[list[LogLine], dict[str, WaltzError]]:
    async with Poll(target) as poll:
        return await collect_lines(poll, await poll.report(), since_ms, names, level)


async def collect_lines(
    poll: Poll, report: HealthReport, since_ms: int, names: Sequence[str], level: str
) -> tuple[list[LogLine], dict[str, WaltzError]]:
    """Return the lines, and the error of each daemon that did not answer."""
    _check(report, names)
    events_of, silent = await listen(report.snapshot, poll.target.tls, seconds=CALL_SECONDS, names=names)
    history = await _history(poll, report)
    if report.lost is not None:
        silent["ZooKeeper"] = report.lost.cause
    return event_lines(events_of, history, since_ms=since_ms, level=level, names=names), silent


async def _history(poll: Poll, report: HealthReport) -> list[HistoryEntry]:
    if report.lost is not None:
        return []
    try:
        return await history_of(await poll.cluster())
    except CannotConnect:  # it went away just now; the next poll reports that
        return []


def _check(report: HealthReport, names: Sequence[str]) -> None:
    there = [view.meta.name for view in report.snapshot.nodes]
    for name in names:
        if name not in there:
            raise unknown("daemon", name, there, not_done="no daemon was asked for events")


# -- asking -------------------------------------------------------------------------------------------------------------


def event_lines(
    daemons: Mapping[tuple[str, str], Events],
    history: Iterable[HistoryEntry],
    *,
    since_ms: int,
    level: str,
    names: Sequence[str] = (),
) -> list[LogLine]:
    """Merge the lines of daemons and of the history, and filter them. `daemons`: (kind, name) of a daemon → its lines.
    Lines of the history have level info; a change that failed is a warning."""
    logs = [
        [
            LogLine(time_ms=one.time_ms, who=name, kind=kind, level=one.level, text=one.text, code=one.code)
            for one in events.events
        ]
        for (kind, name), events in daemons.items()
    ]
    least = LEVELS.index(level)
    return [
        line
        for line in merged([*logs, *map(lines_of, history)])
        if line.time_ms >= since_ms
        and (line.level not in LEVELS or LEVELS.index(line.level) >= least)
        and (not names or line.who in names)
    ]


def lines_of(entry: HistoryEntry) -> list[LogLine]:
    """Return two lines for a change: its begin, and its end unless it still runs."""
    what = f"{entry.verb} {entry.subject}"
    why = f" ({entry.reason})" if entry.reason else ""
    moments = [(entry.began, "info", f"{what} began{why}")]
    if entry.ended is not None:
        moments.append((entry.ended, "info" if entry.outcome == "done" else "warning", f"{what}: {entry.outcome}"))
    return [
        LogLine(time_ms=time_ms, who=entry.who, kind=OPERATOR, level=level, text=text)
        for moment, level, text in moments
        if (time_ms := _milliseconds(moment)) is not None
    ]


def _milliseconds(moment: str) -> int | None:
    try:
        return int(datetime.fromisoformat(moment).timestamp() * 1000)
    except (ValueError, OverflowError):  # another program wrote it
        return None


async def listen(
    found: ClusterSnapshot, tls: Tls | None, *, seconds: float, names: Sequence[str] = ()
) -> tuple[dict[tuple[str, str], Events], dict[str, WaltzError]]:
    """Return the newest lines of every daemon, by kind and name, and the error of each daemon that did not answer."""
    key, turn = found.meta.key, asyncio.Semaphore(CALLS_MAX)
    lines: dict[tuple[str, str], Events] = {}
    silent: dict[str, WaltzError] = {}

    async def one(kind: str, client: type[ServerAdminClient | AdminClient], meta: ServerMeta | StorageMeta) -> None:
        try:
            async with (
                turn,
                client(meta.admin_listen, key, seconds=seconds, tls=tls, name=meta.name) as admin,
                first_contact(meta.admin_listen, tls),
            ):
                lines[kind, meta.name] = await admin.events(0)
        except WaltzError as error:
            silent[meta.name] = error

    servers, storages = ([view.meta for view in views if not names or view.meta.name in names]
                         for views in (found.servers, found.storages))  # fmt: skip
    await asyncio.gather(*(one("server", ServerAdminClient, meta) for meta in servers),
                         *(one("storage", AdminClient, meta) for meta in storages))  # fmt: skip
    return lines, silent


async def history_of(cluster: Cluster) -> list[HistoryEntry]:
    return [entry for _, entry in await cluster.history(HISTORY_MAX)]


# -- what people read of them ------------------------------------------------------------------------------------------


LEVEL_STYLES = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}


def newest_lines(found: Sequence[LogLine]) -> Listing[LogLine]:
    width = max((len(line.who) for line in found), default=0)
    page = [
        Line(
            f"{moment.shown(1000 * line.time_ms)}  {line.who:<{width}}  {line.level:<8}  {' '.join(line.text.split())}",
            LEVEL_STYLES.get(line.level, ""),
        )
        for line in found
    ]
    return Listing(kind="events", columns=EVENTS, rows=found, page=page or ["No events in this time."])


def print_silent(found: Mapping[str, WaltzError]) -> None:
    """Print on standard error which daemons did not answer."""
    steps = []
    for name, error in sorted(found.items()):
        typer.echo(f"{name} {silence(error)}: {error.code} {printable(error.message)}", err=True)
        if isinstance(error, TlsMismatch) and error.detail_next_step not in steps:
            steps.append(error.detail_next_step)
    for step in steps:  # only for TLS; `status` has the next steps for other errors
        typer.echo(f"Next: {printable(step)}", err=True)
