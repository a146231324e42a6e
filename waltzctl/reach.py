"""Which cluster a command means, and how it is reached.

Four places may say so; each value is taken from the first that has it: an option, a variable of the environment, the
context, and at last the cluster that `waltzctl up` made in `./waltz-local`. A context is a cluster with a name, kept in a
file of the user. Nothing is contacted here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from waltzctl import completion
from waltzctl.aloud import waiting_aloud
from waltzctl.blueprint import BLUEPRINT, ZOOKEEPER, load_blueprint
from waltzctl.certificate import OPTIONS as TLS_OPTIONS
from waltzctl.certificate import tls_of
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, NoClusterNamed, NoSuchName, NotesDamaged
from waltzd.protocol.address import is_name
from waltzd.wire.tls import Tls

LOCAL_DIRECTORY = "waltz-local"
LOCAL_ROOT = "/waltz"
CONTEXTS_VARIABLE = "WALTZ_CONTEXTS"
_NOBODY_ASKED = "nothing was asked of any cluster"
_TLS_FIELDS = ("tls_certificate", "tls_key", "tls_ca")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Context:
    """A cluster with a name. Either `directory` is given, of a cluster on this machine, or `coordinator`."""

    coordinator: str | None = None
    root: str | None = None
    directory: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    protected: bool = False
    """Whoever changes something there has to type the cluster's name."""


@dataclass(frozen=True, kw_only=True)
class Contexts:
    current: str | None
    named: Mapping[str, Context]

    def get(self, name: str) -> Context:
        if name not in self.named:
            raise unknown("context", name, self.named, not_done=_NOBODY_ASKED)
        return self.named[name]


@dataclass(frozen=True, kw_only=True)
class Reach:
    hosts: str
    root: str
    tls: Tls | None
    name: str
    """Of the context, or where the cluster is."""
    is_protected: bool
    origins: Mapping[str, tuple[str, str]]
    """What was decided, and by whom: setting → (value, origin)."""
    directory: Path | None = None
    """Of a cluster on this machine."""

    @property
    def where(self) -> str:
        return f"{self.hosts}{self.root}"


def unknown(kind: str, name: str, there: Any, *, not_done: str = "nothing was changed") -> NoSuchName:
    """The error for a name that is not there, with the nearest one that is."""
    import difflib

    names = sorted(map(str, there))
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        next_step = f"did you mean {near[0]}?"
    elif names:
        next_step = f"there are: {', '.join(names)}"
    else:
        next_step = f"there is no {kind} at all"
    return NoSuchName(f"there is no {kind} {name}", not_done=not_done, next_step=next_step)


# -- the file ----------------------------------------------------------------------------------------------------------


def contexts_path() -> Path:
    given = os.environ.get(CONTEXTS_VARIABLE)
    if given:
        return Path(given)
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "waltz" / "contexts.yml"


def load_contexts() -> Contexts:
    path = contexts_path()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Contexts(current=None, named={})
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError):
            raise translate(error, f"reading {path}") from error
        raise NotesDamaged(f"{path} is not UTF-8 text") from error
    try:
        found = yaml.safe_load(text) or {}
        named = {str(name): _context(path, str(name), given) for name, given in (found.get("contexts") or {}).items()}
        current = found.get("current")
    except (yaml.YAMLError, AttributeError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise NotesDamaged(f"{path} cannot be understood: {error}") from error
    return Contexts(current=None if current is None else str(current), named=named)


def _context(path: Path, name: str, given: Any) -> Context:
    known = {field.name: field for field in fields(Context)}
    if not isinstance(given, dict):
        raise NotesDamaged(f"{path}: context {name} is not a list of settings")
    for key, value in given.items():
        if key not in known:
            raise NotesDamaged(f"{path}: context {name} has a setting {key}, which is not known")
        if not isinstance(value, bool if key == "protected" else str):
            raise NotesDamaged(f"{path}: context {name}: {key} cannot be {value!r}")
    context = Context(**given)
    check_context(context, f"{path}: context {name}: ", NotesDamaged)
    return context


def check_context(context: Context, place: str, kind: type[NotesDamaged | BadArgument]) -> None:
    if (context.coordinator is None) == (context.directory is None):
        raise kind(f"{place}it needs either a coordinator or the directory of a cluster on this machine")
    if context.directory is not None and (context.root or context.tls_certificate or context.tls_key or context.tls_ca):
        raise kind(f"{place}a cluster on this machine has its own root and no certificates")


def save_contexts(contexts: Contexts) -> None:
    """Whole or not at all."""
    for name in contexts.named:
        if not is_name(name):
            raise BadArgument(f"{name!r} is not a name: letters, digits, dots, dashes and underscores, at most 64")
    path = contexts_path()
    named = {
        name: {key: value for key, value in asdict(context).items() if value not in (None, False)}
        for name, context in sorted(contexts.named.items())
    }
    text = yaml.safe_dump({"current": contexts.current, "contexts": named}, sort_keys=False)
    beside = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise translate(error, f"writing {path}") from error


# -- from what was said to a cluster -----------------------------------------------------------------------------------


def resolve(given: Mapping[str, str | None]) -> Reach:
    """`given`: what options said, by their names, None where they said nothing."""
    _check_options(given)
    said = _said(given)
    origins: dict[str, tuple[str, str]] = {}
    if "directory" in said and "coordinator" in said:
        raise BadArgument(
            f"{said['directory'][1]} and {said['coordinator'][1]} name two clusters",
            not_done=_NOBODY_ASKED,
            next_step="unset one of them, or say which cluster you mean by an option",
        )
    context, name = Context(), ""
    if "directory" not in said and "coordinator" not in said:
        context, name = _chosen_context(said.get("context"), origins)
    if given.get("context") and context.tls_certificate is not None:
        said = {field: found for field, found in said.items() if field not in _TLS_FIELDS or found[1].startswith("--")}
    if not said.keys().isdisjoint(_TLS_FIELDS):  # all three from one place
        context = replace(context, tls_certificate=None, tls_key=None, tls_ca=None)

    def take(field: str) -> str | None:
        value, origin = said[field] if field in said else (getattr(context, field), f"context {name}")
        if value is not None:
            origins[field] = (value, origin)
        return value

    if context.protected:
        origins["protected"] = ("true", f"context {name}")
    directory, coordinator = take("directory"), take("coordinator")
    if directory is None and coordinator is None:
        if not (Path(LOCAL_DIRECTORY) / BLUEPRINT).exists():
            raise NoClusterNamed("nothing says which cluster is meant")
        directory = LOCAL_DIRECTORY
        origins["directory"] = (directory, "the cluster that `waltzctl up` made here")
    if directory is not None:
        hosts = load_blueprint(Path(directory)).addresses(ZOOKEEPER)[0]
        origins |= {"coordinator": (hosts, f"{directory}/{BLUEPRINT}"), "root": (LOCAL_ROOT, "every local cluster")}
        return Reach(hosts=hosts, root=LOCAL_ROOT, tls=None, name=name or directory, is_protected=context.protected,
                     origins=origins, directory=Path(directory))  # fmt: skip
    assert coordinator is not None
    root = take("root")
    if root is None:
        root = LOCAL_ROOT
        origins["root"] = (root, "the default")
    certificate, key, ca = map(take, _TLS_FIELDS)
    return Reach(hosts=coordinator, root=root, tls=tls_of(certificate, key, ca), name=name or f"{coordinator}{root}",
                 is_protected=context.protected, origins=origins)  # fmt: skip


def _said(given: Mapping[str, str | None]) -> dict[str, tuple[str, str]]:
    """By options and variables: setting → (value, who said so). An option that names a cluster means that cluster, whatever
    variables would say of another one; a person's certificate may be good for many."""
    found: dict[str, tuple[str, str]] = {}
    options = {name for name, value in given.items() if value}
    overruled = set[str]()
    if options & {"context", "directory", "coordinator"}:
        overruled |= {"context", "directory", "coordinator"}
    if options & {"context", "directory"}:
        overruled.add("root")
    for name in ("context", "directory", "coordinator", "root", *_TLS_FIELDS):
        value, variable = given.get(name), "WALTZ_" + name.upper()
        if value:
            found[name] = (value, "--" + name.replace("_", "-"))
        elif (there := os.environ.get(variable)) and name not in overruled:
            found[name] = (there, variable)
    return found


def _check_options(given: Mapping[str, str | None]) -> None:
    """Two options that cannot both be meant."""
    said = [name for name, value in given.items() if value]
    places = [name for name in ("context", "directory", "coordinator") if name in said]
    if len(places) > 1:
        raise BadArgument(
            f"{' and '.join(f'--{name}' for name in places)} name {len(places)} clusters",
            not_done=_NOBODY_ASKED,
            next_step="say one of them only",
        )
    if "directory" in said and len(said) > 1:
        rest = " and ".join("--" + name.replace("_", "-") for name in said if name != "directory")
        raise BadArgument(
            f"{rest} with --directory: a cluster on this machine has its own root and no certificates",
            not_done=_NOBODY_ASKED,
            next_step=f"leave {rest} out",
        )


def _chosen_context(said: tuple[str, str] | None, origins: dict[str, tuple[str, str]]) -> tuple[Context, str]:
    """The one that was asked for, or the current one, or an empty one."""
    contexts = load_contexts()
    if said is not None:
        origins["context"] = said
    elif contexts.current is not None:
        origins["context"] = (contexts.current, str(contexts_path()))
    else:
        return Context(), ""
    name, _ = origins["context"]
    return contexts.get(name), name


_OPTIONS = {
    "--context": ("NAME", "A cluster by its name: `waltzctl context list`."),
    "--directory": ("DIR", "A cluster on this machine, made by `waltzctl up DIR`."),
    "--coordinator": ("HOST:PORT,…", "Addresses of the ZooKeeper ensemble."),
    "--root": ("PATH", f"Where the cluster's documents are in ZooKeeper; {LOCAL_ROOT} by default."),
    **{name: ("FILE", meaning) for name, meaning in TLS_OPTIONS.items()},
}


GIVEN = tuple(option.removeprefix("--").replace("-", "_") for option in _OPTIONS)
"""What `resolve` wants to know."""


def reaching(command: Callable[..., int]) -> Callable[..., int]:
    """The command gets `reach`: the cluster that is meant."""

    @functools.wraps(command)
    def with_reach(**rest: Any) -> int:
        given = {name: rest.pop(name) for name in GIVEN}
        return command(reach=resolve(given), **rest)

    return _with_options(with_reach)


def addressing(command: Callable[..., int]) -> Callable[..., int]:
    """For commands that may be given the address of a daemon, and need no cluster then: the command gets `reach`, which
    says which cluster is meant when it is called, and `tls`, the certificate for whatever is meant."""

    @functools.wraps(command)
    def with_given(**rest: Any) -> int:
        given = {name: rest.pop(name) for name in GIVEN}
        return command(reach=lambda: resolve(given), tls=lambda: _tls_alone(given), **rest)

    return _with_options(with_given)


def _with_options(command: Callable[..., int]) -> Callable[..., int]:
    """Variables are looked at by `resolve`, which also remembers who said what."""
    for option, (metavar, meaning) in reversed(_OPTIONS.items()):
        variable = "WALTZ_" + option.removeprefix("--").replace("-", "_").upper()
        offered = completion.contexts if option == "--context" else None
        command = click.option(option, metavar=metavar, help=f"{meaning} [env var: {variable}]", shell_complete=offered)(
            command
        )
    return command


def _tls_alone(given: Mapping[str, str | None]) -> Tls | None:
    fields = ("tls_certificate", "tls_key", "tls_ca")
    said = [given.get(field) or os.environ.get("WALTZ_" + field.upper()) for field in fields]
    if any(said):
        return tls_of(*said)
    try:
        return resolve(given).tls
    except NoClusterNamed:
        return None


def using(reach: Reach, action: Callable[[Any], Awaitable[T]]) -> T:
    """Do something with the documents of the cluster (`waltzd.cluster.cluster.Cluster`)."""
    from waltzd.client import loop
    from waltzd.cluster.cluster import Cluster
    from waltzd.cluster.zookeeper import ZooKeeperCoordinator

    async def run() -> T:
        coordinator = ZooKeeperCoordinator(reach.hosts, reach.root)
        async with waiting_aloud(lambda: f"waiting for ZooKeeper at {reach.hosts}"):
            await coordinator.start()
        try:
            return await action(Cluster(coordinator))
        finally:
            await coordinator.close()

    return loop.run(run())
