"""Who is taken for dead, and when: each condition alone, all answers of three storages, and a slow twin that keeps every
suspicion that ever was."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from uuid import UUID

import pytest

from waltzd.server.core.suspicion import REST_SECONDS, Suspicions, silent_everywhere

ONE, TWO = UUID(int=1), UUID(int=2)
MEMBERS = {0: ["a", "b", "c"], 1: ["a", "b", "c"]}
QUIET = {"a": [0, 1], "b": [0, 1]}


def judge(
    core: Suspicions,
    now: float,
    *,
    instance: UUID = ONE,
    refuses: bool = True,
    members: Mapping[int, list[str]] = MEMBERS,
    quiet: Mapping[str, list[int]] = QUIET,
) -> bool:
    return core.judge("one", instance, now, refuses=refuses, members=members, quiet=quiet)


def test_a_port_that_refuses_and_a_majority_of_each_partition_make_a_suspicion() -> None:
    core = Suspicions()
    assert judge(core, 5.0)
    assert core.suspected["one"].since == 5.0
    assert "nothing listens" in core.suspected["one"].why


def test_silence_of_the_port_is_no_suspicion() -> None:
    assert not judge(Suspicions(), 5.0, refuses=False)


@pytest.mark.parametrize("quiet", [{}, {"a": [0, 1]}, {"a": [0, 1], "b": [0]}, {"a": [0], "b": [0], "c": [0]}])
def test_a_minority_of_one_partition_is_no_suspicion(quiet: dict[str, list[int]]) -> None:
    assert not judge(Suspicions(), 5.0, quiet=quiet)


def test_who_owns_nothing_is_suspected_by_its_port() -> None:
    """Nothing moves by that, and it is given nothing."""
    assert judge(Suspicions(), 5.0, members={}, quiet={})


def test_who_answers_is_not_suspected_again_for_a_while() -> None:
    core = Suspicions()
    assert judge(core, 0.0)
    assert core.answered("one")
    assert not core.answered("one")
    assert not judge(core, REST_SECONDS - 0.1)
    assert judge(core, REST_SECONDS)


def test_a_process_that_was_started_again_is_another_one() -> None:
    core = Suspicions()
    assert judge(core, 0.0)
    assert not core.seen({"one": ONE})
    assert core.seen({"one": TWO})
    assert core.suspected == {}
    assert judge(core, 1.0, instance=TWO)


def test_who_left_the_list_is_not_suspected_any_more() -> None:
    core = Suspicions()
    assert judge(core, 0.0)
    assert core.seen({})
    assert not judge(core, 1.0), "it may come back by a new coordinator session: it is the same process"


def test_majorities_as_they_are_counted_one_by_one() -> None:
    """Every answer of three storages about two partitions."""
    for said in itertools.product([(), (0,), (1,), (0, 1)], repeat=3):
        quiet = dict(zip("abc", said, strict=True))
        wanted = all(len([name for name in "abc" if number in quiet[name]]) >= 2 for number in (0, 1))
        assert silent_everywhere(MEMBERS, quiet) is wanted


def test_whatever_happens_no_process_is_suspected_twice_in_a_minute() -> None:
    for seed in range(200):
        pick, core, now = random.Random(seed), Suspicions(), 0.0
        begun: dict[UUID, list[float]] = {ONE: [], TWO: []}
        instance, held = ONE, None
        for _ in range(60):
            now += pick.choice((0.1, 5.0, 30.0))
            match pick.randrange(4):
                case 0:
                    assert core.answered("one") is (held is not None)
                    held = None
                case 1:
                    instance = pick.choice((ONE, TWO))
                    assert core.seen({"one": instance}) is (held is not None and held != instance)
                    held = held if held == instance else None
                case _:
                    refuses, quiet = pick.random() < 0.8, {} if pick.random() < 0.2 else QUIET
                    rested = all(now - at >= REST_SECONDS for at in begun[instance])
                    wanted = refuses and bool(quiet) and held is None and rested
                    assert judge(core, now, instance=instance, refuses=refuses, quiet=quiet) is wanted
                    if wanted:
                        begun[instance].append(now)
                        held = instance
