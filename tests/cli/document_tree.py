"""All that the coordinator holds of a cluster, to be compared before and after a command."""

from __future__ import annotations

from waltzctl.shell.cluster_target import resolve, using
from waltzd.cluster.cluster import Cluster

Tree = dict[str, tuple[bytes, int]]
_MOVED_BY_SERVERS = ("/partitions/", "/ids/", "/servers/", "/election/", "/assignment", "/clients/")
"""What servers and clients write by themselves."""


def document_tree(directory: str) -> Tree:
    """Path → content and version, without what daemons change by themselves."""

    async def read(cluster: Cluster) -> Tree:
        found: Tree = {}
        paths = ["/"]
        for path in paths:  # grows while it is walked
            node = await cluster.coordinator.get(path)
            if node is not None and not path.startswith(_MOVED_BY_SERVERS):
                found[path] = node.data, node.version
            paths += [f"{path.rstrip('/')}/{name}" for name in await cluster.coordinator.children(path)]
        return found

    return using(resolve({"directory": directory}), read)
