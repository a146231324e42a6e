"""What `waltzctl up` says of a cluster that was there before, when not all of it comes up."""

from __future__ import annotations

from pathlib import Path

from tests.unit.snapshots import owned, partition, replica, well
from waltzctl.local_cluster.local import closed_error, unfinished_error, unseen_error
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
