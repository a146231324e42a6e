"""Frames as messages and back: nothing is lost, and a message that does not hold together is refused as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import batches_of
from tests.unit.mounting import batch_of, mount_request
from waltzd.errors.operations import BadFrame, NotOwner
from waltzd.format.batch import Batch
from waltzd.format.record import Run, encode_payloads, first_bad, heads, join_locks, join_runs
from waltzd.protocol.batches import (
    AppendBatch,
    ClientFrame,
    Committals,
    Credit,
    Feed,
    FeedMode,
    HeadFeed,
    Limits,
    Mounted,
    MountRequest,
    PartitionLocation,
    Refusals,
    Refused,
    ServerAddress,
    ServerFrame,
    Topology,
)
from waltzd.protocol.locks import Mode, Reason
from waltzd.protocol.peers import LockHistory
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import (
    bytes_of,
    check_size,
    checked_pieces,
    checked_run,
    client_frames,
    client_message,
    lock_history_message,
    lock_history_of,
    pieces_message,
    run_message,
    server_frames,
    server_message,
    to_message,
    to_value,
)

I64 = st.integers(-(1 << 63), (1 << 63) - 1)


def over_the_wire(frames: list[ClientFrame]) -> list[ClientFrame]:
    return client_frames(wire.ClientFrame.FromString(client_message(frames).SerializeToString()))


def back_over_the_wire(frames: list[ServerFrame]) -> list[ServerFrame]:
    return server_frames(wire.ServerFrame.FromString(server_message(frames).SerializeToString()))


def columns(frame: object) -> dict[str, Any]:
    """A frame as plain values."""
    return {
        name: bytes(value) if isinstance(value, bytes | memoryview) else getattr(value, "tolist", lambda v=value: v)()
        for name, value in vars(frame).items()
    }


rows = st.lists(
    st.tuples(
        st.binary(max_size=20),
        I64,
        st.integers(-(1 << 31), (1 << 31) - 1),
        st.lists(st.tuples(st.integers(0, (1 << 64) - 1), st.sampled_from(Mode)), max_size=3),
    ),
    min_size=1,
    max_size=20,
)


@given(rows=rows, first=st.integers(0, 0x7FFFFFFF))
def test_a_batch_survives(rows: list[tuple[bytes, int, int, list[tuple[int, Mode]]]], first: int) -> None:
    batch = batch_of(*[row[0] for row in rows], first=first, marks=[row[1] for row in rows], locks=[row[3] for row in rows])
    batch = AppendBatch(**{**vars(batch), "headers": np.array([row[2] for row in rows], np.int32)})
    (back,) = over_the_wire([batch])
    assert isinstance(back, AppendBatch)
    assert columns(back) == columns(batch)
    for name, column in vars(batch).items():
        if isinstance(column, np.ndarray):
            assert getattr(back, name).dtype == column.dtype, name


def test_client_frames_survive_and_come_in_their_order() -> None:
    request = mount_request(2, number=1 << 40, mark=-1, feed=FeedMode.HEADS, credit=5)
    assert over_the_wire([request]) == [request]
    back = over_the_wire([batch_of(b"a"), Credit(1 << 50), request])
    assert [type(frame) for frame in back] == [MountRequest, Credit, AppendBatch]
    assert back[1] == Credit(1 << 50)


def test_server_frames_survive_and_come_in_their_order() -> None:
    run = encode_payloads(40, [b"a", b"", b"ccc"])
    error = NotOwner("another has it", owner="two", generation=6)
    sent: list[ServerFrame] = [
        Mounted(session=3, barrier=-1, limits=Limits(payload_bytes_max=1, locks_max=2, frame_bytes_max=3)),
        Committals(np.array([0, 0x7FFFFFFF]), np.array([5, (1 << 63) - 1]), time=1_800_000_000_000_000),
        Refusals(
            np.array([1, 2]),
            np.array([Reason.CONFLICT, Reason.NOT_IN_LOG], np.uint8),
            np.array([-1, 8]),
            np.array([0, (1 << 64) - 1], np.uint64),
        ),
        Feed(run),
        HeadFeed(heads(run)),
        Refused(error),
    ]
    back = back_over_the_wire(sent[::-1])
    assert [type(frame) for frame in back] == [type(frame) for frame in sent]
    assert back[0] == sent[0]
    assert columns(back[1]) == columns(sent[1])
    assert columns(back[2]) == columns(sent[2])
    feed, found, refused = back[3], back[4], back[5]
    assert isinstance(feed, Feed)
    assert (feed.run.first_id, bytes(feed.run.data), first_bad(feed.run)) == (40, bytes(run.data), None)
    assert isinstance(found, HeadFeed)
    assert found.heads.tobytes() == heads(run).tobytes()
    assert isinstance(refused, Refused)
    assert refused.untaken is None
    assert (type(refused.error), refused.error.message, refused.error.facts) == (NotOwner, error.message, error.facts)


@pytest.mark.parametrize("untaken", [None, 0, 7])
def test_what_was_not_taken_is_told_with_the_refusal(untaken: int | None) -> None:
    (back,) = back_over_the_wire([Refused(NotOwner("another has it"), untaken)])
    assert isinstance(back, Refused)
    assert back.untaken == untaken


def test_a_part_is_there_also_when_it_is_empty() -> None:
    (back,) = back_over_the_wire([HeadFeed(heads(encode_payloads(0, [])))])
    assert isinstance(back, HeadFeed)
    assert len(back.heads) == 0


def test_topology_survives() -> None:
    topology = Topology(
        cluster="test",
        cluster_key=UUID(int=5),
        places=(
            PartitionLocation(generation=2, server="one", address="h:1"),
            PartitionLocation(generation=0, server=None, address=None),
        ),
        servers=(ServerAddress("one", "h:1"), ServerAddress("two", "h:2")),
    )
    assert to_value(Topology, wire.Topology.FromString(to_message(wire.Topology, topology).SerializeToString())) == topology


def test_times_and_groups_travel_beside_records_and_heads() -> None:
    follows = np.array([False, True, False, False, True])
    times = np.array([-1, -1, 7, 9, 9])
    run = replace(encode_payloads(3, [b""] * 5), times=times, follows=follows, goes_on=True)
    feed, found = back_over_the_wire([Feed(run), HeadFeed(heads(run), times, follows, goes_on=True)])
    assert isinstance(feed, Feed)
    assert isinstance(found, HeadFeed)
    for frame in (feed.run, found):
        assert frame.times is not None
        assert frame.follows is not None
        assert (frame.times.tolist(), frame.follows.tolist(), frame.goes_on) == (times.tolist(), follows.tolist(), True)
    (bare,) = back_over_the_wire([Feed(encode_payloads(3, [b"a"]))])
    assert isinstance(bare, Feed)
    assert (bare.run.times, bare.run.follows, bare.run.goes_on) == (None, None, False)


def test_the_bytes_of_a_whole_run_are_not_copied() -> None:
    run = encode_payloads(0, [b"a", b"b"])
    assert bytes_of(run) is run.data.obj
    assert bytes_of(run.part(1, 2)) == bytes(run.data)[41:]
    assert run_message(run.part(1, 2)).first_id == 1


def batch_message(**columns: object) -> wire.ClientFrame:
    message = client_message([batch_of(b"ab", b"c", locks=[[(1, Mode.READ)], [(2, Mode.WRITE), (3, Mode.WRITE)]])])
    for name, value in columns.items():
        setattr(message.append[0], name, value)
    return message


BROKEN: list[tuple[str, wire.ClientFrame]] = [
    ("empty", wire.ClientFrame()),
    ("marks", batch_message(marks=b"\0" * 15)),
    ("short marks", batch_message(marks=b"\0" * 8)),
    ("headers", batch_message(headers=b"\0" * 9)),
    ("short headers", batch_message(headers=b"")),
    ("lengths", batch_message(lengths=b"\0" * 7)),
    ("long lengths", batch_message(lengths=b"\0" * 12)),
    ("checksums", batch_message(data_crcs=b"\0")),
    ("short checksums", batch_message(data_crcs=b"\0" * 4)),
    ("lock counts", batch_message(lock_counts=b"\0\0\0")),
    ("short lock counts", batch_message(lock_counts=b"\0" * 4)),
    ("lock ids", batch_message(lock_ids=b"\0" * 9)),
    ("short lock ids", batch_message(lock_ids=b"\0" * 16)),
    ("lock modes", batch_message(lock_modes=b"\1" * 4)),
    ("no feed", wire.ClientFrame(mount=wire.MountRequest(cluster_key=bytes(16)))),
    ("other feed", wire.ClientFrame(mount=wire.MountRequest(cluster_key=bytes(16), feed=wire.FeedMode.ValueType(4)))),
    ("key", wire.ClientFrame(mount=wire.MountRequest(cluster_key=bytes(15), feed=wire.FEED_MODE_NONE))),
]


GROUP = b"\xa3\x06\xa4\x06"
"""Begin and end of a group that no message declares."""


@pytest.mark.parametrize(("kind", "one", "most"), [(wire.ClientFrame, b"\x1a\0", 4096), (wire.MemberFrame, b"\x12\0", 256)])
@pytest.mark.parametrize(
    "around", [(b"", b""), (b"\xa3\x06\xa4\x06", b""), (b"\xa3\x06", b"\xa4\x06")], ids=["", "group", "in"]
)
def test_fields_are_counted_whatever_stands_beside_them(
    kind: type[Message], one: bytes, most: int, around: tuple[bytes, bytes]
) -> None:
    """Also behind a group and in one, which no message declares and parsers pass over: 16 MiB took 1.4 GiB of memory."""
    before, behind = around
    others = sum(len(part) // 2 for part in around)
    check_size(kind, before + one * (most - others) + behind)
    raw = before + one * (most - others + 1) + behind
    kind.FromString(raw)  # the parser takes it
    with pytest.raises(BadFrame, match="fields"):
        check_size(kind, raw)


@pytest.mark.parametrize("message", [row[1] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_a_client_message_that_does_not_hold_together(message: wire.ClientFrame) -> None:
    with pytest.raises(BadFrame):
        client_frames(message)


def one_refusal(reasons: bytes) -> wire.ServerFrame:
    return wire.ServerFrame(
        refusals=wire.Refusals(sequences=bytes(4), reasons=reasons, conflict_ids=bytes(8), locks=bytes(8))
    )


BROKEN_ANSWERS: list[tuple[str, wire.ServerFrame]] = [
    ("empty", wire.ServerFrame()),
    ("sequences", wire.ServerFrame(committals=wire.Committals(sequences=b"\0" * 3, ids=b"\0" * 8))),
    ("fewer ids", wire.ServerFrame(committals=wire.Committals(sequences=b"\0" * 8, ids=b"\0" * 8))),
    ("ids", wire.ServerFrame(committals=wire.Committals(sequences=b"\0" * 4, ids=b"\0" * 7))),
    ("reasons", one_refusal(b"")),
    ("reason", one_refusal(b"\6")),
    ("no reason", one_refusal(b"\0")),
    ("heads", wire.ServerFrame(heads=b"\0" * 35)),
    ("lengths", wire.ServerFrame(feed=wire.RunFrame(first_id=1, lengths=b"\0" * 4, records=b"\0" * 39))),
    ("odd lengths", wire.ServerFrame(feed=wire.RunFrame(first_id=1, lengths=b"\0" * 5, records=b"\0" * 40))),
    ("first id", wire.ServerFrame(feed=wire.RunFrame(first_id=-1))),
]  # fmt: skip


@pytest.mark.parametrize("message", [row[1] for row in BROKEN_ANSWERS], ids=[row[0] for row in BROKEN_ANSWERS])
def test_a_server_message_that_does_not_hold_together(message: wire.ServerFrame) -> None:
    with pytest.raises(BadFrame):
        server_frames(message)


# -- what stands beside records ----------------------------------------------------------------------------------------


def beside() -> list[Batch]:
    return batches_of(
        [[b"a", b"bb", b""], [b"c"]],
        first_id=7,
        locks=[[[(1, 1)], [], [(2, 2), ((1 << 64) - 1, 3)]], None],
        follows=[[False, True, False], None],
    )


def same_beside(one: Run, other: Run) -> bool:
    return (
        columns(one.locks) == columns(other.locks)
        and np.array_equal(one.times, other.times)  # type: ignore[arg-type]
        and np.array_equal(one.follows, other.follows)  # type: ignore[arg-type]
    )


def test_times_groups_and_locks_travel_with_records() -> None:
    run = join_runs([batch.run_with_locks for batch in beside()])
    back = checked_run(wire.RunFrame.FromString(run_message(run).SerializeToString()), "there")
    assert (back.first_id, bytes(back.data)) == (7, bytes(run.data))
    assert same_beside(back, run)


def test_whole_batches_travel_between_replicas() -> None:
    sent = beside()
    message = wire.RunFrame.FromString(pieces_message(sent).SerializeToString())
    back = checked_pieces(message, "there")
    assert all(isinstance(one, Batch) and one.is_same_as(two) for one, two in zip(back, sent, strict=True))
    with pytest.raises(BadFrame, match="where records are expected"):
        checked_run(message, "there")
    message.records = message.records[:-1] + b"?"
    with pytest.raises(BadFrame, match="damaged on the way"):
        checked_pieces(message, "there")
    run = encode_payloads(3, [b"x"])
    [plain] = checked_pieces(wire.RunFrame.FromString(pieces_message([run]).SerializeToString()), "there")
    assert isinstance(plain, Run)
    assert bytes(plain.data) == bytes(run.data)


@pytest.mark.parametrize(
    ("field", "value"), [("times", b"\0" * 8), ("follows", b"\0\0"), ("locks", b"\0\0\0\0\1"), ("time_counts", b"\0\0\0\1")]
)
def test_what_stands_beside_records_fits_them(field: str, value: bytes) -> None:
    message = run_message(join_runs([batch.run_with_locks for batch in beside()]))
    setattr(message, field, value)
    with pytest.raises(BadFrame):
        checked_run(message, "there")


def test_histories_of_locks_travel() -> None:
    locks = join_locks([batch.locks for batch in beside()])
    back = lock_history_of(lock_history_message(LockHistory(7, locks)))
    assert back is not None
    assert (back.first_id, columns(back.locks)) == (7, columns(locks))
    assert lock_history_of(lock_history_message(None)) is None
    with pytest.raises(BadFrame, match="an answer about locks is malformed"):
        lock_history_of(wire.LocksReply(first_id=0, records=0))
