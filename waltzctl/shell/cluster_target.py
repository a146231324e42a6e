"""Resolve which cluster a command is for, how to connect to it, and with which certificate.

Each setting comes from the first source that has it: an option, an environment variable, the context, then the cluster that
`waltzctl up` made in `./waltz-local`. A context is a named cluster in a file of the user. `resolve` checks the files of a
certificate; no cluster is contacted before `using`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import typer
from typer import Argument, Option

from waltzctl.shell.blueprint import (
    BLUEPRINT,
    OPERATOR,
    ZOOKEEPER,
    coordinator_files,
    credentials_file,
    load_blueprint,
    operator_files,
    write_whole,
)
from waltzctl.shell.options import CLUSTER, From, option_group
from waltzctl.shell.progress import waiting_aloud
from waltzd.cluster.zookeeper_credentials import NO_CREDENTIALS, OFF, Verify, ZooKeeperCredentials, load_credentials
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, CannotConnect, NotPermitted, TlsMismatch, WaltzError
from waltzd.errors.operations import BadConfig, NoClusterNamed, NoSuchName, NotesDamaged, WrongPeer
from waltzd.protocol.address import is_name
from waltzd.protocol.role import Role
from waltzd.wire.tls import Tls, speaks_tls

LOCAL_DIRECTORY = "waltz-local"
LOCAL_ROOT = "/waltz"
CONTEXTS_VARIABLE = "WALTZ_CONTEXTS"
_NO_CLUSTER_ASKED = "no cluster was contacted"
_NO_DAEMON_ASKED = "no daemon was contacted"
COMPLETION_SECONDS = 2.0
"""Timeout of a lookup of names for shell completion."""
T = TypeVar("T")

# -- settings ---------------------------------------------------------------------------------------------------------

MEANT: dict[str, tuple[str, str]] = {
    "context": ("NAME", "Name of a cluster in `waltzctl context list`."),
    "directory": ("DIR", "Directory of a cluster that `waltzctl up DIR` made."),
    "coordinator": ("HOST:PORT,…", "Addresses of the ZooKeeper ensemble."),
    "root": ("PATH", f"Path of the cluster in ZooKeeper; {LOCAL_ROOT} by default."),
    "tls_certificate": (
        "FILE",
        "Your certificate, with the role operator, or observer to read. All three, or none.",
    ),
    "tls_key": ("FILE", "Key of your certificate, which only you may read."),
    "tls_ca": ("FILE", "Authorities that sign the certificates of the daemons."),
    "coordinator_tls": ("HOW", "TLS to ZooKeeper: off (the default), host or authority, as coordinator_tls of a server."),
    "coordinator_tls_certificate": ("FILE", "Certificate for ZooKeeper, if it is not --tls-certificate."),
    "coordinator_tls_key": ("FILE", "Key of that certificate, which only you may read."),
    "coordinator_tls_ca": ("FILE", "Authorities that sign the certificate of ZooKeeper, if not --tls-ca."),
    "coordinator_credentials": ("FILE", "File with a line name:password, for a cluster that is closed in ZooKeeper."),
}
"""Setting that selects a cluster → placeholder of its value, and help text. `option` and `variable` give its names."""
_PLACES = ("context", "directory", "coordinator")
_TLS = ("tls_certificate", "tls_key", "tls_ca")
_ACCESS_TLS = ("coordinator_tls_certificate", "coordinator_tls_key", "coordinator_tls_ca")
_ACCESS = ("coordinator_tls", *_ACCESS_TLS, "coordinator_credentials")


def option(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def variable(setting: str) -> str:
    return "WALTZ_" + setting.upper()


def meant(setting: str, **more: Any) -> Any:
    """Return the option of a setting, for every command. `resolve` reads the variable and records where a value is from."""
    metavar, meaning = MEANT[setting]
    help_ = f"{meaning} [env var: {variable(setting)}]"
    return Option(option(setting), metavar=metavar, help=help_, rich_help_panel=CLUSTER, **more)


def kept(setting: str) -> Any:
    """Return the option of a setting for `context add`, which reads no variable."""
    metavar, meaning = MEANT[setting]
    return Option(option(setting), metavar=metavar, help=meaning)


@option_group
@dataclass(frozen=True, kw_only=True)
class Context:
    """A named cluster: either the `directory` of a cluster on this machine, or a `coordinator`."""

    coordinator: Annotated[str | None, kept("coordinator")] = None
    root: Annotated[str | None, kept("root")] = None
    directory: Annotated[str | None, kept("directory")] = None
    tls_certificate: Annotated[str | None, kept("tls_certificate")] = None
    tls_key: Annotated[str | None, kept("tls_key")] = None
    tls_ca: Annotated[str | None, kept("tls_ca")] = None
    coordinator_tls: Annotated[str | None, kept("coordinator_tls")] = None
    coordinator_tls_certificate: Annotated[str | None, kept("coordinator_tls_certificate")] = None
    coordinator_tls_key: Annotated[str | None, kept("coordinator_tls_key")] = None
    coordinator_tls_ca: Annotated[str | None, kept("coordinator_tls_ca")] = None
    coordinator_credentials: Annotated[str | None, kept("coordinator_credentials")] = None
    protected: Annotated[bool, Option("--protected", help="Require NAME as the confirmation of every change.")] = False


@dataclass(frozen=True, kw_only=True)
class Contexts:
    current: str | None
    named: Mapping[str, Context]

    def get(self, name: str) -> Context:
        if name not in self.named:
            raise unknown("context", name, self.named, not_done=_NO_CLUSTER_ASKED)
        return self.named[name]


@dataclass(frozen=True, kw_only=True)
class ClusterTarget:
    hosts: str
    root: str
    tls: Tls | None
    name: str
    """Name of the context, or the address of the cluster."""
    is_protected: bool
    origins: Mapping[str, tuple[str, str]]
    """Setting → its value and the source of the value."""
    directory: Path | None = None
    """Directory of a cluster on this machine; None for any other cluster."""
    access: ZooKeeperCredentials = NO_CREDENTIALS

    @property
    def where(self) -> str:
        return f"{self.hosts}{self.root}"


def unprotected(name: str, directory: Path | None = None) -> ClusterTarget:
    """Return the target of a change that concerns no running cluster, for its confirmation only."""
    return ClusterTarget(hosts="", root="", tls=None, name=name, is_protected=False, origins={}, directory=directory)


def unknown(kind: str, name: str, there: Any, *, not_done: str = "nothing was changed") -> NoSuchName:
    """Return the error for an unknown name, with the closest known name."""
    import difflib

    names = sorted(map(str, there))
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        next_step = f"did you mean {near[0]}?"
    elif names:
        next_step = f"there are: {', '.join(names)}"
    else:
        next_step = f"there is no {kind} yet"
    return NoSuchName(f"there is no {kind} {name}", not_done=not_done, next_step=next_step)


def check_name(name: str, *, not_done: str = "") -> None:
    if not is_name(name):
        words = f"{name!r} is not a name: at most 64 letters, digits, dots, dashes and underscores"
        raise BadArgument(words, not_done=not_done)


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
    import yaml  # not at the top: most commands need no YAML, and its import takes as long as Python's own start

    try:
        found = yaml.safe_load(text) or {}
        named = {str(name): _context(path, str(name), given) for name, given in (found.get("contexts") or {}).items()}
        current = found.get("current")
    except (yaml.YAMLError, AttributeError, ValueError, OverflowError, RecursionError) as error:  # dates, escapes
        raise NotesDamaged(f"{path} is not valid: {error}") from error
    return Contexts(current=None if current is None else str(current), named=named)


def _context(path: Path, name: str, given: Any) -> Context:
    known = {field.name: field for field in fields(Context)}
    if not isinstance(given, dict):
        raise NotesDamaged(f"{path}: context {name} is not a mapping of settings")
    for key, value in given.items():
        if key not in known:
            raise NotesDamaged(f"{path}: context {name} has an unknown setting {key}")
        if not isinstance(value, bool if key == "protected" else str):
            raise NotesDamaged(f"{path}: context {name}: {key} cannot be {value!r}")
    context = Context(**given)
    check_context(context, f"{path}: context {name}: ", NotesDamaged)
    return context


def check_context(context: Context, place: str, kind: type[NotesDamaged | BadArgument]) -> None:
    if (context.coordinator is None) == (context.directory is None):
        raise kind(f"{place}it needs either a coordinator or the directory of a cluster on this machine")
    if context.directory is not None and any(getattr(context, name) for name in ("root", *_TLS, *_ACCESS)):
        raise kind(f"{place}a cluster on this machine has its own root and certificates")


def save_contexts(contexts: Contexts) -> None:
    for name in contexts.named:
        check_name(name)
    path = contexts_path()
    named = {
        name: {key: value for key, value in asdict(context).items() if value not in (None, False)}
        for name, context in sorted(contexts.named.items())
    }
    import yaml

    text = yaml.safe_dump({"current": contexts.current, "contexts": named}, sort_keys=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise translate(error, f"writing {path}") from error
    write_whole(path, text.encode())


# -- resolution -------------------------------------------------------------------------------------------------------


def resolve(given: Mapping[str, str | None]) -> ClusterTarget:
    """Return the cluster that options, variables, the context or the current directory select.

    `given` holds the options by setting, None for an option that was not used. Raise `NoClusterNamed` if nothing selects a
    cluster."""
    _check_options(given)
    settings = _given_settings(given)
    origins: dict[str, tuple[str, str]] = {}
    if "directory" in settings and "coordinator" in settings:
        raise BadArgument(
            f"{settings['directory'][1]} and {settings['coordinator'][1]} name two clusters",
            not_done=_NO_CLUSTER_ASKED,
            next_step="unset one of them, or select the cluster with an option",
        )
    context, name = Context(), ""
    if "directory" not in settings and "coordinator" not in settings:
        context, name = _chosen_context(settings.get("context"), origins)
    if given.get("context") and context.tls_certificate is not None:
        settings = {field: found for field, found in settings.items() if field not in _TLS or found[1].startswith("--")}
    if not settings.keys().isdisjoint(_TLS):  # the three files come from the same source: options, variables or context
        context = replace(context, tls_certificate=None, tls_key=None, tls_ca=None)

    def take(field: str) -> str | None:
        value, origin = settings[field] if field in settings else (getattr(context, field), f"context {name}")
        if value is not None:
            origins[field] = (value, origin)
        return value

    if context.protected:
        origins["protected"] = ("true", f"context {name}")
    directory, coordinator = take("directory"), take("coordinator")
    if directory is None and coordinator is None:
        if not (Path(LOCAL_DIRECTORY) / BLUEPRINT).exists():
            raise NoClusterNamed("no cluster is selected")
        directory = LOCAL_DIRECTORY
        origins["directory"] = (directory, "the cluster that `waltzctl up` made here")
    if directory is not None:
        blueprint = load_blueprint(Path(directory))
        hosts, tls, access = blueprint.addresses(ZOOKEEPER)[0], None, NO_CREDENTIALS
        origins |= {"coordinator": (hosts, f"{directory}/{BLUEPRINT}"), "root": (LOCAL_ROOT, "every local cluster")}
        if blueprint.has_tls:
            files, own = operator_files(Path(directory)), str(credentials_file(Path(directory)))
            known = dict(zip(_TLS, files, strict=True))
            shown = coordinator_files(Path(directory), f"operator-{OPERATOR}")
            known |= dict(zip(_ACCESS, (Verify.HOST.value, *shown, own), strict=True))
            origins |= {field: (value, f"{directory}/{BLUEPRINT}") for field, value in known.items()}
            tls, access = tls_of(*files), access_to(shown, how=Verify.HOST, credentials=own)
        return ClusterTarget(
            hosts=hosts, root=LOCAL_ROOT, tls=tls, name=name or directory, is_protected=context.protected,
            origins=origins, directory=Path(directory), access=access,
        )  # fmt: skip
    assert coordinator is not None
    root = take("root")
    if root is None:
        root = LOCAL_ROOT
        origins["root"] = (root, "the default")
    certificate, key, ca = map(take, _TLS)
    how, own_certificate, own_key, own_ca, credentials = map(take, _ACCESS)
    to_coordinator = shown_files((own_certificate, own_key, own_ca), (certificate, key, ca))
    access = access_to(to_coordinator, how=how, credentials=credentials)
    return ClusterTarget(
        hosts=coordinator, root=root, tls=tls_of(certificate, key, ca), name=name or f"{coordinator}{root}",
        is_protected=context.protected, origins=origins, access=access,
    )  # fmt: skip


def _given_settings(given: Mapping[str, str | None]) -> dict[str, tuple[str, str]]:
    """Return the settings from options and variables: setting → value and source. If an option selects a cluster, variables
    that select another one are ignored; variables with a certificate still count, as it may be valid for many clusters."""
    found: dict[str, tuple[str, str]] = {}
    options = {name for name, value in given.items() if value}
    overruled = set(_PLACES) if options & set(_PLACES) else set[str]()
    if options & {"context", "directory"}:
        overruled.add("root")
    for name in MEANT:
        value = given.get(name)
        if value:
            found[name] = (value, option(name))
        elif (there := os.environ.get(variable(name))) and name not in overruled:
            found[name] = (there, variable(name))
    return found


def _check_options(given: Mapping[str, str | None]) -> None:
    """Raise `BadArgument` for options that exclude each other."""
    names = [name for name, value in given.items() if value]
    places = [option(name) for name in _PLACES if name in names]
    if len(places) > 1:
        raise BadArgument(
            f"{' and '.join(places)} name {len(places)} clusters",
            not_done=_NO_CLUSTER_ASKED,
            next_step="give only one of them",
        )
    if "directory" in names and len(names) > 1:
        rest = " and ".join(option(name) for name in names if name != "directory")
        raise BadArgument(
            f"{rest} with --directory: a cluster on this machine has its own root and certificates",
            not_done=_NO_CLUSTER_ASKED,
            next_step=f"leave {rest} out",
        )


def _chosen_context(setting: tuple[str, str] | None, origins: dict[str, tuple[str, str]]) -> tuple[Context, str]:
    """Return the context that was named, else the current one, else an empty one; and its name."""
    contexts = load_contexts()
    if setting is not None:
        origins["context"] = setting
    elif contexts.current is not None:
        origins["context"] = (contexts.current, str(contexts_path()))
    else:
        return Context(), ""
    name, _ = origins["context"]
    return contexts.get(name), name


# -- the certificate ---------------------------------------------------------------------------------------------------


def tls_of(certificate: str | None, key: str | None, ca: str | None) -> Tls | None:
    if certificate is None or key is None or ca is None:
        given = dict(zip(_TLS, (certificate, key, ca), strict=True))
        missing = [name for name, path in given.items() if path is None]
        if len(missing) == len(given):
            return None
        there = " and ".join(option(name) for name in given if name not in missing)
        raise BadArgument(
            f"{there} without {' and '.join(map(option, missing))}: a certificate needs all three",
            not_done=_NO_DAEMON_ASKED,
            next_step=f"give {' and '.join(f'{option(one)} or {variable(one)}' for one in missing)} too, or none of them",
        )
    for path in (certificate, key, ca):
        _check_there(path)
    try:
        tls = Tls(certificate, key, ca, role=None)
    except BadConfig as error:
        raise BadArgument(
            error.message, not_done=_NO_DAEMON_ASKED, next_step="correct the file, or give another one"
        ) from error
    if tls.identity.role not in (Role.OPERATOR, Role.OBSERVER):
        raise NotPermitted(
            f"{certificate} has the role {tls.identity.role}; waltzctl needs the role {Role.OPERATOR}, or {Role.OBSERVER} "
            "to read",
            not_done=_NO_DAEMON_ASKED,
            next_step=f"use a certificate with the role {Role.OPERATOR}",
        )
    return tls


def check_operator(tls: Tls | None, what: str) -> None:
    """Raise `NotPermitted`, before any call, if the certificate may only read. `what` is the action, as in "change a
    cluster"."""
    if tls is not None and tls.identity.role is Role.OBSERVER:
        raise NotPermitted(
            f"the certificate of {tls.identity.name} has the role {Role.OBSERVER}, which may only read, and not {what}",
            not_done="nothing was changed, and no transaction was read",
            next_step=f"use a certificate with the role {Role.OPERATOR}",
        )


_Files: TypeAlias = tuple[str | None, str | None, str | None]
"""Paths of a certificate, its key, and the authorities that sign certificates of the other side."""


def shown_files(own: _Files, others: _Files) -> _Files:
    """Return the TLS files for ZooKeeper: its own ones, or else the files that are used for daemons (`others`)."""
    certificate, key, ca = own
    if (certificate is None) != (key is None):
        there, missing = _ACCESS_TLS[:2] if key is None else _ACCESS_TLS[1::-1]
        raise BadArgument(
            f"{option(there)} without {option(missing)}: a certificate needs its key",
            not_done="nothing was asked of ZooKeeper",
            next_step=f"give {option(missing)} or {variable(missing)} too, or neither",
        )
    return (*(others[:2] if certificate is None else (certificate, key)), ca or others[2])


def access_to(files: _Files, *, how: str | None, credentials: str | None) -> ZooKeeperCredentials:
    """Return the credentials for ZooKeeper. `files` are our certificate and key, and the authorities that sign the
    certificate of ZooKeeper; they are used with TLS only."""
    certificate, key, ca = files
    try:
        return load_credentials(how or OFF, certificate=certificate, key=key, ca=ca, credentials=credentials)
    except BadConfig as error:
        raise BadArgument(
            error.message,
            not_done="nothing was asked of ZooKeeper",
            next_step=f"see {', '.join(map(option, _ACCESS))}",
        ) from error


def _check_there(path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise translate(error, f"opening {path}") from error


# -- shell completion --------------------------------------------------------------------------------------------------
# Names that exist in the cluster now. Errors are dropped and the timeout is short: a shell has no place for a message.


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

    async def fetch(target: ClusterTarget) -> list[str]:
        coordinator = ZooKeeperCoordinator(target.hosts, target.root, target.access, call_seconds=COMPLETION_SECONDS)
        await coordinator.start()
        try:
            cluster = Cluster(coordinator)
            found = await (cluster.storages() if kind == "storages" else cluster.servers())
        finally:
            await coordinator.close()
        return [name for name in found if name.startswith(incomplete)]

    with suppress(WaltzError):
        return loop.run(fetch(resolve({field.name: ctx.params.get(field.name) for field in fields(ClusterOptions)})))
    return []


# -- options -----------------------------------------------------------------------------------------------------------

TlsCertificate = Annotated[str | None, meant("tls_certificate")]
TlsKey = Annotated[str | None, meant("tls_key")]
TlsCa = Annotated[str | None, meant("tls_ca")]


@option_group
@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options that select a cluster; None for an option that was not used. A command that also accepts the address of a
    daemon takes these options unresolved: with an address it needs no cluster."""

    context: Annotated[str | None, meant("context", autocompletion=known_contexts)] = None
    directory: Annotated[str | None, meant("directory")] = None
    coordinator: Annotated[str | None, meant("coordinator")] = None
    root: Annotated[str | None, meant("root")] = None
    tls_certificate: TlsCertificate = None
    tls_key: TlsKey = None
    tls_ca: TlsCa = None
    coordinator_tls: Annotated[str | None, meant("coordinator_tls")] = None
    coordinator_tls_certificate: Annotated[str | None, meant("coordinator_tls_certificate")] = None
    coordinator_tls_key: Annotated[str | None, meant("coordinator_tls_key")] = None
    coordinator_tls_ca: Annotated[str | None, meant("coordinator_tls_ca")] = None
    coordinator_credentials: Annotated[str | None, meant("coordinator_credentials")] = None

    def target(self) -> ClusterTarget:
        return resolve(vars(self))

    def tls(self) -> Tls | None:
        """Return the certificate, also if no cluster is selected."""
        alone = tls_alone(self.tls_certificate, self.tls_key, self.tls_ca)()
        if alone is not None:
            return alone
        try:
            return self.target().tls
        except NoClusterNamed:
            return None

    @property
    def typed(self) -> list[str]:
        """Names of the options that were used."""
        return [option(name) for name, value in vars(self).items() if value]


def tls_alone(
    tls_certificate: TlsCertificate = None, tls_key: TlsKey = None, tls_ca: TlsCa = None
) -> Callable[[], Tls | None]:
    """Return a function that loads the certificate in the options or variables, for commands that need no cluster."""
    given = zip(_TLS, (tls_certificate, tls_key, tls_ca), strict=True)
    paths = [value or os.environ.get(variable(name)) or None for name, value in given]
    return lambda: tls_of(*paths)


def _target(given: ClusterOptions) -> ClusterTarget:
    return given.target()


CommandTarget = Annotated[ClusterTarget, From(_target)]
"""Parameter type of a command that needs a cluster: the resolved options."""

StorageName = Annotated[str, Argument(metavar="STORAGE", autocompletion=known_storages)]
ServerName = Annotated[str, Argument(metavar="SERVER", autocompletion=known_servers)]


# -- connection --------------------------------------------------------------------------------------------------------


def using(target: ClusterTarget, action: Callable[[Any], Awaitable[T]]) -> T:
    """Connect to ZooKeeper and run `action` on the documents of the cluster (`waltzd.cluster.cluster.Cluster`). Raise
    `LevelUnknown` if the cluster was finalized for a newer version."""
    from waltzd.client import loop
    from waltzd.cluster.cluster import ROOT, Cluster
    from waltzd.cluster.documents import check_root_level
    from waltzd.cluster.zookeeper import ZooKeeperCoordinator

    async def run() -> T:
        coordinator = ZooKeeperCoordinator(target.hosts, target.root, target.access)
        async with waiting_aloud(lambda: f"waiting for ZooKeeper at {target.hosts}"):
            await coordinator.start()
        try:
            root = await coordinator.get(ROOT)
            if root is not None:
                check_root_level(root.data)
            return await action(Cluster(coordinator))
        finally:
            await coordinator.close()

    return loop.run(run())


@asynccontextmanager
async def first_contact(address: str, tls: Tls | None) -> AsyncIterator[None]:
    """Add the next step to an error of the first call to a daemon, if TLS is why it cannot be reached. The call must change
    nothing."""
    try:
        yield
    except WrongPeer:
        raise
    except TlsMismatch as error:
        if tls is None:
            step = f"give {', '.join(map(option, _TLS))}, or set {', '.join(map(variable, _TLS))}"
        else:
            step = f"leave {', '.join(map(option, _TLS))} out, and their variables unset; or give the daemon a certificate"
        raise TlsMismatch(error.message, next_step=step) from error
    except CannotConnect as error:
        if tls is not None and await speaks_tls(address):
            raise CannotConnect(
                error.message,
                not_done="nothing was changed",
                next_step=f"{address} speaks TLS: check that its certificate is one of the cluster {tls.identity.key}, as "
                "yours is, and that each side has the authority of the other",
            ) from error
        raise
