"""A consumer group in a simulated cluster, and in one of this process: members crash, hang and come back."""

from __future__ import annotations

import pytest

from tests.group_race import Course, race
from tests.simulation.plan import make_plan
from tests.simulation.world import simulate
from waltzd.protocol.groups import Mode


@pytest.mark.parametrize(("mode", "seed"), [("queue", 76), ("keyed", 81), ("ordered", 70)])
def test_a_group_keeps_its_promises_while_members_and_owners_die(mode: str, seed: int) -> None:
    plan = make_plan(seed, faults=("subscribers",), seconds=6.0)
    assert plan.setup.mode == mode
    outcome = simulate(plan)
    assert outcome.kind == "", outcome.story
    assert outcome.verdict is not None
    assert outcome.verdict.counts["epochs"] > 1
    assert outcome.verdict.counts["again"] > 0


def test_members_race_in_a_cluster_of_this_process() -> None:
    """Sixteen of them, of which a fifth crash, again and again, as owners do. `./dev groups` lets it go on for long."""
    _, verdict = race(Course(mode=Mode.QUEUE, seed=1, seconds=3.0))
    assert verdict.is_sound, str(verdict)
    assert verdict.counts["transactions"] > 10
    assert verdict.counts["holders"] > 16
