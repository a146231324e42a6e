"""The log and Spark: what reading, exporting and planning cost, beside what Spark does by itself with the same rows.

Each bound is a ratio of two things that took turns in this run, after a round that does not count; the few that are plain
seconds or bytes say so. CPU is user and system of everybody who worked. A bound that is missed is printed as missed and is
no failure of the run: a busy machine moves what concerns seconds, and little else.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import UUID

from waltz_spark.engine.session import find_java

from tests.bench import spark_kernel, spark_live, spark_start
from tests.bench.cost import Cost
from tests.bench.machine import this_machine
from tests.spark.growing import GrowingStorage
from waltzctl.local_cluster.local import LocalCluster

PARTITIONS = 4
SEGMENT_RECORDS = 250_000
"""About 54 MB: near what one task reads best."""
PAYLOAD_BYTES = 175
FEW_RECORDS = 1000
LARGE_BYTES, LARGE_RECORDS = (16 << 20) - 40, 12
"""The largest that a record may be."""
CUSTOMERS = 50_000
SPLITS = 100_000
MIB = 1 << 20

TESTED = {
    "B10": "a killed export leaves nothing that counts: tests/spark/test_export.py, tests/spark/test_spark_export.py",
    "B11": "streams neither lose nor repeat: tests/spark/test_stream.py",
    "B15": "never above what is committed: tests/spark/test_directory_origin.py, tests/spark/test_live_origin.py",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    number: str
    what: str
    value: float
    bound: float
    unit: str = "×"
    is_floor: bool = False
    """The bound is the least, not the most."""
    detail: str = ""

    @property
    def is_met(self) -> bool:
        return self.value >= self.bound if self.is_floor else self.value <= self.bound

    def line(self) -> str:
        sign = "≥" if self.is_floor else "≤"
        verdict = "met" if self.is_met else "MISSED"
        value, bound = f"{self.value:.3g} {self.unit}", f"{sign} {self.bound:g} {self.unit}"
        return f"{self.number:4} {self.what:54} {value:>12} {bound:>12}  {verdict:6} {self.detail}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Sizes:
    records: int
    rounds: int
    live_records: int
    live_seconds: float
    live_rate: float | None
    """Bytes a second."""
    splits: int


@dataclass
class Bench:
    """What is made once and used by several measurements, when the first of them asks for it."""

    home: Path
    sizes: Sizes
    stack: ExitStack
    _made: dict[str, Any] = field(default_factory=dict)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            print(f"({name})", file=sys.stderr, flush=True)
            self._made[name] = make()
        return self._made[name]

    @property
    def storage(self) -> Path:
        made: Path = self._once("making the log", lambda: storage_of(self.home / "storage", self.sizes.records))
        return made

    @property
    def few(self) -> Path:
        made: Path = self._once("making a small log", lambda: storage_of(self.home / "few", FEW_RECORDS))
        return made

    @property
    def large(self) -> Path:
        made: Path = self._once("making large records", lambda: large_storage(self.home / "large"))
        return made

    @property
    def spark(self) -> Any:
        from tests.bench.spark_session import spark_at

        return self._once("starting Spark", lambda: self.stack.enter_context(spark_at(self.home)))

    @property
    def cluster(self) -> LocalCluster:
        def make() -> LocalCluster:
            return self.stack.enter_context(spark_live.cluster_at(self.home, self.sizes.live_records))

        made: LocalCluster = self._once("filling a cluster", make)
        return made

    @property
    def copy(self) -> Path:
        def make() -> Path:
            from tests.bench.spark_session import copy_as_parquet

            copy_as_parquet(self.spark, self.storage, self.home / "copy", self.sizes.records)
            return self.home / "copy"

        made: Path = self._once("copying the log to Parquet", make)
        return made

    def kernel(self, checksum: str) -> Mapping[str, Mapping[str, float]]:
        made: Mapping[str, Mapping[str, float]] = self._once(
            f"decoding with {checksum}", lambda: spark_kernel.kernel_of(self.storage, checksum, self.sizes.rounds)
        )
        return made

    @property
    def rewritten(self) -> Any:
        from tests.bench.spark_session import rewritings

        return self._once(
            "rewriting", lambda: rewritings(self.spark, self.home, self.storage, self.copy, self.sizes.rounds)
        )


# -- what is read ------------------------------------------------------------------------------------------------------


def storage_of(path: Path, records: int) -> Path:
    """A storage's directory with JSON of 175 bytes in each record, the same one each time."""
    storage = GrowingStorage(path, key=UUID(int=5), partitions=PARTITIONS, assigned=range(PARTITIONS))
    chance = random.Random(5)
    for partition in range(PARTITIONS):
        left = records // PARTITIONS + (partition < records % PARTITIONS)
        while left:
            count = min(left, SEGMENT_RECORDS)
            storage.append(partition, list(_payloads(chance, storage.ends[partition], count)))
            left -= count
    return path


def _payloads(chance: random.Random, first: int, count: int) -> Iterator[bytes]:
    """About as compressible as what services write: keys that repeat, ids and amounts that do not."""
    for number in range(first, first + count):
        bits = chance.getrandbits(160)
        text = (
            f'{{"order":{number},"customer":"c-{bits % CUSTOMERS:06}","state":"{("placed", "paid", "sent")[bits % 3]}",'
            f'"amount":{bits % 1_000_003 / 100},"at":{1_700_000_000_000 + number * 7},"trace":"{bits:040x}","note":"'
        )
        yield f'{text}{"x" * (PAYLOAD_BYTES - len(text) - 2)}"}}'.encode()


def large_storage(path: Path) -> Path:
    storage = GrowingStorage(path, key=UUID(int=6), partitions=1, assigned=(0,))
    for _ in range(LARGE_RECORDS):
        storage.append(0, [random.Random(6).randbytes(LARGE_BYTES)])
    return path


# -- the bounds --------------------------------------------------------------------------------------------------------


def decoding(bench: Bench) -> Iterator[Figure]:
    found = bench.kernel(spark_kernel.ZLIB)
    loop, decoded, one_pass = found["one by one"], found["decoded"], found["one pass"]
    rate = f"{decoded['records'] / decoded['seconds'] / 1e6:.1f} million records a second"
    yield Figure(
        number="B1", what="verified decoding by zlib, a loop over records = 1", is_floor=True, bound=6,
        value=loop["seconds"] / decoded["seconds"], detail=rate,
    )  # fmt: skip
    yield Figure(number="B1", what="its CPU, zlib.crc32 over the file = 1", bound=5, value=decoded["cpu"] / one_pass["cpu"])
    native = bench.kernel(spark_kernel.NATIVE)["decoded"]
    yield Figure(
        number="B1", what="the same with the vector instructions of isal", is_floor=True, bound=6,
        value=loop["seconds"] / native["seconds"],
        detail=f"{native['records'] / native['seconds'] / 1e6:.1f} million records a second",
    )  # fmt: skip


def checking(bench: Bench) -> Iterator[Figure]:
    found = bench.kernel(spark_kernel.ZLIB)
    yield Figure(
        number="B2", what="checksums of a batch together, one by one = 1", bound=0.45,
        value=found["checksums together"]["seconds"] / found["each checksum"]["seconds"],
        detail="what it finds: tests/unit/waltzd/format/test_checksum.py",
    )  # fmt: skip


def scanning(bench: Bench) -> Iterator[Figure]:
    from tests.bench.spark_session import scans

    found = scans(bench.spark, bench.storage, bench.copy, bench.sizes.rounds)
    yield Figure(
        number="B3", what="CPU of reading all rows by Spark, from Parquet = 1", bound=3,
        value=found["waltz"].cpu / found["parquet"].cpu,
        detail=f"{_per_record(found['waltz'], bench)}; {found['waltz'].seconds / found['parquet'].seconds:.2g} × the time",
    )  # fmt: skip


def writing(bench: Bench) -> Iterator[Figure]:
    costs: Mapping[str, Cost] = bench.rewritten.costs
    reference, source = costs["reference"], costs["source"]
    yield Figure(
        number="B4", what="CPU of Spark writing the log to Parquet, Parquet = 1", bound=1.4,
        value=source.cpu / reference.cpu, detail=_per_record(source, bench),
    )  # fmt: skip
    yield Figure(
        number="B4", what="its rate, Spark rewriting Parquet = 1", bound=0.7, is_floor=True,
        value=reference.seconds / source.seconds,
    )  # fmt: skip


def exporting(bench: Bench) -> Iterator[Figure]:
    costs: Mapping[str, Cost] = bench.rewritten.costs
    reference, source, export = costs["reference"], costs["source"], costs["export"]
    sizes: Mapping[str, int] = bench.rewritten.file_bytes
    yield Figure(
        number="B5", what="CPU of an export, Spark rewriting Parquet = 1", bound=0.7, value=export.cpu / reference.cpu,
        detail=_per_record(export, bench),
    )  # fmt: skip
    yield Figure(
        number="B5", what="size of its files, those of the rewriting = 1", bound=1.05,
        value=sizes["export"] / sizes["reference"], detail=f"{sizes['export'] / 1e6:,.0f} MB",
    )  # fmt: skip
    log_bytes = bench.sizes.records * (PAYLOAD_BYTES + 40)
    yield Figure(
        number="B5", what="its rate, Spark writing the log itself = 1", bound=1.8, is_floor=True,
        value=source.seconds / export.seconds, detail=f"{log_bytes / export.seconds / 1e6:,.0f} MB/s of log",
    )  # fmt: skip


def nothing_new(bench: Bench) -> Iterator[Figure]:
    found = spark_start.nothing_new(bench.home, bench.storage, bench.sizes.rounds)
    for name in ("again", "dry run"):
        what = "an export with nothing new, no Java" if name == "again" else "--dry-run, no Java"
        detail = f"{found[name].seconds / found['help'].seconds:.1f} × waltzctl --help"
        yield Figure(number="B6", what=what, bound=1.5, unit="s", value=found[name].seconds, detail=detail)


def fixed_cost(bench: Bench) -> Iterator[Figure]:
    found = spark_start.small_exports(bench.home, bench.few, bench.sizes.rounds)
    export, start = found["export"], found["plain"]
    yield Figure(
        number="B7", what=f"export of {FEW_RECORDS} records, Spark and one query = 1", bound=1.25,
        value=export.seconds / start.seconds, detail=f"{export.seconds:.1f} s against {start.seconds:.1f} s",
    )  # fmt: skip
    yield Figure(
        number="B7", what="its CPU", bound=1.25, value=export.cpu / start.cpu,
        detail=f"{export.cpu:.1f} s against {start.cpu:.1f} s",
    )  # fmt: skip


def planning(bench: Bench) -> Iterator[Figure]:
    from tests.bench.spark_session import planning as planned_by_spark

    found = planned_by_spark(bench.spark, bench.storage, bench.sizes.records, bench.sizes.splits)
    yield Figure(
        number="B8", what=f"planning {found.splits:,} splits", bound=20 * found.splits / SPLITS, unit="s",
        value=found.seconds, detail="once; 20 s are the bound for 100,000",
    )  # fmt: skip
    yield Figure(
        number="B8", what="of the driver's Java for each split", bound=4, unit="KB",
        value=found.heap_bytes / found.splits / 1000,
    )  # fmt: skip


def encoding(bench: Bench) -> Iterator[Figure]:
    found = bench.kernel(spark_kernel.NATIVE)
    encoded = found["encoded"]
    yield Figure(
        number="B9", what="CPU of making records again, decoding = 1", bound=2,
        value=encoded["cpu"] / found["decoded"]["cpu"],
        detail=f"{1e6 * encoded['cpu'] / encoded['records']:.2f} µs a record; byte for byte: tests/spark/test_encode.py",
    )  # fmt: skip


def beside(bench: Bench) -> Iterator[Figure]:
    sizes = bench.sizes
    found = spark_live.beside_appends(bench.cluster, bench.home, sizes.live_seconds, sizes.live_rate, sizes.rounds)
    middle = {name: statistics.median(values) for name, values in found.p99.items()}
    full, kept = statistics.median(found.full_rates), statistics.median(found.kept_rates)
    yield Figure(
        number="B12", what="p99 of appends beside an export with --rate, alone = 1", bound=1.2,
        value=middle["rate"] / middle["alone"], detail=f"{middle['rate']:.1f} ms against {middle['alone']:.1f} ms",
    )  # fmt: skip
    yield Figure(
        number="B12", what="the same beside one at full speed", bound=1.5,
        value=middle["full"] / middle["alone"], detail=f"{middle['full']:.1f} ms; it reads {full / 1e6:.0f} MB/s",
    )  # fmt: skip
    yield Figure(
        number="B12", what="what it reads differs from --rate by", bound=10, unit="%",
        value=100 * abs(kept / found.rate - 1), detail=f"{kept / 1e6:.2f} MB/s for {found.rate / 1e6:.2f}",
    )  # fmt: skip


def bulk(bench: Bench) -> Iterator[Figure]:
    readings = [(spark_live.read_in_bulk(bench.cluster), spark_live.read_one_by_one(bench.cluster)) for _ in range(3)]
    yield Figure(
        number="B13", what="records read in bulk, a message for each = 1", bound=20, is_floor=True,
        value=statistics.median(whole.rate / single.rate for whole, single in readings),
        detail=f"{statistics.median(whole.rate for whole, _ in readings) / 1e6:.1f} million a second",
    )  # fmt: skip
    yield Figure(
        number="B13", what="the storage's CPU for a record", bound=0.3, unit="µs",
        value=1e6 * statistics.median(whole.storage_cpu / whole.records for whole, _ in readings),
    )  # fmt: skip


def memory(bench: Bench) -> Iterator[Figure]:
    from tests.bench.spark_session import worker_peaks

    small, large = worker_peaks(bench.spark, bench.home, bench.storage, bench.large)
    yield Figure(number="B14", what="most memory of a Python worker", bound=400, unit="MB", value=small / 1e6)
    yield Figure(
        number="B14", what="the same with records of 16 MiB", unit="MB", value=large / 1e6,
        bound=max(400, (64 * MIB + 6 * LARGE_BYTES) / 1e6),
        detail=f"64 MiB and six records are {(64 * MIB + 6 * LARGE_BYTES) / 1e6:.0f} MB, which counts above 400",
    )  # fmt: skip


def _per_record(cost: Cost, bench: Bench) -> str:
    return f"{1e6 * cost.cpu / bench.sizes.records:.2f} µs a record"


BOUNDS: Mapping[str, Callable[[Bench], Iterator[Figure]]] = {
    "B1": decoding,
    "B2": checking,
    "B9": encoding,
    "B6": nothing_new,
    "B7": fixed_cost,
    "B3": scanning,
    "B4": writing,
    "B5": exporting,
    "B14": memory,
    "B8": planning,
    "B12": beside,
    "B13": bulk,
}
"""In this order: what starts a Spark of its own comes before the one that stays."""


def chosen(text: str) -> Sequence[str]:
    names = [name.strip().upper() for name in text.split(",")]
    unknown = [name for name in names if name not in BOUNDS]
    if unknown:
        where = "; ".join(f"{name}: {TESTED[name]}" for name in unknown if name in TESTED)
        raise argparse.ArgumentTypeError(f"no bound {', '.join(unknown)} is measured here; {where or ', '.join(BOUNDS)}")
    return [name for name in BOUNDS if name in names]


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("it has to be at least 1")
    return number


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench spark", description=__doc__)
    parser.add_argument("--records", type=positive, default=2_000_000, help="of the log (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="that count (%(default)s)")
    parser.add_argument("--only", type=chosen, default=list(BOUNDS), metavar="B1,B3", help="of " + ", ".join(BOUNDS))
    parser.add_argument("--splits", type=positive, default=SPLITS, help="to plan (%(default)s)")
    parser.add_argument("--live-records", type=positive, default=1_000_000, help="of the cluster's log (%(default)s)")
    parser.add_argument("--live-seconds", type=float, default=10.0, help="of each load (%(default)s)")
    parser.add_argument(
        "--live-rate", type=float, help="of exports with a rate, MB/s (so that one lasts as long as a load)"
    )
    options = parser.parse_args(arguments)
    sizes = Sizes(
        records=options.records,
        rounds=options.rounds,
        live_records=options.live_records,
        live_seconds=options.live_seconds,
        live_rate=None if options.live_rate is None else 1e6 * options.live_rate,
        splits=min(options.splits, options.records),
    )
    machine = this_machine()
    memory_gb = machine.memory_bytes / 1e9
    print(f"{machine.cores} cores ({machine.processor}), {memory_gb:.0f} GB, {machine.system}, {machine.python}")
    print(
        ", ".join(f"{name} {version(name)}" for name in ("pyspark", "pyarrow", "numpy")) + f", Java {find_java().version}"
    )
    print(
        f"load {machine.load}; {sizes.records:,} records of {PAYLOAD_BYTES} bytes in {PARTITIONS} partitions; "
        f"medians of {sizes.rounds}"
    )
    print(f"B12: a cluster with {sizes.live_records:,} records, loaded for {sizes.live_seconds:g} s at a time")
    with tempfile.TemporaryDirectory(prefix="waltz-bench-spark-") as directory, ExitStack() as stack:
        bench = Bench(home=Path(directory), sizes=sizes, stack=stack)
        figures = []
        for name in options.only:
            for figure in BOUNDS[name](bench):
                figures.append(figure)
                print(f"{figure.line()} [load {os.getloadavg()[0]:.1f}]", flush=True)
    for name, where in TESTED.items():
        print(f"{name:4} {where}")
    missed = [figure for figure in figures if not figure.is_met]
    print(f"{len(figures) - len(missed)} of {len(figures)} are met")
    return 0
