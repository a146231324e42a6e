"""A follower that feeds a search index: it finds what guests have booked and what was moved in the shop, by any word.

The index is a full-text table of SQLite. How far it has come stands in a file beside it, which is written after the index:
so after a crash some transactions come again, and replace themselves. It writes nothing to the log.

    python -m tests.examples.indexer --servers 127.0.0.1:55180 --index index.db
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer
from typer import Option

from tests.examples.events import EVENTS, Event
from waltzd import Client, PositionFile, Transaction
from waltzd.errors import EventUnreadable

SCHEMA = "CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (partition UNINDEXED, id UNINDEXED, text)"
ID_BITS = 40
"""The rows of a partition are as many at most."""


class Index:
    """The words of every transaction, by partition and id."""

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, timeout=30)
        self._connection.execute(SCHEMA)

    def add(self, transactions: Sequence[Transaction[Event]]) -> None:
        """Also what was added before."""
        rows = [((one.partition << ID_BITS) + one.id, one.partition, one.id, text_of(one)) for one in transactions]
        with self._connection as connection:
            connection.executemany("INSERT OR REPLACE INTO words (rowid, partition, id, text) VALUES (?, ?, ?, ?)", rows)

    def search(self, words: str) -> list[tuple[int, int]]:
        """Partitions and ids, in the order of the log."""
        found = "SELECT partition, id FROM words WHERE text MATCH ? ORDER BY rowid"
        return self._connection.execute(found, (words,)).fetchall()

    def close(self) -> None:
        self._connection.close()


def text_of(transaction: Transaction[Event]) -> str:
    try:
        return " ".join(str(value) for value in asdict(transaction.value).values())
    except EventUnreadable:  # somebody else wrote it, say with `waltzctl txn append`
        return ""


async def follow(servers: str, index: Index, positions: str) -> None:
    """Until the process is told to end."""
    async with Client(servers, partitions=[], serializer=EVENTS) as client, asyncio.TaskGroup() as group:
        file = PositionFile(positions, client.cluster_key)
        for partition in range(client.partition_count):
            group.create_task(_follow(client, partition, index, file))
        stop = partial(group.create_task, client.close())  # the feeds end with their client
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)


async def _follow(client: Client[Event], partition: int, index: Index, file: PositionFile) -> None:
    async for transactions in client.feed_batches(partition, after=file.position(partition)):
        index.add(transactions)
        file.save(partition, transactions[-1].id)


def main(
    *,
    servers: Annotated[str, Option(help="Addresses of servers, with commas between them.")],
    index: Annotated[str, Option(help="The file of the index.")],
) -> None:
    """Follow until the process is told to end."""
    with closing(Index(index)) as opened:
        asyncio.run(follow(servers, opened, f"{index}.position"))


if __name__ == "__main__":
    typer.run(main)
