"""Where a run lives: a process with processes, mounts and a network of its own, so that nothing of it is left behind.

A run is two processes. The outer one waits, and removes the folder; the inner one does the work, as the first process of
new namespaces where that is permitted. When the outer one ends, for whatever reason, the inner one's standard input ends,
and it stops; when the inner one ends, the kernel ends everything that it started.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

END_SECONDS = 90
"""How long the inner process may take to stop when it is asked to."""
ENTER = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
INTERRUPTED = 130
"""As shells say it of Ctrl-C."""
BARE = "WALTZ_CHAOS_BARE"
"""In the environment: as if nothing were permitted."""


@functools.cache
def refusal() -> str | None:
    """Why there can be no namespaces of our own; None when there can."""
    if os.environ.get(BARE):
        return "it was asked for none"
    for program in ("unshare", "nsenter", "mount", "ip"):
        if shutil.which(program) is None:
            return f"needs {program}"
    done = subprocess.run([*ENTER, "true"], capture_output=True, text=True, check=False, timeout=30)
    return None if done.returncode == 0 else f"namespaces are not permitted here: {done.stderr.strip()[:200]}"


def run_inside(arguments: list[str], *, seconds_max: float) -> int:
    """Run this module's package again, inside; its exit code."""
    enter = [] if refusal() is not None else ENTER
    command = [*enter, sys.executable, "-m", "tests.chaos", *arguments]
    quiet = {**os.environ, "GRPC_VERBOSITY": "NONE"}  # it tells of every connection that we break
    inner = subprocess.Popen(command, env=quiet, stdin=subprocess.PIPE, start_new_session=True)
    try:
        return inner.wait(seconds_max)
    except subprocess.TimeoutExpired:
        print(f"the run did not end within {seconds_max:.0f} seconds and is ended", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("asked to stop: everything is being put away", file=sys.stderr)
        return INTERRUPTED
    finally:
        _end(inner)


def _end(inner: subprocess.Popen[bytes]) -> None:
    assert inner.stdin is not None
    inner.stdin.close()
    try:
        inner.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(inner.pid, signal.SIGKILL)
        inner.wait()


def settle_in() -> None:
    """What the first process of new namespaces does first."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    Path("/run/netns").mkdir()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
