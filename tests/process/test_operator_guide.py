"""The operator's guide does what it says: its commands, in its order, in one directory."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from waltzctl.local_cluster.local import LocalCluster
from waltzctl.main import run
from waltzd.errors.operations import NoLocalCluster

GUIDE = Path(__file__).parents[2] / "docs" / "operator-guide.md"


def follow(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell would. The tool is called in this process: to start one for each command takes longer than all of them."""
    if not line.startswith("waltzctl "):
        name, _, _ = line.partition("=")
        script = f'{line}\nprintf %s "${name}"'
        monkeypatch.setenv(name, subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True).stdout)
        return
    command, _, other_code = line.partition(" || test $? -eq ")
    code = run(shlex.split(os.path.expandvars(command))[1:])
    assert code in (0, int(other_code or 0)), line


def test_the_commands_of_the_guide_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)).splitlines()
    assert len(lines) >= 40
    for name in [name for name in os.environ if name.startswith("WALTZ_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WALTZ_CONTEXTS", str(tmp_path / "contexts.yml"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    try:
        for line in lines:
            follow(line, monkeypatch)
    finally:
        with contextlib.suppress(NoLocalCluster):  # the last command removed it
            LocalCluster.find(tmp_path / "trial").kill()
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "HEALTHY" in said.out
    assert "committed" in said.out.lower()
    assert (tmp_path / "bundle.tar.gz").stat().st_size > 0
    assert not (tmp_path / "trial").exists()
