"""`waltzctl cluster restore`: makes a cluster from a store, at one moment, on empty storages.

Everything is checked before anything is written: the logs in the store and where they can end, the saved documents, the
storages and their free space, ZooKeeper, and whether the old cluster still runs. Then the root marks the cluster as
incomplete, each storage fetches its replicas, and the documents are written in the order of
`waltzctl.placement.metadata`. A killed command leaves a root that is refused; running the command again
continues from there.

Each replica is as after the orderly end of a session, above every known one, that closed at its last id. The documents
agree, so the first owner has nothing to decide.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID, uuid4, uuid5

from typer import Argument, Option

from waltzctl.placement import creation
from waltzctl.placement.backup import Ending, Source, bytes_up_to, cut_rows, moment_of, source_at
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.metadata import Restoration, Target, clock_generation, counter_above, put_back, read_target
from waltzctl.placement.proof import Proven
from waltzctl.placement.replica_assignment import assign_replicas
from waltzctl.shell import moment
from waltzctl.shell.change import Change, ChangeCommand, current_user
from waltzctl.shell.cluster_target import check_name, check_operator
from waltzctl.shell.progress import Amount, Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.terminal import count, size
from waltzd.archive.cut_point import ArchivedLog, Cut, format_time
from waltzd.archive.manifest import folder_of
from waltzd.cluster.cluster import (
    ARCHIVES,
    ASSIGNMENT,
    CLIENT_IDS,
    EXPECTED,
    MOVES,
    NO_VERSION,
    PARTITIONS,
    PREFERRED,
    REPLICAS,
    ROOT,
    STORAGES,
    Cluster,
    archive_path,
    put,
)
from waltzd.cluster.documents import (
    LEASE_MS_MAX,
    NO_SECRET,
    ArchiveMeta,
    ClusterMeta,
    Counter,
    Decision,
    Membership,
    PartitionMeta,
    ReplicaState,
    StorageMeta,
    Unfinished,
)
from waltzd.cluster.metadata import SavedDocuments
from waltzd.errors import BadArgument, CannotConnect, ForeignCluster, TlsMismatch, WaltzError
from waltzd.errors.operations import DiskFull, OldClusterLives, TargetNotEmpty, WrongPeer
from waltzd.format.layout import BATCHES, NO_MARK
from waltzd.protocol.descriptions import ReplicaStatus, RestoreOrder, StorageDescription
from waltzd.protocol.document import Document, encode
from waltzd.protocol.timelines import Lineage
from waltzd.wire.tls import Tls

VERB = "cluster restore"
SESSIONS_AHEAD = 1000
"""Sessions that are skipped: some may have begun after the documents were saved."""
HALF = (
    "Interrupted. The cluster is incomplete; until it is complete, no server takes part. Run the same command again: it "
    "resumes."
)
NOT_OF_THE_LOG = (ROOT, ASSIGNMENT, CLIENT_IDS, MOVES, PREFERRED)
FOLDERS_NOT_OF_THE_LOG = (PARTITIONS, REPLICAS, STORAGES, EXPECTED, ARCHIVES)
"""Folders of documents that describe where things were; a restored cluster has its own."""
ENDS_ELSEWHERE = (
    "the archive has grown since the interrupted run: end where that run did, with --through and the time in its plan (or "
    "--through-marks); or use storages with empty directories"
)
HALF_DONE = "the cluster is incomplete, and no server takes part"


def restore(
    *,
    store: Annotated[
        str, Argument(metavar="STORE", help="Archive of the old cluster: a directory, or s3://bucket/folder.")
    ],
    end: Ending,
    given: Annotated[
        tuple[str, ...],
        Option(
            "--storage",
            metavar="NAME=LISTEN,ADMIN[,GROUP]",
            help="Name, two addresses and failure group of a storage with an empty directory. Repeat it for each storage.",
        ),
    ],
    name: Annotated[str | None, Option("--name", help="Name of the new cluster. Default: the saved name.")] = None,
    replicas: Annotated[int | None, Option("--replicas", min=1, max=15, help="Replicas. Default: as saved.")] = None,
    same_key: Annotated[
        bool, Option("--same-key", help="Keep the key of the old cluster, whose storages must all be gone.")
    ] = False,
    command: ChangeCommand,
) -> int:
    """Restore a cluster from the archive and the saved documents in STORE, as of one moment, on new storages and an empty
    ZooKeeper.

    First start the storages, with empty directories, one new `cluster_key`, and the number of partitions in their
    configuration; start no server. Each storage fetches its replicas and verifies every byte. All partitions end at one
    moment: each transaction committed before it is there, and none without those that it depends on. Applications of the
    old cluster are refused, because the key differs; if the old storages are gone for good, --same-key keeps the key.

    If the command is interrupted, run it again: it resumes.

    \b
    Examples:
      waltzctl cluster restore /mnt/archive --latest \\
        --storage one=127.0.0.1:55280,127.0.0.1:55281 --dry-run
      waltzctl cluster restore s3://waltz-archive/orders --through 2026-11-23T14:00 \\
        --storage one=10.0.0.1:55280,10.0.0.1:55281,rack-1 \\
        --storage two=10.0.0.2:55280,10.0.0.2:55281,rack-2 \\
        --replicas 2 --confirm orders --reason 'the data centre is gone'
    """
    tls = command.target.tls
    check_operator(tls, "make a cluster")
    storages = creation.storages_of(given)

    async def prepare(cluster: Cluster) -> Change:
        source = await asyncio.to_thread(source_at, store, end.chosen)
        descriptions = await creation.describe_all(storages, tls)
        spec = _spec_for(source, storages, descriptions, end, name=name, replicas=replicas, same_key=same_key)
        living = await _living(spec, tls)
        if same_key:
            _check_gone(spec, living)
        target = await read_target(cluster, spec.meta)
        _check_target(target, spec)
        _check_room(spec, descriptions, is_resumed=target.begun is not None)
        return _change(spec, descriptions, living, target, end.words, current_user(tls), tls)

    return command.perform(prepare)


# -- the specification -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RestoreSpec:
    """Specification of the restored cluster, decided before anything is done."""

    source: Source
    cut: Cut
    saved: SavedDocuments | None
    """Saved documents to restore; None if none were saved."""
    meta: ClusterMeta
    storages: Mapping[str, StorageMeta]
    planned: Mapping[int, tuple[str, ...]]
    """Partition → storages."""
    sessions: Mapping[int, int] = field(default_factory=dict)
    """Partition → session of the replicas that are there: an interrupted run made them, or they are refused."""
    began: str = ""
    """Time at which the command began, as the root document has it: a repeated command continues what it began."""
    who: str | None = None

    @property
    def is_same_key(self) -> bool:
        """Return whether the key is kept. The archive then belongs to this cluster: each log continues there."""
        return self.meta.key == self.source.label.cluster

    def session(self, partition: int) -> int:
        """Return a session above every known one."""
        saved = self.source.newest.partition(partition) if self.source.newest is not None else None
        known = self.source.logs[partition].session if partition in self.source.logs else 0
        later = self.source.lineage(partition).later
        ended = later[-1].session if later else 0
        highest = max(known, ended, 0 if saved is None else saved.session)
        made = self.sessions.get(partition, 0)
        return made if made > highest else highest + SESSIONS_AHEAD

    def lineage(self, partition: int) -> Lineage:
        """Return the timelines of the restored log, the last of which begins at the cut. Its identity is equal in each
        run of one command, and differs between commands. Raise `Unsafe` if the log cannot be forked again."""
        log, before = self.source.logs[partition], self.source.lineage(partition)
        before.check_room(partition)
        mark, session = self.cut.points[partition].mark, self.session(partition)
        name = f"{self.meta.key} {partition} {session} {mark} {log.archive.timeline} {self.began}"
        return before.forked(
            identity=uuid5(self.source.label.archive, name), fork=mark, session=session, parent=log.archive.timeline,
            cause=VERB, began=self.began or moment.now(), who=self.who,
        )  # fmt: skip

    def generation(self, partition: int) -> int:
        newest = self.source.newest
        if newest is None:
            return 0
        meta, assignment = newest.partition(partition), newest.assignment
        is_known = assignment is not None and partition < len(assignment.owners)
        given = assignment.owners[partition].generation if assignment is not None and is_known else 0
        return max(given, 0 if meta is None else meta.generation)

    def order(self, partition: int) -> RestoreOrder:
        log = self.source.logs[partition]
        manifest = log.manifest
        return RestoreOrder(
            store=self.source.place, archive=self.source.label.archive, cluster=self.source.label.cluster,
            partition=partition, number=manifest.number, sha256=manifest.sha256 if manifest.number else "",
            mark=self.cut.points[partition].mark, session=self.session(partition), source=log.archive.timeline,
            timelines=tuple(one.bare for one in self.lineage(partition).later),
        )  # fmt: skip

    def bytes_for(self, storage: str) -> int:
        return sum(self._bytes(number) for number, names in self.planned.items() if storage in names)

    def _bytes(self, partition: int) -> int:
        return bytes_up_to(self.source.logs[partition], self.cut.points[partition].mark)


def _spec_for(
    source: Source,
    storages: Mapping[str, StorageMeta],
    descriptions: Mapping[str, StorageDescription],
    end: Ending,
    *,
    name: str | None,
    replicas: int | None,
    same_key: bool,
) -> RestoreSpec:
    one = next(iter(descriptions.values()))
    key, partitions = one.cluster_key, one.partitions
    _check_key(source, key, same_key=same_key)
    source = of_size(source, partitions)
    cut = source.cut_at(end, datetime.now(UTC))
    saved = source.documents_at(cut)
    name = name or (saved.meta.name if saved is not None else None)
    if name is None:
        raise BadArgument(
            "the store has no documents, so the name of the cluster is unknown", next_step="give it with --name"
        )
    check_name(name)
    if replicas is None:
        replicas = min(_replicas(saved), len(storages))
    written = max((BATCHES for log in source.logs.values() if log.has_batches), default=0)
    if saved is None:
        meta = ClusterMeta(name=name, key=key, partitions=partitions, created=moment.now(), format=BATCHES)
    else:
        meta = replace(saved.meta, name=name, key=key, format=max(saved.meta.format, written))
    planned = assign_replicas(len(source.logs), {one.name: one.group for one in storages.values()}, replicas)
    return RestoreSpec(
        source=source, cut=cut, saved=saved, meta=meta, storages=storages, planned=planned,
        sessions={one.partition: one.status.session for it in descriptions.values() for one in it.assigned if one.status},
    )  # fmt: skip


def _check_key(source: Source, key: UUID, *, same_key: bool) -> None:
    old = source.label.cluster
    if key == old and not same_key:
        raise OldClusterLives(
            f"the storages have the key of the cluster that is to be restored, {old}",
            next_step="give them a new `cluster_key`, in empty directories; or give --same-key if the old ones are gone",
        )
    if key != old and same_key:
        raise ForeignCluster(
            f"the storages have the key {key}; the cluster in the store has {old}",
            not_done="nothing was changed",
            next_step=f"start them with `cluster_key: {old}` in empty directories, or leave --same-key out",
        )


def of_size(source: Source, partitions: int) -> Source:
    """Return the store with a log for each partition of the cluster, even if the store holds nothing of it, and for the
    group log if the documents know one."""
    least = max(source.logs, default=-1) + 1
    known, logs = (None, partitions) if source.newest is None else (source.newest.meta.partitions, source.newest.logs)
    if known is not None and least == known + 1:  # it was archived before its documents were saved
        logs = least
    if least > max(logs, partitions) or known not in (None, partitions):
        raise BadArgument(
            f"the storages were set up for {partitions} partitions, and the cluster in the store has "
            f"{known if known not in (None, partitions) else f'{least} or more'}",
            next_step=f"find out who put `{folder_of(least - 1)}` into the store: its documents have {known} partitions"
            if known == partitions
            else "set `partitions` to that number in the configuration of the storages, in empty directories",
        )
    return source.completed(max(logs, partitions))


def _replicas(saved: SavedDocuments | None) -> int:
    """Return the number of replicas that most partitions had."""
    if saved is None:
        return 3
    counts = [len(saved.replicas(number).replicas) for number in range(saved.meta.partitions)]
    return max(set(counts), key=counts.count) or 1


# -- what stands against it --------------------------------------------------------------------------------------------


async def _living(spec: RestoreSpec, tls: Tls | None) -> dict[str, str]:
    """Return the storages of the old cluster that answer, without the given new ones."""
    newest = spec.source.newest
    given = {one.admin_listen for one in spec.storages.values()}
    old = [] if newest is None else [one for one in newest.storages.values() if one.admin_listen not in given]
    found: dict[str, str] = {}

    async def ask(storage: StorageMeta) -> None:
        try:
            reported = await creation.describe(storage, tls)
        except CannotConnect as error:
            if isinstance(error, TlsMismatch | WrongPeer):
                found[storage.name] = f"may answer at {storage.admin_listen}: {error.message}"
        except WaltzError as error:
            found[storage.name] = f"may answer at {storage.admin_listen}: {error.message}"
        else:
            if reported.cluster_key == spec.source.label.cluster:
                found[storage.name] = f"answers at {storage.admin_listen}"

    await creation.each(old, ask)
    return dict(sorted(found.items()))


def _check_gone(spec: RestoreSpec, living: Mapping[str, str]) -> None:
    if spec.source.newest is None:
        raise OldClusterLives("the store has no documents, so the storages of the old cluster are unknown")
    for name, how in living.items():
        raise OldClusterLives(f"the storage {name} of the old cluster {how}")


def _check_target(target: Target, spec: RestoreSpec) -> None:
    if target.meta is not None:
        raise TargetNotEmpty(
            f"the coordinator holds the cluster {target.meta.name} at this root, which is complete",
            next_step="if an interrupted run of this command made it, that run is done: see `waltzctl history`",
        )


def _check_room(spec: RestoreSpec, descriptions: Mapping[str, StorageDescription], *, is_resumed: bool) -> None:
    for name, reported in descriptions.items():
        here = {one.partition: one for one in reported.assigned}
        needed = spec.bytes_for(name)
        for number, one in here.items():
            order = spec.order(number) if number in spec.planned else None
            if order is None or name not in spec.planned[number] or not _is_made(one.status, order):
                raise TargetNotEmpty(
                    f"{name} has a replica of partition {number} already"
                    + ("" if one.status is None else f", up to id {one.status.last_id}"),
                    next_step=ENDS_ELSEWHERE if is_resumed else "",
                )
            needed -= spec._bytes(number)
        if needed > reported.free_bytes - reported.free_bytes_min:
            raise DiskFull(
                f"{name}: its replicas need {size(needed)}; {size(reported.free_bytes)} are free, and "
                f"{size(reported.free_bytes_min)} must stay free",
                not_done="nothing was changed",
                next_step="name more storages, or larger ones, with --storage",
            )


def _is_made(status: ReplicaStatus | None, order: RestoreOrder) -> bool:
    """Return whether an earlier run of this command began the restore."""
    if status is None:
        return False
    return (status.session, status.last_id, status.committed) == (order.session, order.mark, order.mark)


# -- the change --------------------------------------------------------------------------------------------------------


def _change(
    spec: RestoreSpec,
    descriptions: Mapping[str, StorageDescription],
    living: Mapping[str, str],
    target: Target,
    words: str,
    whose: str,
    tls: Tls | None,
) -> Change:
    steps = _steps(spec, descriptions, target, words)
    unsafe = tuple(f"the storage {name} of the old cluster {how}" for name, how in living.items())
    plan = Plan(verb=VERB, subject=spec.meta.name, steps=tuple(steps), danger=Danger.TYPED, unsafe=unsafe)

    async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
        started = time.monotonic()
        done = await carry_out(cluster, Daemons(tls), replace(spec, began=moment.now(), who=whose), plan, report)
        return {
            "key": str(done.meta.key),
            "moment": moment_of(done.cut),
            "seconds": round(time.monotonic() - started, 3),
            "partitions": cut_rows(done.cut, done.source.logs),
        }

    return Change(plan=plan, do=do, is_recorded=False, interrupted=HALF)


def _steps(spec: RestoreSpec, descriptions: Mapping[str, StorageDescription], target: Target, words: str) -> list[str]:
    source, cut = spec.source, spec.cut
    steps = [
        f"create the cluster {spec.meta.name}, key {spec.meta.key}, from {source.place}, archive of the cluster "
        f"{source.label.cluster}, {words}" + (": resumes an interrupted run" if target.begun is not None else ""),
        f"all partitions are cut at {format_time(cut.time)}"
        if cut.time is not None
        else "each partition ends at its own id",
    ]
    for number, point in sorted(cut.points.items()):
        left = source.logs[number].last - point.mark
        steps.append(
            f"partition {number}: "
            + ("empty" if point.mark == NO_MARK else f"up to id {point.mark}")
            + (f", of {format_time(point.time)}" if point.time is not None else "")
            + _ahead(cut, source.logs[number], number)
            + f"; it continues under timeline {spec.lineage(number).number}"
            + (f"; {count(left, 'later transaction')} in the store are left out" if left else "")
            + (f"; in front of the batch that goes on behind id {cut.given[number]}" if number in cut.given else "")
        )
    for name in sorted(spec.storages):
        numbers = [number for number, names in spec.planned.items() if name in names]
        free = size(descriptions[name].free_bytes)
        steps.append(
            f"{name} fetches {count(len(numbers), 'replica')}, {size(spec.bytes_for(name))}; {free} are free there"
        )
    steps.append(
        f"settings, policy and names of applications: as saved at {spec.saved.moment}"
        if spec.saved is not None
        else "the store has no documents: settings are those of a new cluster, and there is no policy"
    )
    sessions = max(spec.session(number) for number in spec.planned)
    steps.append(f"continue sessions above all known ones, at most from {sessions} on; so do client ids and generations")
    if not spec.is_same_key:
        steps.append(
            f"{source.place} stays unchanged and archives nothing of this cluster: give its storages another store"
        )
    return steps


def _ahead(cut: Cut, log: ArchivedLog, number: int) -> str:
    if number not in cut.ahead:
        return ""
    wrong = count(log.last - cut.ahead[number], "transaction")
    return f"; times of {wrong} behind id {cut.ahead[number]} are in the future, so it is restored to its end"


async def carry_out(cluster: Cluster, daemons: Daemons, spec: RestoreSpec, plan: Plan, report: Report) -> RestoreSpec:
    """Make the cluster, or go on with what an interrupted run of the same command has begun. Return what was made."""
    there = await read_target(cluster, spec.meta)
    _check_target(there, spec)
    began = spec.began
    if there.begun is None:
        mark = Unfinished(key=spec.meta.key, unfinished=f"waltzctl {VERB}", began=began)
        await cluster.coordinator.commit([put(ROOT, encode(mark), NO_VERSION)])
    else:
        spec = replace(spec, began=there.begun.began)
    statuses = await _fetch(daemons, spec, report)
    there = await read_target(cluster, spec.meta)
    await put_back(cluster, daemons, restoration(spec, statuses), there, report, plan=plan, who=spec.who or "", began=began)
    return spec


async def _fetch(daemons: Daemons, spec: RestoreSpec, report: Report) -> dict[int, dict[str, ReplicaStatus]]:
    """Let all storages restore their replicas, each storage one replica at a time; return the status of each replica."""
    found: dict[int, dict[str, ReplicaStatus]] = {number: {} for number in spec.planned}
    done: dict[tuple[str, int], int] = {}
    total = sum(map(spec.bytes_for, spec.storages))

    def report_progress() -> None:
        so_far = min(total, sum(done.values()))
        ready = sum(map(len, found.values()))
        of_all = sum(map(len, spec.planned.values()))
        report(f"{ready} of {of_all} replicas are restored, {size(so_far)} of {size(total)}",
            Amount(done=so_far, total=total, unit="bytes"))  # fmt: skip

    async def one(storage: StorageMeta) -> None:
        numbers = sorted(number for number, names in spec.planned.items() if storage.name in names)
        number = -1
        try:
            async with daemons.admin(spec.meta.key, storage) as admin:
                for number in numbers:
                    async for state in admin.restore(spec.order(number)):
                        done[storage.name, number] = state.bytes if state.bytes_total else spec._bytes(number)
                        if state.status is not None:
                            found[number][storage.name] = state.status
                        report_progress()
        except WaltzError as error:
            failed = next((n for n in numbers if storage.name not in found[n]), number)
            raise type(error)(
                f"{storage.name}, partition {failed}: {error.message}",
                not_done=HALF_DONE,
                next_step=f"{error.detail_next_step}; then run the same command again: it resumes",
                **error.facts,
            ) from error

    await creation.each(list(spec.storages.values()), one)
    return found


def restoration(spec: RestoreSpec, statuses: Mapping[int, Mapping[str, ReplicaStatus]]) -> Restoration:
    """Return the documents to restore: the saved ones, without those that describe where things were."""
    documents: dict[str, Document] = {
        path: document
        for path, document in (spec.saved.documents if spec.saved is not None else {}).items()
        if path not in NOT_OF_THE_LOG and path.rpartition("/")[0] not in FOLDERS_NOT_OF_THE_LOG
    }
    documents |= {f"{STORAGES}/{name}": storage for name, storage in spec.storages.items()}
    documents[CLIENT_IDS] = _counter(spec)
    if spec.is_same_key:
        for number, log in spec.source.logs.items():
            manifest = log.manifest
            if manifest.number:
                documents[archive_path(number)] = ArchiveMeta(
                    archive=manifest.archive, number=manifest.number, sha256=manifest.sha256, last=manifest.last,
                    timeline=manifest.timeline,
                )  # fmt: skip
    return Restoration(
        meta=spec.meta,
        verdicts=tuple(
            Proven(
                partition=number,
                meta=partition_meta(spec, number, statuses[number]),
                roles=dict.fromkeys(sorted(names), Membership.MEMBER),
            )
            for number, names in sorted(spec.planned.items())
        ),
        generations=tuple(spec.generation(number) for number in sorted(spec.planned)),
        counted_by_clock=clock_generation(time.time()),
        documents=documents,
        storages=spec.storages,
    )


def partition_meta(spec: RestoreSpec, partition: int, statuses: Mapping[str, ReplicaStatus]) -> PartitionMeta:
    """Return the document of a partition as after an orderly end of the session in which its replicas are."""
    mark, session = spec.cut.points[partition].mark, spec.session(partition)
    return PartitionMeta(
        generation=spec.generation(partition),
        session=session,
        opened=session,
        low_mark=mark,
        members=tuple(sorted(statuses)),
        replicas={
            name: ReplicaState(session=session, closing=None, incarnation=status.incarnation, acknowledged=mark)
            for name, status in sorted(statuses.items())
        },
        decision=Decision(mark=mark, session=session),
        lease_ms=LEASE_MS_MAX,
        timelines=spec.lineage(partition).later,
    )


def _counter(spec: RestoreSpec) -> Counter:
    """Return the counter of client ids, above every id given out. Tokens of the old cluster stay valid only if its key is
    kept."""
    newest = spec.source.newest
    saved = None if newest is None else newest.documents.get(CLIENT_IDS)
    is_known = isinstance(saved, Counter) and spec.is_same_key and saved.secret != NO_SECRET
    return counter_above(saved, saved.secret if is_known and isinstance(saved, Counter) else uuid4())
