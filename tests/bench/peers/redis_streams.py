"""Redis Streams: one stream, a hash with the version of each slot, and a script that checks the one and adds to the other.

One primary whose file is flushed before each answer, and two replicas. After its transactions a client waits for one
replica (`WAIT 1`), which keeps a connection busy: so each client has its own, as with a database.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.peers.process import HOST, Process
from tests.bench.peers.system import LANES, Facts, NotCommittedError, System, find_program, missing_of, until_it_works

if TYPE_CHECKING:
    from redis.asyncio import Redis

REPLICAS = 2
WAIT_MILLISECONDS = 30_000
STREAM, VERSIONS = "events", "versions"
SCRIPT = """
if (redis.call('HGET', KEYS[2], ARGV[1]) or '0') ~= ARGV[2] then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[1], 1)
redis.call('XADD', KEYS[1], '*', 'slot', ARGV[1], 'payload', ARGV[3])
return 1
"""


class RedisStreams(System):
    name = "redis"
    package = "apt-get install redis-server, and the Python packages redis and hiredis"

    @classmethod
    def missing(cls) -> str | None:
        return missing_of(["redis-server"], ["redis", "hiredis"])

    def start(self) -> None:
        self._ports = [next(self.ports) for _ in range(1 + REPLICAS)]
        for number, port in enumerate(self._ports):
            folder = self.home / f"data-{number}"
            folder.mkdir()
            settings = {
                "port": port,
                "bind": HOST,
                "dir": folder,
                "appendonly": "yes",
                "appendfsync": "always",
                "save": '""',
                "repl-diskless-sync-delay": 0,
            }
            if number:
                settings["replicaof"] = f"{HOST} {self._ports[0]}"
            lines = [f"{name} {value}\n" for name, value in settings.items()]
            file = self.home / f"redis-{number}.conf"
            file.write_text("".join(lines), encoding="utf-8")
            self.run(Process(f"redis-{number}", [self._program, file], self.home, port=port)).wait_listening()

    @property
    def _program(self) -> Path:
        program = find_program("redis-server")
        assert program is not None
        return program

    @property
    def address(self) -> tuple[str, ...]:
        return tuple(str(port) for port in self._ports)

    @property
    def facts(self) -> Facts:
        said = subprocess.run([self._program, "--version"], capture_output=True, text=True, check=True).stdout
        version = next(word.removeprefix("v=") for word in said.split() if word.startswith("v="))
        return Facts(
            version=version,
            durability="flushed to the disk of the primary and in the memory of one of two replicas (WAIT 1)",
            caveat="WAIT does not say that a replica has flushed, and a fail-over may lose what was acknowledged",
        )


class RedisSession:
    def __init__(self, address: tuple[str, ...]) -> None:
        self._ports = [int(port) for port in address]
        self._versions: dict[int, int] = {}
        self._connections: list[Redis] = []
        self._servers: list[Redis] = []

    async def open(self) -> None:
        from redis.asyncio import Redis
        from redis.exceptions import RedisError

        self._servers = [Redis(host=HOST, port=port) for port in self._ports]
        primary = self._ports[0]
        self._connections = [Redis(host=HOST, port=primary, single_connection_client=True) for _ in range(LANES)]
        await until_it_works("two replicas", self._replicas, RedisError, LookupError)
        self._script = await self._connections[0].script_load(SCRIPT)

    async def _replicas(self) -> None:
        info = await self._connections[0].info("replication")
        states = [info[f"slave{number}"]["state"] for number in range(info["connected_slaves"])]
        if states != ["online"] * REPLICAS:
            raise LookupError(f"replicas: {states}")

    async def append(self, slot: int, payload: bytes) -> None:
        await self._send(self._connections[slot % LANES], range(slot, slot + 1), payload)

    async def append_all(self, lane: int, slots: range, payload: bytes) -> None:
        await self._send(self._connections[lane % LANES], slots, payload)

    async def _send(self, connection: Redis, slots: range, payload: bytes) -> None:
        pipeline: Any = connection.pipeline(transaction=False)
        for slot in slots:
            pipeline.evalsha(self._script, 2, STREAM, VERSIONS, slot, self._versions.get(slot, 0), payload)
        pipeline.execute_command("WAIT", 1, WAIT_MILLISECONDS)
        *done, replicas = await pipeline.execute()
        if replicas < 1 or sum(done) != len(slots):
            raise NotCommittedError(f"{sum(done)} of {len(slots)} were added, on {replicas} replicas")
        self._versions.update((slot, self._versions.get(slot, 0) + 1) for slot in slots)

    async def kept(self) -> int:
        """What the primary holds and at least one replica."""
        primary, *replicas = [int(await server.xlen(STREAM)) for server in self._servers]
        return min(primary, max(replicas))

    async def close(self) -> None:
        for connection in (*self._connections, *self._servers):
            await connection.aclose()
