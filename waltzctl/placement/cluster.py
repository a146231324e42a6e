"""`waltzctl cluster` and `waltzctl history`: a cluster as a whole, through its documents in ZooKeeper."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from waltzctl.placement.changeover import change_format, finalize_level
from waltzctl.placement.mover import Moving
from waltzctl.placement.partition import spread_all
from waltzctl.placement.retention import change_keep_local
from waltzctl.shell import moment
from waltzctl.shell.blueprint import write_new
from waltzctl.shell.change import Change, ChangeCommand
from waltzctl.shell.cluster_target import CommandTarget, check_operator, using
from waltzctl.shell.options import Misused
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.change import history as history_listing
from waltzctl.show.forms import AnyForm, put
from waltzctl.snapshot import last_seen
from waltzctl.snapshot.collector import take_snapshot
from waltzd.cluster.cluster import HISTORY_MAX, Cluster
from waltzd.cluster.metadata import read_documents, write
from waltzd.errors import BadArgument
from waltzd.errors.exit_codes import EXIT_OK
from waltzd.errors.operations import BadMetadata, Unsafe
from waltzd.format.layout import VERSIONS


def set_(
    *,
    replicas: Annotated[int | None, Option("--replicas", min=1, max=15, help="Replicas of each partition.")] = None,
    format: Annotated[
        int | None,
        Option(
            "--format",
            min=min(VERSIONS),
            max=max(VERSIONS),
            help="Format of new segments: 1 also keeps times, locks and groups of transactions. It cannot be lowered.",
        ),
    ] = None,
    keep_local: Annotated[
        str | None,
        Option(
            "--keep-local",
            metavar="all|7d|500GB",
            help="How much of the archived log storages keep: all, a duration, or a size for each replica.",
        ),
    ] = None,
    secure: Annotated[
        bool,
        Option("--secure", help="Restrict the documents in ZooKeeper to the given credentials."),
    ] = False,
    options: Moving,
    command: ChangeCommand,
) -> int:
    """Change one setting of the cluster: the number of replicas of each partition, the format of new segments, how much of
    the archived log storages keep, or access to the documents in ZooKeeper. The number of partitions, the name and the key
    of a cluster cannot be changed.

    --replicas: new replicas are copied while clients write; surplus replicas are removed if a majority remains.

    --format: each owner begins a new session at once, and writes the new format from then on; transactions wait for a
    moment. Every storage must support the format. The change cannot be undone; existing segments keep their format.

    --keep-local: storages gradually remove segments that exceed the policy, are archived, and are on all replicas. Removed
    segments can be read from the archive only (docs/archive.md).

    --secure: only the given credentials can read or change the documents, or create nodes at the top of ZooKeeper. First
    give the credentials to every server (coordinator_credentials) and every operator: a process without them loses access
    at once. To replace a password, put the new line in front of the old one in all credential files, restart each server,
    run this command, then remove the old line.

    \b
    Examples:
      waltzctl cluster set --replicas 3 --dry-run
      waltzctl cluster set --replicas 3 --yes
      waltzctl cluster set --format 1 --dry-run
      waltzctl cluster set --keep-local 7d --dry-run
      waltzctl cluster set --secure --coordinator-credentials zookeeper.credentials --dry-run
    """
    if sum(one is not None for one in (replicas, format, keep_local)) + secure != 1:
        raise Misused("Give one of --replicas, --format, --keep-local and --secure.")
    if secure:
        if options.bytes_per_second is not None or options.timeout is not None:
            raise Misused("--rate and --timeout are for copies, and --secure copies nothing.")
        return _secure(command)
    if keep_local is not None:
        if options.bytes_per_second is not None:
            raise Misused("--rate is a bound on copies, and --keep-local copies nothing.")
        return change_keep_local(keep_local, command)
    if replicas is None:
        assert format is not None
        if options.bytes_per_second is not None:
            raise Misused("--rate is a bound on copies, and --format copies nothing.")
        return change_format(format, options.timeout, command)
    return spread_all("cluster set", replicas, command, options)


def _secure(command: ChangeCommand) -> int:
    if not command.confirmation.is_dry:
        check_operator(command.target.tls, "change a cluster")
    if not command.target.access.has_credentials:
        raise BadArgument(
            "no credentials are given to restrict the documents to",
            not_done="nothing was changed",
            next_step="write a line name:password into a file that only you can read, and give it by "
            "--coordinator-credentials; the servers need the same",
        )
    name = command.target.access.owner.partition(":")[0]

    async def prepare(cluster: Cluster) -> Change:
        await cluster.check_alone()
        meta, nodes, servers = await cluster.meta(), await cluster.unclosed_nodes(), sorted(await cluster.servers())
        above = await cluster.coordinator.open_above()
        steps = [f"give {len(nodes)} documents to {name}: nobody else reads or changes them"] if nodes else []
        if nodes and servers:
            steps.append(
                f"{', '.join(servers)} must have these credentials already (coordinator_credentials), or lose ZooKeeper"
            )
        if above:
            steps.append(f"let nobody else create nodes in {', '.join(above)}: each fills the memory of ZooKeeper")
        plan = Plan(verb="cluster set --secure", subject=meta.name, steps=tuple(steps))

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            above = await cluster.coordinator.close_above()
            return {"closed": await cluster.secure(), "above": above, "owner": name}

        return Change(plan=plan, do=do, is_change=bool(nodes or above))

    return command.perform(prepare)


def finalize(*, command: ChangeCommand) -> int:
    """End an upgrade: raise the level of the cluster to the newest that this version supports. Until then every process can
    go back to the version before; from then on, older versions are refused. The command is refused while a server or a
    storage of an older version is part of the cluster, or does not answer. docs/upgrade.md has the steps.

    \b
    Examples:
      waltzctl cluster finalize --dry-run
      waltzctl cluster finalize --confirm local
    """
    return finalize_level(command)


def delete(
    *,
    file: Annotated[
        Path | None,
        Option(
            "--save",
            dir_okay=False,
            metavar="FILE",
            help="File to save the documents to. Default: waltz-CLUSTER-TIME.jsonl in the current directory.",
        ),
    ] = None,
    command: ChangeCommand,
) -> int:
    """Delete all documents of a cluster from ZooKeeper. They are written to a file first, and `waltzctl cluster
    load-metadata` restores them from it. Data on storages stays, but no server serves it, and a new cluster refuses
    storages that hold data. The command is refused while servers run, and needs --override while storages run.

    \b
    Examples:
      waltzctl cluster delete --dry-run --override local --reason 'a trial is over'
      waltzctl cluster delete --dry-run --override local --reason 'moved elsewhere' -o json
    """
    target = command.target

    async def prepare(cluster: Cluster) -> Change:
        await cluster.check_alone()
        found = await take_snapshot(cluster.coordinator, tls=target.tls)
        name = found.meta.name
        await _check_rest(cluster, name)
        up = [view.meta.name for view in found.storages if view.error is None]
        path = (file or Path(f"waltz-{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl")).absolute()
        plan = Plan(
            verb="cluster delete",
            subject=name,
            steps=(
                f"write all documents of the cluster {name} to {path}",
                f"delete them, key {found.meta.key}, at {target.where}",
            ),
            danger=Danger.TYPED,
            unsafe=(f"{', '.join(up)} still run",) if up else (),
        )

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            await _check_rest(cluster, name)
            saved = await read_documents(cluster, moment=moment.now())
            if saved.left_out:
                raise BadMetadata(
                    f"{', '.join(saved.left_out)} cannot be decoded, and so not be saved",
                    not_done="nothing was deleted",
                    next_step="delete or repair these documents first",
                )
            write_new(path, write(saved), not_done="nothing was deleted")  # flushed before anything is deleted
            deleted = await cluster.delete()
            last_seen.path_of(target.where).unlink(missing_ok=True)
            return {"documents": deleted, "file": str(path)}

        return Change(plan=plan, do=do, is_recorded=False)

    return command.perform(prepare)


async def _check_rest(cluster: Cluster, name: str) -> None:
    """Refuse while servers run: they would keep their partitions, which no other server could take over."""
    servers = sorted(await cluster.servers())
    if servers:
        raise Unsafe(
            f"the cluster {name} is in use: {', '.join(servers)} run and own its partitions",
            not_done="nothing was deleted",
            next_step="stop the servers first; their registration ends with them",
        )


def history(
    *,
    newest: Annotated[int, Option("-n", "--newest", min=1, max=HISTORY_MAX, help="Number of entries to show.")] = 20,
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """Show the changes made with waltzctl: time, operator, command, reason and result. Names of operators come from their
    certificates; `unverified:` marks a name from the environment. The newest 1,000 entries are kept. Calls to daemons are
    in the `audit.log` of each daemon.

    \b
    Examples:
      waltzctl history
      waltzctl history -n 100 -o json
    """
    put(history_listing(using(target, lambda cluster: cluster.history(newest))), output)
    return EXIT_OK
