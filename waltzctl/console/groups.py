"""Pages of durable groups: how far they are, who works for them, and what they have put aside, to be replayed or left.

What servers say, the columns and the plans are those of `waltzctl group`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from urllib.parse import urlencode

from waltzctl.console.pages import ROWS, Asked, Page, Part, actions, cut, grids, of_partition
from waltzctl.console.table import Look, Of, Tone, grid, listed
from waltzctl.groups.command import one_of
from waltzctl.groups.parked import parked_in
from waltzctl.picture.groups import GroupView, Standing
from waltzctl.picture.groups import groups as asked_for
from waltzctl.shell.reach import unknown
from waltzctl.show import group as show
from waltzctl.show.forms import Column
from waltzctl.show.group import ParkedOne
from waltzctl.show.terminal import count
from waltzd.errors import WaltzError
from waltzd.protocol.address import is_name

ALL = "all"
"""Of what is parked: everything, instead of ids."""
PARKED_VERBS = ("replay", "discard")
TONES = {
    Standing.STOPPED: Tone.BAD,
    Standing.PAUSED: Tone.WARN,
    Standing.UNKNOWN: Tone.WARN,
    Standing.WAITING: Tone.WARN,
    Standing.WORKING: Tone.GOOD,
    Standing.IDLE: Tone.GOOD,
}


def tone_of_standing(state: str) -> Tone:
    return TONES[Standing(state)]


async def groups(asked: Asked) -> Page:
    found = await asked_for(await asked.cluster(), asked.reach.tls)
    told = show.groups(found)
    chosen, pager = cut(asked, told.things.rows, {})
    look = Look(links={"name": lambda view: f"/groups/{view.name}"}, tones={"state": tone_of_standing})
    return Page(
        title="Groups",
        commands=(asked.command("group", "list"),),
        looks=2,
        parts=(
            Part(
                name="groups",
                template="group.html",
                given={
                    "grid": listed("Durable groups", told.things, look, chosen),
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


async def group(asked: Asked) -> Page:
    name = asked.name
    if not is_name(name):
        raise unknown("durable group", name, ())
    cluster = await asked.cluster()
    found, view = await one_of(cluster, asked.reach.tls, name)
    chosen, pager = cut(asked, view.partitions, {})
    look = Look(
        links={"partition": lambda one: of_partition(one.partition)},
        tones={"state": tone_of_standing},
        wide={"delivered", "acknowledged", "failed"},
    )
    members = show.members_of(view)
    more = [f"and {len(members) - ROWS:,} more: -o json has all"] if len(members) > ROWS else []
    return Page(
        title=f"Group {name}",
        commands=(
            asked.command("group", "describe", name),
            asked.command("group", "parked", "list", name),
        ),
        looks=2,
        parts=(
            Part(
                name="group",
                template="group.html",
                given={
                    "grid": grid("Where it stands", show.PLACES, chosen, look, nothing="It has no partitions."),
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
            *_changes(asked, view),
        ),
    )


async def _parked(asked: Asked, view: GroupView) -> Part:
    notes, rows = [], list[ParkedOne]()
    numbers = [one.partition for one in view.partitions]
    try:
        rows = [ParkedOne(one) for one in await parked_in(await asked.cluster(), asked.reach, view, numbers, ROWS + 1)]
    except WaltzError as error:  # the rest is shown all the same
        notes = [f"what is parked is not known: {error.code} {error.message}"]
    columns, links = show.PARKED, dict[str, Of](id=lambda row: f"/transactions/{row.one.partition}-{row.one.id}")
    if asked.allows_changes:
        columns = (*columns, *(_verb(verb) for verb in PARKED_VERBS))
        links |= {verb: partial(_change, verb, view.name) for verb in PARKED_VERBS}
    nothing = "It is not known." if notes else "Nothing is parked."
    more = [f"The first {ROWS} of {view.parked:,}."] if len(rows) > ROWS else []
    found = grid("Parked", columns, rows[:ROWS], Look(links=links), nothing=nothing)
    return grids("parked", found, notes=notes, remarks=more, has_titles=True)


def _verb(verb: str) -> Column[ParkedOne]:
    """A column that is a link in each row."""
    return Column(verb, lambda _: verb, json="")


def _change(verb: str, name: str, row: ParkedOne) -> str:
    given = {"name": name, "ids": f"{row.one.partition}:{row.one.id}"}
    return f"/change/group-parked-{verb}?{urlencode(given)}"


def _changes(asked: Asked, view: GroupView) -> Sequence[Part]:
    if not asked.allows_changes:
        return ()
    found = []
    if any(one.place.stopped for one in view.partitions):
        found.append(("let it go on where it has stopped", "group-resume", {"name": view.name}))
    if view.parked:
        parked = count(view.parked, "parked transaction")
        found.append((f"replay {parked}", "group-parked-replay", {"name": view.name, "ids": ALL}))
        found.append((f"discard {parked}", "group-parked-discard", {"name": view.name, "ids": ALL}))
    skip = Part(name="skip", template="skip.html", given={"name": view.name})
    return (*actions(asked, found), skip)
