"""Reading transactions by groups of locks, from the client through owner and storages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.unit.waltzd.testing.test_history import pipelines_of, with_cluster
from waltzd import Client, Lock
from waltzd.cluster.groups import GroupMeta
from waltzd.errors import BadArgument, CannotConnect, ClientClosed, NeedsBatches, NotGranted, NotReady, OtherTimeline
from waltzd.errors.operations import TooManyCallers, WrongPeer
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.protocol.groups import Mode as GroupMode
from waltzd.protocol.locks import (
    HISTORY_IDS_MAX,
    Committed,
    MarkedPage,
    MarkedQuery,
    Mode,
    Rejected,
    append_lock,
    write_lock,
)
from waltzd.protocol.positions import Position
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients import pipeline as pipeline_module
from waltzd.server.clients.pipeline import ANSWERS_PARTS
from waltzd.server.clients.service import LogService
from waltzd.server.core import recent_marks
from waltzd.testing import LocalCluster
from waltzd.testing.ports import ServerPort
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import to_message
from waltzd.wire.servicer import Origin

LOCKS = [Lock("account", n).hash for n in range(5)]


async def append_marked(client: Client, count: int, chance: random.Random) -> list[set[int]]:
    """Append transactions with drawn locks; return which locks each marked."""
    log: list[set[int]] = []
    for number in range(count):
        own = [Lock("account", n, mode) for n in range(5) for mode in Mode if chance.random() < 0.25]
        outcome = await client.append(b"%d" % number, partition=1, locks=own, position=number - 1)
        assert isinstance(outcome, Committed)
        log.append({lock.hash for lock in own if lock.mode is not Mode.READ})
    return log


async def read(client: Client, groups: Sequence[Sequence[int]], **options: Any) -> tuple[list[tuple[int, bytes]], Position]:
    found: list[tuple[int, bytes]] = []
    arguments = {"after": -1, "limit": 1000, "timeout": 5.0, **options}
    ends: list[Position] = []
    pages = client._reader.marked(1, [tuple(group) for group in groups], **arguments)
    async with aclosing(pages):
        async for transactions, end in pages:
            assert len(transactions) <= arguments["limit"]
            found += transactions
            ends.append(end)
    assert ends == ends[:1] * len(ends)
    return found, ends[0]


def right(log: Sequence[set[int]], groups: Sequence[Sequence[int]], after: int, newest_first: bool) -> list[Any]:
    found = [
        (id_, b"%d" % id_) for id_, marks in enumerate(log) if id_ > after and any(marks >= set(group) for group in groups)
    ]
    return found[::-1] if newest_first else found


async def check_reads(client: Client, log: list[set[int]], chance: random.Random, *, is_old: bool = False) -> None:
    """`is_old`: whether the server is of an older version."""
    for turn in range(60):
        groups = [chance.sample(LOCKS, chance.randrange(1, 4)) for _ in range(chance.randrange(1, 4))]
        after, newest_first = chance.choice([-1, chance.randrange(len(log))]), turn % 2 == 0
        limit = chance.choice([1, 2, 5, 1000])
        found, end = await read(client, groups, after=after, limit=limit, newest_first=newest_first)
        assert end == len(log) - 1
        expected = right(log, groups, after, newest_first)
        if limit == 1000 and not is_old:
            assert found == expected
        else:
            loose = right(log, [[lock] for group in groups for lock in group], after, newest_first)
            assert [one for one in loose if one in found] == found, "in order, each once, and nothing of other locks"
            assert [one for one in found if one in expected] == expected


@pytest.mark.parametrize("tail", [0, 2000, 1 << 20])
def test_all_and_only_what_marked_the_locks_of_a_group(tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory, from storages, and from both: the log cache holds all, some or one batch, and so does the index."""
    monkeypatch.setattr(pipeline_module, "MARKED_BYTES_MAX", 300)
    monkeypatch.setattr(recent_marks, "BLOCK_MARKS", 8)
    monkeypatch.setattr(recent_marks, "BLOCKS_MAX", 3)

    async def story(cluster: LocalCluster, client: Client) -> None:
        chance = random.Random(tail)
        for pipeline in pipelines_of(cluster):
            pipeline.session.cache._bytes_max = tail
        log = await append_marked(client, 50, chance)
        await check_reads(client, log, chance)
        log += await append_marked_on(client, log, 10, chance)
        await check_reads(client, log, chance)
        assert await read(client, [[LOCKS[0]], [99]], after=59) == ([], 59)
        assert await read(client, [[99, LOCKS[0]]]) == ([], 59)

    with_cluster(story, partitions=2)


async def append_marked_on(client: Client, log: list[set[int]], count: int, chance: random.Random) -> list[set[int]]:
    more: list[set[int]] = []
    for number in range(len(log), len(log) + count):
        own = [append_lock("account", n) for n in range(5) if chance.random() < 0.5]
        outcome = await client.append(b"%d" % number, partition=1, locks=own, position=number - 1)
        assert isinstance(outcome, Committed)
        more.append({lock.hash for lock in own})
    return more


def test_what_is_in_memory_is_not_asked_of_a_storage() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        log = await append_marked(client, 20, random.Random(1))
        pipeline = next(one for one in pipelines_of(cluster) if one.committed == 19)

        async def find_marks(query: LockQuery, turns: asyncio.Semaphore) -> Any:
            raise AssertionError("a storage was asked")

        pipeline.session.find_marks = find_marks  # type: ignore[method-assign]
        assert (await read(client, [[LOCKS[0]]]))[0] == right(log, [[LOCKS[0]]], -1, False)
        assert (await client.history(LOCKS[0], partition=1)).ids == tuple(
            id_ for id_, _ in right(log, [[LOCKS[0]]], -1, False)
        )

    with_cluster(story, partitions=2)


def test_a_lock_that_nobody_has_marked_is_not_asked_of_a_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_marks, "BLOCK_MARKS", 4)
    monkeypatch.setattr(recent_marks, "BLOCKS_MAX", 1)

    async def story(cluster: LocalCluster, client: Client) -> None:
        log = await append_marked(client, 40, random.Random(3))
        pipeline = next(one for one in pipelines_of(cluster) if one.committed == 39)
        await read(client, [LOCKS])
        assert pipeline._recent.first_id > 0, "the index in memory begins later than the log"

        async def find_marks(query: LockQuery, turns: asyncio.Semaphore) -> Any:
            raise AssertionError("a storage was asked")

        pipeline.session.find_marks = find_marks  # type: ignore[method-assign]
        new = Lock("account", 99)
        for newest_first in (False, True):
            assert await read(client, [[new.hash]], newest_first=newest_first) == ([], 39)
        assert (await client.history(new, partition=1)).ids == ()
        for number in range(40, 50):  # more than the index holds
            await client.append(b"%d" % number, partition=1, locks=[new], position=number - 1)
            log.append({new.hash})
            assert (await read(client, [[new.hash]]))[0] == right(log, [[new.hash]], -1, False)
        assert (await client.history(new, partition=1)).ids == tuple(range(40, 50))

    with_cluster(story, partitions=2)


def test_the_next_owner_and_a_server_of_an_older_version_answer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch_marked(self: ServerPort, *_: Any, **__: Any) -> MarkedPage:
        raise WrongPeer("the other side does not know this call")

    async def story(cluster: LocalCluster, client: Client) -> None:
        chance = random.Random(7)
        log = await append_marked(client, 30, chance)
        await cluster.kill_owner(1)
        await check_reads(client, log, chance)
        monkeypatch.setattr(ServerPort, "fetch_marked", fetch_marked)
        await check_reads(client, log, chance, is_old=True)

    with_cluster(story, partitions=2)


def test_later_pages_are_of_the_same_log_and_of_the_newest_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, bool, Position | None]] = []
    behind = [False]

    right_call = ServerPort.fetch_marked

    async def fetch_marked(self: ServerPort, partition: int, query: MarkedQuery, **options: Any) -> MarkedPage:
        asked.append((query.first_id, query.last_id, options["confirmed"], options["since"]))
        page = await right_call(self, partition, query, **options)
        if len(asked) == 2:
            behind[0] = True
            return replace(page, end=Position(1), records=(), through=None)  # of an owner that was replaced
        return page

    async def story(cluster: LocalCluster, client: Client) -> None:
        for number in range(4):
            await client.append(b"%d" % number, partition=1, locks=[append_lock("order", 1)])
        monkeypatch.setattr(ServerPort, "fetch_marked", fetch_marked)
        found, end = await read(client, [[append_lock("order", 1).hash]], limit=2)
        assert ([id_ for id_, _ in found], end, behind) == ([0, 1, 2, 3], 3, [True])
        assert [(first, confirmed) for first, _, confirmed, _ in asked] == [(0, True), (2, False), (2, False)]
        assert [since for *_, since in asked] == [None, Position(3), Position(3)]
        with pytest.raises(OtherTimeline):
            await read(client, [[1]], since=Position(2, UUID(int=8)))

    with_cluster(story, partitions=2)


def test_a_question_waits_for_the_commit_of_an_id_that_was_given_out() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        lock = write_lock("seat", 7)
        assert isinstance(await client.append(b"0", partition=1, locks=[lock], position=-1), Committed)
        async with cluster.client(partitions=[1]) as other:
            for storage in (0, 1):
                cluster.pause_storage(storage)
            appending = asyncio.create_task(client.append(b"1", partition=1, locks=[lock], position=0))
            while not any(pipeline.last_id == 1 for pipeline in pipelines_of(cluster)):
                await asyncio.sleep(0)
            refused = await other.append(b"2", partition=1, locks=[lock], position=0)
        assert isinstance(refused, Rejected)
        assert refused.conflict_id == 1
        reading = asyncio.create_task(read(client, [[lock.hash]], reach=refused.conflict_id))
        await asyncio.sleep(0.05)
        assert not reading.done()
        for storage in (0, 1):
            cluster.resume_storage(storage)
        assert [id_ for id_, _ in (await reading)[0]] == [0, 1]
        assert isinstance(await appending, Committed)
        assert [id_ for id_, _ in (await read(client, [[lock.hash]], reach=99))[0]] == [0, 1], "no such id was given out"

    with_cluster(story, partitions=2)


def test_rights_and_bounds() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        wrongs: list[list[list[int]]] = [[], [[]], [[1], []], [[1] * 1001]]
        for wrong in wrongs:
            with pytest.raises(BadArgument):
                await read(client, wrong)
        for limit in (0, 1001):
            with pytest.raises(BadArgument):
                await read(client, [[1]], limit=limit)
        cluster.set_policy([{"names": ["writer"], "may": ["append"], "partitions": "0-3"}])
        async with cluster.client(name="writer", partitions=()) as writer:
            with pytest.raises(NotGranted):
                await read(writer, [[1]])

    with_cluster(story)


def test_format_0_keeps_no_locks() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        with pytest.raises(NeedsBatches):
            await read(client, [[1]])

    with_cluster(story, format=0)


def test_callers_share_a_question_and_each_answer_is_newer_than_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of ten callers asks at once, the others, which came while it asks, by a second question. A caller that goes
    away takes no other one with it."""
    right_call, asked = ServerPort.fetch_marked, list[MarkedQuery]()
    gate = asyncio.Event()

    async def fetch_marked(self: ServerPort, partition: int, query: MarkedQuery, **options: Any) -> MarkedPage:
        asked.append(query)
        page = await right_call(self, partition, query, **options)
        await gate.wait()
        return page

    async def story(cluster: LocalCluster, client: Client) -> None:
        lock = append_lock("order", 1)
        monkeypatch.setattr(ServerPort, "fetch_marked", fetch_marked)
        before = [asyncio.create_task(read(client, [[lock.hash]], timeout=None)) for _ in range(3)]
        while not asked:
            await asyncio.sleep(0)
        await client.append(b"0", partition=1, locks=[lock])
        after = [asyncio.create_task(read(client, [[lock.hash]], timeout=None)) for _ in range(7)]
        with pytest.raises(CannotConnect):
            await read(client, [[lock.hash]], timeout=0.01)
        before[0].cancel()
        gate.set()
        assert [ids for ids, _ in await asyncio.gather(*after)] == [[(0, b"0")]] * 7
        assert len(asked) == 2
        assert isinstance((await asyncio.gather(*before, return_exceptions=True))[0], asyncio.CancelledError)
        gate.clear()
        late = asyncio.create_task(read(client, [[lock.hash]], timeout=None))
        while len(asked) < 3:
            await asyncio.sleep(0)
        assert client._reader._questions
        client._reader.close()
        with pytest.raises(ClientClosed):
            await late
        assert not client._reader._questions

    with_cluster(story, partitions=2)


def test_a_small_limit_makes_no_small_steps_through_locks_that_seldom_meet() -> None:
    """Otherwise a question for one event with two tags would cost a call for each transaction that has one of them."""

    async def story(cluster: LocalCluster, client: Client) -> None:
        for number in range(100):
            own = [Lock("account", number % 2)] if number < 99 else [Lock("account", 0), Lock("account", 1)]
            await client.append(b"", partition=1, locks=[replace(lock, mode=Mode.APPEND) for lock in own])
        pages = 0
        found: list[tuple[int, bytes]] = []
        async with aclosing(client._reader.marked(1, [tuple(LOCKS[:2])], after=-1, limit=1, timeout=5.0)) as answers:
            async for transactions, _ in answers:
                pages += 1
                found += transactions
        assert (found, pages) == ([(99, b"")], 1)

    with_cluster(story)


def test_answers_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count until they have been sent, and against the name that asked."""
    monkeypatch.setattr(pipeline_module, "ANSWERS_BYTES_MAX", ANSWERS_PARTS * pipeline_module.MARKED_BYTES_MAX)
    monkeypatch.setattr(pipeline_module, "ANSWER_SECONDS", 0.05)

    async def story(cluster: LocalCluster, client: Client) -> None:
        await client.append(b"x", partition=1, locks=[Lock("account", 0)], position=-1)
        calls = cluster._running(cluster.owner(1)).calls
        query = MarkedQuery(groups=((LOCKS[0],),), first_id=0, limit=1)

        async def ask(name: str) -> tuple[MarkedPage, ExitStack]:
            sent = ExitStack()
            identity = Identity(cluster.meta.key, Role.CLIENT, name).uri
            return await calls.fetch_marked(cluster.meta.key, 1, query, identity=identity, sent=sent), sent

        page, sent = await ask("slow")
        assert len(page.records) == 1
        with pytest.raises(TooManyCallers, match="slow"):
            await ask("slow")
        (await ask("other"))[1].close()
        sent.close()
        for _ in range(3):
            (await ask("slow"))[1].close()
        cluster.set_policy([])
        with pytest.raises(NotGranted):
            await ask("slow")
        cluster.set_policy(None)
        (await ask("slow"))[1].close()

    with_cluster(story)


def test_histories_and_lists_of_parked_transactions_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that reads no answers had 128 of them on each of its connections in memory, of up to 90 KB each."""
    monkeypatch.setattr(pipeline_module, "ANSWERS_BYTES_MAX", ANSWERS_PARTS * pipeline_module.MARKED_BYTES_MAX)
    monkeypatch.setattr(pipeline_module, "ANSWER_SECONDS", 0.05)

    async def story(cluster: LocalCluster, client: Client) -> None:
        calls, key = cluster._running(cluster.owner(1)).calls, cluster.meta.key
        log = LogService(calls)
        await log.MakeGroup(
            wire.MakeGroupRequest(
                cluster_key=key.bytes,
                meta=to_message(wire.GroupMeta, GroupMeta(name="mailer", partitions=None, mode=GroupMode.QUEUE)),
            ),
            Origin(Identity(key, Role.CLIENT, "slow")),
        )

        async def ask(name: str, asked: str) -> ExitStack:
            origin = Origin(Identity(key, Role.CLIENT, name), sent=ExitStack())
            if asked == "history":
                await log.History(wire.HistoryRequest(cluster_key=key.bytes, partition=1, limit=HISTORY_IDS_MAX), origin)
            else:
                await log.Parked(wire.ParkedRequest(cluster_key=key.bytes, partition=1, name="mailer", count=1), origin)
            assert origin.sent is not None
            return origin.sent

        fits = {"history": pipeline_module.MARKED_BYTES_MAX // (9 * HISTORY_IDS_MAX), "parked": 1}
        for asked, count in fits.items():
            held = [await ask("slow", asked) for _ in range(count)]
            with pytest.raises(TooManyCallers, match="slow"):
                await ask("slow", asked)
            (await ask("other", asked)).close()
            for sent in held:
                sent.close()
            (await ask("slow", asked)).close()

    with_cluster(story)


def test_a_look_up_that_fails_ends_the_others_of_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each question that fails would leave its look-ups to a server that is in trouble."""

    async def story(cluster: LocalCluster, client: Client) -> None:
        await client.append(b"x", partition=1, locks=[Lock("account", 0)], position=-1)
        ended, never = list[int](), asyncio.Event()

        async def find_marks(query: LockQuery, turns: asyncio.Semaphore) -> LockMarks:
            if query.lock == LOCKS[0]:
                raise NotReady("no replica answers")
            try:
                await never.wait()
                raise AssertionError("nobody sets it")
            finally:
                ended.append(query.lock)

        for pipeline in [one for one in pipelines_of(cluster) if one.session.partition == 1]:
            monkeypatch.setattr(pipeline, "_find_in_memory", lambda query: None)
            monkeypatch.setattr(pipeline.session, "find_marks", find_marks)
            query = MarkedQuery(groups=tuple((lock,) for lock in LOCKS[::-1]), first_id=0, limit=1)
            with pytest.raises(NotReady):
                await pipeline.find_marked(query)
        async with asyncio.timeout(10):
            while len(ended) < len(LOCKS) - 1:
                await asyncio.sleep(0.001)

    with_cluster(story)


def test_many_readers_that_take_nothing_share_some_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had a chunk of 256 KiB, whatever their number: 900 of them took 630 MB."""
    monkeypatch.setattr(pipeline_module, "READS_BYTES_MAX", 128 << 10)
    monkeypatch.setattr(pipeline_module, "CHUNK_BYTES_MIN", 4 << 10)

    async def story(cluster: LocalCluster, client: Client) -> None:
        for number in range(200):
            await client.append(bytes([number]) * 1000, partition=1, locks=[], position=-1)
        calls = cluster._running(cluster.owner(1)).calls
        [capacity] = [one.capacity for one in pipelines_of(cluster) if one.session.partition == 1]
        readers, sizes = [], []
        for _ in range(40):
            reader = calls.fetch(cluster.meta.key, 1, 0, None)
            readers.append(reader)
            sizes.append(len((await anext(reader)).data))
        assert capacity.reads == 40
        assert 64 << 10 < sizes[0] <= 128 << 10
        assert max(sizes[-8:]) <= 5 << 10
        assert sum(sizes) < 5 * (128 << 10), "as many bytes as a harmonic sum gives"
        for reader in readers[1:]:
            await reader.aclose()
        assert capacity.reads == 1
        rest = [run async for run in readers[0]]
        assert capacity.reads == 0
        assert rest[-1].last_id == 199
        assert max(len(run.data) for run in rest) > 32 << 10, "one alone gets large chunks again"

    with_cluster(story)
