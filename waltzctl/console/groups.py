"""Pages of consumer groups: positions, members and parked transactions.

The data and the columns are those of `waltzctl group`.
"""

from __future__ import annotations

from waltzctl.console.pages import ROWS, Page, PageRequest, Part, actions, cut, grids, of_partition
from waltzctl.console.table import GridStyle, Of, Tone, grid, listed
from waltzctl.groups.command import one_of
from waltzctl.groups.parked import parked_in
from waltzctl.shell.cluster_target import unknown
from waltzctl.show import group as show
from waltzctl.show.group import ParkedOne
from waltzctl.show.terminal import count
from waltzctl.snapshot.groups import GroupState, GroupView
from waltzctl.snapshot.groups import groups as asked_for
from waltzd.errors import WaltzError
from waltzd.protocol.address import is_name

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
    listing = show.groups(found)
    chosen, pager = cut(asked, listing.rows, {})
    style = GridStyle(links={"name": lambda view: f"/groups/{view.name}"}, tones={"state": tone_of_standing})
    return Page(
        title="Groups",
        commands=(asked.command("group", "list"),),
        polls=2,
        parts=(
            Part(
                name="groups",
                template="group.html",
                given={
                    "grid": listed("Consumer groups", listing, style, chosen),
                    "pager": pager,
                    "path": "/groups",
                    "state": "",
                    "tone": None,
                    "settings": (),
                    "notes": show.remarks(found),
                },
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
            Part(
                name="group",
                template="group.html",
                given={
                    "grid": grid("Where it stands", show.PLACES, chosen, style, nothing="It has no partitions."),
                    "pager": pager,
                    "path": f"/groups/{name}",
                    "state": str(view.standing),
                    "tone": TONES[view.standing],
                    "settings": show.settings(view.meta),
                    "notes": show.remarks(found),
                },
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
    found = grid("Parked", show.PARKED, rows[:ROWS], GridStyle(links=links), nothing=nothing)
    return grids("parked", found, notes=notes, remarks=more, has_titles=True)
