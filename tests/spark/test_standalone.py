"""A master and two workers of Spark on this machine, as processes of their own: the tasks run where the driver is not, by a
Python that has no Waltz. The tests are in the order in which the cluster falls apart."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from waltz_spark.engine.session import find_java
from waltz_spark.export.destination import LocalDestination, newest_manifest
from waltz_spark.export.export import stray_files
from waltz_spark.export.manifest import Manifest
from waltz_spark.export.verification import check_files, check_log
from waltz_spark.log.directory_origin import DirectoryOrigin

from tests.cli.outcome import plain
from tests.spark.bare import FOR_FILES, bare_python, forked, packed
from tests.spark.exporting import export as export_without_spark
from tests.spark.growing import GrowingStorage

START_SECONDS, COMMAND_SECONDS = 300, 600
CLASSES = "org.apache.spark.deploy"
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
NOBODY = ("--conf", "spark.executor.memory=900g")
"""More than any worker has: the master is there, and gives nobody."""
BOTH = ("--conf", "spark.cores.max=2", "--conf", "spark.scheduler.minRegisteredResourcesRatio=1.0",
        "--conf", f"spark.scheduler.maxRegisteredResourcesWaitingTime={COMMAND_SECONDS}s")  # fmt: skip
"""It begins when both workers take part: how long that takes is no matter."""


@dataclass(frozen=True)
class Spark:
    master: str
    process: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]
    log: Path
    """Of the master."""


def start(name: str, log: Path, environment: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    import pyspark

    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    with log.open("wb") as file:
        return subprocess.Popen(
            [str(program), f"{CLASSES}.{name}", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0", *arguments],
            stdout=file, stderr=file, env=environment, start_new_session=True,
        )  # fmt: skip


def said(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    """What the log says, as soon as it does."""
    end = time.monotonic() + START_SECONDS
    while True:
        found = re.search(pattern, log.read_text())
        if found is not None:
            return found[1]
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.05)


def stop(process: subprocess.Popen[bytes]) -> None:
    """With everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    home = tmp_path_factory.mktemp("standalone")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "JAVA_HOME": find_java().home, "SPARK_WORKER_DIR": str(home / "work"),
                    "SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": QUICK,
                    "SPARK_LAUNCHER_OPTS": QUICK}  # fmt: skip
    logs = [home / name for name in ("master.log", "worker-0.log", "worker-1.log")]
    running = [start("master.Master", logs[0], environment)]
    try:
        master = said(running[0], logs[0], r"Starting Spark master at (spark://\S+)\s")
        for log in logs[1:]:
            running.append(start("worker.Worker", log, environment, "--cores", "1", "--memory", "1g", master))
        for process, log in zip(running[1:], logs[1:], strict=True):
            said(process, log, r"(Successfully registered with master)")
        yield Spark(master, running[0], running[1:], logs[0])
    finally:
        for process in reversed(running):
            stop(process)


def made_storage(directory: Path, segments: int = 6) -> GrowingStorage:
    made = GrowingStorage(directory / "storage", key=UUID(int=77), partitions=2, assigned=(0, 1))
    for partition in (0, 1):
        for segment in range(segments):
            made.append(partition, [b"%d %d %d" % (partition, segment, number) * 20 for number in range(75)])
    return made


def export(standalone: Spark, tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "waltzctl", "spark-export", str(tmp_path / "out"), "--source", str(tmp_path / "storage"),
         "--master", standalone.master, "--shared-path", "--conf", "spark.executor.memory=512m",
         "--conf", f"spark.executor.extraJavaOptions={QUICK}", "--target-file-size", "6kB", "-o", "json",
         "--progress", "off", *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip


def logs(tmp_path: Path) -> list[str]:
    return [str(path) for path in (tmp_path / "cache").glob("waltz/spark/log/*")]


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + COMMAND_SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def unfinished(tmp_path: Path) -> set[str]:
    """Files of tasks that are at work, or not published yet."""
    return {path.name for path in (tmp_path / "out" / "_waltz" / "tmp").glob("*/*")}


def manifest(tmp_path: Path) -> Manifest | None:
    return newest_manifest(LocalDestination(str(tmp_path / "out")))


def published(tmp_path: Path) -> int:
    """How many files."""
    found = manifest(tmp_path)
    return 0 if found is None else len(found.pieces)


def check_exact(tmp_path: Path) -> dict[int, int]:
    """What the manifest says is the log from its beginning on, and nothing else is there. How many records it has."""
    place = LocalDestination(str(tmp_path / "out"))
    found = newest_manifest(place)
    assert found is not None
    origin = DirectoryOrigin(storages=(str(tmp_path / "storage"),), allows_uncommitted=False)
    for checks in (check_files(place, found), check_log(origin, origin.catalog(None), found)):
        assert [checked.finding for checked in checks if checked.finding] == []
    assert stray_files(place, found) == []
    assert {total.span.first for total in found.partitions.values()} == {0}
    return {number: total.span.count for number, total in found.partitions.items()}


@dataclass(frozen=True)
class Ended:
    path: Path
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return " ".join(self.err.split())


ONE = ("--conf", "spark.cores.max=1")


@pytest.fixture(scope="module")
def ended(standalone: Spark, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Commands that do not need each other, side by side: each of them waits for something most of the time."""
    paths = {name: tmp_path_factory.mktemp(name) for name in ("nobody", "packed")}
    for path in paths.values():
        made_storage(path)
    archive = packed(paths["packed"] / "environment", bare_python(paths["packed"] / "bare", FOR_FILES))
    lines = {
        "nobody": ("--executor-wait", "0.5", *NOBODY),
        "packed": ("--conf", f"spark.archives={archive}#environment",
                   "--conf", "spark.pyspark.python=./environment/bin/python",
                   "--partitions", "0", "--target-file-size", "1MB", *ONE),
    }  # fmt: skip
    processes = {name: export(standalone, paths[name], *line) for name, line in lines.items()}
    return {name: end_of(paths[name], process) for name, process in processes.items()}


def end_of(path: Path, process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=COMMAND_SECONDS)
    return Ended(path, process.returncode, out, err)


def test_nobody_runs_the_tasks(standalone: Spark, ended: dict[str, Ended]) -> None:
    found = ended["nobody"]
    assert (found.code, found.out) == (6, "")
    (log,) = logs(found.path)
    assert plain(found.err).startswith(
        f"W2227 the master {standalone.master} gave no executor within 0.5 s. What Spark said is in {log}"
    )
    assert "--executor-wait waits longer" in found.said


@pytest.mark.long  # in short: Ctrl-C in test_spark_export
def test_control_c_while_nobody_is_there(standalone: Spark, tmp_path: Path) -> None:
    made_storage(tmp_path)
    process = export(standalone, tmp_path, "--conf", "spark.app.name=interrupted", *NOBODY)
    wait_until(process, lambda: "Registered app interrupted" in standalone.log.read_text())
    os.killpg(process.pid, signal.SIGINT)
    found = end_of(tmp_path, process)
    assert (found.code, found.out) == (130, "")
    assert found.err == "Interrupted. The export is as it was; the same command begins again.\n"
    assert logs(found.path) == []


@pytest.mark.long  # in short: what Spark says of it, in test_session
def test_workers_without_a_package(standalone: Spark, tmp_path: Path) -> None:
    """What is looked for here is there; the workers have another Python by that name."""
    made_storage(tmp_path)
    python = forked(tmp_path / "python", on_workers=bare_python(tmp_path / "bare", ("numpy",)))
    found = end_of(tmp_path, export(standalone, tmp_path, "--conf", f"spark.pyspark.python={python}", *ONE))
    assert (found.code, found.out) == (2, "")
    assert plain(found.err).startswith("W2229 the workers cannot run this job: No module named 'pyarrow'")
    assert [log in found.said for log in logs(found.path)] == [True]
    assert manifest(found.path) is None


def test_a_packed_environment(ended: dict[str, Ended]) -> None:
    """The code travels with the job, and its Python in an archive, which has nothing of Waltz."""
    found = ended["packed"]
    assert (found.code, found.err) == (0, "")
    assert json.loads(found.out)["exported"]["records"] == 450
    assert check_exact(found.path) == {0: 450}
    assert logs(found.path) == []


@pytest.mark.long  # in short: a run without executors above, and one that was killed in test_spark_export
def test_one_after_the_other_is_lost(standalone: Spark, ended: dict[str, Ended], tmp_path: Path) -> None:
    """What a lost worker was doing another one does, and goes on without a master. When nobody is left, the run ends by
    itself and keeps what it has. It comes last. The log would take half a minute: far longer than what happens to the run,
    on the slowest machine too."""
    assert ended
    storage = made_storage(tmp_path, segments=40)
    line = ("--rate", "30kB", "--executor-wait", "2", "--conf", "spark.standalone.executorRemoveDelayOnDisconnection=100ms")
    process = export(standalone, tmp_path, *line, *BOTH)
    wait_until(process, lambda: len(unfinished(tmp_path)) >= 3)
    stop(standalone.workers[0])
    tasks = len(unfinished(tmp_path)) + published(tmp_path)  # at most so many were begun, and in the order of the files
    wait_until(process, lambda: published(tmp_path) >= tasks)
    stop(standalone.process)
    begun = unfinished(tmp_path)
    wait_until(process, lambda: bool(unfinished(tmp_path) - begun))
    stop(standalone.workers[1])
    out, err = process.communicate(timeout=COMMAND_SECONDS)
    assert (process.returncode, out) == (7, "")
    kept = sum(check_exact(tmp_path).values())
    assert 0 < kept < 6000
    assert plain(err).startswith(
        f"W2105 after {kept:,} records: the master {standalone.master} has had no executor for 2 s"
    )
    assert [log in " ".join(err.split()) for log in logs(tmp_path)] == [True]
    export_without_spark(tmp_path / "out", storage.directory)
    assert check_exact(tmp_path) == {0: 3000, 1: 3000}
