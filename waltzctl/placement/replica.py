"""`waltzctl storage create-partition`, `remove-partition` and `availability`: single replicas of one storage, by hand.

By the name of the storage this is a change of a cluster like any other: what the partitions can lose is known, so there is
a plan, a refusal, a question and an entry in the history. By an address nothing is known of the other replicas and nothing
is written down: that is for storages that no cluster has yet, or has no more.

A replica that is taken off has more to lose than one that is taken offline. Where nobody says that a majority holds
everything without it, because no server runs, say, it may be the one that is needed, whoever it is assigned to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any
from uuid import UUID

import typer
from typer import Argument, Option

from waltzctl.change import Asked, Asking, check_again
from waltzctl.interruption import interruptible
from waltzctl.job import Job, perform
from waltzctl.numbers import partitions_of, spell
from waltzctl.options import Key, Misused, Output, confirmed
from waltzctl.placement.relocation import Situation, situation
from waltzctl.placement.storage import settle, with_admin
from waltzctl.progress import Say
from waltzctl.reach import Certificate, LookUp, Reach, StorageName
from waltzctl.safety import Danger, Plan, Step, danger, without
from waltzctl.show.files import results as results_page
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import PartitionMeta, Role
from waltzd.errors import EXIT_USAGE, ForeignCluster, NoSuchPartition, PartitionExists, WaltzError
from waltzd.wire.storages import AdminClient

Results = dict[int, WaltzError | None]
Metas = Mapping[int, PartitionMeta | None]
LEFT = "Interrupted. What the storage was told it may still do: look with `waltzctl storage partitions`."


def create_partition(
    *,
    place: StorageName,
    numbers: Annotated[str, Argument(metavar="PARTITIONS")],
    asked: Asking,
    reach: LookUp,
    tls: Certificate,
    key: Key = None,
    output: Output = "table",
) -> int:
    """Create empty replicas of PARTITIONS (like 0-3,7) on a storage, whoever they are assigned to; `partition assign` is
    for clusters. Files that a partition left there before are set aside, never used again. STORAGE is its name, or the
    address of its port for operators; --dry-run, --reason, --confirm and --override need the name.

    \b
    Examples:
      waltzctl storage create-partition 127.0.0.1:55281 0-1
      waltzctl storage create-partition 127.0.0.1:55281 2,3 -o json
    """
    chosen = partitions_of(numbers)
    if ":" in place:
        return _by_address(place, "created", lambda admin: admin.create_partitions(chosen), asked, output, key, reach, tls)

    def plan(now: Situation, _metas: Metas) -> Plan:
        return creation(now, place, chosen)

    return _by_name(
        reach(), place, key, chosen, "created", plan, lambda admin: admin.create_partitions(chosen), asked, output
    )


def remove_partition(
    *,
    place: StorageName,
    numbers: Annotated[str, Argument(metavar="PARTITIONS")],
    delete_files: Annotated[bool, Option("--delete-files", help="Delete the files instead of setting them aside.")] = False,
    asked: Asking,
    reach: LookUp,
    tls: Certificate,
    key: Key = None,
    output: Output = "table",
) -> int:
    """Take replicas off a storage, whether they are assigned to it or not; `partition unassign` is for clusters. Their
    files are set aside in its directory unless they are to be deleted. By the name of the storage, it is refused where
    what is left of a partition is no majority that holds everything; by an address, nobody knows of the other replicas.

    \b
    Examples:
      waltzctl storage remove-partition 127.0.0.1:55281 1 --yes
      waltzctl storage remove-partition 127.0.0.1:55281 0 --delete-files --yes
    """
    chosen = partitions_of(numbers)

    def remove(admin: AdminClient) -> Awaitable[Results]:
        return admin.remove_partitions(chosen, delete_files=delete_files)

    if ":" in place:
        _check_options(asked)
        what = "Delete the files of" if delete_files else "Take off this storage"
        if not asked.yes and not confirmed(f"{what} partition {', '.join(map(str, chosen))} at {place}?"):
            typer.echo("Nothing was changed.", err=True)
            return EXIT_USAGE
        return _by_address(place, "removed", remove, asked, output, key, reach, tls)

    def plan(now: Situation, metas: Metas) -> Plan:
        return removal(now, place, chosen, metas, delete_files=delete_files)

    return _by_name(reach(), place, key, chosen, "removed", plan, remove, asked, output)


def availability(
    *,
    place: StorageName,
    numbers: Annotated[str, Argument(metavar="PARTITIONS")],
    online: Annotated[bool | None, Option("--online/--offline", help="Which of the two; one must be given.")] = None,
    asked: Asking,
    reach: LookUp,
    tls: Certificate,
    key: Key = None,
    output: Output = "table",
) -> int:
    """Take partitions offline on a storage, or back online. Offline, a replica refuses every session. By the name of the
    storage, it is refused where a partition would lose its majority; by an address, nobody knows of the other replicas.

    \b
    Examples:
      waltzctl storage availability 127.0.0.1:55281 0-1 --offline
      waltzctl storage availability 127.0.0.1:55281 0-1 --online
    """
    chosen = partitions_of(numbers)
    if online is None:
        raise Misused("Say --online or --offline.")
    is_online, done = online, "online" if online else "offline"

    def switch(admin: AdminClient) -> Awaitable[Results]:
        return admin.set_available(chosen, is_online)

    if ":" in place:
        return _by_address(place, done, switch, asked, output, key, reach, tls)

    def plan(now: Situation, _metas: Metas) -> Plan:
        return switching(now, place, chosen, is_online=is_online)

    return _by_name(reach(), place, key, chosen, done, plan, switch, asked, output)


# -- by an address -----------------------------------------------------------------------------------------------------


def _by_address(
    place: str,
    done: str,
    act: Callable[[AdminClient], Awaitable[Results]],
    asked: Asked,
    output: str,
    key: UUID | None,
    reach: LookUp,
    tls: Certificate,
) -> int:
    _check_options(asked)
    with interruptible(LEFT):
        results = with_admin(place, key, reach, tls, lambda admin, _: act(admin))
    return settle(results, done, output)


def _check_options(asked: Asked) -> None:
    if asked.is_dry or asked.reason or asked.confirm or asked.override:
        raise Misused(
            "--dry-run, --reason, --confirm and --override need the name of a storage: by an address, nothing is known of "
            "the others."
        )


# -- by a name ---------------------------------------------------------------------------------------------------------


def _by_name(
    reach: Reach,
    name: str,
    key: UUID | None,
    chosen: list[int],
    done: str,
    plan: Callable[[Situation, Metas], Plan],
    act: Callable[[AdminClient], Awaitable[Results]],
    asked: Asked,
    output: str,
) -> int:
    async def planned(cluster: Cluster) -> tuple[Situation, Plan]:
        now = await situation(cluster, reach.tls)
        now.storage(name)
        now.check_partitions(chosen)
        meta = now.found.meta
        if key is not None and key != meta.key:
            raise ForeignCluster(f"{name} belongs to the cluster {meta.name}, {meta.key}, not to {key}")
        return now, plan(now, {number: (await cluster.partition(number))[0] for number in chosen})

    async def prepare(cluster: Cluster) -> Job:
        now, made = await planned(cluster)

        async def do(cluster: Cluster, _say: Say) -> Mapping[str, Any]:
            check_again((await planned(cluster))[1], asked)
            storage = now.storage(name)
            async with AdminClient(storage.admin_listen, now.found.meta.key, tls=reach.tls, name=name) as admin:
                results = await act(admin)
            _check_all(results, done)
            return results_page(results, done).document

        return Job(plan=made, do=do)

    return perform(reach, asked, output, prepare)


def _check_all(results: Mapping[int, WaltzError | None], done: str) -> None:
    refused = {number: error for number, error in results.items() if error is not None}
    if refused:
        number, error = next(iter(refused.items()))
        others = [other for other in results if other not in refused]
        also = f"; {spell(others, 'is', 'are')}" if others else ""
        raise type(error)(
            f"partition {number}: {error.message}",
            not_done=f"{spell(refused, 'is', 'are')} not {done}{also}",
            next_step=error.detail_next_step,
        )


# -- the plans ---------------------------------------------------------------------------------------------------------


def creation(now: Situation, name: str, chosen: Sequence[int]) -> Plan:
    """Nothing can be lost by it: an empty replica vouches for nothing."""
    there = sorted(_held(now, name) & set(chosen))
    if there:
        raise PartitionExists(f"{name} holds {spell(there)} already")
    words = f"make empty replicas of {spell(chosen)} on {name}"
    return Plan(verb="storage create-partition", subject=name, steps=(words,), danger=Danger.NONE)


def switching(now: Situation, name: str, chosen: Sequence[int], *, is_online: bool) -> Plan:
    steps: list[Step] = []
    for number in chosen:
        roles = now.sets.partitions.get(number, {})
        if name in roles and not is_online:
            steps.append(without(number, roles, now.found.level(number), silent=[name]))
    words = f"take {spell(chosen)} {'online' if is_online else 'offline'} on {name}"
    return Plan(verb="storage availability", subject=name, steps=(words,), margins=tuple(steps), danger=danger(steps))


def removal(now: Situation, name: str, chosen: Sequence[int], metas: Metas, *, delete_files: bool) -> Plan:
    strange = sorted(set(chosen) - _held(now, name))
    if strange:
        raise NoSuchPartition(
            f"{name} holds nothing of {spell(strange)}",
            not_done="nothing was changed",
            next_step=f"see what it holds with `waltzctl storage partitions {name}`",
        )
    assigned = [number for number in chosen if name in now.sets.partitions.get(number, {})]
    forgotten = [number for number in chosen if number not in assigned]
    what = "delete the files" if delete_files else "set aside the files"
    steps = [
        f"{what} of {spell(numbers)} on {name}; {why}"
        for numbers, why in (
            (assigned, "assigned to it, so that owners make empty replicas there and copy"),
            (forgotten, "not assigned to it"),
        )
        if numbers
    ]
    margins, unsafe = _left(now, name, chosen, metas)
    return Plan(
        verb="storage remove-partition",
        subject=name,
        steps=tuple(steps),
        margins=tuple(margins),
        danger=max(danger(margins), Danger.TYPED if delete_files else Danger.ASK),
        unsafe=tuple(unsafe),
    )


def _left(now: Situation, name: str, chosen: Sequence[int], metas: Metas) -> tuple[list[Step], list[str]]:
    """Of partitions that may have something to lose: what is left, and what is against it beside that."""
    margins, unsafe = list[Step](), []
    for number in chosen:
        meta = metas[number]
        if meta is None or (meta.opened == 0 and meta.decision is None):
            continue  # it never had a session
        roles: Mapping[str, Role] = now.sets.partitions.get(number, {})
        if name not in roles and name in meta.members:  # it still has a vote
            roles = dict.fromkeys(meta.members, Role.MEMBER)
        step = without(number, roles, now.found.level(number), silent=[name])
        margins.append(step)
        if step.after.spare < 0 and step.refusal is None:
            unsafe.append(
                f"partition {number} has {step.after.level} of {step.after.members} members level without {name}, and what "
                "this one holds may be needed"
            )
    return margins, unsafe


def _held(now: Situation, name: str) -> set[int]:
    """What the storage says that it holds; raises when it says nothing."""
    view = next(view for view in now.found.storages if view.meta.name == name)
    if view.said is None:
        assert view.error is not None
        raise type(view.error)(
            f"the storage {name} does not answer: {view.error.message}",
            not_done="nothing was changed",
            next_step=view.error.detail_next_step,
        )
    return {held.partition for held in view.said.assigned}
