"""What applications do in a race: each transaction reads one lock and writes another, or appends under a third."""

from __future__ import annotations

import random
from collections.abc import Sequence

from waltzd.client.view import Builder, Command, Transaction
from waltzd.protocol.locks import append_lock, read_lock, write_lock

LOCKS = 12
"""How many different ones are raced for."""


class View:
    """Nothing but a mark for each partition."""

    def __init__(self) -> None:
        self.marks: dict[int, int] = {}

    def position(self, partition: int) -> int:
        return self.marks.get(partition, -1)

    def apply(self, transaction: Transaction) -> None:
        assert transaction.id == self.position(transaction.partition) + 1
        self.marks[transaction.partition] = transaction.id


class GroupView(View):
    """One that takes several at once, and so each group as a whole."""

    def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        for transaction in transactions:
            self.apply(transaction)


class Attempt(Command):
    """One transaction of one caller; its payload is unique, also among its own attempts."""

    def __init__(
        self, name: str, number: int, pick: random.Random, partition: int, *, locks: int = LOCKS, header: int = 0
    ) -> None:
        self._name = f"{name}:{number}"
        self._header = header
        self._attempts = 0
        self._partition = partition
        first, second = pick.sample(range(locks), 2)
        self._locks = (
            (append_lock("key", first),) if pick.random() < 0.2 else (write_lock("key", first), read_lock("key", second))
        )
        self._size = pick.choice((0, 0, 40, 400, 4000))

    def partition(self, count: int) -> int:
        return self._partition

    def build(self, builder: Builder) -> bool:
        self._attempts += 1
        builder.payload = f"{self._name}:{self._attempts} ".encode() + bytes(self._size)
        builder.kind = self._header
        builder.locks = self._locks
        return True
