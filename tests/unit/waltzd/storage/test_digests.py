"""Digests of a replica on a simulated disk: what they cover, where they end, and whose turns they take."""

from __future__ import annotations

import asyncio

import pytest

from tests.simulation.sample import ROOT, begin, blank_disk, expected, open_directory, run_for
from tests.unit.keeping import with_calls
from waltzd.disk.simulated import SimDisk
from waltzd.errors import BadArgument, BeyondLog, NoSuchPartition, WaltzError
from waltzd.errors.operations import PartitionDamaged, TooManyCallers
from waltzd.format.layout import segment_name
from waltzd.format.record import Digest, Hashing
from waltzd.storage.calls import StorageCalls


def filled(records: int, committed: int) -> SimDisk:
    disk = blank_disk()
    directory = open_directory(disk)
    partition = begin(directory, 0, records=records)
    partition.append(1, [run_for(0, records - 1, 1)], committed)
    directory.close()
    return disk


def right(first_id: int, last_id: int) -> Digest:
    sums = Hashing(first_id)
    for id_ in range(first_id, last_id + 1):
        sums.add(run_for(0, id_, 1))
    found = sums.digest()
    assert found.bytes == sum(map(len, expected(0, last_id + 1)[first_id:]))
    return found


def test_a_digest_does_not_depend_on_how_the_records_were_cut() -> None:
    whole = Hashing(0)
    whole.add(run_for(0, 0, 12))
    assert whole.digest() == right(0, 11)
    assert whole.digest().records == 12


def test_ranges_over_many_segments_as_far_as_they_are_committed() -> None:
    async def test(calls: StorageCalls, _: list[str]) -> None:
        for first_id, last_id in ((0, 30), (0, 0), (7, 19), (30, 30)):
            assert await calls.digest(0, first_id, last_id) == right(first_id, last_id)
        assert await calls.digest(0, 25, 39) == right(25, 30), "what is not known to be committed is not spoken of"
        with pytest.raises(BeyondLog):
            await calls.digest(0, 31, 39)

    with_calls(filled(40, 30), test)


def test_an_answer_is_bounded_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzd.storage.calls.ANSWER_BYTES_MAX", 500)

    async def test(calls: StorageCalls, _: list[str]) -> None:
        at, ends = 0, []
        while at <= 39:
            found = await calls.digest(0, at, 39)
            assert found == right(at, found.last_id)
            at = found.last_id + 1
            ends.append(found.bytes)
        assert len(ends) > 3
        assert min(ends[:-1]) >= 500

    with_calls(filled(40, 39), test)


def test_a_slow_disk_ends_an_answer_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzd.storage.calls.ANSWER_SECONDS_MAX", 0.0)

    async def test(calls: StorageCalls, _: list[str]) -> None:
        found = await calls.digest(0, 0, 39)
        assert 0 <= found.last_id < 39
        assert found == right(0, found.last_id), "at least one piece was done"

    with_calls(filled(40, 39), test)


def test_it_ends_in_front_of_damage() -> None:
    disk = filled(40, 39)
    path = f"{ROOT}/0/{segment_name(0)}"
    disk.corrupt(path, disk.size(path) - 10, b"\xa5")

    async def test(calls: StorageCalls, _: list[str]) -> None:
        bad = calls.directory.partition(0).sealed_segments()[0][1]
        assert await calls.digest(0, 0, 39) == right(0, bad - 1)
        with pytest.raises(PartitionDamaged):
            await calls.digest(0, bad, 39)
        assert await calls.digest(0, bad + 1, 39) == right(bad + 1, 39)

    with_calls(disk, test)


@pytest.mark.parametrize(
    ("number", "first_id", "last_id", "kind"),
    [(0, 5, 4, BadArgument), (0, -1, 4, BadArgument), (2, 0, 1, NoSuchPartition), (9, 0, 1, WaltzError)],
)
def test_what_makes_no_sense(number: int, first_id: int, last_id: int, kind: type[WaltzError]) -> None:
    async def test(calls: StorageCalls, _: list[str]) -> None:
        with pytest.raises(kind):
            await calls.digest(number, first_id, last_id)

    with_calls(filled(10, 9), test)


def test_it_runs_on_threads_for_readers_a_piece_at_a_time_and_takes_a_readers_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(calls: StorageCalls, turns: list[str]) -> None:
        turns.clear()
        digest = asyncio.create_task(calls.digest(0, 0, 39))
        await calls.digest(0, 0, 3)
        await digest
        assert turns.count("Hashing.add") >= 3
        monkeypatch.setattr("waltzd.storage.calls.READERS_MAX", 0)
        with pytest.raises(TooManyCallers):
            await calls.digest(0, 0, 3)

    with_calls(filled(40, 39), test)
