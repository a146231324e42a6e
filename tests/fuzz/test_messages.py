"""Messages of all four services, as bytes from anybody: a value that survives another trip, or a refusal.

Both sides are fuzzed: what a daemon reads from its callers, and what callers and tools read from a daemon.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import grpc.aio
import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message

from tests.fuzz.mutate import each, filled, little_memory, mutated, parsed, plain
from tests.unit.mounting import batch_of
from waltzd.errors import CannotConnect, TooLarge, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.finding import Finding
from waltzd.format.layout import ID_MAX
from waltzd.format.record import Run, encode_payloads, first_bad, first_bad_one_by_one, heads
from waltzd.protocol.batches import AppendBatch, ClientFrame, Limits, Topology
from waltzd.protocol.descriptions import Events, ReplicaStatus, ServerDescription, StorageDescription
from waltzd.protocol.locks import Mode
from waltzd.protocol.peers import run_of
from waltzd.server.core.step import check_payloads
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import (
    bytes_of,
    client_frames,
    client_message,
    detail_of,
    error_of_detail,
    heads_of,
    key_of,
    run_message,
    server_frames,
    server_message,
    to_message,
    to_value,
)
from waltzd.wire.grpc import ERROR_KEY, error_of

TRIES = 100
LIMITS = Limits(payload_bytes_max=1 << 16, locks_max=10, frame_bytes_max=1 << 18)
RUN = encode_payloads(7, [b"a", b"", b"ccc" * 30])
BATCH = client_message([batch_of(b"ab", b"c", locks=[[(1, Mode.READ)], [(2, Mode.WRITE), (3, Mode.APPEND)]])])


def frames_checked(message: wire.ClientFrame) -> list[ClientFrame]:
    """What the server does before it believes a frame of a client."""
    frames = client_frames(message)
    for frame in frames:
        if isinstance(frame, AppendBatch):
            frame.check(LIMITS)
            check_payloads(frame)
    return frames


def run_checked(message: wire.RunFrame) -> Run:
    """What a reader does; whoever walks the records one by one must come to the same end."""
    run = run_of(message.first_id, message.lengths, message.records)
    bad = first_bad(run)
    assert bad == first_bad_one_by_one(run, 0, len(run))
    if bad is not None:
        raise BadFrame(f"record {bad}")
    assert run.last_id <= ID_MAX
    assert len(heads(run)) == len(run)
    return run


Kind: TypeAlias = tuple[type[Message], Callable[[Any], object], Callable[[Any], Message]]


def plain_value(message: type[Message], kind: type[Any]) -> Kind:
    return message, partial(to_value, kind), partial(to_message, message)


KINDS: dict[str, Kind] = {
    "client frame": (wire.ClientFrame, frames_checked, client_message),
    "server frame": (wire.ServerFrame, server_frames, server_message),
    "topology": plain_value(wire.Topology, Topology),
    "run": (wire.RunFrame, run_checked, run_message),
    "replica status": plain_value(wire.ReplicaStatus, ReplicaStatus),
    "finding": plain_value(wire.Finding, Finding),
    "error": (wire.ErrorDetail, error_of_detail, detail_of),
    "storage": plain_value(wire.StorageDescription, StorageDescription),
    "server": plain_value(wire.ServerDescription, ServerDescription),
    "events": plain_value(wire.EventsReply, Events),
}
SAMPLES: dict[str, list[Message]] = {
    "client frame": [BATCH],
    "server frame": [wire.ServerFrame(feed=run_message(RUN), heads=heads(RUN).tobytes())],
    "run": [run_message(RUN), run_message(encode_payloads(0, [b"x"] * 100))],
}


def samples(chance: random.Random, name: str) -> list[bytes]:
    """Right in form, some of them also in what they say."""
    messages = [*SAMPLES.get(name, []), filled(chance, KINDS[name][0]), filled(chance, KINDS[name][0])]
    return [message.SerializeToString() for message in messages]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("is_changed", [False, True], ids=["filled", "changed"])
def test_a_message_is_a_value_or_refused(name: str, is_changed: bool) -> None:
    kind, decode, encode = KINDS[name]

    def check(chance: random.Random) -> None:
        found = samples(chance, name)
        chance.shuffle(found)
        raw = mutated(chance, *found) if is_changed else found[0]
        message = parsed(DecodeError, kind.FromString, raw)
        value = None if message is None else parsed((BadFrame, TooLarge), decode, message)
        if value is not None:
            back = decode(kind.FromString(encode(value).SerializeToString()))
            assert plain(back) == plain(value)

    each(f"{name} {is_changed}", TRIES, check)


def test_what_is_right_is_taken() -> None:
    """The samples above are no nonsense: otherwise the tests above would only see refusals."""
    assert frames_checked(BATCH)
    for message in SAMPLES["run"]:
        assert isinstance(message, wire.RunFrame)
        assert len(run_checked(message))


def test_frames_of_records() -> None:
    """As `lengths` and `records` are columns, most changes of a whole message hit them; here they are changed alone."""

    def check(chance: random.Random) -> None:
        message = run_message(RUN)
        other = run_message(encode_payloads(RUN.first_id, [b"x" * size for size in (0, 1, 90)]))
        for name in chance.sample(["lengths", "records", "first_id"], chance.randrange(1, 4)):
            if name == "first_id":
                message.first_id = chance.choice([-(1 << 63), -1, 0, 8, ID_MAX - 2, ID_MAX - 1, ID_MAX])
            else:
                setattr(message, name, mutated(chance, getattr(message, name), getattr(other, name)))
        run = parsed(BadFrame, run_checked, message)
        if run is not None:
            assert bytes_of(run) == message.records
            assert run.first_id in (7, 8) or not len(run), "only a run without records may begin anywhere"

    each("columns of a run", 4 * TRIES, check)


def test_columns_of_a_batch() -> None:
    def check(chance: random.Random) -> None:
        message = wire.ClientFrame.FromString(BATCH.SerializeToString())
        (batch,) = message.append
        fields = [field.name for field in batch.DESCRIPTOR.fields if isinstance(getattr(batch, field.name), bytes)]
        for name in chance.sample(fields, chance.randrange(1, 4)):
            setattr(batch, name, mutated(chance, getattr(batch, name), bytes(batch.payloads)))
        frames = parsed((BadFrame, TooLarge), frames_checked, message)
        for found in frames or ():
            assert isinstance(found, AppendBatch)
            assert int(found.lengths.sum()) == len(found.payloads)
            assert int(found.lock_counts.sum()) == len(found.lock_ids) == len(found.lock_modes)
            if found.follows is not None and not found.follows.any():
                found = replace(found, follows=None)  # as it is sent
            assert plain(frames_checked(client_message([found]))) == plain([found])

    each("columns of a batch", 4 * TRIES, check)


@pytest.mark.parametrize("count", [2, 63, 64, 5000])
def test_ids_do_not_go_beyond_the_highest(count: int) -> None:
    message = run_message(encode_payloads(0, [b""] * count))
    with pytest.raises(BadFrame, match="highest id"):
        run_of(ID_MAX - count + 2, message.lengths, message.records)
    assert run_of(ID_MAX - count + 1, message.lengths, message.records).last_id == ID_MAX


@pytest.mark.parametrize("claim", [0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_a_length_that_is_only_claimed_is_not_allocated(claim: int) -> None:
    lengths = claim.to_bytes(4, "big") * 100
    with little_memory(1 << 20):
        with pytest.raises(BadFrame):
            run_of(0, lengths, b"")
        for name in ("lengths", "lock_counts"):
            batch = wire.AppendBatch(marks=bytes(800), headers=bytes(400), data_crcs=bytes(400), lengths=bytes(400))
            setattr(batch, name, lengths)
            with pytest.raises(BadFrame):
                frames_checked(wire.ClientFrame(append=[batch]))


def test_heads_and_keys() -> None:
    def check(chance: random.Random) -> None:
        raw = mutated(chance, heads(RUN).tobytes())
        found = parsed(BadFrame, heads_of, raw)
        assert found is None or found.tobytes() == raw
        key = parsed(BadFrame, key_of, mutated(chance, bytes(16)))
        assert key is None or len(key.bytes) == 16

    each("heads and keys", TRIES, check)


def test_errors_that_come_with_a_status() -> None:
    """They are in binary metadata, which gRPC does not look into."""

    def check(chance: random.Random) -> None:
        detail = filled(chance, wire.ErrorDetail).SerializeToString()
        raw = chance.choice([detail, mutated(chance, detail)])
        trailing = grpc.aio.Metadata((ERROR_KEY, raw))
        code = chance.choice(list(grpc.StatusCode))
        error = error_of(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, chance.choice([None, "", "é" * 50])))
        assert isinstance(error, WaltzError)
        if parsed(DecodeError, wire.ErrorDetail.FromString, raw) is None:
            assert isinstance(error, CannotConnect)

    each("errors", TRIES, check)


def test_a_batch_with_very_many_locks() -> None:
    """As many as fit into a frame; for one transaction, for each of many, and out of bounds."""

    def check(chance: random.Random) -> None:
        rows = chance.choice([1, 100, 10_000])
        locks = 100_000
        message = wire.ClientFrame()
        batch = message.append.add()
        batch.marks = bytes(8 * rows)
        batch.headers = batch.lengths = batch.data_crcs = bytes(4 * rows)
        batch.lock_counts = np.full(rows, locks // rows, ">u4").tobytes()
        batch.lock_ids = chance.randbytes(8 * locks)
        batch.lock_modes = bytes([chance.choice([0, 1, 2, 3, 4])]) * locks
        frames = parsed((BadFrame, TooLarge), frames_checked, message)
        assert frames is None, "10 locks at most, and not so many bytes in one batch"

    each("many locks", 20, check)
