"""What recovery decides in all small cases, and two tables. Its stories are told in `test_recovery_stories`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from uuid import UUID

import pytest

from waltzd.cluster.documents import Decision, Membership, PartitionMeta, ReplicaState, diverging
from waltzd.errors.operations import MetadataBehind
from waltzd.format.batch import End
from waltzd.format.finding import Code, Finding
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import majority, reached
from waltzd.server.core.recovery import Copy, Foreign, GiveUp, Heal, Level, Recovery, SetLowMark, Trim, Truncate, Wait

HOME = {name: UUID(int=number) for number, name in enumerate("ABCDE", 1)}


def meta(
    *, members: str = "ABC", joined: str = "ABC", low_mark: int = 4, session: int = 2, **more: object
) -> PartitionMeta:
    states = {name: ReplicaState(session=1, closing=None, incarnation=HOME[name]) for name in joined}
    return replace(
        PartitionMeta(generation=1, session=session, opened=1, low_mark=low_mark, members=tuple(members), replicas=states),
        **more,  # type: ignore[arg-type]
    )


def holds(name: str, last_id: int, *, session: int = 1, low_mark: int = 4, **more: object) -> ReplicaStatus:
    status = ReplicaStatus(
        partition=0,
        incarnation=HOME[name],
        promised_session=2,
        session=session,
        low_mark=low_mark,
        local_low_mark=min(low_mark, last_id),
        committed=min(low_mark, last_id),
        last_id=last_id,
        is_available=True,
        is_full=False,
        segments=1,
        findings=(),
    )
    return replace(status, **more)  # type: ignore[arg-type]


def empty(name: str, last_id: int = -1, **more: object) -> ReplicaStatus:
    """A new directory under this name."""
    new: dict[str, object] = {"incarnation": UUID(int=99), "session": 0, "low_mark": -1, **more}
    return replace(holds(name, last_id), **{"local_low_mark": -1, "committed": -1, **new})  # type: ignore[arg-type]


KINDS = ("0", "1", "2", "silent", "empty", "forgot", "old copy")
"""What may stand in a member's place; a number is what one holds that remembers everything."""


def status_of(name: str, kind: str) -> ReplicaStatus | None:
    match kind:
        case "silent":
            return None
        case "empty":
            return empty(name)
        case "forgot":
            return holds(name, 1, low_mark=-1, session=0)
        case "old copy":
            return holds(name, 1, low_mark=-1, incarnation=UUID(int=99))
    return holds(name, int(kind), low_mark=-1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4, 5])
def test_all_small_cases_are_decided_as_by_trying_everything_that_may_have_been_acknowledged(count: int) -> None:
    names, decisions = "ABCDE"[:count], 0
    for kinds in itertools.combinations_with_replacement(KINDS, count):
        core = Recovery(meta(members=names, joined=names, low_mark=-1), dict.fromkeys(names, Membership.MEMBER))
        for name, kind in zip(names, kinds, strict=True):
            status = status_of(name, kind)
            if status is None:
                core.silent(name)
            else:
                core.opened(name, status)
        is_done = False
        while not is_done and core.decide() is None:
            is_done = True
            for name in names:
                match core.next_for(name):
                    case Copy(last_id, _):
                        assert kinds[names.index(name)] in "012 empty", (kinds, name)
                        core.copied(name, last_id)
                        is_done = False
                    case Truncate():
                        raise AssertionError(f"{kinds}: {name} may be the last that holds what was acknowledged")
        known = [int(kind) for kind in kinds if kind.isdecimal()]
        top = max(known, default=0) + 1  # one more than anybody remembers
        worlds = itertools.product(*[(int(kind),) if kind.isdecimal() else range(-1, top + 1) for kind in kinds])
        acknowledged = max(reached(world, count) for world in worlds)
        is_bounded = acknowledged < top
        helpers = len(known) + (kinds.count("empty") if is_bounded else 0)
        decision = core.decide()
        if not is_bounded:
            assert decision is None, (kinds, "more may have been acknowledged")
        elif helpers >= majority(count):
            assert decision is not None, (kinds, core.waiting())
        if decision is not None:
            assert acknowledged <= decision <= max(known), kinds
            decisions += 1
    assert decisions > 10


@pytest.mark.parametrize(("last_id", "is_refused"), [(4, False), (5, True)])
def test_who_has_written_in_a_session_that_was_never_opened_proves_that_the_document_went_back(
    last_id: int, is_refused: bool
) -> None:
    """The closing mark of session 1 was saved by session 2, which a storage may have begun with that mark. More it can hold
    only when session 2 was opened, and the document does not say so."""
    before = replace(meta(decision=Decision(mark=4, session=2)), session=3)
    core = Recovery(before, dict.fromkeys("ABC", Membership.MEMBER), is_taken=False)
    core.asked("A", holds("A", last_id, session=2, low_mark=4, promised_session=2))
    assert isinstance(core.refusal, MetadataBehind) == is_refused
    core.is_taken = True
    core.opened("A", holds("A", last_id, session=2, low_mark=4, promised_session=3))
    assert isinstance(core.refusal, MetadataBehind) == is_refused


@pytest.mark.parametrize("decision", [None, Decision(mark=9, session=1)], ids=["undecided", "decided"])
@pytest.mark.parametrize(("promised", "is_refused"), [(1, False), (2, True), (7, True)])
def test_a_promise_that_was_made_before_ours_is_measured_by_what_was_known_then(
    decision: Decision | None, promised: int, is_refused: bool
) -> None:
    """The document knew session 1. Whoever has promised itself to session 2 did not hear of it from us."""
    core = Recovery(meta(decision=decision), dict.fromkeys("ABC", Membership.MEMBER), is_taken=False)
    core.asked("A", holds("A", 9, promised_session=promised))
    assert isinstance(core.refusal, MetadataBehind) == is_refused
    core.asked("B", None)
    core.is_taken = True
    core.opened("A", holds("A", 9, promised_session=2))
    assert isinstance(core.refusal, MetadataBehind) == is_refused


@pytest.mark.parametrize(
    ("status", "task"),
    [
        (holds("D", 9), SetLowMark(9)),
        (holds("D", 7), SetLowMark(9)),
        (holds("D", 12), Truncate(9)),
        (holds("D", 9, incarnation=HOME["E"]), Truncate(4)),
        (holds("D", 9, session=0), Truncate(4)),
    ],
    ids=["level", "behind", "above", "another directory", "it has not begun that session"],
)
def test_a_learner_of_our_own_session_holds_nothing_but_our_log(status: ReplicaStatus, task: object) -> None:
    """It is not cut, and what it holds is not copied again, while transactions wait for a planned new session."""
    roles = {**dict.fromkeys("ABC", Membership.MEMBER), "D": Membership.LEARNER}
    closed = meta(decision=Decision(mark=9, session=1))
    core = Recovery(closed, roles, ours=HOME)
    core.opened("D", status)
    assert core.next_for("D") == task
    assert core.trusted("D") <= 9, "others may copy from it"
    other = Recovery(closed, roles)
    other.opened("D", status)
    assert other.next_for("D") == Truncate(4), "another owner knows nothing of what it has copied"


# -- the same last id is not the same log ------------------------------------------------------------------------------


@pytest.mark.parametrize("are_batches", [True, False], ids=["format 1", "format 0"])
@pytest.mark.parametrize(
    "count", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.long)]
)
def test_whose_end_is_the_log_is_decided_as_by_counting_in_all_small_cases(count: int, are_batches: bool) -> None:
    """Each replica holds one of three ends, or lags, or is silent. Where those that hold one agree, it is the log; where
    they do not, the majority of all members is, or nobody knows."""
    names, opened, refused = "ABCDE"[:count], 0, 0
    for kinds in itertools.product(("x", "y", "z", "behind", "silent"), repeat=count):
        closed = meta(members=names, joined=names, decision=Decision(mark=9, session=1))
        core = Recovery(closed, dict.fromkeys(names, Membership.MEMBER))
        for name, kind in zip(names, kinds, strict=True):
            if kind == "silent":
                core.silent(name)
                continue
            end = {"end": End(crc=ord(kind[0]))} if are_batches else {"tail": kind}
            core.opened(name, holds(name, 5 if kind == "behind" else 9, session=2, low_mark=5, **end))
        ends = [kind for kind in kinds if kind in "xyz"]
        most = max(ends, key=ends.count, default=None)
        is_told = most is not None and (len(set(ends)) == 1 or ends.count(most) >= majority(count))
        for name, kind in zip(names, kinds, strict=True):
            task = core.next_for(name)
            if kind == "silent" or not is_told:
                assert type(task) is Wait, (kinds, name, task)
            elif kind == "behind":
                assert isinstance(task, Copy), (kinds, name, task)
                assert {kinds[names.index(source)] for source in task.sources} == {most}, "a forgery is copied"
            else:
                assert isinstance(task, Level if kind == most else Foreign), (kinds, name, task)
        level = ends.count(most) if is_told and most is not None else 0
        assert core.has_level_majority == (level >= majority(count)), kinds
        assert bool(core.contest) == (len(set(ends)) > 1 and not is_told), kinds
        opened += core.has_level_majority
        refused += bool(core.contest)
        core.check()
    assert opened
    assert refused or count == 1


def test_the_owner_that_wrote_the_log_needs_nobody_to_tell_what_it_ends_with() -> None:
    core = Recovery(
        meta(decision=Decision(mark=9, session=1)),
        dict.fromkeys("ABC", Membership.MEMBER),
        ours=HOME,
        end=End(crc=1, time=2),
    )
    for name, crc in zip("ABC", (3, 3, 1), strict=True):
        core.opened(name, holds(name, 9, session=2, low_mark=9, end=End(crc=crc, time=2, segment_bytes=7)))
    assert [type(core.next_for(name)) for name in "ABC"] == [Foreign, Foreign, Level]
    assert not core.has_level_majority


def test_a_copy_of_what_turned_out_not_to_be_the_log_is_out_as_well() -> None:
    core = Recovery(meta(members="ABCDE", joined="ABCDE", decision=Decision(mark=9, session=1)),
                    dict.fromkeys("ABCDE", Membership.MEMBER))  # fmt: skip
    core.opened("A", holds("A", 9, session=2, low_mark=9, end=End(crc=8)))
    core.opened("B", holds("B", 5, session=2, low_mark=9))
    assert core.next_for("B") == Copy(9, ("A",))
    core.copied("B", 9)
    assert isinstance(core.next_for("B"), Level)
    for name in "CDE":
        core.opened(name, holds(name, 9, session=2, low_mark=9, end=End(crc=7)))
    assert [type(core.next_for(name)) for name in "ABCDE"] == [Foreign, Foreign, Level, Level, Level]


def test_who_diverged_has_no_vote_and_gives_nothing() -> None:
    document = meta(joined="ABC", low_mark=4)
    out = diverging(document, "C", HOME["C"], 9)
    assert out is not None
    assert diverging(out, "C", HOME["C"], 9) is None
    core = Recovery(out, dict.fromkeys("ABC", Membership.MEMBER))
    core.opened("A", holds("A", 9))
    core.opened("C", holds("C", 20, committed=20))
    assert isinstance(core.next_for("C"), Foreign)
    assert core.decide() is None, "what it says is committed, and what it holds, is no reason"
    assert core.trusted("C") == -1
    core.opened("B", holds("B", 8))
    core.silent("A")
    assert core.decide() is None
    core.opened("A", holds("A", 9))
    assert core.next_for("B") == Copy(9, ("A",))


def test_a_session_opens_without_a_member_that_failed_and_waits_a_moment_for_one_that_may_still_answer() -> None:
    """It would count only from the next session on."""
    decided = meta(decision=Decision(mark=9, session=2))
    core = Recovery(decided, {**dict.fromkeys("ABC", Membership.MEMBER), "D": Membership.LEARNER})
    for name in "AB":
        core.opened(name, holds(name, 9, session=2, low_mark=9))
    assert core.has_level_majority
    assert core.next_save() is None
    core.silent("C")
    saved = core.next_save()
    assert saved is not None
    assert saved.opened == 2


@pytest.mark.parametrize(("floor", "believed"), [(5, 5), (6, 0)])
def test_a_trim_floor_is_believed_up_to_the_mark_at_which_the_session_began(floor: int, believed: int) -> None:
    """An owner sets none above that: a replica that says a higher one has it from nobody."""
    core = Recovery(meta(low_mark=4), dict.fromkeys("ABC", Membership.MEMBER))
    core.opened("A", holds("A", 9, floor=floor))
    core.opened("B", holds("B", 9))
    assert core.floor == believed


def test_a_damaged_member_that_holds_nothing_waits_while_others_are_silent() -> None:
    """Its damage begins at id 0, so every other member holds more than it, also those that have not answered."""
    found = Finding(code=Code.DAMAGED_RECORD, path="0/0.seg", detail="x", first_id=0, last_id=2)
    core = Recovery(meta(low_mark=-1), dict.fromkeys("ABC", Membership.MEMBER))
    core.opened("A", holds("A", -1, low_mark=-1, findings=(found,), damaged_segments=(0,)))
    core.silent("B")
    core.opened("C", holds("C", 4, low_mark=-1))
    assert isinstance(core.next_for("A"), Wait)


def test_a_damaged_member_is_healed_by_no_less_than_what_counts() -> None:
    """The record behind the damage may be the only one of a committed transaction."""
    core = Recovery(meta(opened=2, decision=None, low_mark=4), dict.fromkeys("ABC", Membership.MEMBER))
    found = Finding(code=Code.DAMAGED_RECORD, path="0/0.seg", detail="x", first_id=3, last_id=6)
    core.opened("A", holds("A", 6, session=2, findings=(found,), damaged_segments=(3,)))
    core.opened("B", holds("B", 5, session=2))
    core.silent("C")
    assert core.next_for("A") == Heal(3, 5, ("B",))
    core.progress("A").durable = core.progress("A").acknowledged = 6
    assert core.next_for("A") == GiveUp("it is damaged, and no other replica has the ids 6 to 6 yet")
    core.copied("B", 6)
    assert core.next_for("A") == Heal(3, 6, ("B",))


def test_a_replica_that_lost_only_what_is_not_in_the_log_is_cut() -> None:
    """It had ids up to 7, and the log was closed at 2: a file of its segment ends no later than what it holds."""
    core = Recovery(meta(opened=2, decision=None, low_mark=2), dict.fromkeys("ABC", Membership.MEMBER))
    short = Finding(code=Code.SHORT_LOG, path="0", detail="x", first_id=3, last_id=7)
    core.opened("A", holds("A", 2, low_mark=2, findings=(short,), damaged_segments=(0,)))
    core.opened("B", holds("B", 9, session=2, low_mark=2))
    core.silent("C")
    assert core.next_for("A") == Truncate(2)
    core.opened("A", holds("A", 1, low_mark=1, findings=(short,), damaged_segments=(0,)))
    assert core.next_for("A") == Heal(0, 2, ("B",)), "of the log it lacks something"


def test_what_stays_below_the_floor_is_trimmed_when_it_is_damaged() -> None:
    """It has the floor, and could not read the archive when it was told; no other replica has those ids any more."""
    core = Recovery(meta(opened=2, decision=None, low_mark=9), dict.fromkeys("ABC", Membership.MEMBER))
    found = Finding(code=Code.DAMAGED_RECORD, path="0/0.seg", detail="x", first_id=0, last_id=2)
    facts: dict[str, object] = {"session": 2, "low_mark": 9, "floor": 5}
    damaged = holds("A", 9, findings=(found,), damaged_segments=(0,), untrimmed="the archive is away", **facts)  # type: ignore[arg-type]
    core.opened("A", damaged)
    core.opened("B", holds("B", 9, **facts))  # type: ignore[arg-type]
    assert core.next_for("A") == Trim(5)
    core.trimmed("A", 5, damaged)
    assert isinstance(core.next_for("A"), GiveUp)
