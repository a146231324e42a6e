"""`waltzctl partition`: who holds which replica, and moving replicas about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from typer import Argument, Option

from waltzctl.picture.look import seen
from waltzctl.placement.moves import Goals, Relocation, Situation, Wait, next_step, view_of
from waltzctl.placement.moving import MoveOptions, Moving, change_of, situation
from waltzctl.shell.change import Change, Changing, Request
from waltzctl.shell.numbers import chosen
from waltzctl.shell.reach import Meant, using
from waltzctl.show.cluster import partition, partitions, with_stars
from waltzctl.show.forms import AnyForm, Column, Columns, Listing, put
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Membership
from waltzd.errors import EXIT_OK, EXIT_UNHEALTHY, BadArgument


def list_(*, reach: Meant, output: AnyForm = "table") -> int:
    """All partitions of a cluster, a line each: whether it takes transactions, who owns it, and where its replicas are.

    \b
    Examples:
      waltzctl partition list
      waltzctl partition list -o wide
    """
    put(partitions(seen(reach)), output)
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
    options: Moving,
    request: Changing,
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

    return _relocate("partition assign", numbers, aim, request, options)


def unassign(
    *,
    numbers: Annotated[str, Argument(metavar="PARTITIONS")],
    names: Annotated[str, Option("--from", metavar="STORAGE,…", help="The storages that lose their replica.")],
    options: Moving,
    request: Changing,
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

    return _relocate("partition unassign", numbers, aim, request, options)


def auto_assign(
    *,
    replicas: Annotated[
        int | None, Option("--replicas", min=1, max=15, help="Of each partition; as many as each has by default.")
    ] = None,
    options: Moving,
    request: Changing,
) -> int:
    """Spread the replicas of all partitions over the groups, and evenly over the storages, with as few copies as
    possible. What is spread already stays where it is.

    \b
    Examples:
      waltzctl partition auto-assign --dry-run
      waltzctl partition auto-assign --yes
    """
    return spread_all("partition auto-assign", replicas, request, options)


def spread_all(verb: str, replicas: int | None, request: Request, options: MoveOptions) -> int:
    def aim(now: Situation, _chosen: list[int]) -> Goals:
        return now.spread(now.groups, {number: replicas or len(names) for number, names in now.goals.items()})

    return _relocate(verb, None, aim, request, options)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise BadArgument(f"{text!r} is no list of storages", next_step="write it as storage-1,storage-2")
    return names


def _relocate(
    verb: str,
    numbers: str | None,
    aim: Callable[[Situation, list[int]], Goals],
    request: Request,
    options: MoveOptions,
    *,
    keeps_rate: bool = False,
) -> int:
    typed = chosen(request.reach, numbers) if numbers is not None else None

    async def prepare(cluster: Cluster) -> Change:
        now = await situation(cluster, request.reach.tls)
        wanted = list(now.found.logs) if typed is None else typed
        now.check_partitions(wanted)
        subject = numbers or now.found.meta.name
        made = Relocation(now=now, verb=verb, subject=subject, goals=aim(now, wanted), keeps_rate=keeps_rate)
        return change_of(made, options, request.reach.tls)

    return request.perform(prepare)


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
    how much of them is copied. A move that no command carries out stays as it is.

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
            view = view_of(now.found, number, goal, now.roles(number), meta)
            step = next_step(view)
            copied = [sum(counts) for counts in zip(*view.copied.values(), strict=True)] or [0, 0]
            rows.append(
                {
                    "partition": number,
                    "to": list(goal),
                    "replicas": with_stars(view.roles),
                    "done": f"{100 * copied[0] // copied[1]} %" if copied[1] else None,
                    "waiting": step.why if isinstance(step, Wait) else "for a command that carries it out",
                }
            )
        return rows

    rows = using(reach, ask)
    put(Listing(kind="moves", columns=MOVE_COLUMNS, rows=rows, nothing="Nothing is being moved."), output)
    return EXIT_OK


def moves_resume(
    *,
    numbers: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    options: Moving,
    request: Changing,
) -> int:
    """Go on with moves that are written down and that no command carries out any more, those of PARTITIONS (like 0-3,7) or
    all. A bound on copying that was set for them goes on, too, unless --rate says another one.

    \b
    Examples:
      waltzctl moves resume
      waltzctl moves resume 0-1 --dry-run
    """

    def aim(now: Situation, chosen: list[int]) -> Goals:
        return {number: goal for number, goal in now.found.moves.items() if number in chosen}

    return _relocate("moves resume", numbers, aim, request, options, keeps_rate=True)


def moves_cancel(
    *,
    numbers: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    options: Moving,
    request: Changing,
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
            number: tuple(sorted(name for name, role in now.sets.partitions[number].items() if role is Membership.MEMBER))
            for number in now.found.moves
            if number in chosen
        }

    return _relocate("moves cancel", numbers, aim, request, options)
