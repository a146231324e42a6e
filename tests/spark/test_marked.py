"""The option `lock`: the rows that marked a lock, against all rows filtered one by one, and which ids are read for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest
from waltz_spark.log import live_origin
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.live_origin import LiveOrigin
from waltz_spark.log.origin import Catalog, Span
from waltz_spark.log.plan import Sizing
from waltz_spark.source import WaltzDataSource
from waltz_spark.table.columns import columns_of
from waltz_spark.table.pushdown import UNFILTERED, Filters, Ranges, filters_of
from waltz_spark.table.read_task import Reading, tasks

from tests.spark.batches import Log
from tests.tiers import together
from waltzd.client.routes import Routes
from waltzd.errors import BadArgument, NeedsBatches, OnlyInArchive, WaltzError
from waltzd.protocol.locks import History, HistoryPart, write_lock
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST

POOL = 5
SEEDS = range(6)


def log_of(directory: Path, seed: int) -> Log:
    """Two segments of format 0, then batches that take few locks, each in any mode."""
    log = Log(directory=directory, chance=random.Random(seed))
    log.add_plain(20)
    log.add_plain(5)
    for _ in range(25):
        log.add(log.chance.choice([1, 1, 4, 30]), locks=log.chance.random() < 0.8, pool=POOL)
    return log


def marks(row: dict[str, Any], lock: int) -> bool:
    return any(each["lock"] == lock and each["mode"] != "READ" for each in row["locks"] or ())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rows_are_those_that_marked_the_lock(tmp_path: Path, seed: int) -> None:
    """From directories all is read, also the segments of format 0."""
    rows = log_of(tmp_path / "0", seed).rows
    origin = DirectoryOrigin(storages=(str(tmp_path),), allows_uncommitted=True)
    catalog = origin.catalog()
    ids = Ranges([(10, len(rows) // 2)])
    for lock in range(POOL):
        expected = [row for row in rows if marks(row, lock)]
        assert any(row["locks"] and not marks(row, lock) for row in rows)
        assert expected
        for filters, some in (
            (Filters(lock=lock), expected),
            (Filters(lock=lock, txid=ids), [row for row in expected if row["txid"] in ids]),
        ):
            for names in (("txid",), ("txid", "locks", "group", "data")):
                reading = Reading(origin, columns_of(names), filters)
                given = tasks(origin, catalog, catalog.spans, Sizing(), filters)
                found = [row for task in given for batch in reading.batches(task) for row in batch.to_pylist()]
                assert found == [{name: row[name] for name in names} for row in some]


def test_a_stream_gives_the_same_rows(tmp_path: Path) -> None:
    rows = log_of(tmp_path / "0", 1).rows
    lock = f"{3:016x}"
    source = WaltzDataSource({"path": str(tmp_path), "allowUncommitted": "true", "lock": lock, "maxTxnsPerTrigger": "30"})
    reader = source.streamReader(source.schema())
    at, found = reader.initialOffset(), list[int]()
    while (after := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        for task in reader.partitions(at, after):
            found += [row["txid"] for batch in reader.read(task) for row in batch.to_pylist()]
        at = after
    assert found == [row["txid"] for row in rows if marks(row, 3)]


def test_a_lock_is_a_name_and_an_id_or_a_hash(tmp_path: Path) -> None:
    assert filters_of({}) == UNFILTERED
    lock = write_lock("account", 17).hash
    assert filters_of({"lock": "account:17"}) == filters_of({"lock": f"{lock:016X}"}) == Filters(lock=lock)
    with pytest.raises(BadArgument, match="'account' is not a lock"):
        WaltzDataSource({"path": str(tmp_path), "lock": "account"}).schema()


# -- ids that are read -----------------------------------------------------------------------------------------------------


class Owner:
    """Routes to an owner of one partition, and the owner: it answers in parts, and not below an id."""

    def __init__(self, ids: Sequence[int], error: WaltzError, *, below: int, part: int, timeline: UUID = FIRST) -> None:
        self.ids, self.error, self.below, self.part, self.timeline = ids, error, below, part, timeline
        self.committed = 1 << 40

    async def ask(
        self, partition: int, what: str, call: Callable[[Any], Awaitable[HistoryPart]], seconds: float
    ) -> HistoryPart:
        return await call(self)

    async def history(
        self, partition: int, lock: int, *, after: int, before: int, limit: int, newest_first: bool, confirmed: bool
    ) -> HistoryPart:
        assert newest_first
        last_id = min(before - 1, self.committed)
        if last_id < self.below:
            raise self.error
        through = max(after + 1, self.below, last_id - self.part)
        found = [id_ for id_ in reversed(self.ids) if through <= id_ <= last_id]
        has_more = len(found) > limit
        history = History(
            partition=partition, ids=tuple(found[:limit]), end=Position(last_id, self.timeline), has_more=has_more
        )
        return HistoryPart(history=history, through=None if has_more or through == after + 1 else through)


def asked(owner: Owner, span: Span) -> list[Span]:
    catalog = Catalog(key=UUID(int=1), spans={0: span}, extents=())
    return asyncio.run(LiveOrigin(servers=("x:1",))._marked_in(cast(Routes, owner), catalog, 0, span, 17))


@together("seed", range(200))
def test_every_mark_is_read_and_else_only_what_no_owner_answers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    limit, most = chance.choice([1, 2, 100]), chance.choice([5, 1000])
    monkeypatch.setattr(live_origin, "HISTORY_IDS_MAX", limit)
    monkeypatch.setattr(live_origin, "MARKS_MAX", most)
    ids = sorted(chance.sample(range(200), chance.randrange(40)))
    below, span = chance.choice([0, 70, 300]), Span(chance.randrange(100), chance.randrange(60, 200))
    error = chance.choice([NeedsBatches("format 0"), OnlyInArchive("no archive")])
    found = Ranges(
        (each.first, each.last) for each in asked(Owner(ids, error, below=below, part=chance.randrange(50)), span)
    )
    marked = [id_ for id_ in ids if span.first <= id_ <= span.last]
    assert all(id_ in found for id_ in marked)
    exact = marked[-most] if len(marked) >= most else span.first
    assert all(id_ in marked or id_ < below for id_ in range(exact, span.last + 1) if id_ in found)


def test_an_answer_of_another_timeline_or_of_an_owner_before_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    error = NeedsBatches("format 0")
    forked = Owner([3, 5], error, below=0, part=50, timeline=UUID(int=9))
    assert asked(forked, Span(0, 99)) == [Span(0, 99)]
    old = Owner([3, 5], error, below=0, part=500)
    old.committed = 50
    assert asked(old, Span(0, 99)) == [Span(0, 99)]
    assert "partition 0: ids 0 to 99 are all read, to look for the lock in them: an owner before answered" in caplog.text
