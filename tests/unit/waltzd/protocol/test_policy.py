"""What grants come to, beside a twin that reads them one by one.

Quotas as arithmetic: no more passes than was granted, whoever waits waits in turn, and mounts stay free for others.
"""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.policy_twin import allows
from waltzd.cluster.documents import PolicyDocument
from waltzd.errors.operations import BadMetadata
from waltzd.protocol.channels import NO_CHANNELS, Channels, Parts, Ranges, is_ranges
from waltzd.protocol.document import decode, encode
from waltzd.protocol.locks import append_lock, lock_hash, namespace_of, read_lock
from waltzd.protocol.policy import (
    BURST_SECONDS,
    LOCKS_MAX,
    NO_QUOTAS,
    SHARE,
    Amount,
    Bucket,
    Grant,
    LockBuckets,
    Pattern,
    Policy,
    Prefix,
    Quotas,
    Verb,
    collisions,
    everything,
    first_denied,
    is_pattern,
    is_prefix,
    may_enter,
    nothing,
)

PARTITIONS = range(12)
NAMES = ["a", "ab", "abc", "b", "b.c", "anonymous", "x" * 64]
PREFIXES = [Prefix(text) for text in ("account", "order", "ordér")]


patterns = st.sampled_from(["*", "a", "a*", "ab*", "abc*", "b", "b.*", "anonymous", "x*", "x" * 63 + "*"]).map(Pattern)
spans = st.tuples(st.sampled_from(PARTITIONS), st.integers(0, 4)).map(lambda at: (at[0], at[0] + at[1]))
ranges = st.lists(spans.map(lambda at: f"{at[0]}-{at[1]}" if at[0] < at[1] else f"{at[0]}"), min_size=1, max_size=3)
grants = st.builds(
    Grant,
    names=st.lists(patterns, min_size=1, max_size=3, unique=True).map(tuple),
    may=st.lists(st.sampled_from(list(Verb)), min_size=1, unique=True).map(tuple),
    partitions=st.none() | ranges.map(",".join).map(Parts),
    lock_prefixes=st.none() | st.lists(st.sampled_from(PREFIXES), max_size=2, unique=True).map(tuple),
    quotas=st.none() | st.builds(Quotas, mounts=st.none() | st.integers(1, 9).map(Amount)),
    one_instance=st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=150)
@given(found=st.lists(grants, max_size=6))
def test_rights_are_what_the_twin_reads(found: list[Grant]) -> None:
    policy = Policy(found)
    for name in NAMES:
        rights = policy.rights_of(name)
        assert rights is policy.rights_of(name)
        for partition in PARTITIONS:
            for verb in Verb:
                assert rights.may(verb, partition) is allows(found, name, verb, partition)
            assert rights.may_see(partition) is any(allows(found, name, verb, partition) for verb in Verb)
            for lock in ("account", "account.eur", "order.7", "ordér", "other"):
                assert rights.may_lock(partition, lock_hash(lock, 3)) is allows(found, name, Verb.APPEND, partition, lock)
        assert rights.is_nothing is (rights.grants == ())
    assert decode(PolicyDocument, encode(PolicyDocument(grants=tuple(found))), "/policy").grants == tuple(found)


@pytest.mark.slow
@settings(max_examples=60)
@given(found=st.lists(grants, min_size=1, max_size=5), more=grants)
def test_another_grant_takes_nothing_away(found: list[Grant], more: Grant) -> None:
    for name in NAMES:
        before, after = Policy(found).rights_of(name), Policy([*found, more]).rights_of(name)
        for partition in PARTITIONS:
            for verb in Verb:
                assert after.may(verb, partition) or not before.may(verb, partition)
            for prefix in PREFIXES:
                lock = lock_hash(prefix, 1)
                assert after.may_lock(partition, lock) or not before.may_lock(partition, lock)
    assert [Policy(found[::-1]).rights_of(name).may_append(3) for name in NAMES] == [
        Policy(found).rights_of(name).may_append(3) for name in NAMES
    ], "there is an order"


def test_a_quota_is_the_highest_that_is_said() -> None:
    one = Grant(names=(Pattern("a"),), may=(Verb.READ,), quotas=Quotas(mounts=Amount(3), inflight_bytes=Amount(7)))
    two = Grant(names=(Pattern("*"),), may=(Verb.APPEND,), quotas=Quotas(mounts=Amount(5)))
    silent = Grant(names=(Pattern("a"),), may=(Verb.APPEND,))
    policy = Policy([one, two, silent])
    assert policy.rights_of("a").quotas == Quotas(mounts=Amount(5), inflight_bytes=Amount(7))
    assert policy.rights_of("b").quotas == Quotas(mounts=Amount(5))
    assert Policy([silent]).rights_of("a").quotas == NO_QUOTAS


def test_a_group_is_granted_in_the_partitions_of_its_grant() -> None:
    def grant(partitions: str | None, *groups: str) -> Grant:
        where, patterns = None if partitions is None else Parts(partitions), tuple(map(Pattern, groups))
        return Grant(names=(Pattern("app"),), may=(Verb.SUBSCRIBE,), partitions=where, groups=patterns)

    rights = Policy([grant("1-2", "mailer"), grant("4", "*"), grant("0-9")]).rights_of("app")
    assert [number for number in range(10) if rights.may_attend(number, "mailer")] == [1, 2, 4]
    assert [number for number in range(10) if rights.may_attend(number, "indexer")] == [4]
    assert Policy([grant(None, "mailer")]).rights_of("app").may_attend(9, "mailer")


def test_a_channel_that_is_not_there_grants_no_partition() -> None:
    grant = Grant(names=(Pattern("app"),), may=tuple(Verb), partitions=Parts("orders"), groups=(Pattern("*"),))
    cases: list[tuple[Channels, list[int]]] = [
        (NO_CHANNELS, []),
        ({"orders": Ranges("0,2")}, [0, 2]),
        ({"bills": Ranges("0-3")}, []),
    ]
    for channels, granted in cases:
        rights = Policy([grant], channels).rights_of("app")
        assert [number for number in range(5) if rights.may_append(number)] == granted
        assert [number for number in range(5) if rights.may_read(number)] == granted
        assert [number for number in range(5) if rights.may_attend(number, "mailer")] == granted
        assert [number for number in range(5) if rights.may_see(number)] == granted


def test_everything_and_nothing() -> None:
    assert not everything("ann").may_see(-1)
    for partition in (0, 65535):
        for verb in Verb:
            assert everything("ann").may(verb, partition)
            assert not nothing("eve").may(verb, partition)
        assert everything("ann").locks(partition) is None
        assert not nothing("eve").may_lock(partition, 1)
    assert everything("ann").sees_everything
    assert nothing("eve").is_nothing


def test_a_thousand_grants_of_which_one_speaks_of_a_name() -> None:
    def grant(number: int) -> Grant:
        names = Pattern(f"app-{number}"), Pattern(f"team-{number}-*")
        return Grant(names=names, may=(Verb.READ,), partitions=Parts(str(number)))

    found = [grant(number) for number in range(1000)]
    policy = Policy(found)
    for name in ("app-7", "team-7-x"):
        rights = policy.rights_of(name)
        assert rights.grants == (found[7],)
        assert [partition for partition in range(1000) if rights.may_read(partition)] == [7]
    assert policy.rights_of("team-7").is_nothing


def test_the_first_lock_that_is_not_allowed() -> None:
    spaces = frozenset([namespace_of("account")])
    mine, other = append_lock("account.eur", 7).hash, read_lock("order", 1).hash
    assert first_denied(spaces, np.array([mine] * 5, np.uint64)) is None
    assert first_denied(spaces, np.zeros(0, np.uint64)) is None
    assert first_denied(spaces, np.array([mine, other, mine], np.uint64)) == other
    assert first_denied(frozenset(), np.array([mine], np.uint64)) == mine


def test_a_lock_says_whose_it_is_and_no_more() -> None:
    """Whatever stands behind the first dot, and whatever the number is."""
    spaces = {lock_hash(name, id) >> 48 for name in ("account", "account.eur", "account.") for id in (0, -1, 1 << 40)}
    assert spaces == {namespace_of("account")}
    assert lock_hash("account", 1) != lock_hash("account.eur", 1)
    assert f"{lock_hash('account.eur', 7):016x}" == "9b0822cbb86f5805", "clients in other languages compute the same"


def test_prefixes_that_share_a_namespace_are_named() -> None:
    names, known = ("", ""), dict[int, str]()
    for number in range(1 << 12):
        other = known.setdefault(namespace_of(f"p{number}"), f"p{number}")
        if other != f"p{number}":
            names = other, f"p{number}"
            break
    first = Grant(names=(Pattern("a"),), may=(Verb.APPEND,), lock_prefixes=(Prefix(names[0]), Prefix("account")))
    second = Grant(names=(Pattern("b"),), may=(Verb.APPEND,), lock_prefixes=(Prefix(names[1]), Prefix("account")))
    assert collisions([first, second]) == [tuple(sorted(names))]
    assert collisions([first]) == []


@pytest.mark.parametrize("text", ["", "a b", "*a", "a*b", "**", "-a", "a/b", "ä", "x" * 65, "x" * 64 + "*", "a\n", ".*"])
def test_no_pattern(text: str) -> None:
    assert not is_pattern(text)


@pytest.mark.parametrize(
    "text", ["", "1-", "-1", "3-1", "01", "1,,2", "65536", "0-65536", " 1", "1 ", "²", "1\n", "9" * 999]
)
def test_no_ranges(text: str) -> None:
    assert not is_ranges(text)
    assert is_ranges("0,3-3,65535")


@pytest.mark.parametrize("text", ["", "a.b", ".", "a\n", "x" * 65])
def test_no_prefix_of_locks(text: str) -> None:
    assert not is_prefix(text)
    assert is_prefix("exchange rate")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"deny": ["x"]}, "grants[0].deny is not known"),
        ({"may": ["write"]}, "grants[0].may[0] must be append or read or subscribe"),
        ({"may": []}, "grants[0].may must not be empty"),
        ({"names": []}, "grants[0].names must not be empty"),
        ({"names": ["a", "a"]}, "grants[0].names has an entry twice"),
        ({"names": ["a b"]}, "grants[0].names[0] must be a name"),
        ({"partitions": "3-1"}, "grants[0].partitions must be numbers of partitions"),
        ({"quotas": {"mounts": 0}}, "quotas.bytes_per_second is missing"),
        ({"one_instance": 1}, "grants[0].one_instance must be true or false"),
    ],
)
def test_a_document_that_means_nothing_is_refused_with_the_place(change: dict[str, object], words: str) -> None:
    document = json.loads(encode(PolicyDocument(grants=(Grant(names=(Pattern("a"),), may=(Verb.READ,)),))))
    document["grants"][0] |= change
    with pytest.raises(BadMetadata, match=re.escape(words)):
        decode(PolicyDocument, json.dumps(document).encode(), "/policy")


@given(
    st.floats(0.5, 1e6),
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 2_000_000)), max_size=40),
)
def test_over_any_time_no_more_passes_than_the_rate_one_bucket_and_one_thing(
    rate: float, wanted: list[tuple[float, int]]
) -> None:
    bucket, now = Bucket(rate, 0.0), 0.0
    passed: list[tuple[float, int]] = []
    for pause, amount in wanted:
        now += pause
        passed.append((now + bucket.take(amount, now), amount))
    times = [at for at, _ in passed]
    assert times == sorted(times), "who came first goes first"
    for first, (begin, _) in enumerate(passed):
        for last in range(first, len(passed)):
            end = passed[last][0]
            between = sum(amount for _, amount in passed[first : last + 1])
            largest = max(amount for _, amount in passed[first : last + 1])
            assert between <= rate * (end - begin + BURST_SECONDS) + largest + 1e-6 * (1 + between)


def test_a_name_that_stays_below_its_quota_never_waits() -> None:
    bucket = Bucket(100.0, 0.0)
    assert [bucket.take(10, 0.1 * number) for number in range(1, 100)] == [0.0] * 99
    assert bucket.take(100, 100.0) == 0.0, "what was not used for a second may be used at once"
    assert bucket.take(50, 100.0) == 0.5
    assert bucket.wait(100.2) == 0.5 - 0.2 or abs(bucket.wait(100.2) - 0.3) < 1e-9


def test_each_lock_is_counted_by_itself_and_their_number_is_bounded() -> None:
    locks = LockBuckets(2.0)
    assert locks.take([(1, 1), (2, 1)], 0.0) == 0.0
    assert locks.take([(1, 1)], 0.0) == 0.0
    assert locks.take([(1, 1)], 0.0) == 0.5
    assert locks.take([(2, 1)], 0.0) == 0.0, "another lock does not wait"
    assert locks.take([(1, 1), (3, 1)], 0.0) == 1.0, "what has several locks waits for the one that waits longest"
    locks.take([(lock, 1) for lock in range(2 * LOCKS_MAX)], 0.0)
    assert len(locks) <= 2 * LOCKS_MAX


@pytest.mark.slow
def test_no_lock_gets_rid_of_its_debt_behind_others() -> None:
    """However many other locks are marked in between, a lock is marked no more often than its rate."""
    locks, hot, now, junk = LockBuckets(5.0), 1 << 48, 0.0, itertools.count(2 << 48)
    marked = 0
    while now < 60.0:
        wait = locks.take([(hot, 1)], now)
        marked += 1
        for _ in range(5):
            wait = max(wait, locks.take([(next(junk), 1) for _ in range(1000)], now))
        now += max(wait, 0.001)
        assert len(locks) <= 2 * LOCKS_MAX
        assert marked <= 5 * now + 2 * 5


def test_locks_that_were_paid_for_make_room_for_others() -> None:
    locks = LockBuckets(5.0)
    for now in range(20):
        assert locks.take([(now * LOCKS_MAX + lock, 1) for lock in range(LOCKS_MAX)], 2.0 * now) == 0.0
    assert len(locks) == LOCKS_MAX


def test_one_name_that_takes_all_it_can_leaves_a_share_to_others() -> None:
    held = 0
    while may_enter(held, held, 1000):
        held += 1
    assert held == 800
    others = 0
    while may_enter(others, held + others, 1000):
        others += 1
    assert others == 160


@given(st.integers(1, 200), st.lists(st.integers(0, 9), max_size=1000))
def test_the_last_mounts_go_to_names_that_hold_few(most: int, wanted: list[int]) -> None:
    held = dict.fromkeys(range(10), 0)
    for name in wanted:
        total = sum(held.values())
        if may_enter(held[name], total, most):
            held[name] += 1
            assert total < most
        else:
            assert total == most or held[name] >= SHARE * (most - total) > 0
    free = most - sum(held.values())
    assert free > 0 or all(not may_enter(count, most, most) for count in held.values())


def test_a_quota_of_mounts_and_a_server_where_nobody_has_a_name() -> None:
    assert may_enter(1, 1, 100, most=2)
    assert not may_enter(2, 2, 100, most=2)
    assert may_enter(99, 99, 100, is_shared=False)
    assert not may_enter(100, 100, 100, is_shared=False)
    assert not may_enter(0, 100, 100)
