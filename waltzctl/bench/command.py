"""The commands under `waltzctl bench`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from waltzctl.bench import appending, chart, outage, reading
from waltzctl.bench.appending import Bench
from waltzctl.bench.drive import STAMP_BYTES
from waltzctl.bench.load import FILLING, Load
from waltzctl.bench.machine import this_machine
from waltzctl.bench.render_bench import Live
from waltzctl.bench.render_bench import result as show
from waltzctl.bench.result import Result
from waltzctl.bench.site import Site, scratch
from waltzctl.blueprint import SERVERS_MAX, STORAGES_MAX
from waltzctl.certificate import secured
from waltzctl.interruption import ending_in_order
from waltzctl.main import exit_codes
from waltzd.client import loop
from waltzd.daemon.settings import parse_size
from waltzd.errors import EXIT_OK, EXIT_USAGE, BadArgument
from waltzd.protocol.locks import Mode

Options = dict[str, Any]


class Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ValueError:
            self.fail(f"{value!r} is no size; say 512, 4KiB or 1MB", param, ctx)


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_there = _options(
    click.option("--at", metavar="ADDRESSES", help="Load a cluster that is there: host:port,host:port of its servers."),
    click.option("--yes", is_flag=True, help="Do not ask: what is written to a cluster stays in its log for good."),
    secured,
)
_made = _options(
    click.option("--directory", type=click.Path(path_type=Path, file_okay=False, exists=True),
                 help="Where to make the cluster of this run; the temporary directory by default."),
    click.option("--storages", type=click.IntRange(1, STORAGES_MAX), default=3, show_default=True),
    click.option("--servers", type=click.IntRange(1, SERVERS_MAX), default=1, show_default=True),
    click.option("--partitions", type=click.IntRange(1, 1024), default=4, show_default=True),
    click.option("--replicas", type=click.IntRange(1, 15), default=None, help="Of each partition; 3 by default."),
)  # fmt: skip
_shape = _options(
    click.option("--size", type=Size(), default=512, show_default=True, help="Bytes of a payload."),
    click.option("--spread", type=click.IntRange(1, 1024), default=None,
                 help="Use so many of the partitions; all of them by default."),
    click.option("--locks", type=click.IntRange(0, 1000), default=1, show_default=True, help="Of each transaction."),
    click.option("--keys", type=click.IntRange(1, 1_000_000), default=100_000, show_default=True,
                 help="How many different locks there are."),
    click.option("--mode", type=click.Choice(["read", "write", "append"]), default="write", show_default=True,
                 help="Of the locks."),
)  # fmt: skip
_time = _options(
    click.option("--seconds", type=click.FloatRange(0.1, 86_400), default=10.0, show_default=True, help="How long."),
    click.option("--warm-up", type=click.FloatRange(0, 3600), default=1.0, show_default=True,
                 help="Seconds before anything is counted."),
)  # fmt: skip
_output = _options(
    click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="For people, or scripts."),
    click.option("--chart", "picture", type=click.Path(path_type=Path, dir_okay=False),
                 help="Draw a picture: .png, .svg or .pdf. Needs `pip install 'waltz[charts]'`."),
)  # fmt: skip


def _producers(producers: int, batch: int = 1) -> Callable[[Any], Any]:
    return _options(
        click.option("--producers", type=click.IntRange(1, 100_000), default=producers, show_default=True,
                     help="Each hands over transactions, and waits for them."),
        click.option("--batch", type=click.IntRange(1, 10_000), default=batch, show_default=True,
                     help="How many transactions a producer hands over at once."),
    )  # fmt: skip


Work = Callable[[Site, Live], Coroutine[Any, Any, Result]]


def _run(options: Options, work: Work, *, name: str, server_settings: Mapping[str, object] | None = None) -> int:
    """Checks first, then the cluster, then the work, then the result."""
    picture: Path | None = options["picture"]
    if picture is not None:
        if picture.suffix not in chart.FORMATS:
            raise BadArgument(
                f"--chart {picture}: a picture ends in {', '.join(chart.FORMATS)}", not_done="nothing was run"
            )
        chart.check()
    if options.get("at") is not None and not options["yes"] and not _agreed(options["at"]):
        return EXIT_USAGE
    with ending_in_order(), Live(name) as live, _site(options, live, server_settings or {}) as site:
        live.say("waiting for the partitions")
        found = loop.run(_timed(site, live, work), fast=True)
    show(found, options["output"])
    if picture is not None:
        chart.draw(found, picture)
    return EXIT_OK


async def _timed(site: Site, live: Live, work: Work) -> Result:
    await site.time_round_trip()
    return await work(site, live)


def _agreed(addresses: str) -> bool:
    if click.confirm(f"Write to the cluster at {addresses}? Its log keeps what is written for good.", err=True):
        return True
    click.echo("Nothing was written.", err=True)
    return False


@contextmanager
def _site(options: Options, live: Live, server_settings: Mapping[str, object]) -> Iterator[Site]:
    if options.get("at") is not None:
        yield Site(options["at"], tls=options["tls"])
        return
    storages = options["storages"]
    with scratch(
        options["directory"],
        partitions=options["partitions"],
        storages=storages,
        servers=options["servers"],
        replicas=options["replicas"] or min(3, storages),
        server_settings=server_settings,
        say=live.say,
    ) as site:
        yield site


def _load(options: Options, **more: Any) -> Load:
    """Checked, as far as the cluster is known: one that is there says itself how many partitions it has."""
    fields = {name: options[name] for name in ("size", "locks", "keys") if name in options}
    load = Load(partitions=options["spread"] or 0, mode=Mode[options["mode"].upper()], **fields, **more)
    return load if options.get("at") is not None else load.on(options["partitions"])


def _bench(site: Site, live: Live, load: Load) -> Bench:
    told = {name: value for name, value in vars(load).items() if value is not None}
    if not load.partitions:
        told["partitions"] = "all"
    return Bench(site=site, machine=this_machine(), settings=told | {"mode": load.mode.name}, watch=live.watch)


@click.command("append", epilog=exit_codes())
@_there
@_made
@_shape
@_producers(64)
@_time
@click.option("--count", type=click.IntRange(1), help="So many transactions instead of --seconds.")
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help="So many a second, answered or not; a latency then counts from when the transaction was due.",
)
@_output
def append(**options: Any) -> int:  # fmt: skip
    """Append transactions, each with locks of its own, and measure how many a second are committed and how long each takes.
    Without --at it makes a cluster on this machine for this run, which is removed again.

    \b
    Examples:
      waltzctl bench append --seconds 2
      waltzctl bench append --producers 8 --batch 500 --seconds 2
      waltzctl bench append --producers 1 --rate 200 --seconds 2 -o json
    """
    seconds = options["seconds"] if options["count"] is None else None
    timed = {name: options[name] for name in ("producers", "batch", "warm_up", "rate", "count")}
    load = _load(options, seconds=seconds, **timed)
    return _run(options, lambda site, live: appending.append(_bench(site, live, load), load), name="append")


@click.command("mixed", epilog=exit_codes())
@_there
@_made
@_shape
@_producers(64)
@_time
@click.option(
    "--readers",
    type=click.IntRange(1, 1000),
    default=2,
    show_default=True,
    help="Clients that apply everything that is written.",
)
@click.option(
    "--behind",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="So many transactions are written first, and readers begin before them.",
)
@_output
def mixed(**options: Any) -> int:  # fmt: skip
    """Append while readers follow, and measure both: how long a transaction takes to be committed, and how long until every
    reader has applied it.

    \b
    Examples:
      waltzctl bench mixed --seconds 2
      waltzctl bench mixed --producers 8 --batch 100 --readers 4 --seconds 2
      waltzctl bench mixed --readers 1 --behind 100000 --seconds 2
    """
    timed = {name: options[name] for name in ("producers", "batch", "warm_up", "seconds")}
    load = _load(options, **timed)
    if load.size < STAMP_BYTES:
        raise BadArgument(f"--size {load.size}: a payload has to carry a time of {STAMP_BYTES} bytes")
    readers, behind = options["readers"], options["behind"]
    return _run(options, lambda site, live: appending.mixed(_bench(site, live, load), load, readers, behind), name="mixed")


@click.command("locks", epilog=exit_codes())
@_there
@_made
@_shape
@_time
@click.option(
    "--producers",
    type=click.IntRange(1, 100_000),
    default=64,
    show_default=True,
    help="Each wants one transaction after the other.",
)
@click.option("--clients", type=click.IntRange(1, 1000), default=4, show_default=True, help="Each with a view of its own.")
@click.option(
    "--skew",
    type=click.FloatRange(0, 10),
    default=0.0,
    show_default=True,
    help="0: every lock as often; above: Zipf's law, the larger the more often the same ones.",
)
@_output
def locks(**options: Any) -> int:  # fmt: skip
    """Let producers want the same locks, build again whatever is refused, and measure how many attempts are refused and how
    long a transaction takes in the end.

    \b
    Examples:
      waltzctl bench locks --keys 100 --seconds 2
      waltzctl bench locks --keys 10000 --skew 1.1 --clients 8 --seconds 2
    """
    timed = {name: options[name] for name in ("producers", "warm_up", "seconds", "skew")}
    load = _load(options, **timed)
    clients = options["clients"]
    return _run(options, lambda site, live: appending.locks(_bench(site, live, load), load, clients), name="locks")


@click.command("feed", epilog=exit_codes())
@_made
@_shape
@click.option("--count", type=click.IntRange(1000), default=200_000, show_default=True, help="Transactions to read.")
@_output
def feed(**options: Any) -> int:
    """Fill a log, then read it with one client: the older half from the storages' disks (cold), the newer half from its
    owner's memory (hot), with payloads and without.

    \b
    Examples:
      waltzctl bench feed --count 20000
      waltzctl bench feed --count 20000 --size 128 --partitions 1
    """
    load = _load(options, producers=8, batch=FILLING, seconds=None, count=options["count"])
    tail = {"tail_bytes_max": reading.tail_bytes(load, options["partitions"])}
    return _run(options, lambda site, live: reading.feed(_bench(site, live, load), load), name="feed", server_settings=tail)


@click.command("recovery", epilog=exit_codes())
@_made
@_shape
@click.option(
    "--count", type=click.IntRange(1000), default=200_000, show_default=True, help="Transactions that a storage misses."
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, help="How often an owner goes.")
@_output
def recovery(**options: Any) -> int:  # fmt: skip
    """Take an owner away in order and by force, and measure how long writing stands still; let a storage miss a part of the
    log, and measure how fast it gets level. Copying has no bound here (`catch_up_bytes_per_second: 0`).

    \b
    Examples:
      waltzctl bench recovery --servers 2 --rounds 1 --count 20000
      waltzctl bench recovery --servers 3 --rounds 10 -o json
    """
    if options["servers"] < 2:
        raise BadArgument("somebody has to take over: say --servers 2", not_done="nothing was run")
    load = _load(options, producers=8, batch=FILLING, seconds=None, count=options["count"])
    rounds = options["rounds"]
    return _run(
        options,
        lambda site, live: outage.recovery(_bench(site, live, load), load, rounds),
        name="recovery",
        server_settings={"catch_up_bytes_per_second": 0},
    )
