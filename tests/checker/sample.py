"""Histories that a log which keeps its promises would leave, made up from a seed: many clients, locks, lost connections."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from tests.checker.history import History, LogRecord, Observed, Operation, Seen
from waltzd.protocol.locks import Mode


@dataclass
class _Partition:
    number: int
    records: list[LogRecord] = field(default_factory=list)
    marked: dict[int, int] = field(default_factory=dict)
    generation: int = 0
    time: int = 0


def sample(
    seed: int, operations: int, *, partitions: int = 2, clients: int = 4, locks: int = 6, lag: int = 3, readers: int = 2
) -> History:
    chance = random.Random(seed)
    history = History()
    parts = [_Partition(number) for number in range(partitions)]
    now = 0
    for number in range(operations):
        part = chance.choice(parts)
        now += chance.randrange(1, 20)
        if chance.random() < 0.02:
            part.generation += 1
        operation = _operation(chance, f"k{number}", part, now, clients, locks, lag)
        members = [operation]
        if chance.random() < 0.15:
            members = _group(chance, operation)
        history.operations += members
        _decide(chance, members, part, now)
        if chance.random() < 0.05:
            is_confirmed = chance.random() < 0.5
            look = Observed(operation.client, part.number, now, now + 30, len(part.records) - 1, is_confirmed)
            history.observed.append(look)
        now += 40 if chance.random() < 0.5 else 0
    for part in parts:
        history.log(part.number, part.records)
        history.log(part.number, [*part.records, LogRecord("never committed", 0)], source="a storage")
        for reader in range(readers):
            history.seen += _read(chance, part, f"reader {reader}", now + 30, "" if reader == 0 else "a group")
    return history


def _operation(
    chance: random.Random, key: str, part: _Partition, now: int, clients: int, locks: int, lag: int
) -> Operation:
    names = [chance.randrange(locks) for _ in range(chance.randrange(4))]
    return Operation(
        key=key,
        client=f"client {chance.randrange(clients)}",
        partition=part.number,
        invoked=now,
        mark=max(-1, len(part.records) - 1 - chance.randrange(lag + 1)),
        read=tuple(names[:1]),
        write=tuple(names[1:2]),
        append=tuple(names[2:]),
        header=chance.randrange(5),
        crc=chance.randrange(1 << 31),
        time_seen=chance.choice((-1, part.time, part.time + 1)),
    )


def _group(chance: random.Random, first: Operation) -> list[Operation]:
    """Transactions that were asked for together."""
    first.together = first.key
    more = [replace(first, key=f"{first.key}.{number}", crc=first.crc + number) for number in range(chance.randrange(3))]
    return [first, *more]


def _decide(chance: random.Random, members: list[Operation], part: _Partition, now: int) -> None:
    """All of them, or none."""
    first = members[0]
    conflict, lock = max(((part.marked.get(lock, -1), lock) for lock in first.read + first.write), default=(-1, None))
    is_answered = chance.random() < 0.9
    if is_answered:
        for one in members:
            one.returned = now + chance.randrange(1, 20)
    if conflict > first.mark:
        for one in members if is_answered else ():
            one.kind, one.reason, one.conflict, one.lock = "rejected", "CONFLICT", conflict, lock
        return
    if not is_answered and chance.random() < 0.5:
        return
    part.time = max(part.time + chance.randrange(3), first.time_seen)
    for one in members:
        if is_answered:
            one.kind, one.id = "committed", len(part.records)
        for name in one.write + one.append:
            part.marked[name] = len(part.records)
        locks = [(lock, Mode.READ) for lock in one.read] + [(lock, Mode.WRITE) for lock in one.write]
        locks += [(lock, Mode.APPEND) for lock in one.append]
        spelt = tuple((lock, int(mode)) for lock, mode in locks)
        part.records.append(
            LogRecord(
                one.key, one.crc, one.header, part.generation, part.time, bool(one.together) and one is not first, spelt
            )
        )


def _read(chance: random.Random, part: _Partition, name: str, at: int, group: str) -> list[Seen]:
    """A reader that starts again now and then, from a mark that it had kept."""
    rows = [(id, record.key, record.crc) for id, record in enumerate(part.records)]
    times = [record.time for record in part.records]
    ends = [id for id in range(len(rows) + 1) if id == len(rows) or not part.records[id].follows]
    cut, again = sorted((chance.choice(ends), chance.choice(ends)), reverse=True)
    return [
        Seen(name, part.number, -1, rows[:cut], at, group, times[:cut], is_whole=True),
        Seen(name, part.number, again - 1, rows[again:], -1, group),
    ]
