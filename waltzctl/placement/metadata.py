"""`waltzctl cluster save-metadata`, `load-metadata` and `rebuild-metadata`: backup of a cluster's documents outside of
ZooKeeper, and the order in which lost documents are written again, also for `waltzctl cluster restore`.

Saving changes nothing. Loading is planned first: from the existing documents, the reports of storages, and what follows
for each partition (`proof`). Rebuilding has no file and relies on storages alone. Nothing is written over newer
documents or another cluster, or while servers are registered. Partitions that are not proven are named, and left out if
the operator confirms.

A cluster with only some of its documents would start empty, so an incomplete one must never be taken for a cluster. The
root document says so first (`Unfinished`): from then on every starting daemon and every other tool refuses it. Then
come the documents of storages and partitions, and all others. The last transaction writes what servers start from:
their list, the assignment, and the root itself. A killed command leaves a root that is refused, or a complete cluster.
Running the command again completes it; existing documents are left as they are.

Storages are fenced before a decision is made from what they hold, as in a rescue, so their reports stay true.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from uuid import UUID, uuid4

import typer
from typer import Argument, Option

from waltzctl.placement import creation
from waltzctl.placement.creation import is_fresh
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.proof import Proven, Statement, Unproven, Verdict, from_saved, from_storages, statement
from waltzctl.shell import moment
from waltzctl.shell.blueprint import write_whole
from waltzctl.shell.change import Change, ChangeCommand, current_user
from waltzctl.shell.cluster_target import CommandTarget, check_name, check_operator, using
from waltzctl.shell.numbers import format_partitions
from waltzctl.shell.options import Output
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.forms import put_json
from waltzctl.show.terminal import count
from waltzctl.snapshot import last_seen
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, StorageView
from waltzd.cluster.assignment import UNOWNED
from waltzd.cluster.cluster import (
    ASSIGNMENT,
    CLIENT_IDS,
    CLIENT_IDS_AHEAD,
    CLIENT_IDS_PER_SECOND,
    ELECTION,
    FOLDERS,
    HISTORY,
    NO_VERSION,
    PARTITIONS,
    REPLICAS,
    ROOT,
    SERVERS,
    STORAGES,
    Cluster,
    partition_path,
    put,
    replicas_path,
)
from waltzd.cluster.coordinator import Change as NodeChange
from waltzd.cluster.coordinator import Coordinator, Create, Node, Set
from waltzd.cluster.documents import (
    GENERATION_MAX,
    NO_SECRET,
    Assignment,
    ClusterMeta,
    Counter,
    HistoryEntry,
    Membership,
    Ownership,
    PartitionMeta,
    ReplicaSet,
    StorageMeta,
    Unfinished,
    decode_root,
    unfinished,
)
from waltzd.cluster.metadata import SavedDocuments, kind_of, read, read_documents, write
from waltzd.disk.real import translate
from waltzd.errors import EXIT_OK, ForeignCluster, WaltzError
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, NameInUse, Unsafe
from waltzd.format.layout import BATCHES
from waltzd.protocol.document import Document, decode, encode

Found: TypeAlias = "tuple[Target, Restoration, ClusterSnapshot]"
"""What ZooKeeper has, what it shall have, and what daemons report."""
LOAD, REBUILD = "cluster load-metadata", "cluster rebuild-metadata"
HALF = (
    "Interrupted. The documents may be incomplete; until they are complete, no server takes part. Run the same command "
    "again: it resumes."
)
CHANGES_MAX, CHANGES_BYTES_MAX = 500, 400_000
"""Limits of one ZooKeeper transaction: changes, and bytes."""
FENCED_AT_ONCE = 16
GENERATIONS_AHEAD = 1 << 16
"""Generations added to the highest known one if the clock does not give a higher one: servers and clients that kept
running may know later generations than the restored documents."""
COUNTED_FROM = 1_704_067_200
"""Seconds since 1970 at 2024-01-01; generations count from there, because they have 31 bits."""


def save(
    *,
    file: Annotated[str, Argument(metavar="FILE", help="File to write; - is standard output.")],
    target: CommandTarget,
    output: Output = "table",
) -> int:
    """Save all documents of a cluster, as of one moment, to a file with a checksum. `waltzctl cluster load-metadata`
    restores them, also into another ZooKeeper. The cluster keeps running. Save regularly, and after each change of
    storages or replicas.

    The file contains the secret with which servers sign client ids, so only you may read it (mode 0600). An existing file
    is replaced atomically.

    \b
    Examples:
      waltzctl cluster save-metadata waltz-metadata.jsonl
      waltzctl cluster save-metadata waltz-metadata.jsonl -o json
    """
    check_operator(target.tls, "read the secrets of a cluster")
    saved = using(target, lambda cluster: read_documents(cluster, moment=moment.now()))
    data = write(saved)
    content = {
        "cluster": saved.meta.name,
        "key": str(saved.meta.key),
        "moment": saved.moment,
        "documents": len(saved.documents),
        "left_out": list(saved.left_out),
        "file": file,
    }
    if file == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        write_whole(Path(file).absolute(), data, 0o600)
    if output == "json" and file != "-":
        put_json(content)
    else:
        typer.echo(
            f"saved: {count(len(saved.documents), 'document')} of the cluster {saved.meta.name}, as at {saved.moment}, in "
            f"{'standard output' if file == '-' else file}. It contains the secret of client ids: keep it private.",
            err=file == "-",
        )
    for path in saved.left_out:
        typer.echo(f"Not saved, because it cannot be decoded: {path}", err=True)
    return EXIT_OK


# -- from a file -------------------------------------------------------------------------------------------------------


def load(
    *,
    file: Annotated[Path, Argument(metavar="FILE", help="File written by `waltzctl cluster save-metadata`.")],
    more: Annotated[
        tuple[str, ...],
        Option("--storage", metavar="NAME=LISTEN,ADMIN[,GROUP]", help="Storage that was added later. Repeatable."),
    ] = (),
    command: ChangeCommand,
) -> int:
    """Restore the documents of a cluster into ZooKeeper, from a file written by `waltzctl cluster save-metadata`. The
    root in ZooKeeper must be empty or hold older documents of the same cluster, and no server may be registered.
    Servers that run without documents take part again by themselves within two of their `session_seconds`.

    Start all storages first: each is asked for its sessions. If no storage has a later session of a partition than the
    file, the saved document is restored unchanged. Otherwise the file is too old for this partition, and its document is
    derived from the replicas if they prove that nothing acknowledged is lost. A partition without proof is refused; with
    --override it is left out, and `waltzctl partition rescue` decides it. New sessions, generations and client ids are
    higher than all known ones.

    Running the command again completes an interrupted run, or changes nothing.

    \b
    Examples:
      waltzctl cluster load-metadata waltz-metadata.jsonl --dry-run
      waltzctl cluster load-metadata waltz-metadata.jsonl --yes
    """
    tls = command.target.tls
    check_operator(tls, "change a cluster")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise translate(error, f"reading {file}") from error
    saved = read(data, str(file))
    if tls is not None and tls.identity.key != saved.meta.key:
        raise ForeignCluster(
            f"the certificate belongs to the cluster {tls.identity.key}; the file to {saved.meta.name}, {saved.meta.key}",
            not_done="nothing was asked of any daemon",
            next_step="use a certificate of that cluster, or the file of yours",
        )
    added = creation.storages_of(more)
    daemons = Daemons(tls)

    async def prepare(cluster: Cluster) -> Change:
        return await loading(
            cluster, daemons, saved, file=str(file), added=added, where=command.target.where, who=current_user(tls)
        )

    return command.perform(prepare)


async def loading(
    cluster: Cluster,
    daemons: Daemons,
    saved: SavedDocuments,
    *,
    file: str,
    added: Mapping[str, StorageMeta] | None = None,
    where: str,
    who: str,
) -> Change:
    """Build the change that restores the documents. `added`: storages that the file does not know."""
    known = {**saved.storages, **(added or {})}
    target, wanted, found = await _from_file(cluster, daemons, saved, known)
    strangers = sorted(_named(found, where) - wanted.storages.keys())
    unsafe = tuple(f"partition {one.partition}: {one.missing}" for one in wanted.unproven) + tuple(
        f"{name} holds replicas of this cluster as well, and the file does not know it: name it with --storage"
        for name in strangers
    )
    different = wanted.different(target)
    steps = list[str]()
    if different or target.meta is None:
        there = "ZooKeeper has none" if target.is_empty else f"{len(different)} are missing or differ"
        steps.append(
            f"restore the documents of {wanted.meta.name}, key {wanted.meta.key}, as at {saved.moment}, from {file}"
            f": {there}"
        )
        if not target.is_empty:
            steps += [f"change {path}" for path in different if path.count("/") == 1 or path.startswith(f"{STORAGES}/")]
        steps += _partition_steps(wanted, target)
        steps.append(f"continue generations above {max(wanted.generations)}, client ids above {_next_id(wanted)}")
        running = found.server_reports
        steps += [f"{', '.join(running)} run: they take part again by themselves"] if running else []

    plan = Plan(verb=LOAD, subject=wanted.meta.name, steps=tuple(steps), unsafe=unsafe)
    return _change(plan, daemons, (target, wanted), lambda cluster: _from_file(cluster, daemons, saved, known), who)


async def _from_file(cluster: Cluster, daemons: Daemons, saved: SavedDocuments, known: Mapping[str, StorageMeta]) -> Found:
    target = await read_target(cluster, saved.meta)
    storages = {**target.storages, **known}
    found = await daemons.ask(saved.meta, list(storages.values()), list(saved.servers.values()))
    reports = statements(found.storages, saved.meta.partitions, logs=saved.logs)
    generations = _generations(saved, reports, found)
    _check_newer(saved, target)
    verdicts = tuple(_verdict(saved, target, one, generations[one.partition]) for one in reports)
    documents = {
        path: document
        for path, document in saved.documents.items()
        if path not in (ROOT, ASSIGNMENT) and path.rpartition("/")[0] not in (PARTITIONS, REPLICAS)
    }
    documents |= {f"{STORAGES}/{name}": meta for name, meta in storages.items()}
    documents |= {
        replicas_path(one.partition): saved.replicas(one.partition) for one in verdicts if isinstance(one, Unproven)
    }
    documents |= _counter(saved, target)
    metas = [saved.meta, *([target.meta] if target.meta is not None else [])]
    wanted = Restoration(
        meta=replace(
            saved.meta,
            format=max(_format(reports), *(meta.format for meta in metas)),
            level=max(meta.level for meta in metas),
        ),
        verdicts=verdicts,
        generations=generations,
        counted_by_clock=clock_generation(time.time()),
        documents=documents,
        storages=storages,
    )
    return target, wanted, found


def _check_newer(saved: SavedDocuments, target: Target) -> None:
    """Refuse an older document of a partition: what it has forgotten may have been decided."""
    for number in range(saved.meta.partitions + 1):
        there, ours = target.partition(number), saved.partition(number)
        if there is None or is_from_a_tool(there) or _age(there) <= _age(ours):
            continue
        raise Unsafe(
            f"what the coordinator has is newer than the file: partition {number} has had session {there.session} there, "
            f"and {ours.session if ours is not None else 0} in the file, of {saved.moment}",
            not_done="nothing was changed",
            next_step="keep what is there; `waltzctl partition rescue` is for single partitions that do not open",
        )


def _age(meta: PartitionMeta | None) -> tuple[int, int, bool]:
    return (0, 0, False) if meta is None else (meta.session, meta.opened, meta.decision is not None)


def _verdict(saved: SavedDocuments, target: Target, statement: Statement, generation: int) -> Verdict:
    number = statement.partition
    there, ours, roles = target.partition(number), saved.partition(number), saved.replicas(number).replicas
    if there is not None and is_from_a_tool(there) and statement.contradicts(there) is None:
        known = target.document(replicas_path(number))
        return Proven(partition=number, meta=there, roles=known.replicas if isinstance(known, ReplicaSet) else roles)
    if there is not None and _age(there) == _age(ours):
        ours = there  # of the same session, and at least as new
    members = sum(role is Membership.MEMBER for role in roles.values())
    replicas = max(1, members, len(ours.members) if ours is not None else 0)
    if not roles and ours is None:  # the file is older than the group log, which gets as many replicas as the partitions
        replicas = max(len(saved.replicas(other).replicas) for other in range(saved.meta.partitions)) or 1
    return from_saved(statement, ours, roles, replicas=replicas, generation=generation)


def _generations(saved: SavedDocuments, reports: Collection[Statement], found: ClusterSnapshot) -> tuple[int, ...]:
    """Return the highest known generation of each partition: from the file, and from servers that run."""
    assignment, highest = saved.assignment, [0] * len(reports)
    for number in range(len(reports)):
        meta = saved.partition(number)
        highest[number] = max(
            assignment.owners[number].generation if assignment is not None and number < len(assignment.owners) else 0,
            meta.generation if meta else 0,
        )
    for reported in found.server_reports.values():
        for one in reported.partitions:
            if one.partition < len(highest):
                highest[one.partition] = max(highest[one.partition], one.generation)
    return tuple(highest)


def _counter(saved: SavedDocuments, target: Target) -> dict[str, Document]:
    """Return a counter of client ids above every id given out. The existing one may be ahead: servers kept running."""
    there, ours = target.document(CLIENT_IDS), saved.documents.get(CLIENT_IDS)
    if isinstance(there, Counter) and (not isinstance(ours, Counter) or there.next >= ours.next + CLIENT_IDS_AHEAD):
        return {CLIENT_IDS: there}
    secrets = [one.secret for one in (ours, there) if isinstance(one, Counter) and one.secret != NO_SECRET]
    return {CLIENT_IDS: counter_above(ours, secrets[0] if secrets else uuid4())}


def counter_above(known: Document | None, secret: UUID) -> Counter:
    """Return a counter of client ids above every id given out. `known`: the saved counter, which may be older."""
    counted = max(known.next if isinstance(known, Counter) else 1, int(time.time() * CLIENT_IDS_PER_SECOND))
    return Counter(counted + CLIENT_IDS_AHEAD, secret)


def _next_id(wanted: Restoration) -> int:
    found = wanted.documents.get(CLIENT_IDS)
    return found.next if isinstance(found, Counter) else 0


def _format(reports: Collection[Statement]) -> int:
    """Return the format in which replicas were written: a log that has changed to a newer format keeps it."""
    written = any(status.end is not None for one in reports for status in one.statuses.values())
    return BATCHES if written else 0


def _named(found: ClusterSnapshot, where: str) -> set[str]:
    """Return the storages of this cluster that running servers, or this machine, know."""
    names = {
        replica.storage
        for reported in found.server_reports.values()
        for one in reported.partitions
        for replica in one.replicas
    }
    seen = last_seen.load(where)
    if seen is not None and seen.meta.key == found.meta.key:
        names |= {storage.name for storage in seen.storages}
    return names


# -- from storages -----------------------------------------------------------------------------------------------------


def rebuild(
    *,
    name: Annotated[str, Option("--name", help="Name of the cluster.")],
    given: Annotated[
        tuple[str, ...],
        Option(
            "--storage",
            metavar="NAME=LISTEN,ADMIN[,GROUP]",
            help="Name, two addresses and failure group of a storage, as before. Repeat it for every storage.",
        ),
    ],
    replicas: Annotated[int, Option("--replicas", min=1, max=15, help="Replicas of each partition, as before.")] = 3,
    command: ChangeCommand,
) -> int:
    """Rebuild the documents of a cluster from its storages, if ZooKeeper has lost all of them and no file of `waltzctl
    cluster save-metadata` is left. Name EVERY storage, and start it: transactions of a later session on an omitted storage
    would be lost. Each log continues behind the last id that the replicas prove.

    A partition is rebuilt if a majority of its replicas is undamaged and has begun its newest session: then nothing
    acknowledged is missing. Otherwise it is refused; with --override it is left out, and `waltzctl partition rescue`
    decides it. Settings that only the documents had are lost: the policy (all applications may do everything until one is
    set), preferences, moves, the history, and names of applications.

    \b
    Examples:
      waltzctl cluster rebuild-metadata --name trial --replicas 1 \\
        --storage one=127.0.0.1:55280,127.0.0.1:55281 --dry-run
      waltzctl cluster rebuild-metadata --name trial --replicas 1 \\
        --storage one=127.0.0.1:55280,127.0.0.1:55281 \\
        --confirm trial --reason 'the disks of ZooKeeper are gone'
    """
    tls = command.target.tls
    check_operator(tls, "change a cluster")
    check_name(name)
    storages = creation.storages_of(given)
    daemons = Daemons(tls)

    async def prepare(cluster: Cluster) -> Change:
        descriptions = await creation.describe_all(storages, tls)
        one = next(iter(descriptions.values()))
        level = creation.newest_level(descriptions)
        meta = ClusterMeta(name=name, key=one.cluster_key, partitions=one.partitions, created=moment.now(), level=level)
        return await rebuilding(
            cluster, daemons, meta, storages, replicas=replicas, where=command.target.where, who=current_user(tls)
        )

    return command.perform(prepare)


async def rebuilding(
    cluster: Cluster,
    daemons: Daemons,
    meta: ClusterMeta,
    storages: Mapping[str, StorageMeta],
    *,
    replicas: int,
    where: str,
    who: str,
) -> Change:
    """Build the change that rebuilds the documents. `replicas`: number of replicas of each partition, as an operator
    remembers it."""
    target, wanted, found = await _from_storages(cluster, daemons, meta, storages, replicas)
    strangers = sorted(_named(found, where) - storages.keys())
    unsafe = tuple(f"partition {one.partition}: {one.missing}" for one in wanted.unproven) + tuple(
        f"{name} was a storage of this cluster: name it with --storage" for name in strangers
    )
    steps = [
        f"rebuild the documents of {meta.name}, key {meta.key}, {meta.partitions} partitions, format {wanted.meta.format}, "
        f"from the replicas on {', '.join(sorted(storages))}",
        *_partition_steps(wanted, target),
        "lost: policy (every application may do everything until one is set), preferences, moves, history, names of "
        "applications",
    ]

    plan = Plan(verb=REBUILD, subject=meta.name, steps=tuple(steps), danger=Danger.TYPED, unsafe=unsafe)
    return _change(
        plan,
        daemons,
        (target, wanted),
        lambda cluster: _from_storages(cluster, daemons, wanted.meta, storages, replicas),
        who,
    )


async def _from_storages(
    cluster: Cluster, daemons: Daemons, meta: ClusterMeta, storages: Mapping[str, StorageMeta], replicas: int
) -> Found:
    target = await read_target(cluster, meta)
    if target.meta is not None:
        raise NameInUse(
            f"the coordinator holds the documents of {target.meta.name} at this root",
            not_done="nothing was changed",
            next_step="`waltzctl partition rescue` is for single partitions that do not open",
        )
    found = await daemons.ask(meta, list(storages.values()), ())
    reports = statements(found.storages, meta.partitions)
    generation = clock_generation(time.time())
    verdicts = list[Verdict]()
    for one in reports:
        there = target.partition(one.partition)
        known = target.document(replicas_path(one.partition))
        if there is not None and is_from_a_tool(there) and isinstance(known, ReplicaSet) and not one.contradicts(there):
            verdicts.append(Proven(partition=one.partition, meta=there, roles=known.replicas))
        else:
            verdicts.append(from_storages(one, replicas=replicas, generation=generation))
    documents: dict[str, Document] = {f"{STORAGES}/{name}": storage for name, storage in storages.items()}
    documents |= {
        replicas_path(one.partition): ReplicaSet(dict.fromkeys(sorted(reports[one.partition].statuses), Membership.MEMBER))
        for one in verdicts
        if isinstance(one, Unproven)
    }
    wanted = Restoration(
        meta=replace(meta, format=max(meta.format, _format(reports))),
        verdicts=tuple(verdicts),
        generations=(0,) * len(reports),
        counted_by_clock=generation,
        documents=documents,
        storages=storages,
    )
    return target, wanted, found


# -- of both -----------------------------------------------------------------------------------------------------------


def _change(
    plan: Plan,
    daemons: Daemons,
    planned: tuple[Target, Restoration],
    find: Callable[[Cluster], Awaitable[Found]],
    who: str,
) -> Change:
    before, agreed = planned

    async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
        target, now, _ = await find(cluster)
        _check_same(agreed, now)
        _check_unchanged(before, target, now)
        await put_back(cluster, daemons, now, target, report, plan=plan, who=who, began=moment.now())
        return _done(now)

    return Change(plan=plan, do=do, is_recorded=False, interrupted=HALF)


def _partition_steps(wanted: Restoration, target: Target) -> list[str]:
    """Describe the decision for each partition, as steps."""
    kept = [one.partition for one in wanted.proven if one.scene is None]
    steps = [f"{format_partitions(kept)}: as in the documents, no storage has a later session"] if kept else []
    for one in wanted.proven:
        if one.scene is not None:
            holders = ", ".join(f"{name} up to {status.last_id}" for name, status in sorted(one.scene.statuses.items()))
            steps.append(
                f"partition {one.partition}: decided by the replicas ({holders}): the log continues behind id "
                f"{one.scene.mark}, under session {one.scene.session}, higher than all promised ones"
            )
    left = [one.partition for one in wanted.unproven]
    steps += [f"{format_partitions(left)}: left out; decide with `waltzctl partition rescue`"] if left else []
    return steps


def _check_same(agreed: Restoration, now: Restoration) -> None:
    """Check that no partition is proven less than when the plan was confirmed."""
    was = {one.partition for one in agreed.unproven}
    worse = [one for one in now.unproven if one.partition not in was]
    if worse:
        raise ChangedMeanwhile(
            f"partition {worse[0].partition}: {worse[0].missing}",
            not_done="nothing was changed",
            next_step="plan again with --dry-run",
        )


def _check_unchanged(before: Target, target: Target, now: Restoration) -> None:
    """Check that each document that is written over is as it was when the plan was made. What depends on storages, and the
    counter of client ids, is decided anew each time."""
    for path in now.different(target):
        there = target.nodes.get(path)
        if path in now.documents and path != CLIENT_IDS and there is not None and there != before.nodes.get(path):
            raise ChangedMeanwhile(
                f"{path} was changed since the plan", not_done="nothing was changed", next_step="plan again with --dry-run"
            )


def _done(found: Restoration) -> dict[str, Any]:
    return {
        "partitions": [
            {
                "partition": one.partition,
                "from": "storages" if isinstance(one, Proven) and one.scene is not None else "document",
                "is_proven": isinstance(one, Proven),
            }
            for one in found.verdicts
        ]
    }


# -- of a restored cluster ---------------------------------------------------------------------------------------------


def clock_generation(now: float) -> int:
    """Return a generation above every earlier one: the seconds since 2024. No partition changes its owner once a second
    for years. Clients remember generations, and would take servers with lower ones for servers that have fallen behind.
    `now`: seconds since 1970."""
    return min(max(0, int(now) - COUNTED_FROM), GENERATION_MAX - GENERATIONS_AHEAD)


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
    cluster: Cluster,
    daemons: Daemons,
    wanted: Restoration,
    target: Target,
    report: Report,
    *,
    plan: Plan,
    who: str,
    began: str,
) -> None:
    """Write everything, in an order in which a partial result is never taken for a cluster."""
    coordinator = cluster.coordinator
    if target.begun is None:
        if coordinator.has_credentials:
            await coordinator.close_above()
        mark = Unfinished(key=wanted.meta.key, unfinished=f"waltzctl {plan.verb}", began=began)
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
    entry = HistoryEntry(
        began=began, ended=moment.now(), who=who, verb=plan.verb, subject=plan.subject, reason=None, steps=plan.steps,
        outcome="done",
    )  # fmt: skip
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
    batch, size, done = list[NodeChange](), 0, 0
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
