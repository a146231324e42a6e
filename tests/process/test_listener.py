"""A port of gRPC that a stranger's frame ends, and that is there again at once, also while calls live on the old one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.fuzz.hostile import PREFACE, SETTINGS, connect, opening
from tests.process.certificates import Authority
from tests.process.daemon import KEY
from waltzd.client import loop
from waltzd.daemon.expiry import DAY_SECONDS
from waltzd.errors import CannotConnect, NotPermitted
from waltzd.protocol.address import Address
from waltzd.protocol.role import Role
from waltzd.wire import listener
from waltzd.wire.calls import RIGHTS_OF_TOOLS
from waltzd.wire.grpc import Server, error_of
from waltzd.wire.listener import Listener
from waltzd.wire.tls import Tls

SECONDS = 30
NO_TEXT = opening(1, "/waltz.v1.Log/Mount").replace(b"/waltz.v1.", b"/waltz\xff\xff1.")


class Echo(grpc.GenericRpcHandler):
    """A stream that sends back what comes, and a call that sends back its one message."""

    def service(self, handler_call_details: Any) -> Any:
        async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for message in messages:
                yield message

        async def one(message: bytes, context: Any) -> bytes:
            return message

        if handler_call_details.method == "/one":
            return grpc.unary_unary_rpc_method_handler(one, request_deserializer=bytes, response_serializer=bytes)
        if handler_call_details.method != "/echo":
            return None
        return grpc.stream_stream_rpc_method_handler(echo, request_deserializer=bytes, response_serializer=bytes)


def add_echo(server: Server) -> None:
    server.add_generic_rpc_handlers((Echo(),))


@contextlib.asynccontextmanager
async def listening(found: Listener) -> AsyncIterator[None]:
    fatal: list[BaseException] = []
    await found.start(add_echo, on_fatal=fatal.append)
    try:
        async with asyncio.timeout(SECONDS):
            yield
    finally:
        await found.stop(0)
    assert fatal == []


async def spoken(found: Listener) -> Any:
    """A call that lives; the door was open for it."""
    call: Any = grpc.aio.insecure_channel(str(found.address)).stream_stream("/echo")()
    await call.write(b"first")
    assert await call.read() == b"first"
    return call


async def shut(found: Listener) -> Server:
    """The server that the frame of a stranger has ended."""
    before = found._server
    with connect(str(found.address)) as connection:
        connection.sendall(PREFACE + SETTINGS + NO_TEXT)
        while found._server is before:
            await asyncio.sleep(0.01)
    return before


def test_the_port_opens_again_while_calls_live_on_the_old_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "FRESH_SECONDS", 0.0)

    async def run() -> None:
        found = Listener(Address("127.0.0.1", 0), 1 << 20, None)
        async with listening(found):
            calls = [await spoken(found)]
            for _ in range(listener.RETIRED_MAX):
                await shut(found)
                while await found.knock():
                    pass
                calls.append(await spoken(found))
            for call in calls:
                await call.write(b"second")
                assert await call.read() == b"second", "what was there goes on"
            await shut(found)
            assert await calls[0].code() is grpc.StatusCode.UNAVAILABLE, "only so many are kept"
            assert not any(call.done() for call in calls[1:])
            for call in calls:
                call.cancel()

    loop.run(run())
    said = [record.getMessage() for record in caplog.records if record.name == "waltz.listener"]
    assert [line.partition("for the ")[2][0] for line in said] == ["1", "2", "4"]


def test_readiness_knocks_at_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "FRESH_SECONDS", 0.0)
    authority = Authority(tmp_path)
    tls = authority.issue(KEY, Role.SERVER, "one").tls(Role.SERVER)

    async def run() -> None:
        for found in (Listener(Address("127.0.0.1", 0), 1 << 20, None), Listener(Address("0.0.0.0", 0), 1 << 20, tls)):
            async with listening(found):
                assert await found.knock() == []
                await found._server.stop(0)
                (reason,) = await found.knock()
                assert reason.startswith(f"callers cannot connect to {found.address}: ")

    loop.run(run())


@pytest.mark.parametrize("how", ["ends", "is revoked"])
def test_a_call_lasts_as_long_as_its_callers_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """And no other one is made over the same connection."""
    monkeypatch.setattr(listener, "CERTIFIED_SECONDS", 0.05)
    authority = Authority(tmp_path)
    files = authority.issue(KEY, Role.SERVER, "one")
    revoked = authority.revoke()
    tls = Tls(str(files.certificate), str(files.key), str(files.ca), role=Role.SERVER, revoked=str(revoked))
    monkeypatch.setitem(RIGHTS_OF_TOOLS, "/echo", frozenset({Role.CLIENT}))
    monkeypatch.setitem(RIGHTS_OF_TOOLS, "/one", frozenset({Role.CLIENT}))
    caller = authority.issue(KEY, Role.CLIENT, "app", days=(2 if how == "ends" else 3600) / DAY_SECONDS)

    async def run() -> None:
        found = Listener(Address("127.0.0.1", 0), 1 << 20, tls)
        async with listening(found):
            channel = grpc.aio.secure_channel(
                str(found.address),
                grpc.ssl_channel_credentials(
                    files.ca.read_bytes(), caller.key.read_bytes(), caller.certificate.read_bytes()
                ),
                options=[("grpc.ssl_target_name_override", f"server.{KEY}.waltz")],
            )
            call: Any = channel.stream_stream("/echo")()
            await call.write(b"first")
            assert await call.read() == b"first"
            if how == "is revoked":
                authority.revoke(caller)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.read()
            assert isinstance(error_of(ended.value), CannotConnect), "it may come again with another certificate"
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary("/one")(b"said")  # type: ignore[arg-type]
                assert isinstance(error_of(refused.value), NotPermitted)
            await channel.close()

    loop.run(run())


def test_however_many_ask_there_is_one_knock_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        found = Listener(Address("127.0.0.1", 0), 1 << 20, None)
        knocks = 0

        async def knocked() -> list[str]:
            nonlocal knocks
            knocks += 1
            return ["shut"]

        monkeypatch.setattr(listener, "FRESH_SECONDS", float("inf"))
        monkeypatch.setattr(found, "_try_the_door", knocked)
        assert await asyncio.gather(*(found.knock() for _ in range(20))) == [["shut"]] * 20
        assert knocks == 1

    loop.run(run())


def test_a_call_says_soon_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended(call: Any) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        return error_of(refused.value).code

    async def run() -> None:
        found = Listener(Address("127.0.0.1", 0), 1 << 20, None)
        async with listening(found):
            channel: Any = grpc.aio.insecure_channel(str(found.address))
            assert await channel.unary_unary("/one")(b"said") == b"said"
            silent = channel.stream_stream("/one")()
            await silent.done_writing()
            assert await ended(silent) == "W2006", "a call without its message"
            with monkeypatch.context() as hasty:
                hasty.setattr(listener, "FIRST_SECONDS", 0.05)
                assert await ended(channel.stream_stream("/one")()) == "W2050"
            monkeypatch.setattr(listener, "PROMPT_SECONDS", 0.0)
            slow = [channel.stream_stream("/one")() for _ in range(listener.SLOW_MAX + 1)]
            reading = [asyncio.create_task(ended(call)) for call in slow]
            done, waiting = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result() for task in done] == ["W2050"], "one too many"
            assert len(waiting) == listener.SLOW_MAX
            for call in slow:
                call.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await channel.close()

    loop.run(run())
