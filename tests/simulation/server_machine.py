"""The machine of a server, and its daemon."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

from tests.simulation.coordinator import Session
from tests.simulation.loop import Life
from tests.simulation.machines import Machine, World, server_address
from tests.simulation.network import Serve, Stream
from tests.simulation.policies import WatchedAuthorizer
from tests.simulation.ports import SimReplicaPort, SimServerPort
from tests.simulation.versions import takes_singles
from waltzd.archive.reader import ArchiveReader, SegmentCache
from waltzd.cluster.documents import ServerMeta, StorageMeta
from waltzd.errors import CannotConnect, WaltzError
from waltzd.protocol.batches import Limits
from waltzd.protocol.level import THIS
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.calls import ServerCalls
from waltzd.server.clients.pipeline import LOCKS_BYTES, PipelineSettings
from waltzd.server.session.archive_fetcher import ArchiveFetcher
from waltzd.server.session.settings import SessionSettings
from waltzd.testing.cluster import LocalServer

STOP_SECONDS = 2.0
CACHE_BYTES = 20_000
"""Of what a server has read from the archive: a few segments."""
BACKUP_SECONDS = 1.0
LOOKUPS_MAX = 8
"""Locks that are looked up at a time: fewer than callers ask for, sometimes."""
FOUND_LOCKS_MAX = 3
"""Answers that are kept: so few that a lock is looked up again."""
LOOKUP_SECONDS = 0.25
"""Time for a look-up: so short that some have no answer."""
PIECE_BYTES = 500
"""Of the log that is read at a time for locks: some batches."""


class ServerMachine(Machine):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.server: LocalServer | None = None
        self.session: Session | None = None
        self._instance: UUID | None = None
        self._lateness = random.Random(f"{world.plan.seed} {name} lookups")

    async def _live(self, life: Life) -> None:
        try:
            await self._start(life)
        except WaltzError as error:
            self.exits(life, f"does not start: {error.code} {error.message}")
        except Exception as mistake:  # noqa: BLE001  any mistake ends the whole run
            self.world.mistake(mistake)
            return

    async def _start(self, life: Life) -> None:
        world, setup = self.world, self.world.setup
        program = None if world.versions is None else world.versions.begins(life)
        session = self.session = world.zookeeper.connect(life)
        self._instance = UUID(int=world.pick.getrandbits(128), version=4)
        server = LocalServer(
            self.name,
            world.meta,
            session.coordinator,
            address=server_address(self.name),
            instance=self._instance,
            connect=lambda storage: self._port(life, storage),
            settings=SessionSettings(
                partitions=setup.partitions,
                key=world.meta.key,
                tail_bytes_max=setup.tail_bytes,
                session_bytes_max=setup.session_bytes,
                storage_seconds=setup.storage_seconds,
                retry_seconds=0.05,
                hand_over_seconds=0.5,
                lease_seconds=setup.lease_seconds,
                trim_seconds=0.5,
                clock=world.loop.time,
                archive=self._archive(),
                level=lambda: THIS.level if server.versions is None else server.versions.level,
                backup_seconds=BACKUP_SECONDS if "backup" in setup.faults else 0.0,
                wall=self.microseconds,
            ),
            pipeline=PipelineSettings(
                limits=Limits(payload_bytes_max=1 << 20, locks_max=1000, frame_bytes_max=4 << 20),
                lock_table_size=setup.lock_table_size,
                lookups_max=LOOKUPS_MAX if "lookups" in setup.faults else 0,
                found_locks_max=FOUND_LOCKS_MAX,
                lookup_seconds=LOOKUP_SECONDS,
                lock_history_bytes=PIECE_BYTES if "pieces" in setup.faults else LOCKS_BYTES,
                inflight_bytes_max=setup.inflight_bytes,
                feed_frame_bytes=setup.feed_bytes,
                cold_chunk_bytes=setup.feed_bytes,
                segment_bytes_max=max(1024, setup.segment_bytes),
                clock=self.microseconds,
            ),
            on_fatal=lambda error: self._on_fatal(life, error),
            is_alive=self._is_alive,
            open_probe=(lambda found: self._dial(life, found)) if "suspicion" in setup.faults else None,
            say=lambda sentence: world.say(self.name, sentence),
            reach=(lambda address, key: self._log_port(life, address, key)) if setup.members else None,
            authorizer=None if world.policies is None else WatchedAuthorizer(world.policies),
            program=program,
        )
        self.server = server
        if "suspicion" in setup.faults:
            world.network.joined(life)  # its port listens before it announces itself
        await server.start()
        if world.versions is not None:
            world.versions.joined(life)
        world.network.joined(life)

    def _on_fatal(self, life: Life, error: BaseException) -> None:
        causes = _leaves(error)
        if not all(isinstance(cause, WaltzError) for cause in causes):
            self.world.mistake(error)
        self.exits(life, f"ends by itself: {causes[0]}")

    def _archive(self) -> ArchiveFetcher | None:
        """With an empty cache, as after each start."""
        if self.world.store is None:
            return None
        reader = ArchiveReader(self.world.store, self.world.meta.key, SegmentCache(CACHE_BYTES))
        return ArchiveFetcher(reader, bring=self._brought, read=self._brought)

    async def _brought(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A store takes its time."""
        await asyncio.sleep(self.world.network.seconds(self.name))
        return function(*arguments)

    def _port(self, life: Life, storage: StorageMeta) -> SimReplicaPort:
        machine, server, versions = self.world.storages[storage.listen], self.server, self.world.versions
        assert self._instance is not None

        def check_version(version: str) -> None:
            if server is not None and server.versions is not None:
                server.versions.check_storage(storage.name, version)

        def acknowledged() -> None:
            if versions is not None:
                versions.acknowledged(life)

        return SimReplicaPort(
            self.world.network,
            life,
            storage.listen,
            machine.serving,
            key=self.world.meta.key,
            owner_key=self._instance.bytes,
            seconds=self.world.setup.storage_seconds,
            lingers="linger" in self.world.setup.faults,
            late=self._late,
            check_version=check_version,
            acknowledged=acknowledged,
            clock=machine.microseconds if "jumps" in self.world.setup.faults else lambda: 0,
        )

    def _late(self) -> float:
        if "lookups" not in self.world.setup.faults:
            return 0.0
        return self._lateness.choice((0.0, 0.0, 0.0, 0.1, 0.2, 0.3))

    def _log_port(self, life: Life, address: str, key: UUID | None) -> SimServerPort:
        """As a client of the group log."""
        name = address.partition(":")[0]
        return SimServerPort(
            self.world.network,
            life,
            name,
            self.world.servers[name].serving,
            key=key,
            seconds=self.world.setup.storage_seconds,
            identity=Identity(self.world.meta.key, Role.SERVER, self.name).uri,
            takes_singles=partial(takes_singles, self.world),
        )

    async def _is_alive(self, found: ServerMeta) -> bool:
        """Whether the process that announced this still answers."""
        await asyncio.sleep(self.world.network.seconds(found.name))
        machine = self.world.servers[found.name]
        return machine.is_up and found.instance == machine._instance

    async def _dial(self, life: Life, found: ServerMeta) -> _Line:
        machine = self.world.servers[found.name]

        async def listen(stream: Stream) -> None:
            await stream.called.send("here")
            while not stream.called.is_over:
                await stream.called.receive()

        def find(there: Life) -> Serve | None:
            return listen if machine.life is there else None

        try:
            connection = self.world.network.connection(life, found.name)
        except CannotConnect as error:
            raise ConnectionRefusedError from error
        stream = connection.open(find)
        try:
            await stream.caller.receive()
        except BaseException:
            stream.cancel()
            raise
        return _Line(stream)

    def serving(self, life: Life) -> ServerCalls | None:
        return self.server.calls if self.life is life and self.server is not None else None

    def daemon(self, life: Life) -> LocalServer | None:
        return self.server if self.life is life else None

    def check(self) -> None:
        """What is true of the whole state of every partition here, whatever has happened."""
        if self.server is not None:
            for owned in self.server.owned_logs:
                owned.check()
                if self.world.versions is not None and owned._session is not None:
                    assert self.server.versions is not None
                    self.world.versions.replicates(self.name, self.server.versions.level, owned._session.log)
                if owned._pipeline is not None:
                    owned._pipeline.check()
            if self.server.groups is not None:
                for place in self.server.groups.active:
                    place.check()

    def stop(self) -> None:
        """In order: the partitions are given away first."""
        self.is_wanted = False
        if self.life is not None and self.server is not None and self.session is not None:
            self.world.say(self.name, "is told to stop")
            self.world.loop.run_in(self.life, self._stop(self.life, self.server, self.session), f"end of {self.name}")

    async def _stop(self, life: Life, server: LocalServer, session: Session) -> None:
        try:
            await server.drain(3.0)
        except WaltzError as error:
            self.world.say(self.name, f"cannot give its partitions away: {error.code} {error.message}")
        await server.stop()
        end = self.world.loop.now + STOP_SECONDS
        while server.callers and self.world.loop.now < end:  # as gRPC does: calls that are under way hear their last word
            await asyncio.sleep(0.005)
        await session.coordinator.close()
        session.is_gone = True
        if self.life is life:
            self.end("has stopped")
            self.again()  # it may be wanted by now

    def end(self, why: str) -> None:
        self.server = None
        super().end(why)


class _Line:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def ended(self) -> None:
        with contextlib.suppress(WaltzError):
            await self._stream.caller.receive()

    def close(self) -> None:
        self._stream.cancel()


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for part in error.exceptions for leaf in _leaves(part)]
