"""Which storages hold which partitions. Pure: the same question has the same answer.

Two wishes: as few replicas of a partition as possible stand in one group, so that a group that goes away takes few of them
with it; and every storage has as many replicas as the others, as far as the first wish permits. Both are met exactly, by
counting first and placing afterwards: once each storage's count is known, all counts are laid in one line, group by group,
and the line is wound around the partitions. A group whose stretch is no longer than one turn meets no partition twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from waltzd.errors import TooFewStorages


def assign_replicas(partitions: int, storages: Mapping[str, str], replication: int) -> dict[int, tuple[str, ...]]:
    """Partition → names of storages. `storages` says the group of each name."""
    assert partitions >= 1, partitions
    assert replication >= 1, replication
    if len(storages) < replication:
        raise TooFewStorages(
            f"{replication} replicas of each partition need as many storages; there are {len(storages)}",
            storages=len(storages),
            replicas=replication,
        )
    line = [name for name, count in _counts(partitions, storages, replication).items() for _ in range(count)]
    return {partition: tuple(sorted(line[partition::partitions])) for partition in range(partitions)}


def together(groups: Mapping[str, int], replication: int) -> int:
    """How many replicas of one partition have to stand in one group, given how many storages each group has."""
    found = range(1, replication + 1)
    return next(most for most in found if sum(min(size, most) for size in groups.values()) >= replication)


def sizes(storages: Mapping[str, str]) -> dict[str, int]:
    """How many storages each group has."""
    found: dict[str, int] = {}
    for name in sorted(storages):
        found[storages[name]] = found.get(storages[name], 0) + 1
    return dict(sorted(found.items()))


def _counts(partitions: int, storages: Mapping[str, str], replication: int) -> dict[str, int]:
    """How many replicas each storage gets, group by group: always one more for the storage that has least, until its group
    has as many as the partitions may have there."""
    groups = sizes(storages)
    most = together(groups, replication)
    room = {group: partitions * min(size, most) for group, size in groups.items()}
    counts = dict.fromkeys(sorted(storages, key=lambda name: (storages[name], name)), 0)
    queue = [(0, name) for name in sorted(storages)]
    for _ in range(partitions * replication):
        while room[storages[queue[0][1]]] == 0:
            heapq.heappop(queue)
        count, name = queue[0]
        counts[name] = count + 1
        room[storages[name]] -= 1
        heapq.heapreplace(queue, (count + 1, name))
    return counts
