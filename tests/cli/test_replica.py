"""Replicas taken off, made and switched by the name of a storage, in the shared cluster: like every change of a cluster,
also when whoever does it is told to end."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.document_tree import document_tree
from tests.cli.moving_words import PATIENCE_SECONDS
from tests.cli.outcome import refused
from tests.cli.replicas import make_replicas
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell.change import Change, ChangeCommand, ConfirmOptions
from waltzctl.shell.cluster_target import resolve
from waltzctl.shell.interruption import Interrupted
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Plan
from waltzd.client.loop import run
from waltzd.cluster.cluster import Cluster

Tool = Callable[..., Any]
YES = ConfirmOptions(is_dry=False, yes=True, confirm=None, reason=None, override=None)


@pytest.fixture
def tool(live: LocalCluster, waltzctl: Tool) -> Iterator[Tool]:
    def call(*words: str) -> Any:
        return waltzctl("storage", *words, "--directory", live.directory)

    settle(live)
    yield call
    settle(live)


def settle(live: LocalCluster) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := run(live.snapshot())).is_healthy:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def newest(waltzctl: Tool, live: LocalCluster) -> Any:
    told = waltzctl("history", "-n", "1", "-o", "json", "--directory", live.directory)
    return json.loads(told.out)["history"][0]


def test_a_forgotten_replica_is_set_aside_and_deleted_later(tool: Tool, waltzctl: Tool, live: LocalCluster) -> None:
    def assign(*words: str) -> None:
        done = waltzctl("partition", "assign", "0", *words, "--confirm", "0", "--directory", live.directory)
        assert done.code == 0, done

    assign("--off", "storage-1")
    make_replicas(live.blueprint.addresses("storage-1")[1], 0)
    words = ["recover", "storage-1", "--clean"]
    before = document_tree(str(live.directory))
    planned = tool(*words, "--dry-run")
    assert (planned.code, planned.err) == (0, ""), planned
    assert "set aside the files of partition 0 on storage-1; not assigned to it" in planned.out
    assert "delete 0.set-aside-" in planned.out
    refused(tool(*words, "--yes"), 2, "W2101", "say --confirm storage-1")
    refused(tool(*words, "0", "--yes"), 2, "--clean is for a whole storage")
    assert document_tree(str(live.directory)) == before
    done = json.loads(tool(*words, "--confirm", "storage-1", "--reason", "a trial", "-o", "json").out)
    assert done["set_aside"] == [0]
    assert any(one["name"].startswith("0.set-aside-") for one in done["deleted"])  # and what other tests left
    entry = newest(waltzctl, live)
    assert (entry["verb"], entry["subject"], entry["outcome"], entry["reason"]) == (
        "storage recover --clean", "storage-1", "done", "a trial",
    )  # fmt: skip
    assert json.loads(tool(*words, "--confirm", "storage-1", "-o", "json").out)["set_aside"] == []
    assert tool(*words).out == "nothing to do: storage recover --clean storage-1\n"
    assign("--to", "storage-1")


def test_a_replica_goes_offline_as_a_change_of_the_cluster(tool: Tool, live: LocalCluster) -> None:
    words = ["availability", "storage-1", "0", "--offline"]
    refused(tool(*words, "--yes", "--key", "00000000-0000-0000-0000-000000000001"), 4, "W2002")
    refused(tool("availability", "storage-1", "7", "--offline", "--yes"), 3, "W2007")
    assert tool("availability", "storage-2", "0", "--offline", "--confirm", "storage-2").code == 0
    refused(tool(*words, "--confirm", "storage-1"), 5, "W2100", "partition 0 would have 1 of 3 members level")
    assert tool("availability", "storage-2", "0", "--online", "--yes").code == 0


def test_in_a_protected_context_its_name_is_typed(
    tool: Tool, waltzctl: Tool, live: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WALTZ_CONTEXTS", str(tmp_path / "contexts.yml"))
    assert waltzctl("context", "add", "production", "--directory", live.directory, "--protected").code == 0
    told = waltzctl("storage", "availability", "storage-1", "0", "--online", "--yes", "--context", "production")
    refused(told, 2, "W2101", "production")
    assert tool("describe", "storage-1").code == 0


def test_by_an_address_there_is_no_plan(tool: Tool, live: LocalCluster) -> None:
    address = live.blueprint.addresses("storage-1")[1]
    for option in (["--dry-run"], ["--reason", "x"], ["--confirm", "storage-1"], ["--override", "storage-1"]):
        refused(tool("availability", address, "0", "--online", *option), 2, "need the name of a storage")


# -- told to end -------------------------------------------------------------------------------------------------------


class Leaving(io.StringIO):
    """Whoever sits there leaves instead of answering."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGHUP)
        return ""


def test_told_to_end_at_the_question(tool: Tool, live: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    before, on_hangup = document_tree(str(live.directory)), signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr("sys.stdin", Leaving())
    told = tool("availability", "storage-1", "0", "--offline")
    assert (told.code, told.out) == (130, "")
    assert told.err.endswith("\nInterrupted. Nothing was changed.\n")
    assert document_tree(str(live.directory)) == before
    assert signal.getsignal(signal.SIGHUP) is on_hangup


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_told_to_end_while_it_is_done(waltzctl: Tool, live: LocalCluster, number: signal.Signals) -> None:
    """It is in the history, and what is said leaves nothing out."""

    async def prepare(_cluster: Cluster) -> Change:
        return Change(plan=Plan(verb="storage add", subject=f"trial-{number}", steps=("wait",)), do=do)

    async def do(_cluster: Cluster, _report: Report) -> Mapping[str, Any]:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()
        raise AssertionError("nobody was told")

    with pytest.raises(Interrupted, match=r"Completed steps stay.* Run the same command again"):
        ChangeCommand(confirmation=YES, target=resolve({"directory": str(live.directory)})).perform(prepare)
    entry = newest(waltzctl, live)
    assert (entry["subject"], entry["outcome"]) == (f"trial-{number}", "interrupted")
    assert entry["ended"] is not None
