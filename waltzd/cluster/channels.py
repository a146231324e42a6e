"""The document in ZooKeeper that holds the channels of a cluster, changed by compare-and-set."""

from __future__ import annotations

from waltzd.cluster.cluster import CHANNELS, NO_VERSION, POLICY, put, untouched
from waltzd.cluster.coordinator import Coordinator
from waltzd.cluster.documents import ChannelsDocument
from waltzd.protocol.channels import NO_CHANNELS, Channels
from waltzd.protocol.document import decode, encode


async def channels_of(coordinator: Coordinator) -> tuple[Channels, int]:
    """Return the channels and the version of their document; no channels and `NO_VERSION` if there is no document."""
    node = await coordinator.get(CHANNELS)
    if node is None:
        return NO_CHANNELS, NO_VERSION
    return decode(ChannelsDocument, node.data, CHANNELS).channels, node.version


async def save_channels(coordinator: Coordinator, channels: Channels, version: int, *, policy: int) -> None:
    """Write the channels if their document has `version` and the policy has version `policy`: grants depend on both."""
    document = encode(ChannelsDocument(channels=channels))
    await coordinator.commit([*untouched(POLICY, policy), put(CHANNELS, document, version)])
