"""Hundreds of sequences of what operators do, at any moment, to a cluster in which anything may fall silent. Three tools
that move replicas wrongly must be found by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.operators import go_all
from tests.unit.relocation_model import Violation
from waltzctl.placement import replica_moves
from waltzd.cluster.documents import Membership

MUTANT_SEQUENCES = 400
"""How many may be tried until a mutant is found; each begins shortly before the one that has found it."""
right_step = replica_moves.next_step


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
        return replica_moves.Step("x", {name: role for name, role in view.roles.items() if name != view.surplus[0]})
    return right_step(view)


def two_at_once(view: replica_moves.PartitionMove) -> replica_moves.Step:
    """Who goes takes another one along."""
    step = right_step(view)
    others = [name for name, role in step.roles.items() if role is Membership.MEMBER and name in view.surplus]
    if len(step.roles) < len(view.roles) and others:
        return replace(step, roles={name: role for name, role in step.roles.items() if name != others[0]})
    return step


def not_waiting_for_the_old_session(view: replica_moves.PartitionMove) -> replica_moves.Step:
    """Whoever has left the list counts as if it had no vote any more."""
    return right_step(replace(view, voting=view.voting & set(view.roles)))


Mutant = Callable[[replica_moves.PartitionMove], replica_moves.Step]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "first"),
    [
        pytest.param(everybody_is_level, 13, id="drop before level"),
        pytest.param(two_at_once, 7, id="two drops at once"),
        pytest.param(not_waiting_for_the_old_session, 168, id="not waiting for the old session"),
    ],
)
def test_a_tool_that_moves_wrongly_is_found(mutant: Mutant, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_moves, "next_step", mutant)
    with pytest.raises(Violation, match=r"seed \d+: partition \d"):
        go_all(range(first, first + MUTANT_SEQUENCES))
