"""Which command lines move replicas, and that none of them waits for ever in a test."""

from __future__ import annotations

from collections.abc import Sequence

PATIENCE_SECONDS = 60
_MOVING = {
    ("cluster", "set"),
    ("partition", "assign"),
    ("partition", "auto-assign"),
    ("storage", "add"),
    ("storage", "remove"),
}


def bounded(words: Sequence[str]) -> list[str]:
    """The same, with an end: whoever has to wait longer is told what for."""
    is_bounded = tuple(words[:2]) not in _MOVING or "--timeout" in words
    return [*words] if is_bounded else [*words, "--timeout", str(PATIENCE_SECONDS)]
