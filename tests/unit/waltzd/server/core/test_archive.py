"""Who uploads next, told as stories.

What a floor may become, against a twin that tries every id.
"""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from waltzd.cluster.documents import Keep, Membership, PartitionMeta, ReplicaState
from waltzd.protocol.descriptions import ArchiveCheck, ReplicaStatus
from waltzd.server.core.archive import (
    AGAIN_SECONDS,
    FIRST_SECONDS,
    IDLE_SECONDS,
    LOOKS,
    RETRY_SECONDS,
    RETRY_SECONDS_MAX,
    ROUND_SECONDS,
    STEP_SECONDS,
    TURN_SEGMENTS,
    ArchiveRounds,
    Sealed,
    UploadTurns,
    bytes_of,
    mark_of,
    next_floor,
    reach_of,
)

ALL = ["a", "b", "c"]


def test_the_replicas_take_turns_of_a_few_segments() -> None:
    turns, asked = UploadTurns(), []
    for committed in range(4 * TURN_SEGMENTS):
        name = turns.choose(ALL, committed)
        assert name is not None
        asked.append(name)
        turns.uploaded(name)
        assert turns.pause == 0
    assert asked == [name for name in (*ALL, "a") for _ in range(TURN_SEGMENTS)]


def test_when_a_segment_is_known_to_wait_who_had_none_is_asked_again() -> None:
    turns = UploadTurns()
    for name in ALL:
        assert turns.choose(ALL, 5) == name
        turns.found_none(name, 5)
    assert turns.choose(ALL, 5) is None
    turns.hurry()
    assert turns.choose(ALL, 5) == "a"


def test_when_one_has_nothing_another_is_asked_and_then_only_when_something_was_committed() -> None:
    turns, asked = UploadTurns(), []
    for _ in range(6):
        name = turns.choose(ALL, 10)
        asked.append(name)
        if name is not None:
            turns.found_none(name, 10)
        assert turns.pause == IDLE_SECONDS
    assert asked == [*ALL, None, None, None]
    assert turns.choose(ALL, 11) == "a"


def test_a_quiet_log_is_looked_at_now_and_then() -> None:
    """A replica may learn later that its last sealed segment is committed."""
    turns = UploadTurns()
    for name in ALL:
        turns.found_none(name, 10)
    turns.choose(ALL, 10)
    asked = [turns.choose(["b"], 10) for _ in range(2 * LOOKS)]
    assert 1 <= sum(name is not None for name in asked) <= 2


def test_who_fails_is_asked_last_and_all_of_them_later_and_later() -> None:
    turns, pauses = UploadTurns(), []
    for step in range(30):
        name = turns.choose(ALL, step)
        assert name is not None
        turns.failed(name, "away", ALL)
        pauses.append(turns.pause)
        assert (turns.trouble == "") == (step < 2)
    assert pauses[:9] == [0, 0, RETRY_SECONDS, 0, 0, 2 * RETRY_SECONDS, 0, 0, 4 * RETRY_SECONDS]
    assert pauses[-1] == RETRY_SECONDS_MAX
    turns.uploaded("a")
    assert (turns.trouble, turns.pause) == ("", 0)
    turns.failed("a", "away", ALL)
    assert turns.pause == 0
    turns.failed("b", "away", ["b"])
    assert turns.pause == RETRY_SECONDS


def test_a_replica_that_cannot_be_asked_is_left_out() -> None:
    turns = UploadTurns()
    assert turns.choose([], 5) is None
    assert turns.choose(["c"], 5) == "c"
    turns.failed("c", "away", ALL)
    assert turns.choose(ALL, 5) == "a"


def walk(rounds: ArchiveRounds, archived: int, now: float, *, step: int = 100, gone: int | None = None) -> float:
    """One round over so many ids, or up to an object that is gone, and when it ended."""
    while True:
        now += rounds.pause
        last_id = min(rounds.first_id + step - 1, archived)
        if gone is not None and last_id >= gone:
            rounds.record(ArchiveCheck(last_id=gone - 1, missing=f"{gone} is gone"), archived, now)
            return now
        rounds.record(ArchiveCheck(last_id=last_id), archived, now)
        if rounds.first_id == 0:
            return now


def test_the_first_round_is_quick_and_each_later_one_takes_a_day() -> None:
    rounds = ArchiveRounds()
    assert rounds.describe(5.0) is None
    first = walk(rounds, 999, 0.0)
    assert first == FIRST_SECONDS + 9 * STEP_SECONDS
    assert rounds.describe(first) == ArchiveCheck(last_id=999, age_ms=9000)
    second = walk(rounds, 1999, first)
    assert abs(second - first - ROUND_SECONDS) <= ROUND_SECONDS / 10
    assert (rounds.last_id, rounds.since) == (1999, first + ROUND_SECONDS / 10)


def test_one_step_that_sees_everything_comes_once_a_day() -> None:
    rounds = ArchiveRounds()
    first = walk(rounds, 9, 0.0)
    assert walk(rounds, 9, first) == first + ROUND_SECONDS


def test_at_a_missing_object_it_stops_until_that_is_back() -> None:
    rounds = ArchiveRounds()
    now = walk(rounds, 999, walk(rounds, 999, 0.0), gone=250)
    assert (rounds.first_id, rounds.last_id, rounds.pause) == (250, 249, AGAIN_SECONDS)
    assert rounds.describe(now) == ArchiveCheck(last_id=249, missing="250 is gone")
    rounds.uploaded(999, 1099)
    assert rounds.last_id == 249
    again = walk(rounds, 1099, now)
    assert again - now < AGAIN_SECONDS + 100 * STEP_SECONDS, "not a day later"
    assert (rounds.missing, rounds.last_id) == ("", 1099)


def test_what_is_uploaded_was_read_back_and_counts() -> None:
    rounds = ArchiveRounds()
    rounds.uploaded(-1, 99)
    assert rounds.last_id == -1, "nothing was looked for yet"
    walk(rounds, 99, 0.0)
    rounds.uploaded(99, 199)
    assert rounds.last_id == 199
    rounds.failed()
    assert (rounds.last_id, rounds.pause) == (199, AGAIN_SECONDS)


ONE, OTHER = UUID(int=1), UUID(int=2)
META = PartitionMeta(
    generation=1,
    session=7,
    opened=7,
    low_mark=50,
    members=("a", "b"),
    replicas={
        "a": ReplicaState(session=7, closing=None, incarnation=ONE, acknowledged=60),
        "b": ReplicaState(session=7, closing=None, incarnation=OTHER, acknowledged=40),
    },
)


def status(*, session: int = 7, low_mark: int = 50, last_id: int = 70, floor: int = 0) -> ReplicaStatus:
    return ReplicaStatus(
        partition=0,
        incarnation=ONE,
        promised_session=7,
        session=session,
        low_mark=low_mark,
        local_low_mark=low_mark,
        committed=last_id,
        last_id=last_id,
        is_available=True,
        is_full=False,
        segments=3,
        findings=(),
        floor=floor,
    )


def segments_of(sizes: list[tuple[int, int]], begin: int) -> list[Sealed]:
    found, first = [], begin
    for count, size in sizes:
        found.append((first, first + count - 1, size))
        first += count
    return found


def is_free(floor: int, replicas: list[list[Sealed]], archived: int, reach: int, keep: Keep, older: int) -> bool:
    """Whether each replica may begin at this floor, or at its segment that holds it."""
    for segments in replicas:
        at = [segment for segment in segments if segment[0] <= floor <= segment[1]]
        if not at or not any(first == floor for own in replicas for first, _, _ in own):
            return False
        first, last, _ = at[-1]
        if last > min(archived, reach):
            return False
        if keep.seconds is not None and first - 1 > older:
            return False
        if keep.size is not None:
            active = max(map(bytes_of, segments))
            behind = sum(bytes_of(segment) for segment in segments if segment[0] >= first)
            in_front = [segment for segment in segments if segment[0] < first]
            # The one in front of the floor has to be too much: else it stays.
            if in_front and behind + bytes_of(in_front[-1]) + active <= keep.size:
                return False
    return keep != Keep()


sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(64, 400)), max_size=8)
keeps = st.one_of(st.just(Keep()), st.integers(0, 4000).map(lambda size: Keep(size=size)), st.just(Keep(seconds=60)))


@given(sizes, st.integers(0, 6), st.integers(-1, 30), st.integers(-1, 30), keeps, st.integers(-1, 30), st.integers(1, 3))
def test_the_floor_is_the_highest_that_every_bound_allows(
    drawn: list[tuple[int, int]], begin: int, archived: int, reach: int, keep: Keep, older: int, count: int
) -> None:
    whole = segments_of(drawn, begin)
    replicas = [whole[: max(0, len(whole) - behind)] for behind in range(count)]  # some have sealed less
    found = next_floor(begin, archived=archived, reach=reach, replicas=replicas, keep=keep, older=older)
    free = [first for first, _, _ in whole if is_free(first, replicas, archived, reach, keep, older)]
    assert found == max([begin, *free])


@given(sizes, sizes, st.integers(-1, 40), st.integers(0, 4000))
def test_replicas_that_cut_in_different_places_each_keep_what_they_need(
    one: list[tuple[int, int]], other: list[tuple[int, int]], bound: int, size: int
) -> None:
    """Of format 0."""
    replicas = [segments_of(one, 0), segments_of(other, 0)]
    floor = next_floor(0, archived=bound, reach=bound, replicas=replicas, keep=Keep(size=size))
    assert floor == 0 or floor <= bound
    for segments in replicas:
        kept = [segment for segment in segments if segment[1] >= floor]
        assert floor == 0 or (kept and kept[0][1] <= bound), "one whole segment stays"


def test_what_everybody_has_is_what_may_go() -> None:
    roles = {"a": Membership.MEMBER, "b": Membership.MEMBER}
    both = {"a": status(), "b": status()}
    assert reach_of(META, roles, both, {"a": 70, "b": 70}) == 50
    assert reach_of(META, roles, {"a": status()}, {"a": 70}) == 40, "of the silent one, what was heard last"
    assert reach_of(META, roles, {**both, "b": status(session=6, low_mark=60)}, {"a": 70, "b": 70}) == 40
    assert reach_of(META, {**roles, "d": Membership.MEMBER}, both, {"a": 70, "b": 70}) == -1, "never heard of"
    learning = {**roles, "c": Membership.LEARNER}
    assert reach_of(META, learning, both, {"a": 70, "b": 70}) == 50, "it begins at the floor"
    copying = {**both, "c": status(session=7, last_id=9)}
    assert reach_of(META, learning, copying, {"a": 70, "b": 70, "c": 9}) == 9
    begun = {**both, "c": status(session=7, last_id=29, floor=30)}
    assert reach_of(META, learning, begun, {"a": 70, "b": 70, "c": 29}) == 50, "it has nothing yet"


def test_a_silent_member_counts_with_the_least_that_is_known_of_it() -> None:
    assert mark_of(META, "b", None) == 40
    assert mark_of(META, "a", None) == 50
    assert mark_of(META, "c", None) == -1
    closed = ReplicaState(session=6, closing=30, incarnation=OTHER, acknowledged=35)
    assert mark_of(PartitionMeta(**{**META.__dict__, "replicas": {"b": closed}}), "b", None) == 30


def test_by_default_everything_stays() -> None:
    assert next_floor(0, archived=99, reach=99, replicas=[segments_of([(10, 100)] * 10, 0)], keep=Keep()) == 0
    assert next_floor(7, archived=99, reach=99, replicas=[], keep=Keep(size=1)) == 7
