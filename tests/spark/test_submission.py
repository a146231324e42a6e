"""A driver that runs somewhere else: the same export, the same errors, and what is said where nobody could tell."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from waltz_spark.exporting.destination import LocalDestination, newest_manifest
from waltz_spark.exporting.export import has_leftovers
from waltz_spark.exporting.submission import failure, how_to_see, how_to_stop

from tests.cli.outcome import plain
from tests.spark import stand_in_submit
from tests.spark.bare import FOR_FILES, bare_python
from tests.spark.growing import GrowingStorage
from tests.spark.telling import Outcome, Tool

YARN = "INFO Client: Application report for application_1700000000000_0042 (state: RUNNING)\n"
POD = "INFO LoggingPodStatusWatcherImpl: Waiting for application x with application ID s and submission ID jobs:x-driver"


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Tool(capsys)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def line(growing: GrowingStorage, out: Path, program: Path) -> list[str | Path]:
    return ["spark-export", out, "--source", growing.directory, "--master", "yarn", "--deploy-mode", "cluster",
            "--shared-path", "--spark-submit", program, "-o", "json"]  # fmt: skip


def logs(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").glob("waltz/spark/log/*"))


def told_of(outcome: Outcome) -> str:
    assert outcome.out == ""
    return " ".join(plain(outcome.err).split())


def test_a_driver_on_the_cluster(
    tool: Tool, growing: GrowingStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole export by a driver that has nothing of Waltz but what travels."""
    growing.append(0, [b"%d" % number for number in range(500)])
    growing.append(1, [b"x"] * 40)
    monkeypatch.setenv(stand_in_submit.HOME, str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = script(tmp_path / "submit", f'exec {sys.executable} {stand_in_submit.__file__} "$@"')
    out, place = tmp_path / "out", LocalDestination(str(tmp_path / "out"))
    python = bare_python(tmp_path / "bare", FOR_FILES)
    (tmp_path / "settings").write_text(f"# of the cluster\nspark.pyspark.python {python}\nspark.master = nowhere\n")
    outcome = tool(*line(growing, out, program), "--properties-file", tmp_path / "settings")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert (found["result"], found["exported"]["records"], found["exported"]["files"]) == ("exported", 540, 2)
    assert logs(tmp_path) == []
    assert not has_leftovers(place)
    outcome = tool("export", "verify", out, "--against-log", "--source", growing.directory)
    assert (outcome.code, outcome.err) == (0, "")


DRIVER = """
import sys
sys.path.insert(0, next(line for line in open(sys.argv[6]) if "pyFiles" in line).strip().split("=")[1])
from waltz_spark.exporting.submission import leaving, received
from waltz_spark.exporting.tasks import write
spec = received()
def runner(job, assignments):
    return (write(job, one) for one in assignments)
print("application_1700000000000_0042", flush=True)
with leaving(spec.run, "the log of the driver"):
    spec.run.carry_out(runner)
"""
"""Without a Spark."""


def test_what_a_driver_meets_is_told_here(tool: Tool, growing: GrowingStorage, tmp_path: Path) -> None:
    growing.append(0, [b"%d" % number for number in range(500)])
    (tmp_path / "driver.py").write_text(DRIVER)
    program = script(tmp_path / "submit", f'exec {sys.executable} {tmp_path}/driver.py "$@"')
    out, place = tmp_path / "out", LocalDestination(str(tmp_path / "out"))
    outcome = tool(*line(growing, out, program))
    assert (outcome.code, outcome.err) == (0, "")
    growing.append(0, [b"more"] * 10)
    (segment,) = (growing.directory / "0").glob("*500.seg")
    content = bytearray(segment.read_bytes())
    content[-10] ^= 1
    segment.write_bytes(content)
    before = newest_manifest(place)
    outcome = tool(*line(growing, out, program))
    assert outcome.code == 8, outcome.err
    assert "partition 0" in told_of(outcome)
    assert newest_manifest(place) == before
    assert not has_leftovers(place)


def test_it_never_started(tool: Tool, growing: GrowingStorage, tmp_path: Path) -> None:
    growing.append(0, [b"one"])
    program = script(
        tmp_path / "submit", f"echo '{YARN}' >&2; echo 'Exception in thread main: no queue named x' >&2; exit 1"
    )
    outcome = tool(*line(growing, tmp_path / "out", program))
    assert outcome.code == 1
    (log,) = logs(tmp_path)
    said = told_of(outcome)
    assert said.startswith(
        "W2228 the job on yarn ended (1) before the export was complete: Exception in thread main: no queue"
    )
    assert f"What spark-submit said is in {log}" in said
    assert "`yarn logs -applicationId application_1700000000000_0042` shows what the driver said" in said
    assert newest_manifest(LocalDestination(str(tmp_path / "out"))) is None


def test_it_says_that_all_is_well(tool: Tool, growing: GrowingStorage, tmp_path: Path) -> None:
    """What counts is the manifest."""
    growing.append(0, [b"one"])
    outcome = tool(*line(growing, tmp_path / "out", script(tmp_path / "submit", "exit 0")))
    assert outcome.code == 1
    assert told_of(outcome).startswith("W2228 the job on yarn ended (0) before the export was complete. What spark-submit")


def test_nobody_waits_any_more(tool: Tool, growing: GrowingStorage, tmp_path: Path) -> None:
    growing.append(0, [b"one"])
    program = script(tmp_path / "submit", f"echo '{YARN}' >&2; kill -INT {os.getpid()}; exec sleep 60")
    outcome = tool(*line(growing, tmp_path / "out", program))
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err == (
        "Interrupted. The job is not waited for any more, and may go on where it is; "
        "`yarn application -kill application_1700000000000_0042` ends it.\n"
    )


def test_a_program_that_is_not_there(tool: Tool, growing: GrowingStorage, tmp_path: Path) -> None:
    growing.append(0, [b"one"])
    outcome = tool(*line(growing, tmp_path / "out", tmp_path / "none"))
    assert outcome.code == 2
    assert told_of(outcome).startswith(f"W1003 --spark-submit {tmp_path}/none: there is no such program")


@pytest.mark.parametrize(("master", "why"), [
    ("spark://127.0.0.1:1", "Spark's own masters run no driver in Python"),
    ("local[2]", "this machine is all that there is"),
])  # fmt: skip
def test_where_no_driver_can_be(tool: Tool, tmp_path: Path, master: str, why: str) -> None:
    outcome = tool("spark-export", tmp_path / "out", "--source", tmp_path, "--master", master, "--deploy-mode", "cluster")
    assert outcome.code == 2
    assert f"W1001 --deploy-mode cluster does not go with the master {master}: {why}" in told_of(outcome)
    assert not (tmp_path / "out").exists()


def test_where_the_log_of_a_driver_is() -> None:
    assert how_to_see(YARN) == "yarn logs -applicationId application_1700000000000_0042"
    assert how_to_see(POD) == "kubectl logs --namespace jobs x-driver"
    assert how_to_stop(POD) == "kubectl delete pod --namespace jobs x-driver"
    assert how_to_see("nothing") == how_to_stop("") == ""


def test_what_a_failure_says() -> None:
    cause = "Exception in thread main: When running with master 'yarn' HADOOP_CONF_DIR must be set in the environment."
    error = failure(f"WARNING: Using incubator modules\n{cause}\n\tat org.Error", "yarn", 1, "x.log")
    assert error.message == (
        f"the job on yarn ended (1) before the export was complete: {cause[:-1]}. What spark-submit said is in x.log"
    )
