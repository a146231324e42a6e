"""How a comparison of replicas looks: the verdict, a line for each replica, and the records that differ, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from waltzctl.records.comparison import Verdict
from waltzctl.records.decode import decoded
from waltzctl.records.render_txn import fitting
from waltzctl.render import console, count, put_json, size, table
from waltzd.errors import WaltzError

LEAD_BYTES = 16
"""So much of a payload is shown in front of what differs."""

if TYPE_CHECKING:
    from waltzctl.records.compare import Compared, Comparison
    from waltzd.format.record import Record


def comparison(found: Comparison, output: str) -> None:
    if output == "json":
        put_json(_as_json(found))
        return
    out = console()
    said, style = _verdict(found)
    out.print(said, style=style, soft_wrap=True)
    rows = [
        (
            replica.storage,
            str(replica.role or ""),
            str(replica.standing.verdict.value),
            _up_to(replica),
            _difference(replica),
        )
        for replica in found.replicas
    ]
    table(out, ("storage", "role", "records", "compared up to", "first difference"), rows, right=("compared up to",))
    for replica in found.replicas:
        for sentence in _sentences(replica, found.committed):
            out.print(f"{replica.storage}: {sentence}", soft_wrap=True)
    for id_, records in found.differing.items():
        out.print(f"Record {id_}, as the replicas hold it:", style="bold", soft_wrap=True)
        heads = [_head(name, record) for name, record in records.items() if not isinstance(record, WaltzError)]
        table(out, ("storage", "request", "header", "size", "data CRC", "CRC"), heads, right=("header", "size"))
        payloads = {name: record.payload for name, record in records.items() if not isinstance(record, WaltzError)}
        at = differing_byte(list(payloads.values()))
        if at is not None:
            out.print(f"Byte {at:,} is the first of the payload that differs; from byte {max(0, at - LEAD_BYTES):,} on:")
            for name, payload in payloads.items():
                part = fitting(payload[max(0, at - LEAD_BYTES) :], "text", out.width - 4 - len(name))
                out.print(f"  {name}: {part}", soft_wrap=True)
        for name, record in records.items():
            if isinstance(record, WaltzError):
                out.print(f"{name}: {record.code} {record.message}", style="red", soft_wrap=True)
    out.print(f"{count(found.exchanges, 'exchange')}, {size(found.hashed_bytes)} hashed", soft_wrap=True)


def _verdict(found: Comparison) -> tuple[str, str]:
    verdicts = [replica.standing.verdict for replica in found.replicas]
    head = f"partition {found.partition}: "
    if Verdict.DIFFERENT in verdicts:
        firsts = [replica.standing.difference[0] for replica in found.replicas if replica.standing.difference is not None]
        odd = [replica.storage for replica in found.replicas if replica.standing.verdict is Verdict.DIFFERENT]
        others = verdicts.count(Verdict.SAME)
        who = f"{', '.join(odd)} from the {others} others" if others > 1 else "nobody can say which of them is right"
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


def _up_to(replica: Compared) -> str:
    return f"{replica.standing.compared:,}" if replica.standing.compared >= 0 else "nothing"


def _difference(replica: Compared) -> str:
    if replica.standing.difference is None:
        return ""
    first, last = replica.standing.difference
    return f"{first:,}" if first == last else f"in {first:,} to {last:,}"


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


def _head(name: str, record: Record) -> tuple[str, ...]:
    sums = (f"{record.data_crc:08x}", f"{record.crc:08x}")
    return (name, str(record.request), str(record.header), f"{record.length:,}", *sums)


def differing_byte(payloads: Sequence[bytes]) -> int | None:
    """Where the first byte is that not all of them have."""
    if len(set(payloads)) < 2:
        return None
    shortest = min(map(len, payloads))
    pairs = enumerate(zip(*(payload[:shortest] for payload in payloads), strict=True))
    return next((at for at, values in pairs if len(set(values)) > 1), shortest)


def _as_json(found: Comparison) -> dict[str, Any]:
    verdicts = {replica.standing.verdict for replica in found.replicas}
    alone = len(found.replicas) < 2 or Verdict.UNKNOWN in verdicts
    return {
        "result": "different" if Verdict.DIFFERENT in verdicts else "unknown" if alone else "same",
        "partition": found.partition,
        "committed": found.committed,
        "replicas": [
            {
                "storage": replica.storage, "role": None if replica.role is None else str(replica.role),
                "verdict": replica.standing.verdict.value, "compared_up_to": replica.standing.compared,
                "last_id": replica.last_id, "behind": replica.behind,
                "first_difference": None if replica.standing.difference is None else {
                    "first_id": replica.standing.difference[0], "last_id": replica.standing.difference[1],
                },
                "error": _error_json(replica.standing.error),
            }
            for replica in found.replicas
        ],
        "differing": [
            {
                "id": id_,
                "records": [{"storage": name, **_record_json(record)} for name, record in records.items()],
            }
            for id_, records in found.differing.items()
        ],
        "exchanges": found.exchanges,
        "hashed_bytes": found.hashed_bytes,
    }  # fmt: skip


def _record_json(record: Record | WaltzError) -> dict[str, Any]:
    if isinstance(record, WaltzError):
        return {"error": _error_json(record)}
    payload = decoded(record.payload)
    return {
        "client": record.request.client, "generation": record.request.generation, "sequence": record.request.sequence,
        "header": record.header, "size": record.length, "data_crc": f"{record.data_crc:08x}", "crc": f"{record.crc:08x}",
        "payload_encoding": payload.encoding, "payload": payload.value, "error": None,
    }  # fmt: skip


def _error_json(error: WaltzError | None) -> dict[str, str] | None:
    return None if error is None else {"code": error.code, "message": error.message}
