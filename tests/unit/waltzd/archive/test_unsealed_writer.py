"""The tail over a store that fails in every way that it may: what `tail.json` counts is there, whatever happened."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from hashlib import sha256
from uuid import UUID
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batches import batches_of
from tests.simulation.faulty_store import Faults, FaultyStore, Killed
from tests.tiers import tiers, together
from tests.unit.waltzd.archive.test_upload import FAULTS, Turns
from waltzd.archive import manifest as manifests
from waltzd.archive import unsealed
from waltzd.archive.manifest import Entry, Label, Manifest
from waltzd.archive.unsealed import (
    UNIQUE_BYTES,
    UnsealedIndex,
    UnsealedWriter,
    read_unsealed,
    slot_name,
    unsealed_index_name,
)
from waltzd.archive.upload import PartitionArchive
from waltzd.errors import WaltzError
from waltzd.errors.operations import ArchiveDamaged, ForeignArchive, ObjectExists, StoreUnavailable, UnknownVersion
from waltzd.format.batch import Batch
from waltzd.format.record import encode_payloads, join_runs
from waltzd.protocol.descriptions import Archived
from waltzd.protocol.peers import Content, runs_of

CLUSTER, ARCHIVE = UUID(int=2), UUID(int=9)
LABEL = Label(archive=ARCHIVE, cluster=CLUSTER)
BATCH, SEGMENT, SEGMENTS = 3, 12, 4
FORMAT_0 = 24
"""So many ids are of format 0, and the others of format 1."""
PAYLOADS = [b"payload of %d" % id_ + bytes(7 * (id_ % 5)) for id_ in range(SEGMENT * SEGMENTS)]
OLD = encode_payloads(0, PAYLOADS[:FORMAT_0])
BATCHES = batches_of(
    [PAYLOADS[at : at + BATCH] for at in range(FORMAT_0, len(PAYLOADS), BATCH)],
    first_id=FORMAT_0,
    segment_bytes_max=1 << 30,
)
SAID = (StoreUnavailable, ArchiveDamaged, ObjectExists, UnknownVersion)
"""What a faulty store makes of an upload: a torn answer looks like damage, and the next does not."""


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsealed, "SLOT_BYTES", 700)


def log(first: int, last: int, bytes_max: int) -> Content:
    """As a replica reads it."""
    if first < FORMAT_0:
        stop = min(last + 1, FORMAT_0, first + max(1, bytes_max // 80))
        return OLD.part(first, stop)
    found = [batch for batch in BATCHES if batch.last_id >= first and batch.first_id <= last]
    assert found[0].first_id == first
    size, kept = 0, list[Batch]()
    for batch in found:
        if kept and size + batch.size > bytes_max:
            break
        kept.append(batch)
        size += batch.size
    return tuple(kept)


def records(first: int, last: int) -> bytes:
    runs = [OLD, *(batch.run for batch in BATCHES)]
    whole = join_runs(runs)
    return bytes(whole.part(first, last + 1).data)


def segment(number: int) -> tuple[Entry, bytes]:
    first, data = SEGMENT * number, records(SEGMENT * number, SEGMENT * (number + 1) - 1)
    return Entry(
        level=0, first=first, last=first + SEGMENT - 1, record_bytes=len(data), crc=crc32(data), segments=1,
        stored_bytes=len(data), size=len(data), index_bytes=0, sha256=sha256(data).hexdigest(),
    ), data  # fmt: skip


@dataclass
class Room:
    """A partition with a log that grows, whose segments are archived when they are sealed, and its storages."""

    store: FaultyStore = field(default_factory=FaultyStore)
    document: Archived = field(default_factory=Archived)
    committed: int = -1
    ids: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.store, FaultyStore):
            self.store._write(manifests.LABEL, LABEL.text)
        else:
            self.store.put_new(manifests.LABEL, LABEL.text)

    def fresh_id(self) -> UUID:
        self.ids += 1
        return UUID(int=self.ids)

    def tail(self) -> UnsealedWriter:
        return UnsealedWriter(self.store, LABEL, 0, self.fresh_id)

    def archive(self) -> None:
        """The next segment, where it is sealed."""
        number = (self.document.last_id + 1) // SEGMENT
        if self.committed >= SEGMENT * (number + 1) - 1:
            found = PartitionArchive(self.store, LABEL, 0).add(self.document, *segment(number))
            self.document = Archived(
                archive=ARCHIVE, number=found.number, sha256=found.sha256, last_id=found.last
            )  # fmt: skip

    def back_up(self, tail: UnsealedWriter | None = None, *, session: int = 1, moment: int | None = None) -> UnsealedIndex:
        return (tail or self.tail()).add(
            session=session, since=self.document.last_id + 1, last=self.committed,
            moment=self.committed + 2 if moment is None else moment, read=log,
        )  # fmt: skip

    def manifest(self) -> Manifest:
        """The newest that is there, whatever the document says."""
        names = sorted(name for name in self.store.objects if "/manifest/" in name)
        if not names:
            return Manifest(archive=ARCHIVE, cluster=CLUSTER, partition=0)
        return Manifest.decode(self.store.objects[names[-1]].data, "here")

    def check(self) -> UnsealedIndex | None:
        """What counts is in the store, and is the log, up to what is committed."""
        if unsealed_index_name(0) not in self.store.objects:
            return None
        found, manifest = UnsealedIndex.decode(self.store.objects[unsealed_index_name(0)].data, "here"), self.manifest()
        assert found.since <= manifest.last + 1
        assert found.last <= self.committed
        assert max(found.last, manifest.last) >= min(found.moment - 2, self.committed)
        for slot in found.slots:
            if slot.last > manifest.last:
                data = self.store.objects[slot_name(0, slot.slot)].data
                assert sha256(data).hexdigest() == slot.sha256
                assert len(data) == slot.size
                if slot.format == 0:
                    assert data[:-UNIQUE_BYTES] == records(slot.first, slot.last)
        return found

    def check_whole(self) -> None:
        """By the reader: manifest and tail together are the log."""
        archive = PartitionArchive(self.store, LABEL, 0)
        manifest, tail, parts = read_unsealed(archive, archive.manifest(0, ""))
        reached = manifest.last
        for part in parts:
            runs = runs_of(part.content())
            assert runs[0].first_id <= reached + 1
            assert b"".join(bytes(run.data) for run in runs) == records(part.slot.first, part.slot.last)
            reached = part.slot.last
        assert reached == self.committed
        assert tail is not None
        assert tail.moment == self.committed + 2

    def live(self, *, is_archiving: bool = True) -> None:
        """Until the end of the log."""
        while self.committed < len(PAYLOADS) - 2 * BATCH - 1:
            self.committed += BATCH
            self.back_up()
            if is_archiving:
                self.archive()


def test_a_round_takes_three_requests_and_an_idle_one_at_most_one() -> None:
    unsealed.SLOT_BYTES = 1 << 20
    room = Room(committed=4)
    tail = room.tail()
    room.back_up(tail)
    room.committed = 20
    room.store.log.clear()
    room.back_up(tail)
    assert [what.rsplit("/", 1)[0] for what in room.store.log] == ["put partition-0/tail", "get partition-0/tail",
                                                                   "put if partition-0"]  # fmt: skip
    room.store.log.clear()
    known = room.back_up(tail).moment
    assert room.store.log == [], "neither a record nor a moment is new"
    assert room.back_up(tail, moment=known + 1).moment == known + 1
    assert len(room.store.log) == 1


def test_slots_are_few_and_each_byte_is_uploaded_a_few_times() -> None:
    room = Room()
    tail, uploaded = room.tail(), 0
    unsealed.SLOT_BYTES = 1 << 20
    for room.committed in range(FORMAT_0):
        room.store.log.clear()
        room.back_up(tail)
        slots = [what.split()[-1] for what in room.store.log if what.startswith("put") and "/tail/" in what]
        uploaded += sum(len(room.store.objects[slot].data) for slot in slots)
        found = room.check()
        assert found is not None
        assert len(found.slots) <= 6
    assert uploaded < 5 * len(OLD.data)
    room.check_whole()
    assert len([name for name in room.store.objects if "/tail/" in name]) <= 8


def test_what_a_manifest_covers_leaves_and_its_slots_are_used_again() -> None:
    room = Room()
    tail = room.tail()
    for room.committed in range(2, len(PAYLOADS), BATCH):
        room.back_up(tail)
        room.archive()
        room.check()
        room.check_whole()
    assert room.document.last_id == len(PAYLOADS) - 1
    assert len([name for name in room.store.objects if "/tail/" in name]) <= 8


@together("kill_at", [half / 2 for half in range(0, 200, 3)], quick=10)
def test_a_kill_at_any_operation_leaves_a_tail_that_is_true(kill_at: float) -> None:
    room = Room(FaultyStore(kill_at=kill_at))  # type: ignore[arg-type]
    with contextlib.suppress(Killed):
        room.live()
    room.check()
    room.store.kill_at = None
    room.live()
    room.committed += BATCH
    room.back_up()
    room.check()
    room.check_whole()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(FAULTS, st.integers(0, 1 << 30))
def test_whatever_the_store_does_the_tail_is_true(faults: Faults, seed: int) -> None:
    room = Room(FaultyStore(random.Random(seed), faults))
    pick, tail = random.Random(seed), room.tail()
    for room.committed in range(2, len(PAYLOADS), BATCH):
        for _ in range(3):
            with contextlib.suppress(*SAID):
                if pick.random() < 0.2:
                    tail = room.tail()
                room.back_up(tail)
                room.check()
            with contextlib.suppress(*SAID):
                room.archive()
            room.check()
    room.store.faults = Faults()
    room.back_up()
    room.check()
    room.check_whole()


@pytest.mark.parametrize("seed", tiers(range(25), quick=2, short=10))
def test_two_owners_make_one_tail(seed: int) -> None:
    """One of them with marks and manifests as they were some time ago. Both switch before each operation."""
    turns = Turns(seed)
    room = Room(FaultyStore(random.Random(seed), Faults(lost=10, repeated=10)))
    mistakes: list[BaseException] = []

    def own(session: int) -> None:
        pick, tail = random.Random(seed + session), room.tail()
        for _ in range(25):
            since, committed = room.document.last_id + 1, room.committed
            try:
                if pick.random() < 0.3:
                    room.committed = committed = min(room.committed + BATCH, len(PAYLOADS) - 1)
                if pick.random() < 0.3:
                    room.archive()
                if pick.random() < 0.3:
                    tail = room.tail()
                tail.add(session=session, since=since, last=committed, moment=committed + 2, read=log)
                room.check()
            except SAID:
                continue
            except BaseException as error:  # noqa: BLE001  told by the test
                mistakes.append(error)
                return

    def each() -> None:
        turns.pause()
        if not mistakes:
            try:
                room.check()
            except AssertionError as error:
                mistakes.append(error)

    room.store.before_each = each
    turns.run([lambda: own(1)] * 3)
    room.store.before_each, room.store.faults = lambda: None, Faults()
    assert mistakes == []
    room.back_up()
    room.check_whole()


def test_what_rotted_on_its_way_is_not_counted() -> None:
    room = Room(FaultyStore(faults=Faults(rotten=100)), committed=8)
    with pytest.raises(ArchiveDamaged, match="has other bytes than were written there"):
        room.back_up()
    assert unsealed_index_name(0) not in room.store.objects
    room.store.faults = Faults()
    room.back_up()
    room.check_whole()


def test_a_round_that_has_no_slot_for_all_of_it_is_true_up_to_no_new_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsealed, "SLOT_BYTES", 200)
    monkeypatch.setattr(unsealed, "SLOTS_MAX", 2)
    monkeypatch.setattr(unsealed, "CROWD", 100)
    room = Room(committed=2)
    tail = room.tail()
    assert room.back_up(tail, moment=5).moment == 5
    room.committed = 30
    found = room.back_up(tail, moment=9)
    assert (found.last < 30, found.moment) == (True, 5)


def test_an_older_owner_changes_nothing() -> None:
    room = Room(committed=8)
    room.back_up(session=5)
    room.committed = 11
    assert room.back_up(session=4).last == 8


def test_nothing_is_begun_in_a_store_that_was_emptied() -> None:
    room = Room(committed=8)
    tail = room.tail()
    room.back_up(tail)
    room.store.objects.clear()
    room.committed = 11
    for one in (tail, room.tail()):
        with pytest.raises(ForeignArchive, match="does not hold the archive"):
            room.back_up(one)
    assert [name for name in room.store.objects if name.endswith(".json")] == []


def test_another_log_is_not_built_upon() -> None:
    room = Room(committed=2)
    room.back_up()

    def other(first: int, last: int, bytes_max: int) -> Content:
        return encode_payloads(first, [b"of another log"] * (last + 1 - first))

    with pytest.raises(ArchiveDamaged, match="has other records from id 0 to 2 than this replica"):
        room.tail().add(session=1, since=0, last=5, moment=9, read=other)


def test_a_tail_json_that_rotted_is_made_anew() -> None:
    room = Room(committed=8)
    room.back_up()
    rotten = room.store.objects[unsealed_index_name(0)]
    rotten.data = rotten.data[:-5]
    with pytest.raises(WaltzError):
        room.check()
    room.back_up()
    room.check_whole()


def test_a_slot_is_not_merged_with_what_a_replica_may_have_trimmed() -> None:
    """A slot can begin in a segment that is archived by now: its owner had committed what the replica heard of later. What
    is below the manifest is not read again: the replica may have trimmed it."""
    room = Room(committed=SEGMENT + BATCH - 1)
    slot = room.back_up().slots[-1]
    room.archive()
    since = room.document.last_id + 1
    assert slot.first < since <= slot.last

    def trimmed(first: int, last: int, bytes_max: int) -> Content:
        assert first >= since, "below the floor"
        return log(first, last, bytes_max)

    room.committed += BATCH
    room.tail().add(session=1, since=since, last=room.committed, moment=room.committed + 2, read=trimmed)
    room.check_whole()
