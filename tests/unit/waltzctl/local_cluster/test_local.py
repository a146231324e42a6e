"""What `waltzctl up` says of a cluster that was there before, when not all of it comes up.

What belongs to a cluster on this machine, and what is somebody else's, by place and name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.snapshots import owned, partition, replica, well
from waltzctl.local_cluster.local import Belongings, closed_error, is_ours, remove, survey, unfinished_error, unseen_error
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import DaemonEnded, DaemonSilent, PartitionsClosed

PLACE = Path("my place")
RUNNING = ["zookeeper", "storage-1", "server-1"]
WAITING = well(partitions=(partition(0), partition(1, reported=owned(1, (replica("s1"),), waiting="no majority answers"))))
MENDING = "`waltzctl status --directory 'my place'` says what is missing, `waltzctl down 'my place'` stops everything"
AGAIN = (
    f"read what it says in its log, then `waltzctl up 'my place' --detach` again. {MENDING}; a storage that is lost is "
    "replaced by `waltzctl storage remove STORAGE --replacement NEW`"
)


def told(error: WaltzError | None) -> tuple[str, str, str]:
    assert error is not None
    return error.message, error.detail_not_done, error.detail_next_step


def test_all_runs_and_is_open() -> None:
    assert unfinished_error(PLACE, well(), RUNNING, {}, 60) is None


def test_all_runs_and_one_partition_is_closed() -> None:
    error = unfinished_error(PLACE, WAITING, RUNNING, {}, 60)
    assert isinstance(error, PartitionsClosed)
    assert told(error) == (
        "1 partition is not open after 60 seconds. partition 1: no majority answers",
        "partition 1 takes no transactions yet; zookeeper, storage-1, server-1 run, and nothing was stopped",
        MENDING,
    )


def test_some_did_not_come_up() -> None:
    """The exit code is the one of the first; what runs although it is late does not count as what runs."""
    late, ended = DaemonSilent("storage-1 did not become ready"), DaemonEnded("server-1 ended")
    error = unfinished_error(PLACE, well(), RUNNING, {"storage-1": late, "server-1": ended}, 60)
    assert isinstance(error, DaemonSilent)
    assert told(error) == (
        "storage-1 did not become ready\nserver-1 ended",
        "storage-1, server-1 are not ready; every partition takes transactions all the same. zookeeper runs",
        AGAIN,
    )
    error = unfinished_error(PLACE, WAITING, RUNNING, {"storage-2": ended}, 60)
    assert told(error)[1] == (
        "storage-2 is not ready; partition 1 takes no transactions. zookeeper, storage-1, server-1 run"
    )


def test_nobody_can_say() -> None:
    error = unseen_error(PLACE, CannotConnect("gone"), RUNNING[1:])
    assert isinstance(error, CannotConnect)
    assert told(error) == (
        "gone",
        "whether the partitions are open is not known; storage-1, server-1 run, and nothing was stopped",
        MENDING,
    )


def test_of_a_new_one_nothing_stays() -> None:
    assert "is stopped again" in told(closed_error(WAITING, 60))[1]


def words(text: str) -> list[str]:
    return text.split()


OURS = words("""
cluster.json cluster.json.new state.json lock removal-has-begun log/storage-12.log log/zookeeper.log.old server-1/server.yml
zookeeper/zoo.cfg zookeeper/lock zookeeper/log4j2.properties zookeeper/zookeeper.log.3 zookeeper/data/version-2/log.1f
zookeeper/data/version-2/snapshot.0 storage-1/storage.yml storage-1/data/waltz-storage.ctl storage-1/data/waltz-storage.id
storage-1/data/waltz-storage.reserve storage-1/data/waltz-groups.ctl storage-1/data/0/promise storage-1/data/0/promise.new
storage-1/data/7.set-aside-2/0000000000000000000.seg storage-1/data/7.new/0000000000000000000.seg
storage-1/data/0/0000000000000000190.idx.new
storage-1/data/0/0000000000000000190.seg.3.new
storage-1/data/scrub.json storage-1/data/scrub.json.new
""")
NOT_OURS = words("""
cluster.json.bak notes.txt log/notes.log log/storage-1.log.gz storage/storage.yml storage-1/notes storage-1/data/0/notes
storage-1/data/0/190.seg storage-1/data/a/promise server-1/server.yml~ zookeeper/data/myid storage-1/data/0/0/promise
log storage-1 zookeeper/data ../cluster.json
""")
DIRECTORIES = words("log zookeeper zookeeper/data zookeeper/data/version-2 storage-1 storage-1/data storage-1/data/0")


@pytest.mark.parametrize("path", OURS)
def test_what_is_ours(path: str) -> None:
    assert is_ours(path, is_directory=False)
    assert not is_ours(path, is_directory=True)


@pytest.mark.parametrize("path", NOT_OURS)
def test_what_is_not(path: str) -> None:
    assert not is_ours(path, is_directory=False)


@pytest.mark.parametrize("path", DIRECTORIES)
def test_directories(path: str) -> None:
    assert is_ours(path, is_directory=True)
    assert not is_ours(f"{path}-1x", is_directory=True)


def make(directory: Path, paths: list[str]) -> None:
    for path in paths:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text("12345")


def test_all_that_is_ours_goes(tmp_path: Path) -> None:
    make(tmp_path / "c", OURS)
    found = survey(tmp_path / "c")
    assert (sorted(found.files), found.foreign, found.bytes) == (sorted(OURS), (), 5 * len(OURS))
    remove(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_directory_with_something_in_it_stays(tmp_path: Path) -> None:
    make(tmp_path / "c", [*OURS, "storage-1/data/0/notes", "more/of/it"])
    (tmp_path / "c" / "state.json.new").symlink_to(tmp_path)
    found = remove(tmp_path / "c")
    assert found.foreign == ("more", "state.json.new", "storage-1/data/0/notes")
    left = sorted(str(path.relative_to(tmp_path / "c")) for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert left == ["more/of/it", "storage-1/data/0/notes"]
    assert tmp_path.is_dir()


def test_nothing_belongs_to_an_empty_directory(tmp_path: Path) -> None:
    assert survey(tmp_path) == Belongings()
