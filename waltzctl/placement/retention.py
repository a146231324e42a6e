"""Policy for how much of the archived log storages keep; the owners of partitions carry it out.

What storages remove is only in the archive afterwards. So a policy is refused if nothing is archived, and a policy by
time is refused for a log without times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from waltzctl.shell.change import Change, ChangeCommand
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Plan
from waltzctl.show.terminal import size
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzctl.snapshot.collector import take_snapshot
from waltzd.cluster.archives import all_archived
from waltzd.cluster.cluster import Cluster
from waltzd.errors import BadArgument
from waltzd.errors.operations import Unsafe
from waltzd.format.layout import BATCHES
from waltzd.protocol.retention import ALL, Keep, keep_of


def change_keep_local(wanted: str, command: ChangeCommand) -> int:
    keep = keep_of(wanted)
    if keep is None:
        raise BadArgument(
            f"{wanted!r} is not a policy",
            not_done="nothing was changed",
            next_step="write all, a duration (30m, 12h, 7d, 4w) or a size for each replica of a partition (500GB, 2TiB)",
        )

    async def prepare(cluster: Cluster) -> Change:
        found = await take_snapshot(cluster.coordinator, tls=command.target.tls)
        made = plan_of(found, wanted, keep, archived=bool(await all_archived(cluster.coordinator)))

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            await cluster.change_root(found.meta, replace(found.meta, keep_local=wanted))
            return {"keep_local": wanted}

        return Change(plan=made, do=do, is_change=found.meta.keep_local != wanted)

    return command.perform(prepare)


def plan_of(found: ClusterSnapshot, wanted: str, keep: Keep, *, archived: bool) -> Plan:
    """Raise if the policy must not be set."""
    meta = found.meta
    if keep != Keep() and not archived:
        raise Unsafe(
            f"nothing of the cluster {meta.name} is archived: what storages remove would be lost",
            next_step="set `archive` in the configuration of the storages, and see `waltzctl archive status`",
        )
    if keep.seconds is not None and meta.format < BATCHES:
        raise BadArgument(
            f"the cluster {meta.name} writes format {meta.format}, which has no times",
            not_done="nothing was changed",
            next_step="give a size, or change the cluster to format 1 first: `waltzctl cluster set --format 1`",
        )
    steps = [f"set storages to keep {_describe(wanted)} (until now {_describe(meta.keep_local)})"]
    if keep.size is not None:
        leaves = too_much(found, keep.size)
        steps.append(
            f"at most {size(leaves)} are removed from storages once archived, and can then be read from the archive only"
            if leaves
            else "nothing is removed from storages now"
        )
    elif keep.seconds is not None:
        steps.append("older archived segments are removed from storages, and can then be read from the archive only")
    else:
        steps.append("nothing more is removed from storages; what was removed does not come back")
    is_change = meta.keep_local != wanted
    return Plan(verb="cluster set", subject=meta.name, steps=tuple(steps) if is_change else ())


def _describe(policy: str) -> str:
    keep = keep_of(policy)
    if policy == ALL or keep is None:
        return "all of the log"
    if keep.seconds is not None:
        return f"the last {policy} of the log"
    return f"{policy} of the log of each replica"


def too_much(found: ClusterSnapshot, size_max: int) -> int:
    """Return the bytes on all storages above what the policy keeps."""
    reported = [one for view in found.storages if view.reported is not None for one in view.reported.assigned]
    return sum(max(0, one.disk_bytes - size_max) for one in reported)
