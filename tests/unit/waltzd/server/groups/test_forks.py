"""Where a group stands when an operator ends the log: against sets of ids, by chance, and on the bytes that are kept."""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import pytest

from tests.tiers import together
from waltzd.cluster.groups import GroupMeta
from waltzd.errors.operations import GroupStateDamaged
from waltzd.protocol.groups import Mode
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, Lineage
from waltzd.server.groups.state import GroupState
from waltzd.server.groups.state_log import GroupStateLog, Key, group_entry, state_entry
from waltzd.server.groups.state_writer import GroupStateWriter
from waltzd.server.subscriptions.group_partition import other_timeline

SECOND = UUID(int=2)
META = GroupMeta(name="mailer", partitions=None, mode=Mode.QUEUE)
KEY = Key(META.name, 0, 0)


def forked(fork: int, lineage: Lineage = NEVER_FORKED) -> Lineage:
    number = lineage.number
    return lineage.forked(identity=UUID(int=number + 1), fork=fork, session=number, cause="c", began="b", who="w")


def of(state: GroupState) -> tuple[Any, ...]:
    return state.reach, [tuple(one) for one in state.open], dict(state.parked), state.timeline


@together("seed", range(200), quick=40)
def test_a_state_goes_over_where_nothing_above_the_fork_is_acknowledged(seed: int) -> None:
    chance, state = random.Random(seed), GroupState()
    acknowledged: set[int] = set()
    for _ in range(chance.randrange(60)):
        at_hand = [id for one in state.open for id in range(one.first, one.last + 1)]
        if not at_hand or chance.random() < 0.5:
            state.reach_to(state.reach + 1, is_open=True)
        elif chance.random() < 0.7:
            acknowledged.add(id := chance.choice(at_hand))
            state.settle(id, id)
        else:
            state.park(chance.choice(at_hand), "m", "r")
    fork = chance.randint(-1, state.reach + 3)
    lineage = forked(fork)
    assert state.acknowledged_above(fork) == len([id for id in acknowledged if id > fork])
    state_log = GroupStateLog()
    state_log.read(0, group_entry(META))
    state_log.read(1, state_entry(META.name, 0, 0, state.snapshot()))
    writer = GroupStateWriter(KEY, state_log, after=-1, now=0.0, lineage=lineage)
    other = other_timeline(KEY, writer.state, lineage)
    if any(id > fork for id in acknowledged):
        assert other is not None
        assert other.facts["fork"] == str(fork)
        assert f"group reset {META.name} --partitions 0 --after {fork}" in " ".join(other.lines())
        assert of(writer.state) == of(state)
        return
    assert other is None
    assert writer.state.timeline == lineage.current
    assert writer.state.reach == min(state.reach, fork)
    wanted = {id for one in state.open for id in range(one.first, one.last + 1) if id <= fork}
    assert {id for one in writer.state.open for id in range(one.first, one.last + 1)} == wanted
    assert writer.state.parked == {id: one for id, one in state.parked.items() if id <= fork}
    write = writer.write(0.0, state_log, is_urgent=True)
    assert write is not None
    state_log.read(2, write.data)
    again = state_log.state(META.name, 0)
    assert again is not None
    assert of(again) == of(writer.state)


def test_a_state_of_the_first_timeline_is_written_as_before_and_others_name_theirs() -> None:
    state = GroupState(after=3)
    assert state.snapshot()[1] == 1
    later = GroupState(after=3, timeline=SECOND)
    assert (later.snapshot()[1], GroupState.of(later.snapshot()).timeline) == (2, SECOND)
    later.reach_to(4, is_open=True)
    delta = later.delta()
    assert delta is not None
    assert GroupState(after=3, timeline=SECOND).apply(delta).reach == 4
    with pytest.raises(GroupStateDamaged, match="timeline"):
        state.apply(delta)


def test_a_group_that_begins_at_a_position_above_the_fork_does_not_begin() -> None:
    state_log, lineage = GroupStateLog(), forked(5)
    state_log.read(0, group_entry(META))
    assert other_timeline(
        KEY, GroupStateWriter(KEY, state_log, after=Position(9, FIRST), now=0, lineage=lineage).state, lineage
    )
    for after in (Position(5, FIRST), Position(9, lineage.current), -1):
        writer = GroupStateWriter(KEY, state_log, after=after, now=0, lineage=lineage)
        assert (writer.state.reach, writer.state.timeline) == (after, lineage.current)
