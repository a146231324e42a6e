"""How long people wait for `waltzctl` itself, as ratios to a Python that does nothing.

The commands take turns in each round, so that a busy moment hits all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from waltzctl.local_cluster.local import LocalCluster

PYTHON = (sys.executable, "-c", "pass")


def seconds_of(command: tuple[str, ...]) -> float:
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True, check=False)
    took = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return took


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench tool", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    tool = str(Path(sys.executable).with_name("waltzctl"))
    with tempfile.TemporaryDirectory() as directory:
        cluster = LocalCluster.make(Path(directory) / "cluster")
        cluster.start()
        try:
            there = ("--directory", str(cluster.directory))
            commands = {
                "python -c pass": PYTHON,
                "waltzctl --help": (tool, "--help"),
                "waltzctl status --help": (tool, "status", "--help"),
                "waltzctl status": (tool, "status", *there),
                "waltzctl storage list": (tool, "storage", "list", *there),
                "waltzctl partition list -o json": (tool, "partition", "list", "-o", "json", *there),
            }
            for command in commands.values():  # files are read and byte code is written
                seconds_of(command)
            took: dict[str, list[float]] = {name: [] for name in commands}
            for _ in range(options.rounds):
                for name, command in commands.items():
                    took[name].append(seconds_of(command))
        finally:
            cluster.kill()
    plain = statistics.median(took["python -c pass"])
    print(f"{'medians of ' + str(options.rounds) + ' rounds':34} {'ms':>6} {'× python':>9}")
    for name, found in took.items():
        middle = statistics.median(found)
        print(f"{name:34} {1000 * middle:6.0f} {middle / plain:9.1f}")
    return 0
