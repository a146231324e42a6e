"""What a task raised, out of the text that Spark hands over: the text of a traceback is all that comes from there.

An error of ours arrives with all its parts, because `reading.telling` puts them below its message. Of any other
error, the last line of the traceback says what happened. Pure.
"""

from __future__ import annotations

import re

from waltzd.errors import WaltzError, tree

_OURS = re.compile(r"^\s*waltzd\.errors\.(\w+): (.*)$")
_PYTHON_ERROR = re.compile(r"^(?!org\.|java\.|py4j\.|scala\.)[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b(?::.*)?$")
_TRACEBACK = "Traceback (most recent call last):"
_NOT_DONE, _NEXT, _LOOKUP = "Not done: ", "Next: ", "`waltzctl errors lookup "


def raised_by_us(text: str) -> WaltzError | None:
    """The last that is in it: what caused it stands above."""
    kinds = {kind.__name__: kind for kind in tree().values()}
    lines = text.splitlines()
    for at in reversed(range(len(lines))):
        found = _OURS.match(lines[at])
        if found is not None and found[1] in kinds:
            return _made(kinds[found[1]], found[2], lines[at + 1 :])
    return None


def _made(kind: type[WaltzError], message: str, below: list[str]) -> WaltzError:
    parts = {_NOT_DONE: "", _NEXT: ""}
    for line in map(str.strip, below):
        sign = next((sign for sign in parts if line.startswith(sign)), None)
        if sign is not None:
            parts[sign] = line.removeprefix(sign)
        elif line.startswith(_LOOKUP) or any(parts.values()) or not line or line.startswith("at "):
            break
        else:
            message += f" {line}"  # a message of several lines
    return kind(message, not_done=parts[_NOT_DONE], next_step=parts[_NEXT])


def summary(text: str) -> str:
    """One line of it: what Python said at the end of its traceback, else what looks like an error, else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if _TRACEBACK in lines:
        behind = lines[lines.index(_TRACEBACK) + 1 :]
        said = next((line for line in behind if _PYTHON_ERROR.match(line)), None)
        if said is not None:
            return said
    return next((line for line in lines if "Error" in line or "Exception" in line), lines[0] if lines else "")
