"""Views in a real PostgreSQL: exactly once through lost answers, killed processes, a server that goes away, and races."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tests.process.postgres import LocalPostgres, programs
from tests.process.test_sql_processes import applier, finish
from tests.unit.waltzd.sql import test_forks as forks
from tests.unit.waltzd.sql.test_inbox import CLUSTER as INBOX_CLUSTER
from tests.unit.waltzd.sql.test_inbox import MAILS, Delivery, inbox_of, rows_and_ranges, send, sent, with_old_pages
from tests.unit.waltzd.sql.test_view import (
    CLUSTER,
    FORBIDDEN,
    OTHER_CLUSTER,
    ROWS,
    TABLES,
    Given,
    Unhappy,
    content,
    feed,
    holds,
    insert_and_count,
    insert_many,
    letters,
    refusing,
)
from waltzd.client.view import Transaction
from waltzd.errors import (
    ApplyFailed,
    BadArgument,
    DatabaseUnavailable,
    ForeignCluster,
    InboxPruned,
    OtherView,
    WaltzError,
)
from waltzd.sql import SqlView

FOUND = programs()
pytestmark = pytest.mark.skipif(
    FOUND is None, reason="there is no PostgreSQL on this machine: neither installed nor packaged"
)


@pytest.fixture(scope="module")
def postgres() -> Iterator[LocalPostgres]:
    assert FOUND is not None
    server = LocalPostgres(FOUND)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def engine(postgres: LocalPostgres) -> Engine:
    """With an empty database."""
    engine = postgres.engine()
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "DROP TABLE IF EXISTS waltz_views, waltz_positions, waltz_marks, waltz_dead_letters, rows, total, "
                "waltz_inboxes, waltz_inbox_done, waltz_inbox_pruned, waltz_inbox_pages, mails, events"
            )
        )
    return engine


def view_of(
    engine: Engine, apply: Callable[[Connection, Transaction[str]], None] = insert_and_count, **settings: Any
) -> SqlView[str]:
    view = SqlView(engine, apply, tables=TABLES, **settings)
    view._prepare(CLUSTER)
    view.read_position(0)
    return view


def in_threads(*work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except (WaltzError, AssertionError) as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def persistent(work: Callable[[], object]) -> Callable[[], None]:
    """Tries again when the database asks for it, as a client does."""

    def run() -> None:
        for _ in range(10_000):
            try:
                work()
            except DatabaseUnavailable:
                continue
            return
        raise AssertionError("the database never took it")

    return run


def test_one_by_one_and_in_batches(engine: Engine) -> None:
    view = view_of(engine, batch_max=4)
    view.apply_all([Given(0)])
    view.apply_all(feed(1, 9))
    assert holds(engine, 9)


def test_tables_and_rows_may_be_made_by_several_at_once(engine: Engine) -> None:
    def begin() -> None:
        view_of(engine)

    in_threads(*[begin] * 6)
    assert content(engine) == ([], 0, -1)


def test_several_views_apply_everything_once(engine: Engine) -> None:
    views = [view_of(engine, batch_max=size) for size in (1, 3, 5)]
    in_threads(*[functools.partial(view.apply_all, feed(0, 199)) for view in views])
    assert holds(engine, 199)


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_stricter_isolation_asks_to_try_again_and_applies_once(
    postgres: LocalPostgres, engine: Engine, isolation: str
) -> None:
    views = [view_of(postgres.engine(isolation_level=isolation), batch_max=size) for size in (3, 5)]
    in_threads(*[persistent(functools.partial(view.apply_all, feed(0, 99))) for view in views])
    assert holds(engine, 99)


def test_processes_that_are_killed(postgres: LocalPostgres, engine: Engine) -> None:
    last = 600
    steady = applier(postgres.url, last, 3)
    for round in range(3):
        victim = applier(postgres.url, last, 2 + round)
        assert victim.stdout is not None
        victim.stdout.readline()
        victim.kill()
        assert finish(victim) in (0, -signal.SIGKILL)
    assert finish(steady) == 0
    assert finish(applier(postgres.url, last, 7)) == 0
    assert holds(engine, last)


@pytest.mark.parametrize("die_at", [6, 9, 11, 13, 14, 17])
def test_a_process_killed_in_front_of_a_statement(postgres: LocalPostgres, engine: Engine, die_at: int) -> None:
    view_of(engine)
    finish(applier(postgres.url, 3, 2, die_at))
    ids, total, mark = content(engine)
    assert (ids, total) == (list(range(mark + 1)), mark + 1)
    view_of(engine).apply_all(feed(mark + 1, 3))
    assert holds(engine, 3)


class Forgetful(psycopg.Connection[Any]):
    """The connection breaks at the n-th commit: before the server has heard of it, or before its answer arrives."""

    commits = 0
    break_at = 0
    is_heard = False

    def commit(self) -> None:
        Forgetful.commits += 1
        if Forgetful.commits != Forgetful.break_at:
            return super().commit()
        if Forgetful.is_heard:
            super().commit()
        self.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")


@pytest.mark.parametrize("is_heard", [False, True])
@pytest.mark.parametrize("break_at", [1, 2])
def test_a_commit_whose_answer_is_lost(postgres: LocalPostgres, engine: Engine, is_heard: bool, break_at: int) -> None:
    view_of(engine)
    broken = postgres.engine(creator=lambda: Forgetful.connect(postgres.socket))
    view = SqlView(broken, insert_and_count, batch_max=2)
    Forgetful.break_at = 0
    view._prepare(CLUSTER)
    Forgetful.commits, Forgetful.break_at, Forgetful.is_heard = 0, break_at, is_heard
    with pytest.raises(DatabaseUnavailable, match="server closed the connection") as raised:
        view.apply_all(feed(0, 3))
    assert raised.value.facts["id"] == str(2 * (break_at - 1))
    ids, total, mark = content(engine)
    assert mark == 2 * (break_at - 1 + is_heard) - 1
    assert (ids, total) == (list(range(mark + 1)), mark + 1)
    view.apply_all(feed(0, 3))
    assert holds(engine, 3)


def test_a_server_that_goes_away_in_the_middle_and_comes_back(postgres: LocalPostgres, engine: Engine) -> None:
    is_sound = False

    def apply(connection: Connection, given: Transaction[str]) -> None:
        insert_and_count(connection, given)
        if given.id == 3 and not is_sound:
            postgres.stop()

    view = view_of(engine, apply, batch_max=2)
    with pytest.raises(DatabaseUnavailable):
        view.apply_all(feed(0, 5))
    with pytest.raises(DatabaseUnavailable):
        view.apply_all(feed(2, 5))
    postgres.start()
    assert holds(engine, 1)
    is_sound = True
    view.apply_all(feed(2, 5))
    assert holds(engine, 5)


def test_a_process_that_stands_still_does_not_stop_the_others_for_ever(engine: Engine) -> None:
    view = view_of(engine, lock_seconds=1)
    with engine.connect() as other:
        other.execute(sa.text("UPDATE waltz_positions SET position = 0 WHERE partition_id = 0"))
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            view.apply_all([Given(0)])
        other.rollback()
    view.apply_all([Given(0)])
    assert holds(engine, 0)


def test_an_application_that_fails(engine: Engine) -> None:
    def apply(connection: Connection, given: Transaction[str]) -> None:
        insert_and_count(connection, given)
        if given.id == 4:
            raise Unhappy("no")

    with pytest.raises(ApplyFailed, match="transaction 4"):
        view_of(engine, apply).apply_all(feed(0, 9))
    assert holds(engine, 3)


def test_a_statement_that_fails_cannot_be_hidden(engine: Engine) -> None:
    """PostgreSQL turns the commit of a failed transaction into a rollback; then nothing must count as applied."""

    def apply(connection: Connection, given: Transaction[str]) -> None:
        try:
            connection.execute(sa.insert(ROWS).values(id=None, text=""))
        except sa.exc.IntegrityError:
            return

    view = view_of(engine, apply)
    with pytest.raises(
        ApplyFailed, match="a statement failed while applying transaction 0 of partition 0, and the function"
    ):
        view.apply_all(feed(0, 1))
    assert content(engine) == ([], 0, -1)


def test_a_statement_may_fail_within_a_savepoint(engine: Engine) -> None:
    def apply(connection: Connection, given: Transaction[str]) -> None:
        with pytest.raises(sa.exc.IntegrityError), connection.begin_nested():
            connection.execute(sa.insert(ROWS).values(id=None, text=""))
        insert_and_count(connection, given)

    view_of(engine, apply).apply_all(feed(0, 2))
    assert holds(engine, 2)


@pytest.mark.parametrize("how", [*FORBIDDEN, "end as text"])
def test_the_function_cannot_end_the_transaction(engine: Engine, how: str) -> None:
    def apply(connection: Connection, given: Transaction[str]) -> None:
        insert_and_count(connection, given)
        if how in FORBIDDEN:
            FORBIDDEN[how](connection, given)
        else:
            connection.execute(sa.text("END"))

    one = sa.create_engine(engine.url, pool_size=1, max_overflow=0)
    with pytest.raises((ApplyFailed, DatabaseUnavailable)):
        view_of(one, apply).apply_all([Given(0)])
    with one.begin() as connection:  # the same one: nothing of what was refused may be left in it
        connection.execute(sa.insert(ROWS).values(id=7, text="of somebody else"))
    assert content(engine) == ([7], 0, -1)
    one.dispose()


def test_an_engine_that_commits_by_itself_is_refused(postgres: LocalPostgres, engine: Engine) -> None:
    with pytest.raises(BadArgument, match="commits every statement"):
        view_of(postgres.engine(isolation_level="AUTOCOMMIT"))


def test_a_function_for_many_and_one_that_refuses(engine: Engine) -> None:
    def apply_many(connection: Connection, given: Sequence[Transaction[str]]) -> None:
        insert_many(connection, given)
        if any(one.id in (3, 4) for one in given):
            raise Unhappy("no")

    view: SqlView[str] = SqlView(engine, apply_many=apply_many, tables=TABLES, tries=1, then="park", batch_max=4)
    view._prepare(CLUSTER)
    view.read_position(0)
    view.apply_all([Given(0), Given(1, follows=False), Given(2), Given(3), Given(4, follows=True), Given(5)])
    assert content(engine) == ([0, 1, 2, 5], 4, 5)
    assert [letter[3] for letter in letters(engine)] == [3, 4]


def test_several_views_put_the_same_poison_aside_once(engine: Engine) -> None:
    views: list[SqlView[str]] = []
    for size in (1, 3, 5):
        view: SqlView[str] = SqlView(
            engine, refusing(*range(0, 60, 7)), tables=TABLES, batch_max=size, tries=2, then="park"
        )
        view._prepare(CLUSTER)
        view.read_position(0)
        views.append(view)

    def follow(view: SqlView[str]) -> None:
        while view.read_position(0) < 59:
            with contextlib.suppress(ApplyFailed):
                view.apply_all(feed(view.read_position(0) + 1, 59))

    in_threads(*[functools.partial(follow, view) for view in views])
    good = [id for id in range(60) if id % 7]
    assert content(engine) == (good, len(good), 59)
    assert [letter[3] for letter in letters(engine)] == list(range(0, 60, 7))


def test_a_view_is_waited_for_from_another_connection(engine: Engine) -> None:
    applying, waiting = view_of(engine), SqlView[str](engine, insert_and_count)
    thread = threading.Thread(target=applying.apply_all, args=(feed(0, 2),))
    thread.start()
    waiting.wait_blocking(2, partition=0, timeout=60)
    thread.join()
    assert waiting.read_positions() == {0: 2}


def test_another_cluster_and_another_function_are_refused(engine: Engine) -> None:
    view_of(engine).apply_all(feed(0, 2))
    with pytest.raises(ForeignCluster):
        SqlView(engine, insert_and_count)._prepare(OTHER_CLUSTER)
    with pytest.raises(OtherView):
        view_of(engine, refusing())
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE waltz_positions"))
        connection.execute(sa.text("CREATE TABLE waltz_marks (partition_id INTEGER PRIMARY KEY)"))
    with pytest.raises(OtherView, match="in which an earlier version of Waltz kept the positions"):
        view_of(engine)
    assert holds_rows(engine, 2)


def holds_rows(engine: Engine, last: int) -> bool:
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(ROWS.c.id).order_by(ROWS.c.id))) == list(range(last + 1))


# -- inboxes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "SERIALIZABLE"])
def test_members_that_share_an_inbox_do_everything_once_while_it_is_pruned(
    postgres: LocalPostgres, engine: Engine, isolation: str
) -> None:
    ids = range(80)
    is_over = threading.Event()

    def work() -> None:
        inbox = inbox_of(postgres.engine(isolation_level=isolation))
        for id in ids:
            with contextlib.suppress(InboxPruned):
                persistent(functools.partial(inbox.handler_blocking(send), Delivery(id)))()

    def prune() -> None:
        """All of it, also what members have not done yet: a pruned id is refused, and not done."""
        inbox = inbox_of(engine)
        while not is_over.is_set():
            with contextlib.suppress(DatabaseUnavailable):
                inbox.prune(0, max([-1, *sent(engine)]))

    inbox_of(engine).prepare(INBOX_CLUSTER)
    pruning = threading.Thread(target=prune)
    pruning.start()
    try:
        in_threads(*[work] * 4)
    finally:
        is_over.set()
        pruning.join()
    assert sent(engine) == list(ids)
    persistent(functools.partial(inbox_of(engine).prune, 0, ids[-1]))()
    assert rows_and_ranges(engine) == (0, [(0, ids[-1])])


def test_bitmaps_of_an_earlier_version_become_rows_once(postgres: LocalPostgres, engine: Engine) -> None:
    with_old_pages(engine, range(8200))

    def work() -> None:
        inbox = inbox_of(postgres.engine())
        for id in (0, 8199, 8200):
            persistent(functools.partial(inbox.handler_blocking(send), Delivery(id)))()

    in_threads(*[work] * 4)
    assert sent(engine) == [8200]
    assert rows_and_ranges(engine) == (8201, [])
    assert not sa.inspect(engine).has_table("waltz_inbox_pages")


def test_a_delivery_in_two_hands_is_done_by_the_one_that_commits(engine: Engine) -> None:
    inbox = inbox_of(engine, lock_seconds=1)
    with inbox.once_blocking(Delivery(0)) as connection:
        assert connection is not None
        send(connection, Delivery(0))
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            inbox.handler_blocking(send)(Delivery(0))
        inbox.handler_blocking(send)(Delivery(1))  # others do not wait
    inbox.handler_blocking(send)(Delivery(0))
    assert sent(engine) == [0, 1]


@pytest.mark.parametrize("is_heard", [False, True])
def test_an_inbox_outlives_a_commit_whose_answer_is_lost(postgres: LocalPostgres, engine: Engine, is_heard: bool) -> None:
    inbox_of(engine).prepare(INBOX_CLUSTER)
    broken = postgres.engine(creator=lambda: Forgetful.connect(postgres.socket))
    Forgetful.break_at = 0
    inbox = inbox_of(broken)
    inbox.prepare(INBOX_CLUSTER)
    Forgetful.commits, Forgetful.break_at, Forgetful.is_heard = 0, 1, is_heard
    with pytest.raises(DatabaseUnavailable, match="server closed the connection"):
        inbox.handler_blocking(send)(Delivery(0))
    assert sent(engine) == ([0] if is_heard else [])
    inbox.handler_blocking(send)(Delivery(0))
    assert sent(engine) == [0]


def test_a_function_that_goes_on_after_a_failed_statement_has_done_nothing(engine: Engine) -> None:
    def careless(connection: Connection, delivery: Delivery) -> None:
        send(connection, delivery)
        with contextlib.suppress(sa.exc.ProgrammingError):
            connection.execute(sa.text("SELECT nothing FROM nowhere"))

    inbox = inbox_of(engine)
    with pytest.raises(ApplyFailed, match="a savepoint around such a statement"):
        inbox.handler_blocking(careless)(Delivery(0))
    assert not inbox.is_done(0, 0)
    inbox.handler_blocking(send)(Delivery(0))
    assert sent(engine) == [0]


def test_an_engine_that_reads_an_older_snapshot_is_refused_for_an_inbox(postgres: LocalPostgres, engine: Engine) -> None:
    inbox = inbox_of(postgres.engine(isolation_level="REPEATABLE READ"))
    with pytest.raises(BadArgument, match="REPEATABLE READ"):
        inbox.handler_blocking(send)(Delivery(0))
    assert not sa.inspect(engine).has_table(MAILS.name)
    with pytest.raises(BadArgument):
        inbox_of(postgres.engine(isolation_level="AUTOCOMMIT")).handler_blocking(send)(Delivery(0))


@pytest.mark.parametrize(
    "story",
    [
        forks.test_up_to_the_fork_a_view_goes_over_and_above_it_says_what_to_do,
        forks.test_who_waits_for_what_was_given_up_is_told,
        forks.test_a_process_that_was_fed_before_the_fork_neither_writes_above_it_nor_stands_in_the_way,
        forks.test_a_table_of_an_earlier_version_gets_the_column,
        forks.test_an_inbox_of_an_earlier_version_gets_its_columns,
        pytest.param(
            functools.partial(forks.test_an_inbox_does_each_transaction_once_whatever_forks, seed=1), marks=pytest.mark.long
        ),
    ],
)
def test_a_log_that_an_operator_ends(engine: Engine, story: Callable[[Engine], None]) -> None:
    story(engine)
