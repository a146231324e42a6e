"""Replicas over groups and storages: spread as far as it goes, level as far as that permits, the same every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzctl.plan import assign_replicas, sizes, together
from waltzd.errors import EXIT_USAGE, TooFewStorages


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
    with pytest.raises(TooFewStorages, match=r"3 replicas .* there are 2") as caught:
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
