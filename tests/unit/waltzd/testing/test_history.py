"""Reading by lock, from the client through owner and storages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest

from tests.unit import timeless
from waltzd import Client, History, Lock, append_lock, read_lock, write_lock
from waltzd.errors import ArchiveAway, BadArgument, NeedsBatches, NotGranted
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.protocol.locks import Committed, HistoryPart, Mode
from waltzd.protocol.positions import Position
from waltzd.server.clients import pipeline as pipeline_module
from waltzd.server.clients.pipeline import Pipeline
from waltzd.testing import BlockingCluster, LocalCluster
from waltzd.testing.ports import ServerPort


def with_cluster(story: Callable[[LocalCluster, Client], Coroutine[Any, Any, None]], **size: Any) -> None:
    async def whole() -> None:
        async with LocalCluster(**size) as cluster, cluster.client() as client:
            await story(cluster, client)

    timeless.run(whole())


@asynccontextmanager
async def marked(client: Client, count: int, chance: random.Random) -> AsyncIterator[dict[Lock, list[int]]]:
    """Append transactions with drawn locks; yield the ids that marked each lock."""
    locks = [Lock("account", n, mode) for n in range(5) for mode in Mode]
    right: dict[Lock, list[int]] = {Lock("account", n): [] for n in range(6)}
    for number in range(count):
        own = [lock for lock in locks if chance.random() < 0.2]
        outcome = await client.append(b"%d" % number, partition=1, locks=own, position=number - 1)
        assert isinstance(outcome, Committed)
        for n in {lock.id for lock in own if lock.mode is not Mode.READ}:
            right[Lock("account", n)].append(outcome.id)
    yield right


def test_a_history_is_all_and_only_what_marked_the_lock() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        async with marked(client, 60, random.Random(3)) as right:
            for lock, ids in right.items():
                found = await client.history(lock, partition=1)
                assert (found.ids, found.end, found.has_more) == (tuple(ids), 59, False)
                assert await client.last(lock, partition=1) == (ids[-1] if ids else None)
                assert await client.last(lock, partition=1, through=29) == max(
                    (id_ for id_ in ids if id_ < 30), default=None
                )
                back = await client.history(lock.hash, partition=1, newest_first=True, limit=2, after=4, confirmed=False)
                wanted = [id_ for id_ in ids if id_ > 4][::-1]
                assert (back.ids, back.has_more) == (tuple(wanted[:2]), len(wanted) > 2)
                texts = [transaction.payload for transaction in await client.read_ids(1, found.ids[::-1])]
                assert texts == [b"%d" % id_ for id_ in reversed(found.ids)]

    with_cluster(story, partitions=2)


def test_a_history_is_known_to_the_next_owner() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        async with marked(client, 10, random.Random(4)) as right:
            await cluster.kill_owner(1)
            for lock, ids in right.items():
                assert (await client.history(lock, partition=1)).ids == tuple(ids)

    with_cluster(story, partitions=2)


def test_the_end_of_a_history_is_a_position_for_the_next_append() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        lock = write_lock("seat", 7)
        seen = await client.history(lock)
        first = await client.append(b"mine", partition=seen.partition, locks=[lock], position=seen.end)
        second = await client.append(b"too", partition=seen.partition, locks=[lock], position=seen.end)
        assert (type(first).__name__, type(second).__name__) == ("Committed", "Rejected")
        assert (await client.history(lock)).ids == (0,)

    with_cluster(story, partitions=3)


def test_a_partition_follows_from_the_name_of_a_lock() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        outcome = await client.append(b"x", locks=[append_lock("order", "a-7")])
        assert isinstance(outcome, Committed)
        found = await client.history(read_lock("order", "a-7"))
        assert (found.partition, found.ids) == (outcome.partition, (outcome.id,))
        subjects: list[Any] = [
            {"lock": 7},
            {"lock": "order"},
            {"lock": -1, "partition": 0},
            {"lock": 1 << 64, "partition": 0},
        ]
        for arguments in subjects:
            with pytest.raises(BadArgument):
                await client.history(**arguments)
        bounds: list[Any] = [{"limit": 0}, {"limit": 10_001}, {"after": -2}, {"through": -2}, {"partition": 9}]
        for wrong in bounds:
            with pytest.raises(BadArgument):
                await client.history(read_lock("order", 7), **wrong)

    with_cluster(story)


def test_format_0_keeps_no_locks() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        await client.append(b"x", partition=0, locks=[append_lock("order", 7)])
        with pytest.raises(NeedsBatches):
            await client.history(write_lock("order", 7), partition=0)

    with_cluster(story, format=0)


def test_a_history_needs_the_right_to_read() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        cluster.set_policy([{"names": ["writer"], "may": ["append"], "partitions": "0-3"}])
        async with cluster.client(name="writer", partitions=()) as writer:
            with pytest.raises(NotGranted):
                await writer.history(write_lock("order", 7), partition=0)

    with_cluster(story)


def test_blocking_twins() -> None:
    lock = append_lock("order", 7)
    with BlockingCluster() as cluster, cluster.client() as client:
        outcome = client.append(b"x", locks=[lock])
        assert isinstance(outcome, Committed)
        found = client.history(lock)
        assert (found.ids, client.last(lock)) == ((outcome.id,), outcome.id)
        assert [one.payload for one in client.read_ids(found.partition, found.ids)] == [b"x"]


def part_of(partition: int, ids: tuple[int, ...], end: Position, through: int | None) -> HistoryPart:
    return HistoryPart(history=History(partition=partition, ids=ids, end=end), through=through)


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_client_asks_on_where_an_answer_ends(newest_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner looks at two ids at a time, and the archive is away at each second question."""
    right, calls = Pipeline.find_marks, list[LockQuery]()

    async def find_marks(self: Pipeline, query: LockQuery, **named: Any) -> tuple[LockMarks, int]:
        calls.append(query)
        if len(calls) % 2 == 0:
            raise ArchiveAway("it is away")
        end = min(self.committed, query.last_id)
        part = query.within(end - 1, end) if newest_first else query.within(0, query.first_id + 1)
        found, _ = await right(self, part, **named)
        return found, end

    async def story(cluster: LocalCluster, client: Client) -> None:
        async with marked(client, 20, random.Random(5)) as marks:
            monkeypatch.setattr(Pipeline, "find_marks", find_marks)
            for lock, ids in marks.items():
                ids = ids[::-1] if newest_first else ids
                for limit in (1, 2, len(ids) or 1, 1000):
                    found = await client.history(lock, partition=1, newest_first=newest_first, limit=limit)
                    assert (found.ids, found.end, found.has_more) == (tuple(ids[:limit]), 19, len(ids) > limit)

    with_cluster(story, partitions=2)


def test_an_answer_in_parts_is_of_one_timeline_and_of_the_newest_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    end, forked = Position(9), Position(9, UUID(int=5))
    answers = [
        part_of(1, (1, 2), end, 4),
        part_of(1, (), Position(6), None),  # of an owner that was replaced: asked again
        part_of(1, (6,), forked, 7),  # the log was forked: all of it is asked again
        part_of(1, (1,), forked, 5),
        part_of(1, (8,), forked, None),
    ]
    asked: list[tuple[int, int | None, bool]] = []

    async def history(self: Any, partition: int, lock: int, **named: Any) -> HistoryPart:
        asked.append((named["after"], named["before"], named["confirmed"]))
        return answers.pop(0)

    async def story(cluster: LocalCluster, client: Client) -> None:
        monkeypatch.setattr(ServerPort, "history", history)
        found = await client.history(write_lock("order", 1), partition=1)
        assert (found.ids, found.end, found.end.timeline) == ((1, 8), 9, UUID(int=5))
        assert asked == [(-1, None, True), (4, 10, False), (4, 10, False), (-1, None, True), (5, 10, False)]

    with_cluster(story, partitions=2)


def test_an_owner_answers_what_it_has_when_the_archive_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        async with marked(client, 20, random.Random(6)) as marks:
            pipeline = next(pipeline for pipeline in pipelines_of(cluster) if pipeline.committed == 19)
            right = pipeline.session.find_marks
            hangs = 0.0

            async def find_marks(query: LockQuery, turns: asyncio.Semaphore) -> LockMarks:
                if query.first_id >= 10:
                    await asyncio.sleep(hangs)
                    raise ArchiveAway("it is away")
                return await right(query.within(0, 9), turns)

            monkeypatch.setattr(pipeline.session, "find_marks", find_marks)
            monkeypatch.setattr(pipeline, "_find_recent", lambda query: None)
            monkeypatch.setattr(pipeline_module, "HISTORY_SECONDS", 0.01)
            lock, ids = next(iter(marks.items()))
            for seconds in (0, 1000):
                hangs = seconds
                found, end = await pipeline.find_marks(LockQuery(lock=lock.hash, last_id=50, limit=100))
                assert (found.ids, found.through, end) == (tuple(id_ for id_ in ids if id_ < 10), 9, 19)
            hangs = 0
            with pytest.raises(ArchiveAway):
                await pipeline.find_marks(LockQuery(lock=lock.hash, first_id=10, last_id=50, limit=100))

    with_cluster(story, partitions=2)


def pipelines_of(cluster: LocalCluster) -> list[Pipeline]:
    return [owned._pipeline for server in cluster._living() for owned in server.owned_logs if owned._pipeline is not None]
