"""Where logs may end: at one moment nothing that came before is missing, and nothing is there without its cause."""

from __future__ import annotations

import random
from uuid import UUID

import pytest

from tests.archives import ARCHIVE, Uploads, unsealed
from tests.batches import TIME, batches_of
from tests.simulation.faulty_store import FaultyStore
from waltzd.archive.cut_point import (
    APART,
    ArchivedLog,
    Coverage,
    CutPoint,
    common_moment,
    cut_at_marks,
    cut_at_time,
    cut_latest,
    empty_log,
    format_time,
    incomplete_at,
    log_of,
    logs_in,
)
from waltzd.archive.listing import label_of
from waltzd.archive.manifest import Label
from waltzd.archive.unsealed import UNIQUE_BYTES, Slot, UnsealedIndex, slot_name, unsealed_index_name
from waltzd.archive.upload import PartitionArchive
from waltzd.errors.operations import ArchiveDamaged, CutImpossible, ForeignArchive, NoTimes
from waltzd.format.batch import Batch
from waltzd.format.checksum import crc32
from waltzd.format.record import encode_payloads
from waltzd.protocol.document import sha256_of

KEY = UUID(int=3)
LATE = TIME + 1_000_000_000


def log_at(
    times: list[int],
    *,
    cuts: list[int],
    store: FaultyStore | None = None,
    partition: int = 0,
    complete_to: int | None = None,
) -> tuple[ArchivedLog, list[Batch]]:
    """A batch of two records at each time; sealed behind those of `cuts`."""
    batches = batches_of([[b"a", b"b"] for _ in times], times=times, cuts=cuts, partition=partition)
    uploads = Uploads(store or FaultyStore(), cluster=KEY, partition=partition)
    rest = uploads.batches(batches)
    return uploads.log(*([unsealed(rest)] if rest else []), complete_to=complete_to), batches


def test_a_log_ends_behind_the_last_batch_of_a_time() -> None:
    pick = random.Random(1)
    for _ in range(30):
        times = sorted(TIME + pick.randrange(40) for _ in range(pick.randrange(1, 12)))
        cuts = sorted(pick.sample(range(len(times)), pick.randrange(len(times) + 1)))
        log, batches = log_at(times, cuts=cuts)
        for time in range(TIME - 1, TIME + 41):
            found = [batch for batch in batches if batch.head.time <= time]
            point = log.at_time(time)
            assert point.mark == (found[-1].last_id if found else -1)
            assert point.time == (found[-1].head.time if found else None)
        for mark in range(-1, batches[-1].last_id + 1):
            whole = [batch.last_id for batch in batches if batch.last_id <= mark]
            assert log.at_mark(mark).mark == (whole[-1] if whole else -1)
        assert (log.first_time, log.end.mark, log.session) == (times[0], batches[-1].last_id, 4)


def test_a_place_is_found_by_few_and_small_reads() -> None:
    log, _ = log_at(list(range(TIME, TIME + 300)), cuts=list(range(9, 300, 10)), store=(store := FaultyStore()))
    store.log.clear()
    log.at_time(TIME + 137)
    assert len(store.log) < 40
    assert all("segment" in what for what in store.log)


def test_the_latest_moment_is_the_least_to_which_a_partition_is_complete() -> None:
    """A later batch may have the time of the last one, so that alone says nothing."""
    first, _ = log_at([TIME, TIME + 5, TIME + 9], cuts=[2])
    second, _ = log_at([TIME + 1, TIME + 5, TIME + 7], cuts=[2], partition=1)
    assert (first.coverage.complete_to, second.coverage.complete_to) == (TIME + 8, TIME + 6)
    cut = cut_latest({0: first, 1: second})
    assert (cut.time, cut.points[0].mark, cut.points[1].mark) == (TIME + 6, 3, 3)
    each = cut_latest({0: first, 1: second}, is_each=True)
    assert (each.time, each.points[0].mark, each.points[1].mark) == (None, 5, 5)
    alone = cut_latest({0: first})
    assert (alone.time, alone.points[0].mark) == (None, 5)


def test_an_idle_partition_holds_up_nobody_where_a_backup_says_that_it_is_complete() -> None:
    busy, _ = log_at([TIME, LATE], cuts=[1])
    idle, _ = log_at([TIME], cuts=[0], partition=1)
    assert cut_latest({0: busy, 1: idle}).time == TIME - 1
    told, _ = log_at([TIME], cuts=[0], partition=1, complete_to=LATE + 5)
    cut = cut_latest({0: busy, 1: told})
    assert (cut.time, cut.points[0].mark, cut.points[1].mark) == (LATE - 1, 1, 1)


def test_causes_are_in_each_cut_of_their_effects() -> None:
    """Against all histories of a few transactions: each has a time not before that of its cause, in another partition. The
    store lacks the end of each log, and a cut at its latest moment never has an effect without its cause."""
    for seed in range(300):
        pick = random.Random(seed)
        logs: dict[int, list[tuple[int, tuple[int, int] | None]]] = {0: [], 1: [], 2: []}
        made: list[tuple[int, int]] = []
        for _ in range(pick.randrange(3, 25)):
            number = pick.randrange(3)
            cause = pick.choice(made) if made and pick.random() < 0.7 else None
            clock = TIME + pick.randrange(12)
            seen = 0 if cause is None else logs[cause[0]][cause[1]][0]
            time = max(clock, seen, logs[number][-1][0] if logs[number] else 0)
            logs[number].append((time, cause))
            made.append((number, len(logs[number]) - 1))
        stored = {number: rows[: pick.randrange(len(rows) + 1)] for number, rows in logs.items()}
        if not all(stored.values()):
            continue
        moment = common_moment([
            Coverage(partition=number, end=CutPoint(mark=len(rows) - 1), complete_to=rows[-1][0] - 1)
            for number, rows in stored.items()
        ])  # fmt: skip
        assert moment is not None
        kept = {number: [row for row in rows if row[0] <= moment] for number, rows in stored.items()}
        for rows in kept.values():
            for _, cause in rows:
                assert cause is None or cause[1] < len(kept[cause[0]]), seed
        for number, rows in logs.items():  # nothing of that time or before is missing
            assert len(kept[number]) == sum(row[0] <= moment for row in rows), seed


def test_a_time_that_the_store_cannot_give_is_refused_by_name() -> None:
    first, _ = log_at([TIME, TIME + 5], cuts=[1])
    second, _ = log_at([TIME + 3], cuts=[0], partition=1)
    logs = {0: first, 1: second}
    with pytest.raises(CutImpossible, match="is in the future"):
        cut_at_time(logs, TIME + 4, now=TIME + 3)
    with pytest.raises(CutImpossible, match=f"its first transaction is of {format_time(TIME)}".replace("+", r"\+")):
        cut_at_time(logs, TIME - 1, now=LATE)
    with pytest.raises(CutImpossible, match=r"partition 1 is complete up to .* only: what came after that"):
        cut_at_time(logs, TIME + 4, now=LATE)
    assert cut_at_time(logs, TIME + 4, now=LATE, is_each=True).points[1].mark == 1
    assert cut_at_time(logs, TIME + 2, now=LATE).points[1].mark == -1
    nothing = empty_log(FaultyStore(), Label(archive=ARCHIVE, cluster=KEY), 2)
    with pytest.raises(CutImpossible, match="partition 2 has nothing in the store"):
        cut_latest({**logs, 2: nothing})
    with pytest.raises(CutImpossible, match="the store has no transaction"):
        cut_latest({2: nothing})
    assert [coverage.partition for coverage in incomplete_at([first.coverage, second.coverage], TIME + 3)] == [1]


def test_records_without_times_are_cut_at_no_time() -> None:
    uploads = Uploads(FaultyStore(), cluster=KEY)
    uploads.records(encode_payloads(0, [b"x", b"y"]))
    old = uploads.log()
    refused = "partition 0: the ids 0 to 1 are records of format 0"
    with pytest.raises(NoTimes, match=refused):
        cut_at_time({0: old}, TIME, now=LATE)
    with pytest.raises(NoTimes, match=refused):
        cut_latest({0: old, 1: log_at([TIME], cuts=[0])[0]})
    assert cut_at_marks({0: old}, {0: 0}).points[0].mark == 0
    uploads.batches(batches_of([[b"a"], [b"b"]], first_id=2, times=[TIME, TIME + 4], cuts=[1]))
    both = uploads.log()
    assert both.at_time(TIME + 3).mark == 2
    with pytest.raises(NoTimes):
        both.at_time(TIME - 1)


def test_marks_are_those_of_all_partitions_and_batches_stay_whole() -> None:
    log, _ = log_at([TIME, TIME + 5], cuts=[1])
    cut = cut_at_marks({0: log}, {0: 2})
    assert (cut.points[0].mark, cut.given) == (1, {0: 2})
    assert cut_at_marks({0: log}, {0: 0}).points[0].mark == -1
    for marks, said in (({0: 4}, "ends at id 3"), ({}, "do not say where partition 0"), ({0: 1, 1: 1}, "no partition 1")):
        with pytest.raises(CutImpossible, match=said):
            cut_at_marks({0: log}, marks)


# -- a store -----------------------------------------------------------------------------------------------------------


def with_tail(store: FaultyStore, batches: list[Batch], *, since: int, moment: int, session: int = 9) -> None:
    data = b"".join(bytes(piece) for batch in batches for piece in batch.pieces) + bytes(UNIQUE_BYTES)
    crc = size = 0
    for batch in batches:
        crc, size = crc32(batch.run.data, crc), size + len(batch.run.data)
    slot = Slot(
        slot=0, first=batches[0].first_id, last=batches[-1].last_id, format=1, record_bytes=size, size=len(data),
        time=batches[-1].head.time, crc=crc, sha256=sha256_of(data),
    )  # fmt: skip
    store.put_new(slot_name(0, 0), data)
    tail = UnsealedIndex(
        archive=ARCHIVE, cluster=KEY, partition=0, number=1, session=session, since=since, moment=moment, slots=(slot,)
    )  # fmt: skip
    store.put_new(unsealed_index_name(0), tail.text)


def test_what_was_saved_behind_the_segments_belongs_to_the_log() -> None:
    """Also where it begins within them. Its moment counts, but for what clocks may differ."""
    log, batches = log_at([TIME, TIME + 5, TIME + 9], cuts=[1], store=(store := FaultyStore()))
    with_tail(store, batches[1:], since=4, moment=LATE)
    label = label_of(store, not_done="")
    archive = PartitionArchive(store, label, 0)
    found = log_of(archive, archive.manifest(0, ""))
    assert (found.last, found.session, found.coverage.complete_to) == (5, 9, LATE - APART)
    assert [(rest.first, rest.last) for rest in found.rest] == [(4, 5)]
    assert found.rest[0].data == log.rest[0].data
    logs = logs_in(store, label, 3)
    assert {number: one.last for number, one in logs.items()} == {0: 5, 1: -1, 2: -1}
    assert list(logs_in(store, label, None)) == [0]


def test_a_gap_between_segments_and_what_is_behind_them_is_damage() -> None:
    uploads = Uploads(FaultyStore(), cluster=KEY)
    batches = batches_of([[b"a"], [b"b"], [b"c"]], cuts=[0])
    uploads.batches(batches)
    with pytest.raises(ArchiveDamaged, match="begins at id 2, and they end at id 0"):
        uploads.log(unsealed(batches[2:]))


def test_a_store_without_an_archive_is_refused() -> None:
    with pytest.raises(ForeignArchive, match="holds no archive"):
        label_of(FaultyStore(), not_done="")


def test_a_footer_or_a_head_that_is_wrong_is_damage() -> None:
    log, _ = log_at([TIME, TIME + 5], cuts=[1], store=(store := FaultyStore()))
    name = log.pieces[0].name(0)
    right = store.objects[name].data
    for at, said in ((len(right) - log.pieces[0].index_bytes - 20, "no sound footer"), (140, "no sound batch")):
        store.objects[name].data = right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :]
        with pytest.raises(ArchiveDamaged, match=said):
            ArchivedLog(log.archive, log.manifest).at_time(TIME)


def test_times_that_stand_ahead_do_not_hold_up_the_latest_moment() -> None:
    """A clock was a day ahead for one batch, and times never fall: what follows has that time, and is restored."""
    second = 1_000_000
    times = [TIME + n * second for n in range(10)] + [TIME + 86_400 * second] * 200
    now = TIME + 50 * 60 * second
    ahead, _ = log_at(times, cuts=[100, 209], complete_to=now - second)
    healthy, _ = log_at([TIME + n * 10 * second for n in range(300)], cuts=[299], partition=1, complete_to=now - second)
    cut = cut_latest({0: ahead, 1: healthy})
    assert {number: point.mark for number, point in cut.points.items()} == {0: ahead.last, 1: healthy.last}
    assert cut.time == now - second
    assert list(cut.ahead) == [0]
    assert ahead.last - cut.ahead[0] == 400
    assert not cut_latest({1: healthy, 2: healthy}).ahead
