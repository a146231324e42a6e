"""What client and server say to each other, as protobuf messages and back.

Only the form is checked here: columns that hold whole numbers and belong together, and values that have a meaning. Whether
the contents make sense is for whoever takes the frame. Nothing here makes an object for each transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waltzd import wire_pb2 as wire
from waltzd.errors import BadFrame
from waltzd.frame import (
    AppendBatch,
    ClientFrame,
    Committals,
    Credit,
    Feed,
    FeedMode,
    Flush,
    Flushed,
    HeadFeed,
    Limits,
    Mounted,
    MountRequest,
    Place,
    Refusals,
    Refused,
    ServerFrame,
    Topology,
)
from waltzd.link import run_of
from waltzd.messages import detail_of, error_of_detail
from waltzd.outcome import Reason
from waltzd.record import HEAD, HeadArray, Run, heads
from waltzd.rpc import key_of

Column: TypeAlias = NDArray[Any]


def _column(raw: bytes, kind: str, name: str) -> Column:
    """A column of big-endian numbers."""
    width = np.dtype(kind).itemsize
    if len(raw) % width:
        raise BadFrame(f"the column `{name}` has {len(raw)} bytes, which is no multiple of {width}")
    return np.frombuffer(raw, kind)


def _raw(column: Column, kind: str) -> bytes:
    return column.astype(kind).tobytes()


def _check_equal(**columns: Column) -> None:
    if len({len(column) for column in columns.values()}) > 1:
        sizes = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise BadFrame(f"columns that belong together have different numbers of rows: {sizes}")


def bytes_of(run: Run) -> bytes:
    """The bytes of a run for a message; not copied where they are the whole of a buffer."""
    whole = run.data.obj
    return whole if isinstance(whole, bytes) and len(whole) == len(run.data) else bytes(run.data)


# -- from the client ---------------------------------------------------------------------------------------------------


def client_message(frames: Sequence[ClientFrame]) -> wire.ClientFrame:
    """At most one frame of each kind, but batches."""
    message = wire.ClientFrame()
    for frame in frames:
        match frame:
            case MountRequest():
                _fill_mount(message.mount, frame)
            case Credit():
                message.credit = frame.bytes
            case AppendBatch():
                _fill_batch(message.append.add(), frame)
            case Flush():
                message.flush = frame.number
    return message


def client_frames(message: wire.ClientFrame) -> list[ClientFrame]:
    """In the order in which they are to be taken. Credit comes before a batch, which may have to wait for room."""
    frames: list[ClientFrame] = []
    if message.HasField("mount"):
        frames.append(_mount_of(message.mount))
    if message.HasField("credit"):
        frames.append(Credit(message.credit))
    frames += map(_batch_of, message.append)
    if message.HasField("flush"):
        frames.append(Flush(message.flush))
    if not frames:
        raise BadFrame("a message with nothing in it")
    return frames


def _fill_mount(message: wire.MountRequest, request: MountRequest) -> None:
    message.cluster_key = request.cluster_key.bytes
    message.partition, message.generation = request.partition, request.generation
    message.client, message.token, message.number = request.client, request.token, request.number
    message.mark, message.credit = request.mark, request.credit
    message.feed = wire.FeedMode.ValueType(request.feed)


def _mount_of(message: wire.MountRequest) -> MountRequest:
    if not FeedMode.RECORDS <= int(message.feed) <= FeedMode.NONE:
        raise BadFrame(f"{message.feed} is no kind of feed")
    return MountRequest(
        cluster_key=key_of(message.cluster_key),
        partition=message.partition,
        generation=message.generation,
        client=message.client,
        token=message.token,
        number=message.number,
        mark=message.mark,
        feed=FeedMode(message.feed),
        credit=message.credit,
    )


def _fill_batch(message: wire.AppendBatch, batch: AppendBatch) -> None:
    """In place: a message that is made first and put in then would copy all payloads once more."""
    message.first_sequence = batch.first_sequence
    message.marks = _raw(batch.marks, ">i8")
    message.headers = _raw(batch.headers, ">i4")
    message.lengths = _raw(batch.lengths, ">u4")
    message.data_crcs = _raw(batch.data_crcs, ">u4")
    if len(batch.lock_ids):
        message.lock_counts = _raw(batch.lock_counts, ">u4")
        message.lock_ids = _raw(batch.lock_ids, ">u8")
        message.lock_modes = _raw(batch.lock_modes, "u1")
    message.payloads = batch.payloads if isinstance(batch.payloads, bytes) else bytes(batch.payloads)


def _batch_of(message: wire.AppendBatch) -> AppendBatch:
    marks = _column(message.marks, ">i8", "marks")
    headers = _column(message.headers, ">i4", "headers")
    lengths = _column(message.lengths, ">u4", "lengths")
    data_crcs = _column(message.data_crcs, ">u4", "data_crcs")
    lock_counts = _column(message.lock_counts, ">u4", "lock_counts")
    if not len(lock_counts):
        lock_counts = np.zeros(len(marks), ">u4")
    _check_equal(marks=marks, headers=headers, lengths=lengths, data_crcs=data_crcs, lock_counts=lock_counts)
    lock_ids = _column(message.lock_ids, ">u8", "lock_ids")
    lock_modes = _column(message.lock_modes, "u1", "lock_modes")
    _check_equal(lock_ids=lock_ids, lock_modes=lock_modes)
    return AppendBatch(
        first_sequence=message.first_sequence,
        marks=marks.astype(np.int64),
        headers=headers.astype(np.int32),
        lengths=lengths.astype(np.int64),
        data_crcs=data_crcs.astype(np.uint32),
        lock_counts=lock_counts.astype(np.int64),
        lock_ids=lock_ids.astype(np.uint64),
        lock_modes=lock_modes,
        payloads=message.payloads,
    )


# -- from the server ---------------------------------------------------------------------------------------------------


def server_message(frames: Sequence[ServerFrame]) -> wire.ServerFrame:
    """At most one frame of each kind."""
    message = wire.ServerFrame()
    for frame in frames:
        match frame:
            case Mounted():
                message.mounted.session, message.mounted.barrier = frame.session, frame.barrier
                message.mounted.payload_bytes_max = frame.limits.payload_bytes_max
                message.mounted.locks_max = frame.limits.locks_max
                message.mounted.frame_bytes_max = frame.limits.frame_bytes_max
            case Committals():
                message.committals.sequences = _raw(frame.sequences, ">i4")
                message.committals.ids = _raw(frame.ids, ">i8")
            case Refusals():
                message.refusals.sequences = _raw(frame.sequences, ">i4")
                message.refusals.reasons = _raw(frame.reasons, "u1")
                message.refusals.conflict_ids = _raw(frame.conflict_ids, ">i8")
                message.refusals.locks = _raw(frame.locks, ">u8")
            case Feed():
                message.feed.first_id = frame.run.first_id
                message.feed.lengths = frame.run.sent_lengths
                message.feed.records = bytes_of(frame.run)
            case HeadFeed():
                message.heads = frame.heads.tobytes()
            case Flushed():
                message.flushed.number, message.flushed.mark = frame.number, frame.mark
            case Refused():
                message.refused.CopyFrom(detail_of(frame.error))
                if frame.untaken is not None:
                    message.untaken = frame.untaken
    return message


def server_frames(message: wire.ServerFrame) -> list[ServerFrame]:
    """In the order in which they are to be taken."""
    frames: list[ServerFrame] = []
    if message.HasField("mounted"):
        frames.append(_mounted_of(message.mounted))
    if message.HasField("committals"):
        frames.append(_committals_of(message.committals))
    if message.HasField("refusals"):
        frames.append(_refusals_of(message.refusals))
    if message.HasField("feed"):
        frames.append(Feed(run_of(message.feed.first_id, message.feed.lengths, message.feed.records)))
    if message.HasField("heads"):
        frames.append(HeadFeed(heads_of(message.heads)))
    if message.HasField("flushed"):
        frames.append(Flushed(message.flushed.number, message.flushed.mark))
    if message.HasField("refused"):
        untaken = message.untaken if message.HasField("untaken") else None
        frames.append(Refused(error_of_detail(message.refused), untaken))
    if not frames:
        raise BadFrame("a message with nothing in it")
    return frames


def _mounted_of(message: wire.Mounted) -> Mounted:
    limits = Limits(
        payload_bytes_max=message.payload_bytes_max,
        locks_max=message.locks_max,
        frame_bytes_max=message.frame_bytes_max,
    )
    return Mounted(session=message.session, barrier=message.barrier, limits=limits)


def _committals_of(message: wire.Committals) -> Committals:
    sequences, ids = _column(message.sequences, ">i4", "sequences"), _column(message.ids, ">i8", "ids")
    _check_equal(sequences=sequences, ids=ids)
    return Committals(sequences.astype(np.int64), ids.astype(np.int64))


def _refusals_of(message: wire.Refusals) -> Refusals:
    sequences = _column(message.sequences, ">i4", "sequences")
    reasons = _column(message.reasons, "u1", "reasons")
    conflict_ids = _column(message.conflict_ids, ">i8", "conflict_ids")
    locks = _column(message.locks, ">u8", "locks")
    _check_equal(sequences=sequences, reasons=reasons, conflict_ids=conflict_ids, locks=locks)
    if len(reasons) and not (min(Reason) <= int(reasons.min()) and int(reasons.max()) <= max(Reason)):
        raise BadFrame("a refusal has a reason that this version does not know")
    return Refusals(sequences.astype(np.int64), reasons, conflict_ids.astype(np.int64), locks.astype(np.uint64))


def heads_of(raw: bytes) -> HeadArray:
    if len(raw) % HEAD.itemsize:
        raise BadFrame(f"{len(raw)} bytes of heads, which is no multiple of {HEAD.itemsize}")
    return np.frombuffer(raw, HEAD)


# -- by id, and where things are ---------------------------------------------------------------------------------------


def run_message(run: Run) -> wire.RunFrame:
    return wire.RunFrame(first_id=run.first_id, lengths=run.sent_lengths, records=bytes_of(run))


def heads_message(run: Run) -> wire.RunFrame:
    return wire.RunFrame(first_id=run.first_id, heads=heads(run).tobytes())


def topology_message(topology: Topology) -> wire.Topology:
    return wire.Topology(
        cluster=topology.cluster,
        cluster_key=topology.cluster_key.bytes,
        places=[
            wire.Place(generation=place.generation, server=place.server, address=place.address) for place in topology.places
        ],
        servers=[wire.ServerAddress(name=name, address=address) for name, address in topology.servers],
    )


def topology_of(message: wire.Topology) -> Topology:
    return Topology(
        cluster=message.cluster,
        cluster_key=key_of(message.cluster_key),
        places=tuple(
            Place(
                generation=place.generation,
                server=place.server if place.HasField("server") else None,
                address=place.address if place.HasField("address") else None,
            )
            for place in message.places
        ),
        servers=tuple((server.name, server.address) for server in message.servers),
    )
