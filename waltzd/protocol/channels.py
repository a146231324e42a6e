"""Channels: names for sets of partitions, and texts that say partitions by numbers and by channels, `0-3,orders`. Pure.

A channel is no other kind of log: wherever partitions are said, its name stands for the numbers that the cluster's document
gives it at that moment. It begins with a letter, so it is never taken for a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NewType, TypeAlias

from waltzd.errors import BadArgument, NoSuchChannel
from waltzd.format.layout import PARTITIONS_MAX

Ranges = NewType("Ranges", str)
"""Of partitions: `0-3,7`."""
Parts = NewType("Parts", str)
"""Of partitions, by numbers and by channels: `0-3,orders`."""
Channels: TypeAlias = Mapping[str, Ranges]
NO_CHANNELS: Channels = {}
EVERYTHING = "all"
"""What stands for all partitions, and so names no channel."""
LENGTH_MAX = 4096
CHANNELS_MAX = 1024
_CHANNEL = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_RANGE = re.compile(r"(0|[1-9][0-9]{0,4})(?:-(0|[1-9][0-9]{0,4}))?")
_TYPED = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True)
class Channel:
    """One that an application is told of."""

    name: str
    partitions: str
    """`0-3,7`"""


def is_channel(text: str) -> bool:
    return _CHANNEL.fullmatch(text) is not None and text != EVERYTHING


def is_ranges(text: str) -> bool:
    return 0 < len(text) <= LENGTH_MAX and all(_is_range(part) for part in text.split(","))


def is_parts(text: str) -> bool:
    return 0 < len(text) <= LENGTH_MAX and all(_is_range(part) or is_channel(part) for part in text.split(","))


def _is_range(text: str) -> bool:
    found = _RANGE.fullmatch(text)
    return found is not None and int(found[1]) <= int(found[2] or found[1]) < PARTITIONS_MAX


def named_in(text: str) -> list[str]:
    """The channels that a text speaks of."""
    return [part for part in map(str.strip, text.split(",")) if is_channel(part)]


def numbers_of(text: str, channels: Channels | None = None) -> tuple[int, ...]:
    """`0-3,orders` as a person types it: each number once, as they were said. None: the caller knows no channels.

    Raises:
        NoSuchChannel: A name is none of these channels.
        BadArgument: A part is no number, no range, and no name of a channel.
    """
    return tuple(dict.fromkeys(_numbers(text, channels)))


def _numbers(text: str, channels: Channels | None) -> Iterator[int]:
    for part in map(str.strip, text.split(",")):
        if channels is not None and is_channel(part):
            if part not in channels:
                raise no_channel(part)
            yield from _numbers(channels[part], None)
            continue
        given = _TYPED.fullmatch(part)
        if given is None:
            what = f"{part!r} is no partition and no range of partitions"
            what += "" if channels is None else ", and no channel has such a name"
            raise BadArgument(what, next_step=f"write it as 0-3,7{'' if channels is None else ', or name a channel'}")
        numbers = range(int(given[1]), int(given[2] or given[1]) + 1)
        if not numbers or numbers[-1] >= PARTITIONS_MAX:
            raise BadArgument(f"{part!r} is no range of partitions", next_step="write it as 0-3,7")
        yield from numbers


def no_channel(name: str) -> NoSuchChannel:
    return NoSuchChannel(f"there is no channel {name}", channel=name)
