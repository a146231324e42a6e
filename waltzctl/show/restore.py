"""Where a restore would end, and what came of a drill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from waltzctl.show.forms import Column, Columns, Listing, Page, grid
from waltzctl.show.terminal import count, rate, size

if TYPE_CHECKING:
    from rich.console import Console

    from waltzd.archive.cut_point import ArchivedLog, Cut
    from waltzd.format.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Drill:
    """What came of a restore that nobody needed."""

    place: str
    cut: Cut
    logs: Mapping[int, ArchivedLog]
    bytes: int
    restored_seconds: float
    verified_seconds: float
    records: int
    findings: tuple[Finding, ...]

    @property
    def is_right(self) -> bool:
        return not self.findings and self.records == sum(point.mark + 1 for point in self.cut.points.values())


ENDS: Columns[Mapping[str, Any]] = (
    Column("partition", is_right=True, cell=str),
    Column("last id", is_right=True),
    Column("time"),
    Column("stored to", is_right=True),
    Column("given up", is_right=True),
)


def marks(place: str, cut: Cut, moment: str | None, rows: Sequence[Mapping[str, Any]]) -> Page:
    """In JSON it is what `--to-marks` takes."""

    def draw(out: Console) -> None:
        out.print(f"all partitions at {moment}" if moment is not None else "each partition by itself", style="bold")
        grid(out, ENDS, rows)

    told = {
        "store": place, "moment": moment, "marks": {str(row["partition"]): row["last_id"] for row in rows},
        "partitions": [dict(row) for row in rows],
    }  # fmt: skip
    return Page(draw=draw, things=Listing(kind="partitions", columns=ENDS, rows=rows), told=told)


def drilled(found: Drill, moment: str | None, rows: Sequence[Mapping[str, Any]]) -> Page:
    def draw(out: Console) -> None:
        out.print(
            "restored and whole" if found.is_right else "NOT whole", style="bold green" if found.is_right else "bold red"
        )
        for finding in found.findings:
            out.print(f"  {finding.sentence()}", soft_wrap=True)
        out.print(f"all partitions at {moment}" if moment is not None else "each partition by itself")
        grid(out, ENDS, rows)
        out.print(
            f"{count(found.records, 'record')}, {size(found.bytes)}: restored in {found.restored_seconds:.1f} s "
            f"({rate(found.bytes, found.restored_seconds)} MB/s), every record checked in {found.verified_seconds:.1f} s",
            soft_wrap=True,
        )

    told = {
        "result": "whole" if found.is_right else "findings", "store": found.place, "moment": moment,
        "bytes": found.bytes, "records": found.records, "restored_seconds": round(found.restored_seconds, 3),
        "verified_seconds": round(found.verified_seconds, 3), "partitions": [dict(row) for row in rows],
        "findings": [finding.sentence() for finding in found.findings],
    }  # fmt: skip
    return Page(draw=draw, things=Listing(kind="partitions", columns=ENDS, rows=rows), told=told)
