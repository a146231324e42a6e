"""The tail of a partition: what a store that is killed, lies or has two writers may do to it, and how it is read."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.faulty_store import FaultyStore
from tests.unit.waltzd.archive.test_verification import archive
from waltzd.archive.listing import save_metadata
from waltzd.archive.manifest import Label, Manifest
from waltzd.archive.unsealed import (
    UNIQUE_BYTES,
    Slot,
    SlotRecords,
    UnsealedIndex,
    UnsealedWriter,
    read_unsealed,
    slot_name,
    unsealed_index_name,
)
from waltzd.archive.upload import PartitionArchive
from waltzd.archive.verification import check_unsealed, survey
from waltzd.errors.operations import ArchiveDamaged, ForeignArchive
from waltzd.format.checksum import crc32
from waltzd.format.record import Run, encode_payloads
from waltzd.protocol.document import sha256_of

CLUSTER, ARCHIVE = UUID(int=2), UUID(int=9)
LABEL = Label(archive=ARCHIVE, cluster=CLUSTER)


def run_of(first: int, last: int) -> Run:
    return encode_payloads(first, [b"payload of %d" % id_ for id_ in range(first, last + 1)])


def part(first: int, last: int, slot: int = 0) -> tuple[Slot, bytes]:
    records = bytes(run_of(first, last).data)
    data = records + bytes(UNIQUE_BYTES)
    return Slot(
        slot=slot, first=first, last=last, format=0, record_bytes=len(records), size=len(data), time=0, crc=crc32(records),
        sha256=sha256_of(data),
    ), data  # fmt: skip


def tail(*slots: Slot, since: int = 0) -> UnsealedIndex:
    return UnsealedIndex(
        archive=ARCHIVE, cluster=CLUSTER, partition=0, number=1, session=3, since=since, moment=5, slots=slots,
        tags={slot.slot: f"tag {slot.slot}" for slot in slots},
    )  # fmt: skip


# -- what is written -----------------------------------------------------------------------------------------------------


def test_a_tail_is_read_as_it_was_written_and_every_changed_byte_shows() -> None:
    said = tail(part(0, 9)[0], part(10, 12, slot=11)[0], since=4)
    assert UnsealedIndex.decode(said.text, "here") == said
    assert said.last == 12
    assert tail(since=7).last == 6
    for at in range(len(said.text)):
        for bit in (0, 5):
            flipped = bytearray(said.text)
            flipped[at] ^= 1 << bit
            with pytest.raises(ArchiveDamaged):
                UnsealedIndex.decode(bytes(flipped), "here")


@pytest.mark.parametrize(
    "said",
    [
        tail(part(0, 9)[0], part(11, 12, slot=1)[0]),
        tail(part(0, 9)[0], part(10, 12)[0]),
        tail(part(5, 9)[0], since=4),
        tail(part(0, 3)[0], since=5),
    ],
    ids=["a gap", "one slot twice", "a gap in front", "nothing new"],
)
def test_a_tail_that_contradicts_itself_is_refused(said: UnsealedIndex) -> None:
    with pytest.raises(ArchiveDamaged):
        UnsealedIndex.decode(said.text, "here")


def test_the_records_of_a_slot_are_proven() -> None:
    slot, stored = part(3, 9)
    data = memoryview(stored)[:-UNIQUE_BYTES]
    content = SlotRecords(slot=slot, data=data, where="here").content()
    assert isinstance(content, Run)
    assert (content.first_id, content.last_id) == (3, 9)
    for wrong in (replace(slot, last=8), replace(slot, first=2), replace(slot, crc=1)):
        with pytest.raises(ArchiveDamaged):
            SlotRecords(slot=wrong, data=data, where="here").content()
    with pytest.raises(ArchiveDamaged):
        SlotRecords(slot=slot, data=data[:-1], where="here").content()
    with pytest.raises(ArchiveDamaged):
        SlotRecords(slot=slot, data=memoryview(bytes(50) + data[50:]), where="here").content()


# -- reading -------------------------------------------------------------------------------------------------------------


def stored(*found: tuple[Slot, bytes], since: int = 0) -> FaultyStore:
    store = FaultyStore()
    for slot, data in found:
        store.put_new(slot_name(0, slot.slot), data)
    store.put_new(unsealed_index_name(0), tail(*(slot for slot, _ in found), since=since).text)
    return store


def read(store: FaultyStore) -> tuple[Manifest, UnsealedIndex | None, list[SlotRecords]]:
    archive = PartitionArchive(store, LABEL, 0)
    return read_unsealed(archive, archive.manifest(0, ""))


def test_what_is_behind_the_manifest_is_read() -> None:
    store = stored(part(0, 9), part(10, 12, slot=1))
    manifest, found, parts = read(store)
    assert manifest.number == 0
    assert found is not None
    assert found.last == 12
    assert [(one.slot.first, one.slot.last) for one in parts] == [(0, 9), (10, 12)]
    assert read(FaultyStore())[1:] == (None, [])


def test_other_bytes_in_a_slot_are_damage_unless_somebody_has_moved_on() -> None:
    store = stored(part(0, 9), part(10, 12, slot=1))
    store.objects[slot_name(0, 1)].data = part(13, 14)[1]
    with pytest.raises(ArchiveDamaged, match="holds the ids 10 to 12, has other bytes"):
        read(store)
    del store.objects[slot_name(0, 1)]
    with pytest.raises(ArchiveDamaged, match="holds the ids 10 to 12, is not there"):
        read(store)

    def goes_on() -> None:
        if not store.log[-1:] or not store.log[-1].startswith("get partition-0/tail/1"):
            return
        store.before_each = lambda: None
        newer = tail(part(0, 9)[0], part(10, 15, slot=2)[0])
        store.objects[slot_name(0, 2)] = replace(store.objects[slot_name(0, 0)], data=part(10, 15)[1])
        store.objects[unsealed_index_name(0)].data = newer.text

    store.before_each = goes_on
    found = read(store)[1]
    assert found is not None
    assert found.last == 15


def test_a_tail_of_another_archive_or_one_that_needs_a_manifest_that_is_not_there_is_refused() -> None:
    store = stored(part(0, 9))
    archive = PartitionArchive(store, Label(archive=UUID(int=1), cluster=CLUSTER), 0)
    with pytest.raises(ForeignArchive):
        read_unsealed(archive, archive.manifest(0, ""))
    with pytest.raises(ArchiveDamaged, match="do not fit together"):
        read(stored(part(10, 12), since=10))


# -- among other objects -------------------------------------------------------------------------------------------------


def test_a_survey_knows_tails_and_documents_and_a_tail_is_checked() -> None:
    store = archive(2, partitions=1)
    tail = UnsealedWriter(store, survey(store).label, 0, lambda: UUID(int=77))
    run = encode_payloads(6, [b"one", b"two"])
    tail.add(session=1, since=6, last=7, moment=5, read=lambda first, last, bytes_max: run)
    assert save_metadata(store, b"documents") == 1
    found = survey(store)
    assert (found.unsealed, found.metadata, found.strange, found.flaws) == ([(0, UUID(int=0))], [1], [], [])
    assert check_unsealed(store, found, 0) is None
    slot = store.objects[slot_name(0, 0)]
    slot.data = slot.data.replace(b"two", b"TWO")
    flaw = check_unsealed(store, found, 0)
    assert flaw is not None
    assert "partition-0/tail/0, which holds the ids 6 to 7, has other bytes" in flaw.detail
