"""What a cluster costs that nobody uses: the processor time of each process, as a share of a core."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.bench.machine import use_of
from tests.process.cluster import Cluster


def cpu_seconds(pid: int) -> float:
    use = use_of(pid)
    assert use is not None, f"process {pid} has ended"
    return use.cpu_seconds


def shares(partitions: int, settle: float, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster.make(Path(directory) / "c", partitions=partitions, session_seconds=6)
        cluster.start()
        try:
            lives = {name: daemon.life.pid for name, daemon in cluster.local.daemons.items() if daemon.life is not None}
            time.sleep(settle)  # what a start leaves behind is not idling
            before = {name: cpu_seconds(pid) for name, pid in lives.items()}
            begun = time.monotonic()
            time.sleep(seconds)
            took = time.monotonic() - begun
            return {name: (cpu_seconds(pid) - before[name]) / took for name, pid in lives.items()}
        finally:
            cluster.close()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench idle", description=__doc__)
    parser.add_argument("--partitions", type=int, default=64)
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before it is measured")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args(arguments)
    found = shares(options.partitions, options.settle, options.seconds)
    print(f"idle, {options.partitions} partitions, % of a core")
    for name, share in [*found.items(), ("all of them", sum(found.values()))]:
        print(f"  {name:12} {100 * share:6.2f}")
    return 0
