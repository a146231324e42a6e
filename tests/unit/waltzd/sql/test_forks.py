"""A view whose log an operator ends: what goes over, what is refused, and how it is mended; compared with lists."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tests.tiers import tiers
from waltzd import Token, Transaction
from waltzd.client.delivery import Delivery
from waltzd.client.follower import Follower, call_here
from waltzd.client.view import Decision
from waltzd.errors import (
    ApplyFailed,
    BadArgument,
    DatabaseUnavailable,
    InboxPruned,
    NotApplied,
    OtherTimeline,
    ViewBehind,
    ViewStopped,
    WaltzError,
)
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, Lineage
from waltzd.sql import SqlInbox, SqlView, sqlite
from waltzd.sql.view import Part
from waltzd.testing import BlockingCluster, LocalCluster

CLUSTER = UUID(int=7)
TABLES = sa.MetaData()
ROWS = sa.Table("events", TABLES, sa.Column("id", sa.BigInteger, primary_key=True), sa.Column("text", sa.Text))


class Log:
    """A log and its timelines, as what a feed would give of it."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.lineage = NEVER_FORKED

    def grow(self, count: int) -> None:
        at = len(self.rows)
        self.rows += [b"%d in %d" % (id, self.lineage.number) for id in range(at, at + count)]

    def fork(self, mark: int) -> None:
        del self.rows[mark + 1 :]
        number = self.lineage.number
        self.lineage = self.lineage.forked(
            identity=UUID(int=number + 1), fork=mark, session=number, cause="a test", began="", who=""
        )

    def feed(self, first: int, last: int | None = None, lineage: Lineage | None = None) -> list[Transaction]:
        rows = self.rows[first : len(self.rows) if last is None else last + 1]
        lineage = lineage or self.lineage
        return [
            Transaction(
                0, id, 0, len(row), 0, (1, 1, id), row, None, None, lineage=lineage, timeline=lineage.current
            )
            for id, row in enumerate(rows, first)
        ]  # fmt: skip


def insert(connection: Connection, given: Transaction) -> None:
    connection.execute(sa.insert(ROWS).values(id=given.id, text=given.payload.decode()))


def cut(fork: int) -> Any:
    return lambda connection: connection.execute(sa.delete(ROWS).where(ROWS.c.id > fork))


def content(engine: Engine) -> list[bytes]:
    with engine.connect() as connection:
        rows = connection.execute(sa.select(ROWS.c.id, ROWS.c.text).order_by(ROWS.c.id)).all()
    assert [id for id, _ in rows] == list(range(len(rows)))
    return [text.encode() for _, text in rows]


def view_of(engine: Engine, **settings: Any) -> SqlView:
    view = SqlView(engine, insert, tables=TABLES, **settings)
    view._prepare(CLUSTER)
    view.read_position(0)
    return view


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = sqlite(str(tmp_path / "view.db"))
    yield engine
    engine.dispose()


def test_up_to_the_fork_a_view_goes_over_and_above_it_says_what_to_do(engine: Engine) -> None:
    log, view = Log(), view_of(engine)
    log.grow(20)
    view.apply_all(log.feed(0))
    assert view.read_position(0).timeline == FIRST
    log.fork(19)
    log.grow(10)
    view.apply_all(log.feed(20))
    position = view.read_position(0)
    assert (position, position.timeline, content(engine)) == (29, log.lineage.current, log.rows)
    before = content(engine)
    log.fork(24)
    log.grow(20)
    with pytest.raises(OtherTimeline, match=r"'view' stands at id 29 .* behind id 24") as refused:
        view.apply_all(log.feed(30))
    assert "view.reset(0, 24" in " ".join(refused.value.lines())
    assert asyncio.run(view.failed(log.feed(30)[0], refused.value)) is Decision.STOP
    with pytest.raises(BadArgument):
        view.reset_blocking(0, 30)

    def fail(connection: Connection) -> None:
        cut(24)(connection)
        raise LookupError("it cannot be told what to take back")

    with pytest.raises(LookupError):
        view.reset_blocking(0, 24, undo=fail)
    assert (view.read_position(0), view.read_position(0).timeline) == (29, position.timeline)
    assert content(engine) == before, "an undo that fails takes nothing back"
    view.reset_blocking(0, 24, undo=cut(24))
    view.apply_all(log.feed(25))
    assert content(engine) == log.rows


def test_who_waits_for_what_was_given_up_is_told(engine: Engine) -> None:
    log, view = Log(), view_of(engine)
    log.grow(20)
    view.apply_all(log.feed(0, 9))
    log.fork(14)
    log.grow(10)
    view.wait_blocking(Token(0, 9))
    with pytest.raises(NotApplied):
        view.wait_blocking(Token(0, 5, log.lineage.current), timeout=0.05)  # it does not know that timeline yet
    view.apply_all(log.feed(10))
    view.wait_blocking(Token(0, 20, log.lineage.current))
    view.wait_blocking(20, partition=0)
    view.wait_blocking(Token(0, 14))
    for token in (Token(0, 15), Position(20, FIRST)):
        with pytest.raises(OtherTimeline):
            view.wait_blocking(token, partition=0)


def test_a_process_that_was_fed_before_the_fork_neither_writes_above_it_nor_stands_in_the_way(engine: Engine) -> None:
    log, old, new = Log(), view_of(engine), view_of(engine)
    log.grow(20)
    before = log.feed(0)
    old.apply_all(before[:5])
    log.fork(9)
    log.grow(10)
    after = log.feed(0)
    new.apply_all(after[5:8])
    old.apply_all(before[5:10])
    with pytest.raises(OtherTimeline):
        old.apply_all(before[10:])
    new.apply_all(after[8:])
    assert content(engine) == log.rows


def test_a_table_of_an_earlier_version_gets_the_column(engine: Engine) -> None:
    view_of(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE waltz_positions DROP COLUMN timeline")
        connection.exec_driver_sql("UPDATE waltz_positions SET position = 11")
    views = [view_of(engine) for _ in range(2)]
    assert [view.read_position(0) for view in views] == [11, 11]
    log = Log()
    log.grow(12)
    log.fork(10)
    log.grow(5)
    with pytest.raises(OtherTimeline):
        views[0].apply_all(log.feed(12))


@pytest.mark.parametrize("seed", tiers(range(60), quick=4, short=20))
def test_whatever_forks_a_view_is_the_log_or_is_refused(tmp_path: Path, seed: int) -> None:
    chance, log = random.Random(seed), Log()
    engine = sqlite(str(tmp_path / "view.db"))
    views = [view_of(engine, batch_max=chance.choice((1, 3, 500))) for _ in range(2)]
    fed: list[list[Transaction]] = [[], []]
    refused = 0
    for _ in range(40):
        what, which = chance.random(), chance.randrange(2)
        if what < 0.3:
            log.grow(chance.randrange(6))
        elif what < 0.4 and log.lineage.number < 6:
            log.fork(chance.randint(-1, len(log.rows) - 1))
        elif what < 0.6:  # a process is fed now, and applies it later
            fed[which] = log.feed(chance.randint(0, len(content(engine))))
        else:
            part, fed[which] = fed[which] or log.feed(len(content(engine))), []
            try:
                views[which].apply_all(part)
            except OtherTimeline:
                refused += 1
                position = views[which].read_position(0)
                if log.lineage.covers(position.timeline, position):
                    assert not log.lineage.covers(part[-1].timeline, part[-1].id), "one of both is not in the log"
                else:
                    shared = log.lineage.shared_to(position.timeline)
                    assert shared is not None
                    assert content(engine)[: shared + 1] == log.rows[: shared + 1]
                    views[which].reset_blocking(0, shared, undo=cut(shared))
            except ViewBehind:
                assert part[0].id > len(content(engine)), "it was fed before the view was reset"
        position = views[0].read_position(0)
        assert position == len(content(engine)) - 1
        if position >= 0 and log.lineage.covers(position.timeline, position):
            assert content(engine) == log.rows[: position + 1]
    engine.dispose()


# -- a cluster whose log is ended


@pytest.mark.parametrize("reached", [3, 5, 9])
def test_a_view_of_a_cluster_whose_log_is_ended_behind_id_5(engine: Engine, reached: int) -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client(partitions=[0]) as client:
            for id in range(reached + 1):  # one by one: what was written together is kept together
                await client.append(b"%d" % id, partition=0)
            view = SqlView(engine, insert, tables=TABLES)
            async with cluster.client(view=view, partitions=[0]):
                await view.wait(reached, partition=0)
            for id in range(reached + 1, 10):
                await client.append(b"%d" % id, partition=0)
        timeline = await cluster.rescue(0, 5)
        async with cluster.client(partitions=[0]) as client:
            await client.append_many([b"another %d" % id for id in range(6, 12)], partition=0)
        if reached > 5:
            before, view = content(engine), SqlView(engine, insert, tables=TABLES)
            async with cluster.client(view=view, partitions=[0]) as client:
                with pytest.raises(OtherTimeline, match=f"stands at id {reached} .* behind id 5") as refused:
                    await client.wait_stopped(timeout=30)
                assert "set the view back to the fork" in refused.value.detail_next_step
                assert refused.value.number("fork") == 5
                assert (await view.position(0), content(engine)) == (reached, before)
            await view.reset(0, 5, undo=cut(5))
        view = SqlView(engine, insert, tables=TABLES)
        async with cluster.client(view=view, partitions=[0]):
            await view.wait(Position(11, timeline), partition=0, timeout=30)
        assert content(engine) == [*(b"%d" % id for id in range(6)), *(b"another %d" % id for id in range(6, 12))]

    LocalCluster().run(story)


@pytest.mark.parametrize("batch_max", [5, 7, 10, 500])
def test_what_was_fed_above_the_fork_is_not_taken_for_what_another_process_applied(engine: Engine, batch_max: int) -> None:
    log, new = Log(), view_of(engine)
    log.grow(20)
    before = log.feed(0)
    old = view_of(engine, batch_max=batch_max)
    log.fork(9)
    log.grow(20)
    new.apply_all(log.feed(0))
    with pytest.raises(OtherTimeline):
        old.apply_all(before)
    assert content(engine) == log.rows


def test_a_process_that_was_fed_before_the_fork_does_not_take_an_empty_view_back(engine: Engine) -> None:
    log, old = Log(), view_of(engine)
    log.grow(20)
    before = log.feed(0)
    log.fork(9)
    log.grow(20)
    empty = view_of(engine)

    def fail(connection: Connection, given: Part) -> None:
        raise DatabaseUnavailable("it moves the view to the new timeline, and dies")

    with mock.patch.object(empty, "_call_application", fail), pytest.raises(DatabaseUnavailable):
        empty.apply_all(log.feed(0))
    position = old.read_position(0)
    assert (position, position.timeline) == (-1, log.lineage.current)
    with pytest.raises(OtherTimeline):
        old.apply_all(before)
    old.apply_all(before[:10])
    view_of(engine).apply_all(log.feed(10))
    assert content(engine) == log.rows


def test_a_view_that_another_process_moves_to_the_new_timeline_between_two_tries_goes_on(engine: Engine) -> None:
    log, old, new = Log(), view_of(engine), view_of(engine)
    log.grow(20)
    before = log.feed(5, 9)
    new.apply_all(log.feed(0, 4))
    log.fork(9)
    log.grow(20)
    after, failures = log.feed(5), list[int]()

    def fail_once(connection: Connection, given: Part) -> None:
        if not failures:
            failures.append(given[0].id)
            raise ApplyFailed("it is tried one by one from now on", partition=0, id=9)
        call(connection, given)

    def moved(part: Part) -> int:
        if failures and not old._lineages:
            kept = new._read(0)
            new._positions.go_over(0, kept, log.lineage)
        return apply_part(part)

    call, apply_part = old._call_application, old._apply_part
    with mock.patch.object(old, "_call_application", fail_once), mock.patch.object(old, "_apply_part", moved):
        old.apply_all(before)
    new.apply_all(after[5:])
    assert content(engine) == log.rows


def test_an_inbox_of_a_group_whose_log_is_ended_behind_id_5(engine: Engine) -> None:
    """The group has kept no acknowledgement, so it gives all ids out again, and the inbox tells the new ones apart."""
    done: list[bytes] = []

    def take(cluster: BlockingCluster, ids: Iterable[int]) -> None:
        with cluster.client() as client, client.subscribe("mailer") as subscription:
            for id, delivery in zip(ids, subscription, strict=False):
                assert delivery.id == id
                with inbox.once_blocking(delivery) as connection:
                    if connection is not None:
                        done.append(delivery.payload)

    with BlockingCluster() as cluster:
        inbox = SqlInbox(engine, "mailer")
        with cluster.client() as client:
            client.create_group("mailer", mode="queue", partitions=[0])
            for id in range(10):
                client.append(b"%d" % id, partition=0)
        take(cluster, range(10))
        cluster.rescue(0, 5)
        with cluster.client() as client:
            client.append_many([b"another %d" % id for id in range(6, 10)], partition=0)
        with pytest.raises(OtherTimeline, match=r"'mailer' stands at id 6 .* behind id 5") as refused:
            take(cluster, range(10))
        assert f"inbox.forget(0, after=5, timeline=UUID('{FIRST}'))" in refused.value.detail_next_step
        before = [*done]
        inbox.forget(0, after=5, timeline=FIRST)
        assert [inbox.is_done(0, id) for id in (5, 6, 9)] == [True, False, False]
        take(cluster, range(10))
        inbox.close_blocking()
    assert before == [b"%d" % id for id in range(10)]
    assert done[10:] == [b"another %d" % id for id in range(6, 10)]


def test_a_handler_that_is_overtaken_after_a_fork_does_not_end_the_others(engine: Engine) -> None:
    """It has a delivery of the stream before the rescue, and the inbox has the transaction from the stream behind it."""

    async def story() -> None:
        done, begun, may_go_on = list[int](), asyncio.Event(), asyncio.Event()
        inbox = SqlInbox(engine, "mailer")
        work = inbox.handler(lambda connection, delivery: done.append(delivery.id))

        async def handler(delivery: Delivery[Any]) -> None:
            if delivery.lineage == NEVER_FORKED:
                begun.set()
                await may_go_on.wait()
            await work(delivery)

        async def until_done(*ids: int) -> None:
            while done != [*ids]:
                assert not handling.done(), handling.exception()
                await asyncio.sleep(0.01)

        async with asyncio.timeout(60), LocalCluster() as cluster, cluster.client() as client:
            await client.create_group("mailer", mode="queue", partitions=[0])
            await client.append(b"0", partition=0)
            mailer = client.handle("mailer", handler, concurrency=2)
            handling = asyncio.create_task(mailer.run())
            await begun.wait()
            await cluster.rescue(0, 0)
            await until_done(0)
            may_go_on.set()
            await asyncio.sleep(0.1)
            await client.append(b"1", partition=0)
            await until_done(0, 1)
            mailer.stop()
            await handling
        await inbox.close()

    asyncio.run(story())


def test_a_handler_whose_inbox_has_what_is_gone_ends(engine: Engine) -> None:
    async def story() -> None:
        inbox, done = SqlInbox(engine, "mailer"), list[int]()
        async with asyncio.timeout(60), LocalCluster() as cluster, cluster.client() as client:
            await client.create_group("mailer", mode="queue", partitions=[0])
            for payload in (b"0", b"1"):
                await client.append(payload, partition=0)
            gone = Handed(1, NEVER_FORKED)
            gone.cluster = client.cluster_key
            inbox.handler_blocking(lambda connection, delivery: None)(gone)
            await cluster.rescue(0, 0)
            async with cluster.client() as other:
                await other.append(b"another", partition=0)
            with pytest.raises(OtherTimeline, match=r"'mailer' stands at id 1 .* behind id 0"):
                await client.handle("mailer", inbox.handler(lambda connection, delivery: done.append(delivery.id)))
        await inbox.close()
        assert done == [0]

    asyncio.run(story())


class Handed:
    """A delivery, as far as an inbox looks at it."""

    cluster, group, partition = CLUSTER, "mailer", 0

    def __init__(self, id: int, lineage: Lineage) -> None:
        self.id, self.lineage = id, lineage


def test_an_inbox_of_an_earlier_version_gets_its_columns(engine: Engine) -> None:
    inbox, done = SqlInbox(engine, "mailer"), list[int]()
    do = inbox.handler_blocking(lambda connection, delivery: done.append(delivery.id))
    for id in range(30):
        do(Handed(id, NEVER_FORKED))
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE waltz_inbox_done DROP COLUMN timeline")
    log = Log()
    log.grow(30)
    log.fork(19)
    again = SqlInbox(engine, "mailer")
    again_do = again.handler_blocking(lambda connection, delivery: done.append(delivery.id))
    again_do(Handed(19, log.lineage))
    with pytest.raises(OtherTimeline, match="'mailer' stands at id 20") as refused:
        again_do(Handed(20, log.lineage))
    assert f"inbox.forget(0, after=19, timeline=UUID('{FIRST}'))" in " ".join(refused.value.lines())
    assert done == [*range(30)]
    again.forget(0, after=19, timeline=FIRST)
    again_do(Handed(20, log.lineage))
    assert done == [*range(30), 20]


@pytest.mark.parametrize("seed", tiers(range(60), quick=4, short=20))
def test_an_inbox_does_each_transaction_once_whatever_forks(engine: Engine, seed: int) -> None:
    """Compared with a set of what was done, by content: an id names another transaction in another timeline."""
    chance, log, done = random.Random(seed), Log(), list[bytes]()
    inboxes = [SqlInbox(engine, "mailer") for _ in range(2)]
    for _ in range(150):
        what, inbox = chance.random(), inboxes[chance.randrange(2)]
        if what < 0.2 or not log.rows:
            log.grow(chance.randrange(1, 4))
        elif what < 0.25 and log.lineage.number < 6:
            log.fork(chance.randint(-1, len(log.rows) - 1))
        elif what < 0.3:
            inbox.prepare(CLUSTER)
            inbox.prune(0, chance.randrange(len(log.rows)) // 2)
        else:
            id, lineage = chance.randrange(len(log.rows)), log.lineage
            row = log.rows[id]
            try:
                with inbox.once_blocking(Handed(id, lineage)) as connection:
                    if connection is not None:
                        done.append(row)
            except InboxPruned:
                if row not in done:
                    inbox.forget(0, after=id - 1, through=id)
            except OtherTimeline as error:
                assert row not in done
                (timeline,) = [
                    one for one in (FIRST, *(one.identity for one in lineage.later)) if str(one) in error.lines()[-1]
                ]
                inbox.forget(0, after=lineage.shared_to(timeline) or 0, timeline=timeline)
            else:
                assert done.count(row) == 1
    assert len({*done}) == len(done)


# -- what a client hands to a view


def follow(view: SqlView, position: int, fed: list[Transaction]) -> tuple[Follower, WaltzError | None]:
    """Hand what was fed to a view behind this position, until it stops there, fails or has applied all."""

    async def story() -> tuple[Follower, WaltzError | None]:
        follower = Follower(0, view, call=call_here, batch_max=1000, consumed=lambda size: None)
        follower.put(1, lambda: fed, False)
        running = asyncio.create_task(follower.run(position))
        async with asyncio.timeout(20):
            while (
                not running.done()
                and follower.applied < fed[-1].id
                and (follower.failing is None or follower.failing.tries < 2)
            ):
                await asyncio.sleep(0.01)
        follower.stop()
        try:
            await running
        except ViewStopped as error:
            return follower, error
        return follower, None

    return asyncio.run(story())


def test_a_client_does_not_take_a_view_on_another_timeline_for_one_that_is_further(engine: Engine) -> None:
    log, old, new = Log(), view_of(engine), view_of(engine)
    log.grow(20)
    old.apply_all(log.feed(0))  # another process, which was fed before the fork
    log.fork(9)
    log.grow(20)
    follower, stopped = follow(new, 4, log.feed(5, 15))
    assert (follower.applied, stopped is not None and type(stopped.__cause__)) == (4, OtherTimeline)


def test_a_client_that_was_fed_before_a_fork_waits_until_it_is_told(engine: Engine) -> None:
    log, old, new = Log(), view_of(engine), view_of(engine)
    log.grow(20)
    before = log.feed(5)
    log.fork(9)
    log.grow(20)
    new.apply_all(log.feed(0))
    follower, stopped = follow(old, 4, before)
    assert (follower.applied, stopped) == (9, None)
    assert content(engine) == log.rows


def test_a_client_stops_in_front_of_a_database_that_went_back(engine: Engine) -> None:
    log, view = Log(), view_of(engine)
    log.grow(20)
    view.apply_all(log.feed(0, 9))
    view.reset_blocking(0, 4, undo=cut(4))
    follower, stopped = follow(view, 9, log.feed(10))
    assert (follower.applied, stopped is not None and type(stopped.__cause__)) == (9, ViewBehind)
