"""`waltzctl txn`: transactions as applications see them, read and appended through the servers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import click

from waltzctl.main import exit_codes
from waltzctl.reach import Reach, reaching
from waltzctl.records import render_txn
from waltzctl.records.decode import HOW, Filters, JsonPath, pattern_of
from waltzd.client.view import HEADER_MAX, HEADER_MIN
from waltzd.errors import EXIT_OK, BadArgument, BeyondLog
from waltzd.format.layout import ID_MAX

if TYPE_CHECKING:
    from waltzd.client.view import Transaction

_IDS = re.compile(r"([0-9]{1,19})(?:-([0-9]{1,19}))?")
PARTITION = click.argument("partition", metavar="PARTITION", type=click.IntRange(min=0))
IDS = click.IntRange(min=0)
HEADERS = click.IntRange(HEADER_MIN, HEADER_MAX)


def shown(command: Callable[..., int]) -> Callable[..., int]:
    """How transactions are to look, and how long to wait for them."""
    for option in (
        click.option("--timeout", "seconds", type=click.FloatRange(min=0.1), default=30.0, show_default=True,
                     metavar="SECONDS", help="How long to wait for a partition that gives nothing."),
        click.option("--decode", type=click.Choice(HOW), default="auto", help="What payloads are taken for."),
        click.option("-o", "--output", type=click.Choice(render_txn.FORMS), default="table",
                     help="For people; JSON Lines, an object for each transaction; or payloads and nothing between them."),
    ):  # fmt: skip
        command = option(command)
    return command


def spans_of(texts: Sequence[str]) -> list[tuple[int, int]]:
    """`7 10-12` as [(7, 7), (10, 12)]."""
    spans = []
    for text in texts:
        found = _IDS.fullmatch(text)
        span = (int(found[1]), int(found[2] or found[1])) if found is not None else (0, -1)
        if span[0] > span[1] or span[1] > ID_MAX:
            raise BadArgument(
                f"{text!r} is no id and no range of ids", not_done="nothing was read", next_step="write it as 7 or 10-12"
            )
        spans.append(span)
    return spans


@click.command("get", epilog=exit_codes())
@PARTITION
@click.argument("ids", metavar="ID[-ID]…", nargs=-1, required=True)
@shown
@reaching
def get(partition: int, ids: tuple[str, ...], output: str, decode: str, seconds: float, reach: Reach) -> int:
    """Show transactions of PARTITION by their ids, in the order in which they were asked for. All of them must be
    committed; otherwise none is shown.

    Ranges of any length are printed as they are read. With `-o json` every line is an object.

    \b
    Examples:
      waltzctl txn get 0 0
      waltzctl txn get 0 0-2 1 -o json
      waltzctl txn get 0 1 -o raw
    """
    from waltzctl.records.follow import between, with_client

    spans, sink = spans_of(ids), render_txn.sink(output, decode)
    highest = max(last for _, last in spans)

    async def show(client: Any) -> None:
        committed = await client.high_water_mark(partition)
        if highest > committed:
            raise BeyondLog(
                f"partition {partition} has ids up to {committed}; {highest} was asked for",
                not_done="nothing was shown",
                next_step="ask for ids that are committed" if committed >= 0 else "append something first",
            )
        for first, last in spans:
            await _pour(between(client, partition, first, last), sink)

    with_client(reach, show, seconds=seconds, typed=partition)
    return EXIT_OK


@click.command("tail", epilog=exit_codes())
@click.argument("partition", metavar="[PARTITION]", type=click.IntRange(min=0), required=False)
@click.option("--all", "is_all", is_flag=True, help="All partitions.")
@click.option(
    "-n", "--lines", metavar="N", type=click.IntRange(min=0), default=10, show_default=True, help="So many of the newest."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@shown
@reaching
def tail(
    partition: int | None, is_all: bool, lines: int, follow: bool, output: str, decode: str, seconds: float, reach: Reach
) -> int:
    """Show the newest transactions of PARTITION, or of all partitions, and with `--follow` those that come.

    Within a partition they come in the order of the log; between partitions there is no order. With `-o json` every line
    is an object (JSON Lines), so that a script can read on while they come. A fail-over is waited for, and said.

    \b
    Examples:
      waltzctl txn tail 0
      waltzctl txn tail --all -n 2 -o json
    """
    from waltzctl.records.follow import Feed, between, with_client

    if (partition is None) != is_all:
        raise click.UsageError("Name a partition, or say --all.")
    sink, feed = render_txn.sink(output, decode, with_partition=is_all), Feed()

    async def show(client: Any) -> None:
        numbers = range(client.partition_count) if partition is None else (partition,)
        marks = await asyncio.gather(*(client.high_water_mark(number) for number in numbers))
        committed = dict(zip(numbers, marks, strict=True))
        after = {number: max(-1, mark - lines) for number, mark in committed.items()}
        if follow:
            await _pour(feed.beyond(client, after), sink)
        for number, mark in committed.items():
            await _pour(between(client, number, after[number] + 1, mark), sink)
        if max(marks, default=-1) < 0:
            click.echo("There are no transactions yet.", err=True)

    _until_stopped(lambda: with_client(reach, show, feed=feed, seconds=seconds, typed=partition), is_endless=follow)
    return EXIT_OK


@click.command("grep", epilog=exit_codes())
@PARTITION
@click.option("--from", "first_id", metavar="ID", type=IDS, default=0, show_default=True, help="The first id to look at.")
@click.option("--to", "last_id", metavar="ID", type=IDS, help="The last id to look at; the newest one if it is not said.")
@click.option("--header", metavar="N", type=HEADERS, help="Those with this header.")
@click.option("--client", "client_id", metavar="N", type=click.IntRange(min=0), help="Those that this client appended.")
@click.option("--match", "pattern", metavar="REGEX", help="Those whose payload, as text, has this somewhere.")
@click.option("--json-path", "paths", metavar="PATH[=VALUE]", multiple=True,
              help="Those whose payload is JSON and has this value, like order.items[0].sku=17.")  # fmt: skip
@click.option("-n", "--lines", metavar="N", type=click.IntRange(min=1), help="Stop after so many.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@shown
@reaching
def grep(
    partition: int, first_id: int, last_id: int | None, header: int | None, client_id: int | None, pattern: str | None,
    paths: tuple[str, ...], lines: int | None, follow: bool, output: str, decode: str, seconds: float, reach: Reach,
) -> int:  # fmt: skip
    """Show the transactions of PARTITION that match all that is said. Everything in the range is read.

    VALUE is compared as JSON, so that `=17` is the number, and as text. Without it, anything that is there matches. With
    `-o json` every line is an object (JSON Lines), also with `--follow`.

    \b
    Examples:
      waltzctl txn grep 0 --match "pay(ment|out)"
      waltzctl txn grep 0 --from 1 --header 7 --json-path order.sku=17 -o json
    """  # fmt: skip
    from waltzctl.records.follow import Feed, between, with_client

    if follow and last_id is not None:
        raise click.UsageError("--to is an end, and --follow has none.")
    if last_id is not None and last_id < first_id:
        raise BadArgument(f"--from {first_id} is above --to {last_id}", not_done="nothing was read")
    filters = Filters(
        header=header,
        client=client_id,
        pattern=None if pattern is None else pattern_of(pattern),
        paths=tuple(JsonPath.parse(path) for path in paths),
    )
    sink, feed = render_txn.sink(output, decode), Feed()

    async def show(client: Any) -> None:
        committed = await client.high_water_mark(partition)
        end = committed if last_id is None else min(last_id, committed)
        found = 0
        if follow:
            # What is not there yet cannot be waited for by its id: begin at the end at the latest.
            read = feed.beyond(client, {partition: min(first_id - 1, committed)})
        else:
            read = between(client, partition, first_id, end)
        async with aclosing(read):
            async for transaction in read:
                if transaction.id < first_id or not filters.match(
                    transaction.header, transaction.request[0], transaction.payload
                ):
                    continue
                sink(transaction)
                found += 1
                if found == lines:
                    break
        if not found:
            looked = f"ids {first_id} to {end}" if end >= first_id else "no ids"
            click.echo(f"Nothing matches in {looked} of partition {partition}.", err=True)

    _until_stopped(lambda: with_client(reach, show, feed=feed, seconds=seconds, typed=partition), is_endless=follow)
    return EXIT_OK


async def _pour(read: AsyncGenerator[Transaction, None], sink: render_txn.Sink) -> None:
    async with aclosing(read):
        async for transaction in read:
            sink(transaction)


def _until_stopped(work: Callable[[], None], *, is_endless: bool) -> None:
    """Ctrl-C is the way in which what has no end is meant to end."""
    try:
        work()
    except KeyboardInterrupt:
        if not is_endless:
            raise


@click.command("append", epilog=exit_codes())
@PARTITION
@click.argument("text", metavar="[TEXT]", required=False)
@click.option("--file", metavar="FILE", help="Take the payload from a file; `-` is standard input.")
@click.option(
    "--header", metavar="N", type=HEADERS, default=0, show_default=True, help="The application's number for its kind."
)
@click.option("--lock", "locks", metavar="MODE:NAME:ID", multiple=True,
              help="A lock, like write:account:17; the mode is read, write or append.")  # fmt: skip
@click.option("--mark", metavar="ID", type=click.IntRange(min=-1),
              help="What the locks are compared with: the highest id that you have seen. Without it, all that is committed "
              "now.")  # fmt: skip
@click.option("--confirm", metavar="NAME", help="The name of a protected context, which would have to be typed.")
@click.option("--timeout", "seconds", type=click.FloatRange(min=0.1), default=30.0, show_default=True, metavar="SECONDS",
              help="How long to wait for an outcome.")  # fmt: skip
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="For people, or for scripts.")
@reaching
def append(
    partition: int, text: str | None, file: str | None, header: int, locks: tuple[str, ...], mark: int | None,
    confirm: str | None, seconds: float, output: str, reach: Reach,
) -> int:  # fmt: skip
    """Append one transaction to PARTITION, and say its id. The log keeps it for ever, and applications that read the
    partition will see it.

    When a lock fails, nothing is appended, and the exit code is 4: the refusal names the lock, the reason and the id that
    stands against it. When nobody can say in time what became of it, the exit code is 6.

    \b
    Examples:
      waltzctl txn append 0 "hello"
      waltzctl txn append 0 "{\\"order\\": {\\"sku\\": 17}}" --header 7 --lock append:order:17
    """
    from waltzctl.change import Asked, Plan, agree
    from waltzctl.records import append as appending
    from waltzctl.records.follow import with_client
    from waltzctl.safety import Danger

    wanted = [appending.lock_of(lock) for lock in locks]
    payload = appending.payload_of(text, file)
    # Who typed it meant it; only a protected cluster wants its name.
    step = f"append {len(payload):,} bytes with the header {header} to partition {partition}, for ever"
    plan = Plan(verb="txn append", subject=f"partition {partition}", steps=(step,), danger=Danger.NONE)
    asked = Asked(is_dry=False, yes=False, confirm=confirm, reason=None, override=None)
    if not agree(plan, asked, reach, output):
        return EXIT_OK
    done = with_client(
        reach,
        lambda client: appending.submit(client, partition, payload, header=header, locks=wanted, mark=mark),
        seconds=seconds,
        typed=partition,
        is_appending=True,
    )
    render_txn.submitted(done, output)
    if done.error is not None:
        raise done.error
    return EXIT_OK
