"""The examples that the help texts give, as command lines: whatever a help text says is run by a test."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any


def examples(waltzctl: Callable[..., Any], words: list[str]) -> list[list[str]]:
    """Those of one command, without the name of the program. A line that ends with a backslash goes on in the next."""
    text = waltzctl(*words, "--help").out.split("Examples:")[1].split("\nOptions:")[0]
    lines = text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line.strip())[1:] for line in lines if line.strip().startswith("waltzctl ")]
    assert len(found) >= 2, words
    assert all(arguments[: len(words)] == words for arguments in found), found
    return found
