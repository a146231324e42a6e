"""Whether a history could have come from a log that keeps its promises: one pass over each log, one sweep over time.

No search is needed. The ids are the order, and every transaction says with its mark how much of it the client had seen.
So serializability is a fact about each record: nothing that it depends on was marked between its mark and its id. The
dumb twin of all this, which compares everything with everything, is in `tests/checker/twin.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

from tests.checker.history import FINAL, UNTIMED, History, LogRecord, Operation, Seen, Standing
from waltzd.protocol.locks import Mode

LIMIT = 20
"""How many findings of one kind are told in a report; all are counted."""

EXPLAINED = {
    "lost": "it was acknowledged and is not in the log",
    "moved": "it was acknowledged under one id and is in the log under another",
    "altered": "other bytes or another header than were asked for",
    "duplicate": "one attempt is in the log twice",
    "phantom": "a record that nobody asked for",
    "rejected present": "the client was told that it is not in the log, and there it is",
    "gap": "ids are missing from the log",
    "feed": "a reader was not given exactly the log",
    "group": "readers of one group were given different transactions under one id",
    "lock": "a lock that was checked had been marked after what the client had seen",
    "mark ahead": "a client had seen what did not exist yet",
    "real time": "acknowledged, observed or fed before another was begun, and behind it in the log",
    "observed": "a high-water mark that was never true while it was asked for, or went back for one client",
    "generation": "an earlier owner wrote behind a later one",
    "false conflict": "refused because of a transaction that does not conflict",
    "replica": "a replica holds another record than the log",
    "torn apart": "a group of transactions is not in the log as a whole, in a row, with one outcome",
    "half a group": "a view took a part of a group of transactions at once",
    "time fell": "the time of a transaction is before that of one in front of it",
    "two times": "one transaction has different times in different places",
    "cause": "the time of a transaction is before one that its client had seen",
    "zombie": "an instance got it in after a newer one of its name had mounted the partition",
    "other locks": "the log says other locks, or another group, than were asked for",
}
"""All kinds of findings."""


@dataclass(frozen=True, order=True)
class Finding:
    kind: str
    partition: int
    id: int
    """-1 where no id is concerned."""
    key: str = ""
    detail: str = field(default="", compare=False)

    def __str__(self) -> str:
        where = f"partition {self.partition}" + (f", id {self.id}" if self.id >= 0 else "")
        return f"{self.kind}: {where}{', ' + self.key if self.key else ''}: {self.detail or EXPLAINED.get(self.kind, '')}"


@dataclass(frozen=True)
class Verdict:
    findings: tuple[Finding, ...]
    counts: dict[str, int]
    explained: Mapping[str, str] = field(default_factory=lambda: EXPLAINED)
    """What each kind of finding means."""

    @property
    def is_sound(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        numbers = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        if self.is_sound:
            return f"sound: {numbers}"
        kinds = Counter(finding.kind for finding in self.findings)
        lines = [f"NOT SOUND: {numbers}"]
        for kind, count in sorted(kinds.items()):
            lines.append(f"  {count} × {kind}: {self.explained[kind]}")
            lines += [f"    {finding}" for finding in self.findings if finding.kind == kind][:LIMIT]
            if count > LIMIT:
                lines.append(f"    … and {count - LIMIT} more")
        return "\n".join(lines)


def judge(history: History) -> Verdict:
    case = _Case(history)
    findings = [
        *case.gaps(),
        *case.records(),
        *case.acknowledgements(),
        *case.locks(),
        *case.time(),
        *case.feeds(),
        *case.groups(),
        *case.replicas(),
        *case.torn_apart(),
        *case.halves(),
        *case.clocks(),
        *case.words_of_batches(),
        *case.zombies(),
    ]
    kinds = Counter(operation.kind for operation in history.operations)
    counts = {
        "attempts": len(history.operations),
        **{kind: kinds[kind] for kind in ("committed", "rejected", "unknown", "declined")},
        "of the unknown in the log": sum(
            operation.kind == "unknown" and operation.key in case.places for operation in history.operations
        ),
        "records": sum(map(len, case.log.values())),
        "fed": sum(len(seen.records) for seen in history.seen),
    }
    return Verdict(tuple(sorted(findings)), counts)


def _barrier(standing: Standing) -> int:
    return standing.barrier


class _Case:
    def __init__(self, history: History) -> None:
        self.history = history
        self.log = history.logs.get(FINAL, {})
        self.by_key = {operation.key: operation for operation in history.operations}
        self.places: dict[str, tuple[int, int]] = {}
        """Where each key is first found."""
        self.together: dict[str, list[Operation]] = {}
        """Groups of transactions."""
        for operation in history.operations:
            if operation.together:
                self.together.setdefault(operation.together, []).append(operation)

    def _ordered(self) -> Iterator[tuple[int, int, LogRecord]]:
        for partition in sorted(self.log):
            ids = self.log[partition]
            for id in sorted(ids):
                yield partition, id, ids[id]

    def zombies(self) -> Iterator[Finding]:
        """An instance ends at the lowest barrier of all that are newer."""
        ends: dict[tuple[str, int], Standing] = {}
        by_age = sorted(self.history.standings, key=lambda one: (one.name, one.partition, -one.epoch))
        for _, found in groupby(by_age, key=lambda one: (one.name, one.partition)):
            newer: list[Standing] = []
            """The one with the lowest barrier of all that are newer, if there is one."""
            for _, of_an_age in groupby(found, key=lambda one: one.epoch):
                instances = list(of_an_age)
                for standing in instances if newer else ():
                    place = standing.client, standing.partition
                    ends[place] = min(newer[0], ends.get(place, newer[0]), key=_barrier)
                newer = [min([*instances, *newer], key=_barrier)]
        for partition, id, record in self._ordered():
            operation = self.by_key.get(record.key)
            end = None if operation is None else ends.get((operation.client, partition))
            if end is not None and id > end.barrier:
                detail = f"{end.client} with epoch {end.epoch} stood there at the barrier {end.barrier}"
                yield Finding("zombie", partition, id, record.key, detail)

    def gaps(self) -> Iterator[Finding]:
        for partition, ids in self.log.items():
            last = max(ids, default=-1)
            if len(ids) == last + 1:
                continue
            missing = [id for id in range(last + 1) if id not in ids]
            yield Finding(
                "gap", partition, missing[0], detail=f"{len(missing)} of {last + 1} ids are missing from {missing[0]}"
            )

    def records(self) -> Iterator[Finding]:
        """Each record: once, asked for, as it was asked for, and by owners in their order."""
        newest: dict[int, int] = {}
        for partition, id, record in self._ordered():
            key = record.key
            if key in self.places:
                yield Finding("duplicate", partition, id, key, f"also at {self.places[key]}")
            else:
                self.places[key] = (partition, id)
            operation = self.by_key.get(key)
            if operation is None:
                yield Finding("phantom", partition, id, key)
            elif (record.crc, record.header) != (operation.crc, operation.header):
                yield Finding("altered", partition, id, key)
            elif operation.partition != partition and operation.kind != "committed":
                yield Finding("moved", partition, id, key, f"it was meant for partition {operation.partition}")
            if record.generation >= 0:
                if record.generation < newest.get(partition, -1):
                    detail = f"generation {record.generation} behind generation {newest[partition]}"
                    yield Finding("generation", partition, id, key, detail)
                newest[partition] = max(newest.get(partition, -1), record.generation)

    def acknowledgements(self) -> Iterator[Finding]:
        for operation in self.history.operations:
            place = self.places.get(operation.key)
            if operation.kind == "committed":
                assert operation.id is not None
                if place is None:
                    yield Finding("lost", operation.partition, operation.id, operation.key, self._how_lost(operation))
                elif place != (operation.partition, operation.id):
                    detail = f"acknowledged at {(operation.partition, operation.id)}, found at {place}"
                    yield Finding("moved", operation.partition, operation.id, operation.key, detail)
            elif operation.kind in ("rejected", "declined"):
                if place is not None:
                    detail = f"{operation.kind} ({operation.reason}), found at {place}"
                    yield Finding("rejected present", place[0], place[1], operation.key, detail)
                if operation.reason == "CONFLICT":
                    yield from self._false_conflict(operation)

    def _how_lost(self, operation: Operation) -> str:
        ids = self.log.get(operation.partition, {})
        if not ids:
            return "the log is empty"
        assert operation.id is not None
        if operation.id in ids:
            return f"the log holds {ids[operation.id].key} there"
        first, last = min(ids), max(ids)
        if operation.id > last:
            return f"behind the end of the log, which is {last}"
        return f"in front of the log, which begins at {first}" if operation.id < first else "in the middle of the log"

    def _false_conflict(self, operation: Operation) -> Iterator[Finding]:
        """A refusal that names a committed transaction can be checked: it marks a lock that was asked for, unseen. A group
        is refused for what is in the way of one of it."""
        record = self.log.get(operation.partition, {}).get(operation.conflict)
        cause = self.by_key.get(record.key) if record else None
        checked = {lock for one in self.together.get(operation.together, [operation]) for lock in one.read + one.write}
        if (
            cause is None
            or operation.conflict <= operation.mark
            or not checked.intersection(cause.write + cause.append)
            or (operation.lock is not None and operation.lock not in checked)
        ):
            detail = f"it had seen {operation.mark} and was refused because of {operation.conflict}"
            yield Finding("false conflict", operation.partition, operation.conflict, operation.key, detail)

    def locks(self) -> Iterator[Finding]:
        """For each record, the last marking of every lock that it checked is not above its mark. Transactions of one group
        are decided together, so none is in the way of another."""
        marked: dict[tuple[int, int], int] = {}
        late: list[tuple[int, int, int]] = []
        group = ""
        for partition, id, record in self._ordered():
            operation = self.by_key.get(record.key)
            if operation is None:
                continue
            if not operation.together or operation.together != group:
                marked.update(((at, lock), marking) for at, lock, marking in late)
                late, group = [], operation.together
            if operation.mark >= id:
                yield Finding("mark ahead", partition, id, record.key, f"the client said it had seen {operation.mark}")
            for lock in {*operation.read, *operation.write}:
                last = marked.get((partition, lock), -1)
                if last > operation.mark:
                    detail = f"lock {lock:#x} was marked by {last}; the client had seen {operation.mark}"
                    yield Finding("lock", partition, id, record.key, detail)
            late += [(partition, lock, id) for lock in operation.write + operation.append]

    def time(self) -> Iterator[Finding]:
        """What was acknowledged, observed or fed before something began is in front of it; equal times are concurrent."""
        known = self._known()
        begun = [
            (operation.invoked, ("", self.places[operation.key][0]), self.places[operation.key][1], operation.key)
            for operation in self.history.operations
            if operation.key in self.places
        ]
        everybody = [(at, ("", partition), id) for at, partition, id, _ in known]
        for floor, (_, partition), id, key in _floors(everybody, begun):
            if id <= floor:
                detail = f"id {id}, begun after id {floor} had been acknowledged, observed or fed"
                yield Finding("real time", partition, id, key, detail)
        ends = {partition: max(ids, default=-1) for partition, ids in self.log.items()}
        looks = [
            (look.invoked, ("" if look.is_confirmed else look.client, look.partition), look.mark, look.client)
            for look in self.history.observed
        ]
        each = [(at, (client, partition), id) for at, partition, id, client in known]
        for floor, (_, partition), mark, client in _floors(everybody + each, looks):
            if mark < floor:
                yield Finding("observed", partition, mark, client, f"{mark} was observed after {floor} was known")
            elif mark > ends.get(partition, -1):
                yield Finding("observed", partition, mark, client, f"{mark} was observed and is not in the log")

    def _known(self) -> list[tuple[int, int, int, str]]:
        """When which client was told that an id of a partition is committed."""
        history = self.history
        return [
            *(
                (operation.returned, operation.partition, operation.id, operation.client)
                for operation in history.operations
                if operation.kind == "committed" and operation.returned is not None and operation.id is not None
            ),
            *((look.returned, look.partition, look.mark, look.client) for look in history.observed),
            *((seen.at, seen.partition, seen.records[-1][0], seen.name) for seen in history.seen if _is_timed(seen)),
        ]

    def groups(self) -> Iterator[Finding]:
        """Readers of one group are given the same under the same id, also where the log differs in the end."""
        given: dict[tuple[str, int, int], tuple[str, int]] = {}
        for seen in self.history.seen:
            if not seen.group:
                continue
            differing = [
                id
                for id, key, crc in seen.records
                if given.setdefault((seen.group, seen.partition, id), (key, crc)) != (key, crc)
            ]
            if differing:
                yield Finding("group", seen.partition, differing[0], seen.name)

    def feeds(self) -> Iterator[Finding]:
        """Every reader was given the log from where it stood, id by id. One finding for each stretch is enough."""
        for seen in self.history.seen:
            log = self.log.get(seen.partition, {})
            for expected, (id, key, crc) in enumerate(seen.records, seen.start + 1):
                record = log.get(id)
                if id != expected:
                    detail = f"{seen.name} was given {id} where {expected} is next"
                elif record is None:
                    detail = f"{seen.name} was given {key}, which is not in the log"
                elif (record.key, record.crc) != (key, crc):
                    detail = f"{seen.name} was given {key}, the log holds {record.key}"
                else:
                    continue
                yield Finding("feed", seen.partition, id, seen.name, detail)
                break

    def replicas(self) -> Iterator[Finding]:
        """What stands on a replica above the end of the log was never committed, and may be anything."""
        for source, partitions in self.history.logs.items():
            for partition, ids in partitions.items():
                log = self.log.get(partition, {})
                for id in sorted(ids) if source != FINAL else ():
                    if id in log and log[id] != ids[id]:
                        yield Finding("replica", partition, id, source, f"holds {ids[id].key}, the log {log[id].key}")
                        break

    def torn_apart(self) -> Iterator[Finding]:
        """Groups of transactions: all or none, in a row, with one outcome."""
        for first, members in self.together.items():
            places = [self.places.get(one.key) for one in members]
            found = [place for place in places if place is not None]
            start = found[0] if found else (members[0].partition, -1)
            row = [(start[0], start[1] + number) for number in range(len(members))]
            kinds = [one.kind for one in members]
            if (found and places != row) or len(set(kinds)) > 1:
                detail = f"found at {places}, told {', '.join(kinds)}"
                yield Finding("torn apart", *start, first, detail)

    def _goes_on(self, partition: int, id: int) -> bool:
        """Whether the transaction behind this one belongs to its group."""
        pair = [self.log.get(partition, {}).get(at) for at in (id, id + 1)]
        groups = [one.together if record is not None and (one := self.by_key.get(record.key)) else "" for record in pair]
        return bool(groups[0]) and groups[0] == groups[1]

    def halves(self) -> Iterator[Finding]:
        for seen in self.history.seen:
            if not seen.is_whole or not seen.records:
                continue
            for id in (seen.records[0][0] - 1, seen.records[-1][0]):
                if self._goes_on(seen.partition, id):
                    yield Finding("half a group", seen.partition, id, seen.name, f"{id} and {id + 1} belong together")

    def clocks(self) -> Iterator[Finding]:
        """Times never fall, each is the same for everybody, and effects are never before their causes."""
        times = {(partition, id): record.time for partition, id, record in self._ordered() if record.time != UNTIMED}
        newest: dict[int, int] = {}
        for partition, id, record in self._ordered():
            before = newest.get(partition, UNTIMED)
            if record.time < before:
                yield Finding("time fell", partition, id, record.key, f"{_time(record.time)} behind {_time(before)}")
            newest[partition] = max(before, record.time)
            operation = self.by_key.get(record.key)
            if operation is not None and record.time != UNTIMED and record.time < operation.time_seen:
                detail = f"{_time(record.time)}, and its client had seen {_time(operation.time_seen)}"
                yield Finding("cause", partition, id, record.key, detail)
        for source, partitions in self.history.logs.items():
            for partition, ids in partitions.items():
                for id in sorted(ids) if source != FINAL else ():
                    if times.get((partition, id), ids[id].time) != ids[id].time != UNTIMED:
                        yield Finding("two times", partition, id, source)
                        break
        for seen in self.history.seen:
            before = UNTIMED
            for (id, _, _), time in zip(seen.records, seen.times, strict=False):
                if time < before:
                    yield Finding("time fell", seen.partition, id, seen.name, f"{_time(time)} behind {_time(before)}")
                    break
                before = time
            for (id, _, _), time in zip(seen.records, seen.times, strict=False):
                if times.get((seen.partition, id), time) != time != UNTIMED:
                    yield Finding("two times", seen.partition, id, seen.name)
                    break

    def words_of_batches(self) -> Iterator[Finding]:
        """What batches say beside the records: locks and groups are those that were asked for."""
        for partition, id, record in self._ordered():
            operation = self.by_key.get(record.key)
            if operation is None:
                continue
            follows = bool(operation.together) and operation.together != operation.key
            if record.locks is not None and set(record.locks) != set(_locks(operation)):
                yield Finding("other locks", partition, id, record.key, f"{record.locks}, not {_locks(operation)}")
            elif record.follows not in (None, follows):
                yield Finding("other locks", partition, id, record.key, f"it goes on with a group: {record.follows}")


def _locks(operation: Operation) -> list[tuple[int, int]]:
    modes = ((operation.read, Mode.READ), (operation.write, Mode.WRITE), (operation.append, Mode.APPEND))
    return [(lock, int(mode)) for locks, mode in modes for lock in locks]


def _time(time: int) -> str:
    return "no time" if time == UNTIMED else f"{time / 1e6:.6f} s"


def _is_timed(seen: Seen) -> bool:
    return seen.at >= 0 and bool(seen.records)


Place: TypeAlias = tuple[str, int]
"""The client that was told, empty for any client, and the partition."""


def _floors(
    known: list[tuple[int, Place, int]], asked: list[tuple[int, Place, int, str]]
) -> Iterator[tuple[int, Place, int, str]]:
    """For each (time, place, id, name) that was asked: the highest id of its place that was known before."""
    known.sort()
    asked.sort()
    highest: dict[Place, int] = {}
    at = 0
    for time, place, id, name in asked:
        while at < len(known) and known[at][0] < time:
            _, where, mark = known[at]
            highest[where] = max(highest.get(where, -1), mark)
            at += 1
        yield highest.get(place, -1), place, id, name
