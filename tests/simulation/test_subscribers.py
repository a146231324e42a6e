"""A consumer group in a simulated cluster, and in one of this process: members crash, hang and come back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from uuid import UUID

import numpy as np
import pytest

from tests.checker.group_history import GroupHistory
from tests.group_members import Clock, GroupMemory, Habits, Member
from tests.group_race import Course, race
from tests.simulation.plan import make_plan
from tests.simulation.world import simulate
from tests.unit.fake_server import FakeCluster, FakeServer
from tests.unit.timeless import run
from waltzd.protocol.groups import Ack, Deliveries, DeliveryFrame, Joined, MemberFrame, Mode


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


IDS = range(6)
TAGS = (6, 12)


class Owner(FakeServer):
    """The owner of a partition, and its end of the stream of a member: it gives the same transactions twice."""

    def __init__(self) -> None:
        super().__init__(FakeCluster(), "s0:1")
        self.acks: list[Ack] = []
        self._frames: asyncio.Queue[Sequence[DeliveryFrame]] = asyncio.Queue()
        self._frames.put_nowait([Joined(1, 1, Mode.QUEUE, 1000, 100), *(_deliveries(tag) for tag in TAGS)])

    def attend(self) -> Owner:
        return self

    async def send(self, frames: Sequence[MemberFrame]) -> None:
        self.acks += [frame for frame in frames if isinstance(frame, Ack)]

    async def receive(self) -> Sequence[DeliveryFrame]:
        return await self._frames.get()

    def cancel(self) -> None:
        pass


def _deliveries(tag: int) -> Deliveries:
    count = len(IDS)
    none, small = np.zeros(count, np.int64), np.zeros(count, np.int32)
    unsigned = np.zeros(count, np.uint32)
    return Deliveries(1, tag, np.array(IDS, np.int64), small + 1, small, none, unsigned, unsigned, b"")


@pytest.mark.parametrize("seed", range(20))
def test_a_word_settles_the_deliveries_that_it_is_about(seed: int) -> None:
    """The owner takes a word for the last delivery up to its tag. If a member noted another one, the judge would find that
    the last one came after the word."""
    history, owner = GroupHistory(Mode.QUEUE), Owner()
    habits = Habits(nack=0, reject=0, forget=30, hang=0, cut=0, leave=0, think_seconds=0.0)
    member = Member(
        "ann",
        "group",
        0,
        key=UUID(int=0),
        addresses=["s0:1"],
        connect=lambda address: owner,
        notes=GroupMemory(history),
        clock=Clock(lambda: 0.0),
        pick=random.Random(seed),
        habits=lambda: habits,
    )

    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await member.run()

    run(work())
    settled = [
        (id, max(tag for tag in TAGS if tag <= ack.tag))
        for ack in owner.acks
        for id in range(int(ack.firsts[0]), int(ack.lasts[0]) + 1)
    ]
    assert settled
    assert settled == [(one.id, one.tag) for one in history.said]
