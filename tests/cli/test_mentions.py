"""Whatever `waltzctl …` a document or a message shows can be typed: its words are a command, its options exist, and it
takes so many arguments. What stands for something else (`{name}`, `NAME`, `…`) is a word like any other."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from waltzctl.main import cli
from waltzctl.shell.options import Command

ROOT = Path(__file__).parents[2]
FOLDERS = ("waltzd", "waltzctl", "spark/waltz_spark")
INLINE = re.compile(r"`waltzctl ([^`]+)`")
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.M | re.S)
SHELL = ("|", "||", "&&", ">")
"""What follows is for somebody else."""
STANDS_FOR = re.compile(r"\{+[^{}]*\}+|…")


class _Texts(ast.NodeVisitor):
    """The strings of a module as they are said; what is put into one is a placeholder."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.found.append(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pieces = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
        self.found.append("".join(pieces))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part)


def mentioned(text: str) -> list[str]:
    """What stands behind `waltzctl` in backticks, also over the end of a line."""
    return [" ".join(words.split()) for words in INLINE.findall(text)]


def typed(document: str) -> list[str]:
    """What stands behind `waltzctl` at the beginning of a line in the blocks of a document."""
    lines = "".join(FENCED.findall(document)).replace("\\\n", " ").splitlines()
    return [line.removeprefix("waltzctl ") for line in lines if line.startswith("waltzctl ")]


def said_in(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        texts = _Texts()
        texts.visit(ast.parse(text))
        return [words for found in texts.found for words in mentioned(found)]
    return mentioned(FENCED.sub("", text)) + typed(text)


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (ROOT / folder).rglob("*.py")
    yield from (ROOT / "docs").rglob("*.md")
    yield from (path for path in (ROOT / "configs").rglob("*") if path.is_file())
    yield from (ROOT / "README.md", ROOT / "ARCHITECTURE.md")


def complaint(said: str) -> str:
    """Why it cannot be typed; empty when it can."""
    words = list(takewhile(lambda word: word not in SHELL, shlex.split(STANDS_FOR.sub("X1", said), comments=True)))
    command: Any = cli
    context: Any = typer.Context(cli, info_name="waltzctl")
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        if found is None:
            return "" if words == ["X1"] else f"{words[0]} is no command of {context.command_path}"
        context, command = typer.Context(found, info_name=words.pop(0), parent=context), found
    try:
        words = list(command.completed(words)) if isinstance(command, Command) else words
        _, left, _ = command.make_parser(context).parse_args(words)
    except typer.TyperException as error:
        return error.format_message()
    return f"{' '.join(left)} is too much" if left else ""


def test_what_a_shell_does_with_it_is_left_out() -> None:
    assert complaint("status -o json || test $? -eq 10") == complaint("txn append 0 'a | b'  # said") == ""


def test_what_is_said_can_be_typed() -> None:
    found = [(path, said) for path in sorted(sources()) for said in said_in(path)]
    assert len(found) > 200
    why = {said: complaint(said) for said in {said for _, said in found}}
    wrong = [f"{path.relative_to(ROOT)}: `waltzctl {said}`: {why[said]}" for path, said in found if why[said]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "said",
    [
        "storage availability {name} {number} on",
        "partition desribe 0",
        "spark …  and more",
        "… status",
        "status --wacth",
        "txn get 0 1 --timeout",
        "storage remove a b c",
    ],
)
def test_what_cannot_be_typed_would_be_found(said: str) -> None:
    assert complaint(said)


def test_mentions_are_found_where_they_are() -> None:
    texts = _Texts()
    texts.visit(ast.parse('x = "see `waltzctl partition " f"describe {one}` or {f(\'`waltzctl status`\')}"'))
    assert [words for found in texts.found for words in mentioned(found)] == ["partition describe {}", "status"]
    assert mentioned("as `waltzctl storage\nrecover NAME` does") == ["storage recover NAME"]
    assert typed("```sh\nwaltzctl up\nls\nwaltzctl status \\\n  -o json  # all\n```\n") == [
        "up",
        "status    -o json  # all",
    ]
