"""Commands that pages show can be typed. `waltzctl` has a test of its own (tests/cli/test_mentions.py), and the README, the
tutorial and the operator's guide are typed as a whole; this is about all the others."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.docs.page import DOCS

ROOT = DOCS.parent
FENCED = re.compile(r"^ *```(?:sh)?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
INSTALLED = re.compile(r"waltzd\[([\w,]+)\]")


def lines() -> Iterator[tuple[Path, str]]:
    for path in PAGES:
        for block in FENCED.findall(path.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                yield path, line.strip()


def words_of(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # the middle of something larger
        return []


def test_every_extra_that_is_named_exists() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    named = {
        (path.name, one) for path in PAGES for found in INSTALLED.findall(path.read_text()) for one in found.split(",")
    }
    assert {one for one in named if one[1] not in extras} == set()
    assert len(named) > 4


def test_every_verb_of_dev_exists() -> None:
    verbs = set(re.search(r"^    (setup \|.*?)\) setup ;;", (ROOT / "dev").read_text(), re.M)[1].split(" | "))  # type: ignore[index]
    said = [(path.name, verb) for path in PAGES for verb in re.findall(r"\./dev ([a-z-]+)", path.read_text())]
    assert {one for one in said if one[1] not in verbs | {"help"}} == set()
    assert len(said) > 10


def test_every_option_of_a_daemon_exists() -> None:
    command = [sys.executable, "-m", "waltzd", "storage", "--help"]
    known = set(re.findall(r"--[a-z-]+", subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    said = [
        word
        for _, line in lines()
        for words in [words_of(line)]
        if len(words) > 1 and words[0].endswith("waltzd") and words[1] == "storage"
        for word in words
        if word.startswith("--")
    ]
    assert said
    assert set(said) <= known
