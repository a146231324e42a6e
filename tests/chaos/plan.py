"""What is broken when: rounds drawn from a seed. Nothing here touches anything, so the rules can be tried on many seeds.

A round begins its strikes, waits, and ends them; a quarter of the rounds has none. Two rules hold for every round: no two
strikes touch the same thing, because ending one would undo the other; and at most one storage is damaged, after everything
was healed and before anything else is broken, because a majority of good copies is what the promises of a cluster rest on.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STORAGES = ("storage-1", "storage-2", "storage-3")
SERVERS = ("server-1", "server-2")
ZOOKEEPER = "zookeeper"
STORAGES_AT_ONCE = "storages"
"""A target of its own: all of them."""
DAEMONS = (*STORAGES, *SERVERS, ZOOKEEPER)
SECONDS_MIN, SECONDS_MAX = 2.0, 7.0


class Part(enum.Enum):
    """What of a daemon a strike touches."""

    PROCESS = "process"
    LINK = "link"
    CLOCK = "clock"


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    targets: tuple[str, ...]
    part: Part = Part.PROCESS
    is_damaging: bool = False
    """Whether something that was acknowledged is lost on the target, until it has been copied from the others."""

    def touches(self, target: str) -> frozenset[tuple[str, Part]]:
        names = STORAGES if target == STORAGES_AT_ONCE else (target,)
        return frozenset((name, self.part) for name in names)


@dataclass(frozen=True)
class Strike:
    kind: Kind
    target: str

    @property
    def touches(self) -> frozenset[tuple[str, Part]]:
        return self.kind.touches(self.target)

    def __str__(self) -> str:
        return f"{self.kind.name} {self.target}"


@dataclass(frozen=True, kw_only=True)
class Round:
    number: int
    seconds: float
    strikes: tuple[Strike, ...]
    is_healed: bool
    """Whether to wait behind it until the cluster is whole again."""

    @property
    def is_damaging(self) -> bool:
        return any(strike.kind.is_damaging for strike in self.strikes)

    def __str__(self) -> str:
        return " + ".join(map(str, self.strikes)) or "nothing"


def draw(kinds: Sequence[Kind], seed: int) -> Iterator[Round]:
    """Without end. The same kinds and the same seed give the same rounds."""
    assert kinds
    pick = random.Random(seed)
    deck: list[Kind] = []
    number = 0
    while True:
        number += 1
        strikes: list[Strike] = []
        for _ in range(pick.choice((0, 1, 1, 2, 2, 2, 3, 0))):
            if not deck:  # each kind once before any comes again
                deck = pick.sample(kinds, len(kinds))
            strike = _aim(deck, strikes, pick)
            if strike is not None:
                strikes.append(strike)
        is_damaging = any(strike.kind.is_damaging for strike in strikes)
        yield Round(
            number=number,
            seconds=round(pick.uniform(SECONDS_MIN, SECONDS_MAX), 2),
            strikes=tuple(strikes),
            is_healed=is_damaging or pick.random() < 0.4,
        )


def _aim(deck: list[Kind], strikes: Sequence[Strike], pick: random.Random) -> Strike | None:
    """The next kind that can go with the others; it leaves the deck."""
    for place, kind in enumerate(deck):
        targets = [target for target in kind.targets if goes_with(Strike(kind, target), strikes)]
        if targets:
            del deck[place]
            return Strike(kind, pick.choice(targets))
    return None


def goes_with(strike: Strike, strikes: Sequence[Strike]) -> bool:
    if strike.kind.is_damaging and any(other.kind.is_damaging for other in strikes):
        return False
    return not any(strike.touches & other.touches for other in strikes)
