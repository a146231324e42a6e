"""The feed on its way to a view: probes of operators are passed, and what came in pieces is taken together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

import pytest

from waltzd.client.follower import Follower, call_here
from waltzd.client.view import Transaction, checked_kind
from waltzd.errors import BadArgument, ForeignCluster
from waltzd.protocol.batches import PROBE_KIND
from waltzd.testing import LocalCluster

PATIENCE_SECONDS = 20


def transaction(id: int, header: int = 0) -> Transaction:
    return Transaction(0, id, header, 0, 0, (1, 1, id), b"", None, None)


def feed(*ids: int, probes: Sequence[int] = ()) -> list[Transaction]:
    return [transaction(id, PROBE_KIND if id in probes else 0) for id in ids]


class View:
    """Whose mark is the id of the last transaction that it was given."""

    def __init__(self) -> None:
        self.last = -1
        self.ids: list[int] = []
        self.failing: set[int] = set()

    def position(self, partition: int) -> int:
        return self.last

    def apply(self, given: Transaction) -> None:
        if given.id in self.failing:
            self.failing.remove(given.id)
            raise ValueError(given.id)
        self.ids.append(given.id)
        self.last = given.id


class Batches(View):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[list[int]] = []

    def apply_batch(self, given: Sequence[Transaction]) -> None:
        self.parts.append([one.id for one in given])
        for one in given:
            self.apply(one)


async def follow(view: View, *pieces: list[Transaction], batch_max: int = 1000) -> Follower:
    """Until the last of them is applied; all pieces are there at the beginning."""
    consumed: list[int] = []
    follower = Follower(0, view, call=call_here, batch_max=batch_max, consumed=consumed.append)
    for piece in pieces:
        follower.put(len(piece), lambda piece=piece: piece, False)  # type: ignore[misc]
    running = asyncio.create_task(follower.run(view.last))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await follower.reached(pieces[-1][-1].id)
    follower.stop()
    await running
    assert sum(consumed) == sum(map(len, pieces))
    return follower


@pytest.mark.parametrize("make", [View, Batches])
@pytest.mark.parametrize("probes", [[0], [1, 2], [4], [0, 1, 2, 3, 4]], ids=str)
def test_a_probe_is_passed_wherever_it_stands(make: type[View], probes: list[int]) -> None:
    view = make()
    follower = asyncio.run(follow(view, feed(*range(5), probes=probes)))
    assert view.ids == [id for id in range(5) if id not in probes]
    assert follower.applied == 4


def test_a_position_that_stays_in_front_of_a_probe_has_not_gone_back() -> None:
    """A part that fails is asked for its mark; the last id that was passed is no id of the view."""
    view = Batches()
    view.failing = {3}

    async def story() -> None:
        await follow(view, feed(0, 1, 2, probes=[1, 2]), feed(3, 4), batch_max=3)

    asyncio.run(story())
    assert view.ids == [0, 3, 4]


def test_a_view_that_takes_foreign_transactions_is_given_them() -> None:
    view = View()
    view.takes_foreign = True  # type: ignore[attr-defined]
    asyncio.run(follow(view, feed(0, 1, 2, probes=[1])))
    assert view.ids == [0, 1, 2]


def test_what_came_in_pieces_is_taken_together() -> None:
    view = Batches()
    asyncio.run(follow(view, *[feed(id) for id in range(10)], batch_max=4))
    assert view.parts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_group_that_came_in_pieces_is_held_until_its_end() -> None:
    view = Batches()
    groups = [transaction(0), transaction(1), transaction(2)]
    groups[2].follows = True

    async def story() -> None:
        follower = Follower(0, view, call=call_here, batch_max=1000, consumed=lambda size: None)
        follower.put(1, lambda: groups[:1], False)
        follower.put(1, lambda: groups[1:2], True)
        running = asyncio.create_task(follower.run(-1))
        await follower.reached(0)
        follower.put(1, lambda: groups[2:], False)
        await follower.reached(2)
        follower.stop()
        await running

    asyncio.run(story())
    assert view.parts == [[0], [1, 2]]


def test_who_gave_up_waiting_for_an_id_leaves_nothing_behind() -> None:
    """A view may fail for days, and a service may ask each second whether it goes on."""

    async def story() -> None:
        follower = Follower(0, View(), call=call_here, batch_max=1, consumed=lambda size: None)
        staying = asyncio.create_task(follower.reached(0))
        for _ in range(1000):
            waiting = asyncio.create_task(follower.reached(1))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert len(follower._waiting) < 100
        follower.put(1, lambda: feed(0), False)
        running = asyncio.create_task(follower.run(-1))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await staying
        follower.stop()
        await running

    asyncio.run(story())


def test_no_application_writes_what_looks_like_a_probe() -> None:
    with pytest.raises(BadArgument, match="0x57414c5a is reserved for probes"):
        checked_kind(PROBE_KIND)


def test_a_view_is_told_the_cluster_before_it_is_asked_for_its_position() -> None:
    class Told(View):
        def __init__(self) -> None:
            super().__init__()
            self.story: list[object] = []

        def opened(self, cluster: UUID) -> None:
            self.story.append(cluster)
            if len(self.story) > 3:
                raise ForeignCluster("filled from another cluster")

        def position(self, partition: int) -> int:
            self.story.append(partition)
            return self.last

    async def story(cluster: LocalCluster) -> None:
        view = Told()
        async with cluster.client(view=view):
            assert view.story == [cluster.meta.key, 0, 1]
        with pytest.raises(ForeignCluster, match="filled from another cluster"):
            async with cluster.client(view=view):
                raise AssertionError

    LocalCluster(partitions=2).run(story)
