"""A run whose driver is on the cluster: handed over by spark-submit, carried out there, and judged by what it left.

The run that was planned here goes into the zip that travels, beside this code, so that there is nothing that could be
missing or be of another run. What spark-submit returns differs from one kind of cluster to the next, so it decides nothing:
an export is complete when its manifest says so, and what ended the driver is in the output, under a name that the next run
clears away. Settings go in a file that only this user can read, as everywhere. Nothing here needs a tool of operators.
"""

from __future__ import annotations

import os
import pickle
import pkgutil
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

from waltz_spark.engine.properties import encode
from waltz_spark.engine.session import PATIENCE, SparkSettings, cause_in, scratch, told, write_privately
from waltz_spark.engine.shipping import Need, watched, zipped
from waltz_spark.exporting.destination import Destination
from waltz_spark.exporting.export import Run, by_spark, newest_manifest, unwatched
from waltz_spark.exporting.manifest import UNFINISHED, Manifest
from waltz_spark.exporting.tasks import Written, error_text, error_told
from waltzd.errors import NotInstalled, PathMissing, SparkFailed, WaltzError

END_SECONDS = 20.0
LOOK_SECONDS = 2.0
_HERE = ("SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYSPARK_SUBMIT_ARGS")
"""Variables that say something of this machine, which the cluster is not to hear."""
_OURS = {
    "spark.submit.deployMode": "cluster",
    "spark.yarn.submit.waitAppCompletion": "true",
    "spark.kubernetes.submission.waitAppCompletion": "true",
    "spark.yarn.maxAppAttempts": "1",
}
"""Over what the user says: somebody waits here, and a second driver would find the output changed under it."""


class Abandoned(KeyboardInterrupt):
    """Nobody waits any more for a job that was handed over, and that may go on."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.stop = how_to_stop(said)


def spark_submit(named: str | None, environment: Mapping[str, str]) -> str:
    """The program: that of a cluster's own Spark, or the one that PySpark brings."""
    if named is not None:
        found = shutil.which(named, path=environment.get("PATH"))
        if found is None:
            raise PathMissing(f"--spark-submit {named}: there is no such program", not_done="nothing was written")
        return str(Path(found).absolute())
    try:
        import pyspark
    except ImportError as error:
        raise NotInstalled("the package PySpark is not installed", extra="spark") from error
    return str(Path(pyspark.__file__).parent / "bin" / "spark-submit")


def carried_out(spec: Spec, settings: SparkSettings, program: str, log: Path, *, is_own: bool) -> Manifest:
    """`is_own`: the program is PySpark's, and not one of a Spark that knows its own place. The newest manifest."""
    follower = _Follower(spec.run)
    with scratch() as folder:
        code = _submit(spec, settings, program, log, folder, follower, is_own=is_own)
    follower.look()
    newest = newest_manifest(spec.run.destination)
    error = left(spec.run)
    if error is None and newest is not None and is_complete(spec.run, newest):
        with suppress(OSError):
            log.unlink(missing_ok=True)
        return newest
    raise _with_place(error, _said(log)) if error else failure(_said(log), settings.master, code, str(log))


def is_complete(run: Run, newest: Manifest) -> bool:
    reached = newest.next_ids
    return all(reached.get(given.partition, -1) > given.span.last for given in run.assignments)


def _with_place(error: WaltzError, said: str) -> WaltzError:
    """The driver names its log; how to see it is known here."""
    see = how_to_see(said)
    if see and OF_DRIVER in error.message:
        error.detail_next_step = f"`{see}` shows that log; {error.detail_next_step}"
    return error


class _Follower:
    """Tells whoever watches the run what was published, as if the driver were here."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiting = {path: given.number for path, given in zip(run.paths, run.assignments, strict=True)}

    def look(self) -> None:
        newest = newest_manifest(self._run.destination)
        for piece in newest.pieces if newest is not None and self._waiting else ():
            number = self._waiting.pop(piece.path, None)
            if number is not None:
                self._run.watch(Written(number=number, piece=piece))


def _submit(
    spec: Spec, settings: SparkSettings, program: str, log: Path, folder: Path, follower: _Follower, *, is_own: bool
) -> int:
    start = folder / "waltz_export.py"
    start.write_text(START)
    code = zipped(folder / "waltz_job.zip", {SPEC: spec.encode()})
    properties = write_privately(folder / "settings.properties", encode(_settings(settings, code)))
    environment = {name: value for name, value in os.environ.items() if not is_own or name not in _HERE}
    line = [program, "--master", settings.master, "--deploy-mode", "cluster", "--properties-file", str(properties)]
    with log.open("ab") as file:
        starting = _Starting([*line, str(start)], file, {**environment, "JAVA_HOME": settings.java.home})
        try:
            try:
                process = starting.process()
            except OSError as error:
                raise SparkFailed(f"{program} cannot be run: {error.strerror}") from error
            return _wait(process, follower)
        except KeyboardInterrupt as interruption:
            begun = starting.begun()
            if begun is not None:
                _end(begun)
            raise Abandoned(_said(log)) from interruption


class _Starting:
    """A program that is started by another thread: signals come to ours, in the middle of anything, and whoever is told to
    end has to know whether there is something to end."""

    def __init__(self, line: Sequence[str], output: BinaryIO, environment: Mapping[str, str]) -> None:
        self._line, self._output, self._environment = line, output, environment
        self._orders: SimpleQueue[bool] = SimpleQueue()
        self._started: Future[subprocess.Popen[bytes] | None] = Future()
        Thread(target=self._run, name="waltz spark-submit", daemon=True).start()

    def _run(self) -> None:
        if not self._orders.get():
            self._started.set_result(None)
            return
        try:
            self._started.set_result(subprocess.Popen(
                self._line, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, start_new_session=True,
                env=self._environment,
            ))  # fmt: skip
        except OSError as error:
            self._started.set_exception(error)

    def process(self) -> subprocess.Popen[bytes]:
        self._orders.put(True)
        found = self._started.result()
        assert found is not None
        return found

    def begun(self) -> subprocess.Popen[bytes] | None:
        """What was started, if it was; from now on nothing is."""
        self._orders.put(False)  # the first order counts
        return self._started.result() if self._started.exception() is None else None


def _wait(process: subprocess.Popen[bytes], follower: _Follower) -> int:
    while True:
        try:
            return process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(WaltzError):  # it only shows; what counts is looked at once more at the end
                follower.look()


def _settings(settings: SparkSettings, code: str) -> dict[str, str]:
    py_files = [path if "://" in path else str(Path(path).absolute()) for path in settings.py_files]
    found = {
        "spark.app.name": "waltz spark-export",
        "spark.driver.memory": "1g",
        "spark.speculation": "false",
        **PATIENCE,
        **settings.conf,
        "spark.submit.pyFiles": ",".join([code, *py_files]),
    }
    if settings.archives:
        found["spark.archives"] = ",".join(settings.archives)
    return found | _OURS


def _end(process: subprocess.Popen[bytes]) -> None:
    """Only what waits here."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _said(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except OSError:
        return ""


# -- the driver --------------------------------------------------------------------------------------------------------

SPEC = "waltz_spark/cluster_job.plan"
"""In the zip."""
START = "from waltz_spark.exporting.submission import main\n\nmain()\n"
"""The program that spark-submit is given: it wants a file that is no zip."""
OF_DRIVER = "the log of the driver"
_APPLICATION = re.compile(r"\bapplication_\d+_\d+\b")
_POD = re.compile(r"submission ID ([\w.-]+):([\w.-]+)")


@dataclass(frozen=True, kw_only=True)
class Spec:
    run: Run
    needs: tuple[Need, ...]
    executor_seconds: float

    def encode(self) -> bytes:
        """Whoever watches the run here cannot do it there, where what is published is in the output."""
        return pickle.dumps(replace(self, run=replace(self.run, watch=unwatched)))


def main() -> None:
    """On the cluster. The exit code is for its own lists; nobody here goes by it."""
    from pyspark.sql import SparkSession

    spec = received()
    builder: Any = SparkSession.builder
    spark = builder.getOrCreate()
    log = f"{OF_DRIVER}, {spark.sparkContext.applicationId}"
    try:
        with leaving(spec.run, log), watched(spark, spark.sparkContext.master, spec.executor_seconds, spec.needs, log):
            spec.run.carry_out(partial(by_spark, spark))
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
    return f"{UNFINISHED}/{run.job.run}.error"


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


def failure(said: str, master: str, code: int, log: str) -> SparkFailed:
    """Where the driver could not tell by itself."""
    see = how_to_see(said)
    cause = cause_in(said)
    because = f": {cause}" if cause else ""
    return SparkFailed(
        f"the job on {master} ended ({code}) before the export was complete{because}. What spark-submit said is in {log}",
        next_step=f"`{see}` shows what the driver said; remove the cause, then run the same command again" if see else "",
    )
