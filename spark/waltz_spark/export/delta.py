"""The Delta table of an export: a log beside the files that makes them readable as a table.

The manifest is authoritative, and the table follows it: a commit adds the files that one manifest has more than the one
before, with the manifest's number as its application transaction. So a manifest is committed once, even if the commit is
retried, and a table never has a file that no manifest has. Files to add are never found by comparing the table with the
manifest: an operator may have compacted the table or removed files, and an export does not undo that. `differences` reports
such changes, for `waltzctl export verify`.

deltalake writes the log and handles concurrent writers. It does not flush its files, so that is done here. It is imported
only if there is a table. Its Parquet threads can abort the process at its end (`DeltaTable.to_pyarrow_table` without a file
system: 3 times in 90), so it reads no data here.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
from pyarrow import types

from waltz_spark.export.destination import Destination, flush, newest_manifest
from waltz_spark.export.manifest import Manifest, Piece, decode, manifest_path
from waltzd.errors import BadArgument
from waltzd.errors.operations import NotInstalled, TableDiffers, TableFailed

LOG = "_delta_log"
_NUMBER_DIGITS = 20
_SCHEMES = ("s3", "gs", "abfs", "abfss")
_S3_OPTIONS = frozenset({"region", "endpoint_override", "scheme"})
"""Parameters of a URI for PyArrow that can be passed to deltalake as well."""


@dataclass(frozen=True, kw_only=True)
class TableState:
    version: int
    """Version of the table; each commit of any writer adds one."""
    manifest: int
    """Number of the newest manifest in the table."""


def application(manifest: Manifest) -> str:
    """Return the id of this export's transactions in the Delta log."""
    return f"waltz-export-{manifest.export}"


@dataclass(frozen=True)
class DeltaTable:
    """A Delta table to which a run commits its manifests, each one after it was published."""

    destination: Destination
    columns: pa.Schema

    def __post_init__(self) -> None:
        """Raise if the columns or the destination cannot become a table, before anything is written."""
        _deltalake()
        table_schema(self.columns)
        address_of(self.destination)

    def is_behind(self, newest: Manifest | None) -> bool:
        """Return whether a manifest is not committed yet; raise if the table belongs to another export."""
        table = _opened(self.destination)
        if newest is None:
            if table is not None and newest_manifest(self.destination) is None:
                raise TableDiffers(f"{self.destination.place} holds a Delta table already, and no export")
            return False
        return _reached(table, newest, self.destination) < newest.number

    def follow(self, newest: Manifest) -> None:
        """Commit the files of a manifest; idempotent."""
        table = _opened(self.destination)
        reached = _reached(table, newest, self.destination)
        if reached == newest.number:
            return
        known = {piece.path for piece in _manifest(self.destination, reached, newest).pieces} if reached else set()
        added = [piece for piece in newest.pieces if piece.path not in known]
        assert table is None or len(added) < len(newest.pieces)
        with _said(f"adding manifest {newest.number} to the Delta table in {self.destination.place}"):
            self._commit(table, newest, added)
        if self.destination.is_on_this_machine:
            _flush(Path(self.destination.place, LOG))

    def _commit(self, table: Any, newest: Manifest, pieces: Iterable[Piece]) -> None:
        transaction = importlib.import_module("deltalake.transaction")
        schema = _deltalake().Schema.from_json(table_schema(self.columns))
        now = int(time.time() * 1000)
        actions = [transaction.AddAction(**addition(piece, now)) for piece in pieces]
        properties = transaction.CommitProperties(
            app_transactions=[transaction.Transaction(application(newest), newest.number)],
            custom_metadata={"waltzManifest": newest.number, "waltzCluster": str(newest.cluster)},
        )
        if table is not None:
            table.create_write_transaction(actions, "append", schema, commit_properties=properties)
            return
        address, options = address_of(self.destination)
        transaction.create_table_with_add_actions(
            address, schema, actions, mode="error", storage_options=options, commit_properties=properties,
            description=f"The log of the Waltz cluster {newest.cluster}",
            configuration={"delta.appendOnly": "true"},  # a log: its rows are not deleted or changed by mistake
        )  # fmt: skip


def addition(piece: Piece, now_ms: int) -> dict[str, Any]:
    """Return the Delta action that adds a file, with ids and times in its statistics, so that readers can skip it. Pure."""
    least: dict[str, Any] = {"partition": piece.partition, "txid": piece.span.first}
    most: dict[str, Any] = {"partition": piece.partition, "txid": piece.span.last}
    if piece.times is not None and piece.times[1] < _TIME_MAX:
        least["time"], most["time"] = _milliseconds(piece.times[0] // 1000), _milliseconds(-(-piece.times[1] // 1000))
    statistics = {
        "numRecords": piece.span.count, "minValues": least, "maxValues": most, "nullCount": {"partition": 0, "txid": 0},
    }  # fmt: skip
    return {"path": piece.path, "size": piece.size, "partition_values": {}, "modification_time": now_ms,
            "data_change": True, "stats": json.dumps(statistics)}  # fmt: skip


_TIME_MAX = 250_000_000_000_000_000
"""Highest time that has a form in Delta: in the year 9892."""


def _milliseconds(time: int) -> str:
    """Format a time with milliseconds, the precision of Delta."""
    return f"{datetime.fromtimestamp(time // 1000, UTC):%Y-%m-%dT%H:%M:%S}.{time % 1000:03}Z"


# -- looking -----------------------------------------------------------------------------------------------------------


def state_of(destination: Destination, manifest: Manifest) -> TableState | None:
    table = _opened(destination) if manifest.shape.format == "delta" else None
    if table is None:
        return None
    return TableState(version=table.version(), manifest=_reached(table, manifest, destination))


def differences(destination: Destination, manifest: Manifest) -> list[tuple[str, str]]:
    """Return the differences between a table and a manifest, as sorted pairs of a path and an error."""
    place = f"{LOG}/"
    try:
        table = _opened(destination)
        if table is None:
            return [(place, "there is no Delta table; the next `waltzctl spark-export` makes it from the manifest")]
        reached = _reached(table, manifest, destination)
        if reached < manifest.number:
            return [(place, f"the Delta table has the files up to manifest {reached} only: a run was stopped, or is at "
                     f"work; the next `waltzctl spark-export` adds those of manifest {manifest.number}")]  # fmt: skip
        manifest = _manifest(destination, reached, manifest)  # a run may have published another one meanwhile
        with _said(f"reading the Delta table in {destination.place}"):
            names = [field.name for field in table.schema().fields]
            actions = pa.table(table.get_add_actions(flatten=True))
            deleting = pa.table(table.deletion_vectors()).num_rows
    except (TableDiffers, TableFailed) as error:
        return [(place, error.message)]
    paths, sizes = (actions.column(name).to_pylist() for name in ("path", "size_bytes"))
    found = _unlike(manifest, dict(zip(paths, sizes, strict=True)))
    if deleting:
        found.append((place, f"the Delta table leaves out rows of {deleting} files: another tool deleted them"))
    expected = [name for name, _ in manifest.shape.schema]
    if names != expected:
        found.append((place, f"the Delta table has the columns {', '.join(names)}; the files have {', '.join(expected)}"))
    return sorted(found)


def _unlike(manifest: Manifest, listed: dict[str, int]) -> list[tuple[str, str]]:
    """Compare a manifest with the files of a table and their sizes. Pure."""
    known = {piece.path: piece.size for piece in manifest.pieces}
    missing, foreign = known.keys() - listed.keys(), listed.keys() - known.keys()
    found = [(path, "the Delta table does not have it: another tool removed it") for path in missing]
    found += [(path, "the Delta table has it, and no manifest does: another tool added it") for path in foreign]
    found += [
        (path, f"the Delta table says that it has {listed[path]} bytes; {size} were written")
        for path, size in known.items()
        if listed.get(path, size) != size
    ]
    return found


def _manifest(destination: Destination, number: int, known: Manifest) -> Manifest:
    """Return the manifest with a number, which may be one of the older ones that are kept."""
    if number == known.number:
        return known
    path = manifest_path(number)
    text = destination.read(path)
    found = None if text is None else decode(text, f"{destination.place}/{path}")
    if found is None or found.export != known.export:
        raise TableDiffers(
            f"the Delta table in {destination.place} has the files up to manifest {number}, and that is not there any "
            "more: the files that it lacks are unknown"
        )
    return found


def _reached(table: Any, newest: Manifest, destination: Destination) -> int:
    """Return the number of the table's newest manifest; 0 without one. It is above `newest` if another run is active."""
    if table is None:
        return 0
    found: int | None = table.transaction_version(application(newest))
    if found is None:
        raise TableDiffers(
            f"the Delta table in {destination.place} is not of the export that is there: it has no commit of it"
        )
    if found > newest.number:
        now = newest_manifest(destination)
        if now is None or found > now.number:
            raise TableDiffers(
                f"the Delta table in {destination.place} has the files of manifest {found}, and the newest that is there "
                f"is {newest.number}"
            )
    return found


# -- deltalake ---------------------------------------------------------------------------------------------------------


def _deltalake() -> Any:
    try:
        return importlib.import_module("deltalake")
    except ModuleNotFoundError as error:
        raise NotInstalled(f"the package {error.name} is not installed", extra="delta") from error


def _opened(destination: Destination) -> Any:
    deltalake = _deltalake()
    if not destination.names(LOG):
        return None
    address, options = address_of(destination)
    not_found = importlib.import_module("deltalake.exceptions").TableNotFoundError
    with _said(f"reading the Delta table in {destination.place}"):
        try:
            return deltalake.DeltaTable(address, storage_options=options)
        except not_found:  # the first commit was never finished
            return None


@contextmanager
def _said(doing: str) -> Iterator[None]:
    deltalake_errors = importlib.import_module("deltalake.exceptions")
    try:
        yield
    except (deltalake_errors.DeltaError, OSError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        said = [line.strip() for line in lines if not line.strip()[:1].isdecimal()]  # without stack frames
        raise TableFailed(f"{doing}: {' '.join(said)[:500]}") from error


def address_of(destination: Destination) -> tuple[str, dict[str, str]]:
    """Return the address of the table for deltalake, and its storage options besides those in the environment. Pure."""
    place = destination.place
    if destination.is_on_this_machine:
        # deltalake takes a path for a URI here and there: %41 becomes another directory, a table behind a # has no history.
        if set("%?#\\") & set(place) or not place.isprintable():
            raise _unfit(place, "deltalake takes no path with any of %?#\\ in it, nor what cannot be printed")
        return place, {}
    parts = urlsplit(place)
    if parts.scheme not in _SCHEMES:
        raise _unfit(place, f"deltalake writes to directories of this machine and to {', '.join(_SCHEMES)}")
    said = dict(parse_qsl(parts.query))
    if parts.username or (said and parts.scheme != "s3") or said.keys() - _S3_OPTIONS:
        raise _unfit(place, "what its URI says beside the place is not for deltalake; keep it in the environment")
    return parts._replace(query="").geturl(), _s3_options(**said)


def _s3_options(region: str = "", endpoint_override: str = "", scheme: str = "https") -> dict[str, str]:
    found = {"AWS_REGION": region} if region else {}
    if endpoint_override:
        address = endpoint_override if "://" in endpoint_override else f"{scheme}://{endpoint_override}"
        found |= {"AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": str(address.startswith("http:")).lower()}
    return found


def _unfit(place: str, why: str) -> BadArgument:
    return BadArgument(
        f"there can be no Delta table in {place}: {why}",
        not_done="nothing was written",
        next_step="name another output, or export with --format parquet",
    )


def _flush(log: Path) -> None:
    """Flush the files of the newest commit, and its checkpoint if there is one."""
    numbered = [name for name in os.listdir(log) if name[:_NUMBER_DIGITS].isdecimal() and name.endswith(".json")]
    newest = max(numbered)[:_NUMBER_DIGITS]
    for path in (*log.glob(f"{newest}.*"), log / "_last_checkpoint", log, log.parent):
        if path.exists():
            flush(path)


# -- columns -----------------------------------------------------------------------------------------------------------
# Delta knows fewer types than Arrow, and a reader finds out about one that does not fit only when it reads. So each column
# is looked at before anything is written, and what has no place in Delta is refused by name. A type fits if the Parquet
# file of an export holds it as Delta's readers expect it: a file is never converted for the table's sake.

_PLAIN = {
    pa.bool_(): "boolean", pa.int8(): "byte", pa.int16(): "short", pa.int32(): "integer", pa.int64(): "long",
    pa.float32(): "float", pa.float64(): "double", pa.date32(): "date", pa.date64(): "date",
    **dict.fromkeys((pa.string(), pa.large_string(), pa.string_view()), "string"),
    **dict.fromkeys((pa.binary(), pa.large_binary(), pa.binary_view()), "binary"),
}  # fmt: skip
_LISTS = (types.is_list, types.is_large_list, types.is_fixed_size_list)
_FORBIDDEN = frozenset(" ,;{}()\n\t=")
"""Characters that most readers do not accept in names of columns."""


def table_schema(columns: pa.Schema) -> str:
    return json.dumps(_struct(list(columns), ""))


def _struct(fields: list[pa.Field], within: str) -> dict[str, Any]:
    names = [field.name.lower() for field in fields]
    for field in fields:
        place = within + field.name
        if not field.name or _FORBIDDEN & set(field.name):
            raise _refused(place, "Delta does not take names that are empty or have spaces or any of ,;{}()= in them")
        if names.count(field.name.lower()) > 1:
            raise _refused(place, "Delta does not tell apart names that differ in case only")
    if not fields:
        raise _refused(within.rstrip("."), "Delta has no structure without a field")
    # Nullable, all of them: that a value is always there is the export's word, and no constraint on columns that are added.
    return {
        "type": "struct",
        "fields": [
            {"name": field.name, "type": _type(field.type, within + field.name), "nullable": True, "metadata": {}}
            for field in fields
        ],
    }


def _type(given: pa.DataType, place: str) -> str | dict[str, Any]:
    if given in _PLAIN or types.is_fixed_size_binary(given):
        return _PLAIN.get(given, "binary")
    if types.is_timestamp(given) and given.unit != "ns":
        return "timestamp" if given.tz else "timestamp_ntz"
    if types.is_decimal128(given) and 0 <= given.scale <= given.precision:
        return f"decimal({given.precision},{given.scale})"
    if types.is_dictionary(given):
        return _type(given.value_type, place)
    if any(fits(given) for fits in _LISTS):
        inner = _type(given.value_type, f"{place}.element")
        return {"type": "array", "elementType": inner, "containsNull": True}
    if types.is_map(given):
        key, value = _type(given.key_type, f"{place}.key"), _type(given.item_type, f"{place}.value")
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    if types.is_struct(given):
        return _struct([given.field(number) for number in range(given.num_fields)], f"{place}.")
    raise _refused(place, f"Delta has no type for {given}{_advice(given)}")


def _advice(given: pa.DataType) -> str:
    if types.is_unsigned_integer(given):
        return "; the next larger signed type, or decimal128(20, 0), holds the same numbers"
    if types.is_timestamp(given):
        return "; timestamp[us] is as fine as Delta goes"
    if types.is_time(given) or types.is_duration(given):
        return "; a number does, as int64"
    return ""


def _refused(place: str, why: str) -> BadArgument:
    return BadArgument(
        f"--format delta: the column {place!r} cannot be in a table: {why}",
        not_done="nothing was written",
        next_step="choose a decoder that makes another column of it, or --format parquet",
    )
