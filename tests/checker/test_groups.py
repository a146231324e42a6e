"""The checker of consumer groups accepts what a sound one leaves, notices every kind of wrong, agrees with its twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checker.group_history import Changed, Delivered, GroupHistory, GroupWriter, Said, Standing, Written
from tests.checker.group_sample import SECOND, group_sample
from tests.checker.group_twin import judge_group_slowly
from tests.checker.group_verdict import EXPLAINED, judge_group
from tests.checker.history import BadHistory
from tests.tiers import in_turns
from waltzd.protocol.groups import AckResult, Mode
from waltzd.server.groups.delivery_tracker import DeliveryTracker, GroupSettings, KeyedOrder, LogOrder, QueueOrder
from waltzd.server.groups.state import GroupState


def story(mode: Mode = Mode.KEYED) -> GroupHistory:
    """Six transactions, of which the filter leaves one out. The owner dies after three; one fails twice and is parked."""
    history = GroupHistory(mode, room=2, deliver_max=2, headers=(1,), window=SECOND)
    keys = ["a", "b", "a", None, "a", "b"]
    history.log[0] = {id: Written(f"t{id}", 2 if id == 3 else 1, key) for id, key in enumerate(keys)}
    give(history, 10, "ann.1", 1, 1, 0)
    say(history, 11, "ann.1", 1, 1, 0, kept=True)
    give(history, 13, "bob.1", 1, 2, 1)
    say(history, 14, "bob.1", 1, 2, 1, "nack")
    give(history, 16, "ann.1", 1, 3, 2)
    say(history, 17, "ann.1", 1, 3, 2)
    give(history, 19, "bob.1", 1, 4, 1, attempt=2)
    give(history, 30, "ann.2", 2, 1, 2)
    say(history, 31, "ann.2", 2, 1, 2)
    give(history, 33, "bob.2", 2, 2, 1, attempt=2)
    say(history, 34, "bob.2", 2, 2, 1, "nack")
    give(history, 36, "ann.2", 2, 3, 4)
    say(history, 37, "ann.2", 2, 3, 4)
    give(history, 40, "bob.2", 2, 4, 5)
    say(history, 41, "bob.2", 2, 4, 5)
    history.standings[0] = Standing(5, parked={1: 2})
    return history


def give(
    history: GroupHistory, at: int, holder: str, epoch: int, tag: int, id: int, *, attempt: int = 1, name: str = ""
) -> Delivered:
    written = history.log[0].get(id, Written(f"t{id}"))
    one = Delivered(at, holder, 0, epoch, tag, id, attempt, name or written.name, written.header)
    history.delivered.append(one)
    return one


def say(
    history: GroupHistory,
    at: int,
    holder: str,
    epoch: int,
    tag: int,
    id: int,
    verb: str = "ack",
    *,
    kept: bool = False,
    answer: str = "taken",
) -> Said:
    """It is answered one nanosecond later."""
    one = Said(at, f"n{at}", holder, 0, epoch, tag, id, verb, epoch, answer, at + 1, kept)
    history.said.append(one)
    return one


def put(one: Delivered | Said | Standing, name: str, value: object) -> object:
    setattr(one, name, value)
    return one


def said(history: GroupHistory, at: int) -> Said:
    return next(one for one in history.said if one.at == at)


def change(
    history: GroupHistory, at: int, verb: str, *, epoch: int = 2, ids: tuple[int, ...] = (), up_to: int = -1
) -> object:
    history.changed.append(Changed(at, verb, 0, ids, up_to, at + 1, epoch))
    return history


def forget_parked(history: GroupHistory) -> object:
    history.standings[0].parked.clear()
    return history


def give_too_much(history: GroupHistory) -> None:
    history.room = 1
    one = give(history, 38, "ann.2", 2, 5, 6)
    history.log[0][6] = Written("t6", 1)
    one.header = 1
    history.standings[0].floor = 6
    said(history, 37).at = 45
    say(history, 39, "ann.2", 2, 5, 6)


def skip_and_fail_over(history: GroupHistory) -> None:
    change(history, 20, "skip", epoch=1, up_to=2)


def hear_for_long(history: GroupHistory) -> None:
    """The first owner lives on for two seconds after it heard of transaction 2."""
    for one in history.delivered:
        one.at += 5 * SECOND * (one.epoch == 2)
    for word in history.said:
        word.at += 5 * SECOND * (word.epoch == 2)
    say(history, 3 * SECOND, "bob.1", 1, 4, 1, "nack", answer="late")


MUTATIONS: dict[str, tuple[str, Callable[[GroupHistory], object]]] = {
    "nobody acknowledged the last": ("skipped", lambda h: h.said.pop()),
    "the only acknowledgement came too late": ("skipped", lambda h: put(said(h, 37), "answer", "late")),
    "what failed is not parked": ("skipped", forget_parked),
    "what was rejected is not parked": ("skipped", lambda h: put(said(h, 41), "verb", "reject")),
    "what was done before a reset is not done again": ("skipped", lambda h: change(h, 50, "reset", epoch=3)),
    "it was skipped before a reset": (
        "skipped",
        lambda h: [change(h, 49, "skip", up_to=5), change(h, 50, "reset", epoch=3)],
    ),
    "it is a lap behind": ("unfinished", lambda h: put(h.standings[0], "floor", 4)),
    "what its filter leaves out": ("not wanted", lambda h: give(h, 42, "ann.2", 2, 9, 3)),
    "what is not in the log": ("not wanted", lambda h: give(h, 42, "ann.2", 2, 9, 17)),
    "another payload": ("not wanted", lambda h: give(h, 42, "ann.2", 2, 9, 5, name="t4")),
    "what lies before its beginning": ("not wanted", lambda h: h.starts.update({0: 0})),
    "what lies before a reset": ("not wanted", lambda h: change(h, 29, "reset", up_to=2)),
    "it was done in this epoch": ("settled and given out", lambda h: give(h, 42, "bob.2", 2, 9, 4)),
    "it was rejected in this epoch": (
        "settled and given out",
        lambda h: [put(said(h, 37), "verb", "reject"), give(h, 42, "bob.2", 2, 9, 4)],
    ),
    "it was done on disks": ("kept and given out", lambda h: give(h, 42, "bob.2", 2, 9, 0)),
    "it was done on disks, and is parked": ("kept and given out", lambda h: h.standings[0].parked.update({0: 2})),
    "the second of its acknowledgements was kept": (
        "kept and given out",
        lambda h: [say(h, 18, "ann.1", 1, 3, 2, kept=True, answer="done")],
    ),
    "it was done long before its owner died": ("forgotten", hear_for_long),
    "the second of a key while the first is in a member's hands": ("order", lambda h: put(h.delivered[2], "at", 9)),
    "the second of a key that fails before the first": (
        "order",
        lambda h: [put(h.delivered[4], "at", 37), put(said(h, 31), "at", 38)],
    ),
    "a try too many": ("attempts", lambda h: put(h.delivered[5], "attempt", 3)),
    "a failure that was not counted": ("count lost", lambda h: put(h.delivered[3], "attempt", 1)),
    "a failure that was on disks and was not counted": (
        "count lost",
        lambda h: [put(said(h, 14), "is_kept", True), put(h.delivered[5], "attempt", 1)],
    ),
    "more than it has room for": ("room", give_too_much),
    "an acknowledgement of the epoch before": ("old epoch", lambda h: put(said(h, 37), "stands_in", 3)),
    "an owner that was replaced writes": ("old epoch", lambda h: say(h, 35, "ann.1", 1, 3, 2, kept=True)),
    "it was given up at its first failure": ("parked early", lambda h: h.standings[0].parked.update({1: 1})),
    "it was skipped, and the next owner does not know": ("skipped and given out", skip_and_fail_over),
    "it was to be done again": ("replay lost", lambda h: [forget_parked(h), change(h, 50, "replay", ids=(1,))]),
}


def test_the_story_is_sound() -> None:
    assert judge_group(story()).findings == ()
    assert judge_group_slowly(story()) == set()


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_kind_of_wrong_is_noticed(name: str) -> None:
    kind, mutate = MUTATIONS[name]
    history = story()
    mutate(history)
    verdict = judge_group(history)
    assert kind in {finding.kind for finding in verdict.findings}, str(verdict)
    assert EXPLAINED[kind] in str(verdict)
    assert set(verdict.findings) == judge_group_slowly(history)


def test_every_kind_has_a_mutation() -> None:
    assert {kind for kind, _ in MUTATIONS.values()} == set(EXPLAINED)


EXCUSES: dict[str, Callable[[GroupHistory], object]] = {
    "nobody knows what came of the acknowledgement": lambda h: put(said(h, 37), "answer", ""),
    "an operator left it": lambda h: [forget_parked(h), change(h, 50, "discard", ids=(1,))],
    "an operator skipped it": lambda h: [h.said.pop(), change(h, 50, "skip", up_to=5)],
    "the log has lost it": lambda h: [forget_parked(h), h.firsts.update({0: 2})],
    "the group has stopped in front of it": lambda h: [
        h.said.pop(),
        put(h.standings[0], "stopped", "id 5: it failed"),
        put(h.standings[0], "floor", 4),
    ],
    "an operator had all done again from there": lambda h: [
        change(h, 50, "reset", epoch=3, up_to=4),
        give(h, 51, "ann.3", 3, 1, 5),
        say(h, 52, "ann.3", 3, 1, 5, kept=True),
    ],
    "it was in doubt when its owner died": lambda h: put(said(h, 11), "is_kept", False),
}


@pytest.mark.parametrize("name", EXCUSES)
def test_what_may_be_is_not_found_wrong(name: str) -> None:
    history = story()
    EXCUSES[name](history)
    assert judge_group(history).findings == (), str(judge_group(history))


def test_an_ordered_group_that_was_removed_may_have_parked_what_nobody_answered() -> None:
    """Everything behind what is parked is given out again, and nobody can ask any more what was parked."""
    history = GroupHistory(Mode.ORDERED, log={0: {id: Written(f"t{id}") for id in range(2)}})
    give(history, 1, "ann.1", 1, 1, 0)
    give(history, 2, "ann.1", 1, 2, 1)
    say(history, 3, "ann.1", 1, 2, 1)
    give(history, 9, "bob.1", 1, 7, 1)
    history.standings[0] = Standing(-1, "it was removed", is_removed=True)
    assert judge_group(history).is_sound
    assert judge_group_slowly(history) == set()
    say(history, 4, "ann.1", 1, 1, 0)
    found = judge_group(history).findings
    assert [one.kind for one in found] == ["settled and given out"], "nothing in front of it was left open"
    assert set(found) == judge_group_slowly(history)


@pytest.mark.parametrize("mode", list(Mode))
def test_sound_histories_are_sound(mode: Mode) -> None:
    for seed in range(40):
        history = group_sample(seed, 40, mode=mode)
        verdict = judge_group(history)
        assert verdict.is_sound, f"seed {seed}: {verdict}"
        assert judge_group_slowly(history) == set()


@st.composite
def damaged(draw: st.DrawFn) -> GroupHistory:
    """A small sound history in which one to three things were changed at random: some of them harmless."""
    history = group_sample(draw(st.integers(0, 1 << 30)), draw(st.integers(2, 9)), partitions=draw(st.integers(1, 2)))
    small, times = st.integers(0, 6), st.integers(0, 10 * SECOND)
    for _ in range(draw(st.integers(1, 3))):
        given, words = history.delivered, history.said
        match draw(st.integers(0, 13)):
            case 0 if given:
                given.remove(draw(st.sampled_from(given)))
            case 1 if words:
                words.remove(draw(st.sampled_from(words)))
            case 2 if given:
                draw(st.sampled_from(given)).tag = draw(small)
            case 3 if given:
                draw(st.sampled_from(given)).at = draw(times)
            case 4 if given:
                draw(st.sampled_from(given)).id = draw(small)
            case 5 if given:
                draw(st.sampled_from(given)).attempt = draw(st.integers(1, 5))
            case 6 if words:
                one = draw(st.sampled_from(words))
                one.answer, one.is_kept = draw(st.sampled_from(["taken", "done", "late", "old", ""])), False
            case 7 if words:
                one = draw(st.sampled_from(words))
                one.is_kept = one.answer in ("taken", "done")
            case 8 if words:
                draw(st.sampled_from(words)).verb = draw(st.sampled_from(["ack", "nack", "reject"]))
            case 9 if words:
                one = draw(st.sampled_from(words))
                one.epoch, one.stands_in = draw(st.integers(1, 4)), draw(st.integers(1, 4))
            case 10:
                parked = history.standings[0].parked
                parked[draw(small)] = draw(st.integers(1, 4))
            case 11:
                verb, epoch = draw(st.sampled_from(["replay", "discard", "skip"])), draw(st.integers(0, 3))
                ids = (draw(small),) if verb != "skip" else ()
                history.changed.append(
                    Changed(draw(times), verb, 0, ids, draw(small) if verb == "skip" else -1, None, epoch)
                )
            case 12 if not any(one.verb == "reset" for one in history.changed):
                history.changed.append(Changed(draw(times), "reset", 0, (), draw(small), None, draw(st.integers(0, 3))))
            case _:
                standing = history.standings[0]
                standing.is_removed = draw(st.booleans())
                standing.floor, standing.stopped = draw(small), draw(st.sampled_from(["", "it failed"]))
    return history


@settings(max_examples=150, deadline=None)
@given(damaged())
def test_the_checker_agrees_with_its_twin(history: GroupHistory) -> None:
    assert set(judge_group(history).findings) == judge_group_slowly(history)


def test_large_histories_take_no_more_than_a_few_passes() -> None:
    verdict = judge_group(group_sample(7, 3000, mode=Mode.KEYED))
    assert verdict.is_sound
    assert verdict.counts["transactions"] > 1500


# -- mistakes in the decisions themselves --------------------------------------------------------------------------------


def forgets_the_first(patch: pytest.MonkeyPatch) -> None:
    """A new owner finds the floor behind something that nobody has acknowledged."""
    right = GroupState.of

    def of(snapshot: bytes) -> GroupState:
        state = right(snapshot)
        if state.open.first is not None:
            state.open.put(state.open.first, state.open.first, None)
        return state

    patch.setattr(GroupState, "of", of)


def begins_behind_what_is_open(patch: pytest.MonkeyPatch) -> None:
    right = DeliveryTracker.__init__

    def init(self: DeliveryTracker, settings: GroupSettings, state: GroupState) -> None:
        right(self, settings, state)
        self.cursor = state.reach

    patch.setattr(DeliveryTracker, "__init__", init)


def keeps_no_failures(patch: pytest.MonkeyPatch) -> None:
    right = GroupState.of

    def of(snapshot: bytes) -> GroupState:
        state = right(snapshot)
        for first, last, _ in list(state.open):
            state.open.put(first, last, 0)
        return state

    patch.setattr(GroupState, "of", of)


def takes_any_epoch(patch: pytest.MonkeyPatch) -> None:
    right = DeliveryTracker._match

    def heard(self: DeliveryTracker, name: str, epoch: int, tag: int, first: int, last: int) -> tuple[list[int], AckResult]:
        return right(self, name, self.state.epoch, 1 << 40, first, last)

    patch.setattr(DeliveryTracker, "_match", heard)


def forgets_what_was_done(patch: pytest.MonkeyPatch) -> None:
    """A change of owner finds it open again, however long ago it was done."""
    patch.setattr(GroupState, "settle", lambda self, first, last: None)


def never_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupState, "fail", lambda self, id: 1)


def parks_at_once(patch: pytest.MonkeyPatch) -> None:
    right = DeliveryTracker._fail

    def fail(self: DeliveryTracker, id: int, reason: str, now: float, delay: float | None = None) -> None:
        if self.state.open.get(id) == 0 and self.settings.deliver_max > 1:
            self.state.fail(id)
            self._give_up(id, reason, now)
        else:
            right(self, id, reason, now, delay)

    patch.setattr(DeliveryTracker, "_fail", fail)


def keys_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyedOrder, "add", lambda self, id, key: self._heads.add(id, None))


def what_is_behind_stays_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogOrder, "back", QueueOrder.back)
    patch.setattr(LogOrder, "add", lambda self, id, key: QueueOrder.add(self, id, key))
    for name in ("__init__", "take", "done", "wake", "waiting", "_entry"):
        patch.setattr(LogOrder, name, getattr(QueueOrder, name) if name != "waiting" else QueueOrder.waiting, raising=False)


def gives_one_member_all(patch: pytest.MonkeyPatch) -> None:
    right = DeliveryTracker.join

    def join(self: DeliveryTracker, name: str, room: int | None = None) -> None:
        right(self, name, room)
        self._members[name].room = 10

    patch.setattr(DeliveryTracker, "join", join)


def replays_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeliveryTracker, "replay", DeliveryTracker.discard)


MISTAKES: dict[str, tuple[Mode, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "floor past an unacknowledged id": (Mode.QUEUE, "skipped", forgets_the_first),
    "hang after a change of owner": (Mode.QUEUE, "unfinished", begins_behind_what_is_open),
    "count lost at a change of owner": (Mode.QUEUE, "count lost", keeps_no_failures),
    "acknowledgement of an old epoch accepted": (Mode.QUEUE, "old epoch", takes_any_epoch),
    "acknowledgement forgotten": (Mode.QUEUE, "forgotten", forgets_what_was_done),
    "poison for ever": (Mode.QUEUE, "count lost", never_counts),
    "parked at its first failure": (Mode.QUEUE, "parked early", parks_at_once),
    "the second of a key before the first": (Mode.KEYED, "order", keys_do_not_wait),
    "an ordered group that is a queue": (Mode.ORDERED, "order", what_is_behind_stays_out),
    "more than a member may have": (Mode.QUEUE, "room", gives_one_member_all),
    "a replay that leaves it": (Mode.QUEUE, "replay lost", replays_nothing),
}


@pytest.mark.parametrize("name", in_turns(MISTAKES, of=2))
def test_a_mistake_of_the_decisions_is_seen_from_outside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, kind, make = MISTAKES[name]
    make(monkeypatch)
    kinds = {finding.kind for seed in range(20) for finding in judge_group(group_sample(seed, 30, mode=mode)).findings}
    assert kind in kinds, kinds


# -- files -------------------------------------------------------------------------------------------------------------


def write(history: GroupHistory, path: Path) -> None:
    writer = GroupWriter(path)
    for one in history.delivered:
        writer.delivered(one)
    for word in history.said:
        writer.said(word)
        if word.answer:
            writer.answered(word)
        if word.is_kept:
            writer.kept(word)
    for change in history.changed:
        writer.changed(change)
    writer.close()


def test_what_could_not_be_written_while_the_group_log_was_away_is_not_forgotten() -> None:
    history = story()
    hear_for_long(history)
    assert "forgotten" in {finding.kind for finding in judge_group(history).findings}
    history.outages = [(0, 2 * SECOND), (2 * SECOND, 100 * SECOND)]
    assert judge_group(history).is_sound
    assert judge_group_slowly(history) == set()


def test_a_history_survives_its_files(tmp_path: Path) -> None:
    history = story()
    change(history, 50, "replay", ids=(1,))
    write(history, tmp_path / "all.jsonl")
    read = GroupHistory(history.mode)
    read.load([tmp_path / "all.jsonl"])
    assert (read.delivered, read.said, read.changed) == (history.delivered, history.said, history.changed)


def test_a_member_that_was_killed_leaves_half_a_line(tmp_path: Path) -> None:
    write(story(), tmp_path / "all.jsonl")
    with (tmp_path / "all.jsonl").open("a") as file:
        file.write('{"type":"answered","number":"n3')
    read = GroupHistory(Mode.QUEUE)
    read.load([tmp_path / "all.jsonl"])
    assert len(read.said) == len(story().said)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"type":"answered","number":"n","at":1,"answer":"taken"}\n', "an answer to what nobody said"),
        ('{"type":"song"}\n', "no such type of line: song"),
        ("nonsense\n", "line 1"),
    ],
)
def test_what_is_no_evidence_is_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(BadHistory, match=message):
        GroupHistory(Mode.QUEUE).load([tmp_path / "x.jsonl"])
