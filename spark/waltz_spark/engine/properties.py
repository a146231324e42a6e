"""Settings of Spark in a file: what a user wrote, and what is handed to Spark.

The format is that of Java's properties, because that is what Spark reads: a name, then `=`, `:` or a space, then the
value; a backslash takes the meaning from what follows, or goes on with the next line. What looks like a comment in the
middle of a line is a part of it. A file can be kept from others, and a command line cannot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

PREFIX = "spark."
"""Of everything that is a setting of Spark."""
_BLANKS = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_SPECIAL = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\f": "\\f", "=": "\\=", ":": "\\:", " ": "\\ "}
_SECRET = re.compile(r"secret|passw|token|key|credential", re.IGNORECASE)


class BadLine(ValueError):
    """A line that is no setting, and why."""


def parse(text: str) -> dict[str, str]:
    """As Java does, with the blanks around values taken away, as Spark does."""
    found = {}
    for line in _lines(text):
        name, value = _halves(line)
        found[_plain(name)] = trimmed(_plain(value))
    return found


def encode(settings: Mapping[str, str]) -> str:
    return "".join(f"{_written(name)}={_written(value)}\n" for name, value in settings.items())


def trimmed(text: str) -> str:
    """As Java does it: everything up to the blank."""
    return text.strip("".join(map(chr, range(33))))


def secret_names(settings: Mapping[str, str]) -> list[str]:
    """Settings whose values are secrets, judged by their names."""
    return sorted(name for name, value in settings.items() if value and _SECRET.search(name.removeprefix(PREFIX)))


def _lines(text: str) -> Iterator[str]:
    """Logical lines, without comments and blank lines."""
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
