"""What an operator with a certificate sees of a cluster whose daemons have certificates, and one without sees nothing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.server import ServerDaemon
from tests.process.zookeeper import LocalZooKeeper
from waltzctl import main
from waltzctl.watching import troubles
from waltzd.client import loop
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets, StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.protocol.role import Role
from waltzd.wire.storages import AdminClient

ROOT = "/tls/status"
PATIENCE_SECONDS = 60


def options(files: Files) -> list[str]:
    return ["--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]


def test_looking_with_a_certificate(
    zookeeper: LocalZooKeeper,
    make_daemon: Callable[..., Daemon],
    make_server: Callable[..., ServerDaemon],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(troubles, "SLOW_MS", math.inf)  # what is looked for is not how fast this machine is
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    authority = Authority(tmp_path / "ca")
    storage = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()
    ann = authority.issue(KEY, Role.OPERATOR, "ann")
    operator = ann.tls(Role.OPERATOR)

    async def create() -> None:
        async with AdminClient(storage.admin_listen, KEY, tls=operator) as admin:
            await admin.create_partitions(range(PARTITIONS))
        coordinator = ZooKeeperCoordinator(zookeeper.hosts, ROOT)
        await coordinator.start()
        try:
            meta = ClusterMeta(name="tls", key=KEY, partitions=PARTITIONS, created="2026-01-01")
            place = StorageMeta(name="s1", listen=storage.listen, admin_listen=storage.admin_listen, group="g")
            sets = {number: {"s1": Membership.MEMBER} for number in range(PARTITIONS)}
            await Cluster.create(coordinator, meta, storages=[place], replicas=ReplicaSets(partitions=sets))
        finally:
            await coordinator.close()

    loop.run(create())
    make_server("one", hosts=zookeeper.hosts, cluster=ROOT, **authority.issue(KEY, Role.SERVER, "one").settings).start()

    def tool(*arguments: str) -> tuple[int, str, str]:
        code = main.run([*arguments, "--coordinator", zookeeper.hosts, "--root", ROOT])
        said = capsys.readouterr()
        return code, said.out, said.err

    deadline = time.monotonic() + PATIENCE_SECONDS
    code, out, err = tool("health", "-o", "json", *options(ann))
    while code == 10:  # the server has just begun to open its partitions
        assert time.monotonic() < deadline, out
        code, out, err = tool("health", "-o", "json", *options(ann))
    assert (code, err) == (0, "")
    code, out, _ = tool("status", *options(ann))
    assert (code, out.splitlines()[0]) == (
        10, f"DEGRADED: all {PARTITIONS} partitions are open; 1 server and 1 storage answer"
    )  # fmt: skip
    assert "whoever reaches ZooKeeper may change the documents of the cluster" in " ".join(out.split())
    code, out, _ = tool("doctor", "-o", "json", *options(ann))
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert (code, found["open documents"]["grade"]) == (10, "FAIL")
    assert "waltzctl cluster secure" in found["open documents"]["fix"]
    assert (found["certificates"]["grade"], found["certificates"]["finding"]) == (
        "PASS", "the first one ends in 365 days"
    )  # fmt: skip
    code, out, _ = tool("events", "-o", "json", *options(ann))
    assert code == 0
    assert "one" in {event["who"] for event in json.loads(out)["events"]}

    code, out, _ = tool("status", "-o", "json")
    told = json.loads(out)
    assert code == 10
    silent = [reason for reason in told["reasons"] if reason["key"].startswith("silent")]
    assert len(silent) == 2
    for reason in silent:
        assert "speaks TLS, and no certificate was given" in reason["sentence"]
        assert "give --tls-certificate" in reason["next_step"]
    assert {node: took for node, took in told["answered_milliseconds"].items() if took is not None} == {}
