"""The shortest plan that still fails in the same way: events are left out, in ever smaller groups, then what races."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.plan import Plan

ATTEMPTS_MAX = 300


def shrink(plan: Plan, still_fails: Callable[[Plan], bool], *, attempts_max: int = ATTEMPTS_MAX) -> Plan:
    left = attempts_max

    def fails(candidate: Plan) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and still_fails(candidate)

    plan = _without_events(plan, fails)
    for smaller in _smaller(plan):
        if fails(smaller):
            plan = smaller
    return _without_events(plan, fails)


def _without_events(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    size = max(1, len(plan.events) // 2)
    while plan.events:
        at = 0
        while at < len(plan.events):
            candidate = plan.without(range(at, at + size))
            if fails(candidate):
                plan = candidate
            else:
                at += size
        if size == 1:
            break
        size = max(1, size // 2)
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """One after the other, each from the plan as it was given."""
    setup = plan.setup
    last = max((event.at for event in plan.events), default=0.0)
    yield replace(plan, setup=replace(setup, seconds=min(setup.seconds, last + 0.5)))
    if setup.callers > 1:
        yield replace(plan, setup=replace(setup, callers=1, seconds=min(setup.seconds, last + 0.5)))
