"""What the simulator says of segments on disks: nothing of sound ones, and a sentence for everything that differs."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.simulation.files import Files, batch_files, broken_chain, data_end, differences
from waltzd.disk.simulated import SimDisk
from waltzd.format.batch import Batch, End, encode_batch
from waltzd.format.footer import NO_HASH, FooterBuilder
from waltzd.format.layout import BATCHES, FileHeader, segment_name
from waltzd.format.record import encode_payloads

KEY = UUID(int=1)


def written(count: int = 10, segment_bytes: int = 600) -> Files:
    files: Files = {}
    before, hash_ = End(), NO_HASH
    name, raw, builder = "", b"", FooterBuilder(b"")
    for number in range(count):
        batch: Batch = encode_batch(
            encode_payloads(number, [b"x" * 50]), session=1, generation=1, committed=number - 1, time=1000 * number,
            before=before, segment_bytes_max=segment_bytes,
        )  # fmt: skip
        if not before.segment_bytes:
            name, raw = segment_name(number), FileHeader(
                created_ms=number, key=KEY, partition=0, first_id=number, version=BATCHES
            ).encode()  # fmt: skip
            builder = FooterBuilder(raw)
        builder.add(batch.head, batch.pieces)
        raw += b"".join(batch.pieces)
        before = batch.end(before)
        if batch.head.is_last:
            footer = builder.footer(hash_)
            raw, hash_ = raw + footer.encode(), footer.hash
        files[name] = raw
    return files


def test_what_is_sound_is_not_told() -> None:
    files = written()
    assert len(files) == 4
    assert [*broken_chain(files)] == []
    assert [*differences({"a": files, "b": dict(files), "c": dict(files)})] == []


def test_a_footer_of_the_newest_segment_may_be_on_its_way() -> None:
    files = written(6)
    newest = max(files)
    there = {**files, newest: files[newest][: data_end(files[newest])]}
    assert data_end(files[newest]) < len(files[newest])
    assert [*broken_chain(there)] == []
    assert [*differences({"a": files, "b": there})] == []


@pytest.mark.parametrize(
    ("at", "said"),
    [(-1, "has no footer"), (-60, "has no footer"), (40, "not that of its data")],
    ids=["end", "front", "data"],
)
def test_what_is_wrong_in_one_file_is_told(at: int, said: str) -> None:
    files = written()
    first = min(files)
    raw = bytearray(files[first])
    raw[at] ^= 1
    wrong = {**files, first: bytes(raw)}
    assert said in next(iter(broken_chain(wrong)))
    assert first in next(iter(differences({"a": files, "b": wrong})))


def test_a_footer_that_follows_another_history_is_told() -> None:
    files, others = written(), written(segment_bytes=400)
    first = min(files)
    mixed = {name: raw for name, raw in files.items() if name != first}
    assert "does not follow" in next(iter(broken_chain(mixed)))
    assert "has the segments" in next(iter(differences({"a": files, "b": others})))


def test_only_segments_of_format_1_are_looked_at() -> None:
    disk = SimDisk(1)
    disk.make_directory("here")
    for name, version in ((segment_name(0), 0), (segment_name(7), BATCHES)):
        file = disk.create(f"here/{name}")
        header = FileHeader(created_ms=1, key=KEY, partition=0, first_id=0, version=version)
        file.write(0, header.encode())
    assert list(batch_files(disk, "here")) == [segment_name(7)]
