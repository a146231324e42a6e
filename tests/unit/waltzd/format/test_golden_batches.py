"""The bytes of a batch, of a footer and of index entries, as docs/format.md and tests/golden/format say them."""

from __future__ import annotations

import re

import numpy as np

from tests.batches import APPEND, READ, WRITE, header_of, index_raw, lock_columns, segment_raw
from tests.unit.waltzd.format.test_layout import GOLDEN, KEY, golden
from waltzd.format.batch import Batch, End, encode_batch, parse_batches, why_wrong
from waltzd.format.footer import Footer
from waltzd.format.layout import HEADER_BYTES
from waltzd.format.record import Run, walk

LOCKS = lock_columns(
    [[(0x0102030405060708, WRITE)], [], [(0xA0A1A2A3A4A5A6A7, READ), (0xB0B1B2B3B4B5B6B7, APPEND)]],
)


def batch() -> Batch:
    records = golden("record.hex")
    return encode_batch(
        Run(0, memoryview(records), walk(records)),
        session=8,
        generation=2,
        committed=-1,
        time=1_700_000_000_000_123,
        before=End(),
        locks=LOCKS,
        follows=np.array([False, False, True]),
        segment_bytes_max=0,
    )


def test_a_batch() -> None:
    assert b"".join(batch().pieces) == golden("batch.hex")
    [found] = parse_batches(golden("batch.hex"))
    assert why_wrong(found, End()) == ""
    assert (found.head.time, found.head.session, found.head.is_last) == (1_700_000_000_000_123, 8, True)
    assert found.locks.modes.tolist() == [WRITE, READ, APPEND]
    assert found.run.follows is not None
    assert found.run.follows.tolist() == [False, False, True]


def test_a_footer_and_the_segment_in_front_of_it() -> None:
    content, hash_ = segment_raw([batch()], key=KEY, partition=1)
    header = header_of([batch()], key=KEY, partition=1)
    assert header.created_ms == 1_700_000_000_000
    assert content == header.encode() + golden("batch.hex") + golden("footer.hex")
    found = Footer.decode(golden("footer.hex"))
    assert found is not None
    assert (found.batches.tolist(), found.hash) == ([HEADER_BYTES], hash_)


def test_index_entries() -> None:
    assert index_raw([batch()], key=KEY, partition=1)[HEADER_BYTES:] == golden("batch-index.hex")


def test_the_examples_in_the_document() -> None:
    document = (GOLDEN.parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(0000  .*?)^```", document, re.MULTILINE | re.DOTALL)
    shown = [
        bytes.fromhex("".join(re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]+ ?)+)", block, re.MULTILINE))) for block in blocks
    ]
    assert shown == [
        golden("record.hex")[:45], golden("batch.hex")[:126], golden("footer.hex"), golden("batch-index.hex"),
    ]  # fmt: skip
