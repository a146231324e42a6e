"""What the machine is, and what a process uses, as the kernel tells: no figure means anything without that."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Machine:
    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    load: float
    """Load average of the last minute, before the run."""


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


@dataclass(frozen=True)
class Use:
    """What a process has used since it started."""

    cpu_seconds: float
    memory_bytes: int
    """Peak resident memory."""


def use_of(pid: int) -> Use | None:
    """Return what the process has used; None if it has ended."""
    stat = _lines(f"/proc/{pid}/stat")
    if not stat:
        return None
    fields = stat[0].rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    peak = next((line.split()[1] for line in _lines(f"/proc/{pid}/status") if line.startswith("VmHWM")), "0")
    return Use(cpu, int(peak) * 1024)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
