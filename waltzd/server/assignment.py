"""Who is to own which partition, given who owns it now and which servers are up. Pure.

Servers that are up and not draining share the partitions evenly. Among all even distributions the plan is one that honours
the most preferences, among those one that moves the fewest partitions, among those one that gives partitions which several
servers prefer to the first of them by name. So a plan of a plan is the same plan, and nothing moves without a reason.

The hard part is that these wishes pull in different directions. It is left to `flow`: partitions are what flows, wishes
that are not met are prices, and the cheapest flow is the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

from waltzd.meta import Assignment, Ownership, ServerMeta
from waltzd.server.flow import Network

UNOWNED = Ownership(None, 0)


def plan(current: Assignment, servers: Mapping[str, ServerMeta], partitions: int) -> Assignment:
    """The assignment that should be. Where the owner of a partition changes, its generation rises by one."""
    before = [*current.owners[:partitions], *[UNOWNED] * (partitions - len(current.owners))]
    sharing = sorted(name for name, server in servers.items() if not server.is_draining)
    if sharing:
        owners = _shared([ownership.server for ownership in before], sharing, servers)
    else:
        # With nobody to take over, those who drain go on with what they have.
        owners = [ownership.server if ownership.server in servers else None for ownership in before]
    return Assignment(
        owners=tuple(
            was if was.server == owner else Ownership(owner, was.generation + 1)
            for was, owner in zip(before, owners, strict=True)
        )
    )


def moved(before: Assignment, after: Assignment) -> Iterator[str]:
    """What changes, as parts of a sentence: "1, 4 from one to two"."""
    grouped: defaultdict[tuple[str | None, str | None], list[int]] = defaultdict(list)
    for number, now in enumerate(after.owners):
        was = before.owners[number] if number < len(before.owners) else UNOWNED
        if was.server != now.server:
            grouped[was.server, now.server].append(number)
    for (giving, taking), numbers in grouped.items():
        start = f" from {giving}" if giving is not None else ""
        yield f"{spell_numbers(numbers)}{start} to {taking or 'nobody'}"


def spell_numbers(numbers: Sequence[int]) -> str:
    """Rising numbers, ranges where that is shorter: 0, 4-7."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _shared(before: list[str | None], sharing: list[str], servers: Mapping[str, ServerMeta]) -> list[str | None]:
    """Owners by number: each partition flows from its kind to a server, straight to one that it has to do with, or else by
    way of ANYWHERE, where all are alike."""
    kinds = _kinds(before, sharing, servers)
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
    """What partitions may have in common that matters: their owner among the servers that share, and who prefers them."""

    owner: str | None
    preferring: tuple[str, ...]

    @property
    def concerned(self) -> list[str]:
        """The owner first: the lowest numbers stay."""
        others = [name for name in self.preferring if name != self.owner]
        return others if self.owner is None else [self.owner, *others]


def _kinds(before: list[str | None], sharing: list[str], servers: Mapping[str, ServerMeta]) -> dict[_Kind, list[int]]:
    preferring: list[tuple[str, ...]] = [()] * len(before)
    for name in sharing:
        for number in sorted(set(servers[name].preferred)):
            if 0 <= number < len(before):
                preferring[number] += (name,)
    kinds: defaultdict[_Kind, list[int]] = defaultdict(list)
    up = set(sharing)
    for number, owner in enumerate(before):
        kinds[_Kind(owner if owner in up else None, preferring[number])].append(number)
    return kinds


@dataclass(frozen=True, kw_only=True)
class _Prices:
    """Each wish costs more than all lesser wishes of all partitions together."""

    move: int
    dishonour: int
    uneven: int

    @classmethod
    def of(cls, partitions: int, servers: int) -> Self:
        move = partitions * servers + 1
        dishonour = (partitions + 1) * move
        return cls(move=move, dishonour=dishonour, uneven=(partitions + 1) * dishonour)

    def anywhere(self, kind: _Kind) -> int:
        """To a server that has nothing to do with partitions of this kind."""
        return (self.dishonour if kind.preferring else 0) + (self.move if kind.owner is not None else 0)

    def to(self, name: str, kind: _Kind) -> int:
        dishonour = self.dishonour if kind.preferring and name not in kind.preferring else 0
        if name == kind.owner:
            return dishonour
        return dishonour + (self.move if kind.owner is not None else 0) + kind.preferring.index(name)
