"""Recovery in any order of events: nothing that was committed is ever lost or changed, and the log opens again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.simulation.recovery_model import Violation, World
from tests.unit.waltzd.server.core import test_progress
from tests.unit.waltzd.server.core.test_recovery import (
    test_a_promise_that_was_made_before_ours_is_measured_by_what_was_known_then as hard_states,
)
from tests.unit.waltzd.server.core.test_recovery_stories import tell
from waltzd.protocol.quorum import reached
from waltzd.server.core import progress as progress_module
from waltzd.server.core.progress import Marks, Progress
from waltzd.server.core.recovery import Level, Recovery

STEPS = 1500
SHORT, SEEDS = 20, 150
"""As many with each number of storages in each run of the tests, and in a long one."""


def explore(seed: int, names: int) -> World:
    world = World(seed, names)
    try:
        world.run(STEPS)
        if not world.may_forget and not world.may_tear:
            world.heal()
    except (Violation, AssertionError) as error:
        story = "\n".join(world.trace[-60:])
        raise AssertionError(f"seed {seed} with {names} storages: {error}\n{story}") from error
    return world


@pytest.mark.parametrize(
    ("sizes", "seeds"),
    [
        ((3, 4, 5), range(SHORT)),
        *(pytest.param((names,), range(SHORT, SEEDS), marks=pytest.mark.long) for names in (3, 4, 5)),
    ],
)
def test_what_was_committed_stays(sizes: tuple[int, ...], seeds: range) -> None:
    worlds = opened = committed = mended = refused = 0
    for seed, names in itertools.product(seeds, sizes):
        world = explore(seed, names)
        worlds += 1
        opened += world.opened
        committed += len(world.committed)
        mended += world.mended
        refused += world.refused
    assert opened > 2 * worlds, "the model opens few sessions: it does not test much"
    assert committed > 20 * worlds, "the model commits little: it does not test much"
    assert refused > worlds / 40, "documents that went back are hardly ever noticed: the model does not test that"
    assert mended >= worlds / 60, "hardly anybody is mended to vote: the model does not test that"


def trust_everybody(self: Recovery, name: str) -> tuple[int, int]:
    return self.trusted(name), self.trusted(name)


def silent_hold_nothing(self: Recovery, name: str) -> tuple[int, int]:
    low, high = BOUNDS(self, name)
    return (low, low) if self.status(name) is None else (low, high)


def forgetful_hold_nothing(self: Recovery, name: str) -> tuple[int, int]:
    low, high = BOUNDS(self, name)
    return (low, low) if self.status(name) is not None else (low, high)


def everybody_remembers(self: Recovery, name: str) -> bool:
    return self.status(name) is not None and name in self.meta.joined


def unsaved_decision(self: Recovery) -> int | None:
    return MARK(self) if MARK(self) is not None else self.decide()


def one_is_enough(self: Recovery) -> bool:
    return any(isinstance(self.next_for(name), Level) for name in self.members)


def assigned_ones_vote(self: Recovery) -> int | None:
    members = self.meta.members
    object.__setattr__(self.meta, "members", tuple(self.roles) if self.meta.opened else members)
    try:
        return DECIDE(self)
    finally:
        object.__setattr__(self.meta, "members", members)


def everything_is_lineage(self: Recovery, name: str) -> int:
    return self.held(name) if self.status(name) is not None else -1


def whatever_it_holds(self: Recovery, name: str, above: int, mark: int) -> tuple[int, tuple[str, ...]]:
    return mark, self.sources(name, above)


def the_torn_hold_what_is_sound(self: Recovery, name: str) -> bool:
    status = self.status(name)
    return KNOWS(self, name) or (status is not None and not status.is_sound)


def promises_do_not_matter(self: Recovery, name: str, status: Any) -> Any:
    return CONTRADICTION(self, name, replace(status, promised_session=-1))


def marks_do_not_matter(self: Recovery, state: Any, status: Any) -> int:
    return LEAST(self, replace(state, acknowledged=-1), status)


def only_recorded_marks_matter(self: Recovery, state: Any, status: Any) -> int:
    return int(state.acknowledged)


def join_without_saving(self: Marks, progress: Mapping[str, Progress], joined: Sequence[str], low_mark: int) -> None:
    INIT(self, progress, tuple(progress), low_mark)


def majority_of_the_joined(marks: Iterable[int], members: int) -> int:
    known = list(marks)
    return reached(known, len(known))


BOUNDS, MARK, DECIDE, INIT = Recovery._bounds, Recovery.mark.fget, Recovery.decide, Marks.__init__  # type: ignore[attr-defined]
KNOWS, CONTRADICTION, LEAST = Recovery.knows_its_end, Recovery._contradiction, Recovery._least
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "the silent hold nothing": (Recovery, "_bounds", silent_hold_nothing),
    "the forgetful hold nothing": (Recovery, "_bounds", forgetful_hold_nothing),
    "every vote is as good": (Recovery, "_bounds", trust_everybody),
    "nobody ever forgets": (Recovery, "is_faithful", everybody_remembers),
    "the decision is acted upon before it is saved": (Recovery, "mark", property(unsaved_decision)),
    "one level replica is enough to open": (Recovery, "has_level_majority", property(one_is_enough)),
    "those who are assigned now vote": (Recovery, "decide", assigned_ones_vote),
    "whatever a replica holds is the log": (Recovery, "trusted", everything_is_lineage),
    "a source gives whatever it holds": (Recovery, "sources_for", whatever_it_holds),
    "whoever is torn knows its end": (Recovery, "knows_its_end", the_torn_hold_what_is_sound),
    "who forgot its session is cut before its vote is taken away": (Recovery, "has_joined", lambda self, name: False),
    "whom a storage had promised itself to does not matter": (Recovery, "_contradiction", promises_do_not_matter),
    "a session is taken before anybody was asked": (Recovery, "has_asked_enough", property(lambda self: True)),
    "how far a replica had acknowledged does not matter": (Recovery, "_least", marks_do_not_matter),
    "a member may hold less than its session began with": (Recovery, "_least", only_recorded_marks_matter),
    "members count before they have joined": (Marks, "__init__", join_without_saving),
    "a majority of those who answer": (progress_module, "reached", majority_of_the_joined),
}


CAUGHT_BY: dict[str, Callable[[], None]] = {
    "a source gives whatever it holds": partial(tell, "copy-in-progress"),
    "whoever is torn knows its end": partial(tell, "torn-write-of-the-longest"),
    "whom a storage had promised itself to does not matter": partial(hard_states, None, 2, True),
    "who forgot its session is cut before its vote is taken away": partial(tell, "forgot-that-it-had-begun"),
    "a session is taken before anybody was asked": partial(tell, "who-has-to-be-asked"),
    "how far a replica had acknowledged does not matter": partial(tell, "disk-put-back"),
    "a member may hold less than its session began with": partial(tell, "less-than-the-low-mark"),
    "a majority of those who answer": test_progress.test_the_committed_mark_is_what_a_majority_of_all_members_reached,
}
"""Mistakes that show seldom in random orders, and the story that shows them."""


@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that no mistake can fail proves nothing."""
    owner, attribute, wrong = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    if name in CAUGHT_BY:
        with pytest.raises(AssertionError):
            CAUGHT_BY[name]()
        return
    for seed in range(400):
        try:
            explore(seed, 3 + seed % 4 % 3)
        except AssertionError:
            return
    pytest.fail("nothing in 400 seeds")
