"""What all tests share: the original's files, hypothesis without a clock, and the number that chance comes from."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import settings

from waltzctl import blueprint

settings.register_profile("waltz", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("waltz")

TESTS = Path(__file__).parent
SEED = "WALTZ_SEED"
"""Tests that look somewhere else each time begin here. Given from outside, or drawn, and in the head of the report."""


def pytest_configure() -> None:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as `waltzctl` has it: Java is started beside calls here, too
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(1_000_000, 1 << 40)))  # workers inherit it
    blueprint.PORTS = ports_of_this_worker(blueprint.PORTS)


def ports_of_this_worker(ports: range) -> range:
    """A part for each: a port whose daemon is down for a moment is not given to a cluster of another worker."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers  # who takes a dead one's place
    size = len(ports) // workers
    return ports[number * size :][:size]


def pytest_report_header() -> str:
    return f"what is drawn anew each time comes from {SEED}={os.environ[SEED]}"


@pytest.fixture(scope="session")
def original() -> Path:
    """Three storage directories that the original system wrote, and a manifest of all records in them. Do not change."""
    return TESTS / "fixtures" / "java-waltz-a"
