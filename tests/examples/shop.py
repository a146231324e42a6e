"""A shop in plain synchronous code: nothing is sold that is not there, whichever of its processes sells it.

Stock and movements are in a SQL database, which a `SqlView` keeps: PostgreSQL, or SQLite in a file. Several processes share
one database. A movement is decided against the stock of its article under a WRITE lock; a request that is sent again with
the same `Idempotency-Key` is found in the log, and nothing is moved twice.

    python -m tests.examples.shop --servers 127.0.0.1:55180 --database shop.db --port 8000
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import sqlalchemy as sa
import typer
from flask import Flask, Response, jsonify, request
from sqlalchemy.engine import Connection, Engine
from typer import Option
from werkzeug.serving import run_simple

from tests.examples.events import EVENTS, Event, Moved
from waltzd import (
    BlockingClient,
    Builder,
    Command,
    Committed,
    Declined,
    Rejected,
    Token,
    Transaction,
    Unknown,
    WaltzError,
    write_lock,
)
from waltzd.errors import BadArgument, BeyondLog
from waltzd.sql import SqlView, sqlite

SEEN = "Waltz-Seen"
WAIT_SECONDS = 5
NAME = re.compile(r"[\w-]{1,100}")
"""Of an article and of a request. What is in the log has to fit into every view of it: look at it in front of the log."""
QUANTITY_MAX = 1_000_000
TABLES = sa.MetaData()
STOCK = sa.Table(
    "stock",
    TABLES,
    sa.Column("article", sa.String(100), primary_key=True),
    sa.Column("quantity", sa.BigInteger, sa.CheckConstraint("quantity >= 0"), nullable=False),
)
MOVEMENTS = sa.Table(
    "movements",
    TABLES,
    sa.Column("request", sa.String(100), primary_key=True),
    sa.Column("article", sa.String(100), nullable=False),
    sa.Column("quantity", sa.BigInteger, nullable=False),
)


def apply(connection: Connection, transaction: Transaction[Event]) -> None:
    event = transaction.value
    if not isinstance(event, Moved):
        return
    connection.execute(sa.insert(MOVEMENTS).values(asdict(event)))
    is_it = STOCK.c.article == event.article
    moved = sa.update(STOCK).where(is_it).values(quantity=STOCK.c.quantity + event.quantity)
    if connection.execute(moved).rowcount == 0:
        connection.execute(sa.insert(STOCK).values(article=event.article, quantity=event.quantity))


class Shop:
    """The database, and the view that keeps it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # What somebody else writes into the log, say with `waltzctl txn append`, is put aside.
        self.view = SqlView(engine, apply, name="shop", tables=TABLES, tries=2, then="park")

    def quantity(self, article: str) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(sa.select(STOCK.c.quantity).where(STOCK.c.article == article)) or 0

    def movement(self, request: str) -> sa.Row[Any] | None:
        with self.engine.connect() as connection:
            return connection.execute(sa.select(MOVEMENTS).where(MOVEMENTS.c.request == request)).one_or_none()


class Move(Command[Event]):
    """Deliver or sell, unless there is too little."""

    def __init__(self, shop: Shop, wanted: Moved) -> None:
        self._shop = shop
        self._wanted = wanted
        self.key = wanted.article
        self.locks = [write_lock("stock", wanted.article)]

    def build(self, builder: Builder[Event]) -> bool:
        builder.payload = self._wanted
        return self._shop.quantity(self._wanted.article) + self._wanted.quantity >= 0


def application(client: BlockingClient[Event], shop: Shop) -> Flask:
    """`client` is open and feeds the view of `shop`. An answer of 503 says: try it again, with the same key."""
    app = Flask("shop")

    @app.post("/stock/<article>")
    def move(article: str) -> Response:
        key = request.headers.get("Idempotency-Key", "")
        asked: object = request.get_json(silent=True)
        match asked:
            case {"quantity": int(quantity)} if abs(quantity) <= QUANTITY_MAX and NAME.fullmatch(article):
                wanted = Moved(request=key, article=article, quantity=quantity)
            case _:
                return answer(400, detail="say the quantity, of an article")
        if not NAME.fullmatch(key):
            return answer(400, detail="say by an Idempotency-Key which request it is")
        match client.submit(Move(shop, wanted), idempotency_key=key):
            case Committed() as committed:
                return answer(201, {SEEN: str(committed.token)})
            case Declined():
                return answer(409, quantity=shop.quantity(article))
            case Rejected() | Unknown() as outcome:
                return answer(503, detail=f"not known to be moved: {outcome}")

    @app.get("/stock/<article>")
    def stock(article: str) -> Response:
        wait()
        return answer(200, quantity=shop.quantity(article))

    @app.get("/movements/<key>")
    def movement(key: str) -> Response:
        wait()
        found = shop.movement(key)
        return answer(404) if found is None else answer(200, article=found.article, quantity=found.quantity)

    def wait() -> None:
        if SEEN in request.headers:
            client.wait_applied(Token.parse(request.headers[SEEN]), timeout=WAIT_SECONDS)

    @app.errorhandler(WaltzError)
    def refuse(error: WaltzError) -> Response:
        """What somebody asked for makes no sense, or it can be tried again."""
        return answer(400 if isinstance(error, BadArgument | BeyondLog) else 503, detail=str(error))

    return app


def answer(status: int, headers: Mapping[str, str] | None = None, **body: Any) -> Response:
    found = jsonify(body)
    found.status_code = status
    found.headers.update(headers or {})
    return found


def main(
    *,
    servers: Annotated[str, Option(help="Addresses of servers, with commas between them.")],
    database: Annotated[str, Option(help="A SQLite file, or the URL of a database.")],
    port: Annotated[int, Option(help="Where the service listens.")],
) -> None:
    """Serve until the process is told to end."""
    shop = Shop(sa.create_engine(database) if "://" in database else sqlite(database))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with BlockingClient(servers, view=shop.view, serializer=EVENTS) as client:
        run_simple("127.0.0.1", port, application(client, shop), threaded=True)
    shop.view.close_blocking()


if __name__ == "__main__":
    typer.run(main)
