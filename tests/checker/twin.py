"""The dumb twin of the checker: every rule as its definition says, by comparing everything with everything."""

from __future__ import annotations

from tests.checker.history import FINAL, UNTIMED, History, LogRecord, Operation
from tests.checker.verdict import Finding
from waltzd.protocol.locks import Mode


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
        *_by_group(history, log, asked),
        *_by_time(history, log, asked),
        *_by_instance(history, log, asked),
    }


Placed = list[tuple[int, int, LogRecord]]


def _by_instance(history: History, log: Placed, asked: dict[str, Operation]) -> list[Finding]:
    return [
        Finding("zombie", partition, id, record.key)
        for partition, id, record in log
        for older in history.standings
        for newer in history.standings
        if record.key in asked
        and asked[record.key].client == older.client
        and (older.name, older.partition) == (newer.name, newer.partition) == (older.name, partition)
        and older.epoch < newer.epoch
        and id > newer.barrier
    ]


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
            is_own = bool(operation.together) and _are_together(log, asked, operation.together, partition, other, id)
            is_between = at == partition and operation.mark < other < id
            if cause is not None and is_between and not is_own and _conflict(operation, cause):
                found.append(Finding("lock", partition, id, record.key))
    return found


def _conflict(operation: Operation, cause: Operation) -> bool:
    return any(lock in operation.read + operation.write for lock in cause.write + cause.append)


def _are_together(log: Placed, asked: dict[str, Operation], group: str, partition: int, first: int, last: int) -> bool:
    """All that was asked for, from one place in a log to another, is of this group."""
    between = [record.key for at, id, record in log if at == partition and first <= id <= last]
    return all(asked[key].together == group for key in between if key in asked)


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
        if operation.kind in ("rejected", "declined") and operation.reason == "CONFLICT":
            causes = [
                asked[record.key]
                for partition, id, record in log
                if (partition, id) == (operation.partition, operation.conflict) and record.key in asked
            ]
            group = [one for one in history.operations if operation.together and one.together == operation.together]
            members = group or [operation]
            is_real = any(_conflict(one, cause) for cause in causes for one in members)
            is_real = is_real and operation.conflict > operation.mark
            is_named = operation.lock is None or any(operation.lock in one.read + one.write for one in members)
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


def _by_group(history: History, log: Placed, asked: dict[str, Operation]) -> list[Finding]:
    found = []
    for group in {operation.together for operation in history.operations} - {""}:
        members = [operation for operation in history.operations if operation.together == group]
        places = [
            min([(partition, id) for partition, id, record in log if record.key == one.key], default=None)
            for one in members
        ]
        there = [place for place in places if place is not None]
        is_whole = (
            all(place == (there[0][0], there[0][1] + number) for number, place in enumerate(places)) if there else True
        )
        if not is_whole or any(one.kind != members[0].kind for one in members):
            found.append(Finding("torn apart", *(there[0] if there else (members[0].partition, -1)), group))
    for seen in history.seen:
        for id in (seen.records[0][0] - 1, seen.records[-1][0]) if seen.is_whole and seen.records else ():
            pair = [
                asked[record.key].together
                for partition, at, record in sorted(log, key=lambda one: one[:2])
                if partition == seen.partition and at in (id, id + 1) and record.key in asked
            ]
            if len(pair) == 2 and pair[0] == pair[1] != "":
                found.append(Finding("half a group", seen.partition, id, seen.name))
    return found


def _by_time(history: History, log: Placed, asked: dict[str, Operation]) -> list[Finding]:
    found = []
    for partition, id, record in log:
        if any(at == partition and other < id and earlier.time > record.time for at, other, earlier in log):
            found.append(Finding("time fell", partition, id, record.key))
        operation = asked.get(record.key)
        if operation is None:
            continue
        if UNTIMED < record.time < operation.time_seen:
            found.append(Finding("cause", partition, id, record.key))
        wanted = {(lock, Mode.READ) for lock in operation.read} | {(lock, Mode.WRITE) for lock in operation.write}
        wanted |= {(lock, Mode.APPEND) for lock in operation.append}
        is_behind = operation.together not in ("", operation.key)
        if (record.locks is not None and set(record.locks) != wanted) or record.follows is (not is_behind):
            found.append(Finding("other locks", partition, id, record.key))
    true = {(partition, id): record.time for partition, id, record in log if record.time != UNTIMED}
    told = [
        (source, partition, [(id, ids[id].time) for id in sorted(ids)])
        for source, partitions in history.logs.items()
        for partition, ids in partitions.items()
        if source != FINAL
    ]
    for seen in history.seen:
        rows = [(row[0], time) for row, time in zip(seen.records, seen.times, strict=False)]
        told.append((seen.name, seen.partition, rows))
        falls = [rows[n][0] for n in range(len(rows)) if any(rows[before][1] > rows[n][1] for before in range(n))]
        found += [Finding("time fell", seen.partition, id, seen.name) for id in falls[:1]]
    for name, partition, rows in told:
        differ = [id for id, time in rows if time != UNTIMED and true.get((partition, id), time) != time]
        found += [Finding("two times", partition, id, name) for id in differ[:1]]
    return found
