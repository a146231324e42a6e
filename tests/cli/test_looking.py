"""`waltzctl health`, `top`, `events`, `doctor` and `support bundle` against real clusters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.example import examples
from waltzctl.health.probe import PAYLOAD
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell.cluster_target import resolve, using
from waltzd import BlockingClient
from waltzd.client.loop import run
from waltzd.cluster.cluster import Cluster
from waltzd.protocol.batches import PROBE_KIND

Tool = Callable[..., Any]
PATIENCE_SECONDS = 60


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is written goes to the directory of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def as_json(told: Any) -> Any:
    found = json.loads(told.out)
    assert found["version"] == 1
    return found


@pytest.mark.parametrize("words", [["health"], ["top"], ["events"], ["doctor"], ["support", "bundle"]], ids=" ".join)
def test_the_examples_of_the_help_run(live: LocalCluster, waltzctl: Tool, place: Path, words: list[str]) -> None:
    for arguments in examples(waltzctl, words):
        typed = [argument.replace("/tmp", str(place)) for argument in arguments]
        told = waltzctl(*typed, "--directory", live.directory)
        assert told.code == 0, told
        assert "Traceback" not in told.err


# -- health ------------------------------------------------------------------------------------------------------------


def test_a_probe_is_committed_and_read_back(live: LocalCluster, waltzctl: Tool) -> None:
    found = as_json(waltzctl("health", "1,3", "--directory", live.directory, "-o", "json"))
    assert found["is_healthy"]
    assert [one["partition"] for one in found["partitions"]] == [1, 3]
    for one in found["partitions"]:
        assert one["commit_milliseconds"] > 0
        with BlockingClient(",".join(live.server_addresses)) as client:
            read = client.read(one["partition"], one["id"])
        assert (read.kind, read.payload) == (PROBE_KIND, PAYLOAD)
    told = waltzctl("health", "--directory", live.directory)
    assert (told.code, told.err) == (0, "")
    assert told.out.startswith("healthy: 4 partitions committed a probe and gave it back\n")
    assert max(map(len, told.out.splitlines())) <= 80


def test_nothing_is_written_where_nothing_shall_be(live: LocalCluster, waltzctl: Tool) -> None:
    def marks() -> list[int]:
        return [
            one["id"]
            for one in as_json(waltzctl("health", "--no-write", "--directory", live.directory, "-o", "json"))["partitions"]
        ]

    before = marks()
    assert len(before) == 4
    assert marks() == before


def test_a_partition_that_is_not_there(live: LocalCluster, waltzctl: Tool) -> None:
    told = waltzctl("health", "4", "--directory", live.directory)
    assert (told.code, told.out) == (3, "")
    assert "W2007 there is no partition 4; the cluster has 4, from 0 on" in told.err
    assert waltzctl("health", "4th", "--directory", live.directory).code == 2


def test_why_nothing_can_be_committed(own: LocalCluster, waltzctl: Tool) -> None:
    for name in ("storage-1", "storage-2"):
        own.daemons[name].kill()
    told = waltzctl("health", "--timeout", "1", "--directory", own.directory)
    assert told.code == 10
    assert told.out.startswith("unhealthy: 0 of 2 partitions committed a probe and gave it back\n")
    assert re.search(r"^- partitions? .*: (mount|commit): W", told.out, re.M)
    for name in ("server-1", "server-2"):
        own.daemons[name].kill()
    found = as_json(waltzctl("health", "--timeout", "1", "--directory", own.directory, "-o", "json"))
    assert not found["is_healthy"]
    assert all(one["error"]["code"] == "W4001" for one in found["partitions"])


# -- top ---------------------------------------------------------------------------------------------------------------


def test_what_a_cluster_does(live: LocalCluster, waltzctl: Tool, place: Path) -> None:
    """Two looks, with some transactions between them."""
    out = place / "top.json"
    command = ["top", "--once", "--every", "3", "--directory", str(live.directory), "-o", "json"]
    with out.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "waltzctl", *command], stdout=file, env={**os.environ})
    sent = 0
    try:
        with BlockingClient(",".join(live.server_addresses)) as client:
            while process.poll() is None:
                client.append_many([b"x" * 100] * 20, partition=2)
                sent += 20
                assert sent < 1_000_000
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    found = json.loads(out.read_text())
    busiest = found["partitions"][0]
    assert busiest["partition"] == 2, "the busiest first"
    assert 0 < busiest["tx_per_second"] * found["seconds"] <= 1.001 * sent, "seconds are rounded"
    assert found["total"]["tx_per_second"] >= busiest["tx_per_second"]
    assert 0 < busiest["p50_ms"] <= busiest["p99_ms"]
    assert busiest["bytes_per_second"] == pytest.approx(busiest["tx_per_second"] * 140, rel=0.01)
    assert all(one["flushes_per_second"] > 0 for one in found["storages"])


def test_a_table_for_people(live: LocalCluster, waltzctl: Tool) -> None:
    told = waltzctl("top", "--once", "--every", "0.2", "-n", "2", "--sort", "partition", "--directory", live.directory)
    assert (told.code, told.err) == (0, "")
    assert re.search(r"^ +0  server-", told.out, re.M)
    assert "3 more partitions: -n shows more, --sort says which" in told.out
    assert max(map(len, told.out.splitlines())) <= 80


# -- events ------------------------------------------------------------------------------------------------------------


def test_what_daemons_said(live: LocalCluster, waltzctl: Tool) -> None:
    told = waltzctl("events", "--since", "1d", "--directory", live.directory)
    assert (told.code, told.err) == (0, "")
    lines = told.out.splitlines()
    assert lines == sorted(lines, key=lambda line: line[:24])
    assert {line.split()[1] for line in lines} >= {"server-1", "server-2"}
    assert any("open: session" in line for line in lines)
    only = as_json(waltzctl("events", "--since", "1d", "--daemon", "server-1", "--directory", live.directory, "-o", "json"))
    assert {one["who"] for one in only["events"]} == {"server-1"}
    assert set(only["events"][0]) == {"time", "who", "kind", "level", "code", "text"}


def test_events_that_cannot_be_asked_for(live: LocalCluster, waltzctl: Tool) -> None:
    told = waltzctl("events", "--daemon", "server-9", "--directory", live.directory)
    assert (told.code, told.out) == (3, "")
    assert "W2102 there is no daemon server-9" in told.err
    assert waltzctl("events", "--since", "soon", "--directory", live.directory).code == 2


def test_events_of_the_silent_are_missed_by_name(own: LocalCluster, waltzctl: Tool) -> None:
    own.daemons["storage-1"].kill()
    told = waltzctl("events", "--directory", own.directory)
    assert (told.code, "storage-1 does not answer: W4001" in told.err) == (7, True), told
    assert "open: session" in told.out


# -- the doctor --------------------------------------------------------------------------------------------------------


def wait_until_all_have_written(live: LocalCluster) -> None:
    """Two of three storages make a transaction committed; the third one may be later."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(
        view.reported is not None and view.reported.statistics.flush.quantile(0.99) is not None
        for view in run(live.snapshot()).storages
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_doctor(live: LocalCluster, waltzctl: Tool) -> None:
    assert waltzctl("health", "--directory", live.directory).code == 0
    wait_until_all_have_written(live)
    found = as_json(waltzctl("doctor", "--timeout", "30", "--directory", live.directory, "-o", "json"))
    grades = {one["name"]: one["grade"] for one in found["checks"]}
    assert grades["processes"] == grades["quorum margin"] == grades["clocks"] == grades["versions"] == "PASS"
    assert grades["ZooKeeper ensemble"] == "WARN", "it is alone"
    assert "UNKNOWN" not in grades.values()
    told = waltzctl("doctor", "--timeout", "30", "--directory", live.directory)
    assert "WARN ZooKeeper ensemble: 127.0.0.1:" in told.out


def test_the_doctor_of_a_cluster_that_is_ill(own: LocalCluster, waltzctl: Tool) -> None:
    own.daemons["storage-1"].kill()
    told = waltzctl("doctor", "--timeout", "30", "--directory", own.directory)
    assert told.code == 10
    assert "FAIL processes: storage storage-1 does not run" in told.out
    assert "UNKNOWN free space: storage-1 does not answer" in told.out


# -- the bundle --------------------------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        found = {entry.name.removeprefix("waltz-support/"): tar.extractfile(entry) for entry in tar.getmembers()}
        return {name: file.read() for name, file in found.items() if file is not None}


def test_a_bundle_has_everything_but_payloads(live: LocalCluster, waltzctl: Tool, place: Path) -> None:
    secret = b"a payload that nobody else may see"
    with BlockingClient(",".join(live.server_addresses)) as client:
        client.append(secret, partition=0)
    told = waltzctl("support", "bundle", "--to", place / "one.tar.gz", "--directory", live.directory)
    assert (told.code, told.out) == (0, f"{place / 'one.tar.gz'}\n")
    found = contents(place / "one.tar.gz")
    assert {"status.json", "doctor.json", "events.json", "history.json", "versions.json", "missing.json"} <= set(found)
    assert {"daemons/storage-1.json", "daemons/server-2.json", "config/server-1.yml"} <= set(found)
    assert json.loads(found["metadata/cluster.json"])["partitions"] == 4
    assert {"metadata/assignment.json", "metadata/partitions/3.json", "metadata/storages/storage-2.json"} <= set(found)
    assert not any(secret in content for content in found.values())
    assert json.loads(found["metadata/ids/client.json"])["secret"] == "(left out)"
    assert json.loads(found["missing.json"])["missing"] == {}

    again = waltzctl("support", "bundle", "--to", place / "one.tar.gz", "--directory", live.directory)
    assert (again.code, again.out) == (4, "")
    assert "W2140" in again.err
    words = ("support", "bundle", "--to", place / "two.tar.gz", "--directory", live.directory, "-o", "json")
    said = json.loads(waltzctl(*words).out)
    assert (said["file"], said["bytes"]) == (str(place / "two.tar.gz"), (place / "two.tar.gz").stat().st_size)
    assert ("status.json" in said["files"], said["missing"]) == (True, {})
    assert list(contents(place / "two.tar.gz")) == list(found), "the same names in the same order"


def test_a_bundle_says_what_is_missing(own: LocalCluster, waltzctl: Tool, place: Path) -> None:
    assert waltzctl("status", "--timeout", "30", "--directory", own.directory).code == 0
    own.daemons["zookeeper"].kill()
    own.daemons["storage-1"].kill()
    told = waltzctl("support", "bundle", "--timeout", "30", "--to", place / "one.tar.gz", "--directory", own.directory)
    assert told.code == 7
    found = contents(place / "one.tar.gz")
    missing = json.loads(found["missing.json"])["missing"]
    assert set(missing) == {"metadata", "daemons/storage-1.json", "events of storage-1"}
    assert json.loads(found["status.json"])["verdict"] in ("DEGRADED", "DOWN")


def test_crossed_admin_addresses_are_nobodys_replicas(live: LocalCluster, waltzctl: Tool) -> None:
    """Each says that it is another one: nothing that stands there is taken for what the one that is meant has."""

    async def cross(cluster: Cluster) -> None:
        there = await cluster.storages()
        second, third = there["storage-2"], there["storage-3"]
        await cluster.update_storage(replace(second, admin_listen=third.admin_listen), before=second)
        await cluster.update_storage(replace(third, admin_listen=second.admin_listen), before=third)

    place = resolve({"directory": str(live.directory)})
    using(place, cross)
    try:
        told = waltzctl("status", "--directory", live.directory)
        assert told.code == 10, told
        told = waltzctl("doctor", "--directory", live.directory)
        assert told.code == 10, told
        assert "recover STORAGE --clean" not in told.out
        assert "this is the storage storage-3" in " ".join(told.out.split())
        told = waltzctl("storage", "recover", "storage-2", "--clean", "--yes", "--directory", live.directory)
        assert (told.code, "W2085" in told.err) == (4, True), told
    finally:
        using(place, cross)
    assert waltzctl("status", "--directory", live.directory).code == 0
