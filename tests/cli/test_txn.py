"""`waltzctl txn` and `waltzctl lock` against a real cluster."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.example import examples
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell.cluster_target import resolve, using
from waltzd import BlockingClient
from waltzd.cluster.cluster import CLIENT_IDS, Cluster
from waltzd.cluster.coordinator import Delete
from waltzd.cluster.documents import FORMAT
from waltzd.errors.operations import NodeMissing
from waltzd.protocol.batches import Registration
from waltzd.protocol.locks import Committed, append_lock, write_lock
from waltzd.wire.servers import ServerClient

Tool = Callable[..., Any]
PATIENCE_SECONDS = 60
HEADS = ["id", *(["time"] if FORMAT else []), "kind", "client", "size", "payload"]
ORDER = '{"order": {"sku": 17, "name": "Tür"}}'


def append(waltzctl: Tool, live: LocalCluster, partition: int, *words: str) -> int:
    done = waltzctl("txn", "append", partition, *words, "--directory", live.directory, "-o", "json")
    assert (done.code, done.err) == (0, ""), done
    found = json.loads(done.out)
    assert (found["version"], found["result"], found["partition"]) == (1, "committed", partition)
    return int(found["id"])


@dataclass(frozen=True)
class Log:
    """Four transactions of partition 0, one behind the other, and whatever others wrote."""

    waltzctl: Tool
    live: LocalCluster
    ids: tuple[int, ...]

    def __call__(self, *words: object) -> Any:
        return self.waltzctl("txn", *words, "--directory", self.live.directory)

    def rows(self, *words: object) -> list[dict[str, Any]]:
        told = self(*words, "-o", "json")
        assert (told.code, told.err) == (0, ""), told
        return [json.loads(line) for line in told.out.splitlines()]


@pytest.fixture
def log(waltzctl: Tool, live: LocalCluster) -> Log:
    ids = (
        append(waltzctl, live, 0, "hello"),
        append(waltzctl, live, 0, ORDER, "--kind", "7", "--lock", "write:order:17"),
        append(waltzctl, live, 0, "payout of 5\nand 6", "--kind", "-7"),
        append(waltzctl, live, 0, "x" * 200),
    )
    assert [id_ - ids[0] for id_ in ids] == [0, 1, 2, 3], "nobody else writes to this partition at the same time"
    return Log(waltzctl, live, ids)


def test_the_examples_of_the_help_run(log: Log) -> None:
    for words in (*(["txn", name] for name in ("get", "tail", "append", "grep", "history")), ["lock", "explain"]):
        for arguments in examples(log.waltzctl, words):
            done = log.waltzctl(*arguments, "--directory", log.live.directory)
            assert done.code == 0, (arguments, done)
            assert done.err == "" or words in (["txn", "grep"], ["txn", "history"]), arguments


# -- get ---------------------------------------------------------------------------------------------------------------


def test_get_in_every_form(log: Log) -> None:
    first, last = log.ids[0], log.ids[-1]
    told = log("get", 0, f"{first}-{last}")
    assert (told.code, told.err) == (0, "")
    lines = told.out.splitlines()
    assert lines[0].split() == HEADS
    assert [line.split()[0] for line in lines[1:]] == [str(id_) for id_ in log.ids]
    payloads = [line[lines[0].index("payload") :] for line in lines]
    assert ORDER.startswith(payloads[2].rstrip("…"))
    assert "payout of 5 and 6".startswith(payloads[3].rstrip("…")), "a line of a payload is no line of the table"
    assert max(map(len, lines)) == 80
    assert lines[4].endswith("x…")

    hello, order, payout, many = log.rows("get", 0, f"{first}-{last}")
    assert (hello["version"], hello["partition"], hello["id"], hello["size"]) == (1, 0, first, 5)
    assert (hello["payload_encoding"], hello["payload"]) == ("text", "hello")
    assert (order["payload_encoding"], order["payload"], order["kind"]) == ("json", json.loads(ORDER), 7)
    assert order["client"] > hello["client"] >= 0
    assert (payout["kind"], many["payload"]) == (-7, "x" * 200)
    assert [row["id"] for row in log.rows("get", 0, last, f"{first}-{first + 1}", first)] == [last, first, first + 1, first]
    assert log.rows("get", 0, first, "--decode", "hex")[0]["payload"] == b"hello".hex()

    assert log("get", 0, f"{first}-{first + 2}", "-o", "raw").out == f"hello{ORDER}payout of 5\nand 6"

    table = list(csv.DictReader(io.StringIO(log("get", 0, f"{first}-{last}", "-o", "csv").out)))
    assert [int(row["id"]) for row in table] == list(log.ids)
    assert json.loads(table[1]["payload"]) == json.loads(ORDER)
    assert (table[2]["payload"], table[2]["payload_encoding"]) == ("payout of 5\nand 6", "text")


def test_get_what_is_not_there(log: Log) -> None:
    beyond = log.ids[-1] + 1
    told = log("get", 0, log.ids[0], beyond)
    assert (told.code, told.out) == (3, ""), "all or nothing"
    assert f"W2011 partition 0 has ids up to {log.ids[-1]}, and {beyond} is beyond" in told.err
    for words in ((0, "1-"), (0, "2-1"), (0, "x"), (0, "9" * 20)):
        told = log("get", *words)
        assert (told.code, told.out) == (2, ""), words
        assert "W1001" in told.err


# -- tail and grep -----------------------------------------------------------------------------------------------------


def test_tail(log: Log, waltzctl: Tool) -> None:
    assert [row["id"] for row in log.rows("tail", 0, "-n", 3)] == list(log.ids[-3:])
    assert log.rows("tail", 0, "-n", 0) == []
    append(waltzctl, log.live, 1, "elsewhere")
    rows = log.rows("tail", "--all", "-n", 1)
    assert {(row["partition"], row["payload"]) for row in rows} >= {(0, "x" * 200), (1, "elsewhere")}
    lines = log("tail", "--all", "-n", 1).out.splitlines()
    assert lines[0].split() == ["partition", *HEADS]
    assert max(map(len, lines)) <= 80
    for words in (("tail",), ("tail", 0, "--all")):
        told = log(*words)
        assert (told.code, told.out) == (2, "")
        assert "Name a partition, or use --all." in told.err


PATIENT = "from waltzctl.records import follow; follow.LOOK_SECONDS = 60; from waltzctl.main import main; main()"
"""The tool as a program of its own, which does not say that a partition keeps it waiting."""


@pytest.fixture
def follow(log: Log) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Commands that have no end, as processes."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", PATIENT, "txn", *words, "--directory", str(log.live.directory)]
        started.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("command", ["tail", "grep"])
def test_follow_until_ctrl_c(log: Log, follow: Callable[..., subprocess.Popen[str]], command: str) -> None:
    last = log.ids[-1]
    begin = ["-n", "1"] if command == "tail" else ["--after", str(last - 1), "--match", "x|come"]
    process = follow(command, "0", "--follow", "-o", "json", *begin)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["id"] == last
    came = append(log.waltzctl, log.live, 0, "come")
    found = json.loads(process.stdout.readline())
    assert (found["id"], found["payload"]) == (came, "come")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_reader_of_what_has_no_end_goes_away(log: Log, follow: Callable[..., subprocess.Popen[str]]) -> None:
    process = follow("tail", "0", "--follow", "-n", "1")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    append(log.waltzctl, log.live, 0, "y" * 1000)
    assert process.wait(PATIENCE_SECONDS) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_grep(log: Log) -> None:
    first, order, payout, many = log.ids

    def ids(*words: object) -> list[int]:
        return [row["id"] for row in log.rows("grep", 0, "--after", first - 1, *words)]

    assert ids() == list(log.ids)
    assert ids("--match", "pay(ment|out)") == [payout]
    assert ids("--kind", 7) == [order]
    assert ids("--kind", "-7", "--match", "^payout") == [payout]
    assert ids("--json-path", "order.sku=17") == [order]
    assert ids("--json-path", "order.name=Tür", "--json-path", "order.sku") == [order]
    assert ids("--through", payout, "-n", 2) == [first, order]
    assert ids("--after", payout - 1, "--through", 1 << 60) == [payout, many], (
        "what is beyond the end is not there to match"
    )
    client = log.rows("get", 0, order)[0]["client"]
    assert ids("--client", client) == [order]
    told = log("grep", 0, "--after", first - 1, "--through", order, "--kind", "123")
    assert (told.code, told.out, told.err) == (0, "", f"Nothing matches in ids {first} to {order} of partition 0.\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--after", "4", "--through", "4"], "there are no ids after 4 through 4"),
        (["--match", "("], "this is not a regular expression"),
        (["--json-path", "a..b"], "this is not a path"),
        (["--through", "4", "--follow"], "exclude each other"),
        (["--kind", "99999999999"], "--kind"),
    ],
    ids=" ".join,
)
def test_grep_mistyped(log: Log, words: list[str], said: str) -> None:
    told = log("grep", 0, *words)
    assert (told.code, told.out) == (2, "")
    assert said in told.err


# -- history -----------------------------------------------------------------------------------------------------------


def test_history(log: Log, waltzctl: Tool) -> None:
    before, order = log.ids[0] - 1, log.ids[1]
    paid = append(waltzctl, log.live, 0, "paid", "--lock", "append:order:17")
    append(waltzctl, log.live, 0, "looked at", "--lock", "read:order:17")
    where = ("--partition", 0, "--after", before)

    def ids(*words: object) -> list[int]:
        return [row["id"] for row in log.rows("history", *words)]

    bits = f"{write_lock('order', 17).hash:016x}"
    for lock in ("order:17", "write:order:17", bits, bits.upper()):
        assert ids(lock, *where) == [order, paid], "a read lock marks nothing"
    assert ids("order:17", *where, "--newest-first") == [paid, order]
    assert ids("order:17", *where, "--through", paid - 1) == [order]
    assert ids("order:17", *where, "--through", paid) == [order, paid]
    for form in ("json", "csv", "raw"):
        told = log("history", "order:17", *where, "-o", form)
        assert told == log("grep", 0, "--after", before, "--match", "sku|paid", "-o", form), "in the same form"
    lines = log("history", "order:17", *where).out.splitlines()
    assert lines[0].split() == ["partition", *HEADS]
    assert [line.split()[:2] for line in lines[1:]] == [["0", str(order)], ["0", str(paid)]]

    for option, end, words, other in (("--after", order, (), paid), ("--through", paid - 1, ("--newest-first",), order)):
        told = log("history", "order:17", *where, "--limit", 1, "-o", "raw", *words)
        assert (told.code, told.err) == (0, f"There are more; continue with {option} {end}.\n")
        rest = (option, end) if option == "--after" else ("--after", before, option, end, *words)
        assert ids("order:17", "--partition", 0, *rest) == [other]


def test_history_of_a_lock_that_nothing_marked(log: Log) -> None:
    told = log("history", "nobody:17", "--partition", 0)
    assert (told.code, told.out) == (0, "")
    assert told.err == f"No transaction of partition 0 marked nobody:17 (ids 0 to {log.ids[-1]}).\n"
    told = log("history", "nobody:17", "--partition", 0, "--after", log.ids[-1], "-o", "json")
    assert (told.code, told.out) == (0, "")
    assert told.err == "No transaction of partition 0 marked nobody:17 (no ids in this range).\n"


def test_history_by_the_partition_of_the_name(log: Log, waltzctl: Tool) -> None:
    with BlockingClient(log.live.server_addresses) as client:
        number = client.partition_of("flight")
        committed = client.append(b"booked", locks=[append_lock("flight", "LX 1")])
    assert isinstance(committed, Committed)
    told = log("history", "flight:LX 2")
    assert (told.code, told.out) == (0, "")
    assert f" of partition {number} marked flight:LX 2 (" in told.err
    assert "If the application chose another partition, give --partition." in told.err
    (row,) = log.rows("history", "flight:LX 1", "--newest-first", "--limit", 1)
    assert (row["partition"], row["id"], row["payload"]) == (number, committed.id, "booked")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["order"], "write it as NAME:ID"),
        (["order:99999999999999999999"], "64 bits"),
        (["0123456789abcdef"], "A hash needs --partition."),
        (["order:17", "--after", "4", "--through", "4"], "there are no ids after 4 through 4"),
        (["order:17", "--limit", "10001"], "--limit"),
    ],
    ids=" ".join,
)
def test_history_mistyped(log: Log, words: list[str], said: str) -> None:
    told = log("history", *words)
    assert (told.code, told.out) == (2, "")
    assert said in told.err


# -- without client ids ------------------------------------------------------------------------------------------------


def test_reading_needs_no_client_id(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: ServerClient, introduction: object) -> Registration:
        raise NodeMissing("the coordinator has no document /ids/client")

    monkeypatch.setattr(ServerClient, "register", refuse)
    first, last = log.ids[0], log.ids[-1]
    assert [row["id"] for row in log.rows("get", 0, first, f"{first}-{last}")] == [first, *log.ids]
    assert [row["id"] for row in log.rows("tail", 0, "-n", 2)] == list(log.ids[-2:])
    assert [row["id"] for row in log.rows("grep", 0, "--after", first - 1)] == list(log.ids)
    assert log.rows("history", "order:17", "--partition", 0, "--newest-first")[0]["id"] == log.ids[1]
    assert "W2026" in log("append", 0, "x").err


def test_client_ids_that_an_operator_deletes_come_back(log: Log) -> None:
    async def delete(cluster: Cluster) -> None:
        await cluster.coordinator.commit([Delete(CLIENT_IDS, await cluster.read_counter())])

    before = log.rows("get", 0, log.ids[-1])[0]["client"]
    using(resolve({"directory": str(log.live.directory)}), delete)
    again = append(log.waltzctl, log.live, 0, "again")
    assert log.rows("get", 0, again)[0]["client"] > before


# -- append ------------------------------------------------------------------------------------------------------------


def test_append_says_the_id_or_the_refusal(log: Log) -> None:
    first, order, _, last = log.ids
    told = log("append", 0, "again", "--lock", "write:order:17", "--mark", first)
    assert (told.code, told.out) == (4, "")
    assert f"W2130 partition 0 refused it: CONFLICT, the lock write:order:17 was marked by transaction {order}" in told.err
    assert f"--mark {order}" in told.err
    told = log("append", 0, "again", "--lock", "read:other:1", "--lock", "write:order:17", "--mark", first, "-o", "json")
    found = json.loads(told.out)
    assert (told.code, found["result"], found["id"]) == (4, "rejected", None)
    assert (found["reason"], found["lock"], found["conflict_id"]) == ("CONFLICT", "write:order:17", order)
    assert [row["id"] for row in log.rows("tail", 0, "-n", 1)] == [last], "nothing was appended"
    told = log("append", 0, "again", "--lock", "write:order:17")
    assert (told.code, told.err) == (0, "")
    assert told.out.startswith(f"committed: partition 0, id {last + 1} ")
    append(log.waltzctl, log.live, 0, "and again", "--lock", "append:order:17", "--mark", str(first))


def test_append_from_a_file_and_from_standard_input(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256))
    (tmp_path / "payload").write_bytes(content)
    one = append(log.waltzctl, log.live, 0, "--file", str(tmp_path / "payload"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content * 2)))
    two = append(log.waltzctl, log.live, 0, "--file", "-")
    found = log.rows("get", 0, f"{one}-{two}")
    assert [bytes.fromhex(row["payload"]) for row in found] == [content, content * 2]
    assert "\x1b" not in log("get", 0, one, "--decode", "text").out
    assert append(log.waltzctl, log.live, 0, "") == two + 1, "an empty payload is one"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "give a text, or --file FILE"),
        (["a", "--file", "b"], 2, "give a text, or --file FILE"),
        (["--file", "no-such-file"], 2, "W1003"),
        (["a", "--lock", "order"], 2, "write it as MODE:NAME:ID"),
        (["a", "--lock", "steal:order:1"], 2, "this is not a lock"),
        (["a", "--lock", "write:order:99999999999999999999"], 2, "64 bits"),
        (["a", "--lock", "write:order:" + "9" * 5000], 2, "64 bits"),
        (["a", "--mark", "999999999"], 2, "no client can have seen that yet"),
        (["x" * (2 << 20)], 1, "W2013"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_append_what_cannot_be(log: Log, words: list[str], code: int, said: str) -> None:
    told = log("append", 0, *words)
    assert (told.code, told.out) == (code, "")
    assert said in told.err
    assert [row["id"] for row in log.rows("tail", 0, "-n", 1)] == [log.ids[-1]]


def test_a_protected_cluster_wants_its_name(
    log: Log, waltzctl: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = tmp_path / "contexts.yml"
    contexts.write_text(
        f"current: null\ncontexts:\n  payments: {{directory: '{log.live.directory}', protected: true}}\n", encoding="utf-8"
    )
    monkeypatch.setenv("WALTZ_CONTEXTS", os.fspath(contexts))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    told = waltzctl("txn", "append", 0, "a", "--context", "payments")
    assert (told.code, told.out) == (2, "")
    assert "W2101" in told.err
    assert "--confirm payments" in told.err
    assert waltzctl("txn", "append", 0, "a", "--context", "payments", "--confirm", "payment").code == 2
    assert [row["id"] for row in log.rows("tail", 0, "-n", 1)] == [log.ids[-1]]
    assert waltzctl("txn", "append", 0, "a", "--context", "payments", "--confirm", "payments").code == 0
    assert waltzctl("txn", "tail", 0, "--context", "payments").code == 0, "to read, nobody is asked"


# -- lock explain ------------------------------------------------------------------------------------------------------


def test_a_lock_is_explained(log: Log, waltzctl: Tool) -> None:
    def explain(*words: object) -> dict[str, Any]:
        told = waltzctl("lock", "explain", 0, *words, "--directory", log.live.directory, "-o", "json")
        assert (told.code, told.err) == (0, "")
        found = json.loads(told.out)
        assert found["version"] == 1
        return dict(found)

    first, order, _, last = log.ids
    found = explain("order", 17)
    assert (found["would_be_accepted"], found["lock_mark"], found["is_exact"], found["is_in_flight"]) == (
        True, order, True, False,
    )  # fmt: skip
    assert (found["mark"], found["high_water_mark"], found["last_id"]) == (last, last, last)
    assert (found["marked_by"]["id"], found["marked_by"]["kind"]) == (order, 7)
    assert found["marked_by"]["payload"] == json.loads(ORDER)
    refused = explain("order", 17, "--mark", first)
    assert (refused["would_be_accepted"], refused["reason"], refused["wait_for"]) == (False, "CONFLICT", order)
    assert explain("order", 17, "--mark", first, "--mode", "append")["would_be_accepted"] is True
    assert explain("order", 17, "--mark", first, "--mode", "read")["would_be_accepted"] is False
    other = explain("nobody", "-5")
    assert (other["lock_id"], other["marked_by"]) == (-5, None)
    assert other["lock_mark"] == other["floor"]

    named = explain("seat", "12A")
    assert (named["lock_id"], named["lock"]) == ("12A", f"{write_lock('seat', '12A').hash:016x}")

    told = waltzctl("lock", "explain", 0, "order", 17, "--mark", first, "--directory", log.live.directory)
    assert told.out.startswith("refused (CONFLICT): ")
    assert f"marked last by transaction {order:,}, which is committed" in told.out
    assert ORDER in told.out


def test_a_lock_of_no_partition(live: LocalCluster, waltzctl: Tool) -> None:
    told = waltzctl("lock", "explain", 99, "order", 17, "--directory", live.directory)
    assert (told.code, told.out) == (3, "")
    assert "W2007 there is no partition 99; the cluster has 4" in told.err
    assert waltzctl("lock", "explain", 0, "order", 1 << 64, "--directory", live.directory).code == 2


@pytest.mark.parametrize(
    "words",
    [["get", 4, 0], ["tail", 4], ["tail", 4, "-f"], ["grep", 4], ["append", 4, "x"], ["history", "a:1", "--partition", 4]],
)
def test_a_partition_that_is_not_there_is_not_found(live: LocalCluster, waltzctl: Tool, words: list[object]) -> None:
    told = waltzctl("txn", *words, "--directory", live.directory)
    assert (told.code, told.out) == (3, "")
    assert "W2007 there is no partition 4; the cluster has 4, from 0 on" in told.err
    assert "waltzctl partition list" in told.err
