"""`waltzctl bench` against real clusters: what it says is what was written, and nothing of its own cluster stays behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import LASTING, Tool
from tests.cli.example import examples
from waltzctl.bench import command as waltzctl_bench
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.main import COMMANDS
from waltzctl.shell.options import command_of
from waltzd.client.client import Client
from waltzd.client.loop import run
from waltzd.protocol.batches import FeedMode

SECONDS_MAX = 180


SMALL = ("--storages", "1", "--replicas", "1", "--servers", "1")
"""A cluster of its own in which nothing depends on who else is there."""


def figures(waltzctl: Tool, *arguments: str | Path) -> dict[str, Any]:
    told = waltzctl("bench", *arguments, "-o", "json")
    assert told.code == 0, told.err
    found: dict[str, Any] = json.loads(told.out)
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    local = LocalCluster.make(
        tmp_path_factory.mktemp("bench") / "c", partitions=2, storages=1, servers=1, replication=1, settings=LASTING
    )
    try:
        local.start()
        yield local
    finally:
        local.kill()


def length(cluster: LocalCluster) -> int:
    """How many transactions its log has, over all partitions."""

    async def ask() -> int:
        async with Client(cluster.server_addresses, feed=FeedMode.NONE, partitions=()) as client:
            return sum([await client.end_position(partition) + 1 for partition in range(client.partition_count)])

    return run(ask())


def daemons_under(home: Path) -> list[str]:
    """Processes whose command names a file there, besides the command that made them."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            commands.append(path.read_bytes().replace(b"\0", b" ").decode())
    return [command for command in commands if str(home) in command and " bench " not in command]


def written_under(home: Path) -> bool:
    """Whether any of its storages has got records."""
    with suppress(FileNotFoundError):  # a partition that is being made gets another name
        return any(path.stat().st_size > 1 << 16 for path in home.rglob("*.seg"))
    return False


def test_what_it_counts_is_in_the_log(waltzctl: Tool, cluster: LocalCluster) -> None:
    before = length(cluster)
    at = ("--at", ",".join(cluster.server_addresses), "--yes")
    found = figures(waltzctl, "append", *at, "--count", "3001", "--batch", "7", "--producers", "3")
    assert length(cluster) - before == 3001
    (committed,) = found["series"]
    assert (committed["name"], committed["count"], found["attempts"]) == ("committed", 3001, 3001)
    assert committed["bytes"] == 3001 * 512
    assert "replicas" not in found["place"]


def test_a_rate_is_kept(waltzctl: Tool, cluster: LocalCluster) -> None:
    at = ("--at", ",".join(cluster.server_addresses), "--yes")
    found = figures(waltzctl, "append", *at, "--rate", "200", "--count", "100", "--locks", "0")
    (committed,) = found["series"]
    assert committed["count"] == 100
    assert committed["seconds"] >= 100 / 200 - 0.01  # not faster than it was due


def test_nobody_writes_to_somebody_elses_log_without_being_asked(waltzctl: Tool, cluster: LocalCluster) -> None:
    before = length(cluster)
    told = waltzctl("bench", "append", "--at", ",".join(cluster.server_addresses), "--seconds", "1")
    assert (told.code != 0, told.out) == (True, "")
    assert "for good" in told.err
    assert length(cluster) == before


def test_a_cluster_of_its_own_is_gone_afterwards(waltzctl: Tool, tmp_path: Path) -> None:
    told = waltzctl("bench", "append", "--directory", tmp_path, "--seconds", "1", "--servers", "1")
    assert told.code == 0, told.err
    for words in ("3 replicas, flushed by 2 of them", "committed", "p99.9"):
        assert words in told.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("begun", "number"),
    [
        ("under load", signal.SIGINT),
        pytest.param("while the cluster starts", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("while the cluster starts", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("under load", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_it_can_be_ended_at_any_time_and_leaves_nothing(tmp_path: Path, number: signal.Signals, begun: str) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-m", "waltzctl", "bench", "append", "--directory", str(tmp_path), "--seconds", "3600", *SMALL],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + SECONDS_MAX
        while not (daemons_under(tmp_path) if begun == "while the cluster starts" else written_under(tmp_path)):
            assert waiting.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        waiting.send_signal(number)
        out, err = waiting.communicate(timeout=SECONDS_MAX)
    finally:
        waiting.kill()
    assert waiting.returncode == 128 + signal.SIGINT, err
    assert (out, "Traceback" in err) == ("", False)
    assert list(tmp_path.iterdir()) == []
    assert daemons_under(tmp_path) == []


def test_old_transactions_are_read_cold_and_new_ones_hot(waltzctl: Tool, tmp_path: Path) -> None:
    found = figures(waltzctl, "feed", "--directory", tmp_path, "--count", "4000", "--partitions", "1", *SMALL)
    by_name = {series["name"]: series["count"] for series in found["series"]}
    assert by_name == {"cold, records": 2000, "cold, heads": 2000, "hot, records": 2000, "hot, heads": 2000}
    assert list(tmp_path.iterdir()) == []


MISTAKES = {
    "a size that is none": (("append", "--size", "large"), "is not a size"),
    "more locks than there are": (("append", "--locks", "3", "--keys", "2"), "3 different locks out of 2"),
    "more replicas than storages": (("append", "--storages", "1", "--replicas", "3"), "3"),
    "a directory that is not there": (("append", "--directory", "/nowhere/at/all"), "does not exist"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_said_before_anything_runs(waltzctl: Tool, what: str) -> None:
    arguments, words = MISTAKES[what]
    told = waltzctl("bench", *arguments)
    assert (told.code, told.out) == (2, ""), told
    assert words in told.err


def test_the_examples_of_the_help_can_be_said(waltzctl: Tool) -> None:
    """They take too long to run all of them here; what they do is what the tests above do."""
    for name in COMMANDS["bench"]:
        for arguments in examples(waltzctl, ["bench", name]):
            command = command_of(name, getattr(waltzctl_bench, name))
            context = command.make_context(name, arguments[2:])
            assert context.params["output"] in ("table", "json")
