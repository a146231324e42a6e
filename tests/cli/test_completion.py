"""What a shell offers behind TAB."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from waltzctl.local_cluster.local import LocalCluster

SHELL = [str(Path(sys.executable).with_name("waltzctl"))]
PATIENT = [
    sys.executable,
    "-c",
    "from waltzctl.shell import cluster_target; cluster_target.COMPLETION_SECONDS = 60; "
    "from waltzctl.main import main; main()",
]
"""The same for somebody who waits for what a slow machine says."""


def offered(*typed: str, program: Sequence[str] = SHELL, **environment: str) -> list[str]:
    """The last word is the one that is not finished."""
    told = subprocess.run(
        program,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("WALTZ_")},
            "COMP_WORDS": " ".join(("waltzctl", *typed)),
            "COMP_CWORD": str(len(typed)),
            "_WALTZCTL_COMPLETE": "bash_complete",
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stderr == ""
    return told.stdout.split()


def test_commands_and_options() -> None:
    assert offered("sto") == ["storage"]
    assert {"remove", "recover"} <= set(offered("storage", "re"))
    assert "--dry-run" in offered("storage", "remove", "--d")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_is_told_how(shell: str) -> None:
    told = subprocess.run(
        [str(Path(sys.executable).with_name("waltzctl"))],
        env={**os.environ, "_WALTZCTL_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"_WALTZCTL_COMPLETE=complete_{shell}" in told.stdout
    assert "Traceback" not in told.stderr


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


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_others_ask_in_their_way(shell: str) -> None:
    environment = {
        **os.environ, "_WALTZCTL_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "waltzctl txn ta",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }  # fmt: skip
    told = subprocess.run(SHELL, env=environment, capture_output=True, text=True, check=True)
    assert "tail" in told.stdout
    assert "grep" not in told.stdout


def test_names_that_the_cluster_has_now(live: LocalCluster) -> None:
    there, names = str(live.directory), partial(offered, program=PATIENT)
    assert names("storage", "remove", "sto", WALTZ_DIRECTORY=there) == live.blueprint.storage_names
    assert names("storage", "remove", "--directory", there, "") == live.blueprint.storage_names
    assert names("server", "drain", "server-", WALTZ_DIRECTORY=there) == live.blueprint.server_names


def test_names_of_contexts(tmp_path: Path) -> None:
    path = tmp_path / "contexts.yml"
    path.write_text("contexts:\n  blue: {directory: b}\n  green: {directory: g}\n")
    assert offered("context", "use", "", WALTZ_CONTEXTS=str(path)) == ["blue", "green"]
    assert offered("status", "--context", "g", WALTZ_CONTEXTS=str(path)) == ["green"]


def test_nothing_is_said_when_nobody_answers(tmp_path: Path) -> None:
    nobody = {"WALTZ_COORDINATOR": "127.0.0.1:1", "WALTZ_CONTEXTS": str(tmp_path / "none.yml")}
    assert offered("storage", "remove", "sto", **nobody) == []
