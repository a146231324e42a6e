"""Readers of an archive get the records that went into it, or are told which are wrong; whatever the cache does."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.archives import with_key
from tests.batches import TIME, batches_of, index_raw, segment_raw
from tests.simulation.faulty_store import Faults, FaultyStore
from tests.tiers import together
from waltzd.archive import archived_segment, reader
from waltzd.archive import manifest as manifests
from waltzd.archive.archived_segment import segment_entry
from waltzd.archive.manifest import LABEL, Label
from waltzd.archive.reader import ArchiveReader, CachedKeyIndex, CachedSegment, CachedSegmentDamaged, SegmentCache
from waltzd.archive.upload import PartitionArchive
from waltzd.errors.operations import ArchiveDamaged, CacheFailed, ForeignArchive, StoreUnavailable
from waltzd.format.batch import Batch
from waltzd.format.footer import NO_HASH
from waltzd.format.index import offsets_of
from waltzd.format.key_index import KeyHeader, LockQuery, MarkColumns, encode_key_index
from waltzd.format.layout import FileHeader
from waltzd.format.record import Run, encode_payloads, join_runs
from waltzd.protocol.descriptions import Archived

KEY, ARCHIVE = UUID(int=5), UUID(int=6)
EVERY = 1 << 30


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels of chunks, and pieces of several steps."""
    monkeypatch.setattr(manifests, "FAN_OUT", 3)
    monkeypatch.setattr(reader, "STEP_BYTES", 200)
    monkeypatch.setattr(archived_segment, "FOOTER_BYTES", 150)


@dataclass
class Archive:
    """Of partition 0, with pieces of both formats, and all their records."""

    store: FaultyStore
    known: Archived
    log: Run
    times: list[int]

    def reader(self, bytes_max: int = EVERY, directory: str | None = None) -> ArchiveReader:
        return ArchiveReader(self.store, KEY, SegmentCache(bytes_max, directory))

    def piece(self, id_: int) -> str:
        """The name of the object that holds this id."""
        return self.reader().entry(0, self.known, id_).name(0)

    def spoil(self, id_: int, change: Callable[[bytearray], None]) -> None:
        found = self.store.objects[self.piece(id_)]
        data = bytearray(found.data)
        change(data)
        found.data = bytes(data)


def archive(old: int = 4, new: int = 10, *, index: bool = True, has_keys: bool = True) -> Archive:
    """So many pieces of format 0, and behind them of format 1."""
    store, label = FaultyStore(), Label(archive=ARCHIVE, cluster=KEY)
    store.put_new(LABEL, label.text)
    writer, known = PartitionArchive(store, label, 0), Archived()
    runs: list[Run] = []
    times: list[int] = []

    def add(first_id: int, last_id: int, data: bytes, entries: bytes) -> Archived:
        expected = FileHeader(created_ms=0, key=KEY, partition=0, first_id=first_id)
        entries = entries if index else b""
        piece = segment_entry(data, entries, expected=expected, last_id=last_id, path="here")
        whole = data + entries
        found = writer.add(known, *(with_key(piece, whole, KEY) if has_keys else (piece, whole)))
        return Archived(archive=ARCHIVE, number=found.number, sha256=found.sha256, last_id=found.last)

    next_id = 0
    for number in range(old):
        run = encode_payloads(next_id, [b"old %d" % at * (1 + at % 7) for at in range(20 + number)])
        header = FileHeader(created_ms=7, key=KEY, partition=0, first_id=next_id).encode()
        entries = b"".join(int(at).to_bytes(8, "big") for at in offsets_of(128, run))
        known = add(next_id, run.last_id, header + bytes(run.data), header + entries)
        runs.append(run)
        times += [-1] * len(run)
        next_id = run.last_id + 1
    payloads = [[b"new %d" % at * (at % 9)] * (1 + at % 4) for at in range(5 * new)]
    locks = [[[(at, 2), (1000 + at % 7, 1 + at % 2)]] * (1 + at % 4) for at in range(5 * new)]
    cuts = range(4, 5 * new, 5)
    log = batches_of(payloads, first_id=next_id, locks=locks, cuts=cuts)
    front = NO_HASH
    for start in range(0, 5 * new, 5):
        batches: list[Batch] = log[start : start + 5]
        data, front = segment_raw(batches, key=KEY, footer_before=front)
        known = add(batches[0].first_id, batches[-1].last_id, data, index_raw(batches, key=KEY))
        runs += [batch.run_with_locks for batch in batches]
        times += [batch.head.time for batch in batches for _ in range(len(batch))]
    return Archive(store, known, join_runs(runs), times)


def read_all(found: Archive, reader: ArchiveReader, first_id: int, bytes_max: int, *, with_locks: bool = False) -> Run:
    runs: list[Run] = []
    while first_id <= found.known.last_id:
        run = reader.read(0, found.known, first_id, found.known.last_id, bytes_max, with_locks=with_locks)
        assert (run.first_id, len(run) > 0) == (first_id, True)
        assert len(run.data) <= bytes_max or len(run) == 1
        runs.append(run)
        first_id = run.last_id + 1
    return join_runs(runs)


def same(one: Run, other: Run) -> bool:
    return one.first_id == other.first_id and one.data == other.data and one.bounds.tolist() == other.bounds.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("bytes_max", [1, 300, EVERY])
def test_from_each_id_on_the_records_are_those_that_were_archived(bytes_max: int, index: bool) -> None:
    found = archive(index=index)
    reader = found.reader()
    for first_id in range(0, found.known.last_id + 1, 1 if bytes_max == EVERY else 11):
        run = read_all(found, reader, first_id, bytes_max)
        assert same(run, found.log.part(first_id, len(found.log)))
        assert run.times is not None
        assert run.times.tolist() == found.times[first_id:]
        assert run.locks is None
    assert (reader.counters.pieces, reader.counters.misses) == (14, 14)


def test_locks_come_where_they_are_asked_for_and_ranges_end_where_they_are_to() -> None:
    found = archive()
    reader = found.reader()
    run = read_all(found, reader, 0, 500, with_locks=True)
    assert run.locks is not None
    assert found.log.locks is not None
    assert run.locks.ids.tolist() == found.log.locks.ids.tolist()
    assert run.locks.counts.tolist() == found.log.locks.counts.tolist()
    last = found.known.last_id
    for first_id in (0, 30, last - 20, last):
        for last_id in range(first_id, min(last, first_id + 9) + 1):
            got = reader.read(0, found.known, first_id, last_id, EVERY)
            assert (got.first_id, got.last_id <= last_id) == (first_id, True)


def test_the_cache_stays_within_its_bound_and_the_one_that_was_used_longest_ago_leaves() -> None:
    found = archive()
    reader = found.reader(bytes_max=4000)
    for first_id in random.Random(3).choices(range(found.known.last_id + 1), k=200):
        assert same(reader.read(0, found.known, first_id, first_id, 1), found.log.part(first_id, first_id + 1))
        assert 0 < reader.cache.bytes <= 4000
    assert reader.counters.misses > 20
    tiny = found.reader(bytes_max=1)
    assert same(read_all(found, tiny, 0, 300), found.log)
    entry = tiny.entry(0, found.known, 0)
    held = tiny.piece(0, entry)
    tiny.piece(0, tiny.entry(0, found.known, found.known.last_id))
    assert tiny.cache.get(entry.sha256, CachedSegment) is None
    assert len(held.read(0, 5, EVERY)) == 6, "a reader that holds it reads on"


def test_files_of_the_cache_have_no_name_and_leave_with_their_pieces(tmp_path: Path) -> None:
    def held() -> int:
        return sum(str(tmp_path) in os.readlink(f"/proc/self/fd/{fd}") for fd in fds())

    def fds() -> list[str]:
        return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]

    found = archive()
    reader = found.reader(directory=str(tmp_path))
    read_all(found, reader, 0, EVERY)
    assert list(tmp_path.iterdir()) == []
    assert held() == 14
    del reader
    assert held() == 0
    with pytest.raises(CacheFailed, match="No such file"):
        found.reader(directory=str(tmp_path / "gone")).read(0, found.known, 0, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("every", [31, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.parametrize("id_", [3, 100])
def test_a_cache_that_rots_gives_nothing_wrong_and_is_made_again(id_: int, every: int) -> None:
    found = archive()
    reader = found.reader()
    piece = reader.piece(0, reader.entry(0, found.known, id_))
    for at in range(128, piece._file.size(), every):
        piece = reader.piece(0, reader.entry(0, found.known, id_))
        byte = os.pread(piece._file._fd, 1, at)
        os.pwrite(piece._file._fd, bytes([byte[0] ^ 0x40]), at)
        first = piece.entry.first
        run = read_all(found, reader, first, EVERY)
        assert same(run, found.log.part(first, len(found.log)))


@pytest.mark.slow
@pytest.mark.parametrize("every", [17, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("id_", [3, 100])
def test_each_flipped_bit_of_a_piece_is_noticed_and_named_by_range(id_: int, every: int) -> None:
    found = archive()
    entry = found.reader().entry(0, found.known, id_)
    size, named = entry.size - entry.index_bytes, 0
    for at in range(0, entry.size, every):
        found.spoil(id_, lambda data, at=at: data.__setitem__(at, data[at] ^ 1))  # type: ignore[misc]
        with pytest.raises(ArchiveDamaged, match="other bytes than were written there") as caught:
            found.reader().read(0, found.known, id_, id_, 1)
        first, last = caught.value.number("first_id"), caught.value.number("last_id")
        assert first is not None
        assert last is not None
        assert entry.first <= first <= last <= entry.last
        assert f"the ids {entry.first} to {entry.last}" in caught.value.message
        named += (first, last) != (entry.first, entry.last) and f"the ids {first} to {last} (bytes " in caught.value.message
        found.spoil(id_, lambda data, at=at: data.__setitem__(at, data[at] ^ 1))  # type: ignore[misc]
    assert named > size / every / 2, "most bits belong to few records"
    assert len(found.reader().read(0, found.known, id_, id_, 1)) == 1


def test_a_piece_that_is_cut_short_or_gone_is_named() -> None:
    found = archive()
    found.spoil(30, lambda data: data.__delitem__(slice(300, None)))
    with pytest.raises(ArchiveDamaged, match="it has 300 bytes, and had"):
        found.reader().read(0, found.known, 30, 30, 1)
    del found.store.objects[found.piece(50)]
    with pytest.raises(ArchiveDamaged, match="is not in the store") as caught:
        found.reader().read(0, found.known, 50, 50, 1)
    assert caught.value.number("first_id") is not None


@pytest.mark.slow
def test_a_store_that_fails_gives_an_error_and_never_another_record() -> None:
    found = archive()
    for seed in range(20):
        found.store.pick, found.store.faults = random.Random(seed), Faults(refused=3, torn=3)
        reader = found.reader()
        for first_id in range(0, found.known.last_id + 1, 7):
            try:
                run = reader.read(0, found.known, first_id, found.known.last_id, EVERY)
            except (StoreUnavailable, ArchiveDamaged, ForeignArchive):
                continue
            assert same(run, found.log.part(first_id, run.last_id + 1))


def test_a_time_is_found_as_in_the_log() -> None:
    found = archive()
    last_id = found.known.last_id
    reader = found.reader(bytes_max=2000)
    for time in [0, *{time + shift for time in found.times if time > 0 for shift in (-1, 0, 1)}, TIME * 2]:
        expected = next((id_ - 1 for id_, at in enumerate(found.times) if at >= time and at >= 0), last_id)
        assert reader.find_time(0, found.known, time, last_id) == expected
        assert reader.find_time(0, found.known, time, 90) == min(expected, 90)
    old = archive(new=0)
    assert old.reader().find_time(0, old.known, 1, 40) == 40


def test_a_time_is_found_without_segments_above_the_last_id() -> None:
    """Storages have the ids above it, so an object that is lost there must not keep a reader from an earlier time."""
    found = archive()
    last_id = found.reader().entry(0, found.known, 90).last
    for name in [name for name in found.store.objects if "/segment/" in name]:
        if int(name.partition("/segment/")[2].split("-")[0]) > last_id:
            del found.store.objects[name]
    for time in (0, *(time for time in found.times if time > 0), TIME * 2):
        expected = next((id_ - 1 for id_, at in enumerate(found.times) if at >= time and at >= 0), found.known.last_id)
        assert found.reader().find_time(0, found.known, time, last_id) == min(expected, last_id)


def test_what_is_at_hand_takes_no_question() -> None:
    found = archive()
    reader = found.reader()
    assert reader.at_hand(0, found.known, 5) is None
    reader.read(0, found.known, 5, 5, 1)
    operations = found.store.operations
    piece = reader.at_hand(0, found.known, 6)
    assert piece is not None
    assert piece.entry.first <= 6 <= piece.entry.last
    assert reader.at_hand(0, found.known, found.known.last_id) is None
    assert found.store.operations == operations


def test_another_archive_is_not_read() -> None:
    found = archive()
    with pytest.raises(ForeignArchive):
        ArchiveReader(found.store, UUID(int=77), SegmentCache(EVERY)).read(0, found.known, 0, 0, 1)
    found.store.objects.clear()
    with pytest.raises(ForeignArchive):
        found.reader().read(0, found.known, 0, 0, 1)
    assert found.store.objects == {}, "nothing is begun by a reader"


# -- locks -------------------------------------------------------------------------------------------------------------


def marks_in(log: Run, lock: int) -> list[int]:
    """Which transactions marked a lock, by the whole log."""
    assert log.locks is not None
    ids = [log.first_id + at for at, count in enumerate(log.locks.counts.tolist()) for _ in range(count)]
    rows = zip(ids, log.locks.ids.tolist(), log.locks.modes.tolist(), strict=True)
    return sorted({id_ for id_, one, mode in rows if one == lock and mode != 1})


def history(
    found: Archive, reader: ArchiveReader, lock: int, *, newest_first: bool = False, limit: int = 1000
) -> list[int]:
    """As a server asks: segment by segment, among those of format 1."""
    first_id = next(at for at, time in enumerate(found.times) if time >= 0)
    query = LockQuery(lock=lock, first_id=first_id, last_id=found.known.last_id, limit=limit, newest_first=newest_first)
    ids: list[int] = []
    while not query.is_done:
        held = reader.marks(0, reader.entry(0, found.known, query.next_id))
        try:
            part = held.find_marks(query)
        except CachedSegmentDamaged:
            reader.cache.drop(held)
            continue
        ids += part.ids
        query = query.after(part)
    return ids


LOCKS = (3, 17, 49, 1000, 1003, 1006, 77)


def check_histories(found: Archive, reader: ArchiveReader) -> None:
    for lock in LOCKS:
        right = marks_in(found.log, lock)
        assert history(found, reader, lock) == right
        assert history(found, reader, lock, newest_first=True, limit=2) == right[::-1][:2]


def test_histories_are_read_by_key_indexes_alone_and_without_them_by_segments() -> None:
    found = archive()
    reader = found.reader()
    check_histories(found, reader)
    assert (reader.counters.key_indexes, reader.counters.pieces, reader.counters.key_faults) == (10, 0, 0)
    first_id = found.known.last_id
    reader.read(0, found.known, first_id, first_id, 1)  # the segment is here as well
    check_histories(found, reader)
    old = archive(has_keys=False)
    reader = old.reader()
    check_histories(old, reader)
    assert (reader.counters.key_indexes, reader.counters.pieces, reader.counters.key_faults) == (0, 10, 0)


@pytest.mark.parametrize("harm", ["bit", "short", "long", "gone", "foreign", "older"])
def test_a_key_index_that_is_not_what_was_archived_is_told_and_not_used(
    harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = archive()
    names = sorted(name for name in found.store.objects if "/key/" in name)
    content = [found.store.objects[name].data for name in names]
    for number, name in enumerate(names):
        data, one = content[number], found.store.objects[name]
        if harm == "gone":
            del found.store.objects[name]
        else:
            middle = len(data) // 2
            one.data = {
                "bit": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
                "short": data[:-1],
                "long": data + b"x",
                "foreign": content[number - 1],
                "older": encode_key_index(header_of(data), MarkColumns.join([])),  # a sound one that hides all marks
            }[harm]
    reader = found.reader()
    check_histories(found, reader)
    right = 0 if harm == "long" else 10  # what is behind the proven bytes is not read
    assert (reader.counters.key_faults, reader.counters.pieces) == (right, right)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == right
    assert all("look-ups read the segment" in one and "/key/" in one for one in told)
    for name, data in zip(names, content, strict=True):
        found.store.objects.pop(name, None)
        found.store.put_new(name, data)
    again = found.reader()
    check_histories(found, again)
    assert (again.counters.key_faults, again.counters.pieces) == (0, 0)


def header_of(raw: bytes) -> KeyHeader:
    found = KeyHeader.decode(raw)
    assert found is not None
    return found


def test_an_index_that_a_manifest_names_for_another_segment_is_not_used() -> None:
    """Its hash is right, and its header is not: whoever made the manifest was wrong."""
    found = archive()
    reader = found.reader()
    one, other = (reader.entry(0, found.known, at) for at in (found.known.last_id, 100))
    swapped = replace(one, key_bytes=other.key_bytes, key_sha256=other.key_sha256)
    found.store.put_new(swapped.key_name(0), found.store.objects[other.key_name(0)].data)
    assert isinstance(reader.marks(0, swapped), CachedSegment)
    assert isinstance(reader.marks(0, other), CachedKeyIndex)
    assert reader.counters.key_faults == 1


@together("at", range(0, 400, 7))
def test_a_key_index_that_rots_in_the_cache_is_fetched_again(at: int) -> None:
    found = archive()
    reader = found.reader()
    check_histories(found, reader)
    held = reader.marks(0, reader.entry(0, found.known, found.known.last_id))
    assert isinstance(held, CachedKeyIndex)
    byte = os.pread(held._file._fd, 1, at)
    os.pwrite(held._file._fd, bytes([byte[0] ^ 0x10]), at)
    check_histories(found, reader)
