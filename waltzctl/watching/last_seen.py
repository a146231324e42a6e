"""What was seen of a cluster the last time, kept on this machine for the day on which its coordinator does not answer.

One small file for each cluster in the user's cache directory. It may be missing, old or damaged at any time, and then it is
as if there were none: nothing is decided by it but whom to ask. Since when a trouble was seen is kept beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waltzctl.watching.overview import Overview
from waltzd.cluster.documents import ClusterMeta, ReplicaSets, ServerMeta, StorageMeta, decode, encode
from waltzd.errors import WaltzError

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class LastSeen:
    meta: ClusterMeta
    servers: tuple[ServerMeta, ...]
    storages: tuple[StorageMeta, ...]
    replicas: ReplicaSets
    seen: str
    """When the coordinator answered."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    """Since when each was seen at every look."""


def of(found: Overview, *, seen: str, troubles: Mapping[str, str]) -> LastSeen:
    return LastSeen(
        meta=found.meta,
        servers=tuple(view.meta for view in found.servers),
        storages=tuple(view.meta for view in found.storages),
        replicas=ReplicaSets(partitions={view.partition: dict(view.replicas) for view in found.partitions}),
        seen=seen,
        troubles=troubles,
    )


def path_of(where: str) -> Path:
    """`where`: the addresses of the coordinator and the root of the cluster."""
    home = os.environ.get("XDG_CACHE_HOME")
    name = hashlib.sha256(where.encode()).hexdigest()[:16]
    return (Path(home) if home else Path.home() / ".cache") / "waltz" / f"{name}.json"


def load(where: str) -> LastSeen | None:
    try:
        return _decoded(path_of(where).read_text(encoding="utf-8"), where)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, WaltzError):
        return None  # none, or none that can be used


def save(where: str, last: LastSeen) -> None:
    """Whole or not at all; a place where nothing can be written is no reason to show nothing."""
    path = path_of(where)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            beside.write_text(_encoded(last, where), encoding="utf-8")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def _encoded(last: LastSeen, where: str) -> str:
    fields = {
        "schema": SCHEMA,
        "where": where,
        "seen": last.seen,
        "troubles": dict(last.troubles),
        "cluster": _plain(last.meta),
        "servers": [_plain(meta) for meta in last.servers],
        "storages": [_plain(meta) for meta in last.storages],
        "replicas": _plain(last.replicas),
    }
    return json.dumps(fields, indent=1)


def _plain(document: ClusterMeta | ServerMeta | StorageMeta | ReplicaSets) -> Any:
    return json.loads(encode(document))


def _decoded(text: str, where: str) -> LastSeen | None:
    fields = json.loads(text)
    if fields["schema"] != SCHEMA or fields["where"] != where:
        return None
    return LastSeen(
        meta=decode(ClusterMeta, _document(fields["cluster"]), "cluster"),
        servers=tuple(decode(ServerMeta, _document(meta), "server") for meta in fields["servers"]),
        storages=tuple(decode(StorageMeta, _document(meta), "storage") for meta in fields["storages"]),
        replicas=decode(ReplicaSets, _document(fields["replicas"]), "replicas"),
        seen=str(fields["seen"]),
        troubles={str(key): str(since) for key, since in fields["troubles"].items()},
    )


def _document(value: Any) -> bytes:
    return json.dumps(value).encode()
