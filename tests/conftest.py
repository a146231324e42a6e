"""What all tests share: the original's files, hypothesis without a clock, and the number that chance comes from."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import json_schemas
from waltzctl.shell import blueprint

settings.register_profile("waltz", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("quick", settings.get_profile("waltz"), max_examples=20)  # of `./dev test --quick`
settings.load_profile("waltz")

TESTS = Path(__file__).parent
SEED = "WALTZ_SEED"
"""Tests that look somewhere else each time begin here. Given from outside, or drawn, and in the head of the report."""


def pytest_configure() -> None:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as `waltzctl` has it: Java is started beside calls here, too
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(1_000_000, 1 << 40)))  # workers inherit it
    part = ports_of_this_worker(blueprint.PORTS)
    os.environ[blueprint.PORTS_VARIABLE] = f"{part[0]}-{part[-1]}"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background; Ctrl-C is tested
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup has it; the end of a terminal is tested
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def ports_of_this_worker(ports: range) -> range:
    """A part for each worker and what it starts: a port whose daemon is down for a moment, or has not begun to listen, is
    not given to a cluster of another worker."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers  # who takes a dead one's place
    size = len(ports) // workers
    return ports[number * size :][:size]


SHARED = ("spark", "live", "zookeeper", "own")
"""Fixtures that each worker makes once, at some cost: files that use the same one begin the part of one worker."""
HEAVY = (
    "chaos/test_chaos.py",
    "process/test_cluster.py",
    "simulation/test_simulation.py",
    "process/test_upgrade.py",
    "spark/test_standalone.py",
    "cli/test_up.py",
    "simulation/test_mutants.py",
    "process/test_sql_postgres.py",
    "spark/test_spark_export.py",
    "cli/test_membership.py",
    "cli/test_release.py",
    "cli/test_metadata.py",
    "applications/test_applications.py",
    "cli/test_rescue.py",
    "cli/test_restore.py",
    "process/test_readme.py",
    "process/test_storage.py",
    "cli/test_package.py",
    "cli/test_retention.py",
    "cli/test_bench.py",
    "process/test_memory.py",
    "process/test_archive.py",
    "process/test_examples.py",
    "fuzz/test_server_service.py",
    "process/test_tutorial.py",
    "cli/test_types.py",
    "simulation/test_damage.py",
    "process/test_operator_guide.py",
)
"""The other files that take longest, dealt out one by one. The part of the first worker begins with Spark, so the longest
are not at its turn."""


@pytest.hookimpl(trylast=True)  # when it is known which of them are run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker is given a part of what was collected, and takes from the end of another's part when it is done with its
    own. What shares something, and then long files, are the first of each part, so that what is done last is short. The
    last worker begins with unit tests, which use a processor while the others wait, and all end with them."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    unit = [item for item in items if item.nodeid.startswith("tests/unit/")]
    others = [item for item in items if not item.nodeid.startswith("tests/unit/")]
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    if others:
        _fill(parts[: max(1, workers - 1)], _begin(parts[: max(1, workers - 1)], others))
    _fill(parts, unit)
    items[:] = [item for part in parts for item in part]


def _begin(parts: list[list[pytest.Item]], items: list[pytest.Item]) -> list[pytest.Item]:
    """Begin each part with files that share something and long files. Return all other items."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for number, fixture in enumerate(SHARED):
        for name in [
            name for name, some in files.items() if any(fixture in getattr(one, "fixturenames", ()) for one in some)
        ]:
            parts[number % len(parts)] += files.pop(name)
    for number, name in enumerate(HEAVY):
        parts[number % len(parts)] += files.pop(f"tests/{name}", [])
    return [item for some in files.values() for item in some]


def _fill(parts: list[list[pytest.Item]], items: list[pytest.Item]) -> None:
    """Deal items out in their order, so that all parts are equally long."""
    left = list(items)
    for number, part in enumerate(parts):
        room = max(0, (sum(map(len, parts[number:])) + len(left)) // (len(parts) - number) - len(part))
        part += left[:room]
        del left[:room]
    parts[-1] += left


def pytest_report_header() -> str:
    return f"what is drawn anew each time comes from {SEED}={os.environ[SEED]}"


@pytest.fixture(scope="session")
def original() -> Path:
    """Three storage directories that the original system wrote, and a manifest of all records in them. Do not change."""
    return TESTS / "fixtures" / "java-waltz-a"


@pytest.fixture(autouse=True, scope="session")
def _answers_fit_their_schemas() -> Iterator[None]:
    """Each answer of each command that runs in this process is checked against the schema of the command."""
    with pytest.MonkeyPatch.context() as patches:
        json_schemas.install(patches)
        yield


@pytest.fixture(autouse=True)
def _signals_are_heard_again() -> Iterator[None]:
    """A command that was told to end ignores further signals, and its process ends. Run within this one it must not leave
    that behind: every program started later would inherit it, and a Java that ignores SIGTERM never ends."""
    heard = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in heard.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
