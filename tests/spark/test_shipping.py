"""What travels with a job is enough where Waltz is not, and what is missing there is told before anything else happens."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pyspark
import pytest
from waltz_spark.engine.shipping import (
    ALWAYS,
    OF_CLUSTERS,
    VERSION,
    Need,
    archives_of,
    check_answers,
    check_python,
    lacking,
    needs_of,
    stand_in,
    zipped,
)
from waltz_spark.exporting.destination import LocalDestination
from waltz_spark.exporting.form import form_of
from waltz_spark.exporting.tasks import Job, assignments_of, packed, written_of
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.plan import Sizing, plan

from tests.spark.bare import FOR_CLUSTERS, FOR_FILES, bare_python, pretending
from tests.spark.exporting import storage_with
from waltzd.errors import BadArgument, PackageMissing, PathMissing, PythonDiffers

ROOT = Path(__file__).parents[2]


def run(python: Path, code: str, *path: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK"))}
    done = subprocess.run(
        [str(python), "-c", code], cwd="/", env={**environment, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def spark_paths() -> list[str]:
    """What Spark itself gives to its workers."""
    home = Path(pyspark.__file__).parent
    return sorted(map(str, [*home.glob("python/lib/*.zip"), *home.glob("jars/spark-core*.jar")]))


def test_the_zip_is_enough_for_a_task(tmp_path: Path) -> None:
    """A Python with the packages that are asked for, and no other: a whole task runs out of the zip."""
    storage = storage_with(tmp_path / "storage", {0: [b"one", b"two", b"three"]})
    origin = DirectoryOrigin(storages=(str(storage),), allows_uncommitted=True)
    catalog = origin.catalog(None)
    destination = LocalDestination(str(tmp_path / "out"))
    job = Job(origin=origin, destination=destination, cluster=catalog.key, form=form_of("parquet", None))
    given = assignments_of(plan(catalog, catalog.spans, Sizing()), is_lossless=False)
    python = bare_python(tmp_path / "bare", FOR_FILES)
    assert "No module named 'waltzd'" in run(python, "import waltzd")
    code = f"""
from waltz_spark.exporting.tasks import write, answer_of, unpacked
from waltz_spark.engine.shipping import ALWAYS, OF_CLUSTERS, lacking
assert lacking(ALWAYS) == []
assert lacking(OF_CLUSTERS) == ["grpcio 1.85.1", "protobuf 7.35.1"], lacking(OF_CLUSTERS)
for given in unpacked({packed(given)!r}):
    print(answer_of(write(unpacked({packed(job)!r}), given)))
"""
    written = written_of(run(python, code, zipped(tmp_path / "job.zip"), *spark_paths()).strip())
    assert written.error is None
    assert written.piece is not None
    assert written.piece.span.count == 3
    assert (tmp_path / "out" / written.place).stat().st_size == written.piece.size


def test_the_zip_is_enough_to_read_a_cluster(tmp_path: Path) -> None:
    python = bare_python(tmp_path / "bare", FOR_CLUSTERS)
    code = """
import waltz_spark.log.live_origin, waltz_spark.exporting.submission, waltz_spark.exporting.tasks
from waltz_spark.engine.shipping import ALWAYS, OF_CLUSTERS, lacking
assert "kazoo" not in __import__("sys").modules
print(lacking((*ALWAYS, *OF_CLUSTERS)))
"""
    assert run(python, code, zipped(tmp_path / "job.zip"), *spark_paths()) == "[]\n"


def test_what_is_in_the_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(zipped(tmp_path / "job.zip", {"waltz_spark/more": b"content"})) as archive:
        names = archive.namelist()
        assert archive.read("waltz_spark/more") == b"content"
    assert {"waltzd/errors.py", "waltzd/storage/replica/control.py", "waltz_spark/exporting/tasks.py"} < set(names)
    assert {"waltzd/server/command.py", "waltzd/storage/command.py"}.isdisjoint(names), "no daemon"
    assert {name.partition("/")[0] for name in names} == {"waltzd", "waltz_spark"}, "no tool of operators"


def test_needs() -> None:
    def modules(*, is_live: bool, decoder: str) -> list[str]:
        return [need.module for need in needs_of(is_live=is_live, decoder=decoder)]

    assert modules(is_live=False, decoder="") == ["numpy", "pyarrow"]
    assert modules(is_live=False, decoder="json:a bigint") == ["numpy", "pyarrow"]
    assert modules(is_live=True, decoder="text") == ["numpy", "pyarrow", "grpc", "google.protobuf"]
    assert modules(is_live=False, decoder="avro:x.avsc") == ["numpy", "pyarrow", "fastavro"]
    assert modules(is_live=True, decoder="protobuf:x#M")[-1] == "google.protobuf"
    assert modules(is_live=False, decoder="my.orders:decode")[-1] == "my.orders"


def test_versions_are_those_of_the_project() -> None:
    """Otherwise a worker would be told that it has what it needs, and fail later."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["spark"]]
    for need in (*ALWAYS, *OF_CLUSTERS):
        assert [text for text in asked if text.startswith(f"{need.package}>={need.version_min}")], need


def test_versions_are_on_the_page() -> None:
    page = (ROOT / "docs" / "spark.md").read_text().partition("### On a Spark cluster")[2].partition("\n## ")[0].lower()
    for need in (*ALWAYS, *OF_CLUSTERS):
        assert str(need) in page


def test_what_is_lacking() -> None:
    assert lacking((*ALWAYS, *OF_CLUSTERS)) == []
    assert lacking((Need("nowhere", "nothing"), Need("nowhere.inner", "the module nowhere.inner"))) == [
        "nothing", "the module nowhere.inner",
    ]  # fmt: skip
    (old,) = lacking((Need("numpy", "numpy", "999.1"),))
    assert old.startswith("numpy 999.1 (it has 2.")


def test_answers_of_workers() -> None:
    check_answers([("a", []), ("b", [])], "x.log")
    with pytest.raises(PackageMissing) as caught:
        check_answers([("b", ["pyarrow 18"]), ("a", []), ("b", ["pyarrow 18"]), ("c", ["the module m"])], "x.log")
    assert (
        caught.value.message
        == "the Python of the workers lacks pyarrow 18 and the module m (on b, c). What Spark said is in x.log"
    )
    assert caught.value.detail_next_step == (
        "install on every worker what is missing (pip install pyarrow) and say with --py-files where the module is; "
        "or send a packed environment with --archives FILE#NAME"
    )


def test_a_python_of_another_version(tmp_path: Path) -> None:
    python = pretending(tmp_path / "other", (3, 99))
    with pytest.raises(PythonDiffers, match=rf"is Python 3\.99, and this is Python {VERSION}"):
        check_python(str(python), ALWAYS)


def test_a_python_without_packages(tmp_path: Path) -> None:
    with pytest.raises(PackageMissing, match=r"lacks pyarrow 18$"):
        check_python(str(bare_python(tmp_path / "bare", ("numpy",))), ALWAYS)
    check_python(sys.executable, (*ALWAYS, *OF_CLUSTERS))


def test_what_is_no_python(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(PythonDiffers, match="cannot be run"):
        check_python(str(script), ALWAYS)
    script.chmod(0o755)
    with pytest.raises(PythonDiffers, match="does not tell its version"):
        check_python(str(script), ALWAYS)
    with pytest.raises(PythonDiffers, match="is not on this machine") as caught:
        check_python(str(tmp_path / "none"), ALWAYS)
    assert "--archives" in caught.value.detail_next_step
    check_python("./environment/bin/python", ALWAYS)


def test_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("env.tar.gz").touch()
    assert archives_of(["env.tar.gz#e", "hdfs://n/x.zip", "s3://b/y.zip#y"]) == (
        f"{tmp_path}/env.tar.gz#e", "hdfs://n/x.zip", "s3://b/y.zip#y",
    )  # fmt: skip
    for bad in ("#e", "env.tar.gz#", "env.tar.gz#a/b", "a,b"):
        with pytest.raises(BadArgument):
            archives_of([bad])
    with pytest.raises(PathMissing):
        archives_of(["other.zip#e"])


def test_a_stand_in(tmp_path: Path) -> None:
    """Java is started where the path that workers know leads to our Python."""
    assert stand_in(tmp_path, "./environment/bin/python")
    done = subprocess.run(
        ["environment/bin/python", "-c", "import sys; print(sys.executable)"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == f"{sys.executable}\n"
    assert not stand_in(tmp_path, "/usr/bin/python3")
    assert not stand_in(tmp_path, "python3")
    with pytest.raises(BadArgument):
        stand_in(tmp_path, "../python")
