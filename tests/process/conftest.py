"""Daemons for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.daemon import Daemon
from tests.process.server import ServerDaemon
from tests.process.zookeeper import LocalZooKeeper


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Daemons that are gone when the test is over, however it ends."""
    made: list[Daemon] = []

    def make(name: str = "storage", **settings: object) -> Daemon:
        daemon = Daemon(tmp_path / name, **settings)  # type: ignore[arg-type]
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.kill()


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalZooKeeper]:
    """One ZooKeeper for all tests of a worker. Each test uses a root of its own, and leaves it running."""
    local = LocalZooKeeper(tmp_path_factory.mktemp("coordinator") / "zookeeper")
    try:
        yield local.start()
    finally:
        local.kill()


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., ServerDaemon]]:
    """Servers that are gone when the test is over, however it ends."""
    made: list[ServerDaemon] = []

    def make(name: str, **settings: object) -> ServerDaemon:
        server = ServerDaemon(tmp_path / f"{name}-{len(made)}", name=name, **settings)  # type: ignore[arg-type]
        made.append(server)
        return server

    yield make
    for server in made:
        server.kill()
