"""How a cluster looks, for people and for scripts: one that was made, one that is described."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from waltzctl.render import ROWS_MAX, console, count, put_json, table
from waltzd.errors import CannotConnect

if TYPE_CHECKING:
    from rich.console import Console

    from waltzctl.picture.picture import PartitionView, Picture
    from waltzctl.placement.creation import Creation
    from waltzd.cluster.documents import PartitionMeta
    from waltzd.errors import WaltzError


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


def picture(found: Picture, output: str, *, where: str) -> None:
    if output == "json":
        put_json({"coordinator": where, **picture_json(found)})
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
    servers += [(meta.name, meta.listen, meta.admin_listen, "", "down") for meta in found.missing]
    table(out, ("server", "address", "admin", "partitions", "state"), servers, right=("partitions",))
    stores = [
        (view.meta.name, view.meta.listen, view.meta.admin_listen,
         str(len(view.said.assigned)) if view.said is not None else "", view.meta.group, _state(view.error, []))
        for view in found.storages
    ]  # fmt: skip
    table(out, ("storage", "address", "admin", "replicas", "group", "state"), stores, right=("replicas",))
    partitions(out, found)


def partitions(out: Console, found: Picture) -> None:
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


def partition(found: PartitionView, meta: PartitionMeta | None, goal: tuple[str, ...] | None, output: str) -> None:
    if output == "json":
        put_json(
            {
                **_partition_json(found),
                "goal": None if goal is None else list(goal),
                "recorded": None
                if meta is None
                else {
                    "session": meta.session,
                    "opened": meta.opened,
                    "low_mark": meta.low_mark,
                    "members": list(meta.members),
                    "decided": None if meta.decision is None else meta.decision.mark,
                },
            }
        )
        return
    out = console()
    out.print("open" if found.is_open else "not open", style="bold green" if found.is_open else "bold red")
    if found.waiting:
        out.print(found.waiting, style="red", soft_wrap=True)
    said = found.said
    owner = f"{found.owner or 'nobody'}, generation {found.generation:,}"
    if said is not None:
        owner += f", session {said.session:,}, {said.committed + 1:,} transactions, {count(said.mounts, 'client')}"
    out.print(f"partition {found.partition}, owned by {owner}", soft_wrap=True)
    replicas = {replica.storage: replica for replica in said.replicas} if said is not None else {}
    rows = []
    for name in sorted({*found.replicas, *replicas}):
        seen = replicas.get(name)
        role = str(found.replicas.get(name, "leaving"))
        if seen is None:
            rows.append((name, role, "unknown", "", "", ""))
        else:
            rows.append(
                (name, role, seen.state.lower(), f"{seen.durable_id:,}", "yes" if seen.counts else "no", seen.story)
            )
    table(out, ("replica", "role", "state", "last id", "counts", "story"), rows, right=("last id",))
    if goal is not None:
        out.print(f"on its way to {', '.join(goal)}", style="yellow", soft_wrap=True)


def sentence(found: Picture) -> str:
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
    return (*head, f"{said.session:,}", partition.state, f"{said.committed:,}", replicas)


def _missing(partition: PartitionView) -> list[str]:
    """What the owner says of the replicas that do not count."""
    if partition.said is None:
        return []
    return [
        f"{replica.storage} is {replica.state.lower().replace('_', ' ')}{': ' if replica.story else ''}{replica.story}"
        for replica in partition.said.replicas
        if not replica.counts
    ]


def picture_json(found: Picture) -> dict[str, Any]:
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
        ] + [
            {
                "name": meta.name, "listen": meta.listen, "admin_listen": meta.admin_listen, "version": meta.version,
                "is_draining": False, "is_up": False, "partitions": None,
                "error": {"code": CannotConnect.code, "message": "it is not in ZooKeeper's list of servers"},
            }
            for meta in found.missing
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
        "partitions": [_partition_json(partition) for partition in found.partitions],
    }  # fmt: skip


def _partition_json(found: PartitionView) -> dict[str, Any]:
    return {
        "partition": found.partition,
        "owner": found.owner,
        "generation": found.generation,
        "is_open": found.is_open,
        "waiting": found.waiting,
        "replicas": {name: str(role) for name, role in sorted(found.replicas.items())},
        "counting": found.counting,
        "owned": None if found.said is None else asdict(found.said),
    }


def _error_json(error: WaltzError | None) -> dict[str, str] | None:
    return None if error is None else {"code": error.code, "message": error.message}
