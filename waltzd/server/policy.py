"""Following the policy and the channels of the cluster: each valid version is in force as soon as it is noticed.

The last valid versions stay in force while the coordinator cannot be asked, and while one of the two documents is
invalid. A grant may name channels, so the two documents are used together or not at all. A server that has read none
since it started admits only operators. If the policy was deleted, every caller has all rights again. But if the document
of the cluster is missing as well, the policy was not deleted: the coordinator has lost its data, and the last policy
stays.
"""

from __future__ import annotations

import logging

from waltzd.cluster.cluster import Cluster, channels_document
from waltzd.cluster.documents import ChannelsDocument, PolicyDocument
from waltzd.errors.operations import BadMetadata
from waltzd.protocol.channels import NO_CHANNELS
from waltzd.protocol.policy import Policy
from waltzd.server.clients.authorizer import Authorizer
from waltzd.server.reconcile import Reconciler

log = logging.getLogger("waltz.server")


class PolicyFollower:
    def __init__(self, cluster: Cluster, authorizer: Authorizer) -> None:
        self._cluster = cluster
        self._authorizer = authorizer
        self._counts: tuple[PolicyDocument | None, ChannelsDocument] = None, ChannelsDocument(channels=NO_CHANNELS)
        self._has_read = False
        self.trouble = ""
        """Sentence that says why the newest documents are not in force; empty if they are."""
        self.reconciler = Reconciler("policy", wait=cluster.wait_for_policy, act=self.read)

    async def read(self) -> None:
        try:
            document, _ = await self._cluster.policy()
            channels, _ = await channels_document(self._cluster.coordinator)
        except BadMetadata as error:
            self._spoiled(error)
            return
        if document is None:
            await self._cluster.meta()
        if self.trouble:
            log.info("the policy can be read again")
        self.trouble = ""
        if (document, channels) != self._counts or not self._has_read:
            policy = None if document is None else Policy(document.grants, channels.channels)
            self._authorizer.adopt(policy, channels.channels, channels.keys)
            count = "there is none: everybody may do everything" if document is None else f"{len(document.grants)} grants"
            log.info("policy: %s; channels: %d", count, len(channels.channels))
        self._counts, self._has_read = (document, channels), True

    def _spoiled(self, error: BadMetadata) -> None:
        if error.message == self.trouble:
            return
        self.trouble = error.message
        self._authorizer.close(error.message)
        rest = "the last one stays in force" if self._authorizer.why_closed is None else "only operators are admitted"
        log.error("policy: %s %s; %s", error.code, error.message, rest, extra=error.facts)
