"""The pytest fixtures `waltz_cluster` and `blocking_waltz_cluster`, which every test has when `waltzd` is installed.

    @pytest.mark.waltz(partitions=4)
    def test_transfer(waltz_cluster):
        async def story(cluster):
            async with cluster.client(view=view) as client: ...

        waltz_cluster.run(story)

A test that is a coroutine itself uses `async with waltz_cluster as cluster`. The mark takes the arguments of
`LocalCluster`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from waltzd.testing.blocking import BlockingCluster
    from waltzd.testing.cluster import LocalCluster


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "waltz(partitions, servers, storages, storage_seconds, format): the size of the cluster of a test"
    )


@pytest.fixture
def waltz_cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Provide a `LocalCluster`; the test starts and ends it."""
    # Not at the top: this module is loaded with every pytest on the machine.
    make = importlib.import_module("waltzd.testing.cluster").LocalCluster
    mark = request.node.get_closest_marker("waltz")
    cluster: LocalCluster = make(**(mark.kwargs if mark else {}))
    yield cluster
    assert not cluster.is_running, "the test must end the cluster: use `async with waltz_cluster` or `waltz_cluster.run`"


@pytest.fixture
def blocking_waltz_cluster(request: pytest.FixtureRequest) -> Iterator[BlockingCluster]:
    """Provide a `BlockingCluster` that runs, for tests without an event loop."""
    mark = request.node.get_closest_marker("waltz")
    with importlib.import_module("waltzd.testing.blocking").BlockingCluster(**(mark.kwargs if mark else {})) as cluster:
        yield cluster
