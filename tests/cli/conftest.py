"""A copy of one of the original's storages to work on, and the tool as a function."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from waltzctl.health import rules, troubles
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.main import run
from waltzctl.shell import progress


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Tool = Callable[..., Outcome]
LASTING: dict[str, dict[str, object]] = {"server": {"session_seconds": 30}}
"""For clusters of which no server goes: one that stands still for some seconds keeps its place, and its partitions."""


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon or a disk of the machine of the tests may stand still for a second: that is no finding of theirs."""
    monkeypatch.setattr(troubles, "SLOW_MS", math.inf)
    monkeypatch.setattr(rules, "FLUSH_FAIL_MS", math.inf)
    monkeypatch.setattr(rules, "COORDINATOR_FAIL_MS", math.inf)
    monkeypatch.setattr(progress, "MOMENT_SECONDS", 60.0)


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A real cluster that tests share: three storages, two servers, four partitions. Whoever changes it changes it back, or
    brings up one of its own. Commands reach it by `--directory`. No server of it ever goes."""
    cluster = LocalCluster.make(tmp_path_factory.mktemp("live") / "cluster", settings=LASTING)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture(scope="session")
def broken_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    cluster = LocalCluster.make(tmp_path_factory.mktemp("own") / "cluster", partitions=2, settings=LASTING)
    try:
        cluster.start()
        yield cluster
    finally:
        wake(cluster)
        cluster.kill()


@pytest.fixture
def own(broken_before: LocalCluster) -> Iterator[LocalCluster]:
    """A cluster to break: three storages, two servers, two partitions. It is well before each test."""
    try:
        yield broken_before
    finally:
        wake(broken_before)
        broken_before.start()
        well = ["cluster", "wait", "--healthy", "--timeout", "120", "--directory", str(broken_before.directory)]
        assert run(well) == 0


def wake(cluster: LocalCluster) -> None:
    for daemon in cluster.daemons.values():
        daemon.send(signal.SIGCONT)


@pytest.fixture
def storage(original: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "waltz"
    shutil.copytree(original / "storage0", copy)
    return copy


@pytest.fixture
def waltzctl(capsys: pytest.CaptureFixture[str]) -> Tool:
    def call(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    return call


@pytest.fixture
def damaged(storage: Path) -> Path:
    """What an operator meets: a bad byte in two records, in an index and in the control file, and a torn tail."""
    for name, at in (
        ("1/0000000000000000000.seg", 3000),
        ("0/0000000000000000000.seg", 359),
        ("2/0000000000000000000.idx", 200),
        ("waltz-storage.ctl", 140),
    ):
        path = storage / name
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
    with (storage / "0/0000000000000000332.seg").open("ab") as file:
        file.write(b"\0\0\0")
    return storage
