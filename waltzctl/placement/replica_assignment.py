"""Placement of partitions on storages. No I/O; equal questions have equal answers.

There are two aims. First, as few replicas of a partition as possible share a failure group. Second, as far as the first
aim allows, all storages have equally many replicas. Both are met exactly by counting first and placing afterwards: the
counts of the storages are laid in one line, group by group, and the line is wound around the partitions. A group that
is no longer than one turn meets no partition twice.

If there are replicas already, a third aim is to copy as few as possible. These aims conflict, which is solved as a
minimum-cost flow (`waltzd.cluster.assignment`): replicas flow from partitions of the same kind, through groups, to
storages. A copy has a price; a further replica on a storage costs more than all copies together, and the more the
fuller the storage is.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from waltzd.cluster.assignment import Network
from waltzd.cluster.documents import ClusterMeta, StorageMeta
from waltzd.errors import BadArgument
from waltzd.protocol.quorum import majority


@dataclass(frozen=True, kw_only=True)
class Creation:
    """Placement of a cluster that `create-cluster` made, or would make."""

    meta: ClusterMeta
    storages: Mapping[str, StorageMeta]
    replicas: Mapping[int, tuple[str, ...]]
    """Partition, or the number of the group log → names of storages."""
    was_there: bool
    """Whether the documents existed already, so that this was a repetition."""
    created: Mapping[str, tuple[int, ...]]
    """Storage → partitions whose empty replica was made there now, which may include the group log."""

    @property
    def group_log(self) -> tuple[str, ...]:
        """Storages with a replica of the group log; empty for a cluster without one."""
        return self.replicas.get(self.meta.partitions, ())

    def partitions_of(self, storage: str) -> list[int]:
        return [partition for partition in range(self.meta.partitions) if storage in self.replicas.get(partition, ())]

    def created_on(self, storage: str) -> list[int]:
        """Return the partitions, without the group log, that got their empty replica on this storage just now."""
        return [partition for partition in self.created.get(storage, ()) if partition < self.meta.partitions]


def assign_replicas(partitions: int, storages: Mapping[str, str], replication: int) -> dict[int, tuple[str, ...]]:
    """Assign storages to each partition. `storages` maps each name to its group."""
    assert partitions >= 1, partitions
    assert replication >= 1, replication
    _check_enough(storages, replication)
    counts = _counts(dict.fromkeys(range(partitions), replication), storages)
    return dict(enumerate(_wind(counts, storages, partitions)))


def reassign_replicas(
    current: Mapping[int, tuple[str, ...]], storages: Mapping[str, str], replication: Mapping[int, int]
) -> dict[int, tuple[str, ...]]:
    """Assign storages to partitions that have replicas already, on storages that may be gone. Only partitions in
    `replication` are assigned. Nothing moves without a reason, so planning a planned placement changes nothing."""
    assert all(count >= 0 for count in replication.values()), replication
    _check_enough(storages, max(replication.values(), default=0))
    kinds = _kinds(current, storages, replication)
    guess = _counts(replication, storages)
    near = _NEAR
    while True:
        windows = {name: _Window.around(count, near, len(replication)) for name, count in guess.items()}
        sent = _send(kinds, storages, windows)
        counts = {name: sum(counts[name] for counts in sent.values()) for name in storages}
        if all(windows[name].has_inside(counts[name]) for name in storages):
            break
        near *= 2
    planned: dict[int, tuple[str, ...]] = {}
    for kind, numbers in kinds.items():
        planned.update(zip(numbers, _wind(sent[kind], storages, len(numbers)), strict=True))
    return dict(sorted(planned.items()))


def together(groups: Mapping[str, int], replication: int) -> int:
    """Return how many replicas of one partition must share a group, given the number of storages in each group."""
    found = range(replication + 1)
    return next(most for most in found if sum(min(size, most) for size in groups.values()) >= replication)


def crowded(names: Iterable[str], storages: Mapping[str, str]) -> str | None:
    """Return the group whose failure would leave a partition without a majority; None if there is none."""
    replicas = list(names)
    found = Counter(storages.get(name, name) for name in replicas)
    group, count = max(found.items(), key=lambda item: (item[1], item[0]), default=("", 0))
    return group if count > 1 and len(replicas) - count < majority(len(replicas)) else None


def sizes(storages: Mapping[str, str]) -> dict[str, int]:
    """Count the storages of each group."""
    found: dict[str, int] = {}
    for name in sorted(storages):
        found[storages[name]] = found.get(storages[name], 0) + 1
    return dict(sorted(found.items()))


def _check_enough(storages: Mapping[str, str], replication: int) -> None:
    if len(storages) < replication:
        raise BadArgument(
            f"{replication} replicas of each partition need as many storages; there are {len(storages)}",
            next_step="name more storages, or ask for fewer replicas: three are usual, and two of three must be up",
            storages=len(storages),
            replicas=replication,
        )


def _by_group(storages: Mapping[str, str]) -> list[str]:
    return sorted(storages, key=lambda name: (storages[name], name))


def _wind(counts: Mapping[str, int], storages: Mapping[str, str], partitions: int) -> list[tuple[str, ...]]:
    """Lay all counts out in one line, and wind it around the partitions."""
    line = [name for name in _by_group(storages) for _ in range(counts[name])]
    return [tuple(sorted(line[partition::partitions])) for partition in range(partitions)]


def _counts(replication: Mapping[int, int], storages: Mapping[str, str]) -> dict[str, int]:
    """Count replicas for each storage: one more at a time for the storage that has least, until its group has as many
    as the partitions may have there. Exact if all partitions have equally many replicas."""
    groups = sizes(storages)
    room = dict.fromkeys(groups, 0)
    for replicas, partitions in Counter(replication.values()).items():
        most = together(groups, replicas)
        for group, size in groups.items():
            room[group] += partitions * min(size, most)
    counts = dict.fromkeys(sorted(storages), 0)
    queue = [(0, name) for name in sorted(storages)]
    for _ in range(sum(replication.values())):
        while room[storages[queue[0][1]]] == 0:
            heapq.heappop(queue)
        count, name = queue[0]
        counts[name] = count + 1
        room[storages[name]] -= 1
        heapq.heapreplace(queue, (count + 1, name))
    return counts


# -- the flow ----------------------------------------------------------------------------------------------------------

_SOURCE, _TARGET, _FIRST_STORAGE = range(3)
_NEAR = 2


@dataclass(frozen=True)
class _Kind:
    """Properties of a partition that matter for the plan: its present storages that still exist, and the number of
    replicas that it shall have."""

    held: tuple[str, ...]
    replicas: int


def _kinds(
    current: Mapping[int, tuple[str, ...]], storages: Mapping[str, str], replication: Mapping[int, int]
) -> dict[_Kind, list[int]]:
    kinds: defaultdict[_Kind, list[int]] = defaultdict(list)
    for number, replicas in sorted(replication.items()):
        held = {name for name in current.get(number, ()) if name in storages}
        kinds[_Kind(tuple(sorted(held)), replicas)].append(number)
    return kinds


@dataclass(frozen=True)
class _Window:
    """Range of counts of a storage whose prices the flow knows exactly. Below it one more is free, above it there is no
    room. Prices only rise, so a flow that ends inside the range is optimal."""

    low: int
    high: int
    limit: int

    @classmethod
    def around(cls, guess: int, near: int, limit: int) -> _Window:
        return cls(max(0, guess - near), min(limit, guess + near), limit)

    def has_inside(self, count: int) -> bool:
        return (count > self.low or self.low == 0) and (count < self.high or self.high == self.limit)


def _send(
    kinds: Mapping[_Kind, Sequence[int]], storages: Mapping[str, str], windows: Mapping[str, _Window]
) -> dict[_Kind, dict[str, int]]:
    """Return how many replicas of each kind each storage gets."""
    groups = sizes(storages)
    most = {replicas: together(groups, replicas) for replicas in dict.fromkeys(kind.replicas for kind in kinds)}
    crowded = {kind: [group for group in groups if groups[group] > most[kind.replicas]] for kind in kinds}
    place = {name: _FIRST_STORAGE + at for at, name in enumerate(_by_group(storages))}
    here = _FIRST_STORAGE + len(place)
    network = Network(here + len(kinds) + sum(map(len, crowded.values())))
    copies = sum(kind.replicas * len(numbers) for kind, numbers in kinds.items())
    pipes: dict[_Kind, dict[str, int]] = {}
    for kind, numbers in kinds.items():
        starts = dict.fromkeys(groups, here)
        network.add(_SOURCE, here, capacity=kind.replicas * len(numbers), price=0)
        for at, group in enumerate(crowded[kind], here + 1):
            starts[group] = at
            network.add(here, at, capacity=most[kind.replicas] * len(numbers), price=0)
        here += 1 + len(crowded[kind])
        pipes[kind] = {
            name: network.add(starts[storages[name]], end, capacity=len(numbers), price=int(name not in kind.held))
            for name, end in place.items()
        }
    for name, start in place.items():
        window = windows[name]
        network.add(start, _TARGET, capacity=window.low, price=0)
        for count in range(window.low + 1, window.high + 1):
            network.add(start, _TARGET, capacity=1, price=count * (copies + 1))
    network.send(_SOURCE, _TARGET)
    return {kind: {name: network.sent(pipe) for name, pipe in found.items()} for kind, found in pipes.items()}
