"""`waltzctl config`: what is wrong with a file, and what a setting means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Tool
from tests.cli.example import examples
from waltzctl.config.configuration import KINDS, kind_of
from waltzd.daemon import config_file
from waltzd.daemon.settings import declared

ROOT = Path(__file__).parents[2]
STORAGE, SERVER = ROOT / "configs/storage.yml", ROOT / "configs/server.yml"
BAD = """\
directory: /var/lib/waltz/storage
segment_bytes: 64MiB
flush_threads: 1000

listen: nowhere
"""


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yml"
    path.write_text(BAD)
    return path


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_examples_run(waltzctl: Tool) -> None:
    for words in examples(waltzctl, ["config", "validate"]):
        outcome = waltzctl(*words)
        assert (outcome.code, outcome.err) == (0, ""), words
        assert all(len(line) <= 80 for line in outcome.out.splitlines()) or "-o" in words, outcome.out


# -- validate ----------------------------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_said_at_once_with_its_line(waltzctl: Tool, bad: Path) -> None:
    outcome = waltzctl("config", "validate", bad, SERVER)
    assert (outcome.code, outcome.err) == (2, "")
    assert outcome.out.splitlines() == [
        f"{bad}: settings of a storage with 3 problems",
        "  line 2: segment_bytes is not a setting; did you mean segment_bytes_max?",
        "  line 3: flush_threads: 1000 is above the maximum, 256",
        "  line 5: listen: 'nowhere' is not an address; write host:port, as in 127.0.0.1:55280 or [::1]:55280",
        f"{SERVER}: sound, settings of a server",
    ]


def test_the_verdict_as_json(waltzctl: Tool, bad: Path) -> None:
    found = json.loads(waltzctl("config", "validate", bad, STORAGE, "-o", "json").out)
    assert (found["version"], found["result"]) == (1, "problems")
    first, second = found["files"]
    assert [problem["line"] for problem in first["problems"]] == [2, 3, 5]
    assert second == {"path": str(STORAGE), "kind": "storage", "problems": []}
    assert json.loads(waltzctl("config", "validate", STORAGE, "-o", "json").out)["result"] == "sound"


def test_one_problem_is_told_like_many(waltzctl: Tool, tmp_path: Path) -> None:
    path = tmp_path / "one.yml"
    path.write_text("name: one\ncoordinator: here\n")
    assert waltzctl("config", "validate", path).out.splitlines()[1].startswith("  line 2: coordinator: 'here' is not")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "UTF-8"),
        (b"", "do not show"),
        (b"log_level: info\n", "do not show"),
        (b"directory: [\n", "not YAML"),
        (b"directory: /x\n" + b"#" * (64 << 10), "larger than"),
    ],
)
def test_what_is_no_configuration_file(waltzctl: Tool, tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "file.yml"
    if content is not None:
        path.write_bytes(content)
    outcome = waltzctl("config", "validate", path)
    assert outcome.code == 2
    assert said in outcome.out
    assert "Traceback" not in outcome.err


def test_a_kind_that_is_named_is_the_one(waltzctl: Tool, tmp_path: Path) -> None:
    path = tmp_path / "file.yml"
    path.write_text("log_level: info\n")
    assert "directory is missing" in waltzctl("config", "validate", path, "--kind", "storage").out
    assert "name is missing" in waltzctl("config", "validate", path, "--kind", "server").out
    assert "directory is not a setting" in waltzctl("config", "validate", STORAGE, "--kind", "server").out


# -- which keys, which kind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a: 1\nb: 2\n", {"a": 1, "b": 2}),
        ("# x\n\na: 1\n", {"a": 3}),
        ("a: b\nb: c\n", {"a": 1, "b": 2}),
        ("a: {c: d}\nb: [e, f]\ng: h\n", {"a": 1, "b": 2, "g": 3}),
        ("a: &x 1\nb: *x\nc: 2\n", {"a": 1, "b": 2, "c": 3}),
        ("a: 1\na: 2\n", {"a": 1}),
        ("a: 1\nb: [", {}),
        ("- a\n- b\n", {}),
        ("[" * 5000, {}),
    ],
)
def test_keys_and_their_lines(text: str, expected: dict[str, int]) -> None:
    assert config_file.lines(text)[0] == expected


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_key_of_its_own_tells_the_kind(kind: str) -> None:
    others = {name for other, settings in KINDS.items() if other != kind for name in declared(settings)}
    own = set(declared(KINDS[kind])) - others
    assert own
    for name in own:
        assert kind_of([name]) == kind
    assert kind_of(others & set(declared(KINDS[kind]))) is None
