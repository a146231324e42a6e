"""A transaction that arrives alone is taken in the call that brings it, by the same checks, and overtakes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.mounting import LIMITS, FakeSession, Room, batch_of, in_room, single_of
from waltzd.errors import ClientAhead, Displaced, TooLarge, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.protocol.batches import (
    Committals,
    FeedMode,
    Mounted,
    ServerFrame,
    SingleAppend,
    SingleCommittal,
)
from waltzd.protocol.locks import Mode, Reason
from waltzd.protocol.policy import NO_QUOTAS, Amount, Quotas
from waltzd.server.clients.stream_port import _FramedLink
from waltzd.wire.codec import (
    packed_client_frames,
    packed_committed,
    packed_server_frames,
    packed_single,
    unpacked_committed,
    unpacked_server_frames,
)
from waltzd.wire.frames import HEAD, Connection, Kind

WRITE = Mode.WRITE


def slow(*, next_id: int = 0) -> FakeSession:
    """A session whose commits wait for the test."""
    return FakeSession(next_id=next_id, commits_at_once=False)


def one_of(payload: bytes = b"x", first: int = 0, mark: int = -1, lock: tuple[int, Mode] | None = None) -> SingleAppend:
    return single_of(batch_of(payload, first=first, marks=mark, locks=[[lock]] if lock else []))


def test_it_has_its_id_in_the_call_that_brings_it_and_its_outcome_in_that_which_commits_it() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(feed=FeedMode.NONE)
        assert one.mounted is not None
        assert one.mounted.takes_singles
        await one.say(one_of(b"alone", lock=(5, WRITE)))
        assert room.session.payloads() == [b"alone"], "no other task has run"
        assert one.link.untaken == 0
        room.session.commit(0)
        await one.until(lambda reader: reader.committed == {0: 0})
        assert isinstance(one.frames[-1], SingleCommittal)
        await one.say(one_of(b"again", first=1, mark=-1, lock=(5, WRITE)))
        await one.until(lambda reader: 1 in reader.refused)
        assert one.refused == {1: (Reason.CONFLICT, 0, 5)}
        assert room.session.payloads() == [b"alone"]

    in_room(test, slow)


def test_with_company_it_waits_for_the_step_that_it_shares() -> None:
    async def test(room: Room) -> None:
        one, two = await room.mount(1), await room.mount(2)
        await one.say(one_of(b"a"))
        await two.say(one_of(b"b"))
        assert room.session.runs == []
        await room.quiet()
        assert [len(run) for run in room.session.runs] == [2]

    in_room(test, slow)


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        pytest.param(SingleAppend(100, -1, 0, 0, (), (), b"x", 0), BadFrame, id="damaged payload"),
        pytest.param(one_of(first=100, mark=-2), BadFrame, id="mark below"),
        pytest.param(one_of(first=100, mark=10_000), ClientAhead, id="ahead"),
        pytest.param(one_of(first=4), BadFrame, id="old sequence"),
        pytest.param(one_of(first=-1), BadFrame, id="negative sequence"),
        pytest.param(one_of(first=0x7FFFFFFF), BadFrame, id="last sequence"),
        pytest.param(one_of(b"x" * (LIMITS.payload_bytes_max + 1), first=100), TooLarge, id="too long"),
        pytest.param(SingleAppend(100, -1, 0, 0, (5,) * 11, (2,) * 11, b"", 0), TooLarge, id="too many locks"),
        pytest.param(SingleAppend(100, -1, 0, 0, (5,), (0,), b"", 0), BadFrame, id="unknown mode"),
    ],
)
def test_nonsense_that_arrives_alone_ends_that_mount_and_no_other(frame: SingleAppend, kind: type[WaltzError]) -> None:
    async def test(room: Room) -> None:
        bad, good = await room.mount(1), await room.mount(2)
        await bad.say(one_of(b"before", first=4))
        await bad.until(lambda reader: reader.committed == {4: 0})
        await bad.say(frame)
        await bad.say(one_of(b"behind", first=500))
        await good.say(one_of(b"good"))
        await bad.until(lambda reader: reader.end is not None)
        assert type(bad.end) is kind
        await good.until(lambda reader: bool(reader.committed))
        assert room.session.payloads() == [b"before", b"good"], "nothing of the frame is written, and nothing behind it"
        await bad.link.finish()
        with pytest.raises(kind):
            await bad.serving
        assert room.pipe.mounts == 1

    in_room(test)


def test_a_message_that_waits_for_room_is_overtaken_by_none() -> None:
    async def test(room: Room) -> None:
        one, other = await room.mount(1), await room.mount(2)
        await other.say(batch_of(b"x" * 1500))
        await room.quiet()
        await one.say(batch_of(b"y" * 1500))
        await room.quiet()
        await one.say(batch_of(b"first " * 300, first=1))  # waits for room in the queue
        await room.quiet()
        await one.say(one_of(b"second", first=2))
        for _ in range(3):
            room.session.commit(room.session.cache.next_id - 1)
            await room.quiet()
        assert room.session.payloads()[-2:] == [b"first " * 300, b"second"]
        assert one.end is None

    in_room(test, slow, inflight_bytes_max=1000)


def test_nothing_is_taken_of_a_mount_that_was_displaced() -> None:
    async def test(room: Room) -> None:
        old = await room.mount(1, number=1)
        new = await room.mount(1, number=2)
        await old.say(one_of(b"late"))
        await new.say(one_of(b"in time", first=1))
        await new.until(lambda reader: bool(reader.committed))
        await old.until(lambda reader: reader.end is not None)
        assert type(old.end) is Displaced
        assert room.session.payloads() == [b"in time"]

    in_room(test)


def test_who_has_a_quota_is_charged_where_it_can_wait() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(1)
        (mount,) = room.pipe._mounts.values()
        mount.usage.grant(Quotas(transactions_per_second=Amount(1000)))
        await one.say(one_of(b"counted"))
        assert room.session.runs == []
        await one.until(lambda reader: reader.committed == {0: 0})

    in_room(test)


def test_a_batch_that_waited_for_its_quota_is_overtaken_by_none() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(1)
        (mount,) = room.pipe._mounts.values()
        mount.usage.grant(Quotas(transactions_per_second=Amount(1)))
        await one.say(batch_of(*[b"first"] * 9))
        await room.quiet()
        assert room.session.runs == [], "it waits"
        mount.usage.grant(NO_QUOTAS)
        await one.say(one_of(b"second", first=9))
        await one.until(lambda reader: 9 in reader.committed)
        assert room.session.payloads() == [b"first"] * 9 + [b"second"]

    in_room(test)


# -- on the connection


class Wire:
    """The transport of a connection; remembers what was written."""

    def __init__(self) -> None:
        self.written = b""

    def writelines(self, parts: Sequence[Any]) -> None:
        self.written += b"".join(parts)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def mounted_link() -> tuple[_FramedLink, Connection, Wire]:
    connection, wire = Connection(1 << 20), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    audit: Any = SimpleNamespace(note_received=lambda frames: None, note_sent=lambda frames: None)
    link = _FramedLink(connection, "", audit)
    link._expected = Kind.CLIENT
    return link, connection, wire


def arrive(connection: Connection, kind: Kind, content: bytes) -> None:
    raw = HEAD.pack(len(content), kind) + content
    connection.get_buffer(-1)[: len(raw)] = raw
    connection.buffer_updated(len(raw))


GOOD = b"".join(packed_single(one_of(b"abc", first=3, lock=(5, WRITE))))


def test_only_who_sends_transactions_alone_is_told_outcomes_alone() -> None:
    async def test() -> None:
        link, connection, wire = mounted_link()
        outcome: list[ServerFrame] = [SingleCommittal(3, 9, 7)]
        link.post(outcome)
        length, kind = HEAD.unpack_from(wire.written)
        (told,) = unpacked_server_frames(wire.written[HEAD.size :])
        assert (length, kind) == (len(wire.written) - HEAD.size, Kind.SERVER)
        assert isinstance(told, Committals)
        assert [list(column) for column in told.lists] == [[3], [9]]
        arrive(connection, Kind.SINGLE, GOOD)
        (one,) = await link.receive() or ()
        assert isinstance(one, SingleAppend)
        wire.written = b""
        await link.send(outcome)
        assert wire.written == HEAD.pack(20, Kind.COMMITTED) + packed_committed(SingleCommittal(3, 9, 7))
        assert vars(unpacked_committed(wire.written[HEAD.size :])) == vars(SingleCommittal(3, 9, 7))
        wire.written = b""
        link.post([SingleCommittal(4, 10, 8), Mounted(session=1, barrier=1, limits=LIMITS)])
        assert HEAD.unpack_from(wire.written)[1] == Kind.SERVER, "what travels together is one message"
        connection.close()

    asyncio.run(test())


@pytest.mark.parametrize("size", range(len(GOOD) - 3))
def test_a_frame_that_is_cut_off_is_refused_once_and_never_offered(size: int) -> None:
    async def test() -> None:
        link, connection, _ = mounted_link()
        offered: list[SingleAppend] = []

        def take(one: SingleAppend) -> bool:
            offered.append(one)
            return True

        link.hear_singles(take)
        arrive(connection, Kind.SINGLE, GOOD[:size])
        arrive(connection, Kind.SINGLE, GOOD)
        with pytest.raises(BadFrame, match="cut off"):
            await link.receive()
        assert offered == [], "nothing overtakes it"
        (one,) = await link.receive() or ()
        assert isinstance(one, SingleAppend)
        assert bytes(one.payloads) == b"abc"
        connection.close()

    asyncio.run(test())


def test_what_is_declined_is_received_in_its_order() -> None:
    async def test() -> None:
        link, connection, _ = mounted_link()
        offered: list[int] = []

        def take(one: SingleAppend) -> bool:
            offered.append(one.first_sequence)
            return one.first_sequence != 1

        link.hear_singles(take)
        for sequence in range(3):
            arrive(connection, Kind.SINGLE, b"".join(packed_single(one_of(first=sequence))))
        arrive(connection, Kind.CLIENT, packed_client_frames([batch_of(b"x", first=3)]))
        assert offered == [0, 1]
        found = [frame for _ in range(3) for frame in await link.receive() or ()]
        assert [getattr(frame, "first_sequence", None) for frame in found] == [1, 2, 3]
        connection.close()

    asyncio.run(test())


def test_a_transaction_in_the_place_of_a_mount_request_is_refused() -> None:
    async def test() -> None:
        link, connection, _ = mounted_link()
        link._expected = Kind.MOUNT
        arrive(connection, Kind.SINGLE, GOOD)
        with pytest.raises(BadFrame, match="SINGLE in the place of one of the kind MOUNT"):
            await link.receive()
        connection.close()

    asyncio.run(test())


def test_frames_of_a_server_are_as_they_were() -> None:
    """An older client knows no other kind: what it is sent is a message of the gRPC service."""
    frames: list[ServerFrame] = [SingleCommittal(3, 9, 7)]
    columns: list[ServerFrame] = [Committals(SingleCommittal(3, 9, 7).sequences, SingleCommittal(3, 9, 7).ids, 7)]
    assert packed_server_frames(frames) == packed_server_frames(columns)
    assert packed_client_frames([one_of(b"a", 3)]) == packed_client_frames([batch_of(b"a", first=3)])
