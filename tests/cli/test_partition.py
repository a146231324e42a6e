"""`waltzctl partition` and `storage list` in a real cluster that stays in use: who holds what, and moving replicas."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.cli.document_tree import document_tree
from tests.cli.example import examples
from tests.cli.moving_words import PATIENCE_SECONDS, bounded
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.placement.daemons import Daemons
from waltzd.client.loop import run

Tool = Callable[..., Any]
STORAGES = ["storage-1", "storage-2", "storage-3"]


@pytest.fixture
def tool(live: LocalCluster, waltzctl: Tool) -> Iterator[Tool]:
    """Commands for the shared cluster; afterwards every partition has three replicas again, all level."""

    def call(*words: str) -> Any:
        return waltzctl(*bounded(words), "--directory", live.directory)

    settle(live)
    yield call
    done = call("cluster", "set", "--replicas", "3", "--yes", "--confirm", "local")
    assert done.code == 0, done
    settle(live)


def settle(live: LocalCluster) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := run(live.snapshot())).is_healthy or found.moves:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def replicas(tool: Tool) -> dict[int, list[str]]:
    """Learners have a star."""
    return {row["partition"]: row["replicas"] for row in as_json(tool("partition", "list", "-o", "json"))["partitions"]}


def as_json(told: Any) -> Any:
    assert told.code == 0, told
    found = json.loads(told.out)
    assert found["version"] == 1
    return found


def test_lists(tool: Tool) -> None:
    told = tool("partition", "list")
    assert (told.code, told.err) == (0, "")
    assert told.out.count("  open  ") == 5
    assert "4 (groups)" in told.out
    assert all(len(line) <= 80 for line in told.out.splitlines())
    assert tool("partition", "list", "-o", "name").out.split() == ["0", "1", "2", "3", "4"]
    rows = as_json(tool("partition", "list", "-o", "json"))["partitions"]
    assert [row["partition"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["holds"] for row in rows] == ["transactions"] * 4 + ["groups"]
    assert {(row["state"], row["level"], row["waiting"]) for row in rows} == {("open", 3, "")}
    assert {row["owner"] for row in rows} <= {"server-1", "server-2"}
    assert all(row["replicas"] == STORAGES for row in rows)
    wide = tool("partition", "list", "-o", "wide").out
    assert "generation" in wide
    assert "generation" not in told.out
    assert yaml.safe_load(tool("partition", "list", "-o", "yaml").out)["partitions"] == rows

    table = list(csv.DictReader(io.StringIO(tool("storage", "list", "-o", "csv").out)))
    assert [(row["storage"], row["state"], row["group"], row["replicas"]) for row in table] == [
        (name, "up", name, "5") for name in STORAGES
    ]
    assert tool("storage", "list", "-o", "name").out.split() == STORAGES
    assert all(len(line) <= 80 for line in tool("storage", "list").out.splitlines())
    held = as_json(tool("storage", "describe", "storage-2", "-o", "json"))["assigned"]
    assert [(row["partition"], row["status"]["is_sound"]) for row in held] == [(number, True) for number in range(5)]
    told = tool("storage", "describe", "storage-9")
    assert (told.code, told.out) == (3, "")
    assert "did you mean storage-" in told.err


def test_one_partition(tool: Tool) -> None:
    told = tool("partition", "describe", "2")
    assert (told.code, told.err) == (0, "")
    assert all(name in told.out for name in STORAGES)
    found = as_json(tool("partition", "describe", "2", "-o", "json"))
    assert found["partition"] == 2
    assert found["is_open"]
    assert "the group log" in tool("partition", "describe", "4").out
    told = tool("partition", "describe", "5")
    assert (told.code, told.out) == (3, "")
    assert "there is no partition 5; the cluster has 4, from 0 on" in told.err
    assert tool("partition", "describe", "one").code == 2


def test_a_replica_less_and_a_replica_more(tool: Tool, live: LocalCluster) -> None:
    words = ["partition", "assign", "1", "--off", "storage-3"]
    asked = tool(*words, "--yes")
    assert asked.code == 2, "of two replicas none may fail: that is agreed to by name"
    assert "say --confirm 1" in asked.err
    done = tool(*words, "--confirm", "1")
    assert (done.code, done.err) == (0, ""), done
    assert done.out.startswith("done: partition assign 1\n  partition 1: leave storage-3\n")
    assert "1 (3 of 3 members level)" in done.out
    assert "0 (2 of 2 members level)" in done.out
    assert replicas(tool) == {0: STORAGES, 1: STORAGES[:2], 2: STORAGES, 3: STORAGES, 4: STORAGES}
    assert tool("storage", "describe", "storage-3", "-o", "name").out.split() == ["0", "2", "3", "4"]
    again = as_json(tool(*words, "-o", "json"))
    assert (again["result"], again["steps"]) == ("nothing-to-do", [])

    before = document_tree(str(live.directory))
    dry = as_json(tool("partition", "assign", "0-3", "--to", "storage-3", "--dry-run", "-o", "json"))
    assert (dry["result"], dry["steps"][0]) == ("dry-run", "partition 1: copy to storage-3")
    assert re.fullmatch(r"copy [0-9.]+ k?B in all, at most as fast as .*", dry["steps"][1])
    assert document_tree(str(live.directory)) == before
    done = as_json(tool("partition", "assign", "0-3", "--to", "storage-3", "--yes", "-o", "json"))
    assert (done["result"], done["cleared"]) == ("done", {})
    assert replicas(tool) == dict.fromkeys(range(5), STORAGES)
    assert as_json(tool("partition", "auto-assign", "-o", "json"))["result"] == "nothing-to-do"


def test_fewer_replicas_everywhere(tool: Tool) -> None:
    done = as_json(tool("cluster", "set", "--replicas", "1", "--confirm", "local", "-o", "json"))
    assert done["result"] == "done"
    found = replicas(tool)
    assert sorted(len(names) for names in found.values()) == [1, 1, 1, 1, 1]
    assert {name for names in found.values() for name in names} == set(STORAGES), "evenly"
    assert sum(map(len, done["cleared"].values())) == 10
    holder = found[0][0]
    other = next(name for name in STORAGES if name != holder)
    told = tool("partition", "assign", "0", "--off", holder, "--yes")
    assert (told.code, told.out) == (5, "")
    assert "partition 0 would have no replica" in told.err
    assert as_json(tool("partition", "assign", "0", "--to", other, "--yes", "-o", "json"))["result"] == "done"
    done = as_json(tool("partition", "assign", "0", "--off", holder, "--yes", "--confirm", "0", "-o", "json"))
    assert (done["result"], replicas(tool)[0]) == ("done", [other]), "the last replica has moved"


def test_what_takes_too_long_is_gone_on_with(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the daemons are: the command does not look at them a second time."""
    assert tool("partition", "assign", "0", "--off", "storage-1", "--confirm", "0").code == 0

    async def wait(_: Daemons) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(Daemons, "pause", wait)
        told = tool("partition", "assign", "0", "--to", "storage-1", "--yes", "--timeout", "0.3")
    assert (told.code, told.out) == (7, "")
    assert "W2105 not done within 0.3 seconds: " in told.err
    assert "Traceback" not in told.err
    shown = tool("partition", "describe", "0")
    assert "on its way to storage-1, storage-2, storage-3" in shown.out
    assert as_json(tool("partition", "list", "-o", "json"))["partitions"][0]["moves_to"] == STORAGES
    assert as_json(tool("history", "-n", "1", "-o", "json"))["history"][0]["outcome"].startswith("W2105 ")
    done = as_json(tool("partition", "assign", "--yes", "-o", "json"))
    assert done["result"] == "done"
    assert replicas(tool)[0] == STORAGES


def test_what_cannot_be_meant(tool: Tool, live: LocalCluster) -> None:
    before = document_tree(str(live.directory))
    for words, code, said in (
        (["assign", "0", "--to", "storage-9"], 3, "did you mean storage-"),
        (["assign", "5", "--to", "storage-1"], 3, "W2007"),
        (["assign", "0x", "--to", "storage-1"], 2, "'0x' is no partition"),
        (["assign", "0", "--to", "storage-1,"], 2, "is not a list of storages"),
        (["assign", "--to", "storage-1"], 2, "Name PARTITIONS"),
        (["assign", "0", "--off", "storage-1", "--cancel"], 2, "--cancel goes without"),
        (["assign", "0", "--off", "storage-1,storage-2,storage-3"], 5, "would have no replica"),
        (["assign", "0-1", "--off", "storage-9"], 3, "W2102"),
        (["assign", "0", "--off", "storage-1"], 2, "say --confirm 0"),
        (["auto-assign", "--replicas", "4"], 2, "W1001"),
        (["auto-assign", "--replicas", "0"], 2, "--replicas"),
        (["assign", "0", "--to", "storage-1", "--timeout", "0"], 2, "--timeout"),
    ):
        told = tool("partition", *words)
        assert (told.code, told.out) == (code, ""), told
        assert said in told.err, told
        assert "Traceback" not in told.err
    assert document_tree(str(live.directory)) == before


def test_the_examples_of_the_help_run(tool: Tool, waltzctl: Tool) -> None:
    for words in (
        ["partition", "list"],
        ["partition", "describe"],
        ["partition", "assign"],
        ["partition", "auto-assign"],
        ["storage", "list"],
        ["cluster", "finalize"],
        ["cluster", "set"],
        ["history"],
    ):
        for typed in examples(waltzctl, words):
            if any(":" in word for word in typed):
                continue  # by an address: those are in test_storage
            if "--secure" in typed:
                continue  # needs a closed coordinator: tests/process/test_closed_coordinator.py runs it
            told = tool(*typed)
            if "--keep-local" in typed:  # nothing is archived here
                assert (told.code, "nothing of the cluster" in told.err) == (5, True), told
                continue
            assert (told.code, told.err) == (0, ""), (typed, told)
    for typed in examples(waltzctl, ["cluster", "delete"]):
        told = tool(*typed)
        assert (told.code, "server-1, server-2 run and own its partitions" in told.err) == (5, True)
