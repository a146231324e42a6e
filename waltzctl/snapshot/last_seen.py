"""Last known state of a cluster, kept on this machine for the time when its ZooKeeper does not answer.

One small file for each cluster in the user's cache directory. If it is missing, old or damaged, it is ignored: it only
tells which daemons to ask. It also keeps since when each problem has been seen.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.cluster.documents import ClusterMeta, ReplicaSets, ServerMeta, StorageMeta
from waltzd.errors import WaltzError
from waltzd.protocol.document import Document, decode, encode


@dataclass(frozen=True, kw_only=True)
class LastSeen(Document):
    where: str
    """Addresses of ZooKeeper and the root of the cluster."""
    meta: ClusterMeta
    servers: tuple[ServerMeta, ...]
    storages: tuple[StorageMeta, ...]
    replicas: ReplicaSets
    seen: str
    """Time at which ZooKeeper last answered."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    """Key of a problem → time since which every check has found it."""


def of(where: str, found: ClusterSnapshot, *, seen: str, troubles: Mapping[str, str]) -> LastSeen:
    return LastSeen(
        where=where,
        meta=found.meta,
        servers=tuple(view.meta for view in found.servers),
        storages=tuple(view.meta for view in found.storages),
        replicas=ReplicaSets(partitions={view.partition: dict(view.replicas) for view in found.partitions}),
        seen=seen,
        troubles=troubles,
    )


def path_of(where: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    name = hashlib.sha256(where.encode()).hexdigest()[:16]
    return (Path(home) if home else Path.home() / ".cache") / "waltz" / f"{name}.json"


def load(where: str) -> LastSeen | None:
    path = path_of(where)
    try:
        found = decode(LastSeen, path.read_bytes(), str(path))
    except (OSError, WaltzError):
        return None  # missing or unusable
    return found if found.where == where else None


def save(last: LastSeen) -> None:
    """Write the file atomically. Errors are ignored: a read-only cache directory must not make a command fail."""
    path = path_of(last.where)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError, ValueError, WaltzError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            beside.write_bytes(encode(last))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
