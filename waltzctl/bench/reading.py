"""`feed`: how fast one client takes in what was written before, from the owner's memory and from the storages' disks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from waltzctl.bench.appending import Bench, Meter
from waltzctl.bench.drive import Drive, open_client
from waltzctl.bench.load import Load
from waltzctl.bench.result import Result, Series
from waltzctl.bench.site import Site
from waltzctl.bench.tally import Tally
from waltzd.client.view import Transaction
from waltzd.format.record import OVERHEAD_BYTES
from waltzd.protocol.batches import FeedMode


def tail_bytes(load: Load, partitions: int) -> int:
    """For the owner's memory to hold the newer half of what each partition of the load gets."""
    assert load.count is not None
    half = load.count // load.partitions * (load.size + OVERHEAD_BYTES) // 2
    return max(1 << 20, half * partitions)


class _Passing:
    """A handler that counts until it has seen so many transactions of every partition."""

    def __init__(self, marks: Mapping[int, int], count: int) -> None:
        self._left = dict.fromkeys(marks, count)
        self._marks = marks
        self.bytes = 0
        self.done_at = 0.0
        self.done = asyncio.Event()

    def mark(self, partition: int) -> int:
        return self._marks[partition]

    def apply(self, transaction: Transaction) -> None:
        self.apply_batch([transaction])

    def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        self.bytes += sum([transaction.length for transaction in transactions])
        self._left[transactions[0].partition] -= len(transactions)
        if max(self._left.values()) <= 0 and not self.done.is_set():
            self.done_at = time.perf_counter()
            self.done.set()


async def feed(bench: Bench, load: Load) -> Result:
    """Fill, then read the older half, which has left the owner's memory, and the newer one, which has not."""
    tally, meter = Tally(), Meter(bench.site)
    async with open_client(bench.site, load) as client:
        load = load.on(client.partition_count)
        first = {partition: await client.high_water_mark(partition) for partition in range(load.partitions)}
        await Drive(client, load, tally, watch=bench.watch).run()
        assert load.count is not None
        half = load.count // load.partitions // 2
        middle = {partition: mark + half for partition, mark in first.items()}
        await meter.begin()
        series = []
        for name, marks in (("cold", first), ("hot", middle)):
            for mode in (FeedMode.RECORDS, FeedMode.HEADS):
                series.append(await _read(bench.site, f"{name}, {mode.name.lower()}", marks, half, mode))
        await meter.end()
        return meter.result(bench, "feed", client, tally, series)


async def _read(site: Site, name: str, marks: Mapping[int, int], count: int, mode: FeedMode) -> Series:
    """`count` of every partition, behind its mark. The clock runs from before the client is there."""
    handler = _Passing(marks, count)
    begun = time.perf_counter()
    async with site.client(list(marks), handler=handler, feed=mode):
        await handler.done.wait()
    return Series(name=name, count=count * len(marks), seconds=handler.done_at - begun, bytes=handler.bytes)
