"""The order and the pace of a scrub, without files and without a clock."""

from __future__ import annotations

import json

import pytest

from waltzd.disk.simulated import SimDisk
from waltzd.storage.scrub import STATE_BYTES_MAX, Round, Sealed, kept, pause_seconds

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
