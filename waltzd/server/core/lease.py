"""The lease of an open session: how long its owner answers confirmed reads without asking its storages again. Pure.

How to think about it. A storage that says that it is bound to our session says that no newer session had its promise when
we asked. When a majority says so, nobody else was the owner at the moment of our question. Acknowledgements say it as well
as answers to a round: the log is the lease. From that question on the owner trusts its own committed mark for `seconds`.

Why that is safe. A newer session opens only when a majority has promised itself to it. One storage of that majority
answered us first; so our question is older than the moment at which the new owner knows its promises. The new owner waits
from that moment for twice our lease before its log opens (`session.session`). Until then it tells nobody of anything
committed, and when it begins to, our lease is over. The document of the partition says how long the lease is, so that the
new owner knows it whatever its own settings are.

Rule 1: the time counts from before the question left, never from the answer.
Rule 2: nothing that was asked while the session gives way to the next one renews the lease: storages of the old one may not
be asked by who replaces us (`session.confirming`).
Rule 3: only members that count are heard, and the majority is that of all members.

What is assumed of clocks: each only rises, and none runs twice as fast as another. The time of day is not used, and
neither is the time of an event loop, which may stand still within a turn: a process that was stopped in it would take a
read that came meanwhile for one of before. A process that is stopped finds its lease over when it goes on. One that is
stopped between the look at the lease and its answer answers late, and right: the read was there before that look, and
at that look the mark was the newest.

A machine that is stopped as a whole, with its clock (a virtual machine that is suspended, or put back), breaks the
assumption: it may answer an old mark for the length of a lease after it goes on. A round has no such case. Therefore
there is no lease unless an operator sets one.
"""

from __future__ import annotations

from collections.abc import Collection

from waltzd.protocol.quorum import majority

OUTLASTS = 2
"""A new owner waits for so many leases of the one before: no clock runs so many times as fast as another."""


class Lease:
    def __init__(self, members: int, seconds: float) -> None:
        """`members`: how many there are, those that do not count included."""
        self.seconds = seconds
        self._members = members
        self._asked: dict[str, float] = {}
        """When that was asked of each member to which it answered last that it is bound to this session."""

    def bound(self, name: str, asked_at: float) -> None:
        """It was bound to this session at some moment after `asked_at`."""
        self._asked[name] = max(asked_at, self._asked.get(name, asked_at))

    def holds(self, counted: Collection[str], now: float) -> bool:
        """`counted`: the members that count at the moment."""
        asked = sorted((self._asked[name] for name in counted if name in self._asked), reverse=True)
        needed = majority(self._members)
        return len(asked) >= needed and now < asked[needed - 1] + self.seconds
