"""What was asked of an export, out of options: which log, which ids, which files. Nothing is written here.

What cannot end well is refused before Java is started.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from waltz_spark.log.plan import size_of
from waltzctl.shell import moment
from waltzctl.shell.cluster_target import ClusterOptions
from waltzctl.shell.numbers import chosen
from waltzctl.shell.options import option_group
from waltzd.errors import BadArgument, ExportGap
from waltzd.protocol.channels import named_in

if TYPE_CHECKING:
    from waltz_spark.export.export import Range
    from waltz_spark.export.form import Form
    from waltz_spark.export.manifest import Manifest
    from waltz_spark.log.origin import Origin
    from waltz_spark.payloads.payload import Decoder


FILE_BYTES_MIN = 4096
"""Smaller ones would be nothing but their heads."""


@option_group
@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Options that name the log: directories of storages, or a running cluster with or without its archive."""

    sources: Annotated[
        tuple[str, ...],
        Option(
            "--source",
            metavar="DIR",
            help="Read directories of storages of one cluster in place of a running cluster.",
        ),
    ] = ()
    archive: Annotated[
        str | None,
        Option(
            "--archive",
            metavar="STORE",
            help="Read archived segments from the archive of the running cluster.",
        ),
    ] = None
    allow_uncommitted: Annotated[
        bool, Option("--allow-uncommitted", help="With --source: also what is not known to be committed.")
    ] = False
    cluster: ClusterOptions

    def numbers(self, text: str) -> tuple[int, ...]:
        """The partitions of `0-3,orders`. Files know no channels."""
        from waltz_spark.log.selection import partitions_of

        if self.sources or not named_in(text):
            return partitions_of(text)
        return tuple(sorted(chosen(self.cluster.target(), text)))

    def origin(self) -> Origin:
        from waltz_spark.export import origin_options

        if self.sources:
            for option in [*(["--archive"] if self.archive else []), *self.cluster.typed]:
                raise BadArgument(
                    f"--source and {option} name two logs", not_done="nothing was read", next_step="say one of them only"
                )
            places = [source if "://" in source else str(Path(source).absolute()) for source in self.sources]
            options = {origin_options.PATHS: json.dumps(places)}
            if self.allow_uncommitted:
                options[origin_options.ALLOW_UNCOMMITTED] = "true"
            return origin_options.open_origin(options)
        if self.allow_uncommitted:
            raise BadArgument("--allow-uncommitted needs --source: a running cluster gives only what is committed")
        there = self.cluster.target()
        options = {origin_options.COORDINATOR: there.hosts, origin_options.ROOT: there.root}
        names = {"tls_certificate": origin_options.TLS_CERTIFICATE, "tls_key": origin_options.TLS_KEY,
                 "tls_ca": origin_options.TLS_CA,
                 "coordinator_tls": origin_options.COORDINATOR_TLS, "coordinator_tls_ca": origin_options.COORDINATOR_TLS_CA,
                 "coordinator_tls_certificate": origin_options.COORDINATOR_TLS_CERTIFICATE,
                 "coordinator_tls_key": origin_options.COORDINATOR_TLS_KEY,
                 "coordinator_credentials": origin_options.COORDINATOR_CREDENTIALS}  # fmt: skip
        options |= {names[name]: value for name, (value, _) in there.origins.items() if name in names}
        if self.archive:
            options[origin_options.ARCHIVE] = self.archive
        return origin_options.open_origin(options)

    @property
    def directories(self) -> list[str]:
        """What is read of this machine."""
        places = [*self.sources, *([self.archive] if self.archive else [])]
        return [place for place in places if "://" not in place or place.startswith("file:")]


def _rate(text: str) -> int:
    return size_of("--rate", text.removesuffix("/s"))


def _file_size(text: str) -> int:
    found = size_of("--target-file-size", text)
    if found < FILE_BYTES_MIN:
        raise BadArgument(f"--target-file-size {text}: a file has at least {FILE_BYTES_MIN} bytes")
    return found


@option_group
@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What an export is to be; None where nothing was said."""

    format: Annotated[
        Literal["parquet", "delta"] | None,
        Option("--format", help="parquet by default; delta is parquet and a Delta table of it."),
    ] = None
    compression: Annotated[
        str | None,
        Option("--compression", metavar="CODEC[:LEVEL]", help="Of the Parquet files, zstd:3 by default."),
    ] = None
    partitions: Annotated[str | None, Option("--partitions", metavar="LIST", help="Only these: 0-3,7 or channels.")] = None
    from_txn: Annotated[
        str | None,
        Option(
            "--from-txn", metavar="ID", help="The first id of each partition, or P=ID,… for some; the first that is there."
        ),
    ] = None
    to_txn: Annotated[
        str | None,
        Option(
            "--to-txn", metavar="ID", help="The last id of each partition, or P=ID,… for some; the last that is committed."
        ),
    ] = None
    since: Annotated[str | None, Option("--since", metavar="TIME", help=f"Those of this time and later. {moment.HELP}")] = (
        None
    )
    until: Annotated[str | None, Option("--until", metavar="TIME", help="Those before this time.")] = None
    incremental: Annotated[
        bool,
        Option(
            "--incremental/--no-incremental",
            help="Go on from what OUTPUT has (the default), or refuse an OUTPUT that has something.",
        ),
    ] = True
    decode: Annotated[
        str | None,
        Option(
            "--decode",
            metavar="DECODER",
            help="Columns out of payloads: json:'a bigint, b string', text, binary, or MODULE:FUNCTION.",
        ),
    ] = None
    file_bytes: Annotated[
        int | None,
        Option("--target-file-size", parser=_file_size, metavar="SIZE", help="About so large files, as 256MB."),
    ] = None
    bytes_per_second: Annotated[
        int | None,
        Option("--rate", parser=_rate, metavar="SIZE", help="Read at most so much of the log a second, as 50MB."),
    ] = None

    def ids(self, log: SourceOptions) -> Range:
        from waltz_spark.export.export import Range

        first, first_of_others = _ids("--from-txn", self.from_txn)
        last, last_of_others = _ids("--to-txn", self.to_txn)
        now = datetime.now(UTC)
        since = _time("--since", self.since, now, "--from-txn", self.from_txn)
        until = _time("--until", self.until, now, "--to-txn", self.to_txn)
        if since is not None and until is not None and until < since:
            raise BadArgument(f"--until {self.until} lies before --since {self.since}", not_done="nothing was written")
        return Range(
            partitions=None if self.partitions is None else log.numbers(self.partitions),
            first=first, last=last, first_of_others=first_of_others, last_of_others=last_of_others, since=since,
            until=until,
        )  # fmt: skip


def form_and_decoder(wish: ExportOptions, before: Manifest | None) -> tuple[Form, Decoder | None]:
    """Return what the files are to be. What was not said is as it was when the export began, but for a function: whoever
    may write into the folder of an export could name any function there, and the next run would call it."""
    from waltz_spark.export.form import form_of

    there = None if before is None else before.shape
    form = form_of(
        wish.format or (there.format if there else "parquet"),
        wish.compression or (there.compression if there else None),
    )
    text = wish.decode if wish.decode is not None else (there.decoder if there else "")
    if not text:
        return form, None
    from waltz_spark.payloads.decoders import decoder_of, is_function

    if wish.decode is None and is_function(text):
        raise BadArgument(
            f"this export was begun with --decode {text!r}, which runs code, and the command does not say so",
            not_done="nothing was written, and nothing of it was run",
            next_step="if you know it, give --decode again",
        )
    return form, decoder_of(text)


def data_bytes_of(form: Form, file_bytes: int) -> int:
    """About so many bytes of log make a file of that size."""
    return max(1, int(file_bytes * file_bytes / max(1, form.guess(file_bytes))))


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


def _time(option: str, text: str | None, now: datetime, other: str, id_: str | None) -> int | None:
    if text is None:
        return None
    if id_ is not None:
        raise BadArgument(f"{option} and {other} say the same thing twice", not_done="nothing was written",
                          next_step="leave one of them out")  # fmt: skip
    return moment.microseconds(text, now, option)


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
