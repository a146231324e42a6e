"""`./dev applications`: the example applications under load, while everything under them is killed; then views and log are
compared.

    ./dev applications --minutes 5
    ./dev applications --minutes 5 --seed 7 --sqlite

The end is 0 when nothing was lost, doubled or shown wrongly, 1 when something was.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.applications.storm import storm
from tests.process.postgres import LocalPostgres, programs

SOUND, WRONG = 0, 1


@contextmanager
def database() -> Iterator[str]:
    """The URL of a PostgreSQL; empty, for SQLite, on a machine without one."""
    if (bin := programs()) is None:
        yield ""
        return
    postgres = LocalPostgres(bin)
    try:
        postgres.create()
        postgres.start()
        yield postgres.url
    finally:
        postgres.remove()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="./dev applications", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5, help="how long to go on killing")
    parser.add_argument("--seed", type=int, help="decides who is killed when; drawn when it is not given")
    parser.add_argument("--sqlite", action="store_true", help="the shop keeps its database in SQLite")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    folder = Path(tempfile.mkdtemp(prefix="waltz-applications-"))
    print(f"seed {seed}; everything is in {folder}", flush=True)
    with database() as url:
        report = storm(folder, seed=seed, database="" if given.sqlite else url, seconds=60 * given.minutes)
    print(report, flush=True)
    if report.problems:
        return WRONG
    shutil.rmtree(folder)
    return SOUND


if __name__ == "__main__":
    sys.exit(main())
