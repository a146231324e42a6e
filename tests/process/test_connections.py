"""How many connections of one port a caller may hold, and which of them stay: gRPC's own, and those of frames."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY
from tests.process.test_listener import listening
from waltzd.client import loop
from waltzd.daemon import health_service
from waltzd.errors import NotPermitted
from waltzd.protocol.address import Address
from waltzd.protocol.role import Role, dns_name
from waltzd.wire import listener
from waltzd.wire.calls import roles_at
from waltzd.wire.connections import ConnectionShares
from waltzd.wire.grpc import Channel, error_of
from waltzd.wire.listener import Listener

MOST = 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


@pytest.fixture(autouse=True)
def _looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "CONNECTIONS_SECONDS", 0.02)


class Idle:
    """Connections that stand and make no call."""

    def __init__(self, found: Listener, files: Files | None, role: Role, host: str | None = None) -> None:
        self._found, self._files, self._role, self._host = found, files, role, host
        self.ended = 0
        self._held: list[tuple[asyncio.StreamWriter, asyncio.Task[None]]] = []

    async def hold(self, count: int) -> None:
        for _ in range(count):
            more: dict[str, Any] = {}
            if self._files is not None:
                context = ssl.create_default_context(cafile=str(self._files.ca))
                context.load_cert_chain(self._files.certificate, self._files.key)
                context.set_alpn_protocols(["h2"])
                more = {"ssl": context, "server_hostname": dns_name(KEY, Role.SERVER)}
            if self._host is not None:
                more["local_addr"] = (self._host, 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", self._found.address.port, **more)
            writer.write(PREFACE)
            self._held.append((writer, asyncio.create_task(self._drain(reader))))

    async def _drain(self, reader: asyncio.StreamReader) -> None:
        try:
            while await reader.read(65536):
                pass
        except OSError:
            pass
        self.ended += 1

    async def until_ended(self, count: int) -> None:
        while self.ended < count:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        for writer, task in self._held:
            task.cancel()
            writer.transport.abort()


@asynccontextmanager
async def idle(*arguments: Any) -> AsyncIterator[Idle]:
    found = Idle(*arguments)
    try:
        yield found
    finally:
        found.close()


async def says(channel: Any) -> bytes:
    answer: bytes = await channel.unary_unary("/one")(b"said", timeout=10)
    return answer


def test_one_holder_leaves_a_fifth_to_others() -> None:
    shares = ConnectionShares(MOST)
    assert [shares.take("one") for _ in range(MOST)] == [True] * 16 + [False] * 4
    assert [shares.take(f"other {number}") for number in range(5)] == [True] * 4 + [False], "all are taken"
    shares.give("one")
    assert not shares.take("one"), "it holds fifteen, and one is free"
    assert shares.take("other 4")


def test_idle_connections_of_one_name_keep_no_other_name_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzd.wire.listener.allowed", lambda method: frozenset(Role))
    authority = Authority(tmp_path)
    tls = authority.issue(KEY, Role.SERVER, "one").tls(Role.SERVER)
    many, other = (authority.issue(KEY, Role.CLIENT, name) for name in ("many", "other"))

    async def run() -> None:
        found = Listener(Address("127.0.0.1", 0), 1 << 20, tls, connections_max=MOST)
        async with listening(found), idle(found, many, Role.CLIENT) as held:
            await held.hold(2 * MOST)
            await held.until_ended(2 * MOST - 16)
            channel = Channel(str(found.address), tls=other.tls(Role.CLIENT), peer=Role.SERVER)
            await channel.prove(10)
            assert await says(channel) == b"said"
            assert held.ended == 2 * MOST - 16, "those within the share stay"
            await channel.close()

    loop.run(run())


def test_without_certificates_the_address_has_the_share() -> None:
    async def run() -> None:
        found = Listener(Address("127.0.0.1", 0), 1 << 20, None, connections_max=MOST)
        async with listening(found), idle(found, None, Role.CLIENT, "127.0.0.2") as held:
            await held.hold(2 * MOST)
            await held.until_ended(2 * MOST - 16)
            async with grpc.aio.insecure_channel(str(found.address)) as channel:
                assert await says(channel) == b"said"

    loop.run(run())


def test_a_role_that_may_call_nothing_is_told_so_and_keeps_no_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = authority.issue(KEY, Role.SERVER, "one").tls(Role.SERVER)
    app = authority.issue(KEY, Role.CLIENT, "app")

    async def run() -> None:
        roles = roles_at("waltz.v1.ServerAdmin")
        assert Role.CLIENT not in roles
        found = Listener(Address("127.0.0.1", 0), 1 << 20, tls, roles=roles)
        async with listening(found), idle(found, app, Role.CLIENT) as held:
            channel = Channel(str(found.address), tls=app.tls(Role.CLIENT), peer=Role.SERVER)
            await channel.prove(10)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await says(channel)
            assert isinstance(error_of(refused.value), NotPermitted)
            await held.hold(3)
            async with asyncio.timeout(10):
                await held.until_ended(3)
            await channel.close()

    loop.run(run())


def test_a_connection_without_a_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "IDLE_SECONDS", 0.2)

    async def run() -> None:
        found = Listener(Address("127.0.0.1", 0), 1 << 20, None)
        async with listening(found), idle(found, None, Role.CLIENT) as held:
            channel: Any = grpc.aio.insecure_channel(str(found.address))
            call = channel.stream_stream("/echo")()
            await call.write(b"first")
            assert await call.read() == b"first"
            await held.hold(3)
            await held.until_ended(3)
            await call.write(b"second")
            assert await call.read() == b"second", "a connection with a call stays"
            call.cancel()
            await channel.close()

    loop.run(run())


def test_a_handshake_that_is_not_finished_ends(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue(KEY, Role.SERVER, "one").tls(Role.SERVER)

    async def run() -> None:
        found = Listener(Address("127.0.0.1", 0), 1 << 20, tls)
        async with listening(found):
            reader, writer = await asyncio.open_connection("127.0.0.1", found.address.port)
            writer.write(b"\x16\x03\x01\x02\x00\x01")
            assert await reader.read() == b""
            writer.close()

    loop.run(run())


def test_a_call_with_much_metadata_is_refused() -> None:
    async def run() -> None:
        found = Listener(Address("127.0.0.1", 0), 1 << 20, None)
        async with listening(found):
            channel: Any = grpc.aio.insecure_channel(str(found.address))
            assert await channel.unary_unary("/one")(b"said", metadata=(("much", "x" * 1000),)) == b"said"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/one")(b"said", metadata=(("much", "x" * (40 << 10)),))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await channel.close()

    loop.run(run())


def test_only_so_many_watch_the_health_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_service, "WATCHERS_MAX", 2)

    async def unready() -> list[str]:
        return []

    async def run() -> None:
        found = Listener(Address("127.0.0.1", 0), 1 << 20, None)
        fatal: list[BaseException] = []
        await found.start(lambda server: health_service.add_health(server, {}, unready), on_fatal=fatal.append)
        channel: Any = grpc.aio.insecure_channel(str(found.address))
        stub, watching = health_pb2_grpc.HealthStub(channel), list[Any]()
        for _ in range(2):
            watching.append(stub.Watch(health_pb2.HealthCheckRequest()))
            await watching[-1].read()
        watching.append(stub.Watch(health_pb2.HealthCheckRequest()))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await watching[2].read()
        assert error_of(refused.value).code == "W2050"
        for watch in watching:
            watch.cancel()
        await channel.close()
        await found.stop(0)
        assert fatal == []

    loop.run(run())
