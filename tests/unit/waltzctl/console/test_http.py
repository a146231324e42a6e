"""What a browser may leave undone: half a request, a connection without one, too many of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from waltzctl.console import bounded_protocol
from waltzctl.console.bounded_protocol import BoundedProtocol

HEAD = b"POST /said HTTP/1.1\r\nhost: here\r\ncontent-length: 5\r\n\r\n"


async def said(request: Request) -> Response:
    return PlainTextResponse(await request.body())


async def followed(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"part"
            await asyncio.sleep(bounded_protocol.REQUEST_SECONDS / 2)

    return StreamingResponse(parts())


@asynccontextmanager
async def serving() -> AsyncIterator[Callable[[], Any]]:
    """What is yielded opens a connection."""
    app = Starlette(routes=[Route("/said", said, methods=["POST"]), Route("/followed", followed)])
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedProtocol, log_config=None, lifespan="off", ws="none"))
    running = asyncio.create_task(server._serve([bound]))
    async with asyncio.timeout(30):
        while not server.started:
            await asyncio.sleep(0.01)
        yield lambda: asyncio.open_connection("127.0.0.1", bound.getsockname()[1])
        server.should_exit = server.force_exit = True
        await running


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "REQUEST_SECONDS", 0.2)


@pytest.mark.parametrize("half", [b"", b"POST /said HTT", HEAD, HEAD + b"hel", HEAD + b"hello" + HEAD])
def test_half_a_request_ends_its_connection(half: bytes) -> None:
    async def run() -> None:
        async with serving() as connect:
            reader, writer = await connect()
            writer.write(half)
            answer = await reader.read()
            assert answer.endswith(b"hello") is (b"hello" in half)
            writer.close()

    asyncio.run(run())


def test_a_page_that_is_followed_stays() -> None:
    async def run() -> None:
        async with serving() as connect:
            reader, writer = await connect()
            writer.write(b"GET /followed HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).count(b"part") == 5
            writer.close()

    asyncio.run(run())


def test_one_connection_too_many_is_closed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(bounded_protocol, "REQUEST_SECONDS", 20.0)

    async def run() -> None:
        async with serving() as connect:
            made = [await connect() for _ in range(2)]
            reader, writer = await connect()
            assert await reader.read() == b""
            writer.close()
            for reader, writer in made:
                writer.write(HEAD + b"hello")
                assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
                writer.close()

    asyncio.run(run())
