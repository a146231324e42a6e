"""Many batches at a time against one batch at a time: the same end, the same entries, whatever was changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias
from uuid import UUID

import numpy as np

from tests.batches import batches_of, segment_raw
from tests.tiers import together
from waltzd.disk.simulated import SimDisk
from waltzd.format.batch import Batch, End, Head, batch_at, why_wrong
from waltzd.format.checksum import I64
from waltzd.format.footer import FooterBuilder
from waltzd.format.index import offsets_of
from waltzd.format.layout import BATCHES, HEADER_BYTES, NO_MARK
from waltzd.format.scan import Stop, scan
from waltzd.format.span import BatchSpan, Span

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


def one_by_one(raw: bytes, before: End | None, bytes_max: int | None, on_batch: Callable[[int, Batch], None]) -> Stop:
    """The dumb twin of `scan` in format 1."""
    offset, next_id, committed, is_sealed = HEADER_BYTES, 5, NO_MARK, False
    while not is_sealed:
        head = Head.decode(raw, offset)
        if head is None or head.first_id != next_id or head.size > min(len(raw) - offset, bytes_max or len(raw)):
            break
        batch = batch_at(memoryview(raw)[offset : offset + head.size], head)
        if batch is None or why_wrong(batch, before, deeply=False):
            break
        on_batch(offset, batch)
        offset, next_id, is_sealed = offset + head.size, next_id + head.records, head.is_last
        committed = max(committed, head.committed)
        before = End(crc=head.crc, time=head.time, segment_bytes=0 if is_sealed else offset)
    return Stop(offset, next_id, before, is_sealed, committed)


def both(raw: bytes, *, before: End | None, bytes_max: int | None = None) -> tuple[Looked, Looked]:
    disk = SimDisk()
    disk.make_directory("/d")
    file = disk.create("/d/f")
    file.write(0, raw)
    one, many = FooterBuilder(raw[:HEADER_BYTES]), FooterBuilder(raw[:HEADER_BYTES])
    slow: list[I64] = []
    fast: list[I64] = []

    def on_batch(offset: int, batch: Batch) -> None:
        slow.append(offsets_of(offset + batch.head.lead, batch.run))
        one.add(batch.head, batch.pieces)
        seen.append((offset, batch))

    def on_span(span: Span) -> None:
        assert isinstance(span, BatchSpan)
        fast.append(span.entries)
        many.add_span(span)
        run = span.run
        assert (run.first_id, run.last_id) == (span.first_id, span.next_id - 1)
        for number, (offset, batch) in enumerate(span.batches(), len(again)):
            want_offset, want = seen[number]
            assert (offset, batch.head) == (want_offset, want.head)
            assert batch.is_same_as(want)
            assert batch.run.bounds.tolist() == want.run.bounds.tolist()
            again.append(offset)

    again: list[int] = []
    seen: list[tuple[int, Batch]] = []
    first = one_by_one(raw, before, bytes_max, on_batch)
    second = scan(
        file, segment_first_id=5, next_id=5, offset=HEADER_BYTES, end=len(raw), version=BATCHES, before=before,
        on_span=on_span, chunk_bytes=700, bytes_max=bytes_max,
    )  # fmt: skip
    assert again == [offset for offset, _ in seen]
    ends = [builder.footer(b"\0" * 32).encode() if slow else b"" for builder in (one, many)]
    return (first, slow, ends[0]), (second, fast, ends[1])


@together("seed", range(150), quick=20)
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
    span = BatchSpan(raw, at, None)
    assert span.find_starts()
    right = span.starts
    for wrong in (right + 1, right[:-1], right[::-1], np.zeros(3, np.int64), right - 200):
        span = BatchSpan(raw, at, None)
        assert span.find_starts(wrong)
        assert span.starts.tolist() == right.tolist()
    span = BatchSpan(raw, at, None)
    assert span.find_starts(right)
    assert span.starts is right
