"""The options of an export: the log, the ids and the files. Nothing is written here.

Errors are reported before Java is started.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from waltz_spark.export import origin_options
from waltz_spark.log.origin import Origin
from waltz_spark.log.plan import size_of
from waltz_spark.log.selection import EARLIEST, LATEST, Bound, Selection, partitions_of
from waltzctl.shell import moment
from waltzctl.shell.cluster_target import ClusterOptions
from waltzctl.shell.numbers import chosen
from waltzctl.shell.options import option_group
from waltzd.errors import BadArgument
from waltzd.errors.operations import ExportGap
from waltzd.protocol.channels import named_in

FILE_BYTES_MIN = 4096
"""Smallest target size of a file: smaller files would only have overhead."""


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
        """Parse `0-3,orders`. Directories have no channels, only numbers."""
        if self.sources or not named_in(text):
            return partitions_of(text)
        return tuple(sorted(chosen(self.cluster.target(), text)))

    def origin(self) -> Origin:
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
        """Directories of this machine that are read."""
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
    """The options about the files of an export; None for those that were not given."""

    format: Annotated[
        Literal["parquet", "delta"] | None,
        Option("--format", help="parquet by default; delta is parquet and a Delta table of it."),
    ] = None
    compression: Annotated[
        str | None,
        Option("--compression", metavar="CODEC[:LEVEL]", help="Compression of the Parquet files; zstd:3 by default."),
    ] = None
    partitions: Annotated[
        str | None, Option("--partitions", metavar="LIST", help="Partitions to export: 0-3,7 or channels.")
    ] = None
    after: Annotated[
        str | None,
        Option(
            "--after",
            metavar="ID",
            help="Start after this id in each partition, or P=ID,… for some; at the first available id by default.",
        ),
    ] = None
    through: Annotated[
        str | None,
        Option(
            "--through", metavar="ID", help="Last id of each partition, or P=ID,… for some; the last committed by default."
        ),
    ] = None
    since: Annotated[str | None, Option("--since", metavar="TIME", help=f"Start at this time. {moment.HELP}")] = None
    before: Annotated[str | None, Option("--before", metavar="TIME", help="End before this time.")] = None
    incremental: Annotated[
        bool,
        Option(
            "--incremental/--no-incremental",
            help="Add to the export in OUTPUT (the default), or refuse an OUTPUT that has one.",
        ),
    ] = True
    decode: Annotated[
        str | None,
        Option(
            "--decode",
            metavar="DECODER",
            help="Decode payloads to columns: json:'a bigint, b string', text, binary, or MODULE:FUNCTION.",
        ),
    ] = None
    file_bytes: Annotated[
        int | None,
        Option("--target-file-size", parser=_file_size, metavar="SIZE", help="Approximate size of a file, as 256MB."),
    ] = None
    bytes_per_second: Annotated[
        int | None,
        Option("--rate", parser=_rate, metavar="SIZE", help="Largest rate of reading the log per second, as 50MB."),
    ] = None

    def ids(self, log: SourceOptions) -> Selection:
        now = datetime.now(UTC)
        since = _time("--since", self.since, now, "--after", self.after)
        before = _time("--before", self.before, now, "--through", self.through)
        if since is not None and before is not None and before < since:
            raise BadArgument(
                f"--before {self.before} is earlier than --since {self.since}", not_done="nothing was written"
            )
        return Selection(
            partitions=None if self.partitions is None else log.numbers(self.partitions),
            starting=_behind("--after", self.after, EARLIEST), ending=_behind("--through", self.through, LATEST),
            starting_time=since, ending_time=before,
        )  # fmt: skip


def _behind(option: str, text: str | None, others: int) -> Bound:
    """Parse `100` for all partitions, or `0=100,3=7` for some; return the bound behind these ids."""
    if text is None:
        return Bound(others=others)
    try:
        if "=" not in text:
            return Bound(others=_id(text) + 1)
        pairs = [part.split("=") for part in text.split(",")]
        found = {_id(number): _id(value) + 1 for number, value in pairs}
    except ValueError as error:
        raise BadArgument(f"{option} {text}: it has to be an id, or PARTITION=ID with commas between") from error
    if len(found) < len(pairs):
        raise BadArgument(f"{option} {text}: a partition is named twice")
    return Bound(others=others, named=found)


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
    """Add Python files to the path of this process, which calls the decoder to find its columns."""
    for given in py_files:
        path = Path(given)
        if not path.exists():
            raise BadArgument(f"--py-files {given}: there is no such file")
        place = str(path.absolute() if path.suffix in (".zip", ".egg", ".whl") or path.is_dir() else path.absolute().parent)
        if place not in sys.path:
            sys.path.insert(0, place)


# -- checks ------------------------------------------------------------------------------------------------------------


def check_no_overlap(output: str, sources: Sequence[str]) -> None:
    """Raise `BadArgument` if the output and a source directory contain each other.

    A storage takes every directory with a number for a partition, and an export every file for its own."""
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
    """Raise `ExportGap` if a partition of a running cluster ends before the export.

    `ends`: partitions whose log ends before the export, with its last id; `reached`: first id after the export."""
    for number, last in sorted(ends.items()):
        raise ExportGap(
            f"partition {number}: the export has ids up to {reached[number] - 1}, and {place} ends at id {last}, as its "
            "owner says",
            next_step="run it again: an owner that was replaced just now may know less. If it stays so, the cluster was "
            "set back, and what it appends now has ids that the export has already: take a new output",
        )
