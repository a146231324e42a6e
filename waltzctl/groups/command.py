"""`waltzctl group list` and `describe`: members, positions, lag and stopped partitions of consumer groups.

Every server knows every group, but only the owner of a partition knows the members there. So all servers are asked, and the
output names the servers that did not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Argument

from waltzctl.shell.cluster_target import CommandTarget, unknown, using
from waltzctl.show.forms import AnyForm, Column, Columns, Line, Listing, attributes, capped, objects, plain, put, warnings
from waltzctl.show.terminal import ROWS_MAX, duration
from waltzctl.snapshot.cluster_snapshot import silent_servers, timeline_sentence
from waltzctl.snapshot.groups import GroupPartitionView, Groups, GroupState, GroupView
from waltzctl.snapshot.groups import groups as asked
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.groups import GroupMeta
from waltzd.errors import EXIT_OK
from waltzd.protocol.groups import GroupMember, Mode
from waltzd.wire.tls import Tls

GroupName = Annotated[str, Argument(metavar="NAME")]


def list_(*, target: CommandTarget, output: AnyForm = "table") -> int:
    """List the consumer groups: mode, partitions, worst state, number of members, lag, deliveries in flight, and parked
    transactions (dead letters). The lag counts committed transactions that are not acknowledged or parked; transactions
    that the filter of kinds of the group excludes count until the group reaches them.

    \b
    Examples:
      waltzctl group list
      waltzctl group list -o wide
    """
    put(groups_page(using(target, lambda cluster: asked(cluster, target.tls))), output)
    return EXIT_OK


def describe(*, name: GroupName, target: CommandTarget, output: AnyForm = "table") -> int:
    """Describe a consumer group: its settings, its position in each partition, and its members. All transactions up to the
    floor are acknowledged or parked. A stopped partition delivers nothing until `waltzctl group resume`; a paused one
    resumes by itself.

    \b
    Examples:
      waltzctl group describe mailer
      waltzctl group describe mailer -o json
    """
    found, view = using(target, lambda cluster: one_of(cluster, target.tls, name))
    put(group_page(view, found), output)
    return EXIT_OK


async def one_of(cluster: Cluster, tls: Tls | None, name: str) -> tuple[Groups, GroupView]:
    """Return the group of this name. Raise `NoSuchName` if no server knows it, or an error if no server answers."""
    found = await asked(cluster, tls, name)
    view = found.named(name)
    if view is not None:
        return found, view
    everything = await asked(cluster, tls)
    raise unknown("consumer group", name, [one.name for one in everything.groups])


# -- what people read of them ------------------------------------------------------------------------------------------


NONE = "There are no consumer groups: `waltzctl group create NAME` makes one."
STYLES = {
    GroupState.STOPPED: "bold red",
    GroupState.PAUSED: "bold yellow",
    GroupState.UNKNOWN: "bold yellow",
    GroupState.WAITING: "bold yellow",
    GroupState.WORKING: "bold green",
    GroupState.IDLE: "bold green",
}


GROUPS: Columns[GroupView] = (
    Column("name", "meta.name"),
    Column("mode", "meta.mode"),
    Column("partitions", lambda view: [one.partition for one in view.partitions], cell=format_numbers),
    Column("state", "standing"),
    Column("members", lambda view: len(view.members)),
    Column("lag", none="?", is_right=True),
    *attributes("in_flight parked"),
    Column("ack wait", "meta.ack_wait_ms", is_wide=True, cell=duration, json="ack_wait_milliseconds"),
    Column("tries", "meta.deliver_max", is_wide=True),
    Column("then", "meta.exhausted", is_wide=True, json="exhausted"),
    Column("made at", is_wide=True),
)
PLACES: Columns[GroupPartitionView] = (
    Column("partition"),
    Column("owner", none="nobody"),
    Column("state", "standing"),
    Column("members", lambda one: len(one.place.members)),
    Column("lag", none="?", is_right=True),
    Column("floor", "place.floor"),
    Column("committed"),
    Column("in flight", "place.in_flight"),
    Column("oldest", "place.oldest_ms", json="oldest_milliseconds", cell=lambda age: duration(age) if age else ""),
    Column("parked", "place.parked"),
    Column("why"),
    *attributes("open reach epoch delivered acknowledged failed unwritten", of="place", is_wide=True),
)


@dataclass(frozen=True)
class MemberAt:
    """A member in one partition."""

    partition: int
    member: GroupMember


MEMBERS: Columns[MemberAt] = (
    Column("member", "member.name"),
    Column("partition"),
    *attributes("in_flight room delivered acknowledged failed", of="member"),
    Column("since", "member.age_ms", cell=duration, json="age_milliseconds"),
    Column("who", "member.who"),
    Column("address", "member.peer"),
)


def members_of(found: GroupView) -> list[MemberAt]:
    members = [MemberAt(one.partition, member) for one in found.partitions for member in one.place.members]
    return sorted(members, key=lambda one: (one.member.name, one.partition))


# -- pages -------------------------------------------------------------------------------------------------------------


def remarks(found: Groups) -> list[str]:
    """Describe what may be missing from the output."""
    return [
        *silent_servers(found.silent),
        *(f"server {name} may not know the newest: {why}" for name, why in found.behind.items()),
    ]


def _servers_json(found: Groups) -> Mapping[str, Any]:
    return {"silent_servers": dict(found.silent), "servers_behind": dict(found.behind)}


def groups_page(found: Groups) -> Listing[GroupView]:
    notes = warnings(remarks(found))
    return Listing(kind="groups", columns=GROUPS, rows=found.groups, nothing=NONE, notes=notes, more=_servers_json(found))


def group_page(view: GroupView, found: Groups) -> Listing[GroupPartitionView]:
    wanted = [one for one in view.partitions if one.standing is not GroupState.IDLE or one.place.parked]
    shown = view.partitions if len(view.partitions) <= ROWS_MAX else wanted[:ROWS_MAX]
    members = members_of(view)
    page = [
        Line(str(view.standing), STYLES[view.standing]),
        f"consumer group {view.name}: {', '.join(settings(view.meta))}",
        *(
            Line(f"partition {one.partition}, {timeline_sentence(timeline)}", "yellow", "wrap")
            for one in view.partitions
            for timeline in one.timelines
        ),
        *capped(PLACES, shown, len(view.partitions), "partition", "-o wide shows all"),
        *capped(MEMBERS, members[:ROWS_MAX], len(members), "member", "-o json has all"),
        *(["No member is connected."] if not members else []),
        *warnings(remarks(found)),
    ]
    content = {
        "name": view.name,
        "state": str(view.standing),
        "lag": view.lag,
        "parked": view.parked,
        "made_at": view.made_at,
        "settings": plain(view.meta) | {"key": view.meta.key.word},
        "partitions": objects(PLACES, view.partitions),
        "members": objects(MEMBERS, members),
        "timelines": {one.partition: plain(one.timelines) for one in view.partitions if one.timelines},
        **_servers_json(found),
    }
    return Listing(
        kind="partitions", columns=PLACES, rows=view.partitions, nothing="It has no partitions.", page=page, content=content
    )


def settings(meta: GroupMeta) -> list[str]:
    """Describe the settings of a group."""
    found = {
        Mode.ORDERED: "one member has a partition, in the order of the log",
        Mode.QUEUE: "members share the work",
        Mode.KEYED: f"members share the work, one {meta.key} with one of them at a time",
    }[meta.mode]
    pauses = ", ".join(duration(pause) for pause in meta.back_off_ms) or "none"
    tries = "1 try" if meta.deliver_max == 1 else f"{meta.deliver_max} tries with pauses of {pauses}"
    return [
        f"mode {meta.mode} ({found})",
        "all partitions" if meta.partitions is None else f"partitions {meta.partitions}",
        *([f"only the kinds {', '.join(map(str, meta.kinds))}"] if meta.kinds else []),
        f"{duration(meta.ack_wait_ms)} to acknowledge",
        f"at most {meta.max_in_flight:,} in flight for each member",
        f"{tries}, then {'put aside' if meta.exhausted == 'park' else 'it stops'}",
    ]
