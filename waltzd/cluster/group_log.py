"""The group log in the documents of a cluster: one more log, in which the cluster stores the state of consumer groups.

It has replicas, an owner, sessions and recovery like a partition; its number is the one after the last partition. It exists
if the assignment has one owner more than the cluster has partitions: in a new cluster from its creation
(`Cluster.create`), in an older one from its first group (`begin`). `ClusterMeta.partitions` does not count it.
"""

from __future__ import annotations

from collections.abc import Mapping

from waltzd.cluster.assignment import UNOWNED
from waltzd.cluster.cluster import ASSIGNMENT, NO_VERSION, REPLICAS, STORAGES, Cluster, put, replicas_path
from waltzd.cluster.coordinator import Change, Check, Set
from waltzd.cluster.documents import Assignment, ClusterMeta, Membership, ReplicaSet
from waltzd.errors.operations import NodeMissing
from waltzd.protocol.document import encode


def has_group_log(assignment: Assignment, meta: ClusterMeta) -> bool:
    return len(assignment.owners) > meta.partitions


def logs_of(assignment: Assignment, meta: ClusterMeta) -> range:
    """Return the numbers of all logs: the partitions, and the group log if there is one."""
    return range(meta.partitions + has_group_log(assignment, meta))


async def begin_group_log(cluster: Cluster, meta: ClusterMeta, storages: Mapping[str, Membership]) -> bool:
    """Create the group log with replicas on these storages, in one transaction; return False if there is one already.

    Raises:
        ChangedMeanwhile: One of the documents changed at the same moment; read them again and retry.
    """
    assignment, version = await cluster.assignment()
    if has_group_log(assignment, meta):
        return False
    number, coordinator = meta.partitions, cluster.coordinator
    checks: list[Change] = []
    for path in (REPLICAS, *(f"{STORAGES}/{name}" for name in sorted(storages))):
        node = await coordinator.get(path)
        if node is None:
            raise NodeMissing(f"the coordinator has no document {path}", path=path)
        # a command that reads all replica sets has to notice the new one
        checks.append(Set(path, b"", node.version) if path == REPLICAS else Check(path, node.version))
    node = await coordinator.get(replicas_path(number))
    before = NO_VERSION if node is None else node.version
    owners = Assignment(owners=(*assignment.owners, UNOWNED))
    await coordinator.commit(
        [
            *checks,
            put(replicas_path(number), encode(ReplicaSet(storages)), before),
            Set(ASSIGNMENT, encode(owners), version),
        ]
    )
    return True
