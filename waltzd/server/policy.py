"""The policy and the channels of the cluster, followed: each version that can be understood counts from the moment at which
it is noticed.

The last good ones stay while the coordinator cannot be asked, and while one of the two documents cannot be understood: a
grant may speak of channels, so neither counts without the other. A server that
has read none since it started lets nobody in but operators. A document that was taken away is a policy, too: everybody may
do everything again. Where the document of the cluster is missing as well, nobody took the policy away: the coordinator has
lost its data, and the last one stays.
"""

from __future__ import annotations

import logging

from waltzd.cluster.cluster import Cluster, channels_of
from waltzd.cluster.documents import PolicyDocument
from waltzd.errors import BadMetadata
from waltzd.protocol.channels import NO_CHANNELS, Channels
from waltzd.protocol.policy import Policy
from waltzd.server.clients.authorizer import Authorizer
from waltzd.server.reconcile import Reconciler

log = logging.getLogger("waltz.server")


class PolicyFollower:
    def __init__(self, cluster: Cluster, authorizer: Authorizer) -> None:
        self._cluster = cluster
        self._authorizer = authorizer
        self._counts: tuple[PolicyDocument | None, Channels] = None, NO_CHANNELS
        self._has_read = False
        self.trouble = ""
        """Why the newest documents do not count, in one sentence."""
        self.reconciler = Reconciler("policy", wait=cluster.wait_for_policy, act=self.read)

    async def read(self) -> None:
        try:
            document, _ = await self._cluster.policy()
            channels, _ = await channels_of(self._cluster.coordinator)
        except BadMetadata as error:
            self._spoiled(error)
            return
        if document is None:
            await self._cluster.meta()
        if self.trouble:
            log.info("the policy can be read again")
        self.trouble = ""
        if (document, channels) != self._counts or not self._has_read:
            self._authorizer.adopt(None if document is None else Policy(document.grants, channels), channels)
            count = "there is none: everybody may do everything" if document is None else f"{len(document.grants)} grants"
            log.info("policy: %s; channels: %d", count, len(channels))
        self._counts, self._has_read = (document, channels), True

    def _spoiled(self, error: BadMetadata) -> None:
        if error.message == self.trouble:
            return
        self.trouble = error.message
        self._authorizer.close(error.message)
        rest = "the one before stays" if self._authorizer.why_closed is None else "nobody but operators is let in"
        log.error("policy: %s %s; %s", error.code, error.message, rest, extra=error.facts)
