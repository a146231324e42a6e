"""Deliberate bugs that the simulator or a test of the room must catch, and how many seeds or tests it takes.

    ./dev mutants [--only NAME] [--seeds N] [--jobs J] [--drawn] [--catches K]

A mutant that survives is a hole in the proof: faults do not come where the rule matters, or nobody looks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import tests.simulation.batch_mutants
import tests.simulation.client_mutants
import tests.simulation.group_mutants
import tests.simulation.instance_mutants
import tests.simulation.key_mutants
import tests.simulation.rescue_mutants
import tests.simulation.server_mutants
import tests.simulation.storage_mutants
import tests.simulation.version_mutants  # noqa: F401  each registers its mutants
from tests.simulation.edit import ROOT, Edit
from tests.simulation.edits import EDITS
from tests.simulation.mutant import MUTANTS, Aim, Mutant
from tests.simulation.world import Outcome

SEEDS = 100
DRAWN_SEEDS = 60
"""So many catch an edit that no test of its room catches."""
DRAWN = Aim(faults=None, seconds=None, clients=None, format=None)
"""Nothing is aimed: everything is drawn by the seed."""


@dataclass(frozen=True)
class Found:
    name: str
    tried: int
    caught: tuple[tuple[int, str], ...]
    """Each seed that caught it, and as what."""
    seconds: float
    by: str = ""
    """The test that caught it, or the seeds and tests that should have."""

    def __str__(self) -> str:
        if not self.caught:
            return f"SURVIVES {self.by or f'{self.tried} seeds'}: {self.name} ({self.seconds:.0f} s)"
        if self.by:
            return f"caught by {self.by}: {self.name} ({self.seconds:.0f} s)"
        (seed, how), *others = self.caught
        more = f"; also by {', '.join(str(seed) for seed, _ in others)}" if others else ""
        return f"caught after {seed + 1} seeds: {self.name}: {how}{more} ({self.seconds:.0f} s)"


def how(outcome: Outcome) -> str:
    """As what it was caught, in one line."""
    lines = outcome.story.splitlines() or [""]
    line = lines[1].strip() if outcome.kind == "NOT SOUND" and len(lines) > 1 else lines[0]
    inner = outcome.failure
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
        line = repr(inner)
    return f"{outcome.kind}: {line[:200]}"


def hunt(name: str, *, seeds: int, catches: int, is_drawn: bool) -> Found:
    """Try seed after seed until so many have caught it."""
    begun = time.perf_counter()
    if name in EDITS:
        return catch(EDITS[name], seeds=min(seeds, DRAWN_SEEDS), is_drawn=is_drawn)
    one: Mutant = MUTANTS[name]
    if is_drawn:
        one = replace(one, aim=DRAWN)
    caught: list[tuple[int, str]] = []
    tried = 0
    for seed in range(seeds):
        tried += 1
        outcome = one.run(seed)
        if outcome.kind:
            caught.append((seed, how(outcome)))
            if len(caught) == catches:
                break
    return Found(name, tried, tuple(caught), time.perf_counter() - begun)


def catch(edit: Edit, *, seeds: int = DRAWN_SEEDS, is_drawn: bool = False) -> Found:
    """In a process of its own: by the tests of its room, or by drawn seeds where there are none."""
    begun = time.perf_counter()
    how = ["seeds", str(seeds)] if is_drawn or not edit.tests else ["pytest", *edit.tests]
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.edit", edit.name, *how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    line = re.search(r"^(?:FAILED|ERROR) (\S+)|^(seed .*)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (line is None and "Traceback" in done.stderr):
        raise RuntimeError(f"{edit.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    is_caught = done.returncode == 1 and line is not None
    by = (line[1] or line[2]) if line is not None else " ".join(how)
    return Found(edit.name, 1, ((0, by),) if is_caught else (), time.perf_counter() - begun, by)


def _all(names: Iterable[str], jobs: int, search: partial[Found]) -> Iterator[Found]:
    if jobs == 1:
        yield from map(search, names)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        yield from pool.imap(search, names)


def _catchers(name: str) -> str:
    """What it does, and what catches it."""
    if name in EDITS:
        edit = EDITS[name]
        by = [*edit.tests, *([f"drawn seeds {', '.join(map(str, edit.seeds))}"] if edit.seeds else [])]
        return f"{edit.module}; caught by {', '.join(by)}"
    one = MUTANTS[name]
    return f"{one.wrong} Caught by aimed seeds {', '.join(map(str, one.seeds))}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="./dev mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", default=None, metavar="NAME", help="mutants with this in their name")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="at most, for each mutant")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--drawn", action="store_true", help="faults as the seed draws them, instead of aimed ones")
    parser.add_argument("--catches", type=int, default=1, metavar="K", help="go on until so many seeds have caught it")
    parser.add_argument("--list", action="store_true", help="tell what there is, and run nothing")
    arguments = parser.parse_args()
    names = [name for name in (*MUTANTS, *EDITS) if arguments.only is None or any(part in name for part in arguments.only)]
    if not names:
        parser.error(f"there is no such mutant; there are: {'; '.join((*MUTANTS, *EDITS))}")
    if arguments.list:
        print("\n".join(f"{name}: {_catchers(name)}" for name in names))
        return 0
    search = partial(hunt, seeds=arguments.seeds, catches=arguments.catches, is_drawn=arguments.drawn)
    survivors = 0
    for found in _all(names, arguments.jobs, search):
        survivors += not found.caught
        print(found, flush=True)
    print(f"{len(names) - survivors} of {len(names)} mutants were caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
