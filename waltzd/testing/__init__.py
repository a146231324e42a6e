"""Waltz in one process, for the tests of applications: the real servers and storages, without a network and without files.

    async with LocalCluster() as cluster, cluster.client(handler=view) as client:
        cluster.force_next_lock_failure()
        await client.submit(context)

With pytest, the fixture `waltz_cluster` is such a cluster. What goes wrong in production goes wrong here on request: locks
that fail, a feed that stands still, owners that die, storages that do not answer, outcomes that get lost.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waltzd.testing.cluster import LocalCluster

__all__ = ["LocalCluster"]


def __getattr__(name: str) -> Any:
    """On demand: every pytest on a machine with Waltz loads this package for its plugin."""
    if name in __all__:
        return getattr(importlib.import_module("waltzd.testing.cluster"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
