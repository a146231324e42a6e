"""The client's end of a mount on a connection: which frames it sends to a server that takes them, and to an older one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.mounting import LIMITS, batch_of, mount_request, single_of
from waltzd.errors.operations import BadFrame
from waltzd.protocol.batches import ClientFrame, Credit, Mounted, ServerFrame, SingleCommittal
from waltzd.protocol.locks import Mode
from waltzd.wire.codec import (
    SINGLE_LOCKS_MAX,
    packed_committed,
    packed_server_frames,
    unpacked_client_frames,
    unpacked_single,
)
from waltzd.wire.frames import HEAD, Connection, Kind
from waltzd.wire.servers import FramedMount


class Wire:
    """The transport of a connection; remembers what was written."""

    def __init__(self) -> None:
        self.written = b""

    def writelines(self, parts: Sequence[Any]) -> None:
        self.written += b"".join(parts)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None

    def taken(self) -> tuple[Kind, bytes]:
        (length, kind), content = HEAD.unpack_from(self.written), self.written[HEAD.size :]
        assert length == len(content)
        self.written = b""
        return Kind(kind), content


def arrive(connection: Connection, kind: Kind, content: bytes) -> None:
    raw = HEAD.pack(len(content), kind) + content
    connection.get_buffer(-1)[: len(raw)] = raw
    connection.buffer_updated(len(raw))


async def mounted(*, takes_singles: bool) -> tuple[FramedMount, Connection, Wire]:
    connection, wire = Connection(1 << 20), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]

    async def connect() -> Connection:
        return connection

    nobody: Any = type("Grpc", (), {"cancel": lambda self: None})()
    mount = FramedMount("s:1", connect, nobody, lambda address, error: None)
    await mount.send([mount_request(1, number=1, mark=-1)])
    assert wire.taken()[0] is Kind.MOUNT
    answer = Mounted(session=1, barrier=-1, limits=LIMITS, takes_singles=takes_singles)
    arrive(connection, Kind.SERVER, packed_server_frames([answer]))
    assert await mount.receive() == [answer]
    return mount, connection, wire


ALONE = single_of(batch_of(b"abc", first=3, marks=7, locks=[[(5, Mode.WRITE)]], header=-2, seen_time=9))


def test_a_server_that_takes_transactions_alone_is_sent_them_without_protobuf() -> None:
    async def test() -> None:
        mount, connection, wire = await mounted(takes_singles=True)
        for is_posted in (True, False):
            if is_posted:
                mount.post([ALONE])
            else:
                await mount.send([ALONE])
            kind, content = wire.taken()
            found = unpacked_single(content)
            assert kind is Kind.SINGLE
            assert (found.first_sequence, found.mark, found.header, found.data_crc) == (3, 7, -2, ALONE.data_crc)
            assert (list(found.locks), list(found.modes), bytes(found.payloads)) == ([5], [Mode.WRITE], b"abc")
            assert found.seen_time == 9
        many = single_of(batch_of(b"", locks=[[(5, Mode.WRITE)] * (SINGLE_LOCKS_MAX + 1)]))
        longer: list[list[ClientFrame]] = [[ALONE, Credit(5)], [batch_of(b"a", b"b")], [many]]
        for frames in longer:
            mount.post(frames)
            kind, content = wire.taken()
            assert kind is Kind.CLIENT
            assert len(unpacked_client_frames(content)) == len(frames)
        connection.close()

    asyncio.run(test())


def test_an_older_server_is_sent_columns() -> None:
    async def test() -> None:
        mount, connection, wire = await mounted(takes_singles=False)
        mount.post([ALONE])
        kind, content = wire.taken()
        assert kind is Kind.CLIENT
        (found,) = unpacked_client_frames(content)
        assert [getattr(found, name).tolist() for name in ("marks", "headers", "lock_ids")] == [[7], [-2], [5]]
        connection.close()

    asyncio.run(test())


def test_an_outcome_alone_is_heard_and_received_and_a_wrong_one_ends_the_mount() -> None:
    async def test() -> None:
        mount, connection, _ = await mounted(takes_singles=True)
        content, heard = packed_committed(SingleCommittal(3, 9, 7)), list[Sequence[ServerFrame]]()
        arrive(connection, Kind.COMMITTED, content)
        (one,) = await mount.receive() or ()
        mount.hear(heard.append)
        arrive(connection, Kind.COMMITTED, content)
        assert [vars(frame) for frame in (one, heard[0][0])] == [vars(SingleCommittal(3, 9, 7))] * 2
        arrive(connection, Kind.COMMITTED, content + b"x")
        assert len(heard) == 1
        assert connection.is_lost
        with pytest.raises(BadFrame, match="this one has 21"):
            await mount.send([ALONE])
        connection.close()

    asyncio.run(test())
