"""The persistence module with version 10 of `eventsourcing`, a pre-release, in front of the installed 9.5."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "10.0.0a7"
SUITES = Path(__file__).with_name("suites_of_eventsourcing_10.py")
ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_the_suites_of_version_10_pass_unchanged(tmp_path: Path) -> None:
    """It needs the package index."""
    package = f"eventsourcing[crypto,msgspec,pydantic]=={VERSION}"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--target", str(tmp_path), package], check=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(SUITES)]
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
