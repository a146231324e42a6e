"""The recovery of one partition by one session: where does the last session end, and which replicas hold exactly that
log?

How to think about it. A session is one owner's period of writing the log, and at most one session can commit: storages
refuse every session below the one that fenced them. What a session committed is on a majority of its members; what it
only sent may be on any of them. The next session therefore asks the members how much they hold, and takes a vote. The
result is the *closing mark*: up to it every record stays for ever; what is above it was never acknowledged, and is cut.

Rule 1: the vote belongs to the session that is being closed: to its recorded members, by its majority, whatever the
assignment is now.
Rule 2: each vote is a range. A member that joined and remembers everything counts as what it holds. A member that never
joined counts as nothing. A member that is silent, or has forgotten something, may have held anything. The mark is decided
when the highest mark that a majority reached is the same at both ends of all ranges: then no later answer can change it.
Rule 3: decide, save, act. No replica is brought to a mark that is not saved yet. Before that a replica is cut, mended or
copied to only where the vote can lose nothing by it. So a crash at any point leads the next owner to the same mark.
Rule 4: only what is certainly the log may be counted or copied from (`trusted`). Above that id a replica may hold what
another session wrote.

Five steps: VOTING (learn what the replicas hold) → RECORDING (save the closing mark) → SETTLING (cut and copy until a
majority holds exactly that log) → ADMITTING (save which replicas take part) → OPEN. The step is computed from the
document and the `Progress` of each replica. It is stored nowhere, so it cannot contradict them.

The pull. This module remembers and decides, and does nothing. Its driver asks `next_for(replica)` and `next_save()`,
carries out the answer, and reports the result. Both may be asked at any time, in any order, and any answer may be lost
with the process.

The hard part is what a replica *was*, when only its state now can be asked (`_is_the_one_that_joined`, `_least`,
`_lineage`). Disks are replaced, directories go back to older copies, halves of control files are lost, writes are torn. A
replica that remembers everything differs from all of these by its incarnation, by the session that it has begun, by its
own marks, and by what it had acknowledged according to the document. A replica that fails one of these checks is not
touched while it may hold the last copy of something acknowledged; it regains its vote by holding all of that again.

A replica may also hold what no owner ever wrote. So being level means to end alike, and not only at the same id: with the
same batch, whose checksum includes the batch before and so all of them, or in format 0 with the same last records. A
replica that ends otherwise than the log is *diverged*: it has no vote, is no source, and is neither cut nor copied to.
The end of the log is known by the owner that wrote it; else by the replicas that held it before this session: all of
them, or a majority of the members. If they contradict each other without a majority, nothing opens (`log_end`).

The log may have had other *timelines*: an operator ended it at an earlier id, and it continued from there. A replica of
an older timeline may hold committed transactions above the fork, and other transactions have the same ids now. So it does
not vote, is no source, and raises no known mark, until it has switched (`Fork`): its storage sets aside what it holds
above the fork. A replica of a timeline that this log never had is treated like one that has diverged.

The document itself may be an older one that an operator put back, or a forged one. Each session is saved in the document
before a storage sees it. So a storage that knows a later session than the document proves that the document is wrong, and
nothing is decided (`refusal`). A document may also be confirmed by none of its storages (`is_confirmed`): it contains no
log, or names storages without the partition. Then all storages of the cluster are asked before any is fenced, since the
log may be on storages that the document does not name.

Changes of the document when a session opens, while it is open and when it ends are in `waltzd.cluster.documents`.
Stories of recovery are in `tests/golden/recovery/`. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias
from uuid import UUID

from waltzd.cluster.documents import Decision, Membership, PartitionMeta, ReplicaState, admitting, contradiction, unfounded
from waltzd.errors import WaltzError
from waltzd.format.batch import End
from waltzd.format.finding import Code
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY, EVERYTHING, decided, majority, reached
from waltzd.protocol.timelines import Lineage
from waltzd.server.core.progress import Marks, Progress, certain_of, print_of


@dataclass(frozen=True)
class Wait:
    why: str


@dataclass(frozen=True)
class GiveUp(Wait):
    """Wait for other replicas or an operator: it is damaged and no replica that answers can repair it, or it holds what
    an operator gave up."""


@dataclass(frozen=True)
class Foreign(GiveUp):
    """Wait until another directory takes its place: it holds another history than the log."""


@dataclass(frozen=True)
class Fork:
    """Switch to the newest timeline of the log: it holds an older timeline, which an operator ended."""

    lineage: Lineage


@dataclass(frozen=True)
class Truncate:
    mark: int


@dataclass(frozen=True)
class SetLowMark:
    mark: int


@dataclass(frozen=True)
class Trim:
    """Remove what is below the floor: the replica lacks or has damaged ids there, which only the archive has."""

    floor: int


@dataclass(frozen=True)
class Copy:
    """Copy the ids up to `last_id` from one of these sources, the best first."""

    last_id: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Heal:
    """Replace the segment that starts at this id by what the sources hold, up to `last_id`; then decide again."""

    segment: int
    last_id: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Level:
    """Do nothing: it holds the decided log and has begun this session."""


Task: TypeAlias = Wait | Fork | Truncate | SetLowMark | Trim | Copy | Heal | Level


NEAR_IDS = 10_000
"""Lag in ids up to which a replica is level in a moment."""


class Step(enum.StrEnum):
    VOTING = "VOTING"
    RECORDING = "RECORDING"
    SETTLING = "SETTLING"
    ADMITTING = "ADMITTING"
    OPEN = "OPEN"


class Recovery:
    def __init__(
        self,
        meta: PartitionMeta,
        roles: Mapping[str, Membership],
        *,
        is_taken: bool = True,
        ours: Mapping[str, UUID] | None = None,
        end: End | None = None,
    ) -> None:
        """`meta` has our session. `is_taken`: it is saved; before that replicas are asked, and none is opened. `ours`: if
        this owner also had the session that is closed, the incarnation of each replica that was in contact with it.
        `end`: the batch with which the log then ends at its mark."""
        self.meta = meta
        self.session = meta.session
        self.roles = dict(sorted(roles.items()))
        self.is_taken = is_taken
        self._ours = ours or {}
        self.patience_left = True
        """Whether a session that could open waits for replicas that are nearly level. The driver sets it to False."""
        self._begun_max = meta.opened if meta.decision is None else meta.session - 1
        """Newest session that a storage may have begun before ours, as far as the coordinator knows."""
        self._progress: dict[str, Progress] = {}
        self._known_end: object = print_of(end)
        """End of the log at the mark at which this session opens; None while it is not certain."""
        self.leaving: frozenset[str] = frozenset()
        """Assigned replicas that leave with this session, if all other assigned replicas are level when it opens. While a
        session is open: those that leave with the next one. Empty after each change of `roles`."""
        self.others: list[str] = []
        """Storages of the cluster to which the log is not assigned. They are asked if nothing confirms the document."""
        self._strange: dict[str, ReplicaStatus | None] = {}
        """Status of each of `others` that answered; None if it has no replica of the partition."""
        self._compared: dict[tuple[str, bool], tuple[ReplicaStatus, PartitionMeta, WaltzError | None]] = {}
        """The last comparison of a status with the document, by storage and `is_before`. It is needed for every step."""
        assert meta.opened <= meta.session

    # -- replicas and the step

    @property
    def names(self) -> list[str]:
        """Replicas to contact: those that may vote, and those that shall hold the log from now on."""
        return sorted({*self.roles, *self.meta.members})

    @property
    def is_fresh(self) -> bool:
        """Return whether no session of this partition was ever opened."""
        return self.meta.opened == 0 and self.meta.decision is None

    @property
    def is_open(self) -> bool:
        """Return whether it is saved that this session is open."""
        return self.meta.opened == self.session

    @property
    def mark(self) -> int | None:
        """Mark at which this session opens; None until it is saved."""
        if self.is_open:
            return self.meta.low_mark
        return self.meta.decision.mark if self.meta.decision is not None else None

    @property
    def step(self) -> Step:
        if self.is_open:
            return Step.OPEN
        if self.meta.decision is None:
            return Step.VOTING if self.decide() is None else Step.RECORDING
        return Step.ADMITTING if self._is_admissible else Step.SETTLING

    def progress(self, name: str) -> Progress:
        """Return the progress of this replica. It is the same object for as long as the session lasts."""
        found = self._progress.get(name)
        if found is None:
            found = self._progress[name] = Progress()
        return found

    def marks(self) -> Marks:
        """Return the commit marks of this session, which has just opened."""
        assert self.step is Step.OPEN
        return Marks({name: self.progress(name) for name in self.meta.members}, self.meta.joined, self.meta.low_mark)

    def status(self, name: str) -> ReplicaStatus | None:
        return self.progress(name).status

    @property
    def statuses(self) -> dict[str, ReplicaStatus]:
        """Status of each replica that answers."""
        return {name: progress.status for name, progress in self._progress.items() if progress.status is not None}

    @property
    def incarnations(self) -> dict[str, UUID]:
        return {name: status.incarnation for name, status in self.statuses.items()}

    @property
    def forgetful(self) -> list[str]:
        """Replicas that have forgotten what they acknowledged in this session, if that is not saved yet."""
        return [name for name, progress in self._progress.items() if progress.has_forgotten]

    def held(self, name: str) -> int:
        """Return the last id on this replica, as far as it was reported."""
        return self.progress(name).held

    # -- what happened

    def asked(self, name: str, status: ReplicaStatus | None) -> None:
        """Note the status of a replica before this session opened it; None if it has no replica of the partition."""
        progress = self.progress(name)
        progress.was_asked, progress.before = True, status

    @property
    def has_asked_enough(self) -> bool:
        """Return whether our session id may be saved. A session that decided anything after this document was written has
        fenced one of the replicas that were asked, and that replica would have reported it."""
        if not self._has_asked_replicas:
            return False
        if self.is_confirmed:
            return True
        # Nothing can be decided without a replica that took part, and a storage that is fenced for nothing would refuse the
        # right document, should this one be wrong.
        can_be_decided = self.meta.opened == 0 or self.meta.decision is not None
        return can_be_decided and all(name in self._strange for name in self.others)

    @property
    def needs_others(self) -> bool:
        """Return whether the storages to which the log is not assigned have to be asked as well."""
        return self._has_asked_replicas and not self.is_confirmed

    def asked_other(self, name: str, status: ReplicaStatus | None) -> None:
        """Note the status of one of `others`; None if it has no replica of the partition."""
        self._strange[name] = status

    @property
    def is_confirmed(self) -> bool:
        """Return whether a replica that was asked confirms the document: it took part in the session that is to be
        closed,
        or, if the closing mark is saved, has begun a session since."""
        if self.is_fresh or self.meta.opened == 0:
            return False
        if self.meta.decision is None:
            return any(self._took_part(name) for name in self.meta.joined)
        begun = [status.session for name in self.names if (status := self.progress(name).before) is not None]
        return any(self.meta.opened <= session < self.session for session in begun)

    def _took_part(self, name: str) -> bool:
        state, status = self.meta.replicas[name], self.progress(name).before
        return status is not None and (status.session, status.incarnation) == (self.meta.opened, state.incarnation)

    @property
    def _has_asked_replicas(self) -> bool:
        if self.is_fresh:
            return bool(self.roles) and all(self.progress(name).was_asked for name in self.roles)
        members = [name for name, role in self.roles.items() if role is Membership.MEMBER] or list(self.roles)
        voters = self.meta.members if self.meta.decision is None else members
        return bool(voters) and sum(self.progress(name).was_asked for name in voters) >= majority(len(voters))

    def opened(self, name: str, status: ReplicaStatus) -> None:
        """Note that this session opened a replica: lower sessions are fenced there."""
        self.progress(name).was_tried = True
        self.progress(name).copied = self.progress(name).copied_end = None
        self.progress(name).trimmed = 0
        self.changed(name, status)

    def twin_of(self, name: str, status: ReplicaStatus) -> str | None:
        """Return another name under which this very replica answers, or None. What is acknowledged under both names is on
        one disk."""
        others = ((other, known) for other, known in self.statuses.items() if other != name)
        return next((other for other, known in others if known.incarnation == status.incarnation), None)

    def is_recorded(self, name: str, status: ReplicaStatus) -> bool:
        """Return whether this is the replica that took part under this name."""
        state = self.meta.replicas.get(name)
        return state is not None and state.incarnation == status.incarnation

    def changed(self, name: str, status: ReplicaStatus) -> None:
        """Note the status after a truncation, a low-water mark or a repair."""
        progress = self.progress(name)
        progress.status, progress.held = status, status.last_id

    def trimmed(self, name: str, floor: int, status: ReplicaStatus) -> None:
        """Note that a replica was told to begin at this floor. While it streams, `held` is newer than this status."""
        progress = self.progress(name)
        progress.trimmed = max(progress.trimmed, floor)
        if progress.status is not None:
            progress.status = replace(progress.status, floor=status.floor, untrimmed=status.untrimmed)

    def copied(self, name: str, last_id: int) -> None:
        """Note that a replica has the log on its disk up to this id: the owner copied records behind its trusted end."""
        progress = self.progress(name)
        progress.held = progress.copied = max(progress.held, last_id)
        if progress.copied_end is None and self.mark is not None and progress.held >= self.mark:
            progress.copied_end = self.log_end

    def diverged(self, name: str, why: str) -> None:
        """Note that a replica was found to hold another history than the log, in this session."""
        progress = self.progress(name)
        if progress.status is not None:
            progress.diverged = progress.status.incarnation, why
            progress.durable = None

    def silent(self, name: str) -> None:
        """Note that a replica does not answer."""
        progress = self.progress(name)
        progress.was_tried = True
        if not self.is_taken:
            progress.was_asked, progress.before = False, None
        progress.status, progress.held = None, EMPTY

    def saved(self, meta: PartitionMeta) -> None:
        """Note that this document is saved in the coordinator."""
        assert meta.session == self.session
        if meta.opened == self.session != self.meta.opened:
            self._known_end = self.log_end
        self.meta = meta

    # -- deciding

    @property
    def refusal(self) -> WaltzError | None:
        """Error that forbids any decision without an operator, because a storage and the document contradict each other;
        or None."""
        for name in self.names:
            for status in (self.progress(name).before, self.progress(name).status):
                error = None if status is None else self._contradiction(name, status)
                if error is not None:
                    return error
        for name, status in self._strange.items():
            error = None if status is None else self._contradiction(name, status, is_before=True)
            if error is not None:
                return error
        if self.is_taken or self.is_fresh or not self._has_asked_replicas:
            return None
        asked = [self.progress(name).before for name in self.names]
        return unfounded(self.meta, [status for status in asked if status is not None])

    def _contradiction(self, name: str, status: ReplicaStatus, *, is_before: bool | None = None) -> WaltzError | None:
        if is_before is None:
            is_before = status is self.progress(name).before
        found = self._compared.get((name, is_before))
        if found is None or found[0] is not status or found[1] is not self.meta:
            error = contradiction(self.meta, name, status, begun_max=self._begun_max, is_before=is_before)
            found = self._compared[name, is_before] = status, self.meta, error
        return found[2]

    def decide(self) -> int | None:
        """Return the closing mark of the last opened session; None while more than one answer is possible."""
        if self.meta.decision is not None:
            return self.meta.decision.mark
        if self.refusal is not None:
            return None
        if self.is_fresh:
            return EMPTY if self.roles and all(self.status(name) is not None for name in self.roles) else None
        out = self.foreign
        statuses = [
            one
            for name, one in self.statuses.items()
            if name not in out and self._given_up(one) is None and not self._is_of_older_timeline(one)
        ]
        known = max([self.meta.low_mark, *(status.committed for status in statuses)])
        bounds = (self._bounds(name) for name in self.meta.members)
        return decided((max(known, low), max(known, high)) for low, high in bounds)

    def _bounds(self, name: str) -> tuple[int, int]:
        """Return how much this member held of the session that is being closed: at least, and at most."""
        trusted = self.trusted(name)
        if name not in self.meta.joined:
            return trusted, trusted  # no acknowledgement of it ever counted; only what it has copied since counts
        if self.is_faithful(name):
            return self.held(name), self.held(name)
        return trusted, self.held(name) if self.knows_its_end(name) else EVERYTHING

    def is_faithful(self, name: str) -> bool:
        """Return whether a replica joined the session that is being closed and remembers all that it acknowledged in it."""
        status = self.status(name)
        return status is not None and status.is_sound and self._is_the_one_that_joined(name, status)

    # -- whether it is the log that a replica holds

    def divergence(self, name: str) -> str:
        """Return how this replica is known to hold another history than the log; empty if it is not."""
        progress, state = self._progress.get(name), self.meta.replicas.get(name)
        status = None if progress is None else progress.status
        if progress is None or status is None:
            return ""
        if progress.diverged is not None and progress.diverged[0] == status.incarnation:
            return progress.diverged[1]
        if state is not None and state.is_diverged and state.incarnation == status.incarnation:
            return "holds another history than the log, as an owner has found"
        if status.timeline not in self.meta.lineage:
            return f"holds the log of timeline {status.timeline}, which this log never had"
        mine = self._end(name)
        if mine is None or (log := self.log_end) is None or mine == log:
            return ""
        return f"holds something else at id {self.mark} than the log"

    @property
    def foreign(self) -> dict[str, UUID]:
        """Directories that hold another history than the log, by replica."""
        return {name: status.incarnation for name, status in self.statuses.items() if self.divergence(name)}

    @property
    def log_end(self) -> object:
        """End of the log at the mark; None if no replica reported it, or if those that hold it contradict each other."""
        if self._known_end is not None:
            return self._known_end
        found = self._ends
        return next(iter(found.values()), None) if len(set(found.values())) <= 1 else self._end_of_majority

    @property
    def _end_of_majority(self) -> object:
        voters = [name for name, role in self.roles.items() if role is Membership.MEMBER] or list(self.roles)
        ends = [end for name, end in self._ends.items() if name in voters]
        return next((end for end in ends if ends.count(end) >= majority(len(voters))), None)

    @property
    def _ends(self) -> dict[str, object]:
        """Ends at the mark of the replicas that held it before this session. A copy proves no more than its source did."""
        return {name: end for name in self.roles if self._copied(name) == EMPTY and (end := self._end(name)) is not None}

    def _end(self, name: str) -> object:
        """Return the end of this replica at the mark, once it has begun this session; None if it is not known."""
        progress, mark = self._progress.get(name), self.mark
        status = None if progress is None else progress.status
        if progress is None or status is None or status.session != self.session:
            return None
        if mark is None or mark == EMPTY or progress.held < mark:
            return None
        said = print_of(status.end) or status.tail or None
        return said if said is not None and status.last_id == progress.held == mark else progress.copied_end

    @property
    def contest(self) -> str:
        """Sentence that says which replicas contradict each other about the end of the log; empty if none do, or a
        majority agrees."""
        found = self._ends
        if self.log_end is not None or len(set(found.values())) <= 1:
            return ""
        return (
            f"{' and '.join(found)} have different ends at id {self.mark}, and no majority of {', '.join(self.roles)} "
            "decides which of them is the log"
        )

    # -- what a replica held

    def knows_its_end(self, name: str) -> bool:
        """Return whether a replica that joined that session is damaged before sound records: it never held more than the
        last of them. A power cut in the middle of a write can leave it so."""
        status = self.status(name)
        if status is None or status.is_sound or not self._is_the_one_that_joined(name, status):
            return False
        return all(
            finding.code is Code.DAMAGED_RECORD and finding.last_id is not None and finding.last_id < self.held(name)
            for finding in status.findings
        )

    def _is_the_one_that_joined(self, name: str, status: ReplicaStatus) -> bool:
        state = self.meta.replicas.get(name)
        if state is None or name not in self.meta.joined:
            return False
        return (
            status.incarnation == state.incarnation
            and status.session == self.meta.opened
            and status.timeline == self.meta.lineage.current
            and self.held(name) >= self._least(state, status)
            and not self.divergence(name)
        )

    def _least(self, state: ReplicaState, status: ReplicaStatus) -> int:
        """Return the lowest id up to which a joined replica must hold the log; below that, it has lost records. It joined
        with the session's low-water mark and acknowledged more since. What it cut above the closing mark is no loss."""
        mark = EVERYTHING if self.meta.decision is None else self.meta.decision.mark
        own = max(self.meta.low_mark, status.low_mark, status.local_low_mark, status.committed)
        return max(own, min(mark, state.acknowledged))

    def trusted(self, name: str) -> int:
        """Return the id up to which the replica holds the log, or the lineage of the session that is being closed."""
        status = self.status(name)
        if status is None or not status.is_sound or self._given_up(status) is not None or self.divergence(name):
            return EMPTY
        if self._is_of_older_timeline(status):
            return EMPTY
        return self._lineage(name, status)

    def _is_of_older_timeline(self, status: ReplicaStatus) -> bool:
        """Return whether this replica holds a timeline that was ended, and has not switched to the current one."""
        return status.timeline != self.meta.lineage.current and status.timeline in self.meta.lineage

    def _given_up(self, status: ReplicaStatus) -> int | None:
        return self.meta.gave_up(status.session, status.certain)

    def _lineage(self, name: str, status: ReplicaStatus) -> int:
        """Return what `trusted` returns, as if the replica were not damaged."""
        state, held = self.meta.replicas.get(name), self.held(name)
        if status.session == self.session:
            return held  # it has begun our session: whatever it has got since, it has got from us
        floor = min(held, max(status.low_mark, status.committed))
        if self.is_faithful(name):
            return held
        # Below its trim floor an owner knew the log to be archived.
        known = [floor, min(held, status.floor - 1), min(held, self._copied(name))]
        is_recorded = state is not None and (state.incarnation, state.session) == (status.incarnation, status.session)
        if state is not None and is_recorded and state.closing is not None:
            known.append(min(held, state.closing))
        is_ours = self._ours.get(name) == status.incarnation and status.session == self.meta.opened
        if is_ours and self.mark is not None:  # since it began that session it has got nothing but our log
            known.append(min(held, self.mark))
        return max(known)

    # -- what a replica should do

    def next_for(self, name: str) -> Task:
        status, mark = self.status(name), self.mark
        if status is None:
            return Wait("it does not answer")
        if self.refusal is not None:
            return Wait("an operator has to decide")
        given_up = self._given_up(status)
        if given_up is not None:
            return GiveUp(f"a rescue gave up committed transactions above id {given_up} that it holds: set it aside")
        if why := self.divergence(name):
            return Foreign(f"it {why}")
        if mark is None:
            return self._while_voting(name, status)
        if status.session != self.session and self.has_joined(name):
            return Wait("it has forgotten this session, and that is not saved yet")
        if self._is_of_older_timeline(status):
            return self._going_over(status)  # also if it has left: a rescue may have counted it, and others copy from it
        if name not in self.roles:
            return Wait("it is no longer assigned")
        if self._lacks_only_archived(name, status):
            return Trim(self.floor)
        if not status.is_sound:
            return self._mend(name, status, mark)
        held = self.held(name)
        if status.session != self.session:
            keep = min(self.trusted(name), certain_of(status, mark))
            return Truncate(keep) if held > keep else SetLowMark(mark)
        if self.contest:
            return Wait(self.contest)
        if held < mark:
            waits = self._not_compared(name, mark)
            if waits:
                return Wait(f"{', '.join(waits)} has not reported the end of the log yet")
            last_id, sources = self.sources_for(name, held, mark)
            missing = f"no replica that answers holds the ids from {held + 1} to {mark}"
            return Copy(last_id, sources) if sources else Wait(missing)
        return Level()

    def _going_over(self, status: ReplicaStatus) -> Task:
        shared = self.meta.lineage.shared_to(status.timeline)
        assert shared is not None
        if status.floor > shared + 1:
            return GiveUp(f"it begins at id {status.floor}, above the fork behind id {shared}: set it aside")
        if not status.is_sound and not status.damaged_segments:
            return GiveUp(f"it is of an older timeline, and damaged: {status.findings[0].sentence()}")
        return Fork(self.meta.lineage)

    @property
    def floor(self) -> int:
        """Highest trim floor of all replicas that answer: from there on each of them can give what it holds. An owner
        sets no floor above the mark at which its session began."""
        current = self.meta.lineage.current
        found = max((status.floor for status in self.statuses.values() if status.timeline == current), default=0)
        return found if found <= self.meta.low_mark + 1 else 0

    def _lacks_only_archived(self, name: str, status: ReplicaStatus) -> bool:
        """Return whether no replica can give it what it needs first, because it ends below the floor or is damaged there.
        A replica that has the floor may still hold what is below: it could not read the archive when it was told."""
        floor = self.floor
        if (status.floor >= floor and not status.untrimmed) or self.progress(name).trimmed >= floor:
            return False
        return self.held(name) + 1 < floor or min(status.damaged_segments, default=floor) < floor

    def _not_compared(self, name: str, mark: int) -> list[str]:
        """Return the replicas that hold the decided log but have not begun this session, so that their ends cannot be
        compared. Until then no replica copies, because a copy of something else could not be told from the log later."""
        if self.is_open or self._known_end is not None or self._end_of_majority is not None:
            return []
        return [
            other
            for other in self.roles
            if other != name
            and (status := self.status(other)) is not None
            and status.session != self.session
            and self.trusted(other) >= mark
        ]

    def _mend(self, name: str, status: ReplicaStatus, mark: int) -> Task:
        """Replace damage up to what is certain by what the other replicas hold, and cut what is behind it as long as this
        session has not begun there. Afterwards nothing is cut: what counts as acknowledged is not replaced by less."""
        has_begun = status.session == self.session
        mark = certain_of(status, mark)
        if not has_begun and status.last_id >= mark and all(one.code is Code.SHORT_LOG for one in status.findings):
            return Truncate(mark)  # it lacks nothing of the log, so no file of a segment mends it
        last_id = max(mark, status.last_id, *(one.last_id or EMPTY for one in status.findings)) if has_begun else mark
        segment = min(status.damaged_segments, default=EVERYTHING)
        if segment <= last_id:
            last_id, sources = self.sources_for(name, segment - 1, last_id)
            counted = self.progress(name).durable
            if sources and counted is not None and last_id < counted:
                return GiveUp(f"it is damaged, and no other replica has the ids {last_id + 1} to {counted} yet")
            if sources:
                return Heal(segment, last_id, sources)
        elif status.damaged_segments and not has_begun:
            return Truncate(mark)
        return GiveUp(f"it is damaged: {status.findings[0].sentence()}")

    def _while_voting(self, name: str, status: ReplicaStatus) -> Task:
        if self.is_fresh:
            return Wait("the first session needs an answer from every assigned storage")
        if name not in self.meta.members or self.decide() is not None:
            return Wait("the closing mark is not saved yet")
        if not all(self.progress(other).was_tried for other in self.meta.members):
            return Wait("not every member was asked yet")
        if self._is_of_older_timeline(status):
            may_be_filled = name not in self.meta.joined or self._may_be_filled(name, status)
            if may_be_filled and any(map(self.is_faithful, self.meta.joined)):
                return self._going_over(status)  # a new replica, too: it is made with the first timeline
            return Wait("it holds the log of an older timeline, and has no vote")
        if (
            status.is_sound
            and name in self.meta.joined
            and not (self.is_faithful(name) or self._may_be_filled(name, status))
        ):
            return Wait("it has forgotten what it acknowledged, and has no vote")
        keep, held = self._lineage(name, status), self.held(name)
        if not status.is_sound and name in self.meta.joined:
            return self._mend_to_vote(name, status)
        sources = self._faithful_sources(name, keep)
        if status.is_sound and self.floor > keep + 1 and self._faithful_sources(name, self.floor - 1):
            if held > keep:
                return Truncate(keep)
            if self._lacks_only_archived(name, status):
                return Trim(self.floor)
        if not sources:
            return Wait("the closing mark is undecided")
        if not status.is_sound:
            return self._mend(name, status, keep)
        if held > keep:
            return Truncate(keep)
        return Copy(*self.sources_for(name, keep, self.held(sources[0])))

    def _may_be_filled(self, name: str, status: ReplicaStatus) -> bool:
        """Return whether another directory stands in the place of the one that joined and may be copied to. The session
        that is being closed never began in it, so nothing acknowledged can be cut there. And a copy can decide the vote:
        whatever silent and forgetful replicas held, no majority reached more than the faithful replicas hold."""
        state = self.meta.replicas.get(name)
        is_another = state is not None and state.incarnation != status.incarnation and status.session < self.meta.opened
        highest = [self._bounds(other)[1] for other in self.meta.members]
        return is_another and reached(highest, len(highest)) < EVERYTHING

    def _mend_to_vote(self, name: str, status: ReplicaStatus) -> Task:
        """Repair a damaged member so that it can vote. A replica that was faithful in the same session, and holds all
        that this one ever had, has the very bytes that are missing here."""
        held = self.held(name)
        sources = self._faithful_sources(name, held - 1)
        if self.knows_its_end(name) and sources and status.damaged_segments:
            return Heal(min(status.damaged_segments), held, sources)
        return Wait(f"it is damaged and has no vote: {status.findings[0].sentence()}")

    def _faithful_sources(self, name: str, above: int) -> tuple[str, ...]:
        return tuple(other for other in self.sources(name, above) if self.is_faithful(other))

    def sources_for(self, name: str, above: int, mark: int) -> tuple[int, tuple[str, ...]]:
        """Return the id up to which other replicas can give this replica the log, and the replicas that can."""
        sources = self.sources(name, above)
        last_id = min([mark, *(self.trusted(other) for other in sources[:1])])
        return last_id, tuple(other for other in sources if self.trusted(other) >= last_id)

    def sources(self, name: str, above: int) -> tuple[str, ...]:
        """Return the replicas that hold more of the log than `above`, the longest first."""
        statuses = {other: self.status(other) for other in self.names if other != name}
        found = [
            (-self.trusted(other), other)
            for other, status in statuses.items()
            if status is not None and self.trusted(other) > above and status.floor <= above + 1
        ]
        return tuple(other for _, other in sorted(found))

    def waiting(self) -> str:
        """Return in one sentence what this recovery waits for; empty if it waits for nothing."""
        refusal = self.refusal
        if refusal is not None:
            return refusal.message
        if self.is_open:
            return ""
        silent = [name for name in self.names if not self._has_answered(name)]
        if not self.is_taken and self.needs_others:
            silent += [name for name in self.others if name not in self._strange]
        missing = f"; no answer from {', '.join(silent)}" if silent else ""
        if self.meta.decision is None:
            if self.is_fresh:
                return f"the first session needs an answer from every storage of the cluster{missing}"
            if not self.is_taken and self.needs_others:
                return f"no storage that answers has the replica that took part in session {self.meta.opened}{missing}"
            return f"the closing mark of session {self.meta.opened} is undecided{missing}"
        if self.contest:
            return f"{self.contest}{missing}"
        level = [name for name in self.roles if isinstance(self.next_for(name), Level)]
        return f"level: {', '.join(level) or 'none'} of {', '.join(self.roles)}{missing}"

    # -- what is to be saved

    @property
    def members(self) -> tuple[str, ...]:
        """Members that this session will have: the assigned ones, and learners that have become level."""
        staying = self._staying.items()
        return tuple(name for name, role in staying if role is Membership.MEMBER or isinstance(self.next_for(name), Level))

    @property
    def _staying(self) -> Mapping[str, Membership]:
        """Replicas that this session keeps. No replica leaves before each replica that stays holds all of the log: a
        session without the replicas of `leaving` must not be weaker than one with them."""
        if not self.leaving:
            return self.roles
        staying = {name: role for name, role in self.roles.items() if name not in self.leaving}
        are_level = all(isinstance(self.next_for(name), Level) for name in staying)
        return staying if are_level else self.roles

    @property
    def has_level_majority(self) -> bool:
        """Return whether a majority of the members that this session will have holds exactly the decided log."""
        if self.mark is None:
            return False
        members = self.members
        level = sum(isinstance(self.next_for(name), Level) for name in members)
        return bool(members) and level >= majority(len(members))

    @property
    def _is_admissible(self) -> bool:
        return self.has_level_majority and not (self.patience_left and any(map(self._is_nearly_level, self.roles)))

    def _is_nearly_level(self, name: str) -> bool:
        if self.roles[name] is Membership.MEMBER and not self.progress(name).was_tried:
            return True  # it may answer in a moment, and would count only from the next session on
        task = self.next_for(name)
        if isinstance(task, Level | Wait | Heal):
            return False
        assert self.mark is not None
        return min(self.trusted(name), self.mark) + NEAR_IDS >= self.mark

    def next_save(self) -> PartitionMeta | None:
        """Return the document to save before anything else relies on it; None if there is none."""
        if self.is_open or not self.is_taken:
            return None
        if self.meta.decision is None:
            mark = self.decide()
            if mark is None:
                return None
            states = {**self.meta.replicas, **self._copies(mark)}
            return replace(self.meta, decision=Decision(mark=mark, session=self.session), replicas=states)
        if not self._is_admissible:
            return None
        level = {name: status for name, status in self.statuses.items() if isinstance(self.next_for(name), Level)}
        return admitting(self.meta, self.meta.decision.mark, self.members, self._staying, level, self.foreign)

    def _copies(self, mark: int) -> dict[str, ReplicaState]:
        """Return the replicas that hold the decided log because they have copied it. They are saved with the decision,
        which rests on them. Otherwise the next session would not trust these records, would cut them, and might find them
        nowhere else."""
        return {
            name: ReplicaState(session=status.session, closing=mark, incarnation=status.incarnation)
            for name, status in self.statuses.items()
            if self.progress(name).copied is not None
            and min(self.held(name), self._copied(name)) >= mark
            and not self.is_faithful(name)
        }

    def _copied(self, name: str) -> int:
        progress = self._progress.get(name)
        return EMPTY if progress is None or progress.copied is None else progress.copied

    def _has_answered(self, name: str) -> bool:
        progress = self.progress(name)
        return progress.status is not None if self.is_taken else progress.was_asked

    def has_joined(self, name: str) -> bool:
        """Return whether it is saved that its acknowledgements count in the open session, and it has not forgotten any of
        them."""
        state = self.meta.replicas.get(name)
        return self.is_open and name in self.meta.joined and state is not None and not state.is_lost

    def check(self) -> None:
        """Assert what holds after every event, whatever the replicas reported and whatever was lost."""
        meta = self.meta
        assert meta.session == self.session >= meta.opened
        joined = meta.joined if meta.opened == self.session else ()
        assert meta.opened < self.session or len(joined) >= majority(len(meta.members)), "it opened without a majority"
        for name, progress in self._progress.items():
            progress.check()
            assert self.is_taken or progress.status is None, f"{name} was opened before the session was saved"
            if progress.durable is not None:
                assert name in joined, f"{name} counts, and that is not saved"
                assert not meta.replicas[name].is_lost, f"{name} counts, and has forgotten something"
            elif not joined:
                assert EMPTY <= self.trusted(name) <= progress.held
