"""The deliveries of a group in one partition: what is in flight at which member, until when, and what is next. Pure.

The owner of the partition keeps one tracker for one epoch. Everything that is not in the `GroupState` is lost with the
owner. The tracker is told which transactions are in the log (`offer`), which members are connected, and what they
acknowledge; `deliver` returns what to send. Times are seconds of any monotonic clock.

An acknowledgement belongs to a delivery, not to an id. It names the epoch and the highest tag of its deliveries. So a
late one, for a transaction that was delivered to another member meanwhile, is told apart from one that counts.

A failed transaction is retried after a pause. When its tries are used up it is parked, or the group stops there. Only
failures count, not deliveries: neither a change of owner nor the loss of a member uses up a try of a delivery that its
application had not begun.

A `DispatchOrder` is the order in which transactions are delivered; each mode of a group has its own.

An open transaction waits here until it is taken. A taken one is put back after a failure, or is done. Ids are added in
rising order, except parked transactions that are replayed: those come last of their key.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import takewhile
from typing import NamedTuple, Protocol

from waltzd.protocol.groups import AckResult, Exhausted, Mode
from waltzd.server.groups.state import PARKED_MAX, GroupState


class DispatchOrder(Protocol):
    @property
    def waiting(self) -> int:
        """Return how many transactions are not taken."""
        ...

    def add(self, id: int, key: Hashable | None) -> None: ...
    def take(self, now: float) -> int | None:
        """Take the next transaction; return None if none may be delivered now."""
        ...

    def back(self, id: int, at: float) -> list[int]:
        """Put back a transaction that was taken, not to be taken before the time `at`. Return the others that must be
        put back with it."""
        ...

    def done(self, id: int) -> None:
        """Remove a transaction, whether it was taken or waits."""
        ...

    def wake(self) -> float | None:
        """Return when the next pause ends; None if nothing is paused."""
        ...


class QueueOrder:
    """Order of a queue: the lowest id first."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, int]] = []
        """Heap of ids that may be taken, each with its entry number."""
        self._later: list[tuple[float, int, int]] = []
        self._entries: dict[int, int] = {}
        """Entry number of each waiting id. Entries of the two heaps with another number are stale."""
        self._number = 0

    @property
    def waiting(self) -> int:
        return len(self._entries)

    def _entry(self, id: int) -> int:
        self._number += 1
        self._entries[id] = self._number
        return self._number

    def add(self, id: int, key: Hashable | None) -> None:
        heappush(self._ready, (id, self._entry(id)))

    def take(self, now: float) -> int | None:
        while self._later and self._later[0][0] <= now:
            heappush(self._ready, heappop(self._later)[1:])
        while self._ready:
            id, entry = heappop(self._ready)
            if self._entries.get(id) == entry:
                del self._entries[id]
                return id
        return None

    def back(self, id: int, at: float) -> list[int]:
        heappush(self._later, (at, id, self._entry(id)))
        return []

    def done(self, id: int) -> None:
        self._entries.pop(id, None)

    def wake(self) -> float | None:
        while self._later and self._entries.get(self._later[0][1]) != self._later[0][2]:
            heappop(self._later)
        return self._later[0][0] if self._later else None


class KeyedOrder:
    """Order of a keyed group: of each key only the first transaction may be taken, the rest waits until it is done."""

    def __init__(self) -> None:
        self._heads = QueueOrder()
        self._keys: dict[int, Hashable] = {}
        self._lines: dict[Hashable, deque[int]] = {}
        """Ids of each key that are not done. The first one may be taken or is taken."""
        self._behind = 0

    @property
    def waiting(self) -> int:
        return self._heads.waiting + self._behind

    def add(self, id: int, key: Hashable | None) -> None:
        if key is None:
            self._heads.add(id, None)
            return
        self._keys[id] = key
        line = self._lines.setdefault(key, deque())
        line.append(id)
        if len(line) == 1:
            self._heads.add(id, None)
        else:
            self._behind += 1

    def take(self, now: float) -> int | None:
        return self._heads.take(now)

    def back(self, id: int, at: float) -> list[int]:
        return self._heads.back(id, at)

    def done(self, id: int) -> None:
        self._heads.done(id)
        key = self._keys.pop(id, None)
        if key is None:
            return
        line = self._lines[key]
        if line[0] != id:
            line.remove(id)
            self._behind -= 1
            return
        line.popleft()
        if line:
            self._behind -= 1
            self._heads.add(line[0], None)
        else:
            del self._lines[key]

    def wake(self) -> float | None:
        return self._heads.wake()


class LogOrder:
    """Order of the log. If a transaction is put back, all that were taken after it are put back, too, and wait for it."""

    def __init__(self) -> None:
        self._line: list[int] = []
        """Ids that are not done. The first `_taken` are taken; the rest is sorted."""
        self._taken = 0
        self._pauses: dict[int, float] = {}
        """Time before which an id must not be taken."""

    @property
    def waiting(self) -> int:
        return len(self._line) - self._taken

    def add(self, id: int, key: Hashable | None) -> None:
        insort(self._line, id, self._taken)

    def take(self, now: float) -> int | None:
        at = self.wake()
        if not self.waiting or (at is not None and now < at):
            return None
        id = self._line[self._taken]
        self._pauses.pop(id, None)
        self._taken += 1
        return id

    def back(self, id: int, at: float) -> list[int]:
        place = self._line.index(id, 0, self._taken)
        others = self._line[place + 1 : self._taken]
        self._line[place:] = sorted(self._line[place:])
        self._taken, self._pauses[id] = place, at
        return others

    def done(self, id: int) -> None:
        place = self._line.index(id)
        if place < self._taken:
            self._taken -= 1
        self._pauses.pop(id, None)
        del self._line[place]

    def wake(self) -> float | None:
        return self._pauses.get(self._line[self._taken]) if self.waiting else None


def dispatch_order_for(mode: Mode) -> DispatchOrder:
    kinds: dict[Mode, type[DispatchOrder]] = {Mode.ORDERED: LogOrder, Mode.QUEUE: QueueOrder, Mode.KEYED: KeyedOrder}
    return kinds[mode]()


INTERVALS_MAX = 10_000
"""Number of open intervals at which a group takes no new transactions until some are done."""
OPEN_MAX = 25_000
"""Number of open transactions at which a group takes no new ones, because each may become an interval of its own. The whole
state, also after a replay of all that is parked, fits into one entry (`TEXTS_BYTES_MAX`)."""
AHEAD_MAX = 4096
"""Number of transactions that wait in memory; others wait in the log. In a keyed group this also bounds how many wait
behind one key before other keys must wait."""
STALE_MAX = 64
"""Number of stale entries allowed in the sorted lists, beyond as many as there are deliveries in flight."""


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    mode: Mode
    ack_wait: float = 30.0
    """Seconds that a member has for a delivery before it fails; the member may extend them."""
    max_in_flight: int = 100
    """Largest number of deliveries in flight for each member."""
    deliver_max: int = 5
    """Number of failures that uses up the tries of a transaction."""
    back_off: tuple[float, ...] = (1.0, 5.0, 30.0)
    """Seconds before the second try, the third, and so on. The last value stays for all later tries."""
    exhausted: Exhausted = Exhausted.PARK


class Delivery(NamedTuple):
    member: str
    id: int
    attempt: int
    """Number of the try, from 1 on."""
    tag: int
    """Number that is unique in the epoch and rises with each delivery."""


@dataclass(eq=False, slots=True)
class _Flight:
    member: str
    tag: int
    deadline: float
    has_begun: bool
    """True if the member handed the delivery to its application, or does not report that."""
    is_done: bool = False
    """True if it is acknowledged and waits for an earlier one. Used in ordered groups only."""
    has_alarm: bool = True
    """True if it has an entry in the deadlines. A later deadline needs no second entry."""


@dataclass(eq=False, slots=True)
class _Member:
    room: int
    """Largest number of deliveries in flight for the member."""
    tells_begun: bool
    """True if the member reports what it hands to its application."""
    flights: dict[int, _Flight] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    """Heap of negated ids that the member acknowledged, in an ordered group. Some may be settled by now."""


class DeliveryTracker:
    def __init__(self, settings: GroupSettings, state: GroupState) -> None:
        self.settings = settings
        self.state = state
        self._dispatch = dispatch_order_for(settings.mode)
        self._members: dict[str, _Member] = {}
        """Members by name, in the order of their next delivery. In an ordered group: in the order in which they joined, or
        lost the partition."""
        self._flights: dict[int, _Flight] = {}
        """Deliveries in flight by id, in the order in which they were delivered."""
        self._order: list[int] = []
        """Sorted ids in flight, with some stale ones."""
        self._deadlines: list[tuple[float, int, int]] = []
        """Heap of deadline, id and tag: at most one for each delivery. An entry may be earlier than the deadline."""
        self.work = 0
        """Ranges of ids, deliveries and intervals that acknowledgements made it examine. The number only rises."""
        self.handed_back = 0
        """Number of deliveries that members refused before they began them. The number only rises."""
        self._tag = 0
        self._timed = 0
        """Tag of the first delivery in flight in an ordered group, whose deadline is the one that counts."""
        self.cursor = state.floor
        """Highest id that was offered. Lower ids that must be offered again are in `_again`."""
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

    # -- offering ----------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Return how many more transactions may be offered. Those that were open before this epoch are never held back
        by what is open, or the group could not recover from too much."""
        room = AHEAD_MAX - self._dispatch.waiting
        if self.upcoming > self.state.reach:  # then all that is open was offered, or is offered again
            open_ones = self._dispatch.waiting + len(self._flights) + len(self._again)
            room = 0 if len(self.state.open) >= INTERVALS_MAX else min(room, OPEN_MAX - open_ones)
        return 0 if self.state.stopped else max(0, room)

    @property
    def upcoming(self) -> int:
        """Return the id to offer next. Between the cursor and this id nothing is open."""
        if self.cursor >= self.state.reach:
            return self.cursor + 1
        following = next(self.state.open.within(self.cursor + 1, self.state.reach), None)
        return self.state.reach + 1 if following is None else following.first

    @property
    def again(self) -> list[int]:
        """Return the sorted ids below the cursor that must be offered again."""
        return sorted(self._again)

    def is_again(self, id: int) -> bool:
        return id in self._again

    def offer(self, id: int, key: Hashable | None = None, *, is_wanted: bool = True) -> None:
        """Take a transaction of the log: `upcoming`, or one of `again`. `key` is used in keyed groups. `is_wanted` is
        False if the filter of the group excludes it."""
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
        """Drop everything below `first`, where the log begins now. Return how many transactions that were open or not
        yet seen are never delivered."""
        last = first - 1
        lost = max(0, last - self.state.reach) + self.skip(0, last, now)
        if last > self.state.reach:
            self.state.jump_to(last)
        self.cursor = max(self.cursor, last)
        return lost

    @property
    def waiting(self) -> int:
        """Return how many transactions were offered and are not in flight."""
        return self._dispatch.waiting

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def oldest(self) -> float | None:
        """Return the deadline of the oldest delivery in flight; None if there is none."""
        return next(iter(self._flights.values())).deadline if self._flights else None

    def held(self, name: str) -> int:
        """Return how many deliveries a member has in flight."""
        return len(self._members[name].flights) if name in self._members else 0

    def room_of(self, name: str) -> int:
        return self._members[name].room

    def unsettled(self, name: str) -> int | None:
        """Return the highest id that a member acknowledged and that waits for earlier ones; None if there is none."""
        if name not in self._members:
            return None
        done, flights = self._members[name].done, self._members[name].flights
        while done and not ((flight := flights.get(-done[0])) is not None and flight.is_done):
            heappop(done)
        return -done[0] if done else None

    def is_waiting(self, id: int, name: str) -> bool:
        """Return whether a member acknowledged a delivery that waits for earlier ones. An acknowledgement is void once an
        earlier delivery is taken back, because what follows is delivered again."""
        flight = self._flights.get(id)
        return flight is not None and flight.is_done and flight.member == name

    def is_out(self, delivery: Delivery) -> bool:
        """Return whether a delivery is still in flight."""
        flight = self._flights.get(delivery.id)
        return flight is not None and flight.tag == delivery.tag

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, name: str, room: int | None = None, *, tells_begun: bool = False) -> None:
        """Add a member. `room` is how many deliveries in flight it asks for, bounded by the settings of the group."""
        most = self.settings.max_in_flight
        assert name not in self._members
        self._members[name] = _Member(most if room is None else max(0, min(room, most)), tells_begun)

    def leave(self, name: str, now: float, *, is_lost: bool) -> int:
        """Remove a member and release its deliveries; return the number of failures. A member that was lost without
        leaving has failed in each delivery that it had begun; in an ordered group, only in the first."""
        flights = self._members[name].flights
        had = list(flights) if self.settings.mode is not Mode.ORDERED else list(flights)[:1]
        failed = [id for id in had if is_lost and flights[id].has_begun]
        for id in failed:
            self._fail(id, "its member was lost", now)
        while flights:
            self._return(next(iter(flights)), now)
        del self._members[name]
        return len(failed)

    # -- delivering ----------------------------------------------------------------------------------------------------

    def deliver(self, now: float) -> list[Delivery]:
        """Return the deliveries to send now, as many as members have room for."""
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
            at = bisect_left(self._order, id)  # most ids come last, in the order of the log
            if at == len(self._order) or self._order[at] != id:
                self._order.insert(at, id)
            heappush(self._deadlines, (flight.deadline, id, self._tag))
            failures = state.open.get(id)
            assert failures is not None
            found.append(Delivery(name, id, failures + 1, self._tag))
            if self.settings.mode is Mode.ORDERED:
                self._timed = self._tag if len(self._flights) == 1 else self._timed
            else:
                self._members[name] = self._members.pop(name)  # round robin
        return found

    def _next_member(self) -> str | None:
        for name, member in self._members.items():
            if len(member.flights) < member.room:
                return name
            if self.settings.mode is Mode.ORDERED:
                break
        return None

    def wake(self, *, is_paused: bool = False) -> float | None:
        """Return when `expire` or `deliver` must be called next if nothing else happens; None for never. While the
        group is paused nothing is delivered, so only deadlines count."""
        alarm = self._first_alarm()
        times = [] if alarm is None else [alarm[0]]
        may_give = not is_paused and not self.state.stopped and self._next_member() is not None
        later = self._dispatch.wake() if may_give else None
        return min([*times, *([] if later is None else [later])], default=None)

    def _first_alarm(self) -> tuple[float, int, int] | None:
        """Return the earliest deadline that counts. Entries of extended deliveries are moved to their new deadline,
        stale ones are dropped."""
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
        """Release deliveries whose deadline is over; return the number of failures. In an ordered group the next member
        gets the partition, because this one may hang."""
        count = 0
        while (alarm := self._first_alarm()) is not None and alarm[0] <= now:
            _, id, _ = heappop(self._deadlines)
            name = self._flights[id].member
            if self._flights[id].has_begun:
                self._fail(id, f"it was not acknowledged in {self.settings.ack_wait:g} seconds", now)
                count += 1
            else:
                self._return(id, now)
            self._pass_on(name)
        return count

    def _pass_on(self, name: str) -> None:
        """Make a member of an ordered group the last to get the partition, unless it still has deliveries in flight."""
        if self.settings.mode is Mode.ORDERED and not self._flights:
            self._members[name] = self._members.pop(name)

    # -- acknowledgements ----------------------------------------------------------------------------------------------

    def begin(self, name: str, epoch: int, tag: int, first: int, last: int) -> None:
        """Record that the member handed these deliveries to its application."""
        for id in self._match(name, epoch, tag, first, last)[0]:
            self._flights[id].has_begun = True

    def acknowledge(self, name: str, epoch: int, tag: int, first: int, last: int, now: float) -> AckResult:
        """Mark deliveries as done; they are never delivered again in this epoch."""
        mine, result = self._match(name, epoch, tag, first, last)
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
        """Fail deliveries. They are retried after `delay`, or after the pause of the group. One that the member had not
        begun is handed back: no try is counted, and in an ordered group the next member gets the partition."""
        mine, result = self._match(name, epoch, tag, first, last)
        for id in mine:
            if (flight := self._flights.get(id)) is None:  # it was released with an earlier one
                continue
            if flight.has_begun:
                self._fail(id, reason, now, delay)
                continue
            self._return(id, now + (delay or 0.0))
            self.handed_back += 1
            self._pass_on(name)
        return result

    def reject(self, name: str, epoch: int, tag: int, first: int, last: int, now: float, *, reason: str) -> AckResult:
        """Fail deliveries for good, as if their tries were used up."""
        mine, result = self._match(name, epoch, tag, first, last)
        for id in mine:
            if id in self._flights:
                self.state.fail(id)
                self._give_up(id, reason, now)
        return result

    def extend(self, name: str, epoch: int, tag: int, first: int, last: int, now: float) -> AckResult:
        """Restart the time of deliveries."""
        mine, result = self._match(name, epoch, tag, first, last)
        for id in mine:
            self._prolong(id, self._flights[id], now)
        return result

    def _match(self, name: str, epoch: int, tag: int, first: int, last: int) -> tuple[list[int], AckResult]:
        """Return which of these ids the member has in flight under a tag that it names, and how the rest is counted."""
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

    # -- operators -----------------------------------------------------------------------------------------------------

    def skip(self, first: int, last: int, now: float) -> int:
        """Mark a range of open ids as done; return how many there were. Ids above `reach` are left as they are."""
        skipped = sum(end - begin + 1 for begin, end, _ in self.state.open.within(first, last))
        if first <= min(last, self.state.reach):
            self._take_away(first, min(last, self.state.reach), now)
        return skipped

    def replay(self, ids: Iterable[int]) -> list[int]:
        """Open parked transactions again, with one try each; return those that were parked."""
        found = [id for id in sorted(set(ids)) if id in self.state.parked]
        for id in found:
            self.state.release(id, is_open=True)
            if id <= self.cursor:
                self._again.add(id)
        return found

    def discard(self, ids: Iterable[int]) -> list[int]:
        """Drop parked transactions for good; return those that were parked."""
        found = [id for id in sorted(set(ids)) if id in self.state.parked]
        for id in found:
            self.state.release(id, is_open=False)
        return found

    def resume(self) -> None:
        """Let a stopped group continue, with one more try of what stopped it."""
        self.state.resume()

    # -- below ---------------------------------------------------------------------------------------------------------

    def _drop(self, id: int) -> None:
        """Remove a delivery from those in flight."""
        flight = self._flights.pop(id)
        del self._members[flight.member].flights[id]
        if max(len(self._order), len(self._deadlines)) > 2 * len(self._flights) + STALE_MAX:
            self._order = sorted(self._flights)
            self._deadlines = [
                (deadline, id, tag)
                for deadline, id, tag in self._deadlines
                if (other := self._flights.get(id)) is not None and other.tag == tag
            ]
            heapify(self._deadlines)

    def _return(self, id: int, at: float) -> None:
        """Release a delivery, to be delivered again from the time `at` on."""
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
        """Settle the acknowledged deliveries at the head of an ordered group, in which nothing is settled before
        everything in front of it. The deadline of the next delivery starts then, because a member works on one
        delivery at a time."""
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
        """Remove a range of ids from the deliveries in flight, the dispatch order and the open ids."""
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
    """Join consecutive ids into ranges."""
    found: list[tuple[int, int]] = []
    for id in ids:
        if found and found[-1][1] == id - 1:
            found[-1] = found[-1][0], id
        else:
            found.append((id, id))
    return found
