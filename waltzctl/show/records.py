"""Output about transactions, locks, and compared replicas.

Transactions are printed as they are read, so a range of any size needs little memory. Raw payload bytes reach a terminal
only in the form `raw`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import typer

from waltzctl.records.decode import decoded, line
from waltzctl.records.divergence import Compared, Comparison, Verdict
from waltzctl.shell import moment
from waltzctl.show.forms import (
    JSON_VERSION,
    Column,
    Columns,
    Line,
    Listing,
    Part,
    Table,
    attributes,
    objects,
    stream,
    verdict,
)
from waltzctl.show.terminal import count, size
from waltzd.errors import WaltzError
from waltzd.protocol.locks import Mode, Reason

if TYPE_CHECKING:
    from waltzctl.records.append import Submitted
    from waltzd.client.view import Transaction
    from waltzd.format.record import Record
    from waltzd.protocol.locks import Lock, LockExplanation

Sink: TypeAlias = "Callable[[Transaction, int], None]"
"""Function that takes a transaction and the first id of its atomic append."""
Form = Literal["table", "json", "csv", "raw"]
TRANSACTIONS: Columns[dict[str, Any]] = attributes(
    "partition id time time_us group kind client generation sequence size payload_encoding payload"
)
LOCKS: Columns[dict[str, Any]] = (
    Column("locks", lambda row: [f"{one['mode']}:{one['lock']}" for one in row["locks"] or ()]),
)
NARROW = 100
"""Width of the screen below which times have no milliseconds, to leave space for payloads."""
PAYLOAD_CHARACTERS = 400
"""Maximum number of characters of a payload that is cut at the end of the screen."""
LEAD_BYTES = 16
"""Number of bytes of a payload shown in front of the first difference."""

# -- transactions ------------------------------------------------------------------------------------------------------


def sink(output: str, decode: str, *, with_partition: bool = False, with_locks: bool = False) -> Sink:
    """Return a sink that prints transactions; `with_locks` prints their locks."""
    if output == "raw":
        return lambda transaction, _group: typer.echo(transaction.payload, nl=False)
    if output == "table":
        return _Table(decode, with_partition=with_partition)
    put_row = stream((*TRANSACTIONS, *(LOCKS if with_locks else ())), output)
    return lambda transaction, group: put_row(transaction_json(transaction, group, decode, with_locks=with_locks))


def transaction_json(
    transaction: Transaction, group: int, decode: str = "auto", *, with_locks: bool = False
) -> dict[str, Any]:
    """Return a transaction as a JSON object. Fields that format 0 does not keep are null."""
    found = decoded(transaction.payload, decode)
    client, generation, sequence = transaction.request
    time = transaction.time_us
    known = [{"mode": mode, "lock": lock} for mode, lock in format_locks(transaction)]
    locks = {"locks": None if time is None else known} if with_locks else {}
    return {
        "version": JSON_VERSION, "partition": transaction.partition, "id": transaction.id,
        "time": None if time is None else moment.iso(time), "time_us": time, "group": group,
        "kind": transaction.kind, "client": client, "generation": generation, "sequence": sequence,
        "size": transaction.length, **locks, "payload_encoding": found.encoding, "payload": found.value,
    }  # fmt: skip


def format_locks(transaction: Transaction) -> list[tuple[str, str]]:
    """Format the mode and the 64-bit hash of each lock."""
    return [(lock.mode.name.lower(), f"{lock.hash:016x}") for lock in transaction.locks or ()]


class _Table:
    def __init__(self, decode: str, *, with_partition: bool) -> None:
        self._decode = decode
        self._with_partition = with_partition
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
        self._is_narrow = self._width < NARROW
        self._with_time: bool | None = None
        """Whether the last printed lines have times; None before the first line."""

    def __call__(self, transaction: Transaction, _group: int) -> None:
        time = transaction.time_us
        if self._with_time is not (time is not None):  # also where a log goes over to the format that keeps times
            self._with_time = time is not None
            typer.echo(self._start("partition", "id", "time", "kind", "client", "size") + "payload")
        start = self._start(
            transaction.partition,
            transaction.id,
            "" if time is None else moment.shown(time, is_narrow=self._is_narrow),
            transaction.kind,
            transaction.request[0],
            transaction.length,
        )
        typer.echo((start + fitting(transaction.payload, self._decode, self._width - len(start))).rstrip())
        for mode, lock in format_locks(transaction):
            typer.echo(f"{' ' * 10 if self._with_partition else ''}{'':>10} {mode} {lock}")

    def _start(self, partition: object, id: object, time: str, kind: object, client: object, length: object) -> str:
        first = f"{partition:>9} " if self._with_partition else ""
        when = f"{time:<{20 if self._is_narrow else 24}} " if self._with_time else ""
        return f"{first}{id:>10} {when}{kind:>6} {client:>9} {length:>8}  "


def fitting(payload: bytes, decode: str, width: int) -> str:
    """Cut a payload to a number of columns; some characters take two."""
    from rich.cells import cell_len, set_cell_size

    width = max(width, 4)
    text = line(payload, decode, width + 1)
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def submitted(found: Submitted) -> Listing[Any]:
    page: list[Part] = []
    if found.id is not None and found.count is not None:
        ids = f"id {found.id}" if found.count == 1 else f"ids {found.id} to {found.id + found.count - 1}"
        page.append(f"committed: partition {found.partition}, {ids}  ({size(found.size)}, {1000 * found.seconds:.1f} ms)")
    names = ("result", "partition", "id", "count", "size", "client", "mark", "reason", "conflict_id", "lock")
    content = {name: getattr(found, name) for name in names}
    return Listing(page=page, content=content | {"milliseconds": round(1000 * found.seconds, 1)})


# -- locks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LogSearch:
    """Last mark of a lock, as found in the log."""

    marker: Transaction | None = None
    """Transaction that marked the lock last; None if it was not found."""
    group: int | None = None
    """First id of the atomic append of the transaction."""
    first_id: int
    """First id that was considered, up to `last_id`; what is below it is of format 0, which keeps no locks."""
    last_id: int


@dataclass(frozen=True, kw_only=True)
class Explained:
    partition: int
    owner: str
    lock: Lock
    found: LockExplanation
    seen: int
    """Highest id that the client has read."""
    searched: LogSearch | None
    """What the log says; None if it was not asked."""
    trouble: WaltzError | None
    """Error of reading the log; None if it was read."""

    @property
    def is_accepted(self) -> bool:
        return self.found.accepts(self.lock.mode, self.seen)


LOCK: Columns[dict[str, Any]] = attributes("lock partition owner mark would_be_accepted reason wait_for lock_mark is_exact")


def lock(explanation: Explained) -> Listing[dict[str, Any]]:
    """Return the verdict, then its reasons."""
    found, accepted, searched = explanation.found, explanation.is_accepted, explanation.searched
    is_known = found.marker is not None
    marker, group = (None, None) if searched is None else (searched.marker, searched.group)
    document = {
        "partition": explanation.partition, "owner": explanation.owner, "session": found.session,
        "name": explanation.lock.name, "lock_id": explanation.lock.id, "mode": explanation.lock.mode.name.lower(),
        "lock": f"{found.lock:016x}", "mark": explanation.seen, "would_be_accepted": accepted,
        "reason": None if accepted else found.reason.name, "wait_for": None if accepted else found.mark,
        "lock_mark": found.mark, "is_exact": found.is_exact, "is_in_flight": found.is_in_flight,
        "high_water_mark": found.committed, "last_id": found.last_id, "low_mark": found.low_mark,
        "floor": found.floor, "locks": found.locks, "locks_max": found.locks_max,
        "marked_by": None if marker is None or group is None else transaction_json(marker, group, with_locks=True),
        "searched": None if is_known or searched is None else {"first_id": searched.first_id, "last_id": searched.last_id},
        "error": explanation.trouble,
    }  # fmt: skip
    floor = "since the log began" if found.floor < 0 else f"above id {found.floor:,}"
    page: list[Part] = [
        verdict(lock_verdict(explanation), is_good=accepted),
        lock_basis(explanation),
        *([] if is_known or searched is None else [lock_search(searched)]),
        _fact("lock", f"{document['mode']}:{explanation.lock.name}:{explanation.lock.id} = {found.lock:016x}"),
        _fact("asked", f"{explanation.owner}, which owns partition {explanation.partition} in session {found.session:,}"),
        _fact("high-water mark", f"{found.committed:,}; the last id that was given out is {found.last_id:,}"),
        _fact("lock table", f"{found.locks:,} of {found.locks_max:,} locks; knows every mark {floor}"),
    ]
    if marker is not None:
        when = "" if marker.time_us is None else f"{moment.shown(marker.time_us)}, "
        record = f"{when}id {marker.id:,}: client {marker.request[0]}, kind {marker.kind}, {marker.length:,} bytes"
        payload = line(marker.payload, "auto", PAYLOAD_CHARACTERS)
        encoding = decoded(marker.payload).encoding
        page += [_fact("marked by", record), Line(_fact(f"payload ({encoding})", payload), fit="cut")]
    if (trouble := explanation.trouble) is not None:
        page.append(_fact("the log", f"cannot be read at id {found.mark:,}: {trouble.code} {trouble.message}"))
    return Listing(kind="locks", columns=LOCK, rows=[document], page=page, content=document)


def _fact(name: str, value: str) -> str:
    return f"  {name:<16} {value}"


def lock_verdict(explanation: Explained) -> str:
    """Describe in one sentence whether the client would get the lock."""
    who = f"a transaction that has seen the log up to id {explanation.seen:,}"
    if explanation.is_accepted:
        return f"free: {who} gets the lock"
    found = explanation.found
    wait = (
        f"wait until id {found.mark:,} is committed and seen" if found.is_in_flight else f"see the log up to {found.mark:,}"
    )
    return f"refused ({found.reason.name}): {who} does not get the lock; {wait} first"


def lock_basis(explanation: Explained) -> str:
    """Describe where the mark of the lock comes from."""
    found = explanation.found
    if found.marker is None and found.is_exact:
        return "No transaction has marked it since the log began."
    basis = {
        Reason.CONFLICT: f"It was marked last by transaction {found.mark:,}, which is committed.",
        Reason.IN_FLIGHT: f"It was marked last by transaction {found.mark:,}, which is not committed yet.",
        Reason.TOO_FAR_BEHIND: f"The table has forgotten it: it was marked at id {found.mark:,} or before, or never. "
        "This is an estimate, because the table is full and forgets the oldest marks.",
        Reason.OWNER_CHANGED: f"It was not marked above id {found.mark:,}. What a new owner has not read of the log it "
        "does not know: before that it may have been marked, or not. This is an estimate.",
    }[found.reason]
    return basis + (" An append lock is never compared." if explanation.lock.mode is Mode.APPEND else "")


def lock_search(searched: LogSearch) -> str:
    """Describe the result of the search in the log."""
    if searched.marker is not None:
        return f"The log says: transaction {searched.marker.id:,} marked it last."
    kept = f"; below id {searched.first_id:,} it is of format 0, which keeps no locks" if searched.first_id else ""
    if searched.first_id > searched.last_id:
        return f"The log cannot say more{kept}."
    return f"The log says: no transaction from id {searched.first_id:,} to {searched.last_id:,} marked it{kept}."


# -- replicas, side by side --------------------------------------------------------------------------------------------


def _difference(replica: Compared) -> str:
    if replica.standing.difference is None:
        return ""
    first, last = replica.standing.difference
    return f"{first:,}" if first == last else f"in {first:,} to {last:,}"


COMPARED: Columns[Compared] = (
    Column("storage"),
    Column("role"),
    Column("records", "standing.verdict", json="verdict"),
    Column("compared up to", "standing.compared", cell=lambda end: f"{end:,}" if end >= 0 else "nothing"),
    *(Column("", json=name) for name in ("last_id", "behind")),
    Column("first difference", _difference, json=""),
    Column("", lambda replica: replica.standing.difference and
           dict(zip(("first_id", "last_id"), replica.standing.difference, strict=True)), json="first_difference"),
    Column("", "standing.error", json="error"),
)  # fmt: skip
HEADS: Columns[tuple[str, Record]] = (
    Column("storage", lambda head: head[0]),
    Column("request", lambda head: str(head[1].request)),
    Column("kind", lambda head: head[1].header),
    Column("size", lambda head: head[1].length),
    Column("data CRC", lambda head: f"{head[1].data_crc:08x}"),
    Column("CRC", lambda head: f"{head[1].crc:08x}"),
)


def comparison(found: Comparison) -> Listing[Compared]:
    """Return the verdict, a line for each replica, and the differing records side by side."""
    verdicts = {replica.standing.verdict for replica in found.replicas}
    alone = len(found.replicas) < 2 or Verdict.UNKNOWN in verdicts
    document = {
        "result": "different" if Verdict.DIFFERENT in verdicts else "unknown" if alone else "same",
        "partition": found.partition,
        "committed": found.committed,
        "replicas": objects(COMPARED, found.replicas),
        "differing": [
            {"id": id_, "records": [{"storage": name, **_record_json(record)} for name, record in records.items()]}
            for id_, records in found.differing.items()
        ],
        "exchanges": found.exchanges,
        "hashed_bytes": found.hashed_bytes,
    }
    page = [
        Line(*_comparison_verdict(found)),
        Table(COMPARED, found.replicas),
        *(f"{one.storage}: {sentence}" for one in found.replicas for sentence in _sentences(one, found.committed)),
        *(part for id_, records in found.differing.items() for part in _differing(id_, records)),
        f"{count(found.exchanges, 'exchange')}, {size(found.hashed_bytes)} hashed",
    ]
    return Listing(kind="replicas", columns=COMPARED, rows=found.replicas, page=page, content=document)


def _differing(id_: int, records: Mapping[str, Record | WaltzError]) -> Iterator[Part]:
    """Yield the lines of a record as each replica holds it."""
    held = {name: record for name, record in records.items() if not isinstance(record, WaltzError)}
    yield Line(f"Record {id_}, as the replicas hold it:", "bold")
    yield Table(HEADS, list(held.items()))
    at = differing_byte([record.payload for record in held.values()])
    if at is not None:
        start = max(0, at - LEAD_BYTES)
        yield f"Byte {at:,} is the first of the payload that differs; from byte {start:,} on:"
        for name, record in held.items():
            yield Line(f"  {name}: {line(record.payload[start:], 'text', PAYLOAD_CHARACTERS)}", fit="cut")
    for name, error in records.items():
        if isinstance(error, WaltzError):
            yield Line(f"{name}: {error.code} {error.message}", "red")


def _comparison_verdict(found: Comparison) -> tuple[str, str]:
    verdicts = [replica.standing.verdict for replica in found.replicas]
    head = f"partition {found.partition}: "
    if Verdict.DIFFERENT in verdicts:
        firsts = [replica.standing.difference[0] for replica in found.replicas if replica.standing.difference is not None]
        odd = [replica.storage for replica in found.replicas if replica.standing.verdict is Verdict.DIFFERENT]
        others = verdicts.count(Verdict.SAME)
        who = f"{', '.join(odd)} from the {others} others" if others > 1 else "it cannot be told which of them is right"
        return f"{head}replicas differ, first at id {min(firsts):,}: {who}", "bold red"
    if len(found.replicas) < 2:
        return f"{head}{count(len(found.replicas), 'replica')}, and nothing to compare it with", "bold yellow"
    unknown = verdicts.count(Verdict.UNKNOWN)
    if unknown:
        sound = f"; the others hold the same, {_how_far(found)}" if unknown < len(verdicts) else ""
        return f"{head}{count(unknown, 'replica')} could not be compared{sound}", "bold yellow"
    return f"{head}{count(len(verdicts), 'replica')} hold the same, {_how_far(found)}", "bold green"


def _how_far(found: Comparison) -> str:
    ends = {replica.standing.compared for replica in found.replicas if replica.standing.verdict is Verdict.SAME}
    if len(ends) > 1:
        return "as far as each has come"
    end = ends.pop()
    return f"up to id {end:,}" if end >= 0 else "nothing yet"


def _sentences(replica: Compared, committed: int) -> list[str]:
    standing, found = replica.standing, []
    if standing.error is not None:
        found.append(f"{standing.error.code} {standing.error.message}")
    if replica.behind:
        found.append(f"{count(replica.behind, 'id')} behind: it holds ids up to {replica.last_id:,} of {committed:,}")
    elif standing.mark < committed and replica.last_id is not None:
        found.append(f"it holds ids up to {replica.last_id:,}, and knows up to {standing.mark:,} that they are committed")
    if standing.error is None and standing.verdict is Verdict.SAME and standing.compared < standing.mark:
        found.append(f"no other replica has got beyond id {standing.compared:,} to compare it with")
    return found


def differing_byte(payloads: Sequence[bytes]) -> int | None:
    """Return the offset of the first byte that differs."""
    if len(set(payloads)) < 2:
        return None
    shortest = min(map(len, payloads))
    pairs = enumerate(zip(*(payload[:shortest] for payload in payloads), strict=True))
    return next((at for at, values in pairs if len(set(values)) > 1), shortest)


def _record_json(record: Record | WaltzError) -> dict[str, Any]:
    if isinstance(record, WaltzError):
        return {"error": record}
    payload = decoded(record.payload)
    return {
        "client": record.request.client, "generation": record.request.generation, "sequence": record.request.sequence,
        "kind": record.header, "size": record.length, "data_crc": f"{record.data_crc:08x}", "crc": f"{record.crc:08x}",
        "payload_encoding": payload.encoding, "payload": payload.value, "error": None,
    }  # fmt: skip
