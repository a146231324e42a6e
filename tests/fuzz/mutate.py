"""Nonsense from a seed: the one way in which the tests of this folder make input that nobody should send.

Each run draws a new seed; a failure names it together with the number of the case, and `WALTZ_SEED` brings both back.
`WALTZ_LONG=1` multiplies all counts. A case may take little memory, whatever lengths its input claims.
"""

from __future__ import annotations

import math
import os
import random
import re
import secrets
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from waltzd.errors import WaltzError

T = TypeVar("T")
M = TypeVar("M", bound=Message)
IS_LONG = bool(os.environ.get("WALTZ_LONG"))
SEED = int(os.environ.get("WALTZ_SEED") or secrets.randbits(48))
LONG_FACTOR = 40
MEMORY_BYTES_MAX = 16 << 20
"""For one case, whose input has a few thousand bytes: far below what a length field can claim."""

INTEGERS = [
    -(1 << 63), -(1 << 31) - 1, -(1 << 31), -2, -1, 0, 1, 2, 5, 39, 40, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
    (1 << 62) + 7, (1 << 63) - 65, (1 << 63) - 1,
]  # fmt: skip
"""What fields of messages are set to."""
CLAIMS = [0, 1, 39, 40, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFD0, 1 << 24]
"""What four bytes of a file are set to: lengths at, above and below what makes sense, and negative ones."""
NUMBERS = [
    "0", "-0", "-1", "00", "1e9", "1e400", "NaN", "2147483648", str((1 << 63) - 1), str(1 << 64), "9" * 100, "9" * 5000,
    "²", "٣", "1_0", "0x10",
]  # fmt: skip
"""What the digits of a text are replaced by. An integer of 5000 digits is more than Python reads."""
PIECES = [
    "", " ", "\n", "\0", "\ud800", "é", "\u202e", "\ufeff", "\U0001f600", '"', "'", "\\", ",", ":", "-", "[", "]", "{", "}",
    "[" * 3000, "&a ", "*a", "!!python/object ", "null", "true", "~", "---", "%YAML 1.1\n", '"\\U7FFFFFFF"', '"\\uD800"',
    "é" * 200,
]  # fmt: skip


def count(times: int) -> int:
    return times * LONG_FACTOR if IS_LONG else times


def each(name: str, times: int, check: Callable[[random.Random], object]) -> None:
    """Every case has randomness of its own and must do with little memory."""
    for number in range(count(times)):
        with told(f"case {number} of {name!r}"), little_memory():
            check(random.Random(f"{SEED} {name} {number}"))


@contextmanager
def told(where: str) -> Iterator[None]:
    """What fails inside says how to bring it back."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{where}; run it again with WALTZ_SEED={SEED}{' WALTZ_LONG=1' if IS_LONG else ''}")
        raise


@contextmanager
def little_memory(most: int = MEMORY_BYTES_MAX) -> Iterator[None]:
    """At its height not more than this above what was taken before; counts the arrays of numpy, too."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        taken = tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()
    assert taken < most, f"{taken} bytes were taken for a small input"


# -- bytes -------------------------------------------------------------------------------------------------------------


def nonsense(chance: random.Random, size: int, *samples: bytes) -> bytes:
    """So many bytes: random, all alike, few kinds, or the beginning of something that makes sense elsewhere."""
    made = [
        chance.randbytes(size),
        bytes(size),
        b"\xff" * size,
        bytes(chance.choice([0, 1, 4, 255]) for _ in range(size)),
        *(sample[:size].ljust(size, b"\0") for sample in samples),
    ]
    return chance.choice(made)


def mutated(chance: random.Random, content: bytes, *others: bytes) -> bytes:
    """Some bytes changed, cut, doubled, put in, claimed to be longer, or taken from another input; or nonsense."""
    raw = bytearray(content)
    if chance.random() < 0.15:
        return nonsense(chance, chance.randrange(2 * len(raw) + 2), content, *others)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(raw) + 1)
        size = chance.choice([1, 1, 4, 8, 36, 100])
        match chance.randrange(8):
            case 0 if at < len(raw):
                raw[at] ^= 1 << chance.randrange(8)
            case 1:
                raw[at : at + 4] = chance.choice(CLAIMS).to_bytes(4, "big")
            case 2:
                raw[at : at + 8] = chance.choice(INTEGERS).to_bytes(8, "big", signed=True)
            case 3:
                raw[at : at + size] = nonsense(chance, size, *others)
            case 4:
                del raw[at : at + size]
            case 5:
                raw[at:at] = raw[at : at + size]
            case 6:
                other = chance.choice([content, *others])
                raw[at:] = other[chance.randrange(len(other) + 1) :]
            case _:
                del raw[at:]
    return bytes(raw)


# -- texts -------------------------------------------------------------------------------------------------------------


def mutated_text(chance: random.Random, content: str, *others: str) -> str:
    text = content
    if chance.random() < 0.1:
        return "".join(
            chance.choice([*PIECES, *NUMBERS, chr(chance.randrange(0x500))]) for _ in range(chance.randrange(20))
        )
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(text) + 1)
        size = chance.choice([1, 1, 2, 8, 40])
        match chance.randrange(7):
            case 0:
                text = (
                    text[:at]
                    + chr(chance.choice([chance.randrange(128), chance.randrange(sys.maxunicode)]))
                    + text[at + 1 :]
                )
            case 1:
                text = text[:at] + text[at + size :]
            case 2:
                text = text[:at] + text[at : at + size] + text[at:]
            case 3:
                text = text[:at] + chance.choice(PIECES) + text[at:]
            case 4:
                other = chance.choice([content, *others])
                text = text[:at] + other[chance.randrange(len(other) + 1) :]
            case 5 if numbers := list(re.finditer(r"[0-9]+", text)):
                found = chance.choice(numbers)
                text = text[: found.start()] + chance.choice(NUMBERS) + text[found.end() :]
            case _:
                text = text[:at]
    return text


# -- messages ----------------------------------------------------------------------------------------------------------


def filled(chance: random.Random, kind: type[M], depth: int = 0) -> M:
    """A message of the right form with whatever its fields can hold."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.25:
            continue
        _fill(chance, message, field, depth)
    return message


def _fill(chance: random.Random, message: Message, field: Any, depth: int) -> None:
    held = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"]
        held.update({_text(chance): _scalar(chance, value) for _ in range(chance.randrange(3))})
    elif isinstance(held, Message):
        held.CopyFrom(filled(chance, type(held), depth + 1))
    elif hasattr(held, "extend"):
        if field.message_type is not None:
            for _ in range(chance.randrange(3) if depth < 3 else 0):
                element = held.add()
                element.CopyFrom(filled(chance, type(element), depth + 1))
        else:
            held.extend(_scalar(chance, field) for _ in range(chance.choice([0, 1, 2, 40])))
    else:
        setattr(message, field.name, _scalar(chance, field))


_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def _scalar(chance: random.Random, field: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.randbytes(chance.choice([0, 1, 4, 8, 15, 16, 16, 16, 36, 40, 72, 400]))
    if field.type == FieldDescriptor.TYPE_STRING:
        return _text(chance)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return chance.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return chance.choice([0.0, -0.0, 0.5, -1.0, 1e308, 5e-324, math.inf, -math.inf, math.nan])
    least, most = _RANGES[field.cpp_type]
    return chance.choice([value for value in INTEGERS if least <= value <= most])


def _text(chance: random.Random) -> str:
    return chance.choice(["", "W2003", "W3003", "W9999", "torn-tail", "127.0.0.1:1", "é\0\n", "x" * 1000, "9" * 5000])


# -- what must be so ---------------------------------------------------------------------------------------------------


def parsed(declared: type[Exception] | tuple[type[Exception], ...], call: Callable[..., T], *arguments: Any) -> T | None:
    """What a parser makes of it, or None where it refuses with an error that it declares."""
    try:
        return call(*arguments)
    except declared:
        return None


def plain(value: object) -> object:
    """A value so that `==` compares what is in it: arrays, buffers and errors, too."""
    if isinstance(value, WaltzError):
        return (type(value).__name__, value.message, value.detail_not_done, value.detail_next_step, value.facts)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, {field.name: plain(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(one) for one in value]
    return value
