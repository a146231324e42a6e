"""Which cluster a command means, and how it is reached.

Four places may say so; each value is taken from the first that has it: an option, a variable of the environment, the
context, and at last the cluster that `waltzctl up` made in `./waltz-local`. A context is a cluster with a name, kept in a
file of the user. Nothing is contacted here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from waltzctl.blueprint import ZOOKEEPER, load_blueprint
from waltzctl.certificate import OPTIONS as TLS_OPTIONS
from waltzctl.certificate import tls_of
from waltzd.disk import translate
from waltzd.document import is_name
from waltzd.errors import BadArgument, ContextsDamaged, NoClusterNamed, NoSuchName
from waltzd.tls import Tls

LOCAL_DIRECTORY = "waltz-local"
LOCAL_ROOT = "/waltz"
CONTEXTS_VARIABLE = "WALTZ_CONTEXTS"
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
            raise unknown("context", name, self.named, not_done="nothing was asked of any cluster")
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
        raise ContextsDamaged(f"{path} is not UTF-8 text") from error
    try:
        found = yaml.safe_load(text) or {}
        named = {str(name): _context(path, str(name), given) for name, given in (found.get("contexts") or {}).items()}
        current = found.get("current")
    except (yaml.YAMLError, AttributeError, RecursionError) as error:
        raise ContextsDamaged(f"{path} cannot be understood: {error}") from error
    return Contexts(current=None if current is None else str(current), named=named)


def _context(path: Path, name: str, given: Any) -> Context:
    known = {field.name: field for field in fields(Context)}
    if not isinstance(given, dict):
        raise ContextsDamaged(f"{path}: context {name} is not a list of settings")
    for key, value in given.items():
        if key not in known:
            raise ContextsDamaged(f"{path}: context {name} has a setting {key}, which is not known")
        if not isinstance(value, bool if key == "protected" else str):
            raise ContextsDamaged(f"{path}: context {name}: {key} cannot be {value!r}")
    context = Context(**given)
    check_context(context, f"{path}: context {name}: ", ContextsDamaged)
    return context


def check_context(context: Context, place: str, kind: type[ContextsDamaged | BadArgument]) -> None:
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
    origins: dict[str, tuple[str, str]] = {}

    def look(name: str) -> str | None:
        option = "--" + name.replace("_", "-")
        variable = "WALTZ_" + name.upper()
        for value, origin in ((given.get(name), option), (os.environ.get(variable), variable)):
            if value:
                origins[name] = (value, origin)
                return value
        return None

    directory, coordinator = look("directory"), look("coordinator")
    if directory is not None and coordinator is not None:  # the one that was said more directly
        if origins["directory"][1].startswith("--") == origins["coordinator"][1].startswith("--"):
            raise BadArgument("--directory and --coordinator name two clusters", not_done="nobody was asked anything")
        if origins["directory"][1].startswith("--"):
            coordinator = None
        else:
            directory = None
    context, name = Context(), ""
    if directory is None and coordinator is None:
        context, name = _chosen_context(look("context"), origins)
        for field, value in asdict(context).items():
            if value not in (None, False):
                origins.setdefault(field, (str(value), f"context {name}"))
        directory, coordinator = context.directory, context.coordinator
    if directory is None and coordinator is None:
        if not (Path(LOCAL_DIRECTORY) / "cluster.json").exists():
            raise NoClusterNamed("nothing says which cluster is meant")
        directory = LOCAL_DIRECTORY
        origins["directory"] = (directory, "the cluster that `waltzctl up` made here")
    if directory is not None:
        blueprint = load_blueprint(Path(directory))
        hosts = blueprint.addresses(ZOOKEEPER)[0]
        reach = Reach(hosts=hosts, root=LOCAL_ROOT, tls=None, name=name or directory, is_protected=context.protected,
                      origins=origins, directory=Path(directory))  # fmt: skip
        return reach
    assert coordinator is not None
    root = look("root") or context.root
    if root is None:
        root = LOCAL_ROOT
        origins["root"] = (root, "the default")
    certificate, key, ca = (look(field) for field in ("tls_certificate", "tls_key", "tls_ca"))
    if certificate is None and key is None and ca is None:
        certificate, key, ca = context.tls_certificate, context.tls_key, context.tls_ca
    return Reach(hosts=coordinator, root=root, tls=tls_of(certificate, key, ca), name=name or f"{coordinator}{root}",
                 is_protected=context.protected, origins=origins)  # fmt: skip


def _chosen_context(said: str | None, origins: dict[str, tuple[str, str]]) -> tuple[Context, str]:
    """The one that was asked for, or the current one, or an empty one."""
    contexts = load_contexts()
    if said is not None:
        return contexts.get(said), said
    if contexts.current is None:
        return Context(), ""
    origins["context"] = (contexts.current, str(contexts_path()))
    return contexts.get(contexts.current), contexts.current


_OPTIONS = {
    "--context": ("NAME", "A cluster by its name: `waltzctl context list`."),
    "--directory": ("DIR", "A cluster on this machine, made by `waltzctl up DIR`."),
    "--coordinator": ("HOST:PORT,…", "Addresses of the ZooKeeper ensemble."),
    "--root": ("PATH", f"Where the cluster's documents are in ZooKeeper; {LOCAL_ROOT} by default."),
    **{name: ("FILE", meaning) for name, meaning in TLS_OPTIONS.items()},
}


def reaching(command: Callable[..., int]) -> Callable[..., int]:
    """The command gets `reach`: the cluster that is meant."""
    names = [option.removeprefix("--").replace("-", "_") for option in _OPTIONS]

    @functools.wraps(command)
    def with_reach(**rest: Any) -> int:
        given = {name: rest.pop(name) for name in names}
        return command(reach=resolve(given), **rest)

    with_option: Callable[..., int] = with_reach
    for option, (metavar, meaning) in reversed(_OPTIONS.items()):
        with_option = click.option(option, metavar=metavar, help=meaning)(with_option)
    return with_option


def using(reach: Reach, action: Callable[[Any], Awaitable[T]]) -> T:
    """Do something with the documents of the cluster (`waltzd.cluster.Cluster`)."""
    from waltzd import storages
    from waltzd.cluster import Cluster
    from waltzd.zookeeper import ZooKeeperCoordinator

    async def run() -> T:
        coordinator = ZooKeeperCoordinator(reach.hosts, reach.root)
        await coordinator.start()
        try:
            return await action(Cluster(coordinator))
        finally:
            await coordinator.close()

    return storages.run(run())
