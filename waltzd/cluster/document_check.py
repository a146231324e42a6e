"""What a storage says against the document of a partition: the document went back, was lost, or was forged.

Each session is saved in the document before a storage hears of it, and nothing is committed that no storage knows. So
what a storage has begun, promised and committed is evidence, also that of a storage which the document does not name.
Owners ask this before they decide anything, and tools before they put older documents back. Pure."""

from __future__ import annotations

from collections.abc import Collection

from waltzd.cluster.documents import PartitionMeta
from waltzd.errors import MetadataBehind, MetadataMissing, WaltzError
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY

SESSIONS_AHEAD_MAX = 1000
"""How far the newest session of a document may be above what its storages have promised: each was saved by an owner
that had asked them just before, and ended before it could open any."""


def contradiction(
    meta: PartitionMeta, name: str, status: ReplicaStatus, *, begun_max: int, is_before: bool
) -> WaltzError | None:
    """Of what this storage says with the document, which was read before our session was taken: `meta` carries that one.
    What it said before it heard of us (`is_before`) tells to which session it had promised itself; from then on the promise
    is to us. Ours it can have begun only when a closing mark was saved. `begun_max`: the newest session that it may have
    begun before ours, as far as the coordinator knows."""
    number, decision = status.partition, meta.decision
    if meta.opened > 0 and status.timeline != meta.lineage.current:
        return _of_another_timeline(meta, name, status, is_before=is_before)
    may_have_begun_ours = not is_before and (decision is not None or meta.opened == meta.session)
    begun = EMPTY if may_have_begun_ours and status.session == meta.session else status.session
    promised = status.promised_session if is_before else EMPTY
    given_up = meta.gave_up(status.session, status.certain)
    if meta.opened == 0:
        has_nothing = max(status.last_id, status.low_mark, status.certain) == EMPTY
        if has_nothing and (begun <= 0 or decision is not None) and promised < meta.session:
            return None
        return MetadataMissing(
            f"partition {number} was never opened, says the coordinator; but storage {name} holds ids up to "
            f"{status.last_id}, has begun session {status.session} and promised itself to session "
            f"{status.promised_session}",
            storage=name,
        )
    if begun > begun_max:
        what, known = f"has begun session {begun}", begun_max
    elif promised >= meta.session:
        what, known = f"has promised itself to session {promised}", meta.session - 1
    elif is_before and decision is not None and status.certain > decision.mark and given_up is None:
        what, known = f"knows that ids up to {status.certain} are committed", decision.mark
    elif begun > meta.opened and status.last_id > status.low_mark and given_up is None:
        # It began with its low-water mark, and nothing is written before a session is open.
        what, known = f"has written in session {begun}", meta.opened
    else:
        return None
    return MetadataBehind(
        f"storage {name} {what} of partition {number}; the coordinator knows of none above {known}", storage=name
    )


def _of_another_timeline(meta: PartitionMeta, name: str, status: ReplicaStatus, *, is_before: bool) -> WaltzError | None:
    """What a replica of another timeline has begun and committed is no evidence about this log: it goes over, or is
    quarantined. But the document went back where it names that very replica, and not the timeline of its log."""
    state = meta.replicas.get(name)
    is_recorded = state is not None and state.incarnation == status.incarnation and not state.is_diverged
    if status.timeline not in meta.lineage and is_recorded:
        what, known = f"holds the log of timeline {status.timeline}", f"timeline {meta.lineage.number}"
    elif status.timeline in meta.lineage and is_before and status.promised_session >= meta.session:
        what, known = f"has promised itself to session {status.promised_session}", str(meta.session - 1)
    else:
        return None
    return MetadataBehind(
        f"storage {name} {what} of partition {status.partition}; the coordinator knows of none above {known}", storage=name
    )


def unfounded(meta: PartitionMeta, asked: Collection[ReplicaStatus]) -> WaltzError | None:
    """Why a document cannot come from what its storages have seen, as enough of them say. A storage that is fenced in its
    name would refuse the right one, so that is found out first."""
    newest = max((status.promised_session for status in asked), default=EMPTY)
    if not asked or meta.session <= newest + SESSIONS_AHEAD_MAX:
        return None
    number = next(iter(asked)).partition
    return MetadataBehind(
        f"the coordinator says that partition {number} has had session {meta.session - 1}; the newest that its "
        f"storages know "
        f"of is {newest}"
    )


def written_by_another(storage: str, mark: int, *, partition: int, session: int, last_id: int) -> MetadataBehind:
    """It has begun our session and holds more than we ever wrote in it."""
    return MetadataBehind(
        f"storage {storage} holds ids up to {mark} of partition {partition} in session {session}, which has written up to "
        f"{last_id}: another owner had a session of this number",
        storage=storage,
    )
