"""All groups of a server in a few numbers."""

from __future__ import annotations

from typing import Any

from waltzd.cluster.groups import GroupMeta
from waltzd.protocol.groups import GroupMember, GroupPartitionStatus, Mode
from waltzd.server.groups.state import GroupState
from waltzd.server.groups.state_log import TROUBLES_MAX, GroupStateLog, Key, group_entry, state_entry, totals_of

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
    found = totals_of(state_log, {}, OWNED.get, "")
    assert (found.groups, found.members, found.lag, found.parked, found.stopped, found.unattended) == (1, 0, 10, 3, 0, 1)
    assert [(one.partition, one.lag, one.parked, one.is_unattended) for one in found.troubles] == [(0, 10, 3, True)]
    assert totals_of(state_log, {}, lambda _: None, "it is away").trouble == "it is away"


def test_what_is_at_work_counts_as_it_says() -> None:
    state_log = ledger_of(mailer(), state_entry("mailer", 0, 0, state(9)), state_entry("mailer", 1, 0, state(9)))
    members = tuple(GroupMember(name, "", "", 1, 100, 0, 0, 0, 0) for name in ("one", "two"))
    places = {
        Key("mailer", 0, 0): at_work(0, members=members, in_flight=2),
        Key("mailer", 0, 1): at_work(1, reach=9, open=4, paused="the group log is away"),
    }
    found = totals_of(state_log, places, OWNED.get, "")
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
    found = totals_of(ledger_of(*entries), {}, OWNED.get, "")
    assert (found.unattended, found.stopped, len(found.troubles)) == (TROUBLES_MAX + 9, 1, TROUBLES_MAX)
    assert [one.name for one in found.troubles[:3]] == ["group07", "group00", "group01"]
