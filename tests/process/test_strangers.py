"""What callers that may do nothing make a storage keep: nothing to speak of, with certificates and without."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fuzz.hostile import connect
from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY, Daemon
from tests.process.unfinished import Unfinished
from waltzd.protocol.role import Role
from waltzd.wire.frames import HEAD, Kind
from waltzd.wire.streams import Hello

MIB = 1 << 20
GROWTH_BYTES_MAX = 48 * MIB
CALLS, CALL_BYTES = 60, 2 * MIB
STREAMS, STREAM_BYTES = 20, 8 * MIB
"""Either adds up to more than 150 MiB."""


@contextlib.contextmanager
def growing_little(daemon: Daemon) -> Iterator[None]:
    before = resident_bytes(daemon)
    yield
    grown = resident_bytes(daemon) - before
    print(f"\nthe storage grew by {grown / MIB:.0f} MiB over {before / MIB:.0f}")
    assert grown < GROWTH_BYTES_MAX


def resident_bytes(daemon: Daemon) -> int:
    assert daemon.process is not None
    pages = Path(f"/proc/{daemon.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def reached(address: str, files: Files | None, *protocols: str) -> socket.socket:
    plain = connect(address)
    if files is None:
        return plain
    context = ssl.create_default_context(cafile=str(files.ca))
    context.check_hostname = False
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(protocols)
    return context.wrap_socket(plain)


@pytest.fixture(params=["certificates", "plain text"])
def besieged(
    request: pytest.FixtureRequest, make_daemon: Callable[..., Daemon], tmp_path: Path
) -> tuple[Daemon, Files | None]:
    """A storage, and the certificate of an application, which has no business there."""
    if request.param == "plain text":
        return make_daemon().start(), None
    authority = Authority(tmp_path / "ca")
    daemon = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()
    return daemon, authority.issue(KEY, Role.CLIENT, "app")


def test_calls(besieged: tuple[Daemon, Files | None]) -> None:
    daemon, files = besieged
    with growing_little(daemon), contextlib.ExitStack() as held:
        for address, path in ((daemon.listen, "Replica/Open"), (daemon.admin_listen, "StorageAdmin/Describe")):
            connection = held.enter_context(reached(address, files, "h2"))
            callers = Unfinished(connection, f"/waltz.v1.{path}", calls=CALLS, size=CALL_BYTES)
            while not callers.is_over:
                callers.turn()
            assert len(callers.refused) == CALLS


def test_streams(besieged: tuple[Daemon, Files | None]) -> None:
    daemon, files = besieged
    hello = Hello(KEY if files is not None else type(KEY)(int=1), 0, 1).encode()
    with growing_little(daemon), contextlib.ExitStack() as held:
        for _ in range(STREAMS):
            connection = held.enter_context(reached(daemon.stream_listen, files))
            connection.settimeout(0.05)
            with contextlib.suppress(OSError):
                connection.sendall(HEAD.pack(len(hello), Kind.HELLO) + hello + HEAD.pack(STREAM_BYTES, Kind.RECORDS))
                for _ in range(STREAM_BYTES // MIB - 1):
                    connection.sendall(bytes(MIB))
