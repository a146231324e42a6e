"""The commands under `waltzctl bench`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from waltzctl.bench import chart, kinds
from waltzctl.bench.drive import STAMP_BYTES
from waltzctl.bench.kinds import Bench
from waltzctl.bench.load import FILLING, Load
from waltzctl.bench.machine import this_machine
from waltzctl.bench.result import Result
from waltzctl.bench.site import Site, scratch
from waltzctl.shell.blueprint import SERVERS_MAX, STORAGES_MAX
from waltzctl.shell.interruption import ending_in_order, left_to_the_loop
from waltzctl.shell.options import OUTPUT, From, confirmed, positive
from waltzctl.shell.reach import tls_alone
from waltzctl.show.bench import Live, result
from waltzctl.show.forms import AnyForm, put
from waltzd.client import loop
from waltzd.cluster.documents import FORMAT
from waltzd.daemon.settings import parse_size
from waltzd.errors import EXIT_OK, EXIT_USAGE, BadArgument
from waltzd.format.layout import VERSIONS
from waltzd.protocol.locks import Mode
from waltzd.wire.tls import Tls


def size_of(text: str) -> int:
    try:
        return parse_size(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no size; say 512, 4KiB or 1MB") from None


@dataclass(frozen=True, kw_only=True)
class There:
    """A cluster that is there, in place of one that is made for the run."""

    at: Annotated[
        str | None,
        Option("--at", metavar="ADDRESSES", help="Load a cluster that is there: host:port,host:port of its servers."),
    ] = None
    yes: Annotated[bool, Option("--yes", help="Do not ask: what is written to a cluster stays in its log for good.")] = (
        False
    )
    tls: Annotated[Callable[[], Tls | None], From(tls_alone)] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Made:
    """A cluster for this run."""

    directory: Annotated[
        Path | None,
        Option(
            "--directory",
            metavar="DIR",
            file_okay=False,
            exists=True,
            help="Where to make the cluster of this run; the temporary directory by default.",
        ),
    ] = None
    storages: Annotated[int, Option("--storages", min=1, max=STORAGES_MAX)] = 3
    servers: Annotated[int, Option("--servers", min=1, max=SERVERS_MAX)] = 1
    partitions: Annotated[int, Option("--partitions", min=1, max=1024)] = 4
    replicas: Annotated[int | None, Option("--replicas", min=1, max=15, help="Of each partition; 3 by default.")] = None
    format: Annotated[int, Option("--format", min=min(VERSIONS), max=max(VERSIONS), help="Of its files.")] = FORMAT


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a transaction is."""

    size: Annotated[int, Option("--size", metavar="SIZE", parser=size_of, help="Bytes of a payload.")] = 512
    spread: Annotated[
        int | None, Option("--spread", min=1, max=1024, help="Use so many of the partitions; all of them by default.")
    ] = None
    locks: Annotated[int, Option("--locks", min=0, max=1000, help="Of each transaction.")] = 1
    keys: Annotated[int, Option("--keys", min=1, max=1_000_000, help="How many different locks there are.")] = 100_000
    mode: Annotated[Literal["read", "write", "append"], Option("--mode", help="Of the locks.")] = "write"


@dataclass(frozen=True, kw_only=True)
class Shown:
    output: AnyForm = "table"
    picture: Annotated[
        Path | None,
        Option(
            "--chart",
            metavar="FILE",
            dir_okay=False,
            rich_help_panel=OUTPUT,
            help="Draw a picture: .png, .svg or .pdf. Needs `pip install 'waltzd[charts]'`.",
        ),
    ] = None


Elsewhere = Annotated[There, From(There)]
Cluster = Annotated[Made, From(Made)]
Transactions = Annotated[Shape, From(Shape)]
Result_ = Annotated[Shown, From(Shown)]
Seconds = Annotated[float, Option("--seconds", metavar="SECONDS", min=0.1, max=86_400, help="How long.")]
WarmUp = Annotated[
    float, Option("--warm-up", metavar="SECONDS", min=0, max=3600, help="Seconds before anything is counted.")
]
Producers = Annotated[
    int, Option("--producers", min=1, max=100_000, help="Each hands over transactions, and waits for them.")
]
Batch = Annotated[int, Option("--batch", min=1, max=10_000, help="How many transactions a producer hands over at once.")]


Work = Callable[[Bench], Coroutine[Any, Any, Result]]


def _run(
    work: Work,
    load: Load,
    *,
    name: str,
    made: Made,
    shown: Shown,
    there: There | None = None,
    server_settings: Mapping[str, object] | None = None,
) -> int:
    """Checks first, then the cluster, then the work, then the result."""
    there, picture = there or There(), shown.picture
    if picture is not None:
        if picture.suffix not in chart.FORMATS:
            raise BadArgument(
                f"--chart {picture}: a picture ends in {', '.join(chart.FORMATS)}", not_done="nothing was run"
            )
        chart.check()
    if there.at is not None and not there.yes and not _agreed(there.at):
        return EXIT_USAGE
    with ending_in_order(), Live(name) as live, _site(there, made, live, server_settings or {}) as site:
        live.say("waiting for the partitions")
        with left_to_the_loop():
            found = loop.run(_timed(_bench(site, live, load), work), fast=True)
    put(result(found), shown.output)
    if picture is not None:
        chart.draw(found, picture)
    return EXIT_OK


async def _timed(bench: Bench, work: Work) -> Result:
    await bench.site.time_round_trip()
    return await work(bench)


def _agreed(addresses: str) -> bool:
    if confirmed(f"Write to the cluster at {addresses}? Its log keeps what is written for good."):
        return True
    typer.echo("Nothing was written.", err=True)
    return False


@contextmanager
def _site(there: There, made: Made, live: Live, server_settings: Mapping[str, object]) -> Iterator[Site]:
    if there.at is not None:
        yield Site(there.at, tls=there.tls())
        return
    with scratch(
        made.directory,
        partitions=made.partitions,
        storages=made.storages,
        servers=made.servers,
        replicas=made.replicas or min(3, made.storages),
        format=made.format,
        server_settings=server_settings,
        reporter=live,
    ) as site:
        yield site


def _load(shape: Shape, made: Made, there: There | None = None, **more: Any) -> Load:
    """Checked, as far as the cluster is known: one that is there says how many partitions it has."""
    load = Load(
        partitions=shape.spread or 0,
        mode=Mode[shape.mode.upper()],
        size=shape.size,
        locks=shape.locks,
        keys=shape.keys,
        **more,
    )
    return load if there is not None and there.at is not None else load.on(made.partitions)


def _bench(site: Site, live: Live, load: Load) -> Bench:
    told = {name: value for name, value in vars(load).items() if value is not None}
    if not load.partitions:
        told["partitions"] = "all"
    return Bench(site=site, machine=this_machine(), settings=told | {"mode": load.mode.name}, watch=live.watch)


def append(
    *,
    there: Elsewhere,
    made: Cluster,
    shape: Transactions,
    producers: Producers = 64,
    batch: Batch = 1,
    seconds: Seconds = 10.0,
    warm_up: WarmUp = 1.0,
    count: Annotated[int | None, Option("--count", min=1, help="So many transactions instead of --seconds.")] = None,
    rate: Annotated[
        float | None,
        Option(
            "--rate",
            parser=positive,
            help="So many a second, answered or not; a latency then counts from when the transaction was due.",
        ),
    ] = None,
    shown: Result_,
) -> int:
    """Append transactions, each with locks of its own, and measure how many a second are committed and how long each takes.
    Without --at it makes a cluster on this machine for this run, which is removed again.

    \b
    Examples:
      waltzctl bench append --seconds 2
      waltzctl bench append --producers 8 --batch 500 --seconds 2
      waltzctl bench append --producers 1 --rate 200 --seconds 2 -o json
    """
    load = _load(
        shape, made, there,
        producers=producers, batch=batch, warm_up=warm_up, rate=rate, count=count,
        seconds=seconds if count is None else None,
    )  # fmt: skip

    return _run(lambda bench: kinds.append(bench, load), load, name="append", made=made, shown=shown, there=there)


def mixed(
    *,
    there: Elsewhere,
    made: Cluster,
    shape: Transactions,
    producers: Producers = 64,
    batch: Batch = 1,
    seconds: Seconds = 10.0,
    warm_up: WarmUp = 1.0,
    readers: Annotated[
        int, Option("--readers", min=1, max=1000, help="Clients that apply everything that is written.")
    ] = 2,
    behind: Annotated[
        int, Option("--behind", min=0, help="So many transactions are written first, and readers begin before them.")
    ] = 0,
    shown: Result_,
) -> int:
    """Append while readers follow, and measure both: how long a transaction takes to be committed, and how long until every
    reader has applied it.

    \b
    Examples:
      waltzctl bench mixed --seconds 2
      waltzctl bench mixed --producers 8 --batch 100 --readers 4 --seconds 2
      waltzctl bench mixed --readers 1 --behind 100000 --seconds 2
    """
    load = _load(shape, made, there, producers=producers, batch=batch, warm_up=warm_up, seconds=seconds)
    if load.size < STAMP_BYTES:
        raise BadArgument(f"--size {load.size}: a payload has to carry a time of {STAMP_BYTES} bytes")

    return _run(
        lambda bench: kinds.mixed(bench, load, readers, behind), load, name="mixed", made=made, shown=shown, there=there
    )


def locks(
    *,
    there: Elsewhere,
    made: Cluster,
    shape: Transactions,
    seconds: Seconds = 10.0,
    warm_up: WarmUp = 1.0,
    producers: Annotated[
        int, Option("--producers", min=1, max=100_000, help="Each wants one transaction after the other.")
    ] = 64,
    clients: Annotated[int, Option("--clients", min=1, max=1000, help="Each with a view of its own.")] = 4,
    skew: Annotated[
        float,
        Option(
            "--skew",
            metavar="EXPONENT",
            min=0,
            max=10,
            help="0: every lock as often; above: Zipf's law, the larger the more often the same ones.",
        ),
    ] = 0.0,
    shown: Result_,
) -> int:
    """Let producers want the same locks, build again whatever is refused, and measure how many attempts are refused and how
    long a transaction takes in the end.

    \b
    Examples:
      waltzctl bench locks --keys 100 --seconds 2
      waltzctl bench locks --keys 10000 --skew 1.1 --clients 8 --seconds 2
    """
    load = _load(shape, made, there, producers=producers, warm_up=warm_up, seconds=seconds, skew=skew)

    return _run(lambda bench: kinds.locks(bench, load, clients), load, name="locks", made=made, shown=shown, there=there)


def feed(
    *,
    made: Cluster,
    shape: Transactions,
    count: Annotated[int, Option("--count", min=1000, help="Transactions to read.")] = 200_000,
    shown: Result_,
) -> int:
    """Fill a log, then read it with one client: the older half from the storages' disks (cold), the newer half from its
    owner's memory (hot), with payloads and without.

    \b
    Examples:
      waltzctl bench feed --count 20000
      waltzctl bench feed --count 20000 --size 128 --partitions 1
    """
    load = _load(shape, made, producers=8, batch=FILLING, seconds=None, count=count)

    tail = {"tail_bytes_max": kinds.tail_bytes(load, made.partitions)}
    return _run(lambda bench: kinds.feed(bench, load), load, name="feed", made=made, shown=shown, server_settings=tail)


def recovery(
    *,
    made: Cluster,
    shape: Transactions,
    count: Annotated[int, Option("--count", min=1000, help="Transactions that a storage misses.")] = 200_000,
    rounds: Annotated[int, Option("--rounds", min=1, max=1000, help="How often an owner goes.")] = 3,
    shown: Result_,
) -> int:
    """Take an owner away in order and by force, and measure how long writing stands still; let a storage miss a part of the
    log, and measure how fast it gets level. Copying has no bound here (`catch_up_bytes_per_second: 0`).

    \b
    Examples:
      waltzctl bench recovery --servers 2 --rounds 1 --count 20000
      waltzctl bench recovery --servers 3 --rounds 10 -o json
    """
    if made.servers < 2:
        raise BadArgument("another server has to take over: say --servers 2", not_done="nothing was run")
    load = _load(shape, made, producers=8, batch=FILLING, seconds=None, count=count)

    return _run(
        lambda bench: kinds.recovery(bench, load, rounds),
        load,
        name="recovery",
        made=made,
        shown=shown,
        server_settings={"catch_up_bytes_per_second": 0},
    )
