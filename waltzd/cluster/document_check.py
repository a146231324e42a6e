"""Checks of a partition's document against its storages: the document may have been restored, lost or forged. Pure.

An owner saves each session in the document before any storage receives it, and nothing is committed that no storage holds.
So the sessions and ids that a storage reports, also a storage that the document does not name, are evidence about the
document. Owners make these checks before they decide anything, and tools before they restore older documents.
"""

from __future__ import annotations

from collections.abc import Collection

from waltzd.cluster.documents import PartitionMeta
from waltzd.errors import WaltzError
from waltzd.errors.operations import MetadataBehind, MetadataMissing
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY

SESSIONS_AHEAD_MAX = 1000
"""Sessions by which a document may be ahead of the promises of its storages.

Each of them was saved by an owner that had asked the storages just before, and ended before it opened a replica."""


def contradiction(
    meta: PartitionMeta, name: str, status: ReplicaStatus, *, begun_max: int, is_before: bool
) -> WaltzError | None:
    """Return an error if the status of a storage contradicts the document of its partition; None if the two agree.

    Args:
        meta: The document, with the session of this owner as the newest.
        name: The storage.
        status: The status that the storage reported.
        begun_max: The newest session before this owner's that the storage may have begun, according to the document.
        is_before: Whether the storage reported before it received the session of this owner. Only then its promised
            session is that of an earlier owner. It can have begun this owner's session only after a closing mark was saved.
    """
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
        # The session began with its low-water mark, and nothing is written before a session is open.
        what, known = f"has written in session {begun}", meta.opened
    else:
        return None
    return MetadataBehind(
        f"storage {name} {what} of partition {number}; the coordinator knows of none above {known}", storage=name
    )


def _of_another_timeline(meta: PartitionMeta, name: str, status: ReplicaStatus, *, is_before: bool) -> WaltzError | None:
    """Check a replica of another timeline; return an error if it contradicts the document.

    Sessions and ids of another timeline say nothing about this log, so the replica is brought to the current timeline, or
    set aside. Two findings show that the document is an older one that was restored: it records this replica and does not
    have the replica's timeline, or the replica promised itself to a session that the document does not have."""
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
    """Return an error if the newest session of the document is too far above the sessions of the storages that were asked.

    A storage that is fenced with a forged session would refuse the right owner, so check this before fencing."""
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
    """Return the error for a storage that holds ids of this owner's session that this owner never wrote."""
    return MetadataBehind(
        f"storage {storage} holds ids up to {mark} of partition {partition} in session {session}, which has written up to "
        f"{last_id}: another owner had a session of this number",
        storage=storage,
    )
