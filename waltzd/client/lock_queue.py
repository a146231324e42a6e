"""Order of the commands of one client that declare the same write lock in one partition.

Two such commands that are under way together always conflict: the view must contain the first before the second is built,
or the log rejects the second. So each command waits for those before it, and is built once instead of once for each of
them. A queue only saves attempts; that no conflict is committed is the work of the log alone.

A command waits only for commands that joined before it, with all its locks at once. So no two commands wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from waltzd.protocol.locks import Lock, Mode
from waltzd.protocol.positions import Position

PRUNE_AT = 64
"""Smallest number of entries at which entries that are over are dropped."""
Turn = asyncio.Future[Position]
"""End of a command: the position that a view must have for the next one, -1 if nothing was committed."""


class LockQueue:
    """Commands of one partition, by the locks that they declared to write."""

    def __init__(self) -> None:
        self._last: dict[int, Turn] = {}
        """Turn of the last command that declared to write a lock."""
        self._prune_at = PRUNE_AT

    def join(self, locks: Sequence[Lock], position: Position) -> tuple[Turn, list[Turn]]:
        """Join the queues of all locks at once; return the turn of this command, which must be ended by `set_result`, and
        the turns to wait for. `position` is that of the view."""
        turn: Turn = asyncio.get_running_loop().create_future()
        before = {self._last[lock.hash]: None for lock in locks if lock.mode is not Mode.APPEND and lock.hash in self._last}
        for lock in locks:
            if lock.mode is Mode.WRITE:
                self._last[lock.hash] = turn
        if len(self._last) > self._prune_at:
            self._last = {lock: one for lock, one in self._last.items() if not _is_over(one, position)}
            self._prune_at = max(PRUNE_AT, 2 * len(self._last))
        return turn, [one for one in before if not _is_over(one, position)]


def leave(turn: Turn, before: Sequence[Turn]) -> None:
    """End the turn of a command that gave up while it waited: the commands after it still wait for those `before`."""
    if (left := next((one for one in before if not one.done()), None)) is not None:
        left.add_done_callback(lambda _: leave(turn, before))
    else:
        turn.set_result(max(one.result() for one in before))


def _is_over(turn: Turn, position: Position) -> bool:
    """Return whether the command has ended, and the view contains what it wrote."""
    if not turn.done():
        return False
    needed = turn.result()
    return needed.timeline != position.timeline or needed <= position
