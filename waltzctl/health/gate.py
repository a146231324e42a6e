"""`waltzctl cluster wait` and `waltzctl storage may-stop`: what an upgrade waits for between two machines.

Both look again and again until there is nothing more to wait for, or the time is over. The first waits for the verdict of
`status`. The second counts replicas: a storage may stop when every partition keeps a majority of replicas that are level
and answer, so it returns at once while a second failure is survived, and waits while another storage copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer import Option

from waltzctl.health.facts import HealthReport
from waltzctl.health.poll import Poll
from waltzctl.health.status import page
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, StorageName, unknown
from waltzctl.shell.options import Misused, Output
from waltzctl.shell.progress import Shown, ShownProgress, Waiting
from waltzctl.shell.safety import without
from waltzctl.show.forms import AnyForm, put, put_json
from waltzctl.show.terminal import printable
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView
from waltzd.client import loop
from waltzd.cluster.documents import Membership
from waltzd.errors import EXIT_OK, EXIT_UNHEALTHY, Retry, Unsafe, WaltzError
from waltzd.protocol.quorum import majority

LOOK_SECONDS = 1.0
TOLD_MAX = 3
"""Partitions that are named in an error."""


def wait(
    *,
    healthy: Annotated[bool, Option("--healthy", help="Until `waltzctl status` says HEALTHY.")] = False,
    timeout: Annotated[
        float, Option("--timeout", min=0, max=86_400, metavar="SECONDS", help="How long to wait at most.")
    ] = 600.0,
    progress: ShownProgress = Shown.AUTO,
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """Wait until a cluster is well, and show its status then. The end is 0 when it is HEALTHY, and 10 when the time is over
    before that, with what is wrong. Between two machines of an upgrade this is the gate.

    \b
    Examples:
      waltzctl cluster wait --healthy
      waltzctl cluster wait --healthy --timeout 60 -o json
    """
    if not healthy:
        raise Misused("Say what to wait for: --healthy.")
    with Waiting(progress) as line:
        found = loop.run(_until(target, timeout, _ills, line.say))
    put(page(target, found), output)
    return EXIT_OK if found.verdict.is_healthy else EXIT_UNHEALTHY


def _ills(found: HealthReport) -> Sequence[str]:
    verdict = found.verdict
    return () if verdict.is_healthy else [reason.sentence for reason in verdict.reasons] or [verdict.sentence]


def may_stop(
    *,
    name: StorageName,
    timeout: Annotated[
        float,
        Option("--timeout", min=0, max=3600, metavar="SECONDS", help="How long to wait for others; 0 looks once."),
    ] = 0.0,
    progress: ShownProgress = Shown.AUTO,
    target: CommandTarget,
    output: Output = "table",
) -> int:
    """Whether a storage may be stopped: without it every partition still has a majority of replicas that are level and
    answer. The end is 0 when it may. Otherwise the command waits for the others until --timeout, and refuses with 5 then;
    where a partition has too few replicas to spare one, or no server is up that knows, it refuses at once. It stops nothing
    itself.

    The unit of a storage asks it before each stop where it is told the name of the storage (`WALTZ_STORAGE`), so that a
    second one is not stopped while the first still copies what it has missed.

    \b
    Examples:
      waltzctl storage may-stop storage-1
      waltzctl storage may-stop storage-1 --timeout 90 -o json
    """

    def waits_for(found: HealthReport) -> Sequence[str]:
        return obstacles(found.snapshot, name)

    def is_hopeless(found: HealthReport) -> bool:
        return has_no_owner(found.snapshot, name) or cannot_spare(found.snapshot, name)

    with Waiting(progress) as line:
        found = loop.run(_until(target, timeout, waits_for, line.say, is_hopeless))
    if has_no_owner(found.snapshot, name):
        raise Unsafe(
            f"whether {name} may be stopped is not known: {obstacles(found.snapshot, name)[0]}",
            not_done="it was not waited for the other storages: they do not become level without a server",
            next_step="start a server and ask again; when the whole cluster is shut down, stop the storage all the same",
        )
    if left := waits_for(found):
        more = f"; and {len(left) - TOLD_MAX} more" if len(left) > TOLD_MAX else ""
        hopeless = cannot_spare(found.snapshot, name)
        raise Unsafe(
            f"{name} should not be stopped now: {'; '.join(left[:TOLD_MAX])}{more}",
            not_done=f"it was not waited for the other storages: {name} holds partitions that cannot spare a replica"
            if hopeless
            else f"the other storages were not level after {timeout:g} seconds",
            next_step="stop it when applications may wait" if hopeless else "wait: `waltzctl cluster wait --healthy`",
        )
    if output == "json":
        put_json({"storage": name, "may_stop": True})
    else:
        typer.echo(printable(f"{name} may be stopped: every partition keeps a majority without it."))
    return EXIT_OK


def obstacles(found: ClusterSnapshot, name: str) -> list[str]:
    """Return why a storage should not fall silent, a sentence for each partition that would not go on, or one sentence when
    ZooKeeper lists no server: then no owner says which replicas are level. Pure."""
    if name not in {view.meta.name for view in found.storages}:
        raise unknown("storage", name, [view.meta.name for view in found.storages])
    if has_no_owner(found, name):
        return ["ZooKeeper lists no server, so no owner says which replicas are level"]
    answering = {view.meta.name for view in found.storages if view.reported is not None}
    reasons = []
    for view in _held(found, name):
        effect = without(view.partition, view.replicas, view.counted & answering, silent={name})
        if view.reported is None:
            reasons.append(f"its owner does not say how partition {view.partition} is")
        elif not view.is_open:
            reasons.append(f"partition {view.partition} takes no transactions, and what {name} holds may be needed")
        elif effect.refusal is not None:
            reasons.append(effect.refusal)
    return reasons


def has_no_owner(found: ClusterSnapshot, name: str) -> bool:
    """Return whether this storage has members of partitions and no server is registered that could own them. Pure."""
    return not found.servers and bool(_held(found, name))


def cannot_spare(found: ClusterSnapshot, name: str) -> bool:
    """Return whether a partition has so few members that it stops without this one, however level the others are. Pure."""
    sizes = [sum(role is Membership.MEMBER for role in view.replicas.values()) for view in _held(found, name)]
    return any(size - 1 < majority(size) for size in sizes)


def _held(found: ClusterSnapshot, name: str) -> list[PartitionView]:
    return [view for view in found.partitions if view.replicas.get(name) is Membership.MEMBER]


def _never(_found: HealthReport) -> bool:
    return False


async def _until(
    target: ClusterTarget,
    seconds: float,
    waits_for: Callable[[HealthReport], Sequence[str]],
    say: Callable[[str], None],
    is_hopeless: Callable[[HealthReport], bool] = _never,
) -> HealthReport:
    """Look until there is nothing to wait for, or until the time is over; return the last look."""
    async with Poll(target, aloud=True) as poll:
        ends = time.monotonic() + seconds
        async for found in poll.reports(LOOK_SECONDS):
            is_over = time.monotonic() >= ends
            if isinstance(found, WaltzError):
                if is_over or found.retry is Retry.NEVER:
                    raise found
                say(found.message)
                continue
            left = waits_for(found)
            if not left or is_over or is_hopeless(found):
                return found
            say("; ".join(left[:TOLD_MAX]))
    raise AssertionError("looks do not end")
