"""An old copy of a storage directory, put back: over the files that are there, which stay the same, or instead of them.

Real files, no daemon: what a start finds out is looked at."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from uuid import UUID

import pytest

from waltzd.disk.real import RealDisk
from waltzd.format.record import encode_payloads
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.replica_context import PartitionSettings

KEY = UUID(int=7)
WAYS = {
    "cp": "cp -a {backup}/. {home}/",
    "rsync": "rsync -a --inplace --delete {backup}/ {home}/",
    "cat": 'cd {backup} && find . -type f | while read f; do cat "$f" > {home}/"$f"; done',
    "rm, cp": "rm -rf {home}/* && cp -a {backup}/. {home}/",
    "rm, tar": "rm -rf {home}/* && tar -C {backup} -cf - . | tar -C {home} -xf -",
}


def opened(path: Path) -> Directory:
    return Directory.open(RealDisk(), str(path), key=KEY, partitions=1, settings=PartitionSettings(say=print))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["copied while it ran", "copied while it was stopped", "copied two starts ago"])
def test_an_old_copy_is_another_replica(tmp_path: Path, way: str, how: str) -> None:
    if way == "rsync" and shutil.which(way) is None:
        pytest.skip("there is no rsync here")
    home, backup = tmp_path / "home", tmp_path / "backup"
    home.mkdir()
    directory = opened(home)
    replica = directory.create_partition(0)
    replica.open_session(1)
    replica.set_low_mark(1, -1)
    replica.append(1, [encode_payloads(0, [b"x"] * 10)], -1)
    before = replica.status()
    if how == "copied while it ran":
        shutil.copytree(home, backup)
    else:
        directory.close()
        shutil.copytree(home, backup)
        directory = opened(home)
        if how == "copied two starts ago":
            directory.close()
            directory = opened(home)
        replica = directory.partition(0)
        assert replica.status().incarnation == before.incarnation, "a restart in place changes nothing"
        replica.open_session(1)
    replica.append(1, [encode_payloads(10, [b"y"] * 90)], 50)
    assert replica.last_id == 99
    directory.close()
    subprocess.run(["sh", "-c", WAYS[way].format(home=home, backup=backup)], check=True)
    again = opened(home)
    after = again.partition(0).status()
    again.close()
    assert after.incarnation != before.incarnation
