"""What renews a lease beside rounds: acknowledgements, from where their records left."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.timeless import run
from waltzd.format.record import encode_payloads
from waltzd.protocol.peers import Content
from waltzd.server.core.progress import Lease
from waltzd.server.session.replicated_log import renew_by_acknowledgements

both = pytest.mark.parametrize("at_once", [False, True])


class Stream:
    """Acknowledges what a test says."""

    def __init__(self) -> None:
        self.marks: list[int] = []
        self.sent: list[Content] = []

    async def start(self) -> None:
        return None

    async def send(self, content: Content, committed: int) -> None:
        self.sent.append(content)

    @property
    def may_post(self) -> bool:
        return True

    def post(self, content: Content, committed: int) -> None:
        self.sent.append(content)

    async def receive(self) -> int | None:
        return self.marks.pop(0) if self.marks else None

    def hear(self, taker: Callable[[int], None]) -> None:
        self.taker = taker

    def cancel(self) -> None:
        return None


class Room:
    """A stream to A, the only member, which holds ids up to 4. `at_once`: without a change of task."""

    def __init__(self, *, lease: Lease | None, at_once: bool = False) -> None:
        self.now = 0.0
        self.at_once = at_once
        self.heard: list[int] = []
        self.stream = Stream()
        self.owner = SimpleNamespace(
            marks=SimpleNamespace(lease=lease),
            sending_up_to=None,
            settings=SimpleNamespace(clock=lambda: self.now),
        )
        self.renewing = renew_by_acknowledgements(self.stream, "A", 4, cast(Any, self.owner))
        self.renewing.hear(self.heard.append)

    async def send(self, first_id: int, count: int, *, at: float) -> None:
        self.now = at
        content = encode_payloads(first_id, [b"x"] * count) if count else ()
        if self.at_once:
            assert self.renewing.may_post
            self.renewing.post(content, 4)
        else:
            await self.renewing.send(content, 4)

    async def receive(self, mark: int) -> None:
        if self.at_once:
            self.stream.taker(mark)
            assert self.heard[-1] == mark
            return
        self.stream.marks.append(mark)
        assert await self.renewing.receive() == mark


@both
def test_an_acknowledgement_counts_from_where_the_first_of_its_records_left(at_once: bool) -> None:
    async def test() -> None:
        lease = Lease(1, 0.2)
        room = Room(lease=lease, at_once=at_once)
        await room.send(5, 2, at=10.0)
        await room.send(7, 3, at=10.1)
        await room.receive(5)
        assert not lease.holds("A", 10.0), "not all of them are acknowledged"
        await room.receive(9)
        assert lease.holds("A", 10.19)
        assert not lease.holds("A", 10.2)
        await room.receive(9)
        assert not lease.holds("A", 10.2), "nothing was asked since"

    run(test())


@both
def test_what_was_sent_before_is_not_asked_again(at_once: bool) -> None:
    """In format 0 the last record is sent once more, with a new committed mark: what is acknowledged then may be what was
    sent first."""

    async def test() -> None:
        lease = Lease(1, 0.2)
        room = Room(lease=lease, at_once=at_once)
        await room.send(4, 1, at=10.0)
        await room.receive(4)
        await room.send(5, 0, at=10.0)
        await room.receive(4)
        assert not lease.holds("A", 10.0)

    run(test())


@both
def test_what_is_sent_while_the_session_gives_way_renews_nothing(at_once: bool) -> None:
    async def test() -> None:
        lease = Lease(1, 0.2)
        room = Room(lease=lease, at_once=at_once)
        room.owner.sending_up_to = 5
        await room.send(5, 1, at=10.0)
        await room.receive(5)
        assert not lease.holds("A", 10.0)

    run(test())


def test_without_a_lease_nothing_stands_in_the_way() -> None:
    room = Room(lease=None)
    assert room.renewing is room.stream
