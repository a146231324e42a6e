"""Which cluster a command means, and how it is reached.

Four places may say so; each value is taken from the first that has it: an option, a variable of the environment, the
context, and at last the cluster that `waltzctl up` made in `./waltz-local`. A context is a cluster with a name, kept in a
file of the user. Nothing is contacted here.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml
from typer import Argument

from waltzctl.aloud import waiting_aloud
from waltzctl.blueprint import BLUEPRINT, ZOOKEEPER, load_blueprint
from waltzctl.certificate import TlsCa, TlsCertificate, TlsKey, meant, tls_alone, tls_of
from waltzctl.options import From
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, NoClusterNamed, NoSuchName, NotesDamaged, WaltzError
from waltzd.protocol.address import is_name
from waltzd.wire.tls import Tls

LOCAL_DIRECTORY = "waltz-local"
LOCAL_ROOT = "/waltz"
CONTEXTS_VARIABLE = "WALTZ_CONTEXTS"
_NOBODY_ASKED = "nothing was asked of any cluster"
_TLS_FIELDS = ("tls_certificate", "tls_key", "tls_ca")
COMPLETION_SECONDS = 2.0
"""How long a shell waits for names."""
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


# -- what a shell offers behind TAB ------------------------------------------------------------------------------------
# Names that the cluster has at this moment. A person does not wait long for them, and a shell has no place for errors.


def known_storages(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, "storages", incomplete)


def known_servers(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, "servers", incomplete)


def known_contexts(incomplete: str) -> list[str]:
    with suppress(WaltzError):
        return [name for name in sorted(load_contexts().named) if name.startswith(incomplete)]
    return []


def _names(ctx: typer.Context, kind: str, incomplete: str) -> list[str]:
    from waltzd.client import loop
    from waltzd.cluster.cluster import Cluster
    from waltzd.cluster.zookeeper import ZooKeeperCoordinator

    async def look(reach: Reach) -> list[str]:
        coordinator = ZooKeeperCoordinator(reach.hosts, reach.root, call_seconds=COMPLETION_SECONDS)
        await coordinator.start()
        try:
            cluster = Cluster(coordinator)
            found = await (cluster.storages() if kind == "storages" else cluster.servers())
        finally:
            await coordinator.close()
        return [name for name in found if name.startswith(incomplete)]

    with suppress(WaltzError):
        return loop.run(look(resolve({field.name: ctx.params.get(field.name) for field in fields(Given)})))
    return []


# -- options -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Given:
    """What options say of which cluster is meant; None where they say nothing."""

    context: Annotated[
        str | None,
        meant("--context", "NAME", "A cluster by its name: `waltzctl context list`.", autocompletion=known_contexts),
    ] = None
    directory: Annotated[
        str | None, meant("--directory", "DIR", "A cluster on this machine, made by `waltzctl up DIR`.")
    ] = None
    coordinator: Annotated[str | None, meant("--coordinator", "HOST:PORT,…", "Addresses of the ZooKeeper ensemble.")] = None
    root: Annotated[
        str | None, meant("--root", "PATH", f"Where the cluster's documents are in ZooKeeper; {LOCAL_ROOT} by default.")
    ] = None
    tls_certificate: TlsCertificate = None
    tls_key: TlsKey = None
    tls_ca: TlsCa = None

    def reach(self) -> Reach:
        return resolve(vars(self))

    def tls(self) -> Tls | None:
        """For whatever is meant, also where no cluster is."""
        said = tls_alone(self.tls_certificate, self.tls_key, self.tls_ca)()
        if said is not None:
            return said
        try:
            return self.reach().tls
        except NoClusterNamed:
            return None

    @property
    def typed(self) -> list[str]:
        """The options that were used."""
        return ["--" + name.replace("_", "-") for name, value in vars(self).items() if value]


Cluster = Annotated[Given, From(Given)]


def _reach(given: Cluster) -> Reach:
    return given.reach()


def _look_up(given: Cluster) -> Callable[[], Reach]:
    return given.reach


def _certificate(given: Cluster) -> Callable[[], Tls | None]:
    return given.tls


Meant = Annotated[Reach, From(_reach)]
"""The cluster that a command is about."""
LookUp = Annotated[Callable[[], Reach], From(_look_up)]
"""For commands that may be given the address of a daemon, and need no cluster then: which one is meant is found out when
it is called, and so is the certificate for whatever is meant."""
Certificate = Annotated[Callable[[], Tls | None], From(_certificate)]

ContextName = Annotated[str, Argument(metavar="NAME", autocompletion=known_contexts)]
StorageName = Annotated[str, Argument(metavar="STORAGE", autocompletion=known_storages)]
ServerName = Annotated[str, Argument(metavar="SERVER", autocompletion=known_servers)]


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
