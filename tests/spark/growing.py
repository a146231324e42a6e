"""A storage's directory whose log grows as a test tells it: for readers, where a daemon would only be in the way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from waltzd.format.checksum import crc32
from waltzd.format.layout import (
    CONTROL_NAME,
    FLAG_ASSIGNED,
    FLAG_AVAILABLE,
    ControlHeader,
    ControlStruct,
    FileHeader,
    index_name,
    initial_structs,
    segment_name,
)
from waltzd.format.record import Run, encode_run

CREATED_MS = 1_700_000_000_000
Row = tuple[int, int, int, int, int, bytes]
"""Client, generation, partition and number of the request, header, payload."""


def run_of(first_id: int, rows: Sequence[tuple[Any, ...]], wrong: Collection[int] = ()) -> Run:
    """Of rows like `Row`. `wrong`: rows whose client computed another checksum than its payload has."""
    payloads = [row[5] for row in rows]
    crcs = [crc32(payload) ^ (number in wrong) for number, payload in enumerate(payloads)]
    return encode_run(
        first_id,
        requests=np.array([row[:4] for row in rows], np.int32).reshape(-1, 4),
        headers=np.array([row[4] for row in rows], np.int32),
        lengths=np.array([len(payload) for payload in payloads], np.int64),
        data_crcs=np.array(crcs, np.uint32),
        payloads=b"".join(payloads),
    )


class GrowingStorage:
    """A directory as a storage of the original leaves it behind, whose partitions get records when a test says so. What was
    appended is committed."""

    def __init__(self, directory: Path, *, key: UUID, partitions: int, assigned: Iterable[int]) -> None:
        self.directory = directory
        self.key = key
        self.ends: dict[int, int] = {}
        self._number = partitions
        directory.mkdir()
        for partition in assigned:
            self.assign(partition)

    def assign(self, partition: int) -> None:
        (self.directory / str(partition)).mkdir()
        self.ends[partition] = 0
        self.append(partition, [])

    def append(self, partition: int, payloads: Sequence[bytes], *, headers: Sequence[int] | None = None) -> None:
        """In a segment of its own."""
        first_id, count = self.ends[partition], len(payloads)
        pairs = zip(headers or [0] * count, payloads, strict=True)
        run = run_of(first_id, [(0, 0, 0, first_id + at, *pair) for at, pair in enumerate(pairs)])
        header = FileHeader(created_ms=CREATED_MS, key=self.key, partition=partition, first_id=first_id).encode()
        place = self.directory / str(partition)
        (place / segment_name(first_id)).write_bytes(header + bytes(run.data))
        (place / index_name(first_id)).write_bytes(header + (run.bounds[:-1] + len(header)).astype(">i8").tobytes())
        self.ends[partition] += count
        self.commit()

    def commit(self) -> None:
        """The control file, in one step, so that nobody reads half of it."""
        out = [ControlHeader(created_ms=CREATED_MS, key=self.key, partitions=self._number).encode()]
        for partition in range(self._number):
            first, second = initial_structs()
            if partition in self.ends:
                mark = self.ends[partition] - 1
                flags = FLAG_AVAILABLE | FLAG_ASSIGNED
                second = ControlStruct(session=1, low_mark=mark, local_low_mark=mark, flags=flags, sequence=1)
            out += [partition.to_bytes(4, "big"), first.encode(), second.encode()]
        new = self.directory / f"{CONTROL_NAME}.new"
        new.write_bytes(b"".join(out))
        new.rename(self.directory / CONTROL_NAME)
