"""Positions of consumer groups: start, reset, skip, resume.

A plan states how many transactions are skipped, and how many are delivered a second time.

Changes of groups are sent to servers, and retried (`call_server`).

Any server can change a group as a whole; only the owner of a partition can change the group there. Owners change, and the
group log may be unavailable for a moment, so errors that pass are retried for `WAIT_SECONDS`. A request may have been done
although its answer was lost, so each can be repeated. A reset names the epoch that it begins, and a group begins no epoch
twice. A transaction that failed between a replay, or a resume, and its repetition is tried once more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from typer import Argument, Option

from waltzctl.groups.command import GroupName, one_of
from waltzctl.records.follow import addresses_of, opened
from waltzctl.shell import moment
from waltzctl.shell.change import Change as Planned
from waltzctl.shell.change import ChangeCommand, nothing_to_do
from waltzctl.shell.cluster_target import ClusterTarget
from waltzctl.shell.numbers import check_partitions
from waltzctl.shell.options import Misused, option_group
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.snapshot.groups import GroupView
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.cluster import Cluster, channels_of
from waltzd.cluster.documents import ServerMeta
from waltzd.cluster.groups import GroupMeta, MadeGroup
from waltzd.errors import BadArgument, NoSuchPartition, Retry, WaltzError
from waltzd.errors.operations import ChangedMeanwhile, NoServerUp, Unfinished, WrongPeer
from waltzd.format.layout import ID_MAX
from waltzd.protocol.channels import numbers_of
from waltzd.protocol.groups import RESET_DRAWS, Change, Changed, reset_epoch
from waltzd.wire.servers import ServerAdminClient, ServerClient
from waltzd.wire.tls import Tls

CALL_SECONDS = 10.0
WAIT_SECONDS = 30.0
"""Time to wait for an owner or for the group log; a fail-over takes less."""
PAUSE_SECONDS = 0.3
T = TypeVar("T")


async def call_server(
    cluster: Cluster, tls: Tls | None, report: Report, call: Callable[[ServerAdminClient], Awaitable[T]]
) -> T:
    """Call one server after the other until one answers; return its answer."""
    key = (await cluster.meta()).key

    async def ask(server: ServerMeta) -> T:
        async with ServerAdminClient(server.admin_listen, key, seconds=CALL_SECONDS, tls=tls, name=server.name) as admin:
            return await call(admin)

    return await _in_turn(cluster, report, ask)


async def create_group(cluster: Cluster, tls: Tls | None, report: Report, meta: GroupMeta) -> MadeGroup:
    key = (await cluster.meta()).key

    async def ask(server: ServerMeta) -> MadeGroup:
        async with ServerClient(server.listen, key, seconds=CALL_SECONDS, tls=tls) as client:
            return await client.make_group(meta)

    return await _in_turn(cluster, report, ask)


async def _in_turn(cluster: Cluster, report: Report, ask: Callable[[ServerMeta], Awaitable[T]]) -> T:
    """Ask all servers in turn, and again while the error may pass."""
    until = _now() + WAIT_SECONDS
    while True:
        error: WaltzError = NoServerUp("no server of the cluster is up", not_done="nothing was changed")
        for server in (await cluster.servers()).values():
            try:
                return await ask(server)
            except WaltzError as refusal:
                error = _passing(refusal)
        await _pause(until, error, report)


async def changed(
    cluster: Cluster, tls: Tls | None, report: Report, group: GroupView, change: Change, wanted: Mapping[int, Sequence[int]]
) -> list[dict[str, int]]:
    """Apply a change in each partition of `wanted` (partition → ids); return one result for each partition."""
    found: list[dict[str, int]] = []
    for partition, ids in sorted(wanted.items()):
        report(f"{len(found)} of {len(wanted)} partitions done")
        try:
            one = await _changed(cluster, tls, report, group, partition, change, ids)
        except WaltzError as error:
            if not found:
                raise
            done = format_numbers([row["partition"] for row in found])
            raise Unfinished(
                f"partition {partition}: {error.code} {error.message}",
                not_done=f"the change was applied in {done}, and in no other partition",
            ) from error
        found.append({"partition": partition, "count": one.count, "epoch": one.epoch, "floor": one.floor})
    return found


async def _changed(
    cluster: Cluster, tls: Tls | None, report: Report, group: GroupView, partition: int, change: Change, ids: Sequence[int]
) -> Changed:
    """Apply a change in one partition through its owner; follow a change of the owner."""
    key, until, view = (await cluster.meta()).key, _now() + WAIT_SECONDS, group.at(partition)
    seen = 0 if view is None else view.place.epoch
    epoch = reset_epoch(seen, random.randrange(RESET_DRAWS)) if change is Change.RESET else 0
    while True:
        assignment, _ = await cluster.assignment()
        owner, servers = assignment.owners[partition].server, await cluster.servers()
        error: WaltzError = NoServerUp(f"no server that is up owns partition {partition}", not_done="nothing was changed")
        if owner in servers:
            address = servers[owner].admin_listen
            async with ServerAdminClient(address, key, seconds=CALL_SECONDS, tls=tls, name=owner) as admin:
                try:
                    return await admin.change_group(group.name, group.made_at, partition, change, ids, epoch)
                except WaltzError as refusal:
                    error = _passing(refusal)
        await _pause(until, error, report)


def _passing(error: WaltzError) -> WaltzError:
    """Return an error that may pass; raise one that a retry cannot solve."""
    if error.retry is Retry.NEVER or isinstance(error, (WrongPeer, ChangedMeanwhile)):
        raise error
    return error


async def _pause(until: float, error: WaltzError, report: Report) -> None:
    if _now() > until:
        raise error
    report(error.message)
    await asyncio.sleep(PAUSE_SECONDS)


def _now() -> float:
    return asyncio.get_running_loop().time()


ASK_SECONDS = 10.0
Partitions = Annotated[
    str | None,
    Option("--partitions", metavar="PARTITIONS", help="Partitions and channels, like 0-3,orders; all by default."),
]


@option_group
@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Options for the start of a group; without any, the first transaction."""

    start: Annotated[
        str | None,
        Option(
            "--start",
            metavar="first|last|TIME",
            help="Start with the first transaction, after the last committed one, or with the first one since a time. "
            f"{moment.HELP}",
        ),
    ] = None
    after: Annotated[str | None, Option("--after", metavar="ID", help="Start after this id; 0=999,3=19 for some.")] = None

    @property
    def used(self) -> list[str]:
        """Names of the options that were used."""
        return [name for name, value in {"--start": self.start, "--after": self.after}.items() if value is not None]

    async def afters(self, numbers: Sequence[int], cluster: Cluster, target: ClusterTarget) -> dict[int, int]:
        """Return for each partition the id after which the group starts."""
        if self.after is not None:
            return _ids(self.after, numbers, "--after")
        if self.start in (None, "first"):
            return dict.fromkeys(numbers, -1)
        time = None if self.start == "last" else moment.microseconds(self.start, datetime.now(UTC), "--start")
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
        if int(id_) > ID_MAX:
            raise BadArgument(f"{option} {text}: no id is above {ID_MAX}", not_done="nothing was changed")
        if is_of_one and int(number) not in numbers:
            raise _not_there(int(number), numbers)
        found |= dict.fromkeys([int(number)] if is_of_one else numbers, int(id_))
    return found


def _not_there(number: int, numbers: Sequence[int]) -> NoSuchPartition:
    return NoSuchPartition(
        f"partition {number} is not in the group, which has {format_numbers(sorted(numbers))}",
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
    begin: StartOptions,
    skipped: Annotated[
        str | None, Option("--skip-through", metavar="ID", help="Skip through this id, inclusive, or 0=41,3=19 for some.")
    ] = None,
    command: ChangeCommand,
) -> int:
    """Reset the position of a group. All transactions from the new position on are delivered, also acknowledged and parked
    ones; transactions before it are not, and stay parked if they were. Members continue by themselves; their deliveries in
    flight are void. With --skip-through the group only skips transactions that are not done, through an id: nothing is
    delivered again, and parked transactions stay parked.

    \b
    Examples:
      waltzctl group reset mailer --start 2026-11-24T08:00 --dry-run
      waltzctl group reset mailer --partitions 0 --start first --confirm mailer --reason 'index lost'
      waltzctl group reset mailer --skip-through 0=41 --confirm mailer --reason 'sent by hand'
    """
    used = [*begin.used, *(["--skip-through"] if skipped is not None else [])]
    if len(used) != 1:
        raise BadArgument(
            f"{' and '.join(used)} exclude each other" if used else "no new position was given",
            not_done="nothing was changed",
            next_step="give one of --start, --after and --skip-through",
        )

    async def prepare(cluster: Cluster) -> Planned:
        _, group = await one_of(cluster, command.target.tls, name)
        wanted = await chosen(cluster, group, numbers)
        if skipped is not None:
            return _skipping(group, _ids(skipped, wanted, "--skip-through"), command)
        afters = await begin.afters(wanted, cluster, command.target)
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


def _skipping(group: GroupView, lasts: Mapping[int, int], command: ChangeCommand) -> Planned:
    """Plan to skip ids. `lasts` is the last id to skip, by partition."""
    steps, wanted = list[str](), dict[int, Sequence[int]]()
    for number, last in sorted(lasts.items()):
        one = group.at(number)
        assert one is not None
        if last > one.place.floor:
            most = min(last - one.place.floor, one.lag if one.lag is not None else last - one.place.floor)
            steps.append(f"partition {number}: skip what is not done through id {last}, at most {most:,} transactions")
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
    if id > ID_MAX:
        raise BadArgument(f"--pass-over {id}: no id is above {ID_MAX}", not_done="nothing was changed")

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
            await call_server(cluster, command.target.tls, report, lambda admin: admin.pass_entry(id))
            return {"entry": id}

        return Planned(plan=plan, do=do)

    return command.perform(prepare)
