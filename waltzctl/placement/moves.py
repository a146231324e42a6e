"""From where the replicas of a partition are to where they shall be, one safe step at a time. Pure.

The goal is written down before anything moves (`waltzd.meta.Moves`), and every step follows from what is there: so whoever
comes next, after a crash of the tool or at the same time, does the same. New replicas come first, as learners, which cost
nothing. Their owner makes them members when they are level. Only then old ones go, one at a time, and never when what is
left could not take transactions. After each the owner begins a new session without it; until that is recorded, it may
still have a vote, and the next one waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from waltzctl.safety import without
from waltzctl.watching.overview import Overview, StorageView
from waltzd.meta import PartitionMeta, ReplicaSets, Role


@dataclass(frozen=True, kw_only=True)
class View:
    """One partition on its way."""

    partition: int
    roles: Mapping[str, Role]
    """Who is assigned."""
    goal: tuple[str, ...]
    level: frozenset[str]
    """Who holds everything that is committed."""
    voting: frozenset[str]
    """Members of the session that was opened last: they have a vote when it is closed."""
    was_opened: bool
    """Any session ever was: there may be something to lose."""
    waiting: str
    """Why it is not open; empty when it is."""
    held: Mapping[str, int]
    """The last id that each replica is known to hold."""
    committed: int
    stories: Mapping[str, str] = field(default_factory=dict)
    """Why replicas take nothing: as their storage says it, or the owner that cannot use them."""

    @property
    def copied(self) -> dict[str, tuple[int, int]]:
        """How many transactions each new replica has, of how many, while it is one."""
        return {
            name: (min(self.held.get(name, -1), self.committed) + 1, self.committed + 1)
            for name in self.goal
            if self.roles.get(name) is Role.LEARNER
        }

    @property
    def missing(self) -> list[str]:
        """Storages of the goal that have no replica yet."""
        return [name for name in self.goal if name not in self.roles]

    @property
    def surplus(self) -> list[str]:
        return sorted(name for name in self.roles if name not in self.goal)

    @property
    def is_done(self) -> bool:
        """Exactly the goal is assigned, all of it takes part, and nobody else has a vote."""
        there = set(self.goal) == set(self.roles)
        if not self.was_opened:
            return there
        return there and all(role is Role.MEMBER for role in self.roles.values()) and self.voting <= set(self.goal)


@dataclass(frozen=True)
class Add:
    names: tuple[str, ...]
    role: Role


@dataclass(frozen=True)
class Drop:
    name: str


@dataclass(frozen=True)
class Wait:
    why: str


@dataclass(frozen=True)
class Done:
    pass


Step = Add | Drop | Wait | Done


def next_step(view: View) -> Step:
    if view.is_done:
        return Done()
    if view.missing:
        # Before the first session nothing can be lost, and nobody is there to make a member of a learner.
        return Add(tuple(view.missing), Role.LEARNER if view.was_opened else Role.MEMBER)
    if not view.was_opened:
        return Drop(view.surplus[0])
    learners = [name for name in view.surplus if view.roles[name] is Role.LEARNER]
    if learners:
        return Drop(learners[0])  # it has no vote
    if view.waiting:
        return Wait(view.waiting)
    behind = [name for name in view.goal if view.roles[name] is not Role.MEMBER or name not in view.level]
    if any(view.roles[name] is not Role.MEMBER for name in behind) or (behind and not view.surplus):
        return Wait(_catching_up(view, behind[0]))
    left = sorted(view.voting - set(view.roles))
    if left:
        return Wait(f"the session without {', '.join(left)} is not recorded yet")
    # Those that are not level go first: they are no help.
    for name in sorted(view.surplus, key=lambda name: (name in view.level, name)):
        if without(view.partition, view.roles, view.level, gone=[name]).after.spare >= 0:
            return Drop(name)
    return Wait(f"{', '.join(behind) or 'nobody'} must be level before another replica may go")


def _catching_up(view: View, name: str) -> str:
    held, story = view.held.get(name), view.stories.get(name)
    if held is None:
        return f"{name}: {story}" if story else f"{name} has not answered yet"
    if view.roles[name] is Role.LEARNER and held >= view.committed:
        return f"{name} is level and becomes a member with the next session"
    return f"{name} holds {held + 1:,} of {view.committed + 1:,} transactions{f'; {story}' if story else ''}"


def applied(sets: ReplicaSets, steps: Mapping[int, Step]) -> ReplicaSets:
    """What is assigned after these steps."""
    partitions = {number: dict(roles) for number, roles in sets.partitions.items()}
    for number, step in steps.items():
        roles = partitions.setdefault(number, {})
        match step:
            case Add(names, role):
                roles.update({name: role for name in names if name not in roles})
            case Drop(name):
                roles.pop(name, None)
            case _:
                pass
    return replace(sets, partitions=partitions)


def view_of(
    found: Overview, number: int, goal: Iterable[str], roles: Mapping[str, Role], meta: PartitionMeta | None
) -> View:
    partition = found.partitions[number]
    replicas = partition.said.replicas if partition.said is not None else ()
    return View(
        partition=number,
        roles=roles,
        goal=tuple(goal),
        level=found.level(number),
        voting=frozenset(meta.members) if meta is not None else frozenset(),
        was_opened=(meta is not None and (meta.opened > 0 or meta.decision is not None))
        or any(holds_anything(storage, number) for storage in found.storages),  # its document may be lost
        waiting=partition.owner_waiting,
        held={replica.storage: replica.durable_id for replica in replicas if replica.state != "DOWN"},
        committed=partition.said.committed if partition.said is not None else -1,
        stories={replica.storage: replica.story for replica in replicas if replica.state == "DOWN"}
        | {storage.meta.name: "its disk is full" for storage in found.storages if _is_full(storage, number)},
    )


def holds_anything(storage: StorageView, number: int) -> bool:
    """Of this partition, or may do so: it says nothing of a replica that it refuses."""
    held = storage.said.assigned if storage.said is not None else ()
    return any(one.partition == number and (one.status is None or one.status.last_id >= 0) for one in held)


def is_ahead(storage: StorageView, number: int, session: int) -> bool:
    """It has begun a session above this one. Each is saved before it is begun: a document that says this one, and was read
    after the storage was asked, went back."""
    held = storage.said.assigned if storage.said is not None else ()
    return any(one.partition == number and one.status is not None and one.status.session > session for one in held)


def _is_full(storage: StorageView, number: int) -> bool:
    held = storage.said.assigned if storage.said is not None else ()
    return any(one.partition == number and one.status is not None and one.status.is_full for one in held)


def goals(found: Overview, sets: ReplicaSets) -> dict[int, tuple[str, ...]]:
    """Where replicas shall be, as far as that was ever said: what moves already counts as moved. A goal that names a
    storage that was taken out since then cannot be reached, and counts for nothing."""
    there = {view.meta.name for view in found.storages}
    wanted = {number: goal for number, goal in found.moves.items() if there.issuperset(goal)}
    return {
        number: tuple(wanted.get(number, sorted(sets.partitions.get(number, {}))))
        for number in range(found.meta.partitions)
    }
