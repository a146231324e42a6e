"""All groups in one log: read whole, read from the floor on, and kept short.

All groups of a server in a few numbers.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.fuzz.mutate import each, parsed
from waltzd.cluster.groups import GroupMeta
from waltzd.errors.operations import GroupStateDamaged
from waltzd.protocol.channels import Parts
from waltzd.protocol.document import decode, encode
from waltzd.protocol.groups import Exhausted, GroupMember, GroupPartitionStatus, KeyedBy, Mode
from waltzd.server.groups.delivery_tracker import GroupSettings
from waltzd.server.groups.state import GroupState
from waltzd.server.groups.state_log import (
    GARBAGE,
    SLACK_BYTES,
    TROUBLES_MAX,
    WHOLE_GROUP,
    GroupStateLog,
    Key,
    deletion_entry,
    group_entry,
    lock_of,
    settings_of,
    skip_entry,
    skipped_by,
    state_entry,
    totals_of,
)

MAILER = GroupMeta(name="mailer", partitions=Parts("0-1,orders"), mode=Mode.QUEUE, back_off_ms=(), exhausted=Exhausted.STOP)


def read(log: dict[int, bytes], first: int = 0) -> GroupStateLog:
    state_log = GroupStateLog()
    for id, data in log.items():
        if id >= first:
            state_log.read(id, data)
    return state_log


def told(state_log: GroupStateLog) -> dict[str, tuple[GroupMeta, int, dict[int, bytes]]]:
    states = {
        name: {number: state.snapshot() for number in range(3) if (state := state_log.state(name, number)) is not None}
        for name in state_log.groups
    }
    return {name: (meta, made_at, states[name]) for name, (meta, made_at) in state_log.groups.items()}


def test_a_group_from_its_making_to_its_end() -> None:
    state = GroupState(after=9)
    log = {3: group_entry(MAILER), 5: state_entry("mailer", 1, 3, state.snapshot())}
    state.reach_to(10, is_open=True)
    delta = state.delta()
    assert delta is not None
    log[6] = state_entry("mailer", 1, 3, delta)
    state_log = read(log)
    assert state_log.groups == {"mailer": (MAILER, 3)}
    assert (state_log.state("mailer", 1), state_log.state("mailer", 0)) == (state, None)
    assert (state_log.floor, state_log.bytes) == (3, sum(map(len, log.values())))
    state_log.read(7, group_entry(replace(MAILER, deliver_max=9), 3))
    assert state_log.groups["mailer"][1] == 3, "other settings make no other group"
    assert state_log.floor == 5
    state_log.read(8, deletion_entry("mailer", 3))
    assert (state_log.groups, state_log.floor, state_log.bytes) == ({}, 9, 0)
    state_log.read(9, state_entry("mailer", 1, 3, delta))
    state_log.read(10, group_entry(MAILER))
    assert state_log.state("mailer", 1) is None, "another group of the same name begins anew"
    state_log.read(11, deletion_entry("mailer", 3))
    assert state_log.groups == {"mailer": (MAILER, 10)}


def test_what_was_written_anew_behind_its_states_is_found_from_the_floor_on() -> None:
    state = GroupState()
    log = {0: group_entry(MAILER), 1: state_entry("mailer", 0, 0, state.snapshot()), 2: group_entry(MAILER, 0)}
    state.begin_epoch()
    delta = state.delta()
    assert delta is not None
    log[3] = state_entry("mailer", 0, 0, delta)
    assert read(log).floor == 1
    assert told(read(log, 1)) == told(read(log))
    log[4] = state_entry("mailer", 0, 0, state.snapshot())
    assert read(log).floor == 2
    assert told(read(log, 2)) == told(read(log)), "the delta between belongs to what was trimmed"


def story(chance: random.Random) -> None:
    """Groups come and go and move on, and what is overdue is written anew at once."""
    log, state_log, states, metas = dict[int, bytes](), GroupStateLog(), dict[Key, GroupState](), dict[str, GroupMeta]()

    def write(data: bytes) -> None:
        id = state_log.reach + chance.choice([1, 1, 2])
        log[id] = data
        state_log.read(id, data)

    for step in range(120):
        name = chance.choice(["a", "b", "c"])
        if name not in state_log.groups:
            metas[name] = replace(MAILER, name=name, deliver_max=chance.randrange(1, 9))
            write(group_entry(metas[name]))
        key = Key(name, state_log.groups[name][1], chance.randrange(3))
        state = states.get(key)
        if chance.random() < 0.04:
            write(deletion_entry(name, key.made_at))
        elif state is None:
            states[key] = GroupState(after=chance.randrange(5))
            write(state_entry(name, key.partition, key.made_at, states[key].snapshot()))
        else:
            state.reach_to(state.reach + 1, is_open=chance.random() < 0.5)
            if chance.random() < 0.3:
                state.jump_to(state.reach + 3)
            delta = state.delta()
            assert delta is not None
            write(state_entry(name, key.partition, key.made_at, delta))
        while (due := state_log.overdue) is not None:
            if due.partition == WHOLE_GROUP:
                write(group_entry(metas[due.name], due.made_at))
            else:
                write(state_entry(due.name, due.partition, due.made_at, states[due].snapshot()))
                states[due].forget_changes()
        if step % 10:
            continue
        again = read(log, state_log.floor)
        assert told(again) == told(state_log) == told(read(log))
        assert again.bytes == state_log.bytes
        assert again.floor == state_log.floor or again.reach < 0, "where nothing is left there is nothing to read"
        for name, (_, made_at) in state_log.groups.items():
            for number in range(3):
                assert state_log.state(name, number) == states.get(Key(name, made_at, number))
        live = {id: data for id, data in log.items() if id >= state_log.floor}
        assert state_log.bytes == sum(map(len, live.values()))


@pytest.mark.slow
def test_what_is_read_from_the_floor_on_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzd.server.groups.state_log.SLACK_BYTES", 0)
    monkeypatch.setattr("waltzd.server.groups.state_log.GARBAGE", 2)
    for seed in range(12):
        story(random.Random(seed))


@pytest.mark.slow
def test_a_group_that_works_for_long_keeps_a_short_log() -> None:
    state_log, state = GroupStateLog(), GroupState()
    state_log.read(0, group_entry(MAILER))
    state_log.read(1, state_entry("mailer", 0, 0, state.snapshot()))
    idle = GroupState()
    state_log.read(2, state_entry("mailer", 1, 0, idle.snapshot()))
    written = 0
    for id in range(20_000):
        state.reach_to(id, is_open=False)
        delta = state.delta()
        assert delta is not None
        state_log.read(state_log.reach + 1, state_entry("mailer", 0, 0, delta))
        while (due := state_log.overdue) is not None:
            written += 1
            whole = {WHOLE_GROUP: group_entry(MAILER, 0)}
            if due.partition != WHOLE_GROUP:
                whole[due.partition] = state_entry("mailer", due.partition, 0, (state, idle)[due.partition].snapshot())
            state_log.read(state_log.reach + 1, whole[due.partition])
        assert state_log.bytes <= GARBAGE * 1000 + SLACK_BYTES
    assert 3 <= written < 200


def test_settings_are_what_the_group_says() -> None:
    assert settings_of(MAILER) == GroupSettings(mode=Mode.QUEUE, back_off=(), exhausted=Exhausted.STOP)
    assert settings_of(GroupMeta(name="a", partitions=None, mode=Mode.KEYED)) == GroupSettings(mode=Mode.KEYED)


def test_each_group_in_each_partition_has_a_lock_of_its_own() -> None:
    locks = {lock_of(name, number).hash for name in ("a", "a-1", "b") for number in (WHOLE_GROUP, 0, 1, 10)}
    assert len(locks) == 12


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        group_entry(MAILER)[:10],
        b"\0" + group_entry(MAILER)[1:],
        b"\xff" * 64,
        group_entry(MAILER).replace(b"mailer", b"mai/er", 1),
    ],
)
def test_what_is_no_entry_of_ours_is_counted_and_says_nothing(data: bytes) -> None:
    state_log = read({3: group_entry(MAILER)})
    assert state_log.read(4, data) is None
    assert (state_log.foreign, state_log.reach, state_log.groups) == (1, 4, {"mailer": (MAILER, 3)})
    assert state_log.bytes == len(group_entry(MAILER)) + len(data), "it makes the log longer all the same"


def test_an_entry_that_is_to_be_passed_over_is_not_read() -> None:
    assert (skipped_by(skip_entry(17)), skipped_by(group_entry(MAILER)), skipped_by(b"")) == (17, None, None)
    state_log = GroupStateLog(frozenset([4]))
    for id, data in {3: group_entry(MAILER), 4: b"\7" + group_entry(MAILER)[1:], 5: skip_entry(4)}.items():
        state_log.read(id, data)
    assert (state_log.groups, state_log.reach, state_log.foreign) == ({"mailer": (MAILER, 3)}, 5, 0)
    with pytest.raises(GroupStateDamaged, match="entry 4 of the group log") as caught:
        read({3: group_entry(MAILER), 4: b"\7" + group_entry(MAILER)[1:]})
    assert caught.value.number("entry") == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\7" + group_entry(MAILER)[1:], "kind 7"),
        (
            state_entry("mailer", 0, 0, b"")[:4] + b"\xff" * 8 + state_entry("mailer", 0, 0, b"")[12:],
            "'mailer' has the partition -1",
        ),
        (group_entry(MAILER).replace(b"mailer", b"sender", 1), "the settings of group sender have the name mailer"),
        (group_entry(MAILER)[:-3], "is not a JSON document"),
        (group_entry(MAILER).replace(b'"queue"', b'"other"'), "mode must be"),
        (state_entry("mailer", 0, 0, b"\1"), "is cut off"),
    ],
)
def test_what_is_no_entry(data: bytes, message: str) -> None:
    state_log = GroupStateLog()
    with pytest.raises(GroupStateDamaged, match=message):
        state_log.read(0, data)


def test_a_group_is_made_once() -> None:
    state_log = read({0: group_entry(MAILER)})
    for data in (group_entry(MAILER), group_entry(MAILER, 7)):
        with pytest.raises(GroupStateDamaged, match="created twice"):
            state_log.read(1, data)


def test_any_bytes_are_an_entry_or_refused_in_a_sentence() -> None:
    whole = [group_entry(MAILER), deletion_entry("mailer", 0), state_entry("mailer", 0, 0, GroupState().snapshot())]

    def check(chance: random.Random) -> None:
        data = bytearray(chance.choice(whole))
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        parsed(GroupStateDamaged, read({0: whole[0]}).read, 1, bytes(data[: chance.randrange(len(data) + 1)]))

    each("entries about groups", 300, check)


def test_a_group_of_version_0_0_is_read_and_written_as_it_is() -> None:
    old = (
        b'{"schema": 1, "ack_wait_ms": 30000, "back_off_ms": [1000], "deliver_max": 5, "exhausted": "park", '
        b'"headers": [7], "key": "header", "max_in_flight": 100, "mode": "keyed", "name": "mails", "partitions": null, '
        b'"starts": []}'
    )
    found = decode(GroupMeta, old, "a group")
    assert (found.kinds, found.key, found.key.word) == ((7,), KeyedBy.KIND, "kind")
    assert json.loads(encode(found)) == json.loads(old)
    assert KeyedBy("kind") is KeyedBy.KIND, "the word that people use"


OWNED = {0: 99, 1: 9}


def state(reach: int, *, parked: int = 0, stopped: str = "") -> bytes:
    found = GroupState()
    for id in range(reach + 1):
        found.reach_to(id, is_open=id < parked)
        if id < parked:
            found.fail(id)
            found.park(id, "one", "no")
    if stopped:
        found.stop(stopped)
    return found.snapshot()


def ledger_of(*entries: bytes) -> GroupStateLog:
    found = GroupStateLog()
    for id, data in enumerate(entries):
        found.read(id, data)
    return found


def everywhere(meta: GroupMeta) -> range:
    return range(3)


def mailer(name: str = "mailer") -> bytes:
    return group_entry(GroupMeta(name=name, partitions=None, mode=Mode.QUEUE))


def at_work(partition: int, **changes: Any) -> GroupPartitionStatus:
    fields = {"epoch": 1, "reach": 99, "floor": 97, "open": 2, "parked": 0, "stopped": "", "is_at_work": True}
    return GroupPartitionStatus(partition=partition, **{**fields, **changes})


def test_only_what_is_owned_counts_and_only_groups_that_are_there() -> None:
    state_log = ledger_of(
        mailer(),
        state_entry("mailer", 0, 0, state(89, parked=3)),
        state_entry("mailer", 1, 0, state(9)),
        state_entry("mailer", 2, 0, state(5, stopped="id 6: no")),
        state_entry("mailer", 0, 77, state(5)),
    )
    found = totals_of(state_log, {}, everywhere, OWNED.get, "")
    assert (found.groups, found.members, found.lag, found.parked, found.stopped, found.unattended) == (1, 0, 10, 3, 0, 1)
    assert [(one.partition, one.lag, one.parked, one.is_unattended) for one in found.troubles] == [(0, 10, 3, True)]
    assert totals_of(state_log, {}, everywhere, lambda _: None, "it is away").trouble == "it is away"


def test_what_is_at_work_counts_as_it_says() -> None:
    state_log = ledger_of(mailer(), state_entry("mailer", 0, 0, state(9)), state_entry("mailer", 1, 0, state(9)))
    members = tuple(GroupMember(name, "", "", 1, 100, 0, 0, 0, 0) for name in ("one", "two"))
    places = {
        Key("mailer", 0, 0): at_work(0, members=members, in_flight=2),
        Key("mailer", 0, 1): at_work(1, reach=9, open=4, paused="the group log is away"),
    }
    found = totals_of(state_log, places, everywhere, OWNED.get, "")
    assert (found.members, found.in_flight, found.lag, found.paused, found.unattended) == (2, 2, 6, 1, 1)
    assert [one.paused for one in found.troubles] == ["the group log is away"]


def test_the_worst_are_named() -> None:
    entries: list[bytes] = []
    for number in range(TROUBLES_MAX + 10):
        name = f"group{number:02}"
        entries += [
            mailer(name),
            state_entry(name, 0, 2 * number, state(number, stopped="id 0: no" if number == 7 else "")),
        ]
    found = totals_of(ledger_of(*entries), {}, lambda _: [0], OWNED.get, "")
    assert (found.unattended, found.stopped, len(found.troubles)) == (TROUBLES_MAX + 9, 1, TROUBLES_MAX)
    assert [one.name for one in found.troubles[:3]] == ["group07", "group00", "group01"]
