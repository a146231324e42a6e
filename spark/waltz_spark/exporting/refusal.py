"""What cannot end well is refused before Java is started, and before anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from waltz_spark.exporting.form import Form, open_writer
from waltz_spark.log.decode import SCHEMA
from waltzd.errors import BadArgument, ExportGap

_NOT_WRITTEN = "nothing was written"


def check_apart(output: str, sources: Sequence[str]) -> None:
    """A storage takes every directory with a number for a partition, and an export takes every file for one of its own.
    `output`: a directory of this machine."""
    there = os.path.realpath(output)
    for source in sources:
        place = os.path.realpath(source)
        if os.path.commonpath([there, place]) in (there, place):
            raise BadArgument(
                f"{output} and {source} lie within each other: the one would be damage to the other",
                not_done=_NOT_WRITTEN,
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


def check_rows(form: Form, schema: pa.Schema) -> None:
    """Whether the format has a place for each column: one row is written to nowhere, with nothing in the columns of a
    decoder. All columns together first, because that is nearly always all that there is to do."""
    try:
        _write(form, schema)
    except pa.ArrowException as error:
        for field in schema:
            if field.name not in SCHEMA.names and not _takes(form, field):
                raise BadArgument(
                    f"{form.format} has no place for the column {field.name} ({field.type}) of the decoder: {error}",
                    not_done=_NOT_WRITTEN,
                    next_step="choose parquet, or let the decoder make a simpler type",
                ) from error
        raise BadArgument(f"{form.format} cannot be written: {error}", not_done=_NOT_WRITTEN) from error


def _takes(form: Form, field: pa.Field) -> bool:
    try:
        _write(form, pa.schema([field]))
    except pa.ArrowException:
        return False
    return True


def _write(form: Form, schema: pa.Schema) -> None:
    nothing = {field.name: pa.array([b"" if pa.types.is_binary(field.type) else 0], field.type) for field in SCHEMA}
    columns = [nothing[field.name] if field.name in nothing else pa.nulls(1, field.type) for field in schema]
    writer = open_writer(form, _Nowhere(), schema, {})
    writer.write(pa.RecordBatch.from_arrays(columns, schema=schema))
    writer.close({})


class _Nowhere:
    """As much of a file as PyArrow's writers want."""

    closed = False

    def __init__(self) -> None:
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self._size += count
        return count

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """There is nothing to keep."""

    def close(self) -> None:
        self.closed = True
