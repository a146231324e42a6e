"""The layout against bytes written down by hand, and against every single damaged bit."""

from __future__ import annotations

import contextlib
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.errors import WaltzError
from waltzd.errors.operations import ControlDamaged, HeaderDamaged, UnknownVersion
from waltzd.format.layout import (
    CONTROL_INFO_BYTES,
    CONTROL_STRUCT_BYTES,
    HARD_STATE_BYTES,
    HARD_STATE_SLOT_BYTES,
    HARD_STATE_SLOT_SPACING,
    HEADER_BYTES,
    IDENTITY_BYTES,
    PARTITIONS_MAX,
    ControlHeader,
    ControlStruct,
    FileHeader,
    HardState,
    Identity,
    aside_build_name,
    aside_name,
    aside_partition,
    control_bytes,
    control_struct_offset,
    decode_control_info,
    first_id_of,
    index_entries,
    index_name,
    index_offset,
    initial_structs,
    is_aside_build,
    read_hard_state_file,
    segment_name,
)
from waltzd.format.record import encode_run, walk
from waltzd.protocol.timelines import NEVER_FORKED

GOLDEN = Path(__file__).parents[3] / "golden" / "format"
KEY = UUID("00112233-4455-6677-8899-aabbccddeeff")
DIRECTORY = UUID("0f1e2d3c-4b5a-4978-8695-a4b3c2d1e0f0")
CREATED_MS = 0x1A1FDABE66F
CONTROL = ControlHeader(created_ms=CREATED_MS, key=KEY, partitions=2)
IDENTITY = Identity(control=CONTROL, directory=DIRECTORY, name="s1")
HARD_STATE = HardState(
    key=KEY,
    partition=1,
    incarnation=DIRECTORY,
    session=8,
    committed=1,
    durable=2,
    newest=0,
    segments=1,
    is_clean=True,
    sequence=5,
    inode=2146449,
    inode_generation=0x3BA321AC,
    boot=UUID(int=0x8899AABBCCDDEEFF0011223344556677),
    settled=1,
)
TRIMMED = replace(HARD_STATE, floor=1_234)
TIMELINES = (
    NEVER_FORKED
    .forked(identity=UUID(int=2), fork=40, session=9, cause="", began="", who="")
    .forked(identity=UUID(int=3), fork=30, session=12, cause="", began="", who="")
    .encode()
)  # fmt: skip
i64 = st.integers(-(2**63), 2**63 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)


def golden(name: str) -> bytes:
    """The bytes of a file in tests/golden/format: offset, hexadecimal groups (`00*88` repeats), comment."""
    out = b""
    for line in (GOLDEN / name).read_text().splitlines():
        offset, *groups = line.partition("#")[0].split() or [""]
        if not offset:
            continue
        assert int(offset, 16) == len(out), f"{name}: {offset} should be {len(out):04x}"
        for group in groups:
            digits, _, times = group.partition("*")
            out += bytes.fromhex(digits) * int(times or 1)
    return out


# -- golden bytes ------------------------------------------------------------------------------------------------------


def test_records() -> None:
    payloads = [b"hello", b"", b"waltz!"]
    run = encode_run(
        0,
        requests=np.array([(3, 2, 1, 1), (3, 2, 1, 2), (-1, 2, 1, -5)], np.int32),
        headers=np.array([0x11223344, 0, -1], np.int32),
        lengths=np.array([5, 0, 6], np.int64),
        data_crcs=np.array([0x3610A686, 0, 0xB806CB32], np.uint32),
        payloads=b"".join(payloads),
    )
    assert bytes(run.data) == golden("record.hex")
    assert [run.record(number).payload for number in range(3)] == payloads


def test_index_entries_of_these_records() -> None:
    starts = walk(golden("record.hex"))[:-1] + HEADER_BYTES
    assert starts.astype(">i8").tobytes() == golden("index.hex")


def test_segment_header() -> None:
    header = FileHeader(created_ms=CREATED_MS, key=KEY, partition=1, first_id=0)
    assert header.encode() == golden("header.hex")
    assert FileHeader.decode(golden("header.hex"), "it") == header


def test_control_file() -> None:
    blank = initial_structs()
    current = ControlStruct(session=8, low_mark=2, local_low_mark=2, flags=5, sequence=3)
    before = ControlStruct(session=7, low_mark=-1, local_low_mark=-1, flags=5, sequence=2)
    raw = CONTROL.encode()
    for partition, structs in enumerate([blank, (current, before)]):
        raw += struct.pack(">i", partition) + structs[0].encode() + structs[1].encode()
    assert raw == golden("control.hex")
    assert len(raw) == control_bytes(2)
    assert ControlHeader.decode(raw, "it") == CONTROL
    unused, used = decode_control_info(raw, 0, "it"), decode_control_info(raw, 1, "it")
    assert (unused.structs, unused.current_slot) == (blank, 1)
    assert (unused.current.is_available, unused.current.is_assigned) == (True, False)
    assert (used.structs, used.current_slot) == ((current, before), 0)
    assert (used.current.is_available, used.current.is_assigned) == (True, True)
    assert raw[control_struct_offset(1, 1) :] == before.encode()


def test_identity_file() -> None:
    assert IDENTITY.encode() == golden("identity.hex")
    assert len(IDENTITY.encode()) == IDENTITY_BYTES
    assert Identity.decode(golden("identity.hex"), "it") == IDENTITY


def test_promise_slot() -> None:
    assert HARD_STATE.encode() == golden("promise.hex")
    assert len(HARD_STATE.encode()) == HARD_STATE_SLOT_BYTES
    assert HardState.decode(golden("promise.hex"), "it") == HARD_STATE
    assert HARD_STATE.slot_offset == HARD_STATE_SLOT_SPACING


def test_the_promise_of_a_trimmed_replica_has_its_floor_behind_all_else() -> None:
    """The slot is another version then: one that does not know it would take what is missing for damage."""
    assert TRIMMED.encode() == golden("promise-trimmed.hex")
    assert len(TRIMMED.encode()) == HARD_STATE_SLOT_BYTES + 8
    assert HardState.decode(golden("promise-trimmed.hex"), "it") == TRIMMED
    assert HardState.decode(HARD_STATE.encode() + TRIMMED.encode()[-12:], "it") == HARD_STATE


def test_the_promise_of_another_timeline_names_all_of_them() -> None:
    for floor in (0, 4711):
        forked = replace(TRIMMED, floor=floor, timelines=TIMELINES)
        assert HardState.decode(forked.encode(), "it") == forked
        assert forked.encode()[8:12] == b"\0\0\0\2"
        for at in range(len(forked.encode())):
            raw = bytearray(forked.encode())
            raw[at] ^= 0x10
            with contextlib.suppress(UnknownVersion):
                assert HardState.decode(bytes(raw).ljust(HARD_STATE_SLOT_SPACING, b"\0"), "it") is None


# -- names and places --------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**63 - 1))
def test_names_say_the_first_id(first_id: int) -> None:
    assert first_id_of(segment_name(first_id)) == first_id_of(index_name(first_id)) == first_id
    assert len(segment_name(first_id)) == len("0000000000000000000.seg")


@pytest.mark.parametrize(
    "name",
    ["", "promise", "17.seg", "0000000000000000000.SEG", "0000000000000000000", "0000000000000000000.idx.new",
     "000000000000000000².seg", "-000000000000000001.seg", "00000000000000000000.seg", "+000000000000000001.idx"],
)  # fmt: skip
def test_other_names_are_no_segments(name: str) -> None:
    assert first_id_of(name) is None


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_a_torn_index_entry_does_not_count(entries: int, rest: int) -> None:
    assert index_entries(index_offset(entries) + rest) == entries


def test_a_file_inside_its_header_has_no_entries() -> None:
    assert index_entries(0) == index_entries(127) == 0


# -- wrong bytes -------------------------------------------------------------------------------------------------------


@given(i64, i32, i64)
def test_headers_decode_to_what_was_encoded(created_ms: int, partition: int, first_id: int) -> None:
    header = FileHeader(created_ms=created_ms, key=KEY, partition=partition, first_id=first_id)
    assert FileHeader.decode(header.encode(), "it") == header


@given(i64, i64, i64, i32, i32)
def test_control_structs_decode_to_what_was_encoded(session: int, low: int, local: int, flags: int, sequence: int) -> None:
    made = ControlStruct(session=session, low_mark=low, local_low_mark=local, flags=flags, sequence=sequence)
    assert ControlStruct.decode(made.encode()) == made


def test_a_short_header_is_refused() -> None:
    for size in range(HEADER_BYTES):
        with pytest.raises(HeaderDamaged, match=f"{size} of 128"):
            FileHeader.decode(golden("header.hex")[:size], "it")
        with pytest.raises(ControlDamaged, match=f"{size} of 128"):
            ControlHeader.decode(golden("control.hex")[:size], "it")


@pytest.mark.parametrize("version", [3, 4, -1, 2**31 - 1])
def test_every_kind_of_file_from_the_future_is_refused(version: int) -> None:
    packed = struct.pack(">i", version)
    with pytest.raises(UnknownVersion, match=f"version {version};"):
        FileHeader.decode(packed + golden("header.hex")[4:], "it")
    with pytest.raises(UnknownVersion, match=f"version {version};"):
        ControlHeader.decode(packed + golden("control.hex")[4:], "it")
    with pytest.raises(UnknownVersion, match=f"version {version};"):
        Identity.decode(checksummed(golden("identity.hex"), 8, packed), "it")
    with pytest.raises(UnknownVersion, match=f"version {version};"):
        HardState.decode(checksummed(golden("promise.hex"), 8, packed), "it")


def checksummed(raw: bytes, at: int, value: bytes) -> bytes:
    """`raw` with other bytes at `at`, and a right checksum at its end."""
    body = raw[:at] + value + raw[at + len(value) : -4]
    return body + struct.pack(">I", zlib.crc32(body))


@pytest.mark.parametrize("partitions", [0, -1, PARTITIONS_MAX + 1, 2**31 - 1])
def test_a_control_file_that_claims_too_many_partitions_is_refused(partitions: int) -> None:
    with pytest.raises(ControlDamaged, match=f"claims {partitions} partitions"):
        ControlHeader.decode(replace(CONTROL, partitions=partitions).encode(), "it")


def flips(raw: bytes) -> list[tuple[int, bytes]]:
    return [(at, raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]) for at in range(len(raw)) for bit in range(8)]


def test_every_flipped_bit_of_a_control_struct_makes_it_void() -> None:
    raw = ControlStruct(session=8, low_mark=2, local_low_mark=2, flags=5, sequence=3).encode()
    assert [ControlStruct.decode(wrong) for _, wrong in flips(raw)] == [None] * 8 * CONTROL_STRUCT_BYTES
    assert all(ControlStruct.decode(raw[:size]) is None for size in range(4, len(raw)))


def test_every_flipped_bit_of_a_control_record_is_survived_or_named() -> None:
    """One struct gone: the other one counts. The partition's number wrong: refused."""
    raw = golden("control.hex")
    start = HEADER_BYTES + CONTROL_INFO_BYTES
    for at, wrong in flips(raw):
        if at < start:
            continue
        if at < start + 4:
            with pytest.raises(ControlDamaged, match="states partition"):
                decode_control_info(wrong, 1, "it")
        else:
            slot = (at - start - 4) // CONTROL_STRUCT_BYTES
            info = decode_control_info(wrong, 1, "it")
            assert info.structs[slot] is None
            assert info.current_slot == 1 - slot


def test_a_control_record_without_a_believable_struct_is_refused() -> None:
    raw = bytearray(golden("control.hex"))
    raw[control_struct_offset(1, 0)] ^= 1
    raw[control_struct_offset(1, 1)] ^= 1
    with pytest.raises(ControlDamaged, match="both structs of partition 1 fail"):
        decode_control_info(bytes(raw), 1, "it")
    same = initial_structs()[0].encode()
    raw[control_struct_offset(1, 0) :] = same + same
    with pytest.raises(ControlDamaged, match="both structs of partition 1 have sequence -1"):
        decode_control_info(bytes(raw), 1, "it")
    for size in range(HEADER_BYTES + CONTROL_INFO_BYTES, control_bytes(2)):
        with pytest.raises(ControlDamaged, match="ends before the record of partition 1"):
            decode_control_info(bytes(raw)[:size], 1, "it")


def test_every_flipped_bit_of_the_control_header_is_seen_beside_the_identity() -> None:
    for _, wrong in flips(golden("control.hex")[:HEADER_BYTES]):
        try:
            assert ControlHeader.decode(wrong, "it") != IDENTITY.control
        except WaltzError as error:
            assert isinstance(error, ControlDamaged | UnknownVersion)  # noqa: PT017 - either outcome is right


def test_every_flipped_bit_and_every_prefix_of_an_identity_is_refused() -> None:
    raw = IDENTITY.encode()
    for wrong in [*(wrong for _, wrong in flips(raw)), *(raw[:size] for size in range(len(raw))), raw + b"\0"]:
        with pytest.raises(ControlDamaged):
            Identity.decode(wrong, "it")
    with pytest.raises(ControlDamaged, match="is not an identity file"):
        Identity.decode(checksummed(raw, 0, b"X"), "it")


# -- hard-state file ------------------------------------------------------------------------------------------------------


def hard_state_file(*hard_states: HardState) -> bytearray:
    raw = bytearray(HARD_STATE_BYTES)
    for hard_state in hard_states:
        raw[hard_state.slot_offset : hard_state.slot_offset + hard_state.slot_bytes] = hard_state.encode()
    return raw


def test_the_later_slot_counts() -> None:
    later = replace(HARD_STATE, sequence=6, durable=9)
    assert read_hard_state_file(bytes(hard_state_file(HARD_STATE)), "it")[0] == HARD_STATE
    assert read_hard_state_file(bytes(hard_state_file(HARD_STATE, later)), "it")[0] == later
    assert read_hard_state_file(bytes(hard_state_file(later, replace(HARD_STATE, sequence=7))), "it")[0] == replace(
        HARD_STATE, sequence=7
    )
    assert read_hard_state_file(bytes(HARD_STATE_BYTES), "it")[0] is None


def test_every_flipped_bit_of_a_slot_leaves_the_other_one() -> None:
    later = replace(HARD_STATE, sequence=6)
    raw = bytes(hard_state_file(HARD_STATE, later))
    for _, wrong in flips(replace(TRIMMED, sequence=6).encode()):
        assert HardState.decode(wrong, "it") is None
    for at, wrong in flips(later.encode()):
        assert HardState.decode(wrong, "it") is None
        if at % 7 == 0:
            whole = wrong + raw[len(wrong) :]
            assert read_hard_state_file(whole, "it")[0] == HARD_STATE


def test_a_torn_slot_leaves_the_other_one() -> None:
    """A new slot is written over the older one; any part of it may have arrived."""
    old, new = replace(HARD_STATE, sequence=4), replace(HARD_STATE, sequence=6, durable=77)
    raw = bytes(hard_state_file(HARD_STATE, old))
    for size in range(HARD_STATE_SLOT_BYTES + 1):
        torn = new.encode()[:size] + raw[size:]
        found = read_hard_state_file(torn, "it")[0]
        assert found in (HARD_STATE, new)
        assert (found == new) == (size == HARD_STATE_SLOT_BYTES)
    forked = replace(TRIMMED, timelines=TIMELINES, sequence=6)
    for longer in (replace(TRIMMED, sequence=6), forked):
        for size in range(longer.slot_bytes + 1):
            found = read_hard_state_file(longer.encode()[:size] + raw[size:], "it")[0]
            assert found == (longer if size == longer.slot_bytes else HARD_STATE)
    again = replace(forked, sequence=8, durable=78)
    for size in range(again.slot_bytes + 1):
        file = again.encode()[:size] + bytes(hard_state_file(replace(forked, sequence=7), forked))[size:]
        found = read_hard_state_file(file, "it")[0]
        assert found is not None
        assert found.timelines == TIMELINES


def test_a_short_promise_file_is_no_promise() -> None:
    raw = bytes(hard_state_file(replace(HARD_STATE, sequence=4)))
    for size in range(HARD_STATE_SLOT_BYTES):
        assert read_hard_state_file(raw[:size], "it")[0] is None


def test_something_else_with_a_right_checksum_is_no_promise() -> None:
    assert HardState.decode(checksummed(HARD_STATE.encode(), 0, b"X"), "it") is None


def test_names_in_golden_files_are_plain() -> None:
    """The golden files are read by people first: every line is offset, bytes, comment."""
    for path in GOLDEN.glob("*.hex"):
        for line in path.read_text().splitlines():
            assert re.fullmatch(r"(#.*|[0-9a-f]{4}  [0-9a-f* ]+(#.*)?)", line), f"{path.name}: {line}"


def test_only_what_was_set_aside_has_such_a_name() -> None:
    """What has it may be deleted on an operator's word."""
    assert [aside_partition(aside_name(number, {"7.set-aside-1"})) for number in (0, 7, 2147483647)] == [0, 7, 2147483647]
    for name in ("7", "7.new", "7.set-aside-", "7.set-aside-0", "07.set-aside-1", "set-aside-1",
                 ".set-aside-1", aside_build_name(7), "7.set-aside-1/../7", "7.set-aside-1\n",
                 "7xset-aside-1", "waltz-storage.ctl", ""):  # fmt: skip
        assert aside_partition(name) is None, name
    assert is_aside_build(aside_build_name(7))
    assert not is_aside_build(aside_name(7, ()))
