"""`waltzctl storage`: what an operator asks of one running storage, through its port for operators.

ADMIN is the address that the storage prints when it starts (`admin_listen` in its configuration). The cluster key is
asked of the storage itself; with `--key` a storage of another cluster is refused.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from uuid import UUID

import click

from waltzctl import render_storage
from waltzctl.certificate import first_contact, secured
from waltzctl.main import exit_codes
from waltzd import storages
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, EXIT_PARTIAL, EXIT_USAGE, BadArgument, ForeignCluster, WaltzError
from waltzd.finding import Finding
from waltzd.replica import StorageDescription, VerifySummary
from waltzd.storages import AdminClient
from waltzd.tls import Tls

T = TypeVar("T")
NO_KEY = UUID(int=0)
RANGE_MAX = 1 << 16
_NUMBERS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def partitions_of(text: str) -> list[int]:
    """`0-3,7` as [0, 1, 2, 3, 7]; each once, in order."""
    found: dict[int, None] = {}
    for part in text.split(","):
        given = _NUMBERS.fullmatch(part.strip())
        if given is None:
            raise BadArgument(f"{part.strip()!r} is no partition and no range of partitions", next_step="write it as 0-3,7")
        numbers = range(int(given[1]), int(given[2] or given[1]) + 1)
        if not numbers or numbers[-1] >= RANGE_MAX:
            raise BadArgument(f"{part.strip()!r} is no range of partitions", next_step="write it as 0-3,7")
        found.update(dict.fromkeys(numbers))
    return list(found)


def with_admin(
    address: str, key: UUID | None, tls: Tls | None, action: Callable[[AdminClient, StorageDescription], Awaitable[T]]
) -> T:
    """Ask the storage who it is, then do the action with its key."""

    async def run() -> T:
        async with AdminClient(address, NO_KEY, seconds=10, tls=tls) as stranger, first_contact(address, tls):
            description = await stranger.describe()
        if key is not None and key != description.cluster_key:
            raise ForeignCluster(f"{address} belongs to the cluster {description.cluster_key}, not to {key}")
        async with AdminClient(address, description.cluster_key, tls=tls) as admin:
            return await action(admin, description)

    return storages.run(run())


def common(command: Callable[..., int]) -> Callable[..., int]:
    command = secured(command)
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


@click.command(epilog=exit_codes())
@click.argument("admin", metavar="ADMIN")
@common
def describe(admin: str, output: str, key: UUID | None, tls: Tls | None) -> int:
    """Show a running storage: its cluster, its partitions with their marks, and what it has done since it started.

    \b
    Examples:
      waltzctl storage describe 127.0.0.1:55281
      waltzctl storage describe 127.0.0.1:55281 -o json
    """

    async def ask(_client: AdminClient, description: StorageDescription) -> StorageDescription:
        return description

    render_storage.description(with_admin(admin, key, tls, ask), output)
    return EXIT_OK


@click.command("create-partition", epilog=exit_codes())
@click.argument("admin", metavar="ADMIN")
@click.argument("partitions", metavar="PARTITIONS")
@common
def create_partition(admin: str, partitions: str, output: str, key: UUID | None, tls: Tls | None) -> int:
    """Create empty replicas of PARTITIONS (like 0-3,7) on a storage. Files that a partition left there before are set
    aside, never used again.

    \b
    Examples:
      waltzctl storage create-partition 127.0.0.1:55281 0-1
      waltzctl storage create-partition 127.0.0.1:55281 2,3 -o json
    """
    numbers = partitions_of(partitions)
    results = with_admin(admin, key, tls, lambda client, _: client.create_partitions(numbers))
    return settle(results, "created", output)


@click.command("remove-partition", epilog=exit_codes())
@click.argument("admin", metavar="ADMIN")
@click.argument("partitions", metavar="PARTITIONS")
@click.option("--delete-files", is_flag=True, help="Delete the files instead of setting them aside.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@common
def remove_partition(
    admin: str, partitions: str, delete_files: bool, yes: bool, output: str, key: UUID | None, tls: Tls | None
) -> int:
    """Take replicas off a storage. Their files are set aside in its directory unless they are to be deleted.

    \b
    Examples:
      waltzctl storage remove-partition 127.0.0.1:55281 1 --yes
      waltzctl storage remove-partition 127.0.0.1:55281 0 --delete-files --yes
    """
    numbers = partitions_of(partitions)
    if not yes:
        what = "Delete the files of" if delete_files else "Take off this storage"
        if not click.confirm(f"{what} partition {', '.join(map(str, numbers))} at {admin}?", err=True):
            click.echo("Nothing was changed.", err=True)
            return EXIT_USAGE
    results = with_admin(admin, key, tls, lambda client, _: client.remove_partitions(numbers, delete_files=delete_files))
    return settle(results, "removed", output)


@click.command(epilog=exit_codes())
@click.argument("admin", metavar="ADMIN")
@click.argument("partitions", metavar="PARTITIONS")
@click.option("--online/--offline", "online", default=None, help="Which of the two; one must be given.")
@common
def availability(admin: str, partitions: str, online: bool | None, output: str, key: UUID | None, tls: Tls | None) -> int:
    """Take partitions offline on a storage, or back online. Offline, a replica refuses every session.

    \b
    Examples:
      waltzctl storage availability 127.0.0.1:55281 0-1 --offline
      waltzctl storage availability 127.0.0.1:55281 0-1 --online
    """
    numbers = partitions_of(partitions)
    if online is None:
        raise click.UsageError("Say --online or --offline.")
    results = with_admin(admin, key, tls, lambda client, _: client.set_available(numbers, online))
    return settle(results, "online" if online else "offline", output)


@click.command(epilog=exit_codes())
@click.argument("admin", metavar="ADMIN")
@click.argument("partitions", metavar="[PARTITIONS]", required=False)
@common
def verify(admin: str, partitions: str | None, output: str, key: UUID | None, tls: Tls | None) -> int:
    """Check the files of a storage while it runs: every record up to what is on the disk now. Appends go on.

    \b
    Examples:
      waltzctl storage verify 127.0.0.1:55281
      waltzctl storage verify 127.0.0.1:55281 0-1 -o json
    """
    numbers = partitions_of(partitions) if partitions else []

    async def ask(client: AdminClient, _: Any) -> tuple[list[Finding], list[VerifySummary]]:
        findings: list[Finding] = []
        summaries: list[VerifySummary] = []
        async for found in client.verify(numbers):
            if isinstance(found, Finding):
                findings.append(found)
            else:
                summaries.append(found)
        return findings, summaries

    findings, summaries = with_admin(admin, key, tls, ask)
    render_storage.verification(findings, summaries, output)
    return EXIT_FINDINGS if findings else EXIT_OK
