"""How a lock is explained: the verdict first, then what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from waltzctl.records.decode import decoded
from waltzctl.records.render_txn import as_json, fitting
from waltzctl.render import console, put_json
from waltzd.protocol.locks import Mode, Reason

if TYPE_CHECKING:
    from waltzctl.records.lock import Explained


def explained(told: Explained, output: str) -> None:
    found = told.found
    accepted = found.accepts(told.lock.mode, told.seen)
    if output == "json":
        put_json(
            {
                "partition": told.partition, "owner": told.owner, "session": found.session,
                "name": told.lock.name, "lock_id": told.lock.id, "mode": told.lock.mode.name.lower(),
                "lock": f"{found.lock:016x}", "mark": told.seen, "would_be_accepted": accepted,
                "reason": None if accepted else found.reason.name, "wait_for": None if accepted else found.mark,
                "lock_mark": found.mark, "is_exact": found.is_exact, "is_in_flight": found.is_in_flight,
                "high_water_mark": found.committed, "last_id": found.last_id, "low_mark": found.low_mark,
                "floor": found.floor, "locks": found.locks, "locks_max": found.locks_max,
                "marked_by": None if told.marker is None else as_json(told.marker, "auto"),
                "error": None if told.trouble is None else {"code": told.trouble.code, "message": told.trouble.message},
            }
        )  # fmt: skip
        return
    out = console()
    out.print(_verdict(told, accepted=accepted), style="bold green" if accepted else "bold red", soft_wrap=True)
    out.print(_basis(told), soft_wrap=True)
    rows = [
        ("lock", f"{told.lock.mode.name.lower()}:{told.lock.name}:{told.lock.id} = {found.lock:016x}"),
        ("asked", f"{told.owner}, which owns partition {told.partition} in session {found.session:,}"),
        ("high-water mark", f"{found.committed:,}; the last id that was given out is {found.last_id:,}"),
        ("lock table", f"{found.locks:,} of {found.locks_max:,} locks; knows every mark {_since(found.floor)}"),
    ]
    if told.marker is not None:
        marker = told.marker
        payload = fitting(marker.payload, "auto", out.width - 24)
        rows += [
            ("marked by", f"id {marker.id:,}: client {marker.request[0]}, header {marker.header}, {marker.length:,} bytes"),
            (f"payload ({decoded(marker.payload).encoding})", payload),
        ]
    if told.trouble is not None:
        rows.append(("marked by", f"id {found.mark:,}, which cannot be read: {told.trouble.code} {told.trouble.message}"))
    for name, value in rows:
        out.print(f"  {name:<16} {value}", soft_wrap=True)


def _verdict(told: Explained, *, accepted: bool) -> str:
    who = f"a transaction that has seen the log up to id {told.seen:,}"
    if accepted:
        return f"free: {who} gets the lock"
    found = told.found
    wait = (
        f"wait until id {found.mark:,} is committed and seen" if found.is_in_flight else f"see the log up to {found.mark:,}"
    )
    return f"refused ({found.reason.name}): {who} does not get the lock; {wait} first"


def _since(floor: int) -> str:
    return "since the log began" if floor < 0 else f"above id {floor:,}"


def _basis(told: Explained) -> str:
    """Where the mark of the lock comes from."""
    found = told.found
    if found.marker is None and found.is_exact:
        return "No transaction has marked it since the log began."
    said = {
        Reason.REAL: f"It was marked last by transaction {found.mark:,}, which is committed.",
        Reason.IN_FLIGHT: f"It was marked last by transaction {found.mark:,}, which is not committed yet.",
        Reason.FLOOR: f"The table does not have it any more: it was marked at id {found.mark:,} or before, or never. "
        "This is an estimate, because the table is full and forgets the oldest marks.",
        Reason.NEW_OWNER: f"It was not marked since this session began at id {found.mark:,}. Before that it may have been "
        "marked, or not: this is an estimate, because a new owner begins with an empty table.",
    }[found.reason]
    return said + (" An append lock is never compared." if told.lock.mode is Mode.APPEND else "")
