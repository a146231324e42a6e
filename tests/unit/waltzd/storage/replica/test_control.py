"""The small files that hold what a storage promised: every byte flipped, every length, every crash in between.

The rule for all of them: what is read is a value that was once written, or the file or partition is refused by name. The
other partitions go on when the damage is in the record of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.simulation.sample import (
    KEY,
    PARTITIONS,
    ROOT,
    begin,
    blank_disk,
    expected,
    goes_on,
    hard_state_path,
    open_directory,
    outcome,
    segment_path,
    served,
)
from waltzd.disk.simulated import Loss, SimDisk
from waltzd.errors import ForeignCluster, NoSuchPartition, WaltzError
from waltzd.errors.operations import (
    BadConfig,
    ControlDamaged,
    DirectoryHeld,
    MarkWentDown,
    PartitionDamaged,
    StaleSession,
    WrongStorage,
)
from waltzd.format.layout import (
    CONTROL_INFO_BYTES,
    CONTROL_NAME,
    FLAG_ASSIGNED,
    HARD_STATE_BYTES,
    HARD_STATE_SLOT_BYTES,
    HARD_STATE_SLOT_SPACING,
    HEADER_BYTES,
    IDENTITY_NAME,
    ControlStruct,
    control_bytes,
    decode_control_info,
    initial_structs,
)
from waltzd.storage.replica.control import ControlFile
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.replica_context import PartitionSettings

CONTROL = f"{ROOT}/{CONTROL_NAME}"
IDENTITY = f"{ROOT}/{IDENTITY_NAME}"
PATTERNS = (0x01, 0x80, 0xFF)


def lived_in() -> SimDisk:
    """Partitions 0 and 1 through three sessions, 2 never assigned."""
    disk = blank_disk()
    directory = open_directory(disk)
    for number in (0, 1):
        partition = begin(directory, number, records=6)
        partition.open_session(4)
        partition.set_low_mark(4, 5)
        partition.open_session(7)
    directory.close()
    return disk


def shortened(disk: SimDisk, path: str, size: int) -> SimDisk:
    copy = disk.clone(size)
    file = copy.open(path, write=True)
    file.truncate(size)
    file.flush()
    return copy


def flips(disk: SimDisk, path: str, offsets: range | list[int]) -> Iterator[tuple[int, SimDisk]]:
    content = bytes(disk.content(path))
    for offset in offsets:
        for pattern in PATTERNS:
            copy = disk.clone(offset)
            copy.corrupt(path, offset, bytes([content[offset] ^ pattern]))
            yield offset, copy


# -- the control file


@pytest.mark.slow
def test_every_byte_of_the_control_file_is_flipped() -> None:
    disk = lived_in()
    raw = bytes(disk.content(CONTROL))
    written = {number: decode_control_info(raw, number, CONTROL) for number in range(PARTITIONS)}
    refusals = 0
    for offset, copy in flips(disk, CONTROL, range(len(raw))):
        hit = (offset - HEADER_BYTES) // CONTROL_INFO_BYTES if offset >= HEADER_BYTES else None
        directory = outcome(open_directory, copy)
        if isinstance(directory, WaltzError):
            assert hit is None, f"byte {offset} in the record of partition {hit} stopped the whole storage"
            assert CONTROL in directory.message
            refusals += 1
            continue
        assert hit is not None, f"byte {offset} of the header was flipped, and nobody noticed"
        for number, info in written.items():
            found = outcome(directory.control.info, number)
            if isinstance(found, WaltzError):
                assert number == hit
                assert f"partition {number}" in found.message
                with pytest.raises(ControlDamaged):
                    directory.partition(number)
                refusals += 1
                continue
            assert found in (info.structs if number == hit else (info.current,))
            if number != hit and number < 2:
                assert directory.partition(number).promised_session == 7
                assert served(directory.partition(number), expected(number, 6)) == set(range(6))
    assert refusals > 100


def test_both_structs_of_one_partition_are_damaged_and_the_others_go_on() -> None:
    disk = lived_in()
    start = HEADER_BYTES + CONTROL_INFO_BYTES * 0
    disk.corrupt(CONTROL, start + 10, b"\x5a")
    disk.corrupt(CONTROL, start + 50, b"\x5a")
    directory = open_directory(disk)
    with pytest.raises(ControlDamaged, match="both structs of partition 0"):
        directory.partition(0)
    with pytest.raises(ControlDamaged):
        directory.create_partition(0)
    with pytest.raises(ControlDamaged):
        directory.remove_partition(0, delete_files=True)
    goes_on(directory.partition(1), 1)
    assert [(number, error is None) for number, error in directory.errors().items()] == [(0, False), (1, True)]


@pytest.mark.parametrize("name", [CONTROL_NAME, IDENTITY_NAME])
def test_a_file_of_any_other_length_is_refused_and_left_as_it_is(name: str) -> None:
    disk = lived_in()
    path = f"{ROOT}/{name}"
    whole = disk.size(path)
    for size in [*range(whole), whole + 1, whole + 76]:
        copy = shortened(disk, path, size)
        with pytest.raises(ControlDamaged) as caught:
            open_directory(copy)
        assert path in caught.value.message
        assert copy.size(path) == size


def test_a_missing_control_file_is_never_made_anew_beside_data() -> None:
    disk = lived_in()
    disk.remove(CONTROL)
    for _ in range(2):
        with pytest.raises(ControlDamaged, match="is missing"):
            open_directory(disk)
    disk.remove(IDENTITY)
    with pytest.raises(ControlDamaged, match="is missing"):
        open_directory(disk)
    assert not disk.exists(CONTROL)


def test_the_control_file_of_another_storage_is_noticed() -> None:
    disk, other = lived_in(), blank_disk()
    other.now_ms()
    open_directory(other).close()
    for name in (CONTROL, IDENTITY):
        copy = disk.clone(1)
        file = copy.open(name, write=True)
        file.write(0, bytes(other.content(name)))
        file.flush()
        with pytest.raises(ControlDamaged, match="disagree about created_ms"):
            open_directory(copy)


def test_a_directory_belongs_to_one_cluster_and_one_process() -> None:
    disk = lived_in()
    settings = PartitionSettings()
    with pytest.raises(ForeignCluster):
        Directory.open(disk, ROOT, key=type(KEY)(int=1), partitions=PARTITIONS, settings=settings)
    with pytest.raises(BadConfig):
        Directory.open(disk, ROOT, key=KEY, partitions=PARTITIONS + 1, settings=settings)
    held = open_directory(disk)
    with pytest.raises(DirectoryHeld):
        open_directory(disk)
    goes_on(held.partition(0), 0)


def named(disk: SimDisk, name: str = "", *, is_renamed: bool = False) -> Directory:
    settings = PartitionSettings()
    return Directory.open(disk, ROOT, key=KEY, partitions=PARTITIONS, settings=settings, name=name, is_renamed=is_renamed)


def test_a_directory_knows_its_storage_and_is_refused_as_anothers() -> None:
    disk = lived_in()
    with closing(named(disk)) as nameless:
        assert nameless.name == ""
        nameless.take_name("s1")
        nameless.take_name("s1")
        with pytest.raises(WrongStorage, match="the directory of the storage s1, not of s2"):
            nameless.take_name("s2")
    before = {name: bytes(disk.content(f"{ROOT}/{name}")) for name in (CONTROL_NAME, IDENTITY_NAME)}
    with pytest.raises(WrongStorage, match="the directory of the storage s1, not of s2"):
        named(disk, "s2")
    assert before == {name: bytes(disk.content(f"{ROOT}/{name}")) for name in before}, "nothing was touched"
    for name in ("s1", ""):
        with closing(named(disk, name)) as again:
            assert again.name == "s1"
    with closing(named(disk, "s2", is_renamed=True)) as renamed:
        goes_on(renamed.partition(0), 0)
    with closing(named(disk, "s2")) as again:
        assert again.name == "s2"
    with pytest.raises(WrongStorage):
        named(disk, "s1")


def test_an_empty_directory_takes_the_name_of_its_storage() -> None:
    disk = blank_disk()
    named(disk, "s1").close()
    disk.power_cut()
    with pytest.raises(WrongStorage):
        named(disk, "s2")


def test_marks_and_sessions_of_the_control_file_only_rise() -> None:
    disk = lived_in()
    disk.kill()
    control = ControlFile.open(disk, ROOT)
    before = control.info(0)
    for change in ({"session": 3}, {"low_mark": 4}, {"local_low_mark": 4}):
        values = {"session": 4, "low_mark": 5, "local_low_mark": 5, **change}
        with pytest.raises(MarkWentDown):
            control.start_session(0, **values)
    assert control.info(0) == before
    for number in (-1, PARTITIONS, 1 << 40):
        with pytest.raises(NoSuchPartition, match="0 to 2"):
            control.info(number)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["start_session", "set_flags", "reset"])
@pytest.mark.parametrize("loss", [Loss.ORDERED, Loss.SCATTERED, None])
def test_a_crash_in_a_change_leaves_the_old_value_or_the_new_one(act: str, loss: Loss | None) -> None:
    calls: dict[str, Callable[[ControlFile], None]] = {
        "start_session": lambda control: control.start_session(0, session=9, low_mark=8, local_low_mark=7),
        "set_flags": lambda control: control.set_flags(0, FLAG_ASSIGNED),
        "reset": lambda control: control.reset(0),
    }
    allowed: list[ControlStruct] = list(initial_structs()) if act == "reset" else []
    seen: list[SimDisk] = []
    for seed in range(12):
        disk = lived_in()
        disk.kill()
        control = ControlFile.open(disk, ROOT)
        others = [control.info(1), control.info(2)]
        allowed.append(control.info(0))
        disk.observer = lambda kind, path, disk=disk, seed=seed: seen.append(disk.clone(seed))
        calls[act](control)
        disk.observer = None
        allowed.append(control.info(0))
        for copy in [*seen, disk.clone(seed)]:
            if loss is None:
                copy.kill()
            else:
                copy.power_cut(loss)
            found = ControlFile.open(copy, ROOT)
            assert found.info(0) in allowed
            assert [found.info(1), found.info(2)] == others
        seen.clear()


def test_a_fresh_control_file_is_whole_or_not_there() -> None:
    seen: list[SimDisk] = []
    disk = blank_disk()
    disk.observer = lambda kind, path: seen.append(disk.clone(len(seen)))
    open_directory(disk).close()
    assert len(seen) > 5
    for copy in seen:
        for loss in (None, Loss.ORDERED, Loss.SCATTERED):
            again = copy.clone(5)
            if loss is None:
                again.kill()
            else:
                again.power_cut(loss)
            directory = open_directory(again)
            assert again.size(CONTROL) == control_bytes(PARTITIONS)
            goes_on(directory.create_partition(1), 1)


# -- the identity file


def test_every_byte_of_the_identity_file_is_flipped() -> None:
    disk = lived_in()
    for _, copy in flips(disk, IDENTITY, range(disk.size(IDENTITY))):
        with pytest.raises(WaltzError) as caught:
            open_directory(copy)
        assert IDENTITY in caught.value.message


def test_without_an_identity_file_the_promises_still_count() -> None:
    disk = lived_in()
    disk.remove(IDENTITY)
    partition = open_directory(disk).partition(0)
    with pytest.raises(StaleSession):
        partition.open_session(6)
    assert disk.exists(IDENTITY)


# -- the hard-state file


@pytest.mark.slow
def test_every_byte_of_the_promise_is_flipped_and_no_session_comes_back() -> None:
    """One slot or the other is hit: both say which session was promised."""
    disk = lived_in()
    slots = [
        *range(HARD_STATE_SLOT_BYTES),
        *range(HARD_STATE_SLOT_SPACING, HARD_STATE_SLOT_SPACING + HARD_STATE_SLOT_BYTES),
    ]
    for _, copy in flips(disk, hard_state_path(0), [*slots, HARD_STATE_SLOT_BYTES + 5, HARD_STATE_BYTES - 1]):
        directory = open_directory(copy)
        partition = directory.partition(0)
        assert partition.promised_session == 7
        with pytest.raises(StaleSession):
            partition.check_session(4)
        assert partition.open_session(8).is_sound
        assert served(partition, expected(0, 6)) == set(range(6))
        assert directory.partition(1).promised_session == 7


@pytest.mark.slow
def test_a_promise_of_any_length_is_kept_or_refused() -> None:
    disk = lived_in()
    edges = [
        *range(HARD_STATE_SLOT_BYTES + 2),
        *range(HARD_STATE_SLOT_SPACING - 1, HARD_STATE_SLOT_SPACING + HARD_STATE_SLOT_BYTES + 2),
    ]
    for size in [*edges, HARD_STATE_BYTES - 1]:
        directory = open_directory(shortened(disk, hard_state_path(0), size))
        partition = outcome(directory.partition, 0)
        if isinstance(partition, WaltzError):
            assert size < HARD_STATE_SLOT_BYTES
            assert hard_state_path(0) in partition.message
        else:
            assert partition.promised_session == 7
        goes_on(directory.partition(1), 1)


def test_a_lost_promise_is_not_made_up() -> None:
    disk = lived_in()
    for is_there in (True, False):
        if is_there:
            disk.corrupt(hard_state_path(0), 0, bytes(HARD_STATE_BYTES))
        else:
            disk.remove(hard_state_path(0))
        disk.kill()
        directory = open_directory(disk)
        with pytest.raises(PartitionDamaged, match="partition 0"):
            directory.partition(0)
        goes_on(directory.partition(1), 1)
        directory.close()
    assert disk.exists(segment_path(0, 0))
