"""What is published: an sdist, the wheel that it builds, and what an environment can do that has this wheel alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from tests.release.packages import build_sdist, build_wheel_of_sdist
from tests.sbom import ROOT, locked
from tests.unit.test_extras import APPLICATION

SECONDS = 1_800_000_000
"""Date of what is built here, in place of that of a commit."""
LITTER = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
OUT_OF_REACH = re.compile("NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError")
VERSION = 'import sys, venv; print("%d.%d" % sys.version_info[:2])'
OLDEST = (3, 11)


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    project = folder / "project"
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(*LITTER))
    return build_sdist(project, folder, SECONDS)


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel that is built from the unpacked sdist, as an index does it."""
    return build_wheel_of_sdist(sdist, sdist.parent, SECONDS)


def test_the_sdist_has_what_the_wheel_is_built_of_and_no_more(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {PurePosixPath(*PurePosixPath(one.name).parts[1:]) for one in archive if one.isfile()}
    beside = {str(name) for name in names if len(name.parts) == 1}
    assert beside == {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert {name.parts[0] for name in names if len(name.parts) > 1} - {"waltzd.egg-info"} == {
        "configs", "spark", "waltzctl", "waltzd",
    }  # fmt: skip
    console = {name for name in names if name.parts[:2] == ("waltzctl", "console")}
    ours = {name for name in names if name.parts[0] in ("waltzctl", "waltzd")}
    assert {name.suffix for name in ours - console} == {".json", ".py", ".pyi", ".proto", ".typed"}
    assert {name.suffix for name in console} == {".py", ".html", ".css", ".js", ".svg"}
    assert {str(name) for name in names if name.parts[0] == "configs"} == {
        f"configs/{path.name}" for path in (ROOT / "configs").iterdir() if path.is_file()
    }


def test_the_wheel_has_every_module_and_what_stands_beside_them(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = [(ROOT, "waltzd"), (ROOT, "waltzctl"), (ROOT / "spark", "waltz_spark"), (ROOT / "spark", "pyspark_waltz")]
    modules = {str(path.relative_to(top)) for top, package in sources for path in (top / package).rglob("*.py")}
    assert modules - names == set()
    ends = {name.split(".data/data/", 1)[-1] for name in names}
    assert {f"share/waltz/{path.name}" for path in (ROOT / "configs").iterdir() if path.is_file()} <= ends
    assert {"waltzd/py.typed", "waltzd/wire/wire.proto", "waltzctl/show/schemas.json"} <= names
    folders = [ROOT / "waltzctl/console" / name for name in ("templates", "static")]
    assert {str(path.relative_to(ROOT)) for folder in folders for path in folder.iterdir()} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


# -- an empty environment ----------------------------------------------------------------------------------------------


def interpreters() -> dict[tuple[int, ...], str]:
    """The Pythons of this machine that Waltz runs on, by version."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob("versions/*/bin")
    programs = {str(path) for folder in folders for path in folder.glob("python3.[0-9]*") if path.suffix[1:].isdigit()}
    found = {}
    for program in sorted(programs):
        told = subprocess.run([program, "-c", VERSION], capture_output=True, text=True, check=False)
        if told.returncode == 0:  # a shim may stand for nothing
            found[tuple(int(part) for part in told.stdout.split("."))] = program
    return {version: program for version, program in found.items() if version >= OLDEST}


OWN = pytest.mark.long if sys.version_info[:2] == OLDEST else ()
"""With it all tests are run, and in short the newest one shows what an empty environment has."""


@pytest.fixture(params=[pytest.param("oldest", marks=OWN), "newest"])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The interpreter of an empty environment."""
    there = interpreters()
    version = OLDEST if request.param == "oldest" else max(there, default=OLDEST)
    if version not in there or (request.param == "oldest" and max(there) == OLDEST):
        pytest.skip(f"this machine has these Pythons: {sorted(there)}")
    run([there[version], "-m", "venv", "--without-pip", tmp_path / "empty"], tmp_path)
    run([there[version], "-m", "venv", tmp_path / "installer"], tmp_path)
    return tmp_path / "empty" / "bin" / "python"


def install(python: Path, what: str) -> None:
    """With the versions of the lock, so that it is the same every time."""
    constraints = python.parent / "constraints.txt"
    lock = locked((ROOT / "requirements.lock").read_text(encoding="utf-8"))
    ours = [
        f"{one.name}=={one.version}" + (f" ; {one.marker}" if one.marker else "") for some in lock.values() for one in some
    ]
    constraints.write_text("\n".join(ours), encoding="utf-8")
    # The pip of this interpreter may not run on a later one, so the installer is of the same version.
    installer = str(python.parents[2] / "installer/bin/python")
    pip = [
        installer,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-compile",
        "--only-binary",
        ":all:",
    ]
    done = subprocess.run(
        [*pip, "--constraint", str(constraints), what], cwd=python.parent, capture_output=True, text=True, check=False
    )
    if done.returncode != 0 and OUT_OF_REACH.search(done.stdout + done.stderr):
        pytest.skip("no index of packages can be reached from here")
    assert done.returncode == 0, done.stdout + done.stderr


def refused(program: Path) -> str:
    done = subprocess.run([program, "--help"], cwd=program.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    return done.stderr


def test_it_works_in_an_empty_environment(wheel: Path, python: Path) -> None:
    folder = python.parent
    install(python, str(wheel))
    there = "from importlib.metadata import distributions as found; print(*sorted(one.name.lower() for one in found()))"
    assert set(run([python, "-c", there], folder).replace("_", "-").split()) - {"isal"} == {
        "grpcio", "numpy", "protobuf", "typing-extensions", "waltzd",
    }  # fmt: skip
    assert run([python, "-W", "error", "-c", APPLICATION], folder) == "done\n"
    assert "pip install 'waltzd[daemon]'" in refused(folder / "waltzd")
    assert "pip install 'waltzd[tools]'" in refused(folder / "waltzctl")
    install(python, f"{wheel}[tools]")
    assert run([folder / "waltzctl", "--version"], folder) == "waltzctl 0.1.0\n"
    install(python, f"{wheel}[daemon]")
    for program in ("waltzd", "waltzctl"):
        assert "0.1.0" in run([folder / program, "--version"], folder)
        assert f"Usage: {program} " in run([folder / program, "--help"], folder)
    run([python, "-c", "import waltzd.server.command, waltzd.storage.command, waltzd.daemon.http"], folder)


# -- without an environment --------------------------------------------------------------------------------------------


@pytest.fixture
def runners(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """The programs `uvx` and `pipx`, and variables under which they keep to a folder and take the newest Python."""
    there = interpreters()
    newest = there[max(there)]
    home = tmp_path / "runners"
    run([newest, "-m", "venv", home], tmp_path)
    pip: list[str | Path] = [home / "bin/python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "uv", "pipx"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode != 0 and OUT_OF_REACH.search(done.stdout + done.stderr):
        pytest.skip("no index of packages can be reached from here")
    assert done.returncode == 0, done.stdout + done.stderr
    folders = {name: str(home / name) for name in ("UV_CACHE_DIR", "UV_TOOL_DIR", "PIPX_HOME", "PIPX_BIN_DIR")}
    chosen = {"UV_PYTHON": newest, "UV_PYTHON_DOWNLOADS": "never", "PIPX_DEFAULT_PYTHON": newest}
    try:
        yield home / "bin", folders | chosen
    finally:
        shutil.rmtree(home)  # some gigabytes


@pytest.mark.long  # it installs about 600 MB
def test_the_first_lines_of_the_readme_bring_up_a_cluster(
    wheel: Path, runners: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    programs, environment = runners
    (block,) = re.findall(r"^```sh\n(uvx .*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    script = block.replace("'waltzd[local]'", f"'{wheel}[local]'")
    assert script.count(str(wheel)) == len(block.splitlines())
    environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    try:
        said = run(["bash", "-e", "-c", script], tmp_path, **environment)
    finally:
        subprocess.run([sys.executable, "-m", "waltzctl", "down", "trial"], cwd=tmp_path, capture_output=True, check=False)
    assert "4 partitions open, on 2 servers and 3 storages" in said
    assert "committed: partition 0, id 0" in said
    assert "6 processes stopped" in said
    words = ["pipx", "run", "--spec", f"{wheel}[tools]", "waltzctl", "--version"]
    assert run([programs / words[0], *words[1:]], tmp_path, **environment) == "waltzctl 0.1.0\n"
