"""What a mutant is: the real code with one rule taken out for the time of a run, and the faults that aim at it best.

A mutant is a function that is given `Patches` and replaces parts of classes or modules with them. Afterwards everything
stands as before, whatever the run did. Nothing in `waltzd/` knows of this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, TypeAlias

from tests.simulation.plan import Plan, make_plan, names
from tests.simulation.world import Outcome, simulate


def takes_the_same(before: Any, value: Any) -> bool:
    """Whether each call of one function is a call of the other. Values that are no functions are not asked."""
    if not isinstance(before, FunctionType) or not isinstance(value, FunctionType):
        return True
    expected = list(inspect.signature(before).parameters.values())
    given = inspect.signature(value)
    places = [one.name for one in expected if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    named = {one.name: None for one in expected if one.kind is one.KEYWORD_ONLY}
    least = [
        one.name
        for one in expected
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
    ]
    least_named = {one.name: None for one in expected if one.kind is one.KEYWORD_ONLY and one.default is one.empty}
    try:
        given.bind(*places, **named)
        given.bind(*least, **least_named)
    except TypeError:
        return False
    return True


class Patches:
    """Replaced attributes of classes and modules, and how they were."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner)[name]  # as it stands there: a property stays one
        assert takes_the_same(before, value), f"{name} is called in another way meanwhile: what catches this is a TypeError"
        self._before.append((owner, name, before))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """`make` gets what stands there, and makes what shall stand there."""
        self.set(owner, name, make(vars(owner)[name]))

    def undo(self) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            setattr(owner, name, value)


Apply: TypeAlias = Callable[[Patches], None]


@dataclass(frozen=True, kw_only=True)
class Aim:
    """The plans in which a mutant shows soonest. What is None is drawn."""

    faults: tuple[str, ...] | None = None
    seconds: float | None = 5.0
    storages: int | None = None
    servers: int | None = None
    clients: int | None = 2
    format: int | None = 0
    setup: dict[str, Any] = field(default_factory=dict)
    """More fields of the setup that are not drawn."""

    def plan(self, seed: int) -> Plan:
        plan = make_plan(
            seed,
            faults=self.faults,
            seconds=self.seconds,
            storages=self.storages,
            servers=self.servers,
            clients=self.clients,
        )
        fixed = self.setup if self.faults is None else {"lease_seconds": 0.0, **self.setup}
        if self.format is not None:
            fixed = {"format": self.format, **fixed}
        setup = replace(plan.setup, **fixed)
        missing = set(names("member", plan.setup.members)) - set(names("member", setup.members))
        events = tuple(event for event in plan.events if event.who not in missing)
        return replace(plan, setup=setup, events=events)


BUSY: dict[str, Any] = {"rate": 40.0, "partitions": 1, "session_seconds": 1.5, "keep_alive_seconds": 1.5}
"""Something is in flight when something goes wrong."""
BUSIER: dict[str, Any] = {**BUSY, "rate": 200.0}
"""Most of the time: a replica that was told that something is committed makes up for one that has forgotten it."""


TWO_OWNERS = Aim(
    faults=("cut", "pause"), seconds=10.0, servers=2, setup={**BUSIER, "rate": 100.0, "keep_alive_seconds": 6.0}
)
"""The old one is not heard for a while by the coordinator, and goes on when there is a new one."""


@dataclass(frozen=True)
class Mutant:
    name: str
    wrong: str
    """What is wrong with it, in a sentence."""
    aim: Aim
    seeds: tuple[int, ...]
    """Some that are known to catch it. Empty: not known yet."""
    apply: Apply

    @contextmanager
    def applied(self) -> Iterator[None]:
        patches = Patches()
        try:
            self.apply(patches)
            yield
        finally:
            patches.undo()

    def run(self, seed: int) -> Outcome:
        with self.applied():
            return simulate(self.aim.plan(seed))


MUTANTS: dict[str, Mutant] = {}


def mutant(*seeds: int, aim: Aim) -> Callable[[Apply], Apply]:
    """The name is that of the function, the sentence its docstring."""

    def register(apply: Apply) -> Apply:
        name = apply.__name__.replace("_", " ")
        assert name not in MUTANTS, f"there are two mutants that {name}"
        assert apply.__doc__, f"what is wrong with the mutant that {name}?"
        MUTANTS[name] = Mutant(name, " ".join(apply.__doc__.split()), aim, seeds, apply)
        return apply

    return register
