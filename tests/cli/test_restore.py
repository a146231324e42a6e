"""`waltzctl cluster restore` with real daemons: a cluster under load is gone, and comes back elsewhere at one moment.

Transfers go between two partitions, back and forth: the second leg is written when the first is committed. One cluster is
restored at the newest moment, another one at a moment during the load. Each partition has all that was acknowledged up to
then and nothing that was begun later, and no second leg stands without its first.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
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
from tests.cli.outcome import refused, until
from tests.cli.replicas import make_replicas
from tests.process.daemon import Daemon
from tests.process.server import ServerDaemon
from tests.process.zookeeper import LocalZooKeeper
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.placement.backup import source_at
from waltzctl.records import backup
from waltzd import BlockingClient
from waltzd.archive.cut_point import common_moment
from waltzd.errors import WaltzError
from waltzd.protocol.locks import Committed

Tool = Callable[..., Any]
ATTEMPTS_MAX = 120
PARTITIONS = 2
SEGMENT_BYTES = 20_000
"""Some 45 transactions."""


@dataclass
class Transfers:
    """What was acknowledged, and when at the latest."""

    known: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """Partition and id → when it was begun, and when it was acknowledged, in seconds since 1970."""
    done: int = 0
    pause: float = 0.0

    def run(self, client: BlockingClient, stop: threading.Event) -> None:
        while not stop.wait(self.pause):
            number, source = self.done, self.done % 2
            try:
                for leg, partition in enumerate((source, 1 - source)):
                    began = time.time()
                    out = client.append(b"%d %d " % (number, leg) + bytes(400), partition=partition, timeout=5)
                    if not isinstance(out, Committed):
                        return
                    self.known[partition, out.id] = began, time.time()
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
    moment: float
    """During the load, when much was sealed already and much was not."""
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
        "server": {**LASTING["server"], "segment_bytes_max": SEGMENT_BYTES, "backup_seconds": 1},
    }
    cluster = LocalCluster.make(home, partitions=PARTITIONS, storages=1, servers=1, replication=1, settings=settings)
    transfers, stop = Transfers(), threading.Event()
    try:
        cluster.start()
        with BlockingClient(cluster.server_addresses) as client:
            load = threading.Thread(target=transfers.run, args=(client, stop))
            load.start()
            until(lambda: all(segments(store, number) >= 3 for number in range(PARTITIONS)), "segments are archived")
            moment = time.time()
            until(lambda: all(segments(store, number) >= 5 for number in range(PARTITIONS)), "segments are archived")
            transfers.pause = 0.2  # seconds pass until the next segment is sealed: what stands behind these is in a tail
            until(lambda: has_tails(store, moment), "what is not sealed is backed up, and so are the documents")
            cluster.kill()  # in the middle of the load
            stop.set()
            load.join()
            listen, admin = cluster.blueprint.addresses(cluster.blueprint.storage_names[0])[:2]
            yield Lost(store, cluster.blueprint.key, cluster.server_addresses, transfers, moment, (listen, admin), client)
    finally:
        stop.set()
        cluster.kill()
        shutil.rmtree(home, ignore_errors=True)


def has_tails(store: Path, moment: float) -> bool:
    """The cluster is whole up to a later moment, in each partition by records that no segment has, and far from the next
    segment. The group log, which nobody uses, is among what has to be whole."""
    found = source_at(str(store))
    logs = [found.logs[number] for number in range(PARTITIONS) if number in found.logs]
    complete = common_moment([log.coverage for log in found.logs.values()])
    if found.newest is None or len(found.logs) <= PARTITIONS or complete is None or complete <= moment * 1e6:
        return False
    behind = [log.last - log.manifest.last for log in logs]
    return all(ids <= 25 for ids in behind) and all(log.at_time(complete).mark > log.manifest.last for log in logs)


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


def check(client: BlockingClient, lost: Lost, marks: list[int], moment: float) -> None:
    logs = [content(client, partition) for partition in range(PARTITIONS)]
    assert [len(log) - 1 for log in logs] == marks
    for (partition, id_), (began, acknowledged) in lost.transfers.known.items():
        if acknowledged < moment:
            assert id_ <= marks[partition], f"id {id_} of partition {partition} was acknowledged before"
        if began > moment:
            assert id_ > marks[partition], f"id {id_} of partition {partition} was begun later"
    legs = {leg for log in logs for leg in log}
    assert len(legs) == sum(map(len, logs))
    for number, leg in legs:
        assert leg == 0 or (number, 0) in legs, f"transfer {number} has its second leg, and not its first"


def test_a_cluster_that_is_gone_comes_back_at_one_moment(
    lost: Lost, waltzctl: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the words of the help, and of the page that is for that day. A first attempt is killed, a second one meets an
    object that has rotted, and the next one goes on."""
    latest, _ = examples(waltzctl, ["cluster", "restore"])
    with Elsewhere(tmp_path, key=uuid4()) as there:
        at = latest.index("--storage")
        words = [*latest[:2], str(lost.store), *latest[3:at], *there.given, *there.where]
        dry = waltzctl(*words, "--dry-run")
        assert (dry.code, "all partitions are cut at" in dry.out, "would do" in dry.out) == (0, True, True), dry.err
        with lost.storage_again(tmp_path / "old"):
            told = waltzctl(*words, "--dry-run")
            assert (told.code, "of the old cluster answers at" in told.err) == (5, True), told
        with stuck(lost.store, partition=1):
            tool = subprocess.Popen([sys.executable, "-m", "waltzctl", *words, "--confirm", "local"])
            try:
                until(lambda: any((one.directory / "0").is_dir() for one in there.storages), "one replica is made")
                assert tool.poll() is None
            finally:
                tool.kill()
                tool.wait()
        with rotten(lost.store, partition=1):
            attempts = [waltzctl(*words, "--confirm", "local")]
            while "W2264" not in attempts[-1].err:  # a storage may be at the order of the one that was killed
                refused(attempts[-1], attempts[-1].code, "is being restored on this storage already")
                assert len(attempts) < ATTEMPTS_MAX
                attempts.append(waltzctl(*words, "--confirm", "local"))
            told = attempts[-1]
            refused(told, 8, "W2264", "partition 1", "has other bytes than the manifest states", "no server takes part")
            refused(waltzctl("partition", "list", *there.where), 4, "W2045", "waltzctl cluster restore began at")
        assert "resumes an interrupted run" in waltzctl(*words, "--dry-run").out
        for name, value in (
            ("STORE", str(lost.store)), ("ONE", there.given[1]), ("TWO", there.given[3]), ("CLUSTER", "local"),
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
        *marks, groups = [row["last_id"] for row in found["partitions"]]
        assert groups == -1, "the group log comes back as empty as it was"
        sealed = [source_at(str(lost.store)).logs[number].manifest.last for number in range(PARTITIONS)]
        assert all(mark > last > 50 for mark, last in zip(marks, sealed, strict=True)), "the tails were not read"
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
def stuck(store: Path, *, partition: int) -> Iterator[None]:
    """Whoever reads an object waits meanwhile, and gets an error in the end."""
    path = sorted((store / f"partition-{partition}" / "segment").iterdir())[1]
    aside = path.rename(store / "aside")
    os.mkfifo(path)
    yield
    pipe = os.open(path, os.O_RDWR)
    aside.rename(path)
    os.close(pipe)


@contextmanager
def rotten(store: Path, *, partition: int) -> Iterator[None]:
    """One bit of an object is another one meanwhile."""
    path = sorted((store / f"partition-{partition}" / "segment").iterdir())[1]
    right = path.read_bytes()
    path.write_bytes(right[:300] + bytes([right[300] ^ 1]) + right[301:])
    yield
    path.write_bytes(right)


def test_a_cluster_goes_on_from_a_moment_under_its_own_key(lost: Lost, waltzctl: Tool, tmp_path: Path) -> None:
    """What is no target is refused before anything is changed, without any server or document."""
    with Elsewhere(tmp_path, key=lost.key) as there:
        moment = datetime.fromtimestamp(lost.moment, UTC).isoformat()
        command, one, other = ["cluster", "restore"], there.given[:2], there.given[2:]
        end = ["--through", moment, *there.where]
        words = [*command, str(lost.store), *end, *one]
        refused(
            waltzctl(*words, "--dry-run"), 5, "W2284", "the storages have the key of the cluster that is to be restored"
        )
        words.append("--same-key")
        with lost.storage_again(tmp_path / "old"):
            refused(waltzctl(*words, "--dry-run"), 5, "W2284", "of the old cluster answers at")
        refused(waltzctl(*words, "--dry-run", "--replicas", "2"), 2, "2 replicas")
        refused(waltzctl(*command, str(tmp_path), *words[3:], "--dry-run"), 4, "W2265", "holds no archive")
        make_replicas(there.storages[1].admin_listen, 1)
        refused(waltzctl(*words, *other, "--dry-run"), 4, "W2279", "s1 has a replica of partition 1 already")
        told = waltzctl(*words, "--confirm", "local", "-o", "json")
        assert told.code == 0, told
        found = json.loads(told.out)
        assert datetime.fromisoformat(found["moment"]) == datetime.fromisoformat(moment)
        rows = found["partitions"][:PARTITIONS]
        assert all(row["given_up"] > 0 for row in rows)
        with BlockingClient(there.serve()) as client:
            check(client, lost, [row["last_id"] for row in rows], lost.moment)


def test_a_drill_restores_all_of_it_and_leaves_nothing(
    lost: Lost, waltzctl: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    refused(waltzctl(*words[:-1], str(tmp_path / "gone"), "--latest"), 2, "is not a directory")
    monkeypatch.setattr(backup, "mkdtemp", read_only)
    refused(waltzctl(*words, "--latest"), 1, "W1005", f"writing {tmp_path}", "name a file in another directory")


def read_only(**_options: object) -> str:
    raise OSError(errno.EROFS, "Read-only file system")


def test_where_it_may_end_is_told_and_refused_by_name(lost: Lost, waltzctl: Tool, tmp_path: Path) -> None:
    _, latest, by_time, *_, listed = examples(waltzctl, ["archive", "status"])
    told = waltzctl(*latest[:2], lost.store, *latest[3:], "-o", "json")
    found = json.loads(told.out)
    assert (told.code, list(found["marks"])) == (0, ["0", "1", "2"])
    rows = json.loads(waltzctl(*listed[:2], lost.store, *listed[3:], "-o", "json").out)["timelines"]
    assert [(row["partition"], row["timeline"], row["fork"]) for row in rows] == [(0, 1, None), (1, 1, None)]
    refused(waltzctl("archive", "status", lost.store, "--latest", "--timeline", "1=2"), 2, "W2277", "timeline 2 of")
    file = tmp_path / "marks.json"
    file.write_text(told.out)
    drilled = waltzctl("backup", "drill", lost.store, "--through-marks", file, "--directory", tmp_path, "-o", "json")
    rows = json.loads(drilled.out)["partitions"]
    assert {str(row["partition"]): row["last_id"] for row in rows} == found["marks"]
    file.write_text(json.dumps({"0": 3, "1": 1 << 40, "2": -1}))
    marks = ("archive", "status", lost.store)
    refused(waltzctl(*marks, "--through-marks", file), 2, "W2277", "partition 1 ends at id")
    file.write_text("{}")
    refused(waltzctl(*marks, "--through-marks", file), 2, "holds no marks")
    assert waltzctl(*marks, *by_time[3:5]).code == 2  # nothing is so old
    refused(waltzctl(*marks, "--through", "2020-01-01"), 2, "W2277", "its first transaction is of 20")
    refused(waltzctl(*marks, "--through", "2999-01-01"), 2, "W2277", "is in the future")
    now = datetime.now(UTC).isoformat()
    refused(waltzctl(*marks, "--through", now), 2, "W2277", "is complete up to", "--each-as-far-as-it-goes")
    assert waltzctl(*marks, "--through", now, "--each-as-far-as-it-goes").code == 0
    assert waltzctl(*marks).out == waltzctl(*marks, "--latest").out
    assert waltzctl("archive", "status", "--latest").code == 2, "a moment of which store?"
    assert waltzctl(*marks, "--latest", "--through", "1h").code == 2
