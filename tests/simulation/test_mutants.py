"""The simulator must be able to fail: each mutant is caught by one of the seeds that are stored beside it.

`./dev mutants` looks for such seeds, also for a mutant whose stored ones have become useless because
plans are drawn in another way.
"""

from __future__ import annotations

import pytest

import tests.simulation.mutants  # noqa: F401  registers all of them
from tests.simulation.mutant import MUTANTS, Aim, Mutant, Patches
from tests.simulation.world import simulate
from waltzd.storage.segment import Segment

SOUND = (
    "acknowledges before it flushes",
    "commits with a minority",
    "lets a wiped disk vote",
    "marks locks when they are committed",
    "sends again what was not answered",
)
"""Mutants whose plans are run with the code as it is, too."""


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_simulator_catches_an_engine_that(name: str) -> None:
    mutant = MUTANTS[name]
    assert mutant.seeds, "the seeds that catch it are not stored beside it"
    assert any(mutant.run(seed).kind for seed in mutant.seeds), f"seeds {mutant.seeds} find nothing wrong: {mutant.wrong}"


@pytest.mark.parametrize("name", SOUND)
def test_the_engine_as_it_is_passes_the_same_plan(name: str) -> None:
    mutant = MUTANTS[name]
    outcome = simulate(mutant.aim.plan(mutant.seeds[0]))
    assert outcome.kind == "", outcome.story


def test_a_mutant_leaves_nothing_behind() -> None:
    def replace_all(patches: Patches) -> None:
        patches.set(Segment, "flush", lambda self: None)
        patches.wrap(Segment, "flush", lambda right: right)
        patches.set(Segment, "open", staticmethod(lambda: None))

    before = dict(vars(Segment))
    mutant = Mutant("breaks", "It breaks.", Aim(), (), replace_all)

    def fail() -> None:
        with mutant.applied():
            assert vars(Segment)["flush"] is not before["flush"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert dict(vars(Segment)) == before
