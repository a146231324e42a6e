"""What a command ended with, as tests expect it."""

from __future__ import annotations

import json
from typing import Any


def refused(told: Any, code: int, *sentences: str) -> None:
    """It ended with this code, wrote nothing on standard output, and said these sentences."""
    assert (told.code, told.out) == (code, ""), told
    assert "Traceback" not in told.err
    for sentence in sentences:
        assert sentence in told.err, told.err


def as_json(told: Any) -> Any:
    assert (told.code, told.err) == (0, ""), told
    found = json.loads(told.out)
    assert found["version"] == 1
    return found


def plain(err: str) -> str:
    """Return what standard error says, with an error object of `-o json` as the text that people read."""
    lines = []
    for line in err.splitlines():
        if line.startswith('{"version"'):
            error = json.loads(line)["error"]
            line = " ".join(
                [error["code"], error["message"], error.get("not_done", ""), error.get("next_step", "")]
            )  # fmt: skip
        lines.append(line)
    return "\n".join(lines) + "\n"
