"""Damage is not a torn tail: whichever bytes change, an id is served right or refused, never wrong, never forgotten.

One partition is harmed in every way that a medium, a restore or a hand can harm it. Each time it is looked at twice, once
by a reader and once by an owner who asks for its vote, and again after another restart: damage that was seen once must
not be gone because the daemon was started again. The neighbour must not notice anything.
"""

from __future__ import annotations

import random
import resource
import tracemalloc
from collections.abc import Callable, Iterable

import pytest

from tests.simulation.sample import (
    ROOT,
    blank_disk,
    expected,
    first_ids,
    goes_on,
    hard_state_path,
    index_path,
    is_vouched_for,
    open_directory,
    run_for,
    sample,
    segment_path,
    served,
)
from tests.tiers import in_turns
from waltzd.disk.simulated import SimDisk
from waltzd.errors import WaltzError
from waltzd.errors.operations import BelowFloor, PartitionDamaged
from waltzd.format.finding import Code
from waltzd.format.layout import HEADER_BYTES, index_offset, read_hard_state_file
from waltzd.format.record import encode_payloads

RECORDS = 12
SENT = expected(0, RECORDS)
ALL = set(range(RECORDS))
NEIGHBOUR = expected(1, RECORDS)


def bounds() -> dict[int, list[int]]:
    """Where the records of each segment start, and where the last one ends."""
    starts: dict[int, list[int]] = {}
    firsts = first_ids(sample(RECORDS))
    for first_id, next_id in zip(firsts, [*firsts[1:], RECORDS], strict=True):
        at = [HEADER_BYTES]
        for id_ in range(first_id, next_id):
            at.append(at[-1] + len(SENT[id_]))
        starts[first_id] = at
    return starts


BOUNDS = bounds()
FIRSTS = sorted(BOUNDS)
SEALED, LAST = FIRSTS[1], FIRSTS[-1]


def ids_of(first_id: int) -> set[int]:
    return set(range(first_id, first_id + len(BOUNDS[first_id]) - 1))


def id_at(first_id: int, offset: int) -> int | None:
    """Which record a byte belongs to; None in the header."""
    starts = BOUNDS[first_id]
    return next((first_id + i for i, start in enumerate(starts[:-1]) if start <= offset < starts[i + 1]), None)


def durable_id(disk: SimDisk) -> int:
    hard_state = read_hard_state_file(bytes(disk.content(hard_state_path(0))), "promise")[0]
    assert hard_state is not None
    return hard_state.durable


def judge(disk: SimDisk, *, lost: Iterable[int] | None = None, again: bool = True) -> set[int]:
    """The ids that partition 0 still serves. It may lose silently only a tail that nobody was promised.

    `lost` says which ids may be refused at most; `again`, whether to look at the neighbour, and behind a restart, too."""
    durable = durable_id(disk)
    by_reader = look(disk, durable, reads_first=True, with_neighbour=again)
    by_owner = look(disk, durable, reads_first=False, with_neighbour=again)
    assert by_reader == by_owner
    if lost is not None:
        assert by_reader >= ALL - set(lost), f"refused without need: {sorted(ALL - set(lost) - by_reader)}"
    if again:
        after = disk.clone(1)
        after.kill()
        open_directory(after).partition(0).prove()
        after.kill()
        assert look(after, durable, reads_first=False) == by_reader, "a restart changed what is known of the damage"
    return by_reader


def look(disk: SimDisk, durable: int, *, reads_first: bool, with_neighbour: bool = True) -> set[int]:
    disk = disk.clone(2)
    disk.kill()
    directory = open_directory(disk)
    if with_neighbour:
        assert served(directory.partition(1), NEIGHBOUR) == ALL
        assert is_vouched_for(directory.partition(1))
        goes_on(directory.partition(1), 1)
    partition = directory.partition(0)
    if not reads_first:
        is_sound = is_vouched_for(partition)
        found = served(partition, SENT)
        assert is_sound == partition.status().is_sound, "a reader finds damage that the owner was not told of"
    else:
        found = served(partition, SENT)
        is_sound = is_vouched_for(partition)
    if is_sound:
        assert found == set(range(partition.last_id + 1)), "a sound replica has no holes"
        assert partition.last_id >= durable, f"ids up to {durable} were promised, {partition.last_id} are vouched for"
        goes_on(partition, 0)
    else:
        session = partition.promised_session
        if any(finding.code is not Code.SHORT_LOG for finding in partition.findings):
            with pytest.raises(PartitionDamaged):
                partition.append(session, [run_for(0, partition.last_id + 1, 1)], -1)
        with pytest.raises(PartitionDamaged):
            partition.set_low_mark(session, partition.last_id)
        assert "damaged" in partition.describe()
    return found


def damaged(first_id: int, offset: int, value: bytes, *, clean: bool) -> SimDisk:
    disk = sample(RECORDS, clean=clean)
    disk.corrupt(segment_path(0, first_id), offset, value)
    return disk


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("clean", in_turns([True, False], of=2), ids=["stopped", "killed"])
@pytest.mark.parametrize("first_id", [SEALED, LAST], ids=["sealed", "last"])
def test_every_byte_of_a_segment_is_flipped(first_id: int, clean: bool, every: int) -> None:
    """One bit of a byte and all bits of the next, and the other way round where it was killed; in short, every second byte
    where it was stopped, and the others where it was killed."""
    origin = sample(RECORDS, clean=clean)
    content = bytes(origin.content(segment_path(0, first_id)))
    assert len(content) == BOUNDS[first_id][-1]
    for offset in range(clean * (every - 1), len(content), every):
        disk = origin.clone(offset)
        pattern = 0x01 if offset // every % 2 == clean else 0xFF
        disk.corrupt(segment_path(0, first_id), offset, bytes([content[offset] ^ pattern]))
        hit = id_at(first_id, offset)
        found = judge(disk, lost=ids_of(first_id) if hit is None else [hit], again=offset % 10 == 0)
        if hit is not None:
            assert hit not in found


@pytest.mark.parametrize("clean", in_turns([True, False], of=2), ids=["stopped", "killed"])
@pytest.mark.parametrize("first_id", [SEALED, LAST], ids=["sealed", "last"])
def test_a_segment_is_cut_short_at_every_length(first_id: int, clean: bool) -> None:
    """Every second length where it was stopped, the others where it was killed, and those around each record in both."""
    origin = sample(RECORDS, clean=clean)
    around = {end + by for end in BOUNDS[first_id] for by in (-1, 0, 1)}
    for size in range(BOUNDS[first_id][-1]):
        if size % 2 == clean and size not in around:
            continue
        disk = origin.clone(size)
        file = disk.open(segment_path(0, first_id), write=True)
        file.truncate(size)
        file.flush()
        whole = {first_id + i for i, end in enumerate(BOUNDS[first_id][1:]) if end <= size}
        found = judge(disk, lost=ids_of(first_id) - whole, again=size % 10 == 0)
        assert found == ALL - ids_of(first_id) | whole


@pytest.mark.parametrize("first_id", FIRSTS)
def test_a_missing_segment_is_missed(first_id: int) -> None:
    disk = sample(RECORDS)
    disk.remove(segment_path(0, first_id))
    assert judge(disk, lost=ids_of(first_id)) == ALL - ids_of(first_id)
    disk.remove(index_path(0, first_id))
    assert judge(disk, lost=ids_of(first_id)) == ALL - ids_of(first_id)


def test_all_segments_are_missing() -> None:
    disk = sample(RECORDS)
    for first_id in FIRSTS:
        disk.remove(segment_path(0, first_id))
        disk.remove(index_path(0, first_id))
    assert judge(disk) == set()


@pytest.mark.parametrize("first_id", FIRSTS)
@pytest.mark.parametrize("suffix", ["remove", "empty", "zeros", "swap"])
def test_an_index_is_never_worth_more_than_the_time_to_make_it_again(first_id: int, suffix: str) -> None:
    disk = sample(RECORDS)
    path = index_path(0, first_id)
    if suffix == "remove":
        disk.remove(path)
    elif suffix == "swap":
        other = FIRSTS[(FIRSTS.index(first_id) + 1) % len(FIRSTS)]
        _swap(disk, path, index_path(0, other))
    else:
        size = disk.size(path)
        file = disk.open(path, write=True)
        file.truncate(0)
        if suffix == "zeros":
            file.truncate(size)
        file.flush()
    assert judge(disk) == ALL


def _swap(disk: SimDisk, one: str, other: str) -> None:
    contents = {path: bytes(disk.content(path)) for path in (one, other)}
    for path, content in ((one, contents[other]), (other, contents[one])):
        file = disk.open(path, write=True)
        file.truncate(0)
        file.write(0, content)
        file.flush()


@pytest.mark.parametrize(("one", "other"), [(SEALED, FIRSTS[2]), (SEALED, LAST), (FIRSTS[0], LAST)])
def test_segments_that_changed_places_are_refused(one: int, other: int) -> None:
    disk = sample(RECORDS)
    _swap(disk, segment_path(0, one), segment_path(0, other))
    assert judge(disk, lost=ids_of(one) | ids_of(other)) == ALL - ids_of(one) - ids_of(other)


@pytest.mark.parametrize("first_id", [FIRSTS[0], LAST])
def test_a_segment_of_another_partition_is_refused(first_id: int) -> None:
    """The same ids, the same sizes, whole records: only the header tells."""
    disk = sample(RECORDS)
    theirs = sample(RECORDS).content(segment_path(1, FIRSTS[0]))
    if first_id != FIRSTS[0]:
        theirs = sample(RECORDS).content(segment_path(1, first_ids(disk, 1)[-1]))
    file = disk.open(segment_path(0, first_id), write=True)
    file.truncate(0)
    file.write(0, bytes(theirs))
    file.flush()
    assert judge(disk, lost=ids_of(first_id)) == ALL - ids_of(first_id)


def test_the_promise_of_another_partition_is_refused() -> None:
    disk = sample(RECORDS)
    _swap(disk, hard_state_path(0), hard_state_path(1))
    directory = open_directory(disk)
    for number in (0, 1):
        with pytest.raises(WaltzError) as caught:
            directory.partition(number)
        assert f"not to {number}" in caught.value.message


@pytest.mark.parametrize("seed", range(30))
def test_an_older_state_comes_back_over_a_part_of_a_file(seed: int) -> None:
    """A block of the file as it once was: before its records were written, or with records of a history that was cut."""
    chance = random.Random(seed)
    disk = blank_disk(seed)
    directory = open_directory(disk, segment_bytes=4000)
    for number in (1, 0):
        partition = directory.create_partition(number)
        partition.open_session(1)
        partition.set_low_mark(1, -1)
        if number == 0:
            partition.append(1, [encode_payloads(0, [bytes([65 + i]) * chance.randrange(3, 90) for i in range(8)])], -1)
            earlier = bytes(disk.content(segment_path(0, 0)))
            partition.open_session(2)
            partition.truncate(2, -1)
            partition.set_low_mark(2, -1)
        for id_ in range(RECORDS):
            partition.append(partition.promised_session, [run_for(number, id_, 1)], -1)
    directory.close()
    now = bytes(disk.content(segment_path(0, 0)))
    earlier = earlier if chance.random() < 0.5 else now[: chance.randrange(HEADER_BYTES, len(now))]
    at = chance.randrange(HEADER_BYTES, len(now) - 1)
    size = min(chance.choice([16, 64, 200, 600]), len(now) - at)
    block = earlier.ljust(len(now), b"\0")[at : at + size]
    disk.corrupt(segment_path(0, 0), at, block)
    bounds = [HEADER_BYTES]
    for record in SENT:
        bounds.append(bounds[-1] + len(record))
    hit = {
        id_
        for id_ in ALL
        if now[bounds[id_] : bounds[id_ + 1]] != disk.content(segment_path(0, 0))[bounds[id_] : bounds[id_ + 1]]
    }
    assert judge(disk, lost=hit) == ALL - hit


def _junk() -> dict[str, Callable[[int], bytes]]:
    return {
        "one byte": lambda next_id: b"\x01",
        "random": lambda next_id: random.Random(next_id).randbytes(700),
        "zeros": lambda next_id: bytes(4096),
        "ones": lambda next_id: b"\xff" * 100,
        "a record of another id": lambda next_id: bytes(run_for(0, next_id + 7, 1).data),
        "an old record": lambda next_id: bytes(run_for(0, 0, 1).data),
        "half of the next record": lambda next_id: bytes(run_for(0, next_id, 1).data)[:-5],
        "a head that claims 2 GiB": lambda next_id: next_id.to_bytes(8, "big") + bytes(20) + b"\x7f\xff\xff\xff" + bytes(8),
        "a negative length": lambda next_id: next_id.to_bytes(8, "big") + bytes(20) + b"\xff\xff\xff\xff" + bytes(8),
    }


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize("first_id", [SEALED, LAST], ids=["sealed", "last"])
@pytest.mark.parametrize("kind", sorted(_junk()))
def test_bytes_too_many_cost_no_record(first_id: int, clean: bool, kind: str) -> None:
    disk = sample(RECORDS, clean=clean)
    next_id = max(ids_of(first_id)) + 1
    file = disk.open(segment_path(0, first_id), write=True)
    file.write(file.size(), _junk()[kind](next_id))
    file.flush()
    assert judge(disk, lost=set()) == ALL


def test_bytes_too_many_in_a_sealed_segment_are_reported_and_a_new_session_goes_on() -> None:
    disk = sample(RECORDS)
    file = disk.open(segment_path(0, SEALED), write=True)
    file.write(file.size(), b"junk")
    partition = open_directory(disk).partition(0)
    status = partition.open_session(9)
    assert [(f.first_byte, f.last_byte, f.first_id) for f in status.findings] == [
        (BOUNDS[SEALED][-1], BOUNDS[SEALED][-1] + 3, None)
    ]
    partition.truncate(9, RECORDS - 1)
    goes_on(partition, 0)
    disk.power_cut()
    partition = open_directory(disk).partition(0)
    assert served(partition, [*SENT, *expected(0, RECORDS + 2)[RECORDS:]]) == set(range(RECORDS + 2))


@pytest.mark.parametrize("hit", range(6, 11))
def test_damage_above_the_floor_is_healed_by_the_next_session(hit: int) -> None:
    """Nobody has decided what stands above the mark: the new owner cuts in front of the damage and sends it again."""
    disk = sample(RECORDS, mark=5)
    first_id = max(first for first in first_ids(disk) if first <= hit)
    offset = HEADER_BYTES + sum(len(record) for record in SENT[first_id:hit])
    disk.corrupt(segment_path(0, first_id), offset + 30, b"\xa5\xa5")
    partition = open_directory(disk).partition(0)
    status = partition.open_session(9)
    assert [(f.first_id, f.last_id) for f in status.findings] == [(hit, hit)]
    assert served(partition, SENT) == ALL - {hit}
    with pytest.raises(PartitionDamaged):
        partition.truncate(9, hit)
    with pytest.raises(BelowFloor):
        partition.truncate(9, 4)
    assert partition.truncate(9, hit - 1).is_sound
    assert partition.last_id == hit - 1
    assert served(partition, SENT) == set(range(hit))
    goes_on(partition, 0)
    disk.power_cut()
    partition = open_directory(disk).partition(0)
    assert is_vouched_for(partition)
    assert served(partition, expected(0, hit + 2)) == set(range(hit + 2))


@pytest.mark.parametrize("hit", [0, 3, 5])
def test_damage_below_the_floor_refuses_for_good(hit: int) -> None:
    disk = sample(RECORDS, mark=5)
    first_id = max(first for first in first_ids(disk) if first <= hit)
    disk.corrupt(segment_path(0, first_id), HEADER_BYTES + sum(len(r) for r in SENT[first_id:hit]) + 30, b"\xa5\xa5")
    for session in (9, 10):
        partition = open_directory(disk).partition(0)
        partition.open_session(session)
        assert served(partition, SENT) == ALL - {hit}
        assert not partition.status().is_sound
        with pytest.raises(BelowFloor):
            partition.truncate(session, hit - 1)
        for mark in (5, 8, RECORDS - 1, RECORDS + 5):
            with pytest.raises(PartitionDamaged):
                partition.truncate(session, mark)
        with pytest.raises(PartitionDamaged):
            partition.set_low_mark(session, RECORDS - 1)
        disk.kill()


@pytest.mark.parametrize("first_id", FIRSTS)
def test_a_header_that_is_damaged_above_the_floor_is_healed_too(first_id: int) -> None:
    disk = damaged(first_id, 12, b"\x55\x55", clean=True)
    partition = open_directory(disk).partition(0)
    assert not partition.open_session(9).is_sound
    assert served(partition, SENT) == ALL - ids_of(first_id)
    assert partition.truncate(9, first_id - 1).is_sound
    assert partition.last_id == first_id - 1
    goes_on(partition, 0)
    disk.power_cut()
    assert is_vouched_for(open_directory(disk).partition(0))


@pytest.mark.parametrize("first_id", FIRSTS[1:])
def test_a_missing_segment_above_the_floor_is_healed_too(first_id: int) -> None:
    disk = sample(RECORDS)
    disk.remove(segment_path(0, first_id))
    partition = open_directory(disk).partition(0)
    assert not partition.open_session(9).is_sound
    assert partition.truncate(9, first_id - 1).is_sound
    goes_on(partition, 0)
    disk.power_cut()
    partition = open_directory(disk).partition(0)
    assert is_vouched_for(partition)
    assert served(partition, expected(0, first_id + 2)) == set(range(first_id + 2))


@pytest.mark.parametrize("mark", range(-1, RECORDS))
def test_a_wrong_index_never_decides_what_is_cut(mark: int) -> None:
    """Every entry points somewhere else; what stays is exactly what should."""
    disk = sample(RECORDS)
    partition = open_directory(disk).partition(0)
    for first_id in FIRSTS:
        entries = len(BOUNDS[first_id]) - 1
        for entry, start in enumerate(BOUNDS[first_id][:-1]):
            wrong = BOUNDS[first_id][(entry + 1) % entries] if entries > 1 else start + 3
            disk.corrupt(index_path(0, first_id), HEADER_BYTES + 8 * entry, wrong.to_bytes(8, "big"))
    partition.open_session(9)
    assert partition.truncate(9, mark).last_id == mark
    assert served(partition, SENT) == set(range(mark + 1))
    goes_on(partition, 0)
    disk.power_cut()
    partition = open_directory(disk).partition(0)
    assert is_vouched_for(partition)
    assert served(partition, expected(0, mark + 3)) == set(range(mark + 3))


def test_looking_again_never_makes_damage_forgotten() -> None:
    """The end of the log is gone, and the index of what is left is wrong: making it right heals nothing."""
    disk = sample(RECORDS, clean=True)
    file = disk.open(segment_path(0, LAST), write=True)
    file.truncate(BOUNDS[LAST][-2] + 3)
    file.flush()
    partition = open_directory(disk).partition(0)
    assert [f.last_id for f in partition.findings] == [RECORDS - 1]
    disk.corrupt(index_path(0, LAST), HEADER_BYTES, bytes(8))
    assert served(partition, SENT) == ALL - {RECORDS - 1}
    assert [f.last_id for f in partition.findings] == [RECORDS - 1]
    assert not is_vouched_for(partition)


@pytest.mark.parametrize("name", ["9" * 19 + ".seg", "5" * 19 + ".seg", f"{RECORDS + 100:019d}.seg", f"{RECORDS:019d}.seg"])
@pytest.mark.parametrize("content", [b"", b"junk"])
def test_a_stray_file_with_the_name_of_a_segment(name: str, content: bytes) -> None:
    """No name makes the storage believe in ids that never were, or make an index for them."""
    disk = sample(RECORDS, clean=True)
    file = disk.create(f"{ROOT}/0/{name}")
    file.write(0, content)
    file.flush()
    disk.flush_directory(f"{ROOT}/0")
    assert judge(disk, lost=set()) == ALL
    partition = open_directory(disk).partition(0)
    partition.open_session(9)
    if not partition.status().is_sound:
        partition.truncate(9, RECORDS - 1)
    goes_on(partition, 0)


@pytest.mark.parametrize("length", [-1, -(1 << 31), (1 << 31) - 1, 1 << 24])
def test_a_length_is_a_claim_until_the_bytes_are_there(length: int) -> None:
    """Memory stays small whatever a head in the tail claims."""
    disk = sample()
    partition = open_directory(disk).partition(0)
    end = disk.size(segment_path(0, LAST))
    disk.kill()
    head = bytearray(run_for(0, 12, 1).data[:36])
    head[28:32] = length.to_bytes(4, "big", signed=True)
    file = disk.open(segment_path(0, LAST), write=True)
    file.write(end, bytes(head) + b"garbage" * 20)
    file.flush()
    disk.power_cut()
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    partition = open_directory(disk).partition(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert partition.last_id == 11
    goes_on(partition, 0)


def test_an_index_entry_behind_the_checkpoint_may_be_missing() -> None:
    for ids in range(998, 1003):
        disk = blank_disk()
        directory = open_directory(disk, segment_bytes=1 << 20)
        partition = directory.create_partition(0)
        partition.open_session(1)
        for first_id in range(0, ids, 100):
            partition.append(1, [encode_payloads(first_id, [b"x"] * min(100, ids - first_id))], -1)
            if partition.wants_checkpoint:
                partition.checkpoint()
        disk.kill()
        for entry in range(995, ids):
            disk.corrupt(index_path(0, 0), index_offset(entry), bytes(8))
        partition = open_directory(disk, segment_bytes=1 << 20).partition(0)
        assert partition.last_id == ids - 1
        assert is_vouched_for(partition)
        goes_on(partition, 0)
        assert len(partition.read_examined(990, ids - 1, 1 << 20)) == ids - 990


def test_a_lone_index_does_not_stand_in_the_way() -> None:
    disk = sample()
    file = disk.create(index_path(0, 12))
    file.write(0, b"whatever a crash left")
    file.flush()
    disk.flush_directory(f"{ROOT}/0")
    partition = open_directory(disk, segment_bytes=10).partition(0)
    partition.append(1, [run_for(0, 12, 1)], -1)
    assert 12 in first_ids(disk)
    assert partition.read_examined(12, 12, 1000).data == run_for(0, 12, 1).data


def test_rot_is_found_by_the_reader_and_remembered() -> None:
    disk = sample()
    partition = open_directory(disk).partition(0)
    assert is_vouched_for(partition)
    disk.corrupt(segment_path(0, 0), HEADER_BYTES + 12, b"\xee")
    with pytest.raises(PartitionDamaged) as damaged:
        partition.read_examined(0, 0, 1000)
    assert (damaged.value.facts["first_id"], damaged.value.facts["last_id"]) == ("0", "0")
    assert "damaged" in partition.describe()
    with pytest.raises(PartitionDamaged):
        partition.append(partition.promised_session, [run_for(0, 12, 1)], -1)
