"""`waltzctl config`: check configuration files of the daemons.

A file does not say which daemon it is for; its keys do. All that is wrong with it is said at once, by the reader that the
daemons themselves use, so what passes here is not refused there. What is in force on a machine says its daemon, with
`--check-config`. No daemon is asked, and nothing is changed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typer import Argument, Option

from waltzctl.show.forms import AnyForm, Column, Columns, Listing, Part, attributes, put
from waltzctl.show.terminal import count
from waltzd.daemon import config_file
from waltzd.daemon.config import ServerConfig, StorageConfig, check_files
from waltzd.daemon.config_file import Problem
from waltzd.daemon.settings import declared
from waltzd.errors import EXIT_OK, EXIT_USAGE, BadConfig

KINDS: dict[str, type[Any]] = {"storage": StorageConfig, "server": ServerConfig}
_LABELS = {"storage": "a storage", "server": "a server"}


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    path: str
    kind: str | None
    problems: tuple[Problem, ...]


VERDICTS: Columns[Verdict] = (
    *attributes("path kind"),
    Column("problems", lambda verdict: [problem._asdict() for problem in verdict.problems]),
)


def kind_of(keys: Collection[str]) -> str | None:
    """The daemon whose own keys there are more of."""
    known = {kind: set(declared(settings)) for kind, settings in KINDS.items()}
    own = {kind: names - set().union(*(known[other] for other in KINDS if other != kind)) for kind, names in known.items()}
    found = {kind: len(names.intersection(keys)) for kind, names in own.items()}
    most = [kind for kind, number in found.items() if number == max(found.values())]
    return most[0] if len(most) == 1 else None


def verdict_of(path: str, kind: str | None, *, with_files: bool = True) -> Verdict:
    """`with_files`: the certificates that it names are on this machine."""
    try:
        text = config_file.text_of(path)
    except BadConfig as error:
        return Verdict(path, kind, (Problem(None, error.message),))
    lines, problems = config_file.lines(text)
    kind = kind or kind_of(lines)
    if problems or kind is None:
        unclear = "its keys do not tell whether these are the settings of a storage or of a server; say --kind"
        return Verdict(path, kind, tuple(problems) or (Problem(None, unclear),))
    settings, problems = config_file.read(text, KINDS[kind])
    if with_files and settings is not None:
        try:
            check_files(settings)
        except BadConfig as error:
            problems = [Problem(lines.get("tls_certificate"), error.message)]
    return Verdict(path, kind, tuple(problems))


def validate(
    *,
    files: Annotated[tuple[str, ...], Argument(metavar="FILE…")],
    elsewhere: Annotated[
        bool, Option("--elsewhere", help="They are for another machine: do not look at the certificates.")
    ] = False,
    kind: Annotated[
        Literal["storage", "server"] | None, Option("--kind", help="Of which daemon; otherwise the keys tell.")
    ] = None,
    output: AnyForm = "table",
) -> int:
    """Check configuration files: everything that is wrong with each of them, and the line where it stands; and whether the
    certificates that they name are there, fit together, and have the daemon's role. Ends with 2 when anything is wrong.

    Certificates are looked at when all else is right, and not with --elsewhere. Directories are not looked at.

    \b
    Examples:
      waltzctl config validate configs/storage.yml configs/server.yml
      waltzctl config validate configs/server.yml --kind server -o json
    """
    verdicts = [verdict_of(path, kind, with_files=not elsewhere) for path in files]
    is_sound = all(not verdict.problems for verdict in verdicts)

    page: list[Part] = []
    for path, daemon, problems in ((one.path, one.kind, one.problems) for one in verdicts):
        whose = f"settings of {_LABELS[daemon]}" if daemon else "a file"
        page.append(f"{path}: {whose} with {count(len(problems), 'problem')}" if problems else f"{path}: sound, {whose}")
        page += [textwrap.indent(str(problem), "  ") for problem in problems]
    more = {"result": "sound" if is_sound else "problems"}
    put(Listing(kind="files", columns=VERDICTS, rows=verdicts, page=page, more=more), output)
    return EXIT_OK if is_sound else EXIT_USAGE
