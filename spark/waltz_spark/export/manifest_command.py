"""`waltzctl export status` and `export verify`: describe an export, and check its files. Neither starts Spark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from operator import attrgetter

from waltz_spark.export.delta import state_of
from waltz_spark.export.destination import destination_of, require_manifest
from waltz_spark.export.export import has_leftovers, stray_files
from waltz_spark.export.manifest import Manifest, Piece
from waltz_spark.export.options import SourceOptions
from waltz_spark.export.render_export import print_findings, print_state
from waltz_spark.export.verification import Checked, Finding, check_files, check_log, check_table
from waltz_spark.log.origin import Span
from waltzctl.shell.progress import Progress, Shown
from waltzd.errors import BadArgument, ForeignCluster
from waltzd.errors.exit_codes import EXIT_FINDINGS, EXIT_OK


def show(output: str, shown: str) -> int:
    """Print what an export holds; return the exit code."""
    destination = destination_of(output)
    manifest = require_manifest(destination)
    table, is_unfinished = state_of(destination, manifest), has_leftovers(destination)
    print_state(destination.place, manifest, table, is_unfinished=is_unfinished, output=shown)
    return EXIT_OK


def check(output: str, log: SourceOptions, *, against_log: bool, shown: str, progress: Shown) -> int:
    """Check the files of an export, and with `against_log` compare them with the log; return the exit code."""
    for option in (*(["--source"] if log.sources else []), *(["--archive"] if log.archive else [])):
        if not against_log:
            raise BadArgument(f"{option} needs --against-log: without it, only the files are checked")
    started = time.monotonic()
    destination = destination_of(output)
    manifest = require_manifest(destination)
    findings = [
        Finding(
            path=name, partition=-1, span=Span(0, -1), detail="no manifest has it; readers of the directory read it, too"
        )
        for name in stray_files(destination, manifest)
    ]
    findings += check_table(destination, manifest)
    findings += _found("verifying", progress, check_files(destination, manifest), manifest, attrgetter("size"))
    against = None
    if against_log:
        origin = log.origin()
        against = origin.describe()
        catalog = origin.catalog(sorted(manifest.partitions))
        if catalog.key != manifest.cluster:
            raise ForeignCluster(f"{destination.place} is an export of {manifest.cluster}; {against} is {catalog.key}")
        findings += _found("comparing", progress, check_log(origin, catalog, manifest), manifest, attrgetter("data_bytes"))
    print_findings(destination.place, manifest, findings, against, time.monotonic() - started, shown)
    return EXIT_FINDINGS if findings else EXIT_OK


def _found(
    doing: str, shown: Shown, checks: Iterator[Checked], manifest: Manifest, weight: Callable[[Piece], int]
) -> list[Finding]:
    findings, done, total = [], 0, sum(map(weight, manifest.pieces))
    with Progress(doing, shown) as course:
        for checked in checks:
            done += weight(checked.piece)
            course.update(done, total)
            findings += [checked.finding] if checked.finding else []
    return findings
