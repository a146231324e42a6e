"""`waltzctl cluster restore` with real daemons: a cluster under load is gone, and comes back elsewhere at one moment.

Transfers go between two partitions, back and forth: the second leg is written when the first is committed. Of the cluster
that is restored, each partition has all that was acknowledged up to the moment, and no second leg stands without its first.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.cli.conftest import LASTING
from tests.cli.example import examples
from tests.cli.outcome import refused
from tests.process.daemon import Daemon
from tests.process.server import ServerDaemon
from tests.process.zookeeper import LocalZooKeeper
from waltzctl.playground.local import LocalCluster
from waltzd import BlockingClient
from waltzd.archive.local import LocalStore
from waltzd.archive.metadata import save_metadata
from waltzd.errors import WaltzError
from waltzd.protocol.locks import Committed

Tool = Callable[..., Any]
PATIENCE_SECONDS = 120
PARTITIONS = 2


def until(true: Callable[[], Any], what: str) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < ends, what
        time.sleep(0.1)


@dataclass
class Transfers:
    """What was acknowledged, and when at the latest."""

    acknowledged: dict[tuple[int, int], float] = field(default_factory=dict)
    """Partition and id → seconds since 1970."""
    done: int = 0

    def run(self, client: BlockingClient, stop: threading.Event) -> None:
        while not stop.is_set():
            number, source = self.done, self.done % 2
            try:
                for leg, partition in enumerate((source, 1 - source)):
                    out = client.append(b"%d %d " % (number, leg) + bytes(400), partition=partition, timeout=5)
                    if not isinstance(out, Committed):
                        return
                    self.acknowledged[partition, out.id] = time.time()
            except WaltzError:
                return
            self.done += 1


@dataclass(frozen=True)
class Lost:
    """What is left of a cluster: its archive, and what its applications know."""

    store: Path
    key: UUID
    addresses: list[str]
    transfers: Transfers
    storage: tuple[str, str]
    """The addresses that its storage had."""
    application: BlockingClient
    """One that still thinks that it is there."""

    def storage_again(self, home: Path) -> Daemon:
        """One that answers where a storage of it was, under its key."""
        listen, admin = self.storage
        return Daemon(home, cluster_key=self.key, partitions=PARTITIONS, listen=listen, admin_listen=admin)


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lost]:
    store, home = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("old") / "cluster"
    settings: dict[str, dict[str, object]] = {
        "storage": {"archive": str(store)},
        "server": {**LASTING["server"], "segment_bytes_max": 20_000},
    }
    cluster = LocalCluster.make(home, partitions=PARTITIONS, storages=1, servers=1, replication=1, settings=settings)
    transfers, stop = Transfers(), threading.Event()
    try:
        cluster.start()
        save_documents(home, store)
        with BlockingClient(cluster.server_addresses) as client:
            load = threading.Thread(target=transfers.run, args=(client, stop))
            load.start()
            until(lambda: all(segments(store, number) >= 4 for number in range(PARTITIONS)), "segments are archived")
            cluster.kill()  # in the middle of the load
            stop.set()
            load.join()
            listen, admin = cluster.blueprint.addresses(cluster.blueprint.storage_names[0])[:2]
            yield Lost(store, cluster.blueprint.key, cluster.server_addresses, transfers, (listen, admin), client)
    finally:
        stop.set()
        cluster.kill()
        shutil.rmtree(home, ignore_errors=True)


def save_documents(home: Path, store: Path) -> None:
    from waltzctl.main import run

    file = home.with_suffix(".jsonl")
    assert run(["cluster", "save-metadata", str(file), "--directory", str(home)]) == 0
    save_metadata(LocalStore(str(store)), file.read_bytes())


def segments(store: Path, partition: int) -> int:
    return len(list((store / f"partition-{partition}" / "manifest").glob("*.json")))


class Elsewhere:
    """An empty ZooKeeper, and storages with empty directories."""

    def __init__(self, home: Path, *, key: UUID, storages: int = 2) -> None:
        self.home, self.key = home, key
        self.zookeeper = LocalZooKeeper(home / "zookeeper")
        self.storages = [Daemon(home / f"s{number}", cluster_key=key, partitions=PARTITIONS) for number in range(storages)]
        self.server: ServerDaemon | None = None

    def __enter__(self) -> Elsewhere:
        self.zookeeper.start()
        for storage in self.storages:
            storage.start()
        return self

    def __exit__(self, *error: object) -> None:
        for daemon in (self.server, *self.storages):
            if daemon is not None:
                daemon.kill()
        self.zookeeper.kill()

    @property
    def given(self) -> list[str]:
        named = (f"s{at}={one.listen},{one.admin_listen}" for at, one in enumerate(self.storages))
        return [word for storage in named for word in ("--storage", storage)]

    @property
    def where(self) -> list[str]:
        return ["--coordinator", self.zookeeper.hosts]

    def serve(self, listen: str = "127.0.0.1:0") -> list[str]:
        self.server = ServerDaemon(
            self.home, name="again", hosts=self.zookeeper.hosts, cluster="/waltz", listen=listen
        ).start()
        return [self.server.listen]


def content(client: BlockingClient, partition: int) -> list[tuple[int, int]]:
    """The number and the leg of each transaction."""
    found = []
    for one in client.scan(partition):
        number, leg = one.payload.split()[:2]
        found.append((int(number), int(leg)))
    return found


def check(client: BlockingClient, lost: Lost, marks: list[int], moment: float | None) -> None:
    logs = [content(client, partition) for partition in range(PARTITIONS)]
    assert [len(log) - 1 for log in logs] == marks
    for (partition, id_), seconds in lost.transfers.acknowledged.items():
        if moment is not None and seconds < moment:
            assert id_ <= marks[partition], f"id {id_} of partition {partition} was acknowledged before"
    legs = {leg for log in logs for leg in log}
    assert len(legs) == sum(map(len, logs))
    for number, leg in legs:
        assert leg == 0 or (number, 0) in legs, f"transfer {number} has its second leg, and not its first"


def test_a_cluster_that_is_gone_comes_back_at_one_moment(
    lost: Lost, waltzctl: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the words of the help, and of the page that is for that day. A first attempt meets an object that has rotted, and
    the next one goes on."""
    latest, _ = examples(waltzctl, ["cluster", "restore"])
    with Elsewhere(tmp_path, key=uuid4()) as there:
        at = latest.index("--storage")
        words = [*latest[:2], str(lost.store), *latest[3:at], *there.given, *there.where]
        dry = waltzctl(*words, "--dry-run")
        assert (dry.code, "all partitions are cut at" in dry.out, "would do" in dry.out) == (0, True, True), dry.err
        with lost.storage_again(tmp_path / "old"):
            told = waltzctl(*words, "--dry-run")
            assert (told.code, "of the old cluster answers at" in told.err) == (5, True), told
        with rotten(lost.store, partition=1):
            told = waltzctl(*words, "--confirm", "local")
            refused(told, 8, "W2264", "partition 1", "has other bytes than the manifest says", "no server takes part")
            refused(waltzctl("cluster", "describe", *there.where), 4, "W2045", "waltzctl cluster restore began at")
        assert "goes on with what was begun" in waltzctl(*words, "--dry-run").out
        for name, value in (
            ("STORE", str(lost.store)), ("STORAGES", " ".join(there.given)), ("CLUSTER", "local"),
            ("WALTZ_COORDINATOR", there.zookeeper.hosts),
        ):  # fmt: skip
            monkeypatch.setenv(name, value)
        before, after = page_commands()[:4], page_commands()[4:]
        for typed in before:
            more = ["--progress", "json", "-o", "json"] if "--confirm" in typed else []
            told = waltzctl(*typed, *more)
            assert told.code == 0, (typed, told)
        found = json.loads(told.out)
        assert '"event": "progress"' in told.err
        moment = datetime.fromisoformat(found["moment"]).timestamp()
        marks = [row["last_id"] for row in found["partitions"]]
        assert all(mark > 50 for mark in marks)
        refused(waltzctl(*words, "--confirm", "local"), 4, "W2279", "the cluster local at this root")
        with BlockingClient(there.serve(lost.addresses[0])) as client:
            check(client, lost, marks, moment)
            assert client.append(b"-1 0 ", partition=0) == Committed(marks[0] + 1)
        with pytest.raises(WaltzError) as caught:
            lost.application.append(b"?", partition=0, timeout=20)
        assert str(lost.key) in caught.value.message, caught.value
        for typed in after:
            told = waltzctl(*typed)
            assert told.code == 0, (typed, told)
        assert "cluster restore" in told.out
        for storage in there.storages:
            storage.stop()
            assert waltzctl("verify-segments", storage.directory).code == 0


def page_commands() -> list[list[str]]:
    """What `docs/how-to/everything-is-gone.md` has a person type, with the words of this environment."""
    text = (Path(__file__).parents[2] / "docs/how-to/everything-is-gone.md").read_text(encoding="utf-8")
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
    return [shlex.split(os.path.expandvars(line))[1:] for line in lines]


@contextmanager
def rotten(store: Path, *, partition: int) -> Iterator[None]:
    """One bit of an object is another one meanwhile."""
    path = sorted((store / f"partition-{partition}" / "segment").iterdir())[1]
    right = path.read_bytes()
    path.write_bytes(right[:300] + bytes([right[300] ^ 1]) + right[301:])
    yield
    path.write_bytes(right)


def test_what_is_no_target_is_refused_before_anything_is_changed(lost: Lost, waltzctl: Tool, tmp_path: Path) -> None:
    """No server and no document is needed for that; the storages are of the old key."""
    with Elsewhere(tmp_path, key=lost.key, storages=1) as there:
        words = ["cluster", "restore", str(lost.store), "--latest", *there.given, *there.where, "--dry-run"]
        refused(waltzctl(*words), 5, "W2284", "the storages have the key of the cluster that is to be restored")
        assert waltzctl(*words, "--same-key").code == 0
        with lost.storage_again(tmp_path / "old"):
            refused(waltzctl(*words, "--same-key"), 5, "W2284", "of the old cluster answers at")
        refused(waltzctl(*words, "--same-key", "--replicas", "2"), 2, "2 replicas")
        refused(waltzctl(*words[:2], str(tmp_path), *words[3:]), 4, "W2265", "holds no archive")
        assert waltzctl("storage", "create-partition", there.storages[0].admin_listen, "1").code == 0
        refused(waltzctl(*words, "--same-key"), 4, "W2279", "s0 has a replica of partition 1 already")


def test_a_drill_restores_all_of_it_and_leaves_nothing(lost: Lost, waltzctl: Tool, tmp_path: Path) -> None:
    latest, _ = examples(waltzctl, ["backup", "drill"])
    words = ["backup", "drill", str(lost.store), "--directory", str(tmp_path)]
    assert latest[:2] == words[:2]
    told = waltzctl(*words, "--latest", "-o", "json")
    found = json.loads(told.out)
    assert (told.code, found["result"], list(tmp_path.iterdir())) == (0, "whole", []), told.err
    assert found["records"] == sum(row["last_id"] + 1 for row in found["partitions"]) > 100
    assert "restored and whole" in waltzctl(*words, "--latest", "--each-as-far-as-it-goes").out
    with rotten(lost.store, partition=0):
        refused(waltzctl(*words, "--latest"), 8, "W2264", "partition-0/segment/")
    assert list(tmp_path.iterdir()) == []
    refused(waltzctl(*words[:-1], str(tmp_path / "gone"), "--latest"), 2, "is no directory")


def test_where_it_may_end_is_told_and_refused_by_name(lost: Lost, waltzctl: Tool, tmp_path: Path) -> None:
    latest, by_time = examples(waltzctl, ["archive", "marks"])
    told = waltzctl(*latest[:2], lost.store, *latest[3:], "-o", "json")
    found = json.loads(told.out)
    assert (told.code, list(found["marks"])) == (0, ["0", "1"])
    file = tmp_path / "marks.json"
    file.write_text(told.out)
    drilled = waltzctl("backup", "drill", lost.store, "--to-marks", file, "--directory", tmp_path, "-o", "json")
    rows = json.loads(drilled.out)["partitions"]
    assert {str(row["partition"]): row["last_id"] for row in rows} == found["marks"]
    file.write_text(json.dumps({"0": 3, "1": 1 << 40}))
    marks = ("archive", "marks", lost.store)
    refused(waltzctl(*marks, "--to-marks", file), 2, "W2277", "partition 1 ends at id")
    file.write_text("{}")
    refused(waltzctl(*marks, "--to-marks", file), 2, "holds no marks")
    assert waltzctl(*marks, *by_time[3:5]).code == 2  # nothing is so old
    refused(waltzctl(*marks, "--to-time", "2020-01-01"), 2, "W2277", "its first transaction is of 20")
    refused(waltzctl(*marks, "--to-time", "2999-01-01"), 2, "W2277", "is in the future")
    now = datetime.now(UTC).isoformat()
    refused(waltzctl(*marks, "--to-time", now), 2, "W2277", "is complete up to", "--each-as-far-as-it-goes")
    assert waltzctl(*marks, "--to-time", now, "--each-as-far-as-it-goes").code == 0
    assert waltzctl(*marks).code == 2
    assert waltzctl(*marks, "--latest", "--to-time", "1h").code == 2
