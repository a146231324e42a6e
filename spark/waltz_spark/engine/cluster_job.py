"""The driver of an export where a cluster runs it: carries out the very run that was planned elsewhere.

`submission` puts the plan into the zip that travels, beside this code, so that there is nothing that could be
missing or be of another run. What came of it is in the output, where whoever waits looks: files and manifests as always,
and what went wrong under a name that the next run clears away. Nothing here needs a tool of operators.
"""

from __future__ import annotations

import pickle
import pkgutil
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from waltz_spark.engine.executors import watched
from waltz_spark.engine.session import cause_in, told
from waltz_spark.engine.shipping import Need
from waltz_spark.exporting.destination import Destination
from waltz_spark.exporting.export import Run
from waltz_spark.exporting.exporter import Exporter
from waltz_spark.exporting.manifest import UNFINISHED
from waltz_spark.exporting.task import Written, error_text, error_told
from waltzd.errors import ClusterJobFailed, WaltzError

SPEC = "waltz_spark/cluster_job.plan"
"""In the zip."""
START = "from waltz_spark.engine.cluster_job import main\n\nmain()\n"
"""The program that spark-submit is given: it wants a file that is no zip."""
OF_DRIVER = "the log of the driver"
_APPLICATION = re.compile(r"\bapplication_\d+_\d+\b")
_POD = re.compile(r"submission ID ([\w.-]+):([\w.-]+)")


@dataclass(frozen=True, kw_only=True)
class Spec:
    run: Run
    exporter: Exporter
    needs: tuple[Need, ...]
    executor_seconds: float

    def encode(self) -> bytes:
        """Whoever watched the run here cannot do it there."""
        return pickle.dumps(replace(self, run=replace(self.run, watch=_nobody)))


def _nobody(written: Written) -> None:
    """What is published is in the output."""


def main() -> None:
    """On the cluster. The exit code is for its own lists; nobody here goes by it."""
    from pyspark.sql import SparkSession

    spec = received()
    builder: Any = SparkSession.builder
    spark = builder.getOrCreate()
    log = f"{OF_DRIVER}, {spark.sparkContext.applicationId}"
    try:
        with leaving(spec.run, log), watched(spark, spark.sparkContext.master, spec.executor_seconds, spec.needs, log):
            spec.run.carry_out(partial(spec.exporter.tasks, spark, None))
    finally:
        spark.stop()


def received() -> Spec:
    content = pkgutil.get_data(*SPEC.split("/"))
    assert content is not None
    found = pickle.loads(content)  # noqa: S301 - it came in one file with this code
    assert isinstance(found, Spec)
    return found


# -- what went wrong, from there to here -------------------------------------------------------------------------------


@contextmanager
def leaving(run: Run, log: str) -> Iterator[None]:
    """What ends the driver is in the output before it ends."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except WaltzError as error:
        _leave(run, error)
        raise SystemExit(error.exit_code) from error
    except (PySparkException, Py4JError, ConnectionError) as error:
        _leave(run, told(error, log))
        raise


def _leave(run: Run, error: WaltzError) -> None:
    run.destination.put_new(_place(run), error_text(error).encode())


def left(run: Run) -> WaltzError | None:
    """Taken away."""
    destination: Destination = run.destination
    text = destination.read(_place(run))
    if text is None:
        return None
    destination.remove(_place(run))
    return error_told(text)


def _place(run: Run) -> str:
    return f"{UNFINISHED}/{run.name}.error"


def how_to_see(said: str) -> str:
    """What shows the log of a driver, out of what spark-submit said; empty if it never came so far."""
    application, namespace, pod = _names(said)
    if pod:
        return f"kubectl logs --namespace {namespace} {pod}"
    return f"yarn logs -applicationId {application}" if application else ""


def how_to_stop(said: str) -> str:
    application, namespace, pod = _names(said)
    if pod:
        return f"kubectl delete pod --namespace {namespace} {pod}"
    return f"yarn application -kill {application}" if application else ""


def _names(said: str) -> tuple[str, str, str]:
    """An application of YARN, or a namespace and a pod."""
    pod = _POD.search(said)
    if pod is not None:
        return "", pod[1], pod[2]
    application = _APPLICATION.search(said)
    return (application[0] if application else ""), "", ""


def failure(said: str, master: str, code: int, log: str) -> ClusterJobFailed:
    """Where the driver could not tell by itself."""
    see = how_to_see(said)
    cause = cause_in(said)
    because = f": {cause}" if cause else ""
    return ClusterJobFailed(
        f"the job on {master} ended ({code}) before the export was complete{because}. What spark-submit said is in {log}",
        next_step=f"`{see}` shows what the driver said; remove the cause, then run the same command again" if see else "",
    )
