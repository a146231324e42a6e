"""The storage side by itself: checking files, making indexes, appending over gRPC with a flush before each mark, opening.

Every figure stands beside what the same machine did in the same run by itself (plain CRC-32, plain flushes, plain copies),
because absolute figures of a shared machine say little. Medians of several rounds that take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from tests.process.daemon import KEY, PARTITIONS, Daemon
from waltzd.disk.real import RealDisk
from waltzd.format.checksum import crc32
from waltzd.format.record import Run, encode_payloads
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.replica_context import PartitionSettings
from waltzd.wire.storages import AppendStream

RECORD_BYTES = 512
BATCH = 100
SEGMENT_BYTES = 16 << 20


@dataclass(frozen=True)
class Line:
    name: str
    value: float
    unit: str
    ratio: float | None = None
    beside: str = ""
    bound: str = ""


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def median_of(rounds: int, *actions: Callable[[], object]) -> list[float]:
    """The median time of each action; they take turns, so that the machine's drift meets all of them."""
    taken: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for times, action in zip(taken, actions, strict=True):
            times.append(seconds(action))
    return [statistics.median(times) for times in taken]


def runs_of(records: int, *, first_id: int = 0, batch: int = BATCH) -> list[Run]:
    payload = os.urandom(RECORD_BYTES * batch)
    payloads = [payload[i * RECORD_BYTES : (i + 1) * RECORD_BYTES] for i in range(batch)]
    return [encode_payloads(at, payloads) for at in range(first_id, first_id + records, batch)]


def write_directory(path: Path, records: int, segment_bytes: int) -> None:
    path.mkdir(parents=True)
    settings = PartitionSettings(segment_bytes_max=segment_bytes)
    directory = Directory.open(RealDisk(), str(path), key=KEY, partitions=PARTITIONS, settings=settings)
    partition = directory.create_partition(0)
    partition.open_session(1)
    partition.set_low_mark(1, -1)
    for at in range(0, records, 10_000):
        partition.append(1, runs_of(min(10_000, records - at), first_id=at), at - 1)
    # What is below the low-water mark was proven; a start does not prove it again.
    partition.open_session(2)
    partition.set_low_mark(2, partition.last_id)
    directory.close()


# -- what the machine does by itself


def flush_rate(home: Path) -> float:
    """Writes of one group, each flushed, a second."""
    data = os.urandom(BATCH * (RECORD_BYTES + 40))
    fd = os.open(home / "flush", os.O_CREAT | os.O_WRONLY)
    count = 200
    started = time.perf_counter()
    for i in range(count):
        os.pwrite(fd, data, i * len(data))
        os.fdatasync(fd)
    took = time.perf_counter() - started
    os.close(fd)
    (home / "flush").unlink()
    return count / took


def copy_rate(home: Path, megabytes: int = 256) -> float:
    """Bytes a second of writing a file in large pieces and flushing it once."""
    piece = os.urandom(1 << 20)
    fd = os.open(home / "copy", os.O_CREAT | os.O_WRONLY)
    started = time.perf_counter()
    for _ in range(megabytes):
        os.write(fd, piece)
    os.fdatasync(fd)
    took = time.perf_counter() - started
    os.close(fd)
    (home / "copy").unlink()
    return megabytes * len(piece) / took


# -- files


def bench_files(home: Path, records: int, rounds: int) -> list[Line]:
    path = home / "files"
    write_directory(path, records, SEGMENT_BYTES)
    segments = sorted((path / "0").glob("*.seg"))
    size = sum(segment.stat().st_size for segment in segments)

    def plain(checksum: Callable[[bytes], int]) -> Callable[[], None]:
        def run() -> None:
            for segment in segments:
                checksum(segment.read_bytes())

        return run

    def tool(*arguments: str) -> Callable[[], None]:
        def run() -> None:
            command = [sys.executable, "-m", "waltzctl", *arguments, str(path), "-o", "json"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        return run

    def rebuild(jobs: str) -> Callable[[], None]:
        def run() -> None:
            for index in (path / "0").glob("*.idx"):
                index.unlink()
            tool("rebuild-index", "--jobs", jobs)()

        return run

    start_up = tool_start_up(rounds)
    with_zlib, with_native, verify1, verify2, rebuild1, rebuild2 = median_of(
        rounds,
        plain(zlib.crc32),
        plain(crc32),
        tool("verify-segments", "--jobs", "1"),
        tool("verify-segments", "--jobs", "2"),
        rebuild("1"),
        rebuild("2"),
    )
    shutil.rmtree(path)
    mb = size / 1e6
    verify1, verify2, rebuild1, rebuild2 = (max(t - start_up, 1e-9) for t in (verify1, verify2, rebuild1, rebuild2))
    return [
        Line("plain CRC-32 (zlib), read and check", mb / with_zlib, "MB/s"),
        Line("plain CRC-32 (vector instructions)", mb / with_native, "MB/s", with_zlib / with_native, "zlib"),
        Line("verify, 1 process", mb / verify1, "MB/s", with_zlib / verify1, "zlib", ">= 0.5"),
        Line("verify, 2 processes", mb / verify2, "MB/s", verify1 / verify2, "1 process", "more than 1 on two free cores"),
        Line("rebuild index, 1 process", mb / rebuild1, "MB/s", with_zlib / rebuild1, "zlib", ">= 0.5"),
        Line("rebuild index, 2 processes", mb / rebuild2, "MB/s", rebuild1 / rebuild2, "1 process"),
    ]


def tool_start_up(rounds: int) -> float:
    """The tool's start with everything that it imports: taken off, because the figures are rates of the work."""
    command = [sys.executable, "-m", "waltzctl", "verify-segments", "/nonexistent", "-o", "json"]
    return statistics.median(seconds(lambda: subprocess.run(command, capture_output=True)) for _ in range(rounds))


def bench_opening(home: Path, rounds: int) -> list[Line]:
    few, many = home / "few", home / "many"
    records = 20_000
    total = records * (RECORD_BYTES + 40)
    write_directory(few, records, total // 2)
    write_directory(many, records, total // 100)
    counts = [len(list((path / "0").glob("*.seg"))) for path in (few, many)]

    def opened(path: Path) -> Callable[[], None]:
        def run() -> None:
            settings = PartitionSettings(segment_bytes_max=1 << 30)
            directory = Directory.open(RealDisk(), str(path), key=None, partitions=None, settings=settings)
            directory.partition(0).open_session(3)
            directory.close()

        return run

    few_seconds, many_seconds = median_of(rounds * 5, opened(few), opened(many))
    shutil.rmtree(few)
    shutil.rmtree(many)
    return [
        Line(f"open and close a partition of {counts[0]} segments", few_seconds * 1e3, "ms"),
        Line(
            f"open and close a partition of {counts[1]} segments",
            many_seconds * 1e3, "ms", many_seconds / few_seconds, f"{counts[0]} segments", "about 1",
        ),
    ]  # fmt: skip


# -- appending


@dataclass
class Appended:
    seconds: float
    groups: int
    latencies: list[float]
    daemon_cpu: float
    daemon_memory_mb: float
    client_cpu: float


async def _append(daemon: Daemon, records: int, window: int) -> Appended:
    runs = runs_of(records)
    async with daemon.admin() as admin, daemon.replicas() as replicas:
        await admin.create_partitions([0])
        await replicas.open(0, 1, partitions=PARTITIONS)
        await replicas.set_low_mark(0, 1, -1)
        stream = replicas.append(0, 1)
        sent_at: list[float] = []
        latencies: list[float] = []
        room = asyncio.Semaphore(window)
        cpu, used = _cpu_of(daemon), resource.getrusage(resource.RUSAGE_SELF)
        started = time.perf_counter()
        sending = asyncio.create_task(_send(stream, runs, room, sent_at))
        acked = 0
        while acked < len(runs) and (mark := await stream.receive()) is not None:
            now = time.perf_counter()
            while acked < len(runs) and runs[acked].last_id <= mark:
                latencies.append(now - sent_at[acked])
                acked += 1
                room.release()
        took = time.perf_counter() - started
        await sending
        used_now = resource.getrusage(resource.RUSAGE_SELF)
        description = await admin.describe()
        return Appended(
            seconds=took,
            groups=description.statistics.groups,
            latencies=sorted(latencies),
            daemon_cpu=_cpu_of(daemon) - cpu,
            daemon_memory_mb=_memory_of(daemon),
            client_cpu=used_now.ru_utime + used_now.ru_stime - used.ru_utime - used.ru_stime,
        )


async def _send(stream: AppendStream, runs: list[Run], room: asyncio.Semaphore, sent_at: list[float]) -> None:
    for run in runs:
        await room.acquire()
        sent_at.append(time.perf_counter())
        await stream.send(run, run.first_id - 1)


def _cpu_of(daemon: Daemon) -> float:
    assert daemon.process is not None
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_of(daemon: Daemon) -> float:
    assert daemon.process is not None
    for line in Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1000
    return 0.0


def bench_append(home: Path, records: int, rounds: int, window: int) -> list[Line]:
    found: list[Appended] = []
    flushes: list[float] = []
    for number in range(rounds):
        flushes.append(flush_rate(home))
        with Daemon(home / f"append{number}") as daemon:
            found.append(uvloop.run(_append(daemon, records, window)))
        shutil.rmtree(home / f"append{number}")
    found.sort(key=lambda one: one.seconds)
    middle = found[len(found) // 2]
    flush = statistics.median(flushes)
    rate = records / middle.seconds
    groups = middle.groups / middle.seconds
    count = len(middle.latencies)
    return [
        Line("plain write of 100 records + flush", flush, "/s"),
        Line(
            f"append over gRPC, {BATCH} x {RECORD_BYTES} B, {window} frames in flight",
            rate, "records/s", rate / flush, "records a plain flush", ">= 100000",
        ),
        Line("  groups (one flush each)", groups, "/s", groups / flush, "plain flushes"),
        Line("  records a group", records / middle.groups, "records"),
        Line("  from sent to on the disk, p50", middle.latencies[count // 2] * 1e3, "ms"),
        Line("  from sent to on the disk, p99", middle.latencies[count * 99 // 100] * 1e3, "ms"),
        Line("  CPU of the storage", middle.daemon_cpu / records * 1e6, "us/record"),
        Line("  CPU of the client", middle.client_cpu / records * 1e6, "us/record"),
        Line("  memory of the storage, highest", middle.daemon_memory_mb, "MB"),
    ]  # fmt: skip


# -- the end


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?"
    )
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores ({model}), load {load:.1f}, Python {sys.version.split()[0]}"


def show(lines: list[Line]) -> None:
    for line in lines:
        ratio = "" if line.ratio is None else f"{line.ratio:9.2f} x {line.beside}"
        bound = f"   (bound {line.bound})" if line.bound else ""
        print(f"{line.name:58} {line.value:12,.1f} {line.unit:10}{ratio}{bound}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench storage", description=__doc__)
    parser.add_argument(
        "--records",
        type=int,
        default=4_000_000,
        help="records in the files that are checked; below 1 GiB the tools do not start more processes",
    )
    parser.add_argument("--append-records", type=int, default=300_000)
    parser.add_argument("--window", type=int, default=64, help="append frames in flight")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["files", "append", "opening"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", help="where to write; the temporary directory by default")
    options = parser.parse_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="waltz-bench-", dir=options.directory))
    lines: list[Line] = []
    try:
        lines.append(Line("plain sequential write + one flush", copy_rate(home) / 1e6, "MB/s"))
        if options.only in (None, "files"):
            lines += bench_files(home, options.records, options.rounds)
        if options.only in (None, "append"):
            lines += bench_append(home, options.append_records, options.rounds, options.window)
        if options.only in (None, "opening"):
            lines += bench_opening(home, options.rounds)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if options.json:
        print(json.dumps({"machine": machine(), "lines": [asdict(line) for line in lines]}, indent=1))
    else:
        print(f"{machine()}; one replica, flushed before each mark; medians of {options.rounds} rounds")
        show(lines)
    return 0
