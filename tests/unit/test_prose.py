"""Texts of the product keep the rules of language that a machine can check (`tests/prose.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import ROOT, Text, broken_rule, product_files, texts


def rule(kind: str, words: str) -> str:
    return broken_rule(Text(ROOT / "x.py", 1, kind, words))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("attribute", "Of the whole look."),
        ("attribute", "That it lives on, while it is open."),
        ("docstring", "Those that are missing."),
        ("docstring", "Whether it is open."),
        ("docstring", "Return the seconds; so long a place stays."),
        ("attribute", "Storage of whoever asked."),
        ("help", "Let nobody in."),
        ("attribute", "Name of the storage, or of the other."),
        ("module", "Replicas. Whoever owns the log may write."),
    ],
)
def test_a_text_that_breaks_a_rule_is_found(kind: str, words: str) -> None:
    assert rule(kind, words)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("attribute", "Whether the partition is open."),
        ("attribute", "`None` while the client is closed."),
        ("docstring", "Create the missing replicas."),
        ("docstring", "Return the same id."),
        ("comment", "Of no interest here: comments are judged by readers."),
    ],
)
def test_a_text_that_breaks_none_is_not(kind: str, words: str) -> None:
    assert not rule(kind, words)


def test_each_kind_of_text_is_read(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""Module."""\nLIMIT = 1\n"""Limit."""\n\n\ndef f(x: int) -> None:\n    """Function."""\n    # one\n'
        '    # comment\n    raise ValueError(f"{x} is wrong")\n\n\noption(help="Help.")\n'
    )
    assert [(text.kind, text.words) for text in texts(module)] == [
        ("module", "Module."),
        ("attribute", "Limit."),
        ("docstring", "Function."),
        ("comment", "one comment"),
        ("error", "{…} is wrong"),
        ("help", "Help."),
    ]


def test_no_text_of_the_product_breaks_a_rule() -> None:
    every = (text for path in product_files() for text in texts(path, has_comments=False))
    found = [f"{text} [{why}]" for text in every if (why := broken_rule(text))]
    assert found == [], "write it for a reader who has never seen the project; ./dev prose --check lists all of them"
