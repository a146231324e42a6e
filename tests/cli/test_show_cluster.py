"""How a cluster looks: whole screens from values, kept in `golden/`; `REWRITE=1` writes them anew."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.json_schemas import SCHEMAS, faults
from waltzctl.placement.replica_assignment import Creation
from waltzctl.show import cluster
from waltzctl.show.forms import put
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView, ServerView, StorageView
from waltzd.cluster.documents import ClusterMeta, Membership, ServerMeta, StorageMeta
from waltzd.errors import CannotConnect
from waltzd.protocol.descriptions import OwnedPartition, OwnedReplica, ServerDescription, Statistics, StorageDescription

GOLDEN = Path(__file__).parent / "golden"
META = ClusterMeta(name="trial", key=UUID(int=7), partitions=3, created="2026-01-01T00:00:00+00:00")
MEMBERS = {"one": Membership.MEMBER, "three": Membership.LEARNER, "two": Membership.MEMBER}


def replica(name: str, *, counts: bool = True, state: str = "LIVE", story: str = "") -> OwnedReplica:
    return OwnedReplica(storage=name, role=str(MEMBERS[name]), state=state, durable_id=41, counts=counts, story=story)


def owned(number: int, *replicas: OwnedReplica, step: str = "OPEN", waiting: str = "") -> OwnedPartition:
    return OwnedPartition(
        partition=number, generation=2, session=5, step=step, waiting=waiting, committed=1234 * number - 1,
        last_id=1234 * number, low_mark=-1, mounts=3, tail_bytes=100, replicas=replicas,
    )  # fmt: skip


def server(name: str, *partitions: OwnedPartition) -> ServerView:
    meta = ServerMeta(
        name=name, listen=f"{name}:55180", admin_listen=f"{name}:55181", instance=UUID(int=1), version="0.1.0"
    )
    said = ServerDescription(
        name=name, cluster_key=META.key, instance=UUID(int=1), version="0.1.0", uptime_ms=1000, is_connected=True,
        is_draining=False, is_leader=name == "alpha", partitions=partitions,
    )  # fmt: skip
    return ServerView(meta=meta, reported=said, error=None)


def storage(name: str) -> StorageView:
    meta = StorageMeta(name=name, listen=f"{name}:55280", admin_listen=f"{name}:55281", group=f"rack-{name}")
    said = StorageDescription(
        cluster_key=META.key, partitions=3, directory="/data", version="0.1.0", free_bytes=1, uptime_ms=1,
        is_draining=False, assigned=(), statistics=Statistics(),
    )  # fmt: skip
    return StorageView(meta=meta, reported=said, error=None)


def view(number: int, owner: str | None, said: OwnedPartition | None) -> PartitionView:
    return PartitionView(partition=number, owner=owner, generation=2, replicas=MEMBERS, reported=said)


BOTH = (replica("one"), replica("two"), replica("three", counts=False, state="CATCHING_UP", story="at id 20 of 41"))
WELL = tuple(owned(number, *BOTH) for number in range(3))
HEALTHY = ClusterSnapshot(
    meta=META,
    leader="alpha",
    servers=(server("alpha", WELL[0], WELL[2]), server("beta", WELL[1])),
    storages=(storage("one"), storage("three"), storage("two")),
    partitions=(view(0, "alpha", WELL[0]), view(1, "beta", WELL[1]), view(2, "alpha", WELL[2])),
)
WAITING = owned(0, replica("one", counts=False), step="SETTLING", waiting="copying from one to two, at id 20 of 41")
SHORT = owned(2, replica("one"), replica("two", counts=False, state="DOWN", story="no answer since 12:00"))
UNWELL = replace(
    HEALTHY,
    servers=(
        server("alpha", WAITING, SHORT),
        replace(server("beta"), reported=None, error=CannotConnect("the call failed: unavailable")),
    ),
    storages=(storage("one"), replace(storage("two"), reported=None, error=CannotConnect("the call failed: deadline"))),
    partitions=(view(0, "alpha", WAITING), view(1, "beta", None), view(2, "alpha", SHORT)),
)
CREATION = Creation(
    meta=META,
    storages={found.meta.name: found.meta for found in HEALTHY.storages},
    replicas={0: ("one", "two"), 1: ("one", "three"), 2: ("three", "two"), 3: ("one", "two")},
    was_there=False,
    created={"one": (0, 1, 3), "three": (1, 2), "two": (0,)},
)


def check_golden(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"[ \t]+$", "", capsys.readouterr().out, flags=re.M)
    path = GOLDEN / name
    if os.environ.get("REWRITE"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(("output", "suffix"), [("table", "txt"), ("json", "json")])
def test_a_creation(output: str, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(cluster.creation(CREATION, hosts="127.0.0.1:2181", root="/waltz", is_dry=False), output)
    check_golden(f"create-cluster.{suffix}", capsys)


@pytest.mark.parametrize("found", [HEALTHY, UNWELL])
def test_the_cluster_of_a_status_fits_its_schema_and_a_spoiled_one_does_not(found: ClusterSnapshot) -> None:
    schema = json.loads(SCHEMAS.read_text(encoding="utf-8"))["status"]["properties"]["cluster"]
    answer = json.loads(json.dumps(cluster.picture_json(found)))
    assert list(faults(schema, answer)) == []
    assert list(faults(schema, {**answer, "later": {"added": 1}})) == [], "fields may be added"
    answer["servers"][0]["is_up"] = "yes"
    assert list(faults(schema, answer)) == ['.servers[].is_up is "yes", and not boolean or null']


def test_what_is_healthy() -> None:
    assert HEALTHY.is_healthy, "a learner that does not count yet is no trouble"
    assert not UNWELL.is_healthy
    assert [found.partition for found in UNWELL.closed] == [0, 1]
    assert [found.partition for found in UNWELL.short] == [2]
    assert list(UNWELL.silent) == ["beta", "two"]
    no_majority = view(0, "alpha", owned(0, *BOTH, waiting="too few members have joined"))
    assert not no_majority.is_open
    assert no_majority.waiting == "too few members have joined"
