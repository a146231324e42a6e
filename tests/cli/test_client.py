"""`waltzctl client`: against a real cluster, whose applications are all `anonymous`."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.cli.example import examples
from tests.cli.outcome import as_json, refused, until
from waltzctl.local_cluster.local import LocalCluster
from waltzd.client.blocking import BlockingClient
from waltzd.client.settings import ClientSettings
from waltzd.errors import Superseded

Tool = Callable[..., Any]


def client(live: LocalCluster, instance: str, **settings: Any) -> BlockingClient:
    return BlockingClient(
        ",".join(live.server_addresses), partitions=(0, 1), settings=ClientSettings(instance=instance, **settings)
    )


def instances(waltzctl: Tool, live: LocalCluster, *words: str) -> dict[str, Any]:
    told = as_json(waltzctl("client", "list", *words, "--directory", live.directory, "-o", "json"))
    assert told["silent_servers"] == {}
    return {one["instance"]: one for one in told["clients"]}


def uses(waltzctl: Tool, live: LocalCluster) -> list[dict[str, Any]]:
    told = as_json(waltzctl("client", "list", "anonymous", "--directory", live.directory, "-o", "json"))
    return list(told["uses"])


def test_an_instance_is_listed_while_it_is_connected(live: LocalCluster, waltzctl: Tool) -> None:
    where = ["--directory", live.directory]
    with client(live, "box:1") as one:
        one.append(b"x", partition=0)
        one.append(b"y", partition=1)
        found = instances(waltzctl, live)["box:1"]
        assert (found["name"], found["state"], found["partitions"], found["appended"]) == ("anonymous", "live", [0, 1], 2)
        assert found["address"].startswith("127.0.0.1:")
        assert found["version"]
        table = waltzctl("client", "list", *where).out
        assert "box:1" in table
        assert "live" in table
        described = as_json(waltzctl("client", "list", "anonymous", *where, "-o", "json"))
        assert "box:1" in {each["instance"] for each in described["instances"]}
        assert sum(each["mounts"] for each in described["uses"]) >= 2
        assert "mounts" in waltzctl("client", "list", "anonymous", *where).out
    assert "box:1" not in instances(waltzctl, live)
    assert instances(waltzctl, live, "--all")["box:1"]["state"] == "gone"
    refused(waltzctl("client", "list", "nobody", *where), 3, "W2102", "there is no application nobody")


def test_an_operator_disconnects_an_instance_and_it_comes_back(live: LocalCluster, waltzctl: Tool) -> None:
    where = ["--directory", live.directory]
    with client(live, "box:2") as one:
        one.append(b"x", partition=0)
        planned = waltzctl("client", "disconnect", "anonymous/box:2", "--dry-run", *where).out
        assert "end the mounts of anonymous/box:2 at " in planned
        before = one.status()[0].mounts
        done = as_json(waltzctl("client", "disconnect", "anonymous/box:2", "--yes", *where, "-o", "json"))
        assert done["mounts"] == 2
        one.append(b"y", partition=0)
        assert one.status()[0].mounts > before
        (entry,) = as_json(waltzctl("history", "-n", "1", *where, "-o", "json"))["history"]
        assert (entry["verb"], entry["subject"]) == ("client disconnect", "anonymous/box:2")
    assert "nothing to do" in waltzctl("client", "disconnect", "nobody", "--yes", *where).out


def test_of_exclusive_instances_only_the_newest_lives(live: LocalCluster, waltzctl: Tool) -> None:
    with client(live, "old", exclusive=True) as old:
        old.append(b"x", partition=0)
        with client(live, "new", exclusive=True) as new:
            new.append(b"y", partition=0)
            with pytest.raises(Superseded):
                old.append(b"z", partition=0)
            found = instances(waltzctl, live, "--all")
            assert found["new"]["epoch"] > found["old"]["epoch"] > 0
            described = as_json(waltzctl("client", "list", "anonymous", "--directory", live.directory, "-o", "json"))
            assert described["epoch"] == found["new"]["epoch"]


def test_who_wants_more_than_its_quota_is_shown_to_be_slowed(live: LocalCluster, waltzctl: Tool, tmp_path: Path) -> None:
    where = ["--directory", live.directory]
    file = tmp_path / "policy.json"
    grant = {"names": ["*"], "may": ["append", "read"], "quotas": {"transactions_per_second": 20}}
    file.write_text(json.dumps({"grants": [grant]}))
    assert waltzctl("policy", "set", file, "--yes", *where).code == 0
    try:
        with client(live, "box:3") as one:
            is_enough = Event()

            def want_more() -> None:
                while not is_enough.is_set():
                    one.append_many([b"x"] * 20, partition=0)

            with ThreadPoolExecutor(1) as pool:
                wanting = pool.submit(want_more)
                try:
                    until(lambda: instances(waltzctl, live)["box:3"]["is_slowed"])
                    until(lambda: sum(use["slowed_milliseconds"] for use in uses(waltzctl, live)) > 0)
                    top = waltzctl("top", "--once", "--every", "0.2", *where)
                    assert "slowed by their quotas: anonymous" in top.out
                finally:
                    is_enough.set()
                    wanting.result()
    finally:
        name = as_json(waltzctl("status", *where, "-o", "json"))["cluster"]["name"]
        assert waltzctl("policy", "set", "--none", "--confirm", name, *where).code == 0


def test_the_examples_of_the_help_are_run(live: LocalCluster, waltzctl: Tool) -> None:
    with client(live, "box:4"):
        for name in ("list", "disconnect"):
            for arguments in examples(waltzctl, ["client", name]):
                assert waltzctl(*arguments, "--directory", live.directory).code == 0, arguments
