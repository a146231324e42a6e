"""`waltzctl txn`: read and append transactions through the servers, as applications do."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from waltzctl.records.decode import Filters, How, JsonPath, Sink, pattern_of, sink_for
from waltzctl.records.decode import Form as TransactionForm
from waltzctl.records.follow import Feed, Groups, between, each, mark_for, stretch, with_client
from waltzctl.shell import moment
from waltzctl.shell.change import ConfirmOptions, agree
from waltzctl.shell.cluster_target import CommandTarget
from waltzctl.shell.options import OUTPUT, From, Misused, Output
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.forms import Listing, Part, put
from waltzctl.show.terminal import size
from waltzd import Client, Lock
from waltzd.client.view import KIND_MAX, KIND_MIN, Transaction
from waltzd.disk.real import translate
from waltzd.errors import EXIT_OK, BadArgument, BeyondLog, OutcomeUnknown, TooLarge, TransactionRefused, WaltzError
from waltzd.format.layout import ID_MAX
from waltzd.protocol.locks import HISTORY_IDS_MAX, AppendOutcome, Committed, Mode, Reason, Rejected, lock_id, marked_lock

PAYLOAD_BYTES_MAX = 1 << 30
"""Maximum size of a payload that is read; servers enforce a lower limit."""
LOCK_FORM = "write it as MODE:NAME:ID with the mode read, write or append, like write:account:17"
_LOCK = re.compile(r"(?P<mode>[a-z]+):(?P<name>.+):(?P<id>[^:]+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """Append one or more transactions from the command line: parse payloads and locks, append, report the outcome.

    It is appended once, without retry. The outcome is an id, a refusal (the transaction is certainly not in the log), or
    unknown because no answer came in time. An atomic append has one outcome.
    """

    partition: int
    outcome: AppendOutcome
    size: int
    """Bytes of all payloads."""
    client: int
    mark: int
    """Highest id against which the locks were checked."""
    lock: str | None
    """Lock that failed, as `MODE:NAME:ID`; None if none did."""
    seconds: float

    @property
    def id(self) -> int | None:
        return self.outcome.id if isinstance(self.outcome, Committed) else None

    @property
    def count(self) -> int | None:
        """Number of committed transactions; `id` is the first. None if it was not committed."""
        return self.outcome.count if isinstance(self.outcome, Committed) else None

    @property
    def reason(self) -> str | None:
        return self.outcome.reason.name if isinstance(self.outcome, Rejected) else None

    @property
    def conflict_id(self) -> int | None:
        return self.outcome.conflict_id if isinstance(self.outcome, Rejected) and self.lock is not None else None

    @property
    def result(self) -> str:
        return type(self.outcome).__name__.lower()

    @property
    def error(self) -> WaltzError | None:
        """Error if the transaction is not in the log or its outcome is unknown, else None."""
        if isinstance(self.outcome, Committed):
            return None
        if isinstance(self.outcome, Rejected):
            return TransactionRefused(
                f"partition {self.partition} refused it: {self._why(self.outcome)}", next_step=self._advice(self.outcome)
            )
        return OutcomeUnknown(
            f"partition {self.partition} did not report the outcome in time",
            next_step=f"when the partition takes transactions again, look for it with `waltzctl txn grep {self.partition} "
            f"--after {self.mark} --client {self.client}`, before you append it again",
        )

    def _why(self, refused: Rejected) -> str:
        at = f"{refused.conflict_id}, above the mark {self.mark}"
        return (
            f"{refused.reason.name}, "
            + {
                Reason.CONFLICT: f"the lock {self.lock} was marked by transaction {at}",
                Reason.IN_FLIGHT: f"the lock {self.lock} is marked by transaction {at}, which is not decided yet",
                Reason.TOO_FAR_BEHIND: f"the lock {self.lock} was forgotten, and may have been marked up to id {at}",
                Reason.OWNER_CHANGED: f"the owner is new and does not know the lock {self.lock} up to id {at}",
                Reason.NOT_IN_LOG: "a fail-over happened, and the transaction never reached the log",
            }[refused.reason]
        )

    def _advice(self, refused: Rejected) -> str:
        if refused.reason is Reason.NOT_IN_LOG:
            return "append it again"
        return (
            f"read up to id {refused.conflict_id}; if your decision still holds, append with --mark {refused.conflict_id}"
        )


def lock_of(text: str) -> Lock:
    found = _LOCK.fullmatch(text)
    modes = {mode.name.lower(): mode for mode in Mode}
    if found is None or found["mode"] not in modes:
        raise BadArgument(f"--lock {text}: this is not a lock", next_step=LOCK_FORM)
    return Lock(found["name"], lock_id(found["id"]), modes[found["mode"]])


def format_lock(lock: Lock) -> str:
    return f"{lock.mode.name.lower()}:{lock.name}:{lock.id}"


def payloads_of(texts: Sequence[str], file: str | None, *, is_atomic: bool) -> list[bytes]:
    """Return the payloads: one, or for an atomic append one for each text or line of the file."""
    if bool(texts) == (file is not None):
        raise BadArgument("give a text, or --file FILE; `--file -` reads standard input")
    if len(texts) > 1 and not is_atomic:
        raise BadArgument(
            f"{len(texts)} texts are {len(texts)} transactions",
            not_done="nothing was appended",
            next_step="quote a text that has blanks; or use --atomic to append all of them or none",
        )
    if file is None:
        return [text.encode(errors="surrogateescape") for text in texts]
    payload = _content(file)
    if not is_atomic:
        return [payload]
    if not payload:
        raise BadArgument(f"{file} has no line", not_done="nothing was appended")
    return payload.removesuffix(b"\n").split(b"\n")


def _content(file: str) -> bytes:
    try:
        if file == "-":
            payload = sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1)
        else:
            with Path(file).open("rb") as opened:
                payload = opened.read(PAYLOAD_BYTES_MAX + 1)
    except OSError as error:
        raise translate(error, f"reading {file}") from error
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise TooLarge(f"{file} has more than {PAYLOAD_BYTES_MAX} bytes", next_step="append a smaller payload")
    return payload


async def submit(
    client: Client,
    partition: int,
    payloads: Sequence[bytes],
    *,
    kind: int,
    locks: Sequence[Lock],
    mark: int | None,
    is_atomic: bool,
) -> Submitted:
    """Append, and return the outcome. An atomic append is decided as a whole: the first transaction carries its locks."""
    clock = asyncio.get_running_loop().time
    committed = await client.end_position(partition, confirmed=False)  # an old position can only cause a refusal
    if mark is not None and mark > committed:
        committed = await client.end_position(partition)
    if mark is not None and mark > committed:
        raise BadArgument(
            f"--mark {mark}: no client can have seen that yet; the high-water mark of partition {partition} is {committed}",
            not_done="nothing was appended",
        )
    seen = committed if mark is None else mark
    began = clock()
    if is_atomic:
        each = [locks, *[()] * (len(payloads) - 1)]
        kinds = [kind] * len(payloads)
        outcome = await client.append_atomic(payloads, partition=partition, kinds=kinds, locks=each, position=seen)
    else:
        outcome = await client.append(payloads[0], partition=partition, kind=kind, locks=locks, position=seen)
    failed = next(
        (format_lock(lock) for lock in locks if isinstance(outcome, Rejected) and lock.hash == outcome.lock), None
    )
    return Submitted(
        partition=partition,
        outcome=outcome,
        size=sum(map(len, payloads)),
        client=client.client_id,
        mark=seen,
        lock=failed,
        seconds=clock() - began,
    )


_IDS = re.compile(r"([0-9]{1,19})(?:-([0-9]{1,19}))?")
Partition = Annotated[int, Argument(min=0, metavar="PARTITION")]
Patience = Annotated[
    float, Option("--timeout", min=0.1, metavar="SECONDS", help="Time to wait for a partition that is not available.")
]
Decoding = Annotated[How, Option("--decode", rich_help_panel=OUTPUT, help="Encoding of payloads.")]
Form = Annotated[
    TransactionForm,
    Option(
        "-o",
        "--output",
        rich_help_panel=OUTPUT,
        help="Output format: json is one object a line; raw is the payloads, nothing between them.",
    ),
]


def _within(
    since: Annotated[
        str | None, Option("--since", metavar="TIME", help=f"First time to show, inclusive. {moment.HELP}")
    ] = None,
    before: Annotated[str | None, Option("--before", metavar="TIME", help="Time to stop at, exclusive.")] = None,
) -> moment.Within:
    now = datetime.now(UTC)
    found = moment.Within(
        since=None if since is None else moment.microseconds(since, now, "--since"),
        before=None if before is None else moment.microseconds(before, now, "--before"),
    )
    if found.since is not None and found.before is not None and found.since >= found.before:
        raise BadArgument(f"--since {since} is not earlier than --before {before}", not_done="nothing was read")
    return found


Times = Annotated[moment.Within, From(_within)]


def spans_of(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Parse `7 10-12` as [(7, 7), (10, 12)]; both ends of a range are included."""
    spans = []
    for text in texts:
        found = _IDS.fullmatch(text)
        span = (int(found[1]), int(found[2] or found[1])) if found is not None else (0, -1)
        if span[0] > span[1] or span[1] > ID_MAX:
            raise BadArgument(
                f"{text!r} is not an id or a range of ids", not_done="nothing was read", next_step="write it as 7 or 10-12"
            )
        spans.append(span)
    return spans


def get(
    *,
    partition: Partition,
    ids: Annotated[tuple[str, ...], Argument(metavar="[ID[-ID]…]")] = (),
    times: Times,
    with_locks: Annotated[
        bool, Option("--locks", help="Include locks, if the log keeps them; -o json always does.")
    ] = False,
    target: CommandTarget,
    seconds: Patience = 30.0,
    decode: Decoding = "auto",
    output: Form = "table",
) -> int:
    """Show transactions of PARTITION by id, in the given order, or by time. A range of ids includes both ends: 10-12 is 10,
    11 and 12. Nothing is shown unless all ids are committed.

    Ranges of any length are printed as they are read. With `-o json` every line is an object. Only format 1 keeps times and
    locks (`waltzctl cluster set`). The time of a transaction is from the clock of the server that committed it.

    \b
    Examples:
      waltzctl txn get 0 0
      waltzctl txn get 0 0-2 1 -o json
      waltzctl txn get 0 1 -o raw
    """
    if bool(ids) == times.is_bounded:
        raise Misused("Give either ids, or --since and --before.")
    with_locks = with_locks or output == "json"
    spans, sink = spans_of(ids), sink_for(output, decode, with_locks=with_locks)
    highest = max((last for _, last in spans), default=-1)

    async def show(client: Any) -> None:
        committed = await mark_for(client, partition, highest if spans else None)
        if highest > committed:
            raise BeyondLog(
                f"partition {partition} has ids up to {committed}, and {highest} is beyond",
                not_done="nothing was shown",
                next_step="give ids that are committed" if committed >= 0 else "append something first",
            )
        asked = [await stretch(client, partition, times, committed)] if times.is_bounded else spans
        for first, last in asked:
            await _pour(client, between(client, partition, first, last, with_locks=with_locks), sink)
        if times.is_bounded and asked[0][0] > asked[0][1]:
            typer.echo(f"Partition {partition} has no transaction in that time.", err=True)

    with_client(target, show, seconds=seconds, typed=partition, shows_timelines=output == "table")
    return EXIT_OK


def tail(
    *,
    partition: Annotated[int | None, Argument(min=0, metavar="[PARTITION]")] = None,
    is_all: Annotated[bool, Option("--all", help="All partitions.")] = False,
    lines: Annotated[
        int | None,
        Option("-n", "--lines", min=0, metavar="N", help="Number of newest transactions; 10, or all in the given time."),
    ] = None,
    times: Times,
    follow: Annotated[bool, Option("-f", "--follow", help="Go on with what comes, until Ctrl-C.")] = False,
    target: CommandTarget,
    seconds: Patience = 30.0,
    decode: Decoding = "auto",
    output: Form = "table",
) -> int:
    """Show the newest transactions of PARTITION, or of all partitions; with --follow also new ones as they are committed.

    Transactions of a partition are in log order; there is no order between partitions. With `-o json` every line is an
    object (JSON Lines), so that a script can read while more arrive. The command waits through a fail-over, and reports it.
    Only format 1 keeps times (`waltzctl cluster set`).

    \b
    Examples:
      waltzctl txn tail 0
      waltzctl txn tail --all -n 2 -o json
    """
    if (partition is None) != is_all:
        raise Misused("Name a partition, or use --all.")
    if follow and times.before is not None:
        raise Misused("--before and --follow exclude each other.")
    if lines is None and not times.is_bounded:
        lines = 10
    sink, feed = sink_for(output, decode, with_partition=is_all), Feed()

    async def show(client: Any) -> None:
        numbers = range(client.partition_count) if partition is None else (partition,)
        marks = await asyncio.gather(*(client.end_position(number, confirmed=False) for number in numbers))
        spans = {
            number: await stretch(client, number, times, mark, newest=lines)
            for number, mark in zip(numbers, marks, strict=True)
        }
        if follow:
            await _pour(client, feed.beyond(client, {number: first - 1 for number, (first, _) in spans.items()}), sink)
        for number, (first, last) in spans.items():
            await _pour(client, between(client, number, first, last), sink)
        if max(marks, default=-1) < 0:
            typer.echo("There are no transactions.", err=True)
        elif times.is_bounded and all(first > last for first, last in spans.values()):
            typer.echo("There are no transactions in that time.", err=True)

    is_table = output == "table"
    work = partial(with_client, target, show, feed=feed, seconds=seconds, typed=partition, shows_timelines=is_table)
    _until_stopped(work, is_endless=follow)
    return EXIT_OK


def grep(
    *,
    after: Annotated[int, Option("--after", min=-1, metavar="ID", help="Search after this id; -1 for all ids.")] = -1,
    through: Annotated[int | None, Option("--through", min=0, metavar="ID", help="Last id to search, inclusive.")] = None,
    kind: Annotated[
        int | None, Option("--kind", min=KIND_MIN, max=KIND_MAX, metavar="N", help="Transactions of this kind.")
    ] = None,
    client_id: Annotated[
        int | None, Option("--client", min=0, metavar="N", help="Transactions that this client appended.")
    ] = None,
    pattern: Annotated[
        str | None, Option("--match", metavar="REGEX", help="Transactions whose payload, as text, contains a match.")
    ] = None,
    paths: Annotated[
        tuple[str, ...],
        Option(
            "--json-path",
            metavar="PATH[=VALUE]",
            help="Transactions whose payload is JSON with this value, like order.items[0].sku=17.",
        ),
    ] = (),
    times: Times,
    lines: Annotated[
        int | None, Option("-n", "--lines", min=1, metavar="N", help="Stop after this number of matches.")
    ] = None,
    follow: Annotated[bool, Option("-f", "--follow", help="Go on with what comes, until Ctrl-C.")] = False,
    target: CommandTarget,
    partition: Partition,
    seconds: Patience = 30.0,
    decode: Decoding = "auto",
    output: Form = "table",
) -> int:
    """Show the transactions of PARTITION that match all given filters. All transactions after --after, through --through,
    are read.

    The value behind `=` in --json-path is compared as JSON, so that `=17` is a number, and as text. Without a value any
    value matches. With `-o json` every line is an object (JSON Lines), also with --follow.

    \b
    Examples:
      waltzctl txn grep 0 --match "pay(ment|out)"
      waltzctl txn grep 0 --after 0 --kind 7 --json-path order.sku=17 -o json
    """  # fmt: skip
    if follow and (through is not None or times.before is not None):
        raise Misused(f"{'--before' if through is None else '--through'} and --follow exclude each other.")
    if through is not None and through <= after:
        raise BadArgument(f"there are no ids after {after} through {through}", not_done="nothing was read")
    filters = Filters(
        kind=kind,
        client=client_id,
        pattern=None if pattern is None else pattern_of(pattern),
        paths=tuple(JsonPath.parse(path) for path in paths),
    )
    sink, feed = sink_for(output, decode), Feed()

    async def show(client: Any) -> None:
        committed = await mark_for(client, partition, through)
        begin, end = await stretch(client, partition, times, committed)
        begin, end = max(begin, after + 1), end if through is None else min(through, end)
        found = 0
        if follow:
            # A client cannot start behind the end of the log.
            read = feed.beyond(client, {partition: min(begin - 1, committed)})
        else:
            read = between(client, partition, begin, end)
        groups = Groups(client)
        async with aclosing(read):
            async for transaction in read:
                first = await groups.first_of(transaction)
                if transaction.id < begin or not filters.match(
                    transaction.kind, transaction.request[0], transaction.payload
                ):
                    continue
                sink(transaction, first)
                found += 1
                if found == lines:
                    break
        if not found:
            range_ = f"ids {begin} to {end}" if end >= begin else "an empty range"
            typer.echo(f"Nothing matches in {range_} of partition {partition}.", err=True)

    is_table = output == "table"
    work = partial(with_client, target, show, feed=feed, seconds=seconds, typed=partition, shows_timelines=is_table)
    _until_stopped(work, is_endless=follow)
    return EXIT_OK


def history(
    *,
    name: Annotated[str, Argument(metavar="LOCK")],
    partition: Annotated[
        int | None,
        Option("--partition", min=0, metavar="N", help="Partition to ask; without it, the partition of the lock's name."),
    ] = None,
    after: Annotated[
        int, Option("--after", min=-1, metavar="ID", help="Show only ids above this one; -1 for all ids.")
    ] = -1,
    through: Annotated[int | None, Option("--through", min=0, metavar="ID", help="Last id to show, inclusive.")] = None,
    limit: Annotated[
        int, Option("--limit", min=1, max=HISTORY_IDS_MAX, metavar="N", help="Maximum number of transactions.")
    ] = 1000,
    newest_first: Annotated[bool, Option("--newest-first", help="Start with the newest transaction.")] = False,
    target: CommandTarget,
    seconds: Patience = 30.0,
    decode: Decoding = "auto",
    output: Form = "table",
) -> int:
    """Show the committed transactions that marked LOCK, by a write or an append lock. The key indexes find them, so the
    rest of the log is not read. Only format 1 keeps locks.

    LOCK is NAME:ID, or the hash of a lock as `waltzctl txn get --locks` shows it. Give --partition with a hash, and if the
    application appends with a key, a partition or a channel.

    \b
    Examples:
      waltzctl txn history order:17 --partition 0
      waltzctl txn history seat:12A --newest-first --limit 10 -o json
    """
    lock = marked_lock(name)
    if isinstance(lock, int) and partition is None:
        raise Misused("A hash needs --partition.")
    if through is not None and through <= after:
        raise BadArgument(f"there are no ids after {after} through {through}", not_done="nothing was read")
    sink = sink_for(output, decode, with_partition=True)
    hint = " If the application chose another partition, give --partition." if partition is None else ""

    async def show(client: Any) -> None:
        found = await client.history(
            lock, partition=partition, after=after, through=through, limit=limit, newest_first=newest_first
        )
        await _pour(client, each(client, found.partition, found.ids), sink)
        if found.has_more:
            rest = f"--through {found.ids[-1] - 1}" if newest_first else f"--after {found.ids[-1]}"
            typer.echo(f"There are more; continue with {rest}.", err=True)
        elif not found.ids:
            ids = f"ids {after + 1} to {found.end}" if found.end > after else "no ids in this range"
            typer.echo(f"No transaction of partition {found.partition} marked {name} ({ids}).{hint}", err=True)

    with_client(target, show, seconds=seconds, typed=partition, shows_timelines=output == "table")
    return EXIT_OK


async def _pour(client: Client, read: AsyncGenerator[Transaction, None], sink: Sink) -> None:
    groups = Groups(client)
    async with aclosing(read):
        async for transaction in read:
            sink(transaction, await groups.first_of(transaction))


def _until_stopped(work: Callable[[], None], *, is_endless: bool) -> None:
    """Treat Ctrl-C as the normal end of an endless command."""
    try:
        work()
    except KeyboardInterrupt:
        if not is_endless:
            raise


def append(
    *,
    partition: Partition,
    texts: Annotated[tuple[str, ...], Argument(metavar="[TEXT]…")] = (),
    file: Annotated[
        str | None, Option("--file", metavar="FILE", help="Read the payload from a file; `-` is standard input.")
    ] = None,
    is_atomic: Annotated[
        bool,
        Option(
            "--atomic",
            help="Append each TEXT, or each line of the file, as a transaction: all in a row, or none. Needs format 1.",
        ),
    ] = False,
    kind: Annotated[
        int,
        Option(
            "--kind",
            min=KIND_MIN,
            max=KIND_MAX,
            metavar="N",
            help="Kind: 32 bits beside the payload, whose meaning is the application's.",
        ),
    ] = 0,
    locks: Annotated[
        tuple[str, ...],
        Option("--lock", metavar="MODE:NAME:ID", help="Lock, like write:account:17, with the mode read, write or append."),
    ] = (),
    mark: Annotated[
        int | None,
        Option(
            "--mark",
            min=-1,
            metavar="ID",
            help="What the locks are compared with: the highest id that you have seen. Without it, all that is committed "
            "now.",
        ),
    ] = None,
    confirm: Annotated[
        str | None,
        Option("--confirm", metavar="NAME", help="Confirm with the name of a protected context."),
    ] = None,
    seconds: Annotated[float, Option("--timeout", min=0.1, metavar="SECONDS", help="Time to wait for the outcome.")] = 30.0,
    target: CommandTarget,
    output: Output = "table",
) -> int:
    """Append a transaction to PARTITION, or several in one atomic append, and show the id. What is appended cannot be
    deleted: applications that read the partition will receive it.

    If a lock fails, nothing is appended, and the exit code is 4; the error names the lock, the reason and the conflicting
    id. If the outcome is not known in time, the exit code is 6.

    \b
    Examples:
      waltzctl txn append 0 "hello"
      waltzctl txn append 0 "{\\"order\\": {\\"sku\\": 17}}" --kind 7 --lock append:order:17
    """
    wanted = [lock_of(lock) for lock in locks]
    payloads = payloads_of(texts, file, is_atomic=is_atomic)
    # No question: the command line says it all. Only a protected context needs its name.
    what = f"{len(payloads):,} transactions in one atomic append, " if is_atomic else ""
    step = f"append {what}{sum(map(len, payloads)):,} bytes of kind {kind} to partition {partition}, permanently"
    plan = Plan(verb="txn append", subject=f"partition {partition}", steps=(step,), danger=Danger.NONE)
    asked = ConfirmOptions(is_dry=False, yes=False, confirm=confirm, reason=None, override=None)
    if not agree(plan, asked, target, output):
        return EXIT_OK
    done = with_client(
        target,
        lambda client: submit(client, partition, payloads, kind=kind, locks=wanted, mark=mark, is_atomic=is_atomic),
        seconds=seconds,
        typed=partition,
        is_appending=True,
    )
    put(submitted(done), output)
    if done.error is not None:
        raise done.error
    return EXIT_OK


def submitted(found: Submitted) -> Listing[Any]:
    page: list[Part] = []
    if found.id is not None and found.count is not None:
        ids = f"id {found.id}" if found.count == 1 else f"ids {found.id} to {found.id + found.count - 1}"
        page.append(f"committed: partition {found.partition}, {ids}  ({size(found.size)}, {1000 * found.seconds:.1f} ms)")
    names = ("result", "partition", "id", "count", "size", "client", "mark", "reason", "conflict_id", "lock")
    content = {name: getattr(found, name) for name in names}
    return Listing(page=page, content=content | {"milliseconds": round(1000 * found.seconds, 1)})
