"""Which tasks of a wave have ended, before the wave tells what they wrote.

What tasks tell comes when all of a wave are over, and that may take minutes. Spark itself knows earlier that one has ended.
It is asked again and again, for people who wait: nothing that counts depends on it, and where it says nothing, that is no
failure of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from py4j.protocol import Py4JError

from waltz_spark.exporting.task import Assignment

Watch = Callable[[Collection[int]], None]
"""Told again and again, also without news: the numbers of the tasks that have ended since the last time."""
_ATTEMPTS_MAX = 4
_NAMES = count()


def unwatched(_ended: Collection[int]) -> None:
    """Where nobody waits."""


@dataclass
class _Wave:
    numbers: Sequence[int]
    """Of its tasks, in the order in which Spark has them."""
    ended: set[int] = field(default_factory=set)
    """Places in that order."""


class Sight:
    """Waves come and go in threads of their own; whoever looks does it in another one."""

    def __init__(self, spark: Any) -> None:
        self._context = spark.sparkContext
        self._waves: dict[str, _Wave] = {}

    @contextmanager
    def of(self, assignments: Sequence[Assignment]) -> Iterator[None]:
        """For the thread that has this wave carried out."""
        name = f"waltz wave {next(_NAMES)}"
        self._context.setJobGroup(name, "waltz spark-export")
        self._waves[name] = _Wave([given.number for given in assignments])
        try:
            yield
        finally:
            del self._waves[name]

    def ended(self) -> list[int]:
        """The tasks that have ended since this was asked before."""
        found: list[int] = []
        with suppress(Py4JError, OSError):  # it is about to end; whoever runs the wave hears why
            for name, wave in list(self._waves.items()):
                found += self._news(name, wave)
        return found

    def _news(self, name: str, wave: _Wave) -> list[int]:
        tracker = self._context.statusTracker()
        found: list[int] = []
        for job in tracker.getJobIdsForGroup(name):
            known = tracker.getJobInfo(job)
            for stage in known.stageIds if known else ():
                told = tracker.getStageInfo(stage)
                if told is None or told.numCompletedTasks <= len(wave.ended):
                    continue
                news = self._succeeded(stage, told.currentAttemptId, len(wave.numbers)) - wave.ended
                wave.ended |= news
                found += [wave.numbers[place] for place in sorted(news) if place < len(wave.numbers)]
        return found

    def _succeeded(self, stage: int, attempt: int, tasks: int) -> set[int]:
        store = self._context._jsc.sc().statusStore()
        listed = store.taskList(stage, attempt, _ATTEMPTS_MAX * tasks)
        each = (listed.apply(place) for place in range(listed.size()))
        return {task.partitionId() for task in each if task.status() == "SUCCESS"}
