"""Waltz in one process, for tests of applications: real servers and storages, without network and files.

    async with LocalCluster() as cluster, cluster.client(view=view) as client: cluster.force_next_lock_failure() await
        client.submit(command)

With pytest, the fixture `waltz_cluster` is such a cluster. `BlockingCluster` and the fixture `blocking_waltz_cluster`
are for tests without an event loop. A cluster injects the faults of production on request: locks that fail, a feed that
pauses, owners that die, storages that do not answer, outcomes that get lost.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waltzd.testing.blocking import BlockingCluster
    from waltzd.testing.cluster import LocalCluster

__all__ = ["BlockingCluster", "LocalCluster"]
_MODULES = {"BlockingCluster": "waltzd.testing.blocking", "LocalCluster": "waltzd.testing.cluster"}


def __getattr__(name: str) -> Any:
    """Import on demand: every pytest on a machine with Waltz loads this package for its plugin."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
