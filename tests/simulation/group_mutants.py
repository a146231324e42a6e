"""Mutants of consumer groups: what is kept, who may still speak, how often something is tried, and in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.mutant import Aim, Patches, mutant
from waltzd.server.groups.delivery_tracker import DeliveryTracker, KeyedOrder, LogOrder
from waltzd.server.groups.state import GroupState
from waltzd.server.groups.state_log import GroupStateLog, Key
from waltzd.server.groups.state_writer import GroupStateWriter
from waltzd.server.subscriptions.group_coordinator import GroupCoordinator
from waltzd.server.subscriptions.group_partition import GroupPartition

SMALL: dict[str, Any] = {"rate": 40.0, "partitions": 1, "members": 4, "session_seconds": 1.5, "keep_alive_seconds": 1.5}
QUEUE = Aim(faults=("subscribers",), seconds=5.0, storages=3, servers=2, format=1, setup={**SMALL, "mode": "queue"})
KEYED = Aim(faults=("subscribers",), seconds=5.0, storages=3, servers=2, format=1, setup={**SMALL, "mode": "keyed"})
ORDERED = Aim(faults=("subscribers",), seconds=5.0, storages=3, servers=2, format=1, setup={**SMALL, "mode": "ordered"})
FILTERED = replace(QUEUE, faults=("subscribers", "filters"))
REMOVED = replace(QUEUE, faults=("removals",))
REPEATED = replace(QUEUE, faults=("subscribers", "repeats"))


@mutant(4, 5, aim=QUEUE)
def moves_the_floor_past_an_unacknowledged_id(patches: Patches) -> None:
    """A new owner begins behind the first transaction that nobody has acknowledged."""

    def make(right: Any) -> Any:
        def init(self: GroupStateWriter, *arguments: Any, **named: Any) -> None:
            right(self, *arguments, **named)
            if self.state.open.first is not None:
                self.state.open.put(self.state.open.first, self.state.open.first, None)

        return init

    patches.wrap(GroupStateWriter, "__init__", make)


@mutant(0, aim=QUEUE)
def accepts_an_acknowledgement_of_an_old_epoch(patches: Patches) -> None:
    """What a member says of a delivery counts for any later one that it has of the same transaction."""

    def make(right: Any) -> Any:
        def match(self: DeliveryTracker, name: str, epoch: int, tag: int, first: int, last: int) -> Any:
            return right(self, name, self.state.epoch, tag if epoch == self.state.epoch else 1 << 40, first, last)

        return match

    patches.wrap(DeliveryTracker, "_match", make)


@mutant(1, aim=QUEUE)
def tries_what_is_poison_for_ever(patches: Patches) -> None:
    """The count of its failures is lost."""

    def fail(self: GroupState, id: int) -> int:
        return 1

    patches.set(GroupState, "fail", fail)


@mutant(3, 1, aim=QUEUE)
def hangs_after_a_change_of_owner(patches: Patches) -> None:
    """A new owner goes on behind all that the one before knew: what was in a member's hands is never given out again."""

    def make(right: Any) -> Any:
        def init(self: DeliveryTracker, settings: Any, state: GroupState) -> None:
            right(self, settings, state)
            self.cursor = state.reach

        return init

    patches.wrap(DeliveryTracker, "__init__", make)


@mutant(1, aim=QUEUE)
def gives_out_again_what_was_acknowledged(patches: Patches) -> None:
    """Without any change of owner, every fifth transaction comes once more."""

    def make(right: Any) -> Any:
        def settle(self: DeliveryTracker, ids: Any) -> None:
            ids = list(ids)
            right(self, ids)
            twice = self.__dict__.setdefault("twice", set())
            for id in ids:
                if id % 5 == 0 and id not in twice:
                    twice.add(id)
                    self.state.open.put(id, id, 0)
                    self._again.add(id)

        return settle

    patches.wrap(DeliveryTracker, "_settle", make)


@mutant(5, 3, aim=QUEUE)
def keeps_no_failures(patches: Patches) -> None:
    """A new owner counts from none on."""

    def make(right: Any) -> Any:
        def init(self: GroupStateWriter, *arguments: Any, **named: Any) -> None:
            right(self, *arguments, **named)
            for first, last, _ in list(self.state.open):
                self.state.open.put(first, last, 0)

        return init

    patches.wrap(GroupStateWriter, "__init__", make)


@mutant(3, 1, aim=QUEUE)
def says_that_it_is_kept_when_it_was_heard(patches: Patches) -> None:
    """A member is told that what it said is on disks before it is."""
    patches.set(GroupPartition, "kept", property(lambda self: self._checkpointer.writer.changes))


@mutant(1, aim=QUEUE)
def parks_at_the_first_failure(patches: Patches) -> None:
    """All tries but the first are taken for used up."""

    def make(right: Any) -> Any:
        def fail(self: DeliveryTracker, id: int, reason: str, now: float, delay: float | None = None) -> None:
            self.state.fail(id)
            self._give_up(id, reason, now)

        return fail

    patches.wrap(DeliveryTracker, "_fail", make)


@mutant(1, aim=KEYED)
def gives_out_the_second_of_a_key_before_the_first_is_done(patches: Patches) -> None:
    """Those of one key do not wait for each other."""

    def add(self: KeyedOrder, id: int, key: Any) -> None:
        self._heads.add(id, None)

    patches.set(KeyedOrder, "add", add)


@mutant(0, aim=ORDERED)
def leaves_out_what_lies_behind_one_that_failed(patches: Patches) -> None:
    """In an ordered group only what failed comes back, and goes to the end of the line."""

    def back(self: LogOrder, id: int, at: float) -> list[int]:
        index = self._line.index(id, 0, self._taken)
        del self._line[index]
        self._taken -= 1
        self._line.append(id)
        return []

    patches.set(LogOrder, "back", back)


@mutant(1, aim=QUEUE)
def gives_a_member_more_than_it_has_room_for(patches: Patches) -> None:
    """Room is not counted."""

    def make(right: Any) -> Any:
        def next_member(self: DeliveryTracker) -> str | None:
            return next(iter(self._members), None)

        return next_member

    patches.wrap(DeliveryTracker, "_next_member", make)


@mutant(1, aim=QUEUE)
def forgets_what_a_lost_member_had(patches: Patches) -> None:
    """A member that crashes takes what it had with it."""

    def make(right: Any) -> Any:
        def leave(self: DeliveryTracker, name: str, now: float, *, is_lost: bool) -> int:
            if is_lost:
                self._settle(sorted(self._members[name].flights))
            return int(right(self, name, now, is_lost=is_lost))

        return leave

    patches.wrap(DeliveryTracker, "leave", make)


@mutant(0, 1, aim=FILTERED)
def forgets_the_filter_after_a_change_of_owner(patches: Patches) -> None:
    """A new owner gives out all transactions."""

    def make(right: Any) -> Any:
        def init(self: GroupPartition, key: Any, meta: Any, pipeline: Any, coordinator: Any, on_fatal: Any) -> None:
            right(self, key, meta, pipeline, coordinator, on_fatal)
            if coordinator.state_log.state(key.name, key.partition) is not None:
                self._kinds = None

        return init

    patches.wrap(GroupPartition, "__init__", make)


@mutant(0, 1, aim=FILTERED)
def takes_what_a_filter_wants_for_what_it_leaves_out(patches: Patches) -> None:
    """Of the headers that the group wants the highest is left out."""

    def make(right: Any) -> Any:
        def init(self: GroupPartition, key: Any, meta: Any, pipeline: Any, coordinator: Any, on_fatal: Any) -> None:
            right(self, key, meta, pipeline, coordinator, on_fatal)
            if self._kinds is not None:
                self._kinds = self._kinds[:-1]

        return init

    patches.wrap(GroupPartition, "__init__", make)


@mutant(0, 1, aim=REMOVED)
def begins_where_the_removed_group_of_the_name_stood(patches: Patches) -> None:
    """What is left of a group that was removed counts for the one that was made again."""

    def end(self: GroupStateLog, key: Key) -> None:
        self.groups.pop(key.name, None)

    def state(self: GroupStateLog, name: str, partition: int) -> GroupState | None:
        found = [one for key, one in self._states.items() if (key.name, key.partition) == (name, partition)]
        return found[-1] if found else None

    patches.set(GroupStateLog, "_end", end)
    patches.set(GroupStateLog, "state", state)


@mutant(0, aim=REMOVED)
def removes_no_group(patches: Patches) -> None:
    """An operator is told that the group is gone, and it is not."""

    async def remove(self: GroupCoordinator, name: str, made_at: int) -> None:
        return None

    patches.set(GroupCoordinator, "remove", remove)


@mutant(0, 1, aim=REPEATED)
def resets_again_when_the_answer_was_lost(patches: Patches) -> None:
    """A reset begins the next epoch, whatever epoch it names."""

    def make(right: Any) -> Any:
        async def reset(self: GroupPartition, after: int, epoch: int) -> Any:
            return await right(self, after, 0)

        return reset

    patches.wrap(GroupPartition, "_reset", make)
