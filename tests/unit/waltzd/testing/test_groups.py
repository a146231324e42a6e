"""Groups and times in a cluster of one process: real owners and storages, and whatever can go wrong there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tests.unit.told import told
from tests.unit.waltzd.testing.test_cluster import with_cluster
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Builder, Command, Transaction
from waltzd.errors import BadArgument, NeedsBatches, NotReady, TooLarge
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Committed, LoggedLock, Mode, Reason, Rejected, read_lock, write_lock
from waltzd.sql import SqlView, sqlite
from waltzd.testing import LocalCluster

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


class Ledger:
    """Every group moves something from one account to another: between two groups nothing is missing."""

    def __init__(self) -> None:
        self.last = -1
        self.accounts: dict[str, int] = {}
        self.parts: list[list[int]] = []

    def position(self, partition: int) -> int:
        return self.last

    async def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        self.parts.append([transaction.id for transaction in transactions])
        for transaction in transactions:
            await self.apply(transaction)
        assert sum(self.accounts.values()) == 0

    async def apply(self, transaction: Transaction) -> None:
        assert transaction.id == self.last + 1
        account, amount = (await transaction.fetch()).decode().split()
        self.accounts[account] = self.accounts.get(account, 0) + int(amount)
        self.last = transaction.id


class Change(Command):
    """One side of a transfer. It takes the account's lock, so that transfers get into each other's way."""

    def __init__(self, account: str, amount: int) -> None:
        self.account, self.amount = account, amount

    def partition(self, count: int) -> int:
        return 0

    def build(self, builder: Builder) -> bool:
        builder.payload = f"{self.account} {self.amount}".encode()
        builder.locks = [write_lock("account", ord(self.account))]
        return True


def transfer(source: str, target: str, amount: int) -> list[Change]:
    return [Change(source, -amount), Change(target, amount)]


@told(with_cluster)
async def test_a_group_has_one_outcome_one_time_and_its_locks(cluster: LocalCluster) -> None:
    cluster.set_time(NOON)
    async with cluster.client(partitions=[0]) as client:
        locks = [[write_lock("a")], [read_lock("b"), write_lock("c")]]
        assert await client.append_atomic([b"x", b"y"], partition=0, locks=locks, position=-1) == Committed(0, 2)
        refused = await client.append_atomic([b"z", b"z"], partition=0, locks=[[], [read_lock("c")]], position=0)
        assert refused == Rejected(Reason.CONFLICT, 1, read_lock("c").hash)
        first, second = await client.read_some(0, with_locks=True)
        assert (first.time, second.time, first.follows, second.follows) == (NOON, NOON, False, True)
        assert first.locks == (LoggedLock(write_lock("a").hash, Mode.WRITE),)
        assert second.locks is not None
        assert [lock.mode for lock in second.locks] == [Mode.READ, Mode.WRITE]
        with pytest.raises(TooLarge):
            await client.append_atomic([b"x" * (1 << 20)] * 4, partition=0)
    assert len(await cluster.log()) == 2


@told(with_cluster, format=0)
async def test_a_cluster_of_format_0_knows_neither_groups_nor_times(cluster: LocalCluster) -> None:
    async with cluster.client(partitions=[0]) as client:
        with pytest.raises(NeedsBatches):
            await client.append_atomic([b"x", b"y"], partition=0)
        assert await client.append(b"z", partition=0) == Committed(0)
        with pytest.raises(NeedsBatches):
            await client.read_some(0, since=NOON)
        assert (await client.read(0, 0, with_locks=True)).time is None


@told(with_cluster)
async def test_reading_by_time_whoever_owns_the_partition(cluster: LocalCluster) -> None:
    async with cluster.client(partitions=[0]) as client:
        for minute in range(6):
            cluster.set_time(NOON + timedelta(minutes=minute))
            await client.append_atomic([b"%d" % minute] * 2, partition=0)
        await cluster.kill_owner()
        await cluster.wait_until_ready()
        cluster.set_time(NOON)  # the clock of the new owner is behind
        await client.append(b"later", partition=0)
        assert await client.position_at(0, NOON + timedelta(minutes=3)) == 5
        start, end = NOON + timedelta(minutes=2), NOON + timedelta(minutes=4)
        assert [found.id for found in await client.read_some(0, since=start, before=end)] == [4, 5, 6, 7]
        times = [found.time for found in await client.read_some(0)]
        assert times == sorted(times, key=lambda time: time or NOON)
        assert times[-2:] == [NOON + timedelta(minutes=5)] * 2, "time has not fallen"
    with pytest.raises(BadArgument):
        cluster.set_time(datetime(2026, 1, 1))


@told(with_cluster)
async def test_a_lock_that_is_made_to_fail_fails_for_the_whole_group(cluster: LocalCluster) -> None:
    view = Ledger()
    async with cluster.client(view=view) as client:
        cluster.force_next_lock_failure(times=2)
        assert await client.submit_atomic(transfer("a", "b", 5)) == Committed(0, 2)
    assert [record.id for record in await cluster.log()] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("feed", [FeedMode.RECORDS, FeedMode.HEADS])
def test_groups_stay_whole_whatever_goes_wrong(feed: FeedMode) -> None:
    """Owners die, links break, outcomes and locks are lost: what was committed is there once, and views see it whole."""

    async def story(cluster: LocalCluster) -> None:
        outcomes: list[Committed] = []
        settings = ClientSettings(feed_bytes_max=200, apply_batch_max=3)
        views = [Ledger() for _ in range(3)]

        async def write(view: Ledger, source: str, target: str) -> None:
            async with cluster.client(view=view, settings=settings, feed=feed) as client:
                for amount in range(8):
                    outcome = await client.submit_atomic(transfer(source, target, amount))
                    assert isinstance(outcome, Committed)
                    assert outcome.count == 2
                    outcomes.append(outcome)
                while view.last < cluster_end():
                    await asyncio.sleep(0.002)

        def cluster_end() -> int:
            with suppress(NotReady):  # it is handed over at this moment
                return cluster.end_position() if len(outcomes) == 24 else 1 << 60
            return 1 << 60

        async def trouble() -> None:
            for round in range(100):
                await cluster.wait_until_ready()
                match round % 4:
                    case 0:
                        cluster.lose_next_acknowledgement()
                    case 1:
                        await cluster.start_server(await cluster.kill_owner())
                    case 2:
                        cluster.break_connections()
                    case 3:
                        cluster.force_next_lock_failure()
                await asyncio.sleep(0.05)

        making = asyncio.create_task(trouble())
        await asyncio.gather(*[write(view, *pair) for view, pair in zip(views, ("ab", "bc", "ca"), strict=True)])
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        await cluster.wait_until_ready()
        log = await cluster.log()
        assert sorted(id_ for outcome in outcomes for id_ in outcome.ids) == [record.id for record in log]
        assert all(view.last == len(log) - 1 for view in views)
        assert len({tuple(sorted(view.accounts.items())) for view in views}) == 1

    LocalCluster(storage_seconds=1.0).run(story)


@pytest.mark.slow
def test_nobody_who_reads_a_view_in_sql_sees_a_part_of_a_group(tmp_path: Path) -> None:
    tables = sa.MetaData()
    rows = sa.Table("rows", tables, sa.Column("id", sa.Integer, primary_key=True), sa.Column("amount", sa.Integer))

    def insert(connection: Connection, transaction: Transaction) -> None:
        amount = int(transaction.payload.split()[1])
        connection.execute(sa.insert(rows).values(id=transaction.id, amount=amount))

    engine = sqlite(str(tmp_path / "view.db"))
    sums: set[int] = set()
    sa.event.listen(engine, "commit", lambda _: sums.add(total()))

    def total() -> int:
        with engine.connect() as connection:
            has_table = sa.inspect(connection).has_table("rows")
            return int(connection.scalar(sa.select(sa.func.sum(rows.c.amount))) or 0) if has_table else 0

    async def story(cluster: LocalCluster) -> None:
        view: SqlView = SqlView(engine, insert, tables=tables, batch_max=1)
        async with cluster.client(view=view) as client:
            for amount in range(1, 8):
                assert isinstance(await client.submit_atomic(transfer("a", "b", amount)), Committed)
            while client.position(0) < 13:
                await asyncio.sleep(0.002)
        await view.close()

    LocalCluster().run(story)
    assert total() == 0
    assert sums == {0}
    engine.dispose()


@pytest.mark.slow
@pytest.mark.parametrize("feed", [FeedMode.RECORDS, FeedMode.HEADS])
@pytest.mark.parametrize(("count", "size"), [(20_000, 10), (100, 40_000)])
def test_a_group_as_large_as_a_frame_comes_whole(count: int, size: int, feed: FeedMode) -> None:
    """Larger than a step of the owner, than a frame of the feed, and than the credit of the client."""

    class Parts(Ledger):
        async def apply_batch(self, transactions: Sequence[Transaction]) -> None:
            self.parts.append([transaction.id for transaction in transactions])
            self.last = transactions[-1].id

    async def story(cluster: LocalCluster) -> None:
        view = Parts()
        settings = ClientSettings(feed_bytes_max=100_000)
        async with cluster.client(view=view, settings=settings, feed=feed) as client:
            await client.append(b"before", partition=0)
            assert await client.append_atomic([b"x" * size] * count, partition=0) == Committed(1, count)
            await client.append(b"behind", partition=0)
            while client.position(0) < count + 1:
                await asyncio.sleep(0.002)
        assert any({1, count} <= set(part) for part in view.parts), "from its first to its last one in one part"

    LocalCluster().run(story)
