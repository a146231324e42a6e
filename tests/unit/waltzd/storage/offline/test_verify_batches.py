"""Verification of a directory that was changed over to format 1: each byte of it, and what shows only between segments."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.batches import TIME, batches_of, put_batches, segments_of
from tests.unit.waltzd.storage.offline.small import (
    IDX3,
    IDX6,
    IDX9,
    KEY,
    MIXED,
    MIXED_HARD_STATE,
    MIXED_LAST_ID,
    MIXED_LOCKS,
    MIXED_PAYLOADS,
    SEG0,
    SEG3,
    SEG6,
    SEG9,
    mixed,
    put_hard_state,
    put_mixed,
)
from waltzd.disk.simulated import SimDisk
from waltzd.format.batch import HEAD_BYTES, End
from waltzd.format.checksum import crc32
from waltzd.format.finding import FOOTER_CODES, INDEX_CODES, Code, Finding
from waltzd.format.layout import HEADER_BYTES
from waltzd.storage.offline.dump import dump
from waltzd.storage.offline.reindex import rebuild
from waltzd.storage.offline.verify import Options, Target, verify, verify_partition

FOLLOWS = [None, None, None, [False, True], None, None]


def found(disk: SimDisk, *, is_deep: bool = False) -> list[Finding]:
    return verify(disk, [Target(storage="s")], Options(is_deep=is_deep)).findings


def flip(disk: SimDisk, path: str, at: int) -> None:
    disk.corrupt(path, at, bytes([disk.content(path)[at] ^ 0x21]))


def cut(disk: SimDisk, path: str, size: int) -> None:
    content = bytes(disk.content(path))[:size]
    file = disk.create(path)
    file.write(0, content)
    file.close()


def footer_start(number: int) -> int:
    return HEADER_BYTES + sum(batch.size for batch in segments_of(MIXED)[number])


def test_a_mixed_directory_is_clean() -> None:
    report = verify(mixed(), [Target(storage="s")], Options())
    assert report.findings == []
    [partition] = report.partitions
    assert (partition.segments, partition.records, partition.last_id) == (4, 12, MIXED_LAST_ID)
    assert found(mixed(), is_deep=True) == []
    live = [one for one in verify_partition(mixed(), "s/0", 0, KEY, durable_id=10) if isinstance(one, Finding)]
    assert live == []


@pytest.mark.slow
@pytest.mark.parametrize(("path", "number"), [(SEG3, 0), (SEG6, 1), (SEG9, 2)])
def test_every_byte_of_a_segment(path: str, number: int) -> None:
    disk = mixed()
    batches = segments_of(MIXED)[number]
    starts = [HEADER_BYTES]
    for batch in batches:
        starts.append(starts[-1] + batch.size)
    for at in range(len(disk.content(path))):
        flip(disk, path, at)
        findings = found(disk)
        if at < HEADER_BYTES:
            [code] = {finding.code for finding in findings}
            want = [(4, Code.UNKNOWN_VERSION), (12, Code.DAMAGED_HEADER), (28, Code.FOREIGN_KEY)]
            assert code is next((code for stop, code in want if at < stop), Code.DAMAGED_HEADER), at
        elif at >= starts[-1]:
            assert [finding.code for finding in findings] == [Code.DAMAGED_FOOTER], at
        else:
            [finding] = findings
            owner = next(n for n in range(len(batches)) if at < starts[n + 1])
            assert finding.code is Code.DAMAGED_RECORD, at
            assert (finding.first_id, finding.last_id) == (batches[owner].first_id, batches[owner].last_id)
            assert f"batch at id {batches[owner].first_id}: byte {at} is" in finding.detail
        flip(disk, path, at)


def _wrong_footer(disk: SimDisk) -> None:
    """A sound footer that names other times."""
    segment = segments_of(MIXED)[0]
    other = batches_of(MIXED_PAYLOADS[:2], first_id=3, locks=MIXED_LOCKS[:2], cuts=[1], times=[TIME, TIME + 1])
    twin = mixed()
    put_batches(twin, "s/0", other, key=KEY)
    footer = bytes(twin.content(SEG3))[footer_start(0) :]
    assert segment[0].head.time == TIME
    disk.corrupt(SEG3, footer_start(0), footer)


def _other_history(disk: SimDisk) -> None:
    """Segments 6 and 9 as an owner wrote them behind another segment 3."""
    other = batches_of([[b"X", b"yy"], *MIXED_PAYLOADS[1:]], first_id=3, locks=MIXED_LOCKS, follows=FOLLOWS, cuts=[1, 3])
    put_mixed(disk, other)
    put_batches(disk, "s/0", MIXED[:2], key=KEY)


def _other_batch(number: int) -> Callable[[SimDisk], None]:
    def change(disk: SimDisk) -> None:
        """The batches from this one on name another one in front."""
        front = End(crc=123, time=MIXED[number - 1].head.time if number else 0)
        other = batches_of(
            MIXED_PAYLOADS[number:], first_id=MIXED[number].first_id, before=front, locks=MIXED_LOCKS[number:],
            follows=FOLLOWS[number:], cuts=[one - number for one in (1, 3) if one >= number],
        )  # fmt: skip
        put_mixed(disk, [*MIXED[:number], *other])

    return change


def _times(*times: int) -> Callable[[SimDisk], None]:
    def change(disk: SimDisk) -> None:
        put_mixed(disk, batches_of(MIXED_PAYLOADS, first_id=3, times=times, cuts=[1, 3]))

    return change


def _footer_of_another_chain(disk: SimDisk) -> None:
    put_batches(disk, "s/0", MIXED[2:4], key=KEY, footer_before=b"!" * 32)


def _no_footer(path: str, number: int, kept: int) -> Callable[[SimDisk], None]:
    return lambda disk: cut(disk, path, footer_start(number) + kept)


def _torn(disk: SimDisk) -> None:
    put_hard_state(disk, replace(MIXED_HARD_STATE, durable=10, committed=10))
    cut(disk, SEG9, len(disk.content(SEG9)) - 5)
    cut(disk, IDX9, HEADER_BYTES + 16)


def _creation_time(disk: SimDisk) -> None:
    disk.corrupt(SEG6, 4, bytes(8))


def _remove_middle(disk: SimDisk) -> None:
    disk.remove(SEG6)
    disk.remove(IDX6)


STORIES: list[tuple[str, Callable[[SimDisk], None], list[Code]]] = [
    ("half a batch at the end", _torn, [Code.TORN_TAIL]),
    ("half a batch that was promised", lambda disk: cut(disk, SEG9, len(disk.content(SEG9)) - 5), [Code.DAMAGED_RECORD]),
    ("no footer", _no_footer(SEG3, 0, 0), [Code.FOOTER_MISSING]),
    ("half a footer", _no_footer(SEG6, 1, 70), [Code.DAMAGED_FOOTER]),
    ("bytes behind a footer", lambda disk: disk.corrupt(SEG6, len(disk.content(SEG6)), b"!"), [Code.DAMAGED_FOOTER]),
    ("a footer of other times", _wrong_footer, [Code.WRONG_FOOTER]),
    ("a footer of another chain", _footer_of_another_chain, [Code.BROKEN_CHAIN]),
    ("segments behind another one", _other_history, [Code.BROKEN_CHAIN] * 2),
    ("a batch behind another one", _other_batch(5), [Code.BROKEN_CHAIN]),
    ("a batch in the middle behind another one", _other_batch(1), [Code.BROKEN_CHAIN]),
    ("the first batch behind format 0 names one", _other_batch(0), [Code.BROKEN_CHAIN]),
    ("time that falls within a segment", _times(5, 4, 6, 7, 8, 9), [Code.BROKEN_CHAIN]),
    ("time that falls between segments", _times(5, 6, 4, 7, 8, 9), [Code.BROKEN_CHAIN]),
    ("a header of format 0 in front of batches", lambda disk: disk.corrupt(SEG6, 3, b"\0"), [Code.DAMAGED_HEADER]),
    ("a header of format 1 in front of records", lambda disk: disk.corrupt(SEG0, 3, b"\1"), [Code.DAMAGED_HEADER]),
    ("an index of format 0", lambda disk: disk.corrupt(IDX6, 3, b"\0"), [Code.DAMAGED_INDEX]),
    ("another creation time", _creation_time, [Code.DAMAGED_HEADER]),
    ("an index entry with another batch", lambda disk: disk.corrupt(IDX3, 130, b"\\1"), [Code.WRONG_INDEX_ENTRY]),
    ("a segment in the middle gone", _remove_middle, [Code.SEGMENT_GAP]),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "expected"), [story[1:] for story in STORIES], ids=[story[0] for story in STORIES])
def test_each_kind_of_damage_has_its_code(damage: Callable[[SimDisk], None], expected: list[Code]) -> None:
    disk = mixed()
    damage(disk)
    findings = found(disk)
    assert [finding.code for finding in findings] == expected, [finding.sentence() for finding in findings]
    assert all(
        finding.is_damage == (finding.code not in FOOTER_CODES | INDEX_CODES | {Code.TORN_TAIL}) for finding in findings
    )


def _forged(disk: SimDisk, path: str, chance: random.Random) -> None:
    """A head with a right checksum that says something else."""
    content = bytes(disk.content(path))
    at = content.find(b"WZB1", chance.choice([0, 200]))
    if at < 0:
        return
    raw = bytearray(content[at : at + HEAD_BYTES])
    for _ in range(chance.randrange(1, 3)):
        field = chance.choice([4, 8, 16, 32, 40, 48, 52, 56, 60, 64])
        raw[field : field + 4] = chance.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", chance.randbytes(4)])
    raw[92:] = crc32(raw[:92]).to_bytes(4, "big")
    disk.corrupt(path, at, bytes(raw))


def _nonsense(disk: SimDisk, path: str, chance: random.Random) -> None:
    size = len(disk.content(path))
    match chance.randrange(5):
        case 0:
            cut(disk, path, chance.randrange(size))
        case 1:
            disk.corrupt(path, chance.randrange(size), chance.randbytes(chance.randrange(1, 100)))
        case 2:
            disk.corrupt(path, size, chance.randbytes(chance.randrange(1, 300)))
        case 3:
            start, to = chance.randrange(size), chance.randrange(size)
            disk.corrupt(path, to, bytes(disk.content(path))[start : start + chance.randrange(1, 300)])
        case _:
            _forged(disk, path, chance)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_nonsense_ends_with_findings(seed: int) -> None:
    """Whatever stands in the files: no other exception, nothing written by what only reads, and what a rebuild of indexes
    leaves is right."""
    chance = random.Random(seed)
    for _ in range(10):
        disk = mixed()
        for _ in range(chance.randrange(1, 4)):
            _nonsense(disk, chance.choice([SEG3, SEG6, SEG9, IDX3, IDX6, IDX9]), chance)
        findings = found(disk)
        for path in (SEG3, SEG6, SEG9):
            dump(disk, path, lambda item: None)
        rebuild(disk, [Target(storage="s")])
        left = found(disk)
        refused = {finding.path for finding in left if finding.is_damage}
        assert [one for one in left if one.code in INDEX_CODES and one.path.replace("idx", "seg") not in refused] == []
        assert [one for one in left if one.code not in INDEX_CODES] == [
            one for one in findings if one.code not in INDEX_CODES
        ]
