"""Segment files from one storage to another, and directories that were copied: real processes, real files, the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.process.daemon import KEY, OWNER_KEY, PARTITIONS, Daemon
from tests.process.test_storage import append, begin, clients, read_all, runs_of
from waltzd.client import loop
from waltzd.errors import Displaced, ForeignCluster, NoSuchPartition, WaltzError
from waltzd.errors.operations import BadFrame, NotNextId, NotOpened, StaleSession, UnfitSegment
from waltzd.format.layout import HEADER_BYTES, FileHeader
from waltzd.protocol.peers import Contact, secret_of
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import unpacked_error
from waltzd.wire.frames import Kind
from waltzd.wire.storages import ReplicaClient, connect
from waltzd.wire.streams import Hello, piece_parts, whole_bytes

MakeDaemon = Callable[..., Daemon]
SETTINGS = {"segment_bytes_max": "20KiB", "read_chunk_bytes": "4KiB"}
RECORDS = 1000
OWNER = Contact(secret=secret_of(OWNER_KEY, 0, 1))


def header(first_id: int) -> bytes:
    return FileHeader(created_ms=5, key=KEY, partition=0, first_id=first_id).encode()


async def in_pieces(content: bytes, size: int = 4096) -> AsyncIterator[bytes]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


def content_of(first_id: int, count: int) -> bytes:
    return header(first_id) + b"".join(bytes(run.data) for run in runs_of(count // 10, first_id=first_id))


def leftovers(daemon: Daemon) -> list[str]:
    return [path.name for path in (daemon.directory / "0").iterdir() if path.name.endswith(".new")]


def test_a_replica_is_filled_with_the_files_of_another(make_daemon: MakeDaemon) -> None:
    source, target = make_daemon("source", **SETTINGS).start(), make_daemon("target").start()

    async def copy() -> None:
        async with clients(source) as (from_, admin), clients(target) as (to, to_admin):
            await begin(from_, admin)
            await append(from_.append(0, 1), runs_of(RECORDS // 10), RECORDS - 1)
            await begin(to, to_admin)
            sealed = await from_.segments(0)
            assert len(sealed) >= 5
            for first_id, last_id, size in sealed:
                status = await to.install_segment(0, 1, first_id, size, from_.fetch_segment(0, first_id, session=1))
                assert (status.last_id, status.is_sound) == (last_id, True)
            assert [found[:2] for found in await to.segments(0, session=1)] == [found[:2] for found in sealed[:-1]]
            rest = [run async for run in from_.read(0, sealed[-1][1] + 1)]
            assert await append(to.append(0, 1), rest, RECORDS - 1) == RECORDS - 1
            assert await read_all(to, 0, None) == await read_all(from_, 0, None)

    loop.run(copy())
    target.kill()
    target.start()

    async def look() -> None:
        async with clients(target) as (to, _):
            status = await to.open(0, 2, partitions=PARTITIONS)
            assert (status.last_id, status.is_sound) == (RECORDS - 1, True)

    loop.run(look())


def test_every_refusal_keeps_its_class(daemon: Daemon) -> None:
    good = content_of(0, 20_000)

    async def check() -> None:
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin, session=4)

            async def refused(kind: type[WaltzError], session: int, first_id: int, content: bytes, size: int = 0) -> None:
                with pytest.raises(kind):
                    await replicas.install_segment(0, session, first_id, size, in_pieces(content, 100_000))

            await refused(StaleSession, 3, 0, good)
            await refused(NotOpened, 5, 0, good)
            await refused(NotNextId, 4, 7, good)
            await refused(UnfitSegment, 4, 0, good, size=len(good) - 1)
            await refused(UnfitSegment, 4, 0, good, size=10_000)
            await refused(UnfitSegment, 4, 0, good[:-1])
            await refused(UnfitSegment, 4, 0, good[:5000] + b"!" + good[5001:])
            await refused(ForeignCluster, 4, 0, good[:12] + bytes(16) + good[28:])
            assert leftovers(daemon) == []
            assert (await replicas.install_segment(0, 4, 0, len(good), in_pieces(good, 100_000))).last_id == 19_999

    loop.run(check())


Said = list[tuple[Kind, bytes]]


def piece(offset: int, data: bytes) -> tuple[Kind, bytes]:
    return Kind.PIECE, b"".join(piece_parts(offset, data))


async def say(daemon: Daemon, kind: Kind, hello: bytes, said: Said) -> tuple[Kind, bytes]:
    """What the storage says at the end."""
    host, port = daemon.stream_listen.rsplit(":", 1)
    connection = await connect(host, int(port), kind, hello, tls=None, name=None)
    try:
        for frame in said:
            await connection.send(frame[0], (frame[1],))
        async with asyncio.timeout(20):
            while (found := await connection.receive()) is not None and found[0] is Kind.GO_ON:
                continue
        assert found is not None
        return found[0], bytes(found[1])
    finally:
        connection.close()


def test_damage_on_the_way_is_noticed(daemon: Daemon) -> None:
    """What else may be wrong on the way is in tests/unit/waltzd/wire/test_segment_frames.py."""
    content = content_of(0, 100)
    sent = piece(0, content)[1]
    damaged = sent[:-1] + bytes([sent[-1] ^ 1])

    async def check() -> None:
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin)
            hello = Hello(KEY, 0, 1, OWNER, first_id=0, file_bytes=len(content)).encode()
            whole = Kind.WHOLE, whole_bytes(len(content))
            kind, why = await say(daemon, Kind.INSTALL, hello, [(Kind.PIECE, damaged), whole])
            assert (kind, type(unpacked_error(why))) == (Kind.REFUSED, BadFrame)
            assert leftovers(daemon) == []
            kind, what = await say(daemon, Kind.INSTALL, hello, [piece(0, content), whole])
            assert kind is Kind.STATUS
            assert wire.ReplicaStatus.FromString(what).last_id == 99

    loop.run(check())


@pytest.mark.parametrize("kind", [Kind.FETCH, Kind.INSTALL])
def test_a_stream_for_no_file_is_refused(daemon: Daemon, kind: Kind) -> None:
    hello = Hello(KEY, 0, 1, OWNER)

    async def check() -> None:
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin)
            for said, expected in (
                (hello.encode()[:-1], BadFrame),
                (replace(hello, first_id=-1).encode(), BadFrame),
                (replace(hello, first_id=0, file_bytes=-1).encode(), BadFrame),
                (Hello(UUID(int=9), 0, 1, first_id=0).encode(), ForeignCluster),
                (Hello(KEY, 2, 1, first_id=0).encode(), NoSuchPartition),
            ):
                found, why = await say(daemon, kind, said, [(Kind.GO_ON, b"")])
                assert (found, type(unpacked_error(why))) == (Kind.REFUSED, expected)

    loop.run(check())


def test_an_installation_ends_with_its_session_its_sender_or_the_next_one(daemon: Daemon) -> None:
    content = content_of(0, 100)

    class Slow:
        """Sends the first piece, and the second when it is told to."""

        def __init__(self) -> None:
            self.begun, self.go_on = asyncio.Event(), asyncio.Event()

        async def pieces(self) -> AsyncIterator[bytes]:
            self.begun.set()
            yield content[:5000]
            await self.go_on.wait()
            yield content[5000:]

        def start(self, replicas: ReplicaClient, session: int) -> asyncio.Task[Any]:
            return asyncio.create_task(replicas.install_segment(0, session, 0, len(content), self.pieces()))

    async def check() -> None:
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin)
            first, second = Slow(), Slow()
            one = first.start(replicas, 1)
            await first.begun.wait()
            two = second.start(replicas, 1)
            await second.begun.wait()
            first.go_on.set()
            with pytest.raises(Displaced):
                await one
            await replicas.open(0, 2, partitions=PARTITIONS)
            second.go_on.set()
            with pytest.raises(StaleSession):
                await two
            third = Slow()
            three = third.start(replicas, 2)
            await third.begun.wait()
            three.cancel()
            await asyncio.gather(three, return_exceptions=True)
            async with asyncio.timeout(20):
                while leftovers(daemon):
                    await asyncio.sleep(0.01)
            assert (await replicas.install_segment(0, 2, 0, 0, in_pieces(content))).last_id == 99

    loop.run(check())


def test_a_killed_storage_keeps_nothing_of_half_a_file(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    content = content_of(0, 100)

    async def kill_halfway() -> None:
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin)

            async def pieces() -> AsyncIterator[bytes]:
                yield content[: HEADER_BYTES + 5000]
                async with asyncio.timeout(20):
                    while not leftovers(daemon):
                        await asyncio.sleep(0.01)
                daemon.kill()
                yield content[HEADER_BYTES + 5000 :]

            with pytest.raises(WaltzError):
                await replicas.install_segment(0, 1, 0, len(content), pieces())

    loop.run(kill_halfway())
    assert leftovers(daemon) != []
    daemon.start()
    assert leftovers(daemon) == []

    async def again() -> None:
        async with clients(daemon) as (replicas, _):
            assert (await replicas.open(0, 2, partitions=PARTITIONS)).last_id == -1
            assert (await replicas.install_segment(0, 2, 0, len(content), in_pieces(content))).last_id == 99

    loop.run(again())
