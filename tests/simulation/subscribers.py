"""A durable group in a simulation: machines on which its members run, an operator, and what has to be true of it."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from tests.checker.group_history import Changed, GroupHistory, Standing, Written
from tests.checker.group_verdict import judge_group
from tests.checker.history import FINAL
from tests.checker.verdict import Verdict
from tests.group_members import GOOD, Clock, GroupMemory, Habits, Member
from tests.simulation.loop import Life
from tests.simulation.machines import Machine, server_address
from tests.simulation.plan import Event, names
from tests.simulation.ports import SimServerPort
from waltzd.cluster.groups import GroupMeta
from waltzd.errors import WaltzError
from waltzd.protocol.groups import Change, Exhausted, GroupPlace, KeyedBy, Mode
from waltzd.protocol.role import Identity, Role
from waltzd.server.subscriptions.board import Board

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
        self._member = member
        self._group = group

    async def _live(self, life: Life) -> None:
        world = self.world
        members = [
            Member(
                self._member,
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
            )
            for partition in range(world.setup.partitions)
        ]
        try:
            await self._make(life)
            await asyncio.gather(*(member.run() for member in members))
        except Exception as mistake:  # noqa: BLE001  any mistake ends the whole run
            world.mistake(mistake)

    async def _make(self, life: Life) -> None:
        """By whichever server takes it; to make it again changes nothing."""
        while self._group.made_at is None:
            for name in self.world.servers:
                try:
                    async with asyncio.timeout(CHANGE_SECONDS):
                        made = await self._port(life, server_address(name)).make_group(self._group.meta)
                    self._group.made_at = made.made_at
                    break
                except (WaltzError, TimeoutError):
                    continue
            await asyncio.sleep(0.1)

    def _port(self, life: Life, address: str) -> SimServerPort:
        world, name = self.world, address.partition(":")[0]
        return SimServerPort(
            world.network,
            life,
            name,
            world.servers[name].serving,
            world.meta.key,
            seconds=world.setup.storage_seconds,
            identity=Identity(world.meta.key, Role.CLIENT, self._member).uri,
        )


class Subscribers:
    def __init__(self, world: Simulation) -> None:
        self.world = world
        pick = self.pick = random.Random(f"group {world.plan.seed}")
        self.meta = GroupMeta(
            name=GROUP,
            partitions=None,
            mode=Mode(world.setup.mode),
            ack_wait_ms=pick.choice((1000, 4000)),
            max_in_flight=pick.choice((1, 4, 20)),
            deliver_max=pick.choice((2, 4)),
            back_off_ms=pick.choice(((), (50,), (20, 500))),
            key=KeyedBy.LOCK if world.setup.format and "upgrade" not in world.setup.faults else KeyedBy.HEADER,
        )
        self.history = GroupHistory(
            self.meta.mode, room=self.meta.max_in_flight, deliver_max=self.meta.deliver_max, exhausted=Exhausted.PARK
        )
        self.clock = Clock(lambda: world.loop.now)
        self.notes = GroupMemory(self.history, lambda line: world.say("group", line))
        self.habits = Habits(hang_seconds=2 * self.meta.ack_wait_ms / 1000)
        machines = names("member", world.setup.members)
        shared = {machines[-1]: machines[0]} if len(machines) > 2 and pick.random() < 0.5 else {}
        self.machines = {name: MemberMachine(world, name, shared.get(name, name), self) for name in machines}
        self.made_at: int | None = None

    def start(self) -> None:
        for machine in self.machines.values():
            machine.start()

    def _boards(self) -> list[Board]:
        servers = (machine.server for machine in self.world.servers.values())
        return [server.groups for server in servers if server is not None and server.groups is not None]

    def _owner(self, partition: int) -> Board | None:
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

    def _place(self, partition: int) -> GroupPlace | None:
        board = self._owner(partition)
        if board is None or GROUP not in board.ledger.groups or board.damage is not None:
            return None
        return next((one for one in board.describe(GROUP)[0].places if one.partition == partition), None)

    # -- what happens to it

    def happen(self, event: Event) -> None:
        if event.what == "kill owner":
            for machine in self.world.servers.values():
                if machine.server is not None and self.world.setup.partitions in machine.server.owner.owned:
                    machine.kill()
                    self.world.loop.after(event.amount, None, machine.start)
            return
        partition = int(event.other)
        board, place = self._owner(partition), self._place(partition)
        if board is None or place is None or self.made_at is None:
            return
        parked = [one.id for one in board.parked(GROUP, partition, None, 1000)[0]]
        change = Changed(self.clock(), event.what, partition)
        if event.what in ("replay", "discard"):
            if not parked:
                return
            change.ids = tuple(self.pick.sample(parked, self.pick.randrange(1, len(parked) + 1)))
        else:
            change.up_to = min(max(-1, place.floor + round(40 * event.amount) - 30), place.reach)
        self.notes.changed(change)
        name = next(
            name for name, one in self.world.servers.items() if one.server is not None and one.server.groups is board
        )
        life = self.world.servers[name].life
        if life is not None:
            self.world.loop.run_in(life, self._change(board, change), f"an operator's {event.what}")

    async def _change(self, board: Board, change: Changed) -> None:
        assert self.made_at is not None
        try:
            done = await board.change(
                GROUP, self.made_at, change.partition, CHANGES[change.verb], change.ids or (change.up_to,)
            )
        except WaltzError as error:
            self.world.say("group", f"{change.verb} ends with: {error}")
            return
        change.returned, change.epoch = self.clock(), done.epoch
        self.world.say("group", f"{change.verb} is done in epoch {done.epoch}")

    # -- what has to be true

    def missing(self) -> str:
        if self.made_at is None:
            return "nobody takes the group"
        for partition, ids in self._written().items():
            place = self._place(partition)
            if place is None or place.floor < max(ids, default=-1) or place.unwritten:
                troubles = [f"{board.trouble}" for board in self._boards()]
                return f"partition {partition}: {place}, and the log reaches {max(ids, default=-1)}; {troubles}"
        for partition in range(self.world.setup.partitions):
            board, place = self._owner(partition), self._place(partition)
            if board is None or place is None:
                return f"partition {partition} has no owner"
            parked = {one.id: one.failures for one in board.parked(GROUP, partition, None, 1000)[0]}
            self.history.standings[partition] = Standing(place.floor, place.stopped, parked)
        return ""

    def _written(self) -> dict[int, dict[int, Any]]:
        return self.world.history.logs.get(FINAL, {})

    def judged(self) -> Verdict:
        for partition, ids in self._written().items():
            self.history.log[partition] = {id: Written(one.key, one.header, self._key(one)) for id, one in ids.items()}
        return judge_group(self.history)

    def _key(self, record: Any) -> str | None:
        if self.meta.key is KeyedBy.HEADER:
            return str(record.header)
        return str(record.locks[0][0]) if record.locks else None
