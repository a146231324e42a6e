"""Pages that read the log as an application does: transactions by id and time, and the state of locks.

A payload is untrusted: its beginning is shown as escaped text. A page reads a bounded number of transactions and bytes; a
link continues from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from waltzctl.console.pages import GridStyle, Page, PageRequest, Tone, grid, part
from waltzctl.records import decode, lock
from waltzctl.records.decode import decoded, line
from waltzctl.records.follow import Groups, between, opened
from waltzctl.records.lock import Explained, LogSearch, ask, can_search, search_log
from waltzctl.shell import moment
from waltzctl.shell.cluster_target import check_operator, unknown
from waltzd import Client, Transaction
from waltzd.client.view import KIND_MAX, KIND_MIN
from waltzd.errors import BadArgument, BeyondLog, WaltzError
from waltzd.errors.operations import NoServerUp
from waltzd.format.layout import ID_MAX
from waltzd.protocol.locks import Lock, Mode, lock_id

ROWS = 50
SHOWN_BYTES = 4096
"""Maximum number of bytes of a payload that are shown."""
LINE_CHARACTERS = 100
CHUNK, CHUNK_MAX = 25, 1000
CHUNK_BYTES = 4 << 20
LOOKED_MAX, LOOKED_BYTES_MAX = 20_000, 32 << 20
"""What is read for one page at most."""
CALL_SECONDS = 5.0
_HASH = re.compile(r"[0-9a-f]{16}")
MODES = ("write", "read", "append")


@asynccontextmanager
async def client_of(asked: PageRequest) -> AsyncIterator[Client]:
    """Connect a client to the servers of the last poll, also while ZooKeeper does not answer."""
    check_operator(asked.target.tls, "read transactions")
    addresses = [view.meta.listen for view in asked.snapshot.servers if view.error is None]
    if not addresses:
        raise NoServerUp(f"no server of the cluster {asked.snapshot.meta.name} is up")
    async with opened(asked.target, addresses, seconds=CALL_SECONDS) as client:
        yield client


# -- transactions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wanted:
    kind: int | None = None
    lock: int | None = None
    """Its 64 bits."""

    @property
    def is_anything(self) -> bool:
        return self.kind is None and self.lock is None

    def matches(self, transaction: Transaction) -> bool:
        if self.kind is not None and transaction.kind != self.kind:
            return False
        return self.lock is None or any(one.hash == self.lock for one in transaction.locks or ())


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Transactions found in a range that was read backwards, the newest first."""

    found: Sequence[Transaction]
    first_id: int
    last_id: int


async def backwards(client: Client, partition: int, last_id: int, wanted: Wanted) -> Stretch:
    """From this id down, until a page is full or enough was read for one page."""
    found: list[Transaction] = []
    first, size, searched, read_bytes = last_id + 1, CHUNK, 0, 0
    while first > 0 and len(found) < ROWS and searched < LOOKED_MAX and read_bytes < LOOKED_BYTES_MAX:
        end, first = first - 1, max(0, first - size)
        chunk, chunk_bytes = list[Transaction](), 0
        async for one in between(client, partition, first, end, with_locks=wanted.lock is not None):
            chunk_bytes += one.length
            chunk.append(one if one.length <= SHOWN_BYTES else shortened(one))
        searched, read_bytes = searched + len(chunk), read_bytes + chunk_bytes
        size = min(CHUNK_MAX, size * 2) if chunk_bytes * 2 < CHUNK_BYTES and not wanted.is_anything else size
        for one in reversed(chunk):
            if wanted.matches(one):
                found.append(one)
                if len(found) == ROWS:
                    first = one.id
                    break
    return Stretch(found=found, first_id=first, last_id=last_id)


def shortened(one: Transaction) -> Transaction:
    """With the beginning of its payload; its length stays what it is."""
    return Transaction(
        one.partition,
        one.id,
        one.kind,
        one.length,
        one.payload_crc,
        one.request,
        beginning(one.payload),
        None,
        None,
        one.time_us,
        one.follows,
        one.locks,
    )


def beginning(payload: bytes) -> bytes:
    """Return the beginning of a payload; if it is text, cut between characters."""
    part = payload[:SHOWN_BYTES]
    for cut in range(4):
        try:
            part[: len(part) - cut].decode()
        except UnicodeDecodeError:
            continue
        return part[: len(part) - cut]
    return part


def lock_hash_of(text: str) -> int:
    """`NAME:ID`, or the 16 digits by which a log knows it."""
    if _HASH.fullmatch(text):
        return int(text, 16)
    name, colon, number = text.rpartition(":")
    if not colon or not name:
        raise BadArgument(
            f"lock: {text!r} is no lock",
            not_done="nothing was read",
            next_step="write it as NAME:ID, like account:17, or as the 16 digits that a transaction shows",
        )
    return Lock(name, lock_id(number)).hash


WHOLE = ("id", "kind", "client")
"""Numbers that are names: they are written without commas, to be copied."""
COLUMNS = tuple(
    replace(
        column,
        name=column.name.removeprefix("payload_"),
        json=column.key,
        is_right=column.name in (*WHOLE, "size"),
        cell=str if column.name in WHOLE else None,
    )
    for column in decode.TRANSACTIONS
    if column.name in (*WHOLE, "time", "size", "payload_encoding", "payload")
)


def row_of(transaction: Transaction) -> dict[str, Any]:
    """Return the fields of `-o json`, with the payload as one line for people."""
    fields = decode.transaction_json(transaction, transaction.id)
    return fields | {"payload": line(transaction.payload, "auto", LINE_CHARACTERS)}


async def transactions(asked: PageRequest) -> Page:
    partition = _partition(asked)
    kind = asked.number("kind", KIND_MIN, KIND_MAX)
    lock, since = asked.query.get("lock", "").strip(), asked.query.get("since", "").strip()
    last = asked.number("last", 0, ID_MAX)
    wanted = Wanted(kind=kind, lock=lock_hash_of(lock) if lock else None)
    at = moment.microseconds(since, datetime.now(UTC), "since") if since else None
    async with client_of(asked) as client:
        committed = await client.end_position(partition, confirmed=False)
        start = committed if last is None else min(last, committed)
        if at is not None:
            start = min(committed, await client.position_at(partition, at) + ROWS)
        stretch = await backwards(client, partition, start, wanted)
    kept = {
        "partition": partition,
        **({"kind": kind} if kind is not None else {}),
        **({"lock": lock} if lock else {}),
    }
    span = f"{stretch.first_id}-{stretch.last_id}"
    if stretch.last_id < 0:
        command = asked.command("txn", "tail", partition, "-n", ROWS)
    elif kind is not None and not lock:
        command = asked.command(
            "txn", "grep", partition, "--after", stretch.first_id - 1, "--through", stretch.last_id, "--kind", kind
        )
    else:
        command = asked.command("txn", "get", partition, span, *(("--locks",) if lock else ()))
    rows = [row_of(one) for one in stretch.found]
    style = GridStyle(links={"id": lambda row: f"/transactions/{partition}-{row['id']}"})
    searched = f"ids {stretch.first_id:,} to {stretch.last_id:,}" if stretch.last_id >= 0 else "no ids"
    return Page(
        title="Transactions",
        commands=(command,),
        polls=0,
        parts=(
            part(
                "transactions",
                partition=partition,
                partitions=asked.snapshot.meta.partitions,
                kind=kind,
                lock=lock,
                since=since,
                kept=kept,
                committed=committed,
                looked=searched,
                older=stretch.first_id - 1 if stretch.first_id > 0 else None,
                newer=min(committed, stretch.last_id + ROWS) if stretch.last_id < committed else None,
                grid=grid(
                    "Transactions",
                    COLUMNS,
                    rows,
                    style,
                    nothing=f"Nothing matches in {searched}."
                    if not wanted.is_anything and committed >= 0
                    else "There are no transactions yet.",
                ),
            ),
        ),
    )


async def transaction(asked: PageRequest) -> Page:
    found = re.fullmatch(r"([0-9]{1,10})-([0-9]{1,19})", asked.name)
    if found is None or int(found[1]) >= asked.snapshot.meta.partitions:
        raise unknown("transaction", asked.name, ())
    partition, id_ = int(found[1]), int(found[2])
    async with client_of(asked) as client:
        committed = await client.end_position(partition)
        if id_ > committed:
            raise BeyondLog(
                f"partition {partition} has ids up to {committed}; {id_} was asked for", not_done="nothing was shown"
            )
        one = (await client.read_some(partition, after=id_ - 1, through=id_, with_locks=True))[0]
        group = await Groups(client).first_of(one)
    content = decode.transaction_json(shortened(one), group, with_locks=True)
    return Page(
        title=f"Transaction {id_} of partition {partition}",
        commands=(asked.command("txn", "get", partition, id_, "--locks"),),
        polls=0,
        parts=(
            part(
                "transaction",
                partition=partition,
                id=id_,
                committed=committed,
                facts=[
                    (name.replace("_", " "), content[name])
                    for name in ("time", "kind", "client", "generation", "sequence", "size", "group")
                ],
                locks=[(mode, hash_) for mode, hash_ in decode.format_locks(one)],
                keeps_locks=one.time_us is not None,
                encoding=content["payload_encoding"],
                payload=whole_text(shortened(one).payload),
                left=one.length - len(shortened(one).payload),
            ),
        ),
    )


def whole_text(payload: bytes) -> str:
    """Format a payload for reading: indented JSON, plain text, or groups of hexadecimal digits."""
    found = decoded(payload)
    if found.encoding == "json":
        return json.dumps(found.value, indent=2, ensure_ascii=False)
    if found.encoding == "text":
        return str(found.value)
    return "\n".join(payload[start : start + 16].hex(" ", 2) for start in range(0, len(payload), 16))


def _partition(asked: PageRequest) -> int:
    return asked.number("partition", 0, asked.snapshot.meta.partitions - 1) or 0


# -- locks -------------------------------------------------------------------------------------------------------------


async def locks(asked: PageRequest) -> Page:
    query = {name: asked.query.get(name, "").strip() for name in ("name", "id")}
    mode = asked.query.get("mode", MODES[0])
    if mode not in MODES:
        raise BadArgument(f"mode: {mode!r} is none of {', '.join(MODES)}", not_done="nothing was asked")
    partition, mark = _partition(asked), asked.number("mark", -1, ID_MAX)
    given: dict[str, Any] = {
        **query,
        "partition": partition,
        "partitions": asked.snapshot.meta.partitions,
        "mode": mode,
        "modes": MODES,
        "mark": mark,
    }
    form = part("ask", "locks", **given)
    if not (query["name"] and query["id"]):
        return Page(
            title="Locks", commands=(asked.command("lock", "explain", partition, "NAME", "ID"),), polls=0, parts=(form,)
        )
    words = ["lock", "explain", str(partition), query["name"], query["id"], "--mode", mode]
    words += [] if mark is None else ["--mark", str(mark)]
    explanation = await explained(asked, partition, Lock(query["name"], lock_id(query["id"]), Mode[mode.upper()]), mark)
    return Page(
        title="Locks",
        commands=(asked.command(*words),),
        polls=0,
        parts=(form, part("lock", **lock_given(explanation))),
    )


async def explained(asked: PageRequest, partition: int, lock: Lock, mark: int | None) -> Explained:
    owner, found = await ask(await asked.cluster(), asked.target, partition, lock)
    searched: LogSearch | None = None
    trouble: WaltzError | None = None
    if can_search(found):
        try:
            async with client_of(asked) as client:
                searched = await search_log(client, partition, found)
        except WaltzError as error:  # the page is shown with the owner's answer only
            trouble = error
    return Explained(
        partition=partition,
        owner=owner,
        lock=lock,
        found=found,
        seen=found.committed if mark is None else mark,
        searched=searched,
        trouble=trouble,
    )


def lock_given(explanation: Explained) -> Mapping[str, Any]:
    searched = explanation.searched
    marker = None if searched is None else searched.marker
    document = lock.explanation_page(explanation).document
    names = (
        "lock",
        "owner",
        "session",
        "mark",
        "lock_mark",
        "is_exact",
        "high_water_mark",
        "last_id",
        "floor",
        "locks",
        "locks_max",
    )
    return {
        "tone": Tone.GOOD if explanation.is_accepted else Tone.BAD,
        "verdict": lock.lock_verdict(explanation),
        "basis": lock.lock_basis(explanation),
        "search": "" if searched is None or explanation.found.marker is not None else lock.lock_search(searched),
        "facts": [(name.replace("_", " "), document[name]) for name in names],
        "marker": None if marker is None else (marker.partition, marker.id, line(marker.payload, "auto", LINE_CHARACTERS)),
        "trouble": explanation.trouble,
    }
