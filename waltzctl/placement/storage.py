"""`waltzctl storage`: what an operator asks of running storages.

A storage is named as the cluster names it, or by the address of its port for operators (`admin_listen` in its
configuration), which needs no cluster. The cluster key is asked of the storage itself; with `--key` a storage of another
cluster is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar
from uuid import UUID

from typer import Argument

from waltzctl.certificate import first_contact
from waltzctl.listing import Column, Listing, ListOutput, put
from waltzctl.numbers import partitions_of
from waltzctl.options import Key, Output
from waltzctl.picture.look import look
from waltzctl.picture.picture import StorageView
from waltzctl.placement import render_storage
from waltzctl.reach import Certificate, LookUp, Meant, Reach, StorageName, unknown, using
from waltzd.client import loop
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import StorageMeta
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, EXIT_PARTIAL, ForeignCluster, WaltzError
from waltzd.format.finding import Finding
from waltzd.protocol.descriptions import PartitionDescription, StorageDescription, VerifySummary
from waltzd.wire.storages import AdminClient
from waltzd.wire.tls import Tls

T = TypeVar("T")
NO_KEY = UUID(int=0)


def with_admin(
    place: str,
    key: UUID | None,
    reach: LookUp,
    tls: Certificate,
    action: Callable[[AdminClient, StorageDescription], Awaitable[T]],
) -> T:
    """Ask the storage who it is, then do the action with its key."""
    name = None if ":" in place else place
    address, certificate = (place, tls()) if name is None else _found(place, reach())

    async def run() -> T:
        async with (
            AdminClient(address, NO_KEY, seconds=10, tls=certificate, name=name) as stranger,
            first_contact(address, certificate),
        ):
            description = await stranger.describe()
        if key is not None and key != description.cluster_key:
            raise ForeignCluster(f"{address} belongs to the cluster {description.cluster_key}, not to {key}")
        async with AdminClient(address, description.cluster_key, tls=certificate, name=name) as admin:
            return await action(admin, description)

    return loop.run(run())


def _found(name: str, reach: Reach) -> tuple[str, Tls | None]:
    async def ask(cluster: Cluster) -> dict[str, StorageMeta]:
        return await cluster.storages()

    there = using(reach, ask)
    if name not in there:
        raise unknown("storage", name, there)
    return there[name].admin_listen, reach.tls


def settle(results: dict[int, WaltzError | None], done: str, output: str) -> int:
    """Show each partition's outcome; partial success is an exit code of its own."""
    render_storage.results(results, done, output)
    errors = [error for error in results.values() if error is not None]
    if not errors:
        return EXIT_OK
    return errors[0].exit_code if len(errors) == len(results) else EXIT_PARTIAL


def list_(*, reach: Meant, output: ListOutput = "table") -> int:
    """The storages of a cluster: where they are, which group they may fail with, and how they are.

    \b
    Examples:
      waltzctl storage list
      waltzctl storage list -o name
    """
    columns = (
        Column("storage"),
        Column("state"),
        Column("group"),
        Column("replicas", is_right=True),
        Column("free bytes", is_right=True, is_size=True),
        Column("listen"),
        Column("admin", is_wide=True),
        Column("version", is_wide=True),
        Column("trouble", is_wide=True),
    )
    found = using(reach, lambda cluster: look(cluster.coordinator, tls=reach.tls))
    rows = [_row(view) for view in found.storages]
    put(Listing(kind="storages", columns=columns, rows=rows, nothing="The cluster has no storages."), output)
    return EXIT_OK


def _row(view: StorageView) -> dict[str, Any]:
    said = view.said
    return {
        "storage": view.meta.name,
        "state": "silent" if said is None else "draining" if said.is_draining else "up",
        "group": view.meta.group,
        "replicas": len(said.assigned) if said is not None else None,
        "free_bytes": said.free_bytes if said is not None else None,
        "listen": view.meta.listen,
        "admin": view.meta.admin_listen,
        "version": said.version if said is not None else None,
        "trouble": view.error.message if view.error is not None else "",
    }


def partitions(
    *, place: StorageName, key: Key = None, reach: LookUp, tls: Certificate, output: ListOutput = "table"
) -> int:
    """The replicas on a storage, a line each. STORAGE is its name, or the address of its port for operators.

    \b
    Examples:
      waltzctl storage partitions storage-1
      waltzctl storage partitions 127.0.0.1:55281 -o csv
    """

    async def ask(_client: AdminClient, description: StorageDescription) -> StorageDescription:
        return description

    columns = (
        Column("partition", is_right=True),
        Column("state"),
        Column("last id", is_right=True),
        Column("committed", is_right=True),
        Column("session", is_right=True),
        Column("segments", is_right=True),
        Column("bytes", is_right=True, is_size=True),
        Column("story", is_wide=True),
    )
    found = with_admin(place, key, reach, tls, ask)
    rows = [_replica(one) for one in found.assigned]
    put(Listing(kind="partitions", columns=columns, rows=rows, nothing="The storage has no replicas."), output)
    return EXIT_OK


def _replica(one: PartitionDescription) -> dict[str, Any]:
    status = one.status
    return {
        "partition": one.partition,
        "state": render_storage.state(one),
        "last_id": status.last_id if status is not None else None,
        "committed": status.committed if status is not None else None,
        "session": status.promised_session if status is not None else None,
        "segments": status.segments if status is not None else None,
        "bytes": one.disk_bytes,
        "story": one.story,
    }


def describe(*, place: StorageName, reach: LookUp, tls: Certificate, key: Key = None, output: Output = "table") -> int:
    """Show a running storage: its cluster, its partitions with their marks, and what it has done since it started. STORAGE
    is its name, or the address of its port for operators.

    \b
    Examples:
      waltzctl storage describe storage-1
      waltzctl storage describe 127.0.0.1:55281 -o json
    """

    async def ask(_client: AdminClient, description: StorageDescription) -> StorageDescription:
        return description

    render_storage.description(with_admin(place, key, reach, tls, ask), output)
    return EXIT_OK


def verify(
    *,
    place: StorageName,
    numbers: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    reach: LookUp,
    tls: Certificate,
    key: Key = None,
    output: Output = "table",
) -> int:
    """Check the files of a storage while it runs: every record up to what is on the disk now. Appends go on. Damage that
    it finds is healed by the partition's owner from the other replicas.

    \b
    Examples:
      waltzctl storage verify storage-1
      waltzctl storage verify 127.0.0.1:55281 0-1 -o json
    """
    chosen = partitions_of(numbers) if numbers else []

    async def ask(client: AdminClient, _: Any) -> tuple[list[Finding], list[VerifySummary]]:
        findings: list[Finding] = []
        summaries: list[VerifySummary] = []
        async for found in client.verify(chosen):
            if isinstance(found, Finding):
                findings.append(found)
            else:
                summaries.append(found)
        return findings, summaries

    findings, summaries = with_admin(place, key, reach, tls, ask)
    render_storage.verification(findings, summaries, output)
    return EXIT_FINDINGS if findings else EXIT_OK
