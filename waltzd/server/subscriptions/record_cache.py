"""Records that are being delivered, in decoded blocks. A block read for one member serves all, and its columns are
decoded once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

from waltzd.format.record import HEAD_BYTES, NO_TIME, OVERHEAD_BYTES, TRAILER_BYTES, HeadArray, Run, heads

CACHE_BYTES = 4 << 20
CACHE_BLOCKS_MIN = 8
"""Number of blocks that are kept whatever their size, because several members may wait for one each."""
BLOCK_COST_BYTES = 1 << 10
"""Memory of a block beside its records."""


class RecordBlock:
    """Consecutive records, with their heads as columns."""

    __slots__ = ("bounds", "first_id", "heads", "last_id", "run", "times")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.first_id, self.last_id = run.first_id, run.last_id
        self.heads: HeadArray = heads(run)
        self.bounds: list[int] = run.bounds.tolist()
        self.times: list[int] | None = None if run.times is None else run.times.tolist()

    def payload(self, id: int) -> memoryview:
        at = id - self.first_id
        return self.run.data[self.bounds[at] + HEAD_BYTES : self.bounds[at + 1] - TRAILER_BYTES]

    def length(self, id: int) -> int:
        at = id - self.first_id
        return self.bounds[at + 1] - self.bounds[at] - OVERHEAD_BYTES

    def time(self, id: int) -> int:
        return NO_TIME if self.times is None else self.times[id - self.first_id]

    @property
    def size(self) -> int:
        return len(self.run.data) + BLOCK_COST_BYTES


class RecordCache:
    """The blocks that were read last, bounded in bytes. Blocks may overlap."""

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[int, RecordBlock] = OrderedDict()
        """Blocks by first id, the newest last."""
        self._firsts: list[int] = []
        self._bytes = 0

    def put(self, block: RecordBlock) -> None:
        older = self._blocks.pop(block.first_id, None)
        if older is not None:
            self._bytes -= older.size
            if older.last_id > block.last_id:
                block = older
        self._blocks[block.first_id] = block
        self._bytes += block.size
        while self._bytes > self._bytes_max and len(self._blocks) > CACHE_BLOCKS_MIN:
            self._bytes -= self._blocks.popitem(last=False)[1].size
        self._firsts = sorted(self._blocks)

    def find(self, id: int) -> RecordBlock | None:
        at = bisect_right(self._firsts, id) - 1
        while at >= 0:
            block = self._blocks[self._firsts[at]]
            if block.last_id >= id:
                return block
            at -= 1
        return None
