"""`waltzctl group`: what servers say of consumer groups, and what they are told to do."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.example import examples
from tests.cli.group_servers import Servers, member, place, running
from tests.cli.outcome import as_json, refused
from waltzd.cluster.groups import GroupStart
from waltzd.errors import BadArgument, CannotConnect, NoSuchGroup, NotReady
from waltzd.errors.operations import ChangedMeanwhile, NotOwner
from waltzd.protocol.groups import (
    EPOCHS_OF_A_RESET,
    RESET_DRAWS,
    Change,
    Exhausted,
    KeyedBy,
    Mode,
    ParkedTransaction,
    reset_epoch,
)

Tool = Callable[..., Any]
WHERE = ("--coordinator", "zk:1", "--root", "/waltz")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    with running(monkeypatch) as found:
        yield found


def test_a_line_for_each_group(servers: Servers, waltzctl: Tool) -> None:
    assert "There are no consumer groups" in waltzctl("group", "list", *WHERE).out
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
    refused(waltzctl("group", "describe", "mailr", *WHERE), 3, "W2102", "no consumer group mailr", "did you mean mailer?")


def test_what_is_missing_is_said(servers: Servers, waltzctl: Tool) -> None:
    """A partition whose owner does not answer has no lag that is known."""
    servers.put(3, place(0), place(1, is_at_work=True, members=(member(),)), partitions="0-1")
    servers.silent.add("b")
    servers.behind["a"] = "the group log does not answer"
    found = as_json(waltzctl("group", "describe", "mailer", *WHERE, "-o", "json"))
    rows = [(row["partition"], row["state"], row["lag"]) for row in found["partitions"]]
    assert rows == [(0, "idle", 0), (1, "unknown", None)]
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


def test_a_group_whose_deletion_was_answered_by_nobody_is_deleted(servers: Servers, waltzctl: Tool) -> None:
    """The server that deleted it was killed before its answer; the next one has no such group."""
    servers.put(3, partitions="0")
    servers.refusals = [CannotConnect("it ended"), NoSuchGroup("there is no group mailer")]
    told = waltzctl("group", "remove", "mailer", "--confirm", "mailer", *WHERE)
    assert (told.code, servers.refusals) == (0, []), told
    assert "done: group remove mailer" in told.out


# -- changes -----------------------------------------------------------------------------------------------------------


def steps(told: Any) -> list[str]:
    found = as_json(told)
    assert found["result"] == "dry-run"
    return list(found["steps"])


def test_a_group_from_its_making_to_its_end(servers: Servers, waltzctl: Tool) -> None:
    command = ("group", "create", "mailer", "--mode", "keyed", "--key", "lock", "--partitions", "0, 2-3", "--tries", "3",
               "--back-off", "10s,1m", "--ack-wait", "2m", "--then", "stop", "--kinds", "7,-1", *WHERE)  # fmt: skip
    assert steps(waltzctl(*command, "--start", "last", "--dry-run", "-o", "json")) == [
        "mode keyed (members share the work, one lock with one of them at a time)",
        "partitions 0,2-3",
        "only the kinds -1, 7",
        "2 min to acknowledge",
        "at most 100 in flight for each member",
        "3 tries with pauses of 10 s, 1 min, then it stops",
        "start in 0, 2-3 after id 99",
    ]
    assert servers.asked == []
    assert as_json(waltzctl(*command, "--after", "0=0", "-o", "json"))["made_at"] == 7
    ((_, verb, made),) = servers.asked
    assert verb == "make"
    assert (made.partitions, made.mode, made.key, made.kinds) == ("0,2-3", Mode.KEYED, KeyedBy.LOCK, (-1, 7))
    assert (made.deliver_max, made.back_off_ms, made.ack_wait_ms) == (3, (10_000, 60_000), 120_000)
    assert made.starts == (GroupStart(0, 0),)
    assert "nothing to do" in waltzctl(*command).out
    refused(
        waltzctl("group", "create", "mailer", *WHERE),
        4,
        "a consumer group mailer exists already: mode keyed",
        "group set mailer",
    )
    assert steps(waltzctl("group", "set", "mailer", "--then", "park", *WHERE, "--dry-run", "-o", "json")) == [
        "no longer: 3 tries with pauses of 10 s, 1 min, then it stops",
        "from now on: 3 tries with pauses of 10 s, 1 min, then put aside",
    ]
    assert "nothing to do" in waltzctl("group", "set", "mailer", "--tries", "3", *WHERE).out
    refused(waltzctl("group", "set", "mailer", "--tries", "4", *WHERE), 2, "say --yes")
    assert waltzctl("group", "set", "mailer", "--tries", "4", "--kinds", "all", "--yes", *WHERE).code == 0
    assert (servers.groups["mailer"].meta.deliver_max, servers.groups["mailer"].meta.kinds) == (4, ())
    refused(waltzctl("group", "remove", "mailer", "--yes", *WHERE), 2, "say --confirm mailer")
    assert waltzctl("group", "remove", "mailer", "--confirm", "mailer", "--reason", "trials", *WHERE).code == 0
    assert servers.groups == {}
    history = as_json(waltzctl("history", *WHERE, "-o", "json"))["history"]
    assert sorted((row["verb"], row["outcome"], row["reason"]) for row in history) == [
        ("group create", "done", None), ("group remove", "done", "trials"), ("group set", "done", None)
    ]  # fmt: skip


def test_groups_go_on_without_an_entry_that_cannot_be_read(servers: Servers, waltzctl: Tool) -> None:
    refused(waltzctl("group", "resume", "--pass-over", "1742", "--yes", *WHERE), 2, "say --confirm 1742")
    assert waltzctl("group", "resume", "--pass-over", "1742", "--dry-run", *WHERE).code == 0
    assert servers.asked == []
    assert waltzctl("group", "resume", "--pass-over", "1742", "--confirm", "1742", "--reason", "case 815", *WHERE).code == 0
    assert [what[1:] for what in servers.asked] == [("pass over", 1742)]
    (row,) = as_json(waltzctl("history", *WHERE, "-o", "json"))["history"]
    assert (row["verb"], row["subject"]) == ("group resume --pass-over", "1742")
    assert (row["outcome"], row["reason"]) == ("done", "case 815")


def test_where_a_group_begins(servers: Servers, waltzctl: Tool) -> None:
    def begins(*words: str) -> str:
        return steps(waltzctl("group", "create", "mailer", *words, *WHERE, "--dry-run", "-o", "json"))[-1]

    assert begins() == "start in 0-3 at the first transaction"
    assert begins("--start", "last") == "start in 0-3 after id 99"
    assert begins("--start", "2023-11-14T22:13:50") == "start in 0-3 after id 29"
    assert begins("--after", "1000") == "start in 0-3 after id 1,000"
    assert begins("--start", "first") == "start in 0-3 at the first transaction"


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("create", "mail er"), 2, "is not a name"),
        (("create", "mailer", "--partitions", "0-9"), 3, "no partition 4"),
        (("create", "mailer", "--partitions", "orders"), 3, "there is no channel orders"),
        (("create", "mailer", "--partitions", "0;1"), 2, "write them as 0-3,7"),
        (("create", "mailer", "--ack-wait", "30"), 2, "--ack-wait 30: this is not a duration"),
        (("create", "mailer", "--ack-wait", "25h"), 2, "this is not a duration of at most a day"),
        (("create", "mailer", "--back-off", "1s,x"), 2, "--back-off x: this is not a duration"),
        (("create", "mailer", "--kinds", "5000000000"), 2, "these are no kinds"),
        (("create", "mailer", "--start", "1h", "--after", "1"), 2, "--start and --after exclude each other"),
        (("create", "mailer", "--after", "0=1,2"), 2, "this is not an id"),
        (("create", "mailer", "--partitions", "0", "--after", "3=1"), 3, "partition 3 is not in the group"),
        (("create", "mailer", "--start", "noon"), 2, "this is not a time"),
        (("set", "index"), 2, "no setting was named"),
        (("set", "mailer", "--tries", "3"), 3, "no consumer group mailer"),
        (("reset", "index"), 2, "give one of --start, --after and --skip-through"),
        (("reset", "index", "--start", "last", "--skip-through", "5"), 2, "--start and --skip-through exclude each other"),
        (("reset", "index", "--start", "first", "--after", "5"), 2, "--start and --after exclude each other"),
        (("reset", "index", "--start", "last", "--partitions", "2"), 3, "partition 2 is not in the group, which has 0-1"),
        (("reset", "index", "--partitions", "3", "--skip-through", "5"), 3, "partition 3 is not in the group"),
        (("parked", "replay", "index"), 2, "name the parked transactions"),
        (("parked", "replay", "index", "17"), 2, "is not a list of parked transactions"),
        (("parked", "replay", "index", "0:17", "--all"), 2, "name the parked transactions"),
        (("parked", "replay", "index", "0:0-99999999"), 2, "more than 100,000 ids"),
    ],
)
def test_mistakes_are_told_before_anything_is_done(
    servers: Servers, waltzctl: Tool, words: tuple[str, ...], code: int, sentence: str
) -> None:
    servers.put(name="index", partitions="0-1")
    refused(waltzctl("group", *words, *WHERE), code, sentence)
    assert servers.asked == []


def test_a_group_is_moved(servers: Servers, waltzctl: Tool) -> None:
    """Each partition by its owner, behind the id that was said."""
    servers.put(
        3,
        place(0, floor=89, reach=95, open=2, is_at_work=True, members=(member(),)),
        place(1, stopped="id 6: no such address", floor=5, reach=59, open=4),
        partitions="0-1",
    )
    assert steps(waltzctl("group", "reset", "mailer", "--after", "49", *WHERE, "--dry-run", "-o", "json")) == [
        "partition 0: the next delivery is id 50; up to 44 acknowledged transactions are delivered again",
        "partition 1: the next delivery is id 50; what is not done from id 6 to 49 is skipped; up to 10 "
        "acknowledged transactions are delivered again",
        "note: members there start again: one",
    ]
    refused(waltzctl("group", "reset", "mailer", "--start", "last", "--yes", *WHERE), 2, "say --confirm mailer")
    told = waltzctl("group", "reset", "mailer", "--after", "0=49", "--confirm", "mailer", *WHERE, "-o", "json")
    assert as_json(told)["partitions"] == [{"partition": 0, "count": 1, "epoch": 2, "floor": 5}]
    assert steps(waltzctl("group", "reset", "mailer", "--skip-through", "1=6", *WHERE, "--dry-run", "-o", "json")) == [
        "partition 1: skip what is not done through id 6, at most 1 transactions"
    ]
    assert "nothing to do" in waltzctl("group", "reset", "mailer", "--skip-through", "1=5", *WHERE).out
    assert (
        waltzctl("group", "reset", "mailer", "--partitions", "1", "--skip-through", "6", "--confirm", "mailer", *WHERE).code
        == 0
    )
    assert waltzctl("group", "resume", "mailer", *WHERE).code == 0
    assert servers.asked == [
        ("a", "change", (Change.RESET, 0, (49,))),
        ("b", "change", (Change.SKIP, 1, (6,))),
        ("b", "change", (Change.GO_ON, 1, ())),
    ]
    servers.put(3, partitions="0-1")
    assert "nothing to do" in waltzctl("group", "resume", "mailer", *WHERE).out
    assert "nothing to do" in waltzctl("group", "reset", "mailer", "--start", "first", *WHERE).out


def test_a_reset_names_one_epoch_for_all_its_tries(servers: Servers, waltzctl: Tool) -> None:
    servers.put(3, place(0, floor=89, reach=95, epoch=9), place(1, floor=5, reach=59), partitions="0-1")
    servers.refusals += [NotReady("its answer is lost"), NotOwner("it was given away")]
    reset = ("group", "reset", "mailer", "--after", "49", "--confirm", "mailer", *WHERE)
    assert waltzctl(*reset).code == 0
    *tries, other = servers.epochs
    assert len({*tries}) == 1
    assert len(tries) == 3
    for epoch in (tries[0], other):
        assert epoch % EPOCHS_OF_A_RESET == 0
        assert reset_epoch(9, 0) <= epoch <= reset_epoch(9, RESET_DRAWS - 1)
    servers.refusals += [ChangedMeanwhile("group mailer was reset by another operator")]
    refused(waltzctl(*reset), 4, "reset by another operator")
    assert len(servers.epochs) == 5, "a retry does not solve this"
    servers.put(3, place(0, stopped="id 6", floor=5, reach=59), partitions="0")
    assert waltzctl("group", "resume", "mailer", *WHERE).code == 0
    assert servers.epochs[-1] == 0


def test_what_is_parked_is_listed_and_replayed(servers: Servers, waltzctl: Tool) -> None:
    servers.put(3, place(0, parked=3), place(1, parked=1), partitions="0-1")
    servers.parked["mailer"] = [ParkedTransaction(0, id_, 5, "one", "no such address") for id_ in (3, 4, 9)] + [
        ParkedTransaction(1, 7, 1, "two", "rejected: \x1b[31m")
    ]
    told = as_json(waltzctl("group", "parked", "list", "mailer", *WHERE, "-o", "json"))
    assert [(row["partition"], row["id"], row["tries"], row["member"]) for row in told["parked"]] == [
        (0, 3, 5, "one"), (0, 4, 5, "one"), (0, 9, 5, "one"), (1, 7, 1, "two")
    ]  # fmt: skip
    assert not told["is_more"]
    told = waltzctl("group", "parked", "list", "mailer", "-n", "2", *WHERE).out
    assert "There are more" in told
    assert "no such address" in told
    assert "\x1b" not in waltzctl("group", "parked", "list", "mailer", *WHERE).out
    assert steps(waltzctl("group", "parked", "replay", "mailer", "0:2-4", *WHERE, "--dry-run", "-o", "json")) == [
        "partition 0: 2 are delivered again: ids 3-4",
        "note: not parked there: 2",
    ]
    assert waltzctl("group", "parked", "replay", "mailer", "0:3", "--yes", *WHERE).code == 0
    assert "nothing to do" in waltzctl("group", "parked", "replay", "mailer", "1:3", "--yes", *WHERE).out
    refused(
        waltzctl("group", "parked", "replay", "mailer", "--all", "--discard", "--yes", *WHERE), 2, "say --confirm mailer"
    )
    assert waltzctl("group", "parked", "replay", "mailer", "--all", "--discard", "--confirm", "mailer", *WHERE).code == 0
    assert servers.asked == [
        ("a", "change", (Change.REPLAY, 0, (3,))),
        ("a", "change", (Change.DISCARD, 0, (3, 4, 9))),
        ("b", "change", (Change.DISCARD, 1, (7,))),
    ]


def test_all_that_is_parked_is_more_than_the_ids_that_can_be_typed(
    servers: Servers, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waltzctl.groups.parked.IDS_MAX", 2)
    servers.put(3, place(0, parked=3), place(1, parked=1), partitions="0-1")
    there = ((0, 3), (0, 4), (0, 9), (1, 7))
    servers.parked["mailer"] = [ParkedTransaction(at, id_, 5, "one", "full") for at, id_ in there]
    assert waltzctl("group", "parked", "replay", "mailer", "--all", "--yes", *WHERE).code == 0
    assert [told for _, _, told in servers.asked] == [(Change.REPLAY, 0, (3, 4, 9)), (Change.REPLAY, 1, (7,))]


def test_what_passes_is_waited_for_and_what_stays_is_told(servers: Servers, waltzctl: Tool) -> None:
    servers.put(3, place(0, stopped="id 1"), place(1, stopped="id 1"), partitions="0-1")
    servers.refusals += [NotReady("it recovers"), NotOwner("it was given away")]
    assert waltzctl("group", "resume", "mailer", "--partitions", "0", *WHERE).code == 0
    assert [told for _, _, told in servers.asked] == [(Change.GO_ON, 0, ())]
    servers.refusals += [BadArgument("no")]
    refused(waltzctl("group", "set", "mailer", "--tries", "3", "--yes", *WHERE), 2, "no")
    servers.asked.clear()
    servers.failing.add(1)
    refused(
        waltzctl("group", "resume", "mailer", *WHERE), 7, "partition 1: W1001 not this one", "the change was applied in 0"
    )


def test_the_examples_of_the_help_are_run(servers: Servers, waltzctl: Tool) -> None:
    commands = ("create", "describe", "list", "set", "reset", "resume", "parked list", "parked replay")
    for words in (*commands, "remove"):
        for arguments in examples(waltzctl, ["group", *words.split()]):
            if words not in ("create", "remove"):
                servers.put(3, place(0, floor=9, stopped="id 10", parked=1), name="mailer")
                servers.parked["mailer"] = [ParkedTransaction(0, 17, 5, "one", "no")]
            if "--payload" not in arguments:
                assert waltzctl(*arguments, *WHERE).code == 0, arguments
