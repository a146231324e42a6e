"""Archives for tests: a store that holds the segments of a log, as a storage would have uploaded them.

log = archive_of(FaultyStore(), [*batches_of([[b"a"], [b"b"]], cuts=[0])], cluster=KEY)
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from tests.batches import index_raw, segment_raw, segments_of
from waltzd.archive.archived_segment import keyed, segment_entry
from waltzd.archive.cut_point import ArchivedLog, UnsealedRecords
from waltzd.archive.manifest import Entry, Manifest
from waltzd.archive.store import Store
from waltzd.archive.upload import PartitionArchive, label_in
from waltzd.format.batch import Batch
from waltzd.format.footer import NO_HASH
from waltzd.format.layout import HEADER_BYTES, FileHeader
from waltzd.format.record import Run
from waltzd.protocol.descriptions import Archived

ARCHIVE = UUID(int=0xA7C)


class Uploads:
    """Segments on their way into the archive of one partition."""

    def __init__(self, store: Store, *, cluster: UUID, partition: int = 0) -> None:
        self._archive = PartitionArchive(store, label_in(store, cluster, lambda: ARCHIVE, None), partition)
        self._cluster, self._partition = cluster, partition
        self._front = NO_HASH
        self.manifest: Manifest = self._archive.manifest(0, "")

    def _add(self, data: bytes, index: bytes, first: int, last: int) -> None:
        known = Archived(
            archive=self.manifest.archive, number=self.manifest.number, sha256=self.manifest.sha256, last_id=first - 1
        )
        expected = FileHeader(created_ms=0, key=self._cluster, partition=self._partition, first_id=first)
        piece = segment_entry(data, index, expected=expected, last_id=last, path=f"the segment at id {first}")
        whole = data + index[: piece.index_bytes]
        self.manifest = self._archive.add(known, *with_key(piece, whole, self._cluster, self._partition))

    def batches(self, batches: Sequence[Batch], *, has_index: bool = True) -> list[Batch]:
        """Those of sealed segments; the rest comes back."""
        rest: list[Batch] = []
        for own in segments_of(batches):
            if not own[-1].head.is_last:
                rest = own
                break
            data, self._front = segment_raw(own, key=self._cluster, partition=self._partition, footer_before=self._front)
            index = index_raw(own, key=self._cluster, partition=self._partition) if has_index else b""
            self._add(data, index, own[0].first_id, own[-1].last_id)
        return rest

    def records(self, run: Run, *, has_index: bool = True) -> None:
        """One segment of format 0."""
        header = FileHeader(created_ms=7, key=self._cluster, partition=self._partition, first_id=run.first_id).encode()
        entries = (run.bounds[:-1] + HEADER_BYTES).astype(">i8").tobytes()
        self._add(header + bytes(run.data), header + entries if has_index else b"", run.first_id, run.last_id)

    def log(self, *rest: UnsealedRecords, complete_to: int | None = None) -> ArchivedLog:
        return ArchivedLog(self._archive, self.manifest, rest, complete_to=complete_to)


def with_key(piece: Entry, data: bytes, cluster: UUID, partition: int = 0) -> tuple[Entry, bytes, bytes]:
    """A checked segment as it is uploaded: its entry, its bytes, and those of its key index."""
    entry, key = keyed(piece, data, cluster, partition)
    return entry, data, key


def unsealed(batches: Sequence[Batch]) -> UnsealedRecords:
    data = b"".join(bytes(piece) for batch in batches for piece in batch.pieces)
    return UnsealedRecords(first=batches[0].first_id, last=batches[-1].last_id, version=1, data=data)
