"""What members have done in a database is done there once, whatever comes again, fails, or is pruned in between."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Collection, Iterator
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
    InboxPruned,
    OtherInbox,
    WaltzError,
)
from waltzd.protocol.timelines import FIRST, Lineage
from waltzd.sql import SqlInbox, sqlite
from waltzd.sql.inbox import OLD_PAGE
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


def rows_and_ranges(engine: Engine) -> tuple[int, list[tuple[int, int]]]:
    with engine.connect() as connection:
        rows = connection.scalar(sa.text("SELECT count(*) FROM waltz_inbox_done"))
        ranges = connection.execute(sa.text("SELECT first_id, last_id FROM waltz_inbox_pruned ORDER BY first_id"))
        return rows or 0, [(first, last) for first, last in ranges]


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


# -- pruning -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pruning_does_nothing_twice_and_leaves_nothing_out(engine: Engine) -> None:
    """Against a group that parks, replays and is reset, and prunes with a true floor and true lists of parked ids."""
    inbox, random_ = inbox_of(engine), random.Random(5)
    done, parked, pruned, next_id = set[int](), set[int](), set[int](), 0

    def deliver(id: int) -> bool:
        """Whether it was done now."""
        with inbox.once_blocking(Delivery(id)) as connection:
            return connection is not None

    for _ in range(400):
        match random_.randrange(8):
            case 0:  # its tries are used up; sometimes it was done all the same
                parked.add(next_id)
                if random_.random() < 0.5:
                    assert deliver(next_id)
                    done.add(next_id)
                next_id += 1
            case 1 if parked:
                id = random_.choice(sorted(parked))
                parked.discard(id)
                assert deliver(id) is (id not in done)
                done.add(id)
            case 2:
                floor = random_.randrange(-1, next_id)
                before = rows_and_ranges(engine)[0] if next_id else 0
                count = inbox.prune(0, floor, parked=parked) if next_id else 0
                pruned |= set(range(floor + 1)) - parked
                assert not next_id or before - count == rows_and_ranges(engine)[0]
            case 3 if next_id:  # a reset, or a floor that fell back
                id = random_.randrange(next_id)
                if id in parked:
                    continue
                if id in pruned:
                    with pytest.raises(InboxPruned, match=rf"whether transaction {id} was handled"):
                        deliver(id)
                    with pytest.raises(InboxPruned):
                        inbox.is_done(0, id)
                else:
                    assert deliver(id) is (id not in done)
            case _:
                assert deliver(next_id)
                done.add(next_id)
                next_id += 1
    rows, ranges = rows_and_ranges(engine)
    assert {id for first, last in ranges for id in range(first, last + 1)} == pruned
    assert rows == len(done - pruned)


def test_what_is_kept_does_not_grow_with_what_was_done(engine: Engine) -> None:
    inbox = inbox_of(engine)
    for id in range(20):
        inbox.handler_blocking(send)(Delivery(id))
    assert inbox.prune(0, 9, parked=[4, 30]) == 9
    assert inbox.prune(0, 14, parked=[4]) == 5
    assert rows_and_ranges(engine) == (6, [(0, 3), (5, 14)])
    inbox.handler_blocking(send)(Delivery(4))
    assert inbox.prune(0, 14) == 1
    assert rows_and_ranges(engine) == (5, [(0, 14)])
    assert inbox.prune(0, 3) == 0
    assert rows_and_ranges(engine) == (5, [(0, 14)]), "a lower floor brings nothing back"
    assert inbox.prune(1, -1) == 0
    assert sent(engine) == list(range(20))


def test_a_pruned_id_is_refused_until_it_is_forgotten(engine: Engine) -> None:
    inbox = inbox_of(engine)
    for id in range(6):
        inbox.handler_blocking(send)(Delivery(id))
    inbox.prune(0, 5)
    with pytest.raises(InboxPruned) as refused:
        inbox.handler_blocking(send)(Delivery(2))
    assert (refused.value.code, "`inbox.forget(0, after=1, through=2)`" in " ".join(refused.value.lines())) == (
        "W2339",
        True,
    )
    assert rows_and_ranges(engine) == (0, [(0, 5)])
    inbox.forget(0, after=1, through=2, timeline=FIRST)
    with pytest.raises(InboxPruned):
        inbox.handler_blocking(send)(Delivery(2))
    inbox.forget(0, after=1, through=3)
    assert rows_and_ranges(engine) == (0, [(0, 1), (4, 5)])
    inbox.handler_blocking(send)(Delivery(2))
    assert sent(engine) == [0, 1, 2, 2, 3, 4, 5]
    inbox.handler_blocking(send)(Delivery(6))
    inbox.forget(0, after=-1)
    assert rows_and_ranges(engine) == (0, [])


def test_only_one_prunes_at_a_time(tmp_path: Path) -> None:
    """Two that have read the same ranges would each write them back without those of the other."""
    first, second = (sqlite(str(tmp_path / "mails.db")) for _ in range(2))
    one, other = inbox_of(first), SqlInbox(second, "mailer", tables=TABLES)
    one.handler_blocking(send)(Delivery(1))
    other.prepare(CLUSTER)
    with second.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 50")
    with one._exclusive():
        with pytest.raises(DatabaseUnavailable):
            other.prune(0, 1)
        with pytest.raises(DatabaseUnavailable):
            other.forget(0, after=-1)
    assert one.is_done(0, 1)
    assert other.prune(0, 1) == 1
    for engine in (first, second):
        engine.dispose()


def with_old_pages(engine: Engine, done: Collection[int], *, timeline: str = ", timeline VARCHAR(36)") -> None:
    """Bitmaps as an earlier version wrote them; one whose ids are all done is empty."""
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE waltz_inbox_pages (inbox_name VARCHAR(100), partition_id INTEGER, page BIGINT, "
            f"bits {'BYTEA' if engine.dialect.name == 'postgresql' else 'BLOB'} NOT NULL{timeline}, "
            "PRIMARY KEY (inbox_name, partition_id, page))"
        )
        for page in sorted({id // OLD_PAGE for id in done}):
            bits = bytearray(OLD_PAGE // 8)
            for slot in range(OLD_PAGE):
                if page * OLD_PAGE + slot in done:
                    bits[slot >> 3] |= 1 << (slot & 7)
            data = b"" if bits.count(0xFF) == len(bits) else bytes(bits)
            row = {"page": page, "bits": data}
            connection.execute(
                sa.text(
                    "INSERT INTO waltz_inbox_pages (inbox_name, partition_id, page, bits) "
                    "VALUES ('mailer', 0, :page, :bits)"
                ),
                row,
            )


@pytest.mark.slow
@pytest.mark.parametrize("timeline", ["", ", timeline VARCHAR(36)"])
def test_bitmaps_of_an_earlier_version_become_rows(engine: Engine, timeline: str) -> None:
    inbox_of(engine).handler_blocking(send)(Delivery(3 * OLD_PAGE))
    done = {id for id in range(2 * OLD_PAGE + 10) if id != OLD_PAGE + 5}
    with_old_pages(engine, done, timeline=timeline)
    inbox = inbox_of(engine)
    for id in (
        0,
        OLD_PAGE - 1,
        OLD_PAGE + 4,
        OLD_PAGE + 5,
        OLD_PAGE + 6,
        2 * OLD_PAGE + 9,
        2 * OLD_PAGE + 10,
        3 * OLD_PAGE,
    ):
        inbox.handler_blocking(send)(Delivery(id))
    assert sent(engine) == [OLD_PAGE + 5, 2 * OLD_PAGE + 10, 3 * OLD_PAGE]
    assert rows_and_ranges(engine) == (len(done) + 3, [])
    assert not sa.inspect(engine).has_table("waltz_inbox_pages"), "a member of the earlier version fails from now on"


def test_operators_have_work_done_again(engine: Engine) -> None:
    inbox = inbox_of(engine)
    for id in range(4):
        inbox.handler_blocking(send)(Delivery(id))
    inbox.forget(0, after=1)
    for id in range(4):
        inbox.handler_blocking(send)(Delivery(id))
    assert sent(engine) == [0, 1, 2, 2, 3, 3]
    again = inbox_of(engine, name="mailer-2")
    again.handler_blocking(send)(Delivery(0))
    assert sent(engine) == [0, 0, 1, 2, 2, 3, 3]
    for after, through in ((-2, 4), (4, 4)):
        with pytest.raises(BadArgument):
            inbox.forget(0, after=after, through=through)


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
    with pytest.raises(OtherInbox, match="belongs to group 'mailer', not 'printer'"):
        other.handler_blocking(send)(Delivery(2, group="printer"))
    with pytest.raises(BadArgument, match="inbox of group 'mailer' cannot handle a delivery of group 'printer'"):
        inbox.handler_blocking(send)(Delivery(2, group="printer"))
    assert sent(engine) == [0, 1]


def test_an_engine_that_commits_by_itself_is_refused(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/mails.db", isolation_level="AUTOCOMMIT")
    with pytest.raises(BadArgument, match="commits every statement"):
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
