"""One point of `curves` with readers: appends to a cluster while clients apply everything that is written.

Run as a process of its own, so that its memory is that of the client. The last transaction of each batch says when it was
handed over; each reader measures how late it gets such a transaction.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from waltzctl.bench.command import Counters, Latencies, Load, Series, locks, payloads
from waltzd.client.client import Client
from waltzd.client.loop import run
from waltzd.client.view import Transaction
from waltzd.protocol.batches import FeedMode

STAMPED = 1
"""Header of transactions whose payload begins with a time."""
STAMP = struct.Struct(">d")
FILLING = 500
"""Transactions in each batch that readers begin behind."""


class Reader:
    """A view that keeps its position only, and measures how late it is."""

    def __init__(self, marks: Mapping[int, int]) -> None:
        self._marks = marks
        self.begin()

    def begin(self) -> None:
        """Drop what was counted before."""
        self.latencies = Latencies()
        self.count = self.bytes = 0

    def position(self, partition: int) -> int:
        return self._marks[partition]

    def apply(self, transaction: Transaction) -> None:
        self.apply_batch([transaction])

    def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        self.count += len(transactions)
        self.bytes += sum([transaction.length for transaction in transactions])
        for transaction in transactions:
            if transaction.kind == STAMPED:
                self.latencies.add(time.perf_counter() - STAMP.unpack_from(transaction.payload)[0])


class Writers:
    """Producers that hand over stamped batches, each to the next partition, until they are told to end."""

    def __init__(self, client: Client, load: Load) -> None:
        self.counters = Counters()
        self.is_over = False
        self._client = client
        self._load = load
        self._payloads = payloads(load.size)
        self._locks = locks(load.locks, load.keys)
        self._turns = 0

    async def write(self) -> None:
        async with asyncio.TaskGroup() as producers:
            for _ in range(self._load.producers):
                producers.create_task(self._produce())

    async def _produce(self) -> None:
        headers = [0] * (self._load.batch - 1) + [STAMPED]
        while not self.is_over:
            partition, self._turns = self._turns % self._load.partitions, self._turns + 1
            begun = time.perf_counter()
            data = self._payloads.take(self._load.batch)
            data[-1] = STAMP.pack(begun) + data[-1][STAMP.size :]
            outcomes = await self._client.append_many(
                data, partition=partition, kinds=headers, locks=self._locks.take(self._load.batch),
                position=self._client.position(partition),
            )  # fmt: skip
            self.counters.many(outcomes, time.perf_counter() - begun)


async def measure(servers: str, load: Load, *, readers: int, behind: int) -> list[Series]:
    seconds = load.seconds
    assert seconds is not None
    async with AsyncExitStack() as stack:
        writer = Client(servers, feed=FeedMode.NONE, settings=load.client_settings())
        client = await stack.enter_async_context(writer)
        load = load.on(client.partition_count)
        marks = {partition: await client.end_position(partition) for partition in range(load.partitions)}
        for batch in range(-(-behind // FILLING)):
            await client.append_many([b"x" * load.size] * FILLING, partition=batch % load.partitions)
        views = [Reader(marks) for _ in range(readers)]
        for view in views:
            await stack.enter_async_context(Client(servers, view=view))
        writers = Writers(client, load)
        work = asyncio.create_task(writers.write())
        await asyncio.sleep(load.warm_up)
        for view in views:
            view.begin()
        writers.counters.begin(time.perf_counter())
        await asyncio.sleep(seconds)
        writers.counters.end(time.perf_counter())
        writers.is_over = True
        counters, seen = writers.counters, Latencies()
        for view in views:
            seen.merge(view.latencies)
        applied = Series(
            name="applied",
            count=sum(view.count for view in views),
            seconds=counters.seconds,
            bytes=sum(view.bytes for view in views),
            latencies=seen,
        )
        await work
    committed = Series(
        name="committed", count=counters.committed, seconds=counters.seconds, bytes=counters.committed * load.size,
        latencies=counters.latencies,
    )  # fmt: skip
    return [committed, applied]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", required=True, help="addresses of servers")
    parser.add_argument("--producers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--behind", type=int, default=0, help="transactions that are written before the readers begin")
    options = parser.parse_args()
    load = Load(producers=options.producers, batch=options.batch, seconds=options.seconds)
    series = run(measure(options.at, load, readers=options.readers, behind=options.behind), fast=True)
    print(json.dumps({"series": [one.as_dict() for one in series]}))


if __name__ == "__main__":
    main()
