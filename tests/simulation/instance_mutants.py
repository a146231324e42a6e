"""Mutants of what keeps older instances of an application out: where a newer one has mounted, they get nothing in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.mutant import BUSIER, Aim, Patches, mutant
from tests.simulation.plan import Event, Plan, names
from waltzd.server.clients.pipeline import Pipeline
from waltzd.server.ownership import PartitionOwner

REPLACED = Aim(faults=("instances",), seconds=8.0, servers=2, setup={**BUSIER, "rate": 60.0})
"""An instance is paused, another one takes its place, and it wakes up."""
UNKNOWING = Aim(faults=("instances", "crash"), seconds=15.0, servers=2, setup={**BUSIER, "rate": 60.0})
"""And owners change."""


class _Unaware(Aim):
    """And the owner hears neither the coordinator nor any storage for a while, but clients: it is replaced, and does not
    know that."""

    def plan(self, seed: int) -> Plan:
        plan, owner = super().plan(seed), "server-1"
        others = ["zookeeper", *names("storage", plan.setup.storages)]
        ways = [way for other in others for way in ((owner, other), (other, owner))]
        cuts = [Event(at=2.0, what="cut", who=source, other=target) for source, target in ways]
        mends = [Event(at=8.0, what="mend", who=source, other=target) for source, target in ways]
        return replace(plan, events=(*cuts, *mends))


UNAWARE = _Unaware(
    faults=("instances",), seconds=10.0, storages=3, servers=2, setup={**BUSIER, "rate": 60.0, "keep_alive_seconds": 20.0}
)


@mutant(1, 0, aim=REPLACED)
def takes_what_an_older_instance_appends(patches: Patches) -> None:
    """A newer instance has mounted the partition, and the mounts of older ones stay."""

    def displace_older(self: Pipeline, name: str, epoch: int, *, all_of_them: bool = False) -> None:
        self._epochs[name] = max(epoch, self._epochs.get(name, 0))

    patches.set(Pipeline, "displace_older", displace_older)


@mutant(1, 0, aim=REPLACED)
def lets_an_older_instance_mount_again(patches: Patches) -> None:
    """An owner forgets that there was a newer one."""
    patches.set(Pipeline, "check_epoch", lambda self, name, epoch: None)


@mutant(1, aim=UNKNOWING)
def believes_the_first_instance_that_comes_to_a_new_owner(patches: Patches) -> None:
    """The coordinator is not asked which one is the newest."""

    async def newest_epoch(self: PartitionOwner, name: str) -> int:
        return 0

    patches.set(PartitionOwner, "newest_epoch", newest_epoch)


@mutant(1, 0, aim=UNAWARE)
def stands_at_an_owner_that_was_replaced(patches: Patches) -> None:
    """The storages are not asked whether the owner that has the mount is still one."""

    def make(right: Any) -> Any:
        async def confirm(self: Pipeline) -> None:
            return None

        return confirm

    patches.wrap(Pipeline, "confirm", make)
