"""A store is looked at: each wrong bit is named, and only what nothing will ever name is an orphan."""

from __future__ import annotations

import random
from uuid import UUID

import pytest

from tests.archives import with_key
from tests.batches import batches_of, index_raw, segment_raw, segments_of
from tests.simulation.faulty_store import Faults, FaultyStore, Killed
from waltzd.archive import manifest as manifests
from waltzd.archive import verification
from waltzd.archive.archived_segment import segment_entry
from waltzd.archive.manifest import Entry
from waltzd.archive.upload import PartitionArchive, label_in
from waltzd.archive.verification import Flaw, Survey, branch_flaws, check_from, check_key, check_piece, survey
from waltzd.errors.operations import ArchiveDamaged, ForeignArchive, UnknownVersion
from waltzd.format.footer import NO_HASH
from waltzd.format.layout import FileHeader
from waltzd.protocol.descriptions import ArchiveCheck, Archived
from waltzd.protocol.timelines import FIRST, NEVER_FORKED

KEY = UUID(int=5)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "FAN_OUT", 3)


def upload(store: FaultyStore, known: Archived, number: int, *, partition: int = 0, has_keys: bool = True) -> Archived:
    """The segment of that number, of two batches."""
    batches = batches_of([[b"a", b"b"], [b"c"]] * 12, cuts=range(1, 24, 2), partition=partition)
    footer = NO_HASH
    for own in segments_of(batches)[: number + 1]:
        data, footer = segment_raw(own, key=KEY, partition=partition, footer_before=footer)
        index = index_raw(own, key=KEY, partition=partition)
    expected = FileHeader(created_ms=0, key=KEY, partition=partition, first_id=own[0].first_id)
    piece = segment_entry(data, index, expected=expected, last_id=own[-1].last_id, path="here")
    archive = PartitionArchive(store, label_in(store, KEY, lambda: KEY, known.archive), partition)
    made = archive.add(known, *(with_key(piece, data + index, KEY, partition) if has_keys else (piece, data + index)))
    return Archived(archive=made.archive, number=made.number, sha256=made.sha256, last_id=made.last)


def archive(segments: int = 7, *, partitions: int = 2, has_keys: bool = True) -> FaultyStore:
    store = FaultyStore()
    for partition in range(partitions):
        known = Archived()
        for number in range(segments):
            known = upload(store, known, number, partition=partition, has_keys=has_keys)
    return store


def flaws(store: FaultyStore, *, is_quick: bool = False) -> list[Flaw]:
    found = survey(store)
    pieces = [(partition, piece) for partition, own in found.pieces.items() for piece in own]
    checked = [check_piece(store, found.label, partition, piece, is_quick=is_quick) for partition, piece in pieces]
    checked += [check_key(store, partition, piece, is_quick=is_quick) for partition, piece in pieces]
    return [*found.flaws, *(flaw for flaw in checked if flaw is not None)]


def names(found: Survey) -> tuple[list[str], list[str]]:
    return [one.name for one in found.orphans], [one.name for one in found.pending]


def test_a_whole_archive_has_no_flaw() -> None:
    store = archive()
    found = survey(store)
    assert (found.label.cluster, names(found), found.strange) == (KEY, ([], []), [])
    assert {partition: (one.number, one.last) for partition, one in found.manifests.items()} == {0: (7, 20), 1: (7, 20)}
    assert [len(pieces) for pieces in found.pieces.values()] == [7, 7]
    assert flaws(store) == flaws(store, is_quick=True) == []


@pytest.mark.slow
def test_each_object_that_counts_is_named_when_a_bit_of_it_flips_or_it_goes() -> None:
    whole = archive(partitions=1)
    pick = random.Random(1)
    newest = manifests.manifest_name(0, 7)
    counting = [name for name in whole.objects if "/manifest/" not in name or name == newest]
    assert {name.split("/")[1] for name in counting if "/" in name} == {"segment", "key", "chunk", "manifest"}
    for name in counting:
        for what in ("bit", "gone"):
            store = archive(partitions=1)
            if what == "gone":
                del store.objects[name]
            else:
                data = bytearray(store.objects[name].data)
                data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
                store.objects[name].data = bytes(data)
            if name == "archive.json":
                with pytest.raises((ArchiveDamaged, ForeignArchive, UnknownVersion)):
                    survey(store)
            elif (name, what) == (newest, "gone"):
                assert survey(store).manifests[0].number == 6, "the store alone cannot know; the coordinator does"
            else:
                assert {flaw.name for flaw in flaws(store)} == {name}, what
                assert names(survey(store))[0] == [], "nothing is an orphan while something cannot be read"


def test_a_segment_that_states_another_cluster_is_named() -> None:
    store = archive(partitions=1)
    name = next(name for name in store.objects if "/segment/" in name)
    data = store.objects[name].data
    store.objects[name].data = data[:20] + bytes([data[20] ^ 1]) + data[21:]
    assert [(flaw.name, "belongs to the cluster" in flaw.detail) for flaw in flaws(store)] == [(name, True)]


def test_what_an_upload_left_is_no_orphan_before_its_ids_are_archived() -> None:
    store = FaultyStore(kill_at=14)
    known = upload(store, Archived(), 0)
    with pytest.raises(Killed):
        upload(store, known, 1)
    store.kill_at = None
    found = survey(store)
    key, name = names(found)[1]
    assert names(found) == ([], [key, name])
    assert ("/key/" in key, "/segment/" in name) == (True, True)
    left = name[:-16] + 16 * "0"  # of a replica of format 0 that was cut elsewhere: another hash
    store.put_new(left, b"x")
    store.put_new("of-somebody-else", b"x")
    assert sorted(names(survey(store))[1]) == sorted([key, name, left])
    upload(store, known, 1)
    found = survey(store)
    assert (names(found), [one.name for one in found.strange]) == (([left], []), ["of-somebody-else"])


def forked(store: FaultyStore) -> tuple[PartitionArchive, Archived, Entry, bytes]:
    """A timeline that shares two segments with the archived log: where it begins, and its next segment, which is not
    uploaded."""
    before = survey(store).manifests[0]
    fork = survey(store).pieces[0][1].last
    lineage = NEVER_FORKED.forked(
        identity=UUID(int=9), fork=fork, session=7, parent=FIRST, cause="partition rescue", began="2026-01-01", who=None
    )
    mine = PartitionArchive(store, label_in(store, KEY, lambda: KEY, before.archive), 0, lineage.current)
    begin = mine.begin_timeline(lineage, [PartitionArchive(store, mine.label, 0).manifest_at(2) or before])
    assert begin.last == fork < before.last
    known = Archived(
        archive=begin.archive, number=begin.number, sha256=begin.sha256, last_id=begin.last, timeline=lineage.current
    )
    batches = batches_of([[b"a", b"b"], [b"c"]] * 2 + [[b"x", b"y"], [b"z"]] * 2, cuts=range(1, 8, 2))
    footer = NO_HASH
    for own in segments_of(batches)[:3]:
        data, footer = segment_raw(own, key=KEY, partition=0, footer_before=footer)
    expected = FileHeader(created_ms=0, key=KEY, partition=0, first_id=own[0].first_id)
    index = index_raw(own, key=KEY, partition=0)
    piece = segment_entry(data, index, expected=expected, last_id=own[-1].last_id, path="here")
    assert fork < piece.first < piece.last <= before.last
    return mine, known, piece, data + index


def test_what_a_later_timeline_uploads_is_no_orphan_although_an_earlier_one_had_its_ids() -> None:
    """A rescue gave up what was archived; its objects stay, and say nothing of what the log writes anew under these ids."""
    store = archive(4, partitions=1)
    mine, known, piece, data = forked(store)
    store.put_new(piece.name(0), data)  # the upload is on its way: its manifest comes next
    assert names(survey(store)) == ([], [piece.name(0)])
    mine.add(known, piece, data)
    assert names(survey(store)) == ([], [])


@pytest.mark.slow
def test_a_list_that_lags_makes_no_orphan() -> None:
    for lag in range(1, 30):
        store = archive(partitions=1)
        store.faults = Faults(lag=lag)
        assert names(survey(store))[0] == []


def test_another_store_is_no_archive() -> None:
    with pytest.raises(ForeignArchive, match="there is no archive"):
        survey(FaultyStore())


def known_of(store: FaultyStore) -> Archived:
    made = survey(store).manifests[0]
    return Archived(archive=made.archive, number=made.number, sha256=made.sha256, last_id=made.last)


def looked(store: FaultyStore, known: Archived) -> ArchiveCheck:
    """From the first id on, step by step, to the end or to what is missing."""
    first_id = 0
    label = label_in(store, KEY, lambda: KEY, known.archive)
    while True:
        found = check_from(store, PartitionArchive(store, label, 0), known, first_id)
        assert found.last_id >= first_id - 1
        if found.missing or found.last_id == known.last_id:
            return found
        assert found.last_id >= first_id, "a step gets on"
        first_id = found.last_id + 1


@pytest.mark.parametrize("step", [1, 2, 3, 32])
def test_a_missing_object_is_met_wherever_it_was(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(verification, "CHECK_PIECES", step)
    store = archive(partitions=1)
    known, pieces = known_of(store), survey(store).pieces[0]
    assert looked(store, known) == ArchiveCheck(last_id=20)
    for piece in pieces:
        whole = store.objects.pop(piece.name(0))
        found = looked(store, known)
        assert (found.last_id, piece.name(0) in found.missing) == (piece.first - 1, True)
        store.put_new(piece.name(0), whole.data[:-1])
        assert "bytes; it had" in looked(store, known).missing
        store.objects[piece.name(0)] = whole
    for name in [name for name in store.objects if "/chunk/" in name or name == manifests.manifest_name(0, 7)]:
        whole = store.objects.pop(name)
        assert name in looked(store, known).missing
        store.put_new(name, whole.data[:-9] + b"X" + whole.data[-8:])
        assert name in looked(store, known).missing
        store.objects[name] = whole
    assert looked(store, known) == ArchiveCheck(last_id=20)


def test_a_segment_of_another_log_is_not_added_and_is_found_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    store = archive(2, partitions=1)
    label = survey(store).label
    writer = PartitionArchive(store, label, 0)
    newest = writer.newest_after(writer.start())
    known = Archived(archive=newest.archive, number=2, sha256=newest.sha256, last_id=newest.last)
    others = batches_of([[b"x", b"b"], [b"c"]] * 12, cuts=range(1, 24, 2))
    footer = NO_HASH
    for own in segments_of(others)[:3]:
        data, footer = segment_raw(own, key=KEY, footer_before=footer)
    expected = FileHeader(created_ms=0, key=KEY, partition=0, first_id=own[0].first_id)
    piece = segment_entry(data, b"", expected=expected, last_id=own[-1].last_id, path="here")
    with pytest.raises(ArchiveDamaged, match="do not belong to one log"):
        writer.add(known, piece, data)
    assert survey(store).manifests[0].number == 2
    monkeypatch.setattr(PartitionArchive, "_check_chain", lambda *_: None)  # as an older version added it
    writer.add(known, piece, data)
    found = survey(store)
    assert (found.flaws, flaws(store)) == ([], [])
    (flaw,) = branch_flaws(store, label, found.manifests[0])
    assert (flaw.name, flaw.first) == (piece.name(0), piece.first)
