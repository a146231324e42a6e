"""Partitions as people type and read them: `0-3,7` or `orders,7`, and whether there are any of these numbers."""

from __future__ import annotations

from collections.abc import Iterable

from waltzctl.shell.cluster_target import ClusterTarget, using
from waltzd.cluster.assignment import spell_numbers
from waltzd.errors import NoSuchPartition
from waltzd.protocol.channels import NO_CHANNELS, named_in, numbers_of


def partitions_of(text: str) -> list[int]:
    """`0-3,7` as [0, 1, 2, 3, 7]; each once, in order. For what is asked of files: they know no channels."""
    return list(numbers_of(text))


def chosen(target: ClusterTarget, text: str) -> list[int]:
    """As `partitions_of`, with channels: `0-3,orders`. The cluster is asked only where one is named."""
    if not named_in(text):
        return list(numbers_of(text, NO_CHANNELS))
    from waltzd.cluster.cluster import channels_of

    channels, _ = using(target, lambda cluster: channels_of(cluster.coordinator))
    return list(numbers_of(text, channels))


def check_partitions(
    numbers: Iterable[int], count: int, *, has_group_log: bool = False, not_done: str = "nothing was changed"
) -> None:
    """Raise `NoSuchPartition` for a number that is not below `count`, the partitions of the cluster. With `has_group_log`
    the number after them, that of the group log, is accepted as well."""
    for number in numbers:
        if number >= count + has_group_log:
            raise NoSuchPartition(
                f"there is no partition {number}; the cluster has {count}, from 0 on",
                not_done=not_done,
                next_step="`waltzctl partition list` shows them",
                partition=number,
            )


def spell(numbers: Iterable[int], one: str = "", more: str = "") -> str:
    """`partitions 0-3 are`: with the verb for one of them, or for more."""
    found = sorted(numbers)
    noun, verb = ("partition", one) if len(found) == 1 else ("partitions", more)
    return " ".join(word for word in (noun, spell_numbers(found), verb) if word)
