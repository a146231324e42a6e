"""Whether a storage may fall silent, as a snapshot of the cluster says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.snapshots import partition, storage, well
from waltzctl.health.status import cannot_spare, has_no_owner, obstacles
from waltzd.cluster.documents import Membership
from waltzd.errors import CannotConnect
from waltzd.errors.operations import NoSuchName


def test_a_majority_stays() -> None:
    assert obstacles(well(), "s1") == []
    assert not cannot_spare(well(), "s1")


def test_another_one_is_silent() -> None:
    silent = replace(storage("s2"), reported=None, error=CannotConnect("no"))
    found = well(storages=(storage("s1"), silent, storage("s3")))
    assert obstacles(found, "s1")[0].startswith("partition 0 would have 1 of 3 members level")
    assert obstacles(found, "s2") == [], "it is down already"


def test_what_is_not_known_is_no_yes() -> None:
    mute = replace(partition(0), reported=None)
    assert obstacles(well(partitions=(mute, partition(1))), "s1") == ["its owner does not say how partition 0 is"]


def test_without_a_server_nobody_knows() -> None:
    alone = well(servers=())
    assert has_no_owner(alone, "s1")
    assert obstacles(alone, "s1") == ["ZooKeeper lists no server, so no owner says which replicas are level"]
    assert not has_no_owner(well(), "s1")
    assert obstacles(well(servers=(), partitions=()), "s1") == [], "it holds nothing that anybody could miss"


def test_one_replica_can_never_be_spared() -> None:
    alone = replace(partition(0), replicas={"s1": Membership.MEMBER})
    found = well(partitions=(alone, partition(1)))
    assert cannot_spare(found, "s1")
    assert not cannot_spare(found, "s2")
    assert obstacles(found, "s1")[0].startswith("partition 0 would have 0 of 1 members level")


def test_a_storage_that_is_not_there() -> None:
    with pytest.raises(NoSuchName, match="s9"):
        obstacles(well(), "s9")
