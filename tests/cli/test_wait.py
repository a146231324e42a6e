"""`waltzctl cluster wait` between two steps of an upgrade, with real daemons."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.example import examples
from tests.cli.outcome import refused
from waltzctl.health import troubles
from waltzctl.local_cluster.local import LocalCluster

Tool = Callable[..., Any]
PATIENCE_SECONDS = 120
WITHOUT = ("cluster", "wait", "--without")


def test_what_the_help_shows_waits_for_a_cluster_that_is_well(own: LocalCluster, waltzctl: Tool) -> None:
    for typed in examples(waltzctl, ["cluster", "wait"]):
        told = waltzctl(*typed, "--directory", own.directory)
        assert told.code == 0, told
        assert ("storage-1 may be stopped" if "--without" in typed else "HEALTHY") in told.out
    assert json.loads(waltzctl(*WITHOUT, "storage-1", "-o", "json", "--directory", own.directory).out)["may_stop"]
    refused(waltzctl("cluster", "wait", "--directory", own.directory), 2, "--healthy")
    refused(waltzctl("cluster", "wait", "--without", "storage-9", "--directory", own.directory), 3, "storage-9")


def test_a_slow_look_is_a_note_and_closes_no_gate(
    own: LocalCluster, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(troubles, "SLOW_MS", 0.0)
    told = waltzctl("cluster", "wait", "--healthy", "--directory", own.directory, "-o", "json")
    found = json.loads(told.out)
    assert (told.code, found["verdict"], found["reasons"]) == (0, "HEALTHY", []), told
    assert any(note.startswith("storage-1 took ") for note in found["notes"])
    assert "note: storage-1 took " in waltzctl("status", "--directory", own.directory).out


def test_a_second_storage_is_stopped_only_when_the_first_is_level_again(own: LocalCluster, waltzctl: Tool) -> None:
    where = ("--directory", own.directory)
    own.daemons["storage-2"].kill()
    ends = time.monotonic() + PATIENCE_SECONDS
    while (told := waltzctl("cluster", "wait", "--without", "storage-1", "--timeout", "0", *where)).code == 0:
        assert time.monotonic() < ends, "the owner notices that storage-2 is gone"
        time.sleep(0.1)
    refused(told, 5, "partition 0 would have 1 of 3 members level", "wait: `waltzctl cluster wait --healthy`")
    assert waltzctl("cluster", "wait", "--without", "storage-2", "--timeout", "0", *where).code == 0, "it is down already"
    gate = waltzctl("cluster", "wait", "--healthy", "--timeout", "0", *where)
    assert (gate.code, "DEGRADED" in gate.out) == (10, True)
    words = ["cluster", "wait", "--without", "storage-1", "--timeout", str(PATIENCE_SECONDS)]
    waiting = subprocess.Popen([sys.executable, "-m", "waltzctl", *words, "--directory", str(own.directory)])
    try:
        assert waiting.poll() is None
        own.start_one("storage-2")
        assert waiting.wait(PATIENCE_SECONDS) == 0
    finally:
        waiting.kill()
        waiting.wait()


def test_without_a_server_it_is_not_known_whether_a_storage_may_be_stopped(own: LocalCluster, waltzctl: Tool) -> None:
    for name in own.blueprint.server_names:
        own.daemons[name].ask_to_end()
        assert own.daemons[name].wait_end(PATIENCE_SECONDS)
    told = waltzctl("cluster", "wait", "--without", "storage-1", "--timeout", "3600", "--directory", own.directory)
    refused(told, 5, "whether storage-1 may be stopped is not known", "ZooKeeper lists no server", "start a server")
