"""Racers make the same decision in an event store whose owners are killed; of each round, one may win.

    ./dev decisions [--rounds 10000] [--racers 16] [--seed N]

In each round all racers read nothing, and append under the condition that the seat of the round is not taken, some with a
second event. The boundary of a round is a type and a tag, or a tag alone. In a quarter of the rounds the owner of the
partition is killed while they race. A round passes if one racer won, the store has that event alone, at the position that
the racer was told, and nobody's outcome stayed unknown.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass

from waltzd.dcb import AppendCondition, Event, EventStore, Query, QueryItem
from waltzd.errors import AppendConditionFailed, OutcomeUnknown
from waltzd.testing import LocalCluster

KILLS_SHARE = 0.25
CLUSTER_ROUNDS = 500
"""Rounds on one cluster."""


@dataclass
class Tally:
    rounds: int = 0
    kills: int = 0
    faults: tuple[str, ...] = ()


async def _decide(store: EventStore, query: Query, seat: str, racer: int) -> int | None:
    """Append as one racer. Return the position of its last event; None if another one has won."""
    taken = Event("Taken", b"%d" % racer, [seat])
    noise = Event("Seen", tags=[seat, f"racer:{racer}"])
    try:
        return await store.append([noise, taken] if racer % 3 else [taken], AppendCondition(query))
    except AppendConditionFailed:
        return None


async def run_round(
    cluster: LocalCluster,
    stores: tuple[EventStore, EventStore],
    number: int,
    chance: random.Random,
    racers: int,
    tally: Tally,
) -> None:
    seat = f"seat:{number}"
    query = Query([QueryItem(["Taken"] if number % 2 else [], [seat])])
    racing = [asyncio.create_task(_decide(stores[at % 2], query, seat, at)) for at in range(racers)]
    if chance.random() < KILLS_SHARE:
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        await cluster.start_server(await cluster.kill_owner(0))
        tally.kills += 1
    outcomes = await asyncio.gather(*racing, return_exceptions=True)
    tally.rounds += 1
    unknown = [outcome for outcome in outcomes if isinstance(outcome, OutcomeUnknown)]
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, OutcomeUnknown):
            raise outcome
    won = [outcome for outcome in outcomes if isinstance(outcome, int)]
    there = [one.position for one in (await stores[0].read(Query([QueryItem(["Taken"], [seat])]))).events]
    if unknown or len(won) != 1 or won != there:
        fault = f"round {number}: the winners were told {won}, the store has {there}, {len(unknown)} outcomes are unknown"
        tally.faults += (fault,)


async def race(rounds: int, seed: int, *, racers: int = 16, say: Callable[[str], None] = lambda line: None) -> Tally:
    """Run the rounds, each cluster for some of them, and return what was counted."""
    chance, tally = random.Random(seed), Tally()
    while tally.rounds < rounds:
        first = tally.rounds
        async with LocalCluster(partitions=1) as cluster, cluster.client() as one, cluster.client() as other:
            stores = EventStore(one, partition=0), EventStore(other, partition=0)
            for number in range(first, min(first + CLUSTER_ROUNDS, rounds)):
                await run_round(cluster, stores, number, chance, racers, tally)
        say(f"{tally.rounds:,} rounds, {tally.kills:,} owners killed, {len(tally.faults)} faults")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev decisions")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--racers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    tally = asyncio.run(race(chosen.rounds, chosen.seed, racers=chosen.racers, say=lambda line: print(line, flush=True)))
    for fault in tally.faults:
        print(fault)
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
