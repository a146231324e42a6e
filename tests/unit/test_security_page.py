"""What the page on security claims is tried by tests that are named beside the claims: they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NAMED_MIN = 25


def missing(text: str) -> list[str]:
    """Tests that a text names and that are not there."""
    found = []
    for path, name in NAMED.findall(text):
        file = ROOT / path
        tree = ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        found += [] if name in defined else [f"{path}::{name}"]
    return found


def test_the_tests_that_stand_beside_the_claims_exist() -> None:
    assert missing(PAGE) == []
    assert len(set(NAMED.findall(PAGE))) >= NAMED_MIN


def test_each_bound_on_a_caller_that_floods_has_one() -> None:
    table = PAGE.partition("## A caller that floods")[2].partition("\n\n")[2].partition("\n\n")[2].partition("\n\n")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and not row.startswith("| what |")]
    assert len(rows) > 20
    assert [row for row in rows if not NAMED.search(row)] == []


def test_the_check_would_notice() -> None:
    here = "tests/unit/test_security_page.py"
    assert missing(f"`{here}::test_the_check_would_notice` `{here}::gone` `tests/gone.py::test_it`") == [
        f"{here}::gone",
        "tests/gone.py::test_it",
    ]
