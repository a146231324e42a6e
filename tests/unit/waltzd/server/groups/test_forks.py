"""Where a group stands when an operator ends the log: against sets of ids, by chance, and on the bytes that are kept."""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import pytest

from tests.tiers import tiers
from waltzd.cluster.groups import GroupMeta
from waltzd.errors import GroupStateDamaged
from waltzd.protocol.groups import Mode
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, Lineage
from waltzd.server.groups.keeper import Keeper
from waltzd.server.groups.ledger import Key, Ledger, made, stands
from waltzd.server.groups.state import State
from waltzd.server.subscriptions.place import other_timeline

SECOND = UUID(int=2)
META = GroupMeta(name="mailer", partitions=None, mode=Mode.QUEUE)
KEY = Key(META.name, 0, 0)


def forked(fork: int, lineage: Lineage = NEVER_FORKED) -> Lineage:
    number = lineage.number
    return lineage.forked(identity=UUID(int=number + 1), fork=fork, session=number, cause="c", began="b", who="w")


def of(state: State) -> tuple[Any, ...]:
    return state.reach, [tuple(one) for one in state.open], dict(state.parked), state.timeline


@pytest.mark.parametrize("seed", tiers(range(200), quick=40))
def test_a_state_goes_over_where_nothing_above_the_fork_is_acknowledged(seed: int) -> None:
    chance, state = random.Random(seed), State()
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
    ledger = Ledger()
    ledger.read(0, made(META))
    ledger.read(1, stands(META.name, 0, 0, state.snapshot()))
    keeper = Keeper(KEY, ledger, after=-1, now=0.0, lineage=lineage)
    other = other_timeline(KEY, keeper.state, lineage)
    if any(id > fork for id in acknowledged):
        assert other is not None
        assert other.facts["fork"] == str(fork)
        assert f"group reset {META.name} --partitions 0 --to-id {fork + 1}" in " ".join(other.lines())
        assert of(keeper.state) == of(state)
        return
    assert other is None
    assert keeper.state.timeline == lineage.current
    assert keeper.state.reach == min(state.reach, fork)
    wanted = {id for one in state.open for id in range(one.first, one.last + 1) if id <= fork}
    assert {id for one in keeper.state.open for id in range(one.first, one.last + 1)} == wanted
    assert keeper.state.parked == {id: one for id, one in state.parked.items() if id <= fork}
    write = keeper.write(0.0, ledger, is_urgent=True)
    assert write is not None
    ledger.read(2, write.data)
    again = ledger.state(META.name, 0)
    assert again is not None
    assert of(again) == of(keeper.state)


def test_a_state_of_the_first_timeline_is_written_as_before_and_others_name_theirs() -> None:
    state = State(after=3)
    assert state.snapshot()[1] == 1
    later = State(after=3, timeline=SECOND)
    assert (later.snapshot()[1], State.of(later.snapshot()).timeline) == (2, SECOND)
    later.reach_to(4, is_open=True)
    delta = later.delta()
    assert delta is not None
    assert State(after=3, timeline=SECOND).apply(delta).reach == 4
    with pytest.raises(GroupStateDamaged, match="timeline"):
        state.apply(delta)


def test_a_group_that_begins_at_a_position_above_the_fork_does_not_begin() -> None:
    ledger, lineage = Ledger(), forked(5)
    ledger.read(0, made(META))
    assert other_timeline(KEY, Keeper(KEY, ledger, after=Position(9, FIRST), now=0, lineage=lineage).state, lineage)
    for after in (Position(5, FIRST), Position(9, lineage.current), -1):
        keeper = Keeper(KEY, ledger, after=after, now=0, lineage=lineage)
        assert (keeper.state.reach, keeper.state.timeline) == (after, lineage.current)
