"""`partition transfer`, `partition preferred` and `server`: against a real cluster, and where another cannot be had."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tests.cli.example import examples
from tests.cli.outcome import as_json, refused
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.placement import ownership
from waltzctl.placement.ownership import Owners, drain_plan, preference_rows, save, transfer_of, transfer_plan, undrain_plan
from waltzctl.shell import change
from waltzctl.shell.cluster_target import resolve, using
from waltzctl.snapshot.collector import take_snapshot
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Assignment, ClusterMeta, HistoryEntry, Ownership, Preferences, ServerMeta
from waltzd.cluster.memory import MemoryTree
from waltzd.errors import NoSuchPartition
from waltzd.errors.operations import ChangedMeanwhile, NoSuchName, WouldNotLast

Tool = Callable[..., Any]
PATIENCE_SECONDS = 60


@pytest.fixture
def place(live: LocalCluster, waltzctl: Tool) -> Iterator[list[str]]:
    """How the shared cluster is reached; afterwards nothing is preferred and nobody drains."""
    where = ["--directory", str(live.directory)]
    wait_until(lambda: is_settled(live.directory))
    yield where
    assert waltzctl("partition", "preferred", "0-3", "--clear", "--yes", *where).code == 0
    for name in live.blueprint.server_names:
        assert waltzctl("server", "drain", name, "--undo", *where).code == 0
    wait_until(lambda: is_settled(live.directory))


def is_settled(directory: Path) -> bool:
    """Both servers are there, the leader has nothing more to move, and everything is open with all its replicas."""

    async def ask(cluster: Cluster) -> bool:
        found = await Owners.of(cluster)
        is_planned = found.planned(found.servers, found.preferences) == found.assignment
        return len(found.servers) == 2 and is_planned and (await take_snapshot(cluster.coordinator)).is_healthy

    return using(resolve({"directory": str(directory)}), ask)


def owners(directory: Path) -> list[str | None]:
    async def ask(cluster: Cluster) -> list[str | None]:
        assignment, _ = await cluster.assignment()
        return [owner.server for owner in assignment.owners]

    return using(resolve({"directory": str(directory)}), ask)


def newest_entry(directory: Path) -> HistoryEntry:
    async def ask(cluster: Cluster) -> HistoryEntry:
        ((_, entry),) = await cluster.history(newest=1)
        return entry

    return using(resolve({"directory": str(directory)}), ask)


def other(name: str | None) -> str:
    return "server-2" if name == "server-1" else "server-1"


def poorer(owned: list[str | None]) -> str:
    """The server that owns fewer: of the logs of four partitions and of groups one server has two."""
    return min(("server-1", "server-2"), key=owned.count)


# -- against a real cluster --------------------------------------------------------------------------------------------


def test_a_transfer_from_a_dry_run_to_the_history(live: LocalCluster, place: list[str], waltzctl: Tool) -> None:
    before = owners(live.directory)
    source = poorer(before)
    number, to = before.index(source), other(source)
    words = ("partition", "transfer", str(number), "--to", to, *place)
    dry = waltzctl(*words, "--dry-run")
    assert (dry.code, dry.err) == (0, "")
    assert dry.out.startswith(f"would do: partition transfer {number}\n  move {number} from {source} to {to}\n  move ")
    assert "so that servers own equally many" in dry.out
    refused(waltzctl(*words), 2, "W2101", "--yes")
    assert owners(live.directory) == before

    done = as_json(waltzctl(*words, "--yes", "--reason", "a trial", "-o", "json"))
    assert (done["result"], len(done["moves"])) == ("done", 2)
    assert done["steps"] == [line.strip() for line in dry.out.splitlines()[1:3]], "what was shown is what was done"
    after = owners(live.directory)
    assert after[number] == to
    assert sorted(map(str, after)) == sorted(map(str, before)), "as many as before"
    entry = newest_entry(live.directory)
    assert (entry.verb, entry.subject, entry.reason, entry.outcome) == (
        "partition transfer",
        str(number),
        "a trial",
        "done",
    )

    opened = as_json(waltzctl("server", "list", *place, "-o", "json"))
    assert {server["name"]: server["open"] for server in opened["servers"]} == {source: 2, to: 3}
    again = waltzctl(*words)
    assert (again.code, again.out) == (0, f"nothing to do: partition transfer {number}\n")


def test_what_cannot_be_transferred(live: LocalCluster, place: list[str], waltzctl: Tool) -> None:
    before = owners(live.directory)
    to = other(before[0])
    refused(waltzctl("partition", "transfer", "0", "--to", "sever-1", "--yes", *place), 3, "did you mean server-1?")
    refused(
        waltzctl("partition", "transfer", "5", "--to", to, "--yes", *place), 3, "there is no partition 5; the cluster has 4"
    )
    refused(waltzctl("partition", "transfer", "0x", "--to", to, "--yes", *place), 2, "'0x' is no partition")
    refused(waltzctl("partition", "transfer", "0-3", "--to", to, "--yes", *place), 4, "W2110", "an even share of")
    assert waltzctl("partition", "preferred", "0", "--server", str(before[0]), "--yes", *place).code == 0
    told = waltzctl("partition", "transfer", "0", "--to", to, "--yes", *place)
    refused(told, 4, f"an operator prefers partition 0 at {before[0]}", f"partition preferred 0 --server {to}", "--clear")
    assert owners(live.directory) == before


def test_preferences_move_partitions_and_last(live: LocalCluster, place: list[str], waltzctl: Tool) -> None:
    empty = waltzctl("partition", "preferred", *place)
    assert (empty.code, empty.out) == (
        0, "No partition is preferred at any server: they are shared evenly, and stay where they are.\n",
    )  # fmt: skip
    to = other(owners(live.directory)[1])
    done = waltzctl("partition", "preferred", "1", "--server", to, "--yes", *place)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"done: partition preferred 1\n  prefer {to} for 1\n  the leader moves 1 from ")
    wait_until(lambda: owners(live.directory)[1] == to)
    rows = as_json(waltzctl("partition", "preferred", *place, "-o", "json"))["preferences"]
    assert rows == [
        {"partition": 1, "servers": [to], "by": "operator", "owner": to, "honoured": True, "why_not": ""},
    ]
    assert waltzctl("partition", "preferred", "0", *place, "-o", "name").out == ""
    again = waltzctl("partition", "preferred", "1", "--server", to, *place)
    assert (again.code, again.out) == (0, "nothing to do: partition preferred 1\n")

    crowded = waltzctl("partition", "preferred", "0-3", "--server", to, "--yes", *place)
    assert crowded.code == 0
    assert crowded.err.count(f"does not go to {to} now: {to} has its even share without it") == 1
    cleared = waltzctl("partition", "preferred", "0-3", "--clear", "--yes", *place)
    assert cleared.out == "done: partition preferred 0-3\n  prefer no server for 0-3\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--server", "server-1"], 2, "no partitions are given"),
        (["--clear"], 2, "no partitions are given"),
        (["0", "--server", "server-1", "--clear"], 2, "cannot be combined"),
        (["0", "--server", "server-9"], 3, "there is no server server-9"),
        (["7"], 3, "there is no partition 7"),
        (["0", "--clear", "-o", "csv"], 2, "for the list only"),
    ],
)
def test_preferences_that_are_none(place: list[str], waltzctl: Tool, words: list[str], code: int, said: str) -> None:
    refused(waltzctl("partition", "preferred", *words, *place), code, said)


def test_a_server_drains_and_takes_part_again(live: LocalCluster, place: list[str], waltzctl: Tool) -> None:
    before = owners(live.directory)
    dry = waltzctl("server", "drain", "server-1", "--dry-run", *place)
    assert dry.out.startswith(
        "would do: server drain server-1\n  server-1 takes no partitions any more\n  the leader moves "
    )
    done = as_json(waltzctl("server", "drain", "server-1", "--yes", *place, "-o", "json"))
    assert (done["result"], len(done["moves"])) == ("done", before.count("server-1"))
    assert owners(live.directory) == ["server-2"] * 5
    found = as_json(waltzctl("server", "list", *place, "-o", "json"))
    states = {
        server["name"]: (server["partitions"], server["open"], "draining" in server["state"]) for server in found["servers"]
    }
    assert states == {"server-1": ([], 0, True), "server-2": ([0, 1, 2, 3, 4], 5, False)}
    assert waltzctl("server", "drain", "server-1", *place).out == "nothing to do: server drain server-1\n"

    refused(waltzctl("server", "drain", "server-2", "--yes", *place), 5, "W2100", "nobody would take over 0-4")
    refused(
        waltzctl("partition", "transfer", "0", "--to", "server-1", "--yes", *place), 4, "W2110", "server drain server-1"
    )
    refused(waltzctl("server", "drain", "server-3", *place), 3, "there is no server server-3")

    back = waltzctl("server", "drain", "server-1", "--undo", *place)
    assert back.code == 0, "nothing can be lost by it, so nobody is asked"
    assert back.out.startswith("done: server drain --undo server-1\n  server-1 takes partitions again\n  the leader moves ")
    assert owners(live.directory).count("server-1") == 2, "it ends when what comes back is open there"
    found = as_json(waltzctl("server", "list", *place, "-o", "json"))
    assert [server["open"] for server in found["servers"]] == [2, 3]


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ("server drain server-1", "server drain server-2"),
        (
            "storage availability storage-1 0 --offline --confirm storage-1",
            "storage availability storage-2 0 --offline --confirm storage-2",
        ),
    ],
)
def test_two_who_are_asked_at_the_same_time_cannot_both_say_yes(
    place: list[str], waltzctl: Tool, monkeypatch: pytest.MonkeyPatch, words: str, others: str
) -> None:
    """Each by itself is safe; the one who answers later is told."""
    confirm = change._confirm

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(change, "_confirm", confirm)
        done = waltzctl(*others.split(), "--yes", *place)
        assert done.code == 0, done.err
        confirm(*arguments)

    monkeypatch.setattr(change, "_confirm", late)
    refused(waltzctl(*words.split(), "--yes", *place), 4, "W2025", "the cluster changed after the plan was made")
    if others.startswith("storage"):
        assert waltzctl("storage", "availability", "storage-2", "0", "--online", "--yes", *place).code == 0


def test_the_examples_of_the_help_run(live: LocalCluster, place: list[str], waltzctl: Tool) -> None:
    for words in (
        ["server", "list"], ["partition", "transfer"], ["partition", "preferred"],
        ["server", "drain"],
    ):  # fmt: skip
        for arguments in examples(waltzctl, words):
            done = waltzctl(*arguments, *place)
            assert (done.code, done.err) == (0, ""), arguments


def test_a_server_that_is_up_is_not_taken_out(place: list[str], waltzctl: Tool) -> None:
    refused(waltzctl("server", "remove", "server-1", "--yes", *place), 5, "W2100", "server-1 is up: stop it first")
    refused(waltzctl("server", "remove", "server-9", "--yes", *place), 3, "W", "server-9")


def test_a_server_that_was_stopped_is_taken_out(own: LocalCluster, waltzctl: Tool) -> None:
    place = ["--directory", str(own.directory)]
    wait_until(lambda: is_settled(own.directory))
    own.daemons["server-2"].ask_to_end()
    assert own.daemons["server-2"].wait_end(60)
    dry, done = (
        as_json(waltzctl("server", "remove", "server-2", option, "-o", "json", *place)) for option in ("--dry-run", "--yes")
    )
    assert [told["result"] for told in (dry, done)] == ["dry-run", "done"]
    assert dry["steps"] == done["steps"]
    refused(waltzctl("server", "remove", "server-2", "--yes", *place), 3, "W2102", "there is no server server-2")
    assert waltzctl("cluster", "wait", "--healthy", "--timeout", "60", *place).code == 0, "nobody misses it"


def test_a_server_that_does_not_answer_is_part_of_the_list(
    own: LocalCluster, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen, it is still registered. Storages that are frozen hold up a transfer, which says so."""
    place = ["--directory", str(own.directory)]
    wait_until(lambda: is_settled(own.directory))
    to = poorer(owners(own.directory))
    number = owners(own.directory).index(other(to))
    with frozen(own, "storage-1", "storage-2"), monkeypatch.context() as patched:
        end_when_said(patched, rf"{number}: .*storage-1")
        told = waltzctl("partition", "transfer", str(number), "--to", to, "--yes", "--timeout", "1", *place)
        refused(told, 6, f"W2111 after 1 seconds, partitions {number}: ", "storage-1")
        entry = newest_entry(own.directory)
        assert entry.outcome.startswith("W2111 ")
        assert owners(own.directory)[number] == to, "what was done stays done"
    with frozen(own, "server-1"):
        listed = waltzctl("server", "list", *place)
        assert listed.code == 0
        row = next(line for line in listed.out.splitlines() if line.strip().startswith("server-1"))
        assert "silent" in row


def end_when_said(patched: pytest.MonkeyPatch, words: str) -> None:
    """The seconds for which a command waits are over when it has seen that this is what it waits for."""
    format_waits, told = ownership.format_waits, list[str]()

    def recorded(waits: Mapping[int, str]) -> str:
        told.append(format_waits(waits))
        return told[-1]

    began = time.monotonic()

    def clock() -> float:
        has_seen = any(re.match(words, said) for said in told)
        return 1.0 if has_seen or time.monotonic() - began > PATIENCE_SECONDS else 0.0

    patched.setattr(ownership, "format_waits", recorded)
    patched.setattr(ownership, "time", SimpleNamespace(monotonic=clock))


@contextlib.contextmanager
def frozen(cluster: LocalCluster, *names: str) -> Iterator[None]:
    lives = [life for name in names if (life := cluster.daemons[name].life) is not None]
    assert len(lives) == len(names)
    for life in lives:
        os.kill(life.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for life in lives:
            os.kill(life.pid, signal.SIGCONT)


def wait_until(is_so: Callable[[], bool]) -> None:
    """What the leader does after the command has ended; the deadline is for a leader that never does."""

    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- as a plan ---------------------------------------------------------------------------------------------------------

META = ClusterMeta(name="test", key=UUID(int=7), partitions=4, created="2026-01-01")


def server(name: str, preferred: tuple[int, ...] = (), *, is_draining: bool = False) -> ServerMeta:
    return ServerMeta(
        name=name, listen=f"{name}:1", admin_listen=f"{name}:2", instance=UUID(int=1), version="1", preferred=preferred,
        is_draining=is_draining,
    )  # fmt: skip


def owners_of(*servers: ServerMeta, owners: str = "aabb", preferred: dict[int, str] | None = None) -> Owners:
    return Owners(
        meta=META,
        servers={found.name: found for found in servers},
        assignment=Assignment(owners=tuple(Ownership(owner, 3) for owner in owners)),
        version=0,
        preferences=Preferences(partitions=preferred or {}),
        preferences_version=-1,
    )


def test_transfers_that_are_refused() -> None:
    both = (server("a"), server("b"))
    for found, numbers, to, kind, said in (
        (owners_of(*both), [4], "b", NoSuchPartition, "there is no partition 4; the cluster has 4"),
        (owners_of(*both), [0], "c", NoSuchName, "there is no server c"),
        (owners_of(server("a"), server("b", is_draining=True)), [0], "b", WouldNotLast, "b is draining"),
        (owners_of(server("a", (0,)), server("b")), [0], "b", WouldNotLast, "a prefers partition 0 by itself"),
    ):
        with pytest.raises(kind, match=said):
            transfer_of(found, numbers, to)
    found = owners_of(server("a", (0,)), server("b"), preferred={0: "b"}, owners="baba")
    assert transfer_of(found, [0], "b") == found.assignment, "an operator goes before a server"


def test_a_transfer_tells_first_what_was_asked() -> None:
    found = owners_of(server("a"), server("b"))
    made = transfer_plan(found.assignment, transfer_of(found, [1], "b"), [1])
    assert made.steps[0] == "move 1 from a to b"
    assert made.steps[1].endswith(" from b to a, so that servers own equally many")
    assert (made.subject, len(made.steps)) == ("1", 2)


def test_somebody_was_faster() -> None:
    async def work() -> None:
        coordinator = MemoryTree().connect()
        cluster = await Cluster.create(coordinator, META)
        before = replace(owners_of(server("a"), server("b")).assignment)
        version = await cluster.save_assignment(before, 0)
        found = replace(owners_of(server("a"), server("b")), version=version)
        moved = Assignment(owners=(Ownership("a", 3), Ownership("b", 4), Ownership("a", 4), Ownership("b", 3)))
        await cluster.save_assignment(moved, version)
        with pytest.raises(ChangedMeanwhile, match="partitions moved meanwhile: 1 from a to b; 2 from b to a") as told:
            await save(cluster, found, transfer_of(found, [0], "b"))
        assert told.value.exit_code == 4
        assert await cluster.assignment() == (moved, version + 1)

    asyncio.run(work())


def test_preferences_and_why_they_are_not_met() -> None:
    found = owners_of(
        server("a", (3,)), server("b", (3,)), server("c", is_draining=True), owners="aaab",
        preferred={0: "b", 1: "c", 2: "gone"},
    )  # fmt: skip
    rows = {row["partition"]: (row["servers"], row["by"], row["why_not"]) for row in preference_rows(found)}
    assert rows == {
        0: (["b"], "operator", "b has its even share without it"),
        1: (["c"], "operator", "c is draining"),
        2: (["gone"], "operator", "gone is not up"),
        3: (["a", "b"], "server", ""),
    }


def test_drains_as_plans() -> None:
    found = owners_of(server("a"), server("b"), server("c", is_draining=True))
    made, after = drain_plan(found, "a", [0, 1])
    assert made.steps == ("a takes no partitions any more", "the leader moves 0-1 from a to b")
    assert after is not None
    assert made.unsafe == ()
    made, after = drain_plan(found, "c", [])
    assert (made.steps, made.unsafe) == ((), ())
    made, after = drain_plan(found, "c", [2])
    assert made.steps == ("c closes 2",), "it has not closed all that it gave away"
    alone = owners_of(server("a"), server("c", is_draining=True), owners="aaaa")
    made, after = drain_plan(alone, "a", [0, 1, 2, 3])
    assert (made.unsafe, after) == (("a is the only server that takes partitions: nobody would take over 0-3",), None)
    made, _ = undrain_plan(found, "c")
    assert made.steps[0] == "c takes partitions again"
    assert undrain_plan(found, "a")[0].steps == ()
