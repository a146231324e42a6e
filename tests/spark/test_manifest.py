"""Manifests: what they prove, however the log was cut into files, and what is not believed."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any
from uuid import UUID
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waltz_spark.export.manifest import Manifest, Piece, Shape, decode, encode, path_of, totals_of
from waltz_spark.log.origin import Span

from waltzd.errors.operations import ExportDamaged, ExportUnfit, UnknownVersion

SHAPE = Shape(format="parquet", compression="zstd:3", decoder="", decoder_fingerprint="", schema=(("txid", "int64"),))


def piece_of(partition: int, first: int, data: bytes, records: int) -> Piece:
    span = Span(first, first + records - 1)
    return Piece(
        path=path_of(partition, span), partition=partition, span=span, data_bytes=len(data),
        crc=crc32(data), size=len(data) // 2, sha256="ab" * 32,
    )  # fmt: skip


def manifest_of(*pieces: Piece) -> Manifest:
    empty = Manifest(number=0, export=UUID(int=1), cluster=UUID(int=2), source="a test", written="", shape=SHAPE)
    return empty.extended(pieces, source="a test", written="2026-01-01T00:00:00+00:00")


LOG = st.lists(st.binary(min_size=0, max_size=40), min_size=1, max_size=12)


@given(LOG, st.data())
def test_a_partition_has_one_checksum_however_it_was_cut(log: list[bytes], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(log)), max_size=5)) | {len(log)})
    pieces, start = [], 0
    for stop in cuts:
        pieces.append(piece_of(3, 100 + start, b"".join(log[start:stop]), stop - start))
        start = stop
    total = totals_of(pieces)[3]
    whole = b"".join(log)
    assert (total.crc, total.data_bytes, total.files) == (crc32(whole), len(whole), len(cuts))
    assert total.span == Span(100, 99 + len(log))
    assert manifest_of(*pieces).next_ids == {3: 100 + len(log)}


BESIDE = st.none() | st.tuples(st.integers(0, 99), st.integers(0, 1 << 60), st.integers(0, 0xFFFFFFFF))


@given(
    st.dictionaries(
        st.integers(0, 5),
        st.lists(st.tuples(st.binary(max_size=9), BESIDE), max_size=4),
    )
)
def test_what_is_written_is_read(partitions: dict[int, list[tuple[bytes, Any]]]) -> None:
    pieces = [
        replace(
            piece_of(partition, 10 * number, data, 10), times=beside and beside[:2], beside=beside and beside[2],
        )
        for partition, files in partitions.items()
        for number, (data, beside) in enumerate(files)
    ]  # fmt: skip
    manifest = manifest_of(*pieces)
    found = decode(encode(manifest), "here")
    assert found == manifest
    assert found.partitions == manifest.partitions
    assert encode(found) == encode(manifest)


def test_the_next_one_holds_all_of_the_one_before() -> None:
    first = manifest_of(piece_of(0, 0, b"abc", 2), piece_of(1, 5, b"", 1))
    second = first.extended([piece_of(0, 2, b"de", 3)], source="another", written="later")
    assert second.number == 2
    assert [piece.path for piece in second.pieces] == [
        path_of(0, Span(0, 1)), path_of(0, Span(2, 4)), path_of(1, Span(5, 5))
    ]  # fmt: skip
    assert second.partitions[0].crc == crc32(b"abcde")
    assert (second.export, second.source) == (first.export, "another")


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_gap_and_an_overlap_are_refused(first: int) -> None:
    with pytest.raises(ExportDamaged, match=f"begins at id {first} of partition 0, and the file before it ends at id 1"):
        _ = manifest_of(piece_of(0, 0, b"abc", 2)).extended([piece_of(0, first, b"", 4)], source="", written="").partitions


def test_no_bit_of_a_manifest_can_change_unnoticed() -> None:
    text = encode(manifest_of(piece_of(0, 0, b"abc", 2)))
    for at in range(0, len(text) * 8, 7):
        changed = bytearray(text)
        changed[at // 8] ^= 1 << at % 8
        if json_of(bytes(changed)) == json_of(text):
            continue  # white space
        with pytest.raises((ExportDamaged, UnknownVersion)):
            decode(bytes(changed), "here")


def json_of(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/file.parquet", "a/../../b", "_waltz/lock", "", "a//b", "./a"])
def test_a_manifest_leads_nobody_out_of_the_export(path: str) -> None:
    text = encode(manifest_of(replace(piece_of(0, 0, b"abc", 2), path=path)))
    with pytest.raises(ExportDamaged, match="no path below the output"):
        decode(text, "here")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "cannot be understood"),
        (b"[]", "is not the manifest of an export"),
        (b'{"format": "parquet"}', "is not the manifest of an export"),
        (b"\xff", "cannot be understood"),
        (b'{"format": "waltz-export", "version": 1}', "does not have the checksum"),
    ],
)
def test_what_is_no_manifest_is_refused(text: bytes, said: str) -> None:
    with pytest.raises(ExportDamaged, match=said):
        decode(text, "here")


def test_a_newer_version_is_not_guessed_at() -> None:
    with pytest.raises(UnknownVersion, match="version 2; this program knows 1"):
        decode(b'{"format": "waltz-export", "version": 2}', "here")


# -- what earlier versions could do ------------------------------------------------------------------------------------


def test_a_manifest_has_what_it_had_before() -> None:
    """Older programs read what this one writes."""
    value = json.loads(encode(manifest_of(piece_of(0, 0, b"abc", 2))))
    assert list(value["shape"]) == [
        "format", "compression", "decoder", "decoder_fingerprint", "schema", "lossless", "schema_fingerprint"
    ]  # fmt: skip
    assert value["shape"]["lossless"] is False


@pytest.mark.parametrize(
    ("shape", "made"),
    [
        ({"format": "json"}, "--format json"),
        ({"lossless": True}, "--lossless"),
        ({"engine": "spark"}, "--engine spark"),
        ({"engine": "spark", "where": "txid > 1"}, "--where 'txid > 1' and --engine spark"),
    ],
)
def test_what_was_made_by_an_ability_that_was_removed_is_refused_by_its_name(shape: dict[str, Any], made: str) -> None:
    said = json.loads(encode(manifest_of(piece_of(0, 0, b"abc", 2))))
    said["shape"] |= shape
    said.pop("sha256")
    text = json.dumps({**said, "sha256": digest_of(said)}).encode()
    with pytest.raises(ExportUnfit, match=f"made with {made}, which was removed"):
        decode(text, "here")


def digest_of(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
