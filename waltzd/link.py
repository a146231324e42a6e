"""The conversation between the owner of a partition and one replica: frames of records out, marks in.

`Link` is one two-way stream of frames. The daemons' logic is written against it, so that a simulated network, or another
transport, can stand in for the real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from waltzd.buffer import Buffer
from waltzd.errors import BadFrame, WaltzError
from waltzd.layout import ID_MAX
from waltzd.record import Run, bounds_of


@dataclass(frozen=True)
class Frame:
    """Records on their way to a replica, and what is known to be committed."""

    run: Run
    committed: int


class Link(Protocol):
    """One two-way stream: frames come in, marks go out."""

    async def receive(self) -> Frame | None:
        """The next frame, or None when the other side has no more."""
        ...

    async def send(self, durable_id: int) -> None: ...
    async def refuse(self, error: WaltzError) -> None:
        """The last message: why the stream ends."""
        ...


def run_of(first_id: int, lengths: Buffer, records: Buffer) -> Run:
    """The run that a frame says it carries; its checksums are checked by whoever uses it."""
    if len(lengths) % 4:
        raise BadFrame(f"the lengths of a frame have {len(lengths)} bytes, which is no multiple of 4")
    if first_id < 0:
        raise BadFrame(f"a frame starts at the id {first_id}; ids start at 0")
    bounds = bounds_of(np.frombuffer(lengths, ">u4").astype(np.int64))
    if bounds[-1] != len(records):
        raise BadFrame(
            f"a frame has {len(records)} bytes of records; {len(bounds) - 1} records of the lengths that it gives have "
            f"{bounds[-1]}"
        )
    if first_id + len(bounds) - 2 > ID_MAX:
        raise BadFrame(f"a frame of {len(bounds) - 1} records starts at the id {first_id}; {ID_MAX} is the highest id")
    return Run(first_id, memoryview(records), bounds)
