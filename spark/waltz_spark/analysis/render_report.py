"""How a report looks: for people the hottest partitions and the latest times, for programs all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from waltz_spark.analysis.report import Part, Report, Usage
from waltzctl.show.forms import Column, Columns, Listing, Page, grid, objects, put
from waltzctl.show.terminal import count, size

if TYPE_CHECKING:
    from rich.console import Console

PARTITIONS_MAX, TIMES_MAX = 20, 48
MEASURES: Columns[Part] = (
    Column("transactions", lambda part: part.measure.transactions, is_right=True),
    Column("bytes", lambda part: part.measure.bytes, is_right=True, is_size=True),
    Column("p50", lambda part: part.measure.p50, is_right=True, is_size=True),
    Column("p99", lambda part: part.measure.p99, is_right=True, is_size=True),
    Column("max", lambda part: part.measure.max, is_right=True, is_size=True),
)


LOCKS: Columns[Usage] = (
    Column("lock", lambda usage: f"{usage.lock:016x}"),
    Column("partition", is_right=True),
    Column("writes", is_right=True),
    Column("appends", is_right=True),
    Column("reads", is_right=True),
    Column("clients", is_right=True),
    Column("transactions", is_right=True, is_wide=True),
    Column("first", is_right=True, is_wide=True),
    Column("last", is_right=True, is_wide=True),
)


def _numbered(kind: str) -> Column[Part]:
    return Column(kind, lambda part: int(part.name), is_right=True, cell=str)


def show(report: Report, output: str) -> None:
    total = report.total
    partitions: Columns[Part] = (
        _numbered("partition"),
        Column("first", lambda part: part.first, is_right=True, is_wide=True),
        Column("last", lambda part: part.last, is_right=True, is_wide=True),
        Column("share", lambda part: round(report.share(part), 4), is_right=True, cell=lambda share: f"{share:.1%}"),
        *MEASURES,
    )
    headers, clients = (_numbered("header"), *MEASURES), (_numbered("client"), *MEASURES)
    unit: Column[Part] = Column(
        report.time_unit or "time", lambda part: part.name, json="time", cell=lambda name: name or "unknown"
    )
    times = (unit, *MEASURES)

    def draw(out: Console) -> None:
        out.print(f"{count(total.transactions, 'transaction')}, {size(total.bytes)} of payload, in "
                  f"{count(len(report.partitions), 'partition')}: {report.source}", soft_wrap=True)  # fmt: skip
        if not total.transactions:
            return
        out.print(f"payloads: p50 {size(total.p50)}, p99 {size(total.p99)}, max {size(total.max)}", soft_wrap=True)
        hottest = report.hottest()[:PARTITIONS_MAX]
        grid(out, partitions, hottest)
        _say_more(out, report.partitions, hottest, "partition")
        for name, columns, parts, number in (
            ("header", headers, report.headers, report.header_count),
            ("client", clients, report.clients, report.client_count),
        ):
            grid(out, columns, parts)
            if number > len(parts):
                out.print(f"and {count(number - len(parts), f'more {name}')}; --top shows more", soft_wrap=True)
        if report.locks:
            grid(out, LOCKS, report.locks)
            if report.lock_count > len(report.locks):
                out.print(
                    f"and {count(report.lock_count - len(report.locks), 'more lock')}; --top shows more", soft_wrap=True
                )
        if not report.time_unit:
            out.print("Nothing here says when: no time column, and no segment with a day.", soft_wrap=True)
            return
        latest = report.times[-TIMES_MAX:]
        grid(out, times, latest)
        _say_more(out, report.times, latest, report.time_unit)

    told: dict[str, Any] = {
        "source": report.source,
        "total": asdict(total),
        "partitions": objects(partitions, report.partitions),
        "headers": objects(headers, report.headers),
        "header_count": report.header_count,
        "clients": objects(clients, report.clients),
        "client_count": report.client_count,
        "time_unit": report.time_unit or None,
        "times": objects(times, report.times),
        "locks": objects(LOCKS, report.locks),
        "lock_count": report.lock_count,
    }
    put(Page(draw=draw, things=Listing(kind="partitions", columns=partitions, rows=report.partitions), told=told), output)


def _say_more(out: Console, parts: Sequence[Part], shown: Sequence[Part], name: str) -> None:
    if len(parts) > len(shown):
        out.print(f"and {count(len(parts) - len(shown), f'more {name}')}; -o json has all", soft_wrap=True)
