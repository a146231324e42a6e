"""`waltzctl status`: one screen with the verdict on a cluster, its causes, and a fix. `waltzctl cluster wait`: the gate
between two machines of an upgrade.

`cluster wait` polls the cluster until there is nothing more to wait for, or the time is over. `--healthy` waits for the
verdict of `status`. `--without` counts replicas: a storage may stop when every partition keeps a majority of replicas that
are level and answer. So it returns at once if the cluster can spare the storage, and waits while another storage copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated

import typer
from typer import Option

from waltzctl.health.facts import HealthReport
from waltzctl.health.poll import CALL_SECONDS, Poll
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, known_storages, unknown
from waltzctl.shell.numbers import first_few
from waltzctl.shell.options import Misused, Timeout, Watch
from waltzctl.shell.progress import Shown, ShownProgress, Waiting
from waltzctl.shell.safety import without
from waltzctl.show import cluster
from waltzctl.show.forms import AnyForm, Listing, objects, put, put_again, put_json, screen_for
from waltzctl.show.terminal import printable
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView
from waltzd.client import loop
from waltzd.cluster.documents import Membership
from waltzd.errors import EXIT_OK, EXIT_UNHEALTHY, BadArgument, Retry, WaltzError
from waltzd.errors.operations import Unsafe
from waltzd.protocol.quorum import majority


def status(
    *,
    watch: Watch = None,
    seconds: Timeout = CALL_SECONDS,
    output: AnyForm = "table",
    target: CommandTarget,
) -> int:
    """Show whether a cluster is HEALTHY, DEGRADED, or DOWN (no partition takes transactions); then each problem with
    its cause and what to do; then servers, storages and partitions. Exit code 0 if HEALTHY, else 10.

    If ZooKeeper does not answer, servers and storages are asked directly, at the addresses of the last report.

    \b
    Examples:
      waltzctl status
      waltzctl status --timeout 10 -o json
    """
    if watch is None:
        found = loop.run(_report(target, seconds))
        put(page(target, found), output)
        return EXIT_OK if found.verdict.is_healthy else EXIT_UNHEALTHY
    return _watch(target, watch, seconds, output)


async def _report(target: ClusterTarget, seconds: float) -> HealthReport:
    async with Poll(target, seconds=seconds, aloud=True) as poll:
        return await poll.report()


def page(target: ClusterTarget, report: HealthReport) -> Listing[PartitionView]:
    """Build the page of a report; for a local cluster with its processes."""
    if target.directory is None:
        return cluster.status(report)
    # Not at the top: it is a sixth of all that this command imports.
    from waltzctl.local_cluster.local import PROCESSES, LocalCluster

    found = LocalCluster.find(target.directory)
    content = {"directory": str(found.directory), "daemons": objects(PROCESSES, found.processes)}
    return cluster.status(report, Listing(page=found.table(), content=content))


def _watch(target: ClusterTarget, every: float, seconds: float, output: str) -> int:
    """Show reports until Ctrl-C; return the exit code of the last one."""
    last: HealthReport | WaltzError | None = None

    with suppress(KeyboardInterrupt), screen_for(output) as screen:

        async def go_on() -> None:
            nonlocal last
            async with Poll(target, seconds=seconds) as poll:
                async for last in poll.reports(every):
                    put_again(last if isinstance(last, WaltzError) else page(target, last), output, screen, every)

        loop.run(go_on())
    return EXIT_OK if isinstance(last, HealthReport) and last.verdict.is_healthy else EXIT_UNHEALTHY


# -- `cluster wait` ----------------------------------------------------------------------------------------------------


LOOK_SECONDS = 1.0


def wait(
    *,
    healthy: Annotated[bool, Option("--healthy", help="Wait until `waltzctl status` reports HEALTHY.")] = False,
    storage: Annotated[
        str | None,
        Option(
            "--without",
            metavar="STORAGE",
            help="Wait until every partition keeps a majority without this storage.",
            autocompletion=known_storages,
        ),
    ] = None,
    timeout: Annotated[
        float, Option("--timeout", min=0, max=86_400, metavar="SECONDS", help="Maximum time to wait; 0 checks once.")
    ] = 600.0,
    progress: ShownProgress = Shown.AUTO,
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """Wait until a cluster is healthy, or until a storage may be stopped. Use it between two machines of an upgrade.

    With --healthy show the status of the cluster at the end. The exit code is 0 if the cluster is HEALTHY, and 10 if the
    time is over before that.

    With --without the exit code is 0 if every partition keeps a majority of level replicas that answer when the STORAGE
    stops, and 5 if the time is over before that. The command fails at once if a partition has too few replicas to spare
    one, or if no server is up that could tell. It stops nothing itself. The systemd unit of a storage runs it before each
    stop if WALTZ_STORAGE is set, so that two storages are not stopped while one of them still catches up.

    \b
    Examples:
      waltzctl cluster wait --healthy
      waltzctl cluster wait --healthy --timeout 60 -o json
      waltzctl cluster wait --without storage-1 --timeout 90
    """
    if healthy is (storage is not None):
        raise Misused("Say what to wait for: --healthy, or --without STORAGE.")
    if storage is not None:
        return _wait_without(storage, timeout, progress, target, output)
    with Waiting(progress) as line:
        found = loop.run(_until(target, timeout, _ills, line.report))
    put(page(target, found), output)
    return EXIT_OK if found.verdict.is_healthy else EXIT_UNHEALTHY


def _ills(found: HealthReport) -> Sequence[str]:
    verdict = found.verdict
    return () if verdict.is_healthy else [reason.sentence for reason in verdict.reasons] or [verdict.sentence]


def _wait_without(name: str, timeout: float, progress: Shown, target: ClusterTarget, output: str) -> int:
    """Wait until the storage may stop; raise `Unsafe` if it may not within `timeout` seconds."""
    if output not in ("table", "json"):
        raise BadArgument(f"-o {output} is for --healthy only", next_step="use -o table or -o json")

    def waits_for(found: HealthReport) -> Sequence[str]:
        return obstacles(found.snapshot, name)

    def is_hopeless(found: HealthReport) -> bool:
        return has_no_owner(found.snapshot, name) or cannot_spare(found.snapshot, name)

    with Waiting(progress) as line:
        found = loop.run(_until(target, timeout, waits_for, line.report, is_hopeless))
    if has_no_owner(found.snapshot, name):
        raise Unsafe(
            f"whether {name} may be stopped is not known: {obstacles(found.snapshot, name)[0]}",
            not_done="it was not waited for the other storages: they do not become level without a server",
            next_step="start a server and ask again; where one runs, it registers again by itself within one ZooKeeper "
            "session timeout; when the whole cluster is shut down, stop the storage all the same",
        )
    if left := waits_for(found):
        hopeless = cannot_spare(found.snapshot, name)
        raise Unsafe(
            f"{name} should not be stopped now: {first_few(left)}",
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
    answering = found.storage_reports.keys()
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
    """Return whether a partition loses its majority without this storage, even if all other members are level. Pure."""
    sizes = [sum(role is Membership.MEMBER for role in view.replicas.values()) for view in _held(found, name)]
    return any(size - 1 < majority(size) for size in sizes)


def _held(found: ClusterSnapshot, name: str) -> list[PartitionView]:
    return [view for view in found.partitions if view.replicas.get(name) is Membership.MEMBER]


async def _until(
    target: ClusterTarget,
    seconds: float,
    waits_for: Callable[[HealthReport], Sequence[str]],
    report: Callable[[str], None],
    is_hopeless: Callable[[HealthReport], bool] = lambda _: False,
) -> HealthReport:
    """Poll until there is nothing to wait for, or until the timeout; return the last report."""
    async with Poll(target, aloud=True) as poll:
        ends = time.monotonic() + seconds
        async for found in poll.reports(LOOK_SECONDS):
            is_over = time.monotonic() >= ends
            if isinstance(found, WaltzError):
                if is_over or found.retry is Retry.NEVER:
                    raise found
                report(found.message)
                continue
            left = waits_for(found)
            if not left or is_over or is_hopeless(found):
                return found
            report(first_few(left))
    raise AssertionError("polls do not end")
