"""A directory that goes away under a running storage: it ends, says what is lost, and claims nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.process.daemon import PARTITIONS, Daemon
from waltzd.client import loop
from waltzd.errors import EXIT_DISK_FAULT
from waltzd.format.record import encode_payloads


async def fill(daemon: Daemon) -> None:
    async with daemon.admin() as admin:
        await admin.create_partitions([0, 1])
    async with daemon.replicas() as replicas:
        for partition in (0, 1):
            await replicas.open(partition, 1, partitions=PARTITIONS)
            await replicas.set_low_mark(partition, 1, -1)
            stream = replicas.append(partition, 1)
            await stream.send(encode_payloads(0, [b"x"] * (10 + partition)), -1)
            assert await stream.receive() == 9 + partition
            stream.cancel()


@pytest.mark.parametrize("is_told_to_stop", [False, True], ids=["it notices", "it is told to stop"])
@pytest.mark.parametrize("what", ["", "1"], ids=["all", "one partition"])
def test_a_storage_ends_when_its_directory_is_gone(tmp_path: Path, what: str, is_told_to_stop: bool) -> None:
    with Daemon(tmp_path) as daemon:
        loop.run(fill(daemon))
        gone = Path(daemon.directory) / what
        if what:
            shutil.rmtree(gone)
        else:
            gone.rename(tmp_path / "elsewhere")
        assert (daemon.stop() if is_told_to_stop else daemon.wait()) == EXIT_DISK_FAULT
        assert "W3010" in daemon.log
        assert "partition 1 up to id 10" in daemon.log
        assert ("partition 0 up to id 9" in daemon.log) == (not what)
        assert "everything that was acknowledged is on the disk" not in daemon.log
