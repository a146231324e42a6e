"""A small storage directory on a simulated disk, and what every test of damage asks of it.

Partition 0 is the one that is harmed, partition 1 the neighbour that must go on. Records differ in size and say which id
and partition they are, so that a wrong byte, a wrong place and a wrong partition all show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar
from uuid import UUID

from waltzd.disk.simulated import SimDisk
from waltzd.errors import BeyondLog, WaltzError
from waltzd.errors.operations import PartitionDamaged
from waltzd.format.layout import HARD_STATE_NAME, index_name, segment_name
from waltzd.format.record import Run, encode_payloads
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import PartitionSettings

P = ParamSpec("P")
T = TypeVar("T")
KEY = UUID(int=0xA11CE)
ROOT = "storage"
PARTITIONS = 3
SEGMENT_BYTES = 400


def open_directory(
    disk: SimDisk, *, segment_bytes: int = SEGMENT_BYTES, reserve_bytes: int = 0, said: list[str] | None = None
) -> Directory:
    settings = PartitionSettings(
        segment_bytes_max=segment_bytes, say=(lambda sentence: None) if said is None else said.append
    )
    return Directory.open(disk, ROOT, key=KEY, partitions=PARTITIONS, settings=settings, reserve_bytes=reserve_bytes)


def blank_disk(seed: int = 0, *, capacity_bytes: int = 1 << 40) -> SimDisk:
    disk = SimDisk(seed, capacity_bytes=capacity_bytes)
    disk.make_directory(ROOT)
    disk.flush_directory("")
    return disk


def payload(number: int, id_: int, size: int | None = None) -> bytes:
    return f"partition {number} id {id_} ".encode().ljust((7 * id_) % 40 + 20 if size is None else size, b".")


def run_for(number: int, first_id: int, count: int, *, size: int | None = None) -> Run:
    return encode_payloads(first_id, [payload(number, id_, size) for id_ in range(first_id, first_id + count)])


def records_of(run: Run) -> list[bytes]:
    return [bytes(run.data[a:b]) for a, b in zip(run.bounds[:-1], run.bounds[1:], strict=True)]


def expected(number: int, count: int) -> list[bytes]:
    return records_of(run_for(number, 0, count))


def begin(directory: Directory, number: int, *, session: int = 1, records: int = 0, low_mark: int = -1) -> Partition:
    """A new replica with one session and that many records, appended a few at a time."""
    partition = directory.create_partition(number)
    partition.open_session(session)
    partition.set_low_mark(session, low_mark)
    while partition.last_id + 1 < records:
        first_id = partition.last_id + 1
        partition.append(session, [run_for(number, first_id, min(3, records - first_id))], -1)
    return partition


def sample(
    records: int = 12, *, seed: int = 0, segment_bytes: int = SEGMENT_BYTES, clean: bool = False, mark: int | None = None
) -> SimDisk:
    """The disk of a storage that was stopped: partitions 0 and 1 with `records` each.

    With a `mark` a second session of partition 0 begins there: what is above it, nobody has decided yet."""
    disk = blank_disk(seed)
    directory = open_directory(disk, segment_bytes=segment_bytes)
    begin(directory, 1, records=records)
    if mark is None:
        begin(directory, 0, records=records)
    else:
        partition = begin(directory, 0, records=mark + 1)
        partition.open_session(2)
        partition.set_low_mark(2, mark)
        while partition.last_id + 1 < records:
            partition.append(2, [run_for(0, partition.last_id + 1, 1)], mark)
    if clean:
        directory.close()
    else:
        disk.kill()
    return disk


def segment_path(number: int, first_id: int) -> str:
    return f"{ROOT}/{number}/{segment_name(first_id)}"


def index_path(number: int, first_id: int) -> str:
    return f"{ROOT}/{number}/{index_name(first_id)}"


def hard_state_path(number: int) -> str:
    return f"{ROOT}/{number}/{HARD_STATE_NAME}"


def first_ids(disk: SimDisk, number: int = 0) -> list[int]:
    return [int(entry.name[:-4]) for entry in disk.list(f"{ROOT}/{number}") if entry.name.endswith(".seg")]


def served(partition: Partition, sent: Sequence[bytes]) -> set[int]:
    """The ids that are served; each with exactly the bytes that were sent, or refused as damaged or not there."""
    found: set[int] = set()
    for id_, right in enumerate(sent):
        try:
            run = partition.read_examined(id_, id_, 1 << 16)
        except (PartitionDamaged, BeyondLog):
            continue
        assert len(run) == 1
        assert bytes(run.data) == right, f"id {id_} is served with other bytes than were sent"
        found.add(id_)
    if partition.last_id >= len(sent) and partition.status().is_sound:
        raise AssertionError(f"the replica claims id {partition.last_id}, {len(sent) - 1} was the last one sent")
    return found


def outcome(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | WaltzError:
    """What a call returns, or the error that it is refused with."""
    try:
        return call(*arguments, **named)
    except WaltzError as error:
        return error


def is_vouched_for(partition: Partition) -> bool:
    """What the next owner asks: promise yourself to me, prove what you hold, say whether it is sound."""
    return partition.open_session(partition.promised_session + 1).is_sound


def goes_on(partition: Partition, number: int) -> None:
    """The next session begins, writes and reads."""
    session = partition.promised_session + 1
    partition.open_session(session)
    partition.set_low_mark(session, partition.last_id)
    run = run_for(number, partition.last_id + 1, 2)
    assert partition.append(session, [run], -1) == run.last_id
    for id_, record in enumerate(records_of(run), run.first_id):
        assert partition.read_examined(id_, id_, 1 << 16).data == record
