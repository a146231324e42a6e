"""A cluster that is told to write a newer format: what is refused, what is said before, and what is waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit import snapshots
from waltzctl.placement.cluster import finalize_plan, format_plan, unchanged
from waltzctl.shell.safety import Danger
from waltzctl.show.cluster import picture_json
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView, StorageView
from waltzd.errors import CannotConnect
from waltzd.errors.operations import FormatUnknown, Unsafe
from waltzd.protocol.level import THIS


def partition(number: int, format: int, **changes: Any) -> PartitionView:
    found = snapshots.partition(number)
    assert found.reported is not None
    return replace(found, reported=replace(found.reported, format=format, **changes))


def cluster(*formats: int, told: int = 0, storages: tuple[StorageView, ...] | None = None) -> ClusterSnapshot:
    found = snapshots.well(
        partitions=tuple(partition(number, format) for number, format in enumerate(formats)),
        storages=storages or tuple(snapshots.storage(name, formats=(0, 1)) for name in snapshots.STORAGES),
    )
    return replace(found, meta=replace(found.meta, partitions=len(formats), format=told))


def test_the_plan_says_what_changes_and_that_there_is_no_way_back() -> None:
    plan = format_plan(cluster(0, 0, 0), 1)
    assert (plan.verb, plan.subject, plan.refusals) == ("cluster set", "trial", [])
    assert plan.steps == (
        "set the cluster trial to format 1",
        "partitions 0-2 change, each in a new session: transactions wait for a moment, none is lost",
        "a partition that has changed cannot go back; existing segments stay in format 0",
    )


def test_a_command_that_goes_on_only_waits_for_the_rest() -> None:
    found = cluster(1, 0, 1, told=1)
    assert [view.partition for view in unchanged(found, 1)] == [1]
    assert format_plan(found, 1).steps[0].startswith("partition 1 changes in a new session: ")
    assert format_plan(cluster(1, 1, 1, told=1), 1).steps == ()
    assert format_plan(cluster(0, 0), 0).steps == ()


def test_a_partition_that_is_not_open_goes_over_later() -> None:
    found = cluster(0, 0)
    found = replace(found, partitions=(found.partitions[0], partition(1, 0, step="SETTLING", waiting="for two of three")))
    assert "partition 1 is not open, and changes when it opens" in format_plan(found, 1).steps
    assert [view.partition for view in unchanged(found, 1)] == [0, 1]
    assert unchanged(found, 0) == [], "there is nothing below it"


def test_every_storage_must_answer_and_know_the_format() -> None:
    one, two, three = (snapshots.storage(name, formats=(0, 1)) for name in snapshots.STORAGES)
    old = snapshots.storage("s2", version="0.1.0")
    with pytest.raises(FormatUnknown, match=r"s2 cannot write format 1: its version is 0\.1\.0"):
        format_plan(cluster(0, storages=(one, old, three)), 1)
    silent = replace(two, reported=None, error=CannotConnect("no answer"))
    with pytest.raises(FormatUnknown, match="s2 does not answer, and may be too old to write format 1") as refused:
        format_plan(cluster(0, storages=(one, silent, three)), 1)
    assert (refused.value.exit_code, refused.value.detail_not_done) == (5, "nothing was changed")


def test_there_is_no_way_back() -> None:
    with pytest.raises(Unsafe, match="writes format 1, and cannot go back"):
        format_plan(cluster(1, 0, told=1), 0)


def test_a_picture_says_what_each_partition_writes() -> None:
    found = picture_json(cluster(1, 0, told=1))
    assert (found["format"], [one["format"] for one in found["partitions"]]) == (1, [1, 0])


# -- levels ------------------------------------------------------------------------------------------------------------


def of_versions(servers: str = "0.1.0", storages: str = "0.1.0", **changes: Any) -> ClusterSnapshot:
    found = snapshots.well(storages=tuple(snapshots.storage(name, version=storages) for name in snapshots.STORAGES))
    views = tuple(replace(view, meta=replace(view.meta, version=servers)) for view in found.servers)
    return replace(found, servers=views, **changes)


def test_a_level_is_raised_when_every_process_supports_it() -> None:
    plan = finalize_plan(of_versions())
    assert (plan.verb, plan.subject, plan.danger) == ("cluster finalize", "trial", Danger.TYPED)
    assert plan.steps == (
        f"raise the level of the cluster trial from 0 to {THIS.level}",
        f"versions that do not support level {THIS.level} are refused from then on: there is no way back to them",
    )
    found = of_versions()
    assert finalize_plan(replace(found, meta=replace(found.meta, level=THIS.level))).steps == ()


def test_a_level_is_not_raised_over_a_process_of_an_older_version() -> None:
    with pytest.raises(Unsafe, match=r"server a \(version 0\.0\.0\), server b .* do not support level 1") as refused:
        finalize_plan(of_versions(servers="0.0.0"))
    assert refused.value.detail_not_done == "nothing was changed"
    with pytest.raises(Unsafe, match=r"^storage s1 \(version 0\.0\.0\), storage s2"):
        finalize_plan(of_versions(storages="0.0.0"))
    away = replace(snapshots.server("away").meta, version="0.0.0")
    with pytest.raises(Unsafe, match=r"^server away \(version 0\.0\.0\) does not support level 1"):
        finalize_plan(of_versions(missing=(away,)))
    found = of_versions()
    silent = replace(found.storages[0], reported=None, error=CannotConnect("no answer"))
    with pytest.raises(Unsafe, match="s1 does not answer, and may be too old for level 1"):
        finalize_plan(replace(found, storages=(silent, *found.storages[1:])))
