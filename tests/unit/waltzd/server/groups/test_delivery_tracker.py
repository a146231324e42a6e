"""A group at work, beside its twin: each transaction is done at least once, nothing is skipped, and orders are kept."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from tests.unit.group_twin import Kept, Twin
from waltzd.protocol.groups import AckResult, Exhausted, Mode
from waltzd.server.groups.delivery_tracker import AHEAD_MAX, Delivery, DeliveryTracker, GroupSettings
from waltzd.server.groups.state import PARKED_MAX, GroupState, Parked

STEPS = 150


class Story:
    """Owners that come and go, members that work, hang and die, operators, and what was written down of all that."""

    def __init__(self, seed: int, mode: Mode) -> None:
        self.chance = chance = random.Random(seed)
        self.settings = GroupSettings(
            mode=mode,
            ack_wait=chance.choice([3.0, 10.0]),
            max_in_flight=chance.choice([1, 2, 5]),
            deliver_max=chance.choice([1, 2, 4]),
            back_off=chance.choice([(), (1.0,), (1.0, 4.0)]),
            exhausted=chance.choice([Exhausted.PARK, Exhausted.PARK, Exhausted.STOP]),
        )
        self.keys = [chance.choice([None, 1, 2, 3]) for _ in range(60)]
        self.wanted = [chance.random() < 0.9 for _ in self.keys]
        self.now = 0.0
        self.twin = Twin(self.settings)
        self.tracker = DeliveryTracker(self.settings, GroupState())
        self.written = [self.tracker.state.snapshot()]
        self.kept = Kept()
        self.names = 0
        self.done_in_epoch: set[int] = set()
        self.out: dict[str, list[Delivery]] = {}

    # -- what happens

    def offer(self, most: int) -> None:
        for id in self.tracker.again:
            self._offer(id)
        while most > 0 and self.tracker.room and self.tracker.upcoming < len(self.keys):
            self._offer(self.tracker.upcoming)
            most -= 1

    def _offer(self, id: int) -> None:
        self.tracker.offer(id, self.keys[id], is_wanted=self.wanted[id])
        self.twin.offered(id, self.keys[id], is_wanted=self.wanted[id])

    def join(self) -> None:
        self.names += 1
        name, room = f"m{self.names}", self.chance.choice([None, 1, 3])
        tells = self.chance.random() < 0.6
        self.tracker.join(name, room, tells_begun=tells)
        self.twin.telling |= {name} if tells else set()
        self.twin.members[name] = min(room or self.settings.max_in_flight, self.settings.max_in_flight)
        self.out[name] = []

    def leave(self) -> None:
        if not self.twin.members:
            return
        name, is_lost = self.chance.choice(list(self.twin.members)), self.chance.random() < 0.6
        held = [id for id in self.twin.held() if self.twin.items[id].member == name]
        if self.twin.is_ordered:
            held = held[:1]
        failed = [id for id in held if is_lost and self.twin.items[id].has_begun]
        assert self.tracker.leave(name, self.now, is_lost=is_lost) == len(failed)
        for id in failed:
            self.twin.failed(id, self.now)
        for id in [id for id in self.twin.held() if self.twin.items[id].member == name]:
            if id in self.twin.held():
                self.twin.returned(id, self.now)
        del self.twin.members[name], self.out[name]

    def deliver(self) -> None:
        for one in self.tracker.deliver(self.now):
            assert one.id not in self.done_in_epoch, f"{one} was acknowledged before"
            self.twin.delivered(one, self.now)
            self.out[one.member].append(one)
        assert not (self.twin.with_room() and self.twin.eligible(self.now)), "a member has room, and gets nothing"
        wake = self.tracker.wake()
        if self.twin.with_room() and not self.twin.kept.is_stopped:
            later = [item.not_before for id, item in self.twin.items.items() if self._is_next(id)]
            assert wake is not None or not later, "nobody would look again"
        assert wake is not None or not self.twin.held(), "what hangs would hang for ever"

    def _is_next(self, id: int) -> bool:
        return self.twin.items[id].member is None and id in self.twin.eligible(float("inf"))

    def speak(self, name: str) -> None:
        """A member says something of what it was given, now or long ago; or of what it never was."""
        chance, epoch = self.chance, self.tracker.state.epoch
        said = chance.choice(self.out[name]) if self.out[name] and chance.random() < 0.95 else None
        first = chance.randrange(len(self.keys)) if said is None else said.id
        last = min(len(self.keys) - 1, first + chance.choice([0, 0, 0, 1, 4]))
        tag = 0 if said is None else said.tag + chance.choice([0, 0, 0, 3])
        items = self.twin.items
        mine = [
            id
            for id in self.twin.held()
            if first <= id <= last and items[id].member == name and items[id].tag <= tag and not items[id].is_acknowledged
        ]
        what, before = chance.randrange(8), self.tracker.state.snapshot()
        if what == 0:
            old = self.tracker.acknowledge(name, epoch - 1, tag, first, last, self.now)
            assert old == AckResult(is_old=True)
            assert self.tracker.state.snapshot() == before
            return
        late = sum(first <= id <= last and not self._waits_acknowledged(id, name) for id in self.twin.kept.open) - len(mine)
        unknown = max(0, last - max(self.twin.kept.reach, first - 1))
        expected = AckResult(0, len(mine), last - first + 1 - len(mine) - late - unknown, late, unknown)
        if what == 1:
            result = self.tracker.extend(name, epoch, tag, first, last, self.now)
            for id in mine:
                items[id].deadline = self.now + self.settings.ack_wait
        elif what == 7:
            self.tracker.begin(name, epoch, tag, first, last)
            for id in mine:
                items[id].has_begun = True
            return
        elif what == 2:
            delay = chance.choice([None, 0.0, 2.0])
            result = self.tracker.refuse(name, epoch, tag, first, last, self.now, reason="busy", delay=delay)
            self._each(mine, lambda id: self.twin.refused(id, self.now, delay=delay))
        elif what == 3 and chance.random() < 0.5:
            result = self.tracker.reject(name, epoch, tag, first, last, self.now, reason="nonsense")
            self._each(mine, lambda id: self.twin.failed(id, self.now, is_final=True))
        else:
            result = self.tracker.acknowledge(name, epoch, tag, first, last, self.now)
            for id in mine:
                self.twin.acknowledged(id, self.now)
                self.done_in_epoch |= set() if id in self.twin.kept.open else {id}
        assert result == expected
        self.done_in_epoch -= self.twin.kept.open.keys()

    def _waits_acknowledged(self, id: int, name: str) -> bool:
        item = self.twin.items.get(id)
        return item is not None and item.is_acknowledged and item.member == name

    def _each(self, ids: list[int], act: object) -> None:
        for id in ids:
            if id in self.twin.held():
                act(id)  # type: ignore[operator]

    def pass_time(self) -> None:
        self.now += self.chance.choice([0.5, 1.0, 5.0])
        assert self.tracker.expire(self.now) == self.twin.expired(self.now)

    def write(self) -> None:
        """What changed is committed; sometimes all of it anew."""
        if self.chance.random() < 0.2:
            self.written = [self.tracker.state.snapshot()]
            self.tracker.state.forget_changes()
        elif (delta := self.tracker.state.delta()) is not None:
            self.written.append(delta)
        self.kept = deepcopy(self.twin.kept)

    def new_owner(self) -> None:
        """It reads what was written, begins an epoch, and commits it before anything else."""
        state = GroupState.of(self.written[0])
        for written in self.written[1:]:
            state = state.apply(written)
        state.begin_epoch()
        delta = state.delta()
        assert delta is not None
        self.written.append(delta)
        self.tracker = DeliveryTracker(self.settings, state)
        self.twin.new_owner(self.kept)
        self.done_in_epoch.clear()
        self.out.clear()

    def operate(self) -> None:
        tracker, twin = self.tracker, self.twin
        if twin.kept.is_stopped:
            tracker.resume()
            twin.kept.is_stopped = False
        first = self.chance.randrange(len(self.keys))
        last = first + self.chance.randrange(3)
        if self.chance.random() < 0.3:
            count = sum(first <= id <= last for id in twin.kept.open)
            assert tracker.skip(first, last, self.now) == count
            twin.skipped(first, last, self.now)
        parked = sorted(twin.kept.parked)
        if self.chance.random() < 0.5:
            some = [id for id in parked if self.chance.random() < 0.5]
            assert tracker.replay([*some, 1000]) == some
            for id in some:
                twin.replayed(id)
            self.done_in_epoch -= set(some)

    def step(self) -> None:
        what = self.chance.randrange(20)
        if what < 3:
            self.offer(self.chance.randrange(12))
        elif what == 3 and len(self.twin.members) < 4:
            self.join()
        elif what == 4:
            self.leave()
        elif what == 5:
            self.pass_time()
        elif what in (6, 7):
            self.write()
        elif what == 8 and self.chance.random() < 0.5:
            self.new_owner()
        elif what == 9 and self.chance.random() < 0.5:
            self.operate()
        elif self.out:
            self.speak(self.chance.choice(list(self.out)))
        self.deliver()
        self.tracker.check()
        self.twin.check(self.tracker.state)

    def finish(self) -> None:
        """Members that work come at last: all that is wanted is done, or parked."""
        for _ in range(500):
            if self.twin.kept.is_stopped:
                self.operate()
            if not self.twin.members:
                self.join()
            self.offer(100)
            self.deliver()
            for id in list(self.twin.held()):
                item = self.twin.items.get(id)
                if item is not None and item.member is not None:
                    self.tracker.acknowledge(item.member, self.tracker.state.epoch, item.tag, id, id, self.now)
                    self.twin.acknowledged(id, self.now)
            if self.tracker.state.floor == len(self.keys) - 1:
                return
            self.now += 1.0
            assert self.tracker.expire(self.now) == self.twin.expired(self.now)
        raise AssertionError(f"it hangs at {self.tracker.state.floor}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("chunk", range(2))
def test_it_does_what_the_twin_does(mode: Mode, chunk: int) -> None:
    for seed in range(chunk * 40, (chunk + 1) * 40):
        story = Story(seed, mode)
        try:
            for _ in range(STEPS):
                story.step()
            story.finish()
        except AssertionError as error:
            raise AssertionError(f"seed {seed} of {mode}") from error


# -- told one by one ---------------------------------------------------------------------------------------------------


def tracker(
    mode: Mode, count: int = 5, *, members: tuple[str, ...] = ("a",), keys: str = "", **more: object
) -> DeliveryTracker:
    found = DeliveryTracker(GroupSettings(mode=mode, back_off=(), **more), GroupState())  # type: ignore[arg-type]
    for id in range(count):
        found.offer(id, keys[id] if keys else None)
    for name in members:
        found.join(name)
    return found


def given(deliveries: list[Delivery]) -> list[tuple[str, int]]:
    return [(one.member, one.id) for one in deliveries]


def test_members_of_a_queue_take_turns() -> None:
    found = tracker(Mode.QUEUE, members=("a", "b"), max_in_flight=2)
    assert given(found.deliver(0)) == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]
    assert found.acknowledge("b", 1, 99, 0, 3, 0) == AckResult(taken=2, late=2)
    assert found.state.floor == -1, "0 is not done"
    assert given(found.deliver(0)) == [("b", 4)]
    assert found.acknowledge("b", 1, 99, 1, 9, 0) == AckResult(taken=1, done=2, late=1, unknown=5)


def test_one_member_of_an_ordered_group_has_the_partition() -> None:
    found = tracker(Mode.ORDERED, members=("a", "b"), max_in_flight=3)
    assert given(found.deliver(0)) == [("a", 0), ("a", 1), ("a", 2)]
    assert found.acknowledge("a", 1, 3, 1, 2, 0) == AckResult(taken=2)
    assert found.state.floor == -1, "the place is one mark"
    found.leave("a", 1, is_lost=True)
    assert [(one.member, one.id, one.attempt) for one in found.deliver(1)] == [("b", 0, 2), ("b", 1, 1), ("b", 2, 1)]


@pytest.mark.parametrize("mode", Mode)
def test_what_was_only_prefetched_uses_up_no_try_however_often_its_member_is_killed(mode: Mode) -> None:
    """Transactions were parked that had never reached any code."""
    found = tracker(mode, members=(), max_in_flight=5, deliver_max=2)
    for number in range(20):
        found.join(f"m{number}", tells_begun=True)
        assert {one.attempt for one in found.deliver(number)} == {1}
        assert found.leave(f"m{number}", number, is_lost=True) == 0
    assert not found.state.parked
    for number in range(2):
        found.join(f"n{number}", tells_begun=True)
        assert [one.attempt for one in found.deliver(30)] == [1 + number, 1, 1, 1, 1]
        found.begin(f"n{number}", 1, 10_000, 0, 0)
        assert found.leave(f"n{number}", 30, is_lost=True) == 1
    assert list(found.state.parked) == [0]


def test_what_was_only_prefetched_goes_to_others_when_its_time_is_over_and_uses_up_no_try() -> None:
    found = tracker(Mode.QUEUE, 2, members=(), max_in_flight=2, ack_wait=10.0)
    found.join("a", tells_begun=True)
    found.deliver(0)
    found.begin("a", 1, 1, 0, 0)
    found.join("b", tells_begun=True)
    assert found.expire(10) == 1
    assert {one.id: one.attempt for one in found.deliver(10)} == {0: 2, 1: 1}


@pytest.mark.parametrize("mode", Mode)
def test_what_a_member_hands_back_before_it_begins_uses_up_no_try(mode: Mode) -> None:
    found = tracker(mode, 1, members=(), deliver_max=2)
    for name in ("old", "new"):
        found.join(name, tells_begun=True)
    given = []
    for number in range(6):
        (one,) = found.deliver(5.0 * number)
        given.append((one.member, one.attempt))
        assert found.refuse(one.member, 1, one.tag, 0, 0, 5.0 * number, reason="too new", delay=5.0).taken == 1
        assert found.deliver(5.0 * number + 4.9) == []
    assert given == [("old", 1), ("new", 1)] * 3
    (last,) = found.deliver(30)
    found.begin(last.member, 1, last.tag, 0, 0)
    found.refuse(last.member, 1, last.tag, 0, 0, 30, reason="it failed", delay=0.0)
    assert [one.attempt for one in found.deliver(30)] == [2]
    assert found.handed_back == 6


def test_an_ordered_group_stays_where_something_is_under_way() -> None:
    found = tracker(Mode.ORDERED, 2, members=())
    for name in ("old", "new"):
        found.join(name, tells_begun=True)
    first, second = found.deliver(0)
    found.begin("old", 1, first.tag, 0, 0)
    found.refuse("old", 1, second.tag, 1, 1, 0, reason="too new", delay=1.0)
    assert [one.member for one in found.deliver(1)] == ["old"], "no two members may have the partition"


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_ordered_group_leaves_a_member_whose_time_is_over(has_begun: bool) -> None:
    """Its application hangs, and its connection stays: the partition would wait for it as long as the process lives."""
    found = tracker(Mode.ORDERED, 2, members=(), ack_wait=10.0)
    for name in ("hangs", "works"):
        found.join(name, tells_begun=True)
    first, _ = found.deliver(0)
    assert first.member == "hangs"
    if has_begun:
        found.begin("hangs", 1, first.tag, 0, 0)
    assert found.expire(10) == has_begun
    again = found.deliver(10)
    assert [(one.member, one.id, one.attempt) for one in again] == [("works", 0, 1 + has_begun), ("works", 1, 1)]
    assert found.acknowledge("works", 1, again[-1].tag, 0, 1, 11).taken == 2


def test_all_that_a_member_of_an_older_version_was_given_counts_as_begun() -> None:
    found = tracker(Mode.QUEUE, 3)
    found.deliver(0)
    assert found.leave("a", 0, is_lost=True) == 3


def test_the_time_of_an_ordered_delivery_begins_when_all_before_it_is_done() -> None:
    found = tracker(Mode.ORDERED, ack_wait=10.0)
    found.deliver(0)
    assert found.acknowledge("a", 1, 1, 0, 0, 9).taken == 1
    assert found.expire(18) == 0
    found.acknowledge("a", 1, 3, 2, 2, 18)
    assert found.wake() == 19, "what is acknowledged behind it gives it no more time"
    assert found.expire(19) == 1
    assert [(one.id, one.attempt) for one in found.deliver(19)] == [(1, 2), (2, 1), (3, 1), (4, 1)]


def test_an_acknowledgement_of_an_earlier_delivery_does_not_count() -> None:
    found = tracker(Mode.ORDERED)
    first = found.deliver(0)
    found.refuse("a", 1, first[0].tag, 0, 0, 0, reason="not now")
    again = found.deliver(0)
    assert found.acknowledge("a", 1, first[1].tag, 1, 1, 0) == AckResult(late=1)
    assert found.acknowledge("a", 1, again[1].tag, 0, 1, 0) == AckResult(taken=2)


def test_a_key_waits_for_its_first_and_no_other_key_does() -> None:
    found = tracker(Mode.KEYED, keys="xxyxy", members=("a", "b"))
    assert given(found.deliver(0)) == [("a", 0), ("b", 2)]
    found.refuse("a", 1, 99, 0, 0, 0, reason="not now", delay=7)
    found.acknowledge("b", 1, 99, 2, 2, 0)
    assert given(found.deliver(0)) == [("a", 4)]
    assert found.wake() == 7
    assert given(found.deliver(7)) == [("b", 0)]
    found.reject("b", 1, 99, 0, 0, 7, reason="nonsense")
    assert given(found.deliver(7)) == [("a", 1)]
    assert found.state.parked == {0: Parked(2, "b", "nonsense")}


def test_what_may_go_out_again_wakes_nobody_while_nothing_is_given_out() -> None:
    found = tracker(Mode.QUEUE, 1, ack_wait=30.0)
    found.deliver(0)
    found.refuse("a", 1, 99, 0, 0, 0, reason="not now", delay=7)
    assert (found.wake(), found.wake(is_paused=True)) == (7, None)
    found.deliver(7)
    assert found.wake(is_paused=True) == 37, "what members have is late all the same"


def test_a_group_that_stops_gives_nothing_out_until_it_is_told_to() -> None:
    found = tracker(Mode.QUEUE, deliver_max=1, exhausted=Exhausted.STOP, max_in_flight=1)
    found.deliver(0)
    found.refuse("a", 1, 99, 0, 0, 0, reason="the index is full")
    assert found.state.stopped == "id 0: the index is full"
    assert (found.deliver(9), found.room, found.wake()) == ([], 0, None)
    found.resume()
    assert [one.attempt for one in found.deliver(9)] == [2]


def test_what_is_replayed_fails_once_more_and_stays_parked() -> None:
    found = tracker(Mode.QUEUE, 1, deliver_max=1)
    for _ in range(2):
        (one,) = found.deliver(0)
        found.refuse("a", 1, one.tag, 0, 0, 0, reason="nonsense")
        assert (found.deliver(0), found.again) == ([], []), "it does not come back by itself"
        assert (found.replay([0]), found.again) == ([0], [0])
        found.offer(0)
    found.deliver(0)
    assert found.acknowledge("a", 1, 99, 0, 0, 0).taken == 1
    assert (found.replay([0]), found.discard([0])) == ([], [])


def test_a_parked_one_that_is_discarded_is_gone() -> None:
    found = tracker(Mode.QUEUE, 1)
    found.deliver(0)
    found.reject("a", 1, 1, 0, 0, 0, reason="nonsense")
    assert (found.discard([0, 7]), found.state.parked, found.again) == ([0], {}, [])


def test_a_log_that_lost_its_beginning() -> None:
    found = tracker(Mode.KEYED, keys="xxxxx")
    found.deliver(0)
    assert found.lose(0, 0) == 0
    assert found.lose(3, 0) == 3
    assert (found.state.floor, given(found.deliver(0))) == (2, [("a", 3)])
    assert found.lose(9, 0) == 6, "also what the group had not known"
    assert (found.state.floor, found.upcoming, found.deliver(0)) == (8, 9, [])
    found.offer(9, "x")
    assert given(found.deliver(0)) == [("a", 9)]


def test_a_group_full_of_holes_takes_no_new_work_and_gets_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzd.server.groups.delivery_tracker.INTERVALS_MAX", 3)
    found = tracker(Mode.QUEUE, 7)
    found.deliver(0)
    for id in (1, 3, 5):
        found.acknowledge("a", 1, 99, id, id, 0)
    assert len(found.state.open) == 4
    assert found.room == 0
    found.state.begin_epoch()
    after = DeliveryTracker(found.settings, GroupState.of(found.state.snapshot()))
    assert after.room == AHEAD_MAX, "what is open has to be offered to the next owner"
    ids = []
    while after.room and after.upcoming < 9:
        ids.append(after.upcoming)
        after.offer(ids[-1])
    assert ids == [0, 2, 4, 6]
    after.join("b")
    after.deliver(0)
    assert after.acknowledge("b", 2, 99, 0, 2, 0).taken == 2
    assert after.room > 0


def test_the_state_fits_into_one_transaction_however_much_members_may_have_in_flight() -> None:
    """By default a transaction has at most 1 MiB, and an entry that is larger can never be written."""
    found = tracker(Mode.QUEUE, 0, max_in_flight=100_000)
    state = found.state

    def deliver() -> list[Delivery]:
        out: list[Delivery] = []
        for id in found.again:
            found.offer(id)
        while found.room:
            for id in range(found.upcoming, found.upcoming + found.room):
                found.offer(id)
            out += found.deliver(0)
        return out + found.deliver(0)

    def reject(out: list[Delivery]) -> None:
        for one in out:
            found.reject("a", 1, one.tag, one.id, one.id, 0, reason="x" * 1024)

    def sizes() -> list[int]:
        whole = state.snapshot()
        return [len(whole), len(state.delta() or b"")]

    out = deliver()
    reject(out[:PARKED_MAX])
    entries = sizes()
    found.replay(list(state.parked))
    out = out[PARKED_MAX:] + deliver()
    entries += sizes()
    found.replay(list(state.parked))
    for one in out[::2]:  # no two of its neighbours have failed as often
        found.refuse("a", 1, one.tag, one.id, one.id, 0, reason="x", delay=9.0)
    entries += sizes()
    assert len(state.open) > PARKED_MAX
    reject(out[1 : 2 * PARKED_MAX : 2])
    assert max(entries + sizes()) < 1 << 20
    assert len(state.parked) == PARKED_MAX


@pytest.mark.parametrize("mode", Mode)
def test_more_time_for_what_is_in_flight_keeps_nothing_each_time(mode: Mode) -> None:
    found = tracker(mode, 1000, max_in_flight=1000, ack_wait=10.0)
    found.deliver(0)
    for now in range(300):
        assert found.extend("a", 1, 1000, 0, 999, now).taken == 1000
    found.check()
    assert len(found._deadlines) <= 1000
    assert (found.wake(), found.expire(308.5)) == (309, 0)
    assert found.expire(309) == (1 if mode is Mode.ORDERED else 1000)


def test_what_a_member_says_takes_as_much_as_it_speaks_of() -> None:
    found = tracker(Mode.QUEUE, 4000, max_in_flight=4000)
    found.deliver(0)
    for first in range(0, 4000, 40):  # wide stretches, of which each is looked at by itself
        found.extend("a", 1, 4000, first, first + 39, 0)
    assert found.work == 100 + 4000 + 100, "stretches, deliveries, intervals"
    before = found.work
    found.acknowledge("a", 1, 4000, 0, 1 << 40, 0)
    assert found.work - before == 1 + 4000 + 1
    before = found.work
    found.acknowledge("a", 1, 4000, 0, 1 << 40, 0)
    assert found.work - before < 4000, "what is done is not looked at again for ever"


def test_what_goes_out_again_and_again_leaves_no_alarms() -> None:
    found = tracker(Mode.QUEUE, 100, max_in_flight=100, ack_wait=1e9)
    for now in range(200):
        found.deliver(now)
        found.leave("a", now, is_lost=False)
        found.join("a")
        found.check()
    assert max(len(found._deadlines), len(found._order)) <= 2 * 100


def test_the_highest_that_waits_for_others_is_found_without_looking_at_all() -> None:
    found = tracker(Mode.ORDERED, 10, max_in_flight=10)
    found.deliver(0)
    for id in (7, 3, 8):
        found.acknowledge("a", 1, 10, id, id, 0)
    assert found.unsettled("a") == 8
    found.acknowledge("a", 1, 10, 0, 6, 0)
    assert (found.state.floor, found.unsettled("a")) == (8, None)
    found.acknowledge("a", 1, 10, 9, 9, 0)
    assert (found.state.floor, found.unsettled("a"), found.unsettled("b")) == (9, None, None)
