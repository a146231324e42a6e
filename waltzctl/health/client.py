"""`waltzctl client`: lists connected applications, and ends their mounts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from typer import Argument, Option

from waltzctl.shell.change import Change, ChangeCommand
from waltzctl.shell.cluster_target import CommandTarget, unknown, using
from waltzctl.shell.progress import Say
from waltzctl.shell.safety import Plan
from waltzctl.show.client import client, clients
from waltzctl.show.forms import AnyForm, put
from waltzctl.snapshot import client_inventory
from waltzctl.snapshot.client_inventory import ClientInventory
from waltzd.cluster.clients import ClientNames
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClientMeta
from waltzd.errors import EXIT_OK, Unfinished, WaltzError


def list_(
    *,
    with_gone: Annotated[bool, Option("--all", help="Also list instances that were connected lately.")] = False,
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """List the connected instances of applications, a line each: the name in the certificate (`anonymous` without one),
    the name of the process, its state, since when it is connected, when its last message came, and what it has mounted.
    State `hangs`: heartbeats of its connections are overdue. State `slowed`: it wants more than its quota.

    \b
    Examples:
      waltzctl client list
      waltzctl client list --all -o wide
    """
    put(
        clients(
            using(target, lambda cluster: client_inventory.take_inventory(cluster, target.tls, needs_answer=True)),
            with_gone=with_gone,
        ),
        output,
    )
    return EXIT_OK


def describe(*, name: Annotated[str, Argument(metavar="NAME")], target: CommandTarget, output: AnyForm = "table") -> int:
    """Show one application: when it was seen first and last, its instances, and what it uses at each server: mounts,
    bytes in flight, how long its quota slowed it, and how many mounts were refused.

    \b
    Examples:
      waltzctl client describe anonymous
      waltzctl client describe anonymous -o json
    """

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
    """End the mounts of an application, or of one of its instances, after the transactions that are already decided.
    The library mounts again by itself within a second, so this is for an instance that hangs. To keep an application
    out, remove its grants with `waltzctl policy set`.

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

        async def do(cluster: Cluster, _say: Say) -> Mapping[str, Any]:
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
