"""Partitions by numbers and by channels: what a text means, and what it cannot mean."""

from __future__ import annotations

import tracemalloc

import pytest

from waltzd.errors import BadArgument, NoSuchChannel
from waltzd.protocol.channels import (
    LENGTH_MAX,
    Ranges,
    bits_of,
    is_channel,
    is_parts,
    is_ranges,
    named_in,
    numbers_in,
    numbers_of,
)

CHANNELS = {"orders": Ranges("0-3,7"), "o-2": Ranges("9")}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0", (0,)),
        ("3, 0-1", (3, 0, 1)),
        ("orders", (0, 1, 2, 3, 7)),
        ("7,orders,3", (7, 0, 1, 2, 3)),
        (" o-2 ,1", (9, 1)),
        ("065535", (65535,)),
    ],
)
def test_each_number_once_in_the_order_in_which_it_is_said(text: str, numbers: tuple[int, ...]) -> None:
    assert numbers_of(text, CHANNELS) == numbers
    assert numbers_in(bits_of(text, CHANNELS)) == tuple(sorted(numbers))


@pytest.mark.parametrize("text", ["", ",", "1,", "3-1", "0-", "-1", "1-2-3", "65536", "0-65536", "1.0", "all", "ä", "_x"])
def test_what_says_no_partitions(text: str) -> None:
    for channels in (None, CHANNELS):
        with pytest.raises(BadArgument):
            numbers_of(text, channels)
    with pytest.raises(BadArgument):
        bits_of(text, CHANNELS)


def test_a_name_has_to_be_that_of_a_channel() -> None:
    with pytest.raises(NoSuchChannel, match="no channel order") as caught:
        numbers_of("0,order", CHANNELS)
    assert caught.value.facts == {"channel": "order"}
    with pytest.raises(BadArgument, match="'orders' is no partition"):
        numbers_of("orders")  # files know no channels
    assert named_in("0-3, orders,o-2,all") == ["orders", "o-2"]


def test_a_long_text_is_refused_and_ranges_over_each_other_cost_nothing() -> None:
    for found in (numbers_of, bits_of):
        with pytest.raises(BadArgument, match=f"{LENGTH_MAX + 1} characters; {LENGTH_MAX} are allowed"):
            found("0" * (LENGTH_MAX + 1), CHANNELS)
    staircase = ",".join(f"0-{65535 - number}" for number in range(500))
    tracemalloc.start()
    assert numbers_of(staircase) == tuple(range(65536))
    assert bits_of(staircase, CHANNELS) == (1 << 65536) - 1
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["a", "Orders.eu_1-x", "x" * 64, "al", "allx"])
def test_names(name: str) -> None:
    assert is_channel(name)
    assert is_parts(f"0-3,{name}")
    assert not is_ranges(name)


@pytest.mark.parametrize("name", ["", "0", "0-3", "1a", "-a", "a b", "a,b", "ä", "x" * 65, "all", "a\n"])
def test_what_is_no_name(name: str) -> None:
    assert not is_channel(name)
