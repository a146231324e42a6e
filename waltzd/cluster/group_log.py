"""The group log in the documents of a cluster: where consumer groups stand is kept by the cluster itself, in one more log.

It has replicas, an owner, sessions and recovery like a partition, and the number behind those of all partitions. It exists
from the moment at which the assignment has one owner more than the cluster has partitions: in a new cluster from the first
transaction (`Cluster.create`), in an older one from its first group (`begin`). `ClusterMeta.partitions` does not count it.
"""

from __future__ import annotations

from collections.abc import Mapping

from waltzd.cluster.assignment import UNOWNED
from waltzd.cluster.cluster import ASSIGNMENT, NO_VERSION, REPLICAS, STORAGES, Cluster, put, replicas_path
from waltzd.cluster.coordinator import Change, Check, Set
from waltzd.cluster.documents import Assignment, ClusterMeta, Membership, ReplicaSet
from waltzd.errors import NodeMissing
from waltzd.protocol.document import encode


def is_there(assignment: Assignment, meta: ClusterMeta) -> bool:
    return len(assignment.owners) > meta.partitions


def logs_of(assignment: Assignment, meta: ClusterMeta) -> range:
    """The numbers of all logs that must not lose anything: the partitions, and the group log where there is one."""
    return range(meta.partitions + is_there(assignment, meta))


async def begin(cluster: Cluster, meta: ClusterMeta, storages: Mapping[str, Membership]) -> bool:
    """Write down, whole or not at all, that the cluster has a group log with replicas on these storages; False where it has
    one already. `ChangedMeanwhile` when something of it changed at the same moment: look again."""
    assignment, version = await cluster.assignment()
    if is_there(assignment, meta):
        return False
    number, coordinator = meta.partitions, cluster.coordinator
    checks: list[Change] = []
    for path in (REPLICAS, *(f"{STORAGES}/{name}" for name in sorted(storages))):
        node = await coordinator.get(path)
        if node is None:
            raise NodeMissing(f"the coordinator has no document {path}", path=path)
        # a command that looks through all sets of replicas has to notice that there is one more
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
