"""A run whose driver is on the cluster: handed over by spark-submit, carried out there, and judged by what it left.

The run that was planned here goes into the zip that travels, beside this code: nothing of it can be missing or be of
another run. The exit code of spark-submit differs between kinds of clusters, so it decides nothing: an export is complete
when its manifest says so, and the error that ended the driver is in the output, under a name that the next run clears away.
Settings go in a file that only this user can read.
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
from waltz_spark.exporting.destination import newest_manifest
from waltz_spark.exporting.export import Run, by_spark
from waltz_spark.exporting.manifest import UNFINISHED, Manifest
from waltz_spark.exporting.tasks import error_text, error_told, unseen
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
"""Over what the user says: the command waits here, and a second driver would find the output changed under it."""


class Abandoned(KeyboardInterrupt):
    """Ctrl-C while a job that was handed over runs: it may go on."""

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
    """Adds how to see the driver's log, which is known here."""
    see = how_to_see(said)
    if see and OF_DRIVER in error.message:
        error.detail_next_step = f"`{see}` shows that log; {error.detail_next_step}"
    return error


class _Follower:
    """Tells the progress display what was published, as if the driver were here."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiting = {path: given.number for path, given in zip(run.paths, run.assignments, strict=True)}

    def look(self) -> None:
        newest = newest_manifest(self._run.destination)
        published = {piece.path for piece in newest.pieces} if newest is not None and self._waiting else set()
        known = self._waiting.keys() & published
        if known:
            self._run.watch([self._waiting.pop(path) for path in sorted(known)])


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
    """A program that is started by another thread: Ctrl-C comes to the main thread, at any instruction, and must not fall
    between the start of a process and knowing it."""

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
        """The process, if it was started; from now on none is."""
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
    """Ends the local process only."""
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
        """Without the progress display, which is here: it follows the output."""
        return pickle.dumps(replace(self, run=replace(self.run, watch=unseen)))


def main() -> None:
    """On the cluster. The exit code is for the cluster's own lists."""
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
    """Leaves the error that ends the driver in the output."""
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
    """Takes the error that a driver left."""
    text = run.destination.read(_place(run))
    if text is None:
        return None
    run.destination.remove(_place(run))
    return error_told(text)


def _place(run: Run) -> str:
    return f"{UNFINISHED}/{run.job.run}.error"


def how_to_see(said: str) -> str:
    """What shows the log of a driver, out of what spark-submit said; empty if it never came so far."""
    return _command(said, "yarn logs -applicationId {}", "kubectl logs --namespace {} {}")


def how_to_stop(said: str) -> str:
    return _command(said, "yarn application -kill {}", "kubectl delete pod --namespace {} {}")


def _command(said: str, of_yarn: str, of_kubernetes: str) -> str:
    pod, application = _POD.search(said), _APPLICATION.search(said)
    if pod is not None:
        return of_kubernetes.format(*pod.groups())
    return of_yarn.format(application[0]) if application is not None else ""


def failure(said: str, master: str, code: int, log: str) -> SparkFailed:
    """For a driver that left no error."""
    see = how_to_see(said)
    cause = cause_in(said)
    because = f": {cause}" if cause else ""
    return SparkFailed(
        f"the job on {master} ended ({code}) before the export was complete{because}. What spark-submit said is in {log}",
        next_step=f"`{see}` shows what the driver said; remove the cause, then run the same command again" if see else "",
    )
