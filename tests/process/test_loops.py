"""One event loop after the other, each with a client: gRPC calls no loop back that has ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from tests.answers import Answers
from tests.unit.fake_server import KEY, FakeCluster, FakeServer
from waltzd.client.loop import LoopThread
from waltzd.protocol.address import Address
from waltzd.protocol.batches import Registration, Topology
from waltzd.wire.codec import client_frames, server_message
from waltzd.wire.listener import create_server, listen
from waltzd.wire.servicer import Origin, add_service

PARTITIONS = 256
PROGRAM = """
import asyncio, sys
from waltzd import Client

class Nothing:
    def __init__(self):
        self.positions = {}

    def position(self, partition):
        return self.positions.get(partition, -1)

    def apply(self, transaction):
        self.positions[transaction.partition] = transaction.id

async def main(writes):
    async with Client(sys.argv[1], view=Nothing()) as client:
        if writes:
            await asyncio.gather(*[client.append(b"x", partition=partition) for partition in client.partitions])

for writes in (True, False, True):
    asyncio.run(main(writes))
"""


class FakeService(Answers):
    """A fake cluster of one server, behind gRPC."""

    def __init__(self, fake: FakeCluster) -> None:
        self._fake = fake

    def _port(self) -> FakeServer:
        return self._fake.connect(self._fake.addresses[0], KEY)

    async def Locate(self, request: Any, origin: Origin) -> Topology:
        return await self._port().locate()

    async def Register(self, request: Any, origin: Origin) -> Registration:
        return await self._port().register()

    async def Mount(self, messages: Any, context: Any) -> AsyncIterator[Any]:
        mount = self._port().mount()

        async def up() -> None:
            while (message := await context.read()) is not grpc.aio.EOF:
                await mount.send(client_frames(message))

        hearing = asyncio.create_task(up())
        try:
            while (frames := await mount.receive()) is not None:
                yield server_message(frames)
        finally:
            hearing.cancel()
            mount.cancel()


@pytest.fixture
def address() -> Any:
    thread = LoopThread("served")

    async def serve() -> tuple[Any, str]:
        server = create_server(8 << 20)
        where = f"127.0.0.1:{listen(server, Address('127.0.0.1', 0))}"
        fake = FakeCluster(partitions=PARTITIONS, servers=1)
        fake.addresses = [where]
        add_service(server, "Log", FakeService(fake))
        await server.start()
        return server, where

    server, where = thread.wait_for(serve())
    yield where
    thread.wait_for(server.stop(0))


def test_a_client_that_is_closed_says_nothing_on_the_loop_that_follows(address: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, address], stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
