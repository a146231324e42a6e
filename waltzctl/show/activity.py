"""Output about activity: probes of partitions, rates, and log lines. Problems come first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from waltzctl.health.facts import HealthReport
from waltzctl.health.probe import Probe, Probing
from waltzctl.health.rates import PartitionRates, Rates, StorageRates, by
from waltzctl.shell.merged_log import LogLine
from waltzctl.shell.numbers import format_partitions
from waltzctl.show import group
from waltzctl.show.cluster import STYLES
from waltzctl.show.forms import (
    Column,
    Columns,
    Line,
    Listing,
    Part,
    Table,
    attributes,
    capped,
    next_step,
    objects,
    plain,
    verdict,
)
from waltzctl.show.terminal import ROWS_MAX, count, printable, size
from waltzctl.snapshot.cluster_snapshot import silence
from waltzd.errors import TlsMismatch, WaltzError


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _number(name: str, of: str, cell: Callable[[Any], str], *, json: str | None = None, digits: int = 4) -> Column[Any]:
    """Return a column of measured numbers, in which a dash stands for one that is not known."""
    known = Column[Any](name, of)
    return Column(name, lambda row: _rounded(known.value(row), digits), cell=cell, none="-", json=json, is_right=True)


def _tenths(value: float) -> str:
    return f"{value:,.1f}"


def _per_second(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f}"


# -- health ------------------------------------------------------------------------------------------------------------


def probing(
    found: Probing, contact_ms: float | None, contact_error: WaltzError | None, *, is_writing: bool
) -> Listing[Probe]:
    columns = _probes(is_writing=is_writing)
    content = {
        "is_healthy": found.is_well and contact_error is None,
        "is_writing": is_writing,
        "coordinator_milliseconds": _rounded(contact_ms, 3),
        "locate_milliseconds": _rounded(found.locate_ms, 3),
        "coordinator_error": _error(contact_error),
        "partitions": objects(columns, found.probes),
    }
    page = list(_probed(found, columns, contact_ms, contact_error, is_writing=is_writing))
    return Listing(kind="partitions", columns=columns, rows=found.probes, page=page, content=content)


def _probed(
    found: Probing, columns: Columns[Probe], contact_ms: float | None, contact_error: WaltzError | None, *, is_writing: bool
) -> Iterator[Part]:
    failed = [probe for probe in found.probes if probe.error is not None]
    total, did = len(found.probes), "committed a probe and gave it back" if is_writing else "answered"
    if not failed and contact_error is None:
        yield verdict(f"healthy: {count(total, 'partition')} {did}", is_good=True)
    else:
        yield verdict(f"unhealthy: {total - len(failed)} of {count(total, 'partition')} {did}", is_good=False)
    if contact_error is not None:
        yield Line(f"- ZooKeeper {silence(contact_error)}: {contact_error.code} {contact_error.message}", "red", "wrap")
    alike: dict[str, list[Probe]] = {}
    for probe in failed:
        assert probe.error is not None
        alike.setdefault(f"{probe.stage}: {probe.error.code} {probe.error.message}", []).append(probe)
    for why, probes in alike.items():
        yield Line(f"- {format_partitions(probe.partition for probe in probes)}: {why}", "red", "wrap")
        error = probes[0].error
        if error is not None and error.detail_next_step:
            yield next_step(error.detail_next_step)
    yield Table(columns, failed[:ROWS_MAX] if total > ROWS_MAX else found.probes)
    commits = sorted(probe.commit_ms for probe in found.probes if probe.commit_ms is not None)
    took = {"ZooKeeper": contact_ms, "locate": found.locate_ms}
    parts = [f"{what} {'-' if value is None else _tenths(value)} ms" for what, value in took.items()]
    if commits:
        parts.append(f"commit {commits[len(commits) // 2]:.1f} ms median, {commits[-1]:.1f} ms max")
    yield ", ".join(parts)


def _probes(*, is_writing: bool) -> Columns[Probe]:
    """Return the columns of probes. Without a write nothing is committed, and the id is the high-water mark."""

    def result(probe: Probe) -> str:
        if probe.error is None:
            return "ok"
        return f"failed: {probe.stage}" if is_writing else "failed"

    def stage(name: str, word: str) -> Column[Probe]:
        return _number(word, f"{name}_ms", _tenths, json=f"{name}_milliseconds", digits=3)

    return (
        Column("partition"),
        Column("owner", none="nobody"),
        stage("mount", "mount ms" if is_writing else "answered ms"),
        *(stage(name, f"{name} ms" if is_writing else "") for name in ("commit", "read")),
        Column("id" if is_writing else "high-water mark", "id", json="id"),
        Column("", "stage", json="failed_stage"),
        Column("result", result, json=""),
        Column("", lambda probe: _error(probe.error), json="error"),
    )


def _error(error: WaltzError | None) -> dict[str, str] | None:
    return None if error is None else {**plain(error), "next_step": error.detail_next_step}


# -- top: all together first, then the busiest partitions, then the storages; nothing wider than 80 columns -------------

HEAD_LINES, TABLE_LINES = 5, 4
"""Lines of a screen that are not rows of the two tables."""
ROWS_LEAST = 3
PARTITION_RATES: Columns[PartitionRates] = (
    Column("partition"),
    Column("owner", none="nobody"),
    _number("tx/s", "tx", _per_second, json="tx_per_second"),
    _number("MB/s", "bytes", _megabytes, json="bytes_per_second"),
    _number("", "fed", _per_second, json="fed_per_second"),
    _number("p50 ms", "p50_ms", _tenths),
    _number("p99 ms", "p99_ms", _tenths),
    _number("refused", "refused", "{:.1%}".format, json="refused_share"),
    Column("lag", none="-", is_right=True),
    Column("mounts", none="-", is_right=True),
    Column("state"),
)
STORAGE_RATES: Columns[StorageRates] = (
    Column("storage", "name", json="name"),
    _number("flushes/s", "flushes", _per_second, json="flushes_per_second"),
    _number("flush ms", "flush_ms", _tenths),
    _number("p99 ms", "flush_p99_ms", _tenths, json="flush_p99_ms"),
    _number("", "records", _per_second, json="records_per_second"),
    _number("MB/s", "bytes", _megabytes, json="bytes_per_second"),
    Column("queued", "queued_bytes", cell=size, none="-", json="queued_bytes", is_right=True),
    Column("free", "free_bytes", cell=size, none="-", json="free_bytes", is_right=True),
)


def top(found: Rates, report: HealthReport, *, sort: str, rows_max: int | None) -> Listing[PartitionRates]:
    partitions, slowed = by(sort, found.partitions), _slowed(report)
    health, total, reasons = report.verdict.health, found.total, report.verdict.reasons
    worst = f"; {reasons[0].sentence}" if reasons else ""
    shown = {column.name: column.shown(total) for column in PARTITION_RATES}
    fed = next(column.shown(total) for column in PARTITION_RATES if column.json == "fed_per_second")
    groups = group.totals(report.snapshot.groups)
    page: list[Part] = [
        Line(f"{health}: {report.verdict.sentence}{worst}", STYLES[health], "cut"),
        Line(
            f"{shown['tx/s']} tx/s, {shown['MB/s']} MB/s, commit p50 {shown['p50 ms']} ms, p99 {shown['p99 ms']} ms, "
            f"refused {shown['refused']}, fed {fed}/s",
            "bold",
        ),
        *([Line(f"slowed by their quotas: {', '.join(slowed)}", "yellow", "cut")] if slowed else []),
        *([Line(groups, fit="cut")] if groups else []),
        *capped(PARTITION_RATES, partitions[:rows_max], len(partitions), "partition", "-n shows more, --sort says which"),
        Table(STORAGE_RATES, found.storages),
    ]
    content = {
        "at": report.at,
        "seconds": round(found.seconds, 3),
        "verdict": str(health),
        "total": objects(PARTITION_RATES, [total])[0],
        "partitions": objects(PARTITION_RATES, partitions),
        "storages": objects(STORAGE_RATES, found.storages),
        "slowed": slowed,
    }
    return Listing(kind="partitions", columns=PARTITION_RATES, rows=partitions, page=page, content=content)


def _slowed(report: HealthReport) -> list[str]:
    """Return the names that a quota slowed at any server in the last seconds."""
    servers = report.facts.snapshot.servers
    return sorted({name for view in servers if view.reported is not None for name in view.reported.clients.slowed})


def rows_for(height: int, storages: int) -> int:
    """Return the number of partitions that fit on a screen of this height, beside the storages and fixed lines."""
    return max(ROWS_LEAST, height - HEAD_LINES - TABLE_LINES - (storages + TABLE_LINES))


# -- events ------------------------------------------------------------------------------------------------------------

LEVELS = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}
EVENTS: Columns[LogLine] = (
    Column("time", lambda line: moment(line.time_ms)),
    *attributes("who kind level code text"),
)


def events(found: Sequence[LogLine]) -> Listing[LogLine]:
    width = max((len(line.who) for line in found), default=0)
    page = [
        Line(
            f"{moment(line.time_ms)}  {line.who:<{width}}  {line.level:<8}  {' '.join(line.text.split())}",
            LEVELS.get(line.level, ""),
        )
        for line in found
    ]
    return Listing(kind="events", columns=EVENTS, rows=found, page=page or ["No events in this time."])


def silent(found: Mapping[str, WaltzError]) -> None:
    """Print on standard error which daemons did not answer."""
    steps = []
    for name, error in sorted(found.items()):
        typer.echo(f"{name} {silence(error)}: {error.code} {printable(error.message)}", err=True)
        if isinstance(error, TlsMismatch) and error.detail_next_step not in steps:
            steps.append(error.detail_next_step)
    for step in steps:  # only for TLS; `status` has the next steps for other errors
        typer.echo(f"Next: {printable(step)}", err=True)


def moment(time_ms: int) -> str:
    try:
        whole = datetime.fromtimestamp(time_ms // 1000, UTC)
    except (ValueError, OverflowError, OSError):  # a clock that shows no time
        return str(time_ms)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{time_ms % 1000:03d}Z"
