"""A consumer group in a simulation: machines on which its members run, an operator, and what has to be true of it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.checker.group_history import Changed, GroupHistory, Standing, Written
from tests.checker.group_verdict import judge_group
from tests.checker.history import FINAL
from tests.checker.verdict import Verdict
from tests.group_members import GOOD, Clock, GroupMemory, Habits, Member
from tests.simulation.clients import HEADERS
from tests.simulation.loop import Life
from tests.simulation.machines import Machine, server_address
from tests.simulation.plan import Event, names
from tests.simulation.ports import SimServerPort
from waltzd.cluster.groups import GroupMeta
from waltzd.errors import NoSuchGroup, WaltzError
from waltzd.protocol.groups import RESET_DRAWS, Change, Exhausted, GroupPartitionStatus, KeyedBy, Mode, reset_epoch
from waltzd.protocol.role import Identity, Role
from waltzd.server.subscriptions.group_coordinator import GroupCoordinator

if TYPE_CHECKING:
    from tests.simulation.world import Simulation

GROUP = "simulated"
CHANGE_SECONDS = 5.0
CHANGES = {"replay": Change.REPLAY, "discard": Change.DISCARD, "skip": Change.SKIP, "reset": Change.RESET}


class MemberMachine(Machine):
    """One member in every partition. Two machines have the same name, so the later one displaces the earlier."""

    world: Simulation

    def __init__(self, world: Simulation, name: str, member: str, group: Subscribers) -> None:
        super().__init__(world, name)
        self.member: str = member
        self._group = group

    async def _live(self, life: Life) -> None:
        world = self.world
        members = [
            Member(
                self.member,
                GROUP,
                partition,
                key=world.meta.key,
                addresses=[server_address(name) for name in world.servers],
                connect=lambda address: self._port(life, address),
                notes=self._group.notes,
                clock=self._group.clock,
                pick=random.Random(f"{world.plan.seed} {self.name} {partition} {len(self.lives)}"),
                habits=lambda: self._group.habits if world.is_going_wrong else GOOD,
                life=f"@{self.name}.{len(self.lives)}",
                on_join=self._group.joined,
            )
            for partition in range(world.setup.partitions)
        ]
        try:
            await self._make(life)
            making = [self._make_again(life)] if "removals" in world.setup.faults else []
            await asyncio.gather(*(member.run() for member in members), *making)
        except Exception as mistake:  # noqa: BLE001  any mistake ends the whole run
            world.mistake(mistake)

    async def _make(self, life: Life) -> None:
        """By whichever server takes it; to make it again changes nothing."""
        while self._group.made_at is None:
            for name in self.world.servers:
                begun = self.world.loop.now
                try:
                    async with asyncio.timeout(CHANGE_SECONDS):
                        made = await self._port(life, server_address(name)).make_group(self._group.meta)
                    self._group.made(made.made_at, begun)
                    break
                except (WaltzError, TimeoutError):
                    continue
            await asyncio.sleep(0.1)

    async def _make_again(self, life: Life) -> None:
        """Whenever it was removed."""
        while True:
            await asyncio.sleep(0.1)
            self._group.go_on_removing()
            if self.world.loop.now >= self._group.gone_until:
                await self._make(life)

    def _port(self, life: Life, address: str) -> SimServerPort:
        world, name = self.world, address.partition(":")[0]
        return SimServerPort(
            world.network,
            life,
            name,
            world.servers[name].serving,
            world.meta.key,
            seconds=world.setup.storage_seconds,
            identity=Identity(world.meta.key, Role.CLIENT, self.member).uri,
        )


class Subscribers:
    def __init__(self, world: Simulation) -> None:
        self.world = world
        pick = self.pick = random.Random(f"group {world.plan.seed}")
        self.repeating = random.Random(f"repeating group {world.plan.seed}")
        self.meta = GroupMeta(
            name=GROUP,
            partitions=None,
            mode=Mode(world.setup.mode),
            ack_wait_ms=pick.choice((1000, 4000)),
            max_in_flight=pick.choice((1, 4, 20)),
            deliver_max=pick.choice((2, 4)),
            back_off_ms=pick.choice(((), (50,), (20, 500))),
            key=KeyedBy.LOCK if world.setup.format and "upgrade" not in world.setup.faults else KeyedBy.KIND,
            kinds=self._drawn_headers(),
        )
        self.history = GroupHistory(
            self.meta.mode,
            room=self.meta.max_in_flight,
            deliver_max=self.meta.deliver_max,
            exhausted=Exhausted.PARK,
            headers=self.meta.kinds,
        )
        self.clock = Clock(lambda: world.loop.now)
        self.notes = GroupMemory(self.history, lambda line: world.say("group", line))
        self.habits = Habits(hang_seconds=2 * self.meta.ack_wait_ms / 1000)
        machines = names("member", world.setup.members)
        shared = {machines[-1]: machines[0]} if len(machines) > 2 and pick.random() < 0.5 else {}
        self.machines = {name: MemberMachine(world, name, shared.get(name, name), self) for name in machines}
        self.made_at: int | None = None
        """Of the group that there is; None while there is none."""
        self.gone_until = 0.0
        """When a group that was removed may be made again."""
        self._removing: tuple[Life | None, float] | None = None
        """The server at which an operator removes it, and for how long it is to be gone. No server: none can yet."""
        self._gone: dict[int, float] = {}
        """When groups were removed, by the ids of the entries that made them."""
        self._joined: dict[str, int] = {}
        """Which group a holder has joined, by the id of the entry that made it."""
        self._changed_in: dict[int, int] = {}
        """Which group an operator has changed, by the place of the change in the history."""

    def _drawn_headers(self) -> tuple[int, ...]:
        pick = random.Random(f"headers {self.world.plan.seed}")
        if "filters" not in self.world.setup.faults:
            return ()
        return tuple(sorted(pick.sample(range(HEADERS), pick.choice((1, 2, HEADERS - 1)))))

    def made(self, made_at: int, begun: float) -> None:
        """By a request of this moment, whose answer may be older than the removal of the group."""
        if made_at in self._gone:
            assert self._gone[made_at] >= begun, f"the group of entry {made_at} was removed, and is there again"
        else:
            self.made_at = made_at

    def joined(self, holder: str, made_at: int) -> None:
        self._joined[holder] = made_at

    def start(self) -> None:
        for machine in self.machines.values():
            machine.start()

    def _coordinators(self) -> list[GroupCoordinator]:
        servers = (machine.server for machine in self.world.servers.values())
        return [server.groups for server in servers if server is not None and server.groups is not None]

    def _owner(self, partition: int) -> GroupCoordinator | None:
        for machine in self.world.servers.values():
            server = machine.server
            if (
                machine.is_up
                and server is not None
                and partition in server.owner.owned
                and machine.name not in self.world._lost
            ):
                return server.groups
        return None

    def _place(self, partition: int) -> GroupPartitionStatus | None:
        coordinator = self._owner(partition)
        if coordinator is None or GROUP not in coordinator.state_log.groups or coordinator.damage is not None:
            return None
        described = coordinator.describe(GROUP)[0]
        if described.made_at != self.made_at:
            return None
        return next((one for one in described.places if one.partition == partition), None)

    # -- what happens to it

    def happen(self, event: Event) -> None:
        if event.what == "kill owner":
            for machine in self.world.servers.values():
                if machine.server is not None and self.world.setup.partitions in machine.server.owner.owned:
                    machine.kill()
                    self.world.loop.after(event.amount, None, machine.start)
            return
        if event.what == "remove":
            if self.made_at is not None and self._removing is None:
                self._removing = None, event.amount
                self.go_on_removing()
            return
        partition = int(event.other)
        coordinator, place = self._owner(partition), self._place(partition)
        if coordinator is None or place is None or self.made_at is None:
            return
        parked = [one.id for one in coordinator.parked(GROUP, partition, None, 1000)[0]]
        change = Changed(self.clock(), event.what, partition)
        if event.what in ("replay", "discard"):
            if not parked:
                return
            change.ids = tuple(self.pick.sample(parked, self.pick.randrange(1, len(parked) + 1)))
        else:
            change.up_to = min(max(-1, place.floor + round(40 * event.amount) - 30), place.reach)
        self._changed_in[len(self.history.changed)] = self.made_at
        self.notes.changed(change)
        life = self._life_of(coordinator)
        if event.what == "reset" and "repeats" in self.world.setup.faults:
            epoch = reset_epoch(place.epoch, self.repeating.randrange(RESET_DRAWS))
            self._send_again(change, self.made_at, epoch, self.repeating.randrange(1, 5))
        elif life is not None:
            self.world.loop.run_in(life, self._change(coordinator, change), f"an operator's {event.what}")

    def _send_again(self, change: Changed, made_at: int, epoch: int, times: int) -> None:
        """Send a reset to whoever owns the partition, then again and again, as if each answer were lost."""
        coordinator = self._owner(change.partition)
        life = None if coordinator is None else self._life_of(coordinator)
        if coordinator is not None and life is not None and self.made_at == made_at:
            self.world.loop.run_in(life, self._change(coordinator, change, epoch), "an operator's reset")
        if times > 1 and self.world.is_going_wrong:
            pause = self.repeating.choice((0.0, 0.3, 1.0, 3.0))
            self.world.loop.after(pause, None, self._send_again, change, made_at, epoch, times - 1)

    def _life_of(self, coordinator: GroupCoordinator) -> Life | None:
        return next(
            machine.life
            for machine in self.world.servers.values()
            if machine.server is not None and machine.server.groups is coordinator
        )

    def go_on_removing(self) -> None:
        """By whichever server owns the first partition. Where it has ended, nobody knows whether it was done."""
        if self._removing is None or self.made_at is None:
            return
        life, seconds = self._removing
        if life is not None and not life.is_over:
            return
        coordinator = self._owner(0)
        life = None if coordinator is None else self._life_of(coordinator)
        self._removing = life, seconds
        if coordinator is not None and life is not None:
            self.world.loop.run_in(life, self._remove_at(coordinator, self.made_at, seconds), "an operator's removal")

    async def _remove_at(self, coordinator: GroupCoordinator, made_at: int, seconds: float) -> None:
        while True:
            try:
                await coordinator.remove(GROUP, made_at)
                break
            except NoSuchGroup:
                break
            except WaltzError as error:
                self.world.say("group", f"it is not removed yet: {error}")
                await asyncio.sleep(0.2)
        self._gone[made_at] = self.world.loop.now
        self.made_at, self._removing = None, None
        self.gone_until = self.world.loop.now + seconds
        self.world.say("group", f"{made_at} is removed")

    async def _change(self, coordinator: GroupCoordinator, change: Changed, epoch: int = 0) -> None:
        assert self.made_at is not None
        ids = change.ids or (change.up_to,)
        try:
            done = await coordinator.change(GROUP, self.made_at, change.partition, CHANGES[change.verb], ids, epoch)
        except WaltzError as error:
            self.world.say("group", f"{change.verb} ends with: {error}")
            return
        change.returned, change.epoch = self.clock(), epoch or done.epoch
        self.world.say("group", f"{change.verb} is done in epoch {done.epoch}")

    # -- what has to be true

    def missing(self) -> str:
        if self.made_at is None:
            return "nobody takes the group"
        for partition, ids in self._written().items():
            place = self._place(partition)
            if place is None or place.floor < max(ids, default=-1) or place.unwritten:
                troubles = [f"{coordinator.trouble}" for coordinator in self._coordinators()]
                return f"partition {partition}: {place}, and the log reaches {max(ids, default=-1)}; {troubles}"
        for partition in range(self.world.setup.partitions):
            coordinator, place = self._owner(partition), self._place(partition)
            if coordinator is None or place is None:
                return f"partition {partition} has no owner"
            parked = {one.id: one.failures for one in coordinator.parked(GROUP, partition, None, 1000)[0]}
            self.history.standings[partition] = Standing(place.floor, place.stopped, parked)
        return ""

    def _written(self) -> dict[int, dict[int, Any]]:
        return self.world.history.logs.get(FINAL, {})

    def judged(self) -> Verdict:
        for partition, ids in self._written().items():
            self.history.log[partition] = {id: Written(one.key, one.header, self._key(one)) for id, one in ids.items()}
        groups = sorted({*self._joined.values(), self.made_at or 0})
        verdicts = [judge_group(self._history_of(made_at)) for made_at in groups]
        return next((one for one in verdicts if not one.is_sound), verdicts[-1])

    def _history_of(self, made_at: int) -> GroupHistory:
        """Of one of the groups that had the name. Those that were removed have nothing to come to the end of."""
        history = self.history
        ended = {partition: Standing(-1, "it was removed", is_removed=True) for partition in history.log}
        return replace(
            history,
            delivered=[one for one in history.delivered if self._joined[one.holder] == made_at],
            said=[one for one in history.said if self._joined[one.holder] == made_at],
            changed=[one for place, one in enumerate(history.changed) if self._changed_in[place] == made_at],
            standings=history.standings if made_at == self.made_at else ended,
        )

    def _key(self, record: Any) -> str | None:
        if self.meta.key is KeyedBy.KIND:
            return str(record.header)
        return str(record.locks[0][0]) if record.locks else None
