"""A group at work in one partition: who has what in its hands, until when, and what comes next. Pure.

The owner of the partition has one for as long as it is the owner, in one epoch: what is here and not in the `State` goes
with it. It is told what is in the log (`offer`), who is there, and what members say; `deliver` says what goes out. Times
are seconds of any clock that does not go back.

An acknowledgement belongs to a delivery and not to an id. It names the epoch and the highest tag of the deliveries that it
speaks of, so that one which comes too late, when the transaction is in other hands already, is told from one that counts.

What fails is tried again, after a pause, and put aside when its tries are used up, or the group stops there. Failures
count, not deliveries: a change of owner is nobody's failure, and neither is the end of a member for what its application
had not begun.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import takewhile
from typing import NamedTuple

from waltzd.protocol.groups import AckResult, Exhausted, Mode
from waltzd.server.groups.dispatch_order import dispatch_order_for
from waltzd.server.groups.state import PARKED_MAX, GroupState

INTERVALS_MAX = 10_000
"""With more of them open, a group takes no new work until some is done."""
AHEAD_MAX = 4096
"""So many transactions wait here; the others wait in the log. Of a keyed group that is also how many may stand behind one
key before other keys have to wait, too."""
STALE_MAX = 64
"""So many ids that are not in flight any more may stand in lists of those that are, and as many as are in flight."""


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    mode: Mode
    ack_wait: float = 30.0
    """How many seconds a member may take; it may ask for more."""
    max_in_flight: int = 100
    """Of each member."""
    deliver_max: int = 5
    """So many failures use its tries up."""
    back_off: tuple[float, ...] = (1.0, 5.0, 30.0)
    """Seconds before the second try, the third, and so on; the last one stays."""
    exhausted: Exhausted = Exhausted.PARK


class Delivery(NamedTuple):
    member: str
    id: int
    attempt: int
    """From 1 on."""
    tag: int
    """No other delivery of this epoch has it, and later ones have higher ones."""


@dataclass(eq=False, slots=True)
class _Flight:
    member: str
    tag: int
    deadline: float
    has_begun: bool
    """Its member has handed it to the application, or does not report that."""
    is_done: bool = False
    """In an ordered group: acknowledged, and behind one that is not."""
    has_alarm: bool = True
    """It has an entry among the deadlines; a longer time needs no other one."""


@dataclass(eq=False, slots=True)
class _Member:
    room: int
    """How many it may have at a time."""
    tells_begun: bool
    """Whether it reports what it hands to its application."""
    flights: dict[int, _Flight] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    """In an ordered group: ids that it acknowledged, the highest first, each less than 0; some are settled by now."""


class DeliveryTracker:
    def __init__(self, settings: GroupSettings, state: GroupState) -> None:
        self.settings = settings
        self.state = state
        self._dispatch = dispatch_order_for(settings.mode)
        self._members: dict[str, _Member] = {}
        """The one whose turn it is first; in an ordered group, the one that came first."""
        self._flights: dict[int, _Flight] = {}
        """What is in somebody's hands, in the order in which it was given out."""
        self._order: list[int] = []
        """The ids in flight, rising, and some that were."""
        self._deadlines: list[tuple[float, int, int]] = []
        """With id and tag: one for each delivery at most, which may be too early."""
        self.work = 0
        """Rises with what it took to hear members: stretches of ids, deliveries and intervals that were looked at."""
        self._tag = 0
        self._timed = 0
        """In an ordered group, the tag of the first delivery: its time is what counts."""
        self.cursor = state.floor
        """What is offered; what lies behind it and is to be offered again stands in `_again`."""
        self._again: set[int] = set()

    def check(self) -> None:
        self.state.check()
        for id, flight in self._flights.items():
            assert self.state.open.get(id) is not None
            assert self._members[flight.member].flights[id] is flight
            assert self._order[bisect_left(self._order, id)] == id
        assert max(len(self._order), len(self._deadlines)) <= 3 * len(self._flights) + STALE_MAX
        assert sum(len(member.flights) for member in self._members.values()) == len(self._flights)
        if self.settings.mode is Mode.ORDERED:
            assert len({flight.member for flight in self._flights.values()}) <= 1

    # -- what is in the log --------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """So many more transactions may be offered. What was open before this epoch always may: without it nothing would
        become less."""
        is_full = len(self.state.open) >= INTERVALS_MAX and self.upcoming > self.state.reach
        return 0 if is_full or self.state.stopped else max(0, AHEAD_MAX - self._dispatch.waiting)

    @property
    def upcoming(self) -> int:
        """The id that is to be offered next; between the cursor and it nothing is to be done."""
        if self.cursor >= self.state.reach:
            return self.cursor + 1
        following = next(self.state.open.within(self.cursor + 1, self.state.reach), None)
        return self.state.reach + 1 if following is None else following.first

    @property
    def again(self) -> list[int]:
        """What has to be offered again: it lies behind the cursor, and is to be done all the same."""
        return sorted(self._again)

    def offer(self, id: int, key: Hashable | None = None, *, is_wanted: bool = True) -> None:
        """What stands in the log, id by id: `upcoming`, or one of `again`. `key`: of a keyed group. `is_wanted`: False for
        what its filter leaves out."""
        if id in self._again:
            self._again.remove(id)
        else:
            assert id == self.upcoming
            self.cursor = id
        state = self.state
        if id > state.reach:
            state.reach_to(id, is_open=is_wanted)
        is_open = state.open.get(id) is not None
        if is_open and is_wanted:
            self._dispatch.add(id, key if self.settings.mode is Mode.KEYED else None)
        elif is_open:
            state.settle(id, id)

    def lose(self, first: int, now: float) -> int:
        """The log begins at this id now. How many of those before it were still to be done, or were not known yet, and
        never will be done."""
        last = first - 1
        lost = max(0, last - self.state.reach) + self.skip(0, last, now)
        if last > self.state.reach:
            self.state.jump_to(last)
        self.cursor = max(self.cursor, last)
        return lost

    @property
    def waiting(self) -> int:
        """How many were offered and are in nobody's hands."""
        return self._dispatch.waiting

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def oldest(self) -> float | None:
        """When the time of the delivery is over that is longest in somebody's hands."""
        return next(iter(self._flights.values())).deadline if self._flights else None

    def held(self, name: str) -> int:
        """How many a member has in its hands."""
        return len(self._members[name].flights) if name in self._members else 0

    def room_of(self, name: str) -> int:
        return self._members[name].room

    def unsettled(self, name: str) -> int | None:
        """The highest id that a member has acknowledged and that waits for those before it."""
        if name not in self._members:
            return None
        done, flights = self._members[name].done, self._members[name].flights
        while done and not ((flight := flights.get(-done[0])) is not None and flight.is_done):
            heappop(done)
        return -done[0] if done else None

    def is_out(self, delivery: Delivery) -> bool:
        """Whether it is still in the hands that it was given to."""
        flight = self._flights.get(delivery.id)
        return flight is not None and flight.tag == delivery.tag

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, name: str, room: int | None = None, *, tells_begun: bool = False) -> None:
        """`room`: how many it wants at a time; never more than the group permits."""
        most = self.settings.max_in_flight
        assert name not in self._members
        self._members[name] = _Member(most if room is None else max(0, min(room, most)), tells_begun)

    def leave(self, name: str, now: float, *, is_lost: bool) -> int:
        """Give what it had to others; return how many failures that makes. `is_lost`: it did not say that it goes, and so
        has failed in what it had begun; in an ordered group, in the first of that."""
        flights = self._members[name].flights
        had = list(flights) if self.settings.mode is not Mode.ORDERED else list(flights)[:1]
        failed = [id for id in had if is_lost and flights[id].has_begun]
        for id in failed:
            self._fail(id, "its member went away", now)
        while flights:
            self._return(next(iter(flights)), now)
        del self._members[name]
        return len(failed)

    # -- giving out ----------------------------------------------------------------------------------------------------

    def deliver(self, now: float) -> list[Delivery]:
        """What goes out now: as much as members have room for."""
        found: list[Delivery] = []
        state, wait = self.state, self.settings.ack_wait
        while not state.stopped and (name := self._next_member()) is not None:
            id = self._dispatch.take(now)
            if id is None:
                break
            self._tag += 1
            member = self._members[name]
            flight = _Flight(name, self._tag, now + wait, has_begun=not member.tells_begun)
            self._flights[id] = member.flights[id] = flight
            self._place_in_order(id)
            heappush(self._deadlines, (flight.deadline, id, self._tag))
            failures = state.open.get(id)
            assert failures is not None
            found.append(Delivery(name, id, failures + 1, self._tag))
            if self.settings.mode is Mode.ORDERED:
                self._timed = self._tag if len(self._flights) == 1 else self._timed
            else:
                self._members[name] = self._members.pop(name)  # the next one is another's turn
        return found

    def _next_member(self) -> str | None:
        for name, member in self._members.items():
            if len(member.flights) < member.room:
                return name
            if self.settings.mode is Mode.ORDERED:
                break
        return None

    def wake(self, *, is_paused: bool = False) -> float | None:
        """When `expire` or `deliver` have something to do, if nothing else happens before. `is_paused`: nothing is given
        out, whatever is due."""
        alarm = self._first_alarm()
        times = [] if alarm is None else [alarm[0]]
        may_give = not is_paused and not self.state.stopped and self._next_member() is not None
        later = self._dispatch.wake() if may_give else None
        return min([*times, *([] if later is None else [later])], default=None)

    def _first_alarm(self) -> tuple[float, int, int] | None:
        """The earliest deadline that counts. One of a delivery that has got more time is set later; others are dropped."""
        while self._deadlines:
            deadline, id, tag = self._deadlines[0]
            flight = self._flights.get(id)
            if flight is None or flight.tag != tag:
                heappop(self._deadlines)
            elif flight.deadline != deadline:
                heapreplace(self._deadlines, (flight.deadline, id, tag))
            elif self.settings.mode is Mode.ORDERED and next(iter(self._flights)) != id:
                heappop(self._deadlines)
                flight.has_alarm = False
            else:
                return self._deadlines[0]
        return None

    def expire(self, now: float) -> int:
        """Take away what members have had for too long; return how many failures that makes."""
        count = 0
        while (alarm := self._first_alarm()) is not None and alarm[0] <= now:
            _, id, _ = heappop(self._deadlines)
            if self._flights[id].has_begun:
                self._fail(id, f"it was not acknowledged in {self.settings.ack_wait:g} seconds", now)
                count += 1
            else:
                self._return(id, now)
        return count

    # -- what members say ----------------------------------------------------------------------------------------------

    def begin(self, name: str, epoch: int, tag: int, first: int, last: int) -> None:
        """Its application has it in hand from now on."""
        for id in self._heard(name, epoch, tag, first, last)[0]:
            self._flights[id].has_begun = True

    def acknowledge(self, name: str, epoch: int, tag: int, first: int, last: int, now: float) -> AckResult:
        """It is done, and is never given out again in this epoch."""
        mine, result = self._heard(name, epoch, tag, first, last)
        if self.settings.mode is Mode.ORDERED:
            for id in mine:
                self._flights[id].is_done = True
                heappush(self._members[name].done, -id)
            self._settle_done(now)
        else:
            self._settle(sorted(mine))
        return result

    def refuse(
        self, name: str, epoch: int, tag: int, first: int, last: int, now: float, *, reason: str, delay: float | None = None
    ) -> AckResult:
        """It failed, and may be tried again: after this pause, or that of the group."""
        mine, result = self._heard(name, epoch, tag, first, last)
        for id in mine:
            if id in self._flights:  # else it came back with one before it
                self._fail(id, reason, now, delay)
        return result

    def reject(self, name: str, epoch: int, tag: int, first: int, last: int, now: float, *, reason: str) -> AckResult:
        """It will never be done: its tries are used up at once."""
        mine, result = self._heard(name, epoch, tag, first, last)
        for id in mine:
            if id in self._flights:
                self.state.fail(id)
                self._give_up(id, reason, now)
        return result

    def extend(self, name: str, epoch: int, tag: int, first: int, last: int, now: float) -> AckResult:
        """It takes longer: the time begins anew."""
        mine, result = self._heard(name, epoch, tag, first, last)
        for id in mine:
            self._prolong(id, self._flights[id], now)
        return result

    def _heard(self, name: str, epoch: int, tag: int, first: int, last: int) -> tuple[list[int], AckResult]:
        """Which of these ids are in its hands, by a delivery that it knows of; and what the others are."""
        assert 0 <= first <= last
        if epoch != self.state.epoch:
            return [], AckResult(is_old=True)
        held = self._members[name].flights if name in self._members else {}
        among = self._order[bisect_left(self._order, first) : bisect_right(self._order, last)]
        mine = [id for id in among if (flight := held.get(id)) is not None and flight.tag <= tag and not flight.is_done]
        waiting = sum(1 for id in among if (flight := held.get(id)) is not None and flight.is_done)
        reach, total = self.state.reach, last - first + 1
        unknown = min(total, max(0, last - reach))
        sizes = [end - begin + 1 for begin, end, _ in self.state.open.within(first, last)]
        still = sum(sizes)
        self.work += 1 + len(among) + len(sizes)
        return mine, AckResult(
            taken=len(mine),
            done=total - unknown - still + waiting,
            late=still - len(mine) - waiting,
            unknown=unknown,
        )

    # -- what operators say --------------------------------------------------------------------------------------------

    def skip(self, first: int, last: int, now: float) -> int:
        """Nothing of this is to be done any more; how many of them were. What lies above `reach` was never to be done yet,
        and is not skipped."""
        skipped = sum(end - begin + 1 for begin, end, _ in self.state.open.within(first, last))
        if first <= min(last, self.state.reach):
            self._take_away(first, min(last, self.state.reach), now)
        return skipped

    def replay(self, ids: Iterable[int]) -> list[int]:
        """Parked ones are to be done again, each once: one that fails again is parked again, and stays so. Which of these
        were parked."""
        found = [id for id in sorted(set(ids)) if id in self.state.parked]
        for id in found:
            self.state.release(id, is_open=True)
            if id <= self.cursor:
                self._again.add(id)
        return found

    def discard(self, ids: Iterable[int]) -> list[int]:
        """Parked ones are left for good."""
        found = [id for id in sorted(set(ids)) if id in self.state.parked]
        for id in found:
            self.state.release(id, is_open=False)
        return found

    def resume(self) -> None:
        """After it has stopped: what stopped it has one more try."""
        self.state.resume()

    # -- below ---------------------------------------------------------------------------------------------------------

    def _drop(self, id: int) -> None:
        """It is in nobody's hands."""
        flight = self._flights.pop(id)
        del self._members[flight.member].flights[id]
        if max(len(self._order), len(self._deadlines)) > 2 * len(self._flights) + STALE_MAX:
            self._order = sorted(self._flights)
            self._deadlines = [one for one in self._deadlines if self._is_alarm(one)]
            heapify(self._deadlines)

    def _is_alarm(self, alarm: tuple[float, int, int]) -> bool:
        """Whether it is of a delivery that is still in flight."""
        flight = self._flights.get(alarm[1])
        return flight is not None and flight.tag == alarm[2]

    def _place_in_order(self, id: int) -> None:
        """Most come in the order of the log."""
        at = bisect_left(self._order, id)
        if at == len(self._order) or self._order[at] != id:
            self._order.insert(at, id)

    def _return(self, id: int, at: float) -> None:
        """It goes out again, from this time on."""
        self._drop(id)
        for other in self._dispatch.back(id, at):
            self._drop(other)

    def _fail(self, id: int, reason: str, now: float, delay: float | None = None) -> None:
        failures, back_off = self.state.fail(id), self.settings.back_off
        if failures >= self.settings.deliver_max:
            self._give_up(id, reason, now)
            return
        pause = back_off[min(failures, len(back_off)) - 1] if back_off else 0.0
        self._return(id, now + (pause if delay is None else delay))

    def _give_up(self, id: int, reason: str, now: float) -> None:
        if self.settings.exhausted is Exhausted.STOP or len(self.state.parked) >= PARKED_MAX:
            self.state.stop(f"id {id}: {reason}")
            self._return(id, now)
            return
        member = self._flights[id].member
        self._drop(id)
        self.state.park(id, member, reason)
        self._dispatch.done(id)
        self._settle_done(now)

    def _settle(self, ids: Sequence[int]) -> None:
        for begin, end in _stretches(ids):
            self.state.settle(begin, end)
        for id in ids:
            self._drop(id)
            self._dispatch.done(id)

    def _settle_done(self, now: float) -> None:
        """In an ordered group the place is one mark: what is acknowledged counts when all before it is done. The time of
        the next one begins then: its member does one after the other."""
        self._settle([id for id, _ in takewhile(lambda one: one[1].is_done, self._flights.items())])
        if self.settings.mode is Mode.ORDERED and self._flights:
            id, flight = next(iter(self._flights.items()))
            if flight.tag != self._timed:
                self._timed = flight.tag
                self._prolong(id, flight, now)

    def _prolong(self, id: int, flight: _Flight, now: float) -> None:
        flight.deadline = now + self.settings.ack_wait
        if not flight.has_alarm:
            flight.has_alarm = True
            heappush(self._deadlines, (flight.deadline, id, flight.tag))

    def _take_away(self, first: int, last: int, now: float) -> None:
        """From members, from those that wait, and from what is to be done."""
        for begin, end, _ in list(self.state.open.within(first, last)):
            for id in range(begin, min(end, self.cursor) + 1):
                if id in self._again:
                    self._again.remove(id)
                    continue
                if id in self._flights:
                    self._drop(id)
                self._dispatch.done(id)
        self.state.settle(first, last)
        self._settle_done(now)


def _stretches(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Ids that follow each other, as one."""
    found: list[tuple[int, int]] = []
    for id in ids:
        if found and found[-1][1] == id - 1:
            found[-1] = found[-1][0], id
        else:
            found.append((id, id))
    return found
