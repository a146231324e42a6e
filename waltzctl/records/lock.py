"""`waltzctl lock`: why a transaction was refused, or would be. The owner of the partition is asked: only it knows.

What its table has dropped, the key indexes of the log still say, where the log is of format 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typer import Argument, Option

from waltzctl.records.decode import decoded, line, transaction_json
from waltzctl.records.follow import Groups, with_client
from waltzctl.shell import moment
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, first_contact, using
from waltzctl.shell.numbers import check_partitions
from waltzctl.shell.options import Negative
from waltzctl.show.forms import AnyForm, Columns, Line, Listing, Part, attributes, put, verdict
from waltzd import Client
from waltzd.client.view import Transaction
from waltzd.cluster.cluster import Cluster
from waltzd.errors import EXIT_OK, NeedsBatches, WaltzError
from waltzd.errors.operations import PartitionsClosed
from waltzd.protocol.locks import Lock, LockExplanation, Mode, Reason, lock_id
from waltzd.wire.servers import ServerAdminClient

CALL_SECONDS = 10.0


def explain(
    *,
    partition: Annotated[int, Argument(min=0, metavar="PARTITION")],
    name: Annotated[str, Argument(metavar="NAME")],
    id: Annotated[str, Argument(metavar="ID", help="Id of the lock: an integer, or a text such as a UUID."), Negative()],
    mark: Annotated[
        int | None,
        Option(
            "--mark",
            min=-1,
            metavar="ID",
            help="Highest id that the client had read; the last committed id by default.",
        ),
    ] = None,
    mode: Annotated[
        Literal["read", "write", "append"], Option("--mode", help="Lock mode that the client wants.")
    ] = "write",
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """Show the state of a lock in the lock table of the owner of PARTITION: which transaction marked it last, or how far
    back the table goes, and whether a client that has read the log up to `--mark` would get the lock now. If the table has
    dropped the lock, the key indexes of the log name its last mark; only format 1 keeps locks.

    Nothing is changed. The result is a snapshot.

    \b
    Examples:
      waltzctl lock explain 0 order 17
      waltzctl lock explain 0 seat 12A
      waltzctl lock explain 0 order 17 --mark -1 --mode read -o json
    """
    lock = Lock(name, lock_id(id), Mode[mode.upper()])
    owner, found = using(target, lambda cluster: ask(cluster, target, partition, lock))
    searched, trouble = _search_log(target, partition, found)
    seen = found.committed if mark is None else mark
    explanation = Explained(
        partition=partition, owner=owner, lock=lock, found=found, seen=seen, searched=searched, trouble=trouble
    )
    put(explanation_page(explanation), output)
    return EXIT_OK


async def ask(cluster: Cluster, target: ClusterTarget, partition: int, lock: Lock) -> tuple[str, LockExplanation]:
    """Return the owner of the partition, and its explanation of the lock."""
    meta = await cluster.meta()
    check_partitions([partition], meta.partitions, not_done="no server was asked")
    assignment, _ = await cluster.assignment()
    servers = await cluster.servers()
    owner = assignment.owners[partition].server if partition < len(assignment.owners) else None
    if owner is None or owner not in servers:
        why = "no server owns it" if owner is None else f"its owner {owner} is not up"
        raise PartitionsClosed(f"no server can explain locks of partition {partition}: {why}")
    address = servers[owner].admin_listen
    admin = ServerAdminClient(address, meta.key, seconds=CALL_SECONDS, tls=target.tls, name=owner)
    async with admin, first_contact(address, target.tls):
        return owner, await admin.explain_lock(partition, lock.hash)


def _search_log(
    target: ClusterTarget, partition: int, found: LockExplanation
) -> tuple[LogSearch | None, WaltzError | None]:
    if not can_search(found):
        return None, None
    try:
        return with_client(target, lambda client: search_log(client, partition, found), seconds=CALL_SECONDS), None
    except WaltzError as error:  # the answer of the owner is shown without it
        return None, error


def can_search(found: LockExplanation) -> bool:
    """Return whether the log may have more information than the owner."""
    return not found.is_in_flight and min(found.mark, found.committed) >= 0


async def search_log(client: Client, partition: int, found: LockExplanation) -> LogSearch:
    """Return the last transaction that marked the lock, as the log has it."""
    first_id, last_id = 0, min(found.mark, found.committed)
    ids: Sequence[int] = (last_id,)
    if found.marker is None:

        async def newest(after: int) -> Sequence[int]:
            wanted = client.history(
                found.lock, partition=partition, after=after, through=last_id, limit=1, newest_first=True
            )
            return (await wanted).ids

        try:
            ids = await newest(-1)
        except NeedsBatches as error:  # the log begins in format 0
            first_id = error.number("first_id") or last_id + 1
            ids = await newest(first_id - 1) if first_id <= last_id else ()
        if not ids:
            return LogSearch(first_id=first_id, last_id=last_id)
    (marker,) = await client.read_ids(partition, ids, with_locks=True)
    return LogSearch(marker=marker, group=await Groups(client).first_of(marker), first_id=first_id, last_id=last_id)


# -- what people read of it --------------------------------------------------------------------------------------------


PAYLOAD_CHARACTERS = 400
"""Maximum number of characters of a payload that is cut at the end of the screen."""


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


def explanation_page(explanation: Explained) -> Listing[dict[str, Any]]:
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
