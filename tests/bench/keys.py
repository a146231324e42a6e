"""Reading by lock at a storage: how long an index takes to make, and a look-up among many transactions.

    ./dev bench keys [--transactions N | --appends ROUNDS]

Each transaction marks a lock of its own, and ten of them the one that is looked up. A cold look-up opens each key index
anew; the files are in the memory of the machine. The owner and the network add a round to what is shown here. What an index
costs is processor time, for batches of several sizes: a small batch costs more for each of its locks.

With --appends two clusters take the same transactions in turns, and the storages of one make no key index. Shown is the
processor time of all daemons for a transaction, until each sealed segment has its index.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import UUID

import numpy as np

from tests.batches import WRITE, batches_of, segment_raw
from tests.bench.curves import bench, many, series_of
from tests.bench.formats import cpu_seconds
from waltzctl.local_cluster.local import LocalCluster
from waltzd.archive.archived_segment import MemoryFile
from waltzd.disk.real import RealDisk
from waltzd.format.batch import End, encode_batch
from waltzd.format.key_index import KeyHeader, LockQuery, key_index_of
from waltzd.format.record import LockColumns, encode_payloads
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.key_indexes import KeyIndexes
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import PartitionSettings

ROWS, PAYLOAD, SESSION = 4096, b"x" * 40, 1
HOT = 7
"""The lock with ten marks."""
ROUNDS = 20
SMALL = 64, 8, 1
"""Transactions in a batch, of logs with little at a time."""
KEY = UUID(int=7)
ROOT = Path(__file__).parents[2]
APPENDED = 500_000
"""Transactions of a run of --appends: more than a segment of 64 MiB."""
INDEXED_SECONDS = 300.0
"""Time for the storages to make the key indexes of what was appended."""
SETTLE_SECONDS = 15.0
"""Time after the appends that is measured in both clusters: idle daemons use the processor, too."""
NO_KEYS = """
import asyncio
from waltzd.storage.scrub import KeyIndexer
KeyIndexer.run = lambda self: asyncio.Event().wait()
KeyIndexer.index_missed = lambda self, partition: asyncio.sleep(0)
"""
"""What a storage runs at its start, to make no key index."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench keys")
    parser.add_argument("--transactions", type=int, default=1_000_000)
    parser.add_argument("--appends", type=int, default=0, metavar="ROUNDS", help="compare appends, so many times")
    options = parser.parse_args(arguments)
    if options.appends:
        return compare_appends(options.appends)
    count = options.transactions
    with tempfile.TemporaryDirectory(prefix="waltz-keys-") as home:
        disk = RealDisk()
        directory = Directory.open(disk, home, key=KEY, partitions=1, settings=PartitionSettings())
        partition = directory.create_partition(0)
        partition.open_session(SESSION)
        partition.set_low_mark(SESSION, -1)
        fill(partition, count)
        sealed = partition.missing_keys()
        locks = sum(last + 1 - first for first, last in partition.sealed_segments())
        begun = time.process_time()
        for first_id in sealed:
            partition.write_key(first_id)
        seconds = time.process_time() - begun
        print(f"{count:,} transactions, {len(sealed)} sealed segments")
        print(f"an index, batches of {ROWS:,}: {1e6 * seconds / max(1, locks):.2f} µs a lock")
        for rows in SMALL:
            print(
                f"an index in memory, batches of {rows}: {statistics.median(sealing(rows) for _ in range(5)):.2f} µs a lock"
            )
        for name, lock, marks in (("ten marks", HOT, 10), ("no mark", 3, 0)):
            query = LockQuery(lock=lock, last_id=partition.last_id, limit=100)
            assert len(found(partition, query)) == marks
            cold = statistics.median(timed(partition, query, is_cold=True) for _ in range(ROUNDS))
            warm = statistics.median(timed(partition, query) for _ in range(ROUNDS))
            print(f"a lock with {name}: {1e3 * cold:.2f} ms cold, {1e3 * warm:.2f} ms warm")
    return 0


def compare_appends(rounds: int) -> int:
    with ExitStack() as stack:
        clusters = {has_keys: stack.enter_context(cluster(has_keys=has_keys)) for has_keys in (True, False)}
        for turn in range(rounds + 1):
            order = (True, False) if turn % 2 else (False, True)
            costs = {has_keys: cost_of_appends(clusters[has_keys], has_keys=has_keys) for has_keys in order}
            if turn:  # the first one warms up
                ratio = costs[False] / costs[True]
                print(f"{costs[True]:.2f} µs with key indexes, {costs[False]:.2f} without: {ratio:.3f}", flush=True)
    return 0


@contextmanager
def cluster(*, has_keys: bool) -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="waltz-keys-") as home:
        made = LocalCluster.make(Path(home) / "cluster", partitions=1, storages=3, servers=1, replication=3, format=1)
        if not has_keys:
            patches = Path(home) / "patches"
            patches.mkdir()
            (patches / "sitecustomize.py").write_text(NO_KEYS, encoding="utf-8")
            for name, daemon in made.daemons.items():
                if name.startswith("storage"):
                    daemon.environment["PYTHONPATH"] = os.pathsep.join([str(patches), str(ROOT)])
        made.start()
        try:
            yield made
        finally:
            made.kill()


def cost_of_appends(made: LocalCluster, *, has_keys: bool) -> float:
    """Append until segments are sealed and indexed; return the microseconds of all daemons for each transaction."""

    def count(suffix: str) -> int:
        return sum(1 for _ in made.directory.rglob(f"0/*{suffix}"))

    before = cpu_seconds(made)
    there = ("--at", ",".join(made.server_addresses), "--yes", "--warm-up", "0", "--count", str(APPENDED))
    found = series_of(bench("append", *there, *many(128)), "committed")
    time.sleep(SETTLE_SECONDS)
    deadline = time.monotonic() + INDEXED_SECONDS
    while has_keys and count(".key") < count(".seg") - 3:  # the newest segment of each storage is not sealed
        assert time.monotonic() < deadline, "the storages do not make the key indexes of their segments"
        time.sleep(0.2)
    assert has_keys or count(".key") == 0
    return 1e6 * (cpu_seconds(made) - before) / float(found["count"])


def fill(partition: Partition, count: int) -> None:
    end, first_id, hot = End(), 0, range(count // 20, count, count // 10)
    while first_id < count:
        rows = min(ROWS, count - first_id)
        locks = np.arange(first_id + 1000, first_id + 1000 + rows).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        locks[[id_ - first_id for id_ in hot if first_id <= id_ < first_id + rows]] = HOT
        batch = encode_batch(
            encode_payloads(first_id, [PAYLOAD] * rows, partition=0, client=9),
            session=SESSION,
            generation=0,
            committed=first_id - 1,
            time=end.time + 1,
            before=end,
            locks=LockColumns(np.ones(rows, np.int64), locks, np.full(rows, 2, np.uint8)),
            follows=None,
            segment_bytes_max=64 << 20,
        )
        partition.append(SESSION, [batch], first_id - 1)
        end, first_id = batch.end(end), first_id + rows


def sealing(rows: int) -> float:
    """Microseconds of the processor for each lock of an index, of batches of so many transactions with one lock each."""
    batches = batches_of(
        [[PAYLOAD] * rows] * (20_000 // rows), locks=[[[(id_, WRITE)] for id_ in range(rows)]] * (20_000 // rows)
    )
    last_id, data = batches[-1].last_id, segment_raw(batches, key=KEY)[0]
    header = KeyHeader(key=KEY, partition=0, first_id=0, last_id=last_id, footer=bytes(32))
    begun = time.process_time()
    assert key_index_of(MemoryFile("", data), header) is not None
    return 1e6 * (time.process_time() - begun) / (last_id + 1)


def found(partition: Partition, query: LockQuery) -> list[int]:
    ids: list[int] = []
    while not query.is_done:
        part = partition.find_marks(query, session=SESSION)
        ids += part.ids
        query = query.after(part)
    return ids


def forget(partition: Partition) -> None:
    before = partition._keys
    partition._keys = KeyIndexes(before._context, before._segments)
    partition._keys._scanned = before._scanned  # of the segment that is not sealed: it is in memory all the time


def timed(partition: Partition, query: LockQuery, *, is_cold: bool = False) -> float:
    if is_cold:
        forget(partition)
    begun = time.perf_counter()
    found(partition, query)
    return time.perf_counter() - begun
