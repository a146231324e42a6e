"""The operator's guide does what it says: its commands, in its order, in one shell."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from waltzctl.playground.local import LocalCluster
from waltzd.errors import NoLocalCluster

GUIDE = Path(__file__).parents[2] / "docs" / "operator-guide.md"


def test_the_commands_of_the_guide_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 10
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WALTZ_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "WALTZ_CONTEXTS": str(tmp_path / "contexts.yml"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    try:
        done = subprocess.run(
            ["bash", "-ex", "-c", "\n".join(blocks)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), f"{done.stdout}\n{done.stderr}"
    finally:
        with contextlib.suppress(NoLocalCluster):  # the last command removed it
            LocalCluster.find(tmp_path / "trial").kill()
    assert "HEALTHY" in done.stdout
    assert "Committed" in done.stdout or "committed" in done.stdout
    assert (tmp_path / "bundle.tar.gz").stat().st_size > 0
    assert not (tmp_path / "trial").exists()
