"""When a cluster may get its group log, where that comes to stand, and that plans count it among what must not be lost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.snapshots import SERVERS, STORAGES, held, partition, placement_state, server, silent, storage, well
from waltzctl.placement.creation import plan_group_log
from waltzctl.placement.metadata import statements
from waltzctl.placement.storage import removal
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.cluster.documents import Membership
from waltzd.errors import CannotConnect, NoSuchPartition
from waltzd.errors.operations import GroupLogRefused, MetadataMissing

N = 4
FRESH = held(N, promised_session=0, session=-1, committed=-1, last_id=-1)


def able(**changes: Any) -> ClusterSnapshot:
    servers = tuple(server(name, keeps_group_log=True) for name in SERVERS)
    storages = tuple(storage(name, keeps_group_log=True) for name in (*STORAGES, "s4", "s5"))
    return well(**{"servers": servers, "storages": storages, **changes})


def with_group_log() -> ClusterSnapshot:
    views = (*(partition(number) for number in range(N)), partition(N, is_group_log=True))
    return able(partitions=views, meta=well().meta)


def test_it_stands_on_as_many_storages_as_the_partitions_do_and_the_plan_is_the_same_again() -> None:
    names = plan_group_log(able())
    assert len(names) == 3
    assert set(names) <= {view.meta.name for view in able().storages}
    assert plan_group_log(able()) == names


def test_one_that_is_there_needs_no_plan() -> None:
    assert plan_group_log(with_group_log()) == ()


def test_an_empty_replica_of_an_interrupted_command_is_no_obstacle() -> None:
    assert plan_group_log(able(storages=tuple(with_replica(name, FRESH) for name in STORAGES))) == STORAGES


def with_replica(name: str, one: Any) -> Any:
    return storage(name, keeps_group_log=True, assigned=(*(held(number) for number in range(N)), one))


@pytest.mark.parametrize("name", ["a", "s2"])
def test_who_is_away_or_too_old_is_named(name: str) -> None:
    def changed(views: Any, change: Any) -> tuple[Any, ...]:
        return tuple(change(view) if view.meta.name == name else view for view in views)

    there = able()
    lost = lambda view: silent(view, CannotConnect("it is away"))  # noqa: E731
    away = able(servers=changed(there.servers, lost), storages=changed(there.storages, lost))
    with pytest.raises(GroupLogRefused, match=f"{name} does not answer"):
        plan_group_log(away)
    old = able(
        servers=changed(there.servers, lambda view: server(name)),
        storages=changed(there.storages, lambda view: storage(name)),
    )
    with pytest.raises(GroupLogRefused, match=f"{name} cannot hold a group log"):
        plan_group_log(old)


def test_storages_that_have_served_one_before_are_not_begun_anew() -> None:
    with pytest.raises(MetadataMissing, match="s1 has served a group log before"):
        plan_group_log(able(storages=tuple(with_replica(name, held(N)) for name in STORAGES)))


def test_plans_know_it_and_no_number_behind_it() -> None:
    roles = {number: dict.fromkeys(STORAGES, Membership.MEMBER) for number in range(N + 1)}
    now = placement_state(with_group_log(), roles)
    assert sorted(now.goals) == list(range(N + 1))
    now.check_partitions([N])
    with pytest.raises(NoSuchPartition):
        now.check_partitions([N + 1])
    with pytest.raises(NoSuchPartition):
        placement_state(able(), roles).check_partitions([N])


def test_a_storage_that_leaves_gives_its_replica_of_the_group_log_away() -> None:
    roles = {number: dict.fromkeys(("s2", "s3", "s4"), Membership.MEMBER) for number in range(N)}
    now = placement_state(with_group_log(), {**roles, N: dict.fromkeys(STORAGES, Membership.MEMBER)})
    goals = removal(now, "s1", fewer_replicas=False).goals
    assert "s1" not in goals[N]
    assert len(goals[N]) == 3


def test_what_storages_hold_of_it_is_asked_for_also_where_no_document_speaks_of_it() -> None:
    plain, holding = (tuple(storage(name) for name in STORAGES), tuple(with_replica(name, held(N)) for name in STORAGES))
    fresh = tuple(with_replica(name, FRESH) for name in STORAGES)
    assert len(statements(plain, N)) == len(statements(fresh, N)) == N
    assert len(statements(plain, N, logs=N + 1)) == N + 1
    assert set(statements(holding, N)[N].statuses) == set(STORAGES)
