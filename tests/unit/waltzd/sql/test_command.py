"""Commands that read the database of a view."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from waltzd.client.view import Builder, Transaction
from waltzd.errors import BadArgument
from waltzd.protocol.locks import Committed, Declined, write_lock
from waltzd.sql import SqlCommand, SqlView, sqlite
from waltzd.testing import BlockingCluster, LocalCluster

TABLES = sa.MetaData()
WORDS = sa.Table("words", TABLES, sa.Column("word", sa.Text, primary_key=True))


def apply(connection: Connection, transaction: Transaction) -> None:
    connection.execute(sa.insert(WORDS).values(word=transaction.payload.decode()))


class Add(SqlCommand):
    """Add a word that the database does not have."""

    key = "words"

    def __init__(self, engine: Any, word: str, *, writes: bool = False) -> None:
        """`writes`: the decision writes, which it must not. SQLite refuses that while somebody else writes."""
        self.engine, self.word, self.writes = engine, word, writes
        self.locks = [write_lock("word", word)]
        self.threads: list[int] = []

    def decide(self, builder: Builder, connection: Connection) -> bool:
        self.threads.append(threading.get_ident())
        if connection.scalar(sa.select(WORDS.c.word).where(WORDS.c.word == self.word)) is not None:
            return builder.decline("it is there")
        if self.writes:
            connection.execute(sa.insert(WORDS).values(word=f"{self.word} by mistake"))
        builder.payload = self.word.encode()
        return True


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = sqlite(str(tmp_path / "words.db"))
    yield engine
    engine.dispose()


def words(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(WORDS.c.word).order_by(WORDS.c.word)))


def test_a_decision_reads_on_a_thread_and_writes_nothing(engine: Engine) -> None:
    async def story(cluster: LocalCluster) -> None:
        view: SqlView = SqlView(engine, apply, tables=TABLES)
        async with cluster.client(view=view) as client:
            assert isinstance(await client.submit(Add(engine, "a", writes=True)), Committed)
            commands = [Add(engine, word) for word in ("b", "a", "b")]
            outcomes = await asyncio.gather(*[client.submit(command) for command in commands])
            assert [type(one) for one in outcomes] == [Committed, Declined, Declined]
            assert outcomes[1] == Declined("it is there")
            assert threading.get_ident() not in {thread for one in commands for thread in one.threads}
            await client.wait_caught_up()
        await view.close()
        assert words(engine) == ["a", "b"], "what a decision wrote is rolled back"

    LocalCluster().run(story)


def test_a_blocking_client_takes_the_same_command(engine: Engine) -> None:
    view: SqlView = SqlView(engine, apply, tables=TABLES)
    with BlockingCluster() as cluster, cluster.client(view=view) as client:
        assert client.submit(Add(engine, "a")).ok
        assert client.submit(Add(engine, "a")) == Declined("it is there")
    view.close_blocking()


class AsyncAdd(Add):
    async def decide(self, builder: Builder, connection: Any) -> bool:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().decide(builder, connection)


class AsyncStandIn:
    """An async engine as far as a command uses it: `AsyncEngine` itself needs greenlet and a driver for asyncio."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @asynccontextmanager
    async def connect(self) -> Any:
        with self._engine.connect() as connection:
            yield connection


def test_an_async_engine_reads_on_the_loop(engine: Engine) -> None:
    async def story(cluster: LocalCluster) -> None:
        view: SqlView = SqlView(engine, apply, tables=TABLES)
        async with cluster.client(view=view) as client:
            command = AsyncAdd(AsyncStandIn(engine), "a")
            assert (await client.submit(command)).ok
            assert await client.submit(AsyncAdd(AsyncStandIn(engine), "a")) == Declined("it is there")
            assert set(command.threads) == {threading.get_ident()}
            with pytest.raises(
                BadArgument, match="`decide` of AsyncAdd is a coroutine function, and its engine is not async"
            ):
                await client.submit(AsyncAdd(engine, "b"))
        await view.close()

    LocalCluster().run(story)
