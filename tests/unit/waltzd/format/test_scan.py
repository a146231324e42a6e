"""Reading a segment past damage: what is found behind it, and what must not be mistaken for it."""

from __future__ import annotations

from uuid import UUID

import pytest

from waltzd.disk.simulated import SimDisk, SimFile
from waltzd.format.index import offsets_of
from waltzd.format.layout import HEADER_BYTES, FileHeader
from waltzd.format.record import Run, encode_payloads
from waltzd.format.scan import Gap, Survey, Tail, TailKind, judge_tail, survey

HEADER = FileHeader(created_ms=1, key=UUID(int=1), partition=0, first_id=0)


def segment(payloads: list[bytes]) -> tuple[SimFile, SimFile, Run]:
    disk = SimDisk(0)
    data, index = disk.create("data"), disk.create("index")
    run = encode_payloads(0, payloads)
    data.write(0, HEADER.encode() + bytes(run.data))
    index.write(0, HEADER.encode() + offsets_of(HEADER_BYTES, run).astype(">i8").tobytes())
    return data, index, run


def flip(file: SimFile, offset: int) -> None:
    file.write(offset, bytes([file.read(offset, 1)[0] ^ 1]))


def test_a_whole_record_inside_a_payload_is_not_taken_for_the_next_one() -> None:
    """Somebody stores the bytes of a record with the very id that comes next; then the record around it is damaged."""
    forged = bytes(encode_payloads(3, [b"forged"]).data)
    data, index, run = segment([b"a", b"b", b"x" * 50 + forged + b"y" * 50, b"true", b"last"])
    damaged = HEADER_BYTES + int(run.bounds[2])
    want = [Gap(damaged, HEADER_BYTES + int(run.bounds[3]) - 1, 2, 2)]
    flip(data, damaged + 40)  # in the payload: the length still says where the next record is
    assert survey(data, first_id=0, end=data.size()).gaps == want
    assert survey(data, first_id=0, end=data.size(), index=index).gaps == want
    flip(data, damaged + 31)  # in the length: the index knows
    found = survey(data, first_id=0, end=data.size(), index=index)
    assert (found.gaps, found.next_id, found.tail_bytes) == (want, 5, 0)


def test_several_damaged_records_are_one_gap() -> None:
    data, index, run = segment([bytes([i]) * 30 for i in range(10)])
    for number in (3, 4, 5):
        flip(data, HEADER_BYTES + int(run.bounds[number]) + 20)
    want = [Gap(HEADER_BYTES + int(run.bounds[3]), HEADER_BYTES + int(run.bounds[6]) - 1, 3, 5)]
    for hint in (index, None):
        found = survey(data, first_id=0, end=data.size(), index=hint)
        assert (found.gaps, found.next_id, found.tail_bytes) == (want, 10, 0)


def test_an_index_that_lies_changes_nothing() -> None:
    data, index, run = segment([bytes([i]) * 30 for i in range(10)])
    flip(data, HEADER_BYTES + int(run.bounds[3]) + 20)
    honest = survey(data, first_id=0, end=data.size())
    index.write(HEADER_BYTES, b"\x00\x00\x00\x00\x00\x00\x01\x00" * 10)
    assert survey(data, first_id=0, end=data.size(), index=index) == honest
    index.write(HEADER_BYTES, b"\xff" * 80)
    assert survey(data, first_id=0, end=data.size(), index=index) == honest


@pytest.mark.parametrize(
    ("tail_bytes", "next_id", "is_last", "has_gaps", "floor", "want"),
    [
        (0, 5, True, False, 9, Tail.CLEAN),
        (7, 5, True, False, 4, Tail.TORN),
        (7, 5, True, False, 5, Tail.DAMAGED),
        (7, 5, False, False, 4, Tail.DAMAGED),
        (7, 5, True, True, 4, Tail.DAMAGED),
    ],
)
def test_only_what_nobody_can_have_relied_on_is_torn(
    tail_bytes: int, next_id: int, is_last: bool, has_gaps: bool, floor: int, want: Tail
) -> None:
    gaps = [Gap(0, 1, 1, 1)] if has_gaps else []
    assert judge_tail(Survey(next_id, 0, tail_bytes, gaps), is_last=is_last, floor=floor) is want


@pytest.mark.parametrize(("committed", "want"), [(4, Tail.TORN), (5, Tail.DAMAGED)])
def test_what_a_head_says_is_committed_was_relied_on(committed: int, want: Tail) -> None:
    found = Survey(5, 0, 7, [], committed=committed)
    assert judge_tail(found, is_last=True, floor=-1) is want


NEWEST = 100 + 40
"""Bytes of the newest of three records."""


@pytest.mark.parametrize(
    ("wrong", "kept", "rest", "after_a_kill", "after_a_power_cut"),
    [
        ((), NEWEST - 1, TailKind.SHORT, Tail.TORN, Tail.TORN),
        ((), 36, TailKind.SHORT, Tail.TORN, Tail.TORN),
        ((), 5, TailKind.SHORT, Tail.TORN, Tail.TORN),
        ((60,), NEWEST, TailKind.ROTTEN, Tail.DAMAGED, Tail.DAMAGED),
        ((7,), NEWEST, TailKind.ROTTEN, Tail.DAMAGED, Tail.DAMAGED),
        ((NEWEST - 1,), NEWEST, TailKind.ROTTEN, Tail.DAMAGED, Tail.DAMAGED),
        ((29,), NEWEST, TailKind.ROTTEN, Tail.DAMAGED, Tail.DAMAGED),
        ((28, 29, 30, 31), NEWEST, TailKind.ROTTEN, Tail.DAMAGED, Tail.DAMAGED),
        ((60, 80), NEWEST, TailKind.OTHER, Tail.DAMAGED, Tail.TORN),
        ((7,), NEWEST - 1, TailKind.OTHER, Tail.DAMAGED, Tail.TORN),
        ((2,), 5, TailKind.OTHER, Tail.DAMAGED, Tail.TORN),
    ],
    ids=["cut short", "only its head", "five bytes", "a byte of the payload", "a byte of the id", "a byte of the checksum",
         "a byte of the length", "all of the length", "two wrong bytes", "short and wrong", "five wrong bytes"],
)  # fmt: skip
def test_what_may_have_been_torn(
    wrong: tuple[int, ...], kept: int, rest: TailKind, after_a_kill: Tail, after_a_power_cut: Tail
) -> None:
    data, _, run = segment([b"a", b"b", b"c" * 100])
    newest = HEADER_BYTES + int(run.bounds[2])
    for at in wrong:
        flip(data, newest + at)
    data.truncate(newest + kept)
    found = survey(data, first_id=0, end=data.size())
    assert (found.next_id, found.gaps, found.tail_kind) == (2, [], rest)
    for was_cut, want in ((False, after_a_kill), (True, after_a_power_cut)):
        assert judge_tail(found, is_last=True, floor=1, was_cut=was_cut) is want


@pytest.mark.parametrize("pattern", [0x01, 0x40, 0xFF])
@pytest.mark.parametrize("behind", [b"", bytes(60), b"a" * 700], ids=["the end", "zeros", "what a power cut left"])
def test_a_record_with_one_wrong_byte_is_never_taken_for_a_torn_write(pattern: int, behind: bytes) -> None:
    data, _, run = segment([b"a", b"b", b"c" * 100])
    newest = HEADER_BYTES + int(run.bounds[2])
    data.write(newest + NEWEST, behind)
    for at in range(newest, newest + NEWEST):
        right = data.read(at, 1)
        data.write(at, bytes([right[0] ^ pattern]))
        assert survey(data, first_id=0, end=data.size()).tail_kind is TailKind.ROTTEN, at - newest
        data.write(at, right)
