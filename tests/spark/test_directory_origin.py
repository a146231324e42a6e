"""Directories against the manifest of the original's files, and against every damage that a copy can have.

What is asked again and again: rows that were never committed are never given, and what is missing is an error, not silence.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from waltz_spark.log.directory_origin import DirectoryOrigin, certain_mark
from waltz_spark.log.origin import Catalog, Extent, Span
from waltz_spark.log.segment import SegmentPlace, read_segment_runs

from tests.simulation.sample import PARTITIONS, ROOT, begin, blank_disk, open_directory
from tests.tiers import together
from waltzd.disk.simulated import SimDisk
from waltzd.errors import ForeignCluster, NoSuchPartition, WaltzError
from waltzd.errors.operations import ControlDamaged, HeaderDamaged, MarkUnknown, PartitionDamaged
from waltzd.format.layout import (
    CONTROL_NAME,
    FLAG_ASSIGNED,
    FLAG_AVAILABLE,
    HARD_STATE_BYTES,
    HARD_STATE_NAME,
    HEADER_BYTES,
    IDENTITY_NAME,
    ControlHeader,
    ControlStruct,
    FileHeader,
    HardState,
    Identity,
    index_name,
    initial_structs,
    segment_name,
)
from waltzd.format.record import Run, encode_payloads, join_runs

KEY = UUID(int=5)
BATCH = 4 << 20


# -- a storage in memory ---------------------------------------------------------------------------------------------------


def struct(low_mark: int, local_low_mark: int) -> ControlStruct:
    flags = FLAG_AVAILABLE | FLAG_ASSIGNED
    return ControlStruct(session=3, low_mark=low_mark, local_low_mark=local_low_mark, flags=flags, sequence=4)


def hard_state(committed: int, durable: int, newest: int = 0) -> HardState:
    return HardState(key=KEY, partition=0, incarnation=UUID(int=9), session=3, committed=committed, durable=durable,
                   newest=newest, segments=1, is_clean=False, sequence=2)  # fmt: skip


def log_of(count: int, seed: int = 1) -> Run:
    pick = random.Random(seed)
    return encode_payloads(0, [pick.randbytes(pick.choice([0, 10, 300, 5000])) for _ in range(count)])


def store(
    disk: SimDisk, storage: str, log: Run, cuts: list[int], *, mark: int, durable: int | None = None, key: UUID = KEY,
    with_hard_state: bool = True,
) -> str:  # fmt: skip
    """One partition, number 0, whose segments start at `cuts`; the directory of the partition."""
    disk.make_directory(storage)
    header = ControlHeader(created_ms=1, key=key, partitions=1)
    spare, _ = initial_structs()
    body = bytes(4) + spare.encode() + struct(mark, mark).encode()
    disk.create(f"{storage}/{CONTROL_NAME}").write(0, header.encode() + body)
    directory = f"{storage}/0"
    disk.make_directory(directory)
    for first, stop in zip(cuts, [*cuts[1:], len(log)], strict=True):
        write_segment(disk, directory, log.part(first, stop), key)
    if with_hard_state:
        disk.create(f"{storage}/{IDENTITY_NAME}").write(0, Identity(control=header, directory=UUID(int=2)).encode())
        raw = hard_state(mark, len(log) - 1 if durable is None else durable, cuts[-1] if cuts else 0).encode()
        disk.create(f"{directory}/{HARD_STATE_NAME}").write(0, raw.ljust(HARD_STATE_BYTES, b"\0"))
    return directory


def write_segment(disk: SimDisk, directory: str, run: Run, key: UUID = KEY) -> None:
    header = FileHeader(created_ms=1, key=key, partition=0, first_id=run.first_id).encode()
    entries = (run.bounds[:-1] + HEADER_BYTES).astype(">i8").tobytes()
    disk.create(f"{directory}/{segment_name(run.first_id)}").write_many(0, [header, run.data])
    disk.create(f"{directory}/{index_name(run.first_id)}").write_many(0, [header, entries])


def everything(origin: DirectoryOrigin, *, batch_bytes: int = BATCH) -> Iterator[Run]:
    for extent in origin.catalog().extents:
        yield from origin.read(extent, extent.span, batch_bytes=batch_bytes)


def read_all(origin: DirectoryOrigin) -> bytes:
    runs = list(everything(origin))
    return bytes(join_runs(runs).data) if runs else b""


def spans(origin: DirectoryOrigin) -> dict[int, Span]:
    return dict(origin.catalog().spans)


def the_extent(catalog: Catalog, id_: int) -> Extent:
    return next(extent for extent in catalog.extents if extent.span.first <= id_ <= extent.span.last)


# -- what the original wrote -----------------------------------------------------------------------------------------------


def manifest(original: Path, storage: str) -> tuple[dict[int, int], dict[int, list[str]]]:
    """The current low-water mark of each partition that is assigned, and the hash of each payload, by id."""
    section = (original / "manifest.txt").read_text().partition(f"## {storage}\n")[2].partition("\n## ")[0]
    marks: dict[int, int] = {}
    payloads: dict[int, list[str]] = {}
    for line in section.splitlines():
        found = re.match(r"control-struct partition=(\d+) .* lwm=(-?\d+) localLwm=(-?\d+) flags=(\d+) .*CURRENT", line)
        if found and int(found[4]) & FLAG_ASSIGNED:
            marks[int(found[1])] = min(int(found[2]), int(found[3]))
            payloads.setdefault(int(found[1]), [])
        elif line.startswith("rec "):
            words = line.split()
            rows = payloads.setdefault(int(words[1]), [])
            assert int(words[2]) == len(rows)
            rows.append(words[6])
    return marks, payloads


def hashes(runs: Iterator[Run]) -> list[str]:
    return [hashlib.sha256(run.record(number).payload).hexdigest() for run in runs for number in range(len(run))]


@pytest.mark.parametrize("storage", ["storage0", "storage1", "storage2"])
@pytest.mark.parametrize("allows_uncommitted", [False, True])
def test_the_files_of_the_original(original: Path, storage: str, allows_uncommitted: bool) -> None:
    """What lies above its marks was never known to be committed, and every partition has some of it."""
    marks, payloads = manifest(original, storage)
    origin = DirectoryOrigin(storages=(str(original / storage),), allows_uncommitted=allows_uncommitted)
    catalog = origin.catalog()
    assert str(catalog.key) == "1d07c30d-8ad3-4978-9a0b-63b5a017e338"
    assert any(len(payloads[number]) > mark + 1 for number, mark in marks.items())
    ends = {number: len(payloads[number]) - 1 if allows_uncommitted else mark for number, mark in marks.items()}
    assert catalog.spans == {number: Span(0, end) for number, end in ends.items()}
    for number, end in ends.items():
        extents = [extent for extent in catalog.extents if extent.partition == number]
        runs = (run for extent in extents for run in origin.read(extent, extent.span, batch_bytes=2000))
        assert hashes(runs) == payloads[number][: end + 1]


def test_several_directories_give_what_each_of_them_has(original: Path) -> None:
    storages = tuple(str(original / name) for name in ("storage2", "storage1"))
    catalog = DirectoryOrigin(storages=storages).catalog()
    assert list(catalog.spans) == [0, 1, 2, 3, 4, 5]
    assert {extent.place.split("/")[-3] for extent in catalog.extents if extent.partition in (4, 5)} == {"storage1"}
    with pytest.raises(NoSuchPartition, match="partition 4, 5 is not there"):
        DirectoryOrigin(storages=storages[:1]).catalog([0, 4, 5])


def test_an_origin_is_sent_to_where_it_is_read(original: Path) -> None:
    origin = DirectoryOrigin(storages=(str(original / "storage0"),))
    extent = origin.catalog([1]).extents[2]
    copy = pickle.loads(pickle.dumps(origin))  # noqa: S301
    assert copy == origin
    assert [bytes(run.data) for run in copy.read(extent, extent.span, batch_bytes=BATCH)] == [
        bytes(run.data) for run in origin.read(extent, extent.span, batch_bytes=BATCH)
    ]
    header = origin.header(extent)
    assert header is not None
    assert (header.partition, header.first_id) == (1, extent.span.first)


# -- what is certain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "said", "mark"),
    [
        (None, None, None),
        (struct(50, 50), None, 50),
        (struct(50, 30), None, 30),  # the original: it had less than was decided
        (struct(-1, -1), hard_state(-1, 80), -1),  # a session that has not begun
        (struct(50, 50), hard_state(70, 80), 70),
        (struct(50, 50), hard_state(20, 80), 50),
        (struct(50, 30), hard_state(20, 40), 40),  # being brought level: as far as it is on the disk
        (struct(50, 30), hard_state(20, 20), 30),
        (None, hard_state(70, 80), 70),
    ],
)
def test_how_far_a_replica_vouches(there: ControlStruct | None, said: HardState | None, mark: int | None) -> None:
    assert certain_mark(there, said) == mark


def test_a_dirty_tail_is_never_given() -> None:
    log = log_of(100)
    disk = SimDisk()
    store(disk, "s", log, [0, 40, 80], mark=70)
    origin = DirectoryOrigin(storages=("s",), disk=disk)
    assert spans(origin) == {0: Span(0, 70)}
    assert [extent.span for extent in origin.catalog().extents] == [Span(0, 39), Span(40, 70)]
    assert read_all(origin) == bytes(log.part(0, 71).data)
    whole = DirectoryOrigin(storages=("s",), allows_uncommitted=True, disk=disk)
    assert read_all(whole) == bytes(log.data)


def test_a_torn_tail_ends_what_is_not_committed() -> None:
    log = log_of(50)
    disk = SimDisk()
    directory = store(disk, "s", log, [0, 40], mark=44, durable=44)
    file = disk.open(f"{directory}/{segment_name(40)}", write=True)
    file.truncate(file.size() - 1)
    assert spans(DirectoryOrigin(storages=("s",), allows_uncommitted=True, disk=disk)) == {0: Span(0, 48)}
    assert spans(DirectoryOrigin(storages=("s",), disk=disk)) == {0: Span(0, 44)}


def test_the_one_that_reaches_furthest_is_read() -> None:
    log = log_of(100)
    disk = SimDisk()
    store(disk, "a", log.part(0, 60), [0], mark=50)
    store(disk, "b", log, [0, 30, 60], mark=90)
    store(disk, "c", log.part(0, 80), [0, 20], mark=70)
    origin = DirectoryOrigin(storages=("a", "b", "c"), disk=disk)
    assert spans(origin) == {0: Span(0, 90)}
    assert {extent.place.split("/")[0] for extent in origin.catalog().extents} == {"b"}
    assert read_all(origin) == bytes(log.part(0, 91).data)


def test_segments_alone_say_nothing_about_what_is_committed() -> None:
    log = log_of(60)
    disk = SimDisk()
    directory = store(disk, "s", log, [0, 30], mark=50)
    disk.remove(f"s/{CONTROL_NAME}")
    disk.remove(f"{directory}/{segment_name(0)}")  # a part of an archive, which begins anywhere
    with pytest.raises(MarkUnknown, match="s has no control file"):
        DirectoryOrigin(storages=("s",), disk=disk).catalog()
    origin = DirectoryOrigin(storages=("s",), allows_uncommitted=True, disk=disk)
    assert spans(origin) == {0: Span(30, 59)}
    assert read_all(origin) == bytes(log.part(30, 60).data)


# -- logs whose old segments were moved away -------------------------------------------------------------------------------


def trim(disk: SimDisk, directory: str, first_ids: list[int]) -> None:
    for first_id in first_ids:
        disk.remove(f"{directory}/{segment_name(first_id)}")


@pytest.mark.parametrize("allows_uncommitted", [False, True])
def test_a_log_begins_where_its_first_segment_does(allows_uncommitted: bool) -> None:
    log = log_of(90)
    disk = SimDisk()
    directory = store(disk, "s", log, [0, 30, 60], mark=89)
    trim(disk, directory, [0])
    origin = DirectoryOrigin(storages=("s",), allows_uncommitted=allows_uncommitted, disk=disk)
    assert spans(origin) == {0: Span(30, 89)}
    assert read_all(origin) == bytes(log.part(30, 90).data)


def test_nothing_is_left_but_the_segment_that_waits_for_records() -> None:
    log = log_of(90)
    disk = SimDisk()
    directory = store(disk, "s", log, [0, 30, 90], mark=89)
    assert spans(DirectoryOrigin(storages=("s",), disk=disk)) == {0: Span(0, 89)}
    trim(disk, directory, [0, 30])
    catalog = DirectoryOrigin(storages=("s",), disk=disk).catalog()
    assert (catalog.spans, catalog.extents) == ({0: Span(90, 89)}, ())


def test_several_directories_are_together_what_each_of_them_begins_with() -> None:
    """Where they overlap, the one that reaches furthest is read."""
    log = log_of(100)
    disk = SimDisk()
    trim(disk, store(disk, "a", log, [0, 50, 70], mark=99), [0])
    trim(disk, store(disk, "b", log.part(0, 80), [0, 20, 40], mark=79), [0])
    store(disk, "c", log.part(0, 30), [0, 10], mark=25)
    origin = DirectoryOrigin(storages=("a", "b", "c"), disk=disk)
    assert spans(origin) == {0: Span(0, 99)}
    found = [(extent.place.split("/")[0], extent.span.first, extent.span.last) for extent in origin.catalog().extents]
    assert found == [("c", 0, 9), ("c", 10, 19), ("b", 20, 39), ("b", 40, 49), ("a", 50, 69), ("a", 70, 99)]
    assert read_all(origin) == bytes(log.data)


def test_between_two_directories_ids_are_missing() -> None:
    """Those who ask for other ids are not held up."""
    log = log_of(100)
    disk = SimDisk()
    trim(disk, store(disk, "new", log, [0, 70], mark=99), [0])
    store(disk, "old", log.part(0, 60), [0, 30], mark=44)  # ids 45 to 59 are there, and were never known to be committed
    origin = DirectoryOrigin(storages=("old", "new"), disk=disk)
    catalog = origin.catalog()
    assert catalog.spans == {0: Span(0, 99)}
    assert [extent.span for extent in catalog.extents] == [Span(0, 29), Span(30, 44), Span(45, 69), Span(70, 99)]
    assert [extent.bytes > 0 for extent in catalog.extents] == [True, True, False, True]
    seen: list[Run] = []
    with pytest.raises(PartitionDamaged, match="new/0: ids 45 to 69 of partition 0 are missing") as caught:
        seen.extend(everything(origin))
    assert [caught.value.number(name) for name in ("partition", "first_id", "last_id")] == [0, 45, 69]
    assert bytes(join_runs(seen).data) == bytes(log.part(0, 45).data)
    assert origin.header(catalog.extents[2]) is None
    last = catalog.extents[3]
    assert bytes(join_runs(list(origin.read(last, last.span, batch_bytes=BATCH))).data) == bytes(log.part(70, 100).data)


@together("seed", range(60))
def test_any_directories_together_hold_what_one_of_them_holds(seed: int) -> None:
    """Each begins and ends somewhere, and may have lost a segment in between. The twin looks for each id in all of them."""
    pick = random.Random(seed)
    log = log_of(100)
    disk = SimDisk()
    held: list[set[int]] = []
    spans_of: list[Span] = []
    names = [f"s{number}" for number in range(pick.randrange(1, 5))]
    for name in names:
        count = pick.randrange(20, 101)
        cuts = sorted({0, *(pick.randrange(1, count) for _ in range(pick.randrange(1, 7)))})
        mark = pick.randrange(cuts[-1], count)
        directory = store(disk, name, log.part(0, count), cuts, mark=mark)
        gone = cuts[: pick.randrange(len(cuts))]
        left = cuts[len(gone) :]
        lost = pick.choice(left[1:-1]) if len(left) > 2 and pick.random() < 0.3 else None
        trim(disk, directory, gone if lost is None else [*gone, lost])
        follows = left[left.index(lost) + 1] if lost is not None else 0
        held.append({id_ for id_ in range(left[0], mark + 1) if lost is None or not lost <= id_ < follows})
        spans_of.append(Span(left[0], mark))
    origin = DirectoryOrigin(storages=tuple(names), disk=disk)
    catalog = origin.catalog()
    first, last = min(span.first for span in spans_of), max(span.last for span in spans_of)
    assert catalog.spans == {0: Span(first, last)}
    ids = [id_ for extent in catalog.extents for id_ in range(extent.span.first, extent.span.last + 1)]
    assert ids == list(range(first, last + 1)), "the extents cover the span, each id once"
    for id_ in pick.sample(ids, min(len(ids), 40)):
        extent = the_extent(catalog, id_)
        if any(id_ in each for each in held):
            (run,) = origin.read(extent, Span(id_, id_), batch_bytes=BATCH)
            assert bytes(run.data) == bytes(log.part(id_, id_ + 1).data)
        else:
            with pytest.raises(PartitionDamaged, match=r"of partition 0 (is|are) missing") as caught:
                list(origin.read(extent, Span(id_, id_), batch_bytes=BATCH))
            low, high = (caught.value.number(name) for name in ("first_id", "last_id"))
            assert low is not None
            assert high is not None
            assert low <= id_ <= high


def test_where_a_segment_began_is_null_while_its_header_cannot_be_read() -> None:
    """The records come from another directory then."""
    log = log_of(60)
    disk = SimDisk()
    directory = store(disk, "s", log, [0, 30], mark=59)
    store(disk, "t", log, [0], mark=59)
    disk.corrupt(f"{directory}/{segment_name(30)}", 12, b"\xff")
    disk.corrupt(f"{directory}/{segment_name(0)}", 0, b"\xff")
    origin = DirectoryOrigin(storages=("s", "t"), disk=disk)
    first, second = origin.catalog().extents
    assert origin.header(first) is None
    assert bytes(join_runs(list(origin.read(second, second.span, batch_bytes=BATCH))).data) == bytes(log.part(30, 60).data)


# -- any part of a segment, whatever its index says ------------------------------------------------------------------------


@together("seed", range(40))
def test_any_part_is_read_whatever_the_index_says(seed: int) -> None:
    pick = random.Random(seed)
    log = log_of(200, seed)
    disk = SimDisk()
    directory = store(disk, "s", log, [0, 50, 120], mark=199)
    for first in (0, 50, 120):
        path = f"{directory}/{index_name(first)}"
        size = disk.size(path)
        match pick.randrange(6):
            case 0:
                disk.remove(path)
            case 1:
                disk.open(path, write=True).truncate(pick.randrange(size))
            case 2:
                at = pick.randrange(HEADER_BYTES, size)
                disk.corrupt(path, at, pick.randbytes(min(pick.choice([1, 8, 80]), size - at)))
            case 3:
                disk.corrupt(path, HEADER_BYTES, bytes(size - HEADER_BYTES))
            case 4:
                disk.corrupt(path, HEADER_BYTES, b"\x7f" * (size - HEADER_BYTES))
            case _:
                pass
    origin = DirectoryOrigin(storages=("s",), disk=disk)
    catalog = origin.catalog()
    for _ in range(15):
        first = pick.randrange(200)
        extent = the_extent(catalog, first)
        span = Span(first, pick.randrange(first, extent.span.last + 1))
        batch_bytes = pick.choice([1, 41, 1000, 20_000, BATCH])
        runs = list(origin.read(extent, span, batch_bytes=batch_bytes))
        assert [id_ for run in runs for id_ in range(run.first_id, run.last_id + 1)] == list(range(first, span.last + 1))
        assert bytes(join_runs(runs).data) == bytes(log.part(first, span.last + 1).data)
        assert all(len(run.data) <= max(batch_bytes, 100) or len(run) == 1 for run in runs), "a batch is about so large"


def test_an_index_that_points_into_a_payload_is_not_believed() -> None:
    """The payload holds a whole record with the very id that is looked for, and other content."""
    fake = encode_payloads(2, [b"never committed"])
    log = encode_payloads(0, [b"a", b"b" + bytes(fake.data), b"c", b"d"])
    disk = SimDisk()
    directory = store(disk, "s", log, [0], mark=3)
    inside = HEADER_BYTES + int(log.bounds[1]) + 36 + 1
    disk.corrupt(f"{directory}/{index_name(0)}", HEADER_BYTES + 8 * 2, inside.to_bytes(8, "big"))
    origin = DirectoryOrigin(storages=("s",), disk=disk)
    extent = origin.catalog().extents[0]
    for first in range(4):
        runs = list(origin.read(extent, Span(first, 3), batch_bytes=BATCH))
        assert bytes(join_runs(runs).data) == bytes(log.part(first, 4).data)


def test_one_reading_goes_over_all_segments() -> None:
    """Where another directory takes over, its segments may be cut elsewhere."""
    log = log_of(90)
    disk = SimDisk()
    directory = store(disk, "s", log, [0, 30, 60], mark=89)
    runs = list(read_segment_runs(disk, SegmentPlace(directory, 0, KEY), Span(10, 80), batch_bytes=BATCH))
    assert bytes(join_runs(runs).data) == bytes(log.part(10, 81).data)


# -- damage ----------------------------------------------------------------------------------------------------------------


def test_damage_names_partition_ids_and_bytes() -> None:
    log = log_of(100)
    disk = SimDisk()
    directory = store(disk, "s", log, [0, 50], mark=99)
    path = f"{directory}/{segment_name(50)}"
    base = HEADER_BYTES - int(log.bounds[50])
    start, stop = base + int(log.bounds[70]), base + int(log.bounds[72])
    for number in (70, 71):
        disk.corrupt(path, base + int(log.bounds[number]) + 20, b"\xff\xee")
    origin = DirectoryOrigin(storages=("s",), disk=disk)
    seen: list[Run] = []
    with pytest.raises(PartitionDamaged) as caught:
        seen.extend(everything(origin, batch_bytes=3000))
    assert bytes(join_runs(seen).data) == bytes(log.part(0, 70).data), "all in front of it was given"
    assert caught.value.message == f"{path}: bytes {start} to {stop - 1} are not the records of ids 70 to 71 of partition 0"
    assert caught.value.detail_not_done == "no row from id 70 on was returned"
    facts = [caught.value.number(name) for name in ("partition", "first_id", "last_id", "first_byte", "last_byte")]
    assert facts == [0, 70, 71, start, stop - 1]
    extent = the_extent(origin.catalog(), 80)
    rest = list(origin.read(extent, Span(72, 99), batch_bytes=BATCH))
    assert bytes(join_runs(rest).data) == bytes(log.part(72, 100).data), "and what lies behind it can be read"


def test_another_directory_makes_damage_good() -> None:
    log = log_of(100)
    disk = SimDisk()
    store(disk, "a", log, [0, 50], mark=99)
    store(disk, "b", log, [0, 20, 70], mark=95)
    store(disk, "c", log, [0, 40], mark=98)
    disk.corrupt(f"a/0/{segment_name(0)}", HEADER_BYTES + int(log.bounds[20]) + 3, b"\xff")
    disk.corrupt(f"a/0/{segment_name(50)}", HEADER_BYTES + int(log.bounds[80] - log.bounds[50]) + 3, b"\xff")
    disk.corrupt(f"c/0/{segment_name(40)}", HEADER_BYTES + 3, b"\xff")
    origin = DirectoryOrigin(storages=("a", "b", "c"), disk=disk)
    first, second = origin.catalog().extents
    assert bytes(join_runs(list(origin.read(first, first.span, batch_bytes=500))).data) == bytes(log.part(0, 50).data)
    runs: list[Run] = []
    with pytest.raises(PartitionDamaged, match=r"^a/0/.* record of id 80 of partition 0"):
        runs.extend(origin.read(second, second.span, batch_bytes=BATCH))
    assert [run.last_id for run in runs][-1:] == [79], "b does not vouch for the last ids, c for none that it can prove"


def cut_tail(disk: SimDisk) -> None:
    file = disk.open(f"s/0/{segment_name(60)}", write=True)
    file.truncate(HEADER_BYTES + 10)


def lose_last_segment(disk: SimDisk) -> None:
    disk.remove(f"s/0/{segment_name(60)}")


def lose_middle_segment(disk: SimDisk) -> None:
    disk.remove(f"s/0/{segment_name(30)}")


def lose_all_segments(disk: SimDisk) -> None:
    trim(disk, "s/0", [0, 30, 60])


def lose_partition(disk: SimDisk) -> None:
    disk.rename("s/0", "s/0.set-aside-1")


def lose_hard_state(disk: SimDisk) -> None:
    disk.remove(f"s/0/{HARD_STATE_NAME}")


def break_hard_state(disk: SimDisk) -> None:
    disk.corrupt(f"s/0/{HARD_STATE_NAME}", 60, b"\xff")


def break_control(disk: SimDisk) -> None:
    disk.remove(f"s/{IDENTITY_NAME}")
    disk.corrupt(f"s/{CONTROL_NAME}", 28, b"\xff")


def foreign_segment(disk: SimDisk) -> None:
    disk.corrupt(f"s/0/{segment_name(30)}", 12, b"\xff")


def other_name(disk: SimDisk) -> None:
    disk.rename(f"s/0/{segment_name(30)}", f"s/0/{segment_name(31)}")


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (cut_tail, PartitionDamaged, "record of id 60"),
        (lose_last_segment, PartitionDamaged, "ids 60 to 89 are missing: no segment starts at id 60"),
        (lose_middle_segment, PartitionDamaged, "ids 30 to 59 of partition 0 are missing"),
        (lose_all_segments, PartitionDamaged, "ids 0 to 89 are missing: no segment starts before id 90"),
        (lose_partition, PartitionDamaged, "the control file says that it is here, and its directory is missing"),
        (lose_hard_state, PartitionDamaged, "the hard-state file is missing"),
        (break_hard_state, PartitionDamaged, "fails its checksum"),
        (break_control, ControlDamaged, "the control file"),
        (foreign_segment, HeaderDamaged, "should be cluster 00000000-0000-0000-0000-000000000005"),
        (other_name, PartitionDamaged, "id 30 of partition 0 is missing"),
    ],
)
def test_what_is_missing_is_an_error_and_others_make_it_good(damage: object, kind: type[WaltzError], message: str) -> None:
    log = log_of(90)
    disk = SimDisk()
    store(disk, "s", log, [0, 30, 60], mark=89)
    store(disk, "t", log, [0, 45], mark=89)
    assert callable(damage)
    damage(disk)
    with pytest.raises(kind) as caught:
        read_all(DirectoryOrigin(storages=("s",), disk=disk))
    assert message in caught.value.message
    assert read_all(DirectoryOrigin(storages=("s", "t"), disk=disk)) == bytes(log.data)


def test_of_a_storage_that_cannot_be_read_nobody_knows_what_it_had(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original / "storage0", tmp_path / "broken")
    shutil.copytree(original / "storage1", tmp_path / "whole")
    with (tmp_path / "broken" / CONTROL_NAME).open("r+b") as file:
        file.truncate(100)
    broken, whole, part = str(tmp_path / "broken"), str(tmp_path / "whole"), str(original / "storage2")
    assert list(DirectoryOrigin(storages=(broken, whole)).catalog().spans) == [0, 1, 2, 3, 4, 5]
    assert list(DirectoryOrigin(storages=(broken, part)).catalog([0, 1]).spans) == [0, 1]
    with pytest.raises(ControlDamaged):
        DirectoryOrigin(storages=(broken, part)).catalog()


@pytest.mark.parametrize("what", [IDENTITY_NAME, CONTROL_NAME])
def test_either_of_two_files_says_which_cluster_it_is(what: str) -> None:
    log = log_of(60)
    disk = SimDisk()
    store(disk, "s", log, [0, 30], mark=59)
    origin = DirectoryOrigin(storages=("s",), disk=disk)
    catalog = origin.catalog()
    disk.corrupt(f"s/{what}", 24, b"\xff")  # in the key
    assert origin.catalog() == catalog
    assert read_all(origin) == bytes(log.data)


def test_two_clusters_are_never_mixed() -> None:
    disk = SimDisk()
    store(disk, "a", log_of(10), [0], mark=9)
    store(disk, "b", log_of(20), [0], mark=19, key=UUID(int=6), with_hard_state=False)
    with pytest.raises(ForeignCluster, match=r"a belongs to the cluster .*5, b to .*6"):
        DirectoryOrigin(storages=("a", "b"), disk=disk).catalog()


def test_the_group_log_of_a_storage_is_left_out() -> None:
    """It holds nothing of applications."""
    disk = blank_disk()
    directory = open_directory(disk)
    for number in (0, PARTITIONS):
        replica = begin(directory, number, records=6)
        replica.open_session(4)
        replica.set_low_mark(4, 5)
    directory.close()
    origin = DirectoryOrigin(storages=(ROOT,), disk=disk)
    assert sorted(origin.catalog().spans) == [0]
    with pytest.raises(NoSuchPartition):
        origin.catalog([PARTITIONS])
