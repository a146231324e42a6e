"""The bound on copying that a command of an operator sets: an ephemeral document, which goes away with the command.

Whoever comes last is the one that counts: what a killed command left, until its session is over, is in nobody's way.
"""

from __future__ import annotations

from waltzd.coordinator import Change, Coordinator, Create, Delete
from waltzd.document import decode, encode
from waltzd.errors import ChangedMeanwhile, NodeExists
from waltzd.meta import CopyRate

COPY_RATE = "/copy-rate"


async def read(coordinator: Coordinator) -> CopyRate | None:
    node = await coordinator.get(COPY_RATE)
    return None if node is None else decode(CopyRate, node.data, COPY_RATE)


async def write(coordinator: Coordinator, rate: CopyRate) -> None:
    """For as long as this coordinator session lasts, or until another one sets it."""
    while True:
        node = await coordinator.get(COPY_RATE)
        there: list[Change] = [] if node is None else [Delete(COPY_RATE, node.version)]
        try:
            await coordinator.commit([*there, Create(COPY_RATE, encode(rate), ephemeral=True)])
        except ChangedMeanwhile as error:
            if node is None and not isinstance(error, NodeExists):
                raise  # there is no cluster any more
            continue  # it went, or somebody else has set it, at the same moment
        return
