"""What a reader finds in a store: all that there is, or an error, and never less in silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.simulation.faulty_store import Faults, FaultyStore
from tests.unit.waltzd.archive.test_verification import KEY, archive
from waltzd.archive import manifest as manifests
from waltzd.archive.listing import all_pieces, label_at, label_of, newest_manifests
from waltzd.archive.local import LocalStore
from waltzd.archive.upload import PartitionArchive
from waltzd.errors.operations import ArchiveDamaged, ForeignArchive, StoreRefused


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "FAN_OUT", 3)


def test_all_pieces_of_all_partitions_through_chunks_of_chunks() -> None:
    store = archive(segments=7)
    label = label_of(store, not_done="")
    found = newest_manifests(store, label)
    assert {number: (one.number, one.last) for number, one in found.items()} == {0: (7, 20), 1: (7, 20)}
    assert [entry.level for entry in found[0].entries] == [1, 1, 0]
    for number, one in found.items():
        pieces = all_pieces(PartitionArchive(store, label, number), one)
        assert [(piece.level, piece.first, piece.last) for piece in pieces] == [(0, 3 * at, 3 * at + 2) for at in range(7)]
        assert manifests.total_of(pieces) == one.total
    assert newest_manifests(store, label, [1, 9]).keys() == {1}


def test_a_list_that_lags_hides_nothing() -> None:
    store = archive(segments=7, partitions=1)
    store.faults = Faults(lag=7)
    listed = [one.name for one in store.list("partition-0/manifest")]
    assert 0 < len(listed) < 7
    assert newest_manifests(store, label_of(store, not_done=""))[0].number == 7


def test_what_is_damaged_is_never_less_of_a_log() -> None:
    for name in (manifests.manifest_name(0, 7), "chunk"):
        store = archive(segments=7, partitions=1)
        label = label_of(store, not_done="")
        (where, *_) = sorted(each for each in store.objects if name in each)
        whole = store.objects[where].data
        store.objects[where].data = whole[:99] + bytes([whole[99] ^ 1]) + whole[100:]
        with pytest.raises(ArchiveDamaged, match=where):
            all_pieces(PartitionArchive(store, label, 0), newest_manifests(store, label)[0])
        if name == "chunk":
            del store.objects[where]
            with pytest.raises(ArchiveDamaged, match=f"{where}, ids 0 to 8 of partition 0: it is not in the store"):
                all_pieces(PartitionArchive(store, label, 0), newest_manifests(store, label)[0])
    store = archive(partitions=1)
    with pytest.raises(ForeignArchive):
        newest_manifests(store, replace(label_of(store, not_done=""), archive=UUID(int=77)))


def test_a_store_without_an_archive(tmp_path: Path) -> None:
    assert label_at(FaultyStore()) is None
    with pytest.raises(ForeignArchive, match="holds no archive") as found:
        label_of(FaultyStore(), not_done="nothing was read")
    assert found.value.detail_not_done == "nothing was read"
    label = label_at(archive())
    assert label is not None
    assert label.cluster == KEY
    with pytest.raises(StoreRefused):
        label_at(LocalStore(str(tmp_path / "missing")))
