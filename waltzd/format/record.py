"""Records, a run at a time.

A run is whole records back to back in one buffer, with consecutive transaction ids. It is built once, from columns, and
the same bytes go to the replicas, to the disk and to the readers. No object is made for a record, except `Record` for dumps
and messages. Pure: no file, no clock.

    0  transaction id  8      24 header         4      36     payload  L
    8  request id     16      28 payload length 4      36 + L CRC-32 of everything before it in this record
    (client, generation, partition, sequence: 4 each)  32 CRC-32 of the payload, as the client computed it

Checks have a fast way (columns, `waltzd.format.checksum`) and a slow way (record by record), which tests compare with the
fast one, and which takes less time for a few records.

A `Digest` is a hash of consecutive records: replicas are compared by it without sending what they hold.

The hash covers the bytes of whole records back to back. A record contains its own id and length, so equal hashes mean equal
records, whatever the sizes of the pieces in which they were hashed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waltzd.disk.seam import Buffer
from waltzd.format.checksum import I64, U32, crc32, crc_of_rows, shift, shift_one, suspect_blocks

HEAD_BYTES = 36
TRAILER_BYTES = 4
OVERHEAD_BYTES = HEAD_BYTES + TRAILER_BYTES
FEW_RECORDS = 64
"""Number of records below which a check in a loop (0.6 µs each) takes less time than thirty calls of numpy (45 µs)."""
FEW_TO_ENCODE = 32
FEW_BYTES_TO_ENCODE = 64 << 10
"""Limits below which records are encoded in a loop: 2 µs each, and the CRC of zeros for each payload, instead of 80 µs."""

HEAD = np.dtype(
    [
        ("id", ">i8"),
        ("client", ">i4"),
        ("generation", ">i4"),
        ("partition", ">i4"),
        ("sequence", ">i4"),
        ("header", ">i4"),
        ("length", ">i4"),
        ("data_crc", ">u4"),
    ]
)
assert HEAD.itemsize == HEAD_BYTES
HeadArray: TypeAlias = NDArray[np.void]

_HEAD = struct.Struct(">qiiiiiiI")
_ID_AND_LENGTH = struct.Struct(">q20xi")
_LENGTH = struct.Struct(">28xi")
_CRC = struct.Struct(">I")
_SENT_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, kw_only=True)
class RequestId:
    """The request of a client that led to a transaction; never used twice."""

    client: int
    generation: int
    partition: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.client}:{self.generation}:{self.partition}:{self.sequence}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One decoded record, for people to read."""

    id: int
    request: RequestId
    header: int
    length: int
    data_crc: int
    payload: bytes
    crc: int


@dataclass(frozen=True, eq=False)
class LockColumns:
    """The locks of transactions: `counts` has a row for each transaction, `ids` and `modes` a row for each lock."""

    counts: I64
    ids: NDArray[np.uint64]
    modes: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.counts)

    def part(self, start: int, stop: int) -> LockColumns:
        first, last = int(self.counts[:start].sum()), int(self.counts[:stop].sum())
        return LockColumns(self.counts[start:stop], self.ids[first:last], self.modes[first:last])


def no_locks(records: int) -> LockColumns:
    return LockColumns(np.zeros(records, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.uint8))


def join_locks(found: Sequence[LockColumns]) -> LockColumns:
    return LockColumns(
        np.concatenate([one.counts for one in found]),
        np.concatenate([one.ids for one in found]),
        np.concatenate([one.modes for one in found]),
    )


NO_TIME = -1
"""Time of a transaction of format 0, in a column with transactions that have a time."""


@dataclass(frozen=True, eq=False)
class Run:
    """Whole records with the ids `first_id`, `first_id + 1`, …; record i is `data[bounds[i]:bounds[i + 1]]`. Times, groups
    and locks of the records are columns, None if they are unknown."""

    first_id: int
    data: memoryview
    bounds: I64
    lead: int = 0
    """Number of bytes from the start of the batch to the first of these records, in format 1; else 0."""
    times: I64 | None = None
    """Microseconds since 1970, or `NO_TIME`; None if no record has a time."""
    follows: NDArray[np.bool_] | None = None
    """Whether each record continues the group of the record before it; None if no record does."""
    locks: LockColumns | None = None
    """Locks of the records; None if they were not requested."""
    goes_on: bool = False
    """Whether the group of the last record continues after this run. An application that applies whole groups has to
    wait."""

    def __post_init__(self) -> None:
        assert len(self.bounds) > 0
        assert self.bounds[0] == 0
        assert self.bounds[-1] == len(self.data)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def last_id(self) -> int:
        return self.first_id + len(self) - 1

    @cached_property
    def sent_lengths(self) -> bytes:
        """The lengths of the payloads, encoded as they are sent to replicas."""
        if len(self) == 1:
            return sent_length(len(self.data))
        return (np.diff(self.bounds) - OVERHEAD_BYTES).astype(">u4").tobytes()

    def part(self, start: int, stop: int) -> Run:
        """Return the records number `start` to `stop - 1`, without copying."""
        bounds = self.bounds[start : stop + 1]
        first = int(bounds[0])
        return Run(
            self.first_id + start,
            self.data[first : int(bounds[-1])],
            bounds - first,
            lead=self.lead + first if self.lead else 0,
            times=None if self.times is None else self.times[start:stop],
            follows=None if self.follows is None else self.follows[start:stop],
            locks=None if self.locks is None else self.locks.part(start, stop),
            goes_on=self._goes_on(stop),
        )

    def _goes_on(self, stop: int) -> bool:
        """Return whether a part that ends in front of record number `stop` ends inside a group."""
        if stop >= len(self):
            return self.goes_on
        return self.follows is not None and bool(self.follows[stop])

    def record(self, number: int) -> Record:
        start, stop = int(self.bounds[number]), int(self.bounds[number + 1])
        return decode_record(self.data[start:stop])


def sent_length(record_bytes: int) -> bytes:
    """Encode the length of the payload of one record, as it is sent to replicas."""
    return _SENT_LENGTH.pack(record_bytes - OVERHEAD_BYTES)


def empty_run(first_id: int) -> Run:
    return Run(first_id, memoryview(b""), np.zeros(1, np.int64))


def join_runs(runs: Sequence[Run]) -> Run:
    """Join consecutive runs. A single run is returned without copying."""
    assert runs
    if len(runs) == 1:
        return runs[0]
    bounds, at = [np.zeros(1, np.int64)], 0
    for run in runs:
        bounds.append(run.bounds[1:] + at)
        at += len(run.data)
    return Run(
        runs[0].first_id,
        memoryview(b"".join([run.data for run in runs])),
        np.concatenate(bounds),
        times=_joined([run.times for run in runs], runs, NO_TIME),
        follows=_joined([run.follows for run in runs], runs, False),
        locks=_joined_locks(runs),
        goes_on=runs[-1].goes_on,
    )


def _joined(columns: Sequence[NDArray[Any] | None], runs: Sequence[Run], default: int) -> NDArray[Any] | None:
    """Join a column of all runs. Records of a run without the column get `default`; None if no run has it."""
    sample = next((column for column in columns if column is not None), None)
    if sample is None:
        return None
    return np.concatenate(
        [
            np.full(len(run), default, sample.dtype) if column is None else column
            for column, run in zip(columns, runs, strict=True)
        ]
    )


def _joined_locks(runs: Sequence[Run]) -> LockColumns | None:
    if all(run.locks is None for run in runs):
        return None
    return join_locks([run.locks if run.locks is not None else no_locks(len(run)) for run in runs])


def bounds_of(lengths: I64) -> I64:
    """Return where each record starts and ends, from the payload lengths."""
    if len(lengths) == 1:
        return np.array((0, int(lengths[0]) + OVERHEAD_BYTES))
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths + OVERHEAD_BYTES, out=bounds[1:])
    return bounds


# -- encoding ----------------------------------------------------------------------------------------------------------


def encode_run(
    first_id: int,
    *,
    requests: NDArray[np.int32],
    headers: NDArray[np.int32],
    lengths: I64,
    data_crcs: U32,
    payloads: Buffer,
) -> Run:
    """Encode the records that these columns describe.

    `requests` has four columns (client, generation, partition, sequence), `payloads` all payloads back to back. The record
    checksums follow from the head and the client's checksum of the payload. So the payload is not read, and a payload that
    was damaged on its way still fails its checksum."""
    count = len(lengths)
    assert requests.shape == (count, 4)
    assert len(headers) == len(data_crcs) == count
    if count == 0:
        return empty_run(first_id)
    if count < FEW_TO_ENCODE and len(payloads) <= FEW_BYTES_TO_ENCODE:
        return _encode_one_by_one(first_id, requests, headers, lengths, data_crcs, payloads)
    heads = np.zeros(count, HEAD)
    heads["id"] = np.arange(first_id, first_id + count)
    for column, name in enumerate(("client", "generation", "partition", "sequence")):
        heads[name] = requests[:, column]
    heads["header"], heads["length"], heads["data_crc"] = headers, lengths, data_crcs
    rows = heads.view(np.uint8).reshape(count, HEAD_BYTES)
    crcs = shift(crc_of_rows(rows), lengths) ^ data_crcs
    seams = np.zeros((count + 1, OVERHEAD_BYTES), np.uint8)  # between two payloads: trailer of one, head of the next
    seams[1:, :TRAILER_BYTES] = crcs.astype(">u4").view(np.uint8).reshape(count, TRAILER_BYTES)
    seams[:-1, TRAILER_BYTES:] = rows
    seam_bytes = seams.tobytes()
    pieces: list[Buffer] = [b""] * (2 * count + 1)
    pieces[0] = seam_bytes[TRAILER_BYTES:OVERHEAD_BYTES]
    view = memoryview(payloads)
    at = 0
    for i, length in enumerate(lengths.tolist()):
        pieces[2 * i + 1] = view[at : at + length]
        pieces[2 * i + 2] = seam_bytes[OVERHEAD_BYTES * (i + 1) : OVERHEAD_BYTES * (i + 2)]
        at += length
    assert at == len(view)
    pieces[-1] = pieces[-1][:TRAILER_BYTES]
    return Run(first_id, memoryview(b"".join(pieces)), bounds_of(lengths))


def _encode_one_by_one(
    first_id: int, requests: NDArray[np.int32], headers: NDArray[np.int32], lengths: I64, data_crcs: U32, payloads: Buffer
) -> Run:
    """Do the same as the rest of `encode_run` in a loop."""
    view, at = memoryview(payloads), 0
    pieces: list[Buffer] = []
    bounds = [0]
    rows = zip(requests.tolist(), headers.tolist(), lengths.tolist(), data_crcs.tolist(), strict=True)
    for id_, (request, header, length, data_crc) in enumerate(rows, first_id):
        pieces += _pieces(id_, request, header, data_crc, view[at : at + length])
        at += length
        bounds.append(at + len(bounds) * OVERHEAD_BYTES)
    assert at == len(view)
    return Run(first_id, memoryview(b"".join(pieces)), np.array(bounds, np.int64))


def _pieces(id_: int, request: Sequence[int], header: int, data_crc: int, payload: Buffer) -> tuple[Buffer, Buffer, Buffer]:
    head = _HEAD.pack(id_, *request, header, len(payload), data_crc)
    return head, payload, _CRC.pack(shift_one(crc32(head), len(payload)) ^ data_crc)


def encode_record(id_: int, request: Sequence[int], header: int, data_crc: int, payload: Buffer) -> Run:
    """Do as `encode_run` for one record, without columns."""
    data = b"".join(_pieces(id_, request, header, data_crc, payload))
    return Run(id_, memoryview(data), np.array((0, len(data))))


def encode_payloads(first_id: int, payloads: Sequence[bytes], *, partition: int = 0, client: int = 0) -> Run:
    """Encode payloads with made-up request ids, for tests, benchmarks and examples."""
    count = len(payloads)
    requests = np.zeros((count, 4), np.int32)
    requests[:, 0], requests[:, 2] = client, partition
    requests[:, 3] = np.arange(first_id, first_id + count) & 0x7FFFFFFF
    return encode_run(
        first_id,
        requests=requests,
        headers=np.zeros(count, np.int32),
        lengths=np.fromiter(map(len, payloads), np.int64, count),
        data_crcs=np.fromiter(map(crc32, payloads), np.uint32, count),
        payloads=b"".join(payloads),
    )


# -- decoding ----------------------------------------------------------------------------------------------------------


def decode_record(raw: Buffer) -> Record:
    id_, client, generation, partition, sequence, header, length, data_crc = _HEAD.unpack_from(raw)
    (crc,) = _CRC.unpack_from(raw, len(raw) - TRAILER_BYTES)
    return Record(
        id=id_,
        request=RequestId(client=client, generation=generation, partition=partition, sequence=sequence),
        header=header,
        length=length,
        data_crc=data_crc,
        payload=bytes(raw[HEAD_BYTES : len(raw) - TRAILER_BYTES]),
        crc=crc,
    )


def id_and_length(raw: Buffer, offset: int = 0) -> tuple[int, int]:
    id_, length = _ID_AND_LENGTH.unpack_from(raw, offset)
    return id_, length


def walk(data: Buffer) -> I64:
    """Follow the lengths from the start of `data`, and return the bounds of whole records.

    Stop in front of a record that does not fit, or whose length is negative. Nothing else is checked."""
    out: list[int] = [0]
    append, length_at = out.append, _LENGTH.unpack_from
    size = len(data)
    last_start = size - OVERHEAD_BYTES
    at = 0
    while at <= last_start:
        (length,) = length_at(data, at)
        if length < 0:
            break
        at += length + OVERHEAD_BYTES
        append(at)
    if out[-1] > size:
        out.pop()
    return np.array(out, np.int64)


def heads(run: Run) -> HeadArray:
    """Return the heads of all records as one structured array."""
    if len(run) == 0:
        return np.zeros(0, HEAD)
    every_offset = np.ndarray((len(run.data) - HEAD_BYTES + 1,), f"V{HEAD_BYTES}", buffer=run.data, strides=(1,))
    return every_offset[run.bounds[:-1]].view(HEAD)


def trailers(run: Run) -> U32:
    """Return the stored checksums of all records."""
    if len(run) == 0:
        return np.zeros(0, np.uint32)
    every_offset = np.ndarray((len(run.data) - TRAILER_BYTES + 1,), ">u4", buffer=run.data, strides=(1,))
    return every_offset[run.bounds[1:] - TRAILER_BYTES].astype(np.uint32)


def first_bad(run: Run) -> int | None:
    """Return the number of the first record whose id, length or checksum is wrong; None if all are right."""
    count = len(run)
    if count < FEW_RECORDS:
        return first_bad_one_by_one(run, 0, count)
    head = heads(run)
    right = head["id"] == np.arange(run.first_id, run.first_id + count)
    right &= head["length"] == np.diff(run.bounds) - OVERHEAD_BYTES
    limit = count if right.all() else int(np.argmin(right))
    for first, last in suspect_blocks(run.data, run.bounds[1:], trailers(run)):
        if first >= limit:
            break
        found = first_bad_one_by_one(run, first, last + 1)
        if found is not None:
            return min(found, limit)
    return None if limit == count else limit


def first_bad_one_by_one(run: Run, start: int, stop: int) -> int | None:
    """Check the records number `start` to `stop - 1` one by one, with the result of `first_bad`."""
    data = run.data
    at = int(run.bounds[start])
    for number, end in enumerate(run.bounds[start + 1 : stop + 1].tolist(), start):
        if not is_sound_record(data, at, end, run.first_id + number):
            return number
        at = end
    return None


def is_sound_record(data: memoryview, start: int, end: int, id_: int) -> bool:
    """Return whether exactly one record lies between `start` and `end`, with this id and a right checksum."""
    if end - start < OVERHEAD_BYTES or _ID_AND_LENGTH.unpack_from(data, start) != (id_, end - start - OVERHEAD_BYTES):
        return False
    found: bool = crc32(data[start : end - TRAILER_BYTES]) == _CRC.unpack_from(data, end - TRAILER_BYTES)[0]
    return found


def bad_payloads(run: Run) -> I64:
    """Return the numbers of records whose payload fails the client's checksum. The record checksums must be right.

    A sound record can hold a payload that was damaged before the record was encoded. The checksum of the payload follows
    from those of record and head, so the payload is not read again."""
    found = heads(run)
    implied = shift(crc_of_rows(found.view(np.uint8).reshape(-1, HEAD_BYTES)), found["length"].astype(np.int64))
    return np.flatnonzero((implied ^ found["data_crc"].astype(np.uint32)) != trailers(run))


def likely_starts(data: Buffer, low_id: int, high_id: int, room: int) -> list[tuple[int, int, int]]:
    """Return each offset at which a record with an id of `low_id` to `high_id` could start: (offset, id, payload length).

    `room`: number of bytes from the start of `data` to the end of the file. Only a checksum proves an offset."""
    count = len(data) - HEAD_BYTES + 1
    if count <= 0:
        return []
    ids = np.ndarray((count,), ">i8", buffer=data, strides=(1,))
    at = np.flatnonzero((ids >= low_id) & (ids <= high_id))
    lengths = np.ndarray((len(data) - 3,), ">i4", buffer=data, strides=(1,))[at + 28].astype(np.int64)
    fits = (lengths >= 0) & (at + lengths + OVERHEAD_BYTES <= room)
    at, lengths = at[fits], lengths[fits]
    return list(zip(at.tolist(), ids[at].astype(np.int64).tolist(), lengths.tolist(), strict=True))


HASH_BYTES = 16
TAIL_RECORDS = 16
"""Number of records at the end of a log of format 0 that are compared to find out whether two logs end alike."""


@dataclass(frozen=True, kw_only=True)
class Digest:
    first_id: int
    last_id: int
    """Last id that was hashed: lower than the requested one if the digest was stopped."""
    hash: bytes
    bytes: int

    @property
    def records(self) -> int:
        return self.last_id - self.first_id + 1


class Hashing:
    """Builder of a `Digest`, which takes consecutive runs."""

    def __init__(self, first_id: int) -> None:
        self._first_id = self.next_id = first_id
        self._hash = blake2b(digest_size=HASH_BYTES)
        self.bytes = 0

    def add(self, run: Run) -> None:
        assert run.first_id == self.next_id, f"records start at id {run.first_id}; {self.next_id} is next"
        self._hash.update(run.data)
        self.bytes += len(run.data)
        self.next_id = run.last_id + 1

    def digest(self) -> Digest:
        return Digest(first_id=self._first_id, last_id=self.next_id - 1, hash=self._hash.digest(), bytes=self.bytes)


def tail_hash(runs: Iterable[Run]) -> str:
    """Return the hash of consecutive runs in hexadecimal; "" without records."""
    hashing: Hashing | None = None
    for run in runs:
        hashing = hashing or Hashing(run.first_id)
        hashing.add(run)
    return "" if hashing is None else hashing.digest().hash.hex()
