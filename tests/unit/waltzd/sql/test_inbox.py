"""What members have done in a database is done there once, whatever comes again, fails, or is folded in between."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

from waltzd.client.delivery import Reject
from waltzd.errors import (
    ApplyFailed,
    BadArgument,
    CannotConnect,
    DatabaseUnavailable,
    ForeignCluster,
    NotTransactional,
    OtherInbox,
    WaltzError,
)
from waltzd.protocol.timelines import Lineage
from waltzd.sql import SqlInbox, sqlite
from waltzd.sql.inbox import FOLD_EVERY, PAGE
from waltzd.testing import BlockingCluster, LocalCluster

CLUSTER, OTHER_CLUSTER = UUID(int=1), UUID(int=2)
TABLES = sa.MetaData()
MAILS = sa.Table("mails", TABLES, sa.Column("number", sa.Integer, primary_key=True), sa.Column("id", sa.BigInteger))


@dataclass
class Delivery:
    """As far as an inbox looks at one."""

    id: int
    partition: int = 0
    group: str = "mailer"
    cluster: UUID = CLUSTER
    lineage: Lineage | None = None
    acks: list[int] = field(default_factory=list)
    refusal: WaltzError | None = None

    async def ack(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.acks.append(self.id)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = sqlite(str(tmp_path / "mails.db"))
    yield engine
    engine.dispose()


def inbox_of(engine: Engine, **settings: object) -> SqlInbox:
    return SqlInbox(engine, "mailer", tables=TABLES, **settings)  # type: ignore[arg-type]


def send(connection: Connection, delivery: Delivery) -> None:
    connection.execute(sa.insert(MAILS).values(id=delivery.id))


def sent(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(MAILS.c.id).order_by(MAILS.c.id)))


def rows_and_pages(engine: Engine) -> tuple[int, int]:
    with engine.connect() as connection:
        counts = [
            connection.scalar(sa.text(f"SELECT count(*) FROM {table}"))
            for table in ("waltz_inbox_done", "waltz_inbox_pages")
        ]
    return counts[0], counts[1]


def failing(connection: Connection, delivery: Delivery) -> None:
    send(connection, delivery)
    raise LookupError("no such address")


# -- the plain story ---------------------------------------------------------------------------------------------------


def test_what_comes_again_is_acknowledged_and_not_done_again(engine: Engine) -> None:
    async def story() -> None:
        inbox, one = inbox_of(engine), Delivery(7)
        for is_new in (True, False):
            async with inbox.once(one) as connection:
                assert (connection is not None) is is_new
                if connection is not None:
                    send(connection, one)
                assert len(one.acks) == (0 if is_new else 1), "it is acknowledged behind the commit"
        assert one.acks == [7, 7]
        assert inbox.is_done(0, 7)
        assert not inbox.is_done(0, 8)
        assert not inbox.is_done(1, 7)
        await inbox.close()

    asyncio.run(story())
    assert sent(engine) == [7]


def test_what_failed_leaves_nothing_and_is_done_the_next_time(engine: Engine) -> None:
    async def story() -> None:
        inbox, one = inbox_of(engine), Delivery(7)

        async def fail() -> None:
            async with inbox.once(one) as connection:
                assert connection is not None
                failing(connection, one)

        with pytest.raises(LookupError):
            await fail()
        assert one.acks == []
        assert not inbox.is_done(0, 7)
        with pytest.raises(LookupError):
            await inbox.handler(failing)(one)
        await inbox.handler(send)(one)
        await inbox.close()

    asyncio.run(story())
    assert sent(engine) == [7]


def test_what_is_not_committed_is_not_acknowledged(engine: Engine) -> None:
    async def story() -> None:
        inbox, one = inbox_of(engine), Delivery(7)

        async def spoil() -> None:
            async with inbox.once(one) as connection:
                assert connection is not None
                send(connection, one)
                with suppress(ApplyFailed):
                    connection.rollback()

        with pytest.raises(ApplyFailed):
            await spoil()
        assert one.acks == []
        await inbox.close()

    asyncio.run(story())
    assert sent(engine) == []


def test_an_acknowledgement_that_comes_too_late_is_no_failure_of_what_is_done(engine: Engine) -> None:
    async def story() -> None:
        inbox, one = inbox_of(engine), Delivery(7, refusal=CannotConnect("the owner is away"))
        async with inbox.once(one) as connection:
            assert connection is not None
            send(connection, one)
        await inbox.close()

    asyncio.run(story())
    assert sent(engine) == [7]


def test_plain_code_has_the_same(engine: Engine) -> None:
    inbox = inbox_of(engine)
    for _ in range(2):
        with inbox.once_blocking(Delivery(1)) as connection:
            if connection is not None:
                send(connection, Delivery(1))
        inbox.handler_blocking(send)(Delivery(2))
    with pytest.raises(LookupError), inbox.once_blocking(Delivery(3)):
        raise LookupError
    inbox.close_blocking()
    assert sent(engine) == [1, 2]


def test_many_handlers_at_once_and_one_delivery_in_many_hands(engine: Engine) -> None:
    async def story() -> None:
        inbox = inbox_of(engine)
        handle = inbox.handler(send)
        await asyncio.gather(*[handle(Delivery(id)) for id in range(20) for _ in range(3)])
        await inbox.close()

    asyncio.run(story())
    assert sent(engine) == list(range(20))


def test_members_in_several_processes_share_one_inbox(engine: Engine) -> None:
    def work(inbox: SqlInbox) -> None:
        for id in range(40):
            inbox.handler_blocking(send)(Delivery(id))

    inboxes = [inbox_of(engine) for _ in range(3)]
    threads = [threading.Thread(target=work, args=(inbox,)) for inbox in inboxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sent(engine) == list(range(40))


def test_a_task_that_is_cancelled_while_it_begins_leaves_the_database_free(engine: Engine) -> None:
    async def story() -> None:
        inbox = inbox_of(engine)
        await inbox.handler(send)(Delivery(0))
        with engine.connect() as other:
            other.execute(sa.text("INSERT INTO mails (id) VALUES (100)"))  # the only writer of the file

            async def wait() -> None:
                async with inbox.once(Delivery(1)):
                    raise AssertionError

            waiting = asyncio.create_task(wait())
            while inbox._threads._work_queue.qsize() or not waiting.done():
                await asyncio.sleep(0.01)
                waiting.cancel()
            other.rollback()
        await inbox.handler(send)(Delivery(1))
        await inbox.close()

    asyncio.run(story())
    assert sent(engine) == [0, 1]


# -- folding -----------------------------------------------------------------------------------------------------------


def test_folding_changes_nothing_that_anybody_sees(engine: Engine) -> None:
    """Against a set."""
    inbox, twin, random_ = inbox_of(engine), set[tuple[int, int]](), random.Random(5)
    with engine.begin() as connection:
        inbox.prepare(CLUSTER)
        assert sa.inspect(connection).has_table("mails")
    near = [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 5 * PAGE + 3, (1 << 62)]
    for _ in range(400):
        partition, id = random_.randrange(2), random_.choice(near) + random_.randrange(3)
        did: list[int] = []
        inbox.handler_blocking(lambda _, delivery, did=did: did.append(delivery.id))(Delivery(id, partition))  # type: ignore[misc]
        assert bool(did) is ((partition, id) not in twin)
        twin.add((partition, id))
        match random_.randrange(20):
            case 0 | 1:
                inbox.fold(partition)
            case 2:
                first, last = sorted(random_.choice(near) for _ in range(2))
                inbox.forget(partition, first, last)
                twin -= {(one, id) for one, id in twin if one == partition and first <= id <= last}
    for partition in range(2):
        for id in {base + more for base in near for more in range(-2, 5) if base + more >= 0}:
            assert inbox.is_done(partition, id) is ((partition, id) in twin)


def test_what_is_kept_does_not_grow_with_what_was_done(engine: Engine) -> None:
    inbox = inbox_of(engine)
    inbox.prepare(CLUSTER)
    with engine.begin() as connection:
        rows = [{"inbox_name": "mailer", "partition_id": 0, "id": id} for id in range(3 * PAGE) if id != PAGE + 5]
        connection.execute(sa.insert(inbox._done._rows), rows)
    inbox.handler_blocking(send)(Delivery(0))  # it was done
    assert rows_and_pages(engine) == (3 * PAGE - 1, 0)
    inbox.handler_blocking(send)(Delivery(3 * PAGE))  # the first that is done by this process: what others left is folded
    assert rows_and_pages(engine) == (0, 4)
    with engine.connect() as connection:
        sizes = connection.scalars(sa.text("SELECT length(bits) FROM waltz_inbox_pages ORDER BY page")).all()
    assert sizes == [0, PAGE // 8, 0, PAGE // 8], "a page of which all is done is empty"
    inbox.handler_blocking(send)(Delivery(PAGE + 5))
    inbox.fold(0)
    inbox.handler_blocking(send)(Delivery(PAGE + 5))
    assert sent(engine) == [PAGE + 5, 3 * PAGE]


def test_it_folds_by_itself_now_and_then(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzd.sql.inbox.FOLD_EVERY", 5)
    inbox = inbox_of(engine)
    most = 0
    for id in range(40):
        inbox.handler_blocking(send)(Delivery(id))
        most = max(most, rows_and_pages(engine)[0])
    assert most == 4
    assert FOLD_EVERY == 1000
    assert sent(engine) == list(range(40))


def test_a_fold_that_is_refused_fails_no_delivery(engine: Engine) -> None:
    inbox = inbox_of(engine)
    inbox.prepare(CLUSTER)
    with engine.begin() as connection:
        connection.execute(
            sa.text("CREATE TRIGGER full BEFORE INSERT ON waltz_inbox_pages BEGIN SELECT RAISE(ABORT, 'no space'); END")
        )

    @event.listens_for(engine, "handle_error")
    def as_a_full_disk(context: sa.engine.ExceptionContext) -> None:
        if "waltz_inbox_pages" in str(context.statement) and isinstance(context.sqlalchemy_exception, sa.exc.DBAPIError):
            raise sa.exc.OperationalError(context.statement, None, context.original_exception)

    inbox.handler_blocking(send)(Delivery(1))
    assert sent(engine) == [1]
    assert inbox.is_done(0, 1)


def test_only_one_changes_bits_at_a_time(tmp_path: Path) -> None:
    """Two that have read the same page would each write it back without what the other has put in."""
    first, second = (sqlite(str(tmp_path / "mails.db")) for _ in range(2))
    one, other = inbox_of(first), SqlInbox(second, "mailer", tables=TABLES)
    one.handler_blocking(send)(Delivery(1))
    other.prepare(CLUSTER)
    with second.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 50")
    with one._exclusive():
        with pytest.raises(DatabaseUnavailable):
            other.fold(0)
        with pytest.raises(DatabaseUnavailable):
            other.forget(0, 0)
    other.fold(0)
    assert one.is_done(0, 1)
    for engine in (first, second):
        engine.dispose()


def test_what_was_folded_while_a_transaction_began_is_seen(engine: Engine, tmp_path: Path) -> None:
    """The row is gone and the bit is there before the insert: the look at the bits comes after it."""
    inbox = inbox_of(engine)
    inbox.handler_blocking(send)(Delivery(1))
    inbox.fold(0)
    assert rows_and_pages(engine) == (0, 1)
    inbox.handler_blocking(send)(Delivery(1))
    assert sent(engine) == [1]
    assert rows_and_pages(engine) == (0, 1)


def test_operators_have_work_done_again(engine: Engine) -> None:
    inbox = inbox_of(engine)
    for id in range(4):
        inbox.handler_blocking(send)(Delivery(id))
    inbox.forget(0, 2)
    for id in range(4):
        inbox.handler_blocking(send)(Delivery(id))
    assert sent(engine) == [0, 1, 2, 2, 3, 3]
    again = inbox_of(engine, name="mailer-2")
    again.handler_blocking(send)(Delivery(0))
    assert sent(engine) == [0, 0, 1, 2, 2, 3, 3]
    for first, last in ((-1, 4), (5, 4)):
        with pytest.raises(BadArgument):
            inbox.forget(0, first, last)


# -- whose it is, and what is refused ----------------------------------------------------------------------------------


def test_another_cluster_and_another_group_are_refused(engine: Engine) -> None:
    inbox_of(engine).handler_blocking(send)(Delivery(0))
    inbox = inbox_of(engine)
    with pytest.raises(ForeignCluster):
        inbox.handler_blocking(send)(Delivery(1, cluster=OTHER_CLUSTER))
    inbox.handler_blocking(send)(Delivery(1))
    with pytest.raises(ForeignCluster):
        inbox.handler_blocking(send)(Delivery(2, cluster=OTHER_CLUSTER))
    other = SqlInbox(engine, "printer", name="mailer")
    with pytest.raises(OtherInbox, match="that of the group 'mailer', not 'printer'"):
        other.handler_blocking(send)(Delivery(2, group="printer"))
    with pytest.raises(BadArgument, match="'printer' was given to the inbox of 'mailer'"):
        inbox.handler_blocking(send)(Delivery(2, group="printer"))
    assert sent(engine) == [0, 1]


def test_an_engine_that_commits_by_itself_is_refused(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/mails.db", isolation_level="AUTOCOMMIT")
    with pytest.raises(NotTransactional):
        inbox_of(engine).handler_blocking(send)(Delivery(0))
    engine.dispose()


def test_wrong_arguments(engine: Engine) -> None:
    wrong: list[Callable[[], object]] = [
        partial(SqlInbox, "sqlite://", "mailer"),  # type: ignore[arg-type]
        partial(SqlInbox, engine, ""),
        partial(SqlInbox, engine, "mailer", name="n" * 101),
        partial(SqlInbox, engine, "mailer", threads=0),
        partial(SqlInbox, engine, "mailer", lock_seconds=0),
        partial(inbox_of(engine).handler, asyncio.sleep),  # type: ignore[arg-type]
    ]
    for make in wrong:
        with pytest.raises(BadArgument):
            make()


def test_the_database_transaction_is_not_the_function_s_to_end(engine: Engine) -> None:
    def commit(connection: Connection, delivery: Delivery) -> None:
        send(connection, delivery)
        connection.commit()

    def commit_unseen(connection: Connection, delivery: Delivery) -> None:
        with pytest.raises(ApplyFailed):
            commit(connection, delivery)

    inbox = inbox_of(engine)
    for function in (commit, commit_unseen):
        with pytest.raises(ApplyFailed, match="tried to commit"):
            inbox.handler_blocking(function)(Delivery(0))
    assert sent(engine) == []
    inbox.handler_blocking(send)(Delivery(0))
    assert sent(engine) == [0]


# -- a database that fails ---------------------------------------------------------------------------------------------


class Unhappy:
    """Fails the n-th statement or commit."""

    def __init__(self, engine: Engine, at: int) -> None:
        self.left = at
        event.listen(engine, "before_cursor_execute", self._step)
        event.listen(engine, "commit", self._step)

    def _step(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise sa.exc.OperationalError("", None, Exception("the database is away"))


@pytest.mark.parametrize("at", range(1, 12))
def test_a_database_that_fails_at_any_statement_is_asked_again_and_it_is_done_once(
    engine: Engine, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waltzd.sql.inbox.PAUSE_MIN", 0.0)
    inbox_of(engine).prepare(CLUSTER)

    async def story() -> None:
        inbox = inbox_of(engine)
        unhappy = Unhappy(engine, at)
        for id in (1, 2):
            await inbox.handler(send)(Delivery(id))
        assert unhappy.left <= 0
        await inbox.close()

    asyncio.run(story())
    assert sent(engine) == [1, 2]


def test_a_handler_is_not_patient_for_ever(engine: Engine) -> None:
    def away(connection: Connection, delivery: Delivery) -> None:
        raise sa.exc.OperationalError("", None, Exception("the database is away"))

    async def story() -> None:
        inbox = inbox_of(engine, patience_seconds=0.01)
        with pytest.raises(DatabaseUnavailable, match="the database is away"):
            await inbox.handler(away)(Delivery(0))
        await inbox.close()

    asyncio.run(story())


# -- with a group --------------------------------------------------------------------------------------------------------


def test_what_was_acknowledged_and_not_written_down_comes_again_after_a_change_of_owner_and_is_met(engine: Engine) -> None:
    """The group gives all of it out again; the database has each once, and what was rejected not at all."""
    given: list[int] = []
    TABLES.create_all(engine)

    def careful(connection: Connection, delivery: Any) -> None:
        if delivery.id == 3:
            raise Reject("never")
        send(connection, delivery)

    async def story(cluster: LocalCluster) -> None:
        inbox = inbox_of(engine)
        handle = inbox.handler(careful)

        async def counted(delivery: Any) -> None:
            given.append(delivery.id)
            await handle(delivery)

        async with cluster.client() as client:
            await client.create_group("mailer", mode="ordered", partitions=[0])
            handling = client.handle("mailer", counted)
            working = asyncio.create_task(handling.run())
            await client.append_many([b"%d" % number for number in range(20)], partition=0)
            await until(lambda: len(sent(engine)) == 19)
            await cluster.kill_owner(0)
            await client.append(b"more", partition=0)
            await until(lambda: len(sent(engine)) == 20)
            handling.stop()
            await working
        await inbox.close()

    LocalCluster().run(story)
    assert sent(engine) == [id for id in range(21) if id != 3]
    assert set(given) == set(range(21))


def test_a_blocking_member_has_an_inbox(engine: Engine) -> None:
    with BlockingCluster() as cluster, cluster.client() as client:
        client.create_group("mailer", mode="queue", partitions=[0])
        client.append_many([b"%d" % number for number in range(3)], partition=0)
        inbox = inbox_of(engine)
        with client.subscribe("mailer") as subscription:
            for delivery in subscription:
                for _ in range(2):
                    with inbox.once_blocking(delivery) as connection:
                        if connection is not None:
                            send(connection, delivery)  # type: ignore[arg-type]
                delivery.ack()
                if len(sent(engine)) == 3:
                    break
        inbox.close_blocking()
    assert sent(engine) == [0, 1, 2]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)
