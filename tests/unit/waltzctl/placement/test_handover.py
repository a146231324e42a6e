"""Partitions on their way: why each has not arrived, and when there is nothing more to wait for."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from waltzctl.placement.ownership import Handover, format_waits
from waltzd.cluster.documents import Assignment, Ownership
from waltzd.errors import CannotConnect
from waltzd.protocol.descriptions import OwnedPartition, ServerDescription


def said(name: str, *held: tuple[int, int, str, str]) -> ServerDescription:
    """What a server says of partitions: number, generation, step, what it waits for."""
    partitions = tuple(
        OwnedPartition(
            partition=number, generation=generation, session=1, step=step, waiting=waiting, committed=-1, last_id=-1,
            low_mark=-1, mounts=0, tail_bytes=0, replicas=(),
        )
        for number, generation, step, waiting in held
    )  # fmt: skip
    return ServerDescription(
        name=name, cluster_key=UUID(int=1), instance=UUID(int=2), version="1", uptime_ms=1, is_connected=True,
        is_draining=False, is_leader=False, partitions=partitions,
    )  # fmt: skip


def owned(*owners: str | None, generation: int = 2) -> Assignment:
    return Assignment(owners=tuple(Ownership(owner, generation) for owner in owners))


TRANSFER = Handover(numbers=(0,), to={0: "b"})
DRAIN = Handover(numbers=(0,), to={}, leaving="a")
UNDRAIN = Handover(numbers=(0,), to={}, before={0: 1})
UNMOVED = replace(UNDRAIN, before={0: 2})


@pytest.mark.parametrize(
    ("wanted", "owner", "answers", "wait"),
    [
        (TRANSFER, "b", {"b": said("b", (0, 2, "OPEN", ""))}, None),
        (TRANSFER, "b", {"b": said("b", (0, 1, "OPEN", ""))}, "b has not begun with it yet"),
        (TRANSFER, "b", {"b": said("b")}, "b has not begun with it yet"),
        (TRANSFER, "b", {"b": said("b", (0, 2, "VOTING", ""))}, "b is recovering it"),
        (TRANSFER, "b", {"b": said("b", (0, 2, "VOTING", "s2 is silent"))}, "s2 is silent"),
        (TRANSFER, "b", {"b": said("b", (0, 2, "OPEN", "no majority"))}, "no majority"),
        (TRANSFER, "b", {}, "its new owner b is not up"),
        (TRANSFER, "b", {"b": CannotConnect("refused")}, "its new owner b does not answer: refused"),
        (TRANSFER, None, {}, "no server owns it"),
        (DRAIN, "a", {"a": said("a", (0, 1, "OPEN", ""))}, "it was not given to another server than a yet"),
        (DRAIN, "b", {"a": said("a", (0, 1, "OPEN", "")), "b": said("b", (0, 2, "OPEN", ""))}, "a is closing it"),
        (DRAIN, "b", {"a": said("a", (1, 1, "OPEN", "")), "b": said("b", (0, 2, "OPEN", ""))}, None),
        (DRAIN, "b", {"a": CannotConnect("gone"), "b": said("b", (0, 2, "OPEN", ""))}, None),
        (DRAIN, "b", {"a": said("a"), "b": said("b")}, "b has not begun with it yet"),
        (UNMOVED, "a", {"a": said("a", (0, 2, "OPEN", ""))}, "the leader has not moved it from a yet"),
        (UNDRAIN, "b", {"b": said("b")}, "b has not begun with it yet"),
        (UNDRAIN, "b", {"b": said("b", (0, 2, "OPEN", ""))}, None),
    ],
)
def test_why_a_partition_has_not_arrived(
    wanted: Handover, owner: str | None, answers: dict[str, ServerDescription | CannotConnect], wait: str | None
) -> None:
    assert wanted.waits(owned(owner), answers) == ({} if wait is None else {0: wait})


def test_a_server_that_gets_more_while_it_is_drained_gives_that_away_too() -> None:
    """Another server was drained at the same moment, and the leader had assigned its partitions here."""
    answers = {"a": said("a", (2, 2, "OPEN", "")), "b": said("b", (0, 2, "OPEN", ""))}
    wanted = DRAIN.completed(owned("b", "a", "b"), answers)
    assert wanted.waits(owned("b", "a", "b"), answers) == {
        1: "it was not given to another server than a yet", 2: "a is closing it",
    }  # fmt: skip
    later = owned("b", "b", "b", generation=3)
    assert wanted.completed(later, {}).numbers == (0, 1, 2), "what it has given away is waited for until it is open"
    assert TRANSFER.completed(owned("b", "a"), answers) == TRANSFER


def test_who_is_asked() -> None:
    assert Handover(numbers=(0, 2), to={}).servers(owned("b", "c", None)) == ["b"]
    assert Handover(numbers=(0, 2), to={}, leaving="z").servers(owned("b", "c", "b")) == ["b", "z"]


def test_what_went_elsewhere_is_waited_for_no_longer() -> None:
    wanted = Handover(numbers=(0, 1), to={0: "b", 1: "c"})
    assert wanted.astray(owned("b", "c")) == ""
    assert wanted.astray(owned("b", "a")) == "partition 1 belongs to a by now, no more to c"
    assert wanted.astray(owned(None, "c")) == "partition 0 belongs to nobody by now, no more to b"
    assert DRAIN.astray(owned("anybody")) == ""


def test_partitions_that_wait_for_the_same_are_told_together() -> None:
    assert format_waits({3: "x", 0: "y", 1: "y", 2: "y"}) == "0-2: y; 3: x"
