"""`waltzctl spark-export` as a user runs it: a process of its own, with Spark, over a cluster that takes transactions."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from waltz_spark.export.destination import LocalDestination, newest_manifest
from waltz_spark.export.export import stray_files
from waltz_spark.export.manifest import Manifest
from waltz_spark.export.verification import check_files

from tests.cli.example import examples
from tests.conftest import SEED
from tests.json_schemas import check_output
from tests.spark.exporting import export
from tests.spark.growing import GrowingStorage
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.main import run, wants_json
from waltzd import BlockingClient, FeedMode

PARTITIONS, RECORDS = 3, 1200
COMMAND_SECONDS = 600
GONE = FileNotFoundError, ProcessLookupError
"""Of a process or a thread that ended while it was looked at."""
KILLS = int(os.environ.get("WALTZ_KILLS", "3"))
"""Of a long run. Each takes a start of Spark: more of them for whoever has the time."""
Moment = Callable[[int], bool]
"""Given the number of the manifest before: whether it is time."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {"storage": {"segment_bytes_max": "64KiB", "reserve_bytes": "1MiB"}}
    made = LocalCluster.make(tmp_path_factory.mktemp("export") / "c", partitions=PARTITIONS, servers=1, settings=settings)
    try:
        made.start()
        append(made, RECORDS)
        yield made
    finally:
        made.kill()


LOG: dict[int, list[bytes]] = {partition: [] for partition in range(PARTITIONS)}


def append(cluster: LocalCluster, count: int) -> None:
    servers = tuple(cluster.blueprint.addresses(name)[0] for name in cluster.blueprint.server_names)
    with BlockingClient(servers, feed=FeedMode.NONE) as client:
        for partition, log in LOG.items():
            start = len(log)
            payloads = [json.dumps({"n": number, "p": partition, "x": "x" * (number % 900)}).encode()
                        for number in range(start, start + count)]  # fmt: skip
            assert list(client.append_many(payloads, partition=partition).ids) == list(range(start, start + count))
            log += payloads


def command(*arguments: str | Path, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "waltzctl", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, **(environment or {})},
    )  # fmt: skip


def done(*arguments: str | Path, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    process = command(*arguments, environment=environment)
    out, err = process.communicate(timeout=COMMAND_SECONDS)
    if out and wants_json([str(one) for one in arguments]):
        check_output([str(one) for one in arguments], out)
    return process.returncode, out, err


def children(pid: int) -> list[int]:
    """All processes below one, as far as they are still its own."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        with suppress(*GONE):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with suppress(*GONE):
                    waiting += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
        found.append(parent)
    return found[1:]


def command_line(pid: int) -> bytes:
    with suppress(*GONE):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    return b""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
    """Spark stands behind all others on this machine: what it does may take long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Until it is so, or the process has ended without it."""
    wait_until(lambda: process.poll() is not None or condition(), "it came to nothing", COMMAND_SECONDS)


def is_gone(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except GONE:
        return True


def manifests(out: Path) -> int:
    return max((int(path.stem) for path in (out / "_waltz/manifest").glob("*.json")), default=0)


def unfinished(out: Path) -> int:
    return len(list((out / "_waltz/tmp").glob("*/*")))


def manifest_of(out: Path) -> Manifest | None:
    return newest_manifest(LocalDestination(str(out)))


def check_exact(out: Path, cluster: LocalCluster) -> None:
    """Every id of the log once, and the payloads that were appended."""
    import pyarrow.parquet as pq

    table = pq.read_table(str(out)).sort_by([("partition", "ascending"), ("txid", "ascending")])
    expected = [(partition, number, payload) for partition, log in LOG.items() for number, payload in enumerate(log)]
    found = zip(*(table.column(name).to_pylist() for name in ("partition", "txid", "data")), strict=True)
    assert list(found) == expected
    code, shown, _ = done("export", "verify", out, "--against-log", "--directory", cluster.directory, "-o", "json")
    assert (code, json.loads(shown)["result"]) == (0, "clean")
    assert os.listdir(out / "_waltz/tmp") == []


@pytest.fixture
def noise(tmp_path: Path) -> dict[str, str]:
    """Where logs of Spark go: each test looks at its own."""
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def logs(noise: dict[str, str]) -> list[Path]:
    return sorted(Path(noise["XDG_CACHE_HOME"]).glob("waltz/spark/log/*"))


SMALL_FILES = ("--target-file-size", "20kB")


@pytest.mark.parametrize("kills", [1, pytest.param(KILLS, marks=pytest.mark.long)])
def test_killed_again_and_again(cluster: LocalCluster, tmp_path: Path, noise: dict[str, str], kills: int) -> None:
    """kill -9 of the driver, wherever it is, and then Ctrl-C of a run that would take a quarter of a minute: what is
    published stays exact, and a run that nobody disturbs makes it whole."""
    pick = random.Random(int(os.environ[SEED]))
    out = tmp_path / "out"
    line = ("spark-export", out, "--directory", cluster.directory, *SMALL_FILES, "--decode", "json:n bigint, p int")
    moments: list[Moment] = [
        lambda before: unfinished(out) >= pick.randrange(1, 9),
        lambda before: manifests(out) > before,
        lambda before: unfinished(out) >= 1 and manifests(out) > before,
    ]
    kept = 0
    for moment in islice(cycle(moments), kills):
        before = manifests(out)
        process = command(*line, environment=noise)
        wait_for(process, partial(moment, before))
        family = children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        for pid in family:
            wait_until(partial(is_gone, pid), f"process {pid} lives on after its driver")
        reached = manifest_of(out)
        if reached is not None:
            assert [
                checked.finding for checked in check_files(LocalDestination(str(out)), reached) if checked.finding
            ] == []
            assert len(reached.pieces) >= kept
            kept = len(reached.pieces)
        append(cluster, 30)
    before, killed_logs = manifests(out), logs(noise)
    process = command(*line, "--rate", "100kB", "-o", "json", "--progress", "off", environment=noise)
    wait_for(process, lambda: manifests(out) > before)
    family = children(process.pid)
    lines = b"\n".join(map(command_line, family))
    assert b"--properties-file" in lines
    assert b"--conf" not in lines, "everybody on the machine can read a command line"
    for _ in range(5):  # somebody is impatient; a terminal tells all of them
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
    said, err = process.communicate(timeout=COMMAND_SECONDS)
    assert (process.returncode, said) == (130, "")
    assert err == "Interrupted. What was finished is in the export, and the same command goes on from there.\n"
    for pid in family:  # the workers of Spark end when they see that it has
        wait_until(partial(is_gone, pid), f"process {pid} lives on after the export")
    assert logs(noise) == killed_logs, "a run that was told to end leaves none"
    assert os.listdir(out / "_waltz/tmp") == []
    append(cluster, 30)  # however much was published before
    code, shown, err = done(*line, environment=noise)
    rest = [said for said in err.splitlines() if "records are exported" not in said]
    assert (code, rest) == (0, []), "how far it is, and nothing else"
    assert shown.splitlines()[-2].startswith("Exported ")
    assert "is complete up to these ids" in shown
    assert max(len(row) for row in shown.splitlines() if row.startswith(" ")) <= 80
    assert stray_files(LocalDestination(str(out)), manifest_of(out) or pytest.fail("no manifest")) == []
    check_exact(out, cluster)
    code, shown, err = done(*line, "-o", "json", environment={"PATH": "/nowhere", "JAVA_HOME": "/nowhere", **noise})
    assert (code, json.loads(shown)["result"], err) == (0, "nothing new", "")

    import pyarrow.parquet as pq

    table = pq.read_table(str(out))
    assert table.column("n").to_pylist() == table.column("txid").to_pylist()
    assert table.column("p").to_pylist() == table.column("partition").to_pylist()


def test_what_spark_says_is_in_a_file_that_is_named(cluster: LocalCluster, tmp_path: Path, noise: dict[str, str]) -> None:
    """A setting that Spark refuses: its noise is not on the terminal, and the file with it stays."""
    code, said, err = done(
        "spark-export", tmp_path / "out", "--directory", cluster.directory, "--conf", "spark.driver.memory=secret-nonsense",
        environment=noise,
    )  # fmt: skip
    assert (code, said) == (1, "")
    assert [str(path) in " ".join(err.split()) for path in logs(noise)] == [True]
    assert len(err.splitlines()) == 3
    assert err.startswith("W2228 Spark failed")
    assert manifest_of(tmp_path / "out") is None


def test_the_examples_of_the_help(growing: GrowingStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What they ask for can be had; those that would start Spark only say what they would do."""
    growing.append(0, [b"one", b"two"])
    growing.append(1, [b"three"])
    export(tmp_path / "export", growing.directory)

    def tool(*words: str) -> SimpleNamespace:
        capsys.readouterr()
        return SimpleNamespace(code=run(words), out=capsys.readouterr().out)

    source = ["--source", str(growing.directory)]
    for words in (["spark-export"], ["export", "status"], ["export", "verify"]):
        for line in examples(tool, words):
            if "s3://waltz-archive/orders" in line:  # a bucket is read in test_archive_segments
                continue
            given = [word.replace("/tmp/", f"{tmp_path}/") for word in line]
            given += ["--dry-run", *source] if words == ["spark-export"] else source if "--against-log" in line else []
            assert tool(*given).code == 0, given
