"""The Python of one page of the documentation, as a module: a test calls what the page shows, and all of it.

All blocks of a page are run in their order, in one namespace, so a page reads from top to bottom like a program. A function
that no test has called would be a claim that nobody checks, so the page remembers which of its functions were entered."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from waltzd import BlockingClient, Client

DOCS = Path(__file__).parents[2] / "docs"
PYTHON = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
ENTERED = "_entered"


def blocks(name: str) -> list[str]:
    """The Python of the page `docs/NAME.md`."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    return [re.sub(f"^{indent}", "", code, flags=re.MULTILINE) for indent, code in PYTHON.findall(text)]


class _Marked(ast.NodeTransformer):
    """Each function says that it was entered, as its first statement."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.functions: dict[tuple[int, int, int], str] = {}
        """By block, line and column."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._marked(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._marked(node)

    def _marked(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        place = (self.block, node.lineno, node.col_offset)
        self.functions[place] = node.name
        said = ast.parse(f"{ENTERED}{place}").body
        node.body[ast.get_docstring(node) is not None : 0] = said  # behind the docstring
        self.generic_visit(node)
        return node


@contextmanager
def page(name: str, cluster: Any = None, *, after: str = "", only: range = range(100)) -> Iterator[ModuleType]:
    """What a page defines. With a `LocalCluster` or a `BlockingCluster`, its clients reach that one.

    At the end every function of the page must have been entered. `after`: the page whose example it goes on with.
    `only`: of these blocks, where a page has two examples; others are run all the same."""
    found = ModuleType(f"docs.{name}")
    names = found.__dict__
    with patch.dict(sys.modules, {found.__name__: found}):  # some libraries look for classes by their names
        for code in blocks(after) if after else ():
            exec(compile(code, f"{after}.md", "exec", dont_inherit=True), names)
        missing: dict[tuple[int, int, int], str] = {}
        names[ENTERED] = lambda *place: missing.pop(place, None)
        for number, code in enumerate(blocks(name)):
            marked = _Marked(number)
            tree = ast.fix_missing_locations(marked.visit(ast.parse(code)))
            missing |= marked.functions if number in only else {}
            exec(compile(tree, f"{name}.md", "exec", dont_inherit=True), names)
        if cluster is not None:
            for kind in (Client, BlockingClient):
                if kind.__name__ in names:
                    names[kind.__name__] = partial(kind, connect=cluster.connect)
        yield found
    assert not missing, f"no test calls {', '.join(missing.values())} of {name}.md"
