"""How Java, Spark and the archive of their classes look."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from waltz_spark.engine.java import Note, Place, Removed
from waltzctl.show.forms import Column, Columns, Listing, Page, put, put_json
from waltzctl.show.terminal import console, count, size
from waltzd.errors import WaltzError

if TYPE_CHECKING:
    from rich.console import Console

PROGRAMS: Columns[dict[str, Any]] = (Column("name"), Column("version"), Column("place"), Column("home"))


def described(place: Place | WaltzError) -> dict[str, Any]:
    if isinstance(place, WaltzError):
        return {"error": {"code": place.code, "message": place.message, "next_step": place.detail_next_step}}
    note = place.note()
    archive = None if note is None else {
        "path": str(place.path), "bytes": note.bytes, "made": note.made, "usable": bool(place.flags()),
        "before": asdict(note.before), "after": asdict(note.after),
    }  # fmt: skip
    return {
        "java": {"home": place.java.home, "version": place.java.version, "place": place.java.place},
        "spark": {"version": place.spark_version, "place": place.spark_place},
        "archive": archive,
    }


def java_lines(place: Place | WaltzError) -> list[str]:
    """What it would run on, or why it would not."""
    if isinstance(place, WaltzError):
        return [f"It would not start: {place.lines()[0]}", f"Next: {place.detail_next_step}"]
    java = place.java
    return [f"It would run on Java {java.version}: {java.home} (from {java.place})."]


def found(place: Place, output: str) -> None:
    told = described(place)
    rows = [{"name": name, "home": "", **told[name]} for name in ("java", "spark")]

    def draw(out: Console) -> None:
        for line in _lines(place):
            out.print(line, soft_wrap=True)

    put(Page(draw=draw, things=Listing(kind="programs", columns=PROGRAMS, rows=rows), told=told), output)


def _lines(place: Place) -> list[str]:
    java, note = place.java, place.note()
    said = [f"Java {java.version}: {java.home} (from {java.place})", f"Spark {place.spark_version}: {place.spark_place}"]
    if note is None:
        return [*said, "No archive of classes for these: `waltzctl spark warmup` makes exports start faster."]
    archive = f"Archive of classes: {place.path}, {size(note.bytes)}, made {note.made}"
    if not place.flags():
        return [*said, archive, "It is damaged and is not used: `waltzctl spark warmup` makes a new one."]
    return [*said, archive, _gain(note)]


def _gain(note: Note) -> str:
    """Seconds of the processor: what a clock says depends on what else the machine does."""
    return f"A small export took {note.before.cpu:.1f} s of CPU, and takes {note.after.cpu:.1f} s with it."


def warmed_up(place: Place, note: Note, output: str) -> None:
    if output == "json":
        put_json({"result": "made", **described(place)})
        return
    out = console()
    out.print(f"Made {place.path}, {size(note.bytes)}, for Java {note.java_version} and Spark {note.spark_version}.",
              soft_wrap=True)  # fmt: skip
    out.print(_gain(note), soft_wrap=True)


def removed(gone: Removed, output: str) -> None:
    if output == "json":
        put_json({"result": "removed" if gone.archives else "nothing there", **asdict(gone)})
        return
    said = f"Removed {count(gone.archives, 'archive')}, {size(gone.bytes)}." if gone.archives else "There is no archive."
    console().print(said, soft_wrap=True)
