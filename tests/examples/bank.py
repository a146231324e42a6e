"""A bank on SQL views: money moves between accounts, none is made or lost, and nobody overdraws.

The database is only a view: a transfer is decided against it, but it happens when it is in the log. It needs the balance
of the account that pays, so that lock is WRITE; the one that receives is only added to, so that lock is APPEND: two
payments to one account never conflict, and a payment from it notices both. Account 0 is the mint, where money comes from;
with it every branch adds up to zero at any moment. A branch is a partition.

    python -m tests.examples.bank --servers 127.0.0.1:55180 --database one.db --database two.db
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import sqlalchemy as sa
import typer
from sqlalchemy.engine import Connection, Engine
from typer import Option

from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.client.view import Builder, Transaction, View
from waltzd.protocol.locks import Committed, Declined, Outcome, Rejected, append_lock, write_lock
from waltzd.sql import SqlCommand, SqlView, sqlite

MINT = 0
FROM_THE_MINT = 4
"""Every so many transfers bring new money."""
PATIENCE_SECONDS = 60
TRIES = 3
TABLES = sa.MetaData()
ACCOUNTS = sa.Table(
    "accounts",
    TABLES,
    sa.Column("branch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("balance", sa.BigInteger, nullable=False),
    sa.CheckConstraint("number = 0 OR balance >= 0", name="nobody_overdraws"),
)


@dataclass(frozen=True, kw_only=True)
class Movement:
    """A transfer within a branch."""

    payer: int
    receiver: int
    amount: int


def payload_of(movement: Movement, by: str) -> bytes:
    """`by`: who asked for it, for people."""
    found = {"from": movement.payer, "to": movement.receiver, "amount": movement.amount, "by": by}
    return json.dumps(found).encode()


def movement_of(payload: bytes) -> Movement:
    found = json.loads(payload)
    return Movement(payer=found["from"], receiver=found["to"], amount=found["amount"])


class Bank:
    """One database with the accounts, and the view that keeps it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # What somebody else wrote into a branch is no transfer: it becomes a dead letter, and the branch goes on.
        self.view: SqlView = SqlView(engine, self._apply, name="bank", tables=TABLES, tries=TRIES, then="park")

    def _apply(self, connection: Connection, transaction: Transaction) -> None:
        movement = movement_of(transaction.payload)
        self._add(connection, transaction.partition, movement.payer, -movement.amount)
        self._add(connection, transaction.partition, movement.receiver, movement.amount)

    @staticmethod
    def _add(connection: Connection, branch: int, number: int, amount: int) -> None:
        account = (ACCOUNTS.c.branch == branch) & (ACCOUNTS.c.number == number)
        changed = connection.execute(sa.update(ACCOUNTS).where(account).values(balance=ACCOUNTS.c.balance + amount))
        if changed.rowcount == 0:
            connection.execute(sa.insert(ACCOUNTS).values(branch=branch, number=number, balance=amount))

    @staticmethod
    def balance(connection: Connection, branch: int, number: int) -> int:
        account = (ACCOUNTS.c.branch == branch) & (ACCOUNTS.c.number == number)
        return connection.scalar(sa.select(ACCOUNTS.c.balance).where(account)) or 0

    def accounts(self) -> dict[tuple[int, int], int]:
        """All balances, by branch and number."""
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(ACCOUNTS.c.branch, ACCOUNTS.c.number, ACCOUNTS.c.balance)).all()
        return {(branch, number): balance for branch, number, balance in rows}


class Transfer(SqlCommand):
    def __init__(self, bank: Bank, branch: int, payer: int, receiver: int, amount: int, name: str) -> None:
        assert payer != receiver
        self.engine = bank.engine
        self._branch = branch
        self._payer = payer
        self._receiver = receiver
        self._amount = amount
        self._name = name
        self.attempts = 0

    def partition(self, count: int) -> int:
        return self._branch

    def decide(self, builder: Builder, connection: Connection) -> bool:
        if self._payer == MINT:
            builder.locks = [append_lock("account", MINT), append_lock("account", self._receiver)]
        else:
            if Bank.balance(connection, self._branch, self._payer) < self._amount:
                return builder.decline("there is not enough money")
            builder.locks = [write_lock("account", self._payer), append_lock("account", self._receiver)]
        self.attempts += 1
        movement = Movement(payer=self._payer, receiver=self._receiver, amount=self._amount)
        builder.payload = payload_of(movement, by=f"{self._name}, attempt {self.attempts}")
        return True


@dataclass
class Result:
    committed: int = 0
    declined: int = 0
    rejected: int = 0
    unknown: int = 0
    attempts: int = 0
    accounts: dict[tuple[int, int], int] = field(default_factory=dict)
    """As the first database has them in the end."""
    is_agreed: bool = False
    """All databases have the same."""

    @property
    def total(self) -> int:
        return sum(self.accounts.values())

    @property
    def lowest(self) -> int:
        return min((balance for (_, number), balance in self.accounts.items() if number != MINT), default=0)

    @property
    def is_right(self) -> bool:
        return self.is_agreed and self.total == 0 and self.lowest >= 0

    def __str__(self) -> str:
        lines = [
            f"{'right' if self.is_right else 'WRONG'}: {len(self.accounts)} accounts add up to {self.total}, the lowest "
            f"balance is {self.lowest}, the databases agree: {self.is_agreed}",
            f"{self.committed} transfers, {self.declined} declined for want of money, {self.rejected} given up, "
            f"{self.unknown} unknown; {self.attempts} attempts",
        ]
        lines += [
            f"  branch {branch}, account {number}: {balance}" for (branch, number), balance in sorted(self.accounts.items())
        ]
        return "\n".join(lines)


def count(result: Result, transfer: Transfer, outcome: Outcome) -> None:
    result.attempts += transfer.attempts
    match outcome:
        case Committed():
            result.committed += 1
        case Declined():
            result.declined += 1
        case Rejected():
            result.rejected += 1
        case _:
            result.unknown += 1


async def run(
    make_client: Callable[[View], Any],
    databases: Sequence[Engine],
    *,
    branches: int = 1,
    first_branch: int = 0,
    accounts: int = 5,
    transfers: int = 25,
    seed: int = 0,
) -> Result:
    """One client for each of `databases`; the same engine twice is one database that two clients share."""
    banks = [Bank(engine) for engine in databases]
    numbers = range(first_branch, first_branch + branches)
    result = Result()

    async def work(number: int, client: Any) -> None:
        choose = random.Random(f"{seed} {number}")
        for round in range(transfers):
            branch = choose.choice(numbers)
            payer, receiver = choose.sample(range(1, accounts + 1), 2)
            if round % FROM_THE_MINT == 0:
                payer = MINT
            name = f"seed {seed}, client {number}, transfer {round}"
            transfer = Transfer(banks[number], branch, payer, receiver, choose.randrange(1, 50), name)
            count(result, transfer, await client.submit(transfer))

    made = [make_client(bank.view) for bank in banks]
    async with asyncio.TaskGroup() as starting:
        for client in made:
            starting.create_task(client.open())
    try:
        async with asyncio.TaskGroup() as working:
            for number, client in enumerate(made):
                working.create_task(work(number, client))
        await _wait_until_level(made[0], banks, numbers)
    finally:
        for client in made:
            await client.close()
        for bank in banks:
            await bank.view.close()
    found = [bank.accounts() for bank in banks]
    result.accounts, result.is_agreed = found[0], all(one == found[0] for one in found)
    return result


async def _wait_until_level(client: Any, banks: Sequence[Bank], branches: Sequence[int]) -> None:
    """Every database contains everything that is in the log now."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        for branch in branches:
            end = await client.end_position(branch)
            for bank in banks:
                while await bank.view.position(branch) < end:
                    await asyncio.sleep(0.02)


def main(
    *,
    servers: Annotated[str, Option(help="Addresses of servers, with commas between them.")],
    databases: Annotated[list[str], Option("--database", help="A SQLite file or a URL; one client for each.")],
    branches: Annotated[int, Option(help="Partitions to use.")] = 1,
    first_branch: Annotated[int, Option(help="The lowest of them.")] = 0,
    accounts: Annotated[int, Option(min=2, help="In each branch.")] = 5,
    transfers: Annotated[int, Option(help="By each client.")] = 25,
    seed: int = 0,
) -> None:
    """Move money about from several clients at once, and see that all of it is still there."""
    partitions = range(first_branch, first_branch + branches)
    engines = {name: sa.create_engine(name) if "://" in name else sqlite(name) for name in databases}
    result = loop.run(
        run(
            lambda view: Client(servers, view=view, partitions=partitions),
            [engines[name] for name in databases],
            branches=branches,
            first_branch=first_branch,
            accounts=accounts,
            transfers=transfers,
            seed=seed,
        )
    )
    for engine in engines.values():
        engine.dispose()
    typer.echo(str(result))
    raise SystemExit(0 if result.is_right else 1)


if __name__ == "__main__":
    typer.run(main)
