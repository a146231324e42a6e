"""Storages that are added, removed and replaced in a real cluster that goes on working: by one operator, by two at once,
and by a tool that is killed in the middle."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import LASTING
from tests.cli.document_tree import document_tree
from tests.cli.example import examples
from tests.cli.moving_words import PATIENCE_SECONDS, bounded
from tests.cli.numbered_load import NumberedLoad
from tests.cli.outcome import refused
from tests.spare_storages import members
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell.cluster_target import resolve, using
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.client import loop
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import CopyRate, Membership
from waltzd.errors import EXIT_UNSAFE

Tool = Callable[..., Any]
FIRST = ["storage-1", "storage-2", "storage-3"]
SMALL_TAIL = {"server": {**LASTING["server"], "tail_bytes_max": "1MiB"}}
KILLS = 2
"""How often each command is killed before it may come to its end."""


class Place:
    """A cluster of three storages, with two more that run and do not belong to it. After each test it is as it was."""

    def __init__(self, local: LocalCluster, waltzctl: Tool) -> None:
        self.local, self.bare = local, waltzctl
        self.directory = str(local.directory)

    def tool(self, *words: str) -> Any:
        return self.bare(*bounded(words), "--directory", self.directory)

    def json(self, *words: str) -> Any:
        done = self.tool(*words, "-o", "json")
        found = json.loads(done.out)
        assert (done.code, found["version"]) == (0, 1), done
        return found

    def process(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "waltzctl", *bounded(words), "--directory", self.directory],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def new(self, name: str, group: str = "") -> str:
        return ",".join([f"{name}={','.join(self.local.blueprint.addresses(name))}", *([group] if group else [])])

    def snapshot(self) -> ClusterSnapshot:
        return loop.run(self.local.snapshot())

    def replicas(self) -> dict[int, dict[str, Membership]]:
        return {found.partition: dict(found.replicas) for found in self.snapshot().partitions}

    def names(self) -> list[str]:
        return [view.meta.name for view in self.snapshot().storages]

    def held(self, name: str) -> list[int]:
        return [int(number) for number in self.tool("storage", "describe", name, "-o", "name").out.split()]

    def history(self) -> list[tuple[str, str, str]]:
        async def ask(cluster: Cluster) -> list[tuple[str, str, str]]:
            return [(entry.verb, entry.subject, entry.outcome) for _, entry in await cluster.history()]

        return using(resolve({"directory": self.directory}), ask)

    def copy_rate(self) -> CopyRate | None:
        return using(resolve({"directory": self.directory}), Cluster.copy_rate)

    def wait_until(self, what: str, true: Callable[[ClusterSnapshot], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not true(found := self.snapshot()):
            assert time.monotonic() < deadline, f"{what}: {found}"
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        self.local.recall()
        self.local.daemons[name].kill()
        self.wait_until(f"{name} is missed", lambda found: name in found.silent and bool(found.short))

    def start(self, name: str) -> None:
        self.local.start_one(name)

    def restore(self) -> None:
        """Storages 1 to 3 belong to it, and hold a replica of everything."""
        self.local.start()
        for name in FIRST:
            if name not in self.names():
                done = self.tool("storage", "add", self.new(name, group=name), "--yes")
                assert done.code == 0, done
        for name in self.names():
            if name not in FIRST:
                done = self.tool("storage", "remove", name, "--yes", "--confirm", name)
                assert done.code == 0, done
        done = self.tool("cluster", "set", "--replicas", "3", "--yes", "--confirm", "local")
        assert done.code == 0, done
        self.wait_until("all is well", lambda found: found.is_healthy and not found.moves)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    local = LocalCluster.make(
        tmp_path_factory.mktemp("membership") / "cluster", partitions=2, storages=5, settings=SMALL_TAIL
    )
    try:
        with members(3):
            local.start()
        yield local
    finally:
        local.kill()


@pytest.fixture
def place(cluster: LocalCluster, waltzctl: Tool) -> Iterator[Place]:
    found = Place(cluster, waltzctl)
    yield found
    found.restore()


def everywhere(*names: str) -> dict[int, dict[str, Membership]]:
    return {number: dict.fromkeys(names, Membership.MEMBER) for number in range(3)}


def test_one_storage_under_two_names_is_refused(place: Place) -> None:
    """Two replicas on one disk would be none more. An address may be spelled in more than one way."""
    before = document_tree(place.directory)
    listen, admin = place.local.blueprint.addresses("storage-1")
    again = [address.replace("127.0.0.1", "localhost") for address in (listen, admin)]
    theirs = place.local.blueprint.addresses("storage-2")
    for words in (
        ["storage", "add", f"storage-9={again[0]},{again[1]}", "--auto-assign", "--yes"],
        ["storage", "remove", "storage-1", "--replacement", f"storage-9={again[0]},{again[1]}", "--yes"],
        ["storage", "set", "storage-1", "--listen", theirs[0], "--admin-listen", theirs[1], "--yes"],
        ["storage", "set", "storage-2", "--listen", again[0], "--admin-listen", again[1], "--yes"],
    ):
        refused(place.tool(*words), 4, "Not done: nothing was changed", "storage-")
    assert document_tree(place.directory) == before
    assert place.tool("storage", "set", "storage-1", "--listen", again[0], "--dry-run").code == 0, "itself, spelled anew"


# -- nothing is changed ------------------------------------------------------------------------------------------------


def test_plans_change_nothing(place: Place) -> None:
    """Every command that would change something, also the examples of the help texts."""
    before = document_tree(place.directory)
    four = place.new("storage-4")
    for words in (
        ["storage", "add", four],
        ["storage", "add", four, "--auto-assign"],
        ["storage", "remove", "storage-3", "--fewer-replicas"],
        ["storage", "remove", "storage-3", "--fewer-replicas", "--delete-files"],
        ["storage", "remove", "storage-3", "--replacement", four],
        ["storage", "set", "storage-1", "--group", "rack-1"],
        ["storage", "availability", "storage-1", "0", "--offline"],
        ["partition", "assign", "0", "--off", "storage-3"],
        ["cluster", "set", "--replicas", "1"],
    ):
        planned = place.tool(*words, "--dry-run")
        assert (planned.code, planned.err) == (0, ""), planned
        assert planned.out.startswith("would do: "), planned
        assert planned.out.endswith("Nothing was changed.\n")
        assert all(len(line) <= 80 for line in planned.out.splitlines() if line.startswith(" partition "))
        found = place.json(*words, "--dry-run")
        assert found["result"] == "dry-run"
        assert found["steps"], found
        if "--override" not in words:  # which is agreement enough
            assert place.tool(*words).code == 2, "there is nobody to ask"
    assert document_tree(place.directory) == before


def test_the_examples_of_the_help_run(place: Place) -> None:
    four = dict(zip(("127.0.0.1:55480", "127.0.0.1:55481"), place.local.blueprint.addresses("storage-4"), strict=True))
    pattern = re.compile("|".join(map(re.escape, four)))
    for verb in ("add", "remove", "set"):
        for typed in examples(place.bare, ["storage", verb]):
            done = place.tool(*(pattern.sub(lambda found: four[found[0]], word) for word in typed))
            assert (done.code, done.err) == (0, ""), done
    assert place.json("storage", "list")["storages"][0]["group"] == "rack-1"
    assert place.tool("storage", "set", "storage-1", "--group", "storage-1", "--yes").code == 0


def test_what_cannot_be_meant(place: Place) -> None:
    before = document_tree(place.directory)
    four = place.new("storage-4")
    one, two = place.local.blueprint.addresses("storage-1"), place.local.blueprint.addresses("storage-4")
    for words, code, said in (
        (["storage", "add", "storage-4"], 2, "is not a storage"),
        (["storage", "add", "storage-4=127.0.0.1:1,127.0.0.1:1"], 6, "W4001"),
        (["storage", "add", f"storage-9={one[0]},{two[1]}"], 4, "an address of the storage storage-1 already"),
        (["storage", "add", f"storage-1={two[0]},{two[1]}"], 4, "has a storage storage-1 already"),
        (["storage", "add", f"storage-4={two[1]},{two[1]}"], 6, "but not at"),
        (["storage", "add", f"storage-4={two[1]},{two[0]}"], 2, f"swapped: {two[0]} is its LISTEN address"),
        (["storage", "remove", "storage-9"], 3, "W2102"),
        (["storage", "remove", "storage-3"], 5, "add a storage first, or give --fewer-replicas"),
        (["storage", "remove", "storage-9", "--replacement", four], 3, "did you mean"),
        (["storage", "remove", "storage-1", "--replacement", "storage-4"], 3, "W2102"),
        (["storage", "remove", "storage-1", "--replacement", "storage-1"], 2, "cannot replace itself"),
        (["storage", "remove", "storage-1", "--replacement", "storage-2"], 2, "W1001"),
        (["storage", "set", "storage-9", "--group", "x"], 3, "W2102"),
        (["storage", "set", "storage-1", "--admin-listen", "127.0.0.1:1"], 6, "W4001"),
        (["storage", "set", "storage-2", "--listen", one[0]], 4, "an address of the storage storage-1 already"),
        (["storage", "set", "storage-1", "--group", ""], 2, "the group has no name"),
        (["storage", "set", "storage-1", "--listen", "nowhere"], 2, "--listen nowhere"),
        (["storage", "availability", "storage-9", "0", "--offline"], 3, "W2102"),
        (["storage", "availability", "storage-1", "7", "--offline"], 3, "W2007"),
        (["cluster", "set", "--replicas", "4"], 2, "W1001"),
        (["cluster", "delete"], 5, "own its partitions"),
        (["cluster", "delete", "--override", "local", "--reason", "x", "--yes"], 5, "own its partitions"),
        (["storage", "remove", "storage-3", "--fewer-replicas"], 2, "say --confirm storage-3"),
        (["storage", "remove", "storage-3", "--fewer-replicas", "--confirm", "storage-2"], 2, "--confirm storage-2"),
    ):
        told = place.tool(*words)
        refused(told, code, said)
        assert told.out == "", told
    assert document_tree(place.directory) == before


# -- one operator ------------------------------------------------------------------------------------------------------


def test_a_storage_comes_and_goes(place: Place, tmp_path: Path) -> None:
    four = place.new("storage-4", "rack-4")
    with NumberedLoad(place.local.server_addresses, tmp_path) as load:
        added = place.tool("storage", "add", four, "--auto-assign", "--yes")
        assert (added.code, added.err) == (0, ""), added
        assert added.out.startswith("done: storage add storage-4\n  add storage-4 at ")
        loads = [sum(name in roles for roles in place.replicas().values()) for name in [*FIRST, "storage-4"]]
        assert sorted(loads) == [2, 2, 2, 3]
        assert all(len(roles) == 3 and set(roles.values()) == {Membership.MEMBER} for roles in place.replicas().values())
        assert [len(place.held(name)) for name in [*FIRST, "storage-4"]] == loads, "what moved is cleared away"
        again = place.json("storage", "add", four, "--auto-assign", "--yes")
        assert (again["result"], again["steps"]) == ("nothing-to-do", [])

        gone = place.json("storage", "remove", "storage-4", "--yes")
        assert gone["result"] == "done"
        assert sorted(gone["cleared"]) == ["storage-4"]
        assert place.replicas() == everywhere(*FIRST)
        assert place.names() == FIRST
        assert place.json("storage", "remove", "storage-4", "--yes")["result"] == "nothing-to-do"
        assert place.tool("storage", "remove", "storage-4").out == "nothing to do: storage remove storage-4\n"
        refused(place.tool("storage", "remove", "storage-5"), 3, "there is no storage storage-5")
    assert load.acknowledged > 10
    assert place.history()[-2:] == [("storage add", "storage-4", "done"), ("storage remove", "storage-4", "done")]
    shown = place.tool("history")
    assert shown.code == 0
    assert [line.split()[-1] for line in shown.out.splitlines() if "storage-4" in line] == ["done", "done"], "a line each"
    newest = place.json("history", "-n", "1")["history"]
    assert [(entry["verb"], entry["outcome"]) for entry in newest] == [("storage remove", "done")]
    address = place.local.blueprint.addresses("storage-4")[1]
    assert place.bare("storage", "describe", address, "-o", "name").out == "", "its files were set aside"


def test_another_one_stands_for_a_dead_one(place: Place, tmp_path: Path) -> None:
    with NumberedLoad(place.local.server_addresses, tmp_path) as load:
        place.kill("storage-3")
        refused(place.tool("storage", "remove", "storage-2", "--fewer-replicas", "--yes"), 5, "W2100", "partition 0")
        refused(place.tool("storage", "availability", "storage-2", "0", "--offline", "--yes"), 5, "W2100")
        dry = place.tool("storage", "availability", "storage-2", "0-1", "--offline", "--dry-run", "-o", "json")
        assert (dry.code, json.loads(dry.out)["result"]) == (5, "refused")
        done = place.tool("storage", "remove", "storage-3", "--replacement", place.new("storage-4"), "--yes")
        assert (done.code, done.err) == (0, ""), done
        assert place.replicas() == everywhere("storage-1", "storage-2", "storage-4")
        assert place.names() == ["storage-1", "storage-2", "storage-4"]
        assert place.json("storage", "list")["storages"][2]["group"] == "storage-3", (
            "it fails with whatever the old one did"
        )
        again = ("storage", "remove", "storage-3", "--replacement", "storage-4", "--yes")
        assert place.json(*again)["result"] == "nothing-to-do"
        assert place.json("storage", "remove", "storage-3", "--yes")["result"] == "nothing-to-do"
        refused(place.tool("storage", "remove", "storage-3", "--replacement", place.new("storage-5"), "--yes"), 3, "W2102")
        place.wait_until("all is well", lambda found: found.is_healthy)
    assert load.acknowledged > 10


def test_a_dead_one_is_taken_out(place: Place) -> None:
    place.kill("storage-1")
    done = place.json("storage", "remove", "storage-1", "--fewer-replicas", "--confirm", "storage-1", "--yes")
    assert (done["result"], done["cleared"]) == ("done", {})
    assert place.replicas() == everywhere("storage-2", "storage-3")
    place.wait_until("all is well", lambda found: found.is_healthy)


def test_offline_and_online(place: Place) -> None:
    """Nothing is written meanwhile, so the owner does not miss it; whoever takes the next one off does."""
    told = place.tool("storage", "availability", "storage-1", "0", "--offline", "--yes", "--confirm", "storage-1")
    assert told.code == 0, told
    row = place.json("storage", "describe", "storage-1")["assigned"][0]
    assert (row["partition"], row["status"]["is_available"]) == (0, False)
    refused(place.tool("storage", "availability", "storage-2", "0", "--offline", "--yes"), 5, "W2100", "partition 0")
    refused(place.tool("partition", "assign", "0", "--off", "storage-2", "--yes"), 5, "W2100", "partition 0")
    unsafe = ("--override", "storage-2", "--reason", "to see what is said then")
    told = place.tool("storage", "availability", "storage-2", "0", "--offline", *unsafe)
    assert told.code == 0, told
    status = place.tool("status")
    assert (status.code, status.out.splitlines()[0][:36]) == (10, "DEGRADED: 1 of 2 partitions are open"), status
    rows = place.json("partition", "list")["partitions"]
    assert [(row["state"], row["level"]) for row in rows] == [("waiting", 1), ("open", 3), ("open", 3)]
    assert "partition 0 takes no transactions" in place.tool("doctor").out
    for name in ("storage-1", "storage-2"):
        assert place.json("storage", "availability", name, "0", "--online", "--yes")["result"] == "done"
    place.wait_until("it is back", lambda found: found.is_healthy)


def test_an_interrupted_move_is_listed_gone_on_with_and_taken_back(place: Place, tmp_path: Path) -> None:
    """More than an owner has in memory, so that it is copied: one record is worth a quarter of an hour at this rate."""
    payload = tmp_path / "payload"
    payload.write_bytes(bytes(800_000))
    for number in ("0", "1"):
        for _ in range(3):
            assert place.tool("txn", "append", number, "--file", str(payload)).code == 0
    words = ("storage", "remove", "storage-3", "--replacement", place.new("storage-4"), "--yes")
    slow = place.process(*words, "--rate", "2kB", "--progress", "json")
    assert slow.stderr is not None
    events = [json.loads(slow.stderr.readline())]
    while "done" not in events[-1]:
        events.append(json.loads(slow.stderr.readline()))
    found = place.copy_rate()
    assert found is not None
    shares = (2000 // 3, 2000 // 2)  # the group log is small: its replica may have arrived already
    assert found.bytes_per_second in shares, "the rate is shared by the replicas that move"
    slow.send_signal(signal.SIGINT)
    rest = slow.stderr.read()
    slow.communicate(timeout=PATIENCE_SECONDS)
    assert slow.returncode == 130
    goes_on = r"`waltzctl partition assign (0-[12])` resumes, `waltzctl partition assign \1 --cancel` cancels"
    assert re.search(goes_on, rest), rest
    assert place.copy_rate() == found, "owners go on copying, and not faster"
    rows = place.json("partition", "list")["partitions"]
    assert ["storage-4" in (row["moves_to"] or ()) for row in rows[:2]] == [True, True]
    told = place.tool("partition", "assign", "0", "--cancel", "--yes")
    assert (told.code, place.copy_rate()) == (0, found), told
    assert sorted(place.replicas()[0]) == ["storage-1", "storage-2", "storage-3"]
    left = [row["partition"] for row in place.json("partition", "list")["partitions"] if row["moves_to"]]
    assert left[:1] == [1]

    done = place.tool(*words, "--progress", "json")
    assert done.code == 0, done
    begun = [line for line in rest.splitlines() if line.startswith("{")]
    events += [json.loads(line) for line in [*begun, *done.err.splitlines()]]
    assert {event["event"] for event in events} == {"progress"}
    told = [event for event in events if "done" in event]
    assert all(0 <= event["done"] <= event["total"] and event["unit"] == "bytes" for event in told)
    assert place.names() == ["storage-1", "storage-2", "storage-4"]


# -- a tool that is killed, and two at once ----------------------------------------------------------------------------


@pytest.mark.long  # in short: an interrupted move above, and the killed tools of tests/unit/operators.py
def test_tools_that_are_killed_at_any_moment(place: Place, tmp_path: Path) -> None:
    """Each command is killed, again and again, and then runs to its end."""
    draw = random.Random(7)
    with NumberedLoad(place.local.server_addresses, tmp_path) as load:
        for words, subject in (
            (["storage", "add", place.new("storage-4"), "--auto-assign", "--yes"], "storage-4"),
            (["storage", "remove", "storage-2", "--replacement", place.new("storage-5"), "--yes"], "storage-2 storage-5"),
            (["storage", "remove", "storage-4", "--yes"], "storage-4"),
        ):
            for _ in range(KILLS):
                process = place.process(*words)
                time.sleep(draw.uniform(0.5, 3.5))  # when it dies is drawn: nothing depends on it
                process.kill()
                process.communicate()
            done = place.tool(*words)
            # Killed between its last change and the word that it is done, nobody knows who has taken a storage out.
            gone = done.code == 3 and subject.split()[0] not in place.names() and words[1] != "add"
            assert done.code == 0 or gone, done
            place.wait_until("all is well", lambda found: found.is_healthy and not found.moves)
            if not gone:
                again = place.json(*words)
                assert again["result"] == "nothing-to-do", again
        assert place.replicas() == everywhere("storage-1", "storage-3", "storage-5")
    assert load.acknowledged > 10


@pytest.mark.parametrize("pairs", [slice(1), pytest.param(slice(3), marks=pytest.mark.long)], ids=["one", "all"])
def test_two_operators_at_once(place: Place, tmp_path: Path, pairs: slice) -> None:
    """Two that want different things, and the same command twice: whoever is refused is told that something changed."""
    wanted = (
        (
            ["storage", "add", place.new("storage-4"), "--auto-assign"],
            ["storage", "add", place.new("storage-5"), "--auto-assign"],
        ),
        (["storage", "remove", "storage-1"], ["storage", "remove", "storage-1"]),
        (["partition", "assign", "0", "--off", "storage-2"], ["partition", "assign", "0", "--to", "storage-2"]),
    )
    with NumberedLoad(place.local.server_addresses, tmp_path) as load:
        for one, other in wanted[pairs]:
            both = [place.process(*words, "--yes") for words in (one, other)]
            ends = [(process.communicate(timeout=2 * PATIENCE_SECONDS), process.returncode) for process in both]
            assert {code for _, code in ends} <= {0, 2, 4, EXIT_UNSAFE}, ends
            assert 0 in {code for _, code in ends}, ends
            for (_, err), code in ends:
                is_said = "another operator" in err or "confirm" in err
                assert code == 0 or is_said or (code == EXIT_UNSAFE and "no transactions" in err), ends
                assert "Traceback" not in err
            for words in (one, other):
                done = place.tool(*words, "--yes")
                assert done.code in (0, 2), done
            place.wait_until("all is well", lambda found: found.is_healthy and not found.moves)
    assert load.acknowledged > 10
