"""`waltzctl lock`: why a transaction was refused, or would be. The owner of the partition is asked: only it knows.

What its table has forgotten, the log still says, where it is of format 1: it is read backwards, as far as is asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, using
from waltzctl.shell.numbers import check_partitions
from waltzctl.shell.options import Negative
from waltzctl.shell.progress import waiting_aloud
from waltzctl.show import records
from waltzctl.show.forms import AnyForm, put
from waltzctl.show.records import LogSearch
from waltzd.errors import WaltzError
from waltzd.errors.exit_codes import EXIT_OK
from waltzd.errors.operations import PartitionsClosed
from waltzd.protocol.locks import Lock, Mode

if TYPE_CHECKING:
    from waltzd import Client
    from waltzd.cluster.cluster import Cluster
    from waltzd.protocol.locks import LockExplanation

CALL_SECONDS = 10.0
SEARCH_MAX = 100_000
"""Number of transactions that are searched unless an option names more; small ones take a second or two."""
CHUNK = 5_000
MARKING = (Mode.WRITE, Mode.APPEND)


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
    search_max: Annotated[
        int,
        Option(
            "--search",
            min=0,
            metavar="N",
            help="Number of transactions to read backwards for the last mark, if the lock table has dropped the lock.",
        ),
    ] = SEARCH_MAX,
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """Show the state of a lock in the lock table of the owner of PARTITION: which transaction marked it last, or how far
    back the table goes, and whether a client that has read the log up to `--mark` would get the lock now. If the table has
    dropped the lock, its last mark is searched in the log; only format 1 keeps locks.

    Nothing is changed. The result is a snapshot.

    \b
    Examples:
      waltzctl lock explain 0 order 17
      waltzctl lock explain 0 seat 12A
      waltzctl lock explain 0 order 17 --mark -1 --mode read -o json
    """
    from waltzctl.records.append import lock_id

    lock = Lock(name, lock_id(id), Mode[mode.upper()])
    owner, found = using(target, lambda cluster: ask(cluster, target, partition, lock))
    searched, trouble = _search_log(target, partition, found, search_max)
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
    target: ClusterTarget, partition: int, found: LockExplanation, search_max: int
) -> tuple[LogSearch, WaltzError | None]:
    from waltzctl.records.follow import with_client

    if not can_search(found, search_max):
        return LogSearch(), None
    try:
        return with_client(
            target, lambda client: search_log(client, partition, found, search_max), seconds=CALL_SECONDS
        ), None
    except WaltzError as error:  # the answer of the owner is shown without it
        return LogSearch(), error


def can_search(found: LockExplanation, search_max: int) -> bool:
    """Return whether the log may have more information than the owner."""
    last_id = min(found.mark, found.committed)
    return not found.is_in_flight and last_id >= 0 and (found.marker is not None or search_max > 0)


async def search_log(client: Client, partition: int, found: LockExplanation, search_max: int) -> LogSearch:
    """Return the last mark of the lock, as found in the log."""
    from waltzctl.records.follow import Groups

    last_id = min(found.mark, found.committed)
    if found.marker is not None:
        searched = LogSearch(
            marker=(await client.read_some(partition, after=last_id - 1, through=last_id, with_locks=True))[0]
        )
    else:
        async with waiting_aloud(lambda: f"reading the log of partition {partition} backwards"):
            searched = await search(client, partition, found.lock, last_id, search_max)
    group = None if searched.marker is None else await Groups(client).first_of(searched.marker)
    return replace(searched, group=group)


async def search(client: Client, partition: int, lock: int, last_id: int, count: int) -> LogSearch:
    """Search `count` transactions up to `last_id` for the last one that marked the lock."""
    from waltzctl.records.follow import between

    lowest, first = max(0, last_id - count + 1), last_id + 1
    while first > lowest:
        end, first = first - 1, max(lowest, first - CHUNK)
        marker, without = None, -1
        async for transaction in between(client, partition, first, end, with_locks=True):
            if transaction.time_us is None:
                without = transaction.id
            elif any(one.hash == lock and one.mode in MARKING for one in transaction.locks or ()):
                marker = transaction
        if marker is not None:
            return LogSearch(marker=marker, first_id=marker.id, last_id=last_id)
        if without >= 0:
            return LogSearch(first_id=without + 1, last_id=last_id, is_kept=False)
    return LogSearch(first_id=lowest, last_id=last_id)
