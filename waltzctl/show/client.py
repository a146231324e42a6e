"""Applications that are connected: instances, a line each, and what a name uses."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from waltzctl.picture.attendance import Attendance, Attendant, UseAt
from waltzctl.picture.picture import silence
from waltzctl.show.forms import Column, Columns, Listing, Page, grid, objects, plain
from waltzctl.show.terminal import paragraph
from waltzd.cluster.assignment import spell_numbers
from waltzd.errors import WaltzError

if TYPE_CHECKING:
    from rich.console import Console

    from waltzd.cluster.documents import ClientMeta


def _duration(milliseconds: int) -> str:
    seconds = milliseconds // 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _state(one: Attendant) -> str:
    if one.state == "gone":
        return one.state
    return ", ".join([one.state, *["slowed"] * one.is_slowed, *["waits for the archive"] * bool(one.waiting)])


ATTENDANTS: Columns[Attendant] = (
    Column("name", lambda one: one.name),
    Column("instance", lambda one: one.instance),
    Column("state", _state, json=""),
    Column("", lambda one: one.state, json="state"),
    Column("", lambda one: one.is_slowed, json="is_slowed"),
    Column("since", lambda one: one.age_ms, is_right=True, cell=_duration, json="age_milliseconds"),
    Column("heard", lambda one: one.quiet_ms, is_right=True, cell=_duration, json="quiet_milliseconds"),
    Column("partitions", lambda one: list(one.partitions), cell=spell_numbers),
    Column("appended", lambda one: one.appended, is_right=True),
    Column("fed", lambda one: one.fed, is_right=True),
    Column("address", lambda one: one.peer),
    Column("version", lambda one: one.version, is_wide=True),
    Column("waiting", lambda one: one.waiting, is_wide=True),
    Column("role", lambda one: one.role, is_wide=True),
    Column("epoch", lambda one: one.epoch, is_right=True, is_wide=True, cell=lambda epoch: str(epoch or "")),
    Column("servers", lambda one: list(one.servers), is_wide=True),
    Column("appended bytes", lambda one: one.appended_bytes, is_right=True, is_size=True, is_wide=True),
    Column("fed bytes", lambda one: one.fed_bytes, is_right=True, is_size=True, is_wide=True),
)
USES: Columns[UseAt] = (
    Column("server", lambda one: one.server),
    Column("mounts", lambda one: one.use.mounts, is_right=True),
    Column("in flight", lambda one: one.use.inflight_bytes, is_right=True, is_size=True, json="inflight_bytes"),
    Column("slowed", lambda one: one.use.slowed_ms, is_right=True, cell=_duration, json="slowed_milliseconds"),
    Column("last", lambda one: one.use.slowed_ago_ms, is_right=True, json="slowed_ago_milliseconds",
           cell=lambda ago: "" if ago is None else f"{_duration(ago)} ago"),
    Column("refused mounts", lambda one: one.use.refused_mounts, is_right=True),
)  # fmt: skip


def _silent(found: Attendance) -> Mapping[str, Any]:
    return {"silent_servers": {name: plain(error) for name, error in found.silent.items()}}


def _say_silent(out: Console, silent: Mapping[str, WaltzError]) -> None:
    for name, error in silent.items():
        paragraph(out, f"server {name} {silence(error)}, and may know more: {error.code} {error.message}", "yellow")


def clients(found: Attendance, *, with_gone: bool) -> Page:
    rows = [one for one in found.attendants if with_gone or one.state != "gone"]
    things = Listing(
        kind="clients", columns=ATTENDANTS, rows=rows, nothing="No application is connected.", more=_silent(found)
    )

    def draw(out: Console) -> None:
        things.draw(out)
        _say_silent(out, found.silent)

    return Page(draw=draw, things=things)


def client(name: str, found: Attendance, kept: ClientMeta | None) -> Page:
    rows = [one for one in found.attendants if one.name == name]
    uses = [one for one in found.uses if one.use.name == name]

    def draw(out: Console) -> None:
        out.print(f"application {name}", style="bold")
        if kept is not None:
            epoch = f", newest epoch {kept.epoch}" if kept.epoch else ""
            out.print(f"first seen {_moment(kept.first_seen)}, last seen {_moment(kept.last_seen)}{epoch}", soft_wrap=True)
        grid(out, ATTENDANTS, rows)
        if not rows:
            out.print("No instance of it is connected, or was lately.")
        grid(out, USES, uses)
        _say_silent(out, found.silent)

    told = {
        "name": name,
        "first_seen": None if kept is None else _moment(kept.first_seen),
        "last_seen": None if kept is None else _moment(kept.last_seen),
        "epoch": 0 if kept is None else kept.epoch,
        "instances": objects(ATTENDANTS, rows),
        "uses": objects(USES, uses),
        **_silent(found),
    }
    return Page(draw=draw, told=told, things=Listing(kind="instances", columns=ATTENDANTS, rows=rows))


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
