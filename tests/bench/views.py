"""How fast a view in SQL follows: rows one by one, or many at once, with callers who wait until theirs is in the view.

The log costs nothing here: what callers hand in has an id at once, and a client's follower hands it on in the pieces that
come while the database is busy. So the figure is that of the view and its database. Each caller goes on when its
transaction is applied; so no more than one of each is under way. The view is that of a shop: an order is a row, and changes
the stock of its article and the takings. What many at once save is statements: of 200 orders they need a row each, and one
change for each article and for the takings.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tests.process.postgres import LocalPostgres, programs
from waltzd.client.follower import Follower, call_here
from waltzd.client.view import Transaction
from waltzd.sql import SqlView, sqlite

TABLES = sa.MetaData()
ORDERS = sa.Table(
    "orders",
    TABLES,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("article", sa.Integer, nullable=False),
    sa.Column("body", sa.String, nullable=False),
)
STOCK = sa.Table(
    "stock",
    TABLES,
    sa.Column("article", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("count", sa.Integer, nullable=False),
)
TAKINGS = sa.Table(
    "takings",
    TABLES,
    sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sum", sa.BigInteger, nullable=False),
)
ARTICLES = 20
PAYLOAD = b'{"order": 17, "article": "shoe", "count": 2}'
INSERT = sa.insert(ORDERS)
TAKE = sa.update(STOCK).where(STOCK.c.article == sa.bindparam("of")).values(count=STOCK.c.count - sa.bindparam("taken"))

EARN = sa.update(TAKINGS).values(sum=TAKINGS.c.sum + sa.bindparam("price"))


def row(transaction: Transaction) -> dict[str, object]:
    return {"id": transaction.id, "article": transaction.id % ARTICLES, "body": transaction.payload.decode()}


def apply(connection: Connection, transaction: Transaction) -> None:
    order = row(transaction)
    connection.execute(INSERT, order)
    connection.execute(TAKE, {"of": order["article"], "taken": 1})
    connection.execute(EARN, {"price": 2})


def apply_many(connection: Connection, transactions: Sequence[Transaction]) -> None:
    orders = [row(transaction) for transaction in transactions]
    taken = Counter(order["article"] for order in orders)
    connection.execute(INSERT, orders)
    connection.execute(TAKE, [{"of": article, "taken": count} for article, count in taken.items()])
    connection.execute(EARN, {"price": 2 * len(orders)})


class Log:
    """Gives ids, and hands on what came in one turn of the loop."""

    def __init__(self, view: SqlView) -> None:
        self.follower = Follower(0, view, call=call_here, batch_max=1000, consumed=lambda size: None)
        self._next = 0
        self._fresh: list[Transaction] = []

    async def append(self) -> None:
        id_, self._next = self._next, self._next + 1
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._feed)
        self._fresh.append(Transaction(0, id_, 0, len(PAYLOAD), 0, (1, 1, id_), PAYLOAD, None, None))
        await self.follower.reached(id_)

    def _feed(self) -> None:
        fresh, self._fresh = self._fresh, []
        self.follower.put(len(fresh), lambda: fresh, False)


async def measure(engine: Engine, view: SqlView, callers: int, seconds: float) -> tuple[float, float]:
    """Transactions that are applied in a second, and the processor time of each here, which a busy machine leaves as it
    is; that of a database in another process is not in it."""
    await view.opened(UUID(int=1))
    with engine.begin() as connection:
        connection.execute(sa.insert(STOCK), [{"article": article, "count": 0} for article in range(ARTICLES)])
        connection.execute(sa.insert(TAKINGS).values(day=1, sum=0))
    log = Log(view)
    following = asyncio.create_task(log.follower.run(await view.position(0)))
    begun, used = time.perf_counter(), time.process_time()

    async def call() -> None:
        while time.perf_counter() - begun < seconds:
            await log.append()

    await asyncio.gather(*(call() for _ in range(callers)))
    took, used = time.perf_counter() - begun, time.process_time() - used
    log.follower.stop()
    await following
    await view.close()
    count = log.follower.applied + 1
    return count / took, used / count


def compare(database: str, engine: Engine, callers: int, seconds: float) -> None:
    forms = (
        SqlView(engine, apply, name="one by one", tables=TABLES),
        SqlView(engine, apply_many=apply_many, name="many at once", tables=TABLES),
    )
    found: list[tuple[float, float]] = []
    for view in forms:
        TABLES.drop_all(engine)
        rate, used = asyncio.run(measure(engine, view, callers, seconds))
        found.append((rate, used))
        print(f"  {database:10} {view.name:12} {rate:8,.0f} a second {used * 1e6:7.1f} us of processor time each")
    (slow, dear), (fast, cheap) = found
    print(f"  {database:10} {'ratio':12} {fast / slow:8.1f}          {dear / cheap:7.1f}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench views", description=__doc__)
    parser.add_argument("--callers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each form in each database")
    options = parser.parse_args(arguments)
    print(f"a view in SQL, {options.callers} callers who wait until theirs is applied")
    with tempfile.TemporaryDirectory() as directory:
        engine = sqlite(str(Path(directory) / "view.db"))
        compare("SQLite", engine, options.callers, options.seconds)
        engine.dispose()
    found = programs()
    if found is None:
        print("  PostgreSQL is neither installed here nor packaged")
    else:
        server = LocalPostgres(found)
        try:
            server.create()
            server.start()
            engine = sa.create_engine(server.url)
            compare("PostgreSQL", engine, options.callers, options.seconds)
            engine.dispose()
        finally:
            server.remove()
    return 0
