"""What all tests share: the original's files, hypothesis without a clock, and the number that chance comes from."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("waltz", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("waltz")

TESTS = Path(__file__).parent
SEED = "WALTZ_SEED"
"""Tests that look somewhere else each time begin here. Given from outside, or drawn, and in the head of the report."""


def pytest_configure() -> None:
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(1_000_000, 1 << 40)))  # workers inherit it


def pytest_report_header() -> str:
    return f"what is drawn anew each time comes from {SEED}={os.environ[SEED]}"


@pytest.fixture(scope="session")
def original() -> Path:
    """Three storage directories that the original system wrote, and a manifest of all records in them. Do not change."""
    return TESTS / "fixtures" / "java-waltz-a"
