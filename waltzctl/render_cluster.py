"""How a cluster looks, for people and for scripts: one that was made, one that is described, one on this machine."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from waltzctl.render import ROWS_MAX, console, count, put_json

if TYPE_CHECKING:
    from rich.console import Console

    from waltzctl.creation import Creation
    from waltzctl.local import LocalCluster
    from waltzctl.overview import Overview, PartitionView
    from waltzd.errors import WaltzError


def table(out: Console, names: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: tuple[str, ...] = ()) -> None:
    from rich import box
    from rich.table import Table

    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    out.print(table)


class Waiting:
    """What is being waited for: one line on standard error that is written over; nothing when that is no terminal."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()
        self._started = time.monotonic()
        self._width = 0

    def say(self, sentence: str) -> None:
        if self._shows:
            self._put(f"{time.monotonic() - self._started:4.1f} s  {sentence}")

    def _put(self, line: str) -> None:
        with suppress(OSError):  # a terminal that went away
            sys.stderr.write("\r" + line.ljust(self._width))
            sys.stderr.flush()
        self._width = len(line)

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._width:
            self._put("")
            self._put("\r")


# -- create-cluster ----------------------------------------------------------------------------------------------------


def creation(made: Creation, output: str, *, hosts: str, root: str, is_dry: bool) -> None:
    result = "would create" if is_dry and not made.was_there else "there already" if made.was_there else "created"
    if output == "json":
        put_json(
            {
                "result": result.replace(" ", "-"),
                "coordinator": hosts,
                "root": root,
                "name": made.meta.name,
                "cluster_key": str(made.meta.key),
                "partitions": made.meta.partitions,
                "created": made.meta.created,
                "storages": [
                    {**asdict(storage), "partitions": made.partitions_of(name), "made": list(made.created.get(name, ()))}
                    for name, storage in sorted(made.storages.items())
                ],
                "replicas": {str(partition): list(names) for partition, names in sorted(made.replicas.items())},
            }
        )
        return
    out = console()
    out.print(f"{result}: cluster {made.meta.name}, {count(made.meta.partitions, 'partition')}", style="bold green")
    out.print(f"key {made.meta.key}, documents at {hosts}{root}", soft_wrap=True)
    rows = [
        (name, storage.group, storage.listen, f"{len(made.partitions_of(name)):,}",
         f"{len(made.created.get(name, ())):,}")
        for name, storage in sorted(made.storages.items())
    ]  # fmt: skip
    table(out, ("storage", "group", "address", "replicas", "made now"), rows, right=("replicas", "made now"))
    if is_dry:
        out.print("Nothing was written.")
        return
    out.print("Next: start servers with these lines in their configuration, each with a name of its own:", soft_wrap=True)
    out.print(f"  coordinator: {hosts}\n  cluster: {root}", soft_wrap=True)


# -- cluster describe --------------------------------------------------------------------------------------------------


def overview(found: Overview, output: str, *, where: str) -> None:
    if output == "json":
        put_json({"coordinator": where, **overview_json(found)})
        return
    out = console()
    style = "bold green" if found.is_healthy else "bold red"
    out.print(sentence(found), style=style, soft_wrap=True)
    out.print(f"cluster {found.meta.name}, key {found.meta.key}, {where}", soft_wrap=True)
    servers = [
        (view.meta.name, view.meta.listen, view.meta.admin_listen,
         str(len(view.said.partitions)) if view.said is not None else "",
         _state(view.error, [("leader", view.meta.name == found.leader), ("draining", view.meta.is_draining)]))
        for view in found.servers
    ]  # fmt: skip
    table(out, ("server", "address", "admin", "partitions", "state"), servers, right=("partitions",))
    stores = [
        (view.meta.name, view.meta.listen, view.meta.admin_listen,
         str(len(view.said.assigned)) if view.said is not None else "", view.meta.group, _state(view.error, []))
        for view in found.storages
    ]  # fmt: skip
    table(out, ("storage", "address", "admin", "replicas", "group", "state"), stores, right=("replicas",))
    partitions(out, found)


def partitions(out: Console, found: Overview) -> None:
    """All of them; of very many, those with something to say."""
    wanting = {partition.partition for partition in (*found.closed, *found.short)}
    shown = [
        partition for partition in found.partitions if len(found.partitions) <= ROWS_MAX or partition.partition in wanting
    ]
    rows = [_partition_row(partition) for partition in shown]
    names = ("partition", "owner", "generation", "session", "state", "committed", "replicas")
    table(out, names, rows, right=("partition", "generation", "session", "committed", "replicas"))
    if len(shown) < len(found.partitions):
        out.print(f"{count(len(found.partitions) - len(shown), 'more partition')}, all open with all replicas")
    for name, error in found.silent.items():
        out.print(f"{name}: {error.code} {error.message}", style="red", soft_wrap=True)
    for partition in found.closed[:ROWS_MAX]:
        out.print(f"partition {partition.partition}: {partition.waiting}", style="red", soft_wrap=True)
    for partition in found.short[:ROWS_MAX]:
        for story in _missing(partition):
            out.print(f"partition {partition.partition}: {story}", style="yellow", soft_wrap=True)


def sentence(found: Overview) -> str:
    opened = len(found.partitions) - len(found.closed)
    total = len(found.partitions)
    said = f"{count(total, 'partition')} open" if opened == total else f"{opened} of {count(total, 'partition')} open"
    if found.short:
        said += f", {len(found.short)} with fewer replicas than they should have"
    if found.silent:
        said += f", {count(len(found.silent), 'process', 'processes')} not answering"
    return f"{said}, on {count(len(found.servers), 'server')} and {count(len(found.storages), 'storage')}"


def _state(error: WaltzError | None, words: list[tuple[str, bool]]) -> str:
    if error is not None:
        return "silent"
    return ", ".join(["up", *(word for word, holds in words if holds)])


def _partition_row(partition: PartitionView) -> tuple[str, ...]:
    said = partition.said
    replicas = f"{partition.counting} of {len(partition.replicas)}"
    head = (str(partition.partition), partition.owner or "nobody", f"{partition.generation:,}")
    if said is None:
        return (*head, "", "unknown", "", replicas)
    state = "open" if partition.is_open else said.step.lower()
    return (*head, f"{said.session:,}", state, f"{said.committed:,}", replicas)


def _missing(partition: PartitionView) -> list[str]:
    """What the owner says of the replicas that do not count."""
    if partition.said is None:
        return []
    return [
        f"{replica.storage} is {replica.state.lower().replace('_', ' ')}{': ' if replica.story else ''}{replica.story}"
        for replica in partition.said.replicas
        if not replica.counts
    ]


def overview_json(found: Overview) -> dict[str, Any]:
    return {
        "is_healthy": found.is_healthy,
        "name": found.meta.name,
        "cluster_key": str(found.meta.key),
        "created": found.meta.created,
        "leader": found.leader,
        "servers": [
            {
                "name": view.meta.name, "listen": view.meta.listen, "admin_listen": view.meta.admin_listen,
                "version": view.meta.version, "is_draining": view.meta.is_draining, "is_up": view.error is None,
                "partitions": None if view.said is None else [owned.partition for owned in view.said.partitions],
                "error": _error_json(view.error),
            }
            for view in found.servers
        ],
        "storages": [
            {
                "name": view.meta.name, "listen": view.meta.listen, "admin_listen": view.meta.admin_listen,
                "group": view.meta.group, "is_up": view.error is None,
                "replicas": None if view.said is None else [held.partition for held in view.said.assigned],
                "error": _error_json(view.error),
            }
            for view in found.storages
        ],
        "partitions": [
            {
                "partition": partition.partition, "owner": partition.owner, "generation": partition.generation,
                "is_open": partition.is_open, "waiting": partition.waiting,
                "replicas": {name: str(role) for name, role in sorted(partition.replicas.items())},
                "counting": partition.counting,
                "owned": None if partition.said is None else asdict(partition.said),
            }
            for partition in found.partitions
        ],
    }  # fmt: skip


def _error_json(error: WaltzError | None) -> dict[str, str] | None:
    return None if error is None else {"code": error.code, "message": error.message}


# -- a cluster on this machine -----------------------------------------------------------------------------------------


def ready(cluster: LocalCluster, found: Overview, *, seconds: float, stays: bool) -> None:
    """The screen at the end of `waltzctl up`."""
    out = console()
    style = "bold green" if found.is_healthy else "bold yellow"
    out.print(f"ready after {seconds:.1f} s: {sentence(found)}", style=style, soft_wrap=True)
    _processes(out, cluster)
    out.print("What to try next:")
    owner = next((view.owner for view in found.partitions if view.owner is not None), None)
    life = cluster.daemons[owner].life if owner is not None else None
    where = shlex.quote(str(cluster.directory))
    servers = ",".join(cluster.server_addresses)
    append = f"with __import__('waltzd').BlockingClient('{servers}') as client: print(client.append(b'hello', partition=0))"
    tries = [
        (f'python -c "{append}"', "append a transaction"),
        (f"waltzctl status {where}", "who owns what, and how it is"),
    ]
    if life is not None:
        tries.append((f"kill -9 {life.pid}", f"{owner} is gone; look how its partitions move"))
        tries.append((f"waltzctl up {where} --detach", "bring back what is missing"))
    tries.append((f"tail -f {where}/log/*.log", "what they say"))
    if stays:
        tries.append((f"waltzctl down {where}", "stop everything"))
    for command, meaning in tries:
        out.print(f"  {command}  # {meaning}", soft_wrap=True)
    if not stays:
        out.print("Ctrl-C stops everything.")


def _processes(out: Console, cluster: LocalCluster) -> None:
    rows = []
    for name, daemon in cluster.daemons.items():
        listen, *admin = cluster.blueprint.addresses(name)
        state = "runs" if daemon.is_running else "down"
        pid = str(daemon.life.pid) if daemon.life is not None and state == "runs" else ""
        rows.append((name, listen, "".join(admin), pid, state))
    table(out, ("process", "address", "admin", "pid", "state"), rows, right=("pid",))
    out.print(f"key {cluster.blueprint.key}; logs: {cluster.directory}/log", soft_wrap=True)


def local(cluster: LocalCluster, found: Overview | None, trouble: WaltzError | None, output: str) -> None:
    """`waltzctl status`."""
    if output == "json":
        put_json(
            {
                "directory": str(cluster.directory),
                "cluster_key": str(cluster.blueprint.key),
                "coordinator": cluster.coordinator_hosts,
                "daemons": [
                    {
                        "name": name, "is_running": daemon.is_running,
                        "pid": daemon.life.pid if daemon.life is not None and daemon.is_running else None,
                        "addresses": list(cluster.blueprint.addresses(name)), "log": str(daemon.log),
                    }
                    for name, daemon in cluster.daemons.items()
                ],
                "cluster": None if found is None else overview_json(found),
                "error": _error_json(trouble),
            }
        )  # fmt: skip
        return
    out = console()
    if found is not None:
        healthy = found.is_healthy and len(cluster.running) == len(cluster.daemons)
        out.print(sentence(found), style="bold green" if healthy else "bold red", soft_wrap=True)
    else:
        out.print(f"{len(cluster.running)} of {count(len(cluster.daemons), 'process', 'processes')} run", style="bold red")
    _processes(out, cluster)
    if found is not None:
        partitions(out, found)
    if trouble is not None:
        out.print(f"{trouble.code} {trouble.message}", style="red", soft_wrap=True)
    if len(cluster.running) < len(cluster.daemons):
        out.print(f"Next: waltzctl up {cluster.directory} --detach", soft_wrap=True)


def stopped(names: list[str], killed: list[str], directory: str) -> None:
    click.echo(f"{count(len(names), 'process', 'processes')} stopped; {directory} keeps everything." if names
               else f"Nothing ran in {directory}.")  # fmt: skip
    for name in killed:
        click.echo(f"{name} did not end in time and was killed. What it acknowledged is on the disk.", err=True)
