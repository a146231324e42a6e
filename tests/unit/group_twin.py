"""A consumer group as one list of ids, searched from its beginning for every question: the slow twin of its table.

It decides nothing: it is told what was given out and what was said, and knows what may be given out, and what is to be
done.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

from waltzd.protocol.groups import Exhausted, Mode
from waltzd.server.groups.delivery_tracker import Delivery, GroupSettings
from waltzd.server.groups.state import GroupState


@dataclass
class Item:
    """One id that the group wants, and that is not settled."""

    order: int
    """Of all that is to be done of a key, the one with the lowest comes first."""
    key: int | None
    failures: int = 0
    not_before: float = 0.0
    member: str | None = None
    tag: int = 0
    deadline: float = 0.0
    has_begun: bool = False
    is_acknowledged: bool = False
    """In an ordered group: one before it is not."""


@dataclass
class Kept:
    """What has to come back after a change of owner."""

    open: dict[int, int] = field(default_factory=dict)
    reach: int = -1
    parked: dict[int, int] = field(default_factory=dict)
    is_stopped: bool = False


class Twin:
    def __init__(self, settings: GroupSettings) -> None:
        self.settings = settings
        self.items: dict[int, Item] = {}
        """Of this epoch: what was offered and is to be done."""
        self.kept = Kept()
        self.members: dict[str, int] = {}
        self.telling: set[str] = set()
        """Members that report what they begin."""
        self._order = 0
        self._timed = -1
        """Of an ordered group: whose time runs."""

    @property
    def is_ordered(self) -> bool:
        return self.settings.mode is Mode.ORDERED

    # -- what happens --------------------------------------------------------------------------------------------------

    def offered(self, id: int, key: int | None, *, is_wanted: bool) -> None:
        if id > self.kept.reach:
            self.kept.reach = id
            if is_wanted:
                self.kept.open[id] = 0
        if id in self.kept.open:
            self._order += 1
            self.items[id] = Item(self._order, key if self.settings.mode is Mode.KEYED else None, self.kept.open[id])

    def delivered(self, one: Delivery, now: float) -> None:
        assert one.id in self.eligible(now), f"{one} may not be given out: {self.items.get(one.id)}"
        assert one.id == min(self.eligible(now)), f"{one} goes before a lower id"
        assert one.member in self.with_room(), one
        item = self.items[one.id]
        assert one.attempt == item.failures + 1, f"{one} after {item.failures} failures"
        item.member, item.tag, item.deadline = one.member, one.tag, now + self.settings.ack_wait
        item.is_acknowledged = False
        item.has_begun = one.member not in self.telling
        if len(self.held()) == 1:
            self._timed = one.id

    def acknowledged(self, id: int, now: float) -> None:
        if not self.is_ordered:
            self._settle(id)
            return
        self.items[id].is_acknowledged = True
        self._settle_prefix(now)

    def failed(self, id: int, now: float, *, delay: float | None = None, is_final: bool = False) -> None:
        item, settings = self.items[id], self.settings
        member_before = item.member
        assert member_before is not None
        item.failures += 1
        self.kept.open[id] = item.failures
        if item.failures >= settings.deliver_max or is_final:
            if settings.exhausted is Exhausted.STOP:
                self.kept.is_stopped = True
                self.returned(id, now)
                return
            self.kept.parked[id] = item.failures
            self._settle(id)
            self._settle_prefix(now)
            return
        pauses = settings.back_off
        pause = delay if delay is not None else pauses[min(item.failures, len(pauses)) - 1] if pauses else 0.0
        self.returned(id, now + pause)

    def refused(self, id: int, now: float, *, delay: float | None) -> None:
        item = self.items[id]
        if item.has_begun:
            self.failed(id, now, delay=delay)
            return
        member = item.member
        assert member is not None
        self.returned(id, now + (delay or 0.0))
        self._pass_on(member)

    def _pass_on(self, member: str) -> None:
        """Another member gets an ordered group, once this one has nothing of it."""
        if self.is_ordered and not self.held():
            self.members[member] = self.members.pop(member)

    def returned(self, id: int, at: float) -> None:
        self.items[id].not_before = at
        for other in [id, *self._behind(id)]:
            self.items[other].member = None
            self.items[other].is_acknowledged = False

    def expired(self, now: float) -> int:
        count = 0
        while over := [id for id in self.held() if self.items[id].deadline <= now and self._is_timed(id)]:
            first = min(over, key=lambda id: (self.items[id].deadline, id))
            member = self.items[first].member
            assert member is not None
            if self.items[first].has_begun:
                self.failed(first, now)
                count += 1
            else:
                self.returned(first, now)
            self._pass_on(member)
        return count

    def _is_timed(self, id: int) -> bool:
        return not self.is_ordered or id == self.held()[0]

    def skipped(self, first: int, last: int, now: float) -> None:
        for id in [id for id in self.kept.open if first <= id <= last]:
            self._settle(id)
        self._settle_prefix(now)

    def replayed(self, id: int) -> None:
        del self.kept.parked[id]
        self.kept.open[id] = 0

    def _settle(self, id: int) -> None:
        del self.kept.open[id]
        self.items.pop(id, None)

    def _settle_prefix(self, now: float) -> None:
        if not self.is_ordered:
            return
        while (held := self.held()) and self.items[held[0]].is_acknowledged:
            self._settle(held[0])
        if held and (held[0] != self._timed):
            self._timed = held[0]
            self.items[held[0]].deadline = now + self.settings.ack_wait

    def _behind(self, id: int) -> list[int]:
        """Of an ordered group: what was given out behind it."""
        return [other for other in self.held() if self.items[other].tag > self.items[id].tag] if self.is_ordered else []

    def new_owner(self, kept: Kept) -> None:
        """Nothing but what is kept is known."""
        self.kept = deepcopy(kept)
        self.items.clear()
        self.members.clear()
        self._timed = -1

    # -- what may be ---------------------------------------------------------------------------------------------------

    def held(self) -> list[int]:
        """In somebody's hands, in the order in which it was given out."""
        found = [id for id, item in self.items.items() if item.member is not None]
        return sorted(found, key=lambda id: self.items[id].tag)

    def with_room(self) -> list[str]:
        among = list(self.members)[:1] if self.is_ordered else list(self.members)
        return [name for name in among if sum(item.member == name for item in self.items.values()) < self.members[name]]

    def eligible(self, now: float) -> list[int]:
        waiting = sorted(id for id, item in self.items.items() if item.member is None)
        if self.kept.is_stopped or not waiting:
            return []
        if self.is_ordered:
            return waiting[:1] if self.items[waiting[0]].not_before <= now else []
        return [id for id in waiting if self.items[id].not_before <= now and self._is_first(id)]

    def _is_first(self, id: int) -> bool:
        item = self.items[id]
        return item.key is None or all(other.order >= item.order for other in self.items.values() if other.key == item.key)

    def check(self, state: GroupState) -> None:
        """What is kept says the same, and nothing that is to be done lies below its floor."""
        state.check()
        found = {id: failures for first, last, failures in state.open for id in range(first, last + 1)}
        assert found == self.kept.open
        assert state.reach == self.kept.reach
        assert {id: one.failures for id, one in state.parked.items()} == self.kept.parked
        assert bool(state.stopped) is self.kept.is_stopped
        assert all(id > state.floor for id in self.kept.open)
        assert state.floor == min(self.kept.open, default=self.kept.reach + 1) - 1
