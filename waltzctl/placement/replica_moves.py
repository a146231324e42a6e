"""Plans of replica moves: from where replicas are to where they shall be. Returns what a command is going to do, what
is against it, and one safe step at a time. No I/O.

A `MovePlan` is one value: it is shown as a plan, and it is what `mover` carries out. Its goal is saved before anything
moves (`waltzd.cluster.documents.Moves`), and every step follows from the present state. So the next run of the tool,
after a crash or at the same time, takes the same steps.

New replicas come first, as learners, which costs nothing. The owner makes them members when they are level, and in that
session removes all old members if every new one is level. This module handles what the owner leaves: old members are
removed one at a time, and never if the rest could not take transactions. After each removal the owner begins a new
session without that member; until it is recorded the member may still have a vote, and the next removal waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from waltzctl.placement.replica_assignment import crowded, reassign_replicas
from waltzctl.shell.cluster_target import unknown
from waltzctl.shell.numbers import check_partitions, format_partitions
from waltzctl.shell.progress import duration
from waltzctl.shell.safety import Danger, Effect, Margin, Plan, danger, margin, without
from waltzctl.show.terminal import size
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, StorageView
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.documents import Membership, PartitionMeta, ReplicaSets, StorageMeta
from waltzd.errors.operations import Unsafe
from waltzd.protocol.descriptions import StorageDescription

Goals = Mapping[int, tuple[str, ...]]
"""Partition → storages that shall hold it."""


@dataclass(frozen=True, kw_only=True)
class PlacementState:
    """State from which a plan is made, with the versions of its documents."""

    found: ClusterSnapshot
    sets: ReplicaSets
    versions: Mapping[int, int]
    """Partition → version of its replica document."""
    moves_version: int

    @property
    def versions_read(self) -> tuple[int, Mapping[int, int], Collection[str]]:
        """Return the versions of its documents and the names of the storages, to detect that one of them changed."""
        return self.moves_version, self.versions, self.storages.keys()

    @property
    def storages(self) -> dict[str, StorageMeta]:
        return {view.meta.name: view.meta for view in self.found.storages}

    @property
    def goals(self) -> Goals:
        """Goals of the replicas: for a partition that moves already, the end of that move. A goal that names a removed
        storage cannot be reached, and is ignored."""
        there = self.storages.keys()
        wanted = {number: goal for number, goal in self.found.moves.items() if there >= set(goal)}
        return {number: tuple(wanted.get(number, sorted(self.roles(number)))) for number in self.found.logs}

    @property
    def groups(self) -> dict[str, str]:
        return {name: storage.group for name, storage in self.storages.items()}

    def roles(self, number: int) -> Mapping[str, Membership]:
        return self.sets.partitions.get(number, {})

    def new(self, number: int, names: Iterable[str]) -> list[str]:
        """Return which of these storages still have to copy the partition: they are not members."""
        roles = self.roles(number)
        return sorted(name for name in names if roles.get(name) is not Membership.MEMBER)

    def storage(self, name: str) -> StorageMeta:
        storages = self.storages
        if name not in storages:
            raise unknown("storage", name, storages)
        return storages[name]

    def check_partitions(self, numbers: Iterable[int]) -> None:
        check_partitions(numbers, self.found.meta.partitions, has_group_log=self.found.group_log is not None)

    def spread(self, storages: Mapping[str, str], replication: Mapping[int, int]) -> Goals:
        """Spread replicas evenly with the fewest copies, given where they are or are moving. `storages` maps each name
        to its group."""
        current = {number: tuple(name for name in names if name in storages) for number, names in self.goals.items()}
        for number, names in current.items():
            if replication.get(number, 0) < len(names):  # one that holds everything is not given up for one that does not
                best = self.found.level(number) or members_at_hand(self, number)
                current[number] = tuple(name for name in names if name in best) or names
        return reassign_replicas(current, storages, replication)


@dataclass(frozen=True, kw_only=True)
class MovePlan:
    """Replica moves of one command. `newcomer` is added to the cluster before anything is copied to it, unless it is
    there already; `leaver` is removed from the list of storages once no partition has anything there."""

    now: PlacementState
    verb: str
    subject: str
    goals: Goals = field(default_factory=dict)
    newcomer: StorageMeta | None = None
    newcomer_says: StorageDescription | None = None
    leaver: str | None = None
    deletes_files: bool = False
    """Whether files of replicas that leave are deleted; otherwise they are set aside."""
    keeps_rate: bool = False
    """Whether the copy limit of an interrupted command stays in force if no new one is given."""

    @property
    def changed(self) -> dict[int, tuple[str, ...]]:
        """Return the goals that are not reached yet, or whose move is not finished."""
        now = self.now
        return {
            number: tuple(names)
            for number, names in self.goals.items()
            if number in now.found.moves or set(names) != set(now.roles(number))
        }

    @property
    def first(self) -> StorageMeta | None:
        """Return the storage that has to be added first; None if it is there already."""
        return None if self.newcomer is None or self.newcomer.name in self.now.storages else self.newcomer

    def is_within(self, agreed: MovePlan) -> bool:
        """Return whether the confirmed plan contains this one: its goals, copies, removals, danger and objections."""
        plan, before = self.plan(), agreed.plan()
        return (
            all(
                set(names) == set(agreed.goals.get(number, ()))
                and set(self.now.new(number, names)) <= set(agreed.now.new(number, names))
                and self.now.roles(number).keys() - names <= agreed.now.roles(number).keys() - names
                for number, names in self.changed.items()
            )
            and plan.danger <= before.danger
            and set(plan.refusals) <= set(before.refusals)
        )

    def plan(self, bytes_per_second: int | None = None) -> Plan:
        now, changed = self.now, self.changed
        bare = [number for number, names in sorted(changed.items()) if not names]
        if bare:  # it cannot be meant: the log would be gone
            raise Unsafe(
                f"{self.verb} {self.subject}: partition {format_numbers(bare)} would have no replica",
                next_step="leave at least one; `waltzctl cluster delete` gives up a whole cluster",
            )
        effects, undecided = effects_of(now, changed)
        together = crowding(now, changed)
        reported = now.found.storage_reports
        if self.newcomer is not None and self.newcomer_says is not None:
            reported[self.newcomer.name] = self.newcomer_says
        wanted = bytes_to_copy(now, changed, reported)
        new = self.first
        return Plan(
            verb=self.verb,
            subject=self.subject,
            steps=(
                *([f"add {new.name} at {new.listen}, group {new.group}"] if new is not None else []),
                *steps_in_words(now, changed),
                *copying_in_words(wanted, bytes_per_second),
                *([f"remove {self.leaver} from the list of storages"] if self.leaver is not None else []),
                *together,
            ),
            margins=tuple(effects),
            danger=Danger.TYPED if together or self.deletes_files else danger(effects),
            unsafe=(*undecided, *shortages(wanted, reported)),
            moves=tuple(sorted(changed)),
        )

    @property
    def interrupted(self) -> str | None:
        """Return the message for the case that the command is interrupted; None if nothing moves."""
        if not self.changed:
            return None
        numbers = format_numbers(sorted(self.changed)).replace(" ", "")
        return (
            "Interrupted. Finished moves stay, and new replicas are still copied, at the rate of this command. "
            f"`waltzctl partition assign {numbers}` resumes, `waltzctl partition assign {numbers} --cancel` cancels "
            "unfinished moves, `waltzctl partition list -o wide` shows their goals. The same command resumes everything "
            "that was planned."
        )


# -- in words ----------------------------------------------------------------------------------------------------------


def steps_in_words(now: PlacementState, goals: Goals) -> tuple[str, ...]:
    """Describe the steps; equal steps of several partitions are one sentence."""
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for number, names in sorted(goals.items()):
        leaving = sorted(name for name in now.roles(number) if name not in names)
        alike.setdefault((tuple(now.new(number, names)), tuple(leaving)), []).append(number)
    reported = []
    for (new, old), numbers in alike.items():
        parts = [*([f"copy to {', '.join(new)}"] if new else []), *([f"leave {', '.join(old)}"] if old else [])]
        reported.append(f"{format_partitions(numbers)}: {', then '.join(parts) or 'finish the move'}")
    return tuple(reported)


# -- what is against it ------------------------------------------------------------------------------------------------


def members_at_hand(now: PlacementState, number: int) -> frozenset[str]:
    """Return the members that answer and hold what the newest known session has written, whether or not an owner counts
    them. With a majority of them an owner finds everything that was committed."""
    roles = now.roles(number)
    held = {
        storage.meta.name: one
        for storage in now.found.storages
        if roles.get(storage.meta.name) is Membership.MEMBER and (one := storage.replica(number)) and one.refused is None
    }
    newest = max((one.status.session for one in held.values() if one.status is not None), default=0)
    return frozenset(
        name
        for name, one in held.items()
        if one.status is None or (one.status.is_available and one.status.is_sound and one.status.session == newest)
    )


def effects_of(now: PlacementState, goals: Goals) -> tuple[list[Effect], list[str]]:
    """Return what each partition can lose after the move, and the objections. While a partition takes no transactions,
    it is unknown which of its leaving members are needed."""
    effects, undecided = list[Effect](), list[str]()
    for number, names in sorted(goals.items()):
        view, roles = now.found.partitions[number], now.roles(number)
        members = {name for name, role in roles.items() if role is Membership.MEMBER}
        if view.is_open or members <= set(names):
            if view.reported is not None or roles:  # it was ever open
                level = now.found.level(number)
                there = [name for name in names if name in level or name not in members]
                after = margin(number, dict.fromkeys(names, Membership.MEMBER), there)
                effects.append(Effect(before=margin(number, roles, level), after=after))
            continue
        level = members_at_hand(now, number)
        after = Margin(partition=number, members=len(members), level=len(level & set(names)))
        effect = Effect(before=margin(number, roles, level), after=after)
        effects.append(effect)
        if effect.before.spare < 0 and effect.refusal is None:
            undecided.append(
                f"partition {number} takes no transactions, and only {effect.before.level} of its {len(members)} members "
                "answer with what they held: what the others hold may be needed"
            )
    return effects, undecided


def bytes_to_copy(now: PlacementState, goals: Goals, reported: Mapping[str, StorageDescription]) -> dict[str, int]:
    """Return the bytes to copy to each storage that answers."""
    held = {name: {one.partition: one.disk_bytes for one in found.assigned} for name, found in reported.items()}
    wanted: dict[str, int] = {}
    for number, names in goals.items():
        roles = now.roles(number)
        for name in reported.keys() & now.new(number, names):
            whole = max((held[other].get(number, 0) for other in roles if other != name and other in held), default=0)
            wanted[name] = wanted.get(name, 0) + max(0, whole - held[name].get(number, 0))
    return wanted


def copying_in_words(wanted: Mapping[str, int], bound: int | None) -> tuple[str, ...]:
    """Describe how much is copied, and the shortest duration if a limit is known. `bound`: bytes per second."""
    whole = sum(wanted.values())
    if whole == 0:
        return ()
    if bound is None:
        return (
            f"copy {size(whole)} in all, at most as fast as the servers' `catch_up_bytes_per_second` lets each replica",
        )
    return (f"copy {size(whole)} in all, at most {size(bound)} a second: {duration(whole / bound)} or longer",)


def shortages(wanted: Mapping[str, int], reported: Mapping[str, StorageDescription]) -> tuple[str, ...]:
    """Find storages with less free space than is to be copied there, without the space that they keep free. Replicas
    that leave do not help, because they are removed only after the copies are made."""
    room = {name: max(0, reported[name].free_bytes - reported[name].free_bytes_min) for name in wanted}
    return tuple(
        f"{name} has room for {size(room[name])}, and {size(bytes_)} are to be copied there"
        for name, bytes_ in sorted(wanted.items())
        if bytes_ > room[name]
    )


def crowding(now: PlacementState, goals: Goals) -> tuple[str, ...]:
    """Find partitions that one failure domain could stop after the move, and cannot stop now."""
    found: dict[str, list[int]] = {}
    for number, names in sorted(goals.items()):
        group = crowded(names, now.groups)
        if group is not None and crowded(now.roles(number), now.groups) is None:
            found.setdefault(group, []).append(number)
    return tuple(
        f"{format_partitions(numbers)}: most replicas are in the group {group} then, and it stops with it"
        for group, numbers in found.items()
    )


# -- step by step ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PartitionMove:
    """State of one partition whose replicas move."""

    partition: int
    roles: Mapping[str, Membership]
    goal: tuple[str, ...]
    level: frozenset[str]
    """Storages that hold everything committed."""
    voting: frozenset[str]
    """Members of the session that was opened last: they vote when it is closed."""
    was_opened: bool
    """Whether a session was ever opened, so that there may be data to lose."""
    waiting: str
    """Reason why the partition is not open; empty if it is."""
    held: Mapping[str, int]
    """Storage → last id that its replica is known to hold."""
    committed: int
    stories: Mapping[str, str] = field(default_factory=dict)
    """Storage → reason why its replica accepts nothing, as the storage or the owner reports it."""

    @property
    def copied(self) -> dict[str, tuple[int, int]]:
        """Return for each learner how many transactions it has, and of how many."""
        return {
            name: (min(self.held.get(name, -1), self.committed) + 1, self.committed + 1)
            for name in self.goal
            if self.roles.get(name) is Membership.LEARNER
        }

    @property
    def missing(self) -> list[str]:
        """Return the storages of the goal that have no replica yet."""
        return [name for name in self.goal if name not in self.roles]

    @property
    def surplus(self) -> list[str]:
        return sorted(name for name in self.roles if name not in self.goal)

    @property
    def is_done(self) -> bool:
        """Return whether exactly the goal is assigned, all of it takes part, and no other storage has a vote."""
        if set(self.goal) != set(self.roles):
            return False
        is_member = all(role is Membership.MEMBER for role in self.roles.values())
        return not self.was_opened or (is_member and self.voting <= set(self.goal))


@dataclass(frozen=True)
class Step:
    """Next step of one partition."""

    why: str
    """What the step does, or what it waits for; empty if the goal is reached."""
    roles: Mapping[str, Membership]
    """Replica set after the step; unchanged while it waits."""


def next_step(view: PartitionMove) -> Step:
    if view.is_done:
        return Step("", view.roles)
    if view.missing:
        # Before the first session nothing can be lost, and no owner is there to make a member of a learner.
        role = Membership.LEARNER if view.was_opened else Membership.MEMBER
        return Step(f"start copying to {', '.join(view.missing)}", {**view.roles, **dict.fromkeys(view.missing, role)})
    if not view.was_opened:
        return _drop(view, view.surplus[0])
    learners = [name for name in view.surplus if view.roles[name] is Membership.LEARNER]
    if learners:
        return _drop(view, learners[0])  # it has no vote
    if view.waiting:
        return Step(view.waiting, view.roles)
    behind = [name for name in view.goal if view.roles[name] is not Membership.MEMBER or name not in view.level]
    if any(view.roles[name] is not Membership.MEMBER for name in behind) or (behind and not view.surplus):
        return Step(_catching_up(view, behind[0]), view.roles)
    left = sorted(view.voting - set(view.roles))
    if left:
        return Step(f"the session without {', '.join(left)} is not recorded yet", view.roles)
    # Those that are not level go first: they are no help.
    for name in sorted(view.surplus, key=lambda name: (name in view.level, name)):
        if without(view.partition, view.roles, view.level, gone=[name]).after.spare >= 0:
            return _drop(view, name)
    return Step(f"{', '.join(behind) or 'nobody'} must be level before another replica may go", view.roles)


def _drop(view: PartitionMove, name: str) -> Step:
    return Step(f"remove the replica on {name}", {other: role for other, role in view.roles.items() if other != name})


def _catching_up(view: PartitionMove, name: str) -> str:
    held, story = view.held.get(name), view.stories.get(name)
    if held is None:
        return f"{name}: {story}" if story else f"{name} has not answered yet"
    if view.roles[name] is Membership.LEARNER and held >= view.committed:
        return f"{name} is level and becomes a member with the next session"
    return f"{name} holds {held + 1:,} of {view.committed + 1:,} transactions{f'; {story}' if story else ''}"


def partition_move(
    found: ClusterSnapshot, number: int, goal: Iterable[str], roles: Mapping[str, Membership], meta: PartitionMeta | None
) -> PartitionMove:
    partition = found.partitions[number]
    replicas = partition.reported.replicas if partition.reported is not None else ()
    return PartitionMove(
        partition=number,
        roles=roles,
        goal=tuple(goal),
        level=found.level(number),
        voting=frozenset(meta.members) if meta is not None else frozenset(),
        was_opened=(meta is not None and (meta.opened > 0 or meta.decision is not None))
        or any(holds_anything(storage, number) for storage in found.storages),  # its document may be lost
        waiting=partition.owner_waiting,
        held={replica.storage: replica.durable_id for replica in replicas if replica.state != "DOWN"},
        committed=partition.reported.committed if partition.reported is not None else -1,
        stories={replica.storage: replica.story for replica in replicas if replica.state == "DOWN"}
        | {storage.meta.name: "its disk is full" for storage in found.storages if _is_full(storage, number)},
    )


def holds_anything(storage: StorageView, number: int) -> bool:
    """Return whether the storage holds data of this partition, or may: it reports nothing of a replica that it refuses."""
    one = storage.replica(number)
    return one is not None and (one.status is None or one.status.last_id >= 0)


def is_ahead(storage: StorageView, number: int, session: int) -> bool:
    """Return whether the storage has begun a session above this one. A session is saved before it is begun, so a
    document with this session that was read later went back in time."""
    one = storage.replica(number)
    return one is not None and one.status is not None and one.status.session > session


def _is_full(storage: StorageView, number: int) -> bool:
    one = storage.replica(number)
    return one is not None and one.status is not None and one.status.is_full
