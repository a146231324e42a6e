"""`docs/sql.md` does what it says, with a client and a cluster: its snippets run as they stand, one behind the other."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tests.unit.fake_server import FakeCluster
from waltzd.client.blocking import BlockingClient
from waltzd.client.view import Transaction
from waltzd.errors import BadArgument, ForeignCluster, PartitionParked
from waltzd.protocol.locks import Committed
from waltzd.sql import Poison, SqlView, sqlite
from waltzd.sql.positions import Positions
from waltzd.testing import LocalCluster

PAGE = (Path(__file__).parents[4] / "docs/sql.md").read_text(encoding="utf-8")


def page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "sql.md", "exec"), names)
    return names


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = sqlite(str(tmp_path / "bank.db"))
    yield engine
    engine.dispose()


def open_accounts(engine: Engine, table: sa.Table, **row: int) -> None:
    with engine.begin() as connection:
        connection.execute(sa.insert(table), [{"number": number, **row} for number in range(4)])


def change(number: int, balance: int) -> bytes:
    return json.dumps({"number": number, "balance": balance}).encode()


def test_who_wrote_reads_it_in_another_process(engine: Engine, tmp_path: Path) -> None:
    names = page()
    names["tables"].create_all(engine)
    open_accounts(engine, names["accounts"], balance=0)

    async def story(cluster: LocalCluster) -> None:
        applying, waiting = (
            names["with_dead_letters"](engine),
            names["with_dead_letters"](sqlite(str(tmp_path / "bank.db"))),
        )
        headers: dict[str, str] = {}
        async with cluster.client(view=applying) as client:
            cluster.suspend_feed()
            outcome = await names["write"](client, 3, 100, headers)
            assert headers == {"Waltz-Seen": f"{client.partition_of(3)}-0"}
            reading = asyncio.create_task(names["read"](waiting, engine, 3, headers))
            assert await names["read"](waiting, engine, 3, {"Waltz-Seen": "nonsense"}) == 0
            cluster.resume_feed()
            assert (outcome, await reading) == (Committed(0), 100)
            headers = {"Waltz-Seen": headers["Waltz-Seen"] + "000"}
        for view in (applying, waiting):
            await view.close()

    LocalCluster(partitions=2).run(story)


def test_a_second_view_is_built_beside_the_first_and_compared(engine: Engine) -> None:
    names = page()
    for metadata in (names["tables"], names["new_tables"]):
        metadata.create_all(engine)
    open_accounts(engine, names["accounts"], balance=0)
    open_accounts(engine, names["new_accounts"], cents=0)

    async def story(cluster: LocalCluster) -> None:
        old, new = names["fast_view"](engine), names["new_view"](engine)
        async with cluster.client(view=old) as client:
            for number in range(4):
                partition = client.partition_of(number)
                outcome = await client.append(change(number, 10 + number), partition=partition)
                assert isinstance(outcome, Committed)
                await old.wait(outcome, partition=partition)
            async with cluster.client(view=new):
                await names["level"](old, new)
                assert names["differences"](engine) == set()
                assert old.read_positions() == new.read_positions()
            with engine.begin() as connection:
                connection.execute(sa.update(names["new_accounts"]).where(sa.text("number = 2")).values(cents=1))
            assert names["differences"](engine) == {(2, 1200), (2, 1)}
            outcome = await client.append(change(1, 7), partition=0)
            await old.wait(outcome, partition=0)
            assert names["differences"](engine) is None, "the old one is ahead"
        for view in (old, new):
            await view.close()

    LocalCluster(partitions=2).run(story)


def test_a_dead_letter_is_revived_once(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    names = page()
    names["tables"].create_all(engine)
    open_accounts(engine, names["accounts"], balance=0)

    async def story(cluster: LocalCluster) -> None:
        view = names["with_dead_letters"](engine)
        async with cluster.client(view=view) as client:
            await client.append(change(0, 5), partition=0)
            await client.append(b"hello", partition=0)
            await client.append(change(1, 6), partition=0)
            await view.wait(2, partition=0, timeout=60)
            with engine.connect() as connection:
                assert connection.execute(sa.text("SELECT id FROM waltz_dead_letters")).all() == [(1,)]
            names["apply"] = names["revive"].__globals__["apply"] = lambda connection, transaction: connection.execute(
                sa.update(names["accounts"])
                .where(names["accounts"].c.number == 0)
                .values(balance=names["accounts"].c.balance + len(transaction.payload))
            )
            for _ in range(2):
                await names["revive"](client, engine, 0, 1)
        await view.close()
        with engine.connect() as connection:
            assert connection.scalar(sa.text("SELECT balance FROM accounts WHERE number = 0")) == 5 + len(b"hello")

    LocalCluster().run(story)
    assert "accounts: 1 transactions from 1 of partition 0: applying transaction 1" in capsys.readouterr().out


def test_the_tables_of_the_page_are_those_that_are_made(engine: Engine, tmp_path: Path) -> None:
    by_hand = sqlite(str(tmp_path / "by-hand.db"))
    (text,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    with by_hand.begin() as connection:
        for statement in text.split(";"):
            if statement.strip():
                connection.execute(sa.text(statement))
    Positions(engine, "view", has_dead_letters=True)._metadata.create_all(engine)
    shapes = []
    for one in (engine, by_hand):
        inspector = sa.inspect(one)
        shapes.append(
            {
                table: ([column["name"] for column in inspector.get_columns(table)], inspector.get_pk_constraint(table))
                for table in inspector.get_table_names()
            }
        )
    assert {name: columns for name, (columns, _) in shapes[0].items()} == {
        name: columns for name, (columns, _) in shapes[1].items()
    }
    for name, (_, key) in shapes[0].items():
        assert key["constrained_columns"] == shapes[1][name][1]["constrained_columns"]
    by_hand.dispose()


def test_a_wait_for_what_was_not_committed_is_refused(engine: Engine) -> None:
    view = page()["fast_view"](engine)
    with pytest.raises(BadArgument, match="only what is committed"):
        asyncio.run(view.wait(None, partition=0))


def test_a_parked_partition_is_visible_and_begins_again_when_it_is_taken_out_and_in(engine: Engine) -> None:
    is_mended = False
    told: list[Poison] = []

    def apply(connection: Connection, transaction: Transaction) -> None:
        if not is_mended:
            raise LookupError("no such account")

    async def story(cluster: LocalCluster) -> None:
        nonlocal is_mended
        view: SqlView = SqlView(engine, apply, name="accounts", tries=2, on_poison=told.append)
        async with cluster.client(view=view) as client:
            await client.append(change(0, 5), partition=0)
            while client.status()[0].stopped is None:
                await asyncio.sleep(0.01)
            with pytest.raises(PartitionParked, match="LookupError: no such account"):
                await client.append(change(0, 6), partition=0)
            assert [(one.id, one.is_put_aside) for one in told] == [(0, False)]
            assert await client.append(change(0, 6), partition=1) == Committed(0)
            is_mended = True
            await client.set_partitions([1])
            await client.set_partitions("all")
            await view.wait(0, partition=0, timeout=60)
            await view.wait(0, partition=1, timeout=60)
        await view.close()

    LocalCluster(partitions=2).run(story)


def test_a_view_that_was_filled_from_another_cluster_stops_the_client_at_once(engine: Engine) -> None:
    """Seen before: the first ids of the other log were left out without a word."""

    async def fill(cluster: LocalCluster) -> None:
        view = page()["fast_view"](engine)
        async with cluster.client(view=view) as client:
            await client.append(change(0, 5), partition=0)
            await view.wait(0, partition=0, timeout=60)
        await view.close()

    async def come_from_elsewhere(cluster: LocalCluster) -> None:
        view = page()["fast_view"](engine)
        with pytest.raises(ForeignCluster, match="'accounts' in this database comes from cluster"):
            async with cluster.client(view=view):
                raise AssertionError
        await view.close()

    LocalCluster().run(fill)
    LocalCluster().run(come_from_elsewhere)


def test_a_blocking_client_keeps_a_view_and_waits_for_it(engine: Engine) -> None:
    names, fake = page(), FakeCluster(partitions=2)
    view = names["fast_view"](engine)
    with BlockingClient("s0:1", connect=fake.connect, view=view) as client:
        partition = client.partition_of(3)
        outcome = client.append(change(3, 5), partition=partition)
        assert isinstance(outcome, Committed)
        view.wait_blocking(outcome.token, timeout=60)
        assert view.read_positions() == {partition: 0, 1 - partition: -1}
    asyncio.run(view.close())
