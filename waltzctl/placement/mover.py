"""Shell around `replica_moves`: saves the goals, takes one step at a time, and waits.

Its whole state is in ZooKeeper and in the daemons. It may be killed at any moment and run again, also by another
operator or twice at the same time: each change is a compare-and-set on the version it was decided from.

A forgotten copy limit would slow the next repair. So a limit ends with the moves for which it was set, or with the
command if no move is saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from waltzctl.placement import replica_moves
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.replica_moves import Goals, MovePlan, PlacementState
from waltzctl.shell.change import Change, ChangeCommand, change_option, current_user
from waltzctl.shell.numbers import NAMED_MAX, first_few
from waltzctl.shell.options import From, positive
from waltzctl.shell.progress import Amount, Report
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, StorageView
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.cluster import MOVES, NO_VERSION, STORAGES, Cluster, partition_path, replicas_path
from waltzd.cluster.documents import CopyRate, Membership, Moves, ReplicaSets
from waltzd.daemon.settings import parse_size
from waltzd.errors import BadArgument
from waltzd.errors.operations import ChangedMeanwhile, NoSuchName, Unfinished, Unsafe

CHANGED = "its documents were changed meanwhile"
ATTEMPTS_MAX = 20
"""Looks at the documents of unassigned replicas. Owners change these documents seldom."""


@dataclass(frozen=True, kw_only=True)
class MoveOptions:
    timeout: float | None = None
    """Seconds; None waits without limit."""
    bytes_per_second: int | None = None
    """Limit for all copies of this command together; None copies as fast as servers permit."""


def _move_options(
    timeout: Annotated[
        float | None,
        change_option(
            "--timeout",
            parser=positive,
            metavar="SECONDS",
            help="Stop waiting after this time, more than 0; a saved change continues when the command is run again. "
            "Default: no limit.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        change_option(
            "--rate",
            metavar="SIZE",
            help="Bytes per second for all copies of this command together, like 50MB, until the moves end. The servers' "
            "`catch_up_bytes_per_second` is an upper limit.",
        ),
    ] = None,
) -> MoveOptions:
    return MoveOptions(timeout=timeout, bytes_per_second=None if rate is None else _rate_of(rate))


Moving = Annotated[MoveOptions, From(_move_options)]


def _rate_of(text: str) -> int:
    try:
        found = parse_size(text.removesuffix("/s"))
    except ValueError as error:
        raise BadArgument(f"--rate: {error}") from error
    if found < 1:
        raise BadArgument(
            f"--rate {text} is below 1 byte per second", next_step="give a rate like 50MB, or omit it for no limit"
        )
    return found


async def placement_state(cluster: Cluster, daemons: Daemons) -> PlacementState:
    _, moves_version = await cluster.moves()
    sets, versions = await cluster.replicas()
    found = await daemons.take_snapshot(cluster)
    return PlacementState(found=found, sets=sets, versions=versions, moves_version=moves_version)


# -- from end to end ---------------------------------------------------------------------------------------------------


Wish = Callable[[PlacementState], MovePlan]
"""What an operator wants, as a pure function from a state to the plan in it; raises if it is impossible there."""


def perform_moves(
    command: ChangeCommand, options: MoveOptions, find_wish: Callable[[Cluster, PlacementState], Awaitable[Wish]]
) -> int:
    """Run a command that moves replicas; return the exit code. `find_wish` may ask daemons, and raises if the command
    cannot be meant."""
    daemons = Daemons(command.target.tls)

    async def prepare(cluster: Cluster) -> Change:
        now = await placement_state(cluster, daemons)
        wish = await find_wish(cluster, now)
        agreed = wish(now)

        async def do(cluster: Cluster, report: Report) -> Mapping[str, dict[str, list[int]]]:
            return {"cleared": await carry_out(cluster, daemons, wish, agreed, options, report)}

        return Change(plan=agreed.plan(options.bytes_per_second), do=do, interrupted=agreed.interrupted)

    return command.perform(prepare)


async def carry_out(
    cluster: Cluster, daemons: Daemons, wish: Wish, agreed: MovePlan, options: MoveOptions, report: Report
) -> dict[str, list[int]]:
    """Move replicas, then remove what is left behind; return storage → partitions whose files were removed from it."""
    throttle = Throttle(cluster, options.bytes_per_second, lasts=True)
    mover = Mover(cluster, daemons, report, throttle)
    move_plan = await mover.aim(wish, agreed)
    if move_plan.changed:
        await mover.arrive(move_plan.changed, seconds=options.timeout)
        if not (await cluster.moves())[0].partitions:
            await throttle.lift()
    cleared: dict[str, list[int]] = {}
    if move_plan.goals:
        report("removing replicas that are no longer assigned")
        deletes_on = move_plan.leaver if move_plan.deletes_files else None
        cleared = await mover.clear(move_plan.goals, moved=move_plan.changed, deletes_on=deletes_on)
    if move_plan.leaver is not None:
        await take_out(cluster, move_plan.leaver)
    return cleared


async def take_out(cluster: Cluster, name: str) -> None:
    """Remove a storage from the list, unless another operator has just planned a move to it, or a partition still counts
    its replica: a rescue may have counted one that is not assigned, and the others copy from it."""
    numbers = sorted((await cluster.replicas())[0].partitions)
    for number, (meta, _) in zip(numbers, await cluster.each(numbers, cluster.partition), strict=True):
        if meta is not None and name in meta.members:
            raise ChangedMeanwhile(
                f"partition {number} may still need the replica on {name}: it counts until a session begins without it",
                not_done=f"{name} stays in the list of storages",
                next_step=f"wait until the partition is open: `waltzctl partition describe {number}`, then run this again",
            )
    while True:
        found, version = await cluster.moves()
        coming = [number for number, names in sorted(found.partitions.items()) if name in names]
        if coming:
            raise ChangedMeanwhile(
                f"another operator moves partition {format_numbers(coming)} to {name}",
                not_done=f"{name} stays in the list of storages",
                next_step="look with `waltzctl history`, then run this again if it is still meant",
            )
        try:
            return await cluster.remove_storage(name, moves=version)
        except ChangedMeanwhile:
            if name not in await cluster.storages():
                return  # another operator has removed it meanwhile
            if (await cluster.moves())[1] == version:
                raise


# -- step by step ------------------------------------------------------------------------------------------------------


class Throttle:
    """Copy limit of a command. With `lasts` it outlives the command, for a saved move; the command that ends the move
    lifts it."""

    def __init__(self, cluster: Cluster, bytes_per_second: int | None, *, lasts: bool = False) -> None:
        self._cluster = cluster
        self._bytes_per_second = bytes_per_second
        self._lasts = lasts
        self._last_rate: tuple[int, int] | None = None

    @property
    def is_unbound(self) -> bool:
        return self._bytes_per_second is None

    async def share(self, copies: int) -> None:
        """Share the limit among the replicas that copy now. A new ZooKeeper session gets it again."""
        if self._bytes_per_second is None or copies == 0:
            return
        each = max(1, self._bytes_per_second // copies)
        request = (each, self._cluster.coordinator.session)
        if request != self._last_rate:
            rate = CopyRate(bytes_per_second=each, who=current_user())
            await self._cluster.set_copy_rate(rate, lasts=self._lasts)
            self._last_rate = request

    async def lift(self) -> None:
        await self._cluster.lift_copy_rate()


class Mover:
    def __init__(self, cluster: Cluster, daemons: Daemons, report: Report, throttle: Throttle) -> None:
        self._cluster = cluster
        self._daemons = daemons
        self._report = report
        self._throttle = throttle
        self._last: Mapping[int, str] = {}
        """Partition → what it waited for at the last snapshot."""
        self._copied: dict[tuple[int, str], tuple[int, int]] = {}
        """Replica that copies or did → bytes that it has, and the total, both estimated."""

    async def aim(self, wish: Wish, agreed: MovePlan) -> MovePlan:
        """Save the goals of the confirmed plan, and return it. If replicas moved since it was made, plan again: a new plan
        that contains nothing unconfirmed replaces it. An owner makes such a change: it makes members of learners, and
        removes the members that they replace. Any other new plan is refused."""
        move_plan = agreed
        while True:
            if move_plan.first is not None:
                await self._cluster.add_storage(move_plan.first)
            if not move_plan.changed:
                return move_plan
            are_ours = move_plan.now.found.moves.keys() <= move_plan.changed.keys()
            if self._throttle.is_unbound and are_ours and not move_plan.keeps_rate:
                await self._throttle.lift()  # it was set by a command that was interrupted, for these very moves
            try:
                await self._save_goals(move_plan)
                return move_plan
            except ChangedMeanwhile as error:
                again = await self._plan_again(wish, agreed)
                if again is None or again.now.versions_read == move_plan.now.versions_read:
                    raise ChangedMeanwhile(
                        f"replicas were moved by another operator since this was planned: {error.message}",
                        not_done="nothing was moved",
                        next_step="look with `waltzctl history`, then run this again if it is still meant",
                    ) from error
                move_plan = again

    async def _plan_again(self, wish: Wish, agreed: MovePlan) -> MovePlan | None:
        """Return the plan in the present state; None if it is impossible, or has something that was not confirmed."""
        now = await placement_state(self._cluster, self._daemons)
        try:
            again = wish(now)
            return again if again.is_within(agreed) else None
        except (BadArgument, NoSuchName, Unsafe):
            return None

    async def _save_goals(self, move_plan: MovePlan) -> None:
        """Save the goals, if nothing moved since the plan was made and each storage of them is in the cluster."""
        now, goals = move_plan.now, move_plan.changed
        found, _ = await self._cluster.moves()
        wanted = {**found.partitions, **{number: tuple(sorted(names)) for number, names in goals.items()}}
        await self._cluster.save_moves(
            Moves(partitions=dict(sorted(wanted.items()))),
            now.moves_version,
            replicas={number: version for number, version in now.versions.items() if number in goals},
            there=[f"{STORAGES}/{name}" for name in sorted({name for names in goals.values() for name in names})],
        )

    async def arrive(self, goals: Goals, *, seconds: float | None) -> None:
        """Wait until these partitions have reached their goals. Raise `ChangedMeanwhile` if another operator gives them
        other goals."""
        left = dict(goals)
        try:
            async with asyncio.timeout(seconds):
                while waiting := await self._advance(left):
                    self._report_waiting(waiting, len(goals))
                    await self._daemons.pause()
        except TimeoutError:
            why = _format_reasons(self._last) or "the daemons had not answered yet"
            raise Unfinished(f"not done within {seconds:g} seconds: {why}") from None

    def _report_waiting(self, waiting: Mapping[int, str], total: int) -> None:
        self._last = waiting
        copied = self._copied.values()
        amount = Amount(done=sum(done for done, _ in copied), total=sum(all_ for _, all_ in copied), unit="bytes")
        self._report(
            f"{total - len(waiting)} of {total} partitions done; {_format_reasons(waiting, 1)}", amount if copied else None
        )

    async def _advance(self, left: dict[int, tuple[str, ...]]) -> dict[int, str]:
        """Take one step for each partition that can take one; return why each unfinished one waits. Finished ones are
        taken out of `left`."""
        cluster = self._cluster
        found_moves, moves_version = await cluster.moves()
        sets, versions = await cluster.replicas()
        moving = {number: goal for number, goal in sorted(left.items()) if number in found_moves.partitions}
        _check_goals(left, found_moves, sets)
        for number in left.keys() - moving.keys():  # arrived, and maybe moved again since the last poll
            del left[number]
        if not moving:
            return {}
        found = await self._daemons.take_snapshot(self._cluster)
        _check_storages(moving, found)
        views = dict(await self._cluster.each(moving, lambda number: self._view(found, sets, number, moving[number])))
        steps = {number: replica_moves.next_step(view) for number, view in views.items()}
        self._note(views, {number: _bytes_of(found, number) for number in views})
        await self._throttle.share(_copies(moving, sets))
        done = [number for number, step in steps.items() if not step.why]
        if done:
            rest = {number: goal for number, goal in found_moves.partitions.items() if number not in done}
            try:
                await cluster.save_moves(replace(found_moves, partitions=rest), moves_version)
            except ChangedMeanwhile:  # another tool takes the same steps
                return dict.fromkeys(moving, CHANGED)
            for number in done:
                del left[number]
        changed = {number: step.roles for number, step in steps.items() if step.roles != sets.partitions.get(number, {})}
        late = await self._save(changed, versions)
        return {number: CHANGED if number in late else step.why for number, step in steps.items() if step.why}

    async def _save(self, changed: Mapping[int, Mapping[str, Membership]], versions: Mapping[int, int]) -> set[int]:
        """Save the replica set of each partition by itself; return those that their owner or another tool has changed
        since they were read."""
        late = set[int]()

        async def save(number: int) -> None:
            try:
                await self._cluster.save_replica_set(number, changed[number], versions.get(number, NO_VERSION))
            except ChangedMeanwhile:
                late.add(number)

        await self._cluster.each(list(changed), save)
        return late

    def _note(self, views: Mapping[int, replica_moves.PartitionMove], bytes_: Mapping[int, int]) -> None:
        """Record the progress of copies; a replica that stopped copying has everything. `bytes_`: size of a whole
        replica of each partition."""
        copying = {
            (number, name): (bytes_[number] * done // max(1, total), bytes_[number])
            for number, view in views.items()
            for name, (done, total) in view.copied.items()
        }
        self._copied = {replica: (total, total) for replica, (_, total) in self._copied.items()} | copying

    async def _view(
        self, found: ClusterSnapshot, sets: ReplicaSets, number: int, goal: tuple[str, ...]
    ) -> tuple[int, replica_moves.PartitionMove]:
        meta, _ = await self._cluster.partition(number)
        return number, replica_moves.partition_move(found, number, goal, sets.partitions.get(number, {}), meta)

    async def clear(self, goals: Goals, *, moved: Collection[int], deletes_on: str | None) -> dict[str, list[int]]:
        """Remove the files of these partitions from storages that are no longer assigned any of them; return storage →
        numbers. Files are set aside, and deleted only on the storage `deletes_on`. A storage that does not answer keeps
        them. So does a storage with data of a partition that takes no transactions and is not one of `moved`, which have
        just arrived: its replicas may be lost, and the forgotten one be needed."""
        found = await self._daemons.take_snapshot(self._cluster)
        cleared: dict[str, list[int]] = {}
        for storage in found.storages:
            name = storage.meta.name
            there = {held.partition for held in storage.reported.assigned} if storage.reported is not None else set()
            needed = {
                number
                for number in there & goals.keys() - moved
                if not found.partitions[number].is_open and replica_moves.holds_anything(storage, number)
            }
            orphans = await self._orphans(storage, sorted(there & goals.keys() - needed))
            if orphans:
                async with self._daemons.admin(found.meta.key, storage.meta) as admin:
                    refusals = await admin.remove_partitions(orphans, delete_files=name == deletes_on)
                done = [number for number, refusal in refusals.items() if refusal is None]
                cleared |= {name: done} if done else {}
        return cleared

    async def _orphans(self, storage: StorageView, numbers: Sequence[int]) -> list[int]:
        """Return the replicas on this storage that can be removed. The documents are read right before the removal, and
        confirmed, because another operator may have assigned a partition to the storage again. A replica stays if it is
        assigned or to be assigned, if it still has a vote, or if it has begun a later session than the document. If the
        document is missing, the members are unknown, and a replica stays unless it is empty."""
        name, cluster = storage.meta.name, self._cluster
        if not numbers:
            return []
        for _ in range(ATTEMPTS_MAX):
            wanted, moves_version = await cluster.moves()
            voting = dict(zip(numbers, await cluster.each(numbers, cluster.partition), strict=True))
            sets, versions = await cluster.replicas()
            orphans = [
                number
                for number in numbers
                if name not in sets.partitions.get(number, {})
                and name not in wanted.partitions.get(number, ())
                and (
                    name not in meta.members and not replica_moves.is_ahead(storage, number, meta.session)
                    if (meta := voting[number][0])
                    else not replica_moves.holds_anything(storage, number)
                )
            ]
            if not orphans:
                return []
            read = {replicas_path(number): versions.get(number, NO_VERSION) for number in orphans}
            read |= {partition_path(number): voting[number][1] for number in orphans}
            try:
                await cluster.confirm({MOVES: moves_version, **read})
            except ChangedMeanwhile:
                continue
            return orphans
        raise ChangedMeanwhile(
            f"documents of partitions that {name} has left changed {ATTEMPTS_MAX} times in a row",
            not_done=f"files on {name} stay, although they are not needed",
            next_step=f"remove them later, with `waltzctl storage recover {name} --clean`",
        )


def _bytes_of(found: ClusterSnapshot, number: int) -> int:
    """Return the size of the largest replica: owners report how many transactions each has, and storages how many
    bytes."""
    return max((one.disk_bytes for view in found.storages if (one := view.replica(number))), default=0)


def _copies(moving: Goals, sets: ReplicaSets) -> int:
    """Return the replicas that copy or may have to: those that are not members yet."""
    roles = {number: sets.partitions.get(number, {}) for number in moving}
    return sum(roles[number].get(name) is not Membership.MEMBER for number, goal in moving.items() for name in goal)


def _check_goals(left: Goals, found: Moves, sets: ReplicaSets) -> None:
    """Raise unless the saved goals are ours, or ours are reached already."""
    for number, goal in sorted(left.items()):
        there = found.partitions.get(number, sets.partitions.get(number, {}))
        if set(there) != set(goal):
            elsewhere = ", ".join(sorted(there)) or "nowhere"
            raise ChangedMeanwhile(
                f"another operator moves partition {number} to {elsewhere}, not to {', '.join(goal)}",
                not_done="what was moved until now stays; other partitions may be on their way",
                next_step="look with `waltzctl history`, then run this again if it is still meant",
            )


def _check_storages(moving: Goals, found: ClusterSnapshot) -> None:
    there = {view.meta.name for view in found.storages}
    for name in sorted({name for goal in moving.values() for name in goal} - there):
        numbers = [number for number, goal in moving.items() if name in goal]
        raise ChangedMeanwhile(
            f"{name} was removed from the cluster; it was a goal of partition {format_numbers(numbers)}",
            not_done="what was moved until now stays; other partitions may be on their way",
            next_step="run `waltzctl partition auto-assign`, which leaves it out, or add the storage again",
        )


def _format_reasons(waiting: Mapping[int, str], most: int = NAMED_MAX) -> str:
    return first_few([f"partition {number}: {why}" for number, why in waiting.items()], most)
