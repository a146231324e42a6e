"""Files full of nonsense: whatever stands in them, opening and reading ends with values, findings or a typed error.

Never with another exception, never with a wrong byte, never with memory that only a length field asked for. The seeds are
fixed; WALTZ_LONG=1 tries many more.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Iterator

import pytest

from tests.simulation.sample import (
    ROOT,
    expected,
    first_ids,
    is_vouched_for,
    open_directory,
    outcome,
    run_for,
    sample,
    served,
)
from waltzd.disk_sim import SimDisk
from waltzd.errors import WaltzError
from waltzd.layout import CONTROL_NAME, HEADER_BYTES, IDENTITY_NAME, PROMISE_NAME, index_name, segment_name
from waltzd.storage.partition import Partition

RECORDS = 12
SENT = expected(0, RECORDS)
TRIES = 2500 if os.environ.get("WALTZ_LONG") else 60
MEMORY_BYTES_MAX = 32 << 20
ORIGIN = sample(RECORDS, clean=True)
KILLED = sample(RECORDS)
FIRSTS = first_ids(ORIGIN)
CLAIMS = [0, 1, 39, 40, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFD0, 1 << 24]


def nonsense(chance: random.Random, size: int) -> bytes:
    return chance.choice(
        [
            chance.randbytes(size),
            bytes(size),
            b"\xff" * size,
            bytes(chance.choice([0, 1, 4, 255]) for _ in range(size)),
            bytes(run_for(0, chance.randrange(RECORDS), 3).data)[:size].ljust(size, b"\0"),
        ]
    )


def mutated(chance: random.Random, content: bytes) -> bytes:
    """Some bytes changed, cut, doubled, moved or claimed to be longer; or something else altogether."""
    raw = bytearray(content)
    if chance.random() < 0.15:
        return nonsense(chance, chance.randrange(2 * len(raw) + 1))
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(raw) + 1)
        size = chance.choice([1, 1, 4, 8, 36, 100])
        match chance.randrange(6):
            case 0 if at < len(raw):
                raw[at] ^= 1 << chance.randrange(8)
            case 1:
                raw[at : at + 4] = chance.choice(CLAIMS).to_bytes(4, "big")
            case 2:
                raw[at : at + size] = nonsense(chance, size)
            case 3:
                del raw[at : at + size]
            case 4:
                raw[at:at] = raw[at : at + size]
            case _:
                del raw[at:]
    return bytes(raw)


def replaced(disk: SimDisk, path: str, content: bytes) -> None:
    file = disk.create(path)
    file.write(0, content)
    file.flush()
    file.close()
    disk.kill()


@pytest.fixture(autouse=True)
def memory_stays_small() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY_BYTES_MAX, f"{peak} bytes were taken to read files of a few hundred"


def look(disk: SimDisk) -> None:
    """Open, read and ask for the vote; only typed errors may come out, and only right bytes."""
    directory = outcome(open_directory, disk)
    if isinstance(directory, WaltzError):
        return
    neighbour, partition = outcome(directory.partition, 1), outcome(directory.partition, 0)
    if isinstance(neighbour, Partition):
        assert served(neighbour, expected(1, RECORDS)) == set(range(RECORDS))
    if isinstance(partition, Partition):
        is_sound = outcome(is_vouched_for, partition)
        found = served(partition, SENT)
        if is_sound is True and partition.status().is_sound:
            assert found >= set(range(min(RECORDS, partition.last_id + 1)))


@pytest.mark.parametrize("first_id", FIRSTS)
def test_segments_full_of_nonsense(first_id: int) -> None:
    """Nonsense may copy whole sound records to where they were: what is served is right all the same."""
    path = f"{ROOT}/0/{segment_name(first_id)}"
    for seed in range(TRIES):
        chance = random.Random(f"{first_id} {seed}")
        disk = (ORIGIN if seed % 2 else KILLED).clone(seed)
        replaced(disk, path, mutated(chance, bytes(disk.content(path))))
        look(disk)


@pytest.mark.parametrize("first_id", FIRSTS)
def test_indexes_full_of_nonsense_change_no_answer(first_id: int) -> None:
    path = f"{ROOT}/0/{index_name(first_id)}"
    for seed in range(TRIES):
        chance = random.Random(f"{first_id} {seed}")
        disk = (ORIGIN if seed % 2 else KILLED).clone(seed)
        replaced(disk, path, mutated(chance, bytes(disk.content(path))))
        partition = open_directory(disk).partition(0)
        assert served(partition, SENT) == set(range(RECORDS))
        assert is_vouched_for(partition)
        assert partition.last_id == RECORDS - 1


@pytest.mark.parametrize("name", [CONTROL_NAME, IDENTITY_NAME, f"0/{PROMISE_NAME}"])
def test_small_files_full_of_nonsense(name: str) -> None:
    path = f"{ROOT}/{name}"
    for seed in range(TRIES * 3):
        chance = random.Random(f"{name} {seed}")
        disk = (ORIGIN if seed % 2 else KILLED).clone(seed)
        replaced(disk, path, mutated(chance, bytes(disk.content(path))))
        look(disk)


def test_directories_full_of_strange_names() -> None:
    """Files where directories should be, names that are almost right, leftovers of every kind."""
    names = [
        "0", "1.seg", "-1.seg", "0" * 19 + ".seg.new", "0" * 19 + ".seg.new.new", "0" * 20 + ".seg", "promise.new",
        "\u0660" * 19 + ".seg", "9" * 19 + ".seg", "9" * 19 + ".idx", "0" * 18 + "5.seg", "0" * 18 + "5.idx", ".seg", " ",
    ]  # fmt: skip
    for seed in range(TRIES):
        chance = random.Random(seed)
        disk = ORIGIN.clone(seed)
        for name in chance.sample(names, 4):
            path = f"{ROOT}/{chance.choice(['', '0/'])}{name}"
            if not disk.exists(path):
                file = disk.create(path)
                file.write(0, nonsense(chance, chance.choice([0, 5, HEADER_BYTES, 300])))
        disk.kill()
        look(disk)


@pytest.mark.parametrize("seed", range(20))
def test_everything_at_once(seed: int) -> None:
    chance = random.Random(seed)
    for turn in range(TRIES // 10):
        disk = KILLED.clone(turn)
        names = [f"0/{entry.name}" for entry in disk.list(f"{ROOT}/0")]
        for name in chance.sample(names, 3):
            path = f"{ROOT}/{name}"
            replaced(disk, path, mutated(chance, bytes(disk.content(path))))
        look(disk)
