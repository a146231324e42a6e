"""`waltzctl group parked`: list, replay and discard the parked transactions (dead letters) of a group.

A transaction is parked when its tries are used up or a member rejects it. It stays in the log; only the group records that
it is not done. A replay delivers it again, with all tries; if it fails again it is parked again, so a replay cannot loop.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from waltzctl.groups.command import GroupName, one_of
from waltzctl.groups.position import ASK_SECONDS, Partitions, call_server, changed, chosen
from waltzctl.records.decode import decoded
from waltzctl.records.follow import addresses_of, opened
from waltzctl.shell.change import Change as Planned
from waltzctl.shell.change import ChangeCommand
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, check_operator, using
from waltzctl.shell.progress import Report, unreported
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.forms import AnyForm, Column, Columns, Listing, put
from waltzctl.snapshot.groups import GroupView
from waltzd import Client
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.cluster import Cluster
from waltzd.errors import EXIT_OK, BadArgument, WaltzError
from waltzd.format.layout import ID_MAX
from waltzd.protocol.groups import Change, ParkedTransaction
from waltzd.wire.servers import ServerAdminClient

if TYPE_CHECKING:
    from waltzd.client.view import Transaction

AT_ONCE = 1000
"""Maximum number of ids in one answer, and in a message."""
IDS_MAX = 100_000
Ids = Annotated[
    str | None,
    Argument(metavar="[PARTITION:IDS]", help="Ids of parked transactions, as 0:17,20-25 (inclusive); or use --all."),
]
All = Annotated[bool, Option("--all", help="All parked transactions, of all partitions or of --partitions.")]


def list_(
    *,
    name: GroupName,
    numbers: Partitions = None,
    most: Annotated[int, Option("-n", min=1, max=IDS_MAX, metavar="ROWS", help="Maximum number of rows.")] = 100,
    with_payloads: Annotated[bool, Option("--payload", help="Include the transactions, read from the log.")] = False,
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """List the parked transactions of a group: number of deliveries, last member, and reason. With --payload the
    transactions are read from the log, which needs the role operator; a trimmed transaction has no payload.

    \b
    Examples:
      waltzctl group parked list mailer
      waltzctl group parked list mailer --payload -o json
    """
    if with_payloads:
        check_operator(target.tls, "read transactions")

    async def ask(cluster: Cluster) -> tuple[list[ParkedOne], bool]:
        _, group = await one_of(cluster, target.tls, name)
        found = await parked_in(cluster, target, group, await chosen(cluster, group, numbers), most + 1)
        rows = found[:most]
        if not (with_payloads and rows):
            return list(map(ParkedOne, rows)), len(found) > most
        async with _reader(cluster, target) as client:
            return [await _read(client, one) for one in rows], len(found) > most

    rows, is_more = using(target, ask)
    put(parked(name, rows, with_payloads=with_payloads, is_more=is_more), output)
    return EXIT_OK


def replay(
    *,
    name: GroupName,
    ids: Ids = None,
    is_all: All = False,
    numbers: Partitions = None,
    is_discard: Annotated[bool, Option("--discard", help="Discard them instead; the log keeps the transactions.")] = False,
    command: ChangeCommand,
) -> int:
    """Deliver parked transactions again, each with all its tries. A transaction that fails again is parked again. With
    --discard the group marks them as done without delivery.

    \b
    Examples:
      waltzctl group parked replay mailer 0:17,20-25 --yes --reason 'the address is right now'
      waltzctl group parked replay mailer 0:17 --discard --confirm mailer --reason 'sent by hand'
    """
    if is_all is (ids is not None) or (ids is not None and numbers is not None):
        raise BadArgument(
            "name the parked transactions by their ids, or use --all",
            not_done="nothing was changed",
            next_step=f"write the ids behind {name}, as 0:17,20-25, or use --all",
        )
    typed = None if ids is None else _typed(ids)

    async def prepare(cluster: Cluster) -> Planned:
        _, group = await one_of(cluster, command.target.tls, name)
        if typed is None:
            wanted = await chosen(cluster, group, numbers)
        else:
            wanted = await chosen(cluster, group, str(typed[0]))
        there: dict[int, list[int]] = {}
        for one in await parked_in(cluster, command.target, group, wanted):
            if typed is None or one.id in typed[1]:
                there.setdefault(one.partition, []).append(one.id)
        plan = Plan(
            verb="group parked replay --discard" if is_discard else "group parked replay",
            subject=name,
            steps=(
                *(_describe(number, found, is_discard=is_discard) for number, found in there.items()),
                *_absent(typed, there),
            ),
            danger=Danger.TYPED if is_discard else Danger.ASK,
        )

        async def do(cluster: Cluster, report: Report) -> Mapping[str, Any]:
            change = Change.DISCARD if is_discard else Change.REPLAY
            return {"partitions": await changed(cluster, command.target.tls, report, group, change, there)}

        return Planned(plan=plan, do=do)

    return command.perform(prepare)


def _describe(number: int, ids: Sequence[int], *, is_discard: bool) -> str:
    one, what = len(ids) == 1, "discarded" if is_discard else "delivered again"
    shown = format_numbers(ids[:AT_ONCE])
    return f"partition {number}: {len(ids):,} {'is' if one else 'are'} {what}: {'id' if one else 'ids'} {shown}"


def _absent(typed: tuple[int, Sequence[int]] | None, there: Mapping[int, Sequence[int]]) -> list[str]:
    if typed is None or not there:
        return []
    number, ids = typed
    absent = sorted(set(ids) - set(there[number]))
    return [f"note: not parked there: {format_numbers(absent[:AT_ONCE])}"] if absent else []


def _typed(text: str) -> tuple[int, Sequence[int]]:
    """Parse `0:17,20-25` as a partition and its ids."""
    number, colon, rest = text.partition(":")
    found: set[int] = set()
    for part in rest.split(","):
        first, dash, last = part.strip().partition("-")
        if not (colon and number.isdecimal() and first.isdecimal() and (not dash or last.isdecimal())):
            raise BadArgument(
                f"{text!r} is not a list of parked transactions",
                not_done="nothing was changed",
                next_step="write a partition and the ids there: 0:17,20-25",
            )
        low, high = int(first), int(last or first)
        if high > ID_MAX:
            raise BadArgument(f"{text!r}: no id is above {ID_MAX}", not_done="nothing was changed")
        if len(found) + high - low + 1 > IDS_MAX:
            raise BadArgument(f"{text!r}: more than {IDS_MAX:,} ids at once", not_done="nothing was changed")
        found |= set(range(low, high + 1))
    return int(number), sorted(found)


# -- asking ------------------------------------------------------------------------------------------------------------


async def parked_in(
    cluster: Cluster, target: ClusterTarget, group: GroupView, wanted: Sequence[int], most: int = sys.maxsize
) -> list[ParkedTransaction]:
    """Return the parked transactions by partition and id, at most `most`."""
    found: list[ParkedTransaction] = []
    for number in wanted:
        one = group.at(number)
        after, is_more = -1, one is not None and one.place.parked > 0
        while is_more and len(found) < most:
            count = min(AT_ONCE, most - len(found))

            async def ask(admin: ServerAdminClient, number: int = number, after: int = after, count: int = count) -> Any:
                return await admin.parked(group.name, number, after=after, count=count)

            part = await call_server(cluster, target.tls, unreported, ask)
            found += part.parked
            is_more = part.is_more and bool(part.parked)
            after = part.parked[-1].id if part.parked else after
    return found


@asynccontextmanager
async def _reader(cluster: Cluster, target: ClusterTarget) -> AsyncIterator[Client]:
    async with opened(target, await addresses_of(cluster, None), seconds=ASK_SECONDS) as client:
        yield client


async def _read(client: Client, one: ParkedTransaction) -> ParkedOne:
    try:
        return ParkedOne(one, await client.read(one.partition, one.id))
    except WaltzError:  # the transaction was trimmed, or its owner is down: show the row without it
        return ParkedOne(one)


# -- what people read of them ------------------------------------------------------------------------------------------


PAYLOAD_CHARACTERS = 60


def _begin(payload: Any) -> str:
    """Format a decoded payload on one line."""
    text = json.dumps(payload, ensure_ascii=False) if isinstance(payload, dict | list) else str(payload or "")
    return "".join(one if one.isprintable() else " " for one in text[:PAYLOAD_CHARACTERS])


@dataclass(frozen=True)
class ParkedOne:
    one: ParkedTransaction
    transaction: Transaction | None = None
    """Transaction from the log; None if it was not requested or was trimmed."""


PARKED: Columns[ParkedOne] = (
    Column("partition", "one.partition"),
    Column("id", "one.id"),
    Column("tries", "one.failures"),
    Column("member", "one.member"),
    Column("reason", "one.reason"),
)
WITH_PAYLOADS: Columns[ParkedOne] = (
    *PARKED,
    Column("kind", "transaction.kind"),
    Column("size", "transaction.length"),
    Column("", lambda row: row.transaction and decoded(row.transaction.payload).encoding, json="payload_encoding"),
    Column("payload", lambda row: row.transaction and decoded(row.transaction.payload).value, cell=_begin),
)


def parked(name: str, rows: Sequence[ParkedOne], *, with_payloads: bool, is_more: bool) -> Listing[ParkedOne]:
    return Listing(
        kind="parked",
        columns=WITH_PAYLOADS if with_payloads else PARKED,
        rows=rows,
        nothing=f"Nothing is parked in {name}.",
        notes=["There are more: -n shows them."] if is_more else [],
        more={"group": name, "is_more": is_more},
    )
