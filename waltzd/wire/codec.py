"""Conversion between values of Waltz and protobuf messages.

Plain values (descriptions, findings, positions) and their messages declare the same names. So one generic plan for each
type, made from both declarations, converts them. Frames of clients, members and servers are hot: their columns are
converted by hand, without an object for each transaction.

Only the form is checked here: columns hold whole numbers and have equal lengths, and enumerations have known values.
The receiver checks the contents.

**Limits** on the size of a message are checked before it is parsed.

A parsed message takes about a hundred bytes for each message nested in it, and two bytes on the wire are enough for
one. So the length and the number of fields of a request are checked while it is still bytes. The receiver checks the
values of the fields.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import NoneType
from typing import Any, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints
from uuid import UUID

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, TooLarge, WaltzError
from waltzd.errors.operations import BadFrame, tree
from waltzd.format.batch import (
    Batch,
    Flags,
    Piece,
    decode_groups,
    decode_locks,
    encode_groups,
    encode_locks,
    parse_batches,
    why_wrong,
)
from waltzd.format.checksum import I64
from waltzd.format.record import HEAD, HeadArray, Run, bounds_of, first_bad
from waltzd.protocol.batches import (
    AppendBatch,
    ClientFrame,
    Committals,
    Credit,
    Feed,
    HeadFeed,
    Mounted,
    MountRequest,
    Refusals,
    Refused,
    ServerFrame,
    SingleAppend,
    SingleCommittal,
)
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.groups import (
    Ack,
    AckKind,
    AckResult,
    AcksDurable,
    Deliveries,
    DeliveryFrame,
    Dismissed,
    Joined,
    JoinRequest,
    Leave,
    MemberFrame,
    Paused,
)
from waltzd.protocol.histogram import Histogram
from waltzd.protocol.locks import Reason
from waltzd.protocol.peers import LockHistory, run_of
from waltzd.protocol.timelines import TIMELINES_MAX, Lineage, Timeline
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.wire_pb2 import ErrorDetail

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Parse: TypeAlias = Callable[[bytes], M]
REQUEST_BYTES_MAX = 256 << 10
"""Largest size of a message without records: one that names each partition of the largest cluster."""
CLIENT_FIELDS_MAX = 4096
"""Largest number of fields in one message of a mount, where each batch is a field. A client sends at most about 2000
small ones together."""
MEMBER_FIELDS_MAX = 256
"""Largest number of fields in one message of a member. A client sends at most 32 acknowledgements together."""
MEMBER_BYTES_MAX = MEMBER_FIELDS_MAX << 16
"""Largest size of one message of a member: an acknowledgement with 4096 ranges takes 64 KiB."""
_FIELDS_MAX = {wire.ClientFrame: CLIENT_FIELDS_MAX, wire.MemberFrame: MEMBER_FIELDS_MAX}
_BYTES_MAX = {wire.ClientFrame: None, wire.MemberFrame: MEMBER_BYTES_MAX}
_VARINT_BYTES_MAX = 10


def check_size(kind: type[Message], raw: Buffer) -> None:
    """Raise `TooLarge` or `BadFrame` if a message of this type is too long or has too many fields."""
    bytes_max = _BYTES_MAX.get(kind, REQUEST_BYTES_MAX)
    if bytes_max is not None and len(raw) > bytes_max:
        raise TooLarge(
            f"a message {kind.DESCRIPTOR.name} has {len(raw)} bytes; {bytes_max} are allowed",
            next_step="say less in one message",
        )
    fields_max = _FIELDS_MAX.get(kind)
    if fields_max is not None and _has_more_fields(raw, fields_max):
        raise BadFrame(f"a message {kind.DESCRIPTOR.name} has more than {fields_max} fields")


def bounded(kind: type[M], parse: Parse[M]) -> Callable[[bytes], M | WaltzError]:
    """Return a parser that returns an error instead of a message that is too large. Bytes that are no message are
    parsed as an empty one, which every call with a cluster key rejects in one line. gRPC would log a traceback for
    each, and strangers could fill the disk."""

    def read(raw: bytes) -> M | WaltzError:
        try:
            check_size(kind, raw)
            return parse(raw)
        except DecodeError:
            return parse(b"")
        except WaltzError as error:
            return error

    return read


def parsed(kind: type[M]) -> Callable[[bytes], M | BadFrame]:
    """Return a parser that returns an error for bytes that are no message. gRPC would hand over None in place of the
    message, and log a traceback."""

    def read(raw: bytes) -> M | BadFrame:
        try:
            return kind.FromString(raw)
        except DecodeError:
            return BadFrame(f"the other side answered with {len(raw)} bytes that are no message {kind.DESCRIPTOR.name}")

    return read


def checked(message: Any) -> Any:
    """Return a message, or the end of a stream; raise the error if parsing gave one."""
    if isinstance(message, WaltzError):
        raise message
    return message


def _has_more_fields(raw: Buffer, most: int) -> bool:
    """Return whether a message has more than `most` fields, nested ones not counted. Bytes that are no message are left
    to the parser. The begin and the end of a group count as fields, and what is in it counts, too: the parser takes
    groups that no message declares."""
    at, end = 0, len(raw)
    for _ in range(most):
        if at >= end:
            return False
        tag, at = _varint(raw, at)
        match tag & 7:
            case 0:
                _, at = _varint(raw, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(raw, at)
                at += size
            case 3 | 4:
                pass
            case 5:
                at += 4
            case _:
                return False
    return at < end


def _varint(raw: Buffer, at: int) -> tuple[int, int]:
    """Return the number at an offset and the offset behind it. Bytes beyond the end of the message count as zeros."""
    value = 0
    for shift in range(_VARINT_BYTES_MAX):
        byte = raw[at + shift] if at + shift < len(raw) else 0
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    return value, at + _VARINT_BYTES_MAX


_ERRORS = tree()
LOCK_ROWS_MAX = 10_000_000
"""Largest number of records in one answer about locks; a larger claim is rejected before memory is allocated for it."""


@lru_cache(16)
def key_of(raw: bytes) -> UUID:
    return uuid_of(raw, "a cluster key")


def uuid_of(raw: bytes, what: str) -> UUID:
    if len(raw) != 16:
        raise BadFrame(f"{what} has 16 bytes; this one has {len(raw)}")
    return UUID(bytes=raw)


def detail_of(error: WaltzError) -> ErrorDetail:
    return ErrorDetail(
        code=error.code,
        message=error.message,
        not_done=error.detail_not_done,
        next_step=error.detail_next_step,
        facts=error.facts,
    )


def packed_status(status: ReplicaStatus) -> bytes:
    return to_message(wire.ReplicaStatus, status).SerializeToString()


def packed_error(error: WaltzError) -> bytes:
    return detail_of(error).SerializeToString()


def unpacked_error(raw: Buffer) -> WaltzError:
    try:
        return error_of_detail(ErrorDetail.FromString(bytes(raw)))
    except DecodeError:
        return CannotConnect("the other side ended the stream with an error that cannot be decoded")


def error_of_detail(detail: ErrorDetail) -> WaltzError:
    """Return the error of the other side in its own class. An unknown code, of a newer Waltz, keeps its text, also when
    it is passed on."""
    cls = _ERRORS.get(detail.code)
    is_told = cls is not None or detail.code == WaltzError.code
    message = detail.message if is_told else f"unknown error {detail.code} of a newer version: {detail.message}"
    error = (cls or WaltzError)(message, not_done=detail.not_done, next_step=detail.next_step)
    error.facts.update(detail.facts)
    return error


# -- plain values ------------------------------------------------------------------------------------------------------


def to_message(kind: type[M], value: Any) -> M:
    """Convert a value to a message field by field. Fields that are None stay absent."""
    found = ((field, getattr(value, field.attribute)) for field in _plan(type(value), kind))
    return kind(**{field.name: field.pack(held) for field, held in found if held is not None})


def to_value(kind: type[T], message: Message) -> T:
    """Convert a message to a value field by field. An absent `optional` scalar gets the default of the value, or None."""
    plan = _plan(kind, type(message))
    return kind(**{field.attribute: field.take(message) for field in plan if not field.is_left_out(message)})


@dataclass(frozen=True)
class _Field:
    attribute: str
    """Name of the attribute of the value."""
    name: str
    """Name of the field of the message: that of the attribute, or without `is_`."""
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    is_optional: bool
    has_presence: bool
    is_scalar: bool

    def is_left_out(self, message: Any) -> bool:
        return self.has_presence and self.is_scalar and not self.is_optional and not message.HasField(self.name)

    def take(self, message: Any) -> Any:
        raw = getattr(message, self.name)
        if self.is_optional and not (message.HasField(self.name) if self.has_presence else raw):
            return None
        return self.unpack(raw)


_PLANS: dict[tuple[type[Any], type[Message]], tuple[_Field, ...]] = {}


def _plan(kind: type[Any], message: type[Message]) -> tuple[_Field, ...]:
    """Return how values of a type are converted, made once from the names and types that value and message declare."""
    if (kind, message) not in _PLANS:
        _PLANS[kind, message] = tuple(_fields(kind, message))
    return _PLANS[kind, message]


def _fields(kind: type[Any], message: type[Message]) -> Iterator[_Field]:
    known: Any = message.DESCRIPTOR.fields_by_name
    for attribute, hint in get_type_hints(kind).items():
        name = attribute if attribute in known else attribute.removeprefix("is_")
        plain = [part for part in get_args(hint) if part is not NoneType] if NoneType in get_args(hint) else [hint]
        pack, unpack = _converters(plain[0], known[name])
        is_scalar = known[name].message_type is None
        yield _Field(attribute, name, pack, unpack, plain[0] is not hint, known[name].has_presence, is_scalar)


def _converters(hint: Any, field: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the functions from an attribute to a field of the message, and back."""
    hint = getattr(hint, "__supertype__", hint)
    if get_origin(hint) is tuple:
        pack, unpack = _converters(get_args(hint)[0], field)
        return lambda values: [pack(value) for value in values], lambda raws: tuple(unpack(raw) for raw in raws)
    if get_origin(hint) is Mapping:
        return dict, dict
    if hint is UUID:
        return lambda value: value.bytes, lambda raw: uuid_of(raw, f"the field `{field.name}`")
    if hint is WaltzError:
        return detail_of, error_of_detail
    if hint is Histogram:
        return (
            lambda found: wire.Histogram(counts=found.encode(), seconds=found.seconds),
            lambda raw: Histogram.decode(raw.counts, raw.seconds),
        )
    if issubclass(hint, enum.Enum):
        return lambda value: value.value, lambda raw: _member(hint, raw, field.name)
    if hint in (int, float, str, bytes, bool):
        return hint, hint
    message = GetMessageClass(field.message_type)
    return lambda value: to_message(message, value), lambda raw: to_value(hint, raw)


def _member(kind: type[enum.Enum], raw: Any, name: str) -> enum.Enum:
    try:
        return kind(raw)
    except ValueError:
        raise BadFrame(f"unknown value {raw!a:.60} of the field `{name}`") from None


def lineage_of_messages(messages: Sequence[wire.Timeline]) -> Lineage:
    if len(messages) > TIMELINES_MAX:
        raise BadFrame(f"a log has at most {TIMELINES_MAX} timelines; {len(messages)} were named")
    try:
        return Lineage(to_value(Timeline, message) for message in messages)
    except ValueError as error:
        raise BadFrame(f"the timelines of a log are wrong: it {error}") from None


def timelines_of(lineage: Lineage) -> list[wire.Timeline]:
    return [to_message(wire.Timeline, one) for one in lineage.later]


# -- columns -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A column of numbers: big-endian in the message, native in the value."""

    name: str
    sent: np.dtype[Any]
    held: np.dtype[Any]


def column(name: str, sent: str, held: type[np.generic] | str) -> _Column:
    return _Column(name, np.dtype(sent), np.dtype(held))


_ROWS = (
    column("marks", ">i8", np.int64),
    column("headers", ">i4", np.int32),
    column("lengths", ">u4", np.int64),
    column("data_crcs", ">u4", np.uint32),
)
_LOCK_COUNTS = column("lock_counts", ">u4", np.int64)
_LOCKS = (column("lock_ids", ">u8", np.uint64), column("lock_modes", "u1", np.uint8))
_TIMES = (column("time_counts", ">u4", np.int64), column("times", ">i8", np.int64))
_COMMITTALS = (column("sequences", ">i4", np.int64), column("ids", ">i8", np.int64))
_REFUSALS = (
    column("sequences", ">i4", np.int64),
    column("reasons", "u1", np.uint8),
    column("conflict_ids", ">i8", np.int64),
    column("locks", ">u8", np.uint64),
)


def fill(message: Any, frame: Any, *columns: _Column) -> None:
    for column in columns:
        setattr(message, column.name, getattr(frame, column.name).astype(column.sent).tobytes())


def taken(message: Any, *columns: _Column) -> dict[str, NDArray[Any]]:
    """Return columns of equal length from a message; raise `BadFrame` if their lengths differ."""
    found: dict[str, NDArray[Any]] = {}
    sizes: set[int] = set()
    for column in columns:
        raw, width = getattr(message, column.name), column.sent.itemsize
        if len(raw) % width:
            raise BadFrame(f"the column `{column.name}` has {len(raw)} bytes, which is no multiple of {width}")
        found[column.name] = np.frombuffer(raw, column.sent).astype(column.held)
        sizes.add(len(raw) // width)
    if len(sizes) > 1:
        told = ", ".join(f"{name} {len(rows)}" for name, rows in found.items())
        raise BadFrame(f"columns that belong together have different numbers of rows: {told}")
    return found


def bytes_of(run: Run) -> bytes:
    """Return the bytes of a run for a message, without a copy if they are a whole buffer."""
    whole = run.data.obj
    return whole if isinstance(whole, bytes) and len(whole) == len(run.data) else bytes(run.data)


# -- from the client ---------------------------------------------------------------------------------------------------


def client_message(frames: Sequence[ClientFrame]) -> wire.ClientFrame:
    """Pack frames of a client: at most one of each kind, except batches."""
    message = wire.ClientFrame()
    for frame in frames:
        match frame:
            case MountRequest():
                message.mount.CopyFrom(to_message(wire.MountRequest, frame))
            case Credit():
                message.credit = frame.bytes
            case AppendBatch():
                _fill_batch(message.append.add(), frame)
    return message


def client_frames(message: wire.ClientFrame) -> list[ClientFrame]:
    """Unpack frames of a client in the order in which they are handled. Credit comes before a batch, which may have to
    wait for room."""
    frames: list[ClientFrame] = []
    if message.HasField("mount"):
        frames.append(to_value(MountRequest, message.mount))
    if message.HasField("credit"):
        frames.append(Credit(message.credit))
    frames += map(_batch_of, message.append)
    if not frames:
        raise BadFrame("a message is empty")
    return frames


def _fill_batch(message: wire.AppendBatch, batch: AppendBatch) -> None:
    """Fill a message in place: to build and insert one would copy all payloads once more."""
    message.first_sequence = batch.first_sequence
    fill(message, batch, *_ROWS)
    if len(batch.lock_ids):
        fill(message, batch, _LOCK_COUNTS, *_LOCKS)
    message.payloads = batch.payloads if isinstance(batch.payloads, bytes) else bytes(batch.payloads)
    message.follows, message.seen_time = encode_groups(batch.follows), batch.seen_time


def _batch_of(message: wire.AppendBatch) -> AppendBatch:
    rows = taken(message, *_ROWS, *([_LOCK_COUNTS] if message.lock_counts else []))
    rows.setdefault("lock_counts", np.zeros(len(rows["marks"]), np.int64))
    locks, count = taken(message, *_LOCKS), len(rows["marks"])
    if count == 0:
        raise BadFrame("a batch without a transaction")
    if len(message.follows) not in (0, (count + 7) // 8):
        raise BadFrame(f"a batch of {count} transactions has {len(message.follows)} bytes for their groups")
    return AppendBatch(
        first_sequence=message.first_sequence,
        payloads=message.payloads,
        follows=decode_groups(message.follows, count),
        seen_time=message.seen_time,
        **rows,
        **locks,
    )


# -- from the server ---------------------------------------------------------------------------------------------------


def server_message(frames: Sequence[ServerFrame]) -> wire.ServerFrame:
    """Pack frames of a server: at most one of each kind."""
    message = wire.ServerFrame()
    for frame in frames:
        match frame:
            case Mounted():
                message.mounted.CopyFrom(to_message(wire.Mounted, frame))
            case Committals():
                fill(message.committals, frame, *_COMMITTALS)
                message.committals.time = frame.time
            case Refusals():
                fill(message.refusals, frame, *_REFUSALS)
            case Feed():
                _fill_run(message.feed, frame.run)
            case HeadFeed():
                message.heads = frame.heads.tobytes()
                _fill_beside(message.beside_heads, frame)
            case Refused():
                message.refused.CopyFrom(detail_of(frame.error))
                if frame.untaken is not None:
                    message.untaken = frame.untaken
    return message


def server_frames(message: wire.ServerFrame) -> list[ServerFrame]:
    """Unpack frames of a server in the order in which they are handled."""
    frames: list[ServerFrame] = []
    if message.HasField("mounted"):
        frames.append(to_value(Mounted, message.mounted))
    if message.HasField("committals"):
        frames.append(Committals(**taken(message.committals, *_COMMITTALS), time=message.committals.time))
    if message.HasField("refusals"):
        frames.append(_refusals_of(message.refusals))
    if message.HasField("feed"):
        frames.append(Feed(_run_of(message.feed)))
    if message.HasField("heads"):
        heads = heads_of(message.heads)
        frames.append(HeadFeed(heads, *_beside_of(message.beside_heads, len(heads))))
    if message.HasField("refused"):
        untaken = message.untaken if message.HasField("untaken") else None
        frames.append(Refused(error_of_detail(message.refused), untaken))
    if not frames:
        raise BadFrame("a message is empty")
    return frames


def _refusals_of(message: wire.Refusals) -> Refusals:
    found = Refusals(**taken(message, *_REFUSALS))
    if len(found.reasons) and not (min(Reason) <= int(found.reasons.min()) and int(found.reasons.max()) <= max(Reason)):
        raise BadFrame("a refusal has an unknown reason")
    return found


def heads_of(raw: bytes) -> HeadArray:
    if len(raw) % HEAD.itemsize:
        raise BadFrame(f"{len(raw)} bytes of heads, which is no multiple of {HEAD.itemsize}")
    return np.frombuffer(raw, HEAD)


# -- by id -------------------------------------------------------------------------------------------------------------


def run_message(run: Run) -> wire.RunFrame:
    message = wire.RunFrame()
    _fill_run(message, run)
    return message


def _fill_run(message: wire.RunFrame, run: Run) -> None:
    message.first_id, message.lengths, message.records = run.first_id, run.sent_lengths, bytes_of(run)
    _fill_beside(message, run)
    if run.locks is not None:
        message.locks = encode_locks(run.locks)


def _fill_beside(message: wire.RunFrame, frame: Run | HeadFeed) -> None:
    """Pack what records do not contain themselves. Times are run-length encoded: one for each batch."""
    times = frame.times
    if times is not None and len(times):
        starts = np.concatenate(([0], np.flatnonzero(times[1:] != times[:-1]) + 1, [len(times)]))
        message.time_counts = np.diff(starts).astype(">u4").tobytes()
        message.times = times[starts[:-1]].astype(">i8").tobytes()
    message.follows, message.goes_on = encode_groups(frame.follows), frame.goes_on


def _beside_of(message: wire.RunFrame, count: int) -> tuple[I64 | None, Flags | None, bool]:
    found = taken(message, *_TIMES)
    told = int(found["time_counts"].sum())
    if len(found["times"]) and told != count:  # before they are repeated: four bytes can say four thousand million
        raise BadFrame(f"a frame of {count} transactions has the times of {told}")
    times = np.repeat(found["times"], found["time_counts"]) if len(found["times"]) else None
    if len(message.follows) not in (0, (count + 7) // 8):
        raise BadFrame(f"a frame of {count} transactions has {len(message.follows)} bytes for their groups")
    return times, decode_groups(message.follows, count), message.goes_on


def _run_of(message: wire.RunFrame) -> Run:
    if message.are_batches:
        raise BadFrame("a frame has batches where records are expected")
    run = run_of(message.first_id, message.lengths, message.records)
    times, follows, goes_on = _beside_of(message, len(run))
    locks = decode_locks(message.locks, len(run)) if message.locks else None
    if message.locks and locks is None:
        raise BadFrame("the locks of a frame are malformed")
    return (
        run
        if times is None and follows is None and locks is None and not goes_on
        else replace(run, times=times, follows=follows, locks=locks, goes_on=goes_on)
    )


def pieces_message(pieces: Sequence[Piece]) -> wire.RunFrame:
    """Pack one run, or batches as they are stored."""
    if isinstance(pieces[0], Run):
        return run_message(pieces[0])
    batches = [piece for piece in pieces if isinstance(piece, Batch)]
    return wire.RunFrame(
        first_id=batches[0].first_id,
        lengths=b"".join(batch.sent_lengths for batch in batches),
        records=b"".join(piece for batch in batches for piece in batch.pieces),
        are_batches=True,
    )


def checked_pieces(message: wire.RunFrame, address: str) -> Sequence[Piece]:
    """Unpack what `pieces_message` packs, and verify every checksum."""
    if not message.are_batches:
        return (checked_run(message, address),)
    lengths = np.frombuffer(message.lengths[: len(message.lengths) // 4 * 4], ">u4").astype(np.int64)
    batches = parse_batches(message.records, bounds_of(lengths))
    for batch in batches:
        wrong = why_wrong(batch)
        if wrong:
            raise BadFrame(f"the batch at id {batch.first_id} from {address} was damaged on the way: {wrong}")
    return batches


def lock_history_message(history: LockHistory | None) -> wire.LocksReply:
    if history is None:
        return wire.LocksReply()
    return wire.LocksReply(first_id=history.first_id, records=len(history.locks), locks=encode_locks(history.locks))


def lock_history_of(message: wire.LocksReply) -> LockHistory | None:
    if not message.HasField("first_id"):
        return None
    locks = decode_locks(message.locks, message.records) if 0 < message.records <= LOCK_ROWS_MAX else None
    if locks is None:
        raise BadFrame(f"an answer about locks is malformed or has more than {LOCK_ROWS_MAX} records")
    return LockHistory(message.first_id, locks)


def checked_run(message: wire.RunFrame, address: str) -> Run:
    """Unpack a run and verify every checksum, because the network may have damaged records."""
    run = _run_of(message)
    bad = first_bad(run)
    if bad is not None:
        raise BadFrame(f"record {run.first_id + bad} from {address} was damaged on the way")
    return run


# One transaction, and its outcome, without protobuf.

SINGLE_LOCKS_MAX = 255
"""Largest number of locks of a transaction in a frame of the kind SINGLE."""
_SINGLE = struct.Struct(">iqiIqB")
"""Sequence, mark, header, CRC-32 of the payload, seen time, number of locks; before lock ids, lock modes and payload."""
_LOCKS_OF_ONE = tuple(struct.Struct(f">{count}Q{count}s") for count in range(SINGLE_LOCKS_MAX + 1))
_COMMITTED = struct.Struct(">iqq")
"""Sequence, id, time."""


def packed_single(one: SingleAppend) -> tuple[Buffer, Buffer, Buffer]:
    """Pack one transaction with at most `SINGLE_LOCKS_MAX` locks."""
    count = len(one.locks)
    head = _SINGLE.pack(one.first_sequence, one.mark, one.header, one.data_crc, one.seen_time, count)
    return head, _LOCKS_OF_ONE[count].pack(*one.locks, bytes(one.modes)), one.payloads


def unpacked_single(raw: Buffer) -> SingleAppend:
    try:
        sequence, mark, header, data_crc, seen_time, count = _SINGLE.unpack_from(raw)
        *locks, modes = _LOCKS_OF_ONE[count].unpack_from(raw, _SINGLE.size)
    except struct.error:
        raise BadFrame(f"a frame of one transaction is cut off after {len(raw)} bytes") from None
    payload = memoryview(raw)[_SINGLE.size + _LOCKS_OF_ONE[count].size :]
    return SingleAppend(sequence, mark, header, data_crc, locks, modes, payload, seen_time)


def packed_committed(one: SingleCommittal) -> bytes:
    return _COMMITTED.pack(one.sequence, one.id, one.time)


def unpacked_committed(raw: Buffer) -> SingleCommittal:
    if len(raw) != _COMMITTED.size:
        raise BadFrame(f"the outcome of one transaction has {_COMMITTED.size} bytes; this one has {len(raw)}")
    return SingleCommittal(*_COMMITTED.unpack(raw))


# Whole messages as bytes. Any buffer can be taken apart as it is: a large frame is not copied for that.


def packed_client_frames(frames: Sequence[ClientFrame]) -> bytes:
    return client_message(frames).SerializeToString()


def unpacked_client_frames(raw: Buffer) -> list[ClientFrame]:
    check_size(wire.ClientFrame, raw)
    try:
        return client_frames(wire.ClientFrame.FromString(cast(bytes, raw)))
    except DecodeError:
        raise BadFrame("a frame is not a message of a client") from None


def packed_server_frames(frames: Sequence[ServerFrame]) -> bytes:
    return server_message(frames).SerializeToString()


def unpacked_server_frames(raw: Buffer) -> list[ServerFrame]:
    try:
        return server_frames(wire.ServerFrame.FromString(cast(bytes, raw)))
    except DecodeError:
        raise BadFrame("a frame is not a message of a server") from None


_STRETCHES = (column("firsts", ">i8", "i8"), column("lasts", ">i8", "i8"))
_DELIVERIES = (
    column("ids", ">i8", "i8"),
    column("attempts", ">i4", "i4"),
    column("headers", ">i4", "i4"),
    column("times", ">i8", "i8"),
    column("lengths", ">u4", "u4"),
    column("data_crcs", ">u4", "u4"),
)


def member_message(frames: Sequence[MemberFrame]) -> wire.MemberFrame:
    message = wire.MemberFrame()
    for frame in frames:
        match frame:
            case JoinRequest():
                message.join.CopyFrom(to_message(wire.JoinRequest, frame))
            case Ack():
                said = message.said.add(
                    number=frame.number, verb=frame.verb, epoch=frame.epoch, tag=frame.tag, reason=frame.reason
                )
                if frame.delay_ms is not None:
                    said.delay_ms = frame.delay_ms
                fill(said, frame, *_STRETCHES)
            case Leave():
                message.leaves = True
    return message


def member_frames(message: wire.MemberFrame) -> list[MemberFrame]:
    frames: list[MemberFrame] = []
    if message.HasField("join"):
        frames.append(to_value(JoinRequest, message.join))
    frames += map(_said, message.said)
    if message.leaves:
        frames.append(Leave())
    if not frames:
        raise BadFrame("a message is empty")
    return frames


def _said(message: wire.Said) -> Ack:
    try:
        verb = AckKind(message.verb)
    except ValueError:
        raise BadFrame(f"an acknowledgement has the unknown kind {message.verb}") from None
    return Ack(
        number=message.number,
        verb=verb,
        epoch=message.epoch,
        tag=message.tag,
        delay_ms=message.delay_ms if message.HasField("delay_ms") else None,
        reason=message.reason,
        **taken(message, *_STRETCHES),
    )


def delivery_message(frames: Sequence[DeliveryFrame]) -> wire.DeliveryFrame:
    """Pack frames of an owner: at most one of each kind, except deliveries and results."""
    message = wire.DeliveryFrame()
    for frame in frames:
        match frame:
            case Joined():
                message.joined.CopyFrom(to_message(wire.Joined, frame))
            case Deliveries():
                found = message.deliveries.add(epoch=frame.epoch, tag=frame.tag)
                fill(found, frame, *_DELIVERIES)
                found.payloads = frame.payloads if isinstance(frame.payloads, bytes) else bytes(frame.payloads)
            case AckResult():
                message.answers.append(to_message(wire.Answer, frame))
            case AcksDurable():
                message.kept = frame.number
            case Paused():
                message.paused = frame.reason
            case Dismissed():
                message.dismissed.CopyFrom(detail_of(frame.error))
    return message


def delivery_frames(message: wire.DeliveryFrame) -> list[DeliveryFrame]:
    frames: list[DeliveryFrame] = []
    if message.HasField("joined"):
        frames.append(to_value(Joined, message.joined))
    frames += map(_deliveries, message.deliveries)
    frames += (to_value(AckResult, answer) for answer in message.answers)
    if message.HasField("kept"):
        frames.append(AcksDurable(message.kept))
    if message.HasField("paused"):
        frames.append(Paused(message.paused))
    if message.HasField("dismissed"):
        frames.append(Dismissed(error_of_detail(message.dismissed)))
    return frames


def _deliveries(message: wire.Deliveries) -> Deliveries:
    rows, given = taken(message, *_DELIVERIES), len(message.payloads)
    told = int(rows["lengths"].sum(dtype="i8"))
    if told != given:
        raise BadFrame(f"a frame of deliveries announces {told} bytes of payloads and has {given}")
    return Deliveries(epoch=message.epoch, tag=message.tag, payloads=message.payloads, **rows)
