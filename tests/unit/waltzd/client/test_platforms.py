"""Where the client may run: nothing that an application imports needs what only POSIX has (docs/how-to/platforms.md)."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib.abc, sys

POSIX = {"fcntl", "grp", "pwd", "pty", "resource", "syslog", "termios", "tty", "uvloop"}

class Windows(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in POSIX:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Windows())
import waltzd, waltzd.serializers, waltzd.sql, waltzd.testing

for name in waltzd.__all__:
    if name != "PositionFile":  # it flushes as the daemons do
        getattr(waltzd, name)

async def story(cluster):
    async with cluster.client() as client:
        print(await client.append(b"one", partition=0))

waltzd.testing.LocalCluster(partitions=1).run(story)
with waltzd.testing.BlockingCluster(partitions=1) as cluster, cluster.client() as client:
    print(client.append(b"two", partition=0))
"""


@pytest.mark.slow
def test_applications_import_nothing_that_only_posix_has() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Committed(id=0") == 2
