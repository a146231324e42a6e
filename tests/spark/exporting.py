"""An export of a storage's directory as `waltzctl spark-export` makes it, without Spark: its tasks run here, one by one."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from uuid import UUID

from waltz_spark.exporting.destination import LocalDestination
from waltz_spark.exporting.export import Range, Run, newest_manifest, planned, wanted
from waltz_spark.exporting.form import form_of
from waltz_spark.exporting.manifest import Manifest
from waltz_spark.exporting.tasks import Assignment, Job, Written, answer_of, write, written_of
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.payloads.decoders import decoder_of

from waltzd.format.layout import HEADER_BYTES, FileHeader, index_name, segment_name
from waltzd.format.record import encode_payloads

KEY = UUID(int=77)
CREATED_MS = 1_700_000_000_000


def storage_with(directory: Path, partitions: dict[int, list[bytes]], segment_records: int = 40) -> Path:
    """A directory of partitions, without a control file."""
    for partition, payloads in partitions.items():
        inner = directory / str(partition)
        inner.mkdir(parents=True)
        whole = encode_payloads(0, payloads, partition=partition)
        for start in range(0, len(whole), segment_records):
            part = whole.part(start, min(start + segment_records, len(whole)))
            header = FileHeader(created_ms=CREATED_MS, key=KEY, partition=partition, first_id=part.first_id).encode()
            (inner / segment_name(part.first_id)).write_bytes(header + part.data)
            entries = (part.bounds[:-1] + HEADER_BYTES).astype(">i8").tobytes()
            (inner / index_name(part.first_id)).write_bytes(header + entries)
    return directory


def tasks(job: Job, assignments: Sequence[Assignment]) -> Generator[Written, None, None]:
    """Here, one after the other; what they tell travels as it does from an executor."""
    for given in assignments:
        yield written_of(answer_of(write(job, given)))


def export(
    output: Path,
    *storages: Path,
    is_lossless: bool = True,
    partitions: tuple[int, ...] | None = None,
    last: dict[int, int] | None = None,
    first: dict[int, int] | None = None,
    decode: str = "",
) -> Manifest:
    """All that the directories hold, whether it is known to be committed or not; what the output has already is not
    exported again."""
    origin = DirectoryOrigin(storages=tuple(map(str, storages)), allows_uncommitted=True)
    destination = LocalDestination(str(output))
    catalog = origin.catalog(partitions)
    before = newest_manifest(destination)
    asked = Range(partitions=partitions, first=first or {}, last=last or {})
    form = form_of("parquet", None)
    decoder = decoder_of(decode) if decode else None
    assignments = planned(catalog, wanted(catalog, before, asked), is_lossless=is_lossless, file_data_bytes=None)
    job = Job(
        origin=origin, destination=destination, cluster=catalog.key, form=form, is_lossless=is_lossless, decoder=decoder
    )
    run = Run(job=job, before=before, assignments=assignments)
    found = run.carry_out(tasks)
    assert found is not None
    return found
