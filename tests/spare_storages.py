"""A local cluster with storages that run and do not belong to it, as machines that an operator has just set up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from waltzctl.local_cluster.local import LocalCluster
from waltzctl.placement.creation import ClusterSpec


@contextmanager
def members(count: int) -> Iterator[None]:
    """A cluster that is started for the first time in here takes only its first storages."""
    whole = LocalCluster._spec

    def some(local: LocalCluster) -> ClusterSpec:
        spec = whole(local)
        return replace(spec, storages=spec.storages[:count])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalCluster, "_spec", some)
        yield
