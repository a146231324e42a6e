"""The example applications under load while daemons of the cluster and instances of the applications are killed."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.applications.judgement import judge
from tests.applications.services import BOOKING, INDEXER, SHOP, Services
from tests.applications.users import Users
from waltzd.client.loop import run


@dataclass
class Report:
    seed: int
    rounds: list[tuple[str, ...]] = field(default_factory=list)
    """Who was killed in each."""
    problems: list[str] = field(default_factory=list)
    figures: str = ""

    def __str__(self) -> str:
        kills = "; ".join(", ".join(names) for names in self.rounds)
        return "\n".join([f"seed {self.seed}, killed: {kills}", self.figures, *self.problems])


def victims(services: Services, seed: int) -> Iterator[tuple[str, ...]]:
    """For each round a server or a storage in turns, one instance of each service, and the indexer."""
    pick = random.Random(seed)

    def turns(*names: str) -> Iterator[str]:
        while True:
            yield from pick.sample(names, len(names))

    servers, storages = turns(*services.cluster.server_names), turns(*services.cluster.storage_names)
    daemons = itertools.chain.from_iterable(zip(servers, storages, strict=False))
    return zip(daemons, turns(*BOOKING), turns(*SHOP), turns(INDEXER), strict=False)


def storm(
    folder: Path, *, seed: int, database: str = "", rounds: int | None = None, seconds: float = 0.0, each: int = 12
) -> Report:
    """So many rounds, or so many seconds. In a round four are killed, `each` bookings and movements are confirmed without
    them, and as many when they are back."""
    services = Services(folder, database)
    try:
        services.start()
        return run(_storm(services, seed, rounds, seconds, each))
    finally:
        services.close()


async def _storm(services: Services, seed: int, rounds: int | None, seconds: float, each: int) -> Report:
    report, users = Report(seed), Users(services, seed)
    await services.answer()
    deadline = time.monotonic() + seconds
    async with users.running():
        await users.more(each)
        await users.disturb()
        for names in itertools.islice(victims(services, seed), rounds):
            if rounds is None and time.monotonic() > deadline:
                break
            services.kill(names)
            await users.more(each)
            await services.heal()
            await users.more(each)
            report.rounds.append(names)
    report.problems = [*await judge(services, users), *services.stop()]
    report.figures = (
        f"{len(users.booked)} bookings, {len(users.moved)} movements, {len(users.refused)} refused, "
        f"{users.sent} requests, {users.shown} looked at elsewhere"
    )
    return report
