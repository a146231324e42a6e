"""`waltzctl partition rescue`: an operator's decision where a log ends, if its owner cannot decide, from the copies
that answer.

The answering storages are fenced first, so that no owner writes there and their reports stay true. Then the document of
the partition is saved by compare-and-set on the version that was read before. If an owner took a session meanwhile, the
save fails and everything is read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol
from uuid import UUID, uuid4

from typer import Argument, Option

from waltzctl.placement.mover import POLL_SECONDS, RealDaemons, placement_state
from waltzctl.placement.rescue_scene import Scene
from waltzctl.shell.change import Change, ChangeCommand, current_user
from waltzctl.shell.numbers import chosen, format_partitions
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.cluster.cluster import NO_VERSION, Cluster, partition_path
from waltzd.cluster.documents import PartitionMeta, StorageMeta
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, PartitionsClosed, Unsafe
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.document import decode
from waltzd.protocol.timelines import Lineage

VERB = "partition rescue"
ATTEMPTS_MAX = 20
"""Attempts to fence. An owner that keeps taking sessions does so at growing intervals, so a few attempts are enough."""
OPEN_SECONDS = 60.0


class Storages(Protocol):
    """Storages of one cluster, as far as a rescue needs them. Tests pass their own."""

    async def take_snapshot(self) -> ClusterSnapshot: ...
    async def fence(self, storage: StorageMeta, partition: int, session: int) -> ReplicaStatus: ...
    async def archived_to(self, storage: StorageMeta, partition: int, lineage: Lineage) -> int:
        """Return the id up to which the archive of this storage proves the log of this timeline; -1 if it proves
        nothing."""
        ...

    async def take_archived(
        self, storage: StorageMeta, partition: int, session: int, mark: int, lineage: Lineage
    ) -> ReplicaStatus:
        """Let its fenced replica take from the archive what it lacks up to this id."""
        ...


def rescue(
    *,
    numbers: Annotated[str, Argument(metavar="PARTITIONS")],
    seconds: Annotated[
        float, Option("--timeout", min=0, metavar="SECONDS", help="Time to wait until the partitions are open again.")
    ] = OPEN_SECONDS,
    without_archive: Annotated[
        bool,
        Option("--without-archive", help="Do not restore transactions that only the archive proves."),
    ] = False,
    command: ChangeCommand,
) -> int:
    """Reopen PARTITIONS (like 0-3,7) that no owner can open. Causes: too many storages are lost to decide where the log
    ends ("undecided"); the document of the partition is lost or older than the replicas (W2020, W2021); a storage has
    promised a session that no owner can reach. Committed transactions that only unreachable storages hold are GIVEN UP:
    first start every storage that can be started.

    The log ends at the last id that an answering replica is proven to hold. If the archive proves more, its transactions
    are restored first.

    The plan shows the replica of each answering storage and how much of it is proven, the id behind which the log
    continues, and what is given up. The command is refused if the partition takes transactions, or if its owner can open it
    without a rescue.

    \b
    Examples:
      waltzctl partition rescue 0 --dry-run
      waltzctl partition rescue 0-1 --dry-run -o json
    """
    wanted = chosen(command.target, numbers)

    async def prepare(cluster: Cluster) -> Change:
        now = await placement_state(cluster, command.target.tls)
        now.check_partitions(wanted)
        closed = [number for number in wanted if not now.found.partitions[number].is_open]
        if not closed:
            raise Unsafe(
                f"{format_partitions(wanted, 'is', 'are')} open: there is nothing to rescue",
                not_done="nothing was changed",
                next_step="run `waltzctl status` for the state of the cluster",
            )
        scenes = {number: (await read_scene(cluster, now.found, number))[0] for number in closed}
        if not without_archive:
            daemons, there = (
                RealDaemons(cluster, command.target.tls),
                {one.meta.name: one.meta for one in now.found.storages},
            )
            scenes = {number: await with_archive(daemons, scene, there) for number, scene in scenes.items()}

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            storages = RealDaemons(cluster, command.target.tls)
            done = [
                await carry_out(cluster, storages, scene, current_user(command.target.tls)) for scene in scenes.values()
            ]
            await _until_open(storages, closed, seconds, report)
            return {
                "partitions": [
                    {"partition": one.partition, "mark": one.mark, "session": one.session, "given_up": one.given_up}
                    for one in done
                ]
            }

        return Change(plan=plan_for(f"{now.found.meta.name}/{numbers}", scenes), do=do)

    return command.perform(prepare)


def plan_for(subject: str, scenes: Mapping[int, Scene]) -> Plan:
    steps, against = list[str](), list[str]()
    for number, scene in scenes.items():
        steps += [f"partition {number}: {step}" for step in scene.steps]
        against += [
            f"the replica of partition {number} on {name} was taken offline; put it online first: `waltzctl storage "
            f"availability {name} {number} --online`"
            for name, status in sorted(scene.statuses.items())
            if not status.is_available
        ]
        if scene.by_itself:
            against.append(f"the owner of partition {number} can open it without a rescue: {scene.by_itself}")
        if scene.refusal:
            against.append(scene.refusal)
    return Plan(verb=VERB, subject=subject, steps=tuple(steps), danger=Danger.TYPED, unsafe=tuple(against))


async def read_scene(cluster: Cluster, found: ClusterSnapshot, number: int) -> tuple[Scene, int]:
    """Read the scene of a partition, and the version of its document."""
    path = partition_path(number)
    node = await cluster.coordinator.get(path)
    meta: PartitionMeta | None = None
    if node is not None:
        try:
            meta = decode(PartitionMeta, node.data, path)
        except BadMetadata:
            meta = None  # it is replaced by the reports of the storages
    view = found.partitions[number]
    statuses, blank = dict[str, ReplicaStatus](), set[str]()
    for storage in found.storages:
        if storage.reported is None:
            continue
        held = storage.replica(number)
        if held is None:
            blank.add(storage.meta.name)
        elif held.status is not None:
            statuses[storage.meta.name] = held.status
    scene = Scene(
        partition=number, generation=view.generation, roles=view.replicas, meta=meta, statuses=statuses,
        blank=frozenset(blank),
    )  # fmt: skip
    return scene, NO_VERSION if node is None else node.version


async def carry_out(
    cluster: Cluster,
    storages: Storages,
    agreed: Scene,
    who: str | None = None,
    *,
    new_identity: Callable[[], UUID] = uuid4,
) -> Scene:
    """Fence the storages and save the decision, which keeps at least as much as the confirmed plan."""
    number = agreed.partition
    for _ in range(ATTEMPTS_MAX):
        found = await storages.take_snapshot()
        roles, roles_version = await cluster.replica_set(number)
        scene, version = await read_scene(cluster, found, number)
        _check(agreed, scene)
        there = {view.meta.name: view.meta for view in found.storages}
        names = sorted(scene.statuses)
        answers = await asyncio.gather(*(storages.fence(there[name], number, scene.session) for name in names))
        scene = replace(scene, statuses=dict(zip(names, answers, strict=True)), fenced=scene.session)
        _check(agreed, scene)
        if agreed.taker is not None:
            scene = await _completed(storages, await with_archive(storages, scene, there), agreed, there)
        replicas = (scene.roles_after, roles_version) if scene.roles_after != roles else None
        try:
            document = scene.forked(
                identity=new_identity(), cause=VERB, began=datetime.now(UTC).isoformat(timespec="seconds"), who=who
            )
            await cluster.save_partition(number, document, version, replicas=replicas)
        except ChangedMeanwhile:
            continue
        return scene
    raise ChangedMeanwhile(f"the document of partition {number} was changed by its owner {ATTEMPTS_MAX} times in a row")


async def with_archive(storages: Storages, scene: Scene, there: Mapping[str, StorageMeta]) -> Scene:
    """Return the scene completed by what the archive proves, as reported by each storage that answers and has an
    archive."""
    found = dict[str, int]()
    for name, status in sorted(scene.statuses.items()):
        if status.archives and status.timeline == scene.lineage.current:
            with suppress(WaltzError):  # its store is away, or is none of this cluster: another storage may reach it
                found[name] = await storages.archived_to(there[name], scene.partition, Lineage(status.timelines))
    return replace(scene, archived=found)


async def _completed(storages: Storages, scene: Scene, agreed: Scene, there: Mapping[str, StorageMeta]) -> Scene:
    """Return the scene after one replica has taken what the archive proves."""
    name = scene.taker
    if scene.end < agreed.end:
        raise ChangedMeanwhile(
            f"{VERB} {scene.partition}: the archive proves ids up to {scene.end}, in the plan up to {agreed.end}",
            not_done="the document was not written",
            next_step="make the archive reachable and plan again; --without-archive gives up what only the archive has",
        )
    if name is None:
        return scene
    lineage = Lineage(scene.statuses[name].timelines)
    status = await storages.take_archived(there[name], scene.partition, scene.session, scene.end, lineage)
    scene = replace(scene, statuses={**scene.statuses, name: status}, archived={})
    if scene.mark < agreed.end:
        raise ChangedMeanwhile(
            f"{VERB} {scene.partition}: {name} restored ids from the archive up to {scene.mark}, not {agreed.end}",
            not_done="the document was not written",
        )
    return scene


def _check(agreed: Scene, scene: Scene) -> None:
    gone = sorted(agreed.statuses.keys() - scene.statuses.keys())
    if gone or scene.mark < agreed.mark:
        what = (
            f"{', '.join(gone)} does not answer any more"
            if gone
            else f"no replica is proven beyond id {scene.mark} now, {agreed.mark} in the plan"
        )
        raise ChangedMeanwhile(f"{VERB} {agreed.partition}: {what}", not_done="the document was not written")


async def _until_open(storages: Storages, numbers: Sequence[int], seconds: float, report: Report) -> None:
    waiting = ""
    try:
        async with asyncio.timeout(seconds):
            while closed := [view for view in (await storages.take_snapshot()).closed if view.partition in numbers]:
                waiting = f"partition {closed[0].partition}: {closed[0].waiting}"
                report(f"{len(numbers) - len(closed)} of {len(numbers)} partitions are open; {waiting}")
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise PartitionsClosed(
            f"the decision is saved, but not all partitions are open after {seconds:g} seconds: {waiting}"
        ) from None
