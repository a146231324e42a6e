"""The second control file, for the group log: it comes later, and what it says is kept as carefully as the first.

The rule is the same: what is read is a value that was once written, or the group log is refused by name; the partitions go
on in any case. A storage without that file is as it was before there were groups.
"""

from __future__ import annotations

import pytest

from tests.simulation.sample import (
    KEY,
    PARTITIONS,
    ROOT,
    begin,
    blank_disk,
    expected,
    goes_on,
    open_directory,
    outcome,
    served,
)
from waltzd.disk.simulated import Loss, SimDisk
from waltzd.errors import NoSuchPartition, WaltzError
from waltzd.errors.operations import ControlDamaged
from waltzd.format.layout import GROUPS_NAME, control_bytes
from waltzd.storage.offline.verify import Options, Target, verify
from waltzd.storage.replica.control import ControlFile, read_ledger

GROUPS = f"{ROOT}/{GROUPS_NAME}"
NUMBER = PARTITIONS


def lived_in() -> SimDisk:
    """Partition 0 and the group log, with records."""
    disk = blank_disk()
    directory = open_directory(disk)
    for number in (0, NUMBER):
        partition = begin(directory, number, records=6)
        partition.open_session(4)
        partition.set_low_mark(4, 5)
    directory.close()
    return disk


def test_a_storage_without_groups_has_no_second_file() -> None:
    disk = blank_disk()
    directory = open_directory(disk)
    begin(directory, 0, records=3)
    with pytest.raises(NoSuchPartition, match="0 to 2"):
        directory.partition(NUMBER)
    with pytest.raises(NoSuchPartition, match="0 to 2"):
        directory.create_partition(NUMBER + 1)
    directory.close()
    assert not disk.exists(GROUPS)
    assert list(read_ledger(disk, ROOT).structs) == list(range(PARTITIONS))


def test_the_group_log_opens_again_with_what_it_promised() -> None:
    disk = lived_in()
    assert disk.size(GROUPS) == control_bytes(1)
    disk.power_cut()
    directory = open_directory(disk)
    replica = directory.partition(NUMBER)
    assert (replica.promised_session, directory.control.info(NUMBER).low_mark) == (4, 5)
    assert served(replica, expected(NUMBER, 6)) == set(range(6))
    directory.close()
    ledger = read_ledger(disk, ROOT)
    assert ledger.assigned == [0, NUMBER]
    assert ledger.findings == []
    assert verify(disk, [Target(storage=ROOT)], Options()).findings == []


@pytest.mark.parametrize("loss", [Loss.ORDERED, Loss.SCATTERED, None])
def test_a_crash_while_it_is_made_leaves_it_or_none_and_the_rest_as_it_was(loss: Loss | None) -> None:
    disk = blank_disk()
    directory = open_directory(disk)
    begin(directory, 0, records=6)
    seen: list[SimDisk] = []
    disk.observer = lambda kind, path: seen.append(disk.clone(len(seen)))
    directory.create_partition(NUMBER)
    disk.observer = None
    for copy in [*seen, disk.clone(1)]:
        if loss is None:
            copy.kill()
        else:
            copy.power_cut(loss)
        again = open_directory(copy)
        assert served(again.partition(0), expected(0, 6)) == set(range(6))
        if isinstance(outcome(again.partition, NUMBER), WaltzError):
            again.create_partition(NUMBER)
        goes_on(again.partition(NUMBER), NUMBER)
    assert len(seen) > 5


@pytest.mark.slow
def test_every_byte_of_the_file_is_flipped() -> None:
    disk = lived_in()
    raw = bytes(disk.content(GROUPS))
    before = ControlFile.look(disk, ROOT)
    refused = 0
    for offset in range(len(raw)):
        copy = disk.clone(offset)
        copy.corrupt(GROUPS, offset, bytes([raw[offset] ^ 0x80]))
        directory = open_directory(copy)
        assert served(directory.partition(0), expected(0, 6)) == set(range(6))
        found = outcome(directory.control.info, NUMBER)
        if isinstance(found, WaltzError):
            refused += 1
            assert isinstance(found, ControlDamaged)
            with pytest.raises(ControlDamaged):
                directory.partition(NUMBER)
            with pytest.raises(ControlDamaged):
                directory.ensure_partition(NUMBER)
            assert any(finding.partition == NUMBER for finding in read_ledger(copy, ROOT).findings)
        elif not 4 <= offset < 12:  # the date, which nothing depends on
            assert found in before._info(NUMBER).structs
        directory.close()
    assert refused > 50


def test_a_missing_file_beside_data_is_refused_and_an_operator_can_begin_anew() -> None:
    disk = lived_in()
    disk.remove(GROUPS)
    disk.flush_directory(ROOT)
    directory = open_directory(disk)
    with pytest.raises(ControlDamaged, match="is missing"):
        directory.partition(NUMBER)
    with pytest.raises(ControlDamaged):
        directory.ensure_partition(NUMBER)
    assert [finding.partition for finding in read_ledger(disk, ROOT).findings] == [NUMBER]
    assert directory.remove_partition(NUMBER, delete_files=False) is not None
    goes_on(directory.create_partition(NUMBER), NUMBER)
    directory.close()
    assert open_directory(disk).partition(NUMBER).last_id >= 0


def test_a_file_of_another_cluster_is_refused() -> None:
    disk, other = lived_in(), blank_disk()
    ControlFile.create(other, ROOT, type(KEY)(int=KEY.int + 1), 1, name=GROUPS_NAME)
    file = disk.open(GROUPS, write=True)
    file.write(0, bytes(other.content(GROUPS)))
    file.flush()
    directory = open_directory(disk)
    assert served(directory.partition(0), expected(0, 6)) == set(range(6))
    with pytest.raises(ControlDamaged, match="belongs to the cluster"):
        directory.partition(NUMBER)


@pytest.mark.parametrize("loss", [Loss.ORDERED, Loss.SCATTERED])
def test_what_it_promised_survives_the_loss_of_power(loss: Loss) -> None:
    for seed in range(8):
        disk = lived_in()
        directory = open_directory(disk)
        directory.partition(NUMBER).open_session(9)
        directory.partition(NUMBER).set_low_mark(9, 5)
        before = directory.control.info(NUMBER)
        copy = disk.clone(seed)
        copy.power_cut(loss)
        assert open_directory(copy).control.info(NUMBER) == before
