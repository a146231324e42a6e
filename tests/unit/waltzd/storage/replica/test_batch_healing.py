"""Damage in segments of format 1: never served, never cut, and healed until every file is that of the other replicas."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence

import pytest

from tests.batches import batches_of, header_of, raw, segments_of
from tests.simulation.batch_log import BatchLog
from tests.simulation.sample import KEY, ROOT, open_directory
from tests.tiers import tiers
from tests.unit.keeping import begun
from waltzd.disk.real import translate
from waltzd.disk.seam import File
from waltzd.disk.simulated import Fault, Loss, SimDisk
from waltzd.errors import BeyondLog
from waltzd.errors.operations import FlushFailed, NotNextId, PartitionDamaged, TooManyFiles, UnfitSegment
from waltzd.format.batch import Batch
from waltzd.format.finding import Code
from waltzd.format.footer import FooterBuilder
from waltzd.format.layout import HEADER_BYTES, segment_name
from waltzd.storage.replica.partition import Partition

HOME = f"{ROOT}/0"


def install(partition: Partition, first_id: int, content: bytes) -> None:
    session = partition.promised_session
    installation = partition.begin_installation(session, first_id, len(content))
    try:
        for at in range(0, len(content), 1000):
            installation.write(content[at : at + 1000])
        installation.prove()
        partition.install(session, installation)
    finally:
        installation.abandon()


def written(log: BatchLog, *, committed: int = -1) -> tuple[SimDisk, Partition]:
    disk, _, partition = begun()
    for batch in log.batches:
        partition.append(3, [batch], committed)
    return disk, partition


def drawn(seed: int, count: int = 14) -> BatchLog:
    log = BatchLog(random.Random(seed), segment_bytes_max=2500)
    log.batches = log.draw(count)
    return log


def bring_level(partition: Partition, log: BatchLog, pick: random.Random) -> None:
    """What an owner does: files, as another replica has them or made of its batches; then a cut, then batches."""
    status = partition.open_session(partition.promised_session + 1)
    session = partition.promised_session
    for _ in range(30):
        wanted = [first_id for first_id in status.damaged_segments if first_id <= log.last_id]
        if status.is_sound or not wanted:
            break
        content = log.files(KEY)[segment_name(wanted[0])]
        if pick.random() < 0.5:  # without its footer
            own = next(own for own in segments_of(log.batches) if own[0].first_id == wanted[0])
            content = content[:HEADER_BYTES] + raw(own)
        install(partition, wanted[0], content)
        status = partition.status()
    partition.truncate(session, log.last_id)
    behind = [batch for batch in log.batches if batch.first_id > partition.last_id]
    if behind:
        partition.append(session, behind, -1)
    partition.set_low_mark(session, log.last_id)


def serves_nothing_wrong(partition: Partition, log: BatchLog) -> None:
    for batch in log.batches:
        try:
            found = partition.read_examined(batch.first_id, batch.last_id, 1 << 20)
        except (PartitionDamaged, BeyondLog):
            continue
        assert found.data == batch.run.part(0, len(found)).data


def harm(disk: SimDisk, pick: random.Random) -> str:
    path = pick.choice([f"{HOME}/{entry.name}" for entry in disk.list(HOME) if entry.name.endswith((".seg", ".idx"))])
    kind = pick.choice(["flip", "flip", "flip", "zeros", "cut", "lost"])
    at = pick.randrange(disk.size(path))
    match kind:
        case "flip":
            disk.corrupt(path, at, bytes([disk.open(path).read(at, 1)[0] ^ 1 << pick.randrange(8)]))
        case "zeros":
            disk.corrupt(path, at, bytes(min(600, disk.size(path) - at)))
        case "cut":
            disk.open(path, write=True).truncate(at)
        case "lost":
            disk.remove(path)
    return f"{kind} {path} {at}"


@pytest.mark.parametrize("seed", tiers(range(150), quick=10, short=50))
def test_whatever_is_damaged_is_healed_to_the_last_byte(seed: int) -> None:
    pick, log = random.Random(seed), drawn(seed)
    disk, partition = written(log, committed=-1)
    partition.checkpoint()
    partition.open_session(4)
    partition.set_low_mark(4, log.last_id)
    disk.kill()
    done = [harm(disk, pick) for _ in range(pick.choice([1, 1, 2]))]
    partition = open_directory(disk).partition(0)
    sealed_before = [first_id for first_id, _ in partition.sealed_segments()]
    serves_nothing_wrong(partition, log)
    bring_level(partition, log, pick)
    for first_id in {*sealed_before, *(first_id for first_id, _ in partition.sealed_segments())}:
        partition.examine(first_id)  # a wrong footer is nothing that anybody has to ask for
    assert partition.status().is_sound, (done, partition.status().findings)
    log.check(partition)
    log.check_files(disk, HOME, KEY)
    new = log.draw(3)
    log.batches += new
    partition.append(partition.promised_session, new, -1)
    disk.power_cut()
    log.check(open_directory(disk).partition(0))
    log.check_files(disk, HOME, KEY)


def last_place(log: BatchLog) -> tuple[str, int, int]:
    """Of the last batch: the path of its segment, where it begins, and where it ends."""
    name, content = list(log.files(KEY).items())[-1]
    return f"{HOME}/{name}", len(content) - log.batches[-1].size, len(content)


def in_an_open_segment(seed: int = 4) -> BatchLog:
    log = drawn(seed)
    while log.end is None or log.end.segment_bytes == 0 or len(log.batches[-1]) < 2:
        log.batches += log.draw(1)
    return log


def test_a_batch_that_a_crash_tore_is_cut() -> None:
    log = in_an_open_segment()
    path, begin, end = last_place(log)
    for kept in (1, 50, 96, 120, end - begin - 1):
        disk, _ = written(log)
        disk.kill()
        disk.open(path, write=True).truncate(begin + kept)
        partition = open_directory(disk).partition(0)
        here = BatchLog(random.Random(0), batches=log.batches[:-1])
        here.check(partition)
        here.check_files(disk, HOME, KEY)


@pytest.mark.slow
def test_a_last_batch_that_rots_is_damaged_and_stays() -> None:
    """Nobody has said yet that it is on the disk, and it may have been acknowledged: it was there to its last byte."""
    log = in_an_open_segment()
    path, begin, end = last_place(log)
    for is_power_cut in (False, True):
        for at in (*range(begin, begin + 130), end - 5, end - 1):
            disk, _ = written(log)
            disk.power_cut() if is_power_cut else disk.kill()
            disk.corrupt(path, at, bytes([disk.open(path).read(at, 1)[0] ^ 1]))
            partition = open_directory(disk).partition(0)
            [finding] = partition.status().findings
            assert (finding.first_id, disk.size(path)) == (log.batches[-1].first_id, end), at
            bring_level(partition, log, random.Random(at))
            log.check(partition)
            log.check_files(disk, HOME, KEY)


def ended_early() -> tuple[BatchLog, SimDisk, list[Batch], str]:
    """Return a log, a disk on which it ends within its last segment, the batches that this segment had, and its path."""
    log = in_an_open_segment()
    while len(segments_of(log.batches)[-1]) < 3 or log.end is None or log.end.segment_bytes == 0:
        log.batches += log.draw(1)
    own = segments_of(log.batches)[-1]
    disk, partition = written(log)
    partition.open_session(4)
    partition.set_low_mark(4, log.last_id)
    disk.kill()
    path = f"{HOME}/{segment_name(own[0].first_id)}"
    disk.open(path, write=True).truncate(HEADER_BYTES + own[0].size + own[1].size)
    return log, disk, own, path


def test_a_log_that_ends_early_within_a_segment_is_healed_by_that_segment() -> None:
    """Owners say where segments end, so none begins behind one that is not full."""
    log, disk, own, _ = ended_early()
    partition = open_directory(disk).partition(0)
    [finding] = partition.status().findings
    assert (finding.code, finding.first_id) == (Code.SHORT_LOG, own[2].first_id)
    assert partition.status().damaged_segments == (own[0].first_id,)
    partition.open_session(4)
    with pytest.raises(UnfitSegment, match="ends at id"):
        install(partition, own[0].first_id, header_of(own, key=KEY).encode() + raw(own[:1]))
    content = log.files(KEY)[segment_name(own[0].first_id)]
    install(partition, own[0].first_id, content)
    assert partition.status().is_sound
    log.check(partition)
    log.check_files(disk, HOME, KEY)


def test_a_segment_at_the_floor_that_cannot_be_finished_comes_as_a_file() -> None:
    """The footer in front of it was damaged, and has left the disk with its segment."""
    log = in_an_open_segment()
    floor = segments_of(log.batches)[-1][0].first_id
    disk, partition = written(log)
    partition.open_session(4)
    partition.set_low_mark(4, log.last_id)
    partition.trim(4, floor)
    while partition.unlink_next():
        continue
    disk.kill()
    partition = open_directory(disk).partition(0)
    partition.open_session(5)
    partition.set_low_mark(5, log.last_id)
    behind: list[Batch] = []
    while not log.batches[-1].head.is_last:
        behind += log.draw(1)
        log.batches += behind[-1:]
    assert floor > 0
    assert behind
    with pytest.raises(PartitionDamaged, match="which was trimmed"):
        partition.append(5, behind, -1)
    [finding] = partition.status().findings
    assert (finding.code, partition.status().damaged_segments) == (Code.BROKEN_CHAIN, (floor,))
    install(partition, floor, log.files(KEY)[segment_name(floor)])
    assert partition.status().is_sound
    assert partition.last_id == log.last_id


@pytest.mark.parametrize("is_started_anew", [False, True])
def test_a_bad_sector_in_front_of_a_segment_that_is_full_is_found_and_healed(is_started_anew: bool) -> None:
    """Without the footer in front, a full segment cannot be finished. The segment in front is healed then, instead of each
    append, or the start, failing until somebody reads it."""
    log = in_an_open_segment()
    disk, partition = written(log)
    disk.kill()
    partition = open_directory(disk).partition(0)
    partition.open_session(4)
    partition.set_low_mark(4, log.last_id)
    behind: list[Batch] = []
    while not log.batches[-1].head.is_last:
        behind += log.draw(1)
        log.batches += behind[-1:]
    front = segments_of(log.batches)[-2][0].first_id
    path = f"{HOME}/{segment_name(front)}"

    def fail(kind: str, where: str) -> None:
        if kind == "read" and where == path:
            disk.faults[disk.steps] = Fault.IO_ERROR

    disk.observer = fail
    with pytest.raises(PartitionDamaged):
        partition.append(4, behind, -1)
    assert partition.last_id == log.last_id
    if is_started_anew:
        disk.kill()
        partition = open_directory(disk).partition(0)
    [finding] = partition.status().findings
    assert (finding.code, partition.status().damaged_segments) == (Code.UNREADABLE, (front,))
    disk.observer = None  # the file of another replica gets other sectors
    partition.open_session(5)
    install(partition, front, log.files(KEY)[segment_name(front)])
    log.check(partition)
    log.check_files(disk, HOME, KEY)


def test_a_segment_in_front_that_cannot_be_opened_now_is_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    log = in_an_open_segment()
    disk, partition = written(log)
    disk.kill()
    partition = open_directory(disk).partition(0)
    partition.open_session(4)
    partition.set_low_mark(4, log.last_id)
    behind: list[Batch] = []
    while not log.batches[-1].head.is_last:
        behind += log.draw(1)
        log.batches += behind[-1:]

    def refuse(path: str, *, write: bool = False) -> File:
        raise translate(OSError(errno.EMFILE, "x"), f"opening {path}")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "open", refuse)
        with pytest.raises(TooManyFiles):
            partition.append(4, behind, -1)
        partition.stand()
    assert partition.status().is_sound
    behind += log.draw(1)
    log.batches += behind[-1:]
    partition.append(4, behind, -1)
    log.check(partition)
    log.check_files(disk, HOME, KEY)


def test_a_bad_sector_in_front_of_an_empty_segment_refuses_no_start() -> None:
    log = in_an_open_segment()
    disk, partition = written(log)
    first_ids = [own[0].first_id for own in segments_of(log.batches)]
    partition.open_session(4)
    partition.truncate(4, first_ids[-1] - 1)
    disk.kill()
    path = f"{HOME}/{segment_name(first_ids[-2])}"
    disk.observer = lambda kind, where: disk.faults.update({disk.steps: Fault.IO_ERROR} if where == path else {})
    partition = open_directory(disk).partition(0)
    assert partition.status().damaged_segments == (first_ids[-2],)
    assert partition.last_id == first_ids[-1] - 1


def test_a_segment_that_is_healed_by_one_that_goes_on_takes_what_follows() -> None:
    """What was damaged had been the last batch of its segment, in a history that the log does not have. The next segment
    has no place behind the file, which has no footer."""
    payloads = [[b"a"], [b"b"], [b"c"], [b"d"]]
    held, log = batches_of(payloads, cuts=[0, 1, 2]), BatchLog(random.Random(1), batches=batches_of(payloads, cuts=[0, 3]))
    disk, partition = written(BatchLog(random.Random(1), batches=held))
    partition.checkpoint()
    disk.kill()
    path = f"{HOME}/{segment_name(1)}"
    disk.corrupt(path, HEADER_BYTES + held[1].size - 1, b"?")
    partition = open_directory(disk).partition(0)
    partition.open_session(4)
    partition.examine(1)
    assert partition.status().damaged_segments == (1,)
    install(partition, 1, header_of(log.batches[1:], key=KEY).encode() + raw(log.batches[1:2]))
    partition.truncate(4, 1)
    partition.set_low_mark(4, 1)
    partition.append(4, log.batches[2:], -1)
    log.check(partition)
    log.check_files(disk, HOME, KEY)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_replica_that_took_files_and_batches_is_the_same_as_one_that_took_a_stream(seed: int) -> None:
    log = drawn(seed, 20)
    disk, _, partition = begun()
    for own in segments_of(log.batches):
        if own[-1].head.is_last and partition.last_id % 3:
            install(partition, own[0].first_id, log.files(KEY)[segment_name(own[0].first_id)])
        else:
            partition.append(3, own, -1)
    log.check(partition)
    log.check_files(disk, HOME, KEY)
    other, _ = written(log)
    names = sorted(log.files(KEY))
    assert [other.open(f"{HOME}/{name}").read(0, 1 << 20) for name in names] == [
        disk.open(f"{HOME}/{name}").read(0, 1 << 20) for name in names
    ]


def test_a_file_that_is_not_the_next_segment_is_refused_and_its_footer_is_not_believed() -> None:
    log = drawn(1, 20)
    first, second = segments_of(log.batches)[:2]
    there = log.files(KEY)[segment_name(second[0].first_id)]
    data_bytes = HEADER_BYTES + sum(batch.size for batch in second)
    flipped = bytearray(there)
    flipped[data_bytes - 1] ^= 1
    another = drawn(2, 20)
    alien = batches_of([[b"x"] * len(second[0])], first_id=second[0].first_id)
    cases = {
        "ends inside a batch": there[: HEADER_BYTES + second[0].size - 1],
        "is damaged": bytes(flipped),
        "has the footer of another": there[:data_bytes] + _another_footer(second, another.random),
        "goes on with another history": there[:HEADER_BYTES] + raw(alien),
        "has no batch": there[:HEADER_BYTES],
    }
    for what, content in cases.items():
        _, _, partition = begun()
        partition.append(3, first, -1)
        with pytest.raises(UnfitSegment):
            install(partition, second[0].first_id, content)
        assert partition.last_id == first[-1].last_id, what
    for kept in (0, 1, 40):  # a part of the footer came
        disk, _, partition = begun()
        partition.append(3, first, -1)
        install(partition, second[0].first_id, there[: data_bytes + kept])
        assert disk.open(f"{HOME}/{segment_name(second[0].first_id)}").read(0, 1 << 20) == there
    _, _, partition = begun()
    partition.append(3, first[:-1], -1)
    with pytest.raises(NotNextId):  # the segment in front is not full
        install(partition, first[-1].first_id, header_of(first[-1:], key=KEY).encode() + raw(first[-1:]))


def _another_footer(batches: Sequence[Batch], pick: random.Random) -> bytes:
    """Sound, and of the same batches behind another header."""
    builder = FooterBuilder(pick.randbytes(HEADER_BYTES))
    for batch in batches:
        builder.add(batch.head, batch.pieces)
    return builder.footer(bytes(32)).encode()


class PowerLost(BaseException):
    """Raised out of an operation of the disk."""


@pytest.mark.parametrize("seed", tiers(range(12), quick=1, short=6))
def test_a_healing_that_is_interrupted_anywhere_can_go_on(seed: int) -> None:
    pick, log = random.Random(seed), drawn(seed, 8)
    disk, partition = written(log)
    partition.open_session(4)
    partition.set_low_mark(4, log.last_id)
    disk.kill()
    harm(disk, pick)
    again = open_directory(disk.clone(0)).partition(0)
    bring_level(again, log, random.Random(seed))
    number = 0
    while True:
        number += pick.randrange(1, 4)
        copy = disk.clone(number)
        steps = copy.steps + number

        def stop(kind: str, path: str, copy: SimDisk = copy, steps: int = steps) -> None:
            if copy.steps >= steps:
                raise PowerLost

        copy.observer = stop
        try:
            bring_level(open_directory(copy).partition(0), log, random.Random(seed))
            return
        except PowerLost:
            copy.observer = None
        copy.power_cut(pick.choice([Loss.ORDERED, Loss.SCATTERED])) if pick.random() < 0.7 else copy.kill()
        partition = open_directory(copy).partition(0)
        serves_nothing_wrong(partition, log)
        bring_level(partition, log, random.Random(seed))
        for first_id, _ in partition.sealed_segments():
            partition.examine(first_id)
        log.check(partition)
        log.check_files(copy, HOME, KEY)


def test_locks_are_read_back_to_what_is_damaged() -> None:
    log = in_an_open_segment(6)
    disk, partition = written(log)
    second = segments_of(log.batches)[1]
    path = f"{HOME}/{segment_name(second[0].first_id)}"
    disk.corrupt(path, HEADER_BYTES + 20, b"\xff\xff\xff")
    partition.examine(second[0].first_id)
    assert not partition.status().is_sound
    history = partition.read_locks(log.last_id, 1 << 20, session=3)
    assert history is not None
    assert history.first_id == second[0].last_id + 1
    with pytest.raises(PartitionDamaged):
        partition.read_locks(second[0].last_id, 1 << 20, session=3)


@pytest.mark.parametrize("what", ["open", "flush_directory"])
def test_a_file_that_cannot_be_opened_in_its_place_ends_the_replica(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that it replaces has no name any more. Batches went to that one, were acknowledged, and were gone with the
    process: with no file descriptor left (EMFILE) the file in its place could not be opened."""
    log, disk, own, path = ended_early()
    partition = open_directory(disk).partition(0)
    partition.open_session(4)
    content = log.files(KEY)[segment_name(own[0].first_id)]
    call = getattr(disk, what)

    def refuse(name: str, **how: bool) -> object:
        if name in (path, HOME) and disk.size(path) == len(content):
            raise TooManyFiles(f"opening {name}")
        return call(name, **how)

    with monkeypatch.context() as patched:
        patched.setattr(disk, what, refuse)
        with pytest.raises(FlushFailed, match=r"opening .*; partition 0"):
            install(partition, own[0].first_id, content)
    with pytest.raises(FlushFailed):
        partition.append(4, own[2:], -1)
    disk.kill()
    partition = open_directory(disk).partition(0)
    log.check(partition)
    log.check_files(disk, HOME, KEY)


@pytest.mark.parametrize("is_proven", [False, True])
def test_a_bad_sector_in_the_last_segment_is_damage_and_is_healed(is_proven: bool) -> None:
    """At the start it refused the replica, and behind the checkpoint each opening by an owner, although the segment could
    be had from the other replicas."""
    log = in_an_open_segment()
    first_id = segments_of(log.batches)[-1][0].first_id
    path = f"{HOME}/{segment_name(first_id)}"
    disk, partition = written(log)

    def fail(kind: str, where: str) -> None:
        if kind == "read" and where == path:
            disk.faults[disk.steps] = Fault.IO_ERROR

    if is_proven:
        partition.close()
    disk.kill()
    if is_proven:
        partition = open_directory(disk).partition(0)
    disk.observer = fail
    if not is_proven:
        partition = open_directory(disk).partition(0)
    status = partition.open_session(4)
    assert [finding.code for finding in status.findings] == [Code.UNREADABLE]
    assert status.damaged_segments == (first_id,)
    disk.observer = None  # the file of another replica gets other sectors
    install(partition, first_id, log.files(KEY)[segment_name(first_id)])
    assert partition.status().is_sound
    log.check(partition)
    log.check_files(disk, HOME, KEY)
