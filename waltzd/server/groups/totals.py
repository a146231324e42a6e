"""Totals over all groups of a server, and the groups with the worst troubles by name, at most `TROUBLES_MAX`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import nsmallest

from waltzd.protocol.groups import GroupPartitionStatus, GroupTotals, GroupTrouble
from waltzd.server.groups.state import GroupState
from waltzd.server.groups.state_log import GroupStateLog, Key

TROUBLES_MAX = 20


def totals_of(
    state_log: GroupStateLog,
    at_work: Mapping[Key, GroupPartitionStatus],
    committed_of: Callable[[int], int | None],
    trouble: str,
    stopped_by: Callable[[Key, GroupState], str] = lambda key, state: state.stopped,
) -> GroupTotals:
    """Count all groups. `committed_of` returns the committed mark of a partition, None if another server owns it.
    `trouble` is why the group log may be outdated here. `stopped_by` returns why an inactive group would deliver
    nothing."""
    committed: dict[int, int | None] = {}
    members = in_flight = lags = parked_ones = stopped_ones = paused_ones = unattended = 0
    troubles: list[GroupTrouble] = []
    for key, state in state_log.states():
        if key.partition not in committed:
            committed[key.partition] = committed_of(key.partition)
        end = committed[key.partition]
        if end is None or state_log.groups.get(key.name, (None, None))[1] != key.made_at:
            continue
        place = at_work.get(key)
        if place is None:
            here, paused, stopped, parked = 0, "", stopped_by(key, state), len(state.parked)
            lag = max(0, end - state.reach) + state.open.ids
        else:
            here, paused, stopped, parked = len(place.members), place.paused, place.stopped, place.parked
            lag = max(0, end - place.reach) + place.open
            in_flight += place.in_flight
        members, lags, parked_ones = members + here, lags + lag, parked_ones + parked
        if stopped or paused or parked or (lag and not here):
            found = GroupTrouble(key.name, key.partition, stopped, paused, here, lag, parked)
            stopped_ones, paused_ones = stopped_ones + bool(stopped), paused_ones + bool(paused and not stopped)
            unattended += found.is_unattended
            troubles.append(found)
    return GroupTotals(
        groups=len(state_log.groups),
        members=members,
        in_flight=in_flight,
        lag=lags,
        parked=parked_ones,
        stopped=stopped_ones,
        paused=paused_ones,
        unattended=unattended,
        troubles=tuple(nsmallest(TROUBLES_MAX, troubles, key=_worst_first)),
        trouble=trouble,
        foreign=state_log.foreign,
    )


def _worst_first(one: GroupTrouble) -> tuple[bool, bool, int, int, str, int]:
    return not one.stopped, not one.paused, -one.parked, -one.lag, one.name, one.partition
