"""What the machine is, and what it can do by itself: no figure means anything without that. What a process uses is read
from the kernel.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from waltzd.disk.real import translate

FLUSH_BYTES = 4 << 10
FLUSHES = 50
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, kw_only=True)
class Machine:
    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    load: float
    """Of the last minute, before the run."""


def this_machine() -> Machine:
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    total = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return Machine(
        processor=models[0] if models else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=int(total) * 1024,
        system=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        load=round(os.getloadavg()[0], 2),
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Where the storages keep their files."""

    filesystem: str
    flush_seconds: float
    """A write of 4 KiB and its flush: the median of some, before the run."""

    @property
    def is_memory(self) -> bool:
        """A flush there keeps nothing."""
        return self.filesystem in IN_MEMORY


def disk_of(directory: Path) -> Disk:
    return Disk(filesystem=filesystem_of(directory), flush_seconds=_flush_seconds(directory))


def filesystem_of(directory: Path) -> str:
    """Of the longest mount point above it."""
    found, longest = "unknown", -1
    real = os.path.realpath(directory)
    for line in _lines("/proc/self/mounts"):
        _, point, kind, *_ = line.split()
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            found, longest = kind, len(point)
    return found


def _flush_seconds(directory: Path) -> float:
    path = directory / "flush-probe"
    taken = []
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        try:
            data = os.urandom(FLUSH_BYTES)
            for number in range(FLUSHES):
                begun = time.perf_counter()
                os.pwrite(descriptor, data, number * FLUSH_BYTES)
                os.fdatasync(descriptor)
                taken.append(time.perf_counter() - begun)
        finally:
            os.close(descriptor)
            path.unlink()
    except OSError as error:
        raise translate(error, f"measuring how fast {directory} flushes") from error
    return statistics.median(taken)


@dataclass(frozen=True)
class Use:
    """What a process has used since it started."""

    cpu_seconds: float
    memory_bytes: int
    """The most that it ever had at once."""


def use_of(pid: int) -> Use | None:
    """None when there is no such process any more."""
    stat = _lines(f"/proc/{pid}/stat")
    if not stat:
        return None
    fields = stat[0].rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    peak = next((line.split()[1] for line in _lines(f"/proc/{pid}/status") if line.startswith("VmHWM")), "0")
    return Use(cpu, int(peak) * 1024)
