"""`waltzctl cluster save-metadata`, `load-metadata` and `rebuild-metadata`: backup of a cluster's documents outside of
ZooKeeper.

Saving changes nothing. Loading is planned first: from the existing documents, the reports of storages, and what follows
for each partition (`proof`). Rebuilding has no file and relies on storages alone. Nothing is written over newer
documents or another cluster, or while servers are registered. Partitions that are not proven are named, and left out if
the operator confirms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer
from typer import Argument, Option

from waltzctl.placement import creation
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.proof import Proven, Statement, Unproven, Verdict, from_saved, from_storages
from waltzctl.placement.restored_documents import (
    Restoration,
    Target,
    clock_generation,
    is_from_a_tool,
    put_back,
    read_target,
    statements,
)
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
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.cluster.cluster import (
    ASSIGNMENT,
    CLIENT_IDS,
    CLIENT_IDS_AHEAD,
    CLIENT_IDS_PER_SECOND,
    PARTITIONS,
    REPLICAS,
    ROOT,
    STORAGES,
    Cluster,
    replicas_path,
)
from waltzd.cluster.documents import (
    NO_SECRET,
    ClusterMeta,
    Counter,
    HistoryEntry,
    Membership,
    PartitionMeta,
    ReplicaSet,
    StorageMeta,
)
from waltzd.cluster.metadata import SavedDocuments, read, read_documents, write
from waltzd.disk.real import translate
from waltzd.errors import ForeignCluster
from waltzd.errors.exit_codes import EXIT_OK
from waltzd.errors.operations import ChangedMeanwhile, NameInUse, Unsafe
from waltzd.format.layout import BATCHES
from waltzd.protocol.document import Document

Found = tuple[Target, Restoration, ClusterSnapshot]
"""What ZooKeeper has, what it shall have, and what daemons report."""
LOAD, REBUILD = "cluster load-metadata", "cluster rebuild-metadata"
HALF = (
    "Interrupted. The documents may be incomplete; until they are complete, no server takes part. Run the same command "
    "again: it resumes."
)


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
    return _change(plan, daemons, wanted, lambda cluster: _from_file(cluster, daemons, saved, known), who)


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
    if there is not None and ours is not None and _age(there) == _age(ours) and len(there.joined) >= len(ours.joined):
        ours = there  # of the same session, and with the same knowledge of its members
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
    known = ours.next if isinstance(ours, Counter) else 1
    secrets = [one.secret for one in (ours, there) if isinstance(one, Counter) and one.secret != NO_SECRET]
    secret = secrets[0] if secrets else uuid4()
    counted = max(known, int(time.time() * CLIENT_IDS_PER_SECOND))
    return {CLIENT_IDS: Counter(counted + CLIENT_IDS_AHEAD, secret)}


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
        plan, daemons, wanted, lambda cluster: _from_storages(cluster, daemons, wanted.meta, storages, replicas), who
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
    plan: Plan, daemons: Daemons, agreed: Restoration, find: Callable[[Cluster], Awaitable[Found]], who: str
) -> Change:
    async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
        target, now, _ = await find(cluster)
        _check_same(agreed, now)
        began = moment.now()
        entry = HistoryEntry(
            began=began, ended=began, who=who, verb=plan.verb, subject=plan.subject, reason=None, steps=plan.steps,
            outcome="done",
        )  # fmt: skip
        await put_back(cluster, daemons, now, target, entry, report)
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
