"""Many batches at a time against one batch at a time: the same end, the same entries, whatever was changed."""

from __future__ import annotations

import random
from typing import TypeAlias
from uuid import UUID

import numpy as np
import pytest

from tests.batches import batches_of, segment_raw
from tests.tiers import tiers
from waltzd.disk.simulated import SimDisk
from waltzd.format.batch import Batch, End
from waltzd.format.checksum import I64
from waltzd.format.footer import FooterBuilder
from waltzd.format.index import offsets_of
from waltzd.format.layout import HEADER_BYTES
from waltzd.format.record import Run
from waltzd.format.scan import Stop, scan_batches, scan_spans
from waltzd.format.span import BatchSpan

Looked: TypeAlias = tuple[Stop, list[I64], bytes]
"""Where it ended, the entries, and the footer."""


def drawn(random: random.Random) -> list[Batch]:
    """Mostly batches of one record, as a quiet log has them."""
    counts = [1 if random.random() < 0.7 else random.randint(2, 9) for _ in range(random.randint(1, 60))]
    return batches_of(
        [[random.randbytes(random.choice((0, 3, 40))) for _ in range(count)] for count in counts],
        first_id=5,
        locks=[
            [[(random.getrandbits(64), 2)] * random.randint(0, 2) for _ in range(count)] if random.random() < 0.5 else None
            for count in counts
        ],
        follows=[[False, *(random.random() < 0.5 for _ in range(count - 1))] for count in counts],
        cuts=[len(counts) - 1] if random.random() < 0.3 else (),
    )


def both(raw: bytes, *, before: End | None, bytes_max: int | None = None) -> tuple[Looked, Looked]:
    disk = SimDisk()
    disk.make_directory("/d")
    file = disk.create("/d/f")
    file.write(0, raw)
    one, many = FooterBuilder(raw[:HEADER_BYTES]), FooterBuilder(raw[:HEADER_BYTES])
    slow: list[I64] = []
    fast: list[I64] = []

    def on_run(offset: int, run: Run) -> None:
        slow.append(offsets_of(offset, run))

    def on_span(offset: int, span: BatchSpan, starts: I64) -> None:
        fast.append(span.entries(starts, offset))
        many.add_span(span)
        records = b"".join(bytes(raw[start + offset :][:40]) for start in starts.tolist())
        assert records  # each stands in the file
        run = span.run(starts)
        assert (run.first_id, run.last_id) == (span.first_id, span.next_id - 1)

    shared = {"next_id": 5, "offset": HEADER_BYTES, "end": len(raw), "before": before, "bytes_max": bytes_max}
    chunk = 700
    first = scan_batches(
        file,
        on_run=on_run,
        on_batch=lambda _, batch: one.add(batch.head, batch.pieces),
        chunk_bytes=chunk,
        **shared,  # type: ignore[arg-type]
    )
    second = scan_spans(file, on_span=on_span, chunk_bytes=chunk, **shared)  # type: ignore[arg-type]
    ends = [builder.footer(b"\0" * 32).encode() if slow else b"" for builder in (one, many)]
    return (first, slow, ends[0]), (second, fast, ends[1])


@pytest.mark.parametrize("seed", tiers(range(150), quick=20))
def test_they_agree(seed: int) -> None:
    chance = random.Random(seed)
    raw = bytearray(segment_raw(drawn(chance), key=UUID(int=5))[0])
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        raw[chance.randrange(HEADER_BYTES, len(raw))] ^= 1 << chance.randrange(8)
    if chance.random() < 0.3:
        del raw[chance.randrange(HEADER_BYTES, len(raw)) :]
    before = chance.choice((None, End(), End(crc=7)))
    (first, slow, one), (second, fast, many) = both(bytes(raw), before=before, bytes_max=chance.choice((None, None, 250)))
    assert second == first
    empty = np.zeros(0, np.int64)
    assert np.concatenate([empty, *fast]).tolist() == np.concatenate([empty, *slow]).tolist()
    assert many == one


def test_a_hint_is_checked() -> None:
    batches = batches_of([[b"a", b"bb"], [b"c"]], first_id=5)
    raw = memoryview(b"".join(piece for batch in batches for piece in batch.pieces))
    at = np.array([0, batches[0].size, len(raw)])
    right = BatchSpan(raw, at, None).starts()
    assert right is not None
    for wrong in (right + 1, right[:-1], right[::-1], np.zeros(3, np.int64), right - 200):
        found = BatchSpan(raw, at, None).starts(wrong)
        assert found is not None
        assert found.tolist() == right.tolist()
    found = BatchSpan(raw, at, None).starts(right)
    assert found is right
