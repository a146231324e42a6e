"""A cluster with certificates: what an operator sees and does with one, without one and with a wrong one, and how analysts
read it."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from waltz_spark.export.origin_options import open_origin
from waltz_spark.log.live_origin import LiveOrigin
from waltz_spark.log.origin import Catalog

from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.server import ServerDaemon
from tests.process.test_tls_cluster import connect, options
from tests.process.zookeeper import LocalZooKeeper
from waltzctl import main
from waltzctl.health import troubles
from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.errors import BadArgument, CannotConnect
from waltzd.errors.operations import LogUnreadable
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.role import Role

ROOT = "/tls/tools"
STORAGES = ("s1", "s2")
READ = 1
"""The partition that analysts read. Benchmarks and probes write to all."""
PATIENCE_SECONDS = 60
PAYLOADS = [b"over TLS %d" % number for number in range(50)]


def places(files: Files, **place: str) -> dict[str, str]:
    return {**place, "tlsCertificate": str(files.certificate), "tlsKey": str(files.key), "tlsCa": str(files.ca)}


def opened(files: Files, **place: str) -> LiveOrigin:
    found = open_origin(places(files, **place))
    assert isinstance(found, LiveOrigin)
    return found


def impatient(files: Files, **place: str) -> LiveOrigin:
    return replace(opened(files, **place), seconds=1.0)


def read(origin: LiveOrigin, catalog: Catalog) -> list[bytes]:
    runs = [
        run
        for extent in catalog.extents
        if extent.partition == READ
        for run in origin.read(extent, extent.span, batch_bytes=1 << 20)
    ]
    return [run.record(number).payload for run in runs for number in range(len(run))]


@dataclass(frozen=True)
class Secured:
    """Two storages and a server, all with certificates, and those of an operator and of an application."""

    authority: Authority
    storages: dict[str, Daemon]
    server: ServerDaemon
    hosts: str
    operator: Files
    application: Files


@pytest.fixture(scope="module")
def secured(zookeeper: LocalZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    home = tmp_path_factory.mktemp("tls")
    authority = Authority(home / "ca")
    operator = authority.issue(KEY, Role.OPERATOR, "ann")
    with ExitStack() as running:
        storages: dict[str, Daemon] = {}
        for name in STORAGES:
            settings: dict[str, Any] = authority.issue(KEY, Role.STORAGE, name).settings
            storages[name] = running.enter_context(Daemon(home / name, **settings))
        places = [f"--storage={name}={daemon.listen},{daemon.admin_listen}" for name, daemon in storages.items()]
        size = ["--name", "tls", "--partitions", str(PARTITIONS), "--replicas", str(len(STORAGES))]
        where = ["--coordinator", zookeeper.hosts, "--root", ROOT]
        assert main.run(["create-cluster", *size, *places, *where, *options(operator)]) == 0
        settings = authority.issue(KEY, Role.SERVER, "one").settings
        server = running.enter_context(
            ServerDaemon(home / "one", name="one", hosts=zookeeper.hosts, cluster=ROOT, **settings)
        )
        application = authority.issue(KEY, Role.CLIENT, "app")
        yield Secured(authority, storages, server, zookeeper.hosts, operator, application)


Tool = Callable[..., tuple[int, str, str]]


@pytest.fixture
def waltzctl(secured: Secured, capsys: pytest.CaptureFixture[str]) -> Tool:
    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main.run([*words, "--coordinator", secured.hosts, "--root", ROOT])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_reading_with_certificates(secured: Secured, tmp_path: Path) -> None:
    authority, server, operator, application = secured.authority, secured.server, secured.operator, secured.application

    async def work() -> int:
        async with Client(server.listen, feed=FeedMode.NONE, connect=connect(application)) as client:
            await client.append_many(PAYLOADS, partition=READ)
            return await client.end_position(READ)

    last = loop.run(work())
    by_coordinator = opened(operator, coordinator=secured.hosts, root=ROOT)
    catalog = by_coordinator.catalog()
    assert catalog.spans[READ].last == last
    replicas = next(one for one in catalog.extents if one.partition == READ).place.replicas
    assert dict(replicas) == {name: daemon.listen for name, daemon in secured.storages.items()}
    assert read(by_coordinator, catalog)[-len(PAYLOADS) :] == PAYLOADS
    storages = ",".join(daemon.listen for daemon in secured.storages.values())
    by_servers = opened(application, **{"bootstrap.servers": server.listen, "storages": storages})
    assert read(by_servers, by_servers.catalog())[-len(PAYLOADS) :] == PAYLOADS, (
        "what no application may ask of storages comes from the owner"
    )

    stranger = Authority(tmp_path / "other").issue(KEY, Role.OPERATOR, "eve")
    with pytest.raises(CannotConnect):
        impatient(stranger, **{"bootstrap.servers": server.listen}).catalog()
    with pytest.raises(LogUnreadable, match="s1: cannot connect"):
        read(impatient(stranger, **{"bootstrap.servers": server.listen}), catalog)
    with pytest.raises(CannotConnect):
        replace(by_servers, certificate=None, seconds=1.0).catalog()
    foreign = authority.issue(UUID(int=9), Role.OPERATOR, "bob")
    with pytest.raises(CannotConnect):
        impatient(foreign, **{"bootstrap.servers": server.listen}).catalog()
    with pytest.raises(BadArgument, match="cannot read"):
        opened(replace(stranger, key=tmp_path / "no.pem"), **{"bootstrap.servers": server.listen}).catalog()


def test_an_operator_reads_appends_and_compares(
    secured: Secured, waltzctl: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = options(secured.operator)
    code, out, err = waltzctl("txn", "append", "0", "over TLS", "--lock", "write:door:1", "-o", "json", *operator)
    assert (code, err) == (0, "")
    assert waltzctl("txn", "get", "0", str(json.loads(out)["id"]), "-o", "raw", *operator) == (0, "over TLS", "")
    code, out, _ = waltzctl("txn", "tail", "0", "-n", "1", "-o", "json", *operator)
    assert (code, json.loads(out)["payload"]) == (0, "over TLS")
    code, out, _ = waltzctl("lock", "explain", "0", "door", "1", "-o", "json", *operator)
    assert (code, json.loads(out)["marked_by"]["payload"]) == (0, "over TLS")
    code, out, _ = waltzctl("partition", "compare", "0", "-o", "json", *operator)
    assert (code, json.loads(out)["result"]) == (0, "same")

    load = ("append", "--at", secured.server.listen, "--yes", "--count", "5", "--producers", "1", "--warm-up", "0")
    assert main.run(["bench", *load, "-o", "json", *operator]) == 0
    assert json.loads(capsys.readouterr().out)["attempts"] == 5

    for words in (["txn", "tail", "0", "--timeout", "1"], ["lock", "explain", "0", "door", "1"]):
        code, out, err = waltzctl(*words)
        assert (code, out) == (2, ""), words
        assert "W4003" in err
    code, out, _ = waltzctl("partition", "compare", "0")
    assert code == 7, "who cannot be asked is not the same"
    assert "speaks TLS" in out
    code, out, err = waltzctl("txn", "tail", "0", *options(secured.application))
    assert (code, out) == (9, "")
    assert "W2024" in err


def test_looking_with_a_certificate(
    secured: Secured, waltzctl: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(troubles, "SLOW_MS", math.inf)  # what is looked for is not how fast this machine is
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    deadline = time.monotonic() + PATIENCE_SECONDS
    code, out, err = waltzctl("health", "-o", "json", *options(secured.operator))
    while code == 10:  # the server has just begun to open its partitions
        assert time.monotonic() < deadline, out
        code, out, err = waltzctl("health", "-o", "json", *options(secured.operator))
    assert (code, err) == (0, "")
    code, out, _ = waltzctl("status", *options(secured.operator))
    assert (code, out.splitlines()[0]) == (
        10, f"DEGRADED: all {PARTITIONS} partitions are open; 1 server and {len(STORAGES)} storages answer"
    )  # fmt: skip
    assert "whoever reaches ZooKeeper may change the documents of the cluster" in " ".join(out.split())
    code, out, _ = waltzctl("doctor", "-o", "json", *options(secured.operator))
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert (code, found["open documents"]["grade"]) == (10, "FAIL")
    assert "waltzctl cluster set --secure" in found["open documents"]["fix"]
    assert (found["certificates"]["grade"], found["certificates"]["finding"]) == (
        "PASS", "the first certificate expires in 365 days"
    )  # fmt: skip
    code, out, _ = waltzctl("events", "-o", "json", *options(secured.operator))
    assert code == 0
    assert "one" in {event["who"] for event in json.loads(out)["events"]}

    code, out, _ = waltzctl("status", "-o", "json")
    told = json.loads(out)
    assert code == 10
    silent = [reason for reason in told["reasons"] if reason["key"].startswith("silent")]
    assert len(silent) == 1 + len(STORAGES)
    for reason in silent:
        assert "speaks TLS, and no certificate was given" in reason["sentence"]
        assert "give --tls-certificate" in reason["next_step"]
    assert {node: took for node, took in told["answered_milliseconds"].items() if took is not None} == {}
    code, out, _ = waltzctl("health", "0")
    assert (code, "locate: W4003" in out, "Next: give --tls-certificate" in out) == (10, True, True), out
    assert re.search(r"^ +0 +one +.*failed", out, re.M), "the coordinator says who the owner is"
    code, _, err = waltzctl("events")
    assert (code, "s1 does not answer: W4003" in err, err.count("Next: give --tls-certificate")) == (7, True, 1), err

    foreign = secured.authority.issue(UUID(int=7), Role.OPERATOR, "ann", file="foreign")
    code, out, err = waltzctl("status", *options(foreign))
    assert (code, out) == (4, "")
    assert f"W2002 the certificate belongs to the cluster {UUID(int=7)}" in err


def test_an_observer_looks_and_changes_nothing(secured: Secured, waltzctl: Tool) -> None:
    observer = options(secured.authority.issue(KEY, Role.OBSERVER, "eve"))
    for words in (
        ["storage", "list"], ["storage", "describe", "s1"], ["server", "list"],
        ["partition", "list"], ["events"], ["history"], ["lock", "explain", "0", "door", "1"], ["health", "--no-write"],
        ["server", "drain", "one", "--dry-run", "--override", "one"],
    ):  # fmt: skip
        assert waltzctl(*words, *observer)[::2] == (0, ""), words
    for words in (["server", "drain", "one", "--yes"], ["health"], ["txn", "tail", "0"]):
        code, out, err = waltzctl(*words, *observer)
        assert (code, out, "W2024" in err) == (9, "", True), words
    (made,) = json.loads(waltzctl("history", "-o", "json", *observer)[1])["history"]
    assert (made["verb"], made["who"]) == ("create-cluster", "ann"), "the name is that of the certificate"
