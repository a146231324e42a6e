"""The bill of materials and the requirements of a machine: complete, the same every time, and no tool of developers."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.sbom import ROOT, Locked, bill, locked, needed, plain, requirements, wanted_by

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = locked((ROOT / "requirements.lock").read_text(encoding="utf-8"))


def names(text: str) -> set[str]:
    return set(re.findall(r"^([\w.-]+)==", text, re.M))


def test_every_package_that_waltz_stands_on_is_in_it_with_its_hashes() -> None:
    found = bill(PROJECT, LOCK)
    components = {one["name"]: one for one in found["components"]}
    direct = {name for name, _ in wanted_by(PROJECT["dependencies"], ())}
    assert direct <= components.keys()
    assert all(components[name]["scope"] == "required" for name in direct)
    assert components["pyspark"]["scope"] == "optional"
    assert not {"pytest", "mypy", "ruff", "hypothesis"} & components.keys(), "what developers use is not delivered"
    for name, one in components.items():
        hashes = [reference["hashes"][0]["content"] for reference in one["externalReferences"]]
        assert hashes
        assert all(re.fullmatch(r"[0-9a-f]{64}", content) for content in hashes), name
    assert found["metadata"]["component"]["licenses"] == [{"expression": "Apache-2.0"}]


def test_the_document_holds_together_and_is_the_same_every_time() -> None:
    found = bill(PROJECT, LOCK)
    assert found == bill(PROJECT, LOCK)
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
    references = [found["metadata"]["component"]["bom-ref"], *(one["bom-ref"] for one in found["components"])]
    assert len(set(references)) == len(references)
    assert {one["ref"] for one in found["dependencies"]} == set(references)
    assert all(below in references for one in found["dependencies"] for below in one["dependsOn"])
    other = {**LOCK, "rich": (Locked("rich", "99", "", LOCK["rich"][0].hashes),)}
    assert bill(PROJECT, other)["serialNumber"] != found["serialNumber"]


def test_a_machine_gets_what_it_runs_and_nothing_else() -> None:
    usual = names(requirements(PROJECT, LOCK, ()))
    assert {"grpcio", "protobuf", "numpy"} <= usual
    assert not {"kazoo", "typer", "pyspark", "pytest", "sqlalchemy"} & usual
    assert {"kazoo", "typer", "uvloop"} <= names(requirements(PROJECT, LOCK, ["daemon"])), "an extra may name another"
    assert {"sqlalchemy"} <= names(requirements(PROJECT, LOCK, ["sql"])) - usual


@pytest.mark.slow
@pytest.mark.parametrize("extras", [(), ("daemon", "sql")])
def test_pip_takes_the_requirements_with_their_hashes(tmp_path: Path, extras: tuple[str, ...]) -> None:
    """Where all of it is installed already, pip asks no index."""
    path = tmp_path / "requirements.txt"
    path.write_text(requirements(PROJECT, LOCK, extras))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--require-hashes", "-r", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_how_requirements_are_read() -> None:
    texts = ["Foo_Bar[one, two]>=1; python_version >= '3.11'", "baz; extra == 'more'", 'qux<2 ; extra == "other"']
    assert wanted_by(texts, ()) == [("foo-bar", ("one", "two"))]
    assert wanted_by(texts, ("more",)) == [("foo-bar", ("one", "two")), ("baz", ())]
    assert plain("A.b__C") == "a-b-c"
    first = "one==1.0 ; sys_platform == 'win32' \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb"
    text = f"{first}\none==2.0 ; sys_platform != 'win32' \\\n    --hash=sha256:dd\ntwo==2 \\\n    --hash=sha256:cc"
    found = locked(text)
    assert found["one"][0] == Locked("one", "1.0", "sys_platform == 'win32'", ("aa", "bb"))
    assert [one.version for one in found["one"]] == ["1.0", "2.0"], "each for other machines"
    assert "".join(one.requirement + "\n" for some in found.values() for one in some).strip() == text
    assert needed([("one", ()), ("nobody", ())], found) == {"one": []}
