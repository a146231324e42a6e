"""Who owns what: even, preferred, still; against a twin that tries every assignment there is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.cluster.assignment import NO_PREFERENCES, Network, format_numbers, moved, obstacles, plan, transferred
from waltzd.cluster.documents import Assignment, Ownership, Preferences, ServerMeta


def server(name: str, preferred: Sequence[int] = (), *, is_draining: bool = False) -> ServerMeta:
    return ServerMeta(
        name=name,
        listen=f"{name}:1",
        admin_listen=f"{name}:2",
        instance=UUID(int=1),
        version="1",
        preferred=tuple(preferred),
        is_draining=is_draining,
    )


def servers(*up: str, draining: Sequence[str] = (), **preferred: Sequence[int]) -> dict[str, ServerMeta]:
    named = {name: server(name, preferred.get(name, ())) for name in up}
    return named | {name: server(name, preferred.get(name, ()), is_draining=True) for name in draining}


def owned(*owners: str | None, generation: int = 1) -> Assignment:
    return Assignment(owners=tuple(Ownership(owner, generation) for owner in owners))


def owners_of(assignment: Assignment) -> list[str | None]:
    return [ownership.server for ownership in assignment.owners]


NOBODY = Assignment(owners=())

# -- what the plan is judged by ----------------------------------------------------------------------------------------


def is_even(owners: Sequence[str | None], sharing: Sequence[str]) -> bool:
    counts = Counter(owners)
    return None not in counts and max(counts[name] for name in sharing) - min(counts[name] for name in sharing) <= 1


def worth(
    owners: Sequence[str | None], before: Assignment, up: Mapping[str, ServerMeta], wishes: Preferences = NO_PREFERENCES
) -> tuple[int, int, int, int]:
    """Preferences of operators honoured, those of servers, partitions that stay, and how far down the list of names the
    preferring owners are."""
    wanted = honoured = stayed = rank = 0
    sharing = [name for name in sorted(up) if not up[name].is_draining]
    for number, owner in enumerate(owners):
        assert owner is not None
        is_still = number < len(before.owners) and before.owners[number].server == owner
        stayed += is_still
        if wishes.partitions.get(number) in sharing:
            wanted += owner == wishes.partitions[number]
            continue
        preferring = [name for name in sharing if number in up[name].preferred]
        honoured += owner in preferring
        rank += preferring.index(owner) if owner in preferring and not is_still else 0
    return wanted, honoured, stayed, -rank


def best(
    before: Assignment, up: Mapping[str, ServerMeta], partitions: int, wishes: Preferences = NO_PREFERENCES
) -> tuple[int, int, int, int]:
    sharing = [name for name in up if not up[name].is_draining]
    every = itertools.product(sharing, repeat=partitions)
    return max(worth(owners, before, up, wishes) for owners in every if is_even(owners, sharing))


def check(
    before: Assignment, up: Mapping[str, ServerMeta], partitions: int, wishes: Preferences = NO_PREFERENCES
) -> Assignment:
    """The plan, with everything checked that holds for any plan."""
    after = plan(before, up, partitions, wishes)
    assert len(after.owners) == partitions
    for number, now in enumerate(after.owners):
        was = before.owners[number] if number < len(before.owners) else Ownership(None, 0)
        assert now.generation == was.generation + (was.server != now.server)
    sharing = [name for name in up if not up[name].is_draining]
    if sharing:
        assert is_even(owners_of(after), sharing) or partitions == 0
    assert plan(after, up, partitions, wishes) == after, "a plan of a plan is the same plan"
    return after


# -- against the twin --------------------------------------------------------------------------------------------------


def small_cases() -> Iterator[tuple[Assignment, dict[str, ServerMeta], int]]:
    """Everything for two servers and three partitions; a sample of what is larger."""
    names = ("a", "b")
    subsets = [[n for n in range(3) if mask >> n & 1] for mask in range(8)]
    for owners in itertools.product((None, "gone", *names), repeat=3):
        for first, second in itertools.product(subsets, repeat=2):
            yield owned(*owners), servers(*names, a=first, b=second), 3
    random = Random(5)
    for _ in range(400):
        count, partitions = random.randint(1, 4), random.randint(1, 5)
        up = [server(name, random.sample(range(partitions), random.randint(0, partitions))) for name in "abcd"[:count]]
        drawn = [random.choice([None, "gone", *"abcd"[:count]]) for _ in range(partitions)]
        yield owned(*drawn), {found.name: found for found in up}, partitions


@pytest.mark.slow
def test_no_even_assignment_is_better_than_the_plan() -> None:
    cases = 0
    for before, up, partitions in small_cases():
        after = check(before, up, partitions)
        assert worth(owners_of(after), before, up) == best(before, up, partitions), (before, up)
        cases += 1
    assert cases == 4**3 * 64 + 400


def test_no_even_assignment_is_better_when_operators_have_wishes() -> None:
    """Also for servers that are not up or drain, and for partitions that are not there."""
    random = Random(6)
    for _ in range(600):
        count, partitions = random.randint(1, 3), random.randint(1, 5)
        names = "abcd"[:count]
        up = {name: server(name, random.sample(range(partitions), random.randint(0, partitions))) for name in names}
        up["drains"] = server("drains", range(partitions), is_draining=True)
        before = owned(*[random.choice([None, "gone", *names]) for _ in range(partitions)])
        drawn = random.sample(range(partitions + 1), random.randint(0, partitions))
        wishes = Preferences(partitions={number: random.choice(["gone", "drains", *names]) for number in drawn})
        after = check(before, up, partitions, wishes)
        assert worth(owners_of(after), before, up, wishes) == best(before, up, partitions, wishes), (before, up, wishes)


NAMES = st.sampled_from(["a", "b", "c", "d", "e"])


@given(
    owners=st.lists(st.one_of(st.none(), NAMES), max_size=40),
    up=st.dictionaries(NAMES, st.tuples(st.lists(st.integers(-3, 50), max_size=30), st.booleans())),
    partitions=st.integers(0, 40),
    wishes=st.dictionaries(st.integers(0, 50), NAMES),
)
def test_there_is_a_plan_for_everything(
    owners: list[str | None], up: dict[str, tuple[list[int], bool]], partitions: int, wishes: dict[int, str]
) -> None:
    """Also for preferences that name no partition, or one twice, and for an assignment of another length."""
    named = {name: server(name, preferred, is_draining=draining) for name, (preferred, draining) in up.items()}
    check(owned(*owners), named, partitions, Preferences(partitions=wishes))


# -- by name -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partitions", "count", "preferred"),
    [(5, 2, 2), (7, 2, 3), (3, 2, 1)],
    ids=["5 on 2, 2 preferred", "7 on 2, 3 preferred", "3 on 2, 1 preferred"],
)
def test_a_server_that_prefers_exactly_its_smaller_share(partitions: int, count: int, preferred: int) -> None:
    """The original never ends planning these."""
    names = [f"server-{number}" for number in range(count)]
    for numbers in itertools.combinations(range(partitions), preferred):
        for wishing in names:
            up = {name: server(name, numbers if name == wishing else ()) for name in names}
            for before in (NOBODY, owned(*[names[0]] * partitions), owned(*[names[1]] * partitions)):
                after = check(before, up, partitions)
                assert all(after.owners[number].server == wishing for number in numbers)


def test_a_first_server_gets_everything_and_a_second_one_half() -> None:
    alone = check(NOBODY, servers("one"), 4)
    assert alone == owned("one", "one", "one", "one")
    both = check(alone, servers("one", "two"), 4)
    assert Counter(owners_of(both)) == {"one": 2, "two": 2}
    assert sorted(ownership.generation for ownership in both.owners) == [1, 1, 2, 2]


def test_when_a_server_is_gone_only_its_partitions_move() -> None:
    before = owned("one", "two", "three", "one", "two", "three")
    after = check(before, servers("one", "three"), 6)
    assert [owners_of(after)[number] for number in (0, 2, 3, 5)] == ["one", "three", "one", "three"]
    assert sorted(str(owners_of(after)[number]) for number in (1, 4)) == ["one", "three"]


def test_without_a_server_nobody_owns_anything() -> None:
    assert plan(owned("one", "two"), {}, 2) == owned(None, None, generation=2)
    assert plan(owned(None, None), {}, 2) == owned(None, None)


def test_who_drains_gives_away_and_takes_nothing() -> None:
    before = owned("one", "one", "two", "two")
    after = check(before, servers("two", "three", draining=["one"]), 4)
    assert owners_of(after) == ["three", "three", "two", "two"]
    assert check(NOBODY, servers("two", draining=["one"]), 2) == owned("two", "two")


def test_who_drains_with_nobody_to_take_over_goes_on() -> None:
    before = owned("one", "two", "gone", None)
    after = check(before, servers(draining=["one", "two"]), 4)
    assert owners_of(after) == ["one", "two", None, None]
    assert [ownership.generation for ownership in after.owners] == [1, 1, 2, 1]


def test_preferences_of_who_drains_do_not_count() -> None:
    after = check(NOBODY, servers("b", draining=["a"], a=[0, 1], b=[1]), 2)
    assert owners_of(after) == ["b", "b"]


def test_balance_wins_over_preference() -> None:
    after = check(owned("a", "a", "a", "a"), servers("a", "b", a=[0, 1, 2, 3]), 4)
    assert Counter(owners_of(after)) == {"a": 2, "b": 2}


def test_of_two_that_prefer_the_same_it_stays_or_goes_to_the_first_by_name() -> None:
    both = servers("a", "b", a=[0], b=[0])
    assert owners_of(check(owned("b", "a"), both, 2)) == ["b", "a"]
    assert owners_of(check(owned("a", "b"), both, 2)) == ["a", "b"]
    assert owners_of(check(NOBODY, both, 2)) == ["a", "b"]
    assert owners_of(check(owned("gone", "gone"), both, 2)) == ["a", "b"]


def test_a_large_cluster_has_a_plan_too() -> None:
    random = Random(7)
    names = [f"server-{number:02}" for number in range(40)]
    own: dict[str, list[int]] = {name: [] for name in names}
    for number in range(4096):
        own[random.choice(names)].append(number)
    before = Assignment(owners=tuple(Ownership(random.choice(names), 3) for _ in range(4096)))
    check(before, {name: server(name, own[name]) for name in names}, 4096)


# -- what operators prefer ---------------------------------------------------------------------------------------------


def wishes(**numbers: Sequence[int]) -> Preferences:
    return Preferences(partitions={number: name for name, given in numbers.items() for number in given})


def test_operators_go_before_servers() -> None:
    up = servers("a", "b", a=[0, 1])
    assert owners_of(check(NOBODY, up, 4)) == ["a", "a", "b", "b"]
    assert owners_of(check(NOBODY, up, 4, wishes(b=[0]))) == ["b", "a", "a", "b"]
    assert sorted(map(str, owners_of(check(NOBODY, up, 2, wishes(b=[0, 1]))))) == ["a", "b"], "balance goes before both"


def test_a_wish_for_who_cannot_does_not_count() -> None:
    up = servers("a", "b", draining=["c"], a=[0])
    assert owners_of(check(NOBODY, up, 2, wishes(c=[0], gone=[1]))) == ["a", "b"]


def test_a_transfer_moves_back_what_keeps_the_numbers_even() -> None:
    before = owned("a", "a", "b", "b")
    up = servers("a", "b")
    after = transferred(before, up, NO_PREFERENCES, [0], "b")
    assert Counter(owners_of(after)) == {"a": 2, "b": 2}
    assert owners_of(after)[:2] == ["b", "a"]
    assert obstacles(after, up, NO_PREFERENCES, [0], "b") == []
    assert plan(after, up, 4) == after, "so the leader leaves it alone"


def test_a_transfer_into_room_moves_nothing_back() -> None:
    before, up = owned("a", "a", "a", "b", "b"), servers("a", "b")
    assert owners_of(transferred(before, up, NO_PREFERENCES, [1], "b")) == ["a", "b", "a", "b", "b"]


@pytest.mark.parametrize(
    ("up", "preferences", "numbers", "said"),
    [
        (servers("a", "b", a=[0]), NO_PREFERENCES, [0], ["a prefers partition 0 by itself"]),
        (servers("a", "b"), wishes(a=[0]), [0], ["an operator prefers partition 0 at a"]),
        (servers("a", "b"), wishes(b=[2, 3]), [0], None),
        (servers("a", "b", b=[2, 3]), NO_PREFERENCES, [0], None),
        (servers("a", "b"), NO_PREFERENCES, [0, 1, 2], None),
    ],
    ids=["of its owner", "of an operator", "the place is taken", "the place is taken by itself", "too many"],
)
def test_what_would_undo_a_transfer(
    up: dict[str, ServerMeta], preferences: Preferences, numbers: list[int], said: list[str] | None
) -> None:
    before = owned("a", "a", "b", "b")
    after = transferred(before, up, preferences, numbers, "b")
    found = obstacles(after, up, preferences, numbers, "b")
    assert found == said if said is not None else found
    would_last = plan(after, up, 4, preferences) == after and all(owners_of(after)[number] == "b" for number in numbers)
    assert not would_last


@pytest.mark.slow
def test_obstacles_are_there_exactly_when_it_would_not_last() -> None:
    random = Random(9)
    lasted = 0
    for _ in range(1500):
        names, partitions = "abc"[: random.randint(1, 3)], random.randint(1, 6)
        up = {name: server(name, random.sample(range(partitions), random.choice([0, 0, 1]))) for name in names}
        drawn = random.sample(range(partitions), random.choice([0, 0, 1]))
        preferences = Preferences(partitions={number: random.choice(names) for number in drawn})
        before = plan(owned(*[random.choice(names) for _ in range(partitions)]), up, partitions, preferences)
        numbers, to = random.sample(range(partitions), random.choice([1, 1, min(2, partitions)])), random.choice(names)
        after = transferred(before, up, preferences, numbers, to)
        is_there = all(after.owners[number].server == to for number in numbers)
        would_last = is_there and plan(after, up, partitions, preferences) == after
        assert (obstacles(after, up, preferences, numbers, to) == []) == would_last
        lasted += would_last
    assert 300 < lasted < 1200


# -- in words ----------------------------------------------------------------------------------------------------------


def test_what_moves_is_said() -> None:
    before = owned("one", "one", "two", None, "two")
    after = owned("one", "two", None, "one", None)
    assert list(moved(before, after)) == ["1 from one to two", "2, 4 from two to no server", "3 to one"]
    assert list(moved(NOBODY, owned("one"))) == ["0 to one"]
    assert list(moved(before, before)) == []


def test_numbers_are_spelled_as_ranges() -> None:
    assert format_numbers([]) == ""
    assert format_numbers([0, 4, 5, 6, 9, 10]) == "0, 4-6, 9-10"


# -- the flow ----------------------------------------------------------------------------------------------------------


def test_an_early_choice_is_corrected() -> None:
    """The cheap route by way of 1 is taken first; the second unit needs its first pipe, and turns it back."""
    network = Network(4)
    pipes = [
        network.add(0, 1, capacity=1, price=1),
        network.add(0, 2, capacity=1, price=5),
        network.add(1, 2, capacity=1, price=0),
        network.add(1, 3, capacity=1, price=5),
        network.add(2, 3, capacity=1, price=1),
    ]
    assert network.send(0, 3) == 2
    assert [network.sent(pipe) for pipe in pipes] == [1, 1, 0, 1, 1]


def test_what_cannot_be_sent_is_not() -> None:
    network = Network(3)
    pipe = network.add(0, 1, capacity=3, price=1)
    assert network.send(0, 2) == 0
    network.add(1, 2, capacity=2, price=1)
    assert network.send(0, 2) == 2
    assert network.sent(pipe) == 2
