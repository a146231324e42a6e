"""What will go wrong next: rules over facts that somebody else has gathered. Pure.

Each rule gives one check with a severity, a finding and a fix. A check that could not be made is UNKNOWN, never PASS: what
nobody looked at is not well. Limits stand beside each rule, with why they are what they are.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from waltzctl.numbers import spell
from waltzctl.picture.picture import Picture, ServerView, StorageView
from waltzctl.placement.plan import crowded, sizes
from waltzctl.placement.plan import together as together_in_one
from waltzctl.safety import margin
from waltzctl.watching.verdict import MEND
from waltzd.cluster.documents import Role
from waltzd.protocol.descriptions import StorageDescription
from waltzd.protocol.quorum import majority

CLOCK_WARN_MS, CLOCK_FAIL_MS = 500.0, 60_000.0
"""Nothing in Waltz is decided by clocks. Half a second muddles the order of events; a minute makes certificates fail."""
FLUSH_WARN_MS, FLUSH_FAIL_MS = 50.0, 1_000.0
"""That 99 of 100 groups take less than. A disk with a write cache that keeps what it has flushes in well under 5 ms."""
FREE_WARN, FREE_FAIL = 0.10, 0.03
"""Shares of what is free and what replicas take: a small disk may be well, and a large one nearly full."""
FULL_WARN_HOURS, FULL_FAIL_HOURS = 48.0, 6.0
"""Until the disk is full, as fast as it was written to since the storage started."""
PACE_SECONDS = 600.0
"""How long a storage has to run before that says anything."""
FILES_WARN, FILES_FAIL = 0.6, 0.9
"""Shares of what a process may open."""
DAYS_WARN, DAYS_FAIL = 30.0, 7.0
LAG_WARN = 100_000
"""Ids: more than a live replica is ever behind."""
COORDINATOR_WARN_MS, COORDINATOR_FAIL_MS = 50.0, 1_000.0


AGAIN = "look again when everything answers"


class Grade(enum.StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"
    """The check could not be made."""


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    grade: Grade
    finding: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class ZooKeeperServer:
    """What one server of the ensemble says of itself; without a mode, why it said nothing."""

    address: str
    mode: str | None
    """standalone, leader, follower"""
    milliseconds: float | None
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    picture: Picture
    coordinator_error: str | None
    coordinator_ms: float | None
    ensemble: tuple[ZooKeeperServer, ...]
    tool_version: str
    is_secured: bool
    """Certificates are in use."""
    certificate_days: Mapping[str, float | None]
    """Until the certificate of each daemon, and ours ("waltzctl"), ends; None where that could not be found out."""


def diagnose(facts: Facts) -> list[Check]:
    """In the order in which one should look at them."""
    return [
        _processes(facts),
        _margins(facts),
        _replicas(facts),
        _space(facts),
        _flushes(facts),
        _lag(facts),
        _groups(facts),
        _moves(facts),
        _draining(facts),
        _orphans(facts),
        _documents(facts),
        _coordinator(facts),
        _ensemble(facts),
        _clocks(facts),
        _files(facts),
        _certificates(facts),
        _versions(facts),
    ]


def _graded(name: str, fails: Iterable[str], warns: Iterable[str], unknowns: Iterable[str], passed: str, fix: str) -> Check:
    """The worst of what was found, with everything that is not well; what is unknown hides behind no pass."""
    found = {Grade.FAIL: list(fails), Grade.WARN: list(warns), Grade.UNKNOWN: list(unknowns)}
    for grade in (Grade.FAIL, Grade.WARN, Grade.UNKNOWN):
        if found[grade]:
            told = [sentence for sentences in found.values() for sentence in sentences]
            return Check(name=name, grade=grade, finding="; ".join(told), fix=AGAIN if grade is Grade.UNKNOWN else fix)
    return Check(name=name, grade=Grade.PASS, finding=passed)


def _silent(facts: Facts, kind: type[ServerView] | type[StorageView] | None = None) -> list[str]:
    nodes = [view for view in facts.picture.nodes if kind is None or isinstance(view, kind)]
    return [f"{view.meta.name} does not answer" for view in nodes if view.said is None]


def _processes(facts: Facts) -> Check:
    silent = [f"{name}: {error.code} {error.message}" for name, error in sorted(facts.picture.silent.items())]
    silent += [f"{meta.name} is not up, and should be" for meta in facts.picture.missing]
    if not facts.picture.servers:
        silent.append("no server is up")
    total = len(facts.picture.nodes)
    return _graded(
        "processes",
        silent,
        [],
        [],
        f"all {total} answer",
        "start them again, or take them out: `waltzctl storage remove`, `waltzctl server remove`",
    )


def _margins(facts: Facts) -> Check:
    """How many replicas of a partition may fail before it stops."""
    stopped, thin, single, unknown, lonely = [], [], [], [], []
    for view in facts.picture.partitions:
        members = sum(role is Role.MEMBER for role in view.replicas.values())
        surely = margin(view.partition, view.replicas, facts.picture.level(view.partition))
        if members == 0 or (view.said is None and view.owner is not None):
            unknown.append(view.partition)
        elif not view.is_open or margin(view.partition, view.replicas, view.counted).spare < 0:
            stopped.append(view.partition)
        elif surely.spare < 0:  # the owner may reach storages that are silent here
            lonely.append(view.partition)
        elif members == 1:
            single.append(view.partition)
        elif surely.spare < members - majority(members):
            thin.append(view.partition)
    warns = [f"{spell(thin)} can lose fewer replicas than they should"] if thin else []
    warns += [f"{spell(single, 'has', 'have')} one replica only: a lost disk is lost data"] if single else []
    return _graded(
        "quorum margin",
        [f"{spell(stopped, 'takes', 'take')} no transactions"] if stopped else [],
        warns,
        [
            *([f"nobody says how {spell(unknown, 'is', 'are')}"] if unknown else []),
            *([f"seen from here, no majority of the replicas of {spell(lonely)} answers"] if lonely else []),
        ],
        "every partition can lose as many replicas as it should be able to",
        "see why with `waltzctl status`; bring the replicas back",
    )


def _replicas(facts: Facts) -> Check:
    bad = [
        f"{view.meta.name}: {held.story}"
        for view in facts.picture.storages
        if view.said is not None
        for held in view.said.assigned
        if held.status is None or not held.status.is_sound
    ]
    offline = [
        f"{view.meta.name}: {held.story}"
        for view in facts.picture.storages
        if view.said is not None
        for held in view.said.assigned
        if held.status is not None and held.status.is_sound and not held.status.is_available
    ]
    ways = ["bring damaged ones back with `waltzctl storage recover STORAGE`"] if bad else []
    ways += ["take others online with `waltzctl storage availability STORAGE PARTITIONS --online`"] if offline else []
    return _graded(
        "damaged replicas", bad, offline, _silent(facts, StorageView), "every replica vouches for what it holds",
        "; ".join(ways),
    )  # fmt: skip


def _documents(facts: Facts) -> Check:
    passed = "every document of the coordinator can be understood"
    return _graded("documents", facts.picture.spoiled, [], _silent(facts, ServerView), passed, MEND)


def _space(facts: Facts) -> Check:
    fails, warns, least = [], [], None
    for view in facts.picture.storages:
        if view.said is None:
            continue
        free, share, hours = view.said.free_bytes, _free_share(view.said), _hours_left(view.said)
        least = share if least is None else min(least, share)
        said = f"{view.meta.name} has {_size(free)} free in {view.said.directory}, {share:.0%} of what it can use"
        if hours < FULL_WARN_HOURS:
            said += f", which lasts for {hours:.0f} hours as it is written to"
        if any(held.status is not None and held.status.is_full for held in view.said.assigned):
            fails.append(f"{said}: writes wait for space")
        elif free <= view.said.free_bytes_min or share < FREE_FAIL or hours < FULL_FAIL_HOURS:
            fails.append(said)
        elif share < FREE_WARN or hours < FULL_WARN_HOURS:
            warns.append(said)
    return _graded(
        "free space", fails, warns, _silent(facts, StorageView), f"at least {least or 0:.0%} is free everywhere",
        "free space there, or move replicas away: `waltzctl storage replace`",
    )  # fmt: skip


def _free_share(said: StorageDescription) -> float:
    held = sum(one.disk_bytes for one in said.assigned)
    return said.free_bytes / (said.free_bytes + held) if said.free_bytes else 0.0


def _hours_left(said: StorageDescription) -> float:
    seconds = said.uptime_ms / 1000
    if seconds < PACE_SECONDS or not said.statistics.appended_bytes:
        return math.inf
    return max(0, said.free_bytes - said.free_bytes_min) / (said.statistics.appended_bytes / seconds) / 3600


def _flushes(facts: Facts) -> Check:
    fails, warns, unknown, worst = [], [], _silent(facts, StorageView), 0.0
    for view in facts.picture.storages:
        if view.said is None:
            continue
        done = view.said.statistics
        p99 = done.flush.quantile(0.99)
        if p99 is None:
            unknown.append(f"{view.meta.name} has written nothing since its start")
            continue
        most = done.group_microseconds_max / 1000
        worst = max(worst, p99 * 1000)
        said = f"{view.meta.name} takes {p99 * 1000:.1f} ms (p99) to write and flush, {most:,.0f} ms at most"
        if p99 * 1000 > FLUSH_FAIL_MS:
            fails.append(said)
        elif p99 * 1000 > FLUSH_WARN_MS:
            warns.append(said)
    return _graded(
        "flush latency", fails, warns, unknown, f"p99 is {worst:.1f} ms or less",
        "look at the disks: every commit waits for the second fastest of them",
    )  # fmt: skip


def _lag(facts: Facts) -> Check:
    warns, unknown = [], []
    for view in facts.picture.partitions:
        if view.said is None:
            unknown.append(view.partition)
            continue
        for replica in view.said.replicas:
            behind = view.said.committed - replica.durable_id
            if replica.state in ("CATCHING_UP", "SLOW") or (replica.counts and behind > LAG_WARN):
                state = replica.state.lower().replace("_", " ")
                warns.append(f"partition {view.partition} on {replica.storage} is {behind:,} ids behind ({state})")
    return _graded(
        "replica lag", [], warns, [f"nobody says how {spell(unknown, 'is', 'are')}"] if unknown else [],
        "every replica that counts keeps up", "look at the disk and the network of these storages",
    )  # fmt: skip


def _groups(facts: Facts) -> Check:
    group_of = {view.meta.name: view.meta.group for view in facts.picture.storages}
    together, most = dict[str, list[int]](), dict[str, list[int]]()
    unknown = []
    for view in facts.picture.partitions:
        if not view.replicas:
            unknown.append(view.partition)
            continue
        groups = {group_of.get(name, name) for name in view.replicas}
        if len(view.replicas) > 1 and len(groups) == 1:
            together.setdefault(groups.pop(), []).append(view.partition)
        elif (group := crowded(view.replicas, group_of)) is not None and _could_be_apart(group_of, len(view.replicas)):
            most.setdefault(group, []).append(view.partition)
    warns = [f"all replicas of {spell(numbers)} are in the group {group}" for group, numbers in sorted(together.items())]
    warns += [
        f"most replicas of {spell(numbers)} are in the group {group}, and stop with it"
        for group, numbers in sorted(most.items())
    ]
    return _graded(
        "failure domains", [], warns, [f"the replicas of {spell(unknown)} are not known"] if unknown else [],
        "no partition stops with one group", "add storages in other groups, then `waltzctl partition auto-assign`",
    )  # fmt: skip


def _could_be_apart(group_of: Mapping[str, str], replicas: int) -> bool:
    """There are groups enough, so that a majority of the replicas stays whichever of them fails."""
    groups = sizes(group_of)
    return len(group_of) >= replicas and replicas - together_in_one(groups, replicas) >= majority(replicas)


def _moves(facts: Facts) -> Check:
    if facts.coordinator_error is not None:
        return Check(name="unfinished moves", grade=Grade.UNKNOWN, finding="ZooKeeper does not answer")
    moves = sorted(facts.picture.moves)
    return _graded(
        "unfinished moves", [], [f"replicas of {spell(moves)} are on their way"] if moves else [], [],
        "none", "wait for the command that moves them, or run it again: it goes on from here",
    )  # fmt: skip


def _draining(facts: Facts) -> Check:
    forgotten = [
        f"{view.meta.name} takes no partitions since somebody drained it, and owns none"
        for view in facts.picture.servers
        if view.said is not None and view.said.is_draining and not view.said.partitions
    ]
    return _graded(
        "drained servers", [], forgotten, _silent(facts, ServerView), "none is forgotten",
        "let it take part again with `waltzctl server undrain`, or stop it",
    )  # fmt: skip


def _orphans(facts: Facts) -> Check:
    """Replicas that no document names: they are never removed by themselves."""
    if facts.coordinator_error is not None:
        return Check(name="forgotten replicas", grade=Grade.UNKNOWN, finding="ZooKeeper does not answer")
    sets = {view.partition: view.replicas for view in facts.picture.partitions}
    found = []
    for view in facts.picture.storages:
        if view.said is not None:
            numbers = [held.partition for held in view.said.assigned if view.meta.name not in sets.get(held.partition, {})]
            if numbers:
                found.append(f"{view.meta.name} holds {spell(numbers)}, which nobody wants from it")
    return _graded(
        "forgotten replicas", [], found, _silent(facts, StorageView), "none",
        "when they are not needed: `waltzctl storage remove-partition`",
    )  # fmt: skip


def _coordinator(facts: Facts) -> Check:
    name = "ZooKeeper latency"
    if facts.coordinator_error is not None:
        return Check(name=name, grade=Grade.FAIL, finding=facts.coordinator_error, fix="bring ZooKeeper back")
    took = facts.coordinator_ms
    if took is None:
        return Check(name=name, grade=Grade.UNKNOWN, finding="it was not measured")
    said = f"{took:.1f} ms for one read"
    return _graded(
        name, [said] if took > COORDINATOR_FAIL_MS else [], [said] if took > COORDINATOR_WARN_MS else [], [], said,
        "look at the load and the disks of ZooKeeper",
    )  # fmt: skip


def _ensemble(facts: Facts) -> Check:
    silent = [f"{one.address}: {one.trouble}" for one in facts.ensemble if one.mode is None]
    alone = [one.address for one in facts.ensemble if one.mode == "standalone"]
    said = [one for one in facts.ensemble if one.mode is not None]
    warns = [f"{', '.join(alone)} is alone: when it fails, nothing can change hands"] if alone else []
    unknown = []
    if said:  # then the others could be compared with it
        warns += silent
    else:
        unknown = silent or ["nobody was asked"]
    modes = ", ".join(f"{one.address} is {one.mode}" for one in said)
    return _graded(
        "ZooKeeper ensemble", [], warns, unknown, modes, "run an ensemble of three or five, and name all of them"
    )


def _clocks(facts: Facts) -> Check:
    """Each offset is as good as half the time that the answer took."""
    offsets: dict[str, tuple[float, float]] = {}
    unknown = _silent(facts)
    for view in facts.picture.nodes:
        if view.said is None:
            continue
        if view.said.vitals is None:
            unknown.append(f"{view.meta.name} does not tell its time")
            continue
        offsets[view.meta.name] = (view.said.vitals.time_ms - view.call.middle_ms, view.call.milliseconds / 2)
    if not offsets:
        return _graded("clocks", [], [], unknown, "", "")
    low, high = (end(offsets, key=lambda name: offsets[name][0]) for end in (min, max))
    apart = offsets[high][0] - offsets[low][0]
    surely = max(0.0, apart - offsets[high][1] - offsets[low][1])
    said = f"{high} is {apart:,.0f} ms ahead of {low}"
    fails = [said] if surely > CLOCK_FAIL_MS else []
    warns = [said] if CLOCK_WARN_MS < surely <= CLOCK_FAIL_MS else []
    return _graded(
        "clocks", fails, warns, unknown, f"no two are more than {max(1.0, apart):,.0f} ms apart",
        "let all machines follow the same time servers",
    )  # fmt: skip


def _files(facts: Facts) -> Check:
    fails, warns, unknown, most = [], [], _silent(facts), 0.0
    for view in facts.picture.nodes:
        vitals = view.said.vitals if view.said is not None else None
        if view.said is None:
            continue
        if vitals is None or vitals.open_files is None or vitals.open_files_max <= 0:
            unknown.append(f"{view.meta.name} does not tell")
            continue
        share = vitals.open_files / vitals.open_files_max
        most = max(most, share)
        said = f"{view.meta.name} has {vitals.open_files:,} of {vitals.open_files_max:,} files open"
        if share > FILES_FAIL:
            fails.append(said)
        elif share > FILES_WARN:
            warns.append(said)
    return _graded(
        "open files", fails, warns, unknown, f"at most {most:.0%} of what a process may open",
        "raise LimitNOFILE in the unit, or `ulimit -n`, and start it again",
    )  # fmt: skip


def _certificates(facts: Facts) -> Check:
    if not facts.is_secured:
        said = "none are in use: everything travels in plain text"
        return Check(name="certificates", grade=Grade.PASS, finding=said)
    fails, warns, unknown = [], [], []
    for name, days in sorted(facts.certificate_days.items()):
        said = f"that of {name} ends in {days:.0f} days" if days is not None and days >= 0 else f"that of {name} has ended"
        if days is None:
            unknown.append(f"that of {name} could not be looked at")
        elif days < DAYS_FAIL:
            fails.append(said)
        elif days < DAYS_WARN:
            warns.append(said)
    known = [days for days in facts.certificate_days.values() if days is not None]
    return _graded(
        "certificates", fails, warns, unknown, f"the first one ends in {min(known, default=0):.0f} days",
        "put new certificates in the place of the old ones: daemons take them up by themselves",
    )  # fmt: skip


def _versions(facts: Facts) -> Check:
    names: dict[str, list[str]] = {facts.tool_version: ["waltzctl"]}
    for view in facts.picture.nodes:
        if view.said is not None:
            names.setdefault(view.said.version, []).append(view.meta.name)
    told = [f"{version}: {', '.join(having)}" for version, having in sorted(names.items())]
    return _graded(
        "versions", [], ["; ".join(told)] if len(names) > 1 else [], _silent(facts), f"all are {facts.tool_version}",
        "finish the upgrade: storages first, one at a time, then servers",
    )  # fmt: skip


def _size(bytes_: int) -> str:
    return f"{bytes_ / 1e9:,.1f} GB"
