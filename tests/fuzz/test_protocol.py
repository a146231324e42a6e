"""Hostile callers by the thousand against a real daemon, while a good one appends and must not notice.

Random bytes as messages, well-formed messages with impossible contents, raw garbage on the port. Every answer is one of
our errors or a plain refusal of gRPC; the daemon stays up, its memory stays bounded, and the good caller's records are
all there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.process.daemon import KEY, PARTITIONS, Daemon
from waltzd import storages
from waltzd import wire_pb2 as wire
from waltzd.errors import NoSuchPartition
from waltzd.record import Run, encode_payloads
from waltzd.storages import ReplicaClient

CALLS = 20_000 if os.environ.get("WALTZ_LONG") else 1500
MEMORY_KIB_MAX = 400 << 10
SECONDS = 60
IDS = [-(1 << 63), -(1 << 31), -2, -1, 0, 1, 5, 1 << 31, (1 << 62) + 7, (1 << 63) - 65, (1 << 63) - 1]
UNEXPECTED = ("Traceback", "Unexpected [", "AssertionError", "Task exception was never retrieved")


def runs(first_id: int, count: int) -> Run:
    return encode_payloads(first_id, [b"good %d" % id_ for id_ in range(first_id, first_id + count)])


class Hostile:
    """Messages that a storage should never get."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def target(self) -> wire.Target:
        pick = self.chance
        target = wire.Target(
            cluster_key=pick.choice([KEY.bytes, KEY.bytes, KEY.bytes, b"", pick.randbytes(16), pick.randbytes(400)]),
            partition=pick.choice([0, 1, 1, 1, 2, 3, 4, -1, -(1 << 31), (1 << 31) - 1]),
        )
        if pick.random() < 0.9:
            # Never a session that could rightly take the good caller's partition away.
            target.session = (
                pick.choice([1, 2, -1, -(1 << 63), 0]) if target.partition == 0 else pick.choice([1, 1, 1, *IDS])
            )
        return target

    def frame(self, *, first: bool) -> wire.AppendFrame:
        pick = self.chance
        run = runs(pick.randrange(3), pick.choice([1, 2, 70]))
        lengths, records = bytearray(lengths_of(run)), bytearray(run.data)
        for _ in range(pick.randrange(3)):
            match pick.randrange(6):
                case 0:
                    lengths = bytearray(pick.randbytes(pick.choice([0, 1, 3, 4, 400])))
                case 1:
                    lengths[:4] = pick.choice([0, 0x7FFFFFFF, 0xFFFFFFFF]).to_bytes(4, "big")
                case 2:
                    records = bytearray(pick.randbytes(pick.choice([0, 1, 39, 40, 5000])))
                case 3 if records:
                    records[pick.randrange(len(records))] ^= 1 << pick.randrange(8)
                case 4:
                    lengths = bytearray(4 * pick.choice([1, 1000, 100_000]))
                case _:
                    pass
        return wire.AppendFrame(
            target=self.target() if first and pick.random() < 0.95 else None,
            first_id=pick.choice([run.first_id, run.first_id, *IDS]),
            lengths=bytes(lengths),
            records=bytes(records),
            committed=pick.choice(IDS),
        )

    def single(self) -> tuple[str, bytes]:
        pick = self.chance
        target, id_ = self.target(), pick.choice(IDS)
        messages: dict[str, Any] = {
            "Open": wire.OpenRequest(target=target, partitions=pick.choice([PARTITIONS, 0, -1])),
            "SetLowMark": wire.MarkRequest(target=target, mark=id_),
            "Truncate": wire.MarkRequest(target=target, mark=id_),
            "ListSegments": wire.SegmentsRequest(target=target),
            "Read": wire.ReadRequest(target=target, first_id=id_, last_id=pick.choice(IDS), frame_bytes=pick.choice(IDS)),
            "FetchSegment": wire.FetchRequest(target=target, first_id=id_, offset=pick.choice(IDS)),
        }
        method = pick.choice(sorted(messages))
        return f"Replica/{method}", messages[method].SerializeToString()

    def raw(self) -> tuple[str, bytes]:
        """A method and bytes: nonsense, or a good message with some bytes changed."""
        pick = self.chance
        method, message = self.single()
        if pick.random() < 0.4:
            return method, pick.randbytes(pick.choice([0, 1, 10, 200]))
        changed = bytearray(message)
        for _ in range(pick.randrange(3)):
            if changed:
                changed[pick.randrange(len(changed))] = pick.randrange(256)
        return method, bytes(changed)


def lengths_of(run: Run) -> bytes:
    return b"".join(int(b - a - 40).to_bytes(4, "big") for a, b in zip(run.bounds[:-1], run.bounds[1:], strict=True))


async def call_badly(channel: grpc.aio.Channel, hostile: Hostile, calls: int) -> set[grpc.StatusCode]:
    codes: set[grpc.StatusCode] = set()
    for _ in range(calls):
        method, message = hostile.raw()
        path = f"/waltz.v1.{method}"
        one: Any = channel.unary_unary(path)
        many: Any = channel.unary_stream(path)
        try:
            if method.endswith(("Read", "FetchSegment")):
                async for _ in many(message, timeout=SECONDS):
                    pass
            else:
                await one(message, timeout=SECONDS)
            codes.add(grpc.StatusCode.OK)
        except grpc.aio.AioRpcError as error:
            codes.add(error.code())
    return codes


async def append_badly(channel: grpc.aio.Channel, hostile: Hostile, streams: int) -> set[grpc.StatusCode]:
    codes: set[grpc.StatusCode] = set()
    for _ in range(streams):
        call: Any = channel.stream_stream("/waltz.v1.Replica/Append")(timeout=SECONDS)
        try:
            for number in range(hostile.chance.randrange(1, 4)):
                frame = hostile.frame(first=number == 0).SerializeToString()
                await call.write(frame if hostile.chance.random() < 0.9 else hostile.chance.randbytes(50))
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            codes.add(error.code())
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # the storage had ended the stream already
    return codes


async def send_too_much(channel: grpc.aio.Channel) -> None:
    call: Any = channel.unary_unary("/waltz.v1.Replica/Open")
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(bytes(70 << 20), timeout=SECONDS)
        assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


def throw_garbage(address: str, seed: int, times: int) -> None:
    """Not even HTTP/2, or almost."""
    chance = random.Random(seed)
    host, _, port = address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
    for _ in range(times):
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            start = chance.choice([b"", preface, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"])
            with contextlib.suppress(OSError):
                connection.sendall(start + chance.randbytes(chance.choice([0, 9, 300, 20_000])))


async def append_well(replicas: ReplicaClient, finished: asyncio.Event) -> int:
    """One stream that must never be ended by anybody else."""
    stream = replicas.append(0, 7)
    last_id = -1
    while not finished.is_set() or last_id < 100:
        run = runs(last_id + 1, 10)
        await stream.send(run, last_id)
        while last_id < run.last_id:
            mark = await stream.receive()
            assert mark is not None
            last_id = mark
    await stream.finish()
    assert await stream.receive() is None
    return last_id


def memory_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def test_hostile_callers_disturb_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        async with daemon.replicas() as replicas, daemon.admin() as admin:
            assert set((await admin.create_partitions([0, 1])).values()) == {None}
            for number, session in ((0, 7), (1, 1)):
                await replicas.open(number, session, partitions=PARTITIONS)
                await replicas.set_low_mark(number, session, -1)
            finished = asyncio.Event()
            good = asyncio.create_task(append_well(replicas, finished))
            async with grpc.aio.insecure_channel(daemon.listen) as channel:
                wide = [("grpc.max_send_message_length", -1)]
                async with grpc.aio.insecure_channel(daemon.listen, options=wide) as wide_channel:
                    codes, appending, other, *_ = await asyncio.gather(
                        call_badly(channel, Hostile(1), CALLS),
                        append_badly(channel, Hostile(2), CALLS // 3),
                        append_badly(channel, Hostile(3), CALLS // 3),
                        send_too_much(wide_channel),
                        asyncio.to_thread(throw_garbage, daemon.listen, 4, 60),
                        asyncio.to_thread(throw_garbage, daemon.admin_listen, 5, 20),
                    )
            assert {grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION} <= codes
            never = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
            assert not (codes | appending | other) & never, daemon.log[-6000:]
            finished.set()
            async with asyncio.timeout(SECONDS):
                last_id = await good
            await check(replicas, last_id)
            assert daemon.process is not None
            assert memory_kib(daemon.process.pid) < MEMORY_KIB_MAX
            marks.append(last_id)

    async def check(replicas: ReplicaClient, last_id: int) -> None:
        at = 0
        async for found in replicas.read(0, 0, session=7):
            assert found.data == runs(found.first_id, len(found)).data
            assert found.first_id == at
            at = found.last_id + 1
        assert at == last_id + 1

    async def again() -> None:
        async with daemon.replicas() as replicas:
            assert (await replicas.open(0, 7, partitions=PARTITIONS)).is_sound
            await check(replicas, marks[0])

    marks: list[int] = []
    with Daemon(tmp_path / "storage") as daemon:
        storages.run(run())
        assert daemon.kill() != 0
        daemon.start()
        storages.run(again())
        assert daemon.stop() == 0
    assert [word for word in UNEXPECTED if word in daemon.log] == [], daemon.log[-3000:]


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
        storages.run(run())
