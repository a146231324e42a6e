"""Directories whose partitions go over from format 0 to format 1, and what each transaction in them is, one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from tests.spark.growing import run_of
from waltzd.format.batch import Batch, End, Flags, encode_batch
from waltzd.format.footer import NO_HASH, FooterBuilder
from waltzd.format.index import offsets_of
from waltzd.format.layout import BATCHES, HEADER_BYTES, FileHeader, index_name, segment_name
from waltzd.format.record import LockColumns, Run
from waltzd.protocol.locks import Mode

KEY = UUID(int=77)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
START = 1_700_000_000_000_000
"""The time of the first batch."""


@dataclass(kw_only=True)
class Log:
    """One partition on its way to the disk. `rows` is the brute force: what a reader has to find."""

    directory: Path
    partition: int = 0
    key: UUID = KEY
    segment_bytes_max: int = 4000
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    end: End = field(default_factory=End)
    time: int = START
    rows: list[dict[str, Any]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    _hash: bytes = NO_HASH
    _segment: int = 0
    _builder: FooterBuilder | None = None

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def next_id(self) -> int:
        return len(self.rows)

    def drawn(self, count: int) -> list[tuple[int, int, int, int, int, bytes]]:
        pick, first = self.chance, self.next_id
        payloads = [pick.randbytes(pick.choice([0, 9, 60])) for _ in range(count)]
        return [
            (pick.randrange(5), 0, self.partition, first + at, pick.randrange(3), payload)
            for at, payload in enumerate(payloads)
        ]

    def add_plain(self, count: int) -> None:
        """A segment of format 0."""
        rows = self.drawn(count)
        run = run_of(self.next_id, rows)
        created = FileHeader(created_ms=START // 1000, key=self.key, partition=self.partition, first_id=run.first_id)
        header = created.encode()
        self._put(run.first_id, header, [run.data], header + (run.bounds[:-1] + HEADER_BYTES).astype(">i8").tobytes())
        self.rows += [self._row(row, None, None, None) for row in rows]

    def add(
        self, count: int, *, groups: Sequence[int] = (), locks: bool = True, seconds: float = 1.0, is_last: bool = False,
        pool: int = 1 << 64,
    ) -> Batch:  # fmt: skip
        """A batch. `groups`: sizes of groups, from its first record on; `is_last`: of its segment, however small it is;
        `pool`: of so many locks."""
        rows = self.drawn(count)
        run = run_of(self.next_id, rows)
        follows = np.zeros(count, np.bool_)
        firsts: list[int | None] = [None] * count
        at = 0
        for size in groups:
            follows[at + 1 : at + size] = True
            firsts[at : at + size] = [self.next_id + at if size > 1 else None] * size
            at += size
        taken = [[(self.chance.randrange(pool), self.chance.choice(list(Mode))) for _ in range(self.chance.randrange(3))]
                 if locks else [] for _ in rows]  # fmt: skip
        every = [lock for each in taken for lock in each]
        columns = LockColumns(
            np.array([len(each) for each in taken], np.int64),
            np.array([lock for lock, _ in every], np.uint64),
            np.array([mode for _, mode in every], np.uint8),
        )
        when = EPOCH + timedelta(microseconds=self.time)
        batch = self.put(run, columns, follows=follows, is_last=is_last)
        self.rows += [self._row(row, when, locks, first) for row, locks, first in zip(rows, taken, firsts, strict=True)]
        self.time += int(seconds * 1_000_000)
        return batch

    def put(self, run: Run, locks: LockColumns, *, follows: Flags | None = None, is_last: bool = False) -> Batch:
        batch = encode_batch(
            run, session=3, generation=1, committed=run.first_id - 1, time=self.time, before=self.end, locks=locks,
            follows=follows, segment_bytes_max=1 if is_last else self.segment_bytes_max,
        )  # fmt: skip
        self._write(batch)
        self.batches.append(batch)
        self.end = batch.end(self.end)
        return batch

    def _row(
        self, row: tuple[Any, ...], when: datetime | None, locks: list[tuple[int, Mode]] | None, group: int | None
    ) -> dict[str, Any]:
        signed = [{"lock": lock - (lock >> 63 << 64), "mode": mode.name} for lock, mode in locks or ()]
        return {
            "partition": self.partition, "txid": row[3], "client_id": row[0], "header": row[4], "data": row[5],
            "time": when, "locks": None if locks is None else signed, "group": group,
        }  # fmt: skip

    def _write(self, batch: Batch) -> None:
        if self._builder is None:
            self._segment = batch.first_id
            header = FileHeader(
                created_ms=batch.head.time // 1000, key=self.key, partition=self.partition, first_id=batch.first_id,
                version=BATCHES,
            ).encode()  # fmt: skip
            self._put(batch.first_id, header, [], header)
            self._builder = FooterBuilder(header)
        entries = offsets_of(self._builder.offset + batch.head.lead, batch.run).astype(">i8").tobytes()
        self._builder.add(batch.head, batch.pieces)
        self._append(segment_name(self._segment), b"".join(bytes(piece) for piece in batch.pieces))
        self._append(index_name(self._segment), entries)
        if batch.head.is_last:
            footer = self._builder.footer(self._hash)
            self._append(segment_name(self._segment), footer.encode())
            self._hash, self._builder = footer.hash, None

    def _put(self, first_id: int, header: bytes, pieces: Sequence[Any], index: bytes) -> None:
        (self.directory / segment_name(first_id)).write_bytes(b"".join([header, *map(bytes, pieces)]))
        (self.directory / index_name(first_id)).write_bytes(index)

    def _append(self, name: str, raw: bytes) -> None:
        with (self.directory / name).open("ab") as file:
            file.write(raw)


def mixed_log(directory: Path, seed: int, *, partition: int = 0, batches: int = 40, plain: bool = True) -> Log:
    """Drawn: some segments of format 0, then batches of all sizes, with locks and groups."""
    chance = random.Random(seed)
    log = Log(directory=directory, partition=partition, chance=chance)
    for _ in range(chance.randrange(1, 3) if plain else 0):
        log.add_plain(chance.randrange(1, 30))
    for _ in range(batches):
        count = chance.choice([1, 1, 1, 2, 7, 30])
        groups: list[int] = []
        while sum(groups) < count and chance.random() < 0.6:
            groups.append(chance.randrange(1, count - sum(groups) + 1))
        log.add(count, groups=groups, locks=chance.random() < 0.7, seconds=chance.choice([0, 0.5, 3]))
    return log


def microseconds(when: datetime) -> int:
    return (when - EPOCH) // timedelta(microseconds=1)
