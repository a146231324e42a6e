"""`waltzctl policy`: against a real cluster, whose applications are all `anonymous`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.example import examples
from tests.cli.outcome import as_json, refused, until
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell.cluster_target import resolve, using
from waltzd.client.blocking import BlockingClient
from waltzd.client.settings import ClientSettings
from waltzd.cluster.cluster import POLICY, Cluster
from waltzd.cluster.coordinator import Create
from waltzd.errors import EXIT_FINDINGS

Tool = Callable[..., Any]
ALL = {"names": ["*"], "may": ["append", "read"]}
OTHERS = {"names": ["billing-*", "audit"], "may": ["append"], "partitions": "0-1", "lock_prefixes": ["account"]}


@pytest.fixture
def place(live: LocalCluster, waltzctl: Tool) -> Iterator[list[str]]:
    """How the shared cluster is reached; afterwards it has no policy."""
    where = ["--directory", str(live.directory)]
    yield where
    name = as_json(waltzctl("status", *where, "-o", "json"))["cluster"]["name"]
    assert waltzctl("policy", "set", "--none", "--confirm", name, *where).code == 0


def write(path: Path, *grants: object, **more: object) -> Path:
    path.write_text(json.dumps({"grants": grants, **more}))
    return path


def test_a_policy_from_its_file_to_its_end(place: list[str], waltzctl: Tool, tmp_path: Path) -> None:
    assert "every application may do everything" in waltzctl("policy", "explain", *place).out
    assert as_json(waltzctl("policy", "explain", *place, "-o", "json")) == {"version": 1, "exists": False, "grants": []}
    file = write(tmp_path / "policy.json", OTHERS)
    planned = waltzctl("policy", "set", file, "--dry-run", *place)
    connected = "  anonymous may not"  # other tests of this cluster, and its servers in the group log
    assert [line for line in planned.out.splitlines() if not line.startswith(connected)] == [
        "would do: policy set local",
        "  there is no policy yet: from then on what no grant allows is denied",
        "  grant: billing-*, audit may append, in partitions 0-1, with locks account",
        "  audit may not append any more in partitions 2-3",
        "  audit may not read any more in partitions 0-3",
        "  audit may not subscribe any more in partitions 0-3",
        "Nothing was changed.",
    ]
    refused(waltzctl("policy", "set", file, *place), 2, "needs a confirmation")
    assert as_json(waltzctl("policy", "set", file, "--yes", *place, "-o", "json"))["grants"] == 1
    denied = waltzctl("txn", "append", "0", "x", *place)
    refused(denied, 9, "W2036", "anonymous may", "waltzctl policy explain anonymous")
    shown = waltzctl("policy", "explain", *place, "-o", "yaml").out
    again = tmp_path / "again.yml"
    again.write_text(shown)
    assert "nothing to do" in waltzctl("policy", "set", again, "--yes", *place).out
    again.write_text(shown + "expect:\n- {name: anonymous, may: append, partition: 0}\n")
    refused(waltzctl("policy", "set", again, "--yes", *place), 2, "anonymous should be allowed to append partition 0")
    more = write(tmp_path / "policy.json", ALL)
    assert waltzctl("policy", "set", more, "--yes", "--reason", "trials", *place).code == 0
    until(lambda: waltzctl("txn", "append", "0", "x", *place).code == 0, "servers hear of a policy a moment later")
    (entry,) = as_json(waltzctl("history", "-n", "1", *place, "-o", "json"))["history"]
    assert entry["verb"] == "policy set"
    assert entry["reason"] == "trials"
    assert entry["steps"][:2] == [
        "grant: * may append, read, in all partitions",
        "take away: billing-*, audit may append, in partitions 0-1, with locks account",
    ]
    refused(waltzctl("policy", "set", write(file, {**ALL, "partitions": "3-4"}), "--yes", *place), 2, "no partition 4")


def test_a_plan_names_who_is_connected_and_would_be_cut_off(
    place: list[str], live: LocalCluster, waltzctl: Tool, tmp_path: Path
) -> None:
    file = write(tmp_path / "policy.json", OTHERS)

    with BlockingClient(",".join(live.server_addresses), settings=ClientSettings(instance="box-7")) as client:
        client.append(b"x", partition=1)
        told = waltzctl("policy", "set", file, "--dry-run", *place).out.splitlines()
    assert "  anonymous may not append any more in partitions 0-3; mounted there at the moment: box-7" in told


def test_what_a_name_may_do_and_why(place: list[str], waltzctl: Tool, tmp_path: Path) -> None:
    file = write(tmp_path / "policy.json", {"names": ["*"], "may": ["read"], "partitions": "3"}, OTHERS)
    assert waltzctl("policy", "set", file, "--yes", *place).code == 0
    told = as_json(waltzctl("policy", "explain", "billing-7", *place, "-o", "json"))
    assert [(row["verb"], row["partitions"], row["grants"]) for row in told["rights"]] == [
        ("append", [0, 1], [2]),
        ("read", [3], [1]),
        ("subscribe", [3], [1]),
    ]
    assert told["locks"] == ["account"]
    rows = as_json(waltzctl("policy", "explain", "eve", "0", *place, "-o", "json"))["rights"]
    assert [(row["allowed"], row["because"]) for row in rows] == [(False, [])] * 3
    free = write(tmp_path / "free.json", ALL)
    rows = as_json(waltzctl("policy", "explain", "eve", "0", "--file", free, *place, "-o", "json"))["rights"]
    assert all(row["allowed"] for row in rows)
    refused(waltzctl("policy", "explain", "eve", "9", *place), 3, "no partition 9")
    refused(waltzctl("policy", "explain", "e/v", *place), 2, "is not a name")


def test_a_file_is_checked_without_a_cluster(waltzctl: Tool, tmp_path: Path) -> None:
    file = write(tmp_path / "policy.json", OTHERS, expect=[{"name": "audit", "may": "append", "partition": 1}])
    assert waltzctl("policy", "set", file, "--check").out == "1 grants, 1 expectations: all is well.\n"
    write(file, OTHERS, expect=[{"name": "audit", "may": "read", "partition": 1}])
    told = waltzctl("policy", "set", file, "--check")
    assert told.code == EXIT_FINDINGS
    assert "audit should be allowed to read partition 1, and is not" in told.out
    alike = {**ALL, "lock_prefixes": ["p41", "p113"]}
    told = waltzctl("policy", "set", write(file, alike), "--check")
    assert told.code == EXIT_FINDINGS
    assert "the locks of p113 and p41 cannot be told apart" in told.out
    refused(waltzctl("policy", "set", write(file, {**ALL, "deny": True}), "--check"), 2, "grants[0].deny is not known")
    refused(waltzctl("policy", "set", tmp_path / "none.yml", "--check"), 2, "none.yml")


def test_a_document_that_nobody_can_read_is_seen_and_replaced(place: list[str], waltzctl: Tool, tmp_path: Path) -> None:
    def spoil(text: bytes) -> None:
        async def put(cluster: Cluster) -> None:
            await cluster.coordinator.commit([Create(POLICY, text)])

        using(resolve({"directory": place[1]}), put)

    spoil(b'{"schema": 7}')
    refused(waltzctl("policy", "explain", *place), 1, "W2022", "/policy has schema 7")
    status = waltzctl("status", *place)
    assert status.code == 10
    assert "/policy has schema 7" in status.out
    file = write(tmp_path / "policy.json", ALL)
    planned = waltzctl("policy", "set", file, "--dry-run", *place).out
    assert "the document that is there cannot be understood, and goes: /policy has schema 7" in planned
    assert waltzctl("policy", "set", file, "--yes", *place).code == 0
    assert "/policy" not in waltzctl("status", *place).out


def test_the_examples_of_the_help_are_run(
    place: list[str], waltzctl: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("policy.yml"), ALL)
    assert waltzctl("policy", "set", "policy.yml", "--none", *place).code == 2, "one of the two"
    for name in ("set", "explain"):
        for arguments in examples(waltzctl, ["policy", name]):
            done = waltzctl(*arguments, *([] if "--check" in arguments else place))
            assert (done.code, done.err) == (0, ""), arguments
    assert os.listdir() == ["policy.yml"]
