"""What an edit is: a deliberate bug as a person types it, one piece of a module's text with another one in its place.

Nothing is written: the loader of Python is given the changed text, so a module has to be edited before anything imports
it. `python -m tests.simulation.edit NAME pytest TEST ...` runs tests under an edit, `… NAME seeds 60` drawn seeds of the
simulator. This module imports nothing of Waltz for that reason.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Edit:
    name: str
    """What the product does wrong with it."""
    module: str
    old: str
    """Stands exactly once in the module."""
    new: str
    tests: tuple[str, ...] = ()
    """Of its room: node ids, one of which at least fails."""
    seeds: tuple[int, ...] = ()
    """Drawn ones of the simulator, below 60, that catch it."""

    @property
    def path(self) -> Path:
        return ROOT / (self.module.replace(".", "/") + ".py")

    def text(self) -> str:
        text = self.path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, (
            f"{self.name}: {self.old!r} stands {text.count(self.old)} times in {self.path.name}"
        )
        return text.replace(self.old, self.new)

    def install(self) -> None:
        assert self.module not in sys.modules, f"{self.module} was imported before it was edited"
        sys.meta_path.insert(0, _Finder(self))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._edit.module:
            return None
        file = str(self._edit.path)
        return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file, self._edit))


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, edit: Edit) -> None:
        super().__init__(name, path)
        self._edit = edit

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self._edit.text(), str(self._edit.path), "exec")
        return code


def _hunt(first: int, last: int) -> int:
    from tests.simulation.plan import make_plan
    from tests.simulation.world import simulate

    for seed in range(first, last):
        outcome = simulate(make_plan(seed))
        if outcome.kind:
            print(f"seed {seed}: {outcome.kind}: {outcome.story.splitlines()[0]}")
            return 1
    return 0


def main(arguments: Sequence[str]) -> int:
    """1 when it is caught, 0 when it survives."""
    from tests.simulation.edits import EDITS

    name, how, *rest = arguments
    if name != "none":
        EDITS[name].install()
    if how == "seeds":
        return _hunt(*map(int, rest)) if len(rest) == 2 else _hunt(0, int(rest[0]))
    import pytest

    # Its own loader of rewritten assertions would take modules of Waltz before they are edited.
    options: list[Any] = [
        "--assert=plain",
        "-x",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "--no-header",
        *rest,
    ]
    code = int(pytest.main(options))
    assert code in (0, 1), f"pytest says {code}"
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
