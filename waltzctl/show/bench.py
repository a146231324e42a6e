"""The result of a benchmark, and what is seen while it runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from waltzctl.bench.counters import PERCENTILES
from waltzctl.playground.daemon import Reporter
from waltzctl.shell.progress import Waiting
from waltzctl.show.forms import Column, Columns, Listing, Page, grid
from waltzctl.show.terminal import count, size

if TYPE_CHECKING:
    from rich.console import Console

    from waltzctl.bench.counters import Counters
    from waltzctl.bench.result import ProcessUse, Result, Series

SHOW_SECONDS = 0.25


class Live(Waiting, Reporter):
    """One line on standard error that is written over; nothing when that is no terminal."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._last = 0.0

    def watch(self, counters: Counters, seconds: float) -> None:
        """What is counted so far, as of the last whole second."""
        now = time.monotonic()
        if now - self._last < SHOW_SECONDS or not counters.windows:
            return
        self._last = now
        window = counters.windows[-1]
        refused = counters.refused.total()
        share = f", {100 * refused / counters.attempts:.1f} % refused" if refused else ""
        self.say(
            f"{self._what} {seconds:5.0f} s  {window.rate:,.0f} a second, p50 {milliseconds(window.p50)}, "
            f"p99 {milliseconds(window.p99)}{share}"
        )


def milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    if value >= 1000:
        return f"{seconds:,.2f} s"
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else ""


def _megabytes(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value else ""


def _percentile(name: str, percent: float) -> Column[Series]:
    return Column(name, lambda one: _fine(one.latencies.get(percent)), is_right=True, cell=_known, json=f"{name}_seconds")


def _fine(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _known(seconds: float | None) -> str:
    return "" if seconds is None else milliseconds(seconds)


PACE: Columns[Series] = (
    Column("series", lambda one: one.name, json="name"),
    Column(
        "number", lambda one: one.count, is_right=True, cell=lambda number: f"{number:,}" if number else "", json="count"
    ),
    Column("a second", lambda one: round(one.rate, 1), is_right=True, cell=_rate, json="per_second"),
    Column(
        "MB/s", lambda one: round(one.megabytes_per_second, 1), is_right=True, cell=_megabytes, json="megabytes_per_second"
    ),
)
TOOK: Columns[Series] = (
    Column("seconds", lambda one: round(one.seconds, 3), is_right=True, cell=lambda took: f"{took:.2f}"),
)
LATENCIES: Columns[Series] = (
    *(_percentile(f"p{percent:g}", percent) for percent in PERCENTILES),
    Column(
        "max", lambda one: _fine(one.highest if one.latencies else None), is_right=True, cell=_known, json="max_seconds"
    ),
)
"""Of a second or its parts, which people read as milliseconds."""


def result(found: Result) -> Page:
    def draw(out: Console) -> None:
        _heading(out, found)
        grid(out, PACE + (LATENCIES if any(series.latencies for series in found.series) else TOOK), found.series)
        if found.refused or found.unknown:
            reasons = ", ".join(f"{reason} {number:,}" for reason, number in sorted(found.refused.items()))
            share = 100 * sum(found.refused.values()) / max(1, found.attempts)
            out.print(
                f"of {count(found.attempts, 'attempt')}, {share:.1f} % were refused ({reasons or 'none'}), "
                f"{found.unknown:,} are unknown",
                soft_wrap=True,
            )
        if found.processes:
            grid(out, _use(found), found.processes)
        for note in found.notes:
            out.print(f"Note: {note}", style="yellow", soft_wrap=True)

    things = Listing(kind="series", columns=PACE + TOOK + LATENCIES, rows=found.series)
    return Page(told=found.as_dict(), draw=draw, things=things)


def _heading(out: Console, found: Result) -> None:
    place, machine = found.place, found.machine
    out.print(f"waltzctl bench {found.bench}", style="bold")
    out.print(", ".join(f"{name} {value}" for name, value in found.settings.items()), soft_wrap=True)
    what = f"{place.durability}; {count(place.partitions, 'partition')}"
    if place.storages:
        what += f", {count(place.storages, 'storage')}, {count(place.servers, 'server')}, all on this machine"
    out.print(f"cluster {place.cluster}, Waltz {place.version}: {what}", soft_wrap=True)
    disk = ""
    if place.disk is not None:
        disk = f"; {place.disk.filesystem}, one flush takes {milliseconds(place.disk.flush_seconds)}"
    trip = ""
    if place.round_trip_seconds is not None:
        trip = f"; a call to a server takes {milliseconds(place.round_trip_seconds)}"
    out.print(
        f"{count(machine.cores, 'core')} ({machine.processor}), {size(machine.memory_bytes)}, {machine.system}, "
        f"{machine.python}, load {machine.load}{disk}{trip}",
        soft_wrap=True,
    )


_EACH: Column[ProcessUse] = Column(
    "CPU a transaction",
    lambda one: one.transaction_cpu_seconds,
    is_right=True,
    cell=lambda seconds: "" if seconds is None else f"{1e6 * seconds:,.1f} µs",
)


def _use(found: Result) -> Columns[ProcessUse]:
    """What each process used, and beside it how a storage wrote."""
    storages = {storage.name: storage for storage in found.storages}

    def written(name: str, field: str, cell: Any) -> Column[ProcessUse]:
        def value(one: ProcessUse) -> Any:
            return getattr(storages[one.name], field) if one.name in storages else None

        return Column(name, value, is_right=True, cell=lambda number: "" if number is None else cell(number))

    columns: Columns[ProcessUse] = (
        Column("process", lambda one: one.name),
        Column("CPU", lambda one: one.cpu_share, is_right=True, cell=lambda share: f"{100 * share:.0f} %"),
        *((_EACH,) if any(one.transaction_cpu_seconds is not None for one in found.processes) else ()),
        Column("memory", lambda one: one.memory_bytes, is_right=True, is_size=True),
    )
    if not storages:
        return columns
    return (
        *columns,
        written("flushes/s", "flushes_per_second", "{:,.0f}".format),
        written("records a flush", "records_per_flush", "{:,.1f}".format),
        written("a flush", "flush_seconds", milliseconds),
    )
