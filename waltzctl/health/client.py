"""`waltzctl client`: which applications are connected, and ending their mounts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from waltzctl.shell.change import Change, ChangeCommand
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, unknown, using
from waltzctl.shell.options import Misused
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Plan
from waltzctl.show.forms import AnyForm, Column, Columns, Line, Listing, Part, Table, attributes, objects, put, warnings
from waltzctl.show.terminal import duration, size
from waltzctl.snapshot import client_inventory
from waltzctl.snapshot.client_inventory import ApplicationInstance, ClientInventory, ServerUsage
from waltzctl.snapshot.cluster_snapshot import silent_servers
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.clients import ClientNames
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClientMeta
from waltzd.errors import EXIT_OK, WaltzError
from waltzd.errors.operations import Unfinished

if TYPE_CHECKING:
    from waltzd.cluster.documents import ClientMeta


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


# -- what people read of them ------------------------------------------------------------------------------------------


def _state(one: ApplicationInstance) -> str:
    if one.state == "gone":
        return one.state
    return ", ".join([one.state, *["slowed"] * one.is_slowed, *["waits for the archive"] * bool(one.waiting)])


INSTANCES: Columns[ApplicationInstance] = (
    *attributes("name instance"),
    Column("state", _state, json=""),
    *(Column("", json=name) for name in ("state", "is_slowed")),
    Column("since", "age_ms", cell=duration, json="age_milliseconds"),
    Column("heard", "quiet_ms", cell=duration, json="quiet_milliseconds"),
    Column("partitions", cell=format_numbers),
    *attributes("appended fed"),
    Column("address", "peer"),
    *attributes("version waiting role", is_wide=True),
    Column("epoch", is_wide=True, cell=lambda epoch: str(epoch or "")),
    Column("servers", is_wide=True),
    *attributes("appended_bytes fed_bytes", is_wide=True, cell=size),
)
USES: Columns[ServerUsage] = (
    Column("server"),
    Column("mounts", "use.mounts"),
    Column("in flight", "use.inflight_bytes", cell=size, json="inflight_bytes"),
    Column("slowed", "use.slowed_ms", cell=duration, json="slowed_milliseconds"),
    Column("last", "use.slowed_ago_ms", json="slowed_ago_milliseconds", cell=lambda ago: f"{duration(ago)} ago"),
    Column("refused mounts", "use.refused_mounts"),
)


def clients(found: ClientInventory, *, with_gone: bool) -> Listing[ApplicationInstance]:
    return Listing(
        kind="clients",
        columns=INSTANCES,
        rows=[one for one in found.instances if with_gone or one.state != "gone"],
        nothing="No application is connected.",
        notes=warnings(silent_servers(found.silent)),
        more={"silent_servers": dict(found.silent)},
    )


def client(name: str, found: ClientInventory, kept: ClientMeta | None) -> Listing[ApplicationInstance]:
    rows = [one for one in found.instances if one.name == name]
    uses = [one for one in found.uses if one.use.name == name]
    seen = {} if kept is None else {"first_seen": _moment(kept.first_seen), "last_seen": _moment(kept.last_seen)}
    epoch = 0 if kept is None else kept.epoch
    page: list[Part] = [Line(f"application {name}", "bold")]
    if seen:
        moments = f"first seen {seen['first_seen']}, last seen {seen['last_seen']}"
        page.append(moments + (f", newest epoch {epoch}" if epoch else ""))
    page.append(Table(INSTANCES, rows) if rows else "No instance of it is connected, or was lately.")
    page += [Table(USES, uses), *warnings(silent_servers(found.silent))]
    content = {
        "name": name,
        "first_seen": seen.get("first_seen"),
        "last_seen": seen.get("last_seen"),
        "epoch": epoch,
        "instances": objects(INSTANCES, rows),
        "uses": objects(USES, uses),
        "silent_servers": dict(found.silent),
    }
    return Listing(kind="instances", columns=INSTANCES, rows=rows, page=page, content=content)


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
