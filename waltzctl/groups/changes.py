"""`waltzctl group create`, `set` and `remove`: consumer groups as a whole."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typer import Option

from waltzctl.groups.command import GroupName, one_of, settings
from waltzctl.groups.position import StartOptions, call_server, create_group
from waltzctl.placement.creation import make_group_log, plan_group_log
from waltzctl.shell.change import Change, ChangeCommand, nothing_to_do
from waltzctl.shell.cluster_target import check_name
from waltzctl.shell.numbers import check_partitions
from waltzctl.shell.options import option_group
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.terminal import count
from waltzctl.snapshot.collector import take_snapshot
from waltzctl.snapshot.groups import GroupView, groups
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.cluster import Cluster, channels_of
from waltzd.cluster.groups import BACK_OFF_MAX, KINDS_MAX, MS_MAX, GroupMeta, GroupStart, has_group_log
from waltzd.errors import BadArgument, NoSuchGroup
from waltzd.errors.operations import NameInUse
from waltzd.protocol.channels import Parts, is_parts, numbers_of
from waltzd.protocol.groups import Exhausted, KeyedBy, Mode
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST

# -- settings as they are typed ----------------------------------------------------------------------------------------
ALL = "all"
_DURATION = re.compile(r"([0-9]{1,9})(ms|s|m|h)")
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_KIND = re.compile(r"-?[0-9]{1,10}")


@option_group
@dataclass(frozen=True, kw_only=True)
class GroupSettingOptions:
    """Settings that can be changed while a group exists; None for an option that was not used."""

    ack_wait: Annotated[
        str | None,
        Option("--ack-wait", metavar="DURATION", help="Time a member has to acknowledge a delivery (30s by default)."),
    ] = None
    max_in_flight: Annotated[
        int | None,
        Option("--max-in-flight", min=1, max=100_000, help="Maximum deliveries in flight to each member (100 by default)."),
    ] = None
    tries: Annotated[
        int | None, Option("--tries", min=1, max=1000, help="Maximum deliveries of a transaction (5 by default).")
    ] = None
    back_off: Annotated[
        str | None,
        Option("--back-off", metavar="DURATION,...", help="Pauses before each retry (1s,5s,30s by default), or none."),
    ] = None
    then: Annotated[
        Literal["park", "stop"] | None,
        Option("--then", help="After the last try: park the transaction (the default), or stop."),
    ] = None
    kinds: Annotated[
        str | None,
        Option("--kinds", metavar="N,...", help="Deliver only transactions of these kinds (all by default)."),
    ] = None

    def changes(self) -> Mapping[str, Any]:
        """Return the settings that were given, by the fields of `GroupMeta`."""
        found = {
            "ack_wait_ms": None if self.ack_wait is None else max(1, milliseconds(self.ack_wait, "--ack-wait")),
            "max_in_flight": self.max_in_flight,
            "deliver_max": self.tries,
            "back_off_ms": None if self.back_off is None else _pauses(self.back_off),
            "exhausted": None if self.then is None else Exhausted(self.then),
            "kinds": None if self.kinds is None else _kinds(self.kinds),
        }
        return {name: value for name, value in found.items() if value is not None}


def milliseconds(text: str, option: str) -> int:
    found = _DURATION.fullmatch(text.strip())
    length = -1 if found is None else int(found[1]) * _UNITS[found[2]]
    if not 0 <= length <= MS_MAX:
        raise BadArgument(
            f"{option} {text}: this is not a duration of at most a day",
            not_done="nothing was changed",
            next_step="write it as 500ms, 30s, 5m or 1h",
        )
    return length


def _pauses(text: str) -> tuple[int, ...]:
    pauses = () if text == "none" else tuple(milliseconds(part, "--back-off") for part in text.split(","))
    if len(pauses) > BACK_OFF_MAX:
        raise BadArgument(f"--back-off: at most {BACK_OFF_MAX} pauses", not_done="nothing was changed")
    return pauses


def _kinds(text: str) -> tuple[int, ...]:
    parts = [] if text == ALL else [part.strip() for part in text.split(",")]
    if not all(_KIND.fullmatch(part) and -(1 << 31) <= int(part) < 1 << 31 for part in parts):
        raise BadArgument(
            f"--kinds {text}: these are no kinds",
            not_done="nothing was changed",
            next_step="write whole numbers of 32 bits, as 1,2,5, or `all`",
        )
    if len(parts) > KINDS_MAX:
        raise BadArgument(f"--kinds: at most {KINDS_MAX} of them", not_done="nothing was changed")
    return tuple(sorted({int(part) for part in parts}))


def create(
    *,
    name: GroupName,
    mode: Annotated[
        Literal["queue", "ordered", "keyed"],
        Option(
            "--mode",
            help="queue: members share the transactions; ordered: one member has a partition, in log order; keyed: like "
            "queue, but transactions of one key are in order.",
        ),
    ] = "queue",
    key: Annotated[
        Literal["kind", "lock"],
        Option("--key", help="Key of a keyed group: the kind of a transaction, or its first lock."),
    ] = "kind",
    numbers: Annotated[
        str, Option("--partitions", metavar="PARTITIONS", help="Partitions and channels, like 0-3,orders; all by default.")
    ] = ALL,
    begin: StartOptions,
    given: GroupSettingOptions,
    command: ChangeCommand,
) -> int:
    """Create a consumer group, whose members share the transactions of partitions, and whose position the cluster keeps. It
    starts at the first transaction unless an option sets another start. The first group in a cluster of
    an older version also creates the group log, beside the partitions; the partitions do not change.

    \b
    Examples:
      waltzctl group create mailer --dry-run
      waltzctl group create mailer --start last --tries 3 --back-off 10s,1m
      waltzctl group create mailer-by-key --mode keyed --partitions 0-1 --then stop
    """
    check_name(name, not_done="nothing was changed")
    if len(begin.used) > 1:
        raise BadArgument("--start and --after exclude each other", not_done="nothing was changed")
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
                    f"a consumer group {name} exists already: {', '.join(settings(there.meta))}",
                    not_done="nothing was changed",
                    next_step=f"change its settings with `waltzctl group set {name}`, its position with `waltzctl group "
                    f"reset {name}`, or choose another name",
                )
            return nothing_to_do("group create", name)
        afters = await begin.afters(wanted, cluster, command.target)
        starts = tuple([await _start(cluster, *one) for one in sorted(afters.items()) if one[1] >= 0])
        storages: Sequence[str] = ()
        if not has_group_log((await cluster.assignment())[0], meta):
            storages = plan_group_log(await take_snapshot(cluster.coordinator, tls=command.target.tls))
        plan = Plan(
            verb="group create",
            subject=name,
            steps=(
                *([f"create the group log, on {', '.join(storages)}"] if storages else []),
                *settings(plain),
                *_describe_starts(starts, wanted),
            ),
            danger=Danger.NONE,
        )

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            if storages:
                report("creating the group log")
                await make_group_log(cluster, tls=command.target.tls)
            found = await create_group(cluster, command.target.tls, report, dataclasses.replace(plain, starts=starts))
            return {"name": name, "made_at": found.made_at, "is_new": found.is_new}

        return Change(plan=plan, do=do)

    return command.perform(prepare)


def _describe_starts(starts: Sequence[GroupStart], wanted: Sequence[int]) -> list[str]:
    """Describe the starts, with partitions that start after the same id together."""
    begins: dict[int, list[int]] = {}
    known = {start.partition: start.after for start in starts}
    for number in wanted:
        begins.setdefault(known.get(number, -1), []).append(number)
    return [
        f"start in {format_numbers(numbers)} {'at the first transaction' if after < 0 else f'after id {after:,}'}"
        for after, numbers in sorted(begins.items())
    ]


def set_(*, name: GroupName, given: GroupSettingOptions, command: ChangeCommand) -> int:
    """Set settings of a group; other settings stay. They apply at once to new deliveries. The mode, the key and the
    partitions of a group cannot be changed.

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

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            _, now = await one_of(cluster, command.target.tls, name)
            meta = dataclasses.replace(now.meta, **changes)
            await call_server(cluster, command.target.tls, report, lambda admin: admin.set_group(meta, group.made_at))
            return {"name": name, "made_at": group.made_at}

        return Change(plan=plan, do=do)

    return command.perform(prepare)


def remove(*, name: GroupName, command: ChangeCommand) -> int:
    """Delete a group, with its position in each partition and its parked transactions. Its members are disconnected. The
    log stays; a new group of the same name starts from its own start options.

    \b
    Examples:
      waltzctl group remove mailer --dry-run
      waltzctl group remove mailer --confirm mailer --reason 'mail goes out elsewhere'
    """

    async def prepare(cluster: Cluster) -> Change:
        tls = command.target.tls
        _, group = await one_of(cluster, tls, name)
        plan = Plan(verb="group remove", subject=name, steps=tuple(_lost(group)), danger=Danger.TYPED)

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            with suppress(NoSuchGroup):  # deleted since the plan: by a call whose answer was lost, or by another operator
                await call_server(
                    cluster, command.target.tls, report, lambda admin: admin.remove_group(name, group.made_at)
                )
            return {"name": name, "made_at": group.made_at}

        return Change(plan=plan, do=do)

    return command.perform(prepare)


def _lost(group: GroupView) -> list[str]:
    """Describe what is lost with a group."""
    lag = group.lag
    return [
        f"delete the position of {group.name} in {format_numbers([one.partition for one in group.partitions])}",
        *(["transactions that are not acknowledged stay undelivered; their number is unknown"] if lag is None else []),
        *([f"{count(lag, 'transaction')} not acknowledged yet will not be delivered"] if lag else []),
        *([f"delete the list of {group.parked:,} parked transactions"] if group.parked else []),
        *([f"disconnect {', '.join(group.members)}"] if group.members else []),
    ]


async def _start(cluster: Cluster, number: int, after: int) -> GroupStart:
    """Return the start of a group in a partition. An id without a timeline is one of the current timeline."""
    meta, _ = await cluster.partition(number)
    current = FIRST if meta is None else meta.lineage.current
    timeline = after.timeline if isinstance(after, Position) else current
    return GroupStart(number, int(after), None if timeline == FIRST else timeline)
