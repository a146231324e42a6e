"""`waltzctl group`: what servers say of durable groups, and what they are told to do."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.example import examples
from tests.cli.group_servers import Servers, member, place, running
from tests.cli.outcome import as_json, refused
from waltzd.protocol.groups import Exhausted, Mode

Tool = Callable[..., Any]
WHERE = ("--coordinator", "zk:1", "--root", "/waltz")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    with running(monkeypatch) as found:
        yield found


def test_a_line_for_each_group(servers: Servers, waltzctl: Tool) -> None:
    assert "There are no durable groups" in waltzctl("group", "list", *WHERE).out
    servers.put(
        3,
        place(0, floor=89, reach=95, open=2, parked=1, is_at_work=True, in_flight=2, members=(member(), member("two"))),
        place(1, floor=50),
        place(2, is_at_work=True, in_flight=2, members=(member(),)),
    )
    servers.put(9, name="index", mode=Mode.ORDERED, partitions="0-1", exhausted=Exhausted.STOP)
    found = as_json(waltzctl("group", "list", *WHERE, "-o", "json"))
    assert found["silent_servers"] == found["servers_behind"] == {}
    index, mailer = found["groups"]
    assert (index["name"], index["mode"], index["partitions"]) == ("index", "ordered", [0, 1])
    assert (index["state"], index["lag"], index["members"]) == ("no member", 200, 0)
    assert (mailer["state"], mailer["members"], mailer["in_flight"], mailer["parked"]) == ("no member", 2, 4, 1)
    assert mailer["lag"] == (2 + 4) + 49 + 0 + 100
    (head, *rows) = csv.reader(io.StringIO(waltzctl("group", "list", *WHERE, "-o", "csv").out))
    assert head[:4] == ["name", "mode", "partitions", "state"]
    assert [row[0] for row in rows] == waltzctl("group", "list", *WHERE, "-o", "name").out.split() == ["index", "mailer"]
    table = waltzctl("group", "list", *WHERE).out
    assert "0-3" in table
    assert "no member" in table


def test_the_word_of_the_owner_counts(servers: Servers, waltzctl: Tool) -> None:
    servers.put(
        3,
        place(0, floor=89, is_at_work=True, paused="the group log does not answer", members=(member(),), delivered=12),
        place(1, floor=5, stopped="id 6: no such address"),
        partitions="0-1",
    )
    told = waltzctl("group", "describe", "mailer", *WHERE).out
    assert told.startswith("stopped\n")
    assert "the group log does not answer" in told
    assert "id 6: no such address" in told
    assert "5 tries with pauses of 1 s, 5 s, 30 s, then put aside" in told
    found = as_json(waltzctl("group", "describe", "mailer", *WHERE, "-o", "json"))
    zero, one = found["partitions"]
    assert (zero["state"], zero["owner"], zero["lag"], zero["delivered"]) == ("paused", "a", 10, 12)
    assert (one["state"], one["why"], one["owner"], one["lag"]) == ("stopped", "id 6: no such address", "b", 94)
    assert [(row["member"], row["partition"]) for row in found["members"]] == [("one", 0)]
    assert found["settings"]["mode"] == "queue"
    refused(waltzctl("group", "describe", "mailr", *WHERE), 3, "W2102", "no durable group mailr", "did you mean mailer?")


def test_what_is_missing_is_said(servers: Servers, waltzctl: Tool) -> None:
    """A partition whose owner does not answer has no lag that is known."""
    servers.put(3, place(0), place(1, is_at_work=True, members=(member(),)), partitions="0-1")
    servers.silent.add("b")
    servers.behind["a"] = "the group log does not answer"
    found = as_json(waltzctl("group", "lag", "mailer", *WHERE, "-o", "json"))
    assert [(row["partition"], row["state"], row["lag"]) for row in found["lags"]] == [(1, "unknown", None), (0, "idle", 0)]
    assert found["silent_servers"]["b"]["code"] == "W4001"
    told = waltzctl("group", "list", *WHERE).out
    assert "server b does not answer, and may know more" in told
    assert "server a may not know the newest: the group log does not answer" in told
    servers.silent.add("a")
    refused(waltzctl("group", "describe", "mailer", *WHERE), 6, "W4001")


def test_a_group_that_was_made_again_is_another_one(servers: Servers, waltzctl: Tool) -> None:
    """A server that is behind tells of the first one, and is not believed."""
    servers.put(3, place(0, floor=98), partitions="0")
    old = servers.groups["mailer"]
    servers.put(8, partitions="0")
    real = servers.known_to
    servers.known_to = lambda server, name: (  # type: ignore[method-assign]
        real(server, name) if server == "a" else type(real(server, name))((old,))
    )
    found = as_json(waltzctl("group", "describe", "mailer", *WHERE, "-o", "json"))
    assert (found["made_at"], found["lag"]) == (8, 100)


def test_the_examples_of_the_help_are_run(servers: Servers, waltzctl: Tool) -> None:
    servers.put()
    for name in ("describe", "lag", "list"):
        for arguments in examples(waltzctl, ["group", name]):
            assert waltzctl(*arguments, *WHERE).code == 0, arguments
