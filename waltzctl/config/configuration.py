"""`waltzctl config`: configuration files, what stands in them, and what is in force without standing there.

A file does not say which daemon it is for; its keys do. All that is wrong with it is said at once, by the reader that the
daemons themselves use, so nothing that passes here is refused there. No daemon is asked, and nothing is changed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from waltzctl.reach import Cluster, Reach, unknown
from waltzctl.show.forms import AnyForm, Column, Columns, Listing, Page, put
from waltzctl.show.terminal import count
from waltzd.daemon import config_file
from waltzd.daemon.config import ServerConfig, StorageConfig, check_files
from waltzd.daemon.config_file import Problem
from waltzd.daemon.settings import Setting, declared, spell
from waltzd.errors import EXIT_OK, EXIT_USAGE, BadArgument, BadConfig

KINDS: dict[str, type[Any]] = {"storage": StorageConfig, "server": ServerConfig}
_LABELS = {"storage": "a storage", "server": "a server"}

Kind = Annotated[Literal["storage", "server"] | None, Option("--kind", help="Of which daemon; otherwise the keys tell.")]

SETTINGS: Columns[Any] = (Column("setting"), Column("value"), Column("origin"))


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    path: str
    kind: str | None
    settings: Any = None
    """None when anything is wrong."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Where its keys stand."""
    problems: tuple[Problem, ...] = ()


def kind_of(keys: Collection[str]) -> str | None:
    """The daemon whose own keys there are more of."""
    known = {kind: set(declared(settings)) for kind, settings in KINDS.items()}
    own = {kind: names - set().union(*(known[other] for other in KINDS if other != kind)) for kind, names in known.items()}
    found = {kind: len(names.intersection(keys)) for kind, names in own.items()}
    most = [kind for kind, number in found.items() if number == max(found.values())]
    return most[0] if len(most) == 1 else None


def looked_at(path: str, kind: str | None) -> Verdict:
    text = config_file.text_of(path)
    lines, problems = config_file.lines(text)
    kind = kind or kind_of(lines)
    if problems:
        return Verdict(path=path, kind=kind, problems=tuple(problems))
    if kind is None:
        raise BadArgument(
            f"{path}: its keys do not tell whether these are the settings of a storage or of a server",
            not_done="the file was not checked",
            next_step="say --kind storage or --kind server",
        )
    settings, problems = config_file.read(text, KINDS[kind])
    return Verdict(path=path, kind=kind, settings=settings, lines=lines, problems=tuple(problems))


def verdict_of(path: str, kind: str | None, *, with_files: bool = True) -> Verdict:
    """`with_files`: the certificates that it names are on this machine."""
    try:
        found = looked_at(path, kind)
    except (BadArgument, BadConfig) as error:
        what = error.message.removeprefix(f"{path}: ") + ("; say --kind" if isinstance(error, BadArgument) else "")
        return Verdict(path=path, kind=kind, problems=(Problem(None, what),))
    if with_files and found.settings is not None:
        try:
            check_files(found.settings)
        except BadConfig as error:
            return replace(found, problems=(Problem(found.lines.get("tls_certificate"), error.message),))
    return found


def validate(
    *,
    files: Annotated[tuple[str, ...], Argument(metavar="FILE…")],
    elsewhere: Annotated[
        bool, Option("--elsewhere", help="They are for another machine: do not look at the certificates.")
    ] = False,
    kind: Kind = None,
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
    columns: Columns[Verdict] = (
        Column("path", lambda verdict: verdict.path),
        Column("kind", lambda verdict: verdict.kind),
        Column("problems", lambda verdict: [problem._asdict() for problem in verdict.problems]),
    )

    def draw(_out: Any) -> None:
        for verdict in verdicts:
            _put_verdict(verdict)

    more = {"result": "sound" if is_sound else "problems"}
    things = Listing(kind="files", columns=columns, rows=verdicts, more=more)
    put(Page(draw=draw, things=things), output)
    return EXIT_OK if is_sound else EXIT_USAGE


def _put_verdict(verdict: Verdict) -> None:
    whose = f"settings of {_LABELS[verdict.kind]}" if verdict.kind else "a file"
    if not verdict.problems:
        typer.echo(f"{verdict.path}: sound, {whose}")
        return
    typer.echo(f"{verdict.path}: {whose} with {count(len(verdict.problems), 'problem')}")
    for problem in verdict.problems:
        typer.echo(textwrap.indent(str(problem), "  "))


def show(*, file: Annotated[str, Argument(metavar="FILE")], kind: Kind = None, output: AnyForm = "table") -> int:
    """Show every setting that a configuration file puts in force, and whether the file or the default says so.

    \b
    Examples:
      waltzctl config show configs/storage.yml
      waltzctl config show configs/server.yml -o json
    """
    found = looked_at(file, kind)
    try:
        settings: Any = config_file.sound(file, found.settings, found.problems)
    except BadConfig as error:
        step = "correct the file; `waltzctl config explain SETTING` says what a setting means"
        raise BadConfig(error.message, not_done="nothing was started or changed", next_step=step) from error
    rows = []
    for name, value in config_file.resolved(settings).items():
        line = found.lines.get(name)
        origin = "default" if line is None else f"line {line}"
        rows.append(
            {"setting": name, "value": None if getattr(settings, name) is None else value, "origin": origin, "line": line}
        )
    put(Listing(kind="settings", columns=SETTINGS, rows=rows, more={"path": file, "daemon": found.kind}), output)
    return EXIT_OK


# -- meanings ----------------------------------------------------------------------------------------------------------


def _meant(reach: Reach, output: str) -> int:
    """Which cluster a command means here."""
    rows = [{"setting": name, "value": value, "origin": origin} for name, (value, origin) in reach.origins.items()]
    if output == "table":
        typer.echo(f"cluster {reach.name}{', protected' if reach.is_protected else ''}")
    more = {"cluster": reach.name, "coordinator": reach.hosts, "root": reach.root, "is_protected": reach.is_protected}
    put(Listing(kind="values", columns=SETTINGS, rows=rows, more=more), output)
    return EXIT_OK


def explain(
    *, setting: Annotated[str | None, Argument(metavar="[SETTING]")] = None, given: Cluster, output: AnyForm = "table"
) -> int:
    """Say what a setting of the daemons means: its default, its bounds, an example.

    Without a setting: which cluster commands mean here, and where each value came from. An option counts most, then a
    variable, then the context, then the cluster that `waltzctl up` made in this directory.

    \b
    Examples:
      waltzctl config explain session_seconds
      waltzctl config explain --coordinator zk1:2181,zk2:2181 --root /waltz/payments
    """
    if setting is None:
        return _meant(given.reach(), output)
    found = {kind: about for kind, settings in KINDS.items() if (about := declared(settings).get(setting)) is not None}
    if not found:
        names = {name for settings in KINDS.values() for name in declared(settings)}
        raise unknown("setting", setting, names, not_done="nothing was looked up")
    told: dict[tuple[str, ...], list[str]] = {}
    for kind, (_, declaration) in found.items():
        told.setdefault(_explanation(setting, declaration), []).append(kind)

    def draw(_out: Any) -> None:
        for number, (lines, kinds) in enumerate(told.items()):
            head = f"{setting}, of {' and '.join(map(_LABELS.__getitem__, kinds))}"
            typer.echo("\n".join([*([""] if number else []), head, *lines]))

    rows = [(kind, about) for kind, (_, about) in found.items()]
    things = Listing(kind="daemons", columns=MEANINGS, rows=rows, more={"setting": setting})
    put(Page(draw=draw, things=things), output)
    return EXIT_OK


def _explanation(name: str, about: Setting) -> tuple[str, ...]:
    """Below its name."""
    facts = {"Default": "none, it must be given" if about.required else spell(about.default, about)}
    if bounds := config_file.bounds(about):
        facts["Bounds"] = bounds[0].lower() + bounds[1:-1]
    facts["Example"] = f"{name}: {_example(about)}"
    meaning = textwrap.wrap(about.doc, 78, initial_indent="  ", subsequent_indent="  ")
    return ("", *meaning, "", *(f"  {label + ':':<9}{text}" for label, text in facts.items()))


def _example(about: Setting) -> str:
    return about.example or spell(about.default, about)


MEANINGS: Columns[tuple[str, Setting]] = (
    Column("daemon", lambda of: of[0]),
    Column("meaning", lambda of: of[1].doc),
    Column("is_required", lambda of: of[1].required),
    Column("default", lambda of: None if of[1].required or of[1].default is None else spell(of[1].default, of[1])),
    Column("minimum", lambda of: of[1].bounds and of[1].bounds[0]),
    Column("maximum", lambda of: of[1].bounds and of[1].bounds[1]),
    Column("unit", lambda of: of[1].unit or None),
    Column("choices", lambda of: list(of[1].choices)),
    Column("example", lambda of: _example(of[1])),
)
