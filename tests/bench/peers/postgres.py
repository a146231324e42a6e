"""PostgreSQL as a store of events: one row an event, (stream, version) unique, each insert a transaction of its own.

One primary and one synchronous standby, both flushed before a commit returns. A connection commits one transaction after
the other, so many in flight means many connections, each with a pipeline of statements ahead of it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pwd
import subprocess
from contextlib import suppress
from signal import SIGQUIT
from typing import TYPE_CHECKING, Any, ClassVar

from tests.bench.peers.process import HOST, START_SECONDS, Process, environment
from tests.bench.peers.system import LANES, LANES_MANY, Facts, System, until_it_works
from tests.process.postgres import programs

if TYPE_CHECKING:
    import psycopg

USER = "waltz"
CREATE = "CREATE TABLE events (stream int, version int, payload bytea NOT NULL, PRIMARY KEY (stream, version))"
INSERT = "INSERT INTO events (stream, version, payload) VALUES (%s, %s, %s)"
SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": LANES + 16,
    "fsync": "on",
    "synchronous_commit": "on",
    "wal_level": "replica",
    "max_wal_size": "8GB",
    "shared_buffers": "256MB",
}


class Postgres(System):
    name = "postgres"
    package = "apt-get install postgresql"
    wants_standby: ClassVar[bool] = True

    @classmethod
    def missing(cls) -> str | None:
        absent = [] if programs() else ["PostgreSQL's programs"]
        absent += [] if importlib.util.find_spec("psycopg") else ["the Python package psycopg"]
        return " and ".join(absent) or None

    def start(self) -> None:
        bin = programs()
        assert bin is not None
        self._bin = bin
        self._account = unprivileged() if os.geteuid() == 0 else None
        if self._account is not None:
            os.chown(self.home, self._account.pw_uid, self._account.pw_gid)
        self._ports = [next(self.ports), next(self.ports)]
        self._do("initdb", "-D", "primary", "-U", USER, "--auth=trust", "--no-sync", "-E", "UTF8")
        self._serve("primary", self._ports[0])
        self._has_standby = self.wants_standby and (bin / "pg_basebackup").exists()
        if self._has_standby:
            source = ["-d", f"host={HOST} port={self._ports[0]} user={USER} application_name=standby"]
            self._do("pg_basebackup", *source, "-D", "standby", "-R", "-X", "stream", "-c", "fast", "--no-sync")
            self._serve("standby", self._ports[1])
        asyncio.run(self._prepare())

    def _serve(self, name: str, port: int) -> None:
        settings = {**SETTINGS, "port": port}
        options = [word for setting, value in settings.items() for word in ("-c", f"{setting}={value}")]
        command = [self._bin / "postgres", "-D", self.home / name, *options]
        server = self.run(Process(name, command, self.home, port=port, account=self._account, ending=SIGQUIT))
        server.wait_listening()
        asyncio.run(_answers(_words(port)))

    async def _prepare(self) -> None:
        """The table; and from then on no commit returns before the standby has flushed it."""
        import psycopg

        async with await psycopg.AsyncConnection.connect(_words(self.port), autocommit=True) as connection:
            await connection.execute(CREATE)
            if self._has_standby:
                await connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
                await connection.execute("SELECT pg_reload_conf()")
                await until_it_works("a synchronous standby", lambda: _is_synchronous(connection), LookupError)

    def _do(self, program: str, *arguments: str) -> None:
        account = self._account
        done = subprocess.run(
            [self._bin / program, *arguments],
            capture_output=True,
            text=True,
            cwd=self.home,
            env=environment(self.home),
            timeout=START_SECONDS,
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=[] if account else None,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr}")

    @property
    def port(self) -> int:
        """Port of the primary."""
        return self._ports[0]

    @property
    def address(self) -> tuple[str, ...]:
        return tuple(_words(port) for port in self._ports[: 1 + self._has_standby])

    @property
    def facts(self) -> Facts:
        said = subprocess.run([self._bin / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
        if self._has_standby:
            durability = "flushed to the disks of the primary and of one synchronous standby before it is acknowledged"
        else:
            why = ", pg_basebackup is missing" if self.wants_standby else ""
            durability = f"flushed to one disk before it is acknowledged: one copy only{why}"
        return Facts(
            version=said.split()[2],
            durability=durability,
            caveat="two copies and no fail-over by itself: when the standby is away, commits wait",
        )


def _words(port: int) -> str:
    return f"host={HOST} port={port} user={USER} dbname=postgres"


async def _answers(address: str) -> None:
    import psycopg

    async def once() -> None:
        await (await psycopg.AsyncConnection.connect(address)).close()

    await until_it_works("PostgreSQL answers", once, psycopg.OperationalError)


async def _is_synchronous(connection: psycopg.AsyncConnection[Any]) -> None:
    found = await (await connection.execute("SELECT sync_state FROM pg_stat_replication")).fetchall()
    if found != [("sync",)]:
        raise LookupError(f"the standby is not synchronous: {found}")


def unprivileged() -> pwd.struct_passwd:
    with suppress(KeyError):
        return pwd.getpwnam("postgres")
    return pwd.getpwnam("nobody")


class PostgresSession:
    def __init__(self, address: tuple[str, ...]) -> None:
        self._address, *self._standbys = address
        self._versions: dict[int, int] = {}
        self._connections: list[psycopg.AsyncConnection[Any]] = []

    async def open(self) -> None:
        import psycopg

        for _ in range(LANES):
            self._connections.append(await psycopg.AsyncConnection.connect(self._address, autocommit=True))

    async def append(self, slot: int, payload: bytes) -> None:
        version = self._versions.get(slot, 0) + 1
        await self._connections[slot % LANES].execute(INSERT, (slot, version, payload), prepare=True)
        self._versions[slot] = version

    async def append_all(self, lane: int, slots: range, payload: bytes) -> None:
        """A lane has its share of the connections, and each of these its share of the slots."""
        mine = [number for number in range(LANES) if number % LANES_MANY == lane]
        await asyncio.gather(
            *[self._pipeline(self._connections[number], slots[at :: len(mine)], payload) for at, number in enumerate(mine)]
        )

    async def _pipeline(self, connection: psycopg.AsyncConnection[Any], slots: range, payload: bytes) -> None:
        """Without explicit boundaries everything between two syncs would be one transaction."""
        async with connection.pipeline():
            await connection.execute("BEGIN")
            for slot in slots:
                version = self._versions[slot] = self._versions.get(slot, 0) + 1
                await connection.execute(INSERT, (slot, version, payload), prepare=True)
                await connection.execute("COMMIT AND CHAIN", prepare=True)
            await connection.execute("COMMIT")

    async def kept(self) -> int:
        """By the primary and by the standby: the fewer."""
        return min([await _count(address) for address in (self._address, *self._standbys)])

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()


async def _count(address: str) -> int:
    import psycopg

    async with await psycopg.AsyncConnection.connect(address) as connection:
        found = await (await connection.execute("SELECT count(*) FROM events")).fetchone()
    assert found is not None
    return int(found[0])
