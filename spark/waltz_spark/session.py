"""One Spark for one command: started when it is certain that it is needed, and gone with the command.

Without a master, Spark runs in a process of its own on this machine. What Spark says goes to a file, which is named when
something fails and removed when nothing did. Settings go to it in a file that only this user can read, because a command
line can be read by everybody on the machine. On a cluster, this package travels with the job; Python itself and the
packages with machine code (NumPy, PyArrow) have to be on the workers.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waltz_spark.java import Java, cache_directory
from waltzd.disk import translate
from waltzd.errors import BadArgument, MasterUnreachable, NoSpark, PythonDiffers, SparkFailed, WaltzError

KNOCK_SECONDS, EXECUTOR_SECONDS, END_SECONDS = 5.0, 120.0, 20.0
_POLL_SECONDS = 0.2
_ATTEMPTS = 3
"""Of a task that failed by itself, on this machine; clusters have their own number."""
_MASTERS = ("local", "spark://", "yarn", "k8s://")
_PYTHON_ERROR = re.compile(r"(?!org\.|java\.|py4j\.)[A-Za-z_][\w.]*(Error|Exception)\b")
_FAST_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java only hands out tasks here: what makes long computations fast costs more than it gives."""


@dataclass(frozen=True, kw_only=True)
class SparkSettings:
    master: str
    java: Java
    conf: Mapping[str, str]
    """What the user says, over everything else."""
    py_files: Sequence[str] = ()

    @property
    def is_local(self) -> bool:
        return is_local(self.master)


def is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def default_master() -> str:
    return f"local[{len(os.sched_getaffinity(0))},{_ATTEMPTS}]"


def check_master(master: str) -> None:
    """Whether it can be one at all."""
    if not master.startswith(_MASTERS):
        raise BadArgument(
            f"--master {master}: that is no master", next_step="say local[N], spark://HOST:PORT, yarn or k8s://…"
        )
    for address in _addresses(master):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise BadArgument(f"--master {master}: {address!r} is not HOST:PORT")


def knock(master: str) -> None:
    """Where it is easy to see whether anybody is there."""
    wrong = []
    for address in _addresses(master):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
        except OSError as error:
            wrong.append(f"{address}: {error.strerror or error}")
        else:
            return
    if wrong:
        raise MasterUnreachable(f"the master {master} does not answer: {'; '.join(wrong)}")


def _addresses(master: str) -> list[str]:
    return master.removeprefix("spark://").split(",") if master.startswith("spark://") else []


def conf_of(given: Sequence[str]) -> dict[str, str]:
    """Of --conf NAME=VALUE."""
    found = {}
    for text in given:
        name, is_there, value = text.partition("=")
        if not is_there or not name.startswith("spark.") or "\n" in text:
            raise BadArgument(f"--conf {text}: it has to be spark.NAME=VALUE")
        found[name] = value
    return found


@contextmanager
def running(settings: SparkSettings, log: Path) -> Iterator[Any]:
    """A session. Errors of Spark come out as ours, and then the log stays."""
    try:
        from pyspark.errors import PySparkException
    except ImportError as error:
        raise NoSpark("the package PySpark is not installed") from error
    from py4j.protocol import Py4JError

    folder = Path(tempfile.mkdtemp(prefix="waltz-spark-"))
    session, has_failed = None, False
    try:
        session = _start(settings, folder, log)
        yield session
    except (PySparkException, Py4JError, ConnectionError) as error:
        has_failed = True
        raise _told(error, log) from error
    except MasterUnreachable:
        has_failed = True  # it names the log
        raise
    finally:
        _end(session)
        shutil.rmtree(folder, ignore_errors=True)
        if not has_failed:
            with suppress(OSError):  # it may be on a file system that is full by now
                log.unlink(missing_ok=True)


def new_log(environment: Mapping[str, str]) -> Path:
    folder = cache_directory(environment) / "spark" / "log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number, path = tempfile.mkstemp(prefix=time.strftime("%Y-%m-%d-%H%M%S-"), suffix=".log", dir=folder)
    except OSError as error:
        raise translate(error, f"writing to {folder}") from error
    os.close(number)
    return Path(path)


def _start(settings: SparkSettings, folder: Path, log: Path) -> Any:
    from pyspark.sql import SparkSession

    properties = folder / "settings.properties"
    properties.touch(mode=0o600)
    properties.write_text("".join(f"{name} {_escaped(value)}\n" for name, value in _settings(settings, folder).items()))
    os.environ["JAVA_HOME"] = settings.java.home
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--properties-file {properties} pyspark-shell"
    os.environ.pop("SPARK_HOME", None)  # this package's Spark, and not one of another version that is installed beside it
    if settings.conf.get("spark.pyspark.python"):
        os.environ["PYSPARK_PYTHON"] = settings.conf["spark.pyspark.python"]
    elif settings.is_local:
        os.environ["PYSPARK_PYTHON"] = sys.executable
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if settings.is_local:
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    with noise_into(log):
        builder: Any = SparkSession.builder
        session = builder.getOrCreate()
    for path in settings.py_files:
        session.sparkContext.addPyFile(path)
    if not settings.is_local:
        session.sparkContext.addPyFile(_zipped(folder / "waltz_job.zip"))
        _wait_for_executors(session, settings.master, log)
    return session


def _settings(settings: SparkSettings, folder: Path) -> dict[str, str]:
    found = {
        "spark.master": settings.master,
        "spark.app.name": "waltz spark-export",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": _FAST_START,
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.speculation": "false",
    }
    if settings.is_local:
        found["spark.driver.bindAddress"] = found["spark.driver.host"] = "127.0.0.1"
    return found | dict(settings.conf)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\")


@contextmanager
def noise_into(path: Path) -> Iterator[None]:
    """What processes that are started meanwhile say goes to a file, for good: Java, and the workers that it starts."""
    own = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def _zipped(path: Path) -> str:
    """What the executors need of this package: no tool, no daemon."""
    import waltz_spark
    import waltzd

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in (waltz_spark, waltzd):
            assert package.__file__ is not None
            root = Path(package.__file__).parent
            for source in sorted(root.rglob("*.py")):
                archive.write(source, Path(root.name, source.relative_to(root)))
    return str(path)


def _wait_for_executors(session: Any, master: str, log: Path) -> None:
    scala = session.sparkContext._jsc.sc()
    end = time.monotonic() + EXECUTOR_SECONDS
    while scala.getExecutorMemoryStatus().size() <= 1:  # the driver is one of them
        if scala.isStopped() or time.monotonic() > end:
            raise MasterUnreachable(
                f"the master {master} gave no executor within {EXECUTOR_SECONDS:.0f} seconds. What Spark said is in {log}"
            )
        time.sleep(_POLL_SECONDS)


def _end(session: Any) -> None:
    """Java ends with us; without waiting for it, files of ours would still be in its use."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    dead = (Py4JError, OSError)  # which is what we want
    if session is not None:
        with suppress(*dead):
            session.stop()
    if gateway is None:
        return
    process: subprocess.Popen[bytes] = gateway.proc
    with suppress(*dead):
        gateway.shutdown()
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    SparkContext._gateway = SparkContext._jvm = None


def _told(error: Exception, log: Path) -> WaltzError:
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for sign in ("[PYTHON_VERSION_MISMATCH] ", "No module named", "Cannot run program"):
        found = next((line[line.index(sign) :] for line in lines if sign in line), None)
        if found:
            found = found.removeprefix(sign if sign.startswith("[") else "")[:300].rstrip(".")
            return PythonDiffers(f"the workers cannot run this job: {found}. What Spark said is in {log}")
    said = next(
        (line for line in lines if "Error" in line or "Exception" in line), lines[0] if lines else type(error).__name__
    )
    return SparkFailed(f"Spark failed: {said[:300]}. All that it said is in {log}")
