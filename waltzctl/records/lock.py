"""`waltzctl lock`: why a transaction was refused, or would be. The owner of the partition is asked: only it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from waltzctl.shell.numbers import check_partitions
from waltzctl.shell.options import Negative
from waltzctl.shell.reach import Meant, Reach, using
from waltzctl.show.forms import AnyForm
from waltzd.errors import EXIT_OK, PartitionsClosed, WaltzError

if TYPE_CHECKING:
    from waltzd.client.view import Transaction
    from waltzd.cluster.cluster import Cluster
    from waltzd.protocol.locks import Lock, LockExplanation

CALL_SECONDS = 10.0


def explain(
    *,
    partition: Annotated[int, Argument(min=0, metavar="PARTITION")],
    name: Annotated[str, Argument(metavar="NAME")],
    id: Annotated[int, Argument(metavar="ID"), Negative()],
    mark: Annotated[
        int | None,
        Option(
            "--mark",
            min=-1,
            metavar="ID",
            help="The highest id that the client had seen; all that is committed if it is not said.",
        ),
    ] = None,
    mode: Annotated[
        Literal["read", "write", "append"], Option("--mode", help="What the client wants of the lock.")
    ] = "write",
    reach: Meant,
    output: AnyForm = "table",
) -> int:
    """Show what the owner of PARTITION knows of a lock: which transaction marked it last, or how far back the owner
    remembers, and whether a transaction of a client that has seen the log up to `--mark` would get it now.

    Nothing is changed. The answer is that of a moment.

    \b
    Examples:
      waltzctl lock explain 0 order 17
      waltzctl lock explain 0 order 17 --mark -1 --mode read -o json
    """
    from waltzctl.records.append import lock_id
    from waltzctl.show import records
    from waltzctl.show.forms import put
    from waltzd.protocol.locks import Lock, Mode

    lock = Lock(name, lock_id(id), Mode[mode.upper()])
    owner, found = using(reach, lambda cluster: _ask(cluster, reach, partition, lock))
    marker, trouble = _marker(reach, partition, found)
    seen = found.committed if mark is None else mark
    told = records.Explained(
        partition=partition, owner=owner, lock=lock, found=found, seen=seen, marker=marker, trouble=trouble
    )
    put(records.lock(told), output)
    return EXIT_OK


async def _ask(cluster: Cluster, reach: Reach, partition: int, lock: Lock) -> tuple[str, LockExplanation]:
    from waltzctl.shell.reach import first_contact
    from waltzd.wire.servers import ServerAdminClient

    meta = await cluster.meta()
    check_partitions([partition], meta.partitions, not_done="nothing was asked")
    assignment, _ = await cluster.assignment()
    servers = await cluster.servers()
    owner = assignment.owners[partition].server if partition < len(assignment.owners) else None
    if owner is None or owner not in servers:
        said = "no server owns it" if owner is None else f"its owner {owner} is not up"
        raise PartitionsClosed(f"no server can be asked about locks of partition {partition}: {said}")
    address = servers[owner].admin_listen
    admin = ServerAdminClient(address, meta.key, seconds=CALL_SECONDS, tls=reach.tls, name=owner)
    async with admin, first_contact(address, reach.tls):
        return owner, await admin.explain_lock(partition, lock.hash)


def _marker(reach: Reach, partition: int, found: LockExplanation) -> tuple[Transaction | None, WaltzError | None]:
    from waltzctl.records.follow import with_client

    marker = found.marker
    if marker is None or found.is_in_flight:
        return None, None

    async def read(client: Any) -> Any:
        return await client.read(partition, marker)

    try:
        return with_client(reach, read, seconds=CALL_SECONDS), None
    except WaltzError as error:  # the owner's answer is shown all the same
        return None, error
