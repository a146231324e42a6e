"""How the document of a partition changes when its session opens, while it is open, and when it ends. Each change is saved
before anybody relies on it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from waltzd.meta import Decision, PartitionMeta, ReplicaState
from waltzd.replica import ReplicaStatus


def admitting(
    meta: PartitionMeta, mark: int, members: tuple[str, ...], roles: Iterable[str], level: Mapping[str, ReplicaStatus]
) -> PartitionMeta:
    """The document with which the session opens: those who are level have joined it, and for the others, up to where they
    can be trusted. What they are cut above is nothing that they could forget."""
    states: dict[str, ReplicaState] = {}
    for name in roles:
        status, state = level.get(name), meta.replicas.get(name)
        if status is not None:
            states[name] = _joined(meta, status, mark)
        elif state is not None and state.closing is None and state.session == meta.opened:
            states[name] = replace(state, closing=mark, acknowledged=min(mark, state.acknowledged), is_lost=False)
        elif state is not None:
            states[name] = state
    return replace(meta, opened=meta.session, low_mark=mark, members=members, replicas=states, decision=None)


def _joined(meta: PartitionMeta, status: ReplicaStatus, held: int) -> ReplicaState:
    return ReplicaState(session=meta.session, closing=None, incarnation=status.incarnation, acknowledged=held)


def joining(meta: PartitionMeta, name: str, status: ReplicaStatus | None, held: int) -> PartitionMeta | None:
    """The document that lets this member's acknowledgements count, once it is saved; None when it may not join. One that
    had forgotten something joins again when it holds all that it had acknowledged, or the replica in whose place it is:
    it makes no difference any more."""
    state = meta.replicas.get(name)
    if meta.opened != meta.session or name not in meta.members or status is None or status.session != meta.session:
        return None
    if state is not None and state.session == meta.session and not (state.is_lost and held >= state.acknowledged):
        return None
    return replace(meta, replicas={**meta.replicas, name: _joined(meta, status, held)})


def losing(meta: PartitionMeta, name: str, mark: int) -> PartitionMeta | None:
    """The document that takes away the vote of a member that has forgotten what it acknowledged in this session. `mark`:
    all that it ever acknowledged in it."""
    state = meta.replicas.get(name)
    if name not in meta.joined or state is None or state.is_lost:
        return None
    lost = replace(state, is_lost=True, acknowledged=max(mark, state.acknowledged))
    return replace(meta, replicas={**meta.replicas, name: lost})


def acknowledging(meta: PartitionMeta, marks: Mapping[str, int]) -> PartitionMeta:
    """The document that says how far those who joined have acknowledged; the same where it says so already."""
    risen = {
        name: replace(state, acknowledged=marks[name])
        for name, state in meta.replicas.items()
        if name in meta.joined and marks.get(name, -1) > state.acknowledged
    }
    return replace(meta, replicas={**meta.replicas, **risen}) if risen else meta


def closing(meta: PartitionMeta, mark: int) -> PartitionMeta:
    """The document that closes its session at `mark`: nothing is in flight, and nothing will be written any more."""
    assert meta.opened == meta.session
    return replace(meta, decision=Decision(mark=mark, session=meta.session))


def following(meta: PartitionMeta, mark: int) -> PartitionMeta:
    """The document that closes its session at `mark` and takes the next one, in one: nobody comes in between."""
    return replace(closing(meta, mark), session=meta.session + 1)
