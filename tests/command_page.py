"""`docs/commands.md`: every command of `waltzctl` and `waltzd`, from the declarations that also make their `--help`.

`./dev generate` writes the page; `tests/cli/test_command_page.py` fails when it is stale.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import waltzctl.main
import waltzd.__main__
from waltzctl.shell.options import option_records

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
COMMON_MIN = 20
"""Commands that have an option, with the same help, from which on the option is described once for all commands."""
OPENING = """\
# Commands

This page is made from the declarations of the commands by `./dev generate`; a test fails when it is stale. Each command
prints its own part with `--help`. A command that was removed is refused with an error that names its replacement.

Data goes to standard output. Progress, notes and errors go to standard error. `-o json` prints JSON with a `version`, to
which later versions only add fields. [Exit codes](errors.md#exit-codes) are the same for all commands, apart from
`verify-segments`, which has [three](offline-tools.md#verify-segments).
"""

Option = tuple[str, str, str]
"""Section, name with placeholder, and help of an option."""


@dataclass(frozen=True)
class Shown:
    """A command with the words by which it is called."""

    words: str
    command: Any
    context: Any

    def options(self) -> Iterator[Option]:
        """Yield each option, as `--help` prints it."""
        for section, *record in option_records(self.command, self.context):
            name, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
            if "--help" not in name:
                yield section, name, text

    def usage(self) -> str:
        return " ".join([self.words, *self.command.collect_usage_pieces(self.context)])


def commands(command: Any, words: str) -> Iterator[Shown]:
    context = typer.Context(command, info_name=words)
    if not hasattr(command, "list_commands"):
        yield Shown(words, command, context)
        return
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), f"{words} {name}")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text in Markdown; text behind a backspace keeps its lines, as in `--help`."""
    for part in text.split("\n\n"):
        if part.startswith("\b\n"):
            lines = part.removeprefix("\b\n").removeprefix("Examples:\n").rstrip()
            yield f"```\n{textwrap.dedent(lines)}\n```"
        else:
            yield escaped(" ".join(part.split()))


def escaped(text: str) -> str:
    """Return a text in which Markdown shows `<` and `*` outside of code as they are."""
    parts = text.split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;").replace("*", "\\*") for i, part in enumerate(parts))


def table(options: list[Option]) -> str:
    rows = [f"| `{name}` | {escaped(text)} |" for _, name, text in options]
    return "\n".join(["| option | meaning |", "|---|---|", *rows])


def entry(shown: Shown, common: dict[str, list[Option]]) -> str:
    options = list(shown.options())
    shared = [option for options_ in common.values() for option in options_ if option in options]
    own = [option for option in options if option not in shared]
    parts = [f"### `{shown.words}`", f"```\nUsage: {shown.usage()}\n```", *paragraphs(shown.command.help)]
    if own:
        parts.append(table(own))
    if shared:
        parts.append(f"And {', '.join(references(shared, common))}.")
    return "\n\n".join(parts)


def references(shared: list[Option], common: dict[str, list[Option]]) -> Iterator[str]:
    """Yield a link for each section of common options that a command has as a whole, and else the names."""
    for section, options in common.items():
        if len(options) > 1 and set(options) <= set(shared):
            yield f"the options [{section.lower()}](#{section.lower()})"
        else:
            names = [option[1].split()[0].strip(",") for option in options if option in shared]
            yield from (f"[`{name}`](#{section.lower()})" for name in names)


def overview() -> str:
    """Return a table of the commands of `waltzctl` and what each does."""
    rows = [
        (f"waltzctl {group} {name}".replace("  ", " "), text)
        for group, entries in waltzctl.main.COMMANDS.items()
        for name, (function, text) in entries.items()
        if function
    ]
    lines = [f"| [`{words}`](#{words.replace(' ', '-')}) | {text} |" for words, text in sorted(rows)]
    return "\n".join(["| command | what it does |", "|---|---|", *lines])


def page() -> str:
    programs = {
        "waltzctl": list(commands(waltzctl.main.cli, "waltzctl")),
        "waltzd": list(commands(typer.main.get_command(waltzd.__main__.app), "waltzd")),
    }
    counts = Counter(option for shown in programs["waltzctl"] for option in shown.options())
    common: dict[str, list[Option]] = {}
    for option in (option for option, count in counts.items() if count >= COMMON_MIN):
        common.setdefault(option[0], []).append(option)
    parts = [OPENING.rstrip(), "## Common options", "Most commands of `waltzctl` have these options."]
    for section, options in common.items():
        parts += [f"### {section}", table(options)]
    parts += ["## All commands", overview()]
    for program, found in programs.items():
        parts += [f"## {program}", *(entry(shown, common) for shown in found)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
