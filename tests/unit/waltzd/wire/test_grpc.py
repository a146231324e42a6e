"""A caller that got no answer says whom it asked, where, and for how long it waited."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import grpc.aio
import pytest

from tests.process.certificates import Authority
from waltzd.errors import CannotConnect, NotPermitted
from waltzd.errors.operations import BadFrame
from waltzd.protocol.role import Role
from waltzd.wire.grpc import abort
from waltzd.wire.servers import GrpcStream, ServerAdminClient, ServerClient
from waltzd.wire.servicer import Context
from waltzd.wire.storages import AdminClient, ReplicaClient

KEY = UUID(int=7)
SECONDS = 0.05


@pytest.mark.parametrize(
    ("make", "who"),
    [
        (lambda address: AdminClient(address, KEY, seconds=SECONDS, name="s1"), "the storage s1"),
        (lambda address: AdminClient(address, KEY, seconds=SECONDS), "the storage"),
        (lambda address: ServerAdminClient(address, KEY, seconds=SECONDS), "the server"),
    ],
)
def test_a_deadline_names_who_and_where_and_how_long(
    make: Callable[[str], AdminClient | ServerAdminClient], who: str
) -> None:
    """As with a process that was stopped, the kernel takes the connection, and nobody says anything."""

    async def ask(address: str) -> None:
        async with make(address) as client:
            await client.describe()

    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(CannotConnect) as caught:
            asyncio.run(ask(address))
    assert caught.value.message == f"{who} at {address} did not answer within 0.05 seconds"


@pytest.mark.parametrize("address", ["nonsense", "waltz..example:1"])
@pytest.mark.parametrize("has_tls", [False, True])
def test_an_address_in_a_document_that_is_none_is_one_that_does_not_answer(
    address: str, has_tls: bool, tmp_path: Path
) -> None:
    """An owner of hundreds of partitions is not ended by the document of one storage."""
    tls = Authority(tmp_path).issue(KEY, Role.SERVER, "one").tls(Role.SERVER) if has_tls else None

    async def ask() -> None:
        async with ReplicaClient(address, KEY, seconds=SECONDS, tls=tls, name="s1") as client:
            await client.status(0)

    with pytest.raises(CannotConnect):
        asyncio.run(ask())


def test_a_stream_tells_why_the_server_refused_it_to_whoever_still_writes() -> None:
    """gRPC replaces the server's status when a write fails after it."""

    async def serve(messages: object, context: Context) -> None:
        await abort(context, NotPermitted("no rights here"))

    async def refused(channel: grpc.aio.Channel, size: int) -> None:
        async def begin() -> Any:
            return channel.stream_stream("/waltz.test/Talk")()

        stream = GrpcStream(
            begin,
            "here",
            "the stream",
            pack=lambda parts: parts[0],
            unpack=lambda message: [message],
            ending=lambda part: None,
        )

        async def send() -> None:
            while True:
                await stream.send([bytes(size)])

        with pytest.raises(NotPermitted, match="no rights here"):
            await send()

    async def work() -> None:
        handler: Any = grpc.stream_stream_rpc_method_handler(serve)
        server = grpc.aio.server(handlers=[grpc.method_handlers_generic_handler("waltz.test", {"Talk": handler})])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for size in (10, 100_000, 1_000_000) * 10:
                await refused(channel, size)
        await server.stop(None)

    asyncio.run(work())


def test_a_write_behind_an_end_without_a_status_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC may refuse a write and never give the status of the server."""
    monkeypatch.setattr("waltzd.wire.servers.STATUS_SECONDS", 0.01)

    class Ended:
        def add_done_callback(self, callback: object) -> None:
            pass

        async def write(self, message: object) -> None:
            raise asyncio.InvalidStateError("the call has ended")

    async def begin() -> Any:
        return Ended()

    async def work() -> None:
        stream: GrpcStream[bytes, bytes] = GrpcStream(
            begin, "there", "the stream", pack=lambda parts: parts[0], unpack=lambda message: [], ending=lambda part: None
        )
        with pytest.raises(CannotConnect, match="the stream at there has ended"):
            await asyncio.wait_for(stream.send([b""]), 10)

    asyncio.run(work())


def test_an_answer_that_is_no_message_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    """It was None to whoever asked, and an internal error: a storage could end each server that has partitions on it."""

    async def answer(request: object, context: Context) -> bytes:
        return b"\xff" * 3

    async def each(request: object, context: Context) -> AsyncIterator[bytes]:
        yield b"\xff" * 3

    def service(name: str, **calls: Any) -> Any:
        return grpc.method_handlers_generic_handler(f"waltz.v1.{name}", calls)

    async def work() -> None:
        server = grpc.aio.server()
        replica = service(
            "Replica", Open=grpc.unary_unary_rpc_method_handler(answer), Read=grpc.unary_stream_rpc_method_handler(each)
        )
        log = service("Log", Mount=grpc.stream_stream_rpc_method_handler(each))
        server.add_generic_rpc_handlers((replica, log))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with ReplicaClient(address, KEY) as storage, ServerClient(address, KEY) as calls:
            with pytest.raises(BadFrame, match="no message ReplicaStatus"):
                await storage.status(0)
            with pytest.raises(BadFrame, match="no message RunFrame"):
                [run async for run in storage.read(0, 0, 1)]
            mount = calls.mount()
            with pytest.raises(BadFrame, match="no message ServerFrame"):
                await mount.receive()
        await server.stop(None)

    asyncio.run(work())
    assert not caplog.text
