"""The recovery of one partition by one session: where does the last session end, and which replicas hold exactly that log?

How to think about it. A session is one owner's lease on the log, and at most one can commit: storages refuse every session
below the one that they promised themselves to. What a session committed is on a majority of its members; what it only sent
may be on any of them. The next session therefore asks the members how much they hold, and takes a vote. The result is the
*closing mark*: up to it every record stays for ever; what is above it was never acknowledged, and is cut.

Rule 1: the vote belongs to the session that is being closed: to its recorded members, by its majority, whatever the
assignment says now.
Rule 2: each vote is a range. A member that joined and remembers everything counts as what it holds; one that never joined
counts as nothing; a silent one, or one that has forgotten something, may have held anything. The mark is decided when the
highest mark that a majority reached is the same at both ends of all ranges: then no later answer can change it.
Rule 3: decide, save, act. No replica is brought to a mark that is not saved yet. Before that one is cut, mended or copied
to only where the vote can lose nothing by it. So a crash at any point leads the next owner to the same mark.
Rule 4: only what is certainly the log may be counted or copied from (`trusted`). Above that a replica may hold what another
session wrote.

Five steps: VOTING (hear what the replicas hold) → RECORDING (save the closing mark) → SETTLING (cut and copy until a
majority holds exactly that log) → ADMITTING (save who takes part) → OPEN. The step is computed from the document and the
`Progress` of each replica. It is stored nowhere, so it cannot disagree with them.

The pull. This module remembers and decides, and does nothing. Its driver asks `next_for(replica)` and `next_save()`,
carries that out, and tells how it went. Both may be asked at any time, in any order, and any answer may be lost with the
process.

The hard part is what a replica *was*, when all that can be asked is what it says now (`_is_the_one_that_joined`, `_least`,
`_lineage`). Disks are replaced, directories go back to older copies, halves of control files are lost, writes are torn.
Each is told from a replica that remembers everything by its incarnation, by the session that it has begun, by its own
marks, and by what the document says that it had acknowledged. One that fails any of these is not touched while it may hold
the last copy of something acknowledged; it regains its vote by holding all of that again.

What a replica holds may also be what no owner ever wrote. So being level means to end alike, and not only at the same id:
with the same batch, whose checksum names the one in front of it and so all of them, or in format 0 with the same last
records. Who ends otherwise than the log is *diverged*: it counts for nothing, gives nothing, and is neither cut nor copied
to. What the log ends with, the owner that wrote it knows; else those say it who hold it since before, all of them or a
majority of the members. Where they contradict each other without a majority, nothing opens (`log_end`).

The log may have had other *timelines*: an operator ended it at an earlier id, and it went on from there. A replica of an
older timeline may hold committed transactions above the fork, and other ones have the same ids now. So it does not vote, is
no source, and raises no known mark, until it has gone over (`Fork`): its storage sets aside what it holds above the fork.
A replica of a timeline that this log never had is quarantined like one that has diverged.

The document itself may be an older one, put back by an operator, or be forged. Each session is saved there before a storage
hears of it, so a storage that knows a later session than the document proves it, and nothing is decided (`refusal`). A
document that none of its storages confirms (`is_confirmed`) is one that says that there never was a log, or names
storages that know nothing of it: all storages of the cluster are asked then, before any is fenced, since the log may
be on the others.

How the document changes when a session opens, while it is open and when it ends, is in `waltzd.server.core.membership`. In
order below: what a replica does next, as values; `Recovery` itself. `tests/golden/recovery/` tells it in stories. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

from waltzd.cluster.document_check import contradiction, unfounded
from waltzd.cluster.documents import Decision, Membership, PartitionMeta, ReplicaState
from waltzd.errors import WaltzError
from waltzd.format.batch import End
from waltzd.format.finding import Code
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY, EVERYTHING, decided, majority, reached
from waltzd.server.core.membership import admitting
from waltzd.server.core.progress import Marks, Progress, certain_of, print_of
from waltzd.server.core.task import Copy, Foreign, Fork, GiveUp, Heal, Level, SetLowMark, Task, Trim, Truncate, Wait

NEAR_IDS = 10_000
"""A replica that lags less than this is level in a moment."""


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
        """`meta` carries our session. `is_taken`: it is saved; before that replicas are asked, and none is opened. `ours`:
        where this owner also had the session that is closed, the incarnation of each replica that was in contact with
        it; and `end`: with which batch the log ends at its mark."""
        self.meta = meta
        self.session = meta.session
        self.roles = dict(sorted(roles.items()))
        self.is_taken = is_taken
        self._ours = ours or {}
        self.patience_left = True
        """While true, a session that could open waits for replicas that are nearly level; the driver ends that."""
        self._begun_max = meta.opened if meta.decision is None else meta.session - 1
        """The newest session that a storage may have begun before ours, as far as the coordinator knows."""
        self._progress: dict[str, Progress] = {}
        self._known_end: object = print_of(end)
        """What the log has at the mark at which this session opens, once that is certain."""
        self.leaving: frozenset[str] = frozenset()
        """Assigned replicas that leave with this session, if all others that are assigned are level when it opens. While a
        session is open: those that leave with the next one. Empty after each change of `roles`."""
        self.others: list[str] = []
        """Storages of the cluster that the log should not be on. They are asked where nothing confirms the document."""
        self._strange: dict[str, ReplicaStatus | None] = {}
        """What they said."""
        assert meta.opened <= meta.session

    # -- who there is

    @property
    def names(self) -> list[str]:
        """All replicas to contact: those that may vote, and those that shall hold the log from now on."""
        return sorted({*self.roles, *self.meta.members})

    @property
    def is_fresh(self) -> bool:
        """No session of this partition was ever opened."""
        return self.meta.opened == 0 and self.meta.decision is None

    @property
    def mark(self) -> int | None:
        """The mark at which this session opens, when it is saved."""
        if self.meta.opened == self.session:
            return self.meta.low_mark
        return self.meta.decision.mark if self.meta.decision is not None else None

    @property
    def step(self) -> Step:
        if self.meta.opened == self.session:
            return Step.OPEN
        if self.meta.decision is None:
            return Step.VOTING if self.decide() is None else Step.RECORDING
        return Step.ADMITTING if self._is_admissible else Step.SETTLING

    def progress(self, name: str) -> Progress:
        """How far this replica is: one value for as long as the session lasts."""
        found = self._progress.get(name)
        if found is None:
            found = self._progress[name] = Progress()
        return found

    def marks(self) -> Marks:
        """What is committed in this session from now on: it has just opened."""
        assert self.step is Step.OPEN
        return Marks({name: self.progress(name) for name in self.meta.members}, self.meta.joined, self.meta.low_mark)

    def status(self, name: str) -> ReplicaStatus | None:
        return self.progress(name).status

    @property
    def statuses(self) -> dict[str, ReplicaStatus]:
        """Of the replicas that answer."""
        return {name: progress.status for name, progress in self._progress.items() if progress.status is not None}

    @property
    def incarnations(self) -> dict[str, UUID]:
        return {name: status.incarnation for name, status in self.statuses.items()}

    @property
    def forgetful(self) -> list[str]:
        """Those that have forgotten what they acknowledged in this session, where that is not saved yet."""
        return [name for name, progress in self._progress.items() if progress.has_forgotten]

    def held(self, name: str) -> int:
        """The last id on this replica, as far as we were told."""
        return self.progress(name).held

    # -- what happened

    def asked(self, name: str, status: ReplicaStatus | None) -> None:
        """It says where it stands, before we have ever opened it. None: it holds nothing of the partition."""
        progress = self.progress(name)
        progress.was_asked, progress.before = True, status

    @property
    def has_asked_enough(self) -> bool:
        """Our session id may be saved: a session that decided anything after this document was written has fenced one of
        the replicas that were asked, and that one would have said so."""
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
        """Whether the storages that the log should not be on have to say so."""
        return self._has_asked_replicas and not self.is_confirmed

    def asked_other(self, name: str, status: ReplicaStatus | None) -> None:
        """One of `others` says what it holds of the partition: None is nothing."""
        self._strange[name] = status

    @property
    def is_confirmed(self) -> bool:
        """A replica that was asked is what the document says of it: it took part in the session that is to be closed, or,
        where the closing mark is saved, has begun a session since."""
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
        """It answered: lower sessions are fenced there."""
        self.progress(name).was_tried = True
        self.progress(name).copied = self.progress(name).copied_end = None
        self.progress(name).trimmed = 0
        self.changed(name, status)

    def twin_of(self, name: str, status: ReplicaStatus) -> str | None:
        """Another name under which this very replica answers: what is acknowledged under both is on one disk."""
        others = ((other, known) for other, known in self.statuses.items() if other != name)
        return next((other for other, known in others if known.incarnation == status.incarnation), None)

    def is_recorded(self, name: str, status: ReplicaStatus) -> bool:
        """It is the replica that took part under this name."""
        state = self.meta.replicas.get(name)
        return state is not None and state.incarnation == status.incarnation

    def changed(self, name: str, status: ReplicaStatus) -> None:
        """After a truncation, a low-water mark or a healing."""
        progress = self.progress(name)
        progress.status, progress.held = status, status.last_id

    def trimmed(self, name: str, floor: int, status: ReplicaStatus) -> None:
        """It was told to begin at this floor. While it streams, what it holds is known better than by this answer."""
        progress = self.progress(name)
        progress.trimmed = max(progress.trimmed, floor)
        if progress.status is not None:
            progress.status = replace(progress.status, floor=status.floor, untrimmed=status.untrimmed)

    def copied(self, name: str, last_id: int) -> None:
        """It now holds the log up to this id, on its disk: from us, behind what was trusted."""
        progress = self.progress(name)
        progress.held = progress.copied = max(progress.held, last_id)
        if progress.copied_end is None and self.mark is not None and progress.held >= self.mark:
            progress.copied_end = self.log_end

    def diverged(self, name: str, why: str) -> None:
        """It was seen to hold another history than the log, in this session."""
        progress = self.progress(name)
        if progress.status is not None:
            progress.diverged = progress.status.incarnation, why
            progress.durable = None

    def silent(self, name: str) -> None:
        """It does not answer, for now."""
        progress = self.progress(name)
        progress.was_tried = True
        if not self.is_taken:
            progress.was_asked, progress.before = False, None
        progress.status, progress.held = None, EMPTY

    def saved(self, meta: PartitionMeta) -> None:
        """What `next_save` asked for, or another change, is in the coordinator."""
        assert meta.session == self.session
        if meta.opened == self.session != self.meta.opened:
            self._known_end = self.log_end
        self.meta = meta

    # -- deciding

    @property
    def refusal(self) -> WaltzError | None:
        """Why nothing may be decided without an operator: a storage and the document contradict each other."""
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
        return contradiction(self.meta, name, status, begun_max=self._begun_max, is_before=is_before)

    def decide(self) -> int | None:
        """The closing mark of the last opened session, or None while more than one answer is possible."""
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
        """What this member held of the session that is being closed: at least, and at most."""
        trusted = self.trusted(name)
        if name not in self.meta.joined:
            return trusted, trusted  # nothing of it ever counted; what it has copied since does
        if self.is_faithful(name):
            return self.held(name), self.held(name)
        return trusted, self.held(name) if self.knows_its_end(name) else EVERYTHING

    def is_faithful(self, name: str) -> bool:
        """It joined the session that is being closed and remembers everything that it acknowledged in it."""
        status = self.status(name)
        return status is not None and status.is_sound and self._is_the_one_that_joined(name, status)

    # -- whether it is the log that a replica holds

    def divergence(self, name: str) -> str:
        """How this replica is known to hold another history than the log; empty where it is not."""
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
        mine, log = self._end(name), self.log_end
        if mine is None or log is None or mine == log:
            return ""
        return f"holds something else at id {self.mark} than the log"

    @property
    def foreign(self) -> dict[str, UUID]:
        """The directories that hold another history than the log."""
        return {name: status.incarnation for name, status in self.statuses.items() if self.divergence(name)}

    @property
    def log_end(self) -> object:
        """What the log has at the mark. None: nobody has said it, or those who hold it contradict each other."""
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
        """What those have at the mark who hold it since before this session. A copy says no more than its source did."""
        return {name: end for name in self.roles if self._copied(name) == EMPTY and (end := self._end(name)) is not None}

    def _end(self, name: str) -> object:
        """What this replica has at the mark, once it has begun this session; None where that is not known."""
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
        """Who contradicts whom about the end of the log, in a sentence; empty where a majority or nobody does."""
        found = self._ends
        if self.log_end is not None or len(set(found.values())) <= 1:
            return ""
        return (
            f"{' and '.join(found)} do not end alike at id {self.mark}, and no majority of {', '.join(self.roles)} tells "
            "which of them is the log"
        )

    # -- what a replica held

    def knows_its_end(self, name: str) -> bool:
        """It joined that session and is damaged, but sound records stand behind the damage: it never held more than the
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
        """A replica that joined holds this much, or has forgotten something: it joined with the low-water mark of the
        session. Above the closing mark, once that is known, it forgets what it is told to."""
        mark = EVERYTHING if self.meta.decision is None else self.meta.decision.mark
        own = max(self.meta.low_mark, status.low_mark, status.local_low_mark, status.committed)
        return max(own, min(mark, state.acknowledged))

    def trusted(self, name: str) -> int:
        """Up to this id, what the replica holds is the log, or the lineage of the session that is being closed."""
        status = self.status(name)
        if status is None or not status.is_sound or self._given_up(status) is not None or self.divergence(name):
            return EMPTY
        if self._is_of_older_timeline(status):
            return EMPTY
        return self._lineage(name, status)

    def _is_of_older_timeline(self, status: ReplicaStatus) -> bool:
        """Whether this replica holds the log of a timeline that was ended, and has not gone over to the current one."""
        return status.timeline != self.meta.lineage.current and status.timeline in self.meta.lineage

    def _given_up(self, status: ReplicaStatus) -> int | None:
        return self.meta.gave_up(status.session, status.certain)

    def _lineage(self, name: str, status: ReplicaStatus) -> int:
        """The same as if nothing of it were damaged."""
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
        if name not in self.roles:
            return Wait("it is no longer assigned")
        if status.session != self.session and self.has_joined(name):
            return Wait("it has forgotten this session, and that is not saved yet")
        if self._is_of_older_timeline(status):
            return self._going_over(status)
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
                return Wait(f"{', '.join(waits)} said nothing yet of the end of the log")
            last_id, sources = self.give(name, held, mark)
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
        """The highest trim floor of all replicas that answer: from there on each of them can give what it holds. An owner
        sets none above the mark at which its session began."""
        current = self.meta.lineage.current
        found = max((status.floor for status in self.statuses.values() if status.timeline == current), default=0)
        return found if found <= self.meta.low_mark + 1 else 0

    def _lacks_only_archived(self, name: str, status: ReplicaStatus) -> bool:
        """Nobody can give it what it needs first: it ends below the floor, or is damaged there."""
        floor = self.floor
        if status.floor >= floor or self.progress(name).trimmed >= floor:
            return False
        return self.held(name) + 1 < floor or min(status.damaged_segments, default=floor) < floor

    def _not_compared(self, name: str, mark: int) -> list[str]:
        """Those who hold the decided log, but have not begun this session, so that its end cannot be compared: until then
        nobody copies, because a copy of what is not the log cannot be told from it later."""
        if self.meta.opened == self.session or self._known_end is not None or self._end_of_majority is not None:
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
        """Damage up to what is certain is replaced by what the others hold; what is behind it is cut, as long as this
        session has not begun there. Afterwards nothing is cut, so the others must give what this replica held."""
        has_begun = status.session == self.session
        mark = certain_of(status, mark)
        last_id = max(mark, status.last_id, *(one.last_id or EMPTY for one in status.findings)) if has_begun else mark
        segment = min(status.damaged_segments, default=EVERYTHING)
        if segment <= last_id:
            last_id, sources = self.give(name, segment - 1, last_id)
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
        if self._is_of_older_timeline(status):
            return Wait("it holds the log of an older timeline, and has no vote")
        if not all(self.progress(other).was_tried for other in self.meta.members):
            return Wait("not every member was asked yet")
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
        if not sources:
            return Wait("the closing mark is undecided")
        if not status.is_sound:
            return self._mend(name, status, keep)
        if held > keep:
            return Truncate(keep)
        if self._lacks_only_archived(name, status):
            return Trim(self.floor)
        return Copy(*self.give(name, keep, self.held(sources[0])))

    def _may_be_filled(self, name: str, status: ReplicaStatus) -> bool:
        """Another directory stands in the place of the one that joined, and the session that is being closed was never
        begun in it: nothing that was acknowledged can be cut there. And a copy can decide: whatever silent and forgetful
        replicas held, no majority reached more than the faithful ones hold."""
        state = self.meta.replicas.get(name)
        is_another = state is not None and state.incarnation != status.incarnation and status.session < self.meta.opened
        highest = [self._bounds(other)[1] for other in self.meta.members]
        return is_another and reached(highest, len(highest)) < EVERYTHING

    def _mend_to_vote(self, name: str, status: ReplicaStatus) -> Task:
        """A replica that was faithful in the same session, and holds all that this one ever had, has the very bytes that
        are missing here. With them this one votes for what it held."""
        held = self.held(name)
        sources = self._faithful_sources(name, held - 1)
        if self.knows_its_end(name) and sources and status.damaged_segments:
            return Heal(min(status.damaged_segments), held, sources)
        return Wait(f"it is damaged and has no vote: {status.findings[0].sentence()}")

    def _faithful_sources(self, name: str, above: int) -> tuple[str, ...]:
        return tuple(other for other in self.sources(name, above) if self.is_faithful(other))

    def give(self, name: str, above: int, mark: int) -> tuple[int, tuple[str, ...]]:
        """Up to where the others can give it the log, and which of them can."""
        sources = self.sources(name, above)
        last_id = min([mark, *(self.trusted(other) for other in sources[:1])])
        return last_id, tuple(other for other in sources if self.trusted(other) >= last_id)

    def sources(self, name: str, above: int) -> tuple[str, ...]:
        """The replicas that hold more of the log than `above`, the longest first."""
        found = [
            (-self.trusted(other), other)
            for other in self.names
            if other != name and self.trusted(other) > above and self.statuses[other].floor <= above + 1
        ]
        return tuple(other for _, other in sorted(found))

    def waiting(self) -> str:
        """What this recovery waits for, in one sentence; empty when it waits for nothing."""
        refusal = self.refusal
        if refusal is not None:
            return refusal.message
        if self.meta.opened == self.session:
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
        """The members that this session will have: the assigned ones, and learners that have become level."""
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
        """A majority of the members that this session will have holds exactly the decided log."""
        members = self.members
        level = sum(isinstance(self.next_for(name), Level) for name in members)
        return bool(members) and level >= majority(len(members))

    @property
    def _is_admissible(self) -> bool:
        return self.has_level_majority and not (self.patience_left and any(map(self._is_nearly_level, self.roles)))

    def _is_nearly_level(self, name: str) -> bool:
        task = self.next_for(name)
        if isinstance(task, Level | Wait | Heal):
            return False
        assert self.mark is not None
        return min(self.trusted(name), self.mark) + NEAR_IDS >= self.mark

    def next_save(self) -> PartitionMeta | None:
        """The document to save before anything else is done with what it says."""
        if self.meta.opened == self.session or not self.is_taken:
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
        """The replicas that hold the decided log because they have copied it. That is saved with the decision, which rests
        on it: else the next session would not trust these records, cut them, and perhaps find them nowhere else."""
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
        """It is saved that its acknowledgements count in the open session, and it has not forgotten any of them."""
        state = self.meta.replicas.get(name)
        is_open = self.meta.opened == self.session
        return is_open and name in self.meta.joined and state is not None and not state.is_lost

    def check(self) -> None:
        """What is true of the whole state after every event, whatever the replicas said and whatever was lost."""
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
