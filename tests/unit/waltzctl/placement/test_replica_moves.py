"""Each rule of how a replica moves, told as a story about one partition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tests.unit.snapshots import KEY, held, owned, partition, placement_state, replica, silent, storage, well
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.mover import Mover, Throttle, Wish, take_out
from waltzctl.placement.mover import placement_state as mover_state
from waltzctl.placement.partition import _unfinished
from waltzctl.placement.replica_moves import (
    MovePlan,
    PartitionMove,
    PlacementState,
    next_step,
    partition_move,
)
from waltzctl.shell.progress import unreported
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, StorageView
from waltzd.cluster.cluster import NO_VERSION, Cluster
from waltzd.cluster.documents import ClusterMeta, Decision, Membership, Moves, PartitionMeta, ReplicaSets, StorageMeta
from waltzd.cluster.memory import MemoryTree
from waltzd.errors import CannotConnect
from waltzd.errors.operations import ChangedMeanwhile, PartitionDamaged, Unsafe
from waltzd.protocol.descriptions import OwnedPartition, PartitionDescription


def roles(text: str) -> dict[str, Membership]:
    """`abC`: members a and b, and c, which learns."""
    return {name.lower(): Membership.LEARNER if name.isupper() else Membership.MEMBER for name in text}


def view(there: str, goal: str, **more: Any) -> PartitionMove:
    """Open, all members level and in the session, unless it is said otherwise."""
    members = [name for name, role in roles(there).items() if role is Membership.MEMBER]
    given: dict[str, Any] = {
        "partition": 0,
        "roles": roles(there),
        "goal": tuple(goal),
        "level": frozenset(members),
        "voting": frozenset(members),
        "was_opened": True,
        "waiting": "",
        "held": dict.fromkeys(there.lower(), 9),
        "committed": 9,
    }
    return PartitionMove(
        **{**given, **{name: frozenset(value) if name in ("level", "voting") else value for name, value in more.items()}}
    )


@pytest.mark.parametrize(
    ("found", "step"),
    [
        # New ones first, all at once, as learners.
        (view("abc", "abd"), "abcD"),
        (view("abc", "cde"), "abcDE"),
        (view("abc", "abd", waiting="nobody owns it"), "abcD"),
        (view("abc", "abcd", level="a"), "abcD"),
        # Learners that are not wanted go, whatever else is.
        (view("abcD", "abc"), "abc"),
        (view("abcDE", "abce", waiting="nobody owns it"), "abcE"),
        (view("abcD", "abc", level=""), "abc"),
        (view("abcdE", "abc", voting="abcdx"), "abcd"),
        # Nobody leaves before the new ones are members, and level where that is needed.
        (view("abcD", "abd"), "d is level and becomes a member with the next session"),
        (view("abcD", "abd", held={"d": 3}), "d holds 4 of 10 transactions"),
        (view("abcD", "abd", held={}), "d has not answered yet"),
        (view("abcdE", "cde", level="abcd"), "e is level and becomes a member with the next session"),
        (view("abc", "c", level="ab", held={"c": 0}), "c must be level before another replica may go"),
        (view("bcd", "cd", level="bc"), "d must be level before another replica may go"),
        # Those that are no help go first; then by name, and one at a time.
        (view("abcd", "acd", level="acd"), "acd"),
        (view("abcd", "cd", level="acd"), "acd"),
        (view("abcd", "bcd"), "bcd"),
        (view("abcde", "cde"), "bcde"),
        (view("abcde", "cde", level="abcd"), "bcde"),
        (view("abcde", "ab", level="abc"), "abce"),
        # One that is not level, and is wanted, is no reason to keep one that is not wanted, as long as a majority stays.
        (view("abcd", "abc", level="abd"), "abc"),
        (view("abcd", "bcd", level="abc"), "bcd"),
        # Never below the majority.
        (view("abc", "ac", level="bc"), "a must be level before another replica may go"),
        (view("ab", "a", level="b"), "a must be level before another replica may go"),
        # Who has left votes until the session without it is recorded.
        (view("bcde", "cde", voting="abcde"), "the session without a is not recorded yet"),
        (view("cde", "cde", voting="bcde"), "the session without b is not recorded yet"),
        # A partition that takes nothing stays as it is.
        (view("abcd", "bcd", waiting="no majority takes appends"), "no majority takes appends"),
        (view("abc", "abc", voting="abcd", waiting="no server owns it"), "no server owns it"),
        # Nothing is to be done, or nothing but to wait until all of it takes part.
        (view("abc", "abc"), ""),
        (view("abc", "cba", voting="ab"), ""),
        (view("abc", "abc", level="ab", waiting="it is being opened"), ""),
        (view("abC", "abc", held={"c": 1}), "c holds 2 of 10 transactions"),
        (view("abc", "abc", level="ab", voting="abcd", held={"c": 1}), "c holds 2 of 10 transactions"),
        # Before the first session: members at once, and nobody has to wait for anybody.
        (view("abc", "abd", was_opened=False, level="", voting="", waiting="x"), "abcd"),
        (view("abcd", "abd", was_opened=False, level="", voting="", waiting="x"), "abd"),
        (view("abcd", "d", was_opened=False, level="", voting="", waiting="x"), "bcd"),
        (view("d", "d", was_opened=False, level="", voting="", waiting="x"), ""),
        (view("dE", "de", was_opened=False, level="", voting="", waiting="x"), ""),
        (view("", "ab", was_opened=False, level="", voting="", waiting="x"), "ab"),
    ],
)  # fmt: skip
def test_the_next_step(found: PartitionMove, step: str) -> None:
    """`step`: the replica set afterwards if it changes, else what is waited for; "" at the goal."""
    taken = next_step(found)
    if taken.roles == found.roles:
        assert taken.why == step
    else:
        assert (taken.roles, bool(taken.why)) == (roles(step), True)


# -- from what was found -----------------------------------------------------------------------------------------------


def said(replicas: Mapping[str, tuple[str, int, bool]]) -> OwnedPartition:
    told = (replace(replica(name, counts=counts, state=state), durable_id=last_id)
            for name, (state, last_id, counts) in replicas.items())  # fmt: skip
    return owned(0, tuple(told), committed=9, last_id=9)


def snapshot(found: OwnedPartition | None = None, *storages: StorageView, **more: Any) -> ClusterSnapshot:
    """Of four partitions; one is looked at."""
    view = partition(0, owner="server-1", reported=found, replicas={})
    return well(meta=well().meta, storages=storages or tuple(map(storage, "abc")), partitions=(view,), **more)


def test_what_is_seen_of_a_partition() -> None:
    served = said({"a": ("LIVE", 9, True), "b": ("CATCHING_UP", 4, False), "c": ("DOWN", -1, False)})
    meta = PartitionMeta(generation=1, session=4, opened=4, members=("a", "x"))
    found = partition_move(snapshot(served), 0, ("a", "b"), roles("abC"), meta)
    assert (found.level, found.voting, found.was_opened) == (frozenset("a"), frozenset("ax"), True)
    assert found.held == {"a": 9, "b": 4}, "of who is down nothing is known"
    assert (found.committed, found.waiting, found.missing, found.surplus) == (9, "", [], ["c"])


def test_what_is_seen_of_one_that_nobody_serves() -> None:
    empty = storage("a", assigned=(held(0, last_id=-1),))
    seen = snapshot(None, empty)
    unowned = replace(seen, partitions=(replace(seen.partitions[0], owner=None),))
    found = partition_move(unowned, 0, ("a",), roles("a"), None)
    assert (found.level, found.voting, found.was_opened) == (frozenset(), frozenset(), False)
    assert found.waiting == "no server owns it"
    closed = PartitionMeta(generation=1, session=2, decision=Decision(mark=-1, session=2))
    assert partition_move(snapshot(None, empty), 0, ("a",), roles("a"), closed).was_opened, "its first session was decided"


REFUSED = replace(held(0), status=None, refused=PartitionDamaged("x"))


@pytest.mark.parametrize("one", [held(0, last_id=0), REFUSED], ids=["one transaction", "what it refuses"])
def test_a_partition_without_a_document_was_opened_where_a_storage_may_hold_anything(one: PartitionDescription) -> None:
    """An operator deleted it: nothing may move before it is there again."""
    found = snapshot(None, storage("a", assigned=(held(1),)), storage("b", assigned=(one,)))
    seen = partition_move(found, 0, ("a",), roles("abc"), None)
    assert seen.was_opened
    assert next_step(seen).why == seen.waiting != ""


def test_an_owner_may_not_have_noticed() -> None:
    """It hears of a storage when it writes there; the storage knows at once."""
    served = said(dict.fromkeys("abcdef", ("LIVE", 9, True)) | {"g": ("CATCHING_UP", 4, False)})
    storages = [
        storage("a", assigned=(held(0), held(1, is_available=False))),
        storage("b", assigned=(held(0, is_available=False),)),
        storage("c", assigned=(REFUSED,)),
        storage("d", assigned=(held(1),)),
        silent(storage("e"), CannotConnect("gone")),
        storage("g"),
    ]
    assert snapshot(served, *storages).level(0) == {"a"}, "f is no storage of the cluster, and g lags behind"
    assert snapshot(None, *storages).level(0) == set()


def test_goals() -> None:
    """What moves counts as moved already, unless it moves to a storage that is gone."""
    found = snapshot(moves={1: ("b", "c"), 2: ("a", "x")})
    sets = ReplicaSets(partitions={0: roles("ba"), 1: roles("ab"), 2: roles("bC")})
    assert placement_state(found, sets.partitions).goals == {0: ("a", "b"), 1: ("b", "c"), 2: ("b", "c"), 3: ()}


def test_a_move_whose_list_of_replicas_is_gone_is_not_cancelled() -> None:
    now = placement_state(snapshot(moves={0: ("a", "b")}), {})
    goals = _unfinished(now, [0], is_cancel=True)
    with pytest.raises(Unsafe, match="partition 0 would have no replica"):
        MovePlan(now=now, verb="partition assign --cancel", subject="0", goals=goals).plan()


# -- when it is written down -------------------------------------------------------------------------------------------


async def cluster_of(text: str, names: str) -> tuple[Cluster, MemoryTree]:
    """One partition, and these storages."""
    meta = ClusterMeta(name="trial", key=KEY, partitions=1, created="2026-01-01")
    storages = [StorageMeta(name=name, listen=f"{name}:1", admin_listen=f"{name}:2", group=name) for name in names]
    tree = MemoryTree()
    sets = ReplicaSets(partitions={0: roles(text)})
    return await Cluster.create(tree.connect(), meta, storages=storages, replicas=sets), tree


class Open(Daemons):
    """All that is assigned is level, and nothing is waited for."""

    async def take_snapshot(self, cluster: Cluster) -> ClusterSnapshot:
        sets, _ = await cluster.replicas()
        there = sets.partitions[0]
        owner = said({name: ("LIVE", 9, role is Membership.MEMBER) for name, role in there.items()})
        storages = tuple(storage(name, assigned=(held(0),)) for name in await cluster.storages())
        found = snapshot(owner, *storages, moves=(await cluster.moves())[0].partitions)
        view = replace(found.partitions[0], replicas=there)
        return replace(found, meta=await cluster.meta(), partitions=(view,))


def wish_for(goal: str) -> Wish:
    def wish(now: PlacementState) -> MovePlan:
        for name in goal:
            now.storage(name)
        return MovePlan(now=now, verb="partition assign", subject="0", goals={0: tuple(goal)})

    return wish


@pytest.mark.parametrize(
    ("now", "is_said"), [("abcd", True), ("abd", True), ("abcD", True), ("abc", True), ("abcDE", False), ("bceD", False)]
)
def test_a_plan_is_made_again_and_goes_on_if_it_says_the_same(now: str, is_said: bool) -> None:
    """An owner makes members of learners, and takes their predecessors away, also between a plan and the answer to it."""

    async def aim() -> None:
        cluster, _ = await cluster_of("abcD", "abcde")
        mover, wish = Mover(cluster, Open(None), unreported, Throttle(cluster, None)), wish_for("abd")
        agreed = wish(await mover_state(cluster, Open(None)))
        _, versions = await cluster.replicas()
        await cluster.save_replica_set(0, roles(now), versions[0])
        if not is_said:
            with pytest.raises(ChangedMeanwhile, match="moved by another operator"):
                await mover.aim(wish, agreed)
            assert (await cluster.moves())[0].partitions == {}
            return
        done = await mover.aim(wish, agreed)
        assert done.changed == ({} if now == "abd" else {0: ("a", "b", "d")})
        assert (await cluster.moves())[0].partitions == done.changed

    asyncio.run(aim())


def test_a_plan_that_says_something_else_is_refused() -> None:
    """Another operator has moved the partition elsewhere, and what this one asks for is relative to where it is."""

    def wish(now: PlacementState) -> MovePlan:
        goal = tuple(sorted({*now.goals[0], "d"}))
        return MovePlan(now=now, verb="partition assign", subject="0", goals={0: goal})

    async def aim() -> None:
        cluster, _ = await cluster_of("abc", "abcde")
        mover = Mover(cluster, Open(None), unreported, Throttle(cluster, None))
        agreed = wish(await mover_state(cluster, Open(None)))
        moves = Moves(partitions={0: ("a", "b", "e")})
        await cluster.save_moves(moves, agreed.now.moves_version, replicas={}, there=[])
        with pytest.raises(ChangedMeanwhile, match="moved by another operator"):
            await mover.aim(wish, agreed)
        assert (await cluster.moves())[0] == moves

    asyncio.run(aim())


@pytest.mark.parametrize("is_first", [True, False], ids=["a move is decided first", "the storage goes first"])
def test_no_move_is_left_to_a_storage_that_goes_at_the_same_time(is_first: bool) -> None:
    """Both have looked before either of them does anything."""

    async def race() -> None:
        cluster, tree = await cluster_of("abc", "abcd")
        other, wish = Cluster(tree.connect()), wish_for("abd")
        agreed = wish(await mover_state(other, Open(None)))
        move = Mover(other, Open(None), unreported, Throttle(other, None)).aim(wish, agreed)
        remove, steps = cluster.remove_storage, [move]

        async def late(name: str, **how: Any) -> None:
            if is_first and steps:
                await steps.pop()
            await remove(name, **how)

        cluster.remove_storage = late  # type: ignore[method-assign]
        if is_first:
            with pytest.raises(ChangedMeanwhile, match="partition 0 to d"):
                await take_out(cluster, "d")
        else:
            await take_out(cluster, "d")
            with pytest.raises(ChangedMeanwhile, match=r"moved by another operator.*/storages/d"):
                await move
            await take_out(cluster, "d")  # it has gone already
        listed, goal = await cluster.storages(), (await cluster.moves())[0].partitions
        assert ("d" in listed, goal) == (is_first, {0: ("a", "b", "d")} if is_first else {})

    asyncio.run(race())


def test_a_storage_that_a_rescue_has_counted_stays_in_the_list() -> None:
    """It is not assigned any more, and the others copy from it before the next session opens."""

    async def remove() -> None:
        cluster, _ = await cluster_of("ab", "abd")
        meta = PartitionMeta(generation=1, session=4, opened=3, members=("a", "d"), decision=Decision(mark=9, session=4))
        version = await cluster.save_partition(0, meta, NO_VERSION)
        with pytest.raises(ChangedMeanwhile, match="partition 0 may still need the replica on d"):
            await take_out(cluster, "d")
        assert "d" in await cluster.storages()
        await cluster.save_partition(0, replace(meta, session=5, opened=5, members=("a", "b"), decision=None), version)
        await take_out(cluster, "d")
        assert "d" not in await cluster.storages()

    asyncio.run(remove())


@pytest.mark.parametrize("session", [4, 5])
@pytest.mark.parametrize("meta", [None, PartitionMeta(generation=1, session=4, opened=4, members=("b",))])
@pytest.mark.parametrize("last_id", [-1, 9])
def test_what_a_storage_holds_is_not_cleared_while_the_document_is_gone(
    meta: PartitionMeta | None, last_id: int, session: int
) -> None:
    """It would say whether that storage has a vote. One that went back, behind a move, does not say that either."""

    async def clear() -> list[Removed]:
        cluster, _ = await cluster_of("b", "ab")
        if meta is not None:
            await cluster.save_partition(0, meta, NO_VERSION)
        forgotten = storage("a", assigned=(held(0, last_id=last_id, session=session),))
        return await cleared(cluster, snapshot(None, forgotten), goals={0: ("b",)}, moved=[0])

    is_needed = last_id >= 0 if meta is None else session > 4
    assert asyncio.run(clear()) == ([] if is_needed else [("a", (0,), False)])


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("moved", [(), (0,)])
@pytest.mark.parametrize("last_id", [-1, 9])
def test_a_forgotten_replica_stays_while_its_partition_takes_no_transactions(
    last_id: int, moved: Sequence[int], is_open: bool
) -> None:
    """Another partition has moved. The replicas of this one are lost, and a rescue would count the forgotten one."""

    async def clear() -> list[Removed]:
        cluster, _ = await cluster_of("b", "ab")
        await cluster.save_partition(0, PartitionMeta(generation=1, session=4, opened=4, members=("b",)), NO_VERSION)
        owner = said({"b": ("LIVE", 9, True)}) if is_open else None
        forgotten = storage("a", assigned=(held(0, last_id=last_id),))
        return await cleared(cluster, snapshot(owner, forgotten, storage("b")), goals={0: ("b",)}, moved=moved)

    is_needed = not (is_open or moved or last_id < 0)
    assert asyncio.run(clear()) == ([] if is_needed else [("a", (0,), False)])


def test_files_are_deleted_only_on_the_storage_that_is_removed() -> None:
    async def clear() -> list[Removed]:
        cluster, _ = await cluster_of("b", "abc")
        await cluster.save_partition(0, PartitionMeta(generation=1, session=4, opened=4, members=("b",)), NO_VERSION)
        found = snapshot(said({"b": ("LIVE", 9, True)}), *(storage(name, assigned=(held(0),)) for name in "abc"))
        return await cleared(cluster, found, goals={0: ("b",)}, moved=[0], deletes_on="c")

    assert asyncio.run(clear()) == [("a", (0,), False), ("c", (0,), True)]


Removed = tuple[str, tuple[int, ...], bool]
"""Storage, partitions, and whether the files were deleted."""


async def cleared(
    cluster: Cluster, found: ClusterSnapshot, *, deletes_on: str | None = None, **clear: Any
) -> list[Removed]:
    removed: list[Removed] = []

    class Calm(Daemons):
        async def take_snapshot(self, _cluster: Cluster) -> ClusterSnapshot:
            return found

        @asynccontextmanager
        async def admin(self, _key: UUID, storage: StorageMeta) -> AsyncIterator[Any]:
            async def remove_partitions(numbers: Sequence[int], *, delete_files: bool) -> dict[int, None]:
                removed.append((storage.name, tuple(numbers), delete_files))
                return dict.fromkeys(numbers)

            yield SimpleNamespace(remove_partitions=remove_partitions)

    await Mover(cluster, Calm(None), unreported, Throttle(cluster, None)).clear(deletes_on=deletes_on, **clear)
    return removed
