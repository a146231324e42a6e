"""A small export, made for what it makes Java do: so an archive of classes is built, and found out what it saves."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

from waltz_spark.engine.java import Cost, Note, Place, build_flags, made_folder, use_flags
from waltz_spark.engine.session import SparkSettings, clear_up, default_master, new_log, running, scratch
from waltzctl.show.terminal import size
from waltzd.disk.real import translate
from waltzd.errors import DiskFull, SparkFailed
from waltzd.format.layout import HEADER_BYTES, FileHeader, index_name, segment_name
from waltzd.format.record import encode_payloads

ROOM_BYTES = 500_000_000
"""What Java has on the disk while it makes an archive, and some more: 250 MB were seen."""
_DUMP_SECONDS = 900.0
"""Until Java has written it, on a machine that has other things to do."""
Rehearse = Callable[[SparkSettings], Cost]
_SEGMENTS = 6
"""More than a wave has at least, so that there are two of them."""


def build(place: Place, say: Callable[[str], None], rehearse: Rehearse | None = None) -> Note:
    """What is there already is replaced when the new one has shown that it works."""
    rehearse = rehearse or rehearsed
    folder = made_folder(place)
    clear_up((folder,))
    free = shutil.disk_usage(folder).free
    if free < ROOM_BYTES:
        raise DiskFull(
            f"making an archive of classes takes up to {size(ROOM_BYTES)}, and {folder} has {size(free)} free",
            not_done="no archive was made",
            next_step="free space there, or name another cache directory: XDG_CACHE_HOME=DIR",
        )
    settings = SparkSettings(master=default_master(), java=place.java, conf={})
    with scratch(folder) as beside:
        made = beside / "made"
        flags = build_flags(place.java, made)
        say("an export as it is now")
        before = rehearse(settings)
        say("an export whose Java writes down its classes")
        rehearse(replace(settings, java_flags=flags, end_seconds=_DUMP_SECONDS))
        if not made.exists():
            raise SparkFailed(
                f"Java {place.java.version} of {place.java.home} made no archive of its classes, and did not say why",
                not_done="no archive was made",
                next_step="look whether the disk is full, or name another Java with --java-home",
            )
        say("an export with them")
        after = rehearse(replace(settings, java_flags=use_flags(place.java, made, is_must=True)))
        try:
            when = datetime.now(UTC).isoformat(timespec="seconds")
            note = place.build_note(made, when=when, before=before, after=after)
            place.publish(made, note)
        except OSError as error:
            raise translate(error, f"writing {place.path}") from error
    return note


def rehearsed(settings: SparkSettings) -> Cost:
    from waltz_spark.exporting.destination import LocalDestination
    from waltz_spark.exporting.export import Range, planned, wanted
    from waltz_spark.exporting.form import form_of
    from waltz_spark.exporting.tasks import Job, run_waves
    from waltz_spark.log.directory_origin import DirectoryOrigin

    with scratch() as place:
        origin = DirectoryOrigin(storages=(str(_small_log(place / "log")),), allows_uncommitted=True)
        catalog = origin.catalog()
        assignments = planned(catalog, wanted(catalog, None, Range()), is_lossless=True, file_data_bytes=None)
        assert len(assignments) == _SEGMENTS
        job = Job(
            origin=origin, destination=LocalDestination(str(place / "out")), cluster=catalog.key,
            form=form_of("parquet", None), is_lossless=True,
        )  # fmt: skip
        cpu, started = _cpu_seconds(), time.perf_counter()
        with running(settings, new_log(os.environ)) as spark:
            for written in run_waves(spark, job, assignments):
                if written.error is not None:
                    raise written.error
        return Cost(cpu=_cpu_seconds() - cpu, seconds=time.perf_counter() - started)


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _small_log(directory: Path) -> Path:
    (directory / "0").mkdir(parents=True)
    for first in range(_SEGMENTS):
        run = encode_payloads(first, [b"a payload"], partition=0)
        header = FileHeader(created_ms=0, key=UUID(int=1), partition=0, first_id=first).encode()
        (directory / "0" / segment_name(first)).write_bytes(header + bytes(run.data))
        entries = (run.bounds[:-1] + HEADER_BYTES).astype(">i8").tobytes()
        (directory / "0" / index_name(first)).write_bytes(header + entries)
    return directory
