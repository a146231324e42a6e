"""Table of rules about the health of a cluster, over facts collected elsewhere. No I/O.

Each rule finds problems, grades them and names a fix. The table has three readers. `status` shows what is wrong now
(`judge`), one reason for each cause, however many partitions it affects. `doctor` shows one check for each rule
(`diagnose`). The alerts of `configs/alert-rules.yml` name their rule and repeat its fix, severity and minutes; a test
compares them. Readiness of a daemon (`waltzd.daemon.readiness`) is decided by the daemon itself; a test proves that a
check fails whenever a daemon is not ready.

A check that could not be made is UNKNOWN, never PASS. The limits stand here, each with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from waltzctl.health.facts import Check, Facts, Found, Grade, Health, Reason, Verdict, over, under, unsure, warn
from waltzctl.health.troubles import consumer_groups, coordination, documents, margins, moves, processes, replicas
from waltzctl.placement.replica_assignment import crowded, sizes
from waltzctl.placement.replica_assignment import together as together_in_one
from waltzctl.shell.numbers import format_partitions
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, silence
from waltzd.cluster.documents import KEEP_ALL
from waltzd.protocol.descriptions import StorageDescription
from waltzd.protocol.quorum import majority

CLOCK_WARN_MS, CLOCK_FAIL_MS = 500.0, 60_000.0
"""Milliseconds between the clocks of two daemons. No decision of Waltz depends on clocks. Half a second confuses the
order of events, and holds back transaction times for as long when a partition moves to a server whose clock is behind.
A minute breaks certificates, and owners reject times that clients have seen elsewhere (`waltzd.server.core.step`)."""
FLUSH_WARN_MS, FLUSH_FAIL_MS = 50.0, 1_000.0
"""Milliseconds within which 99 of 100 groups of writes are flushed. A disk with a power-protected write cache flushes
in well under 5 ms."""
FREE_WARN, FREE_FAIL = 0.10, 0.03
"""Share of free bytes in the sum of free bytes and bytes of replicas, so that the limit fits small and large disks."""
SCRUB_PERIODS_WARN = 3
"""Scrub periods without a completed round. The age counts from the start of a round, so two are usual."""
FULL_WARN_HOURS, FULL_FAIL_HOURS = 48.0, 6.0
"""Hours until the disk is full, at the average write rate since the storage started."""
CHECK_WARN_HOURS = 50.0
"""Hours since a check of the archive. Each object is checked within a day, and the age counts from the start of a
round."""
PACE_SECONDS = 600.0
"""Seconds that a storage must have run before its write rate is used."""
FILES_WARN, FILES_FAIL = 0.6, 0.9
"""Share of the file descriptors that a process may open."""
DAYS_WARN, DAYS_FAIL = 30.0, 7.0
LAG_WARN = 100_000
"""Ids; a live replica is never this far behind."""
BACKUP_MS_WARN = 120_000
"""Milliseconds for which a committed transaction is not backed up; ten seconds are usual."""
COORDINATOR_WARN_MS, COORDINATOR_FAIL_MS = 50.0, 1_000.0
OPEN_SHOWN = 3
AGAIN = "check again when all processes answer"


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    find: Callable[[Facts], Found]
    fix: str
    needs: tuple[str, ...] = ()
    """What must answer before the rule passes: "servers", "storages" or "ZooKeeper". Without ZooKeeper the rule is not
    run."""
    is_now: bool = False
    """Whether the rule finds what is wrong already; other rules find what will go wrong next."""
    alerts: Mapping[str, tuple[Grade, int]] = field(default_factory=dict)
    """Alerts of this rule: name → grade (FAIL is "critical", WARN is "warning") and minutes that it has to last."""


def judge(facts: Facts) -> Verdict:
    found = facts.snapshot
    ordinary = [view for view in found.partitions if not view.is_group_log]
    everything = [reason for rule in RULES if rule.is_now for reason in _found(rule, facts)[0]]
    reasons = [reason for reason in everything if reason.key]
    notes = (*(reason.sentence for reason in everything if reason.is_note), *_forks(found))
    reasons.sort(key=lambda reason: not reason.stops)
    opened = sum(view.is_open for view in ordinary)
    health = Health.HEALTHY if not reasons else Health.DEGRADED if opened else Health.DOWN
    return Verdict(health=health, sentence=_sentence(found, opened), reasons=tuple(reasons), notes=notes)


def diagnose(facts: Facts) -> list[Check]:
    """Return one check for each rule, in the order in which an operator should read them."""
    return [_check(rule, facts) for rule in RULES]


def with_since(reasons: Iterable[Reason], before: Mapping[str, str], now: str) -> tuple[tuple[Reason, ...], dict[str, str]]:
    """Fill in `since` from the last report, and return the reasons with what to remember for the next report."""
    dated = tuple(replace(reason, since=before.get(reason.key, now)) for reason in reasons)
    return dated, {reason.key: reason.since or now for reason in dated}


def _found(rule: Rule, facts: Facts) -> tuple[list[Reason], str]:
    """Run a rule; return its findings, and the sentence for the case that there are none."""
    if "ZooKeeper" in rule.needs and facts.lost is not None:
        return [Reason(grade=Grade.UNKNOWN, sentence=f"ZooKeeper {silence(facts.lost.cause)}")], ""
    passed = ""

    def find() -> Iterator[Reason]:
        nonlocal passed
        passed = yield from rule.find(facts)

    found = list(find())
    for kind, views in (("servers", facts.snapshot.servers), ("storages", facts.snapshot.storages)):
        if kind in rule.needs:
            silent = {view.meta.name: view.error for view in views if view.reported is None}
            found += [
                Reason(grade=Grade.UNKNOWN, sentence=f"{name} {'does not answer' if why is None else silence(why)}")
                for name, why in silent.items()
            ]
    return [replace(one, next_step=one.next_step or rule.fix) for one in found if one.grade is not Grade.PASS], passed


def _check(rule: Rule, facts: Facts) -> Check:
    """Return the worst finding of a rule with all other findings; an UNKNOWN finding prevents PASS."""
    found, passed = _found(rule, facts)
    if not found:
        return Check(name=rule.name, grade=Grade.PASS, finding=passed)
    grades = list(Grade)
    found.sort(key=lambda reason: grades.index(reason.grade))
    worst = found[0].grade
    steps = dict.fromkeys(reason.next_step for reason in found if reason.grade is worst)
    finding = "; ".join(reason.sentence for reason in found)
    return Check(name=rule.name, grade=worst, finding=finding, fix=AGAIN if worst is Grade.UNKNOWN else "; ".join(steps))


def _sentence(found: ClusterSnapshot, opened: int) -> str:
    """Summarize the cluster in one sentence. `opened` counts open partitions of applications; the group log is named
    only while it is closed."""
    total = found.meta.partitions
    partitions = "1 partition is open" if (opened, total) == (1, 1) else f"{opened} of {total} partitions are open"
    if opened == total > 1:
        partitions = f"all {total} partitions are open"
    if found.group_log is not None and not found.group_log.is_open:
        partitions += ", the group log is not"
    servers, registered = sum(view.error is None for view in found.servers), len(found.servers) + len(found.missing)
    storages = sum(view.error is None for view in found.storages)
    who = f"{_of(servers, registered, 'server')} and {_of(storages, len(found.storages), 'storage')}"
    return f"{partitions}; {who} answer"


def _forks(found: ClusterSnapshot) -> Iterator[str]:
    forked = [view.partition for view in found.partitions if view.timelines]
    if forked:
        numbers = format_partitions(forked)
        yield f"an operator ended the log of {numbers}: see its timelines in `waltzctl partition describe`"


def _of(some: int, total: int, noun: str) -> str:
    name = noun if total == 1 else noun + "s"
    return f"{total} {name}" if some == total else f"{some} of {total} {name}"


# -- what will go wrong next: replicas and their storages --------------------------------------------------------------


def _space(facts: Facts) -> Found:
    least, is_trimmed = 1.0, facts.snapshot.meta.keep_local != KEEP_ALL and not _stuck(facts)
    for name, reported in facts.snapshot.storage_reports.items():
        full = tuple(held.partition for held in reported.assigned if held.status is not None and held.status.is_full)
        if full:
            yield Reason(
                key=f"full {name}",
                sentence=f"the disk of {name} is full ({reported.directory}): "
                f"{format_partitions(full)} cannot be written there",
                next_step=f"free some space on the file system of {reported.directory}; writing resumes by itself",
                partitions=full,
                names=(name,),
            )
        free, share, hours = reported.free_bytes, _free_share(reported), math.inf if is_trimmed else _hours_left(reported)
        least = min(least, share)
        words = f"{name} has {free / 1e9:,.1f} GB free in {reported.directory}, {share:.0%} of what it can use"
        if hours < FULL_WARN_HOURS:
            words += f", enough for {hours:.0f} hours at the present rate"
            words += f" (average of the {reported.uptime_ms / 3_600_000:.1f} hours since it started)"
        grades = (under(share, FREE_WARN, FREE_FAIL), under(hours, FULL_WARN_HOURS, FULL_FAIL_HOURS))
        has_failed = free <= reported.free_bytes_min or Grade.FAIL in grades
        yield Reason(grade=Grade.FAIL if has_failed else Grade.WARN if Grade.WARN in grades else Grade.PASS, sentence=words)
    return f"at least {least:.0%} is free everywhere"


def _free_share(reported: StorageDescription) -> float:
    held = sum(one.disk_bytes for one in reported.assigned)
    return reported.free_bytes / (reported.free_bytes + held) if reported.free_bytes else 0.0


def _hours_left(reported: StorageDescription) -> float:
    seconds = reported.uptime_ms / 1000
    if seconds < PACE_SECONDS or not reported.statistics.appended_bytes:
        return math.inf
    return max(0, reported.free_bytes - reported.free_bytes_min) / (reported.statistics.appended_bytes / seconds) / 3600


def _scrubs(facts: Facts) -> Found:
    oldest = 0
    for name, reported in facts.snapshot.storage_reports.items():
        scrub = reported.scrub
        if scrub is None:
            continue
        period_ms = 1000 * scrub.period_seconds
        if not period_ms:
            yield Reason(
                grade=Grade.WARN,
                sentence=f"{name} does not scrub its sealed segments: scrub_seconds is 0",
                next_step="leave scrub_seconds at its default, or run `waltzctl storage verify` from time to time",
            )
            continue
        if scrub.damaged_segments:
            yield warn(
                f"the scrub of {name} found {scrub.damaged_segments:,} damaged segments since it started, the last: "
                f"{scrub.last_finding}"
            )
        age_ms = reported.uptime_ms if scrub.age_ms is None else scrub.age_ms
        oldest = max(oldest, age_ms)
        if age_ms > SCRUB_PERIODS_WARN * period_ms and scrub.total_bytes:
            yield Reason(
                grade=Grade.WARN,
                sentence=f"{name} has not read all its sealed segments for {age_ms / 86_400_000:,.1f} days; the period is "
                f"{period_ms / 86_400_000:,.1f} days",
                next_step="check the load of its disk, and read its log",
            )
    return f"the last complete scrub of each storage began at most {oldest / 86_400_000:,.1f} days ago"


def _flushes(facts: Facts) -> Found:
    worst = 0.0
    for name, reported in facts.snapshot.storage_reports.items():
        done = reported.statistics
        p99 = done.flush.quantile(0.99)
        if p99 is None:
            yield unsure(f"{name} has written nothing since its start")
            continue
        took, most = p99 * 1000, done.group_microseconds_max / 1000
        worst = max(worst, took)
        words = f"{name} takes {took:.1f} ms (p99) to write and flush, {most:,.0f} ms at most"
        yield Reason(grade=over(took, FLUSH_WARN_MS, FLUSH_FAIL_MS), sentence=words)
    return f"p99 is {worst:.1f} ms or less"


def _lag(facts: Facts) -> Found:
    unknown = []
    for view in facts.snapshot.partitions:
        if view.reported is None:
            unknown.append(view.partition)
            continue
        for replica in view.reported.replicas:
            behind = view.reported.committed - replica.durable_id
            if replica.state in ("CATCHING_UP", "SLOW") or (replica.counts and behind > LAG_WARN):
                state = replica.state.lower().replace("_", " ")
                yield warn(f"partition {view.partition} on {replica.storage} is {behind:,} ids behind ({state})")
    if unknown:
        yield unsure(f"no owner reports the replicas of {format_partitions(unknown)}")
    return "every replica that counts keeps up"


def _stuck(facts: Facts) -> dict[str, list[int]]:
    """Return the partitions whose archive is stuck, by reason."""
    partitions: dict[str, list[int]] = {}
    for owned in facts.snapshot.owner_reports:
        if owned.archive_trouble:
            partitions.setdefault(owned.archive_trouble, []).append(owned.partition)
    return partitions


def _archive(facts: Facts) -> Found:
    lasting = _lasting(facts)
    for trouble, numbers in _stuck(facts).items():
        yield warn(f"the archive of {format_partitions(numbers, 'does', 'do')} not advance: {trouble}; {lasting}")
    is_archived = any(owned.archived is not None for owned in facts.snapshot.owner_reports)
    return "every sealed segment is archived" if is_archived else "nothing is archived yet"


def _lasting(facts: Facts) -> str:
    """Estimate how long the disks last while nothing is archived."""
    reported = [(_hours_left(storage), name, storage) for name, storage in facts.snapshot.storage_reports.items()]
    hours, name, first = min(reported, key=lambda one: one[:2], default=(math.inf, "", None))
    if first is None or hours == math.inf:
        return "how long the disks last is known only after ten minutes of writing"
    since = first.uptime_ms / 3_600_000
    rate = f"the rate of the {since:,.1f} hours since its storage started"
    return f"the disk of {name} fills up first, in {hours:,.0f} hours at {rate}"


def _contents(facts: Facts) -> Found:
    """Check that archived objects are still in the store."""
    oldest = None
    for owned in facts.snapshot.owner_reports:
        if lost := owned.lost_object:
            yield Reason(
                key=f"lost object {owned.partition}",
                sentence=f"the archive of partition {owned.partition} lost an object: {lost}",
                partitions=(owned.partition,),
            )
        found = owned.archive_check
        if found is not None and found.age_ms is not None:
            oldest = max(oldest or 0.0, found.age_ms / 3_600_000)
    if oldest is None:
        return "no complete check of the archive since the partitions have their present owners"
    if oldest > CHECK_WARN_HOURS:
        yield Reason(
            grade=Grade.WARN,
            sentence=f"the last complete check of the archive began {oldest:,.0f} hours ago",
            next_step="see `waltzctl archive status`, and the logs of the storages",
        )
    return f"everything archived was found in the store at most {oldest:,.0f} hours ago"


def _log_times(facts: Facts) -> Found:
    """Find partitions whose times are ahead, because a clock was wrong once."""
    for owned in facts.snapshot.owner_reports:
        if owned.ahead_ms > 0:
            hours = owned.ahead_ms / 3_600_000
            yield warn(f"the times of partition {owned.partition} are {hours:,.1f} hours ahead: a clock was wrong")
    return "no partition has times ahead of the clocks of its storages"


def _backup(facts: Facts) -> Found:
    late: list[int] = []
    troubles: dict[str, list[int]] = {}
    for owned in facts.snapshot.owner_reports:
        if owned.backup_lag_ms > BACKUP_MS_WARN:
            found = troubles.setdefault(owned.backup_trouble, []) if owned.backup_trouble else late
            found.append(owned.partition)
    for trouble, numbers in troubles.items():
        yield warn(f"the backup of {format_partitions(numbers, 'is', 'are')} behind: {trouble}")
    if late:
        yield warn(
            f"the backup of {format_partitions(late, 'is', 'are')} more than {BACKUP_MS_WARN // 60_000} minutes behind"
        )
    for server in facts.snapshot.server_reports.values():
        saved = server.metadata_backup
        if saved is not None and not 0 <= saved.age_ms <= BACKUP_MS_WARN and saved.trouble:
            yield warn(f"the documents of the cluster are not saved in the archive: {saved.trouble}")
    is_backed_up = any(owned.backed_up is not None for owned in facts.snapshot.owner_reports)
    return "every committed transaction is backed up" if is_backed_up else "nothing is backed up yet"


def _groups(facts: Facts) -> Found:
    group_of = {view.meta.name: view.meta.group for view in facts.snapshot.storages}
    together, most = dict[str, list[int]](), dict[str, list[int]]()
    unknown = []
    for view in facts.snapshot.partitions:
        if not view.replicas:
            unknown.append(view.partition)
            continue
        groups = {group_of.get(name, name) for name in view.replicas}
        if len(view.replicas) > 1 and len(groups) == 1:
            together.setdefault(groups.pop(), []).append(view.partition)
        elif (group := crowded(view.replicas, group_of)) is not None and _could_be_apart(group_of, len(view.replicas)):
            most.setdefault(group, []).append(view.partition)
    for group, numbers in sorted(together.items()):
        yield warn(f"all replicas of {format_partitions(numbers)} are in the group {group}")
    for group, numbers in sorted(most.items()):
        yield warn(f"most replicas of {format_partitions(numbers)} are in the group {group}, whose failure would stop them")
    if unknown:
        yield unsure(f"the replicas of {format_partitions(unknown)} are not known")
    return "no partition depends on one group"


def _could_be_apart(group_of: Mapping[str, str], replicas: int) -> bool:
    """Return whether there are enough groups for a majority of the replicas to survive the loss of any one group."""
    groups = sizes(group_of)
    return len(group_of) >= replicas and replicas - together_in_one(groups, replicas) >= majority(replicas)


def _orphans(facts: Facts) -> Found:
    """Find replicas that no document names; daemons never remove them."""
    sets = {view.partition: view.replicas for view in facts.snapshot.partitions}
    for name, reported in facts.snapshot.storage_reports.items():
        numbers = [one.partition for one in reported.assigned if name not in sets.get(one.partition, {})]
        if numbers:
            yield warn(f"{name} holds {format_partitions(numbers)}, which no document assigns to it")
    return "none"


# -- servers, and what everything stands on ----------------------------------------------------------------------------


def _draining(facts: Facts) -> Found:
    for name, reported in facts.snapshot.server_reports.items():
        if reported.is_draining and not reported.partitions:
            yield warn(f"{name} is still drained: it owns no partition and is given none")
    return "no server is drained"


def _latency(facts: Facts) -> Found:
    took = facts.coordinator_ms
    if took is None:
        yield unsure("not measured")
        return ""
    words = f"{took:.1f} ms for one read"
    yield Reason(grade=over(took, COORDINATOR_WARN_MS, COORDINATOR_FAIL_MS), sentence=words)
    return words


def _ensemble(facts: Facts) -> Found:
    reported = [one for one in facts.ensemble if one.mode is not None]
    alone = [one.address for one in reported if one.mode == "standalone"]
    if alone:
        yield warn(f"{', '.join(alone)} is a single server: if it fails, no partition can change its owner")
    for one in facts.ensemble:
        if one.mode is None:  # if another server answers, this one is the one with the problem
            yield Reason(grade=Grade.WARN if reported else Grade.UNKNOWN, sentence=f"{one.address}: {one.trouble}")
    if not facts.ensemble:
        yield unsure("no server of the ensemble was asked")
    return ", ".join(f"{one.address} is {one.mode}" for one in reported)


def _clocks(facts: Facts) -> Found:
    """Compare the clocks of all daemons. An offset is exact to half the duration of the call."""
    offsets: list[tuple[float, float, str]] = []
    for view in facts.snapshot.nodes:
        if view.reported is None:
            continue
        if view.reported.vitals is None:
            yield unsure(f"{view.meta.name} does not report its clock")
            continue
        offset = view.reported.vitals.time_ms - view.call.middle_ms
        offsets.append((offset, view.call.milliseconds / 2, view.meta.name))
    if not offsets:
        return ""
    (low, low_error, slow), (high, high_error, fast) = (end(offsets, key=lambda one: one[0]) for end in (min, max))
    apart = high - low
    surely = max(0.0, apart - high_error - low_error)
    yield Reason(grade=over(surely, CLOCK_WARN_MS, CLOCK_FAIL_MS), sentence=f"{fast} is {apart:,.0f} ms ahead of {slow}")
    yield from _times(facts)
    return f"all clocks are within {max(1.0, apart):,.0f} ms"


def _times(facts: Facts) -> Iterator[Reason]:
    """Find partitions whose last transaction is ahead of all clocks: a clock that was ahead has been corrected since,
    and times in a log never fall."""
    reported = facts.snapshot.storage_reports.values()
    clocks = [one.vitals.time_ms for one in reported if one.vitals is not None]
    ends = [
        (held.status.end.time / 1000, held.partition)
        for one in reported
        for held in one.assigned
        if held.status is not None and held.status.end is not None
    ]
    if not (clocks and ends):
        return
    last, number = max(ends)
    ahead = last - max(clocks)
    yield Reason(
        grade=over(ahead, CLOCK_WARN_MS, CLOCK_FAIL_MS),
        sentence=f"the last transaction of partition {number} carries a time {ahead / 1000:,.0f} seconds ahead of the "
        "clocks of all storages; later transactions carry the same time until the clocks reach it",
        partitions=(number,),
    )


def _files(facts: Facts) -> Found:
    most = 0.0
    for name, reported in facts.snapshot.node_reports:
        vitals = reported.vitals
        if vitals is None or vitals.open_files is None or vitals.open_files_max <= 0:
            yield unsure(f"{name} does not report its open files")
            continue
        share = vitals.open_files / vitals.open_files_max
        most = max(most, share)
        words = f"{name} has {vitals.open_files:,} of {vitals.open_files_max:,} files open"
        yield Reason(grade=over(share, FILES_WARN, FILES_FAIL), sentence=words)
    return f"every process uses at most {most:.0%} of its limit"


def _certificates(facts: Facts) -> Found:
    if not facts.is_secured:
        return "no certificates are in use: all connections are plain text"
    least = math.inf
    for name, days in sorted(facts.certificate_days.items()):
        if days is None:
            yield unsure(f"the certificate of {name} could not be read")
            continue
        least = min(least, days)
        words = (
            f"the certificate of {name} expires in {days:.0f} days"
            if days >= 0
            else f"the certificate of {name} has expired"
        )
        yield Reason(grade=under(days, DAYS_WARN, DAYS_FAIL), sentence=words)
    return f"the first certificate expires in {least:.0f} days"


def _closed(facts: Facts) -> Found:
    if facts.opened:
        shown = ", ".join(facts.opened[:OPEN_SHOWN])
        more = f" and {len(facts.opened) - OPEN_SHOWN} more" if len(facts.opened) > OPEN_SHOWN else ""
        words = f"whoever reaches ZooKeeper may change the documents of the cluster: {shown}{more}"
        yield Reason(sentence=words, key="open documents")
    return (
        "only Waltz may change the documents in ZooKeeper"
        if facts.is_secured
        else "not checked, because no certificates are in use"
    )


def _versions(facts: Facts) -> Found:
    names: dict[str, list[str]] = {facts.tool_version: ["waltzctl"]}
    for name, reported in facts.snapshot.node_reports:
        names.setdefault(reported.version, []).append(name)
    if len(names) > 1:
        yield warn("; ".join(f"{version}: {', '.join(having)}" for version, having in sorted(names.items())))
    return f"all are {facts.tool_version}"


# -- the table ---------------------------------------------------------------------------------------------------------

RULES = (
    Rule(
        name="coordination",
        find=coordination,
        fix="look at ZooKeeper, and at the network between it and the servers",
        is_now=True,
        alerts={"WaltzServerDegraded": (Grade.FAIL, 1), "WaltzNoLeader": (Grade.WARN, 2)},
    ),
    Rule(
        name="processes",
        find=processes,
        fix="start it again, or take it out: `waltzctl storage remove`, `waltzctl server remove`",
        is_now=True,
        alerts={"WaltzNoServer": (Grade.FAIL, 2), "WaltzDaemonGone": (Grade.WARN, 2)},
    ),
    Rule(
        name="quorum margin",
        find=margins,
        fix="see why with `waltzctl status`; bring the replicas back",
        is_now=True,
        alerts={
            "WaltzPartitionNotOpen": (Grade.FAIL, 1),
            "WaltzPartitionsMissing": (Grade.FAIL, 2),
            "WaltzPartitionCannotWrite": (Grade.FAIL, 1),
            "WaltzPartitionNoMargin": (Grade.FAIL, 5),
            "WaltzReplicaMissing": (Grade.WARN, 15),
        },
    ),
    Rule(
        name="damaged replicas",
        find=replicas,
        fix="bring it back from the others: `waltzctl storage recover`",
        needs=("storages",),
        is_now=True,
        alerts={"WaltzReplicaDamaged": (Grade.FAIL, 5)},
    ),
    Rule(
        name="scrub",
        find=_scrubs,
        fix="the owner heals damage; replace the disk if more damage appears: "
        "`waltzctl storage remove STORAGE --replacement NEW`",
        needs=("storages",),
        alerts={"WaltzScrubFoundDamage": (Grade.WARN, 0)},
    ),
    Rule(
        name="free space",
        find=_space,
        fix="free space there, or move replicas away: `waltzctl storage remove STORAGE --replacement NEW`",
        needs=("storages",),
        is_now=True,
        alerts={"WaltzStorageDiskFull": (Grade.FAIL, 1), "WaltzStorageDiskNearlyFull": (Grade.WARN, 10)},
    ),
    Rule(
        name="flush latency",
        find=_flushes,
        fix="check the disks: every commit waits for the second fastest",
        needs=("storages",),
        alerts={"WaltzFlushSlow": (Grade.WARN, 10)},
    ),
    Rule(
        name="replica lag",
        find=_lag,
        fix="check the disk and the network of these storages",
        alerts={"WaltzReplicaLagGrows": (Grade.WARN, 15)},
    ),
    Rule(
        name="archive",
        find=_archive,
        fix="see `waltzctl archive status`: the log goes on, and stays on the disks of the storages until then",
        needs=("servers",),
        alerts={"WaltzArchiveStopped": (Grade.WARN, 30)},
    ),
    Rule(
        name="archived objects",
        find=_contents,
        fix="find out who deletes objects in the store; `waltzctl archive heal` restores what a storage still has",
        needs=("servers",),
        is_now=True,
        alerts={"WaltzArchiveIncomplete": (Grade.FAIL, 5)},
    ),
    Rule(
        name="backup",
        find=_backup,
        fix="see `waltzctl archive status --lost-now`: the log goes on, but what is not backed up is lost if all "
        "storages are lost",
        needs=("servers",),
        alerts={"WaltzBackupBehind": (Grade.WARN, 5), "WaltzMetadataNotSaved": (Grade.WARN, 30)},
    ),
    Rule(
        name="times",
        find=_log_times,
        fix="set the clocks of the machines (NTP); times never fall, so the log keeps its time until clocks have caught up",
        needs=("servers",),
    ),
    Rule(
        name="consumer groups",
        find=consumer_groups,
        fix="see `waltzctl group describe NAME`: bring its members back; after `waltzctl group parked list NAME` replay or "
        "discard parked transactions, and resume a stopped group with `waltzctl group resume NAME`",
        needs=("servers",),
        alerts={
            "WaltzGroupsBehind": (Grade.FAIL, 2),
            "WaltzGroupStuck": (Grade.WARN, 15),
            "WaltzGroupParked": (Grade.WARN, 5),
        },
    ),
    Rule(name="failure domains", find=_groups, fix="add storages in other groups, then `waltzctl partition auto-assign`"),
    Rule(
        name="unfinished moves",
        find=moves,
        fix="wait for the command that moves them; if none runs, run it again: it continues the move",
        needs=("ZooKeeper",),
        is_now=True,
    ),
    Rule(
        name="drained servers",
        find=_draining,
        fix="end the drain with `waltzctl server drain SERVER --undo`, or stop the server",
        needs=("servers",),
    ),
    Rule(
        name="forgotten replicas",
        find=_orphans,
        fix="if they are not needed, remove them: `waltzctl storage recover STORAGE --clean`",
        needs=("ZooKeeper", "storages"),
    ),
    Rule(
        name="documents",
        find=documents,
        fix="an owner rewrites its partition's documents by itself; rewrite a storage's document with `waltzctl "
        "storage add "
        "NAME=LISTEN,ADMIN,GROUP`",
        needs=("servers",),
        is_now=True,
    ),
    Rule(name="ZooKeeper latency", find=_latency, fix="check the load and the disks of ZooKeeper", needs=("ZooKeeper",)),
    Rule(name="ZooKeeper ensemble", find=_ensemble, fix="run an ensemble of three or five, and give all addresses"),
    Rule(
        name="clocks",
        find=_clocks,
        fix="synchronize all machines with the same time servers",
        needs=("servers", "storages"),
    ),
    Rule(
        name="open files",
        find=_files,
        fix="raise LimitNOFILE in the unit, or `ulimit -n`, and start it again",
        needs=("servers", "storages"),
        alerts={"WaltzOpenFilesNearlyUsedUp": (Grade.WARN, 10)},
    ),
    Rule(
        name="certificates",
        find=_certificates,
        fix="replace the certificate files: daemons load them by themselves",
        alerts={"WaltzCertificateOver": (Grade.FAIL, 1), "WaltzCertificateEndsSoon": (Grade.WARN, 60)},
    ),
    Rule(
        name="open documents",
        find=_closed,
        fix="give every server and operator the same coordinator_credentials, then `waltzctl cluster set --secure`",
        needs=("ZooKeeper",),
        is_now=True,
    ),
    Rule(
        name="versions",
        find=_versions,
        fix="finish the upgrade: storages first, one at a time, then servers",
        needs=("servers", "storages"),
    ),
)
