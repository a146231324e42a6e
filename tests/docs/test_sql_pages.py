"""The pages about views in SQL databases do what they say, with a client and a cluster."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tests.docs.page import DOCS, page
from tests.unit.fake_server import FakeCluster
from waltzd.client.blocking import BlockingClient
from waltzd.client.view import Transaction
from waltzd.errors import BadArgument, ForeignCluster, InboxPruned, ViewStopped
from waltzd.protocol.locks import Committed
from waltzd.sql import Poison, SqlInbox, SqlView, sqlite
from waltzd.sql.inbox import _Done
from waltzd.sql.positions import Positions
from waltzd.testing import LocalCluster

FIRST = "how-to/sql-views"
"""The other pages go on with its example."""
ONCE = "how-to/exactly-once-in-sql"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = sqlite(str(tmp_path / "bank.db"))
    yield engine
    engine.dispose()


def fast_view(engine: Engine) -> SqlView:
    with page(FIRST, only=range(0)) as shown:
        return shown.fast_view(engine)  # type: ignore[no-any-return]


def change(number: int, balance: int) -> bytes:
    return json.dumps({"number": number, "balance": balance}).encode()


def test_the_first_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)

    async def story(cluster: LocalCluster) -> None:
        with page("how-to/sql-views", cluster) as shown:
            for _ in range(2):
                await shown.main(cluster.servers)
            engine = sqlite("bank.db")
            assert shown.balance_of(engine, 7) == 200
            view = shown.fast_view(sqlite("fast.db"))
            async with cluster.client(view=view) as client:
                await client.wait_caught_up()
            await view.close()
            assert shown.balance_of(sqlite("fast.db"), 7) == 200

    LocalCluster().run(story)
    assert capsys.readouterr().out.startswith("Committed(id=0")


def test_who_wrote_reads_it_in_another_process(engine: Engine, tmp_path: Path) -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/read-your-writes", after=FIRST, only=range(2, 3)) as shown:
            applying, waiting = [
                SqlView(one, shown.apply, name="accounts", tables=shown.tables)
                for one in (engine, sqlite(str(tmp_path / "bank.db")))
            ]
            async with cluster.client(view=applying) as client:
                cluster.suspend_feed()
                outcome = await client.append(change(3, 100), key=3)
                assert isinstance(outcome, Committed)
                seen = str(outcome.token)
                reading = asyncio.create_task(shown.balance_since(waiting, engine, 3, seen))
                assert await shown.balance_since(waiting, engine, 3, "nonsense") == 0
                cluster.resume_feed()
                assert await reading == 100
                assert await shown.balance_since(waiting, engine, 3, f"{seen}9") is None
            for view in (applying, waiting):
                await view.close()

    LocalCluster(partitions=2).run(story)


def test_members_of_a_group_do_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor when the owner fails."""
    monkeypatch.chdir(tmp_path)

    def addresses() -> list[str]:
        engine = sqlite("mails.db")
        if not sa.inspect(engine).has_table("mails"):
            return []
        with engine.connect() as connection:
            return sorted(connection.scalars(sa.text("SELECT address FROM mails")))

    async def until(wanted: list[str]) -> None:
        async with asyncio.timeout(60):
            while addresses() != wanted:
                await asyncio.sleep(0.02)

    async def story(cluster: LocalCluster) -> None:
        with page("how-to/exactly-once-in-sql", cluster) as shown:
            async with cluster.client() as client:
                working = asyncio.create_task(shown.main(cluster.servers))
                for number in range(6):
                    address = f"{number}@example.org" if number != 3 else "nowhere"
                    await client.append(json.dumps({"address": address}).encode(), partition=0)
                good = [f"{number}@example.org" for number in range(6) if number != 3]
                await until(good)
                await cluster.kill_owner(0)
                await client.append(json.dumps({"address": "6@example.org"}).encode(), partition=0)
                await until([*good, "6@example.org"])
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

                other = SqlInbox(sqlite("mails.db"), "mailer")
                done = asyncio.create_task(shown.work(client, other))
                await client.append(json.dumps({"address": "7@example.org"}).encode(), partition=0)
                await until([*good, "6@example.org", "7@example.org"])
                done.cancel()
                await asyncio.gather(done, return_exceptions=True)
                assert other.is_done(0, 5)
                assert not other.is_done(0, 3), "it was rejected"
                assert not shown.do_again(other, 0, 4, 5)
                assert other.is_done(0, 4)
                assert shown.prune(other, 0, 4, [3]) == 4
                with pytest.raises(InboxPruned):
                    other.is_done(0, 4)
                await other.close()

    LocalCluster().run(story)


def test_a_second_view_is_built_beside_the_first_and_compared(engine: Engine) -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/rebuild-a-view", after=FIRST) as shown:
            old, new = shown.fast_view(engine), shown.new_view(engine)
            async with cluster.client(view=old) as client:
                for number in range(4):
                    outcome = await client.append(change(number, 10 + number), key=number)
                    assert isinstance(outcome, Committed)
                    await client.wait_applied(outcome)
                async with cluster.client(view=new):
                    await shown.level(old, new)
                    assert shown.differences(engine) == set()
                    assert old.read_positions() == new.read_positions()
                with engine.begin() as connection:
                    connection.execute(sa.text("UPDATE accounts_2 SET cents = 1 WHERE number = 2"))
                assert shown.differences(engine) == {(2, 1200), (2, 1)}
                outcome = await client.append(change(1, 7), partition=0)
                assert isinstance(outcome, Committed)
                await client.wait_applied(outcome)
                assert shown.differences(engine) is None, "the old one is ahead"
            for view in (old, new):
                await view.close()
            shown.forget(engine, "accounts", shown.tables)
            assert not sa.inspect(engine).has_table("accounts")
            assert shown.new_view(engine).read_positions() != {}
            assert shown.fast_view(engine).read_positions() == {}

    LocalCluster(partitions=2).run(story)


def test_a_dead_letter_is_revived_once(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/poison", after=FIRST) as shown:
            totals = shown.CarefulTotals()
            view = shown.with_dead_letters(engine)
            async with cluster.client(view=view) as client, cluster.client(view=totals) as other:
                for payload in (b'{"number": 0, "balance": 5, "amount": 5}', b"hello", b'{"number": 1, "balance": 6}'):
                    await client.append(payload, partition=0)
                await view.wait(2, partition=0, timeout=60)
                await other.wait_caught_up()
                assert totals.total == 5
                assert totals.failed(None, OSError()) is not totals.failed(None, ValueError())
                with engine.connect() as connection:
                    assert connection.execute(sa.text("SELECT id FROM waltz_dead_letters")).all() == [(1,)]
                vars(shown)["apply"] = lambda connection, transaction: connection.execute(
                    sa.text("UPDATE accounts SET balance = balance + 1 WHERE number = 0")
                )
                for _ in range(2):
                    await shown.revive(client, engine, 0, 1)
            await view.close()
            assert shown.balance_of(engine, 0) == 6

    LocalCluster().run(story)
    said = capsys.readouterr().out
    assert "accounts: 1 transactions from 1 of partition 0: applying transaction 1" in said
    assert "left out: transaction 1 of partition 0" in said


@pytest.mark.parametrize("shown", [FIRST, ONCE])
def test_the_tables_of_the_page_are_those_that_are_made(engine: Engine, tmp_path: Path, shown: str) -> None:
    by_hand = sqlite(str(tmp_path / "by-hand.db"))
    (text,) = re.findall(r"```sql\n(.*?)```", (DOCS / f"{shown}.md").read_text(encoding="utf-8"), re.DOTALL)
    with by_hand.begin() as connection:
        for statement in text.split(";"):
            if statement.strip():
                connection.execute(sa.text(statement))
    made = _Done(engine, "mailer") if shown == ONCE else Positions(engine, "view", has_dead_letters=True)
    made._metadata.create_all(engine)
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
    view = fast_view(engine)
    with pytest.raises(BadArgument, match="only what is committed"):
        asyncio.run(view.wait(None, partition=0))  # type: ignore[arg-type]


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
            with pytest.raises(ViewStopped, match="LookupError: no such account"):
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
        view = fast_view(engine)
        async with cluster.client(view=view) as client:
            await client.append(change(0, 5), partition=0)
            await view.wait(0, partition=0, timeout=60)
        await view.close()

    async def come_from_elsewhere(cluster: LocalCluster) -> None:
        view = fast_view(engine)
        with pytest.raises(ForeignCluster, match="'accounts' in this database belongs to cluster"):
            async with cluster.client(view=view):
                raise AssertionError
        await view.close()

    LocalCluster().run(fill)
    LocalCluster().run(come_from_elsewhere)


def test_a_blocking_client_keeps_a_view_and_waits_for_it(engine: Engine) -> None:
    fake = FakeCluster(partitions=2)
    view = fast_view(engine)
    with BlockingClient("s0:1", connect=fake.connect, view=view) as client:
        partition = client.partition_of(3)
        outcome = client.append(change(3, 5), partition=partition)
        assert isinstance(outcome, Committed)
        view.wait_blocking(outcome.token, timeout=60)
        assert view.read_positions() == {partition: 0, 1 - partition: -1}
    asyncio.run(view.close())
