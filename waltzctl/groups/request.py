"""Send changes of consumer groups to servers, and retry them.

Any server can change a group as a whole; only the owner of a partition can change the group there. Owners change, and the
group log may be unavailable for a moment, so errors that pass are retried for `WAIT_SECONDS`. A request may have been done
although its answer was lost, so each can be repeated. A reset names the epoch that it begins, and a group begins no epoch
twice. A transaction that failed between a replay, or a resume, and its repetition is tried once more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from waltzctl.shell.progress import Report
from waltzctl.snapshot.groups import GroupView
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ServerMeta
from waltzd.cluster.groups import GroupMeta, MadeGroup
from waltzd.errors import Retry, WaltzError
from waltzd.errors.operations import ChangedMeanwhile, NoServerUp, Unfinished, WrongPeer
from waltzd.protocol.groups import RESET_DRAWS, Change, Changed, reset_epoch
from waltzd.wire.servers import ServerAdminClient, ServerClient
from waltzd.wire.tls import Tls

CALL_SECONDS = 10.0
WAIT_SECONDS = 30.0
"""Time to wait for an owner or for the group log; a fail-over takes less."""
PAUSE_SECONDS = 0.3
T = TypeVar("T")


async def call_server(
    cluster: Cluster, tls: Tls | None, report: Report, call: Callable[[ServerAdminClient], Awaitable[T]]
) -> T:
    """Call one server after the other until one answers; return its answer."""
    key = (await cluster.meta()).key

    async def ask(server: ServerMeta) -> T:
        async with ServerAdminClient(server.admin_listen, key, seconds=CALL_SECONDS, tls=tls, name=server.name) as admin:
            return await call(admin)

    return await _in_turn(cluster, report, ask)


async def create_group(cluster: Cluster, tls: Tls | None, report: Report, meta: GroupMeta) -> MadeGroup:
    key = (await cluster.meta()).key

    async def ask(server: ServerMeta) -> MadeGroup:
        async with ServerClient(server.listen, key, seconds=CALL_SECONDS, tls=tls) as client:
            return await client.make_group(meta)

    return await _in_turn(cluster, report, ask)


async def _in_turn(cluster: Cluster, report: Report, ask: Callable[[ServerMeta], Awaitable[T]]) -> T:
    """Ask all servers in turn, and again while the error may pass."""
    until = _now() + WAIT_SECONDS
    while True:
        error: WaltzError = NoServerUp("no server of the cluster is up", not_done="nothing was changed")
        for server in (await cluster.servers()).values():
            try:
                return await ask(server)
            except WaltzError as refusal:
                error = _passing(refusal)
        await _pause(until, error, report)


async def changed(
    cluster: Cluster, tls: Tls | None, report: Report, group: GroupView, change: Change, wanted: Mapping[int, Sequence[int]]
) -> list[dict[str, int]]:
    """Apply a change in each partition of `wanted` (partition → ids); return one result for each partition."""
    found: list[dict[str, int]] = []
    for partition, ids in sorted(wanted.items()):
        report(f"{len(found)} of {len(wanted)} partitions done")
        try:
            one = await _changed(cluster, tls, report, group, partition, change, ids)
        except WaltzError as error:
            if not found:
                raise
            done = format_numbers([row["partition"] for row in found])
            raise Unfinished(
                f"partition {partition}: {error.code} {error.message}",
                not_done=f"the change was applied in {done}, and in no other partition",
            ) from error
        found.append({"partition": partition, "count": one.count, "epoch": one.epoch, "floor": one.floor})
    return found


async def _changed(
    cluster: Cluster, tls: Tls | None, report: Report, group: GroupView, partition: int, change: Change, ids: Sequence[int]
) -> Changed:
    """Apply a change in one partition through its owner; follow a change of the owner."""
    key, until, view = (await cluster.meta()).key, _now() + WAIT_SECONDS, group.at(partition)
    seen = 0 if view is None else view.place.epoch
    epoch = reset_epoch(seen, random.randrange(RESET_DRAWS)) if change is Change.RESET else 0
    while True:
        assignment, _ = await cluster.assignment()
        owner, servers = assignment.owners[partition].server, await cluster.servers()
        error: WaltzError = NoServerUp(f"no server that is up owns partition {partition}", not_done="nothing was changed")
        if owner in servers:
            address = servers[owner].admin_listen
            async with ServerAdminClient(address, key, seconds=CALL_SECONDS, tls=tls, name=owner) as admin:
                try:
                    return await admin.change_group(group.name, group.made_at, partition, change, ids, epoch)
                except WaltzError as refusal:
                    error = _passing(refusal)
        await _pause(until, error, report)


def _passing(error: WaltzError) -> WaltzError:
    """Return an error that may pass; raise one that a retry cannot solve."""
    if error.retry is Retry.NEVER or isinstance(error, (WrongPeer, ChangedMeanwhile)):
        raise error
    return error


async def _pause(until: float, error: WaltzError, report: Report) -> None:
    if _now() > until:
        raise error
    report(error.message)
    await asyncio.sleep(PAUSE_SECONDS)


def _now() -> float:
    return asyncio.get_running_loop().time()
