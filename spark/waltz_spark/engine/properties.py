"""Spark settings in a properties file: the user's file, and the file that is passed to Spark.

The format is that of Java's properties, which Spark reads: a name, then `=`, `:` or a space, then the value. A backslash
escapes the next character, or continues the line. A `#` in the middle of a line is no comment. A file can be protected
from other users, and a command line cannot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

SETTING_PREFIX = "spark."
_BLANKS = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_SPECIAL = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\f": "\\f", "=": "\\=", ":": "\\:", " ": "\\ "}
_SECRET = re.compile(r"secret|passw|token|key|credential", re.IGNORECASE)


class BadLine(ValueError):
    """A line is not a valid setting; the text is the reason."""


def parse(text: str) -> dict[str, str]:
    """Parse properties as Java does, and strip values as Spark does."""
    found = {}
    for line in _lines(text):
        name, value = _halves(line)
        found[_plain(name)] = trimmed(_plain(value))
    return found


def encode(settings: Mapping[str, str]) -> str:
    return "".join(f"{_written(name)}={_written(value)}\n" for name, value in settings.items())


def trimmed(text: str) -> str:
    """Strip all characters up to the space, as Java's `trim` does."""
    return text.strip("".join(map(chr, range(33))))


def secret_names(settings: Mapping[str, str]) -> list[str]:
    """Return the settings whose values are secrets, according to their names."""
    return sorted(name for name, value in settings.items() if value and _SECRET.search(name.removeprefix(SETTING_PREFIX)))


def _lines(text: str) -> Iterator[str]:
    """Yield logical lines, without comments and blank lines."""
    begun = ""
    is_going_on = False
    for natural in re.split(r"\r\n|\r|\n", text):
        line = natural.lstrip(_BLANKS)
        if not is_going_on and (not line or line[0] in "#!"):
            continue
        backslashes = len(line) - len(line.rstrip("\\"))
        is_going_on = backslashes % 2 == 1
        begun += line[:-1] if is_going_on else line
        if not is_going_on:
            yield begun
            begun = ""
    if begun:
        yield begun


def _halves(line: str) -> tuple[str, str]:
    end = 0
    while end < len(line) and line[end] not in "=:" + _BLANKS:
        end += 2 if line[end] == "\\" else 1
    rest = line[end:].lstrip(_BLANKS)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_BLANKS)
    return line[:end], rest


def _plain(text: str) -> str:
    def meant(found: re.Match[str]) -> str:
        if found[1] is not None:
            return chr(int(found[1], 16))
        if found[2] == "u":
            raise BadLine(f"{text!r}: behind \\u there have to be four hexadecimal digits")
        return _ESCAPES.get(found[2], found[2])

    return re.sub(r"\\(?:u([0-9A-Fa-f]{4})|(.))", meant, text, flags=re.DOTALL)


def _written(text: str) -> str:
    whole = "".join(_SPECIAL.get(letter, letter) for letter in text)
    return "\\" + whole if whole[:1] in ("#", "!") else whole
