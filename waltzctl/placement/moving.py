"""Replicas on their way: the shell around `moves`. It writes the goal down, takes one step after the other, and waits.

Everything that it knows is in the coordinator and in what daemons say. It may be killed at any moment and run again, also
by somebody else, also twice at the same time: each change is a compare-and-set on what it was decided from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from waltzctl.placement import moves
from waltzctl.placement.terms import Throttle
from waltzctl.progress import Amount, Say
from waltzctl.watching.overview import Overview, StorageView, look
from waltzd.assignment import spell_numbers
from waltzd.cluster import STORAGES, Cluster
from waltzd.errors import ChangedMeanwhile, MoveUnfinished, WaltzError
from waltzd.meta import Moves, ReplicaSets, Role, StorageMeta
from waltzd.operator_documents import NO_VERSION
from waltzd.storage_admin import AdminClient
from waltzd.tls import Tls

POLL_SECONDS = 0.2
TOLD_MAX = 3
"""So many of those that wait are named when it takes too long."""
CHANGED = "its documents were changed meanwhile"


Goals = Mapping[int, tuple[str, ...]]


class Daemons(Protocol):
    """Those of one cluster, as far as whoever moves replicas asks them for something. Tests have their own."""

    async def look(self) -> Overview: ...
    async def remove_partitions(
        self, storage: StorageMeta, numbers: Sequence[int], *, delete_files: bool
    ) -> dict[int, WaltzError | None]: ...
    async def pause(self) -> None:
        """Let them do something."""
        ...


class RealDaemons:
    def __init__(self, cluster: Cluster, tls: Tls | None) -> None:
        self._cluster = cluster
        self._tls = tls

    async def look(self) -> Overview:
        return await look(self._cluster.coordinator, tls=self._tls)

    async def remove_partitions(
        self, storage: StorageMeta, numbers: Sequence[int], *, delete_files: bool
    ) -> dict[int, WaltzError | None]:
        key = (await self._cluster.meta()).key
        async with AdminClient(storage.admin_listen, key, tls=self._tls, name=storage.name) as admin:
            return await admin.remove_partitions(numbers, delete_files=delete_files)

    async def pause(self) -> None:
        await asyncio.sleep(POLL_SECONDS)


class Mover:
    def __init__(self, cluster: Cluster, daemons: Daemons, say: Say, throttle: Throttle) -> None:
        self._cluster = cluster
        self._daemons = daemons
        self._say = say
        self._throttle = throttle
        self._last: Mapping[int, str] = {}
        """What was waited for when it was said last."""
        self._copied: dict[tuple[int, str], tuple[int, int]] = {}
        """Of each replica that copies, or did: how many bytes it has, of how many, about."""

    async def aim(self, goals: Goals, *, sets: ReplicaSets, versions: Mapping[int, int], moves_version: int) -> None:
        """Write down where replicas shall be. Somebody who planned at the same time is told that this was changed; an owner
        that has made a member of a learner has moved nothing."""
        found, _ = await self._cluster.moves()
        wanted = {**found.partitions, **{number: tuple(sorted(names)) for number, names in goals.items()}}
        versions = {number: version for number, version in versions.items() if number in goals}
        there = [f"{STORAGES}/{name}" for name in sorted({name for names in goals.values() for name in names})]
        while True:
            try:
                await self._cluster.save_moves(
                    Moves(partitions=dict(sorted(wanted.items()))), moves_version, replicas=versions, there=there
                )
            except ChangedMeanwhile as error:
                now, found_versions = await self._cluster.replicas()
                current = {number: version for number, version in found_versions.items() if number in goals}
                if current != versions and _places(now, goals) == _places(sets, goals):
                    versions = current
                    continue
                raise ChangedMeanwhile(
                    f"replicas were moved by somebody else since this was planned: {error.message}",
                    not_done="nothing was moved",
                    next_step="look with `waltzctl history`, then run this again if it is still meant",
                ) from error
            return

    async def arrive(self, goals: Goals, *, seconds: float | None) -> None:
        """Until these partitions are where they shall be. `ChangedMeanwhile` when somebody else wants them elsewhere."""
        left = dict(goals)
        try:
            async with asyncio.timeout(seconds):
                while waiting := await self._advance(left):
                    self._tell(waiting, len(goals))
                    await self._daemons.pause()
        except TimeoutError:
            why = _spell(self._last) or "the daemons had not answered yet"
            raise MoveUnfinished(f"not done within {seconds:g} seconds: {why}") from None

    def _tell(self, waiting: Mapping[int, str], total: int) -> None:
        self._last = waiting
        copied = self._copied.values()
        amount = Amount(done=sum(done for done, _ in copied), total=sum(all_ for _, all_ in copied), unit="bytes")
        self._say(f"{total - len(waiting)} of {total} partitions done; {_spell(waiting, 1)}", amount if copied else None)

    async def _advance(self, left: dict[int, tuple[str, ...]]) -> dict[int, str]:
        """One step for each that can take one; those that are not done, and why. Who arrives is taken out of `left`."""
        cluster = self._cluster
        found_moves, moves_version = await cluster.moves()
        sets, versions = await cluster.replicas()
        moving = {number: goal for number, goal in sorted(left.items()) if number in found_moves.partitions}
        _check_goals(left, found_moves, sets)
        for number in left.keys() - moving.keys():  # arrived, and maybe moved on before we look again
            del left[number]
        if not moving:
            return {}
        found = await self._daemons.look()
        _check_storages(moving, found)
        views = dict(await self._cluster.each(moving, lambda number: self._view(found, sets, number, moving[number])))
        steps = {number: moves.next_step(view) for number, view in views.items()}
        self._note(views, {number: _bytes_of(found, number) for number in views})
        await self._throttle.share(_copies(moving, sets))
        after = moves.applied(sets, steps)
        try:
            done = [number for number, step in steps.items() if isinstance(step, moves.Done)]
            if done:
                rest = {number: goal for number, goal in found_moves.partitions.items() if number not in done}
                await cluster.save_moves(replace(found_moves, partitions=rest), moves_version)
                for number in done:
                    del left[number]
        except ChangedMeanwhile:  # somebody else takes the same steps
            return dict.fromkeys(moving, CHANGED)
        late = await self._save(sets, after, versions)
        return {
            number: CHANGED if number in late else _why(step)
            for number, step in steps.items()
            if not isinstance(step, moves.Done)
        }

    async def _save(self, before: ReplicaSets, after: ReplicaSets, versions: Mapping[int, int]) -> set[int]:
        """Each partition by itself; those that were changed by their owner, or somebody else, since they were read."""
        late = set[int]()

        async def save(number: int) -> None:
            try:
                await self._cluster.save_replica_set(number, after.partitions[number], versions.get(number, NO_VERSION))
            except ChangedMeanwhile:
                late.add(number)

        await self._cluster.each(
            [number for number, roles in after.partitions.items() if roles != before.partitions.get(number)], save
        )
        return late

    def _note(self, views: Mapping[int, moves.View], bytes_: Mapping[int, int]) -> None:
        """What no longer copies has everything. `bytes_`: of a whole replica of each partition."""
        copying = {
            (number, name): (bytes_[number] * done // max(1, total), bytes_[number])
            for number, view in views.items()
            for name, (done, total) in view.copied.items()
        }
        self._copied = {replica: (total, total) for replica, (_, total) in self._copied.items()} | copying

    async def _view(self, found: Overview, sets: ReplicaSets, number: int, goal: tuple[str, ...]) -> tuple[int, moves.View]:
        meta, _ = await self._cluster.partition(number)
        return number, moves.view_of(found, number, goal, sets.partitions.get(number, {}), meta)

    async def clear(self, goals: Goals, *, delete_files: bool) -> dict[str, list[int]]:
        """Take the files of these partitions off the storages that are no longer assigned any of them: storage → numbers.
        They are set aside there unless they are to be deleted. A storage that does not answer keeps them."""
        found = await self._daemons.look()
        cleared: dict[str, list[int]] = {}
        for storage in found.storages:
            name = storage.meta.name
            there = {held.partition for held in storage.said.assigned} if storage.said is not None else set()
            orphans = await self._orphans(storage, sorted(there & goals.keys()))
            if orphans:
                refusals = await self._daemons.remove_partitions(storage.meta, orphans, delete_files=delete_files)
                done = [number for number, refusal in refusals.items() if refusal is None]
                cleared |= {name: done} if done else {}
        return cleared

    async def _orphans(self, storage: StorageView, numbers: Sequence[int]) -> list[int]:
        """Looked at right before they are removed: somebody else may have given the storage one of them again. One that
        still has a vote, or is to get a replica, is none. Nor is one that holds anything while the partition's document,
        which would say who has a vote, is gone, or one that has begun a session of which the document knows nothing."""
        name = storage.meta.name
        if not numbers:
            return []
        wanted, _ = await self._cluster.moves()
        voting = dict(zip(numbers, await self._cluster.each(numbers, self._cluster.partition), strict=True))
        sets, _ = await self._cluster.replicas()
        return [
            number
            for number in numbers
            if name not in sets.partitions.get(number, {})
            and name not in wanted.partitions.get(number, ())
            and (
                name not in meta.members and not moves.is_ahead(storage, number, meta.session)
                if (meta := voting[number][0])
                else not moves.holds_anything(storage, number)
            )
        ]


def _bytes_of(found: Overview, number: int) -> int:
    """Of the largest replica of this partition: owners say how many transactions each has, and storages how many bytes."""
    assigned = (one for view in found.storages if view.said is not None for one in view.said.assigned)
    return max((one.disk_bytes for one in assigned if one.partition == number), default=0)


def _copies(moving: Goals, sets: ReplicaSets) -> int:
    """Replicas that have to copy, or may have to: those that are no members yet."""
    roles = {number: sets.partitions.get(number, {}) for number in moving}
    return sum(roles[number].get(name) is not Role.MEMBER for number, goal in moving.items() for name in goal)


def _places(sets: ReplicaSets, numbers: Iterable[int]) -> dict[int, frozenset[str]]:
    """Where replicas of these partitions are, whatever they are there."""
    return {number: frozenset(sets.partitions.get(number, {})) for number in numbers}


def _check_goals(left: Goals, found: Moves, sets: ReplicaSets) -> None:
    """What was written down is what we want, or it was reached already."""
    for number, goal in sorted(left.items()):
        there = found.partitions.get(number, sets.partitions.get(number, {}))
        if set(there) != set(goal):
            elsewhere = ", ".join(sorted(there)) or "nowhere"
            raise ChangedMeanwhile(
                f"somebody else moves partition {number} to {elsewhere}, not to {', '.join(goal)}",
                not_done="what was moved until now stays; other partitions may be on their way",
                next_step="look with `waltzctl history`, then run this again if it is still meant",
            )


def _check_storages(moving: Goals, found: Overview) -> None:
    there = {view.meta.name for view in found.storages}
    for name in sorted({name for goal in moving.values() for name in goal} - there):
        numbers = [number for number, goal in moving.items() if name in goal]
        raise ChangedMeanwhile(
            f"{name} was taken out of the cluster; partition {spell_numbers(numbers)} was to get a replica there",
            not_done="what was moved until now stays; other partitions may be on their way",
            next_step="run `waltzctl partition auto-assign`, which leaves it out, or add the storage again",
        )


def _why(step: moves.Step) -> str:
    match step:
        case moves.Add(names):
            return f"{', '.join(names)} begin to copy"
        case moves.Drop(name):
            return f"{name} leaves"
        case moves.Wait(why):
            return why
        case _:
            return ""


def _spell(waiting: Mapping[int, str], most: int = TOLD_MAX) -> str:
    told = [f"partition {number}: {why}" for number, why in list(waiting.items())[:most]]
    more = f"; and {len(waiting) - most} more" if len(waiting) > most else ""
    return "; ".join(told) + more
