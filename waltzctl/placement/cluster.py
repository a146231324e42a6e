"""`waltzctl cluster` and `waltzctl history`: a cluster as a whole, through its documents in ZooKeeper.

What storages remove by a policy is only in the archive afterwards. So a policy is refused if nothing is archived, and a
policy by time is refused for a log without times.

Two changes cannot be undone. A level is raised at once (`waltzd.protocol.level`), when no process of an older version is
left. A format takes its time: the document of the cluster has the format of new sessions, owners see the change, and begin
a planned new session of each partition. What a partition has written since, no reader of the older format can read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from waltzctl.placement.creation import check_formats
from waltzctl.placement.daemons import POLL_SECONDS
from waltzctl.placement.mover import Moving
from waltzctl.placement.partition import spread_all
from waltzctl.shell import moment
from waltzctl.shell.blueprint import write_new
from waltzctl.shell.change import Change, ChangeCommand
from waltzctl.shell.change import history as history_listing
from waltzctl.shell.cluster_target import CommandTarget, check_operator, using
from waltzctl.shell.numbers import first_few, format_partitions
from waltzctl.shell.options import Misused
from waltzctl.shell.progress import Amount, Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.forms import AnyForm, put
from waltzctl.show.terminal import size
from waltzctl.snapshot import last_seen
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView
from waltzctl.snapshot.collector import take_snapshot
from waltzd.cluster.cluster import HISTORY_MAX, Cluster, all_archived
from waltzd.cluster.documents import KEEP_ALL, Keep, keep_of
from waltzd.cluster.metadata import read_documents, write
from waltzd.errors import EXIT_OK, BadArgument, WaltzError
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, FormatUnknown, NodeMissing, Unfinished, Unsafe
from waltzd.format.layout import BATCHES, VERSIONS
from waltzd.protocol.level import THIS, Program


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
    if replicas is not None:
        return spread_all("cluster set", replicas, command, options)
    if options.bytes_per_second is not None:
        name = "--format" if keep_local is None else "--keep-local"
        raise Misused(f"--rate is a bound on copies, and {name} copies nothing.")
    if keep_local is not None:
        return change_keep_local(keep_local, command)
    assert format is not None
    return change_format(format, options.timeout, command)


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

    async def prepare(cluster: Cluster) -> Change:
        found = await take_snapshot(cluster.coordinator, tls=command.target.tls)

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            await cluster.change_root(found.meta, replace(found.meta, level=THIS.level))
            return {"level": THIS.level}

        return Change(plan=finalize_plan(found), do=do, is_planned_again=True)

    return command.perform(prepare)


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
            versions = await cluster.versions()  # first, so that only what is saved is deleted
            saved = await read_documents(cluster, moment=moment.now())
            if saved.left_out:
                raise BadMetadata(
                    f"{', '.join(saved.left_out)} cannot be decoded, and so not be saved",
                    not_done="nothing was deleted",
                    next_step="delete or repair these documents first",
                )
            write_new(path, write(saved), not_done="nothing was deleted")  # flushed before anything is deleted
            try:
                deleted = await cluster.delete(versions)
            except (ChangedMeanwhile, NodeMissing) as error:
                raise ChangedMeanwhile(
                    f"another process changed the documents after they were saved to {path}: {error.message}",
                    not_done="nothing was deleted",
                    next_step="look with `waltzctl history`, then run the command again, with another --save FILE",
                ) from error
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


# -- how much of the archived log storages keep ------------------------------------------------------------------------


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
        made = keep_local_plan(found, wanted, keep, archived=bool(await all_archived(cluster.coordinator)))

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            await cluster.change_root(found.meta, replace(found.meta, keep_local=wanted))
            return {"keep_local": wanted}

        return Change(plan=made, do=do, is_change=found.meta.keep_local != wanted)

    return command.perform(prepare)


def keep_local_plan(found: ClusterSnapshot, wanted: str, keep: Keep, *, archived: bool) -> Plan:
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
    steps = [f"set storages to keep {_describe_policy(wanted)} (until now {_describe_policy(meta.keep_local)})"]
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


def _describe_policy(policy: str) -> str:
    keep = keep_of(policy)
    if policy == KEEP_ALL or keep is None:
        return "all of the log"
    if keep.seconds is not None:
        return f"the last {policy} of the log"
    return f"{policy} of the log of each replica"


def too_much(found: ClusterSnapshot, size_max: int) -> int:
    """Return the bytes on all storages above what the policy keeps."""
    replicas = [one for reported in found.storage_reports.values() for one in reported.assigned]
    return sum(max(0, one.disk_bytes - size_max) for one in replicas)


# -- to format 1, and to the newest level ------------------------------------------------------------------------------


FINALIZE = "cluster finalize"
WAITS = (
    "Interrupted. If the new format was saved already, partitions change to it by themselves: `waltzctl partition list "
    "-o wide` shows the format of each."
)


def change_format(wanted: int, seconds: float | None, command: ChangeCommand) -> int:
    tls = command.target.tls

    async def prepare(cluster: Cluster) -> Change:
        found = await take_snapshot(cluster.coordinator, tls=tls)
        made = format_plan(found, wanted)

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            if found.meta.format != wanted:
                await cluster.set_format(wanted, before=found.meta)
            began = time.monotonic()
            while left := unchanged(now := await take_snapshot(cluster.coordinator, tls=tls), wanted):
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


def format_plan(found: ClusterSnapshot, wanted: int) -> Plan:
    """Plan the change. Raise if it must not be made: there is no way back, and no storage may be too old."""
    meta, left = found.meta, unchanged(found, wanted)
    if wanted < meta.format:
        raise Unsafe(
            f"the cluster {meta.name} writes format {meta.format}, and cannot go back: readers of format {wanted} "
            f"cannot read what its partitions have written",
            next_step=f"keep the format; a new cluster can be created with `waltzctl create-cluster --format {wanted}`",
        )
    _check_answers(found, FormatUnknown, f"to write format {wanted}")
    check_formats(found.storage_reports, wanted)
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


def finalize_plan(found: ClusterSnapshot, program: Program = THIS) -> Plan:
    """Plan to raise the level to that of `program`; raise `Unsafe` while a process is too old or unknown."""
    name, before, level = found.meta.name, found.meta.level, program.level
    if before == level:
        return Plan(verb=FINALIZE, subject=name, steps=())
    _check_answers(found, Unsafe, f"for level {level}")
    versions = {f"server {one.name}": one.version for one in [*(view.meta for view in found.servers), *found.missing]}
    versions |= {f"storage {name}": reported.version for name, reported in found.storage_reports.items()}
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


def unchanged(found: ClusterSnapshot, wanted: int) -> list[PartitionView]:
    """Return the partitions whose sessions are not known to write this format."""
    return [view for view in found.partitions if (view.format or 0) < wanted]


def _check_answers(found: ClusterSnapshot, kind: type[WaltzError], purpose: str) -> None:
    """Raise if a storage does not answer, because its version is unknown."""
    silent = [view.meta.name for view in found.storages if view.reported is None]
    if silent:
        raise kind(
            f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer, and may be too old {purpose}",
            next_step="start it, or remove it with `waltzctl storage remove`, then run this command again",
        )


def _format_reasons(left: list[PartitionView]) -> str:
    reasons = [(view.partition, view.waiting or f"its session writes format {view.format}") for view in left]
    return first_few([f"partition {number}: {why}" for number, why in reasons])
