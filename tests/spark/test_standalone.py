"""A master and two workers of Spark on this machine, as processes of their own: the tasks run where the driver is not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from waltz_spark.java import find_java

from tests.spark.growing import GrowingStorage

START_SECONDS, COMMAND_SECONDS = 90, 180
CLASSES = "org.apache.spark.deploy"


@dataclass(frozen=True)
class Spark:
    master: str
    workers: list[subprocess.Popen[bytes]]


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
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "JAVA_HOME": find_java().home,
                   "SPARK_WORKER_DIR": str(home / "work"), "SPARK_DAEMON_MEMORY": "256m",
                   "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}  # fmt: skip
    running = [start("master.Master", home / "master.log", environment)]
    try:
        master = said(running[0], home / "master.log", r"Starting Spark master at (spark://\S+)")
        for number in range(2):
            log = home / f"worker-{number}.log"
            running.append(start("worker.Worker", log, environment, "--cores", "1", "--memory", "1g", master))
            said(running[-1], log, r"(Successfully registered with master)")
        yield Spark(master, running[1:])
    finally:
        for process in reversed(running):
            stop(process)


@pytest.fixture
def storage(tmp_path: Path) -> GrowingStorage:
    made = GrowingStorage(tmp_path / "storage", key=UUID(int=77), partitions=2, assigned=(0, 1))
    for partition in (0, 1):
        for segment in range(4):
            made.append(partition, [b"%d %d %d" % (partition, segment, number) * 20 for number in range(300)])
    return made


def export(standalone: Spark, storage: GrowingStorage, tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "waltzctl", "spark-export", str(tmp_path / "out"), "--source", str(storage.directory),
         "--master", standalone.master, "--shared-path", "--conf", "spark.executor.memory=512m",
         "--target-file-size", "30kB", "-o", "json", *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip


def check_exact(storage: GrowingStorage, out: Path) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(str(out)).sort_by([("partition", "ascending"), ("txid", "ascending")])
    assert list(zip(table.column("partition").to_pylist(), table.column("txid").to_pylist(), strict=True)) == [
        (partition, id_) for partition, end in storage.ends.items() for id_ in range(end)
    ]
    done = subprocess.run(
        [sys.executable, "-m", "waltzctl", "export", "verify", str(out), "--against-log", "--source",
         str(storage.directory), "-o", "json"],
        stdout=subprocess.PIPE, timeout=COMMAND_SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)["result"]) == (0, "clean")


def test_a_python_that_workers_do_not_have(standalone: Spark, storage: GrowingStorage, tmp_path: Path) -> None:
    process = export(standalone, storage, tmp_path, "--conf", "spark.pyspark.python=/nowhere/python3")
    out, err = process.communicate(timeout=COMMAND_SECONDS)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("W2229 the workers cannot run this job")
    assert "/nowhere/python3" in err
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_a_worker_is_lost_in_the_middle(standalone: Spark, storage: GrowingStorage, tmp_path: Path) -> None:
    """The code travels with the job, and what a lost worker was doing another one does."""
    process = export(standalone, storage, tmp_path, "--rate", "40kB")
    end = time.monotonic() + COMMAND_SECONDS
    while process.poll() is None and len(list((tmp_path / "out" / "_waltz" / "tmp").glob("*/*"))) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    stop(standalone.workers[0])
    out, err = process.communicate(timeout=COMMAND_SECONDS)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["exported"]["records"] == 2400
    check_exact(storage, tmp_path / "out")
