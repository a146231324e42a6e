"""Mutants of versions: who may join, and when the level is raised."""

from __future__ import annotations

from typing import Any

from tests.simulation import operators
from tests.simulation.mutant import BUSY, Aim, Patches, mutant
from waltzctl.shell.safety import Plan
from waltzd.protocol.level import THIS, Program
from waltzd.server.reconcile import VersionCheck
from waltzd.server.session.replicated_log import ReplicatedLog

MIXED = Aim(faults=("versions",), seconds=10.0, servers=2, storages=3, setup={**BUSY, "rate": 20.0})
"""Upgrades, and daemons that do not fit, without anything else that goes wrong."""


@mutant(3, 5, aim=MIXED)
def joins_a_cluster_of_a_newer_level(patches: Patches) -> None:
    """A server does not look at the level of the cluster when it starts."""
    patches.set(Program, "check_level", lambda self, level, path: None)


@mutant(1, 2, aim=MIXED)
def joins_without_a_second_look(patches: Patches) -> None:
    """A server looks at the others before it is in the list, and not afterwards."""

    def make(right: Any) -> Any:
        async def check_servers(self: VersionCheck) -> None:
            entry = await self._cluster.server(self._name)
            if entry is None or not entry.is_mine:
                await right(self)

        return check_servers

    patches.wrap(VersionCheck, "check_servers", make)


@mutant(5, 6, aim=MIXED)
def finalizes_while_an_old_daemon_is_up(patches: Patches) -> None:
    """The level is raised without a look at the versions that daemons report."""
    patches.set(
        operators,
        "finalize_plan",
        lambda found, program=THIS: Plan(verb="", subject="", steps=("raise it",) * (found.meta.level < program.level)),
    )


@mutant(2, 6, aim=MIXED)
def takes_an_old_storage_into_a_finalized_cluster(patches: Patches) -> None:
    """Owners look only at how far apart versions are, and not at the level."""
    patches.set(Program, "check_storage", lambda self, name, version, level: self._check_apart(f"storage {name}", version))


@mutant(2, 10, aim=MIXED)
def keeps_an_old_storage_when_the_level_rises(patches: Patches) -> None:
    """Owners look at the level only when a storage is opened: one that joined before the level rose stays."""
    patches.set(ReplicatedLog, "check_storages", lambda self, check: None)


@mutant(2, 11, aim=MIXED)
def works_with_any_version_of_a_storage(patches: Patches) -> None:
    """Owners look only at the level, and not at how far apart versions are."""
    right = Program.check_storage

    def check_storage(self: Program, name: str, version: str, level: int) -> None:
        if self.level_of(version) < level:
            right(self, name, version, level)

    patches.set(Program, "check_storage", check_storage)
