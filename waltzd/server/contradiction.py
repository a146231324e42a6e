"""Whether what a storage says can be true together with the partition's document. Pure.

Every session is saved in the coordinator before a storage hears of it. So a storage that knows of a session which the
document does not know proves that there was a newer document: the coordinator went back, and who wrote since then is not
known.
"""

from __future__ import annotations

from waltzd.errors import MetadataBehind, MetadataMissing, WaltzError
from waltzd.quorum import EMPTY
from waltzd.replica import ReplicaStatus


def written_by_another(storage: str, mark: int, *, partition: int, session: int, last_id: int) -> MetadataBehind:
    """It has begun our session and holds more than we ever wrote in it."""
    return MetadataBehind(
        f"storage {storage} holds ids up to {mark} of partition {partition} in session {session}, which has written up to "
        f"{last_id}: somebody else had a session of this number",
        storage=storage,
    )


def contradiction(
    storage: str, status: ReplicaStatus, *, session: int, begun_max: int, promised: int, is_begun: bool, is_fresh: bool
) -> WaltzError | None:
    """Of what this storage says with the document that was read before `session` was taken. `begun_max`: the newest session
    that it may have begun by then. `promised`: to which it had promised itself before it heard of ours. `is_begun`: it may
    have begun ours. `is_fresh`: no session was ever opened, says the document."""
    begun = EMPTY if is_begun and status.session == session else status.session
    number = status.partition
    if is_fresh:
        if status.last_id == EMPTY and status.low_mark == EMPTY and begun <= 0 and promised < session:
            return None
        return MetadataMissing(
            f"partition {number} was never opened, says the coordinator; but storage {storage} holds ids up to "
            f"{status.last_id}, has begun session {status.session} and promised itself to session "
            f"{status.promised_session}",
            storage=storage,
        )
    if begun > begun_max:
        what, known = f"has begun session {begun}", begun_max
    elif promised >= session:
        what, known = f"has promised itself to session {promised}", session - 1
    else:
        return None
    return MetadataBehind(
        f"storage {storage} {what} of partition {number}; the coordinator knows of none above {known}", storage=storage
    )
