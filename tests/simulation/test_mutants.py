"""The simulator must be able to fail: each mutant is caught by one of the seeds that are stored beside it, each edit by the
tests or the drawn seeds that are named beside it.

`./dev mutants` looks for such seeds, also for a mutant whose stored ones have become useless because
plans are drawn in another way.
"""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.simulation.edit import ROOT
from tests.simulation.edits import EDITS
from tests.simulation.mutant import MUTANTS, Aim, Mutant, Patches
from tests.simulation.mutants import catch
from tests.simulation.world import simulate
from tests.tiers import in_turns, together
from waltzd.storage.replica.segment import Segment

SOUND = (
    "acknowledges before it flushes",
    "gives a member more than it has room for",
)
"""Mutants whose plans are run with the code as it is, too."""


QUICK = (
    "answers half a batch early",
    "copies segments beyond the mark that it was given",
    "writes a promise into one slot only",
)
"""Edits that are run with every run of the tests; `./dev mutants` runs all."""


LONG = {
    "accepts an acknowledgement of an old epoch",
    "answers all that is in flight when it ends",
    "begins where the removed group of the name stood",
    "believes the first instance that comes to a new owner",
    "commits with a minority",
    "confirms a mark without asking",
    "cuts one record too many",
    "does not end streams of a session that is over",
    "does not flush the control file",
    "does not read how far a replica had acknowledged",
    "forgets quotas",
    "forgets the filter after a change of owner",
    "forgets what a lost member had",
    "gives deliveries beyond the quota",
    "goes on behind another end",
    "goes on in a session that is over",
    "hands on a frame of the feed twice",
    "hangs after a change of owner",
    "ignores incarnations",
    "keeps no failures",
    "keeps the rights of mounts that stand",
    "leaves out what lies behind one that failed",
    "lets a wiped disk vote",
    "lets an older instance mount again",
    "lowers the floor below what was read",
    "moves the floor past an unacknowledged id",
    "parks at the first failure",
    "says that it is kept when it was heard",
    "says that it is sound when it is damaged",
    "takes appends of a session that is over",
    "takes what a filter wants for what it leaves out",
    "takes what it sent on an older stream for acknowledged",
    "truncates to one above the mark",
}
"""Mutants that take more than two seconds of a processor, or change what another one changes that is shown sooner: each
family keeps some in the short set, of which each run takes a quarter. `./dev mutants` and `./dev test --all` run all."""
UNCAUGHT = {"", "TypeError", "AttributeError", "NameError"}
"""Nothing was wrong, or the mutant itself is broken."""


@cache
def names_in(file: str) -> frozenset[str]:
    """Functions and classes of a module of tests; none where there is no such file."""
    path = ROOT / file
    found = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.parse("")
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return frozenset(one.name for one in ast.walk(found) if isinstance(one, kinds))


@cache
def folded_in(file: str) -> frozenset[str]:
    """Tests of a module that try all their cases `together`, so that no case has a name."""
    found = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    tests = (one for one in found.body if isinstance(one, ast.FunctionDef))
    return frozenset(one.name for one in tests if any("together(" in ast.unparse(how) for how in one.decorator_list))


def _has_test(node: str) -> bool:
    plain, _, case = node.partition("[")
    file, *names = plain.split("::")
    return bool(names) and names_in(file).issuperset(names) and not (case and names[-1] in folded_in(file))


@together("name", sorted(EDITS, key=lambda name: (EDITS[str(name)].module, name)))  # one parse for a module
def test_what_an_edit_changes_is_there_and_it_says_what_catches_it(name: str) -> None:
    edit = EDITS[name]
    assert edit.text(), "the lines are there once, and with the others in their place it is Python"
    assert edit.tests or edit.seeds, "nothing catches it"
    assert all(0 <= seed < 60 for seed in edit.seeds)
    assert [node for node in edit.tests if not _has_test(node)] == [], "there are no such tests"


@pytest.mark.parametrize("name", QUICK)
def test_a_test_of_the_room_catches_what(name: str) -> None:
    found = catch(EDITS[name])
    assert found.caught, found


@together("name", sorted(MUTANTS))
def test_what_a_mutant_changes_is_there(name: str) -> None:
    with MUTANTS[name].applied():
        assert MUTANTS[name].seeds, "the seeds that catch it are not stored beside it"


@pytest.mark.parametrize(
    "name",
    [
        *in_turns(sorted(MUTANTS.keys() - LONG), of=4),
        *(pytest.param(name, marks=pytest.mark.long) for name in sorted(MUTANTS.keys() & LONG)),
    ],
)
def test_the_simulator_catches_an_engine_that(name: str) -> None:
    mutant = MUTANTS[name]
    kinds = set()
    for seed in mutant.seeds:
        kinds.add(mutant.run(seed).kind)
        if kinds - UNCAUGHT:
            return
    pytest.fail(f"seeds {mutant.seeds} find nothing, or that the mutant itself is broken: {kinds}; {mutant.wrong}")


@pytest.mark.parametrize("name", SOUND)
def test_the_engine_as_it_is_passes_the_same_plan(name: str) -> None:
    mutant = MUTANTS[name]
    outcome = simulate(mutant.aim.plan(mutant.seeds[0]))
    assert outcome.kind == "", outcome.story


def test_what_is_long_is_a_mutant() -> None:
    assert MUTANTS.keys() >= LONG


def test_a_mutant_of_what_is_called_in_another_way_is_noticed() -> None:
    with pytest.raises(AssertionError, match="in another way"):
        Patches().set(Segment, "write", lambda self: None)
    with pytest.raises(AssertionError, match="in another way"):
        Patches().set(Segment, "flush", lambda self, how: None)


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
