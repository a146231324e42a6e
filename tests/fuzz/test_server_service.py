"""Hostile callers by the thousand against a real server, while good clients race on one of its partitions undisturbed.

None of their transactions fails, and the checker finds their history right. Every answer to the others is one of our errors
or a plain refusal of gRPC; server and storage stay up, with little more memory and no more open files than before, and say
nothing but their own sentences.
"""

from __future__ import annotations

import random
from asyncio import Event, create_task, gather
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.hostile import (
    PARTITIONS,
    PLAYED,
    SPARED,
    WRONG_GENERATIONS,
    Health,
    Siege,
    letters,
    methods,
    strange_lines,
)
from tests.fuzz.mutate import INTEGERS, filled, mutated
from tests.process.cluster import Cluster
from tests.process.race import Race
from tests.unit.mounting import batch_of
from waltzctl.local_cluster.local import LocalCluster
from waltzd.client.loop import run
from waltzd.format.finding import Finding
from waltzd.protocol.batches import Credit
from waltzd.protocol.locks import Mode
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import client_message
from waltzd.wire.frames import HEAD, Kind
from waltzd.wire.servers import ServerClient
from waltzd.wire.storages import AdminClient

CALLS, ADMIN_CALLS, STREAMS = 125, 40, 100
GARBAGE, FLOODS = 60, 1
LOG, ADMIN = methods("Log"), methods("ServerAdmin")
LOCKS = 100_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One server and one storage: whatever happens to them, nobody steps in."""
    settings = {"server": {"session_seconds": 10}}
    local = LocalCluster.make(
        tmp_path / "cluster", partitions=PARTITIONS, servers=1, storages=1, replication=1, settings=settings
    )
    made = Cluster(local)
    made.start()
    yield made
    made.close()


class Caller:
    """Makes the calls. It knows the cluster and the generation of the partition that it may get into."""

    def __init__(self, cluster: Cluster, generation: int, clients: dict[int, bytes]) -> None:
        """`clients`: ids that were given to it, and their tokens."""
        self._key = cluster.key
        self._generation = generation
        self._clients = clients

    def any_call(self, chance: random.Random) -> tuple[str, Sequence[bytes]]:
        path = chance.choice(sorted(LOG))
        return path, letters(chance, LOG[path], self._key)

    def any_admin_call(self, chance: random.Random) -> tuple[str, Sequence[bytes]]:
        path = chance.choice(sorted(ADMIN))
        return path, letters(chance, ADMIN[path], self._key)

    def any_mount(self, chance: random.Random) -> tuple[str, Sequence[bytes]]:
        """Mostly let in; then transactions twice, out of order, with locks by the hundred thousand, marks that nobody
        reached, lengths that lie, credit below nothing, and a second request in between."""
        frames = [self._request(chance).SerializeToString()]
        sequence = 0
        for _ in range(chance.randrange(6)):
            frames.append(chance.choice(self._frames(chance, sequence)))
            sequence += chance.choice([0, 1, 2, 2, 1000])
        if chance.random() < 0.1:
            chance.shuffle(frames)
        return "/waltz.v1.Log/Mount", frames

    def any_stream(self, chance: random.Random) -> list[bytes]:
        """The same as frames on a plain connection, some of them of another kind, damaged, or with a length that lies."""
        _, messages = self.any_mount(chance)
        kinds = [Kind.MOUNT, *[Kind.CLIENT] * (len(messages) - 1)]
        pieces = []
        for kind, message in zip(kinds, messages, strict=True):
            sent = message if chance.random() < 0.9 else mutated(chance, message)
            length = len(sent) if chance.random() < 0.95 else chance.choice([0, 5000, (1 << 32) - 1])
            pieces.append(HEAD.pack(length, kind if chance.random() < 0.9 else chance.choice([0, 255, *Kind])) + sent)
        return pieces

    def _request(self, chance: random.Random) -> wire.ClientFrame:
        partition = chance.choice([SPARED, PLAYED, PLAYED, PLAYED, PLAYED, PLAYED])
        usual = chance.random() < 0.7
        client = chance.choice([*self._clients] if usual else [-(1 << 31), -1, 0, 5, (1 << 31) - 1])
        return wire.ClientFrame(
            mount=wire.MountRequest(
                cluster_key=self._key.bytes,
                partition=partition,
                generation=chance.choice(WRONG_GENERATIONS) if partition == SPARED else self._generation,
                client=client,
                token=self._clients.get(client, b"x" * chance.choice([0, 32])),
                number=chance.choice([1, 2, 3] if usual else INTEGERS),
                mark=chance.choice([-1, -1, 0] if usual else INTEGERS),
                feed=wire.FeedMode.ValueType(chance.choice([1, 2, 3] if usual else [0, 4, -1])),
                credit=chance.choice([0, 1 << 20] if usual else INTEGERS),
            )
        )

    def _frames(self, chance: random.Random, sequence: int) -> list[bytes]:
        locks = [[(chance.choice([1, 2, (1 << 64) - 1]), chance.choice(list(Mode)))], []]
        good = batch_of(b"played", b"", first=sequence, locks=locks)
        many = batch_of(b"", first=sequence, locks=[[(1, Mode.WRITE)]])
        message = client_message([good])
        strange = client_message([good])
        strange.append[0].marks = np.array([chance.choice(INTEGERS), -1], ">i8").tobytes()
        column = chance.choice(["headers", "lengths", "data_crcs", "lock_counts", "lock_ids", "lock_modes", "payloads"])
        lying = client_message([good])
        setattr(lying.append[0], column, mutated(chance, getattr(lying.append[0], column)))
        second = self._request(chance)
        nonsense = filled(chance, wire.ClientFrame)
        nonsense.ClearField("mount")
        frames = [message, message, message, strange, lying, lying, second, nonsense]
        frames.append(client_message([Credit(chance.choice(INTEGERS))]))
        if chance.random() < 0.2:
            heavy = client_message([many])
            heavy.append[0].lock_counts = LOCKS.to_bytes(4, "big")
            heavy.append[0].lock_ids, heavy.append[0].lock_modes = bytes(8 * LOCKS), bytes([Mode.WRITE]) * LOCKS
            frames.append(heavy)
        return [*(frame.SerializeToString() for frame in frames), chance.randbytes(50)]


async def besiege(cluster: Cluster, siege: Siege) -> None:
    address, admin = cluster.local.blueprint.addresses(cluster.server_names[0])
    found = await cluster.local.snapshot()
    async with ServerClient(address, cluster.key) as server:
        (streams,) = [found.streams for found in (await server.locate()).servers]
        given = [await server.register() for _ in range(3)]
    caller = Caller(
        cluster, found.partitions[PLAYED].generation, {registration.client: registration.token for registration in given}
    )
    is_over = Event()
    slow = create_task(siege.starve(address, is_over))
    await gather(
        siege.calls(address, CALLS, caller.any_call),
        siege.calls(address, STREAMS, caller.any_mount),
        siege.streams(streams, STREAMS, caller.any_stream),
        siege.throw(streams, GARBAGE),
        siege.flood(streams, FLOODS),
        siege.calls(admin, ADMIN_CALLS, caller.any_admin_call),
        siege.throw(address, GARBAGE),
        siege.throw(admin, GARBAGE // 4),
        siege.flood(address, FLOODS),
    )
    is_over.set()
    await slow


def test_hostile_callers_disturb_nobody(cluster: Cluster, tmp_path: Path) -> None:
    names = [cluster.server_names[0], cluster.storage_names[0]]

    async def tell() -> None:
        (tmp_path / "history").mkdir()
        race = Race(tmp_path / "history", cluster.server_addresses, tag="good", partitions=[SPARED], clients=2)
        async with race.running():
            await race.more(200)
            healths = [Health(pid(name)) for name in names]
            siege = Siege("server")
            await besiege(cluster, siege)
            await race.more(200)
            for health in healths:
                await health.recovered()
        assert race.failures == []
        verdict = await race.verdict(cluster.storage_addresses, cluster.key)
        assert verdict.is_sound, str(verdict)
        print(dict(siege.codes), siege.thrown, verdict)
        siege.check_depth()
        storage = cluster.local.blueprint.addresses(cluster.storage_names[0])[1]
        async with AdminClient(storage, cluster.key) as admin:
            assert [found async for found in admin.verify() if isinstance(found, Finding)] == []
        assert len(cluster.local.running) == 3, "nobody has ended"

    def pid(name: str) -> int:
        life = cluster.local.daemons[name].life
        assert life is not None
        return life.pid

    run(tell())
    assert cluster.local.stop() == [], "they end when they are told to"
    for name in names:
        log = cluster.local._log(name).read_text()
        assert log
        assert strange_lines(log) == []
