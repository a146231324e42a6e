"""What commands that move replicas have in common: what there is now, the plan in words, and carrying it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from waltzctl.picture.picture import Picture
from waltzctl.placement import moves
from waltzctl.placement.moving import Daemons, Goals, Mover, RealDaemons
from waltzctl.placement.plan import crowded, reassign_replicas
from waltzctl.placement.terms import Terms, Throttle
from waltzctl.progress import Say, duration
from waltzctl.reach import Reach, unknown
from waltzctl.safety import Danger, Margin, Plan, Step, danger, margin
from waltzctl.show.terminal import size
from waltzd.cluster.assignment import spell_numbers
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ReplicaSets, Role, StorageMeta
from waltzd.errors import NoSuchPartition, Unsafe
from waltzd.protocol.descriptions import StorageDescription
from waltzd.wire.tls import Tls


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything that a plan is made from, and the versions that it had."""

    found: Picture
    storages: Mapping[str, StorageMeta]
    sets: ReplicaSets
    versions: Mapping[int, int]
    """Of the replicas of each partition."""
    moves_version: int

    @property
    def goals(self) -> dict[int, tuple[str, ...]]:
        return moves.goals(self.found, self.sets)

    @property
    def groups(self) -> dict[str, str]:
        return {name: storage.group for name, storage in self.storages.items()}

    def storage(self, name: str) -> StorageMeta:
        if name not in self.storages:
            raise unknown("storage", name, self.storages)
        return self.storages[name]

    def check_partitions(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if not 0 <= number < self.found.meta.partitions:
                raise NoSuchPartition(
                    f"there is no partition {number}: the cluster has {self.found.meta.partitions}",
                    not_done="nothing was changed",
                    next_step=f"name partitions from 0 to {self.found.meta.partitions - 1}",
                )

    def holds(self, name: str) -> list[int]:
        """Partitions that have, or shall have, a replica there, and those in whose last session it still has a vote."""
        return sorted(
            {number for number, names in self.goals.items() if name in names}
            | {number for number, roles in self.sets.partitions.items() if name in roles}
        )

    def spread(self, storages: Mapping[str, str], replication: Mapping[int, int]) -> dict[int, tuple[str, ...]]:
        """Evenly, with the fewest copies: given where replicas are, or are going to."""
        current = {number: tuple(name for name in names if name in storages) for number, names in self.goals.items()}
        for number, names in current.items():
            if replication.get(number, 0) < len(names):  # one that holds everything is not given up for one that does not
                best = self.found.level(number) or members_at_hand(self, number)
                current[number] = tuple(name for name in names if name in best) or names
        return reassign_replicas(current, storages, replication)

    def changed(self, goals: Goals) -> dict[int, tuple[str, ...]]:
        """Those that are not there yet, or whose move is not over."""
        return {
            number: tuple(names)
            for number, names in goals.items()
            if number in self.found.moves or set(names) != set(self.sets.partitions.get(number, {}))
        }


async def situation(cluster: Cluster, tls: Tls | None, *, daemons: Daemons | None = None) -> Situation:
    """`daemons`: the ones of the cluster, unless somebody has others."""
    _, moves_version = await cluster.moves()
    sets, versions = await cluster.replicas()
    found = await (daemons or RealDaemons(cluster, tls)).look()
    return Situation(
        found=found,
        storages={view.meta.name: view.meta for view in found.storages},
        sets=sets,
        versions=versions,
        moves_version=moves_version,
    )


def steps_in_words(now: Situation, goals: Goals) -> tuple[str, ...]:
    """What is the same for several partitions is said once."""
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for number, names in sorted(goals.items()):
        roles = now.sets.partitions.get(number, {})
        new = tuple(sorted(name for name in names if roles.get(name) is not Role.MEMBER))
        old = tuple(sorted(name for name in roles if name not in names))
        alike.setdefault((new, old), []).append(number)
    said = []
    for (new, old), numbers in alike.items():
        what = f"partition{'s' if len(numbers) > 1 else ''} {spell_numbers(numbers)}: "
        parts = [*([f"copy to {', '.join(new)}"] if new else []), *([f"leave {', '.join(old)}"] if old else [])]
        said.append(what + (", then ".join(parts) or "finish the move"))
    return tuple(said)


def members_at_hand(now: Situation, number: int) -> frozenset[str]:
    """Members that answer and hold what the newest session known has written, whether an owner counts them or not: with a
    majority of them an owner finds everything that was committed."""
    roles = now.sets.partitions.get(number, {})
    held = {
        storage.meta.name: one
        for storage in now.found.storages
        for one in (storage.said.assigned if storage.said is not None else ())
        if one.partition == number and one.refused is None and roles.get(storage.meta.name) is Role.MEMBER
    }
    newest = max((one.status.session for one in held.values() if one.status is not None), default=0)
    return frozenset(
        name
        for name, one in held.items()
        if one.status is None or (one.status.is_available and one.status.is_sound and one.status.session == newest)
    )


def losses(now: Situation, goals: Goals) -> tuple[Step, ...]:
    """Of partitions that take no transactions now, when members leave: nobody knows yet which of them are needed."""
    found = []
    for number, names in sorted(goals.items()):
        roles = now.sets.partitions.get(number, {})
        members = [name for name, role in roles.items() if role is Role.MEMBER]
        if now.found.partitions[number].is_open or set(members) <= set(names):
            continue
        level = members_at_hand(now, number)
        after = Margin(partition=number, members=len(members), level=len(level & set(names)))
        found.append(Step(before=margin(number, roles, level), after=after))
    return tuple(found)


def undecided(steps: Sequence[Step]) -> tuple[str, ...]:
    return tuple(
        f"partition {step.partition} takes no transactions, and only {step.before.level} of its {step.before.members} "
        "members answer with what they held: what the others hold may be needed"
        for step in steps
        if step.before.spare < 0 and step.refusal is None
    )


def margins(now: Situation, goals: Goals) -> tuple[Step, ...]:
    """Of partitions that were ever open: when the copies are made and the old ones are gone."""
    found = []
    for number, names in sorted(goals.items()):
        view = now.found.partitions[number]
        if view.said is None and not now.sets.partitions.get(number):
            continue
        roles = now.sets.partitions.get(number, {})
        level = now.found.level(number)
        new = {name for name in names if roles.get(name) is not Role.MEMBER}
        after = margin(number, dict.fromkeys(names, Role.MEMBER), {name for name in names if name in level or name in new})
        found.append(Step(before=margin(number, roles, level), after=after))
    return tuple(found)


def bytes_to_copy(now: Situation, goals: Goals, said: Mapping[str, StorageDescription]) -> dict[str, int]:
    """To each storage that says what it has."""
    held = {name: {one.partition: one.disk_bytes for one in found.assigned} for name, found in said.items()}
    wanted: dict[str, int] = {}
    for number, names in goals.items():
        roles = now.sets.partitions.get(number, {})
        for name in names:
            if name in said and roles.get(name) is not Role.MEMBER:
                whole = max((held[other].get(number, 0) for other in roles if other != name and other in held), default=0)
                wanted[name] = wanted.get(name, 0) + max(0, whole - held[name].get(number, 0))
    return wanted


def copying_in_words(wanted: Mapping[str, int], terms: Terms | None) -> tuple[str, ...]:
    """How much, and how long it takes as far as that is known beforehand."""
    whole = sum(wanted.values())
    if whole == 0:
        return ()
    bound = terms.bytes_per_second if terms is not None else None
    if bound is None:
        return (
            f"copy {size(whole)} in all, at most as fast as the servers' `catch_up_bytes_per_second` lets each replica",
        )
    return (f"copy {size(whole)} in all, at most {size(bound)} a second: {duration(whole / bound)} or longer",)


def shortages(wanted: Mapping[str, int], said: Mapping[str, StorageDescription]) -> tuple[str, ...]:
    """Storages that have less free than is to be copied there, as far as they say; what each keeps free for itself is not
    counted. What leaves them is no help: it goes only when the copies are made."""
    room = {name: max(0, said[name].free_bytes - said[name].free_bytes_min) for name in wanted}
    return tuple(
        f"{name} has room for {size(room[name])}, and {size(bytes_)} are to be copied there"
        for name, bytes_ in sorted(wanted.items())
        if bytes_ > room[name]
    )


def crowding(now: Situation, goals: Goals) -> tuple[str, ...]:
    """Partitions that one failure domain could stop afterwards, and cannot now."""
    found: dict[str, list[int]] = {}
    for number, names in sorted(goals.items()):
        group = crowded(names, now.groups)
        if group is not None and crowded(now.sets.partitions.get(number, {}), now.groups) is None:
            found.setdefault(group, []).append(number)
    return tuple(
        f"partition{'s' if len(numbers) > 1 else ''} {spell_numbers(numbers)}: most replicas are in the group {group} "
        "then, and it stops with it"
        for group, numbers in found.items()
    )


def plan_for(
    now: Situation,
    goals: Goals,
    *,
    verb: str,
    subject: str,
    more: Sequence[str] = (),
    newcomers: Mapping[str, StorageDescription] | None = None,
    terms: Terms | None = None,
) -> Plan:
    """`more`: what is done besides moving. `newcomers`: storages that are not written down yet, and what they say."""
    changed = now.changed(goals)
    bare = [number for number, names in sorted(changed.items()) if not names]
    if bare:  # nobody can mean that: the log would be gone
        raise Unsafe(
            f"{verb} {subject}: partition {spell_numbers(bare)} would have no replica",
            next_step="leave at least one; `waltzctl cluster delete` gives up a whole cluster",
        )
    closed = losses(now, changed)
    judged = {step.partition for step in closed}
    steps = (*closed, *(step for step in margins(now, changed) if step.partition not in judged))
    together = crowding(now, changed)
    said = {view.meta.name: view.said for view in now.found.storages if view.said is not None} | dict(newcomers or {})
    wanted = bytes_to_copy(now, changed, said)
    return Plan(
        verb=verb,
        subject=subject,
        steps=(*steps_in_words(now, changed), *copying_in_words(wanted, terms), *more, *together),
        margins=steps,
        danger=Danger.TYPED if together else danger(steps),
        unsafe=(*undecided(closed), *shortages(wanted, said)),
    )


def interrupted(now: Situation, goals: Goals) -> str:
    """What is said to somebody who ends a command that moves replicas."""
    numbers = spell_numbers(sorted(now.changed(goals))).replace(" ", "")
    return (
        "Interrupted. What has moved stays, and new replicas go on copying as fast as this command let them. "
        f"`waltzctl moves resume {numbers}` goes on, `waltzctl moves cancel {numbers}` takes back what has not arrived, "
        "`waltzctl moves list` shows how far it is. The same command again goes on with everything that was planned."
    )


async def carry_out(
    cluster: Cluster,
    reach: Reach,
    now: Situation,
    goals: Goals,
    *,
    terms: Terms,
    say: Say,
    delete_files: bool = False,
    daemons: Daemons | None = None,
) -> dict[str, list[int]]:
    """Move, and clear away what is left behind: storage → partitions whose files were taken off it."""
    changed = now.changed(goals)
    throttle = Throttle(cluster, terms.bytes_per_second, lasts=True)
    mover = Mover(cluster, daemons or RealDaemons(cluster, reach.tls), say, throttle)
    if changed and terms.bytes_per_second is None and not terms.keeps_rate and now.found.moves.keys() <= changed.keys():
        await throttle.lift()  # it was set by a command that was interrupted, for these very moves
    if changed:
        await mover.aim(changed, sets=now.sets, versions=now.versions, moves_version=now.moves_version)
        await mover.arrive(changed, seconds=terms.seconds)
        if not (await cluster.moves())[0].partitions:
            await throttle.lift()
    say("clearing away what is left behind")
    return await mover.clear(goals, delete_files=delete_files)
