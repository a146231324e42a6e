"""Mutants of a rescue: what an operator's tool takes for proven, and whom it fences."""

from __future__ import annotations

from typing import Any

from tests.simulation.mutant import BUSIER, Aim, Patches, mutant
from waltzctl.placement.proof import Scene
from waltzd.protocol.quorum import EMPTY
from waltzd.storage.calls import StorageCalls

RESCUED = Aim(faults=("rescue",), seconds=5.0, storages=3, setup=BUSIER)
"""Nothing else goes wrong, so what is lost was lost by a rescue."""


@mutant(12, aim=RESCUED)
def rescues_what_the_shortest_copy_holds(patches: Patches) -> None:
    """The log goes on where all copies at hand agree."""

    def mark(self: Scene) -> int:
        return min((self.proven(name) for name in self.statuses), default=EMPTY)

    patches.set(Scene, "mark", property(mark))


@mutant(7, aim=RESCUED)
def rescues_without_fencing(patches: Patches) -> None:
    """Storages answer an operator how they are, and go on to take what the owner sends."""

    async def fence(self: StorageCalls, number: int, session: int) -> Any:
        return self.directory.partition(number).status()

    patches.set(StorageCalls, "fence", fence)
