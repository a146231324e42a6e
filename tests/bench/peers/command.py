"""`./dev bench peers`: Waltz beside what a user would pick instead, under the same load, in one run.

Round after round, the systems take turns; only one of them runs at a time, and each begins empty. Everything is on loopback
and under one temporary directory, which is gone at the end. What is missing is left out by name. The floor of the same five
processes is measured beside Waltz, so that each run says how far Waltz is from the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import ClassVar

from tests.bench.machine import this_machine
from tests.bench.peers.etcd import Etcd
from tests.bench.peers.floor import Floor
from tests.bench.peers.jetstream import FlushingJetStream, JetStream
from tests.bench.peers.load import WORKLOADS, Measurement, Plan
from tests.bench.peers.postgres import Postgres
from tests.bench.peers.process import undisturbed
from tests.bench.peers.redis_streams import RedisStreams
from tests.bench.peers.report import Row, facts_of, rows_of, text_of
from tests.bench.peers.system import LANES_MANY, Facts, System
from tests.bench.peers.waltz import Waltz
from waltzctl.bench.command import filesystem_of
from waltzctl.shell.blueprint import free_ports
from waltzd.errors import WaltzError

SYSTEMS: dict[str, type[System]] = {
    system.name: system for system in (Waltz, Floor, JetStream, FlushingJetStream, Etcd, Postgres, RedisStreams)
}
ROOT = Path(__file__).parents[3]
WARM_SECONDS_MAX = 1.0
LOAD_SECONDS_MORE = 300.0
"""What a load process may need beyond its windows: connecting, filling, counting."""
FLUSHES = 200
TOLD_CHARACTERS = 1000
CAVEATS = (
    "Everything shares this machine's cores and one disk, so replicas are processes and not machines; one Python process "
    "makes the load, and where its own CPU is most of a core it is the client that is compared.",
    "Each transaction checks and raises the version of its own key. Ratios are the result; absolute figures are not.",
    "What is kept was counted by asking the servers after each measurement. That it survives a power cut was not tried.",
)


def main(arguments: list[str]) -> int:
    return carry_out(Comparison, parsed(arguments), SYSTEMS)


def carry_out(comparison: type[Comparison], options: argparse.Namespace, systems: Mapping[str, type[System]]) -> int:
    chosen, skipped = choose(options.peers, systems)
    for line in skipped:
        print(line, file=sys.stderr)
    if not chosen:
        print("nothing is left to compare", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    home = Path(tempfile.mkdtemp(prefix="waltz-peers-", dir=options.directory))
    home.chmod(0o711)  # a database that runs as another user has to pass
    try:
        return comparison(options, home, chosen, skipped).run()
    except KeyboardInterrupt:
        print("interrupted; everything that was started has ended", file=sys.stderr)
        return 130
    finally:
        with undisturbed():
            shutil.rmtree(home)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("./dev bench peers", __doc__, SYSTEMS, sizes=(128, 512, 4096))
    parser.add_argument(
        "--in-flight",
        type=_flight,
        default=4000,
        help=f"for many in flight; a multiple of {LANES_MANY}; etcd refuses more than 5000",
    )
    return parser.parse_args(arguments)


def parser_of(
    program: str, description: str | None, systems: Mapping[str, type[System]], *, sizes: tuple[int, ...]
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--rounds", type=_count, default=5)
    parser.add_argument("--seconds", type=_seconds, default=3.0, help="of each measurement")
    parser.add_argument("--sizes", type=_sizes, default=sizes, help="of payloads: 128,512,4096")
    names = ",".join(systems)
    parser.add_argument("--peers", type=partial(_names, systems=systems), default=tuple(systems), help=names)
    parser.add_argument("--json", type=_file, help="where to write everything that was measured")
    parser.add_argument("--directory", type=_folder, help="where the servers write; the temporary directory by default")
    return parser


def _count(words: str) -> int:
    return int(_checked(int(words), 1))


def _flight(words: str) -> int:
    if (count := _count(words)) % LANES_MANY:
        raise argparse.ArgumentTypeError(f"{count} is not a multiple of {LANES_MANY}")
    return count


def _seconds(words: str) -> float:
    return _checked(float(words), 0.1)


def _checked(value: float, least: float) -> float:
    if not value >= least:
        raise argparse.ArgumentTypeError(f"{value:g} is less than {least:g}")
    return value


def _sizes(words: str) -> tuple[int, ...]:
    return tuple(_count(word) for word in words.split(","))


def _names(words: str, systems: Mapping[str, type[System]]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(words.split(",")))
    if unknown := [name for name in names if name not in systems]:
        raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(systems)}")
    return names


def _folder(words: str) -> Path:
    if not Path(words).is_dir():
        raise argparse.ArgumentTypeError(f"{words} is no directory")
    return Path(words)


def _file(words: str) -> Path:
    """Known before the long run, not after it."""
    return _folder(str(Path(words).parent)) / Path(words).name


def choose(names: tuple[str, ...], systems: Mapping[str, type[System]]) -> tuple[list[type[System]], list[str]]:
    """Those that can be started, and a sentence for each of the others."""
    chosen, skipped = [], []
    for name in names:
        missing = systems[name].missing()
        if missing is None:
            chosen.append(systems[name])
        else:
            skipped.append(f"{name} is skipped: {missing} is not here. To have it: {systems[name].package}")
    return chosen, skipped


class Comparison:
    load: ClassVar = "tests.bench.peers.load"
    """Module that makes the load, in a process of its own."""
    workloads: ClassVar = len(WORKLOADS)
    """Measurements of each size."""
    caveats: ClassVar = CAVEATS

    def __init__(self, options: argparse.Namespace, home: Path, systems: list[type[System]], skipped: list[str]) -> None:
        self._options = options
        self._home = home
        self._systems = systems
        self._skipped = skipped
        self._ports = free_ports(os.getpid())
        self._facts: dict[str, Facts] = {}
        self._failed: list[str] = []

    def run(self) -> int:
        machine = machine_facts(self._home)
        rounds = [self._round(number) for number in range(1, self._options.rounds + 1)]
        rows = rows_of(rounds)
        print(f"{machine}\n\n{facts_of(self._facts)}\n")
        print("\n".join([*self.caveats, *self._skipped, *self._failed]))
        many, seconds = self._options.in_flight, self._options.seconds
        flight = f"; many in flight: {many}" if many else ""
        print(f"\nMedians of {len(rounds)} rounds, {seconds:g} s a measurement{flight}.\n")
        print(text_of(rows))
        if self._options.json:
            self._save(machine, rounds, rows)
        return 1 if self._failed or any(row.difference for row in rows) else 0

    def _round(self, number: int) -> dict[str, list[Measurement]]:
        found = {}
        for kind in self._systems:
            begun = time.monotonic()
            try:
                found[kind.name] = self._measure(kind)
            except (OSError, RuntimeError, TimeoutError, WaltzError, subprocess.SubprocessError) as error:
                self._failed.append(f"{kind.name} failed in round {number}: {error}")
                print(self._failed[-1], file=sys.stderr)
                continue
            took = time.monotonic() - begun
            print(f"round {number} of {self._options.rounds}: {kind.name}, {took:.0f} s", file=sys.stderr)
        return found

    def _measure(self, kind: type[System]) -> list[Measurement]:
        """It begins empty, carries the whole load, and is gone."""
        home = self._home / kind.name
        home.mkdir()
        system = kind(home, self._ports)
        try:
            system.start()
            self._facts[kind.name] = system.facts
            return self._load(system)
        finally:
            with undisturbed():
                system.stop()
                shutil.rmtree(home)

    def _load(self, system: System) -> list[Measurement]:
        """By a process of its own."""
        options = self._options
        plan = Plan(
            system=system.name,
            address=system.address,
            pids=tuple(system.pids),
            sizes=options.sizes,
            seconds=options.seconds,
            warm_seconds=min(options.seconds / 2, WARM_SECONDS_MAX),
            in_flight=options.in_flight,
        )
        command = [sys.executable, "-m", self.load, json.dumps(asdict(plan))]
        seconds = len(options.sizes) * self.workloads * (options.seconds + WARM_SECONDS_MAX) + LOAD_SECONDS_MORE
        pipe = subprocess.PIPE
        with undisturbed():
            load = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        try:
            said, errors = load.communicate(timeout=seconds)
        finally:
            load.kill()
            load.wait()
        if load.returncode:
            raise RuntimeError(f"its load ended with exit code {load.returncode}: {errors[-TOLD_CHARACTERS:].strip()}")
        return [Measurement.from_json(line) for line in said.splitlines()]

    def _save(self, machine: str, rounds: list[dict[str, list[Measurement]]], rows: list[Row]) -> None:
        everything = {
            "machine": machine,
            "systems": {name: asdict(facts) for name, facts in self._facts.items()},
            "caveats": self.caveats,
            "skipped": self._skipped,
            "failed": self._failed,
            "rows": [asdict(row) for row in rows],
            "rounds": [{name: [asdict(one) for one in found] for name, found in each.items()} for each in rounds],
        }
        self._options.json.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


def machine_facts(home: Path) -> str:
    machine = this_machine()
    growing, in_place = flush_seconds(home)
    return (
        f"{machine.cores} cores ({machine.processor}), load {machine.load} at the start, {machine.system}, "
        f"{machine.python}.\nBelow the servers {filesystem_of(home)}: 4 KiB written and flushed in {growing * 1e3:.2f} ms "
        f"where the file grows, in {in_place * 1e3:.2f} ms in place (medians)."
    )


def flush_seconds(home: Path) -> tuple[float, float]:
    """One flush of a file that grows, and of one that has its size already, as files that are laid out in advance have."""
    path, page = home / "flush", bytes(4096)
    growing: list[float] = []
    in_place: list[float] = []
    with path.open("wb", buffering=0) as file:
        for taken in (growing, in_place):
            file.seek(0)
            for _ in range(FLUSHES):
                begun = time.perf_counter()
                file.write(page)
                os.fdatasync(file.fileno())
                taken.append(time.perf_counter() - begun)
    path.unlink()
    return statistics.median(growing), statistics.median(in_place)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
