"""Transactions in a browser: what is found, what is read for it, and what is left out of a payload."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from waltzctl.console import log_pages
from waltzctl.console.log_pages import (
    CHUNK_MAX,
    LOOKED_MAX,
    ROWS,
    SHOWN_BYTES,
    Wanted,
    backwards,
    beginning,
    lock_hash_of,
    row_of,
    shortened,
    whole_text,
)
from waltzd import Transaction
from waltzd.errors import BadArgument
from waltzd.protocol.locks import Lock, LoggedLock, Mode

ORDER = Lock("order", 17)


def one(id_: int, payload: bytes = b"hello", kind: int = 0, *locks: LoggedLock) -> Transaction:
    return Transaction(0, id_, kind, len(payload), 0, (1, 1, id_), payload, None, None, 1_800_000_000_000_000, False, locks)


class Client:
    """A log, and what was read of it at once."""

    def __init__(self, log: list[Transaction]) -> None:
        self.log = log
        self.read: list[tuple[int, int]] = []

    async def read_some(self, _partition: int, *, after: int, through: int, with_locks: bool) -> list[Transaction]:
        self.read.append((after + 1, through))
        return self.log[after + 1 : through + 1]


def looked(log: list[Transaction], last_id: int, wanted: Wanted = Wanted()) -> tuple[Any, Client]:  # noqa: B008
    client = Client(log)
    return asyncio.run(backwards(client, 0, last_id, wanted)), client  # type: ignore[arg-type]


def test_a_page_is_the_newest_in_order_and_the_next_goes_on_without_gap() -> None:
    log = [one(id_) for id_ in range(130)]
    seen: list[int] = []
    last = 129
    while last >= 0:
        stretch, _ = looked(log, last)
        assert len(stretch.found) <= ROWS
        seen += [found.id for found in stretch.found]
        last = stretch.first_id - 1
    assert seen == list(range(129, -1, -1))


def test_an_empty_log() -> None:
    stretch, client = looked([], -1)
    assert (stretch.found, client.read) == ([], [])


def test_a_search_is_bounded_and_says_how_far_it_came() -> None:
    log = [one(id_, kind=7 if id_ == 0 else 0) for id_ in range(3 * LOOKED_MAX)]
    stretch, client = looked(log, len(log) - 1, Wanted(kind=7))
    assert not stretch.found
    assert LOOKED_MAX <= len(log) - stretch.first_id < LOOKED_MAX + CHUNK_MAX
    assert max(last - first + 1 for first, last in client.read) == CHUNK_MAX


def test_large_payloads_end_a_page_early_and_only_their_beginning_is_kept() -> None:
    large = bytes(10 << 20)
    log = [one(id_, large) for id_ in range(200)]
    stretch, client = looked(log, 199)
    assert sum(last - first + 1 for first, last in client.read) <= 50
    assert all(len(found.payload) == SHOWN_BYTES and found.length == len(large) for found in stretch.found)


def test_headers_and_locks() -> None:
    log = [
        one(0, b"a", 7, LoggedLock(ORDER.hash, Mode.WRITE)),
        one(1, b"b", 7),
        one(2, b"c", 8, LoggedLock(ORDER.hash, Mode.READ)),
    ]
    by = {name: [found.id for found in looked(log, 2, wanted)[0].found] for name, wanted in {
        "kind": Wanted(kind=7), "lock": Wanted(lock=ORDER.hash), "both": Wanted(kind=8, lock=ORDER.hash),
    }.items()}  # fmt: skip
    assert by == {"kind": [1, 0], "lock": [2, 0], "both": [2]}


def test_locks_are_named_as_everywhere() -> None:
    assert lock_hash_of("order:17") == lock_hash_of(f"{ORDER.hash:016x}") == ORDER.hash
    assert lock_hash_of("a:b:c") == Lock("a:b", "c").hash
    for text in ("order", ":17", "0123456789abcdeg"):
        with pytest.raises(BadArgument):
            lock_hash_of(text)


@pytest.mark.parametrize("letter", ["a", "é", "€", "𝄞"])
def test_the_beginning_of_a_text_ends_between_characters(letter: str) -> None:
    payload = ("x" + letter * SHOWN_BYTES).encode()
    part = beginning(payload)
    assert SHOWN_BYTES - 4 < len(part) <= SHOWN_BYTES
    assert part.decode() == ("x" + letter * SHOWN_BYTES)[: len(part.decode())]


def test_the_beginning_of_bytes_is_bytes() -> None:
    assert beginning(b"\xff" * 10_000) == b"\xff" * SHOWN_BYTES
    assert beginning(b"") == b""


def test_payloads_for_people() -> None:
    assert whole_text(b'{"a": ["\\u2028", 1]}') == json.dumps({"a": ["\u2028", 1]}, indent=2, ensure_ascii=False)
    assert whole_text("zwölf\n".encode()) == "zwölf\n"
    assert whole_text(bytes(range(18))) == "0001 0203 0405 0607 0809 0a0b 0c0d 0e0f\n1011"


def test_rows_have_the_values_of_json_and_a_line_for_people() -> None:
    row = row_of(one(5, b'{"a":\n1}', 3))
    assert (row["id"], row["kind"], row["size"], row["payload_encoding"]) == (5, 3, 8, "json")
    assert row["payload"] == '{"a": 1}'
    assert {column.key for column in log_pages.COLUMNS} <= set(row)
    assert shortened(one(5)).payload == b"hello"
