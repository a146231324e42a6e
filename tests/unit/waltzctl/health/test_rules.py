"""The doctor's rules: each has a snapshot that passes, ones that do not, and one that nobody could look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.snapshots import NOW_MS, STORAGES, held, offline, owned, partition, replica, server, silent, storage, well
from waltzctl.health.facts import Facts, Grade, Health, Lost, Verdict, ZooKeeperServer
from waltzctl.health.rules import AGAIN, RULES, diagnose, judge
from waltzctl.show.cluster import group_totals
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, ServerView
from waltzd.cluster.documents import Membership
from waltzd.daemon import readiness
from waltzd.errors import CannotConnect
from waltzd.errors.operations import ObjectAbsent
from waltzd.format.batch import End
from waltzd.protocol.descriptions import ArchiveCheck, ScrubStatus, Statistics, Vitals
from waltzd.protocol.groups import GroupTotals, GroupTrouble
from waltzd.protocol.histogram import Durations

GONE = CannotConnect("nobody listens there")
LOST = Lost(cause=GONE, seen=None)
RECOVERING = owned(0, (), step="RECOVERING")
MUTE = replace(partition(0), reported=None)
LATE = partition(
    0, reported=owned(0, (replica("s1"), replace(replica("s2"), durable_id=5), replica("s3")), committed=200_000)
)
BEHIND = partition(
    0, reported=replace(owned(0, (replica("s1"), replica("s2"), replica("s3"))), backup_lag_ms=200_000)
)  # fmt: skip
STUCK = partition(
    0, reported=replace(owned(0, (replica("s1"), replica("s2"), replica("s3"))), archive_trouble="s1: W2260 away")
)  # fmt: skip
ENSEMBLE = tuple(
    ZooKeeperServer(address=f"zk{number}:2181", mode="leader" if number == 1 else "follower", milliseconds=1.0)
    for number in (1, 2, 3)
)


def flushing(*seconds: float) -> Statistics:
    durations = Durations()
    for one in seconds:
        durations.add(one)
    return Statistics(groups=len(seconds), group_microseconds_max=5, flush=durations.histogram())


def sound() -> ClusterSnapshot:
    return well(storages=tuple(storage(name, statistics=flushing(0.002)) for name in STORAGES))


def facts(snapshot: ClusterSnapshot | None = None, **changes: Any) -> Facts:
    fields: dict[str, Any] = {
        "snapshot": snapshot or sound(), "lost": None, "coordinator_ms": 2.0, "ensemble": ENSEMBLE,
        "tool_version": "1", "is_secured": True, "certificate_days": {"waltzctl": 300.0, "s1": 100.0},
    }  # fmt: skip
    return Facts(**{**fields, **changes})


def grades(found: Facts) -> dict[str, Grade]:
    """Those that do not pass."""
    return {check.name: check.grade for check in diagnose(found) if check.grade is not Grade.PASS}


def finding(found: Facts, name: str) -> str:
    return next(check.finding for check in diagnose(found) if check.name == name)


def with_storage(**changes: Any) -> ClusterSnapshot:
    snapshot = sound()
    return replace(snapshot, storages=(storage("s1", **{"statistics": flushing(0.002), **changes}), *snapshot.storages[1:]))


def scrub(**changes: Any) -> ScrubStatus:
    pace: dict[str, Any] = {"period_seconds": 7 * 86_400, "bytes_per_second": 1, "done_bytes": 0, "total_bytes": 1}
    return ScrubStatus(**pace | changes)


def holding(**changes: Any) -> ClusterSnapshot:
    """With 100 MiB of replicas."""
    return with_storage(assigned=(replace(held(0), disk_bytes=100 << 20),), **changes)


def filling(*, hours: int, uptime_ms: int = 3_600_000) -> ClusterSnapshot:
    """With so much free as was written in so many hours."""
    return with_storage(
        free_bytes=hours << 30, uptime_ms=uptime_ms, statistics=replace(flushing(0.002), appended_bytes=1 << 30)
    )


def with_partition(view: Any) -> ClusterSnapshot:
    return replace(sound(), partitions=(view,))


def with_archive(**changes: Any) -> ClusterSnapshot:
    members = (replica("s1"), replica("s2"), replica("s3"))
    return with_partition(
        partition(0, reported=replace(owned(0, members), archive_check=ArchiveCheck(last_id=7, **changes)))
    )


def test_all_is_well() -> None:
    assert grades(facts()) == {}
    names = [check.name for check in diagnose(facts())]
    assert len(set(names)) == len(names)


def test_every_check_that_does_not_pass_has_a_fix() -> None:
    ill = facts(
        replace(well(), storages=tuple(silent(storage(name), GONE) for name in STORAGES), moves={0: ("s1",)}),
        lost=LOST, ensemble=(), tool_version="2",
    )  # fmt: skip
    assert all(check.fix for check in diagnose(ill) if check.grade in (Grade.FAIL, Grade.WARN))
    assert len(grades(ill)) > 8


@pytest.mark.parametrize(
    ("ill", "name", "grade", "reported"),
    [
        (holding(free_bytes=9 << 20), "free space", Grade.WARN, "s1 has 0.0 GB free in data/s1, 8% of what it can use"),
        (holding(free_bytes=1 << 20), "free space", Grade.FAIL, "s1 has"),
        (holding(free_bytes=1 << 30, free_bytes_min=1 << 30), "free space", Grade.FAIL, "s1 has"),
        (filling(hours=30), "free space", Grade.WARN, "enough for 30 hours at the present rate"),
        (filling(hours=3), "free space", Grade.FAIL, "enough for 3 hours"),
        (with_storage(assigned=(held(0, is_full=True),)), "free space", Grade.FAIL, "the disk of s1 is full"),
        (with_storage(statistics=flushing(0.1)), "flush latency", Grade.WARN, "s1 takes"),
        (with_storage(statistics=flushing(*[0.001] * 9, 5.0)), "flush latency", Grade.FAIL, "ms (p99) to write and flush"),
        (with_storage(statistics=Statistics()), "flush latency", Grade.UNKNOWN, "s1 has written nothing"),
        (with_storage(assigned=(held(0, is_available=False),)), "damaged replicas", Grade.WARN, "0 on s1 offline"),
        (with_storage(assigned=(replace(held(0), status=None),)), "damaged replicas", Grade.FAIL, "s1 does not serve"),
        (with_storage(scrub=scrub(period_seconds=0)), "scrub", Grade.WARN, "s1 does not scrub its sealed segments"),
        (with_storage(scrub=scrub(damaged_segments=2, last_finding="id 7")), "scrub", Grade.WARN, "found 2 damaged"),
        (with_storage(scrub=scrub(age_ms=22 * 86_400_000)), "scrub", Grade.WARN, "for 22.0 days; the period is"),
        (with_storage(scrub=scrub(), uptime_ms=22 * 86_400_000), "scrub", Grade.WARN, "has not read all its sealed"),
        (with_storage(version="0.9"), "versions", Grade.WARN, "0.9: s1; 1: waltzctl, a, b, s2, s3"),
        (with_storage(vitals=None), "clocks", Grade.UNKNOWN, "s1 does not report its clock"),
        (with_storage(vitals=None), "open files", Grade.UNKNOWN, "s1 does not report its open files"),
        (with_storage(vitals=Vitals(time_ms=NOW_MS, open_files=70, open_files_max=100)), "open files", Grade.WARN, "70 of"),
        (with_storage(vitals=Vitals(time_ms=NOW_MS, open_files=99, open_files_max=100)), "open files", Grade.FAIL, "99 of"),
        (with_storage(vitals=Vitals(time_ms=NOW_MS + 2_000, open_files=1, open_files_max=9)), "clocks", Grade.WARN,
         "s1 is 2,000 ms ahead of a"),
        (with_storage(vitals=Vitals(time_ms=NOW_MS - 90_000, open_files=1, open_files_max=9)), "clocks", Grade.FAIL,
         "a is 90,000 ms ahead of s1"),
        (with_storage(assigned=tuple(held(number) for number in range(5))), "forgotten replicas", Grade.WARN,
         "s1 holds partition 4, which no document assigns to it"),
        (replace(sound(), moves={1: ("s1",), 2: ("s1",)}), "unfinished moves", Grade.WARN, "partitions 1-2"),
        (replace(sound(), servers=(server("a"), server("b", is_draining=True))), "drained servers", Grade.WARN, "b is"),
        (replace(sound(), servers=()), "processes", Grade.FAIL, "no server is registered"),
        (replace(sound(), missing=(server("c").meta,)), "processes", Grade.FAIL, "server c is not up: it was at c:2"),
        (with_partition(MUTE), "quorum margin", Grade.UNKNOWN, "0 takes no transactions: its owner a does not report"),
        (with_partition(MUTE), "replica lag", Grade.UNKNOWN, "no owner reports the replicas of partition 0"),
        (with_partition(LATE), "replica lag", Grade.WARN, "partition 0 on s2 is 199,995 ids behind (live)"),
        (with_partition(STUCK), "archive", Grade.WARN, "archive of partition 0 does not advance: s1: W2260 away; how long"),
        (with_archive(missing="it is gone"), "archived objects", Grade.FAIL, "partition 0 lost an object: it is"),
        (with_archive(age_ms=60 * 3_600_000), "archived objects", Grade.WARN, "began 60 hours ago"),
        (with_partition(BEHIND), "backup", Grade.WARN, "the backup of partition 0 is more than 2 minutes behind"),
        (replace(sound(), unreadable={"/storages/s9": GONE}), "documents", Grade.FAIL, GONE.message),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_found(ill: ClusterSnapshot, name: str, grade: Grade, reported: str) -> None:
    assert grades(facts(ill))[name] is grade
    assert reported in finding(facts(ill), name)


@pytest.mark.parametrize(
    ("counting", "members", "grade"),
    [("s1 s2 s3", 3, None), ("s1 s2", 3, Grade.WARN), ("s1", 1, Grade.WARN), ("s1", 2, Grade.FAIL), ("s1 s2", 2, None)],
)
def test_the_quorum_margin(counting: str, members: int, grade: Grade | None) -> None:
    names = STORAGES[:members]
    replicas = tuple(replica(name, counts=name in counting.split()) for name in names)
    view = partition(0, reported=owned(0, replicas), replicas=dict.fromkeys(names, Membership.MEMBER))
    assert grades(facts(with_partition(view))).get("quorum margin") is grade


def test_replicas_that_were_taken_offline_do_not_count() -> None:
    """Their owners believe that they do."""
    stopped = facts(offline(s1=(0, 1), s2=(0,)))
    check = next(check for check in diagnose(stopped) if check.name == "quorum margin")
    assert (check.grade, check.finding) == (
        Grade.FAIL,
        "partition 0 takes no transactions: 1 of 3 replicas can take them, and 2 have to: s1, s2 do not serve, which an "
        "owner notices when it writes there; partition 1 can lose fewer replicas than they should",
    )
    assert grades(facts(offline(s1=(0,))))["quorum margin"] is Grade.WARN
    fix = next(check.fix for check in diagnose(stopped) if check.name == "damaged replicas")
    assert fix == (
        "when the reason is gone: `waltzctl storage availability s1 0-1 --online`; when the reason is gone: `waltzctl "
        "storage availability s2 0 --online`"
    )


def test_a_majority_that_is_silent_here_is_unknown() -> None:
    snapshot = replace(sound(), storages=(*sound().storages[:1], *(silent(storage(name), GONE) for name in ("s2", "s3"))))
    found = facts(snapshot)
    assert grades(found)["quorum margin"] is Grade.UNKNOWN
    assert finding(found, "quorum margin").startswith("seen from here, 1 of 3 replicas of partitions 0-3 are level")


def test_all_replicas_in_one_group() -> None:
    snapshot = replace(
        sound(), storages=tuple(storage(name, group="rack", statistics=flushing(0.002)) for name in STORAGES)
    )
    assert grades(facts(snapshot)) == {"failure domains": Grade.WARN}
    assert finding(facts(snapshot), "failure domains") == "all replicas of partitions 0-3 are in the group rack"


def test_most_replicas_in_one_group_where_there_are_groups_enough() -> None:
    groups = {"s1": "north", "s2": "north", "s3": "south"}
    three = tuple(storage(name, group=groups[name], statistics=flushing(0.002)) for name in STORAGES)
    assert grades(facts(replace(sound(), storages=three))) == {}, "two groups are all that there are"
    four = (*three, storage("s4", group="east", statistics=flushing(0.002), partitions=0))
    found = finding(facts(replace(sound(), storages=four)), "failure domains")
    assert found == "most replicas of partitions 0-3 are in the group north, whose failure would stop them"


def test_what_could_not_be_looked_at_is_unknown() -> None:
    snapshot = replace(sound(), storages=(*sound().storages[:2], silent(storage("s3"), GONE)))
    found = {check.name: check for check in diagnose(facts(snapshot))}
    for name in ("damaged replicas", "free space", "flush latency", "clocks", "open files", "versions"):
        assert (found[name].grade, found[name].fix) == (Grade.UNKNOWN, AGAIN), name
        assert "s3 does not answer" in found[name].finding
    lost = {check.name: check.grade for check in diagnose(facts(lost=LOST, coordinator_ms=None))}
    assert lost["coordination"] is Grade.FAIL
    assert lost["ZooKeeper latency"] is lost["unfinished moves"] is lost["forgotten replicas"] is Grade.UNKNOWN


def test_a_small_disk_that_is_mostly_free_is_well() -> None:
    assert "free space" not in grades(facts(holding(free_bytes=400 << 20)))
    assert "free space" not in grades(facts(filling(hours=100)))
    assert "free space" not in grades(facts(filling(hours=1, uptime_ms=60_000))), "a minute says nothing of a day"


def test_how_long_disks_last_is_said_where_nothing_leaves_them() -> None:
    """And on what that is based."""
    stuck = replace(filling(hours=100), partitions=(STUCK,))
    words = "the disk of s1 fills up first, in 100 hours at the rate of the 1.0 hours since its storage started"
    assert words in finding(facts(stuck), "archive")
    filled = filling(hours=3)
    assert "3 hours at the present rate (average of the 1.0 hours since" in finding(facts(filled), "free space")
    trimmed = replace(filled, meta=replace(filled.meta, keep_local="7d"))
    assert "free space" not in grades(facts(trimmed)), "what is archived leaves it"
    assert "free space" in grades(facts(replace(trimmed, partitions=(STUCK,))))


@pytest.mark.parametrize(
    "trouble",
    [{"archive_check": ArchiveCheck(missing="it is gone")}, {"archive_trouble": f"{ObjectAbsent.code} it is gone"}],
    ids=["found by the daily look", "found by trimming"],
)
def test_an_archived_object_that_is_lost_makes_a_cluster_degraded(trouble: dict[str, Any]) -> None:
    def verdict(**changes: Any) -> Verdict:
        first, *others = sound().partitions
        assert first.reported is not None
        return judge(
            facts(replace(sound(), partitions=(replace(first, reported=replace(first.reported, **changes)), *others)))
        )

    assert verdict(archive_trouble="s1: W2260 away").is_healthy
    lost = verdict(**trouble)
    (reason,) = lost.reasons
    assert lost.health is Health.DEGRADED
    assert reason.sentence.startswith("the archive of partition 0 lost an object")
    assert "waltzctl archive heal" in reason.next_step
    assert not reason.stops


def test_what_is_archived_was_there_not_long_ago() -> None:
    assert "not looked" not in finding(facts(), "archived objects")
    assert finding(facts(with_archive(age_ms=3 * 3_600_000)), "archived objects").endswith("at most 3 hours ago")


def with_groups(*troubles: GroupTrouble, **totals: Any) -> ClusterSnapshot:
    """As the first server says."""
    told = GroupTotals(**{"groups": 3, "troubles": troubles, **totals})
    return replace(sound(), servers=(server("a", groups=told), server("b", groups=GroupTotals(groups=3))))


def test_consumer_groups_that_do_not_go_on() -> None:
    stopped = GroupTrouble("mailer", 3, "id 6: no such address", "", 1, 94, 0)
    alone, parked = GroupTrouble("index", 0, "", "", 0, 7, 0), GroupTrouble("index", 1, "", "", 2, 0, 5)
    assert "consumer groups" not in grades(facts(with_groups(members=2, lag=9)))
    found = facts(with_groups(stopped, alone, parked, stopped=1, unattended=4, parked=5))
    assert grades(found) == {"consumer groups": Grade.WARN}
    assert finding(found, "consumer groups").split("; ") == [
        "the group mailer in partition 3 has stopped: id 6: no such address",
        "94 transactions are not done",
        "the group index in partition 0 has 7 transactions that are not done, and no member",
        "the group index in partition 1 has parked 5 transactions",
        "and at least 3 more are stuck: `waltzctl group list` shows all",
    ]
    assert judge(found).is_healthy, "the cluster is well"
    behind = facts(with_groups(trouble="the group log is away"))
    assert grades(behind) == {"consumer groups": Grade.FAIL}
    assert "a may lack the newest state of consumer groups: the group log is away" in finding(behind, "consumer groups")


def test_all_groups_in_one_line() -> None:
    found = with_groups(members=2, lag=1234, parked=5, stopped=1, trouble="the group log is away").groups
    line = "3 consumer groups, 2 members, lag 1,234, 5 parked, 1 stopped, not the newest: the group log is away"
    assert group_totals(found) == line
    assert group_totals(with_groups().groups) == "3 consumer groups, 0 members, lag 0"
    assert group_totals(sound().groups) == group_totals(GroupTotals(groups=0)) == ""


def test_what_is_worse_hides_nothing() -> None:
    """The grade is the worst one; the finding has everything."""
    one, two, three = sound().storages
    snapshot = replace(sound(), storages=(*holding(free_bytes=1 << 20).storages[:1], silent(two, GONE), three))
    assert one.meta.name == "s1"
    assert grades(facts(snapshot))["free space"] is Grade.FAIL
    assert "s2 does not answer" in finding(facts(snapshot), "free space")


def test_zookeeper() -> None:
    assert grades(facts(coordinator_ms=70.0)) == {"ZooKeeper latency": Grade.WARN}
    assert grades(facts(coordinator_ms=1500.0)) == {"ZooKeeper latency": Grade.FAIL}
    alone = (ZooKeeperServer(address="zk:1", mode="standalone", milliseconds=1.0),)
    assert grades(facts(ensemble=alone)) == {"ZooKeeper ensemble": Grade.WARN}
    mute = ZooKeeperServer(address="zk:1", mode=None, milliseconds=None, trouble="no answer")
    assert grades(facts(ensemble=(mute,))) == {"ZooKeeper ensemble": Grade.UNKNOWN}
    assert grades(facts(ensemble=(*ENSEMBLE, mute))) == {"ZooKeeper ensemble": Grade.WARN}


@pytest.mark.parametrize(
    ("days", "grade"), [(300.0, None), (29.0, Grade.WARN), (6.0, Grade.FAIL), (-1.0, Grade.FAIL), (None, Grade.UNKNOWN)]
)
def test_certificates(days: float | None, grade: Grade | None) -> None:
    assert grades(facts(certificate_days={"a": days, "s1": 200.0})).get("certificates") is grade
    assert grades(facts(certificate_days={}, is_secured=False)) == {}


def test_clocks_are_only_compared_as_well_as_they_were_measured() -> None:
    """An answer that took two seconds tells nothing about one second."""
    ahead = storage("s1", statistics=flushing(0.002), vitals=Vitals(time_ms=NOW_MS + 1000, open_files=1, open_files_max=9))
    slow = replace(ahead, call=replace(ahead.call, milliseconds=2000.0))
    assert "clocks" in grades(facts(replace(sound(), storages=(ahead, *sound().storages[1:]))))
    assert "clocks" not in grades(facts(replace(sound(), storages=(slow, *sound().storages[1:]))))


def test_a_server_whose_clock_is_wrong_is_not_hidden_by_a_storage_of_its_name() -> None:
    wrong = server("s1", vitals=Vitals(time_ms=NOW_MS - 90_000, open_files=1, open_files_max=9))
    assert grades(facts(replace(sound(), servers=(wrong, *sound().servers[1:]))))["clocks"] is Grade.FAIL


def test_a_log_that_remembers_a_clock_which_was_ahead() -> None:
    def written(seconds: float) -> ClusterSnapshot:
        end = End(time=int(1000 * NOW_MS + 1e6 * seconds))
        return with_storage(assigned=(held(0, end=end), *(held(number) for number in range(1, 4))))

    assert "clocks" not in grades(facts(written(0.2)))
    assert grades(facts(written(5)))["clocks"] is Grade.WARN
    assert grades(facts(written(120)))["clocks"] is Grade.FAIL
    one, *others = written(5).storages
    later = storage("s2", vitals=Vitals(time_ms=NOW_MS + 5_000, open_files=1, open_files_max=9), statistics=flushing(0.002))
    assert "ahead of the clocks" not in finding(facts(replace(sound(), storages=(one, later, others[1]))), "clocks")


# -- the table, and others who read it ---------------------------------------------------------------------------------

ALERTS = yaml.safe_load((Path(__file__).parents[4] / "configs/alert-rules.yml").read_text())["groups"][0]["rules"]
OVER_TIME = {"WaltzApplicationSlowed", "WaltzCommitSlow", "WaltzManyRefusals", "WaltzNotReady"}
"""What no look can find: rates; and reasons that a daemon gives itself."""


def unready(view: ServerView, *, is_announced: bool = True) -> list[str]:
    assert view.reported is not None
    return readiness.of_server(view.reported, is_announced=is_announced)


def test_alerts_have_the_words_the_severity_and_the_patience_of_their_rows() -> None:
    table = {
        name: {
            "check": rule.name,
            "fix": rule.fix,
            "severity": "critical" if grade is Grade.FAIL else "warning",
            "for": minutes,
        }
        for rule in RULES
        for name, (grade, minutes) in rule.alerts.items()
    }
    told = {
        alert["alert"]: {
            "check": alert["annotations"]["check"],
            "fix": alert["annotations"]["fix"],
            "severity": alert["labels"]["severity"],
            "for": int(alert["for"].removesuffix("m")),
        }
        for alert in ALERTS
        if alert["alert"] not in OVER_TIME
    }
    assert told == table
    assert {alert["alert"] for alert in ALERTS} == {*table, *OVER_TIME}


@pytest.mark.parametrize(
    ("reasons", "ill", "name"),
    [
        (unready(server("a", is_connected=False)),
         replace(sound(), servers=(server("a", is_connected=False), server("b"))), "coordination"),
        (unready(server("c"), is_announced=False), replace(sound(), missing=(server("c").meta,)), "processes"),
        (unready(server("a", partitions=(RECOVERING,))),
         with_partition(partition(0, reported=RECOVERING)), "quorum margin"),
        (readiness.of_storage(is_draining=False, free_bytes=1, free_bytes_min=2, full=(), refused={}),
         with_storage(free_bytes=1, free_bytes_min=2), "free space"),
        (readiness.of_storage(is_draining=False, free_bytes=2, free_bytes_min=1, full=(0,), refused={}),
         with_storage(assigned=(held(0, is_full=True),)), "free space"),
        (readiness.of_storage(is_draining=False, free_bytes=2, free_bytes_min=1, full=(), refused={0: "a gap"}),
         with_storage(assigned=(replace(held(0), status=None),)), "damaged replicas"),
    ],
    ids=["no contact", "not listed", "not open", "disk full", "was full", "refused"],
)  # fmt: skip
def test_what_makes_a_daemon_unready_fails_a_check(reasons: list[str], ill: ClusterSnapshot, name: str) -> None:
    assert len(reasons) == 1
    assert grades(facts(ill))[name] is Grade.FAIL


def test_a_certificate_that_is_over_makes_a_daemon_unready_and_fails_a_check() -> None:
    assert len(readiness.of_certificate(-1.0)) == 1
    assert grades(facts(certificate_days={"a": -1.0})) == {"certificates": Grade.FAIL}
