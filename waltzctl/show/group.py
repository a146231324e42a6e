"""Durable groups: a line each, where one stands in each partition, its members, and what it has put aside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from waltzctl.picture.groups import GroupAt, Groups, GroupView, Standing
from waltzctl.picture.picture import silence
from waltzctl.records.decode import decoded
from waltzctl.show.forms import Column, Columns, Listing, Page, grid, objects, plain
from waltzctl.show.terminal import ROWS_MAX, count, paragraph
from waltzctl.show.timeline import timeline_sentence
from waltzd.cluster.assignment import spell_numbers
from waltzd.cluster.groups import GroupMeta
from waltzd.protocol.groups import GroupMember, GroupTotals, Mode, ParkedTransaction

if TYPE_CHECKING:
    from rich.console import Console

    from waltzd.client.view import Transaction

NONE = "There are no durable groups: `waltzctl group create NAME` makes one."
STYLES = {
    Standing.STOPPED: "bold red",
    Standing.PAUSED: "bold yellow",
    Standing.UNKNOWN: "bold yellow",
    Standing.WAITING: "bold yellow",
    Standing.WORKING: "bold green",
    Standing.IDLE: "bold green",
}


def duration(milliseconds: int) -> str:
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if milliseconds >= size and (milliseconds % size == 0 or milliseconds >= 2 * size):
            return f"{milliseconds // size} {unit}"
    return f"{milliseconds} ms"


def _lag(lag: int | None) -> str:
    return "?" if lag is None else f"{lag:,}"


GROUPS: Columns[GroupView] = (
    Column("name", lambda view: view.name),
    Column("mode", lambda view: str(view.meta.mode)),
    Column("partitions", lambda view: [one.partition for one in view.partitions], cell=spell_numbers),
    Column("state", lambda view: str(view.standing)),
    Column("members", lambda view: len(view.members), is_right=True),
    Column("lag", lambda view: view.lag, is_right=True, cell=_lag),
    Column("in flight", lambda view: view.in_flight, is_right=True),
    Column("parked", lambda view: view.parked, is_right=True),
    Column("ack wait", lambda view: view.meta.ack_wait_ms, is_right=True, is_wide=True, cell=duration,
           json="ack_wait_milliseconds"),
    Column("tries", lambda view: view.meta.deliver_max, is_right=True, is_wide=True),
    Column("then", lambda view: str(view.meta.exhausted), is_wide=True, json="exhausted"),
    Column("made at", lambda view: view.made_at, is_right=True, is_wide=True),
)  # fmt: skip
PLACES: Columns[GroupAt] = (
    Column("partition", lambda one: one.partition, is_right=True, cell=str),
    Column("owner", lambda one: one.owner, cell=lambda owner: owner or "nobody"),
    Column("state", lambda one: str(one.standing)),
    Column("members", lambda one: len(one.place.members), is_right=True),
    Column("lag", lambda one: one.lag, is_right=True, cell=_lag),
    Column("floor", lambda one: one.place.floor, is_right=True),
    Column("committed", lambda one: one.committed, is_right=True),
    Column("in flight", lambda one: one.place.in_flight, is_right=True),
    Column("oldest", lambda one: one.place.oldest_ms, is_right=True, json="oldest_milliseconds",
           cell=lambda age: duration(age) if age else ""),
    Column("parked", lambda one: one.place.parked, is_right=True),
    Column("why", lambda one: one.why),
    Column("open", lambda one: one.place.open, is_right=True, is_wide=True),
    Column("reach", lambda one: one.place.reach, is_right=True, is_wide=True),
    Column("epoch", lambda one: one.place.epoch, is_right=True, is_wide=True),
    Column("delivered", lambda one: one.place.delivered, is_right=True, is_wide=True),
    Column("acknowledged", lambda one: one.place.acknowledged, is_right=True, is_wide=True),
    Column("failed", lambda one: one.place.failed, is_right=True, is_wide=True),
    Column("unwritten", lambda one: one.place.unwritten, is_right=True, is_wide=True),
)  # fmt: skip


@dataclass(frozen=True)
class MemberAt:
    """A member in one partition."""

    partition: int
    member: GroupMember


MEMBERS: Columns[MemberAt] = (
    Column("member", lambda one: one.member.name),
    Column("partition", lambda one: one.partition, is_right=True, cell=str),
    Column("in flight", lambda one: one.member.in_flight, is_right=True),
    Column("room", lambda one: one.member.room, is_right=True),
    Column("delivered", lambda one: one.member.delivered, is_right=True),
    Column("acknowledged", lambda one: one.member.acknowledged, is_right=True),
    Column("failed", lambda one: one.member.failed, is_right=True),
    Column("since", lambda one: one.member.age_ms, is_right=True, cell=duration, json="age_milliseconds"),
    Column("who", lambda one: one.member.who),
    Column("address", lambda one: one.member.peer),
)


def members_of(found: GroupView) -> list[MemberAt]:
    members = [MemberAt(one.partition, member) for one in found.partitions for member in one.place.members]
    return sorted(members, key=lambda one: (one.member.name, one.partition))


# -- pages -------------------------------------------------------------------------------------------------------------


def remarks(found: Groups) -> list[str]:
    """What may be missing."""
    silent = [
        f"server {name} {silence(error)}, and may know more: {error.code} {error.message}"
        for name, error in found.silent.items()
    ]
    return silent + [f"server {name} may not know the newest: {why}" for name, why in found.behind.items()]


def _told(found: Groups) -> Mapping[str, Any]:
    return {
        "silent_servers": {name: plain(error) for name, error in found.silent.items()},
        "servers_behind": dict(found.behind),
    }


def _with_remarks(things: Listing[Any], found: Groups) -> Page:
    def draw(out: Console) -> None:
        things.draw(out)
        for remark in remarks(found):
            paragraph(out, remark, "yellow")

    return Page(draw=draw, things=things)


def groups(found: Groups) -> Page:
    things = Listing(kind="groups", columns=GROUPS, rows=found.groups, nothing=NONE, more=_told(found))

    return _with_remarks(things, found)


def group(view: GroupView, found: Groups) -> Page:
    places = Listing(kind="partitions", columns=PLACES, rows=view.partitions, nothing="It has no partitions.")
    members = members_of(view)

    def draw(out: Console) -> None:
        out.print(str(view.standing), style=STYLES[view.standing])
        out.print(f"durable group {view.name}: {', '.join(settings(view.meta))}", soft_wrap=True)
        wanted = [one for one in view.partitions if one.standing is not Standing.IDLE or one.place.parked]
        shown = view.partitions if len(view.partitions) <= ROWS_MAX else wanted[:ROWS_MAX]
        for one in view.partitions:
            for timeline in one.timelines:
                paragraph(out, f"partition {one.partition}, {timeline_sentence(timeline)}", "yellow")
        grid(out, PLACES, shown)
        if len(shown) < len(view.partitions):
            out.print(f"{count(len(view.partitions) - len(shown), 'more partition')}: -o wide shows all")
        if members:
            grid(out, MEMBERS, members[:ROWS_MAX])
            if len(members) > ROWS_MAX:
                out.print(f"{count(len(members) - ROWS_MAX, 'more')}: -o json has all")
        else:
            out.print("No member is connected.")
        for remark in remarks(found):
            paragraph(out, remark, "yellow")

    told = {
        "name": view.name,
        "state": str(view.standing),
        "lag": view.lag,
        "parked": view.parked,
        "made_at": view.made_at,
        "settings": plain(asdict(view.meta)),
        "partitions": objects(PLACES, view.partitions),
        "members": objects(MEMBERS, members),
        "timelines": {
            one.partition: [plain(asdict(each)) for each in one.timelines] for one in view.partitions if one.timelines
        },
        **_told(found),
    }
    return Page(draw=draw, told=told, things=places)


def settings(meta: GroupMeta) -> list[str]:
    """As they are read aloud."""
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
        *([f"only the headers {', '.join(map(str, meta.headers))}"] if meta.headers else []),
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
    said = [f"{number:,} {word}" for word, number in more.items() if number]
    behind = [f"not the newest: {found.trouble}"] if found.trouble else []
    return ", ".join(
        [count(found.groups, "durable group"), count(found.members, "member"), f"lag {found.lag:,}", *said, *behind]
    )


def is_well(found: GroupTotals) -> bool:
    return not (found.parked or found.stopped or found.paused or found.unattended or found.trouble)


# -- what was put aside ------------------------------------------------------------------------------------------------


PAYLOAD_CHARACTERS = 60


def _begin(payload: Any) -> str:
    """Of a payload that was decoded, in one line."""
    text = json.dumps(payload, ensure_ascii=False) if isinstance(payload, dict | list) else str(payload or "")
    return "".join(one if one.isprintable() else " " for one in text[:PAYLOAD_CHARACTERS])


@dataclass(frozen=True)
class ParkedOne:
    one: ParkedTransaction
    transaction: Transaction | None = None
    """Where it was asked for, and the log still has it."""


PARKED: Columns[ParkedOne] = (
    Column("partition", lambda row: row.one.partition, is_right=True, cell=str),
    Column("id", lambda row: row.one.id, is_right=True, cell=str),
    Column("tries", lambda row: row.one.failures, is_right=True),
    Column("member", lambda row: row.one.member),
    Column("reason", lambda row: row.one.reason),
)
WITH_PAYLOADS: Columns[ParkedOne] = (
    *PARKED,
    Column("header", lambda row: None if row.transaction is None else row.transaction.header, is_right=True),
    Column("size", lambda row: None if row.transaction is None else row.transaction.length, is_right=True),
    Column("", lambda row: None if row.transaction is None else decoded(row.transaction.payload).encoding,
           json="payload_encoding"),
    Column("payload", lambda row: None if row.transaction is None else decoded(row.transaction.payload).value, cell=_begin),
)  # fmt: skip


def parked(name: str, rows: Sequence[ParkedOne], *, with_payloads: bool, is_more: bool) -> Page:
    things = Listing(
        kind="parked",
        columns=WITH_PAYLOADS if with_payloads else PARKED,
        rows=rows,
        nothing=f"Nothing is parked in {name}.",
        more={"group": name, "is_more": is_more},
    )

    def draw(out: Console) -> None:
        things.draw(out)
        if is_more:
            out.print("There are more: -n shows them.")

    return Page(draw=draw, things=things)
