"""`./dev chaos`: a real cluster under a racing workload while everything breaks that can be broken here; then it is judged.

    ./dev chaos --minutes 5
    ./dev chaos --minutes 5 --seed 7 --only cut,kill-server,wipe
    ./dev chaos --kills 200

The end is 0 when the cluster kept its promises, 1 when it did not, 2 when the arguments make no sense.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos import damage, links, processes, run, sandbox
from tests.chaos.load import RATE
from tests.chaos.nemesis import NEMESES
from tests.chaos.world import PATIENCE_SECONDS

SOUND, VIOLATION, INTERRUPTED = 0, 1, sandbox.INTERRUPTED
PARTS = (damage, links, processes)
"""Their nemeses are known when they are imported."""


def main() -> int:
    parser = _parser()
    given = parser.parse_args()
    only = given.only.split(",") if given.only else None
    if unknown := sorted(set(only or ()) - set(NEMESES)):
        parser.error(f"no such nemesis: {', '.join(unknown)}. There are {', '.join(sorted(NEMESES))}")
    if min(given.minutes, given.rate, given.patience) <= 0 or (given.kills is not None and given.kills <= 0):
        parser.error("minutes, rate, patience and kills are above 0")
    if given.inside is not None:
        return _inside(Path(given.inside), given, only)
    if only and not run.available(only):
        parser.error("none of these is possible on this machine: " + "; ".join(run.skipped(only)))
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    folder = Path(tempfile.mkdtemp(prefix="waltz-chaos-"))
    print(f"seed {seed}; everything is in {folder}", flush=True)
    seconds = 4 * 60 * given.minutes + 10 * (given.kills or 0) + 600
    code = VIOLATION
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        code = sandbox.run_inside([*sys.argv[1:], "--seed", str(seed), "--inside", str(folder)], seconds_max=seconds)
    finally:
        if code not in (SOUND, INTERRUPTED) or given.keep:
            print(f"kept: {folder}; again: --seed {seed}", flush=True)
        else:
            shutil.rmtree(folder)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5, help="how long to go on breaking things")
    parser.add_argument("--kills", type=int, help="instead: so many quick rounds of kill -9")
    parser.add_argument("--seed", type=int, help="decides what is broken when; drawn when it is not given")
    parser.add_argument("--only", help="names of nemeses, separated by commas; all that are possible here by default")
    parser.add_argument("--rate", type=int, default=RATE, help="transactions in a second, at most")
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, help="seconds to become whole when healed")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and histories")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser


def _inside(folder: Path, given: argparse.Namespace, only: list[str] | None) -> int:
    if os.getpid() == 1:
        sandbox.settle_in()
    report = run.Report(given.seed, [] if given.kills is not None else run.skipped(only))
    try:
        asyncio.run(_until_told(folder, report, given, only))
    except (asyncio.CancelledError, KeyboardInterrupt):
        return INTERRUPTED
    print(report, flush=True)
    return VIOLATION if report.problems else SOUND


async def _until_told(folder: Path, report: run.Report, given: argparse.Namespace, only: list[str] | None) -> None:
    """The outer process closes our standard input to end the run."""
    if given.kills is not None:
        work = asyncio.create_task(run.kills(folder, report, count=given.kills, rate=given.rate, patience=given.patience))
    else:
        work = asyncio.create_task(
            run.chaos(folder, report, seconds=60 * given.minutes, only=only, rate=given.rate, patience=given.patience)
        )
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(sys.stdin.fileno())  # once: cleaning up is not to be cancelled
        work.cancel()

    loop.add_reader(sys.stdin.fileno(), stop)
    await work


if __name__ == "__main__":
    sys.exit(main())
