"""What the pages about the cluster as a whole show. A page is made of parts; in the browser, a part that has changed is
replaced, and no other.

A page takes the results of the commands, and their columns. It adds where a link leads and which shape a
state has, and no figure.

Drawings are small SVGs: charts of the last minutes, and replicas as cursors relative to the committed mark.

A drawing only repeats numbers that the page has as text, and carries them in its label for screen readers.

Tables are made of the columns that the tool's own tables have (`waltzctl.show.forms`).

A cell has the text that a person reads in the terminal and, where it is a number, the value that `-o json` gives: a page
has no figure of its own. A shape and a word show what a state means; the colour only repeats it.
"""

from __future__ import annotations

import enum
import math
import shlex
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from markupsafe import Markup, escape

from waltzctl.console.watch import TRAIL_SECONDS, Seen, Watch
from waltzctl.health import top
from waltzctl.health.facts import Check, Grade, Health, HealthReport
from waltzctl.health.rates import SORTS, PartitionRates, StorageRates, by
from waltzctl.shell.cluster_target import MEANT, ClusterTarget, option, unknown
from waltzctl.show import cluster
from waltzctl.show.forms import Column, Columns, Listing
from waltzctl.show.terminal import count, printable
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView, silence
from waltzd.cluster.cluster import Cluster
from waltzd.errors import BadArgument, WaltzError


class Tone(enum.StrEnum):
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    OFF = "off"
    """Neutral: unknown, or not expected."""


SHAPES = {Tone.GOOD: "●", Tone.WARN: "▲", Tone.BAD: "■", Tone.OFF: "○"}
WORDS = {
    Tone.GOOD: "open up live pass healthy done yes leader info",
    Tone.WARN: "draining waiting degraded warn warning slow catching_up connecting settling hangs slowed stopping begun "
    "interrupted recovering unknown voting recording admitting",
    Tone.BAD: "down silent fail error critical damaged diverged given_up refused offline",
    Tone.OFF: "gone debug no leaving",
}
_TONES = {word: tone for tone, words in WORDS.items() for word in words.split()}
LONG = 48
_WORST = (Tone.BAD, Tone.WARN, Tone.OFF, Tone.GOOD)


def tone_of(value: object) -> Tone:
    """Return the tone of a state: the worst of its words, which may be a list or separated by commas."""
    words = value if isinstance(value, list | tuple) else str(value).split(",")
    tones = {_TONES.get(str(word).strip().lower().partition(" ")[0], Tone.WARN) for word in words}
    return next(tone for tone in _WORST if tone in tones)


def tone_of_outcome(value: object) -> Tone:
    """Return the tone of the outcome of a change; an unknown word is an error."""
    return _TONES.get(str(value), Tone.BAD)


@dataclass(frozen=True, kw_only=True)
class Cell:
    text: str
    number: int | float | None = None
    """What programs read."""
    href: str = ""
    tone: Tone | None = None
    drawn: Markup | None = None
    """Drawing in front of the text."""

    @property
    def is_long(self) -> bool:
        """True if the text may be broken into lines."""
        return len(self.text) > LONG

    @property
    def shape(self) -> str:
        return "" if self.tone is None else SHAPES[self.tone]


@dataclass(frozen=True, kw_only=True)
class Head:
    name: str
    key: str
    """Key of the column in JSON; "" if it is not in JSON."""
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class Grid:
    caption: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    nothing: str


Of = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class GridStyle:
    """Links, tones and drawings of the columns of a table, by column name."""

    links: Mapping[str, Of] = field(default_factory=dict)
    tones: Mapping[str, Of] = field(default_factory=dict)
    """Function that maps the value of the column to its tone."""
    drawn: Mapping[str, Of] = field(default_factory=dict)
    """Function that maps the whole row to its drawing."""
    without: Collection[str] = ()
    wide: Collection[str] = ()
    """Wide columns that are shown if a row has a value there."""


PLAIN = GridStyle()


def grid(caption: str, columns: Columns[Any], rows: Sequence[Any], style: GridStyle = PLAIN, *, nothing: str = "") -> Grid:
    shown = [
        one
        for one in columns
        if one.name
        and one.name not in style.without
        and (not one.is_wide or (one.name in style.wide and any(one.shown(row) for row in rows)))
    ]
    return Grid(
        caption=caption,
        heads=tuple(Head(name=one.name, key=one.key, is_right=one.is_of_numbers(rows)) for one in shown),
        rows=tuple(tuple(_cell(one, row, style) for one in shown) for row in rows),
        nothing=nothing,
    )


def listed(caption: str, found: Listing[Any], style: GridStyle = PLAIN, rows: Sequence[Any] | None = None) -> Grid:
    """Return a table of a listing. `rows`: the rows to show; None for all."""
    return grid(
        caption, found.columns, found.rows if rows is None else rows, style, nothing=found.nothing or "There are none."
    )


def _cell(column: Column[Any], row: Any, style: GridStyle) -> Cell:
    value = column.value(row)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(
        text=printable(column.shown(row)),
        number=value if is_number and column.key else None,
        href=style.links[column.name](row) if column.name in style.links else "",
        tone=style.tones[column.name](value) if column.name in style.tones else None,
        drawn=style.drawn[column.name](row) if column.name in style.drawn else None,
    )


WIDTH, HEIGHT = 320, 64
TOP = 4
POINTS_MAX = 120
"""Maximum number of points of a line."""
TRACK, TRACK_HEIGHT = 120, 22
MARK_X = 116
STEP = 8.0
"""Distance in units to the left for each doubling of the lag of a replica."""


@dataclass(frozen=True)
class Line:
    name: str
    values: Sequence[float | None]
    """Values over time; None if unknown at that time."""


@dataclass(frozen=True)
class Cursor:
    name: str
    behind: int
    counts: bool


def lines(times: Sequence[float], series: Sequence[Line], *, seconds: float, label: str) -> Markup:
    """Draw the last `seconds` as a chart, with the newest value at the right and 0 at the bottom. Of several values at one
    position the highest is drawn, so that no peak is lost."""
    known = [value for line in series for value in line.values if value is not None]
    high = max(known, default=0.0) or 1.0
    end = times[-1] if times else 0.0
    paths = []
    for number, line in enumerate(series):
        parts, is_open = [], False
        for at, value in thinned(times, line.values, seconds / POINTS_MAX):
            if value is None:
                is_open = False
                continue
            x = WIDTH * (1 - (end - at) / seconds)
            y = HEIGHT - (HEIGHT - TOP) * min(1.0, value / high)
            parts.append(f"{'L' if is_open else 'M'}{x:.1f} {y:.1f}")
            is_open = True
        paths.append(f'<path class="line line-{number}" d="{"".join(parts)}"/>')
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}"><path class="ground" d="M0 {HEIGHT}H{WIDTH}"/>{"".join(paths)}</svg>'
    )


def thinned(times: Sequence[float], values: Sequence[float | None], span: float) -> Iterator[tuple[float, float | None]]:
    """Yield the highest value of each span of time, every unknown value (a gap in the line), and the newest value.
    Spans begin at multiples of their length, so a drawing does not change while it moves."""
    best: tuple[float, float] | None = None
    newest = times[-1] if times else 0.0
    for at, value in zip(times, values, strict=True):
        if best is not None and (value is None or at == newest or at // span != best[0] // span):
            yield best
            best = None
        if value is None:
            yield at, None
        elif best is None or value > best[1]:
            best = at, value
    if best is not None:
        yield best


def cursors(found: Sequence[Cursor]) -> Markup:
    """Draw the replicas of a partition: the committed mark is the line at the right, and a level replica is next to it. A
    hollow cursor is a replica that does not count for the majority."""
    summary = ", ".join(f"{one.name} {f'{one.behind:,} behind' if one.behind else 'level'}" for one in found)
    drawn, radius = [], 3 if len(found) <= 3 else 2
    for place, one in enumerate(found):
        x = max(6.0, MARK_X - 4 - STEP * math.log2(1 + max(0, one.behind)))
        y = (place + 1) * TRACK_HEIGHT / (len(found) + 1)
        shape = "counts" if one.counts else "apart"
        drawn.append(
            f'<path class="rail" d="M4 {y:.1f}H{MARK_X}"/><circle class="{shape}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
        )
    return Markup(
        f'<svg class="cursors" viewBox="0 0 {TRACK} {TRACK_HEIGHT}" width="{TRACK}" height="{TRACK_HEIGHT}" role="img" '
        f'aria-label="{escape(summary or "no replica is known")}">{"".join(drawn)}'
        f'<path class="mark" d="M{MARK_X} 0V{TRACK_HEIGHT}"/></svg>'
    )


ROWS = 100
"""Rows of one page of a table."""
T = TypeVar("T")
HEALTH = {Health.HEALTHY: Tone.GOOD, Health.DEGRADED: Tone.WARN, Health.DOWN: Tone.BAD}


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    template: str
    given: Mapping[str, Any]


def part(name: str, template: str = "", /, **given: Any) -> Part:
    """Return a part that is rendered by a template, by default the one with its name."""
    return Part(name=name, template=f"{template or name}.html", given=given)


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    commands: Sequence[str]
    """Commands that print the same data."""
    parts: Sequence[Part]
    polls: int = 1
    """Number of polls after which a followed page is rendered again; 0 for never."""


@dataclass(frozen=True, kw_only=True)
class PageRequest:
    """Request of a browser for a page."""

    watch: Watch
    seen: Seen
    query: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    """Name of the object in the path; "" if the page has none."""

    @property
    def target(self) -> ClusterTarget:
        return self.watch.target

    @property
    def report(self) -> HealthReport:
        found = self.seen.report
        assert found is not None, "the first poll succeeded"
        return found

    @property
    def snapshot(self) -> ClusterSnapshot:
        return self.report.snapshot

    async def cluster(self) -> Cluster:
        """Return the documents of the cluster; raise while ZooKeeper does not answer."""
        return await self.watch.poll.cluster()

    def command(self, *words: object) -> str:
        """Return a command line, with the options that select the cluster of this console."""
        return shlex.join(["waltzctl", *map(str, words), *cluster_options(self.target)])

    def number(self, name: str, least: int, most: int) -> int | None:
        text = self.query.get(name, "").strip()
        if not text:
            return None
        if not text.removeprefix("-").isdecimal() or not least <= int(text[:20]) <= most:
            raise BadArgument(
                f"{name}: {text!r} is no whole number from {least:,} to {most:,}", not_done="nothing was read"
            )
        return int(text)


Make = Callable[[PageRequest], Awaitable[Page]]


def cluster_options(target: ClusterTarget) -> list[str]:
    """Return the options that selected the cluster."""
    found = []
    for name in MEANT:
        value, origin = target.origins.get(name, ("", ""))
        if origin == option(name):
            found += [option(name), value]
    return found


def shape(tone: Tone | None) -> str:
    return SHAPES[tone] if tone is not None else ""


# -- links -------------------------------------------------------------------------------------------------------------


def of_partition(number: int) -> str:
    return f"/partitions/{number}"


def lifted(columns: Columns[T], at: int) -> Columns[Any]:
    """Return columns for rows that are tuples: each applies to the element `at`."""

    def of(column: Column[T]) -> Callable[[Any], Any]:
        return lambda row: None if row[at] is None else column.value(row[at])

    return tuple(replace(column, of=of(column), label=None, json=column.key) for column in columns)


# -- now ---------------------------------------------------------------------------------------------------------------


async def now(asked: PageRequest) -> Page:
    checks = sorted(asked.seen.checks, key=lambda check: list(cluster.GRADES).index(check.grade))
    return Page(
        title="Now",
        commands=(asked.command("status"), asked.command("top"), asked.command("doctor")),
        parts=(
            part("verdict", report=asked.report, tones=HEALTH),
            part("figures", **figures(asked.seen)),
            part(
                "doctor",
                checks=grouped([check for check in checks if check.grade is not Grade.PASS]),
                at=asked.seen.examined,
                passed=[check for check in checks if check.grade is Grade.PASS],
            ),
        ),
    )


def grouped(checks: Sequence[Check]) -> list[tuple[Tone, str, Check]]:
    """Group checks with equal findings, with the names of all: one silent daemon fails many checks."""
    found: dict[tuple[Grade, str, str], list[Check]] = {}
    for check in checks:
        found.setdefault((check.grade, check.finding, check.fix), []).append(check)
    return [(tone_of(same[0].grade.value), ", ".join(check.name for check in same), same[0]) for same in found.values()]


def figures(seen: Seen) -> dict[str, Any]:
    """Return the totals of all partitions: the columns of `top`, and three charts."""
    total = seen.rates.total if seen.rates is not None else None
    names = {"tx/s", "MB/s", "p50 ms", "p99 ms", "refused", "lag", "mounts"}
    tiles: list[Cell] = []
    for column in top.PARTITION_RATES:
        if column.name in names:
            value = column.value(total) if total is not None else None
            text = column.shown(total) if total is not None else "-"
            tiles.append(Cell(text=text, number=value, href=column.name))
    return {"tiles": tiles, "charts": charts(seen), "minutes": round(TRAIL_SECONDS / 60)}


def charts(seen: Seen) -> list[dict[str, Any]]:
    times = [point.at for point in seen.trail]

    def chart(title: str, unit: str, *fields: tuple[str, str]) -> dict[str, Any]:
        series = [Line(name, [getattr(point.total, of) for point in seen.trail]) for of, name in fields]
        values = []
        for one in series:
            known = [value for value in one.values if value is not None]
            newest = next(iter(reversed(one.values)), None)
            values.append(
                {
                    "name": one.name,
                    "now": "-" if newest is None else f"{newest:,.1f}".removesuffix(".0"),
                    "most": f"{max(known):,.1f}".removesuffix(".0") if known else "-",
                }
            )
        label = f"{title}, the last {TRAIL_SECONDS / 60:.0f} minutes: " + "; ".join(
            f"{one['name']} {one['now']} {unit} now, {one['most']} at most" for one in values
        )
        return {
            "title": title,
            "unit": unit,
            "lines": values,
            "drawn": lines(times, series, seconds=TRAIL_SECONDS, label=label),
        }

    return [
        chart("Throughput", "tx/s", ("tx", "committed")),
        chart("Latency of commits", "ms", ("p50_ms", "p50"), ("p99_ms", "p99")),
        chart("Lag of the last replica", "ids", ("lag", "behind")),
    ]


# -- partitions --------------------------------------------------------------------------------------------------------


def track(view: PartitionView) -> Any:
    owned = view.reported
    found = (
        []
        if owned is None
        else [Cursor(one.storage, owned.committed - one.durable_id, one.counts) for one in owned.replicas]
    )
    return cursors(found)


PARTITION_LOOK = GridStyle(
    links={"partition": lambda row: of_partition(row[0].partition)},
    tones={"state": tone_of},
    drawn={"replicas": lambda row: track(row[0])},
    wide={"waiting"},
)
RATES_SHOWN = ("tx/s", "MB/s", "p99 ms", "refused", "lag", "mounts")


def partition_columns(*, has_group_log: bool = False) -> Columns[Any]:
    rates = tuple(column for column in top.PARTITION_RATES if column.name in RATES_SHOWN)
    number, state, *rest, waiting = lifted(cluster.PARTITIONS, 0)
    holds = lifted((cluster.HOLDS,), 0) if has_group_log else ()
    return (number, state, waiting, *holds, *rest, *lifted(rates, 1))


async def partitions(asked: PageRequest) -> Page:
    snapshot, found = asked.snapshot, asked.seen.rates
    sort = asked.query.get("sort", "partition")
    if sort not in SORTS:
        raise BadArgument(f"sort: {sort!r} is none of {', '.join(SORTS)}", not_done="nothing was sorted")
    wanting = {view.partition for view in (*snapshot.closed, *snapshot.short)}
    rated: dict[int | None, PartitionRates] = {} if found is None else {one.partition: one for one in found.partitions}
    views = list(snapshot.partitions)
    if sort != "partition" and found is not None:
        there = {view.partition: view for view in views}
        views = [there[one.partition] for one in by(sort, found.partitions) if one.partition in there]
    is_wanting = asked.query.get("show") == "wanting"
    if is_wanting:
        views = [view for view in views if view.partition in wanting]
    chosen, pager = cut(asked, views, {"sort": sort} | ({"show": "wanting"} if is_wanting else {}))
    rows = [(view, rated.get(view.partition)) for view in chosen]
    columns = partition_columns(has_group_log=snapshot.group_log is not None)
    nothing = "No partition wants anything." if is_wanting else "The cluster has no partitions."
    return Page(
        title="Partitions",
        commands=(
            asked.command("partition", "list"),
            asked.command("top", *(() if sort == "partition" else ("--sort", sort))),
        ),
        parts=(
            part(
                "partitions",
                grid=grid("Partitions", columns, rows, PARTITION_LOOK, nothing=nothing),
                pager=pager,
                sorts=list(SORTS),
                sort=sort,
                is_wanting=is_wanting,
                wanting=len(wanting),
                total=len(snapshot.partitions),
            ),
        ),
    )


def cut(asked: PageRequest, things: Sequence[T], kept: Mapping[str, str]) -> tuple[Sequence[T], dict[str, Any]]:
    """Return one page of a list, and the data of the pager."""
    last = max(0, (len(things) - 1) // ROWS)
    number = min(asked.number("page", 0, 1_000_000) or 0, last)
    start = number * ROWS
    pager = {
        "number": number,
        "last": last,
        "kept": dict(kept),
        "first_row": start + 1 if things else 0,
        "last_row": min(start + ROWS, len(things)),
        "rows": len(things),
    }
    return things[start : start + ROWS], pager


async def partition(asked: PageRequest) -> Page:
    snapshot = asked.snapshot
    text = asked.name
    if not text.isdecimal() or len(text) > 10 or int(text) >= len(snapshot.partitions):
        raise unknown("partition", text, range(len(snapshot.partitions)) if len(snapshot.partitions) < 20 else ())
    number = int(text)
    view, trouble, meta = snapshot.partitions[number], None, None
    try:
        meta, _ = await (await asked.cluster()).partition(number)
    except WaltzError as error:  # the page is shown with the report of the owner only
        trouble = error
    listing = cluster.partition(view, meta, snapshot.moves.get(number))
    rates = (
        next((one for one in asked.seen.rates.partitions if one.partition == number), None) if asked.seen.rates else None
    )
    moves: list[tuple[str, tuple[object, ...]]] = [
        (f"move it to {one.meta.name}", ("partition", "transfer", number, "--to", one.meta.name))
        for one in snapshot.servers
        if one.meta.name != view.owner and not one.meta.is_draining
    ]
    if number in snapshot.moves:
        moves.append(("take the move of its replicas back", ("partition", "assign", number, "--cancel")))
    return Page(
        title=f"Partition {number}",
        commands=(asked.command("partition", "describe", number),),
        parts=(
            part(
                "partition",
                view=view,
                tone=tone_of(view.state),
                goal=snapshot.moves.get(number),
                about=grid(
                    "About it",
                    lifted(cluster.PARTITIONS, 0),
                    [(view, rates)],
                    GridStyle(
                        tones={"state": tone_of},
                        without={"partition", "state", "waiting"},
                        wide={"format", "generation", "session"},
                    ),
                ),
                rates=grid(
                    "In the last seconds",
                    top.PARTITION_RATES,
                    [] if rates is None else [rates],
                    GridStyle(without={"partition", "owner", "state"}),
                    nothing="Not known yet.",
                ),
                replicas=listed("Replicas", listing, GridStyle(tones={"state": tone_of})),
                track=track(view),
                recorded=(listing.content or {}).get("recorded"),
                trouble=trouble,
            ),
            *actions(asked, moves),
        ),
    )


# -- processes ---------------------------------------------------------------------------------------------------------


async def storages(asked: PageRequest) -> Page:
    rates: Sequence[StorageRates] = asked.seen.rates.storages if asked.seen.rates is not None else ()
    style = GridStyle(tones={"state": tone_of}, wide={"trouble", "version", "admin"})
    return Page(
        title="Storages",
        commands=(asked.command("storage", "list"), asked.command("top")),
        parts=(
            grids(
                "storages",
                listed("Storages", cluster.storages(asked.snapshot), style),
                grid("In the last seconds", top.STORAGE_RATES, rates, nothing="Not known yet."),
            ),
        ),
    )


async def servers(asked: PageRequest) -> Page:
    style = GridStyle(tones={"state": tone_of}, wide={"version", "error"})
    found = listed("Servers", cluster.servers(asked.snapshot), style)
    drains = [
        (f"let {view.meta.name} take partitions again", ("server", "drain", view.meta.name, "--undo"))
        if view.meta.is_draining
        else (f"let {view.meta.name} give its partitions away", ("server", "drain", view.meta.name))
        for view in asked.snapshot.servers
    ]
    return Page(
        title="Servers",
        commands=(asked.command("server", "list"),),
        parts=(grids("servers", found), *actions(asked, drains)),
    )


def actions(asked: PageRequest, found: Sequence[tuple[str, Sequence[object]]]) -> tuple[Part, ...]:
    """Return a part with commands that change something: what each does, and its words."""
    if not found:
        return ()
    commands = [(reported, asked.command(*words)) for reported, words in found]
    return (part("actions", actions=commands),)


def head(asked: PageRequest) -> Part:
    """Return the head of every page: the health of the cluster, and the time of that state."""
    seen, verdict = asked.seen, asked.report.verdict
    return part(
        "head",
        name=asked.snapshot.meta.name,
        health=str(verdict.health),
        tone=HEALTH[verdict.health],
        sentence=verdict.sentence,
        at=asked.report.at,
        lost=asked.report.lost,
        silence="" if asked.report.lost is None else silence(asked.report.lost.cause),
        error=seen.error,
        reasons=count(len(verdict.reasons), "reason") if verdict.reasons else "",
    )


def grids(
    name: str,
    *found: Grid,
    notes: Sequence[str] = (),
    remarks: Sequence[str] = (),
    has_titles: bool | None = None,
    pager: Mapping[str, Any] | None = None,
) -> Part:
    """Return a part of tables. A single table has no title of its own, unless `has_titles`."""
    titled = len(found) > 1 if has_titles is None else has_titles
    given = {"grids": found, "notes": notes, "remarks": remarks, "has_titles": titled, "pager": pager}
    return part(name, "grids", **given)
