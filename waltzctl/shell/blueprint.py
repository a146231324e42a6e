"""What a cluster on this machine is made of, written down in its directory: key, sizes, and the port of every daemon.

Chosen once, so that the cluster is the same one whenever it is brought up again. Beside it, `state.json` says which
processes were started; it may be out of date, so readers look whether they still run.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar
from uuid import UUID, uuid4

from waltzd.cluster.documents import FORMAT
from waltzd.disk.real import translate
from waltzd.errors import NoLocalCluster, NotesDamaged, PortInUse
from waltzd.format.layout import PARTITIONS_MAX
from waltzd.protocol.document import Document, Name, decode, encode, whole

D = TypeVar("D", bound=Document)
HOST = "127.0.0.1"
BLUEPRINT, STATE = "cluster.json", "state.json"
ARCHIVE_KEY = "archive.key"
"""With it the archive is signed; it never goes into the store."""
PORTS = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections, so that none is taken while its daemon is down."""
STORAGES_MAX, SERVERS_MAX = 16, 16
PORT_BLOCK = 2 * SERVERS_MAX + 2 * STORAGES_MAX + 1
"""So many ports, from a given one on, are for a cluster whose ports are chosen by its user."""
ZOOKEEPER = "zookeeper"


@dataclass(frozen=True, kw_only=True)
class Blueprint(Document):
    key: UUID
    partitions: Annotated[int, whole(1, PARTITIONS_MAX)]
    replication: int
    storages: Annotated[int, whole(0, STORAGES_MAX)]
    servers: Annotated[int, whole(0, SERVERS_MAX)]
    ports: Mapping[Name, tuple[Annotated[int, whole(1, 65535)], ...]]
    """For each daemon, the one for its callers, then the one for operators."""
    format: Annotated[int, whole(0, 1)] = 0
    """Of the segments that it was made to write; `waltzctl cluster set` may have raised it since."""
    has_tls: bool = False
    """It was made with certificates for all, and documents that belong to its credentials."""
    has_moved: bool = False
    """Its storages have other ports than its documents say; the next start writes them down."""
    archive: str | None = None
    """The store to which its log is archived, as its daemons name it."""
    is_founded: bool = False
    """Its documents and replicas were made. From then on only the operator says which storages belong to it."""

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
        """In the order in which they are started."""
        return [ZOOKEEPER, *self.storage_names, *self.server_names]

    def addresses(self, name: str) -> tuple[str, ...]:
        return tuple(f"{HOST}:{port}" for port in self.ports[name])


@dataclass(frozen=True)
class Life:
    """A process that was started."""

    pid: int
    birth: str
    log_from: int
    """The offset in the log at which this process began."""
    was_ready: bool = False


@dataclass(frozen=True)
class Lives(Document):
    daemons: Mapping[Name, Life]


def draw(
    directory: Path,
    *,
    partitions: int,
    replication: int,
    storages: int,
    servers: int,
    format: int = FORMAT,
    has_tls: bool = False,
    archive: str | None = None,
    base: int | None = None,
) -> Blueprint:
    """A new blueprint, with ports that are free at this moment, or those from `base` on."""
    blueprint = Blueprint(
        key=uuid4(),
        partitions=partitions,
        replication=replication,
        storages=0,
        servers=0,
        ports={},
        format=format,
        has_tls=has_tls,
        archive=archive,
    )
    return grown(blueprint, directory, storages=storages, servers=servers, base=base)


def grown(blueprint: Blueprint, directory: Path, *, storages: int, servers: int, base: int | None = None) -> Blueprint:
    """The same cluster with more daemons, and ports for those that have none yet."""
    larger = replace(blueprint, storages=storages, servers=servers)
    if base is not None:
        return replace(larger, ports={**ports_from(base, larger.names), **blueprint.ports})
    taken = {port for ports in blueprint.ports.values() for port in ports}
    free = free_ports(zlib.crc32(os.fsencode(directory.resolve())), taken)
    more = {
        name: (next(free),) if name == ZOOKEEPER else (next(free), next(free))
        for name in larger.names
        if name not in blueprint.ports
    }
    return replace(larger, ports={**blueprint.ports, **more})


def ports_from(base: int, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The ports of these daemons in the block that begins at `base`: the first server has the first one, and a daemon
    that is added later takes no port of another."""
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
    """The beginning of a block in which the ports of these daemons are free."""
    for base in range(PORTS.start, PORTS.stop - PORT_BLOCK, 100):
        if all(is_free(port) for ports in ports_from(base, names).values() for port in ports):
            return base
    return PORTS.start


def free_ports(seed: int, taken: Container[int] = ()) -> Iterator[int]:
    """Free ports, beginning at one that depends on the seed, so that two clusters made at the same time choose different
    ones. `taken`: ports of daemons that may be down at this moment."""
    for step in range(len(PORTS)):
        port = PORTS[(seed + step) % len(PORTS)]
        if port not in taken and is_free(port):
            yield port
    raise PortInUse(f"no port from {PORTS[0]} to {PORTS[-1]} is free at {HOST}")


def is_free(port: int) -> bool:
    """No process listens there. Connections that are just ending do not count: daemons can listen all the same."""
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
"""Names in certificates."""


def certificate_files(directory: Path, owner: str) -> tuple[str, str, str]:
    """The certificate, its key, and the authority. `owner` like "server-server-1": a role and a name."""
    folder = (directory / CERTIFICATES).absolute()
    return str(folder / f"{owner}.pem"), str(folder / f"{owner}.key"), str(folder / "ca.pem")


def operator_files(directory: Path) -> tuple[str, str, str]:
    return certificate_files(directory, f"operator-{OPERATOR}")


def coordinator_files(directory: Path, owner: str) -> tuple[str, str, str]:
    """What a process shows to ZooKeeper, and the authority that signs for ZooKeeper."""
    if has_one_authority(directory):
        return certificate_files(directory, owner)
    certificate, key, _ = certificate_files(directory, f"zookeeper-client-{owner.partition('-')[2]}")
    return certificate, key, str((directory / CERTIFICATES / "zookeeper-ca.pem").absolute())


def has_one_authority(directory: Path) -> bool:
    """Whether the cluster was made before ZooKeeper had an authority of its own."""
    folder = directory / CERTIFICATES
    return (folder / f"{ZOOKEEPER}-{HOST}.pem").exists() and not (folder / "zookeeper-ca.pem").exists()


def credentials_file(directory: Path) -> Path:
    return (directory / CERTIFICATES / CREDENTIALS).absolute()


# -- files -------------------------------------------------------------------------------------------------------------


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """The file has these bytes, or is as it was. `mode`: of a new one."""
    beside = path.with_name(path.name + ".new")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise translate(error, f"writing {path}") from error


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
