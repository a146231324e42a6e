"""What is published: an sdist, the wheel that it builds, and programs that run from that wheel alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_{0} as build; print(build(sys.argv[1]))"


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the unpacked sdist, as an index does it."""
    folder = tmp_path_factory.mktemp("package")
    project = folder / "project"
    project.mkdir()
    for name in ("waltzd", "waltzctl", "spark", "configs"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    run([sys.executable, "-c", BUILD.format("sdist"), folder], project)
    (sdist,) = folder.glob("waltzd-*.tar.gz")
    run([sys.executable, "-m", "tarfile", "--extract", sdist, folder / "sdist"], folder)
    (source,) = (folder / "sdist").iterdir()
    run([sys.executable, "-c", BUILD.format("wheel"), folder], source)
    (built,) = folder.glob("waltzd-*.whl")
    return built


def test_the_wheel_has_every_module_and_what_stands_beside_them(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = [(ROOT, "waltzd"), (ROOT, "waltzctl"), (ROOT / "spark", "waltz_spark"), (ROOT / "spark", "pyspark_waltz")]
    modules = {str(path.relative_to(top)) for top, package in sources for path in (top / package).rglob("*.py")}
    assert modules - names == set()
    ends = {name.split(".data/data/", 1)[-1] for name in names}
    assert {f"share/waltz/{path.name}" for path in (ROOT / "configs").iterdir()} <= ends
    assert {"waltzd/py.typed", "waltzd/wire/wire.proto"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_programs_run_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel], tmp_path)
    here = {"PYTHONPATH": str(target)}
    for program in ("waltzctl", "waltzd"):
        # -P and another folder: neither the checkout nor its installation may answer in place of the wheel.
        place = run([sys.executable, "-P", "-c", f"import {program}; print({program}.__file__)"], tmp_path, **here)
        assert place.startswith(str(target))
        assert "0.1.0" in run([sys.executable, "-P", "-m", program, "--version"], tmp_path, **here)
