"""How the owner of a partition writes down where a group stands there: when, and whether it may still. Pure.

An owner claims the group first: it reads the ledger to its end, begins an epoch, and writes that. Each entry is written
under the lock of the group in this partition, and says that its writer has seen the log up to its own last entry. So the
lock is the fence: when another owner has claimed the group, every entry of this one is refused, however late it notices.

A refusal may be an estimate, since a log knows old locks only roughly, and an outcome may stay unknown. In both cases the
owner reads on, and finds in the log what is so: its own entry, another epoch, or neither; then the same bytes are written
again. An owner whose claim, or reset, was not plainly committed begins anew: an epoch costs nothing.

Acknowledgements wait for company, for at most a second. What must be on the disks of a majority before it is answered is
written at once.
"""

from __future__ import annotations

from typing import NamedTuple

from waltzd.protocol.locks import Lock
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import NEVER_FORKED, Lineage
from waltzd.server.groups.state import Dropped, GroupState
from waltzd.server.groups.state_log import GroupStateLog, Key, lock_of, stands

DELAY_SECONDS = 1.0
"""So long may acknowledgements wait; what was not written is given out again after a change of owner."""
CHANGES_MAX = 1000
"""So many do not wait."""
UNWRITTEN_MAX = 100_000
"""With so many that could not be written, a group pauses."""


class Write(NamedTuple):
    """An entry that is to be appended."""

    data: bytes
    lock: Lock
    position: int
    """What its writer has seen of the log, by its own word: the lock is compared with this."""


class GroupStateWriter:
    def __init__(
        self, key: Key, state_log: GroupStateLog, *, after: int, now: float, lineage: Lineage = NEVER_FORKED
    ) -> None:
        """A claim. `ledger` has read all that was committed; `after`: where a group begins that has not begun here yet;
        `lineage`: the timelines of the partition's log."""
        known = state_log.state(key.name, key.partition)
        self.key = key
        self.dropped: Dropped | None = None
        """What was dropped when the state went over to the current timeline; None: it did not."""
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
        """The next entry is a snapshot."""
        self._pending: Write | None = None
        self._is_in_doubt = False
        self._begins_epoch = True
        """The entry that is to be committed next is the first of its epoch."""
        self.is_claimed = False
        """Until it is, nothing may be given out."""
        self.is_deposed = False
        """Another owner has the group, or the group is gone: nothing of what is here counts any more."""
        self._changes = 1
        """Of the state, since the beginning: the claim is the first."""
        self._written = 0
        """How many of them are in entries that were given out to be appended."""
        self.kept = 0
        """How many of them are committed."""
        self._since: float | None = now
        """When the first one came that is in no entry."""

    # -- when ----------------------------------------------------------------------------------------------------------

    def changed(self, now: float, count: int = 1) -> int:
        """The state is another one. It is kept when `kept` has come to the number that this returns."""
        self._changes += count
        if self._since is None:
            self._since = now
        return self._changes

    @property
    def changes(self) -> int:
        """The number of the newest change: what is said now is kept when `kept` has come so far."""
        return self._changes

    @property
    def unwritten(self) -> int:
        """How many changes are not known to be committed."""
        return self._changes - self.kept

    @property
    def is_writing(self) -> bool:
        """An entry was given out, and what became of it is not told yet."""
        return self._pending is not None

    def rewrite(self, now: float) -> int:
        """Write all of it once more, as `changed`: the log becomes shorter by that."""
        self._is_whole = True
        return self.changed(now)

    def reset(self, state: GroupState, now: float) -> int:
        """From here on the group stands elsewhere, in another epoch: as `changed`. No entry may be on its way."""
        assert self._pending is None
        assert state.epoch > self.state.epoch
        self.state, self._is_whole, self._begins_epoch = state, True, True
        return self.changed(now)

    @property
    def must_pause(self) -> bool:
        """Too much of what members said is only here."""
        return self.unwritten >= UNWRITTEN_MAX

    def wake(self) -> float | None:
        """When something is to be written, if nothing else happens before."""
        if self._since is None or self._pending is not None or self.is_deposed:
            return None
        return self._since if not self.is_claimed else self._since + DELAY_SECONDS

    def write(self, now: float, state_log: GroupStateLog, *, is_urgent: bool = False) -> Write | None:
        """What is to be appended now: one entry at a time. `is_urgent`: somebody waits for it."""
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
        if data is None:  # what changed has changed back
            self.kept = self._written
            return None
        self._pending = Write(stands(*self._about, data), lock_of(self.key.name, self.key.partition), self._position)
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
        """It was refused, or what became of it is not known: read on to the end of what is committed, then `look`."""
        assert self._pending is not None
        self._is_in_doubt = True

    def look(self, state_log: GroupStateLog) -> Write | None:
        """What stands in the log now, read to its end; what is to be appended once more."""
        group = state_log.groups.get(self.key.name)
        state = None if group is None else state_log.state(self.key.name, self.key.partition)
        is_ours = state is not None and state.epoch == self.state.epoch
        if group is None or group[1] != self.key.made_at or (self.is_claimed and not is_ours):
            self.is_deposed = True
        if self.is_deposed or not self._is_in_doubt:
            return None
        if self._begins_epoch:  # a claim of this epoch by another owner would look like this entry
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
