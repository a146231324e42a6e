"""`waltzctl partition compare`, and what the commands on data say when a cluster is not well: a cluster that is broken."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.conftest import LASTING
from tests.cli.example import examples
from waltzctl.local_cluster.local import LocalCluster
from waltzd import BlockingClient
from waltzd.format.checksum import crc32
from waltzd.format.layout import HEADER_BYTES
from waltzd.format.record import HEAD_BYTES, OVERHEAD_BYTES, id_and_length

Tool = Callable[..., Any]
RECORDS, BAD = 2000, 1234
PATIENCE_SECONDS = 60


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Partition 0 holds so many records. On the second storage one of them is another one, with right checksums: it is of
    format 0, where no checksum is about more than a record."""
    settings = {"storage": dict[str, object](segment_bytes_max=20_000), **LASTING}
    cluster = LocalCluster.make(
        tmp_path_factory.mktemp("broken") / "cluster", partitions=3, servers=1, format=0, settings=settings
    )
    try:
        cluster.start()
        with BlockingClient(cluster.server_addresses) as client:
            payloads = [b"record %d of this log" % number for number in range(RECORDS)]
            assert client.append_many(payloads, partition=0).committed == RECORDS
        cluster.daemons["storage-2"].ask_to_end()
        assert cluster.daemons["storage-2"].wait_end(PATIENCE_SECONDS)
        forge(cluster, "storage-2", BAD)
        cluster.start()
        yield cluster
    finally:
        for name in cluster.running:
            signal_to(cluster, signal.SIGCONT, name)
        cluster.kill()


@pytest.fixture
def broken(forged: LocalCluster) -> LocalCluster:
    """The same, when all of it runs, whatever the test before did."""
    if len(forged.running) < len(forged.daemons):
        forged.start()
    return forged


def forge(cluster: LocalCluster, storage: str, id_: int) -> None:
    """What no checksum shows: a record that was never written, and is whole."""
    segments = sorted((cluster.directory / storage / "data" / "0").glob("*.seg"))
    path = [path for path in segments if int(path.stem) <= id_][-1]
    raw = bytearray(path.read_bytes())
    at = HEADER_BYTES
    while (found := id_and_length(raw, at))[0] != id_:
        at += OVERHEAD_BYTES + found[1]
    start, end = at + HEAD_BYTES, at + HEAD_BYTES + found[1]
    raw[start + 7] ^= 1
    struct.pack_into(">I", raw, at + HEAD_BYTES - 4, crc32(bytes(raw[start:end])))
    struct.pack_into(">I", raw, end, crc32(bytes(raw[at:end])))
    path.write_bytes(raw)


def signal_to(cluster: LocalCluster, number: signal.Signals, *names: str) -> None:
    for name in names:
        life = cluster.daemons[name].life
        assert life is not None
        os.kill(life.pid, number)


def end_servers(cluster: LocalCluster) -> None:
    for name in cluster.blueprint.server_names:
        cluster.daemons[name].ask_to_end()
        assert cluster.daemons[name].wait_end(PATIENCE_SECONDS)


def compare(waltzctl: Tool, cluster: LocalCluster, *words: str, code: int) -> dict[str, Any]:
    told = waltzctl("partition", "compare", *words, "--directory", cluster.directory, "-o", "json")
    assert (told.code, told.err) == (code, ""), told
    found = json.loads(told.out)
    assert found["version"] == 1
    return dict(found)


def verdicts(found: dict[str, Any]) -> dict[str, tuple[str, int]]:
    return {replica["storage"]: (replica["verdict"], replica["compared_up_to"]) for replica in found["replicas"]}


def test_the_examples_of_the_help_run(live: LocalCluster, waltzctl: Tool) -> None:
    for arguments in examples(waltzctl, ["partition", "compare"]):
        done = waltzctl(*arguments, "--directory", live.directory)
        assert (done.code, done.err) == (0, ""), arguments
        assert "the same" in done.out or json.loads(done.out)["result"] == "same"


def test_a_forged_record_is_found(broken: LocalCluster, waltzctl: Tool) -> None:
    found = compare(waltzctl, broken, "0", code=8)
    assert found["result"] == "different"
    end = RECORDS - 1
    assert verdicts(found) == {"storage-1": ("same", end), "storage-2": ("different", BAD - 1), "storage-3": ("same", end)}
    assert found["replicas"][1]["first_difference"] == {"first_id": BAD, "last_id": BAD}
    assert found["exchanges"] <= 1 + 11
    (differing,) = found["differing"]
    assert differing["id"] == BAD
    one, two, three = differing["records"]
    assert one["payload"] == three["payload"] == f"record {BAD} of this log"
    assert two["payload"] == f"record {BAD} of this log".replace("record 1", "record 0")
    assert one["crc"] == three["crc"] != two["crc"]
    assert one["client"] == two["client"]

    told = waltzctl("partition", "compare", "0", "--directory", broken.directory)
    assert told.code == 8
    assert told.out.startswith("partition 0: replicas differ, first at id 1,234: storage-2 from the 2 others\n")
    assert "Byte 7 is the first of the payload that differs" in told.out
    assert "storage-2: record 0234 of this log" in told.out
    assert max(map(len, told.out.splitlines())) <= 80


def test_of_two_nobody_knows_which_is_right(broken: LocalCluster, waltzctl: Tool) -> None:
    found = compare(waltzctl, broken, "0", "--storage", "storage-1", "--storage", "storage-2", code=8)
    assert verdicts(found) == {"storage-1": ("different", BAD - 1), "storage-2": ("different", BAD - 1)}
    same = compare(waltzctl, broken, "0", "--storage", "storage-1", "--storage", "storage-3", code=0)
    assert (same["result"], same["exchanges"], same["differing"]) == ("same", 1, [])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["9"], 3, "there is no partition 9; the cluster has 3"),
        (["0", "--storage", "storage-1"], 2, "name two storages"),
        (["0", "--storage", "storage-1", "--storage", "storage-l"], 3, "did you mean storage-"),
    ],
)
def test_mistyped(broken: LocalCluster, waltzctl: Tool, words: list[str], code: int, said: str) -> None:
    told = waltzctl("partition", "compare", *words, "--directory", broken.directory)
    assert (told.code, told.out) == (code, "")
    assert said in told.err


def test_a_storage_that_is_away_is_unknown_and_one_that_was_away_is_behind(broken: LocalCluster, waltzctl: Tool) -> None:
    place = ("--directory", broken.directory)
    broken.daemons["storage-2"].kill()
    found = compare(waltzctl, broken, "2", code=7)
    assert found["result"] == "unknown"
    away = found["replicas"][1]
    assert (away["verdict"], away["compared_up_to"], away["last_id"], away["behind"]) == ("unknown", -1, None, None)
    assert away["error"]["code"] == "W4001"
    assert "1 replica could not be compared" in waltzctl("partition", "compare", "2", *place).out
    for number in range(3):
        assert waltzctl("txn", "append", "2", f"{number} while it was away", *place).code == 0
    end_servers(broken)  # or they would bring it level
    broken.start_one("storage-2")
    found = compare(waltzctl, broken, "2", code=0)
    assert found["result"] == "same"
    known = found["committed"]
    assert known >= 1, "with each append they were told of the one before"
    assert verdicts(found) == {"storage-1": ("same", known), "storage-2": ("same", -1), "storage-3": ("same", known)}
    late = found["replicas"][1]
    assert (late["last_id"], late["behind"]) == (-1, known + 1)
    told = waltzctl("partition", "compare", "2", *place).out
    assert f"storage-2: {late['behind']} ids behind" in told
    assert "no other replica has got beyond" not in told
    broken.start()
    levelled = compare(waltzctl, broken, "2", code=0)
    assert {replica["last_id"] for replica in levelled["replicas"]} == {2}


def test_what_nobody_decides_in_time_is_unknown(broken: LocalCluster, waltzctl: Tool) -> None:
    place = ("--directory", broken.directory)
    assert waltzctl("txn", "append", "1", "before", *place).code == 0
    frozen = ("storage-1", "storage-2")
    signal_to(broken, signal.SIGSTOP, *frozen)
    try:
        told = waltzctl("txn", "append", "1", "stuck", "--lock", "write:door:1", "--timeout", "4", *place)
        assert (told.code, told.out) == (6, "")
        assert "W2131 partition 1 did not report the outcome in time" in told.err
        mark = json.loads(waltzctl("lock", "explain", "1", "door", "1", "-o", "json", *place).out)
        assert (mark["is_in_flight"], mark["reason"], mark["marked_by"]) == (True, "IN_FLIGHT", None)
        assert mark["wait_for"] == mark["last_id"] == mark["high_water_mark"] + 1
        assert "which is not committed yet" in waltzctl("lock", "explain", "1", "door", "1", *place).out
    finally:
        signal_to(broken, signal.SIGCONT, *frozen)
    advice = re.search(r"`waltzctl (txn grep [^`]*)`", told.err)
    assert advice
    assert waltzctl("txn", "append", "1", "behind it", *place).code == 0, "in this session, so the other is decided"
    looked = waltzctl(*advice[1].split(), "-o", "json", *place)
    assert [json.loads(line)["payload"] for line in looked.out.splitlines()] == ["stuck"]


def test_a_cluster_without_servers(broken: LocalCluster, waltzctl: Tool) -> None:
    place = ("--directory", broken.directory)
    end_servers(broken)
    for words in (["get", "0", "0"], ["tail", "0"], ["grep", "0"], ["append", "0", "a"]):
        told = waltzctl("txn", *words, *place)
        assert (told.code, told.out) == (10, ""), words
        assert "W2132 no server of the cluster local is up" in told.err
    told = waltzctl("lock", "explain", "0", "a", "1", *place)
    assert (told.code, told.out) == (10, "")
    assert "W2096 no server can explain locks of partition 0" in told.err
    found = compare(waltzctl, broken, "1", code=0)
    assert found["result"] == "same", "the storages can be asked without any server"
