"""A small storage directory on a simulated disk: two sealed segments and an open one, control, identity and promise
files; and the same after its change to format 1."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from tests.batches import APPEND, READ, WRITE, LockRows, batches_of, put_batches
from waltzd.disk.seam import join
from waltzd.disk.simulated import SimDisk
from waltzd.format.batch import Batch
from waltzd.format.layout import (
    CONTROL_NAME,
    HARD_STATE_BYTES,
    HARD_STATE_NAME,
    HARD_STATE_SLOT_SPACING,
    IDENTITY_NAME,
    ControlHeader,
    ControlStruct,
    FileHeader,
    HardState,
    Identity,
    index_name,
    initial_structs,
    segment_name,
)
from waltzd.format.record import encode_payloads

KEY = UUID("00112233-4455-6677-8899-aabbccddeeff")
PAYLOADS = [[b"", b"hello", b"a longer payload"], [b"x", b"yy", b"zzz"], [b"last", b"of", b"all"]]
STARTS = [0, 3, 6]
LAST_ID = 8
SEG0, SEG3, SEG6 = (join("s/0", segment_name(first_id)) for first_id in STARTS)
IDX0, IDX3, IDX6 = (join("s/0", index_name(first_id)) for first_id in STARTS)
HARD_STATE = HardState(
    key=KEY, partition=0, incarnation=UUID(int=1), session=4, committed=7, durable=LAST_ID, newest=6, segments=3,
    is_clean=True, sequence=3,
)  # fmt: skip


def put(disk: SimDisk, path: str, content: bytes) -> None:
    file = disk.create(path)
    file.write(0, content)
    file.flush()


def put_segment(disk: SimDisk, first_id: int, payloads: list[bytes], *, directory: str = "s/0", partition: int = 0) -> None:
    header = FileHeader(created_ms=1234567890123, key=KEY, partition=partition, first_id=first_id)
    run_ = encode_payloads(first_id, payloads, partition=partition, client=9)
    offsets = (run_.bounds[:-1] + 128).astype(">i8").tobytes()
    put(disk, join(directory, segment_name(first_id)), header.encode() + bytes(run_.data))
    put(disk, join(directory, index_name(first_id)), replace(header, created_ms=5).encode() + offsets)


def put_hard_state(disk: SimDisk, hard_state: HardState) -> None:
    """In the first slot, with nothing in the second."""
    put(disk, join("s/0", HARD_STATE_NAME), replace(hard_state, sequence=0).encode().ljust(HARD_STATE_BYTES, b"\0"))


def storage(*, with_ours: bool = True, low_mark: int = 5, local_low_mark: int = 5) -> SimDisk:
    disk = SimDisk(seed=1)
    disk.make_directory("s")
    disk.make_directory("s/0")
    control = ControlHeader(created_ms=99, key=KEY, partitions=2)
    one = ControlStruct(session=4, low_mark=low_mark, local_low_mark=local_low_mark, flags=5, sequence=2)
    blank = initial_structs()
    body = b"\0\0\0\0" + replace(one, session=3, sequence=1).encode() + one.encode()
    body += b"\0\0\0\1" + blank[0].encode() + blank[1].encode()
    put(disk, join("s", CONTROL_NAME), control.encode() + body)
    if with_ours:
        put(disk, join("s", IDENTITY_NAME), Identity(control=control, directory=UUID(int=2)).encode())
        slots = replace(HARD_STATE, sequence=2).encode().ljust(HARD_STATE_SLOT_SPACING, b"\0") + HARD_STATE.encode()
        put(disk, join("s/0", HARD_STATE_NAME), slots.ljust(HARD_STATE_BYTES, b"\0"))
    for first_id, payloads in zip(STARTS, PAYLOADS, strict=True):
        put_segment(disk, first_id, payloads)
    for path in ("", "s", "s/0"):
        disk.flush_directory(path)
    return disk


MIXED_PAYLOADS = [[b"x", b"yy"], [b"zzz"], [b"last"], [b"of", b"all"], [b"open", b""], [b"end"]]
MIXED_LOCKS: list[LockRows | None] = [[[(7, WRITE)], []], None, [[(7, READ), (8, APPEND)]], None, None, [[(9, WRITE)]]]
MIXED = batches_of(
    MIXED_PAYLOADS, first_id=3, locks=MIXED_LOCKS, follows=[None, None, None, [False, True], None, None], cuts=[1, 3]
)
"""Segments 3 and 6 have footers, segment 9 is open."""
MIXED_STARTS = [0, 3, 6, 9]
MIXED_LAST_ID = 11
SEG9, IDX9 = join("s/0", segment_name(9)), join("s/0", index_name(9))
MIXED_HARD_STATE = replace(HARD_STATE, committed=10, durable=MIXED_LAST_ID, newest=9, segments=4)


def mixed() -> SimDisk:
    """One segment of format 0, and three of format 1 behind it."""
    disk = storage()
    for path in (SEG3, SEG6, IDX3, IDX6):
        disk.remove(path)
    put_batches(disk, "s/0", MIXED, key=KEY)
    put_hard_state(disk, MIXED_HARD_STATE)
    return disk


def put_mixed(disk: SimDisk, batches: list[Batch], *, from_: int = 3) -> None:
    """Other batches in the place of those from this segment on."""
    for first_id in MIXED_STARTS:
        if first_id >= from_:
            disk.remove(join("s/0", segment_name(first_id)))
            disk.remove(join("s/0", index_name(first_id)))
    put_batches(disk, "s/0", batches, key=KEY)
