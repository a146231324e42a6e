"""What all tests share: where the original's files are, and hypothesis without a clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("waltz", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("waltz")

TESTS = Path(__file__).parent


@pytest.fixture(scope="session")
def original() -> Path:
    """Three storage directories that the original system wrote, and a manifest of all records in them. Do not change."""
    return TESTS / "fixtures" / "java-waltz-a"
