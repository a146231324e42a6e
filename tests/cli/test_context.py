"""`waltzctl context`: names for clusters, and which one is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml

from tests.cli.example import examples
from tests.cli.outcome import as_json, refused
from tests.process.certificates import Authority
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell.cluster_target import contexts_path
from waltzd.protocol.role import Role

Tool = Callable[..., Any]
NOBODY = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONTEXT", "DIRECTORY", "COORDINATOR", "ROOT"):
        monkeypatch.delenv(f"WALTZ_{name}", raising=False)
    monkeypatch.setenv("WALTZ_CONTEXTS", str(tmp_path / "config" / "contexts.yml"))
    monkeypatch.chdir(tmp_path)


TRIAL = ("--coordinator", "localhost:2181")


def test_a_name_from_its_beginning_to_its_end(waltzctl: Tool) -> None:
    assert waltzctl("context", "list").out == ("No cluster has a name: waltzctl context add NAME --coordinator HOST:PORT\n")
    added = waltzctl(
        "context", "add", "payments", "--coordinator", "zk1:2181,zk2:2181", "--root", "/waltz/p", "--protected"
    )
    assert (added.code, added.out, added.err) == (0, "payments is zk1:2181,zk2:2181/waltz/p.\n", "")
    added = waltzctl("context", "add", "trial", "--coordinator", "localhost:2181", "--use")
    assert added.out == "trial is localhost:2181/waltz, and selected.\n"
    assert waltzctl("context", "list", "-o", "name").out == "payments\ntrial\n"
    found = as_json(waltzctl("context", "list", "-o", "json"))
    assert (found["current"], found["file"]) == ("trial", str(contexts_path()))
    assert [(row["name"], row["current"], row["protected"]) for row in found["contexts"]] == [
        ("payments", False, True),
        ("trial", True, False),
    ]
    used = waltzctl("context", "use", "payments")
    assert used.out == "payments is selected: zk1:2181,zk2:2181/waltz/p, protected.\n"
    shown = as_json(waltzctl("context", "use", "-o", "json"))
    assert (shown["cluster"], shown["where"], shown["is_protected"]) == ("payments", "zk1:2181,zk2:2181/waltz/p", True)
    assert waltzctl("context", "use", "payments", "--remove").out == (
        "payments is deleted; the cluster is unchanged. No cluster is selected now.\n"
    )
    refused(waltzctl("context", "use"), 2, "W2103")
    for words, is_current in (
        (("use", "trial"), True),
        (("use", "trial", "--remove"), False),
        (("add", "trial", *TRIAL), False),
    ):
        told = as_json(waltzctl("context", *words, "-o", "json"))
        assert (told["context"], told["is_current"], told["file"]) == ("trial", is_current, str(contexts_path()))
    assert yaml.safe_load(contexts_path().read_text()) == {
        "current": None,
        "contexts": {"trial": {"coordinator": "localhost:2181"}},
    }


def test_a_name_never_comes_to_mean_another_cluster(waltzctl: Tool) -> None:
    add = ["context", "add", "payments", "--coordinator"]
    assert waltzctl(*add, "zk1:2181").code == 0
    again = waltzctl(*add, "zk1:2181", "--use")
    assert (again.code, again.out) == (0, "payments is zk1:2181/waltz, and selected.\n")
    refused(
        waltzctl(*add, "zk2:2181"), 4, "W2140 the context payments exists already: zk1:2181/waltz", "use payments --remove"
    )
    refused(waltzctl(*add, "zk1:2181", "--protected"), 4, "W2140")
    assert as_json(waltzctl("context", "list", "-o", "json"))["contexts"][0]["coordinator"] == "zk1:2181"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["add", "a b", "--coordinator", "x:1"], 2, "'a b' is not a name"),
        (["add", "a"], 2, "either a coordinator or the directory"),
        (["add", "a", "--coordinator", "x:1", "--directory", "y"], 2, "either a coordinator or the directory"),
        (["add", "a", "--directory", "nowhere"], 3, "holds no cluster"),
        (["add", "a", "--directory", "nowhere", "--root", "/x"], 2, "has its own root"),
        (["add", "a", "--coordinator", "x:y"], 2, "is not a list of ZooKeeper addresses"),
        (["add", "a", "--coordinator", "x:1", "--root", "y"], 2, "'y' is not a path"),
        (["add", "a", "--coordinator", "x:1", "--tls-key", "k"], 2, "--tls-key without"),
        (["use", "a"], 3, "there is no context a"),
        (["use", "a", "--remove"], 3, "there is no context a"),
        (["use", "--remove"], 2, "Name the context to delete."),
        (["use", "--context", "a"], 3, "there is no context a"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistyped(waltzctl: Tool, words: list[str], code: int, said: str) -> None:
    refused(waltzctl("context", *words), code, said)
    assert not contexts_path().exists()


def test_files_are_found_from_anywhere(tmp_path: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    issued = Authority(tmp_path / "tls").issue(UUID(int=7), Role.OPERATOR, "ada")
    given = ["--tls-certificate", issued.certificate, "--tls-key", issued.key, "--tls-ca", issued.ca]
    relative = [str(Path(word).relative_to(tmp_path)) if "/" in str(word) else word for word in map(str, given)]
    assert waltzctl("context", "add", "payments", "--coordinator", "zk:1", *relative, "--use").code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shown = as_json(waltzctl("context", "use", "-o", "json"))
    values = {row["setting"]: row["value"] for row in shown["settings"]}
    assert values["tls_key"] == str(issued.key)


def test_who_said_so(waltzctl: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert waltzctl("context", "add", "payments", "--coordinator", "zk1:2181", "--use").code == 0
    monkeypatch.setenv("WALTZ_ROOT", "/waltz/other")
    shown = waltzctl("context", "use")
    lines = [line.split(maxsplit=2) for line in shown.out.splitlines() if line.strip()]
    assert ["coordinator", "zk1:2181", "context payments"] in [[part.strip() for part in line] for line in lines]
    assert ["root", "/waltz/other", "WALTZ_ROOT"] in [[part.strip() for part in line] for line in lines]


def test_a_damaged_file_is_told_and_kept(waltzctl: Tool) -> None:
    contexts_path().parent.mkdir()
    contexts_path().write_text("contexts: [\n")
    for words in (["list"], ["use", "a"], ["add", "a", "--coordinator", "x:1"], ["use", "a", "--remove"], ["use"]):
        refused(waltzctl("context", *words), 2, "W2093", str(contexts_path()))
    assert contexts_path().read_text() == "contexts: [\n"


# -- contacting it -----------------------------------------------------------------------------------------------------


def test_a_cluster_answers(live: LocalCluster, tmp_path: Path, waltzctl: Tool) -> None:
    assert waltzctl("context", "add", "here", "--directory", live.directory, "--protected", "--use").code == 0
    assert waltzctl("context", "add", "there", "--coordinator", live.coordinator_hosts).code == 0
    assert waltzctl("context", "add", "empty", "--coordinator", live.coordinator_hosts, "--root", "/nothing").code == 0
    for words in ([], ["--context", "there"]):
        found = as_json(waltzctl("status", *words, "-o", "json"))["cluster"]
        assert found["cluster_key"] == str(live.blueprint.key)
    refused(waltzctl("status", "--context", "empty"), 3, "W2026")

    dry = waltzctl("server", "drain", "server-1", "--dry-run")
    assert (dry.code, dry.err) == (0, ""), "the context that is in use is meant"
    refused(waltzctl("server", "drain", "server-1", "--yes"), 2, "W2101", "say --confirm here")


def test_a_certificate_of_another_cluster(live: LocalCluster, tmp_path: Path, waltzctl: Tool) -> None:
    issued = Authority(tmp_path / "tls").issue(UUID(int=7), Role.OPERATOR, "ada")
    words = ["--tls-certificate", issued.certificate, "--tls-key", issued.key, "--tls-ca", issued.ca]
    assert waltzctl("context", "add", "there", "--coordinator", live.coordinator_hosts, *words).code == 0
    refused(waltzctl("status", "--context", "there"), 4, "W2002", str(live.blueprint.key))


def test_nobody_answers(waltzctl: Tool) -> None:
    assert waltzctl("context", "add", "gone", "--coordinator", NOBODY).code == 0
    refused(waltzctl("status", "--context", "gone"), 6, "W4001", NOBODY)


def test_the_examples_of_the_help_run(waltzctl: Tool) -> None:
    assert waltzctl("context", "add", "trial", "--coordinator", "127.0.0.1:2181").code == 0
    for words in (["add"], ["use"], ["list"]):
        for arguments in examples(waltzctl, ["context", *words]):
            done = waltzctl(*arguments)
            assert (done.code, done.err) == (0, ""), arguments
