"""Files full of nonsense: whatever stands in them, opening and reading ends with values, findings or a typed error.

Never with another exception, never with a wrong byte, never with memory that only a length asked for. First what the daemon
reads at its start, then files that are sent to it, then the offline tools on the same files.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.mutate import each, little_memory, mutated, mutated_text, nonsense, parsed
from tests.simulation.sample import (
    KEY,
    PARTITIONS,
    ROOT,
    expected,
    first_ids,
    index_path,
    is_vouched_for,
    open_directory,
    outcome,
    run_for,
    sample,
    segment_path,
    served,
)
from waltzd.disk.real import RealDisk
from waltzd.disk.seam import Disk, join
from waltzd.disk.simulated import SimDisk
from waltzd.errors import WaltzError
from waltzd.errors.operations import ControlDamaged
from waltzd.format.finding import Code
from waltzd.format.layout import (
    CONTROL_NAME,
    HARD_STATE_NAME,
    HEADER_BYTES,
    IDENTITY_NAME,
    ControlHeader,
    ControlStruct,
    FileHeader,
    HardState,
    Identity,
    decode_control_info,
    index_name,
    read_hard_state_file,
    segment_name,
)
from waltzd.format.record import walk
from waltzd.storage.offline.dump import dump
from waltzd.storage.offline.reindex import rebuild
from waltzd.storage.offline.verify import Options, Target, verify
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import PartitionSettings

RECORDS = 12
SENT = expected(0, RECORDS)
TRIES = 20
ORIGIN = sample(RECORDS, clean=True)
KILLED = sample(RECORDS)
FIRSTS = first_ids(ORIGIN)
RUN = bytes(run_for(0, 3, 3).data)
SMALL = [CONTROL_NAME, IDENTITY_NAME, f"0/{HARD_STATE_NAME}"]


def content(name: str) -> bytes:
    return bytes(ORIGIN.content(f"{ROOT}/{name}"))


def replaced(disk: SimDisk, path: str, content: bytes) -> None:
    file = disk.create(path)
    file.write(0, content)
    file.flush()
    file.close()
    disk.kill()


def spoiled(chance: random.Random, *paths: str) -> SimDisk:
    """A storage that was stopped or killed, and then somebody wrote into these files."""
    disk = chance.choice([ORIGIN, KILLED]).clone(chance.randrange(1 << 30))
    for path in paths:
        other = segment_path(0, chance.choice(FIRSTS))
        replaced(disk, path, mutated(chance, bytes(disk.content(path)), bytes(disk.content(other)), RUN))
    return disk


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


# -- the structures by themselves --------------------------------------------------------------------------------------

_STRUCT = HEADER_BYTES + 4
STRUCTURES: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "segment header": (lambda raw: FileHeader.decode(raw, "it"), content(f"0/{segment_name(0)}")[:HEADER_BYTES]),
    "control header": (lambda raw: ControlHeader.decode(raw, "it"), content(CONTROL_NAME)[:HEADER_BYTES]),
    "control struct": (ControlStruct.decode, content(CONTROL_NAME)[_STRUCT : _STRUCT + 36]),
    "identity": (lambda raw: Identity.decode(raw, "it"), content(IDENTITY_NAME)),
    "promise slot": (lambda raw: HardState.decode(raw, "it"), content(f"0/{HARD_STATE_NAME}")[:4096]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_a_value_that_makes_the_same_bytes_or_refused(name: str) -> None:
    """Half of them with a right checksum, because what is behind it must hold, too."""
    decode, raw = STRUCTURES[name]
    assert decode(raw) is not None

    def check(chance: random.Random) -> None:
        changed = mutated(chance, raw)
        if chance.random() < 0.5 and len(changed) >= len(raw) and name not in ("segment header", "control header"):
            size = len(raw.rstrip(b"\0")) if name == "promise slot" else len(raw)
            changed = changed[: size - 4] + zlib.crc32(changed[: size - 4]).to_bytes(4, "big")
        value = parsed(WaltzError, decode, changed)
        if value is not None:
            back = value.encode()  # type: ignore[attr-defined]
            assert decode(back) == value

    each(name, TRIES * 5, check)


def test_records_of_a_control_file_and_slots_of_a_promise_file() -> None:
    def check(chance: random.Random) -> None:
        raw = mutated(chance, content(CONTROL_NAME), RUN)
        for number in range(PARTITIONS):
            info = parsed(ControlDamaged, decode_control_info, raw, number, "it")
            assert info is None or info.current in info.structs
        hard_state = read_hard_state_file(mutated(chance, content(f"0/{HARD_STATE_NAME}"), RUN), "it")[0]
        assert hard_state is None or HardState.decode(hard_state.encode(), "it") == hard_state

    each("control and hard-state files", TRIES * 3, check)


def test_a_walk_over_records_stays_inside() -> None:
    def check(chance: random.Random) -> None:
        raw = mutated(chance, RUN, content(f"0/{segment_name(0)}"))
        bounds = walk(raw)
        assert bounds[0] == 0
        assert (bounds[1:] - bounds[:-1] >= 40).all()
        assert bounds[-1] <= len(raw)

    each("walk", TRIES * 5, check)


# -- what the daemon finds at its start --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SMALL, *(f"0/{segment_name(first_id)}" for first_id in FIRSTS), "three at once"])
def test_files_full_of_nonsense(name: str) -> None:
    """Nonsense may copy whole sound records to where they were: what is served is right all the same."""
    names = [f"{ROOT}/0/{entry.name}" for entry in KILLED.list(f"{ROOT}/0")]

    def check(chance: random.Random) -> None:
        look(spoiled(chance, *(chance.sample(names, 3) if name == "three at once" else [f"{ROOT}/{name}"])))

    each(name, TRIES, check)


@pytest.mark.parametrize("first_id", FIRSTS)
def test_indexes_full_of_nonsense_change_no_answer(first_id: int) -> None:
    def check(chance: random.Random) -> None:
        partition = open_directory(spoiled(chance, index_path(0, first_id))).partition(0)
        assert served(partition, SENT) == set(range(RECORDS))
        assert is_vouched_for(partition)
        assert partition.last_id == RECORDS - 1

    each(f"index {first_id}", TRIES, check)


def test_directories_full_of_strange_names() -> None:
    """Files where directories should be, names that are almost right, leftovers of every kind."""
    names = [
        "0", "1.seg", "-1.seg", "0" * 19 + ".seg.new", "0" * 19 + ".seg.new.new", "0" * 20 + ".seg", "promise.new",
        "\u0660" * 19 + ".seg", "9" * 19 + ".seg", "9" * 19 + ".idx", "0" * 18 + "5.seg", "0" * 18 + "5.idx", ".seg", " ",
    ]  # fmt: skip

    def check(chance: random.Random) -> None:
        disk = ORIGIN.clone(0)
        for name in chance.sample(names, 4):
            changed = mutated_text(chance, name).replace("/", "")[:200] if chance.random() < 0.3 else name
            path = f"{ROOT}/{chance.choice(['', '0/'])}{changed or ' '}"
            if not disk.exists(path):
                file = disk.create(path)
                file.write(0, nonsense(chance, chance.choice([0, 5, HEADER_BYTES, 300]), RUN))
        disk.kill()
        look(disk)

    each("strange names", TRIES, check)


@pytest.mark.parametrize("entry", [0, 1, 128, 204, 205, 300, 507, 1 << 40, -1])
def test_a_damaged_record_hides_no_sound_one_whatever_its_index_entry_says(entry: int) -> None:
    """Found by chance above: its entry was garbage, and the record in front of it could not be read any more."""
    first_id = FIRSTS[-1]
    disk = KILLED.clone(0)
    entries = bytearray(disk.content(index_path(0, first_id)))
    damaged = int.from_bytes(entries[HEADER_BYTES + 8 :][:8], "big")
    entries[HEADER_BYTES + 8 : HEADER_BYTES + 16] = entry.to_bytes(8, "big", signed=True)
    records = bytearray(disk.content(segment_path(0, first_id)))
    records[damaged + 50] ^= 1
    replaced(disk, segment_path(0, first_id), bytes(records))
    replaced(disk, index_path(0, first_id), bytes(entries))
    partition = open_directory(disk).partition(0)
    assert served(partition, SENT) == set(range(RECORDS)) - {first_id + 1}


@pytest.mark.parametrize("name", [*SMALL, f"0/{index_name(0)}"])
def test_a_file_that_is_too_long_is_not_read_into_memory(name: str, tmp_path: Path) -> None:
    """Sparse bytes behind what was there, far more than memory is allowed."""
    for place in ("", "0", "1"):
        (tmp_path / ROOT / place).mkdir(exist_ok=True)
        for entry in ORIGIN.list(join(ROOT, place)):
            if not entry.is_directory:
                (tmp_path / ROOT / place / entry.name).write_bytes(ORIGIN.content(join(join(ROOT, place), entry.name)))
    with (tmp_path / ROOT / name).open("r+b") as file:
        file.truncate(1 << 26)
    disk: Disk = RealDisk()
    with little_memory(24 << 20):
        report = verify(disk, [Target(storage=str(tmp_path / ROOT))], Options(is_read_only=True))
        assert report.findings
        dump(disk, str(tmp_path / ROOT / name), lambda item: None, last_id=5)
        if not name.startswith("0/"):
            with pytest.raises(ControlDamaged):
                open_on(disk, str(tmp_path / ROOT))


def open_on(disk: Disk, directory: str) -> None:
    settings = PartitionSettings(segment_bytes_max=400, say=lambda sentence: None)
    Directory.open(disk, directory, key=KEY, partitions=PARTITIONS, settings=settings, reserve_bytes=0)


# -- segment files that are sent ---------------------------------------------------------------------------------------


def test_segment_files_that_are_sent() -> None:
    """Behind a log that ends where the file begins: a replica takes the right records, or none."""
    first_id = FIRSTS[-2]
    whole = content(f"0/{segment_name(first_id)}")
    short = sample(first_id, clean=True)

    def check(chance: random.Random) -> None:
        partition = open_directory(short.clone(0)).partition(0)
        session = partition.promised_session
        changed = mutated(chance, whole, content(f"1/{segment_name(FIRSTS[0])}"), RUN) if chance.random() < 0.9 else whole
        announced = chance.choice([0, len(changed), len(whole), 1, 1 << 62])
        installation = partition.begin_installation(session, first_id, announced)

        def install() -> None:
            for at in range(0, len(changed), 100):
                installation.write(changed[at : at + 100])
            installation.prove()
            partition.install(session, installation)

        refused = outcome(install)
        installation.abandon()
        taken = first_id if isinstance(refused, WaltzError) else partition.last_id + 1
        assert changed != whole or announced not in (0, len(whole)) or taken == FIRSTS[-1]
        assert served(partition, SENT) == set(range(taken))
        assert not [name for name in partition_files(partition) if ".new" in name]

    def partition_files(partition: Partition) -> list[str]:
        return [entry.name for entry in partition._context.disk.list(f"{ROOT}/0")]

    each("segment files", TRIES, check)


# -- the offline tools -------------------------------------------------------------------------------------------------


def everything(disk: SimDisk, *, but: tuple[str, ...] = ()) -> dict[str, bytes]:
    found = {}
    for place in (ROOT, f"{ROOT}/0", f"{ROOT}/1"):
        for entry in disk.list(place):
            if not entry.is_directory and not entry.name.endswith(but):
                found[f"{place}/{entry.name}"] = bytes(disk.content(f"{place}/{entry.name}"))
    return found


def any_paths(chance: random.Random) -> list[str]:
    names = [f"{ROOT}/{name}" for name in SMALL]
    names += [path(0, first_id) for first_id in FIRSTS for path in (segment_path, index_path)]
    return chance.sample(names, chance.choice([1, 1, 1, 3]))


def test_verify_finds_what_was_changed_and_changes_nothing() -> None:
    """A storage that opens with a damaged replica must not look sound to who checks it offline."""

    def check(chance: random.Random) -> None:
        disk = spoiled(chance, *any_paths(chance))
        before = everything(disk)
        options = Options(is_read_only=True, is_deep=chance.random() < 0.5)
        report = verify(disk, [Target(storage=ROOT)], options)
        assert everything(disk) == before
        for finding in report.findings:
            assert finding.code in set(Code)
            assert finding.sentence()
        directory = outcome(open_directory, disk)
        partition = None if isinstance(directory, WaltzError) else outcome(directory.partition, 0)
        if not isinstance(partition, Partition) or outcome(is_vouched_for, partition) is not True:
            assert report.findings

    each("verify", TRIES, check)


def test_indexes_are_made_again_from_whatever_is_there() -> None:
    def check(chance: random.Random) -> None:
        disk = spoiled(chance, *any_paths(chance))
        before = everything(disk, but=(".idx",))
        done = outcome(rebuild, disk, [Target(storage=ROOT)])
        after = everything(disk, but=(".idx",))
        assert after == before
        if not isinstance(done, WaltzError):
            look(disk)

    each("rebuild", TRIES, check)


def test_dumps_of_files_full_of_nonsense() -> None:
    """Each item is shown to its end: the bytes of damage are read when they are asked for."""

    def check(chance: random.Random) -> None:
        (path,) = any_paths(chance)[:1]
        disk = spoiled(chance, path)
        items: list[object] = []

        def show(item: object) -> None:
            items.append(item)
            if (read := getattr(item, "read", None)) is not None:
                assert read(item.first_byte, min(item.last_byte, item.first_byte + 99)) is not None  # type: ignore[attr-defined]
            if (record := getattr(item, "record", None)) is not None:
                assert record().payload is not None

        outcome(dump, disk, path, show, first_id=chance.choice([0, 0, 3, 1 << 62]))
        assert items, "at the least it is said what kind of file this is"

    each("dump", TRIES * 3, check)
