"""Every way in which a storage directory can be wrong is found, and named for what it is.

The directory is small and lives on a simulated disk. The twin of all the clever checks is the brute force here: flip every
byte there is, one at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest

from tests.unit.waltzd.storage.offline.small import (
    HARD_STATE,
    IDX0,
    IDX3,
    IDX6,
    KEY,
    LAST_ID,
    PAYLOADS,
    SEG0,
    SEG3,
    SEG6,
    STARTS,
    put,
    put_hard_state,
    put_segment,
    storage,
)
from waltzd.disk.real import RealDisk
from waltzd.disk.seam import join
from waltzd.disk.simulated import Fault, SimDisk
from waltzd.errors.operations import DirectoryHeld
from waltzd.format.finding import FOOTER_CODES, Code, Finding
from waltzd.format.layout import (
    CONTROL_NAME,
    HARD_STATE_BYTES,
    HARD_STATE_NAME,
    HARD_STATE_SLOT_BYTES,
    HARD_STATE_SLOT_SPACING,
    IDENTITY_NAME,
    control_bytes,
    control_struct_offset,
    index_name,
    segment_name,
)
from waltzd.format.record import encode_payloads
from waltzd.storage.offline.inspection import SegmentTask, inspect_segment
from waltzd.storage.offline.verify import (
    Options,
    PartitionReport,
    Report,
    Target,
    run_on_segments,
    verify,
    verify_partition,
    wanted_targets,
)
from waltzd.storage.replica.hard_state import read_hard_state

OTHER_KEY = UUID(int=7)


def check(disk: SimDisk, **options: bool) -> Report:
    return verify(disk, [Target(storage="s")], Options(**options))  # type: ignore[arg-type]


def found(disk: SimDisk) -> list[Finding]:
    return check(disk).findings


def codes(disk: SimDisk) -> list[Code]:
    return [finding.code for finding in found(disk)]


def flip(disk: SimDisk, path: str, at: int) -> None:
    disk.corrupt(path, at, bytes([disk.content(path)[at] ^ 0x21]))


def test_a_sound_directory_is_clean() -> None:
    report = check(storage())
    assert report.findings == []
    [partition] = report.partitions
    assert (partition.segments, partition.records, partition.first_id, partition.last_id) == (3, 9, 0, LAST_ID)
    assert codes(storage(with_ours=False)) == []
    assert check(storage(), is_deep=True).findings == []


@pytest.mark.parametrize(
    ("name", "records", "partitions"), [("storage0", 605, 6), ("storage1", 605, 6), ("storage2", 547, 4)]
)
def test_directories_of_the_original_are_clean(original: Path, name: str, records: int, partitions: int) -> None:
    report = verify(RealDisk(), [Target(storage=str(original / name))], Options())
    assert report.findings == []
    assert len(report.partitions) == partitions
    assert sum(partition.records for partition in report.partitions) == records


# -- every byte --------------------------------------------------------------------------------------------------------

HEADER_CODES: list[tuple[range, Code | None]] = [
    (range(0, 4), Code.UNKNOWN_VERSION),
    (range(4, 12), None),  # the creation date: nothing else in this format knows it, so a change of it cannot be seen
    (range(12, 28), Code.FOREIGN_KEY),
    (range(28, 128), Code.DAMAGED_HEADER),
]


@pytest.mark.slow
@pytest.mark.parametrize("segment", [0, 1, 2])
def test_every_byte_of_a_segment(segment: int) -> None:
    path = join("s/0", segment_name(STARTS[segment]))
    disk = storage()
    bounds = (encode_payloads(STARTS[segment], PAYLOADS[segment]).bounds + 128).tolist()
    for at in range(len(disk.content(path))):
        flip(disk, path, at)
        findings = [finding for finding in found(disk) if finding.path == path]
        if at < 128:
            [expected] = [code for place, code in HEADER_CODES if at in place]
            assert [finding.code for finding in findings] == ([] if expected is None else [expected]), at
        else:
            number = next(i for i in range(3) if at < bounds[i + 1])
            [finding] = findings
            assert finding.code is Code.DAMAGED_RECORD
            assert (finding.first_id, finding.last_id) == (STARTS[segment] + number,) * 2
            assert (finding.first_byte, finding.last_byte) == (bounds[number], bounds[number + 1] - 1)
            right = disk.content(path)[at] ^ 0x21
            assert f"byte {at} is 0x{disk.content(path)[at]:02x}, a sound record has 0x{right:02x}" in finding.detail
        flip(disk, path, at)
    assert found(disk) == []


@pytest.mark.slow
def test_every_byte_of_an_index() -> None:
    path = join("s/0", index_name(3))
    disk = storage()
    for at in range(len(disk.content(path))):
        flip(disk, path, at)
        findings = found(disk)
        if at < 128:
            expected = [] if 4 <= at < 12 else [Code.DAMAGED_INDEX]
            assert [finding.code for finding in findings] == expected, at
        else:
            [finding] = findings
            id_ = 3 + (at - 128) // 8
            assert (finding.code, finding.first_id, finding.last_id) == (Code.WRONG_INDEX_ENTRY, id_, id_)
        flip(disk, path, at)


@pytest.mark.slow
@pytest.mark.parametrize("with_ours", [True, False])
def test_every_byte_of_the_control_file(with_ours: bool) -> None:
    path = join("s", CONTROL_NAME)
    disk = storage(with_ours=with_ours)
    for at in range(control_bytes(2)):
        flip(disk, path, at)
        got = set(codes(disk))
        if not with_ours and 4 <= at < 12:
            assert got == set()  # without an identity file nothing else knows the creation date
        elif not with_ours and 12 <= at < 28:
            assert got == {Code.FOREIGN_KEY, Code.DAMAGED_INDEX}
        elif at < 4:
            assert got == {Code.UNKNOWN_VERSION}
        elif at < 128:
            assert Code.CONTROL_FILE in got, at
        else:
            in_number = (at - 128) % 76 < 4
            assert got == {Code.CONTROL_FILE if in_number else Code.CONTROL_STRUCT}, at
        flip(disk, path, at)


def test_the_byte_in_a_control_struct_is_named() -> None:
    disk = storage()
    at = control_struct_offset(0, 1) + 11
    flip(disk, join("s", CONTROL_NAME), at)
    [finding] = found(disk)
    assert f"byte {at} is 0x21, a sound struct has 0x00" in finding.detail
    assert (finding.first_byte, finding.last_byte) == (control_struct_offset(0, 1), control_struct_offset(0, 1) + 35)


@pytest.mark.slow
def test_every_byte_of_the_identity_file() -> None:
    path = join("s", IDENTITY_NAME)
    disk = storage()
    for at in range(len(disk.content(path))):
        flip(disk, path, at)
        assert codes(disk) == [Code.CONTROL_FILE], at
        flip(disk, path, at)


@pytest.mark.slow
def test_every_byte_of_a_promise_file() -> None:
    path = join("s/0", HARD_STATE_NAME)
    disk = storage()
    for at in range(HARD_STATE_BYTES):
        flip(disk, path, at)
        hard_state, findings = read_hard_state(disk, "s/0", 0, KEY, is_expected=True)
        assert [finding.code for finding in findings] == [Code.HARD_STATE_SLOT], at
        assert findings[0].first_byte == at // HARD_STATE_SLOT_SPACING * HARD_STATE_SLOT_SPACING
        in_newest = HARD_STATE_SLOT_SPACING <= at < HARD_STATE_SLOT_SPACING + HARD_STATE_SLOT_BYTES
        assert hard_state == (replace(HARD_STATE, sequence=2) if in_newest else HARD_STATE)
        flip(disk, path, at)


def test_a_promise_slot_of_zeros_was_never_written() -> None:
    disk = storage()
    put_hard_state(disk, HARD_STATE)
    assert codes(disk) == []


# -- every code --------------------------------------------------------------------------------------------------------

Damage = Callable[[SimDisk], None]
CONTROL = join("s", CONTROL_NAME)
HARD_STATE_PATH = join("s/0", HARD_STATE_NAME)


def _cut(path: str, bytes_: int) -> Damage:
    def damage(disk: SimDisk) -> None:
        del disk.content(path)[-bytes_:]

    return damage


def _shorten(path: str, size: int) -> Damage:
    def damage(disk: SimDisk) -> None:
        del disk.content(path)[size:]

    return damage


def _grow(path: str, more: bytes) -> Damage:
    return lambda disk: disk.content(path).extend(more)


def _remove(*paths: str) -> Damage:
    def damage(disk: SimDisk) -> None:
        for path in paths:
            disk.remove(path)

    return damage


def _overwrite(path: str, at: int, value: bytes) -> Damage:
    return lambda disk: disk.corrupt(path, at, value)


def _foreign_segment(disk: SimDisk) -> None:
    disk.corrupt(SEG3, 12, OTHER_KEY.bytes)


def _bad_payload(disk: SimDisk) -> None:
    """The records are whole, and their payloads are not what the client's checksums say."""
    content = disk.content(SEG6)
    bounds = (encode_payloads(6, PAYLOADS[2]).bounds + 128).tolist()
    for start, stop in pairwise(bounds):
        content[start + 32] ^= 1
        content[stop - 4 : stop] = zlib.crc32(content[start : stop - 4]).to_bytes(4, "big")


def _instead_of(path: str) -> Damage:
    def damage(disk: SimDisk) -> None:
        disk.remove(path)
        disk.make_directory(path)

    return damage


def _file_for_partition(disk: SimDisk) -> None:
    disk.remove("s/0")
    put(disk, "s/0", b"")


def _lower_marks(disk: SimDisk) -> None:
    put_hard_state(disk, replace(HARD_STATE, committed=5, durable=5))


def _torn(disk: SimDisk) -> None:
    _lower_marks(disk)
    _cut(SEG6, 2)(disk)
    _cut(IDX6, 8)(disk)


STORIES: list[tuple[str, Damage, list[Code]]] = [
    ("half a record at the end", _torn, [Code.TORN_TAIL]),
    ("bytes behind the last record", _grow(SEG6, b"\0\0"), [Code.TORN_TAIL]),
    ("half a record that was promised", _cut(SEG6, 2), [Code.DAMAGED_RECORD]),
    ("half a record in front of a segment", _cut(SEG3, 2), [Code.DAMAGED_RECORD]),
    ("bytes behind a sealed segment", _grow(SEG3, b"\0\0"), [Code.DAMAGED_RECORD]),
    ("a payload that came damaged", _bad_payload, [Code.DAMAGED_PAYLOAD]),
    ("a reserved byte in a header", _overwrite(SEG0, 100, b"!"), [Code.DAMAGED_HEADER]),
    ("a segment cut inside its header", _shorten(SEG3, 50), [Code.DAMAGED_HEADER]),
    ("a segment from the future", _overwrite(SEG0, 3, b"\2"), [Code.UNKNOWN_VERSION]),
    ("a control file from the future", _overwrite(CONTROL, 3, b"\1"), [Code.UNKNOWN_VERSION]),
    ("a segment of another cluster", _foreign_segment, [Code.FOREIGN_KEY]),
    ("the first segment gone", _remove(SEG0, IDX0), [Code.SEGMENT_GAP]),
    ("a segment in the middle gone", _remove(SEG3, IDX3), [Code.SEGMENT_GAP]),
    ("a sealed segment without its last record", _cut(SEG3, 43), [Code.EXTRA_INDEX_ENTRY, Code.SEGMENT_GAP]),
    ("two segments that overlap", lambda disk: put_segment(disk, 5, [b"zzz"]), [Code.SEGMENT_GAP]),
    ("the last segment gone", _remove(SEG6, IDX6), [Code.SHORT_LOG]),
    ("a promised record gone", _cut(SEG6, 43), [Code.EXTRA_INDEX_ENTRY, Code.SHORT_LOG]),
    ("an index gone", _remove(IDX0), [Code.MISSING_INDEX]),
    ("an index cut inside its header", _shorten(IDX3, 50), [Code.DAMAGED_INDEX]),
    ("an index of another cluster", _overwrite(IDX3, 12, OTHER_KEY.bytes), [Code.DAMAGED_INDEX]),
    ("an index that ends early", _cut(IDX3, 8), [Code.MISSING_INDEX_ENTRY]),
    ("an index that ends inside an entry", _cut(IDX3, 3), [Code.MISSING_INDEX_ENTRY]),
    ("an index entry that points elsewhere", _overwrite(IDX0, 143, b"\xff"), [Code.WRONG_INDEX_ENTRY]),
    ("an index that goes on", _grow(IDX6, bytes(8)), [Code.EXTRA_INDEX_ENTRY]),
    ("an index that goes on by half an entry", _grow(IDX6, bytes(5)), [Code.EXTRA_INDEX_ENTRY]),
    ("an index whose segment is gone", _remove(SEG6), [Code.LONE_INDEX, Code.SHORT_LOG]),
    ("one struct of the control file", _overwrite(CONTROL, 140, b"!"), [Code.CONTROL_STRUCT]),
    ("both structs of a partition", _overwrite(CONTROL, 140, b"!" * 41),
        [Code.CONTROL_FILE] * 2),
    ("two structs of one sequence", lambda disk: disk.corrupt(CONTROL, 132, bytes(disk.content(CONTROL)[168:204])),
        [Code.CONTROL_FILE]),
    ("a control file cut short", _cut(CONTROL, 1), [Code.CONTROL_FILE] * 2),
    ("no control file", _remove(CONTROL), [Code.CONTROL_FILE]),
    ("one slot of the promise", _overwrite(HARD_STATE_PATH, 20, b"!"), [Code.HARD_STATE_SLOT]),
    ("both slots of the promise", _overwrite(HARD_STATE_PATH, 20, b"!" * 4097),
        [Code.HARD_STATE_FILE] * 2),
    ("no hard-state file", _remove(HARD_STATE_PATH), [Code.HARD_STATE_FILE]),
    ("an empty hard-state file", lambda disk: put(disk, HARD_STATE_PATH, bytes(HARD_STATE_BYTES)), [Code.HARD_STATE_FILE]),
    ("the hard-state file of another partition",
        lambda disk: put_hard_state(disk, replace(HARD_STATE, partition=1)),
        [Code.HARD_STATE_FILE]),
    ("no partition directory", _remove("s/0"), [Code.MISSING_PARTITION]),
    ("a file in the place of a partition", _file_for_partition, [Code.NOT_A_FILE]),
    ("a directory in the place of a segment", _instead_of(SEG6), [Code.NOT_A_FILE]),
    ("a directory in the place of an index", _instead_of(IDX0), [Code.NOT_A_FILE]),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "expected"), [story[1:] for story in STORIES], ids=[story[0] for story in STORIES])
def test_each_kind_of_damage_has_its_code(damage: Damage, expected: list[Code]) -> None:
    disk = storage()
    damage(disk)
    before = _contents(disk)
    assert sorted(codes(disk)) == sorted(expected)
    assert _contents(disk) == before, "verify has changed something"


def test_the_stories_cover_every_code() -> None:
    told = {code for _, _, expected in STORIES for code in expected}
    of_batches = FOOTER_CODES | {Code.WRONG_FOOTER, Code.BROKEN_CHAIN}  # test_verify_batches.py
    assert told | of_batches | {Code.UNREADABLE} == set(Code)


def _contents(disk: SimDisk, directory: str = "s") -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    for entry in disk.list(directory):
        path = join(directory, entry.name)
        out |= _contents(disk, path) if entry.is_directory else {path: bytes(disk.content(path))}
    return out


def test_a_device_error_is_a_finding_of_its_own() -> None:
    disk = storage()
    reads: list[int] = []
    disk.observer = lambda kind, path: reads.append(disk.steps) if (kind, path) == ("read", SEG3) else None
    check(disk)
    fresh = storage()
    fresh.faults = {reads[-1]: Fault.IO_ERROR}
    assert codes(fresh) == [Code.UNREADABLE]


# -- ids and places ----------------------------------------------------------------------------------------------------


def test_a_gap_names_the_ids_that_are_missing() -> None:
    disk = storage()
    _remove(SEG3, IDX3)(disk)
    [gap] = found(disk)
    assert (gap.first_id, gap.last_id, gap.path) == (3, 5, SEG6)


def test_a_short_log_says_which_marks_are_above_it() -> None:
    disk = storage()
    _remove(SEG6, IDX6)(disk)
    put_hard_state(disk, replace(HARD_STATE, newest=3))
    [finding] = found(disk)
    assert (finding.first_id, finding.last_id) == (6, 8)
    assert "the promised committed mark is 7 and the promised durable mark is 8" in finding.detail
    assert "local low-water" not in finding.detail  # it is 5, and the log ends at 5


def test_two_damaged_records_side_by_side_are_one_finding_with_both_bytes() -> None:
    disk = storage()
    for at in (130, 170):  # in the id of record 0 and of record 1
        flip(disk, SEG0, at)
    [finding] = found(disk)
    assert (finding.first_id, finding.last_id) == (0, 1)
    assert "record 0: byte 130 is" in finding.detail
    assert "record 1: byte 170 is" in finding.detail


def test_damage_of_more_bytes_claims_no_byte() -> None:
    disk = storage()
    disk.corrupt(SEG3, 165, b"\xff\xee\xdd")
    [finding] = found(disk)
    assert finding.detail == "record 3: no single byte explains it"


def test_bad_payloads_of_neighbours_are_one_finding() -> None:
    disk = storage()
    _bad_payload(disk)
    [finding] = found(disk)
    assert (finding.first_id, finding.last_id, finding.is_damage) == (6, 8, False)


# -- held directories and running storages -----------------------------------------------------------------------------


def test_a_held_directory_is_refused_and_read_only_does_not_judge_its_end() -> None:
    disk = storage()
    _torn(disk)
    disk.open(CONTROL, write=True).lock()
    with pytest.raises(DirectoryHeld) as caught:
        check(disk)
    assert "were not verified" in caught.value.detail_not_done
    report = check(disk, is_read_only=True)
    assert report.held == ["s"]
    assert report.findings == []
    assert report.partitions[0].in_flight_bytes == len(encode_payloads(8, [b"all"]).data) - 2


def test_read_only_still_judges_what_was_promised() -> None:
    disk = storage()
    _cut(SEG6, 2)(disk)
    disk.open(CONTROL, write=True).lock()
    assert [finding.code for finding in check(disk, is_read_only=True).findings] == [Code.DAMAGED_RECORD]


def online(disk: SimDisk, durable_id: int) -> list[Finding]:
    *findings, report = verify_partition(disk, "s/0", 0, KEY, durable_id=durable_id)
    assert isinstance(report, PartitionReport)
    assert report.findings == findings
    assert report.last_id == durable_id
    return report.findings


def test_a_running_storage_checks_up_to_its_durable_id() -> None:
    disk = storage()
    flip(disk, SEG6, -1)  # record 8
    assert online(disk, 7) == []
    [finding] = verify_partition_findings(disk, durable_id=8)
    assert (finding.code, finding.first_id) == (Code.DAMAGED_RECORD, 8)
    flip(disk, SEG6, 130)  # record 6
    [finding] = online(disk, 7)
    assert (finding.first_id, finding.last_id) == (6, 6)
    flip(disk, SEG0, 130)
    assert [finding.first_id for finding in online(disk, 7)] == [0, 6]


def verify_partition_findings(disk: SimDisk, *, durable_id: int) -> list[Finding]:
    found = verify_partition(disk, "s/0", 0, KEY, durable_id=durable_id)
    return [item for item in found if isinstance(item, Finding)]


def test_a_running_storage_may_be_ahead_of_its_index() -> None:
    disk = storage()
    _cut(IDX6, 8)(disk)
    assert online(disk, 7) == []
    assert [finding.code for finding in online(disk, 8)] == [Code.MISSING_INDEX_ENTRY]


def test_a_running_storage_with_a_segment_gone() -> None:
    disk = storage()
    _remove(SEG3, IDX3)(disk)
    [gap] = online(disk, LAST_ID)
    assert (gap.code, gap.first_id, gap.last_id) == (Code.SEGMENT_GAP, 3, 5)


# -- what is named on the command line ---------------------------------------------------------------------------------


def test_one_partition_and_one_segment() -> None:
    disk = storage()
    flip(disk, SEG3, 200)
    [partition] = verify(disk, [Target(storage="s", directory="s/0")], Options()).partitions
    assert (partition.segments, len(partition.findings)) == (3, 1)
    [partition] = verify(disk, [Target(storage="s", directory="s/0", first_id=6)], Options()).partitions
    assert (partition.segments, partition.records, partition.findings) == (1, 3, [])


def test_what_is_named_twice_is_checked_once() -> None:
    whole, part = Target(storage="s"), Target(storage="s", directory="s/0")
    one, two = Target(storage="s", directory="s/0", first_id=3), Target(storage="s", directory="s/0", first_id=6)
    assert wanted_targets([one, whole, part, whole]) == [whole]
    assert wanted_targets([one, part, two, part]) == [part]
    assert wanted_targets([two, one, two]) == [two, one]
    other = Target(storage="", directory="t/0")
    assert wanted_targets([other, whole]) == [other, whole]


def test_a_directory_by_itself_must_agree_with_itself() -> None:
    disk = storage()
    _foreign_segment(disk)
    report = verify(disk, [Target(storage="", directory="s/0")], Options())
    assert [(finding.code, finding.path) for finding in report.findings] == [(Code.FOREIGN_KEY, SEG3)]


def test_a_key_that_is_given_must_be_the_key() -> None:
    report = verify(storage(), [Target(storage="s")], Options(key=OTHER_KEY))
    assert [(finding.code, finding.path) for finding in report.findings] == [(Code.FOREIGN_KEY, CONTROL)]


@pytest.mark.slow
def test_workers_find_what_one_process_finds(original: Path) -> None:
    disk = RealDisk()
    directory = str(original / "storage0" / "1")
    starts = [0, 13, 30, 33, 35, 38, 40, 49]
    tasks = [
        SegmentTask(directory=directory, first_id=first, partition=1, key=None, next_first_id=after)
        for first, after in zip(starts, [*starts[1:], None], strict=True)
    ]
    alone = dict(run_on_segments(inspect_segment, disk, tasks, jobs=1, total_bytes=0))
    together = dict(run_on_segments(inspect_segment, disk, tasks, jobs=2, total_bytes=1, few_bytes=0))
    assert alone == together
    assert sum(report.records for report in together.values()) == 52
