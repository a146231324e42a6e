"""Those who run the tasks, where they are not on this machine: waited for, asked what they have, and watched.

A master that answers may have nobody to give, at the start or later, when workers or the master itself were lost. Spark
waits for ever then, so somebody has to count. The first task asks whoever runs it what its Python has: its waiting is the
waiting for executors, also where there are none before there is work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from waltz_spark.engine.shipping import Need, check_answers, machine_and_lacking
from waltzd.errors import MasterUnreachable

_LOOK_SECONDS, _CANCEL_SECONDS = 1.0, 0.2
_ASKED_EACH = 2
"""Tasks for each core: so that each machine is likely to be asked."""
_ASKED_MAX = 64


class Watch:
    """Nobody there for so long: everything that waits for them is cancelled, again and again, until it is closed."""

    def __init__(self, spark: Any, master: str, seconds: float, log: Path | str) -> None:
        self._scala = spark.sparkContext._jsc.sc()
        self._context = spark.sparkContext
        self._master, self._seconds, self._log = master, seconds, log
        self._is_over = threading.Event()
        self._since = time.monotonic()
        self._was_somebody = False
        self._is_nobody = False
        self._thread = threading.Thread(target=self._run, name="waltz spark executors", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError):  # Java has ended: whoever works with it is told, too
            while not self._is_over.wait(min(_LOOK_SECONDS, self._seconds / 5)):
                now = time.monotonic()
                if self._count():
                    self._since, self._was_somebody = now, True
                elif now - self._since > self._seconds:
                    self._is_nobody = True
                    self._context.cancelAllJobs()

    def _count(self) -> int:
        found: int = self._scala.getExecutorMemoryStatus().size()
        return found - 1  # the driver is one of them

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def error(self) -> MasterUnreachable | None:
        if not self._is_nobody:
            return None
        what = "has had no executor for" if self._was_somebody else "gave no executor within"
        return MasterUnreachable(
            f"the master {self._master} {what} {self._seconds:g} s. What Spark said is in {self._log}",
            next_step="look whether the master has workers with enough free cores and memory; --executor-wait waits longer",
        )


@contextmanager
def watched(spark: Any, master: str, seconds: float, needs: Sequence[Need], log: Path | str) -> Iterator[None]:
    """Somebody is there, and has what is needed; and is watched from then on."""
    watch = Watch(spark, master, seconds, log)
    try:
        try:
            _ask(spark, needs, log)
            yield
        finally:
            watch.close()
    except Exception as error:
        if watch.error is not None:
            raise watch.error from error
        raise


def _ask(spark: Any, needs: Sequence[Need], log: Path | str) -> None:
    context = spark.sparkContext

    def answers() -> list[tuple[str, list[str]]]:
        number = min(_ASKED_MAX, _ASKED_EACH * max(1, context.defaultParallelism))
        asked = context.parallelize(range(number), number).map(partial(machine_and_lacking, tuple(needs)))
        found: list[tuple[str, list[str]]] = asked.collect()
        return found

    pool = ThreadPoolExecutor(1, thread_name_prefix="waltz spark asking")
    future = pool.submit(answers)  # whoever waits for it here can be interrupted
    try:
        check_answers(future.result(), log)
    finally:
        while not future.done():  # it may not have begun when it is cancelled for the first time
            context.cancelAllJobs()
            wait([future], timeout=_CANCEL_SECONDS)
        pool.shutdown(wait=True)
