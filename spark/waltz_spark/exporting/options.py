"""What was asked of an export, out of options: which log, which ids, which files. Nothing is written here.

What cannot end well is refused before Java is started.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from waltzctl.options import From
from waltzctl.reach import Cluster
from waltzd.errors import BadArgument, ExportGap

if TYPE_CHECKING:
    from waltz_spark.exporting.export import Range
    from waltz_spark.exporting.form import Form
    from waltz_spark.exporting.manifest import Manifest, Query
    from waltz_spark.log.origin import Origin
    from waltz_spark.payloads.payload import Decoder


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which log is meant: directories of storages, or a running cluster."""

    sources: Annotated[
        tuple[str, ...],
        Option(
            "--source",
            metavar="DIR",
            help="Read the directory of a storage, or of several of one cluster, in place of a running cluster.",
        ),
    ] = ()
    allow_uncommitted: Annotated[
        bool, Option("--allow-uncommitted", help="With --source: also what nobody knows to be committed.")
    ] = False
    cluster: Cluster


Log = Annotated[Asked, From(Asked)]


def origin_of(log: Asked) -> Origin:
    from waltz_spark.exporting import opening

    if log.sources:
        for option in log.cluster.typed:
            raise BadArgument(
                f"--source and {option} name two logs", not_done="nothing was read", next_step="say one of them only"
            )
        places = [source if "://" in source else str(Path(source).absolute()) for source in log.sources]
        options = {opening.PATHS: json.dumps(places)}
        if log.allow_uncommitted:
            options[opening.ALLOW_UNCOMMITTED] = "true"
        return opening.open_origin(options)
    if log.allow_uncommitted:
        raise BadArgument("--allow-uncommitted needs --source: a running cluster gives only what is committed")
    there = log.cluster.reach()
    options = {opening.COORDINATOR: there.hosts, opening.ROOT: there.root}
    names = {"tls_certificate": opening.TLS_CERTIFICATE, "tls_key": opening.TLS_KEY, "tls_ca": opening.TLS_CA}
    options |= {names[name]: value for name, (value, _) in there.origins.items() if name in names}
    return opening.open_origin(options)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What was asked of an export; None where nothing was said."""

    format: str | None
    compression: str | None
    decode: str | None
    lossless: bool | None
    engine: str | None
    select: str | None
    where: str | None
    bytes_per_second: int | None
    file_bytes: int | None
    ids: Range


def shape_of(wish: Wish, before: Manifest | None) -> tuple[Form, Decoder | None, bool]:
    """What nobody said is as it was when the export began."""
    from waltz_spark.exporting.form import form_of

    there = None if before is None else before.shape
    format_ = wish.format or (there.format if there else "parquet")
    same = there is not None and there.format == format_
    form = form_of(format_, wish.compression or (there.compression if there and same else None))
    is_lossless = bool(wish.lossless if wish.lossless is not None else there and there.lossless)
    text = wish.decode if wish.decode is not None else (there.decoder if there else "")
    if is_lossless and (form.format != "parquet" or text):
        raise BadArgument(
            "--lossless keeps records and segments as they are: it goes with parquet, and without --decode",
            not_done="nothing was written",
        )
    if not text:
        return form, None, is_lossless
    from waltz_spark.payloads.decoders import decoder_of

    return form, decoder_of(text), is_lossless


def query_of(wish: Wish, before: Manifest | None, form: Form, *, is_lossless: bool) -> Query:
    """What nobody said is as it was when the export began. What needs no Spark to be refused is refused here."""
    from waltz_spark.exporting.manifest import ARROW, SPARK, Query

    there = Query() if before is None else before.shape.query
    select = there.select if wish.select is None else wish.select.strip()
    where = there.where if wish.where is None else wish.where.strip()
    needs = [name for name, text in (("--select", select), ("--where", where)) if text]
    engine = wish.engine or (SPARK if needs else there.engine)
    if engine == ARROW:
        if needs:
            raise BadArgument(
                f"{needs[0]} is for Spark to compute, and --engine arrow does without Spark's SQL",
                not_done="nothing was written",
                next_step="leave --engine out",
            )
        return Query()
    if is_lossless:
        raise BadArgument(
            f"--lossless keeps records and segments as they are: it does not go with {(*needs, '--engine spark')[0]}",
            not_done="nothing was written",
        )
    from waltz_spark.exporting.spark_form import options_of

    options_of(form)
    found = Query(engine=engine, select=select, where=where)
    assert found.items
    return found


def data_bytes_of(form: Form, file_bytes: int) -> int:
    """About so many bytes of log make a file of that size."""
    return max(1, int(file_bytes * file_bytes / max(1, form.guess(file_bytes))))


def size_of_option(name: str, text: str | None) -> int | None:
    from waltz_spark.log.plan import size_of

    return None if text is None else size_of(name, text.removesuffix("/s"))


def range_of(partitions: str | None, from_txn: str | None, to_txn: str | None) -> Range:
    from waltz_spark.exporting.export import Range
    from waltz_spark.log.selection import partitions_of

    first, first_of_others = _ids("--from-txn", from_txn)
    last, last_of_others = _ids("--to-txn", to_txn)
    return Range(
        partitions=None if partitions is None else partitions_of(partitions),
        first=first, last=last, first_of_others=first_of_others, last_of_others=last_of_others,
    )  # fmt: skip


def _ids(option: str, text: str | None) -> tuple[dict[int, int], int | None]:
    """`100` for all, `0=100,3=7` for some."""
    if text is None:
        return {}, None
    try:
        if "=" not in text:
            return {}, _id(text)
        pairs = [part.split("=") for part in text.split(",")]
        found = {_id(number): _id(value) for number, value in pairs}
    except ValueError as error:
        raise BadArgument(f"{option} {text}: it has to be an id, or PARTITION=ID with commas between") from error
    if len(found) < len(pairs):
        raise BadArgument(f"{option} {text}: a partition is named twice")
    return found, None


def _id(text: str) -> int:
    if not text.strip().isdecimal() or len(text) > 19:
        raise ValueError(text)
    return int(text)


def make_importable(py_files: Sequence[str]) -> None:
    """What the workers will import has to be importable here, where columns are found out."""
    for given in py_files:
        path = Path(given)
        if not path.exists():
            raise BadArgument(f"--py-files {given}: there is no such file")
        place = str(path.absolute() if path.suffix in (".zip", ".egg", ".whl") or path.is_dir() else path.absolute().parent)
        if place not in sys.path:
            sys.path.insert(0, place)


# -- what cannot end well ----------------------------------------------------------------------------------------------


def check_apart(output: str, sources: Sequence[str]) -> None:
    """A storage takes every directory with a number for a partition, and an export takes every file for one of its own.
    `output`: a directory of this machine."""
    there = os.path.realpath(output)
    for source in sources:
        place = os.path.realpath(source)
        if os.path.commonpath([there, place]) in (there, place):
            raise BadArgument(
                f"{output} and {source} lie within each other: the one would be damage to the other",
                not_done="nothing was written",
                next_step="name an output beside the directory that is read",
            )


def check_ends(ends: Mapping[int, int], reached: Mapping[int, int], place: str) -> None:
    """Of a running cluster, which has everything that it ever committed. `ends`: the partitions whose log ends before the
    export does, and where; `reached`: the first id that the export does not have."""
    for number, last in sorted(ends.items()):
        raise ExportGap(
            f"partition {number}: the export has ids up to {reached[number] - 1}, and {place} ends at id {last}, as its "
            "owner says",
            next_step="run it again: an owner that was replaced just now may know less. If it stays so, the cluster was "
            "set back, and what it appends now has ids that the export has already: take a new output",
        )
