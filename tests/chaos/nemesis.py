"""What all nemeses have in common: each breaks one thing and mends it again, and says when that is not possible here."""

from __future__ import annotations

import abc
import random
from collections.abc import Callable
from typing import ClassVar

from tests.chaos.plan import Kind, Part
from tests.chaos.world import World

Refusal = Callable[[], str | None]


def always() -> str | None:
    return None


class Nemesis(abc.ABC):
    """One strike. `end` is called also when `begin` failed halfway, and leaves nothing of it."""

    kind: ClassVar[Kind]
    refusal: ClassVar[Refusal]
    """Why it is not possible on this machine; None when it is."""
    is_fair: ClassVar[bool] = True
    """Whether a cluster is expected to stand it. Those that are not are only done when they are named."""

    def __init__(self, world: World, target: str, pick: random.Random) -> None:
        self.world = world
        self.target = target
        self.pick = pick
        self.names = world.members(target)
        """The daemons that it is aimed at."""
        self.remarks: list[str] = []
        """What is worth a word in the report."""

    def __str__(self) -> str:
        return f"{self.kind.name} {self.target}" + (f" ({', '.join(self.remarks)})" if self.remarks else "")

    @abc.abstractmethod
    async def begin(self) -> None: ...

    @abc.abstractmethod
    async def end(self) -> None: ...

    async def heal(self) -> None:
        """Behind the end of a round with damage: until nothing of it is left. Nothing else is broken then."""
        return


def a_kind(
    name: str, targets: tuple[str, ...], part: Part = Part.PROCESS, *, refusal: Refusal = always, is_damaging: bool = False
) -> Callable[[type[Nemesis]], type[Nemesis]]:
    """Give a nemesis its name, and what it is aimed at."""

    def name_it(made: type[Nemesis]) -> type[Nemesis]:
        made.kind = Kind(name=name, targets=targets, part=part, is_damaging=is_damaging)
        made.refusal = staticmethod(refusal)
        assert name not in NEMESES
        NEMESES[name] = made
        return made

    return name_it


NEMESES: dict[str, type[Nemesis]] = {}
"""All that there are, by name; the modules of nemeses fill it."""
