"""Documents of a cluster that are restored into ZooKeeper: what is there already, what must be written, and in which
order.

A cluster with only some of its documents would start empty, so an incomplete one must never be taken for a cluster. The
root document says so first (`Unfinished`): from then on every starting daemon and every other tool refuses it. Then
come the documents of storages and partitions, and all others. The last transaction writes what servers start from:
their list, the assignment, and the root itself. A killed command leaves a root that is refused, or a complete cluster.
Running the command again completes it; existing documents are left as they are.

Storages are fenced before a decision is made from what they hold, as in a rescue, so their reports stay true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from waltzctl.placement.creation import is_fresh
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.proof import Proven, Statement, Unproven, Verdict, statement
from waltzctl.shell.progress import Report
from waltzctl.snapshot.cluster_snapshot import StorageView
from waltzd.cluster.assignment import UNOWNED
from waltzd.cluster.cluster import (
    ASSIGNMENT,
    ELECTION,
    FOLDERS,
    HISTORY,
    NO_VERSION,
    ROOT,
    SERVERS,
    STORAGES,
    Cluster,
    partition_path,
    put,
    replicas_path,
)
from waltzd.cluster.coordinator import Change, Coordinator, Create, Node, Set
from waltzd.cluster.documents import (
    GENERATION_MAX,
    Assignment,
    ClusterMeta,
    HistoryEntry,
    Ownership,
    PartitionMeta,
    ReplicaSet,
    StorageMeta,
    Unfinished,
    decode_root,
    unfinished,
)
from waltzd.cluster.metadata import kind_of
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, NameInUse, Unsafe
from waltzd.protocol.document import Document, decode, encode

CHANGES_MAX, CHANGES_BYTES_MAX = 500, 400_000
"""Limits of one ZooKeeper transaction: changes, and bytes."""
FENCED_AT_ONCE = 16
GENERATIONS_AHEAD = 1 << 16
"""Generations added to the highest known one if the clock does not give a higher one: servers and clients that kept
running may know later generations than the restored documents."""
COUNTED_FROM = 1_704_067_200
"""Seconds since 1970 at 2024-01-01; generations count from there, because they have 31 bits."""


def clock_generation(now: float) -> int:
    """Return a generation above every earlier one: the seconds since 2024. No partition changes its owner once a second
    for years. Clients remember generations, and would take servers with lower ones for servers that have fallen behind.
    `now`: seconds since 1970."""
    return min(max(0, int(now) - COUNTED_FROM), GENERATION_MAX - GENERATIONS_AHEAD)


# -- reports of storages ----------------------------------------------------------------------------------------------


def statements(storages: Collection[StorageView], partitions: int, *, logs: int = 0) -> list[Statement]:
    """Collect the reports of all storages by partition. The group log is included if the documents know it (`logs`) or
    a storage holds data of it; an empty replica is a remainder of an interrupted command."""
    reported = (one for view in storages if view.reported is not None for one in view.reported.assigned)
    held = {one.partition for one in reported if not is_fresh(one)}
    partitions = max(logs, partitions + (partitions in held))
    return [statement(storages, number) for number in range(partitions)]


# -- what is there -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Target:
    """Content of ZooKeeper at the root where documents are restored."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    meta: ClusterMeta | None = None
    """Complete cluster at the root; None if there is none."""
    begun: Unfinished | None = None
    """Note of the command that began a restore; None if there is none."""

    @property
    def is_empty(self) -> bool:
        return ROOT not in self.nodes

    def document(self, path: str) -> Document | None:
        """Return a document; None if it is missing or cannot be decoded."""
        node, kind = self.nodes.get(path), kind_of(path)
        if node is None or kind is None:
            return None
        try:
            return decode(kind, node.data, path)
        except BadMetadata as error:
            if "schema" in error.facts:
                raise
            return None

    def partition(self, number: int) -> PartitionMeta | None:
        found = self.document(partition_path(number))
        return found if isinstance(found, PartitionMeta) else None

    @property
    def storages(self) -> dict[str, StorageMeta]:
        found = (self.document(path) for path in self.nodes if path.startswith(f"{STORAGES}/"))
        return {one.name: one for one in found if isinstance(one, StorageMeta)}

    @property
    def owners(self) -> tuple[Ownership, ...]:
        found = self.document(ASSIGNMENT)
        return found.owners if isinstance(found, Assignment) else ()


async def read_target(cluster: Cluster, wanted: ClusterMeta) -> Target:
    """Refuse another cluster, a cluster in use, and a root that holds something else."""
    coordinator = cluster.coordinator
    root = await coordinator.get(ROOT)
    if root is None:
        return Target()
    await cluster.check_alone()
    begun = unfinished(root.data)
    meta = decode_root(root.data) if begun is None else None
    key = begun.key if begun is not None else meta.key if meta is not None else None
    if key != wanted.key:
        what = "incomplete documents of another cluster" if meta is None else f"another cluster, {meta.name}"
        raise NameInUse(
            f"the coordinator holds {what} at this root: key {key}, not {wanted.key}",
            next_step="check the address of ZooKeeper and the root",
        )
    servers = await coordinator.children(SERVERS)
    if servers:
        raise Unsafe(
            f"the cluster {wanted.name} is in use: {', '.join(servers)} run and own its partitions",
            not_done="nothing was changed",
            next_step="stop the servers first; their registration ends with them",
        )
    paths = await cluster.paths()
    nodes = await cluster.each(paths, coordinator.get)
    there = {path: node for path, node in zip(paths, nodes, strict=True) if node is not None}
    return Target(nodes=there, meta=meta, begun=begun)


# -- what is written ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """Documents that shall exist in the end."""

    meta: ClusterMeta
    verdicts: tuple[Verdict, ...]
    """Verdict for each partition, ordered by number; an unproven one gets no document."""
    generations: tuple[int, ...]
    """Highest known generation of each partition."""
    counted_by_clock: int
    """Generation from `clock_generation`, above every generation, known or unknown."""
    documents: Mapping[str, Document]
    """All other documents, by path."""
    storages: Mapping[str, StorageMeta]

    @property
    def proven(self) -> list[Proven]:
        return [one for one in self.verdicts if isinstance(one, Proven)]

    @property
    def unproven(self) -> list[Unproven]:
        return [one for one in self.verdicts if isinstance(one, Unproven)]

    def assignment(self, target: Target) -> Assignment:
        """Return an assignment without owners, with generations above all known ones."""
        known = target.owners if len(target.owners) == len(self.generations) else (UNOWNED,) * len(self.generations)
        owners = []
        for there, generation in zip(known, self.generations, strict=True):
            # Never ahead of the clock where that is above: a later command may know of the clock alone.
            far = min(generation + GENERATIONS_AHEAD, GENERATION_MAX - GENERATIONS_AHEAD)
            least = self.counted_by_clock if self.counted_by_clock > generation else far
            recent = max(generation, self.counted_by_clock - GENERATIONS_AHEAD)
            is_put_back = there.server is None and there.generation > recent  # by this command before; nobody has taken it
            is_above = there.generation >= far or is_put_back
            owners.append(there if is_above else Ownership(None, least))
        return Assignment(owners=tuple(owners))

    def last(self, target: Target) -> list[tuple[str, Document]]:
        """Return the documents that complete the cluster, written last."""
        return [(ASSIGNMENT, self.assignment(target)), (ROOT, self.meta)]

    def plain(self, target: Target) -> list[tuple[str, Document]]:
        """Return the documents that are written first, except for partitions whose storages must be fenced before."""
        found = list(self.documents.items())
        for one in self.proven:
            found += [] if one.scene is not None else _own(one)
        return [(path, document) for path, document in found if target.document(path) != document]

    def different(self, target: Target) -> list[str]:
        """Return the documents that are missing or differ."""
        last = [path for path, document in self.last(target) if target.document(path) != document]
        fenced = [partition_path(one.partition) for one in self.proven if one.scene is not None]
        return sorted({*(path for path, _ in self.plain(target)), *fenced, *last})


async def put_back(
    cluster: Cluster, daemons: Daemons, wanted: Restoration, target: Target, entry: HistoryEntry, report: Report
) -> None:
    """Write everything, in an order in which a partial result is never taken for a cluster."""
    coordinator = cluster.coordinator
    if target.begun is None:
        if coordinator.has_credentials:
            await coordinator.close_above()
        mark = Unfinished(key=wanted.meta.key, unfinished=f"waltzctl {entry.verb}", began=entry.began)
        await coordinator.commit([put(ROOT, encode(mark), _version(target, ROOT))])
    early = [folder for folder in FOLDERS if folder not in (SERVERS, ELECTION) and folder not in target.nodes]
    if early:
        await coordinator.commit([Create(folder, b"") for folder in early])
    plain = wanted.plain(target)
    await _write(coordinator, target, plain, report)
    await _decide(cluster, daemons, wanted, target, report)
    root = await coordinator.get(ROOT)
    begun = unfinished(root.data) if root is not None else None
    if root is None or begun is None or begun.key != wanted.meta.key:
        raise ChangedMeanwhile("another command restored these documents at the same time", path=ROOT)
    numbers = [int(name) for name in await coordinator.children(HISTORY)]
    late = [folder for folder in (SERVERS, ELECTION) if folder not in target.nodes]
    await coordinator.commit(
        [
            Set(ROOT, encode(wanted.meta), root.version),
            put(ASSIGNMENT, encode(wanted.assignment(target)), _version(target, ASSIGNMENT)),
            Create(f"{HISTORY}/{max(numbers, default=0) + 1:010}", encode(entry)),
            *(Create(folder, b"") for folder in late),
        ]
    )


def _own(one: Proven) -> list[tuple[str, Document]]:
    """Return the two documents of one partition."""
    found: list[tuple[str, Document]] = [(replicas_path(one.partition), ReplicaSet(one.roles))]
    if one.meta is not None:
        found.append((partition_path(one.partition), one.meta))
    return found


def _version(target: Target, path: str) -> int:
    node = target.nodes.get(path)
    return NO_VERSION if node is None else node.version


async def _write(
    coordinator: Coordinator, target: Target, documents: Sequence[tuple[str, Document]], report: Report
) -> None:
    batch, size, done = list[Change](), 0, 0
    for path, document in documents:
        data = encode(document)
        if batch and (len(batch) == CHANGES_MAX or size + len(data) > CHANGES_BYTES_MAX):
            await coordinator.commit(batch)
            done += len(batch)
            report(f"{done} of {len(documents)} documents are written")
            batch, size = [], 0
        batch.append(put(path, data, _version(target, path)))
        size += len(data)
    if batch:
        await coordinator.commit(batch)


async def _decide(cluster: Cluster, daemons: Daemons, wanted: Restoration, target: Target, report: Report) -> None:
    """Fence the storages of each partition whose document they decide, and save that document."""
    concerned = [one for one in wanted.proven if one.scene is not None]
    turns, done = asyncio.Semaphore(FENCED_AT_ONCE), 0

    async def decide(one: Proven) -> None:
        nonlocal done
        async with turns:
            after = await _fenced(daemons, wanted, one)
            await _write(cluster.coordinator, target, _own(after), report)
            done += 1
            report(f"{done} of {len(concerned)} partitions are decided from what storages hold")

    for found in await asyncio.gather(*map(decide, concerned), return_exceptions=True):
        if isinstance(found, BaseException):
            raise found


async def _fenced(daemons: Daemons, wanted: Restoration, one: Proven) -> Proven:
    assert one.scene is not None
    session = one.scene.session
    names = sorted(one.scene.statuses)
    try:
        answers = await asyncio.gather(
            *(daemons.fence(wanted.meta.key, wanted.storages[name], one.partition, session) for name in names)
        )
    except WaltzError as error:
        raise type(error)(
            f"partition {one.partition}: {error.message}",
            not_done="the documents are incomplete, and no server takes part",
            next_step="run the same command again: it resumes",
            **error.facts,
        ) from error
    after = one.fenced(session, dict(zip(names, answers, strict=True)))
    assert after.scene is not None
    if after.scene.mark < one.scene.mark or after.scene.begun != one.scene.begun:
        raise ChangedMeanwhile(
            f"partition {one.partition}: its replicas have changed since the plan",
            not_done="the documents are incomplete, and no server takes part",
        )
    return after


def is_from_a_tool(meta: PartitionMeta) -> bool:
    """Return whether the document is a decision made from the storages, which no owner has continued yet."""
    return meta.decision is not None and meta.decision.session == meta.session and meta.session in meta.given_up
