"""`waltzctl storage add`, `remove` and `set`: which storages belong to a cluster.

Replicas are moved by `mover`. The document of a storage is written before anything is copied to it, and deleted when no
partition has a replica there any more. Each command plans from the present state, so running it again resumes, or reports
that nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from typer import Argument, Option

from waltzctl.placement.creation import check_formats, check_group, describe, reach_replicas, storage_of
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.mover import MoveOptions, Moving, Wish, perform_moves, placement_state
from waltzctl.placement.replica_moves import Goals, MovePlan, PlacementState
from waltzctl.shell.change import Change, ChangeCommand
from waltzctl.shell.cluster_target import StorageName, known_storages, option
from waltzctl.shell.options import Misused
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Plan
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import StorageMeta
from waltzd.errors import BadArgument, ForeignCluster
from waltzd.errors.operations import GroupLogRefused, NameInUse, Unsafe
from waltzd.protocol.address import parse_address
from waltzd.protocol.descriptions import StorageDescription
from waltzd.wire.tls import Tls

REPLACED = "storage remove --replacement"
"""Verb of a replacement in the history; earlier versions wrote `storage replace`."""

# -- add ---------------------------------------------------------------------------------------------------------------


def add(
    *,
    given: Annotated[str, Argument(metavar="NAME=LISTEN,ADMIN[,GROUP]")],
    auto_assign: Annotated[
        bool, Option("--auto-assign", help="Assign it its share of the replicas, and wait until they are level.")
    ] = False,
    options: Moving,
    command: ChangeCommand,
) -> int:
    """Add a storage to the cluster. It must run, with the cluster's key and number of partitions in its configuration. With
    --auto-assign it gets its share of the replicas: it copies them while clients write, they become members when they are
    level, then the replicas that they replace are removed. If the command is interrupted, run it again: it resumes.

    \b
    Examples:
      waltzctl storage add storage-4=127.0.0.1:55480,127.0.0.1:55481 --dry-run
      waltzctl storage add storage-4=127.0.0.1:55480,127.0.0.1:55481,rack-2 --auto-assign --dry-run
    """
    storage = storage_of(given)

    async def find_wish(_cluster: Cluster, now: PlacementState) -> Wish:
        reported = await _newcomer(now, storage, command.target.tls)
        return lambda now: addition(now, storage, reported, spreads=auto_assign)

    return perform_moves(command, options, find_wish)


def addition(now: PlacementState, storage: StorageMeta, reported: StorageDescription | None, *, spreads: bool) -> MovePlan:
    replication = {number: len(names) for number, names in now.goals.items()}
    goals = now.spread(now.groups | {storage.name: storage.group}, replication) if spreads else {}
    return MovePlan(
        now=now, verb="storage add", subject=storage.name, goals=goals, newcomer=storage, newcomer_says=reported
    )


async def _newcomer(now: PlacementState, storage: StorageMeta, tls: Tls | None) -> StorageDescription:
    """Return the description of a storage to add; raise if it cannot belong to the cluster."""
    there = now.storages.get(storage.name)
    if there is not None and there != storage:
        raise NameInUse(
            f"the cluster has a storage {storage.name} already, at {there.listen}, {there.admin_listen}, in the group "
            f"{there.group}",
            next_step="choose another name; `waltzctl storage set` changes the addresses or the group of one that is there",
        )
    check_addresses(now, storage)
    return await check_storage(now, storage, tls)


def check_addresses(now: PlacementState, storage: StorageMeta) -> None:
    """Refuse two names for one storage: its acknowledgements under both names would be on one disk, and count twice."""
    for name, other in now.storages.items():
        if name != storage.name and {storage.listen, storage.admin_listen} & {other.listen, other.admin_listen}:
            raise NameInUse(
                f"{storage.listen} or {storage.admin_listen} is an address of the storage {name} already",
                next_step="give each storage addresses of its own",
            )


async def check_storage(now: PlacementState, storage: StorageMeta, tls: Tls | None) -> StorageDescription:
    """Return the description of a storage; raise unless it answers at both addresses, belongs to this cluster, and is
    no other storage of it."""
    meta = now.found.meta
    reported = await describe(storage, tls)
    if reported.cluster_key != meta.key:
        raise ForeignCluster(
            f"the storage at {storage.admin_listen} has the cluster key {reported.cluster_key}; the cluster "
            f"{meta.name} has {meta.key}",
            not_done="nothing was changed",
            next_step=f"start it with `cluster_key: {meta.key}` and `partitions: {meta.partitions}`, in an empty directory",
        )
    if reported.partitions != meta.partitions:
        raise BadArgument(
            f"the storage at {storage.admin_listen} was set up for {reported.partitions} partitions; the cluster "
            f"{meta.name} has {meta.partitions}",
            next_step=f"start it with `partitions: {meta.partitions}`, in an empty directory",
        )
    if now.found.group_log is not None and not reported.keeps_group_log:
        raise GroupLogRefused(
            f"{storage.name} cannot hold the group log of the cluster {meta.name}: too old a version of Waltz runs there",
            next_step="bring it to the version of the other storages; then run this again",
        )
    for view in now.found.storages:
        if view.meta.name != storage.name and view.reported is not None and reported.is_same_as(view.reported):
            raise NameInUse(
                f"the storage at {storage.admin_listen} is {view.meta.name}: both addresses lead to it",
                next_step=f"`waltzctl storage set {view.meta.name}` changes its addresses",
            )
    check_formats({storage.name: reported}, meta.format)
    await reach_replicas(storage, meta.key, tls, reported.instance)
    return reported


# -- remove ------------------------------------------------------------------------------------------------------------


def remove(
    *,
    name: StorageName,
    fewer_replicas: Annotated[
        bool, Option("--fewer-replicas", help="Drop a replica for which no other storage is left.")
    ] = False,
    new: Annotated[
        str | None,
        Option(
            "--replacement",
            metavar="NEW[=LISTEN,ADMIN[,GROUP]]",
            help="Copy all its replicas to this storage, and move no others.",
            autocompletion=known_storages,
        ),
    ] = None,
    delete_files: Annotated[bool, Option("--delete-files", help="Delete its files instead of setting them aside.")] = False,
    options: Moving,
    command: ChangeCommand,
) -> int:
    """Remove a storage from the cluster. Its replicas are first copied to other storages, and removed when the copies are
    level. The command is refused if a partition would lose its majority. The storage may be down: then the others copy from
    each other. If the command is interrupted, run it again: it resumes.

    With --replacement each replica is copied to NEW, and no other replica moves. NEW is a storage of the cluster, or is
    added, in the group of the removed storage unless a GROUP is given.

    \b
    Examples:
      waltzctl storage remove storage-3 --fewer-replicas --dry-run
      waltzctl storage remove storage-3 --fewer-replicas --dry-run -o json
      waltzctl storage remove storage-3 --replacement storage-4=127.0.0.1:55480,127.0.0.1:55481 \\
        --dry-run
    """
    if new is not None:
        if fewer_replicas:
            raise Misused("--fewer-replicas does not go with --replacement, which keeps the number of replicas.")
        return _replace(name, new, options, command, deletes_files=delete_files)

    async def find_wish(cluster: Cluster, now: PlacementState) -> Wish:
        if name not in now.storages and await was_taken_out(cluster, name):
            return lambda now: MovePlan(now=now, verb="storage remove", subject=name)
        return lambda now: removal(now, name, fewer_replicas=fewer_replicas, deletes_files=delete_files)

    return perform_moves(command, options, find_wish)


def removal(now: PlacementState, name: str, *, fewer_replicas: bool, deletes_files: bool = False) -> MovePlan:
    now.storage(name)
    groups = {other: group for other, group in now.groups.items() if other != name}
    replication = {number: len(names) for number, names in now.goals.items()}
    most = max(replication.values(), default=0)
    if most > len(groups):
        if not fewer_replicas or not groups:
            raise Unsafe(
                f"partitions have {most} replicas, and without {name} there are {len(groups)} storages",
                next_step="add a storage first, or give --fewer-replicas",
            )
        replication = {number: min(count, len(groups)) for number, count in replication.items()}
    return MovePlan(
        now=now, verb="storage remove", subject=name, goals=now.spread(groups, replication), leaver=name,
        deletes_files=deletes_files,
    )  # fmt: skip


async def was_taken_out(cluster: Cluster, name: str, *, replaced_as: str | None = None) -> bool:
    """Return whether a finished command removed the storage; with `replaced_as`, whether it was this replacement."""
    done = [entry for _, entry in await cluster.history() if entry.outcome == "done"]
    replaced = [entry.subject for entry in done if entry.verb in (REPLACED, "storage replace")]
    if replaced_as is not None:
        return replaced_as in replaced
    was_removed = any((entry.verb, entry.subject) == ("storage remove", name) for entry in done)
    return was_removed or any(subject.partition(" ")[0] == name for subject in replaced)


# -- replace -----------------------------------------------------------------------------------------------------------


def _replace(old: str, new: str, options: MoveOptions, command: ChangeCommand, *, deletes_files: bool) -> int:
    given, tls = storage_of(new) if "=" in new else None, command.target.tls
    subject = f"{old} {new.partition('=')[0]}"

    async def find_wish(cluster: Cluster, now: PlacementState) -> Wish:
        if old not in now.storages and await was_taken_out(cluster, old, replaced_as=subject):
            return lambda now: MovePlan(now=now, verb=REPLACED, subject=subject)
        group = now.storage(old).group
        if given is None:
            return lambda now: replacement(now, old, now.storage(new), None, deletes_files=deletes_files)
        storage = replace(given, group=group) if given.group == given.name and new.count(",") == 1 else given
        reported = await _newcomer(now, storage, tls)
        return lambda now: replacement(now, old, storage, reported, deletes_files=deletes_files)

    return perform_moves(command, options, find_wish)


def replacement(
    now: PlacementState, old: str, storage: StorageMeta, reported: StorageDescription | None, *, deletes_files: bool = False
) -> MovePlan:
    now.storage(old)
    new = storage.name
    if old == new:
        raise BadArgument(f"{old} cannot replace itself; `waltzctl storage recover {old}` recovers its replicas")
    both = [number for number, names in sorted(now.goals.items()) if old in names and new in names]
    if both:
        raise BadArgument(
            f"{new} has a replica of partition {both[0]} already and cannot replace {old} there",
            not_done="nothing was changed",
            next_step=f"use a storage that has none, or `waltzctl storage remove {old}`, which spreads its replicas",
        )
    goals: Goals = {
        number: tuple(sorted(new if name == old else name for name in names)) for number, names in now.goals.items()
    }
    return MovePlan(
        now=now, verb=REPLACED, subject=f"{old} {new}", goals=goals, newcomer=storage, newcomer_says=reported,
        leaver=old, deletes_files=deletes_files,
    )  # fmt: skip


# -- set ---------------------------------------------------------------------------------------------------------------


def set_(
    *,
    name: StorageName,
    listen: Annotated[str | None, Option("--listen", metavar="HOST:PORT", help="Address for servers.")] = None,
    admin_listen: Annotated[
        str | None, Option("--admin-listen", metavar="HOST:PORT", help="Address for operators.")
    ] = None,
    group: Annotated[str | None, Option("--group", metavar="NAME", help="Failure group.")] = None,
    command: ChangeCommand,
) -> int:
    """Change the addresses or the failure group of a storage. It must answer at the new addresses, and belong to this
    cluster.

    \b
    Examples:
      waltzctl storage set storage-1 --group rack-1 --dry-run
      waltzctl storage set storage-1 --group rack-1 --yes
    """
    given = {"listen": listen, "admin_listen": admin_listen, "group": group}
    _check_words(given)

    async def prepare(cluster: Cluster) -> Change:
        now = await placement_state(cluster, Daemons(command.target.tls))
        before = now.storage(name)
        after = replace(before, **{field: value for field, value in given.items() if value is not None})
        if (after.listen, after.admin_listen) != (before.listen, before.admin_listen):
            check_addresses(now, after)
            await check_storage(now, after, command.target.tls)
        steps = [
            f"{field.replace('_', ' ')}: {getattr(before, field)} becomes {getattr(after, field)}"
            for field in given
            if getattr(before, field) != getattr(after, field)
        ]
        plan = Plan(verb="storage set", subject=name, steps=tuple(steps))

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            await cluster.update_storage(after, before=before)
            return {}

        return Change(plan=plan, do=do)

    return command.perform(prepare)


def _check_words(given: Mapping[str, str | None]) -> None:
    """Check what a person may have mistyped."""
    for field, value in given.items():
        if value is None:
            continue
        if field == "group":
            check_group(value, option(field))
            continue
        try:
            parse_address(value)
        except ValueError as error:
            raise BadArgument(f"{option(field)} {value}: {error}", next_step="write it as host:port") from error
