"""What Waltz does, shown on a scratch directory: `./dev demo`.

A real cluster, two applications with many clients that race, and a server that is killed while they do. Every step is a
command that is printed as one would type it, then run for real, with the exit code that it must have. So the demonstration
is a test as well: it ends with 1 when something does not hold.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell.blueprint import BLUEPRINT
from waltzctl.snapshot.cluster_snapshot import PartitionView
from waltzd.client import loop
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, EXIT_UNHEALTHY, WaltzError

ROOT = Path(__file__).parents[1]
SCRATCH = Path(".local/demo")
COUNTER_PARTITION, BANK_PARTITION = 0, 1
COUNTER = ["--clients", "8", "--changes", "150"]
BANK = ["--branches", "3", "--first-branch", str(BANK_PARTITION), "--accounts", "8", "--transfers", "200"]
DATABASES = 4
KILL_AFTER = 25
"""Committed transactions of each application. Each has at least thirty times as many to do, so both are in the middle of
their work then, or one of them alone where the other begins much later."""
PATIENCE_SECONDS = 120
SEGMENT_HEADER_BYTES, DAMAGED_BYTE = 128, 1_000


class NotAsSaid(Exception):
    """A step did not do what it says."""


def say(sentence: str) -> None:
    print(f"\n# {sentence}", flush=True)


def start(command: Sequence[str | Path], *, ends: str = "") -> subprocess.Popen[str]:
    words = [str(word) for word in command]
    print(f"$ {shlex.join(words)}{ends}", flush=True)
    program = sys.executable if words[0] == "python" else str(Path(sys.executable).parent / words[0])
    stdout = subprocess.PIPE if ends else None
    return subprocess.Popen([program, *words[1:]], cwd=ROOT, stdout=stdout, text=True)


def run(sentence: str, command: Sequence[str | Path], exit_code: int = EXIT_OK) -> None:
    say(sentence)
    check(start(command).wait(PATIENCE_SECONDS), exit_code)


def check(code: int, expected: int = EXIT_OK) -> None:
    print(f"(exit code {code})", flush=True)
    if code != expected:
        raise NotAsSaid(f"this step should have ended with {expected}")


def clear(directory: Path) -> None:
    """What an earlier demonstration left, running or not."""
    if (ROOT / directory / BLUEPRINT).exists():
        LocalCluster.find(ROOT / directory).kill()
    shutil.rmtree(ROOT / directory, ignore_errors=True)


# -- the race ----------------------------------------------------------------------------------------------------------


def race(cluster: LocalCluster, directory: Path) -> None:
    say(f"Eight clients change one counter that must never be negative, and {DATABASES} move money between accounts.")
    servers = ["--servers", ",".join(cluster.server_addresses)]
    databases = [word for number in range(DATABASES) for word in ("--database", f"{directory}/bank-{number}.db")]
    applications = [
        start(["python", "-m", "tests.examples.counter", *servers, *COUNTER], ends=" &"),
        start(["python", "-m", "tests.examples.bank", *servers, *databases, *BANK], ends=" &"),
    ]
    try:
        kill_owner(cluster)
        if all(application.poll() is not None for application in applications):
            raise NotAsSaid("an application should have been in the middle of its work")
        say("They go on: what was under way is found in the log, or is certain not to be there and is tried again.")
        for application in applications:
            told, _ = application.communicate(timeout=PATIENCE_SECONDS)
            print("\n".join(told.splitlines()[:2]))
            check(application.returncode)
    finally:
        for application in applications:
            if application.poll() is None:
                application.kill()
            application.communicate()


def kill_owner(cluster: LocalCluster) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = loop.run(cluster.snapshot()).partitions
        committed = min(marks(found, COUNTER_PARTITION), marks(found, BANK_PARTITION))
        if committed >= KILL_AFTER:
            break
        if time.monotonic() > deadline:
            raise NotAsSaid(f"there should have been {KILL_AFTER} transactions by now: {committed + 1}")
        time.sleep(0.05)
    name = found[COUNTER_PARTITION].owner
    assert name is not None
    daemon = cluster.daemons[name]
    assert daemon.life is not None
    done = sum(marks(found, view.partition) + 1 for view in found)
    say(f"In the middle of it, after {done} transactions, {name} is killed.")
    print(f"$ kill -9 {daemon.life.pid}", flush=True)
    daemon.kill()


def marks(found: Sequence[PartitionView], partition: int) -> int:
    reported = found[partition].reported
    return reported.committed if reported is not None else -1


# -- the files ---------------------------------------------------------------------------------------------------------


def verify(cluster: LocalCluster, directory: Path) -> None:
    homes = [str(directory / path.relative_to(cluster.directory)) for path in cluster.storage_directories]
    run("Every byte that the storages kept is checked.", ["waltzctl", "verify-segments", *homes])
    segment = ROOT / homes[0] / str(COUNTER_PARTITION) / f"{0:019d}.seg"
    change_byte(segment, SEGMENT_HEADER_BYTES + DAMAGED_BYTE)
    run(
        "One bit of one record of one storage is changed. It is found, with its place.",
        ["waltzctl", "verify-segments", f"{homes[0]}/{COUNTER_PARTITION}"],
        EXIT_FINDINGS,
    )
    change_byte(segment, SEGMENT_HEADER_BYTES + DAMAGED_BYTE)


def change_byte(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def show(directory: Path) -> None:
    up: list[str | Path] = ["waltzctl", "up", directory, "--detach"]
    at: list[str | Path] = ["--directory", directory]
    run("A cluster on this machine: ZooKeeper, three storages, two servers.", up)
    cluster = LocalCluster.find(ROOT / directory)
    try:
        race(cluster, directory)
        status: list[str | Path] = ["waltzctl", "status", *at]
        run("The other server has taken the partitions over. The cluster says what is missing.", status, EXIT_UNHEALTHY)
        run("What is missing is brought back.", up)
        run("A probe is committed in every partition.", ["waltzctl", "health", *at])
        run("All is stopped in order.", ["waltzctl", "down", directory])
    finally:
        cluster.stop()
    verify(cluster, directory)


def main(arguments: Sequence[str]) -> int:
    directory = Path(arguments[0]) if arguments else SCRATCH
    started = time.monotonic()
    try:
        clear(directory)
        show(directory)
    except NotAsSaid as error:
        print(f"\nThis is not as it should be: {error}.", file=sys.stderr)
        return 1
    except (WaltzError, subprocess.TimeoutExpired) as error:
        print(f"\nThe demonstration could not go on: {error}", file=sys.stderr)
        return 1
    print(f"\nAll of it held, in {time.monotonic() - started:.0f} s. Look around: waltzctl up {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
