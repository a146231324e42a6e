"""The decisions of a recovery, told as stories. Members are A, B, C; session 1 is closed by session 2."""

from __future__ import annotations

import itertools
from dataclasses import replace
from uuid import UUID

import pytest

from waltzd.errors import MetadataBehind, MetadataMissing
from waltzd.finding import Code, Finding
from waltzd.meta import Decision, PartitionMeta, ReplicaState, Role
from waltzd.quorum import majority, reached
from waltzd.replica import ReplicaStatus
from waltzd.server.changes import acknowledging, joining, losing
from waltzd.server.recovery import Recovery
from waltzd.server.task import Copy, Heal, Level, SetLowMark, Truncate, Wait

HOME = {name: UUID(int=number) for number, name in enumerate("ABCDE", 1)}
DAMAGE = Finding(code=Code.DAMAGED_RECORD, path="0/0.seg", detail="x")


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


def recovery(found: PartitionMeta | None = None, *, roles: str = "ABC", **answers: int | None) -> Recovery:
    """Each answer is the last id that a replica holds; None for one that is silent."""
    core = Recovery(found or meta(), dict.fromkeys(roles, Role.MEMBER))
    core.patience_left = False
    for name, last_id in answers.items():
        if last_id is None:
            core.silent(name, "no answer")
        else:
            core.opened(name, holds(name, last_id))
    return core


def test_all_answer_what_one_alone_holds_was_never_acknowledged() -> None:
    core = recovery(A=10, B=9, C=9)
    assert core.decide() == 9
    wanted = core.next_save()
    assert wanted is not None
    assert wanted.decision == Decision(mark=9, session=2)
    assert core.step == "RECORDING"
    assert isinstance(core.next_for("A"), Wait), "nothing is cut before the decision is saved"
    core.saved(wanted)
    assert core.next_for("A") == Truncate(9)
    core.changed("A", holds("A", 9))
    assert core.next_for("A") == SetLowMark(9)
    core.changed("A", holds("A", 9, session=2, low_mark=9))
    assert core.next_for("A") == Level()
    assert core.step == "SETTLING"
    core.changed("B", holds("B", 9, session=2, low_mark=9))
    assert core.step == "ADMITTING"
    opened = core.next_save()
    assert opened is not None
    assert (opened.opened, opened.low_mark, opened.members, opened.joined) == (2, 9, ("A", "B", "C"), ("A", "B"))
    assert opened.replicas["C"] == ReplicaState(session=1, closing=9, incarnation=HOME["C"])
    assert opened.decision is None


def test_b_is_silent_if_it_holds_ten_so_does_a_majority() -> None:
    core = recovery(A=10, B=None, C=9)
    assert core.decide() is None
    assert "undecided; B do not answer" in core.waiting()
    assert core.next_for("C") == Copy(10, ("A",)), "once C holds it too, B changes nothing"
    assert isinstance(core.next_for("A"), Wait)
    core.copied("C", 10)
    assert core.decide() == 10


def test_b_comes_back_and_decides() -> None:
    core = recovery(A=10, B=None, C=9)
    core.opened("B", holds("B", 10))
    assert core.decide() == 10


def empty(name: str, last_id: int = -1, **more: object) -> ReplicaStatus:
    """A new directory under this name."""
    new: dict[str, object] = {"incarnation": UUID(int=99), "session": 0, "low_mark": -1, **more}
    return replace(holds(name, last_id), **{"local_low_mark": -1, "committed": -1, **new})  # type: ignore[arg-type]


def test_an_empty_disk_helps_to_decide_by_a_copy_when_another_of_four_is_silent() -> None:
    """Whatever C and D held, no three hold more than A does."""
    found = meta(members="ABCD", joined="ABCD")
    core = recovery(found, roles="ABCD", A=10, B=9, D=None)
    assert core.next_for("B") == Wait("not every member was asked yet")
    core.opened("C", empty("C"))
    assert core.decide() is None
    assert (core.next_for("B"), core.next_for("C")) == (Copy(10, ("A",)), Copy(10, ("A",)))
    core.copied("B", 10)
    assert core.decide() is None, "two of four are no majority"
    core.copied("C", 10)
    assert core.decide() == 10
    wanted = core.next_save()
    assert wanted is not None
    assert wanted.replicas["C"] == ReplicaState(session=0, closing=10, incarnation=UUID(int=99))
    core.saved(wanted)
    for name, incarnation in (("A", HOME["A"]), ("B", HOME["B"]), ("C", UUID(int=99))):
        assert core.next_for(name) == SetLowMark(10)
        core.changed(name, holds(name, 10, session=2, low_mark=10, incarnation=incarnation))
    opened = core.next_save()
    assert opened is not None
    assert (opened.low_mark, opened.joined) == (10, ("A", "B", "C"))

    again = recovery(replace(found, session=3), roles="ABCD", A=10, B=10, D=None)
    again.opened("C", empty("C", 7))
    assert again.next_for("C") == Truncate(-1), "another owner does not know what it copied"


def test_an_empty_disk_whose_copy_ended_early_may_have_held_anything() -> None:
    core = recovery(meta(members="ABCD", joined="ABCD"), roles="ABCD", A=10, B=7, D=None)
    core.opened("C", empty("C"))
    core.copied("C", 7)
    assert core.decide() is None, "A, C and D may have acknowledged 10"


@pytest.mark.parametrize(
    ("members", "status", "others"),
    [
        ("ABC", empty("C"), {"A": 10, "B": None}),
        ("ABCD", empty("C"), {"A": 10, "B": None, "D": None}),
        ("ABCD", empty("C", incarnation=HOME["C"]), {"A": 10, "B": 9, "D": None}),
        ("ABCD", empty("C", 8, session=1), {"A": 10, "B": 9, "D": None}),
    ],
    ids=["two may have held more", "three may", "it lost its control struct", "an old copy"],
)
def test_one_that_forgot_is_not_touched_while_it_may_be_needed(
    members: str, status: ReplicaStatus, others: dict[str, int | None]
) -> None:
    core = recovery(meta(members=members, joined=members), roles=members, **others)
    core.opened("C", status)
    assert core.decide() is None
    assert core.next_for("C") == Wait("it has forgotten what it acknowledged, and has no vote")


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


@pytest.mark.parametrize("count", [3, 4, 5])
def test_all_small_cases_are_decided_as_by_trying_everything_that_may_have_been_acknowledged(count: int) -> None:
    names, decisions = "ABCDE"[:count], 0
    for kinds in itertools.combinations_with_replacement(KINDS, count):
        core = Recovery(meta(members=names, joined=names, low_mark=-1), dict.fromkeys(names, Role.MEMBER))
        for name, kind in zip(names, kinds, strict=True):
            status = status_of(name, kind)
            if status is None:
                core.silent(name, "no answer")
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


def test_one_alone_decides_nothing() -> None:
    core = recovery(A=10, B=None, C=None)
    assert core.decide() is None
    assert isinstance(core.next_for("A"), Wait)


def test_one_that_missed_the_session_has_no_say_in_it_and_can_help_by_copying() -> None:
    """B was down while session 1 was open: it holds what was closed at 7 before, and a tail that nobody wanted."""
    found = meta(joined="AC", low_mark=7)
    found = replace(found, replicas={**found.replicas, "B": ReplicaState(session=0, closing=7, incarnation=HOME["B"])})
    core = recovery(found, A=10, C=None)
    core.opened("B", holds("B", 9, session=0, low_mark=2))
    assert core.decide() is None
    assert core.next_for("B") == Truncate(7)
    core.changed("B", holds("B", 7, session=0, low_mark=2))
    assert core.next_for("B") == Copy(10, ("A",))
    core.copied("B", 10)
    assert core.decide() == 10


@pytest.mark.parametrize(
    "forgotten",
    [
        {"incarnation": UUID(int=99)},
        {"session": 0},
        {"local_low_mark": 8},
        {"committed": 8},
        {"findings": (DAMAGE,)},
    ],
    ids=lambda what: next(iter(what)),
)
def test_one_that_forgot_may_have_held_anything(forgotten: dict[str, object]) -> None:
    """waltz-original 5.8: B comes back empty, C lags, A is away. What A and B had committed must not be given up."""
    core = recovery(A=None, C=6)
    core.opened("B", replace(holds("B", 5), **forgotten))  # type: ignore[arg-type]
    assert core.decide() is None
    assert isinstance(core.next_for("B"), Wait)
    core.opened("A", holds("A", 12))
    assert core.decide() is None, "11 and 12 may have been committed by A and B"
    assert core.next_for("C") == Copy(12, ("A",))
    core.copied("C", 12)
    assert core.decide() == 12


def test_a_member_that_joined_and_holds_less_than_its_low_mark_has_forgotten() -> None:
    """B and C had acknowledged 12. C had begun at 5 with the mark 8, and holds 6 now, with no sign of damage."""
    core = recovery(meta(low_mark=8))
    core.opened("A", holds("A", 8, low_mark=8))
    core.opened("B", holds("B", 12, low_mark=8))
    core.opened("C", holds("C", 6, low_mark=8, local_low_mark=5, committed=5))
    assert core.decide() is None, f"decided at {core.decide()}: 9 to 12 are given up"
    assert core.next_for("A") == Copy(12, ("B",))


def test_what_the_owner_itself_saw_acknowledged_is_remembered() -> None:
    core = recovery(acknowledging(meta(), {"B": 11}))
    core.opened("B", holds("B", 6))
    assert not core.is_faithful("B")


def test_a_saved_decision_is_never_made_again() -> None:
    """The owner before decided on 9 and died. Now B, which held 12, answers too: 9 it is, and 12 is cut."""
    core = recovery(meta(session=3, decision=Decision(mark=9, session=2)), A=9, B=12, C=None)
    assert core.decide() == 9
    assert core.next_for("B") == Truncate(9)


def test_known_committed_is_a_lower_bound() -> None:
    core = recovery(A=None, C=None)
    core.opened("B", holds("B", 8, committed=8))
    assert core.decide() is None
    core.opened("C", holds("C", 6))
    assert core.decide() == 8, "A alone can hold more; that would be no majority"


def test_the_vote_belongs_to_the_members_of_the_session_that_is_closed() -> None:
    """A and B are no longer assigned, C and D are; C and D alone know nothing of what A and B had committed."""
    core = recovery(roles="CD", A=None, B=None, C=6)
    core.opened("D", holds("D", -1, session=-1, low_mark=-1))
    assert core.decide() is None
    core.opened("A", holds("A", 9))
    assert core.decide() is None
    core.opened("B", holds("B", 9))
    assert core.decide() == 9
    wanted = core.next_save()
    assert wanted is not None
    core.saved(wanted)
    for name in "CD":
        core.changed(name, holds(name, core.held(name), session=2, low_mark=9))
        task = core.next_for(name)
        assert isinstance(task, Copy)
        assert (task.last_id, task.sources[:2]) == (9, ("A", "B"))
        core.copied(name, 9)
    opened = core.next_save()
    assert opened is not None
    assert (opened.members, opened.joined) == (("C", "D"), ("C", "D"))


def test_a_learner_that_is_level_becomes_a_member_and_another_stays_one() -> None:
    found = meta(decision=Decision(mark=9, session=2))
    core = Recovery(found, {**dict.fromkeys("ABC", Role.MEMBER), "D": Role.LEARNER})
    core.patience_left = False
    for name in "AB":
        core.opened(name, holds(name, 9, session=2, low_mark=9))
    opened = core.next_save()
    assert opened is not None
    assert opened.members == ("A", "B", "C")
    core.opened("D", holds("D", 9, session=2, low_mark=9))
    opened = core.next_save()
    assert opened is not None
    assert opened.members == ("A", "B", "C", "D")


def test_the_damaged_is_healed_and_does_not_count_before() -> None:
    core = recovery(meta(decision=Decision(mark=9, session=2)), A=9, B=9)
    core.opened("C", holds("C", 9, findings=(DAMAGE,), damaged_segments=(0, 5)))
    assert core.next_for("C") == Heal(0, 9, ("A", "B"))
    core.changed("C", holds("C", 9, findings=(DAMAGE,), damaged_segments=(12,)))
    assert core.next_for("C") == Truncate(9), "nobody holds what was there, and nobody needs it"
    core.changed("C", holds("C", 9))
    assert core.next_for("C") == SetLowMark(9)


def torn(name: str, last_id: int, first: int, last: int, **more: object) -> ReplicaStatus:
    """The ids from `first` to `last` are damaged, and sound records stand behind them."""
    return holds(name, last_id, findings=(replace(DAMAGE, first_id=first, last_id=last),), damaged_segments=(5,), **more)  # type: ignore[arg-type]


def test_one_whose_last_write_was_torn_is_mended_by_who_has_all_of_it_and_then_votes() -> None:
    """The power went while C wrote 7 to 9, and B's disk is lost: nobody knows whether C had acknowledged them, but A has
    the very same records."""
    core = recovery(A=10, B=None)
    core.opened("C", torn("C", 9, 7, 8))
    assert core.decide() is None
    assert core.next_for("C") == Heal(5, 9, ("A",))
    core.changed("C", holds("C", 9))
    assert core.next_for("C") == Copy(10, ("A",))
    core.copied("C", 10)
    assert core.decide() == 10


def test_one_whose_last_write_was_torn_held_no_more_than_its_end() -> None:
    core = recovery(A=8, B=7)
    core.opened("C", torn("C", 20, 6, 6))
    assert core.decide() is None, "C may have acknowledged 8"
    assert core.next_for("B") == Copy(8, ("A",))
    core.copied("B", 8)
    assert core.decide() == 8, "above that C was alone, if it ever acknowledged anything"


@pytest.mark.parametrize(
    "status",
    [
        torn("C", 20, 7, 8),
        torn("C", 9, 7, 8, incarnation=HOME["D"]),
        torn("C", 9, 7, 9),
        holds("C", 9, findings=(DAMAGE,), damaged_segments=(5,)),
        holds("C", 9, findings=(replace(DAMAGE, code=Code.SEGMENT_GAP, first_id=5, last_id=6),), damaged_segments=(5,)),
    ],
    ids=["longer than all others", "another one", "its end is damaged", "who knows what", "a file is missing"],
)
def test_damage_that_may_hide_what_nobody_else_has_is_not_mended_before_it_is_decided(status: ReplicaStatus) -> None:
    core = recovery(A=10, B=None)
    core.opened("C", status)
    assert core.decide() is None
    task = core.next_for("C")
    assert isinstance(task, Wait)
    assert "has no vote" in task.why


def test_a_damaged_one_that_missed_the_session_is_cut_or_mended_and_can_help_by_copying() -> None:
    """C never joined session 1, so nothing that it holds above its closing mark of the one before matters."""
    found = meta(joined="AB", low_mark=7)
    found = replace(found, replicas={**found.replicas, "C": ReplicaState(session=0, closing=7, incarnation=HOME["C"])})
    core = recovery(found, A=10, B=None)
    core.opened("C", torn("C", 12, 9, 9, session=0, low_mark=2))
    core.changed("C", replace(torn("C", 12, 9, 9, session=0, low_mark=2), damaged_segments=(9,)))
    assert core.next_for("C") == Truncate(7)
    core.changed("C", torn("C", 12, 6, 6, session=0, low_mark=2))
    assert core.next_for("C") == Heal(5, 7, ("A",))
    core.changed("C", holds("C", 7, session=0, low_mark=2))
    assert core.next_for("C") == Copy(10, ("A",))
    core.copied("C", 10)
    assert core.decide() == 10


def test_nobody_gives_more_than_is_certainly_the_log() -> None:
    """D never joined session 1: above 7 it holds what another session wrote, until that is cut."""
    found = meta(joined="AB", members="ABD", decision=Decision(mark=10, session=2))
    found = replace(found, replicas={**found.replicas, "D": ReplicaState(session=0, closing=7, incarnation=HOME["D"])})
    core = recovery(found, roles="ABCD", A=None, B=None)
    core.opened("D", holds("D", 14, session=0, low_mark=2))
    core.opened("C", holds("C", -1, session=2, low_mark=10))
    assert core.next_for("C") == Copy(7, ("D",))
    core.changed("C", holds("C", 9, session=2, low_mark=4, findings=(DAMAGE,), damaged_segments=(0,)))
    assert core.next_for("C") == Heal(0, 7, ("D",))
    assert core.give("C", -1, 12) == (7, ("D",)), "an open session asks in the same way"
    core.opened("A", holds("A", 10))
    core.changed("C", holds("C", -1, session=2, low_mark=10))
    assert core.next_for("C") == Copy(10, ("A",))


def test_a_copy_that_decided_is_still_trusted_by_the_next_session() -> None:
    """A alone joined session 1 and answers; C never joined, copies from A, and so 9 is decided. Then the owner is replaced,
    and A comes back with an empty disk: what C copied is all that is left."""
    core = recovery(meta(joined="AB"), A=9, B=None)
    core.opened("C", holds("C", 3, session=0, low_mark=3))
    assert core.next_for("C") == Copy(9, ("A",))
    core.copied("C", 9)
    saved = core.next_save()
    assert saved is not None
    assert saved.decision == Decision(mark=9, session=2)
    assert saved.joined == ("A", "B")
    after = Recovery(replace(saved, session=3), dict.fromkeys("ABC", Role.MEMBER))
    after.opened("A", holds("A", -1, session=0, low_mark=-1, incarnation=HOME["D"]))
    after.opened("C", holds("C", 9, session=0, low_mark=3))
    assert after.next_for("C") == SetLowMark(9)
    assert after.sources("A", -1) == ("C",)


def test_what_a_replica_knows_to_be_committed_is_never_cut_though_it_forgot_that_it_had_begun() -> None:
    """C lost the control struct of the open session 2, which had begun at 4 and told it that 7 is committed."""
    core = recovery(meta(opened=2, low_mark=4))
    for name in "AB":
        core.opened(name, holds(name, 9, session=2))
    core.opened("C", holds("C", 9, committed=7))
    assert core.next_for("C") == Truncate(7)
    core.changed("C", holds("C", 7, committed=7))
    assert core.next_for("C") == SetLowMark(4)
    core.changed("C", holds("C", 9, committed=7, findings=(DAMAGE,), damaged_segments=(5,)))
    assert core.next_for("C") == Heal(5, 7, ("A", "B"))
    core.changed("C", holds("C", 9, committed=7, findings=(DAMAGE,), damaged_segments=(8,)))
    assert core.next_for("C") == Truncate(7)


def test_one_that_forgot_that_it_had_begun_is_not_touched_before_its_vote_is_taken_away() -> None:
    """C joined the open session 2, acknowledged up to 9 in it, and lost the struct that says so. Cut back to where the
    session began, and begun again, it would look as if it had never acknowledged anything."""
    found = meta(session=2, opened=2, low_mark=4)
    joined = {name: ReplicaState(session=2, closing=None, incarnation=HOME[name]) for name in "ABC"}
    core = recovery(replace(found, replicas=joined))
    core.opened("C", holds("C", 9, session=1))
    assert isinstance(core.next_for("C"), Wait)
    wanted = losing(core.meta, "C", 9)
    assert wanted is not None
    core.saved(wanted)
    assert core.next_for("C") == Truncate(4)
    after = Recovery(replace(wanted, session=3), dict.fromkeys("ABC", Role.MEMBER))
    after.opened("C", holds("C", 4, session=2, low_mark=4))
    after.opened("B", holds("B", 9, session=2, low_mark=4))
    after.silent("A", "no answer")
    assert after.decide() is None, "A and C may have committed more than B ever got"


def test_a_first_session_asks_everybody() -> None:
    fresh = PartitionMeta(generation=1, session=1)
    core = recovery(fresh)
    for name in "AB":
        core.opened(name, holds(name, -1, session=-1, low_mark=-1))
    assert core.decide() is None
    core.opened("C", holds("C", -1, session=-1, low_mark=-1))
    assert core.decide() == -1


def test_no_metadata_and_a_storage_that_holds_something_is_for_an_operator() -> None:
    core = recovery(PartitionMeta(generation=1, session=1))
    for name in "AB":
        core.opened(name, holds(name, -1, session=-1, low_mark=-1))
    core.opened("C", holds("C", 100))
    assert isinstance(core.refusal, MetadataMissing)
    assert core.decide() is None
    assert core.next_save() is None
    assert all(isinstance(core.next_for(name), Wait) for name in "ABC")


def test_metadata_that_went_back_in_time_is_for_an_operator() -> None:
    core = recovery(A=9, B=9)
    core.opened("C", holds("C", 50, session=5, low_mark=40))
    assert isinstance(core.refusal, MetadataBehind)
    assert core.next_save() is None


def test_a_session_is_taken_when_those_were_asked_whom_any_later_one_would_have_opened() -> None:
    """A majority of the members of the last session: nobody closes that without them. When it was closed already, a
    majority of those who shall be members."""
    core = Recovery(meta(), dict.fromkeys("CDE", Role.MEMBER), is_taken=False)
    for name in "ADE":
        core.asked(name, holds(name, 9, promised_session=1))
        assert not core.has_asked_enough
    assert "C do not answer" in core.waiting()
    core.asked("B", None)
    assert core.has_asked_enough
    core = Recovery(meta(decision=Decision(mark=9, session=1)), dict.fromkeys("CDE", Role.MEMBER), is_taken=False)
    for name in "ABC":
        core.asked(name, holds(name, 9, promised_session=1))
        assert not core.has_asked_enough
    core.silent("C", "no answer")
    core.asked("D", holds("D", 9, promised_session=1))
    assert not core.has_asked_enough
    core.asked("E", holds("E", 9, promised_session=1))
    assert core.has_asked_enough


@pytest.mark.parametrize("decision", [None, Decision(mark=9, session=1)], ids=["undecided", "decided"])
@pytest.mark.parametrize(("promised", "is_refused"), [(1, False), (2, True), (7, True)])
def test_a_promise_that_was_made_before_ours_is_measured_by_what_was_known_then(
    decision: Decision | None, promised: int, is_refused: bool
) -> None:
    """The document knew session 1. Whoever has promised itself to session 2 did not hear of it from us."""
    core = Recovery(meta(decision=decision), dict.fromkeys("ABC", Role.MEMBER), is_taken=False)
    core.asked("A", holds("A", 9, promised_session=promised))
    assert isinstance(core.refusal, MetadataBehind) == is_refused
    core.asked("B", None)
    core.is_taken = True
    core.opened("A", holds("A", 9, promised_session=2))
    assert isinstance(core.refusal, MetadataBehind) == is_refused


def test_a_session_that_was_begun_and_is_in_no_document_is_for_an_operator() -> None:
    """The document has a decision, which nobody saved after session 2 was taken; and C has begun that."""
    core = Recovery(
        meta(session=2, decision=Decision(mark=9, session=1)), dict.fromkeys("ABC", Role.MEMBER), is_taken=False
    )
    core.asked("C", holds("C", 50, session=2, low_mark=40, promised_session=1))
    assert isinstance(core.refusal, MetadataBehind)


def test_only_we_begin_our_session_and_not_before_the_decision_is_saved() -> None:
    core = recovery(A=9, B=9)
    core.opened("C", holds("C", 50, session=2, low_mark=40))
    assert isinstance(core.refusal, MetadataBehind)
    core = recovery(meta(decision=Decision(mark=9, session=2)), A=9)
    core.changed("A", holds("A", 9, session=2, low_mark=9))
    assert core.refusal is None


def test_one_that_comes_late_joins_when_that_is_saved_and_not_twice() -> None:
    found = meta(opened=2, low_mark=9, joined="")
    states = {name: ReplicaState(session=2, closing=None, incarnation=HOME[name]) for name in "AB"}
    core = recovery(replace(found, replicas=states), A=None, B=None)
    core.opened("C", holds("C", 9))
    assert joining(core.meta, "C", core.status("C"), 9) is None, "it has not begun the session"
    core.changed("C", holds("C", 9, session=2, low_mark=9))
    wanted = joining(core.meta, "C", core.status("C"), 9)
    assert wanted is not None
    core.saved(wanted)
    assert core.meta.joined == ("A", "B", "C")
    assert joining(core.meta, "C", core.status("C"), 9) is None


def test_one_that_forgot_in_this_session_counts_again_when_it_holds_all_that_it_had_acknowledged() -> None:
    states = {name: ReplicaState(session=2, closing=None, incarnation=HOME[name]) for name in "ABC"}
    core = recovery(meta(opened=2, low_mark=9, replicas=states), A=None)
    core.opened("C", holds("C", 9, session=2, low_mark=9))
    wanted = losing(core.meta, "C", 12)
    assert wanted is not None
    core.saved(wanted)
    assert core.meta.replicas["C"].is_lost
    assert losing(core.meta, "C", 12) is None
    assert joining(core.meta, "C", core.status("C"), 11) is None
    assert not core.is_faithful("C")
    after = Recovery(replace(wanted, session=3), dict.fromkeys("ABC", Role.MEMBER))
    after.opened("C", holds("C", 12, session=2, low_mark=9))
    assert after.is_faithful("C"), "it was copied to, and nobody had the time to save that it counts again"
    core.opened("C", holds("C", 12, session=2, low_mark=9, incarnation=HOME["D"]))
    wanted = joining(core.meta, "C", core.status("C"), 12)
    assert wanted is not None, "another directory, which holds all the same"
    assert wanted.replicas["C"] == ReplicaState(session=2, closing=None, incarnation=HOME["D"], acknowledged=12)


def test_a_replica_that_holds_less_than_is_written_down_has_forgotten() -> None:
    """An old copy was put back in place of C, below the file system: nothing of it says so. B lags, A is away."""
    core = recovery(acknowledging(meta(), {"A": 12, "C": 12}), A=None, B=6, C=6)
    assert core.decide() is None
    core.opened("A", holds("A", 12))
    assert core.decide() is None
    assert core.next_for("B") == Copy(12, ("A",))
    core.copied("B", 12)
    assert core.decide() == 12


def test_what_is_cut_by_a_decision_is_not_forgotten() -> None:
    """A had acknowledged 12 alone. It is cut to 9 and trusted up to there by this owner, and by the next one."""
    core = recovery(acknowledging(meta(decision=Decision(mark=9, session=2)), {"A": 12}), A=12, B=9)
    assert core.next_for("A") == Truncate(9)
    core.changed("A", holds("A", 9))
    assert core.next_for("A") == SetLowMark(9)
    after = recovery(replace(core.meta, session=3), A=9, B=None)
    assert after.trusted("A") == 9
    for name in "BC":
        core.opened(name, holds(name, 9, session=2, low_mark=9))
    opened = core.next_save()
    assert opened is not None
    assert opened.replicas["A"] == ReplicaState(session=1, closing=9, incarnation=HOME["A"], acknowledged=9)
    assert opened.replicas["B"].acknowledged == 9


def test_what_a_member_holds_that_never_joined_is_no_vote_even_where_it_would_decide() -> None:
    """B holds a tail of an earlier session that nobody wanted. C is silent, and whatever it holds, A alone held no more."""
    found = meta(joined="AC", low_mark=7)
    found = replace(found, replicas={**found.replicas, "B": ReplicaState(session=0, closing=7, incarnation=HOME["B"])})
    core = recovery(found, A=7, C=None)
    core.opened("B", holds("B", 9, session=0, low_mark=2))
    assert core.decide() == 7


def test_what_stands_above_the_trust_is_cut_although_the_mark_is_higher() -> None:
    """The ids 8 and 9 of B are of an earlier session; those of the log are others."""
    found = meta(joined="AC", low_mark=7, decision=Decision(mark=9, session=2))
    found = replace(found, replicas={**found.replicas, "B": ReplicaState(session=0, closing=7, incarnation=HOME["B"])})
    core = recovery(found, A=9, C=9)
    core.opened("B", holds("B", 9, session=0, low_mark=2))
    assert core.next_for("B") == Truncate(7)


def test_a_storage_that_holds_anything_of_a_partition_that_was_never_opened_is_for_an_operator() -> None:
    core = Recovery(PartitionMeta(generation=1, session=2), dict.fromkeys("ABC", Role.MEMBER))
    for name in "BC":
        core.opened(name, holds(name, -1, session=-1, low_mark=-1))
    core.opened("A", holds("A", 5, session=-1, low_mark=-1))
    assert isinstance(core.refusal, MetadataMissing)
    assert core.decide() is None


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
    roles = {**dict.fromkeys("ABC", Role.MEMBER), "D": Role.LEARNER}
    closed = meta(decision=Decision(mark=9, session=1))
    core = Recovery(closed, roles, ours=HOME)
    core.opened("D", status)
    assert core.next_for("D") == task
    assert core.trusted("D") <= 9, "others may copy from it"
    other = Recovery(closed, roles)
    other.opened("D", status)
    assert other.next_for("D") == Truncate(4), "another owner knows nothing of what it has copied"
