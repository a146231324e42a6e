"""Consumer groups: a line each, where one stands in each partition, its members, and what it has put aside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from waltzctl.records.decode import decoded
from waltzctl.show.forms import Column, Columns, Line, Listing, attributes, capped, objects, plain, warnings
from waltzctl.show.terminal import ROWS_MAX, count, duration
from waltzctl.snapshot.cluster_snapshot import silent_servers, timeline_sentence
from waltzctl.snapshot.groups import GroupPartitionView, Groups, GroupState, GroupView
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.groups import GroupMeta
from waltzd.protocol.groups import GroupMember, GroupTotals, Mode, ParkedTransaction

if TYPE_CHECKING:
    from waltzd.client.view import Transaction

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


def groups(found: Groups) -> Listing[GroupView]:
    notes = warnings(remarks(found))
    return Listing(kind="groups", columns=GROUPS, rows=found.groups, nothing=NONE, notes=notes, more=_servers_json(found))


def group(view: GroupView, found: Groups) -> Listing[GroupPartitionView]:
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


def totals(found: GroupTotals | None) -> str:
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


def is_well(found: GroupTotals) -> bool:
    return not (found.parked or found.stopped or found.paused or found.unattended or found.trouble)


# -- what was put aside ------------------------------------------------------------------------------------------------


PAYLOAD_CHARACTERS = 60


def _begin(payload: Any) -> str:
    """Format a decoded payload on one line."""
    text = json.dumps(payload, ensure_ascii=False) if isinstance(payload, dict | list) else str(payload or "")
    return "".join(one if one.isprintable() else " " for one in text[:PAYLOAD_CHARACTERS])


@dataclass(frozen=True)
class ParkedOne:
    one: ParkedTransaction
    transaction: Transaction | None = None
    """Transaction from the log; None if it was not requested or was trimmed."""


PARKED: Columns[ParkedOne] = (
    Column("partition", "one.partition"),
    Column("id", "one.id"),
    Column("tries", "one.failures"),
    Column("member", "one.member"),
    Column("reason", "one.reason"),
)
WITH_PAYLOADS: Columns[ParkedOne] = (
    *PARKED,
    Column("kind", "transaction.kind"),
    Column("size", "transaction.length"),
    Column("", lambda row: row.transaction and decoded(row.transaction.payload).encoding, json="payload_encoding"),
    Column("payload", lambda row: row.transaction and decoded(row.transaction.payload).value, cell=_begin),
)


def parked(name: str, rows: Sequence[ParkedOne], *, with_payloads: bool, is_more: bool) -> Listing[ParkedOne]:
    return Listing(
        kind="parked",
        columns=WITH_PAYLOADS if with_payloads else PARKED,
        rows=rows,
        nothing=f"Nothing is parked in {name}.",
        notes=["There are more: -n shows them."] if is_more else [],
        more={"group": name, "is_more": is_more},
    )
