"""Disks that fail and disks that fill up, under a real daemon.

Three ways to fail: a flush that a preloaded shim refuses, a file system on a device that runs out underneath it (a real
I/O error of the kernel), and a file system that is simply full. What needs a compiler or the right to mount is skipped by
name where it is missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.daemon import PARTITIONS, Daemon
from waltzd.client import loop
from waltzd.errors import EXIT_DISK_FAULT, CannotConnect, WaltzError
from waltzd.errors.operations import DiskFull
from waltzd.format.record import Run, encode_payloads
from waltzd.wire.storages import ReplicaClient

MakeDaemon = Callable[..., Daemon]
SOURCE = Path(__file__).with_name("faultio.c")


def run_at(first_id: int, count: int = 5, size: int = 200) -> Run:
    return encode_payloads(first_id, [f"id {id_} ".encode().ljust(size, b".") for id_ in range(first_id, first_id + count)])


async def begin(daemon: Daemon, replicas: ReplicaClient, *, session: int) -> int:
    """Open a session on partition 0; returns its last id."""
    async with daemon.admin() as admin:
        if not (await admin.describe()).assigned:
            assert await admin.create_partitions([0]) == {0: None}
    status = await replicas.open(0, session, partitions=PARTITIONS)
    assert status.is_sound
    return status.last_id


async def append_until_it_ends(
    replicas: ReplicaClient, session: int, first_id: int, *, count: int = 5, size: int = 200, frames_max: int = 100_000
) -> tuple[int, WaltzError | None]:
    """Send frame after frame, a few ahead of the marks; the last mark that came back, and what ended it."""
    stream = replicas.append(0, session)
    acknowledged = first_id - 1
    try:
        await stream.start()
        next_id, last_id = first_id, first_id + count * frames_max - 1
        while acknowledged < last_id:
            while next_id <= last_id and next_id <= acknowledged + 4 * count:
                await stream.send(run_at(next_id, count, size), -1)
                next_id += count
            mark = await stream.receive()
            assert mark is not None
            acknowledged = max(acknowledged, mark)
    except WaltzError as error:
        try:
            while (mark := await stream.receive()) is not None:
                acknowledged = max(acknowledged, mark)
        except WaltzError as reason:  # what a send that fails cannot know
            return acknowledged, reason
        return acknowledged, error
    stream.cancel()
    return acknowledged, None


async def check_holds(replicas: ReplicaClient, session: int, last_id: int, *, size: int = 200) -> None:
    """Everything up to `last_id`, byte for byte."""
    at = 0
    async for run in replicas.read(0, 0, last_id, session=session):
        assert run.first_id == at
        assert run.data == run_at(at, len(run), size).data
        at = run.last_id + 1
    assert at == last_id + 1


async def load_until_it_fails(daemon: Daemon) -> int:
    async with daemon.replicas() as replicas:
        first_id = await begin(daemon, replicas, session=1) + 1
        return (await append_until_it_ends(replicas, 1, first_id))[0]


async def look_after_the_restart(daemon: Daemon, acknowledged: int) -> None:
    async with daemon.replicas() as replicas:
        last_id = await begin(daemon, replicas, session=2)
        assert last_id >= acknowledged
        await check_holds(replicas, 2, last_id)
        await replicas.set_low_mark(0, 2, last_id)
        assert (await append_until_it_ends(replicas, 2, last_id + 1, frames_max=3))[1] is None


def ends_with_a_report(daemon: Daemon) -> int:
    """The exit code is its own, the log names what failed; returns the last durable id that it names."""
    assert daemon.wait() == EXIT_DISK_FAULT
    critical = [line for line in daemon.log.splitlines() if "W3006" in line]
    assert len(critical) == 1, daemon.log
    assert "EIO" in critical[0]
    assert re.search(r"device \d+:\d+", critical[0])
    found = re.search(r"partition 0, last durable id (-?\d+)", critical[0])
    assert found, critical[0]
    return int(found[1])


# -- a flush that fails


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler to build the shim that makes flushes fail")
    out = tmp_path_factory.mktemp("shim") / "faultio.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(out), str(SOURCE), "-ldl"], check=True)
    return out


@pytest.mark.parametrize(("path", "after"), [(".seg", 2), (".seg", 23), (".idx", 4), ("promise", 5)])
def test_a_flush_that_fails_ends_the_daemon_and_nothing_is_lost(
    make_daemon: MakeDaemon, shim: Path, tmp_path: Path, path: str, after: int
) -> None:
    later = tmp_path / "later"
    daemon = make_daemon(segment_bytes_max=8192)
    daemon.environment = {
        "LD_PRELOAD": str(shim), "FAULTIO_PATH": path, "FAULTIO_AFTER": str(after), "FAULTIO_LOG": str(later),
    }  # fmt: skip
    daemon.start()
    acknowledged = loop.run(load_until_it_fails(daemon))
    assert acknowledged <= ends_with_a_report(daemon)
    assert not later.exists(), "a file was flushed again after its flush had failed"
    daemon.environment = {}
    daemon.start()
    loop.run(look_after_the_restart(daemon, acknowledged))
    assert daemon.stop() == 0


# -- mounts


@contextlib.contextmanager
def mounted(what: str, where: Path, *options: str) -> Iterator[None]:
    where.mkdir()
    done = subprocess.run(["mount", *options, what, str(where)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()[:200]}")
    try:
        yield
    finally:
        if subprocess.run(["umount", str(where)], capture_output=True, check=False).returncode != 0:
            subprocess.run(["umount", "-l", str(where)], check=True)


def _needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")


@pytest.fixture
def thin_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that believes in 64 MiB, on 12 MiB of memory: past that, writing back fails with EIO."""
    _needs("mount", "umount", "mkfs.ext4")
    with mounted("tmpfs", tmp_path / "thin", "-t", "tmpfs", "-o", "size=12m"):
        image = tmp_path / "thin" / "image"
        with image.open("wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,nodiscard", str(image)], check=True)
        with mounted(str(image), tmp_path / "disk", "-o", "loop"):
            yield tmp_path / "disk"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    _needs("mount", "umount")
    with mounted("tmpfs", tmp_path / "small", "-t", "tmpfs", "-o", "size=3m"):
        yield tmp_path / "small"


def test_a_real_io_error_ends_the_daemon_and_nothing_is_lost(
    thin_disk: Path, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    daemon = make_daemon(directory=thin_disk / "data", reserve_bytes=1 << 16)

    async def load() -> int:
        async with daemon.replicas() as replicas:
            first_id = await begin(daemon, replicas, session=1) + 1
            return (await append_until_it_ends(replicas, 1, first_id, count=50, size=4000))[0]

    async def look() -> None:
        async with daemon.replicas() as replicas:
            status = await replicas.open(0, 2, partitions=PARTITIONS)
            assert status.last_id >= acknowledged
            await check_holds(replicas, 2, acknowledged, size=4000)

    daemon.start()
    acknowledged = loop.run(load())
    assert acknowledged > 500
    assert acknowledged <= ends_with_a_report(daemon)
    # The disk is broken for good: the replica goes on from a copy of what can be read.
    kept = tmp_path / "kept"
    shutil.copytree(thin_disk / "data", kept)
    daemon.settings["directory"] = kept
    daemon.start()
    loop.run(look())
    assert daemon.stop() == 0


def test_a_full_disk_refuses_appends_and_nothing_else(small_disk: Path, make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(directory=small_disk / "data", reserve_bytes=200_000, segment_bytes_max=200_000)
    ballast = small_disk / "ballast"

    async def fill(session: int) -> int:
        async with daemon.replicas() as replicas, daemon.admin() as admin:
            first_id = await begin(daemon, replicas, session=session) + 1
            acknowledged, error = await append_until_it_ends(replicas, session, first_id, count=20, size=1000)
            while error is None or isinstance(error, CannotConnect):
                # gRPC drops the reason when a send crosses the refusal: send one frame only, and wait.
                first_id = (await replicas.open(0, session, partitions=PARTITIONS)).last_id + 1
                acknowledged, error = await append_until_it_ends(
                    replicas, session, first_id, count=20, size=1000, frames_max=1
                )
            assert isinstance(error, DiskFull)
            assert error.code == "W3005"
            held = int(error.facts["durable_id"])
            assert held >= acknowledged
            await check_holds(replicas, session, held, size=1000)
            found = (await admin.describe()).assigned[0]
            assert found.status is not None
            assert found.status.is_full
            assert "wait for disk space" in found.story
            return held

    async def resume() -> None:
        async with daemon.replicas() as replicas:
            held = await begin(daemon, replicas, session=4)
            ballast.unlink()
            acknowledged, error = await append_until_it_ends(replicas, 4, held + 1, size=1000, frames_max=3)
            assert error is None
            assert acknowledged == held + 15
            await check_holds(replicas, 4, acknowledged, size=1000)

    daemon.start()
    ballast.write_bytes(bytes(800_000))
    held = loop.run(fill(1))
    assert held > 500
    assert daemon.stop() == 0
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:  # not a byte left
            file.write(bytes(4096))
    daemon.start()
    assert loop.run(fill(2)) >= held
    daemon.kill()
    daemon.start()
    loop.run(fill(3))
    loop.run(resume())
    assert daemon.stop() == 0
