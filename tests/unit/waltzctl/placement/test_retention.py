"""What is said before storages may remove something of the log, and when it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit import snapshots
from waltzctl.placement.cluster import keep_local_plan, too_much
from waltzctl.shell.safety import Plan
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.cluster.documents import keep_of
from waltzd.errors import BadArgument
from waltzd.errors.operations import Unsafe


def cluster(**changes: Any) -> ClusterSnapshot:
    found = snapshots.well()
    return replace(found, meta=replace(found.meta, **changes))


def planned(found: ClusterSnapshot, wanted: str, *, archived: bool = True) -> Plan:
    keep = keep_of(wanted)
    assert keep is not None
    return keep_local_plan(found, wanted, keep, archived=archived)


def test_the_plan_says_how_much_leaves() -> None:
    found = cluster(format=1)
    assert too_much(found, 1 << 60) == 0
    steps = planned(found, "2PB").steps
    assert steps == (
        "set storages to keep 2PB of the log of each replica (until now all of the log)",
        "nothing is removed from storages now",
    )
    held = [one.disk_bytes for view in found.storages if view.reported is not None for one in view.reported.assigned]
    assert too_much(found, 0) == sum(held)
    assert "older archived segments are removed" in planned(found, "7d").steps[1]
    back = planned(cluster(format=1, keep_local="7d"), "all")
    assert back.steps[0] == "set storages to keep all of the log (until now the last 7d of the log)"
    assert "does not come back" in back.steps[1]
    assert planned(cluster(format=1, keep_local="7d"), "7d").steps == ()


def test_nothing_is_removed_that_would_be_nowhere() -> None:
    with pytest.raises(Unsafe, match="nothing of the cluster trial is archived"):
        planned(cluster(format=1), "500GB", archived=False)
    assert planned(cluster(format=1), "all", archived=False).steps == ()


def test_a_log_without_times_cannot_be_kept_by_time() -> None:
    with pytest.raises(BadArgument, match="writes format 0, which has no times"):
        planned(cluster(format=0), "7d")
    assert planned(cluster(format=0), "1GB").steps
