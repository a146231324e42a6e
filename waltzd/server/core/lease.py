"""The lease of an open session: how long its owner answers confirmed reads without asking its storages again. Pure.

How to think about it. A storage that confirms our session was not fenced by a newer one when we asked. When a majority
confirms, no other server was the owner at the moment of our question. An acknowledgement of an append confirms as well as
an answer to a question: the log is the lease. From that question on the owner trusts its own committed mark for
`seconds`.

Why that is safe. A newer session opens only when it has fenced a majority. One storage of that majority answered us
first; so our question is older than the moment at which the new owner knows its majority. The new owner waits from that
moment for twice our lease before its log opens (`session.session`). Until then it reports nothing as committed, and
afterwards our lease has ended. The document of the partition holds the length of the lease, so the new owner knows it
whatever its own settings are.

Rule 1: the time counts from before the question left, never from the answer.
Rule 2: a question that is asked while the session gives way to the next one does not renew the lease: a new owner need
not ask the storages of the old session (`session.confirmation`).
Rule 3: only answers of members whose acknowledgements count are used, and the majority is that of all members.

Assumptions about clocks: each clock only rises, and none runs twice as fast as another. The time of day is not used. The
time of an event loop is not used either, because it stands still within a turn: a process that was stopped in a turn
would treat a read that came meanwhile as an earlier one. A process that is stopped finds its lease ended when it
continues. A process that is stopped between the check of the lease and its answer answers late but correctly: the read
was there before that check, and the mark was the newest then.

A machine that is stopped as a whole, with its clock (a virtual machine that is suspended, or put back), breaks the
assumption: it may answer an old mark for the length of a lease after it continues. A question to the storages has no such
case. Therefore there is no lease unless an operator sets one.
"""

from __future__ import annotations

from collections.abc import Collection

from waltzd.protocol.quorum import majority

OUTLASTS = 2
"""Number of leases of the former owner that a new owner waits for. No clock runs this many times as fast as another
clock."""


class Lease:
    def __init__(self, members: int, seconds: float) -> None:
        """`members`: the number of all members, including those whose acknowledgements do not count."""
        self.seconds = seconds
        self._members = members
        self._asked: dict[str, float] = {}
        """Member to the time of our newest question that it answered by confirming our session."""

    def renew(self, name: str, asked_at: float) -> None:
        """Record that the member was bound to this session at some moment after `asked_at`."""
        self._asked[name] = max(asked_at, self._asked.get(name, asked_at))

    def holds(self, counted: Collection[str], now: float) -> bool:
        """Return whether the lease is valid. `counted`: the members whose acknowledgements count now."""
        asked = sorted((self._asked[name] for name in counted if name in self._asked), reverse=True)
        needed = majority(self._members)
        return len(asked) >= needed and now < asked[needed - 1] + self.seconds
