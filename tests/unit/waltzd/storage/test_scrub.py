"""The order and the pace of a scrub, without files and without a clock.

The work that writes missing key indexes: one at a time, with pauses, and with no memory of what is gone.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.simulation.sample import begin, open_directory
from tests.unit.keeping import begun
from tests.unit.waltzd.storage.replica import test_key_indexes
from waltzd.disk.real import translate
from waltzd.disk.simulated import Fault, SimDisk, SimFile
from waltzd.errors.operations import FlushFailed, NoPermission, ReadFailed
from waltzd.format.layout import segment_name
from waltzd.storage.scrub import (
    BYTES_PER_SECOND,
    INDEX_SECONDS,
    LOOK_SECONDS,
    STATE_BYTES_MAX,
    KeyIndexer,
    Round,
    Scrub,
    Sealed,
    kept,
    pause_seconds,
)

WEEK = 7 * 86_400.0


def segments(*places: tuple[int, int], size: int = 64) -> list[Sealed]:
    return [Sealed(partition, first_id, first_id + 10, size) for partition, first_id in places]


def visited(begun: Round, sealed: list[Sealed], count: int) -> tuple[Round, list[tuple[int, int]]]:
    found: list[tuple[int, int]] = []
    for now in range(count):
        begun, segment = begun.next(sealed, 1000 + now)
        assert segment is not None
        begun = begun.with_read(segment)
        found.append((segment.partition, segment.first_id))
    return begun, found


def test_a_round_reads_each_segment_once_from_the_oldest_on_and_the_next_round_begins() -> None:
    places = ((0, 0), (0, 10), (2, 0), (2, 10), (2, 20))
    begun, found = visited(Round(), segments(*reversed(places)), 7)
    assert found == [*places, *places[:2]]
    assert (begun.began_ms, begun.complete_since_ms) == (1005, 1000)


def test_what_is_sealed_behind_the_place_of_the_round_is_read_in_it_and_the_rest_in_the_next() -> None:
    begun, _ = visited(Round(), segments((1, 0), (1, 10)), 1)
    more = segments((0, 0), (1, 0), (1, 10), (1, 20))
    assert visited(begun, more, 3)[1] == [(1, 10), (1, 20), (0, 0)]


def test_segments_that_were_trimmed_meanwhile_are_passed_over() -> None:
    begun, _ = visited(Round(), segments((1, 0), (1, 10), (1, 20)), 2)
    assert visited(begun, segments((1, 20)), 1)[1] == [(1, 20)]


def test_without_sealed_segments_nothing_is_unread() -> None:
    begun, segment = Round().next([], 1000)
    assert segment is None
    begun, segment = begun.next([], 2000)
    assert (segment, begun.complete_since_ms) == (None, 1000)


def test_a_clock_that_went_back_begins_a_round() -> None:
    begun, _ = visited(Round(), segments((0, 0), (0, 10)), 1)
    again, segment = begun.next(segments((0, 0), (0, 10)), 5)
    assert segment is not None
    assert (segment.first_id, again.began_ms, again.complete_since_ms) == (0, 5, 0)


@pytest.mark.parametrize("sizes", [[64], [1, 2, 3], [64 << 20] * 1000, [1 << 40, 5]])
def test_a_round_takes_one_period(sizes: list[int]) -> None:
    assert sum(pause_seconds(size, sum(sizes), WEEK) for size in sizes) == pytest.approx(WEEK)


def test_a_segment_that_was_trimmed_after_it_was_read_delays_nothing_beyond_a_period() -> None:
    assert pause_seconds(64, 0, WEEK) == pause_seconds(64, 10, WEEK) == WEEK


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'{"began_ms": "x"}',
        b'{"other": 1}',
        json.dumps({"began_ms": None}).encode(),
        b"\xff",
        b"9" * 2000,
    ],
)
def test_a_file_that_cannot_be_understood_begins_a_round(content: bytes) -> None:
    disk = SimDisk(1)
    disk.create("scrub.json").write(0, content)
    assert kept(disk, "scrub.json") == Round()
    assert len(content) <= 2 * STATE_BYTES_MAX


def test_without_a_file_a_round_begins() -> None:
    assert kept(SimDisk(1), "scrub.json") == Round()


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


def test_a_storage_that_can_open_no_file_goes_on_and_has_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at the disk from time to time ended the process as soon as all descriptors were in use."""
    disk, directory, partition = begun(20)
    replicas: Any = SimpleNamespace(directory=directory, queue_of=lambda number: None)
    scrub = Scrub(replicas, disk, run, period_seconds=WEEK, clock=disk.now_ms)

    def refuse(path: str) -> Any:
        raise translate(OSError(errno.EMFILE, "x"), f"opening {path}")

    with monkeypatch.context() as patched:
        for name in ("inode", "list", "names"):
            patched.setattr(disk, name, refuse)
        directory.check_in_place()
        assert asyncio.run(KeyIndexer(replicas, run, cast(Any, run)).step()) == INDEX_SECONDS
        assert asyncio.run(scrub.step()) == LOOK_SECONDS
        assert scrub.status().age_ms is None, "no round is complete"
    asyncio.run(scrub.step())
    assert scrub.round.partition == partition.number


def test_a_replica_that_is_removed_between_two_looks_ends_nothing() -> None:
    """Both look at one replica after the other, and wait for the thread in between: a replica that was moved away meanwhile
    has no directory any more. That ended the storage."""
    disk, directory, partition = begun(20)
    other = begin(directory, 1, records=20)
    replicas: Any = SimpleNamespace(
        directory=SimpleNamespace(path=directory.path, partitions=lambda: [partition, other]), queue_of=lambda number: None
    )
    directory.remove_partition(0, delete_files=True)
    assert asyncio.run(KeyIndexer(replicas, run, cast(Any, run)).step()) == INDEX_SECONDS
    scrub = Scrub(replicas, disk, run, period_seconds=WEEK, clock=disk.now_ms)
    assert asyncio.run(scrub.step()) > 0
    assert scrub.round.partition == 1


def test_a_segment_file_that_may_not_be_opened_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody had copied it back as root. The storage ended by a mistake in Waltz itself, at each start again."""
    disk, partition, _ = test_key_indexes.written()
    missing = partition.missing_keys()
    disk.kill()
    partition = open_directory(disk).partition(0)
    path = f"{partition.directory}/{segment_name(missing[0])}"
    open_ = disk.open

    def refuse(name: str, *, write: bool = False) -> SimFile:
        if name == path:
            raise NoPermission(f"opening {name}")
        return open_(name, write=write)

    indexer = indexer_of(cast(Any, partition))
    with monkeypatch.context() as patched:
        patched.setattr(disk, "open", refuse)
        while asyncio.run(indexer.step()) != INDEX_SECONDS:
            continue
    assert partition.missing_keys() == missing[:1]


def test_a_directory_that_cannot_be_listed_ends_neither_the_scrub_nor_the_indexer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, directory, partition = begun(20)
    other = begin(directory, 1, records=20)
    replicas: Any = SimpleNamespace(
        directory=SimpleNamespace(path=directory.path, partitions=lambda: [partition, other]), queue_of=lambda number: None
    )
    list_ = disk.list

    def fail(path: str) -> Any:
        if path == partition.directory:
            raise ReadFailed(f"listing {path}")
        return list_(path)

    monkeypatch.setattr(disk, "list", fail)
    monkeypatch.setattr(disk, "names", lambda path: [entry.name for entry in fail(path)])
    assert asyncio.run(KeyIndexer(replicas, run, cast(Any, run)).step()) == INDEX_SECONDS
    scrub = Scrub(replicas, disk, run, period_seconds=WEEK, clock=disk.now_ms)
    assert asyncio.run(scrub.step()) > 0
    assert scrub.round.partition == 1
    assert "listing" in caplog.text
