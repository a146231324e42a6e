"""A bank whose events have types: what a type checker sees of an application, from the events to the last `match`.

It is checked by mypy and pyright, both strict (`tests/unit/test_types.py`), and runs on a cluster in one process.

    python -m tests.examples.typed_bank
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from waltzd import (
    Builder,
    Client,
    Committed,
    Declined,
    Outcome,
    Rejected,
    Transaction,
    Unknown,
    append_lock,
    write_lock,
)
from waltzd.serializers import EventType, JsonEvents
from waltzd.sql import SqlCommand, SqlView, sqlite
from waltzd.testing import LocalCluster


@dataclass(frozen=True)
class Deposited:
    account: str
    cents: int


@dataclass(frozen=True)
class Withdrawn:
    account: str
    cents: int
    purpose: str


Event: TypeAlias = Deposited | Withdrawn


def with_purpose(data: dict[str, object]) -> dict[str, object]:
    """A withdrawal of version 1 did not say what it was for."""
    return {**data, "purpose": "unknown"}


EVENTS = JsonEvents[Event](
    EventType(Deposited, "deposited"),
    EventType(Withdrawn, "withdrawn", version=2, upcasts={1: with_purpose}),
)
TABLES = sa.MetaData()
ACCOUNTS = sa.Table(
    "accounts", TABLES, sa.Column("name", sa.String, primary_key=True), sa.Column("cents", sa.BigInteger, nullable=False)
)


def apply(connection: Connection, transaction: Transaction[Event]) -> None:
    event = transaction.value
    match event:
        case Deposited(account, cents):
            change = cents
        case Withdrawn(account, cents):
            change = -cents
        case _:
            assert_never(event)
    row = sa.update(ACCOUNTS).where(ACCOUNTS.c.name == account).values(cents=ACCOUNTS.c.cents + change)
    if connection.execute(row).rowcount == 0:
        connection.execute(sa.insert(ACCOUNTS).values(name=account, cents=change))


class Withdraw(SqlCommand[Event]):
    def __init__(self, engine: sa.Engine, account: str, cents: int, purpose: str) -> None:
        self.engine = engine
        self._event = Withdrawn(account, cents, purpose)
        self.locks = [write_lock("account", account)]

    def decide(self, builder: Builder[Event], connection: Connection) -> bool:
        if balance(connection, self._event.account) < self._event.cents:
            return builder.decline("there is not enough money")
        builder.payload = self._event
        return True


def balance(connection: Connection, account: str) -> int:
    cents: int | None = connection.scalar(sa.select(ACCOUNTS.c.cents).where(ACCOUNTS.c.name == account))
    return cents or 0


def told(outcome: Outcome) -> str:
    match outcome:
        case Committed(id):
            return f"it is transaction {id}"
        case Rejected(reason):
            return f"rejected: {reason.name}"
        case Declined(reason):
            return reason
        case Unknown():
            return "look for it before trying again"
        case _:
            assert_never(outcome)


async def story(client: Client[Event], view: SqlView[Event], engine: sa.Engine) -> list[str]:
    """What becomes of a payment and of two withdrawals that it does not suffice for."""
    paid = await client.append(Deposited("alice", 500), locks=[append_lock("account", "alice")])
    assert isinstance(paid, Committed)
    home = client.partition_of("account")
    await view.wait(paid)
    said = [told(await client.submit(Withdraw(engine, "alice", cents, "rent"))) for cents in (300, 300)]
    events = [(await client.read(home, id)).value for id in (0, 1)]
    return said + [f"{type(event).__name__}: {event.cents}" for event in events]


async def main(path: str) -> list[str]:
    engine = sqlite(path)
    view = SqlView(engine, apply, name="typed bank", tables=TABLES)
    async with LocalCluster() as cluster, cluster.client(view=view, serializer=EVENTS) as client:
        said = await story(client, view, engine)
    await view.close()
    engine.dispose()
    return said


if __name__ == "__main__":
    print(*asyncio.run(main("typed-bank.db")), sep="\n")
