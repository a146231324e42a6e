"""Manifests against brute force: sums, size, and what a wrong byte shows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from uuid import UUID
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waltzd.archive.manifest import FAN_OUT, Chunk, Entry, Label, Manifest, opened, pieces_of, total_of
from waltzd.errors.operations import ArchiveDamaged, UnknownVersion
from waltzd.format.layout import ID_MAX
from waltzd.protocol.document import sha256_of

ARCHIVE, CLUSTER = UUID(int=1), UUID(int=2)
EMPTY = Manifest(archive=ARCHIVE, cluster=CLUSTER, partition=3)


def piece(first: int, last: int, records: bytes) -> Entry:
    return Entry(
        level=0, first=first, last=last, record_bytes=len(records), crc=crc32(records), segments=1,
        stored_bytes=len(records) + 9, size=len(records) + 9, index_bytes=4, sha256=sha256_of(records),
    )  # fmt: skip


def archive_of(log: list[bytes]) -> tuple[list[Manifest], dict[str, bytes]]:
    """Each manifest after the other, and all chunks by their names."""
    manifests, chunks, first = [EMPTY], {}, 0
    for records in log:
        following, made = manifests[-1].extended(piece(first, first + len(records) % 7, records))
        manifests.append(following)
        chunks.update({chunk.entry().name(3): chunk.text for chunk in made})
        first = following.last + 1
    return manifests, chunks


def pieces(manifest: Manifest, chunks: dict[str, bytes]) -> list[Entry]:
    return list(pieces_of(manifest.entries, lambda entry: opened(entry, chunks[entry.name(3)], 3, "here")))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=20), max_size=3 * FAN_OUT))
def test_a_manifest_has_what_was_added(log: list[bytes]) -> None:
    manifests, chunks = archive_of(log)
    newest = manifests[-1]
    whole, total = b"".join(log), newest.total
    found = pieces(newest, chunks)
    assert [entry.sha256 for entry in found] == [sha256_of(records) for records in log]
    assert (total.record_bytes, total.crc, total.segments) == (len(whole), crc32(whole), len(log))
    assert (total.stored_bytes, total.last) == (len(whole) + 9 * len(log), newest.last)
    assert total == total_of(found)
    for before, behind in pairwise(manifests):
        assert behind.follows(before)
        assert not before.follows(behind)
        assert not replace(behind, archive=CLUSTER).follows(before)
        assert not replace(behind, number=behind.number + 1).follows(before)
        assert Manifest.decode(behind.text, "here") == behind
        assert behind.before == (before.sha256 if before.number else "")


def test_an_upload_writes_few_names_again_however_long_the_log_is() -> None:
    """100,000 segments with the largest numbers: what the next pieces write, chunks and manifest, up to the next turn of
    the third level."""
    size, at = 1 << 40, ID_MAX - 300_000 * (1 << 24)

    def entry(level: int) -> Entry:
        nonlocal at
        count = FAN_OUT**level
        first, at = at, at + count * (1 << 24)
        return Entry(
            level=level, first=first, last=at - 1, record_bytes=size * count, crc=0xFFFFFFFF, segments=count,
            stored_bytes=size * count, size=size, index_bytes=size // 2, sha256=sha256_of(b"x"),
        )  # fmt: skip

    entries = [entry(level) for level, count in ((2, 24), (1, FAN_OUT - 1), (0, FAN_OUT - 3)) for _ in range(count)]
    manifest = Manifest(archive=ARCHIVE, cluster=CLUSTER, partition=65535, number=100_000, entries=tuple(entries))
    assert manifest.total.segments > 100_000
    largest, folded = 0, 0
    for _ in range(FAN_OUT + 5):
        manifest, made = manifest.extended(entry(0))
        folded = max(folded, len(made))
        largest = max(largest, len(manifest.text) + sum(len(chunk.text) for chunk in made))
    assert folded == 2
    assert len(manifest.text) < largest <= 60 << 10


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_each_wrong_byte_is_damage(data: st.DataObject) -> None:
    manifests, chunks = archive_of([b"a", b"bc"] * (FAN_OUT // 2 + 1))
    (name, text), *_ = chunks.items()
    entry = next(one for one in manifests[-1].entries if one.level)
    assert entry.name(3) == name
    label = Label(archive=ARCHIVE, cluster=CLUSTER)
    assert Label.decode(label.text, "here") == label
    for whole, decode in (
        (manifests[-1].text, lambda wrong: Manifest.decode(wrong, "here")),
        (text, lambda wrong: opened(entry, wrong, 3, "here")),
        (label.text, lambda wrong: Label.decode(wrong, "here")),
    ):
        wrong = bytearray(whole)
        at = data.draw(st.integers(0, len(whole) - 1))
        wrong[at] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises((ArchiveDamaged, UnknownVersion), match="here"):
            decode(bytes(wrong))
        with pytest.raises(ArchiveDamaged):
            decode(whole[:at])


def test_what_is_right_by_itself_and_not_what_was_named_is_damage() -> None:
    manifests, chunks = archive_of([b"a"] * FAN_OUT)
    entry = manifests[-1].entries[0]
    text = chunks[entry.name(3)]
    with pytest.raises(ArchiveDamaged, match="holds other ids"):
        opened(entry, text, 4, "here")
    with pytest.raises(ArchiveDamaged, match="holds other ids"):
        opened(replace(entry, last=entry.last + 1), text, 3, "here")
    with pytest.raises(ArchiveDamaged, match="has other bytes"):
        opened(entry, text + b" ", 3, "here")
    with pytest.raises(ArchiveDamaged, match="is no chunk"):
        Chunk.decode(manifests[-1].text, "here")


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        (
            (piece(0, 1, b"a"), replace(piece(2, 4, b"b"), level=1)),
            r"entries\[1\] begins at id 2 and does not follow the one that ends at id 1",
        ),
        ((replace(piece(0, 1, b"a"), index_bytes=99),), r"entries\[0\].index_bytes must be at most 10, not 99"),
        ((replace(piece(0, 1, b"a"), sha256="no hash"),), r'entries\[0\].sha256 must be a SHA-256 .*, not "no hash"'),
        ((replace(piece(0, 1, b"a"), level=99),), r"entries\[0\].level must be a whole number from 0 to 8, not 99"),
        ((), "entries must not be empty"),
    ],
)
def test_a_manifest_that_cannot_be_is_not_read(entries: tuple[Entry, ...], wrong: str) -> None:
    forged = replace(EMPTY, number=1, entries=entries)
    with pytest.raises(ArchiveDamaged, match=f"here: {wrong}"):
        Manifest.decode(forged.text, "here")


def test_a_manifest_of_a_later_version_is_not_guessed_at() -> None:
    text = archive_of([b"a"])[0][-1].text
    with pytest.raises(UnknownVersion, match="an object of an archive of version 3; this program knows 2"):
        Manifest.decode(text.replace(b'"version": 1', b'"version": 3'), "here")


def keyed(first: int, last: int, records: bytes) -> Entry:
    return replace(piece(first, last, records), key_bytes=len(records) + 3, key_sha256=sha256_of(records + b"key"))


def test_a_manifest_without_key_indexes_has_the_bytes_of_before_them() -> None:
    """The text of a version that knew none; a manifest that names one is of version 2, with two columns more."""
    old, _ = EMPTY.extended(piece(0, 9, b"a"))
    assert sha256_of(old.text) == "62331101f1bf86fc53e5a9e0957af00dc8019bbe317face947a439c7371619ab"
    assert b"key_bytes" not in old.text
    new, _ = old.extended(keyed(10, 19, b"b"))
    assert b'"version": 2' in new.text
    rows = [line for line in new.text.decode().splitlines() if line.startswith("[")]
    assert [row.rstrip(",").endswith(',0,""]') for row in rows] == [True, False]
    for manifest in (old, new):
        assert Manifest.decode(manifest.text, "here") == manifest


def test_chunks_name_key_indexes_and_their_entries_do_not() -> None:
    manifest, made = EMPTY, list[Chunk]()
    for number in range(FAN_OUT):
        manifest, chunks = manifest.extended((piece if number < 3 else keyed)(10 * number, 10 * number + 9, b"%d" % number))
        made += chunks
    (chunk,) = made
    assert (b'"version": 2' in chunk.text, b'"version": 1' in manifest.text) == (True, True)
    assert opened(manifest.entries[0], chunk.text, 3, "here") == chunk
    assert sum(entry.key_bytes > 0 for entry in chunk.entries) == FAN_OUT - 3


@pytest.mark.parametrize(("level", "size", "hash_"), [(0, 0, "0" * 64), (0, 5, ""), (1, 5, "0" * 64)])
def test_an_entry_whose_key_index_makes_no_sense_is_no_entry(level: int, size: int, hash_: str) -> None:
    assert replace(piece(0, 9, b"a"), level=level, key_bytes=size, key_sha256=hash_).mistake() is not None
