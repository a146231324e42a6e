"""How Spark's own writers make the same files: what a format and a compression are called there, which type has a place.

Spark's defaults differ from those of other tools in ways that are not expected of an export: times lose their
microseconds in text, CSV loses spaces and is quoted with backslashes, JSON leaves out what is null. So everything is said.
What these writers cannot do is refused before there is a Spark. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from waltz_spark.exporting.form import ROW_GROUP_BYTES, Form
from waltzd.errors import BadArgument, BadSql

PART = re.compile(r"part-(\d{5,})-[0-9a-f-]+-c000\..+")
"""The name of a file of theirs: the number is that of the task, counted from 0."""
_CODECS: Mapping[str, Mapping[str, str]] = {
    "parquet": {"zstd": "zstd", "snappy": "snappy", "gzip": "gzip", "lz4": "lz4_raw", "none": "uncompressed"},
    "orc": {"zstd": "zstd", "snappy": "snappy", "zlib": "zlib", "lz4": "lz4", "none": "none"},
    "json": {"gzip": "gzip", "none": "none"},
    "csv": {"gzip": "gzip", "none": "none"},
}
_ZSTD_LEVEL = "parquet.compression.codec.zstd.level"
_COMMITTING = {
    "maxRecordsPerFile": "0",
    "mapreduce.fileoutputcommitter.algorithm.version": "1",  # nothing of an attempt that failed is ever in its place
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}
_TIMES = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "timeZone": "UTC",
    "encoding": "UTF-8",
}
_CSV = {
    "header": "true",
    "escape": '"',
    "ignoreLeadingWhiteSpace": "false",
    "ignoreTrailingWhiteSpace": "false",
}
_PLAIN = frozenset(
    ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string", "binary", "date", "timestamp",
     "timestamp_ntz")
)  # fmt: skip


def options_of(form: Form) -> dict[str, str]:
    """Of Spark's writers, for one whole file of this form."""
    codecs = _CODECS.get(form.format)
    if codecs is None:
        raise BadArgument(
            f"--format {form.format} is not for --engine spark, nor for --select and --where",
            not_done="nothing was written",
            next_step=f"choose one of {', '.join(_CODECS)}",
        )
    has_level = form.level is not None and (form.format, form.codec) != ("parquet", "zstd")
    if form.codec not in codecs or has_level:
        lacking = "such level" if has_level else form.codec
        raise BadArgument(
            f"--compression {form.compression}: Spark's writer of {form.format} has no {lacking}",
            not_done="nothing was written",
            next_step=f"choose one of {', '.join(codecs)} for --engine spark, --select and --where",
        )
    found = {**_COMMITTING, "compression": codecs[form.codec]}
    match form.format:
        case "parquet":
            found["parquet.block.size"] = str(ROW_GROUP_BYTES)
            if form.codec == "zstd" and form.level is not None:
                found[_ZSTD_LEVEL] = str(form.level)
        case "json":
            found |= {**_TIMES, "ignoreNullFields": "false"}
        case "csv":
            found |= {**_TIMES, **_CSV}
    return found


def check_columns(fields: Iterable[Any], form: Form) -> None:
    """`fields`: of Spark's schema of the rows. Files of this form have to have a place for each."""
    names: set[str] = set()
    for field in fields:
        if field.name.lower() in names:
            raise BadSql(f"two columns are called {field.name}", next_step="give one of them another name with AS")
        names.add(field.name.lower())
        wrong = _unfit(field.dataType)
        if wrong is None and form.format == "csv" and _is_nested(field.dataType) and not are_locks(field):
            wrong = field.dataType.simpleString()
        if wrong is not None:
            raise BadSql(
                f"the column {field.name} is {wrong}, for which {form.format} has no place",
                next_step="cast it to a type that other tools know, as in CAST(… AS STRING), or choose another format",
            )


def are_locks(field: Any) -> bool:
    """The column of the log, which is JSON in CSV."""
    return bool(field.name == "locks" and field.dataType.simpleString() == "array<struct<lock:bigint,mode:string>>")


def _is_nested(kind: Any) -> bool:
    return kind.typeName() in ("array", "map", "struct")


def _unfit(kind: Any) -> str | None:
    """The innermost type that is none of those that every reader of these formats has."""
    match kind.typeName():
        case "array":
            return _unfit(kind.elementType)
        case "map":
            return _unfit(kind.keyType) or _unfit(kind.valueType)
        case "struct":
            return next((wrong for field in kind.fields if (wrong := _unfit(field.dataType))), None)
        case "decimal":
            return None
        case _:
            said: str = kind.simpleString()
            return None if said in _PLAIN else said


# -- the session ------------------------------------------------------------------------------------------------------

_OPTIMIZER = "org.apache.spark.sql.catalyst.optimizer"
NEEDED = {
    # A condition that is never true would let Spark leave the reading out, and then no task tells what was read.
    "spark.sql.optimizer.excludedRules": f"{_OPTIMIZER}.PruneFilters,{_OPTIMIZER}.PropagateEmptyRelation",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.chunkBase64String.enabled": "false",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
"""What a session has to be told before it makes such files, whatever a user says."""


def conf_for(user: Mapping[str, str]) -> dict[str, str]:
    """Settings of a session for this engine; those of a user win."""
    return {"spark.driver.memory": "2g", "spark.sql.session.timeZone": "UTC", **user}
