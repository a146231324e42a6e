"""A change from end to end: look, plan, ask, do.

The question stands between two loops and two connections, because Ctrl-C at it must end the command, and because nobody
knows how long a person thinks. What was planned carries the versions that it was planned from, so that a cluster which
changed meanwhile is noticed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from waltzctl import render_change
from waltzctl.change import Asked, Plan, agree, recorded
from waltzctl.reach import Reach, using
from waltzctl.waiting import Say, Waiting
from waltzd.cluster import Cluster
from waltzd.errors import EXIT_OK


@dataclass(frozen=True, kw_only=True)
class Job:
    plan: Plan
    do: Callable[[Cluster, Say], Awaitable[Mapping[str, Any]]]
    """What came of it, for JSON."""
    is_change: bool = True
    """Otherwise it only waits for what others do, and nobody is asked."""
    is_recorded: bool = True
    """In the history; there is none where the cluster itself goes."""


async def _nothing(_cluster: Cluster, _say: Say) -> Mapping[str, Any]:
    return {}


def nothing_to_do(verb: str, subject: str) -> Job:
    """It was done before."""
    return Job(plan=Plan(verb=verb, subject=subject, steps=()), do=_nothing)


def perform(reach: Reach, asked: Asked, output: str, prepare: Callable[[Cluster], Awaitable[Job]]) -> int:
    job = using(reach, prepare)
    if (job.is_change or asked.is_dry or not job.plan.steps) and not agree(job.plan, asked, reach, output):
        return EXIT_OK

    async def act(cluster: Cluster) -> Mapping[str, Any]:
        if not (job.is_change and job.is_recorded):
            return await job.do(cluster, waiting.say)
        async with recorded(cluster, job.plan, asked):
            return await job.do(cluster, waiting.say)

    with Waiting() as waiting:
        done = using(reach, act)
    render_change.plan(job.plan, output, result="done", **done)
    return EXIT_OK
