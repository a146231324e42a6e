"""A policy in a simulation: grants that are taken and given back, quotas that change, and what has to be true of them.

A *window* begins when every server that is up has adopted the newest document, and ends with the next one. What a client
asked for and was told within one window was decided under that document alone: a server that starts meanwhile lets nobody
in before it has read it. A *span* of a name is a row of windows between which no document granted it anything else.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.simulation.loop import Life
from tests.simulation.machines import ZOOKEEPER
from tests.simulation.plan import Event
from waltzd.cluster.cluster import POLICY
from waltzd.cluster.coordinator import Create, Set
from waltzd.cluster.documents import PolicyDocument
from waltzd.protocol.channels import NO_CHANNELS, NO_KEYS, Channels, KeyHash
from waltzd.protocol.document import encode
from waltzd.protocol.policy import NO_QUOTAS, Amount, Grant, Pattern, Policy, Quotas, Verb
from waltzd.server.clients.authorizer import Authorizer

if TYPE_CHECKING:
    from tests.simulation.world import Simulation

RATES = (5, 20)
"""Transactions that a name may append each second."""
FEED_RATES = (50, 200)
"""Bytes of deliveries that a member of a durable group may be given each second: less than its group has for it."""
ADOPTED_SECONDS = 1.0
"""A changed policy counts at a server within this time, if nothing happens to the server, ZooKeeper or the way there."""
QUIET_SECONDS = 2.0
"""A server that was away from ZooKeeper may need as long until it follows again."""
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
    document: int
    """The number of the newest document."""
    end: float | None = None
    """None: it goes on."""


class WatchedAuthorizer(Authorizer):
    """Tells a simulation when it has adopted a policy."""

    def __init__(self, policies: Policies) -> None:
        super().__init__()
        self.adopted: Policy | None = None
        self._policies = policies

    def adopt(self, policy: Policy | None, channels: Channels = NO_CHANNELS, keys: Mapping[str, KeyHash] = NO_KEYS) -> None:
        super().adopt(policy, channels, keys)
        self.adopted = policy
        self._policies.look()


class Policies:
    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.windows: list[Window] = []
        self._applications = list(dict.fromkeys(client.certificate for client in world.clients.values()))
        self._members: list[str] = []
        if world.subscribers is not None and "quotas" in world.setup.faults:
            self._members = list(dict.fromkeys(one.member for one in world.subscribers.machines.values()))
        self._granted = {name: Granted() for name in (*self._applications, *self._members)}
        self._pick = random.Random(f"policies {world.plan.seed}")
        self._member_pick = random.Random(f"quotas of members {world.plan.seed}")
        self._written: list[dict[str, Granted]] = []
        """What each document grants, in the order in which they were written."""
        self._disturbed: dict[str, float] = defaultdict(lambda: -QUIET_SECONDS)
        """When something last happened to each server, or to ZooKeeper."""

    def happen(self, event: Event) -> None:
        name = self._pick.choice(self._applications)
        known = self._granted[name]
        if event.what == "grant":
            self._granted[name] = replace(known, may_append=not known.may_append)
        else:
            rate = self._pick.choice((None, *map(Amount, RATES)))
            room = self._pick.choice((None, Amount(3000)))
            self._granted[name] = replace(known, quotas=Quotas(transactions_per_second=rate, inflight_bytes=room))
            if self._members:
                fed = self._member_pick.choice((None, *map(Amount, FEED_RATES)))
                self._granted[self._member_pick.choice(self._members)] = Granted(quotas=Quotas(bytes_per_second=fed))
        self.write()

    def note(self, event: Event) -> None:
        """Something goes wrong somewhere: a server that it touches may learn of a new policy later."""
        for name in (event.who, event.other):
            self._disturbed[name] = self.world.loop.now

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
        self._written.append(dict(self._granted))
        for name, machine in self.world.servers.items():
            if machine.life is not None and self.world.is_going_wrong and self._is_undisturbed(name, self.world.loop.now):
                self._judge_later(name, machine.life, len(self._written) - 1)

    def _is_undisturbed(self, name: str, at: float) -> bool:
        """Nothing is wrong with this server, and nothing has happened since some time before this moment."""
        world, machine = self.world, self.world.servers[name]
        last = max(self._disturbed[one] for one in (name, ZOOKEEPER))
        return (
            last + QUIET_SECONDS <= at
            and machine.life is not None
            and not machine.life.is_still
            and machine.server is not None
            and machine.server.authorizer.why_closed is None
            and world.zookeeper.hears(name)
            and not any(world.network.is_slow(one) for one in (name, ZOOKEEPER))
        )

    def _judge_later(self, name: str, life: Life, number: int) -> None:
        machine, begun = self.world.servers[name], self.world.loop.now

        def judge() -> None:
            if machine.life is life and machine.server is not None and self._is_undisturbed(name, begun):
                access, newer = machine.server.authorizer, self._written[number:]
                if not any(self._goes_by(access, granted) for granted in newer):
                    late = f"{name} does not go by the policy of {begun:.3f} after {ADOPTED_SECONDS:g} seconds"
                    self.world.mistake(AssertionError(late))

        self.world.loop.after(ADOPTED_SECONDS, None, judge)

    def look(self) -> None:
        """A window begins where no server goes by an older document."""
        if self.windows and self.windows[-1].end is None:
            return
        servers = [machine.server for machine in self.world.servers.values() if machine.server is not None]
        if all(self._goes_by(server.authorizer, self._granted) for server in servers):
            self.world.say("policy", "all servers have adopted it")
            self.windows.append(Window(self.world.loop.now, len(self._written) - 1))

    def _goes_by(self, authorizer: Authorizer, granted: dict[str, Granted]) -> bool:
        policy = authorizer.adopted if isinstance(authorizer, WatchedAuthorizer) else None
        if policy is None:
            return authorizer.why_closed is not None
        rights = {name: policy.rights_of(name) for name in granted}
        return all(
            rights[name].may_append(0) == one.may_append and rights[name].quotas == one.quotas
            for name, one in granted.items()
        )

    # -- what has to be true

    def check(self) -> None:
        """No transaction was taken without a grant, none beyond a quota, and nobody was given more than a quota allows."""
        for name in self._granted:
            for begin, end, granted in self._spans(name):
                self._check_taken(name, begin, end, granted)
                if granted.quotas.bytes_per_second is not None:
                    self._check_given(name, begin, end, granted.quotas.bytes_per_second)

    def _spans(self, name: str) -> list[tuple[float, float, Granted]]:
        """When its rights were always the same: from when, until when, and which."""
        found, last = list[tuple[float, float, Granted]](), 0
        for window in self.windows:
            end = self.world.loop.now if window.end is None else window.end
            granted = self._written[window.document][name]
            if found and all(one[name] == granted for one in self._written[last : window.document]):
                found[-1] = found[-1][0], end, granted
            else:
                found.append((window.begin, end, granted))
            last = window.document
        return found

    @property
    def _lives(self) -> int:
        """Each life of a server counts for itself."""
        return sum(len(server.lives) for server in self.world.servers.values())

    def _check_taken(self, name: str, begin: float, end: float, granted: Granted) -> None:
        machines = {machine: client.certificate for machine, client in self.world.clients.items()}
        taken = 0
        for one in self.world.history.operations:
            is_within = one.returned is not None and begin < one.invoked / 1e9 and one.returned / 1e9 < end
            taken += is_within and one.kind == "committed" and machines[one.client.partition(".")[0]] == name
        assert granted.may_append or not taken, (
            f"{taken} transactions of {name} were taken from {begin:.3f} to {end:.3f} without a grant"
        )
        rate = granted.quotas.transactions_per_second
        most = None if rate is None else self._lives * (rate * (end - begin + 1) + BATCH_MAX * len(machines))
        assert most is None or taken <= most, (
            f"{taken} transactions of {name} were taken from {begin:.3f} to {end:.3f}, not {most}"
        )

    def _check_given(self, name: str, begin: float, end: float, rate: int) -> None:
        """What fills the room of a member may come at once on credit, and may be on its way when a quota begins."""
        group = self.world.subscribers
        assert group is not None
        partitions = self.world.setup.partitions
        machines = [machine for machine, one in group.machines.items() if one.member == name]
        given = [one for one in group.history.delivered if one.holder.partition("@")[0] == name]
        sizes = [one.size for one in given if begin < one.at / 1e9 < end]
        room = group.meta.max_in_flight * max((one.size for one in given), default=0)
        most = self._lives * (rate * (1 + self.world.setup.drift) * (end - begin + 1) + room)
        most += len(machines) * partitions * room
        assert sum(sizes) <= most, f"{sum(sizes)} bytes were given to {name} from {begin:.3f} to {end:.3f}, not {most:.0f}"
