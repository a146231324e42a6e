"""Hostile callers by the thousand against a real storage, while a good one appends and must not notice.

Random bytes as messages, well-formed messages with impossible contents, raw garbage on the ports, slow callers and floods.
Every answer is one of our errors or a plain refusal of gRPC; the storage stays up, its memory and its open files are what
they were, it says nothing but its own sentences, and the good caller's records are all there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import grpc
import grpc.aio
import pytest

from tests.fuzz.hostile import (
    DATA,
    PARTITIONS,
    PLAYED,
    PREFACE,
    SECONDS,
    SETTINGS,
    SPARED,
    Health,
    Siege,
    connect,
    frame,
    letters,
    methods,
    opening,
    strange_lines,
)
from tests.fuzz.mutate import INTEGERS, mutated
from tests.process.daemon import KEY, OWNER_KEY, Daemon
from waltzd.client import loop
from waltzd.disk.real import RealDisk
from waltzd.errors import CannotConnect, NoSuchPartition
from waltzd.format.finding import Finding
from waltzd.format.record import Run, encode_payloads
from waltzd.protocol.peers import SECRET_BYTES, Contact, secret_of
from waltzd.storage.offline.verify import Options, Target, verify
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.frames import HEAD, Kind
from waltzd.wire.storages import AdminClient, ReplicaClient
from waltzd.wire.streams import Hello, piece_parts, records_parts, whole_bytes

CALLS, ADMIN_CALLS, STREAMS, FILES = 125, 40, 100, 35
GARBAGE, FLOODS = 60, 1
SESSION = 7
OTHER_KEY = UUID(int=99)
REPLICA, ADMIN = methods("Replica"), methods("StorageAdmin")


def runs(first_id: int, count: int) -> Run:
    return encode_payloads(first_id, [b"good %d" % id_ for id_ in range(first_id, first_id + count)])


def any_call(chance: random.Random) -> tuple[str, Sequence[bytes]]:
    path = chance.choice(sorted(REPLICA))
    return path, letters(chance, REPLICA[path], KEY)


def any_admin_call(chance: random.Random) -> tuple[str, Sequence[bytes]]:
    path = chance.choice(sorted(ADMIN))
    return path, letters(chance, ADMIN[path], KEY)


def _secret(chance: random.Random, partition: int) -> bytes:
    right = secret_of(OWNER_KEY, partition, 1)
    return right if chance.random() < 0.9 else chance.choice([b"", bytes(SECRET_BYTES), mutated(chance, right)])


def target(chance: random.Random) -> wire.Target:
    """Of the spared partition never a session above the one that has it, and never that one's secret."""
    partition = chance.choice([SPARED, PLAYED, PLAYED, PLAYED, PLAYED])
    session = chance.choice([1, 2, -1, SESSION, SESSION]) if partition == SPARED else 1
    return wire.Target(cluster_key=KEY.bytes, partition=partition, session=session, secret=_secret(chance, partition))


def any_stream(chance: random.Random) -> list[bytes]:
    """Records that begin well: then twice the same, or changed, or not in order, or with lengths that lie."""
    spoken = target(chance)
    contact = Contact(secret=spoken.secret)
    hello = Hello(KEY if chance.random() < 0.9 else OTHER_KEY, spoken.partition, spoken.session, contact).encode()
    pieces = [_frame(chance, Kind.HELLO, hello if chance.random() < 0.9 else mutated(chance, hello))]
    for number in range(chance.randrange(1, 5)):
        run = runs(chance.choice([0, 0, 1, 3 * number]), chance.choice([1, 2, 3, 70]))
        content = b"".join(records_parts(run, -1))
        match chance.randrange(9):
            case 0:
                content = struct.pack(">q", chance.choice(INTEGERS)) + content[8:]
            case 1:
                content = content[:8] + struct.pack(">q", chance.choice(INTEGERS)) + content[16:]
            case 2:
                content = content[:16] + struct.pack(">I", chance.choice([0, 1, 100_000, (1 << 32) - 1])) + content[20:]
            case 3 | 4:
                content = mutated(chance, content)
            case 5:
                content = b""
        pieces.append(_frame(chance, chance.choice([Kind.RECORDS] * 9 + list(Kind)), content))
    if chance.random() < 0.2:
        pieces.append(pieces[-1])
    if chance.random() < 0.1:
        pieces.append(chance.randbytes(50))
    return pieces


def _frame(chance: random.Random, kind: int, content: bytes) -> bytes:
    """Now and then it says another length or kind than it has."""
    length = len(content) if chance.random() < 0.95 else chance.choice([0, 1, 1 << 20, (1 << 32) - 1])
    return HEAD.pack(length, kind if chance.random() < 0.97 else chance.randrange(256)) + content


def any_file(chance: random.Random) -> list[bytes]:
    """A segment file that begins well, or a wish for one: with pieces that lie about where they stand or what they are."""
    spoken = target(chance)
    hello = Hello(
        KEY if chance.random() < 0.9 else OTHER_KEY,
        spoken.partition,
        spoken.session,
        first_id=chance.choice([0, 0, 3, *INTEGERS]),
        file_bytes=chance.choice([0, *INTEGERS]),
    ).encode()
    kind = chance.choice([Kind.FETCH, Kind.INSTALL, Kind.INSTALL, Kind.INSTALL])
    frames = [_frame(chance, kind, hello if chance.random() < 0.9 else mutated(chance, hello))]
    offset = 0
    for _ in range(chance.randrange(4)):
        data = chance.randbytes(chance.choice([0, 1, 128, 5000]))
        content = b"".join(piece_parts(offset, data))
        if chance.random() < 0.3:
            content = mutated(chance, content)
        frames.append(_frame(chance, chance.choice([Kind.PIECE] * 9 + list(Kind)), content))
        offset += len(data)
    if chance.random() < 0.6:
        frames.append(_frame(chance, Kind.WHOLE, whole_bytes(chance.choice([offset, offset, *INTEGERS]))))
    if chance.random() < 0.3:
        chance.shuffle(frames)
    return frames


async def send_too_much(address: str) -> None:
    """Larger than any message may be."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call: Any = channel.unary_unary("/waltz.v1.Replica/Open")
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(bytes(70 << 20), timeout=SECONDS)
            assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


async def append_well(replicas: ReplicaClient, finished: asyncio.Event, started: asyncio.Event) -> int:
    """One stream that must never be ended by anybody else."""
    stream = replicas.append(SPARED, SESSION)
    last_id = -1
    while not finished.is_set() or last_id < 100:
        run = runs(last_id + 1, 10)
        await stream.send(run, last_id)
        while last_id < run.last_id:
            mark = await stream.receive()
            assert mark is not None
            last_id = mark
        if last_id > 100:
            started.set()
    stream.cancel()
    return last_id


async def check(replicas: ReplicaClient, last_id: int) -> None:
    at = 0
    async for found in replicas.read(SPARED, 0, session=SESSION):
        assert found.data == runs(found.first_id, len(found)).data
        assert found.first_id == at
        at = found.last_id + 1
    assert at == last_id + 1


async def besiege(daemon: Daemon, siege: Siege) -> None:
    is_over = asyncio.Event()
    slow = asyncio.create_task(siege.starve(daemon.listen, is_over))
    await asyncio.gather(
        siege.calls(daemon.listen, CALLS, any_call),
        siege.streams(daemon.stream_listen, STREAMS, any_stream),
        siege.streams(daemon.stream_listen, FILES, any_file),
        siege.throw(daemon.stream_listen, GARBAGE),
        siege.flood(daemon.stream_listen, FLOODS),
        siege.calls(daemon.admin_listen, ADMIN_CALLS, any_admin_call),
        siege.throw(daemon.listen, GARBAGE),
        siege.throw(daemon.admin_listen, GARBAGE // 4),
        siege.flood(daemon.listen, FLOODS),
        send_too_much(daemon.listen),
    )
    is_over.set()
    await slow


def test_hostile_callers_disturb_nobody(tmp_path: Path) -> None:
    async def run() -> int:
        async with daemon.replicas() as replicas, daemon.admin() as admin:
            assert set((await admin.create_partitions([SPARED, PLAYED])).values()) == {None}
            for number, session in ((SPARED, SESSION), (PLAYED, 1)):
                await replicas.open(number, session, partitions=PARTITIONS)
                await replicas.set_low_mark(number, session, -1)
            finished, started = asyncio.Event(), asyncio.Event()
            good = asyncio.create_task(append_well(replicas, finished, started))
            await asyncio.wait((good, asyncio.create_task(started.wait())), return_when=asyncio.FIRST_COMPLETED)
            assert daemon.process is not None
            health, siege = Health(daemon.process.pid), Siege("storage")
            await besiege(daemon, siege)
            assert not good.done(), good
            finished.set()
            async with asyncio.timeout(SECONDS):
                last_id = await good
            await check(replicas, last_id)
            await verified(admin)
            await health.recovered()
            print(dict(siege.codes), siege.thrown, last_id)
            siege.check_depth()
            return last_id

    async def verified(admin: AdminClient) -> None:
        found = [one async for one in admin.verify([SPARED])]
        assert len(found) == 1
        assert not isinstance(found[0], Finding)

    async def again() -> None:
        async with daemon.replicas() as replicas:
            assert (await replicas.open(SPARED, SESSION, partitions=PARTITIONS)).is_sound
            await check(replicas, last_id)

    with Daemon(tmp_path / "storage") as daemon:
        last_id = loop.run(run())
        assert daemon.kill() != 0
        daemon.start()
        loop.run(again())
        assert daemon.stop() == 0
    assert strange_lines(daemon.log) == []
    assert verify(RealDisk(), [Target(storage=str(daemon.directory))], Options()).findings == []


def test_a_path_that_is_no_text_ends_nothing(tmp_path: Path) -> None:
    """One frame from anybody who can open a connection ends the server of gRPC 1.85.1; the daemon listens again."""

    async def run() -> None:
        async with daemon.admin() as admin:
            assert await admin.create_partitions([0]) == {0: None}
        path = opening(1, "/waltz.v1.Log/Mount").replace(b"/waltz.v1.", b"/waltz\xff\xff1.")
        with connect(daemon.listen) as connection:
            connection.sendall(PREFACE + SETTINGS + path)
            connection.settimeout(SECONDS)
            with contextlib.suppress(ConnectionError):
                while b"grpc-status" not in (said := connection.recv(4096)) and said:
                    pass  # until the call is refused, or the connection is closed
        async with daemon.replicas() as replicas, asyncio.timeout(SECONDS):
            while True:  # a caller that comes in between tries again, like every caller
                try:
                    status = await replicas.open(0, 7, partitions=PARTITIONS)
                    break
                except CannotConnect:
                    await asyncio.sleep(0.05)
        assert status.is_sound

    with Daemon(tmp_path / "storage") as daemon:
        loop.run(run())
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log
        assert daemon.log.count("the transport ended its server") == 1


def test_headers_that_are_no_text_are_nothing_to_tell_of(tmp_path: Path) -> None:
    """gRPC told of each with a traceback, as of a mistake of the daemon, and anybody may send them."""
    call = opening(1, "/waltz.v1.StorageAdmin/Describe", (b"x", b"\xff\xfe"), (b"user-agent", b"\xff"))
    with Daemon(tmp_path / "storage") as daemon:
        with connect(daemon.admin_listen) as connection:
            connection.sendall(PREFACE + SETTINGS + call + frame(DATA, 1, 1, bytes(5)))
            said = b""
            while b"grpc-status\x010" not in said:
                said += (more := connection.recv(4096))
                assert more, said
        assert daemon.stop() == 0
    assert strange_lines(daemon.log) == []


def test_a_stream_ends_when_its_partition_is_removed(tmp_path: Path) -> None:
    async def run() -> None:
        async with daemon.replicas() as replicas, daemon.admin() as admin:
            await admin.create_partitions([0])
            await replicas.open(0, 7, partitions=PARTITIONS)
            stream = replicas.append(0, 7)
            await stream.send(runs(0, 1), -1)
            assert await stream.receive() == 0
            assert await admin.remove_partitions([0]) == {0: None}
            async with asyncio.timeout(SECONDS):
                with pytest.raises(NoSuchPartition, match="was taken off"):
                    await stream.receive()

    with Daemon(tmp_path / "storage") as daemon:
        loop.run(run())
