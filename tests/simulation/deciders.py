"""Applications that decide by a consistency boundary: each reads the events of a query, and appends if nothing that matches
it has come since. Judged on the final log, by the sentence of the specification."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.checker.recorder import Recorder, payload_key
from waltzd.client.client import Client
from waltzd.client.view import Builder
from waltzd.dcb import AppendCondition, Event, EventStore, Query, QueryItem
from waltzd.errors import AppendConditionFailed, NotGranted, Superseded, WaltzError
from waltzd.protocol.locks import AppendOutcome, Lock
from waltzd.protocol.quorum import EMPTY

if TYPE_CHECKING:
    from tests.simulation.world import Simulation

TYPES, TAGS = ("Joined", "Left", "Closed"), ("course:1", "course:2", "student:1")
"""Few, so that boundaries overlap."""
FAILED = -1
"""Outcome of an append whose condition failed."""


@dataclass
class _Read:
    """A read, and what it was answered."""

    partition: int
    query: Query
    after: int
    acknowledged: int
    """Highest position that anybody was told of before the read began."""
    head: int
    found: list[tuple[int, bytes]]


@dataclass
class _Append:
    """An append under a condition."""

    partition: int
    query: Query
    after: int
    keys: list[list[str]] = field(default_factory=list)
    """Names of its transactions in the history, for each attempt."""
    outcome: int | None = None
    """Position of its last event; FAILED, or None if it is not known."""


class Deciders:
    """What all of them did."""

    def __init__(self) -> None:
        self.events: dict[str, tuple[Event, bytes]] = {}
        """By the name of the attempt in the history: the event, and its data in the log."""
        self.acknowledged: dict[int, int] = {}
        """Highest position of each partition that anybody was told of."""
        self.reads: list[_Read] = []
        self.appends: list[_Append] = []

    def check(self, logs: dict[int, dict[int, Any]]) -> Iterable[str]:
        """Yield what is wrong. `logs`: the records of each partition by their ids."""
        events = {
            partition: {
                id_ + 1: self.events[record.key] for id_, record in sorted(log.items()) if record.key in self.events
            }
            for partition, log in logs.items()
        }
        ids = {partition: {record.key: id_ for id_, record in log.items()} for partition, log in logs.items()}
        for read in self.reads:
            there = events.get(read.partition, {})
            right = [
                (position, data)
                for position, (event, data) in there.items()
                if read.after < position <= read.head and read.query.matches(event)
            ]
            if read.found != right:
                yield f"a read of {read.query} after {read.after} up to {read.head} found {read.found}, not {right}"
            if read.head < read.acknowledged:
                yield f"a read ends at {read.head}, and {read.acknowledged} was acknowledged before it"
        for append in self.appends:
            places = ids.get(append.partition, {})
            kept = [[places[key] + 1 for key in keys if key in places] for keys in append.keys]
            mine = [positions for positions in kept if positions]
            if len(mine) > 1:
                yield f"{append.keys} is in the log more than once, at {mine}"
                continue
            if append.outcome is not None and append.outcome != FAILED and (not mine or mine[0][-1] != append.outcome):
                yield f"{append.keys} was acknowledged at {append.outcome}, and is at {mine}"
            against = [
                position
                for position, (event, _) in events.get(append.partition, {}).items()
                if append.after < position and append.query.matches(event) and not (mine and position >= mine[0][0])
            ]
            if mine and against:
                yield f"{append.keys} is at {mine[0]} in spite of {against}: {append.query} after {append.after}"
            if append.outcome == FAILED and (mine or not against):
                yield f"{append.keys} is at {mine} or failed without a reason: {append.query} after {append.after}"


class _Recorded:
    """A client whose appends are written down; each attempt of an append gets bytes of its own."""

    def __init__(self, client: Client[bytes], recorder: Recorder, deciders: Deciders) -> None:
        self._client = client
        self._recorder = recorder
        self._deciders = deciders
        self._attempts = 0
        self.current: _Append | None = None
        self.events: Sequence[Event] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def append(self, payload: bytes, *, partition: int, locks: list[Lock], position: int | None, **rest: Any) -> Any:
        (mine,) = self._unique([payload])
        operation = self._recorder.invoked(_builder(position), partition, mine, 0, locks)
        outcome: AppendOutcome = await self._client.append(
            mine, partition=partition, locks=locks, position=position, **rest
        )
        self._recorder.returned(operation, outcome)
        return outcome

    async def append_atomic(
        self, payloads: list[bytes], *, partition: int, locks: list[list[Lock]], position: int | None, **rest: Any
    ) -> Any:
        mine = self._unique(payloads)
        operations = [
            self._recorder.invoked(_builder(position), partition, one, 0, locks[number], together=payload_key(mine[0]))
            for number, one in enumerate(mine)
        ]
        outcome: AppendOutcome = await self._client.append_atomic(
            mine, partition=partition, locks=locks, position=position, **rest
        )
        for number, operation in enumerate(operations):
            self._recorder.returned(operation, outcome, number)
        return outcome

    def _unique(self, payloads: list[bytes]) -> list[bytes]:
        self._attempts += 1
        made = [payload + b" %d" % self._attempts for payload in payloads]
        keys = [payload_key(payload) for payload in made]
        for key, payload, event in zip(keys, made, self.events, strict=True):
            self._deciders.events[key] = event, payload.partition(b"\n")[2]
        if self.current is not None:
            self.current.keys.append(keys)
        return made


def _builder(position: int | None) -> Builder:
    return Builder(EMPTY if position is None else position)


async def decide(world: Simulation, client: Client[bytes], recorder: Recorder, name: str) -> None:
    """Decide again and again, until the race is over."""
    deciders = world.deciders
    assert deciders is not None
    pick = random.Random(f"{world.plan.seed} {name} decisions")
    recorded: Any = _Recorded(client, recorder, deciders)
    count = 0
    while world.is_racing:
        count += 1
        partition = pick.randrange(world.setup.partitions)
        store = EventStore(recorded, partition=partition)
        query = Query([_item(pick) for _ in range(pick.choice((1, 1, 2)))])
        recorded.events = [
            Event(pick.choice(TYPES), f"{name} {count} {at}".encode(), pick.sample(TAGS, pick.randrange(3)))
            for at in range(pick.choice((1, 1, 2)))
        ]
        lag, is_blind = pick.choice((0, 0, 1, 4)), pick.random() < 0.1
        try:
            known, before = deciders.acknowledged.get(partition, 0), pick.randrange(20)
            found = await store.read(query, after=max(0, known - before))
            read = _Read(
                partition, query, max(0, known - before), known, found.head,
                [(one.position, one.event.data) for one in found.events],
            )  # fmt: skip
            deciders.reads.append(read)
            after = max(0, found.head - lag)
            recorded.current = _Append(partition, query, -1 if is_blind else after)
            if not is_blind:
                deciders.appends.append(recorded.current)
            position = await store.append(recorded.events, None if is_blind else AppendCondition(query, after))
            recorded.current.outcome = position
            deciders.acknowledged[partition] = max(deciders.acknowledged.get(partition, 0), position)
        except (Superseded, NotGranted):
            raise
        except AppendConditionFailed:
            recorded.current.outcome = FAILED
        except WaltzError as error:
            world.say(name, f"{error.code} {error.message}")
            await asyncio.sleep(0.05)
        await asyncio.sleep(pick.choice((0.02, 0.1, 0.3)) * pick.random())


def _item(pick: random.Random) -> QueryItem:
    return QueryItem(pick.sample(TYPES, pick.randrange(3)), pick.sample(TAGS, pick.randrange(3)))
