"""Reading and making records without Spark: what a task does with the bytes of one segment.

It is run as a process of its own, because a process has one implementation of CRC-32: `zlib` leaves the package isal
out, `native` takes it where it is. Each figure is CPU and seconds of one thread over the same records.
"""

from __future__ import annotations

import json
import statistics
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

BATCH_BYTES = 4 << 20
HEAD = struct.Struct(">qiiiiiiI")
TRAILER = struct.Struct(">I")
ZLIB, NATIVE = "zlib", "native"


def kernel_of(storage: Path, checksum: str, rounds: int) -> dict[str, dict[str, float]]:
    """For each step its `seconds` and `cpu`, medians, and `records`."""
    without = "sys.modules['isal.isal_zlib'] = None; " if checksum == ZLIB else ""
    program = f"import sys; {without}from tests.bench.spark_kernel import main; main({str(storage)!r}, {rounds})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the measurement without Spark failed:\n{done.stderr}")
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def main(storage: str, rounds: int) -> None:
    from waltz_spark.log.arrow import encode
    from waltz_spark.log.directory_origin import DirectoryOrigin
    from waltz_spark.table.columns import record_batch

    from waltzd.format.layout import HEADER_BYTES
    from waltzd.format.record import Run, first_bad

    origin = DirectoryOrigin(storages=(storage,))
    extent = max(origin.catalog().extents, key=lambda each: each.span.count)
    raw = memoryview(Path(extent.place).read_bytes())[HEADER_BYTES:]
    runs: list[Run] = list(origin.read(extent, extent.span, batch_bytes=BATCH_BYTES))
    batches = [record_batch(run, extent.partition) for run in runs]

    def one_by_one() -> None:
        rows: list[tuple[Any, ...]] = []
        at = 0
        while at < len(raw):
            head = HEAD.unpack_from(raw, at)
            end = at + HEAD.size + head[6]
            assert zlib.crc32(raw[at:end]) == TRAILER.unpack_from(raw, end)[0]
            rows.append((*head, bytes(raw[at + HEAD.size : end])))
            at = end + TRAILER.size
        assert len(rows) == extent.span.count

    def decoded() -> None:
        read = origin.read(extent, extent.span, batch_bytes=BATCH_BYTES)
        assert sum(record_batch(run, extent.partition).num_rows for run in read) == extent.span.count

    def one_pass() -> None:
        with open(extent.place, "rb") as file:
            crc = 0
            while piece := file.read(BATCH_BYTES):
                crc = zlib.crc32(piece, crc)

    def each_checksum() -> None:
        for run in runs:
            data, bounds = run.data, run.bounds.tolist()
            for start, end in pairwise(bounds):
                assert zlib.crc32(data[start : end - 4]) == int.from_bytes(data[end - 4 : end], "big")

    def checksums_together() -> None:
        for run in runs:
            assert first_bad(run) is None

    def encoded() -> None:
        assert sum(len(encode(batch)) for batch in batches) == extent.span.count

    steps = {
        "one by one": one_by_one,
        "decoded": decoded,
        "one pass": one_pass,
        "each checksum": each_checksum,
        "checksums together": checksums_together,
        "encoded": encoded,
    }
    print(json.dumps({name: {"records": extent.span.count, **_median(step, rounds)} for name, step in steps.items()}))


def _median(step: Callable[[], None], rounds: int) -> dict[str, float]:
    seconds, cpu = [], []
    for number in range(rounds + 1):
        began, used = time.perf_counter(), time.process_time()
        step()
        if number:
            seconds.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
    return {"seconds": statistics.median(seconds), "cpu": statistics.median(cpu)}
