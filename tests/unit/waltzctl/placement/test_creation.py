"""What is looked at before a cluster is made."""

from __future__ import annotations

import pytest

from tests.unit import snapshots
from waltzctl.placement.creation import CREATED_MAX, ClusterSpec, check_formats
from waltzd.cluster.cluster import ASSIGNMENT
from waltzd.cluster.coordinator import Set, check_size
from waltzd.cluster.documents import GENERATION_MAX, Assignment, Ownership
from waltzd.errors import BadArgument
from waltzd.errors.operations import FormatUnknown
from waltzd.protocol.descriptions import StorageDescription
from waltzd.protocol.document import encode


def said(formats: tuple[int, ...], version: str) -> StorageDescription:
    found = snapshots.storage("one", formats=formats, version=version).reported
    assert found is not None
    return found


def test_a_storage_that_is_too_old_for_a_format_is_named_with_its_version() -> None:
    new, old = said((0, 1), "0.2.0"), said((0,), "0.1.0")
    check_formats({"one": new, "two": old}, 0)
    check_formats({"one": new}, 1)
    with pytest.raises(FormatUnknown, match=r"three, two cannot write format 1: their versions are 0\.1\.0"):
        check_formats({"one": new, "two": old, "three": old}, 1)


def test_the_owners_of_the_largest_cluster_fit_into_the_coordinator_whatever_their_names_are() -> None:
    ClusterSpec(name="trial", partitions=CREATED_MAX, replication=1, storages=())
    owners = Assignment(owners=(Ownership("n" * 64, GENERATION_MAX),) * (CREATED_MAX + 1))  # and of the group log
    check_size([Set(ASSIGNMENT, encode(owners), 0)])
    with pytest.raises(BadArgument, match="7901 partitions: ZooKeeper takes the owners of 7900 at most"):
        ClusterSpec(name="trial", partitions=CREATED_MAX + 1, replication=1, storages=())
