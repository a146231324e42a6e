"""Reading a segment of format 1: torn at every length, each bit of it flipped, named as a simple model says."""

from __future__ import annotations

import os
import random
from typing import Any
from uuid import UUID

import pytest

from tests.batches import APPEND, READ, TIME, WRITE, batches_of, index_raw, raw, segment_raw
from waltzd.disk.simulated import SimDisk, SimFile
from waltzd.format import scan as module
from waltzd.format.batch import HEAD_BYTES, Batch, End
from waltzd.format.footer import read_footer
from waltzd.format.index import offsets_of, places_of
from waltzd.format.layout import BATCHES, HEADER_BYTES
from waltzd.format.scan import Gap, Stop, Survey, Tail, TailKind, follow_footer, judge_tail, next_sound_batch, scan, survey
from waltzd.format.span import BatchSpan, Span

KEY = UUID(int=1)
PAYLOADS = [[b"a", b"bb", b""], [b"c" * 70], [b"d", b"e" * 30], [b"f" * 9, b"g"]]
LOCKS = [[[(1, WRITE)], [], [(2, READ), (1, APPEND)]], None, [[(3, WRITE)], [(4, READ)]], None]
FOLLOWS = [None, None, [False, True], None]


def small(*, is_sealed: bool = False) -> list[Batch]:
    return batches_of(PAYLOADS, locks=LOCKS, follows=FOLLOWS, cuts=[3] if is_sealed else [])


def starts_of(batches: list[Batch]) -> list[int]:
    """Where each batch begins, and where the last one ends."""
    out = [HEADER_BYTES]
    for batch in batches:
        out.append(out[-1] + batch.size)
    return out


def segment(batches: list[Batch]) -> bytes:
    return segment_raw(batches, key=KEY)[0]


def file_of(content: bytes) -> SimFile:
    file = SimDisk(0).create("data")
    file.write(0, content)
    return file


def look(content: bytes, **known: Any) -> Survey:
    return survey(file_of(content), first_id=0, end=len(content), version=BATCHES, **known)


def verdicts(found: Survey, floor: int = -1) -> tuple[Tail, Tail]:
    """After a kill, and after a power cut."""
    kill, cut = (judge_tail(found, is_last=True, floor=floor, was_cut=was_cut) for was_cut in (False, True))
    return kill, cut


TORN = Tail.TORN, Tail.TORN
DAMAGED = Tail.DAMAGED, Tail.DAMAGED
CLEAN = Tail.CLEAN, Tail.CLEAN
UNFINISHED = Tail.UNFINISHED, Tail.UNFINISHED


def flipped(content: bytes, *bits: int) -> bytes:
    out = bytearray(content)
    for bit in bits:
        out[bit // 8] ^= 0x80 >> bit % 8
    return bytes(out)


# -- sound segments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [1, 300, 4 << 20])
def test_a_sound_segment_is_read_batch_by_batch(chunk_bytes: int) -> None:
    batches = small()
    file = file_of(segment(batches))
    runs: list[tuple[int, int, bytes, list[int] | None]] = []
    seen: list[tuple[int, bytes]] = []

    def on_span(span: Span) -> None:
        assert isinstance(span, BatchSpan)
        for offset, batch in span.batches():
            run = batch.run
            runs.append((offset, run.first_id, bytes(run.data), None if run.times is None else run.times.tolist()))
            seen.append((offset, raw([batch])))

    stop = scan(
        file, segment_first_id=0, next_id=0, offset=HEADER_BYTES, end=file.size(), version=BATCHES, before=End(),
        on_span=on_span, chunk_bytes=chunk_bytes,
    )  # fmt: skip
    last = batches[-1].head
    end = End(crc=last.crc, time=last.time, segment_bytes=file.size())
    assert stop == Stop(file.size(), 8, end, False, last.committed)
    places = starts_of(batches)[:-1]
    assert seen == [(start, raw([batch])) for start, batch in zip(places, batches, strict=True)]
    assert runs == [
        (start, batch.first_id, bytes(batch.run.data), [batch.head.time] * len(batch))
        for start, batch in zip(places, batches, strict=True)
    ]


def test_a_sealed_segment_ends_with_its_footer() -> None:
    batches = small(is_sealed=True)
    content = segment(batches)
    found = look(content)
    assert (found.next_id, found.gaps, found.tail_bytes, found.is_sealed) == (8, [], 0, True)
    assert found.end == starts_of(batches)[-1]
    assert found.footer is not None
    assert found.footer.batches.tolist() == starts_of(batches)[:-1]
    assert found.footer_bytes == len(content) - found.end == len(found.footer.encode())
    assert found.end_of_log == End(crc=batches[-1].head.crc, time=batches[-1].head.time)
    assert verdicts(found) == CLEAN
    read = read_footer(file_of(content))
    assert read is not None
    assert read.encode() == found.footer.encode()


def test_a_walk_may_begin_in_the_middle() -> None:
    batches = small()
    start = starts_of(batches)[2]
    before = batches[1].end(batches[0].end(End()))
    for known in (None, before):
        found = look(segment(batches), next_id=4, offset=start, before=known)
        assert (found.next_id, found.gaps, found.tail_bytes) == (8, [], 0)
    strange = look(segment(batches), next_id=4, offset=start, before=End(crc=before.crc ^ 1, time=before.time))
    assert strange.gaps == [Gap(start, starts_of(batches)[3] - 1, 4, 5)]


def test_an_empty_segment() -> None:
    header = segment(small())[:HEADER_BYTES]
    before = End(crc=7, time=9)
    found = look(header, before=before)
    assert (found.next_id, found.end, found.tail_bytes, found.end_of_log) == (0, HEADER_BYTES, 0, before)
    assert verdicts(found) == CLEAN


def test_an_index_saves_the_walk_of_lengths_and_is_never_believed() -> None:
    batches = batches_of([[b"x" * (number % 7) for number in range(100)], [b"y"] * 200])
    content, index = segment(batches), file_of(index_raw(batches, key=KEY))
    want: list[int] = []
    look(content, on_span=lambda span: want.extend(span.entries.tolist()))
    assert len(want) == 300
    for lie in (b"", b"\xff" * 800, bytes(800)):
        index.write(HEADER_BYTES + 80, lie)
        found: list[int] = []
        look(content, index=index, on_span=lambda span, to=found: to.extend(span.entries.tolist()))
        assert found == want


def test_an_index_can_be_made_from_a_footer() -> None:
    batches = small(is_sealed=True)
    file = file_of(segment(batches))
    footer = read_footer(file)
    assert footer is not None
    entries: list[int] = []
    assert follow_footer(file, footer, lambda _, found: entries.extend(found.tolist()))
    assert b"".join(entry.to_bytes(8, "big") for entry in entries) == index_raw(batches, key=KEY)[HEADER_BYTES:]
    records, heads = places_of(file_entries := offsets_of(0, batches[0].run) + HEADER_BYTES + batches[0].head.lead)
    assert (records[0], heads[0]) == (HEADER_BYTES + batches[0].head.lead, HEADER_BYTES), file_entries
    file.write(starts_of(batches)[2] + 20, b"\x77")
    assert not follow_footer(file, footer, lambda *_: None), "a head is not what the footer says"


# -- one wrong bit -----------------------------------------------------------------------------------------------------


def check_flip(batches: list[Batch], content: bytes, bit: int) -> None:
    """The model: the batch that has the bit is the only one that is missing, and certainly damage; a footer is made again;
    the header is looked at by others."""
    starts, byte = starts_of(batches), bit // 8
    found = look(flipped(content, bit), before=End())
    if byte < HEADER_BYTES:
        assert (found.gaps, found.tail_bytes) == ([], 0), bit
        return
    number = sum(start <= byte for start in starts) - 1
    if number == len(batches):
        assert (found.gaps, found.tail_bytes, found.footer, verdicts(found, 7)) == ([], 0, None, UNFINISHED), bit
        assert (found.end, found.footer_bytes) == (starts[-1], len(content) - starts[-1]), bit
        return
    batch = batches[number]
    if number == len(batches) - 1:
        assert (found.gaps, found.next_id, found.end, found.tail_kind) == (
            [],
            batch.first_id,
            starts[number],
            TailKind.ROTTEN,
        ), bit
        assert verdicts(found) == DAMAGED, bit
    else:
        gap = Gap(starts[number], starts[number + 1] - 1, batch.first_id, batch.last_id)
        assert (found.gaps, found.next_id, found.tail_bytes) == ([gap], batches[-1].last_id + 1, 0), bit


@pytest.mark.slow
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_each_flipped_bit_is_named(is_sealed: bool, every: int) -> None:
    """In short one bit of each byte, another one from byte to byte."""
    batches = small(is_sealed=is_sealed)
    content = segment(batches)
    for bit in range(0, 8 * len(content), every):
        check_flip(batches, content, bit)


# -- torn --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torn_at_every_length() -> None:
    batches = small(is_sealed=True)
    content, starts = segment(batches), starts_of(batches)
    for size in range(HEADER_BYTES, len(content)):
        found = look(content[:size], before=End())
        whole = sum(start <= size for start in starts) - 1
        assert (found.end, found.gaps) == (starts[whole], []), size
        next_id = batches[whole - 1].last_id + 1 if whole else 0
        assert found.next_id == next_id, size
        if whole == len(batches):
            assert verdicts(found, next_id - 1) == UNFINISHED, size
        elif size == starts[whole]:
            assert verdicts(found, next_id - 1) == CLEAN, size
        else:
            assert found.tail_kind is TailKind.SHORT, size
            assert verdicts(found, next_id - 1) == TORN, size
            assert verdicts(found, next_id) == DAMAGED, "a promise says that it was whole"


@pytest.mark.parametrize("lost", [(0, 200), (50, 60), (97, 300), (0, 512), (300, 301)])
def test_a_power_cut_leaves_any_part_of_the_last_batch(lost: tuple[int, int]) -> None:
    batches = batches_of([[b"a"], [bytes(range(1, 200)), b"b" * 400]], locks=[None, [[(1 << 63, WRITE)], []]])
    content = bytearray(segment(batches))
    start = starts_of(batches)[1]
    content[start + lost[0] : start + lost[1]] = bytes(lost[1] - lost[0])
    found = look(bytes(content))
    one_byte = lost[1] - lost[0] == 1
    assert (found.next_id, found.tail_kind) == (1, TailKind.ROTTEN if one_byte else TailKind.OTHER)
    assert verdicts(found) == (DAMAGED if one_byte else (Tail.DAMAGED, Tail.TORN))


def test_a_payload_that_looks_like_a_later_batch_makes_no_damage_of_a_torn_write() -> None:
    later = raw(batches_of([[b"forged"]], first_id=9))
    batches = batches_of([[b"a"], [later * 3, b"b" * 300]])
    content = segment(batches)
    assert verdicts(look(content[:-100])) == TORN
    wrong = bytearray(content)
    wrong[-100:-50] = bytes(50)
    assert verdicts(look(bytes(wrong))) == (Tail.DAMAGED, Tail.TORN)


def test_a_payload_that_looks_like_the_next_batch_is_never_taken_for_it() -> None:
    forged = raw(batches_of([[b"forged"]], first_id=2))
    batches = batches_of([[b"a"], [b"x" * 40 + forged + b"y" * 40], [b"c"]])
    content, starts = segment(batches), starts_of(batches)
    for at in (40, 4, 50, 58, 200):  # in the head, in each statement of its size, in the payload
        found = look(flipped(content, 8 * (starts[1] + at)))
        assert (found.gaps, found.next_id) == ([Gap(starts[1], starts[2] - 1, 1, 1)], 3), at


# -- batches that are whole, and wrong in their place ------------------------------------------------------------------


def test_a_batch_of_another_history_shows() -> None:
    """It has the right ids and checksums, and names another batch in front."""
    batches, others = small(), batches_of([[b"other", b"one", b"here"], *PAYLOADS[1:]])
    starts = starts_of(batches)
    for number in (1, 2, 3):
        mixed = [*batches]
        mixed[number:] = batches_of(
            PAYLOADS[number:], first_id=batches[number].first_id, before=others[number - 1].end(End())
        )
        found = look(segment(mixed), before=End())
        if number < 3:
            assert found.gaps == [
                Gap(starts[number], starts_of(mixed)[number + 1] - 1, mixed[number].first_id, mixed[number].last_id)
            ]
        else:
            assert (found.next_id, found.tail_kind) == (6, TailKind.WHOLE)
            assert verdicts(found) == DAMAGED


def test_time_that_falls_shows() -> None:
    found = look(segment(batches_of(PAYLOADS, times=[TIME, TIME + 5, TIME + 5, TIME + 4])))
    assert (found.next_id, found.tail_kind) == (6, TailKind.WHOLE)
    assert look(segment(batches_of(PAYLOADS, times=[TIME, TIME + 5, TIME + 5, TIME + 5]))).tail_bytes == 0


def test_a_batch_that_was_taken_out_shows() -> None:
    batches = small()
    starts = starts_of(batches)
    content = segment(batches)
    found = look(content[: starts[1]] + content[starts[2] :])
    gap_bytes = starts[3] - starts[2]
    assert found.gaps == [Gap(starts[1], starts[1] + gap_bytes - 1, 3, 5)], "with the one that stands in its place"
    assert found.next_id == 8


def test_bytes_too_many_show() -> None:
    batches = small()
    content, start = segment(batches), starts_of(batches)[2]
    found = look(content[:start] + bytes(50) + content[start:])
    assert (found.gaps, found.next_id) == ([Gap(start, start + 49, 4, 3)], 8)


def test_a_sound_head_behind_a_wrong_batch_makes_it_damage() -> None:
    batches = small()
    content, starts = segment(batches), starts_of(batches)
    wrong = bytearray(content[: starts[3] + HEAD_BYTES + 3])
    wrong[starts[2] + 100 : starts[2] + 130] = bytes(30)
    found = look(bytes(wrong))
    assert (found.next_id, found.end, found.tail_kind) == (4, starts[2], TailKind.FOLLOWED)
    assert found.committed == batches[3].head.committed == 5, "the torn batch says that the wrong one was committed"
    assert verdicts(found) == DAMAGED


def test_what_follows_the_last_batch_of_a_segment_is_never_cut_when_it_is_a_batch() -> None:
    sealed = batches_of([[b"a"], [b"b"]], cuts=[1])
    behind = raw(batches_of([[b"a"], [b"b"], [b"c"]])[2:])
    for content in (behind, behind[:-1]):
        found = look(segment(sealed)[:HEADER_BYTES] + raw(sealed) + content)
        assert (found.next_id, found.tail_kind, found.footer) == (2, TailKind.FOLLOWED, None)
        assert verdicts(found) == DAMAGED


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_a_batch_over_the_bound_of_all_batches_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = batches_of([[b"a"], [b"b" * 500], [b"c"]])
    largest = batches[1]
    file, end = file_of(segment(batches)), starts_of(batches)[-1]
    monkeypatch.setattr(module, "BATCH_BYTES_MAX", largest.size)
    known = {"segment_first_id": 0, "next_id": 0, "offset": HEADER_BYTES, "end": end, "version": BATCHES}
    assert scan(file, **known).offset == end  # type: ignore[arg-type]
    monkeypatch.setattr(module, "BATCH_BYTES_MAX", largest.size - 1)
    assert scan(file, **known).offset == starts_of(batches)[batches.index(largest)]  # type: ignore[arg-type]


def test_forged_heads_cost_no_more_than_a_few_readings_of_the_file() -> None:
    """Heads that claim all bytes behind them, one behind the other."""
    forged = bytearray()
    for number in range(300):
        batch = batches_of([[b"z" * (100_000 - 96 * number)]], first_id=5 + number)[0]
        forged += bytes(batch.preamble)
    file = file_of(segment(small())[:HEADER_BYTES] + b"\1" * 96 + bytes(forged) + bytes(100_000))
    read = 0
    plain = file.read

    def count(offset: int, size: int) -> bytes:
        nonlocal read
        read += size
        return plain(offset, size)

    file.read = count  # type: ignore[method-assign]
    found = next_sound_batch(file, offset=HEADER_BYTES, end=file.size(), next_id=0, high_id=1000)
    assert found.stop is None
    assert found.has_head
    assert read < 70 << 20


FLIPS = "WALTZ_FLIPS"


def large() -> list[Batch]:
    """About 64 KiB: batches of many sizes, with locks and groups."""
    chance = random.Random(7)
    payloads = [
        [chance.randbytes(chance.choice([0, 5, 60, 700])) for _ in range(chance.randrange(1, 40))] for _ in range(14)
    ]
    locks = [
        [[(chance.getrandbits(64), WRITE) for _ in range(chance.randrange(4))] for _ in own]
        if chance.random() < 0.6
        else None
        for own in payloads
    ]
    follows = [[number > 0 and chance.random() < 0.5 for number in range(len(own))] for own in payloads]
    return batches_of(payloads, locks=locks, follows=follows, cuts=[13])


@pytest.mark.slow
@pytest.mark.parametrize("place", range(8))
def test_flips_of_a_large_segment(place: int) -> None:
    """A sample of the bits at this place of each byte; `./dev flips` tries all of them."""
    batches = large()
    content = segment(batches)
    assert 60_000 < len(content) < 90_000
    part, chance = float(os.environ.get(FLIPS, "0.0005")), random.Random(place)
    for byte in range(len(content)):
        if chance.random() < part:
            check_flip(batches, content, 8 * byte + place)
