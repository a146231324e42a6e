"""A run: one cluster after the other, round after round, and a judgement on each.

A cluster is used for some minutes only, so that its history stays small enough to be judged whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import judgement
from tests.chaos.load import RATE, Load
from tests.chaos.nemesis import NEMESES, Nemesis
from tests.chaos.plan import Round, Strike, draw
from tests.chaos.world import PARTITIONS, PATIENCE_SECONDS, World, remove

CLUSTER_SECONDS = 300
FORMATS = (1, 0)
"""What clusters begin with, in turns, the first with 0; such a one goes over in the middle."""
WARM_UP_SECONDS = 30
END_SECONDS = 60
"""How long one strike may take to end."""
KILLS = ("kill-server", "kill-server", "kill-storage", "kill-storage", "kill-storages")
KILLS_JUDGED = 20
UNDER_LOAD = 0.6
"""So many of the kills wait until every partition commits; the others come while the cluster still recovers."""


@dataclass
class Report:
    seed: int
    skipped: list[str]
    strikes: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    committed: int = 0
    unknown: int = 0
    unavailable: Counter[str] = field(default_factory=Counter)
    longest_silence: float = 0.0
    verdicts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{name:20} {count:5}" for name, count in sorted(self.strikes.items())]
        lines += self.skipped
        unavailable = ", ".join(f"{count} × {code}" for code, count in sorted(self.unavailable.items())) or "none"
        lines.append(
            f"seed {self.seed}: {self.rounds} rounds, {sum(self.strikes.values())} strikes, {self.committed} transactions "
            f"committed, {self.unknown} unknown, unavailable: {unavailable}; longest silence {self.longest_silence:.1f} s"
        )
        lines += self.verdicts
        lines += [f"WRONG: {problem}" for problem in self.problems]
        lines.append("VIOLATION" if self.problems else "SOUND")
        return "\n".join(lines)


def wanted(only: list[str] | None) -> dict[str, type[Nemesis]]:
    """The unfair ones only by name."""
    return {name: made for name, made in NEMESES.items() if (made.is_fair if only is None else name in only)}


def available(only: list[str] | None) -> dict[str, type[Nemesis]]:
    return {name: made for name, made in wanted(only).items() if made.refusal() is None}


def skipped(only: list[str] | None) -> list[str]:
    """By name, each with its reason."""
    reasons = {name: made.refusal() for name, made in wanted(only).items()}
    return [f"skipped {name}: {reason}" for name, reason in sorted(reasons.items()) if reason is not None]


async def chaos(
    folder: Path,
    report: Report,
    *,
    seconds: float,
    only: list[str] | None,
    rate: int = RATE,
    patience: float = PATIENCE_SECONDS,
) -> None:
    """So many seconds of rounds; starting and judging come on top. Something that is wrong with a cluster ends the run."""
    rounds = draw([made.kind for made in available(only).values()], report.seed)
    number = 0
    while number * CLUSTER_SECONDS < seconds and not report.problems:
        span = min(CLUSTER_SECONDS, seconds - number * CLUSTER_SECONDS)
        number += 1
        where = folder / f"cluster-{number}"
        async with _world(where, report, patience, format=FORMATS[number % len(FORMATS)]) as world:
            await _play(world, report, rounds, span, rate)
        if not report.problems:
            remove(where)


async def kills(folder: Path, report: Report, *, count: int, rate: int = RATE, patience: float = PATIENCE_SECONDS) -> None:
    """Quick rounds of kill -9 on one cluster, judged again and again."""
    pick = random.Random(report.seed)
    async with _world(folder / "cluster-1", report, patience) as world:
        done = 0
        while done < count and not report.problems:
            tag = f"kills-{done}"
            load = _load(world, tag, report.seed, rate)
            async with load.running():
                await _warm_up(world, load, report)
                until = min(count, done + KILLS_JUDGED)
                while done < until and not report.problems:
                    done += 1
                    if pick.random() < UNDER_LOAD:
                        await load.progress(world.patience)
                    kind = NEMESES[pick.choice(KILLS)].kind
                    strikes = (Strike(kind, pick.choice(kind.targets)),)
                    quick = Round(number=done, seconds=pick.uniform(0.2, 1.5), strikes=strikes, is_healed=False)
                    await _play_one(world, load, report, quick)
                if not report.problems:
                    report.problems += await judgement.healthy(world, load)
            await _judge(world, load, report)
        if not report.problems:
            report.problems += await judgement.same_files(world)


@contextlib.asynccontextmanager
async def _world(folder: Path, report: Report, patience: float, *, format: int = 1) -> AsyncIterator[World]:
    world = World(folder, report.seed, patience=patience, format=format)
    try:
        await world.start()
        yield world
    except Exception:  # noqa: BLE001 - any failure is told, and what was started is put away
        report.problems.append(traceback.format_exc())
    finally:
        await world.close()


def _load(world: World, tag: str, seed: int, rate: int) -> Load:
    history = world.folder / "history"
    return Load(history, world.cluster.server_addresses, tag=tag, partitions=PARTITIONS, seed=seed, rate=rate)


async def _warm_up(world: World, load: Load, report: Report) -> None:
    if not await load.progress(WARM_UP_SECONDS):
        load.is_lost = True
        report.problems.append(f"nothing was committed at first\n{await judgement.who_does_what(world, load)}")
    load.take_silence()


async def _play(world: World, report: Report, rounds: Iterator[Round], seconds: float, rate: int) -> None:
    load = _load(world, "chaos", report.seed, rate)
    async with load.running():
        await _warm_up(world, load, report)
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds and not report.problems:
            if world.format == 0 and passed > seconds / 2:
                report.problems += await judgement.healthy(world, load)
                await world.upgrade()
                print(f"{'':4}  {passed:5.1f} s  the cluster has gone over to format 1", flush=True)
            await _play_one(world, load, report, next(rounds))
        if not report.problems:
            report.problems += await judgement.healthy(world, load)
    await _judge(world, load, report)
    if not report.problems:
        report.problems += await judgement.same_files(world)


async def _judge(world: World, load: Load, report: Report) -> None:
    report.committed += load.committed
    report.unknown += load.unknown
    report.unavailable += load.unavailable
    if report.problems:
        return
    verdict, problems = await judgement.sound(world, load)
    report.verdicts.append(verdict)
    report.problems += problems
    print(f"      judged: {verdict}", flush=True)


async def _play_one(world: World, load: Load, report: Report, found: Round) -> None:
    begun, before = time.monotonic(), load.committed
    if found.is_damaging:
        report.problems += await judgement.healthy(world, load)
        if report.problems:
            return
    nemeses = [
        NEMESES[strike.kind.name](world, strike.target, random.Random(f"{report.seed}:{found.number}:{strike}"))
        for strike in found.strikes
    ]
    try:
        for nemesis in nemeses:
            await nemesis.begin()
        await asyncio.sleep(found.seconds)
    finally:
        for nemesis in nemeses:
            async with asyncio.timeout(END_SECONDS):
                await nemesis.end()
    try:
        for nemesis in nemeses:
            await nemesis.heal()
    except AssertionError as error:
        load.is_lost = True
        report.problems.append(f"{found}: {error}\n{await judgement.who_does_what(world, load)}")
    world.look_for_deaths()
    report.problems += world.deaths
    if found.is_healed:
        report.problems += await judgement.healthy(world, load)
    report.rounds += 1
    report.strikes.update(strike.kind.name for strike in found.strikes)
    silence, seconds = load.take_silence(), time.monotonic() - begun
    report.longest_silence = max(report.longest_silence, silence)
    told = " + ".join(map(str, nemeses)) or "nothing"
    figures = f"{seconds:5.1f} s  {load.committed - before:5} committed, silence {silence:4.1f} s"
    print(f"{found.number:4}  {figures}  {told}{'; healed' if found.is_healed else ''}", flush=True)
