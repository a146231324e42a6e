"""Callers that no daemon should have, and what a daemon must be like when they have gone.

Three ways to be one: messages (of any call: nonsense, or in the right form with hostile values), connections (no HTTP/2, or
almost, or very slow), and many of both at once. What they aim at is given by whoever uses this; one partition is spared
what its rightful owner could do to it, because the good caller works there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz.mutate import INTEGERS, SEED, count, filled, mutated, told
from tests.process.daemon import OWNER_KEY
from waltzd.protocol.peers import secret_of
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.listener import IDLE_SECONDS

SECONDS = 60.0
"""After so long a call that was not answered is a failure; nothing here measures how long something took."""
MIB = 1 << 20
GROWTH_BYTES_MAX = 64 * MIB
SPARED, PLAYED = 0, 1
"""The partition of the good caller, and the one that hostile callers get into: it is kept so that they get far."""
PARTITIONS = 4
"""Of the clusters under siege."""
AT_ONCE = 6
FLOOD_CONNECTIONS, SLOW_CONNECTIONS = 300, 40
NEVER = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
"""A servicer that raised something that nobody declared; a call that was never answered."""
WRONG_SESSIONS = [-(1 << 63), -1, 0, 1, 2]
WRONG_GENERATIONS = [-(1 << 31), -1, 0, (1 << 31) - 1]

# -- messages ----------------------------------------------------------------------------------------------------------


def methods(*services: str) -> dict[str, type[Message]]:
    """The path of each call of these services, and what it takes."""
    return {
        f"/waltz.v1.{name}/{method.name}": GetMessageClass(method.input_type)
        for name in services
        for method in wire.DESCRIPTOR.services_by_name[name].methods
    }


STREAMING = {
    f"/{service.full_name}/{method.name}"
    for service in wire.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.client_streaming
}


def aim(chance: random.Random, message: Any, key: UUID) -> None:
    """Make it so right that it gets further: mostly the right cluster, mostly a partition that is there."""
    for name in ("target", "mount"):
        if name in message.DESCRIPTOR.fields_by_name and message.HasField(name):
            aim(chance, getattr(message, name), key)
    if "cluster_key" in message.DESCRIPTOR.fields_by_name and (chance.random() < 0.8 or message.cluster_key == key.bytes):
        message.cluster_key = key.bytes
        _spare(chance, message)
    if isinstance(message, wire.OpenRequest) and chance.random() < 0.7:
        message.partitions = PARTITIONS


def _spare(chance: random.Random, message: Any) -> None:
    names = message.DESCRIPTOR.fields_by_name
    if isinstance(message, wire.FenceRequest):
        message.partition = chance.choice([2, 3])  # with the right key it is an operator's order
    elif "partition" in names:
        strange = chance.choice([2, 3, *(one for one in INTEGERS if -(1 << 31) <= one < 1 << 31)])
        message.partition = chance.choice([PLAYED, PLAYED, PLAYED, SPARED, strange])
        if message.partition == SPARED:
            if "session" in names and message.HasField("session"):
                message.session = chance.choice(WRONG_SESSIONS)
            if "generation" in names:
                message.generation = chance.choice(WRONG_GENERATIONS)
        elif message.partition == PLAYED and "session" in names and message.HasField("session"):
            message.session = chance.choice([1, 1, 1, *(one for one in INTEGERS if one <= 1)])
            if "secret" in names:
                message.secret = secret_of(OWNER_KEY, PLAYED, 1)
    if isinstance(message, wire.PartitionsRequest | wire.RemoveRequest | wire.AvailabilityRequest):
        kept = [number for number in message.partitions if number not in (SPARED, PLAYED)]
        del message.partitions[:]
        message.partitions.extend([*kept[: chance.choice([1, 1, 4, 400])], *chance.choices([2, 3], k=chance.randrange(3))])
    if isinstance(message, wire.DrainRequest):
        message.cluster_key = bytes(16)  # with the right key it would be an operator's order


def letters(chance: random.Random, kind: type[Message], key: UUID) -> list[bytes]:
    """What is sent in one call: mostly one message, of the right form or not."""
    found = []
    for _ in range(chance.choice([0, 1, 1, 1, 1, 1, 2, 3])):
        message = filled(chance, kind)
        aim(chance, message, key)
        found.append(message.SerializeToString())
    if found and chance.random() < 0.4:
        other = filled(chance, kind).SerializeToString()
        nonsense = chance.randbytes(chance.choice([1, 10, 200]))
        found[-1] = chance.choice([nonsense, spoiled(chance, found[-1], other, kind, key)])
    return found


def spoiled(chance: random.Random, raw: bytes, other: bytes, kind: type[Message], key: UUID) -> bytes:
    """Changed bytes. Where they are still a message it is aimed again: it must not become a rightful order by chance."""
    changed = mutated(chance, raw, other)
    try:
        message = kind.FromString(changed)
    except DecodeError:
        return changed
    aim(chance, message, key)
    return message.SerializeToString()


async def call(
    channel: grpc.aio.Channel, path: str, messages: Sequence[bytes], *, gives_up: bool = False
) -> grpc.StatusCode:
    """Any kind of call: as a stream in both directions it looks the same on the wire. Returns how it ended."""
    made: Any = channel.stream_stream(path)(timeout=SECONDS)
    try:
        for message in messages:
            await made.write(message)
        await made.done_writing()
        if gives_up:
            made.cancel()
            return cast(grpc.StatusCode, await made.code())
        while await made.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    except (grpc.aio.UsageError, asyncio.InvalidStateError):
        pass  # it was ended by the daemon before everything was sent
    code: grpc.StatusCode = await made.code()
    return code


REFUSED_WITHIN = (
    grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED, grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
)  # fmt: skip


class Siege:
    """Everything at once against one daemon. `codes` says how the calls ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.codes: Counter[grpc.StatusCode] = Counter()
        self.thrown = 0

    def check_depth(self) -> None:
        """Calls went through the door: some were carried out, and some were understood, and refused for what they want.
        Which of the reasons for that were met is chance."""
        understood = sum(self.codes[code] for code in REFUSED_WITHIN)
        assert self.codes[grpc.StatusCode.OK] > 0, self.codes
        assert understood > 0, self.codes

    async def calls(self, address: str, times: int, make: Callable[[random.Random], tuple[str, Sequence[bytes]]]) -> None:
        """So many calls, some at a time, each with randomness of its own."""
        numbers = iter(range(count(times)))
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            await asyncio.gather(*(self._caller(channel, numbers, make) for _ in range(AT_ONCE)))

    async def _caller(
        self,
        channel: grpc.aio.Channel,
        numbers: Iterator[int],
        make: Callable[[random.Random], tuple[str, Sequence[bytes]]],
    ) -> None:
        for number in numbers:
            chance = random.Random(f"{SEED} {self.name} {number}")
            path, messages = make(chance)
            with told(f"call {number} of {self.name!r}, {path} with {len(messages)} messages"):
                # gRPC does not answer a call that takes one message and was sent none or more; it goes with its caller.
                gives_up = chance.random() < 0.05 or (len(messages) != 1 and path not in STREAMING)
                code = await call(channel, path, messages, gives_up=gives_up)
                assert code not in NEVER, code
            self.codes[code] += 1

    async def streams(self, address: str, times: int, make: Callable[[random.Random], Sequence[bytes]]) -> None:
        """Connections of frames: whatever is sent, the other side ends them."""
        numbers = iter(range(count(times)))
        await asyncio.gather(*(self._streamer(address, numbers, make) for _ in range(AT_ONCE)))

    async def _streamer(
        self, address: str, numbers: Iterator[int], make: Callable[[random.Random], Sequence[bytes]]
    ) -> None:
        host, port = address.rsplit(":", 1)
        for number in numbers:
            chance = random.Random(f"{SEED} {self.name} stream {number}")
            with told(f"stream {number} of {self.name!r}"):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    with contextlib.suppress(ConnectionError):
                        for piece in make(chance):
                            writer.write(piece)
                            await writer.drain()
                        if chance.random() < 0.9:  # the others are found out when they give no sign of life
                            with contextlib.suppress(OSError):  # it may be closed already
                                writer.write_eof()
                        async with asyncio.timeout(SECONDS):
                            while await reader.read(1 << 16):
                                pass
                finally:
                    writer.close()
            self.thrown += 1

    async def throw(self, address: str, times: int) -> None:
        """Connections that are no conversation."""
        await asyncio.to_thread(self._throw, address, count(times))

    def _throw(self, address: str, times: int) -> None:
        for number in range(times):
            chance = random.Random(f"{SEED} {self.name} garbage {number}")
            with contextlib.suppress(ConnectionError, TimeoutError), connect(address) as connection:
                for piece in garbage(chance):
                    connection.sendall(piece)
                    self.thrown += 1
                    if chance.random() < 0.2:
                        connection.settimeout(0.05)
                        connection.recv(4096)
                if chance.random() < 0.5:  # a reset in place of a farewell
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def flood(self, address: str, times: int) -> None:
        """Hundreds of connections at once; they are all held before the first one goes."""
        for _ in range(times):
            await asyncio.to_thread(self._flood, address)

    def _flood(self, address: str) -> None:
        with contextlib.ExitStack() as held:
            for number in range(FLOOD_CONNECTIONS):
                with contextlib.suppress(ConnectionError, TimeoutError):
                    connection = held.enter_context(connect(address))
                    connection.sendall([b"", PREFACE[:10], PREFACE + SETTINGS][number % 3])
                    self.thrown += 1

    async def starve(self, address: str, is_over: asyncio.Event) -> None:
        """Slow callers: a byte at a time of what could become a call, until it is over."""
        with contextlib.ExitStack() as held:
            letter = PREFACE + SETTINGS + opening(1, "/waltz.v1.Log/Mount")
            waiting = [(held.enter_context(connect(address)), 1 + number) for number in range(SLOW_CONNECTIONS)]
            for connection, _ in waiting:
                connection.setblocking(False)
            sent = 0
            while not is_over.is_set() or sent < 20:
                for connection, start in waiting:
                    with contextlib.suppress(OSError):
                        at = (start + sent) % len(letter)
                        connection.send(letter[: start + 1] if sent == 0 else letter[at : at + 1])
                sent += 1
                await asyncio.sleep(0.02)
            self.thrown += len(waiting)


# -- connections -------------------------------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS_KIND, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", *, claims: int | None = None) -> bytes:
    """A frame of HTTP/2; `claims` is a length that is not true."""
    size = len(payload) if claims is None else claims
    return size.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


SETTINGS = frame(SETTINGS_KIND, 0, 0)


def opening(stream: int, path: str, *more: tuple[bytes, bytes]) -> bytes:
    """The headers of a call, spelled out."""
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x"),
              (b"te", b"trailers"), (b"content-type", b"application/grpc"), *more]  # fmt: skip
    block = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields)
    return frame(HEADERS, 0x4, stream, block)


def garbage(chance: random.Random) -> list[bytes]:
    """What one connection sends: nothing that HTTP/2 allows, or only just."""
    path = chance.choice(["/waltz.v1.Log/Mount", "/waltz.v1.Replica/Append", "/waltz.v1.Log/Locate", "/", "x" * 100])
    start = PREFACE + SETTINGS
    message = b"\0" + chance.choice([0, 5, 5, 0x7FFFFFFF, 0xFFFFFFFF]).to_bytes(4, "big") + b"12345"
    good = [
        start,
        opening(1, path),
        frame(DATA, 1, 1, message),
        frame(PING, 0, 0, bytes(8)),
        frame(WINDOW_UPDATE, 0, 0, b"\0\0\1\0"),
    ]
    match chance.randrange(10):
        case 0:
            return [chance.randbytes(chance.choice([0, 1, 9, 300, 20_000]))]
        case 1:
            return [
                chance.choice([b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", PREFACE[:-3]]),
                chance.randbytes(300),
            ]
        case 2:
            return [start, chance.randbytes(chance.choice([9, 300, 20_000]))]
        case 3:  # cut in the middle of anything
            whole = b"".join(good)
            return [whole[: chance.randrange(len(whole))]]
        case 4:  # changed bytes; of a call only those that keep its path a text, for which there is a test of its own
            return [
                start,
                bytes(byte & 0x7F for byte in mutated(chance, good[1])),
                *(mutated(chance, one) for one in good[2:]),
            ]
        case 5:  # frames of any kind with any flags, in any order
            return [start, *(frame(chance.randrange(12), chance.randrange(256), chance.choice([0, 1, 2, 3, 1 << 30]),
                                   chance.randbytes(chance.choice([0, 4, 8, 100]))) for _ in range(20))]  # fmt: skip
        case 6:  # lengths that are not true
            return [start, frame(chance.randrange(10), 0, 1, b"x" * 50, claims=chance.choice([0, 49, 16_385, 0xFFFFFF]))]
        case 7:  # calls that are taken back at once, and again and again
            return [
                start,
                *(opening(2 * number + 1, path) + frame(RST_STREAM, 0, 2 * number + 1, bytes(4)) for number in range(200)),
            ]
        case 8:  # headers without an end
            return [
                start,
                frame(HEADERS, 0, 1, opening(1, path)[9:]),
                *(frame(CONTINUATION, 0, 1, b"\0\1a\1b" * 100) for _ in range(60)),
            ]
        case _:
            pings = [
                frame(PING, 0, 0, chance.randbytes(8)) + frame(SETTINGS_KIND, 0, 0, b"\0\4\x7f\xff\xff\xff")
                for _ in range(100)
            ]
            return [*good, *pings]


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


# -- what a daemon is like ---------------------------------------------------------------------------------------------

_LINE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\.[0-9]{3}Z (INFO|WARNING) +\S.*|waltzd (server|storage) is ready: .*"
)
UNEXPECTED = ("Traceback", "Unexpected [", "AssertionError", "Task exception was never retrieved", "Exception ")


class Health:
    """Memory and open files of a process, now and afterwards."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._bytes = self._resident_bytes()
        self._open, self._ours = open_kinds(pid), open_kinds(os.getpid())
        self._sockets = sockets_of(pid)

    def _resident_bytes(self) -> int:
        pages = Path(f"/proc/{self._pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _still_open(self) -> Counter[str]:
        """More than before, apart from connections that gRPC keeps open on our side until their deadline."""
        kept = (open_kinds(os.getpid()) - self._ours)["socket"]
        return open_kinds(self._pid) - self._open - Counter(socket=kept)

    async def recovered(self) -> None:
        """What the callers had open is closed, and what they made it remember is little. A server is a client of its own
        group log: when a call to itself fails under load, it connects anew, and a mount keeps the connection before, which
        is closed as idle."""
        try:
            async with asyncio.timeout(SECONDS + IDLE_SECONDS):
                while more := self._still_open():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            new = [which for inode, which in sockets_of(self._pid).items() if inode not in self._sockets]
            gone = [which for inode, which in self._sockets.items() if inode not in sockets_of(self._pid)]
            raise AssertionError(f"still open, more than before: {dict(more)}; new {new}, gone {gone}") from None
        grown = self._resident_bytes() - self._bytes
        print(f"grew by {grown / MIB:.1f} MiB over {self._bytes / MIB:.1f}")
        assert grown <= GROWTH_BYTES_MAX


def open_kinds(pid: int) -> Counter[str]:
    """Sockets, pipes and the like; and files that have no name any more, of which none may stay open. Files with a name
    come and go with the partitions that are made and removed."""
    found: Counter[str] = Counter()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
            if target.endswith(" (deleted)"):
                found["deleted"] += 1
            elif not target.startswith("/"):
                found[target.partition(":")[0]] += 1
    return found


def sockets_of(pid: int) -> dict[str, str]:
    """Return the sockets of a process by inode: both addresses and the state, as the kernel writes them."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    tcp = {row[9]: f"{row[1]} {row[2]} {row[3]}" for row in rows}
    unix = [row.split() for row in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    tcp |= {row[6]: f"unix {row[3:6]}" for row in unix}
    found: dict[str, str] = {}
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            kind, _, inode = os.readlink(f"/proc/{pid}/fd/{entry}").partition(":")
            if kind == "socket":
                found[inode.strip("[]")] = tcp.get(inode.strip("[]"), "without an address")
    return found


def strange_lines(log: str) -> list[str]:
    """Lines that no sentence of ours looks like, or that speak of a mistake."""
    lines = [line for line in log.splitlines() if line.strip()]
    return [line for line in lines if not _LINE.fullmatch(line) or any(word in line for word in UNEXPECTED)]
