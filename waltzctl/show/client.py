"""Applications that are connected: instances, a line each, and what a name uses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from waltzctl.picture.attendance import Attendance, Attendant, UseAt
from waltzctl.picture.picture import silent_servers
from waltzctl.show.forms import Column, Columns, Line, Listing, Part, Table, attributes, objects, warnings
from waltzctl.show.terminal import duration, size
from waltzd.cluster.assignment import spell_numbers

if TYPE_CHECKING:
    from waltzd.cluster.documents import ClientMeta


def _state(one: Attendant) -> str:
    if one.state == "gone":
        return one.state
    return ", ".join([one.state, *["slowed"] * one.is_slowed, *["waits for the archive"] * bool(one.waiting)])


ATTENDANTS: Columns[Attendant] = (
    *attributes("name instance"),
    Column("state", _state, json=""),
    *(Column("", json=name) for name in ("state", "is_slowed")),
    Column("since", "age_ms", cell=duration, json="age_milliseconds"),
    Column("heard", "quiet_ms", cell=duration, json="quiet_milliseconds"),
    Column("partitions", cell=spell_numbers),
    *attributes("appended fed"),
    Column("address", "peer"),
    *attributes("version waiting role", is_wide=True),
    Column("epoch", is_wide=True, cell=lambda epoch: str(epoch or "")),
    Column("servers", is_wide=True),
    *attributes("appended_bytes fed_bytes", is_wide=True, cell=size),
)
USES: Columns[UseAt] = (
    Column("server"),
    Column("mounts", "use.mounts"),
    Column("in flight", "use.inflight_bytes", cell=size, json="inflight_bytes"),
    Column("slowed", "use.slowed_ms", cell=duration, json="slowed_milliseconds"),
    Column("last", "use.slowed_ago_ms", json="slowed_ago_milliseconds", cell=lambda ago: f"{duration(ago)} ago"),
    Column("refused mounts", "use.refused_mounts"),
)


def clients(found: Attendance, *, with_gone: bool) -> Listing[Attendant]:
    return Listing(
        kind="clients",
        columns=ATTENDANTS,
        rows=[one for one in found.attendants if with_gone or one.state != "gone"],
        nothing="No application is connected.",
        notes=warnings(silent_servers(found.silent)),
        more={"silent_servers": dict(found.silent)},
    )


def client(name: str, found: Attendance, kept: ClientMeta | None) -> Listing[Attendant]:
    rows = [one for one in found.attendants if one.name == name]
    uses = [one for one in found.uses if one.use.name == name]
    seen = {} if kept is None else {"first_seen": _moment(kept.first_seen), "last_seen": _moment(kept.last_seen)}
    epoch = 0 if kept is None else kept.epoch
    page: list[Part] = [Line(f"application {name}", "bold")]
    if seen:
        moments = f"first seen {seen['first_seen']}, last seen {seen['last_seen']}"
        page.append(moments + (f", newest epoch {epoch}" if epoch else ""))
    page.append(Table(ATTENDANTS, rows) if rows else "No instance of it is connected, or was lately.")
    page += [Table(USES, uses), *warnings(silent_servers(found.silent))]
    told = {
        "name": name,
        "first_seen": seen.get("first_seen"),
        "last_seen": seen.get("last_seen"),
        "epoch": epoch,
        "instances": objects(ATTENDANTS, rows),
        "uses": objects(USES, uses),
        "silent_servers": dict(found.silent),
    }
    return Listing(kind="instances", columns=ATTENDANTS, rows=rows, page=page, told=told)


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
