"""Histories that a log which keeps its promises would leave, made up from a seed: many clients, locks, lost connections."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.checker.history import History, LogRecord, Observed, Operation, Seen


@dataclass
class _Partition:
    number: int
    records: list[LogRecord] = field(default_factory=list)
    marked: dict[int, int] = field(default_factory=dict)
    generation: int = 0


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
        history.operations.append(operation)
        _decide(chance, operation, part, now)
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
        crc=chance.randrange(1 << 32),
    )


def _decide(chance: random.Random, operation: Operation, part: _Partition, now: int) -> None:
    conflict, lock = max(
        ((part.marked.get(lock, -1), lock) for lock in operation.read + operation.write), default=(-1, None)
    )
    is_answered = chance.random() < 0.9
    if is_answered:
        operation.returned = now + chance.randrange(1, 20)
    if conflict > operation.mark:
        if is_answered:
            operation.kind, operation.reason = "rejected", "REAL"
            operation.conflict, operation.lock = conflict, lock
        return
    if not is_answered and chance.random() < 0.5:
        return
    id = len(part.records)
    part.records.append(LogRecord(operation.key, operation.crc, operation.header, part.generation))
    for name in operation.write + operation.append:
        part.marked[name] = id
    if is_answered:
        operation.kind, operation.id = "committed", id


def _read(chance: random.Random, part: _Partition, name: str, at: int, group: str) -> list[Seen]:
    """A reader that starts again now and then, from a mark that it had kept."""
    rows = [(id, record.key, record.crc) for id, record in enumerate(part.records)]
    cut = chance.randrange(len(rows) + 1)
    again = chance.randrange(cut + 1)
    return [
        Seen(name, part.number, -1, rows[:cut], at, group),
        Seen(name, part.number, again - 1, rows[again:], -1, group),
    ]
