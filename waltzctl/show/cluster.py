"""A cluster and what belongs to it: servers, storages, partitions and their replicas, and whether all of it is well.

The verdict (`watching.rules`) comes first on a page; then the reasons, then what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from waltzctl.picture.picture import PartitionView, Picture, ServerView, StorageView, timeline_sentence
from waltzctl.show import group
from waltzctl.show.forms import Column, Columns, Listing, Page, grid, objects, plain
from waltzctl.show.terminal import ROWS_MAX, count, duration, paragraph, put_next, size, table
from waltzctl.watching.facts import Health, Reason, Sighting
from waltzctl.watching.troubles import SLOW_MS
from waltzd.cluster.assignment import spell_numbers
from waltzd.cluster.documents import Membership
from waltzd.errors import CannotConnect

if TYPE_CHECKING:
    from rich.console import Console

    from waltzctl.placement.plan import Creation
    from waltzd.cluster.documents import PartitionMeta
from waltzd.protocol.descriptions import OwnedReplica

STYLES = {Health.HEALTHY: "bold green", Health.DEGRADED: "bold yellow", Health.DOWN: "bold red"}
REASONS_MAX = 20
NOT_LISTED = CannotConnect("it is not in ZooKeeper's list of servers")


def all_servers(found: Picture) -> list[ServerView]:
    """With those that should be up and are not."""
    missing = [ServerView(meta=replace(meta, is_draining=False), said=None, error=NOT_LISTED) for meta in found.missing]
    return [*found.servers, *missing]


def _owner(owner: str | None) -> str:
    return owner or "nobody"


def _words(view: ServerView | StorageView, words: Mapping[str, bool], *, with_code: bool = False) -> str:
    """The state of a daemon: the words that hold."""
    if view.error is NOT_LISTED:
        return "down"
    if view.error is not None:
        return f"silent ({view.error.code})" if with_code else "silent"
    return ", ".join(["up", *(word for word, holds in words.items() if holds)])


# -- servers -----------------------------------------------------------------------------------------------------------


def servers(found: Picture) -> Listing[ServerView]:
    def owned(view: ServerView) -> list[PartitionView]:
        return [one for one in found.partitions if view.error is not NOT_LISTED and one.owner == view.meta.name]

    def state(view: ServerView) -> list[str]:
        if view.error is NOT_LISTED:
            return ["down"]
        words = {
            "silent": view.error is not None, "leader": view.meta.name == found.leader, "draining": view.meta.is_draining
        }  # fmt: skip
        return [word for word, holds in words.items() if holds] or ["up"]

    def error(view: ServerView) -> str | None:
        if view.error is None or view.error is NOT_LISTED:
            return None if view.error is None else view.error.message
        return f"{view.error.code} {view.error.message}"

    return Listing(
        kind="servers",
        columns=(
            Column("name", lambda view: view.meta.name),
            Column("address", lambda view: view.meta.listen),
            Column("admin", lambda view: view.meta.admin_listen),
            Column("owns", lambda view: spell_numbers([one.partition for one in owned(view)])),
            Column("", lambda view: [one.partition for one in owned(view)], json="partitions"),
            Column("open", lambda view: sum(one.is_open for one in owned(view)), is_right=True),
            Column("state", state),
            Column("version", lambda view: view.meta.version, is_wide=True),
            Column("instance", lambda view: str(view.meta.instance), is_wide=True),
            Column("error", error, is_wide=True),
        ),
        rows=sorted(all_servers(found), key=lambda view: view.meta.name),
        nothing="No server is up: the partitions have no owner.",
        more={"leader": found.leader},
    )


# -- storages ----------------------------------------------------------------------------------------------------------

STORAGES: Columns[StorageView] = (
    Column("storage", lambda view: view.meta.name),
    Column("state", lambda view: "silent" if view.said is None else "draining" if view.said.is_draining else "up"),
    Column("group", lambda view: view.meta.group),
    Column("replicas", lambda view: None if view.said is None else len(view.said.assigned), is_right=True),
    Column("free bytes", lambda view: None if view.said is None else view.said.free_bytes, is_right=True, is_size=True),
    Column("listen", lambda view: view.meta.listen),
    Column("admin", lambda view: view.meta.admin_listen, is_wide=True),
    Column("version", lambda view: None if view.said is None else view.said.version, is_wide=True),
    Column("trouble", lambda view: "" if view.error is None else view.error.message, is_wide=True),
)


def storages(found: Picture) -> Listing[StorageView]:
    return Listing(kind="storages", columns=STORAGES, rows=found.storages, nothing="The cluster has no storages.")


# -- partitions --------------------------------------------------------------------------------------------------------


def with_stars(roles: Mapping[str, Membership]) -> list[str]:
    """Learners have one."""
    return [f"{name}{'*' if role is Membership.LEARNER else ''}" for name, role in sorted(roles.items())]


def _numbers(views: Sequence[PartitionView]) -> str:
    """Their numbers, and behind that of the group log what it holds."""
    return f"{spell_numbers([view.partition for view in views])}{' (groups)' if views[0].is_group_log else ''}"


PARTITIONS: Columns[PartitionView] = (
    Column("partition", lambda view: view.partition, is_right=True, label=lambda view: _numbers([view])),
    Column("state", lambda view: view.state),
    Column("owner", lambda view: view.owner),
    Column("replicas", lambda view: with_stars(view.replicas)),
    Column("level", lambda view: None if view.said is None else view.counting, is_right=True),
    Column("committed", lambda view: None if view.said is None else view.said.committed, is_right=True),
    Column("format", lambda view: view.format, is_right=True, is_wide=True),
    Column("generation", lambda view: view.generation, is_right=True, is_wide=True),
    Column("session", lambda view: None if view.said is None else view.said.session, is_right=True, is_wide=True),
    Column("waiting", lambda view: view.waiting, is_wide=True),
)
HOLDS: Column[PartitionView] = Column("holds", lambda view: "groups" if view.is_group_log else "transactions")
DESCRIBED_PARTITIONS: Columns[PartitionView] = (
    Column("partition", lambda view: view.partition, is_right=True, label=lambda view: _numbers([view])),
    Column("owner", lambda view: view.owner, cell=_owner),
    Column("generation", lambda view: view.generation, is_right=True),
    Column("session", lambda view: None if view.said is None else view.said.session, is_right=True, json=""),
    Column("state", lambda view: view.state, json=""),
    Column("committed", lambda view: None if view.said is None else view.said.committed, is_right=True, json=""),
    Column("format", lambda view: view.format, is_right=True),
    Column("", lambda view: view.is_open, json="is_open"),
    Column("", lambda view: view.is_group_log, json="is_group_log"),
    Column("", lambda view: view.waiting, json="waiting"),
    Column("replicas", lambda view: f"{view.counting} of {len(view.replicas)}", is_right=True, json=""),
    Column("", lambda view: {name: str(role) for name, role in sorted(view.replicas.items())}, json="replicas"),
    Column("", lambda view: view.counting, json="counting"),
    Column("", lambda view: None if view.said is None else asdict(view.said), json="owned"),
)


def partitions(found: Picture) -> Listing[PartitionView]:
    goal: Column[PartitionView] = Column(
        "moves to", lambda view: found.moves.get(view.partition), is_wide=True, cell=lambda names: ", ".join(names or ())
    )
    columns = (*PARTITIONS, goal) if found.group_log is None else (*PARTITIONS, goal, replace(HOLDS, is_wide=True))
    return Listing(kind="partitions", columns=columns, rows=found.partitions, nothing="The cluster has no partitions.")


def partition(found: PartitionView, meta: PartitionMeta | None, goal: tuple[str, ...] | None) -> Page:
    said = found.said
    seen = {replica.storage: replica for replica in said.replicas} if said is not None else {}
    rows = [(name, seen.get(name)) for name in sorted({*found.replicas, *seen})]
    columns: Columns[tuple[str, OwnedReplica | None]] = (
        Column("replica", lambda row: row[0]),
        Column("role", lambda row: str(found.replicas.get(row[0], "leaving"))),
        Column("state", lambda row: "unknown" if row[1] is None else row[1].state.lower()),
        Column("last id", lambda row: None if row[1] is None else row[1].durable_id, is_right=True),
        Column("counts", lambda row: None if row[1] is None else row[1].counts),
        Column("story", lambda row: "" if row[1] is None else row[1].story),
    )
    recorded = None if meta is None else {
        "timelines": [asdict(one) for one in meta.timelines],
        "session": meta.session, "opened": meta.opened, "low_mark": meta.low_mark, "members": list(meta.members),
        "decided": None if meta.decision is None else meta.decision.mark,
    }  # fmt: skip

    def draw(out: Console) -> None:
        out.print("open" if found.is_open else "not open", style="bold green" if found.is_open else "bold red")
        if found.waiting:
            out.print(found.waiting, style="red", soft_wrap=True)
        owner = f"{_owner(found.owner)}, generation {found.generation:,}"
        if said is not None:
            owner += f", session {said.session:,}, {said.committed + 1:,} transactions, {count(said.mounts, 'client')}"
        if found.format is not None:
            owner += f", writes format {found.format}"
        what = f"partition {found.partition}{', the group log' if found.is_group_log else ''}"
        out.print(f"{what}, owned by {owner}", soft_wrap=True)
        for one in found.timelines:
            out.print(timeline_sentence(one), style="yellow", soft_wrap=True)
        grid(out, columns, rows)
        if goal is not None:
            out.print(f"on its way to {', '.join(goal)}", style="yellow", soft_wrap=True)

    return Page(
        told={
            **objects(DESCRIBED_PARTITIONS, [found])[0],
            "goal": None if goal is None else list(goal),
            "recorded": recorded,
        },
        draw=draw,
        things=Listing(kind="replicas", columns=columns, rows=rows),
    )


# -- all of it ---------------------------------------------------------------------------------------------------------


def picture(found: Picture, *, where: str) -> Page:
    def draw(out: Console) -> None:
        out.print(sentence(found), style="bold green" if found.is_healthy else "bold red", soft_wrap=True)
        out.print(f"cluster {found.meta.name}, {_format(found)}, key {found.meta.key}, {where}", soft_wrap=True)
        grid(out, _described_servers(found), all_servers(found))
        grid(out, DESCRIBED_STORAGES, found.storages)
        wanting = {view.partition for view in (*found.closed, *found.short)}
        many = len(found.partitions) > ROWS_MAX
        shown = [view for view in found.partitions if not many or view.partition in wanting]
        grid(out, DESCRIBED_PARTITIONS, shown)
        if len(shown) < len(found.partitions):
            out.print(f"{count(len(found.partitions) - len(shown), 'more partition')}, all open with all replicas")
        for name, error in found.silent.items():
            out.print(f"{name}: {error.code} {error.message}", style="red", soft_wrap=True)
        for view in found.closed[:ROWS_MAX]:
            out.print(f"partition {view.partition}: {view.waiting}", style="red", soft_wrap=True)
        for view in found.short[:ROWS_MAX]:
            for story in _missing(view):
                out.print(f"partition {view.partition}: {story}", style="yellow", soft_wrap=True)

    return Page(told={"coordinator": where, **picture_json(found)}, draw=draw, things=partitions(found))


def _described_servers(found: Picture) -> Columns[ServerView]:
    def state(view: ServerView) -> str:
        return _words(view, {"leader": view.meta.name == found.leader, "draining": view.meta.is_draining})

    return (
        Column("server", lambda view: view.meta.name, json="name"),
        Column("address", lambda view: view.meta.listen, json="listen"),
        Column("admin", lambda view: view.meta.admin_listen, json="admin_listen"),
        Column("", lambda view: view.meta.version, json="version"),
        Column("", lambda view: view.meta.is_draining, json="is_draining"),
        Column("", lambda view: view.error is None, json="is_up"),
        Column("partitions", lambda view: None if view.said is None else [one.partition for one in view.said.partitions],
               is_right=True, cell=_number),
        Column("state", state, json=""),
        Column("", lambda view: plain(view.error), json="error"),
    )  # fmt: skip


def _number(things: Sequence[object] | None) -> str:
    return "" if things is None else f"{len(things):,}"


def _held(view: StorageView) -> list[int] | None:
    return None if view.said is None else [held.partition for held in view.said.assigned]


DESCRIBED_STORAGES: Columns[StorageView] = (
    Column("storage", lambda view: view.meta.name, json="name"),
    Column("address", lambda view: view.meta.listen, json="listen"),
    Column("admin", lambda view: view.meta.admin_listen, json="admin_listen"),
    Column("replicas", _held, is_right=True, cell=_number, json=""),
    Column("group", lambda view: view.meta.group),
    Column("state", lambda view: _words(view, {}), json=""),
    Column("", lambda view: view.error is None, json="is_up"),
    Column("", _held, json="replicas"),
    Column("", lambda view: None if view.said is None else plain(view.said.scrub), json="scrub"),
    Column("", lambda view: plain(view.error), json="error"),
)


def picture_json(found: Picture) -> dict[str, Any]:
    return {
        "is_healthy": found.is_healthy,
        "name": found.meta.name,
        "cluster_key": str(found.meta.key),
        "created": found.meta.created,
        "format": found.meta.format,
        "leader": found.leader,
        "servers": objects(_described_servers(found), all_servers(found)),
        "storages": objects(DESCRIBED_STORAGES, found.storages),
        "partitions": objects(DESCRIBED_PARTITIONS, found.partitions),
    }


def _format(found: Picture) -> str:
    """What the cluster writes, and how far the change to it has come."""
    formats = [view.format for view in found.partitions if view.format is not None and not view.is_group_log]
    wanted, over = found.meta.format, sum(format >= found.meta.format for format in formats)
    return f"format {wanted}" + (f" ({over} of {count(len(formats), 'partition')} so far)" if over < len(formats) else "")


def sentence(found: Picture) -> str:
    views = [view for view in found.partitions if not view.is_group_log]
    opened, total = sum(view.is_open for view in views), len(views)
    said = f"{count(total, 'partition')} open" if opened == total else f"{opened} of {count(total, 'partition')} open"
    if found.group_log is not None and not found.group_log.is_open:
        said += ", the log of groups closed"
    if found.short:
        said += f", {len(found.short)} with fewer replicas than they should have"
    if found.silent:
        said += f", {count(len(found.silent), 'process', 'processes')} not answering"
    return f"{said}, on {count(len(found.servers), 'server')} and {count(len(found.storages), 'storage')}"


def _missing(view: PartitionView) -> list[str]:
    """What the owner says of the replicas that do not count."""
    return [
        f"{replica.storage} is {replica.state.lower().replace('_', ' ')}{': ' if replica.story else ''}{replica.story}"
        for replica in (view.said.replicas if view.said is not None else ())
        if not replica.counts
    ]


def creation(made: Creation, *, hosts: str, root: str, is_dry: bool) -> Page:
    """Of `create-cluster`."""
    result = "would create" if is_dry and not made.was_there else "there already" if made.was_there else "created"
    names = sorted(made.storages)
    columns: Columns[str] = (
        Column("storage", lambda name: name, json="name"),
        Column("", lambda name: made.storages[name].listen, json="listen"),
        Column("", lambda name: made.storages[name].admin_listen, json="admin_listen"),
        Column("group", lambda name: made.storages[name].group),
        Column("address", lambda name: made.storages[name].listen, json=""),
        Column("replicas", made.partitions_of, is_right=True, cell=_number, json="partitions"),
        Column("made now", made.created_on, is_right=True, cell=_number, json="made"),
    )

    def draw(out: Console) -> None:
        out.print(
            f"{result}: cluster {made.meta.name}, {count(made.meta.partitions, 'partition')}, format {made.meta.format}",
            style="bold green",
        )
        out.print(f"key {made.meta.key}, documents at {hosts}{root}", soft_wrap=True)
        grid(out, columns, names)
        if is_dry:
            out.print("Nothing was written.")
            return
        out.print("Next: start servers with these lines in their configuration, each with a name of its own:",
                  soft_wrap=True)  # fmt: skip
        out.print(f"  coordinator: {hosts}\n  cluster: {root}", soft_wrap=True)

    return Page(
        told={
            "result": result.replace(" ", "-"),
            "coordinator": hosts,
            "root": root,
            "name": made.meta.name,
            "cluster_key": str(made.meta.key),
            "partitions": made.meta.partitions,
            "created": made.meta.created,
            "format": made.meta.format,
            "storages": objects(columns, names),
            "replicas": plain(
                {number: names for number, names in sorted(made.replicas.items()) if number < made.meta.partitions}
            ),
            "group_log": list(made.group_log),
        },
        draw=draw,
        things=Listing(kind="storages", columns=columns, rows=names),
    )


# -- whether it is well ------------------------------------------------------------------------------------------------

Local = tuple[Callable[["Console"], None], Mapping[str, Any]]
"""The processes of a cluster on this machine, for people and for programs."""


def status(found: Sighting, local: Local | None = None) -> Page:
    document = {**status_json(found), **({} if local is None else local[1])}
    return Page(told=document, draw=lambda out: draw_status(out, found, local), things=partitions(found.picture))


def draw_status(out: Console, found: Sighting, local: Local | None) -> None:
    verdict, seen = found.verdict, found.picture
    out.print(f"{verdict.health}: {verdict.sentence}", style=STYLES[verdict.health], soft_wrap=True)
    reasons(out, verdict.reasons)
    for note in verdict.notes:
        paragraph(out, f"note: {note}", "")
    _nodes(out, seen)
    rows = [_group_row(views) for views in _groups(seen.partitions)]
    names = ("partitions", "owner", "state", "counting", "mounts", "tail")
    table(out, names, rows[:ROWS_MAX], right=("counting", "mounts", "tail"))
    if line := _scrubbed(seen):
        out.print(line, soft_wrap=True)
    if line := group.totals(seen.groups):
        out.print(line, style="" if seen.groups is not None and group.is_well(seen.groups) else "yellow", soft_wrap=True)
    contact = "" if found.facts.coordinator_ms is None else f", ZooKeeper answered in {found.facts.coordinator_ms:.0f} ms"
    leader = f", leader {seen.leader}" if seen.leader is not None else ""
    out.print(f"cluster {seen.meta.name}, {_format(seen)}{leader}{contact}, {found.at}", soft_wrap=True)
    if local is not None:
        local[0](out)


def reasons(out: Console, found: Sequence[Reason]) -> None:
    for reason in found[:REASONS_MAX]:
        since = f" (seen since {reason.since})" if reason.since is not None else ""
        paragraph(out, f"- {reason.sentence}{since}", "red" if reason.stops else "yellow")
        put_next(out, reason.next_step)
    if len(found) > REASONS_MAX:
        out.print(f"- and {count(len(found) - REASONS_MAX, 'more reason')}; -o json has them all")


def _nodes(out: Console, found: Picture) -> None:
    def server_state(view: ServerView) -> str:
        is_draining = view.meta.is_draining if view.said is None else view.said.is_draining
        is_apart = view.said is not None and not view.said.is_connected
        words = {"leader": view.meta.name == found.leader, "draining": is_draining, "no contact with ZooKeeper": is_apart}
        return _words(view, words, with_code=True)

    servers: Columns[ServerView] = (
        Column("server", lambda view: view.meta.name),
        Column("admin address", lambda view: view.meta.admin_listen),
        Column("owns", lambda view: None if view.said is None else len(view.said.partitions), is_right=True),
        Column("answered", answer, is_right=True),
        Column("state", server_state),
    )
    storages: Columns[StorageView] = (
        Column("storage", lambda view: view.meta.name),
        Column("admin address", lambda view: view.meta.admin_listen),
        Column("group", lambda view: view.meta.group),
        Column("replicas", lambda view: None if view.said is None else len(view.said.assigned), is_right=True),
        Column("free", lambda view: None if view.said is None else view.said.free_bytes, is_right=True, is_size=True),
        Column("answered", answer, is_right=True),
        Column("state", lambda view: _words(view, _ills(view), with_code=True)),
    )
    grid(out, servers, all_servers(found))
    grid(out, storages, found.storages)


def _scrubbed(found: Picture) -> str:
    """Since when all sealed segments of all storages were read, or how much of them; empty where no storage says."""
    scrubs = [view.said.scrub for view in found.storages if view.said is not None and view.said.scrub is not None]
    ages = [scrub.age_ms for scrub in scrubs if scrub.period_seconds]
    if not scrubs:
        return ""
    off = f", off in {count(len(scrubs) - len(ages), 'storage')}" if len(ages) < len(scrubs) else ""
    if not ages:
        return "scrub: off"
    pace = f"scrub: {size(sum(scrub.bytes_per_second for scrub in scrubs))}/s{off}, "
    known = [age for age in ages if age is not None]
    if len(known) == len(ages):
        return f"{pace}every sealed segment was read in the last {duration(max(known))}"
    total = sum(scrub.total_bytes for scrub in scrubs)
    return f"{pace}{sum(scrub.done_bytes for scrub in scrubs) / total:.0%} of the first round is done" if total else ""


def answer(view: ServerView | StorageView) -> str:
    if view.error is not None:
        return ""
    return f"{view.call.milliseconds:,.0f} ms{'!' if view.call.milliseconds > SLOW_MS else ''}"


def _ills(view: StorageView) -> Mapping[str, bool]:
    if view.said is None:
        return {}
    statuses = [held.status for held in view.said.assigned]
    return {
        "stopping": view.said.is_draining,
        "damaged": any(status is None or not status.is_sound for status in statuses),
        "disk full": any(status is not None and status.is_full for status in statuses),
        "offline": any(status is not None and not status.is_available for status in statuses),
    }


def _groups(partitions: Sequence[PartitionView]) -> list[list[PartitionView]]:
    """Those that are alike, together, and the group log alone; the ones with something to say first."""
    grouped: dict[tuple[object, ...], list[PartitionView]] = {}
    for view in partitions:
        alike = (view.is_group_log, view.owner, view.state, view.counting, len(view.replicas))
        grouped.setdefault(alike, []).append(view)

    def order(views: list[PartitionView]) -> tuple[bool, int]:
        return views[0].is_open and views[0].counting >= len(views[0].replicas), views[0].partition

    return sorted(grouped.values(), key=order)


def _group_row(views: list[PartitionView]) -> tuple[str, ...]:
    first = views[0]
    said = [view.said for view in views if view.said is not None]
    counting = f"{first.counting} of {len(first.replicas)}" if said else ""
    mounts = f"{sum(owned.mounts for owned in said):,}" if said else ""
    tail = size(sum(owned.tail_bytes for owned in said)) if said else ""
    return (_numbers(views), _owner(first.owner), first.state, counting, mounts, tail)


def status_json(found: Sighting) -> dict[str, Any]:
    seen, lost = found.picture, found.lost
    return {
        "verdict": str(found.verdict.health),
        "sentence": found.verdict.sentence,
        "reasons": plain(found.verdict.reasons),
        "notes": list(found.verdict.notes),
        "groups": plain(seen.groups),
        "at": found.at,
        "milliseconds": round(found.milliseconds, 1),
        "coordinator_milliseconds": None if found.facts.coordinator_ms is None else round(found.facts.coordinator_ms, 1),
        "coordinator_seen": found.at if lost is None else lost.seen,
        "error": None if lost is None else plain(lost.cause),
        "answered_milliseconds": {
            view.meta.name: None if view.error is not None else round(view.call.milliseconds, 1) for view in seen.nodes
        },
        "moves": plain(dict(sorted(seen.moves.items()))),
        "cluster": picture_json(seen),
    }
