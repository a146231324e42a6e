"""What the page on security claims is tried by tests that are named beside the claims: they exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NAMED_MIN = 120
CLAIMS_NOTHING = ("Encryption at rest, and the erasure of a person", "Reporting a vulnerability")
"""Sections that say what Waltz does not do, or what a person does."""


def missing(text: str) -> list[str]:
    """Tests that a text names and that are not there."""
    return [f"{path}::{name}" for path, name in NAMED.findall(text) if name not in defined_in(ROOT / path)]


@cache
def defined_in(file: Path) -> list[str]:
    """Return the functions of a module of tests; none where there is no such file."""
    source = file.read_text(encoding="utf-8") if file.exists() else ""
    return re.findall(r"^(?:async )?def (\w+)\(", source, re.MULTILINE)


def test_the_tests_that_stand_beside_the_claims_exist() -> None:
    assert missing(PAGE) == []
    assert len(set(NAMED.findall(PAGE))) >= NAMED_MIN


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Return the cells of the header and of each row, for each table of a text."""
    blocks = re.findall(r"(?m)(?:^\|.*\n)+", text)
    cells = [[[cell.strip() for cell in row.split("|")[1:-1]] for row in block.splitlines()] for block in blocks]
    return [(header, rows) for header, _, *rows in cells]


def untried(text: str) -> list[str]:
    """Return the first cell of each row that names no test although its table has a column for it."""
    return [
        row[0] for header, rows in tables(text) if header[-1] == "tried by" for row in rows if not NAMED.search(row[-1])
    ]


def test_each_row_of_a_table_of_claims_names_a_test() -> None:
    assert untried(PAGE) == []
    assert sum(header[-1] == "tried by" for header, _ in tables(PAGE)) == 5


def test_whatever_the_threat_model_excludes_names_a_test() -> None:
    (rows,) = [rows for header, rows in tables(PAGE) if header == ["who has", "can", "cannot"]]
    claims = [row for row in rows if row[2]]
    assert len(claims) > 10
    assert [row[0] for row in claims if not NAMED.search(row[2])] == []


def test_each_section_names_a_test() -> None:
    sections = [part.split("\n", 1) for part in PAGE.split("\n## ")[1:]]
    assert {title for title, text in sections if not NAMED.search(text)} == set(CLAIMS_NOTHING)


def test_the_check_would_notice() -> None:
    here = "tests/unit/test_security_page.py"
    assert missing(f"`{here}::test_the_check_would_notice` `{here}::gone` `tests/gone.py::test_it`") == [
        f"{here}::gone",
        "tests/gone.py::test_it",
    ]
    table = "| what | tried by |\n|---|---|\n| one | `tests/a.py::test_it` |\n| two | nobody |\n"
    assert untried(table) == ["two"]
