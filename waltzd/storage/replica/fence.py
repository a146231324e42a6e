"""Who may call a replica: the owner of the session that it promised itself to, and only in its latest contact.

A *contact* begins with each opening of the replica, and ends the same caller's earlier one. An owner opens again when it
gave up waiting for something, and decides by what it is told then; so nothing that an earlier contact began may still take
effect.
"""

from __future__ import annotations

from waltzd.errors import BadArgument, ContactEnded, NotOpened, PartitionOffline, SessionTooFar, StaleSession
from waltzd.format.layout import NO_SESSION
from waltzd.storage.replica.control import ControlFile
from waltzd.storage.replica.promise import PromiseFile

SESSIONS_MAX = 1_000_000
"""How far above the promised session one may be that is opened: a replica that was away for years is not so far behind."""
FIRST_SESSION_MAX = 1 << 40
"""For a replica that has promised nothing yet: more sessions than there are seconds in thirty thousand years."""
CALLERS_MAX = 8
"""Of one session. More is an accident: the contact of the one that came first ends."""
_CONTACTS = 1 << 20
_NOBODY = -1
"""Until the first opening since the process started."""


def check_jump(promised: int, session: int) -> None:
    """Refused: a number after which no real owner could come."""
    limit = FIRST_SESSION_MAX if promised == NO_SESSION else promised + SESSIONS_MAX
    if session > limit:
        raise SessionTooFar(
            f"session {session} was to be opened: the newest that is known here is {promised}, {limit} may follow at most"
        )


class Fence:
    def __init__(self, partition: int, control: ControlFile, promise: PromiseFile) -> None:
        self._partition = partition
        self._control = control
        self._promise = promise
        self.contact = promise.value.sequence * _CONTACTS
        """The latest one. Its numbers are above those of every earlier process: the sequence has risen since then."""
        self._contacts: dict[int, int] = {_NOBODY: self.contact}
        """The contact of each caller in this session. There are two callers only where two names lead to one storage."""

    def open(self, session: int, *, committed: int, caller: int, by_operator: bool = False) -> int:
        """Promise, durably, that every lower session is refused from now on, and begin a new contact. An operator may take
        back a promise that no owner can reach, but never one to a session that has begun here."""
        if session < 0:
            raise BadArgument(f"a session id is never negative: {session}")
        promised = self._promise.value.session
        is_taken_back = by_operator and self._control.info(self._partition).session < session < promised
        self.check_current(promised if is_taken_back else session)
        if session > promised or is_taken_back:
            check_jump(promised, session)
            self._promise.promise(session=session, committed=committed)
            self._contacts.clear()
        self.contact += 1
        self._contacts.pop(_NOBODY, None)
        self._contacts.pop(caller, None)
        if len(self._contacts) >= CALLERS_MAX:
            del self._contacts[next(iter(self._contacts))]
        self._contacts[caller] = self.contact
        return self.contact

    def check(self, session: int, contact: int) -> None:
        """Exactly the promised session, and its latest contact where the caller says which it means."""
        self.check_current(session)
        promised = self._promise.value.session
        if session > promised:
            raise NotOpened(
                f"session {session} was not opened on partition {self._partition}; the storage promised itself to session "
                f"{promised}"
            )
        if contact != 0 and contact not in self._contacts.values():
            raise ContactEnded(
                f"partition {self._partition} was opened again by session {session}; this belongs to an earlier opening"
            )

    def check_current(self, session: int) -> None:
        if not self._control.info(self._partition).is_available:
            raise PartitionOffline(f"partition {self._partition} was taken offline on this storage")
        promised = self._promise.value.session
        if session < promised:
            raise StaleSession(
                f"session {session} of partition {self._partition} is over: the storage promised itself to session "
                f"{promised}",
                promised_session=promised,
            )
