"""An edit: a deliberate bug as a person types it, some lines of a function with others in their place.

The lines are found by what they mean to Python: comments, docstrings, line breaks and the words of messages do not count.
So an edit survives a formatter, a reworded text, and changes elsewhere in its module. Nothing is written: the loader of
Python is given the changed text, so a module has to be edited before anything imports it.
`python -m tests.simulation.edit NAME pytest TEST ...` runs tests under an edit, `… NAME seeds 60` drawn seeds of the
simulator. This module imports nothing of Waltz for that reason.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]


_TOKEN = re.compile(
    r"""(?P<space>\s+|\\\n|\#[^\n]*)
    |(?P<text>[rbfRBFuU]{0,2}(?:"{3}(?:[^\\]|\\.)*?"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'))
    |(?P<word>\w+)
    |(?P<sign>->|:=|\*\*=?|//=?|<<=?|>>=?|[-+*/%@&|^=<>!]=|\.\.\.|.)""",
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {")", "]", "}"}


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    """As it is compared: `<words>` for every text of several words."""
    start: int
    end: int


def tokens_of(source: str) -> list[Token]:
    """Return the tokens of a piece of Python, without comments, docstrings, line ends and commas in front of a bracket.

    Every text of several words is the same token: how a message is worded does not matter.
    """
    found: list[Token] = []
    for match in _TOKEN.finditer(source):
        text, kind = match[0], match.lastgroup
        if kind == "space" or (kind == "text" and '"""' in text[:5] and _begins_line(source, match.start())):
            continue
        if kind == "text" and " " in text:
            if found and found[-1].text == "<words>":  # one message over several lines
                found[-1] = Token("<words>", found[-1].start, match.end())
                continue
            text = "<words>"
        if text in _CLOSING and found and found[-1].text == ",":
            found.pop()
        found.append(Token(text, match.start(), match.end()))
    return found


def _begins_line(source: str, at: int) -> bool:
    return not source[source.rfind("\n", 0, at) + 1 : at].strip()


parsed = lru_cache(maxsize=8)(ast.parse)
"""A module as a tree; those of the last few edits are kept."""


def node_of(source: str, scope: str) -> ast.AST:
    """Return the function or class `scope` (like `Recovery.held`) of a module; the module if it is empty."""
    node: ast.AST = parsed(source)
    for name in scope.split(".") if scope else ():
        inner = [one for one in ast.walk(node) if isinstance(one, _SCOPES) and one.name == name]
        if not inner:
            raise LookupError(f"there is no {scope}")
        node = inner[0]
    return node


def _scope_alone(source: str) -> str:
    """Return what a function or class means to Python, whatever it stands in."""
    return ast.dump(ast.parse(f"if True:\n{source}" if source[:1].isspace() else source))


def span_of(source: str, scope: str) -> tuple[int, int]:
    """Return where `scope` begins and ends in a module."""
    node = node_of(source, scope)
    if not scope:
        return 0, len(source)
    assert isinstance(node, _SCOPES)
    assert node.end_lineno is not None
    lines = source.splitlines(keepends=True)
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1
    return sum(map(len, lines[:first])), sum(map(len, lines[: node.end_lineno]))


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def places_of(old: str, source: str) -> list[tuple[int, int]]:
    """Return where the tokens of `old` stand in a piece of Python, as offsets of its text.

    Where they stand several times, and once with the same words, that one place is meant.
    """
    wanted = [token.text for token in tokens_of(old.rstrip().removesuffix(","))]
    found = tokens_of(source)
    texts = [token.text for token in found]
    places = [
        (found[at].start, found[at + len(wanted) - 1].end)
        for at in range(len(texts) - len(wanted) + 1)
        if texts[at] == wanted[0] and texts[at : at + len(wanted)] == wanted
    ]
    same = [(start, end) for start, end in places if source[start:end] in old]
    return same if len(same) == 1 else places


def put(source: str, start: int, end: int, old: str, new: str) -> str:
    """Return the source with `new` in place of what stands from `start` to `end`, indented as `old` was."""
    line = source.rfind("\n", 0, start) + 1
    margin = source[line:start]
    new = new.rstrip().removesuffix(",") if old.rstrip().endswith(",") else new.rstrip()
    if margin.strip():  # within a line that does not belong to the edit as a whole
        return source[:start] + textwrap.dedent(new) + source[end:]
    deeper = len(margin) - (len(old) - len(old.lstrip()))
    body = "\n".join(" " * deeper + text if deeper >= 0 else text[-deeper:] for text in new.splitlines())
    rest = source[end : source.find("\n", end)]
    return source[:line] + body + source[end + (len(rest) if rest.lstrip().startswith("#") else 0) :]


@dataclass(frozen=True)
class Edit:
    name: str
    """What the product does wrong with it."""
    module: str
    scope: str
    """Function or class of the module, like `Recovery.held`; empty for the module."""
    old: str
    """Lines of which the tokens stand exactly once in the scope."""
    new: str
    tests: tuple[str, ...] = ()
    """Node ids of tests of its room, one of which at least fails."""
    seeds: tuple[int, ...] = ()
    """Drawn seeds of the simulator, below 60, that catch it."""

    @property
    def path(self) -> Path:
        return ROOT / (self.module.replace(".", "/") + ".py")

    def text(self) -> str:
        text = self.path.read_text(encoding="utf-8")
        start, end = span_of(text, self.scope)
        places = places_of(self.old, text[start:end])
        assert len(places) == 1, f"{self.name}: {self.old!r} stands {len(places)} times in {self.scope or self.path.name}"
        changed = put(text, start + places[0][0], start + places[0][1], self.old, self.new)
        before, after = (_scope_alone(one) for one in (text[start:end], changed[start : end + len(changed) - len(text)]))
        assert before != after, f"{self.name}: the edit changes nothing"
        return changed

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
