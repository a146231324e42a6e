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
    can be trusted."""
    states: dict[str, ReplicaState] = {}
    for name in roles:
        status, state = level.get(name), meta.replicas.get(name)
        if status is not None:
            states[name] = ReplicaState(session=meta.session, closing=None, incarnation=status.incarnation)
        elif state is not None:
            is_closing_now = state.closing is None and state.session == meta.opened
            states[name] = replace(state, closing=mark, is_lost=False) if is_closing_now else state
    return replace(meta, opened=meta.session, low_mark=mark, members=members, replicas=states, decision=None)


def joining(meta: PartitionMeta, name: str, status: ReplicaStatus | None) -> PartitionMeta | None:
    """The document that lets this member's acknowledgements count, once it is saved; None when it may not join."""
    state = meta.replicas.get(name)
    if meta.opened != meta.session or name not in meta.members or name in meta.joined or status is None:
        return None
    if status.session != meta.session or (state is not None and state.session == meta.session):
        return None  # not begun, or lost in this very session: not before the next one
    joined = ReplicaState(session=meta.session, closing=None, incarnation=status.incarnation)
    return replace(meta, replicas={**meta.replicas, name: joined})


def losing(meta: PartitionMeta, name: str) -> PartitionMeta | None:
    """The document that takes away the vote of a member that has forgotten what it acknowledged in this session."""
    state = meta.replicas.get(name)
    if name not in meta.joined or state is None or state.is_lost:
        return None
    return replace(meta, replicas={**meta.replicas, name: replace(state, is_lost=True)})


def closing(meta: PartitionMeta, mark: int) -> PartitionMeta:
    """The document that closes its session at `mark`: nothing is in flight, and nothing will be written any more."""
    assert meta.opened == meta.session
    return replace(meta, decision=Decision(mark=mark, session=meta.session))


def following(meta: PartitionMeta, mark: int) -> PartitionMeta:
    """The document that closes its session at `mark` and takes the next one, in one: nobody comes in between."""
    return replace(closing(meta, mark), session=meta.session + 1)
