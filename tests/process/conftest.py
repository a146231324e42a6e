"""Daemons for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.daemon import Daemon


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
