"""How answers of a running storage look, for people and for scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from waltzctl.render import console, count, error_json, printable, put_json, show_finding, size
from waltzd.errors import WaltzError

if TYPE_CHECKING:
    from waltzd.format.finding import Finding
    from waltzd.protocol.descriptions import PartitionDescription, StorageDescription, VerifySummary


def description(found: StorageDescription, output: str) -> None:
    if output == "json":
        put_json(_description_json(found))
        return
    from rich import box
    from rich.table import Table

    out = console()
    wrong = [one for one in found.assigned if one.status is None or not one.status.is_sound]
    verdict = "draining" if found.is_draining else f"{len(wrong)} damaged or refused" if wrong else "sound"
    out.print(verdict, style="bold red" if wrong else "bold green")
    who = f"storage {found.name}, " if found.name else ""
    out.print(f"{who}cluster {found.cluster_key}, {found.directory}, waltzd {found.version}", soft_wrap=True)
    for one in wrong:
        out.print(one.story, style="red", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for name in ("partition", "state", "last id", "low", "committed", "session", "segments", "size"):
        table.add_column(name, justify="left" if name == "state" else "right", overflow="fold")
    for one in found.assigned:
        table.add_row(str(one.partition), *_row(one))
    if found.assigned:
        out.print(table)
    if found.set_aside:
        names = ", ".join(one.name for one in found.set_aside)
        out.print(
            f"set aside: {size(sum(one.bytes for one in found.set_aside))} in {names}; `waltzctl storage clean` deletes it",
            soft_wrap=True,
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


def state(one: PartitionDescription) -> str:
    status = one.status
    if status is None:
        return "refused"
    if not status.is_available:
        return "offline"
    if status.is_full:
        return "disk full"
    return "sound" if status.is_sound else "damaged"


def _row(one: PartitionDescription) -> list[str]:
    status = one.status
    if status is None:
        return [state(one), *[""] * 6]
    marks = (status.last_id, status.low_mark, status.committed, status.promised_session, status.segments)
    return [state(one), *[f"{mark:,}" for mark in marks], size(one.disk_bytes)]


def _description_json(found: StorageDescription) -> dict[str, Any]:
    out = asdict(found)
    out["waltzd_version"] = out.pop("version")
    out["cluster_key"] = str(found.cluster_key)
    out["instance"] = None if found.instance is None else str(found.instance)
    out["assigned"] = [
        {
            "partition": one.partition,
            "story": one.story,
            "queued_bytes": one.queued_bytes,
            "disk_bytes": one.disk_bytes,
            "refused": None if one.refused is None else error_json(one.refused),
            "status": None
            if one.status is None
            else {
                **asdict(one.status),
                "incarnation": str(one.status.incarnation),
                "is_sound": one.status.is_sound,
                "findings": [finding.as_dict() for finding in one.status.findings],
            },
        }
        for one in found.assigned
    ]
    return out


def results(found: dict[int, WaltzError | None], done: str, output: str) -> None:
    if output == "json":
        put_json({"partitions": results_json(found, done)})
        return
    for number, error in found.items():
        if error is None:
            typer.echo(f"partition {number}: {done}")
        else:
            for line in error.lines():
                typer.echo(f"partition {number}: {printable(line)}", err=True)


def results_json(found: dict[int, WaltzError | None], done: str) -> list[dict[str, Any]]:
    return [
        {
            "partition": number,
            "result": done if error is None else "refused",
            "error": None if error is None else error_json(error),
        }
        for number, error in found.items()
    ]


def verification(findings: list[Finding], summaries: list[VerifySummary], output: str) -> None:
    if output == "json":
        put_json(
            {
                "result": "findings" if findings else "clean",
                "partitions": [asdict(summary) for summary in summaries],
                "findings": [finding.as_dict() for finding in findings],
            }
        )
        return
    out = console()
    verdict = count(len(findings), "finding") if findings else "clean"
    out.print(verdict, style="bold red" if findings else "bold green")
    for finding in findings:
        show_finding(out, finding)
    records, bytes_ = sum(summary.records for summary in summaries), sum(summary.bytes for summary in summaries)
    segments = sum(summary.segments for summary in summaries)
    out.print(
        f"{count(len(summaries), 'partition')}, {count(segments, 'segment')}, {count(records, 'record')}, {size(bytes_)}",
        soft_wrap=True,
    )
