"""A new cluster, from storages that run to documents in the coordinator and empty replicas. `cluster` is its face.

Everything is looked at before anything is written: the storages answer, have one key, and hold nothing yet. Then the
documents are written, whole or not at all, and only one of two who do so at once succeeds. The replicas come last; when
that is interrupted, the same wish again goes on from there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar
from uuid import UUID, uuid4

from waltzctl.certificate import first_contact
from waltzctl.change import who
from waltzctl.placement.plan import Creation, assign_replicas
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.coordinator import Coordinator
from waltzd.cluster.documents import ClusterMeta, HistoryEntry, ReplicaSets, Role, StorageMeta
from waltzd.errors import (
    BadArgument,
    CannotConnect,
    ClusterDiffers,
    ForeignCluster,
    MetadataMissing,
    NameInUse,
    NodeMissing,
    NoSuchPartition,
    PartitionDamaged,
    PartitionExists,
    PartitionOffline,
    TlsMismatch,
    WaltzError,
    WrongPeer,
    WrongStorage,
)
from waltzd.protocol.address import is_name
from waltzd.protocol.descriptions import PartitionDescription, StorageDescription
from waltzd.wire.storages import AdminClient, ReplicaClient
from waltzd.wire.tls import Tls

CALL_SECONDS = 10.0
CALLS_MAX = 16
"""So many storages are asked at once."""
NO_KEY = UUID(int=0)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Wish:
    name: str
    partitions: int
    replication: int
    storages: tuple[StorageMeta, ...]
    key: UUID | None = None
    """Without one, the key that the storages have."""


async def create_cluster(
    coordinator: Coordinator, wish: Wish, *, created: str, is_dry: bool = False, tls: Tls | None = None
) -> Creation:
    """`created` is the date for the document. Dry, everything is looked at and nothing is written."""
    check_wish(wish)
    planned = assign_replicas(wish.partitions, {storage.name: storage.group for storage in wish.storages}, wish.replication)
    descriptions = await _describe_all(wish, tls)
    key = _key_of(wish, descriptions)
    _check_descriptions(wish, descriptions)
    _check_apart(descriptions)
    await _each(wish.storages, lambda storage: reach_replicas(storage, key, tls, descriptions[storage.name].instance))
    meta = ClusterMeta(name=wish.name, key=key, partitions=wish.partitions, created=created)
    there = await _look(coordinator, wish, key)
    if there is None:
        _check_emptiness(descriptions)
        if is_dry:
            return Creation(
                meta=meta,
                storages={storage.name: storage for storage in wish.storages},
                replicas=planned,
                was_there=False,
                created={},
            )
        sets = {partition: dict.fromkeys(names, Role.MEMBER) for partition, names in planned.items()}
        await Cluster.create(coordinator, meta, storages=wish.storages, replicas=ReplicaSets(partitions=sets))
    found = await _look(coordinator, wish, key)  # somebody else may have been faster
    assert found is not None
    meta, storages, replicas = found
    created_now: dict[str, tuple[int, ...]] = {}
    if not is_dry:
        created_now = await _create_replicas(key, storages, replicas, descriptions, tls)
    if there is None and not is_dry:
        await _remember(Cluster(coordinator), meta, storages, began=created)
    return Creation(meta=meta, storages=storages, replicas=replicas, was_there=there is not None, created=created_now)


async def _remember(cluster: Cluster, meta: ClusterMeta, storages: Mapping[str, StorageMeta], *, began: str) -> None:
    """What was done with a cluster begins with this."""
    await cluster.begin_history(
        HistoryEntry(
            began=began,
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
            who=who(),
            verb="create-cluster",
            subject=meta.name,
            reason=None,
            steps=(f"{meta.partitions} partitions on {', '.join(sorted(storages))}",),
            outcome="done",
        )
    )


def check_wish(wish: Wish) -> None:
    """What a person may have mistyped, before anything is asked."""
    for name in (wish.name, *(storage.name for storage in wish.storages)):
        if not is_name(name):
            raise BadArgument(f"{name!r} is not a name: letters, digits, dots, dashes and underscores, at most 64")
    for what, addresses in (
        ("listen", [storage.listen for storage in wish.storages]),
        ("admin", [storage.admin_listen for storage in wish.storages]),
    ):
        twice = sorted({address for address in addresses if addresses.count(address) > 1})
        if twice:
            raise BadArgument(f"two storages have the same {what} address, {twice[0]}")
    names = [storage.name for storage in wish.storages]
    if len(set(names)) != len(names):
        raise BadArgument("two storages have the same name")


# -- looking -----------------------------------------------------------------------------------------------------------


async def _each(storages: Sequence[StorageMeta], ask: Callable[[StorageMeta], Awaitable[T]]) -> list[T]:
    """All of them, a few at a time."""
    turn = asyncio.Semaphore(CALLS_MAX)

    async def one(storage: StorageMeta) -> T:
        async with turn:
            return await ask(storage)

    # When one fails, the others finish all the same: what was done is whole, and the first of the list is told.
    found = await asyncio.gather(*(one(storage) for storage in storages), return_exceptions=True)
    answers: list[T] = []
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


async def _describe_all(wish: Wish, tls: Tls | None) -> dict[str, StorageDescription]:
    found: dict[str, StorageDescription] = {}
    silent: dict[str, CannotConnect] = {}

    async def ask(storage: StorageMeta) -> None:
        try:
            found[storage.name] = await describe(storage, tls)
        except (TlsMismatch, WrongPeer):
            raise  # to start it as it is would not help
        except CannotConnect as error:
            silent[storage.name] = error

    await _each(wish.storages, ask)
    if silent:
        first = next(storage for storage in wish.storages if storage.name in silent)
        error = silent[first.name]
        proposed = tls.identity.key if tls is not None else uuid4()
        key = wish.key or next((description.cluster_key for description in found.values()), proposed)
        raise CannotConnect(
            f"{', '.join(sorted(silent))} cannot be reached; {first.name} at {first.admin_listen}: {error.message}",
            not_done="nothing was written",
            next_step=f"start each storage with `cluster_key: {key}` and `partitions: {wish.partitions}` in its "
            f"configuration{', and a certificate of that cluster' if tls is not None else ''}, then run this again",
        ) from error
    return found


async def describe(storage: StorageMeta, tls: Tls | None) -> StorageDescription:
    """What the storage says of itself at its address for operators, whatever cluster it is in."""

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


async def reach_replicas(storage: StorageMeta, key: UUID, tls: Tls | None, instance: UUID | None) -> None:
    """The address for servers leads to the same storage: to the process that answers operators."""
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


def _key_of(wish: Wish, descriptions: Mapping[str, StorageDescription]) -> UUID:
    key = wish.key
    for name, description in sorted(descriptions.items()):
        key = key or description.cluster_key
        if description.cluster_key != key:
            raise ForeignCluster(
                f"{name} has the cluster key {description.cluster_key}, not {key}",
                not_done="nothing was written",
                next_step="give every storage of the cluster the same `cluster_key`, in an empty directory",
            )
    assert key is not None
    return key


def _check_descriptions(wish: Wish, descriptions: Mapping[str, StorageDescription]) -> None:
    for name, description in sorted(descriptions.items()):
        if description.partitions != wish.partitions:
            raise BadArgument(
                f"{name} was set up for a cluster of {description.partitions} partitions, not {wish.partitions}",
                next_step=f"give --partitions {description.partitions}, or set the storage up anew",
            )


def _check_apart(descriptions: Mapping[str, StorageDescription]) -> None:
    """What one storage acknowledged under two names would be on one disk, and be taken for a majority."""
    for (name, said), (other, its) in itertools.combinations(sorted(descriptions.items()), 2):
        if said.is_same_as(its):
            raise BadArgument(
                f"{name} and {other} are one storage: both addresses lead to {said.directory}",
                next_step="give each storage once; each of them is a process with a directory of its own",
            )


def _check_emptiness(descriptions: Mapping[str, StorageDescription]) -> None:
    """Without documents, whatever a storage holds belongs to a cluster whose documents were lost."""
    for name, description in sorted(descriptions.items()):
        held = [found.partition for found in description.assigned if not _is_fresh(found)]
        if held:
            raise MetadataMissing(
                f"{name} has served partition {held[0]} before, and the coordinator knows of no cluster at this root",
                next_step="check the coordinator's address and the root, restore the documents, or use empty storages",
            )


def _is_fresh(found: PartitionDescription) -> bool:
    status = found.status
    return status is not None and status.is_sound and status.promised_session <= 0 and status.last_id < 0


Documents = tuple[ClusterMeta, dict[str, StorageMeta], dict[int, tuple[str, ...]]]


async def _look(coordinator: Coordinator, wish: Wish, key: UUID) -> Documents | None:
    """What the coordinator has, if it is what is wished for."""
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
    wanted = {storage.name: storage for storage in wish.storages}
    for what, there, wished in (
        ("name", meta.name, wish.name),
        ("number of partitions", meta.partitions, wish.partitions),
        ("storages", ", ".join(map(_spell, storages.values())), ", ".join(_spell(wanted[name]) for name in sorted(wanted))),
    ):
        if there != wished:
            raise ClusterDiffers(f"the {what} of cluster {meta.name}: {there}; asked for: {wished}")
    sets, _ = await cluster.replicas()
    return meta, storages, {partition: tuple(sorted(names)) for partition, names in sets.partitions.items()}


def _spell(storage: StorageMeta) -> str:
    return f"{storage.name}={storage.listen},{storage.admin_listen},{storage.group}"


# -- replicas ----------------------------------------------------------------------------------------------------------


async def _create_replicas(
    key: UUID,
    storages: Mapping[str, StorageMeta],
    replicas: Mapping[int, tuple[str, ...]],
    descriptions: Mapping[str, StorageDescription],
    tls: Tls | None,
) -> dict[str, tuple[int, ...]]:
    """Those that are missing."""
    created: dict[str, tuple[int, ...]] = {}

    async def complete(storage: StorageMeta) -> None:
        there = {found.partition for found in descriptions[storage.name].assigned}
        missing = [
            partition for partition, names in sorted(replicas.items()) if storage.name in names and partition not in there
        ]
        results: dict[int, WaltzError | None] = {}
        if missing:
            async with AdminClient(storage.admin_listen, key, seconds=CALL_SECONDS, tls=tls, name=storage.name) as admin:
                try:
                    results = await admin.create_partitions(missing)
                except WaltzError as error:
                    raise _incomplete(error, storage.name) from error
        for partition, refusal in sorted(results.items()):
            if refusal is not None and not isinstance(refusal, PartitionExists):
                raise _incomplete(refusal, f"{storage.name}, partition {partition}") from refusal
        created[storage.name] = tuple(partition for partition in sorted(results) if results[partition] is None)

    await _each([storages[name] for name in sorted(storages)], complete)
    return dict(sorted(created.items()))


def _incomplete(error: WaltzError, place: str) -> WaltzError:
    return type(error)(
        f"{place}: {error.message}",
        not_done="the cluster is written down, but not all of its replicas are made",
        next_step=f"{error.detail_next_step}; then run this again",
        **error.facts,
    )
