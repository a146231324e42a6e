"""A cluster goes over to format 1, and what `waltzctl` can say of a log that knows times, locks and groups."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.cli.outcome import refused
from waltzctl.local_cluster.local import LocalCluster

Tool = Callable[..., Any]
WINDOW = 10
"""So few locks are remembered by owners."""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster of format 0, of this module alone: there is no way back from what happens to it."""
    settings: dict[str, dict[str, object]] = {"server": {"session_seconds": 30, "lock_table_size": WINDOW}}
    cluster = LocalCluster.make(
        tmp_path_factory.mktemp("older") / "cluster",
        partitions=2, storages=1, servers=1, replication=1, format=0, settings=settings,
    )  # fmt: skip
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


class Told:
    """The tool, meaning that cluster."""

    def __init__(self, waltzctl: Tool, cluster: LocalCluster) -> None:
        self._waltzctl, self._place = waltzctl, ("--directory", cluster.directory)

    def __call__(self, *words: object) -> Any:
        return self._waltzctl(*words, *self._place)

    def json(self, *words: object) -> Any:
        told = self(*words, "-o", "json")
        assert (told.code, told.err) == (0, ""), told
        return json.loads(told.out)

    def rows(self, *words: object) -> list[dict[str, Any]]:
        told = self("txn", *words, "-o", "json")
        assert (told.code, told.err) == (0, ""), told
        return [json.loads(line) for line in told.out.splitlines()]

    def append(self, *words: object) -> dict[str, Any]:
        return dict(self.json("txn", "append", *words))


@pytest.fixture
def told(waltzctl: Tool, older: LocalCluster) -> Told:
    return Told(waltzctl, older)


def test_from_one_format_to_the_other(told: Told, older: LocalCluster) -> None:
    """In one test, because there is no way back."""
    told.append(0, "before", "--lock", "write:account:1")
    old = told.rows("get", 0, 0)[0]
    assert (old["time"], old["time_us"], old["group"], old["locks"]) == (None, None, 0, None)
    assert told("txn", "get", 0, 0).out.splitlines()[0].split() == ["id", "kind", "client", "size", "payload"]
    refused(told("txn", "get", 0, "--since", "1h"), 5, "W2029", "writes format 0, which has no times")
    refused(told("txn", "append", 0, "--atomic", "a", "b"), 5, "W2029", "waltzctl cluster set --format 1")
    marks = ("txn", "history", "account:1", "--partition", 0)
    refused(told(*marks), 5, "W2029", "writes format 0, which keeps no locks", "waltzctl cluster set --format 1")
    assert told.json("status")["cluster"]["format"] == 0

    dry = told("cluster", "set", "--format", 1, "--dry-run")
    assert (dry.code, dry.err) == (0, "")
    assert "partitions 0-2 change, each in a new session" in dry.out
    assert "a partition that has changed cannot go back" in dry.out
    assert told.json("status")["cluster"]["format"] == 0, "nothing was changed"
    done = told.json("cluster", "set", "--format", 1, "--yes", "--reason", "times", "--timeout", 60)
    assert (done["result"], done["format"], done["partitions"]) == ("done", 1, [0, 1, 2]), "with the group log"
    again = told.json("cluster", "set", "--format", 1)
    assert (again["result"], again["steps"]) == ("nothing-to-do", [])
    refused(told("cluster", "set", "--format", 0), 5, "W2100", "cannot go back")
    assert told.json("history")["history"][-1]["reason"] == "times"

    described = told.json("status")["cluster"]
    assert (described["format"], [one["format"] for one in described["partitions"]]) == (1, [1, 1, 1])
    assert ", format 1, " in told("status").out
    rows = csv.DictReader(io.StringIO(told("partition", "list", "-o", "csv").out))
    assert [row["format"] for row in rows] == ["1", "1", "1"]
    assert "writes format 1" in told("partition", "describe", 0).out
    assert "can write formats 0 and 1" in told("storage", "describe", "storage-1").out
    _times(told)
    _groups_and_locks(told)
    _search(told)


def _times(told: Told) -> None:
    began = datetime.now(UTC)
    first = told.append(0, "first")["id"]
    second = told.append(0, "second", "--kind", 7)["id"]
    rows = told.rows("get", 0, f"0-{second}")
    assert rows[0]["time"] is None, "what was written in format 0 stays as it is"
    assert [row["payload"] for row in told.rows("get", 0, "--since", began.isoformat())] == ["first", "second"]
    at = rows[-1]["time"]
    assert datetime.fromisoformat(at) == datetime.fromtimestamp(0, UTC) + timedelta(microseconds=rows[-1]["time_us"])
    assert rows[-2]["time_us"] <= rows[-1]["time_us"]
    assert [row["id"] for row in told.rows("get", 0, "--since", at)] == [second]
    assert [row["id"] for row in told.rows("tail", 0, "--since", "-1h")] == [first, second]
    assert [row["id"] for row in told.rows("tail", 0, "--before", at, "-n", 1)] == [first]
    assert [row["id"] for row in told.rows("grep", 0, "--since", "1h", "--kind", 7)] == [second]
    assert [row["id"] for row in told.rows("grep", 0, "--before", at)] == list(range(second))
    assert told.rows("get", 0, "--before", "2020-01-01T00:00Z")[0]["id"] == 0, "what has no time is earlier than any"
    nothing = told("txn", "tail", "--all", "--since", "2100-01-01")
    assert (nothing.code, nothing.out, nothing.err) == (0, "", "There are no transactions in that time.\n")
    refused(told("txn", "tail", 0, "--since", "yesterday"), 2, "W1001", "15m, 2h, 1d")
    for words in (["get", 0], ["get", 0, 1, "--since", "1h"], ["tail", 0, "--before", "1h", "--follow"]):
        assert told("txn", *words).code == 2, words

    heads, before, *lines = told("txn", "get", 0, "0-1", second).out.splitlines()
    assert heads.split() == ["id", "kind", "client", "size", "payload"]
    assert before.split()[-1] == "before"
    assert lines[0].split() == ["id", "time", "kind", "client", "size", "payload"], "from here on there are times"
    assert lines[-1].split()[1] == at[:19] + "Z"
    assert max(map(len, lines)) <= 80


def _groups_and_locks(told: Told) -> None:
    done = told.append(0, "--atomic", "debit", "credit", "note", "--lock", "write:account:17", "--lock", "read:limit:1")
    first = done["id"]
    assert (done["result"], done["count"]) == ("committed", 3)
    rows = told.rows("get", 0, f"{first}-{first + 2}")
    assert [(row["id"], row["group"]) for row in rows] == [(first, first), (first + 1, first), (first + 2, first)]
    assert [lock["mode"] for lock in rows[0]["locks"]] == ["write", "read"]
    assert [row["locks"] for row in rows[1:]] == [[], []]
    assert told.rows("get", 0, first + 2)[0]["group"] == first, "also when reading begins in the middle of it"
    table = told("txn", "get", 0, first, "--locks").out.splitlines()
    assert [line.split()[0] for line in table[2:]] == ["write", "read"]
    sheet = list(csv.DictReader(io.StringIO(told("txn", "get", 0, first, "--locks", "-o", "csv").out)))
    assert sheet[0]["locks"].split()[0] == f"write:{rows[0]['locks'][0]['lock']}"
    said = told("txn", "append", 0, "--atomic", "debit", "credit", "--lock", "write:account:17", "--mark", first - 1)
    assert (said.code, said.out) == (4, "")
    assert told.rows("tail", 0, "-n", 1)[0]["id"] == first + 2, "nothing of it is in the log"
    refused(told("txn", "append", 0, "a", "b"), 2, "W1001", "--atomic")


def _search(told: Told) -> None:
    """The table forgets after a few locks; the log does not."""
    marked = told.append(0, "marks it", "--lock", "write:forgotten:1")["id"]
    for number in range(2 * WINDOW):
        told.append(0, "others", "--lock", f"append:other:{number}")
    last = told.rows("tail", 0, "-n", 1)[0]["id"]
    found = told.json("lock", "explain", 0, "forgotten", 1)
    assert (found["is_exact"], found["lock_mark"], found["marked_by"]["id"]) == (True, marked, marked)
    assert found["searched"] is None, "the owner has asked the key indexes"
    basis = f"It was marked last by transaction {marked:,}, which is committed."
    assert basis in told("lock", "explain", 0, "forgotten", 1).out
    assert marked < last
    never = told("lock", "explain", 0, "nobody", 1).out
    assert "below id 1 it is of format 0, which keeps no locks." in never
    refused(told("lock", "explain", 0, "forgotten", 1, "--search", 2), 2, "--search of `waltzctl lock explain` was removed")
    marks = ("history", "forgotten:1", "--partition", 0)
    refused(told("txn", *marks), 5, "W2029", "transactions below id 1 are of format 0", "--after 0")
    assert [row["id"] for row in told.rows(*marks, "--after", 0)] == [marked]
