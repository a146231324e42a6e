"""`waltzctl create-cluster`: makes a cluster from running storages: documents in ZooKeeper, and empty replicas.

Everything is checked before anything is written: the storages answer, have one key, and hold nothing. Then all
documents are written in one transaction; of two commands at the same time only one succeeds. The replicas come last;
after an interruption the same command continues from there.

A cluster of an older version gets its group log later: first its empty replicas, on storages chosen as for a new cluster,
then one change of the documents. Killed in between, the next run chooses the same storages and continues. Servers open the
group log when they see that the assignment has one more owner.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar
from uuid import UUID, uuid4

from typer import Option

from waltzctl.placement.replica_assignment import Creation, assign_replicas
from waltzctl.shell import moment
from waltzctl.shell.change import NOTHING_BEGUN, current_user
from waltzctl.shell.cluster_target import CommandTarget, check_name, check_operator, first_contact, using
from waltzctl.shell.interruption import interruptible
from waltzctl.shell.options import Output
from waltzctl.shell.progress import Amount, Report, Shown, ShownProgress, Waiting, unreported
from waltzctl.show.cluster import creation
from waltzctl.show.forms import put
from waltzctl.show.terminal import is_line
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzctl.snapshot.collector import take_snapshot
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.coordinator import Coordinator
from waltzd.cluster.documents import FORMAT, ClusterMeta, HistoryEntry, Membership, ReplicaSets, StorageMeta
from waltzd.cluster.groups import begin_group_log
from waltzd.errors import EXIT_OK, BadArgument, CannotConnect, ForeignCluster, NoSuchPartition, TlsMismatch, WaltzError
from waltzd.errors.operations import (
    AlreadyThere,
    ChangedMeanwhile,
    FormatUnknown,
    GroupLogRefused,
    MetadataMissing,
    NameInUse,
    NodeMissing,
    PartitionDamaged,
    PartitionExists,
    PartitionOffline,
    WrongPeer,
    WrongStorage,
)
from waltzd.format.layout import VERSIONS
from waltzd.protocol.address import parse_address
from waltzd.protocol.descriptions import PartitionDescription, StorageDescription
from waltzd.protocol.level import THIS
from waltzd.wire.storages import AdminClient, ReplicaClient
from waltzd.wire.tls import Tls

CALL_SECONDS = 10.0
CALLS_MAX = 16
"""Storages asked at the same time."""
NO_KEY = UUID(int=0)
T = TypeVar("T")
WantedFormat = Annotated[
    int | None,
    Option(
        "--format",
        min=min(VERSIONS),
        max=max(VERSIONS),
        help="Format of the segments: 0 is the format of the original Waltz, 1 also keeps times, locks and groups of "
        f"transactions. Default for a new cluster: {FORMAT}.",
    ),
]
INCOMPLETE = "Interrupted. The cluster may exist already, with some replicas: the same command completes it."
FORM = "write it as name=host:port,host:port or name=host:port,host:port,group"
GROUP_CHARACTERS_MAX = 64
CREATED_MAX = 7900
"""Partitions of a new cluster. The document with their owners has to fit into one change of the coordinator, whatever the
names of the servers are, or the leader could not save it."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    name: str
    partitions: int
    replication: int
    storages: tuple[StorageMeta, ...]
    key: UUID | None = None
    """Cluster key; None takes the key of the storages."""
    format: int | None = None
    """Format of the segments to write; None for `FORMAT`, or for the format that an existing cluster has."""

    def __post_init__(self) -> None:
        """Check what a person may have mistyped, before any daemon is asked."""
        if self.partitions > CREATED_MAX:
            raise BadArgument(
                f"a cluster of {self.partitions} partitions: ZooKeeper takes the owners of {CREATED_MAX} at most",
                next_step=f"set the storages up for at most {CREATED_MAX} partitions, or make several clusters",
            )
        for name in (self.name, *(storage.name for storage in self.storages)):
            check_name(name)
        for what, given in (
            ("listen address, ", [storage.listen for storage in self.storages]),
            ("admin address, ", [storage.admin_listen for storage in self.storages]),
            ("name, ", [storage.name for storage in self.storages]),
        ):
            twice = sorted({one for one in given if given.count(one) > 1})
            if twice:
                raise BadArgument(f"two storages have the same {what}{twice[0]}")


# -- what was typed ----------------------------------------------------------------------------------------------------


def create(
    *,
    name: Annotated[str, Option("--name", help="Name of the cluster.")],
    partitions: Annotated[
        int, Option("--partitions", min=1, max=CREATED_MAX, help="Number of partitions. It cannot be changed later.")
    ],
    given: Annotated[
        tuple[str, ...],
        Option(
            "--storage",
            metavar="NAME=LISTEN,ADMIN[,GROUP]",
            help="Name, two addresses and failure group of a storage. Repeat it for each storage.",
        ),
    ],
    replicas: Annotated[int, Option("--replicas", min=1, max=15, help="Replicas of each partition.")] = 3,
    key: Annotated[UUID | None, Option("--key", help="Cluster key. Default: the key of the storages.")] = None,
    format: WantedFormat = None,
    timeout: Annotated[
        float,
        Option("--timeout", min=1, max=3600, metavar="SECONDS", help="Time limit for a storage to create 16 replicas."),
    ] = CALL_SECONDS,
    dry_run: Annotated[bool, Option("--dry-run", help="Check everything and show the plan; write nothing.")] = False,
    progress: ShownProgress = Shown.AUTO,
    target: CommandTarget,
    output: Output = "table",
) -> int:
    """Create a cluster on running storages: write its documents to ZooKeeper, and create the empty replicas. The replicas
    of a partition are spread over failure groups, and evenly over the storages.

    The storages must run, with the same cluster_key and number of partitions in their configuration. If none runs yet, the
    error proposes a key. Running the command again with the same options completes what is missing, or changes nothing.

    \b
    Examples:
      waltzctl create-cluster --coordinator 127.0.0.1:2181 --name trial --partitions 4 --replicas 1 \\
        --storage one=127.0.0.1:55280,127.0.0.1:55281 --dry-run
      waltzctl create-cluster --coordinator 127.0.0.1:2181 --name trial --partitions 4 --replicas 1 \\
        --storage one=127.0.0.1:55280,127.0.0.1:55281,rack-1
    """
    if not dry_run:
        check_operator(target.tls, "make a cluster")
    storages = tuple(map(storage_of, given))
    spec = ClusterSpec(name=name, partitions=partitions, replication=replicas, storages=storages, key=key, format=format)
    now = moment.now()

    async def make(cluster: Cluster) -> Creation:
        with Waiting(progress) as line:
            return await create_cluster(
                cluster.coordinator, spec, created=now, is_dry=dry_run, tls=target.tls, report=line.report, seconds=timeout
            )

    with interruptible(NOTHING_BEGUN if dry_run else INCOMPLETE):
        found = using(target, make)
    put(creation(found, hosts=target.hosts, root=target.root, is_dry=dry_run), output)
    return EXIT_OK


def storage_of(text: str) -> StorageMeta:
    """Parse a storage as it is typed. A storage without a group is a group of its own."""
    name, equals, rest = text.partition("=")
    parts = rest.split(",")
    if not equals or len(parts) not in (2, 3):
        raise BadArgument(f"{text!r} is not a storage", next_step=FORM)
    try:
        listen, admin = (str(parse_address(part)) for part in parts[:2])
    except ValueError as error:
        raise BadArgument(f"{text}: {error}", next_step=FORM) from error
    check_name(name)
    for group in parts[2:]:
        check_group(group, text)
    return StorageMeta(name=name, listen=listen, admin_listen=admin, group=parts[2] if len(parts) == 3 else name)


def storages_of(given: Iterable[str]) -> dict[str, StorageMeta]:
    """Parse storages as they are typed; return them by name."""
    found = [storage_of(text) for text in given]
    names = {storage.name: storage for storage in found}
    if len(names) < len(found):
        raise BadArgument("two storages have the same name")
    return names


def check_group(text: str, place: str) -> None:
    """Check the specification before any daemon is asked."""
    if not text:
        raise BadArgument(f"{place}: the group has no name", next_step=FORM)
    if len(text) > GROUP_CHARACTERS_MAX or not is_line(text) or text != text.strip():
        raise BadArgument(
            f"{place}: the name of a group has at most {GROUP_CHARACTERS_MAX} printable characters, and no blanks around it"
        )


# -- the cluster -------------------------------------------------------------------------------------------------------


async def create_cluster(
    coordinator: Coordinator,
    spec: ClusterSpec,
    *,
    created: str,
    is_dry: bool = False,
    tls: Tls | None = None,
    report: Report = unreported,
    seconds: float = CALL_SECONDS,
) -> Creation:
    """Create the cluster; with a dry run, check everything and write nothing. `created` is the date in the document.
    `seconds`: time for a storage to make one portion of its replicas (`waltzd.wire.storages.PORTION`)."""
    groups = {storage.name: storage.group for storage in spec.storages}
    planned = assign_replicas(spec.partitions + 1, groups, spec.replication)  # the last one is the group log
    descriptions = await _describe_all(spec, tls)
    key = _common_key(spec, descriptions)
    check_apart(descriptions)
    await each(spec.storages, lambda storage: reach_replicas(storage, key, tls, descriptions[storage.name].instance))
    there = await _read_documents(coordinator, spec, key)
    was_there, created_now = there is not None, dict[str, tuple[int, ...]]()
    if there is None:
        _check_emptiness(descriptions)
        written = FORMAT if spec.format is None else spec.format
        check_formats(descriptions, written)
        _check_group_log(descriptions)
        level = newest_level(descriptions)
        meta = ClusterMeta(
            name=spec.name, key=key, partitions=spec.partitions, created=created, format=written, level=level
        )
        there = meta, {storage.name: storage for storage in spec.storages}, planned
        if not is_dry:
            sets = {partition: dict.fromkeys(names, Membership.MEMBER) for partition, names in planned.items()}
            if coordinator.has_credentials:
                await coordinator.close_above()
            await Cluster.create(coordinator, meta, storages=spec.storages, replicas=ReplicaSets(partitions=sets))
    if not is_dry:
        there = await _read_documents(coordinator, spec, key) or there  # another operator may have been faster
        created_now = await _create_replicas(key, there[1], there[2], descriptions, tls, report, seconds)
        if not was_there:
            await _remember(Cluster(coordinator), there[0], there[1], began=created, tls=tls)
    meta, storages, replicas = there
    return Creation(meta=meta, storages=storages, replicas=replicas, was_there=was_there, created=created_now)


async def _remember(
    cluster: Cluster, meta: ClusterMeta, storages: Mapping[str, StorageMeta], *, began: str, tls: Tls | None
) -> None:
    """Write the first entry of the cluster's history."""
    await cluster.begin_history(
        HistoryEntry(
            began=began,
            ended=moment.now(),
            who=current_user(tls),
            verb="create-cluster",
            subject=meta.name,
            reason=None,
            steps=(f"{meta.partitions} partitions on {', '.join(sorted(storages))}",),
            outcome="done",
        )
    )


# -- looking -----------------------------------------------------------------------------------------------------------


async def each(storages: Sequence[StorageMeta], ask: Callable[[StorageMeta], Awaitable[T]]) -> list[T]:
    """Ask all storages, a few at a time; return the answers in their order."""
    turn = asyncio.Semaphore(CALLS_MAX)

    async def one(storage: StorageMeta) -> T:
        async with turn:
            return await ask(storage)

    # If one fails, the others still finish, so that each of them is done completely; the first error of the list is
    # raised.
    found = await asyncio.gather(*(one(storage) for storage in storages), return_exceptions=True)
    answers: list[T] = []
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


async def _describe_all(spec: ClusterSpec, tls: Tls | None) -> dict[str, StorageDescription]:
    found: dict[str, StorageDescription] = {}
    silent: dict[str, CannotConnect] = {}

    async def ask(storage: StorageMeta) -> None:
        try:
            found[storage.name] = await describe(storage, tls)
        except (TlsMismatch, WrongPeer):
            raise  # starting it unchanged would not help
        except CannotConnect as error:
            silent[storage.name] = error

    await each(spec.storages, ask)
    if silent:
        first = next(storage for storage in spec.storages if storage.name in silent)
        error = silent[first.name]
        proposed = tls.identity.key if tls is not None else uuid4()
        key = spec.key or next((description.cluster_key for description in found.values()), proposed)
        raise CannotConnect(
            f"{', '.join(sorted(silent))} cannot be reached; {first.name} at {first.admin_listen}: {error.message}",
            not_done="nothing was written",
            next_step=f"start each storage with `cluster_key: {key}` and `partitions: {spec.partitions}` in its "
            f"configuration{', and a certificate of that cluster' if tls is not None else ''}, then run this again",
        ) from error
    return found


async def describe(storage: StorageMeta, tls: Tls | None) -> StorageDescription:
    """Ask a storage for its description at its admin address, whatever cluster it belongs to."""

    def at(address: str) -> AdminClient:
        return AdminClient(address, NO_KEY, seconds=CALL_SECONDS, tls=tls, name=storage.name)

    try:
        async with at(storage.admin_listen) as stranger, first_contact(storage.admin_listen, tls):
            return await stranger.describe()
    except WrongPeer as error:
        try:
            async with at(storage.listen) as stranger:
                await stranger.describe()
        except WaltzError:
            raise error from None
        raise BadArgument(
            f"LISTEN and ADMIN of {storage.name} are swapped: {storage.admin_listen} is its LISTEN address",
            next_step=f"give {storage.admin_listen} as LISTEN and {storage.listen} as ADMIN",
        ) from error


async def describe_all(storages: Mapping[str, StorageMeta], tls: Tls | None) -> dict[str, StorageDescription]:
    """Ask every storage, at both of its addresses. Raise unless each is a process of its own, and all were set up for
    one cluster."""
    wanted = list(storages.values())
    reported = await each(wanted, lambda storage: describe(storage, tls))
    found = {storage.name: one for storage, one in zip(wanted, reported, strict=True)}
    check_apart(found)
    await each(wanted, lambda one: reach_replicas(one, found[one.name].cluster_key, tls, found[one.name].instance))
    if len({(one.cluster_key, one.partitions) for one in reported}) > 1:
        rows = "; ".join(f"{name}: key {one.cluster_key}, {one.partitions} partitions" for name, one in found.items())
        raise ForeignCluster(f"these storages were set up for different clusters: {rows}", not_done="nothing was changed")
    return found


async def reach_replicas(storage: StorageMeta, key: UUID, tls: Tls | None, instance: UUID | None) -> None:
    """Check that the address for servers leads to the process that answers at the admin address."""
    client = ReplicaClient(storage.listen, key, seconds=CALL_SECONDS, tls=tls, name=storage.name, instance=instance)
    async with client:
        try:
            await client.segments(0)
        except (NoSuchPartition, PartitionDamaged, PartitionOffline):
            return  # it has the key and answers
        except WrongStorage as error:
            raise WrongStorage(
                f"{storage.listen} and {storage.admin_listen} are addresses of two storages: {error.message}",
                not_done="nothing was written",
                next_step=f"give the `listen` and the `admin_listen` address of the storage that is to be {storage.name}",
            ) from error
        except CannotConnect as error:
            raise CannotConnect(
                f"{storage.name} answers at {storage.admin_listen}, but not at {storage.listen}, where servers would look "
                f"for it: {error.message}",
                not_done="nothing was written",
                next_step="give the storage's `listen` address first, then its `admin_listen` address"
                + (f"; the name in its certificate must be {storage.name}" if tls is not None else ""),
            ) from error


def _common_key(spec: ClusterSpec, descriptions: Mapping[str, StorageDescription]) -> UUID:
    """Check that the storages were set up for one cluster."""
    key = spec.key
    for name, description in sorted(descriptions.items()):
        key = key or description.cluster_key
        if description.cluster_key != key:
            raise ForeignCluster(
                f"{name} has the cluster key {description.cluster_key}, not {key}",
                not_done="nothing was written",
                next_step="give every storage of the cluster the same `cluster_key`, in an empty directory",
            )
        if description.partitions != spec.partitions:
            raise BadArgument(
                f"{name} was set up for a cluster of {description.partitions} partitions, not {spec.partitions}",
                next_step=f"give --partitions {description.partitions}, or set the storage up anew",
            )
    assert key is not None
    return key


def check_apart(descriptions: Mapping[str, StorageDescription]) -> None:
    """Refuse one storage under two names: its acknowledgements would be on one disk, and count as a majority."""
    for (name, reported), (other, its) in itertools.combinations(sorted(descriptions.items()), 2):
        if reported.is_same_as(its):
            raise BadArgument(
                f"{name} and {other} are one storage: both addresses lead to {reported.directory}",
                next_step="give each storage once; each of them is a process with a directory of its own",
            )


def check_formats(descriptions: Mapping[str, StorageDescription], wanted: int) -> None:
    """Refuse a storage that cannot write the format of the cluster, because it would never be level."""
    too_old = [name for name, reported in sorted(descriptions.items()) if wanted not in reported.formats]
    if too_old:
        raise FormatUnknown(
            f"{', '.join(too_old)} cannot write format {wanted}: "
            f"{'its version is' if len(too_old) == 1 else 'their versions are'} "
            f"{', '.join(sorted({descriptions[name].version for name in too_old}))}"
        )


def newest_level(descriptions: Mapping[str, StorageDescription]) -> int:
    """Return the newest level that every storage supports, for a cluster that begins."""
    return min((THIS.level_of(reported.version) for reported in descriptions.values()), default=THIS.level)


def _check_group_log(descriptions: Mapping[str, StorageDescription]) -> None:
    """Raise `GroupLogRefused` if a storage is too old to hold the group log, which a new cluster has from the start."""
    too_old = [name for name, reported in sorted(descriptions.items()) if not reported.keeps_group_log]
    if too_old:
        raise GroupLogRefused(
            f"{', '.join(too_old)} cannot hold a group log: too old a version of Waltz runs there",
            not_done="nothing was written",
            next_step="bring every storage to the same version of Waltz; then run this again",
        )


def _check_emptiness(descriptions: Mapping[str, StorageDescription]) -> None:
    """Refuse storages that hold replicas: without documents these belong to a cluster whose documents were lost."""
    for name, description in sorted(descriptions.items()):
        held = [found.partition for found in description.assigned if not is_fresh(found)]
        if held:
            raise MetadataMissing(
                f"{name} has served partition {held[0]} before, and the coordinator knows of no cluster at this root",
                next_step="check the coordinator's address and the root, restore the documents, or use empty storages",
            )


def is_fresh(found: PartitionDescription) -> bool:
    status = found.status
    return status is not None and status.is_sound and status.promised_session <= 0 and status.last_id < 0


Documents = tuple[ClusterMeta, dict[str, StorageMeta], dict[int, tuple[str, ...]]]


async def _read_documents(coordinator: Coordinator, spec: ClusterSpec, key: UUID) -> Documents | None:
    """Return the existing documents if they match the specification."""
    cluster = Cluster(coordinator)
    try:
        meta = await cluster.meta()
    except NodeMissing:
        return None
    if meta.key != key:
        raise NameInUse(
            f"there is a cluster at this root already: {meta.name}, key {meta.key}", next_step="choose another --root"
        )
    storages = await cluster.storages()
    wanted = {storage.name: storage for storage in spec.storages}
    for what, there, asked in (
        ("name", meta.name, spec.name),
        ("number of partitions", meta.partitions, spec.partitions),
        ("format", meta.format, meta.format if spec.format is None else spec.format),
        (
            "list of storages",
            ", ".join(map(_format_storage, storages.values())),
            ", ".join(_format_storage(wanted[name]) for name in sorted(wanted)),
        ),
    ):
        if there != asked:
            raise AlreadyThere(
                f"cluster {meta.name} exists with another {what}: {there}, not {asked}",
                not_done="the cluster was not changed",
                next_step="look with `waltzctl status`; give the values that it has, or another root and key",
            )
    sets, _ = await cluster.replicas()
    return meta, storages, {partition: tuple(sorted(names)) for partition, names in sets.partitions.items()}


def _format_storage(storage: StorageMeta) -> str:
    return f"{storage.name}={storage.listen},{storage.admin_listen},{storage.group}"


# -- replicas ----------------------------------------------------------------------------------------------------------


async def _create_replicas(
    key: UUID,
    storages: Mapping[str, StorageMeta],
    replicas: Mapping[int, tuple[str, ...]],
    descriptions: Mapping[str, StorageDescription],
    tls: Tls | None,
    report: Report = unreported,
    seconds: float = CALL_SECONDS,
) -> dict[str, tuple[int, ...]]:
    """Make the missing replicas on all storages at once; return which were made where."""
    created: dict[str, tuple[int, ...]] = {}
    missing = {name: _missing(name, replicas, descriptions[name]) for name in storages}
    done = dict.fromkeys(storages, 0)
    total = sum(map(len, missing.values()))

    def progress(name: str, number: int) -> None:
        done[name] = number
        made = sum(done.values())
        report(f"{made} of {total} replicas are created", Amount(done=made, total=total, unit="replicas"))

    async def complete(storage: StorageMeta) -> None:
        name, wanted = storage.name, missing[storage.name]
        results: dict[int, WaltzError | None] = {}
        if wanted:
            async with AdminClient(storage.admin_listen, key, seconds=seconds, tls=tls, name=name) as admin:
                try:
                    results = await admin.create_partitions(wanted, on_progress=lambda number: progress(name, number))
                except WaltzError as error:
                    raise _incomplete(error, storage.name) from error
        for partition, refusal in sorted(results.items()):
            if refusal is not None and not isinstance(refusal, PartitionExists):
                raise _incomplete(refusal, f"{storage.name}, partition {partition}") from refusal
        created[storage.name] = tuple(partition for partition in sorted(results) if results[partition] is None)

    await each([storages[name] for name in sorted(storages)], complete)
    return dict(sorted(created.items()))


def _missing(name: str, replicas: Mapping[int, Sequence[str]], reported: StorageDescription) -> list[int]:
    """Return the partitions of which this storage still has to make a replica."""
    there = {found.partition for found in reported.assigned}
    return [partition for partition, names in sorted(replicas.items()) if name in names and partition not in there]


def _incomplete(error: WaltzError, place: str) -> WaltzError:
    return type(error)(
        f"{place}: {error.message}",
        not_done="the cluster exists, but not all of its replicas are created",
        next_step=f"{error.detail_next_step}; then run this again",
        **error.facts,
    )


# -- the group log of a cluster that has none --------------------------------------------------------------------------


ATTEMPTS_MAX = 5


def plan_group_log(found: ClusterSnapshot) -> tuple[str, ...]:
    """Choose the storages for the group log; return none if the cluster has one. Raise if it must not be made."""
    if found.group_log is not None:
        return ()
    silent = sorted(found.silent)
    if silent:
        raise GroupLogRefused(f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer")
    old = [name for name, reported in found.node_reports if not reported.keeps_group_log]
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
        storages = {name: found.storage(name).meta for name in names}
        await _create_replicas(found.meta.key, storages, {found.meta.partitions: names}, found.storage_reports, tls)
        try:
            return await begin_group_log(cluster, found.meta, dict.fromkeys(names, Membership.MEMBER))
        except ChangedMeanwhile:
            continue
    raise ChangedMeanwhile(f"the documents of the cluster were changed by others {ATTEMPTS_MAX} times in a row")
