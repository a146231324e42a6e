"""What something costs: seconds, and the CPU (user and system) of everybody who works for it.

Spark is a Java, a Python that starts others, and these; some of them outlive whoever started them. For work inside a
session that goes on, the whole family is looked at before and after. For a command, this module is run as its parent and
inherits the orphans (`PR_SET_CHILD_SUBREAPER`), so that nobody who ends is forgotten.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.peers.process import cpu_seconds, family_of

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Cost:
    seconds: float
    cpu: float


def cost_here(action: Callable[[], object]) -> Cost:
    """Of this process and of all that it has started."""
    us = [os.getpid()]
    cpu, started = cpu_seconds(us), time.perf_counter()
    action()
    return Cost(seconds=time.perf_counter() - started, cpu=cpu_seconds(us) - cpu)


def medians(rounds: int, actions: Mapping[str, Callable[[], Cost]]) -> dict[str, Cost]:
    """After one round that does not count. They take turns, so that a busy moment meets all of them."""
    found: dict[str, list[Cost]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            cost = action()
            if number:
                found[name].append(cost)
    return {
        name: Cost(
            seconds=statistics.median(cost.seconds for cost in costs), cpu=statistics.median(cost.cpu for cost in costs)
        )
        for name, costs in found.items()
    }


def cost_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Cost:
    """Of a command that must end well, and of everybody whom it leaves behind."""
    parent = [sys.executable, "-m", "tests.bench.cost", *command]
    done = subprocess.run(
        parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return Cost(**json.loads(done.stdout))


def peak_bytes(needle: str) -> int:
    """The most memory that any process of ours with such a command line has had since `forget_peaks`."""
    found = max((_peak(pid) for pid in family_of([os.getpid()]) if needle in _command(pid)), default=0)
    if not found:
        raise SystemExit(f"no process of ours has {needle} in its command line")
    return found


def forget_peaks(needle: str) -> None:
    for pid in family_of([os.getpid()]):
        if needle in _command(pid):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def main() -> int:
    """As the parent of a command: its output goes to our standard error, what it cost to our standard output."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    started = time.perf_counter()
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    code = child.wait()
    seconds = time.perf_counter() - started
    while True:
        try:
            os.wait()  # whoever was left to us
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps({"seconds": seconds, "cpu": used.ru_utime + used.ru_stime}))
    return code


if __name__ == "__main__":
    sys.exit(main())
