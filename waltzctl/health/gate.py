"""`waltzctl cluster wait` and `waltzctl storage may-stop`: what a rolling upgrade waits for before it goes to the next
machine.

Both repeat a report until its condition holds or the time is over. `wait` needs the verdict HEALTHY. `may-stop` counts
replicas: a storage may stop if every partition keeps a majority of level replicas that answer. So it returns at once if
the cluster survives a second failure, and waits while another storage copies.
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
"""Partitions named in an error."""


def wait(
    *,
    healthy: Annotated[bool, Option("--healthy", help="Wait until `waltzctl status` shows HEALTHY.")] = False,
    timeout: Annotated[
        float, Option("--timeout", min=0, max=86_400, metavar="SECONDS", help="Longest time to wait.")
    ] = 600.0,
    progress: ShownProgress = Shown.AUTO,
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """Wait until a cluster is healthy, then show its status. Exit code 0 if it is HEALTHY, and 10 if the time is over
    first, with the remaining problems. Use it between two machines of a rolling upgrade.

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
        Option(
            "--timeout", min=0, max=3600, metavar="SECONDS", help="Longest time to wait for other storages; 0 checks once."
        ),
    ] = 0.0,
    progress: ShownProgress = Shown.AUTO,
    target: CommandTarget,
    output: Output = "table",
) -> int:
    """Check that a storage may be stopped: without it every partition still has a majority of level replicas that
    answer. Exit code 0 if so. Otherwise the command waits for other storages until --timeout, then refuses with exit
    code 5. It refuses at once if a partition has no replica to spare, or no server is up that knows. It stops nothing
    itself.

    The systemd unit of a storage runs this before each stop if it is given the name of the storage (`WALTZ_STORAGE`),
    so that no second storage is stopped while the first still catches up.

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
            not_done="the command did not wait for other storages: without a server they do not become level",
            next_step="start a server and ask again; when the whole cluster is shut down, stop the storage all the same",
        )
    if left := waits_for(found):
        more = f"; and {len(left) - TOLD_MAX} more" if len(left) > TOLD_MAX else ""
        hopeless = cannot_spare(found.snapshot, name)
        raise Unsafe(
            f"{name} should not be stopped now: {'; '.join(left[:TOLD_MAX])}{more}",
            not_done=f"the command did not wait for other storages: {name} holds partitions that cannot spare a replica"
            if hopeless
            else f"the other storages were not level after {timeout:g} seconds",
            next_step="stop it at a time when applications can wait"
            if hopeless
            else "wait: `waltzctl cluster wait --healthy`",
        )
    if output == "json":
        put_json({"storage": name, "may_stop": True})
    else:
        typer.echo(printable(f"{name} may be stopped: every partition keeps a majority without it."))
    return EXIT_OK


def obstacles(found: ClusterSnapshot, name: str) -> list[str]:
    """Return why a storage must not stop: a sentence for each partition that would stop with it, or a single sentence
    if ZooKeeper lists no server, because then no owner knows which replicas are level. No I/O."""
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
    """Return whether this storage has members of partitions while no registered server could own them. No I/O."""
    return not found.servers and bool(_held(found, name))


def cannot_spare(found: ClusterSnapshot, name: str) -> bool:
    """Return whether a partition stops without this storage even if all others are level. No
    I/O."""
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
    """Repeat reports until nothing is left to wait for, or the time is over; return the last report."""
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
