"""Pages that query more than a poll reports: applications, archives, the history of changes, events of daemons, consumer
groups. The data and the columns are those of the commands.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from waltzctl.console.pages import (
    ROWS,
    GridStyle,
    Of,
    Page,
    PageRequest,
    Part,
    Tone,
    actions,
    cut,
    grid,
    grids,
    listed,
    of_partition,
    part,
    tone_of,
    tone_of_outcome,
)
from waltzctl.groups import command as show
from waltzctl.groups import parked
from waltzctl.groups.command import one_of
from waltzctl.groups.parked import ParkedOne, parked_in
from waltzctl.health import client
from waltzctl.health.events import LEVELS, collect_lines, duration
from waltzctl.records import archive as shown_archive
from waltzctl.records.archive import reached
from waltzctl.records.backup import backed_up
from waltzctl.shell import change, merged_log
from waltzctl.shell.cluster_target import unknown
from waltzctl.shell.merged_log import LogLine
from waltzctl.show.forms import Column
from waltzctl.show.terminal import count
from waltzctl.snapshot import client_inventory
from waltzctl.snapshot.client_inventory import ServerUsage
from waltzctl.snapshot.cluster_snapshot import silent_servers
from waltzctl.snapshot.groups import GroupState, GroupView
from waltzctl.snapshot.groups import groups as asked_for
from waltzd.errors import BadArgument, WaltzError
from waltzd.protocol.address import is_name

HISTORY_ENTRIES = 100
NAME: Column[ServerUsage] = Column("name", lambda one: one.use.name)
LINES_MAX = 300
"""Maximum number of log lines, the newest."""
QUIET = ("debug", "info")
SINCE = ("10m", "1h", "6h", "1d")


async def clients(asked: PageRequest) -> Page:
    with_gone = asked.query.get("show") == "all"
    found = await client_inventory.take_inventory(await asked.cluster(), asked.target.tls, needs_answer=True)
    listing = client.clients(found, with_gone=with_gone)
    style = GridStyle(tones={"state": tone_of}, wide={"version", "role", "servers"})
    chosen, pager = cut(asked, listing.rows, {"show": "all"} if with_gone else {})
    names = sorted({one.name for one in chosen if one.state != "gone"})
    uses = [one for one in found.uses if one.use.name in {one.name for one in chosen}] if pager["last"] else found.uses
    ends = [(f"end the mounts of {name}", ("client", "disconnect", name)) for name in names]
    return Page(
        title="Clients",
        commands=(asked.command("client", "list", *(("--all",) if with_gone else ())),),
        polls=2,
        parts=(
            part(
                "choice",
                path="/clients",
                name="show",
                chosen="all" if with_gone else "here",
                choices=[("here", "connected now"), ("all", "with those that were lately")],
            ),
            grids(
                "clients",
                listed("Instances of applications", listing, style, chosen),
                grid("What names use, at each server", (NAME, *client.USES), uses, nothing="Nothing is used."),
                notes=silent_servers(found.silent),
                pager=pager | {"path": "/clients"},
            ),
            *actions(asked, ends),
        ),
    )


async def archive(asked: PageRequest) -> Page:
    listing = shown_archive.reaching(await reached(await asked.cluster(), asked.snapshot))
    backups = backed_up(asked.snapshot)
    style = GridStyle(links={"partition": lambda one: of_partition(one.partition)}, wide={"archive", "sha256"})
    backup = backups.page()
    target, pager = cut(asked, listing.rows, {})
    saved, _ = cut(asked, backup.rows, {})
    is_used = any(one.archive for one in listing.rows)
    remarks = [] if is_used else ["Nothing is archived yet: no segment is full, or no storage has the setting archive."]
    return Page(
        title="Archive and backup",
        commands=(asked.command("archive", "status"), asked.command("archive", "status", "--lost-now")),
        polls=3,
        parts=(
            grids("archive", listed("How far archives reach", listing, style, target), remarks=remarks, has_titles=True),
            grids(
                "backup",
                listed("What would be lost with all storages", backup, style, saved),
                remarks=[f"Documents of the cluster: {backups.documents()}"],
                has_titles=True,
                pager=pager | {"path": "/archive"},
            ),
        ),
    )


async def history(asked: PageRequest) -> Page:
    listing = change.history(await (await asked.cluster()).history(HISTORY_ENTRIES))
    style = GridStyle(tones={"outcome": tone_of_outcome})
    return Page(
        title="History",
        commands=(asked.command("history", "-n", HISTORY_ENTRIES),),
        polls=3,
        parts=(grids("history", listed("What people changed", listing, style)),),
    )


async def events(asked: PageRequest) -> Page:
    since, level = asked.query.get("since", "1h"), asked.query.get("level", "info")
    daemon = asked.query.get("daemon", "")
    if level not in LEVELS:
        raise BadArgument(f"level: {level!r} is none of {', '.join(LEVELS)}", not_done="no daemon was asked")
    since_ms = int((time.time() - duration(since)) * 1000)
    names = (daemon,) if daemon else ()
    lines, silent = await collect_lines(asked.watch.poll, asked.report, since_ms, names, level)
    newest: Sequence[LogLine] = lines[: -LINES_MAX - 1 : -1]
    words = ["events", "--since", since, "--level", level, *(("--daemon", daemon) if daemon else ())]
    remarks = [f"The newest {LINES_MAX:,} of {len(lines):,} lines."] if len(lines) > LINES_MAX else []
    style = GridStyle(tones={"level": lambda level: None if level in QUIET else tone_of(level)}, without={"kind"})
    return Page(
        title="Events",
        commands=(asked.command(*words),),
        polls=2,
        parts=(
            part(
                "choice",
                "events",
                since=since,
                level=level,
                daemon=daemon,
                spans=SINCE,
                levels=LEVELS,
                daemons=[view.meta.name for view in asked.snapshot.nodes],
            ),
            grids(
                "events",
                grid("The newest first", merged_log.EVENTS, newest, style, nothing="No events in this time."),
                notes=[f"{name} does not answer: {one.code} {one.message}" for name, one in sorted(silent.items())],
                remarks=remarks,
            ),
        ),
    )


# -- consumer groups ---------------------------------------------------------------------------------------------------


TONES = {
    GroupState.STOPPED: Tone.BAD,
    GroupState.PAUSED: Tone.WARN,
    GroupState.UNKNOWN: Tone.WARN,
    GroupState.WAITING: Tone.WARN,
    GroupState.WORKING: Tone.GOOD,
    GroupState.IDLE: Tone.GOOD,
}


def tone_of_standing(state: str) -> Tone:
    return TONES[GroupState(state)]


async def groups(asked: PageRequest) -> Page:
    found = await asked_for(await asked.cluster(), asked.target.tls)
    listing = show.groups_page(found)
    chosen, pager = cut(asked, listing.rows, {})
    style = GridStyle(links={"name": lambda view: f"/groups/{view.name}"}, tones={"state": tone_of_standing})
    return Page(
        title="Groups",
        commands=(asked.command("group", "list"),),
        polls=2,
        parts=(
            part(
                "groups",
                "group",
                grid=listed("Consumer groups", listing, style, chosen),
                pager=pager,
                path="/groups",
                state="",
                tone=None,
                settings=(),
                notes=show.remarks(found),
            ),
        ),
    )


async def group(asked: PageRequest) -> Page:
    name = asked.name
    if not is_name(name):
        raise unknown("consumer group", name, ())
    cluster = await asked.cluster()
    found, view = await one_of(cluster, asked.target.tls, name)
    chosen, pager = cut(asked, view.partitions, {})
    style = GridStyle(
        links={"partition": lambda one: of_partition(one.partition)},
        tones={"state": tone_of_standing},
        wide={"delivered", "acknowledged", "failed"},
    )
    members = show.members_of(view)
    more = [f"and {len(members) - ROWS:,} more: -o json has all"] if len(members) > ROWS else []
    changes: list[tuple[str, tuple[str, ...]]] = []
    if any(one.place.stopped for one in view.partitions):
        changes.append(("let it go on where it has stopped", ("group", "resume", name)))
    if view.parked:
        parked = count(view.parked, "parked transaction")
        changes.append((f"replay {parked}", ("group", "parked", "replay", name, "--all")))
    return Page(
        title=f"Group {name}",
        commands=(
            asked.command("group", "describe", name),
            asked.command("group", "parked", "list", name),
        ),
        polls=2,
        parts=(
            part(
                "group",
                grid=grid("Where it stands", show.PLACES, chosen, style, nothing="It has no partitions."),
                pager=pager,
                path=f"/groups/{name}",
                state=str(view.standing),
                tone=TONES[view.standing],
                settings=show.settings(view.meta),
                notes=show.remarks(found),
            ),
            grids(
                "members",
                grid("Members", show.MEMBERS, members[:ROWS], nothing="No member is connected."),
                remarks=more,
                has_titles=True,
            ),
            await _parked(asked, view),
            *actions(asked, changes),
        ),
    )


async def _parked(asked: PageRequest, view: GroupView) -> Part:
    notes, rows = [], list[ParkedOne]()
    numbers = [one.partition for one in view.partitions]
    try:
        rows = [ParkedOne(one) for one in await parked_in(await asked.cluster(), asked.target, view, numbers, ROWS + 1)]
    except WaltzError as error:  # the page is shown without what is parked
        notes = [f"what is parked is not known: {error.code} {error.message}"]
    links = dict[str, Of](id=lambda row: f"/transactions/{row.one.partition}-{row.one.id}")
    nothing = "It is not known." if notes else "Nothing is parked."
    more = [f"The first {ROWS} of {view.parked:,}."] if len(rows) > ROWS else []
    found = grid("Parked", parked.PARKED, rows[:ROWS], GridStyle(links=links), nothing=nothing)
    return grids("parked", found, notes=notes, remarks=more, has_titles=True)
