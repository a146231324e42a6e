"""House style that no linter knows, as an ordinary test. Every message says what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import HEAVY

ROOT = Path(__file__).parents[2]
LINES_MAX = {
    "spark": 8_540, "waltzctl": 26_050, "waltzd": 1_870, "waltzd/archive": 4_305, "waltzd/client": 9_145,
    "waltzd/cluster": 3_875, "waltzd/daemon": 2_865, "waltzd/disk": 925, "waltzd/format": 3_840, "waltzd/observe": 385,
    "waltzd/protocol": 4_285, "waltzd/server": 1_915, "waltzd/server/clients": 3_490, "waltzd/server/core": 2_365,
    "waltzd/server/groups": 1_705, "waltzd/server/session": 3_630, "waltzd/server/subscriptions": 2_225, "waltzd/sql":
    1_930, "waltzd/storage": 3_195, "waltzd/storage/offline": 1_690, "waltzd/storage/replica": 4_635, "waltzd/testing":
    1_825, "waltzd/wire": 5_530,
}  # fmt: skip
"""Lines of the modules directly in each room of `waltzd`, and of all modules in `waltzctl` and `spark`. `errors` is a
list of similar entries and does not count."""
FORBIDDEN_WORDS = {"utils", "util", "common", "helpers", "helper", "manager", "impl", "base"}
TEXT_SUFFIXES = {".py", ".pyi", ".md", ".yml", ".toml", ".lock", ".proto", ".hex", ".json", ".service", ""}
NOT_OURS = {".git", ".venv", ".local", "waltz-local", "build", "dist", "fixtures", "__pycache__"}

MACHINE_PATH = re.compile(r"/(?:work|root|home|Users)/")
REGISTRY = re.compile("|".join([r"pypi\.", "python" + "hosted", "arti" + "factory", "ne" + r"xus\.", "index" + "-url"]))
UNFINISHED = re.compile(r"\b(?:TO" + "DO|FIX" + "ME|XX" + r"X)\b|raise NotImplemented" + "Error")


def files() -> list[Path]:
    """Every text file of the project, in a clone or an unpacked archive."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(
            name for name in folders if name not in NOT_OURS and not name.endswith((".egg-info", "_cache", ".hypothesis"))
        )
        ours = [Path(folder, name) for name in sorted(names) if name not in NOT_OURS]  # in a worktree .git is a file
        found += [path for path in ours if path.suffix in TEXT_SUFFIXES]
    return found


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


FILES = files()
MODULES = [path for path in FILES if path.suffix == ".py" and "_pb2" not in path.name]
PRODUCT = [path for path in MODULES if path.relative_to(ROOT).parts[0] != "tests"]


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def lines_with(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(text(path).splitlines(), 1)
        if pattern.search(line)
    ]


def test_there_is_something_to_look_at() -> None:
    assert {"dev", "README.md", "pyproject.toml", "requirements.lock", ".ci/run"} <= set(names(FILES))
    assert len(PRODUCT) >= 20


def test_nothing_depends_on_one_machine() -> None:
    assert lines_with(MACHINE_PATH, FILES) == [], "say it relative to the project, or take it as an argument"


def test_nothing_names_a_package_registry() -> None:
    assert lines_with(REGISTRY, FILES) == [], "where packages come from is the business of the machine, not the project"
    installing = [ROOT / name for name in ("requirements.lock", "dev", ".ci/run")]
    assert lines_with(re.compile("://"), installing) == [], "the lock is names, versions and hashes: run ./dev lock"


def test_the_lock_has_a_version_and_hashes_for_everything() -> None:
    entries = re.split(r"\n(?=\S)", text(ROOT / "requirements.lock").strip())
    bad = [entry.splitlines()[0] for entry in entries if not re.match(r"[\w.-]+==\S+.*\\\n +--hash=sha256:", entry)]
    assert bad == [], "run ./dev lock"
    assert len(entries) > 20


def test_nothing_is_left_for_later() -> None:
    assert lines_with(UNFINISHED, MODULES) == [], "finish it, leave it out, or say in the documentation what is missing"


def test_rooms_keep_to_their_budgets() -> None:
    sizes = Counter[str]()
    for path in PRODUCT:
        parts = path.relative_to(ROOT).parts
        if parts[:2] != ("waltzd", "errors"):
            sizes["/".join(parts[:-1]) if parts[0] == "waltzd" else parts[0]] += len(text(path).splitlines())
    assert sizes.keys() == LINES_MAX.keys(), "each room has a budget"
    over = {room: (lines, LINES_MAX[room]) for room, lines in sizes.items() if lines > LINES_MAX[room]}
    assert over == {}, "room: (lines, budget); find what can go before a budget is raised"


def test_names_say_what_a_thing_is() -> None:
    vague = [
        name for name in names(MODULES) if FORBIDDEN_WORDS & {word for part in Path(name).parts for word in words(part)}
    ]
    assert vague == [], "name the module for the thing that it is"


def words(part: str) -> list[str]:
    return part.removesuffix(".py").lower().split("_")


DOCSTRING = re.compile(r'(?:#.*\n|\s)*r?"""\s*[^\s"]')
"""How a module begins whose first statement is a docstring."""


def test_every_module_begins_with_how_to_think_about_it() -> None:
    silent = [path for path in MODULES if text(path).strip() and not DOCSTRING.match(text(path))]
    assert names(silent) == [], "begin with a few sentences: what it is, what it never does, where the hard part is"


def test_the_architecture_names_each_room() -> None:
    said, top = set[str](), ""
    for line in text(ROOT / "ARCHITECTURE.md").splitlines():
        if head := re.search(r"\| room of `([\w/]+)/` \|", line):
            top = f"{head[1]}/"
        elif line.startswith("|"):
            said |= {top + room for room in re.findall(r"`([\w/]+)`", line.rpartition(" | ")[0])}
        else:
            top = ""
    rooms = {path.relative_to(ROOT).parent.as_posix() for path in PRODUCT if path.name != "__init__.py"}
    rooms -= {"waltzd", "waltzctl", "spark/waltz_spark", "spark/pyspark_waltz"}
    assert said - {"waltzd/serializers", "waltzd/dcb", "waltzd/eventsourcing"} == rooms, "a row for each folder"


def test_every_package_is_shipped() -> None:
    find = tomllib.loads(text(ROOT / "pyproject.toml"))["tool"]["setuptools"]["packages"]["find"]
    tops = {path.relative_to(ROOT).as_posix().removeprefix("spark/").partition("/")[0] for path in PRODUCT}
    assert {f"{top}*" for top in tops} == set(find["include"]), "tool.setuptools in pyproject.toml says what is shipped"
    bare = {str(path.parent.relative_to(ROOT)) for path in PRODUCT if not (path.parent / "__init__.py").exists()}
    assert bare == set(), "a folder without __init__.py is no package, and is not shipped"


def test_what_takes_longest_is_there() -> None:
    assert [name for name in HEAVY if not (ROOT / "tests" / name).exists()] == [], (
        "name it in tests/conftest.py as it is now"
    )


def test_test_folders_are_no_packages() -> None:
    assert [name for name in names(MODULES) if name.startswith("tests/") and name.endswith("__init__.py")] == []


@pytest.mark.parametrize("script", ["dev", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK), f"chmod +x {script}"
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


def test_dev_lists_its_verbs_and_refuses_others() -> None:
    usage = subprocess.run(["./dev", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for verb in ("demo", "test", "generate", "lock", "crash-test", "bench"):
        assert f"  {verb} " in usage
    wrong = subprocess.run(["./dev", "dance"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "./dev has no verb 'dance'" in wrong.stderr


def test_protobuf_modules_are_fresh(tmp_path: Path) -> None:
    name = "waltzd/wire/wire.proto"
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "mypy")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=.", *outputs, name]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, check=True, capture_output=True)
    made = sorted((tmp_path / "waltzd/wire").iterdir())
    assert len(made) == 2
    for file in made:
        assert text(ROOT / "waltzd/wire" / file.name) == text(file), f"{file.name} is stale: run ./dev generate"


def test_the_generated_modules_run_with_the_oldest_versions_that_are_allowed() -> None:
    needed = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]["dependencies"]
    protobuf = re.search(r"Protobuf Python Version: ([\d.]+)", text(ROOT / "waltzd/wire/wire_pb2.py"))
    assert protobuf
    assert any(name.startswith(f"protobuf>={protobuf[1]}") for name in needed), "raise it in pyproject.toml"


def test_links_in_documents_lead_somewhere() -> None:
    dead = [
        f"{path.relative_to(ROOT)}: {link}"
        for path in FILES
        if path.suffix == ".md"
        for link in re.findall(r"\]\(([^)#:]+)\)", text(path))
        if not (path.parent / link).exists()
    ]
    assert dead == []
