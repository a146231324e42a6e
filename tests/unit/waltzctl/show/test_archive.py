"""`waltzctl archive status` for people: a table that fits a terminal, and the reasons below it."""

from __future__ import annotations

import io

from rich.console import Console

from waltzctl.records.archive import Reaching, reaching

LOST = "W2262 the archive cannot stand in for what would go: the object 00/segments/0000000000000000000-00.seg is gone"
WIDTH = 100


def reached(partition: int, *, trouble: str = "", missing: str = "") -> Reaching:
    return Reaching(
        partition=partition, archived=1_234_567_890, committed=1_234_599_999, floor=1_200_000_000, manifest=12_345,
        archive="8c1f1a52-5d0c-4f83-a1a5-7a1a5b1f0000", sha256="0" * 64, trouble=trouble, checked_ms=None, missing=missing,
    )  # fmt: skip


def drawn(*found: Reaching) -> list[str]:
    out = io.StringIO()
    reaching(found).draw(Console(file=out, width=WIDTH))
    return out.getvalue().splitlines()


def test_a_long_reason_stands_below_a_table_that_fits() -> None:
    lines = drawn(reached(0, trouble=LOST), reached(1, trouble=LOST), reached(2, missing="it is gone"))
    assert max(map(len, lines)) <= WIDTH
    text = " ".join(line.strip() for line in lines)
    assert f"partitions 0-1: the archive does not go on: {LOST}" in text
    assert "partition 2: the archive lacks what was in it: it is gone" in text


def test_programs_get_the_reason_of_each_partition() -> None:
    assert reaching([reached(0, trouble=LOST)]).document["partitions"][0]["trouble"] == LOST
