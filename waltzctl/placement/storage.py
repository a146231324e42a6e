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
from waltzctl.numbers import partitions_of
from waltzctl.options import Key
from waltzctl.picture.look import look
from waltzctl.reach import Certificate, LookUp, Meant, Reach, StorageName, unknown, using
from waltzctl.show import files
from waltzctl.show.cluster import storages
from waltzctl.show.forms import AnyForm, put
from waltzd.client import loop
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import StorageMeta
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, EXIT_PARTIAL, ForeignCluster, WaltzError
from waltzd.format.finding import Finding
from waltzd.protocol.descriptions import StorageDescription, VerifySummary
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
    put(files.results(results, done), output)
    errors = [error for error in results.values() if error is not None]
    if not errors:
        return EXIT_OK
    return errors[0].exit_code if len(errors) == len(results) else EXIT_PARTIAL


def list_(*, reach: Meant, output: AnyForm = "table") -> int:
    """The storages of a cluster: where they are, which group they may fail with, and how they are.

    \b
    Examples:
      waltzctl storage list
      waltzctl storage list -o name
    """
    found = using(reach, lambda cluster: look(cluster.coordinator, tls=reach.tls))
    put(storages(found), output)
    return EXIT_OK


def partitions(*, place: StorageName, key: Key = None, reach: LookUp, tls: Certificate, output: AnyForm = "table") -> int:
    """The replicas on a storage, a line each. STORAGE is its name, or the address of its port for operators.

    \b
    Examples:
      waltzctl storage partitions storage-1
      waltzctl storage partitions 127.0.0.1:55281 -o csv
    """

    async def ask(_client: AdminClient, description: StorageDescription) -> StorageDescription:
        return description

    found = with_admin(place, key, reach, tls, ask)
    put(files.replicas(found), output)
    return EXIT_OK


def describe(*, place: StorageName, reach: LookUp, tls: Certificate, key: Key = None, output: AnyForm = "table") -> int:
    """Show a running storage: its cluster, its partitions with their marks, and what it has done since it started. STORAGE
    is its name, or the address of its port for operators.

    \b
    Examples:
      waltzctl storage describe storage-1
      waltzctl storage describe 127.0.0.1:55281 -o json
    """

    async def ask(_client: AdminClient, description: StorageDescription) -> StorageDescription:
        return description

    put(files.description(with_admin(place, key, reach, tls, ask)), output)
    return EXIT_OK


def verify(
    *,
    place: StorageName,
    numbers: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    reach: LookUp,
    tls: Certificate,
    key: Key = None,
    output: AnyForm = "table",
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
    put(files.verification(findings, summaries), output)
    return EXIT_FINDINGS if findings else EXIT_OK
