"""Channels: names for sets of partitions, and texts that list partitions by number and by channel: `0-3,orders`. Pure.

A channel is not another kind of log. Wherever partitions are listed, its name stands for the numbers that the cluster's
document gives it at that moment. It begins with a letter, so it cannot be confused with a number.

A client of one channel hashes keys over the partitions of the channel's `KeyHash`, which is kept beside the channel. It
stays as it is when partitions are added, because locks hold only while a key stays in its partition.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NewType, TypeAlias

import numpy as np

from waltzd.errors import BadArgument, NoSuchChannel
from waltzd.format.layout import PARTITIONS_MAX

Ranges = NewType("Ranges", str)
"""List of partitions by number: `0-3,7`."""
Parts = NewType("Parts", str)
"""List of partitions by number and by channel: `0-3,orders`."""
KeyHash = NewType("KeyHash", str)
"""Hash function for the keys of a channel, and the partitions that it chooses from: `blake2b:0-3`."""
Channels: TypeAlias = Mapping[str, Ranges]
NO_CHANNELS: Channels = {}
NO_KEYS: Mapping[str, KeyHash] = {}
EVERYTHING = "all"
"""Word for all partitions, which cannot be the name of a channel."""
LENGTH_MAX = 4096
CHANNELS_MAX = 1024
_CHANNEL = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
BLAKE2B = "blake2b"
"""Hash function of `waltzd.client.view.partition_by_hash`."""
_HASH = re.compile(r"[a-z0-9-]{1,32}")
_RANGE = re.compile(r"(0|[1-9][0-9]{0,4})(?:-(0|[1-9][0-9]{0,4}))?")
_TYPED = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True)
class Channel:
    """A channel as applications get it."""

    name: str
    partitions: str
    """Partitions of the channel, as in `0-3,7`."""
    keys: str = ""
    """`KeyHash` of the channel; empty if keys are hashed over all partitions of the cluster."""


def is_channel(text: str) -> bool:
    return _CHANNEL.fullmatch(text) is not None and text != EVERYTHING


def is_ranges(text: str) -> bool:
    return 0 < len(text) <= LENGTH_MAX and all(_is_range(part) for part in text.split(","))


def is_parts(text: str) -> bool:
    return 0 < len(text) <= LENGTH_MAX and all(_is_range(part) or is_channel(part) for part in text.split(","))


def is_key_hash(text: str) -> bool:
    function, colon, ranges = text.partition(":")
    return bool(colon) and _HASH.fullmatch(function) is not None and is_ranges(ranges)


def key_hash(ranges: Ranges) -> KeyHash:
    """Return the `KeyHash` of a new channel."""
    return KeyHash(f"{BLAKE2B}:{ranges}")


@lru_cache(maxsize=256)
def key_partitions(keys: KeyHash) -> tuple[int, ...]:
    """Return the partitions of a `KeyHash`: the hash, modulo their number, is an index of this sequence."""
    return tuple(sorted(numbers_of(keys.partition(":")[2])))


def key_function(keys: KeyHash) -> str:
    return keys.partition(":")[0]


def _is_range(text: str) -> bool:
    found = _RANGE.fullmatch(text)
    return found is not None and int(found[1]) <= int(found[2] or found[1]) < PARTITIONS_MAX


def named_in(text: str) -> list[str]:
    """Return the names of channels in a list of partitions."""
    return [part for part in map(str.strip, text.split(",")) if is_channel(part)]


def numbers_of(text: str, channels: Channels | None = None) -> tuple[int, ...]:
    """Parse a list of partitions as a person types it: `0-3,orders`. Return each number once, in the order of the text.

    Numbers that occur again cost nothing: `0-65535` a hundred times is as fast as once.

    Args:
        text: The list.
        channels: The channels of the cluster; None if names of channels are not permitted.

    Raises:
        NoSuchChannel: A name is not one of the channels.
        BadArgument: A part is not a number, a range or a name; or the text is too long.
    """
    is_said = np.zeros(PARTITIONS_MAX, np.bool_)
    found: list[int] = []
    for numbers in _ranges(text, channels):
        part = is_said[numbers.start : numbers.stop]
        found += (np.flatnonzero(~part) + numbers.start).tolist()
        part[:] = True
    return tuple(found)


def bits_of(text: str, channels: Channels) -> int:
    """Parse a list of partitions into the bits of one integer; raise the errors of `numbers_of`."""
    bits = 0
    for part in _parts(text):
        if part in channels:
            bits |= bits_of_ranges(channels[part])
        elif is_channel(part):
            raise no_channel(part)
        else:
            numbers = _range(part, channels)
            bits |= (1 << numbers.stop) - (1 << numbers.start)
    return bits


@lru_cache(maxsize=4096)
def bits_of_ranges(ranges: Ranges) -> int:
    """Return partitions as the bits of one integer."""
    return bits_of(ranges, NO_CHANNELS)


def numbers_in(bits: int) -> tuple[int, ...]:
    """Return the numbers of the bits that are set, in rising order."""
    raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
    return tuple(np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist())


def _ranges(text: str, channels: Channels | None) -> Iterator[range]:
    for part in _parts(text):
        if channels is not None and part in channels:
            yield from _ranges(channels[part], None)
        elif channels is not None and is_channel(part):
            raise no_channel(part)
        else:
            yield _range(part, channels)


def _parts(text: str) -> Iterable[str]:
    """Split a list of partitions; return each part once."""
    if len(text) > LENGTH_MAX:
        raise BadArgument(
            f"a list of partitions has {len(text)} characters; {LENGTH_MAX} are allowed", next_step="write it as ranges"
        )
    return dict.fromkeys(map(str.strip, text.split(",")))


def _range(part: str, channels: Channels | None) -> range:
    given = _TYPED.fullmatch(part)
    if given is None:
        what = f"{part!r} is no partition and no range of partitions"
        what += "" if channels is None else ", and no channel has such a name"
        raise BadArgument(what, next_step=f"write it as 0-3,7{'' if channels is None else ', or name a channel'}")
    numbers = range(int(given[1]), int(given[2] or given[1]) + 1)
    if not numbers or numbers[-1] >= PARTITIONS_MAX:
        raise BadArgument(f"{part!r} is no range of partitions", next_step="write it as 0-3,7")
    return numbers


def no_channel(name: str) -> NoSuchChannel:
    return NoSuchChannel(f"there is no channel {name}", channel=name)
