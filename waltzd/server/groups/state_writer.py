"""When the owner of a partition writes the state of a group to the group log, and whether it still may. Pure.

An owner claims the group first: it reads the group log to its end, begins a new epoch, and writes an entry with that
epoch. Each entry is written under the lock of the group in this partition, with the writer's own last entry as the mark
of the lock. So the lock is the fence: after another owner has claimed the group, every entry of this owner is rejected,
however late it notices.

A rejection may be false, because a log keeps old locks only approximately, and the outcome of an append may be unknown.
In both cases the owner reads the log to its end and finds one of three things: its own entry, another epoch, or
neither. If neither, it appends the same bytes again. An owner whose claim or reset has no certain outcome starts over
with a new epoch, which costs nothing.

Acknowledgements are batched for at most one second. A change that must be durable before it is answered is written at
once.
"""

from __future__ import annotations

from typing import NamedTuple

from waltzd.protocol.locks import Lock
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import NEVER_FORKED, Lineage
from waltzd.server.groups.state import Dropped, GroupState
from waltzd.server.groups.state_log import GroupStateLog, Key, lock_of, state_entry

DELAY_SECONDS = 1.0
"""Longest time that acknowledgements are batched. Acknowledgements that were not written are lost with the owner: their
transactions are delivered again."""
CHANGES_MAX = 1000
"""Number of unwritten changes at which an entry is written at once."""
UNWRITTEN_MAX = 100_000
"""Number of changes not known to be committed at which the group pauses."""


class Write(NamedTuple):
    """One append to the group log."""

    data: bytes
    lock: Lock
    position: int
    """Mark of the lock: the writer's own last entry, or the end of the log at its claim."""


class GroupStateWriter:
    def __init__(
        self, key: Key, state_log: GroupStateLog, *, after: int, now: float, lineage: Lineage = NEVER_FORKED
    ) -> None:
        """Begin a claim. `state_log` has read everything that was committed. `after` is the start position of a group
        that has no state in this partition yet. `lineage` holds the timelines of the partition's log."""
        known = state_log.state(key.name, key.partition)
        self.key = key
        self.dropped: Dropped | None = None
        """State that was dropped when the group moved to the current timeline; None if it did not move."""
        if known is None:
            timeline = after.timeline if isinstance(after, Position) else lineage.current
            self.state = GroupState(after=int(after), timeline=timeline)
        else:
            self.state = GroupState.of(known.snapshot())
        shared = lineage.shared_to(self.state.timeline)
        if shared is not None and self.state.acknowledged_above(shared) == 0:
            self.dropped = self.state.follow(lineage)
        self.state.begin_epoch()
        self._position = state_log.position
        self._is_whole = known is None or self.dropped is not None
        """True if the next entry must be a snapshot."""
        self._pending: Write | None = None
        self._is_in_doubt = False
        self._begins_epoch = True
        """True if the next entry to be committed is the first of its epoch."""
        self.is_claimed = False
        """True once the claim is committed. Nothing is delivered before."""
        self.is_deposed = False
        """True once another owner has claimed the group, or the group was deleted. Nothing held here counts any more."""
        self._changes = 1
        """Number of changes of the state since this writer began; the claim is the first."""
        self._written = 0
        """Number of changes in entries that `write` returned."""
        self.kept = 0
        """Number of changes that are committed."""
        self._since: float | None = now
        """Time of the oldest change that is in no entry; None if there is none."""

    # -- when ----------------------------------------------------------------------------------------------------------

    def changed(self, now: float, count: int = 1) -> int:
        """Record `count` changes of the state. They are durable once `kept` has reached the returned number."""
        self._changes += count
        if self._since is None:
            self._since = now
        return self._changes

    @property
    def changes(self) -> int:
        """Return the number of the newest change. It is durable once `kept` has reached it."""
        return self._changes

    @property
    def unwritten(self) -> int:
        """Return how many changes are not known to be committed."""
        return self._changes - self.kept

    @property
    def is_writing(self) -> bool:
        """Return whether an entry was handed out by `write` and its outcome is not known yet."""
        return self._pending is not None

    def rewrite(self, now: float) -> int:
        """Make the next entry a snapshot, so that older entries can be trimmed; return the number of the change."""
        self._is_whole = True
        return self.changed(now)

    def reset(self, state: GroupState, now: float) -> int:
        """Replace the state by one of a later epoch; return the number of the change. No entry may be in flight."""
        assert self._pending is None
        assert state.epoch > self.state.epoch
        self.state, self._is_whole, self._begins_epoch = state, True, True
        return self.changed(now)

    @property
    def must_pause(self) -> bool:
        """Return whether the group must pause because too many changes are uncommitted."""
        return self.unwritten >= UNWRITTEN_MAX

    def wake(self) -> float | None:
        """Return the time at which `write` must be called if nothing else happens before; None if nothing is to be
        written."""
        if self._since is None or self._pending is not None or self.is_deposed:
            return None
        return self._since if not self.is_claimed else self._since + DELAY_SECONDS

    def write(self, now: float, state_log: GroupStateLog, *, is_urgent: bool = False) -> Write | None:
        """Return the entry to append now; None if there is none. At most one entry is in flight. `is_urgent` skips the
        batching delay."""
        wake = self.wake()
        if wake is None:
            return None
        if not is_urgent and now < wake and self._changes - self._written < CHANGES_MAX:
            return None
        if self._is_whole or (self.is_claimed and state_log.overdue == self.key):
            data: bytes | None = self.state.snapshot()
            self.state.forget_changes()
        else:
            data = self.state.delta()
        self._since, self._written, self._is_whole = None, self._changes, False
        if data is None:  # the changes cancelled each other
            self.kept = self._written
            return None
        self._pending = Write(state_entry(*self._about, data), lock_of(self.key.name, self.key.partition), self._position)
        return self._pending

    @property
    def _about(self) -> tuple[str, int, int]:
        return self.key.name, self.key.partition, self.key.made_at

    # -- what came of it -----------------------------------------------------------------------------------------------

    def committed(self, id: int) -> None:
        assert self._pending is not None
        self._pending, self._is_in_doubt, self._begins_epoch, self._position = None, False, False, Position(id)
        self.is_claimed, self.kept = True, self._written

    def doubtful(self) -> None:
        """Record that the entry was rejected or that its outcome is unknown. The caller reads the log to its end and
        calls `look`."""
        assert self._pending is not None
        self._is_in_doubt = True

    def look(self, state_log: GroupStateLog) -> Write | None:
        """Compare with the log, which was read to its end. Set `is_deposed` if another owner has the group; return the
        entry to append again, if there is one."""
        group = state_log.groups.get(self.key.name)
        state = None if group is None else state_log.state(self.key.name, self.key.partition)
        is_ours = state is not None and state.epoch == self.state.epoch
        if group is None or group[1] != self.key.made_at or (self.is_claimed and not is_ours):
            self.is_deposed = True
        if self.is_deposed or not self._is_in_doubt:
            return None
        if self._begins_epoch:  # another owner's claim of this epoch could not be told from this entry
            self.is_deposed = True
            return None
        assert self._pending is not None
        newest = state_log.newest(self.key)
        if newest > self._position:
            self.committed(Position(newest, state_log.timeline))
            return None
        self._is_in_doubt = False
        self._position = state_log.position
        self._pending = self._pending._replace(position=self._position)
        return self._pending
