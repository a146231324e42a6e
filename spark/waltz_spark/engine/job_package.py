"""The package of Waltz that a job sends to a cluster, and a watchdog for missing executors.

Waltz is plain Python: the modules that tasks import are sent as one zip. Packages with machine code cannot be sent; they
have to be installed on the workers, for the Python version of the driver.

A master that answers may have no executors, at the start or later, when workers or the master itself were lost. Spark then
waits without a time-out, so this module adds one.
"""

from __future__ import annotations

import re
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from waltzd.errors.operations import MasterUnreachable

_STAYS = re.compile(r"waltzd/(?:server|testing)/|waltzd/storage/(?!__init__)\w+\.py")
"""Modules that are not sent: the daemons, except the code that reads files of storages."""
_LOOK_SECONDS = 1.0


def zipped(path: Path) -> str:
    """Write the zip of the modules that tasks import; return its path."""
    import waltz_spark
    import waltzd

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for package in (waltz_spark, waltzd):
            assert package.__file__ is not None
            root = Path(package.__file__).parent
            for source in sorted(root.rglob("*.py")):
                name = str(Path(root.name, source.relative_to(root)))
                if not _STAYS.match(name):
                    archive.write(source, name)
    return str(path)


class _Watch:
    """A thread that cancels all jobs, repeatedly, after `seconds` without an executor."""

    def __init__(self, spark: Any, seconds: float) -> None:
        self._context = spark.sparkContext
        self._scala = self._context._jsc.sc()
        self._seconds = seconds
        self._is_over = threading.Event()
        self._since = time.monotonic()
        self.had_executors = self.is_over_time = False
        self._thread = threading.Thread(target=self._run, name="waltz spark executors", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError):  # Java has ended, and its other callers report that
            while not self._is_over.wait(min(_LOOK_SECONDS, self._seconds / 5)):
                now = time.monotonic()
                if self._scala.getExecutorMemoryStatus().size() > 1:  # the driver is one of the entries
                    self._since, self.had_executors = now, True
                elif now - self._since > self._seconds:
                    self.is_over_time = True
                    self._context.cancelAllJobs()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def watched(spark: Any, master: str, seconds: float, log: Path) -> Iterator[None]:
    """Raise `MasterUnreachable` if a cluster has no executor for `seconds`."""
    watch = _Watch(spark, seconds)
    try:
        try:
            yield
        finally:
            watch.close()
    except Exception as error:
        if watch.is_over_time:
            what = "has had no executor for" if watch.had_executors else "gave no executor within"
            raise MasterUnreachable(
                f"the master {master} {what} {seconds:g} s. What Spark said is in {log}",
                next_step="look whether its workers have enough free cores and memory; --executor-wait waits longer",
            ) from error
        raise
