"""A ZooKeeper with TLS and credentials: the contract holds on it, and who is not of the cluster learns nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from kazoo.client import KazooClient

from tests.cli.example import examples
from tests.coordinator_contract import (
    STORIES,
    Story,
    a_closed_cluster_is_nobody_elses,
    an_open_cluster_is_closed_while_it_is_used,
    no_change_is_missed_in_a_storm,
    tell,
    without_contact_calls_say_so_and_waits_go_on,
)
from tests.process.server import ServerDaemon
from tests.process.test_coordinator import SHORT_SECONDS, RealWorld, told
from tests.process.zookeeper import LocalZooKeeper
from waltzctl import main
from waltzctl.config.certificates import Kind, make, of_kind
from waltzd.client.loop import run
from waltzd.cluster.cluster import CLIENT_IDS, Cluster
from waltzd.cluster.coordinator import Create, Set
from waltzd.cluster.documents import ClusterMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.cluster.zookeeper_credentials import CoordinatorTls, Verify, ZooKeeperCredentials
from waltzd.errors import EXIT_UNSAFE, EXIT_USAGE, CannotConnect
from waltzd.errors.operations import CoordinatorRefused

KEY = uuid4()
OLD, NEW = "waltz:the-old-password", "waltz:the-new-password"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make(directory, [of_kind(Kind.ZOOKEEPER, "127.0.0.1", KEY), of_kind(Kind.ZOOKEEPER, "elsewhere.example", KEY)])
    daemons = [of_kind(Kind.SERVER, "a", KEY), of_kind(Kind.CLIENT, "payments", KEY), of_kind(Kind.OPERATOR, "ann", KEY)]
    make(directory, [*daemons, *(of_kind(Kind.ZOOKEEPER_CLIENT, name, KEY) for name in ("server-a", "ann"))])
    make(
        directory / "another", [of_kind(Kind.ZOOKEEPER, "127.0.0.1", KEY), of_kind(Kind.ZOOKEEPER_CLIENT, "server-a", KEY)]
    )
    return directory


def tls_with(directory: Path, name: str = "zookeeper-client-server-a", *, verify: Verify = Verify.HOST) -> CoordinatorTls:
    return CoordinatorTls(
        ca=str(directory / "zookeeper-ca.pem"),
        certificate=str(directory / f"{name}.pem"),
        key=str(directory / f"{name}.key"),
        verify=verify,
    )


@pytest.fixture(scope="module")
def closed(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalZooKeeper]:
    zookeeper = LocalZooKeeper(
        tmp_path_factory.mktemp("closed") / "zookeeper",
        keystore=certificates / "zookeeper-127.0.0.1.pem",
        access=ZooKeeperCredentials(tls=tls_with(certificates)),
    )
    zookeeper.start()
    yield zookeeper
    zookeeper.stop()


def a_coordinator(
    zookeeper: LocalZooKeeper, access: ZooKeeperCredentials, root: str = "/waltz", *, seconds: float = 60
) -> ZooKeeperCoordinator:
    return ZooKeeperCoordinator(zookeeper.hosts, root, access, call_seconds=seconds)


CHOSEN = [
    a_closed_cluster_is_nobody_elses,
    an_open_cluster_is_closed_while_it_is_used,
    no_change_is_missed_in_a_storm,
    without_contact_calls_say_so_and_waits_go_on,
]


@pytest.mark.parametrize("story", CHOSEN, ids=lambda story: story.__name__)
def test_contract(closed: LocalZooKeeper, certificates: Path, story: Story) -> None:
    assert story in STORIES

    async def work() -> None:
        world = RealWorld(closed, session_seconds=SHORT_SECONDS)
        world.tls = tls_with(certificates)
        try:
            await tell(story, world)
        finally:
            await world.close()

    told(work())


async def refusal_of(zookeeper: LocalZooKeeper, access: ZooKeeperCredentials, *, seconds: float = 3) -> str:
    """Return the error of a coordinator that tries for some seconds."""
    coordinator = a_coordinator(zookeeper, access, seconds=seconds)
    try:
        with pytest.raises(CannotConnect) as refused:
            await coordinator.start()
        return refused.value.message
    finally:
        await coordinator.close()


def test_zookeeper_is_known_by_its_host_and_our_authority_alone(
    certificates: Path, tmp_path: Path, closed: LocalZooKeeper
) -> None:
    """The authorities of the machine do not count, and neither does the certificate of another host."""
    elsewhere = LocalZooKeeper(
        tmp_path / "zookeeper",
        keystore=certificates / "zookeeper-elsewhere.example.pem",
        access=ZooKeeperCredentials(tls=tls_with(certificates, verify=Verify.AUTHORITY)),
    ).start()
    try:
        said = run(refusal_of(elsewhere, ZooKeeperCredentials(tls=tls_with(certificates)), seconds=10))
        assert "mismatch" in said
    finally:
        elsewhere.stop()
    another = replace(tls_with(certificates), ca=str(certificates / "another" / "zookeeper-ca.pem"))
    said = run(refusal_of(closed, ZooKeeperCredentials(tls=another), seconds=10))
    assert "unable to get local issuer" in said


def test_who_has_no_certificate_of_the_authority_is_not_let_in(closed: LocalZooKeeper, certificates: Path) -> None:
    async def work() -> None:
        ours = str(certificates / "zookeeper-ca.pem")
        nobody = CoordinatorTls(ca=ours, certificate=None, key=None)
        forged = replace(tls_with(certificates / "another"), ca=ours)
        others = [tls_with(certificates, name) for name in ("client-payments", "server-a", "operator-ann")]
        for access in (ZooKeeperCredentials(), *(ZooKeeperCredentials(tls=tls) for tls in (nobody, forged, *others))):
            assert "no ZooKeeper answers" in await refusal_of(closed, access)

    run(work())
    host, port = closed.hosts.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as plain, suppress(ConnectionError):
        plain.sendall(100 * b"srvr")
        assert not plain.recv(64).startswith(b"Zookeeper")


def test_who_gets_a_connection_and_no_password_neither_reads_nor_fills_zookeeper(
    certificates: Path, tmp_path: Path
) -> None:
    """As an application does where the same authority signs for both, in a cluster that was made before."""
    zookeeper = LocalZooKeeper(
        tmp_path / "zookeeper",
        keystore=certificates / "zookeeper-127.0.0.1.pem",
        access=ZooKeeperCredentials(tls=tls_with(certificates)),
    ).start()

    async def work() -> None:
        tls = tls_with(certificates)
        ours, other = (
            a_coordinator(zookeeper, ZooKeeperCredentials(tls=tls, credentials=(one,)), "/deep/down/c")
            for one in (OLD, NEW)
        )
        stranger = a_coordinator(
            zookeeper, ZooKeeperCredentials(tls=tls_with(certificates, "zookeeper-client-ann")), "/deep/down/c"
        )
        both = a_coordinator(zookeeper, ZooKeeperCredentials(tls=tls, credentials=(NEW, OLD)), "/deep/down/c")
        try:
            await asyncio.gather(ours.start(), other.start(), stranger.start(), both.start())
            everywhere = ["/", "/deep", "/deep/down", "/zookeeper", "/zookeeper/quota"]
            assert await ours.close_above() == everywhere
            await ours.commit([Create("/", b"")])
            with pytest.raises(CoordinatorRefused, match="does not let this process near"):
                await stranger.get("/")
            assert await stranger.open_above() == []
            for path in (*everywhere, "/zookeeper/config"):
                below = f"{path.rstrip('/')}/fill"
                with pytest.raises(CoordinatorRefused):
                    await stranger._call(below, partial(KazooClient.create_async, path=below, value=b"x"))
            assert await other.close_above() == [], "what belongs to others is left alone"
            assert await both.close_above() == everywhere, "a password that is replaced"
            assert await both.open_above() == []
        finally:
            await asyncio.gather(*(one.close() for one in (ours, other, stranger, both)))

    try:
        run(work())
    finally:
        zookeeper.stop()


def test_a_password_is_replaced_while_everything_runs(closed: LocalZooKeeper, certificates: Path) -> None:
    """Each process shows both for a while; then the documents are given to the new one."""

    async def work() -> None:
        tls = tls_with(certificates)
        old, both, new = (
            a_coordinator(closed, ZooKeeperCredentials(tls=tls, credentials=credentials), "/rotated")
            for credentials in ((OLD,), (NEW, OLD), (NEW,))
        )
        try:
            await asyncio.gather(old.start(), both.start(), new.start())
            await old.commit([Create("/", b""), Create("/history", b"")])
            assert await Cluster(both).open_nodes() == []
            with pytest.raises(CoordinatorRefused):
                await new.get("/")
            assert await Cluster(both).secure() == 2
            assert await new.get("/history") is not None
            with pytest.raises(CoordinatorRefused):
                await old.get("/history")
        finally:
            await asyncio.gather(old.close(), both.close(), new.close())

    run(work())


def test_who_only_reads_reads_everything_but_the_secret(closed: LocalZooKeeper, certificates: Path) -> None:
    """Also what is created by a process that does not know of it; until the documents are given to others."""

    async def work() -> None:
        tls = tls_with(certificates)
        watch, later = "watch:the-password-of-the-screen", "watch:another-one"
        owner, plain, reader, other = (
            a_coordinator(closed, ZooKeeperCredentials(tls=tls, credentials=credentials, readers=readers), "/watched")
            for credentials, readers in (((OLD,), (watch,)), ((OLD,), ()), ((watch,), ()), ((OLD,), (later,)))
        )
        try:
            await asyncio.gather(owner.start(), plain.start(), reader.start(), other.start())
            await Cluster.create(owner, ClusterMeta(name="c", key=KEY, partitions=1, created="2026-01-01"))
            await plain.commit([Create("/history/1", b"made later")])
            found = Cluster(reader)
            assert (await found.meta()).name == "c"
            assert await found.open_nodes() == []
            assert (node := await reader.get("/history/1")) is not None
            assert node.data == b"made later"
            for refused in (reader.get(CLIENT_IDS), reader.commit([Create("/x", b"")])):
                with pytest.raises(CoordinatorRefused):
                    await refused
            with pytest.raises(CoordinatorRefused):
                await reader.commit([Set("/history/1", b"no", 0)])
            with pytest.raises(CoordinatorRefused):
                await reader.protect("/")

            assert await Cluster(owner).unclosed_nodes() == []
            assert await Cluster(other).secure() > 10
            with pytest.raises(CoordinatorRefused):
                await found.meta()
            assert await Cluster(other).unclosed_nodes() == []
        finally:
            await asyncio.gather(*(one.close() for one in (owner, plain, reader, other)))

    run(work())


# -- a server, and an operator -----------------------------------------------------------------------------------------


def credentials_at(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    return str(path)


def test_a_server_with_certificates_does_not_start_over_documents_that_everybody_may_change(
    closed: LocalZooKeeper,
    certificates: Path,
    make_server: Callable[..., ServerDaemon],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The way from an open cluster to a closed one, as an operator goes it."""
    root = "/refused"
    tls = tls_with(certificates)
    file = credentials_at(tmp_path / "zookeeper.credentials", OLD)
    monkeypatch.chdir(tmp_path)

    async def create() -> None:
        coordinator = a_coordinator(closed, ZooKeeperCredentials(tls=tls), root)
        await coordinator.start()
        try:
            await Cluster.create(coordinator, ClusterMeta(name="c", key=KEY, partitions=1, created="2026-01-01"))
        finally:
            await coordinator.close()

    run(create())
    settings = {
        "tls_certificate": str(certificates / "server-a.pem"),
        "tls_key": str(certificates / "server-a.key"),
        "tls_ca": str(certificates / "ca.pem"),
        "coordinator_tls": "host",
        "coordinator_tls_certificate": tls.certificate,
        "coordinator_tls_key": tls.key,
        "coordinator_tls_ca": tls.ca,
        "hosts": closed.hosts,
        "cluster": root,
    }
    refused = make_server("a", **settings, coordinator_credentials=file, coordinator_open="refused")
    refused.spawn()
    assert refused.wait() == EXIT_UNSAFE
    assert "W2039" in refused.log
    assert f"{root}: /, /archives, /assignment and " in refused.log
    assert "waltzctl cluster set --secure" in refused.log

    accepted = make_server("a", **settings, coordinator_credentials=file, coordinator_open="accepted").start()
    assert "W2039" in accepted.log, "it says so all the same"

    operator = [
        *("--coordinator", closed.hosts, "--root", root, "--coordinator-tls", "host"),
        *("--tls-certificate", str(certificates / "operator-ann.pem"), "--tls-key", str(certificates / "operator-ann.key")),
        *("--tls-ca", str(certificates / "ca.pem"), "--coordinator-tls-ca", str(certificates / "zookeeper-ca.pem")),
        *("--coordinator-tls-certificate", str(certificates / "zookeeper-client-ann.pem")),
        *("--coordinator-tls-key", str(certificates / "zookeeper-client-ann.key")),
    ]

    def tool(*arguments: str) -> tuple[int, str]:
        code = main.run([*arguments, *operator])
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    code, said = tool("cluster", "set", "--secure", "--yes")
    assert (code, "no credentials are given" in said) == (2, True)

    def helped(*words: str) -> SimpleNamespace:
        assert main.run(list(words)) == 0
        return SimpleNamespace(out=capsys.readouterr().out)

    (looking,) = [typed for typed in examples(helped, ["cluster", "set"]) if "--secure" in typed]
    closing = [*(word for word in looking if word != "--dry-run"), "-o", "json"]
    code, said = tool(*looking)
    assert code == 0
    assert "documents to waltz: nobody else reads or changes them" in said
    assert "a must have these credentials already" in said
    assert "let nobody else create nodes in /, /zookeeper, /zookeeper/quota" in said
    code, said = tool(*closing, "--yes")
    assert (code, '"owner": "waltz"' in said) == (0, True)
    code, said = tool(*looking)
    assert (code, "nothing to do" in said) == (0, True)

    code, said = tool("status")
    assert code != 0
    assert "give the credentials of the cluster" in said
    code, said = tool("history", "--coordinator-credentials", file)
    assert (code, "cluster set" in said) == (0, True)
    accepted.stop()
    again = make_server("a", **settings, coordinator_credentials=file, coordinator_open="refused").start()
    assert "W2039" not in again.log
    again.stop()

    without = make_server("a", **settings, coordinator_open="refused")
    without.spawn()
    assert without.wait() != 0
    assert "coordinator_credentials" in without.log


def test_credentials_that_others_can_read_keep_a_server_from_starting(
    closed: LocalZooKeeper, make_server: Callable[..., ServerDaemon], tmp_path: Path
) -> None:
    path = credentials_at(tmp_path / "credentials", OLD)
    Path(path).chmod(0o640)
    server = make_server("a", hosts=closed.hosts, cluster="/x", coordinator_credentials=path)
    server.spawn()
    assert server.wait() == EXIT_USAGE
    assert "chmod 600" in server.log
    assert OLD not in server.log
