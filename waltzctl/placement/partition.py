"""`waltzctl partition`: who holds which replica, and moving replicas about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from typer import Argument, Option

from waltzctl.change import Asked, Asking
from waltzctl.job import Job, perform
from waltzctl.numbers import partitions_of
from waltzctl.options import Output
from waltzctl.picture.look import look
from waltzctl.placement.moves import Wait, next_step, view_of
from waltzctl.placement.moving import Goals
from waltzctl.placement.relocation import Situation, carry_out, interrupted, plan_for, situation
from waltzctl.placement.terms import Moving, Terms
from waltzctl.progress import Say
from waltzctl.reach import Meant, Reach, using
from waltzctl.show.cluster import partition, partitions, with_stars
from waltzctl.show.forms import AnyForm, Column, Columns, Listing, put
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Role
from waltzd.errors import EXIT_OK, EXIT_UNHEALTHY, BadArgument


def list_(*, reach: Meant, output: AnyForm = "table") -> int:
    """All partitions of a cluster, a line each: whether it takes transactions, who owns it, and where its replicas are.

    \b
    Examples:
      waltzctl partition list
      waltzctl partition list -o wide
    """
    found = using(reach, lambda cluster: look(cluster.coordinator, tls=reach.tls))
    put(partitions(found), output)
    return EXIT_OK


def describe(
    *, number: Annotated[int, Argument(min=0, metavar="PARTITION")], reach: Meant, output: AnyForm = "table"
) -> int:
    """One partition: its owner, its session, what it waits for, and how each replica is. The end is 10 when it takes no
    transactions.

    \b
    Examples:
      waltzctl partition describe 0
      waltzctl partition describe 3 -o json
    """

    async def ask(cluster: Cluster) -> tuple[Situation, Any]:
        now = await situation(cluster, reach.tls)
        now.check_partitions([number])
        meta, _ = await cluster.partition(number)
        return now, meta

    now, meta = using(reach, ask)
    put(partition(now.found.partitions[number], meta, now.found.moves.get(number)), output)
    return EXIT_OK if now.found.partitions[number].is_open else EXIT_UNHEALTHY


def assign(
    *,
    numbers: Annotated[str, Argument(metavar="PARTITIONS")],
    names: Annotated[str, Option("--to", metavar="STORAGE,…", help="The storages that get a replica each.")],
    terms: Moving,
    asked: Asking,
    reach: Meant,
    output: Output = "table",
) -> int:
    """Give PARTITIONS (like 0-3,7) one more replica on each of these storages. A new replica copies first, and becomes a
    member when it is level. Writing goes on meanwhile.

    \b
    Examples:
      waltzctl partition assign 0 --to storage-2 --yes
      waltzctl partition assign 0-1 --to storage-1,storage-2 --dry-run
    """

    def aim(now: Situation, chosen: list[int]) -> Goals:
        new = [now.storage(name).name for name in _names(names)]
        return {number: tuple(sorted({*now.goals[number], *new})) for number in chosen}

    return _relocate("partition assign", numbers, aim, reach, asked, output, terms)


def unassign(
    *,
    numbers: Annotated[str, Argument(metavar="PARTITIONS")],
    names: Annotated[str, Option("--from", metavar="STORAGE,…", help="The storages that lose their replica.")],
    terms: Moving,
    asked: Asking,
    reach: Meant,
    output: Output = "table",
) -> int:
    """Take the replicas of PARTITIONS off these storages. It is refused where a partition would lose its majority. The
    files are set aside on the storage.

    \b
    Examples:
      waltzctl partition unassign 0 --from storage-3 --dry-run
      waltzctl partition unassign 0-1 --from storage-3 --dry-run -o json
    """

    def aim(now: Situation, chosen: list[int]) -> Goals:
        old = {now.storage(name).name for name in _names(names)}
        return {number: tuple(name for name in now.goals[number] if name not in old) for number in chosen}

    return _relocate("partition unassign", numbers, aim, reach, asked, output, terms)


def auto_assign(
    *,
    replicas: Annotated[
        int | None, Option("--replicas", min=1, max=15, help="Of each partition; as many as each has by default.")
    ] = None,
    terms: Moving,
    asked: Asking,
    reach: Meant,
    output: Output = "table",
) -> int:
    """Spread the replicas of all partitions over the groups, and evenly over the storages, with as few copies as
    possible. What is spread already stays where it is.

    \b
    Examples:
      waltzctl partition auto-assign --dry-run
      waltzctl partition auto-assign --yes
    """
    return spread_all("partition auto-assign", replicas, reach, asked, output, terms)


def spread_all(verb: str, replicas: int | None, reach: Reach, asked: Asked, output: str, terms: Terms) -> int:
    def aim(now: Situation, _chosen: list[int]) -> Goals:
        wanted = {number: replicas or len(names) for number, names in now.goals.items()}
        return now.spread(now.groups, wanted)

    return _relocate(verb, None, aim, reach, asked, output, terms)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise BadArgument(f"{text!r} is no list of storages", next_step="write it as storage-1,storage-2")
    return names


def _relocate(
    verb: str,
    numbers: str | None,
    aim: Callable[[Situation, list[int]], Goals],
    reach: Reach,
    asked: Asked,
    output: str,
    terms: Terms,
) -> int:
    async def prepare(cluster: Cluster) -> Job:
        now = await situation(cluster, reach.tls)
        chosen = partitions_of(numbers) if numbers is not None else list(range(now.found.meta.partitions))
        now.check_partitions(chosen)
        goals = aim(now, chosen)

        async def do(cluster: Cluster, say: Say) -> Mapping[str, Any]:
            return {"cleared": await carry_out(cluster, reach, now, goals, terms=terms, say=say)}

        plan = plan_for(now, goals, verb=verb, subject=numbers or now.found.meta.name, terms=terms)
        return Job(plan=plan, do=do, interrupted=interrupted(now, goals) if now.changed(goals) else None)

    return perform(reach, asked, output, prepare)


# -- moves that are under way ------------------------------------------------------------------------------------------

MOVE_COLUMNS: Columns[Mapping[str, Any]] = (
    Column("partition", is_right=True),
    Column("to"),
    Column("replicas"),
    Column("done", is_right=True),
    Column("waiting"),
)


def moves_list(*, reach: Meant, output: AnyForm = "table") -> int:
    """Moves of replicas that are written down and not over: where each partition's replicas shall be, where they are, and
    how much of them is copied. A move that nobody carries out stays as it is.

    \b
    Examples:
      waltzctl moves list
      waltzctl moves list -o json
    """

    async def ask(cluster: Cluster) -> list[Mapping[str, Any]]:
        now = await situation(cluster, reach.tls)
        rows = list[Mapping[str, Any]]()
        for number, goal in sorted(now.found.moves.items()):
            meta, _ = await cluster.partition(number)
            view = view_of(now.found, number, goal, now.sets.partitions.get(number, {}), meta)
            step = next_step(view)
            copied = [sum(counts) for counts in zip(*view.copied.values(), strict=True)] or [0, 0]
            rows.append(
                {
                    "partition": number,
                    "to": list(goal),
                    "replicas": with_stars(view.roles),
                    "done": f"{100 * copied[0] // copied[1]} %" if copied[1] else None,
                    "waiting": step.why if isinstance(step, Wait) else "for somebody who carries it out",
                }
            )
        return rows

    rows = using(reach, ask)
    put(Listing(kind="moves", columns=MOVE_COLUMNS, rows=rows, nothing="Nothing is being moved."), output)
    return EXIT_OK


def moves_resume(
    *,
    numbers: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    terms: Moving,
    asked: Asking,
    reach: Meant,
    output: Output = "table",
) -> int:
    """Go on with moves that are written down and that nobody carries out any more, those of PARTITIONS (like 0-3,7) or all.
    A bound on copying that was set for them goes on, too, unless --rate says another one.

    \b
    Examples:
      waltzctl moves resume
      waltzctl moves resume 0-1 --dry-run
    """

    def aim(now: Situation, chosen: list[int]) -> Goals:
        return {number: goal for number, goal in now.found.moves.items() if number in chosen}

    return _relocate("moves resume", numbers, aim, reach, asked, output, replace(terms, keeps_rate=True))


def moves_cancel(
    *,
    numbers: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    terms: Moving,
    asked: Asking,
    reach: Meant,
    output: Output = "table",
) -> int:
    """Take back moves that are not over, those of PARTITIONS (like 0-3,7) or all: replicas that still copy go away, and
    members stay where they are now. What has arrived already is not moved back.

    \b
    Examples:
      waltzctl moves cancel
      waltzctl moves cancel 0-1 --dry-run
    """

    def aim(now: Situation, chosen: list[int]) -> Goals:
        return {
            number: tuple(sorted(name for name, role in now.sets.partitions[number].items() if role is Role.MEMBER))
            for number in now.found.moves
            if number in chosen
        }

    return _relocate("moves cancel", numbers, aim, reach, asked, output, terms)
