"""The example applications on a real cluster, killed under load: nothing is lost, doubled, or shown otherwise than the log
has it."""

from __future__ import annotations

import os
from pathlib import Path

from tests.applications.__main__ import database
from tests.applications.storm import storm
from tests.conftest import SEED


def test_applications_that_are_killed_with_the_cluster_under_them(tmp_path: Path) -> None:
    """On PostgreSQL where there is one. Both servers are killed and a storage, and every instance of the applications."""
    with database() as url:
        report = storm(tmp_path, seed=int(os.environ[SEED]), database=url, rounds=3)
    print(report)
    assert report.problems == []
