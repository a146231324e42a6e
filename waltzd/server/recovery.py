"""The recovery of one partition by one session: what was the last session's closing mark, and who holds exactly that?

Five steps: VOTING (hear what the replicas hold) → RECORDING (save the closing mark) → SETTLING (truncate and copy until a
majority holds exactly that log) → ADMITTING (save who takes part) → OPEN. This module decides and remembers; whoever
drives it asks `next_for(replica)` and `next_save()`, does that, and tells how it went. Everything may be asked again at
any time, and any answer may be lost with the process: what has been relied on was saved before.

The vote belongs to the session that is being closed: to its recorded members, by its majority. Each member's mark is
known within bounds. A member that never joined that session counts for nothing in it; a silent or a forgetful one may
hold anything. When the highest mark that a majority reached is the same for the lower and the upper bounds, it is decided.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

from waltzd.errors import WaltzError
from waltzd.finding import Code
from waltzd.meta import Decision, PartitionMeta, ReplicaState, Role
from waltzd.quorum import EMPTY, EVERYTHING, decided, majority, reached
from waltzd.replica import ReplicaStatus
from waltzd.server.changes import admitting
from waltzd.server.contradiction import contradiction
from waltzd.server.task import Copy, GiveUp, Heal, Level, SetLowMark, Task, Truncate, Wait

NEAR_IDS = 10_000
"""Who lags less than this is level in a moment."""
NOBODY: Mapping[str, UUID] = {}


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
        roles: Mapping[str, Role],
        *,
        is_taken: bool = True,
        ours: Mapping[str, UUID] = NOBODY,
    ) -> None:
        """`meta` carries our session. `is_taken`: it is saved; before that replicas are asked, and none is opened. `ours`:
        who was in contact with the session that is closed, which was ours, under which incarnation."""
        self.meta = meta
        self.session = meta.session
        self.roles = dict(sorted(roles.items()))
        self.is_taken = is_taken
        self._ours = ours
        self.story: deque[str] = deque(maxlen=200)
        self.patience_left = True
        """While true, a session that could open waits for replicas that are nearly level; whoever drives ends that."""
        self._begun_max = meta.opened if meta.decision is None else meta.session - 1
        """The newest session that a storage may have begun before ours, as far as the coordinator knows."""
        self._asked: dict[str, ReplicaStatus | None] = {}
        """Where each replica stood before we opened it; None where the storage holds nothing of the partition."""
        self._statuses: dict[str, ReplicaStatus] = {}
        self._held: dict[str, int] = {}
        self._copied: dict[str, int] = {}
        self._tried: dict[str, None] = {}
        assert meta.opened <= meta.session

    # -- who there is

    @property
    def names(self) -> list[str]:
        """Everybody to contact: who may vote, and who shall hold the log from now on."""
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

    def status(self, name: str) -> ReplicaStatus | None:
        return self._statuses.get(name)

    @property
    def incarnations(self) -> dict[str, UUID]:  # of those who answer
        return {name: status.incarnation for name, status in self._statuses.items()}

    def held(self, name: str) -> int:
        """The last id on this replica, as far as we were told."""
        return self._held.get(name, EMPTY)

    # -- what happened

    def asked(self, name: str, status: ReplicaStatus | None) -> None:
        """It says where it stands, before we have ever opened it. None: it holds nothing of the partition."""
        self._asked[name] = status

    @property
    def has_asked_enough(self) -> bool:
        """Our session id may be saved: a session that decided anything after this document was written has fenced one of
        those who were asked, and it would have said so."""
        if self.is_fresh:
            return bool(self.roles) and all(name in self._asked for name in self.roles)
        members = [name for name, role in self.roles.items() if role is Role.MEMBER] or list(self.roles)
        voters = self.meta.members if self.meta.decision is None else members
        return bool(voters) and sum(name in self._asked for name in voters) >= majority(len(voters))

    def opened(self, name: str, status: ReplicaStatus) -> None:
        """It answered: lower sessions are fenced there."""
        self._tried[name] = None
        self._copied.pop(name, None)
        self._take(name, status)
        self._note(f"{name} answers: {status.sentence()}, begun {status.session} at {status.low_mark}")

    def twin_of(self, name: str, status: ReplicaStatus) -> str | None:
        """Another name under which this very replica answers: what is acknowledged under both is on one disk."""
        others = ((other, known) for other, known in self._statuses.items() if other != name)
        return next((other for other, known in others if known.incarnation == status.incarnation), None)

    def is_recorded(self, name: str, status: ReplicaStatus) -> bool:
        """It is the replica that took part under this name."""
        state = self.meta.replicas.get(name)
        return state is not None and state.incarnation == status.incarnation

    def changed(self, name: str, status: ReplicaStatus) -> None:
        """After a truncation, a low-water mark or a healing."""
        self._take(name, status)

    def copied(self, name: str, last_id: int) -> None:
        """It now holds the log up to this id, on its disk: from us, behind what was trusted."""
        self._held[name] = self._copied[name] = max(self.held(name), last_id)

    def silent(self, name: str, why: str) -> None:
        """It does not answer, for now."""
        self._tried[name] = None
        if not self.is_taken:
            self._asked.pop(name, None)
        if self._statuses.pop(name, None) is not None or name not in self._held:
            self._note(f"{name} is silent: {why}")
        self._held.pop(name, None)

    def saved(self, meta: PartitionMeta) -> None:
        """What `next_save` asked for, or another change, is in the coordinator."""
        assert meta.session == self.session
        if meta.decision is not None and self.meta.decision is None and meta.opened != self.session:
            self._note(f"decided: session {meta.opened} closed at {meta.decision.mark}")
        if meta.opened == self.session and self.meta.opened != self.session:
            self._note(f"open at {meta.low_mark} with {', '.join(meta.members)}; joined {', '.join(meta.joined)}")
        self.meta = meta

    def _take(self, name: str, status: ReplicaStatus) -> None:
        self._statuses[name] = status
        self._held[name] = status.last_id

    def _note(self, sentence: str) -> None:
        self.story.append(sentence)

    # -- deciding

    @property
    def refusal(self) -> WaltzError | None:
        """Why nothing may be decided here without an operator."""
        for name in self.names:
            for status in (self._asked.get(name), self._statuses.get(name)):
                error = None if status is None else self._contradiction(name, status)
                if error is not None:
                    return error
        return None

    def _contradiction(self, name: str, status: ReplicaStatus) -> WaltzError | None:
        is_before = status is self._asked.get(name)
        return contradiction(
            name,
            status,
            session=self.session,
            begun_max=self._begun_max,
            promised=status.promised_session if is_before else EMPTY,
            is_begun=not is_before and (self.meta.decision is not None or self.meta.opened == self.session),
            is_fresh=self.is_fresh,
        )

    def decide(self) -> int | None:
        """The closing mark of the last opened session, or None while more than one answer is possible."""
        if self.meta.decision is not None:
            return self.meta.decision.mark
        if self.refusal is not None:
            return None
        if self.is_fresh:
            return EMPTY if self.roles and all(name in self._statuses for name in self.roles) else None
        statuses = [status for status in self._statuses.values() if self._given_up(status) is None]
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
        status = self._statuses.get(name)
        return status is not None and status.is_sound and self._is_the_one_that_joined(name, status)

    def knows_its_end(self, name: str) -> bool:
        """It joined that session and is damaged, but sound records stand behind the damage: it never held more than the
        last of them. A power cut in the middle of a write can leave it so."""
        status = self._statuses.get(name)
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
            and self.held(name) >= self._least(state, status)
        )

    def _least(self, state: ReplicaState, status: ReplicaStatus) -> int:
        """A replica that joined holds this much, or has forgotten something: it joined with the low-water mark of the
        session. Above the closing mark, once that is known, it forgets what it is told to."""
        mark = EVERYTHING if self.meta.decision is None else self.meta.decision.mark
        own = max(self.meta.low_mark, status.low_mark, status.local_low_mark, status.committed)
        return max(own, min(mark, state.acknowledged))

    def trusted(self, name: str) -> int:
        """Up to this id, what the replica holds is the log, or the lineage of the session that is being closed."""
        status = self._statuses.get(name)
        if status is None or not status.is_sound or self._given_up(status) is not None:
            return EMPTY
        return self._lineage(name, status)

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
        known = [floor, min(held, self._copied.get(name, EMPTY))]
        is_recorded = state is not None and (state.incarnation, state.session) == (status.incarnation, status.session)
        if state is not None and is_recorded and state.closing is not None:
            known.append(min(held, state.closing))
        is_ours = self._ours.get(name) == status.incarnation and status.session == self.meta.opened
        if is_ours and self.mark is not None:  # since it began that session it has got nothing but our log
            known.append(min(held, self.mark))
        return max(known)

    # -- what a replica should do

    def next_for(self, name: str) -> Task:
        status, mark = self._statuses.get(name), self.mark
        if status is None:
            return Wait("it does not answer")
        if self.refusal is not None:
            return Wait("an operator has to decide")
        given_up = self._given_up(status)
        if given_up is not None:
            return GiveUp(f"a rescue gave up committed transactions above id {given_up} that it holds: set it aside")
        if mark is None:
            return self._while_voting(name, status)
        if name not in self.roles:
            return Wait("it is no longer assigned")
        if status.session != self.session and self.has_joined(name):
            return Wait("it has forgotten this session, and that is not saved yet")
        if not status.is_sound:
            return self._mend(name, status, mark)
        held = self.held(name)
        if status.session != self.session:
            keep = min(self.trusted(name), _certain(status, mark))
            return Truncate(keep) if held > keep else SetLowMark(mark)
        if held < mark:
            last_id, sources = self.give(name, held, mark)
            return (
                Copy(last_id, sources) if sources else Wait(f"nobody who answers holds the ids from {held + 1} to {mark}")
            )
        return Level()

    def _mend(self, name: str, status: ReplicaStatus, mark: int) -> Task:
        """Damage up to what is certain is replaced by what the others hold; what is behind it is cut, as long as this
        session has not begun there. Afterwards nothing is cut, so the others must give what this replica held."""
        has_begun = status.session == self.session
        mark = _certain(status, mark)
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
        if any(other not in self._tried for other in self.meta.members):
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
        return Truncate(keep) if held > keep else Copy(*self.give(name, keep, self.held(sources[0])))

    def _may_be_filled(self, name: str, status: ReplicaStatus) -> bool:
        """Another directory stands in the place of the one that joined, and the session that is being closed was never
        begun in it: nothing that was acknowledged can be cut there. And a copy can decide: whatever the silent and the
        forgetful held, no majority reached more than the faithful hold."""
        state = self.meta.replicas.get(name)
        is_another = state is not None and state.incarnation != status.incarnation and status.session < self.meta.opened
        highest = [self._bounds(other)[1] for other in self.meta.members]
        return is_another and reached(highest, len(highest)) < EVERYTHING

    def _mend_to_vote(self, name: str, status: ReplicaStatus) -> Task:
        """Whoever was faithful in the same session, and holds all that this one ever had, has the very bytes that are
        missing here. With them it votes for what it held."""
        held = self.held(name)
        sources = self._faithful_sources(name, held - 1)
        if self.knows_its_end(name) and sources and status.damaged_segments:
            return Heal(min(status.damaged_segments), held, sources)
        return Wait(f"it is damaged and has no vote: {status.findings[0].sentence()}")

    def _faithful_sources(self, name: str, above: int) -> tuple[str, ...]:
        return tuple(other for other in self.sources(name, above) if self.is_faithful(other))

    def give(self, name: str, above: int, mark: int) -> tuple[int, tuple[str, ...]]:
        """Up to where the others can give it the log, and who can: what a replica holds above its trust may be another
        session's, as long as it is not cut there."""
        sources = self.sources(name, above)
        last_id = min([mark, *(self.trusted(other) for other in sources[:1])])
        return last_id, tuple(other for other in sources if self.trusted(other) >= last_id)

    def sources(self, name: str, above: int) -> tuple[str, ...]:
        """Who holds more of the log than `above`, the most first."""
        found = [(-self.trusted(other), other) for other in self.names if other != name and self.trusted(other) > above]
        return tuple(other for _, other in sorted(found))

    def waiting(self) -> str:
        """What this recovery waits for, in one sentence; empty when it waits for nothing."""
        refusal = self.refusal
        if refusal is not None:
            return refusal.message
        if self.meta.opened == self.session:
            return ""
        answering = self._statuses if self.is_taken else self._asked
        silent = [name for name in self.names if name not in answering]
        missing = f"; {', '.join(silent)} do not answer" if silent else ""
        if self.meta.decision is None:
            if self.is_fresh:
                return f"the first session needs an answer from every assigned storage{missing}"
            return f"the closing mark of session {self.meta.opened} is undecided{missing}"
        level = [name for name in self.roles if isinstance(self.next_for(name), Level)]
        return f"level: {', '.join(level) or 'nobody'} of {', '.join(self.roles)}{missing}"

    # -- what is to be saved

    @property
    def members(self) -> tuple[str, ...]:
        """The members that this session will have: the assigned ones, and learners that have become level."""
        return tuple(
            name for name, role in self.roles.items() if role is Role.MEMBER or isinstance(self.next_for(name), Level)
        )

    @property
    def has_level_majority(self) -> bool:
        """A majority of the members-to-be holds exactly the decided log."""
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
        level = {name: status for name, status in self._statuses.items() if isinstance(self.next_for(name), Level)}
        return admitting(self.meta, self.meta.decision.mark, self.members, self.roles, level)

    def _copies(self, mark: int) -> dict[str, ReplicaState]:
        """Who holds the decided log because it has copied it. That is saved with the decision, which rests on it: the next
        session would not trust these records, cut them, and perhaps find them nowhere else."""
        return {
            name: ReplicaState(session=status.session, closing=mark, incarnation=status.incarnation)
            for name, status in self._statuses.items()
            if name in self._copied and min(self.held(name), self._copied[name]) >= mark and not self.is_faithful(name)
        }

    def has_joined(self, name: str) -> bool:
        """It is saved that its acknowledgements count in the open session, and it has not forgotten any of them."""
        state = self.meta.replicas.get(name)
        is_open = self.meta.opened == self.session
        return is_open and name in self.meta.joined and state is not None and not state.is_lost


def _certain(status: ReplicaStatus, mark: int) -> int:
    """Up to here nothing is ever cut on this replica. It can know of more than the mark of an open session only from that
    session itself, which it has forgotten since that it had begun."""
    return max(mark, status.committed)
