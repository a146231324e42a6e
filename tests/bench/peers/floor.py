"""The floor below Waltz: the same five processes, and of all the work only what cannot be left out.

A client sends a transaction to a server, which gives it an id and a checksum and sends it to three storages. Each
verifies the checksum, writes, flushes, and answers; the second answer acknowledges. There are no locks, sessions, indexes,
recovery or fail-over. Waltz ÷ floor is the distance of Waltz from the limit of Python, the kernel and the disk.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import NamedTuple, cast

import uvloop
from isal.isal_zlib import crc32

from tests.bench.peers.process import HOST, Process
from tests.bench.peers.system import Facts, NotCommittedError, System, missing_of

STORAGES, MAJORITY = 3, 2
HEAD = Struct(">IIq")
"""Length of the body, transactions in it, and a number: of the request between client and server, the id behind it."""
CHECKSUM = Struct(">I")
PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.bench.peers.floor import main
main(sys.argv[1:])
"""


class Frame(NamedTuple):
    transactions: int
    number: int
    body: bytes


class Connection(asyncio.Protocol):
    """Frames in both directions. `take` gets all frames of one read."""

    def __init__(self, take: Callable[[Connection, list[Frame]], None]) -> None:
        self._take = take
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at, frames = 0, []
        while len(data) - at >= HEAD.size:
            length, count, number = HEAD.unpack_from(data, at)
            end = at + HEAD.size + length
            if end > len(data):
                break
            frames.append(Frame(count, number, data[at + HEAD.size : end]))
            at = end
        self._rest = data[at:]
        if frames:
            self._take(self, frames)

    def send(self, count: int, number: int, body: bytes = b"") -> None:
        self.transport.writelines([HEAD.pack(len(body), count, number), body])


class Storage:
    """Writes what one read of a connection brought, flushes once, then answers each frame. A frame without transactions
    asks for the next id."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._end = 0
        self._next_id = 0

    def take(self, connection: Connection, frames: list[Frame]) -> None:
        appends = [frame for frame in frames if frame.transactions]
        for frame in appends:
            (checksum,) = CHECKSUM.unpack_from(frame.body, len(frame.body) - CHECKSUM.size)
            if crc32(frame.body[: -CHECKSUM.size]) != checksum or frame.number != self._next_id:
                raise SystemExit("a damaged frame")
            self._next_id += frame.transactions
        if appends:
            self._end += os.pwritev(self._file, [frame.body for frame in appends], self._end)
            os.fdatasync(self._file)
        for frame in frames:
            connection.send(frame.transactions, frame.number + frame.transactions if frame.transactions else self._next_id)


class Server:
    def __init__(self) -> None:
        self.storages: list[Connection] = []
        self._next_id = 0
        self._waiting: dict[int, list[tuple[Connection, Frame]]] = {}
        """By the id behind it: each append that has fewer than two answers, once for each answer that it lacks."""

    def take(self, client: Connection, frames: list[Frame]) -> None:
        for frame in frames:
            first = self._next_id
            self._next_id += frame.transactions
            self._waiting[self._next_id] = [(client, frame)] * MAJORITY
            body = HEAD.pack(len(frame.body), frame.transactions, first) + frame.body
            body += CHECKSUM.pack(crc32(body))
            for storage in self.storages:
                storage.send(frame.transactions, first, body)

    def take_answers(self, _: Connection, frames: list[Frame]) -> None:
        for answer in frames:
            waiting = self._waiting.get(answer.number)
            if waiting is not None:
                client, frame = waiting.pop()
                if not waiting:
                    del self._waiting[answer.number]
                    client.send(frame.transactions, frame.number)


async def run_storage(port: int, path: str) -> None:
    storage = Storage(path)
    await asyncio.get_running_loop().create_server(lambda: Connection(storage.take), HOST, port)
    await asyncio.Event().wait()


async def run_server(port: int, storages: list[int]) -> None:
    server, loop = Server(), asyncio.get_running_loop()
    for storage in storages:
        server.storages.append((await loop.create_connection(lambda: Connection(server.take_answers), HOST, storage))[1])
    await loop.create_server(lambda: Connection(server.take), HOST, port)
    await asyncio.Event().wait()


class Floor(System):
    name = "floor"
    package = "./dev setup"

    @classmethod
    def missing(cls) -> str | None:
        return missing_of([], ["isal", "uvloop"])

    def start(self) -> None:
        self._storages = [next(self.ports) for _ in range(STORAGES)]
        self._server = next(self.ports)
        for port in self._storages:
            self._run(f"storage-{port}", port, "storage", port, self.home / f"{port}.data")
        self._run("server", self._server, "server", self._server, *self._storages)

    def _run(self, name: str, port: int, *words: object) -> None:
        self.run(Process(name, [sys.executable, "-c", PROGRAM, *words], self.home, port=port)).wait_listening()

    @property
    def address(self) -> tuple[str, ...]:
        return (str(self._server), *map(str, self._storages))

    @property
    def facts(self) -> Facts:
        return Facts(
            version="of this machine",
            durability="flushed by two of three processes before it is acknowledged",
            caveat="framing, a checksum, a write and a flush in the same five processes, and no rule of a log",
        )


class FloorSession:
    def __init__(self, address: tuple[str, ...]) -> None:
        self._server, *self._storages = map(int, address)
        self._number = 0
        self._waiting: dict[int, asyncio.Future[int]] = {}

    async def open(self) -> None:
        self._connection = await self._connect(self._server)
        self._asking = [await self._connect(port) for port in self._storages]

    async def _connect(self, port: int) -> Connection:
        made = await asyncio.get_running_loop().create_connection(lambda: Connection(self._take), HOST, port)
        return made[1]

    def _take(self, connection: Connection, frames: list[Frame]) -> None:
        if connection is self._connection:
            for frame in frames:
                self._waiting.pop(frame.number).set_result(frame.transactions)
        else:
            self._kept[connection].set_result(frames[0].number)

    async def append(self, slot: int, payload: bytes) -> None:
        await self._send(1, payload)

    async def append_all(self, lane: int, slots: range, payload: bytes) -> None:
        await self._send(len(slots), payload * len(slots))

    async def _send(self, count: int, body: bytes) -> None:
        self._number += 1
        answer = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        self._connection.send(count, self._number, body)
        if await answer != count:
            raise NotCommittedError(f"request {self._number}: another count came back")

    async def kept(self) -> int:
        loop = asyncio.get_running_loop()
        self._kept: dict[Connection, asyncio.Future[int]] = {each: loop.create_future() for each in self._asking}
        for each in self._asking:
            each.send(0, 0)
        return sorted(await asyncio.gather(*self._kept.values()))[STORAGES - MAJORITY]

    async def close(self) -> None:
        for each in (self._connection, *self._asking):
            each.transport.close()


def main(words: list[str]) -> None:
    what, port, *rest = words
    work = run_storage(int(port), rest[0]) if what == "storage" else run_server(int(port), [int(word) for word in rest])
    uvloop.run(work)
