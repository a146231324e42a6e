"""`./dev bench archive`: what archiving costs, by itself and beside appends, and restoring, with a local directory as the
store.

By itself: proving a segment, writing it, reading it back, and its manifest, as a storage does it on its thread; CPU is of
the process, and a request is a call of the store. Beside appends: the same load on two clusters in turns, of which one
archives, as ratios of each pair. Restoring: one replica under a new key, flushed, in turns with a plain copy of the same
objects that is flushed as well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from tests.batches import batches_of, index_raw, segment_raw
from tests.bench.curves import bench, many, series_of
from tests.bench.storage import Line, copy_rate, machine, show
from waltzctl.local_cluster.local import LocalCluster
from waltzd.archive.archived_segment import segment_entry
from waltzd.archive.cut_point import logs_in
from waltzd.archive.listing import label_of
from waltzd.archive.local import LocalStore
from waltzd.archive.restoration import restore_partition
from waltzd.archive.upload import PartitionArchive, label_in
from waltzd.disk.real import RealDisk
from waltzd.format.batch import End
from waltzd.format.footer import NO_HASH
from waltzd.format.layout import FileHeader
from waltzd.protocol.descriptions import Archived

KEY, OTHER_KEY = UUID(int=5), UUID(int=6)
PAYLOAD_BYTES, BATCH = 512, 500
WANTED_MB = 100
"""A second, for at most half a core."""
SEGMENT_BYTES = 8 << 20
"""Of the clusters: a short run seals some."""
LOADS = {
    "64 producers, 512 bytes": ("--producers", "64", "--size", "512"),
    "many in flight, 512 bytes": many(512),
    "many in flight, 4096 bytes": many(4096),
}


class Counted(LocalStore):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.requests: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("put_new", "put_if", "get_range", "list", "head"):
            self.requests[name] += 1
        return super().__getattribute__(name)


@dataclass
class Uploads:
    segments: int = 0
    bytes: int = 0
    cpu: float = 0.0
    seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)


def uploads(home: Path, segments: int, megabytes: int) -> Uploads:
    """So many segments, one behind the other. Making them is not counted; reading their files is."""
    (home / "store").mkdir()
    store, found, known, footer, end = Counted(str(home / "store")), Uploads(), Archived(), NO_HASH, End()
    archive = PartitionArchive(store, label_in(store, KEY, lambda: KEY, None), 0)
    store.requests.clear()
    count, first_id = (megabytes << 20) // (BATCH * (PAYLOAD_BYTES + 40)), 0
    for _ in range(segments):
        payloads = [[os.urandom(PAYLOAD_BYTES) for _ in range(BATCH)] for _ in range(count)]
        own = batches_of(payloads, first_id=first_id, before=end, cuts=[count - 1], segment_bytes_max=1 << 30)
        data, footer = segment_raw(own, key=KEY, footer_before=footer)
        (home / "segment").write_bytes(data)
        (home / "index").write_bytes(index_raw(own, key=KEY))
        end, last_id = own[-1].end(end), own[-1].last_id
        cpu, started = time.process_time(), time.perf_counter()
        whole, size = _read(home)
        expected = FileHeader(created_ms=0, key=KEY, partition=0, first_id=first_id)
        piece = segment_entry(whole[:size], whole[size:], expected=expected, last_id=last_id, path="here")
        made = archive.add(known, piece, whole)
        found.seconds += time.perf_counter() - started
        found.cpu += time.process_time() - cpu
        known = Archived(archive=made.archive, number=made.number, sha256=made.sha256, last_id=made.last)
        first_id = last_id + 1
        found.segments, found.bytes = found.segments + 1, found.bytes + len(whole)
    found.requests = store.requests
    return found


def _read(home: Path) -> tuple[memoryview, int]:
    size, more = ((home / name).stat().st_size for name in ("segment", "index"))
    whole = memoryview(bytearray(size + more))
    for name, part in (("segment", whole[:size]), ("index", whole[size:])):
        with (home / name).open("rb") as file:
            file.readinto(part)
    return whole, size


def bench_uploads(home: Path, segments: int, megabytes: int) -> list[Line]:
    found = uploads(home, segments, megabytes)
    mb, requests = found.bytes / 1e6, sum(found.requests.values()) / found.segments
    told = ", ".join(f"{name} {number / found.segments:.2f}" for name, number in sorted(found.requests.items()))
    return [
        Line(f"uploads of {megabytes} MiB, one behind the other", mb / found.seconds, "MB/s", bound=f">= {WANTED_MB}"),
        Line(f"  CPU at {WANTED_MB} MB/s", 100 * WANTED_MB * found.cpu / mb, "% of a core", bound="<= 50"),
        Line(f"  requests a segment ({told})", requests, "", bound="<= 4"),
    ]


def bench_restores(home: Path, segments: int, megabytes: int, rounds: int) -> list[Line]:
    home.mkdir()
    size = uploads(home, segments, megabytes).bytes / 1e6
    copied, restored, cpu = list[float](), list[float](), list[float]()
    for turn in range(rounds):
        for is_copy in (True, False) if turn % 2 else (False, True):
            target, used, started = home / "target", time.process_time(), time.perf_counter()
            (_copy if is_copy else _restore)(home / "store", target)
            (copied if is_copy else restored).append(time.perf_counter() - started)
            if not is_copy:
                cpu.append(time.process_time() - used)
            shutil.rmtree(target)
    rate = statistics.median(copy / restore for copy, restore in zip(copied, restored, strict=True))
    return [
        Line(f"restoring {size:.0f} MB", size / statistics.median(restored), "MB/s", rate, "cp and a flush", ">= 0.6"),
        Line("  CPU of 100 MB", 100 * statistics.median(cpu) / size, "seconds"),
    ]


def _restore(store_at: Path, target: Path) -> None:
    store = LocalStore(str(store_at))
    log = logs_in(store, label_of(store, not_done=""), 1)[0]
    asyncio.run(restore_partition(RealDisk(), log, log.last, key=OTHER_KEY, folder=str(target), run=asyncio.to_thread))


def _copy(store_at: Path, target: Path) -> None:
    target.mkdir()
    subprocess.run(["cp", *(store_at / "partition-0/segment").iterdir(), target], check=True)
    for path in [*target.iterdir(), target]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def bench_appends(home: Path, rounds: int, seconds: float) -> list[Line]:
    """Each load on both clusters, in turns of who begins."""
    (home / "archive").mkdir()
    clusters = {True: _cluster(home / "with", str(home / "archive")), False: _cluster(home / "without", None)}
    rates: dict[str, list[float]] = {name: [] for name in LOADS}
    p99s: dict[str, list[float]] = {name: [] for name in LOADS}
    try:
        for cluster in clusters.values():
            cluster.start()
        for turn in range(rounds):
            for name, load in LOADS.items():
                found = {}
                for archives in (True, False) if turn % 2 else (False, True):
                    there = ("--at", ",".join(clusters[archives].server_addresses), "--yes")
                    run = bench("append", *there, *load, "--seconds", str(seconds))
                    found[archives] = series_of(run, "committed")
                rates[name].append(found[True]["per_second"] / found[False]["per_second"])
                p99s[name].append(found[True]["latency_ms"]["p99"] / found[False]["latency_ms"]["p99"])
    finally:
        for cluster in clusters.values():
            cluster.kill()
    archived = sum(path.stat().st_size for path in (home / "archive").glob("partition-*/segment/*"))
    lines = [Line("archived meanwhile", archived / 1e6, "MB")]
    for name in LOADS:
        lines.append(Line(f"{name}: rate", statistics.median(rates[name]), "", statistics.median(rates[name]), "without"))
        p99 = statistics.median(p99s[name])
        lines.append(Line(f"{name}: p99", p99, "", p99, "without", "<= 1.2"))
    return lines


def _cluster(directory: Path, store: str | None) -> LocalCluster:
    settings: dict[str, dict[str, object]] = {"server": {"segment_bytes_max": SEGMENT_BYTES, "session_seconds": 30}}
    if store is not None:
        settings["storage"] = {"archive": store}
    return LocalCluster.make(directory, partitions=1, servers=1, settings=settings)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench archive", description=__doc__)
    parser.add_argument("--segments", type=int, default=10)
    parser.add_argument("--megabytes", type=int, default=64, help="of a segment")
    parser.add_argument("--rounds", type=int, default=5, help="of appends on both clusters, and of restores")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run of appends")
    parser.add_argument("--only", choices=["uploads", "restores", "appends"])
    parser.add_argument("--directory", help="where to write; the temporary directory by default")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="waltz-bench-", dir=options.directory) as made:
        home = Path(made)
        lines = [Line("plain sequential write + one flush", copy_rate(home) / 1e6, "MB/s")]
        if options.only in (None, "uploads"):
            lines += bench_uploads(home, options.segments, options.megabytes)
        if options.only in (None, "restores"):
            lines += bench_restores(home / "restores", options.segments, options.megabytes, options.rounds)
        if options.only in (None, "appends"):
            lines += bench_appends(home, options.rounds, options.seconds)
    print(machine())
    show(lines)
    return 0
