"""What watching finds: checks of the doctor, probes, rates, and lines of logs. Whatever is wrong comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from waltzctl.picture.picture import silence
from waltzctl.shell.merged_log import Line
from waltzctl.shell.numbers import spell
from waltzctl.show import group
from waltzctl.show.cluster import STYLES
from waltzctl.show.forms import Column, Columns, Listing, Page, grid, objects, plain
from waltzctl.show.terminal import ROWS_MAX, count, paragraph, printable, put_next, size
from waltzctl.watching.facts import Check, Grade, Sighting
from waltzctl.watching.probe import Probe, Probing
from waltzctl.watching.rates import PartitionRates, Rates, StorageRates, by
from waltzd.errors import TlsMismatch, WaltzError

if TYPE_CHECKING:
    from rich.console import Console

# -- doctor ------------------------------------------------------------------------------------------------------------

GRADES = {Grade.FAIL: "bold red", Grade.WARN: "yellow", Grade.UNKNOWN: "yellow", Grade.PASS: "green"}
"""The worst first."""
CHECKS: Columns[Check] = (
    Column("name", lambda check: check.name),
    Column("grade", lambda check: check.grade.value),
    Column("finding", lambda check: check.finding),
    Column("fix", lambda check: check.fix),
)
PASSED: Columns[Check] = (Column("passed", lambda check: check.name), Column("found", lambda check: check.finding))


def checks(found: Sequence[Check]) -> Page:
    counted = Counter(check.grade for check in found)
    grades = [grade for grade in GRADES if counted[grade]]

    def draw(out: Console) -> None:
        out.print(", ".join(f"{counted[grade]} {grade}" for grade in grades), style=GRADES[grades[0]])
        for check in sorted(found, key=lambda check: grades.index(check.grade)):
            if check.grade is Grade.PASS:
                continue
            out.print()
            paragraph(out, f"{check.grade} {check.name}: {check.finding}", GRADES[check.grade])
            if check.fix:
                put_next(out, check.fix)
        grid(out, PASSED, [check for check in found if check.grade is Grade.PASS])

    things = Listing(kind="checks", columns=CHECKS, rows=found, more={"result": grades[0].value})
    return Page(draw=draw, things=things)


# -- health ------------------------------------------------------------------------------------------------------------


def probing(found: Probing, contact_ms: float | None, contact_error: WaltzError | None, *, is_writing: bool) -> Page:
    failed = [probe for probe in found.probes if probe.error is not None]
    columns = _probes(is_writing=is_writing)

    def draw(out: Console) -> None:
        total = len(found.probes)
        did = "committed a probe and gave it back" if is_writing else "answered"
        if not failed and contact_error is None:
            out.print(f"healthy: {count(total, 'partition')} {did}", style="bold green", soft_wrap=True)
        else:
            out.print(
                f"unhealthy: {total - len(failed)} of {count(total, 'partition')} {did}", style="bold red", soft_wrap=True
            )
        if contact_error is not None:
            paragraph(out, f"- ZooKeeper {silence(contact_error)}: {contact_error.code} {contact_error.message}", "red")
        told: dict[str, list[Probe]] = {}
        for probe in failed:
            assert probe.error is not None
            told.setdefault(f"{probe.stage}: {probe.error.code} {probe.error.message}", []).append(probe)
        for why, probes in told.items():
            error = probes[0].error
            paragraph(out, f"- {spell(probe.partition for probe in probes)}: {why}", "red")
            if error is not None and error.detail_next_step:
                put_next(out, error.detail_next_step)
        grid(out, columns, failed[:ROWS_MAX] if total > ROWS_MAX else found.probes)
        commits = sorted(probe.commit_ms for probe in found.probes if probe.commit_ms is not None)
        parts = [f"ZooKeeper {_tenths(contact_ms)} ms", f"locate {_tenths(found.locate_ms)} ms"]
        if commits:
            parts.append(f"commit {commits[len(commits) // 2]:.1f} ms in the middle, {commits[-1]:.1f} ms at most")
        out.print(", ".join(parts), soft_wrap=True)

    return Page(
        told={
            "is_healthy": found.is_well and contact_error is None,
            "is_writing": is_writing,
            "coordinator_milliseconds": _rounded(contact_ms),
            "locate_milliseconds": _rounded(found.locate_ms),
            "coordinator_error": _error(contact_error),
            "partitions": objects(columns, found.probes),
        },
        draw=draw,
        things=Listing(kind="partitions", columns=columns, rows=found.probes),
    )


def _probes(*, is_writing: bool) -> Columns[Probe]:
    """Without a write nothing is committed, and the id is the high-water mark."""

    def result(probe: Probe) -> str:
        if probe.error is None:
            return "ok"
        return f"failed: {probe.stage}" if is_writing else "failed"

    return (
        Column("partition", lambda probe: probe.partition, is_right=True, cell=str),
        Column("owner", lambda probe: probe.owner, cell=lambda owner: owner or "nobody"),
        Column("mount ms" if is_writing else "answered ms", lambda probe: _rounded(probe.mount_ms), is_right=True,
               cell=_ms, json="mount_milliseconds"),
        Column("commit ms" if is_writing else "", lambda probe: _rounded(probe.commit_ms), is_right=True, cell=_ms,
               json="commit_milliseconds"),
        Column("read ms" if is_writing else "", lambda probe: _rounded(probe.read_ms), is_right=True, cell=_ms,
               json="read_milliseconds"),
        Column("id" if is_writing else "high-water mark", lambda probe: probe.id, is_right=True, json="id"),
        Column("", lambda probe: probe.stage, json="failed_stage"),
        Column("result", result, json=""),
        Column("", lambda probe: _error(probe.error), json="error"),
    )  # fmt: skip


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _error(error: WaltzError | None) -> dict[str, str] | None:
    return None if error is None else {**plain(error), "next_step": error.detail_next_step}


# -- top: all together first, then the busiest partitions, then the storages; nothing wider than 80 columns -------------

HEAD_LINES, TABLE_LINES = 5, 4
"""Of a screen: what stands beside the rows of the two tables."""
ROWS_LEAST = 3


def _per_second(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.1f}"


def _tenths(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _whole(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    return "-" if value is None else size(value)


def _rate(name: str, field: str, cell: Callable[[Any], str], json: str | None = None) -> Column[Any]:
    return Column(name, lambda one: _rounded(getattr(one, field), 4), is_right=True, cell=cell, json=json)


PARTITION_RATES: Columns[PartitionRates] = (
    Column("partition", lambda one: one.partition, is_right=True, cell=str),
    Column("owner", lambda one: one.owner, cell=lambda owner: owner or "nobody"),
    _rate("tx/s", "tx", _per_second, "tx_per_second"),
    _rate("MB/s", "bytes", _megabytes, "bytes_per_second"),
    _rate("", "fed", _per_second, "fed_per_second"),
    _rate("p50 ms", "p50_ms", _tenths),
    _rate("p99 ms", "p99_ms", _tenths),
    _rate("refused", "refused", _share, "refused_share"),
    Column("lag", lambda one: one.lag, is_right=True, cell=_whole),
    Column("mounts", lambda one: one.mounts, is_right=True, cell=_whole),
    Column("state", lambda one: one.state),
)
STORAGE_RATES: Columns[StorageRates] = (
    Column("storage", lambda one: one.name, json="name"),
    _rate("flushes/s", "flushes", _per_second, "flushes_per_second"),
    _rate("flush ms", "flush_ms", _tenths),
    _rate("p99 ms", "flush_p99_ms", _tenths, "flush_p99_ms"),
    _rate("", "records", _per_second, "records_per_second"),
    _rate("MB/s", "bytes", _megabytes, "bytes_per_second"),
    Column("queued", lambda one: one.queued_bytes, is_right=True, cell=_size, json="queued_bytes"),
    Column("free", lambda one: one.free_bytes, is_right=True, cell=_size, json="free_bytes"),
)


def top(found: Rates, sighting: Sighting, *, sort: str, rows_max: int | None) -> Page:
    partitions = by(sort, found.partitions)
    return Page(
        told={
            "at": sighting.at,
            "seconds": round(found.seconds, 3),
            "verdict": str(sighting.verdict.health),
            "total": objects(PARTITION_RATES, [found.total])[0],
            "partitions": objects(PARTITION_RATES, partitions),
            "storages": objects(STORAGE_RATES, found.storages),
            "slowed": _slowed(sighting),
        },
        draw=lambda out: draw_top(out, found, sighting, sort=sort, rows_max=rows_max),
        things=Listing(kind="partitions", columns=PARTITION_RATES, rows=partitions),
    )


def _slowed(sighting: Sighting) -> list[str]:
    """Names that had to wait in the last seconds, at any server."""
    servers = sighting.facts.picture.servers
    return sorted({name for view in servers if view.said is not None for name in view.said.clients.slowed})


def rows_for(height: int, storages: int) -> int:
    """So many partitions fit on a screen of this height, with their table, the storages and what stands around them."""
    return max(ROWS_LEAST, height - HEAD_LINES - TABLE_LINES - (storages + TABLE_LINES))


def draw_top(out: Console, found: Rates, sighting: Sighting, *, sort: str, rows_max: int | None) -> None:
    verdict, total = sighting.verdict, found.total
    worst = f"; {verdict.reasons[0].sentence}" if verdict.reasons else ""
    out.print(
        f"{verdict.health}: {verdict.sentence}{worst}", style=STYLES[verdict.health], no_wrap=True, overflow="ellipsis"
    )
    out.print(
        f"{_per_second(total.tx)} tx/s, {_megabytes(total.bytes)} MB/s, commit p50 {_tenths(total.p50_ms)} ms, p99 "
        f"{_tenths(total.p99_ms)} ms, refused {_share(total.refused)}, fed {_per_second(total.fed)}/s",
        style="bold",
        soft_wrap=True,
    )
    if slowed := _slowed(sighting):
        out.print(f"slowed by their quotas: {', '.join(slowed)}", style="yellow", no_wrap=True, overflow="ellipsis")
    if line := group.totals(sighting.picture.groups):
        out.print(line, no_wrap=True, overflow="ellipsis")
    partitions = by(sort, found.partitions)
    shown = partitions[:rows_max]
    grid(out, PARTITION_RATES, shown)
    if len(shown) < len(partitions):
        out.print(f"{len(partitions) - len(shown)} more partitions; -n shows more, --sort chooses which")
    grid(out, STORAGE_RATES, found.storages)


# -- events ------------------------------------------------------------------------------------------------------------

LEVELS = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}
EVENTS: Columns[Line] = (
    Column("time", lambda line: moment(line.time_ms)),
    Column("who", lambda line: line.who),
    Column("kind", lambda line: line.kind),
    Column("level", lambda line: line.level),
    Column("code", lambda line: line.code),
    Column("text", lambda line: line.text),
)


def events(found: Sequence[Line]) -> Page:
    def draw(out: Console) -> None:
        _draw_events(out, found)
        if not found:
            typer.echo("Nothing was said in this time.", err=True)

    things = Listing(kind="events", columns=EVENTS, rows=found)
    return Page(draw=draw, things=things)


def _draw_events(out: Console, found: Sequence[Line]) -> None:
    width = max((len(line.who) for line in found), default=0)
    for line in found:
        text = " ".join(line.text.split())
        out.print(
            f"{moment(line.time_ms)}  {line.who:<{width}}  {line.level:<8}  {text}",
            style=LEVELS.get(line.level, ""),
            soft_wrap=True,
        )


def silent(found: Mapping[str, WaltzError]) -> None:
    """On standard error."""
    steps = []
    for name, error in sorted(found.items()):
        typer.echo(f"{name} {silence(error)}: {error.code} {printable(error.message)}", err=True)
        if isinstance(error, TlsMismatch) and error.detail_next_step not in steps:
            steps.append(error.detail_next_step)
    for step in steps:  # `status` has those of the others
        typer.echo(f"Next: {printable(step)}", err=True)


def moment(time_ms: int) -> str:
    try:
        whole = datetime.fromtimestamp(time_ms // 1000, UTC)
    except (ValueError, OverflowError, OSError):  # a clock that shows no time
        return str(time_ms)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{time_ms % 1000:03d}Z"
