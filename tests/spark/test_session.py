"""What can be refused, and what has to be said, before any Spark is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from waltz_spark.engine.session import (
    SparkChoice,
    _py4j_into,
    chosen,
    conf_of,
    settings_in,
    spark_error,
    write_privately,
)

from tests.spark.growing import GrowingStorage
from tests.spark.telling import Outcome, Tool
from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import PythonDiffers


def choice(**given: object) -> SparkChoice:
    nothing = {"master": None, "conf": (), "properties_file": None, "py_files": (),
               "shared_path": False, "executor_wait": None, "java_home": None}  # fmt: skip
    return chosen(**{**nothing, **given})  # type: ignore[arg-type]


def written(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_file_of_settings_and_what_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is typed goes before the file, and a file may name the master."""
    path = written(tmp_path / "s", "spark.master yarn\nspark.submit.deployMode=client\nspark.a 1\nspark.b=2\nother.c 3\n")
    found = choice(properties_file=path, conf=("spark.b=4",))
    assert (found.master, found.conf) == ("yarn", {"spark.a": "1", "spark.b": "4"})
    assert capsys.readouterr().err == f"{path}: other.c left out: settings of Spark begin with spark.\n"
    found = choice(properties_file=path, master="local[1]", conf=("spark.master=spark://x:1",))
    assert found.master == "local[1]"
    assert choice().is_local


def test_secrets_that_others_can_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "spark.hadoop.fs.s3a.secret.key hush\n"
    choice(properties_file=written(tmp_path / "private", secret))
    assert capsys.readouterr().err == ""
    path = written(tmp_path / "public", secret, 0o644)
    choice(properties_file=path)
    assert capsys.readouterr().err == (
        f"{path} holds spark.hadoop.fs.s3a.secret.key, and others on this machine can read it: chmod 600 {path}\n"
    )
    choice(properties_file=written(tmp_path / "plain", "spark.executor.cores 1", 0o644))
    assert capsys.readouterr().err == ""
    choice(conf=("spark.my.password=hush",))
    said = capsys.readouterr().err
    assert said.startswith("--conf spark.my.password: others on this machine can see what is typed.")
    assert "--properties-file" in said
    assert "hush" not in said


@pytest.mark.parametrize(("name", "text", "said"), [
    ("bad", "spark.a \\u12", "four hexadecimal digits"),
    ("none", None, "No such file"),
])  # fmt: skip
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        written(tmp_path / name, text)
    with pytest.raises(WaltzError, match="--properties-file") as caught:
        settings_in(str(tmp_path / name))
    assert said in caught.value.message


def test_a_file_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"spark.a \xff")
    with pytest.raises(BadArgument):
        settings_in(str(tmp_path / "s"))


def test_settings_that_are_none() -> None:
    for text in ("spark.a", "a=b", "spark.a=b\nspark.c=d"):
        with pytest.raises(BadArgument):
            conf_of([text])


def test_whose_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def python(master: str, **conf: str) -> str:
        named = {name.replace("_", "."): value for name, value in conf.items()}
        return SparkChoice(master=master, conf=named).python

    monkeypatch.setenv("PYSPARK_PYTHON", "/of/the/environment")
    assert python("local[2]") == sys.executable
    assert python("yarn") == "/of/the/environment"
    assert python("yarn", spark_pyspark_python="./e/bin/python") == "./e/bin/python"
    monkeypatch.delenv("PYSPARK_PYTHON")
    assert python("yarn") == sys.executable


def test_settings_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert write_privately(tmp_path / "s", "x").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


# -- what Spark says ---------------------------------------------------------------------------------------------------

MISMATCH = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 0.0 failed 4 times
Traceback (most recent call last):
  File "worker.py", line 3300, in main
pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has version 3.12
"""
NO_PYTHON = """: org.apache.spark.SparkException: Job aborted due to stage failure: Lost task 1.3 in stage 0.0 (TID 6): \
org.apache.spark.SparkException:
Error from python worker:
  /opt/python: 2: exec: /nowhere/python3: not found
PYTHONPATH was:
  /x
"""


@pytest.mark.parametrize(("text", "said"), [
    (MISMATCH, "the workers cannot run this job: Python in worker has version 3.12"),
    (NO_PYTHON, "the workers cannot run their Python: /opt/python: 2: exec: /nowhere/python3: not found"),
])  # fmt: skip
def test_workers_with_another_python(text: str, said: str) -> None:
    error = spark_error(RuntimeError(text), "x.log")
    assert isinstance(error, PythonDiffers)
    assert error.message == f"{said}. What Spark said is in x.log"


def test_a_java_that_did_not_come_up(tmp_path: Path) -> None:
    """Only its log has the reason."""
    (tmp_path / "x.log").write_text("WARNING: incubating\nException in thread main: no room.\n\tat org.Error\n")
    error = spark_error(RuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited"), tmp_path / "x.log")
    assert error.message == f"Spark failed: Exception in thread main: no room. All that it said is in {tmp_path}/x.log"


# -- the command -------------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], growing: GrowingStorage, tmp_path: Path, *line: str | Path) -> Outcome:
    """No Java is started: there is none."""
    growing.append(0, [b"one"])
    found = Tool(capsys)("spark-export", tmp_path / "out", "--source", growing.directory, *line)
    assert found.out == ""
    assert not (tmp_path / "out").exists()
    return found


def test_a_master_that_does_not_answer(growing: GrowingStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = refused(capsys, growing, tmp_path, "--master", "spark://127.0.0.1:1", "--shared-path")
    assert found.code == 6
    assert found.err.startswith("W2227 the master spark://127.0.0.1:1 does not answer: 127.0.0.1:1: Connection refused")


def test_a_directory_of_this_machine(growing: GrowingStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = refused(capsys, growing, tmp_path, "--master", "yarn")
    assert found.code == 2
    assert "is a directory of this machine" in found.err


def test_what_py4j_logs_of_a_java_that_is_gone_is_not_for_the_terminal(
    tmp_path: Path,
) -> None:
    """It logs in the name of nobody; only the place of its code tells it from others."""
    log = tmp_path / "log"
    source = "import logging\ndef tell(): logging.getLogger().error('Exception while sending command.')\n"
    spaces: dict[str, dict[str, Any]] = {"py4j": {}, "ours": {}}
    for name, space in spaces.items():
        exec(compile(source, f"/packages/{name}/clientserver.py", "exec"), space)
    with _py4j_into(log):
        spaces["py4j"]["tell"]()
        assert "Exception while sending" in log.read_text()
        spaces["ours"]["tell"]()
    assert log.read_text().count("Exception") == 1
