"""Daemons for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.cluster import PATIENCE_SECONDS
from tests.process.daemon import Daemon
from tests.process.server import ServerDaemon
from tests.process.zookeeper import LocalZooKeeper
from waltzd.client import loop
from waltzd.errors.operations import Unsafe


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
def standing_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("standing") / "storage") as daemon:
        yield daemon


@pytest.fixture
def daemon(standing_daemon: Daemon) -> Iterator[Daemon]:
    """One storage for all tests of a worker that neither end it nor need settings: it holds no partition before a test."""
    yield standing_daemon

    async def clear() -> None:
        async with standing_daemon.admin() as admin:
            held = [found.status for found in (await admin.describe()).assigned if found.status is not None]
            for status in held:
                await admin.fence(status.partition, status.promised_session + 1)  # ends the streams that are left open
            left = [status.partition for status in held]
            async with asyncio.timeout(PATIENCE_SECONDS):  # on a busy machine streams end later than a storage waits for
                while left:
                    done = await admin.remove_partitions(left, delete_files=True)
                    assert all(error is None or isinstance(error, Unsafe) for error in done.values())
                    left = [number for number, error in done.items() if error is not None]

    loop.run(clear())


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
