"""The stories of recovery, one file each in `tests/golden/recovery/`, told to the real `Recovery`.

A paragraph of a story is a sentence, what happens, `----`, and the state afterwards: the step and what it waits for, the
document that is to be saved, and what each replica does next. `REWRITE=1` writes the states anew; the diff is the review.

    closing low=4 members=ABC     session 2 begins; it closes session 1, which opened at 4 with these members, all joined.
                                  joined=AC, assigned=CD, learners=D, decided=9 (that is saved already), missed=B:7 (B was
                                  closed at 7 by session 0), acknowledged=A:12,C:12 (says the document), opened (session 2
                                  itself is open), first (no session was ever opened), unsaved (session 2 is not saved yet)
    A holds 10                    it answers. session=1, low=4, committed=4, local=4, promised=2; another (directory);
                                  torn=7-8 (damaged, with sound records behind), damaged, missing=5-6
    A says 10                     it answers before the session is saved; A says nothing: its storage holds nothing
    A is silent
    A does it                     what is next for it succeeds; `up to 7`: a copy that ends early
    save                          what is to be saved is saved; `taken`: the session id is
    A forgets 12                  in the open session: it has no vote, and had acknowledged 12
    again                         the next owner begins session 3, with the document as it is; `as the same owner`: planned,
                                  closed at the highest id that a member holds
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from waltzd.cluster.documents import (
    Decision,
    Membership,
    PartitionMeta,
    ReplicaState,
    closing,
    diverging,
    following,
    losing,
)
from waltzd.format.batch import End
from waltzd.format.finding import Code, Finding
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY
from waltzd.server.core.recovery import Copy, Foreign, GiveUp, Heal, Recovery, SetLowMark, Task, Truncate, Wait

FOLDER = Path(__file__).parents[4] / "golden" / "recovery"
HOME = {name: UUID(int=number) for number, name in enumerate("ABCDE", 1)}
ANOTHER = UUID(int=99)


@dataclass(frozen=True)
class Replica:
    """What stands on one storage."""

    incarnation: UUID
    session: int
    low: int
    held: int
    committed: int
    local: int
    promised: int = 2
    findings: tuple[Finding, ...] = ()
    end: int = 0
    """The checksum of its last batch; 0 where it does not say."""

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(
            partition=0, incarnation=self.incarnation, promised_session=self.promised, session=self.session,
            low_mark=self.low, local_low_mark=self.local, committed=self.committed, last_id=self.held,
            is_available=True, is_full=False, segments=1, findings=self.findings,
            damaged_segments=tuple(one.first_id or 0 for one in self.findings),
            end=End(crc=self.end) if self.end else None,
        )  # fmt: skip


class Story:
    def __init__(self) -> None:
        self.core = Recovery(PartitionMeta(generation=1, session=1), {})
        self.replicas: dict[str, Replica] = {}
        self.refused = ""

    # -- what happens

    def tell(self, line: str) -> None:
        self.refused = ""
        who, *words = line.split()
        facts = dict(word.partition("=")[::2] for word in words)
        match who, words:
            case "closing", _:
                self.begin(facts)
            case "save", _:
                wanted = self.core.next_save()
                assert wanted is not None, "there is nothing to save"
                self.core.saved(wanted)
            case "taken", _:
                self.core.is_taken = True
            case "again", _:
                self.again(is_ours=bool(words))
            case _, ["holds", held, *_]:
                self.replicas[who] = self.replica(who, int(held), facts)
                self.core.opened(who, self.replicas[who].status())
            case _, ["says", held, *_]:
                self.core.asked(who, None if held == "nothing" else self.replica(who, int(held), facts).status())
            case _, ["is", "silent"]:
                self.core.silent(who)
            case _, ["does", "it", *rest]:
                self.do(who, int(rest[-1]) if rest else None)
            case _, ["diverges"]:
                self.core.diverged(who, "holds another history than the log")
                status = self.core.status(who)
                assert status is not None
                mark = self.core.progress(who).acknowledged
                self.change(who, diverging(self.core.meta, who, status.incarnation, mark))
            case _, ["forgets", mark]:
                self.change(who, losing(self.core.meta, who, int(mark)))
            case _:
                raise AssertionError(f"nobody understands {line!r}")

    def begin(self, facts: dict[str, str]) -> None:
        def marks(word: str) -> dict[str, int]:
            return {pair[0]: int(pair[2:]) for pair in facts.get(word, "").split(",") if pair}

        members = facts.get("members", "ABC")
        acknowledged = marks("acknowledged")
        opened = 2 if "opened" in facts else 0 if "first" in facts else 1
        states = {
            name: ReplicaState(
                session=opened, closing=None, incarnation=HOME[name], acknowledged=acknowledged.get(name, EMPTY)
            )
            for name in facts.get("joined", members)
        }
        for name, mark in marks("missed").items():
            states[name] = ReplicaState(session=0, closing=mark, incarnation=HOME[name])
        decision = None
        if "decided" in facts:
            decision = Decision(mark=int(facts["decided"]), session=1 if "unsaved" in facts else 2)
        meta = PartitionMeta(
            generation=1, session=2, opened=opened, low_mark=int(facts.get("low", 4)), members=tuple(members),
            replicas=states, decision=decision,
        )  # fmt: skip
        if "first" in facts:
            meta = PartitionMeta(generation=1, session=1)
        roles = dict.fromkeys(facts.get("assigned", members), Membership.MEMBER)
        roles.update(dict.fromkeys(facts.get("learners", ""), Membership.LEARNER))
        self.core, self.replicas = Recovery(meta, roles, is_taken="unsaved" not in facts), {}
        self.core.patience_left = False

    def again(self, *, is_ours: bool) -> None:
        core, meta = self.core, self.core.meta
        if is_ours:
            assert core.mark is not None
            mark = max(core.held(name) for name in meta.joined)
            counted = [name for name in meta.joined if not meta.replicas[name].is_lost]
            later = [name for name in meta.members if name not in counted and core.held(name) >= mark]
            meta = following(closing(meta, mark, {name: core.incarnations[name] for name in later}))
        else:
            meta = replace(meta, session=meta.session + 1)
        self.core = Recovery(meta, core.roles, ours=core.incarnations if is_ours else {})
        self.core.patience_left = False

    def replica(self, name: str, held: int, facts: dict[str, str]) -> Replica:
        """As it was known, with what is said anew; one that was never heard of took part in the session that is closed."""
        meta, before = self.core.meta, self.replicas.get(name)
        if "another" in facts:
            before = Replica(ANOTHER, session=0, low=EMPTY, held=held, committed=EMPTY, local=EMPTY)
        elif before is None and meta.opened == 0:
            before = Replica(HOME[name], session=EMPTY, low=EMPTY, held=held, committed=EMPTY, local=EMPTY)
        elif before is None:
            low = int(facts.get("low", meta.low_mark))
            least = min(low, held)
            before = Replica(HOME[name], session=meta.opened, low=low, held=held, committed=least, local=least)
        said: dict[str, Any] = {
            word: int(facts[word]) for word in ("session", "low", "committed", "local", "promised", "end") if word in facts
        }
        return replace(before, held=held, findings=tuple(findings(facts)), **said)

    def do(self, name: str, until: int | None) -> None:
        core, replica = self.core, self.replicas[name]
        match core.next_for(name):
            case Truncate(mark):
                assert mark >= replica.committed, "it is cut below what it knows to be committed"
                replica = replace(replica, held=mark, findings=())
            case SetLowMark(mark):
                assert replica.held <= max(mark, replica.committed), "it would begin with what nobody wants"
                replica = replace(replica, session=core.session, low=mark, local=replica.held)
            case Heal(_, last_id):
                replica = replace(replica, held=last_id, findings=())
            case Copy(last_id):
                replica = replace(replica, held=last_id if until is None else until)
                self.replicas[name] = replica
                core.copied(name, replica.held)
                return
            case task:
                raise AssertionError(f"{name} has nothing to do: {task}")
        self.replicas[name] = replica
        core.changed(name, replica.status())

    def change(self, name: str, wanted: PartitionMeta | None) -> None:
        if wanted is None:
            self.refused = f"nothing is saved about {name}\n"
        else:
            self.core.saved(wanted)

    # -- the state afterwards

    def state(self) -> str:
        core = self.core
        core.check()
        refusal, mark, wanted, waiting = core.refusal, core.decide(), core.next_save(), core.waiting()
        if refusal is not None:
            return f"an operator has to decide: {refusal.code} {refusal.message}\n"
        head = f"{core.step} at {mark}" if core.step != "OPEN" and mark is not None else str(core.step)
        if not core.is_taken:
            head = "enough were asked" if core.has_asked_enough else f"more have to be asked; {waiting.partition('; ')[2]}"
        lines = [head if not waiting or mark is not None or not core.is_taken else f"{head}: {waiting}"]
        if core.step == "OPEN":
            lines[0] += f" at {core.meta.low_mark}; joined: {told(core.meta)}"
        if wanted is not None and wanted.decision is not None:
            copies = [name for name in wanted.replicas if wanted.replicas[name] != core.meta.replicas.get(name)]
            lines.append(
                f"save: closed at {wanted.decision.mark}{' with the copy of ' if copies else ''}{', '.join(copies)}"
            )
        elif wanted is not None:
            lines.append(f"save: open at {wanted.low_mark}; joined: {told(wanted)}")
        if core.is_taken:
            lines += [f"{name} {spoken(core.next_for(name))}" for name in core.names]
        return self.refused + "\n".join(lines) + "\n"


def findings(facts: dict[str, str]) -> list[Finding]:
    if "damaged" in facts:
        return [Finding(code=Code.DAMAGED_RECORD, path="0/0.seg", detail="x")]
    found = []
    for word, code in (("torn", Code.DAMAGED_RECORD), ("missing", Code.SEGMENT_GAP)):
        if word in facts:
            first, last = map(int, facts[word].split("-"))
            found.append(Finding(code=code, path="0/0.seg", detail="x", first_id=first, last_id=last))
    return found


def told(meta: PartitionMeta) -> str:
    """Who has joined, with how much of it, and of the others up to where they can be trusted."""
    states = meta.replicas
    held = {name: f":{states[name].acknowledged}" * (states[name].acknowledged > EMPTY) for name in meta.joined}
    joined = [f"{name}{mark}{' (no vote)' * states[name].is_lost}" for name, mark in held.items()]
    others = [
        f"{name} {'out' if state.is_diverged else f'trusted to {state.closing}'}"
        for name, state in states.items()
        if (name not in meta.joined and state.closing is not None) or state.is_diverged
    ]
    return "; ".join([f"{', '.join(joined)} of {', '.join(meta.members)}", *others])


def spoken(task: Task) -> str:
    match task:
        case Foreign(why):
            return f"is out: {why}"
        case GiveUp(why):
            return f"is given up: {why}"
        case Wait(why):
            return f"waits: {why}"
        case Truncate(mark):
            return f"is cut above {mark}"
        case SetLowMark(mark):
            return f"begins the session at {mark}"
        case Copy(last_id, sources):
            return f"copies up to {last_id} from {' or '.join(sources)}"
        case Heal(segment, last_id, sources):
            return f"is healed from {segment} to {last_id} by {' or '.join(sources)}"
    return "is level"


def run(text: str) -> str:
    """The story with the states as they are."""
    story, paragraphs = Story(), []
    for paragraph in re.split(r"\n\n+", text.strip()):
        events = re.split(r"^----$", paragraph, maxsplit=1, flags=re.MULTILINE)[0]
        for line in events.splitlines():
            if not line.startswith("#"):
                story.tell(line)
        paragraphs.append(f"{events.rstrip()}\n----\n{story.state()}")
    return "\n".join(paragraphs)


def tell(name: str) -> None:
    path = FOLDER / f"{name}.txt"
    text = path.read_text(encoding="utf-8")
    found = run(text)
    if os.environ.get("REWRITE") == "1":
        path.write_text(found, encoding="utf-8")
        return
    assert found == text, "REWRITE=1 writes the states anew"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_a_story_ends_as_it_is_told(name: str) -> None:
    tell(name)
