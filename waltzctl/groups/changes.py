"""`waltzctl group create`, `set` and `remove`: a group as a whole, from its making to its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from typer import Option

from waltzctl.groups.command import GroupName, one_of
from waltzctl.groups.position import Begin
from waltzctl.groups.request import made, told
from waltzctl.groups.settings import ALL, GroupSettingOptions
from waltzctl.placement.group_log import make_group_log, plan_group_log
from waltzctl.shell import moment
from waltzctl.shell.change import Change, ChangeCommand, nothing_to_do
from waltzctl.shell.cluster_target import check_name
from waltzctl.shell.numbers import check_partitions
from waltzctl.shell.progress import Say
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.group import settings
from waltzctl.show.terminal import count
from waltzctl.snapshot.collector import take_snapshot
from waltzctl.snapshot.groups import GroupView, groups
from waltzd.cluster import group_log
from waltzd.cluster.assignment import spell_numbers
from waltzd.cluster.cluster import Cluster, channels_of
from waltzd.cluster.groups import GroupMeta, GroupStart
from waltzd.errors import BadArgument, NameInUse
from waltzd.protocol.channels import Parts, is_parts, numbers_of
from waltzd.protocol.groups import KeyedBy, Mode
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST


def create(
    *,
    name: GroupName,
    mode: Annotated[
        Literal["queue", "ordered", "keyed"],
        Option(
            "--mode",
            help="queue: members share the work; ordered: one has a partition, in the order of the log; keyed: as a queue, "
            "but one key after the other.",
        ),
    ] = "queue",
    key: Annotated[
        Literal["header", "lock"],
        Option("--key", help="Of a keyed group: the header of a transaction, or the first of its locks."),
    ] = "header",
    numbers: Annotated[
        str, Option("--partitions", metavar="PARTITIONS", help="Like 0-3,orders; those of a channel, whatever they are.")
    ] = ALL,
    is_last: Annotated[bool, Option("--from-last", help="Only what comes from now on is to be done.")] = False,
    ids: Annotated[
        str | None,
        Option("--from-id", metavar="ID", help="The id that is to be done first; of some partitions as 0=1000,3=20."),
    ] = None,
    time: Annotated[
        str | None, Option("--from-time", metavar="TIME", help=f"What came since then is to be done. {moment.HELP}")
    ] = None,
    given: GroupSettingOptions,
    command: ChangeCommand,
) -> int:
    """Make a consumer group: members that share the work of partitions, and whose place the cluster keeps. It begins at the
    first transaction unless something else is said. A cluster that an older version made has no log in which groups are
    kept: its first group makes that log, beside its partitions, which stay as they are.

    \b
    Examples:
      waltzctl group create mailer --dry-run
      waltzctl group create mailer --from-last --tries 3 --back-off 10s,1m
      waltzctl group create mailer-by-key --mode keyed --partitions 0-1 --then stop
    """
    check_name(name, not_done="nothing was changed")
    begin = Begin(is_last=is_last, ids=ids, time=time)
    if len(begin.options("from")) > 1:
        raise BadArgument(f"{' and '.join(begin.options('from'))} contradict each other", not_done="nothing was changed")
    parts = None if numbers == ALL else Parts(numbers.replace(" ", ""))
    if parts is not None and not is_parts(parts):
        raise BadArgument(f"--partitions {numbers}: write them as 0-3,7, or name a channel", not_done="nothing was changed")
    plain = GroupMeta(name=name, partitions=parts, mode=Mode(mode), key=KeyedBy(key), **given.changes())

    async def prepare(cluster: Cluster) -> Change:
        meta, (channels, _) = await cluster.meta(), await channels_of(cluster.coordinator)
        wanted = range(meta.partitions) if parts is None else sorted(numbers_of(parts, channels))
        check_partitions(wanted, meta.partitions)
        there = (await groups(cluster, command.target.tls, name)).named(name)
        if there is not None:
            if dataclasses.replace(there.meta, starts=()) != plain:
                raise NameInUse(
                    f"there is a consumer group {name} already: {', '.join(settings(there.meta))}",
                    not_done="nothing was changed",
                    next_step=f"change its settings with `waltzctl group set {name}`, where it stands with `waltzctl group "
                    f"reset {name}`, or take another name",
                )
            return nothing_to_do("group create", name)
        afters = await begin.afters(wanted, cluster, command.target, how="from")
        starts = tuple([await _start(cluster, *one) for one in sorted(afters.items()) if one[1] >= 0])
        storages: Sequence[str] = ()
        if not group_log.is_there((await cluster.assignment())[0], meta):
            storages = plan_group_log(await take_snapshot(cluster.coordinator, tls=command.target.tls))
        plan = Plan(
            verb="group create",
            subject=name,
            steps=(
                *([f"make the log in which groups are kept, on {', '.join(storages)}"] if storages else []),
                *settings(plain),
                *_spelled(starts, wanted),
            ),
            danger=Danger.NONE,
        )

        async def do(cluster: Cluster, say: Say) -> Mapping[str, Any]:
            if storages:
                say("making the log in which groups are kept")
                await make_group_log(cluster, tls=command.target.tls)
            found = await made(cluster, command.target.tls, say, dataclasses.replace(plain, starts=starts))
            return {"name": name, "made_at": found.made_at, "is_new": found.is_new}

        return Change(plan=plan, do=do)

    return command.perform(prepare)


def _spelled(starts: Sequence[GroupStart], wanted: Sequence[int]) -> list[str]:
    """Partitions that begin at the same id are named together."""
    begins: dict[int, list[int]] = {}
    after = {start.partition: start.after for start in starts}
    for number in wanted:
        begins.setdefault(after.get(number, -1) + 1, []).append(number)
    return [
        f"begin in {spell_numbers(numbers)} at {'the first transaction' if first == 0 else f'id {first:,}'}"
        for first, numbers in sorted(begins.items())
    ]


def set_(*, name: GroupName, given: GroupSettingOptions, command: ChangeCommand) -> int:
    """Give a group other settings; what is not said stays. Members get them at once, for what they are given from then on.
    Its mode, its key and its partitions stay as they were made.

    \b
    Examples:
      waltzctl group set mailer --ack-wait 2m --dry-run
      waltzctl group set mailer --then stop --yes --reason 'the order matters more'
    """
    changes = given.changes()
    if not changes:
        raise BadArgument(
            "no setting was named", not_done="nothing was changed", next_step="see `waltzctl group set --help`"
        )

    async def prepare(cluster: Cluster) -> Change:
        _, group = await one_of(cluster, command.target.tls, name)
        wanted = dataclasses.replace(group.meta, **changes)
        if wanted == group.meta:
            return nothing_to_do("group set", name)
        before, after = settings(group.meta), settings(wanted)
        plan = Plan(
            verb="group set",
            subject=name,
            steps=tuple(
                [f"no longer: {line}" for line in before if line not in after]
                + [f"from now on: {line}" for line in after if line not in before]
            ),
            danger=Danger.ASK,
        )

        async def do(cluster: Cluster, say: Say) -> Mapping[str, Any]:
            _, now = await one_of(cluster, command.target.tls, name)
            meta = dataclasses.replace(now.meta, **changes)
            await told(cluster, command.target.tls, say, lambda admin: admin.set_group(meta, group.made_at))
            return {"name": name, "made_at": group.made_at}

        return Change(plan=plan, do=do)

    return command.perform(prepare)


def remove(*, name: GroupName, command: ChangeCommand) -> int:
    """Take a group away, with its place in each partition and with what it has parked. Its members are sent away. The log
    stays as it is; a group that is made again under this name begins anew.

    \b
    Examples:
      waltzctl group remove mailer --dry-run
      waltzctl group remove mailer --confirm mailer --reason 'mail goes out elsewhere'
    """

    async def prepare(cluster: Cluster) -> Change:
        _, group = await one_of(cluster, command.target.tls, name)
        plan = Plan(verb="group remove", subject=name, steps=tuple(_lost(group)), danger=Danger.TYPED)

        async def do(cluster: Cluster, say: Say) -> Mapping[str, Any]:
            await told(cluster, command.target.tls, say, lambda admin: admin.remove_group(name, group.made_at))
            return {"name": name, "made_at": group.made_at}

        return Change(plan=plan, do=do)

    return command.perform(prepare)


def _lost(group: GroupView) -> list[str]:
    """What goes with it."""
    lag = group.lag
    return [
        f"forget where {group.name} stands in {spell_numbers([one.partition for one in group.partitions])}",
        *(["nobody is left to do what is not done, and how much that is is not known"] if lag is None else []),
        *([f"nobody is left for {count(lag, 'transaction')} not done yet"] if lag else []),
        *([f"forget {group.parked:,} that are parked"] if group.parked else []),
        *([f"send away {', '.join(group.members)}"] if group.members else []),
    ]


async def _start(cluster: Cluster, number: int, after: int) -> GroupStart:
    """Where a group begins in a partition. An id that was typed is one of the log as it is."""
    meta, _ = await cluster.partition(number)
    current = FIRST if meta is None else meta.lineage.current
    timeline = after.timeline if isinstance(after, Position) else current
    return GroupStart(number, int(after), None if timeline == FIRST else timeline)
