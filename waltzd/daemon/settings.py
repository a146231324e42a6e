"""The declaration of one setting, the conversion of its value from and to text, and texts that are generated from
declarations.

The declared type decides how text is parsed, not YAML's guess: `0777`, `yes` and `1:30` are no surprise. A wrong value is a
`ValueError` with a sentence for the user; `waltzd.daemon.config_file` adds the key, the file and the line.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
import typing
import uuid
from dataclasses import dataclass
from typing import Any

from waltzd.protocol.address import Address, parse_address

_REQUIRED: Any = object()


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number, in the annotation of its field."""

    least: int
    most: int
    unit: str = ""
    """Unit of the number. "bytes" accepts sizes such as 64MiB."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of a setting, without its name and type."""

    doc: str
    default: Any
    bounds: Bounds | None = None
    """Bounds of a number; None for other types."""
    choices: tuple[str, ...]
    example: str
    """Value for the sample file; `{role}` stands for the role of the daemon."""

    @property
    def required(self) -> bool:
        return self.default is _REQUIRED


def setting(
    doc: str,
    *,
    default: Any = _REQUIRED,
    choices: tuple[str, ...] = (),
    example: str = "",
) -> Any:
    """Return a field of a settings class; without a default, the setting is required. Numbers have `Bounds`."""
    about = Setting(doc=doc, default=default, choices=choices, example=example)
    is_optional: dict[str, Any] = {} if about.required else {"default": default}
    return dataclasses.field(**is_optional, metadata={"setting": about})


def declared(kind: type[Any]) -> dict[str, tuple[Any, Setting]]:
    """Return name → (type, declaration): first the settings of the class itself, then those of its base class."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = {item.name: item.metadata["setting"] for item in dataclasses.fields(kind)}
    names = dict.fromkeys([name for name in kind.__annotations__ if name in found] + list(found))
    return {name: _typed(hints[name], found[name]) for name in names}


def _typed(hint: Any, about: Setting) -> tuple[Any, Setting]:
    if typing.get_origin(hint) is not typing.Annotated:
        return hint, about
    type_, bounds = typing.get_args(hint)
    return type_, dataclasses.replace(about, bounds=bounds)


# -- values ------------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS[f"{_letter}ib"] = 1 << 10 * _power
    _UNITS[f"{_letter}b"] = 1000**_power
_SIZE = re.compile(r"([0-9][0-9_]*) ?([a-zA-Z]*)")
_INTEGER = re.compile(r"-?[0-9][0-9_]*")
_DIGITS_MAX = 100
"""Limit of the digits of a number: more than any setting needs, and few enough for Python to parse."""


def is_optional(type_: Any) -> bool:
    return type(None) in typing.get_args(type_)


def read_value(text: str, type_: Any, about: Setting) -> Any:
    """Parse the text of a value; raise ValueError with a sentence for the user."""
    plain = next((part for part in typing.get_args(type_) if part is not type(None)), type_)
    if plain is int:
        return _integer(text, about)
    if plain is Address:
        return parse_address(text)
    if plain is uuid.UUID:
        return parse_key(text)
    assert plain is str
    if about.choices and text not in about.choices:
        raise ValueError(f"{text!r} is not one of {', '.join(about.choices)}")
    if not text.strip():
        raise ValueError("it must not be empty")
    if not text.isprintable():  # paths and names have none, and a lone surrogate could not be printed in an error
        raise ValueError(f"{text!a} has characters that cannot be printed")
    return text


def _integer(text: str, about: Setting) -> int:
    assert about.bounds is not None, "each number has bounds"
    if about.bounds.unit == "bytes":
        value = parse_size(text)
    else:
        if len(text) > _DIGITS_MAX or not _INTEGER.fullmatch(text):
            raise ValueError(f"{text!r} is not a whole number")
        value = int(text.replace("_", ""))
    if value < about.bounds.least:
        raise ValueError(f"{text} is below the minimum, {format_value(about.bounds.least, about)}")
    if value > about.bounds.most:
        raise ValueError(f"{text} is above the maximum, {format_value(about.bounds.most, about)}")
    return value


def parse_size(text: str) -> int:
    """Parse a size in bytes: `65536`, `64KiB` (1024s) or `64kB` (1000s)."""
    found = _SIZE.fullmatch(text)
    if len(text) > _DIGITS_MAX or found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write a number of bytes, or with a unit as in 64MiB or 1GB")
    return int(found[1].replace("_", "")) * _UNITS[found[2].lower()]


def format_size(size: int) -> str:
    """Format a size in its shortest exact form: 67108864 is 64MiB."""
    for power, letter in reversed(list(enumerate("KMGT", 1))):
        if size and size % (1 << 10 * power) == 0:
            return f"{size >> 10 * power}{letter}iB"
    return str(size)


def parse_key(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a UUID, as in 00112233-4455-6677-8899-aabbccddeeff") from None


def format_value(value: Any, about: Setting) -> str:
    """Format a value as in a settings file."""
    if value is None:
        return "null"
    return format_size(value) if about.bounds is not None and about.bounds.unit == "bytes" else str(value)


# -- generated files ---------------------------------------------------------------------------------------------------


def sample(kind: type[Any], title: str) -> str:
    """Return a commented sample file: required settings have their example, optional ones their default."""
    out = [f"# {title}", "# A line that is commented out shows the default, or an example where there is none.", ""]
    for name, (_, about) in declared(kind).items():
        out += [f"# {line}" for line in textwrap.wrap(f"{about.doc} {bounds(about)}".strip(), 100)]
        value = about.example.replace("{role}", kind.role) or format_value(about.default, about)
        out += [f"{'' if about.required else '# '}{name}: {value}", ""]
    return "\n".join(out).rstrip() + "\n"


def document(kind: type[Any], title: str) -> str:
    """Return a section of the reference page with all settings of a class."""
    out = [f"## {title}", "", "| setting | default | meaning |", "|---|---|---|"]
    for name, (_, about) in declared(kind).items():
        default = "must be given" if about.required else f"`{format_value(about.default, about)}`"
        meaning = f"{about.doc} {bounds(about)}".strip().replace("|", "\\|")
        out.append(f"| `{name}` | {default} | {meaning} |")
    return "\n".join(out) + "\n"


def bounds(about: Setting) -> str:
    if about.choices:
        return f"One of {', '.join(about.choices)}."
    if about.bounds is None:
        return ""
    unit = f" {about.bounds.unit}" if about.bounds.unit not in ("", "bytes") else ""
    return f"From {format_value(about.bounds.least, about)} to {format_value(about.bounds.most, about)}{unit}."
