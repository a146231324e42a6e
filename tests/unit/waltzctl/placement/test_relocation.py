"""Hundreds of sequences of what operators do, at any moment, to a cluster in which anything may fall silent. Three tools
that move replicas wrongly must be found by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from tests.unit.operators import go_all
from tests.unit.relocation_model import Violation
from waltzctl.placement import replica_moves
from waltzd.cluster.documents import Membership, ReplicaSets

MUTANT_SEQUENCES = 400
"""How many may be tried until a mutant is found; each begins shortly before the one that has found it."""
right_step, right_sets = replica_moves.next_step, replica_moves.applied


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_operators_at_any_moment(sequences: int) -> None:
    ends = go_all(range(sequences))
    for verb in ("add", "remove", "replace", "assign", "unassign", "set", "offline"):
        assert ends[f"{verb}: done"] > 10, ends
        assert ends[f"{verb}: killed"] > 3, ends
    assert ends["unassign: W2100"] > 10, "what is unsafe was asked for, too"
    assert sum(count for end, count in ends.items() if end.endswith("W2025")) > 0, "tools were in each other's way"


def everybody_is_level(view: replica_moves.PartitionMove) -> replica_moves.Step:
    """Old ones go before new ones are level."""
    if view.was_opened and not view.missing and not view.waiting and view.surplus:
        return replica_moves.Drop(view.surplus[0])
    return right_step(view)


def two_at_once(sets: ReplicaSets, steps: Mapping[int, replica_moves.Step]) -> ReplicaSets:
    """Who goes takes another one along."""
    after = right_sets(sets, steps)
    partitions = {number: dict(roles) for number, roles in after.partitions.items()}
    for number, step in steps.items():
        others = [
            name for name, role in partitions[number].items() if role is Membership.MEMBER and name in SURPLUS[number]
        ]
        if isinstance(step, replica_moves.Drop) and others:
            del partitions[number][others[0]]
    return replace(after, partitions=partitions)


SURPLUS: dict[int, list[str]] = {}


def remembering_surplus(view: replica_moves.PartitionMove) -> replica_moves.Step:
    SURPLUS[view.partition] = view.surplus
    return right_step(view)


def not_waiting_for_the_old_session(view: replica_moves.PartitionMove) -> replica_moves.Step:
    """Whoever has left the list counts as if it had no vote any more."""
    return right_step(replace(view, voting=view.voting & set(view.roles)))


Mutant = dict[str, Callable[..., object]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "first"),
    [
        pytest.param({"next_step": everybody_is_level}, 13, id="drop before level"),
        pytest.param({"next_step": remembering_surplus, "applied": two_at_once}, 7, id="two drops at once"),
        pytest.param({"next_step": not_waiting_for_the_old_session}, 168, id="not waiting for the old session"),
    ],
)
def test_a_tool_that_moves_wrongly_is_found(mutant: Mutant, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, wrong in mutant.items():
        monkeypatch.setattr(replica_moves, name, wrong)
    with pytest.raises(Violation, match=r"seed \d+: partition \d"):
        go_all(range(first, first + MUTANT_SEQUENCES))
