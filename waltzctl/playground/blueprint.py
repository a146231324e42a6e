"""What a cluster on this machine is made of, written down in its directory: key, sizes, and the port of every daemon.

Chosen once, so that the cluster is the same one whenever it is brought up again. Beside it, `state.json` says which
processes were started; it may be out of date, and whoever reads it looks whether they still run.
"""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from waltzctl.playground.daemon import Life
from waltzd.disk.real import translate
from waltzd.errors import LocalClusterDamaged, NoLocalCluster, PortInUse

SCHEMA = 1
HOST = "127.0.0.1"
BLUEPRINT, STATE = "cluster.json", "state.json"
PORTS = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections, so that nobody takes one while its daemon is down."""
STORAGES_MAX, SERVERS_MAX = 16, 16
ZOOKEEPER = "zookeeper"


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    key: UUID
    partitions: int
    replication: int
    storages: int
    servers: int
    ports: Mapping[str, tuple[int, ...]]
    """For each daemon, the one for its callers, then the one for operators."""
    is_founded: bool = False
    """Its documents and replicas were made. From then on only the operator says which storages belong to it."""

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


def draw(directory: Path, *, partitions: int, replication: int, storages: int, servers: int) -> Blueprint:
    """A new one, with ports that are free at this moment."""
    blueprint = Blueprint(key=uuid4(), partitions=partitions, replication=replication, storages=0, servers=0, ports={})
    return grown(blueprint, directory, storages=storages, servers=servers)


def grown(blueprint: Blueprint, directory: Path, *, storages: int, servers: int) -> Blueprint:
    """With more daemons, and ports for those that have none yet."""
    larger = replace(blueprint, storages=storages, servers=servers)
    taken = {port for ports in blueprint.ports.values() for port in ports}
    free = free_ports(zlib.crc32(os.fsencode(directory.resolve())), taken)
    more = {
        name: (next(free),) if name == ZOOKEEPER else (next(free), next(free))
        for name in larger.names
        if name not in blueprint.ports
    }
    return replace(larger, ports={**blueprint.ports, **more})


def free_ports(seed: int, taken: Container[int] = ()) -> Iterator[int]:
    """From a place that depends on the seed, so that two clusters made at the same time do not choose the same ones.
    `taken`: those of daemons that may be down at this moment."""
    for step in range(len(PORTS)):
        port = PORTS[(seed + step) % len(PORTS)]
        if port not in taken and is_free(port):
            yield port
    raise PortInUse(f"no port from {PORTS[0]} to {PORTS[-1]} is free at {HOST}")


def is_free(port: int) -> bool:
    """Nobody listens there. Connections that are just ending do not count: daemons can listen all the same."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


# -- files -------------------------------------------------------------------------------------------------------------


def write(path: Path, fields: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"schema": SCHEMA, **fields}, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise translate(error, f"writing {path}") from error


def read(path: Path) -> dict[str, Any] | None:
    """The fields of the file; None when there is none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise translate(error, f"reading {path}") from error
    except (ValueError, RecursionError) as error:
        raise LocalClusterDamaged(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise LocalClusterDamaged(f"{path} is not of schema {SCHEMA}, which is all that this version of Waltz knows")
    return fields


def save_blueprint(directory: Path, blueprint: Blueprint) -> None:
    write(directory / BLUEPRINT, {**asdict(blueprint), "key": str(blueprint.key)})


def load_blueprint(directory: Path) -> Blueprint:
    path = directory / BLUEPRINT
    fields = read(path)
    if fields is None:
        raise NoLocalCluster(f"{directory} holds no cluster: there is no {BLUEPRINT}")
    try:
        ports = {str(name): tuple(int(port) for port in given) for name, given in fields["ports"].items()}
        numbers = {name: int(fields[name]) for name in ("partitions", "replication", "storages", "servers")}
        founded = bool(fields.get("is_founded", False))
        blueprint = Blueprint(key=UUID(fields["key"]), ports=ports, is_founded=founded, **numbers)
        if not (0 <= blueprint.storages <= STORAGES_MAX and 0 <= blueprint.servers <= SERVERS_MAX):
            raise ValueError(f"{blueprint.storages} storages, {blueprint.servers} servers")
        for name in blueprint.names:
            if len(ports[name]) != (1 if name == ZOOKEEPER else 2):
                raise ValueError(f"ports of {name}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise LocalClusterDamaged(f"{path} cannot be understood: {error!r}") from error
    return blueprint


def save_lives(directory: Path, lives: Mapping[str, Life]) -> None:
    write(directory / STATE, {"daemons": {name: asdict(life) for name, life in lives.items()}})


def load_lives(directory: Path) -> dict[str, Life]:
    path = directory / STATE
    fields = read(path)
    if fields is None:
        return {}
    try:
        return {
            str(name): Life(int(life["pid"]), str(life["birth"]), int(life["log_from"]), bool(life["was_ready"]))
            for name, life in fields["daemons"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise LocalClusterDamaged(f"{path} cannot be understood: {error!r}") from error
