"""`waltzctl server`, `partition transfer` and `partition preferred`: which server owns a partition, once or
permanently.

The tool plans as the leader does. A transfer is one step of the leader, made by an operator and saved by
compare-and-set. It lasts because the leader moves nothing without a reason; a transfer that the leader would undo is
refused. A preference is such a reason, and stays until an operator clears it. A drain is a request to the server
itself, which announces it; the leader then assigns its partitions to others. A drain ends with the process: a restarted
server takes part again.

A command waits until each partition is open at its new owner, and reports why each has not arrived. The server that gave a
partition away is asked too: a draining server may be stopped only after it has closed what it owned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any
from uuid import UUID

import typer
from typer import Argument, Option

from waltzctl.shell.change import Change, ChangeCommand, change_option
from waltzctl.shell.cluster_target import (
    ClusterTarget,
    CommandTarget,
    ServerName,
    first_contact,
    known_servers,
    unknown,
    using,
)
from waltzctl.shell.numbers import check_partitions, chosen
from waltzctl.shell.options import option_group
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.cluster import servers as server_list
from waltzctl.show.forms import AnyForm, Column, Listing, put
from waltzctl.snapshot.cluster_snapshot import OPEN
from waltzctl.snapshot.collector import AdminConnections, snapshot_of
from waltzd.cluster.assignment import format_numbers, moved, obstacles, plan, preferring, transferred
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Assignment, ClusterMeta, Preferences, ServerMeta
from waltzd.cluster.groups import has_group_log
from waltzd.errors import EXIT_OK, BadArgument, WaltzError
from waltzd.errors.operations import ChangedMeanwhile, NotTakenOver, WouldNotLast
from waltzd.protocol.descriptions import ServerDescription
from waltzd.wire.servers import ServerAdminClient
from waltzd.wire.tls import Tls

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Owners:
    """Documents by which the leader assigns partitions, with the versions that were read."""

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

    def check_partitions(self, numbers: Iterable[int], *, not_done: str = "nothing was changed") -> None:
        check_partitions(
            numbers, self.meta.partitions, has_group_log=has_group_log(self.assignment, self.meta), not_done=not_done
        )

    def planned(self, servers: Mapping[str, ServerMeta], preferences: Preferences) -> Assignment:
        """Return the assignment that the leader will make."""
        return plan(self.assignment, servers, len(self.assignment.owners), preferences)

    def server(self, name: str) -> ServerMeta:
        if name not in self.servers:
            raise unknown("server", name, self.servers)
        return self.servers[name]

    def admin(self, name: str, tls: Tls | None) -> ServerAdminClient:
        return ServerAdminClient(self.server(name).admin_listen, self.meta.key, tls=tls, name=name)

    def leader_moves(self, after: Assignment) -> list[str]:
        """Describe the moves that the leader will make."""
        return [f"the leader moves {part}" for part in moved(self.assignment, after)]


@option_group
@dataclass(frozen=True, kw_only=True)
class WaitOptions:
    """Options of a command that waits until partitions are open at their new owners."""

    wait: Annotated[
        bool, change_option("--wait/--no-wait", help="Wait until the partitions are open at their new owners.")
    ] = True
    timeout: Annotated[
        float, change_option("--timeout", min=0, metavar="SECONDS", help="How long to wait; what was done stays done.")
    ] = TIMEOUT_SECONDS

    async def follow(
        self, cluster: Cluster, found: Owners, after: Assignment, wanted: Handover, tls: Tls | None, report: Report
    ) -> dict[str, Any]:
        """Wait for the handover, and return the result of the command."""
        seconds = await arrival(cluster, wanted, found.meta.key, tls, self.timeout, report) if self.wait else None
        moves = moves_json(found.assignment, after)
        return {"moves": moves, "seconds": None if seconds is None else round(seconds, 3)}


def moves_json(before: Assignment, after: Assignment) -> list[dict[str, Any]]:
    return [
        {"partition": number, "from": was.server, "to": now.server, "generation": now.generation}
        for number, (was, now) in enumerate(zip(before.owners, after.owners, strict=True))
        if was != now
    ]


def compact_list(numbers: Collection[int]) -> str:
    """Format partitions as one word, like `0-3,7`."""
    return format_numbers(sorted(numbers)).replace(" ", "")


# -- servers -----------------------------------------------------------------------------------------------------------


def list_(*, target: CommandTarget, output: AnyForm = "table") -> int:
    """Show the servers: the partitions that they own, how many of these are open, and which server leads. A server that
    is expected and not registered is `down` until it is started or removed with `waltzctl server remove`.

    \b
    Examples:
      waltzctl server list
      waltzctl server list -o json
    """
    put(server_list(snapshot_of(target)), output)
    return EXIT_OK


def drain(
    *,
    server: ServerName,
    is_undo: Annotated[bool, Option("--undo", help="Let a server that drains take partitions again.")] = False,
    command: ChangeCommand,
    waiting: WaitOptions,
) -> int:
    """Move all partitions of a server to other servers and assign it no new ones, before it is stopped. The command
    ends when the server owns nothing and its partitions are open elsewhere. The server takes part again after --undo or
    after a restart.

    \b
    Examples:
      waltzctl server drain server-1 --dry-run
      waltzctl server drain server-1 --yes --reason "new memory"
      waltzctl server drain server-1 --undo
    """
    tls = command.target.tls

    async def prepare(cluster: Cluster) -> Change:
        found = await Owners.of(cluster)
        after: Assignment | None
        if is_undo:
            made, after = undrain_plan(found, server)
            before = {move["partition"]: move["generation"] - 1 for move in moves_json(found.assignment, after)}
            wanted = Handover(numbers=tuple(before), to={}, before=before)
        else:
            numbers = await _to_give_away(found, server, tls)
            made, after = drain_plan(found, server, numbers)
            wanted = Handover(numbers=tuple(numbers), to={}, leaving=server)

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            async with found.admin(server, tls) as admin, first_contact(found.server(server).admin_listen, tls):
                await admin.drain(not is_undo)
            if after is None:
                return {"moves": [], "seconds": None}
            return await waiting.follow(cluster, found, after, wanted, tls, report)

        return Change(plan=made, do=do, is_planned_again=not is_undo)

    return command.perform(prepare)


def remove(*, server: ServerName, command: ChangeCommand) -> int:
    """Remove a server that was stopped for good from the list of expected servers; until then `waltzctl status` reports
    it as missing. A running server is refused: stop it first. A server that is started again is expected again.

    \b
    Examples:
      waltzctl server remove server-3 --dry-run
      waltzctl server remove server-3 --yes --reason "the machine is given back"
    """

    async def prepare(cluster: Cluster) -> Change:
        up, expected = await cluster.servers(), await cluster.expected_servers()
        if server not in {**up, **expected}:
            raise unknown("server", server, {**up, **expected})
        made = Plan(
            verb="server remove",
            subject=server,
            steps=(f"{server} is not expected to be up any more",),
            unsafe=(f"{server} is up: stop it first, or it is expected again at once",) if server in up else (),
        )

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            await cluster.forget_server(server)
            return {}

        return Change(plan=made, do=do, is_planned_again=True)

    return command.perform(prepare)


async def _to_give_away(found: Owners, server: str, tls: Tls | None) -> list[int]:
    """Return the partitions that the server owns or has not closed yet."""
    async with found.admin(server, tls) as admin, first_contact(found.server(server).admin_listen, tls):
        reported = await admin.describe()
    assigned = (number for number, owner in enumerate(found.assignment.owners) if owner.server == server)
    return sorted({*assigned, *(held.partition for held in reported.partitions)})


def drain_plan(found: Owners, server: str, numbers: Sequence[int]) -> tuple[Plan, Assignment | None]:
    """Plan the drain, with the assignment that the leader will make; None if no server could take the partitions."""
    before = found.server(server)
    servers = {**found.servers, server: replace(before, is_draining=True)}
    steps = [] if before.is_draining else [f"{server} takes no partitions any more"]
    if all(other.is_draining for other in servers.values()):
        nobody = f"{server} is the only server that takes partitions"
        unsafe = f"{nobody}: nobody would take over {format_numbers(numbers)}" if numbers else nobody
        return Plan(verb="server drain", subject=server, steps=tuple(steps), unsafe=(unsafe,) if steps else ()), None
    after = found.planned(servers, found.preferences)
    steps += found.leader_moves(after)
    if numbers and not steps:
        steps = [f"{server} closes {format_numbers(numbers)}"]
    return Plan(verb="server drain", subject=server, steps=tuple(steps)), after


def undrain_plan(found: Owners, server: str) -> tuple[Plan, Assignment]:
    before = found.server(server)
    after = found.planned({**found.servers, server: replace(before, is_draining=False)}, found.preferences)
    steps = (f"{server} takes partitions again", *found.leader_moves(after)) if before.is_draining else ()
    return Plan(verb="server drain --undo", subject=server, steps=steps, danger=Danger.NONE), after


# -- once --------------------------------------------------------------------------------------------------------------


def transfer(
    *,
    partitions: Annotated[str, Argument(metavar="PARTITIONS")],
    server: Annotated[
        str, Option("--to", metavar="SERVER", help="The server that is to own them.", autocompletion=known_servers)
    ],
    command: ChangeCommand,
    waiting: WaitOptions,
) -> int:
    """Move PARTITIONS (like 0-3,7) to another server once. The plan shows which partitions move back so that servers
    own equally many. A transfer is refused if the cluster would undo it at once, because a partition is preferred
    elsewhere. Clients continue by themselves; their transactions wait for a moment.

    \b
    Examples:
      waltzctl partition transfer 0 --to server-2 --dry-run
      waltzctl partition transfer 0,1 --to server-1 --yes --reason "the new machine" -o json
    """
    numbers = chosen(command.target, partitions)

    async def prepare(cluster: Cluster) -> Change:
        found = await Owners.of(cluster)
        after = transfer_of(found, numbers, server)
        to = {move["partition"]: move["to"] for move in moves_json(found.assignment, after)}

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            await save(cluster, found, after)
            wanted = Handover(numbers=tuple(to), to=to)
            return await waiting.follow(cluster, found, after, wanted, command.target.tls, report)

        return Change(plan=transfer_plan(found.assignment, after, numbers), do=do)

    return command.perform(prepare)


def transfer_of(found: Owners, numbers: Collection[int], to: str) -> Assignment:
    """Return the assignment after a transfer; raise if the transfer is impossible or would be undone."""
    found.check_partitions(numbers)
    if found.server(to).is_draining:
        raise WouldNotLast(
            f"{to} is draining",
            next_step=f"let it take part again with `waltzctl server drain {to} --undo`, or name another server",
        )
    after = transferred(found.assignment, found.servers, found.preferences, numbers, to)
    against = obstacles(after, found.servers, found.preferences, numbers, to)
    if against:
        listed = compact_list(numbers)
        if all(after.owners[number].server == to for number in numbers):
            first = f"prefer this server permanently, `waltzctl partition preferred {listed} --server {to}`"
        else:
            first = "name fewer partitions, as servers own equally many"
        raise WouldNotLast(
            f"partition transfer {listed} to {to}: {'; '.join(against)}",
            next_step=f"{first}; a preference that an operator set goes away with `waltzctl partition preferred PARTITIONS "
            "--clear`",
        )
    return after


def transfer_plan(before: Assignment, after: Assignment, numbers: Collection[int]) -> Plan:
    """Plan the moves of a transfer: first the requested ones, then the ones that follow from them."""
    both = enumerate(zip(before.owners, after.owners, strict=True))
    asked = Assignment(owners=tuple(now if number in numbers else was for number, (was, now) in both))
    steps = [f"move {part}" for part in moved(before, asked)]
    steps += [f"move {part}, so that servers own equally many" for part in moved(asked, after)]
    return Plan(verb="partition transfer", subject=compact_list(numbers), steps=tuple(steps))


async def save(cluster: Cluster, found: Owners, after: Assignment) -> None:
    """Write the assignment only if nothing was moved since the plan; else raise an error that names what was."""
    try:
        await cluster.save_assignment(after, found.version)
    except ChangedMeanwhile as error:
        now, _ = await cluster.assignment()
        changes = "; ".join(moved(found.assignment, now))
        raise ChangedMeanwhile(
            f"partitions moved meanwhile: {changes}" if changes else error.message,
            not_done="no partition was moved by this command",
            next_step="plan again with --dry-run",
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
    command: ChangeCommand,
    output: AnyForm = "table",
) -> int:
    """Show which servers should own which partitions, or set that with --server. A preference is followed as far as
    servers own equally many partitions, and lasts until --clear. It overrides `preferred` in the configuration of
    servers.

    \b
    Examples:
      waltzctl partition preferred
      waltzctl partition preferred 0,2 --server server-1 --yes
      waltzctl partition preferred 0,2 --clear --yes -o json
    """
    numbers = None if partitions is None else chosen(command.target, partitions)
    if server is None and not clear:
        return _list_preferences(command.target, numbers, output)
    if server is not None and clear:
        raise BadArgument("--server and --clear cannot be combined")
    if numbers is None:
        raise BadArgument("no partitions are given", next_step="name them, like 0-3,7")
    if output not in ("table", "json"):
        raise BadArgument(f"-o {output} is for the list only", next_step="use -o table or -o json")

    async def prepare(cluster: Cluster) -> Change:
        found = await Owners.of(cluster)
        found.check_partitions(numbers)
        if server is not None:
            found.server(server)
        wanted = preferences_after(found.preferences, numbers, server)
        after = found.planned(found.servers, wanted)

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            try:
                await cluster.save_preferences(wanted, found.preferences_version)
            except ChangedMeanwhile as error:
                raise ChangedMeanwhile(
                    "another operator changed the preferences meanwhile",
                    next_step="look at it with `waltzctl partition preferred`",
                ) from error
            unmet = {
                number: why
                for number in numbers
                if server is not None and (why := unmet_preference(number, server, after, found.servers))
            }
            for number, why in unmet.items():
                typer.echo(f"Partition {number} does not go to {server} now: {why}.", err=True)
            return {"moves": moves_json(found.assignment, after), "unmet": {str(n): why for n, why in unmet.items()}}

        return Change(plan=preference_plan(found, wanted, after, numbers, server), do=do)

    return command.perform(prepare)


def preferences_after(before: Preferences, numbers: Collection[int], server: str | None) -> Preferences:
    kept = {number: name for number, name in before.partitions.items() if number not in numbers}
    return Preferences(partitions=kept if server is None else kept | dict.fromkeys(numbers, server))


def preference_plan(
    found: Owners, wanted: Preferences, after: Assignment, numbers: Collection[int], server: str | None
) -> Plan:
    steps: tuple[str, ...] = ()
    if wanted != found.preferences:
        before = found.preferences.partitions
        changed = [number for number in sorted(numbers) if wanted.partitions.get(number) != before.get(number)]
        steps = (f"prefer {server or 'no server'} for {format_numbers(changed)}", *found.leader_moves(after))
    return Plan(verb="partition preferred", subject=compact_list(numbers), steps=steps)


def unmet_preference(number: int, server: str, after: Assignment, servers: Mapping[str, ServerMeta]) -> str:
    """Return why a partition is not at its preferred server; empty if it is."""
    if after.owners[number].server == server:
        return ""
    if server not in servers:
        return f"{server} is not up"
    if servers[server].is_draining:
        return f"{server} is draining"
    return f"{server} has its even share without it"


def _list_preferences(target: ClusterTarget, numbers: Collection[int] | None, output: str) -> int:
    found = using(target, Owners.of)
    found.check_partitions(numbers or (), not_done="nothing was asked")
    heads = ("servers", "by", "owner", "honoured", "why not")
    put(
        Listing(
            kind="preferences",
            columns=(Column("partition", is_right=True), *map(Column, heads)),
            rows=[row for row in preference_rows(found) if numbers is None or row["partition"] in numbers],
            nothing="No partition is preferred at any server: they are shared evenly, and stay where they are.",
        ),
        output,
    )
    return EXIT_OK


def preference_rows(found: Owners) -> list[dict[str, Any]]:
    by_servers = preferring(found.servers, Preferences(partitions={}), len(found.assignment.owners))
    rows = []
    for number, owner in enumerate(found.assignment.owners):
        wanted = found.preferences.partitions.get(number)
        names = by_servers.get(number, ()) if wanted is None else (wanted,)
        if not names:
            continue
        why = "" if owner.server in names else unmet_preference(number, names[0], found.assignment, found.servers)
        by = "server" if wanted is None else "operator"
        rows.append({"partition": number, "servers": list(names), "by": by, "owner": owner.server, "honoured": not why,
                     "why_not": why})  # fmt: skip
    return rows


# -- waiting for them --------------------------------------------------------------------------------------------------


CALL_SECONDS = 5.0
PAUSE_SECONDS = 0.1
"""Seconds between two snapshots: what a server reports is in no document that could be watched."""
Reports = Mapping[str, ServerDescription | WaltzError]


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Partitions that are waited for, and where they may be."""

    numbers: tuple[int, ...]
    to: Mapping[int, str]
    """Partition → server that shall own it, as far as decided; others may be anywhere but at `leaving`."""
    leaving: str | None = None
    """Server that must have closed them all; None if no server is drained."""
    before: Mapping[int, int] = field(default_factory=dict)
    """Partition → generation that must end first, while the leader still has to move it."""

    def servers(self, assignment: Assignment) -> list[str]:
        """Return the servers to ask."""
        owners = {owner for number in self.numbers if (owner := assignment.owners[number].server) is not None}
        return sorted(owners if self.leaving is None else owners | {self.leaving})

    def completed(self, assignment: Assignment, reported: Reports) -> Handover:
        """Return the handover with the partitions that the server to drain has got since it was planned."""
        if self.leaving is None:
            return self
        more = {number for number, owner in enumerate(assignment.owners) if owner.server == self.leaving}
        there = reported.get(self.leaving)
        if isinstance(there, ServerDescription):
            more |= {held.partition for held in there.partitions}
        return replace(self, numbers=tuple(sorted({*self.numbers, *more})))

    def astray(self, assignment: Assignment) -> str:
        """Return why waiting is hopeless; empty if it is not."""
        for number, name in sorted(self.to.items()):
            owner = assignment.owners[number].server
            if owner != name:
                return f"partition {number} belongs to {owner or 'nobody'} by now, no more to {name}"
        return ""

    def waits(self, assignment: Assignment, reported: Reports) -> dict[int, str]:
        """Return a sentence for each partition that has not arrived."""
        found = {number: self._wait(number, assignment, reported) for number in self.numbers}
        return {number: wait for number, wait in found.items() if wait}

    def _wait(self, number: int, assignment: Assignment, reported: Reports) -> str:
        owner = assignment.owners[number]
        if owner.server is None:
            return "no server owns it"
        if owner.generation <= self.before.get(number, -1):
            return f"the leader has not moved it from {owner.server} yet"
        if owner.server == self.leaving:
            return f"it was not given to another server than {owner.server} yet"
        before = reported.get(self.leaving) if self.leaving is not None else None
        if isinstance(before, ServerDescription) and any(held.partition == number for held in before.partitions):
            return f"{self.leaving} is closing it"
        there = reported.get(owner.server)
        if not isinstance(there, ServerDescription):
            why = "is not up" if there is None else f"does not answer: {there.message}"
            return f"its new owner {owner.server} {why}"
        held = next((held for held in there.partitions if held.partition == number), None)
        if held is None or held.generation < owner.generation:
            return f"{owner.server} has not begun with it yet"
        if held.step == OPEN and not held.waiting:
            return ""
        return held.waiting or f"{owner.server} is recovering it"


def format_waits(waits: Mapping[int, str]) -> str:
    """Describe waits, with partitions that wait for the same reason together: "0, 2: server-2 is recovering it"."""
    numbers: dict[str, list[int]] = {}
    for number, wait in sorted(waits.items()):
        numbers.setdefault(wait, []).append(number)
    return "; ".join(f"{format_numbers(found)}: {wait}" for wait, found in numbers.items())


async def arrival(cluster: Cluster, wanted: Handover, key: UUID, tls: Tls | None, timeout: float, report: Report) -> float:
    """Wait until all have arrived; return the seconds that it took. Raise `NotTakenOver` on a timeout, or if they never
    will."""
    began = time.monotonic()
    async with AdminConnections() as connections:

        async def ask(server: ServerMeta) -> ServerDescription | WaltzError:
            try:
                async with connections.to(ServerAdminClient, server, key, tls, CALL_SECONDS) as admin:
                    return await admin.describe()
            except WaltzError as error:
                return error

        while True:
            assignment, _ = await cluster.assignment()
            astray = wanted.astray(assignment)
            if astray:
                raise NotTakenOver(astray, next_step="look with `waltzctl server list`, then run the command again")
            servers = await cluster.servers()
            asked = [name for name in wanted.servers(assignment) if name in servers]
            answers = await asyncio.gather(*(ask(servers[name]) for name in asked))
            reported = dict(zip(asked, answers, strict=True))
            wanted = wanted.completed(assignment, reported)
            waits = wanted.waits(assignment, reported)
            passed = time.monotonic() - began
            if not waits:
                return passed
            if passed >= timeout:
                raise NotTakenOver(f"after {timeout:g} seconds, partitions {format_waits(waits)}")
            report(f"partitions {format_waits(waits)}")
            await asyncio.sleep(PAUSE_SECONDS)
