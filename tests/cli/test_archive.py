"""`waltzctl archive` on a cluster of real daemons that archives to a directory."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import LASTING
from tests.cli.example import examples
from tests.unit.waltzd.archive.test_signature import archive_to
from waltzctl import main
from waltzctl.local_cluster.local import LocalCluster
from waltzd import BlockingClient
from waltzd.archive.local import LocalStore
from waltzd.cluster.cluster import CLIENT_IDS
from waltzd.cluster.documents import NO_SECRET
from waltzd.cluster.metadata import read

Tool = Callable[..., Any]
PATIENCE_SECONDS = 120
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("archive")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "archive.key"
    assert main.run(["archive", "sign", "--new-key", str(path)]) == 0
    return path


@pytest.fixture(autouse=True)
def _known(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALTZ_ARCHIVE_KEY", str(key))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, store: Path, key: Path) -> Iterator[LocalCluster]:
    """Its two partitions are archived as far as segments are sealed."""
    lasting = {kind: dict(settings) for kind, settings in LASTING.items()}
    signed = {"archive": str(store), "archive_key": str(key)}
    reads = {**signed, "tail_bytes_max": 1 << 20}
    settings: dict[str, dict[str, object]] = {
        **lasting,
        "storage": {**lasting.get("storage", {}), **signed},
        "server": {
            **lasting.get("server", {}),
            "segment_bytes_max": 20_000,
            "session_bytes_max": 1 << 20,
            "backup_seconds": 1,
            **reads,
        },
    }
    made = LocalCluster.make(
        tmp_path_factory.mktemp("cluster") / "cluster",
        partitions=2, storages=1, servers=1, replication=1, settings=settings,
    )  # fmt: skip
    try:
        made.start()
        with BlockingClient(made.server_addresses) as client:
            for partition in range(2):
                for batch in range(20):
                    payloads = [b"record %d of batch %d" % (number, batch) for number in range(50)]
                    assert client.append_many(payloads, partition=partition).committed == 50
        yield made
    finally:
        made.kill()


@pytest.fixture(scope="module")
def archived(cluster: LocalCluster, store: Path) -> Path:
    ends = time.monotonic() + PATIENCE_SECONDS
    while sum("/segment/" in str(path) for path in store.rglob("*")) < 4 or not all(
        (store / f"partition-{number}" / "manifest").is_dir() for number in range(2)
    ):
        assert time.monotonic() < ends, "nothing was archived"
        time.sleep(0.2)
    return store


def where(cluster: LocalCluster) -> list[str]:
    return ["--directory", str(cluster.directory)]


def as_json(told: Any) -> Any:
    return json.loads(told.out)


def test_readers_do_not_notice_that_old_segments_leave_the_storages(
    waltzctl: Tool, cluster: LocalCluster, archived: Path
) -> None:
    """By id, as a feed, by time and by what matches: across the trim floor and back to the storages."""
    with BlockingClient(cluster.server_addresses) as client:
        written = [transaction.payload for transaction in client.scan(1)]
        for batch in range(20, 44):
            payloads = [b"record %d of batch %d" % (number, batch) + b"." * 1000 for number in range(50)]
            assert client.append_many(payloads, partition=1).committed == 50
            written += payloads
        kept = waltzctl("cluster", "set", "--keep-local", "100KB", "--yes", *where(cluster))
        assert kept.code == 0, kept.err
        ends, floor = time.monotonic() + PATIENCE_SECONDS, 0
        while floor <= 500:
            assert time.monotonic() < ends, "nothing was trimmed"
            assert client.append_many([b"one more"], partition=1).committed == 1
            written.append(b"one more")
            rows = as_json(waltzctl("archive", "status", *where(cluster), "-o", "json"))["partitions"]
            floor = rows[1]["floor"]
            time.sleep(0.3)
        assert [transaction.payload for transaction in client.scan(1)] == written
        some = client.read_some(1, after=floor - 3, through=floor + 1)
        assert [transaction.payload for transaction in some] == written[floor - 2 : floor + 2]
        fed = client.feed(1, after=99)
        assert [next(fed).payload for _ in range(len(written) - 100)] == written[100:]
        fed.close()
        old = client.read(1, 120)
        assert next(iter(client.read_some(1, since=old.time, before=some[0].time))).id <= 120
    found = waltzctl("txn", "grep", "1", "--match", "record 7 of batch 2$", "-o", "json", *where(cluster))
    assert [json.loads(line)["id"] for line in found.out.splitlines()] == [107], found.err


def follow(waltzctl: Tool, cluster: LocalCluster, archived: Path, page: str) -> None:
    """The commands of a page, in its order."""
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8")
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
    assert len(lines) >= 3
    storage = str(cluster.storage_directories[0])
    for line in lines:
        command, _, other = line.partition(" || test $? -eq ")
        words = command.replace("/mnt/archive", str(archived)).replace("/var/lib/waltz", storage)
        told = waltzctl(*shlex.split(words)[1:])
        assert told.code in (0, int(other or 0)), (line, told)


def test_an_archive_is_told_verified_and_cleaned(
    waltzctl: Tool, cluster: LocalCluster, archived: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while True:
        told = waltzctl("archive", "status", *where(cluster), "-o", "json")
        rows = as_json(told)["partitions"][:2]  # nothing of the group log, which nobody uses, is ever sealed
        if all(row["archived_to"] is not None for row in rows) or time.monotonic() > ends:
            break
        time.sleep(0.2)
    assert told.code == 0, told.err
    for row in rows:
        assert 0 <= row["archived_to"] < row["committed"] >= 999
        assert (row["behind"], row["trouble"]) == (row["committed"] - row["archived_to"], "")
    assert "archived" in waltzctl("archive", "status", *where(cluster)).out
    found = waltzctl("archive", "verify", str(archived), "-o", "json")
    assert (found.code, as_json(found)["result"]) == (0, "clean"), found.out
    seen = as_json(found)["signatures"]
    assert (seen["unsigned"], seen["unchecked"], seen["verified"] > 4) == (0, 0, True)
    with monkeypatch.context() as nobody:
        nobody.delenv("WALTZ_ARCHIVE_KEY")
        told = waltzctl("archive", "verify", str(archived), "--quick")
        assert (told.code, "signed, and not checked: WALTZ_ARCHIVE_KEY names no key" in told.out) == (0, True)
    sums = as_json(found)["partitions"]
    assert [one["last"] >= row["archived_to"] for one, row in zip(sums, rows, strict=False)] == [True, True]
    monkeypatch.setenv("WALTZ_DIRECTORY", str(cluster.directory))
    for page in ("archive", "watch-the-archive"):
        follow(waltzctl, cluster, archived, page)
    backed_up = check_backup(waltzctl, cluster, archived)
    cluster.stop()  # an archive outlives its cluster
    told = as_json(waltzctl("archive", "status", "--lost-now", str(archived), "-o", "json"))
    assert [one["backed_up_to"] for one in told["partitions"]] == backed_up
    assert all(one["complete_to"] for one in told["partitions"])
    assert told["metadata"]["moment"]
    signed = (archived / "partition-1" / "tail.json").read_text(encoding="utf-8")
    tail = json.loads(signed.partition('{"signature":')[0])
    counted = dict(zip(tail["columns"], tail["slots"][-1], strict=True))  # slots that a manifest covers do not count
    slot = archived / "partition-1" / "tail" / str(counted["slot"])
    flip(slot)
    bad = waltzctl("archive", "verify", str(archived), "--partitions", "1")
    assert (bad.code, f"tail/{slot.name}" in bad.out) == (8, True), bad.out
    flip(slot)
    segment = sorted((archived / "partition-0" / "segment").iterdir())[0]
    orphan = segment.with_name(segment.name[:-16] + 16 * "0")
    orphan.write_bytes(b"of an upload that was cut short")
    hidden = archived / ".new" / "of-a-killed-writer"
    hidden.write_bytes(b"half of it")
    os.utime(hidden, (0, 0))
    dry = waltzctl("archive", "heal", str(archived), "--clean", "--dry-run")
    assert (dry.code, orphan.name in dry.out, orphan.exists()) == (0, True, True)
    done = waltzctl("archive", "heal", str(archived), "--clean", "--yes", "-o", "json")
    removed = [f"partition-0/segment/{orphan.name}", f".new/{hidden.name}"]
    assert (done.code, as_json(done)["removed"], hidden.exists()) == (0, removed, False), done.err
    assert (orphan.exists(), waltzctl("archive", "verify", str(archived)).code) == (False, 0)
    flip(segment)
    bad = waltzctl("archive", "verify", str(archived))
    assert (bad.code, segment.name in bad.out, "1 finding" in bad.out) == (8, True, True)
    assert waltzctl("archive", "verify", str(archived), "--quick").code == 0
    assert waltzctl("archive", "verify", str(archived), "--partitions", "1", "-o", "json").code == 0
    empty = cluster.directory / "nothing"
    empty.mkdir()
    left = waltzctl("archive", "heal", str(archived), "--from", str(empty), "--yes")
    assert (left.code, f"{empty} does not have it" in left.err, left.out) == (
        8, True, f"nothing could be done: archive heal {archived}\n"
    ), left  # fmt: skip
    replica = min(cluster.directory.rglob(f"0/{segment.name[:19]}.seg"))
    heal = ("archive", "heal", str(archived), "--from", str(replica.parent.parent))
    dry = waltzctl(*heal, "--dry-run")
    assert (dry.code, segment.name in dry.out) == (0, True), dry
    assert waltzctl("archive", "verify", str(archived)).code == 8
    done = waltzctl(*heal, "--yes", "-o", "json")
    assert (done.code, as_json(done)["healed"]) == (0, [f"partition-0/segment/{segment.name}"]), done
    assert waltzctl("archive", "verify", str(archived)).code == 0
    for harm in (flip, Path.unlink):
        key = sorted((archived / "partition-0" / "key").iterdir())[0]
        harm(key)
        bad = waltzctl("archive", "verify", str(archived))
        assert (bad.code, f"partition-0/key/{key.name}" in bad.out, "1 finding" in bad.out) == (8, True, True), bad
        done = waltzctl("archive", "heal", str(archived), "--from", str(empty), "--yes", "-o", "json")
        assert (done.code, as_json(done)["healed"]) == (0, [f"partition-0/key/{key.name}"]), done
        assert waltzctl("archive", "verify", str(archived)).code == 0
    segment.unlink()
    assert "is not in the store" in waltzctl("archive", "verify", str(archived), "--quick").out
    assert waltzctl(*heal, "--yes", "--quick").code == 0
    assert waltzctl("archive", "verify", str(archived)).code == 0
    newest = sorted((archived / "partition-0" / "manifest").iterdir())[-1]
    flip(newest)
    assert waltzctl(*heal, "--clean").code == waltzctl("archive", "heal", str(archived)).code == 2, "one of the two"
    refused = waltzctl("archive", "heal", str(archived), "--clean", "--yes")
    assert (refused.code, "W2100" in refused.err, "nothing was removed" in refused.err) == (5, True, True)
    (archived / "archive.json").unlink()
    assert waltzctl("archive", "verify", str(archived)).code != 0
    done = waltzctl(*heal, "--yes", "-o", "json")
    assert (done.code, as_json(done)["healed"]) == (0, ["archive.json", f"partition-0/manifest/{newest.name}"]), done
    assert waltzctl("archive", "verify", str(archived)).code == 0


def check_backup(waltzctl: Tool, cluster: LocalCluster, store: Path) -> list[int]:
    """How far all partitions are backed up, once that is all."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while True:
        told = waltzctl("archive", "status", "--lost-now", *where(cluster), "-o", "json")
        found = as_json(told)
        if found["metadata"] and found["metadata"]["number"] and all(
            row["lost_transactions"] == 0 and row["complete_to"] for row in found["partitions"]
        ):  # fmt: skip
            break
        assert time.monotonic() < ends, told.out
        time.sleep(0.2)
    assert told.code == 0, told.err
    assert [row["lost_seconds"] for row in found["partitions"]] == [0, 0, 0]
    assert "Documents of the cluster: number" in waltzctl("archive", "status", "--lost-now", *where(cluster)).out
    newest = sorted((store / "metadata").iterdir())[-1]
    saved = read(newest.read_bytes(), "here")
    assert (saved.meta.partitions, saved.documents[CLIENT_IDS].secret) == (2, NO_SECRET)  # type: ignore[attr-defined]
    return [row["backed_up_to"] for row in found["partitions"]]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_an_archive_that_is_older_than_its_key_is_signed(
    waltzctl: Tool, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(str(tmp_path))
    archive_to(store, 2)
    (tmp_path / "metadata" / "0000000001.json").unlink()
    told = waltzctl("archive", "sign", str(tmp_path), "--dry-run")
    assert (told.code, "sign archive.json" in told.out) == (0, True), told
    assert waltzctl("archive", "verify", str(tmp_path), "--quick").code != 0
    done = waltzctl("archive", "sign", str(tmp_path), "--yes", "-o", "json")
    signed = ["archive.json", *(f"partition-0/manifest/{number:010d}.json" for number in (1, 2))]
    assert (done.code, as_json(done)["signed"]) == (0, signed), done
    told = waltzctl("archive", "verify", str(tmp_path), "--quick")
    assert told.out.startswith("1 finding\n"), "there are no saved documents, and nothing else is wrong"
    assert "signatures: 2 objects verified" in told.out
    assert waltzctl("archive", "sign", str(tmp_path), "--yes").code == 0, "there is nothing to do"
    again = waltzctl("archive", "sign", "--new-key", str(key))
    assert (again.code, "W2140" in again.err) == (4, True)
    monkeypatch.setenv("WALTZ_ARCHIVE_KEY", str(tmp_path / "other.key"))
    assert waltzctl("archive", "sign", "--new-key", str(tmp_path / "other.key"), "-o", "json").code == 0
    assert "was not signed with the key" in waltzctl("archive", "verify", str(tmp_path), "--quick").err
    monkeypatch.delenv("WALTZ_ARCHIVE_KEY")
    told = waltzctl("archive", "sign", str(tmp_path), "--yes")
    assert (told.code, "names no key to sign with" in told.err) == (2, True)


def test_what_is_no_store_is_refused(waltzctl: Tool, tmp_path: Path) -> None:
    for place, code, said in (
        (tmp_path, "W2265", "holds no archive"),
        (tmp_path / "gone", "W2261", "there is no directory"),
        ("ftp://x/y", "W1001", "names no store"),
    ):
        told = waltzctl("archive", "verify", str(place))
        assert (told.code != 0, code in told.err, said in told.err) == (True, True, True), told.err


def test_examples(waltzctl: Tool) -> None:
    for command in ("status", "verify", "heal", "sign"):
        assert examples(waltzctl, ["archive", command])
    assert examples(waltzctl, ["archive", "status"])
