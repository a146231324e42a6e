"""Digests of simulated histories: what clients asked for and were told, seed by seed.

A change that only moves or renames code leaves every digest as it was, whatever its log lines say. Before and after such a
change run `.venv/bin/python -m tests.simulation.digests > FILE`; `tests/golden/outside/histories.txt` has the first 30
seeds, and a test runs a few of them.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256

from tests.simulation.plan import make_plan
from tests.simulation.world import Outcome, simulate

SECONDS = 2.0
"""Virtual time in which things go wrong: short, so that many seeds take minutes."""


def digest(seed: int) -> str:
    """Return the seed, how many transactions were committed, and a digest of the history that clients recorded."""
    return line(seed, simulate(make_plan(seed, seconds=SECONDS)))


def line(seed: int, outcome: Outcome) -> str:
    """Return the digest of a run that has ended."""
    history = sha256(repr((outcome.history, outcome.kind)).encode()).hexdigest()[:16]
    return f"{seed} {outcome.committed} {history}"


def main() -> None:
    first, count = (int(text) for text in (sys.argv[1:] or ["0", "30"]))
    with ProcessPoolExecutor(2) as pool:
        for line in pool.map(digest, range(first, first + count)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
