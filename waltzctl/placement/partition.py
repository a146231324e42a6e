"""`waltzctl partition`: shows partitions and their replicas, and moves replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from typer import Argument, Option

from waltzctl.placement.daemons import Daemons
from waltzctl.placement.mover import MoveOptions, Moving, Wish, perform_moves, placement_state
from waltzctl.placement.replica_moves import Goals, MovePlan, PlacementState
from waltzctl.shell.change import ChangeCommand
from waltzctl.shell.cluster_target import CommandTarget, using
from waltzctl.shell.numbers import chosen
from waltzctl.shell.options import Misused
from waltzctl.show.cluster import partition, partitions
from waltzctl.show.forms import AnyForm, put
from waltzctl.snapshot.collector import snapshot_of
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Membership
from waltzd.errors import EXIT_OK, EXIT_UNHEALTHY, BadArgument


def list_(*, target: CommandTarget, output: AnyForm = "table") -> int:
    """List the partitions of a cluster: whether each takes transactions, its owner, its replicas, and the goal of an
    unfinished move.

    \b
    Examples:
      waltzctl partition list
      waltzctl partition list -o wide
    """
    put(partitions(snapshot_of(target)), output)
    return EXIT_OK


def describe(
    *, number: Annotated[int, Argument(min=0, metavar="PARTITION")], target: CommandTarget, output: AnyForm = "table"
) -> int:
    """Show one partition: its owner, its session, what it waits for, and the state of each replica. Exit code 10 if it
    takes no transactions.

    \b
    Examples:
      waltzctl partition describe 0
      waltzctl partition describe 3 -o json
    """

    async def ask(cluster: Cluster) -> tuple[PlacementState, Any]:
        now = await placement_state(cluster, Daemons(target.tls))
        now.check_partitions([number])
        meta, _ = await cluster.partition(number)
        return now, meta

    now, meta = using(target, ask)
    put(partition(now.found.partitions[number], meta, now.found.moves.get(number)), output)
    return EXIT_OK if now.found.partitions[number].is_open else EXIT_UNHEALTHY


def assign(
    *,
    numbers: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    new: Annotated[str | None, Option("--to", metavar="STORAGE,…", help="Storages that get a replica.")] = None,
    old: Annotated[str | None, Option("--off", metavar="STORAGE,…", help="Storages whose replica is removed.")] = None,
    is_cancel: Annotated[bool, Option("--cancel", help="Cancel unfinished moves.")] = False,
    options: Moving,
    command: ChangeCommand,
) -> int:
    """Move replicas of PARTITIONS (like 0-3,7): add one on each storage of --to, and remove those on the storages of --off.
    A new replica is copied first, and becomes a member when it is level. Then old replicas are removed, and their files are
    set aside. Clients can write meanwhile. The command is refused if a partition would lose its majority.

    Without --to and --off, resume the unfinished moves of PARTITIONS, or of all partitions. Their copy limit stays in force
    unless --rate sets another one. With --cancel, remove the replicas that are still being copied; members stay where they
    are, and finished moves are not undone.

    \b
    Examples:
      waltzctl partition assign 0 --to storage-2 --yes
      waltzctl partition assign 0-1 --to storage-1,storage-2 --dry-run
      waltzctl partition assign 0 --off storage-3 --dry-run
      waltzctl partition assign --dry-run
      waltzctl partition assign 0-1 --cancel --dry-run
    """
    changes = new is not None or old is not None
    if (changes and numbers is None) or (changes and is_cancel):
        raise Misused("Name PARTITIONS with --to and --off; --cancel goes without them.")

    def aim(now: PlacementState, chosen: list[int]) -> Goals:
        if not changes:
            return _unfinished(now, chosen, is_cancel=is_cancel)
        more = {now.storage(name).name for name in _names(new)} if new is not None else set()
        less = {now.storage(name).name for name in _names(old)} if old is not None else set()
        return {number: tuple(sorted({*now.goals[number], *more} - less)) for number in chosen}

    verb = "partition assign --cancel" if is_cancel else "partition assign"
    return _relocate(verb, numbers, aim, command, options, keeps_rate=not changes and not is_cancel)


def _unfinished(now: PlacementState, chosen: list[int], *, is_cancel: bool) -> Goals:
    """Return the goals of unfinished moves, or the present places of the replicas if the moves are cancelled."""
    under_way = {number: goal for number, goal in now.found.moves.items() if number in chosen}
    if not is_cancel:
        return under_way
    return {
        number: tuple(sorted(name for name, role in now.roles(number).items() if role is Membership.MEMBER))
        for number in under_way
    }


def auto_assign(
    *,
    replicas: Annotated[
        int | None, Option("--replicas", min=1, max=15, help="Replicas of each partition. Default: unchanged.")
    ] = None,
    options: Moving,
    command: ChangeCommand,
) -> int:
    """Spread the replicas of all partitions over the groups, and evenly over the storages, with as few copies as
    possible. Replicas that are spread already stay.

    \b
    Examples:
      waltzctl partition auto-assign --dry-run
      waltzctl partition auto-assign --yes
    """
    return spread_all("partition auto-assign", replicas, command, options)


def spread_all(verb: str, replicas: int | None, command: ChangeCommand, options: MoveOptions) -> int:
    def aim(now: PlacementState, _chosen: list[int]) -> Goals:
        return now.spread(now.groups, {number: replicas or len(names) for number, names in now.goals.items()})

    return _relocate(verb, None, aim, command, options)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise BadArgument(f"{text!r} is not a list of storages", next_step="write it as storage-1,storage-2")
    return names


def _relocate(
    verb: str,
    numbers: str | None,
    aim: Callable[[PlacementState, list[int]], Goals],
    command: ChangeCommand,
    options: MoveOptions,
    *,
    keeps_rate: bool = False,
) -> int:
    typed = chosen(command.target, numbers) if numbers is not None else None

    def wish(now: PlacementState) -> MovePlan:
        wanted = list(now.found.logs) if typed is None else typed
        now.check_partitions(wanted)
        subject = numbers or now.found.meta.name
        return MovePlan(now=now, verb=verb, subject=subject, goals=aim(now, wanted), keeps_rate=keeps_rate)

    async def find_wish(_cluster: Cluster, _now: PlacementState) -> Wish:
        return wish

    return perform_moves(command, options, find_wish)
