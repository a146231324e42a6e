"""`waltzctl lock`: why a transaction was refused, or would be. The owner of the partition is asked: only it knows.

What its table has dropped, the key indexes of the log still say, where the log is of format 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, using
from waltzctl.shell.numbers import check_partitions
from waltzctl.shell.options import Negative
from waltzctl.show import records
from waltzctl.show.forms import AnyForm, put
from waltzctl.show.records import LogSearch
from waltzd.errors import NeedsBatches, WaltzError
from waltzd.errors.exit_codes import EXIT_OK
from waltzd.errors.operations import PartitionsClosed
from waltzd.protocol.locks import Lock, Mode, lock_id

if TYPE_CHECKING:
    from waltzd import Client
    from waltzd.cluster.cluster import Cluster
    from waltzd.protocol.locks import LockExplanation

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
    explanation = records.Explained(
        partition=partition, owner=owner, lock=lock, found=found, seen=seen, searched=searched, trouble=trouble
    )
    put(records.lock(explanation), output)
    return EXIT_OK


async def ask(cluster: Cluster, target: ClusterTarget, partition: int, lock: Lock) -> tuple[str, LockExplanation]:
    """Return the owner of the partition, and its explanation of the lock."""
    from waltzctl.shell.cluster_target import first_contact
    from waltzd.wire.servers import ServerAdminClient

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
    from waltzctl.records.follow import with_client

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
    from waltzctl.records.follow import Groups

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
