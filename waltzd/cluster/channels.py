"""The channels of a cluster as the coordinator keeps them: one document, changed by its version."""

from __future__ import annotations

from waltzd.cluster.cluster import CHANNELS, NO_VERSION, POLICY, put, untouched
from waltzd.cluster.coordinator import Coordinator
from waltzd.cluster.documents import ChannelsDocument
from waltzd.protocol.channels import NO_CHANNELS, Channels
from waltzd.protocol.document import decode, encode


async def channels_of(coordinator: Coordinator) -> tuple[Channels, int]:
    """With the version of the document; none, and `NO_VERSION`, where there is no document."""
    node = await coordinator.get(CHANNELS)
    if node is None:
        return NO_CHANNELS, NO_VERSION
    return decode(ChannelsDocument, node.data, CHANNELS).channels, node.version


async def save_channels(coordinator: Coordinator, channels: Channels, version: int, *, policy: int) -> None:
    """Only if the document still has this version, and the policy this one: what a grant means hangs on both."""
    document = encode(ChannelsDocument(channels=channels))
    await coordinator.commit([*untouched(POLICY, policy), put(CHANNELS, document, version)])
