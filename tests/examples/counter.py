"""The smallest application with a rule: a counter that many clients change at once and that is never below zero.

Each client keeps a view of its own in memory and decides from it alone. The WRITE lock makes that safe: a change goes into
the log only if nobody changed the counter after what this client had seen. Otherwise the client looks again.

    python -m tests.examples.counter --servers 127.0.0.1:55180
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from typer import Option

from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.client.view import Builder, Command, Transaction, View
from waltzd.protocol.locks import Committed, Declined, Outcome, Rejected, write_lock

PATIENCE_SECONDS = 60
_log = logging.getLogger("counter")


class CounterView:
    """What the counter is, as far as one client knows."""

    def __init__(self, partition: int = 0) -> None:
        self.partition = partition
        self.value = 0
        self.lowest = 0
        self._marks: dict[int, int] = {}
        self._moved = asyncio.Condition()

    def position(self, partition: int) -> int:
        return self._marks.get(partition, -1)

    async def apply(self, transaction: Transaction) -> None:
        async with self._moved:
            if transaction.partition == self.partition:
                self.value += amount_of(transaction)
                self.lowest = min(self.lowest, self.value)
            self._marks[transaction.partition] = transaction.id
            self._moved.notify_all()

    async def reached(self, id: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self.position(self.partition) >= id)


def amount_of(transaction: Transaction) -> int:
    """What somebody else wrote into this partition changes nothing, in every view alike: the payload alone decides."""
    try:
        return int(json.loads(transaction.payload)["add"])
    except (ValueError, KeyError, TypeError):
        _log.warning("transaction %d of partition %d is no change of a counter", transaction.id, transaction.partition)
        return 0


class Change(Command):
    """Add to the counter, unless that would bring it below zero."""

    def __init__(self, view: CounterView, amount: int, name: str) -> None:
        self._view = view
        self._amount = amount
        self._name = name
        self.attempts = 0

    def partition(self, count: int) -> int:
        return self._view.partition

    def build(self, builder: Builder) -> bool:
        if self._view.value + self._amount < 0:
            return builder.decline("the counter would fall below zero")
        self.attempts += 1
        builder.locks = [write_lock("counter")]
        builder.payload = json.dumps({"add": self._amount, "by": f"{self._name}, attempt {self.attempts}"}).encode()
        return True


@dataclass
class Result:
    value: int = 0
    lowest: int = 0
    expected: int = 0
    """The sum of all changes that were reported as committed."""
    committed: int = 0
    declined: int = 0
    rejected: int = 0
    unknown: int = 0
    attempts: int = 0
    views: list[int] = field(default_factory=list)
    """What each client thinks in the end."""

    @property
    def is_right(self) -> bool:
        """An unknown outcome may have counted or not; everything else is certain."""
        is_exact = self.unknown > 0 or self.value == self.expected
        return is_exact and self.lowest >= 0 and set(self.views) == {self.value}

    def __str__(self) -> str:
        changes = f"{self.committed} changes, {self.declined} declined, {self.rejected} given up, {self.unknown} unknown"
        return (
            f"{'right' if self.is_right else 'WRONG'}: the counter is {self.value}, its lowest value was {self.lowest}\n"
            f"{changes}; {self.attempts} attempts; {len(self.views)} views agree: {len(set(self.views)) == 1}"
        )


def count(result: Result, change: Change, amount: int, outcome: Outcome) -> None:
    result.attempts += change.attempts
    match outcome:
        case Committed():
            result.committed += 1
            result.expected += amount
        case Declined():
            result.declined += 1
        case Rejected():
            result.rejected += 1
        case _:
            result.unknown += 1


MakeClient = Callable[[View], Any]


async def run(make_client: MakeClient, *, clients: int = 4, changes: int = 25, seed: int = 0, partition: int = 0) -> Result:
    """Let several clients change the counter at once. `make_client` gives a `Client` for a view: where the servers
    are is not the application's business."""
    views = [CounterView(partition) for _ in range(clients)]
    result = Result()

    async def work(number: int, client: Any) -> None:
        choose = random.Random(f"{seed} {number}")
        for round in range(changes):
            amount = choose.choice([1, 2, 3, -1, -2, -4])
            change = Change(views[number], amount, f"seed {seed}, client {number}, change {round}")
            count(result, change, amount, await client.submit(change))

    made = [make_client(view) for view in views]
    async with asyncio.TaskGroup() as starting:
        for client in made:
            starting.create_task(client.open())
    try:
        async with asyncio.TaskGroup() as working:
            for number, client in enumerate(made):
                working.create_task(work(number, client))
        end = await made[0].end_position(partition)
        async with asyncio.timeout(PATIENCE_SECONDS):
            for client in made:
                while client.position(partition) < end:
                    await asyncio.sleep(0.01)
    finally:
        for client in made:
            await client.close()
    result.views = [view.value for view in views]
    result.value, result.lowest = views[0].value, min(view.lowest for view in views)
    return result


def main(
    *,
    servers: Annotated[str, Option(help="Addresses of servers, with commas between them.")],
    clients: int = 4,
    changes: Annotated[int, Option(help="By each client.")] = 25,
    seed: int = 0,
    partition: Annotated[int, Option(help="Where the counter is; what else is in there does not count.")] = 0,
) -> None:
    """Race for a counter that must not fall below zero."""

    def make_client(view: View) -> Client:
        return Client(servers, view=view, partitions=[partition])

    result = loop.run(run(make_client, clients=clients, changes=changes, seed=seed, partition=partition))
    typer.echo(str(result))
    raise SystemExit(0 if result.is_right else 1)


if __name__ == "__main__":
    typer.run(main)
