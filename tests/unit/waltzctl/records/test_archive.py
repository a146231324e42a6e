"""What goes back into an archive from the files of a replica: the bytes that were archived, or nothing."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from tests.batches import batches_of, index_raw, segment_raw
from waltzctl.records.archive import file_of
from waltzd.archive.manifest import Entry
from waltzd.archive.piece import piece_of
from waltzd.format.layout import FileHeader, index_name, segment_name

KEY = UUID(int=5)
BATCHES = batches_of([[b"a", b"b"], [b"c" * 300]], cuts=[1])
DATA, INDEX = segment_raw(BATCHES, key=KEY)[0], index_raw(BATCHES, key=KEY)


def piece(index: bytes = INDEX) -> Entry:
    expected = FileHeader(created_ms=0, key=KEY, partition=0, first_id=0)
    return piece_of(DATA, index, expected=expected, last_id=2, path="here")


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
