"""`waltzctl partition transfer` and `partition preferred`: which server owns a partition, once or for good.

A transfer is one step of the leader's, done by hand: the tool plans as the leader would if the partition were preferred
there, and saves that by compare-and-set. It lasts because nothing moves without a reason; where there is a reason to undo
it, it is refused. A preference is such a reason, and stays until somebody clears it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer import Argument, Option

from waltzctl.change import Asking, agree, changing, recorded
from waltzctl.interruption import interruptible
from waltzctl.job import STAYS
from waltzctl.numbers import partitions_of
from waltzctl.options import Output
from waltzctl.placement.handover import Handover, arrival
from waltzctl.reach import Meant, Reach, known_servers, unknown, using
from waltzctl.safety import Plan
from waltzctl.show.change import put_plan
from waltzctl.show.forms import AnyForm, Column, Listing, put
from waltzd.cluster.assignment import moved, obstacles, plan, preferring, spell_numbers, transferred
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Assignment, ClusterMeta, Preferences, ServerMeta
from waltzd.errors import EXIT_OK, BadArgument, ChangedMeanwhile, NoSuchPartition, WouldNotLast

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Owners:
    """What the leader decides by, with the versions that it was read at."""

    meta: ClusterMeta
    servers: Mapping[str, ServerMeta]
    assignment: Assignment
    version: int
    preferences: Preferences
    preferences_version: int

    @classmethod
    async def of(cls, cluster: Cluster) -> Owners:
        preferences, preferences_version = await cluster.preferences()
        assignment, version = await cluster.assignment()
        return cls(
            meta=await cluster.meta(),
            servers=await cluster.servers(),
            assignment=assignment,
            version=version,
            preferences=preferences,
            preferences_version=preferences_version,
        )

    def planned(self, servers: Mapping[str, ServerMeta], preferences: Preferences) -> Assignment:
        """What the leader will do."""
        return plan(self.assignment, servers, len(self.assignment.owners), preferences)

    def check_numbers(self, numbers: Collection[int]) -> None:
        for number in numbers:
            if number >= self.meta.partitions:
                raise NoSuchPartition(
                    f"there is no partition {number}: the cluster has {self.meta.partitions}",
                    not_done="nothing was changed",
                    next_step="see them with `waltzctl partition list`",
                    partition=number,
                )


Wait = Annotated[bool, changing("--wait/--no-wait", help="Wait until the partitions are open at their new owners.")]
Patience = Annotated[
    float, changing("--timeout", min=0, metavar="SECONDS", help="How long to wait; what was done stays done.")
]


def moves_json(before: Assignment, after: Assignment) -> list[dict[str, Any]]:
    return [
        {"partition": number, "from": was.server, "to": now.server, "generation": now.generation}
        for number, (was, now) in enumerate(zip(before.owners, after.owners, strict=True))
        if was != now
    ]


# -- once --------------------------------------------------------------------------------------------------------------


def transfer(
    *,
    partitions: Annotated[str, Argument(metavar="PARTITIONS")],
    server: Annotated[
        str, Option("--to", metavar="SERVER", help="The server that is to own them.", autocompletion=known_servers)
    ],
    asked: Asking,
    reach: Meant,
    wait: Wait = True,
    timeout: Patience = TIMEOUT_SECONDS,
    output: Output = "table",
) -> int:
    """Move PARTITIONS (like 0-3,7) to another server, once. The plan shows what has to move back so that servers own
    equally many. A transfer that the cluster would undo at once, because a partition is preferred elsewhere, is refused.
    Clients go on by themselves; their transactions wait for a moment.

    \b
    Examples:
      waltzctl partition transfer 0 --to server-2 --dry-run
      waltzctl partition transfer 0,1 --to server-1 --yes --reason "the new machine" -o json
    """
    numbers = partitions_of(partitions)
    found = using(reach, Owners.of)
    after = transfer_of(found, numbers, server)
    made = transfer_plan(found.assignment, after, numbers)
    if not agree(made, asked, reach, output):
        return EXIT_OK

    async def do(cluster: Cluster) -> float | None:
        async with recorded(cluster, made, asked):
            await save(cluster, found, after)
            if not wait:
                return None
            steps = moves_json(found.assignment, after)
            wanted = Handover(
                numbers=tuple(step["partition"] for step in steps), to={step["partition"]: step["to"] for step in steps}
            )
            return await arrival(cluster, wanted, key=found.meta.key, tls=reach.tls, seconds=timeout)

    with interruptible(STAYS):
        seconds = using(reach, do)
    put_plan(made, output, result="done", moves=moves_json(found.assignment, after), seconds=rounded(seconds))
    return EXIT_OK


def transfer_of(found: Owners, numbers: Collection[int], to: str) -> Assignment:
    """The assignment that a transfer leads to; an error where it cannot be, or would not last."""
    found.check_numbers(numbers)
    if to not in found.servers:
        raise unknown("server", to, found.servers)
    if found.servers[to].is_draining:
        raise WouldNotLast(
            f"{to} is draining",
            next_step=f"let it take part again with `waltzctl server undrain {to}`, or name another server",
        )
    after = transferred(found.assignment, found.servers, found.preferences, numbers, to)
    against = obstacles(after, found.servers, found.preferences, numbers, to)
    if against:
        spelled = spell(numbers)
        clear = "a preference that an operator set goes away with `waltzctl partition preferred PARTITIONS --clear`"
        if all(after.owners[number].server == to for number in numbers):
            clear = (
                f"say that they should be there for good, `waltzctl partition preferred {spelled} --server {to}`; {clear}"
            )
        else:
            clear = f"name fewer partitions, as servers own equally many; {clear}"
        raise WouldNotLast(f"partition transfer {spelled} to {to}: {'; '.join(against)}", next_step=clear)
    return after


def transfer_plan(before: Assignment, after: Assignment, numbers: Collection[int]) -> Plan:
    """First what was asked for, then what follows from it."""
    both = enumerate(zip(before.owners, after.owners, strict=True))
    asked = Assignment(owners=tuple(now if number in numbers else was for number, (was, now) in both))
    steps = [f"move {part}" for part in moved(before, asked)]
    steps += [f"move {part}, so that servers own equally many" for part in moved(asked, after)]
    return Plan(verb="partition transfer", subject=spell(numbers), steps=tuple(steps))


def spell(numbers: Collection[int]) -> str:
    """As one word."""
    return spell_numbers(sorted(numbers)).replace(" ", "")


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


async def save(cluster: Cluster, found: Owners, after: Assignment) -> None:
    """Only if nobody moved anything since the plan; else the error says what was moved."""
    try:
        await cluster.save_assignment(after, found.version)
    except ChangedMeanwhile as error:
        now, _ = await cluster.assignment()
        changes = "; ".join(moved(found.assignment, now))
        raise ChangedMeanwhile(
            f"partitions moved meanwhile: {changes}" if changes else error.message,
            not_done="no partition was moved by this command",
            next_step="look again with --dry-run",
        ) from error


# -- for good ----------------------------------------------------------------------------------------------------------


def preferred(
    *,
    partitions: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    server: Annotated[
        str | None,
        Option(
            "--server",
            metavar="SERVER",
            help="Prefer this server for PARTITIONS from now on.",
            autocompletion=known_servers,
        ),
    ] = None,
    clear: Annotated[bool, Option("--clear", help="Prefer no server for PARTITIONS any more.")] = False,
    output: AnyForm = "table",
    asked: Asking,
    reach: Meant,
) -> int:
    """Show which servers should own which partitions, or say so with --server. A preference counts as far as servers own
    equally many partitions, and lasts until --clear. It goes before `preferred` in the configuration of servers.

    \b
    Examples:
      waltzctl partition preferred
      waltzctl partition preferred 0,2 --server server-1 --yes
      waltzctl partition preferred 0,2 --clear --yes -o json
    """
    numbers = None if partitions is None else partitions_of(partitions)
    if server is None and not clear:
        return _list(reach, numbers, output)
    if server is not None and clear:
        raise BadArgument("--server and --clear say different things")
    if numbers is None:
        raise BadArgument("it was not said for which partitions", next_step="name them, like 0-3,7")
    if output not in ("table", "json"):
        raise BadArgument(f"-o {output} is for the list only", next_step="use -o table or -o json")
    found = using(reach, Owners.of)
    found.check_numbers(numbers)
    if server is not None and server not in found.servers:
        raise unknown("server", server, found.servers)
    wishes = wishes_of(found.preferences, numbers, server)
    after = found.planned(found.servers, wishes)
    made = preference_plan(found, wishes, after, numbers, server)
    if not agree(made, asked, reach, output):
        return EXIT_OK

    async def do(cluster: Cluster) -> None:
        async with recorded(cluster, made, asked):
            try:
                await cluster.save_preferences(wishes, found.preferences_version)
            except ChangedMeanwhile as error:
                raise ChangedMeanwhile(
                    "somebody else changed what is preferred meanwhile",
                    next_step="look at it with `waltzctl partition preferred`",
                ) from error

    with interruptible(STAYS):
        using(reach, do)
    unmet = (
        {}
        if server is None
        else {number: why for number in numbers if (why := unmet_wish(number, server, after, found.servers))}
    )
    put_plan(
        made,
        output,
        result="done",
        moves=moves_json(found.assignment, after),
        unmet={str(n): why for n, why in unmet.items()},
    )
    for number, why in unmet.items():
        typer.echo(f"Partition {number} does not go to {server} now: {why}.", err=True)
    return EXIT_OK


def wishes_of(before: Preferences, numbers: Collection[int], server: str | None) -> Preferences:
    kept = {number: name for number, name in before.partitions.items() if number not in numbers}
    return Preferences(partitions=kept if server is None else kept | dict.fromkeys(numbers, server))


def preference_plan(
    found: Owners, wishes: Preferences, after: Assignment, numbers: Collection[int], server: str | None
) -> Plan:
    verb, subject = "partition preferred", spell(numbers)
    if wishes == found.preferences:
        return Plan(verb=verb, subject=subject, steps=())
    changed = [
        number for number in sorted(numbers) if wishes.partitions.get(number) != found.preferences.partitions.get(number)
    ]
    first = (
        f"prefer {server} for {spell_numbers(changed)}"
        if server is not None
        else f"prefer no server for {spell_numbers(changed)}"
    )
    return Plan(
        verb=verb, subject=subject, steps=(first, *(f"the leader moves {part}" for part in moved(found.assignment, after)))
    )


def unmet_wish(number: int, server: str, after: Assignment, servers: Mapping[str, ServerMeta]) -> str:
    """Why a partition is not where it is preferred; empty when it is."""
    if after.owners[number].server == server:
        return ""
    if server not in servers:
        return f"{server} is not up"
    if servers[server].is_draining:
        return f"{server} is draining"
    return f"{server} has its even share without it"


def _list(reach: Reach, numbers: Collection[int] | None, output: str) -> int:
    found = using(reach, Owners.of)
    found.check_numbers(numbers or ())
    put(
        Listing(
            kind="preferences",
            columns=(
                Column("partition", is_right=True), Column("servers"), Column("by"), Column("owner"), Column("honoured"),
                Column("why not"),
            ),
            rows=[row for row in preference_rows(found) if numbers is None or row["partition"] in numbers],
            nothing="No partition is preferred at any server: they are shared evenly, and stay where they are.",
        ),
        output,
    )  # fmt: skip
    return EXIT_OK


def preference_rows(found: Owners) -> list[dict[str, Any]]:
    by_servers = preferring(found.servers, Preferences(partitions={}), found.meta.partitions)
    rows = []
    for number, owner in enumerate(found.assignment.owners):
        wanted = found.preferences.partitions.get(number)
        names = by_servers.get(number, ()) if wanted is None else (wanted,)
        if not names:
            continue
        why = "" if owner.server in names else unmet_wish(number, names[0], found.assignment, found.servers)
        by = "server" if wanted is None else "operator"
        rows.append({"partition": number, "servers": list(names), "by": by, "owner": owner.server, "honoured": not why,
                     "why_not": why})  # fmt: skip
    return rows
