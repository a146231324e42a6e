"""Creation of the group log in a cluster that has none.

First its empty replicas are made, on storages chosen as for a new cluster; then one change of the documents creates it.
A command killed in between leaves unused empty replicas, and the next run chooses the same storages and continues.
Servers open the group log when they see that the assignment has one more owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from waltzctl.placement.creation import CALL_SECONDS, is_fresh
from waltzctl.placement.replica_assignment import assign_replicas
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzctl.snapshot.collector import take_snapshot
from waltzd.cluster import group_log
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Membership
from waltzd.errors.operations import ChangedMeanwhile, GroupLogRefused, MetadataMissing, PartitionExists
from waltzd.wire.storages import AdminClient
from waltzd.wire.tls import Tls

ATTEMPTS_MAX = 5


def plan_group_log(found: ClusterSnapshot) -> tuple[str, ...]:
    """Choose the storages for the group log; return none if the cluster has one. Raise if it must not be made."""
    if found.group_log is not None:
        return ()
    silent = sorted(found.silent)
    if silent:
        raise GroupLogRefused(f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer")
    old = [view.meta.name for view in found.nodes if view.reported is not None and not view.reported.keeps_group_log]
    if old:
        raise GroupLogRefused(f"{', '.join(old)} cannot hold a group log: too old a version of Waltz runs there")
    number = found.meta.partitions
    for view in found.storages:
        replica = view.replica(number)
        if replica is not None and not is_fresh(replica):
            raise MetadataMissing(
                f"{view.meta.name} has served a group log before, partition {number}, and the coordinator knows of none"
            )
    counts = Counter(len(view.replicas) for view in found.partitions)
    replication = max(counts, key=lambda count: (counts[count], count))
    groups = {view.meta.name: view.meta.group for view in found.storages}
    return assign_replicas(number + 1, groups, replication)[number]


async def make_group_log(cluster: Cluster, *, tls: Tls | None = None) -> bool:
    """Make the group log; return False if the cluster had it already."""
    for _ in range(ATTEMPTS_MAX):
        found = await take_snapshot(cluster.coordinator, tls=tls)
        names = plan_group_log(found)
        if not names:
            return False
        await _create_replicas(found, names, tls)
        try:
            return await group_log.begin(cluster, found.meta, dict.fromkeys(names, Membership.MEMBER))
        except ChangedMeanwhile:
            continue
    raise ChangedMeanwhile(f"the documents of the cluster were changed by others {ATTEMPTS_MAX} times in a row")


async def _create_replicas(found: ClusterSnapshot, names: Sequence[str], tls: Tls | None) -> None:
    number, key = found.meta.partitions, found.meta.key
    for name in names:
        view = found.storage(name)
        if view.replica(number) is not None:
            continue
        async with AdminClient(view.meta.admin_listen, key, seconds=CALL_SECONDS, tls=tls, name=name) as admin:
            refusal = (await admin.create_partitions([number]))[number]
        if refusal is not None and not isinstance(refusal, PartitionExists):
            raise refusal
