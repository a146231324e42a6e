"""Our engine, given the records of the original one after the other, makes the original's files; and goes on in them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from uuid import UUID

import pytest

from waltzd.disk.real import RealDisk
from waltzd.format.finding import Finding
from waltzd.format.layout import HEADER_BYTES, FileHeader
from waltzd.format.record import Run, encode_payloads, walk
from waltzd.storage.offline.verify import Options, Target, verify
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.replica_context import PartitionSettings

KEY = UUID("1d07c30d-8ad3-4978-9a0b-63b5a017e338")
THRESHOLD = 16384
"""What the original ran with."""
SETTINGS = PartitionSettings(segment_bytes_max=THRESHOLD)
STORAGES = ["storage0", "storage1", "storage2"]


def log_of(partition: Path) -> Run:
    raw = b"".join(path.read_bytes()[HEADER_BYTES:] for path in sorted(partition.glob("*.seg")))
    return Run(0, memoryview(raw), walk(raw))


def without_date(raw: bytes) -> bytes:
    return raw[:4] + raw[12:]


@pytest.mark.parametrize("storage", STORAGES)
def test_the_same_records_make_the_same_files(original: Path, tmp_path: Path, storage: str) -> None:
    pick = random.Random(storage)
    directory = Directory.open(RealDisk(), str(tmp_path), key=KEY, partitions=6, settings=SETTINGS)
    numbers = [int(path.name) for path in (original / storage).iterdir() if path.is_dir()]
    assert len(numbers) >= 4
    for number in numbers:
        partition = directory.create_partition(number)
        partition.open_session(1)
        partition.set_low_mark(1, -1)
        log = log_of(original / storage / str(number))
        at = 0
        while at < len(log):  # in groups of any size: where a segment ends depends on the records alone
            group: list[Run] = []
            for _ in range(pick.randrange(1, 4)):
                stop = min(len(log), at + pick.randrange(1, 60))
                group += [log.part(at, stop)] if stop > at else []
                at = stop
            partition.append(1, group, -1)
    directory.close()
    for number in numbers:
        theirs, ours = original / storage / str(number), tmp_path / str(number)
        names = sorted(path.name for path in theirs.iterdir())
        assert sorted(path.name for path in ours.iterdir() if path.name != "promise") == names
        for name in names:
            assert without_date((ours / name).read_bytes()) == without_date((theirs / name).read_bytes()), (
                f"{number}/{name}"
            )


@pytest.mark.parametrize("storage", STORAGES)
def test_it_goes_on_where_the_original_stopped(original: Path, tmp_path: Path, storage: str) -> None:
    home = tmp_path / "waltz"
    shutil.copytree(original / storage, home)
    directory = Directory.open(RealDisk(), str(home), key=KEY, partitions=6, settings=SETTINGS)
    before: dict[int, int] = {}
    for partition in directory.partitions():
        if not partition.status().is_available:
            assert (storage, partition.number) == ("storage1", 5)  # the original had taken it offline
            continue
        before[partition.number] = partition.last_id
        status = partition.open_session(3)
        assert status.is_sound
        partition.set_low_mark(3, partition.last_id)
        more = encode_payloads(partition.last_id + 1, [bytes([i]) * 700 for i in range(100)], partition=partition.number)
        partition.append(3, [more], partition.last_id)
    directory.close()
    for number, last_id in before.items():
        log = log_of(home / str(number))
        assert len(log) == last_id + 1 + 100
        theirs = log_of(original / storage / str(number))
        assert log.part(0, len(theirs)).data == theirs.data
        for path in (home / str(number)).glob("*.seg"):
            header = FileHeader.decode(path.read_bytes()[:HEADER_BYTES], path.name)
            assert (header.key, header.partition, header.first_id) == (KEY, number, int(path.stem))
    report = verify(RealDisk(), [Target(storage=str(home))], Options())
    assert [finding for finding in report.findings if isinstance(finding, Finding)] == []
