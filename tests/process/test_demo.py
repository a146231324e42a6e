"""The first command of the README does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demonstration_holds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.demo", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"^right: the counter is \d+, its lowest value was \d+$", done.stdout, re.M)
    assert re.search(r"^right: \d+ accounts add up to 0, ", done.stdout, re.M)
    assert "1 finding" in done.stdout
