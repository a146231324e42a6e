"""A storage's directory whose log grows as a test tells it: for readers, where a daemon would only be in the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
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
from waltzd.format.record import encode_run

CREATED_MS = 1_700_000_000_000


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
        requests = np.zeros((count, 4), np.int32)
        requests[:, 3] = np.arange(first_id, first_id + count)
        run = encode_run(
            first_id,
            requests=requests,
            headers=np.array(headers if headers is not None else [0] * count, np.int32),
            lengths=np.fromiter(map(len, payloads), np.int64, count),
            data_crcs=np.fromiter(map(crc32, payloads), np.uint32, count),
            payloads=b"".join(payloads),
        )
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
