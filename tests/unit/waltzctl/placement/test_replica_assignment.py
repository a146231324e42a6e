"""Replicas over groups and storages: spread as far as it goes, level as far as that permits, the same every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations, combinations_with_replacement, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzctl.placement.replica_assignment import assign_replicas, reassign_replicas, sizes, together
from waltzd.errors import EXIT_USAGE, BadArgument


def loads(storages: Mapping[str, str], planned: Mapping[int, tuple[str, ...]]) -> list[int]:
    held = Counter(name for names in planned.values() for name in names)
    return [held[name] for name in sorted(storages)]


def crowd(storages: Mapping[str, str], names: tuple[str, ...]) -> int:
    """The most replicas of one partition in one group."""
    return max(Counter(storages[name] for name in names).values())


def in_groups(*group_sizes: int) -> dict[str, str]:
    return {f"s{group}{number}": f"g{group}" for group, size in enumerate(group_sizes) for number in range(size)}


def test_the_usual_cluster() -> None:
    storages = {"one": "one", "two": "two", "three": "three"}
    assert assign_replicas(2, storages, 3) == {0: ("one", "three", "two"), 1: ("one", "three", "two")}


def test_three_racks_of_two() -> None:
    planned = assign_replicas(4, in_groups(2, 2, 2), 3)
    assert planned == {
        0: ("s00", "s10", "s20"),
        1: ("s00", "s10", "s20"),
        2: ("s01", "s11", "s21"),
        3: ("s01", "s11", "s21"),
    }


def test_a_group_of_one_storage_takes_part_in_everything_when_it_has_to() -> None:
    planned = assign_replicas(6, in_groups(1, 1, 3), 3)
    assert loads(in_groups(1, 1, 3), planned) == [6, 6, 2, 2, 2]


def test_two_groups_for_three_replicas() -> None:
    storages = in_groups(2, 2)
    planned = assign_replicas(4, storages, 3)
    assert {crowd(storages, names) for names in planned.values()} == {2}
    assert loads(storages, planned) == [3, 3, 3, 3]


def test_fewer_storages_than_replicas_are_refused() -> None:
    with pytest.raises(BadArgument, match=r"3 replicas .* there are 2") as caught:
        assign_replicas(1, in_groups(1, 1), 3)
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize("group_sizes", [(1, 1), (2, 1), (1, 1, 1), (2, 2), (3, 1), (2, 1, 1), (2, 2, 1), (3, 1, 1)])
@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize("replication", [1, 2, 3])
def test_nobody_could_do_better(group_sizes: tuple[int, ...], partitions: int, replication: int) -> None:
    """Against all that is possible: first the crowd in the fullest group, then how uneven the storages are."""
    storages = in_groups(*group_sizes)
    if len(storages) < replication:
        pytest.skip("refused")
    choices = list(combinations(sorted(storages), replication))
    least = min(crowd(storages, names) for names in choices)
    choices = [names for names in choices if crowd(storages, names) == least]
    possible = [dict(enumerate(names)) for names in product(choices, repeat=partitions)]
    best = min(sum(load * load for load in loads(storages, planned)) for planned in possible)
    ours = assign_replicas(partitions, storages, replication)
    assert ours in possible
    assert sum(load * load for load in loads(storages, ours)) == best


@given(
    st.integers(1, 200),
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.integers(1, 7),
    st.randoms(use_true_random=False),
)
def test_every_plan_keeps_its_promises(partitions: int, group_sizes: list[int], replication: int, order: Random) -> None:
    storages = in_groups(*group_sizes)
    if len(storages) < replication:
        return
    planned = assign_replicas(partitions, storages, replication)
    most = together(sizes(storages), replication)
    assert list(planned) == list(range(partitions))
    for names in planned.values():
        assert len(set(names)) == replication
        assert crowd(storages, names) <= most
    held = dict(zip(sorted(storages), loads(storages, planned), strict=True))
    in_group = Counter[str]()
    for name, load in held.items():
        in_group[storages[name]] += load
    for more, less in product(held, repeat=2):
        if held[more] - held[less] >= 2:  # only where the group of the lesser one has no room for more
            group = storages[less]
            assert group != storages[more]
            assert in_group[group] == partitions * min(sizes(storages)[group], most)
    shuffled = sorted(storages)
    order.shuffle(shuffled)
    assert assign_replicas(partitions, {name: storages[name] for name in shuffled}, replication) == planned


def test_the_largest_cluster_is_planned_in_one_go() -> None:
    planned = assign_replicas(1 << 16, in_groups(10, 10, 10), 3)
    assert set(loads(in_groups(10, 10, 10), planned)) <= {6553, 6554}


# -- given where replicas are ------------------------------------------------------------------------------------------

Replicas = Mapping[int, tuple[str, ...]]


def worth(storages: Mapping[str, str], current: Replicas, planned: Replicas) -> tuple[int, int]:
    """How uneven it is, then how many replicas have to be copied."""
    copies = sum(len(set(names) - set(current.get(number, ()))) for number, names in planned.items())
    return sum(load * load for load in loads(storages, planned)), copies


def check_reassigned(storages: Mapping[str, str], current: Replicas, replication: Mapping[int, int]) -> Replicas:
    """What holds for every plan."""
    planned = reassign_replicas(current, storages, replication)
    assert {number: len(set(names)) for number, names in planned.items()} == replication
    for names in planned.values():
        assert list(names) == sorted(set(names) & set(storages))
        assert not names or crowd(storages, names) == together(sizes(storages), len(names))
    assert reassign_replicas(planned, storages, replication) == planned, "a plan of a plan is the same plan"
    return planned


def best(storages: Mapping[str, str], current: Replicas, replication: Mapping[int, int]) -> tuple[int, int]:
    """Of all that is possible."""
    choices = []
    for replicas in replication.values():
        every = list(combinations(sorted(storages), replicas))
        least = min(crowd(storages, names) for names in every) if replicas else 0
        choices.append([names for names in every if not names or crowd(storages, names) == least])
    possible = product(*choices)
    return min(worth(storages, current, dict(zip(replication, names, strict=True))) for names in possible)


@pytest.mark.slow
@pytest.mark.parametrize(
    "group_sizes",
    [
        (1, 1),
        (2, 1),
        (1, 1, 1),
        (3,),
        *(pytest.param(sizes, marks=pytest.mark.long) for sizes in ((2, 2), (3, 1), (2, 1, 1))),
    ],
)
def test_no_other_way_from_here_is_better(group_sizes: tuple[int, ...]) -> None:
    """Two partitions, wherever they are, with every number of replicas; one storage is gone."""
    storages = in_groups(*group_sizes)
    places = [names for count in range(4) for names in combinations([*sorted(storages), "gone"], count)]
    cases = 0
    for first, second in combinations_with_replacement(places, 2):
        for replicas in product(range(min(3, len(storages)) + 1), repeat=2):
            current, replication = {0: first, 1: second}, dict(enumerate(replicas))
            planned = check_reassigned(storages, current, replication)
            assert worth(storages, current, planned) == best(storages, current, replication), (current, replication)
            cases += 1
    assert cases == len(places) * (len(places) + 1) // 2 * min(4, len(storages) + 1) ** 2


def test_no_other_way_from_here_is_better_in_larger_ones() -> None:
    random = Random(11)
    for _ in range(150):
        group_sizes = random.choice([(2, 2), (3, 1), (2, 1, 1), (2, 2, 1), (3, 2), (1, 1, 1, 1), (4, 1), (2, 1, 1, 1)])
        storages = in_groups(*group_sizes)
        names = [*sorted(storages), "gone"]
        current = {number: tuple(random.sample(names, random.randint(0, 4))) for number in range(3)}
        replication = {number: random.randint(0, 4) for number in range(3)}
        planned = check_reassigned(storages, current, replication)
        assert worth(storages, current, planned) == best(storages, current, replication), (current, replication)


@pytest.mark.slow
@given(st.data())
def test_every_way_from_here_keeps_its_promises(data: st.DataObject) -> None:
    storages = in_groups(*data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    names = st.sampled_from([*sorted(storages), "gone"])
    current = data.draw(st.dictionaries(st.integers(0, 40), st.lists(names, max_size=5, unique=True).map(tuple)))
    replication = data.draw(st.dictionaries(st.integers(0, 40), st.integers(0, min(5, len(storages)))))
    check_reassigned(storages, current, replication)


def test_nothing_moves_without_a_reason() -> None:
    storages = in_groups(2, 2, 2)
    planned = assign_replicas(40, storages, 3)
    assert reassign_replicas(planned, storages, dict.fromkeys(planned, 3)) == planned


def test_a_storage_that_goes_gives_its_replicas_away_and_no_others_move() -> None:
    storages = in_groups(2, 2, 2)
    planned = assign_replicas(40, storages, 3)
    left = {name: group for name, group in storages.items() if name != "s11"}
    after = reassign_replicas(planned, left, dict.fromkeys(planned, 3))
    moved = {number for number in planned if set(after[number]) != set(planned[number])}
    assert moved == {number for number, names in planned.items() if "s11" in names}
    assert dict(zip(sorted(left), loads(left, after), strict=True))["s10"] == 40


def test_a_storage_that_comes_gets_its_share_and_no_more() -> None:
    before = in_groups(1, 1, 1)
    planned = assign_replicas(40, before, 3)
    storages = before | {"new": "g3"}
    after = reassign_replicas(planned, storages, dict.fromkeys(planned, 3))
    assert set(loads(storages, after)) == {30}
    assert worth(storages, planned, after)[1] == 30


def test_more_and_fewer_replicas() -> None:
    storages = in_groups(1, 1, 1, 1, 1)
    planned = assign_replicas(10, storages, 3)
    more = reassign_replicas(planned, storages, dict.fromkeys(planned, 5))
    assert all(names == tuple(sorted(storages)) for names in more.values())
    assert worth(storages, more, reassign_replicas(more, storages, dict.fromkeys(planned, 1)))[1] == 0
    with pytest.raises(BadArgument, match="6 replicas"):
        reassign_replicas(planned, storages, {0: 3, 1: 6})


def test_a_plan_may_be_far_from_the_first_guess() -> None:
    """Counting sees that each of the large groups has room for one of every partition, and gives the small one 12. But the
    partitions of one replica have room in one of the large groups only, and those of three need the small one."""
    storages = in_groups(1, 4, 4)
    replication = {number: 3 if number < 30 else 1 for number in range(50)}
    planned = check_reassigned(storages, {}, replication)
    assert loads(storages, planned) == [30, *[10] * 8]


def test_a_thousand_partitions_wherever_they_are() -> None:
    random = Random(3)
    storages = in_groups(3, 3, 3, 3)
    current = {number: tuple(random.sample(sorted(storages), 3)) for number in range(1000)}
    planned = check_reassigned(storages, current, dict.fromkeys(current, 3))
    assert set(loads(storages, planned)) == {250}
