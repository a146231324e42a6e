"""Payloads decoded for people, and filters over them. Pure.

Waltz does not know what a payload means; here it is guessed, carefully: JSON only for an object or an array, text only for
what can be printed, hexadecimal digits for the rest. The encoding is always shown beside it, so a script can tell the text
`00ff` from two bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from waltzd.errors import BadArgument

How = Literal["auto", "json", "text", "hex"]
HOW = get_args(How)
_BLANKS = frozenset("\n\r\t")


@dataclass(frozen=True)
class Decoded:
    encoding: str
    """json, text or hex."""
    value: Any


def decoded(payload: bytes, how: str = "auto") -> Decoded:
    """A payload that cannot be decoded as asked is tried as text, then shown as hex."""
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
    """The beginning of a payload, for one line on a screen: nothing in it can move a cursor."""
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
    """It could be read, and would come out as something else."""


def _refuse(text: str) -> Any:
    raise _NotExact(text)


def _number(text: str) -> float:
    value = float(text)
    return value if abs(value) != float("inf") else _refuse(text)


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_number)
"""NaN and Infinity, which Python reads as JSON, would end up in our own JSON."""


def json_of(payload: bytes | str) -> tuple[Any, bool]:
    """The value, and whether there is one."""
    try:
        return _DECODER.decode(payload if isinstance(payload, str) else payload.decode()), True
    except (ValueError, RecursionError):  # also what is not UTF-8, and numbers of very many digits
        return None, False


_STEP = re.compile(r"""\.?([^.\[\]="']+)|\[([0-9]{1,9})\]|\[("(?:[^"\\]|\\.)*")\]""")


@dataclass(frozen=True)
class JsonPath:
    """`order.items[0].sku=ab-1`: a value that has to be there and, after the `=`, to be this."""

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
        f"--json-path {text}: this is no path",
        not_done="nothing was read",
        next_step="write it as order.items[0].sku=VALUE",
    )


def _is_same(one: Any, other: Any) -> bool:
    """As in JSON, where true is not 1."""
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
    """All of them must hold."""

    header: int | None = None
    client: int | None = None
    pattern: re.Pattern[str] | None = None
    paths: tuple[JsonPath, ...] = ()

    def match(self, header: int, client: int, payload: bytes) -> bool:
        if (self.header is not None and header != self.header) or (self.client is not None and client != self.client):
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
        raise BadArgument(f"--match {text}: this is no regular expression: {error}", not_done="nothing was read") from error
