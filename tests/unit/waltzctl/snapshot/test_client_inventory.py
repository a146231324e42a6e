"""What several servers say of applications, put merge_lists."""

from __future__ import annotations

import json
from typing import Any

import pytest

from waltzctl.health.client import client, clients
from waltzctl.show.forms import put
from waltzctl.snapshot.client_inventory import ApplicationInstance, merge_lists
from waltzd.cluster.documents import ClientMeta
from waltzd.errors import CannotConnect
from waltzd.protocol.descriptions import ClientInstance, ClientList, ClientUse


def instance(state: str = "live", **fields: Any) -> ClientInstance:
    found: dict[str, Any] = {
        "name": "ann", "role": "client", "instance": "box:1", "peer": "10.0.0.1:5", "version": "1", "state": state,
        "epoch": 0, "age_ms": 60_000, "quiet_ms": 500, "partitions": (0,), "appended": 1, "appended_bytes": 10, "fed": 2,
        "fed_bytes": 20,
    }  # fmt: skip
    return ClientInstance(**{**found, **fields})


def use(name: str = "ann", **fields: Any) -> ClientUse:
    found: dict[str, Any] = {
        "name": name, "role": "client", "mounts": 1, "inflight_bytes": 0, "slowed_ms": 0, "slowed_ago_ms": None,
        "refused_mounts": 0,
    }  # fmt: skip
    return ClientUse(**{**found, **fields})


def of(*reported: ClientInstance, names: tuple[ClientUse, ...] = ()) -> ClientList:
    return ClientList(clients=reported, names=names)


def one(**reported: ClientList) -> ApplicationInstance:
    (found,) = merge_lists(reported).instances
    return found


@pytest.mark.parametrize(
    ("states", "state", "servers"),
    [
        (("live", "live"), "live", ("a", "b")),
        (("live", "hangs"), "live", ("a",)),
        (("gone", "live"), "live", ("b",)),
        (("hangs", "gone"), "hangs", ("a",)),
        (("gone", "gone"), "gone", ("a", "b")),
    ],
)
def test_live_anywhere_is_live(states: tuple[str, str], state: str, servers: tuple[str, ...]) -> None:
    found = one(a=of(instance(states[0])), b=of(instance(states[1], partitions=(3,))))
    assert (found.state, found.servers) == (state, servers)


def test_parts_are_added_up_and_the_last_word_counts() -> None:
    found = one(
        a=of(instance(quiet_ms=900, age_ms=5000, epoch=2)),
        b=of(instance(partitions=(3, 1), quiet_ms=100, age_ms=9000, peer="10.0.0.1:6")),
    )
    assert (found.partitions, found.appended, found.fed_bytes, found.epoch) == ((0, 1, 3), 2, 40, 2)
    assert (found.quiet_ms, found.age_ms, found.peer) == (100, 9000, "10.0.0.1:6")
    gone = one(a=of(instance("gone", age_ms=5000)), b=of(instance("gone", age_ms=9000)))
    assert gone.age_ms == 5000, "since the last of its mounts ended"


def test_names_and_instances_are_kept_apart() -> None:
    reported = of(instance(), instance(instance="box:2"), instance(name="bob"), instance(role="operator"))
    found = merge_lists({"a": reported})
    assert [(one.name, one.role, one.instance) for one in found.instances] == [
        ("ann", "client", "box:1"),
        ("ann", "client", "box:2"),
        ("ann", "operator", "box:1"),
        ("bob", "client", "box:1"),
    ]


def test_who_waited_lately_at_any_server_is_slowed() -> None:
    slowed = of(names=(use(slowed_ago_ms=200, slowed_ms=7000), use("bob", slowed_ago_ms=60_000)))
    found = merge_lists({"a": of(instance(), instance(name="bob")), "b": slowed})
    assert {one.name: one.is_slowed for one in found.instances} == {"ann": True, "bob": False}


def test_a_server_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = merge_lists({"a": of(instance()), "b": CannotConnect("no answer")})
    put(clients(found, with_gone=False), "table")
    out = capsys.readouterr().out
    assert "box:1" in out
    assert "server b does not answer, and may know more: W4001 no answer" in out
    put(clients(found, with_gone=False), "json")
    assert json.loads(capsys.readouterr().out)["silent_servers"]["b"]["code"] == "W4001"


def test_a_page_about_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = merge_lists({"a": of(instance(), names=(use(slowed_ms=7300, slowed_ago_ms=100, refused_mounts=4),))})
    kept = ClientMeta(name="ann", first_seen=1_769_860_800, last_seen=1_769_871_600, epoch=7)
    put(client("ann", found, kept), "table")
    out = capsys.readouterr().out
    assert "first seen 2026-01-31T12:00:00+00:00, last seen 2026-01-31T15:00:00+00:00, newest epoch 7" in out
    assert "live, slowed" in out
    assert "7 s" in out
    put(client("ann", found, None), "json")
    told = json.loads(capsys.readouterr().out)
    assert (told["first_seen"], told["epoch"], told["uses"][0]["refused_mounts"]) == (None, 0, 4)
    put(client("bob", found, None), "table")
    assert "No instance of it is connected" in capsys.readouterr().out
