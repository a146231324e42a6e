"""The examples as a user runs them: programs of their own against a cluster of real processes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from waltzctl.local_cluster.local import LocalCluster

ROOT = Path(__file__).parents[2]
SECONDS = 120


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def servers(directory: Path) -> Iterator[str]:
    cluster = LocalCluster.make(directory, partitions=4, storages=1, servers=1, replication=1)
    try:
        cluster.start()
        yield ",".join(cluster.server_addresses)
    finally:
        cluster.kill()


def operator(directory: Path, *words: str) -> str:
    command = [sys.executable, "-m", "waltzctl", *words, "--directory", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.examples.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_the_bank(servers: str, tmp_path: Path) -> None:
    """Two of three clients share a database; the second run goes on with what the first has left."""
    databases = [word for name in ("one", "two", "one") for word in ("--database", str(tmp_path / f"{name}.db"))]
    for seed in ("1", "2"):
        done = example("bank", "--servers", servers, *databases, "--branches", "2", "--transfers", "10", "--seed", seed)
        assert done.returncode == 0, done.stderr[-4000:] + done.stdout
        assert "accounts add up to 0" in done.stdout
        assert "the databases agree: True" in done.stdout


def test_the_examples_go_on_behind_probes_and_what_somebody_else_wrote(
    servers: str, directory: Path, tmp_path: Path
) -> None:
    for partition in ("0", "3"):
        operator(directory, "health")
        operator(directory, "txn", "append", partition, "hello")
        operator(directory, "health")
    done = example("counter", "--servers", servers, "--clients", "2", "--changes", "5", "--partition", "3")
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    assert "is no change of a counter" in done.stderr
    path = tmp_path / "bank.db"
    done = example("bank", "--servers", servers, "--database", str(path), "--transfers", "10")
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT partition_id, kind, reason FROM waltz_dead_letters").fetchall()
    assert [(partition, kind) for partition, kind, _ in found] == [(0, 0)]
    assert "JSONDecodeError" in found[0][2]


def test_a_wrong_address_is_said(tmp_path: Path) -> None:
    done = example("bank", "--servers", "nowhere", "--database", str(tmp_path / "one.db"))
    assert done.returncode != 0
    assert "'nowhere' is no address of a server" in done.stderr
