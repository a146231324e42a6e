"""The dumb twin of the checker: every rule as its definition says, by comparing everything with everything."""

from __future__ import annotations

from tests.checker.history import FINAL, History, LogRecord, Operation
from tests.checker.verdict import Finding


def judge_slowly(history: History) -> set[Finding]:
    log = [
        (partition, id, record)
        for partition, ids in history.logs.get(FINAL, {}).items()
        for id, record in sorted(ids.items())
    ]
    asked = {operation.key: operation for operation in history.operations}
    return {
        *_by_record(log, asked),
        *_by_operation(history, log, asked),
        *_by_pair(history, log),
        *_by_reader(history, log),
    }


Placed = list[tuple[int, int, LogRecord]]


def _by_record(log: Placed, asked: dict[str, Operation]) -> list[Finding]:
    found = []
    for partition in {partition for partition, _, _ in log}:
        ids = {id for at, id, _ in log if at == partition}
        missing = [id for id in range(max(ids)) if id not in ids]
        if missing:
            found.append(Finding("gap", partition, missing[0]))
    places = sorted((partition, id, record.key) for partition, id, record in log)
    for partition, id, record in log:
        if any(key == record.key and (at, other) < (partition, id) for at, other, key in places):
            found.append(Finding("duplicate", partition, id, record.key))
        if any(
            at == partition and other < id and earlier.generation > record.generation >= 0 for at, other, earlier in log
        ):
            found.append(Finding("generation", partition, id, record.key))
        if record.key not in asked:
            found.append(Finding("phantom", partition, id, record.key))
            continue
        operation = asked[record.key]
        if (operation.crc, operation.header) != (record.crc, record.header):
            found.append(Finding("altered", partition, id, record.key))
        elif operation.kind != "committed" and operation.partition != partition:
            found.append(Finding("moved", partition, id, record.key))
        if operation.mark >= id:
            found.append(Finding("mark ahead", partition, id, record.key))
        for at, other, earlier in log:
            cause = asked.get(earlier.key)
            if cause is not None and at == partition and operation.mark < other < id and _conflict(operation, cause):
                found.append(Finding("lock", partition, id, record.key))
    return found


def _conflict(operation: Operation, cause: Operation) -> bool:
    return any(lock in operation.read + operation.write for lock in cause.write + cause.append)


def _by_operation(history: History, log: Placed, asked: dict[str, Operation]) -> list[Finding]:
    found = []
    for operation in history.operations:
        places = sorted((partition, id) for partition, id, record in log if record.key == operation.key)
        if operation.kind == "committed":
            assert operation.id is not None
            if not places:
                found.append(Finding("lost", operation.partition, operation.id, operation.key))
            elif places[0] != (operation.partition, operation.id):
                found.append(Finding("moved", operation.partition, operation.id, operation.key))
        if operation.kind in ("rejected", "declined") and places:
            found.append(Finding("rejected present", *places[0], operation.key))
        if operation.kind in ("rejected", "declined") and operation.reason == "REAL":
            causes = [
                asked[record.key]
                for partition, id, record in log
                if (partition, id) == (operation.partition, operation.conflict) and record.key in asked
            ]
            is_real = any(_conflict(operation, cause) for cause in causes) and operation.conflict > operation.mark
            is_named = operation.lock is None or operation.lock in operation.read + operation.write
            if not (is_real and is_named):
                found.append(Finding("false conflict", operation.partition, operation.conflict, operation.key))
    return found


def _by_pair(history: History, log: Placed) -> list[Finding]:
    found = []
    for partition, id, record in log:
        if any(
            key == record.key and (at, other) < (partition, id) for at, other, key in ((p, i, r.key) for p, i, r in log)
        ):
            continue  # a duplicate has its own finding; its time is that of the first
        for later in (operation for operation in history.operations if operation.key == record.key):
            for sooner in history.operations:
                if sooner.kind != "committed" or sooner.returned is None or sooner.partition != partition:
                    continue
                assert sooner.id is not None
                if sooner.returned < later.invoked and sooner.id >= id:
                    found.append(Finding("real time", partition, id, record.key))
            for look in history.observed:
                if look.partition == partition and look.returned < later.invoked and look.mark >= id:
                    found.append(Finding("real time", partition, id, record.key))
            for seen in history.seen:
                if seen.partition == partition and 0 <= seen.at < later.invoked and seen.records[-1:] >= [(id, "", 0)]:
                    found.append(Finding("real time", partition, id, record.key))
    for look in history.observed:
        ends = [id for partition, id, _ in log if partition == look.partition]
        told = [
            (operation.returned, operation.client, operation.id)
            for operation in history.operations
            if operation.kind == "committed" and operation.partition == look.partition
        ]
        told += [
            (other.returned, other.client, other.mark) for other in history.observed if other.partition == look.partition
        ]
        told += [
            (seen.at, seen.name, seen.records[-1][0])
            for seen in history.seen
            if seen.partition == look.partition and seen.at >= 0 and seen.records
        ]
        is_low = any(
            at is not None
            and at < look.invoked
            and mark is not None
            and mark > look.mark
            and (look.is_confirmed or client == look.client)
            for at, client, mark in told
        )
        if is_low or look.mark > max(ends, default=-1):
            found.append(Finding("observed", look.partition, look.mark, look.client))
    return found


def _by_reader(history: History, log: Placed) -> list[Finding]:
    found = []
    for seen in history.seen:
        truth = {id: (record.key, record.crc) for partition, id, record in log if partition == seen.partition}
        for number, (id, key, crc) in enumerate(seen.records):
            if id != seen.start + 1 + number or truth.get(id) != (key, crc):
                found.append(Finding("feed", seen.partition, id, seen.name))
                break
    for number, seen in enumerate(history.seen):
        earlier = [
            other
            for other in history.seen[:number]
            if seen.group and (other.group, other.partition) == (seen.group, seen.partition)
        ]
        before = {other_id: rest for other in reversed(earlier) for other_id, *rest in reversed(other.records)}
        own = {id: [key, crc] for id, key, crc in reversed(seen.records)}
        for id, key, crc in seen.records if seen.group else []:
            if [key, crc] != before.get(id, own[id]):
                found.append(Finding("group", seen.partition, id, seen.name))
                break
    for source, partitions in history.logs.items():
        for partition, ids in partitions.items():
            wrong = [
                id for at, id, record in log if at == partition and source != FINAL and id in ids and ids[id] != record
            ]
            if wrong:
                found.append(Finding("replica", partition, min(wrong), source))
    return found
