"""Output about a cluster: servers, storages, partitions, replicas, and health.

The verdict (`health.rules`) comes first on a page, then its reasons, then the tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from waltzctl.health.facts import Check, Grade, Health, HealthReport
from waltzctl.health.troubles import SLOW_MS
from waltzctl.show.forms import Column, Columns, Line, Listing, Part, Table, next_step, objects, pick, plain, verdict
from waltzctl.show.terminal import ROWS_MAX, count, duration, size
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView, ServerView, StorageView, timeline_sentence
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.documents import Membership
from waltzd.errors import CannotConnect
from waltzd.protocol.descriptions import OwnedReplica
from waltzd.protocol.groups import GroupTotals

if TYPE_CHECKING:
    from waltzctl.placement.replica_assignment import Creation
    from waltzd.cluster.documents import PartitionMeta

STYLES = {Health.HEALTHY: "bold green", Health.DEGRADED: "bold yellow", Health.DOWN: "bold red"}
REASONS_MAX = 20
PAGES_ONLY = frozenset({"partitions", "answered"})
"""Columns of servers and storages that a page picks and a list leaves out, for its width."""
NOT_LISTED = CannotConnect("it is not in ZooKeeper's list of servers")


def all_servers(found: ClusterSnapshot) -> list[ServerView]:
    """Return the servers, including missing ones."""
    missing = [ServerView(meta=replace(meta, is_draining=False), reported=None, error=NOT_LISTED) for meta in found.missing]
    return [*found.servers, *missing]


def _state(view: ServerView | StorageView, words: Mapping[str, bool]) -> str:
    """Describe the state of a daemon, with the words whose flag is True."""
    if view.error is NOT_LISTED:
        return "down"
    if view.error is not None:
        return f"silent ({view.error.code})"
    return ", ".join(["up", *(word for word, holds in words.items() if holds)])


def _answered(view: ServerView | StorageView) -> str:
    if view.error is not None:
        return ""
    return f"{view.call.milliseconds:,.0f} ms{'!' if view.call.milliseconds > SLOW_MS else ''}"


# -- servers -----------------------------------------------------------------------------------------------------------


def servers(found: ClusterSnapshot) -> Listing[ServerView]:
    return Listing(
        kind="servers",
        columns=tuple(one for one in server_columns(found) if one.name not in PAGES_ONLY),
        rows=sorted(all_servers(found), key=lambda view: view.meta.name),
        nothing="No server is up: the partitions have no owner.",
        more={"leader": found.leader},
    )


def server_columns(found: ClusterSnapshot) -> Columns[ServerView]:
    def owned(view: ServerView) -> list[PartitionView]:
        return [one for one in found.partitions if view.error is not NOT_LISTED and one.owner == view.meta.name]

    def words(view: ServerView) -> list[str]:
        if view.error is NOT_LISTED:
            return ["down"]
        words = {
            "silent": view.error is not None, "leader": view.meta.name == found.leader, "draining": view.meta.is_draining
        }  # fmt: skip
        return [word for word, holds in words.items() if holds] or ["up"]

    def state(view: ServerView) -> str:
        is_draining = view.meta.is_draining if view.reported is None else view.reported.is_draining
        is_apart = view.reported is not None and not view.reported.is_connected
        leads = view.meta.name == found.leader
        return _state(view, {"leader": leads, "draining": is_draining, "no contact with ZooKeeper": is_apart})

    def error(view: ServerView) -> str | None:
        if view.error is None or view.error is NOT_LISTED:
            return None if view.error is None else view.error.message
        return f"{view.error.code} {view.error.message}"

    return (
        Column("server", "meta.name", json="name"),
        Column("address", "meta.listen"),
        Column("admin", "meta.admin_listen"),
        Column("owns", lambda view: format_numbers([one.partition for one in owned(view)])),
        Column("", lambda view: [one.partition for one in owned(view)], json="partitions"),
        Column("partitions", lambda view: view.reported and len(view.reported.partitions), json=""),
        Column("open", lambda view: sum(one.is_open for one in owned(view))),
        Column("answered", _answered, json="", is_right=True),
        Column("state", words, label=state),
        Column("version", "meta.version", is_wide=True),
        Column("instance", lambda view: str(view.meta.instance), is_wide=True),
        Column("error", error, is_wide=True),
    )


# -- storages ----------------------------------------------------------------------------------------------------------


def _storage_state(view: StorageView) -> str:
    if view.reported is None:
        return _state(view, {})
    statuses = [held.status for held in view.reported.assigned]
    ills = {
        "draining": view.reported.is_draining,
        "damaged": any(status is None or not status.is_sound for status in statuses),
        "disk full": any(status is not None and status.is_full for status in statuses),
        "offline": any(status is not None and not status.is_available for status in statuses),
    }
    return _state(view, ills)


STORAGES: Columns[StorageView] = (
    Column("storage", "meta.name"),
    Column("state", lambda view: "silent" if view.reported is None else "draining" if view.reported.is_draining else "up",
           label=_storage_state),
    Column("group", "meta.group"),
    Column("replicas", lambda view: None if view.reported is None else len(view.reported.assigned)),
    Column("free bytes", "reported.free_bytes", cell=size),
    Column("listen", "meta.listen"),
    Column("admin", "meta.admin_listen", is_wide=True),
    Column("version", "reported.version", is_wide=True),
    Column("answered", _answered, json="", is_right=True),
    Column("trouble", lambda view: "" if view.error is None else view.error.message, is_wide=True),
)  # fmt: skip


def storages(found: ClusterSnapshot) -> Listing[StorageView]:
    columns = tuple(one for one in STORAGES if one.name not in PAGES_ONLY)
    return Listing(kind="storages", columns=columns, rows=found.storages, nothing="The cluster has no storages.")


# -- partitions --------------------------------------------------------------------------------------------------------


def with_stars(roles: Mapping[str, Membership]) -> list[str]:
    """Name the replicas, with a `*` behind each learner."""
    return [f"{name}{'*' if role is Membership.LEARNER else ''}" for name, role in sorted(roles.items())]


def _numbers(views: Sequence[PartitionView]) -> str:
    """Format the numbers of partitions; the group log is marked."""
    return f"{format_numbers([view.partition for view in views])}{' (groups)' if views[0].is_group_log else ''}"


def _counting(view: PartitionView) -> str:
    return f"{'?' if view.reported is None else view.counting}/{len(view.replicas)}"


PARTITIONS: Columns[PartitionView] = (
    Column("partition", label=lambda view: _numbers([view])),
    Column("state"),
    Column("owner", none="nobody"),
    Column("replicas", lambda view: with_stars(view.replicas)),
    Column("level", lambda view: None if view.reported is None else view.counting, label=_counting),
    Column("committed", "reported.committed"),
    Column("format", is_wide=True),
    Column("generation", is_wide=True),
    Column("session", "reported.session", is_wide=True),
    Column("waiting", is_wide=True),
)
HOLDS: Column[PartitionView] = Column("holds", lambda view: "groups" if view.is_group_log else "transactions")


def partitions(found: ClusterSnapshot) -> Listing[PartitionView]:
    goal: Column[PartitionView] = Column("moves to", lambda view: found.moves.get(view.partition), is_wide=True)
    columns = (*PARTITIONS, goal) if found.group_log is None else (*PARTITIONS, goal, replace(HOLDS, is_wide=True))
    return Listing(kind="partitions", columns=columns, rows=found.partitions, nothing="The cluster has no partitions.")


def _partition_json(view: PartitionView) -> dict[str, Any]:
    return {
        "partition": view.partition,
        "owner": view.owner,
        "generation": view.generation,
        "format": view.format,
        "is_open": view.is_open,
        "is_group_log": view.is_group_log,
        "waiting": view.waiting,
        "replicas": {name: str(role) for name, role in sorted(view.replicas.items())},
        "counting": view.counting,
        "owned": None if view.reported is None else asdict(view.reported),
    }


REPLICAS: Columns[tuple[str, Membership | None, OwnedReplica | None]] = (
    Column("replica", lambda row: row[0]),
    Column("role", lambda row: "leaving" if row[1] is None else str(row[1])),
    Column("state", lambda row: "unknown" if row[2] is None else row[2].state.lower()),
    Column("last id", lambda row: row[2] and row[2].durable_id),
    Column("counts", lambda row: row[2] and row[2].counts),
    Column("story", lambda row: "" if row[2] is None else row[2].story),
)


def partition(view: PartitionView, meta: PartitionMeta | None, goal: tuple[str, ...] | None) -> Listing[Any]:
    reported = view.reported
    seen = {replica.storage: replica for replica in reported.replicas} if reported is not None else {}
    rows = [(name, view.replicas.get(name), seen.get(name)) for name in sorted({*view.replicas, *seen})]
    owner = f"{view.owner or 'nobody'}, generation {view.generation:,}"
    if reported is not None:
        owner += f", session {reported.session:,}, {count(reported.committed + 1, 'transaction')}"
        owner += f", {count(reported.mounts, 'client')}"
    if view.format is not None:
        owner += f", writes format {view.format}"
    page: list[Part] = [
        verdict("open" if view.is_open else "not open", is_good=view.is_open),
        *([Line(view.waiting, "red")] if view.waiting else []),
        f"partition {view.partition}{', the group log' if view.is_group_log else ''}, owned by {owner}",
        *(Line(timeline_sentence(one), "yellow") for one in view.timelines),
        Table(REPLICAS, rows),
        *([] if goal is None else [Line(f"on its way to {', '.join(goal)}", "yellow")]),
    ]
    recorded = None if meta is None else {
        "timelines": [asdict(one) for one in meta.timelines],
        "session": meta.session, "opened": meta.opened, "low_mark": meta.low_mark, "members": list(meta.members),
        "decided": None if meta.decision is None else meta.decision.mark,
    }  # fmt: skip
    content = {**_partition_json(view), "goal": None if goal is None else list(goal), "recorded": recorded}
    return Listing(kind="replicas", columns=REPLICAS, rows=rows, page=page, content=content)


# -- all of it ---------------------------------------------------------------------------------------------------------


def picture_json(found: ClusterSnapshot) -> dict[str, Any]:
    return {
        "is_healthy": found.is_healthy,
        "name": found.meta.name,
        "cluster_key": str(found.meta.key),
        "created": found.meta.created,
        "format": found.meta.format,
        "level": found.meta.level,
        "leader": found.leader,
        "servers": [
            {
                "name": view.meta.name,
                "listen": view.meta.listen,
                "admin_listen": view.meta.admin_listen,
                "version": view.meta.version,
                "is_draining": view.meta.is_draining,
                "is_up": view.error is None,
                "partitions": None if view.reported is None else [one.partition for one in view.reported.partitions],
                "error": plain(view.error),
            }
            for view in all_servers(found)
        ],
        "storages": [
            {
                "name": view.meta.name,
                "listen": view.meta.listen,
                "admin_listen": view.meta.admin_listen,
                "group": view.meta.group,
                "is_up": view.error is None,
                "replicas": None if view.reported is None else [held.partition for held in view.reported.assigned],
                "scrub": None if view.reported is None else plain(view.reported.scrub),
                "error": plain(view.error),
            }
            for view in found.storages
        ],
        "partitions": [_partition_json(view) for view in found.partitions],
    }


def _format(found: ClusterSnapshot) -> str:
    """Describe the segment format of the cluster, and the progress of a change of it."""
    formats = [view.format for view in found.partitions if view.format is not None and not view.is_group_log]
    wanted, over = found.meta.format, sum(format >= found.meta.format for format in formats)
    return f"format {wanted}" + (f" ({over} of {count(len(formats), 'partition')} so far)" if over < len(formats) else "")


def sentence(found: ClusterSnapshot) -> str:
    views = [view for view in found.partitions if not view.is_group_log]
    opened, total = sum(view.is_open for view in views), len(views)
    reported = f"{count(total, 'partition')} open" if opened == total else f"{opened} of {count(total, 'partition')} open"
    if found.group_log is not None and not found.group_log.is_open:
        reported += ", the log of groups closed"
    if found.short:
        reported += f", {len(found.short)} with fewer replicas than they should have"
    if found.silent:
        reported += f", {count(len(found.silent), 'process', 'processes')} not answering"
    return f"{reported}, on {count(len(found.servers), 'server')} and {count(len(found.storages), 'storage')}"


def creation(made: Creation, *, hosts: str, root: str, is_dry: bool) -> Listing[str]:
    """Return the output of `create-cluster`."""
    result = "would create" if is_dry and not made.was_there else "there already" if made.was_there else "created"
    names = sorted(made.storages)
    columns: Columns[str] = (
        Column("storage", lambda name: name, json="name"),
        Column("", lambda name: made.storages[name].listen, json="listen"),
        Column("", lambda name: made.storages[name].admin_listen, json="admin_listen"),
        Column("group", lambda name: made.storages[name].group),
        Column("address", lambda name: made.storages[name].listen, json=""),
        Column("replicas", made.partitions_of, cell=_number, json="partitions", is_right=True),
        Column("made now", made.created_on, cell=_number, json="made", is_right=True),
    )
    lines = "Next: start servers with these lines in their configuration, each with a name of its own:"
    page: list[Part] = [
        verdict(
            f"{result}: cluster {made.meta.name}, {count(made.meta.partitions, 'partition')}, format {made.meta.format}",
            is_good=True,
        ),
        f"key {made.meta.key}, documents at {hosts}{root}",
        Table(columns, names),
        "Nothing was written." if is_dry else f"{lines}\n  coordinator: {hosts}\n  cluster: {root}",
    ]
    content = {
        "result": result.replace(" ", "-"),
        "coordinator": hosts,
        "root": root,
        "name": made.meta.name,
        "cluster_key": str(made.meta.key),
        "partitions": made.meta.partitions,
        "created": made.meta.created,
        "format": made.meta.format,
        "level": made.meta.level,
        "storages": objects(columns, names),
        "replicas": {number: names for number, names in sorted(made.replicas.items()) if number < made.meta.partitions},
        "group_log": list(made.group_log),
    }
    return Listing(kind="storages", columns=columns, rows=names, page=page, content=content)


def _number(things: Sequence[object]) -> str:
    return f"{len(things):,}"


# -- whether it is well ------------------------------------------------------------------------------------------------


def status(found: HealthReport, local: Listing[Any] | None = None) -> Listing[PartitionView]:
    """Return the page of `status`. `local` has the processes of a cluster on this machine."""
    beside = Listing[Any](page=(), content={}) if local is None else local
    page, content = [*_status(found), *(beside.page or ())], {**status_json(found), **beside.document}
    return replace(partitions(found.snapshot), page=page, content=content)


def _status(found: HealthReport) -> Iterator[Part]:
    reported, seen = found.verdict, found.snapshot
    yield Line(f"{reported.health}: {reported.sentence}", STYLES[reported.health])
    for reason in reported.reasons[:REASONS_MAX]:
        since = f" (seen since {reason.since})" if reason.since is not None else ""
        yield Line(f"- {reason.sentence}{since}", "red" if reason.stops else "yellow", "wrap")
        yield next_step(reason.next_step)
    if len(reported.reasons) > REASONS_MAX:
        yield f"- and {count(len(reported.reasons) - REASONS_MAX, 'more reason')}; -o json has them all"
    for note in reported.notes:
        yield Line(f"note: {note}", fit="wrap")
    yield Table(pick(server_columns(seen), "server", "admin", "partitions", "answered", "state"), all_servers(seen))
    names = ("storage", "admin", "group", "replicas", "free bytes", "answered", "state")
    yield Table(pick(STORAGES, *names), seen.storages)
    yield Table(ALIKE, _alike(seen.partitions)[:ROWS_MAX])
    if line := _scrubbed(seen):
        yield line
    if line := group_totals(seen.groups):
        yield Line(line, "" if seen.groups is not None and are_groups_well(seen.groups) else "yellow")
    contact = "" if found.facts.coordinator_ms is None else f", ZooKeeper answered in {found.facts.coordinator_ms:.0f} ms"
    leader = f", leader {seen.leader}" if seen.leader is not None else ""
    yield f"cluster {seen.meta.name}, {_format(seen)}, level {seen.meta.level}{leader}{contact}, {found.at}"


def _alike(partitions: Sequence[PartitionView]) -> list[list[PartitionView]]:
    """Group equal partitions, with the group log alone; partitions with a message come first."""
    grouped: dict[tuple[object, ...], list[PartitionView]] = {}
    for view in partitions:
        alike = (view.is_group_log, view.owner, view.state, view.counting, len(view.replicas))
        grouped.setdefault(alike, []).append(view)

    def order(views: list[PartitionView]) -> tuple[bool, int]:
        return views[0].is_open and views[0].counting >= len(views[0].replicas), views[0].partition

    return sorted(grouped.values(), key=order)


def _sum(views: Sequence[PartitionView], name: str) -> int | None:
    reported = [getattr(view.reported, name) for view in views if view.reported is not None]
    return sum(reported) if reported else None


ALIKE: Columns[list[PartitionView]] = (
    Column("partitions", _numbers),
    Column("owner", lambda views: views[0].owner, none="nobody"),
    Column("state", lambda views: views[0].state),
    Column("level", lambda views: _counting(views[0]), is_right=True),
    Column("mounts", lambda views: _sum(views, "mounts")),
    Column("tail", lambda views: _sum(views, "tail_bytes"), cell=size),
)


def _scrubbed(found: ClusterSnapshot) -> str:
    """Time since which all sealed segments of all storages were read, or the share read; empty if no storage reports."""
    scrubs = [storage.scrub for storage in found.storage_reports.values() if storage.scrub is not None]
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


def status_json(found: HealthReport) -> dict[str, Any]:
    seen, lost = found.snapshot, found.lost
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


# -- doctor ------------------------------------------------------------------------------------------------------------

GRADES = {Grade.FAIL: "bold red", Grade.WARN: "yellow", Grade.UNKNOWN: "yellow", Grade.PASS: "green"}
"""Colors of grades, the worst grade first."""
CHECKS: Columns[Check] = (Column("name"), Column("grade"), Column("finding"), Column("fix"))
PASSED: Columns[Check] = (Column("passed", "name"), Column("found", "finding"))


def checks(found: Sequence[Check]) -> Listing[Check]:
    counted = Counter(check.grade for check in found)
    grades = [grade for grade in GRADES if counted[grade]]
    page: list[Part] = [Line(", ".join(f"{counted[grade]} {grade}" for grade in grades), GRADES[grades[0]])]
    for check in sorted(found, key=lambda check: grades.index(check.grade)):
        if check.grade is not Grade.PASS:
            page += ["", Line(f"{check.grade} {check.name}: {check.finding}", GRADES[check.grade], "wrap")]
            page += [next_step(check.fix)] if check.fix else []
    page.append(Table(PASSED, [check for check in found if check.grade is Grade.PASS]))
    return Listing(kind="checks", columns=CHECKS, rows=found, page=page, more={"result": grades[0].value})


def group_totals(found: GroupTotals | None) -> str:
    """All groups in one line; empty where there are none."""
    if found is None or not found.groups:
        return ""
    more = {"in flight": found.in_flight, "parked": found.parked, "stopped": found.stopped, "paused": found.paused,
            "without a member": found.unattended}  # fmt: skip
    more_counts = [f"{number:,} {word}" for word, number in more.items() if number]
    behind = [f"not the newest: {found.trouble}"] if found.trouble else []
    return ", ".join(
        [count(found.groups, "consumer group"), count(found.members, "member"), f"lag {found.lag:,}", *more_counts, *behind]
    )


def are_groups_well(found: GroupTotals) -> bool:
    return not (found.parked or found.stopped or found.paused or found.unattended or found.trouble)
