"""Simulate whole clusters, a seed after the other, until the last one is done or one of them fails.

    ./dev simulate --seeds 1..1000
    ./dev simulate --seeds 7 --faults crash,cut --nodes storages=5,servers=3 --trace

A seed that fails is named, shortened to the fewest events that still make it fail, and told from its beginning.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.simulation.plan import FAULTS, Plan, dump, load, make_plan
from tests.simulation.shrink import shrink
from tests.simulation.world import Outcome, simulate

NODES = ("storages", "servers", "clients")


@dataclass(frozen=True)
class Options:
    """What is not drawn by the seed."""

    nodes: dict[str, int]
    faults: tuple[str, ...] | None
    seconds: float | None

    def plan(self, seed: int) -> Plan:
        return make_plan(seed, faults=self.faults, seconds=self.seconds, **self.nodes)


@dataclass(frozen=True)
class Line:
    """What is left of one run."""

    seed: int
    kind: str
    story: str
    waits: str
    seconds: float
    committed: int
    messages: int
    events: Counter[str]
    busy: float


def run_one(options: Options, seed: int) -> Line:
    begun = time.process_time()
    outcome = simulate(options.plan(seed))
    return Line(
        seed=seed,
        kind=outcome.kind,
        story=outcome.story,
        waits=outcome.waits,
        seconds=outcome.seconds,
        committed=outcome.committed,
        messages=outcome.messages,
        events=Counter(event.what for event in outcome.plan.events),
        busy=time.process_time() - begun,
    )


def run_all(options: Options, seeds: Iterable[int], jobs: int) -> Iterator[Line]:
    """In the order of the seeds."""
    gc.freeze()  # what is there before the first run need not be looked at after each of them
    if jobs == 1:
        yield from map(partial(run_one, options), seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, gc.freeze) as pool:
        yield from pool.imap(partial(run_one, options), seeds)


def explain(outcome: Outcome) -> Outcome:
    """The shortest run that fails in the same way."""

    def still_fails(plan: Plan) -> bool:
        return simulate(plan).kind == outcome.kind

    return simulate(shrink(outcome.plan, still_fails))


def tell(outcome: Outcome) -> None:
    print("\n".join(outcome.trace))
    print(f"\n{outcome.kind or 'sound'}: {outcome.story}")


def _seeds(text: str) -> range:
    first, dots, last = text.partition("..")
    if not first.isdecimal() or (dots and not last.isdecimal()) or (dots and int(last) < int(first)):
        raise argparse.ArgumentTypeError(f"{text!r}: say A..B, or one number")
    return range(int(first), int(last or first) + 1)


def _plan(text: str) -> Plan:
    try:
        return load(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no plan: {error}") from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes")
    return int(text)


def _more_than_none(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _nodes(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.partition("=")
        if name not in NODES or not count.isdigit() or int(count) < 1:
            raise argparse.ArgumentTypeError(f"{part!r}: say {', '.join(f'{name}=N' for name in NODES)}")
        found[name] = int(count)
    return found


def _faults(text: str) -> tuple[str, ...]:
    named = FAULTS if text == "all" else () if text == "none" else tuple(text.split(","))
    unknown = [name for name in named if name not in FAULTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no fault {unknown[0]!r}; there are: {', '.join(FAULTS)}, all, none")
    return named


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./dev simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=_seeds, default=None, metavar="A..B", help="100 that nobody ran before, if not given"
    )
    parser.add_argument("--nodes", type=_nodes, default={}, help="storages=N,servers=N,clients=N; the rest is drawn")
    parser.add_argument("--faults", type=_faults, default=None, help=f"{', '.join(FAULTS)}; all; none; or drawn")
    parser.add_argument("--seconds", type=_more_than_none, default=None, help="of virtual time for which things go wrong")
    parser.add_argument("--jobs", type=_count, default=1, metavar="N", help="processes")
    parser.add_argument("--trace", action="store_true", help="tell what happened in a run that does not fail, too")
    parser.add_argument("--plan", type=_plan, metavar="FILE", default=None, help="run this plan again, from a file")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", default=None, help="where to write the shortened plan of a failure"
    )
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.plan is not None:
        outcome = simulate(arguments.plan)
        tell(outcome)
        return 1 if outcome.kind else 0
    options = Options(arguments.nodes, arguments.faults, arguments.seconds)
    seeds = arguments.seeds
    if seeds is None:
        first = random.SystemRandom().randrange(1_000_000, 1 << 40)
        seeds = range(first, first + 100)
    print(f"seeds {seeds[0]}..{seeds[-1]}", flush=True)
    if arguments.trace:
        for seed in seeds:
            tell(simulate(options.plan(seed)))
        return 0
    return _run(options, seeds, arguments.jobs, arguments.save)


def _run(options: Options, seeds: range, jobs: int, save: Path | None) -> int:
    begun, said = time.perf_counter(), time.perf_counter()
    done, virtual, busy, committed, messages = 0, 0.0, 0.0, 0, 0
    events: Counter[str] = Counter()
    waiting: list[int] = []
    for line in run_all(options, seeds, jobs):
        if line.kind:
            return _fail(options, line, save)
        if line.waits:
            waiting.append(line.seed)
        done, virtual, busy = done + 1, virtual + line.seconds, busy + line.busy
        committed, messages = committed + line.committed, messages + line.messages
        events += line.events
        if time.perf_counter() - said > 10:
            said = time.perf_counter()
            print(f"{done} of {len(seeds)} seeds, {committed} transactions, {said - begun:.0f} s", flush=True)
    print(
        f"sound: {done} seeds, {committed} transactions, {messages} messages, {virtual:.0f} s of virtual time, "
        f"{virtual / busy:.0f} times faster than real time on one core, {time.perf_counter() - begun:.0f} s"
    )
    if waiting:
        left = ", ".join(map(str, waiting))
        print(f"left to an operator (documents went back, or too many lost data or are torn): seeds {left}")
    print("what happened: " + ", ".join(f"{what} {count}" for what, count in sorted(events.items())))
    return 0


def _fail(options: Options, line: Line, save: Path | None) -> int:
    print(
        f"seed {line.seed} fails: {line.kind}\n{line.story}\n\nlooking for the shortest run that fails in this way …",
        flush=True,
    )
    shortest = explain(simulate(options.plan(line.seed)))
    if save is not None:
        save.write_text(dump(shortest.plan) + "\n", encoding="utf-8")
    print(f"{len(shortest.plan.events)} events are left:")
    for event in shortest.plan.events:
        print(f"  {event}")
    print("\nwhat happened:")
    tell(shortest)
    print(f"\nagain: ./dev simulate --seeds {line.seed}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
