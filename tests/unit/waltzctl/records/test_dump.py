"""Batches and footers in each form of a dump, whole."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from tests.unit.waltzd.storage.offline.small import IDX6, SEG0, SEG3, SEG6, mixed
from waltzctl.records import dump as shown
from waltzd.disk.simulated import SimDisk
from waltzd.storage.offline.dump import dump

TABLE = """\
segment s/0/0000000000000000006.seg, 612 bytes
  created_ms   1700000002000 (2023-11-14 22:13:22 UTC)
  key          00112233-4455-6677-8899-aabbccddeeff
  partition    0
  first_id     6
  format       1
    offset       id         request      header   length  payload
-- batch: bytes 128 to 289 (162 bytes), id 6
   2023-11-14T22:13:22.000000Z, session 4, generation 1, committed 5, 2 locks
       246        6         9:0:0:6           0        4  last
               read 0000000000000007
             append 0000000000000008
-- batch: bytes 290 to 471 (182 bytes), ids 7 to 8
   2023-11-14T22:13:23.000000Z, session 4, generation 1, committed 6,
   group 7-8, last of its segment
       387        7         9:0:0:7           0        2  of
       429        8         9:0:0:8           0        3  all
-- footer: bytes 472 to 611 (140 bytes), 2 batches, ids 6 to 8
   from 2023-11-14T22:13:22.000000Z to 2023-11-14T22:13:23.000000Z
   SHA-256 5006904d1d8e461cd21576dca40eac1c61a83c3040349122215d0f35c3d323d2
   before  ac23b02d8d0c45c568558cdb6502f15f67971ae69df0811d4ab40dada026c8ea
"""
HEX = """\
-- damaged: bytes 128 to 289 (162 bytes), id 6
   batch at id 6: byte 140 is 0x21, a sound batch has 0x00
       128  57 5a 42 31                magic
       132  00 00 00 a2                bytes in all 162
       136  00 00 00 00>21<00 00 06  ....!...  first id 553648134  <- bad byte
       144  00 00 00 01                records 1
"""


def told(capsys: pytest.CaptureFixture[str], disk: SimDisk, path: str, output: str, **ids: int) -> str:
    dump(disk, path, shown.sink(output, None), **ids)
    return capsys.readouterr().out


def objects(capsys: pytest.CaptureFixture[str], disk: SimDisk, path: str, **ids: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told(capsys, disk, path, "json", **ids).splitlines()]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, mixed(), SEG6, "table") == TABLE
    some = told(capsys, mixed(), SEG6, "table", first_id=8, last_id=8)
    assert some.splitlines()[7:] == [line for line in TABLE.splitlines()[12:17] if not line.startswith("       387")]


def test_a_wrong_byte_of_a_head_is_shown_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    disk = mixed()
    disk.corrupt(SEG6, 140, b"!")
    assert HEX in told(capsys, disk, SEG6, "hex")


def test_all_bytes_are_in_the_hex(capsys: pytest.CaptureFixture[str]) -> None:
    disk = mixed()
    shown_bytes = bytearray()
    for line in told(capsys, disk, SEG6, "hex").splitlines():
        if line[:10].strip().isdigit():
            assert int(line[:10]) == len(shown_bytes)
            shown_bytes += bytes.fromhex("".join(line[11:59].split("  ")[0]))
    assert shown_bytes == disk.content(SEG6)


def test_objects_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(capsys, mixed(), SEG6)
    assert [one["kind"] for one in found] == ["segment", "batch", "record", "batch", "record", "record", "footer"]
    assert (found[0]["version"], found[0]["format"]) == (1, 1)
    assert found[1] | {"time": "2023-11-14T22:13:22.000000Z", "session": 4, "committed": 5, "locks": 2} == found[1]
    assert found[2]["locks"] == [
        {"mode": "read", "lock": "0000000000000007"}, {"mode": "append", "lock": "0000000000000008"}
    ]  # fmt: skip
    assert found[3]["groups"] == [{"first_id": 7, "last_id": 8}]
    assert [one["group"] for one in found if one["kind"] == "record"] == [6, 7, 7]
    assert found[-1]["batches"] == [128, 290]
    rows = list(csv.DictReader(io.StringIO(told(capsys, mixed(), SEG6, "csv"))))
    assert [row["kind"] for row in rows] == [one["kind"] for one in found[1:]]
    assert objects(capsys, mixed(), SEG0)[1].keys().isdisjoint({"time", "locks", "group"})


def test_what_is_no_footer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    disk = mixed()
    disk.corrupt(SEG3, len(disk.content(SEG3)) - 1, b"!")
    assert "-- no valid footer: bytes 458 to 597 (140 bytes), where one belongs" in told(capsys, disk, SEG3, "table")
    assert objects(capsys, disk, SEG3)[-1]["is_sound"] is False


def test_an_index_of_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\n       136            7          387  in the batch at 290\n" in told(capsys, mixed(), IDX6, "table")
    assert [one.get("batch_at") for one in objects(capsys, mixed(), IDX6)[1:]] == [128, 290, 290]
