"""What the copies of a log prove, and the documents with which a partition continues: after a rescue, and if its documents
in ZooKeeper are lost. No I/O.

**A rescue.** Copies may disagree because one is behind, or because one holds what a later session cut. So a copy counts up
to where it is proven to be the log: everything that it wrote in the newest known session, and of an earlier session what
was committed then or is recorded as its closing mark. The new log ends where the longest proven copy ends, so nothing that
is proven and reachable is given up. What only silent storages hold is given up.

A storage may return later and know of committed transactions above that end, under ids that are used again. So the log
continues under another timeline (`waltzd.protocol.timelines`), which is saved together with the decision: what such a
storage holds above the fork is set aside before it takes part.

**Saved documents** are older than the present state; storages tell by how much. Each session is saved in ZooKeeper before a
storage hears of it, and a later session asked a majority of the members of the one before. So if no storage knows of a
session above the saved one, the saved document belongs to the newest session, and is restored unchanged. Its owner votes on
it as after a crash, and reads it again before it decides anything.

If storages know of a later session, or nothing was saved, no document has its members, and the storages must prove the
log themselves. All of them must answer, so that no later session is hidden, and sound copies that have begun the newest
session must be a majority of the replicas. Everything acknowledged in that session is on a majority of its members, and
so in the longest of these copies. The decision is made as in a rescue, above every promised session.
What is not proven is named, and left to an operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID

from waltzctl.snapshot.cluster_snapshot import StorageView
from waltzd.cluster.documents import LEASE_MS_MAX, Decision, Membership, PartitionMeta, ReplicaState, contradiction
from waltzd.errors import WaltzError
from waltzd.errors.operations import MetadataBehind
from waltzd.format.layout import ID_MAX
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY, EVERYTHING, majority
from waltzd.protocol.timelines import Lineage

JUMP_MAX = 1_000_000
"""Sessions; a session this far above every known one belongs to no server: storages refuse such jumps."""
SESSIONS_UNKNOWN = 1_000
"""Sessions that are skipped if ZooKeeper has lost some: silent storages may have promised them."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One partition: its document, and the reports of the storages that answer."""

    partition: int
    generation: int
    """Generation of its assignment."""
    roles: Mapping[str, Membership]
    meta: PartitionMeta | None
    """Document of the partition; None if it is missing or cannot be read."""
    statuses: Mapping[str, ReplicaStatus]
    """Status of every storage that answers and holds something of the partition."""
    blank: frozenset[str] = frozenset()
    """Storages that answer and hold nothing of it: the owner makes an empty replica there."""
    fenced: int | None = None
    """Session that the answering storages have promised for this rescue; None before they are fenced."""
    archived: Mapping[str, int] = field(default_factory=dict)
    """Storage → id up to which its archive proves the log of the timeline that ends, on the timeline of its replica."""
    unread_archives: Mapping[str, str] = field(default_factory=dict)
    """Storage → reason why it could not read its archive; empty if another storage could."""

    @property
    def begun(self) -> int:
        """Return the newest session that is known to have begun."""
        opened = self.meta.opened if self.meta is not None else 0
        return max([opened, *(status.session for status in self.statuses.values())])

    @property
    def is_behind(self) -> bool:
        """Return whether ZooKeeper knows less than the storages: documents were lost or went back in time, or name a
        session that no server can have meant."""
        if self.meta is None or (self.meta.opened == 0 and self.meta.decision is None):
            return any(status.last_id != EMPTY or status.session > 0 for status in self.statuses.values())
        if self._decided_below:
            return True
        promised = {status.promised_session for status in self.statuses.values()} - {self.fenced}
        return max(self.begun, *promised, 0) > self.meta.session or self.meta.session > max(0, self.begun) + JUMP_MAX

    @property
    def _decided_below(self) -> bool:
        """Return whether a storage knows of committed transactions above the closing mark in the document; owners
        refuse that."""
        meta = self.meta
        if meta is None or meta.decision is None:
            return False
        known = [one for one in self.statuses.values() if one.timeline == meta.lineage.current]
        return any(one.certain > meta.decision.mark and meta.gave_up(one.session, one.certain) is None for one in known)

    @property
    def session(self) -> int:
        """Return a session above every one that was begun or promised, except promises that no server can have meant."""
        if self.fenced is not None:
            return self.fenced
        begun = max(0, self.begun)
        promised = [status.promised_session for status in self.statuses.values()]
        known = [*promised, self.meta.session if self.meta is not None else 0]
        top = max([begun, *(session for session in known if session <= begun + JUMP_MAX)])
        return min(top + (SESSIONS_UNKNOWN if self.is_behind else 1), ID_MAX - JUMP_MAX)

    @property
    def silent(self) -> list[str]:
        """Return the storages that may hold something and do not answer."""
        concerned = {*self.roles, *(self.meta.members if self.meta is not None else ())}
        return sorted(concerned - self.statuses.keys() - self.blank)

    @property
    def lineage(self) -> Lineage:
        """Return the timelines of the log: those of the document, or, if ZooKeeper knows less, those of a storage that
        has begun the newest session."""
        known = [] if self.meta is None else [self.meta.lineage]
        claimed = [Lineage(status.timelines) for status in self.statuses.values() if status.session == self.begun]
        return max([*known, *(claimed if self.is_behind else [])], key=lambda one: one.number, default=Lineage())

    def is_given_up(self, name: str) -> bool:
        """Return whether an earlier rescue gave up what the replica holds, or it belongs to a timeline that this log
        never had."""
        status = self.statuses[name]
        if status.timeline not in self.lineage:
            return True
        return self.meta is not None and self.meta.gave_up(status.session, status.certain) is not None

    def shared(self, status: ReplicaStatus) -> int:
        """Return the last id up to which the replica can be part of this log, by its timeline."""
        shared = self.lineage.shared_to(status.timeline)
        return EVERYTHING if shared is None else shared

    def proven(self, name: str) -> int:
        """Return the id up to which the replica is proven to be part of this log."""
        status = self.statuses[name]
        if self.is_given_up(name):
            return EMPTY
        lineage = min(self._lineage(status), self.shared(status))
        if status.floor > lineage + 1:  # it was trimmed above the fork
            return EMPTY
        if status.is_sound:
            return lineage
        # A damaged replica counts up to its first damaged segment, unless that would cut ids that it knows to be committed.
        end = min(status.damaged_segments, default=0) - 1
        return min(lineage, end) if end >= status.certain else EMPTY

    def _lineage(self, status: ReplicaStatus) -> int:
        known = [min(status.last_id, status.certain)]
        meta = self.meta
        if status.session == self.begun and status.session > 0:
            is_closed = meta is not None and meta.opened == self.begun and meta.decision is not None
            limit = meta.decision.mark if is_closed and meta is not None and meta.decision is not None else EVERYTHING
            known.append(min(status.last_id, limit))
        for state in meta.replicas.values() if meta is not None else ():
            is_it = (state.incarnation, state.session) == (status.incarnation, status.session)
            if is_it and state.closing is not None:
                known.append(min(status.last_id, state.closing))
        return max(known)

    @property
    def mark(self) -> int:
        """Return the last id that any answering copy is proven to hold."""
        return max((self.proven(name) for name in self.statuses), default=EMPTY)

    @property
    def taker(self) -> str | None:
        """Return the storage with the best copy, if it can take from the archive what no answering copy is proven to
        hold. None if the archive proves no more than the copies, or no undamaged copy of the log answers."""
        able = [
            name
            for name, last_id in self.archived.items()
            if last_id > self.mark and name in self.usable and self.statuses[name].is_sound
        ]  # fmt: skip
        return max(able, key=lambda name: (self.archived[name], self.proven(name), name), default=None)

    @property
    def end(self) -> int:
        """Return the last id of the log that continues: what answering copies and the archive prove together."""
        return self.mark if self.taker is None else self.archived[self.taker]

    @property
    def committed(self) -> int:
        """Return the highest id known to be committed, by the document or an answering storage."""
        meta = self.meta
        written = [] if meta is None else [meta.low_mark, meta.decision.mark if meta.decision is not None else EMPTY]
        claimed = [
            min(max(one.low_mark, one.committed), self.shared(one))
            for name, one in self.statuses.items()
            if not self.is_given_up(name)
        ]
        return max([EMPTY, *written, *claimed])

    @property
    def usable(self) -> frozenset[str]:
        """Return the storages on which a replica can become level, with their status."""
        mark = self.mark
        able = {name for name, status in self.statuses.items()
                if status.is_available and not self.is_given_up(name) and status.floor <= mark + 1
                and (status.is_sound or status.certain <= mark)}  # fmt: skip
        return frozenset(able | self.blank)

    @property
    def by_itself(self) -> str:
        """Return why there is nothing to rescue: what the owner will do by itself. Empty if the owner cannot."""
        meta = self.meta
        members = [name for name, role in self.roles.items() if role is Membership.MEMBER]
        if meta is None or self.is_behind or not members:
            return ""
        # A storage that the partition has left may hold the most: no owner asks it.
        asked = [self.proven(name) for name in self.statuses if name in self.roles or name in meta.members]
        if max(asked, default=EMPTY) < self.committed:
            return ""
        if sum(name in self.usable for name in members) < majority(len(members)):
            return ""  # decided or not: no majority could become level
        if meta.decision is not None:
            return f"the closing mark of session {meta.opened} is decided, and a majority of its replicas answers"
        if meta.opened == 0:
            return "" if self.silent else "every storage answers, and its first session can begin"
        faithful = [name for name in meta.joined if self._is_faithful(name, meta)]
        copying = [name for name in meta.members if name not in meta.joined and name in self.usable] if faithful else []
        if len(faithful) + len(copying) < majority(len(meta.members)):
            return ""
        return f"{', '.join(sorted([*faithful, *copying]))} of {', '.join(meta.members)} answer and decide it"

    def _is_faithful(self, name: str, meta: PartitionMeta) -> bool:
        status, state = self.statuses.get(name), meta.replicas[name]
        return (
            status is not None
            and status.is_sound
            and (status.incarnation, status.session) == (state.incarnation, meta.opened)
            and status.last_id >= max(status.local_low_mark, status.committed, meta.low_mark, state.acknowledged)
        )

    # -- what to write down

    @property
    def roles_after(self) -> dict[str, Membership]:
        """Return the members after the rescue. A majority of them must be able to become level; if too many cannot,
        those become learners: they keep their place, delay no other replica, and are members again once they are level."""
        members = [name for name, role in self.roles.items() if role is Membership.MEMBER]
        holders = [name for name in self.statuses if self.mark != EMPTY and self.proven(name) == self.mark]
        if members and sum(name in self.usable for name in members) >= majority(len(members)):
            return dict(self.roles)
        able = [name for name in members if name in self.usable] or [name for name in holders if name in self.usable]
        return {name: Membership.MEMBER if name in able else Membership.LEARNER for name in sorted({*self.roles, *able})}

    @property
    def document(self) -> PartitionMeta:
        """Return the decision, and the id up to which each copy can be trusted. The next owner begins with SETTLING."""
        meta, mark, session = self.meta, self.mark, self.session
        states = {
            name: ReplicaState(session=status.session, closing=min(mark, self.proven(name)), incarnation=status.incarnation)
            for name, status in sorted(self.statuses.items())
        }
        return PartitionMeta(
            generation=self.generation,
            session=session,
            opened=max(0, self.begun),
            low_mark=min(mark, meta.low_mark) if meta is not None else EMPTY,
            members=tuple(states),
            replicas=states,
            decision=Decision(mark=mark, session=session),
            lease_ms=LEASE_MS_MAX if meta is None or self.is_behind else meta.lease_ms,
            given_up=meta.given_up if meta is not None else {},
            timelines=self.lineage.later,
        )

    def forked(self, *, identity: UUID, cause: str, began: str, who: str | None) -> PartitionMeta:
        """Return the document that ends the log here and continues it under another timeline, in one write."""
        lineage = self.lineage.forked(
            identity=identity, fork=self.mark, session=self.session, cause=cause, began=began, who=who
        )
        return replace(self.document, timelines=lineage.later)

    # -- in words

    @property
    def refusal(self) -> str:
        """Return why this needs `--override`; empty if it does not."""
        took_part = any(status.is_sound and status.session == self.begun > 0 for status in self.statuses.values())
        if self.mark == EMPTY and (self.committed != EMPTY or (self.silent and not took_part)):
            return f"no storage that answers is proven to hold a single transaction of partition {self.partition}"
        return ""

    @property
    def steps(self) -> tuple[str, ...]:
        reported = [self._copy(name) for name in sorted(self.statuses, key=lambda name: (-self.proven(name), name))]
        reported += [f"{name} answers and has no replica" for name in sorted(self.blank & self.roles.keys())]
        reported += [f"{name} does not answer; its replica is unknown" for name in self.silent]
        if self.taker is not None:
            reported.append(f"the archive proves ids {self.mark + 1} to {self.end}: restore them to {self.taker} first")
        by = "an answering replica" if self.taker is None else "the archive"
        reported.append(f"the log continues behind id {self.end}, the last one proven by {by}")
        reported.append(f"given up: {self.given_up}")
        learners = [
            name for name, role in self.roles_after.items() if role is Membership.LEARNER and self.roles.get(name) != role
        ]
        if learners:
            change = "becomes a learner, and a member" if len(learners) == 1 else "become learners, and members"
            reported.append(f"{', '.join(learners)}: {change} again when level")
        number = self.lineage.number + 1
        reported.append(f"begin timeline {number}: records above id {self.end} on other storages are set aside")
        reported.append(f"save the decision under session {self.session}, higher than all known sessions")
        return tuple(reported)

    def _copy(self, name: str) -> str:
        status, proven = self.statuses[name], self.proven(name)
        reported = f"{name} holds ids up to {status.last_id}, session {status.session}, committed {status.committed}"
        if not status.is_sound:
            reported += f", damaged ({status.findings[0].sentence()})"
        return reported + (f": proven up to {proven}" if proven != EMPTY else ": nothing is proven")

    @property
    def given_up(self) -> str:
        """Describe what will never be read again."""
        mark, known, meta = self.end, self.committed, self.meta
        if known > mark:
            lost = f"ids {mark + 1} to {known}, which are known to be committed"
            is_all = meta is not None and meta.decision is not None and not (self.is_behind or self.silent)
            return lost if is_all else f"{lost}, and all ids committed above"
        if self.silent:
            return f"all ids committed above {mark} that only {', '.join(self.silent)} may hold"
        if meta is None or self.is_behind:
            return f"all ids committed above {mark} that only removed storages may hold"
        forgot = [name for name in meta.joined if not self._is_faithful(name, meta)]
        if forgot and meta.decision is None:
            return f"all ids above {mark} that {', '.join(forgot)} acknowledged and lost"
        return "nothing known"


# -- if documents are lost ---------------------------------------------------------------------------------------------


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
    return Proven(partition=statement.partition, meta=saved, roles=roles)


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
