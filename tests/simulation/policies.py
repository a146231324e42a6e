"""A policy in a simulation: grants that are taken and given back, quotas that change, and what has to be true of them.

A *window* begins when every server that is up has adopted the newest document, and ends with the next one. What a client
asked for and was told within one window was decided under that document alone: a server that starts meanwhile lets nobody
in before it has read it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.simulation.plan import Event
from waltzd.cluster.cluster import POLICY
from waltzd.cluster.coordinator import Create, Set
from waltzd.cluster.documents import PolicyDocument
from waltzd.protocol.channels import NO_CHANNELS, Channels
from waltzd.protocol.document import encode
from waltzd.protocol.policy import NO_QUOTAS, Amount, Grant, Pattern, Policy, Quotas, Verb
from waltzd.server.clients.authorizer import Authorizer

if TYPE_CHECKING:
    from tests.simulation.world import Simulation

RATES = (5, 20)
"""Transactions that a name may append each second."""
BATCH_MAX = 20
"""Transactions that callers of one machine have in flight: one batch may be taken on credit."""


@dataclass(frozen=True)
class Granted:
    """What one application may do."""

    may_append: bool = True
    quotas: Quotas = NO_QUOTAS


@dataclass
class Window:
    begin: float
    granted: dict[str, Granted]
    end: float | None = None
    """None: it goes on."""


class WatchedAuthorizer(Authorizer):
    """Tells a simulation when it has adopted a policy."""

    def __init__(self, policies: Policies) -> None:
        super().__init__()
        self.adopted: Policy | None = None
        self._policies = policies

    def adopt(self, policy: Policy | None, channels: Channels = NO_CHANNELS) -> None:
        super().adopt(policy, channels)
        self.adopted = policy
        self._policies.look()


class Policies:
    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.windows: list[Window] = []
        names = dict.fromkeys(client.certificate for client in world.clients.values())
        self._granted = {name: Granted() for name in names}
        self._pick = random.Random(f"policies {world.plan.seed}")

    def happen(self, event: Event) -> None:
        name = self._pick.choice(list(self._granted))
        known = self._granted[name]
        if event.what == "grant":
            self._granted[name] = replace(known, may_append=not known.may_append)
        else:
            rate = self._pick.choice((None, *map(Amount, RATES)))
            room = self._pick.choice((None, Amount(3000)))
            self._granted[name] = replace(known, quotas=Quotas(transactions_per_second=rate, inflight_bytes=room))
        self.write()

    def give_all(self) -> None:
        self._granted = {name: Granted() for name in self._granted}
        self.write()

    def write(self) -> None:
        """As an operator does: the whole document is another one."""
        self.world.say("policy", f"{self._granted}")
        if self.windows and self.windows[-1].end is None:
            self.windows[-1].end = self.world.loop.now
        everybody = Grant(names=(Pattern("*"),), may=(Verb.READ, Verb.SUBSCRIBE), groups=(Pattern("*"),))
        each = [
            Grant(
                names=(Pattern(name),),
                may=(Verb.APPEND,) if granted.may_append else (Verb.READ,),
                quotas=granted.quotas if granted.quotas != NO_QUOTAS else None,
            )
            for name, granted in self._granted.items()
        ]
        tree, data = self.world.zookeeper.tree, encode(PolicyDocument(grants=(everybody, *each)))
        there = tree.find(POLICY)
        tree.commit([Create(POLICY, data) if there is None else Set(POLICY, data, there.version)], 0)

    def look(self) -> None:
        """A window begins where no server goes by an older document."""
        if self.windows and self.windows[-1].end is None:
            return
        servers = [machine.server for machine in self.world.servers.values() if machine.server is not None]
        if all(self._is_newest(server.authorizer) for server in servers):
            self.world.say("policy", "all servers have adopted it")
            self.windows.append(Window(self.world.loop.now, dict(self._granted)))

    def _is_newest(self, authorizer: Authorizer) -> bool:
        policy = authorizer.adopted if isinstance(authorizer, WatchedAuthorizer) else None
        if policy is None:
            return authorizer.why_closed is not None
        rights = {name: policy.rights_of(name) for name in self._granted}
        return all(
            rights[name].may_append(0) == granted.may_append and rights[name].quotas == granted.quotas
            for name, granted in self._granted.items()
        )

    # -- what has to be true

    def check(self) -> None:
        """No transaction was taken without a grant, and none beyond a quota."""
        machines = {name: client.certificate for name, client in self.world.clients.items()}
        lives = sum(len(server.lives) for server in self.world.servers.values())
        for window in self.windows:
            end = self.world.loop.now if window.end is None else window.end
            taken = dict.fromkeys(self._granted, 0)
            for one in self.world.history.operations:
                is_within = one.returned is not None and window.begin < one.invoked / 1e9 and one.returned / 1e9 < end
                if is_within and one.kind == "committed":
                    taken[machines[one.client.partition(".")[0]]] += 1
            for name, granted in window.granted.items():
                rate = granted.quotas.transactions_per_second
                assert granted.may_append or not taken[name], (
                    f"{taken[name]} transactions of {name} were taken from {window.begin:.3f} to {end:.3f} without a grant"
                )
                most = None if rate is None else lives * (rate * (end - window.begin + 1) + BATCH_MAX * len(machines))
                assert most is None or taken[name] <= most, (
                    f"{taken[name]} transactions of {name} were taken from {window.begin:.3f} to {end:.3f}, not {most}"
                )
