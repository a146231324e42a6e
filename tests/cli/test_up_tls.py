"""`waltzctl up --tls`: certificates for all and a closed ZooKeeper, and commands that need nothing but the directory."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from waltz_spark.export.origin_options import open_origin

from waltzctl.config.certificates import Kind, make, of_kind
from waltzctl.local_cluster.local import ROOT, LocalCluster
from waltzctl.shell.blueprint import credentials_file
from waltzd import Client, Committed, Tls
from waltzd.client import loop
from waltzd.cluster.cluster import CLIENT_IDS, Cluster
from waltzd.cluster.documents import Counter
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.cluster.zookeeper_credentials import ZooKeeperCredentials
from waltzd.errors.operations import CoordinatorRefused
from waltzd.protocol.document import decode

Tool = Callable[..., Any]
SMALL = ("--storages", "1", "--servers", "1", "--partitions", "2", "--replicas", "1")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    if (tmp_path / "closed" / "cluster.json").exists():
        LocalCluster.find(tmp_path / "closed").kill()


def test_a_cluster_with_certificates_is_used_by_its_directory_alone(home: Path, waltzctl: Tool) -> None:
    brought = waltzctl("up", "closed", "--tls", "--detach", *SMALL, "-o", "json")
    assert (brought.code, brought.err) == (0, "")
    told = json.loads(brought.out)
    there = ("--directory", "closed")
    for command in (("txn", "append", "0", "hello"), ("status",), ("doctor",), ("health",), ("txn", "get", "0", "0")):
        done = waltzctl(*command, *there)
        assert done.code == 0, done.out + done.err
    shown = waltzctl("context", "use", *there, "-o", "json")
    rows = {row["setting"]: row["value"] for row in json.loads(shown.out)["settings"]}
    check_reading(rows)
    check_files(home / "closed")
    loop.run(check_documents(home / "closed", told))

    bundle = waltzctl("support", "bundle", "--to", "bundle.tar.gz", *there)
    assert bundle.code == 0, bundle.err
    assert waltzctl("down", "closed").code == 0
    again = waltzctl("up", "closed", "--detach")
    assert (again.code, again.err) == (0, "")
    assert "An application needs a certificate" in again.out
    assert f"export WALTZ_COORDINATOR_CREDENTIALS={home}/closed/certificates/coordinator.credentials" in again.out
    got = waltzctl("txn", "get", "0", "0", *there)
    assert (got.code, "hello" in got.out) == (0, True)
    assert waltzctl("logs", "closed").code == 0
    assert waltzctl("reset", "closed", "--yes").code == 0
    assert not (home / "closed").exists(), "nothing of it is left, keys least of all"


def check_reading(said: dict[str, str]) -> None:
    """Analysts reach it with the same files, which their options name."""
    options = {
        "coordinator": said["coordinator"],
        "root": said["root"],
        "coordinatorTls": said["coordinator_tls"],
        "coordinatorTlsCertificate": said["coordinator_tls_certificate"],
        "coordinatorTlsKey": said["coordinator_tls_key"],
        "coordinatorTlsCa": said["coordinator_tls_ca"],
        "coordinatorCredentials": said["coordinator_credentials"],
        "tlsCertificate": said["tls_certificate"],
        "tlsKey": said["tls_key"],
        "tlsCa": said["tls_ca"],
    }
    assert open_origin(options).catalog().spans[0].last >= 0
    with pytest.raises(CoordinatorRefused):
        open_origin({name: value for name, value in options.items() if name != "coordinatorCredentials"}).catalog()


def check_files(directory: Path) -> None:
    """What is secret can be read by its owner alone, and stands in no log and no configuration."""
    secrets = [path for path in (directory / "certificates").iterdir() if path.suffix in (".key", ".credentials")]
    secrets += [directory / "certificates" / "zookeeper-127.0.0.1.pem", directory / "zookeeper" / "keystore.pem"]
    assert len(secrets) >= 7
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secrets)
    password = (directory / "certificates" / "coordinator.credentials").read_text().strip().partition(":")[2]
    assert len(password) > 40
    files = [Path(folder, name) for folder, _, names in os.walk(directory) for name in names]
    holding = [path for path in files if password.encode() in path.read_bytes()]
    assert holding == [directory / "certificates" / "coordinator.credentials"]


async def check_documents(directory: Path, told: dict[str, Any]) -> None:
    """The application's certificate appends, and is nobody in ZooKeeper."""
    cluster = LocalCluster.find(directory)
    certificate, key, ca = told["application"].values()
    tls = Tls(ca=ca, certificate=certificate, key=key)
    async with Client(cluster.server_addresses[0], tls=tls) as client:
        assert isinstance(await client.append(b"from an application", partition=1), Committed)
    ours = ZooKeeperCoordinator(cluster.coordinator_hosts, ROOT, cluster.access)
    stranger = ZooKeeperCoordinator(cluster.coordinator_hosts, ROOT, ZooKeeperCredentials(tls=cluster.access.tls))
    await ours.start()
    await stranger.start()
    try:
        assert await Cluster(ours).open_nodes() == []
        node = await ours.get(CLIENT_IDS)
        assert node is not None
        assert isinstance(decode(Counter, node.data, CLIENT_IDS).secret, UUID)
        with pytest.raises(CoordinatorRefused):
            await stranger.get(CLIENT_IDS)
    finally:
        await ours.close()
        await stranger.close()


def test_an_observer_looks_at_a_closed_cluster_with_a_password_that_only_reads(
    home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    assert waltzctl("up", "closed", "--tls", "--detach", *SMALL).code == 0
    cluster = LocalCluster.find(home / "closed")
    folder = home / "closed" / "certificates"
    make(folder, [of_kind(kind, "screen", cluster.blueprint.key) for kind in (Kind.OBSERVER, Kind.ZOOKEEPER_CLIENT)])
    files = ("--tls-certificate", folder / "observer-screen.pem", "--tls-key", folder / "observer-screen.key")
    place = ("--coordinator", cluster.coordinator_hosts, "--coordinator-tls", "host", "--tls-ca", folder / "ca.pem", *files)
    shown = ("--coordinator-tls-certificate", folder / "zookeeper-client-screen.pem",
             "--coordinator-tls-key", folder / "zookeeper-client-screen.key",
             "--coordinator-tls-ca", folder / "zookeeper-ca.pem")  # fmt: skip
    with_password = (*place, *shown, "--coordinator-credentials", home / "screen.credentials")
    (home / "screen.credentials").write_text("screen:a-password-that-reads\n")
    (home / "screen.credentials").chmod(0o600)

    assert waltzctl("status", "--directory", "closed").code == 0
    told = waltzctl("status", *with_password)
    assert (told.code, "ZooKeeper refuses to show the documents" in told.out) == (10, True), "it is nobody yet"
    with credentials_file(home / "closed").open("a") as file:
        file.write("read-only screen:a-password-that-reads\n")
    secured = waltzctl("cluster", "set", "--secure", "--directory", "closed", "--yes")
    assert secured.code == 0, secured.err
    for command in ("status", "doctor", "health"):
        done = waltzctl(command, *with_password, *(["--no-write"] if command == "health" else []))
        assert done.code == 0, done.out + done.err

    told = waltzctl("status", *place, *shown)  # without the password, at the addresses that were seen before
    said = " ".join(told.out.split())
    assert (told.code, "ZooKeeper refuses to show the documents" in said) == (10, True), said
    assert "does not answer" not in said
    refused = waltzctl("cluster", "set", "--secure", *with_password, "--dry-run")
    assert refused.code != 0


def test_a_cluster_that_was_made_without_certificates_gets_none(home: Path, waltzctl: Tool) -> None:
    LocalCluster.make(home / "closed", storages=1, servers=1, partitions=2, replication=1)
    refused = waltzctl("up", "closed", "--tls", "--detach")
    assert refused.code == 2
    assert "was made without certificates" in refused.err
    assert not (home / "closed" / "certificates").exists()
