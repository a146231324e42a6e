"""Segments of format 1 as they stand on disks when a run is over: equal on all replicas, and a chain of footers that proves
itself. Read here by hand, without the code of a storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from uuid import UUID

from tests.simulation.faulty_store import FaultyStore
from waltzd.archive.manifest import Entry
from waltzd.disk.simulated import SimDisk
from waltzd.format.batch import Head
from waltzd.format.footer import END_BYTES, NO_HASH, Footer, footer_bytes
from waltzd.format.index import IndexWriter
from waltzd.format.layout import BATCHES, HEADER_BYTES, SEGMENT_SUFFIX, FileHeader, segment_name
from waltzd.format.record import Run
from waltzd.format.scan import scan
from waltzd.format.span import Span
from waltzd.storage.replica.segment import Segment, header_of

Files = dict[str, bytes]


def batch_files(disk: SimDisk, folder: str) -> Files:
    """The segments of format 1 of a replica, by name."""
    names = sorted(name for name in disk.names(folder) if name.endswith(SEGMENT_SUFFIX))
    files = {name: bytes(disk.content(f"{folder}/{name}")) for name in names}
    return {name: raw for name, raw in files.items() if FileHeader.decode(raw, name).version == BATCHES}


def differences(replicas: Mapping[str, Files]) -> Iterator[str]:
    """What is not equal, file by file; the footer of a newest segment may be on its way, and so may be a trim."""
    if not replicas:
        return
    begin = max((min(files) for files in replicas.values() if files), default="")
    replicas = {each: {name: raw for name, raw in files.items() if name >= begin} for each, files in replicas.items()}
    first, *others = replicas
    model = replicas[first]
    for other in others:
        found = replicas[other]
        if list(model) != list(found):
            yield f"{first} has the segments {', '.join(model)}, {other} has {', '.join(found)}"
            continue
        for name, raw in found.items():
            one, two = model[name], raw
            if name == max(found):
                one, two = one[: data_end(one)], two[: data_end(two)]
            if one != two:
                at = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
                yield f"{name} has {len(one)} bytes on {first} and {len(two)} on {other}; they differ from byte {at} on"


def data_end(raw: bytes) -> int:
    """Where the last whole batch ends."""
    at = HEADER_BYTES
    while (head := Head.decode(raw, at)) is not None and at + head.size <= len(raw):
        at += head.size
    return at


def broken_chain(files: Files, *, is_trimmed: bool = False) -> Iterator[str]:
    """What is wrong with the footers of a replica, whose newest segment needs none."""
    before: bytes | None = None if is_trimmed else NO_HASH
    for name, raw in files.items():
        end = data_end(raw)
        if name == max(files) and end == len(raw):
            return
        footer = Footer.decode(raw[end:]) if footer_bytes(raw[-END_BYTES:]) == len(raw) - end else None
        if footer is None:
            yield f"{name} has no footer behind its {end} bytes"
            return
        if before is not None and footer.before != before:
            yield f"the footer of {name} does not follow that of the segment before"
        if footer.digest != sha256(raw[:end]).digest():
            yield f"the footer of {name} is not that of its data"
        heads = [Head.decode(raw, int(offset)) for offset in footer.batches]
        if None in heads or heads[0] is None or heads[-1] is None:
            yield f"the footer of {name} says offsets where no batches are"
        elif (footer.first_id, footer.last_id, footer.first_time, footer.last_time) != (
            heads[0].first_id,
            heads[-1].last_id,
            heads[0].time,
            heads[-1].time,
        ):
            yield f"the footer of {name} says other ids or times than its batches"
        before = footer.hash


def _enter(index: IndexWriter, span: Span) -> None:
    index.add(span.first_id, span.entries)


def archived_runs(store: FaultyStore, key: UUID, partition: int, pieces: Sequence[Entry], last_id: int) -> list[Run]:
    """The records up to this id, as an archive has them. Indexes are made anew, because no reader trusts them: one may have
    been archived from a disk on which it had rotted."""
    runs: list[Run] = []
    disk = SimDisk()
    disk.make_directory("archive")
    for piece in pieces:
        if piece.first > last_id:
            break
        data = store.objects[piece.name(partition)].data
        size = piece.size - piece.index_bytes
        file = disk.create(f"archive/{segment_name(piece.first)}")
        file.write(0, data[:size])
        expected = FileHeader(created_ms=0, key=key, partition=partition, first_id=piece.first)
        header = header_of(file, expected)
        index = IndexWriter(disk, "archive", header)
        end = data_end(data[:size]) if header.version == BATCHES else size
        scan(
            file, segment_first_id=piece.first, next_id=piece.first, offset=HEADER_BYTES, end=end, version=header.version,
            on_span=partial(_enter, index),
        )  # fmt: skip
        index.finish(piece.last + 1)
        segment = Segment.open(disk, "archive", expected=expected, next_id=piece.last + 1)
        at = piece.first
        while at <= min(piece.last, last_id):
            runs.append(segment.read(at, min(piece.last, last_id), 1 << 20, with_locks=True))
            at = runs[-1].last_id + 1
    return runs
