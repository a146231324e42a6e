"""A ZooKeeper with TLS and credentials: the contract holds on it, and who is not of the cluster learns nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from tests.coordinator_contract import (
    STORIES,
    Story,
    a_closed_cluster_is_nobody_elses,
    an_open_cluster_is_closed_while_it_is_used,
    no_change_is_missed_in_a_storm,
    tell,
    without_contact_calls_say_so_and_waits_go_on,
)
from tests.process.test_coordinator import SHORT_SECONDS, RealWorld, told
from tests.process.zookeeper import LocalZooKeeper
from waltzctl.config.certificates import Kind, make, of_kind
from waltzd.client.loop import run
from waltzd.cluster.access import Access, CoordinatorTls, Verify
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.coordinator import Create
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.errors import CannotConnect, CoordinatorRefused

KEY = uuid4()
OLD, NEW = "waltz:the-old-password", "waltz:the-new-password"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make(directory, [of_kind(Kind.ZOOKEEPER, "127.0.0.1", KEY), of_kind(Kind.ZOOKEEPER, "elsewhere.example", KEY)])
    make(directory, [of_kind(Kind.SERVER, "a", KEY), of_kind(Kind.CLIENT, "payments", KEY)])
    make(directory / "another", [of_kind(Kind.ZOOKEEPER, "127.0.0.1", KEY), of_kind(Kind.SERVER, "a", KEY)])
    return directory


def tls_with(directory: Path, name: str = "server-a", *, verify: Verify = Verify.HOST) -> CoordinatorTls:
    return CoordinatorTls(
        ca=str(directory / "ca.pem"),
        certificate=str(directory / f"{name}.pem"),
        key=str(directory / f"{name}.key"),
        verify=verify,
    )


@pytest.fixture(scope="module")
def closed(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalZooKeeper]:
    zookeeper = LocalZooKeeper(
        tmp_path_factory.mktemp("closed") / "zookeeper",
        keystore=certificates / "zookeeper-127.0.0.1.pem",
        access=Access(tls=tls_with(certificates)),
    )
    zookeeper.start()
    yield zookeeper
    zookeeper.stop()


def a_coordinator(zookeeper: LocalZooKeeper, access: Access, root: str = "/waltz") -> ZooKeeperCoordinator:
    return ZooKeeperCoordinator(zookeeper.hosts, root, access, call_seconds=3)


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


async def refusal_of(zookeeper: LocalZooKeeper, access: Access) -> str:
    coordinator = a_coordinator(zookeeper, access)
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
        access=Access(tls=tls_with(certificates, verify=Verify.AUTHORITY)),
    ).start()
    try:
        said = run(refusal_of(elsewhere, Access(tls=tls_with(certificates))))
        assert "mismatch" in said
    finally:
        elsewhere.stop()
    another = replace(tls_with(certificates), ca=str(certificates / "another" / "ca.pem"))
    assert "unable to get local issuer" in run(refusal_of(closed, Access(tls=another)))


def test_who_has_no_certificate_of_the_authority_is_not_let_in(closed: LocalZooKeeper, certificates: Path) -> None:
    async def work() -> None:
        nobody = CoordinatorTls(ca=str(certificates / "ca.pem"), certificate=None, key=None)
        forged = replace(tls_with(certificates / "another"), ca=str(certificates / "ca.pem"))
        for access in (Access(), Access(tls=nobody), Access(tls=forged)):
            assert "no ZooKeeper answers" in await refusal_of(closed, access)

    run(work())
    host, port = closed.hosts.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as plain, suppress(ConnectionError):
        plain.sendall(100 * b"srvr")
        assert not plain.recv(64).startswith(b"Zookeeper")


def test_the_certificate_of_an_application_opens_no_document(closed: LocalZooKeeper, certificates: Path) -> None:
    """It is signed by the same authority, so ZooKeeper listens to it; the documents belong to the credentials."""

    async def work() -> None:
        tls = tls_with(certificates)
        ours = a_coordinator(closed, Access(tls=tls, credentials=(OLD,)), "/application")
        application = a_coordinator(closed, Access(tls=tls_with(certificates, "client-payments")), "/application")
        try:
            await ours.start()
            await ours.commit([Create("/", b"")])
            await application.start()
            with pytest.raises(CoordinatorRefused, match="does not let this process near"):
                await application.get("/")
        finally:
            await asyncio.gather(ours.close(), application.close())

    run(work())


def test_a_password_is_replaced_while_everything_runs(closed: LocalZooKeeper, certificates: Path) -> None:
    """Each process shows both for a while; then the documents are given to the new one."""

    async def work() -> None:
        tls = tls_with(certificates)
        old, both, new = (
            a_coordinator(closed, Access(tls=tls, credentials=credentials), "/rotated")
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
