"""Views in SQLite: applied exactly once, whatever fails at whichever statement, and whoever else writes the same file."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event, orm
from sqlalchemy.engine import Connection, Engine

from waltzd.errors import ApplyFailed, BadArgument, DatabaseUnavailable, NotTransactional, ViewBehind, WaltzError
from waltzd.sql import SqlView, sqlite

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


@dataclass(frozen=True)
class Given:
    """A transaction as far as a view looks at it."""

    id: int
    partition: int = 0
    text: str = ""
    follows: bool = False


def feed(first: int, last: int) -> list[Given]:
    return [Given(id, text=f"text {id}") for id in range(first, last + 1)]


def groups(*sizes: int) -> list[Given]:
    flags = [number > 0 for size in sizes for number in range(size)]
    return [Given(id, follows=follows) for id, follows in enumerate(flags)]


def insert_and_count(connection: Connection, given: Given) -> None:
    """Two changes that a half-applied transaction would tear apart, neither of which can be done twice unnoticed."""
    connection.execute(sa.insert(ROWS).values(id=given.id, text=given.text))
    if connection.execute(sa.update(TOTAL).values(n=TOTAL.c.n + 1)).rowcount == 0:
        connection.execute(sa.insert(TOTAL).values(one=1, n=1))


def content(engine: Engine) -> tuple[list[int], int, int]:
    """Ids of the rows, how often something was counted, the mark."""
    with engine.connect() as connection:
        ids = list(connection.scalars(sa.select(ROWS.c.id).order_by(ROWS.c.id)))
        total = connection.scalar(sa.select(TOTAL.c.n)) or 0
        mark = connection.scalar(sa.text("SELECT mark FROM waltz_marks WHERE partition_id = 0"))
    return ids, total, -1 if mark is None else mark


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
    engine: Engine, apply: Callable[[Connection, Given], None] = insert_and_count, **settings: Any
) -> SqlView[Given]:
    view = SqlView(engine, apply, tables=TABLES, **settings)
    view.prepare()
    assert view.read_mark(0) >= -1  # as a client does at each activation
    return view


# -- the plain story ---------------------------------------------------------------------------------------------------


def test_a_client_sees_a_mark_then_applies_one_by_one_and_in_batches(engine: Engine) -> None:
    async def story() -> None:
        view = SqlView(engine, insert_and_count, tables=TABLES)
        assert await view.mark(0) == -1
        await view.apply(Given(0))
        await view.apply_batch(feed(1, 9))
        assert await view.mark(0) == 9
        await view.close()

    asyncio.run(story())
    assert holds(engine, 9)


def test_partitions_have_marks_of_their_own(engine: Engine) -> None:
    view = view_of(engine, lambda connection, given: None)
    view.apply_all([Given(0, partition=0), Given(1, partition=0)])
    view.apply_all([Given(0, partition=7)])
    assert [view.read_mark(partition) for partition in (0, 1, 7)] == [1, -1, 0]


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
    def apply(connection: Connection, given: Given) -> None:
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


def test_the_view_and_its_mark_become_visible_together(engine: Engine, path: Path) -> None:
    seen = []
    other = sqlite(str(path))

    def apply(connection: Connection, given: Given) -> None:
        insert_and_count(connection, given)
        seen.append(content(other))

    view_of(engine, apply).apply_all(feed(0, 1))
    assert seen == [([], 0, -1), ([], 0, -1)]
    assert holds(other, 1)
    other.dispose()


def test_the_orm_can_be_used(engine: Engine) -> None:
    def apply(connection: Connection, given: Given) -> None:
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
        connection.execute(sa.text("UPDATE waltz_marks SET mark = 2"))
    with pytest.raises(ViewBehind, match="has the mark 2 for partition 0; this client had applied 4") as raised:
        view.apply_all([Given(5)])
    assert raised.value.facts == {"partition": "0", "mark": "2"}
    assert content(engine) == ([0, 1, 2, 3, 4], 5, 2)


def test_a_row_that_was_deleted_is_a_database_that_went_back(engine: Engine) -> None:
    view = view_of(engine)
    view.apply_all(feed(0, 4))
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM waltz_marks"))
    with pytest.raises(ViewBehind):
        view.apply_all([Given(5)])


# -- functions that fail -----------------------------------------------------------------------------------------------


class Unhappy(Exception):
    pass


@pytest.mark.parametrize("bad", [0, 1, 5, 9])
def test_everything_before_a_transaction_that_fails_is_applied(engine: Engine, bad: int) -> None:
    is_mended = False

    def apply(connection: Connection, given: Given) -> None:
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
    def apply(connection: Connection, given: Given) -> None:
        connection.execute(sa.insert(ROWS).values(id=given.id // 2, text=""))

    view = view_of(engine, apply)
    with pytest.raises(ApplyFailed, match="transaction 1 of partition 0 failed: IntegrityError"):
        view.apply_all(feed(0, 3))
    assert content(engine) == ([0], 0, 0)


def test_a_statement_may_fail_where_the_database_allows_it(engine: Engine) -> None:
    def apply(connection: Connection, given: Given) -> None:
        with pytest.raises(sa.exc.IntegrityError):
            connection.execute(sa.insert(ROWS).values(id=None, text=None))
        insert_and_count(connection, given)

    view_of(engine, apply).apply_all(feed(0, 2))
    assert holds(engine, 2)


def commit_text(connection: Connection, given: Given) -> None:
    connection.execute(sa.text("COMMIT"))


def commit_behind_a_comment(connection: Connection, given: Given) -> None:
    connection.exec_driver_sql("-- now\n /* really */ ; commit")


def swallow(connection: Connection, given: Given) -> None:
    try:
        connection.commit()
    except ApplyFailed:
        connection.execute(sa.insert(ROWS).values(id=1000, text="in a transaction of my own"))


def session_commit(connection: Connection, given: Given) -> None:
    with orm.Session(bind=connection, join_transaction_mode="control_fully") as session:
        session.execute(sa.insert(ROWS).values(id=1000, text=""))
        session.commit()


FORBIDDEN: dict[str, Callable[[Connection, Given], object]] = {
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

    def apply(connection: Connection, given: Given) -> None:
        insert_and_count(connection, given)
        if given.id == 2 and not is_mended:
            FORBIDDEN[how](connection, given)

    view = view_of(engine, apply)
    with pytest.raises((ApplyFailed, DatabaseUnavailable)):
        view.apply_all(feed(0, 3))
    ids, total, mark = content(engine)
    assert (ids, total) == (list(range(mark + 1)), mark + 1)
    assert mark < 2
    is_mended = True
    view.apply_all(feed(0, 3))
    assert holds(engine, 3)


def test_a_refusal_says_what_was_tried(engine: Engine) -> None:
    view = view_of(engine, lambda connection, _: connection.commit())
    with pytest.raises(ApplyFailed, match="tried to commit while applying transaction 0 of partition 0"):
        view.apply_all(feed(0, 0))


def test_a_savepoint_takes_back_a_part(engine: Engine) -> None:
    def apply(connection: Connection, given: Given) -> None:
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


OPERATIONS = 20
"""How many statements and commits `work` takes; the last test of this part holds it to that."""


def work(engine: Engine) -> None:
    view = SqlView(engine, insert_and_count)
    view.read_mark(0)
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
    SqlView(sound, insert_and_count).prepare()
    yield sound
    sound.dispose()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(1, OPERATIONS + 1))
def test_a_crash_at_any_operation_leaves_whole_transactions(fresh: Engine, path: Path, at: int, after: bool) -> None:
    Driver.arm(at, after, Crash())
    with pytest.raises(Crash):
        work(unreliable(path))
    ids, total, mark = content(fresh)
    assert (ids, total) == (list(range(mark + 1)), mark + 1)
    work(unreliable(path))  # the next start
    assert holds(fresh, 2)


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done, but not said"])
@pytest.mark.parametrize("at", range(1, OPERATIONS + 1))
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
    """The driver begins a transaction at the first statement that writes: raising the mark."""
    engine = sa.create_engine(f"sqlite:///{path}")
    is_mended = False

    def apply(connection: Connection, given: Given) -> None:
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
    with pytest.raises(NotTransactional, match="commits every statement"):
        view.prepare()
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT * FROM waltz_marks")).all() == []
    engine.dispose()


def test_a_missing_directory_is_said(tmp_path: Path) -> None:
    engine = sqlite(str(tmp_path / "nowhere" / "view.db"))
    with pytest.raises(DatabaseUnavailable, match=r"could not prepare the view: .*unable to open"):
        SqlView(engine, insert_and_count).prepare()


def test_arguments_that_make_no_sense(engine: Engine) -> None:
    async def apply(connection: Connection, given: Given) -> None:
        raise AssertionError

    with pytest.raises(BadArgument, match="not an async one"):
        SqlView(engine, apply)  # type: ignore[arg-type]
    for settings in ({"batch_max": 0}, {"lock_seconds": 0}, {"threads": 0}):
        with pytest.raises(BadArgument, match="at least 1"):
            SqlView(engine, insert_and_count, **settings)  # type: ignore[arg-type]
