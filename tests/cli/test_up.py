"""`waltzctl up`, `down` and `status` with real clusters: they come up, are looked at, broken, resumed, and end in order."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.cli.example import examples
from waltzctl import daemon, local
from waltzctl.blueprint import BLUEPRINT, PORTS, STATE, ZOOKEEPER, is_free
from waltzctl.daemon import Daemon, birth
from waltzctl.local import LocalCluster
from waltzd.errors import DaemonEnded, DiskFull, NoJava, PortInUse

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

    def __init__(self, home: Path, *arguments: str) -> None:
        self.out, self.err = home / "up.out", home / "up.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "waltzctl", *arguments], cwd=home, stdout=out, stderr=err
            )
        self.started.append(self)

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while words not in self.out.read_text() + self.err.read_text():
            assert self.process.poll() is None, self.out.read_text() + self.err.read_text()
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
    (up, up_detached), (status, status_json), (down, down_trial) = (
        examples(waltzctl, [word]) for word in ("up", "status", "down")
    )
    screen = Foreground(home, *up)
    screen.wait_for("Ctrl-C stops everything.")
    shown = waltzctl(*status)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("4 partitions open, on 2 servers and 3 storages\n")
    assert len(processes(home / "waltz-local")) == 6
    append = re.search(r"^  python (-c .*)  # append a transaction$", screen.out.read_text(), re.M)
    assert append
    appended = subprocess.run(
        [sys.executable, *shlex.split(append[1])], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert appended.stdout == "Committed(id=0)\n"
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
    found = json.loads(waltzctl(*status_json).out)
    assert (found["version"], found["cluster"]["is_healthy"], found["error"]) == (1, True, None)
    assert [one["is_running"] for one in found["daemons"]] == [True] * 5
    assert [partition["counting"] for partition in found["cluster"]["partitions"]] == [3] * 8
    assert {path.name for path in home.iterdir()} == {"waltz-local", "trial", "up.out", "up.err"}
    done = waltzctl(*down_trial)
    assert (done.code, done.err) == (0, "")
    assert processes(home / "trial") == []


def test_what_is_there_is_resumed_and_watched(home: Path, waltzctl: Tool) -> None:
    cluster = make_small(home / "small")
    cluster.start()
    lives = {name: one.life for name, one in cluster.daemons.items()}
    screen = Foreground(home, "up", "small")
    screen.wait_for("Ctrl-C stops everything.")

    cluster.daemons["storage-1"].kill()
    screen.wait_for("storage-1 ended; its log is small/log/storage-1.log")
    shown = waltzctl("status", "small")
    assert (shown.code, shown.err) == (10, "")
    assert re.search(r"storage-1 .* down", shown.out)
    assert "Next: waltzctl up small --detach" in shown.out

    assert waltzctl("up", "small", "--detach").code == 0
    screen.wait_for("storage-1 runs again")
    again = LocalCluster.find(home / "small")
    assert again.blueprint == cluster.blueprint
    changed = [name for name, one in again.daemons.items() if one.life != lives[name]]
    assert changed == ["storage-1"]

    assert waltzctl("down", "small").code == 0
    assert screen.end() == 0, "nothing is left to look at"
    assert processes(home / "small") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_to_be_told_to_end_is_to_stop_everything(home: Path, number: signal.Signals) -> None:
    screen = Foreground(home, "up", "small", "--storages", "1", "--servers", "1", "--partitions", "1")
    screen.wait_for("Ctrl-C stops everything.")
    assert screen.end(number) == 0
    assert processes(home / "small") == []


def test_interrupted_while_it_comes_up(home: Path) -> None:
    screen = Foreground(home, "up", "small", "--storages", "1", "--servers", "1", "--partitions", "1")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (home / "small" / STATE).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert screen.end(signal.SIGINT) == 130
    assert processes(home / "small") == []


def test_killed_while_it_comes_up_it_leaves_nothing_that_down_does_not_find(home: Path, waltzctl: Tool) -> None:
    screen = Foreground(home, "up", "small", "--storages", "1", "--servers", "1", "--partitions", "1")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "storage-1" not in ((home / "small" / STATE).read_text() if (home / "small" / STATE).exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert screen.end(signal.SIGKILL) == -signal.SIGKILL
    assert processes(home / "small") != []
    assert waltzctl("down", "small").code == 0
    assert processes(home / "small") == []


def test_who_does_not_end_in_time_is_killed_and_named(home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_small(home / "small")
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


def test_a_port_that_somebody_else_has(home: Path, waltzctl: Tool) -> None:
    cluster = make_small(home / "small")
    port = cluster.blueprint.ports["storage-1"][1]
    import socket

    with socket.create_server(("127.0.0.1", port)):
        refused(waltzctl("up", "small", "--detach"), 4, "W4002", f"127.0.0.1:{port}, the address of storage-1")
    assert cluster.running == []


def test_no_java(home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> list[str]:
        raise NoJava("no Java 17 or later was found")

    monkeypatch.setattr(local, "java_command", find)
    refused(waltzctl("up", "small"), 1, "W2032", "pip install")
    assert processes(home / "small") == []


def test_a_system_on_which_processes_cannot_be_told_apart(
    home: Path, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "birth", lambda _: None)
    refused(waltzctl("up", "small"), 2, "needs Linux")
    assert processes(home / "small") == []


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


def test_no_disk_space(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(home)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 << 20))
    with pytest.raises(DiskFull, match="10 MiB are free"):
        make_small(home / "small").start()
    assert processes(home / "small") == []


def test_one_at_a_time(home: Path, waltzctl: Tool) -> None:
    make_small(home / "small")
    with (home / "small" / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(waltzctl("up", "small"), 4, "W3001", "another waltzctl")
        refused(waltzctl("down", "small"), 4, "W3001")
        assert waltzctl("status", "small").code == 10, "to look is permitted"
    assert waltzctl("down", "small").code == 0


def test_a_directory_with_other_things(home: Path, waltzctl: Tool) -> None:
    (home / "mine").mkdir()
    (home / "mine" / "thesis.txt").write_text("…")
    (home / "file").write_text("…")
    refused(waltzctl("up", "mine"), 2, "W1001", "mine is not empty")
    refused(waltzctl("up", "file"), 2, "W1001")
    assert [path.name for path in (home / "mine").iterdir()] == ["thesis.txt"]
    for word in ("down", "status"):
        refused(waltzctl(word, "mine"), 3, "W2092", "mine holds no cluster")
        refused(waltzctl(word, "nowhere"), 3, "W2092")


def test_another_size_than_the_cluster_has(home: Path, waltzctl: Tool) -> None:
    make_small(home / "small")
    refused(waltzctl("up", "small", "--storages", "3"), 2, "--storages 3: the cluster in small has 1")
    refused(waltzctl("up", "small", "--replicas", "3"), 2, "--replicas 3: the cluster in small has 1")
    refused(waltzctl("up", "new", "--storages", "2", "--replicas", "3"), 2, "W2090")
    assert not (home / "new").exists()


@pytest.mark.parametrize("name", [BLUEPRINT, STATE])
@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "daemons": {"a": 1}}'])
def test_files_that_somebody_spoiled(home: Path, waltzctl: Tool, name: str, content: str) -> None:
    make_small(home / "small")
    (home / "small" / name).write_text(content)
    (home / "small" / "spoiled").touch()
    for word in ("up", "down", "status"):
        refused(waltzctl(word, "small"), 2, "W2093", f"small/{name}")


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_number_that_the_system_gave_to_somebody_else_is_left_alone(home: Path, waltzctl: Tool) -> None:
    make_small(home / "small")
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        mine = birth(stranger.pid)
        assert mine is not None
        for story in (mine[:-1] + str(9 - int(mine[-1])), "another-boot/" + mine.partition("/")[2]):
            life = {"pid": stranger.pid, "birth": story, "log_from": 0, "was_ready": True}
            daemons = {"storage-1": life, "nobody": {**life, "birth": mine}}
            (home / "small" / STATE).write_text(json.dumps({"schema": 1, "daemons": daemons}))
            done = waltzctl("down", "small")
            assert (done.code, done.out) == (0, "Nothing ran in small.\n")
            assert birth(stranger.pid) == mine
        stranger.kill()
        stranger.wait()
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
        one.wait_ready(PATIENCE_SECONDS)
        assert life.log_from == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.log", "one.log.old"]


def test_ports_are_free_and_of_one_cluster_each(tmp_path: Path) -> None:
    ports = [port for given in make_small(tmp_path / "small").blueprint.ports.values() for port in given]
    assert len(set(ports)) == 5
    assert all(port in PORTS and is_free(port) for port in ports)
    assert set(make_small(tmp_path / "other").blueprint.ports) == {ZOOKEEPER, "storage-1", "server-1"}


def test_no_port_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzctl.blueprint.is_free", lambda port: False)
    with pytest.raises(PortInUse, match="no port from 20000 to 31999"):
        make_small(tmp_path / "small")
