"""Blueprint of a cluster on this machine, in its directory (`cluster.json`): key, sizes, and the ports of every daemon.

It is chosen once, so that the cluster is the same after each restart. `state.json` beside it lists the started processes;
it may be out of date, so readers check whether each still runs."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar
from uuid import UUID

from waltzd.disk.real import RealDisk, translate
from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import AlreadyThere, NoLocalCluster, NotesDamaged, PortInUse
from waltzd.format.layout import PARTITIONS_MAX
from waltzd.protocol.document import Document, Name, decode, encode, whole

D = TypeVar("D", bound=Document)
HOST = "127.0.0.1"
BLUEPRINT, STATE = "cluster.json", "state.json"
ARCHIVE_KEY = "archive.key"
"""File with the key that signs the archive; it is never copied to the store."""
PORTS = range(20_000, 32_000)
"""Candidate ports, below the range for outgoing connections, so that no port is taken while its daemon is down."""
PORTS_VARIABLE = "WALTZ_LOCAL_PORTS"
"""Environment variable that names other candidate ports, as `FIRST-LAST`."""
STORAGES_MAX, SERVERS_MAX = 16, 16
PORT_BLOCK = 2 * SERVERS_MAX + 2 * STORAGES_MAX + 1
"""Number of ports reserved from `--port` on, for a cluster whose user chose the first port."""
ZOOKEEPER = "zookeeper"


@dataclass(frozen=True, kw_only=True)
class Blueprint(Document):
    key: UUID
    partitions: Annotated[int, whole(1, PARTITIONS_MAX)]
    replication: int
    storages: Annotated[int, whole(0, STORAGES_MAX)]
    servers: Annotated[int, whole(0, SERVERS_MAX)]
    ports: Mapping[Name, tuple[Annotated[int, whole(1, 65535)], ...]]
    """Daemon → its port for clients or servers, then its port for operators. ZooKeeper has one port."""
    format: Annotated[int, whole(0, 1)] = 0
    """Segment format at creation; `waltzctl cluster set` may have raised it since."""
    has_tls: bool = False
    """True if the daemons have certificates and the documents in ZooKeeper are closed."""
    has_moved: bool = False
    """True if the ports of storages changed; the next start updates the documents."""
    archive: str | None = None
    """Archive store of its log, as in the configuration of its daemons; None without an archive."""
    is_founded: bool = False
    """True once its documents and replicas exist. From then on only an operator adds or removes storages."""

    def mistake(self) -> tuple[str, str] | None:
        for name in self.names:
            wanted = 1 if name == ZOOKEEPER else 2
            if len(self.ports.get(name, ())) != wanted:
                return f"ports.{name}", f"must be {wanted} of them"
        return None

    @property
    def storage_names(self) -> list[str]:
        return [f"storage-{number}" for number in range(1, self.storages + 1)]

    @property
    def server_names(self) -> list[str]:
        return [f"server-{number}" for number in range(1, self.servers + 1)]

    @property
    def names(self) -> list[str]:
        """Names of all daemons, in the order in which they start."""
        return [ZOOKEEPER, *self.storage_names, *self.server_names]

    def addresses(self, name: str) -> tuple[str, ...]:
        return tuple(f"{HOST}:{port}" for port in self.ports[name])


@dataclass(frozen=True)
class Life:
    """Process that was started."""

    pid: int
    birth: str
    log_from: int
    """Offset in the log file at which the output of this process begins."""
    was_ready: bool = False


@dataclass(frozen=True)
class Lives(Document):
    daemons: Mapping[Name, Life]


def ports_for(names: Sequence[str], directory: Path, base: int | None) -> dict[str, tuple[int, ...]]:
    """Return the ports of the daemons of a new cluster: those from `base` on, or any free ones."""
    if base is not None:
        return ports_from(base, names)
    free = free_ports(zlib.crc32(os.fsencode(directory.resolve())))
    return {name: (next(free),) if name == ZOOKEEPER else (next(free), next(free)) for name in names}


def ports_from(base: int, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the ports of daemons in the block that begins at `base`. `server-1` has the first."""
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        kind, _, number = name.partition("-")
        if kind == ZOOKEEPER:
            found[name] = (base + PORT_BLOCK - 1,)
        else:
            first = base + 2 * (int(number) - 1) + (0 if kind == "server" else 2 * SERVERS_MAX)
            found[name] = (first, first + 1)
    return found


def free_base(names: Sequence[str]) -> int:
    """Return the first port of a block in which the ports of these daemons are free."""
    candidates = candidate_ports()
    for base in range(candidates.start, candidates.stop - PORT_BLOCK, 100):
        if all(is_free(port) for ports in ports_from(base, names).values() for port in ports):
            return base
    return candidates.start


def free_ports(seed: int) -> Iterator[int]:
    """Yield free ports, from one that depends on the seed, so that two clusters created at the same time get different
    ports."""
    candidates = candidate_ports()
    for step in range(len(candidates)):
        port = candidates[(seed + step) % len(candidates)]
        if is_free(port):
            yield port
    raise PortInUse(f"no port from {candidates[0]} to {candidates[-1]} is free at {HOST}")


def candidate_ports() -> range:
    """Return the ports from which local clusters take theirs."""
    given = os.environ.get(PORTS_VARIABLE)
    if given is None:
        return PORTS
    first, _, last = given.partition("-")
    try:
        ports = range(int(first), int(last) + 1)
    except ValueError:
        ports = range(0)
    if not ports or ports.start < 1024 or ports.stop > 65536:
        raise BadArgument(
            f"{PORTS_VARIABLE}={given} is not FIRST-LAST with ports from 1024 to 65535", next_step=f"unset {PORTS_VARIABLE}"
        )
    return ports


def is_free(port: int) -> bool:
    """Return whether no process listens on the port. Closing connections do not count: a daemon can still listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


# -- certificates ------------------------------------------------------------------------------------------------------

CERTIFICATES, CREDENTIALS = "certificates", "coordinator.credentials"
OPERATOR, APPLICATION = "local", "application"
"""Names in the certificates of the operator and of applications."""


def certificate_files(directory: Path, owner: str) -> tuple[str, str, str]:
    """Return the paths of the certificate, its key and the authority. `owner` is a role and a name: "server-server-1"."""
    folder = (directory / CERTIFICATES).absolute()
    return str(folder / f"{owner}.pem"), str(folder / f"{owner}.key"), str(folder / "ca.pem")


def operator_files(directory: Path) -> tuple[str, str, str]:
    return certificate_files(directory, f"operator-{OPERATOR}")


def coordinator_files(directory: Path, owner: str) -> tuple[str, str, str]:
    """Return the paths of the certificate for ZooKeeper, its key, and the authority that signs ZooKeeper's certificate."""
    certificate, key, _ = certificate_files(directory, f"zookeeper-client-{owner.partition('-')[2]}")
    return certificate, key, str((directory / CERTIFICATES / "zookeeper-ca.pem").absolute())


def credentials_file(directory: Path) -> Path:
    return (directory / CERTIFICATES / CREDENTIALS).absolute()


# -- files -------------------------------------------------------------------------------------------------------------


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace the content of a file atomically and durably; what is no plain file, such as a pipe or /dev/null, is written
    to. `mode` is the mode of a new file."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        beside = path.with_name(path.name + ".new")
        with _opened_alone(beside, mode) as number:
            _write_flushed(beside, number, data)
            beside.replace(path)
    except OSError as error:
        raise unwritten(error, path, "nothing was written") from error
    RealDisk().flush_directory(str(path.parent))


def write_new(path: Path, data: bytes, *, not_done: str = "nothing was written") -> None:
    """Write a new file durably, which only its owner may read. Raise `AlreadyThere` if the file exists."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write_flushed(path, number, data)
        finally:
            os.close(number)
    except FileExistsError as error:
        raise AlreadyThere(f"{path} exists already", not_done=not_done) from error
    except OSError as error:
        raise unwritten(error, path, not_done) from error
    RealDisk().flush_directory(str(path.parent))


@contextmanager
def _opened_alone(path: Path, mode: int) -> Iterator[int]:
    """Open a file that is made or emptied, and yield its descriptor. Another process that opens it waits until then, so
    that neither renames what the other has only begun to write. A file that is there gets no wider mode than `mode`."""
    while True:
        number = os.open(path, os.O_WRONLY | os.O_CREAT, mode)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(number, fcntl.LOCK_EX)
            if not _is_named(number, path):  # the process before has renamed or removed it
                continue
            before = stat.S_IMODE(os.fstat(number).st_mode)
            if before & ~mode:
                os.fchmod(number, before & mode)
            os.ftruncate(number, 0)
            yield number
            return
        finally:
            os.close(number)


def _is_named(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


def _write_flushed(path: Path, number: int, data: bytes) -> None:
    """Write and flush a file that was made or emptied; remove it if that fails."""
    try:
        with os.fdopen(number, "wb", closefd=False) as file:
            file.write(data)
            file.flush()
            os.fsync(number)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def unwritten(error: OSError, path: Path, not_done: str) -> WaltzError:
    """Return the error of an operator's file or directory that cannot be written."""
    found = translate(error, f"writing {path}")
    next_step = "free space there, check that you may write there, or name a file in another directory"
    return type(found)(found.message, not_done=not_done, next_step=next_step, **found.facts)


def _read(path: Path, kind: type[D]) -> D | None:
    try:
        return decode(kind, path.read_bytes(), str(path), NotesDamaged)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise translate(error, f"reading {path}") from error


def save_blueprint(directory: Path, blueprint: Blueprint) -> None:
    write_whole(directory / BLUEPRINT, encode(blueprint))


def load_blueprint(directory: Path) -> Blueprint:
    found = _read(directory / BLUEPRINT, Blueprint)
    if found is None:
        raise NoLocalCluster(f"{directory} holds no cluster: there is no {BLUEPRINT}")
    return found


def save_lives(directory: Path, lives: Mapping[str, Life]) -> None:
    write_whole(directory / STATE, encode(Lives(lives)))


def load_lives(directory: Path) -> Mapping[str, Life]:
    found = _read(directory / STATE, Lives)
    return found.daemons if found is not None else {}
