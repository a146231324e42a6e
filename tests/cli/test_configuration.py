"""`waltzctl config`: what is wrong with a file, what is in force, and what a setting means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Tool
from tests.cli.example import examples
from waltzctl.config.configuration import KINDS, kind_of
from waltzctl.playground.local import LocalCluster
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
def nothing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster of whoever runs the tests."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WALTZ_CONTEXTS", str(tmp_path / "contexts.yml"))
    for name in ("CONTEXT", "DIRECTORY", "COORDINATOR", "ROOT", "TLS_CERTIFICATE", "TLS_KEY", "TLS_CA"):
        monkeypatch.delenv(f"WALTZ_{name}", raising=False)


@pytest.mark.parametrize("command", ["validate", "show", "explain"])
def test_examples_run(waltzctl: Tool, command: str) -> None:
    for words in examples(waltzctl, ["config", command]):
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
        (b"", "do not tell"),
        (b"log_level: info\n", "do not tell"),
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
    shown = waltzctl("config", "show", path)
    assert (shown.code, shown.out) == (2, "")
    assert said in shown.err
    assert "Traceback" not in shown.err


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


# -- show --------------------------------------------------------------------------------------------------------------


def test_where_each_value_in_force_comes_from(waltzctl: Tool, tmp_path: Path) -> None:
    path = tmp_path / "storage.yml"
    path.write_text("directory: /data\n\nsegment_bytes_max: 1048576\npartitions:\nlog_level: info\n")
    found = json.loads(waltzctl("config", "show", path, "-o", "json").out)
    assert (found["version"], found["path"], found["daemon"]) == (1, str(path), "storage")
    rows = {row["setting"]: (row["value"], row["origin"], row["line"]) for row in found["settings"]}
    assert list(rows) == list(declared(KINDS["storage"]))
    assert rows["directory"] == ("/data", "line 1", 1)
    assert rows["segment_bytes_max"] == ("1MiB", "line 3", 3)
    assert rows["partitions"] == (None, "line 4", 4)
    assert rows["log_level"] == ("info", "line 5", 5), "also where it says what the default says"
    assert rows["flush_threads"] == ("4", "default", None)


def test_a_file_with_problems_is_not_shown(waltzctl: Tool, bad: Path) -> None:
    outcome = waltzctl("config", "show", bad)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("W1002 ")
    assert "the daemon was not started" not in outcome.err


# -- explain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({name for settings in KINDS.values() for name in declared(settings)}))
def test_every_setting_is_explained(waltzctl: Tool, name: str) -> None:
    text = waltzctl("config", "explain", name).out
    found = json.loads(waltzctl("config", "explain", name, "-o", "json").out)
    assert [daemon["daemon"] for daemon in found["daemons"]] == [k for k, kind in KINDS.items() if name in declared(kind)]
    for daemon in found["daemons"]:
        assert " ".join(daemon["meaning"].split()) in " ".join(text.split())
        assert f"{name}: {daemon['example']}" in text
        assert daemon["is_required"] or daemon["example"], "an example for all"


def test_settings_that_two_daemons_share(waltzctl: Tool) -> None:
    assert waltzctl("config", "explain", "log_level").out.startswith("log_level, of a storage and a server\n")
    listen = waltzctl("config", "explain", "listen").out
    assert "listen, of a storage\n" in listen
    assert "listen, of a server\n" in listen
    assert "Bounds:  from 1 to 60 seconds" in waltzctl("config", "explain", "session_seconds").out


def test_a_setting_that_is_not_there(waltzctl: Tool) -> None:
    outcome = waltzctl("config", "explain", "drain_second")
    assert (outcome.code, outcome.out) == (3, "")
    assert "did you mean drain_seconds?" in outcome.err


def test_a_cluster_on_this_machine_is_meant(waltzctl: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    LocalCluster.make(tmp_path / "waltz-local")
    monkeypatch.chdir(tmp_path)
    found = json.loads(waltzctl("config", "explain", "-o", "json").out)
    values = {row["setting"]: row["value"] for row in found["values"]}
    assert values["directory"] == "waltz-local"
    assert values["coordinator"] == found["coordinator"]
    assert values["root"] == found["root"]
    assert "the cluster that `waltzctl up` made here" in {row["origin"] for row in found["values"]}


def test_which_cluster_is_meant_and_who_said_so(waltzctl: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert waltzctl("config", "explain").code == 2
    (tmp_path / "contexts.yml").write_text(
        "current: main\ncontexts:\n  main: {coordinator: 'zk1:2181', root: /waltz/main, protected: true}\n"
    )
    found = json.loads(waltzctl("config", "explain", "-o", "json").out)
    assert (found["cluster"], found["coordinator"], found["root"], found["is_protected"]) == (
        "main", "zk1:2181", "/waltz/main", True,
    )  # fmt: skip
    origins = {row["setting"]: row["origin"] for row in found["values"]}
    assert origins["coordinator"] == origins["root"] == "context main"
    monkeypatch.setenv("WALTZ_COORDINATOR", "zk2:2181")
    found = json.loads(waltzctl("config", "explain", "--root", "/other", "-o", "json").out)
    origins = {row["setting"]: (row["value"], row["origin"]) for row in found["values"]}
    assert origins == {"coordinator": ("zk2:2181", "WALTZ_COORDINATOR"), "root": ("/other", "--root")}
    table = waltzctl("config", "explain").out
    assert table.startswith("cluster zk2:2181/waltz\n")
    assert "the default" in table
