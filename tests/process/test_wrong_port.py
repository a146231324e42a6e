"""A client that was given a wrong address says so at once, and what is there."""

from __future__ import annotations

import asyncio
import http.server
import logging
import socket
import threading
from contextlib import closing
from typing import Any

import grpc
import pytest

from tests.process.daemon import Daemon
from waltzd import Client, ClientSettings
from waltzd.client import loop
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import WrongPeer
from waltzd.protocol.address import Address
from waltzd.wire.calls import DESCRIBE_SERVER
from waltzd.wire.listener import create_server, listen


def refusal(address: str) -> WaltzError:
    """What opening ends with; patience would last ten times as long as this test."""

    async def open_there() -> WaltzError:
        async with asyncio.timeout(120):
            with pytest.raises(WaltzError) as caught:
                await Client(address, settings=ClientSettings(submit_seconds=1200, call_seconds=60)).open()
        return caught.value

    return loop.run(open_there())


def test_a_port_of_a_storage(daemon: Daemon) -> None:
    for address, name in (
        (daemon.listen, f"{daemon.listen} is the port of a storage, which is for servers"),
        (daemon.admin_listen, f"{daemon.admin_listen} is the port of a storage for operators"),
        (daemon.stream_listen, f"another program answers at {daemon.stream_listen}, one that does not speak gRPC"),
    ):
        error = refusal(address)
        assert isinstance(error, WrongPeer)
        assert error.message == name
        assert "listen for applications" in error.detail_next_step


def test_the_port_of_a_server_for_operators() -> None:
    async def described(request: bytes, context: Any) -> bytes:
        return b""

    async def test() -> None:
        server = create_server(8 << 20)
        address = f"127.0.0.1:{listen(server, Address('127.0.0.1', 0))}"
        handlers: dict[str, Any] = {DESCRIBE_SERVER.name: grpc.unary_unary_rpc_method_handler(described)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("waltz.v1.ServerAdmin", handlers),))
        await server.start()
        with pytest.raises(WrongPeer, match=f"{address} is the port of a server for operators"):
            await Client(address).open()
        await server.stop(0)

    loop.run(test())


def test_an_http_server() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            address = f"127.0.0.1:{server.server_address[1]}"
            assert refusal(address).message == f"an HTTP server answers at {address}"
        finally:
            server.shutdown()
            serving.join()


def test_a_program_that_never_answers_what_it_does_not_know() -> None:
    """As ZooKeeper does: it hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as there:

        def hang_up() -> None:
            for _ in range(100):
                try:
                    caller, _ = there.accept()
                except OSError:
                    return
                with closing(caller):
                    caller.recv(16)

        threading.Thread(target=hang_up, daemon=True).start()
        address = f"127.0.0.1:{there.getsockname()[1]}"
        assert refusal(address).message == f"another program answers at {address}, one that does not speak gRPC"


def test_a_closed_port_is_told_at_once_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """A server may start later than its clients."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"

    async def test() -> None:
        opening = asyncio.create_task(Client(address, settings=ClientSettings(submit_seconds=1200)).open())
        async with asyncio.timeout(120):
            while not caplog.messages:
                await asyncio.sleep(0.01)
        assert not opening.done()
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        with pytest.raises(CannotConnect, match=f"not found in 0.5 seconds: .*nothing listens at {address}"):
            await Client(address, settings=ClientSettings(submit_seconds=0.5)).open()

    with caplog.at_level(logging.WARNING, "waltz.client"):
        loop.run(test())
    assert caplog.messages[0] == f"no server answers (nothing listens at {address}); retrying for 1200 seconds"
