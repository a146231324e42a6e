"""Collect the texts that people read, draw samples of them, and list those that break the rules of language.

The texts are docstrings, docs of attributes and constants, comments, help of command-line options, and messages of errors.
`./dev prose --seed 7` prints sixty of them, drawn by the seed, for a reader who has never seen this project. A test
holds `broken_rule` at zero for the product: a minimum that a machine can check, and no verdict on clarity.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("waltzd", "waltzctl", "spark")

FRAGMENT = re.compile(
    r"(?:of|that|so|those|who|whose|it|as|by|in|until|which|behind|likewise|this|these|they|both|either|neither|not|no"
    r"|nothing|nobody|none)\b",
    re.IGNORECASE,
)
"""First words that make a doc a fragment of a sentence."""
QUESTION = re.compile(r"(?:what|whether|how|where|when|why)\b", re.IGNORECASE)
"""First words that a doc of a value may have, and the docstring of a function or class may not."""
QUANTITY = re.compile(r"\bso (?:many|much|long|often|far|large|late|few)\b(?! that\b| as\b)", re.IGNORECASE)
PERSON = re.compile(r"\b(?:whoever|nobody|somebody|everybody|anybody|who)\b", re.IGNORECASE)
POINTING = re.compile(r"\b(?:that one|the others?|the same|likewise)\b(?! \w+)", re.IGNORECASE)
PATTERNS = {"quantity without a number": QUANTITY, "a word for people": PERSON, "pronoun without noun": POINTING}
CODE = re.compile(r"`[^`]*`")
SPOKEN = frozenset({"module", "docstring", "attribute", "help"})
"""Kinds of text that `broken_rule` judges."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text of the source, with its line breaks removed."""

    path: Path
    line: int
    kind: str
    """`module`, `docstring`, `attribute`, `comment`, `help` or `error`."""
    words: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.kind}: {self.words}"


def product_files() -> list[Path]:
    """Return the modules of the product that are written by hand."""
    return sorted(path for room in PRODUCT for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name)


def texts(path: Path, *, has_comments: bool = True) -> list[Text]:
    """Return the texts of a module in the order of their lines; without comments, which no rule judges, it is faster."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    found = [*_documented(tree), *_passed(tree), *(_comments(source) if has_comments else ())]
    return [Text(path, line, kind, " ".join(words.split())) for line, kind, words in sorted(found)]


def broken_rule(text: Text) -> str:
    """Return which rule a text breaks, or an empty text. Names in backquotes are not words."""
    if text.kind not in SPOKEN:
        return ""
    words = CODE.sub("X", text.words)
    if (first := FRAGMENT.match(words)) or (text.kind == "docstring" and (first := QUESTION.match(words))):
        return f"begins with {first.group()!r}"
    for rule, pattern in PATTERNS.items():
        if hit := pattern.search(words):
            return f"{rule}: {hit.group()!r}"
    return ""


def _documented(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for index, item in enumerate(body if isinstance(body, list) else []):
            if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str):
                yield item.lineno, _kind(node, index), item.value.value


def _kind(node: ast.AST, index: int) -> str:
    if index == 0 and isinstance(node, ast.Module):
        return "module"
    if index == 0 and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return "docstring"
    return "attribute"


def _passed(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield texts that are arguments: help of an option, and the words of an error that is raised."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help" and (words := _literal(node.value)):
            yield node.value.lineno, "help", words
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            spoken = [words for argument in node.exc.args if (words := _literal(argument)) and " " in words]
            if spoken:
                yield node.lineno, "error", " ".join(spoken)


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{…}" for part in node.values)  # type: ignore[misc]
    return ""


def _comments(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield comments; lines of comment that follow each other are one text."""
    begin, words, after = 0, "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(?:type:|noqa|fmt:|pragma|!|--)", token.string):
            continue
        line, text = token.start[0], token.string.lstrip("# ")
        if words and line == after:
            words = f"{words} {text}"
        else:
            if words:
                yield begin, "comment", words
            begin, words = line, text
        after = line + 1
    if words:
        yield begin, "comment", words


def main() -> int:
    """Print a sample, or with `--check` each text that breaks a rule; return the exit code."""
    parser = argparse.ArgumentParser(prog="./dev prose", description="Draw texts of the source.")
    parser.add_argument("paths", nargs="*", type=Path, help="modules or folders; all of the product when none is given")
    parser.add_argument("--seed", type=int, default=0, help="number that decides which texts are drawn")
    parser.add_argument("--count", type=int, default=60, help="number of texts to draw")
    parser.add_argument("--check", action="store_true", help="list texts that break a rule; exit 1 if there are any")
    options = parser.parse_args()
    given = [path.resolve() for path in options.paths]
    if missing := [str(path) for path in given if not path.exists()]:
        parser.error(f"there is no {', '.join(missing)}")
    files = [one for path in given for one in (sorted(path.rglob("*.py")) if path.is_dir() else [path])] or product_files()
    every = [text for path in files if "_pb2" not in path.name for text in texts(path)]
    if not options.check:
        for text in random.Random(options.seed).sample(every, min(options.count, len(every))):
            print(text)
        return 0
    broken = [(text, rule) for text in every if (rule := broken_rule(text))]
    for text, rule in broken:
        print(f"{text} [{rule}]")
    print(f"{len(broken)} of {len(every)} texts break a rule")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
