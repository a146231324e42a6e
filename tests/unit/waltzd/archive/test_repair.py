"""The label, manifests and chunks of an archive are made again to the byte, out of what is left of it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests.simulation.faulty_store import FaultyStore
from tests.unit.waltzd.archive.test_verification import archive, forked
from waltzd.archive import manifest as manifests
from waltzd.archive.repair import RepairedStore, put_back, rebuilt_key, rebuilt_objects
from waltzd.archive.upload import PartitionArchive
from waltzd.archive.verification import survey
from waltzd.protocol.document import sha256_of


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "FAN_OUT", 3)


SEGMENTS = 10


def naming(store: FaultyStore) -> list[str]:
    """The label, the newest manifest, and all chunks."""
    newest = manifests.manifest_name(0, SEGMENTS)
    return [name for name in store.objects if "/chunk/" in name or name in (newest, "archive.json")]


def spoil(store: FaultyStore, name: str, pick: random.Random) -> None:
    data = bytearray(store.objects[name].data)
    data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
    store.objects[name].data = bytes(data)


def test_a_whole_archive_needs_nothing() -> None:
    assert rebuilt_objects(archive(SEGMENTS, partitions=2)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_whatever_names_others_is_made_again_to_the_byte(count: int) -> None:
    """Also two of them at once, and the manifest in front of one that has to be made again."""
    pick = random.Random(count)
    whole = archive(SEGMENTS, partitions=1)
    names = [*naming(whole), manifests.manifest_name(0, SEGMENTS - 1)]
    assert len(names) == 2 + 3 + 1 + 1
    for chosen in itertools.combinations(names, count):
        store = archive(SEGMENTS, partitions=1)
        for name in chosen:
            if name != manifests.manifest_name(0, SEGMENTS) and pick.random() < 0.5:
                del store.objects[name]
            else:
                spoil(store, name, pick)
        found = rebuilt_objects(store)
        assert set(chosen) - {manifests.manifest_name(0, SEGMENTS - 1)} <= set(found) <= set(chosen)
        assert all(whole.objects[name].data == data for name, data in found.items())
        assert survey(RepairedStore(store, found)).flaws == []
        for name, data in found.items():
            put_back(store, name, data)
        assert survey(store).flaws == []
        assert rebuilt_objects(store) == {}


def test_what_a_piece_would_have_to_say_is_not_guessed() -> None:
    """The piece that the newest manifest added has rotted as well."""
    store, pick = archive(SEGMENTS, partitions=1), random.Random(1)
    newest = manifests.manifest_name(0, SEGMENTS)
    spoil(store, newest, pick)
    last = max(name for name in store.objects if "/segment/" in name)
    spoil(store, last, pick)
    assert rebuilt_objects(store) == {}
    spoil(store, "archive.json", pick)
    assert set(rebuilt_objects(store)) == {"archive.json"}


def test_which_of_two_pieces_was_added_is_told_by_the_next_manifest_or_not_at_all() -> None:
    """In format 0 another storage may have left a piece of the same ids. Here it is the same segment without its index."""
    whole = archive(SEGMENTS, partitions=1)
    pieces = survey(whole).pieces[0]
    for number in (SEGMENTS, SEGMENTS - 2):
        store, piece = archive(SEGMENTS, partitions=1), pieces[number - 1]
        data = store.objects[piece.name(0)].data[: piece.size - piece.index_bytes]
        other = replace(piece, size=len(data), index_bytes=0, sha256=sha256_of(data))
        store.put_new(other.name(0), data)
        name = manifests.manifest_name(0, number)
        spoil(store, name, random.Random(number))
        if number < SEGMENTS:
            spoil(store, entry_of(whole, number + 1).name(0), random.Random(number))  # a chunk that was made after it
        expected = (
            {}
            if number == SEGMENTS
            else {one: whole.objects[one].data for one in (name, entry_of(whole, number + 1).name(0))}
        )
        assert rebuilt_objects(store) == expected
        if number == SEGMENTS:
            spoil(store, piece.name(0), random.Random(1))
            assert rebuilt_objects(store) == {}, "the sound one need not be the one"


def entry_of(store: FaultyStore, number: int) -> manifests.Entry:
    """The first chunk that this manifest names."""
    return PartitionArchive(store, survey(store).label, 0).manifest_at(number).entries[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("is_its_own", [True, False])
@pytest.mark.parametrize("is_later", [True, False])
def test_a_segment_of_another_timeline_is_not_taken_for_the_one_that_was_added(is_later: bool, is_its_own: bool) -> None:
    """Behind the fork both have one that begins at the same id. A manifest is damaged, and one segment is left: its own,
    or that of the other timeline."""
    store = archive(3, partitions=1, has_keys=False)
    newest, given_up = survey(store).manifests[0], survey(store).pieces[0][-1]
    mine, known, piece, data = forked(store)
    made = mine.add(known, piece, data)
    assert piece.first == given_up.first
    manifest, own, other = (made, piece, given_up) if is_later else (newest, given_up, piece)
    store.objects[manifest.name].data = b"damaged"
    del store.objects[(other if is_its_own else own).name(0)]
    assert rebuilt_objects(store) == ({manifest.name: manifest.text} if is_its_own else {})


def test_a_store_without_an_archive_has_nothing_to_be_made_of() -> None:
    assert rebuilt_objects(FaultyStore()) == {}


def test_an_archive_of_before_key_indexes_is_made_again_without_them() -> None:
    whole = archive(SEGMENTS, partitions=1, has_keys=False)
    assert not [name for name in whole.objects if "/key/" in name]
    for name in naming(whole):
        store = archive(SEGMENTS, partitions=1, has_keys=False)
        spoil(store, name, random.Random(1))
        assert rebuilt_objects(store) == {name: whole.objects[name].data}


def test_a_newest_manifest_whose_key_index_is_lost_as_well_is_not_guessed() -> None:
    store = archive(SEGMENTS, partitions=1)
    spoil(store, manifests.manifest_name(0, SEGMENTS), random.Random(1))
    assert set(rebuilt_objects(store)) == {manifests.manifest_name(0, SEGMENTS)}
    del store.objects[max(name for name in store.objects if "/key/" in name)]
    assert rebuilt_objects(store) == {}


def test_a_key_index_is_made_again_out_of_its_segment() -> None:
    store = archive(SEGMENTS, partitions=1)
    found = survey(store)
    for piece in found.pieces[0]:
        data = store.objects[piece.name(0)].data
        assert rebuilt_key(piece, data, found.label, 0) == store.objects[piece.key_name(0)].data
        assert rebuilt_key(replace(piece, key_sha256="0" * 64), data, found.label, 0) is None
