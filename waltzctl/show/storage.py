"""Output about storages: their replicas, and the results of checks and rebuilds of their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import typer

from waltzctl.show.forms import Column, Columns, Line, Listing, Part, Table, attributes, objects, verdict, whole_error
from waltzctl.show.terminal import ROWS_MAX, count, duration, printable, rate, size
from waltzd.errors import WaltzError
from waltzd.format.finding import Finding
from waltzd.protocol.descriptions import PartitionDescription, ReplicaStatus, ScrubStatus, StorageDescription, VerifySummary
from waltzd.storage.offline.reindex import IndexResult, IndexState, Rebuild
from waltzd.storage.offline.verify import PartitionReport, Report

# -- findings ----------------------------------------------------------------------------------------------------------

FINDINGS: Columns[Finding] = (
    Column("code", lambda found: str(found.code)),
    *attributes("path first_byte last_byte first_id last_id detail"),
    Column("remedy", is_wide=True),
)


def _finding(finding: Finding) -> Iterator[Part]:
    """Yield the lines of a finding. Path and byte ranges are never broken, so that they can be copied."""
    where = [] if finding.first_byte is None else [f"bytes {finding.first_byte} to {finding.last_byte}"]
    if finding.first_id is not None:
        is_one = finding.first_id == finding.last_id
        where.append(f"id {finding.first_id}" if is_one else f"ids {finding.first_id} to {finding.last_id}")
    yield ""
    yield Line(f"{finding.code}  {finding.path}", "bold")
    if where:
        yield f"  {', '.join(where)}"
    for text in (finding.detail, f"Next: {finding.remedy}"):
        yield Line(f"  {text}", fit="wrap")


def _checked(findings: Sequence[Finding], *rest: Part, content: Mapping[str, Any]) -> Listing[Finding]:
    """Return the result of a check of files: the verdict, the findings, then the rest."""
    headline = verdict(count(len(findings), "finding") if findings else "clean", is_good=not findings)
    return Listing(
        kind="findings",
        columns=FINDINGS,
        rows=findings,
        page=[headline, *(part for one in findings for part in _finding(one)), *rest],
        content={
            "result": "findings" if findings else "clean",
            **content,
            "findings": [finding.as_dict() for finding in findings],
        },
    )


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


REPLICAS: Columns[PartitionDescription] = (
    Column("partition"),
    Column("state", state),
    Column("floor", "status.floor", is_wide=True),
    Column("last id", "status.last_id"),
    Column("low mark", "status.low_mark", is_wide=True),
    Column("committed", "status.committed"),
    Column("session", "status.promised_session"),
    Column("segments", "status.segments"),
    Column("bytes", "disk_bytes", cell=size),
    Column("story", is_wide=True),
)


def scrubbed(scrub: ScrubStatus) -> str:
    """Describe the pace of a scrub, how far it is, and what it found."""
    if not scrub.period_seconds:
        return "off (scrub_seconds is 0)"
    age = "not all once" if scrub.age_ms is None else f"all read since {duration(scrub.age_ms)} ago"
    sentence = (
        f"{size(scrub.bytes_per_second)}/s, {size(scrub.done_bytes)} of {size(scrub.total_bytes)} in this round, {age}"
    )
    if scrub.damaged_segments:
        sentence += f"; {count(scrub.damaged_segments, 'segment')} found damaged, the last: {scrub.last_finding}"
    return sentence


def replicas(found: StorageDescription, **given: Any) -> Listing[PartitionDescription]:
    nothing = "The storage has no replicas."
    return Listing(kind="partitions", columns=REPLICAS, rows=found.assigned, nothing=nothing, **given)


def description(found: StorageDescription) -> Listing[PartitionDescription]:
    document = asdict(found)
    document["waltzd_version"] = document.pop("version")
    document["assigned"] = [
        {
            "partition": one.partition, "story": one.story, "queued_bytes": one.queued_bytes,
            "disk_bytes": one.disk_bytes, "refused": whole_error(one.refused), "status": _status(one.status),
        }
        for one in found.assigned
    ]  # fmt: skip
    return replicas(found, page=list(_description(found)), content=document)


def _description(found: StorageDescription) -> Iterator[Part]:
    wrong = [one for one in found.assigned if one.status is None or not one.status.is_sound]
    sentence = "draining" if found.is_draining else f"{len(wrong)} damaged or refused" if wrong else "sound"
    yield verdict(sentence, is_good=not wrong)
    who = f"storage {found.name}, " if found.name else ""
    yield f"{who}cluster {found.cluster_key}, {found.directory}, waltzd {found.version}"
    yield f"can write {'formats' if len(found.formats) > 1 else 'format'} {' and '.join(map(str, found.formats))}"
    for one in wrong:
        yield Line(one.story, "red")
    yield Table(REPLICAS, found.assigned)
    if found.set_aside:
        names, bytes_ = ", ".join(one.name for one in found.set_aside), sum(one.bytes for one in found.set_aside)
        yield f"set aside: {size(bytes_)} in {names}; `waltzctl storage recover --clean` deletes it"
    if found.scrub is not None:
        yield Line(f"scrub: {scrubbed(found.scrub)}", "yellow" if found.scrub.damaged_segments else "")
    done = found.statistics
    mean = done.group_microseconds / done.groups / 1000 if done.groups else 0.0
    yield (
        f"{count(len(found.assigned), 'partition')} of {found.partitions}, {size(found.free_bytes)} free, up "
        f"{found.uptime_ms / 1000:.0f} s: {count(done.appended_records, 'record')} appended in "
        f"{count(done.groups, 'group')} ({mean:.1f} ms each, {done.group_microseconds_max / 1000:.1f} ms at most), "
        f"{count(done.read_records, 'record')} read, {count(done.refused_calls, 'call')} refused"
    )


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


def results(found: Mapping[int, WaltzError | None], done: str) -> Listing[Outcome]:
    """Return the result for each partition."""
    columns: Columns[Outcome] = (
        Column("partition", lambda outcome: outcome[0]),
        Column("result", lambda outcome: done if outcome[1] is None else "refused"),
        Column("", lambda outcome: whole_error(outcome[1]), json="error"),
    )
    page = [f"partition {number}: {done}" for number, error in found.items() if error is None]
    return Listing(kind="partitions", columns=columns, rows=list(found.items()), page=page)


def print_refusals(found: Mapping[int, WaltzError | None]) -> None:
    """Print on standard error why partitions were refused."""
    for number, error in found.items():
        for line in () if error is None else error.lines():
            typer.echo(f"partition {number}: {printable(line)}", err=True)


def verification(findings: Sequence[Finding], summaries: Sequence[VerifySummary]) -> Listing[Finding]:
    """Return the result of a check of a running storage."""
    names = {"segment": "segments", "record": "records"}
    sums = [count(sum(getattr(one, name) for one in summaries), noun) for noun, name in names.items()]
    bytes_ = size(sum(summary.bytes for summary in summaries))
    sentence = ", ".join([count(len(summaries), "partition"), *sums, bytes_])
    return _checked(findings, sentence, content={"partitions": [asdict(summary) for summary in summaries]})


# -- verify-segments ---------------------------------------------------------------------------------------------------

PARTITIONS: Columns[PartitionReport] = (
    Column("partition", none="?"),
    Column("", "directory", json="path"),
    Column("segments"),
    Column("ids", lambda one: f"{one.first_id:,} to {one.last_id:,}" if one.last_id >= one.first_id else "none", json=""),
    *(Column("", json=name) for name in ("first_id", "last_id")),
    Column("records"),
    Column("size", "bytes", cell=size, json="bytes"),
    Column("", json="in_flight_bytes"),
    Column("findings", lambda one: len(one.findings)),
)


def report(found: Report, *, seconds: float) -> Listing[Finding]:
    """Return the result of an offline check."""
    findings, partitions = found.findings, found.partitions
    sums = {
        name: sum(getattr(one, name) for one in partitions) for name in ("segments", "records", "bytes", "in_flight_bytes")
    }
    shown = [one for one in partitions if one.findings or len(partitions) <= ROWS_MAX]
    rest: list[Part] = [Table(PARTITIONS, shown)]
    if len(shown) < len(partitions):
        rest.append(f"{len(partitions) - len(shown)} more partitions without findings")
    speed = f"{size(sums['bytes'])} in {seconds:.1f} s ({rate(sums['bytes'], seconds)} MB/s)"
    rest.append(
        f"{count(len(partitions), 'partition')}, {count(sums['segments'], 'segment')}, {count(sums['records'], 'record')}, "
        f"{speed}, {count(len(findings), 'finding')}"
    )
    if found.held:
        above = f"{size(sums['in_flight_bytes'])} above the durable marks"
        rest.append(
            f"A process holds {', '.join(found.held)}: the end of each log ({above}) may be in flight and was not judged."
        )
    content = {
        "held": found.held,
        "summary": {
            "partitions": len(partitions), "segments": sums["segments"], "records": sums["records"],
            "bytes": sums["bytes"], "seconds": round(seconds, 3), "megabytes_per_second": rate(sums["bytes"], seconds),
            "in_flight_bytes": sums["in_flight_bytes"], "findings": len(findings),
        },
        "partitions": objects(PARTITIONS, partitions),
    }  # fmt: skip
    return _checked(findings, *rest, content=content)


# -- rebuild-index -----------------------------------------------------------------------------------------------------


def rebuilding(done: Rebuild, *, seconds: float) -> Listing[IndexResult]:
    bytes_ = sum(built.data_bytes for built in done.built)
    order = (IndexState.REBUILT, IndexState.RIGHT, IndexState.REFUSED)
    states = {state.value: sum(built.state is state for built in done.built) for state in order}
    page = [*(part for built in done.built for part in _built(built))]
    page += [part for finding in done.storage_findings for part in _finding(finding)]
    page.append(
        f"{count(len(done.built), 'segment')}: {states['rebuilt']} rebuilt, {states['right']} were right, "
        f"{states['refused']} refused; {size(bytes_)} in {seconds:.1f} s ({rate(bytes_, seconds)} MB/s)"
    )
    return Listing(
        kind="segments",
        columns=(
            Column("path"),
            Column("state", "state.value"),
            *attributes("records left_out"),
            Column("made from", lambda built: "footer" if built.is_from_footer else "records", is_wide=True),
            Column("torn bytes"),
            Column("", lambda built: [finding.as_dict() for finding in built.findings], json="findings"),
        ),
        rows=done.built,
        page=page,
        more={
            "result": "refused" if states["refused"] else "done",
            "summary": {
                "segments": len(done.built), **states,
                "records": sum(built.records for built in done.built), "bytes": bytes_,
                "seconds": round(seconds, 3), "megabytes_per_second": rate(bytes_, seconds),
            },
        },
    )  # fmt: skip


def _built(built: IndexResult) -> Iterator[Part]:
    if built.state is IndexState.REBUILT:
        out = f", {count(built.left_out, 'id')} left out" if built.left_out else ""
        footer = ", from its footer" if built.is_from_footer else ""
        yield f"rebuilt  {built.path}: {count(built.records, 'record')}{out}{footer}"
    if built.torn_bytes:
        torn = f"a torn tail of {count(built.torn_bytes, 'byte')} stands behind the last record"
        yield f"{built.data_path}: {torn}; the storage cuts it at its next start"
    for finding in built.findings:
        yield from _finding(finding)
