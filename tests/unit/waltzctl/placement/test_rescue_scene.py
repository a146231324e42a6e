"""What the copies at hand prove, and that an owner opens there: every document of a rescue is given to a real recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from uuid import UUID

import pytest

from waltzctl.placement.proof import JUMP_MAX, Proven, Scene, Statement, from_storages
from waltzd.cluster.documents import LEASE_MS_MAX, Decision, Membership, PartitionMeta, ReplicaState
from waltzd.errors.operations import MetadataBehind
from waltzd.format.finding import Code, Finding
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.document import decode, encode
from waltzd.protocol.quorum import EMPTY, EVERYTHING
from waltzd.protocol.timelines import Lineage
from waltzd.server.core.recovery import Copy, Foreign, Fork, Heal, Level, Recovery, SetLowMark, Truncate, Wait

HOME = {name: UUID(int=number) for number, name in enumerate("ABCD", 1)}
DAMAGE = Finding(code=Code.DAMAGED_RECORD, path="0/0.seg", detail="x")
MEMBERS = dict.fromkeys("ABC", Membership.MEMBER)
STRIDE = 7
"""All small cases take half a minute; this many of them are left out between two."""


def holds(
    name: str, last_id: int, *, session: int = 2, low_mark: int = 4, promised: int = 3, **more: object
) -> ReplicaStatus:
    status = ReplicaStatus(
        partition=0, incarnation=HOME[name], promised_session=promised, session=session, low_mark=low_mark,
        local_low_mark=min(low_mark, last_id), committed=min(low_mark, last_id), last_id=last_id, is_available=True,
        is_full=False, segments=1, findings=(),
    )  # fmt: skip
    return replace(status, **more)  # type: ignore[arg-type]


def empty(name: str) -> ReplicaStatus:
    return holds(name, EMPTY, session=-1, low_mark=EMPTY)


def written(*, session: int = 3, opened: int = 2, joined: str = "ABC", **more: object) -> PartitionMeta:
    states = {name: ReplicaState(session=opened, closing=None, incarnation=HOME[name]) for name in joined}
    meta = PartitionMeta(generation=1, session=session, opened=opened, low_mark=4, members=("A", "B", "C"), replicas=states)
    return replace(meta, **more)  # type: ignore[arg-type]


def scene(
    meta: PartitionMeta | None, *statuses: ReplicaStatus, blank: str = "", roles: Mapping[str, Membership] = MEMBERS
) -> Scene:
    named = {name: status for status in statuses for name, home in HOME.items() if home == status.incarnation}
    return Scene(partition=0, generation=4, roles=roles, meta=meta, statuses=named, blank=frozenset(blank))


def opened(found: Scene, statuses: Mapping[str, ReplicaStatus]) -> Recovery:
    """What the next owner makes of the document and of these storages, which refuse what storages refuse."""
    document = found.forked(identity=UUID(int=1000 + found.lineage.number), cause="partition rescue", began="now", who="me")
    assert decode(PartitionMeta, encode(document), "/partitions/0") == document
    return driven(document, found.roles_after, statuses, found.blank)


def driven(
    document: PartitionMeta, roles: Mapping[str, Membership], statuses: Mapping[str, ReplicaStatus], blank: frozenset[str]
) -> Recovery:
    core = Recovery(replace(document, session=document.session + 1), roles)
    core.patience_left = False
    there = dict(statuses)
    for name in core.names:
        if name in there:
            core.opened(name, there[name])
        elif name in blank:
            core.opened(name, there.setdefault(name, replace(empty(name), incarnation=UUID(int=99 + ord(name)))))
        else:
            core.silent(name)
    for _ in range(40):
        assert core.refusal is None, core.refusal
        wanted = core.next_save()
        if wanted is not None:
            core.saved(wanted)
            continue
        if core.step == "OPEN":
            break
        for name, status in list(there.items()):
            if name in core.names:
                there[name] = done(core, name, status, there)
    return core


def opened_document(found: Scene) -> PartitionMeta:
    return found.forked(identity=UUID(int=1001), cause="partition rescue", began="now", who="me")


def done(core: Recovery, name: str, status: ReplicaStatus, there: Mapping[str, ReplicaStatus]) -> ReplicaStatus:
    match core.next_for(name):
        case Fork(lineage):
            shared = lineage.shared_to(status.timeline)
            assert shared is not None
            fork = min([shared, *(first_id - 1 for first_id in status.damaged_segments)])
            low_mark, local = min(status.low_mark, fork), min(status.local_low_mark, fork)
            status = replace(
                status, last_id=min(fork, status.last_id), low_mark=low_mark, local_low_mark=local, findings=(),
                committed=min(status.committed, fork), timelines=lineage.later, damaged_segments=(),
            )  # fmt: skip
        case Truncate(mark):
            assert mark >= max(status.low_mark, status.committed) or mark >= status.last_id, "a storage refuses that"
            status = replace(status, last_id=min(mark, status.last_id), findings=(), damaged_segments=())
        case SetLowMark(mark):
            assert status.last_id <= max(mark, status.committed), "a storage refuses that"
            status = replace(status, session=core.session, low_mark=mark, local_low_mark=status.last_id)
        case Copy(last_id, sources):
            assert all(core.held(source) >= last_id and there[source].is_sound for source in sources)
            core.copied(name, last_id)
            return replace(status, last_id=max(last_id, status.last_id))
        case Heal(_, last_id, _):
            status = replace(status, last_id=max(last_id, status.last_id), findings=(), damaged_segments=())
        case Wait() | Level():
            return status
    core.changed(name, status)
    return status


def saved_at(found: Scene) -> int:
    core = opened(found, found.statuses)
    assert core.step == "OPEN", core.waiting()
    assert core.mark == found.mark
    fork = core.meta.timelines[-1]
    assert (fork.fork, fork.session, fork.parent) == (found.mark, found.session, found.lineage.number)
    assert core.meta.given_up == found.document.given_up
    return found.mark


def test_two_of_three_disks_are_dead() -> None:
    found = scene(written(), holds("A", 9))
    assert found.by_itself == ""
    assert saved_at(found) == 9
    assert found.roles_after == {"A": Membership.MEMBER, "B": Membership.LEARNER, "C": Membership.LEARNER}
    assert found.given_up == "all ids committed above 9 that only B, C may hold"
    assert found.steps[0] == "A holds ids up to 9, session 2, committed 4: proven up to 9"


def test_two_new_disks_keep_their_places() -> None:
    found = scene(written(), holds("A", 9), blank="BC")
    assert saved_at(found) == 9
    assert found.roles_after == MEMBERS
    assert found.given_up == "all ids above 9 that B, C acknowledged and lost"


def test_lost_disks_may_have_held_more_than_is_known_to_be_committed() -> None:
    found = scene(written(low_mark=12), holds("A", 9), blank="BC")
    assert found.given_up == "ids 10 to 12, which are known to be committed, and all ids committed above"
    decided = scene(written(low_mark=12, decision=Decision(mark=12, session=3)), holds("A", 9), blank="BC")
    assert decided.given_up == "ids 10 to 12, which are known to be committed"


def test_a_replica_that_was_trimmed_above_the_fork_holds_nothing_of_the_log() -> None:
    """Else the log would end where no replica can be level, and a saved decision would hide that from the next rescue."""
    lineage = Lineage().forked(identity=UUID(int=7), fork=5, session=3, cause="partition rescue", began="now", who="me")
    found = scene(written(session=4, timelines=lineage.later), holds("A", 20, low_mark=12, floor=10), blank="BC")
    assert found.proven("A") == found.mark == EMPTY
    assert found.refusal == "no storage that answers is proven to hold a single transaction of partition 0"
    decided = scene(
        written(session=4, timelines=lineage.later, decision=Decision(mark=5, session=4)),
        holds("A", 20, low_mark=12, floor=10), blank="BC",
    )  # fmt: skip
    assert decided.by_itself == "", "no replica that answers holds what was decided"


def test_the_longest_copy_counts_and_what_a_later_session_cut_does_not() -> None:
    cut = holds("A", 20, session=1, low_mark=2)
    assert saved_at(scene(written(), cut, holds("B", 7))) == 7
    alone = scene(written(), cut)
    assert saved_at(alone) == 2, "a record of session 1 above its committed mark may be one that session 2 cut"
    state = ReplicaState(session=1, closing=4, incarnation=HOME["A"])
    recorded = scene(written(joined="BC", replicas={**written(joined="BC").replicas, "A": state}), cut)
    assert saved_at(recorded) == 4, "the document says where session 1 was closed"


def test_one_that_began_the_newest_session_and_is_still_copying_does_not_hide_the_others() -> None:
    copying = holds("A", 5, low_mark=20)
    settled = holds("B", 25, session=1, low_mark=3, committed=18)
    found = scene(written(), copying, settled)
    assert saved_at(found) == 18
    assert found.given_up == "ids 19 to 20, which are known to be committed, and all ids committed above"


def test_without_a_document_what_storages_say_makes_a_new_one() -> None:
    for meta in (None, PartitionMeta(generation=4, session=1)):
        found = scene(meta, holds("A", 9), holds("B", 8), holds("C", 9))
        assert found.is_behind
        assert saved_at(found) == 9
        assert found.document.session > 1000
        assert found.document.generation == 4


def test_documents_that_went_back_in_time() -> None:
    found = scene(written(session=2), holds("A", 30, session=9, low_mark=20, promised=12), holds("B", 9), holds("C", 9))
    assert found.is_behind
    assert found.by_itself == ""
    assert saved_at(found) == 30
    assert found.document.session > 12
    only_promised = scene(written(session=3), holds("A", 9, promised=5), holds("B", 9, promised=5), holds("C", 9))
    assert only_promised.is_behind
    assert saved_at(only_promised) == 9


def test_a_session_that_nobody_can_have_meant_is_not_stepped_over() -> None:
    bricked = [holds(name, 9, promised=(1 << 63) - 1) for name in "AB"]
    found = scene(written(), *bricked, holds("C", 8))
    assert found.is_behind
    assert saved_at(found) == 9, "what stands on the replicas that cannot be opened any more is not lost"
    assert 3 < found.document.session < JUMP_MAX


def test_a_saved_decision_that_no_copy_at_hand_holds() -> None:
    decided = written(decision=Decision(mark=12, session=3))
    found = scene(decided, holds("A", 9))
    assert saved_at(found) == 9
    assert found.given_up.startswith("ids 10 to 12, which are known to be committed")
    assert saved_at(scene(decided, holds("A", 15))) == 12, "what the decision cut stays cut"


def test_a_saved_decision_that_only_a_storage_without_a_place_holds() -> None:
    decided = written(decision=Decision(mark=9, session=3))
    found = scene(decided, holds("D", 9), blank="ABC")
    assert found.by_itself == "", "no owner asks D"
    assert saved_at(found) == 9
    assert scene(decided, holds("A", 9), blank="BC").by_itself


def test_what_a_rescue_gave_up_never_comes_back_by_itself() -> None:
    found = scene(written(), holds("A", 9))
    core = opened(found, found.statuses)
    back = replace(holds("B", 15), committed=14)
    core.opened("B", back)
    assert core.next_for("B") == Fork(core.meta.lineage), "what it holds above the fork is set aside first"
    assert core.trusted("B") == EMPTY
    later = Recovery(replace(core.meta, session=core.session + 1), found.roles_after)
    later.opened("A", holds("A", 11, session=core.session, low_mark=9, timelines=core.meta.timelines))
    later.opened("B", back)
    assert later.decide() == 11, "what B knows to be committed is no mark of this log"
    again = scene(core.meta, back)
    assert again.mark == 9, "a second rescue takes it up to the fork, and nothing above"
    assert saved_at(again) == 9
    assert again.given_up != "nothing known"
    gone_over = done(core, "B", back, {})
    assert (gone_over.last_id, gone_over.certain, gone_over.timeline) == (9, 9, core.meta.lineage.current)
    assert core.next_for("B") == SetLowMark(9)


def test_a_copy_that_made_documents_gave_up_proves_nothing() -> None:
    """Documents made from storages alone begin no timeline: only `given_up` says that an absent copy lost its place."""
    begun = [holds(name, 9, session=3, promised=3) for name in "AB"]
    statement = Statement(partition=0, statuses=dict(zip("AB", begun, strict=True)), blank=frozenset(), silent={})
    made = from_storages(statement, replicas=3, generation=4)
    assert isinstance(made, Proven)
    assert made.meta is not None
    assert made.meta.timelines == ()
    core = driven(made.meta, made.roles, statement.statuses, frozenset())
    assert (core.step, core.mark) == ("OPEN", 9)
    owned = replace(core.meta, session=core.session, opened=core.session, decision=None)
    reused = holds("A", 11, session=core.session, low_mark=9, promised=core.session)
    removed = holds("D", 15, session=2, committed=14)
    found = scene(owned, reused, removed)
    assert (found.proven("D"), found.committed, found.usable) == (EMPTY, 9, frozenset("A"))
    assert saved_at(found) == 11, "D knows that other transactions were committed under ids 10 to 14"
    assert scene(owned, removed).refusal != "", "alone it is no log to continue"


def test_a_replica_of_another_timeline_is_no_evidence_no_source_and_no_vote() -> None:
    found = scene(written(), holds("A", 9))
    core = opened(found, found.statuses)
    stranger = holds("B", 15, timelines=Lineage().forked(
        identity=UUID(int=77), fork=3, session=2, cause="", began="", who="").later)  # fmt: skip
    stranger = replace(stranger, session=50, incarnation=UUID(int=78))
    core.opened("B", stranger)
    assert core.refusal is None, "a storage that somebody added stops nobody else"
    assert isinstance(core.next_for("B"), Foreign)
    assert core.trusted("B") == EMPTY
    assert scene(core.meta, replace(stranger, incarnation=HOME["B"])).mark == EMPTY


def test_a_document_that_went_back_before_a_fork_is_refused() -> None:
    found = scene(written(), holds("A", 9))
    forked = opened(found, found.statuses).meta
    old = written(session=forked.session + 1, opened=forked.session)
    core = Recovery(replace(old, session=old.session + 1), MEMBERS)
    for name in "ABC":
        core.opened(name, holds(name, 9, session=forked.session, timelines=forked.timelines))
    assert isinstance(core.refusal, MetadataBehind)
    assert core.decide() is None


@pytest.mark.parametrize(("before", "after"), [(0, 0), (150, 150)])
def test_a_rescue_keeps_the_lease_of_the_owner_before(before: int, after: int) -> None:
    assert opened_document(scene(written(lease_ms=before), holds("A", 9))).lease_ms == after
    assert opened_document(scene(None, holds("A", 9))).lease_ms == LEASE_MS_MAX


def test_damage_above_what_is_certain_is_cut_and_below_it_nothing_is_proven() -> None:
    torn = replace(holds("A", 9), findings=(DAMAGE,), damaged_segments=(7,))
    assert saved_at(scene(written(), torn)) == 6
    rotten = replace(holds("A", 9), findings=(DAMAGE,), damaged_segments=(3,))
    found = scene(written(), rotten)
    assert (found.mark, found.refusal) == (EMPTY, "no storage that answers is proven to hold a single transaction of "
                                                  "partition 0")  # fmt: skip
    assert saved_at(scene(written(), rotten, holds("B", 8))) == 8


def test_a_copy_is_proven_up_to_where_its_session_was_closed() -> None:
    assert saved_at(scene(written(decision=Decision(mark=5, session=3)), holds("A", 9))) == 5
    closed = ReplicaState(session=1, closing=7, incarnation=HOME["A"])
    meta = written(joined="BC")
    older = holds("A", 9, session=1, low_mark=2, committed=3)
    assert scene(replace(meta, replicas={**meta.replicas, "A": closed}), older).proven("A") == 7
    assert scene(meta, older).proven("A") == 3


def trusting_whatever_is_held(_: Scene, status: ReplicaStatus) -> int:
    return status.last_id


def newest_session_only(self: Scene) -> int:
    return max((self.proven(name) for name, one in self.statuses.items() if one.session == self.begun), default=EMPTY)


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "story"),
    [
        (Recovery, "_is_of_older_timeline", lambda *_: False, test_what_a_rescue_gave_up_never_comes_back_by_itself),
        (Scene, "shared", lambda *_: EVERYTHING, test_what_a_rescue_gave_up_never_comes_back_by_itself),
        (
            Lineage,
            "__contains__",
            lambda *_: True,
            test_a_replica_of_another_timeline_is_no_evidence_no_source_and_no_vote,
        ),
        (Scene, "_lineage", trusting_whatever_is_held, test_the_longest_copy_counts_and_what_a_later_session_cut_does_not),
        (
            Scene,
            "mark",
            property(newest_session_only),
            test_one_that_began_the_newest_session_and_is_still_copying_does_not_hide_the_others,
        ),
    ],
)
def test_a_rule_that_is_missing_is_noticed(
    owner: type, name: str, wrong: object, story: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        story()


@pytest.mark.parametrize(
    ("meta", "statuses", "why"),
    [
        (written(), "ABC", "A, B, C of A, B, C answer and decide it"),
        (written(), "AB", "A, B of A, B, C answer and decide it"),
        (written(joined="AB"), "AC", "A, C of A, B, C answer and decide it"),
        (written(decision=Decision(mark=9, session=3)), "AB", "the closing mark of session 2 is decided"),
        (PartitionMeta(generation=1, session=1), "", ""),
    ],
)
def test_what_an_owner_decides_is_left_to_it(meta: PartitionMeta, statuses: str, why: str) -> None:
    found = scene(meta, *(holds(name, 9, session=2 if name in meta.joined or meta.decision else 1) for name in statuses))
    assert found.by_itself.startswith(why)
    assert bool(found.by_itself) == bool(why)


def test_a_replica_elsewhere_is_a_copy_too() -> None:
    found = scene(written(), holds("D", 9))
    assert saved_at(found) == 9
    assert found.roles_after == {
        "A": Membership.LEARNER,
        "B": Membership.LEARNER,
        "C": Membership.LEARNER,
        "D": Membership.MEMBER,
    }


def small_replicas(name: str) -> Iterator[ReplicaStatus | None]:
    yield None
    yield empty(name)
    for session, low_mark, last_id, committed in ((1, 2, 5, 2), (1, 2, 3, 3), (2, 4, 3, 3), (2, 4, 4, 4), (2, 4, 7, 5)):
        found = holds(name, last_id, session=session, low_mark=low_mark, committed=committed)
        yield found
        if last_id > 4:
            yield replace(found, findings=(DAMAGE,), damaged_segments=(last_id,))
            yield replace(found, incarnation=UUID(int=50 + ord(name)))


def small_documents() -> Iterator[PartitionMeta | None]:
    yield None
    closed = ReplicaState(session=1, closing=4, incarnation=HOME["C"])
    for joined, decision in product(("ABC", "AB"), (None, Decision(mark=5, session=3))):
        meta = written(joined=joined, decision=decision)
        yield meta if "C" in joined else replace(meta, replicas={**meta.replicas, "C": closed})
    yield replace(written(), opened=1, session=1, low_mark=2)


@pytest.mark.slow
def test_an_owner_opens_at_the_mark_of_every_small_rescue_and_never_below_what_it_would_have_decided() -> None:
    cases = less = alone = 0
    for meta in small_documents():
        for found in islice(product(*(list(small_replicas(name)) for name in "ABC")), 3, None, STRIDE):
            statuses = {name: status for name, status in zip("ABC", found, strict=True) if status is not None}
            if not any(status.is_sound for status in statuses.values()):
                continue
            seen = Scene(partition=0, generation=1, roles=MEMBERS, meta=meta, statuses=statuses)
            cases += 1
            assert saved_at(seen) == seen.mark
            if meta is None:
                continue
            core = Recovery(meta, MEMBERS)
            for name, status in statuses.items():
                core.opened(name, status)
            mark = core.decide()
            if mark is not None and core.meta.decision is None:
                less += mark < seen.mark
                assert mark <= seen.mark or all(core.trusted(name) < mark for name in statuses), "nobody holds that"
            if seen.by_itself:
                alone += 1
                assert driven(meta, MEMBERS, statuses, frozenset()).step == "OPEN", (meta, statuses)
    assert cases > 700
    assert alone > 140
    assert less > 15, "what was not acknowledged by a majority, and is at hand, is kept"


def test_a_decision_below_what_a_storage_knows_to_be_committed_is_for_a_rescue() -> None:
    """Owners refuse such a document (W2021), so a rescue must not say that they open by themselves."""
    closed = written(session=2, opened=1, decision=Decision(mark=5, session=2))
    found = scene(closed, *[holds(name, 12, low_mark=5, committed=11) for name in "ABC"])
    assert found.is_behind
    assert (found.by_itself, found.mark) == ("", 12)
    assert saved_at(found) == 12
