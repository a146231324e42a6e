"""`waltzctl storage recover`: restores replicas whose disk was lost or damaged.

While the storage runs, the owners of its partitions do the work: they make empty replicas, heal segments, copy, and
count the replicas again. This command follows them, and acts only where an owner may not: it sets aside what a storage
refuses or what cannot be healed, if the other replicas hold a majority without it.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Argument, Option

from waltzctl.placement.daemons import POLL_SECONDS, Daemons
from waltzctl.placement.mover import MoveOptions, Moving, Throttle, placement_state
from waltzctl.placement.replica_moves import PlacementState
from waltzctl.placement.storage import tidy
from waltzctl.shell.change import Change, ChangeCommand, ConfirmOptions
from waltzctl.shell.cluster_target import ClusterOptions, ClusterTarget, known_storages
from waltzctl.shell.numbers import NAMED_MAX, chosen, first_few
from waltzctl.shell.options import Misused, Output
from waltzctl.shell.progress import Amount, Report
from waltzctl.shell.safety import Danger, Effect, Plan, needed, without
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView
from waltzctl.snapshot.collector import take_snapshot
from waltzd.cluster.cluster import Cluster
from waltzd.errors import CannotConnect, NoSuchPartition
from waltzd.errors.operations import Unfinished, Unsafe
from waltzd.protocol.descriptions import DIVERGED, PartitionDescription

VERB = "storage recover"
GIVEN_UP = "GIVEN_UP"
"""State in which an owner sees a replica that cannot be healed, or that a rescue gave up
(`waltzd.server.session.replicated_log`)."""


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
            level = found.level(number) | _itself(name, view)  # an owner may not have noticed yet which replicas are lost
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


def _itself(name: str, view: PartitionView) -> set[str]:
    """Return this replica if its owner counts it: the owner may not know that it is lost."""
    return {one.storage for one in view.reported.replicas if one.counts and one.storage == name} if view.reported else set()


def _recover(command: ChangeCommand, name: str, numbers: str | None, options: MoveOptions) -> int:
    wanted = chosen(command.target, numbers) if numbers is not None else None
    confirmation, target = command.confirmation, command.target

    async def prepare(cluster: Cluster) -> Change:
        now = await placement_state(cluster, Daemons(target.tls))
        now.storage(name)
        there = _replicas_of(now, name, wanted)
        replica_states = _replica_states(name, now.found, there)
        lost = [number for number, one in replica_states.items() if one.state is State.LOST]

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            aside = await _still_lost(cluster, target, name, lost, confirmation) if lost else []
            if aside:
                await _set_aside(now, target, name, aside)
            after = await _follow(cluster, target, name, there, aside, options, report)
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
    view = found.storage(name)
    if view.reported is None:
        if isinstance(view.error, CannotConnect):
            raise CannotConnect(
                f"the storage {name} does not answer: {view.error.message}",
                not_done="nothing was changed",
                next_step="start it, on an empty directory if its disk is gone, then run the same command again",
            )
        assert view.error is not None
        raise view.error
    return {number: replica_state(name, found.partitions[number], view.replica(number)) for number in chosen}


async def _still_lost(
    cluster: Cluster, target: ClusterTarget, name: str, lost: list[int], confirmation: ConfirmOptions
) -> list[int]:
    """Check the plan again: since it was shown other replicas may be lost, or these may count again."""
    found = await take_snapshot(cluster.coordinator, tls=target.tls)
    replica_states = {number: one for number, one in _replica_states(name, found, lost).items() if one.state is State.LOST}
    plan = plan_for(name, found, replica_states)
    if plan.refusals and confirmation.override != name:
        raise Unsafe(f"{VERB} {name}: the cluster changed after the plan was made: {'; '.join(plan.refusals)}")
    return list(replica_states)


async def _set_aside(now: PlacementState, target: ClusterTarget, name: str, lost: list[int]) -> None:
    async with Daemons(target.tls).admin(now.found.meta.key, now.storage(name)) as admin:
        results = await admin.remove_partitions(lost)
    for error in results.values():
        if error is not None and not isinstance(error, NoSuchPartition):  # no such replica: it was set aside already
            raise error


async def _follow(
    cluster: Cluster,
    target: ClusterTarget,
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
                found = await take_snapshot(cluster.coordinator, tls=target.tls)
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
                await asyncio.sleep(POLL_SECONDS)
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
