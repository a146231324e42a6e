"""Applications in a simulation: they race for the same locks, and everything that they are told is written down."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from tests.checker.history import Memory, Standing
from tests.checker.recorder import Recorder
from tests.simulation.deciders import decide
from tests.simulation.loop import Life
from tests.simulation.machines import Machine, server_address
from tests.simulation.ports import SimServerPort
from tests.simulation.versions import takes_singles
from tests.workload import Attempt, GroupView, View
from waltzd.client.client import Client
from waltzd.client.settings import ClientSettings
from waltzd.errors import NotGranted, Superseded, WaltzError
from waltzd.protocol.locks import Committed
from waltzd.protocol.positions import Position
from waltzd.protocol.role import Identity, Role

if TYPE_CHECKING:
    from tests.simulation.world import Simulation


GROUP_MAX = 6
LAG_MAX = 40
"""Transactions by which a caller pretends to be behind, where locks are looked up."""
WITH_CERTIFICATES = {"instances", "policies", "quotas"}
"""Kinds of faults in which applications have names."""
HEADERS = 4
"""How many different ones transactions have, where groups have filters."""


class ClientMachine(Machine):
    """One application after the other, each with several callers; all callers race for the same locks."""

    world: Simulation

    def __init__(self, world: Simulation, name: str) -> None:
        super().__init__(world, name)
        self.committed = [0] * world.setup.partitions
        self.is_at_work = False
        self.client: Client | None = None
        self.certificate: str = f"app-{(int(name.rpartition('-')[2]) - 1) // 2}"
        """Two machines have the same name in it."""
        self._stood: dict[tuple[str, int], None] = {}
        self.tells_no_times: dict[tuple[str, int], None] = {}
        """Where it was refused because of a clock: by its name and partition."""

    def lie(self, seconds: float) -> None:
        """Its client passes on a time that no owner ever gave."""
        if self.client is not None:
            self.client._seen.time = self.world.latest_shown + round(seconds * 1e6)

    def check(self) -> None:
        """What is true of every mount of its client, whatever has happened."""
        if self.client is not None:
            for line in self.client._clients.values():
                line.check()
                if not line.mount.tells_time:
                    self.tells_no_times[f"{self.name}.{len(self.lives)}", line.partition] = None
            self._note_standing(self.client)

    def _note_standing(self, client: Client) -> None:
        """The first mount of this instance on a partition."""
        who, registration = f"{self.name}.{len(self.lives)}", client._registration
        for partition, line in client._clients.items():
            mounted = line.mount.mounted
            if registration is None or not registration.epoch or mounted is None or (who, partition) in self._stood:
                continue
            self._stood[who, partition] = None
            self.world.say(who, f"stands on partition {partition}, epoch {registration.epoch}, barrier {mounted.barrier}")
            self.world.history.standings.append(
                Standing(self.certificate, who, partition, registration.epoch, mounted.barrier)
            )

    async def _live(self, life: Life) -> None:
        self.is_at_work = True
        try:
            await self._race(life, f"{self.name}.{len(self.lives)}")
        except WaltzError as error:  # it could not begin
            if isinstance(error, Superseded) and not self.world.is_going_wrong:  # whoever runs it does what the error says
                self.is_wanted = False
            self.exits(life, f"gives up: {error.code} {error.message}")
            return
        except Exception as mistake:  # noqa: BLE001  any mistake ends the whole run
            self.world.mistake(mistake)
        self.is_at_work = False
        self.end("has ended")

    def end(self, why: str) -> None:
        if self.world.is_racing:
            self.is_at_work = False
        super().end(why)

    async def _race(self, life: Life, name: str) -> None:
        world = self.world
        writer = Memory(world.history, on_line=lambda line: world.say(name, line))
        faults = world.setup.faults
        recorder = Recorder(writer, name, clock=lambda: round(world.loop.now * 1e9))
        client = self.client = Client(
            [server_address(name) for name in world.servers],
            view=recorder.view(random.Random(f"{world.plan.seed} {name}").choice((View, GroupView))()),
            settings=ClientSettings(
                close_seconds=30,
                submit_seconds=60,
                call_seconds=3,
                apply_batch_max=3 if "groups" in faults else 1000,
                exclusive="instances" in faults,
            ),
            connect=lambda address, key: self._port(life, address, key),
        )
        async with client:
            callers = [self._caller(client, recorder, f"{name}.{number}") for number in range(world.setup.callers)]
            if "marks" in world.setup.faults:
                callers.append(self._asker(client, recorder, name))
            if world.deciders is not None:
                callers.append(decide(world, client, recorder, f"{name} decides"))
            await asyncio.gather(*callers)

    async def _asker(self, client: Client, recorder: Recorder, name: str) -> None:
        """Wants to know, again and again, how far the log goes."""
        world = self.world
        pick = random.Random(f"{world.plan.seed} {name} marks")
        while world.is_racing:
            try:
                partition, confirmed = pick.randrange(world.setup.partitions), pick.random() < 0.8
                await recorder.end_position(client, partition, confirmed=confirmed)
            except WaltzError as error:
                world.say(name, f"{error.code} {error.message}")
            await asyncio.sleep(pick.choice((0.02, 0.1, 0.5)) * pick.random())

    def _port(self, life: Life, address: str, key: UUID | None) -> SimServerPort:
        world, name = self.world, address.partition(":")[0]
        return SimServerPort(
            world.network,
            life,
            name,
            world.servers[name].serving,
            key=key,
            seconds=world.setup.storage_seconds,
            takes_singles=partial(takes_singles, world),
            identity=Identity(world.meta.key, Role.CLIENT, self.certificate).uri
            if WITH_CERTIFICATES & {*world.setup.faults}
            else "",
        )

    def _header(self, pick: random.Random) -> int:
        return pick.randrange(HEADERS) if "filters" in self.world.setup.faults else 0

    async def _caller(self, client: Client, recorder: Recorder, name: str) -> None:
        world, setup = self.world, self.world.setup
        pick = random.Random(f"{world.plan.seed} {name}")
        headers = random.Random(f"{world.plan.seed} {name} headers")
        lags = random.Random(f"{world.plan.seed} {name} lags")
        pause_seconds = setup.clients * setup.callers / setup.rate
        count = 0
        while world.is_racing:
            count += 1
            partition = pick.randrange(setup.partitions)
            size = pick.randrange(1, GROUP_MAX + 1) if "groups" in setup.faults and pick.random() < 0.5 else 0
            try:
                if size:
                    row = range(size)
                    members = [
                        Attempt(f"{name}:{n}", count, pick, partition, locks=setup.locks, header=self._header(headers))
                        for n in row
                    ]
                    outcome = await client.submit_atomic(recorder.group(members), fresh=False)
                elif lags.random() < 0.5 and "lookups" in setup.faults:
                    attempt = Attempt(name, count, pick, partition, locks=setup.locks, header=self._header(headers))
                    seen = client.position(partition)
                    position = Position(max(-1, seen - lags.randrange(LAG_MAX)), seen.timeline)
                    outcome = await recorder.append_behind(client, attempt, partition, position)
                else:
                    attempt = Attempt(name, count, pick, partition, locks=setup.locks, header=self._header(headers))
                    is_fresh = "marks" in setup.faults and pick.random() < 0.3
                    outcome = await client.submit(recorder.command(attempt, is_fresh=is_fresh), fresh=is_fresh)
            except (Superseded, NotGranted):  # it is not the one that lives any more, or has lost its grant, and ends
                raise
            except WaltzError as error:
                world.say(name, f"{error.code} {error.message}")
                await asyncio.sleep(0.05)
                continue
            if isinstance(outcome, Committed):
                self.committed[partition] += 1
                world.committed += outcome.count
            await asyncio.sleep(pick.choice((0.0, 1.0, 2.0, 3.0)) * pick.random() / 0.75 * pause_seconds)
