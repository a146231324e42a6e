"""A policy that speaks of channels, which another operator changes while a person is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import pytest

from tests.unit.typed_command import typed_command
from waltzctl.config import policy as command
from waltzctl.shell.progress import unreported
from waltzd.cluster.cluster import Cluster, channels_document, save_channels
from waltzd.cluster.documents import ChannelsDocument, ClusterMeta
from waltzd.cluster.memory import MemoryTree
from waltzd.errors.operations import ChangedMeanwhile
from waltzd.protocol.channels import Ranges

META = ClusterMeta(name="trial", key=UUID(int=7), partitions=4, created="2026-01-01")
POLICY = """
grants: [{names: [eve], may: [read], partitions: orders}]
expect: [{name: eve, may_not: read, partition: 3}]
"""


@pytest.mark.parametrize("after", ["0-1", "0-3", None])
def test_a_policy_is_saved_with_the_channels_that_it_was_checked_with(after: str | None, tmp_path: Path) -> None:
    """Its expectations hold for these, and a channel of which it speaks cannot be deleted any more."""
    file, typed = tmp_path / "policy.yml", typed_command()
    file.write_text(POLICY)
    command._set(file, typed)

    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)

        async def change(ranges: str | None) -> None:
            channels = {} if ranges is None else {"orders": Ranges(ranges)}
            before, version = await channels_document(cluster.coordinator)
            if before.channels != channels:
                document = ChannelsDocument(channels=channels)
                await save_channels(cluster.coordinator, document, version, policy=await cluster.policy_version())

        await change("0-1")
        planned = await typed.prepare(cluster)
        await change(after)
        if after == "0-1":
            await planned.do(cluster, unreported)
            assert (await cluster.policy())[0] is not None
            return
        with pytest.raises(ChangedMeanwhile):
            await planned.do(cluster, unreported)
        assert (await cluster.policy())[0] is None

    asyncio.run(work())
