"""What a command ended with, as tests expect it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 90


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


def until(is_true: Callable[[], Any], what: str = "") -> None:
    """Wait until it is true; fail with `what` when it does not come to be."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
