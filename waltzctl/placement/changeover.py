"""Changes of a cluster that cannot be undone: from format 0 to format 1, and to the newest level.

A level is raised at once (`waltzd.protocol.level`), when no process of an older version is left. A format takes its time:

The document of the cluster has the format of new sessions. Owners see the change, and begin a planned new session of
each partition; clients continue. A partition cannot go back: what it has written since, no reader of the older format
can read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from waltzctl.placement.creation import check_formats
from waltzctl.placement.daemons import POLL_SECONDS
from waltzctl.shell.change import Change, ChangeCommand
from waltzctl.shell.numbers import first_few, format_partitions
from waltzctl.shell.progress import Amount, Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView
from waltzctl.snapshot.collector import take_snapshot
from waltzd.cluster.cluster import Cluster
from waltzd.errors.operations import FormatUnknown, Unfinished, Unsafe
from waltzd.protocol.level import THIS, Program

FINALIZE = "cluster finalize"
WAITS = (
    "Interrupted. If the new format was saved already, partitions change to it by themselves: `waltzctl partition list "
    "-o wide` shows the format of each."
)


def change_format(wanted: int, seconds: float | None, command: ChangeCommand) -> int:
    tls = command.target.tls

    async def prepare(cluster: Cluster) -> Change:
        found = await take_snapshot(cluster.coordinator, tls=tls)
        made = plan_of(found, wanted)

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            if found.meta.format != wanted:
                await cluster.set_format(wanted, before=found.meta)
            began = time.monotonic()
            while left := waiting(now := await take_snapshot(cluster.coordinator, tls=tls), wanted):
                if seconds is not None and time.monotonic() - began >= seconds:
                    raise Unfinished(
                        f"format {wanted} is saved, but not all partitions write it after {seconds:g} seconds: "
                        f"{_format_reasons(left)}",
                        not_done="these partitions change as soon as they can, also without this command",
                    )
                total = len(now.partitions)
                report(_format_reasons(left), Amount(done=total - len(left), total=total, unit="partitions"))
                await asyncio.sleep(POLL_SECONDS)
            return {"format": wanted, "partitions": [view.partition for view in now.partitions]}

        is_saved = found.meta.format == wanted
        return Change(
            plan=made, do=do, is_change=not is_saved, is_planned_again=True, interrupted=None if is_saved else WAITS
        )

    return command.perform(prepare)


def plan_of(found: ClusterSnapshot, wanted: int) -> Plan:
    """Plan the change. Raise if it must not be made: there is no way back, and no storage may be too old."""
    meta, left = found.meta, waiting(found, wanted)
    if wanted < meta.format:
        raise Unsafe(
            f"the cluster {meta.name} writes format {meta.format}, and cannot go back: readers of format {wanted} "
            f"cannot read what its partitions have written",
            next_step=f"keep the format; a new cluster can be created with `waltzctl create-cluster --format {wanted}`",
        )
    _check_storages(found, wanted)
    steps = [f"set the cluster {meta.name} to format {wanted}"] if wanted > meta.format else []
    opened, closed = ([view.partition for view in left if view.is_open is is_open] for is_open in (True, False))
    if opened:
        steps.append(
            f"{format_partitions(opened, 'changes', 'change, each')} in a new session: "
            "transactions wait for a moment, none is lost"
        )
    if closed:
        steps.append(
            f"{format_partitions(closed, 'is not open, and changes', 'are not open, and change, each')} when it opens"
        )
    if left:
        steps.append(
            f"a partition that has changed cannot go back; existing segments stay in format {meta.format}"
            if wanted > meta.format
            else "a partition that has changed cannot go back"
        )
    return Plan(verb="cluster set", subject=meta.name, steps=tuple(steps))


def finalize_level(command: ChangeCommand) -> int:
    async def prepare(cluster: Cluster) -> Change:
        found = await take_snapshot(cluster.coordinator, tls=command.target.tls)

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            await cluster.change_root(found.meta, replace(found.meta, level=THIS.level))
            return {"level": THIS.level}

        return Change(plan=finalize_plan(found), do=do, is_planned_again=True)

    return command.perform(prepare)


def finalize_plan(found: ClusterSnapshot, program: Program = THIS) -> Plan:
    """Plan to raise the level to that of `program`; raise `Unsafe` while a process is too old or unknown."""
    name, before, level = found.meta.name, found.meta.level, program.level
    if before == level:
        return Plan(verb=FINALIZE, subject=name, steps=())
    silent = [view.meta.name for view in found.storages if view.reported is None]
    if silent:
        raise Unsafe(
            f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer, and may be too old for level {level}",
            next_step="start it, or remove it with `waltzctl storage remove`, then run this command again",
        )
    versions = {f"server {one.name}": one.version for one in [*(view.meta for view in found.servers), *found.missing]}
    versions |= {f"storage {view.meta.name}": view.reported.version for view in found.storages if view.reported is not None}
    old = [f"{who} (version {version})" for who, version in sorted(versions.items()) if program.level_of(version) < level]
    if old:
        raise Unsafe(
            f"{', '.join(old)} {'does' if len(old) == 1 else 'do'} not support level {level}",
            next_step="upgrade it and start it, or remove it with `waltzctl server remove` or `waltzctl storage remove`",
        )
    return Plan(
        verb=FINALIZE,
        subject=name,
        danger=Danger.TYPED,
        steps=(
            f"raise the level of the cluster {name} from {before} to {level}",
            f"versions that do not support level {level} are refused from then on: there is no way back to them",
        ),
    )


def waiting(found: ClusterSnapshot, wanted: int) -> list[PartitionView]:
    """Return the partitions whose sessions are not known to write this format."""
    return [view for view in found.partitions if (view.format or 0) < wanted]


def _check_storages(found: ClusterSnapshot, wanted: int) -> None:
    silent = [view.meta.name for view in found.storages if view.reported is None]
    if silent:
        raise FormatUnknown(
            f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer, and may be too old to write format "
            f"{wanted}",
            next_step="start it, or remove it with `waltzctl storage remove`, then run this command again",
        )
    check_formats({view.meta.name: view.reported for view in found.storages if view.reported is not None}, wanted)


def _format_reasons(left: list[PartitionView]) -> str:
    reasons = [(view.partition, view.waiting or f"its session writes format {view.format}") for view in left]
    return first_few([f"partition {number}: {why}" for number, why in reasons])
