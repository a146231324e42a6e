"""What a storage holds: its replicas as it tells of them, and its files as they are checked, made again, or taken over."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from waltzctl.show.forms import Column, Columns, Listing, Page, grid, objects, whole_error
from waltzctl.show.terminal import ROWS_MAX, count, duration, printable, rate, size
from waltzd.errors import WaltzError
from waltzd.format.finding import Finding
from waltzd.protocol.descriptions import PartitionDescription, ReplicaStatus, ScrubStatus, StorageDescription, VerifySummary
from waltzd.storage.offline.reindex import Rebuild, State
from waltzd.storage.offline.verify import PartitionReport, Report

if TYPE_CHECKING:
    from rich.console import Console

# -- findings ----------------------------------------------------------------------------------------------------------

FINDINGS: Columns[Finding] = (
    Column("code", lambda found: str(found.code)),
    Column("path", lambda found: found.path),
    Column("first byte", lambda found: found.first_byte, is_right=True),
    Column("last byte", lambda found: found.last_byte, is_right=True),
    Column("first id", lambda found: found.first_id, is_right=True),
    Column("last id", lambda found: found.last_id, is_right=True),
    Column("detail", lambda found: found.detail),
    Column("remedy", lambda found: found.remedy, is_wide=True),
)


def _verdict(out: Console, findings: Sequence[Finding]) -> None:
    said = count(len(findings), "finding") if findings else "clean"
    out.print(said, style="bold red" if findings else "bold green")
    for finding in findings:
        _show_finding(out, finding)


def _show_finding(out: Console, finding: Finding) -> None:
    where: list[str] = []
    if finding.first_byte is not None:
        where.append(f"bytes {finding.first_byte} to {finding.last_byte}")
    if finding.first_id is not None:
        same = finding.first_id == finding.last_id
        where.append(f"id {finding.first_id}" if same else f"ids {finding.first_id} to {finding.last_id}")
    # Paths and byte ranges stay whole on their lines, so that they can be copied and searched for.
    out.print()
    out.print(str(finding.code), style="bold", end="  ", soft_wrap=True)
    out.print(finding.path, soft_wrap=True)
    if where:
        out.print("  " + ", ".join(where), soft_wrap=True)
    for text in (finding.detail, f"Next: {finding.remedy}"):
        for line in textwrap.wrap(text, max(20, out.width - 2), break_long_words=False, break_on_hyphens=False):
            out.print("  " + line, soft_wrap=True)


def _found(findings: Sequence[Finding]) -> Listing[Finding]:
    return Listing(kind="findings", columns=FINDINGS, rows=findings)


# -- a running storage -------------------------------------------------------------------------------------------------


def state(one: PartitionDescription) -> str:
    status = one.status
    if status is None:
        return "refused"
    if not status.is_available:
        return "offline"
    if status.is_full:
        return "disk full"
    return "sound" if status.is_sound else "damaged"


def _replica(name: str, field: str, *, is_wide: bool = False) -> Column[PartitionDescription]:
    def value(one: PartitionDescription) -> Any:
        return None if one.status is None else getattr(one.status, field)

    return Column(name, value, is_right=True, is_wide=is_wide)


REPLICAS: Columns[PartitionDescription] = (
    Column("partition", lambda one: one.partition, is_right=True, cell=str),
    Column("state", state),
    _replica("floor", "floor", is_wide=True),
    _replica("last id", "last_id"),
    _replica("low mark", "low_mark", is_wide=True),
    _replica("committed", "committed"),
    _replica("session", "promised_session"),
    _replica("segments", "segments"),
    Column("bytes", lambda one: one.disk_bytes, is_right=True, is_size=True),
    Column("story", lambda one: one.story, is_wide=True),
)


def scrubbed(scrub: ScrubStatus) -> str:
    """Describe the pace of a scrub, how far it is, and what it found."""
    if not scrub.period_seconds:
        return "off (scrub_seconds is 0)"
    age = "not all once" if scrub.age_ms is None else f"all read since {duration(scrub.age_ms)} ago"
    said = f"{size(scrub.bytes_per_second)}/s, {size(scrub.done_bytes)} of {size(scrub.total_bytes)} in this round, {age}"
    if scrub.damaged_segments:
        said += f"; {count(scrub.damaged_segments, 'segment')} found damaged, the last: {scrub.last_finding}"
    return said


def replicas(found: StorageDescription) -> Listing[PartitionDescription]:
    return Listing(kind="partitions", columns=REPLICAS, rows=found.assigned, nothing="The storage has no replicas.")


def description(found: StorageDescription) -> Page:
    wrong = [one for one in found.assigned if one.status is None or not one.status.is_sound]

    def draw(out: Console) -> None:
        verdict = "draining" if found.is_draining else f"{len(wrong)} damaged or refused" if wrong else "sound"
        out.print(verdict, style="bold red" if wrong else "bold green")
        who = f"storage {found.name}, " if found.name else ""
        out.print(f"{who}cluster {found.cluster_key}, {found.directory}, waltzd {found.version}", soft_wrap=True)
        written = " and ".join(map(str, found.formats))
        out.print(f"can write {'formats' if len(found.formats) > 1 else 'format'} {written}")
        for one in wrong:
            out.print(one.story, style="red", soft_wrap=True)
        grid(out, REPLICAS, found.assigned)
        if found.set_aside:
            names = ", ".join(one.name for one in found.set_aside)
            bytes_ = size(sum(one.bytes for one in found.set_aside))
            out.print(f"set aside: {bytes_} in {names}; `waltzctl storage recover --clean` deletes it", soft_wrap=True)
        if found.scrub is not None:
            out.print(
                f"scrub: {scrubbed(found.scrub)}", style="yellow" if found.scrub.damaged_segments else "", soft_wrap=True
            )
        done = found.statistics
        mean = done.group_microseconds / done.groups / 1000 if done.groups else 0.0
        out.print(
            f"{count(len(found.assigned), 'partition')} of {found.partitions}, {size(found.free_bytes)} free, up "
            f"{found.uptime_ms / 1000:.0f} s: {count(done.appended_records, 'record')} appended in "
            f"{count(done.groups, 'group')} ({mean:.1f} ms each, {done.group_microseconds_max / 1000:.1f} ms at most), "
            f"{count(done.read_records, 'record')} read, {count(done.refused_calls, 'call')} refused",
            soft_wrap=True,
        )

    document = asdict(found)
    document["waltzd_version"] = document.pop("version")
    document["cluster_key"] = str(found.cluster_key)
    document["instance"] = None if found.instance is None else str(found.instance)
    document["assigned"] = [
        {
            "partition": one.partition, "story": one.story, "queued_bytes": one.queued_bytes,
            "disk_bytes": one.disk_bytes, "refused": whole_error(one.refused), "status": _status(one.status),
        }
        for one in found.assigned
    ]  # fmt: skip
    return Page(told=document, draw=draw, things=replicas(found))


def _status(status: ReplicaStatus | None) -> dict[str, Any] | None:
    if status is None:
        return None
    return {
        **asdict(status),
        "incarnation": str(status.incarnation),
        "is_sound": status.is_sound,
        "findings": [finding.as_dict() for finding in status.findings],
    }


Outcome = tuple[int, WaltzError | None]


def results(found: Mapping[int, WaltzError | None], done: str) -> Page:
    """Of each partition, what became of it; errors go to standard error."""
    columns: Columns[Outcome] = (
        Column("partition", lambda outcome: outcome[0], is_right=True),
        Column("result", lambda outcome: done if outcome[1] is None else "refused"),
        Column("", lambda outcome: whole_error(outcome[1]), json="error"),
    )

    def draw(_out: Console) -> None:
        for number, error in found.items():
            if error is None:
                typer.echo(f"partition {number}: {done}")
            else:
                for line in error.lines():
                    typer.echo(f"partition {number}: {printable(line)}", err=True)

    things = Listing(kind="partitions", columns=columns, rows=list(found.items()))
    return Page(draw=draw, things=things)


def verification(findings: Sequence[Finding], summaries: Sequence[VerifySummary]) -> Page:
    """Of a storage that runs."""

    def draw(out: Console) -> None:
        _verdict(out, findings)
        records, bytes_ = sum(summary.records for summary in summaries), sum(summary.bytes for summary in summaries)
        segments = sum(summary.segments for summary in summaries)
        parts = [count(len(summaries), "partition"), count(segments, "segment"), count(records, "record"), size(bytes_)]
        out.print(", ".join(parts), soft_wrap=True)

    return Page(
        told={
            "result": "findings" if findings else "clean",
            "partitions": [asdict(summary) for summary in summaries],
            "findings": [finding.as_dict() for finding in findings],
        },
        draw=draw,
        things=_found(findings),
    )


# -- verify-segments ---------------------------------------------------------------------------------------------------

PARTITIONS: Columns[PartitionReport] = (
    Column(
        "partition", lambda one: one.partition, is_right=True, cell=lambda number: "?" if number is None else str(number)
    ),
    Column("", lambda one: one.directory, json="path"),
    Column("segments", lambda one: one.segments, is_right=True),
    Column("ids", lambda one: f"{one.first_id:,} to {one.last_id:,}" if one.last_id >= one.first_id else "none", json=""),
    Column("", lambda one: one.first_id, json="first_id"),
    Column("", lambda one: one.last_id, json="last_id"),
    Column("records", lambda one: one.records, is_right=True),
    Column("size", lambda one: one.bytes, is_right=True, is_size=True, json="bytes"),
    Column("", lambda one: one.in_flight_bytes, json="in_flight_bytes"),
    Column("findings", lambda one: len(one.findings), is_right=True),
)


def report(found: Report, *, seconds: float) -> Page:
    """Of files that no daemon writes."""
    findings, partitions = found.findings, found.partitions
    segments, records = sum(one.segments for one in partitions), sum(one.records for one in partitions)
    bytes_, in_flight = sum(one.bytes for one in partitions), sum(one.in_flight_bytes for one in partitions)

    def draw(out: Console) -> None:
        _verdict(out, findings)
        shown = [one for one in partitions if one.findings or len(partitions) <= ROWS_MAX]
        grid(out, PARTITIONS, shown)
        if len(shown) < len(partitions):
            out.print(f"{len(partitions) - len(shown)} more partitions without findings")
        out.print(
            f"{count(len(partitions), 'partition')}, {count(segments, 'segment')}, {count(records, 'record')}, "
            f"{size(bytes_)} in {seconds:.1f} s ({rate(bytes_, seconds)} MB/s), {count(len(findings), 'finding')}",
            soft_wrap=True,
        )
        if found.held:
            out.print(
                f"A process holds {', '.join(found.held)}: the end of each log ({size(in_flight)} above the durable marks) "
                "may be in flight and was not judged.",
                soft_wrap=True,
            )

    return Page(
        told={
            "result": "findings" if findings else "clean",
            "held": found.held,
            "summary": {
                "partitions": len(partitions), "segments": segments, "records": records, "bytes": bytes_,
                "seconds": round(seconds, 3), "megabytes_per_second": rate(bytes_, seconds),
                "in_flight_bytes": in_flight, "findings": len(findings),
            },
            "partitions": objects(PARTITIONS, partitions),
            "findings": [finding.as_dict() for finding in findings],
        },
        draw=draw,
        things=_found(findings),
    )  # fmt: skip


# -- rebuild-index -----------------------------------------------------------------------------------------------------


def rebuilding(done: Rebuild, *, seconds: float) -> Page:
    bytes_ = sum(built.data_bytes for built in done.built)
    order = (State.REBUILT, State.RIGHT, State.REFUSED)
    states = {state.value: sum(built.state is state for built in done.built) for state in order}

    def draw(out: Console) -> None:
        for built in done.built:
            if built.state is State.REBUILT:
                said = f"rebuilt  {built.path}: {count(built.records, 'record')}"
                said += f", {count(built.left_out, 'id')} left out" if built.left_out else ""
                out.print(said + (", from its footer" if built.is_from_footer else ""), soft_wrap=True)
            if built.torn_bytes:
                said = (
                    f"{built.data_path}: a torn tail of {count(built.torn_bytes, 'byte')} stands behind the last record; "
                )
                out.print(said + "the storage cuts it at its next start", soft_wrap=True)
            for finding in built.findings:
                _show_finding(out, finding)
        for finding in done.storage_findings:
            _show_finding(out, finding)
        out.print(
            f"{count(len(done.built), 'segment')}: {states['rebuilt']} rebuilt, {states['right']} were right, "
            f"{states['refused']} refused; "
            f"{size(bytes_)} in {seconds:.1f} s ({rate(bytes_, seconds)} MB/s)",
            soft_wrap=True,
        )

    things = Listing(
        kind="segments",
        columns=(
            Column("path", lambda built: built.path),
            Column("state", lambda built: built.state.value),
            Column("records", lambda built: built.records, is_right=True),
            Column("left out", lambda built: built.left_out, is_right=True),
            Column("made from", lambda built: "footer" if built.is_from_footer else "records", is_wide=True),
            Column("torn bytes", lambda built: built.torn_bytes, is_right=True),
            Column("", lambda built: [finding.as_dict() for finding in built.findings], json="findings"),
        ),
        rows=done.built,
        more={
            "result": "refused" if states["refused"] else "done",
            "summary": {
                "segments": len(done.built), **states,
                "records": sum(built.records for built in done.built), "bytes": bytes_,
                "seconds": round(seconds, 3), "megabytes_per_second": rate(bytes_, seconds),
            },
        },
    )  # fmt: skip
    return Page(draw=draw, things=things)
