"""Payloads as columns: what a log holds is bytes, and only its application knows what they mean.

A decoder turns an array of payloads into columns, a batch at a time. A payload that does not decode is never dropped and
never becomes a row of nulls in silence: its row has the reason in `_decode_error`, and the payload itself stays in `data`,
as it does in all rows. Whether a payload decodes depends on nothing but the payload: a batch in which one does not is cut
in pieces until that one is alone, so that the rest of it takes the same way as ever. That is slow where many do not, so
a decoder may tell at a glance which ones are hopeless. A decoder is a value with a fingerprint, so that an export can
refuse to go on with another one; its files are in it, and travel with it.
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
from waltzd.errors import BadDecoder

ERROR_COLUMN = "_decode_error"
PREFIX = "payload_"
"""In front of columns whose names a log has already."""
FILE_BYTES_MAX = 16 << 20
_REASON_CHARACTERS = 300
_PIECES = 8
"""A batch with a payload that does not decode is cut in so many."""


class Undecodable(ValueError):
    """Some payload of a batch; the text is the reason if it is the only one."""


_UNDECODABLE = (Undecodable, pa.ArrowException, UnicodeDecodeError)


class Method(Protocol):
    """A way to decode. A value: it is pickled and sent to the executors."""

    @property
    def columns(self) -> pa.Schema: ...
    @property
    def identity(self) -> bytes:
        """Changes when the same payload may give other columns."""
        ...

    def parse(self, payloads: pa.Array) -> Sequence[pa.Array]:
        """The columns, each as long as `payloads`. Raises when one payload does not decode."""
        ...


@runtime_checkable
class Sieve(Protocol):
    """A method that sees of many payloads at once that they do not decode."""

    def refused(self, payloads: pa.Array) -> pa.Array:
        """For each payload the reason, the same that `parse` has for it alone; null where it has to be tried."""
        ...


@dataclass(frozen=True)
class Decoder:
    text: str
    """As the user asked for it."""
    method: Method
    names: tuple[str, ...]
    """Of the columns that it adds, without the one for errors."""

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
        """The same rows with the decoder's columns behind those that are there; `data` has to be one of them."""
        payloads = batch.column("data")
        try:
            columns, errors = self.method.parse(payloads), pa.nulls(len(payloads), pa.string())
        except _UNDECODABLE:
            columns, errors = self._sieved(payloads)
        return pa.RecordBatch.from_arrays([*batch.columns, *columns, errors], schema=self.schema(batch.schema))

    def _sieved(self, payloads: pa.Array) -> tuple[Sequence[pa.Array], pa.Array]:
        """The columns, and the reason for each payload that was not decoded."""
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
    """A small file that a decoder is described by. Its content goes to the executors, not its path."""
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
"""Of bytes: neither longer than needed, nor a half of a pair, nor above the last character."""


def utf8(payloads: pa.Array) -> pa.Array:
    try:
        return payloads.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise Undecodable(_NOT_UTF8) from error


def not_utf8(payloads: pa.Array) -> pa.Array:
    """A reason for each payload that is not UTF-8, null for all others."""
    return reason_where(pc.invert(pc.match_substring_regex(payloads, _UTF8)), _NOT_UTF8)


def reason_where(truths: pa.Array, reason: str) -> pa.Array:
    return pc.if_else(truths, pa.scalar(reason, pa.string()), pa.scalar(None, pa.string()))


def is_all(truths: pa.Array) -> bool:
    return bool(pc.all(truths, min_count=0).as_py())
