"""What was seen of a cluster the last time, kept on this machine for the day on which its coordinator does not answer.

One small file for each cluster in the user's cache directory. It may be missing, old or damaged at any time, and then it is
as if there were none: nothing is decided by it but whom to ask. Since when a trouble was seen is kept beside it.
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
    """The addresses of the coordinator and the root of the cluster."""
    meta: ClusterMeta
    servers: tuple[ServerMeta, ...]
    storages: tuple[StorageMeta, ...]
    replicas: ReplicaSets
    seen: str
    """When the coordinator answered."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    """Trouble → since when it was seen at every look."""


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
        return None  # none, or none that can be used
    return found if found.where == where else None


def save(last: LastSeen) -> None:
    """Write all of it or nothing; a directory that cannot be written must not keep a command from showing something."""
    path = path_of(last.where)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError, ValueError, WaltzError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            beside.write_bytes(encode(last))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
