"""How the result of a benchmark looks, and what is seen while it runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from waltzctl.progress import Waiting
from waltzctl.show.forms import put_json
from waltzctl.show.terminal import console, count, size, table

if TYPE_CHECKING:
    from rich.console import Console

    from waltzctl.bench.counters import Counters
    from waltzctl.bench.result import Result, Series

SHOW_SECONDS = 0.25


class Live(Waiting):
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


def result(found: Result, output: str) -> None:
    if output == "json":
        put_json(found.as_dict())
        return
    out = console()
    _heading(out, found)
    _series(out, found)
    if found.refused or found.unknown:
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in sorted(found.refused.items()))
        share = 100 * sum(found.refused.values()) / max(1, found.attempts)
        out.print(
            f"of {count(found.attempts, 'attempt')}, {share:.1f} % were refused ({reasons or 'none'}), "
            f"{found.unknown:,} are unknown",
            soft_wrap=True,
        )
    _use(out, found)
    for note in found.notes:
        out.print(f"Note: {note}", style="yellow", soft_wrap=True)


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


def _series(out: Console, found: Result) -> None:
    timed = any(series.latencies for series in found.series)
    names = ["", "number", "a second", "MB/s"] + (["p50", "p99", "p99.9", "max"] if timed else ["seconds"])
    table(out, tuple(names), [(series.name, *_cells(series, timed)) for series in found.series], right=tuple(names[1:]))


def _cells(series: Series, timed: bool) -> list[str]:
    speed = series.bytes / series.seconds / 1e6 if series.seconds else 0.0
    megabytes = f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}" if series.bytes else ""
    cells = [f"{series.count:,}" if series.count else "", f"{series.rate:,.0f}" if series.rate >= 1 else "", megabytes]
    if not timed:
        return [*cells, f"{series.seconds:.2f}"]
    if not series.latencies:
        return [*cells, "", "", "", ""]
    return [*cells, *map(milliseconds, series.latencies.values()), milliseconds(series.highest)]


def _use(out: Console, found: Result) -> None:
    if not found.processes:
        return
    by_name = {storage.name: storage for storage in found.storages}
    names = ["process", "CPU", "memory"] + (["flushes/s", "records a flush", "a flush"] if by_name else [])
    rows = []
    for process in found.processes:
        cells = [process.name, f"{100 * process.cpu_share:.0f} %", size(process.memory_bytes)]
        storage = by_name.get(process.name)
        if storage is not None:
            cells += [
                f"{storage.flushes_per_second:,.0f}",
                f"{storage.records_per_flush:,.1f}",
                milliseconds(storage.flush_seconds),
            ]
        rows.append((*cells, *[""] * (len(names) - len(cells))))
    table(out, tuple(names), rows, right=tuple(names[1:]))
