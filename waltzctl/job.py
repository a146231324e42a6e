"""A change from end to end: look, plan, ask, do.

The question stands between two loops and two connections, because Ctrl-C at it must end the command, and because nobody
knows how long a person thinks. What was planned carries the versions that it was planned from, so that a cluster which
changed meanwhile is noticed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from waltzctl.change import Asked, agree, recorded
from waltzctl.interruption import Interrupted, interruptible
from waltzctl.progress import Say, Waiting
from waltzctl.reach import Reach, using
from waltzctl.safety import Plan
from waltzctl.show.change import put_plan
from waltzd.cluster.cluster import Cluster
from waltzd.errors import EXIT_OK

NOTHING_BEGUN = "Interrupted. Nothing was changed."
ONLY_WAITED = "Interrupted. This command changed nothing; what it waited for goes on without it."
WHOLE = "Interrupted. It was done as a whole or not at all: run the same command again to see which."
STAYS = (
    "Interrupted. What was done until now stays, and what was begun may go on. Run the same command again to go on from "
    "there; `waltzctl history` says what was planned."
)


@dataclass(frozen=True, kw_only=True)
class Job:
    plan: Plan
    do: Callable[[Cluster, Say], Awaitable[Mapping[str, Any]]]
    """What came of it, for JSON."""
    is_change: bool = True
    """Otherwise it only waits for what others do, and nobody is asked."""
    is_recorded: bool = True
    """In the history; there is none where the cluster itself goes, as a whole."""

    interrupted: str | None = None
    """What to say when it is told to end, where that is something of its own."""

    @property
    def after_interruption(self) -> str:
        """What is true when it was told to end."""
        if self.interrupted is not None:
            return self.interrupted
        return ONLY_WAITED if not self.is_change else STAYS if self.is_recorded else WHOLE


async def _nothing(_cluster: Cluster, _say: Say) -> Mapping[str, Any]:
    return {}


def nothing_to_do(verb: str, subject: str) -> Job:
    """It was done before."""
    return Job(plan=Plan(verb=verb, subject=subject, steps=()), do=_nothing)


def perform(reach: Reach, asked: Asked, output: str, prepare: Callable[[Cluster], Awaitable[Job]]) -> int:
    try:
        with interruptible(NOTHING_BEGUN):
            job = using(reach, prepare)
            if (job.is_change or asked.is_dry or not job.plan.steps) and not agree(job.plan, asked, reach, output):
                return EXIT_OK
    except typer.Abort:  # also at the question, where it is the end of what is typed, too
        raise Interrupted(NOTHING_BEGUN) from None

    async def act(cluster: Cluster) -> Mapping[str, Any]:
        if not (job.is_change and job.is_recorded):
            return await job.do(cluster, waiting.say)
        async with recorded(cluster, job.plan, asked):
            return await job.do(cluster, waiting.say)

    with interruptible(job.after_interruption), Waiting(asked.progress) as waiting:
        done = using(reach, act)
    put_plan(job.plan, output, result="done", **done)
    return EXIT_OK
