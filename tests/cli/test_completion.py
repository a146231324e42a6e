"""What a shell offers behind TAB."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from waltzctl import main
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.main import COMPLETE
from waltzctl.shell import cluster_target

Shell = Callable[..., str]
Offered = Callable[..., list[str]]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """What the tool prints for a shell that asks with these environment variables, and with no other name of ours."""

    def ask(asked: str, **environment: str) -> str:
        with monkeypatch.context() as shells:
            for name in [name for name in os.environ if name.startswith("WALTZ_")]:
                shells.delenv(name)
            for name, value in {COMPLETE: asked, **environment}.items():
                shells.setenv(name, value)
            with pytest.raises(SystemExit):
                main.main()
        told = capsys.readouterr()
        assert told.err == ""
        return told.out

    return ask


@pytest.fixture
def offered(shell: Shell) -> Offered:
    """The last word is the one that is not finished."""

    def ask(*typed: str, **environment: str) -> list[str]:
        words = {"COMP_WORDS": " ".join(("waltzctl", *typed)), "COMP_CWORD": str(len(typed))}
        return shell("bash_complete", **words, **environment).split()

    return ask


def test_commands_and_options(offered: Offered) -> None:
    assert offered("sto") == ["storage"]
    assert {"remove", "recover"} <= set(offered("storage", "re"))
    assert "--dry-run" in offered("storage", "remove", "--d")


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_each_shell_is_told_how(name: str, shell: Shell) -> None:
    assert f"_WALTZCTL_COMPLETE=complete_{name}" in shell(f"{name}_source")


def test_bash_goes_by_what_it_was_told() -> None:
    script = """
    eval "$(_WALTZCTL_COMPLETE=bash_source waltzctl)"
    COMP_WORDS=(waltzctl storage rem); COMP_CWORD=2; _waltzctl_completion waltzctl; echo "${COMPREPLY[@]}"
    COMP_WORDS=(waltzctl status --wa); COMP_CWORD=2; _waltzctl_completion waltzctl; echo "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    told = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines() == ["remove", "--watch"]


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_others_ask_in_their_way(name: str, shell: Shell) -> None:
    asked = {"_TYPER_COMPLETE_ARGS": "waltzctl txn ta", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    told = shell(f"complete_{name}", **asked)
    assert "tail" in told
    assert "grep" not in told


def test_names_that_the_cluster_has_now(live: LocalCluster, offered: Offered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_target, "COMPLETION_SECONDS", 60)  # for a slow machine
    there = str(live.directory)
    assert offered("storage", "remove", "sto", WALTZ_DIRECTORY=there) == live.blueprint.storage_names
    assert offered("storage", "remove", "--directory", there, "") == live.blueprint.storage_names
    assert offered("server", "drain", "server-", WALTZ_DIRECTORY=there) == live.blueprint.server_names


def test_names_of_contexts(tmp_path: Path, offered: Offered) -> None:
    path = tmp_path / "contexts.yml"
    path.write_text("contexts:\n  blue: {directory: b}\n  green: {directory: g}\n")
    assert offered("context", "use", "", WALTZ_CONTEXTS=str(path)) == ["blue", "green"]
    assert offered("status", "--context", "g", WALTZ_CONTEXTS=str(path)) == ["green"]


def test_nothing_is_said_when_nobody_answers(tmp_path: Path, offered: Offered) -> None:
    nobody = {"WALTZ_COORDINATOR": "127.0.0.1:1", "WALTZ_CONTEXTS": str(tmp_path / "none.yml")}
    assert offered("storage", "remove", "sto", **nobody) == []
