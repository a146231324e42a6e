"""A follower that feeds a search index: it finds what guests have booked and what was moved in the shop, by any word.

The index is a full-text table of SQLite, and how far it has come stands in the same file: words and positions are written
in one transaction, so a process that is killed at any moment goes on where its file is. It writes nothing to the log.

    python -m tests.examples.indexer --servers 127.0.0.1:55180 --index index.db
"""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated
from uuid import UUID

import typer
from typer import Option

from waltzd import Client, Transaction
from waltzd.errors import ForeignCluster

SCHEMA = """
    CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (partition UNINDEXED, id UNINDEXED, text);
    CREATE TABLE IF NOT EXISTS positions (partition INTEGER PRIMARY KEY, position INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS origin (cluster TEXT NOT NULL);
"""


class Index:
    """The view: the words of every transaction, by partition and id."""

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, timeout=30)
        self._connection.executescript(SCHEMA)

    def opened(self, cluster: UUID) -> None:
        with self._connection as connection:
            connection.execute("INSERT INTO origin SELECT ? WHERE NOT EXISTS (SELECT * FROM origin)", (str(cluster),))
        if connection.execute("SELECT cluster FROM origin").fetchall() != [(str(cluster),)]:
            raise ForeignCluster("this index was made from another cluster")

    def position(self, partition: int) -> int:
        found = self._connection.execute("SELECT position FROM positions WHERE partition = ?", (partition,)).fetchone()
        return found[0] if found else -1

    def apply(self, transaction: Transaction) -> None:
        self.apply_batch([transaction])

    def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        last = transactions[-1]
        rows = [(one.partition, one.id, text_of(one.payload)) for one in transactions]
        with self._connection as connection:
            connection.executemany("INSERT INTO words VALUES (?, ?, ?)", rows)
            connection.execute("INSERT OR REPLACE INTO positions VALUES (?, ?)", (last.partition, last.id))

    def search(self, words: str) -> list[tuple[int, int]]:
        """Partitions and ids, in the order of the log."""
        found = "SELECT partition, id FROM words WHERE text MATCH ? ORDER BY partition, id"
        return self._connection.execute(found, (words,)).fetchall()

    def close(self) -> None:
        self._connection.close()


def text_of(payload: bytes) -> str:
    """The values of an object; what is none is not searched for."""
    try:
        found = json.loads(payload)
    except ValueError:
        return ""
    return " ".join(map(str, found.values())) if isinstance(found, dict) else ""


async def follow(servers: str, index: Index) -> None:
    """Until the process is told to end."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with Client(servers, view=index):
        await ended.wait()


def main(
    *,
    servers: Annotated[str, Option(help="Addresses of servers, with commas between them.")],
    index: Annotated[str, Option(help="The file of the index.")],
) -> None:
    """Follow until the process is told to end."""
    with closing(Index(index)) as opened:
        asyncio.run(follow(servers, opened))


if __name__ == "__main__":
    typer.run(main)
