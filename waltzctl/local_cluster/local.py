"""A real cluster on this machine: ZooKeeper, storages and servers as processes on loopback addresses, with all files in
one directory.

Nothing outside of the directory is written. The blueprint defines the cluster. Its processes outlive the command that
started them; the next command finds them by the notes in the directory. One command at a time changes a cluster.

Obstacles are checked before anything is started. An existing cluster holds transactions, and a part of it may be enough
to work with or to repair the rest: if a start fails, whatever runs is left running, and the error says what runs and
what to do. A new cluster holds nothing; if it does not come up, all of it is stopped again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import yaml

from waltzctl.local_cluster.daemon import Daemon, Process, birth, undisturbed
from waltzctl.local_cluster.java import java_command, serves
from waltzctl.shell.blueprint import (
    APPLICATION,
    ARCHIVE_KEY,
    BLUEPRINT,
    CERTIFICATES,
    CREDENTIALS,
    HOST,
    OPERATOR,
    STATE,
    ZOOKEEPER,
    Blueprint,
    candidate_ports,
    certificate_files,
    coordinator_files,
    credentials_file,
    free_base,
    is_free,
    load_blueprint,
    load_lives,
    operator_files,
    ports_for,
    ports_from,
    save_blueprint,
    save_lives,
    write_whole,
)
from waltzctl.shell.cluster_target import access_to, tls_of
from waltzctl.shell.numbers import format_partitions
from waltzctl.shell.progress import Report, unreported
from waltzctl.show.forms import Column, Columns, Part, Table
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzctl.snapshot.collector import take_snapshot
from waltzd.archive.listing import label_at
from waltzd.archive.location import directory_of, open_store
from waltzd.archive.signature import new_key
from waltzd.client import loop
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.coordinator import Coordinator
from waltzd.cluster.documents import FORMAT, StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.cluster.zookeeper_credentials import NO_CREDENTIALS, Verify, ZooKeeperCredentials
from waltzd.daemon.audit import AUDIT_NAME, TRAFFIC_NAME
from waltzd.daemon.logs import EVENTS_NAME
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, WaltzError, explain
from waltzd.errors.operations import (
    AlreadyThere,
    DaemonEnded,
    DirectoryHeld,
    DiskFull,
    ForeignArchive,
    NodeMissing,
    NoLocalCluster,
    PartitionsClosed,
    PortInUse,
    StoreRefused,
    StoreUnavailable,
)
from waltzd.format.layout import CONTROL_NAME, GROUPS_NAME, HARD_STATE_NAME, IDENTITY_NAME, RESERVE_NAME, SCRUB_NAME

if TYPE_CHECKING:
    from waltzctl.placement.creation import ClusterSpec
    from waltzd.wire.tls import Tls

LOCK = "lock"
_PID_BYTES = 200
NOTE = "removal-has-begun"
_LAST = (STATE, BLUEPRINT, NOTE, LOCK)
"""Files removed last, in this order: until then the next command finds what it needs."""
_NEW = r"(\.\d+)?(\.new)?"
_DIRECTORIES = re.compile(
    r"""
    log | certificates | server-\d+ | zookeeper(/data(/version-2)?)?
    | storage-\d+(/data(/\d+(\.set-aside-\d+|\.new)?)?)?
    """,
    re.VERBOSE,
)
_AUDITS = AUDIT_NAME, TRAFFIC_NAME
_AUDIT = "|".join(map(re.escape, _AUDITS))
_OF_A_STORAGE = (CONTROL_NAME, GROUPS_NAME, IDENTITY_NAME, RESERVE_NAME, SCRUB_NAME, EVENTS_NAME, *_AUDITS)
_FILES = re.compile(
    rf"""
    ({re.escape(BLUEPRINT)}|{re.escape(STATE)}|{re.escape(ARCHIVE_KEY)}){_NEW} | {NOTE} | {LOCK}
    | log/(zookeeper|(storage|server)-\d+)\.log(\.old)?
    | server-\d+/(server\.yml | {re.escape(EVENTS_NAME)}(\.new)? | ({_AUDIT})(\.\d+)?)
    | certificates/((zookeeper-)?ca|(storage-storage|server-server)-\d+|(zookeeper|operator|client)-[\w.]+
      |zookeeper-client-[\w-]+)\.(pem|key)
    | certificates/{re.escape(CREDENTIALS)}{_NEW}
    | zookeeper/(keystore|authorities)\.pem
    | zookeeper/(lock|zoo\.cfg|log4j2\.properties|zookeeper\.log(\.\d+)?|hs_err_pid\d+\.log)
    | zookeeper/data/version-2/((log|snapshot)\.[0-9a-f]+(\.\w+)?|(accepted|current)Epoch(\.\w+)?)
    | storage-\d+/storage\.yml
    | storage-\d+/data/({"|".join(map(re.escape, _OF_A_STORAGE))}){_NEW}
    | storage-\d+/data/\d+(\.set-aside-\d+|\.new)?/({HARD_STATE_NAME}|\d{{19}}\.(seg|idx)){_NEW}
    """,
    re.VERBOSE,
)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold the lock: no other waltzctl starts, stops or removes anything in the directory."""
    lock = _locked(directory)
    try:
        yield
    finally:
        os.close(lock)


def wait_unlocked(directory: Path) -> None:
    """Wait until no other waltzctl works on the directory, or it is gone."""
    try:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise translate(error, f"looking who has locked {directory}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _locked(directory: Path) -> int:
    path = directory / LOCK
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError as error:
            raise NoLocalCluster(f"{directory} does not exist") from error
        except OSError as error:
            raise translate(error, f"locking {directory}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, _PID_BYTES, 0).decode("ascii", "replace").strip()
            os.close(lock)
            who = f" (process {holder})" if holder.isdigit() and birth(int(holder)) is not None else ""
            raise DirectoryHeld(
                f"another waltzctl{who} starts or stops the cluster in {directory} at this moment",
                next_step="wait until it has finished, then try again",
            ) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                with suppress(OSError):  # on a full disk the lock has no process number; nothing else changes
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
        os.close(lock)  # the process that held the lock has removed the cluster, with this file


# -- what is ours, and its removal -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Belongings:
    """Directory of a local cluster: its lock, which files in it belong to the cluster, and their removal.

    One process at a time starts, stops or removes something there. It holds a file lock, which the system releases when the
    process ends; a lock file that is left over blocks no other process.

    `waltzctl reset` removes what the cluster made, and nothing else. Files of the cluster are recognized by place and name.
    Other files stay, with the directories that hold them; links are never followed or removed. A note that the removal has
    begun is written first and removed last, so a half-removed cluster is never started, and the same command finishes the
    removal.
    """

    files: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    """Directories, each after those that it holds."""
    foreign: tuple[str, ...] = ()
    """Paths that do not belong to the cluster; a foreign directory is one path, without its content."""
    bytes: int = 0
    """Total size of the cluster's files."""


def is_ours(path: str, *, is_directory: bool) -> bool:
    """Return whether a path, relative to the directory of the cluster, belongs to the cluster."""
    return (_DIRECTORIES if is_directory else _FILES).fullmatch(path) is not None


def is_cluster(directory: Path) -> bool:
    """Return whether `waltzctl up` made a cluster here, even if it is half removed."""
    return (directory / BLUEPRINT).exists() or (directory / NOTE).exists()


def is_whole(directory: Path) -> bool:
    """Return whether there is a cluster here of which nothing was removed."""
    return (directory / BLUEPRINT).exists() and not (directory / NOTE).exists()


def check_whole(directory: Path) -> None:
    if (directory / NOTE).exists():
        raise AlreadyThere(
            f"a removal of the cluster in {directory} was begun and not finished",
            not_done="nothing was started",
            next_step=f"finish it with `waltzctl reset {directory}`",
        )


def survey(directory: Path) -> Belongings:
    """List the files of the cluster and the foreign ones; change nothing."""
    files: list[str] = []
    directories: list[str] = []
    foreign: list[str] = []
    size = 0

    def walk(below: str) -> None:
        nonlocal size
        for entry in sorted(os.scandir(directory / below), key=lambda entry: entry.name):
            path = f"{below}{entry.name}"
            is_directory = entry.is_dir(follow_symlinks=False)
            is_plain = is_directory or entry.is_file(follow_symlinks=False)
            if not (is_plain and is_ours(path, is_directory=is_directory)):
                foreign.append(path)
            elif is_directory:
                walk(f"{path}/")
                directories.append(path)
            else:
                files.append(path)
                size += entry.stat(follow_symlinks=False).st_size

    try:
        walk("")
    except OSError as error:
        raise translate(error, f"looking through {directory}") from error
    return Belongings(files=tuple(files), directories=tuple(directories), foreign=tuple(foreign), bytes=size)


def remove(directory: Path) -> Belongings:
    """Remove the cluster; return what was removed and what stays. The caller holds the lock, and no daemon runs."""
    try:
        (directory / NOTE).touch(mode=0o600)
        _flush(directory)
        found = survey(directory)
        for path in (path for path in found.files if path not in _LAST):
            (directory / path).unlink(missing_ok=True)
        for path in found.directories:
            _remove_empty(directory / path)
        _flush(directory)
        for name in _LAST:
            (directory / name).unlink(missing_ok=True)
        _remove_empty(directory)
    except OSError as error:
        raise translate(error, f"removing the cluster in {directory}") from error
    return found


def _remove_empty(directory: Path) -> None:
    with suppress(OSError):  # it holds a foreign file, is a mount point, or a working directory
        directory.absolute().rmdir()


def _flush(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


NAME, ROOT = "local", "/waltz"
SESSION_SECONDS, DRAIN_SECONDS = 4, 10
"""Seconds, for servers: shorter than in production, so that a fail-over can be watched."""
START_SECONDS, END_SECONDS = 60.0, 45.0
POLL_SECONDS = 0.05
LOOK_SECONDS = 0.1
OPEN_SECONDS = 60.0
SETTLE_SECONDS = 15.0
"""Seconds to wait for the last replicas once all partitions take transactions, and for partitions to open once a daemon
is known to be missing."""
STILL_SECONDS = 2.0
"""Seconds without a change of owners, after which the assignment counts as final even if servers own unequal numbers of
partitions."""
TOLD_PARTITIONS = 5
MAKING = {"log", LOCK, ARCHIVE_KEY, f"{ARCHIVE_KEY}.new", BLUEPRINT, f"{BLUEPRINT}.new"}
"""Files in the directory while another command makes a cluster, or after it was killed while it did."""
FREE_BYTES_MIN = 256 << 20
PROCESSES: Columns[Process] = (
    Column("process", "name", json="name"),
    Column("address", lambda one: one.addresses[0], json=""),
    Column("admin", lambda one: "".join(one.addresses[1:]), json=""),
    Column("pid"),
    Column("state", lambda one: one.pid is not None, cell=lambda runs: "runs" if runs else "down", json="is_running"),
    Column("", json="addresses"),
    Column("", lambda one: str(one.log), json="log"),
)
NOTHING_STARTED = "nothing was started"


class LocalCluster:
    """Cluster in one directory. `settings` holds additional settings for its daemons, by kind: "storage", "server"."""

    def __init__(
        self,
        directory: Path,
        blueprint: Blueprint,
        *,
        report: Report = unreported,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.directory = directory
        self.blueprint = blueprint
        self._report = report
        self._settings = settings or {}
        self.daemons = {name: self._daemon(name) for name in blueprint.names}
        self.recall()

    @classmethod
    def make(
        cls,
        directory: Path,
        *,
        partitions: int = 4,
        storages: int = 3,
        servers: int = 2,
        replication: int = 3,
        format: int = FORMAT,
        has_tls: bool = False,
        archive: str | None = None,
        base: int | None = None,
        report: Report = unreported,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> LocalCluster:
        """Make a new cluster without starting it. `has_tls`: with certificates for all, and a closed ZooKeeper.
        `archive`: store to which the log is archived. `base`: first port."""
        check_whole(directory)
        candidate_ports()  # a wrong range is refused before anything is made
        is_other = directory.exists() and (not directory.is_dir() or bool(set(os.listdir(directory)) - MAKING))
        # After the listing, because files outside MAKING appear after the blueprint; before the lock, which would
        # otherwise keep the command that has just made a cluster from starting it.
        _check_unmade(directory)
        if is_other:
            raise BadArgument(
                f"{directory} is not empty, and holds no cluster that `waltzctl up` made",
                not_done="nothing was made or started",
                next_step="name a new directory, or an empty one",
            )
        try:
            (directory / "log").mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise translate(error, f"making the directory {directory}") from error
        with directory_lock(directory):
            _check_unmade(directory)
            store = None if archive is None else store_for(archive, directory)
            blueprint = Blueprint(
                key=uuid4(),
                partitions=partitions,
                replication=replication,
                storages=storages,
                servers=servers,
                ports={},
                format=format,
                has_tls=has_tls,
                archive=store,
            )
            blueprint = replace(blueprint, ports=ports_for(blueprint.names, directory, base))
            save_blueprint(directory, blueprint)
        return cls(directory, blueprint, report=report, settings=settings)

    @classmethod
    def find(cls, directory: Path, *, report: Report = unreported) -> LocalCluster:
        """Return the cluster that was made in this directory."""
        return cls(directory, load_blueprint(directory), report=report)

    def move(self, base: int) -> None:
        """Change the ports for the next start to those from `base` on. No daemon may run on another port."""
        with directory_lock(self.directory):
            self.recall()
            ports = ports_from(base, self.blueprint.names)
            if ports == self.blueprint.ports:
                return
            if self.running:
                raise BadArgument(
                    f"--port {base}: {', '.join(self.running)} of the cluster in {self.directory} still run on other ports",
                    not_done=NOTHING_STARTED,
                    next_step=f"`waltzctl down {shlex.quote(str(self.directory))}`, then the same command again",
                )
            self.blueprint = replace(self.blueprint, ports=ports, has_moved=True)
            self.daemons = {name: self._daemon(name) for name in self.blueprint.names}
            save_blueprint(self.directory, self.blueprint)

    # -- where things are

    @property
    def coordinator_hosts(self) -> str:
        return self.blueprint.addresses(ZOOKEEPER)[0]

    @property
    def server_addresses(self) -> list[str]:
        return [self.blueprint.addresses(name)[0] for name in self.blueprint.server_names]

    @property
    def storage_addresses(self) -> list[str]:
        return [self.blueprint.addresses(name)[0] for name in self.blueprint.storage_names]

    @property
    def storage_directories(self) -> list[Path]:
        return [self.directory / name / "data" for name in self.blueprint.storage_names]

    @property
    def processes(self) -> list[Process]:
        return [
            Process(
                name=name,
                kind=self._kind(name),
                addresses=self.blueprint.addresses(name),
                pid=daemon.life.pid if daemon.life is not None and daemon.is_running else None,
                log=daemon.log,
            )
            for name, daemon in self.daemons.items()
        ]

    def table(self) -> list[Part]:
        """Return the processes for a page."""
        return [Table(PROCESSES, self.processes), f"key {self.blueprint.key}; logs: {self.directory}/log"]

    @property
    def running(self) -> list[str]:
        return [name for name, daemon in self.daemons.items() if daemon.is_running]

    def recall(self) -> None:
        """Read the notes on processes, which other commands may have changed."""
        for name, life in load_lives(self.directory).items():
            if name in self.daemons:
                self.daemons[name].take_over(life)

    def remember(self) -> None:
        lives = {name: daemon.life for name, daemon in self.daemons.items() if daemon.life is not None}
        save_lives(self.directory, lives)

    # -- what the daemons are given

    def _daemon(self, name: str) -> Daemon:
        home = self.directory / name
        if name == ZOOKEEPER:
            arguments = [ZOOKEEPER, "--directory", str(home.absolute()), "--listen", self.coordinator_hosts]
            if self.blueprint.has_tls:
                keystore, _, _ = certificate_files(self.directory, f"{ZOOKEEPER}-{HOST}")
                *_, ca = coordinator_files(self.directory, f"operator-{OPERATOR}")
                arguments += ["--tls-keystore", keystore, "--tls-ca", ca]
            return Daemon(name, arguments, self._log(name), lambda _: serves(self.coordinator_hosts, self.access.tls))
        kind = self._kind(name)
        arguments = [kind, "--config", str((home / f"{kind}.yml").absolute())]
        daemon = Daemon(name, arguments, self._log(name), lambda words: f"waltzd {kind} is ready: " in words)
        daemon.environment["STATE_DIRECTORY"] = str(home.absolute())
        return daemon

    @property
    def access(self) -> ZooKeeperCredentials:
        if not self.blueprint.has_tls:
            return NO_CREDENTIALS
        credentials = str(credentials_file(self.directory))
        return access_to(
            coordinator_files(self.directory, f"operator-{OPERATOR}"), how=Verify.HOST, credentials=credentials
        )

    @property
    def tls(self) -> Tls | None:
        """Certificate of the local operator; None without TLS."""
        return tls_of(*operator_files(self.directory)) if self.blueprint.has_tls else None

    def _certify(self) -> None:
        """Make the missing certificates, and the credentials that own the documents in ZooKeeper."""
        if not self.blueprint.has_tls:
            return
        from waltzctl.config.certificates import Kind, make, of_kind

        self._report("making certificates")
        folder = self.directory / CERTIFICATES
        names = [(Kind.ZOOKEEPER, HOST), (Kind.OPERATOR, OPERATOR), (Kind.CLIENT, APPLICATION)]
        names += [(Kind(self._kind(name)), name) for name in self.daemons if name != ZOOKEEPER]
        names += [(Kind.ZOOKEEPER_CLIENT, name) for name in (OPERATOR, *self.blueprint.server_names)]
        wanted = [of_kind(kind, name, self.blueprint.key) for kind, name in names]
        missing = [one for one in wanted if not all((folder / file).exists() for file in one.files)]
        if missing:
            make(folder, missing)
        if not credentials_file(self.directory).exists():
            write_whole(credentials_file(self.directory), f"waltz:{secrets.token_urlsafe(32)}\n".encode(), 0o600)

    def _kind(self, name: str) -> str:
        return name.partition("-")[0]

    def _log(self, name: str) -> Path:
        return self.directory / "log" / f"{name}.log"

    def _write_settings(self, name: str) -> None:
        listen, admin = self.blueprint.addresses(name)
        fields: dict[str, object] = {"listen": listen, "admin_listen": admin, "name": name}
        kind = self._kind(name)
        if kind == "storage":
            fields |= {
                "directory": (self.directory / name / "data").absolute(),
                "cluster_key": self.blueprint.key,
                "partitions": self.blueprint.partitions,
            }
        else:
            fields |= {
                "coordinator": self.coordinator_hosts,
                "cluster": ROOT,
                "session_seconds": SESSION_SECONDS,
                "drain_seconds": DRAIN_SECONDS,
            }
        if self.blueprint.archive is not None:
            fields |= settings_of(self.blueprint.archive, self.directory)
        if self.blueprint.has_tls:
            files = certificate_files(self.directory, f"{kind}-{name}")
            fields |= dict(zip(("tls_certificate", "tls_key", "tls_ca"), files, strict=True))
            if kind == "server":
                names = ("coordinator_tls_certificate", "coordinator_tls_key", "coordinator_tls_ca")
                fields |= dict(zip(names, coordinator_files(self.directory, f"{kind}-{name}"), strict=True))
                fields |= {"coordinator_tls": Verify.HOST, "coordinator_credentials": credentials_file(self.directory)}
        fields |= self._settings.get(kind, {})
        words = yaml.safe_dump({key: str(value) for key, value in fields.items()}, sort_keys=False, allow_unicode=True)
        path = self.directory / name / f"{kind}.yml"
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_text(f"# Written by `waltzctl up` at every start.\n{words}", encoding="utf-8")
        except OSError as error:
            raise translate(error, f"writing {path}") from error

    # -- up

    def start(self, timeout: float | None = None) -> ClusterSnapshot:
        """Start the daemons that do not run, and return when every partition is open. If that fails, daemons of a new
        cluster that were started here are stopped again; an existing cluster is left running as far as it runs.
        `timeout`: seconds for the daemons to become ready, for a portion of the replicas to be made, and for the
        partitions to open; None for `START_SECONDS` and `OPEN_SECONDS`."""
        ready_seconds, open_seconds = (START_SECONDS, OPEN_SECONDS) if timeout is None else (timeout, timeout)
        with directory_lock(self.directory):
            self.recall()
            before = self.running
            is_new = not self.blueprint.is_founded
            was_started = False
            failed: dict[str, WaltzError] = {}
            try:
                self._check()
                self._certify()
                failed |= self._start([ZOOKEEPER, *self.blueprint.storage_names], is_new=is_new, seconds=ready_seconds)
                loop.run(self._found(ready_seconds))
                failed |= self._start(self.blueprint.server_names, is_new=is_new, seconds=ready_seconds)
                was_started = True
                found = loop.run(self._wait_open(failed, is_new=is_new, open_seconds=open_seconds))
                if is_new and found.closed:
                    raise closed_error(found, open_seconds)
            except BaseException as error:
                if is_new or not was_started or not isinstance(error, WaltzError):
                    self._end([name for name in self.running if name not in before])
                    raise
                raise unseen_error(self.directory, error, self.running) from error
            missed = unfinished_error(self.directory, found, self.running, failed, open_seconds)
            if missed is not None:
                raise missed
            return found

    async def _wait_open(self, failed: dict[str, WaltzError], *, is_new: bool, open_seconds: float) -> ClusterSnapshot:
        """Wait until every partition takes transactions with all of its replicas, or the time is over; return the last
        snapshot. `failed` holds daemons that did not start, with the error. A daemon that ends meanwhile is added; for
        a new cluster its error is raised."""
        started = moved = time.monotonic()
        owners: list[str | None] = []
        async with self._coordinator() as coordinator:
            while True:
                self._check_running(failed, is_new=is_new)
                began = time.monotonic()
                found = await take_snapshot(coordinator, tls=self.tls)
                now = time.monotonic()
                if owners != (owners := [partition.owner for partition in found.partitions]):
                    moved = now
                seconds = now - started
                is_settled = self._is_whole(found) and (is_even(found) or now - moved > STILL_SECONDS)
                if not found.closed and (failed or seconds > SETTLE_SECONDS or is_settled):
                    return found
                if seconds > (SETTLE_SECONDS if failed else open_seconds):
                    return found
                self._report(f"waiting for partitions: {_opened(found)}")
                await asyncio.sleep(
                    max(LOOK_SECONDS, now - began)
                )  # a snapshot of many partitions takes time from the servers that open them

    def _check_running(self, failed: dict[str, WaltzError], *, is_new: bool) -> None:
        for name, daemon in self.daemons.items():
            if name in failed:
                continue
            try:
                daemon.check_running()
            except DaemonEnded as error:
                if is_new or name == ZOOKEEPER:
                    raise
                failed[name] = error

    def _is_whole(self, found: ClusterSnapshot) -> bool:
        """Return whether every replica takes part and every server is there."""
        return not found.short and found.server_reports.keys() >= set(self.blueprint.server_names)

    def start_one(self, name: str) -> None:
        with directory_lock(self.directory):
            self._start([name], is_new=True, seconds=START_SECONDS)

    def _check(self) -> None:
        """Check everything that can be known before a start."""
        check_whole(self.directory)
        wanted = [name for name, daemon in self.daemons.items() if not daemon.is_running]
        if wanted:
            check_machine(self.directory)
        if ZOOKEEPER in wanted:
            java_command()
        for name in wanted:
            for port in self.blueprint.ports[name]:
                if not is_free(port):
                    raise self._taken(port, name)

    def _taken(self, port: int, name: str) -> PortInUse:
        again = f"`waltzctl up {shlex.quote(str(self.directory))} --port {free_base(self.blueprint.names)}`"
        return PortInUse(
            f"another program listens on {HOST}:{port}, the address of {name} in {self.directory}",
            not_done=NOTHING_STARTED,
            next_step=f"find it with `ss -ltnp 'sport = :{port}'` and stop it; or give the daemons of this cluster other "
            f"ports, once none runs: {again}",
        )

    def _start(self, names: list[str], *, is_new: bool, seconds: float) -> dict[str, WaltzError]:
        """Start daemons; return those that did not become ready, with the error. Raise if the cluster cannot continue
        without one of them."""
        for name in names:
            if not self.daemons[name].is_running:
                if name != ZOOKEEPER:
                    self._write_settings(name)
                with undisturbed():  # a process that is not noted would never be found again
                    self.daemons[name].spawn()
                    self.remember()
        failed = self._wait_ready(names, needed=set(names) if is_new else {ZOOKEEPER}, seconds=seconds)
        self.remember()
        return failed

    def _wait_ready(self, names: list[str], *, needed: set[str], seconds: float) -> dict[str, WaltzError]:
        deadline = time.monotonic() + seconds
        waiting = list(names)
        failed: dict[str, WaltzError] = {}
        while waiting:
            self._report(f"waiting for {', '.join(waiting)}")
            for name in list(waiting):
                try:
                    if self.daemons[name].is_ready():
                        waiting.remove(name)
                except DaemonEnded as error:
                    if name in needed:
                        raise
                    failed[name] = error
                    waiting.remove(name)
            if waiting and time.monotonic() > deadline:
                for name in waiting:
                    failed[name] = self.daemons[name].silent(seconds)
                    if name in needed:
                        raise failed[name]
                break
            if waiting:
                time.sleep(POLL_SECONDS)
        return failed

    async def _found(self, seconds: float) -> None:
        """Make the documents and empty replicas of the cluster, once. A later start undoes no change of an operator.
        `seconds`: time for a portion of a storage's replicas."""
        from waltzctl.placement.creation import create_cluster  # not needed for a cluster that exists

        async with self._coordinator() as coordinator:
            there = await self._written_down(coordinator)
            if there is not None and self.blueprint.has_moved:
                await self._write_addresses(Cluster(coordinator))
                there = await self._written_down(coordinator)
            if there is not None and self.blueprint.is_founded:
                return
            self._report("writing down the cluster, making its replicas")
            now = datetime.now(UTC).isoformat(timespec="seconds")
            await create_cluster(
                coordinator, there or self._spec(), created=now, tls=self.tls, report=self._report, seconds=seconds
            )
        self.blueprint = replace(self.blueprint, is_founded=True)
        save_blueprint(self.directory, self.blueprint)

    async def _write_addresses(self, cluster: Cluster) -> None:
        """Write the new addresses of storages into their documents; servers do that themselves."""
        for before in (await cluster.storages()).values():
            if before.name in self.blueprint.storage_names:
                listen, admin = self.blueprint.addresses(before.name)
                await cluster.update_storage(replace(before, listen=listen, admin_listen=admin), before=before)
        self.blueprint = replace(self.blueprint, has_moved=False)
        save_blueprint(self.directory, self.blueprint)

    async def _written_down(self, coordinator: Coordinator) -> ClusterSpec | None:
        """Return the specification that completes what is in ZooKeeper already: replicas are made after the documents.
        None if there is nothing."""
        cluster = Cluster(coordinator)
        try:
            meta = await cluster.meta()
        except NodeMissing:
            return None
        return replace(
            self._spec(),
            name=meta.name,
            key=meta.key,
            partitions=meta.partitions,
            format=meta.format,
            storages=tuple((await cluster.storages()).values()),
        )

    def _spec(self) -> ClusterSpec:
        from waltzctl.placement.creation import ClusterSpec

        return ClusterSpec(
            name=NAME,
            key=self.blueprint.key,
            partitions=self.blueprint.partitions,
            replication=self.blueprint.replication,
            format=self.blueprint.format,
            storages=tuple(
                StorageMeta(name=name, listen=listen, admin_listen=admin, group=name)
                for name in self.blueprint.storage_names
                for listen, admin in [self.blueprint.addresses(name)]
            ),
        )

    async def snapshot(self) -> ClusterSnapshot:
        async with self._coordinator() as coordinator:
            return await take_snapshot(coordinator, tls=self.tls)

    @asynccontextmanager
    async def _coordinator(self) -> AsyncIterator[Coordinator]:
        coordinator = ZooKeeperCoordinator(self.coordinator_hosts, ROOT, self.access)
        await coordinator.start()
        try:
            yield coordinator
        finally:
            await coordinator.close()

    # -- down

    def stop(self) -> list[str]:
        """Stop servers, then storages, then ZooKeeper. Return the names of processes that had to be killed."""
        with directory_lock(self.directory):
            self.recall()
            return self._end(self.running)

    def clear(self) -> list[str]:
        """Stop everything and remove all files of the cluster. Return the names of processes that had to be killed."""
        with directory_lock(self.directory):
            self.recall()
            killed = self._end(self.running)
            self._report("removing its files")
            remove(self.directory)
            return killed

    def kill(self) -> None:
        """Kill all daemons at once. Acknowledged transactions are on the disk."""
        self.recall()
        for name in self.running:
            self.daemons[name].kill()

    def _end(self, names: list[str]) -> list[str]:
        killed = []
        for wave in (self.blueprint.server_names, self.blueprint.storage_names, [ZOOKEEPER]):
            ending = [name for name in wave if name in names]
            for name in ending:
                self.daemons[name].ask_to_end()
            for name in ending:
                self._report(f"waiting for {name} to end")
                if not self.daemons[name].wait_end(END_SECONDS):
                    killed.append(name)
        return killed


def _opened(found: ClusterSnapshot) -> str:
    """Summarize how many partitions are open, and whether the group log is."""
    total = found.meta.partitions
    opened = total - sum(not view.is_group_log for view in found.closed)
    is_log_closed = found.group_log is not None and not found.group_log.is_open
    return f"{opened} of {total} are open{', the group log is not' if is_log_closed else ''}"


def is_even(found: ClusterSnapshot) -> bool:
    draining = {view.meta.name for view in found.servers if view.meta.is_draining}
    owned = [len(server.partitions) for name, server in found.server_reports.items() if name not in draining]
    return not owned or max(owned) - min(owned) <= 1


def check_machine(directory: Path) -> None:
    """Check that processes can be identified and that there is space. The directory need not exist."""
    if birth(os.getpid()) is None:
        raise BadArgument(
            "a cluster on one machine needs Linux: without /proc one process cannot be told from another",
            not_done=NOTHING_STARTED,
            next_step="run it in a Linux container or a virtual machine",
        )
    there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if free < FREE_BYTES_MIN:
        raise DiskFull(
            f"{directory}: {free >> 20} MiB are free there, and a cluster needs at least {FREE_BYTES_MIN >> 20}",
            not_done=NOTHING_STARTED,
            next_step="free some space, or name a directory on another disk",
        )


def _check_unmade(directory: Path) -> None:
    if (directory / BLUEPRINT).exists():
        raise DirectoryHeld(
            f"another program has just made a cluster in {directory}",
            not_done="nothing was made or started",
            next_step="the same command again continues with that cluster",
        )


# -- errors of a start that fails --------------------------------------------------------------------------------------


def closed_error(found: ClusterSnapshot, seconds: float) -> PartitionsClosed:
    """Build the error for a new cluster whose partitions do not open; nothing of the cluster stays."""
    step = "read the logs of the daemons; `waltzctl up` again goes on from here, and `--timeout` waits longer"
    return _closed(found, seconds, explain(DaemonEnded)[1], step)


def unfinished_error(
    directory: Path, found: ClusterSnapshot, running: Sequence[str], failed: Mapping[str, WaltzError], seconds: float
) -> WaltzError | None:
    """Build the error for an existing cluster that did not start completely; the rest runs on. None if it did."""
    if not failed:
        stays = f"{_stays(running)}, and nothing was stopped"
        takes = format_partitions((view.partition for view in found.closed), "takes", "take")
        not_done = f"{takes} no transactions yet; {stays}"
        return _closed(found, seconds, not_done, _mending(directory)) if found.closed else None
    if found.closed:
        partitions = f"{format_partitions((view.partition for view in found.closed), 'takes', 'take')} no transactions"
    else:
        partitions = "every partition takes transactions all the same"
    missing = f"{', '.join(failed)} {'is' if len(failed) == 1 else 'are'} not ready"
    first = next(iter(failed.values()))
    again = f"read what it says in its log, then `waltzctl up {shlex.quote(str(directory))} --detach` again"
    return type(first)(
        "\n".join(error.message for error in failed.values()),
        not_done=f"{missing}; {partitions}. {_stays([name for name in running if name not in failed])}",
        next_step=f"{again}. {_mending(directory)}; "
        "a storage that is lost is replaced by `waltzctl storage remove STORAGE --replacement NEW`",
    )


def unseen_error(directory: Path, error: WaltzError, running: Sequence[str]) -> WaltzError:
    """Build the error for a start after which no partition could be examined."""
    return type(error)(
        error.message,
        not_done=f"whether the partitions are open is not known; {_stays(running)}, and nothing was stopped",
        next_step=_mending(directory),
    )


def _closed(found: ClusterSnapshot, seconds: float, not_done: str, next_step: str) -> PartitionsClosed:
    waiting = "; ".join(f"partition {view.partition}: {view.waiting}" for view in found.closed[:TOLD_PARTITIONS])
    number = len(found.closed)
    return PartitionsClosed(
        f"{number} partition{' is' if number == 1 else 's are'} not open after {seconds:g} seconds. {waiting}",
        not_done=not_done,
        next_step=next_step,
    )


def _stays(running: Sequence[str]) -> str:
    return f"{', '.join(running)} {'runs' if len(running) == 1 else 'run'}" if running else "nothing runs"


def _mending(directory: Path) -> str:
    place = shlex.quote(str(directory))
    return f"`waltzctl status --directory {place}` says what is missing, `waltzctl down {place}` stops everything"


# -- the store to which it archives its log ----------------------------------------------------------------------------


SEGMENT_BYTES = 1 << 20
"""Segment size of a cluster with an archive: only full segments are archived, so a trial sees its first one after 1
MiB."""


def settings_of(store: str, directory: Path) -> dict[str, object]:
    """Return the archive settings of a daemon: storages upload, and servers read for clients what storages no longer
    hold. An archive without a key is not signed. Both kinds of daemon get the segment size, because servers decide it
    in format 1 and storages in format 0."""
    key = key_file(directory)
    signed = {"archive_key": key} if key.exists() else {}
    return {"archive": store, "segment_bytes_max": SEGMENT_BYTES, **signed}


def key_file(directory: Path) -> Path:
    return directory.absolute() / ARCHIVE_KEY


def store_for(text: str, directory: Path) -> str:
    """Return the store of a new cluster in the form that settings use, after checking that it is empty. A directory is
    made now, and never later, because a missing one was lost then. The archive gets a signing key, which stays outside
    of the store."""
    folder = directory_of(text)
    if folder is not None:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise translate(error, f"making the directory {folder}") from error
    place = folder or text
    try:
        there = label_at(open_store(place))
    except (StoreRefused, StoreUnavailable) as error:
        raise type(error)(
            error.message, not_done=NOTHING_STARTED,
            next_step="check the address of the store and your credentials; a bucket has to be there",
        ) from error  # fmt: skip
    if there is not None:
        raise ForeignArchive(
            f"{place} holds the archive of the cluster {there.cluster}",
            not_done=NOTHING_STARTED,
            next_step="name another directory, or another folder of the bucket: each cluster has an archive of its own",
        )
    if not key_file(directory).exists():
        write_whole(key_file(directory), new_key(), 0o600)
    return place
