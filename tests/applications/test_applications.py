"""The example applications on a real cluster, killed under load: nothing is lost, doubled, or shown otherwise than the log
has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.applications.__main__ import database
from tests.applications.storm import storm
from tests.conftest import SEED


@pytest.mark.parametrize("rounds", [2, pytest.param(5, marks=pytest.mark.long)])
def test_applications_that_are_killed_with_the_cluster_under_them(tmp_path: Path, rounds: int) -> None:
    """On PostgreSQL where there is one. A server and a storage are killed, or every one of them, and every instance of the
    applications."""
    with database() as url:
        report = storm(tmp_path, seed=int(os.environ[SEED]), database=url, rounds=rounds)
    print(report)
    assert report.problems == []
