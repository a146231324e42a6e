"""`waltzctl status`, against a cluster that is well, and against one that is taken apart piece by piece."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.example import examples
from tests.unit.snapshots import server, well
from waltzctl.health.poll import processes
from waltzctl.local_cluster.daemon import Daemon, birth
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell.blueprint import Life, save_lives

Tool = Callable[..., Any]
PATIENCE_SECONDS = 60


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "cache"


def as_json(told: Any) -> Any:
    found = json.loads(told.out)
    assert found["version"] == 1
    return found


def until(waltzctl: Tool, cluster: LocalCluster, holds: Callable[[Any], bool], *, timeout: int = 30) -> Any:
    """The status as soon as something holds of it. `timeout`: how long a look waits for whoever does not answer."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = as_json(waltzctl("status", "--directory", cluster.directory, "--timeout", timeout, "-o", "json"))
        if holds(found):
            return found
        assert time.monotonic() < deadline, found


def test_the_examples_of_the_help_run(live: LocalCluster, waltzctl: Tool) -> None:
    for arguments in examples(waltzctl, ["status"]):
        told = waltzctl(*arguments, "--directory", live.directory)
        assert (told.code, told.err) == (0, ""), told


def test_all_is_well(live: LocalCluster, waltzctl: Tool) -> None:
    told = waltzctl("status", "--timeout", "30", "--directory", live.directory)
    assert told.code == 0
    first, *rest = told.out.splitlines()
    assert first == "HEALTHY: all 4 partitions are open; 2 servers and 3 storages answer"
    assert max(len(line) for line in rest if line.startswith(" ")) <= 80
    assert re.search(r"^ storage-2 +127\.0\.0\.1:\d+ +storage-2 +5 +[\d.]+ GB +[\d,]+ ms!? +up", told.out, re.M)
    assert sum(daemon.is_running for daemon in live.daemons.values()) == told.out.count(" runs ")
    same = waltzctl("status", "--timeout", "30", "--coordinator", live.coordinator_hosts)
    assert (same.code, same.out.splitlines()[0]) == (0, first), "with no files of a cluster on this machine"

    found = as_json(waltzctl("status", "--timeout", "30", "--directory", live.directory, "-o", "json"))
    assert (found["verdict"], found["reasons"], found["error"], found["moves"]) == ("HEALTHY", [], None, {})
    assert sorted(found["answered_milliseconds"]) == ["server-1", "server-2", "storage-1", "storage-2", "storage-3"]
    assert [one["is_running"] for one in found["daemons"]] == [True] * 6


def test_a_storage_and_then_zookeeper(own: LocalCluster, waltzctl: Tool, cache: Path) -> None:
    """Since when is remembered from look to look; without the coordinator, daemons are asked directly."""
    look = ("status", "--timeout", "30", "--directory", own.directory)
    assert waltzctl(*look).code == 0
    own.daemons["storage-3"].kill()
    told = waltzctl(*look)
    assert (told.code, told.err) == (10, "")
    assert told.out.startswith("DEGRADED: all 2 partitions are open; 2 servers and 2 of 3 storages answer\n")
    assert "- storage storage-3 does not run. It has a replica of partitions 0-2" in told.out
    assert f"  Next: waltzctl up {own.directory} --detach" in told.out
    reasons = until(waltzctl, own, lambda found: True)["reasons"]
    (first,) = [reason for reason in reasons if reason["key"] == "silent storage-3"]

    own.daemons["zookeeper"].kill()
    found = until(waltzctl, own, lambda found: found["error"] is not None)
    by_key = {reason["key"]: reason for reason in found["reasons"]}
    assert by_key["silent storage-3"]["since"] == first["since"]
    assert found["coordinator_seen"] is not None
    assert [view["owner"] is not None for view in found["cluster"]["partitions"]] == [True] * 3, "they say so"
    assert waltzctl(*look).code == 10

    for path in cache.glob("waltz/*.json"):
        path.unlink()
    blank = as_json(waltzctl(*look, "-o", "json"))
    assert len(blank["cluster"]["storages"]) == 3, "the files of the cluster have the addresses, too"
    elsewhere = waltzctl("status", "--timeout", "30", "--coordinator", own.coordinator_hosts)
    assert (elsewhere.code, elsewhere.out) == (6, ""), "nobody knows whom to ask"
    assert "W4001 no ZooKeeper listens at" in elsewhere.err


def test_a_storage_that_does_not_answer_keeps_nobody_waiting(own: LocalCluster, waltzctl: Tool) -> None:
    own.daemons["storage-2"].send(signal.SIGSTOP)

    def are_told_apart(found: Any) -> bool:
        """All the others answer within the time that this one is given."""
        return [name for name, took in found["answered_milliseconds"].items() if took is None] == ["storage-2"]

    found = until(waltzctl, own, are_told_apart, timeout=1)
    assert found["milliseconds"] < 1000 * PATIENCE_SECONDS
    reason = next(reason for reason in found["reasons"] if reason["key"] == "silent storage-2")
    assert "storage storage-2 does not answer at 127.0.0.1:" in reason["sentence"]
    assert reason["next_step"] == "its process runs: read its log with `waltzctl logs --daemon storage-2`"


def test_a_server_that_runs_and_is_in_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was frozen for longer than its session lasts. The state is made up: the server is this process."""
    directory = tmp_path / "small"
    LocalCluster.make(directory, storages=1, servers=2, partitions=1, replication=1)
    born = birth(os.getpid())
    assert born is not None
    save_lives(directory, {"server-1": Life(os.getpid(), born, 0)})
    monkeypatch.setattr(Daemon, "_is_ours", lambda self, pid: True)
    cluster = LocalCluster.find(directory)
    down, unlisted = processes(cluster, well())
    assert (down, unlisted) == (["zookeeper", "server-2"], {"server-1": os.getpid()}), "the storage is not in this cluster"
    assert processes(cluster, well(servers=(server("server-1"),)))[1] == {}


def test_no_majority_and_no_server(own: LocalCluster, waltzctl: Tool) -> None:
    for name in ("storage-1", "storage-2"):
        own.daemons[name].kill()
    found = until(
        waltzctl, own, lambda found: found["verdict"] == "DOWN" and found["reasons"][0]["partitions"] == [0, 1, 2]
    )
    assert found["reasons"][0]["stops"]
    for name in ("server-1", "server-2"):
        own.daemons[name].kill()
    found = until(waltzctl, own, lambda found: all(one["error"] for one in found["cluster"]["servers"]))
    assert {"silent server-1", "silent server-2"} <= {reason["key"] for reason in found["reasons"]}, "they do not run"


PATIENT = "from waltzctl.health import troubles; troubles.SLOW_MS = 1e9; from waltzctl.main import main; main()"
"""The tool as a program of its own, to which nobody is too slow."""


@pytest.mark.parametrize("output", ["table", "json"])
def test_watching_goes_on_until_it_is_told_to_end(live: LocalCluster, tmp_path: Path, output: str) -> None:
    """Without a terminal one snapshot stands below the other; the exit code is that of the last one."""
    command = ["status", "--watch", "0.2", "--timeout", "30", "--directory", str(live.directory), "-o", output]
    out = tmp_path / "out"
    with out.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", PATIENT, *command], stdout=file, stderr=subprocess.PIPE, env={**os.environ}
        )
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while out.read_text().count("HEALTHY") < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert "\x1b" not in out.read_text()


@pytest.mark.parametrize("command", [["status", "--watch"], ["top", "--every"]], ids=" ".join)
def test_on_a_terminal_the_screen_is_given_back(live: LocalCluster, command: list[str]) -> None:
    """Drawn on the alternate screen, in place, without colours for those who want none."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PATIENT, *command, "0.2", "--directory", str(live.directory)],
        stdout=theirs, stderr=theirs, stdin=theirs, env={**os.environ, "NO_COLOR": "1", "TERM": "xterm"},
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while shown.count(b"Ctrl-C ends.") < 2:
            assert time.monotonic() < deadline, shown
            ready, _, _ = select.select([ours], [], [], 1.0)
            shown += os.read(ours, 65536) if ready else b""
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how a terminal says that the other side is gone
            while more := os.read(ours, 65536):
                shown += more
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    enter, leave = b"\x1b[?1049h", b"\x1b[?1049l"
    assert (shown.count(enter), shown.count(leave)) == (1, 1)
    assert shown.index(enter) < shown.index(b"HEALTHY") < shown.index(leave)
    assert b"Traceback" not in shown
    assert not re.search(rb"\x1b\[(?:\d+;)*3[0-7]m", shown)


@pytest.mark.parametrize("arguments", [["--watch", "0"], ["--timeout", "0"], ["-o", "xml"], ["partition"]])
def test_mistyped(live: LocalCluster, waltzctl: Tool, arguments: list[str]) -> None:
    told = waltzctl("status", "--directory", live.directory, *arguments)
    assert (told.code, told.out) == (2, "")
    assert "Traceback" not in told.err
