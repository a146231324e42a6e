"""What clients did and saw, as lines of JSON: the only evidence that the checker accepts.

Each process appends to a file of its own; a history is all of them together. Times are nanoseconds of one monotonic clock
for all processes (those of one machine share it). `key` is the application's own name for one attempt: unique for ever,
and readable in the transaction itself, so that the log can be compared with what was asked without trusting the request
ids of the system under test. Lines by their `type`:

    invoke    key client partition at mark read write append header crc together time_seen
              before the attempt leaves: `mark` is what the client had seen, `read`, `write`, `append` are lock hashes;
              `together` is the key of the first attempt of its group of transactions, empty for one by itself; `time_seen`
              is the highest time of a transaction that the client had seen, in any partition
    return    key at kind id reason conflict lock
              `kind`: committed (with `id`), rejected (with `reason` and, for a lock, `conflict` and `lock`), unknown,
              declined (never sent); an attempt without a return line is unknown
    seen      name partition start records at group times is_whole
              a reader that stood at the mark `start` was given these: [[id, key, crc], …]; `at` is when, -1 where that is
              not known; `group` is whom it reads with, empty for one that reads alone; `times` are those of the
              transactions, -1 or left out where they have none; `is_whole`: it took all of them at once
    observed  client partition invoked returned mark is_confirmed
              somebody asked for the high-water mark, or flushed; one that is not confirmed is what its owner knew
    standing  name client partition epoch barrier
              the first mount of an instance of a name of which only the newest may live: what older ones had sent has an id
              up to the barrier, or none
    log       source partition first records
              what is in the log in the end, from `first` on: [[key, crc, header, generation, time, follows, locks], …]; the
              source `final` is what a reader gets, other sources are single replicas; a generation or time that is not
              known is -1, and `follows` (it goes on with the group of the one before) and `locks` are null then
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

FINAL = "final"
UNTIMED = -1


@dataclass(slots=True)
class Operation:
    """One attempt, merged from its two lines."""

    key: str
    client: str
    partition: int
    invoked: int
    mark: int
    read: tuple[int, ...] = ()
    write: tuple[int, ...] = ()
    append: tuple[int, ...] = ()
    header: int = 0
    crc: int = 0
    returned: int | None = None
    kind: str = "unknown"
    id: int | None = None
    reason: str | None = None
    conflict: int = -1
    lock: int | None = None
    together: str = ""
    """The key of the first of its group of transactions; empty for one by itself."""
    time_seen: int = UNTIMED
    """The highest time of a transaction that its client had seen, in any partition."""


@dataclass(slots=True)
class Seen:
    name: str
    partition: int
    start: int
    records: list[tuple[int, str, int]]
    """Id, key, checksum of the payload."""
    at: int = -1
    group: str = ""
    times: list[int] = field(default_factory=list)
    """Of each, or of none."""
    is_whole: bool = False
    """They were taken at once: no group of transactions begins in front of them, or goes on behind."""


@dataclass(slots=True)
class Observed:
    client: str
    partition: int
    invoked: int
    returned: int
    mark: int
    is_confirmed: bool = True
    """Nobody had been told of more before it was asked. Otherwise only who asked had not."""


@dataclass(slots=True)
class Standing:
    name: str
    client: str
    partition: int
    epoch: int
    barrier: int


@dataclass(slots=True)
class LogRecord:
    key: str
    crc: int
    header: int = 0
    generation: int = -1
    time: int = field(default=UNTIMED, compare=False)
    follows: bool | None = field(default=None, compare=False)
    """It goes on with the group of the one before; None where that is not known."""
    locks: tuple[tuple[int, int], ...] | None = field(default=None, compare=False)
    """Hash and mode of each; None where they are not known."""


@dataclass(slots=True)
class History:
    operations: list[Operation] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    observed: list[Observed] = field(default_factory=list)
    standings: list[Standing] = field(default_factory=list)
    logs: dict[str, dict[int, dict[int, LogRecord]]] = field(default_factory=dict)
    """By source, partition and id."""

    def log(self, partition: int, records: Iterable[LogRecord], *, first: int = 0, source: str = FINAL) -> None:
        ids = self.logs.setdefault(source, {}).setdefault(partition, {})
        for id, record in enumerate(records, first):
            ids[id] = record


class BadHistory(ValueError):
    """A line that is no evidence: the recording is wrong, which says nothing about the system."""


def load(paths: Iterable[Path]) -> History:
    """All files as one history. The last line of a file may be cut short: its process was killed while it wrote."""
    history = History()
    returns: dict[str, dict[str, Any]] = {}
    for path in sorted(paths):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                fields = json.loads(line)
                _take(history, returns, fields)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                if number == len(lines):  # no line end behind it
                    continue
                raise BadHistory(f"{path.name}, line {number}: {error!r} in {line[:200]!r}") from error
    _merge(history, returns)
    return history


def _take(history: History, returns: dict[str, dict[str, Any]], fields: dict[str, Any]) -> None:
    match fields.pop("type"):
        case "invoke":
            fields |= {name: tuple(fields[name]) for name in ("read", "write", "append")}
            _check_key(fields["key"])
            history.operations.append(Operation(invoked=fields.pop("at"), **fields))
        case "return":
            key = fields.pop("key")
            _check_key(key)
            if "at" not in fields:
                raise BadHistory(f"nothing says when {key} returned")
            if key in returns:
                raise BadHistory(f"{key} returned twice")
            returns[key] = fields
        case "seen":
            rows = [(int(id), str(key), int(crc)) for id, key, crc in fields.pop("records")]
            history.seen.append(Seen(records=rows, **fields))
        case "observed":
            history.observed.append(Observed(**fields))
        case "standing":
            history.standings.append(Standing(**fields))
        case "log":
            records = [_log_record(*record) for record in fields.pop("records")]
            history.log(fields["partition"], records, first=fields["first"], source=fields["source"])
        case other:
            raise BadHistory(f"no such type of line: {other}")


def _log_record(*row: Any) -> LogRecord:
    record = LogRecord(*row)
    if record.locks is not None:
        record.locks = tuple((lock, mode) for lock, mode in record.locks)
    return record


def _check_key(key: object) -> None:
    if not isinstance(key, str):
        raise BadHistory(f"{key!r} is not the name of an attempt")


def _merge(history: History, returns: Mapping[str, Mapping[str, Any]]) -> None:
    found = set()
    for operation in history.operations:
        if operation.key in found:
            raise BadHistory(f"the key {operation.key} was used for two attempts")
        found.add(operation.key)
        fields = returns.get(operation.key)
        if fields is not None:
            operation.returned = fields["at"]
            for name in ("kind", "id", "reason", "conflict", "lock"):
                if name in fields:
                    setattr(operation, name, fields[name])
    if stray := sorted(set(returns) - found):
        raise BadHistory(f"{stray[0]} returned and was never invoked")


class Recording(Protocol):
    """A recorder of what happens, in the order in which it happens."""

    def invoked(self, operation: Operation) -> None: ...
    def returned(self, operation: Operation) -> None: ...
    def seen(self, seen: Seen) -> None: ...
    def observed(self, observed: Observed) -> None: ...


class Memory:
    """Keeps the history in memory; `on_line` is told in words what was taken down."""

    def __init__(self, history: History, *, on_line: Callable[[str], None] = lambda line: None) -> None:
        self._history = history
        self._on_line = on_line

    def invoked(self, operation: Operation) -> None:
        self._history.operations.append(operation)
        locks = {"read": operation.read, "write": operation.write, "append": operation.append}
        spelt = ", ".join(f"{mode} {lock:x}" for mode, found in locks.items() for lock in found)
        self._on_line(f"asks for {operation.key} in partition {operation.partition} at mark {operation.mark} ({spelt})")

    def returned(self, operation: Operation) -> None:
        detail = "" if operation.id is None else f" as {operation.id}"
        if operation.reason is not None:
            detail = f": {operation.reason}, conflict {operation.conflict}"
        self._on_line(f"{operation.key} is {operation.kind}{detail}")

    def seen(self, seen: Seen) -> None:
        self._history.seen.append(seen)
        self._on_line(f"is given {seen.records[0][0]} to {seen.records[-1][0]} of partition {seen.partition}")

    def observed(self, observed: Observed) -> None:
        self._history.observed.append(observed)
        self._on_line(f"is told the mark {observed.mark} of partition {observed.partition}")


class Writer:
    """Appends lines to one file. `invoked` reaches the file before it returns, so that nothing is in the log that no line
    knows of, even when this process is killed right after."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, type: str, fields: Mapping[str, object]) -> None:
        self._file.write(json.dumps({"type": type, **fields}, separators=(",", ":")) + "\n")
        self._file.flush()

    def invoked(self, operation: Operation) -> None:
        names = (
            "key", "client", "partition", "mark", "read", "write", "append", "header", "crc", "together", "time_seen",
        )  # fmt: skip
        self._write("invoke", {"at": operation.invoked, **{name: getattr(operation, name) for name in names}})

    def returned(self, operation: Operation) -> None:
        fields: dict[str, object] = {"key": operation.key, "at": operation.returned, "kind": operation.kind}
        if operation.kind == "committed":
            fields["id"] = operation.id
        if operation.kind == "rejected":
            fields |= {"reason": operation.reason, "conflict": operation.conflict, "lock": operation.lock}
        self._write("return", fields)

    def seen(self, seen: Seen) -> None:
        names = ("name", "partition", "start", "records", "at", "group", "times", "is_whole")
        self._write("seen", {name: getattr(seen, name) for name in names})

    def observed(self, observed: Observed) -> None:
        names = ("client", "partition", "invoked", "returned", "mark", "is_confirmed")
        self._write("observed", {name: getattr(observed, name) for name in names})

    def standing(self, standing: Standing) -> None:
        names = ("name", "client", "partition", "epoch", "barrier")
        self._write("standing", {name: getattr(standing, name) for name in names})

    def log(self, partition: int, records: Iterable[LogRecord], *, first: int = 0, source: str = FINAL) -> None:
        names = ("key", "crc", "header", "generation", "time", "follows", "locks")
        rows = [[getattr(record, name) for name in names] for record in records]
        self._write("log", {"source": source, "partition": partition, "first": first, "records": rows})


def save(history: History, path: Path) -> None:
    writer = Writer(path)
    for operation in history.operations:
        writer.invoked(operation)
        if operation.returned is not None:
            writer.returned(operation)
    for seen in history.seen:
        writer.seen(seen)
    for observed in history.observed:
        writer.observed(observed)
    for standing in history.standings:
        writer.standing(standing)
    for source, partitions in history.logs.items():
        for partition, ids in partitions.items():
            for id, record in ids.items():
                writer.log(partition, [record], first=id, source=source)
    writer.close()
