"""`waltzctl storage`: what an operator asks of running storages.

A storage is named as the cluster names it, or by the address of its port for operators (`admin_listen` in its
configuration), which needs no cluster. The cluster key is asked of the storage itself; with `--key` a storage of another
cluster is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

import click

from waltzctl import completion
from waltzctl.certificate import first_contact
from waltzctl.change import Asked, Plan, changing, check_again
from waltzctl.job import Job, perform
from waltzctl.listing import Column, Listing, listed, put
from waltzctl.main import exit_codes
from waltzctl.numbers import partitions_of
from waltzctl.placement import moves, render_storage
from waltzctl.placement.relocation import Situation, situation
from waltzctl.reach import Reach, addressing, reaching, unknown, using
from waltzctl.safety import Step, danger, without
from waltzctl.waiting import Say
from waltzctl.watching.overview import StorageView, look
from waltzd import loop
from waltzd.assignment import spell_numbers
from waltzd.cluster import Cluster
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, EXIT_PARTIAL, EXIT_USAGE, ForeignCluster, WaltzError
from waltzd.finding import Finding
from waltzd.meta import StorageMeta
from waltzd.replica import PartitionDescription, StorageDescription, VerifySummary
from waltzd.storage_admin import AdminClient
from waltzd.tls import Tls

T = TypeVar("T")
NO_KEY = UUID(int=0)
LookUp = Callable[[], Reach]
Certificate = Callable[[], Tls | None]


def with_admin(
    place: str,
    key: UUID | None,
    reach: LookUp,
    tls: Certificate,
    action: Callable[[AdminClient, StorageDescription], Awaitable[T]],
) -> T:
    """Ask the storage who it is, then do the action with its key."""
    address, certificate = (place, tls()) if ":" in place else _found(place, reach())

    async def run() -> T:
        async with (
            AdminClient(address, NO_KEY, seconds=10, tls=certificate) as stranger,
            first_contact(address, certificate),
        ):
            description = await stranger.describe()
        if key is not None and key != description.cluster_key:
            raise ForeignCluster(f"{address} belongs to the cluster {description.cluster_key}, not to {key}")
        async with AdminClient(address, description.cluster_key, tls=certificate) as admin:
            return await action(admin, description)

    return loop.run(run())


def _found(name: str, reach: Reach) -> tuple[str, Tls | None]:
    async def ask(cluster: Cluster) -> dict[str, StorageMeta]:
        return await cluster.storages()

    there = using(reach, ask)
    if name not in there:
        raise unknown("storage", name, there)
    return there[name].admin_listen, reach.tls


def common(command: Callable[..., int]) -> Callable[..., int]:
    command = addressing(command)
    command = click.option("--key", type=click.UUID, help="The cluster key that the storage must have.")(command)
    return click.option(
        "-o", "--output", type=click.Choice(["table", "json"]), default="table", help="For people, or for scripts."
    )(command)


def settle(results: dict[int, WaltzError | None], done: str, output: str) -> int:
    """Show each partition's outcome; partial success is an exit code of its own."""
    render_storage.results(results, done, output)
    errors = [error for error in results.values() if error is not None]
    if not errors:
        return EXIT_OK
    return errors[0].exit_code if len(errors) == len(results) else EXIT_PARTIAL


@click.command("list", epilog=exit_codes())
@listed
@reaching
def list_(reach: Reach, output: str) -> int:
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


@click.command("partitions", epilog=exit_codes())
@click.argument("place", metavar="STORAGE", shell_complete=completion.storages)
@click.option("--key", type=click.UUID, help="The cluster key that the storage must have.")
@listed
@addressing
def partitions(place: str, key: UUID | None, output: str, reach: LookUp, tls: Certificate) -> int:
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


@click.command(epilog=exit_codes())
@click.argument("place", metavar="STORAGE", shell_complete=completion.storages)
@common
def describe(place: str, output: str, key: UUID | None, reach: LookUp, tls: Certificate) -> int:
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


@click.command("create-partition", epilog=exit_codes())
@click.argument("place", metavar="STORAGE", shell_complete=completion.storages)
@click.argument("numbers", metavar="PARTITIONS")
@common
def create_partition(place: str, numbers: str, output: str, key: UUID | None, reach: LookUp, tls: Certificate) -> int:
    """Create empty replicas of PARTITIONS (like 0-3,7) on a storage, whoever they are assigned to; `partition assign` is
    for clusters. Files that a partition left there before are set aside, never used again.

    \b
    Examples:
      waltzctl storage create-partition 127.0.0.1:55281 0-1
      waltzctl storage create-partition 127.0.0.1:55281 2,3 -o json
    """
    chosen = partitions_of(numbers)
    results = with_admin(place, key, reach, tls, lambda client, _: client.create_partitions(chosen))
    return settle(results, "created", output)


@click.command("remove-partition", epilog=exit_codes())
@click.argument("place", metavar="STORAGE", shell_complete=completion.storages)
@click.argument("numbers", metavar="PARTITIONS")
@click.option("--delete-files", is_flag=True, help="Delete the files instead of setting them aside.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@common
def remove_partition(
    place: str,
    numbers: str,
    delete_files: bool,
    yes: bool,
    output: str,
    key: UUID | None,
    reach: LookUp,
    tls: Certificate,
) -> int:
    """Take replicas off a storage, whether they are assigned to it or not; `partition unassign` is for clusters. Their
    files are set aside in its directory unless they are to be deleted.

    \b
    Examples:
      waltzctl storage remove-partition 127.0.0.1:55281 1 --yes
      waltzctl storage remove-partition 127.0.0.1:55281 0 --delete-files --yes
    """
    chosen = partitions_of(numbers)
    if not yes:
        what = "Delete the files of" if delete_files else "Take off this storage"
        if not click.confirm(f"{what} partition {', '.join(map(str, chosen))} at {place}?", err=True):
            click.echo("Nothing was changed.", err=True)
            return EXIT_USAGE
    results = with_admin(
        place, key, reach, tls, lambda client, _: client.remove_partitions(chosen, delete_files=delete_files)
    )
    return settle(results, "removed", output)


@click.command(epilog=exit_codes())
@click.argument("place", metavar="STORAGE", shell_complete=completion.storages)
@click.argument("numbers", metavar="PARTITIONS")
@click.option("--online/--offline", "online", default=None, help="Which of the two; one must be given.")
@changing
@common
def availability(
    place: str,
    numbers: str,
    online: bool | None,
    asked: Asked,
    output: str,
    key: UUID | None,
    reach: LookUp,
    tls: Certificate,
) -> int:
    """Take partitions offline on a storage, or back online. Offline, a replica refuses every session. By the name of the
    storage, it is refused where a partition would lose its majority; by an address, nobody knows of the other replicas.

    \b
    Examples:
      waltzctl storage availability 127.0.0.1:55281 0-1 --offline
      waltzctl storage availability 127.0.0.1:55281 0-1 --online
    """
    chosen = partitions_of(numbers)
    if online is None:
        raise click.UsageError("Say --online or --offline.")
    verb = "online" if online else "offline"
    if ":" in place:
        if asked.is_dry:
            raise click.UsageError("--dry-run needs the name of a storage: by an address, nothing is known of the others.")
        results = with_admin(place, key, reach, tls, lambda client, _: client.set_available(chosen, online))
        return settle(results, verb, output)
    return _availability(reach(), place, chosen, online, asked, output)


def _availability(reach: Reach, name: str, chosen: list[int], online: bool, asked: Asked, output: str) -> int:
    verb = "online" if online else "offline"

    async def prepare(cluster: Cluster) -> Job:
        now = await situation(cluster, reach.tls)
        storage = now.storage(name)
        now.check_partitions(chosen)
        plan = _availability_plan(now, name, chosen, online)

        async def do(cluster: Cluster, _say: Say) -> Mapping[str, Any]:
            check_again(_availability_plan(await situation(cluster, reach.tls), name, chosen, online), asked)
            async with AdminClient(storage.admin_listen, now.found.meta.key, tls=reach.tls, name=name) as admin:
                _check_all(await admin.set_available(chosen, online), verb)
            return {}

        return Job(plan=plan, do=do)

    return perform(reach, asked, output, prepare)


def _availability_plan(now: Situation, name: str, chosen: Sequence[int], online: bool) -> Plan:
    steps: list[Step] = []
    for number in chosen:
        roles = now.sets.partitions.get(number, {})
        if name in roles and not online:
            steps.append(without(number, roles, now.found.level(number), silent=[name]))
    words = f"take partitions {', '.join(map(str, chosen))} {'online' if online else 'offline'} on {name}"
    return Plan(verb="storage availability", subject=name, steps=(words,), margins=tuple(steps), danger=danger(steps))


def _check_all(results: Mapping[int, WaltzError | None], verb: str) -> None:
    refused = {number: error for number, error in results.items() if error is not None}
    if refused:
        number, error = next(iter(refused.items()))
        done = [other for other in results if other not in refused]
        raise type(error)(
            f"partition {number}: {error.message}",
            not_done=f"partitions {spell_numbers(list(refused))} are not {verb}"
            + (f"; {spell_numbers(done)} are" if done else ""),
            next_step=error.detail_next_step,
        )


@click.command(epilog=exit_codes())
@click.argument("place", metavar="STORAGE", shell_complete=completion.storages)
@click.argument("numbers", metavar="[PARTITIONS]", required=False)
@common
def verify(place: str, numbers: str | None, output: str, key: UUID | None, reach: LookUp, tls: Certificate) -> int:
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
