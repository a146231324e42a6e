"""`waltzctl bench append` and `bench feed`: measure how fast a cluster commits and feeds transactions.

Each creates a cluster on this machine for its run and deletes it; `append` can also load an existing cluster. A result
states the durability, the number of replicas, the file system and the load of the machine.

A load consists of producers that hand over transactions and wait for them, or that keep to a rate, answered or not.

With a rate, a latency counts from when the transaction was due: when a log stands still for a second, all transactions of
that second have waited, and not only the few that were under way. Payloads are random bytes, because real ones seldom
compress; a few of them are used again and again, so that making them is not measured.

A latency is counted in one of some thousand buckets whose width grows with the value, so every percentile is right to
within one part in a hundred, however long a run is and however many producers it has.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar
from uuid import UUID

import numpy as np
import typer
from numpy.typing import NDArray
from typer import Option

from waltzctl.local_cluster.local import LocalCluster
from waltzctl.placement.replica_assignment import assign_replicas
from waltzctl.shell.blueprint import SERVERS_MAX, STORAGES_MAX
from waltzctl.shell.cluster_target import first_contact, tls_alone
from waltzctl.shell.interruption import ending_in_order, left_to_the_loop
from waltzctl.shell.options import From, Output, confirmed, option_group, positive
from waltzctl.shell.progress import Waiting
from waltzctl.show.forms import Column, Columns, Line, Listing, Part, Table, put
from waltzctl.show.terminal import count
from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.client.pending import IS_COMMITTED, IS_UNKNOWN, Outcomes
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Transaction
from waltzd.cluster.documents import FORMAT
from waltzd.daemon.settings import parse_size
from waltzd.disk.real import translate
from waltzd.errors import EXIT_OK, EXIT_USAGE, BadArgument
from waltzd.format.layout import VERSIONS
from waltzd.format.record import OVERHEAD_BYTES
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import AppendOutcome, Committed, Lock, Mode, Reason, Rejected
from waltzd.wire.servers import ServerClient
from waltzd.wire.tls import Tls

LOCK_NAME = "bench"
PAYLOADS_BYTES = 4 << 20
"""Bytes of payloads that are made before a run."""
SHOW_SECONDS = 0.25
WAITING_MAX = 100_000
"""Limit of transactions that are due and not answered. Above it the rate is not kept; the delay counts as latency."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Load:
    size: int = 512
    """Bytes of a payload."""
    partitions: int = 0
    """Number of partitions, used in turn; set by `on`."""
    producers: int = 64
    batch: int = 1
    """Transactions that a producer hands over at once and waits for."""
    locks: int = 1
    keys: int = 100_000
    """Number of different locks, which transactions use in turn."""
    rate: float | None = None
    """Transactions a second, whether or not earlier ones are answered. None: each producer waits for its answer."""
    seconds: float | None = 10.0
    count: int | None = None
    """Number of transactions, in place of `seconds`."""
    warm_up: float = 1.0
    """Seconds before anything is counted; unused with `count`."""

    def on(self, partitions: int) -> Load:
        """Return this load for a number of partitions; raise `BadArgument` for options that contradict each other."""
        if self.locks > self.keys:
            raise BadArgument(f"a transaction cannot have {self.locks} different locks out of {self.keys}")
        if (self.seconds is None) == (self.count is None):
            raise BadArgument("give either the seconds or the number of transactions")
        return replace(self, partitions=partitions)

    def client_settings(self) -> ClientSettings:
        """Return settings with room for all that is in flight: the cluster is measured, not the client's bounds."""
        rows = 2 * self.producers * self.batch if self.rate is None else WAITING_MAX + self.batch
        return ClientSettings(pending_max=max(20_000, rows), pending_bytes_max=max(32 << 20, rows * (self.size + 256)))


class Cycle(Generic[T]):
    """Repeats a few values in turn."""

    def __init__(self, values: Sequence[T]) -> None:
        self._values = values
        self._next = 0

    def take(self, count: int) -> list[T]:
        out: list[T] = []
        while len(out) < count:
            part = self._values[self._next : self._next + count - len(out)]
            self._next = (self._next + len(part)) % len(self._values)
            out += part
        return out


def payloads(size: int) -> Cycle[bytes]:
    count = max(1, min(1024, PAYLOADS_BYTES // max(1, size)))
    raw = np.random.default_rng(1).bytes(count * size)
    return Cycle([raw[at * size : (at + 1) * size] for at in range(count)])


def locks(each: int, keys: int) -> Cycle[tuple[Lock, ...]]:
    """Return locks for transaction after transaction; no two share one as long as there are keys left."""
    if each == 0:
        return Cycle([()])
    pool = [Lock(LOCK_NAME, key, Mode.WRITE) for key in range(keys)]
    return Cycle([tuple(pool[at : at + each]) for at in range(0, keys - each + 1, each)])


class Drive:
    """One load on one cluster, once."""

    def __init__(self, client: Client, load: Load, report: Callable[[str], None]) -> None:
        """Create a load; `report` is called regularly with the present rate."""
        self.counters = Counters()
        self._client = client
        self._load = load
        self._report = report
        self._payloads = payloads(load.size)
        self._locks = locks(load.locks, load.keys)
        self._left = load.count
        self._is_over = False
        self._turns = 0

    async def run(self) -> Counters:
        """Return what was counted after the warm-up, once the load is done and everything is answered."""
        for partition in range(self._load.partitions):  # every partition has an owner before any clock runs
            await self._client.end_position(partition)
        self.counters.begin(time.perf_counter())
        work = asyncio.create_task(self._work())
        showing = asyncio.create_task(self._show())
        try:
            if self._load.seconds is not None:
                await _span(work, self._load.warm_up)
                self.counters.begin(time.perf_counter())
                await _span(work, self._load.seconds)
                self.counters.end(time.perf_counter())
                self._is_over = True
                await work
            else:
                await work
                self.counters.end(time.perf_counter())
        finally:
            self._is_over = True
            for task in (showing, work):
                task.cancel()
            await asyncio.gather(showing, work, return_exceptions=True)
        return self.counters

    async def _show(self) -> None:
        while True:
            before = self.counters.committed
            await asyncio.sleep(SHOW_SECONDS)
            self._report(f"{max(0, self.counters.committed - before) / SHOW_SECONDS:,.0f} transactions a second")

    async def _work(self) -> None:
        if self._load.rate is not None:
            await self._keep_rate(self._load.rate)
        else:
            async with asyncio.TaskGroup() as producers:
                for _ in range(self._load.producers):
                    producers.create_task(self._produce())

    async def _produce(self) -> None:
        while (turn := self._next_turn()) is not None:
            await self._hand_over(*turn, time.perf_counter())

    async def _keep_rate(self, rate: float) -> None:
        begun, due = time.perf_counter(), 0
        room = asyncio.Semaphore(max(1, WAITING_MAX // self._load.batch))

        async def hand_over(partition: int, count: int, due_time: float) -> None:
            try:
                await self._hand_over(partition, count, due_time)
            finally:
                room.release()

        async with asyncio.TaskGroup() as handing:
            while (turn := self._next_turn()) is not None:
                due += turn[1]
                due_time = begun + due / rate
                if (early := due_time - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                await room.acquire()
                handing.create_task(hand_over(*turn, due_time))

    def _next_turn(self) -> tuple[int, int] | None:
        """Return the partition of the next call and its number of transactions; None at the end of the load."""
        count = self._load.batch if self._left is None else min(self._load.batch, self._left)
        if self._is_over or count == 0:
            return None
        if self._left is not None:
            self._left -= count
        partition, self._turns = self._turns % self._load.partitions, self._turns + 1
        return partition, count

    async def _hand_over(self, partition: int, count: int, since: float) -> None:
        client = self._client
        data, wanted = self._payloads.take(count), self._locks.take(count)
        mark = client.position(partition)
        if count == 1:
            outcome = await client.append(data[0], partition=partition, locks=wanted[0], position=mark)
            self.counters.one(outcome, time.perf_counter() - since)
        else:
            given = wanted if self._load.locks else None
            outcomes = await client.append_many(data, partition=partition, locks=given, position=mark)
            self.counters.many(outcomes, time.perf_counter() - since)


async def _span(work: asyncio.Task[None], seconds: float) -> None:
    """Wait for `seconds`, or raise what `work` failed with."""
    await asyncio.wait([work], timeout=seconds)
    if work.done():
        work.result()


# -- what is counted ---------------------------------------------------------------------------------------------------


LEAST_SECONDS = 1e-6
STEPS = 128
"""Buckets for each doubling."""
DOUBLINGS = 32
"""From one microsecond to more than an hour; a longer time counts as that."""
PERCENTILES = (50.0, 99.0, 99.9)


class Latencies:
    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(STEPS * DOUBLINGS, np.int64)
        self.count = 0
        self.highest = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count `times` transactions that took `seconds` each."""
        bucket = int(np.log2(seconds / LEAST_SECONDS) * STEPS) if seconds > LEAST_SECONDS else 0
        self._counts[min(bucket, STEPS * DOUBLINGS - 1)] += times
        self.count += times
        self.highest = max(self.highest, seconds)

    def merge(self, other: Latencies) -> None:
        """Add what `other` has counted."""
        self._counts += other._counts
        self.count += other.count
        self.highest = max(self.highest, other.highest)

    def percentile(self, percent: float) -> float:
        """Return the time within which at least `percent` of a hundred ended; 0 when nothing was counted."""
        if self.count == 0:
            return 0.0
        rank = max(1, int(np.ceil(self.count * percent / 100)))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(LEAST_SECONDS * float(2.0 ** ((bucket + 1) / STEPS)), self.highest)


class Counters:
    """Outcomes of one load. `begin` drops what was counted during the warm-up."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Length of the measurement, once `end` was called."""
        self.begin(0.0)

    def begin(self, now: float) -> None:
        self.committed = 0
        self.refused: Counter[str] = Counter()
        """Rejected transactions, by reason."""
        self.unknown = 0
        self.latencies = Latencies()
        self._begun = now

    def end(self, now: float) -> None:
        self.seconds = now - self._begun

    @property
    def attempts(self) -> int:
        return self.committed + self.refused.total() + self.unknown

    def one(self, outcome: AppendOutcome, seconds: float) -> None:
        match outcome:
            case Committed():
                self._commit(1, seconds)
            case Rejected(reason):
                self.refused[reason.name] += 1
            case _:
                self.unknown += 1

    def many(self, outcomes: Outcomes, seconds: float) -> None:
        """Count a batch, which was handed over and answered as one."""
        self._commit(outcomes.committed, seconds)
        if outcomes.committed < len(outcomes):
            for row in (outcomes.reasons != IS_COMMITTED).nonzero()[0].tolist():
                if outcomes.reasons[row] == IS_UNKNOWN:
                    self.unknown += 1
                else:
                    self.refused[Reason(int(outcomes.reasons[row])).name] += 1

    def _commit(self, count: int, seconds: float) -> None:
        if count:
            self.committed += count
            self.latencies.add(seconds, count)


PREFIX = "waltz-bench-"
IN_MEMORY = ("tmpfs", "ramfs")


def size_of(text: str) -> int:
    try:
        return parse_size(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a size; write 512, 4KiB or 1MB") from None


@option_group
@dataclass(frozen=True, kw_only=True)
class ClusterSizeOptions:
    """Options for the size of the cluster that is created for a run."""

    directory: Annotated[
        Path | None,
        Option(
            "--directory", metavar="DIR", file_okay=False, exists=True,
            help="Directory for the cluster of this run; the temporary directory by default.",
        ),
    ] = None  # fmt: skip
    storages: Annotated[int, Option("--storages", min=1, max=STORAGES_MAX)] = 3
    servers: Annotated[int, Option("--servers", min=1, max=SERVERS_MAX)] = 1
    partitions: Annotated[int, Option("--partitions", min=1, max=1024)] = 4
    replicas: Annotated[
        int | None, Option("--replicas", min=1, max=15, help="Replicas of each partition; 3 by default.")
    ] = None
    format: Annotated[int, Option("--format", min=min(VERSIONS), max=max(VERSIONS), help="Segment format.")] = FORMAT


@option_group
@dataclass(frozen=True, kw_only=True)
class TransactionOptions:
    """Options for the transactions of a load."""

    size: Annotated[int, Option("--size", metavar="SIZE", parser=size_of, help="Bytes of a payload.")] = 512
    locks: Annotated[int, Option("--locks", min=0, max=1000, help="Locks of each transaction.")] = 1
    keys: Annotated[int, Option("--keys", min=1, max=1_000_000, help="Number of different locks.")] = 100_000


@dataclass(frozen=True, kw_only=True)
class Site:
    """Cluster under load."""

    servers: str
    tls: Tls | None
    facts: Mapping[str, Any]
    """Facts about a cluster that was created for the run; empty for an existing cluster."""

    def connect(self, address: str, key: UUID | None = None) -> ServerClient:
        return ServerClient(address, key, tls=self.tls)


@dataclass(frozen=True, kw_only=True)
class Series:
    """Line of the result."""

    name: str
    count: int
    seconds: float
    bytes: int
    latencies: Latencies | None = None

    def as_dict(self) -> dict[str, Any]:
        took: dict[str, float] = {}
        if self.latencies is not None and self.latencies.count:
            took = {f"p{percent:g}": round(1000 * self.latencies.percentile(percent), 3) for percent in PERCENTILES}
            took["max"] = round(1000 * self.latencies.highest, 3)
        return {
            "name": self.name,
            "count": self.count,
            "seconds": round(self.seconds, 3),
            "bytes": self.bytes,
            "per_second": round(self.count / self.seconds, 1) if self.seconds else 0.0,
            "megabytes_per_second": round(self.bytes / self.seconds / 1e6, 1) if self.seconds else 0.0,
            "latency_ms": took,
        }


def append(
    *,
    at: Annotated[
        str | None,
        Option("--at", metavar="ADDRESSES", help="Load an existing cluster: host:port,host:port of its servers."),
    ] = None,
    yes: Annotated[bool, Option("--yes", help="Do not ask, although transactions stay in the log of the cluster.")] = (
        False
    ),
    tls: Annotated[Callable[[], Tls | None], From(tls_alone)] = lambda: None,
    made: ClusterSizeOptions,
    shape: TransactionOptions,
    producers: Annotated[
        int,
        Option(
            "--producers", min=1, max=100_000, help="Number of producers; each appends transactions and waits for them."
        ),
    ] = 64,
    batch: Annotated[int, Option("--batch", min=1, max=10_000, help="Transactions that a producer appends at once.")] = 1,
    seconds: Annotated[float, Option("--seconds", metavar="SECONDS", min=0.1, max=86_400, help="How long.")] = 10.0,
    warm_up: Annotated[
        float, Option("--warm-up", metavar="SECONDS", min=0, max=3600, help="Time before the measurement starts.")
    ] = 1.0,
    count: Annotated[int | None, Option("--count", min=1, help="Number of transactions, in place of --seconds.")] = None,
    rate: Annotated[
        float | None,
        Option(
            "--rate",
            parser=positive,
            help="Transactions a second, whether answered or not; a latency starts when its transaction is due.",
        ),
    ] = None,
    output: Output = "table",
) -> int:
    """Append transactions with locks; measure the throughput and the latency of commits. Without --at a cluster is created
    on this machine for this run, and deleted afterwards.

    \b
    Examples:
      waltzctl bench append --seconds 2
      waltzctl bench append --producers 8 --batch 500 --seconds 2
      waltzctl bench append --producers 1 --rate 200 --seconds 2 -o json
    """
    load = Load(
        **asdict(shape), producers=producers, batch=batch, warm_up=warm_up, rate=rate, count=count,
        seconds=seconds if count is None else None,
    ).on(made.partitions)  # fmt: skip
    if (
        at is not None
        and not yes
        and not confirmed(f"Write to the cluster at {at}? Its log keeps what is written for good.")
    ):
        typer.echo("Nothing was written.", err=True)
        return EXIT_USAGE

    async def work(site: Site, report: Callable[[str], None]) -> tuple[Counters, list[Series]]:
        async with _client(site, load) as client:
            counters = await Drive(client, load.on(client.partition_count), report).run()
        size = counters.committed * load.size
        return counters, [
            Series(
                name="committed", count=counters.committed, seconds=counters.seconds, bytes=size,
                latencies=counters.latencies,
            )
        ]  # fmt: skip

    with ending_in_order(), Waiting() as live:
        if at is not None:
            return _run("append", work, load, Site(servers=at, tls=tls(), facts={}), live, output)
        with _scratch(made, live) as site:
            return _run("append", work, load, site, live, output)


def feed(
    *,
    made: ClusterSizeOptions,
    shape: TransactionOptions,
    count: Annotated[int, Option("--count", min=1000, help="Transactions to read.")] = 200_000,
    output: Output = "table",
) -> int:
    """Fill a log, then measure how fast one client reads it: the older half from the disks of the storages (cold), the
    newer half from the memory of the owner (hot), with payloads and without.

    \b
    Examples:
      waltzctl bench feed --count 20000
      waltzctl bench feed --count 20000 --size 128 --partitions 1
    """
    load = Load(**asdict(shape), producers=8, batch=500, seconds=None, count=count).on(made.partitions)
    half = count // made.partitions // 2

    async def work(site: Site, report: Callable[[str], None]) -> tuple[Counters, list[Series]]:
        async with _client(site, load) as client:
            first = {partition: await client.end_position(partition) for partition in range(made.partitions)}
            counters = await Drive(client, load, report).run()
            middle = {partition: mark + half for partition, mark in first.items()}
            series = []
            for name, marks in (("cold", first), ("hot", middle)):
                for mode in (FeedMode.RECORDS, FeedMode.HEADS):
                    series.append(await _read(site, f"{name}, {mode.name.lower()}", marks, half, mode))
        return counters, series

    # The owner's memory holds the newer half of each partition.
    tail = max(1 << 20, half * (load.size + OVERHEAD_BYTES) * made.partitions)
    with ending_in_order(), Waiting() as live, _scratch(made, live, {"tail_bytes_max": tail}) as site:
        return _run("feed", work, load, site, live, output)


class _Passing:
    """A view that counts until it was fed `count` transactions of every partition."""

    def __init__(self, marks: Mapping[int, int], count: int) -> None:
        self._marks = marks
        self._left = dict.fromkeys(marks, count)
        self.bytes = 0
        self.done_at = 0.0
        self.done = asyncio.Event()

    def position(self, partition: int) -> int:
        return self._marks[partition]

    def apply(self, transaction: Transaction) -> None:
        self.apply_batch([transaction])

    def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        self.bytes += sum([transaction.length for transaction in transactions])
        self._left[transactions[0].partition] -= len(transactions)
        if max(self._left.values()) <= 0 and not self.done.is_set():
            self.done_at = time.perf_counter()
            self.done.set()


async def _read(site: Site, name: str, marks: Mapping[int, int], count: int, mode: FeedMode) -> Series:
    """Read `count` transactions of every partition behind its mark. The clock runs from before the client connects."""
    view = _Passing(marks, count)
    begun = time.perf_counter()
    async with Client(site.servers, connect=site.connect, partitions=list(marks), view=view, feed=mode):
        await view.done.wait()
    return Series(name=name, count=count * len(marks), seconds=view.done_at - begun, bytes=view.bytes)


def _client(site: Site, load: Load) -> Client:
    return Client(site.servers, connect=site.connect, feed=FeedMode.NONE, settings=load.client_settings())


# -- the cluster -------------------------------------------------------------------------------------------------------


@contextmanager
def _scratch(
    made: ClusterSizeOptions, live: Waiting, server_settings: Mapping[str, object] | None = None
) -> Iterator[Site]:
    """Create a cluster on this machine, and delete it at the end, also after an error."""
    replicas = made.replicas or min(3, made.storages)
    # raises if there are more replicas than storages
    assign_replicas(1, {str(number): str(number) for number in range(made.storages)}, replicas)
    try:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=made.directory))
    except OSError as error:
        raise translate(error, f"making a directory in {made.directory or tempfile.gettempdir()}") from error
    try:
        cluster = LocalCluster.make(
            directory / "cluster",
            partitions=made.partitions,
            storages=made.storages,
            servers=made.servers,
            replication=replicas,
            format=made.format,
            report=live.report,
            settings={"server": server_settings or {}},
        )
        facts = {
            "replicas": replicas, "storages": made.storages, "servers": made.servers, "partitions": made.partitions,
            "filesystem": filesystem_of(directory),
        }  # fmt: skip
        try:
            cluster.start()
            yield Site(servers=",".join(cluster.server_addresses), tls=None, facts=facts)
        finally:
            cluster.kill()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def filesystem_of(directory: Path) -> str:
    """Return the type of the file system that holds `directory`, or "unknown"."""
    found, longest = "unknown", -1
    real = os.path.realpath(directory)
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, *_ = line.split()
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= longest:
            found, longest = kind, len(point)
    return found


# -- the result --------------------------------------------------------------------------------------------------------


def _run(
    name: str,
    work: Callable[[Site, Callable[[str], None]], Coroutine[Any, Any, tuple[Counters, list[Series]]]],
    load: Load,
    site: Site,
    live: Waiting,
    output: str,
) -> int:
    facts = dict(site.facts) | {"cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 2)}

    async def run() -> tuple[Counters, list[Series]]:
        async with first_contact(site.servers.split(",")[0].strip(), site.tls):
            return await work(site, live.report)

    with left_to_the_loop():
        counters, series = loop.run(run(), fast=True)
    settings = {field: value for field, value in asdict(load).items() if value is not None and field != "partitions"}
    rows = [one.as_dict() for one in series]
    content = {
        "bench": name, "settings": settings, "place": facts | {"durability": _durability(facts)}, "series": rows,
        "refused": counters.refused, "unknown": counters.unknown, "attempts": counters.attempts,
    }  # fmt: skip
    page: list[Part] = [
        Line(f"waltzctl bench {name}", "bold"),
        ", ".join(f"{field} {value}" for field, value in settings.items()),
        f"{_durability(facts)}; {count(facts['cores'], 'core')}, load {facts['load']} before the run",
        Table(SERIES, rows),
    ]
    if counters.refused or counters.unknown:
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in sorted(counters.refused.items()))
        page.append(
            f"of {count(counters.attempts, 'attempt')}, {counters.refused.total():,} were refused ({reasons or 'none'}), "
            f"{counters.unknown:,} are unknown"
        )
    if facts.get("filesystem") in IN_MEMORY:
        note = f"Note: the storages keep their files in memory ({facts['filesystem']}): a flush keeps nothing there"
        page.append(Line(note, "yellow"))
    put(Listing(page=page, content=content), output)
    return EXIT_OK


def _took(name: str) -> Column[Mapping[str, Any]]:
    return Column(f"{name} ms", lambda row: (row["latency_ms"] or {}).get(name), cell="{:,.2f}".format)


SERIES: Columns[Mapping[str, Any]] = (
    Column("series", "name"),
    Column("number", "count"),
    Column("a second", "per_second", cell="{:,.0f}".format),
    Column("MB/s", "megabytes_per_second", cell="{:,.1f}".format),
    Column("seconds", cell="{:.2f}".format),
    *(_took(f"p{percent:g}") for percent in PERCENTILES),
    _took("max"),
)


def _durability(facts: Mapping[str, Any]) -> str:
    if "replicas" not in facts:
        return "flushed by a majority of its replicas before each acknowledgement"
    needed = facts["replicas"] // 2 + 1
    return (
        f"{facts['replicas']} replicas, flushed by {needed} of them before each acknowledgement; "
        f"{count(facts['partitions'], 'partition')}, {count(facts['storages'], 'storage')}, "
        f"{count(facts['servers'], 'server')} on this machine, files on {facts['filesystem']}"
    )
