"""Files that the original system wrote: read as its manifest says, and made again byte for byte from what was read."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from waltzd.disk.real import RealDisk
from waltzd.format.index import read_index
from waltzd.format.layout import (
    HEADER_BYTES,
    ControlHeader,
    FileHeader,
    control_bytes,
    decode_control_info,
    first_id_of,
    index_entries,
)
from waltzd.format.record import OVERHEAD_BYTES, Run, bad_payloads, encode_run, first_bad, heads, walk
from waltzd.format.scan import Survey, survey

Facts = dict[str, str]
STORAGES = ["storage0", "storage1", "storage2"]


def manifest(original: Path, storage: str) -> dict[str, list[list[str]]]:
    """The lines of one storage, by their first word."""
    out: dict[str, list[list[str]]] = defaultdict(list)
    section = ""
    for line in (original / "manifest.txt").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].strip()
        elif section == storage and line.strip():
            kind, *words = line.split()
            out[kind].append(words)
    return out


def facts(words: list[str]) -> Facts:
    return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def run_of(path: Path) -> Run:
    first_id = first_id_of(path.name)
    assert first_id is not None
    data = memoryview(path.read_bytes())[HEADER_BYTES:]
    return Run(first_id, data, walk(data))


def test_the_control_file(original: Path, storage: str) -> None:
    lines = manifest(original, storage)
    raw = (original / storage / "waltz-storage.ctl").read_bytes()
    [words] = lines["control"]
    said = facts(words)
    header = ControlHeader.decode(raw, "it")
    assert (header.created_ms, str(header.key)) == (int(said["created_ms"]), said["key"])
    assert header.partitions == int(said["numPartitions"])
    assert len(raw) == int(said["fileSize"]) == control_bytes(header.partitions)
    assert header.encode() == raw[:HEADER_BYTES]
    for words in lines["control-struct"]:
        said = facts(words)
        info = decode_control_info(raw, int(said["partition"]), "it")
        slot = int(said["struct"]) - 1
        struct_ = info.structs[slot]
        assert struct_ is not None
        assert (struct_.session, struct_.low_mark) == (int(said["session"]), int(said["lwm"]))
        assert (struct_.local_low_mark, struct_.flags) == (int(said["localLwm"]), int(said["flags"]))
        assert struct_.sequence == int(said["seq"])
        assert struct_.encode()[-4:].hex() == said["crc"]
        assert (info.current_slot == slot) == ("CURRENT" in words)
    assert len(lines["control-struct"]) == 2 * header.partitions


def test_every_record_is_what_the_manifest_says(original: Path, storage: str) -> None:
    lines = manifest(original, storage)
    found = []
    for words in lines["segment"]:
        said = facts(words)
        partition, file = said["partition"], said["file"]
        run = run_of(original / storage / partition / file)
        for number in range(len(run)):
            record = run.record(number)
            digest = hashlib.sha256(record.payload).hexdigest()
            offset = HEADER_BYTES + int(run.bounds[number])
            crcs = [f"{record.data_crc:08x}", f"{record.crc:08x}"]
            places = [f"off={offset}", f"seg={file}"]
            about = [str(record.id), str(record.request), str(record.header), str(record.length), digest]
            found.append([partition, *about, *crcs, *places])
    assert found == lines["rec"]
    assert len(found) > 500


def test_every_segment_is_sound_to_its_end(original: Path, storage: str) -> None:
    disk = RealDisk()
    key = facts(manifest(original, storage)["control"][0])["key"]
    for words in manifest(original, storage)["segment"]:
        said = facts(words)
        path = original / storage / said["partition"] / said["file"]
        first_id, count, size = int(said["first"]), int(said["records"]), int(said["size"])
        header = FileHeader.decode(path.read_bytes(), "it")
        assert (str(header.key), header.partition, header.first_id) == (key, int(said["partition"]), first_id)
        assert header.encode() == path.read_bytes()[:HEADER_BYTES]
        run = run_of(path)
        assert (len(run), first_bad(run), bad_payloads(run).tolist()) == (count, None, [])
        index = disk.open(str(path.with_suffix(".idx")))
        assert FileHeader.decode(index.read(0, HEADER_BYTES), "it").first_id == first_id
        assert index_entries(index.size()) == count
        assert read_index(index, 0, count + 1).tolist() == (run.bounds[:-1] + HEADER_BYTES).tolist()
        for hint in (index, None):
            found = survey(disk.open(str(path)), first_id=first_id, end=size, index=hint)
            assert found == Survey(next_id=first_id + count, end=size, tail_bytes=0, gaps=[])


def test_encoding_what_was_decoded_gives_the_same_files(original: Path, storage: str) -> None:
    paths = sorted((original / storage).glob("*/*.seg"))
    for path in paths:
        run = run_of(path)
        head = heads(run)
        columns = [head[name].astype(np.int32) for name in ("client", "generation", "partition", "sequence")]
        again = encode_run(
            run.first_id,
            requests=np.stack(columns, axis=1),
            headers=head["header"].astype(np.int32),
            lengths=np.diff(run.bounds) - OVERHEAD_BYTES,
            data_crcs=head["data_crc"].astype(np.uint32),
            payloads=b"".join(run.record(number).payload for number in range(len(run))),
        )
        assert again.data == run.data, path
        assert again.bounds.tolist() == run.bounds.tolist()
    assert len(paths) >= 13


def test_replicas_hold_the_same_records(original: Path) -> None:
    """Segment boundaries may differ between replicas; the bytes of the records may not."""
    for partition in range(4):
        logs = set()
        for name in STORAGES:
            paths = sorted((original / name / str(partition)).glob("*.seg"))
            logs.add(b"".join(path.read_bytes()[HEADER_BYTES:] for path in paths))
        assert len(logs) == 1
