"""Views in SQLite: applied exactly once, whatever fails at whichever statement, and whoever else writes the same file."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy import event, orm
from sqlalchemy.engine import Connection, Engine

from tests.tiers import tiers
from waltzd.client.view import Decision, Transaction
from waltzd.errors import (
    ApplyFailed,
    BadArgument,
    DatabaseUnavailable,
    ForeignCluster,
    NotApplied,
    OtherView,
    ViewBehind,
    WaltzError,
)
from waltzd.protocol.batches import PROBE_KIND
from waltzd.protocol.locks import Committed, Reason, Rejected, Token
from waltzd.sql import Poison, SqlView, sqlite

CLUSTER = UUID(int=1)
TABLES = sa.MetaData()
ROWS = sa.Table(
    "rows",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("text", sa.String, nullable=False),
)
TOTAL = sa.Table(
    "total", TABLES, sa.Column("one", sa.Integer, primary_key=True), sa.Column("n", sa.Integer, nullable=False)
)


class _Text:
    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, data: bytes) -> str:
        return data.decode()


class Given(Transaction[str]):
    """A transaction as far as a view looks at it."""

    def __init__(self, id: int, partition: int = 0, text: str = "", follows: bool = False, header: int = 0) -> None:
        super().__init__(partition, id, header, len(text), 0, (0, 0, 0), text.encode(), None, _Text(), follows=follows)


def feed(first: int, last: int) -> list[Given]:
    return [Given(id, text=f"text {id}") for id in range(first, last + 1)]


def groups(*sizes: int) -> list[Given]:
    flags = [number > 0 for size in sizes for number in range(size)]
    return [Given(id, follows=follows) for id, follows in enumerate(flags)]


def insert_and_count(connection: Connection, given: Transaction[str]) -> None:
    """Two changes that a half-applied transaction would tear apart, neither of which can be done twice unnoticed."""
    connection.execute(sa.insert(ROWS).values(id=given.id, text=given.value))
    if connection.execute(sa.update(TOTAL).values(n=TOTAL.c.n + 1)).rowcount == 0:
        connection.execute(sa.insert(TOTAL).values(one=1, n=1))


def content(engine: Engine) -> tuple[list[int], int, int]:
    """Ids of the rows, how often something was counted, the position."""
    with engine.connect() as connection:
        ids = list(connection.scalars(sa.select(ROWS.c.id).order_by(ROWS.c.id)))
        total = connection.scalar(sa.select(TOTAL.c.n)) or 0
        position = connection.scalar(sa.text("SELECT position FROM waltz_positions WHERE partition_id = 0"))
    return ids, total, -1 if position is None else position


def holds(engine: Engine, last: int) -> bool:
    return content(engine) == (list(range(last + 1)), last + 1, last)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "view.db"


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    engine = sqlite(str(path))
    yield engine
    engine.dispose()


def view_of(
    engine: Engine, apply: Callable[[Connection, Transaction[str]], None] = insert_and_count, **settings: Any
) -> SqlView[str]:
    view = SqlView(engine, apply, tables=TABLES, **settings)
    view._prepare(CLUSTER)
    assert view.read_position(0) >= -1  # as a client does at each activation
    return view


# -- the plain story ---------------------------------------------------------------------------------------------------


def test_a_client_sees_a_position_then_applies_one_by_one_and_in_batches(engine: Engine) -> None:
    async def story() -> None:
        view = SqlView(engine, insert_and_count, tables=TABLES)
        await view.opened(CLUSTER)
        assert await view.position(0) == -1
        await view.apply(Given(0))
        await view.apply_batch(feed(1, 9))
        assert await view.position(0) == 9
        await view.close()

    asyncio.run(story())
    assert holds(engine, 9)


def test_partitions_have_positions_of_their_own(engine: Engine) -> None:
    view = view_of(engine, lambda connection, given: None)
    view.apply_all([Given(0, partition=0), Given(1, partition=0)])
    view.apply_all([Given(0, partition=7)])
    assert [view.read_position(partition) for partition in (0, 1, 7)] == [1, -1, 0]


def test_a_batch_is_one_database_transaction_up_to_its_bound(engine: Engine) -> None:
    commits: list[Connection] = []
    view = view_of(engine, batch_max=4)
    event.listen(engine, "commit", commits.append)
    view.apply_all(feed(0, 9))
    assert len(commits) == 3
    assert holds(engine, 9)


@pytest.mark.parametrize("batch_max", range(1, 9))
def test_a_group_is_never_cut(engine: Engine, batch_max: int) -> None:
    view = view_of(engine, batch_max=batch_max)
    commits: list[int] = []
    event.listen(engine, "commit", lambda connection: commits.append(content(engine)[2]))  # what others saw until then
    view.apply_all(groups(1, 4, 2, 1, 3))
    assert holds(engine, 10)
    assert set(commits) <= {-1, 0, 4, 6, 7}


@pytest.mark.parametrize("bad", range(8))
def test_nothing_of_a_group_is_applied_when_one_of_it_fails(engine: Engine, bad: int) -> None:
    def apply(connection: Connection, given: Transaction[str]) -> None:
        insert_and_count(connection, given)
        if given.id == bad and is_unhappy:
            raise Unhappy

    is_unhappy, given = True, groups(2, 1, 4, 1)
    view = view_of(engine, apply)
    with pytest.raises(ApplyFailed):
        view.apply_all(given)
    start = max(one.id for one in given if one.id <= bad and not one.follows)
    assert holds(engine, start - 1)
    is_unhappy = False
    view.apply_all(given[start:])
    assert holds(engine, 7)


def test_the_view_and_its_position_become_visible_together(engine: Engine, path: Path) -> None:
    seen = []
    other = sqlite(str(path))

    def apply(connection: Connection, given: Transaction[str]) -> None:
        insert_and_count(connection, given)
        seen.append(content(other))

    view_of(engine, apply).apply_all(feed(0, 1))
    assert seen == [([], 0, -1), ([], 0, -1)]
    assert holds(other, 1)
    other.dispose()


def test_the_orm_can_be_used(engine: Engine) -> None:
    def apply(connection: Connection, given: Transaction[str]) -> None:
        with orm.Session(bind=connection) as session:
            session.execute(sa.insert(ROWS).values(id=given.id, text="by a session"))
            session.flush()

    view_of(engine, apply).apply_all(feed(0, 2))
    assert content(engine) == ([0, 1, 2], 0, 2)


# -- several processes on one database ---------------------------------------------------------------------------------


def test_what_another_process_applied_is_skipped(engine: Engine) -> None:
    mine, other = view_of(engine), view_of(engine)
    other.apply_all(feed(0, 4))
    mine.apply_all(feed(0, 4))
    mine.apply_all([Given(5)])
    assert holds(engine, 5)


@pytest.mark.parametrize("batch_max", [1, 3, 100])
def test_a_batch_that_another_process_applied_in_part_goes_on_behind_it(engine: Engine, batch_max: int) -> None:
    mine, other = view_of(engine, batch_max=batch_max), view_of(engine)
    other.apply_all(feed(0, 4))
    mine.apply_all(feed(2, 9))
    assert holds(engine, 9)


def test_two_views_on_threads_apply_everything_once(engine: Engine) -> None:
    views = [view_of(engine, batch_max=size) for size in (3, 5)]
    threads = [threading.Thread(target=view.apply_all, args=(feed(0, 199),)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert holds(engine, 199)


def test_tables_and_rows_may_be_made_by_several_at_once(engine: Engine, path: Path) -> None:
    engines = [sqlite(str(path)) for _ in range(4)]
    failed: list[BaseException] = []

    def begin(own: Engine) -> None:
        try:
            view_of(own)
        except WaltzError as error:
            failed.append(error)

    threads = [threading.Thread(target=begin, args=(own,)) for own in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in engines:
        own.dispose()
    assert failed == []
    assert content(engine) == ([], 0, -1)


def test_a_database_that_went_back_in_time_is_not_continued(engine: Engine) -> None:
    view = view_of(engine)
    view.apply_all(feed(0, 4))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE waltz_positions SET position = 2"))
    with pytest.raises(ViewBehind, match="has position 2 for partition 0; this client had applied 4") as raised:
        view.apply_all([Given(5)])
    assert raised.value.facts == {"partition": "0", "position": "2"}
    assert content(engine) == ([0, 1, 2, 3, 4], 5, 2)


def test_a_row_that_was_deleted_is_a_database_that_went_back(engine: Engine) -> None:
    view = view_of(engine)
    view.apply_all(feed(0, 4))
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM waltz_positions"))
    with pytest.raises(ViewBehind):
        view.apply_all([Given(5)])


# -- functions that fail -----------------------------------------------------------------------------------------------


class Unhappy(Exception):
    pass


@pytest.mark.parametrize("bad", [0, 1, 5, 9])
def test_everything_before_a_transaction_that_fails_is_applied(engine: Engine, bad: int) -> None:
    is_mended = False

    def apply(connection: Connection, given: Transaction[str]) -> None:
        insert_and_count(connection, given)
        if given.id == bad and not is_mended:
            raise Unhappy("no such customer")

    view = view_of(engine, apply)
    with pytest.raises(ApplyFailed, match=f"applying transaction {bad} of partition 0 failed: Unhappy: no such") as raised:
        view.apply_all(feed(0, 9))
    assert raised.value.facts == {"partition": "0", "id": str(bad)}
    assert isinstance(raised.value.__cause__, Unhappy)
    assert holds(engine, bad - 1)
    is_mended = True
    view.apply_all(feed(0, 9))
    assert holds(engine, 9)


def test_a_constraint_of_the_application_is_its_failure(engine: Engine) -> None:
    def apply(connection: Connection, given: Transaction[str]) -> None:
        connection.execute(sa.insert(ROWS).values(id=given.id // 2, text=""))

    view = view_of(engine, apply)
    with pytest.raises(ApplyFailed, match="transaction 1 of partition 0 failed: IntegrityError"):
        view.apply_all(feed(0, 3))
    assert content(engine) == ([0], 0, 0)


def test_a_statement_may_fail_where_the_database_allows_it(engine: Engine) -> None:
    def apply(connection: Connection, given: Transaction[str]) -> None:
        with pytest.raises(sa.exc.IntegrityError):
            connection.execute(sa.insert(ROWS).values(id=None, text=None))
        insert_and_count(connection, given)

    view_of(engine, apply).apply_all(feed(0, 2))
    assert holds(engine, 2)


def commit_text(connection: Connection, given: Transaction[str]) -> None:
    connection.execute(sa.text("COMMIT"))


def commit_behind_a_comment(connection: Connection, given: Transaction[str]) -> None:
    connection.exec_driver_sql("-- now\n /* really */ ; commit")


def swallow(connection: Connection, given: Transaction[str]) -> None:
    try:
        connection.commit()
    except ApplyFailed:
        connection.execute(sa.insert(ROWS).values(id=1000, text="in a transaction of my own"))


def session_commit(connection: Connection, given: Transaction[str]) -> None:
    with orm.Session(bind=connection, join_transaction_mode="control_fully") as session:
        session.execute(sa.insert(ROWS).values(id=1000, text=""))
        session.commit()


FORBIDDEN: dict[str, Callable[[Connection, Transaction[str]], object]] = {
    "commit": lambda connection, _: connection.commit(),
    "roll back": lambda connection, _: connection.rollback(),
    "close": lambda connection, _: connection.close(),
    "end the transaction": lambda connection, _: connection.get_transaction().commit(),  # type: ignore[union-attr]
    "begin": lambda connection, _: connection.begin(),
    "another isolation": lambda connection, _: connection.execution_options(isolation_level="AUTOCOMMIT"),
    "begin as text": lambda connection, _: connection.execute(sa.text("begin immediate")),
    "roll back as text": lambda connection, _: connection.exec_driver_sql("rollback"),
    "commit as text": commit_text,
    "commit behind a comment": commit_behind_a_comment,
    "commit and swallow the refusal": swallow,
    "commit in a session": session_commit,
    "invalidate": lambda connection, _: connection.invalidate(),
}


@pytest.mark.parametrize("how", FORBIDDEN)
def test_the_function_cannot_end_the_transaction(engine: Engine, how: str) -> None:
    is_mended = False

    def apply(connection: Connection, given: Transaction[str]) -> None:
        insert_and_count(connection, given)
        if given.id == 2 and not is_mended:
            FORBIDDEN[how](connection, given)

    view = view_of(engine, apply)
    with pytest.raises((ApplyFailed, DatabaseUnavailable)):
        view.apply_all(feed(0, 3))
    ids, total, position = content(engine)
    assert (ids, total) == (list(range(position + 1)), position + 1)
    assert position < 2
    is_mended = True
    view.apply_all(feed(0, 3))
    assert holds(engine, 3)


@pytest.mark.parametrize("how", FORBIDDEN)
def test_who_gets_the_connection_next_commits_nothing_of_what_was_refused(engine: Engine, how: str) -> None:
    def apply(connection: Connection, given: Transaction[str]) -> None:
        insert_and_count(connection, given)
        FORBIDDEN[how](connection, given)

    view = view_of(engine, apply)
    with pytest.raises((ApplyFailed, DatabaseUnavailable)):
        view.apply_all([Given(0)])
    with engine.begin() as connection:
        connection.execute(sa.insert(ROWS).values(id=7, text="of somebody else"))
    assert content(engine) == ([7], 0, -1)


def test_a_refusal_says_what_was_tried(engine: Engine) -> None:
    view = view_of(engine, lambda connection, _: connection.commit())
    with pytest.raises(ApplyFailed, match="tried to commit while applying transaction 0 of partition 0"):
        view.apply_all(feed(0, 0))


def test_a_savepoint_takes_back_a_part(engine: Engine) -> None:
    def apply(connection: Connection, given: Transaction[str]) -> None:
        savepoint = connection.begin_nested()
        connection.execute(sa.insert(ROWS).values(id=1000 + given.id, text=""))
        savepoint.rollback()
        with connection.begin_nested():
            insert_and_count(connection, given)

    view_of(engine, apply).apply_all(feed(0, 2))
    assert holds(engine, 2)


# -- databases that fail -----------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone: nobody catches it, nothing is tidied up but the connection."""


class Driver(sqlite3.Connection):
    """A connection that fails at its n-th operation: before it is done, or right after it."""

    operations = 0
    fail_at = 0
    fail_after = False
    error: BaseException = Crash()

    @classmethod
    def arm(cls, at: int, after: bool, error: BaseException) -> None:
        cls.operations, cls.fail_at, cls.fail_after, cls.error = 0, at, after, error

    def _count(self, do: Callable[[], Any]) -> Any:
        Driver.operations += 1
        is_due = Driver.operations == Driver.fail_at
        if is_due and not Driver.fail_after:
            raise Driver.error
        result = do()
        if is_due:
            raise Driver.error
        return result

    def commit(self) -> None:
        self._count(super().commit)

    def cursor(self, factory: Any = None) -> Any:
        return super().cursor(Cursor)


class Cursor(sqlite3.Cursor):
    def execute(self, sql: str, parameters: Any = ()) -> Any:
        connection: Any = self.connection
        return connection._count(lambda: sqlite3.Cursor.execute(self, sql, parameters))


def unreliable(path: Path) -> Engine:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, factory=Driver, check_same_thread=False, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        return connection

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.pool.NullPool)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


OPERATIONS = 35
"""How many statements and commits `work` takes; the last test of this part holds it to that."""


def work(engine: Engine) -> None:
    view = SqlView(engine, insert_and_count)
    view._prepare(CLUSTER)
    view.read_position(0)
    view.apply_all([Given(0)])
    view.apply_all(feed(1, 2))


@pytest.fixture
def fresh(path: Path) -> Iterator[Engine]:
    """The tables are there, nothing is applied."""
    Driver.arm(0, False, Crash())
    sound = sqlite(str(path))
    with sound.begin() as connection:
        TABLES.create_all(connection)
        connection.execute(sa.insert(TOTAL).values(one=1, n=0))
    SqlView(sound, insert_and_count)._prepare(CLUSTER)
    yield sound
    sound.dispose()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", tiers(range(1, OPERATIONS + 1), quick=5))
def test_a_crash_at_any_operation_leaves_whole_transactions(fresh: Engine, path: Path, at: int, after: bool) -> None:
    Driver.arm(at, after, Crash())
    with pytest.raises(Crash):
        work(unreliable(path))
    ids, total, position = content(fresh)
    assert (ids, total) == (list(range(position + 1)), position + 1)
    work(unreliable(path))  # the next start
    assert holds(fresh, 2)


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done, but not said"])
@pytest.mark.parametrize("at", tiers(range(1, OPERATIONS + 1), quick=5))
def test_a_database_error_at_any_operation_is_ours_and_harmless(fresh: Engine, path: Path, at: int, after: bool) -> None:
    """`done, but not said` on a commit is the ambiguous commit."""
    Driver.arm(at, after, sqlite3.OperationalError("disk I/O error"))
    with pytest.raises(DatabaseUnavailable, match="disk I/O error"):
        work(unreliable(path))
    work(unreliable(path))  # the client tries again
    assert holds(fresh, 2)


def test_every_operation_was_failed(fresh: Engine, path: Path) -> None:
    Driver.arm(0, False, Crash())
    work(unreliable(path))
    assert Driver.operations == OPERATIONS


def test_a_locked_database_is_a_reason_to_try_again(engine: Engine, path: Path) -> None:
    impatient = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 0})
    view = view_of(impatient)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable, match=r"could not apply transaction 0 of partition 0: .*locked"):
        view.apply_all([Given(0)])
    blocker.execute("ROLLBACK")
    blocker.close()
    view.apply_all([Given(0)])
    impatient.dispose()
    assert holds(engine, 0)


def test_an_engine_that_the_application_made_itself_will_do(path: Path) -> None:
    """The driver begins a transaction at the first statement that writes: raising the position."""
    engine = sa.create_engine(f"sqlite:///{path}")
    is_mended = False

    def apply(connection: Connection, given: Transaction[str]) -> None:
        insert_and_count(connection, given)
        if not is_mended:
            raise Unhappy

    view = view_of(engine, apply)
    with pytest.raises(ApplyFailed):
        view.apply_all([Given(0)])
    assert content(engine) == ([], 0, -1)
    is_mended = True
    view.apply_all([Given(0)])
    assert holds(engine, 0)
    engine.dispose()


def test_an_engine_that_commits_by_itself_is_refused(path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{path}", isolation_level="AUTOCOMMIT")
    view = SqlView(engine, insert_and_count, tables=TABLES)
    with pytest.raises(BadArgument, match="commits every statement"):
        view._prepare(CLUSTER)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT * FROM waltz_positions")).all() == []
    engine.dispose()


def test_a_missing_directory_is_said(tmp_path: Path) -> None:
    engine = sqlite(str(tmp_path / "nowhere" / "view.db"))
    with pytest.raises(DatabaseUnavailable, match=r"could not prepare the view: .*unable to open"):
        SqlView(engine, insert_and_count)._prepare(CLUSTER)


def test_arguments_that_make_no_sense(engine: Engine) -> None:
    async def apply(connection: Connection, given: Transaction[str]) -> None:
        raise AssertionError

    with pytest.raises(BadArgument, match="not an async one"):
        SqlView(engine, apply)  # type: ignore[arg-type]
    for settings in ({"batch_max": 0}, {"lock_seconds": 0}, {"threads": 0}):
        with pytest.raises(BadArgument, match="at least 1"):
            SqlView(engine, insert_and_count, **settings)  # type: ignore[arg-type]


# -- whose the view is -------------------------------------------------------------------------------------------------

OTHER_CLUSTER = UUID(int=2)


def test_a_view_of_another_cluster_is_refused_before_anything_is_applied(engine: Engine) -> None:
    view_of(engine).apply_all(feed(0, 2))
    stranger = SqlView(engine, insert_and_count, tables=TABLES)
    with pytest.raises(ForeignCluster, match=f"belongs to cluster {CLUSTER}") as raised:
        stranger._prepare(OTHER_CLUSTER)
    assert (raised.value.code, raised.value.detail_not_done) == ("W2002", "nothing was applied")
    with pytest.raises(BadArgument, match="the cluster of the view"):
        stranger.apply_all(feed(3, 3))
    assert holds(engine, 2)


def test_two_clusters_that_come_to_an_empty_database_at_once_do_not_mix(engine: Engine, path: Path) -> None:
    """Each has a partition of its own, so that no position of the one is in the way of the other."""
    told: list[object] = []
    start = threading.Barrier(2)

    def begin(number: int) -> None:
        own = sqlite(str(path))
        view: SqlView[str] = SqlView(own, lambda connection, given: None)
        start.wait()
        try:
            view._prepare(UUID(int=number))
            view.apply_all([Given(view.read_position(number) + 1, partition=number)])
            told.append(number)
        except ForeignCluster as error:
            told.append(error.code)
        own.dispose()

    threads = [threading.Thread(target=begin, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, told)) in (["1", "W2002"], ["2", "W2002"])


def test_a_client_tells_the_view_its_cluster_each_time_that_it_opens(engine: Engine) -> None:
    async def story() -> None:
        view = SqlView(engine, insert_and_count, tables=TABLES)
        with pytest.raises(BadArgument, match="the cluster of the view") as raised:
            await view.position(0)
        assert "passes `opened(cluster)` on" in raised.value.detail_next_step
        await view.opened(CLUSTER)
        await view.opened(CLUSTER)
        with pytest.raises(ForeignCluster):
            await view.opened(OTHER_CLUSTER)
        await view.close()

    asyncio.run(story())


def test_views_with_names_of_their_own_share_a_database(engine: Engine) -> None:
    seen: dict[str, list[int]] = {"one": [], "two": []}
    for name, ids in seen.items():
        view = SqlView[str](engine, lambda _, given, ids=ids: ids.append(given.id), name=name)  # type: ignore[misc]
        view._prepare(CLUSTER)
        assert view.read_position(0) == -1
        view.apply_all(feed(0, 3))
        assert view.read_positions() == {0: 3}
    assert seen == {"one": [0, 1, 2, 3], "two": [0, 1, 2, 3]}


def test_two_functions_under_one_name_are_refused(engine: Engine) -> None:
    def other(connection: Connection, given: Transaction[str]) -> None:
        raise AssertionError

    view_of(engine).apply_all(feed(0, 2))
    with pytest.raises(OtherView, match=r"belongs to the function .*insert_and_count, not to .*other") as raised:
        view_of(engine, other)
    assert "`accept_rename=True`" in raised.value.detail_next_step
    view_of(engine, other, accept_rename=True)
    with pytest.raises(OtherView):
        view_of(engine)
    assert holds(engine, 2)


def test_a_table_of_an_earlier_version_is_refused(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE waltz_marks (partition_id INTEGER PRIMARY KEY)"))
    with pytest.raises(OtherView, match="an earlier version of Waltz kept"):
        SqlView(engine, insert_and_count, tables=TABLES)._prepare(CLUSTER)
    assert len(sa.inspect(engine).get_table_names()) == 1


def test_dead_letters_of_an_earlier_version_are_refused_with_the_change_of_their_table(engine: Engine) -> None:
    view_of(engine, then="park")
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE waltz_dead_letters RENAME COLUMN kind TO header"))
    view_of(engine)
    with pytest.raises(OtherView, match="has the column `header` in place of `kind`") as refused:
        view_of(engine, then="park")
    with engine.begin() as connection:
        connection.execute(sa.text(refused.value.detail_next_step))
    view_of(engine, then="park")


@pytest.mark.parametrize("name", ["", "x" * 101])
def test_the_name_of_a_view_is_no_novel(engine: Engine, name: str) -> None:
    with pytest.raises(BadArgument, match="1 to 100 characters"):
        SqlView(engine, insert_and_count, name=name)


# -- several at once ---------------------------------------------------------------------------------------------------


def insert_many(connection: Connection, given: Sequence[Transaction[str]]) -> None:
    connection.execute(sa.insert(ROWS), [{"id": one.id, "text": one.value} for one in given])
    if connection.execute(sa.update(TOTAL).values(n=TOTAL.c.n + len(given))).rowcount == 0:
        connection.execute(sa.insert(TOTAL).values(one=1, n=len(given)))


def bulk_view_of(
    engine: Engine, apply_many: Callable[[Connection, Sequence[Transaction[str]]], None] = insert_many, **settings: Any
) -> SqlView[str]:
    view = SqlView(engine, apply_many=apply_many, tables=TABLES, **settings)
    view._prepare(CLUSTER)
    assert view.read_position(0) >= -1
    return view


def test_a_function_for_many_is_called_once_for_each_database_transaction(engine: Engine) -> None:
    calls: list[list[int]] = []

    def apply_many(connection: Connection, given: Sequence[Transaction[str]]) -> None:
        calls.append([one.id for one in given])
        insert_many(connection, given)

    bulk_view_of(engine, apply_many, batch_max=4).apply_all(feed(0, 9))
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert holds(engine, 9)


@pytest.mark.parametrize("bad", range(8))
def test_a_function_for_many_that_fails_is_given_one_group_after_the_other(engine: Engine, bad: int) -> None:
    def apply_many(connection: Connection, given: Sequence[Transaction[str]]) -> None:
        insert_many(connection, given)
        if any(one.id == bad for one in given):
            raise Unhappy

    given = groups(2, 1, 4, 1)
    with pytest.raises(ApplyFailed):
        bulk_view_of(engine, apply_many).apply_all(given)
    assert holds(engine, max(one.id for one in given if one.id <= bad and not one.follows) - 1)


def test_a_function_for_many_cannot_end_the_transaction(engine: Engine) -> None:
    def apply_many(connection: Connection, given: Sequence[Transaction[str]]) -> None:
        insert_many(connection, given)
        connection.commit()

    with pytest.raises(ApplyFailed, match="tried to commit while applying transaction 0"):
        bulk_view_of(engine, apply_many).apply_all(feed(0, 3))
    assert content(engine) == ([], 0, -1)


# -- probes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [view_of, bulk_view_of])
def test_a_probe_raises_the_position_and_is_not_applied(engine: Engine, make: Callable[[Engine], SqlView[str]]) -> None:
    view = make(engine)
    view.apply_all([Given(0), Given(1, header=PROBE_KIND), Given(2)])
    view.apply_all([Given(3, header=PROBE_KIND)])
    view.apply_all([Given(4)])
    assert content(engine) == ([0, 2, 4], 3, 4)


# -- poison ------------------------------------------------------------------------------------------------------------


def refusing(*bad: int) -> Callable[[Connection, Transaction[str]], None]:
    def apply(connection: Connection, given: Transaction[str]) -> None:
        insert_and_count(connection, given)
        if given.id in bad:
            raise Unhappy("no such customer")

    return apply


def letters(engine: Engine) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        columns = "cluster, view_name, partition_id, id, kind, reason"
        return [tuple(row) for row in connection.execute(sa.text(f"SELECT {columns} FROM waltz_dead_letters ORDER BY id"))]


def as_a_client(view: SqlView[str], given: Sequence[Transaction[str]]) -> list[Decision]:
    """Tries as a follower does, without its pauses, until it is applied or parked; the decisions on the way."""

    async def story() -> list[Decision]:
        decisions: list[Decision] = []
        while Decision.STOP not in decisions:
            try:
                await view.apply_batch(given)
                break
            except WaltzError as error:
                decisions.append(await view.failed(given[0], error))
        return decisions

    return asyncio.run(story())


def test_after_so_many_tries_the_partition_is_parked_and_the_hook_is_told(engine: Engine) -> None:
    told: list[Poison] = []
    view = view_of(engine, refusing(2), tries=3, on_poison=told.append)
    assert as_a_client(view, feed(0, 4)) == [Decision.RETRY, Decision.RETRY, Decision.STOP]
    assert holds(engine, 1)
    assert [(one.view, one.partition, one.id, one.count, one.is_put_aside) for one in told] == [("view", 0, 2, 1, False)]
    assert isinstance(told[0].error.__cause__, Unhappy)
    assert "waltz_dead_letters" not in sa.inspect(engine).get_table_names()
    assert len(as_a_client(view, feed(2, 4))) == 3, "taken out and in, it counts anew"


def test_a_database_that_is_away_is_tried_for_ever(engine: Engine) -> None:
    view = view_of(engine, tries=1)
    error = DatabaseUnavailable("locked")
    decisions = asyncio.run(_ask_often(view, error))
    assert set(decisions) == {Decision.RETRY}


async def _ask_often(view: SqlView[str], error: Exception) -> list[Decision]:
    return [await view.failed(Given(0), error) for _ in range(50)]


def test_a_dead_letter_is_put_aside_and_the_view_goes_on(engine: Engine) -> None:
    told: list[Poison] = []
    view = view_of(engine, refusing(2, 3), tries=3, then="park", on_poison=told.append)
    given = [Given(id, header=70 + id) for id in range(6)]
    assert Decision.STOP not in as_a_client(view, given)
    assert content(engine) == ([0, 1, 4, 5], 4, 5)
    reasons = [f"applying transaction {id} of partition 0 failed: Unhappy: no such customer" for id in (2, 3)]
    assert letters(engine) == [
        (str(CLUSTER), "view", 0, 2, 72, reasons[0]),
        (str(CLUSTER), "view", 0, 3, 73, reasons[1]),
    ]
    assert [(one.id, one.is_put_aside) for one in told] == [(2, True), (3, True)]


def test_a_view_that_is_built_anew_puts_aside_again(engine: Engine) -> None:
    """Whoever builds a view anew deletes its rows and its position, and may leave the dead letters."""
    given = [Given(id) for id in range(4)]
    as_a_client(view_of(engine, refusing(2), tries=1, then="park"), given)
    with engine.begin() as connection:
        for table in ("waltz_positions", *TABLES.tables):
            connection.execute(sa.text(f"DELETE FROM {table}"))
    told: list[Poison] = []
    view = view_of(engine, refusing(2), tries=1, then="park", on_poison=told.append)
    view.apply_all(given)
    assert ([letter[3] for letter in letters(engine)], view.read_position(0)) == ([2], 3)
    assert [one.id for one in told] == [2]


def test_a_group_is_put_aside_as_a_whole(engine: Engine) -> None:
    given = groups(2, 3, 1)
    told: list[Poison] = []
    view = view_of(engine, refusing(3), tries=1, then="park", on_poison=told.append)
    assert as_a_client(view, given) == []
    assert content(engine) == ([0, 1, 5], 3, 5)
    assert [letter[3] for letter in letters(engine)] == [2, 3, 4]
    assert [(one.id, one.count) for one in told] == [(2, 3)]


def test_a_dead_letter_and_the_position_are_written_together(fresh: Engine, path: Path) -> None:
    """Whatever fails while a transaction is put aside: it is a letter and the position is over it, or neither."""
    SqlView(fresh, refusing(0), tries=1, then="park", accept_rename=True)._prepare(CLUSTER)

    def put_aside() -> None:
        view = SqlView(unreliable(path), refusing(0), tries=1, then="park")
        view._cluster = CLUSTER
        view.apply_all([Given(0)])

    at = 0
    while True:
        at += 1
        Driver.arm(at, at % 2 == 0, Crash())
        try:
            put_aside()
            break
        except Crash:
            assert len(letters(fresh)) == content(fresh)[2] + 1
            assert content(fresh)[:2] == ([], 0)
    assert at > 8
    assert (len(letters(fresh)), content(fresh)) == (1, ([], 0, 0))


def test_what_another_process_could_apply_is_no_dead_letter(engine: Engine) -> None:
    told: list[Poison] = []
    view = view_of(engine, refusing(0), tries=2, then="park", on_poison=told.append)
    with pytest.raises(ApplyFailed):
        view.apply_all([Given(0)])
    mended = view_of(engine, accept_rename=True)

    def apply(connection: Connection, given: Transaction[str]) -> None:
        raise Unhappy

    view._function = apply
    mended.apply_all([Given(0)])
    view.apply_all([Given(0)])
    assert (letters(engine), told) == ([], [])
    assert holds(engine, 0)


def test_a_hook_that_fails_stops_nothing(engine: Engine) -> None:
    def hook(poison: Poison) -> None:
        raise Unhappy

    view = view_of(engine, refusing(0), tries=1, then="park", on_poison=hook)
    view.apply_all(feed(0, 1))
    assert content(engine) == ([1], 1, 1)


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_view_in_another_process_is_waited_for_by_its_position(engine: Engine, path: Path) -> None:
    """The one that waits has no client, and is never prepared."""
    applying = view_of(engine)

    async def story() -> None:
        other = sqlite(str(path))
        waiting = SqlView(other, insert_and_count)
        waits = [asyncio.create_task(waiting.wait(Committed(id, 3, 0).token, timeout=60)) for id in (0, 2)]
        await asyncio.sleep(0.05)
        assert not any(wait.done() for wait in waits)
        await asyncio.to_thread(applying.apply_all, feed(0, 2))
        await waits[0]
        assert not waits[1].done()
        await asyncio.to_thread(applying.apply_all, feed(3, 4))
        await waits[1]
        await asyncio.to_thread(waiting.wait_blocking, 4, partition=0)
        await waiting.close()
        other.dispose()

    asyncio.run(story())


def test_waiting_ends_with_an_error_that_says_how_far_the_view_is(engine: Engine) -> None:
    view = view_of(engine)
    view.apply_all(feed(0, 2))

    async def story() -> None:
        with pytest.raises(NotApplied, match="has the position 2 for partition 0, and not 3 yet"):
            await view.wait(3, partition=0, timeout=1)
        with pytest.raises(NotApplied, match="has the position -1 for partition 5"):
            await view.wait(3, partition=5, timeout=1)
        await view.close()

    with pytest.raises(NotApplied):
        view.wait_blocking(3, partition=0, timeout=1)
    asyncio.run(story())


def test_a_database_that_never_answers_a_wait_is_said(engine: Engine) -> None:
    async def story() -> None:
        view = SqlView(engine, insert_and_count)  # nobody has made its tables
        with pytest.raises(DatabaseUnavailable, match="no such table"):
            await view.wait(0, partition=0, timeout=1)
        for outcome in (Rejected(Reason.NOT_IN_LOG, 0, 0), None, True):
            with pytest.raises(BadArgument, match="only what is committed"):
                await view.wait(outcome, partition=0)  # type: ignore[arg-type]
        with pytest.raises(BadArgument, match="only what is committed"):
            await view.wait(0)
        with pytest.raises(BadArgument, match="the token 1-0 is of partition 1, not of 0"):
            await view.wait(Token(1, 0), partition=0)
        with pytest.raises(BadArgument, match="above 0"):
            await view.wait(0, partition=0, timeout=0)
        await view.close()

    asyncio.run(story())
