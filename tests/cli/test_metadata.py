"""`waltzctl cluster save-metadata`, `load-metadata` and `rebuild-metadata` against real daemons: ZooKeeper loses everything
under load, and what is put back loses nothing; what cannot be right is refused before anything is changed."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from kazoo.client import KazooClient

from tests.cli.example import examples
from tests.cli.numbered_load import NumberedLoad
from tests.cli.outcome import refused, until
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell.blueprint import ZOOKEEPER
from waltzctl.shell.cluster_target import resolve, using
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.metadata import read, write

Tool = Callable[..., Any]
PATIENCE_SECONDS = 90
REFUSED = "has given no session for 4 seconds"
"""Part of the line that a server logs when ZooKeeper refuses its session because it holds less than the server has seen."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    made = LocalCluster.make(
        tmp_path_factory.mktemp("lost") / "c", partitions=2, settings={"server": {"session_seconds": 4}}
    )
    try:
        made.start()
        yield made
    finally:
        made.kill()


def lose(cluster: LocalCluster) -> None:
    """The data of ZooKeeper is gone; everybody else runs on."""
    zookeeper = cluster.daemons[ZOOKEEPER]
    zookeeper.kill()
    for path in (cluster.directory / ZOOKEEPER).rglob("version-2"):
        shutil.rmtree(path)
    zookeeper.spawn()
    cluster.remember()
    until(zookeeper.is_ready, "ZooKeeper is there again")


def until_healthy(waltzctl: Tool, cluster: LocalCluster) -> None:
    until(lambda: waltzctl("status", "--directory", cluster.directory).code == 0, "all partitions are open")


def rebuild(cluster: LocalCluster, waltzctl: Tool) -> None:
    """Make the documents anew from what the storages hold, with the examples of the help."""
    addresses = [f"{name}={','.join(cluster.blueprint.addresses(name))}" for name in cluster.blueprint.storage_names]
    given = [word for storage in addresses for word in ("--storage", storage)]
    for typed in examples(waltzctl, ["cluster", "rebuild-metadata"]):
        at = typed.index("--storage")
        words = (*typed[:at], *given, *typed[at + 2 :], "--replicas", "3")
        told = waltzctl(*words, "--directory", cluster.directory)
        assert told.code == 0, told.err


def test_everything_comes_back_from_a_file_and_from_storages(
    cluster: LocalCluster, waltzctl: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the very words of the help."""
    where = ("--directory", cluster.directory)
    with NumberedLoad(cluster.server_addresses, tmp_path, pause_seconds=0.05) as load:
        monkeypatch.chdir(tmp_path)
        for typed in examples(waltzctl, ["cluster", "save-metadata"]):
            told = waltzctl(*typed, *where)
            assert (told.code, told.err) == (0, "")
        assert stat.S_IMODE((tmp_path / "waltz-metadata.jsonl").stat().st_mode) == 0o600
        lose(cluster)
        refused(waltzctl("partition", "list", *where), 3, "W2026")
        for typed in examples(waltzctl, ["cluster", "load-metadata"]):
            told = waltzctl(*typed, *where)
            assert told.code == 0, told.err
            assert "partitions 0-2: as in the documents, no storage has a later session" in told.out
        until_healthy(waltzctl, cluster)
        assert "cluster load-metadata" in waltzctl("history", *where).out

        lose(cluster)
        rebuild(cluster, waltzctl)
        until_healthy(waltzctl, cluster)
        assert json.loads(waltzctl("status", "-o", "json", *where).out)["cluster"]["name"] == "trial"
    assert load.acknowledged > 20


@pytest.mark.parametrize("verb", ["load-metadata", "rebuild-metadata"])
def test_servers_return_to_a_zookeeper_that_has_seen_less_than_they_have(
    cluster: LocalCluster, waltzctl: Tool, saved: Path, verb: str
) -> None:
    """What a year of life does to the count of its transactions: an empty one refuses their sessions."""
    where = ("--directory", cluster.directory)
    logs = [cluster.daemons[name].log for name in cluster.blueprint.server_names]
    before = [log.read_text().count(REFUSED) for log in logs]

    client = KazooClient(cluster.coordinator_hosts)
    client.start()
    for _ in range(200):
        client.create("/burnt")
        client.delete("/burnt")
    client.stop()
    client.close()
    for name in cluster.blueprint.server_names:  # each of them writes, and learns the count
        for more in ((), ("--undo",)):
            told = waltzctl("server", "drain", name, *more, "--yes", *where)
            assert told.code == 0, told.err
    until_healthy(waltzctl, cluster)
    lose(cluster)
    if verb == "load-metadata":
        told = waltzctl("cluster", verb, saved, "--yes", *where)
        assert told.code == 0, told.err
    else:
        rebuild(cluster, waltzctl)
    until_healthy(waltzctl, cluster)
    until(lambda: waltzctl("status", *where).code == 0, "it is healthy")
    assert all(log.read_text().count(REFUSED) > count for log, count in zip(logs, before, strict=True))


def test_nobody_who_could_know_is_no_there_are_none(cluster: LocalCluster, waltzctl: Tool, saved: Path) -> None:
    where = ("--directory", cluster.directory)
    made = waltzctl("group", "create", "mailer", "--yes", *where)
    assert made.code == 0, made.err
    for name in cluster.blueprint.server_names:
        cluster.daemons[name].kill()
    cluster.remember()
    try:
        until(lambda: "W2132" in waltzctl("client", "list", *where).err, "ZooKeeper has lost the servers")
        for words in (("group", "list"), ("client", "list"), ("client", "list", "x")):
            refused(waltzctl(*words, *where), 10, "it is not known which")
    finally:
        for name in cluster.blueprint.server_names:
            cluster.start_one(name)


@pytest.fixture
def saved(cluster: LocalCluster, waltzctl: Tool, tmp_path: Path) -> Path:
    until_healthy(waltzctl, cluster)
    told = waltzctl("cluster", "save-metadata", tmp_path / "saved.jsonl", "--directory", cluster.directory, "-o", "json")
    found = json.loads(told.out)
    assert (told.code, found["left_out"], found["documents"] > 10) == (0, [], True)
    return Path(found["file"])


def test_what_is_saved_is_what_there_is_and_goes_through_a_pipe_as_well(saved: Path, cluster: LocalCluster) -> None:
    command = [sys.executable, "-m", "waltzctl", "cluster", "save-metadata", "-", "--directory", str(cluster.directory)]
    said = subprocess.run(command, capture_output=True, check=True)
    assert said.stderr.startswith(b"saved: ")
    piped, filed = read(said.stdout, "-"), read(saved.read_bytes(), "saved")
    assert piped.meta == filed.meta == using(resolve({"directory": str(cluster.directory)}), Cluster.meta)
    assert piped.documents.keys() == filed.documents.keys()
    assert not any(path.startswith(("/servers", "/election")) for path in piped.documents)


def test_a_cluster_in_use_is_left_alone(saved: Path, cluster: LocalCluster, waltzctl: Tool) -> None:
    where = ("--directory", cluster.directory)
    refused(waltzctl("cluster", "load-metadata", saved, "--yes", *where), 5, "is in use: server-1, server-2 run")
    listen, admin = cluster.blueprint.addresses("storage-1")
    given = ("--name", "x", "--storage", f"storage-1={listen},{admin}", "--confirm", "x")
    refused(waltzctl("cluster", "rebuild-metadata", *given, *where), 5, "is in use: server-1, server-2 run")
    silent = ("--name", "x", "--storage", "storage-9=127.0.0.1:1,127.0.0.1:1")
    refused(waltzctl("cluster", "rebuild-metadata", *silent, *where), 6, "W4001")


def test_a_file_that_is_not_right_is_refused_before_anything_is_asked(saved: Path, waltzctl: Tool) -> None:
    """What else is refused is in tests/unit/waltzd/cluster/test_metadata.py."""
    whole = saved.read_bytes()
    for data, code, said in (
        (whole[: len(whole) // 2], 8, "W2046"),
        (b'{"a": 1}\n', 8, "holds no metadata of a cluster"),
        (whole.replace(b'"version":1', b'"version":9', 1), 1, "W3004"),
    ):
        saved.write_bytes(data)
        refused(waltzctl("cluster", "load-metadata", saved, "--yes", "--coordinator", "127.0.0.1:1"), code, said)


def test_no_file_and_no_place_for_one(cluster: LocalCluster, waltzctl: Tool, tmp_path: Path) -> None:
    where = ("--directory", cluster.directory)
    refused(waltzctl("cluster", "load-metadata", tmp_path / "none", *where), 2, "W1003")
    refused(waltzctl("cluster", "save-metadata", tmp_path / "no" / "place", *where), 2, "W1003")
    assert not list(tmp_path.glob("*.new"))


def test_the_file_of_another_cluster_is_refused(saved: Path, cluster: LocalCluster, waltzctl: Tool) -> None:
    found = read(saved.read_bytes(), "saved")
    other = replace(found, documents={**found.documents, "/": replace(found.meta, key=UUID(int=7), name="other")})
    saved.write_bytes(write(other))
    told = waltzctl("cluster", "load-metadata", saved, "--yes", "--directory", cluster.directory)
    refused(told, 4, "W2023", "holds another cluster, ", "not 00000000")
