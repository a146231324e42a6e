"""`waltzctl channel`: a name for partitions, from its making to its end, and wherever partitions are said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.example import examples
from tests.cli.outcome import as_json, refused
from waltzctl.local_cluster.local import LocalCluster
from waltzd.client.blocking import BlockingClient
from waltzd.errors import EXIT_FINDINGS

Tool = Callable[..., Any]


@pytest.fixture
def place(live: LocalCluster, waltzctl: Tool) -> Iterator[list[str]]:
    """How the shared cluster is reached; afterwards it has no channels and no policy."""
    where = ["--directory", str(live.directory)]
    yield where
    assert waltzctl("policy", "set", "--none", "--confirm", "local", *where).code == 0
    for row in as_json(waltzctl("channel", "list", *where, "-o", "json"))["channels"]:
        assert waltzctl("channel", "set", row["name"], "--none", "--yes", *where).code == 0


def test_a_channel_from_its_making_to_its_end(place: list[str], live: LocalCluster, waltzctl: Tool, tmp_path: Path) -> None:
    assert "There are no channels" in waltzctl("channel", "list", *place).out
    refused(waltzctl("channel", "set", "all", "0", *place), 2, "no name of a channel")
    refused(waltzctl("channel", "set", "orders", "0-4", *place), 3, "no partition 4")
    refused(waltzctl("channel", "set", "orders", "--none", *place), 3, "W2300", "no channel orders", "channel list")
    assert waltzctl("channel", "set", "orders", "1,0", "--reason", "trials", *place).code == 0
    assert "nothing to do" in waltzctl("channel", "set", "orders", "0-1", *place).out
    refused(waltzctl("channel", "set", "orders", "3", *place), 2, "say --yes")

    # where partitions are said
    told = as_json(waltzctl("health", "orders,3", "--no-write", *place, "-o", "json"))
    assert [row["partition"] for row in told["partitions"]] == [0, 1, 3]
    refused(waltzctl("health", "order", "--no-write", *place), 3, "there is no channel order")
    planned = waltzctl("partition", "preferred", "orders", "--server", "server-1", "--dry-run", *place).out
    assert "prefer server-1 for 0-1" in planned
    with BlockingClient(",".join(live.server_addresses), partitions="orders") as client:
        assert client.partitions == (0, 1) == client.channel("orders")
        assert {client.partition_of(key) for key in range(20)} == {0, 1}

    # a policy that speaks of it
    file = tmp_path / "policy.json"
    grant = {"names": ["billing"], "may": ["append"], "partitions": "orders"}
    expected = [{"name": "billing", "may": "append", "partition": 1}]
    file.write_text(json.dumps({"grants": [grant], "expect": expected}))
    told = waltzctl("policy", "set", file, "--check")
    assert told.code == EXIT_FINDINGS
    assert "channel orders: give its partitions with --channel orders=LIST" in told.out
    assert waltzctl("policy", "set", file, "--check", "--channel", "orders=0-1").code == 0
    refused(waltzctl("policy", "set", file, "--check", "--channel", "orders"), 2, "--channel orders: this is no channel")
    assert waltzctl("policy", "set", file, "--yes", *place).code == 0
    refused(waltzctl("channel", "set", "orders", "--none", "--yes", *place), 5, "the policy speaks of the channel orders")
    assert waltzctl("channel", "set", "orders", "1-2", "--dry-run", *place).out.splitlines() == [
        "would do: channel set orders",
        "  orders: add 2",
        "  orders: take out 0",
        "  note: its clients hash keys over 0-1 as before; --rehash changes that",
        "  note: its clients refuse keys of 0, which are outside of the channel",
        "  note: 1 grants of the policy speak of it",
        "  billing may not append any more in partition 0",
        "Nothing was changed.",
    ]
    assert waltzctl("channel", "set", "orders", "1-2", "--yes", *place).code == 0
    rights = as_json(waltzctl("policy", "explain", "billing", *place, "-o", "json"))["rights"]
    assert rights[0]["partitions"] == [1, 2]
    file.write_text(json.dumps({"grants": [{**grant, "partitions": "order"}]}))
    refused(waltzctl("policy", "set", file, "--yes", *place), 3, "grants[0].partitions: there is no channel order")
    assert as_json(waltzctl("channel", "list", *place, "-o", "json"))["channels"] == [
        {"name": "orders", "partitions": [1, 2], "keys": [0, 1]}
    ], "keys stay where they are"
    refused(waltzctl("channel", "set", "orders", "--none", "--rehash", *place), 2, "--rehash needs the PARTITIONS")
    assert waltzctl("channel", "set", "orders", "1-2", "--rehash", "--dry-run", *place).out.splitlines()[:2] == [
        "would do: channel set orders",
        "  hash the keys of its clients over 1-2, not over 0-1",
    ]
    assert waltzctl("channel", "set", "orders", "1-2", "--rehash", "--yes", *place).code == 0
    assert as_json(waltzctl("channel", "list", *place, "-o", "json"))["channels"][0]["keys"] == [1, 2]


def test_the_examples_of_the_help_are_run(place: list[str], waltzctl: Tool) -> None:
    for name in ("set", "list"):
        for arguments in examples(waltzctl, ["channel", name]):
            assert waltzctl(*arguments, *place).code == 0, arguments
