"""What real daemons tell those who watch: metrics that add up, readiness that follows what happens, gRPC's own services."""

from __future__ import annotations

import asyncio
import http.client
import re
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos import preload
from tests.collector import Collector
from tests.process.certificates import Authority
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.server import ServerDaemon
from tests.process.zookeeper import LocalZooKeeper
from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets, StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.daemon.expiry import DAY_SECONDS
from waltzd.errors import NotPermitted
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Committed, Rejected, write_lock
from waltzd.protocol.role import Role, dns_name
from waltzd.wire.grpc import Channel, error_of
from waltzd.wire.tls import Tls

PATIENCE_SECONDS = 60
HTTP = {"http_listen": "127.0.0.1:0"}
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Watched:
    """The HTTP port of a daemon, found as a person finds it: in its log."""

    def __init__(self, daemon: Daemon | ServerDaemon) -> None:
        found = re.findall(r"metrics and health: http://(127\.0\.0\.1:[0-9]+)/", daemon.log)
        assert found, daemon.log
        self.address = found[-1]

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        status, page = self.get("/metrics")
        assert status == 200, page
        families = list(text_string_to_metric_families(page))
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def total(self, name: str, **labels: str) -> float:
        return total([self], name, **labels)

    def until(self, what: str, true: Callable[[], bool]) -> None:
        async def wait() -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not true():
                    await asyncio.sleep(0.1)

        try:
            asyncio.run(wait())
        except TimeoutError:
            raise AssertionError(f"{what}: {self.get('/readyz')}") from None


def total(watched: Sequence[Watched], name: str, **labels: str) -> float:
    """Over these daemons; one of them must have it."""
    found = [
        value
        for watch in watched
        for (this, those), value in watch.samples().items()
        if this == name and those >= labels.items()
    ]
    assert found, f"there is no {name} with {labels}"
    return sum(found)


class World:
    """Three storages and two servers on a ZooKeeper of its own."""

    def __init__(
        self, tmp_path: Path, make_daemon: Callable[..., Daemon], make_server: Callable[..., ServerDaemon]
    ) -> None:
        self.zookeeper = LocalZooKeeper(tmp_path / "zookeeper").start()
        self.storages = {name: make_daemon(name, **HTTP).start() for name in ("s1", "s2", "s3")}
        loop.run(create(self.zookeeper, self.storages, "/watched"))
        self.servers = {
            name: make_server(name, hosts=self.zookeeper.hosts, cluster="/watched", session_seconds=20, **HTTP).start()
            for name in ("one", "two")
        }

    @property
    def listen(self) -> str:
        return ",".join(server.listen for server in self.servers.values())

    def watched(self) -> list[Watched]:
        return [Watched(server) for server in self.servers.values()]

    def settle(self) -> None:
        watched = self.watched()

        def is_settled() -> bool:
            if any(watch.total("waltz_server_partitions") != PARTITIONS / len(watched) for watch in watched):
                return False
            return total(watched, "waltz_server_partition_margin") == PARTITIONS

        watched[0].until("both servers have their partitions, with all replicas", is_settled)


async def create(zookeeper: LocalZooKeeper, daemons: dict[str, Daemon], root: str, admin: Any = None) -> None:
    coordinator = ZooKeeperCoordinator(zookeeper.hosts, root)
    await coordinator.start()
    try:
        meta = ClusterMeta(name="watched", key=KEY, partitions=PARTITIONS, created="2026-01-01")
        places = [
            StorageMeta(name=name, listen=daemon.listen, admin_listen=daemon.admin_listen, group=name)
            for name, daemon in daemons.items()
        ]
        sets = {number: dict.fromkeys(daemons, Membership.MEMBER) for number in range(PARTITIONS)}
        await Cluster.create(coordinator, meta, storages=places, replicas=ReplicaSets(partitions=sets))
    finally:
        await coordinator.close()
    for daemon in daemons.values():
        async with admin(daemon) if admin is not None else daemon.admin() as client:
            await client.create_partitions(range(PARTITIONS))


@pytest.fixture
def world(tmp_path: Path, make_daemon: Callable[..., Daemon], make_server: Callable[..., ServerDaemon]) -> Iterator[World]:
    made = World(tmp_path, make_daemon, make_server)
    try:
        made.settle()
        yield made
    finally:
        made.zookeeper.kill()


async def load(listen: str) -> tuple[int, int]:
    """Transactions in all partitions, two of them refused: how many were committed, and with how many bytes."""
    count = size = 0
    async with Client(listen, feed=FeedMode.NONE) as client:
        for partition in range(PARTITIONS):
            outcomes = await client.append_many([b"x" * length for length in range(100)], partition=partition)
            assert outcomes.committed == 100
            count, size = count + 100, size + sum(range(100)) + 100 * 40
        lock = [write_lock("A")]
        mark = await client.end_position(2)
        assert isinstance(await client.append(b"mine", partition=2, locks=lock, position=mark), Committed)
        for _ in range(2):
            assert isinstance(await client.append(b"yours", partition=2, locks=lock, position=mark), Rejected)
    return count + 1, size + 44


def test_metrics_add_up_and_readiness_follows_what_happens(world: World) -> None:
    servers, keepers = world.watched(), {name: Watched(daemon) for name, daemon in world.storages.items()}
    count, size = loop.run(load(world.listen))

    # what the servers say adds up to what was done, and to what they describe
    def over_servers(name: str, **labels: str) -> float:
        return total(servers, name, **labels)

    assert over_servers("waltz_server_committed_transactions_total") == count
    assert over_servers("waltz_server_committed_bytes_total") == size
    assert over_servers("waltz_server_attempted_transactions_total") == count + 2
    assert over_servers("waltz_server_refused_transactions_total") == 2
    assert over_servers("waltz_server_refused_transactions_total", reason="CONFLICT", partition="2") == 2
    assert over_servers("waltz_server_commit_seconds_count") == count
    assert over_servers("waltz_server_partition_open") == over_servers("waltz_server_partition_margin") == PARTITIONS
    assert {watch.total("waltz_server_cluster_partitions") for watch in servers} == {PARTITIONS}
    assert sum(watch.total("waltz_server_leader") for watch in servers) == 1
    assert over_servers("waltz_server_replica_state", state="LIVE") == 3 * PARTITIONS

    async def described() -> list[Any]:
        found = []
        for server in world.servers.values():
            async with server.admin(KEY) as admin:
                found += [owned.statistics for owned in (await admin.describe()).partitions]
        return found

    told = loop.run(described())
    assert sum(one.committed for one in told) == sum(one.commit.count for one in told) == count
    assert all(0 < one.commit.quantile(0.99) <= PATIENCE_SECONDS for one in told)

    # and what the storages say
    for watch in keepers.values():
        watch.until("everything is here", lambda w=watch: w.total("waltz_storage_appended_records_total") == count)  # type: ignore[misc]
        assert watch.total("waltz_storage_appended_bytes_total") == size
        assert watch.total("waltz_storage_flush_seconds_count") >= PARTITIONS
        assert watch.total("waltz_storage_replica_last_id") == count - PARTITIONS
        assert watch.get("/readyz") == (200, "ready\n")
        assert watch.total("process_open_fds") > 0

    # a storage that has gone costs the margin, and nobody's readiness
    world.storages["s3"].kill()
    servers[0].until("the margin is used up", lambda: over_servers("waltz_server_partition_margin") == 0)
    assert [watch.get("/readyz") for watch in servers] == [(200, "ready\n")] * 2
    world.storages["s2"].kill()
    servers[0].until("there is no majority", lambda: over_servers("waltz_server_partition_margin") < 0)

    # without the coordinator they live, and are not ready
    world.zookeeper.kill()
    for watch in servers:
        watch.until("it says why", lambda w=watch: "the coordinator does not answer" in w.get("/readyz")[1])  # type: ignore[misc]
        assert watch.get("/readyz")[0] == 503
        assert watch.get("/healthz") == (200, "it lives\n")
        assert watch.total("waltz_server_coordinator_connected") == watch.total("waltz_server_ready") == 0
    world.zookeeper.start()
    for watch in servers:
        watch.until("it hears the coordinator again", lambda w=watch: w.total("waltz_server_coordinator_connected") == 1)  # type: ignore[misc]


def test_a_replica_that_is_refused_is_a_reason(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(**HTTP).start()

    async def make() -> None:
        async with daemon.admin() as admin:
            await admin.create_partitions([1])

    loop.run(make())
    assert Watched(daemon).get("/readyz")[0] == 200
    assert daemon.stop() == 0
    (hard_state,) = (path for path in (daemon.directory / "1").iterdir() if "promise" in path.name)
    hard_state.write_bytes(bytes(hard_state.stat().st_size))
    watch = Watched(daemon.start())
    status, said = watch.get("/readyz")
    assert (status, said.startswith("partition 1 is refused: ")) == (503, True), said
    assert watch.total("waltz_storage_replica_refused") == 1


# -- gRPC's own services -----------------------------------------------------------------------------------------------


async def health(channel: Any, service: str = "") -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_SECONDS)).status
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return None
        raise error_of(error) from error


def services(address: str, tls: Tls | None = None) -> set[str]:
    """Asked as `grpcurl` asks. gRPC's asyncio client would say of a call that the server refuses while its request is on
    the way now and then that this failed, and not what the server said (https://github.com/grpc/grpc/issues/36066)."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    with channel_to(address, tls) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        try:
            (reply,) = stub.ServerReflectionInfo(iter([ask]), timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            raise error_of(error) from error  # type: ignore[arg-type]  # it says the same as one of asyncio
    return {found.name for found in reply.list_services_response.service}


def channel_to(address: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address)
    given = tls.current()
    named = [("grpc.ssl_target_name_override", dns_name(tls.identity.key, Role.SERVER))]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(given.ca, given.key, given.certificate), named)


def test_a_storage_that_takes_nothing_says_so_over_both_protocols(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(free_bytes_min=1 << 49, **HTTP).start()
    watched = Watched(daemon)
    status, said = watched.get("/readyz")
    assert (status, "the disk is full" in said) == (503, True)
    assert watched.get("/healthz")[0] == 200
    assert watched.total("waltz_storage_ready") == 0

    async def look() -> None:
        async with grpc.aio.insecure_channel(daemon.admin_listen) as channel:
            assert await health(channel) == NOT_SERVING, "the disk is full"
            assert await health(channel, "waltz.v1.StorageAdmin") == SERVING
            assert await health(channel, "waltz.v1.Log") is None
            found = await asyncio.to_thread(services, daemon.admin_listen)
            assert found >= {"waltz.v1.StorageAdmin", "grpc.health.v1.Health"}
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watching.read()).status == NOT_SERVING
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError):
                await watching.read()

    loop.run(asyncio.wait_for(look(), PATIENCE_SECONDS))
    assert daemon.wait() == 0


def test_with_certificates_only_those_who_may(
    zookeeper: LocalZooKeeper,
    make_daemon: Callable[..., Daemon],
    make_server: Callable[..., ServerDaemon],
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "ca")
    tls = {role: authority.issue(KEY, role, "x").tls(role) for role in Role}
    server = make_server("one", hosts=zookeeper.hosts, cluster="/watched-tls", **HTTP,
                         **authority.issue(KEY, Role.SERVER, "one").settings)  # fmt: skip
    loop.run(create(zookeeper, {}, "/watched-tls"))
    server.start()

    async def look() -> None:
        for address in (server.listen, server.admin_listen):
            for role in (Role.CLIENT, Role.SERVER, Role.OPERATOR):
                channel = Channel(address, tls=tls[role], peer=Role.SERVER)
                await channel.prove(PATIENCE_SECONDS)
                assert await health(channel) in (SERVING, NOT_SERVING)
                await channel.close()
        assert "waltz.v1.ServerAdmin" in await asyncio.to_thread(services, server.admin_listen, tls[Role.OPERATOR])
        with pytest.raises(NotPermitted):
            await asyncio.to_thread(services, server.admin_listen, tls[Role.CLIENT])
        channel = Channel(server.admin_listen, tls=tls[Role.STORAGE], peer=Role.SERVER)
        await channel.prove(PATIENCE_SECONDS)
        with pytest.raises(NotPermitted):
            await health(channel)
        await channel.close()

    loop.run(asyncio.wait_for(look(), PATIENCE_SECONDS))
    assert Watched(server).get("/healthz") == (200, "it lives\n"), "probes have no certificates"


@pytest.mark.skipif(preload.refusal() is not None, reason=str(preload.refusal()))
def test_a_certificate_that_ends_while_they_run_is_told_and_a_reason(
    zookeeper: LocalZooKeeper,
    make_daemon: Callable[..., Daemon],
    make_server: Callable[..., ServerDaemon],
    tmp_path: Path,
) -> None:
    """Started three days before the end, on a clock that then jumps behind it."""
    clocks = preload.Preload(tmp_path / "clocks")
    clocks.build()
    authority = Authority(tmp_path / "ca")
    loop.run(create(zookeeper, {}, "/watched-end"))
    storage = make_daemon("s1", **HTTP, **authority.issue(KEY, Role.STORAGE, "s1", days=3).settings)
    server = make_server("one", hosts=zookeeper.hosts, cluster="/watched-end", **HTTP,
                         **authority.issue(KEY, Role.SERVER, "one", days=3).settings)  # fmt: skip
    for daemon, role in ((storage, Role.STORAGE), (server, Role.SERVER)):
        daemon.environment = clocks.environment(role, daemon.home)
        watched, metric = Watched(daemon.start()), f"waltz_{role}_certificate_seconds"
        assert "certificate" not in watched.get("/readyz")[1]
        assert 2 * DAY_SECONDS < watched.total(metric) < 3 * DAY_SECONDS
        clocks.shift(role, 4 * DAY_SECONDS)
        status, reasons = watched.get("/readyz")
        assert (status, "its certificate is over" in reasons) == (503, True)
        assert -2 * DAY_SECONDS < watched.total(metric) < 0
        assert re.search("WARNING .*the certificate .* ends at", daemon.log)


def test_the_port_for_monitoring_speaks_tls_where_it_is_asked_to(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    """It shows the certificate of the daemon, and who asks needs none."""
    authority = Authority(tmp_path / "ca")
    files = authority.issue(KEY, Role.STORAGE, "s1")
    daemon = make_daemon(**files.settings, **HTTP, http_tls="on").start()
    (address,) = re.findall(r"metrics and health: https://(127\.0\.0\.1:[0-9]+)/", daemon.log)
    host, _, port = address.partition(":")

    def ask(context: ssl.SSLContext | None, name: str = "") -> bytes:
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as plain:
            talk = plain if context is None else context.wrap_socket(plain, server_hostname=name)
            with talk:
                talk.sendall(b"GET /healthz HTTP/1.1\r\nHost: s1\r\nConnection: close\r\n\r\n")
                with suppress(ConnectionError):
                    return b"".join(iter(lambda: talk.recv(1 << 16), b""))
                return b""

    trusting = ssl.create_default_context(cafile=files.ca)
    assert ask(trusting, dns_name(KEY, Role.STORAGE)).startswith(b"HTTP/1.1 200")
    assert not ask(None).startswith(b"HTTP/1.1 200")
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(trusting, "elsewhere.example")
    authority.issue(KEY, Role.STORAGE, "s1")  # in the place of the first one
    assert ask(trusting, dns_name(KEY, Role.STORAGE)).startswith(b"HTTP/1.1 200"), "and goes on with a new one"


def test_a_collector_of_opentelemetry_hears_of_both_daemons(
    zookeeper: LocalZooKeeper, make_daemon: Callable[..., Daemon], make_server: Callable[..., ServerDaemon]
) -> None:
    with Collector().running() as collector:
        storage = make_daemon("s1", otlp_endpoint=collector.endpoint).start()
        loop.run(create(zookeeper, {"s1": storage}, "/watched-otlp"))
        server = make_server("one", hosts=zookeeper.hosts, cluster="/watched-otlp", otlp_endpoint=collector.endpoint)
        server.start()
        collector.wait_for({"waltz-server", "waltz-storage"}, PATIENCE_SECONDS)
        server.stop()
        storage.stop()
