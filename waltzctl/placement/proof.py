"""Proof that the documents of a partition may be restored without losing an acknowledged transaction, and which
documents these are. No I/O.

Saved documents are older than the present state; storages tell by how much. Each session is saved in ZooKeeper before a
storage hears of it, and a later session asked a majority of the members of the one before. So if no storage knows of a
session above the saved one, the saved document belongs to the newest session, and is restored unchanged. Its owner
votes on it as after a crash, and reads it again before it decides anything.

One thing may still be older within the session: which of its members have joined. A member that joined since has
acknowledged what other members may lack, and a vote without it would cut that. So every member that may have joined
counts as joined. This never lowers a closing mark; the partition may wait for a storage that it would not have needed.

If storages know of a later session, or nothing was saved, no document has its members, and the storages must prove the
log themselves. All of them must answer, so that no later session is hidden, and sound copies that have begun the newest
session must be a majority of the replicas. Everything acknowledged in that session is on a majority of its members, and
so in the longest of these copies. The decision is made as in a rescue (`rescue_scene`), above every promised session.
What is not proven is named, and left to an operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID

from waltzctl.placement.rescue_scene import JUMP_MAX, Scene
from waltzctl.snapshot.cluster_snapshot import StorageView
from waltzd.cluster.document_check import contradiction
from waltzd.cluster.documents import LEASE_MS_MAX, Membership, PartitionMeta, ReplicaState
from waltzd.errors import WaltzError
from waltzd.errors.operations import MetadataBehind
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY, majority

UNKNOWN = UUID(int=0)
"""Directory of a member that may have joined and does not report its directory."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """Reports of all storages about one partition."""

    partition: int
    statuses: Mapping[str, ReplicaStatus] = field(default_factory=dict)
    """Status of the replica on each storage that holds something of the partition."""
    blank: frozenset[str] = frozenset()
    """Storages that answer and hold nothing of the partition."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Storages that do not report what they hold, with the reason."""

    def contradicts(self, meta: PartitionMeta | None) -> WaltzError | None:
        """Return how a storage knows more than this document, by the rule that owners apply; empty if it does not."""
        next_one = meta or PartitionMeta(generation=0, session=0)
        begun_max = next_one.opened if next_one.decision is None else next_one.session
        next_one = replace(next_one, session=next_one.session + 1)
        for name, status in sorted(self.statuses.items()):
            if status.timeline not in next_one.lineage:
                return MetadataBehind(
                    f"storage {name} holds the log of timeline {status.timeline} of partition {self.partition}, which the "
                    "document does not name",
                    storage=name,
                )
            error = contradiction(next_one, name, status, begun_max=begun_max, is_before=True)
            if error is not None:
                return error
        return None


def statement(storages: Iterable[StorageView], number: int) -> Statement:
    """Collect the reports of all storages about one partition."""
    statuses, blank, silent = dict[str, ReplicaStatus](), set[str](), dict[str, str]()
    for view in storages:
        name, held = view.meta.name, view.replica(number)
        if view.reported is None:
            silent[name] = view.error.message if view.error is not None else "it does not answer"
        elif held is None:
            blank.add(name)
        elif held.status is not None:
            statuses[name] = held.status
        else:
            silent[name] = held.refused.message if held.refused is not None else held.story
    return Statement(partition=number, statuses=statuses, blank=frozenset(blank), silent=silent)


@dataclass(frozen=True, kw_only=True)
class Proven:
    """Documents with which a partition continues."""

    partition: int
    meta: PartitionMeta | None
    roles: Mapping[str, Membership]
    scene: Scene | None = None
    """Replicas to fence first, if the decision depends on their reports after that; else None."""

    def fenced(self, session: int, statuses: Mapping[str, ReplicaStatus]) -> Proven:
        assert self.scene is not None
        scene = replace(self.scene, statuses=statuses, fenced=session)
        return replace(self, scene=scene, meta=_decision(scene), roles=scene.roles_after)


@dataclass(frozen=True, kw_only=True)
class Unproven:
    """Partition whose documents cannot be written without risking a loss. `missing` names the
    unknown fact in a sentence."""

    partition: int
    missing: str


Verdict = Proven | Unproven


def from_saved(
    statement: Statement, saved: PartitionMeta | None, roles: Mapping[str, Membership], *, replicas: int, generation: int
) -> Verdict:
    """Decide by a document that was saved earlier; None if there was none."""
    error = statement.contradicts(saved)
    if error is not None:
        found = from_storages(statement, replicas=replicas, generation=generation, saved=saved, roles=roles)
        if isinstance(found, Unproven):
            return replace(found, missing=f"{error.message}; {found.missing}")
        return found
    return Proven(partition=statement.partition, meta=None if saved is None else completed(saved, statement), roles=roles)


def completed(meta: PartitionMeta, statement: Statement) -> PartitionMeta:
    """Return the document of an open session in which every member has joined that may have joined since it was saved."""
    if meta.opened != meta.session or meta.decision is not None:
        return meta
    states = dict(meta.replicas)
    for name in meta.members:
        if name in meta.joined:
            continue
        status, state = statement.statuses.get(name), meta.replicas.get(name)
        if state is not None and state.is_diverged:  # the directory of that replica must stay known
            states[name] = replace(state, session=meta.opened, closing=None, is_lost=True)
            continue
        incarnation = status.incarnation if status is not None and status.session == meta.opened else UNKNOWN
        states[name] = ReplicaState(session=meta.opened, closing=None, incarnation=incarnation)
    return replace(meta, replicas=states)


def from_storages(
    statement: Statement,
    *,
    replicas: int,
    generation: int,
    saved: PartitionMeta | None = None,
    roles: Mapping[str, Membership] | None = None,
) -> Verdict:
    """Decide by the replicas alone. `replicas`: number of replicas of a partition. `saved` is known to be older."""
    number = statement.partition
    if statement.silent:
        name, why = next(iter(sorted(statement.silent.items())))
        return Unproven(partition=number, missing=f"{name} does not report its replica ({why})")
    if len({status.incarnation for status in statement.statuses.values()}) < len(statement.statuses):
        return Unproven(partition=number, missing="two storages report the same replica")
    if not any(_has_anything(status) for status in statement.statuses.values()):
        return _unused(statement, generation, roles or {})
    remembered = PartitionMeta(
        generation=generation,
        session=saved.session if saved is not None else 0,
        given_up=saved.given_up if saved is not None else {},
    )
    scene = Scene(
        partition=number, generation=generation, roles={}, meta=remembered,
        statuses=statement.statuses, blank=statement.blank,
    )  # fmt: skip
    newest = sorted(name for name, status in statement.statuses.items() if status.session == scene.begun)
    scene = replace(scene, roles=_roles(statement, newest, replicas, roles or {}))
    missing = _missing(scene, newest, replicas)
    if missing:
        return Unproven(partition=number, missing=missing)
    return Proven(partition=number, meta=_decision(scene), roles=scene.roles_after, scene=scene)


def _decision(scene: Scene) -> PartitionMeta:
    """Refuse if the previous owner may have had a read lease, of which nothing is known any more."""
    given_up = {**scene.document.given_up, scene.session: scene.mark}
    return replace(scene.document, lease_ms=LEASE_MS_MAX, given_up=given_up)


def _missing(scene: Scene, newest: Collection[str], replicas: int) -> str:
    """Return the fact that the proof lacks; empty if none."""
    for name in newest:
        status = scene.statuses[name]
        if not status.is_sound:
            return f"{name} has begun the newest session, {scene.begun}, and is damaged: {status.findings[0].sentence()}"
    for name, status in sorted(scene.statuses.items()):
        if not status.is_available:
            return f"the replica on {name} was taken offline"
    if scene.begun <= 0 or len(newest) < majority(replicas):
        return (
            f"the newest session, {scene.begun}, has begun on {', '.join(newest)} only, and {majority(replicas)} of "
            f"{replicas} replicas would prove that they hold all that was acknowledged"
        )
    low_mark = max((scene.statuses[name].low_mark for name in newest), default=EMPTY)
    for name, status in sorted(scene.statuses.items()):
        if name not in newest and status.certain > low_mark and not scene.is_given_up(name):
            return (
                f"{name} knows that ids up to {status.certain} are committed, and session {scene.begun}, which it has not "
                f"begun, begins behind id {low_mark}"
            )
    if scene.mark < scene.committed:
        return (
            f"ids up to {scene.committed} are known to be committed, and no copy is proven to hold more than {scene.mark}"
        )
    return ""


def _has_anything(status: ReplicaStatus) -> bool:
    return status.session > 0 or max(status.last_id, status.low_mark, status.certain) > EMPTY or not status.is_sound


def _unused(statement: Statement, generation: int, roles: Mapping[str, Membership]) -> Verdict:
    """Return the documents of a partition that never had a session: it begins, above every promised session."""
    promised = max((status.promised_session for status in statement.statuses.values()), default=0)
    if promised > JUMP_MAX:
        return Unproven(partition=statement.partition, missing=f"a storage has promised itself to session {promised}")
    there = dict.fromkeys(sorted(statement.statuses), Membership.MEMBER)
    if not there and not roles:
        return Unproven(partition=statement.partition, missing="no storage that was named has a replica of it")
    meta = PartitionMeta(generation=generation, session=promised) if promised > 0 else None
    return Proven(partition=statement.partition, meta=meta, roles=roles or there)


def _roles(
    statement: Statement, newest: Collection[str], replicas: int, roles: Mapping[str, Membership]
) -> dict[str, Membership]:
    """Choose members: the members of the newest session, then replicas that copy first, as far as there is room.
    Further replicas are remains of a move."""
    found = dict.fromkeys(newest, Membership.MEMBER)
    older = sorted(
        statement.statuses.keys() - found.keys(), key=lambda name: (name not in roles, -statement.statuses[name].last_id)
    )
    known = [name for name in sorted(roles) if name in statement.blank]
    found.update(dict.fromkeys([*older, *known][: max(0, replicas - len(found))], Membership.LEARNER))
    return dict(sorted(found.items()))
