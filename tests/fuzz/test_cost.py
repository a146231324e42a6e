"""What a request costs a server, for each of its bytes: every call of applications, with and without grants.

A cluster runs in this process. A request is given to the service as bytes, as gRPC would, and what Python does until the
answer is counted: calls of functions, of C functions too, and steps of generators; and the bytes that were allocated at the
most. Neither depends on a clock or on other load, so the bounds can be close. What a single C call does is not counted;
such calls are few, and the time of the processor has a bound that is wide.

Each field that may be repeated, or whose text stands for more than itself, has a request here that is full of it.
"""

from __future__ import annotations

import random
import struct
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf.message import Message

from tests.fuzz.hostile import methods
from tests.fuzz.mutate import SEED, count, filled
from tests.unit.waltzd.server.subscriptions.room import Room
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.protocol.groups import AckKind
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.calls import ServerCalls
from waltzd.server.clients.service import LogService
from waltzd.server.subscriptions.consumer_stream import check_ack
from waltzd.wire import calls as declared
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import (
    CLIENT_FIELDS_MAX,
    MEMBER_BYTES_MAX,
    REQUEST_BYTES_MAX,
    bounded,
    client_frames,
    member_frames,
    packed_error,
    server_frames,
)
from waltzd.wire.servicer import Origin, answered

CALLS, CALLS_PER_BYTE = 20_000, 12
"""Calls of functions that a request may take, and more for each byte. A cluster of a few partitions does some thousand
in the background while one is answered."""
MEMORY, MEMORY_PER_BYTE = 4 << 20, 200
"""Bytes."""
SECONDS, SECONDS_PER_BYTE = 1.0, 20e-6
"""Of the processor, with all that is counted: wide, and only for what one C call does."""
IDENTITIES = ("nobody", "reader", "member", "operator")
LOG = {path.rpartition("/")[2]: kind for path, kind in methods("Log").items()}
UNARY = [name for name in sorted(LOG) if name not in ("Mount", "Attend")]


@dataclass
class Cost:
    calls: int = 0
    memory: int = 0
    seconds: float = 0.0

    def check(self, what: str, size: int) -> None:
        for name, found, most in (
            ("calls", self.calls, CALLS + CALLS_PER_BYTE * size),
            ("bytes of memory", self.memory, MEMORY + MEMORY_PER_BYTE * size),
            ("seconds", self.seconds, SECONDS + SECONDS_PER_BYTE * size),
        ):
            assert found <= most, f"{what}, {size} bytes: {found:,} {name}; {most:,} are allowed"


@contextmanager
def measured() -> Iterator[Cost]:
    """Of this thread."""
    cost = Cost()

    def note(frame: object, event: str, about: object) -> None:
        cost.calls += event in ("call", "c_call")

    tracemalloc.start()
    before = time.thread_time()
    sys.setprofile(note)
    try:
        yield cost
    finally:
        sys.setprofile(None)
        cost.seconds = time.thread_time() - before
        cost.memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def full(name: str, key: bytes, size: int) -> Iterator[tuple[str, bytes]]:
    """Requests that are full of one thing, as long as they may be or as is asked for."""
    many = range(size // 8)
    if name == "MakeGroup":
        usual: dict[str, Any] = {
            "name": "mailer",
            "mode": "queue",
            "ack_wait_ms": 1000,
            "max_in_flight": 1,
            "deliver_max": 1,
        }
        metas = {
            "ranges": wire.GroupMeta(**usual, partitions=",".join(["0-65535"] * (size // 8))),
            "a staircase": wire.GroupMeta(**usual, partitions=",".join(f"0-{65535 - at}" for at in range(500))),
            "ones": wire.GroupMeta(**usual, partitions=",".join("1" for _ in many)),
            "starts": wire.GroupMeta(**usual, starts=[wire.GroupStart() for _ in many]),
            "other starts": wire.GroupMeta(
                **usual, starts=[wire.GroupStart(partition=at, after=-1) for at in range(size // 16)]
            ),
            "kinds": wire.GroupMeta(**usual, kinds=[0 for _ in many]),
            "pauses": wire.GroupMeta(**usual, back_off_ms=[1 for _ in many]),
            "a name": wire.GroupMeta(**{**usual, "name": "n" * size}),
            "modes": wire.GroupMeta(**{**usual, "mode": "m" * size}),
        }
        for what, meta in metas.items():
            yield what, wire.MakeGroupRequest(cluster_key=key, meta=meta).SerializeToString()
        yield "empty starts", wire.MakeGroupRequest(cluster_key=key).SerializeToString() + nested(size)
    elif name == "Register":
        said = wire.RegisterRequest(cluster_key=key, instance="i" * size, before=wire.Registration(token=bytes(size // 2)))
        yield "texts", said.SerializeToString()
    elif name == "GetGroup":
        yield "a name", wire.GetGroupRequest(cluster_key=key, name="*" * size).SerializeToString()
    else:
        kind = LOG[name]
        names = kind.DESCRIPTOR.fields_by_name
        yield "as it is", kind(**({"cluster_key": key} if "cluster_key" in names else {})).SerializeToString()


def nested(size: int) -> bytes:
    """A group whose starts have two bytes each."""
    meta = b"\x5a\x00" * (size // 2)
    length, raw = len(meta), b""
    while length >= 0x80:
        raw, length = raw + bytes([length & 0x7F | 0x80]), length >> 7
    return b"\x12" + raw + bytes([length]) + meta


async def ask(calls: ServerCalls, name: str, raw: bytes, identity: Identity) -> None:
    call = declared.CALLS[f"/waltz.v1.Log/{name}"]
    request = bounded(call.request, call.request.FromString)(raw)
    if isinstance(request, WaltzError):
        return
    try:
        found = answered(LogService(calls), call, request, Origin(identity))
        if not isinstance(found, AsyncGenerator):
            call.pack(await found)
            return
        async for value in found:
            call.pack(value)
    except WaltzError as error:
        packed_error(error)


POLICY: list[dict[str, Any]] = [
    {"names": ["reader"], "may": ["read"], "partitions": "0"},
    {"names": ["member"], "may": ["append", "subscribe"], "groups": ["mail*"]},
]


def test_a_message_costs_no_more_than_its_bytes() -> None:
    async def story(room: Room) -> None:
        room.cluster.set_policy(POLICY)
        calls, key = room.cluster._running(room.cluster.owner(0)).calls, room.cluster.meta.key
        identities = [Identity(key, Role.OPERATOR if who == "operator" else Role.CLIENT, who) for who in IDENTITIES]
        for name in UNARY:
            requests = [
                *full(name, key.bytes, 3000),
                *full(name, key.bytes, 24_000),
                *full(name, key.bytes, REQUEST_BYTES_MAX - 1000),
            ]
            for number in range(count(5)):
                message: Any = filled(random.Random(f"{SEED} cost {name} {number}"), LOG[name])
                if "cluster_key" in message.DESCRIPTOR.fields_by_name:
                    message.cluster_key = key.bytes
                requests.append((f"drawn {number}", message.SerializeToString()))
            too_large = [*full(name, key.bytes, 4 << 20)]  # refused before anybody asks whose they are
            for identity in identities:
                for what, raw in requests + too_large:
                    with measured() as cost:
                        await ask(calls, name, raw, identity)
                    cost.check(f"{name} of {identity.name} with {what}", len(raw))
                too_large = []

    Room.run(story, partitions=4)


GROUP = b"\xa3\x06\xa4\x06"
"""Begin and end of a group that no message declares; parsers pass over it."""


def mounts() -> Iterator[tuple[str, bytes]]:
    yield "empty batches", b"\x1a\x00" * (1 << 20)
    yield "empty batches behind a group", GROUP + b"\x1a\x00" * (1 << 20)
    yield "empty batches, few", b"\x1a\x00" * (CLIENT_FIELDS_MAX - 1)
    yield "credits", b"\x10\x01" * (1 << 20)
    small = wire.ClientFrame(
        append=[wire.AppendBatch(marks=bytes(8), headers=bytes(4), lengths=bytes(4), data_crcs=bytes(4))]
    )
    yield "small batches", small.SerializeToString() * (CLIENT_FIELDS_MAX - 1)
    rows = 50_000
    columns: dict[str, Any] = {
        "marks": bytes(8 * rows),
        "headers": bytes(4 * rows),
        "lengths": bytes(4 * rows),
        "data_crcs": bytes(4 * rows),
    }
    locks: dict[str, Any] = {"lock_counts": b"\xff" * 4 * rows, "lock_ids": bytes(8), "lock_modes": bytes(1)}
    yield "locks that are none", wire.ClientFrame(append=[wire.AppendBatch(**columns, **locks)]).SerializeToString()


def members() -> Iterator[tuple[str, bytes]]:
    yield "empty words", b"\x12\x00" * (1 << 20)
    yield "empty words behind a group", GROUP + b"\x12\x00" * (1 << 20)
    stretch: dict[str, Any] = {"firsts": struct.pack(">q", 0), "lasts": struct.pack(">q", 1 << 60)}
    extends = [wire.Said(number=at + 1, verb=AckKind.EXTEND, epoch=1, tag=1, **stretch) for at in range(250)]
    yield "extends", wire.MemberFrame(said=extends).SerializeToString()
    many = struct.pack(">100000q", *range(0, 200_000, 2))
    yield "stretches", wire.MemberFrame(said=[wire.Said(number=1, verb=1, firsts=many, lasts=many)]).SerializeToString()
    yield (
        "a reason",
        wire.MemberFrame(said=[wire.Said(number=1, verb=2, reason="r" * MEMBER_BYTES_MAX)]).SerializeToString(),
    )


@pytest.mark.parametrize(
    ("kind", "read", "messages"),
    [(wire.ClientFrame, client_frames, mounts), (wire.MemberFrame, member_frames, members)],
    ids=["mount", "member"],
)
def test_a_frame_costs_no_more_than_its_bytes(
    kind: type[Message], read: Callable[[Any], Any], messages: Callable[[], Iterator[tuple[str, bytes]]]
) -> None:
    for what, raw in messages():
        with measured() as cost:
            found = bounded(kind, kind.FromString)(raw)
            if not isinstance(found, WaltzError):
                try:
                    for number, frame in enumerate(read(found)):
                        if hasattr(frame, "firsts"):
                            check_ack(frame, number)
                except WaltzError:
                    pass
        cost.check(what, len(raw))


def test_times_that_are_said_to_be_many_are_not_made() -> None:
    """Twelve bytes of a storage, or of a server, that stand for four thousand million times."""
    run = wire.RunFrame(times=bytes(8), time_counts=b"\xff" * 4)
    message = wire.ServerFrame(feed=run)
    with measured() as cost, pytest.raises(BadFrame):
        server_frames(message)
    cost.check("times", message.ByteSize())


def test_the_measure_counts_what_is_done() -> None:
    with measured() as cost:
        made = [hex(number) for number in range(30_000)]
    assert cost.calls >= 30_000
    assert cost.memory > 30_000 * 40
    with pytest.raises(AssertionError, match="calls"):
        cost.check("numbers", len(made) // 100)
    assert threading.current_thread() is threading.main_thread(), "what other threads do is not counted"
