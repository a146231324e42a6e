"""How a report looks for people."""

from __future__ import annotations

from collections.abc import Sequence

from waltz_spark.analysis.report import Part, Report
from waltzctl.show import terminal
from waltzctl.show.terminal import table

PARTITIONS_MAX, TIMES_MAX = 20, 48
_NUMBERS = ("transactions", "bytes", "p50", "p99", "max")


def show(report: Report) -> None:
    out = terminal.console()
    total = report.total
    out.print(f"{terminal.count(total.transactions, 'transaction')}, {terminal.size(total.bytes)} of payload, in "
              f"{terminal.count(len(report.partitions), 'partition')}: {report.source}", soft_wrap=True)  # fmt: skip
    if not total.transactions:
        return
    out.print(
        f"payloads: p50 {terminal.size(total.p50)}, p99 {terminal.size(total.p99)}, max {terminal.size(total.max)}",
        soft_wrap=True,
    )
    hottest = report.hottest()[:PARTITIONS_MAX]
    rows = [(part.name, f"{report.share(part):.1%}", *_numbers(part)) for part in hottest]
    table(out, ("partition", "share", *_NUMBERS), rows, right=("partition", "share", *_NUMBERS))
    _more(report.partitions, hottest, "partition")
    for name, parts, count in (
        ("header", report.headers, report.header_count),
        ("client", report.clients, report.client_count),
    ):
        table(out, (name, *_NUMBERS), [(part.name, *_numbers(part)) for part in parts], right=(name, *_NUMBERS))
        if count > len(parts):
            out.print(f"and {terminal.count(count - len(parts), f'more {name}')}; --top shows more", soft_wrap=True)
    if not report.time_unit:
        out.print("Nothing here says when: no time column, and no segment with a day.", soft_wrap=True)
        return
    latest = report.times[-TIMES_MAX:]
    rows = [(part.name or "unknown", *_numbers(part)) for part in latest]
    table(out, (report.time_unit, *_NUMBERS), rows, right=_NUMBERS)
    _more(report.times, latest, report.time_unit)


def _more(parts: Sequence[Part], shown: Sequence[Part], name: str) -> None:
    if len(parts) > len(shown):
        terminal.console().print(
            f"and {terminal.count(len(parts) - len(shown), f'more {name}')}; -o json has all", soft_wrap=True
        )


def _numbers(part: Part) -> tuple[str, ...]:
    measure = part.measure
    sizes = (measure.bytes, measure.p50, measure.p99, measure.max)
    return (f"{measure.transactions:,}", *map(terminal.size, sizes))
