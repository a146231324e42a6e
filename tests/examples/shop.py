"""A shop in plain synchronous code: nothing is sold that is not there, whichever of its processes sells it.

Stock and movements are in a SQL database, which a `SqlView` keeps: PostgreSQL, or SQLite in a file. Several processes share
one database. A movement is decided against the stock of its article under a WRITE lock; a request that is sent again with
the same `Idempotency-Key` is found among the movements, and nothing is moved twice.

    python -m tests.examples.shop --servers 127.0.0.1:55180 --database shop.db --port 8000
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import sqlalchemy as sa
import typer
from flask import Flask, Response, jsonify, request
from sqlalchemy.engine import Connection, Engine
from typer import Option
from werkzeug.serving import run_simple

from waltzd import (
    BlockingClient,
    Builder,
    Command,
    Committed,
    Declined,
    Token,
    Transaction,
    WaltzError,
    write_lock,
)
from waltzd.errors import BadArgument, BeyondLog
from waltzd.sql import SqlView, sqlite

MOVED = 2
"""The header of our transactions: other applications write into the same partitions."""
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
    sa.Column("token", sa.String(40), nullable=False),
)


@dataclass(frozen=True, kw_only=True)
class Movement:
    request: str
    article: str
    quantity: int
    """Above 0: it was delivered. Below: it was sold."""


def apply(connection: Connection, transaction: Transaction) -> None:
    if transaction.header != MOVED:
        return
    movement = json.loads(transaction.payload)
    token = str(Token(transaction.partition, transaction.id))
    connection.execute(sa.insert(MOVEMENTS).values(**movement, token=token))
    is_it = STOCK.c.article == movement["article"]
    moved = sa.update(STOCK).where(is_it).values(quantity=STOCK.c.quantity + movement["quantity"])
    if connection.execute(moved).rowcount == 0:
        connection.execute(sa.insert(STOCK).values(article=movement["article"], quantity=movement["quantity"]))


class Shop:
    """The database, and the view that keeps it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.view = SqlView(engine, apply, name="shop", tables=TABLES)

    def quantity(self, article: str) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(sa.select(STOCK.c.quantity).where(STOCK.c.article == article)) or 0

    def done(self, request: str) -> sa.Row[Any] | None:
        """The movement of this request, if the database has it."""
        with self.engine.connect() as connection:
            return connection.execute(sa.select(MOVEMENTS).where(MOVEMENTS.c.request == request)).one_or_none()


class Move(Command):
    """Deliver or sell, unless that was done already, or there is too little."""

    def __init__(self, shop: Shop, movement: Movement) -> None:
        self._shop = shop
        self._movement = movement
        self.key = movement.article

    def build(self, builder: Builder) -> bool:
        wanted = self._movement
        if self._shop.quantity(wanted.article) + wanted.quantity < 0:
            return False
        builder.header = MOVED
        builder.payload = json.dumps(asdict(wanted)).encode()
        builder.locks = [write_lock(f"stock.{wanted.article}")]
        return True


def application(client: BlockingClient, shop: Shop) -> Flask:
    """`client` is open and feeds the view of `shop`. An answer of 503 says: try it again, with the same key."""
    app = Flask("shop")

    @app.post("/stock/<article>")
    def move(article: str) -> Response:
        key, asked = request.headers.get("Idempotency-Key", ""), request.get_json(silent=True)
        quantity = asked.get("quantity") if isinstance(asked, dict) else None
        if not isinstance(quantity, int) or abs(quantity) > QUANTITY_MAX or not NAME.fullmatch(article):
            return answer(400, detail="say the quantity, of an article")
        if not NAME.fullmatch(key):
            return answer(400, detail="say by an Idempotency-Key which request it is")
        movement = Movement(request=key, article=article, quantity=quantity)
        match client.submit(Move(shop, movement), idempotency_key=key):
            case Committed() as committed:
                return answer(201, {SEEN: str(committed.token)})
            case Declined():
                return answer(409, quantity=shop.quantity(article))
            case outcome:
                return answer(503, detail=f"not known to be moved: {outcome}")

    @app.get("/stock/<article>")
    def stock(article: str) -> Response:
        wait()
        return answer(200, quantity=shop.quantity(article))

    @app.get("/movements/<key>")
    def movement(key: str) -> Response:
        wait()
        found = shop.done(key)
        return answer(404) if found is None else answer(200, article=found.article, quantity=found.quantity)

    def wait() -> None:
        if SEEN in request.headers:
            client.applied(Token.parse(request.headers[SEEN]), timeout=WAIT_SECONDS)

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
    with BlockingClient(servers, view=shop.view) as client:
        run_simple("127.0.0.1", port, application(client, shop), threaded=True)
    shop.view.close_blocking()


if __name__ == "__main__":
    typer.run(main)
