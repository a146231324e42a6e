"""The examples that the help of a command gives, with the places of a test in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from waltzctl.main import run


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Tool:
    """The tool as a function."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str | Path) -> Outcome:
        self.capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        said = self.capsys.readouterr()
        return Outcome(code, said.out, said.err)
