"""`waltzctl partition rescue`: an operator's decision where a log ends, if its owner cannot decide, from the copies
that answer.

The answering storages are fenced first, so that no owner writes there and their reports stay true. Before that the
session is saved, as an owner saves it, so that an owner can still open the partition if the command ends half-way. Then
the decision is saved. Each save is a compare-and-set, the first one on the version that was read before any daemon was
asked. If an owner took a session meanwhile, the save fails and everything is read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any
from uuid import UUID, uuid4

from typer import Argument, Option

from waltzctl.placement.daemons import Daemons
from waltzctl.placement.mover import placement_state
from waltzctl.placement.proof import Scene, statement
from waltzctl.shell import moment
from waltzctl.shell.change import Change, ChangeCommand, current_user
from waltzctl.shell.numbers import chosen, format_partitions
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.cluster.cluster import NO_VERSION, Cluster, partition_path
from waltzd.cluster.documents import PartitionMeta
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, PartitionsClosed, Unsafe
from waltzd.protocol.descriptions import RestoreOrder
from waltzd.protocol.document import decode
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import Lineage
from waltzd.wire.storages import AdminClient

VERB = "partition rescue"
ATTEMPTS_MAX = 20
"""Attempts to fence. An owner that keeps taking sessions does so at growing intervals, so a few attempts are enough."""
OPEN_SECONDS = 60.0


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
    are restored first. If it cannot be read, the command is refused.

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
        daemons = Daemons(command.target.tls)
        now = await placement_state(cluster, daemons)
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
            scenes = {number: await with_archive(daemons, scene, now.found) for number, scene in scenes.items()}

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            who = current_user(command.target.tls)
            done = await carry_out_all(cluster, daemons, list(scenes.values()), who)
            await _until_open(cluster, daemons, closed, seconds, report)
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
        else:
            scene.lineage.check_room(number)
        if scene.refusal:
            against.append(scene.refusal)
        for name, why in list(scene.unread_archives.items())[:1]:
            against.append(
                f"the archive of partition {number} may prove more, and cannot be read by {name} ({why}); "
                "--without-archive gives up what only the archive has"
            )
    return Plan(verb=VERB, subject=subject, steps=tuple(steps), danger=Danger.TYPED, unsafe=tuple(against))


async def read_scene(cluster: Cluster, found: ClusterSnapshot, number: int) -> tuple[Scene, int]:
    """Read the scene of a partition, and the version of its document."""
    path = partition_path(number)
    node = await cluster.coordinator.get(path)
    meta: PartitionMeta | None = None
    if node is not None:
        try:
            meta = decode(PartitionMeta, node.data, path)
        except BadMetadata as error:
            if "schema" in error.facts:  # a newer version wrote it
                raise
            meta = None  # it is replaced by the reports of the storages
    view, reported = found.partitions[number], statement(found.storages, number)
    scene = Scene(
        partition=number, generation=view.generation, roles=view.replicas, meta=meta, statuses=reported.statuses,
        blank=reported.blank,
    )  # fmt: skip
    return scene, NO_VERSION if node is None else node.version


async def carry_out_all(cluster: Cluster, daemons: Daemons, agreed: Sequence[Scene], who: str | None) -> list[Scene]:
    """Carry out the rescue of each partition. If one fails, the error names those that were rescued before it."""
    done = list[Scene]()
    for scene in agreed:
        try:
            done.append(await carry_out(cluster, daemons, scene, who))
        except WaltzError as error:
            if not done:
                raise
            saved, left = ([one.partition for one in some] for some in (done, agreed[len(done) :]))
            raise type(error)(
                f"partition {scene.partition}: {error.message}",
                not_done=f"{format_partitions(left, 'was', 'were')} not rescued; the decision of "
                f"{format_partitions(saved)} is saved",
                next_step=error.detail_next_step,
                **error.facts,
            ) from error
    return done


async def carry_out(
    cluster: Cluster,
    daemons: Daemons,
    agreed: Scene,
    who: str | None = None,
    *,
    new_identity: Callable[[], UUID] = uuid4,
) -> Scene:
    """Fence the storages and save the decision, which keeps at least as much as the confirmed plan. Raise
    `ChangedMeanwhile` if the partition is open by now, or its owner can open it: its majority came back, or another
    operator rescued it."""
    number = agreed.partition
    for _ in range(ATTEMPTS_MAX):
        before = await cluster.coordinator.get(partition_path(number))
        found = await daemons.take_snapshot(cluster)
        roles, roles_version = await cluster.replica_set(number)
        scene, version = await read_scene(cluster, found, number)
        # A slow daemon delays the snapshot: what the others reported may be of a time before a session or a move.
        if version != (NO_VERSION if before is None else before.version) or scene.roles != roles:
            continue
        _check(agreed, scene)
        if found.partitions[number].is_open:
            raise ChangedMeanwhile(f"{VERB} {number}: the partition is open now, so there is nothing to rescue")
        if scene.by_itself and not agreed.by_itself:
            raise ChangedMeanwhile(f"{VERB} {number}: its owner can open it now: {scene.by_itself}")
        scene.lineage.check_room(number)
        key, names, session = found.meta.key, sorted(scene.statuses), scene.session
        if scene.meta is not None and not scene.is_behind:
            # Save the session before a storage promises it: an owner refuses promises that its document does not explain.
            taken = replace(scene.meta, session=session)
            try:
                version = await cluster.save_partition(number, taken, version)
            except ChangedMeanwhile:
                continue
            scene = replace(scene, meta=taken)
        answers = await asyncio.gather(*(daemons.fence(key, found.storage(name).meta, number, session) for name in names))
        scene = replace(scene, statuses=dict(zip(names, answers, strict=True)), fenced=session)
        _check(agreed, scene)
        if agreed.taker is not None:
            scene = await _completed(daemons, await with_archive(daemons, scene, found), agreed, found)
        replicas = (scene.roles_after, roles_version) if scene.roles_after != roles else None
        try:
            document = scene.forked(identity=new_identity(), cause=VERB, began=moment.now(), who=who)
            await cluster.save_partition(number, document, version, replicas=replicas)
        except ChangedMeanwhile:
            continue
        return scene
    raise ChangedMeanwhile(f"the document of partition {number} was changed by its owner {ATTEMPTS_MAX} times in a row")


async def with_archive(daemons: Daemons, scene: Scene, found: ClusterSnapshot) -> Scene:
    """Return the scene completed by what the archive proves, as reported by each storage that answers and has an
    archive."""
    proven, unread = dict[str, int](), dict[str, str]()
    for name, status in sorted(scene.statuses.items()):
        if status.archives and status.timeline in scene.lineage:
            try:
                async with daemons.admin(found.meta.key, found.storage(name).meta) as admin:
                    known = await _archived_to(admin, scene.partition, Lineage(status.timelines))
                    proven[name] = min(known, scene.shared(status))
            except WaltzError as error:  # its store is away, or is none of this cluster: another storage may reach it
                unread[name] = error.message
    return replace(scene, archived=proven, unread_archives={} if proven else unread)


async def _archived_to(admin: AdminClient, partition: int, lineage: Lineage) -> int:
    """Return the id up to which the archive of a storage proves the log of this timeline; -1 if it proves nothing."""
    async for state in admin.restore(_completion(partition, lineage, looks=True)):
        if state.proven_to is not None:
            return state.proven_to
    return EMPTY


def _completion(
    partition: int, lineage: Lineage, *, session: int = 0, mark: int = EMPTY, looks: bool = False
) -> RestoreOrder:
    """Build the order for an existing replica to take what the archive proves."""
    nothing = UUID(int=0)
    return RestoreOrder(
        store="", archive=nothing, cluster=nothing, partition=partition, number=0, sha256="", mark=mark, session=session,
        timelines=lineage.later, completes=True, looks=looks,
    )  # fmt: skip


async def _completed(daemons: Daemons, scene: Scene, agreed: Scene, found: ClusterSnapshot) -> Scene:
    """Return the scene after one replica has taken what the archive proves."""
    name = scene.taker
    if scene.end < agreed.end:
        raise ChangedMeanwhile(
            f"{VERB} {scene.partition}: the archive proves ids up to {scene.end}, in the plan up to {agreed.end}",
            not_done="the decision was not saved",
            next_step="make the archive reachable and plan again; --without-archive gives up what only the archive has",
        )
    if name is None:
        return scene
    order = _completion(scene.partition, Lineage(scene.statuses[name].timelines), session=scene.session, mark=scene.end)
    async with daemons.admin(found.meta.key, found.storage(name).meta) as admin:
        taken = [state.status async for state in admin.restore(order) if state.status is not None]
    if not taken:
        raise CannotConnect(f"{name} ended before partition {scene.partition} had what the archive has")
    scene = replace(scene, statuses={**scene.statuses, name: taken[-1]}, archived={})
    if scene.mark < agreed.end:
        raise ChangedMeanwhile(
            f"{VERB} {scene.partition}: {name} restored ids from the archive up to {scene.mark}, not {agreed.end}",
            not_done="the decision was not saved",
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
        raise ChangedMeanwhile(f"{VERB} {agreed.partition}: {what}", not_done="the decision was not saved")


async def _until_open(cluster: Cluster, daemons: Daemons, numbers: Sequence[int], seconds: float, report: Report) -> None:
    waiting = ""
    try:
        async with asyncio.timeout(seconds):
            while closed := [view for view in (await daemons.take_snapshot(cluster)).closed if view.partition in numbers]:
                waiting = f"partition {closed[0].partition}: {closed[0].waiting}"
                report(f"{len(numbers) - len(closed)} of {len(numbers)} partitions are open; {waiting}")
                await daemons.pause()
    except TimeoutError:
        raise PartitionsClosed(
            f"the decision is saved, but not all partitions are open after {seconds:g} seconds: {waiting}"
        ) from None
