"""Decoding of payloads to columns: a log contains bytes, and only its application knows their meaning.

A decoder converts an array of payloads to columns, a batch at a time. A payload that cannot be decoded keeps its row, with
the reason in `_decode_error`, and with the payload in `data`. Whether a payload can be decoded depends on nothing but the
payload: a batch with a failure is cut into pieces until the payload is alone, and the others are decoded as usual. That is
slow for many failures, so a decoder may detect common ones at once (`Sieve`). A decoder is a value with a fingerprint, so
that an export can refuse to continue with another decoder; its files are part of it, and are sent with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waltzd.disk.real import translate
from waltzd.errors.operations import BadDecoder

ERROR_COLUMN = "_decode_error"
PREFIX = "payload_"
"""Prefix of columns whose names are columns of the log."""
FILE_BYTES_MAX = 16 << 20
_REASON_CHARACTERS = 300
_PIECES = 8
"""Pieces into which a batch is cut after a failure."""


class Undecodable(ValueError):
    """A payload of a batch cannot be decoded. If the batch has one payload, the text is the reason."""


_UNDECODABLE = (Undecodable, pa.ArrowException, UnicodeDecodeError)


class Method(Protocol):
    """A method of decoding. It is a value that is pickled and sent to the executors."""

    @property
    def columns(self) -> pa.Schema: ...
    @property
    def identity(self) -> bytes:
        """Bytes that change if equal payloads may be decoded to other columns."""
        ...

    def parse(self, payloads: pa.Array) -> Sequence[pa.Array]:
        """Return the columns, each as long as `payloads`; raise if a payload cannot be decoded."""
        ...


@runtime_checkable
class Sieve(Protocol):
    """A method that detects failures of many payloads at once."""

    def refused(self, payloads: pa.Array) -> pa.Array:
        """Return for each payload the reason that `parse` would give; null if `parse` has to be tried."""
        ...


@dataclass(frozen=True)
class Decoder:
    text: str
    """Argument of `--decode`."""
    method: Method
    names: tuple[str, ...]
    """Names of the columns that it adds, without the one for errors."""

    @property
    def fingerprint(self) -> str:
        kind = self.text.partition(":")[0]
        types = "\n".join(f"{field.name} {field.type}" for field in self.columns).encode()
        return hashlib.sha256(b"\0".join((kind.encode(), types, self.method.identity))).hexdigest()

    @property
    def columns(self) -> pa.Schema:
        own = [pa.field(name, field.type) for name, field in zip(self.names, self.method.columns, strict=True)]
        return pa.schema([*own, (ERROR_COLUMN, pa.string())])

    def schema(self, before: pa.Schema) -> pa.Schema:
        return pa.schema([*before, *self.columns])

    def decode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with the columns of the decoder added; `data` has to be one of the existing columns."""
        payloads = batch.column("data")
        try:
            columns, errors = self.method.parse(payloads), pa.nulls(len(payloads), pa.string())
        except _UNDECODABLE:
            columns, errors = self._sieved(payloads)
        return pa.RecordBatch.from_arrays([*batch.columns, *columns, errors], schema=self.schema(batch.schema))

    def _sieved(self, payloads: pa.Array) -> tuple[Sequence[pa.Array], pa.Array]:
        """Decode after a failure; return the columns, and the reason for each payload that was not decoded."""
        if not isinstance(self.method, Sieve):
            return self._apart(payloads)
        reasons = self.method.refused(payloads)
        is_tried = reasons.is_null()
        columns, errors = self._apart(payloads.filter(is_tried))
        tried = is_tried.to_numpy(zero_copy_only=False)
        rows = pa.array(np.cumsum(tried) - 1, mask=~tried)
        return [column.take(rows) for column in columns], pc.coalesce(reasons, errors.take(rows))

    def _apart(self, payloads: pa.Array) -> tuple[Sequence[pa.Array], pa.Array]:
        parts: list[Sequence[pa.Array]] = []
        errors: list[str | None] = []
        waiting = [payloads] if len(payloads) else []
        while waiting:
            stretch = waiting.pop()
            try:
                part = self.method.parse(stretch)
            except _UNDECODABLE as error:
                if len(stretch) > 1:
                    step = -(-len(stretch) // _PIECES)
                    waiting += [stretch.slice(start, step) for start in reversed(range(0, len(stretch), step))]
                    continue
                parts.append([pa.nulls(1, field.type) for field in self.method.columns])
                errors.append(_reason(error))
                continue
            parts.append(part)
            errors += [None] * len(stretch)
        columns = [
            pa.concat_arrays([part[number] for part in parts]) if parts else pa.array([], field.type)
            for number, field in enumerate(self.method.columns)
        ]
        return columns, pa.array(errors, pa.string())


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _REASON_CHARACTERS else text[: _REASON_CHARACTERS - 1] + "…"


def read_file(path: str, what: str) -> bytes:
    """Read a small file of a decoder. Its content is sent to the executors, not its path."""
    try:
        with open(path, "rb") as file:
            found = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise translate(error, f"reading {what} {path}") from error
        raise BadDecoder(f"{path!r} is no path") from error
    if len(found) > FILE_BYTES_MAX:
        raise BadDecoder(f"{path} has more than {FILE_BYTES_MAX >> 20} MiB, which no {what} has")
    return found


# -- for methods --------------------------------------------------------------------------------------------------------

_NOT_UTF8 = "it is not UTF-8"
_UTF8 = (
    r"^(?:[\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}"
    r"|\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})*$"
)
"""Pattern of valid UTF-8: no overlong forms, no surrogates, no code point above the last."""


def utf8(payloads: pa.Array) -> pa.Array:
    try:
        return payloads.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise Undecodable(_NOT_UTF8) from error


def not_utf8(payloads: pa.Array) -> pa.Array:
    """Return a reason for each payload that is not UTF-8, and null for all others."""
    return reason_where(pc.invert(pc.match_substring_regex(payloads, _UTF8)), _NOT_UTF8)


def reason_where(truths: pa.Array, reason: str) -> pa.Array:
    return pc.if_else(truths, pa.scalar(reason, pa.string()), pa.scalar(None, pa.string()))


def is_all(truths: pa.Array) -> bool:
    return bool(pc.all(truths, min_count=0).as_py())
