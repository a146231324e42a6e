"""Decode payloads for display, filter by them, and print transactions.

Waltz does not know the encoding of a payload, so it is guessed: JSON for an object or an array, text if all of it is
printable, else hexadecimal digits. The encoding is always shown, so that a script can tell the text `00ff` from two bytes.

Transactions are printed as they are read, so a range of any size needs little memory. Raw payload bytes reach a terminal
only in the form `raw`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import typer

from waltzctl.shell import moment
from waltzctl.show.forms import JSON_VERSION, Column, Columns, attributes, stream
from waltzd.errors import BadArgument

if TYPE_CHECKING:
    from waltzd.client.view import Transaction

How = Literal["auto", "json", "text", "hex"]
HOW = get_args(How)
_BLANKS = frozenset("\n\r\t")


@dataclass(frozen=True)
class Decoded:
    encoding: str
    """Encoding: json, text or hex."""
    value: Any


def decoded(payload: bytes, how: str = "auto") -> Decoded:
    """Decode a payload; if it does not have the given encoding, try text, then use hex."""
    if how in ("auto", "json"):
        value, is_json = json_of(payload)
        if is_json and (how == "json" or isinstance(value, dict | list)):
            return Decoded("json", value)
    if how != "hex":
        text = _text_of(payload)
        if text is not None and (how == "text" or _is_printable(text)):
            return Decoded("text", text)
    return Decoded("hex", payload.hex())


def line(payload: bytes, how: str, characters: int) -> str:
    """Return the beginning of a payload as one line without control characters."""
    found = decoded(payload[: characters + 1], "hex") if how == "hex" else decoded(payload, how)
    if found.encoding == "json":
        text = json.dumps(found.value, ensure_ascii=False, separators=(", ", ": "))
    else:
        text = str(found.value)
    return "".join(
        character if character.isprintable() else " " if character in _BLANKS else "." for character in text[:characters]
    )


def _text_of(payload: bytes) -> str | None:
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None


def _is_printable(text: str) -> bool:
    return text.isprintable() or all(character.isprintable() or character in _BLANKS for character in text)


# -- JSON --------------------------------------------------------------------------------------------------------------


class _NotExact(ValueError):
    """Error for JSON that Python reads, but would write differently."""


def _refuse(text: str) -> Any:
    raise _NotExact(text)


def _number(text: str) -> float:
    value = float(text)
    return value if abs(value) != float("inf") else _refuse(text)


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_number)
"""Reject NaN and Infinity: Python accepts them, but they are not JSON."""


def json_of(payload: bytes | str) -> tuple[Any, bool]:
    """Return the value, and whether there is one."""
    try:
        return _DECODER.decode(payload if isinstance(payload, str) else payload.decode()), True
    except (ValueError, RecursionError):  # also what is not UTF-8, and numbers of very many digits
        return None, False


_STEP = re.compile(r"""\.?([^.\[\]="']+)|\[([0-9]{1,9})\]|\[("(?:[^"\\]|\\.)*")\]""")


@dataclass(frozen=True)
class JsonPath:
    """Condition like `order.items[0].sku=ab-1`: the value must exist and, after a `=`, be equal."""

    steps: tuple[str | int, ...]
    wanted: str | None

    @staticmethod
    def parse(text: str) -> JsonPath:
        steps: list[str | int] = []
        at = 1 if text.startswith("$") else 0
        while at < len(text) and text[at] != "=":
            found = _STEP.match(text, at)
            if found is None or (found[0].startswith(".") and at == 0):
                raise _bad_path(text)
            name, number, quoted = found.groups()
            if number is not None:
                steps.append(int(number))
            elif quoted is not None:
                value, is_json = json_of(quoted)
                if not is_json:
                    raise _bad_path(text)
                steps.append(value)
            else:
                if at > 0 and text[at - 1] != "$" and not found[0].startswith("."):
                    raise _bad_path(text)
                steps.append(name)
            at = found.end()
        if not steps and not text.startswith("$"):
            raise _bad_path(text)
        return JsonPath(tuple(steps), text[at + 1 :] if at < len(text) else None)

    def matches(self, value: Any) -> bool:
        for step in self.steps:
            is_there = (isinstance(step, str) and isinstance(value, dict) and step in value) or (
                isinstance(step, int) and isinstance(value, list) and step < len(value)
            )
            if not is_there:
                return False
            value = value[step]
        if self.wanted is None or (isinstance(value, str) and value == self.wanted):
            return True
        wanted, is_json = json_of(self.wanted)
        return is_json and _is_same(value, wanted)


def _bad_path(text: str) -> BadArgument:
    return BadArgument(
        f"--json-path {text}: this is not a path",
        not_done="nothing was read",
        next_step="write it as order.items[0].sku=VALUE",
    )


def _is_same(one: Any, other: Any) -> bool:
    """Compare as JSON, where true does not equal 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True) or (
        isinstance(one, int | float)
        and isinstance(other, int | float)
        and not isinstance(one, bool)
        and not isinstance(other, bool)
        and one == other
    )


# -- filters -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Filters of transactions; all must match."""

    kind: int | None = None
    client: int | None = None
    pattern: re.Pattern[str] | None = None
    paths: tuple[JsonPath, ...] = ()

    def match(self, kind: int, client: int, payload: bytes) -> bool:
        if (self.kind is not None and kind != self.kind) or (self.client is not None and client != self.client):
            return False
        if self.pattern is None and not self.paths:
            return True
        if self.pattern is not None and self.pattern.search(payload.decode(errors="surrogateescape")) is None:
            return False
        if not self.paths:
            return True
        value, is_json = json_of(payload)
        return is_json and all(path.matches(value) for path in self.paths)


def pattern_of(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadArgument(
            f"--match {text}: this is not a regular expression: {error}", not_done="nothing was read"
        ) from error


# -- transactions ------------------------------------------------------------------------------------------------------


Sink: TypeAlias = "Callable[[Transaction, int], None]"
"""Function that takes a transaction and the first id of its atomic append."""
Form = Literal["table", "json", "csv", "raw"]
TRANSACTIONS: Columns[dict[str, Any]] = attributes(
    "partition id time time_us group kind client generation sequence size payload_encoding payload"
)
LOCKS: Columns[dict[str, Any]] = (
    Column("locks", lambda row: [f"{one['mode']}:{one['lock']}" for one in row["locks"] or ()]),
)
NARROW = 100
"""Width of the screen below which times have no milliseconds, to leave space for payloads."""


def sink_for(output: str, decode: str, *, with_partition: bool = False, with_locks: bool = False) -> Sink:
    """Return a sink that prints transactions; `with_locks` prints their locks."""
    if output == "raw":
        return lambda transaction, _group: typer.echo(transaction.payload, nl=False)
    if output == "table":
        return _Table(decode, with_partition=with_partition)
    put_row = stream((*TRANSACTIONS, *(LOCKS if with_locks else ())), output)
    return lambda transaction, group: put_row(transaction_json(transaction, group, decode, with_locks=with_locks))


def transaction_json(
    transaction: Transaction, group: int, decode: str = "auto", *, with_locks: bool = False
) -> dict[str, Any]:
    """Return a transaction as a JSON object. Fields that format 0 does not keep are null."""
    found = decoded(transaction.payload, decode)
    client, generation, sequence = transaction.request
    time = transaction.time_us
    known = [{"mode": mode, "lock": lock} for mode, lock in format_locks(transaction)]
    locks = {"locks": None if time is None else known} if with_locks else {}
    return {
        "version": JSON_VERSION, "partition": transaction.partition, "id": transaction.id,
        "time": None if time is None else moment.iso(time), "time_us": time, "group": group,
        "kind": transaction.kind, "client": client, "generation": generation, "sequence": sequence,
        "size": transaction.length, **locks, "payload_encoding": found.encoding, "payload": found.value,
    }  # fmt: skip


def format_locks(transaction: Transaction) -> list[tuple[str, str]]:
    """Format the mode and the 64-bit hash of each lock."""
    return [(lock.mode.name.lower(), f"{lock.hash:016x}") for lock in transaction.locks or ()]


class _Table:
    def __init__(self, decode: str, *, with_partition: bool) -> None:
        self._decode = decode
        self._with_partition = with_partition
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
        self._is_narrow = self._width < NARROW
        self._with_time: bool | None = None
        """Whether the last printed lines have times; None before the first line."""

    def __call__(self, transaction: Transaction, _group: int) -> None:
        time = transaction.time_us
        if self._with_time is not (time is not None):  # also where a log goes over to the format that keeps times
            self._with_time = time is not None
            typer.echo(self._start("partition", "id", "time", "kind", "client", "size") + "payload")
        start = self._start(
            transaction.partition,
            transaction.id,
            "" if time is None else moment.shown(time, is_narrow=self._is_narrow),
            transaction.kind,
            transaction.request[0],
            transaction.length,
        )
        typer.echo((start + fitting(transaction.payload, self._decode, self._width - len(start))).rstrip())
        for mode, lock in format_locks(transaction):
            typer.echo(f"{' ' * 10 if self._with_partition else ''}{'':>10} {mode} {lock}")

    def _start(self, partition: object, id: object, time: str, kind: object, client: object, length: object) -> str:
        first = f"{partition:>9} " if self._with_partition else ""
        when = f"{time:<{20 if self._is_narrow else 24}} " if self._with_time else ""
        return f"{first}{id:>10} {when}{kind:>6} {client:>9} {length:>8}  "


def fitting(payload: bytes, decode: str, width: int) -> str:
    """Cut a payload to a number of columns; some characters take two."""
    from rich.cells import cell_len, set_cell_size

    width = max(width, 4)
    text = line(payload, decode, width + 1)
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"
