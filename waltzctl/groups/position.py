"""Positions of consumer groups: start, reset, skip, resume.

Options name the first id to deliver, or a time; servers take the id in front of it. A plan states how many transactions are
skipped, and how many are delivered a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from typer import Argument, Option

from waltzctl.groups.command import GroupName, one_of
from waltzctl.groups.request import changed, told
from waltzctl.records.follow import addresses_of, opened
from waltzctl.shell import moment
from waltzctl.shell.change import Change as Planned
from waltzctl.shell.change import ChangeCommand, nothing_to_do
from waltzctl.shell.cluster_target import ClusterTarget
from waltzctl.shell.numbers import check_partitions
from waltzctl.shell.options import Misused
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.snapshot.groups import GroupView
from waltzd.cluster.assignment import spell_numbers
from waltzd.cluster.cluster import Cluster, channels_of
from waltzd.errors import BadArgument, NoSuchPartition
from waltzd.protocol.channels import numbers_of
from waltzd.protocol.groups import Change

ASK_SECONDS = 10.0
Partitions = Annotated[
    str | None,
    Option("--partitions", metavar="PARTITIONS", help="Partitions and channels, like 0-3,orders; all by default."),
]


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Start of a group, from the options; without any, the first transaction."""

    is_last: bool = False
    ids: str | None = None
    """First id to deliver: `1000`, or per partition `0=1000,3=20`."""
    time: str | None = None

    def options(self, how: str) -> list[str]:
        """Names of the options that were used."""
        said = {"last": self.is_last, "id": self.ids is not None, "time": self.time is not None}
        return [f"--{how}-{name}" for name, is_said in said.items() if is_said]

    async def afters(self, numbers: Sequence[int], cluster: Cluster, target: ClusterTarget, *, how: str) -> dict[int, int]:
        """Return for each partition the id in front of the first one to deliver."""
        if self.ids is not None:
            return _ids(self.ids, numbers, f"--{how}-id")
        if not self.is_last and self.time is None:
            return dict.fromkeys(numbers, -1)
        time = None if self.time is None else moment.microseconds(self.time, datetime.now(UTC), f"--{how}-time")
        addresses = await addresses_of(cluster, None)
        async with opened(target, addresses, seconds=ASK_SECONDS) as client:
            return {
                number: await (client.end_position(number) if time is None else client.position_at(number, time))
                for number in numbers
            }


def _ids(text: str, numbers: Sequence[int], option: str) -> dict[int, int]:
    found: dict[int, int] = {}
    for part in text.split(","):
        number, is_of_one, id_ = part.strip().rpartition("=")
        if not id_.isdecimal() or (is_of_one and not number.isdecimal()) or (not is_of_one and "," in text):
            raise BadArgument(
                f"{option} {text}: this is not an id or a list of ids",
                not_done="nothing was changed",
                next_step="write 1000 for all partitions, or 0=1000,3=20 for some",
            )
        if is_of_one and int(number) not in numbers:
            raise _not_there(int(number), numbers)
        found |= dict.fromkeys([int(number)] if is_of_one else numbers, int(id_) - 1)
    return found


def _not_there(number: int, numbers: Sequence[int]) -> NoSuchPartition:
    return NoSuchPartition(
        f"partition {number} is not in the group, which has {spell_numbers(sorted(numbers))}",
        not_done="nothing was changed",
        next_step="`waltzctl group describe NAME` shows them",
        partition=number,
    )


async def chosen(cluster: Cluster, group: GroupView, text: str | None) -> list[int]:
    """Return the partitions of a group that the text names by numbers and channels; all if the text is None."""
    ours = [one.partition for one in group.partitions]
    if text is None:
        return ours
    channels, _ = await channels_of(cluster.coordinator)
    wanted = sorted(numbers_of(text, channels))
    check_partitions(wanted, (await cluster.meta()).partitions)
    for number in wanted:
        if number not in ours:
            raise _not_there(number, ours)
    return wanted


def reset(
    *,
    name: GroupName,
    numbers: Partitions = None,
    is_first: Annotated[bool, Option("--to-first", help="Start at the first transaction.")] = False,
    is_last: Annotated[bool, Option("--to-last", help="Start behind the last committed transaction.")] = False,
    ids: Annotated[
        str | None,
        Option("--to-id", metavar="ID", help="Start at this id, inclusive; per partition as 0=1000,3=20."),
    ] = None,
    time: Annotated[
        str | None,
        Option("--to-time", metavar="TIME", help=f"Start at the first transaction of this time or later. {moment.HELP}"),
    ] = None,
    skipped: Annotated[
        str | None,
        Option("--skip-to", metavar="ID", help="Skip up to this id, inclusive; per partition as 0=41,3=19."),
    ] = None,
    command: ChangeCommand,
) -> int:
    """Reset the position of a group. All transactions from the new position on are delivered, also acknowledged and parked
    ones; transactions before it are not, and stay parked if they were. Members continue by themselves; their deliveries in
    flight are void. With --skip-to the group only skips transactions that are not done up to an id: nothing is delivered
    again, and parked transactions stay parked.

    \b
    Examples:
      waltzctl group reset mailer --to-time 2026-11-24T08:00 --dry-run
      waltzctl group reset mailer --partitions 0 --to-first --confirm mailer --reason 'index lost'
      waltzctl group reset mailer --partitions 0 --skip-to 41 --confirm mailer --reason 'sent by hand'
    """
    begin = Begin(is_last=is_last, ids=ids, time=time)
    said = [*(["--to-first"] if is_first else []), *begin.options("to"), *(["--skip-to"] if skipped is not None else [])]
    if len(said) != 1:
        raise BadArgument(
            f"{' and '.join(said)} exclude each other" if said else "no new position was given",
            not_done="nothing was changed",
            next_step="give one of --to-first, --to-last, --to-id, --to-time and --skip-to",
        )

    async def prepare(cluster: Cluster) -> Planned:
        _, group = await one_of(cluster, command.target.tls, name)
        wanted = await chosen(cluster, group, numbers)
        if skipped is not None:
            return _skipping(group, _ids(skipped, wanted, "--skip-to"), command)
        afters = await begin.afters(wanted, cluster, command.target, how="to")
        moved = {number: after for number, after in afters.items() if not _is_there(group, number, after)}
        if not moved:
            return nothing_to_do("group reset", name)
        working = [member for member in group.members if any(_works(group, number, member) for number in moved)]
        plan = Plan(
            verb="group reset",
            subject=name,
            steps=(
                *(_moved(group, number, after) for number, after in sorted(moved.items())),
                *([f"note: members there start again: {', '.join(working)}"] if working else []),
            ),
            danger=Danger.TYPED,
        )

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            wanted = {number: [after] for number, after in moved.items()}
            return {"partitions": await changed(cluster, command.target.tls, report, group, Change.RESET, wanted)}

        return Planned(plan=plan, do=do)

    return command.perform(prepare)


def _skipping(group: GroupView, firsts: Mapping[int, int], command: ChangeCommand) -> Planned:
    """Plan to skip ids. `firsts` is, by partition, the last id to skip minus 1."""
    steps, wanted = list[str](), dict[int, Sequence[int]]()
    for number, before in sorted(firsts.items()):
        last, one = before + 1, group.at(number)
        assert one is not None
        if last > one.place.floor:
            most = min(last - one.place.floor, one.lag if one.lag is not None else last - one.place.floor)
            steps.append(f"partition {number}: skip what is not done up to id {last}, at most {most:,} transactions")
            wanted[number] = [last]
    if not wanted:
        return nothing_to_do("group reset", group.name)

    async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
        return {"partitions": await changed(cluster, command.target.tls, report, group, Change.SKIP, wanted)}

    return Planned(plan=Plan(verb="group reset", subject=group.name, steps=tuple(steps), danger=Danger.TYPED), do=do)


def _is_there(group: GroupView, number: int, after: int) -> bool:
    """Return whether the group is at this position already, with no transaction done above it."""
    one = group.at(number)
    assert one is not None
    return one.place.floor == one.place.reach == after


def _works(group: GroupView, number: int, member: str) -> bool:
    one = group.at(number)
    return one is not None and any(found.name == member for found in one.place.members)


def _moved(group: GroupView, number: int, after: int) -> str:
    one = group.at(number)
    assert one is not None
    floor, known = one.place.floor, max(0, one.place.reach - after)
    found = [f"partition {number}: the next delivery is id {after + 1:,}"]
    if after > floor:
        found.append(f"what is not done from id {floor + 1:,} to {after:,} is skipped")
    again = known - one.place.open if after <= floor else known
    if again > 0:
        found.append(f"up to {again:,} acknowledged transactions are delivered again")
    return "; ".join(found)


def resume(
    *,
    name: Annotated[str | None, Argument(metavar="[NAME]")] = None,
    numbers: Partitions = None,
    entry: Annotated[
        int | None,
        Option(
            "--pass-over", metavar="ENTRY", min=0, help="Resume all groups without this entry of the group log, by its id."
        ),
    ] = None,
    command: ChangeCommand,
) -> int:
    """Resume a group that stopped because a transaction failed as often as its tries allow. The transaction gets one more
    try; if it fails again, the group stops again.

    With --pass-over and no NAME resume all groups without an entry of the group log that no server can read; `waltzctl
    group list` shows its id. What the entry recorded of a group is lost: transactions that were done may be delivered
    again. First upgrade all servers: a newer version may be able to read the entry.

    \b
    Examples:
      waltzctl group resume mailer --dry-run
      waltzctl group resume mailer --partitions 0 --reason 'the mail server is back'
      waltzctl group resume --pass-over 1742 --confirm 1742 --reason 'case 815'
    """
    if (name is None) is (entry is None) or (entry is not None and numbers is not None):
        raise Misused("Name the group to resume, or say --pass-over ENTRY alone.")
    if name is None:
        assert entry is not None
        return _pass_over(entry, command)

    async def prepare(cluster: Cluster) -> Planned:
        _, group = await one_of(cluster, command.target.tls, name)
        wanted = await chosen(cluster, group, numbers)
        stopped = [one for one in group.partitions if one.partition in wanted and one.place.stopped]
        plan = Plan(
            verb="group resume",
            subject=name,
            steps=tuple(f"partition {one.partition}: resume; it stopped at {one.place.stopped}" for one in stopped),
            danger=Danger.NONE,
        )

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            ids: dict[int, Sequence[int]] = {one.partition: () for one in stopped}
            return {"partitions": await changed(cluster, command.target.tls, report, group, Change.GO_ON, ids)}

        return Planned(plan=plan, do=do)

    return command.perform(prepare)


def _pass_over(id: int, command: ChangeCommand) -> int:
    """Let all groups resume without an entry of the group log that no server can read."""

    async def prepare(cluster: Cluster) -> Planned:
        plan = Plan(
            verb="group resume --pass-over",
            subject=str(id),
            steps=(
                f"pass over entry {id} of the group log, on all servers",
                "what the entry recorded of a group is lost: transactions that were done may be delivered again",
            ),
            danger=Danger.TYPED,
        )

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            await told(cluster, command.target.tls, report, lambda admin: admin.pass_entry(id))
            return {"entry": id}

        return Planned(plan=plan, do=do)

    return command.perform(prepare)
