"""`waltzctl client`: which applications are connected, and ending their mounts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from typer import Argument, Option

from waltzctl.shell.change import Change, ChangeCommand
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, unknown, using
from waltzctl.shell.options import Misused
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Plan
from waltzctl.show.client import client, clients
from waltzctl.show.forms import AnyForm, put
from waltzctl.snapshot import client_inventory
from waltzctl.snapshot.client_inventory import ClientInventory
from waltzd.cluster.clients import ClientNames
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClientMeta
from waltzd.errors import WaltzError
from waltzd.errors.exit_codes import EXIT_OK
from waltzd.errors.operations import Unfinished


def list_(
    *,
    name: Annotated[str | None, Argument(metavar="[NAME]")] = None,
    with_gone: Annotated[
        bool, Option("--all", help="Include instances that disconnected within the last ten minutes.")
    ] = False,
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """List the connected instances of applications: the name in the certificate (`anonymous` without one), the name of the
    instance, its state, since when it is connected, when it was last heard, and the partitions that it has mounted. The
    heartbeat of a hanging instance is overdue. A slowed instance exceeds its quota.

    With a NAME describe one application: when it was seen first and last, its instances, and what it uses at each server:
    mounts, bytes in flight, how long its quota slowed it, and how many of its mounts were refused.

    \b
    Examples:
      waltzctl client list
      waltzctl client list --all -o wide
      waltzctl client list anonymous
    """
    if name is not None:
        if with_gone:
            raise Misused("--all lists the instances of all applications; leave NAME out.")
        return _describe(name, target, output)
    put(
        clients(
            using(target, lambda cluster: client_inventory.take_inventory(cluster, target.tls, needs_answer=True)),
            with_gone=with_gone,
        ),
        output,
    )
    return EXIT_OK


def _describe(name: str, target: ClusterTarget, output: str) -> int:

    async def ask(cluster: Cluster) -> tuple[ClientInventory, Mapping[str, ClientMeta]]:
        return await client_inventory.take_inventory(cluster, target.tls, needs_answer=True), await ClientNames(
            cluster.coordinator
        ).all()

    found, kept = using(target, ask)
    names = {*kept, *(one.name for one in found.instances)}
    if name not in names:
        raise unknown("application", name, names)
    put(client(name, found, kept.get(name)), output)
    return EXIT_OK


def disconnect(*, subject: Annotated[str, Argument(metavar="NAME[/INSTANCE]")], command: ChangeCommand) -> int:
    """End the mounts of an application, or of one of its instances, behind what was decided. The library mounts again by
    itself, within a second: this is for one that hangs. To keep a name out, take its grants away with `waltzctl policy
    set`.

    \b
    Examples:
      waltzctl client disconnect anonymous --dry-run
      waltzctl client disconnect billing/box-7:4711 --dry-run
    """
    name, _, instance = subject.partition("/")

    async def prepare(cluster: Cluster) -> Change:
        found = await client_inventory.take_inventory(cluster, command.target.tls, needs_answer=True)
        steps = tuple(
            f"end the mounts of {one.name}/{one.instance} at {', '.join(one.servers)}"
            for one in found.instances
            if one.name == name and one.state != "gone" and instance in ("", one.instance)
        )

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            ended = await client_inventory.disconnect(cluster, command.target.tls, name, instance or None)
            silent = {server: why for server, why in ended.items() if isinstance(why, WaltzError)}
            if silent:
                raise Unfinished(
                    f"{', '.join(silent)} did not answer: {next(iter(silent.values())).message}",
                    not_done="mounts there were not ended",
                )
            return {"mounts": sum(count for count in ended.values() if isinstance(count, int))}

        return Change(plan=Plan(verb="client disconnect", subject=subject, steps=steps), do=do)

    return command.perform(prepare)
