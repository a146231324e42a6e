"""What an export starts on this machine stands behind all others, and the command itself does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from waltz_spark.engine.priority import behind_others

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

    behind_others(start)
    assert codes == [1], "a process that is started by what was started is behind, too"
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before


def test_a_failure_reaches_whoever_asked() -> None:
    def start() -> None:
        raise OSError("no such program")

    with pytest.raises(OSError, match="no such program"):
        behind_others(start)
