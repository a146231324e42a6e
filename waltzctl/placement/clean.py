"""`waltzctl storage clean`: what was set aside on a storage is deleted, when a person says so and nothing needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waltzctl.change import Asking, check_again
from waltzctl.job import Job, perform
from waltzctl.options import Output
from waltzctl.placement.relocation import Situation, situation
from waltzctl.progress import Say
from waltzctl.reach import Meant, StorageName
from waltzctl.safety import Danger, Plan
from waltzctl.show.terminal import size
from waltzd.cluster.cluster import Cluster
from waltzd.format.layout import aside_partition
from waltzd.protocol.descriptions import SetAside
from waltzd.wire.storages import AdminClient


def clean(*, name: StorageName, asked: Asking, reach: Meant, output: Output = "table") -> int:
    """Delete the files that were set aside on a storage when partitions were taken off it, for good. Replicas are never
    touched. It is refused while a partition takes no transactions of which something was set aside: it may be needed.

    \b
    Examples:
      waltzctl storage clean storage-1 --dry-run
      waltzctl storage clean storage-1 --dry-run -o json
    """

    async def prepare(cluster: Cluster) -> Job:
        now = await situation(cluster, reach.tls)
        storage = now.storage(name)
        found = _set_aside(now, name)

        async def do(cluster: Cluster, _say: Say) -> Mapping[str, Any]:
            check_again(plan_for(await situation(cluster, reach.tls), name, found), asked)
            key = now.found.meta.key
            async with AdminClient(storage.admin_listen, key, tls=reach.tls, name=name) as admin:
                deleted = await admin.delete_aside([one.name for one in found])
            return {"deleted": [{"name": one.name, "bytes": one.bytes} for one in deleted]}

        return Job(plan=plan_for(now, name, found), do=do)

    return perform(reach, asked, output, prepare)


def _set_aside(now: Situation, name: str) -> tuple[SetAside, ...]:
    view = next(view for view in now.found.storages if view.meta.name == name)
    if view.said is None:
        assert view.error is not None, "it said nothing"
        raise view.error
    return view.said.set_aside


def plan_for(now: Situation, name: str, found: tuple[SetAside, ...]) -> Plan:
    closed = {view.partition for view in now.found.partitions if not view.is_open}
    return Plan(
        verb="storage clean",
        subject=name,
        steps=tuple(f"delete {one.name}, {size(one.bytes)}" for one in found),
        danger=Danger.ASK,
        unsafe=tuple(
            f"partition {aside_partition(one.name)} takes no transactions: {one.name} may be needed"
            for one in found
            if aside_partition(one.name) in closed
        ),
    )
