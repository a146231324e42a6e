"""Pictures of a cluster as `waltzctl.snapshot.cluster_snapshot` makes them, for tests: all well, and then made worse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

from waltzctl.placement.replica_moves import PlacementState
from waltzctl.snapshot.cluster_snapshot import Call, ClusterSnapshot, PartitionView, ServerView, StorageView, compared
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets, ServerMeta, StorageMeta
from waltzd.errors import WaltzError
from waltzd.protocol.descriptions import (
    OwnedPartition,
    OwnedReplica,
    PartitionDescription,
    PartitionStatistics,
    ReplicaStatus,
    ServerDescription,
    Statistics,
    StorageDescription,
    Vitals,
)

KEY = UUID(int=7)
NOW_MS = 1_800_000_000_000
STORAGES = ("s1", "s2", "s3")
SERVERS = ("a", "b")


def replica(storage: str, *, counts: bool = True, state: str = "LIVE", story: str = "level") -> OwnedReplica:
    return OwnedReplica(storage=storage, role="member", state=state, durable_id=99, counts=counts, story=story)


def owned(number: int, replicas: tuple[OwnedReplica, ...], **changes: Any) -> OwnedPartition:
    fields: dict[str, Any] = {
        "partition": number, "generation": 1, "session": 1, "step": "OPEN", "waiting": "", "committed": 99, "last_id": 99,
        "low_mark": -1, "mounts": 1, "tail_bytes": 10, "replicas": replicas, "statistics": PartitionStatistics(),
    }  # fmt: skip
    return OwnedPartition(**{**fields, **changes})


def held(number: int, **changes: Any) -> PartitionDescription:
    status = ReplicaStatus(
        partition=number, incarnation=UUID(int=1), promised_session=1, session=1, low_mark=-1, local_low_mark=-1,
        committed=99, last_id=99, is_available=True, is_full=False, segments=1, findings=(),
    )  # fmt: skip
    return PartitionDescription(
        partition=number, status=replace(status, **changes), refused=None, story=f"partition {number}: holds ids",
        queued_bytes=0, disk_bytes=0,
    )  # fmt: skip


def server(name: str, **changes: Any) -> ServerView:
    """`changes`: of its description."""
    meta = ServerMeta(name=name, listen=f"{name}:1", admin_listen=f"{name}:2", instance=UUID(int=2), version="1")
    fields: dict[str, Any] = {
        "name": name, "cluster_key": KEY, "instance": UUID(int=2), "version": "1", "uptime_ms": 1, "is_connected": True,
        "is_draining": False, "is_leader": name == "a", "partitions": (),
        "vitals": Vitals(time_ms=NOW_MS, open_files=10, open_files_max=1000),
    }  # fmt: skip
    reported = ServerDescription(**{**fields, **changes})
    return ServerView(meta=meta, reported=reported, error=None, call=Call(middle_ms=NOW_MS, milliseconds=4))


def storage(name: str, *, partitions: int = 4, group: str = "", **changes: Any) -> StorageView:
    meta = StorageMeta(name=name, listen=f"{name}:1", admin_listen=f"{name}:2", group=group or name)
    fields: dict[str, Any] = {
        "cluster_key": KEY, "partitions": 4, "directory": f"data/{name}", "version": "1", "free_bytes": 1 << 40,
        "uptime_ms": 1, "is_draining": False, "assigned": tuple(held(number) for number in range(partitions)),
        "statistics": Statistics(), "vitals": Vitals(time_ms=NOW_MS, open_files=10, open_files_max=1000),
    }  # fmt: skip
    reported = StorageDescription(**{**fields, **changes})
    return StorageView(meta=meta, reported=reported, error=None, call=Call(middle_ms=NOW_MS, milliseconds=4))


def partition(number: int, *, owner: str | None = None, **changes: Any) -> PartitionView:
    reported = owned(number, tuple(replica(name) for name in STORAGES))
    fields: dict[str, Any] = {
        "partition": number, "owner": owner or SERVERS[number % 2], "generation": 1,
        "replicas": dict.fromkeys(STORAGES, Membership.MEMBER), "reported": reported,
    }  # fmt: skip
    return PartitionView(**{**fields, **changes})


def well(**changes: Any) -> ClusterSnapshot:
    """Two servers, three storages, four partitions."""
    fields: dict[str, Any] = {
        "meta": ClusterMeta(name="trial", key=KEY, partitions=len(changes.get("partitions", "four")), created="2026-01-01"),
        "leader": "a",
        "servers": tuple(server(name) for name in SERVERS),
        "storages": tuple(storage(name) for name in STORAGES),
        "partitions": tuple(partition(number) for number in range(4)),
    }
    return ClusterSnapshot(**{**fields, **changes})


def placement_state(found: ClusterSnapshot, roles: Mapping[int, Mapping[str, Membership]]) -> PlacementState:
    """What a plan is made from: this snapshot, and who is assigned which partition."""
    return PlacementState(found=found, sets=ReplicaSets(partitions=roles), versions={}, moves_version=1)


def offline(**refusing: tuple[int, ...]) -> ClusterSnapshot:
    """All well, until an operator took these partitions offline on these storages, which their owners have not noticed."""
    storages = tuple(
        storage(
            name, assigned=tuple(held(number, is_available=number not in refusing.get(name, ())) for number in range(4))
        )
        for name in STORAGES
    )
    return well(storages=storages, partitions=compared(well().partitions, storages))


def silent(view: Any, error: WaltzError) -> Any:
    """A server or a storage that does not answer."""
    return replace(view, reported=None, error=error)
