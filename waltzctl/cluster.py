"""`waltzctl create-cluster` and `waltzctl cluster`: a cluster as a whole, through its coordinator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar
from uuid import UUID

import click

from waltzctl import render_cluster
from waltzctl.certificate import secured
from waltzctl.creation import Wish, create_cluster
from waltzctl.main import exit_codes
from waltzctl.overview import look
from waltzd import storages
from waltzd.coordinator import Coordinator
from waltzd.errors import EXIT_OK, EXIT_UNHEALTHY, BadArgument
from waltzd.layout import PARTITIONS_MAX
from waltzd.meta import StorageMeta
from waltzd.setting import parse_address
from waltzd.tls import Tls
from waltzd.zookeeper import ZooKeeperCoordinator

T = TypeVar("T")
FORM = "write it as name=host:port,host:port or name=host:port,host:port,group"


def with_coordinator(hosts: str, root: str, action: Callable[[Coordinator], Awaitable[T]]) -> T:
    async def run() -> T:
        coordinator = ZooKeeperCoordinator(hosts, root)
        await coordinator.start()
        try:
            return await action(coordinator)
        finally:
            await coordinator.close()

    return storages.run(run())


def place(command: Callable[..., int]) -> Callable[..., int]:
    """Which cluster, who asks, and how the answer looks."""
    command = secured(command)
    for option in (
        click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table",
                     help="For people, or for scripts."),
        click.option("--root", default="/waltz", show_default=True, help="Where the cluster's documents are in ZooKeeper."),
        click.option("--coordinator", "hosts", required=True, metavar="HOST:PORT,…",
                     help="Addresses of the ZooKeeper ensemble."),
    ):  # fmt: skip
        command = option(command)
    return command


def storage_of(text: str) -> StorageMeta:
    """What `--storage` says. A storage is a group of its own unless it is told which one it belongs to."""
    name, equals, rest = text.partition("=")
    parts = rest.split(",")
    if not equals or len(parts) not in (2, 3):
        raise BadArgument(f"--storage {text}: this is not a storage", next_step=FORM)
    try:
        listen, admin = (str(parse_address(part)) for part in parts[:2])
    except ValueError as error:
        raise BadArgument(f"--storage {text}: {error}", next_step=FORM) from error
    if len(parts) == 3 and not parts[2]:
        raise BadArgument(f"--storage {text}: the group has no name", next_step=FORM)
    return StorageMeta(name=name, listen=listen, admin_listen=admin, group=parts[2] if len(parts) == 3 else name)


@click.command("create-cluster", epilog=exit_codes())
@click.option("--name", required=True, help="What the cluster is called.")
@click.option("--partitions", required=True, type=click.IntRange(1, PARTITIONS_MAX), help="For ever; ids and locks belong "
    "to a partition.")  # fmt: skip
@click.option("--storage", "given", required=True, multiple=True, metavar="NAME=LISTEN,ADMIN[,GROUP]",
    help="A storage: its name, its two addresses, and the group that it may fail with. Once for each.")  # fmt: skip
@click.option("--replicas", type=click.IntRange(1, 15), default=3, show_default=True, help="Of each partition.")
@click.option("--key", type=click.UUID, help="The cluster key; the one that the storages have by default.")
@click.option("--dry-run", is_flag=True, help="Look at everything, show what would be done, write nothing.")
@place
def create(
    name: str,
    partitions: int,
    given: tuple[str, ...],
    replicas: int,
    key: UUID | None,
    dry_run: bool,
    hosts: str,
    root: str,
    output: str,
    tls: Tls | None,
) -> int:
    """Make a cluster of storages that run: its documents in ZooKeeper, and an empty replica wherever one belongs. The
    replicas of a partition are spread over groups, and evenly over the storages.

    The storages must run, with the same cluster_key and number of partitions in their configuration. Where none runs
    yet, this command proposes a key. To repeat it with the same words changes nothing, or completes what is missing.

    \b
    Examples:
      waltzctl create-cluster --coordinator 127.0.0.1:2181 --name trial --partitions 4 --replicas 1 \\
        --storage one=127.0.0.1:55280,127.0.0.1:55281 --dry-run
      waltzctl create-cluster --coordinator 127.0.0.1:2181 --name trial --partitions 4 --replicas 1 \\
        --storage one=127.0.0.1:55280,127.0.0.1:55281,rack-1
    """
    wish = Wish(
        name=name,
        partitions=partitions,
        replication=replicas,
        storages=tuple(storage_of(text) for text in given),
        key=key,
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = with_coordinator(
        hosts, root, lambda coordinator: create_cluster(coordinator, wish, created=now, is_dry=dry_run, tls=tls)
    )
    render_cluster.creation(found, output, hosts=hosts, root=root, is_dry=dry_run)
    return EXIT_OK


@click.command("describe", epilog=exit_codes())
@place
def describe(hosts: str, root: str, output: str, tls: Tls | None) -> int:
    """Show a cluster: its servers and storages, and who owns each partition and how it is. The end is 0 when all is well,
    and 10 when a process does not answer, a partition takes no transactions, or one has fewer replicas than it should.

    \b
    Examples:
      waltzctl cluster describe --coordinator 127.0.0.1:2181
      waltzctl cluster describe --coordinator 127.0.0.1:2181 --root /waltz -o json
    """
    found = with_coordinator(hosts, root, lambda coordinator: look(coordinator, tls=tls))
    render_cluster.overview(found, output, where=f"{hosts}{root}")
    return EXIT_OK if found.is_healthy else EXIT_UNHEALTHY
