"""Changes of the document of a partition: which replicas take part in its session, which have forgotten, which diverged.

Each change is a new document, saved before anything relies on it (`waltzd.server.core.recovery` says when). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from uuid import UUID

from waltzd.cluster.documents import Decision, PartitionMeta, ReplicaState
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY


def admitting(
    meta: PartitionMeta,
    mark: int,
    members: tuple[str, ...],
    roles: Iterable[str],
    level: Mapping[str, ReplicaStatus],
    diverged: Mapping[str, UUID] | None = None,
) -> PartitionMeta:
    """Return the document that opens the session. Level replicas have joined it. For each other replica the document says
    up to which id it can be trusted; what is cut above that id does not count as forgotten. `diverged`: directories that
    hold another history."""
    outside = diverged or {}
    states: dict[str, ReplicaState] = {}
    for name in roles:
        status, state = level.get(name), meta.replicas.get(name)
        if status is not None:
            states[name] = _joined(meta, status, mark)
        elif name in outside:
            states[name] = ReplicaState(session=EMPTY, closing=EMPTY, incarnation=outside[name], is_diverged=True)
        elif state is not None and state.closing is None and state.session == meta.opened:
            states[name] = replace(state, closing=mark, acknowledged=min(mark, state.acknowledged), is_lost=False)
        elif state is not None:
            states[name] = state
    return replace(meta, opened=meta.session, low_mark=mark, members=members, replicas=states, decision=None)


def _joined(meta: PartitionMeta, status: ReplicaStatus, held: int) -> ReplicaState:
    return ReplicaState(session=meta.session, closing=None, incarnation=status.incarnation, acknowledged=held)


def joining(meta: PartitionMeta, name: str, status: ReplicaStatus | None, held: int) -> PartitionMeta | None:
    """Return the document that makes the acknowledgements of this member count; None if it may not join. A member that
    had forgotten something joins again when it holds all that it had acknowledged, or that the replica in whose place it
    stands had acknowledged."""
    state = meta.replicas.get(name)
    if meta.opened != meta.session or name not in meta.members or status is None or status.session != meta.session:
        return None
    if state is not None and state.is_diverged and state.incarnation == status.incarnation:
        return None
    if state is not None and state.session == meta.session and not (state.is_lost and held >= state.acknowledged):
        return None
    return replace(meta, replicas={**meta.replicas, name: _joined(meta, status, held)})


def losing(meta: PartitionMeta, name: str, mark: int) -> PartitionMeta | None:
    """Return the document that takes the vote from a member that has forgotten what it acknowledged in this session, up
    to `mark`; None if that is not needed."""
    state = meta.replicas.get(name)
    if name not in meta.joined or state is None or state.is_lost:
        return None
    lost = replace(state, is_lost=True, acknowledged=max(mark, state.acknowledged))
    return replace(meta, replicas={**meta.replicas, name: lost})


def diverging(meta: PartitionMeta, name: str, incarnation: UUID, mark: int) -> PartitionMeta | None:
    """Return the document that excludes a replica whose directory holds another history; None if it is excluded already.
    The replica may have acknowledged up to `mark`: its successor has to hold all of that."""
    state = meta.replicas.get(name)
    if state is not None and state.is_diverged and state.incarnation == incarnation:
        return None
    if state is not None and name in meta.joined:
        mark = max(mark, state.acknowledged)
        out = replace(state, incarnation=incarnation, is_lost=True, is_diverged=True, acknowledged=mark)
    else:
        out = ReplicaState(session=EMPTY, closing=EMPTY, incarnation=incarnation, is_diverged=True)
    return replace(meta, replicas={**meta.replicas, name: out})


def acknowledging(meta: PartitionMeta, marks: Mapping[str, int]) -> PartitionMeta:
    """Return the document that records how far the joined members have acknowledged; `meta` itself if nothing has risen."""
    risen = {
        name: replace(state, acknowledged=marks[name])
        for name, state in meta.replicas.items()
        if name in meta.joined and marks.get(name, -1) > state.acknowledged
    }
    return replace(meta, replicas={**meta.replicas, **risen}) if risen else meta


def closing(meta: PartitionMeta, mark: int) -> PartitionMeta:
    """Return the document that closes its session at `mark`: nothing is in flight, and nothing more will be written."""
    assert meta.opened == meta.session
    return replace(meta, decision=Decision(mark=mark, session=meta.session))


def released(meta: PartitionMeta) -> PartitionMeta:
    """Return the document without a lease: its owner answers no more reads, so no server has to wait for the lease to
    end."""
    return replace(meta, lease_ms=0)


def following(meta: PartitionMeta, mark: int) -> PartitionMeta:
    """Return the document that closes its session at `mark` and takes the next session in one write, so that no other
    owner comes between."""
    return replace(closing(meta, mark), session=meta.session + 1)
