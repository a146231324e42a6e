"""The work that writes missing key indexes: one at a time, with pauses, and with no memory of what is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.waltzd.storage.replica import test_key_indexes
from waltzd.disk.simulated import Fault
from waltzd.errors.operations import FlushFailed, ReadFailed
from waltzd.storage.scrub import BYTES_PER_SECOND, INDEX_SECONDS, KeyIndexer


class FakePartition:
    """A replica whose sealed segments have no key indexes."""

    def __init__(self, number: int, *missing: int, damaged: int = -1) -> None:
        self.number = number
        self.missing = list(missing)
        self.damaged = damaged
        self.missed: list[int] = []
        self.written: list[int] = []

    def missing_keys(self) -> list[int]:
        return list(self.missing)

    def unwritten_keys(self) -> list[int]:
        return self.missed

    def segment_bytes(self, first_id: int) -> int:
        return first_id * BYTES_PER_SECOND

    def write_key(self, first_id: int) -> None:
        self.written.append(first_id)
        if first_id != self.damaged:
            self.missing.remove(first_id)


async def run(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def indexer_of(*partitions: FakePartition) -> KeyIndexer:
    replicas: Any = SimpleNamespace(directory=SimpleNamespace(partitions=lambda: partitions))
    return KeyIndexer(replicas, run, cast(Any, run))


def test_missing_indexes_are_written_one_at_a_time_with_a_pause_for_their_bytes() -> None:
    one, two = FakePartition(0, 0, 3, 9), FakePartition(1, 7)
    indexer = indexer_of(one, two)
    pauses = [asyncio.run(indexer.step()) for _ in range(5)]
    assert pauses == [9.0, 3.0, 0.0, 7.0, INDEX_SECONDS]
    assert (one.written, two.written) == ([9, 3, 0], [7]), "the newest first"


def test_a_segment_that_can_have_no_index_is_tried_once_and_forgotten_when_it_is_gone() -> None:
    one = FakePartition(0, 3, 9, damaged=9)
    indexer = indexer_of(one)
    assert [asyncio.run(indexer.step()) for _ in range(4)] == [9.0, 3.0, INDEX_SECONDS, INDEX_SECONDS]
    assert one.written == [9, 3]
    assert list(indexer._tried) == [(0, 9)], "what has an index is forgotten"
    one.missed = [9]
    asyncio.run(indexer.index_missed(cast(Any, one)))
    assert one.written == [9, 3, 9], "a question tries it again"
    one.missing = []
    asyncio.run(indexer.step())
    assert not indexer._tried


@pytest.mark.parametrize("fault", Fault)
def test_a_segment_that_cannot_be_read_or_written_ends_nothing(fault: Fault) -> None:
    """Each operation of the disk fails in turn. A bad sector in an old segment ended the storage, at each start again."""
    disk, partition, log = test_key_indexes.written()
    [newest, *_] = reversed(partition.missing_keys())
    steps: list[str] = []
    disk.observer = lambda kind, _: steps.append(kind)
    asyncio.run(indexer_of(cast(Any, partition)).step())
    failed = 0
    for at, kind in enumerate(steps, start=1):
        disk, partition, log = test_key_indexes.written()
        indexer = indexer_of(cast(Any, partition))
        disk.faults[disk.steps + at] = fault
        try:
            asyncio.run(indexer.step())
        except FlushFailed:
            assert kind == "write", "only bytes that may be lost end a storage"
            continue
        failed += newest in partition.missing_keys()
        while asyncio.run(indexer.step()) != INDEX_SECONDS:
            pass
        assert set(partition.missing_keys()) <= {newest}, "the others have theirs"
        test_key_indexes.answers(partition, log)
        asyncio.run(indexer.index_missed(partition))
        assert partition.missing_keys() == [], "a question tries it again"
    assert failed > 0


def test_an_index_that_fails_costs_no_question_its_answer() -> None:
    one = FakePartition(0, 3)
    one.missed = [3]

    def fail(first_id: int) -> None:
        raise ReadFailed(f"segment {first_id}")

    one.write_key = fail  # type: ignore[method-assign]
    asyncio.run(indexer_of(one).index_missed(cast(Any, one)))
