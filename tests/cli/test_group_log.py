"""A real cluster of an older version gets its group log while it runs, and keeps it when daemons and a storage are lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.cli.moving_words import bounded
from tests.spare_storages import members
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.placement import creation
from waltzctl.placement.creation import make_group_log
from waltzctl.placement.replica_assignment import assign_replicas
from waltzctl.shell.cluster_target import resolve, using
from waltzd.cluster.cluster import Cluster
from waltzd.protocol.locks import Committed
from waltzd.server.subscriptions.group_log import GroupLogClient

Tool = Callable[..., Any]
PATIENCE_SECONDS = 120.0
GROUP_LOG = 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    local = LocalCluster.make(tmp_path_factory.mktemp("groups") / "cluster", partitions=1, storages=4, servers=1)

    def without_group_log(logs: int, storages: Mapping[str, str], replication: int) -> dict[int, tuple[str, ...]]:
        return assign_replicas(logs - 1, storages, replication)

    try:
        with pytest.MonkeyPatch.context() as older, members(3):
            older.setattr(creation, "assign_replicas", without_group_log)
            local.start()
        yield local
    finally:
        local.kill()


async def append(local: LocalCluster, *payloads: bytes) -> None:
    async with GroupLogClient[bytes](local.server_addresses) as client:
        for payload in payloads:
            outcome = await client.append(payload, partition=client.number, timeout=PATIENCE_SECONDS)
            assert isinstance(outcome, Committed)


def until_level(waltzctl: Tool, place: tuple[str, ...]) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while any(
        (one["level"] or 0) < 3 for one in json.loads(waltzctl("partition", "list", *place, "-o", "json").out)["partitions"]
    ):
        assert time.monotonic() < ends, "every replica is level again"
        time.sleep(0.1)


async def kept(local: LocalCluster) -> list[bytes]:
    async with GroupLogClient[bytes](local.server_addresses) as client:
        found = await client.read_some(client.number, timeout=PATIENCE_SECONDS)
        return [transaction.payload for transaction in found]


def test_it_comes_while_the_cluster_runs_and_nothing_of_it_is_lost(cluster: LocalCluster, waltzctl: Tool) -> None:
    place = "--directory", str(cluster.directory)

    async def make(found: Cluster) -> bool:
        return await make_group_log(found)

    assert "(groups)" not in waltzctl("partition", "list", *place).out
    assert using(resolve({"directory": str(cluster.directory)}), make)
    assert not using(resolve({"directory": str(cluster.directory)}), make), "it is there already"
    asyncio.run(append(cluster, b"0", b"1"))
    row = json.loads(waltzctl("partition", "list", *place, "-o", "json").out)["partitions"][GROUP_LOG]
    assert row["holds"] == "groups"
    owner = waltzctl("partition", "describe", str(GROUP_LOG), *place)
    assert "the group log" in owner.out

    cluster.recall()
    held = row["replicas"]
    for name in (held[0], *cluster.blueprint.server_names):
        cluster.daemons[name].kill()
    for name in (held[0], *cluster.blueprint.server_names):
        cluster.start_one(name)
    asyncio.run(append(cluster, b"2"))
    until_level(waltzctl, place)  # else it asks for a typed name

    spare = next(name for name in cluster.blueprint.storage_names if name not in held)
    new = f"{spare}={','.join(cluster.blueprint.addresses(spare))}"
    done = waltzctl(*bounded(("storage", "remove", held[1], "--replacement", new, "--yes", "--confirm", held[1])), *place)
    assert done.code == 0, done
    row = json.loads(waltzctl("partition", "list", *place, "-o", "json").out)["partitions"][GROUP_LOG]
    assert sorted(row["replicas"]) == sorted({*held, spare} - {held[1]})
    cluster.daemons[held[0]].kill()  # so the new replica is one of the two that are needed
    asyncio.run(append(cluster, b"3"))
    assert asyncio.run(kept(cluster)) == [b"0", b"1", b"2", b"3"]
    cluster.start_one(held[0])
    assert "was changed by hand" not in waltzctl("doctor", *place).out
