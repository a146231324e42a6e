"""Whole clusters through everything that can go wrong: seeds that nobody ran before, and runs that once failed."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation import digests
from tests.simulation.plan import FAULTS, Event, Plan, dump, load, make_plan
from tests.simulation.shrink import shrink
from tests.simulation.world import Simulation, simulate
from tests.tiers import in_turns

REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))
HISTORIES = Path(__file__).parents[1] / "golden" / "outside" / "histories.txt"
SHORT, CHUNKS, SEEDS = 2, 20, 2
"""As many in each run of the tests, more in a long one; `./dev simulate` runs as many as one likes."""


@pytest.mark.parametrize(
    "chunk", [*range(SHORT), *(pytest.param(chunk, marks=pytest.mark.long) for chunk in range(SHORT, CHUNKS))]
)
def test_seeds_that_nobody_ran_before(chunk: int) -> None:
    first = int(os.environ["WALTZ_SEED"]) + chunk * SEEDS
    for seed in range(first, first + SEEDS):
        outcome = simulate(make_plan(seed))
        assert outcome.kind == "", f"./dev simulate --seeds {seed}\n{outcome.story}"


@pytest.mark.parametrize("path", in_turns(REGRESSIONS, of=2), ids=lambda path: path.stem)
def test_what_once_failed(path: Path) -> None:
    outcome = simulate(load(path.read_text(encoding="utf-8")))
    assert outcome.kind == "", f"./dev simulate --plan {path.name}\n{outcome.story}"


@pytest.mark.parametrize("fault", in_turns(FAULTS, of=4))
def test_each_kind_of_fault_alone(fault: str) -> None:
    outcome = simulate(make_plan(1, faults=(fault,), seconds=5.0))
    assert outcome.kind == "", outcome.story
    assert outcome.committed > 0


@pytest.mark.parametrize("seed", [3, pytest.param(1, marks=pytest.mark.long)])
def test_nothing_is_lost_when_partitions_are_handed_over_in_order(seed: int) -> None:
    """What the old owner had not taken goes to the new one; what it had taken is answered, or found."""
    plan = make_plan(seed, faults=("drain",), servers=2, storages=3, clients=2, seconds=2.0)
    setup = replace(
        plan.setup, rate=400.0, callers=6, partitions=2, inflight_bytes=3000, session_bytes=1 << 30, never_mended=()
    )
    events = tuple(event for event in plan.events if event.who.startswith("server"))
    outcome = simulate(replace(plan, setup=setup, events=events))
    assert outcome.kind == "", outcome.story
    assert any("is handed over" in line for line in outcome.trace)
    assert [line for line in outcome.trace if "is rejected: NOT_IN_LOG" in line] == []


def test_leader_and_owner_that_are_killed_together_are_replaced_before_the_coordinator_misses_them() -> None:
    plan = make_plan(2, faults=("suspicion",), servers=3, storages=3, clients=2, seconds=6.0)
    setup = replace(plan.setup, session_seconds=40.0, partitions=2, rate=40.0, lease_seconds=0.0, never_mended=())
    events = tuple(
        Event(at=at, what=what, who=f"server-{number}") for at, what in ((2.0, "kill"), (5.0, "start")) for number in (1, 2)
    )
    outcome = simulate(replace(plan, setup=setup, events=events))
    assert outcome.kind == "", outcome.story
    taken = [line for line in outcome.trace if "taken over in generation 2" in line]
    assert [float(line.partition(" ")[0]) < 5.0 for line in taken] == [True, True]
    assert any("as the leader" in line for line in outcome.trace)


def test_two_majorities_that_share_one_storage_which_loses_its_power() -> None:
    """Two are frozen, one loses what it did not flush, the other two are frozen while the first two wake up: what the first
    majority acknowledged rests on what that one has on its disk."""
    steps = (
        (1.0, "pause", "storage-1"),
        (1.0, "pause", "storage-2"),
        (2.5, "power", "storage-3"),
        (2.6, "pause", "storage-4"),
        (2.6, "pause", "storage-5"),
        (2.7, "resume", "storage-1"),
        (2.7, "resume", "storage-2"),
        (2.8, "start", "storage-3"),
        (5.0, "expire", "server-1"),
        (5.0, "expire", "server-2"),
    )
    for seed in range(2):
        plan = make_plan(seed, faults=(), seconds=6.0, storages=5, servers=2)
        outcome = simulate(replace(plan, events=tuple(Event(at=at, what=what, who=who) for at, what, who in steps)))
        assert outcome.kind == "", outcome.story


def test_nobody_fails_where_nothing_goes_wrong() -> None:
    plan = make_plan(1, faults=(), seconds=20.0, servers=2)
    quiet = replace(plan, setup=replace(plan.setup, rate=1.0, storage_seconds=0.5))
    outcome = simulate(quiet)
    assert outcome.kind == "", outcome.story
    assert [line for line in outcome.trace if "failed" in line or " lost " in line] == []


# -- the same every time ------------------------------------------------------------------------------------------------

TELL = """
import hashlib
from tests.simulation.plan import make_plan
from tests.simulation.world import simulate
print(hashlib.sha256("\\n".join(simulate(make_plan(0, seconds=2.0)).trace).encode()).hexdigest())
"""


@functools.cache
def told_here() -> tuple[str, str]:
    """The digest of the first history, and that of everything that was logged meanwhile."""
    outcome = simulate(make_plan(0, seconds=digests.SECONDS))
    return digests.line(0, outcome), hashlib.sha256("\n".join(outcome.trace).encode()).hexdigest()


@pytest.mark.parametrize(
    "hash_seed", ["random", pytest.param("0", marks=pytest.mark.long), pytest.param("1", marks=pytest.mark.long)]
)
def test_a_seed_tells_the_same_story_in_every_process(hash_seed: str) -> None:
    """The order of its sets is another one there. With Python 3.11 the histories that were written down show the same."""
    there = subprocess.run(
        [sys.executable, "-c", TELL],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.split() == [told_here()[1]]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="they were written with Python 3.11, whose tasks they follow")
@pytest.mark.parametrize("seeds", [(1, 3, 4), pytest.param(range(1, 30), marks=pytest.mark.long)], ids=["few", "all"])
def test_histories_are_those_that_were_written_down(seeds: Sequence[int]) -> None:
    """Whoever changes what clients are told runs `python -m tests.simulation.digests`, and says why in the commit."""
    written = HISTORIES.read_text(encoding="utf-8").splitlines()
    assert len({line.split()[-1] for line in written}) == 30, "another seed tells another story"
    assert [told_here()[0], *map(digests.digest, seeds)] == [written[seed] for seed in (0, *seeds)]


def test_a_plan_is_the_same_behind_a_file() -> None:
    plan = make_plan(5)
    assert load(dump(plan)) == plan


# -- the shortest one ----------------------------------------------------------------------------------------------------


def test_what_does_not_matter_is_left_out() -> None:
    plan = make_plan(3, faults=FAULTS, seconds=20.0)
    matter = (plan.events[4], plan.events[-2])
    tried: list[Plan] = []

    def fails(candidate: Plan) -> bool:
        tried.append(candidate)
        return set(matter) <= set(candidate.events)

    assert set(shrink(plan, fails, attempts_max=2000).events) == set(matter)
    assert all(len(candidate.events) <= len(plan.events) for candidate in tried)


def test_shrinking_ends_and_never_gives_a_plan_that_does_not_fail() -> None:
    plan = make_plan(3, faults=FAULTS, seconds=20.0)
    assert shrink(plan, lambda candidate: len(candidate.events) > 7, attempts_max=500).events != ()
    assert shrink(plan, lambda candidate: False) == plan
    failing = shrink(plan, lambda candidate: len(candidate.events) > 7, attempts_max=10)
    assert len(failing.events) > 7


# -- it can fail at all ----------------------------------------------------------------------------------------------------


def test_an_event_that_nobody_knows_is_an_error() -> None:
    plan = make_plan(1, faults=(), seconds=1.0)
    outcome = simulate(replace(plan, events=(Event(at=0.1, what="sing", who="storage-1"),)))
    assert outcome.kind == "ValueError"


def test_nobody_goes_on_while_most_storages_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.world.Simulation._mend", lambda self: None)
    events = tuple(Event(at=0.1, what="kill", who=name) for name in ("storage-1", "storage-2"))
    plan = replace(make_plan(1, faults=(), seconds=1.0, storages=3), events=events)
    outcome = simulate(plan)
    assert outcome.kind == "Stuck"
    assert "client-1 commits nothing in partition 0" in outcome.story


ENDS = ("_everybody_goes_on", "_moves_end", "_race_ends", "_replicas_are_level", "_read_logs")


@pytest.mark.parametrize("step", ENDS)
def test_an_owner_that_notices_late_that_documents_went_back_waits_for_an_operator(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open session notices it when it saves, or when it ends: that may be in any step of the end of a run."""
    go_on = getattr(Simulation, step)

    async def first_go_back(world: Simulation, *what: object) -> None:
        world.zookeeper.go_back()
        for server in world.servers.values():
            server.kill()
            server.start()
        await go_on(world, *what)

    monkeypatch.setattr(Simulation, step, first_go_back)
    events = (
        Event(at=0.5, what="remember", who="zookeeper"),
        Event(at=0.6, what="kill", who="server-1"),
        Event(at=0.7, what="start", who="server-1"),
    )
    plan = replace(make_plan(1, faults=(), seconds=2.0, storages=3, servers=1), events=events)
    outcome = simulate(plan)
    assert outcome.kind == "", outcome.story
    assert "the coordinator knows of none above" in outcome.waits


def test_documents_that_went_back_excuse_nobody_while_the_partition_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.world.Simulation._mend", lambda self: None)
    events = (
        Event(at=0.5, what="delete document", who="zookeeper", other="/partitions/0"),
        Event(at=0.6, what="pause", who="client-1"),
    )
    outcome = simulate(replace(make_plan(1, faults=(), seconds=2.0, storages=3, servers=1), events=events))
    assert outcome.kind == "Stuck"
    assert "client-1 commits nothing in partition 0" in outcome.story
