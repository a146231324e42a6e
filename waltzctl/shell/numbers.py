"""Lists of partitions as operators type and read them: `0-3,7`, or with a channel `orders,7`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from waltzctl.shell.cluster_target import ClusterTarget, using
from waltzd.cluster.assignment import format_numbers
from waltzd.errors import NoSuchPartition
from waltzd.protocol.channels import NO_CHANNELS, named_in, numbers_of

NAMED_MAX = 3
"""Maximum number of partitions that a message names, each with its reason."""


def partitions_of(text: str) -> list[int]:
    """Parse `0-3,7` as [0, 1, 2, 3, 7], sorted and without duplicates. Channels are refused: use it for files."""
    return list(numbers_of(text))


def chosen(target: ClusterTarget, text: str) -> list[int]:
    """Parse a list that may name channels, like `0-3,orders`. The cluster is contacted only if a channel is named."""
    if not named_in(text):
        return list(numbers_of(text, NO_CHANNELS))
    from waltzd.cluster.cluster import channels_of

    channels, _ = using(target, lambda cluster: channels_of(cluster.coordinator))
    return list(numbers_of(text, channels))


def check_partitions(
    numbers: Iterable[int], count: int, *, has_group_log: bool = False, not_done: str = "nothing was changed"
) -> None:
    """Raise `NoSuchPartition` for a number from `count` on, the number of partitions of the cluster. With `has_group_log`
    the number `count` is accepted: it is the group log."""
    for number in numbers:
        if number >= count + has_group_log:
            raise NoSuchPartition(
                f"there is no partition {number}; the cluster has {count}, from 0 on",
                not_done=not_done,
                next_step="`waltzctl partition list` shows them",
                partition=number,
            )


def first_few(sentences: Sequence[str], most: int = NAMED_MAX) -> str:
    """Format the first sentences, and count the rest: `a; b; c; and 2 more`."""
    more = f"; and {len(sentences) - most} more" if len(sentences) > most else ""
    return "; ".join(sentences[:most]) + more


def format_partitions(numbers: Iterable[int], one: str = "", more: str = "") -> str:
    """Format as `partitions 0-3 are`, with the verb `one` for one partition and `more` for several."""
    found = sorted(numbers)
    noun, verb = ("partition", one) if len(found) == 1 else ("partitions", more)
    return " ".join(word for word in (noun, format_numbers(found), verb) if word)
