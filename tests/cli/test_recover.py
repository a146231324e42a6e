"""`waltzctl storage recover` against real daemons: disks that are lost, files that are damaged, and what is left alone."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.cli.conftest import LASTING
from tests.cli.document_tree import document_tree
from tests.cli.example import examples
from tests.cli.outcome import until
from tests.unit import snapshots
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.placement.storage import GIVEN_UP, State, plan_for, replica_state
from waltzctl.shell.safety import Danger
from waltzctl.snapshot.cluster_snapshot import PartitionView
from waltzd import BlockingClient
from waltzd.cluster.documents import Membership, PartitionMeta, ReplicaState
from waltzd.cluster.metadata import read
from waltzd.errors.operations import PartitionDamaged
from waltzd.format.finding import Code, Finding
from waltzd.format.layout import HARD_STATE_NAME, HARD_STATE_SLOT_SPACING
from waltzd.protocol.descriptions import OwnedPartition, OwnedReplica, PartitionDescription, ReplicaStatus
from waltzd.protocol.document import encode
from waltzd.protocol.locks import Committed
from waltzd.server.core.recovery import GiveUp, Recovery
from waltzd.server.session.replicated_log import ReplicatorState

Tool = Callable[..., Any]
FIRST, MORE = 2000, 300
PATIENCE_SECONDS = 90


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster whose disks are lost one after the other. Each test leaves it whole."""
    settings = {
        "storage": dict[str, object](segment_bytes_max="64KiB", reserve_bytes="1MiB"),
        "server": LASTING["server"] | {"segment_bytes_max": "64KiB"},
    }
    cluster = LocalCluster.make(tmp_path_factory.mktemp("recover") / "c", partitions=2, servers=1, settings=settings)
    ACKNOWLEDGED.clear()  # there may have been another one in this process
    try:
        cluster.start()
        append(cluster, FIRST)
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
def own(lossy: LocalCluster, waltzctl: Tool) -> LocalCluster:
    """The same, when its owners have noticed that it is whole."""
    wait_until_healthy(waltzctl, lossy)
    return lossy


ACKNOWLEDGED: dict[int, str] = {}
"""By its id, what partition 0 of the cluster above has taken. Partition 1 holds something, too."""


def append(cluster: LocalCluster, count: int) -> None:
    """A hundred at a time: what is written in one step stands in one segment."""
    with BlockingClient(cluster.server_addresses) as client:
        texts = [f"transaction {number} behind {len(ACKNOWLEDGED)} ".ljust(100, ".") for number in range(count)]
        for start in range(0, count, 100):
            part = texts[start : start + 100]
            found = client.append_many([text.encode() for text in part], partition=0)
            assert found.committed == len(part)
            ACKNOWLEDGED.update(zip(found.ids.tolist(), part, strict=True))
        assert isinstance(client.append(b"beside it", partition=1), Committed)


@contextmanager
def writing(cluster: LocalCluster) -> Iterator[None]:
    """Somebody writes to both partitions, one transaction after the other."""
    stop = threading.Event()

    def write() -> None:
        with BlockingClient(cluster.server_addresses) as client:
            number = 0
            while not stop.wait(0.05):
                text = f"meanwhile {number} behind {len(ACKNOWLEDGED)}"
                outcome = client.append(text.encode(), partition=number % 2)
                if isinstance(outcome, Committed) and number % 2 == 0:
                    ACKNOWLEDGED[outcome.id] = text
                number += 1

    with ThreadPoolExecutor(1) as thread:
        writer = thread.submit(write)
        try:
            yield
        finally:
            stop.set()
    writer.result()


def check_log(waltzctl: Tool, cluster: LocalCluster) -> None:
    told = waltzctl("txn", "get", "0", f"0-{max(ACKNOWLEDGED)}", "-o", "json", "--directory", cluster.directory)
    assert told.code == 0, told.err
    found = dict(enumerate(json.loads(line)["payload"] for line in told.out.splitlines()))
    assert {id_: found[id_] for id_ in ACKNOWLEDGED} == ACKNOWLEDGED


def data(cluster: LocalCluster, name: str) -> Path:
    return cluster.directory / name / "data"


def end(cluster: LocalCluster, *names: str) -> None:
    for name in names:
        cluster.daemons[name].ask_to_end()
        assert cluster.daemons[name].wait_end(30), name


def damage_hard_state(cluster: LocalCluster, name: str, partition: int) -> None:
    path = data(cluster, name) / str(partition) / HARD_STATE_NAME
    content = bytearray(path.read_bytes())
    for slot in (0, HARD_STATE_SLOT_SPACING):
        content[slot + 50] ^= 0xFF
    path.write_bytes(content)


def follow(waltzctl: Tool, cluster: LocalCluster, name: str, *more: str, code: int = 0) -> Any:
    """While others write."""
    words = ("storage", "recover", name, "--timeout", str(PATIENCE_SECONDS), "-o", "json", *more)
    with writing(cluster):
        told = waltzctl(*words, "--directory", cluster.directory)
    assert told.code == code, told.err
    return json.loads(told.out)


def wait_until_healthy(waltzctl: Tool, cluster: LocalCluster) -> None:
    """A server that came back recovers its partitions first; no storage can be spared meanwhile."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (told := waltzctl("status", "--timeout", "30", "--directory", cluster.directory)).code != 0:
        assert time.monotonic() < deadline, told.out
        time.sleep(0.1)


# -- what is judged, without a cluster ---------------------------------------------------------------------------------


def status(
    *findings: Finding, last_id: int = 9, is_available: bool = True, segments: tuple[int, ...] = ()
) -> ReplicaStatus:
    return ReplicaStatus(
        partition=0, incarnation=UUID(int=1), promised_session=3, session=3, low_mark=5, local_low_mark=5, committed=5,
        last_id=9, is_available=is_available, is_full=False, segments=1, findings=findings,
    )  # fmt: skip


def description(found: ReplicaStatus | None, refused: PartitionDamaged | None = None) -> PartitionDescription:
    return PartitionDescription(partition=0, status=found, refused=refused, story="", queued_bytes=0, disk_bytes=0)


def view(counts: str, *, state: str = "LIVE", step: str = "OPEN", refusing: str = "") -> PartitionView:
    """`counts`: of the replicas a, b and c, those that do, as their owner knows it; `state` is that of a."""
    states = {"a": state, "b": "LIVE", "c": "LIVE"}
    replicas = tuple(
        OwnedReplica(storage=name, role="member", state=states[name], durable_id=9, counts=name in counts, story="so")
        for name in "abc"
    )
    reported = OwnedPartition(
        partition=0, generation=1, session=3, step=step, waiting="", committed=9, last_id=9, low_mark=5, mounts=0,
        tail_bytes=0, replicas=replicas,
    )  # fmt: skip
    return PartitionView(
        partition=0, owner="s", generation=1, replicas=dict.fromkeys("abc", Membership.MEMBER), reported=reported,
        refusing=frozenset(refusing),
    )  # fmt: skip


DAMAGED = Finding(code=Code.UNREADABLE, path="0/promise", detail="it cannot be read")
LOST = PartitionDamaged("its hard-state file is gone")


@pytest.mark.parametrize(
    ("seen", "there", "state"),
    [
        (view("abc"), description(status()), State.COUNTS),
        (view("bc", state="CATCHING_UP"), description(status()), State.COMES),
        (view("bc", state="DOWN"), None, State.COMES),
        (view("abc"), None, State.COMES),
        (view("bc"), description(None, LOST), State.LOST),
        (view("abc"), description(None, LOST), State.LOST),
        (view("bc"), description(status(is_available=False)), State.OFFLINE),
        (view("bc", state="DAMAGED"), description(status(DAMAGED)), State.COMES),
        (view("bc", state=GIVEN_UP), description(status(DAMAGED)), State.LOST),
        (view("", state=GIVEN_UP), description(status(DAMAGED)), State.COMES),
        (view("bc", state=GIVEN_UP, step="VOTING"), description(status(DAMAGED)), State.COMES),
        (view("bc", state=GIVEN_UP), description(status()), State.LOST),
        (view("bc", state="DIVERGED"), description(status()), State.LOST),
        (view("", state="DIVERGED", step="SETTLING"), description(status()), State.COMES),
    ],
)
def test_where_a_replica_stands(seen: PartitionView, there: PartitionDescription | None, state: State) -> None:
    assert replica_state("a", seen, there).state is state


def test_what_an_owner_gives_up_is_known_by_its_state() -> None:
    kept = ReplicaState(session=3, closing=None, incarnation=UUID(int=1))
    meta = PartitionMeta(
        generation=1, session=4, opened=4, low_mark=9, members=("a", "b"), replicas=dict.fromkeys(("a", "b"), kept)
    )
    recovery = Recovery(meta, dict.fromkeys(("a", "b"), Membership.MEMBER))
    recovery.opened("a", status(DAMAGED))
    assert isinstance(recovery.next_for("a"), GiveUp)
    assert ReplicatorState(GIVEN_UP) is ReplicatorState.GIVEN_UP


@pytest.mark.parametrize(
    ("counts", "refusing", "silent", "is_refused"),
    [
        ("bc", "", "", False),
        ("b", "", "", True),
        ("", "", "", True),
        ("abc", "a", "", False),
        ("ab", "a", "", True),
        ("bc", "b", "", True),
        ("abc", "ab", "", True),
        ("bc", "", "b", True),
    ],
)
def test_a_replica_is_set_aside_only_beside_a_majority(counts: str, refusing: str, silent: str, is_refused: bool) -> None:
    """Also when its owner has not noticed yet that another one is of no help."""
    seen = view(counts, refusing=refusing)
    storages = tuple(
        replace(snapshots.storage(name), reported=None) if name in silent else snapshots.storage(name) for name in "abc"
    )
    found = snapshots.well(storages=storages, partitions=(seen,))
    plan = plan_for("a", found, {0: replica_state("a", seen, description(None, LOST))})
    assert (bool(plan.refusals), len(plan.steps), plan.danger) == (is_refused, 1, Danger.ASK)
    assert len(plan.refusals) <= 1, "said once"


# -- while the storage runs --------------------------------------------------------------------------------------------


def test_the_examples_run(live: LocalCluster, waltzctl: Tool) -> None:
    place = ("--directory", live.directory)
    assert waltzctl("storage", "recover", "storage-1", "--clean", "--confirm", "storage-1", *place).code == 0
    for arguments in examples(waltzctl, ["storage", "recover"]):
        told = waltzctl(*arguments, *place)
        assert (told.code, told.err) == (0, "")
        clean = " --clean" if "--clean" in arguments else ""
        assert told.out == f"nothing to do: storage recover{clean} storage-1\n"


def test_what_cannot_be_meant_is_said(live: LocalCluster, waltzctl: Tool) -> None:
    for arguments, code, reported in (
        (("storage-4", "--directory", live.directory), 3, "did you mean storage-"),
        (("storage-1", "7", "--directory", live.directory), 3, "there is no partition 7"),
        (("storage-1", "0x", "--directory", live.directory), 2, "'0x' is no partition"),
    ):
        told = waltzctl("storage", "recover", *arguments)
        assert (told.code, reported in told.err) == (code, True), (arguments, told.err)
        assert "Traceback" not in told.err


def test_a_storage_that_lost_its_disk_is_followed_until_it_counts(own: LocalCluster, waltzctl: Tool) -> None:
    end(own, "storage-1")
    told = waltzctl("storage", "recover", "storage-1", "--directory", own.directory)
    assert (told.code, told.out) == (6, "")
    assert "W4001 the storage storage-1 does not answer" in told.err
    assert "start it, on an empty directory" in told.err
    shutil.rmtree(data(own, "storage-1"))
    own.start_one("storage-1")
    found = follow(waltzctl, own, "storage-1")
    if found["result"] == "done":  # else its owner was quicker than this command
        assert {replica["state"] for replica in found["replicas"]} == {"counts"}
        assert found["set_aside"] == []
    assert follow(waltzctl, own, "storage-1")["result"] == "nothing-to-do"


def test_a_replica_that_is_refused_is_set_aside_and_made_anew(own: LocalCluster, waltzctl: Tool) -> None:
    place = ("--directory", own.directory)
    end(own, "storage-2")
    damage_hard_state(own, "storage-2", 0)
    own.start_one("storage-2")
    dry = waltzctl("storage", "recover", "storage-2", "0", "--dry-run", *place)
    assert dry.code == 0, dry.err
    assert dry.out.startswith(
        "would do: storage recover storage-2\n  partition 0: set it aside on storage-2, recreate and co"
    )
    assert "Nothing was changed." in dry.out
    unasked = waltzctl("storage", "recover", "storage-2", *place)
    assert (unasked.code, "say --yes" in unasked.err) == (2, True)
    assert not (data(own, "storage-2") / "0.set-aside-1").exists()
    found = follow(waltzctl, own, "storage-2", "--yes", "--reason", "its hard-state file is gone")
    assert (found["result"], found["set_aside"]) == ("done", [0])
    states = {replica["partition"]: replica["state"] for replica in found["replicas"]}
    assert states == {0: "counts", 1: "counts", 2: "counts"}, "of the partitions and of the group log"
    assert (data(own, "storage-2") / "0.set-aside-1" / HARD_STATE_NAME).exists()
    assert follow(waltzctl, own, "storage-2")["result"] == "nothing-to-do"
    history = json.loads(waltzctl("history", "-o", "json", *place).out)["history"][-1]
    assert (history["verb"], history["subject"], history["outcome"]) == ("storage recover", "storage-2", "done")
    assert history["reason"] == "its hard-state file is gone"
    check_log(waltzctl, own)
    words = ("storage", "recover", "storage-2", "--clean", *place)
    assert "`waltzctl storage recover --clean` deletes it" in waltzctl("storage", "describe", "storage-2", *place).out
    assert waltzctl(*words, "--dry-run").out.startswith(
        "would do: storage recover --clean storage-2\n  delete 0.set-aside-1, "
    )
    assert (waltzctl(*words).code, (data(own, "storage-2") / "0.set-aside-1").exists()) == (2, True), "unasked"
    end(own, "storage-1", "storage-3")
    until(lambda: "0.set-aside-1 may be needed" in waltzctl(*words, "--dry-run").out)
    assert waltzctl(*words, "--confirm", "storage-2").code == 5
    assert (data(own, "storage-2") / "0.set-aside-1").exists()
    for name in ("storage-1", "storage-3"):
        own.start_one(name)
    wait_until_healthy(waltzctl, own)
    assert waltzctl(*words, "--yes").code == 2, "it was set aside today"
    assert waltzctl(*words, "--confirm", "storage-2").code == 0
    assert sorted(path.name for path in data(own, "storage-2").iterdir() if path.is_dir()) == ["0", "1", "2"]
    assert waltzctl(*words, "--yes").out.startswith("nothing to do")


def test_the_last_sound_replicas_are_never_set_aside(own: LocalCluster, waltzctl: Tool) -> None:
    place = ("--directory", own.directory)
    end(own, "storage-1", "storage-2")
    kept = {name: (data(own, name) / "1" / HARD_STATE_NAME).read_bytes() for name in ("storage-1", "storage-2")}
    for name in kept:
        damage_hard_state(own, name, 1)
        own.start_one(name)
    told = waltzctl("storage", "recover", "storage-1", "1", "--yes", *place)
    assert (told.code, "W2100" in told.err, "--override storage-1" in told.err) == (5, True, True)
    assert not list(data(own, "storage-1").glob("1.set-aside-*"))
    end(own, *kept)
    for name, content in kept.items():
        (data(own, name) / "1" / HARD_STATE_NAME).write_bytes(content)
        own.start_one(name)
    for name in kept:
        assert follow(waltzctl, own, name, "1")["result"] in ("done", "nothing-to-do")


def test_what_does_not_come_in_time_is_said(own: LocalCluster, waltzctl: Tool) -> None:
    place = ("--directory", own.directory)
    server = own.blueprint.server_names[0]
    end(own, server)
    told = waltzctl("storage", "recover", "storage-1", "--timeout", "0.5", *place)
    assert (told.code, told.out) == (7, "")
    assert "W2105 not done within 0.5 seconds: partition 0: " in told.err
    own.start_one(server)
    wait_until_healthy(waltzctl, own)
    assert (
        waltzctl("storage", "availability", "storage-3", "1", "--offline", "--yes", "--confirm", "storage-3", *place).code
        == 0
    )
    told = waltzctl("storage", "recover", "storage-3", "--timeout", "60", *place)
    assert (told.code, "W2105" in told.err, "taken offline by an operator" in told.err) == (7, True, True)
    assert "--online" in told.err
    assert waltzctl("storage", "availability", "storage-3", "1", "--online", *place, "--yes").code == 0
    assert follow(waltzctl, own, "storage-3")["result"] in ("done", "nothing-to-do")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to somebody else, which only root can")

# -- nobody can decide -------------------------------------------------------------------------------------------------


def test_two_of_three_disks_are_dead(own: LocalCluster, waltzctl: Tool) -> None:
    place = ("--directory", own.directory)
    refused = waltzctl("partition", "rescue", "0-2", "--confirm", "local/0-2", *place)
    assert (refused.code, "there is nothing to rescue" in refused.err) == (5, True)
    for name in ("storage-2", "storage-3"):
        own.daemons[name].kill()
        assert own.daemons[name].wait_end(30)
        shutil.rmtree(data(own, name))
    until(lambda: waltzctl("status", *place).out.startswith("DOWN: 0 of 2 partitions are open"))
    for arguments in examples(waltzctl, ["partition", "rescue"]):
        told = waltzctl(*arguments, *place)
        assert (told.code, told.err) == (0, ""), told
    last_id = max(ACKNOWLEDGED)
    dry = waltzctl("partition", "rescue", "0", "--dry-run", *place).out
    assert "partition 0: given up: all ids committed above" in dry
    assert "only storage-2, storage-3 may hold" in dry
    unasked = waltzctl("partition", "rescue", "0-2", "--yes", *place)
    assert (unasked.code, "say --confirm local/0-2" in unasked.err) == (2, True)
    told = waltzctl("partition", "rescue", "0-2", "--confirm", "local/0-2", "--reason", "two disks", "-o", "json", *place)
    assert told.code == 0, told.err
    found = json.loads(told.out)["partitions"]
    assert [one["partition"] for one in found] == [0, 1, 2], "with the group log"
    assert found[0]["mark"] >= last_id
    append(own, 10)
    check_log(waltzctl, own)
    history = json.loads(waltzctl("history", "-o", "json", *place).out)["history"][-1]
    assert (history["verb"], history["subject"], history["outcome"]) == ("partition rescue", "local/0-2", "done")
    for name in ("storage-2", "storage-3"):
        own.start_one(name)
    until(lambda: full(waltzctl, own) == [3, 3, 3])  # learners are members again
    wait_until_healthy(waltzctl, own)
    check_log(waltzctl, own)


def test_the_documents_of_a_cluster_are_kept_when_they_are_deleted(
    own: LocalCluster, waltzctl: Tool, tmp_path: Path
) -> None:
    place, file = ("--directory", own.directory), tmp_path / "documents.json"
    words = ("cluster", "delete", "--save", file, "--override", "local", "--reason", "a mistake", *place)
    told = waltzctl(*words)
    assert (told.code, "server-1 run and own its partitions" in told.err, file.exists()) == (5, True, False)
    end(own, "server-1")
    refused = waltzctl("cluster", "delete", "--save", file, "--confirm", "local", *place)
    assert (refused.code, "still run" in refused.err, file.exists()) == (5, True, False)
    before = document_tree(str(own.directory))
    told = waltzctl(*words)
    assert (told.code, str(file) in " ".join(told.out.split())) == (0, True), told
    kept = read(file.read_bytes(), "documents").documents
    written = {path: data for path, (data, _) in before.items() if data}
    assert {path: encode(document) for path, document in kept.items() if path in before} == written
    assert "/partitions/1" in kept
    assert waltzctl("status", *place).code == 3, "there is no cluster, and nobody owns anything"
    again = waltzctl(*words)
    assert (again.code, "W2026" in again.err) == (3, True)
    loaded = waltzctl("cluster", "load-metadata", file, "--yes", *place)
    assert loaded.code == 0, loaded.err
    own.start_one("server-1")
    wait_until_healthy(waltzctl, own)
    check_log(waltzctl, own)


def full(waltzctl: Tool, cluster: LocalCluster) -> list[int]:
    """How many members of each partition count, learners left out."""
    told = json.loads(waltzctl("partition", "list", "-o", "json", "--directory", cluster.directory).out)
    return [row["level"] if not any("*" in name for name in row["replicas"]) else 0 for row in told["partitions"]]
