"""`waltzctl storage`: which storages belong to a cluster, what each of them holds, and the repair of its replicas.

A storage is given by its name in the cluster, or, for what concerns one running storage only, by the address of its admin
port (`admin_listen` in its configuration), which needs no cluster. The cluster key is read from the storage itself; with
`--key` a storage of another cluster is refused.

By name, a change is like any change of a cluster: it is known what the partitions can lose, so there is a plan, a
confirmation and an entry in the history, and a dangerous change is refused. By address nothing is known of the other
replicas and nothing is recorded: that is for storages that belong to no cluster yet, or not any more.

Replicas are moved by `mover`. The document of a storage is written before anything is copied to it, and deleted when no
partition has a replica there any more.

While a storage runs, the owners of its partitions repair its replicas: they make empty ones, heal segments, copy, and count
them again. `storage recover` follows them, and acts only where an owner may not: it sets aside what a storage refuses or
what cannot be healed, if the other replicas hold a majority without it. Setting a forgotten replica aside is riskier than
taking a replica offline: if no owner confirms that a majority holds everything without it, for example because no server
runs, it may be the replica that is needed.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar
from uuid import UUID

from typer import Argument, Option

from waltzctl.placement import creation
from waltzctl.placement.creation import check_formats, check_group, reach_replicas, storage_of
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.mover import MoveOptions, Moving, Throttle, Wish, perform_moves, placement_state
from waltzctl.placement.replica_moves import Goals, MovePlan, PlacementState, holds_anything
from waltzctl.shell.change import Change, ChangeCommand, ConfirmOptions
from waltzctl.shell.cluster_target import (
    ClusterOptions,
    CommandTarget,
    StorageName,
    check_operator,
    first_contact,
    known_storages,
    option,
    unknown,
    using,
)
from waltzctl.shell.interruption import interruptible
from waltzctl.shell.numbers import NAMED_MAX, chosen, first_few, format_partitions, partitions_of
from waltzctl.shell.options import From, Key, Misused, Output
from waltzctl.shell.progress import Amount, Report
from waltzctl.shell.safety import Danger, Effect, Plan, danger, needed, without
from waltzctl.show import storage as shown_storage
from waltzctl.show.cluster import storages
from waltzctl.show.forms import AnyForm, put
from waltzctl.show.terminal import size
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView, silence
from waltzctl.snapshot.collector import snapshot_of
from waltzd.client import loop
from waltzd.cluster.cluster import NO_VERSION, Cluster, check_addresses, replicas_path
from waltzd.cluster.documents import Membership, PartitionMeta, StorageMeta
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, EXIT_PARTIAL, BadArgument, ForeignCluster, NoSuchPartition, WaltzError
from waltzd.errors.operations import ChangedMeanwhile, GroupLogRefused, NameInUse, Unfinished, Unsafe
from waltzd.format.finding import Finding
from waltzd.format.layout import aside_partition
from waltzd.protocol.address import parse_address
from waltzd.protocol.channels import named_in
from waltzd.protocol.descriptions import DIVERGED, PartitionDescription, SetAside, StorageDescription, VerifySummary
from waltzd.wire.storages import AdminClient
from waltzd.wire.tls import Tls

T = TypeVar("T")
REPLACED = "storage remove --replacement"
"""Verb of a replacement in the history; earlier versions wrote `storage replace`."""
VERB = "storage recover"
GIVEN_UP = "GIVEN_UP"
"""State in which an owner sees a replica that cannot be healed, or that a rescue gave up
(`waltzd.server.session.replicated_log`)."""
NO_KEY = UUID(int=0)
KEPT_MS = 24 * 3600 * 1000
"""Milliseconds; files set aside more recently may belong to a mistake that was not noticed yet."""
LEFT = "Interrupted. The storage may still carry out the command: look with `waltzctl storage describe`."
Metas = Mapping[int, PartitionMeta | None]


@dataclass(frozen=True, kw_only=True)
class SelectedStorage:
    """Storage selected by its name or its address."""

    place: StorageName
    key: Key = None
    given: ClusterOptions

    @property
    def is_address(self) -> bool:
        return ":" in self.place

    def numbers(self, text: str) -> list[int]:
        if not self.is_address:
            return chosen(self.given.target(), text)
        if named_in(text):
            raise Misused("Channels are defined by the cluster: give the name of the storage, not its address.")
        return partitions_of(text)

    def ask(self, action: Callable[[AdminClient, StorageDescription], Awaitable[T]]) -> T:
        """Ask the storage for its identity, then run the action with its key."""
        name = None if self.is_address else self.place
        address, tls = (self.place, self.given.tls()) if name is None else self._found(name)

        async def run() -> T:
            async with (
                AdminClient(address, NO_KEY, seconds=10, tls=tls, name=name) as stranger,
                first_contact(address, tls),
            ):
                description = await stranger.describe()
            if self.key is not None and self.key != description.cluster_key:
                raise ForeignCluster(f"{address} belongs to the cluster {description.cluster_key}, not to {self.key}")
            async with AdminClient(address, description.cluster_key, tls=tls, name=name) as admin:
                return await action(admin, description)

        return loop.run(run())

    def _found(self, name: str) -> tuple[str, Tls | None]:
        target = self.given.target()
        there = using(target, Cluster.storages)
        if name not in there:
            raise unknown("storage", name, there)
        return there[name].admin_listen, target.tls


AnyStorage = Annotated[SelectedStorage, From(SelectedStorage)]


async def _itself(_client: AdminClient, description: StorageDescription) -> StorageDescription:
    return description


# -- looking -----------------------------------------------------------------------------------------------------------


def list_(*, target: CommandTarget, output: AnyForm = "table") -> int:
    """List the storages of a cluster: addresses, failure group, and state.

    \b
    Examples:
      waltzctl storage list
      waltzctl storage list -o name
    """
    put(storages(snapshot_of(target)), output)
    return EXIT_OK


def describe(*, place: AnyStorage, output: AnyForm = "table") -> int:
    """Show a running storage: its cluster, its partitions with their marks, and its counters since the start. STORAGE is
    its name, or its admin address.

    \b
    Examples:
      waltzctl storage describe storage-1
      waltzctl storage describe 127.0.0.1:55281 -o json
    """
    put(shown_storage.description(place.ask(_itself)), output)
    return EXIT_OK


def verify(
    *,
    place: AnyStorage,
    numbers: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    output: AnyForm = "table",
) -> int:
    """Verify the files of a running storage: every record that is on its disk now. Appends continue. The owner of a
    partition repairs damage from the other replicas. Exit code 8 if damage was found.

    \b
    Examples:
      waltzctl storage verify storage-1
      waltzctl storage verify 127.0.0.1:55281 0-1 -o json
    """
    wanted = place.numbers(numbers) if numbers else []
    check_operator(place.given.tls(), "have files checked, which begins to heal what is damaged")

    async def ask(client: AdminClient, _: Any) -> tuple[list[Finding], list[VerifySummary]]:
        found = [one async for one in client.verify(wanted)]
        return (
            [one for one in found if isinstance(one, Finding)],
            [one for one in found if not isinstance(one, Finding)],
        )

    findings, summaries = place.ask(ask)
    put(shown_storage.verification(findings, summaries), output)
    return EXIT_FINDINGS if findings else EXIT_OK


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
    check_addresses(now.storages, storage)
    return await check_storage(now, storage, tls)


async def check_storage(now: PlacementState, storage: StorageMeta, tls: Tls | None) -> StorageDescription:
    """Return the description of a storage; raise unless it answers at both addresses, belongs to this cluster, and is
    no other storage of it."""
    meta = now.found.meta
    reported = await creation.describe(storage, tls)
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
        is_elsewhere = (after.listen, after.admin_listen) != (before.listen, before.admin_listen)
        margins = list[Effect]()
        if is_elsewhere:
            check_addresses(now.storages, after)
            margins = _lost_by_moving(now, name, await check_storage(now, after, command.target.tls))
        steps = [
            f"{field.replace('_', ' ')}: {getattr(before, field)} becomes {getattr(after, field)}"
            for field in given
            if getattr(before, field) != getattr(after, field)
        ]
        plan = Plan(
            verb="storage set", subject=name, steps=tuple(steps), margins=tuple(margins), danger=danger(margins),
            unsafe=needed(margins, name),
        )  # fmt: skip

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            if is_elsewhere:  # another operator may have given these addresses away meanwhile
                check_addresses(await cluster.storages(), after)
            await cluster.update_storage(after, before=before)
            return {}

        return Change(plan=plan, do=do)

    return command.perform(prepare)


def _lost_by_moving(now: PlacementState, name: str, there: StorageDescription) -> list[Effect]:
    """Return the effect on partitions whose replicas on this storage answer, and are not those `there`, at its new
    addresses: another storage with the key of the cluster, or a directory that was made anew."""
    found = {one.partition: one.status.incarnation for one in there.assigned if one.status is not None}
    reported = now.found.storage(name).reported
    return [
        without(one.partition, now.roles(one.partition), now.found.level(one.partition), silent=[name])
        for one in (() if reported is None else reported.assigned)
        if one.status is not None
        and one.status.incarnation != found.get(one.partition)
        and name in now.roles(one.partition)
    ]


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


# -- single replicas ---------------------------------------------------------------------------------------------------


def availability(
    *,
    on: AnyStorage,
    confirmation: ConfirmOptions,
    output: Output = "table",
    numbers: Annotated[str, Argument(metavar="PARTITIONS")],
    online: Annotated[bool | None, Option("--online/--offline", help="New state. Give one of the two.")] = None,
) -> int:
    """Take replicas of PARTITIONS on a storage offline, or online again. A replica that is offline refuses every
    session. If the storage is given by name, the command is refused if a partition would lose its majority; if it is
    given by address, the other replicas are not checked.

    \b
    Examples:
      waltzctl storage availability 127.0.0.1:55281 0-1 --offline
      waltzctl storage availability 127.0.0.1:55281 0-1 --online
    """
    wanted = on.numbers(numbers)
    if online is None:
        raise Misused("Give --online or --offline.")
    if on.is_address:
        return _switch_at_once(on, wanted, confirmation, output, is_online=online)
    is_online, done = online, "online" if online else "offline"
    name, target = on.place, on.given.target()
    daemons = Daemons(target.tls)

    async def prepare(cluster: Cluster) -> Change:
        now = await placement_state(cluster, daemons)
        storage, meta = now.storage(name), now.found.meta
        now.check_partitions(wanted)
        if on.key is not None and on.key != meta.key:
            raise ForeignCluster(f"{name} belongs to the cluster {meta.name}, {meta.key}, not to {on.key}")

        async def do(_cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            async with daemons.admin(meta.key, storage) as admin:
                results = await admin.set_available(wanted, is_online)
            _check_all(results, done)
            return shown_storage.results(results, done).document

        return Change(plan=switching(now, name, wanted, is_online=is_online), do=do, is_planned_again=True)

    return ChangeCommand(confirmation=confirmation, target=target, output=output).perform(prepare)


def _switch_at_once(
    on: SelectedStorage, wanted: list[int], confirmation: ConfirmOptions, output: str, *, is_online: bool
) -> int:
    """Return the exit code; partial success has a code of its own."""
    check_operator(on.given.tls(), "change a storage")
    if confirmation.is_dry or confirmation.reason or confirmation.confirm or confirmation.override:
        raise Misused(
            "--dry-run, --reason, --confirm and --override need the name of a storage: by an address, the other "
            "storages are not known."
        )
    with interruptible(LEFT):
        results = on.ask(lambda admin, _: admin.set_available(wanted, is_online))
    put(shown_storage.results(results, "online" if is_online else "offline"), output)
    if output == "table":
        shown_storage.print_refusals(results)
    errors = [error for error in results.values() if error is not None]
    if not errors:
        return EXIT_OK
    return errors[0].exit_code if len(errors) == len(results) else EXIT_PARTIAL


def _check_all(results: Mapping[int, WaltzError | None], done: str) -> None:
    refused = {number: error for number, error in results.items() if error is not None}
    if refused:
        number, error = next(iter(refused.items()))
        others = [other for other in results if other not in refused]
        also = f"; {format_partitions(others, 'is', 'are')}" if others else ""
        raise type(error)(
            f"partition {number}: {error.message}",
            not_done=f"{format_partitions(refused, 'is', 'are')} not {done}{also}",
            next_step=error.detail_next_step,
        )


def switching(now: PlacementState, name: str, chosen: Sequence[int], *, is_online: bool) -> Plan:
    steps = [
        without(number, roles, now.found.level(number), silent=[name])
        for number in chosen
        if name in (roles := now.roles(number)) and not is_online
    ]
    words = f"take {format_partitions(chosen)} {'online' if is_online else 'offline'} on {name}"
    return Plan(verb="storage availability", subject=name, steps=(words,), margins=tuple(steps), danger=danger(steps))


def answering(found: ClusterSnapshot, name: str, *, next_step: str | None = None) -> StorageDescription:
    """Return the description of the storage; raise if it does not answer."""
    view = found.storage(name)
    if view.reported is None:
        assert view.error is not None
        raise type(view.error)(
            f"the storage {name} {silence(view.error)}: {view.error.message}",
            not_done="nothing was changed",
            next_step=next_step or view.error.detail_next_step,
        )
    return view.reported


# -- recover -----------------------------------------------------------------------------------------------------------


def recover(
    *,
    place: Annotated[str, Argument(metavar="STORAGE", autocompletion=known_storages)],
    numbers: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    is_clean: Annotated[
        bool, Option("--clean", help="Only remove unassigned replicas and files that were set aside; recover nothing.")
    ] = False,
    options: Moving,
    confirmation: ConfirmOptions,
    given: ClusterOptions,
    output: Output = "table",
) -> int:
    """Recover replicas whose disk was lost or damaged.

    Start the storage first, on an empty or on the damaged disk. The command waits until all its replicas, or those of
    PARTITIONS, count for the majority again. Owners copy and repair replicas by themselves. A replica that the storage
    refuses, or that no owner can repair, is first set aside if its partition has a majority without it. If the command is
    interrupted, run it again: it resumes.

    With --clean, set aside replicas that are not assigned to the storage, and delete files that were set aside before. This
    is refused while a partition of these files takes no transactions, because they may be needed. Files that were set aside
    less than a day ago need the name of the storage as confirmation.

    \b
    Examples:
      waltzctl storage recover storage-1
      waltzctl storage recover storage-1 0-1 --dry-run
      waltzctl storage recover storage-1 --clean --dry-run
    """
    command = ChangeCommand(confirmation=confirmation, target=given.target(), output=output)
    if is_clean and numbers is not None:
        raise Misused("--clean is for a whole storage.")
    return tidy(command, place) if is_clean else _recover(command, place, numbers, options)


class State(enum.StrEnum):
    COUNTS = "counts"
    COMES = "comes"
    """The owner is copying to the replica."""
    LOST = "lost"
    """Damaged or refused beyond repair: the replica is restored only after its files were set aside."""
    OFFLINE = "offline"


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """State of one replica, with the reason."""

    state: State
    why: str
    held: int | None = None
    """Last id that it holds, as its owner knows it; None if unknown."""


def replica_state(name: str, view: PartitionView, there: PartitionDescription | None) -> ReplicaState:
    """Judge one replica. `there`: the report of the storage; None if it has no replica."""
    ours = next((replica for replica in view.reported.replicas if replica.storage == name), None) if view.reported else None
    held = ours.durable_id if ours is not None else None
    status = there.status if there is not None else None
    if there is not None and there.refused is not None:
        return ReplicaState(state=State.LOST, why=there.refused.message)
    if status is not None and not status.is_available:
        return ReplicaState(state=State.OFFLINE, why="it was taken offline by an operator", held=held)
    if ours is None:
        return ReplicaState(state=State.COMES, why=view.waiting or f"{view.owner} has not heard of it yet")
    if status is None:  # its owner may not have noticed yet
        return ReplicaState(state=State.COMES, why="its owner will make it there", held=held)
    # Damaged, given up by a rescue, or of another history: while its owner waits for other replicas there is hope; with
    # a level replica beside it, there is none.
    if ours.state in (GIVEN_UP, DIVERGED) and view.owner_says_open and view.counted - {name}:
        return ReplicaState(state=State.LOST, why=ours.story, held=held)
    counts = status.is_sound and ours.counts
    return ReplicaState(state=State.COUNTS if counts else State.COMES, why=ours.story, held=held)


def plan_for(name: str, found: ClusterSnapshot, replica_states: Mapping[int, ReplicaState]) -> Plan:
    """Plan a step for each replica that does not count: set it aside, or wait for it."""
    steps, margins = list[str](), list[Effect]()
    for number, one in replica_states.items():
        view = found.partitions[number]
        if one.state is State.LOST:
            steps.append(f"partition {number}: set it aside on {name}, recreate and copy it; {one.why}")
            owner = view.reported.replicas if view.reported is not None else ()
            # An owner may not have noticed yet that this replica is lost, and counts it.
            level = found.level(number) | {one.storage for one in owner if one.counts and one.storage == name}
            margins.append(without(number, view.replicas, level, silent=[name]))
        elif one.state is not State.COUNTS:
            steps.append(f"partition {number}: wait for its owner; {one.why}")
    return Plan(
        verb=VERB,
        subject=name,
        steps=tuple(steps),
        margins=tuple(margins),
        danger=Danger.ASK if margins else Danger.NONE,
        unsafe=needed(margins, name),
    )


def _recover(command: ChangeCommand, name: str, numbers: str | None, options: MoveOptions) -> int:
    wanted = chosen(command.target, numbers) if numbers is not None else None
    daemons = Daemons(command.target.tls)

    async def prepare(cluster: Cluster) -> Change:
        now = await placement_state(cluster, daemons)
        storage = now.storage(name)
        there = _replicas_of(now, name, wanted)
        replica_states = _replica_states(name, now.found, there)
        lost = [number for number, one in replica_states.items() if one.state is State.LOST]

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            aside: list[int] = []
            if lost:
                # Since the plan was shown other replicas may be lost, or these may count again.
                found = await daemons.take_snapshot(cluster)
                states = _replica_states(name, found, lost)
                plan = plan_for(name, found, states)
                if plan.refusals and command.confirmation.override != name:
                    raise Unsafe(f"{VERB} {name}: the cluster changed after the plan was made: {'; '.join(plan.refusals)}")
                aside = [number for number, one in states.items() if one.state is State.LOST]
            if aside:
                async with daemons.admin(now.found.meta.key, storage) as admin:
                    results = await admin.remove_partitions(aside)
                for error in results.values():
                    if error is not None and not isinstance(error, NoSuchPartition):  # else it was set aside already
                        raise error
            after = await _follow(cluster, daemons, name, there, aside, options, report)
            replicas = [{"partition": number, "last_id": one.held, "state": one.state} for number, one in after.items()]
            return {"set_aside": aside, "replicas": replicas}

        return Change(plan=plan_for(name, now.found, replica_states), do=do, is_change=bool(lost))

    return command.perform(prepare)


def _replicas_of(now: PlacementState, name: str, wanted: list[int] | None) -> list[int]:
    there = [number for number, roles in sorted(now.sets.partitions.items()) if name in roles]
    if wanted is None:
        return there
    now.check_partitions(wanted)
    strange = [number for number in wanted if number not in there]
    if strange:
        raise NoSuchPartition(
            f"partition {strange[0]} has no replica on {name}",
            not_done="nothing was changed",
            next_step=f"see where it has some with `waltzctl partition describe {strange[0]}`",
        )
    return wanted


def _replica_states(name: str, found: ClusterSnapshot, chosen: list[int]) -> dict[int, ReplicaState]:
    """Judge all replicas; raise if the storage does not run, because nothing can be restored there."""
    answering(found, name, next_step="start it, on an empty directory if its disk is gone, then run the same command again")
    view = found.storage(name)
    return {number: replica_state(name, found.partitions[number], view.replica(number)) for number in chosen}


async def _follow(
    cluster: Cluster,
    daemons: Daemons,
    name: str,
    chosen: list[int],
    lost: list[int],
    options: MoveOptions,
    report: Report,
) -> dict[int, ReplicaState]:
    """Wait until all these replicas count."""
    throttle = Throttle(cluster, options.bytes_per_second)
    waits = "the daemons had not answered yet"
    try:
        async with asyncio.timeout(options.timeout):
            while True:
                found = await daemons.take_snapshot(cluster)
                if found.storage(name).reported is None:
                    waits = f"{name} does not answer"
                    report(waits)
                else:
                    replica_states = _replica_states(name, found, chosen)
                    left = {number: one for number, one in replica_states.items() if one.state is not State.COUNTS}
                    if not left:
                        return replica_states
                    _check_hope(name, left, lost)
                    await throttle.share(len(left))
                    waits = _format_reasons(left, found)
                    counting = f"{len(chosen) - len(left)} of {len(chosen)} replicas count"
                    report(f"{counting}; {_format_reasons(left, found, 1)}", _copied(replica_states, found))
                await daemons.pause()
    except TimeoutError:
        raise Unfinished(f"not done within {options.timeout:g} seconds: {waits}") from None


def _copied(replica_states: Mapping[int, ReplicaState], found: ClusterSnapshot) -> Amount:
    done = total = 0
    for number, one in replica_states.items():
        reported = found.partitions[number].reported
        whole = reported.committed + 1 if reported is not None else 0
        total += whole
        done += whole if one.state is State.COUNTS else min(whole, (-1 if one.held is None else one.held) + 1)
    return Amount(done=done, total=total, unit="transactions")


def _check_hope(name: str, left: Mapping[int, ReplicaState], lost: list[int]) -> None:
    """Raise for a replica that is lost and was not in the plan."""
    for number, one in left.items():
        if one.state is State.OFFLINE:
            raise Unfinished(
                f"partition {number} on {name}: {one.why}",
                next_step=f"`waltzctl storage availability {name} {number} --online`, then run the same command again",
            )
        if one.state is State.LOST and number not in lost:
            raise Unfinished(f"partition {number} on {name} cannot recover by itself: {one.why}")


def _format_reasons(left: Mapping[int, ReplicaState], found: ClusterSnapshot, most: int = NAMED_MAX) -> str:
    reasons = []
    for number, one in left.items():
        reported = found.partitions[number].reported
        ids = f"{one.held + 1:,} ids, " if one.held is not None else ""
        # an owner with a lower mark does not know the end of the log yet
        if one.held is not None and reported is not None and reported.committed >= one.held:
            ids = f"{one.held + 1:,} of {reported.committed + 1:,} ids, "
        reasons.append(f"partition {number}: {ids}{one.why}")
    return first_few(reasons, most)


# -- what nobody needs any more ----------------------------------------------------------------------------------------


def tidy(command: ChangeCommand, name: str) -> int:
    """`storage recover --clean`: set forgotten replicas aside, and delete what was set aside before."""
    daemons = Daemons(command.target.tls)

    async def prepare(cluster: Cluster) -> Change:
        now = await placement_state(cluster, daemons)
        storage = now.storage(name)
        forgotten = _forgotten(now, name)
        metas = {number: (await cluster.partition(number))[0] for number in forgotten}
        old = [one.name for one in answering(now.found, name).set_aside]

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            async with daemons.admin(now.found.meta.key, storage) as admin:
                await _check_forgotten(cluster, name, forgotten)
                _check_all(await admin.remove_partitions(forgotten), "removed") if forgotten else None
                deleted = await admin.delete_aside(old) if old else []
            return {
                "set_aside": forgotten,
                "deleted": [{"name": one.name, "bytes": one.bytes} for one in deleted],
            }

        return Change(plan=tidying(now, name, metas), do=do, is_planned_again=True)

    return command.perform(prepare)


def tidying(now: PlacementState, name: str, metas: Metas) -> Plan:
    """Plan the removal of forgotten replicas. `metas`: documents of their partitions."""
    forgotten, cleaned = _forgotten(now, name), cleaning(now, name, answering(now.found, name).set_aside)
    margins = _left(now, name, forgotten, metas)
    steps = [f"set aside the files of {format_partitions(forgotten)} on {name}; not assigned to it"] if forgotten else []
    return Plan(
        verb="storage recover --clean",
        subject=name,
        steps=(*steps, *cleaned.steps),
        margins=tuple(margins),
        danger=max(danger(margins), cleaned.danger),
        unsafe=(*needed(margins, name), *cleaned.unsafe),
    )


def _forgotten(now: PlacementState, name: str) -> list[int]:
    """Return the partitions of which a storage holds a replica that no document assigns to it."""
    return sorted(one.partition for one in answering(now.found, name).assigned if name not in now.roles(one.partition))


async def _check_forgotten(cluster: Cluster, name: str, forgotten: Sequence[int]) -> None:
    """Raise `ChangedMeanwhile` if another operator has assigned one of these replicas to the storage since the plan."""
    sets, versions = await cluster.replicas()
    assigned = [number for number in forgotten if name in sets.partitions.get(number, {})]
    if assigned:
        raise ChangedMeanwhile(
            f"{format_partitions(assigned, 'was', 'were')} assigned to {name} by another operator",
            not_done="nothing was set aside or deleted",
            next_step="look with `waltzctl history`, then plan again with --dry-run",
        )
    if forgotten:
        await cluster.confirm({replicas_path(number): versions.get(number, NO_VERSION) for number in forgotten})


def cleaning(now: PlacementState, name: str, found: Sequence[SetAside]) -> Plan:
    closed = {view.partition for view in now.found.partitions if not view.is_open}
    young = [one for one in found if one.kept_ms < KEPT_MS]
    return Plan(
        verb="storage recover --clean",
        subject=name,
        steps=tuple(
            f"delete {one.name}, {size(one.bytes)}{', which may be younger than a day' if one in young else ''}"
            for one in found
        ),
        danger=Danger.TYPED if young else Danger.ASK,
        unsafe=tuple(
            f"partition {aside_partition(one.name)} takes no transactions: {one.name} may be needed"
            for one in found
            if aside_partition(one.name) in closed
        ),
    )


def _left(now: PlacementState, name: str, chosen: Sequence[int], metas: Metas) -> list[Effect]:
    """Describe what remains of partitions that may have data to lose."""
    margins = list[Effect]()
    for number in chosen:
        meta = metas[number]
        was_opened = meta is not None and (meta.opened > 0 or meta.decision is not None)
        if not (was_opened or holds_anything(now.found.storage(name), number)):  # else its document is lost
            continue  # it never had a session
        roles: Mapping[str, Membership] = now.roles(number)
        if meta is not None and name not in roles and name in meta.members:  # it still has a vote
            roles = dict.fromkeys(meta.members, Membership.MEMBER)
        margins.append(without(number, roles, now.found.level(number), silent=[name]))
    return margins
