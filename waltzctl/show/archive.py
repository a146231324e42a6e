"""How far archives reach, and what was found wrong in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from waltzctl.shell.numbers import spell
from waltzctl.show.forms import Column, Columns, Listing, Page, grid, objects
from waltzctl.show.terminal import console, count, paragraph, size

if TYPE_CHECKING:
    from rich.console import Console

    from waltzd.archive.manifest import Manifest
    from waltzd.archive.verification import Flaw, Survey


@dataclass(frozen=True, kw_only=True)
class Reaching:
    """How far the archive of one partition reaches."""

    partition: int
    archived: int | None
    committed: int | None
    """As its owner says; None where none answers."""
    floor: int
    """The first id that storages have."""
    manifest: int | None
    archive: str
    sha256: str
    trouble: str
    checked_ms: int | None
    """How long ago it was begun to look for all that is archived, with success."""
    missing: str

    @property
    def checked(self) -> str:
        """For people."""
        if self.missing:
            return "incomplete"
        if self.checked_ms is None:
            return "" if self.archived is None else "not yet"
        hours = self.checked_ms / 3_600_000
        return f"{hours:.0f} h ago" if hours >= 1 else f"{60 * hours:.0f} min ago"

    @property
    def behind(self) -> int | None:
        """Committed transactions that are not archived: at least what stands in the segment that is being written."""
        return None if self.committed is None else self.committed - (-1 if self.archived is None else self.archived)


REACHING: Columns[Reaching] = (
    Column("partition", lambda one: one.partition, is_right=True, cell=str),
    Column("archived", lambda one: one.archived, is_right=True, json="archived_to"),
    Column("committed", lambda one: one.committed, is_right=True),
    Column("behind", lambda one: one.behind, is_right=True),
    Column("floor", lambda one: one.floor, is_right=True),
    Column("manifest", lambda one: one.manifest, is_right=True),
    Column("checked", lambda one: one.checked, json=""),
    Column("", lambda one: one.checked_ms, json="checked_ms_ago"),
    Column("archive", lambda one: one.archive, is_wide=True),
    Column("sha256", lambda one: one.sha256, is_wide=True),
    Column("trouble", lambda one: one.trouble, is_wide=True),
    Column("missing", lambda one: one.missing, is_wide=True),
)
FLAWS: Columns[Flaw] = (
    Column("object", lambda one: one.name),
    Column(
        "partition", lambda one: one.partition, is_right=True, cell=lambda number: "" if number is None else str(number)
    ),
    Column("first", lambda one: one.first, is_right=True),
    Column("last", lambda one: one.last, is_right=True),
    Column("detail", lambda one: one.detail),
)


BRANCHES: Columns[Manifest] = (
    Column("partition", lambda one: one.partition, is_right=True, cell=str),
    Column("timeline", lambda one: one.lineage.number, is_right=True),
    Column("fork", lambda one: one.lineage.fork if one.lineage.later else None, is_right=True),
    Column("archived", lambda one: one.last, is_right=True, json="archived_to"),
    Column("segments", lambda one: one.total.segments, is_right=True),
    Column("shared", lambda one: one.shared, is_right=True, json="shared_segments"),
    Column("began", lambda one: one.lineage.later[-1].began if one.lineage.later else None),
    Column("cause", lambda one: one.lineage.later[-1].cause if one.lineage.later else None),
    Column("identity", lambda one: str(one.timeline), is_wide=True),
)


def branches(found: Sequence[Manifest]) -> Page:
    """Timelines in a store, those of one partition in their order."""

    def draw(out: Console) -> None:
        grid(out, BRANCHES, found)

    listing = Listing(kind="timelines", columns=BRANCHES, rows=found)
    return Page(draw=draw, things=listing, told={"timelines": objects(BRANCHES, found)})


def troubles(found: Sequence[Reaching]) -> list[str]:
    """Return a sentence for each trouble, with all partitions that have it."""
    said: dict[str, list[int]] = {}
    for one in found:
        for trouble, words in ((one.trouble, "does not go on"), (one.missing, "lacks what was in it")):
            if trouble:
                said.setdefault(f"{words}: {trouble}", []).append(one.partition)
    return [f"{spell(numbers)}: the archive {sentence}" for sentence, numbers in said.items()]


def reaching(found: Sequence[Reaching]) -> Page:
    def draw(out: Console) -> None:
        grid(out, REACHING, found)
        for sentence in troubles(found):
            paragraph(out, sentence, "yellow")
        if not any(one.archive for one in found):
            out.print("Nothing is archived: set `archive` in the configuration of the storages.", soft_wrap=True)

    told = {"partitions": objects(REACHING, found)}
    return Page(draw=draw, things=Listing(kind="partitions", columns=REACHING, rows=found), told=told)


SIGNATURES = {
    "verified": "signatures: {} verified",
    "unsigned": "{} without a signature: whoever could write to the store may have put them there",
    "unchecked": "{} signed, and not checked: WALTZ_ARCHIVE_KEY names no key",
}


def verified(
    place: str, found: Survey, flaws: Sequence[Flaw], seconds: float, *, is_quick: bool, signatures: Mapping[str, int]
) -> Page:
    totals = [manifest.total for manifest in found.manifests.values()]
    segments, stored = sum(total.segments for total in totals), sum(total.stored_bytes for total in totals)

    def draw(out: Console) -> None:
        out.print(count(len(flaws), "finding") if flaws else "clean", style="bold red" if flaws else "bold green")
        for flaw in flaws:
            out.print()
            _draw_flaw(out, flaw)
        how = "sizes of" if is_quick else "all bytes of"
        out.print(
            f"{how} {count(segments, 'segment')} of {count(len(totals), 'partition')}, {size(stored)}, in {seconds:.1f} s",
            soft_wrap=True,
        )
        for kind, words in SIGNATURES.items():
            if signatures.get(kind):
                out.print(words.format(count(signatures[kind], "object")), soft_wrap=True)
        if found.orphans:
            out.print(
                f"{count(len(found.orphans), 'orphan')}: `waltzctl archive heal --clean` removes them", soft_wrap=True
            )

    told = {
        "result": "findings" if flaws else "clean", "store": place, "archive": str(found.label.archive),
        "cluster": str(found.label.cluster), "is_quick": is_quick, "seconds": round(seconds, 3),
        "partitions": [_partition(number, found) for number in sorted(found.manifests)],
        "signatures": {kind: signatures.get(kind, 0) for kind in SIGNATURES},
        "orphans": len(found.orphans), "pending": len(found.pending), "strange": [one.name for one in found.strange],
        "findings": objects(FLAWS, flaws),
    }  # fmt: skip
    return Page(draw=draw, things=Listing(kind="findings", columns=FLAWS, rows=flaws), told=told)


def _partition(number: int, found: Survey) -> dict[str, Any]:
    manifest, total = found.manifests[number], found.manifests[number].total
    return {
        "partition": number, "manifest": manifest.number, "sha256": manifest.sha256, "first": total.first,
        "last": total.last, "segments": total.segments, "record_bytes": total.record_bytes, "crc": f"{total.crc:08x}",
        "bytes": total.stored_bytes,
    }  # fmt: skip


def _draw_flaw(out: Console, flaw: Flaw) -> None:
    out.print(flaw.name, style="bold", soft_wrap=True)
    if flaw.first is not None:
        out.print(f"  partition {flaw.partition}, ids {flaw.first:,} to {flaw.last:,}", soft_wrap=True)
    out.print(f"  {flaw.detail}", soft_wrap=True)


def told_flaw(flaw: Flaw, why: str) -> None:
    """One that stays."""
    out = console(to_stderr=True)
    _draw_flaw(out, flaw)
    out.print(f"  {why}", soft_wrap=True)


def told_strange(found: Survey) -> None:
    """Nothing is done with objects that no archive has."""
    if found.strange:
        text = f"{count(len(found.strange), 'object')} that no archive has: {found.strange[0].name}"
        console(to_stderr=True).print(text if len(found.strange) == 1 else f"{text} and others", soft_wrap=True)
