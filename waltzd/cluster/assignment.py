"""Plan which server owns which partition, given the current owners and the servers that are up. Pure.

Servers that are up and not draining share the partitions evenly. Among all even distributions, the plan is chosen by these
rules in order: meet the most preferences of operators; meet the most preferences of the servers' own configuration; move
the fewest partitions; give a partition that several servers prefer to the first of them by name. Planning a plan again
returns it unchanged, so nothing moves without a reason. If an operator prefers a server that takes part, the preferences
of server configurations for that partition are ignored.

The rules conflict with each other. `Network` solves this as a minimum-cost flow: partitions are the flow, unmet
preferences are prices, and the cheapest flow is the plan.

A `Network` consists of pipes, each with a capacity and a price.

`Network.send` repeatedly finds all cheapest routes that have capacity left and fills them, so the price of the amount that
was sent is always the minimum for that amount. Flow can be sent back through a used pipe, which refunds its price: that
is how an early choice is corrected later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

from waltzd.cluster.documents import Assignment, Ownership, Preferences, ServerMeta


class Network:
    """A network of `places` nodes, numbered from 0. Prices are never negative."""

    def __init__(self, places: int) -> None:
        self._pipes: list[list[int]] = [[] for _ in range(places)]
        """Pipes that leave each place. A pipe and its reverse have the numbers 2n and 2n + 1."""
        self._ends: list[int] = []
        self._room: list[int] = []
        self._prices: list[int] = []

    def add(self, start: int, end: int, *, capacity: int, price: int) -> int:
        """Add a pipe and return its number."""
        assert capacity >= 0
        assert price >= 0
        pipe = len(self._ends)
        self._pipes[start].append(pipe)
        self._pipes[end].append(pipe + 1)
        self._ends += (end, start)
        self._room += (capacity, 0)
        self._prices += (price, -price)
        return pipe

    def sent(self, pipe: int) -> int:
        """Return the amount that flows through the pipe."""
        return self._room[pipe + 1]

    def send(self, source: int, target: int) -> int:
        """Send as much as possible from `source` to `target`; return the amount."""
        total = 0
        while (prices := self._price_from(source))[target] is not None:
            total += self._fill(source, target, prices)
        return total

    def _price_from(self, source: int) -> list[int | None]:
        """Return the price of the cheapest route to each place; None for a place without a route."""
        found: list[int | None] = [None] * len(self._pipes)
        found[source] = 0
        waiting, is_waiting = deque([source]), [False] * len(self._pipes)
        while waiting:
            place = waiting.popleft()
            is_waiting[place] = False
            so_far = found[place]
            assert so_far is not None
            for pipe in self._pipes[place]:
                end, price = self._ends[pipe], so_far + self._prices[pipe]
                known = found[end]
                if self._room[pipe] and (known is None or price < known):
                    found[end] = price
                    if not is_waiting[end]:
                        is_waiting[end] = True
                        waiting.append(end)
        return found

    def _fill(self, source: int, target: int, prices: list[int | None]) -> int:
        """Send as much as the cheapest routes can carry, those with the fewest pipes first; return the amount."""
        total = 0
        while (steps := self._steps_from(source, prices))[target] is not None:
            total += self._fill_shortest(source, target, prices, steps)
        return total

    def _is_on_route(self, pipe: int, start: int, prices: list[int | None]) -> bool:
        price = prices[start]
        return self._room[pipe] > 0 and price is not None and price + self._prices[pipe] == prices[self._ends[pipe]]

    def _steps_from(self, source: int, prices: list[int | None]) -> list[int | None]:
        """Return the number of pipes to each place on the cheapest routes; None for a place that they do not reach."""
        steps: list[int | None] = [None] * len(self._pipes)
        steps[source] = 0
        reached = [source]
        number = 0
        while reached:
            number += 1
            following = []
            for place in reached:
                for pipe in self._pipes[place]:
                    end = self._ends[pipe]
                    if steps[end] is None and self._is_on_route(pipe, place, prices):
                        steps[end] = number
                        following.append(end)
            reached = following
        return steps

    def _fill_shortest(self, source: int, target: int, prices: list[int | None], steps: list[int | None]) -> int:
        """Walk along the cheapest routes: fill a route at the target, go back one pipe at a dead end. Return the amount."""
        total, place = 0, source
        route: list[int] = []
        tried = [0] * len(self._pipes)
        while True:
            if place == target:
                amount = min(self._room[pipe] for pipe in route)
                for pipe in route:
                    self._room[pipe] -= amount
                    self._room[pipe ^ 1] += amount
                total += amount
                full = next(at for at, pipe in enumerate(route) if not self._room[pipe])
                place = self._ends[route[full] ^ 1]
                del route[full:]
            elif tried[place] < len(self._pipes[place]):
                pipe = self._pipes[place][tried[place]]
                end = self._ends[pipe]
                if self._is_on_route(pipe, place, prices) and steps[end] == len(route) + 1:
                    route.append(pipe)
                    place = end
                else:
                    tried[place] += 1
            elif route:
                place = self._ends[route.pop() ^ 1]
                tried[place] += 1
            else:
                return total


UNOWNED = Ownership(None, 0)
NO_PREFERENCES = Preferences(partitions={})


def plan(
    current: Assignment,
    servers: Mapping[str, ServerMeta],
    partitions: int,
    preferences: Preferences = NO_PREFERENCES,
) -> Assignment:
    """Return the planned assignment. The generation of each partition that gets another owner rises by one. `preferences`
    are those of operators."""
    before = [*current.owners[:partitions], *[UNOWNED] * (partitions - len(current.owners))]
    sharing = sorted(name for name, server in servers.items() if not server.is_draining)
    if sharing:
        owners = _shared([ownership.server for ownership in before], sharing, servers, preferences)
    else:
        # If no server can take over, draining servers keep their partitions.
        owners = [ownership.server if ownership.server in servers else None for ownership in before]
    return Assignment(
        owners=tuple(
            was if was.server == owner else Ownership(owner, was.generation + 1)
            for was, owner in zip(before, owners, strict=True)
        )
    )


def transferred(
    current: Assignment, servers: Mapping[str, ServerMeta], preferences: Preferences, numbers: Collection[int], to: str
) -> Assignment:
    """Return the assignment if an operator preferred these partitions at server `to`, with all moves that keep it even."""
    wishes = {**preferences.partitions, **dict.fromkeys(numbers, to)}
    return plan(current, servers, len(current.owners), Preferences(partitions=wishes))


def obstacles(
    after: Assignment, servers: Mapping[str, ServerMeta], preferences: Preferences, numbers: Collection[int], to: str
) -> list[str]:
    """Return the reasons why a transfer would not last, as sentences; empty if it would. `transferred` returned `after`."""
    wishes = {number: names for number, names in preferring(servers, preferences, len(after.owners)).items() if names}

    def preferred(number: int, name: str) -> str:
        if preferences.partitions.get(number) == name:
            return f"an operator prefers partition {number} at {name}"
        return f"{name} prefers partition {number} by itself"

    left = [number for number in sorted(numbers) if after.owners[number].server != to]
    if left:
        having = [number for number, owner in enumerate(after.owners) if owner.server == to]
        held = [preferred(number, to) for number in having if number not in numbers and to in wishes.get(number, ())]
        count = format_partition_count(len(having))
        share = f"an even share of {to} is {count}, so {format_numbers(left)} cannot go there as well"
        return [share, *held]
    lasting = plan(after, servers, len(after.owners), preferences)
    return [
        preferred(number, now.server)
        for number, (was, now) in enumerate(zip(after.owners, lasting.owners, strict=True))
        if was != now and now.server is not None and now.server in wishes.get(number, ())
    ]


def preferring(servers: Mapping[str, ServerMeta], preferences: Preferences, partitions: int) -> dict[int, tuple[str, ...]]:
    """Return the names of the servers that prefer each partition and take part in the assignment.

    If an operator names one of them for a partition, it is the only one."""
    found: dict[int, tuple[str, ...]] = dict.fromkeys(range(partitions), ())
    for name in sorted(servers):
        if not servers[name].is_draining:
            for number in sorted(set(servers[name].preferred)):
                if number in found:
                    found[number] += (name,)
    for number, name in preferences.partitions.items():
        if number in found and name in servers and not servers[name].is_draining:
            found[number] = (name,)
    return found


def format_partition_count(partitions: int) -> str:
    return f"{partitions} partition{'' if partitions == 1 else 's'}"


def moved(before: Assignment, after: Assignment) -> Iterator[str]:
    """Yield the changes as parts of a sentence: "1, 4 from one to two"."""
    grouped: defaultdict[tuple[str | None, str | None], list[int]] = defaultdict(list)
    for number, now in enumerate(after.owners):
        was = before.owners[number] if number < len(before.owners) else UNOWNED
        if was.server != now.server:
            grouped[was.server, now.server].append(number)
    for (giving, taking), numbers in grouped.items():
        start = f" from {giving}" if giving is not None else ""
        yield f"{format_numbers(numbers)}{start} to {taking or 'no server'}"


def format_numbers(numbers: Sequence[int]) -> str:
    """Format rising numbers as a list of numbers and ranges: 0, 4-7."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _shared(
    before: list[str | None], sharing: list[str], servers: Mapping[str, ServerMeta], preferences: Preferences
) -> list[str | None]:
    """Return the owner of each partition.

    Each partition flows from its kind to a server: directly to a server that owns or prefers it, or through the node
    _ANYWHERE to any other server at the same price."""
    kinds = _kinds(before, sharing, servers, preferences)
    place = {name: _FIRST_SERVER + at for at, name in enumerate(sharing)}
    network = Network(_FIRST_SERVER + len(sharing) + len(kinds))
    prices = _Prices.of(len(before), len(sharing))
    least, more = divmod(len(before), len(sharing))
    direct: dict[_Kind, list[tuple[str, int]]] = {}
    for at, (kind, numbers) in enumerate(kinds.items(), _FIRST_SERVER + len(sharing)):
        network.add(_SOURCE, at, capacity=len(numbers), price=0)
        network.add(at, _ANYWHERE, capacity=len(numbers), price=prices.anywhere(kind))
        direct[kind] = [
            (name, network.add(at, place[name], capacity=len(numbers), price=prices.to(name, kind)))
            for name in kind.concerned
        ]
    to_anybody = {name: network.add(_ANYWHERE, place[name], capacity=least + 1, price=0) for name in sharing}
    for name in sharing:
        network.add(place[name], _TARGET, capacity=least, price=0)
        network.add(place[name], _TARGET, capacity=min(more, 1), price=prices.uneven)
    sent = network.send(_SOURCE, _TARGET)
    assert sent == len(before), "every partition has room somewhere"

    owners: list[str | None] = [None] * len(before)
    left: list[int] = []
    for kind, numbers in kinds.items():
        waiting = iter(numbers)
        for name, pipe in direct[kind]:
            for number in islice(waiting, network.sent(pipe)):
                owners[number] = name
        left += waiting
    waiting = iter(sorted(left))
    for name, pipe in to_anybody.items():
        for number in islice(waiting, network.sent(pipe)):
            owners[number] = name
    return owners


_SOURCE, _TARGET, _ANYWHERE, _FIRST_SERVER = range(4)


@dataclass(frozen=True)
class _Kind:
    """Partitions with the same owner and the same preferences; the plan treats them alike."""

    owner: str | None
    """Current owner, if it takes part in the assignment."""
    preferring: tuple[str, ...]
    """Servers that prefer these partitions."""
    is_wanted: bool
    """Whether the preference is an operator's; `preferring` then has one name."""

    @property
    def concerned(self) -> list[str]:
        """Return the servers that own or prefer these partitions, the owner first: the lowest numbers stay with it."""
        others = [name for name in self.preferring if name != self.owner]
        return others if self.owner is None else [self.owner, *others]


def _kinds(
    before: list[str | None], sharing: list[str], servers: Mapping[str, ServerMeta], preferences: Preferences
) -> dict[_Kind, list[int]]:
    names = preferring(servers, preferences, len(before))
    kinds: defaultdict[_Kind, list[int]] = defaultdict(list)
    up = set(sharing)
    for number, owner in enumerate(before):
        is_wanted = preferences.partitions.get(number) in up
        kinds[_Kind(owner if owner in up else None, names[number], is_wanted)].append(number)
    return kinds


@dataclass(frozen=True, kw_only=True)
class _Prices:
    """Price of each unmet rule: more than all lesser rules of all partitions together."""

    move: int
    """Price of a partition that gets another owner."""
    dishonour: int
    """Price of an unmet preference of a server's configuration."""
    refuse: int
    """Price of an unmet preference of an operator."""
    uneven: int
    """Price of one partition above the even share."""

    @classmethod
    def of(cls, partitions: int, servers: int) -> Self:
        move = partitions * servers + 1
        dishonour = (partitions + 1) * move
        refuse = (partitions + 1) * dishonour
        return cls(move=move, dishonour=dishonour, refuse=refuse, uneven=(partitions + 1) * refuse)

    def anywhere(self, kind: _Kind) -> int:
        """Return the price of a server that neither owns nor prefers partitions of this kind."""
        return self._against(kind) + (self.move if kind.owner is not None else 0)

    def to(self, name: str, kind: _Kind) -> int:
        against = 0 if name in kind.preferring else self._against(kind)
        if name == kind.owner:
            return against
        return against + (self.move if kind.owner is not None else 0) + kind.preferring.index(name)

    def _against(self, kind: _Kind) -> int:
        if not kind.preferring:
            return 0
        return self.refuse if kind.is_wanted else self.dishonour
