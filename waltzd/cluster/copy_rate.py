"""The bound on copying that a command of an operator sets: a document that goes away with what it was for.

For a move that is written down it lasts until the move has ended or was cancelled, also when the command is interrupted:
owners go on copying then. For anything else it is ephemeral, and ends with the command. The last one set counts.
"""

from __future__ import annotations

from contextlib import suppress

from waltzd.cluster.coordinator import Change, Coordinator, Create, Delete
from waltzd.cluster.document import decode, encode
from waltzd.cluster.meta import CopyRate
from waltzd.errors import ChangedMeanwhile, NodeExists

COPY_RATE = "/copy-rate"


async def read(coordinator: Coordinator) -> CopyRate | None:
    node = await coordinator.get(COPY_RATE)
    return None if node is None else decode(CopyRate, node.data, COPY_RATE)


async def write(coordinator: Coordinator, rate: CopyRate, *, lasts: bool = False) -> None:
    """For as long as this coordinator session lasts, or until another one sets it; one that `lasts`, until it is lifted."""
    while True:
        node = await coordinator.get(COPY_RATE)
        there: list[Change] = [] if node is None else [Delete(COPY_RATE, node.version)]
        try:
            await coordinator.commit([*there, Create(COPY_RATE, encode(rate), ephemeral=not lasts)])
        except ChangedMeanwhile as error:
            if node is None and not isinstance(error, NodeExists):
                raise  # there is no cluster any more
            continue  # it went, or somebody else has set it, at the same moment
        return


async def lift(coordinator: Coordinator) -> None:
    """No bound any more; it may have been lifted by somebody else, or another one set, at the same moment."""
    node = await coordinator.get(COPY_RATE)
    if node is not None:
        with suppress(ChangedMeanwhile):
            await coordinator.commit([Delete(COPY_RATE, node.version)])
