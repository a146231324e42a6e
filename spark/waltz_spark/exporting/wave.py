"""The tasks of an export on Spark, as the plainest job that there is: a function over a list, on every master.

Tasks go out in waves, two at a time, so that the next one fills the cores that the last tasks of the one before leave idle.
What a wave tells arrives when it is over, and can be published then. A data source would do as well, and did: but Spark
starts three Pythons to plan a reading of one, for each wave, and that costs more than all else in a small export.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

from py4j.protocol import Py4JError

from waltz_spark.exporting.sight import Sight, Watch, unwatched
from waltz_spark.exporting.task import Assignment, Job, Written, answer_of, packed, unpacked, write, written_of

IN_FLIGHT = 2
_TICK_SECONDS = 0.5


def carried_out(job: str, assignment: str) -> str:
    """On an executor, which knows this package by its zip or because it has it: so what is sent there is packed."""
    return answer_of(write(unpacked(job), unpacked(assignment)))


def run_waves(
    spark: Any, job: Job, assignments: Sequence[Assignment], watch: Watch = unwatched
) -> Generator[Written, None, None]:
    """What the tasks tell, wave by wave. When it is closed, what still runs is cancelled."""
    task = partial(carried_out, packed(job))

    def run(wave: Sequence[Assignment]) -> list[Written]:
        given = spark.sparkContext.parallelize([packed(assignment) for assignment in wave], len(wave))
        return [written_of(answer) for answer in given.map(task).collect()]

    yield from in_waves(spark, run, assignments, watch)


def in_waves(
    spark: Any, run: Callable[[Sequence[Assignment]], list[Written]], assignments: Sequence[Assignment],
    watch: Watch = unwatched,
) -> Generator[Written, None, None]:  # fmt: skip
    """`run`: carries out one wave, in a thread of its own, by jobs of this Spark."""
    waves = deque(_waves(assignments, spark.sparkContext.defaultParallelism))
    sight = Sight(spark)

    def seen(wave: Sequence[Assignment]) -> list[Written]:
        with sight.of(wave):
            return run(wave)

    pool = ThreadPoolExecutor(IN_FLIGHT + 1, thread_name_prefix="waltz export wave")
    running: set[Future[list[Written]]] = set()
    looking = pool.submit(sight.ended)  # not in this thread: signals come here, and would meet a question half asked
    try:
        while waves or running:
            while waves and len(running) < IN_FLIGHT:
                running.add(pool.submit(seen, waves.popleft()))
            done, running = wait(running, timeout=_TICK_SECONDS, return_when=FIRST_COMPLETED)
            if looking.done():
                watch(looking.result())
                looking = pool.submit(sight.ended)
            for future in done:
                yield from future.result()
    finally:
        if running:
            with suppress(Py4JError, OSError):  # a Java that is gone has no jobs
                spark.sparkContext.cancelAllJobs()
        pool.shutdown(wait=True, cancel_futures=True)


def _waves(assignments: Sequence[Assignment], slots: int) -> list[Sequence[Assignment]]:
    """Small enough that finished work is published soon, large enough that planning them costs little."""
    size = max(4, 2 * slots)
    return [assignments[at : at + size] for at in range(0, len(assignments), size)]
