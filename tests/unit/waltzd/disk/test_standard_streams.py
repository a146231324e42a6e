"""Programs that are started without standard streams: no file of theirs gets the number of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from waltzd.disk.standard_streams import open_standard_streams

DAEMON = """
import os, sys
import waltzd.__main__ as program

def run(daemon, kind, path, check_config, **how):
    data = os.open(path, os.O_RDWR)
    os.write(2, b"of a library")
    seen = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    with open(path + ".seen", "w") as file:
        print(data > 2, *seen, file=file)
    print("ready")

program._run = run
program.main()
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_daemon_without_streams_writes_into_no_file(tmp_path: Path, closed: str) -> None:
    """Descriptors 0 and 1 were control files of a storage, and 2 would have been a segment."""
    data = tmp_path / "data"
    data.write_bytes(b"0123456789")
    words = [sys.executable, "-c", DAEMON, "storage", "--config", str(data)]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *words], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert (done.returncode, data.read_bytes()) == (0, b"0123456789")
    is_above, *seen = Path(f"{data}.seen").read_text().split()
    assert is_above == "True"
    for number, redirect in enumerate(("<&-", ">&-", "2>&-")):
        if redirect in closed.split():
            assert seen[number] == os.devnull


def test_every_closed_stream_is_opened_on_nothing() -> None:
    child = os.fork()
    if child == 0:
        try:
            os.closerange(0, 3)
            open_standard_streams()
            is_well = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)] == [os.devnull] * 3
            os._exit(0 if is_well else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_tool_without_streams_does_its_work(closed: str) -> None:
    words = [sys.executable, "-m", "waltzctl", "errors", "lookup", "W1001"]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
