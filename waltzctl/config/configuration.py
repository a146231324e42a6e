"""`waltzctl config validate`: check configuration files of the daemons.

The keys of a file tell which daemon it is for. All errors are reported at once. The reader is that of the daemons, so a
file that passes here is accepted there. `--check-config` of a daemon prints the values in force on its machine. No daemon
is contacted, and nothing is changed."""

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
from waltzd.errors import EXIT_OK, EXIT_USAGE
from waltzd.errors.operations import BadConfig

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
    """Return the daemon of which the file has more keys."""
    known = {kind: set(declared(settings)) for kind, settings in KINDS.items()}
    own = {kind: names - set().union(*(known[other] for other in KINDS if other != kind)) for kind, names in known.items()}
    found = {kind: len(names.intersection(keys)) for kind, names in own.items()}
    most = [kind for kind, number in found.items() if number == max(found.values())]
    return most[0] if len(most) == 1 else None


def verdict_of(path: str, kind: str | None, *, with_files: bool = True) -> Verdict:
    """Return the problems of a file. With `with_files` also check the certificates that it names."""
    try:
        text = config_file.text_of(path)
    except BadConfig as error:
        return Verdict(path, kind, (Problem(None, error.message),))
    lines, problems = config_file.lines(text)
    kind = kind or kind_of(lines)
    if problems or kind is None:
        unclear = "its keys do not show whether it is for a storage or a server; use --kind"
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
        bool, Option("--elsewhere", help="The files are for another machine: do not check certificates.")
    ] = False,
    kind: Annotated[
        Literal["storage", "server"] | None,
        Option("--kind", help="Daemon of the files; by default it is found by their keys."),
    ] = None,
    output: AnyForm = "table",
) -> int:
    """Check configuration files. Show all problems of each file, with line numbers, and check that the certificates in it
    exist, match, and have the role of the daemon. The exit code is 2 if there is a problem.

    Certificates are checked only if a file has no other problem, and not with --elsewhere. Directories are not checked.

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
