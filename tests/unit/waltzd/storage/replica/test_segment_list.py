"""The segments that a replica keeps open, for readers beside its queue."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.batch_log import BatchLog
from tests.simulation.sample import KEY
from tests.unit.keeping import begun
from waltzd.disk.real import RealDisk
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import PartitionSettings
from waltzd.storage.replica.segment import Segment
from waltzd.storage.replica.segment_list import OPEN_SEGMENTS_MAX, SegmentList


def fill(partition: Partition) -> SegmentList:
    log = BatchLog(random.Random(1), segment_bytes_max=2500)
    for batch in log.draw(60):
        partition.append(3, [batch], -1)
    segments = partition._segments
    assert len(segments.first_ids) > 2 * OPEN_SEGMENTS_MAX
    return segments


def test_readers_on_several_threads_share_the_open_segments(tmp_path: Path) -> None:
    """A file that is closed lets another thread run, which must not find the list half changed."""
    directory = Directory.open(RealDisk(), str(tmp_path), key=KEY, partitions=1, settings=PartitionSettings())
    partition = directory.create_partition(0)
    partition.open_session(3)
    partition.set_low_mark(3, -1)
    segments = fill(partition)

    def read(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(4000):
            first_id = chance.choice(segments.first_ids)
            assert segments.segment_with(first_id)[0].first_id == first_id

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(read, range(6)))
    finally:
        sys.setswitchinterval(before)
    assert len(segments._sealed[1]) <= OPEN_SEGMENTS_MAX
    directory.close()


def test_a_segment_that_is_replaced_while_a_reader_opens_it_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is gone: later readers would read what was cut or damaged."""
    segments = fill(begun()[2])
    first_id, right_open = segments.first_ids[1], Segment.open
    segments.forget()

    def open_slowly(*arguments: Any, **named: Any) -> Segment:
        found = right_open(*arguments, **named)
        segments.forget()  # the queue replaces the file meanwhile
        return found

    monkeypatch.setattr(Segment, "open", open_slowly)
    old, _ = segments.segment_with(first_id)
    monkeypatch.setattr(Segment, "open", right_open)
    new, _ = segments.segment_with(first_id)
    assert new is not old
    assert segments.segment_with(first_id)[0] is new
