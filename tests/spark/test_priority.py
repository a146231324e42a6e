"""What an export starts on this machine stands behind all others, and the command itself does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waltz_spark.engine.session import IN_A_SESSION, share_least, start_java

_TELL = "import os, sys; sys.exit(os.sched_getscheduler(0) == os.SCHED_IDLE and os.getpriority(os.PRIO_PROCESS, 0) == 19)"


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux")
def test_what_is_started_inside_is_behind_and_we_are_not() -> None:
    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    codes: list[int] = []

    def start() -> None:
        command = [
            sys.executable,
            "-c",
            f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {_TELL!r}]))",
        ]
        codes.append(subprocess.run(command, check=False).returncode)

    start_java(start, is_behind=True)
    assert codes == [1], "a process that is started by what was started is behind, too"
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before


def test_where_it_is_forbidden_it_is_started_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden, raising=False)
    started: list[bool] = []
    start_java(lambda: started.append(True), is_behind=True)
    assert started == [True]


def test_the_session_of_java_has_the_least_share_and_ours_keeps_its_own() -> None:
    share = Path("/proc/self/autogroup")
    if not share.exists():
        pytest.skip("this system does not share the processor between sessions")
    before = share.read_text()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, **IN_A_SESSION) as started:
        share_least(started.pid)
        assert Path(f"/proc/{started.pid}/autogroup").read_text().strip().endswith("nice 19")
        started.communicate()
    assert share.read_text() == before
    share_least(started.pid)  # it has ended


def test_a_failure_reaches_whoever_asked() -> None:
    def start() -> None:
        raise OSError("no such program")

    with pytest.raises(OSError, match="no such program"):
        start_java(start, is_behind=False)


STARTING = """
import subprocess, sys, threading, time
from waltz_spark.engine.session import IN_A_SESSION, end_java, start_java
started = []
def start():
    started.append(subprocess.Popen(["sleep", "600"], **IN_A_SESSION))
    started[0].wait()
thread = threading.Thread(target=start_java, args=(start,), kwargs={"is_behind": False})
thread.start()
while not started:
    time.sleep(0.01)
end_java(None, True)
thread.join()
sys.exit(started[0].returncode != -9)
"""


def test_a_java_that_is_starting_ends_with_the_command() -> None:
    """PySpark does not say yet which process it is. In a process of its own: all that it started is killed."""
    assert subprocess.run([sys.executable, "-c", STARTING], timeout=120, check=False).returncode == 0
