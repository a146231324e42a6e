"""What is said of a cluster that is not well: one reason for one cause, with a name, a cause and a next step."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.snapshots import held, offline, owned, partition, replica, server, silent, storage, well
from waltzctl.health import rules
from waltzctl.health.facts import Facts, Grade, Health, Lost, Verdict
from waltzctl.health.poll import missed
from waltzctl.health.rules import with_since
from waltzctl.placement.storage import availability
from waltzctl.shell.options import command_of
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.cluster.documents import Membership
from waltzd.errors import CannotConnect, ForeignCluster
from waltzd.errors.operations import BadMetadata, CoordinatorRefused, NodeMissing

GONE = CannotConnect("nobody listens there")
UP = "waltzctl up here --detach"


def judge(found: ClusterSnapshot, **known: Any) -> Verdict:
    return rules.judge(Facts(snapshot=found, **known))


def one(found: Verdict) -> tuple[str, str]:
    """Of a verdict with one reason: what it says, and what to do."""
    assert len(found.reasons) == 1, [reason.sentence for reason in found.reasons]
    return found.reasons[0].sentence, found.reasons[0].next_step


def without(found: ClusterSnapshot, name: str) -> ClusterSnapshot:
    """One daemon is silent."""
    return replace(
        found,
        servers=tuple(silent(view, GONE) if view.meta.name == name else view for view in found.servers),
        storages=tuple(silent(view, GONE) if view.meta.name == name else view for view in found.storages),
    )


def test_all_is_well() -> None:
    found = judge(well())
    assert (found.health, found.reasons, found.is_healthy) == (Health.HEALTHY, (), True)
    assert found.sentence == "all 4 partitions are open; 2 servers and 3 storages answer"


@pytest.mark.parametrize("is_open", [True, False])
def test_the_group_log_is_no_partition_of_applications(is_open: bool) -> None:
    """A cluster of 32 partitions was said to have 33."""
    found = well()
    last = found.partitions[-1]
    log = replace(last, partition=found.meta.partitions, is_group_log=True, reported=last.reported if is_open else None)
    verdict = judge(replace(found, partitions=(*found.partitions, log)))
    more = "" if is_open else ", the group log is not"
    assert verdict.sentence == f"all 4 partitions are open{more}; 2 servers and 3 storages answer"
    assert verdict.is_healthy == is_open


def test_a_storage_is_gone() -> None:
    """Its replicas no longer count, which is the same cause and said once."""
    replicas = (replica("s1"), replica("s2"), replica("s3", counts=False, state="DOWN", story="refused"))
    snapshot = well(partitions=tuple(partition(number, reported=owned(number, replicas)) for number in range(4)))
    found = judge(without(snapshot, "s3"))
    reported, step = one(found)
    assert found.health is Health.DEGRADED
    assert reported == "storage s3 does not answer at s3:2: nobody listens there. It has a replica of partitions 0-3"
    assert step == "start it again, or see why its machine does not answer"
    assert one(judge(without(snapshot, "s3"), down=["s3"], repair=UP)) == (
        "storage s3 does not run. It has a replica of partitions 0-3",
        UP,
    )
    assert one(judge(without(snapshot, "s3"), repair=UP))[1] == (
        "its process runs: read its log with `waltzctl logs --daemon s3`"
    )


def test_documents_that_were_deleted_or_spoiled() -> None:
    """The owners go on with what they said, and an operator is told."""
    told = well()
    views = [
        replace(view, reported=replace(view.reported, trouble="/storages/s1 is gone"))
        if view.reported and view.partition < 2
        else view
        for view in told.partitions
    ]
    snapshot = replace(told, partitions=tuple(views), unreadable={"/storages/s9": BadMetadata("/storages/s9 is no JSON")})
    found = judge(snapshot)
    assert found.health is Health.DEGRADED
    assert [reason.sentence for reason in found.reasons] == [
        "/storages/s9 is no JSON",
        "/storages/s1 is gone; the owners of partitions 0-1 continue with the last version they read",
    ]
    assert all("waltzctl storage add" in reason.next_step for reason in found.reasons)
    assert not snapshot.is_healthy


def test_a_server_that_should_be_there_is_missed() -> None:
    """Also when its session is over and its partitions are open elsewhere; until an operator takes it out."""
    snapshot = replace(well(servers=(server("a"),)), missing=(server("b").meta,))
    snapshot = replace(snapshot, partitions=tuple(replace(view, owner="a") for view in snapshot.partitions))
    found = judge(snapshot)
    assert found.health is Health.DEGRADED
    assert found.sentence == "all 4 partitions are open; 1 of 2 servers and 3 storages answer"
    reported, step = one(found)
    assert reported == "server b is not up: it was at b:2, and is not registered"
    assert "`waltzctl server remove b`" in step
    assert one(judge(snapshot, down=["b"], repair=UP)) == ("b does not run", UP)
    assert not snapshot.is_healthy


def test_an_assignment_without_partitions_is_not_well() -> None:
    for there, health in ((0, Health.DOWN), (3, Health.DEGRADED)):
        found = judge(replace(well(), partitions=well().partitions[:there]))
        assert found.health is health
        assert found.sentence.startswith(f"{there} of 4 partitions are open")
        assert one(found)[0].startswith(f"the assignment names {there} of 4 partitions")


def test_a_closed_partition_whose_replicas_nobody_knows() -> None:
    """Without documents only its owner knows them, and that one does not know them yet, or is silent."""
    views = well().partitions
    found = judge(replace(well(), partitions=(replace(views[0], replicas={}, reported=None), *views[1:])))
    assert not found.is_healthy
    assert any(reason.sentence.startswith("partition 0 takes no transactions") for reason in found.reasons)


def test_one_that_stands_still_is_named_once() -> None:
    late = CannotConnect("the storage s3 at s3:2 did not answer within 3 seconds", seconds="3")
    frozen = well(storages=(storage("s1"), storage("s2"), silent(storage("s3"), late)))
    assert (
        one(judge(frozen))[0] == "storage s3 does not answer at s3:2 within 3 seconds. It has a replica of partitions 0-3"
    )


def test_a_storage_of_another_cluster() -> None:
    stranger = silent(storage("s2"), ForeignCluster("the storage at s2:2 has the cluster key 8"))
    reported, step = one(judge(well(storages=(storage("s1"), stranger, storage("s3")))))
    assert reported.startswith("storage s2 is not of this cluster: the storage at s2:2 has the cluster key 8")
    assert step == "correct the address of s2, or start the right process there"


def test_a_replica_that_catches_up_names_itself_its_partitions_and_its_story() -> None:
    replicas = (replica("s1"), replica("s2"), replica("s3", counts=False, state="CATCHING_UP", story="holds 5 of 99"))
    views = (partition(0), *(partition(number, reported=owned(number, replicas)) for number in (1, 2)), partition(3))
    assert one(judge(well(partitions=views))) == (
        "s3's replicas of partitions 1-2 no longer count: catching up, holds 5 of 99 (partition 1)",
        "wait until it is level",
    )


def test_a_replica_of_another_history_fails_and_names_the_way_out() -> None:
    story = "it holds something else at id 9 than the log"
    for role in ("member", "learner"):
        other = replace(replica("s3", counts=False, state="DIVERGED", story=story), role=role)
        view = partition(1, reported=owned(1, (replica("s1"), replica("s2"), other)))
        checks = rules.diagnose(Facts(snapshot=well(partitions=(partition(0), view))))
        (found,) = [check for check in checks if check.name == "quorum margin"]
        assert found.grade is Grade.FAIL
        assert f"s3's replica of partition 1 no longer counts: diverged, {story}" in found.finding
        assert "`waltzctl storage recover s3`" in found.fix


def test_learners_are_no_reason() -> None:
    learner = replace(replica("s3", counts=False, state="CATCHING_UP"), role="learner")
    view = partition(0, reported=owned(0, (replica("s1"), replica("s2"), learner)))
    view = replace(view, replicas={"s1": Membership.MEMBER, "s2": Membership.MEMBER, "s3": Membership.LEARNER})
    assert judge(well(partitions=(view,))).is_healthy


def test_partitions_that_take_nothing_come_first_and_together() -> None:
    waits = "no majority takes appends"
    replicas = tuple(replica(name, counts=name == "s1", state="DOWN") for name in ("s1", "s2", "s3"))
    views = tuple(partition(number, reported=owned(number, replicas, waiting=waits)) for number in range(4))
    found = judge(without(without(well(partitions=views), "s2"), "s3"))
    assert found.health is Health.DOWN
    first = found.reasons[0]
    assert (first.sentence, first.stops) == (f"partitions 0-3 take no transactions: {waits}", True)
    assert first.next_step == "bring s2 and s3 back: 2 replicas have to answer"
    assert first.partitions == (0, 1, 2, 3)
    half = judge(well(partitions=(*views[:2], partition(2), partition(3))))
    assert (half.health, half.sentence[:27]) == (Health.DEGRADED, "2 of 4 partitions are open;")


def test_nobody_owns_a_partition() -> None:
    nobody = replace(partition(1), owner=None, reported=None)
    reported, step = one(judge(well(partitions=(partition(0), nobody))))
    assert reported == "partition 1 takes no transactions: no server owns it"
    assert step.startswith("wait until another server owns it")
    several = judge(well(partitions=(nobody, replace(nobody, partition=2), partition(3), partition(4))))
    assert one(several)[0] == "partitions 1-2 take no transactions: no server owns them"
    mute = tuple(replace(partition(number, owner="a"), reported=None) for number in (0, 1))
    assert one(judge(well(partitions=mute)))[0] == (
        "partitions 0-1 take no transactions: their owner a does not report their state"
    )
    found = judge(well(servers=(), leader=None, partitions=(nobody,)))
    assert [reason.next_step.partition(";")[0] for reason in found.reasons] == ["start a server", "start a server"]


def test_servers_register_again_by_themselves_after_zookeeper_has_ended_their_sessions() -> None:
    views = (replace(partition(0, owner="a"), reported=None), replace(partition(1, owner="b"), reported=None))
    found = judge(well(servers=(), leader=None, partitions=views))
    assert found.reasons[0].sentence.startswith("partitions 0-1 take no transactions: the owner is gone (a, b)")
    assert "no server is registered in ZooKeeper, so none is known to be up" in [one.sentence for one in found.reasons]
    for reason in found.reasons:
        assert reason.next_step.startswith("wait for one ZooKeeper session timeout: a, b owned partitions")
        assert "if none comes back, start a server" in reason.next_step


def test_the_owner_is_gone() -> None:
    """It is no longer registered, and the assignment still names it."""
    views = (replace(partition(0, owner="c"), reported=None), replace(partition(1, owner="d"), reported=None))
    assert one(judge(well(partitions=views))) == (
        "partitions 0-1 take no transactions: the owner is gone (c, d), and no other server has taken over",
        "wait until another server owns it, or start it again, or see why its machine does not answer",
    )


def test_an_owner_that_has_not_noticed_yet() -> None:
    """Two of three storages are silent, and the owner still counts them."""
    found = judge(without(without(well(), "s2"), "s3"))
    told = [reason.sentence for reason in found.reasons if reason.key.startswith("lonely")]
    assert len(told) == 1
    assert told[0].startswith("seen from here, 1 of 3 replicas of partitions 0-3 are level and answer, and 2 have to flush")


def test_an_owner_that_has_not_noticed_that_replicas_are_offline() -> None:
    """The storages say so themselves, so there is no doubt: nothing is committed."""
    snapshot = offline(s1=(0, 1), s2=(0,))
    found = judge(snapshot)
    assert (found.health, found.sentence[:27]) == (Health.DEGRADED, "3 of 4 partitions are open;")
    first = found.reasons[0]
    assert (first.sentence, first.stops, first.partitions) == (
        "partition 0 takes no transactions: 1 of 3 replicas can take them, and 2 have to: s1, s2 do not serve, which an "
        "owner notices when it writes there",
        True,
        (0,),
    )
    assert first.next_step == "bring those on s1, s2 back: `waltzctl storage describe s1` says how they are"
    assert [(view.state, view.counting) for view in snapshot.partitions] == [
        ("waiting", 1), ("open", 2), ("open", 3), ("open", 3),
    ]  # fmt: skip
    assert not snapshot.is_healthy
    assert [view.partition for view in snapshot.short] == [1]
    assert snapshot.partitions[0].owner_waiting == "", "whoever moves replicas goes by what the owner does"


def test_one_offline_and_one_silent() -> None:
    """The owner may still reach the silent one."""
    found = judge(without(offline(s1=(0,)), "s2"))
    told = [reason.sentence for reason in found.reasons if reason.key.startswith("lonely")]
    assert len(told) == 1
    assert told[0].startswith("seen from here, 1 of 3 replicas of partition 0 are level and answer, and 2 have to flush")


def test_zookeeper_is_gone() -> None:
    """Once, although every server says that it has lost contact, too."""
    apart = well(servers=(server("a", is_connected=False), server("b", is_connected=False)), leader=None)
    lost = Lost(cause=GONE, seen="2026-01-01T00:00:00Z")
    reported, step = one(judge(apart, lost=lost))
    assert reported.startswith(
        "ZooKeeper does not answer: nobody listens there; its last answer to this machine was at 2026-01-01T00:0"
    )
    assert step == "bring ZooKeeper back"
    assert one(judge(apart, lost=lost, down=["zookeeper"], repair=UP)) == (reported, UP)
    assert len(judge(apart).reasons) == 3, "the leader, and both servers"


def test_a_coordinator_that_refuses_has_answered() -> None:
    cause = CoordinatorRefused("ZooKeeper does not let this process near /", next_step="give credentials")
    (reason,) = judge(well(leader=None), lost=Lost(cause=cause, seen=None)).reasons
    assert reason.sentence.startswith("ZooKeeper refuses to show the documents: ZooKeeper does not let this process near /")
    assert reason.next_step == "give credentials"


def test_who_is_slow_is_noted_and_is_no_trouble() -> None:
    """A look that takes a second says little: the gate of an upgrade stays open, and `doctor` names it."""
    view = storage("s1")
    late = well(storages=(replace(view, call=replace(view.call, milliseconds=1234.0)), storage("s2"), storage("s3")))
    found = judge(late)
    assert (found.health, found.reasons) == (Health.HEALTHY, ())
    assert found.notes == ("s1 took 1,234 ms to report its state",)
    assert judge(well()).notes == ()


def test_what_storages_say_of_their_replicas() -> None:
    bad = storage("s1", assigned=(held(0, is_full=True), held(1, is_full=True), held(2, is_available=False)))
    refused = replace(held(3), status=None, story="partition 3: refused, a gap")
    found = judge(well(storages=(bad, storage("s2", assigned=(refused,)), storage("s3"))))
    assert [reason.sentence for reason in found.reasons] == [
        "an operator took partition 2 on s1 offline",
        "s2 does not serve its damaged replica of partition 3: refused, a gap",
        "the disk of s1 is full (data/s1): partitions 0-1 cannot be written there",
    ]


def test_the_way_back_online_can_be_typed() -> None:
    bad = storage("s1", assigned=(held(0, is_available=False), held(2, is_available=False), held(3, is_available=False)))
    _, step = one(judge(well(storages=(bad, storage("s2"), storage("s3")))))
    words = shlex.split(step.split("`")[1])
    assert words == ["waltzctl", "storage", "availability", "s1", "0,2-3", "--online"]
    command_of("availability", availability).make_context("availability", words[3:])  # refuses what is no such command line


def test_unfinished_moves() -> None:
    found = judge(well(moves={2: ("s1", "s2", "s4"), 3: ("s1", "s2", "s4")}))
    assert one(found)[0] == "replicas of partitions 2-3 are being moved from s1, s2, s3 to s1, s2, s4"


def test_a_process_that_nobody_registered() -> None:
    assert one(judge(well(), down=["server-3"], repair=UP)) == ("server-3 does not run", UP)


def test_a_server_that_runs_and_is_in_no_list() -> None:
    """It stood still until its session was over; its partitions are elsewhere."""
    found = judge(well(), unlisted={"c": 4711}, repair=UP)
    assert found.health is Health.DEGRADED
    assert one(found) == (
        "server c runs (process 4711), and ZooKeeper does not have it: it is frozen, has lost contact, or has only just "
        "been started",
        f"wait a moment; end a frozen process with `kill -9 4711`, and start it again with `{UP}`",
    )


def test_a_storage_that_is_not_in_the_cluster_may_rest() -> None:
    assert missed(["s3", "s4", "b", "zookeeper"], ["s1", "s2", "s3", "s4"], well()) == ["s3", "b", "zookeeper"]


def test_since_when() -> None:
    first = judge(without(well(), "s3"))
    told, remembered = with_since(first.reasons, {}, "10:00")
    assert [reason.since for reason in told] == ["10:00"]
    both = judge(replace(without(well(), "s3"), moves={0: ("s1",)}))
    told, remembered = with_since(both.reasons, remembered, "10:05")
    assert {reason.key: reason.since for reason in told} == {"silent s3": "10:00", "move 0": "10:05"}
    assert with_since((), remembered, "10:10") == ((), {}), "what is over is forgotten"


def test_documents_that_are_gone_are_no_invitation_to_make_others() -> None:
    lost = Lost(cause=NodeMissing("the coordinator has no cluster at this root"), seen="2026-01-01T00:00:00Z")
    reason = next(reason for reason in judge(well(), lost=lost).reasons if reason.key == "documents")
    assert "ZooKeeper answers" in reason.sentence
    assert "last answer to this machine was at 2026-01-01" in reason.sentence
    assert "put the newest copy" in reason.next_step
    assert "Make no second cluster over this one" in reason.next_step
    assert "create the cluster" not in NodeMissing("x").detail_next_step
