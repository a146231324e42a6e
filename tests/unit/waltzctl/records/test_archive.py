"""What goes back into an archive from the files of a replica: the bytes that were archived, or nothing. And which saved
documents are not whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.archives import Uploads
from tests.batches import batches_of, index_raw, segment_raw
from tests.simulation.faulty_store import FaultyStore
from waltzctl.records import archive
from waltzctl.records.archive import file_of, key_of, metadata_flaws, missing_flaws, saved_documents
from waltzctl.shell.progress import Shown
from waltzd.archive.archived_segment import keyed, segment_entry
from waltzd.archive.listing import metadata_in, metadata_name
from waltzd.archive.manifest import Entry, Label, manifest_name
from waltzd.archive.unsealed import UnsealedWriter, unsealed_index_name
from waltzd.archive.verification import Flaw, survey
from waltzd.cluster.cluster import ARCHIVES, ROOT
from waltzd.cluster.documents import ArchiveMeta, ClusterMeta
from waltzd.cluster.metadata import SavedDocuments, write
from waltzd.format.layout import FileHeader, index_name, segment_name

KEY = UUID(int=5)
BATCHES = batches_of([[b"a", b"b"], [b"c" * 300]], cuts=[1])
DATA, INDEX = segment_raw(BATCHES, key=KEY)[0], index_raw(BATCHES, key=KEY)


def piece(index: bytes = INDEX) -> Entry:
    expected = FileHeader(created_ms=0, key=KEY, partition=0, first_id=0)
    return segment_entry(DATA, index, expected=expected, last_id=2, path="here")


def test_only_bytes_that_were_archived_go_back(tmp_path: Path) -> None:
    assert file_of(str(tmp_path), 0, piece()) is None
    replica = tmp_path / "0"
    replica.mkdir()
    (replica / segment_name(0)).write_bytes(DATA)
    assert file_of(str(tmp_path), 0, piece()) is None, "without its index"
    assert file_of(str(tmp_path), 0, piece(b"")) == DATA
    (replica / index_name(0)).write_bytes(INDEX + b"behind it")
    assert file_of(str(tmp_path), 0, piece()) == DATA + INDEX
    assert file_of(str(tmp_path), 0, piece(b"")) == DATA
    assert file_of(str(tmp_path), 1, piece()) is None
    (replica / segment_name(0)).write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    assert file_of(str(tmp_path), 0, piece()) is None


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_a_segment_that_the_storage_removed_while_a_person_was_asked_is_not_reported_as_put_back(
    is_trimmed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A storage may remove what is archived, and does not know that the object is lost."""
    store, replica = FaultyStore(), tmp_path / "0"
    Uploads(store, cluster=KEY).batches(BATCHES)
    (name,) = [name for name in store.objects if "/segment/" in name]
    lost = store.objects.pop(name)
    replica.mkdir()
    (replica / segment_name(0)).write_bytes(DATA)
    (replica / index_name(0)).write_bytes(INDEX)

    def asked(*_: object) -> bool:
        if is_trimmed:
            (replica / segment_name(0)).unlink()
        return True

    monkeypatch.setattr(archive, "open_archive", lambda _place: store)
    monkeypatch.setattr(archive, "agree", asked)
    code = archive.heal(store="store", source=str(tmp_path), quick=True, yes=True, output="json", progress=Shown.OFF)
    shown = json.loads(capsys.readouterr().out)
    if is_trimmed:
        assert (code, shown["healed"], shown["left"], name in store.objects) == (8, [], [name], False)
    else:
        assert (code, shown["healed"], shown["left"]) == (0, [name], [])
        assert store.objects[name].data == lost.data


def test_a_key_index_is_made_of_the_archived_segment_in_the_store_or_in_a_replica(tmp_path: Path) -> None:
    store, label = FaultyStore(), Label(archive=KEY, cluster=KEY)
    entry, key = keyed(piece(), DATA + INDEX, KEY, 0)
    assert key_of(store, str(tmp_path), label, 0, entry) is None
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / segment_name(0)).write_bytes(DATA)
    (tmp_path / "0" / index_name(0)).write_bytes(INDEX)
    assert key_of(store, str(tmp_path), label, 0, entry) == key
    store.put_new(entry.name(0), DATA[:-1] + b"?" + INDEX)
    assert key_of(store, str(tmp_path), label, 0, entry) == key
    assert key_of(store, str(tmp_path / "nowhere"), label, 0, entry) is None
    store.objects[entry.name(0)].data = DATA + INDEX
    assert key_of(store, str(tmp_path / "nowhere"), label, 0, entry) == key


def test_documents_that_are_not_what_was_saved_are_named() -> None:
    store, label = FaultyStore(), Label(archive=KEY, cluster=KEY)
    moment = "2026-11-24T09:00:00+00:00"
    meta = ClusterMeta(key=KEY, name="a", partitions=1, created=moment)
    text = write(SavedDocuments(moment=moment, documents={ROOT: meta}))
    store.put_new(metadata_name(1), text)
    assert metadata_flaws(store, label, metadata_in(store)) == []
    (other,) = metadata_flaws(store, replace(label, cluster=UUID(int=6)), metadata_in(store))
    assert (other.name, "documents of the cluster" in other.detail) == (metadata_name(1), True)
    store.put_new(metadata_name(2), text)
    for bit in range(0, 8 * len(text), 7):
        data = bytearray(text)
        data[bit // 8] ^= 1 << bit % 8
        store.objects[metadata_name(2)].data = bytes(data)
        assert [flaw.name for flaw in metadata_flaws(store, label, metadata_in(store))] == [metadata_name(2)], bit


def test_a_store_that_lacks_what_the_documents_know_is_not_clean() -> None:
    """Its newest manifest, its tail, a whole partition, all documents: the rest of the store is whole each time."""
    store = FaultyStore()
    uploads = Uploads(store, cluster=KEY)
    uploads.batches(batches_of([[b"a"], [b"b"], [b"c"], [b"d"]], cuts=[1, 3]))
    manifest = uploads.manifest
    meta = ArchiveMeta(
        archive=manifest.archive, number=manifest.number, sha256=manifest.sha256, last=manifest.last
    )  # fmt: skip
    tail = UnsealedWriter(store, survey(store).label, 0, lambda: UUID(int=77))
    tail.add(session=1, since=4, last=3, moment=5, read=lambda first, last, size: ())
    assert missing_flaws(survey(store), {0: meta}) == []
    none = saved_documents(store)
    assert isinstance(none, Flaw)
    assert none.name == "metadata"
    assert missing_flaws(survey(store), {0: meta, 1: meta})[0].name == manifest_name(1, 2)
    other = replace(meta, timeline=UUID(int=5))
    assert missing_flaws(survey(store), {0: other})[0].name == manifest_name(0, 2, UUID(int=5))
    for name in (manifest_name(0, 2), unsealed_index_name(0)):
        gone = store.objects.pop(name)
        assert [flaw.name for flaw in missing_flaws(survey(store), {0: meta})] == [name]
        store.objects[name] = gone


def verify(
    store: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    partitions: str | None,
    *,
    quick: bool,
) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the findings of `archive verify`."""
    store.seen = {}  # signatures, of which these tests have none
    monkeypatch.setattr(archive, "open_archive", lambda _place: store)
    here: Any = None  # no cluster is asked
    code = archive.verify(store="store", partitions=partitions, quick=quick, given=here, output="json", progress=Shown.OFF)
    return code, json.loads(capsys.readouterr().out)["findings"]


@pytest.mark.parametrize("lost", ["whole", "damaged"])
def test_a_partition_that_is_asked_for_and_lost_is_a_finding(
    lost: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FaultyStore()
    archives = {}
    for number in range(3):
        uploads = Uploads(store, cluster=KEY, partition=number)
        uploads.batches(batches_of([[b"a"], [b"b"]], cuts=[1], partition=number))
        made = uploads.manifest
        archives[f"{ARCHIVES}/{number}"] = ArchiveMeta(
            archive=made.archive, number=made.number, sha256=made.sha256, last=made.last
        )
    meta = ClusterMeta(name="trial", key=KEY, partitions=3, created="2026-01-01")
    saved = SavedDocuments(moment="2026-01-01T00:00:00+00:00", documents={ROOT: meta, **archives})
    store.put_new(metadata_name(1), write(saved))
    for name in [name for name in store.objects if name.startswith("partition-1/")]:
        if lost == "whole":
            del store.objects[name]
        elif "/manifest/" in name:
            store.objects[name].data = b"{}"

    def verified(partitions: str) -> tuple[int, list[int]]:
        code, findings = verify(store, monkeypatch, capsys, partitions, quick=True)
        return code, sorted({one["partition"] for one in findings if "tail" not in one["object"]})

    assert verified("1") == (8, [1])
    assert verified("0-2") == (8, [1])
    assert verified("0,2")[1] == []


@pytest.mark.parametrize("documents", ["damaged", "none"])
@pytest.mark.parametrize(("partitions", "quick"), [(None, True), ("1", True), ("1", False), ("0-1", False)])
def test_without_readable_documents_no_store_is_clean(
    documents: str, partitions: str | None, quick: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They name the partitions that a store has to have: without them a lost one is missed by nobody."""
    store = FaultyStore()
    for number in (0, 2):
        Uploads(store, cluster=KEY, partition=number).batches(batches_of([[b"a"], [b"b"]], cuts=[1], partition=number))
    if documents == "damaged":
        meta = ClusterMeta(name="trial", key=KEY, partitions=3, created="2026-01-01")
        text = write(SavedDocuments(moment="2026-01-01T00:00:00+00:00", documents={ROOT: meta}))
        store.put_new(metadata_name(1), text[:-1])
    code, findings = verify(store, monkeypatch, capsys, partitions, quick=quick)
    assert (code, [one["object"] for one in findings]) == (8, [metadata_name(1) if documents == "damaged" else "metadata"])
