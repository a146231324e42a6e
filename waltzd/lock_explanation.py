"""What the owner of a partition knows of one lock, and what follows for a transaction. Pure.

A transaction says up to which id its client has seen the log; each of its locks has a mark, and the transaction is refused
when a mark is above that. The table knows the marks of the locks that were marked last. For any other lock it answers with
its floor, an *estimate*: the lock was marked there or before, or never. So with an estimate a refusal may be needless, and
no acceptance is ever wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from waltzd.lock import Mode
from waltzd.outcome import Reason
from waltzd.quorum import EMPTY


@dataclass(frozen=True, kw_only=True)
class LockExplanation:
    lock: int
    """Its 64 bits."""
    mark: int
    """Marked by this transaction; or, in an estimate, by none above it. -1: by none at all."""
    reason: Reason
    """Why a transaction whose client has seen less would be refused."""
    committed: int
    last_id: int
    """The highest id that was given out, committed or not."""
    session: int
    low_mark: int
    """Where the session began, and the table with it."""
    floor: int
    locks: int
    locks_max: int

    @property
    def is_exact(self) -> bool:
        """The table has the lock; or its floor is below all ids, so that nothing can have marked it."""
        return self.reason in (Reason.REAL, Reason.IN_FLIGHT) or self.mark == EMPTY

    @property
    def marker(self) -> int | None:
        """The transaction that marked it, where that is known."""
        return self.mark if self.is_exact and self.mark != EMPTY else None

    @property
    def is_in_flight(self) -> bool:
        return self.mark > self.committed

    def accepts(self, mode: Mode, seen: int) -> bool:
        """Whether this lock would let a transaction pass at this moment, whose client has seen the log up to `seen`."""
        return mode is Mode.APPEND or self.mark <= seen
