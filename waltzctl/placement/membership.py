"""`waltzctl storage add`, `remove` and `replace`: which storages belong to a cluster.

Replicas move first and by themselves (`moving`); the document of a storage is written before anything is copied to it, and
taken away when no partition has anything there any more. Each command says what it will do from what there is, so that
running it again goes on from wherever it was stopped, or says that it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from waltzctl import completion
from waltzctl.change import Asked, Plan, changing
from waltzctl.job import Job, nothing_to_do, perform
from waltzctl.main import exit_codes
from waltzctl.placement.cluster import check_group, storage_of
from waltzctl.placement.creation import describe, reach_replicas
from waltzctl.placement.moving import Goals
from waltzctl.placement.relocation import Situation, carry_out, interrupted, plan_for, situation
from waltzctl.placement.terms import Terms, moving
from waltzctl.progress import Say
from waltzctl.reach import Reach, reaching
from waltzctl.safety import Danger
from waltzd.assignment import spell_numbers
from waltzd.cluster import Cluster
from waltzd.errors import (
    BadArgument,
    ChangedMeanwhile,
    ForeignCluster,
    NameInUse,
    TooFewStorages,
    Unsafe,
)
from waltzd.meta import StorageMeta
from waltzd.replica import StorageDescription
from waltzd.setting import parse_address
from waltzd.tls import Tls

# -- add ---------------------------------------------------------------------------------------------------------------


@click.command("add", epilog=exit_codes())
@click.argument("given", metavar="NAME=LISTEN,ADMIN[,GROUP]")
@click.option("--auto-assign", is_flag=True, help="Give it its share of the replicas, and wait until they are level.")
@moving
@changing
@reaching
def add(given: str, auto_assign: bool, reach: Reach, asked: Asked, output: str, terms: Terms) -> int:
    """Take a storage into the cluster. It must run, with the cluster's key and number of partitions in its configuration.
    With --auto-assign it gets its share of the replicas: it copies them while writing goes on, they become members when
    they are level, and then the ones that they stand for leave. To run this again goes on from where it was.

    \b
    Examples:
      waltzctl storage add storage-4=127.0.0.1:55480,127.0.0.1:55481 --dry-run
      waltzctl storage add storage-4=127.0.0.1:55480,127.0.0.1:55481,rack-2 --auto-assign --dry-run
    """
    storage = storage_of(given)

    async def prepare(cluster: Cluster) -> Job:
        now = await situation(cluster, reach.tls)
        first, said = await _newcomer(now, storage, reach.tls)
        goals = _with(now, storage) if auto_assign else {}
        plan = plan_for(now, goals, verb="storage add", subject=storage.name, newcomers={storage.name: said}, terms=terms)
        plan = replace(plan, steps=(*first, *plan.steps))

        async def do(cluster: Cluster, say: Say) -> Mapping[str, Any]:
            if first:
                await cluster.add_storage(storage)
            # Still from what the plan was made of: if that has changed meanwhile, nothing moves.
            return {"cleared": await carry_out(cluster, reach, now, goals, terms=terms, say=say) if goals else {}}

        return Job(plan=plan, do=do, interrupted=interrupted(now, goals) if now.changed(goals) else None)

    return perform(reach, asked, output, prepare)


async def _newcomer(now: Situation, storage: StorageMeta, tls: Tls | None) -> tuple[list[str], StorageDescription]:
    """What is to be done before it can get replicas, nothing when it is there already; and what it says of itself."""
    there = now.storages.get(storage.name)
    if there is not None and there != storage:
        raise NameInUse(
            f"the cluster has a storage {storage.name} already, at {there.listen}, {there.admin_listen}, in the group "
            f"{there.group}",
            next_step="choose another name; `waltzctl storage set` changes the addresses or the group of one that is there",
        )
    check_addresses(now, storage)
    said = await check_storage(now, storage, tls)
    return [] if there is not None else [f"write down {storage.name} at {storage.listen}, group {storage.group}"], said


def check_addresses(now: Situation, storage: StorageMeta) -> None:
    """No two names for one storage: what it acknowledged under both would be on one disk, and be taken for two."""
    for name, other in now.storages.items():
        if name != storage.name and {storage.listen, storage.admin_listen} & {other.listen, other.admin_listen}:
            raise NameInUse(
                f"{storage.listen} or {storage.admin_listen} is an address of the storage {name} already",
                next_step="give each storage addresses of its own",
            )


async def check_storage(now: Situation, storage: StorageMeta, tls: Tls | None) -> StorageDescription:
    """It answers at both addresses, belongs to this cluster, and is no other storage of it; what it says of itself."""
    meta = now.found.meta
    said = await describe(storage, tls)
    if said.cluster_key != meta.key:
        raise ForeignCluster(
            f"the storage at {storage.admin_listen} has the cluster key {said.cluster_key}; the cluster {meta.name} has "
            f"{meta.key}",
            not_done="nothing was changed",
            next_step=f"start it with `cluster_key: {meta.key}` and `partitions: {meta.partitions}`, in an empty directory",
        )
    if said.partitions != meta.partitions:
        raise BadArgument(
            f"the storage at {storage.admin_listen} was set up for {said.partitions} partitions; the cluster {meta.name} "
            f"has {meta.partitions}",
            next_step=f"start it with `partitions: {meta.partitions}`, in an empty directory",
        )
    _check_apart(now, storage, said)
    await reach_replicas(storage, meta.key, tls, said.instance)
    return said


def _check_apart(now: Situation, storage: StorageMeta, said: StorageDescription) -> None:
    for view in now.found.storages:
        if view.meta.name != storage.name and view.said is not None and said.is_same_as(view.said):
            raise NameInUse(
                f"the storage at {storage.admin_listen} is {view.meta.name}: both addresses lead to it",
                next_step=f"`waltzctl storage set {view.meta.name}` changes the addresses of one that is there",
            )


def _with(now: Situation, storage: StorageMeta) -> Goals:
    replication = {number: len(names) for number, names in now.goals.items()}
    return now.spread(now.groups | {storage.name: storage.group}, replication)


# -- remove ------------------------------------------------------------------------------------------------------------


@click.command("remove", epilog=exit_codes())
@click.argument("name", metavar="STORAGE", shell_complete=completion.storages)
@click.option("--fewer-replicas", is_flag=True, help="Where no other storage is left for a replica, do without it.")
@click.option("--delete-files", is_flag=True, help="Delete its files instead of setting them aside.")
@moving
@changing
@reaching
def remove(
    name: str,
    fewer_replicas: bool,
    delete_files: bool,
    reach: Reach,
    asked: Asked,
    output: str,
    terms: Terms,
) -> int:
    """Take a storage out of the cluster. Its replicas are copied to others first, and leave it when those are level; a
    partition always keeps its majority, or this is refused. The storage may be down: then the others copy from each other.
    To run this again goes on from where it was.

    \b
    Examples:
      waltzctl storage remove storage-3 --fewer-replicas --dry-run
      waltzctl storage remove storage-3 --fewer-replicas --dry-run -o json
    """

    async def prepare(cluster: Cluster) -> Job:
        now = await situation(cluster, reach.tls)
        if name not in now.storages and await was_taken_out(cluster, name):
            return nothing_to_do("storage remove", name)
        now.storage(name)
        goals = _without(now, name, fewer_replicas=fewer_replicas)
        plan = plan_for(
            now, goals, verb="storage remove", subject=name, more=[f"take {name} out of the list of storages"], terms=terms
        )
        plan = replace(plan, danger=max(plan.danger, Danger.TYPED if delete_files else Danger.ASK))

        async def do(cluster: Cluster, say: Say) -> Mapping[str, Any]:
            cleared = await carry_out(cluster, reach, now, goals, terms=terms, say=say, delete_files=delete_files)
            await take_out(cluster, name)
            return {"cleared": cleared}

        return Job(plan=plan, do=do, interrupted=interrupted(now, goals) if now.changed(goals) else None)

    return perform(reach, asked, output, prepare)


def _without(now: Situation, name: str, *, fewer_replicas: bool) -> dict[int, tuple[str, ...]]:
    groups = {other: group for other, group in now.groups.items() if other != name}
    replication = {number: len(names) for number, names in now.goals.items()}
    most = max(replication.values(), default=0)
    if most > len(groups):
        if not fewer_replicas or not groups:
            raise Unsafe(
                f"partitions have {most} replicas, and without {name} there are {len(groups)} storages",
                next_step="add a storage first, or say --fewer-replicas",
            )
        replication = {number: min(count, len(groups)) for number, count in replication.items()}
    return now.spread(groups, replication)


async def take_out(cluster: Cluster, name: str) -> None:
    """Out of the list of storages, unless somebody else has just decided to move something there."""
    while True:
        found, version = await cluster.moves()
        coming = [number for number, names in sorted(found.partitions.items()) if name in names]
        if coming:
            raise ChangedMeanwhile(
                f"somebody else moves partition {spell_numbers(coming)} to {name}",
                not_done=f"{name} stays in the list of storages",
                next_step="look with `waltzctl history`, then run this again if it is still meant",
            )
        try:
            return await cluster.remove_storage(name, moves=version)
        except ChangedMeanwhile:
            if name not in await cluster.storages():
                return  # somebody else was faster with the same
            if (await cluster.moves())[1] == version:
                raise


async def was_taken_out(cluster: Cluster, name: str, *, replaced_as: str | None = None) -> bool:
    """By a command that came to its end. `replaced_as`: by this very replacement."""
    done = [entry for _, entry in await cluster.history() if entry.outcome == "done"]
    if replaced_as is not None:
        return any((entry.verb, entry.subject) == ("storage replace", replaced_as) for entry in done)
    return any(
        (entry.verb == "storage remove" and entry.subject == name)
        or (entry.verb == "storage replace" and entry.subject.partition(" ")[0] == name)
        for entry in done
    )


# -- replace -----------------------------------------------------------------------------------------------------------


@click.command("replace", epilog=exit_codes())
@click.argument("old", metavar="OLD", shell_complete=completion.storages)
@click.argument("new", metavar="NEW[=LISTEN,ADMIN[,GROUP]]", shell_complete=completion.storages)
@click.option("--delete-files", is_flag=True, help="Delete the old one's files instead of setting them aside.")
@moving
@changing
@reaching
def replace_(old: str, new: str, delete_files: bool, reach: Reach, asked: Asked, output: str, terms: Terms) -> int:
    """Let one storage stand for another: each replica on OLD is copied to NEW, and nothing else moves. OLD may be down. NEW
    is a storage of the cluster, or is added, in the group of OLD unless another one is given. To run this again goes on
    from where it was.

    \b
    Examples:
      waltzctl storage replace storage-3 storage-4=127.0.0.1:55480,127.0.0.1:55481 --dry-run
      waltzctl storage replace storage-3 storage-4=127.0.0.1:55480,127.0.0.1:55481,rack-2 --dry-run
    """

    given = storage_of(new) if "=" in new else None
    subject = f"{old} {new.partition('=')[0]}"

    async def prepare(cluster: Cluster) -> Job:
        now = await situation(cluster, reach.tls)
        if old not in now.storages and await was_taken_out(cluster, old, replaced_as=subject):
            return nothing_to_do("storage replace", subject)
        now.storage(old)
        storage, first, newcomers = await _successor(now, old, new, given, reach.tls)
        _check_distinct(now, old, storage.name)
        goals = _instead(now, old, storage.name)
        last = [f"take {old} out of the list of storages"]
        plan = plan_for(now, goals, verb="storage replace", subject=subject, more=last, newcomers=newcomers, terms=terms)
        plan = replace(
            plan,
            steps=(*first, *plan.steps),
            danger=max(plan.danger, Danger.TYPED if delete_files else Danger.ASK),
        )

        async def do(cluster: Cluster, say: Say) -> Mapping[str, Any]:
            if first:
                await cluster.add_storage(storage)
            cleared = await carry_out(cluster, reach, now, goals, terms=terms, say=say, delete_files=delete_files)
            await take_out(cluster, old)
            return {"cleared": cleared}

        return Job(plan=plan, do=do, interrupted=interrupted(now, goals) if now.changed(goals) else None)

    return perform(reach, asked, output, prepare)


async def _successor(
    now: Situation, old: str, new: str, given: StorageMeta | None, tls: Tls | None
) -> tuple[StorageMeta, list[str], dict[str, StorageDescription]]:
    if given is None:
        return now.storage(new), [], {}
    storage = given
    if storage.group == storage.name and old in now.storages and new.count(",") == 1:
        storage = replace(storage, group=now.storages[old].group)
    first, said = await _newcomer(now, storage, tls)
    return storage, first, {storage.name: said}


def _instead(now: Situation, old: str, new: str) -> dict[int, tuple[str, ...]]:
    return {number: tuple(sorted(new if name == old else name for name in names)) for number, names in now.goals.items()}


def _check_distinct(now: Situation, old: str, new: str) -> None:
    """One that has a replica of the same partition already cannot stand for another."""
    if old == new:
        raise BadArgument(f"{old} cannot stand for itself; `waltzctl storage recover {old}` brings back what it lost")
    both = [number for number, names in sorted(now.goals.items()) if old in names and new in names]
    if both:
        raise TooFewStorages(
            f"{new} has a replica of partition {both[0]} already and cannot stand for {old} there",
            not_done="nothing was changed",
            next_step=f"use a storage that has none, or `waltzctl storage remove {old}`, which spreads its replicas",
        )


# -- set ---------------------------------------------------------------------------------------------------------------


@click.command("set", epilog=exit_codes())
@click.argument("name", metavar="STORAGE", shell_complete=completion.storages)
@click.option("--listen", metavar="HOST:PORT", help="Where servers find it.")
@click.option("--admin-listen", metavar="HOST:PORT", help="Where operators find it.")
@click.option("--group", metavar="NAME", help="What it may fail together with.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="For people, or for scripts.")
@changing
@reaching
def set_(
    name: str,
    listen: str | None,
    admin_listen: str | None,
    group: str | None,
    reach: Reach,
    asked: Asked,
    output: str,
) -> int:
    """Write down other addresses or another group of a storage: its name says which one it is. It must answer at the new
    addresses, and belong to this cluster.

    \b
    Examples:
      waltzctl storage set storage-1 --group rack-1 --dry-run
      waltzctl storage set storage-1 --group rack-1 --yes
    """

    given = {"listen": listen, "admin_listen": admin_listen, "group": group}
    _check_words(given)

    async def prepare(cluster: Cluster) -> Job:
        now = await situation(cluster, reach.tls)
        before = now.storage(name)
        after = replace(before, **{field: value for field, value in given.items() if value is not None})
        if (after.listen, after.admin_listen) != (before.listen, before.admin_listen):
            check_addresses(now, after)
            await check_storage(now, after, reach.tls)
        steps = [
            f"{field.replace('_', ' ')}: {getattr(before, field)} becomes {getattr(after, field)}"
            for field in given
            if getattr(before, field) != getattr(after, field)
        ]
        plan = Plan(verb="storage set", subject=name, steps=tuple(steps))

        async def do(cluster: Cluster, _say: Say) -> Mapping[str, Any]:
            await cluster.update_storage(after, before=before)
            return {}

        return Job(plan=plan, do=do)

    return perform(reach, asked, output, prepare)


def _check_words(given: Mapping[str, str | None]) -> None:
    """What a person may have mistyped."""
    for field, value in given.items():
        option = "--" + field.replace("_", "-")
        if value is None:
            continue
        if field == "group":
            check_group(value, option)
        else:
            try:
                parse_address(value)
            except ValueError as error:
                raise BadArgument(f"{option} {value}: {error}", next_step="write it as host:port") from error
