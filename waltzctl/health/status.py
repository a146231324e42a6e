"""`waltzctl status`: one screen with the verdict on a cluster, its causes, and what to do."""

from __future__ import annotations

from contextlib import suppress

from waltzctl.health.facts import HealthReport
from waltzctl.health.poll import CALL_SECONDS, Poll
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget
from waltzctl.shell.options import Timeout, Watch
from waltzctl.show import cluster
from waltzctl.show.forms import AnyForm, Listing, objects, put, put_again, screen_for
from waltzctl.snapshot.cluster_snapshot import PartitionView
from waltzd.client import loop
from waltzd.errors import WaltzError
from waltzd.errors.exit_codes import EXIT_OK, EXIT_UNHEALTHY


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
    from waltzctl.local_cluster.local import LocalCluster
    from waltzctl.local_cluster.show import PROCESSES, processes

    found = LocalCluster.find(target.directory)
    running = found.processes
    content = {"directory": str(found.directory), "daemons": objects(PROCESSES, running)}
    return cluster.status(report, Listing(page=processes(running, found.blueprint.key, found.directory), content=content))


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
